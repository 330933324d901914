"""The columns in which Spark sees messages, records and queues, as Arrow batches; and rows of Arrow as messages.

Pages of a store become batches with the columns of :func:`arrow_schema`. Rows that become messages for a store have the
columns of :data:`MESSAGE_SCHEMA`, in any order; ``expires_at``, ``headers`` and ``body`` may be missing or null.
Headers are a map, or text that is a JSON object. A value in it that is not text becomes its JSON text, exactly as it is
written.

Most rows never become Python objects: Arrow decides for a whole batch which rows are certainly messages. The other
rows, good or bad, are checked one by one, by the message itself. A row becomes a message unchanged or not at all: text
that is not UTF-8, and headers with a name twice, are refused. Runs on executors.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make schemas, fields and arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
import pyarrow as pa
import pyarrow.compute
from pyarrow.lib import concat_batches

from postdate.clock import EARLIEST, LATEST, from_microseconds, to_microseconds
from postdate.errors import InvalidHeaders, InvalidTimestamp, PostdateError
from postdate.messages import (
    DESTINATION_LIMIT,
    MESSAGE_ID_LIMIT,
    OF_THE_STORE,
    OWN_PREFIX,
    DelayedMessage,
    check_destination,
    check_id,
    decode_headers,
    encode_headers,
    size_in_bytes,
)
from postdate.pipeline.texts import json_pairs
from postdate.ports import RecordKind
from postdate.ports.scanning import SCANNED_COLUMNS, TIME_COLUMNS, WRITTEN_COLUMNS, check_scan

pc: Any = pyarrow.compute  # The stubs do not declare how its functions treat plain values.

Batches = Iterator[pa.RecordBatch]
"""The input and the output of a task of Spark."""

INSTANT = pa.timestamp("us", tz="UTC")
CALENDAR = to_microseconds(EARLIEST), to_microseconds(LATEST)
"""The years 1 to 9999, which are valid for a message: the first and the last microsecond, counted from 1970."""

TIME_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS][XXX]",
        "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]",
    }
)
"""Options of Spark for JSON and CSV with times in microseconds. Its own default cuts them to milliseconds."""

_HEADERS = pa.map_(pa.string(), pa.string())

_ARROW_TYPES: Mapping[str, pa.DataType] = MappingProxyType(
    {
        **dict.fromkeys(TIME_COLUMNS, INSTANT),
        "headers": _HEADERS,
        "body": pa.binary(),
        "number": pa.int64(),
        "number_of_failures": pa.int32(),
    }
)
"""Types of the columns that are not texts."""

_SPARK_TYPES: Mapping[pa.DataType, str] = MappingProxyType(
    {
        pa.string(): "string",
        pa.binary(): "binary",
        pa.int32(): "int",
        pa.int64(): "long",
        INSTANT: "timestamp",
        _HEADERS: "map<string,string>",
        pa.map_(pa.string(), pa.binary()): "map<string,binary>",
    }
)

_KIND_NAMES: Mapping[int, str] = MappingProxyType({kind.value: kind.name.lower() for kind in RecordKind})
_KINDS = pa.array([_KIND_NAMES.get(number) for number in range(max(_KIND_NAMES) + 1)], pa.string())
_DECODE_ALL = msgspec.json.Decoder(list[dict[str, str]]).decode


def arrow_schema(table: str, columns: Sequence[str] = ()) -> pa.Schema:
    """Return the given columns, or all, of ``pending``, ``records`` or ``queued``. Refuse unknown names."""
    check_scan(table, columns)
    return pa.schema([(name, _ARROW_TYPES.get(name, pa.string())) for name in columns or SCANNED_COLUMNS[table]])


def quote_name(name: str) -> str:
    """Return a column's name quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def spark_types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: _SPARK_TYPES[field.type] for field in schema}


def spark_schema(schema: pa.Schema) -> str:
    return ", ".join(f"{name} {spark_type}" for name, spark_type in spark_types(schema).items())


MESSAGE_SCHEMA = spark_schema(arrow_schema("pending", WRITTEN_COLUMNS))
"""Columns that are written to a store, as a Spark schema."""

LEDGER_ARROW = arrow_schema("records", SCANNED_COLUMNS["records"][1:])
"""A record in the ledger of a sweep. Stores and lakes also have the number of a record."""


