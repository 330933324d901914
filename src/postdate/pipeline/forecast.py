"""Forecast how many messages are due when and where, and the dispatching that they need: load, herds, needed rate.

Spark counts messages by second and destination, once. Everything else is computed from these counts. Only counts by
second come to the driver, for :mod:`postdate.pipeline.forecast_rates`. Nothing is changed and services may run
meanwhile; a message that moves while the store is read may or may not be counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime

import numpy as np
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import StringType, TimestampType

from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import PipelineError
from postdate.messages import OF_THE_STORE, aware_utc
from postdate.pipeline import forecast_result, forecast_shape
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.forecast_rates import HerdSpan, Load, find_herds, horizon
from postdate.pipeline.frames import STORAGE, persist_frame, scan_frame, scan_parts
from postdate.pipeline.rows import CALENDAR, quote_name
from postdate.pipeline.session import check_utc
from postdate.pipeline.stores import StoreSpec

MOST_STEPS = 4_000_000
"""Maximum number of due times that come to the driver. Beyond it, ten seconds or more are counted as one."""

_STEPS_SECONDS = (1, 10, 60, 300, 600, 3_600, 86_400, 864_000, 31_536_000)


@shorten_errors("the forecast has failed")
def forecast(
    spark: SparkSession,
    store: StoreSpec,
    now: datetime,
    options: forecast_result.ForecastOptions | None = None,
    *,
    partitions: int = 4,
) -> forecast_result.ForecastResult:
    """Forecast the pending messages of a store.

    This runs on the driver; the store is read and counted on the executors.

    Args:
        spark: a session in UTC.
        store: the store to read. Retried messages count at the time at which they were first due.
        now: the instant against which overdue is measured, and at which dispatching begins; aware.
        options: the defaults if left out.
        partitions: number of tasks that read at the same time, at least 1.

    Raises:
        StoreError: the store is missing or unreachable.
        PipelineError: the store cannot be read in bulk, or the session is not in UTC.
    """
    if partitions < 1:
        raise PipelineError(f"{partitions} tasks read nothing; give at least 1")
    started, as_of = time.perf_counter(), aware_utc(now, "now")
    check_utc(spark)
    pending = scan_frame(spark, store, "pending", ("due", "destination"), scan_parts(store, "pending", partitions))
    pending = pending.where(~F.col("destination").isin(*OF_THE_STORE))
    return _forecast(pending, as_of, options or forecast_result.ForecastOptions(), store.redacted_address, started)


@shorten_errors("the forecast has failed")
def forecast_frame(
    messages: DataFrame,
    now: datetime,
    options: forecast_result.ForecastOptions | None = None,
    *,
    due: str = "due",
    destination: str = "destination",
) -> forecast_result.ForecastResult:
    """Forecast any table of messages, such as a plan that is not scheduled yet.

    This runs on the driver; the table is read once, on the executors.

    Args:
        messages: one message a row, in a session in UTC. Rows without a due time, or with one outside the years 1 to
            9999, are counted and left out.
        now: the instant against which overdue is measured, and at which dispatching begins; aware.
        options: the defaults if left out.
        due: name of the column with due times, of the type timestamp.
        destination: name of the column with destinations, of the type string; may be null.

    Raises:
        PipelineError: a column is missing or of another type, or the session is not in UTC.
    """
    started, as_of = time.perf_counter(), aware_utc(now, "now")
    check_utc(messages.sparkSession)
    columns_by_name = {"due": (due, TimestampType()), "destination": (destination, StringType())}
    for name, expected in columns_by_name.values():
        if name not in messages.columns:
            raise PipelineError(f"there is no column {name!r}; there are {', '.join(messages.columns)}")
        actual = messages.schema[name].dataType
        if actual != expected:
            raise PipelineError(
                f"the column {name!r} is {actual.simpleString()}, and a forecast needs {expected.simpleString()}; "
                f"cast it before"
            )
    columns = [messages[quote_name(column)].alias(name) for name, (column, _) in columns_by_name.items()]
    return _forecast(messages.select(columns), as_of, options or forecast_result.ForecastOptions(), "a table", started)


def _forecast(
    messages: DataFrame, as_of: datetime, options: forecast_result.ForecastOptions, source: str, started: float
) -> forecast_result.ForecastResult:
    with ExitStack() as stack:
        counts = persist_frame(stack, _count_by_second(messages, as_of))
        total = _total(counts)
        step = _step(counts, total["groups"])
        upcoming = _upcoming(counts, step)
        width = forecast_shape.interval_width(upcoming, options.width)
        last = horizon(upcoming) if len(upcoming) else 0
        destinations = _destinations(counts) if total["groups"] else ()
        destination_count = len(destinations)
        if destination_count == forecast_shape.MOST_DESTINATIONS:
            destination_count = counts.where("second IS NOT NULL").select("destination").distinct().count()
        spans = find_herds(upcoming, options.herd_factor, options.herd_least)
        load_width = forecast_shape.load_width(upcoming, options.width)
        return forecast_result.ForecastResult(
            source=source,
            as_of=as_of,
            options=options,
            step_seconds=step,
            messages=total["messages"],
            overdue=total["overdue"],
            without_due=total["without_due"],
            first_due=None if total["first"] is None else from_microseconds(total["first"]),
            last_due=None if total["last"] is None else from_microseconds(total["last"]),
            destinations=destinations,
            destinations_found=destination_count,
            intervals=_intervals(counts, width, last + step, destinations) if len(upcoming) else (),
            interval_seconds=width,
            beyond=int(upcoming.counts[upcoming.seconds > last].sum()),
            herds=_herds(counts, spans[: forecast_shape.MOST_HERDS], step),
            herds_found=len(spans),
            needed=forecast_shape.needed_rates(upcoming, as_of, total["overdue"], options.tolerance),
            load_width_seconds=load_width,
            load=_load(counts, load_width),  # This is the last step of Spark, because the table stays in its memory.
            took_seconds=time.perf_counter() - started,
        )


# --- counting ---------------------------------------------------------------------------------------------------------


def _count_by_second(messages: DataFrame, as_of: datetime) -> DataFrame:
    """Count by second and destination. Rows without a due time have no second."""
    due = F.unix_micros("due")
    has_due = due.between(*CALENDAR)
    second = F.when(has_due, F.unix_seconds("due")).alias("second")
    timed_messages = messages.select("destination", F.when(has_due, due).alias("due"), second)
    return timed_messages.groupBy("second", "destination").agg(
        F.count("*").alias("messages"),
        F.count_if(F.col("due") < to_microseconds(as_of)).alias("overdue"),
        F.min("due").alias("first"),
        F.max("due").alias("last"),
    )


def _floor_seconds(seconds: Column, width: int) -> Column:
    return F.floor(seconds / width) * width  # The division is exact: a double can represent this many seconds.


def _total(counts: DataFrame) -> Row:
    has_time = F.col("second").isNotNull()

    def sum_where(column: str, condition: Column) -> Column:
        return F.coalesce(F.sum(F.when(condition, F.col(column))), F.lit(0))

    return counts.agg(
        F.count("second").alias("groups"),
        sum_where("messages", has_time).alias("messages"),
        sum_where("overdue", has_time).alias("overdue"),
        sum_where("messages", ~has_time).alias("without_due"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
    ).collect()[0]


def _step(counts: DataFrame, groups: int) -> int:
    """Return the smallest step in seconds with which at most ``MOST_STEPS`` steps come to the driver."""
    if groups <= MOST_STEPS:
        return 1
    fitting_steps = (
        step
        for step in _STEPS_SECONDS
        if counts.select(_floor_seconds(F.col("second"), step)).distinct().count() <= MOST_STEPS
    )
    return next(fitting_steps, _STEPS_SECONDS[-1])


def _upcoming(counts: DataFrame, step: int) -> Load:
    """Return the load by step, without overdue messages."""
    by_step = counts.where("messages > overdue").where("second IS NOT NULL")
    by_step = by_step.groupBy(_floor_seconds(F.col("second"), step).alias("step"))
    table = by_step.agg(F.sum(F.col("messages") - F.col("overdue")).alias("messages")).toArrow()
    seconds, messages = (np.asarray(table[name], np.int64) for name in ("step", "messages"))
    order = np.argsort(seconds)
    return Load(seconds[order], messages[order], step)


def _destinations(counts: DataFrame) -> tuple[forecast_result.DestinationLoad, ...]:
    by_destination = counts.where("second IS NOT NULL").groupBy("destination")
    rows = by_destination.agg(
        F.sum("messages").alias("messages"),
        F.sum("overdue").alias("overdue"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
        F.max("messages").alias("most"),
    )
    return tuple(
        forecast_result.DestinationLoad(
            destination=row["destination"],
            messages=row["messages"],
            overdue=row["overdue"],
            first_due=from_microseconds(row["first"]),
            last_due=from_microseconds(row["last"]),
            most_in_a_second=row["most"],
        )
        for row in rows.orderBy(F.desc("messages"), "destination").limit(forecast_shape.MOST_DESTINATIONS).collect()
    )


# --- over time --------------------------------------------------------------------------------------------------------


def _load(counts: DataFrame, width: int) -> DataFrame:
    """Return the table, computed and persisted, so that the counts are no longer needed."""
    start = F.timestamp_seconds(_floor_seconds(F.col("second"), width)).alias("start")
    load = (
        counts.where("second IS NOT NULL")
        .groupBy(start, "destination")
        .agg(F.sum("messages").alias("messages"), F.sum("overdue").alias("overdue"))
        .persist(STORAGE)
    )
    load.count()
    return load


def _intervals(
    counts: DataFrame, width: int, end: int, destinations: Sequence[forecast_result.DestinationLoad]
) -> tuple[forecast_result.LoadInterval, ...]:
    separate_names = [each.destination for each in destinations[: forecast_shape.SEPARATE_DESTINATIONS]]
    name = F.col("destination")
    index = F.coalesce(
        *(
            F.when(name.isNull() if each is None else name == each, number)
            for number, each in enumerate(separate_names)
        ),
        F.lit(len(separate_names)),
    )
    upcoming = counts.where("messages > overdue").where(F.col("second") < end)
    by_start = upcoming.groupBy(_floor_seconds(F.col("second"), width).alias("start"), index.alias("place"))
    rows = by_start.agg(F.sum(F.col("messages") - F.col("overdue")).alias("messages")).collect()
    counts_by_start: dict[int, dict[int, int]] = {}
    for row in rows:
        counts_by_start.setdefault(row["start"], {})[row["place"]] = row["messages"]
    return tuple(
        forecast_result.LoadInterval(
            start=from_microseconds(start * 1_000_000),
            messages=sum(by_place.values()),
            destinations=tuple(
                forecast_result.DestinationShare(each, by_place[number])
                for number, each in enumerate(separate_names)
                if number in by_place
            ),
            others=by_place.get(len(separate_names), 0),
        )
        for start, by_place in sorted(counts_by_start.items())
    )


def _herds(counts: DataFrame, spans: Sequence[HerdSpan], step: int) -> tuple[forecast_result.Herd, ...]:
    """Add to each herd the destinations of its messages."""
    if not spans:
        return ()
    rows = [(number, span.start, span.start + span.seconds - step) for number, span in enumerate(spans)]
    herds = counts.sparkSession.createDataFrame(rows, "herd int, start long, last long")
    steps = F.explode(F.sequence("start", "last", F.lit(step).cast("long"))).alias("step")
    upcoming = counts.where("messages > overdue").withColumn("step", _floor_seconds(F.col("second"), step))
    by_size = F.sort_array(F.collect_list(F.struct("fewer", "destination")))
    herd_shares = (
        upcoming.join(F.broadcast(herds.select("herd", steps)), "step")
        .groupBy("herd", "destination")
        # The number is negative, so that the largest comes first.
        .agg(F.sum(F.col("overdue") - F.col("messages")).alias("fewer"))
        .groupBy("herd")
        .agg(F.slice(by_size, 1, forecast_shape.DESTINATIONS_OF_A_HERD))
    )
    top_shares = {
        row[0]: tuple(forecast_result.DestinationShare(share["destination"], -share["fewer"]) for share in row[1])
        for row in herd_shares.collect()
    }
    return tuple(forecast_result.Herd.of(span, top_shares[number]) for number, span in enumerate(spans))
