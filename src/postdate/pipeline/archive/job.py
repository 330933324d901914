"""Archiving: choose, write, verify, publish, mark, prune. Each step may be cut off at any moment and run again.

- Cut off while writing or verifying: the run's folder is hidden from readers, and removed by the next run.
- While publishing: files that were moved are in the archive, whole. The next run leaves out the records that the
  archive has, and writes the others.
- While marking or pruning: everything is in the archive, on the disk, read back and compared. The *scheduled* record of
  a message is marked before any other of its records goes, and goes last, if it goes; so an audit at any moment sees a
  message that is in the archive, and never one that is lost or comes from nowhere. The next run prunes what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.errors import PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.archive.choosing import (
    doubled_numbers,
    ended_stories,
    is_marked,
    keep,
    placed_records,
    prunable,
    read_contents,
    total,
)
from postdate.pipeline.archive.folder import COLUMNS, ArchiveFolder
from postdate.pipeline.archive.results import ArchivedDay, ArchiveResult
from postdate.pipeline.audit.reading import named
from postdate.pipeline.session import require_utc
from postdate.pipeline.stores import StoreSpec, opened
from postdate.ports import ScanPart

_NUMBERS_AT_ONCE = 10_000
"""Records in one transaction, at most."""

_IDENTITY = ("number", "kind", "message_id", "at")
_COUNT = "changed long"
_COUNT_ARROW = pa.schema([("changed", pa.int64())])


def archive(  # noqa: PLR0913 - what to archive, and how
    spark: SparkSession,
    store: StoreSpec,
    to: Path,
    before: datetime,
    now: datetime,
    *,
    keep_ids: bool = True,
    partitions: int = 4,
) -> ArchiveResult:
    """Move the records of messages whose story is over from the store into Parquet, by the UTC day of their end.

    Runs on the driver; records are read, written, and taken out of the store on the executors. Services may go on:
    records are taken out in short transactions. Run it again after a failure of any kind: no record is in the archive
    twice, and none is lost. See :func:`postdate.pipeline.archive.choosing.ended_stories` for what is over.

    Args:
        spark: a session in UTC.
        store: SQLite, PostgreSQL or MariaDB.
        to: folder of the archive, on a disk that the driver and all executors share; made when it is missing. One
            store has one archive.
        before: messages that ended before go; aware, not after ``now``.
        now: aware.
        keep_ids: keep the *scheduled* record, marked: an id stays known, and is refused when it is sent again. Without,
            all ids that ended before ``before`` are forgotten, those that earlier runs have kept as well: whoever sends
            one of them again has the message delivered again, and an audit that reads the archive calls it duplicated.
        partitions: tasks that work on the store at the same time.

    Raises:
        StoreError: the store failed; run it again.
        PipelineError: ``before`` lies in the future, the folder is no archive of this store, another run is at work on
            it, or what was written does not compare with the store. Nothing was taken out then.
    """
    started = time.perf_counter()
    require_utc(spark)
    limit = aware_utc(before, "before")
    if limit > aware_utc(now, "now"):
        raise PipelineError(f"before={limit.isoformat()} lies in the future; what has not ended yet cannot be archived")
    with opened(store) as found:
        prunable(found)
    (endpoint,) = named([store])
    folder = ArchiveFolder(to)
    folder.found(store, endpoint.name)
    with folder.alone(), ExitStack() as kept:
        run = _Run(spark, store, folder, endpoint.name, partitions)
        chosen = run.choose(kept, limit)
        days = run.write(chosen)
        marked, pruned = run.take_out(kept, chosen)
        forgotten = 0 if keep_ids else run.forget(kept, limit)
    return ArchiveResult(
        store=store.shown,
        archive=str(folder.path),
        before=limit,
        messages=sum(day.messages for day in days),
        records=sum(day.records for day in days),
        already_there=chosen.count - sum(day.records for day in days),
        pruned=pruned,
        ids_kept=marked if keep_ids else 0,
        ids_forgotten=forgotten,
        days=days,
        took_seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class Chosen:
    """What goes.

    Args:
        rows: records of the store that go, with ``day`` and their places; kept.
        count: how many.
        fresh: those of them that the archive does not have yet.
    """

    rows: DataFrame
    count: int
    fresh: DataFrame


@dataclass(frozen=True, slots=True)
class _Run:
    """One run on one archive; the steps in order."""

    spark: SparkSession
    store: StoreSpec
    folder: ArchiveFolder
    endpoint: str
    partitions: int

    def choose(self, kept: ExitStack, before: datetime) -> Chosen:
        """Read the store, and choose.

        Raises:
            PipelineError: in the archive a number belongs to another record.
        """
        contents = kept.enter_context(read_contents(self.spark, self.store, self.partitions))
        archived = self.folder.records(self.spark)
        stories = ended_stories(contents, archived, before)
        # What a run that was cut off has left: of a marked message, everything that the archive has.
        marked = contents.records.where(is_marked()).select("message_id").distinct().withColumn("marked", F.lit(True))
        known = archived.select("number", F.struct(*_IDENTITY).alias("known")).dropDuplicates(["number"])
        doubled = contents.records.join(doubled_numbers(contents.records), "number", "left_semi")
        doubled = doubled.select("message_id").distinct().withColumn("doubled", F.lit(True))
        rows = (
            contents.records.where(f"NOT {is_marked()}")
            .join(known, "number", "left")
            .withColumn("archived", F.col("known").isNotNull())
            .withColumn("differs", F.col("archived") & (F.col("known") != F.struct(*_IDENTITY)))
            .join(stories, "message_id", "left")
            .join(marked, "message_id", "left")
            .join(doubled, "message_id", "left")
            .where("differs OR (doubled IS NULL AND (day IS NOT NULL OR (marked AND archived)))")
        )
        rows, count = keep(kept, rows)
        self._refuse_others(rows)
        return Chosen(rows, count, rows.where("NOT archived"))

    def _refuse_others(self, rows: DataFrame) -> None:
        other = rows.where("differs").select("number", "message_id", "known.message_id").first()
        if other is not None:
            raise PipelineError(
                f"record {other[0]} is of message {other[1]!r} in the store, of {other[2]!r} in {self.folder.path}: "
                f"it is the archive of another store, or this one was set back to an earlier state; give a new folder"
            )

    def write(self, chosen: Chosen) -> tuple[ArchivedDay, ...]:
        """Write what the archive does not have, compare it with the store, and publish it."""
        days = _tallies(chosen.fresh)
        run = self.folder.begin()
        if days:
            self._write_run(chosen.fresh, run)
            self._verify(days, run)
            self.folder.publish(run)
        return tuple(ArchivedDay(day, records, messages) for day, (records, messages, _) in sorted(days.items()))

    def _write_run(self, fresh: DataFrame, run: Path) -> None:
        (
            fresh.select(*COLUMNS, F.lit(self.endpoint).alias("endpoint"), "day")
            .repartition("day")
            .sortWithinPartitions("day", "number")
            .write.partitionBy("day")
            .parquet(str(run))
        )

    def _verify(self, days: dict[str, tuple[int, int, int]], run: Path) -> None:
        written = _tallies(self.folder.written(self.spark, run))
        wrong = sorted(day for day in days.keys() | written.keys() if days.get(day) != written.get(day))
        if wrong:
            raise PipelineError(
                f"what was written to {run} for {wrong[0]} does not compare with the store "
                f"({written.get(wrong[0], (0,))[0]} records of {days.get(wrong[0], (0,))[0]}); nothing was taken out"
            )

    def take_out(self, kept: ExitStack, chosen: Chosen) -> tuple[int, int]:
        """Mark what was scheduled, and then remove all else; return how many of each.

        Only what is read back from the archive goes, and of it only messages whose mark is read back from the store.
        """
        safe = self.folder.records(self.spark).select(*_IDENTITY).distinct()
        chosen_ones = chosen.rows.select(*_IDENTITY, "first", "end")
        going, count = keep(kept, chosen_ones.join(safe, list(_IDENTITY), "left_semi"))
        if count != chosen.count:
            missing = chosen.count - count
            raise PipelineError(f"{missing} records are missing in {self.folder.path}; nothing was taken out")
        marked = self._change(going.where("kind = 'scheduled'"), "mark_archived")
        # Records may have moved since they were read (VACUUM FULL, CLUSTER), and marks have missed them.
        safe_ids, _ = keep(kept, self._marked().select("message_id").distinct())
        others = going.where("kind != 'scheduled'").join(safe_ids, "message_id", "left_semi")
        pruned = self._change(others, "prune")
        return marked, pruned

    def _marked(self) -> DataFrame:
        """Return the *scheduled* records that are marked in the store, as it is when this is used."""
        records = placed_records(self.spark, self.store, ("number", "kind", "message_id", "detail"), self.partitions)
        return records.where(is_marked())

    def forget(self, kept: ExitStack, before: datetime) -> int:
        """Remove the marked records of all messages in the archive that ended before; return how many."""
        archived = self.folder.records(self.spark)
        ended = (
            archived.groupBy("message_id").agg(F.max("at").alias("ended_at")).where(F.col("ended_at") < F.lit(before))
        )
        theirs = (
            archived.where("kind = 'scheduled'").join(ended, "message_id", "left_semi").select("number", "message_id")
        )
        columns = ("number", "kind", "message_id", "detail")
        there, _ = keep(kept, placed_records(self.spark, self.store, columns, self.partitions))
        going = there.where(is_marked()).join(theirs, ["number", "message_id"], "left_semi")
        return self._change(going.join(doubled_numbers(there), "number", "left_anti"), "prune")

    def _change(self, records: DataFrame, change: str) -> int:
        """Mark or prune records, one short transaction a share, on the executors."""
        by_place = records.select("first", "end", "number").repartitionByRange(self.partitions, "first")
        done = by_place.sortWithinPartitions("first").mapInArrow(_changing(self.store, change), _COUNT)
        return total(done, "changed")


def _tallies(records: DataFrame) -> dict[str, tuple[int, int, int]]:
    """Return of each day: records, messages, and a sum over everything that is in the records."""
    checksum = F.sum(F.xxhash64(*COLUMNS).cast("decimal(38,0)"))
    rows = records.groupBy("day").agg(
        F.count("*").alias("records"), F.count_distinct("message_id").alias("messages"), checksum.alias("checksum")
    )
    return {row["day"]: (row["records"], row["messages"], int(row["checksum"])) for row in rows.collect()}


# --- on the executors -------------------------------------------------------------------------------------------------


def _changing(store: StoreSpec, change: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what each task does with the numbers it gets, which are in the order of their shares."""

    def change_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with opened(store) as found:
            target = prunable(found)
            act = {"mark_archived": target.mark_archived, "prune": target.prune}[change]
            for part, numbers in _by_share(batches):
                yield pa.RecordBatch.from_pylist([{"changed": act(part, numbers)}], _COUNT_ARROW)

    return change_all


def _by_share(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[ScanPart, list[int]]]:
    """Yield the numbers of each share, a limited number at a time."""
    part, numbers = ScanPart(0, 0), list[int]()
    for batch in batches:
        for row in batch.to_pylist():
            first, end, number = row["first"], row["end"], row["number"]
            if numbers and (first != part.first or len(numbers) == _NUMBERS_AT_ONCE):
                yield part, numbers
                numbers = []
            part = ScanPart(first, end)
            numbers.append(number)
    if numbers:
        yield part, numbers
