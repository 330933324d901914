"""Archive: choose, write, verify, publish, mark, prune. Each step may be interrupted at any moment and run again.

- Interrupted while writing or verifying: the folder of the run is hidden from readers, and the next run removes it.
- Interrupted while publishing: files that were moved are in the archive, complete. The next run leaves out the records
  that are in the archive, and writes the others.
- Interrupted while marking or pruning: all records are in the archive, synced, read back and compared. The *scheduled*
  record of a message is marked before its other records are removed, and is removed last, if at all. So an audit at any
  moment sees that the message is archived, and never takes it for lost or orphaned. The next run prunes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.errors import PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.archive.folder import COLUMNS, ArchiveFolder
from postdate.pipeline.audit.reading import is_sent_again, name_stores
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.frames import PARTS, open_snapshot, part_frame, persist_frame, scan_frame, scan_parts
from postdate.pipeline.outputs import parse_path
from postdate.pipeline.plain import to_plain
from postdate.pipeline.rows import Batches, arrow_schema, spark_schema, to_batch
from postdate.pipeline.session import check_utc
from postdate.pipeline.stores import OpenStore, StoreSpec, open_in_task, open_spec
from postdate.ports import Scan, ScanPart
from postdate.ports.scanning import ARCHIVED, ArchivableStore

# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """Records that one run added to one day of an archive.

    Args:
        day: the day on which the messages ended; UTC, ISO 8601.
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
        messages: number of messages whose records were written to the archive.
        records: number of records that were written to the archive.
        already_there: records that were in the archive before, from an interrupted run or because they were restored.
        pruned: records removed from the store, except the *scheduled* records of kept ids.
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
        return to_plain(self)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Result of restoring.

    Args:
        store: address, without password.
        archive: the folder.
        messages: number of messages that were restored with all their records.
        left_out: requested messages whose ids are in use in the store: the message was restored before or never
            removed, or the id was scheduled again.
    """

    store: str
    archive: str
    messages: int
    left_out: int
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)


# --- which records are archived: those of messages that ended long enough ago -----------------------------------------


_OUTCOME_KINDS = (
    "delivered", "handled", "discarded", "expired", "cancelled", "retried", "failed", "returned", "rescheduled",
)  # fmt: skip
"""Kinds of records that say where a message went. The last such record says where the message is."""


def require_archivable(store: OpenStore) -> ArchivableStore:
    """Return the archivable interface of the store. Raise PipelineError if the store has none."""
    scannable = store.require_scannable()
    if not isinstance(scannable, ArchivableStore):
        raise PipelineError(f"{type(scannable).__name__} cannot be archived: its records cannot be taken out")
    return scannable


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The persisted contents of a store.

    Each record has the bounds of the :class:`ScanPart` that is pruned together.
    """

    records: DataFrame
    waiting: DataFrame


def read_contents(stack: ExitStack, spark: SparkSession, store: StoreSpec, partitions: int) -> StoreContents:
    """Read pending messages, then queues, then all records. Keep them until the stack is closed.

    In this order, a message that moves meanwhile is seen at least once, even if the store has no snapshots. A message
    without a record of its end is either seen as pending or in a queue, or does not count as ended.
    """
    with open_snapshot(store) as snapshot:

        def read_ids(table: str) -> DataFrame:
            parts = scan_parts(store, table, partitions)
            return persist_now(stack, scan_frame(spark, store, table, ("message_id",), parts, snapshot=snapshot))[0]

        waiting = read_ids("pending").union(read_ids("queued")).distinct()
        records, _ = persist_now(stack, records_with_parts(spark, store, COLUMNS, partitions, snapshot))
    return StoreContents(records, waiting)


def persist_now(stack: ExitStack, frame: DataFrame) -> tuple[DataFrame, int]:
    """Compute a frame now, because it may differ later. Keep it until the stack is closed.

    Return it and its row count.
    """
    frame = persist_frame(stack, frame)
    return frame, frame.count()


def records_with_parts(
    spark: SparkSession, store: StoreSpec, columns: Sequence[str], partitions: int, snapshot: str | None = None
) -> DataFrame:
    """Return records with ``first`` and ``end`` of their :class:`ScanPart`, each part small enough for one prune."""
    schema = arrow_schema("records", columns)
    schema_with_parts = pa.unify_schemas([schema, PARTS])
    scan = Scan("records", tuple(schema.names), snapshot=snapshot)

    def read_batches(batches: Batches) -> Batches:
        with open_in_task(store) as opened_store:
            width = require_archivable(opened_store).prune_share_width
            for batch in batches:
                for share in batch.to_pylist():
                    for first in range(share["first"], share["end"], width):
                        part = ScanPart(first, min(first + width, share["end"]))
                        for page in opened_store.scan_pages(scan, part):
                            yield to_batch([(*row, part.first, part.end) for row in page], schema_with_parts)

    part_rows = part_frame(spark, scan_parts(store, "records", partitions))
    return part_rows.mapInArrow(read_batches, spark_schema(schema_with_parts))


