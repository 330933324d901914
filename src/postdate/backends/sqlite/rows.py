"""Messages as rows of the file, and rows as messages. Each row is read by itself: an unreadable one affects no other.

Stored messages are not checked against limits again, which may have been tightened since.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from postdate.clock import from_microseconds, nearest_instant, to_microseconds
from postdate.errors import InvalidHeaders, InvalidMessage
from postdate.messages import DelayedMessage, Envelope, decode_headers, stored_headers

WAITING_FIELDS: Final = ("message_id", "due", "destination", "expires_at", "failures")
"""Columns of a waiting message that are the message's own, without its content."""

QUEUED_FIELDS: Final = ("message_id", "due", "expires_at", "failures", "ends_at", "dead_letter")
"""Likewise of a message in a queue."""

_CONTENT: Final = (
    "(SELECT CAST(headers AS BLOB) FROM content AS c WHERE c.seq = content), "
    "(SELECT body FROM content AS c WHERE c.seq = content)"
)
WAITING_COLUMNS: Final = f"seq, {', '.join(WAITING_FIELDS)}, {_CONTENT}"
"""Of a waiting message, for :func:`message_of`. Headers as bytes: they may be no UTF-8."""

QUEUED_COLUMNS: Final = f"seq, {', '.join(QUEUED_FIELDS[:4])}, {_CONTENT}"
"""Of a message in a queue, for :func:`envelope_of`."""

INSERT_WAITING: Final = f"""
    INSERT INTO delayed_message (seq, {", ".join(WAITING_FIELDS[:-1])}, content, attempt_at)
    VALUES (?, ?, ?, ?, ?, ?, ?)"""
"""Takes the number, :data:`WAITING_FIELDS` but for the failures, the number of the content, and the due time again."""

INSERT_QUEUED: Final = f"""
    INSERT INTO queue_message (queue_id, {", ".join(QUEUED_FIELDS)}, content) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
"""Takes the number of the queue, :data:`QUEUED_FIELDS` and the number of the content."""

T = TypeVar("T")
Row = Sequence[Any]


def waiting_row(message: DelayedMessage, largest_message_bytes: int) -> tuple[Any, ...]:
    """Return :data:`WAITING_FIELDS` but for the failures, headers and body. Raises `MessageTooLarge`."""
    headers = stored_headers(message, largest_message_bytes)
    expires_at = None if message.expires_at is None else to_microseconds(message.expires_at)
    return (message.message_id, to_microseconds(message.due), message.destination, expires_at, headers, message.body)


def queued_row(envelope: Envelope, headers: str, ends_at: int | None, *, dead_letter: bool) -> tuple[Any, ...]:
    """Return :data:`QUEUED_FIELDS` of a new message, the name of its queue, headers and body."""
    due = None if envelope.due is None else to_microseconds(envelope.due)
    expires_at = None if envelope.expires_at is None else to_microseconds(envelope.expires_at)
    fields = (envelope.message_id, due, expires_at, 0, ends_at, int(dead_letter))
    return (*fields, envelope.destination, headers, envelope.body)


def message_of(row: Row) -> DelayedMessage:
    """Return the message of a row of :data:`WAITING_COLUMNS`. Raises `InvalidMessage` or `InvalidHeaders`."""
    _, message_id, due, destination, expires_at, failures, headers, body = row
    return DelayedMessage.restored(
        text(message_id, "the message id"),
        instant(due, "the due time"),
        text(destination, "the destination"),
        *content_of(headers, body),
        None if expires_at is None else instant(expires_at, "the expiry"),
        whole(failures, "the number of failures"),
    )


def envelope_of(row: Row, queue: str) -> tuple[Envelope, int]:
    """Return the envelope of a row of :data:`QUEUED_COLUMNS`, and its failures; see :func:`message_of`."""
    _, message_id, due, expires_at, failures, headers, body = row
    envelope = Envelope.restored(
        queue,
        text(message_id, "the message id"),
        *content_of(headers, body),
        None if expires_at is None else instant(expires_at, "the expiry"),
        None if due is None else instant(due, "the due time"),
    )
    return envelope, whole(failures, "the number of failures")


def text(value: object, what: str) -> str:
    if type(value) is str:
        return value
    raise InvalidMessage(f"{what} is no text: {_short(value)}")


def whole(value: object, what: str) -> int:
    if type(value) is int:
        return value
    raise InvalidMessage(f"{what} is no whole number: {_short(value)}")


def instant(value: object, what: str) -> datetime:
    """Return the time of a column, which must hold microseconds since 1970 UTC."""
    try:
        return from_microseconds(whole(value, what))
    except OverflowError as error:
        raise InvalidMessage(f"{what} is outside the years 1 to 9999: {value} us since 1970") from error


def time_of(value: object) -> datetime | None:
    """Return the time of a column, clamped; ``None``: it holds none. Whoever claims the message finds out."""
    return nearest_instant(value) if type(value) is int else None


def content_of(headers: object, body: object) -> tuple[Mapping[str, str], bytes]:
    if not isinstance(headers, bytes | str):
        shown = f"the headers are no text: {_short(headers)}"
        raise InvalidHeaders("the headers are gone" if headers is None else shown)
    found = decode_headers(headers)
    if type(body) is bytes:
        return found, body
    raise InvalidMessage("the content is gone" if body is None else f"the body is no bytes: {_short(body)}")


def shown(value: str | bytes) -> str:
    """Return a text for people; bytes that are no UTF-8 are replaced."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _short(value: object) -> str:
    return repr(value)[:80]


def read_rows(connection: sqlite3.Connection, sql: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
    """Return the rows of a statement that may write; a text that is no UTF-8 comes as bytes, not as an error.

    By default one such text makes all rows unreadable. Asking for bytes always would cost every row.
    """
    connection.execute("SAVEPOINT reading")
    try:
        try:
            return connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if not is_undecodable(error):
                raise
        connection.execute("ROLLBACK TO reading")
        connection.text_factory = _lenient
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.text_factory = str
    finally:
        if connection.in_transaction:  # a full disk may have ended all of it
            connection.execute("RELEASE reading")


def is_undecodable(error: sqlite3.Error) -> bool:
    return "Could not decode to UTF-8" in str(error)


def _lenient(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def decoded(rows: Sequence[Row], decode: Callable[[Row], T]) -> tuple[list[T], dict[int, str]]:
    """Return the decoded rows, in order, and by row number (the first column) why the others cannot be decoded."""
    good, bad = list[T](), dict[int, str]()
    for row in rows:
        try:
            good.append(decode(row))
        except (InvalidMessage, InvalidHeaders) as error:
            bad[row[0]] = str(error)
    return good, bad
