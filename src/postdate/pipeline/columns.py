"""The columns in which Spark sees messages, records and queues; turns pages of a store into Arrow batches."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make schemas, fields and arrays generic in a type that only the running program knows.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, cast

import msgspec
import pyarrow as pa
import pyarrow.compute

from postdate.messages import decode_headers
from postdate.ports import RecordKind
from postdate.ports.scanning import SCANNED, TIMES, WRITTEN, check_scanned

pc: Any = pyarrow.compute  # the stubs do not know what its functions do with plain values
INSTANT = pa.timestamp("us", tz="UTC")
_HEADERS = pa.map_(pa.string(), pa.string())

_ARROW_TYPES: Mapping[str, pa.DataType] = MappingProxyType(
    {
        **dict.fromkeys(TIMES, INSTANT),
        "headers": _HEADERS,
        "body": pa.binary(),
        "number": pa.int64(),
        "number_of_failures": pa.int32(),
    }
)
"""Of the columns that are no texts."""

_SPARK_TYPES: Mapping[pa.DataType, str] = MappingProxyType(
    {
        pa.string(): "string",
        pa.binary(): "binary",
        pa.int32(): "int",
        pa.int64(): "long",
        INSTANT: "timestamp",
        _HEADERS: "map<string,string>",
    }
)

_KIND_NAMES: Mapping[int, str] = MappingProxyType({kind.value: kind.name.lower() for kind in RecordKind})
_KINDS = pa.array([_KIND_NAMES.get(number) for number in range(max(_KIND_NAMES) + 1)], pa.string())
_DECODE_ALL = msgspec.json.Decoder(list[dict[str, str]]).decode


def arrow_schema(what: str, columns: Sequence[str] = ()) -> pa.Schema:
    """Return the given columns, or all, of ``pending``, ``records`` or ``queued``; refuse unknown names."""
    check_scanned(what, columns)
    return pa.schema([(name, _ARROW_TYPES.get(name, pa.string())) for name in columns or SCANNED[what]])


def quoted(name: str) -> str:
    """Return a column's name quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def spark_types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: _SPARK_TYPES[field.type] for field in schema}


def spark_schema(schema: pa.Schema) -> str:
    return ", ".join(f"{name} {spark_type}" for name, spark_type in spark_types(schema).items())


MESSAGE_SCHEMA = spark_schema(arrow_schema("pending", WRITTEN))
"""Columns that are written to a store, as a Spark schema."""

LEDGER_ARROW = arrow_schema("records", SCANNED["records"][1:])
"""A record in the ledger of a sweep; stores and archives have its number, too."""


def to_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return a page of a scan as one Arrow batch.

    ``rows`` have the columns of ``schema``; times in microseconds since 1970 UTC, headers as JSON text.
    """
    columns = zip(*rows, strict=True)
    arrays = [_to_array(field, column) for field, column in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch of :class:`postdate.ports.ScannableStore` with Spark's types."""
    return pa.record_batch([_seen(field, batch.column(field.name)) for field in schema], schema=schema)


def _seen(field: pa.Field[Any], column: pa.Array[Any]) -> pa.Array[Any]:
    if field.type == _HEADERS:
        return _maps(column)
    if field.name == "kind":
        return pa.DictionaryArray.from_arrays(column.cast(pa.int32()), _KINDS).cast(pa.string())
    return column.cast(field.type)


def _maps(texts: pa.Array[Any]) -> pa.Array[Any]:
    """Return JSON objects as maps, parsed as one list, which creates no tuple for each pair."""
    whole = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts), ",")[0]
    try:
        headers = _DECODE_ALL(b"[" + whole.as_buffer().to_pybytes() + b"]")
    except (msgspec.MsgspecError, ValueError):  # not even the number of objects is known then; one of them will say so
        headers = [decode_headers(text) for text in cast("list[str]", texts.to_pylist())]
    return _map_array(headers)


def _map_array(headers: Sequence[Mapping[str, str]]) -> pa.Array[Any]:
    ends = accumulate((len(each) for each in headers), initial=0)
    names = [name for each in headers for name in each]
    values = [value for each in headers for value in each.values()]
    starts: Any = pa.array(ends, pa.int32())
    return pa.MapArray.from_arrays(starts, pa.array(names, pa.string()), pa.array(values, pa.string()))


def _to_array(field: pa.Field[Any], values: Sequence[Any]) -> pa.Array[Any]:
    if field.type == INSTANT:
        return pa.array(values, pa.int64()).cast(INSTANT)
    if field.type == _HEADERS:
        return _map_array([decode_headers(text) for text in values])
    if field.name == "kind":
        return pa.array([_KIND_NAMES[number] for number in values], pa.string())
    return pa.array(values, field.type)
