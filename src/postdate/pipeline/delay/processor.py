"""Waiting rows in Spark's state: one key a slot, with packages by place. Runs on executors, one object a task.

Spark passes the packages that arrived, then the timers that expired by the time of the micro-batch, which is the
driver's time. A timer of level 0 releases its rows. A timer above it spreads its rows over narrower buckets.

Which rows are released, wait or are cancelled depends only on the state, the rows and the time of the micro-batch, and
on no other clock. Spark stores that time in the checkpoint, so a repeated micro-batch releases the same rows: a sink
that accepts each batch id once gets each row once.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Spark does not declare the types of its state.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow.lib import concat_batches
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import BinaryType, LongType

from postdate.pipeline.delay.layout import ARRIVED
from postdate.pipeline.delay.packing import (
    CANCELS,
    HELLO,
    OVERDUE,
    PACKAGE_BYTES,
    PackOptions,
    due_us,
    from_content,
    split_by_keys,
    to_content,
)
from postdate.pipeline.delay.slot import CANCELLED, CANCELLED_KEY, SLOT, CancelOptions, Slot, struct

EMITTED = "content binary"

ROWS_SPREAD = 100_000
"""Rows of wide buckets that a task spreads in one micro-batch. A larger number would delay rows that are due."""

_MERGED_PACKAGES, _MERGED_BYTES = 64, 256 << 10
"""Small packages in a wide bucket are merged when there are this many of them, up to this size in bytes."""


_PLACE = struct(place=LongType())
_INDEX = struct(first=LongType(), fresh=LongType(), next=LongType(), fresh_bytes=LongType())
_PACKAGE_KEY = struct(place=LongType(), number=LongType())
_PACKAGE = struct(content=BinaryType())


@dataclass
class _Index:
    """Numbers of the packages of a place: from ``first`` up to ``next``. Those from ``fresh`` on are not merged yet."""

    first: int = 0
    fresh: int = 0
    next: int = 0
    fresh_bytes: int = 0


class DelayProcessor(StatefulProcessor):
    """Keeps packages until they are due. ``options`` must stay the same as long as rows wait, except columns."""

    def __init__(self, packing: PackOptions, options: Mapping[str, Any], cancel_options: CancelOptions | None) -> None:
        self._packing, self._wheel = packing, packing.wheel
        self._options = options
        self._cancel_options = cancel_options
        self._rows_spread = 0
        self._slots: dict[int, Slot] = {}

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state. Spark calls this once in each task, and once on the driver."""
        self._handle = handle
        self._values = handle.getValueState("slot", SLOT)
        self._indexes = handle.getMapState("places", _PLACE, _INDEX)
        self._packages = handle.getMapState("packages", _PACKAGE_KEY, _PACKAGE)
        self._cancelled = handle.getMapState("cancelled", CANCELLED_KEY, CANCELLED)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[Any],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Keep rows that wait and release due rows, after applying the cancels of the same micro-batch."""
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        slot = self._load_slot(key[0], now_ms)
        due_contents = self._add_packages(slot, rows, now_ms)
        if self._cancel_options is not None:
            due_contents = iter(list(due_contents))
        yield from self._emit_frames(slot, due_contents)
        slot.save()

    def handleExpiredTimer(  # noqa: N802 - Spark's name
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Release the rows of a narrow bucket, or spread the rows of a wide one."""
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        slot = self._load_slot(key[0], now_ms)
        place = self._wheel.place_of(expiredTimerInfo.getExpiryTimeInMs())
        if self._wheel.level(place):
            yield from self._emit_frames(slot, self._split_bucket(slot, place, now_ms))
        else:
            yield from self._emit_frames(slot, self._remove_packages(slot, place, self._load_index(place)))
            self._indexes.removeKey((place,))

    def close(self) -> None:
        """Do nothing, because Spark closes the state."""

    def _add_packages(self, slot: Slot, frames: Iterator[Any], now_ms: int) -> Iterator[bytes]:
        """Keep rows that wait and add cancels; yield the rows that are due already."""
        indexes: dict[int, _Index] = {}
        for frame in frames:
            for _, place, last_due_us, content in frame.itertuples(index=False):
                if place == HELLO:
                    continue
                if place == CANCELS:
                    slot.add_cancelled_ids(content, now_ms)
                    continue
                slot.latest_due_us = max(slot.latest_due_us, int(last_due_us))
                for row_place, part in self._split_by_place(content, int(place), now_ms):
                    if row_place == OVERDUE:
                        yield part
                    else:
                        self._add_package(slot, indexes, row_place, part)
        self._save_indexes(slot, indexes)

    def _split_by_place(self, content: bytes, place: int, now_ms: int) -> Iterator[tuple[int, bytes]]:
        """Yield the rows of a package that arrives, by their place at the time of the micro-batch.

        The executor grouped them by its own clock into ``place``, which is nearly always right for all of them. Then
        the package is kept unchanged.
        """
        rows = from_content(content, self._packing.schema)
        places = self._wheel.places(due_us(rows, self._packing.due), now_ms)
        if self._packing.has_cancels:
            rows = rows.append_column(ARRIVED, pa.array(np.full(rows.num_rows, now_ms, dtype=np.int64)))
        elif (places == place).all():
            yield place, content
            return
        for (row_place,), part in split_by_keys(rows, places):
            yield row_place, to_content(part)

    # --- slots -----------------------------------------------------------------------------------------------------

    def _load_slot(self, number: int, now_ms: int) -> Slot:
        """Return the slot, loaded once in a micro-batch."""
        if number not in self._slots:
            slot = Slot(self._values, self._cancelled, self._packing, self._cancel_options)
            slot.continue_layout(self._options)
            slot.remove_expired_cancels(now_ms)
            self._slots[number] = slot
        return self._slots[number]

    def _emit_frames(self, slot: Slot, contents: Iterator[bytes]) -> Iterator[pd.DataFrame]:
        """Yield packages without cancelled rows, several in one frame."""
        packages: list[bytes] = []
        size = 0
        for content in contents:
            remaining = slot.filter_cancelled(content)
            if remaining is not None:
                packages.append(remaining)
                size += len(remaining)
            if size >= PACKAGE_BYTES:
                yield pd.DataFrame({"content": packages})
                packages, size = [], 0
        if packages:
            yield pd.DataFrame({"content": packages})

    # --- places ----------------------------------------------------------------------------------------------------

    def _load_index(self, place: int) -> _Index:
        row = self._indexes.getValue((place,))
        return _Index() if row is None else _Index(*row)

    def _add_package(self, slot: Slot, indexes: dict[int, _Index], place: int, content: bytes) -> None:
        """Add a package to a place; :meth:`_save_indexes` writes the indexes."""
        if place not in indexes:
            indexes[place] = self._load_index(place)
            if not indexes[place].next:
                self._handle.registerTimer(self._wheel.timer_ms(place))
        index = indexes[place]
        self._packages.updateValue((place, index.next), (slot.to_package(content),))
        index.next += 1
        index.fresh_bytes += len(content)

    def _save_indexes(self, slot: Slot, indexes: Mapping[int, _Index]) -> None:
        for place, index in indexes.items():
            if self._wheel.level(place) and index.next - index.fresh >= _MERGED_PACKAGES:
                self._merge_packages(slot, place, index)
            self._indexes.updateValue((place,), astuple(index))

    def _merge_packages(self, slot: Slot, place: int, index: _Index) -> None:
        """Merge the fresh packages if they are small.

        Otherwise rows that arrive one by one would each stay a package.
        """
        if index.fresh_bytes <= _MERGED_BYTES:
            start = index.fresh
            batches = [
                self._open_package(content)
                for content in self._remove_packages(slot, place, _Index(first=start, next=index.next))
            ]
            self._packages.updateValue((place, start), (slot.to_package(to_content(concat_batches(batches))),))
            index.next = start + 1
        index.fresh, index.fresh_bytes = index.next, 0

    def _remove_packages(self, slot: Slot, place: int, index: _Index) -> Iterator[bytes]:
        """Remove the packages of a place, and yield their record batches."""
        while index.first < index.next:
            key = (place, index.first)
            row = self._packages.getValue(key)
            assert row is not None, f"package {key} is in the index, so it is in the state"
            self._packages.removeKey(key)
            index.first += 1
            yield slot.from_package(bytes(row[0]))

    def _split_bucket(self, slot: Slot, place: int, now_ms: int) -> Iterator[bytes]:
        """Spread the rows of a wide bucket over narrower ones. Yield the rows that are due by now.

        This stops after :data:`ROWS_SPREAD` rows and continues in the next micro-batch, but always finishes before the
        bucket begins. So no due row stays behind in a wide bucket.
        """
        index = self._load_index(place)
        later_timer = self._wheel.later_timer_ms(place, now_ms)
        narrower_indexes: dict[int, _Index] = {}
        for content in self._remove_packages(slot, place, index):
            remaining = slot.filter_cancelled(content)
            if remaining is not None:
                rows = self._open_package(remaining)
                self._rows_spread += rows.num_rows
                places = self._wheel.places(due_us(rows, self._packing.due), now_ms, self._wheel.level(place))
                for (narrower_place,), part in split_by_keys(rows, places):
                    if narrower_place == OVERDUE:
                        yield to_content(part)
                    else:
                        self._add_package(slot, narrower_indexes, narrower_place, to_content(part))
            if self._rows_spread >= ROWS_SPREAD and later_timer is not None:
                break
        self._save_indexes(slot, narrower_indexes)
        if later_timer is not None and index.first < index.next:
            index.fresh = max(index.fresh, index.first)
            self._indexes.updateValue((place,), astuple(index))
            self._handle.registerTimer(later_timer)
        else:
            self._indexes.removeKey((place,))

    def _open_package(self, content: bytes) -> pa.RecordBatch:
        return from_content(content, self._packing.stored_schema)
