"""A setting is stated once: everything that is made of its definition is there for each, and for one that is new."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta

from postdate import DelayedDelivery, MemoryStore
from postdate.config import PREFIX, SECTIONS, Address, definitions, keys, load_settings
from postdate.config.sections import Section
from postdate.errors import ConfigurationError
from postdate.ports.settings import Setting, Span, format_duration, settings_of
from postdate.wiring import build_delayed_delivery

PAGE = Path(__file__).parents[2] / "docs" / "cli" / "config.md"


def all_settings() -> Iterator[tuple[str, Setting]]:
    """Yield every setting with its key."""
    for section in SECTIONS:
        for name, each in definitions(section).items():
            yield f"{section}.{name}", each


def variable(key: str) -> str:
    """Return the variable of a setting."""
    return PREFIX + key.replace(".", "__").upper()


def example(setting: Setting) -> Any:
    """Return a value, as TOML has it, that is not the default."""
    if setting.name in {"address", "listen"}:
        return "azure-table://elsewhere" if setting.name == "address" else "127.0.0.1:7"
    if setting.choices:
        default = getattr(setting.default, "value", setting.default)
        return next(each for each in setting.choices if each != default)
    if setting.kind is bool:
        return not setting.default
    if setting.kind is timedelta:
        return "7s"
    if setting.is_list:
        return ["one", "two"]
    return 7 if setting.kind is int else "seven"


def as_text(value: Any) -> str:
    """Return a value as the environment has it."""
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(("key", "setting"), list(all_settings()), ids=[key for key, _ in all_settings()])
def test_every_setting_is_read_from_the_file_and_the_environment_and_is_shown(key, setting, own_folder):
    section, _, name = key.partition(".")
    value = example(setting)
    (own_folder / "postdate.toml").write_text(f"[{section}]\n{name} = {json.dumps(value)}\n")
    from_file = load_settings(None, {})
    (own_folder / "empty.toml").touch()
    from_environment = load_settings("empty.toml", {variable(key): as_text(value)})
    for settings, origin in ((from_file, "postdate.toml:2"), (from_environment, f"environment {variable(key)}")):
        shown = {row.key: row for row in settings.rows()}[key]
        assert (shown.value, shown.origin, shown.meaning) == (value, origin, setting.meaning)


@pytest.mark.parametrize(("key", "setting"), list(all_settings()), ids=[key for key, _ in all_settings()])
def test_every_setting_refuses_what_it_cannot_be_and_says_what_it_must_be(key, setting):
    wrong = "\0" if setting.kind in {str, Address} else "{}"
    if setting.name in {"schema", "table", "table_prefix", "exchange"}:
        wrong = "amq.x" if setting.name == "exchange" else " "
    with pytest.raises(ConfigurationError, match=rf"{key} must be .*environment {variable(key)}"):
        load_settings(None, {variable(key): wrong if not setting.is_list else "\0"})


def test_the_page_has_a_table_of_all_settings():
    """To bring the page up to date, put the table that this test prints into it."""
    rows = [f"| `{key}` | {_default(each)} | {each.meaning} |" for key, each in all_settings()]
    table = "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows, ""])
    if table not in PAGE.read_text(encoding="utf-8"):
        pytest.fail(f"{PAGE.name} must contain\n\n{table}", pytrace=False)


def _default(setting: Setting) -> str:
    if setting.default is None or setting.default == ():
        return f"can be {_listed(setting.choices)}" if setting.choices else ""
    default = setting.default
    text = format_duration(default) if isinstance(default, timedelta) else as_text(getattr(default, "value", default))
    others = [each for each in setting.choices if each != text]
    return f"`{text}`" + (f", or {_listed(others)}" if others else "")


def _listed(choices: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in choices)


# --- one that is new --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patient(DelayedDelivery):
    """A delayed delivery with a setting that nothing else in Postdate names."""

    patience: Annotated[timedelta, Span(), Meta(description="how long it waits")] = timedelta(seconds=5)


@pytest.fixture
def with_patience(monkeypatch):
    first, _ = SECTIONS["delayed_delivery"].kinds
    monkeypatch.setitem(SECTIONS, "delayed_delivery", Section((first, Patient)))


@pytest.mark.usefixtures("with_patience")
def test_a_new_field_of_delayed_delivery_is_a_setting_by_itself(own_folder, cli):
    assert "delayed_delivery.patience" in keys()
    (own_folder / "postdate.toml").write_text('[delayed_delivery]\npatience = "1m30s"\n')
    settings = load_settings(None, {})
    assert settings.delayed_delivery.patience == timedelta(seconds=90)
    assert Patient(MemoryStore(), **settings.delayed_delivery.of(Patient)).patience == timedelta(seconds=90)
    shown = {row["key"]: row for row in cli.ok("config", "show", "--json").json["settings"]}[
        "delayed_delivery.patience"
    ]
    assert shown == {
        "key": "delayed_delivery.patience",
        "value": "1m30s",
        "origin": "postdate.toml:2",
        "meaning": "how long it waits",
    }
    with pytest.raises(ConfigurationError, match=r"delayed_delivery\.patience must be a duration above zero"):
        load_settings(None, {"POSTDATE_DELAYED_DELIVERY__PATIENCE": "0"})
    with pytest.raises(ConfigurationError, match="patience must be a timedelta above zero, not 5"):
        Patient(MemoryStore(), patience=5)  # type: ignore[arg-type]


def test_the_settings_of_delayed_delivery_reach_it_whole(own_folder):
    names = settings_of(DelayedDelivery)
    values = {name: example(each) for name, each in names.items()} | {"retention": "2d"}  # a day at least
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    (own_folder / "postdate.toml").write_text("\n".join(["[delayed_delivery]", *lines]))
    settings = load_settings(None, {})
    made = build_delayed_delivery(settings, MemoryStore())
    assert {name: getattr(made, name) for name in names} == settings.delayed_delivery.of(DelayedDelivery)
    assert made != DelayedDelivery(made.store)
