"""Archiving: choose, write, verify, publish, mark, prune. Each step may be cut off at any moment and run again.

- Cut off while writing or verifying: the run's folder is hidden from readers, and removed by the next run.
- While publishing: files already moved are in the archive, whole. The next run leaves out the records in the archive,
  and writes the others.
- While marking or pruning: everything is in the archive, synced, read back and compared. A message's *scheduled* record
  is marked before its other records go, and goes last, if at all; so an audit at any moment sees an archived message,
  and never takes it for lost or orphaned. The next run prunes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.errors import PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.archive.folder import COLUMNS, ArchiveFolder
from postdate.pipeline.audit.reading import is_sent_again, named
from postdate.pipeline.frames import PARTS, open_snapshot, part_frame, persisted, scan_frame, scan_parts
from postdate.pipeline.plain import plain
from postdate.pipeline.rows import Batches, arrow_schema, spark_schema, to_batch
from postdate.pipeline.session import require_utc
from postdate.pipeline.stores import PAGE_ROWS, OpenStore, StoreSpec, opened
from postdate.ports import Scan, ScanPart
from postdate.ports.scanning import ARCHIVED, ArchivableStore

# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """Records that one run added to one day of an archive.

    Args:
        day: UTC, ISO 8601; on which the messages ended.
        records: number of records.
        messages: number of messages with any of these records.
    """

    day: str
    records: int
    messages: int


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """Result of one run.

    Args:
        store: address, without password.
        archive: the folder.
        before: messages that ended before this instant were moved; UTC.
        messages: whose records were written to the archive.
        records: that were written there.
        already_there: records that the archive had already, from a run that was cut off or because they were restored.
        pruned: records removed from the store, except the *scheduled* ones of kept ids.
        ids_kept: *scheduled* records that were marked, and stay in the store.
        ids_forgotten: *scheduled* records that were removed.
        days: added records, by day.
    """

    store: str
    archive: str
    before: datetime
    messages: int
    records: int
    already_there: int
    pruned: int
    ids_kept: int
    ids_forgotten: int
    days: tuple[ArchivedDay, ...]
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        return plain(self)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Result of restoring.

    Args:
        store: address, without password.
        archive: the folder.
        messages: that came back with all their records.
        left_out: requested messages whose ids are in use in the store: they were restored before, never removed, or the
            id was scheduled again.
    """

    store: str
    archive: str
    messages: int
    left_out: int
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        return plain(self)


# --- which records are archived: those of messages that ended long enough ago -----------------------------------------


_TURNS = (
    "delivered", "handled", "discarded", "expired", "cancelled", "retried", "failed", "returned", "rescheduled",
)  # fmt: skip
"""Records of where a message went; the last of them says where it is."""


def prunable(store: OpenStore) -> ArchivableStore:
    """Return the store's archivable side, or raise PipelineError."""
    scannable = store.scannable()
    if not isinstance(scannable, ArchivableStore):
        raise PipelineError(f"{type(scannable).__name__} cannot be archived: its records cannot be taken out")
    return scannable


@dataclass(frozen=True, slots=True)
class StoreContents:
    """Contents of a store, kept; records have the bounds of the :class:`ScanPart` that is pruned at once."""

    records: DataFrame
    waiting: DataFrame


def read_contents(stack: ExitStack, spark: SparkSession, store: StoreSpec, partitions: int) -> StoreContents:
    """Read pending messages, then queues, then all records; keep them until the stack is unwound.

    In this order, a message that moves on meanwhile is seen at least once, even where the store has no snapshots: a
    message without a record of its end is seen waiting or in a queue, or else is not taken for ended.
    """
    with open_snapshot(store) as snapshot:

        def ids_of(what: str) -> DataFrame:
            parts = scan_parts(store, what, partitions)
            return keep(stack, scan_frame(spark, store, what, ("message_id",), parts, snapshot=snapshot))[0]

        waiting = ids_of("pending").union(ids_of("queued")).distinct()
        records, _ = keep(stack, placed_records(spark, store, COLUMNS, partitions, snapshot))
    return StoreContents(records, waiting)


def keep(stack: ExitStack, frame: DataFrame) -> tuple[DataFrame, int]:
    """Compute a frame now, as it may differ later; keep it until the stack is unwound; return it and its row count."""
    frame = persisted(stack, frame)
    return frame, frame.count()


