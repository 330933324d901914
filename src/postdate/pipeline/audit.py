"""What was scheduled against what became of it: lost, duplicated, early, overdue; how late; by destination and by hour.

**A consistent picture while others work.** Messages move while the audit reads. The order of reading makes up for it:

1. the number of the last record is noted; what was scheduled or delivered up to here is what is audited;
2. what waits is read, then what is in the queues;
3. all records are read, also those written since.

A message that had not ended by step 3 waited during the whole of step 2, so step 2 saw it; one that was delivered
before step 1 and not handled by step 3 was in its queue during the whole of step 2. So what is found nowhere is lost,
however busy the store is; and nothing is stopped or locked.

All of it is one aggregation by message id: waiting and queued messages join the records as if they were records.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import from_microseconds
from postdate.messages import aware_utc
from postdate.pipeline.frames import scan_frame, scan_parts
from postdate.pipeline.session import require_utc
from postdate.pipeline.stores import StoreSpec
from postdate.ports import ScanPart

SAMPLE_SIZE = 100
"""Message ids shown for one finding, at most."""

_CURVE_POINTS = 400
"""Points of the curve over time, at most."""

_WIDTHS_SECONDS = (1, 10, 60, 300, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000, 31_536_000)
_BINS_A_DECADE = 8
_IN_ALL, _BY_HOUR, _BY_DESTINATION = 0b11, 0b10, 0b01
"""Grouping ids: a bit for each of destination and hour that is not grouped by."""

_RECORD_COLUMNS = ("kind", "message_id", "at", "due", "destination")
_COUNTED = ("handled", "discarded", "expired", "cancelled", "failed", "returned", "retried", "pending", "queued")
_KEPT = StorageLevel.MEMORY_AND_DISK
_PERCENTILES = (0.5, 0.95, 0.99, 1.0)
_PERCENTILE_ACCURACY = 100_000
"""A percentile is off by at most one in this many ranks."""


# --- result -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """How many messages; a message counts once in each line that is true of it.

    Args:
        scheduled: stored to be delivered.
        delivered: put into their queue.
        handled: handled by the receiver.
        queued: delivered and waiting to be handled; only where store and queues share a database.
        pending: waiting to be due, or for another attempt.
        overdue: pending and past the due time.
        expired: past their expiry: not delivered when due, or delivered and discarded by the receiver.
        cancelled: withdrawn before they were due.
        failed: moved to the error queue, and not returned from there.
        retried: with at least one failed attempt.
        lost: scheduled, and nowhere to be found; or delivered, gone from the queue, and not handled.
        duplicated: delivered or handled more than once, or still pending after they ended.
        early: delivered, or handled by the receiver, before they were due.
        late: delivered later after their due time than is allowed.
    """

    scheduled: int = 0
    delivered: int = 0
    handled: int = 0
    queued: int = 0
    pending: int = 0
    overdue: int = 0
    expired: int = 0
    cancelled: int = 0
    failed: int = 0
    retried: int = 0
    lost: int = 0
    duplicated: int = 0
    early: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class Lateness:
    """From due to delivered, in seconds; ``None`` without any delivery."""

    p50_seconds: float | None = None
    p95_seconds: float | None = None
    p99_seconds: float | None = None
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Counts of one destination, or of what was due within one hour (``key``: its beginning, ISO 8601, UTC)."""

    key: str
    counts: AuditCounts
    lateness: Lateness


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that should not be.

    Args:
        name: of the line in :class:`AuditCounts`.
        count: messages.
        sample: ids of some of them, in order.
    """

    name: str
    count: int
    sample: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """How many messages were due, and how many were delivered, in one interval that begins ``at`` (UTC)."""

    at: datetime
    due: int
    delivered: int


@dataclass(frozen=True, slots=True)
class LatenessBin:
    """Deliveries that were late by at least ``from_seconds`` and less than ``to_seconds``."""

    from_seconds: float
    to_seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The whole picture.

    Args:
        store: address, without password.
        as_of: the instant against which overdue is meant; UTC.
        late_after_seconds: how late a delivery may be.
        counts: of all messages.
        lateness: of all deliveries.
        by_destination: in order of the name.
        by_hour: of the due time, in order.
        findings: what should not be: ``lost``, ``duplicated``, ``early``, ``overdue``, ``failed``, ``late``; empty ones
            are left out.
        curve: due and delivered over time.
        curve_seconds: length of one interval of the curve.
        lateness_bins: distribution of the lateness, in bins of equal width on a logarithmic scale.
        took_seconds: how long the audit took.
    """

    store: str
    as_of: datetime
    late_after_seconds: float
    counts: AuditCounts
    lateness: Lateness
    by_destination: tuple[AuditRow, ...] = ()
    by_hour: tuple[AuditRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    curve_seconds: int = 60
    lateness_bins: tuple[LatenessBin, ...] = ()
    took_seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """No message was lost, duplicated, or delivered early."""
        return not (self.counts.lost or self.counts.duplicated or self.counts.early)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for JSON; instants in ISO 8601."""
        plain: dict[str, Any] = _plain(asdict(self))
        return {"clean": self.clean, **plain}

    def table(self) -> list[tuple[str, str]]:
        """Return the totals as lines of name and value, for terminals."""
        counted = [(name, f"{value:,}") for name, value in asdict(self.counts).items()]
        lateness = [
            (f"lateness {name.removesuffix('_seconds')}", "-" if value is None else f"{value:.3f} s")
            for name, value in asdict(self.lateness).items()
        ]
        return counted + lateness


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(entry) for key, entry in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list() | tuple():
            return [_plain(entry) for entry in value]  # pyright: ignore[reportUnknownVariableType]
        case datetime():
            return value.isoformat()
        case _:
            return value


# --- the audit --------------------------------------------------------------------------------------------------------


def audit(
    spark: SparkSession,
    store: StoreSpec,
    now: datetime,
    *,
    late_after: timedelta = timedelta(seconds=1),
    partitions: int = 4,
) -> AuditResult:
    """Compare what was scheduled with what became of it.

    Runs on the driver; the store is read and the comparison is made on the executors. Changes nothing.

    Args:
        spark: a session in UTC that knows the format ``postdate``.
        store: what to audit.
        now: what overdue is measured against; aware.
        late_after: how late a delivery may be before it counts as late.
        partitions: tasks that read at the same time.

    Raises:
        StoreError: the store is missing or unreachable.
        PipelineError: the store cannot be read in bulk.
    """
    started = time.perf_counter()
    require_utc(spark)
    as_of = aware_utc(now, "now")
    with _messages(spark, store, partitions) as messages:
        judged = _judged(messages, as_of, late_after).persist(_KEPT)
        try:
            summary = _summary(judged)
            width = _width(summary)
            return AuditResult(
                store=store.shown,
                as_of=as_of,
                late_after_seconds=late_after.total_seconds(),
                counts=summary.total.counts,
                lateness=summary.total.lateness,
                by_destination=summary.by_destination,
                by_hour=summary.by_hour,
                findings=_findings(judged, summary.total.counts),
                curve=_curve(judged, width),
                curve_seconds=width,
                lateness_bins=_lateness_bins(judged),
                took_seconds=time.perf_counter() - started,
            )
        finally:
            judged.unpersist()


# --- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def _messages(spark: SparkSession, store: StoreSpec, partitions: int) -> Generator[DataFrame]:
    """Read the store in the order that the module describes; give one row a message that was scheduled by step 1."""
    seen = scan_parts(store, "records", partitions)
    seen_end = seen[-1].end if seen else 0
    waiting = _read(spark, store, "pending", ("message_id", "due", "destination"), partitions)
    queued = _read(spark, store, "queued", ("message_id", "due", "queue"), partitions)
    try:
        since = [part for part in scan_parts(store, "records", partitions) if part.end > seen_end]
        since = [ScanPart(max(part.first, seen_end), part.end) for part in since]
        before, after = (
            scan_frame(spark, store, "records", _RECORD_COLUMNS, parts).withColumn("before", F.lit(number))
            for parts, number in ((seen, 1), (since, 0))
        )
        yield _one_row_a_message([before, after, _as_records(waiting, "pending"), _as_records(queued, "queued")])
    finally:
        waiting.unpersist()
        queued.unpersist()


def _read(spark: SparkSession, store: StoreSpec, what: str, columns: Sequence[str], partitions: int) -> DataFrame:
    """Read something now, and keep it: a frame that were read again later would be another picture."""
    frame = scan_frame(spark, store, what, columns, scan_parts(store, what, partitions)).persist(_KEPT)
    frame.count()
    return frame


def _as_records(frame: DataFrame, kind: str) -> DataFrame:
    destination = F.col("queue" if kind == "queued" else "destination")
    # What was sent without a delay is in the queues as well, without a due time, and is none of the audit's business.
    return frame.where(F.col("due").isNotNull()).select(
        F.lit(kind).alias("kind"),
        "message_id",
        F.lit(None).cast("timestamp").alias("at"),
        F.col("due"),
        destination.alias("destination"),
        F.lit(1).alias("before"),
    )


def _one_row_a_message(frames: Sequence[DataFrame]) -> DataFrame:
    records = frames[0]
    for frame in frames[1:]:
        records = records.unionByName(frame)

    def count(*kinds: str) -> Column:
        return F.count_if(F.col("kind").isin(*kinds))

    delivered = F.when(F.col("kind") == "delivered", F.col("at"))
    ended = F.col("kind").isin("delivered", "expired", "cancelled", "failed")
    grouped = records.groupBy("message_id").agg(
        F.coalesce(F.max(F.when(F.col("kind") == "scheduled", F.col("destination"))), F.max("destination")).alias(
            "destination"
        ),
        # The due time of the delivery, else the latest that was set: a rescheduled message has had several.
        F.coalesce(
            F.max_by(F.when(F.col("kind") == "delivered", F.col("due")), delivered),
            F.max(F.when(F.col("kind") == "pending", F.col("due"))),
            F.max_by("due", "at"),
        ).alias("due"),
        F.min(delivered).alias("delivered_at"),
        F.count_if((F.col("kind") == "scheduled") & (F.col("before") == 1)).alias("scheduled"),
        count("delivered").alias("delivered"),
        F.count_if((F.col("kind") == "delivered") & (F.col("before") == 1)).alias("delivered_before"),
        F.count_if(ended & (F.col("before") == 1)).alias("ended_before"),
        F.count_if(ended).alias("ended"),
        F.min(F.when(F.col("kind") == "handled", F.col("at"))).alias("handled_at"),
        *(count(kind).alias(kind) for kind in _COUNTED),
    )
    return grouped.where((F.col("scheduled") > 0) | (F.col("pending") > 0) | (F.col("ended_before") > 0))


# --- judging ----------------------------------------------------------------------------------------------------------


def _judged(messages: DataFrame, as_of: datetime, late_after: timedelta) -> DataFrame:
    """Say of each message which lines of :class:`AuditCounts` are true of it."""
    # Only receivers that record say what became of a delivered message. One handled message shows that those of its
    # destination do; without any, a message that has left its queue is not missed.
    recording = (
        messages.where((F.col("handled") + F.col("discarded") > 0) & F.col("destination").isNotNull())
        .select("destination", F.lit(True).alias("recording"))
        .distinct()
    )
    lateness = (F.unix_micros("delivered_at") - F.unix_micros("due")).alias("late_microseconds")
    known = messages.join(F.broadcast(recording), "destination", "left").withColumn("late_microseconds", lateness)
    nowhere = (F.col("scheduled") > 0) & (F.col("ended") == 0) & (F.col("pending") == 0)
    unhandled = F.col("handled") + F.col("discarded") + F.col("failed") + F.col("retried") + F.col("queued") == 0
    vanished = F.coalesce("recording", F.lit(False)) & (F.col("delivered_before") > 0) & unhandled
    repeated = (F.col("delivered") > 1) | (F.col("handled") + F.col("discarded") > 1)
    true_of = {
        "scheduled": (F.col("scheduled") > 0) | (F.col("pending") > 0),
        "delivered": F.col("delivered") > 0,
        "handled": F.col("handled") > 0,
        "queued": (F.col("queued") > 0) & (F.col("failed") <= F.col("returned")),
        "pending": (F.col("pending") > 0) & (F.col("ended") == 0),
        "overdue": (F.col("pending") > 0) & (F.col("ended") == 0) & (F.col("due") < F.lit(as_of)),
        "expired": F.col("expired") + F.col("discarded") > 0,
        "cancelled": F.col("cancelled") > 0,
        "failed": F.col("failed") > F.col("returned"),
        "retried": F.col("retried") > 0,
        "lost": nowhere | vanished,
        "duplicated": repeated | ((F.col("ended_before") > 0) & (F.col("pending") > 0)),
        "early": (F.col("late_microseconds") < 0) | (F.col("handled_at") < F.col("due")),
        "late": F.col("late_microseconds") > late_after // timedelta(microseconds=1),
    }
    return known.select(
        "message_id",
        "destination",
        "due",
        "delivered_at",
        "late_microseconds",
        *(F.coalesce(column, F.lit(False)).alias(name) for name, column in true_of.items()),
    )


@dataclass(frozen=True, slots=True)
class _Summary:
    total: AuditRow
    by_destination: tuple[AuditRow, ...]
    by_hour: tuple[AuditRow, ...]
    first_second: int | None
    last_second: int | None


def _summary(judged: DataFrame) -> _Summary:
    """Count everything at once: in all, by destination, by hour of the due time."""
    names = [field.name for field in fields(AuditCounts)]
    keyed = judged.withColumn("hour", F.date_trunc("hour", "due"))
    grouped = keyed.groupingSets([[], ["destination"], ["hour"]], "destination", "hour").agg(
        F.grouping_id().alias("level"),
        F.percentile_approx("late_microseconds", list(_PERCENTILES), _PERCENTILE_ACCURACY).alias("percentiles"),
        F.unix_seconds(F.least(F.min("due"), F.min("delivered_at"))).alias("first"),
        F.unix_seconds(F.greatest(F.max("due"), F.max("delivered_at"))).alias("last"),
        F.date_format("hour", "yyyy-MM-dd'T'HH:mm'Z'").alias("hour_text"),
        *(F.count_if(name).alias(name) for name in names),
    )
    levels: dict[int, list[Row]] = {_IN_ALL: [], _BY_DESTINATION: [], _BY_HOUR: []}
    for row in grouped.orderBy("destination", "hour").collect():
        levels[row["level"]].append(row)
    total = levels[_IN_ALL][0] if levels[_IN_ALL] else None
    return _Summary(
        total=AuditRow("all", AuditCounts(), Lateness()) if total is None else _audit_row(total, "all", names),
        by_destination=tuple(_audit_row(row, row["destination"], names) for row in levels[_BY_DESTINATION]),
        by_hour=tuple(_audit_row(row, row["hour_text"], names) for row in levels[_BY_HOUR]),
        first_second=None if total is None else total["first"],
        last_second=None if total is None else total["last"],
    )


def _audit_row(row: Row, key: str | None, names: Sequence[str]) -> AuditRow:
    late = row["percentiles"]
    lateness = Lateness() if late is None else Lateness(*(microseconds / 1e6 for microseconds in late))
    return AuditRow(key or "(unknown)", AuditCounts(**{name: row[name] for name in names}), lateness)


def _findings(judged: DataFrame, counts: AuditCounts) -> tuple[Finding, ...]:
    found = [
        (name, count)
        for name in ("lost", "duplicated", "early", "overdue", "failed", "late")
        if (count := getattr(counts, name))
    ]
    return tuple(
        Finding(name, count, tuple(row[0] for row in _ids(judged, name).take(SAMPLE_SIZE))) for name, count in found
    )


def _ids(judged: DataFrame, name: str) -> DataFrame:
    return judged.where(name).select("message_id").orderBy("message_id")


def _curve(judged: DataFrame, width: int) -> tuple[CurvePoint, ...]:
    """Count what was due and what was delivered in each interval of ``width`` seconds in which anything was."""

    def events(column: str, due: int, delivered: int) -> Column:
        second = F.unix_seconds(column).alias("second")
        return F.struct(second, F.lit(due).alias("due"), F.lit(delivered).alias("delivered"))

    both = F.explode(F.array(events("due", 1, 0), events("delivered_at", 0, 1)))
    start = F.floor(F.col("event.second") / width) * width
    counted = (
        judged.select(both.alias("event"))
        .where("event.second IS NOT NULL")
        .groupBy(start.alias("start"))
        .agg(F.sum("event.due").alias("due"), F.sum("event.delivered").alias("delivered"))
    )
    return tuple(
        CurvePoint(from_microseconds(row["start"] * 1_000_000), row["due"], row["delivered"])
        for row in counted.orderBy("start").collect()
    )


def _width(summary: _Summary) -> int:
    """Return a round number of seconds that cuts the time of the audit into few enough intervals."""
    span = (summary.last_second or 0) - (summary.first_second or 0)
    return next((width for width in _WIDTHS_SECONDS if span / width <= _CURVE_POINTS), _WIDTHS_SECONDS[-1])


def _lateness_bins(judged: DataFrame) -> tuple[LatenessBin, ...]:
    """Count deliveries in bins of a logarithmic scale from a microsecond up; early ones are findings, not lateness."""
    number = F.floor(F.log10(F.greatest("late_microseconds", F.lit(1))) * _BINS_A_DECADE)
    rows = judged.where("late_microseconds >= 0").groupBy(number.alias("bin")).count().orderBy("bin").collect()
    return tuple(
        LatenessBin(
            10 ** (row["bin"] / _BINS_A_DECADE) / 1e6, 10 ** ((row["bin"] + 1) / _BINS_A_DECADE) / 1e6, row["count"]
        )
        for row in rows
    )
