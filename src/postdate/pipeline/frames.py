"""A store as a Spark data frame without the format ``postdate``, for jobs of this package.

Spark plans a Python data source in separate processes, which are started for each ``load`` and take a second or two.
Here a job plans the :class:`ScanPart` of each task on the driver, and the ordinary Python workers of executors read it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from postdate.pipeline.rows import Batches, arrow_schema, spark_schema
from postdate.pipeline.stores import StoreSpec, open_in_task, open_spec
from postdate.ports import Scan, ScanFilter, ScanPart

STORAGE = StorageLevel.MEMORY_AND_DISK
"""Storage of frames that must not be read again, because the store would be in another state."""

PARTS = pa.schema([("first", pa.int64()), ("end", pa.int64())])


def persist_frame(stack: ExitStack, frame: DataFrame, level: StorageLevel = STORAGE) -> DataFrame:
    """Return the frame, persisted from its first computation until the stack is closed."""
    stack.callback(frame.persist(level).unpersist)
    return frame


@contextmanager
def open_snapshot(spec: StoreSpec) -> Generator[str | None]:
    """Hold a snapshot of the store for the length of the block. This runs on the driver.

    Yields the name of the snapshot for :func:`scan_frame`; ``None`` for a store without snapshots, whose parts are each
    read in their state at that time. Plan parts inside the block: rows may move out of parts that were planned before.
    """
    with open_spec(spec) as store, store.require_scannable().snapshot() as snapshot:
        yield snapshot


def scan_parts(spec: StoreSpec, table: str, parts: int) -> list[ScanPart]:
    """Return at most ``parts`` parts that cover the store's present rows. This runs on the driver."""
    with open_spec(spec) as store:
        return list(store.require_scannable().scan_parts(table, parts))


def scan_frame(  # noqa: PLR0913 - what to read, and how
    spark: SparkSession,
    spec: StoreSpec,
    table: str,
    columns: Sequence[str],
    parts: Sequence[ScanPart],
    *,
    scan_filter: ScanFilter = ScanFilter(),  # noqa: B008 - a frozen value
    snapshot: str | None = None,
) -> DataFrame:
    """Return the rows of the given parts, one task a part. Nothing is read before the frame is used.

    Empty ``columns`` mean all columns; without ``parts`` the frame is empty. Hold the ``snapshot`` until the frame was
    used.
    """
    schema = arrow_schema(table, columns)
    scan = Scan(table, tuple(schema.names), scan_filter, snapshot)

    def read_all(batches: Batches) -> Batches:
        for batch in batches:
            for share in batch.to_pylist():
                yield from read_part(spec, scan, schema, ScanPart(**share))

    return part_frame(spark, parts).mapInArrow(read_all, spark_schema(schema))


def part_frame(spark: SparkSession, parts: Sequence[ScanPart]) -> DataFrame:
    """Return the bounds of the parts as rows, one task a part."""
    shares = pa.Table.from_pylist([asdict(part) for part in parts], schema=PARTS)
    return spark.createDataFrame(shares, spark_schema(PARTS)).repartitionByRange(max(len(parts), 1), "first")


def read_part(spec: StoreSpec, scan: Scan, schema: pa.Schema, part: ScanPart) -> Batches:
    """Read one part from one snapshot, with the columns of ``schema``. This runs on executors."""
    with open_in_task(spec) as store:
        yield from store.scan(scan, part, schema)
