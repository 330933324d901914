"""Where rows wait, and how executors pack them: Spark's state sees one row for hundreds of messages.

Rows wait in buckets of due time, narrow for near times and wide for far ones: a hierarchical timing wheel. Level 0 has
buckets of one resolution, and each level above has buckets 256 times as wide. A row is put into the lowest level that
reaches its due time, so one load of rows makes a few hundred buckets at most, whether they are due within a minute or
within a decade. Before a wide bucket begins, its rows are spread over narrower buckets. Only level 0 releases rows.

A call from Python into Spark's state costs some 100 µs however much it carries, and a timer costs more. So the rows of
a task are gathered, sorted by slot and place, and each run of them becomes one Arrow record batch, without its schema.

Each attempt at a micro-batch may use the clock of a different executor. So the places here only group rows that
probably belong together. The processor computes the place of each row again, by the time of the micro-batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make schemas, fields and arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow.lib import concat_batches
from pyspark import TaskContext

from postdate.clock import SystemClock, to_microseconds
from postdate.errors import PipelineError
from postdate.pipeline.delay.layout import add_arrival
from postdate.pipeline.rows import Batches, spark_schema, to_batch

# --- where a row waits ------------------------------------------------------------------------------------------------


OVERDUE = -1
"""The place of rows that were due when they were packed: they are not kept."""

FEWEST_MS, MOST_MS = 10, 60_000
_FACTOR = 256
_PLACES_PER_BUCKET = 8
_WIDEST_MS = 40 * 365 * 86_400_000
"""This is less than the time since 1970. Otherwise a row could wait in bucket 0, whose timer is before 1970."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """Maps due times to places, and places to timers. A place is a level and the number of a bucket, in one integer.

    ``resolution_ms`` is the width of the narrowest bucket, 10 to 60,000 milliseconds; else PipelineError.
    """

    resolution_ms: int

    def __post_init__(self) -> None:
        if not FEWEST_MS <= self.resolution_ms <= MOST_MS:
            raise PipelineError(
                f"a resolution of {self.resolution_ms} ms is out of bounds; choose {FEWEST_MS} to {MOST_MS} ms"
            )

    @property
    def top_level(self) -> int:
        """The highest level. It also has the rows that are due beyond its reach."""
        level = 0
        while self.width_ms(level + 1) <= _WIDEST_MS:
            level += 1
        return level

    def width_ms(self, level: int) -> int:
        """Return the span of due times that a bucket of this level covers, in milliseconds."""
        return self.resolution_ms * _FACTOR**level

    def lead_ms(self, level: int) -> int:
        """Return how many ms before its beginning a bucket above level 0 is spread: a quarter of its width."""
        return self.width_ms(level) // 4

    def places(self, due_us: NDArray[np.int64], now_ms: int, below: int | None = None) -> NDArray[np.int64]:
        """Return the place of each row; rows that are due by ``now_ms`` get :data:`OVERDUE`.

        Args:
            due_us: due times in microseconds.
            now_ms: decides which rows are due, and the level of the others.
            below: the level whose bucket is being spread; rows get lower levels.
        """
        top = self.top_level if below is None else below - 1
        distance_ms = -(-due_us // 1000) - now_ms
        # A bucket is spread at most 1.25 widths before its last row is due, and the level below reaches that far.
        reach_ms = np.array([2 * self.width_ms(level + 1) for level in range(top)], dtype=np.int64)
        levels = np.searchsorted(reach_ms, distance_ms, side="right")
        widths_us = np.array([self.width_ms(level) * 1000 for level in range(top + 1)], dtype=np.int64)[levels]
        # Level 0 releases rows at the end of their bucket, so due times are rounded up. Other buckets begin before
        # their rows.
        buckets = np.where(levels == 0, -(-due_us // widths_us), due_us // widths_us)
        return np.where(due_us <= now_ms * 1000, OVERDUE, buckets * _PLACES_PER_BUCKET + levels)

    def level(self, place: int) -> int:
        return place % _PLACES_PER_BUCKET

    def start_ms(self, place: int) -> int:
        """Return the earliest due time of a place above level 0."""
        return place // _PLACES_PER_BUCKET * self.width_ms(self.level(place))

    def timer_ms(self, place: int) -> int:
        """Return when a place is opened: at level 0 the end of its bucket, above it the lead before its beginning.

        A timer modulo the resolution is its level, so that no two levels share a timer.
        """
        level = self.level(place)
        if level == 0:
            return place // _PLACES_PER_BUCKET * self.resolution_ms
        return self.start_ms(place) - self.lead_ms(level) + level

    def place_of(self, timer_ms: int) -> int:
        """Return the place that a timer opens.

        Any later timer of the same level within one width opens the same place.
        """
        level = timer_ms % self.resolution_ms
        if level == 0:
            return timer_ms // self.resolution_ms * _PLACES_PER_BUCKET
        return (timer_ms - level + self.lead_ms(level)) // self.width_ms(level) * _PLACES_PER_BUCKET + level

    def later_timer_ms(self, place: int, now_ms: int) -> int | None:
        """Return a timer at or after ``now_ms`` for a place above level 0; ``None`` if its bucket begins before."""
        level = self.level(place)
        timer = -(-(now_ms - level) // self.resolution_ms) * self.resolution_ms + level
        return timer if timer <= self.start_ms(place) else None


# --- packages ---------------------------------------------------------------------------------------------------------


_PACKED_ARROW = pa.schema(
    [("slot", pa.int32()), ("place", pa.int64()), ("last_due_us", pa.int64()), ("content", pa.binary())]
)
PACKED = spark_schema(_PACKED_ARROW)
"""One row a package.

