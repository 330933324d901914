"""Convert times as people write them to instants: on the executors.

A text with an offset (``2026-03-29T02:30:00+01:00``, ``…Z``) is an instant; Spark SQL reads it without Python. A text
without an offset is a clock time in some zone: in spring an hour of clock times never occurs, in autumn an hour of
clock times occurs twice. Clock times become instants by the rules of Python, which services of a store use as well. The
rules of Java are part of its runtime, and are often older.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import DataType, DateType, StringType, TimestampNTZType, TimestampType

from postdate.clock import to_microseconds
from postdate.core.zones import offset_intervals
from postdate.errors import PipelineError
from postdate.pipeline import time_texts
from postdate.pipeline.clock_times import (
    DAY_SECONDS,
    Ambiguous,
    LocalTimes,
    Nonexistent,
    ZoneTimes,
    resolve_clock_times,
)
from postdate.pipeline.rows import CALENDAR, quote_name

__all__ = ["Ambiguous", "LocalTimes", "Nonexistent", "ZoneTimes", "add_time", "differs_from_java"]

_NEAR_THE_ENDS: Final = "^(0000|0001-?01-?01|9999-?12-?31)"
_DAY_MICROSECONDS = timedelta(days=1) // timedelta(microseconds=1)
_DAYS = CALENDAR[0] // _DAY_MICROSECONDS, CALENDAR[1] // _DAY_MICROSECONDS
"""The years 1 to 9999, which are valid for a message, in days since 1970."""
_AT_MOST_A_DAY = timedelta(hours=25)
"""This is longer than any time by which clocks were ever set back (a day, at the date line)."""


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
    has_offset = text.rlike(time_texts.HAS_OFFSET)
    # Spark drops digits below a microsecond. The next microsecond is used instead, so that no message is early.
    has_more_digits = (F.length(text) > time_texts.TO_MICROSECONDS) & text.rlike(time_texts.BELOW_A_MICROSECOND)
    malformed = F.when(column.isNotNull() & time.isNull(), F.lit("malformed_time"))
    usual = F.when(column.rlike(time_texts.USUAL), column).otherwise(_usual_form(F.trim(column)))
    whole_day = F.replace(text, F.lit("T24:"), F.lit("T00:"))
    later = F.when(has_more_digits, start + F.lit(timedelta(microseconds=1))).otherwise(start)
    return (
        frame.withColumn(names["text"], usual)
        .withColumn(names["ends_a_day"], text.rlike(time_texts.ENDS_A_DAY))
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
    parts = F.regexp_replace(text, time_texts.ISO_8601, time_texts.PARTS)
    with_seconds = F.replace(F.upper(parts), F.lit(":."), F.lit(":00."))
    with_offset = F.regexp_replace(with_seconds, "([+-][0-9]{2}):$", "$1:00")
    plain = F.regexp_replace(F.regexp_replace(with_offset, ":$", ""), r"\.(?=[Z+-]|$)", "")
    return F.when(text.rlike(time_texts.ISO_8601), plain)


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


def differs_from_java(spark: SparkSession, zone_times: ZoneTimes, now: datetime) -> bool:
    """Return whether Java has other rules than ``zone_times`` for the zone in the ten years from now."""
    zone, start = zone_times.local_times.zone, to_microseconds(now) // 1_000_000
    end = start + 3_653 * DAY_SECONDS
    offsets = dict[int, int]()
    for first, last, offset in offset_intervals(zone_times.rules, start):
        if first >= end:
            break
        offsets.update(dict.fromkeys((*range(first, last, 7 * DAY_SECONDS), last - 1), offset))
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
