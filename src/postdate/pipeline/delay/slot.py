"""One slot of the state without its packages: the options it was written with, and the cancelled ids.

A cancel removes rows that wait when it arrives, and rows that arrive within ``keep_ms`` after it. So it is kept until
that time is over and every row that had arrived by then has been due.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make schemas, fields and arrays generic in a type that only the running program knows.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Spark leaves the types in its state open.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import MapState, ValueState
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructField, StructType

from postdate.errors import PipelineError
from postdate.pipeline.delay.packing import ARRIVED, CANCELS_SCHEMA_NAMES, Packing, from_content, joined, to_content

# --- cancelled ids: some thousands in one value -----------------------------------------------------------------------


CHUNK_IDS = 4_096
"""Ids in one value, about; a value is rewritten in each micro-batch with cancels until it is full."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some cancelled ids.

    Args:
        content: a record batch of ids and of their times of cancelling, in milliseconds.
        newest_ms: the latest of these times.
        hold_until_ms: due time of the last row that it may concern; ``None`` while such rows may still arrive.
        over_ms: time of the first micro-batch after ``hold_until_ms``; it released the last rows, so the next one
            forgets the ids.
    """

    content: bytes
    newest_ms: int
    hold_until_ms: int | None = None
    over_ms: int | None = None


class ChunkStore(Protocol):
    """The chunks in the state of one slot."""

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        """Yield all chunks with their numbers, oldest first."""
        ...

    def put(self, number: int, chunk: Chunk) -> None: ...

    def remove(self, number: int) -> None:
        """Remove the chunk with this number; it need not be the oldest."""
        ...


class Cancelled:
    """The cancelled ids of one slot, during one micro-batch; ``keep_ms`` as in the module's docstring."""

    def __init__(self, store: ChunkStore, id_type: pa.DataType, keep_ms: int) -> None:
        self._store, self._keep_ms = store, keep_ms
        self._schema = pa.schema(list(zip(CANCELS_SCHEMA_NAMES, (id_type, pa.int64()), strict=True)))
        self._chunks = dict(store.chunks())
        self._ids: pa.Table | None = None

    def add(self, content: bytes | bytearray) -> None:
        added = from_content(content, self._schema)
        newest = int(pc.max(added.column(1)).as_py())
        number = max(self._chunks, default=-1)
        last = self._chunks.get(number)
        if last is not None and last.hold_until_ms is None:
            held = from_content(last.content, self._schema)
            if held.num_rows + added.num_rows <= CHUNK_IDS:
                self._put(number, Chunk(to_content(joined([held, added])), max(newest, last.newest_ms)))
                return
        self._put(number + 1, Chunk(bytes(content), newest))

    def forget(self, now_ms: int, latest_due_ms: int) -> None:
        """Forget cancels that can concern no row any more.

        Args:
            now_ms: of this micro-batch; rows due before the previous one are gone.
            latest_due_ms: the latest due time of all rows that ever came into the slot.
        """
        for number, chunk in list(self._chunks.items()):
            if chunk.over_ms is not None and chunk.over_ms < now_ms:
                del self._chunks[number]
                self._store.remove(number)
                continue
            aged = chunk
            if aged.hold_until_ms is None and now_ms > aged.newest_ms + self._keep_ms:
                aged = replace(aged, hold_until_ms=latest_due_ms)
            if aged.hold_until_ms is not None and aged.over_ms is None and now_ms > aged.hold_until_ms:
                aged = replace(aged, over_ms=now_ms)
            if aged is not chunk:
                self._put(number, aged)

    def left_of(self, rows: pa.RecordBatch, id_column: str) -> pa.RecordBatch:
        """Return the rows that are not cancelled; ``rows`` itself if none is."""
        known = self._known()
        found = pc.index_in(rows.column(rows.schema.get_field_index(id_column)), value_set=known.column("id"))
        if found.null_count == rows.num_rows:
            return rows
        last_arrival = pc.add(pc.take(known.column("cancelled_at_ms_max"), found), self._keep_ms)
        arrived = rows.column(rows.schema.get_field_index(ARRIVED))
        stays = pc.greater(arrived, last_arrival).fill_null(True).to_numpy(zero_copy_only=False)
        return rows.filter(pa.array(stays, pa.bool_()))

    def _put(self, number: int, chunk: Chunk) -> None:
        self._chunks[number] = chunk
        self._ids = None
        self._store.put(number, chunk)

    def _known(self) -> pa.Table:
        """Return each id once, with its latest time of cancelling."""
        if self._ids is None:
            batches = [from_content(chunk.content, self._schema) for chunk in self._chunks.values()]
            everything = pa.Table.from_batches(batches, schema=self._schema)
            self._ids = everything.group_by("id").aggregate([("cancelled_at_ms", "max")]).combine_chunks()
        return self._ids


