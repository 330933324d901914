"""The columns in which Spark sees messages, records and queues, and how pages of a store become Arrow batches."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make schemas, fields and arrays generic in a type that only the running program knows.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from postdate.errors import PipelineError
from postdate.messages import decode_headers
from postdate.ports import RecordKind

INSTANT = pa.timestamp("us", tz="UTC")
_HEADERS = pa.map_(pa.string(), pa.string())

MESSAGE_SCHEMA = (
    "message_id string, destination string, due timestamp, expires_at timestamp, "
    "headers map<string,string>, body binary"
)
"""What is written to a store, in Spark's words."""

_ARROW_SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "pending": pa.schema(
            {
                "message_id": pa.string(),
                "destination": pa.string(),
                "due": INSTANT,
                "expires_at": INSTANT,
                "headers": _HEADERS,
                "body": pa.binary(),
                "number_of_failures": pa.int32(),
            }
        ),
        "records": pa.schema(
            {
                "kind": pa.string(),
                "message_id": pa.string(),
                "at": INSTANT,
                "due": INSTANT,
                "destination": pa.string(),
                "detail": pa.string(),
            }
        ),
        "queued": pa.schema({"message_id": pa.string(), "queue": pa.string(), "due": INSTANT}),
    }
)

_SPARK_TYPES: Mapping[pa.DataType, str] = MappingProxyType(
    {
        pa.string(): "string",
        pa.binary(): "binary",
        pa.int32(): "int",
        INSTANT: "timestamp",
        _HEADERS: "map<string,string>",
    }
)

_KIND_NAMES: Mapping[int, str] = MappingProxyType({kind.value: kind.name.lower() for kind in RecordKind})


def arrow_schema(what: str, columns: Sequence[str] = ()) -> pa.Schema:
    """Return the columns of ``pending``, ``records`` or ``queued``; all of them, or those named, in that order.

    Raises:
        PipelineError: there is no such thing to read, or it has no such column.
    """
    if what not in _ARROW_SCHEMAS:
        raise PipelineError(f"there is nothing called {what!r} to read; choose one of {', '.join(_ARROW_SCHEMAS)}")
    schema = _ARROW_SCHEMAS[what]
    unknown = [column for column in columns if column not in schema.names]
    if unknown:
        raise PipelineError(f"{what} has no column {unknown[0]!r}; it has {', '.join(schema.names)}")
    return pa.schema([schema.field(column) for column in columns]) if columns else schema


def spark_schema(schema: pa.Schema) -> str:
    """Return an Arrow schema of this module in Spark's words."""
    return ", ".join(f"{field.name} {_SPARK_TYPES[field.type]}" for field in schema)


def to_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return a page of a scan as one Arrow batch.

    Args:
        rows: plain rows with the columns of ``schema``; times in microseconds since 1970 UTC, headers as JSON text.
        schema: from :func:`arrow_schema`.
    """
    columns = zip(*rows, strict=True)
    arrays = [_to_array(field, column) for field, column in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _to_array(field: pa.Field[Any], values: Sequence[Any]) -> pa.Array[Any]:
    if field.type == INSTANT:
        return pa.array(values, pa.int64()).cast(INSTANT)
    convert = _CONVERSIONS.get(field.name)
    return pa.array(values if convert is None else [convert(value) for value in values], field.type)


def _header_pairs(text: str) -> list[tuple[str, str]]:
    return list(decode_headers(text).items())


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"headers": _header_pairs, "kind": _KIND_NAMES.__getitem__}
)
