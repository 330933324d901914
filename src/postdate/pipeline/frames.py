"""A store as a Spark data frame, without the format ``postdate``: for jobs of this package.

Spark plans a Python data source in processes of its own, which start anew for each ``load`` and cost a second or two
each. Here the shares are planned where the job runs, on the driver, and read by the executors' ordinary Python workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from postdate.pipeline.columns import arrow_schema, spark_schema, to_batch
from postdate.pipeline.stores import StoreSpec, opened
from postdate.ports import ScanPart

PAGE_ROWS = 5_000
"""Rows fetched and turned into one Arrow batch at a time."""

_PARTS = pa.schema([("first", pa.int64()), ("end", pa.int64())])


def scan_parts(spec: StoreSpec, what: str, parts: int) -> list[ScanPart]:
    """Return the shares of what is in the store now, at most ``parts``; runs on the driver."""
    with opened(spec) as store:
        return list(store.scannable().scan_parts(what, parts))


def scan_frame(
    spark: SparkSession, spec: StoreSpec, what: str, columns: Sequence[str], parts: Sequence[ScanPart]
) -> DataFrame:
    """Return what the store holds in the given shares, one task a share. Nothing is read before the frame is used.

    Args:
        spark: a session in UTC.
        spec: which store.
        what: ``pending``, ``records`` or ``queued``.
        columns: see :class:`postdate.ports.ScannableStore`.
        parts: from :func:`scan_parts`; an empty one makes an empty frame.
    """
    schema = arrow_schema(what, columns)

    def read_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for share in batch.to_pylist():
                yield from read_part(spec, what, schema, ScanPart(**share))

    shares = pa.Table.from_pylist([{"first": part.first, "end": part.end} for part in parts], schema=_PARTS)
    one_a_task = spark.createDataFrame(shares).repartitionByRange(max(len(parts), 1), "first")
    return one_a_task.mapInArrow(read_all, spark_schema(schema))


def read_part(spec: StoreSpec, what: str, schema: pa.Schema, part: ScanPart) -> Iterator[pa.RecordBatch]:
    """Page through one share of a store, from one snapshot; runs on executors."""
    with opened(spec) as store:
        for page in store.scannable().scan(what, part, schema.names, PAGE_ROWS):
            yield to_batch(page, schema)
