"""The audit: turn events into one row a message, judge each message, and add up the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import from_microseconds
from postdate.errors import PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.audit.judging import group_by_message, judge_messages
from postdate.pipeline.audit.reading import (
    AuditEvents,
    checkpoint_frame,
    exclude_pruned,
    name_stores,
    open_records,
    path_texts,
    read_audit_events,
    read_pruned_counts,
)
from postdate.pipeline.audit.results import (
    FINDINGS,
    AuditCounts,
    AuditResult,
    AuditRow,
    CurvePoint,
    Finding,
    Lateness,
    LatenessBin,
)
from postdate.pipeline.forecast_rates import round_width
from postdate.pipeline.frames import persist_frame
from postdate.pipeline.session import check_utc
from postdate.pipeline.stores import StoreSpec
from postdate.ports.scanning import PrunedCounts


def audit(  # noqa: PLR0913 - what to audit, and how
    spark: SparkSession,
    store: StoreSpec | Sequence[StoreSpec],
    now: datetime,
    *,
    late_after: timedelta = timedelta(seconds=1),
    partitions: int = 4,
    records: Sequence[str | Path] = (),
    findings_to: Path | None = None,
) -> AuditResult:
    """Compare scheduled messages with their outcomes.

    This runs on the driver; executors read stores and Parquet and compare. Nothing is changed, and services may run
    meanwhile: see :mod:`postdate.pipeline.audit.reading` for how the picture stays consistent.

    A message that left its queue without a record is only reported as lost at destinations where the store has at least
    one record of handling. Elsewhere (queues of another database or broker, receivers that record nothing) the outcome
    of a delivered message is not known.

    An event that is in several places (a store and its ledger, a store and its archive) counts once. An event that one
    place has twice happened twice.

    Args:
        spark: a session in UTC.
        store: one store, or several (see :func:`endpoints_of` for all of one database); none if ``records`` suffice.
        now: the instant against which overdue is measured; aware.
        late_after: a delivery that is later than this counts as late.
        partitions: tasks that read one store at the same time.
        records: folders of records in Parquet: archives, and ledgers of sweeps.
        findings_to: a new folder for every finding as a row: finding, message_id, destination, due, detail, endpoint;
            JSON lines if its name ends in ``.json``, else Parquet.

    Raises:
        StoreError: a store is missing or unreachable.
        PipelineError: a store cannot be read in bulk, or is named twice; records are missing, are not Parquet, or have
            other columns; the folder for findings exists. Nothing was read.
    """
    started = time.perf_counter()
    check_utc(spark)
    as_of = aware_utc(now, "now")
    endpoints = name_stores([store] if isinstance(store, StoreSpec) else list(store))
    paths = path_texts(records)
    if not endpoints and not paths:
        raise PipelineError("there is nothing to audit: name a store, or records")
    check_findings_folder(findings_to)
    picture_context = read_audit_events(spark, endpoints, [open_records(spark, path) for path in records], partitions)
    with ExitStack() as stack:
        verdict, summary, pruned = _judge(stack, picture_context, as_of, late_after, partitions)
        if findings_to is not None:
            write_findings(verdict, findings_to)
        width = round_width(summary.span_seconds, _CURVE_POINTS + 1)
        return AuditResult(
            store=", ".join(endpoint.store.redacted_address for endpoint in endpoints),
            as_of=as_of,
            late_after_seconds=late_after.total_seconds(),
            counts=summary.total.counts,
            lateness=summary.total.lateness,
            by_endpoint=summary.by_endpoint,
            by_destination=summary.by_destination,
            by_hour=summary.by_hour,
            findings=findings_of(verdict, summary.total.counts),
            curve=curve_of(verdict, width),
            curve_seconds=width,
            lateness_bins=lateness_bins_of(verdict),
            took_seconds=time.perf_counter() - started,
            records=paths,
            findings_to=None if findings_to is None else str(findings_to),
            pruned={kind.name.lower(): count for kind, count in sorted(pruned.counts.items())},
            pruned_before=pruned.before,
        )


def _judge(
    stack: ExitStack,
    picture_context: AbstractContextManager[AuditEvents],
    as_of: datetime,
    late_after: timedelta,
    partitions: int,
) -> tuple[DataFrame, Summary, PrunedCounts]:
    """Return judged messages, kept until the stack is closed, their summary, and what retention has removed.

    Everything is read, and the stores are released: no snapshot is held during the comparison. So a frame derived from
    the messages must not read a store again, because it would see another state.
    """
    with picture_context as picture:
        messages = checkpoint_frame(group_by_message(picture.events))
    pruned = read_pruned_counts(picture.endpoints)
    verdict = persist_frame(stack, judge_messages(messages, as_of, late_after, pruned.before))
    summary = summary_of(verdict)
    if summary.total.counts.lost or summary.total.counts.orphaned:
        cleared = exclude_pruned(verdict.sparkSession, verdict, picture.endpoints, partitions)
        if cleared is not None:
            verdict = checkpoint_frame(cleared)
            summary = summary_of(verdict)
    return verdict, summary, pruned


# --- adding up: total counts, by endpoint, by destination and by hour -------------------------------------------------


SAMPLE_SIZE = 100
"""Maximum number of message ids shown for one finding."""

_CURVE_POINTS = 400
"""Maximum number of points of the curve over time."""

_BINS_A_DECADE = 8
_IN_ALL, _BY_HOUR, _BY_DESTINATION, _BY_ENDPOINT = 0b111, 0b110, 0b101, 0b011
"""Grouping ids: a bit for each of endpoint, destination and hour that is not grouped by."""

_PERCENTILES = (0.5, 0.95, 0.99, 1.0)
_PERCENTILE_ACCURACY = 100_000
"""A percentile is wrong by at most one in this many ranks."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All counts, in order of the key; ``span_seconds`` has all due times and deliveries."""

    total: AuditRow
    by_endpoint: tuple[AuditRow, ...]
    by_destination: tuple[AuditRow, ...]
    by_hour: tuple[AuditRow, ...]
    span_seconds: int


