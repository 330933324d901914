"""Settings: one TOML file, the environment over it, options of the command line over both.

Every value remembers where it came from, so that a wrong one is found at once. Source: house-style.md, "Configuration";
names and defaults of specification 1.4.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from postdate.errors import ConfigurationError, InvalidMessage, InvalidTimestamp, UnknownSetting
from postdate.messages import DESTINATION_LIMIT, aware_utc, check_text
from postdate.ports import Recording, TransactionMode

DEFAULT_FILE: Final = "postdate.toml"
FILE_VARIABLE: Final = "POSTDATE_CONFIG"
PREFIX: Final = "POSTDATE_"
_SECTION_END: Final = "__"
_LONGEST_SUFFIX: Final = len(".timeouts")
_16_MIB: Final = 16 * 1024 * 1024

T = TypeVar("T")


# --- durations and instants as people write them -----------------------------------------------------------------


_UNIT_MICROSECONDS: Final = {
    "w": 604_800_000_000,
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
    "us": 1,
}
_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|us|[wdhms])")
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def parse_duration(text: str) -> timedelta:
    """Return the duration of a text such as ``30s``, ``1m30s``, ``2h``, ``1d12h``, ``250ms`` or a number of seconds.

    Raises:
        InvalidTimestamp: it is not such a text, or longer than a ``timedelta`` can be.
    """
    compact = text.strip().replace(" ", "").lower()
    if _NUMBER.fullmatch(compact):
        compact += "s"
    parts = _DURATION_PART.findall(compact)
    units = [unit for _, unit in parts]
    if not parts or "".join(number + unit for number, unit in parts) != compact or len(set(units)) < len(units):
        raise InvalidTimestamp(
            f"{text!r} is no duration; write a number with a unit (w d h m s ms us), as in 30s, 1m30s, 2h or 1d12h, "
            f"or a plain number of seconds"
        )
    microseconds = sum(Fraction(number) * _UNIT_MICROSECONDS[unit] for number, unit in parts)
    try:
        return timedelta(microseconds=int(microseconds))
    except OverflowError as error:
        raise InvalidTimestamp(f"the duration {text!r} is too long") from error


def format_duration(duration: timedelta) -> str:
    """Return the shortest text that :func:`parse_duration` reads back as ``duration``, which is not negative."""
    rest, text = duration // timedelta(microseconds=1), ""
    for unit, size in _UNIT_MICROSECONDS.items():
        if unit != "w" and rest >= size:
            count, rest = divmod(rest, size)
            text += f"{count}{unit}"
    return text or "0s"


def parse_instant(text: str) -> datetime:
    """Return the UTC instant of an ISO 8601 date and time with an offset or ``Z``.

    Raises:
        InvalidTimestamp: it is not such a text; a time without an offset is nobody's and so is refused.
    """
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise InvalidTimestamp(
            f"{text!r} is no date and time; write ISO 8601 with an offset, as in 2026-01-31T12:00+01:00 or "
            f"2026-01-31T11:00:00Z"
        ) from error
    if instant.tzinfo is None:
        bare = instant.isoformat()
        raise InvalidTimestamp(f"{text!r} has no time zone; add Z for UTC, or an offset: {bare}Z or {bare}+01:00")
    return aware_utc(instant)


# --- addresses ---------------------------------------------------------------------------------------------------


_SECRET_PARAMETER: Final = re.compile(r"(?i)(\w*(?:password|passwd|pwd|secret|token|key)|sig)=([^;&\s]+)")


class Address(str):
    """Where a store or transport is. Its ``repr`` and :attr:`shown` hide passwords; the text itself has them."""

    __slots__ = ()

    @property
    def shown(self) -> str:
        """The address without secrets."""
        scheme, separator, rest = self.partition("://")
        credentials, at, place = rest.rpartition("@")
        if at and not rest.startswith("/"):
            user, colon, _ = credentials.partition(":")
            rest = f"{user}{':***' if colon else ''}@{place}"
        return _SECRET_PARAMETER.sub(r"\1=***", scheme + separator + rest)

    def __repr__(self) -> str:
        return repr(self.shown)


# --- what a value must be ----------------------------------------------------------------------------------------


class _Wrong(ValueError):
    """What a value must be; the caller adds which one it is and where it stands."""


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise _Wrong("must be a text that is not blank")
    return raw


def _queue_name(raw: Any) -> str:
    try:
        check_text(raw, "it", DESTINATION_LIMIT - _LONGEST_SUFFIX)
    except InvalidMessage as error:
        raise _Wrong(f"must be the name of a queue: {error}") from error
    return raw


def _queue_names(raw: Any) -> tuple[str, ...]:
    names: Any = [name.strip() for name in raw.split(",") if name.strip()] if isinstance(raw, _FromText) else raw
    if not isinstance(names, list):
        raise _Wrong('must be a list of queue names, as in ["orders", "invoices"]')
    return tuple(_queue_name(name) for name in names)  # pyright: ignore[reportUnknownVariableType]


def _address(raw: Any) -> Address:
    if ":" not in _text(raw):
        raise _Wrong("must be an address such as sqlite:///postdate.db")
    return Address(raw)


def _choice(kind: Callable[[str], T], *names: str) -> Callable[[Any], T]:
    def read(raw: Any) -> T:
        if raw not in names:
            close = difflib.get_close_matches(str(raw), names, n=1)
            raise _Wrong(f"must be one of {', '.join(names)}" + (f" (did you mean {close[0]!r}?)" if close else ""))
        return kind(str(raw))

    return read


def _integer(least: int) -> Callable[[Any], int]:
    def read(raw: Any) -> int:
        number = int(raw) if isinstance(raw, _FromText) and re.fullmatch(r"-?[0-9]{1,18}", raw) else raw
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise _Wrong(f"must be a whole number, {least} or more")
        return number

    return read


def _duration(raw: Any) -> timedelta:
    number = isinstance(raw, int | float) and not isinstance(raw, bool)
    try:
        duration = parse_duration(str(raw)) if number or isinstance(raw, str) else timedelta(0)
    except InvalidTimestamp as error:
        raise _Wrong(f"must be a duration: {error}") from error
    if duration <= timedelta(0):
        raise _Wrong("must be a duration above zero, such as 30s or 1m30s")
    return duration


class _FromText(str):
    """A value from the environment or an option, where everything is text."""

    __slots__ = ()


def _meta(read: Callable[[Any], Any], meaning: str) -> dict[str, Any]:
    return {"read": read, "meaning": meaning}


# --- the sections ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The endpoint that ``postdate run`` is. Its intake queue is ``{name}.timeouts``."""

    name: str = field(
        default="postdate", metadata=_meta(_queue_name, "the service's name; it receives from {name}.timeouts")
    )
    error_queue: str = field(default="error", metadata=_meta(_queue_name, "where messages go that cannot be delivered"))
    transaction_mode: TransactionMode | None = field(
        default=None,
        metadata=_meta(
            _choice(TransactionMode, *(mode.value for mode in TransactionMode)),
            "default: the strongest that store and transport keep together",
        ),
    )
    concurrency: int = field(default=16, metadata=_meta(_integer(1), "messages handled at once"))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where messages wait."""

    address: Address = field(
        default=Address("sqlite:///postdate.db"), metadata=_meta(_address, "default: in the file of the transport")
    )
    synchronous: str = field(
        default="full",
        metadata=_meta(
            _choice(str, "full", "normal"), "full: a commit survives loss of power; normal: any end of the process"
        ),
    )
    recording: Recording = field(
        default=Recording.ALL,
        metadata=_meta(_choice(Recording, *(each.value for each in Recording)), "how much is kept for audits"),
    )
    largest_message_bytes: int = field(default=_16_MIB, metadata=_meta(_integer(1), "headers and body together"))


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Where the queues are. In the store's file, it has the store's ``synchronous`` and ``recording``."""

    address: Address = field(
        default=Address("local:///postdate.db"), metadata=_meta(_address, "default: in the file of the store")
    )
    largest_message_bytes: int = field(default=_16_MIB, metadata=_meta(_integer(1), "headers and body together"))


