"""Migrate: hide a round, move it while the next is being hidden, compare everything, and only then mark it completed.

Source: ADR 0015. Each step is recorded in the source before the next, so the job may end at any
moment, and can be resumed or aborted from there. Messages due first are hidden first, and only a few rounds ahead of
the moved ones. So no message waits long while neither side delivers it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from pyspark.sql import SparkSession

from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.clock import SystemClock
from postdate.errors import MigrationConflict, PipelineError, StoreUnavailable, StoreUnreachable
from postdate.pipeline.migrate.ends import TargetStore, open_target
from postdate.pipeline.migrate.looking import (
    MigrateJob,
    check_parameters,
    check_problems,
    find_unfinished,
    preview_open,
    select_endpoints,
    select_unfinished,
    status_of,
)
from postdate.pipeline.migrate.moving import BatchTask, Tally, move_batch, tasks_of
from postdate.pipeline.migrate.results import EndpointResult, MigrateResult
from postdate.pipeline.migrate.tasks import SparkTasks, TaskWork
from postdate.pipeline.migrate.verifying import verify_batch
from postdate.pipeline.session import check_utc, count_slots
from postdate.ports.migrating import BatchStatus, MigrationRun, MigrationStatus

_ROUNDS_AHEAD: Final = 2
_SOON: Final = 12
"""A job of Spark should move its batches within this part (one twelfth) of the margin.

