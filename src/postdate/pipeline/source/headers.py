"""Turns headers from Spark's maps into the JSON text of stores. Runs on executors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make arrays generic in a type that only the running program knows.

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # the stubs do not know what its functions do with plain values

_ESCAPED: Final = r"[\x00-\x1f\x22\\]"
"""A text with none of these is JSON as it is, between quotes."""


def with_headers_as_text(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with their headers, if they are a map, as JSON text; headers that are text are not checked here."""
    position = rows.schema.get_field_index("headers")
    if position < 0 or not pa.types.is_map(rows.column(position).type):
        return rows
    return rows.set_column(position, "headers", _texts(rows.column(position)))


def _texts(maps: Any) -> pa.Array[Any]:
    first, last = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
    offsets: Any = pc.subtract(maps.offsets, first)  # a slice has the pairs of its neighbours behind it
    keys, values = (each.slice(first, last - first) for each in (maps.keys, maps.items))
    if _needs_care(offsets, keys, values):
        return pa.array([None if pairs is None else _encoded(pairs) for pairs in maps.to_pylist()], pa.string())
    # No text becomes a Python object: pairs are put together in their column, and then joined by the rows' offsets.
    pairs = pc.binary_join_element_wise('"', keys, '":"', values, '"', "")
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, pairs), ",")
    objects = pc.binary_join_element_wise("{", joined, "}", "")
    return pc.if_else(maps.is_null(), pa.scalar(None, pa.string()), objects)


def _needs_care(offsets: Any, keys: pa.Array[Any], values: pa.Array[Any]) -> bool:
    """Return whether a name has no value, or is twice in a row, or JSON escapes a character."""
    if values.null_count or any(pc.any(pc.match_substring_regex(each, _ESCAPED)).as_py() for each in (keys, values)):
        return True
    names = pa.ListArray.from_arrays(offsets, keys)
    flat = pa.table({"row": pc.list_parent_indices(names), "name": keys})
    return flat.group_by(["row", "name"]).aggregate([]).num_rows < flat.num_rows


def _encoded(pairs: list[tuple[str, str | None]]) -> str:
    return msgspec.json.encode(dict(pairs)).decode()