def placed_records(
    spark: SparkSession, store: StoreSpec, columns: Sequence[str], partitions: int, snapshot: str | None = None
) -> DataFrame:
    """Return records with ``first`` and ``end`` of their :class:`ScanPart`, each small enough to be pruned at once."""
    schema = arrow_schema("records", columns)
    placed = pa.unify_schemas([schema, PARTS])
    scan = Scan("records", tuple(schema.names), snapshot=snapshot)

    def read(batches: Batches) -> Batches:
        with opened(store) as opened_store:
            pruned = prunable(opened_store)
            for batch in batches:
                for share in batch.to_pylist():
                    for first in range(share["first"], share["end"], pruned.pruned_at_once):
                        part = ScanPart(first, min(first + pruned.pruned_at_once, share["end"]))
                        for page in pruned.scan(scan, part, PAGE_ROWS):
                            yield to_batch([(*row, part.first, part.end) for row in page], placed)

    one_a_task = part_frame(spark, scan_parts(store, "records", partitions))
    return one_a_task.mapInArrow(read, spark_schema(placed))


def ended_stories(contents: StoreContents, archived: DataFrame, before: datetime) -> DataFrame:
    """Return ``message_id`` and ``day`` (of its end, as text) of each message to be archived.

    A message has ended when it neither waits nor is in a queue of this database, and it expired, was cancelled, handled
    or discarded, went on as another message (a delayed retry), or was delivered to a destination where handling is
    never recorded. Not archived are messages in the error queue, because they may be returned, and messages returned
    from there that have not ended again.

    Args:
        contents: of the store.
        archived: records already in the archive; they, too, show which receivers record their handling.
        before: every record of the message is older.
    """
    is_scheduled = F.col("kind") == "scheduled"
    # A delayed retry only: after a failed attempt of the dispatcher the message still waits.
    turn = F.when(F.col("kind").isin(*_TURNS) & ~((F.col("kind") == "retried") & ~is_sent_again()), F.col("kind"))
    stories = contents.records.groupBy("message_id").agg(
        F.max(is_scheduled).alias("scheduled"),
        F.coalesce(F.max(F.when(is_scheduled, F.col("destination"))), F.max("destination")).alias("destination"),
        F.max(F.col("kind").isin("handled", "discarded", "expired", "cancelled")).alias("ended"),
        F.max(F.col("kind") == "delivered").alias("delivered"),
        F.max_by(turn, F.when(turn.isNotNull(), F.struct("at", "number"))).alias("last_turn"),
        F.max("at").alias("ended_at"),
        F.max("number").alias("newest"),
    )
    handled = F.col("kind").isin("handled", "discarded")
    receivers = (
        contents.records.where(handled)
        .select("destination")
        .union(archived.where(handled).select("destination"))
        .distinct()
        .withColumn("recording", F.lit(True))
    )
    # The highest number stays in the store with its message: some stores number new records after it.
    newest = contents.records.agg(F.max("number").alias("last_number"))
    went_on = F.col("delivered") & (F.col("recording").isNull() | (F.col("last_turn") == "retried"))
    may_come_back = F.col("last_turn").isin("failed", "returned", "rescheduled")
    return (
        stories.join(F.broadcast(receivers), "destination", "left")
        .join(contents.waiting, "message_id", "left_anti")
        .crossJoin(F.broadcast(newest))
        .where(F.col("scheduled") & (F.col("ended") | went_on) & ~may_come_back)
        .where((F.col("ended_at") < F.lit(before)) & (F.col("newest") < F.col("last_number")))
        .select("message_id", F.date_format("ended_at", "yyyy-MM-dd").alias("day"))
    )


def doubled_numbers(records: DataFrame) -> DataFrame:
    """Return the numbers that several records share; a store gives each once, unless somebody has interfered.

    Records are pruned by number, so neither of two with the same number may go: the other might go instead.
    """
    return records.groupBy("number").count().where("count > 1").select("number")


IS_MARKED = f"(kind = 'scheduled' AND coalesce(detail, '') = '{ARCHIVED}')"
"""The SQL condition for a *scheduled* record whose message is in the archive."""


def changed(store: StoreSpec, rows: DataFrame, change: Callable[[ArchivableStore, Batches], Iterator[int]]) -> int:
    """Have executors change a store by rows, once a task; return the sum of what ``change`` counts."""

    def change_all(batches: Batches) -> Batches:
        with opened(store) as opened_store:
            for count in change(prunable(opened_store), batches):
                yield pa.RecordBatch.from_pylist([{"changed": count}], _COUNT_ARROW)

    return int(rows.mapInArrow(change_all, "changed long").agg(F.coalesce(F.sum("changed"), F.lit(0))).collect()[0][0])