def to_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows, such as a page of a scan, as one Arrow batch.

    ``rows`` have the columns of ``schema``; times in microseconds since 1970 UTC, headers as JSON text.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [_to_array(field, column) for field, column in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch of :class:`postdate.ports.ScannableStore` with Spark's types."""
    return pa.record_batch([_convert_column(field, batch.column(field.name)) for field in schema], schema=schema)


def _convert_column(field: pa.Field[Any], column: pa.Array[Any]) -> pa.Array[Any]:
    if field.type == _HEADERS:
        return _parse_headers(column)
    if field.name == "kind":
        return pa.DictionaryArray.from_arrays(column.cast(pa.int32()), _KINDS).cast(pa.string())
    return column.cast(field.type)


def _parse_headers(texts: pa.Array[Any]) -> pa.Array[Any]:
    """Return JSON objects as maps, parsed as one list, which creates no tuple for each pair."""
    return _map_array(_decode_all_headers(texts))


def _decode_all_headers(texts: pa.Array[Any]) -> list[dict[str, str]]:
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts), ",")[0]
    try:
        return _DECODE_ALL(b"[" + joined.as_buffer().to_pybytes() + b"]")
    # Here not even the number of objects is known. One of the calls below raises the error of the bad object.
    except (msgspec.MsgspecError, ValueError):
        return [decode_headers(text) for text in cast("list[str]", texts.to_pylist())]


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


# --- rows as messages -------------------------------------------------------------------------------------------------


_Headers = Sequence[tuple[str, str]] | str
_Row = tuple[str, str, int, int | None, _Headers | None, bytes | None]
_Mask = Any
"""An Arrow array of boolean values, one for each row."""

MESSAGE_COLUMNS: Final = pa.schema(
    [
        field.with_type(pa.string()) if field.name == "headers" else field
        for field in arrow_schema("pending", WRITTEN_COLUMNS)
    ]
)
"""Columns of :meth:`postdate.ports.ScannableStore.store_columns`."""

_BEYOND_DOUBT_NOT_BLANK: Final = r"[!-~\p{L}\p{N}]"
_NUL: Final = r"\x00"
_OF_THE_STORE: Final = pa.array(sorted(OF_THE_STORE))
NOT_UTF8: Final = "not_utf8"
"""Code of rows with a text that is not UTF-8."""
_TEXT_COLUMNS: Final = ("message_id", "destination", "headers", "body")
"""Columns that may be texts."""
_CHARACTER: Final = r'(?:[^"\\\x00-\x1f]|\\["\\bfnrt])'
_HEADER: Final = f'"{_CHARACTER}+":"{_CHARACTER}*"'
_HEADERS_WRITTEN: Final = rf"^\{{(?:{_HEADER}(?:,{_HEADER})*)?\}}\z"
r"""Headers as :func:`postdate.messages.encode_headers` writes them, except for characters that need ``\u``."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not a message: its position in the batch from 0, and code and detail of the error."""

    position: int
    code: str
    detail: str


def messages_of(batch: pa.RecordBatch) -> list[DelayedMessage]:
    """Return the messages of a batch with :data:`MESSAGE_COLUMNS` from :func:`split_columns`."""
    return [
        DelayedMessage.from_store(
            message_id,
            from_microseconds(due),
            destination,
            decode_headers(cast("str", headers)),
            cast("bytes", body),
            None if expires_at is None else from_microseconds(expires_at),
            0,
        )
        for message_id, destination, due, expires_at, headers, body in _rows(batch)
    ]


def split_columns(
    batch: pa.RecordBatch, largest_message_bytes: int, *, allows_internal_messages: bool = False
) -> tuple[pa.RecordBatch, list[BadRow]]:
    """Return the messages of a batch as columns, and the rows that are not messages, as :func:`split_rows` finds them.

    Headers are text. ``allows_internal_messages``: the rows come from a store, which also has messages of its own.
    """
    columns = pa.record_batch([_column(batch, field) for field in MESSAGE_COLUMNS], schema=MESSAGE_COLUMNS)
    not_utf8 = pa.array([bool(names) for names in find_invalid_texts(batch)], pa.bool_())
    doubtful = pc.or_(_doubt_mask(columns, largest_message_bytes), not_utf8)
    doubtful = pc.or_(doubtful, _repeated_name_mask(columns.column("headers"), doubtful))
    if not pc.any(doubtful).as_py():
        return columns, []
    positions = cast("list[int]", pc.indices_nonzero(doubtful).to_pylist())
    messages, bad_rows = split_rows(
        batch.filter(doubtful), largest_message_bytes, allows_internal_messages=allows_internal_messages
    )
    good_columns = concat_batches([columns.filter(pc.invert(doubtful)), to_columns(messages)])
    return good_columns, [BadRow(positions[row.position], row.code, row.detail) for row in bad_rows]


