"""Add up judged messages: in total, by endpoint, by destination, and by hour of the due time.

**Totals are sums.** A row of totals has a key (a level, and the endpoint, destination or hour of that level), a bin of
lateness, and counts. Totals of different messages are merged by adding counts, and a message is taken out of them with
a weight of -1. So a later audit can carry them on, see :mod:`postdate.pipeline.audit.state`.

**Percentiles come from bins.** The bins are equal on a logarithmic scale, so narrow that the values of one bin differ
by less than 1 %. Each bin keeps the largest of its values, and a percentile is that value of the bin in which its rank
lies: at most 1 % too high, never too low, and exact for the maximum. These are the sketches of Masson, Rim and Lee,
"DDSketch" (2019), as rows of a frame: Spark adds them up like any other count, and no key needs more memory than its
bins.

**The driver gets a bounded number of rows**: the keys with most faults, and the sum of all others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from functools import reduce

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import from_microseconds
from postdate.pipeline.audit import summaries
from postdate.pipeline.audit.results import BROKEN_PROMISES, AuditCounts, AuditRow, CurvePoint, Lateness, LatenessBin
from postdate.pipeline.audit.summaries import COUNTS, MOST_DESTINATIONS, MOST_HOURS, AuditTable, Summary, subtract
from postdate.pipeline.frames import persist_frame

_KEYS = ("endpoint", "destination", "hour")
_ALL, _ENDPOINT, _DESTINATION, _HOUR = 0b111, 0b011, 0b101, 0b110
"""Levels: a bit for each of endpoint, destination and hour by which the level is not grouped."""

# --- totals as frames -------------------------------------------------------------------------------------------------


def count_totals(verdicts: DataFrame) -> DataFrame:
    """Return the totals of judged messages: one row for each key and bin.

    A column ``weight`` of ``verdicts``, if there is one, says how often each message counts.
    """
    weight = F.col("weight") if "weight" in verdicts.columns else F.lit(1)
    messages = verdicts.select(
        "endpoint",
        "destination",
        F.date_trunc("hour", "due").alias("hour"),
        _bin_number("late_microseconds").alias("bin"),
        F.unix_seconds(F.least("due", "delivered_at")).alias("first"),
        F.unix_seconds(F.greatest("due", "delivered_at")).alias("last"),
        "late_microseconds",
        weight.alias("weight"),
        *COUNTS,
    )
    return (
        messages.groupingSets([["bin"], *([name, "bin"] for name in _KEYS)], *_KEYS, "bin")
        .agg(
            # The last bit is that of the bin, by which every level is grouped.
            F.shiftright(F.grouping_id(), 1).alias("level"),
            F.sum("weight").alias("messages"),
            F.max("late_microseconds").alias("latest"),
            F.min("first").alias("first"),
            F.max("last").alias("last"),
            *(F.coalesce(F.sum(F.when(F.col(name), F.col("weight"))), F.lit(0)).alias(name) for name in COUNTS),
        )
        .select("level", *_KEYS, "bin", "messages", "latest", "first", "last", *COUNTS)
    )


def merge_totals(totals: Sequence[DataFrame]) -> DataFrame:
    """Return the totals of all messages of several totals."""
    return (
        reduce(lambda one, other: one.unionByName(other), totals)
        .groupBy("level", *_KEYS, "bin")
        .agg(
            F.sum("messages").alias("messages"),
            F.max("latest").alias("latest"),
            F.min("first").alias("first"),
            F.max("last").alias("last"),
            *(F.sum(name).alias(name) for name in COUNTS),
        )
    )


def _bin_number(name: str) -> Column:
    """Return the bin of a lateness in microseconds, which is negative if the delivery was early."""
    late = F.col(name)
    magnitude = F.floor(F.log10(F.greatest(F.abs(late), F.lit(1))) * summaries.BINS_A_DECADE)
    # Without the second condition, a message that was not delivered would be in bin 0: greatest() ignores null.
    return F.when(late < 0, -1 - magnitude).when(late >= 0, magnitude).cast("int")


def rows_of_keys(totals: DataFrame) -> DataFrame:
    """Return one row for each key: counts, and ``percentiles`` of the lateness in microseconds, or null."""
    in_bin = F.when(F.col("bin").isNotNull() & (F.col("messages") > 0), F.struct("bin", "messages", "latest"))
    rows = totals.groupBy("level", *_KEYS).agg(
        F.sum("messages").alias("messages"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
        F.array_sort(F.collect_list(in_bin)).alias("bins"),
        *(F.sum(name).alias(name) for name in COUNTS),
    )
    deliveries = F.aggregate("bins", F.lit(0).cast("long"), lambda total, each: total + each["messages"])
    percentiles = F.array(*(_percentile(share) for share in summaries.PERCENTILES))
    return (
        rows.where("messages > 0")
        .withColumn("deliveries", deliveries)
        .withColumn("percentiles", F.when(F.col("deliveries") > 0, percentiles))
        .drop("bins", "deliveries")
    )


def _percentile(share: float) -> Column:
    """Return the largest value of the bin in which the rank lies."""
    rank = F.ceil(F.col("deliveries") * share)
    start = F.struct(F.lit(0).cast("long").alias("before"), F.lit(None).cast("long").alias("value"))

    def advance(state: Column, each: Column) -> Column:
        step = F.struct((state["before"] + each["messages"]).alias("before"), each["latest"].alias("value"))
        return F.when(state["before"] < rank, step).otherwise(state)

    return F.aggregate("bins", start, advance, lambda state: state["value"])


# --- what the driver gets ---------------------------------------------------------------------------------------------


def summarize(stack: ExitStack, totals: DataFrame) -> tuple[Summary, DataFrame]:
    """Return the summary, and a frame with one row for each destination. ``stack`` keeps the frame.

    ``totals`` are read twice.
    """
    keys = persist_frame(stack, rows_of_keys(totals))
    few = keys.where(F.col("level").isin(_ALL, _ENDPOINT)).collect()
    numbers = {row["level"]: row["count"] for row in keys.groupBy("level").count().collect()}
    total_row = next((row for row in few if row["level"] == _ALL), None)
    total = AuditRow("all", AuditCounts(), Lateness()) if total_row is None else _audit_row(total_row, "all")
    by_endpoint = sorted((_audit_row(row, row["endpoint"]) for row in few if row["level"] == _ENDPOINT), key=_name)

    def table(level: int, key: Column, most: int, remainder_name: str) -> AuditTable:
        rows = tuple(_audit_row(row, row["key"]) for row in _worst(keys.where(F.col("level") == level), key, most))
        number = numbers.get(level, 0)
        remainder = AuditRow(remainder_name, subtract(total.counts, rows), Lateness()) if number > len(rows) else None
        return AuditTable(rows, number, remainder)

    hour_text = F.coalesce(F.date_format("hour", "yyyy-MM-dd'T'HH:mm'Z'"), F.lit("(never due)"))
    by_hour = table(_HOUR, hour_text, MOST_HOURS, "all other hours")
    summary = Summary(
        total=total,
        by_endpoint=tuple(by_endpoint),
        by_destination=table(_DESTINATION, F.col("destination"), MOST_DESTINATIONS, "all others"),
        by_hour=AuditTable(tuple(sorted(by_hour.rows, key=_name)), by_hour.keys, by_hour.remainder),
        lateness_bins=_shown_bins(totals),
        span_seconds=0 if total_row is None else (total_row["last"] or 0) - (total_row["first"] or 0),
    )
    return summary, _destinations_frame(keys)


def _name(row: AuditRow) -> str:
    return row.key


def _worst(rows: DataFrame, key: Column, most: int) -> list[Row]:
    faults = reduce(operator.add, (F.col(name) for name in BROKEN_PROMISES))
    # The driver gets no hours: in a time zone east of UTC, the last hours of the year 9999 do not exist.
    keys = rows.withColumn("key", key).drop("hour")
    return keys.orderBy(F.desc(faults), F.desc("messages"), "key").limit(most).collect()


def _audit_row(row: Row, key: str | None) -> AuditRow:
    percentiles = row["percentiles"]
    lateness = Lateness() if percentiles is None else Lateness(*(microseconds / 1e6 for microseconds in percentiles))
    return AuditRow(key or "(unknown)", AuditCounts(**{name: row[name] for name in COUNTS}), lateness)


def _destinations_frame(keys: DataFrame) -> DataFrame:
    seconds = [f"{name}_seconds" for name in ("p50", "p95", "p99", "max")]
    percentiles = (F.col("percentiles")[number] / 1e6 for number in range(len(seconds)))
    return keys.where(F.col("level") == _DESTINATION).select(
        "destination", *COUNTS, *(each.alias(name) for name, each in zip(seconds, percentiles, strict=True))
    )


def _shown_bins(totals: DataFrame) -> tuple[LatenessBin, ...]:
    """Return the distribution of lateness. Early deliveries are findings, not lateness."""
    number = F.floor(F.col("bin") / summaries.BINS_IN_A_SHOWN_BIN)
    bins = totals.where(F.col("level") == _ALL).where("bin >= 0").groupBy(number.alias("bin"))
    return tuple(
        LatenessBin(
            10 ** (row["bin"] / summaries.SHOWN_BINS_A_DECADE) / 1e6,
            10 ** ((row["bin"] + 1) / summaries.SHOWN_BINS_A_DECADE) / 1e6,
            row["messages"],
        )
        for row in sorted(bins.agg(F.sum("messages").alias("messages")).where("messages > 0").collect())
    )


# --- the curve --------------------------------------------------------------------------------------------------------


def count_curve(verdicts: DataFrame, width: int) -> DataFrame:
    """Count due and delivered messages in each interval of ``width`` seconds: start, due, delivered.

    Empty intervals are left out. ``weight`` is that of :func:`count_totals`.
    """
    weight = F.col("weight") if "weight" in verdicts.columns else F.lit(1)

    def event_struct(column: str, due: Column, delivered: Column) -> Column:
        second = F.unix_seconds(column).alias("second")
        return F.struct(second, due.alias("due"), delivered.alias("delivered"))

    event = F.explode(F.array(event_struct("due", weight, F.lit(0)), event_struct("delivered_at", F.lit(0), weight)))
    points = verdicts.select(event.alias("event")).select("event.*").where("second IS NOT NULL")
    return _add_up_points(points, F.col("second"), width)


def merge_curves(curves: Sequence[DataFrame], width: int) -> DataFrame:
    """Return the sum of several curves, in wider intervals."""
    return _add_up_points(reduce(lambda one, other: one.unionByName(other), curves), F.col("start"), width)


def _add_up_points(points: DataFrame, second: Column, width: int) -> DataFrame:
    start = (F.floor(second / width) * width).alias("start")
    return points.groupBy(start).agg(F.sum("due").alias("due"), F.sum("delivered").alias("delivered"))


def curve_of(points: DataFrame) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(from_microseconds(row["start"] * 1_000_000), row["due"], row["delivered"])
        for row in sorted(points.where("due <> 0 OR delivered <> 0").collect())
    )