A slower job gets fewer batches.
"""

_OPEN: Final = (BatchStatus.PENDING, BatchStatus.STAGED)

log = logging.getLogger("postdate.pipeline")


def migrate(spark: SparkSession, job: MigrateJob) -> MigrateResult:
    """Move messages, and compare them with the target. Resume a run that was begun with the same parameters.

    This runs on the driver, which hides messages; batches are moved and compared on the executors. The old manager and
    the services of the target may run meanwhile. After a failure of any kind, run it again, or :func:`resume` it.

    Args:
        spark: a session in UTC.
        job: the source, the target and the messages to move.

    Raises:
        MigrationConflict: one of the endpoints has an unfinished migration with other parameters; nothing was changed.
        PipelineError: one of the endpoints cannot move, and no migration was begun. Or a task failed.
        StoreError: the source or the target failed; resume later.
    """
    started = time.perf_counter()
    check_utc(spark)
    with job.origin.open() as source:
        unfinished, names = find_unfinished(source), select_endpoints(source, job.endpoints, source.history())
        runs = [unfinished[name] for name in names if name in unfinished]
        for run in runs:
            check_parameters(run, job.parameters)
        steps = _MigrationSteps(spark, source, job, count_slots(spark))
        steps.move_hidden(runs)
        # Prepared runs need no preview, because they hide no more messages.
        names_to_hide = [
            name for name in names if name not in unfinished or unfinished[name].status is MigrationStatus.PREPARING
        ]
        counts = steps.start_workers_and_preview(names_to_hide)
        parameters, clock = dict(job.parameters), SystemClock()
        new_runs = [
            MigrationRun(uuid.uuid4().hex, name, MigrationStatus.PREPARING, parameters, job.cutoff, clock.now())
            for name in names_to_hide
            if name not in unfinished and counts[name]
        ]
        for run in new_runs:
            source.start_run(run)
        by_endpoint = steps.finish([*runs, *new_runs])
    idle = [EndpointResult(name, None, "nothing to move") for name in names if name not in by_endpoint]
    results = sorted([*by_endpoint.values(), *idle], key=lambda each: each.endpoint)
    return MigrateResult(
        job.origin.redacted_address, job.target.redacted_address, tuple(results), time.perf_counter() - started
    )


def resume(spark: SparkSession, job: MigrateJob) -> MigrateResult:
    """Resume the unfinished runs, each with the cut-off with which it was begun.

    Args:
        spark: a session in UTC.
        job: as it was begun; its cut-off is ignored.

    Raises:
        PipelineError: there is no unfinished run; or a task failed.
        MigrationConflict: a run was begun with another target; nothing was changed.
        StoreError: the source or the target failed; resume later.
    """
    started = time.perf_counter()
    check_utc(spark)
    with job.origin.open() as source:
        runs = select_unfinished(source, job, "to go on with")
        steps = _MigrationSteps(spark, source, job, count_slots(spark))
        steps.move_hidden(runs)
        runs_to_hide = [run for run in runs if run.status is MigrationStatus.PREPARING]
        for run in runs_to_hide:
            _check_preview(source, replace(job, cutoff=run.cutoff), [run.endpoint])
        if runs_to_hide:
            # Spark's workers start now, so that hidden messages need not wait for them.
            steps.create_tasks().start_workers()
        by_endpoint = steps.finish(runs)
    results = tuple(by_endpoint[run.endpoint] for run in runs)
    return MigrateResult(
        job.origin.redacted_address, job.target.redacted_address, results, time.perf_counter() - started
    )


def _check_preview(source: MigrationSource, job: MigrateJob, names: Sequence[str]) -> dict[str, int]:
    """Return the number of messages to hide by endpoint; raise PipelineError if one of them cannot move."""
    preview = preview_open(source, job, names, SystemClock().now())
    check_problems(preview)
    return {each.endpoint: each.count for each in preview.endpoints}


@dataclass(slots=True)
class _MigrationSteps:
    """The steps of the driver, which alone uses the open ``source``."""

    spark: SparkSession
    source: MigrationSource
    job: MigrateJob
    slots: int  # tasks that Spark runs at the same time
    _tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    _runs: dict[str, MigrationRun] = field(default_factory=dict[str, MigrationRun])

    def start_workers_and_preview(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of messages to hide by endpoint.

        When this returns, Spark's workers have started as well.
        """
        with ThreadPoolExecutor(1, "postdate-migrate") as executor:
            workers_started = executor.submit(self.create_tasks().start_workers)
            counts = _check_preview(self.source, self.job, names)
            workers_started.result()
        return counts

    def move_hidden(self, runs: Sequence[MigrationRun]) -> None:
        """Move batches that an earlier attempt hid, because the old manager does not deliver them."""
        self._runs |= {run.run_id: run for run in runs}
        self._move([task for run in runs for task in tasks_of(run, self.source.batches(run), *_OPEN)])

    def finish(self, runs: Sequence[MigrationRun]) -> dict[str, EndpointResult]:
        """Hide and move the remaining messages, compare, and mark runs completed. Return results by endpoint."""
        self._runs |= {run.run_id: run for run in runs}
        self._hide_and_move([run for run in runs if run.status is MigrationStatus.PREPARING])
        self._compare(runs)
        return {run.endpoint: self._finish_run(run) for run in runs}

    def _compare(self, runs: Sequence[MigrationRun]) -> None:
        tasks = [task for run in runs for task in tasks_of(run, self.source.batches(run), BatchStatus.COMPLETED)]
        if not tasks:
            return
        log.info("comparing %s messages with what the target has", f"{sum(task.count for task in tasks):,}")
        for comparison in self.create_tasks().verify(tasks):
            self._tallies[comparison.run_id].add_comparison(comparison)

    def create_tasks(self) -> SparkTasks:
        return SparkTasks(self.spark, TaskWork(self.job.origin, self.job.target, dict(self._runs)), self.slots)

    # --- hiding and moving ------------------------------------------------------------------------------------------

    def _hide_and_move(self, runs: Sequence[MigrationRun]) -> None:
        """Hide rounds in this thread, and have Spark move hidden batches in another thread.

        The number of batches hidden ahead grows while a job moves them in a small part of the margin. Each job costs
        Spark some tenths of a second, however much it moves, and no hidden message may become due meanwhile.
        """
        round_size = max(self.slots, 2)
        ahead_count, soon_duration = _ROUNDS_AHEAD * round_size, self.job.margin / _SOON
        hidden = list[BatchTask]()
        move_future: Future[timedelta] | None = None
        with ThreadPoolExecutor(1, "postdate-migrate") as mover:
            for run in runs:
                for batches in self._rounds(run, round_size):
                    hidden += batches
                    if move_future is None or move_future.done() or len(hidden) >= ahead_count:
                        move_duration = timedelta(0) if move_future is None else move_future.result()
                        if move_duration >= soon_duration:
                            ahead_count = max(ahead_count // 2, round_size)
                        elif len(hidden) >= ahead_count:
                            ahead_count *= 2
                        move_future, hidden = mover.submit(self._move, hidden), []
            if move_future is not None:
                move_future.result()
            self._move(hidden)

    def _move(self, tasks: Sequence[BatchTask]) -> timedelta:
        """Move batches, and return how long it took."""
        started = time.perf_counter()
        for batch in self.create_tasks().move(tasks):
            self._tallies[batch.run_id].add_moved(batch)
        return timedelta(seconds=time.perf_counter() - started)

    def _rounds(self, run: MigrationRun, round_size: int) -> Iterable[list[BatchTask]]:
        """Hide rounds until one is not full.

        The loop must not wait for an empty round: new messages may be added all the time.
        """
        count = sum(batch.count for batch in self.source.batches(run))
        is_full = True
        while is_full:
            try:
                hidden = self.source.hide(run, self.job.batch_size, round_size, self.job.margin)
            except MigrationConflict:
                self._accept_completed(run)
                return
            except StoreUnavailable as error:
                # The round was too slow for the margin, and hid nothing, so a smaller one is tried. A lost connection
                # is another fault.
                if round_size == 1 or isinstance(error, StoreUnreachable):
                    raise
                round_size //= 2
                log.warning("%s: hiding again, %d batches at a time: %s", run.endpoint, round_size, error)
                continue
            round_count = sum(batch.count for batch in hidden)
            count, is_full = count + round_count, round_count >= self.job.batch_size * round_size
            if not is_full:
                self._mark_prepared(run)
            log.info("%s: %s messages hidden from the old manager", run.endpoint, f"{count:,}")
            yield tasks_of(run, hidden, *BatchStatus)

    def _mark_prepared(self, run: MigrationRun) -> None:
        try:
            self.source.set_status(run, MigrationStatus.PREPARED, SystemClock().now())
        except MigrationConflict:
            self._accept_completed(run)

    def _accept_completed(self, run: MigrationRun) -> None:
        """Accept a run that another process has completed. Raise MigrationConflict for an aborted run."""
        if status_of(self.source, run) is MigrationStatus.COMPLETED:
            log.info("%s: another process has completed migration %s meanwhile", run.endpoint, run.run_id)
            return
        raise MigrationConflict(
            f"migration {run.run_id} of {run.endpoint} was aborted meanwhile, by another process: what it had moved is "
            f"in the target, and all else is with the old manager"
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def _finish_run(self, run: MigrationRun) -> EndpointResult:
        """Mark a run completed, if every batch has moved and matches."""
        result = self._tallies[run.run_id].result_of(run, status_of(self.source, run), self.source.batches(run))
        if status_of(self.source, run) is not MigrationStatus.PREPARED or not result.is_exact:
            return result
        self.source.set_status(run, MigrationStatus.COMPLETED, SystemClock().now())
        return replace(result, status=MigrationStatus.COMPLETED.name.lower())


# --- aborting, without Spark: unmoved batches go back to the old manager, begun ones are finished ---------------------


_TRIES: Final = 20


def abort(job: MigrateJob) -> MigrateResult:
    """End the unfinished runs. Each message is then either with the old manager or in the target, and never in both.

    Batches that the target does not know are returned first, for all endpoints, because no process delivers them
    meanwhile. A batch that was being moved may be in the target, in part, and may be delivered already: it is finished.
    Moved messages stay in the target, and are compared.

    Args:
        job: as it was begun; its cut-off is ignored.

    Raises:
        PipelineError: there is no unfinished run.
        MigrationConflict: the run was begun with another target; nothing was changed.
        StoreError: the target failed while batches were finished. All other batches were returned; abort again.
    """
    started = time.perf_counter()
    with job.origin.open() as source:
        runs = select_unfinished(source, job, "to abort")
        for run in runs:
            # From here on, a driver that is still alive hides no more messages, and returned messages stay returned.
            source.set_status(run, MigrationStatus.PREPARED, SystemClock().now())
            _return_pending_batches(source, run)
        results = tuple(_finish_abort(source, job, run) for run in runs)
    return MigrateResult(
        job.origin.redacted_address, job.target.redacted_address, results, time.perf_counter() - started
    )


def _return_pending_batches(source: MigrationSource, run: MigrationRun) -> None:
    for batch in source.batches(run):
        if batch.status is BatchStatus.PENDING:
            source.return_batch(run, batch.number)


def _finish_abort(source: MigrationSource, job: MigrateJob, run: MigrationRun) -> EndpointResult:
    tally = Tally()
    _abort_run(source, job, run, tally)
    batches = source.batches(run)
    completed_tasks = tasks_of(run, batches, BatchStatus.COMPLETED)
    if completed_tasks:
        with open_target(job.target) as target:
            for task in completed_tasks:
                tally.add_comparison(verify_batch(source, target, run, task))
    return tally.result_of(run, status_of(source, run), batches)


def _abort_run(source: MigrationSource, job: MigrateJob, run: MigrationRun, tally: Tally) -> None:
    """Return and finish batches until none is open, then mark the run aborted.

    Meanwhile a live driver may still move some.
    """
    for remaining_tries in reversed(range(_TRIES)):
        _return_pending_batches(source, run)
        staged = tasks_of(run, source.batches(run), BatchStatus.STAGED)
        if staged:
            with open_target(job.target) as target:
                for task in staged:
                    _finish_batch(source, target, run, task, tally)
        try:
            source.set_status(run, MigrationStatus.ABORTED, SystemClock().now())
        except MigrationConflict:
            if status_of(source, run) is MigrationStatus.COMPLETED:
                return  # The other driver completed the run when no batch was open any more.
            if not remaining_tries:
                raise
        else:
            return


def _finish_batch(
    source: MigrationSource, target: TargetStore, run: MigrationRun, task: BatchTask, tally: Tally
) -> None:
    moved_batch = move_batch(source, target, run, task)
    if moved_batch is None or moved_batch.problem:
        problem = "was given back" if moved_batch is None else moved_batch.problem
        raise PipelineError(f"batch {task.number} of {run.endpoint} cannot be finished: {problem}")
    tally.add_moved(moved_batch)
