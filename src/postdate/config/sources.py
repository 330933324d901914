"""Load settings from one TOML file, the environment, and options of the command line.

The environment overrides the file, and options override both.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from postdate.backends.registry import schemes_in_one_database
from postdate.config.addresses import Address, resolve_address
from postdate.config.sections import FOLLOWS, SECTIONS, Settings, definitions, keys, section_values
from postdate.config.values import FromText, read_value
from postdate.errors import ConfigurationError, UnknownSetting
from postdate.ports.settings import InvalidValue, Secret, Setting

DEFAULT_FILE: Final = "postdate.toml"
FILE_VARIABLE: Final = "POSTDATE_CONFIG"
PREFIX: Final = "POSTDATE_"
_SECTION_END: Final = "__"


@dataclass(frozen=True, slots=True)
class _SourcedValue:
    raw: Any
    origin: str


def load_settings(
    file: str | Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, str | None] | None = None,
    *,
    origin: str | None = None,
) -> Settings:
    """Return the settings. Each source overrides the one before: defaults, file, environment, options.

    Args:
        file: the file to read; ``None``: the one that ``POSTDATE_CONFIG`` names, or ``postdate.toml`` if it exists.
        environment: variables, such as ``POSTDATE_STORE__ADDRESS``.
        options: options of the command line, by key (``store.address``); ``None`` for an option that was not given.
        origin: the origin of the options, in words; by default their names on the command line.

    Raises:
        UnknownSetting: a key or section does not exist; the error says where, and suggests a similar one.
        ConfigurationError: a value has the wrong type or is out of range, or a file cannot be read.
    """
    path = _find_file(file, environment)
    values = {} if path is None else _read_file(path)
    values |= _read_environment(environment)
    for key, value in (options or {}).items():
        if value is not None:
            values[key] = _SourcedValue(FromText(value), origin or f"option --{key.partition('.')[0]}")
    _resolve_references(values, environment)
    _share_one_database(values)
    return _build(values, path)


def _find_file(option_path: str | Path | None, environment: Mapping[str, str]) -> Path | None:
    variable = environment.get(FILE_VARIABLE)
    if option_path is None and not variable:
        default = Path(DEFAULT_FILE)
        return default if default.exists() else None
    path, origin = (
        (Path(option_path), "option --config") if option_path is not None else (Path(variable or ""), FILE_VARIABLE)
    )
    if not path.is_file():
        raise ConfigurationError(f"there is no file {str(path)!r} ({origin}); name the TOML file with the settings")
    return path


def _read_file(path: Path) -> dict[str, _SourcedValue]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}; check its owner and mode") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    lines = _line_numbers(text)
    values: dict[str, _SourcedValue] = {}
    for section, table in tables.items():
        location = _location_text(path, lines.get(section))
        if section not in SECTIONS:
            raise UnknownSetting(_unknown_section(section, location))
        if not isinstance(table, dict):
            raise ConfigurationError(f"{section} must be a section, [{section}], not {table!r} ({location})")
        for name, raw in cast("dict[str, Any]", table).items():
            key = f"{section}.{name}"
            location = _location_text(path, lines.get(key))
            if name not in definitions(section):
                raise UnknownSetting(_unknown_key(key, f"setting {name!r} in section [{section}]", location))
            values[key] = _SourcedValue(raw, location)
    return values


_HEADER: Final = re.compile(r"\s*\[\s*([A-Za-z0-9_\-]+)\s*\]")
_ENTRY: Final = re.compile(r"\s*([A-Za-z0-9_\-]+(?:\s*\.\s*[A-Za-z0-9_\-]+)*)\s*=")


def _line_numbers(text: str) -> dict[str, int]:
    """Return the line number of each section and key.

    They are used in messages only; unusual TOML is not recognized.
    """
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = header[1]
            lines.setdefault(section, number)
        elif entry := _ENTRY.match(line):
            name = re.sub(r"\s", "", entry[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
    return lines


def _location_text(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}:{line}"


def _read_environment(environment: Mapping[str, str]) -> dict[str, _SourcedValue]:
    values: dict[str, _SourcedValue] = {}
    all_keys = keys()
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        section, separator, name = variable.removeprefix(PREFIX).lower().partition(_SECTION_END)
        if (key := f"{section}.{name}") in all_keys:
            values[key] = _SourcedValue(FromText(value), f"environment {variable}")
        elif separator or variable in {_variable(each).replace(_SECTION_END, "_") for each in all_keys}:
            raise UnknownSetting(_unknown_key(key, f"variable {variable}", "environment", format_key=_variable))
        # Other names are ignored: container platforms set variables such as POSTDATE_SERVICE_HOST.
    return values


def _variable(key: str) -> str:
    return PREFIX + key.replace(".", _SECTION_END).upper()


def _unknown_section(section: str, location: str) -> str:
    matches = difflib.get_close_matches(section, SECTIONS, n=1)
    hint = f"did you mean [{matches[0]}]?" if matches else f"there are {', '.join(f'[{name}]' for name in SECTIONS)}"
    return f"there is no section [{section}] ({location}); {hint}"


def _unknown_key(key: str, description: str, location: str, format_key: Callable[[str], str] = str) -> str:
    section, _, name = key.partition(".")
    all_keys = keys()
    section_keys = {each.partition(".")[2]: each for each in all_keys if each.startswith(f"{section}.")}
    matches = [section_keys[each] for each in difflib.get_close_matches(name, section_keys, n=1)]
    matches = matches or difflib.get_close_matches(key, all_keys, n=1, cutoff=0.75)
    if matches:
        hint = f"did you mean {format_key(matches[0])}?"
    else:
        hint = f"there are {', '.join(format_key(each) for each in section_keys.values() or all_keys)}"
    return f"there is no {description} ({location}); {hint}"


_STORE: Final = "store.address"
_TRANSPORT: Final = "transport.address"
_TIMEOUTS: Final = "timeout_manager.address"
_ADDRESSES: Final = tuple(f"{section}.address" for section, what in SECTIONS.items() if what.role is not None)


def _resolve_references(values: dict[str, _SourcedValue], environment: Mapping[str, str]) -> None:
    for key in _ADDRESSES:
        if key not in values or not isinstance(values[key].raw, str):
            continue
        origin = values[key].origin
        try:
            address = resolve_address(values[key].raw, environment)
        except ConfigurationError as error:
            raise ConfigurationError(f"{key} ({origin}): {error}") from error
        if address.reference is not None:
            values[key] = _SourcedValue(address, f"{address.reference}, {origin}")


def _share_one_database(values: dict[str, _SourcedValue]) -> None:
    """Put store and queues into one database if the address of only one is set, or only that of the timeouts."""
    match [key for key in (_STORE, _TRANSPORT) if key in values]:
        case [setting]:
            other = _TRANSPORT if setting == _STORE else _STORE
            schema, other_schema = (f"{each.partition('.')[0]}.schema" for each in (setting, other))
            if _share_database_of(values, setting, other) and schema in values and other_schema not in values:
                values[other_schema] = _SourcedValue(values[schema].raw, f"{FOLLOWS}{schema}, {values[schema].origin}")
        # The schema of the timeouts belongs to NServiceBus. It is not the schema of store and queues.
        case [] if _TIMEOUTS in values:
            _share_database_of(values, _TIMEOUTS, _STORE)
            _share_database_of(values, _TIMEOUTS, _TRANSPORT)
        case _:
            pass


def _share_database_of(values: dict[str, _SourcedValue], setting: str, follower: str) -> bool:
    """Put ``follower`` into the database of ``setting``, if that database can hold both. Return whether it can."""
    address = values[setting].raw
    if not isinstance(address, str):
        return False
    reference = address.reference if isinstance(address, Address) else None
    scheme, _, location = Address(address).partition(":")
    schemes = schemes_in_one_database(scheme)  # The store and the queues share transactions in one database.
    if schemes is None:
        return False
    follower_address = Address(f"{schemes[follower == _TRANSPORT]}:{location}", reference)
    values[follower] = _SourcedValue(follower_address, f"{FOLLOWS}{setting}, {values[setting].origin}")
    return True


def _build(values: Mapping[str, _SourcedValue], path: Path | None) -> Settings:
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        scheme = _scheme(section, values)
        section_settings = {
            name: _read(f"{section}.{name}", values[f"{section}.{name}"], each)
            for name, each in definitions(section, scheme).items()
            if f"{section}.{name}" in values
        }
        sections[section] = section_values(section, section_settings, scheme)
    return Settings(**sections, origins={key: value.origin for key, value in values.items()}, file=path)


def _scheme(section: str, values: Mapping[str, _SourcedValue]) -> str:
    """Return the scheme of a section's address, or of the store's address; empty without either."""
    for key in (f"{section}.address", _STORE):
        if key in values and isinstance(values[key].raw, str):
            return Address(values[key].raw).scheme
    return ""


def _read(key: str, value: _SourcedValue, setting: Setting) -> Any:
    try:
        return read_value(setting, value.raw)
    except InvalidValue as error:
        # The value of a reference may be a secret, so it is not shown.
        if isinstance(value.raw, Address) and value.raw.reference is not None:
            raise ConfigurationError(f"{key} {error}, not what is in {value.raw.reference} ({value.origin})") from None
        if setting.kind is Secret:
            raise ConfigurationError(f"{key} {error} ({value.origin})") from None
        raw = Address(value.raw).redacted_text if isinstance(value.raw, str) else value.raw
        as_in_toml = json.dumps(raw, default=str, ensure_ascii=False)
        raise ConfigurationError(f"{key} {error}, not {as_in_toml} ({value.origin})") from error
