"""One slot of the state without its packages: the options it was written with, and the cancelled ids."""

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

    # --- cancels: :class:`postdate.pipeline.delay.cancels.ChunkStore` ------------------------------------------------

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
