"""How the rows that wait were written: options of the query, and columns. Each slot of the state keeps it as a text.

Rows wait as Arrow record batches without their columns, so each one says with a number with which columns it was
written. A query that starts again with more columns, or with columns in another order, reads the old batches with the
old columns. State of the first format has one set of columns, and batches without a number.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make schemas and fields generic in a type that is known only at run time.

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type

from postdate.errors import PipelineError

FORMAT: Final = 2
"""The version of what this module writes. A later version reads it as well; an earlier one refuses it."""

_HEADER: Final = Struct("<B3xI")
"""Begins each package: the format, and the number of the columns. Eight bytes keep the buffers of Arrow aligned."""

_FIRST_FORMAT_BYTE: Final = 0xFF
"""Begins each package of the first format, because each message of Arrow begins with it."""

ARRIVED: Final = "postdate_arrived_ms"
"""A column of rows that wait, only in jobs with cancels: the time of the micro-batch that brought them."""

QueryOptions = Mapping[str, Any]
"""What must stay the same: ``cancel``, ``due``, ``id``, ``resolution_ms``, ``slots``."""

ColumnReader = Callable[[str], pa.Schema]
"""Returns the columns of the first format, which kept them as a text of Spark, as in ``struct<id:string>``."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the packages of a slot were written.

    Args:
        query: options of the query.
        schemas: columns by number, without :data:`ARRIVED`. The last ones have all columns of those before.
        keep_cancels_ms: how long a cancel concerns later rows; a query may change it. ``None`` without cancels.
    """

    query: QueryOptions
    schemas: tuple[pa.Schema, ...]
    keep_cancels_ms: int | None = None

    @classmethod
    def from_text(cls, text: str, read_columns: ColumnReader) -> Layout:
        """Return the layout that :meth:`to_text` wrote, in this version or an earlier one.

        Raises:
            PipelineError: a later version wrote it.
        """
        content = json.loads(text)
        written_format = content.pop("format", 1)
        if written_format == 1:
            return cls(content, (read_columns(content.pop("columns")),))
        if written_format > FORMAT:
            raise PipelineError(
                f"the rows that wait were stored by a newer version of Postdate (format {written_format}); this one "
                f"reads up to format {FORMAT}"
            )
        schemas = tuple(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(each))) for each in content.pop("schemas"))
        return cls(content, schemas, content.pop("keep_cancels_ms"))

    def to_text(self) -> str:
        schemas = [base64.b64encode(schema.serialize().to_pybytes()).decode() for schema in self.schemas]
        return json.dumps(
            {"format": FORMAT, **self.query, "keep_cancels_ms": self.keep_cancels_ms, "schemas": schemas},
            sort_keys=True,
        )

    def continue_with(self, query: QueryOptions, schema: pa.Schema, keep_cancels_ms: int | None) -> Layout:
        """Return the layout for a query that starts again, perhaps with other columns than before.

        Raises:
            PipelineError: the rows that wait cannot be released by this query.
        """
        changes = [
            f"{name} was {self.query.get(name)!r} and is {query.get(name)!r}"
            for name in sorted({*self.query, *query})
            if self.query.get(name) != query.get(name)
        ]
        changes += _column_changes(self.schemas[-1], schema)
        if changes:
            raise PipelineError(
                f"the rows that wait in this checkpoint were stored with other options: {'; '.join(changes)}. Start "
                f"with those options again, or with a new checkpoint once nothing waits in this one. Only a column "
                f"that may be null can be added, and columns can have another order"
            )
        is_new = not any(schema.equals(each) for each in self.schemas)
        return replace(
            self,
            query=query,
            schemas=(*self.schemas, schema) if is_new else self.schemas,
            keep_cancels_ms=keep_cancels_ms,
        )

    def number_of(self, schema: pa.Schema) -> int:
        """Return the number of these columns."""
        return next(number for number, each in enumerate(self.schemas) if schema.equals(each))

    def stored_schema(self, number: int) -> pa.Schema:
        """Return the columns of packages with this number, as they wait."""
        return add_arrival(self.schemas[number]) if self.query.get("cancel") else self.schemas[number]


def add_arrival(schema: pa.Schema) -> pa.Schema:
    """Return the columns of rows that wait in a job with cancels."""
    return schema.append(pa.field(ARRIVED, pa.int64()))


def begin_package(number: int) -> bytes:
    """Return the header of packages with the columns of this number."""
    return _HEADER.pack(FORMAT, number)


def split_package(package: bytes) -> tuple[int, bytes]:
    """Return the number of the columns of a package, and its record batch.

    Raises:
        PipelineError: a later version wrote it.
    """
    if package[0] == _FIRST_FORMAT_BYTE:
        return 0, package
    package_format, number = _HEADER.unpack_from(package)
    if package_format != FORMAT:
        raise PipelineError(f"a package was stored in format {package_format}; this version reads up to {FORMAT}")
    return number, package[_HEADER.size :]


def conform(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with the columns of ``schema``, in its order. Columns that they do not have are null."""
    arrays = [
        rows.column(field.name) if field.name in rows.schema.names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def match_columns(schema: pa.Schema) -> ColumnReader:
    """Return a reader for the first format that needs no Spark, so that it works on executors.

    Every column that waits is also a column of the query, with the same type. So the text consists of columns of
    ``schema``, in any order.
    """
    texts = {f"{field.name}:{from_arrow_type(field.type).simpleString()}": field for field in schema}

    def read_columns(text: str) -> pa.Schema:
        fields = _match_fields(text.removeprefix("struct<"), texts)
        if fields is None:
            raise PipelineError(
                f"the rows that wait in this checkpoint were stored with other columns: columns was {text!r} and is "
                f"'struct<{','.join(texts)}>'. Start with those columns again, or with a new checkpoint once nothing "
                f"waits in this one. Only a column that may be null can be added, and columns can have another order"
            )
        return pa.schema(fields)

    return read_columns


def _match_fields(text: str, texts: Mapping[str, pa.Field[Any]]) -> list[pa.Field[Any]] | None:
    """Return the columns that a text lists, or ``None``. Names may contain commas, so each column is tried."""
    if text == ">":
        return []
    for each, field in texts.items():
        remaining = text.removeprefix(each)
        if remaining != text and remaining[:1] in {",", ">"}:
            fields = _match_fields(
                remaining.removeprefix(","), {key: value for key, value in texts.items() if key != each}
            )
            if fields is not None:
                return [field, *fields]
    return None


def _column_changes(waiting: pa.Schema, schema: pa.Schema) -> list[str]:
    """Return why rows with the columns ``waiting`` cannot be released with the columns of ``schema``."""
    changes: list[str] = []
    for field in waiting:
        if field.name not in schema.names:
            changes.append(f"the column {field.name!r} is missing")
        elif not schema.field(field.name).type.equals(field.type):
            changes.append(f"the column {field.name!r} was {field.type} and is {schema.field(field.name).type}")
        elif field.nullable and not schema.field(field.name).nullable:
            changes.append(f"the column {field.name!r} could be null and now cannot")
    changes += [
        f"the new column {field.name!r} cannot be null, but is null in the rows that wait"
        for field in schema
        if field.name not in waiting.names and not field.nullable
    ]
    return changes
