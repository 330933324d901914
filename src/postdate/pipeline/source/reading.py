"""Read a store in parts. A Spark process on the driver plans the parts, and executors read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, TypeGuard

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from postdate.config import resolve_address
from postdate.errors import PipelineError
from postdate.pipeline.frames import read_part, scan_parts
from postdate.pipeline.rows import arrow_schema
from postdate.pipeline.source.options import DEFAULT_PARTITIONS, PENDING, QUEUED, RECORDS, SourceOptions
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Scan, ScanFilter
from postdate.ports.scanning import can_store_text
from postdate.wiring import check_store

# --- Spark's filters as conditions of a store; ADR 0011, point 3 ------------------------------------------------------


MOST_TEXTS: Final = 10_000
"""Number of ids or destinations in one condition; Spark applies a condition with a longer list."""

_INSTANT: Final = timedelta(microseconds=1)
_ALWAYS_THERE: Final = frozenset({"message_id", "kind", "number", "at", "queue"})
_THERE_WHEN_PENDING: Final = frozenset({"destination", "due", "headers", "body", "number_of_failures"})


@dataclass
class PushedFilters:
    """The conditions that the store applies. Each one reduces the rows of ``table``."""

    table: str
    _texts: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    _due_from: datetime | None = None
    _due_to: datetime | None = None

    def accept(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take the filters that the store applies exactly. Return the others."""
        all_filters = list(filters)
        remaining = [each for each in all_filters if not isinstance(each, IsNotNull) and not self._accept_filter(each)]
        # A condition in the store implies that its column is not null.
        remaining += [
            each for each in all_filters if isinstance(each, IsNotNull) and not self._has_value(each.attribute)
        ]
        return remaining

    @property
    def is_impossible(self) -> bool:
        """Whether no row can fulfil the conditions."""
        empty_range = self._due_from is not None and self._due_to is not None and self._due_from >= self._due_to
        return frozenset() in self._texts.values() or empty_range

    @property
    def scan_filter(self) -> ScanFilter:
        texts_by_column = {column: tuple(sorted(texts)) for column, texts in self._texts.items()}
        return ScanFilter(
            texts_by_column.get("message_id"), texts_by_column.get(self._destination), self._due_from, self._due_to
        )

    @property
    def _destination(self) -> str:
        return "queue" if self.table == QUEUED else "destination"

    def _has_value(self, path: tuple[str, ...]) -> bool:
        (column, *inner) = path
        if inner:
            return False
        has_column = column in _ALWAYS_THERE or (self.table == "pending" and column in _THERE_WHEN_PENDING)
        is_due = column == "due" and (self._due_from or self._due_to) is not None
        return has_column or is_due or column in self._texts

    def _accept_filter(self, each: Filter) -> bool:
        match each:
            case EqualTo((column,), value) | EqualNullSafe((column,), value):
                return self._accept_equal(column, value)
            case In((column,), values):
                return self._accept_one_of(column, [value for value in values if value is not None])
            case GreaterThan(("due",), value) | GreaterThanOrEqual(("due",), value) if _is_instant(value):
                return self._accept_due_range(
                    value if isinstance(each, GreaterThanOrEqual) else _next_instant(value), None
                )
            case LessThan(("due",), value) | LessThanOrEqual(("due",), value) if _is_instant(value):
                return self._accept_due_range(None, value if isinstance(each, LessThan) else _next_instant(value))
            case _:
                return False

    def _accept_equal(self, column: str, value: object) -> bool:
        if _is_instant(value):
            instant_after = _next_instant(value)
            return column == "due" and instant_after is not None and self._accept_due_range(value, instant_after)
        return self._accept_one_of(column, [value])

    def _accept_one_of(self, column: str, values: Sequence[object]) -> bool:
        if column not in {"message_id", self._destination} or len(values) > MOST_TEXTS:
            return False
        if not all(isinstance(value, str) for value in values):
            return False
        texts = frozenset(value for value in values if isinstance(value, str) and can_store_text(value))
        self._texts[column] = texts & self._texts.get(column, texts)
        return True

    def _accept_due_range(self, first: datetime | None, end: datetime | None) -> bool:
        if first is None and end is None:  # The time is after the last possible instant.
            return False
        if first is not None:
            first = first.astimezone(UTC)
            self._due_from = first if self._due_from is None else max(self._due_from, first)
        if end is not None:
            end = end.astimezone(UTC)
            self._due_to = end if self._due_to is None else min(self._due_to, end)
        return True