def to_columns(messages: Sequence[DelayedMessage]) -> pa.RecordBatch:
    """Return messages as one batch with :data:`MESSAGE_COLUMNS`."""
    due = [to_microseconds(message.due) for message in messages]
    expires_at = [None if message.expires_at is None else to_microseconds(message.expires_at) for message in messages]
    return pa.record_batch(
        [
            pa.array([message.message_id for message in messages], pa.string()),
            pa.array([message.destination for message in messages], pa.string()),
            pa.array(due, pa.int64()).cast(INSTANT),
            pa.array(expires_at, pa.int64()).cast(INSTANT),
            pa.array([encode_headers(message.headers) for message in messages], pa.string()),
            pa.array([message.body for message in messages], pa.binary()),
        ],
        schema=MESSAGE_COLUMNS,
    )


def split_rows(
    batch: pa.RecordBatch, largest_message_bytes: int, *, allows_internal_messages: bool = False
) -> tuple[list[DelayedMessage], list[BadRow]]:
    """Return the messages of a batch, and the rows that are not messages. Each row is checked alone."""
    messages, bad_rows = list[DelayedMessage](), list[BadRow]()
    not_utf8 = find_invalid_texts(batch)
    for position, row in enumerate(_rows(batch)):
        if names := not_utf8[position]:
            bad_rows.append(BadRow(position, NOT_UTF8, f"{' and '.join(names)}: the text is not UTF-8"))
            continue
        try:
            message = _message(row, allows_internal_messages=allows_internal_messages)
        except PostdateError as error:
            bad_rows.append(BadRow(position, error.code, str(error)))
            continue
        size = _size(message, largest_message_bytes)
        if size > largest_message_bytes:
            bad_rows.append(
                BadRow(position, "message_too_large", f"{size:,} bytes; the store takes {largest_message_bytes:,}")
            )
        else:
            messages.append(message)
    return messages, bad_rows


def _size(message: DelayedMessage, limit: int) -> int:
    """Return the size of headers and body in bytes. The size is exact if it could be over the limit."""
    headers = message.headers
    # JSON writes a character in at most 6 bytes, and adds 6 bytes to a pair.
    at_most = len(message.body) + 6 * (len("".join(headers)) + len("".join(headers.values())) + len(headers)) + 2
    return at_most if at_most <= limit else size_in_bytes(encode_headers(headers), message.body)


def find_invalid_texts(batch: pa.RecordBatch) -> list[tuple[str, ...]]:
    """Return for each row the names of its columns whose texts are not UTF-8.

    Spark does not check the bytes of a text.
    """
    names: list[tuple[str, ...]] = [()] * batch.num_rows
    for name in _TEXT_COLUMNS:
        position = batch.schema.get_field_index(name)
        if position >= 0 and _is_text(batch.column(position).type) and not _is_valid(batch.column(position)):
            for row, content in enumerate(_cast_to_bytes(batch.column(position)).to_pylist()):
                if content is not None and not _is_utf8(content):
                    names[row] = (*names[row], name)
    return names


