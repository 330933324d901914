"""Aborts a migration: unmoved batches go back to the old manager, begun ones are finished. Without Spark."""

from __future__ import annotations

import time
from typing import Final

from postdate.clock import SystemClock
from postdate.errors import MigrationConflict, PipelineError
from postdate.migrating.tables import MigrationSource
from postdate.pipeline.migrate.looking import MigrateJob, going_on, status_of
from postdate.pipeline.migrate.moving import BatchTask, move_batch, tasks_of
from postdate.pipeline.migrate.results import EndpointResult, MigrateResult
from postdate.pipeline.migrate.tally import Tally
from postdate.pipeline.migrate.target import TargetStore, opened_target
from postdate.pipeline.migrate.verifying import verify_all
from postdate.ports.migrating import BatchStatus, MigrationRun, MigrationStatus

_TRIES: Final = 20


def abort(job: MigrateJob) -> MigrateResult:
    """End the runs on their way: each message is then either with the old manager or in the target, and never in both.

    Batches unknown to the target are given back, those of all endpoints first, because meanwhile nothing delivers them.
    A batch that was being moved may be in the target, in part, and may be delivered already: it is finished. Moved
    messages stay in the target, and are compared.

    Args:
        job: as it was begun; its cut-off does not matter.

    Raises:
        PipelineError: no run is on its way.
        MigrationConflict: it was begun with another target; nothing was changed.
        StoreError: the target failed while batches were finished. Everything else was given back; abort again.
    """
    started = time.perf_counter()
    with job.origin.opened() as source:
        runs = going_on(source, job, "to abort")
        for run in runs:
            # Then a driver that is still alive hides no more messages, and returned ones stay returned.
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
    moved = [batch for batch in batches if batch.status is BatchStatus.COMPLETED]
    if moved:
        with opened_target(job.target) as target:
            since = min(batch.earliest for batch in moved)
            for found in verify_all(source, target, run, [batch.number for batch in moved], since):
                tally.compared(found)
    return tally.result_of(run, status_of(source, run), batches)


def _end(source: MigrationSource, job: MigrateJob, run: MigrationRun, tally: Tally) -> None:
    """Give back and finish batches until none is open, then mark the run aborted: a live driver may still move some."""
    for tries_left in reversed(range(_TRIES)):
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
                return  # by that driver, once nothing was between
            if not tries_left:
                raise
        else:
            return


def _finish(source: MigrationSource, target: TargetStore, run: MigrationRun, task: BatchTask, tally: Tally) -> None:
    done = move_batch(source, target, run, task)
    if done is None or done.problem:
        said = "was given back" if done is None else done.problem
        raise PipelineError(f"batch {task.number} of {run.endpoint} cannot be finished: {said}")
    tally.moved(done)
