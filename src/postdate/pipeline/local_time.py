"""Convert times as people write them to instants: on the executors.

A text with an offset (``2026-03-29T02:30:00+01:00``, ``…Z``) is an instant; Spark SQL reads it without Python. A text
without an offset is a clock time in some zone: in spring an hour of clock times never occurs, in autumn an hour of
clock times occurs twice. Clock times become instants by the rules of Python, which services of a store use as well. The
rules of Java are part of its runtime, and are often older.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import DataType, DateType, StringType, TimestampNTZType, TimestampType

from postdate.clock import to_microseconds
from postdate.core.zones import offset_intervals, rules_of
from postdate.errors import InvalidTimestamp, PipelineError
from postdate.pipeline.rows import CALENDAR, INSTANT, pc, quote_name

_USUAL: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})?$"
"""The form in which nearly all times are written, and which Spark reads."""

_EXTENDED: Final = r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,:]([0-9]{1,9}))?)?"
_BASIC: Final = r"([0-9]{4})([0-9]{2})([0-9]{2})[Tt]([0-9]{2})([0-9]{2})(?:([0-9]{2})(?:[.,]([0-9]{1,9}))?)?"
_OFFSET: Final = r"(?: ?(?:([Zz])|([+-][0-9]{2})(?::?([0-9]{2}))?)(?:\[[A-Za-z][\w+/-]*\])?)?"
_ISO_8601: Final = rf"^(?:{_EXTENDED}|{_BASIC}){_OFFSET}$"
"""All forms that are read. The wire format of NServiceBus has a colon before the microseconds. A name of a zone in
brackets, as Java writes it behind an offset, adds nothing to the offset."""
_PARTS: Final = "$1$8-$2$9-$3$10T$4$11:$5$12:$6$13.$7$14$15$16:$17"
"""The parts of a time in the usual form. Parts that are missing leave their separators."""
_BELOW_A_MICROSECOND = r"\.[0-9]{6}[0-9]*[1-9]"
_TO_MICROSECONDS = len("2026-03-29T02:30:00.000000")
_DAY_SECONDS: Final = 86_400
_NEAR_THE_ENDS: Final = "^(0000|0001-?01-?01|9999-?12-?31)"
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
            rules_of(self.zone)
        except InvalidTimestamp as error:
            raise PipelineError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ZoneTimes:
    """:class:`LocalTimes` with the rules of the zone, which are the same on all executors.

    Args:
        local_times: how to read clock times.
        rules: a file in the format TZif.
    """

    local_times: LocalTimes
    rules: bytes


def add_time(
    frame: DataFrame, name: str, column: Column, data_type: DataType, zone_times: ZoneTimes | None
) -> DataFrame:
    """Return a frame with one more column: instants, clock times, dates (their midnight) or texts as instants.

    Each step is a column of its own, which later steps name and which is dropped at the end. Spark copies an expression
    to each place where it is named, so that one expression for all steps would have thousands of nodes. Then planning a
    job for ten rows takes seconds, and Java does not compile the code for a row.

    Args:
        frame: the session must be in UTC.
        name: of the new column. Other columns must not begin with it.
        column: a column of ``frame``.
        data_type: the type of ``column``.
        zone_times: without it, a time without an offset is a problem.

    Returns:
        The frame with a struct ``name``:

        - ``instant``: timestamp; null without a time, or if ``problem`` is not null.
        - ``problem``: code, or null: ``malformed_time``, ``time_without_zone``, ``nonexistent_local_time``,
          ``ambiguous_local_time``, ``time_out_of_range`` (outside the years 1 to 9999, which are valid for a message).
        - ``wall_time``: the clock time and its zone, as :class:`postdate.core.upkeep.wall_times.WallTime` writes them;
          null for a time with an offset.

    Raises:
        PipelineError: ``data_type`` is not that of a time.
    """
    if isinstance(data_type, TimestampType):
        parsed, near_the_ends = _parsed(column), ~F.unix_micros(column).between(*CALENDAR)
        frame = frame.withColumn(name, parsed)
    elif isinstance(data_type, StringType):
        near_the_ends = F.trim(column).rlike(_NEAR_THE_ENDS)
        frame = _add_text(frame, name, column, zone_times)
    else:
        clock_time, near_the_ends = _clock_time(column, data_type)
        frame = frame.withColumn(name, _read_local(clock_time, zone_times))
    time = F.col(quote_name(name))
    # A cheap condition finds the rows that need the check.
    out_of_range = near_the_ends & ~F.coalesce(F.unix_micros(time["instant"]).between(*CALENDAR), F.lit(False))
    is_out_of_range = F.coalesce(out_of_range, F.lit(False))
    limited = _parsed(
        F.when(~is_out_of_range, time["instant"]),
        F.coalesce(time["problem"], F.when(is_out_of_range, F.lit("time_out_of_range"))),
        time["wall_time"],
    )
    return frame.withColumn(name, limited)


def _parsed(instant: Column, problem: Column | None = None, wall_time: Column | None = None) -> Column:
    no_text = F.lit(None).cast("string")
    return F.struct(
        instant.alias("instant"),
        (no_text if problem is None else problem).alias("problem"),
        (no_text if wall_time is None else wall_time).alias("wall_time"),
    )


def _clock_time(column: Column, data_type: DataType) -> tuple[Column, Column]:
    """Return a time without an offset as the UTC instant, and whether it is near the ends of the calendar."""
    if isinstance(data_type, TimestampNTZType):
        clock = column.cast("timestamp")
        number, bounds, day = F.unix_micros(clock), CALENDAR, _DAY_MICROSECONDS
    elif isinstance(data_type, DateType):
        clock = F.when(F.unix_date(column).between(*_DAYS), column).cast("timestamp")
        number, bounds, day = F.unix_date(column), _DAYS, 1
    else:
        raise PipelineError(f"a time must be a timestamp, a date or a text, not {data_type.simpleString()}")
    return F.when(number.between(*bounds), clock), ~number.between(bounds[0] + day, bounds[1] - day)


def _add_text(frame: DataFrame, name: str, column: Column, zone_times: ZoneTimes | None) -> DataFrame:
    names = {step: f"{name}~{step}" for step in ("text", "ends_a_day", "start", "time", "local")}
    text, ends_a_day, start, time, local = (F.col(quote_name(each)) for each in names.values())
    has_offset = text.rlike("(Z|[+-][0-9]{2}:[0-9]{2})$")
    # Spark drops digits below a microsecond. The next microsecond is used instead, so that no message is early.
    has_more_digits = (F.length(text) > _TO_MICROSECONDS) & text.rlike(_BELOW_A_MICROSECOND)
    malformed = F.when(column.isNotNull() & time.isNull(), F.lit("malformed_time"))
    usual = F.when(column.rlike(_USUAL), column).otherwise(_usual_form(F.trim(column)))
    whole_day = F.replace(text, F.lit("T24:"), F.lit("T00:"))
    later = F.when(has_more_digits, start + F.lit(timedelta(microseconds=1))).otherwise(start)
    return (
        frame.withColumn(names["text"], usual)
        .withColumn(names["ends_a_day"], text.rlike(r"T24:00:00(\.0+)?([Z+-]|$)"))
        .withColumn(names["start"], F.when(ends_a_day, whole_day).otherwise(text).try_cast("timestamp"))
        .withColumn(names["time"], F.when(ends_a_day, start + F.lit(timedelta(days=1))).otherwise(later))
        .withColumn(names["local"], _read_local(F.when(~has_offset, time), zone_times))
        .withColumn(
            name,
            _parsed(
                F.when(has_offset, time).otherwise(local["instant"]),
                F.coalesce(malformed, local["problem"]),
                local["wall_time"],
            ),
        )
        .drop(*names.values())
    )


def _usual_form(text: Column) -> Column:
    """Return a time in another form of ISO 8601 in the usual form; null if it is no time."""
    parts = F.regexp_replace(text, _ISO_8601, _PARTS)
    with_seconds = F.replace(F.upper(parts), F.lit(":."), F.lit(":00."))
    with_offset = F.regexp_replace(with_seconds, "([+-][0-9]{2}):$", "$1:00")
    plain = F.regexp_replace(F.regexp_replace(with_offset, ":$", ""), r"\.(?=[Z+-]|$)", "")
    return F.when(text.rlike(_ISO_8601), plain)


# --- clock times ------------------------------------------------------------------------------------------------------


def _read_local(clock_time: Column, zone_times: ZoneTimes | None) -> Column:
    """Return the instants at which clocks showed ``clock_time``, a clock time stored as a UTC instant."""
    if zone_times is None:
        problem = F.when(clock_time.isNotNull(), F.lit("time_without_zone"))
        return _parsed(F.lit(None).cast("timestamp"), problem)
    arrow_udf: Any = F.arrow_udf  # Its stubs do not know the order of its arguments that its description shows.
    return arrow_udf(_resolver(zone_times), _RESOLVED)(clock_time)


_RESOLVED: Final = "instant timestamp, problem string, wall_time string"


if TYPE_CHECKING:
    _Array = pa.Array[Any]
else:
    _Array = pa.Array  # Spark reads the hints of functions, and these types have no arguments at run time.


def _resolver(zone_times: ZoneTimes) -> Callable[[_Array], _Array]:
    def resolve(clock_times: _Array) -> _Array:
        return resolve_clock_times(clock_times, zone_times)

    return resolve


def resolve_clock_times(clock_times: pa.Array[Any], zone_times: ZoneTimes) -> pa.Array[Any]:
    """Return instant, problem and wall time for each clock time, which is stored as a UTC instant. Nulls stay null.

    The instants are those of :mod:`zoneinfo`: with ``fold=0``, or with ``fold=1`` for the later of two instants.
    """
    local_times, count = zone_times.local_times, len(clock_times)
    micros: Any = np.asarray(pc.fill_null(pc.cast(clock_times, pa.int64()), 0))
    seconds, years = np.floor_divide(micros, 1_000_000), micros.astype("datetime64[us]").astype("datetime64[Y]")
    first, second = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for year in np.unique(years):
        rows = years == year
        number = min(max(int(year.astype(np.int64)) + 1970, 1), 9_999)  # Other years are refused later.
        offsets, first_changes, second_changes = _year_offsets(zone_times.rules, number)
        first[rows] = offsets[np.searchsorted(first_changes, seconds[rows], side="right")]
        second[rows] = offsets[np.searchsorted(second_changes, seconds[rows], side="right")]
    is_ambiguous, is_missing = first > second, first < second
    problems = np.full(count, None, object)
    if local_times.ambiguous is Ambiguous.REJECT:
        problems[is_ambiguous] = "ambiguous_local_time"
    if local_times.nonexistent is Nonexistent.REJECT:
        problems[is_missing] = "nonexistent_local_time"
    is_second = is_ambiguous & (local_times.ambiguous is Ambiguous.LATER)
    instants = micros - np.where(is_second, second, first) * 1_000_000
    no_instant = pc.or_(clock_times.is_null(), pa.array(problems != None))  # noqa: E711 - an array
    texts = pa.array(np.datetime_as_string(micros.astype("datetime64[us]")).astype(object), pa.string())
    suffixes = pa.array(np.where(is_second, ";fold=1 ", " ").astype(object), pa.string())
    whole = pc.replace_substring_regex(texts, r"\.000000$", "")
    columns: dict[str, Any] = {
        "instant": pa.array(instants, pa.int64()).cast(INSTANT),
        "problem": pa.array(problems, pa.string()),
        "wall_time": pc.binary_join_element_wise(whole, suffixes, local_times.zone, ""),
    }
    for name, hidden in (("instant", no_instant), ("problem", clock_times.is_null()), ("wall_time", no_instant)):
        columns[name] = pc.if_else(hidden, pa.scalar(None, columns[name].type), columns[name])
    return pa.StructArray.from_arrays([*columns.values()], names=[*columns])


@lru_cache(maxsize=20_000)
def _year_offsets(rules: bytes, year: int) -> tuple[Any, Any, Any]:
    """Return the offsets in and around a year, and the clock times, in seconds, at which the next offset applies.

    The first array of clock times is for ``fold=0``, the second for ``fold=1``. Between the two, clocks show a time
    twice or never.
    """
    intervals = [*_intervals_of(rules, year)]
    offsets = np.array([offset for _, _, offset in intervals], np.int64)
    changes = np.array([begin for begin, _, _ in intervals[1:]], np.int64)
    before, after = offsets[:-1], offsets[1:]
    return offsets, changes + np.maximum(before, after), changes + np.minimum(before, after)


def _intervals_of(rules: bytes, year: int) -> Iterator[tuple[int, int, int]]:
    start, end = (int(np.datetime64(f"{each:04}", "s").astype(np.int64)) for each in (year, year + 1))
    for interval in offset_intervals(rules, start - 2 * _DAY_SECONDS):
        if interval[0] > end + 2 * _DAY_SECONDS:
            return
        yield interval


def differs_from_java(spark: SparkSession, zone_times: ZoneTimes, now: datetime) -> bool:
    """Return whether Java has other rules than ``zone_times`` for the zone in the ten years from now."""
    zone, start = zone_times.local_times.zone, to_microseconds(now) // 1_000_000
    end = start + 3_653 * _DAY_SECONDS
    offsets = dict[int, int]()
    for first, last, offset in offset_intervals(zone_times.rules, start):
        if first >= end:
            break
        offsets.update(dict.fromkeys((*range(first, last, 7 * _DAY_SECONDS), last - 1), offset))
    instants = pa.table({"second": pa.array(offsets, pa.int64())})
    instant = F.timestamp_seconds("second")
    try:
        shown = F.unix_seconds(F.from_utc_timestamp(instant, zone)) - F.col("second")
        rows = spark.createDataFrame(instants).select("second", shown.alias("offset")).collect()
    except Exception as error:
        if "zone" not in str(error).lower():
            raise
        return True  # Java does not know the zone.
    return any(offsets[row["second"]] != row["offset"] for row in rows)
