"""Formats of times and time spans in headers. Source: docs/specification-rows.md, row 14."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from postdate.errors import InvalidTimestamp

_TIMESTAMP = re.compile(r"([0-9]{4}).([0-9]{2}).([0-9]{2}).([0-9]{2}).([0-9]{2}).([0-9]{2}).([0-9]{6})..", re.DOTALL)
_TIME_SPAN = re.compile(
    r"\s*(?P<sign>-)?(?:(?P<days_only>[0-9]{1,8})"
    r"|(?:(?P<days>[0-9]{1,8})\.)?(?P<hours>[0-9]{1,2}):(?P<minutes>[0-9]{1,2})"
    r"(?::(?P<seconds>[0-9]{1,2})(?:\.(?P<fraction>[0-9]{1,7}))?)?)\s*",
    re.ASCII,
)

_LONGEST_SPAN_DAYS = 10_675_198
"""Days in the longest time span of the wire format (64 bits of 100 ns)."""

LONGEST_TIME_TO_BE_RECEIVED = timedelta(days=1_000_000)
"""Longest time to be received: it ends before the year 9999, where the calendar of every receiver ends."""


def aware_utc(instant: datetime, name: str = "the time") -> datetime:
    """Return ``instant`` in UTC.

    Raises:
        InvalidTimestamp: ``instant`` is not a date-time or has no time zone, or is outside the years 1 to 9999 in UTC.
    """
    if not isinstance(instant, datetime):  # pyright: ignore[reportUnnecessaryIsInstance] - callers without types
        raise InvalidTimestamp(f"{name} must be a datetime with a time zone, not {type(instant).__name__} {instant!r}")
    if instant.tzinfo is None or instant.utcoffset() is None:
        raise InvalidTimestamp(
            f"{name} {instant.isoformat()} has no time zone; pass an aware datetime, for example "
            f"datetime(..., tzinfo=UTC) or datetime(..., tzinfo=ZoneInfo('Europe/Paris'))"
        )
    try:
        return instant.astimezone(UTC)
    except OverflowError as error:
        raise InvalidTimestamp(f"{name} {instant!r} is outside the years 1 to 9999 in UTC") from error


def format_timestamp(instant: datetime) -> str:
    """Return the wire form ``yyyy-MM-dd HH:mm:ss:ffffff Z``: 28 characters, UTC, microseconds after a colon.

    Source: docs/specification-rows.md, row 14.
    """
    utc = aware_utc(instant)
    return (
        f"{utc.year:04d}-{utc.month:02d}-{utc.day:02d} "
        f"{utc.hour:02d}:{utc.minute:02d}:{utc.second:02d}:{utc.microsecond:06d} Z"
    )


def parse_timestamp(text: str) -> datetime:
    """Return the aware UTC instant of a wire timestamp, to the microsecond.

    As specified, the length and the digits are checked and the separators are not.

    Raises:
        InvalidTimestamp: the text is blank, not 28 characters long, has another character in place of a digit, or names
            no existing date.
    """
    if not isinstance(text, str) or not text.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTimestamp("a timestamp is blank; expected 'yyyy-MM-dd HH:mm:ss:ffffff Z'")
    if (match := _TIMESTAMP.fullmatch(text)) is None:
        raise InvalidTimestamp(f"{text!r} is not a timestamp of the form 'yyyy-MM-dd HH:mm:ss:ffffff Z'")
    try:
        return datetime(*(int(digits) for digits in match.groups()), tzinfo=UTC)
    except ValueError as error:
        raise InvalidTimestamp(f"{text!r} names no existing instant: {error}") from error


def format_time_span(span: timedelta) -> str:
    """Return ``[-][d.]hh:mm:ss[.fffffff]``, the constant time-span form, for example ``31.00:00:01``."""
    microseconds = span // timedelta(microseconds=1)
    sign, microseconds = ("-", -microseconds) if microseconds < 0 else ("", microseconds)
    seconds, fraction = divmod(microseconds, 1_000_000)
    days, seconds = divmod(seconds, 86_400)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{sign}{f'{days}.' if days else ''}{text}{f'.{fraction:06d}0' if fraction else ''}"


def parse_time_span(text: str) -> timedelta | None:
    """Return the duration of a time-span text, or ``None`` if the text is no time span.

    A bare whole number counts days; hours, minutes and seconds must be in their ranges; digits below a
    microsecond are dropped. Source: docs/guides/time-to-be-received.md.
    """
    if (match := _TIME_SPAN.fullmatch(text)) is None:
        return None
    part = match.groupdict()
    if part["days_only"] is not None:
        span = _days(int(part["days_only"]))
        return -span if span is not None and part["sign"] else span
    hours, minutes, seconds = int(part["hours"]), int(part["minutes"]), int(part["seconds"] or 0)
    whole_days = _days(int(part["days"] or 0))
    if hours > 23 or minutes > 59 or seconds > 59 or whole_days is None:
        return None
    microseconds = int((part["fraction"] or "0").ljust(7, "0")[:6])
    span = whole_days + timedelta(hours=hours, minutes=minutes, seconds=seconds, microseconds=microseconds)
    return -span if part["sign"] else span


def _days(days: int) -> timedelta | None:
    return timedelta(days=days) if days <= _LONGEST_SPAN_DAYS else None
