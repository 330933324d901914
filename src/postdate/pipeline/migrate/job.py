"""Migrate: hide a round, move it while the next is being hidden, compare everything, and only then mark it completed.

Source: specification 4.12; ADR 0015. Each step is recorded in the source before the next, so the job may end at any
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
from postdate.pipeline.migrate.ends import TargetStore, opened_target
from postdate.pipeline.migrate.looking import (
    MigrateJob,
    going_on,
    nothing_new,
    on_their_way,
    preview_open,
    same_parameters,
    selected,
    status_of,
)
from postdate.pipeline.migrate.moving import BatchTask, Tally, move_batch, tasks_of
from postdate.pipeline.migrate.results import EndpointResult, MigrateResult
from postdate.pipeline.migrate.tasks import SparkTasks, TaskWork
from postdate.pipeline.migrate.verifying import verify_batch
from postdate.pipeline.session import require_utc
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
    require_utc(spark)
    with job.origin.opened() as source:
        going, names = on_their_way(source), selected(source, job.endpoints, source.history())
        runs = [going[name] for name in names if name in going]
        for run in runs:
            same_parameters(run, job.parameters)
        driver = _MigrationSteps(spark, source, job)
        driver.move_hidden(runs)
        # Prepared runs need no preview, because they hide no more messages.
        hiding = [name for name in names if name not in going or going[name].status is MigrationStatus.PREPARING]
        counts = driver.get_ready_and_look(hiding)
        parameters, clock = dict(job.parameters), SystemClock()
        fresh = [
            MigrationRun(uuid.uuid4().hex, name, MigrationStatus.PREPARING, parameters, job.cutoff, clock.now())
            for name in hiding
            if name not in going and counts[name]
        ]
        for run in fresh:
            source.begin(run)
        by_endpoint = driver.finish([*runs, *fresh])
    idle = [EndpointResult(name, None, "nothing to move") for name in names if name not in by_endpoint]
    results = sorted([*by_endpoint.values(), *idle], key=lambda each: each.endpoint)
    return MigrateResult(job.origin.shown, job.target.shown, tuple(results), time.perf_counter() - started)


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
    require_utc(spark)
    with job.origin.opened() as source:
        runs = going_on(source, job, "to go on with")
        driver = _MigrationSteps(spark, source, job)
        driver.move_hidden(runs)
        hiding = [run for run in runs if run.status is MigrationStatus.PREPARING]
        for run in hiding:
            _unhindered(source, replace(job, cutoff=run.cutoff), [run.endpoint])
        if hiding:
            driver.tasks().get_ready()  # Spark's workers start now, so that hidden messages need not wait for them.
        by_endpoint = driver.finish(runs)
    results = tuple(by_endpoint[run.endpoint] for run in runs)
    return MigrateResult(job.origin.shown, job.target.shown, results, time.perf_counter() - started)


def _unhindered(source: MigrationSource, job: MigrateJob, names: Sequence[str]) -> dict[str, int]:
    """Return the number of messages to hide by endpoint; raise PipelineError if one of them cannot move."""
    looked = preview_open(source, job, names, SystemClock().now())
    nothing_new(looked)
    return {each.endpoint: each.count for each in looked.endpoints}


@dataclass(slots=True)
class _MigrationSteps:
    """The steps of the driver, which alone uses the open ``source``."""

    spark: SparkSession
    source: MigrationSource
    job: MigrateJob
    _tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    _runs: dict[str, MigrationRun] = field(default_factory=dict[str, MigrationRun])

    def get_ready_and_look(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of messages to hide by endpoint.

        When this returns, Spark's workers have started as well.
        """
        with ThreadPoolExecutor(1, "postdate-migrate") as other:
            ready = other.submit(self.tasks().get_ready)
            counts = _unhindered(self.source, self.job, names)
            ready.result()
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
        return {run.endpoint: self._finished(run) for run in runs}

    def _compare(self, runs: Sequence[MigrationRun]) -> None:
        tasks = [task for run in runs for task in tasks_of(run, self.source.batches(run), BatchStatus.COMPLETED)]
        if not tasks:
            return
        log.info("comparing %s messages with what the target has", f"{sum(task.count for task in tasks):,}")
        for comparison in self.tasks().verify(tasks):
            self._tallies[comparison.run_id].compared(comparison)

    def tasks(self) -> SparkTasks:
        return SparkTasks(self.spark, TaskWork(self.job.origin, self.job.target, dict(self._runs)))

    # --- hiding and moving ------------------------------------------------------------------------------------------

    def _hide_and_move(self, runs: Sequence[MigrationRun]) -> None:
        """Hide rounds in this thread, and have Spark move hidden batches in another thread.

        The number of batches hidden ahead grows while a job moves them in a small part of the margin. Each job costs
        Spark some tenths of a second, however much it moves, and no hidden message may become due meanwhile.
        """
        a_round = max(self.spark.sparkContext.defaultParallelism, 2)
        ahead, soon = _ROUNDS_AHEAD * a_round, self.job.margin / _SOON
        hidden = list[BatchTask]()
        moving: Future[timedelta] | None = None
        with ThreadPoolExecutor(1, "postdate-migrate") as mover:
            for run in runs:
                for batches in self._rounds(run, a_round):
                    hidden += batches
                    if moving is None or moving.done() or len(hidden) >= ahead:
                        took = timedelta(0) if moving is None else moving.result()
                        if took >= soon:
                            ahead = max(ahead // 2, a_round)
                        elif len(hidden) >= ahead:
                            ahead *= 2
                        moving, hidden = mover.submit(self._move, hidden), []
            if moving is not None:
                moving.result()
            self._move(hidden)

    def _move(self, tasks: Sequence[BatchTask]) -> timedelta:
        """Move batches, and return how long it took."""
        started = time.perf_counter()
        for batch in self.tasks().move(tasks):
            self._tallies[batch.run_id].moved(batch)
        return timedelta(seconds=time.perf_counter() - started)

    def _rounds(self, run: MigrationRun, a_round: int) -> Iterable[list[BatchTask]]:
        """Hide rounds until one is not full.

        The loop must not wait for an empty round: new messages may be added all the time.
        """
        count = sum(batch.count for batch in self.source.batches(run))
        full = True
        while full:
            try:
                hidden = self.source.hide(run, self.job.batch_size, a_round, self.job.margin)
            except MigrationConflict:
                self._ended_by_another(run)
                return
            except StoreUnavailable as error:
                # The round was too slow for the margin, and hid nothing, so a smaller one is tried. A lost connection
                # is another fault.
                if a_round == 1 or isinstance(error, StoreUnreachable):
                    raise
                a_round //= 2
                log.warning("%s: hiding again, %d batches at a time: %s", run.endpoint, a_round, error)
                continue
            in_round = sum(batch.count for batch in hidden)
            count, full = count + in_round, in_round >= self.job.batch_size * a_round
            if not full:
                self._prepared(run)
            log.info("%s: %s messages hidden from the old manager", run.endpoint, f"{count:,}")
            yield tasks_of(run, hidden, *BatchStatus)

    def _prepared(self, run: MigrationRun) -> None:
        try:
            self.source.set_status(run, MigrationStatus.PREPARED, SystemClock().now())
        except MigrationConflict:
            self._ended_by_another(run)

    def _ended_by_another(self, run: MigrationRun) -> None:
        """Accept a run that another process has completed. Raise MigrationConflict for an aborted run."""
        if status_of(self.source, run) is MigrationStatus.COMPLETED:
            log.info("%s: another process has completed migration %s meanwhile", run.endpoint, run.run_id)
            return
        raise MigrationConflict(
            f"migration {run.run_id} of {run.endpoint} was aborted meanwhile, by another process: what it had moved is "
            f"in the target, and all else is with the old manager"
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def _finished(self, run: MigrationRun) -> EndpointResult:
        """Mark a run completed, if every batch has moved and matches."""
        result = self._tallies[run.run_id].result_of(run, status_of(self.source, run), self.source.batches(run))
        if status_of(self.source, run) is not MigrationStatus.PREPARED or not result.exact:
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
    with job.origin.opened() as source:
        runs = going_on(source, job, "to abort")
        for run in runs:
            # From here on, a driver that is still alive hides no more messages, and returned messages stay returned.
            source.set_status(run, MigrationStatus.PREPARED, SystemClock().now())
            _give_back(source, run)
        results = tuple(_aborted(source, job, run) for run in runs)
    return MigrateResult(job.origin.shown, job.target.shown, results, time.perf_counter() - started)


def _give_back(source: MigrationSource, run: MigrationRun) -> None:
    for batch in source.batches(run):
        if batch.status is BatchStatus.PENDING:
            source.give_back(run, batch.number)


def _aborted(source: MigrationSource, job: MigrateJob, run: MigrationRun) -> EndpointResult:
    tally = Tally()
    _end(source, job, run, tally)
    batches = source.batches(run)
    moved = tasks_of(run, batches, BatchStatus.COMPLETED)
    if moved:
        with opened_target(job.target) as target:
            for task in moved:
                tally.compared(verify_batch(source, target, run, task))
    return tally.result_of(run, status_of(source, run), batches)


def _end(source: MigrationSource, job: MigrateJob, run: MigrationRun, tally: Tally) -> None:
    """Return and finish batches until none is open, then mark the run aborted.

    Meanwhile a live driver may still move some.
    """
    for remaining_tries in reversed(range(_TRIES)):
        _give_back(source, run)
        staged = tasks_of(run, source.batches(run), BatchStatus.STAGED)
        if staged:
            with opened_target(job.target) as target:
                for task in staged:
                    _finish(source, target, run, task, tally)
        try:
            source.set_status(run, MigrationStatus.ABORTED, SystemClock().now())
        except MigrationConflict:
            if status_of(source, run) is MigrationStatus.COMPLETED:
                return  # The other driver completed the run when no batch was open any more.
            if not remaining_tries:
                raise
        else:
            return


def _finish(source: MigrationSource, target: TargetStore, run: MigrationRun, task: BatchTask, tally: Tally) -> None:
    done = move_batch(source, target, run, task)
    if done is None or done.problem:
        problem = "was given back" if done is None else done.problem
        raise PipelineError(f"batch {task.number} of {run.endpoint} cannot be finished: {problem}")
    tally.moved(done)
