"""Follow the records of a store into a lake, once or continuously. Source: ADR 63.

The order of steps makes it exact, wherever the driver, an executor or the store is killed:

1. Before a micro-batch, Spark writes its range of numbers to the checkpoint. A repeated micro-batch has the same range.
2. The micro-batch replaces its folder in the lake.
3. Spark commits the micro-batch in the checkpoint.
4. The position in the store is set to the end of the range. Until then, retention removes no record of the range: what
   a repeated micro-batch reads again is still there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from postdate.clock import SystemClock
from postdate.errors import NotSupported, PipelineError
from postdate.pipeline.failures import check_query, shorten_errors, wait_for_query
from postdate.pipeline.history.lake import COLUMNS, Committed, Lake
from postdate.pipeline.plain import to_plain
from postdate.pipeline.rows import arrow_schema, spark_schema
from postdate.pipeline.session import check_utc
from postdate.pipeline.source.options import DEFAULT_PARTITIONS
from postdate.pipeline.source.streaming import FollowPlan, RecordStreamReader, find_restore, open_stream
from postdate.pipeline.stores import OpenStore, StoreSpec, open_in_task, open_spec
from postdate.ports import StreamableStore, StreamPosition

ROWS_PER_BATCH: Final = 1_000_000
"""The most records in one micro-batch."""

TRIGGER: Final = timedelta(minutes=1)
"""How often a continuous stream begins a micro-batch. Each one with new records makes a folder in the lake."""

_REPORT_SECONDS: Final = 600.0
"""How often a continuous stream reports its position, even if there is nothing new: it is not forgotten."""

log = logging.getLogger("postdate.pipeline")


@dataclass(frozen=True, slots=True)
class HistoryResult:
    """Result of one run.

    Args:
        store: address, without password.
        lake: the folder.
        position: name of the position in the store.
        records: number of records that this run has added to the lake.
        next: number of the first record that is not in the lake.
    """

    store: str
    lake: str
    position: str
    records: int
    next: int
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)


@shorten_errors("the history has failed")
def write_history(  # noqa: PLR0913 - what to follow, where to, and how
    spark: SparkSession,
    store: StoreSpec,
    lake: str | Path,
    *,
    checkpoint: str | Path | None = None,
    continuous: bool = False,
    trigger: timedelta = TRIGGER,
    rows_per_batch: int = ROWS_PER_BATCH,
    partitions: int = DEFAULT_PARTITIONS,
    stop: threading.Event | None = None,
) -> HistoryResult:
    """Copy the records of a store to a lake, each exactly once, and return when that is done or stopped.

    The first run registers a position in the store. From then on retention removes no record that is not in the lake,
    until the position is removed: see :class:`postdate.ports.StreamableStore`. Records of removals (*pruned*) are left
    out: they are the store's own count, and belong to no message.

    Args:
        spark: a session in UTC.
        store: a store in PostgreSQL or SQLite.
        lake: a new folder, or the lake of earlier runs; a path on the driver's machine, which executors share, or as
            text a URI such as ``s3a://bucket/history``.
        checkpoint: the folder of the stream, always the same for a lake; by default it is in the lake.
        continuous: go on until ``stop`` is set. Otherwise the run ends with the last record that existed when it began.
        trigger: how often a continuous stream begins a micro-batch.
        rows_per_batch: the most records in one micro-batch.
        partitions: tasks that read the store at the same time.
        stop: ends the run after the present micro-batch was committed or given up; ``None``: only its own end does.

    Raises:
        NotSupported: the records of the store cannot be followed.
        StoreError: the store is missing or failed. The next run continues.
        PipelineError: the folder has other content or is of another store or checkpoint, and no record was changed; or
            the stream failed, and the next run continues.
    """
    started = time.perf_counter()
    check_utc(spark)
    place, stop = Lake.at(lake, checkpoint), stop or threading.Event()
    with closing(open_stream(store)) as stream:
        identity, location = stream.identity, stream.location
    with place.lock(spark):
        mark = place.bind(spark, identity, location)
        run = _Run(spark, store, place, place.position_name(mark))
        first = run.committed
        # Before the position is reported: retention would remove records of the restored store that no lake has.
        with closing(open_stream(store)) as stream:
            restore = find_restore(stream, run.next, None if first is None else first.last)
        if restore:
            raise PipelineError(
                f"{place.location} has the records of {location} up to number {run.next - 1}, and {restore}: the "
                f"store was made anew, restored, or its records were removed; name a new folder"
            )
        positions = {each.name: each.number for each in read_positions(store)}
        if first is not None and positions.get(run.name, math.inf) > run.next:
            log.warning(
                "the position %s of %s was removed, or the lake was put back from a backup: records that retention "
                "has removed since are missing in the lake",
                run.name,
                location,
            )
        run.report()
        records = _read_stream(spark, store, identity, rows_per_batch, partitions)
        query = _start(records, place, store.endpoint, trigger if continuous else None)
        try:
            while query.isActive and not stop.is_set():
                wait_for_query(query, _REPORT_SECONDS, lambda: stop.is_set() or run.has_new_batch(query))
                run.advance()
        finally:
            query.stop()
        run.advance()
        check_query(query, "the history")
    return HistoryResult(
        store=store.redacted_address,
        lake=place.location,
        position=run.name,
        records=_count_records(place.read_records(spark), first, run.committed),
        next=run.next,
        took_seconds=time.perf_counter() - started,
    )


def read_positions(store: StoreSpec) -> tuple[StreamPosition, ...]:
    """Return the positions of all lakes of a store. Raise NotSupported if its records cannot be followed."""
    with open_spec(store) as opened:
        return tuple(_streamable(opened).stream_positions())


def forget_position(store: StoreSpec, name: str) -> None:
    """Remove a position: retention no longer waits for that lake. Raise PipelineError if there is none of that name."""
    with open_spec(store) as opened:
        if _streamable(opened).remove_stream_position(name):
            return
        names = ", ".join(each.name for each in _streamable(opened).stream_positions()) or "none"
    raise PipelineError(f"{store.redacted_address} has no position {name!r}; it has {names}")


def _streamable(opened: OpenStore) -> StreamableStore:
    if not isinstance(opened.store, StreamableStore):
        raise NotSupported(f"the records of {type(opened.store).__name__} cannot be followed")
    return opened.store


class _Run:
    """One run of a stream, and what it has reported to the store."""

    def __init__(self, spark: SparkSession, store: StoreSpec, lake: Lake, name: str) -> None:
        self.name = name
        self.committed = lake.read_committed(spark)
        self._spark, self._store, self._lake = spark, store, lake
        self._seen_batch = -1
        """Number of the last micro-batch whose end Spark has announced."""

    @property
    def next(self) -> int:
        return 0 if self.committed is None else self.committed.next

    def has_new_batch(self, query: StreamingQuery) -> bool:
        """Return whether a micro-batch has ended since the last call."""
        last = query.lastProgress
        batch = -1 if last is None else int(last["batchId"])
        is_new, self._seen_batch = batch > self._seen_batch, max(batch, self._seen_batch)
        return is_new

    def advance(self) -> None:
        """Read what Spark has committed by now, and report it."""
        self.committed = self._lake.read_committed(self._spark)
        self.report()

    def report(self) -> None:
        """Set the position in the store. An outage of the store is waited for."""
        with open_in_task(self._store) as opened:
            streamable = _streamable(opened)
            opened.retry(lambda: streamable.set_stream_position(self.name, self.next, SystemClock().now()))


def _read_stream(
    spark: SparkSession, store: StoreSpec, identity: str, rows_per_batch: int, partitions: int
) -> DataFrame:
    """Return the records as a stream.

    The format ``postdate`` would take the store from its options, which must not hold a password. Here it travels
    inside the class, as it does in the tasks of other jobs.
    """
    schema = arrow_schema("records")
    plan = FollowPlan(store, schema, partitions, starts_at_end=False, rows_per_batch=rows_per_batch)

    class HistorySource(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"postdate-history-{identity}"

        def schema(self) -> str:
            return spark_schema(schema)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - the name that Spark calls
            return RecordStreamReader(plan)

    spark.dataSource.register(HistorySource)
    return spark.readStream.format(HistorySource.name()).load()


def _start(records: DataFrame, lake: Lake, endpoint: str, trigger: timedelta | None) -> StreamingQuery:
    rows = records.where("kind <> 'pruned'").select(
        *COLUMNS, F.lit(endpoint).alias("endpoint"), F.date_format("at", "yyyy-MM-dd").alias("day")
    )
    writer = rows.writeStream.option("checkpointLocation", lake.checkpoint)
    if trigger is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{trigger // timedelta(milliseconds=1)} milliseconds")
    return writer.foreachBatch(partial(_write_batch, lake.url)).start()


def _write_batch(url: str, rows: DataFrame, batch: int) -> None:
    """Replace the folder of a micro-batch."""
    # In dynamic mode, which a session may have set, days that a killed attempt has written would stay.
    writer = rows.write.mode("overwrite").option("partitionOverwriteMode", "static")
    writer.partitionBy("day").parquet(f"{url}/batch={batch}")


def _count_records(records: DataFrame, first: Committed | None, last: Committed | None) -> int:
    """Return the number of records in the micro-batches that were committed after ``first``, up to ``last``."""
    if last is None:
        return 0
    after = -1 if first is None else first.batch
    return records.where((F.col("batch") > after) & (F.col("batch") <= last.batch)).count()
