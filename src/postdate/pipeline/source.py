"""The Spark data source ``postdate``: a store read in parallel, and messages written to one.

::

    spark.read.format("postdate").option("store", "sqlite:///messages.db").load()
    messages.write.format("postdate").option("store", "sqlite:///messages.db").mode("append").save()

Options: ``store`` (an address, required); ``synchronous`` (of the store); for reading ``what`` (``pending``, the
default, ``records`` or ``queued``), ``columns`` (names with commas between; all by default), ``partitions`` (how many
tasks at most;
4 by default), ``from`` and ``to`` (numbers of rows, from :meth:`postdate.ports.ScannableStore.scan_parts`, that bound
what is read); for writing ``batch`` (messages in one transaction; 5,000 by default).

Methods here run on the driver, in a Python process of Spark's own, unless they say that they run on executors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from postdate.clock import SystemClock
from postdate.errors import PipelineError
from postdate.pipeline.columns import arrow_schema, spark_schema
from postdate.pipeline.frames import read_part, scan_parts
from postdate.pipeline.rows import to_messages
from postdate.pipeline.stores import StoreSpec, opened
from postdate.ports import ScanPart

FORMAT = "postdate"
BATCH_MESSAGES = 5_000
"""Messages stored in one transaction."""

DEFAULT_PARTITIONS = 4
_COLUMNS_WRITTEN = frozenset({"message_id", "destination", "due"})


def register(spark: SparkSession) -> None:
    """Make ``postdate`` a known format in a session; :func:`postdate.pipeline.session.spark_session` does it."""
    spark.dataSource.register(PostdateDataSource)


class PostdateDataSource(DataSource):
    """Entry point of the format; Spark makes one for each ``load`` and ``save``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of what is read."""
        return spark_schema(_ReadOptions.of(self.options).schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; a schema given to ``load`` must be that of the source."""
        return StoreReader(_ReadOptions.of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer.

        Raises:
            PipelineError: the mode is ``overwrite``, or a column that every message needs is missing.
        """
        if overwrite:
            raise PipelineError("messages are never overwritten; write with mode('append'): ids already there are kept")
        missing = _COLUMNS_WRITTEN.difference(schema.fieldNames())
        if missing:
            raise PipelineError(
                f"messages need the column {min(missing)!r}; there are {', '.join(schema.fieldNames())}"
            )
        spec = _spec(self.options)
        with opened(spec, create=True) as store:
            store.setup()
        return StoreWriter(spec, int(self.options.get("batch", BATCH_MESSAGES)), SystemClock().now())


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ReadOptions:
    spec: StoreSpec
    what: str
    schema: pa.Schema
    partitions: int
    bounds: tuple[int | None, int | None]

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _ReadOptions:
        columns = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
        what = options.get("what", "pending")
        first, end = options.get("from"), options.get("to")
        return cls(
            spec=_spec(options),
            what=what,
            schema=arrow_schema(what, columns),
            partitions=int(options.get("partitions", DEFAULT_PARTITIONS)),
            bounds=(None if first is None else int(first), None if end is None else int(end)),
        )


class _Share(InputPartition):
    """What one task reads; travels to an executor."""

    def __init__(self, part: ScanPart) -> None:
        super().__init__(part)
        self.part = part


class StoreReader(DataSourceReader):
    """Reads a store in shares. Each share is one snapshot; two shares are snapshots of different instants."""

    def __init__(self, options: _ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Split what is in the store now; Spark makes at least one task, so an empty store has one empty share."""
        options = self._options
        parts = scan_parts(options.spec, options.what, options.partitions)
        return [_Share(part) for part in _within(parts, *options.bounds)] or [_Share(ScanPart(0, 0))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on executors, once a task: page through one share."""
        assert isinstance(partition, _Share)
        options = self._options
        yield from read_part(options.spec, options.what, options.schema, partition.part)


def _within(parts: Sequence[ScanPart], first: int | None, end: int | None) -> list[ScanPart]:
    """Cut shares to the given bounds, and leave out those of which nothing remains."""
    cut = [
        ScanPart(
            part.first if first is None else max(part.first, first), part.end if end is None else min(part.end, end)
        )
        for part in parts
    ]
    return [part for part in cut if part.first < part.end]


# --- writing --------------------------------------------------------------------------------------------------------


@dataclass
class Stored(WriterCommitMessage):
    """What one task stored; travels to the driver."""

    stored: int
    already_there: int


class StoreWriter(DataSourceArrowWriter):
    """Stores messages, idempotent by id: a task that Spark repeats stores nothing twice.

    Each batch is a transaction of its own. A job that fails leaves the batches that were stored; run it again. A row
    that is no valid message fails the job; to set such rows aside use :func:`postdate.pipeline.schedule.schedule`.
    """

    def __init__(self, spec: StoreSpec, batch: int, now: datetime) -> None:
        self._spec, self._batch, self._now = spec, batch, now

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs on executors, once a task: store its rows."""
        stored = already_there = 0
        with opened(self._spec) as store:
            for batch in iterator:
                for start in range(0, batch.num_rows, self._batch):
                    messages = to_messages(batch.slice(start, self._batch))
                    report = store.store_many(messages, self._now)
                    stored += report.stored
                    already_there += len(report.already_there)
        return Stored(stored, already_there)


def _spec(options: Mapping[str, str]) -> StoreSpec:
    address = options.get("store")
    if not address:
        raise PipelineError('say which store: .option("store", "sqlite:///messages.db")')
    return StoreSpec(address, options.get("synchronous", "full"))
