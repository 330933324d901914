"""``postdate config``: which settings there are, and where each value comes from."""

from __future__ import annotations

from postdate.cli.command import Use, command, group

app = group("config", "Look at the settings.")


@command(app, "show")
def show(use: Use) -> None:
    """Show every setting, its value, and where that comes from. Secrets are hidden."""
    settings = use.settings()
    rows = list(settings.rows())

    def lines() -> None:
        from postdate.cli.output import print_table

        print_table(["setting", "value", "from"], [(row.key, _shown(row.value), row.origin) for row in rows])

    use.report({"file": None if settings.file is None else str(settings.file), "settings": rows}, lines)


def _shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()  # as TOML and JSON write it
        case list():
            return ", ".join(str(each) for each in value) or "-"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return str(value)