# --- the steps of a run -----------------------------------------------------------------------------------------------


_NUMBERS_AT_ONCE = 10_000
"""Records in one transaction, at most."""

_IDENTITY = ("number", "kind", "message_id", "at")
MARKS = ("number", "kind", "message_id", "detail")
"""Columns of records that tell which are marked."""

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
    """Move the records of ended messages from the store into Parquet, by the UTC day of their end.

    Runs on the driver; executors read, write, and prune records in short transactions. Services may run meanwhile. Run
    it again after a failure of any kind: no record is in the archive twice, and none is lost. See
    :func:`postdate.pipeline.archive.job.ended_stories` for when a message has ended.

    Args:
        spark: a session in UTC.
        store: SQLite, PostgreSQL or MariaDB.
        to: folder of the archive, on a disk that the driver and all executors share; created if missing. One
            store has one archive.
        before: messages that ended before go; aware, not after ``now``.
        now: aware.
        keep_ids: keep the *scheduled* record, marked: the id stays known, and sending it again is refused. Without it,
            all ids that ended before ``before`` are forgotten, also those that earlier runs kept: a message sent
            again under such an id is delivered again, and an audit that reads the archive calls it duplicated.
        partitions: tasks that work on the store at the same time.

    Raises:
        StoreError: the store failed; run it again.
        PipelineError: ``before`` lies in the future, the folder is no archive of this store, another run is at work on
            it, or the written records differ from the store's. Nothing was removed from the store.
    """
    started = time.perf_counter()
    require_utc(spark)
    limit = aware_utc(before, "before")
    if limit > aware_utc(now, "now"):
        raise PipelineError(f"before={limit.isoformat()} lies in the future; what has not ended yet cannot be archived")
    with opened(store) as opened_store:
        prunable(opened_store)
    (endpoint,) = named([store])
    folder = ArchiveFolder(to)
    folder.claim_for(store, endpoint.name)
    with folder.alone(), ExitStack() as frames:
        run = _Run(spark, store, folder, endpoint.name, partitions)
        chosen, count = run.choose(frames, limit)
        days = run.write(chosen)
        marked, pruned = run.take_out(frames, chosen, count)
        forgotten = 0 if keep_ids else run.forget(frames, limit)
    return ArchiveResult(
        store=store.shown,
        archive=str(folder.path),
        before=limit,
        messages=sum(day.messages for day in days),
        records=sum(day.records for day in days),
        already_there=count - sum(day.records for day in days),
        pruned=pruned,
        ids_kept=marked if keep_ids else 0,
        ids_forgotten=forgotten,
        days=days,
        took_seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One run on one archive; the methods are its steps, in order."""

    spark: SparkSession
    store: StoreSpec
    folder: ArchiveFolder
    endpoint: str
    partitions: int

    def choose(self, frames: ExitStack, before: datetime) -> tuple[DataFrame, int]:
        """Read the store and choose records; raise PipelineError if the archive has another record under a number.

        Returns them with ``day``, ``first``, ``end`` and whether they are ``archived`` already, and how many they are.
        """
        contents = read_contents(frames, self.spark, self.store, self.partitions)
        archived = self.folder.records(self.spark)
        stories = ended_stories(contents, archived, before)
        # A run that was cut off left marked messages: of these, every record that is in the archive goes.
        marked = contents.records.where(IS_MARKED).select("message_id").distinct().withColumn("marked", F.lit(True))
        archived_rows = archived.select("number", F.struct(*_IDENTITY).alias("known")).dropDuplicates(["number"])
        doubled = contents.records.join(doubled_numbers(contents.records), "number", "left_semi")
        doubled = doubled.select("message_id").distinct().withColumn("doubled", F.lit(True))
        rows = (
            contents.records.where(f"NOT {IS_MARKED}")
            .join(archived_rows, "number", "left")
            .withColumn("archived", F.col("known").isNotNull())
            .withColumn("differs", F.col("archived") & (F.col("known") != F.struct(*_IDENTITY)))
            .join(stories, "message_id", "left")
            .join(marked, "message_id", "left")
            .join(doubled, "message_id", "left")
            .where("differs OR (doubled IS NULL AND (day IS NOT NULL OR (marked AND archived)))")
        )
        rows, count = keep(frames, rows)
        self._refuse_conflicts(rows)
        return rows, count

    def _refuse_conflicts(self, rows: DataFrame) -> None:
        other = rows.where("differs").select("number", "message_id", "known.message_id").first()
        if other is not None:
            raise PipelineError(
                f"record {other[0]} is of message {other[1]!r} in the store, of {other[2]!r} in {self.folder.path}: "
                f"it is the archive of another store, or this one was set back to an earlier state; give a new folder"
            )

    def write(self, chosen: DataFrame) -> tuple[ArchivedDay, ...]:
        """Write records that the archive lacks, compare them with the store, and publish them."""
        fresh = chosen.where("NOT archived")
        days = _tallies(fresh)
        run = self.folder.begin()
        if days:
            self._write_run(fresh, run)
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
        written = _tallies(self.folder.read(self.spark, run))
        wrong = sorted(day for day in days.keys() | written.keys() if days.get(day) != written.get(day))
        if wrong:
            raise PipelineError(
                f"what was written to {run} for {wrong[0]} does not compare with the store "
                f"({written.get(wrong[0], (0,))[0]} records of {days.get(wrong[0], (0,))[0]}); nothing was taken out"
            )

    def take_out(self, frames: ExitStack, chosen: DataFrame, count: int) -> tuple[int, int]:
        """Mark the *scheduled* records, then remove all others; return both counts.

        Removes only records read back from the archive, of messages whose mark was read back from the store.
        """
        safe = self.folder.records(self.spark).select(*_IDENTITY).distinct()
        going, number = keep(frames, chosen.select(*_IDENTITY, "first", "end").join(safe, list(_IDENTITY), "left_semi"))
        if number != count:
            raise PipelineError(f"{count - number} records are missing in {self.folder.path}; nothing was taken out")
        marked = self._change(going.where("kind = 'scheduled'"), "mark_archived")
        # Records may have moved since they were read (VACUUM FULL, CLUSTER), and marking may have missed them.
        there = placed_records(self.spark, self.store, MARKS, self.partitions)
        safe_ids, _ = keep(frames, there.where(IS_MARKED).select("message_id").distinct())
        pruned = self._change(going.where("kind != 'scheduled'").join(safe_ids, "message_id", "left_semi"), "prune")
        return marked, pruned

    def forget(self, frames: ExitStack, before: datetime) -> int:
        """Remove the marked records of all archived messages that ended before; return their number."""
        archived = self.folder.records(self.spark)
        ended = (
            archived.groupBy("message_id").agg(F.max("at").alias("ended_at")).where(F.col("ended_at") < F.lit(before))
        )
        archived_ends = (
            archived.where("kind = 'scheduled'").join(ended, "message_id", "left_semi").select("number", "message_id")
        )
        there, _ = keep(frames, placed_records(self.spark, self.store, MARKS, self.partitions))
        going = there.where(IS_MARKED).join(archived_ends, ["number", "message_id"], "left_semi")
        return self._change(going.join(doubled_numbers(there), "number", "left_anti"), "prune")

    def _change(self, records: DataFrame, change: str) -> int:
        """Mark or prune records on the executors, one short transaction for each :class:`ScanPart`; return how many."""

        def change_shares(store: ArchivableStore, batches: Batches) -> Iterator[int]:
            act = {"mark_archived": store.mark_archived, "prune": store.prune}[change]
            for part, numbers in _by_share(batches):
                yield act(part, numbers)

        by_place = records.select("first", "end", "number").repartitionByRange(self.partitions, "first")
        return changed(self.store, by_place.sortWithinPartitions("first"), change_shares)


def _tallies(records: DataFrame) -> dict[str, tuple[int, int, int]]:
    """Return for each day the number of records, the number of messages, and a checksum of all columns."""
    checksum = F.sum(F.xxhash64(*COLUMNS).cast("decimal(38,0)"))
    rows = records.groupBy("day").agg(
        F.count("*").alias("records"), F.count_distinct("message_id").alias("messages"), checksum.alias("checksum")
    )
    return {row["day"]: (row["records"], row["messages"], int(row["checksum"])) for row in rows.collect()}


def _by_share(batches: Batches) -> Iterator[tuple[ScanPart, list[int]]]:
    """Yield the numbers of each :class:`ScanPart`, which come in its order, at most ``_NUMBERS_AT_ONCE`` at a time."""
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
