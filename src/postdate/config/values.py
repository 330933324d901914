"""Parse durations and instants as people write them, and values of settings by their definitions."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any, Final

from postdate.config.addresses import Address
from postdate.errors import InvalidTimestamp
from postdate.messages import aware_utc
from postdate.ports.settings import InvalidValue, Setting

_UNIT_MICROSECONDS: Final = {
    "w": 604_800_000_000,
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
    "us": 1,
}
_DURATION_PART: Final = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)(ms|us|[wdhms])")
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def parse_duration(text: str) -> timedelta:
    """Return the duration of a text such as ``30s``, ``1m30s``, ``2h``, ``1d12h``, ``250ms`` or a number of seconds."""
    compact = text.strip().replace(" ", "").lower()
    if _NUMBER.fullmatch(compact):
        compact += "s"
    parts, end = list[tuple[str, str]](), 0
    while part := _DURATION_PART.match(compact, end):
        parts.append((part[1], part[2]))
        end = part.end()
    units = [unit for _, unit in parts]
    if not parts or end < len(compact) or len(set(units)) < len(units):
        raise InvalidTimestamp(
            f"{text!r} is not a duration; write a number with a unit (w d h m s ms us), as in 30s, 1m30s, 2h or 1d12h, "
            f"or a plain number of seconds"
        )
    microseconds = sum(Fraction(number) * _UNIT_MICROSECONDS[unit] for number, unit in parts)
    try:
        return timedelta(microseconds=int(microseconds))
    except OverflowError as error:
        raise InvalidTimestamp(f"the duration {text!r} is too long") from error


def parse_instant(text: str) -> datetime:
    """Return the UTC instant for an ISO 8601 date and time. The text must have an offset or ``Z``."""
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise InvalidTimestamp(
            f"{text!r} is not a date and time; write ISO 8601 with an offset, as in 2026-01-31T12:00+01:00 or "
            f"2026-01-31T11:00:00Z"
        ) from error
    if instant.tzinfo is None:
        bare = instant.isoformat()
        raise InvalidTimestamp(f"{text!r} has no time zone; add Z for UTC, or an offset: {bare}Z or {bare}+01:00")
    return aware_utc(instant)


# --- values of settings -----------------------------------------------------------------------------------------------


_LONGEST_EXCHANGE: Final = 150
_LARGEST_PORT: Final = 65_535
_FLAGS: Final = {"true": True, "false": False}


class FromText(str):
    """A value from the environment or an option. Such a value is always text."""

    __slots__ = ()


def read_value(setting: Setting, raw: Any) -> Any:
    """Return the value of a setting from a TOML value or a :class:`FromText`.

    Raises `InvalidValue` with the expected form.
    """
    if isinstance(raw, FromText):
        raw = _from_text(setting, raw)
    if setting.kind is timedelta and isinstance(raw, str | int | float) and not isinstance(raw, bool):
        try:
            raw = parse_duration(str(raw))
        except InvalidTimestamp as error:
            raise InvalidValue(f"must be a duration: {error}") from error
    return setting.convert(raw, "duration")


def _from_text(setting: Setting, text: str) -> Any:
    """Return the value that TOML would have for a text. Return the text itself if the setting is a text in TOML."""
    if setting.is_list:
        return [name.strip() for name in text.split(",") if name.strip()]
    if setting.kind is bool:
        return _FLAGS.get(text.lower(), text)
    if setting.kind is int and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if setting.kind is float and re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", text):
        return float(text)
    return str(text)


def parse_listen_address(raw: Any) -> str:
    """Check the address to listen on; see :func:`parse_host_and_port`."""
    parse_host_and_port(raw)
    return str(raw)


def parse_host_and_port(raw: Any) -> tuple[str, int]:
    """Return host and port, which a colon separates.

    An IPv6 address stands in brackets. Raises :class:`InvalidValue`.
    """
    host, _, port = raw.rpartition(":") if isinstance(raw, str) else ("", "", "")
    if not host.strip("[]") or not port.isascii() or not port.isdigit() or int(port) > _LARGEST_PORT:
        raise InvalidValue("must be a host and a port, such as 127.0.0.1:9464")
    return host.strip("[]"), int(port)


def parse_exchange_name(raw: Any) -> str:
    """Check the name of an exchange. Empty: no exchange."""
    if not isinstance(raw, str) or len(raw) > _LONGEST_EXCHANGE or raw.startswith("amq."):
        raise InvalidValue(
            f"must be the name of an exchange, at most {_LONGEST_EXCHANGE} characters, or empty for none"
        )
    return str(raw.strip())


def parse_address(raw: Any) -> Address:
    """Return the address of a text. Its scheme is checked when the address is opened."""
    if not isinstance(raw, str) or not raw.strip():
        raise InvalidValue("must be a text that is not blank")
    if ":" not in raw:
        raise InvalidValue("must be an address such as sqlite:///postdate.db or postgresql://user@host/database")
    return raw if isinstance(raw, Address) else Address(raw)
