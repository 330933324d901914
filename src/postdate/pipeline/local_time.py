"""Convert times as people write them to instants: on the executors, as Spark SQL without Python.

A text with an offset (``2026-03-29T02:30:00+01:00``, ``…Z``) is an instant. A text without an offset is a clock time in
some zone: in spring an hour of clock times never occurs, in autumn an hour of clock times occurs twice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import DataType, DateType, StringType, TimestampNTZType, TimestampType

from postdate.errors import PipelineError
from postdate.pipeline.rows import CALENDAR

_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.:][0-9]{1,9})?)?"
_OFFSET = r" ?(Z|[+-][0-9]{2}(:?[0-9]{2})?)$"
_BELOW_A_MICROSECOND = r"\.[0-9]{6}[0-9]*[1-9]"
_TO_MICROSECONDS = len("2026-03-29T02:30:00.000000")
_AT_THE_ENDS = "0001-01-01", "9999-12-31"
_DAY_MICROSECONDS = timedelta(days=1) // timedelta(microseconds=1)
_DAYS = CALENDAR[0] // _DAY_MICROSECONDS, CALENDAR[1] // _DAY_MICROSECONDS
"""The years 1 to 9999, which are valid for a message, in days since 1970."""
_AT_MOST_A_DAY = timedelta(hours=25)
"""This is longer than any time by which clocks were ever set back (a day, at the date line)."""


class Ambiguous(enum.Enum):
    """How to read a clock time that occurs twice."""

    EARLIER = "earlier"
    LATER = "later"
    REJECT = "reject"


class Nonexistent(enum.Enum):
    """How to read a clock time that does not occur.

    ``FORWARD``: the instant is as long after the beginning of the gap as the clock time says. 02:30 becomes 03:30 if
    clocks go from 2 to 3.
    """

    FORWARD = "forward"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class LocalTimes:
    """How to read times without an offset.

    Args:
        zone: name of a time zone, for example ``Europe/Paris``.
        ambiguous: by default the first of the two instants.
        nonexistent: by default the row is set aside with that reason.

    Raises:
        PipelineError: there is no such zone.
    """

    zone: str
    ambiguous: Ambiguous = Ambiguous.EARLIER
    nonexistent: Nonexistent = Nonexistent.REJECT

    def __post_init__(self) -> None:
        try:
            ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise PipelineError(f"there is no time zone {self.zone!r}; names look like Europe/Paris") from error


@dataclass(frozen=True, slots=True)
class ParsedTime:
    """A column of times as instants.

    Args:
        instant: timestamp; null without a time, or if ``problem`` is not null.
        problem: code, or null: ``malformed_time``, ``time_without_zone``, ``nonexistent_local_time``,
            ``ambiguous_local_time``, ``time_out_of_range`` (outside the years 1 to 9999, which are valid for a
            message).
    """

    instant: Column
    problem: Column = field(default_factory=lambda: F.lit(None).cast("string"))


def read_time(column: Column, data_type: DataType, local_times: LocalTimes | None) -> ParsedTime:
    """Return a column of instants, of clock times, of dates (their midnight) or of texts as instants.

    The session must be in UTC. Without ``local_times``, a time without an offset is a problem. Other types are refused.
    """
    if isinstance(data_type, TimestampType):
        return _limit_to_calendar(ParsedTime(column), ~F.unix_micros(column).between(*CALENDAR))
    if isinstance(data_type, TimestampNTZType):
        clock = column.cast("timestamp")
        number, bounds, day = F.unix_micros(clock), CALENDAR, _DAY_MICROSECONDS
    elif isinstance(data_type, DateType):
        clock = F.when(F.unix_date(column).between(*_DAYS), column).cast("timestamp")
        number, bounds, day = F.unix_date(column), _DAYS, 1
    elif isinstance(data_type, StringType):
        return _limit_to_calendar(
            _read_text(column, local_times),
            F.substring(F.trim(column), 1, 10).isin(*_AT_THE_ENDS) | column.contains("0000-"),
        )
    else:
        raise PipelineError(f"a time must be a timestamp, a date or a text, not {data_type.simpleString()}")
    clock_time = F.when(number.between(*bounds), clock)
    return _limit_to_calendar(_read_local(clock_time, local_times), ~number.between(bounds[0] + day, bounds[1] - day))


def _limit_to_calendar(parsed: ParsedTime, near_the_ends: Column) -> ParsedTime:
    """Return only instants that are valid for a message.

    ``near_the_ends`` is a cheap condition for rows that need the check, because Spark computes a time again for each
    check.
    """
    is_within = F.coalesce(F.unix_micros(parsed.instant).between(*CALENDAR), F.lit(False))
    range_problem = F.when(near_the_ends, F.when(~is_within, F.lit("time_out_of_range")))
    instant = F.when(near_the_ends, F.when(is_within, parsed.instant)).otherwise(parsed.instant)
    return ParsedTime(instant, F.coalesce(parsed.problem, range_problem))


def _read_text(column: Column, local_times: LocalTimes | None) -> ParsedTime:
    # The wire format of NServiceBus has a colon before the microseconds.
    text = F.regexp_replace(F.trim(column), r":([0-9]{6}) Z$", ".$1Z")
    with_offset, without_offset = text.rlike(_TIME + _OFFSET), text.rlike(_TIME + "$")
    instant = F.when(with_offset, F.regexp_replace(text, " ?(Z|[+-][0-9:]+)$", "$1").try_cast("timestamp"))
    local = _read_local(F.when(without_offset, text.try_cast("timestamp")), local_times)
    malformed = (
        text.isNotNull()
        & instant.isNull()
        & F.coalesce(~without_offset | text.try_cast("timestamp").isNull(), F.lit(True))
    )
    # Spark drops digits below a microsecond. The next microsecond is used instead, so that no message is early.
    has_more_digits = (F.length(column) > _TO_MICROSECONDS) & column.rlike(_BELOW_A_MICROSECOND)
    instant_read = F.coalesce(instant, local.instant)
    return ParsedTime(
        F.when(has_more_digits, instant_read + F.lit(timedelta(microseconds=1))).otherwise(instant_read),
        F.when(malformed, F.lit("malformed_time")).when(instant.isNull(), local.problem),
    )


def _read_local(clock_time: Column, local_times: LocalTimes | None) -> ParsedTime:
    """Return the instants at which clocks showed ``clock_time``, a clock time stored as a UTC instant."""
    if local_times is None:
        problem = F.when(clock_time.isNotNull(), F.lit("time_without_zone"))
        return ParsedTime(F.lit(None).cast("timestamp"), problem)
    zone = F.lit(local_times.zone)
    earlier = F.to_utc_timestamp(clock_time, zone)
    later = _instant_by_later_offset(clock_time, earlier, zone)
    exists = F.from_utc_timestamp(earlier, zone) == clock_time
    is_ambiguous = exists & (later > earlier) & (F.from_utc_timestamp(later, zone) == clock_time)
    problem = F.lit(None).cast("string")
    if local_times.nonexistent is Nonexistent.REJECT:
        problem = F.when(~exists, F.lit("nonexistent_local_time"))
    if local_times.ambiguous is Ambiguous.REJECT:
        problem = F.coalesce(problem, F.when(is_ambiguous, F.lit("ambiguous_local_time")))
    instant = F.when(is_ambiguous, later).otherwise(earlier) if local_times.ambiguous is Ambiguous.LATER else earlier
    return ParsedTime(F.when(problem.isNull(), instant), problem)


def _instant_by_later_offset(clock_time: Column, instant: Column, zone: Column) -> Column:
    """Return when clocks would show ``clock_time`` with the offset that is in force a day after ``instant``."""
    a_day_later = instant + F.lit(_AT_MOST_A_DAY)
    offset_seconds = F.unix_seconds(F.from_utc_timestamp(a_day_later, zone)) - F.unix_seconds(a_day_later)
    return F.timestamp_micros(F.unix_micros(clock_time) - offset_seconds * F.lit(1_000_000))
