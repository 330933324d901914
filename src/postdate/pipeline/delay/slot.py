"""One slot of the state without its packages: how they were written, and the cancelled ids.

A cancel removes rows that wait when it arrives, and rows that arrive within ``keep_ms`` after it. So it is kept until
that time is over and every row that had arrived by then has been due. All times are times of micro-batches.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make schemas, fields and arrays generic in a type that is known only at run time, and Spark does
# not declare the types of its state.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.lib import concat_batches
from pyspark.sql.streaming.stateful_processor import MapState, ValueState
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructField, StructType

from postdate.pipeline.delay.layout import ARRIVED, Layout, begin_package, conform, match_columns, split_package
from postdate.pipeline.delay.packing import PackOptions, from_content, to_content

CHUNK_IDS = 4_096
"""Approximate number of ids in one value. A value is rewritten in each micro-batch with cancels until it is full."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some thousands of cancelled ids, which are one value in the state.

    Args:
        content: a record batch of ids and of the times at which they were cancelled, in milliseconds.
        newest_ms: the latest of these times.
        hold_until_ms: due time of the last row that it may concern; ``None`` while such rows may still arrive.
        over_ms: time of the first micro-batch after ``hold_until_ms``. It released the last rows, so the next
            micro-batch removes the ids.
    """

    content: bytes
    newest_ms: int
    hold_until_ms: int | None = None
    over_ms: int | None = None


def struct(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


SLOT = struct(options=StringType(), latest_due_us=LongType(), first_cancelled=LongType(), next_cancelled=LongType())
CANCELLED_KEY = struct(number=LongType())
CANCELLED = struct(content=BinaryType(), newest_ms=LongType(), hold_until_ms=LongType(), over_ms=LongType())


@dataclass(frozen=True, slots=True)
class CancelOptions:
    """How rows are cancelled, up to ``keep_ms`` after a cancel. The object is pickled to executors."""

    id_column: str
    keep_ms: int


class Slot:
    """One key of the state during one micro-batch, without its packages. Spark sets the key."""

    def __init__(
        self, value: ValueState, chunks: MapState, packing: PackOptions, cancel_options: CancelOptions | None
    ) -> None:
        self._value, self._packing, self._cancels = value, packing, cancel_options
        row = value.get()
        self._saved_row = None if row is None else tuple(row)
        self._layout_text, self.latest_due_us, self._first, self._next = self._saved_row or (None, 0, 0, 0)
        self._layout = Layout({}, ())
        self._schema_number = 0
        self._chunk_states = chunks
        self._chunk_cache: dict[int, Chunk] | None = None
        self._ids: pa.Table | None = None

    def continue_layout(self, query: Mapping[str, Any]) -> None:
        """Store the query's options and columns in a new state, or new columns in an old state.

        ``query`` has the options of the layout, and ``columns`` as the first format wrote them. Call this before
        packages are read or written.

        Raise PipelineError if the rows that wait cannot be released by this query.
        """
        schema, columns = self._packing.schema, query.get("columns")
        options = {name: value for name, value in query.items() if name != "columns"}
        keep_ms = None if self._cancels is None else self._cancels.keep_ms
        if self._layout_text is None:
            self._layout = Layout(options, (schema,), keep_ms)
        else:
            match = match_columns(schema)
            # Spark's name of a type may say more than Arrow's type does, so equal texts need no comparison.
            written = Layout.from_text(self._layout_text, lambda text: schema if text == columns else match(text))
            self._layout = written.continue_with(options, schema, keep_ms)
        self._schema_number = self._layout.number_of(schema)
        self._layout_text = self._layout.to_text()
        self.save()

    def save(self) -> None:
        row = (self._layout_text, self.latest_due_us, self._first, self._next)
        if row != self._saved_row:
            self._value.update(row)
            self._saved_row = row

    # --- packages --------------------------------------------------------------------------------------------------

    def to_package(self, content: bytes) -> bytes:
        """Return what the state keeps of a record batch with the query's columns."""
        return begin_package(self._schema_number) + content

    def from_package(self, package: bytes) -> bytes:
        """Return the record batch of a package, with the query's columns."""
        number, content = split_package(package)
        if number == self._schema_number:
            return content
        rows = from_content(content, self._layout.stored_schema(number))
        return to_content(conform(rows, self._packing.stored_schema))

    # --- cancelled ids ---------------------------------------------------------------------------------------------

    def add_cancelled_ids(self, content: bytes, now_ms: int) -> None:
        """Store ids to cancel, in the last chunk if it has free space and rows that it concerns may still arrive.

        ``content`` is a record batch of ids. They are cancelled at ``now_ms``, the time of the micro-batch.
        """
        schema = self._schema
        ids = from_content(content, pa.schema([schema.field("id")]))
        new_ids = ids.append_column("cancelled_at_ms", pa.array(np.full(ids.num_rows, now_ms, dtype=np.int64)))
        number = max(self._chunks, default=self._next - 1)  # never a former number: chunks are read from the first on
        last = self._chunks.get(number)
        if last is not None and last.hold_until_ms is None:
            last_ids = from_content(last.content, schema)
            if last_ids.num_rows + new_ids.num_rows <= CHUNK_IDS:
                self._write_chunk(
                    number, Chunk(to_content(concat_batches([last_ids, new_ids])), max(now_ms, last.newest_ms))
                )
                return
        self._write_chunk(number + 1, Chunk(to_content(new_ids), now_ms))

    def remove_expired_cancels(self, now_ms: int) -> None:
        """Remove cancels that cannot concern any row any more.

        ``now_ms`` is the time of this micro-batch. Rows that were due before the previous micro-batch have been
        released.
        """
        if self._first == self._next:
            return
        latest_due_ms = -(-self.latest_due_us // 1000) + self._packing.wheel.resolution_ms
        for number, chunk in list(self._chunks.items()):
            if chunk.over_ms is not None and chunk.over_ms < now_ms:
                del self._chunks[number]
                self._chunk_states.removeKey((number,))
                while self._first < self._next and self._chunk_states.getValue((self._first,)) is None:
                    self._first += 1
                continue
            updated = chunk
            if updated.hold_until_ms is None and now_ms > updated.newest_ms + self._cancel_options.keep_ms:
                updated = replace(updated, hold_until_ms=latest_due_ms)
            if updated.hold_until_ms is not None and updated.over_ms is None and now_ms > updated.hold_until_ms:
                updated = replace(updated, over_ms=now_ms)
            if updated is not chunk:
                self._write_chunk(number, updated)
        self.save()

    def filter_cancelled(self, content: bytes) -> bytes | None:
        """Return a package without its cancelled rows; ``None`` if no row is left."""
        if self._cancels is None or self._first == self._next:
            return content
        rows, cancelled = from_content(content, self._packing.stored_schema), self._cancelled_ids()
        ids = rows.column(rows.schema.get_field_index(self._cancels.id_column))
        indexes = pc.index_in(ids, value_set=cancelled.column("id"))
        if indexes.null_count == rows.num_rows:
            return content
        last_arrival = pc.add(pc.take(cancelled.column("cancelled_at_ms_max"), indexes), self._cancels.keep_ms)
        arrived = rows.column(rows.schema.get_field_index(ARRIVED))
        is_remaining = pc.greater(arrived, last_arrival).fill_null(True).to_numpy(zero_copy_only=False)
        remaining = rows.filter(pa.array(is_remaining, pa.bool_()))
        return to_content(remaining) if remaining.num_rows else None

    @property
    def _cancel_options(self) -> CancelOptions:
        assert self._cancels is not None, "only queries with cancels have ids to cancel"
        return self._cancels

    @property
    def _schema(self) -> pa.Schema:
        id_type = self._packing.schema.field(self._cancel_options.id_column).type
        return pa.schema([("id", id_type), ("cancelled_at_ms", pa.int64())])

    @property
    def _chunks(self) -> dict[int, Chunk]:
        """All chunks with their numbers, oldest first. They are read once."""
        if self._chunk_cache is None:
            rows = ((number, self._chunk_states.getValue((number,))) for number in range(self._first, self._next))
            self._chunk_cache = {number: Chunk(bytes(row[0]), *row[1:]) for number, row in rows if row is not None}
        return self._chunk_cache

    def _write_chunk(self, number: int, chunk: Chunk) -> None:
        self._chunks[number] = chunk
        self._ids = None
        self._chunk_states.updateValue((number,), (chunk.content, chunk.newest_ms, chunk.hold_until_ms, chunk.over_ms))
        self._next = max(self._next, number + 1)

    def _cancelled_ids(self) -> pa.Table:
        """Return each cancelled id once, with the latest time at which it was cancelled."""
        if self._ids is None:
            schema = self._schema
            batches = [from_content(chunk.content, schema) for chunk in self._chunks.values()]
            all_ids = pa.Table.from_batches(batches, schema=schema)
            self._ids = all_ids.group_by("id").aggregate([("cancelled_at_ms", "max")]).combine_chunks()
        return self._ids