def summary_of(verdicts: DataFrame) -> Summary:
    """Count in one pass: the total, by endpoint, by destination, and by hour of the due time."""
    names = [field.name for field in fields(AuditCounts)]
    rows_with_hour = verdicts.withColumn("hour", F.date_trunc("hour", "due"))
    groups = ("endpoint", "destination", "hour")
    grouped = rows_with_hour.groupingSets([[], ["endpoint"], ["destination"], ["hour"]], *groups).agg(
        F.grouping_id().alias("level"),
        F.percentile_approx("late_microseconds", list(_PERCENTILES), _PERCENTILE_ACCURACY).alias("percentiles"),
        F.unix_seconds(F.least(F.min("due"), F.min("delivered_at"))).alias("first"),
        F.unix_seconds(F.greatest(F.max("due"), F.max("delivered_at"))).alias("last"),
        F.date_format("hour", "yyyy-MM-dd'T'HH:mm'Z'").alias("hour_text"),
        *(F.count_if(name).alias(name) for name in names),
    )
    levels: dict[int, list[Row]] = {_IN_ALL: [], _BY_ENDPOINT: [], _BY_DESTINATION: [], _BY_HOUR: []}
    # The rows are sorted here. To sort a few rows on a cluster takes two more stages, for each of three queries.
    for row in sorted(grouped.collect(), key=lambda row: [(row[name] is not None, row[name]) for name in groups]):
        levels[row["level"]].append(row)
    total = levels[_IN_ALL][0] if levels[_IN_ALL] else None
    return Summary(
        total=AuditRow("all", AuditCounts(), Lateness()) if total is None else _audit_row(total, "all", names),
        by_endpoint=tuple(_audit_row(row, row["endpoint"], names) for row in levels[_BY_ENDPOINT]),
        by_destination=tuple(_audit_row(row, row["destination"], names) for row in levels[_BY_DESTINATION]),
        by_hour=tuple(_audit_row(row, row["hour_text"] or "(never due)", names) for row in levels[_BY_HOUR]),
        span_seconds=0 if total is None else (total["last"] or 0) - (total["first"] or 0),
    )