``place`` is a place of :class:`Wheel` by the executor's clock, or one of the negative constants.
"""

CANCELS, HELLO = -2, -3
"""Places of packages without rows: ids to cancel, and empty packages that make every slot compare its options."""

SLOT = "postdate_slot"
"""A column that is added to the rows, only in jobs with cancels: the slot, until the rows are packed."""

PACKAGE_BYTES = 1 << 20
_GATHERED_ROWS, _GATHERED_BYTES = 500_000, 32 << 20
_UNPACKED_ROWS = 10_000
_BEFORE_ALL = -(2**62)
"""The value for a null due time, which is due at once. Arithmetic on it cannot overflow."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How rows become packages. The object is pickled to executors.

    ``schema`` does not have the columns added here; ``slots`` are the keys of the state. With ``has_cancels``, rows
    arrive with their slot in :data:`SLOT`, and the processor adds their time of arrival.
    """

    wheel: Wheel
    schema: pa.Schema
    due: str
    slots: tuple[int, ...]
    null_due: str
    has_cancels: bool

    @property
    def stored_schema(self) -> pa.Schema:
        """The columns of rows that wait, and of a released package. Packages that arrive have ``schema``."""
        return add_arrival(self.schema) if self.has_cancels else self.schema


def pack_rows(packing: PackOptions, batches: Batches) -> Batches:
    share = _share_of_task()
    hello = [(slot, HELLO, 0, b"") for slot in packing.slots]
    for rows in _join_small_batches(batches):
        yield to_batch([*hello, *_pack_batch(packing, rows, share, now_ms())], _PACKED_ARROW)
        hello = []


def pack_cancels(slots: Sequence[int], batches: Batches) -> Batches:
    """Pack the ids to cancel of a task. The batches have two columns, id and slot; null ids are dropped."""
    hello = [(slot, HELLO, 0, b"") for slot in slots]
    for id_batch in _join_small_batches(batches):
        valid_ids = id_batch.filter(pc.is_valid(id_batch.column(0)))
        ids = pa.RecordBatch.from_arrays([valid_ids.column(0)], names=["id"])
        numbers = _int64(valid_ids.column(1))
        packages = [
            (slots[number], CANCELS, 0, to_content(part))
            for number in range(len(slots))
            for part in split_parts(ids.filter(pa.array(numbers == number)))
        ]
        yield to_batch([*hello, *packages], _PACKED_ARROW)
        hello = []


def unpack_rows(packing: PackOptions, batches: Batches) -> Batches:
    """Unpack the due packages of a task into their rows."""
    for batch in batches:
        package_rows = [from_content(content.as_py(), packing.stored_schema) for content in batch.column(0)]
        if package_rows:
            rows = pa.Table.from_batches(package_rows).select(packing.schema.names)
            yield from rows.combine_chunks().to_batches(max_chunksize=_UNPACKED_ROWS)


def now_ms() -> int:
    return to_microseconds(SystemClock().now()) // 1000


def to_content(batch: pa.RecordBatch) -> bytes:
    return batch.serialize().to_pybytes()


def from_content(content: bytes | bytearray, schema: pa.Schema) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(content), schema)


def split_parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into parts of about :data:`PACKAGE_BYTES`. An empty batch has no parts."""
    if batch.num_rows:
        rows = max(int(PACKAGE_BYTES * batch.num_rows / max(batch.nbytes, 1)), 1)
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def split_by_keys(batch: pa.RecordBatch, *keys: NDArray[np.int64]) -> Iterator[tuple[tuple[int, ...], pa.RecordBatch]]:
    """Yield the rows of each key, in the order of the keys, in parts of about :data:`PACKAGE_BYTES`."""
    order = np.lexsort(keys[::-1])
    ordered = batch.take(pa.array(order, pa.int64()))
    columns = [key[order] for key in keys]
    changes = np.zeros(batch.num_rows, dtype=bool)
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    for start, end in pairwise([0, *np.flatnonzero(changes).tolist(), batch.num_rows]):
        for part in split_parts(ordered.slice(start, end - start)):
            yield tuple(int(column[start]) for column in columns), part


