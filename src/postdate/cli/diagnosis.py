"""``postdate doctor``, ``postdate version`` and ``postdate config``."""

from __future__ import annotations

import os
import platform
import sys

import anyio
import typer

import postdate
from postdate import operations
from postdate.cli.command import Use, command, create_group
from postdate.cli.output import escape_control_characters, print_pairs, print_table
from postdate.clock import SystemClock
from postdate.wiring import load_library_facts

app = typer.Typer(add_completion=False)
config = create_group("config", "Show the settings.")
app.add_typer(config)


@command(app, "doctor")
def doctor(use: Use) -> None:
    """Check this installation without changing anything, and say how to correct what is wrong."""
    diagnosis = anyio.run(operations.diagnose, use.settings(), os.environ, SystemClock())
    use.report(
        {"result": diagnosis.worst, "checks": diagnosis.checks},
        lambda: _print_checks(diagnosis),
        succeeded=diagnosis.worst is not operations.Verdict.FAIL,
    )


def _print_checks(diagnosis: operations.Diagnosis) -> None:
    for check in diagnosis.checks:
        print(f"{check.result.value:<5} {check.name:<16}{escape_control_characters(check.found)}")
        if check.mend:
            print(f"{'':<22}> {check.mend}")


@command(app, "version")
def version(use: Use) -> None:
    """Print the versions of Postdate, Python and SQLite."""
    main_library, *more = load_library_facts()
    versions = {
        "postdate": postdate.__version__,
        "schema": main_library.schema,
        "python": platform.python_version(),
        **{each.name: ".".join(str(part) for part in each.version) for each in (main_library, *more)},
        "platform": platform.platform(),
        "executable": sys.executable,
    }
    use.report(versions, lambda: print_pairs(versions))


@command(config, "show")
def show(use: Use) -> None:
    """Show every setting, its value, and where that comes from. Secrets are hidden."""
    settings = use.settings()
    rows = list(settings.rows())
    use.report(
        {"file": None if settings.file is None else str(settings.file), "settings": rows},
        lambda: print_table(
            ["setting", "value", "from"], [(row.key, _format_value(row.value), row.origin) for row in rows]
        ),
    )


def _format_value(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()  # TOML and JSON write it in the same way.
        case list():
            return ", ".join(str(each) for each in value) or "-"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return str(value)
