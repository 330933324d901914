"""Cancelled ids of one slot, in its state: some thousands in one value.

A cancel removes rows that wait when it arrives, and rows that arrive within ``keep_ms`` after it. So it is kept until
that time is over and every row that had arrived by then has been due.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make schemas, fields and arrays generic in a type that only the running program knows.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from postdate.pipeline.delay.packing import ARRIVED, CANCELS_SCHEMA_NAMES, from_content, joined, to_content

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
