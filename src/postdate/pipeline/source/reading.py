"""Reads a store in parts: planned in a process of Spark's own on the driver, read by executors."""

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
    """Return the columns that the options choose, or raise PipelineError if there is no such thing or column."""
    return arrow_schema(options.what(PENDING, RECORDS, QUEUED), options.get("columns", ()))


def columns_wanted(options: SourceOptions, schema: StructType) -> pa.Schema:
    """Return the columns of a schema given to Spark, which may be the source's own.

    Raises PipelineError unless all are columns of this source, each with its own type.
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
    """Rows to read, as a value that travels to executors; ``compares_loosely`` ignores spaces behind texts."""

    spec: StoreSpec
    scan: Scan
    schema: pa.Schema
    partitions: int
    compares_loosely: bool = False

    @classmethod
    def of(cls, options: SourceOptions, schema: StructType) -> Reading:
        spec, snapshot = options.existing(), options.get("snapshot")
        columns = columns_wanted(options, schema)
        scan = Scan(options.what(PENDING, RECORDS, QUEUED), tuple(columns.names), snapshot=snapshot)
        loosely = check_store(resolved(spec.address, os.environ)).backend.compares_loosely
        return cls(spec, scan, columns, options.get("partitions", DEFAULT_PARTITIONS), loosely)


class Share(InputPartition):
    """The part that one task reads, or ``None``; travels to an executor."""

    def __init__(self, part: ScanPart | None) -> None:
        super().__init__(part)
        self.part = part


class StoreReader(DataSourceReader):
    """Reads a store in parts. Each part is one snapshot; two parts are snapshots of different instants.

    With the option ``snapshot`` all parts are of one instant. This class could not hold a snapshot: Spark ends the
    process that plans before the first task begins.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._pushed = Pushed(reading.scan.what)

    def partitions(self) -> Sequence[InputPartition]:
        """Split the store's present rows; Spark makes at least one task, so there is always a share."""
        if self._pushed.is_impossible:
            return [Share(None)]
        parts = scan_parts(self._reading.spec, self._reading.scan.what, self._reading.partitions)
        return [Share(part) for part in parts] or [Share(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on executors, once a task: page through one part."""
        assert isinstance(partition, Share)
        reading = self._reading
        if partition.part is not None:
            scan = Scan(reading.scan.what, reading.scan.columns, self._pushed.where, reading.scan.snapshot)
            yield from read_part(reading.spec, scan, reading.schema, partition.part)


class FilteringStoreReader(StoreReader):
    """Asks the store only for the rows that Spark wants."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that the store fulfils; return those that Spark must apply.

        Called before :meth:`partitions`.
        """
        left = self._pushed.take(filters)
        return filters if self._reading.compares_loosely else left


def reader_for(reading: Reading) -> StoreReader:
    """Return a reader that takes filters where Spark offers some.

    A session with filters switched off, the default, refuses every reader that could take them. It plans in
    another program than a session that offers them, and that tells the two apart: the program is the module
    that Python was started with, or that a daemon of Spark's has loaded.
    """
    started_with = sys.modules["__main__"].__spec__
    offered = _PLANS_FILTERS in sys.modules or (started_with is not None and started_with.name == _PLANS_FILTERS)
    return FilteringStoreReader(reading) if offered else StoreReader(reading)
