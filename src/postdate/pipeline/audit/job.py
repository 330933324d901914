"""The audit itself: turns events into one row a message, judges each, and adds them up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from postdate.errors import PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.audit.judging import judged, one_row_a_message
from postdate.pipeline.audit.reading import AuditedStore, Picture, kept, named, read_now, taken_picture
from postdate.pipeline.audit.results import AuditResult
from postdate.pipeline.audit.sources import open_records, shown_paths
from postdate.pipeline.audit.summary import (
    Summary,
    check_findings_folder,
    curve_of,
    findings_of,
    lateness_bins_of,
    summary_of,
    width_of,
    write_findings,
)
from postdate.pipeline.audit.suspects import without_pruned
from postdate.pipeline.session import require_utc
from postdate.pipeline.stores import StoreSpec


@dataclass(frozen=True, slots=True)
class _Terms:
    """Limits by which messages are judged."""

    as_of: datetime
    late_after: timedelta
    partitions: int


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

    Runs on the driver; executors read stores and Parquet and compare. Nothing is changed, and services may run
    meanwhile: see :mod:`postdate.pipeline.audit.reading` for how the picture stays consistent.

    A message that left its queue without a record is only called lost at destinations where the store has at least one
    record of handling. Elsewhere (queues of another database or broker, receivers that record nothing) the outcome of a
    delivered message is not known.

    An event that is in several places (a store and a ledger of it, a store and an archive) counts once; one that a
    single place has twice has happened twice.

    Args:
        spark: a session in UTC.
        store: one store, or several (see :func:`endpoints_of` for all of one database); none if ``records`` suffice.
        now: what overdue is measured against; aware.
        late_after: how late a delivery may be before it counts as late.
        partitions: tasks that read one store at the same time.
        records: folders of records in Parquet: archives, and ledgers of sweeps.
        findings_to: a new folder for every finding as a row: finding, message_id, destination, due, detail, endpoint;
            JSON lines if its name ends in ``.json``, else Parquet.

    Raises:
        StoreError: a store is missing or unreachable.
        PipelineError: a store cannot be read in bulk, or is named twice; records are missing, no Parquet, or have
            other columns; the folder for findings exists. Nothing was read.
    """
    started = time.perf_counter()
    require_utc(spark)
    terms = _Terms(aware_utc(now, "now"), late_after, partitions)
    endpoints = named([store] if isinstance(store, StoreSpec) else list(store))
    paths = shown_paths(records)
    if not endpoints and not paths:
        raise PipelineError("there is nothing to audit: name a store, or records")
    check_findings_folder(findings_to)
    sources = [open_records(spark, path) for path in records]
    with ExitStack() as stack:
        verdict, summary = _judge(spark, stack, _Sources(endpoints, sources), terms)
        if findings_to is not None:
            write_findings(verdict, findings_to)
        width = width_of(summary)
        return AuditResult(
            store=", ".join(endpoint.store.shown for endpoint in endpoints),
            as_of=terms.as_of,
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
        )


@dataclass(frozen=True, slots=True)
class _Sources:
    endpoints: Sequence[AuditedStore]
    records: Sequence[DataFrame]


def _judge(spark: SparkSession, stack: ExitStack, sources: _Sources, terms: _Terms) -> tuple[DataFrame, Summary]:
    """Return judged messages, kept until the stack is unwound, and their summary."""
    messages, picture = _messages(spark, sources, terms)
    verdict = kept(stack, judged(messages, terms.as_of, terms.late_after))
    summary = summary_of(verdict)
    if summary.total.counts.lost or summary.total.counts.orphaned:
        cleared = without_pruned(spark, verdict, picture.endpoints, terms.partitions)
        if cleared is not None:
            verdict = read_now(cleared)
            summary = summary_of(verdict)
    return verdict, summary


def _messages(spark: SparkSession, sources: _Sources, terms: _Terms) -> tuple[DataFrame, Picture]:
    """Read everything, and release the stores: no snapshot is held during the comparison.

    So no frame derived from the messages may read a store again: it would see another state.
    """
    with taken_picture(spark, sources.endpoints, sources.records, terms.partitions) as picture:
        messages = read_now(one_row_a_message(picture.events))
    return messages, picture