@dataclass(frozen=True, slots=True)
class DelayedDeliverySettings:
    """How failures are borne; see :class:`postdate.DelayedDelivery`."""

    number_of_retries: int = field(
        default=0, metadata=_meta(_integer(0), "attempts after the first before the error queue")
    )
    time_to_trigger_store_circuit_breaker: timedelta = field(
        default=timedelta(seconds=30),
        metadata=_meta(_duration, "storing may fail this long before it is a critical error"),
    )
    time_to_trigger_fetch_circuit_breaker: timedelta = field(
        default=timedelta(seconds=30), metadata=_meta(_duration, "the same for looking for due messages")
    )
    time_to_trigger_dispatch_circuit_breaker: timedelta = field(
        default=timedelta(seconds=30), metadata=_meta(_duration, "the same for sending due messages")
    )
    maximum_recovery_failures_per_second: int = field(
        default=1, metadata=_meta(_integer(1), "failures of the failure handling that are borne, over 30 s")
    )


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Queues that ``postdate setup`` and ``postdate run`` create."""

    create: tuple[str, ...] = field(
        default=(), metadata=_meta(_queue_names, "queues to create besides the endpoint's own")
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings.

    Args:
        endpoint, store, transport, delayed_delivery, queues: the sections of the file.
        origins: for each key (``store.address`` …) where its value came from.
        file: the file that was read, or ``None`` when there was none.
    """

    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    delayed_delivery: DelayedDeliverySettings = field(default_factory=DelayedDeliverySettings)
    queues: QueueSettings = field(default_factory=QueueSettings)
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    file: Path | None = None

    def rows(self) -> Iterator[SettingRow]:
        """Yield every setting in the order of the sections."""
        for section, kind in _SECTIONS.items():
            for each in fields(kind):
                key = f"{section}.{each.name}"
                value = getattr(getattr(self, section), each.name)
                yield SettingRow(key, _shown(value), self.origins.get(key, "default"), each.metadata["meaning"])


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as it is shown: secrets are hidden."""

    key: str
    value: str | int | list[str] | None
    origin: str
    meaning: str


_SECTIONS: Final[Mapping[str, type[Any]]] = {
    "endpoint": EndpointSettings,
    "store": StoreSettings,
    "transport": TransportSettings,
    "delayed_delivery": DelayedDeliverySettings,
    "queues": QueueSettings,
}
_KEYS: Final = tuple(f"{section}.{each.name}" for section, kind in _SECTIONS.items() for each in fields(kind))


def _shown(value: Any) -> str | int | list[str] | None:
    match value:
        case Address():
            return value.shown
        case timedelta():
            return format_duration(value)
        case Recording() | TransactionMode():
            return value.value
        case tuple():
            return [str(each) for each in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return value


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    raw: Any
    origin: str


def load_settings(
    file: str | Path | None, environment: Mapping[str, str], options: Mapping[str, str | None] | None = None
) -> Settings:
    """Return the settings: defaults, over them the file, the environment, the options.

    Args:
        file: to read; ``None``: the one that ``POSTDATE_CONFIG`` names, or ``postdate.toml`` if it is there.
        environment: variables; a setting is called ``POSTDATE_STORE__ADDRESS`` there.
        options: of the command line, by key (``store.address``); those that are ``None`` were not given.

    Raises:
        UnknownSetting: a key or section that does not exist; says where, and what may have been meant.
        ConfigurationError: a value of the wrong type or out of range, or a file that cannot be read.
    """
    path = _file(file, environment)
    found = {} if path is None else _from_file(path)
    found |= _from_environment(environment)
    for key, value in (options or {}).items():
        if value is not None:
            found[key] = _Found(_FromText(value), f"option --{key.partition('.')[0]}")
    _share_one_file(found)
    return _build(found, path)


def _file(named: str | Path | None, environment: Mapping[str, str]) -> Path | None:
    variable = environment.get(FILE_VARIABLE)
    if named is None and not variable:
        default = Path(DEFAULT_FILE)
        return default if default.exists() else None
    path, origin = (Path(named), "option --config") if named is not None else (Path(variable or ""), FILE_VARIABLE)
    if not path.is_file():
        raise ConfigurationError(f"there is no file {str(path)!r} ({origin}); name the TOML file with the settings")
    return path


def _from_file(path: Path) -> dict[str, _Found]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}; check its owner and mode") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    lines = _lines(text)
    found: dict[str, _Found] = {}
    for section, table in tables.items():
        where = _place(path, lines.get(section))
        if section not in _SECTIONS:
            raise UnknownSetting(_unknown_section(section, where))
        if not isinstance(table, dict):
            raise ConfigurationError(f"{section} must be a section, [{section}], not {table!r} ({where})")
        found |= _from_section(section, cast("dict[str, Any]", table), lambda key: _place(path, lines.get(key)))
    return found


def _from_section(section: str, table: Mapping[str, Any], place: Callable[[str], str]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for name, raw in table.items():
        key = f"{section}.{name}"
        if key not in _KEYS:
            raise UnknownSetting(_unknown_key(key, f"setting {name!r} in section [{section}]", place(key)))
        found[key] = _Found(raw, place(key))
    return found


_HEADER: Final = re.compile(r"\s*\[\s*([A-Za-z0-9_\-]+)\s*\]")
_ENTRY: Final = re.compile(r"\s*([A-Za-z0-9_\-]+(?:\s*\.\s*[A-Za-z0-9_\-]+)*)\s*=")


def _lines(text: str) -> dict[str, int]:
    """Return the line of each section and key. Only to point at; what is written more artfully is found by eye."""
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


def _place(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}:{line}"


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        section, separator, name = variable.removeprefix(PREFIX).lower().partition(_SECTION_END)
        key = f"{section}.{name}"
        if key in _KEYS:
            found[key] = _Found(_FromText(value), f"environment {variable}")
        elif separator or _with_one_underscore(variable):
            raise UnknownSetting(_unknown_key(key, f"variable {variable}", "environment", shown=_variable))
        # Anything else is not ours: container platforms set variables such as POSTDATE_SERVICE_HOST by themselves.
    return found


def _with_one_underscore(variable: str) -> bool:
    return variable in {_variable(key).replace(_SECTION_END, "_") for key in _KEYS}


def _variable(key: str) -> str:
    return PREFIX + key.replace(".", _SECTION_END).upper()


def _unknown_section(section: str, where: str) -> str:
    close = difflib.get_close_matches(section, _SECTIONS, n=1)
    hint = f"did you mean [{close[0]}]?" if close else f"there are {', '.join(f'[{name}]' for name in _SECTIONS)}"
    return f"there is no section [{section}] ({where}); {hint}"


def _unknown_key(key: str, what: str, where: str, shown: Callable[[str], str] = str) -> str:
    section, _, name = key.partition(".")
    here = {each.partition(".")[2]: each for each in _KEYS if each.startswith(f"{section}.")}
    close = [here[each] for each in difflib.get_close_matches(name, here, n=1)]
    close = close or difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.75)
    if close:
        hint = f"did you mean {shown(close[0])}?"
    else:
        hint = f"there are {', '.join(shown(each) for each in here.values() or _KEYS)}"
    return f"there is no {what} ({where}); {hint}"


def _share_one_file(found: dict[str, _Found]) -> None:
    """Put store and queues into one file when only one of the two is named: there they share transactions."""
    store, transport = "store.address", "transport.address"
    if (store in found) == (transport in found):
        return
    named, other, scheme = (store, transport, "local") if store in found else (transport, store, "sqlite")
    address = found[named].raw
    if isinstance(address, str) and address.partition(":")[0] in {"sqlite", "local"}:
        rest = address.partition(":")[2]
        found[other] = _Found(_FromText(f"{scheme}:{rest}"), f"as {named}, {found[named].origin}")


def _build(found: Mapping[str, _Found], path: Path | None) -> Settings:
    sections: dict[str, Any] = {}
    for section, kind in _SECTIONS.items():
        values: dict[str, Any] = {}
        for each in fields(kind):
            key = f"{section}.{each.name}"
            if key in found:
                values[each.name] = _read(key, found[key], each.metadata["read"])
        sections[section] = kind(**values)
    return Settings(**sections, origins={key: value.origin for key, value in found.items()}, file=path)


def _read(key: str, value: _Found, read: Callable[[Any], Any]) -> Any:
    try:
        return read(value.raw)
    except _Wrong as error:
        raw = Address(value.raw).shown if isinstance(value.raw, str) else value.raw
        raise ConfigurationError(f"{key} {error}, not {_toml(raw)} ({value.origin})") from error


def _toml(raw: Any) -> str:
    """Return a value much as it stands in the file."""
    return json.dumps(raw, default=str, ensure_ascii=False)
