"""Read all events as one consistent picture, from stores in use and from Parquet.

**One picture of a live store.** Messages move while the audit reads. The method depends on the store:

- It has snapshots (PostgreSQL): everything is read from one snapshot.
- Its records are numbered in the order of commits (SQLite): (1) the number of the last record is noted, and messages
  scheduled or ended up to it are audited; (2) pending messages are read, then queues; (3) all records are read,
  including newer ones.
- Neither (MariaDB, SQL Server): the same, but step 1 reads all records instead of noting a number: a number that was
  drawn early may be committed late.

A message that had not ended by step 3 was pending during the whole of step 2, so step 2 saw it. A message that was
delivered before step 1 and not handled by step 3 was in its queue during the whole of step 2. So a message that is
found nowhere is lost, however busy the store is; and nothing is stopped or locked.

Everything becomes rows of one kind, *events*: pending and queued messages join the records as if they were records.
Each event is read only once: see :func:`checkpoint_frame`. Parquet is listed before any store is read, so its events
are older.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import StructType

from postdate.errors import NotSupported, PipelineError
from postdate.messages import OWN_PREFIX
from postdate.pipeline.audit import stores
from postdate.pipeline.audit.stores import AuditedStore
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.frames import STORAGE, open_snapshot, part_frame, scan_frame, scan_parts
from postdate.pipeline.history.lake import read_history, read_mark
from postdate.pipeline.outputs import url_of
from postdate.pipeline.rows import LEDGER_ARROW, Batches, spark_schema, spark_types, to_batch
from postdate.pipeline.source.streaming import open_stream, split_range, wait_for_safe_end
from postdate.pipeline.stores import PAGE_ROWS, StoreSpec, open_spec
from postdate.ports import ScanFilter, ScanPart
from postdate.ports.migrating import RETURNED_BY_MIGRATION
from postdate.ports.scanning import (
    ARCHIVED,
    PrunableStore,
    RecordStreamStore,
)

_NEVER_DELAYED = "(never delayed)"
"""If several stores are audited together: the endpoint of messages that belong to none of them."""

_RECEIVERS_KINDS = ("handled", "discarded", "failed", "returned", "retried", "sent_again", "queued")
"""Kinds that are recorded beside the queue, which may be in another database than the store."""


@dataclass(frozen=True, slots=True)
class AuditEvents:
    """All events.

    Args:
        events: one row an event: endpoint, kind, message_id, at, due, destination; ``archived`` (of a *scheduled*
            record: it is marked), ``times`` (how often it happened), ``before`` (how often it had happened when the
            audit began) and ``native`` (it was recorded in the store of its endpoint, or in Parquet).
        endpoints: in the order given.
    """

    events: DataFrame
    endpoints: tuple[AuditedStore, ...]


@contextmanager
def read_audit_events(
    spark: SparkSession, endpoints: Sequence[AuditedStore], records: Sequence[RecordsFolder], partitions: int
) -> Generator[AuditEvents]:
    """Read everything; the Parquet files were opened before.

    The events must be used inside the block, and only once.
    """
    with ExitStack() as stack:
        frames, stores = list[DataFrame](), list[AuditedStore]()
        has_lake = any(each.identity is not None for each in records)
        identities = [_identity_of(endpoint.store) if has_lake else None for endpoint in endpoints]
        for endpoint, identity in zip(endpoints, identities, strict=True):
            snapshot = stack.enter_context(open_snapshot(endpoint.store))
            is_numbered = identity is not None
            store_frames = _StoreReading(spark, endpoint, snapshot, partitions, is_numbered).read_frames()
            frames += [frame.withColumn("source", F.lit(len(stores))) for frame in store_frames]
            stores.append(replace(endpoint, has_snapshot=snapshot is not None))
        for number, folder in enumerate(records, len(stores)):
            if folder.identity is not None and folder.identity in identities:
                # Store and lake are one source: a record that both have is one record.
                source = identities.index(folder.identity)
                frame = _events(folder.frame, F.lit(stores[source].name), before=1, times=1)
            else:
                source, frame = number, _events_of_parquet(folder.frame.drop("number"), stores)
            frames.append(frame.withColumn("source", F.lit(source)))
        events = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)
        if len(stores) + len(records) > 1:
            events = events.repartition("message_id")
            if "number" in events.columns:
                events = _merge_by_number(events)
            events = _merge_copies(_assign_endpoints(events, stores))
        yield AuditEvents(events.drop("source", "number"), tuple(stores))


def _identity_of(store: StoreSpec) -> str | None:
    """Return the identity of a store by which a lake names it; ``None`` if its records cannot be followed."""
    try:
        with closing(open_stream(store)) as stream:
            return stream.identity
    except NotSupported:
        return None


# --- a store ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StoreReading:
    """How a store is read. ``is_numbered``: events of records have their numbers."""

    spark: SparkSession
    endpoint: AuditedStore
    snapshot: str | None
    partitions: int
    is_numbered: bool = False

    def read_frames(self) -> list[DataFrame]:
        """Return the frames of the store. Frames that must not be read later have already been read."""
        if self.snapshot is not None:
            return [self._records(self._parts("records"), before=1, times=1), *self._plan_waiting()]
        with open_spec(self.endpoint.store) as store:
            scannable = store.require_scannable()
            is_in_order = isinstance(scannable, PrunableStore) and scannable.records_in_commit_order
        return self._read_by_number() if is_in_order else self._read_twice()

    def _read_by_number(self) -> list[DataFrame]:
        seen_parts = self._parts("records")
        seen_end = seen_parts[-1].end if seen_parts else 0
        waiting = self.read_waiting()
        new_parts = [part for part in self._parts("records") if part.end > seen_end]
        new_parts = [ScanPart(max(part.first, seen_end), part.end) for part in new_parts]
        return [self._records(seen_parts, before=1, times=1), self._records(new_parts, before=0, times=1), *waiting]

    def _read_twice(self) -> list[DataFrame]:
        """Read records before and after. The first reading only shows which records existed when the audit began."""
        first = checkpoint_frame(self._records(self._parts("records"), before=1, times=0))
        return [first, *self.read_waiting(), self._records(self._parts("records"), before=0, times=1)]

    def read_waiting(self) -> list[DataFrame]:
        return [checkpoint_frame(each) for each in self._plan_waiting()]

    def _parts(self, table: str) -> list[ScanPart]:
        return scan_parts(self.endpoint.store, table, self.partitions)

    def _scan(self, table: str, columns: Sequence[str], parts: Sequence[ScanPart]) -> DataFrame:
        return scan_frame(self.spark, self.endpoint.store, table, columns, parts, snapshot=self.snapshot)

    def _records(self, parts: Sequence[ScanPart], *, before: int, times: int) -> DataFrame:
        columns = ["number", *LEDGER_ARROW.names] if self.is_numbered else LEDGER_ARROW.names
        records = self._scan("records", columns, parts)
        return _events(records, F.lit(self.endpoint.name), before=before, times=times)

    def _plan_waiting(self) -> Iterator[DataFrame]:
        """Yield pending messages, then queues. Each frame is planned when it is asked for."""
        for table, destination in (("pending", "destination"), ("queued", "queue")):
            frame = self._scan(table, ("message_id", "due", destination), self._parts(table))
            # Queues also have messages sent without a delay, which have no due time and are not audited.
            frame = frame.where(F.col("due").isNotNull()).select(
                F.lit(table).alias("kind"),
                "message_id",
                F.lit(None).cast("timestamp").alias("at"),
                "due",
                F.col(destination).alias("destination"),
                F.lit(None).cast("string").alias("detail"),
            )
            yield _events(frame, F.lit(self.endpoint.name), before=1, times=1)


def checkpoint_frame(frame: DataFrame) -> DataFrame:
    """Read a frame now, and only once. If an executor loses it, that is an error: a later read would see another state.

    The caller need not release it: Spark removes the frame when it is no longer used.
    """
    return frame.localCheckpoint(eager=True, storageLevel=STORAGE)


def is_sent_again() -> Column:
    """Return the condition for a failed handling whose message was sent again under another id, after a delay.

    Other records of this kind say that the dispatcher could not send the message, which stays pending.
    """
    return (F.col("kind") == "retried") & F.coalesce(F.col("detail").startswith(stores.SENT_AGAIN), F.lit(False))


def _events(records: DataFrame, endpoint: Column, *, before: int, times: int) -> DataFrame:
    """Return the events of records, without those of messages that a store keeps for itself."""
    has_return_detail = (F.col("detail") == stores.CAME_BACK) | F.col("detail").startswith(RETURNED_BY_MIGRATION)
    is_back = (F.col("kind") == "rescheduled") & has_return_detail
    number = ["number"] if "number" in records.columns else []
    return records.where(~F.col("message_id").startswith(OWN_PREFIX)).select(
        *number,
        endpoint.alias("endpoint"),
        F.when(is_back, F.lit("came_back"))
        .when(is_sent_again(), F.lit("sent_again"))
        .otherwise(F.col("kind"))
        .alias("kind"),
        "message_id",
        "at",
        "due",
        "destination",
        ((F.col("kind") == "scheduled") & (F.coalesce("detail", F.lit("")) == ARCHIVED)).alias("archived"),
        F.lit(before).alias("before"),
        F.lit(times).alias("times"),
        F.lit(True).alias("native"),
    )


# --- a store since a position; source: ADR 0062 -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventsSince:
    """The events of one store since a position.

    Args:
        final: events of the records from the position to ``end``. No later reading adds any to them.
        present: pending and queued messages, and events of the records from ``end`` on: true now, and read again by
            the next audit.
        end: the next position.
    """

    final: DataFrame
    present: DataFrame
    end: int


def read_events_since(
    stack: ExitStack, spark: SparkSession, endpoint: AuditedStore, stream: RecordStreamStore, position: int, tasks: int
) -> EventsSince:
    """Read a store since a position in the order of a store without snapshots: position, waiting messages, records.

    The events may be used until ``stack`` is closed.
    """
    end = max(wait_for_safe_end(stream), position)
    name = F.lit(endpoint.name)
    if (end - position) * _SCANNED_SHARE > end:
        final = _scan_records(stack, spark, endpoint.store, position, end, tasks)
    else:
        final = _stream_records(spark, endpoint.store, split_range(position, end, tasks))
    # In one snapshot: an update moves a row of PostgreSQL to another page, which may be in a part that was read before.
    with open_snapshot(endpoint.store) as snapshot:
        waiting = _StoreReading(spark, endpoint, snapshot, tasks).read_waiting()
    newest = _stream_records(spark, endpoint.store, split_range(end, stream.next_number(), tasks))
    present = [*waiting, checkpoint_frame(_events(newest, name, before=0, times=1))]
    return EventsSince(
        _events(final, name, before=1, times=1), reduce(lambda one, other: one.unionByName(other), present), end
    )


_SCANNED_SHARE = 4
"""If more than one in so many records is new, the whole table is read, which is faster than reading by number."""


def _scan_records(
    stack: ExitStack, spark: SparkSession, store: StoreSpec, first: int, end: int, tasks: int
) -> DataFrame:
    snapshot = stack.enter_context(open_snapshot(store))
    parts = scan_parts(store, "records", tasks)
    records = scan_frame(spark, store, "records", ("number", *LEDGER_ARROW.names), parts, snapshot=snapshot)
    return records.where((F.col("number") >= first) & (F.col("number") < end)).drop("number")


def _stream_records(spark: SparkSession, store: StoreSpec, ranges: Sequence[tuple[int, int]]) -> DataFrame:
    """Return the records of ranges of numbers, one task a range."""
    schema = LEDGER_ARROW

    def read_all(batches: Batches) -> Batches:
        for batch in batches:
            for share in batch.to_pylist():
                with closing(open_stream(store)) as stream:
                    for page in stream.read_records(share["first"], share["end"], schema.names, PAGE_ROWS):
                        yield to_batch(page, schema)

    parts = [ScanPart(first, end) for first, end in ranges]
    return part_frame(spark, parts).mapInArrow(read_all, spark_schema(schema))


# --- several sources --------------------------------------------------------------------------------------------------


def _events_of_parquet(records: DataFrame, endpoints: Sequence[AuditedStore]) -> DataFrame:
    """Return events. The endpoint is null if Parquet does not name one, or names one that is not audited."""
    name = F.col("endpoint") if "endpoint" in records.columns else F.lit(None).cast("string")
    match endpoints:
        case []:
            endpoint = F.coalesce(name, F.lit("records"))
        case [only]:
            endpoint = F.lit(only.name)
        case _:
            endpoint = F.when(name.isin(*(each.name for each in endpoints)), name)
    return _events(records, endpoint, before=1, times=1)


def _assign_endpoints(events: DataFrame, endpoints: Sequence[AuditedStore]) -> DataFrame:
    """Assign each event to the endpoint whose store knows the message.

    A queue may be in another database than the message's store. Its records are then in a store without the message.
    """
    if len(endpoints) <= 1:
        return events
    elsewhere = Window.partitionBy("message_id")
    here = Window.partitionBy("message_id", "endpoint")
    home_endpoint = F.min(F.when(F.col("kind").isin("scheduled", "pending"), F.col("endpoint"))).over(elsewhere)
    is_stored_here = F.max((~F.col("kind").isin(*_RECEIVERS_KINDS)).cast("int")).over(here) == 1
    is_kept = F.col("endpoint").isNotNull() & is_stored_here
    # A discarded message that was never delayed is recorded for every store of the database, and belongs to none.
    of_no_store = (F.col("kind") == "discarded") & F.col("due").isNull()
    return (
        events.withColumn(
            "home",
            F.coalesce(home_endpoint, F.when(of_no_store, F.lit(_NEVER_DELAYED)), "endpoint", F.lit("(unknown)")),
        )
        .withColumn("stays", is_kept)
        .withColumn("native", F.coalesce(F.col("stays") | (F.col("home") == F.col("endpoint")), F.lit(True)))
        .withColumn("endpoint", F.when(F.col("stays"), F.col("endpoint")).otherwise(F.col("home")))
        .drop("home", "stays")
    )


def _merge_by_number(events: DataFrame) -> DataFrame:
    """Count a record that store and lake have once. Rows without a number, such as those of queues, are added up."""

    def count(name: str) -> Column:
        return F.when(F.col("number").isNull(), F.sum(name)).otherwise(F.max(name)).alias(name)

    return events.groupBy("source", "endpoint", "message_id", "kind", "at", "number").agg(
        *(F.max(name).alias(name) for name in ("due", "destination", "native")),
        *(count(name) for name in ("times", "before")),
        F.min(F.when(F.col("times") > 0, F.col("archived"))).alias("archived"),
    )


def _merge_copies(events: DataFrame) -> DataFrame:
    """Count events that several sources have once, as copies. An event that one source has twice happened twice."""
    identity = ("endpoint", "message_id", "kind", "at")
    source_counts = events.groupBy(*identity, "source").agg(
        *(F.max(name).alias(name) for name in ("due", "destination", "native")),
        *(F.sum(name).alias(name) for name in ("times", "before")),
        F.min(F.when(F.col("times") > 0, F.col("archived"))).alias("archived"),
    )
    return source_counts.groupBy(*identity).agg(
        *(F.max(name).alias(name) for name in ("due", "destination", "times", "before", "native")),
        *(F.min(name).alias(name) for name in ("archived", "source")),
    )


# --- Parquet instead of a store: lakes, archives of earlier versions, and ledgers of sweeps ---------------------------


ARCHIVE_MARK = "_archive.json"
"""File that marks a folder as an archive of an earlier version, even if it is empty."""


@dataclass(frozen=True, slots=True)
class RecordsFolder:
    """The records in a folder.

    Args:
        frame: kind, message_id, at, due, destination, detail, and any other columns.
        identity: of the store whose lake the folder is; ``None``: it is no lake.
    """

    frame: DataFrame
    identity: str | None = None


def open_records(spark: SparkSession, path: str | Path) -> RecordsFolder:
    """Return the records in a folder. The list of files is fixed now.

    Raises PipelineError if the folder has nothing, no Parquet, or other columns.
    """
    with shorten_errors(f"the records at {path} cannot be read as Parquet"):
        mark = read_mark(spark, url_of(path))
    if mark is not None:
        return RecordsFolder(read_history(spark, path), mark.identity)
    return RecordsFolder(_open_parquet(spark, path))


def _open_parquet(spark: SparkSession, path: str | Path) -> DataFrame:
    path_text = str(path)
    if "://" not in path_text:
        folder = Path(path_text)
        if not folder.exists():
            raise PipelineError(f"there are no records at {path_text}: no such folder")
        if (folder / ARCHIVE_MARK).exists() and not any(folder.glob("day=*/*.parquet")):
            return spark.createDataFrame([], spark_schema(LEDGER_ARROW))
        if folder.is_dir() and not any(folder.rglob("*")):
            raise PipelineError(f"there are no records at {path_text}: the folder is empty")
    with shorten_errors(f"the records at {path_text} cannot be read as Parquet"):
        records = spark.read.parquet(path_text)
    _check_columns(path_text, records.schema)
    return records


def _check_columns(path_text: str, schema: StructType) -> None:
    types = spark_types(LEDGER_ARROW)
    missing = [name for name in types if name not in schema.fieldNames()]
    if missing:
        raise PipelineError(
            f"the files at {path_text} are not records: there is no column {missing[0]!r} among "
            f"{', '.join(schema.fieldNames()) or 'none'}; a lake, an archive or a ledger has {', '.join(types)}"
        )
    for name, expected in types.items():
        actual = schema[name].dataType.simpleString()
        if actual != expected:
            raise PipelineError(f"the files at {path_text} are not records: {name!r} is {actual} and not {expected}")


def path_texts(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the paths as texts. Raise PipelineError for a path that is named twice, which must be a mistake."""
    texts = tuple(str(path) for path in paths)
    repeated = [text for number, text in enumerate(texts) if text in texts[:number]]
    if repeated:
        raise PipelineError(f"the records at {repeated[0]} are named twice; name each folder once")
    return texts


