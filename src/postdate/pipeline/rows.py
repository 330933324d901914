"""From Arrow rows to messages; runs on executors.

Rows have the columns of :data:`postdate.pipeline.columns.MESSAGE_SCHEMA`, in any order; ``expires_at``, ``headers`` and
``body`` may be missing or null.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Arrow's stubs make arrays generic in a type that only the running program knows.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from postdate.clock import from_microseconds
from postdate.errors import InvalidTimestamp, PostdateError
from postdate.messages import DelayedMessage, encode_headers
from postdate.pipeline.columns import INSTANT

_Row = tuple[str, str, int, int | None, Sequence[tuple[str, str]] | None, bytes | None]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no message.

    Args:
        position: in its batch, from 0.
        code: of the error, see :mod:`postdate.errors`.
        detail: what is wrong, with the value.
    """

    position: int
    code: str
    detail: str


def to_messages(batch: pa.RecordBatch) -> list[DelayedMessage]:
    """Return the messages of a batch.

    Raises:
        MessageError: the first row that is no valid message.
    """
    return [_message(row) for row in _rows(batch)]


def sort_out(batch: pa.RecordBatch, largest_message_bytes: int) -> tuple[list[DelayedMessage], list[BadRow]]:
    """Return the messages of a batch, and the rows that are none.

    Args:
        batch: rows as described above.
        largest_message_bytes: what the store takes, headers and body together.
    """
    messages, bad = list[DelayedMessage](), list[BadRow]()
    for position, row in enumerate(_rows(batch)):
        try:
            message = _message(row)
        except PostdateError as error:
            bad.append(BadRow(position, error.code, str(error)))
            continue
        size = _size(message, largest_message_bytes)
        if size > largest_message_bytes:
            bad.append(
                BadRow(position, "message_too_large", f"{size:,} bytes; the store takes {largest_message_bytes:,}")
            )
        else:
            messages.append(message)
    return messages, bad


def _size(message: DelayedMessage, limit: int) -> int:
    """Return the size of headers and body, exactly if it could be over the limit."""
    headers = message.headers
    # JSON writes a character in at most 6, and puts 6 around a pair.
    at_most = len(message.body) + 6 * (len("".join(headers)) + len("".join(headers.values())) + len(headers)) + 2
    return at_most if at_most <= limit else len(message.body) + len(encode_headers(headers))


def _rows(batch: pa.RecordBatch) -> Iterator[_Row]:
    columns = [
        _values(batch, "message_id"),
        _values(batch, "destination"),
        _microseconds(batch, "due"),
        _microseconds(batch, "expires_at"),
        _values(batch, "headers"),
        _values(batch, "body"),
    ]
    return cast("Iterator[_Row]", zip(*columns, strict=True))


def _values(batch: pa.RecordBatch, name: str) -> Sequence[Any]:
    position = batch.schema.get_field_index(name)
    return [None] * batch.num_rows if position < 0 else batch.column(position).to_pylist()


def _microseconds(batch: pa.RecordBatch, name: str) -> Sequence[int | None]:
    """Return instants as microseconds: Arrow would make each a datetime in a zone that it looks up by name."""
    position = batch.schema.get_field_index(name)
    if position < 0:
        return [None] * batch.num_rows
    microseconds = pc.cast(pc.cast(batch.column(position), INSTANT), pa.int64())
    return cast("Sequence[int | None]", microseconds.to_pylist())


def _message(row: _Row) -> DelayedMessage:
    message_id, destination, due, expires_at, headers, body = row
    return DelayedMessage(
        message_id=message_id,
        due=_instant(due),
        destination=destination,
        headers=_headers(headers),
        body=body or b"",
        expires_at=None if expires_at is None else _instant(expires_at),
    )


def _instant(microseconds: int | None) -> datetime:
    # A missing due time is refused by the message itself, in the same words as everywhere.
    if microseconds is None:
        return cast("datetime", None)
    try:
        return from_microseconds(microseconds)
    except OverflowError as error:
        raise InvalidTimestamp(f"{microseconds:,} microseconds since 1970 is outside the years 1 to 9999") from error


def _headers(pairs: Sequence[tuple[str, str]] | None) -> Mapping[str, str]:
    return dict(pairs) if pairs else {}
