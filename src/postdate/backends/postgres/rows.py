"""Messages as rows, and rows as messages. Each row is read by itself: an unreadable one does not affect others.

Source: ADR 0043.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import psycopg
from psycopg.pq import Format

from postdate.backends.sql.questions import page_of
from postdate.clock import from_microseconds
from postdate.errors import InvalidHeaders, InvalidMessage, MessageError
from postdate.messages import DelayedMessage, Envelope, Headers, decode_headers, stored_headers
from postdate.ports import PendingPage

Row = tuple[Any, ...]
T = TypeVar("T")

_DAMAGED: Final = (psycopg.DataError, MessageError, ValueError, OverflowError)
"""Errors of the driver for values that Python does not have (a time outside the calendar), and ours for messages."""

_LONGEST_LIFETIME: Final = timedelta(days=1_000 * 365)
"""Longer means never; the database's calendar ends, too."""

EARLIEST_TIME: Final = "'0001-01-01 00:00:00+00'::timestamptz"
LATEST_TIME: Final = "'9999-12-31 23:59:59.999999+00'::timestamptz"
AFTER_LATEST_TIME: Final = "'10000-01-01 00:00:00+00'::timestamptz"


def in_calendar(time: str) -> str:
    """Return SQL that clamps a time to Python's calendar; null for null."""
    within = f"least(greatest({time}, {EARLIEST_TIME}), {LATEST_TIME})"
    return f"CASE WHEN {time} IS NOT NULL THEN {within} END"


def only_in_calendar(time: str) -> str:
    """Return SQL for a time; null where it lies outside the calendar."""
    return f"CASE WHEN {time} BETWEEN {EARLIEST_TIME} AND {LATEST_TIME} THEN {time} END"


def microseconds(time: str) -> str:
    """Return SQL for a time as whole microseconds since 1970 UTC; null for null, the greatest number outside it.

    So it does not matter how a session writes times (``datestyle``), nor what a driver makes of them.
    """
    exact = (
        f"extract(epoch FROM date_trunc('second', {time}))::bigint * 1000000 "
        f"+ extract(microseconds FROM {time})::bigint %% 1000000"
    )
    within = f"{time} BETWEEN {EARLIEST_TIME} AND {LATEST_TIME}"
    return f"CASE WHEN {within} THEN {exact} WHEN {time} IS NOT NULL THEN {OUTSIDE} END"


OUTSIDE: Final = 2**63 - 1
"""What :func:`microseconds` says of a time outside Python's calendar."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that cannot be decoded, by its number in the table, with the reason."""

    number: int
    reason: str


def read(cursor: psycopg.Cursor[Row], number_at: int, decode: Callable[[Row], T]) -> tuple[list[T], list[Unreadable]]:
    """Return the rows of an executed statement, decoded and in order, and the unreadable ones.

    ``number_at`` is the position of the row's number; ``decode`` raises :class:`MessageError` for an unreadable row.
    """
    good, bad = list[T](), list[Unreadable]()
    try:
        rows: Sequence[Row] = cursor.fetchall()
    except _DAMAGED:
        rows, bad = _one_by_one(cursor, number_at)
    for row in rows:
        try:
            good.append(decode(row))
        except _DAMAGED as error:
            bad.append(Unreadable(row[number_at], str(error)))
    return good, bad


def _one_by_one(cursor: psycopg.Cursor[Row], number_at: int) -> tuple[list[Row], list[Unreadable]]:
    rows, bad = list[Row](), list[Unreadable]()
    for place in range(cursor.rowcount):
        cursor.scroll(place, mode="absolute")
        try:
            row = cursor.fetchone()
        except _DAMAGED as error:
            bad.append(Unreadable(_number(cursor, place, number_at), str(error)))
        else:
            assert row is not None
            rows.append(row)
    return rows, bad


def _number(cursor: psycopg.Cursor[Row], place: int, number_at: int) -> int:
    result = cursor.pgresult
    assert result is not None
    value = result.get_value(place, number_at)
    assert value is not None
    return int.from_bytes(value, "big") if result.fformat(number_at) == Format.BINARY else int(value)


