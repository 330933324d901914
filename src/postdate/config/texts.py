"""Durations and instants as people write them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Final

from postdate.errors import InvalidTimestamp
from postdate.messages import aware_utc

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
    """Return the duration of a text such as ``30s``, ``1m30s``, ``2h``, ``1d12h``, ``250ms`` or a number of seconds."""
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


def parse_instant(text: str) -> datetime:
    """Return the UTC instant of an ISO 8601 date and time, which must have an offset or ``Z``."""
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
