"""Read the rows of a store in this process, as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.rows import arrow_schema
from postdate.pipeline.stores import OpenStore
from postdate.ports import Scan, ScanFilter, ScanPart


class ScanBudget:
    """How many rows of a store are read in this process before Spark does the job.

    Args:
        most: number of rows; ``None`` for any number.
    """

    def __init__(self, most: int | None) -> None:
        self.most, self.rows = most, 0

    def spend(self, rows: int) -> None:
        """Raise NeedsSpark if these rows are too many."""
        self.rows += rows
        if self.most is not None and self.rows > self.most:
            raise NeedsSpark(f"the store has more than {self.most:,} rows to read")


def scan_rows(  # noqa: PLR0913 - what to read, and how
    store: OpenStore,
    table: str,
    columns: Sequence[str],
    budget: ScanBudget,
    *,
    parts: Sequence[ScanPart] | None = None,
    scan_filter: ScanFilter = ScanFilter(),  # noqa: B008 - a frozen value
    snapshot: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table of the store; see :func:`postdate.pipeline.frames.scan_frame`.

    Without ``parts``, these are the rows that exist now.
    """
    schema = arrow_schema(table, columns)
    scan = Scan(table, tuple(schema.names), scan_filter, snapshot)
    for part in store.require_scannable().scan_parts(table, 1) if parts is None else parts:
        for batch in store.scan(scan, part, schema):
            budget.spend(batch.num_rows)
            yield batch
