"""The texts of times that are read, and the instants or clock times that they name, without Spark.

The grammar is stated once, here, as regular expressions. On Spark, :mod:`postdate.pipeline.local_time` uses them in
SQL; without it, :func:`read_time` does. A test compares the two.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Final, NamedTuple

USUAL: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})?$"
"""The form in which nearly all times are written, and which Spark reads."""

_EXTENDED: Final = r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,:]([0-9]{1,9}))?)?"
_BASIC: Final = r"([0-9]{4})([0-9]{2})([0-9]{2})[Tt]([0-9]{2})([0-9]{2})(?:([0-9]{2})(?:[.,]([0-9]{1,9}))?)?"
_OFFSET: Final = r"(?: ?(?:([Zz])|([+-][0-9]{2})(?::?([0-9]{2}))?)(?:\[[A-Za-z][\w+/-]*\])?)?"
ISO_8601: Final = rf"^(?:{_EXTENDED}|{_BASIC}){_OFFSET}$"
"""All forms that are read. The wire format of NServiceBus has a colon before the microseconds. A name of a zone in
brackets, as Java writes it behind an offset, adds nothing to the offset."""
PARTS: Final = "$1$8-$2$9-$3$10T$4$11:$5$12:$6$13.$7$14$15$16:$17"
"""The parts of a time in the usual form. Parts that are missing leave their separators."""
BELOW_A_MICROSECOND: Final = r"\.[0-9]{6}[0-9]*[1-9]"
ENDS_A_DAY: Final = r"T24:00:00(\.0+)?([Z+-]|$)"
"""A time in the usual form that is the midnight at the end of its day."""
HAS_OFFSET: Final = "(Z|[+-][0-9]{2}:[0-9]{2})$"
TO_MICROSECONDS: Final = len("2026-03-29T02:30:00.000000")

_MICROSECONDS_A_SECOND: Final = 1_000_000
_DAY_SECONDS: Final = 86_400
_DAY_OF_1970: Final = date(1970, 1, 1).toordinal()
_DAYS_OF_YEARS_0_TO_3: Final = 1_461
_LARGEST_OFFSET_SECONDS: Final = 18 * 3_600
"""Java knows no larger offset from UTC."""


class TimeText(NamedTuple):
    """What a text names.

    Args:
        microseconds: since 1970, of the instant, or of the clock time as if it were UTC. It may be out of the calendar.
        has_offset: whether it is an instant.
    """

    microseconds: int
    has_offset: bool


_JAVAS_END: Final = r"(?=(?:\r\n|[\r\n])?\Z)"
"""What ``$`` is in a pattern of Java: the end, also before a line break there."""

_USUAL_TEXT: Final = re.compile(USUAL.removesuffix("$") + _JAVAS_END, re.ASCII)
_ISO_8601_TEXT: Final = re.compile(ISO_8601.removesuffix("$") + _JAVAS_END, re.ASCII)
_PARTS_TEMPLATE: Final = re.sub(r"\$([0-9]+)", r"\\g<\1>", PARTS)
_FIELDS: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?"
    r"(?:(Z)|([+-])([0-9]{2}):([0-9]{2}))?(?:\r\n|[\r\n])?",
    re.ASCII,
)


def read_time(text: str) -> TimeText | None:
    """Return what a text names, as written; ``None`` if it is no time.

    Digits below a microsecond are rounded up, so that no message is early.
    """
    usual = text if _USUAL_TEXT.match(text) else _to_usual_form(text.strip(" "))
    fields = None if usual is None else _FIELDS.fullmatch(usual)
    if usual is None or fields is None:
        return None
    year, month, day, hour, minute, second = (int(fields[number]) for number in range(1, 7))
    ends_a_day = hour == 24 and usual[10] == "T" and minute == second == 0 and not (fields[7] or "").strip("0")
    hour = 0 if ends_a_day else hour
    days = _days(year, month, day)
    if days is None or hour > 23 or minute > 59 or second > 59:
        return None
    seconds = (days + ends_a_day) * _DAY_SECONDS + hour * 3_600 + minute * 60 + second
    if fields[9] is not None:
        offset_minutes = int(fields[11])
        offset = int(fields[10]) * 3_600 + offset_minutes * 60
        if offset_minutes > 59 or offset > _LARGEST_OFFSET_SECONDS:
            return None
        seconds += offset if fields[9] == "-" else -offset
    digits = fields[7] or ""
    microseconds = int(digits[:6].ljust(6, "0")) + bool(digits[6:].strip("0"))
    return TimeText(seconds * _MICROSECONDS_A_SECOND + microseconds, fields[8] is not None or fields[9] is not None)


def _to_usual_form(text: str) -> str | None:
    """Return a time in another form of ISO 8601 in the usual form; ``None`` if it is no time."""
    match = _ISO_8601_TEXT.match(text)
    if match is None:
        return None
    parts = match.expand(_PARTS_TEMPLATE).upper().replace(":.", ":00.")
    with_offset = re.sub("([+-][0-9]{2}):$", r"\1:00", parts)
    return re.sub(r"\.(?=[Z+-]|$)", "", re.sub(":$", "", with_offset))


def _days(year: int, month: int, day: int) -> int | None:
    """Return the days since 1970 of a day of the years 0 to 9999; ``None`` if there is no such day."""
    try:
        if year == 0:  # Python has no such year. It is a leap year, as year 4 is.
            return date(4, month, day).toordinal() - _DAYS_OF_YEARS_0_TO_3 - _DAY_OF_1970
        return date(year, month, day).toordinal() - _DAY_OF_1970
    except ValueError:
        return None
