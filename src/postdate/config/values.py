"""What a value must be, and how it is read from the file, the environment or an option."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

from postdate.config.addresses import Address
from postdate.config.texts import format_duration, parse_duration
from postdate.errors import InvalidMessage, InvalidTimestamp
from postdate.messages import DESTINATION_LIMIT, check_text

_LONGEST_EXCHANGE: Final = 150
_LONGEST_SUFFIX: Final = len(".timeouts")

T = TypeVar("T")


class Wrong(ValueError):
    """What a value must be; the caller adds which one it is and where it stands."""


def text(raw: Any) -> str:
    """Read a text that is not blank."""
    if not isinstance(raw, str) or not raw.strip():
        raise Wrong("must be a text that is not blank")
    return str(raw)


def exchange_name(raw: Any) -> str:
    """Read the name of an exchange; empty: none."""
    if not isinstance(raw, str) or len(raw) > _LONGEST_EXCHANGE or raw.startswith("amq."):
        raise Wrong(f"must be the name of an exchange, at most {_LONGEST_EXCHANGE} characters, or empty for none")
    return str(raw.strip())


def queue_name(raw: Any) -> str:
    """Read the name of a queue."""
    try:
        check_text(raw, "it", DESTINATION_LIMIT - _LONGEST_SUFFIX)
    except InvalidMessage as error:
        raise Wrong(f"must be the name of a queue: {error}") from error
    return str(raw)


def queue_names(raw: Any) -> tuple[str, ...]:
    """Read a list of queue names; from text, separated by commas."""
    names: Any = [name.strip() for name in raw.split(",") if name.strip()] if isinstance(raw, FromText) else raw
    if not isinstance(names, list):
        raise Wrong('must be a list of queue names, as in ["orders", "invoices"]')
    return tuple(queue_name(name) for name in names)  # pyright: ignore[reportUnknownVariableType]


def address(raw: Any) -> Address:
    """Read an address; the scheme is checked where it is opened."""
    if ":" not in text(raw):
        raise Wrong("must be an address such as sqlite:///postdate.db or postgresql://user@host/database")
    return raw if isinstance(raw, Address) else Address(raw)


def choice(kind: Callable[[str], T], *names: str) -> Callable[[Any], T]:
    """Return how one of ``names`` is read."""

    def read(raw: Any) -> T:
        if raw not in names:
            close = difflib.get_close_matches(str(raw), names, n=1)
            raise Wrong(f"must be one of {', '.join(names)}" + (f" (did you mean {close[0]!r}?)" if close else ""))
        return kind(str(raw))

    return read


def integer(least: int, most: int | None = None) -> Callable[[Any], int]:
    """Return how a whole number is read that is at least ``least``, and at most ``most`` if that is given."""
    bounds = f"{least} or more" if most is None else f"{least} to {most:,}"

    def in_bounds(number: int) -> bool:
        return number >= least and (most is None or number <= most)

    def read(raw: Any) -> int:
        number = int(raw) if isinstance(raw, FromText) and re.fullmatch(r"-?[0-9]{1,18}", raw) else raw
        if not isinstance(number, int) or isinstance(number, bool) or not in_bounds(number):
            raise Wrong(f"must be a whole number, {bounds}")
        return number

    return read


def flag(raw: Any) -> bool:
    """Read yes or no, as TOML writes it: ``true`` or ``false``."""
    known = {"true": True, "false": False}
    found = known.get(raw.lower()) if isinstance(raw, FromText) else raw
    if not isinstance(found, bool):
        raise Wrong("must be true or false")
    return found


def duration(raw: Any) -> timedelta:
    """Read a duration above zero."""
    found = _duration(raw)
    if found is None or found <= timedelta(0):
        raise Wrong("must be a duration above zero, such as 30s or 1m30s")
    return found


def duration_or_zero(raw: Any) -> timedelta:
    """Read a duration of zero or more."""
    found = _duration(raw)
    if found is None:
        raise Wrong("must be a duration of zero or more, such as 0s or 1m30s")
    return found


def _duration(raw: Any) -> timedelta | None:
    """Return the duration that is meant, which is not negative; ``None``: it is neither a text nor a number."""
    if not isinstance(raw, str | int | float) or isinstance(raw, bool):
        return None
    try:
        return parse_duration(str(raw))
    except InvalidTimestamp as error:
        raise Wrong(f"must be a duration: {error}") from error


def duration_between(least: timedelta, most: timedelta, unit: timedelta | None = None) -> Callable[[Any], timedelta]:
    """Return how a duration is read that is ``least`` to ``most``, and a multiple of ``unit`` if that is given."""
    bounds = f"{format_duration(least)} to {format_duration(most)}"
    steps = "" if unit is None else f", in steps of {format_duration(unit)}"

    def read(raw: Any) -> timedelta:
        found = duration(raw)
        if not least <= found <= most or (unit is not None and found % unit):
            raise Wrong(f"must be a duration of {bounds}{steps}")
        return found

    return read


class FromText(str):
    """A value from the environment or an option, where everything is text."""

    __slots__ = ()
