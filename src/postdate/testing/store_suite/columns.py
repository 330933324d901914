"""Arrow batches for the checks of columns; imported only for a store that has columns."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make arrays generic in a type that is only known at run time.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from postdate.clock import to_microseconds
from postdate.messages import DelayedMessage, encode_headers
from postdate.ports import Scan, ScannableStore, ScanPart
from postdate.ports.scanning import TIME_COLUMNS, WRITTEN_COLUMNS
from postdate.testing.conformance import expect, expect_equal

_INSTANT = pa.timestamp("us", tz="UTC")
_TYPES: dict[str, pa.DataType] = {**dict.fromkeys(TIME_COLUMNS, _INSTANT), "body": pa.binary()}
_NUMBERS = frozenset({"number", "kind", "number_of_failures"})


def message_batch(messages: Sequence[DelayedMessage]) -> pa.RecordBatch:
    """Return messages as a batch for :meth:`postdate.ports.ScannableStore.store_columns`."""
    return pa.record_batch(
        {name: _column(name, [getattr(each, name) for each in messages]) for name in WRITTEN_COLUMNS}
    )


def _column(name: str, values: Sequence[Any]) -> pa.Array[Any]:
    if name in TIME_COLUMNS:
        return pa.array([value and to_microseconds(value) for value in values], pa.int64()).cast(_INSTANT)
    encoded = [encode_headers(value) for value in values] if name == "headers" else values
    return pa.array(encoded, _TYPES.get(name, pa.string()))


def rows_of_columns(store: ScannableStore, scan: Scan, parts: Sequence[ScanPart]) -> list[tuple[Any, ...]]:
    """Scan columns, check their types, and return their rows."""
    rows: list[tuple[Any, ...]] = []
    for part in parts:
        for batch in store.scan_columns(scan, part):
            expect_equal(tuple(batch.schema.names), scan.columns, "columns of a batch")
            columns = [_to_plain(name, batch.column(name)) for name in scan.columns]
            rows.extend(zip(*columns, strict=True) if columns else [()] * batch.num_rows)
    return rows


def _to_plain(name: str, column: pa.Array[Any]) -> list[Any]:
    if name in _NUMBERS:
        expect(pa.types.is_integer(column.type), f"{name} is {column.type}, which is no whole number")
    else:
        expect_equal(column.type, _TYPES.get(name, pa.string()), f"type of {name}")
    return (column.cast(pa.int64()) if column.type == _INSTANT else column).to_pylist()