def texts_of(batch: pa.RecordBatch) -> list[dict[str, str | None]]:
    r"""Return the message columns of a batch as texts, to set rows aside.

    Bytes that are not UTF-8 become ``\xff``; times become ISO 8601.
    """
    names = [name for name in WRITTEN_COLUMNS if name in batch.schema.names]
    columns = [map(_text_of, _values(batch, name), [name] * batch.num_rows) for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _text_of(value: Any, name: str) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if value is None or name not in TIME_COLUMNS:
        return value
    try:
        return from_microseconds(value).isoformat()
    except OverflowError:
        return f"{value:,} microseconds since 1970"


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_valid(column: pa.Array[Any]) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cast_to_bytes(column: pa.Array[Any]) -> pa.Array[Any]:
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


# --- whole batches ----------------------------------------------------------------------------------------------------


def _column(batch: pa.RecordBatch, field: pa.Field[Any]) -> pa.Array[Any]:
    position = batch.schema.get_field_index(field.name)
    column = pa.nulls(batch.num_rows, field.type) if position < 0 else batch.column(position).cast(field.type)
    empty = {"headers": "{}", "body": b""}.get(field.name)
    return column if empty is None else pc.fill_null(column, empty)


def _doubt_mask(columns: pa.RecordBatch, largest_message_bytes: int) -> _Mask:
    """Return a mask of rows that may not be messages. All other rows certainly are."""
    due, expires_at = columns.column("due").cast(pa.int64()), columns.column("expires_at").cast(pa.int64())
    headers, body = columns.column("headers"), columns.column("body")
    size = pc.add(pc.cast(pc.binary_length(headers), pa.int64()), pc.cast(pc.binary_length(body), pa.int64()))
    doubts = [
        _text_doubt_mask(columns.column("message_id"), MESSAGE_ID_LIMIT),
        pc.fill_null(pc.starts_with(columns.column("message_id"), OWN_PREFIX), fill_value=True),
        _text_doubt_mask(columns.column("destination"), DESTINATION_LIMIT),
        pc.is_in(columns.column("destination"), value_set=_OF_THE_STORE),
        pc.fill_null(_outside_mask(due), fill_value=True),
        pc.fill_null(pc.or_(_outside_mask(expires_at), pc.less(expires_at, due)), fill_value=False),
        pc.invert(pc.match_substring_regex(headers, _HEADERS_WRITTEN)),
        pc.greater(size, largest_message_bytes),
    ]
    return reduce(pc.or_, doubts)


def _text_doubt_mask(texts: pa.Array[Any], limit: int) -> _Mask:
    too_long = pc.greater(pc.utf8_length(texts), limit)
    blank = pc.invert(pc.match_substring_regex(texts, _BEYOND_DOUBT_NOT_BLANK))
    return pc.fill_null(pc.or_(pc.or_(too_long, blank), pc.match_substring_regex(texts, _NUL)), fill_value=True)


def _repeated_name_mask(headers: pa.Array[Any], doubtful: _Mask) -> _Mask:
    """Return a mask of headers that may have a name twice. Headers that are doubtful already are left out.

    The text ``":"`` stands between each name and its value. Inside a text it can stand only if its quotes enclose a
    text that is a colon. So it occurs as often as there are pairs, or more often.
    """
    separators = pc.count_substring(headers, '":"')
    has_several = pc.and_(pc.greater(separators, 1), pc.invert(doubtful))
    positions = cast("list[int]", pc.indices_nonzero(has_several).to_pylist())
    if not positions:
        return has_several
    names = [len(each) for each in _decode_all_headers(headers.filter(has_several))]
    is_repeated = pc.not_equal(pa.array(names, pa.int64()), pc.cast(separators.filter(has_several), pa.int64()))
    return pc.replace_with_mask(has_several, has_several, is_repeated)


def _outside_mask(microseconds: pa.Array[Any]) -> _Mask:
    return pc.or_(pc.less(microseconds, CALENDAR[0]), pc.greater(microseconds, CALENDAR[1]))


# --- row by row -------------------------------------------------------------------------------------------------------


def _rows(batch: pa.RecordBatch) -> Iterator[_Row]:
    return cast("Iterator[_Row]", zip(*(_values(batch, name) for name in WRITTEN_COLUMNS), strict=True))


def _values(batch: pa.RecordBatch, name: str) -> Sequence[Any]:
    """Return a column. Instants are microseconds: Arrow would make each a datetime, and look up its zone by name."""
    position = batch.schema.get_field_index(name)
    if position < 0:
        return [None] * batch.num_rows
    column = batch.column(position)
    if name == "body" and _is_text(column.type):
        return _cast_to_bytes(column).to_pylist()
    if _is_text(column.type) and not _is_valid(column):  # Rows with such texts are refused before their texts are read.
        texts = _cast_to_bytes(column).to_pylist()
        return [None if text is None else text.decode("utf-8", "backslashreplace") for text in texts]
    return (pc.cast(pc.cast(column, INSTANT), pa.int64()) if name in TIME_COLUMNS else column).to_pylist()


def _message(row: _Row, *, allows_internal_messages: bool) -> DelayedMessage:
    message_id, destination, due, expires_at, headers, body = row
    if not (allows_internal_messages and destination in OF_THE_STORE):
        check_id(message_id)
        check_destination(destination)
    return DelayedMessage(
        message_id=message_id,
        due=_instant(due),
        destination=destination,
        headers=_headers(headers),
        body=body or b"",
        expires_at=None if expires_at is None else _instant(expires_at),
    )


def _instant(microseconds: int | None) -> datetime:
    # The message itself refuses a missing due time, with the same error text as everywhere.
    if microseconds is None:
        return cast("datetime", None)
    try:
        return from_microseconds(microseconds)
    except OverflowError as error:
        raise InvalidTimestamp(f"{microseconds:,} microseconds since 1970 is outside the years 1 to 9999") from error


def _headers(value: _Headers | None) -> Mapping[str, str]:
    if not value:
        return {}
    pairs = value if not isinstance(value, str) else _pairs(value)
    headers = dict(pairs)
    if len(headers) < len(pairs):
        repeated = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise InvalidHeaders(f"the header {repeated!r} is there twice; only one of them could be kept")
    return headers


def _pairs(text: str) -> list[tuple[str, str]]:
    # A null value stays None. The message itself refuses it, with the same error text as everywhere.
    try:
        return cast("list[tuple[str, str]]", json_pairs(text))
    except ValueError as error:
        raise InvalidHeaders(f"headers must be a JSON object of texts, not {text[:80]!r}: {error}") from error