def _is_instant(value: object) -> TypeGuard[datetime]:
    return isinstance(value, datetime) and value.tzinfo is not None


def _next_instant(instant: datetime) -> datetime | None:
    """Return the next instant; times are whole microseconds."""
    try:
        return instant + _INSTANT
    except OverflowError:
        return None


# --- the reader -------------------------------------------------------------------------------------------------------


_PLANS_FILTERS: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def selected_columns(options: SourceOptions) -> pa.Schema:
    """Return the columns that the options choose. Raise PipelineError if there is no such table or column."""
    return arrow_schema(options.row_kind(PENDING, RECORDS, QUEUED), options.get("columns", ()))


def columns_of_schema(options: SourceOptions, schema: StructType) -> pa.Schema:
    """Return the columns of a schema that the user gave to Spark; it may be the source's own.

    Raises PipelineError unless all are columns of this source, each with its own type.
    """
    table = options.row_kind(PENDING, RECORDS, QUEUED)
    columns = arrow_schema(table, schema.fieldNames())
    for given_field, expected in zip(schema.fields, from_arrow_schema(columns).fields, strict=True):
        actual_type, expected_type = given_field.dataType.simpleString(), expected.dataType.simpleString()
        if actual_type != expected_type:
            raise PipelineError(
                f"the column {given_field.name!r} of {table} is {expected_type}, not {actual_type}: leave schema(...) "
                f"out, or "
                f"give it that type and cast afterwards"
            )
    return columns


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The rows to read, as a value that is sent to executors.

    ``compares_loosely``: trailing spaces of texts are ignored.
    """

    spec: StoreSpec
    scan: Scan
    schema: pa.Schema
    partitions: int
    compares_loosely: bool = False

    @classmethod
    def of(cls, options: SourceOptions, schema: StructType) -> ReadPlan:
        spec, snapshot = options.existing_spec(), options.get("snapshot")
        columns = columns_of_schema(options, schema)
        scan = Scan(options.row_kind(PENDING, RECORDS, QUEUED), tuple(columns.names), snapshot=snapshot)
        compares_loosely = check_store(resolve_address(spec.address, os.environ)).backend.compares_loosely
        return cls(spec, scan, columns, options.get("partitions", DEFAULT_PARTITIONS), compares_loosely)


class StoreReader(DataSourceReader):
    """Reads a store in parts. Each part is one snapshot; two parts are snapshots of different instants.

    With the option ``snapshot`` all parts are of one instant. This class cannot hold a snapshot, because Spark ends the
    planning process before the first task begins.
    """

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._pushed_filters = PushedFilters(plan.scan.row_kind)

    def partitions(self) -> Sequence[InputPartition]:
        """Split the store's present rows. Spark makes at least one task, so there is always a part, or ``None``."""
        if self._pushed_filters.is_impossible:
            return [InputPartition(None)]
        parts = scan_parts(self._plan.spec, self._plan.scan.row_kind, self._plan.partitions)
        return [InputPartition(part) for part in parts or [None]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part page by page. This runs on executors, once a task."""
        plan, part = self._plan, partition.value
        if part is not None:
            scan = Scan(plan.scan.row_kind, plan.scan.columns, self._pushed_filters.scan_filter, plan.scan.snapshot)
            yield from read_part(plan.spec, scan, plan.schema, part)


class FilteringStoreReader(StoreReader):
    """A reader that asks the store only for the rows that Spark needs."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that the store applies. Return the filters that Spark must apply.

        Spark calls this before :meth:`partitions`.
        """
        remaining = self._pushed_filters.accept(filters)
        return filters if self._plan.compares_loosely else remaining


def create_reader(plan: ReadPlan) -> StoreReader:
    """Return a reader that takes filters if Spark offers filters.

    If filters are off in a session, which is the default, Spark refuses every reader that could take them. Such a
    session plans in another program than a session that offers filters. The program shows which case this is: it is the
    module with which Python was started, or that a Spark daemon has loaded.
    """
    main_spec = sys.modules["__main__"].__spec__
    has_filters = _PLANS_FILTERS in sys.modules or (main_spec is not None and main_spec.name == _PLANS_FILTERS)
    return FilteringStoreReader(plan) if has_filters else StoreReader(plan)
