"""Batches as work for Spark: each task opens the source and the target once, and processes its share of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from postdate.clock import SystemClock
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.migrate.ends import OriginSpec, open_target
from postdate.pipeline.migrate.moving import BatchTask, MovedBatch, move_batch
from postdate.pipeline.migrate.results import BatchComparison
from postdate.pipeline.migrate.verifying import verify_batch
from postdate.pipeline.rows import Batches
from postdate.pipeline.stores import StoreSpec
from postdate.ports.migrating import MigrationRun

T = TypeVar("T")
_Task = Callable[[Batches], Batches]
_Shares = Sequence[Sequence[BatchTask]]
_Work = Callable[[_Shares, Batches], Batches]

_RESULT_SCHEMA = pa.schema([("found", pa.string())])


@dataclass(frozen=True, slots=True)
class SparkTasks:
    """Moves and compares batches on Spark. A task that Spark repeats, or runs twice at once, changes nothing more."""

    spark: SparkSession
    work: TaskWork
    slots: int

    def start_workers(self) -> None:
        """Start the workers, and check that they reach both sides, before anything is hidden.

        Otherwise raise PipelineError.
        """
        _collect(self._slots(self.slots), self.work.check_connections, MovedBatch)

    def move(self, tasks: Sequence[BatchTask]) -> list[MovedBatch]:
        """Move batches, in their order. Batches that an abort returned are missing in the result.

        Raises PipelineError if a task failed: run its unfinished batches again.
        """
        return self._run_on_slots(tasks, self.work.move, MovedBatch)

    def verify(self, tasks: Sequence[BatchTask]) -> list[BatchComparison]:
        """Compare moved batches with the target."""
        return self._run_on_slots(tasks, self.work.verify, BatchComparison)

    def _run_on_slots(self, tasks: Sequence[BatchTask], work: _Work, kind: type[T]) -> list[T]:
        if not tasks:
            return []
        shares = self._distribute(tasks)
        return _collect(self._slots(len(shares)), partial(work, shares), kind)

    def _distribute(self, tasks: Sequence[BatchTask]) -> list[Sequence[BatchTask]]:
        """Distribute batches in turn, so that the earliest due batches move first, on any core."""
        slots = min(len(tasks), self.slots)
        return [tasks[slot::slots] for slot in range(slots)]

    def _slots(self, count: int) -> DataFrame:
        return self.spark.range(0, count, 1, max(count, 1))


def _collect(frame: DataFrame, task: _Task, kind: type[T]) -> list[T]:
    with shorten_errors("the migration has failed"):
        return [msgspec.json.decode(row[0], type=kind) for row in frame.mapInArrow(task, "found string").collect()]


# --- on the executors -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskWork:
    """The work of tasks. The value has addresses, never a connection."""

    origin: OriginSpec
    target: StoreSpec
    runs: Mapping[str, MigrationRun]

    def check_connections(self, slots: Batches) -> Batches:
        with self.origin.open() as source, open_target(self.target, in_task=True) as store:
            for _ in _numbers(slots):
                source.history()
                store.count_overdue(SystemClock().now())
                yield _results([])

    def move(self, shares: _Shares, slots: Batches) -> Batches:
        with self.origin.open() as source, open_target(self.target, in_task=True) as store:
            for number in _numbers(slots):
                moved_batches = [move_batch(source, store, self.runs[task.run_id], task) for task in shares[number]]
                yield _results([each for each in moved_batches if each is not None])

    def verify(self, shares: _Shares, slots: Batches) -> Batches:
        with self.origin.open() as source, open_target(self.target, in_task=True) as store:
            for number in _numbers(slots):
                yield _results([verify_batch(source, store, self.runs[task.run_id], task) for task in shares[number]])


def _numbers(slots: Batches) -> Iterator[int]:
    for slot in slots:
        yield from cast("list[int]", slot.column("id").to_pylist())


def _results(values: Sequence[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"found": [msgspec.json.encode(value).decode() for value in values]}, _RESULT_SCHEMA
    )
