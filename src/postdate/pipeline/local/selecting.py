"""From the columns of a table to those of messages: :mod:`postdate.pipeline.schedule.selecting` without Spark.

The result has the same columns, so that :mod:`postdate.pipeline.schedule.storing` takes both.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import pyarrow as pa

from postdate.clock import to_microseconds
from postdate.core.expiry import relative_expiry_of
from postdate.errors import InvalidTimestamp, PipelineError
from postdate.messages import Headers
from postdate.pipeline import texts
from postdate.pipeline.clock_times import ZoneTimes
from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.local import values
from postdate.pipeline.local.times import Times, check_time_type, no_times, read_times
from postdate.pipeline.rows import INSTANT, MESSAGE_COLUMNS, NOT_UTF8, pc
from postdate.pipeline.schedule.columns import ColumnMapping
from postdate.pipeline.schedule.storing import TOO_LARGE
from postdate.ports.scanning import WRITTEN_COLUMNS

_SHOWN: Final = pa.struct([(name, pa.binary()) for name in WRITTEN_COLUMNS])
SELECTED_COLUMNS: Final = pa.schema(
    [
        *MESSAGE_COLUMNS,
        pa.field("reason", pa.string()),
        pa.field("shown", _SHOWN),
        pa.field("wall_time", pa.string()),
        pa.field("origin", texts.ORIGIN_TYPE),
    ]
)


def check_types(schema: pa.Schema, columns: ColumnMapping) -> None:
    """Refuse columns of types that cannot be those of a message.

    Raises:
        PipelineError: no engine stores such a column.
        NeedsSpark: only Spark does.
    """
    for name in (columns.due, columns.expires_at):
        if name is not None:
            check_time_type(schema.field(name).type)
    for name in (columns.message_id, columns.destination):
        if not name.startswith("="):
            values.check_plain_type(name, schema.field(name).type)
    if columns.headers is not None:
        kind = schema.field(columns.headers).type
        values.refuse_bytes(kind, "headers")
        if not (pa.types.is_string(kind) or values.is_map_of_texts(kind) or values.is_struct_of_texts(kind)):
            if pa.types.is_map(kind) or pa.types.is_struct(kind):
                raise NeedsSpark(f"the column {columns.headers!r} has headers that are not all texts")
            raise PipelineError(f"headers must be a map, a struct or a text, not {values.spark_name(kind)}")
    if columns.body is not None:
        kind = schema.field(columns.body).type
        if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            values.refuse_bytes(kind, "a body that becomes JSON")
            if pa.types.is_nested(kind):
                raise NeedsSpark(f"the column {columns.body!r} has bodies that become JSON")
            raise PipelineError(f"a body must be binary, a text or a struct, not {values.spark_name(kind)}")


@dataclass(frozen=True, slots=True)
class _Cells:
    """One column of a message, each list with one value a row.

    Args:
        content: the bytes of the text.
        texts: the text, ``None`` also if it is not UTF-8.
        is_text: whether the column is one of texts, which must be UTF-8.
    """

    content: list[bytes | None]
    texts: list[str | None]
    is_text: bool = False

    def is_invalid(self, row: int) -> bool:
        return self.is_text and self.content[row] is not None and self.texts[row] is None


def select_batch(
    batch: pa.RecordBatch, columns: ColumnMapping, zone_times: ZoneTimes | None, limit: int
) -> pa.RecordBatch:
    """Return the columns of a message, ``reason`` (null for good rows), and in ``shown`` the bytes of a bad row.

    Args:
        batch: rows with the columns of a table.
        columns: their names, resolved.
        zone_times: how to read clock times.
        limit: largest size of a body in bytes.
    """
    count = batch.num_rows
    cells = {name: _cells_of(batch, column) for name, column in asdict(columns).items()}
    due = read_times(batch.column(columns.due), cells["due"].texts, zone_times)
    expires_at = no_times(count)
    if columns.expires_at is not None:
        expires_at = read_times(batch.column(columns.expires_at), cells["expires_at"].texts, zone_times)
    headers = _headers_of(batch, columns.headers, cells["headers"])
    body = cells["body"].content
    origins = batch.column(texts.ORIGIN) if texts.ORIGIN in batch.schema.names else None
    no_reasons: list[str | None] = [None] * count
    origin_reasons = no_reasons if origins is None else cast("Any", origins).field("reason").to_pylist()
    reasons = [
        origin_reasons[row]
        or _reason_of(row, cells, due, expires_at)
        or (TOO_LARGE if len(body[row] or b"") > limit else None)
        or ("lapses_before_due" if _lapses_before(headers[row], due.instants[row]) else None)
        for row in range(count)
    ]

    def only_good(column: Sequence[Any]) -> list[Any]:
        return [value if reason is None else None for value, reason in zip(column, reasons, strict=True)]

    arrays: list[Any] = [
        pa.array(only_good(cells["message_id"].texts), pa.string()),
        pa.array(only_good(cells["destination"].texts), pa.string()),
        pa.array(due.instants, pa.int64()).cast(INSTANT),
        pa.array(expires_at.instants, pa.int64()).cast(INSTANT),
        pa.array(only_good(headers), pa.string()),
        pa.array(only_good(body), pa.binary()),
        pa.array(reasons, pa.string()),
        _shown_of(cells, reasons),
        pa.array(only_good(due.wall_times), pa.string()),
        pa.nulls(count, texts.ORIGIN_TYPE) if origins is None else origins,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SELECTED_COLUMNS)


def _cells_of(batch: pa.RecordBatch, name: str | None) -> _Cells:
    if name is None:
        return _Cells([None] * batch.num_rows, [None] * batch.num_rows)
    if name.startswith("="):
        return _Cells([name[1:].encode()] * batch.num_rows, [name[1:]] * batch.num_rows)
    column = batch.column(name)
    content = values.to_bytes(name, column)
    if pa.types.is_binary(column.type):
        return _Cells(content, [None] * batch.num_rows)
    return _Cells(content, [*map(_decode, content)], is_text=pa.types.is_string(column.type))


def _decode(content: bytes | None) -> str | None:
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        return None


def _headers_of(batch: pa.RecordBatch, name: str | None, cells: _Cells) -> list[str | None]:
    """Return the headers as texts that are JSON objects; ``None`` for a blank text."""
    if name is None:
        return cells.texts
    column = batch.column(name)
    if pa.types.is_string(column.type):
        return [text if text is not None and text.strip(" ") else None for text in cells.texts]
    return [*map(_decode, values.to_json(column, ignore_null_fields=True))]


def _reason_of(row: int, cells: dict[str, _Cells], due: Times, expires_at: Times) -> str | None:
    if any(column.is_invalid(row) for column in cells.values()):
        return NOT_UTF8
    for reason, name in (("missing_id", "message_id"), ("missing_due", "due"), ("missing_destination", "destination")):
        text = cells[name].texts[row]
        if text is None or not text.strip(" "):
            return reason
    if due.problems[row] is not None:
        return due.problems[row]
    problem = expires_at.problems[row]
    return None if problem is None else f"expiry_{problem}"


def _lapses_before(headers: str | None, due: int | None) -> bool:
    """Return whether the time to be received, which counts from the time sent, ends before the message is due."""
    if headers is None or due is None or not (Headers.TIME_TO_BE_RECEIVED in headers or "\\u" in headers):
        return False
    end = None
    # Such headers are refused later, with their row. A message whose end is malformed fails at its receiver.
    with suppress(ValueError, InvalidTimestamp):
        pairs = texts.json_pairs(headers)
        end = relative_expiry_of({name: value for name, value in pairs if value is not None})
    return end is not None and to_microseconds(end) < due


def _shown_of(cells: dict[str, _Cells], reasons: Sequence[str | None]) -> Any:
    """Return the original bytes of bad rows, to set them aside."""
    is_good = pa.array([reason is None for reason in reasons], pa.bool_())
    contents: list[Any] = [
        pa.array(
            [content if reason else None for content, reason in zip(cells[name].content, reasons, strict=True)],
            pa.binary(),
        )
        for name in WRITTEN_COLUMNS
    ]
    return pa.StructArray.from_arrays(contents, fields=list(_SHOWN), mask=is_good)


def content_of(rows: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Return what two rows with one id must have in common: all columns of a message but its id."""
    names = [name for name in WRITTEN_COLUMNS if name not in {"message_id", "headers"}]
    columns: list[Any] = [
        (pc.cast(rows.column(name), pa.int64()) if name in {"due", "expires_at"} else rows.column(name)).to_pylist()
        for name in names
    ]
    headers = [frozenset(texts.json_pairs(text)) for text in cast("list[str]", rows.column("headers").to_pylist())]
    return list(zip(*columns, headers, strict=True))