# --- the slot ---------------------------------------------------------------------------------------------------------


def struct(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


SLOT = struct(options=StringType(), latest_due_us=LongType(), first_cancelled=LongType(), next_cancelled=LongType())
CANCELLED_KEY = struct(number=LongType())
CANCELLED = struct(content=BinaryType(), newest_ms=LongType(), hold_until_ms=LongType(), over_ms=LongType())


@dataclass(frozen=True, slots=True)
class Cancelling:
    """How rows are cancelled, up to ``keep_ms`` after a cancel; pickled to executors."""

    id_column: str
    keep_ms: int


class Slot:
    """One key of the state during one micro-batch, without its packages. Spark sets the key."""

    def __init__(self, value: ValueState, chunks: MapState, packing: Packing, cancelling: Cancelling | None) -> None:
        self._value, self._packing, self._cancelling = value, packing, cancelling
        row = value.get()
        self._saved = None if row is None else tuple(row)
        self._options, self.latest_due_us, self._first, self._next = self._saved or (None, 0, 0, 0)
        self._chunk_states = chunks
        self._known: Cancelled | None = None

    def compare(self, options: Mapping[str, Any]) -> None:
        """Keep the query's options in a new state; raise PipelineError if an old one was written with others."""
        if self._options is None:
            self._options = json.dumps(dict(options))
            return
        before = json.loads(self._options)
        if before != options:
            differing = [
                f"{name} was {before.get(name)!r} and is {options.get(name)!r}"
                for name in sorted({*before, *options})
                if before.get(name) != options.get(name)
            ]
            raise PipelineError(
                "the rows that wait in this checkpoint were stored with other options: "
                + "; ".join(differing)
                + ". Start with those options again, or with a new checkpoint once nothing waits in this one"
            )

    def save(self) -> None:
        row = (self._options, self.latest_due_us, self._first, self._next)
        if row != self._saved:
            self._value.update(row)
            self._saved = row

    # --- cancels: :class:`postdate.pipeline.delay.slot.ChunkStore` ------------------------------------------------

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        for number in range(self._first, self._next):
            row = self._chunk_states.getValue((number,))
            if row is not None:
                content, newest_ms, hold_until_ms, over_ms = row
                yield number, Chunk(bytes(content), newest_ms, hold_until_ms, over_ms)

    def put(self, number: int, chunk: Chunk) -> None:
        self._chunk_states.updateValue((number,), (chunk.content, chunk.newest_ms, chunk.hold_until_ms, chunk.over_ms))
        self._next = max(self._next, number + 1)

    def remove(self, number: int) -> None:
        self._chunk_states.removeKey((number,))
        while self._first < self._next and self._chunk_states.getValue((self._first,)) is None:
            self._first += 1

    def cancel(self, content: bytes) -> None:
        self._cancelled.add(content)

    def forget(self, now_ms: int) -> None:
        if self._first < self._next:
            self._cancelled.forget(now_ms, -(-self.latest_due_us // 1000) + self._packing.wheel.resolution_ms)
            self.save()

    def left_of(self, content: bytes) -> bytes | None:
        """Return a package without its cancelled rows; ``None`` if no row is left."""
        if self._cancelling is None or self._first == self._next:
            return content
        rows = from_content(content, self._packing.packed_schema)
        left = self._cancelled.left_of(rows, self._cancelling.id_column)
        if left is rows:
            return content
        return to_content(left) if left.num_rows else None

    @property
    def _cancelled(self) -> Cancelled:
        if self._known is None:
            assert self._cancelling is not None, "only queries with cancels have ids to cancel"
            id_type = self._packing.schema.field(self._cancelling.id_column).type
            self._known = Cancelled(self, id_type, self._cancelling.keep_ms)
        return self._known
