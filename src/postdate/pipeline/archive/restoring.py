"""Restore records of an archive to a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import to_microseconds
from postdate.errors import PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.archive import job as archive_job
from postdate.pipeline.archive.folder import COLUMNS, ArchiveFolder
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.outputs import parse_path
from postdate.pipeline.rows import Batches
from postdate.pipeline.session import check_utc
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec
from postdate.ports import RecordKind
from postdate.ports.scanning import StoredRecord

_RECORDS_AT_ONCE = 5_000
"""Number of records in one transaction. The records of a message are never split."""


@shorten_errors("the restore has failed")
def restore(  # noqa: PLR0913 - what to restore, and how
    spark: SparkSession,
    store: StoreSpec,
    from_: str | Path,
    *,
    ids: Sequence[str] | None = None,
    ended_from: datetime | None = None,
    ended_to: datetime | None = None,
    partitions: int = 4,
) -> archive_job.RestoreResult:
    """Restore the records of messages to the store, under their numbers. The archive is not changed.

    The job is idempotent by message: messages that were restored before, never removed, or scheduled again under the
    same id are left out. The next run of ``archive`` removes restored messages again if they ended before its
    ``before``.

    Services may run meanwhile: before anything is compared, the store is told to number new records after the restored
    ones. A new store in PostgreSQL accepts that only from the owner of its tables.

    Args:
        spark: a session in UTC.
        store: the store that was archived, or a new store that is set up.
        from_: folder of an archive.
        ids: ids of messages; ``None``: all.
        ended_from: only messages whose last archived record is of this instant or later; aware.
        ended_to: only messages whose last archived record is earlier; aware.
        partitions: tasks that work on the store at the same time.

    Raises:
        StoreError: the store failed; run it again.
        PipelineError: the folder is not an archive, another run is working on it, or a number in it belongs to another
            record of the store. No record was changed.
    """
    started = time.perf_counter()
    check_utc(spark)
    bounds = [None if each is None else aware_utc(each, "ended") for each in (ended_from, ended_to)]
    with open_spec(store) as opened_store:
        archive_job.require_archivable(opened_store)
    folder = ArchiveFolder(parse_path(from_, "an archive"))
    folder.check()
    with folder.lock(), ExitStack() as frames:
        selected = _select_archived(folder.read_published(spark), ids, *bounds)
        selected, _ = archive_job.persist_now(frames, selected.dropDuplicates(["number"]))
        _reserve_numbers(store, selected)
        marks, _ = archive_job.persist_now(
            frames, archive_job.records_with_parts(spark, store, archive_job.MARKS, partitions)
        )
        _check_conflicts(selected, marks, folder)
        messages = selected.select("message_id").distinct().count()
        missing, _ = archive_job.persist_now(frames, _select_missing(selected, marks))
        restored = _restore_newest(store, missing) + _restore_records(store, missing, partitions)
    return archive_job.RestoreResult(
        store=store.redacted_address,
        archive=str(folder.path),
        messages=restored,
        left_out=messages - restored,
        took_seconds=time.perf_counter() - started,
    )


def _select_archived(
    archived: DataFrame, ids: Sequence[str] | None, ended_from: datetime | None, ended_to: datetime | None
) -> DataFrame:
    if ids is not None:
        requested = archived.sparkSession.createDataFrame([(each,) for each in ids], "message_id string")
        archived = archived.join(F.broadcast(requested), "message_id", "left_semi")
    if ended_from is None and ended_to is None:
        return archived
    ends = archived.groupBy("message_id").agg(F.max("at").alias("ended_at"))
    if ended_from is not None:
        ends = ends.where(F.col("ended_at") >= F.lit(ended_from))
    if ended_to is not None:
        ends = ends.where(F.col("ended_at") < F.lit(ended_to))
    return archived.join(ends, "message_id", "left_semi")


def _check_conflicts(selected: DataFrame, marks: DataFrame, folder: ArchiveFolder) -> None:
    stored, archived = marks.alias("ours"), selected.alias("theirs")
    differs = (F.col("ours.message_id") != F.col("theirs.message_id")) | (F.col("ours.kind") != F.col("theirs.kind"))
    conflict = (
        stored.join(archived, F.col("ours.number") == F.col("theirs.number"))
        .where(differs)
        .select("ours.number", "ours.message_id", "theirs.message_id")
        .first()
    )
    if conflict is not None:
        raise PipelineError(
            f"record {conflict[0]} is of message {conflict[1]!r} in the store, and of {conflict[2]!r} in "
            f"{folder.path}: "
            f"it is the archive of another store; restore it into a new one"
        )


def _select_missing(selected: DataFrame, marks: DataFrame) -> DataFrame:
    """Return the records to restore: *scheduled* records, by which the store decides, and other missing ones."""
    scheduled = marks.where(f"kind = 'scheduled' AND NOT {archive_job.IS_MARKED}").select("message_id")
    later_records = marks.where("kind != 'scheduled'").select("number")
    return selected.join(scheduled, "message_id", "left_anti").join(later_records, "number", "left_anti")


def _reserve_numbers(store: StoreSpec, selected: DataFrame) -> None:
    """Make a store that numbers records itself skip the restored numbers. No record is restored."""
    newest = selected.select("number", "message_id").orderBy(F.desc("number")).first()
    if newest is not None:
        # The store decides by scheduled records. This record is not one, so the store does not restore it.
        placeholder = StoredRecord(
            newest[0], RecordKind.DELIVERED, newest[1], at=0, due=None, destination=None, detail=None
        )
        with open_spec(store) as opened_store:
            archive_job.require_archivable(opened_store).restore([placeholder])


def _restore_newest(store: StoreSpec, missing: DataFrame) -> int:
    """Restore the message with the highest number before all others. Return the number of restored messages.

    If a store numbers new records after its last one, new numbers then follow all restored numbers.
    """
    newest = missing.select("message_id").orderBy(F.desc("number")).first()
    return 0 if newest is None else _restore_records(store, missing.where(F.col("message_id") == newest[0]), 1)


def _restore_records(store: StoreSpec, records: DataFrame, partitions: int) -> int:
    by_message = records.select(*COLUMNS).repartition(partitions, "message_id")
    return archive_job.change_store(store, by_message.sortWithinPartitions("message_id", "number"), _restore_batches)


# --- on the executors -------------------------------------------------------------------------------------------------


def _restore_batches(store: OpenStore, batches: Batches) -> Iterator[int]:
    """Restore records in transactions that never split a message. The records must be ordered by message."""
    archivable = archive_job.require_archivable(store)
    records = list[StoredRecord]()
    for batch in batches:
        for row in batch.to_pylist():
            if len(records) >= _RECORDS_AT_ONCE and records[-1].message_id != row["message_id"]:
                yield store.retry(partial(archivable.restore, records))
                records = []
            records.append(_stored_record(row))
    if records:
        yield store.retry(partial(archivable.restore, records))


def _stored_record(row: Mapping[str, Any]) -> StoredRecord:
    return StoredRecord(
        number=row["number"],
        kind=int(RecordKind[row["kind"].upper()]),
        message_id=row["message_id"],
        at=to_microseconds(row["at"]),
        due=None if row["due"] is None else to_microseconds(row["due"]),
        destination=row["destination"],
        detail=row["detail"],
    )
