"""Reading a store in shares: planned in a process of Spark's own on the driver, read by executors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from postdate.config import resolved
from postdate.errors import PipelineError
from postdate.pipeline.columns import arrow_schema
from postdate.pipeline.frames import read_part, scan_parts
from postdate.pipeline.source.filters import Pushed
from postdate.pipeline.source.options import DEFAULT_PARTITIONS, PENDING, QUEUED, RECORDS, SourceOptions
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Scan, ScanPart
from postdate.wiring import check_store

_PLANS_FILTERS: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def columns_read(options: SourceOptions) -> pa.Schema:
    """Return the columns that the options choose.

    Raises:
        PipelineError: there is no such thing to read, or it has no such column.
    """
    return arrow_schema(options.what(PENDING, RECORDS, QUEUED), options.get("columns", ()))


def columns_wanted(options: SourceOptions, schema: StructType) -> pa.Schema:
    """Return the columns of a schema that was given to Spark; the source's own is one of those.

    Raises:
        PipelineError: it is not made of columns of what is read, each of its own type.
    """
    what = options.what(PENDING, RECORDS, QUEUED)
    wanted = arrow_schema(what, schema.fieldNames())
    for given, known in zip(schema.fields, from_arrow_schema(wanted).fields, strict=True):
        type_given, type_known = given.dataType.simpleString(), known.dataType.simpleString()
        if type_given != type_known:
            raise PipelineError(
                f"the column {given.name!r} of {what} is {type_known}, not {type_given}: leave schema(...) out, or "
                f"give it that type and cast afterwards"
            )
    return wanted


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read, as a value that travels to executors.

    Args:
        spec: which store.
        scan: what to read.
        schema: the columns of it.
        partitions: tasks, at most.
        compares_loosely: the store takes a text for equal to one with spaces behind it, as SQL Server does.
    """

    spec: StoreSpec
    scan: Scan
    schema: pa.Schema
    partitions: int
    compares_loosely: bool = False

    @classmethod
    def of(cls, options: SourceOptions, schema: StructType) -> Reading:
        """Return what the options ask for, in the columns of the schema."""
        spec, snapshot = options.existing(), options.get("snapshot")
        columns = columns_wanted(options, schema)
        scan = Scan(options.what(PENDING, RECORDS, QUEUED), tuple(columns.names), snapshot=snapshot)
        loosely = check_store(resolved(spec.address, os.environ)).backend.compares_loosely
        return cls(spec, scan, columns, options.get("partitions", DEFAULT_PARTITIONS), loosely)


class Share(InputPartition):
    """What one task reads; travels to an executor.

    Args:
        part: ``None``: nothing.
    """

    def __init__(self, part: ScanPart | None) -> None:
        super().__init__(part)
        self.part = part


class StoreReader(DataSourceReader):
    """Reads a store in shares. Each share is one snapshot; two shares are snapshots of different instants.

    With the option ``snapshot`` all shares are of one instant. Nothing here could hold one open: Spark ends the process
    that plans before the first task begins.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._pushed = Pushed(reading.scan.what)

    def partitions(self) -> Sequence[InputPartition]:
        """Split what is in the store now; Spark makes at least one task, so there is always a share."""
        if self._pushed.is_impossible:
            return [Share(None)]
        parts = scan_parts(self._reading.spec, self._reading.scan.what, self._reading.partitions)
        return [Share(part) for part in parts] or [Share(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on executors, once a task: page through one share."""
        assert isinstance(partition, Share)
        reading = self._reading
        if partition.part is not None:
            scan = Scan(reading.scan.what, reading.scan.columns, self._pushed.where, reading.scan.snapshot)
            yield from read_part(reading.spec, scan, reading.schema, partition.part)


class FilteringStoreReader(StoreReader):
    """Asks the store only for the rows that Spark wants."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that the store fulfils; return those that it does not, or not exactly.

        Called before :meth:`partitions`.
        """
        left = self._pushed.take(filters)
        return filters if self._reading.compares_loosely else left


def reader_for(reading: Reading) -> StoreReader:
    """Return a reader that takes filters where Spark offers some.

    A session in which that is off, as it is by default, refuses every reader that could take filters. It plans in
    another program than a session that offers them, and that is how the two are told apart: the program is the module
    that Python was started with, or that a daemon of Spark's has loaded.
    """
    started_with = sys.modules["__main__"].__spec__
    offered = _PLANS_FILTERS in sys.modules or (started_with is not None and started_with.name == _PLANS_FILTERS)
    return FilteringStoreReader(reading) if offered else StoreReader(reading)