def find_ended_messages(contents: StoreContents, archived: DataFrame, before: datetime) -> DataFrame:
    """Return ``message_id`` and ``day`` (of its end, as text) of each message to be archived.

    A message has ended if it is neither pending nor in a queue of this database, and one of these is true: it expired,
    was cancelled, handled or discarded; it continued as another message (a delayed retry); or it was delivered to a
    destination where handling is never recorded. Messages in the error queue are not archived, because they may be
    returned. Messages returned from there are not archived either until they end again.

    Args:
        contents: of the store.
        archived: records in the archive; they, too, show which receivers record their handling.
        before: every record of the message is older.
    """
    is_scheduled = F.col("kind") == "scheduled"
    # Only for a delayed retry: after a failed attempt of the dispatcher, the message is still pending.
    outcome = F.when(
        F.col("kind").isin(*_OUTCOME_KINDS) & ~((F.col("kind") == "retried") & ~is_sent_again()), F.col("kind")
    )
    messages = contents.records.groupBy("message_id").agg(
        F.max(is_scheduled).alias("scheduled"),
        F.coalesce(F.max(F.when(is_scheduled, F.col("destination"))), F.max("destination")).alias("destination"),
        F.max(F.col("kind").isin("handled", "discarded", "expired", "cancelled")).alias("ended"),
        F.max(F.col("kind") == "delivered").alias("delivered"),
        F.max_by(outcome, F.when(outcome.isNotNull(), F.struct("at", "number"))).alias("last_turn"),
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
    # The highest number stays in the store with its message, because some stores number new records after it.
    newest = contents.records.agg(F.max("number").alias("last_number"))
    went_on = F.col("delivered") & (F.col("recording").isNull() | (F.col("last_turn") == "retried"))
    may_come_back = F.col("last_turn").isin("failed", "returned", "rescheduled")
    return (
        messages.join(F.broadcast(receivers), "destination", "left")
        .join(contents.waiting, "message_id", "left_anti")
        .crossJoin(F.broadcast(newest))
        .where(F.col("scheduled") & (F.col("ended") | went_on) & ~may_come_back)
        .where((F.col("ended_at") < F.lit(before)) & (F.col("newest") < F.col("last_number")))
        .select("message_id", F.date_format("ended_at", "yyyy-MM-dd").alias("day"))
    )


def find_shared_numbers(records: DataFrame) -> DataFrame:
    """Return the numbers that several records share.

    A store uses each number once, unless a user has changed its tables. Records are pruned by number. So neither of two
    records with the same number may be pruned: the wrong one might go.
    """
    return records.groupBy("number").count().where("count > 1").select("number")


IS_MARKED = f"(kind = 'scheduled' AND coalesce(detail, '') = '{ARCHIVED}')"
"""The SQL condition for a *scheduled* record whose message is in the archive."""


def change_store(store: StoreSpec, rows: DataFrame, change: Callable[[OpenStore, Batches], Iterator[int]]) -> int:
    """Have executors change a store by rows, once a task. Return the sum of the counts that ``change`` yields.

    Every change is idempotent. One whose answer was lost counts nothing when it is repeated.
    """

    def change_all(batches: Batches) -> Batches:
        with open_in_task(store) as opened_store:
            for count in change(opened_store, batches):
                yield pa.RecordBatch.from_pylist([{"changed": count}], _COUNT_ARROW)

    return int(rows.mapInArrow(change_all, "changed long").agg(F.coalesce(F.sum("changed"), F.lit(0))).collect()[0][0])


# --- the steps of a run -----------------------------------------------------------------------------------------------


_NUMBERS_AT_ONCE = 10_000
"""Maximum number of records in one transaction."""

_IDENTITY = ("number", "kind", "message_id", "at")
MARKS = ("number", "kind", "message_id", "detail")
"""Columns of records that show which records are marked."""

_COUNT_ARROW = pa.schema([("changed", pa.int64())])


@shorten_errors("the archive has failed")
def archive(  # noqa: PLR0913 - what to archive, and how
    spark: SparkSession,
    store: StoreSpec,
    to: str | Path,
    before: datetime,
    now: datetime,
    *,
    keep_ids: bool = True,
    partitions: int = 4,
) -> ArchiveResult:
    """Move the records of ended messages from the store into Parquet, by the UTC day of their end.

    This runs on the driver; executors read, write, and prune records in short transactions. Services may run meanwhile.
    After a failure of any kind, run it again: no record is in the archive twice, and none is lost. See
    :func:`postdate.pipeline.archive.job.ended_stories` for when a message has ended.

    Args:
        spark: a session in UTC.
        store: SQLite, PostgreSQL or MariaDB.
        to: folder of the archive, on a disk that the driver and all executors share, because its files are moved and
            locked there: no URI. Created if missing. One store has one archive.
        before: messages that ended earlier are archived; aware, not after ``now``.
        now: aware.
        keep_ids: keep the *scheduled* record and mark it: the store still knows the id and refuses to store it again.
            Without it, all ids that ended before ``before`` are removed, including ids that earlier runs kept. A
            message sent again under such an id is delivered again, and an audit that reads the archive reports it as
            duplicated.
        partitions: tasks that work on the store at the same time.

    Raises:
        StoreError: the store failed; run it again.
        PipelineError: ``before`` is in the future, the folder is not an archive of this store, another run is working
            on it, or the written records differ from the store's. Nothing was removed from the store.
    """
    started = time.perf_counter()
    check_utc(spark)
    limit = aware_utc(before, "before")
    if limit > aware_utc(now, "now"):
        raise PipelineError(f"before={limit.isoformat()} lies in the future; what has not ended yet cannot be archived")
    with open_spec(store) as opened_store:
        require_archivable(opened_store)
    (endpoint,) = name_stores([store])
    folder = ArchiveFolder(parse_path(to, "an archive"))
    folder.bind_to(store, endpoint.name)
    with folder.lock(), ExitStack() as frames:
        run = _Run(spark, store, folder, endpoint.name, partitions)
        chosen_records, count = run.choose_records(frames, limit)
        days = run.write_records(chosen_records)
        marked, pruned = run.remove_records(frames, chosen_records, count)
        forgotten = 0 if keep_ids else run.remove_marked_records(frames, limit)
    return ArchiveResult(
        store=store.redacted_address,
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
    """One run on one archive. The methods are its steps, in order."""

    spark: SparkSession
    store: StoreSpec
    folder: ArchiveFolder
    endpoint: str
    partitions: int

    def choose_records(self, frames: ExitStack, before: datetime) -> tuple[DataFrame, int]:
        """Read the store and choose records. Raise PipelineError if the archive has another record under a number.

        Returns the records with ``day``, ``first``, ``end`` and whether they are ``archived`` already, and their
        number.
        """
        contents = read_contents(frames, self.spark, self.store, self.partitions)
        archived = self.folder.read_published(self.spark)
        ended_messages = find_ended_messages(contents, archived, before)
        # An interrupted run left marked messages. All of their records that are in the archive are removed now.
        marked = contents.records.where(IS_MARKED).select("message_id").distinct().withColumn("marked", F.lit(True))
        archived_rows = archived.select("number", F.struct(*_IDENTITY).alias("known")).dropDuplicates(["number"])
        shared_ids = contents.records.join(find_shared_numbers(contents.records), "number", "left_semi")
        shared_ids = shared_ids.select("message_id").distinct().withColumn("doubled", F.lit(True))
        rows = (
            contents.records.where(f"NOT {IS_MARKED}")
            .join(archived_rows, "number", "left")
            .withColumn("archived", F.col("known").isNotNull())
            .withColumn("differs", F.col("archived") & (F.col("known") != F.struct(*_IDENTITY)))
            .join(ended_messages, "message_id", "left")
            .join(marked, "message_id", "left")
            .join(shared_ids, "message_id", "left")
            .where("differs OR (doubled IS NULL AND (day IS NOT NULL OR (marked AND archived)))")
        )
        rows, count = persist_now(frames, rows)
        self._check_conflicts(rows)
        return rows, count

    def _check_conflicts(self, rows: DataFrame) -> None:
        conflict = rows.where("differs").select("number", "message_id", "known.message_id").first()
        if conflict is not None:
            raise PipelineError(
                f"record {conflict[0]} is of message {conflict[1]!r} in the store, of {conflict[2]!r} in "
                f"{self.folder.path}: "
                f"it is the archive of another store, or this one was set back to an earlier state; give a new folder"
            )

    def write_records(self, chosen_records: DataFrame) -> tuple[ArchivedDay, ...]:
        """Write the records that are missing in the archive, compare them with the store, and publish them."""
        missing_records = chosen_records.where("NOT archived")
        days = _tallies(missing_records)
        run = self.folder.start_run()
        if days:
            self._write_run(missing_records, run)
            self._verify(days, run)
            self.folder.publish(run)
        return tuple(ArchivedDay(day, records, messages) for day, (records, messages, _) in sorted(days.items()))

    def _write_run(self, missing_records: DataFrame, run: Path) -> None:
        (
            missing_records.select(*COLUMNS, F.lit(self.endpoint).alias("endpoint"), "day")
            .repartition("day")
            .sortWithinPartitions("day", "number")
            .write.partitionBy("day")
            .parquet(str(run))
        )

    def _verify(self, days: dict[str, tuple[int, int, int]], run: Path) -> None:
        written_tallies = _tallies(self.folder.read_records(self.spark, run))
        differing_days = sorted(
            day for day in days.keys() | written_tallies.keys() if days.get(day) != written_tallies.get(day)
        )
        if differing_days:
            raise PipelineError(
                f"what was written to {run} for {differing_days[0]} does not compare with the store "
                f"({written_tallies.get(differing_days[0], (0,))[0]} records of "
                f"{days.get(differing_days[0], (0,))[0]}); nothing was taken out"
            )

    def remove_records(self, frames: ExitStack, chosen_records: DataFrame, count: int) -> tuple[int, int]:
        """Mark the *scheduled* records, then remove all other records. Return both counts.

        Only records that were read back from the archive are removed, and only if the mark of their message was read
        back from the store.
        """
        archived_identities = self.folder.read_published(self.spark).select(*_IDENTITY).distinct()
        removable, number = persist_now(
            frames,
            chosen_records.select(*_IDENTITY, "first", "end").join(archived_identities, list(_IDENTITY), "left_semi"),
        )
        if number != count:
            raise PipelineError(f"{count - number} records are missing in {self.folder.path}; nothing was taken out")
        marked = self._change(removable.where("kind = 'scheduled'"), "mark_archived")
        # Records may have moved since they were read (VACUUM FULL, CLUSTER), so the marking may have missed some.
        marks = records_with_parts(self.spark, self.store, MARKS, self.partitions)
        safe_ids, _ = persist_now(frames, marks.where(IS_MARKED).select("message_id").distinct())
        pruned = self._change(removable.where("kind != 'scheduled'").join(safe_ids, "message_id", "left_semi"), "prune")
        return marked, pruned

    def remove_marked_records(self, frames: ExitStack, before: datetime) -> int:
        """Remove the marked records of all archived messages that ended before ``before``. Return their number."""
        archived = self.folder.read_published(self.spark)
        ended = (
            archived.groupBy("message_id").agg(F.max("at").alias("ended_at")).where(F.col("ended_at") < F.lit(before))
        )
        archived_ends = (
            archived.where("kind = 'scheduled'").join(ended, "message_id", "left_semi").select("number", "message_id")
        )
        marks, _ = persist_now(frames, records_with_parts(self.spark, self.store, MARKS, self.partitions))
        removable = marks.where(IS_MARKED).join(archived_ends, ["number", "message_id"], "left_semi")
        return self._change(removable.join(find_shared_numbers(marks), "number", "left_anti"), "prune")

    def _change(self, records: DataFrame, change: str) -> int:
        """Mark or prune records on the executors, one short transaction for each :class:`ScanPart`.

        Return their number.
        """

        def change_shares(store: OpenStore, batches: Batches) -> Iterator[int]:
            archivable = require_archivable(store)
            change_part = {"mark_archived": archivable.mark_archived, "prune": archivable.prune}[change]
            for part, numbers in _group_by_part(batches):
                yield store.retry(partial(change_part, part, numbers))

        by_part = records.select("first", "end", "number").repartitionByRange(self.partitions, "first")
        return change_store(self.store, by_part.sortWithinPartitions("first"), change_shares)


def _tallies(records: DataFrame) -> dict[str, tuple[int, int, int]]:
    """Return for each day the number of records, the number of messages, and a checksum of all columns."""
    checksum = F.sum(F.xxhash64(*COLUMNS).cast("decimal(38,0)"))
    rows = records.groupBy("day").agg(
        F.count("*").alias("records"), F.count_distinct("message_id").alias("messages"), checksum.alias("checksum")
    )
    return {row["day"]: (row["records"], row["messages"], int(row["checksum"])) for row in rows.collect()}


def _group_by_part(batches: Batches) -> Iterator[tuple[ScanPart, list[int]]]:
    """Yield the numbers of each :class:`ScanPart`, at most ``_NUMBERS_AT_ONCE`` at a time.

    The batches must be ordered by part.
    """
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