def due_us(batch: pa.RecordBatch, due: str) -> NDArray[np.int64]:
    """Return the due times in microseconds; ``_BEFORE_ALL`` for null."""
    column = batch.column(batch.schema.get_field_index(due))
    return column.cast(pa.int64()).fill_null(_BEFORE_ALL).to_numpy(zero_copy_only=False)


# --- one gathered batch ----------------------------------------------------------------------------------------------


def _pack_batch(
    packing: PackOptions, rows: pa.RecordBatch, share: int, near_ms: int
) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the packages of a batch, grouped by the place of the rows at ``near_ms``, which is about now."""
    rows = _handle_null_due_times(packing, rows)
    if not rows.num_rows:
        return
    due = due_us(rows, packing.due)
    places = packing.wheel.places(due, near_ms)
    content = pa.RecordBatch.from_arrays(rows.columns[: len(packing.schema)], schema=packing.schema)
    if packing.has_cancels:
        numbers = _int64(rows.column(rows.schema.get_field_index(SLOT)))
    else:
        # The slot is computed only from values that stay the same if Spark repeats a task with its rows in another
        # order. A row
        # that changed its slot between two attempts could be lost or duplicated.
        numbers = (due // (packing.wheel.resolution_ms * 1000) + share) % len(packing.slots)
    for (number, place), part in split_by_keys(content, numbers, places):
        yield packing.slots[number], place, int(due_us(part, packing.due).max()), to_content(part)


def _handle_null_due_times(packing: PackOptions, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Handle null due times as ``null_due`` says: keep them, drop them, or raise PipelineError."""
    column = rows.column(rows.schema.get_field_index(packing.due))
    if not column.null_count or packing.null_due == "now":
        return rows
    if packing.null_due == "drop":
        return rows.filter(column.is_valid())
    raise PipelineError(
        f"{column.null_count} of {rows.num_rows} rows have no due time: {packing.due!r} is null. Nothing of this "
        f"micro-batch was taken. Correct the rows, or choose null_due='now' or null_due='drop'"
    )


def _share_of_task() -> int:
    """Return a number that spreads the tasks of a query over its slots. It is the same if a task is repeated."""
    task = TaskContext.get()
    assert task is not None, "packages are made in Spark's tasks"
    return task.partitionId() + int(task.getLocalProperty("streaming.sql.batchId") or 0)


def _join_small_batches(batches: Batches) -> Batches:
    """Join small batches up to ``_GATHERED_ROWS`` or ``_GATHERED_BYTES``."""
    small: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            small.append(batch)
        if sum(one.num_rows for one in small) >= _GATHERED_ROWS or sum(one.nbytes for one in small) >= _GATHERED_BYTES:
            yield concat_batches(small)
            small = []
    if small:
        yield concat_batches(small)


def _int64(column: pa.Array[pa.Scalar[pa.DataType]]) -> NDArray[np.int64]:
    return column.cast(pa.int64()).to_numpy(zero_copy_only=False)
