"""A store as a Spark data frame, without the format ``postdate``: for jobs of this package.

Spark plans a Python data source in processes of its own, which start anew for each ``load`` and cost a second or two
each. Here the shares are planned where the job runs, on the driver, and read by the executors' ordinary Python workers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from postdate.pipeline.columns import arrow_schema, spark_schema
from postdate.pipeline.stores import PAGE_ROWS, StoreSpec, opened
from postdate.ports import Scan, ScanFilter, ScanPart

__all__ = ["PAGE_ROWS", "held_snapshot", "read_part", "scan_frame", "scan_parts"]

_PARTS = pa.schema([("first", pa.int64()), ("end", pa.int64())])


@contextmanager
def held_snapshot(spec: StoreSpec) -> Generator[str | None]:
    """Hold one instant of the store for the length of the block; runs on the driver.

    Yields:
        What names it in :func:`scan_frame`; ``None`` where the store cannot be held, and each share is read as it is
        when its turn comes. Plan the shares inside the block: rows may move beyond shares that were planned before.
    """
    with opened(spec) as store, store.scannable().snapshot() as snapshot:
        yield snapshot


def scan_parts(spec: StoreSpec, what: str, parts: int) -> list[ScanPart]:
    """Return the shares of what is in the store now, at most ``parts``; runs on the driver."""
    with opened(spec) as store:
        return list(store.scannable().scan_parts(what, parts))


def scan_frame(  # noqa: PLR0913 - what to read, and how
    spark: SparkSession,
    spec: StoreSpec,
    what: str,
    columns: Sequence[str],
    parts: Sequence[ScanPart],
    *,
    where: ScanFilter = ScanFilter(),  # noqa: B008 - a frozen value
    snapshot: str | None = None,
) -> DataFrame:
    """Return what the store holds in the given shares, one task a share. Nothing is read before the frame is used.

    Args:
        spark: a session in UTC.
        spec: which store.
        what: ``pending``, ``records`` or ``queued``.
        columns: see :class:`postdate.ports.ScannableStore`; none: all.
        parts: from :func:`scan_parts`; an empty one makes an empty frame.
        where: which rows; the store leaves out the others.
        snapshot: from :func:`held_snapshot`, which must be held until the frame has been used.
    """
    schema = arrow_schema(what, columns)
    scan = Scan(what, tuple(schema.names), where, snapshot)

    def read_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for share in batch.to_pylist():
                yield from read_part(spec, scan, schema, ScanPart(**share))

    shares = pa.Table.from_pylist([asdict(part) for part in parts], schema=_PARTS)
    one_a_task = spark.createDataFrame(shares).repartitionByRange(max(len(parts), 1), "first")
    return one_a_task.mapInArrow(read_all, spark_schema(schema))


def read_part(spec: StoreSpec, scan: Scan, schema: pa.Schema, part: ScanPart) -> Iterator[pa.RecordBatch]:
    """Read one share of a store, from one snapshot; runs on executors.

    Args:
        spec: which store.
        scan: what to read.
        schema: from :func:`postdate.pipeline.columns.arrow_schema`, with the columns of the scan.
        part: the share.
    """
    with opened(spec) as store:
        yield from store.scan(scan, part, schema)
