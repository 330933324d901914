"""The audit: turn events into one row a message, judge each message, and add up the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.errors import PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.audit import summaries, totals
from postdate.pipeline.audit.judging import collect_facts, group_by_message, judge_messages
from postdate.pipeline.audit.reading import (
    AuditEvents,
    checkpoint_frame,
    exclude_pruned,
    open_records,
    path_texts,
    read_audit_events,
    read_events_since,
)
from postdate.pipeline.audit.results import FINDINGS, SAMPLE_SIZE, AuditResult, Finding
from postdate.pipeline.audit.state import CURVE_SECONDS, AuditState, Judge, judge_since
from postdate.pipeline.audit.stores import AuditedStore, name_stores, read_pruned_counts
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.forecast_rates import round_width
from postdate.pipeline.frames import persist_frame
from postdate.pipeline.outputs import NewFolder, check_new_folder
from postdate.pipeline.session import check_utc
from postdate.pipeline.source.streaming import open_stream
from postdate.pipeline.stores import StoreSpec
from postdate.ports.scanning import PrunedCounts


@shorten_errors("the audit has failed")
def audit(  # noqa: PLR0913 - what to audit, and how
    spark: SparkSession,
    store: StoreSpec | Sequence[StoreSpec],
    now: datetime,
    *,
    late_after: timedelta = timedelta(seconds=1),
    partitions: int = 4,
    records: Sequence[str | Path] = (),
    findings_to: str | Path | None = None,
    destinations_to: str | Path | None = None,
    state: str | Path | None = None,
    publish: Callable[[AuditResult], None] | None = None,
) -> AuditResult:
    """Compare scheduled messages with their outcomes.

    This runs on the driver; executors read stores and Parquet and compare. Nothing is changed, and services may run
    meanwhile: see :mod:`postdate.pipeline.audit.reading` for how the picture stays consistent.

    A message that left its queue without a record is only reported as lost at destinations where the store has at least
    one record of handling. Elsewhere (queues of another database or broker, receivers that record nothing) the outcome
    of a delivered message is not known.

    An event that is in several places (a store and its ledger, a store and its lake) counts once. An event that one
    place has twice happened twice. A store and its lake are one place, in which a record is known by its number.

    Args:
        spark: a session in UTC.
        store: one store, or several (see :func:`endpoints_of` for all of one database); none if ``records`` suffice.
        now: the instant against which overdue is measured; aware.
        late_after: a delivery that is later than this counts as late.
        partitions: tasks that read one store at the same time.
        records: folders of records in Parquet: lakes (:func:`postdate.pipeline.history.write_history`), ledgers of
            sweeps, and archives of earlier versions.
        findings_to: a new folder for every finding as a row: finding, message_id, destination, due, detail, endpoint;
            JSON lines if its name ends in ``.json``, else Parquet. A path on the driver's machine, or as text a URI
            such as ``s3a://bucket/findings``.
        destinations_to: a new folder for every destination as a row: destination, a column for each line of
            :class:`AuditCounts`, p50_seconds, p95_seconds, p99_seconds, max_seconds; JSON lines or Parquet, as above.
        state: a folder with what the last audit left, or a new one; a path, or a URI that Spark can write. Then only
            the records since the last audit are read, see :mod:`postdate.pipeline.audit.state`. For one store in
            PostgreSQL or SQLite, without ``records``. The result counts all messages since the first audit with this
            state.
        publish: is called with the result before the state is committed. If it raises, the next audit finds the same.

    Raises:
        StoreError: a store is missing or unreachable.
        NotSupported: there is a ``state``, and the records of the store cannot be followed.
        PipelineError: a store cannot be read in bulk, or is named twice; records are missing, are not Parquet, or have
            other columns; a folder to write exists or cannot be written. Nothing was read. Or a task failed.
    """
    started = time.perf_counter()
    check_utc(spark)
    as_of = aware_utc(now, "now")
    endpoints = name_stores([store] if isinstance(store, StoreSpec) else list(store))
    paths = path_texts(records)
    if not endpoints and not paths:
        raise PipelineError("there is nothing to audit: name a store, or records")
    findings = None if findings_to is None else check_new_folder(spark, findings_to, "the findings")
    destinations = None if destinations_to is None else check_new_folder(spark, destinations_to, "the destinations")
    with ExitStack() as stack:
        if state is None:
            parquet = [open_records(spark, path) for path in paths]
            picture_context = read_audit_events(spark, endpoints, parquet, partitions)
            judged = _judge(stack, picture_context, as_of, late_after, partitions)
        else:
            if len(endpoints) != 1 or paths:
                raise PipelineError("a state is of one store: give each endpoint a state of its own, and no records")
            judged = _judge_since(stack, AuditState(spark, state), endpoints[0], as_of, late_after, partitions)
        if findings is not None:
            write_findings(judged.verdicts, findings)
        if destinations is not None:
            write_folder(judged.destinations, destinations)
        summary = judged.summary
        width = round_width(summary.span_seconds, summaries.CURVE_POINTS + 1, 1 if state is None else CURVE_SECONDS)
        addresses = ", ".join(endpoint.store.redacted_address for endpoint in endpoints)
        result = replace(
            summaries.make_result(summary, judged.pruned, addresses, as_of, late_after),
            findings=findings_of(judged.verdicts),
            curve=totals.curve_of(judged.count_curve(width)),
            curve_seconds=width,
            records=paths,
            findings_to=None if findings_to is None else str(findings_to),
            destinations_to=None if destinations_to is None else str(destinations_to),
            state=None if state is None else str(state),
            since=judged.since,
        )
        result = replace(result, took_seconds=time.perf_counter() - started)
        if publish is not None:
            publish(result)
        judged.commit()
        return result


@dataclass(frozen=True, slots=True)
class _Judged:
    """Judged messages, and everything that is derived from them.

    Args:
        verdicts: judged messages, for findings.
        summary: sums.
        destinations: the table of destinations.
        count_curve: returns the points of the curve for a width.
        pruned: what retention has removed.
        since: instant of the last audit with the same state.
        commit: writes the state, if there is one.
    """

    verdicts: DataFrame
    summary: summaries.Summary
    destinations: DataFrame
    count_curve: Callable[[int], DataFrame]
    pruned: PrunedCounts
    since: datetime | None = None
    commit: Callable[[], None] = lambda: None


def _judge(
    stack: ExitStack,
    picture_context: AbstractContextManager[AuditEvents],
    as_of: datetime,
    late_after: timedelta,
    partitions: int,
) -> _Judged:
    """Judge all messages. ``stack`` keeps the frames until it is closed.

    Everything is read, and the stores are released: no snapshot is held during the comparison. So a frame derived from
    the messages must not read a store again, because it would see another state.
    """
    with picture_context as picture:
        messages = checkpoint_frame(group_by_message(picture.events))
    pruned = read_pruned_counts(picture.endpoints)
    verdict = persist_frame(stack, judge_messages(messages, as_of, late_after, pruned.before))
    summary, destinations = totals.summarize(stack, persist_frame(stack, totals.count_totals(verdict)))
    if summary.total.counts.lost or summary.total.counts.orphaned:
        cleared = exclude_pruned(verdict.sparkSession, verdict, picture.endpoints, partitions)
        if cleared is not None:
            verdict = checkpoint_frame(cleared)
            summary, destinations = totals.summarize(stack, persist_frame(stack, totals.count_totals(verdict)))
    return _Judged(verdict, summary, destinations, partial(totals.count_curve, verdict), pruned)


_CLOCKS_DIFFER_BY = timedelta(hours=1)
"""How much the clocks of services and of the driver may differ."""


def _judge_since(
    stack: ExitStack,
    state: AuditState,
    endpoint: AuditedStore,
    as_of: datetime,
    late_after: timedelta,
    partitions: int,
) -> _Judged:
    """Judge the messages with records since the last audit, and those that had not ended then."""
    before, spark = state.commit_read, state.spark
    stream = stack.enter_context(closing(open_stream(endpoint.store)))
    state.check(stream, late_after)
    since = datetime.fromisoformat(before.as_of) if before.version else None
    with ExitStack() as reading:
        events = read_events_since(reading, spark, endpoint, stream, before.position, partitions)
        facts = checkpoint_frame(collect_facts(events.final)), collect_facts(events.present, present=True)
    pruned = read_pruned_counts((endpoint,))
    # What was read before cannot be missing now, whatever retention has removed since.
    is_pruned = pruned.before is not None and (since is None or pruned.before > since - _CLOCKS_DIFFER_BY)
    judge = Judge(as_of, late_after, pruned.before if is_pruned else None)
    judged = judge_since(state, facts, judge, lambda verdicts: exclude_pruned(spark, verdicts, (endpoint,), partitions))
    summary, destinations = totals.summarize(stack, persist_frame(stack, judged.totals))
    return _Judged(
        judged.verdicts,
        summary,
        destinations,
        lambda width: totals.merge_curves([judged.curve], width),
        pruned,
        since,
        lambda: state.commit(judged.next_state, stream, position=events.end, judge=judge),
    )


# --- findings, and the table of destinations --------------------------------------------------------------------------


def findings_of(verdicts: DataFrame) -> tuple[Finding, ...]:
    """Return a finding for each line of :data:`FINDINGS` that is not 0, with a sample of ids."""
    counts = verdicts.agg(*(F.count_if(name).alias(name) for name in FINDINGS)).collect()[0]
    named_counts = [(name, counts[name]) for name in FINDINGS if counts[name]]
    ids = (
        (name, count, verdicts.where(name).select("message_id").orderBy("message_id")) for name, count in named_counts
    )
    return tuple(Finding(name, count, tuple(row[0] for row in frame.take(SAMPLE_SIZE))) for name, count, frame in ids)


def write_findings(verdicts: DataFrame, folder: NewFolder) -> None:
    """Write every finding as a row: finding, message_id, destination, due, detail, endpoint.

    The folder is written even without findings; JSON lines if its name ends in ``.json``, else Parquet.
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
    write_folder(rows, folder)


def write_folder(frame: DataFrame, folder: NewFolder) -> None:
    """Write a frame to a new folder: JSON lines if its name ends in .json, else Parquet."""
    folder.write(frame, "json" if folder.location.endswith(".json") else "parquet")