# --- a second reading of messages that seem lost or orphaned in a store read without a snapshot -----------------------


def exclude_pruned(
    spark: SparkSession, verdicts: DataFrame, endpoints: Sequence[AuditedStore], partitions: int
) -> DataFrame | None:
    """Return ``verdicts`` without messages whose records were removed during the audit; ``None`` if there are none.

    A lost message without its *scheduled* record has none any more, nor has an orphaned one without other records. A
    *scheduled* record that an earlier version has marked says that the others are in an archive.
    """
    without_snapshot = [endpoint for endpoint in endpoints if not endpoint.has_snapshot]
    suspects = verdicts.where(
        (F.col("lost") | F.col("orphaned")) & F.col("endpoint").isin(*(e.name for e in without_snapshot))
    )
    if not without_snapshot or suspects.isEmpty():
        return None
    pruned_frames = [
        _find_pruned(spark, suspects.where(F.col("endpoint") == e.name), e, partitions) for e in without_snapshot
    ]
    pruned = reduce(lambda one, other: one.unionByName(other), pruned_frames)
    # Spark chooses the kind of join by the size of the ids, of which there may be as many as messages.
    return None if pruned.isEmpty() else verdicts.join(pruned, ["endpoint", "message_id"], "left_anti")


def _find_pruned(spark: SparkSession, suspects: DataFrame, endpoint: AuditedStore, partitions: int) -> DataFrame:
    ids = [row[0] for row in suspects.select("message_id").take(stores.ASKED_FOR_BY_ID + 1)]
    scan_filter = ScanFilter(message_ids=tuple(ids)) if len(ids) <= stores.ASKED_FOR_BY_ID else ScanFilter()
    parts = scan_parts(endpoint.store, "records", partitions)
    columns = ("message_id", "kind", "detail")
    scheduled = F.col("kind") == "scheduled"
    record_counts = (
        scan_frame(spark, endpoint.store, "records", columns, parts, scan_filter=scan_filter)
        .groupBy("message_id")
        .agg(
            F.count_if(scheduled & (F.coalesce("detail", F.lit("")) != ARCHIVED)).alias("unmarked"),
            F.count_if(~scheduled).alias("others"),
        )
    )
    suspects_with_counts = suspects.select("endpoint", "message_id", "lost", "orphaned").join(
        record_counts, "message_id", "left"
    )
    is_pruned = (F.col("lost") & (F.coalesce("unmarked", F.lit(0)) == 0)) | (
        F.col("orphaned") & (F.coalesce("others", F.lit(0)) == 0)
    )
    return suspects_with_counts.where(is_pruned).select("endpoint", "message_id")
