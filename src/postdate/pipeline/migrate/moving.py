"""How one batch moves: in a task of Spark, or on the driver when a migration is aborted.

The order of the steps prevents that a message is delivered twice or not at all, whenever the process ends:

1. read the batch, and check that the target can take all of it; if not, it stays PENDING, unknown to the target;
2. mark it STAGED: from here on it only goes forward, because the target may have it, and may deliver it;
3. store it, in one transaction, idempotent by id;
4. compare the counts; mark it COMPLETED.

A process that finds a batch STAGED repeats steps 3 and 4. It leaves out messages that the target knows already: a
message that went to the error queue meanwhile would come back if it were stored again.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import cast

import pyarrow as pa

from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.clock import SystemClock
from postdate.errors import MessageError, PipelineError
from postdate.pipeline.migrate.ends import TargetStore
from postdate.pipeline.migrate.results import NAMED, BatchComparison, Difference, EndpointResult, RunStatus
from postdate.pipeline.rows import INSTANT, pc, split_columns, to_columns
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationRun, MigrationStatus


@dataclass(frozen=True, slots=True)
class MovedBatch:
    """Result of moving one batch.

    Args:
        already_there: number of ids that the target knew, not from this migration.
        stored_late: number of messages that were due when the target got them.
        problem: why the target does not accept the batch; empty if the batch has moved.
    """

    run_id: str
    number: int
    already_there: int = 0
    stored_late: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One batch to move or compare."""

    run_id: str
    number: int
    count: int


def tasks_of(run: MigrationRun, batches: Iterable[MigrationBatch], *statuses: BatchStatus) -> list[BatchTask]:
    """Return the tasks for a run's batches that have one of the statuses, in the order given."""
    return [BatchTask(run.run_id, batch.number, batch.count) for batch in batches if batch.status in statuses]


def move_batch(source: MigrationSource, target: TargetStore, run: MigrationRun, task: BatchTask) -> MovedBatch | None:
    """Move a batch from the source, where it is hidden, to the target, from any state that an earlier attempt left.

    Returns ``None`` if an abort returned the batch. Raises PipelineError if source or target has fewer messages than
    counted; StoreError if one of them failed: repeat the call.
    """
    number = task.number
    try:
        stored_messages = to_columns(source.read_batch(run, number))
    except MessageError as error:
        return MovedBatch(run.run_id, number, problem=str(error))
    if stored_messages.num_rows != task.count:
        if _find_status(source, run, number) is BatchStatus.RETURNED:
            return None
        raise PipelineError(
            f"batch {number} of run {run.run_id} has {stored_messages.num_rows:,} messages in the source, and not "
            f"{task.count:,}"
        )
    messages, bad_rows = split_columns(stored_messages, target.largest_message_bytes, allows_internal_messages=True)
    if bad_rows:
        first = stored_messages.column("message_id")[bad_rows[0].position].as_py()
        more = f", and {len(bad_rows) - 1} more like it" if len(bad_rows) > 1 else ""
        return MovedBatch(run.run_id, number, problem=f"the target does not take {first!r}: {bad_rows[0].detail}{more}")
    step = _store_batch if source.advance(run, number, BatchStatus.PENDING, BatchStatus.STAGED) else _continue_batch
    return step(source, target, run, number, messages)


def _continue_batch(
    source: MigrationSource, target: TargetStore, run: MigrationRun, number: int, messages: pa.RecordBatch
) -> MovedBatch | None:
    """Continue a batch that another process, perhaps a task just now, has begun to move."""
    status = _find_status(source, run, number)
    if status is BatchStatus.RETURNED:
        return None
    if status is BatchStatus.COMPLETED:
        return MovedBatch(run.run_id, number)
    ids = messages.column("message_id")
    is_stored = pc.is_in(
        ids, value_set=pa.array(sorted(target.find_stored_ids(cast("list[str]", ids.to_pylist()))), pa.string())
    )
    # The previous attempt most likely stored the known messages. The comparison later shows whether they are the same.
    return _store_batch(source, target, run, number, messages.filter(pc.invert(is_stored)))


def _find_status(source: MigrationSource, run: MigrationRun, number: int) -> BatchStatus:
    return next(batch.status for batch in source.batches(run) if batch.number == number)


def _store_batch(
    source: MigrationSource, target: TargetStore, run: MigrationRun, number: int, messages: pa.RecordBatch
) -> MovedBatch:
    now = SystemClock().now()
    report = target.store_batch(messages, now)
    if report.stored + len(report.duplicate_ids) != messages.num_rows:
        raise PipelineError(
            f"the target has {report.stored:,} messages of batch {number} of run {run.run_id} and "
            f"{len(report.duplicate_ids):,} that it knew, which are not {messages.num_rows:,}"
        )
    source.advance(run, number, BatchStatus.STAGED, BatchStatus.COMPLETED)
    return MovedBatch(run.run_id, number, len(report.duplicate_ids), count_late(messages, now))


def count_late(messages: pa.RecordBatch, now: datetime) -> int:
    """Return how many messages of a batch were due before ``now``."""
    return pc.sum(pc.less(messages.column("due"), pa.scalar(now, INSTANT))).as_py() or 0


# --- adding up --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    already_there: int = 0
    stored_late: int = 0
    verified: int = 0
    delivered_meanwhile: int = 0
    mismatched: int = 0
    differences: list[Difference] = field(default_factory=list[Difference])
    problems: list[str] = field(default_factory=list[str])

    def add_moved(self, batch: MovedBatch) -> None:
        """Count a batch that was moved, or refused."""
        self.already_there += batch.already_there
        self.stored_late += batch.stored_late
        if batch.problem:
            self.problems.append(batch.problem)

    def add_comparison(self, comparison: BatchComparison) -> None:
        self.verified += comparison.verified
        self.delivered_meanwhile += comparison.moved_on
        self.mismatched += len(comparison.differences)
        self.differences += comparison.differences[: NAMED - len(self.differences)]

    def result_of(
        self, run: MigrationRun, status: MigrationStatus, batches: Sequence[MigrationBatch]
    ) -> EndpointResult:
        count = RunStatus.of(run, batches).messages
        return EndpointResult(
            run.endpoint,
            run.run_id,
            status.name.lower(),
            messages=sum(count.values()),
            moved=count[BatchStatus.COMPLETED],
            returned=count[BatchStatus.RETURNED],
            refused=count[BatchStatus.PENDING] + count[BatchStatus.STAGED],
            already_there=self.already_there,
            stored_late=self.stored_late,
            verified=self.verified,
            delivered_meanwhile=self.delivered_meanwhile,
            mismatched=self.mismatched,
            differences=tuple(self.differences),
            problems=tuple(self.problems[:NAMED]),
        )