def _audit_row(row: Row, key: str | None, names: Sequence[str]) -> AuditRow:
    percentiles = row["percentiles"]
    lateness = Lateness() if percentiles is None else Lateness(*(microseconds / 1e6 for microseconds in percentiles))
    return AuditRow(key or "(unknown)", AuditCounts(**{name: row[name] for name in names}), lateness)


# --- findings ---------------------------------------------------------------------------------------------------------


def findings_of(verdicts: DataFrame, counts: AuditCounts) -> tuple[Finding, ...]:
    """Return a finding for each line of :data:`FINDINGS` that is not 0, with a sample of ids."""
    named_counts = [(name, count) for name in FINDINGS if (count := getattr(counts, name))]
    ids = (
        (name, count, verdicts.where(name).select("message_id").orderBy("message_id")) for name, count in named_counts
    )
    return tuple(Finding(name, count, tuple(row[0] for row in frame.take(SAMPLE_SIZE))) for name, count, frame in ids)


def check_findings_folder(path: Path | None) -> None:
    """Raise PipelineError if the folder for findings exists, or if its parent does not exist."""
    if path is not None and path.exists():
        raise PipelineError(f"there is something at {path} already; findings are written to a new folder")
    if path is not None and not path.absolute().parent.is_dir():
        raise PipelineError(f"there is no folder {path.absolute().parent} for the findings")


def write_findings(verdicts: DataFrame, path: Path) -> None:
    """Write every finding as a row: finding, message_id, destination, due, detail, endpoint.

    ``path`` is a new folder that executors can reach. It is written even without findings; JSON lines if its name ends
    in ``.json``, else Parquet.
    """
    names = F.filter(
        F.array(*(F.struct(F.lit(name).alias("finding"), F.col(f"about_{name}").alias("detail")) for name in FINDINGS)),
        lambda each: each["detail"].isNotNull(),
    )
    rows = (
        verdicts.select(F.explode(names).alias("found"), "message_id", "destination", "due", "endpoint")
        .select("found.finding", "message_id", "destination", "due", "found.detail", "endpoint")
        .orderBy("finding", "message_id")
    )
    rows.write.format("json" if path.suffix == ".json" else "parquet").save(str(path.absolute()))


# --- curves -----------------------------------------------------------------------------------------------------------


def curve_of(verdicts: DataFrame, width: int) -> tuple[CurvePoint, ...]:
    """Count due and delivered messages in each interval of ``width`` seconds. Empty intervals are left out."""

    def event_struct(column: str, due: int, delivered: int) -> Column:
        second = F.unix_seconds(column).alias("second")
        return F.struct(second, F.lit(due).alias("due"), F.lit(delivered).alias("delivered"))

    event = F.explode(F.array(event_struct("due", 1, 0), event_struct("delivered_at", 0, 1)))
    start = F.floor(F.col("event.second") / width) * width
    point_counts = (
        verdicts.select(event.alias("event"))
        .where("event.second IS NOT NULL")
        .groupBy(start.alias("start"))
        .agg(F.sum("event.due").alias("due"), F.sum("event.delivered").alias("delivered"))
    )
    return tuple(
        CurvePoint(from_microseconds(row["start"] * 1_000_000), row["due"], row["delivered"])
        for row in sorted(point_counts.collect())
    )


def lateness_bins_of(verdicts: DataFrame) -> tuple[LatenessBin, ...]:
    """Count deliveries in bins of a logarithmic scale from one microsecond.

    Early deliveries are findings, not lateness.
    """
    number = F.floor(F.log10(F.greatest("late_microseconds", F.lit(1))) * _BINS_A_DECADE)
    rows = verdicts.where("late_microseconds >= 0").groupBy(number.alias("bin")).count().collect()
    return tuple(
        LatenessBin(
            10 ** (row["bin"] / _BINS_A_DECADE) / 1e6, 10 ** ((row["bin"] + 1) / _BINS_A_DECADE) / 1e6, row["count"]
        )
        for row in sorted(rows)
    )