COLUMNS: Final[Mapping[str, str]] = {
    "message_id": "text",
    "due": "timestamptz",
    "destination": "text",
    "expires_at": "timestamptz",
    "headers": "text",
    "body": "bytea",
}
"""What is stored of a message, in the order of :func:`row_of`, with the types."""

WAITING: Final = "p.message_id, p.due, p.destination, p.expires_at, p.failures, c.headers, c.body"
"""Columns of a waiting message and its content ``c``, for :func:`message_of`."""

LISTED: Final = (
    f"p.number, p.message_id, {microseconds('p.due')}, p.destination, {microseconds('p.expires_at')}, p.failures, "
    f"c.headers, c.body"
)
"""Columns of a waiting message and its content ``c``, for :func:`page_of_rows`: the same for every session."""

QUEUED: Final = "m.message_id, m.due, m.expires_at, m.failures, m.unanswered, c.headers, c.body"
"""Columns of a message in a queue and its content ``c``, for :func:`envelope_of`."""


def present(headers: str | None) -> str:
    """Return headers; raise `InvalidHeaders` if their content was deleted by hand."""
    if headers is None:
        raise InvalidHeaders("the headers and the body are gone")
    return headers


def row_of(message: DelayedMessage, largest_message_bytes: int) -> Row:
    """Return the row of a message. Raises `MessageTooLarge`."""
    headers = stored_headers(message, largest_message_bytes)
    return (message.message_id, message.due, message.destination, message.expires_at, headers, message.body)


def queued_row(envelope: Envelope, headers: str, now: datetime) -> Row:
    """Return the row of a message to a queue; last its expiry, and the time left, counted from the arrival.

    A copy in the error queue never expires (specification 2.5).
    """
    columns = (envelope.destination, envelope.message_id, envelope.due, headers, envelope.body)
    if Headers.FAILED_QUEUE in envelope.headers:
        return (*columns, None, None)
    lifetime = envelope.time_left(now)
    return (*columns, envelope.expires_at, None if lifetime is None or lifetime > _LONGEST_LIFETIME else lifetime)


def message_of(  # noqa: PLR0913 - the columns
    message_id: str, due: Any, destination: str, expires_at: Any, failures: int, headers: str | None, body: bytes
) -> DelayedMessage:
    decoded = decode_headers(present(headers))
    return DelayedMessage.restored(message_id, due, destination, decoded, body, expires_at, failures)


def page_of_rows(rows: Sequence[Sequence[Any]], limit: int | None) -> PendingPage:
    """Return the page of the rows of :data:`LISTED`; those that are damaged are left out."""
    messages = list[tuple[int, DelayedMessage]]()
    for number, message_id, due, destination, expires_at, failures, headers, body in rows:
        with suppress(MessageError):
            content = (failures, headers, bytes(body or b""))
            message = message_of(message_id, _instant(due), destination, _instant(expires_at), *content)
            messages.append((number, message))
    return page_of(messages, [(due, number) for number, _, due, *_ in rows], limit)


def _instant(number: int | None) -> datetime | None:
    if number == OUTSIDE:
        raise InvalidMessage("a time is outside the years 1 to 9999")
    return None if number is None else from_microseconds(number)


def envelope_of(  # noqa: PLR0913 - the columns
    queue: str,
    message_id: str,
    due: Any,
    expires_at: Any,
    failures: int,
    unanswered: int,
    headers: str | None,
    body: bytes,
) -> tuple[Envelope, int, int]:
    """Return the envelope of a message in a queue, its failures, and how many processes died with it."""
    decoded = decode_headers(present(headers))
    return Envelope.restored(queue, message_id, decoded, body, utc(expires_at), utc(due)), failures, unanswered


def utc(instant: datetime | None) -> datetime | None:
    return None if instant is None else instant.astimezone(UTC)
