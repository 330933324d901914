"""Which records are archived: those of messages that ended long enough ago."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.errors import PipelineError
from postdate.pipeline.archive.folder import COLUMNS
from postdate.pipeline.audit.reading import is_sent_again, kept
from postdate.pipeline.columns import arrow_schema, spark_schema, to_batch
from postdate.pipeline.frames import PAGE_ROWS, held_snapshot, part_frame, scan_frame, scan_parts
from postdate.pipeline.stores import OpenStore, StoreSpec, opened
from postdate.ports import Scan, ScanPart
from postdate.ports.scanning import ARCHIVED, ArchivableStore

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


@contextmanager
def read_contents(spark: SparkSession, store: StoreSpec, partitions: int) -> Generator[StoreContents]:
    """Read pending messages, then queues, then all records; keep them for the length of the block.

    In this order, a message that moves on meanwhile is seen at least once, even where the store has no snapshots: a
    message without a record of its end is seen waiting or in a queue, or else is not taken for ended.
    """
    with ExitStack() as stack:
        with held_snapshot(store) as snapshot:
            waiting = [
                keep(
                    stack,
                    scan_frame(
                        spark, store, what, ("message_id",), scan_parts(store, what, partitions), snapshot=snapshot
                    ),
                )[0]
                for what in ("pending", "queued")
            ]
            records, _ = keep(stack, placed_records(spark, store, COLUMNS, partitions, snapshot))
        yield StoreContents(records, waiting[0].union(waiting[1]).distinct())


def keep(stack: ExitStack, frame: DataFrame) -> tuple[DataFrame, int]:
    """Compute a frame now, as it may differ later; keep it until the stack is unwound; return it and its row count."""
    frame = kept(stack, frame)
    return frame, frame.count()


def placed_records(
    spark: SparkSession, store: StoreSpec, columns: Sequence[str], partitions: int, snapshot: str | None = None
) -> DataFrame:
    """Return records with ``first`` and ``end`` of their :class:`ScanPart`, each small enough to be pruned at once."""
    schema = arrow_schema("records", columns)
    scan = Scan("records", tuple(schema.names), snapshot=snapshot)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with opened(store) as found:
            pruned = prunable(found)
            for batch in batches:
                for share in batch.to_pylist():
                    for part in _narrow(ScanPart(**share), pruned.pruned_at_once):
                        for page in pruned.scan(scan, part, PAGE_ROWS):
                            yield _with_place(to_batch(page, schema), part)

    one_a_task = part_frame(spark, scan_parts(store, "records", partitions))
    return one_a_task.mapInArrow(read, f"{spark_schema(schema)}, first long, end long")


def _narrow(part: ScanPart, width: int) -> Iterator[ScanPart]:
    for first in range(part.first, part.end, width):
        yield ScanPart(first, min(first + width, part.end))


def _with_place(batch: pa.RecordBatch, part: ScanPart) -> pa.RecordBatch:
    place = [pa.array([bound] * batch.num_rows, pa.int64()) for bound in (part.first, part.end)]
    names = [*batch.schema.names, "first", "end"]
    return pa.RecordBatch.from_arrays([*batch.columns, *place], names=names)


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
    went_nowhere = (F.col("kind") == "retried") & ~is_sent_again()
    turn = F.when(F.col("kind").isin(*_TURNS) & ~went_nowhere, F.col("kind"))
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


def is_marked() -> str:
    """Return the SQL condition for a *scheduled* record whose message is in the archive."""
    return f"(kind = 'scheduled' AND coalesce(detail, '') = '{ARCHIVED}')"


def total(frame: DataFrame, column: str) -> int:
    """Return the sum of a column of whole numbers; 0 without rows."""
    return int(frame.agg(F.coalesce(F.sum(column), F.lit(0))).collect()[0][0])
