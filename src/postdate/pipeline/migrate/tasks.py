"""Batches as work for Spark: each task opens the source and the target once, and takes its share of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.migrating.tables import MigrationSource
from postdate.pipeline.failures import told_in_one_line
from postdate.pipeline.migrate.ends import OriginSpec, TargetStore, opened_target
from postdate.pipeline.migrate.moving import BatchTask, MovedBatch, move_batch
from postdate.pipeline.migrate.verifying import Checksums, Verified, are_among, checksums, expected, look_closer
from postdate.pipeline.rows import Batches, spark_schema
from postdate.pipeline.stores import StoreSpec
from postdate.ports import ScanFilter, ScanPart
from postdate.ports.migrating import MigrationRun

T = TypeVar("T")
_Task = Callable[[Batches], Batches]
_Answer = Callable[[Checksums], pa.RecordBatch]

_FOUND = pa.schema([("found", pa.string())])
_SOURCE = pa.schema([("checksum", pa.int64()), ("run_id", pa.string()), ("number", pa.int32())])
_TARGET = pa.schema([("checksum", pa.int64())])
_DOUBTFUL = "run_id string, number int, verified long, doubtful array<long>"


@dataclass(frozen=True, slots=True)
class SparkTasks:
    """Moves and compares batches on Spark. A task that Spark repeats, or runs twice at once, changes nothing."""

    spark: SparkSession
    work: TaskWork

    def get_ready(self) -> None:
        """Start the workers, and check that they reach both sides, before anything is hidden; PipelineError if not."""
        slots = self.spark.sparkContext.defaultParallelism
        _collected(self._slots(slots), self.work.reach, MovedBatch)

    def move(self, tasks: Sequence[BatchTask], *, summed: bool = False) -> list[MovedBatch]:
        """Move batches, in their order; those that an abort gave back are missing in the result.

        With ``summed``, results have the messages' checksums, 11 bytes each in the driver's memory. Raises
        PipelineError if a task failed: run its unfinished batches again.
        """
        if not tasks:
            return []
        shares = self._dealt(tasks)
        return _collected(self._slots(len(shares)), partial(self.work.move, shares, summed), MovedBatch)

    def verify(self, tasks: Sequence[BatchTask], since: datetime) -> list[Verified]:
        """Compare moved batches with the target; ``since`` is the earliest due time in them."""
        known = [task for task in tasks if task.checksums]
        others = [task for task in tasks if not task.checksums]
        return [*self._verify_known(known, since), *self._verify_read(others, since)]

    def _verify_known(self, tasks: Sequence[BatchTask], since: datetime) -> list[Verified]:
        """Look up known checksums among those of waiting messages: no row goes through Spark."""
        if not tasks:
            return []
        of_each = [np.frombuffer(task.checksums, np.int64) for task in tasks]
        wanted = np.unique(np.concatenate(of_each))
        slots, searching = self._summing(since, lambda sums: _found([sums[are_among(sums, wanted)].tobytes()]))
        blocks = _collected(slots, searching, bytes)
        there = np.unique(np.frombuffer(b"".join(blocks), np.int64))
        doubts = [(task, sums[~are_among(sums, there)]) for task, sums in zip(tasks, of_each, strict=True)]
        rows = [
            (task.run_id, task.number, task.count - len(doubtful), doubtful.tolist())
            for task, doubtful in doubts
            if len(doubtful)
        ]
        sound = [Verified(task.run_id, task.count, 0, ()) for task, doubtful in doubts if not len(doubtful)]
        if not rows:
            return sound
        return [*sound, *_collected(self.spark.createDataFrame(rows, _DOUBTFUL), self.work.check_doubtful, Verified)]

    def _verify_read(self, tasks: Sequence[BatchTask], since: datetime) -> list[Verified]:
        """Read batches again, and join their checksums with those of waiting messages: for any number of them."""
        if not tasks:
            return []
        shares = self._dealt(tasks)
        given = self._slots(len(shares)).mapInArrow(partial(self.work.sum_up, shares), spark_schema(_SOURCE))
        slots, summing = self._summing(since, lambda sums: pa.record_batch([pa.array(sums)], schema=_TARGET))
        waiting = slots.mapInArrow(summing, spark_schema(_TARGET)).withColumn("waits", F.lit(1))
        joined = given.join(waiting, "checksum", "left")
        by_batch = joined.groupBy("run_id", "number").agg(
            F.count("waits").alias("verified"),
            F.collect_list(F.when(F.col("waits").isNull(), F.col("checksum"))).alias("doubtful"),
        )
        return _collected(by_batch, self.work.check_doubtful, Verified)

    def _summing(self, since: datetime, answer: _Answer) -> tuple[DataFrame, _Task]:
        """Return slots, and their task, which makes answers of the checksums of messages that wait in the target."""
        with opened_target(self.work.target) as store:
            parts = store.parts(self.spark.sparkContext.defaultParallelism * 2)
        return self._slots(len(parts)), partial(self.work.sum_up_waiting, parts, ScanFilter(due_from=since), answer)

    def _dealt(self, tasks: Sequence[BatchTask]) -> list[Sequence[BatchTask]]:
        """Deal batches out like cards, so that the earliest due move first, on whatever core."""
        slots = min(len(tasks), self.spark.sparkContext.defaultParallelism)
        return [tasks[slot::slots] for slot in range(slots)]

    def _slots(self, count: int) -> DataFrame:
        return self.spark.range(0, count, 1, max(count, 1))


def _collected(frame: DataFrame, task: _Task, kind: type[T]) -> list[T]:
    with told_in_one_line("the migration has failed"):
        return [msgspec.json.decode(row[0], type=kind) for row in frame.mapInArrow(task, "found string").collect()]


# --- on the executors -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskWork:
    """What tasks do; they take addresses along, never a connection."""

    origin: OriginSpec
    target: StoreSpec
    runs: Mapping[str, MigrationRun]

    def reach(self, slots: Batches) -> Batches:
        with self.origin.opened() as source, opened_target(self.target) as store:
            for _ in _numbers(slots):
                source.history()
                store.parts(1)
                yield _found([])

    def move(self, shares: Sequence[Sequence[BatchTask]], summed: bool, slots: Batches) -> Batches:
        with self.origin.opened() as source, opened_target(self.target) as store:
            for number in _numbers(slots):
                done = [
                    move_batch(source, store, self.runs[task.run_id], task, summed=summed) for task in shares[number]
                ]
                yield _found([each for each in done if each is not None])

    def sum_up(self, shares: Sequence[Sequence[BatchTask]], slots: Batches) -> Batches:
        with self.origin.opened() as source:
            for slot in _numbers(slots):
                for task in shares[slot]:
                    sums = checksums(expected(source, self.runs[task.run_id], task.number))
                    columns: list[Any] = [
                        pa.array(sums),
                        pa.repeat(pa.scalar(task.run_id), len(sums)),
                        pa.repeat(pa.scalar(task.number, pa.int32()), len(sums)),
                    ]
                    yield pa.record_batch(columns, schema=_SOURCE)

    def sum_up_waiting(self, parts: Sequence[ScanPart], where: ScanFilter, answer: _Answer, slots: Batches) -> Batches:
        with opened_target(self.target) as store:
            for number in _numbers(slots):
                for batch in store.part(parts[number], where):
                    yield answer(checksums(batch))

    def check_doubtful(self, batches: Batches) -> Batches:
        """Look closer at doubtful messages; without any, nothing is opened."""
        with ExitStack() as stack:
            opened: tuple[MigrationSource, TargetStore] | None = None
            for row in (row for batch in batches for row in batch.to_pylist()):
                run, doubtful = self.runs[row["run_id"]], row["doubtful"]
                if not doubtful:
                    yield _found([Verified(run.run_id, row["verified"], 0, ())])
                    continue
                opened = opened or (
                    stack.enter_context(self.origin.opened()),
                    stack.enter_context(opened_target(self.target)),
                )
                source, store = opened
                messages = expected(source, run, row["number"])
                is_doubtful = pa.array(np.isin(checksums(messages), np.array(doubtful, np.int64)))
                yield _found([look_closer(store, run.run_id, messages.filter(is_doubtful), row["verified"])])


def _numbers(slots: Batches) -> Iterator[int]:
    for slot in slots:
        yield from cast("list[int]", slot.column("id").to_pylist())


def _found(values: Sequence[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"found": [msgspec.json.encode(value).decode() for value in values]}, _FOUND)
