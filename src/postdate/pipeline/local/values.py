"""Values of columns as the bytes of texts, in the form that Spark's ``CAST(… AS STRING)`` and ``to_json`` give them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from postdate.errors import PipelineError
from postdate.pipeline.engines import NeedsSpark

_SPARK_NAMES: Final = {
    "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean",
    "uint8": "smallint", "uint16": "int", "uint32": "bigint", "halffloat": "float", "decimal128": "decimal",
}  # fmt: skip


def spark_name(kind: pa.DataType) -> str:
    """Return the name of a type for people, as Spark names it."""
    text = str(kind)
    name, bracket, arguments = text.partition("(")
    return _SPARK_NAMES.get(name, name) + (bracket + arguments).replace(" ", "")


def is_map_of_texts(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) and kind.key_type == kind.item_type == pa.string()


def is_struct_of_texts(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and all(field.type == pa.string() for field in kind)


def to_bytes(name: str, column: Any) -> list[bytes | None]:
    """Return the bytes of each value as a text.

    Raises:
        NeedsSpark: only Spark knows its texts of values of this type.
    """
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return column.cast(pa.binary()).to_pylist()
    if is_map_of_texts(kind) or is_struct_of_texts(kind):
        return to_json(column, ignore_null_fields=False)
    return [None if value is None else value.encode() for value in _texts_of(name, column)]


def _texts_of(name: str, column: Any) -> list[str | None]:
    kind, text_of = column.type, _plain_text
    if pa.types.is_timestamp(kind):
        column, text_of = column.cast(pa.int64()), _time_text
    elif pa.types.is_date32(kind):
        column, text_of = column.cast(pa.int32()), _date_text
    elif pa.types.is_decimal(kind):
        text_of = "{:f}".format
    else:
        check_plain_type(name, kind)
    return [None if value is None else text_of(value) for value in column.to_pylist()]


def check_plain_type(name: str, kind: pa.DataType) -> None:
    """Raise NeedsSpark for a column of another type than texts, times, whole and decimal numbers, or truth values."""
    is_number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    is_time = pa.types.is_timestamp(kind) or pa.types.is_date32(kind)
    if not (is_number or is_time or pa.types.is_string(kind) or pa.types.is_null(kind)):
        raise NeedsSpark(f"the column {name!r} is {spark_name(kind)}")


def _plain_text(value: Any) -> str:
    return str(value).lower()


def to_json(column: Any, *, ignore_null_fields: bool) -> list[bytes | None]:
    """Return maps and structs of texts as JSON, as Spark writes it."""
    if pa.types.is_map(column.type):
        rows = cast("list[Sequence[tuple[str, str | None]] | None]", _decode_all(column))
    else:
        names = [field.name for field in column.type]
        rows = [
            None
            if value is None
            else [(name, value[name]) for name in names if not (ignore_null_fields and value[name] is None)]
            for value in cast("list[dict[str, str | None] | None]", _decode_all(column))
        ]
    return [None if pairs is None else _object_text(pairs) for pairs in rows]


def _decode_all(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        raise NeedsSpark("a map or a struct has a text that is not UTF-8") from error


def _object_text(pairs: Sequence[tuple[str, str | None]]) -> bytes:
    # A name that is there twice stays there twice: its row is set aside later.
    text = ",".join(f"{_json_text(name)}:{_json_text(value)}" for name, value in pairs)
    return f"{{{text}}}".encode()


def _json_text(value: str | None) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"\\u00([0-9a-f]{2})", lambda match: match[0][:2] + match[0][2:].upper(), text)


def _time_text(microseconds: int) -> str:
    days, time = divmod(microseconds, 86_400_000_000)
    seconds, fraction = divmod(time, 1_000_000)
    digits = f".{fraction:06}".rstrip("0").rstrip(".")
    clock = f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{digits}"
    return f"{_date_text(days)} {clock}"


def _date_text(days: int) -> str:
    """Return a day, which may be outside the years 1 to 9999."""
    text = str(np.datetime64(days, "D"))
    number, month_and_day = int(text[:-6]), text[-6:]
    sign = "+" if number > 9_999 else "-" if number < 0 else ""
    return f"{sign}{abs(number):04}{month_and_day}"


def refuse_bytes(kind: pa.DataType, what: str) -> None:
    """Raise PipelineError for a value with bytes in it, which JSON cannot have."""
    if _has_bytes(kind):
        raise PipelineError(f"{what} must be texts, not {spark_name(kind)}; convert them first")


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return _has_bytes(kind.key_type) or _has_bytes(kind.item_type)
    if pa.types.is_struct(kind):
        return any(_has_bytes(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_bytes(kind.value_type)
    return pa.types.is_binary(kind)
