"""One slot of the state, apart from its packages: the options it was written with, and the ids that were cancelled."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Spark leaves the types in its state open.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.stateful_processor import MapState, ValueState
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructField, StructType

from postdate.errors import PipelineError
from postdate.pipeline.delay.cancels import Cancelled, Chunk
from postdate.pipeline.delay.packing import Packing, from_content, to_content


def struct(**fields: DataType) -> StructType:
    """Return the schema of a key or a value in the state."""
    return StructType([StructField(name, kind) for name, kind in fields.items()])


SLOT = struct(options=StringType(), latest_due_us=LongType(), first_cancelled=LongType(), next_cancelled=LongType())
CANCELLED_KEY = struct(number=LongType())
CANCELLED = struct(content=BinaryType(), newest_ms=LongType(), hold_until_ms=LongType(), over_ms=LongType())


@dataclass(frozen=True, slots=True)
class Cancelling:
    """How rows are cancelled; pickled to executors.

    Args:
        id_column: of the rows.
        keep_ms: how long a cancel also concerns rows that arrive after it.
    """

    id_column: str
    keep_ms: int


class Slot:
    """One key of the state during one micro-batch, apart from its packages. The key is set by Spark."""

    def __init__(self, value: ValueState, chunks: MapState, packing: Packing, cancelling: Cancelling | None) -> None:
        self._value, self._packing, self._cancelling = value, packing, cancelling
        row = value.get()
        self._saved = None if row is None else tuple(row)
        self._options, self.latest_due_us, self._first, self._next = self._saved or (None, 0, 0, 0)
        self._chunk_states = chunks
        self._known: Cancelled | None = None

    def compare(self, options: Mapping[str, Any]) -> None:
        """Take the options of the query over, or make sure that they are those the state was written with.

        Raises:
            PipelineError: they differ.
        """
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
        """Write what has changed."""
        row = (self._options, self.latest_due_us, self._first, self._next)
        if row != self._saved:
            self._value.update(row)
            self._saved = row

    # --- cancels: :class:`postdate.pipeline.delay.cancels.ChunkStore` ------------------------------------------------

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        """Return all chunks with their numbers, oldest first."""
        for number in range(self._first, self._next):
            row = self._chunk_states.getValue((number,))
            if row is not None:
                content, newest_ms, hold_until_ms, over_ms = row
                yield number, Chunk(bytes(content), newest_ms, hold_until_ms, over_ms)

    def put(self, number: int, chunk: Chunk) -> None:
        """Store a chunk under its number."""
        self._chunk_states.updateValue((number,), (chunk.content, chunk.newest_ms, chunk.hold_until_ms, chunk.over_ms))
        self._next = max(self._next, number + 1)

    def remove(self, number: int) -> None:
        """Forget the chunk with this number."""
        self._chunk_states.removeKey((number,))
        while self._first < self._next and self._chunk_states.getValue((self._first,)) is None:
            self._first += 1

    def cancel(self, content: bytes) -> None:
        """Take a package of ids up."""
        self._cancelled.add(content)

    def forget(self, now_ms: int) -> None:
        """Forget cancels that can concern no row any more."""
        if self._first < self._next:
            self._cancelled.forget(now_ms, -(-self.latest_due_us // 1000) + self._packing.wheel.resolution_ms)
            self.save()

    def left_of(self, content: bytes) -> bytes | None:
        """Return a package without the rows that were cancelled; ``None`` if nothing is left."""
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
