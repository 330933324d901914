"""The schedule job in this process: :func:`postdate.pipeline.schedule.schedule` without Spark.

The rows of the input are read and checked once, and kept in memory until they are stored. So no row is stored before
the last one was read, and rows with one id and different content are found wherever they stand.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import pyarrow as pa

from postdate.errors import PipelineError
from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.local.folders import LocalFolder, check_local_folder
from postdate.pipeline.local.reading import LocalTable
from postdate.pipeline.local.selecting import check_types, content_of, select_batch
from postdate.pipeline.rows import Batches, pc, split_columns
from postdate.pipeline.schedule import storing
from postdate.pipeline.schedule.columns import resolve_columns
from postdate.pipeline.schedule.job import REJECTED_ROWS, REPORT, ScheduleJob
from postdate.pipeline.schedule.preparing import check_same_number, prepare_store
from postdate.pipeline.schedule.result import ScheduleResult
from postdate.ports.scanning import WRITTEN_COLUMNS

_REPORT_COLUMNS = pa.schema([("outcome", pa.string()), ("reason", pa.string()), ("rows", pa.int64())])


def schedule(messages: LocalTable, job: ScheduleJob) -> ScheduleResult:
    """Store every row of ``messages`` that is a message, and set the other rows aside.

    Args:
        messages: one message a row; see :func:`postdate.pipeline.local.reading.read_table`.
        job: see :class:`postdate.pipeline.schedule.ScheduleJob`; without ``sync``.

    Returns:
        Counts of all rows, the same as on Spark.

    Raises:
        PipelineError: a column is missing, misspelt or of a wrong type, a file cannot be read, or a folder exists or
            cannot be written; nothing was stored.
        NeedsSpark: the job or the input needs Spark; nothing was stored.
        StoreError: the store failed; the batches stored by then stay, and the job can be run again.
    """
    started = time.perf_counter()
    if job.sync:
        raise NeedsSpark("--sync compares a table with a load on Spark only")
    columns, unused = resolve_columns(job.columns, messages.columns.names, job.unused, case_sensitive=False)
    check_types(messages.columns, columns)
    folders = _check_folders(job)
    limit, zone_times, is_set_up = prepare_store(job)
    rows = [select_batch(batch, columns, zone_times, limit) for batch in messages.read()]
    read = sum(batch.num_rows for batch in rows)
    if job.expected_rows not in {None, read}:
        raise PipelineError(
            f"another reader counts {job.expected_rows:,} rows in the input, and this one reads {read:,}; nothing was "
            f"stored"
        )
    rows = _mark_conflicts(rows, limit)
    handle = (
        partial(storing.check_all, job.store if is_set_up else None, limit, job.load)
        if job.dry_run
        else partial(storing.store_all, job.store, job.now, job.batch, job.load)
    )
    outcomes = _Outcomes()
    outcomes.add_all(handle(iter(rows)))
    result = _result_of(outcomes, job, folders, started)
    check_same_number(read, result.read, "what was stored stays")
    return replace(result, unused=unused)


@dataclass(frozen=True, slots=True)
class _Folders:
    """The folders of a job, checked before anything is stored; ``None``: not requested."""

    rejected: LocalFolder | None
    report: LocalFolder | None


def _check_folders(job: ScheduleJob) -> _Folders:
    rejects, report = (None, None) if job.dry_run else (job.rejects, job.report)
    return _Folders(
        rejected=None if rejects is None else check_local_folder(rejects.path, REJECTED_ROWS),
        report=None if report is None else check_local_folder(report, REPORT),
    )


def _mark_conflicts(rows: Sequence[pa.RecordBatch], limit: int) -> list[pa.RecordBatch]:
    """Set the reason ``conflicting_rows`` for all rows whose id is in the input with different content.

    None of these rows can be preferred. Only good rows are compared, in the form in which they will be stored.
    """
    ids = pa.chunked_array([batch.column("message_id") for batch in rows], pa.string())  # Of bad rows null.
    counts: Any = pc.value_counts(ids)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").drop_null()
    if not len(repeated):
        return list(rows)
    contents, conflicting = dict[str, Any](), set[str]()
    for batch in rows:
        candidates = batch.filter(pc.is_in(batch.column("message_id"), value_set=repeated))
        good, _ = split_columns(storing.add_own_headers(candidates, None), limit)
        good_ids = cast("list[str]", good.column("message_id").to_pylist())
        for id_, content in zip(good_ids, content_of(good), strict=True):
            if contents.setdefault(id_, content) != content:
                conflicting.add(id_)
    marked = pa.array(sorted(conflicting), pa.string())
    return [_set_reason(batch, pc.is_in(batch.column("message_id"), value_set=marked)) for batch in rows]


def _set_reason(batch: pa.RecordBatch, mask: Any) -> pa.RecordBatch:
    reasons = pc.if_else(mask, "conflicting_rows", batch.column("reason"))
    return batch.set_column(batch.schema.get_field_index("reason"), "reason", reasons)


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcomes:
    """The sums of the outcomes of batches, and the rows that were not stored."""

    stored: int = 0
    already_there: int = 0
    rows: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    rejected: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])
    samples: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    def add_all(self, batches: Batches) -> None:
        for batch in batches:
            self.stored += pc.sum(batch.column("stored")).as_py() or 0
            self.already_there += pc.sum(batch.column("already_there")).as_py() or 0
            outcome = batch.column("outcome")
            is_rejected = pc.is_in(outcome, value_set=pa.array([storing.REJECTED, storing.CONFLICTING]))
            rejected = batch.filter(is_rejected)
            names = (cast("list[str]", rejected.column(name).to_pylist()) for name in ("outcome", "reason"))
            self.rows.update(zip(*names, strict=True))
            if rejected.num_rows:
                self.rejected.append(rejected)
            samples = batch.filter(pc.equal(outcome, storing.SAMPLE)).select(list(WRITTEN_COLUMNS)).to_pylist()
            self.samples += cast("list[Mapping[str, Any]]", samples)


def _result_of(outcomes: _Outcomes, job: ScheduleJob, folders: _Folders, started: float) -> ScheduleResult:
    set_aside = {
        reason: count for (outcome, reason), count in sorted(outcomes.rows.items()) if outcome == storing.REJECTED
    }
    conflicting = sum(count for (outcome, _), count in outcomes.rows.items() if outcome == storing.CONFLICTING)
    result = ScheduleResult(
        read=outcomes.stored + outcomes.already_there + conflicting + sum(set_aside.values()),
        accepted=outcomes.stored,
        already_there=outcomes.already_there,
        conflicting=conflicting,
        set_aside=set_aside,
        seconds=time.perf_counter() - started,
        load=job.load,
        engine="local",
    )
    if job.dry_run:
        rejected = chain.from_iterable(_rows_of(batch) for batch in outcomes.rejected)
        return replace(
            result,
            is_dry_run=True,
            sample=storing.shorten_samples(outcomes.samples),
            rejected_sample=storing.shorten_samples(rejected),
        )
    if outcomes.rejected and folders.rejected is not None:
        table = pa.Table.from_batches(outcomes.rejected).select(list(storing.REJECTED_COLUMNS))
        folders.rejected.write(table, "json" if job.rejects is None else job.rejects.format)
        result = replace(result, rejected_to=folders.rejected.location)
    if folders.report is not None:
        result = replace(result, reported_to=folders.report.location)
        lines = [dict(zip(_REPORT_COLUMNS.names, line, strict=True)) for line in result.report_lines()]
        folders.report.write(pa.Table.from_pylist(lines, _REPORT_COLUMNS), "parquet")
    return result


def _rows_of(batch: pa.RecordBatch) -> Iterator[Mapping[str, Any]]:
    yield from cast("list[Mapping[str, Any]]", batch.select(list(storing.REJECTED_COLUMNS[:-1])).to_pylist())
