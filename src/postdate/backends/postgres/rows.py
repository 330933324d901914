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
from postdate.messages import DelayedMessage, Envelope, Headers, decode_headers, encode_for_store
from postdate.ports import PendingPage

Row = tuple[Any, ...]
T = TypeVar("T")

_DECODING_ERRORS: Final = (psycopg.DataError, MessageError, ValueError, OverflowError)
"""Errors of the driver for values that Python cannot represent (a time outside the calendar), and ours for messages."""

_LONGEST_LIFETIME: Final = timedelta(days=1_000 * 365)
"""A longer time to be received means never; the database's calendar ends, too."""

EARLIEST_TIME: Final = "'0001-01-01 00:00:00+00'::timestamptz"
LATEST_TIME: Final = "'9999-12-31 23:59:59.999999+00'::timestamptz"
AFTER_LATEST_TIME: Final = "'10000-01-01 00:00:00+00'::timestamptz"


def clamped_time(time: str) -> str:
    """Return SQL that clamps a time to Python's calendar; null for null."""
    clamped = f"least(greatest({time}, {EARLIEST_TIME}), {LATEST_TIME})"
    return f"CASE WHEN {time} IS NOT NULL THEN {clamped} END"


def time_in_calendar(time: str) -> str:
    """Return SQL for a time; null if it is outside the calendar."""
    return f"CASE WHEN {time} BETWEEN {EARLIEST_TIME} AND {LATEST_TIME} THEN {time} END"


def microseconds(time: str) -> str:
    """Return SQL for a time as whole microseconds since 1970 UTC.

    Null for null, the greatest number outside the calendar.

    So neither the session's format of times (``datestyle``) nor the driver's conversion matters.
    """
    exact = (
        f"extract(epoch FROM date_trunc('second', {time}))::bigint * 1000000 "
        f"+ extract(microseconds FROM {time})::bigint %% 1000000"
    )
    is_in_calendar = f"{time} BETWEEN {EARLIEST_TIME} AND {LATEST_TIME}"
    return f"CASE WHEN {is_in_calendar} THEN {exact} WHEN {time} IS NOT NULL THEN {OUTSIDE_CALENDAR} END"


OUTSIDE_CALENDAR: Final = 2**63 - 1
"""The value of :func:`microseconds` for a time outside Python's calendar."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that cannot be decoded, by its number in the table, with the reason."""

    number: int
    reason: str


def decode_rows(
    cursor: psycopg.Cursor[Row], number_index: int, decode: Callable[[Row], T]
) -> tuple[list[T], list[Unreadable]]:
    """Return the rows of an executed statement, decoded and in order, and the unreadable ones.

    ``number_index`` is the position of the row's number; ``decode`` raises :class:`MessageError` for an unreadable row.
    """
    decoded, unreadable = list[T](), list[Unreadable]()
    try:
        rows: Sequence[Row] = cursor.fetchall()
    except _DECODING_ERRORS:
        rows, unreadable = _fetch_one_by_one(cursor, number_index)
    for row in rows:
        try:
            decoded.append(decode(row))
        except _DECODING_ERRORS as error:
            unreadable.append(Unreadable(row[number_index], str(error)))
    return decoded, unreadable


def _fetch_one_by_one(cursor: psycopg.Cursor[Row], number_index: int) -> tuple[list[Row], list[Unreadable]]:
    rows, unreadable = list[Row](), list[Unreadable]()
    for position in range(cursor.rowcount):
        cursor.scroll(position, mode="absolute")
        try:
            row = cursor.fetchone()
        except _DECODING_ERRORS as error:
            unreadable.append(Unreadable(_number(cursor, position, number_index), str(error)))
        else:
            assert row is not None
            rows.append(row)
    return rows, unreadable


def _number(cursor: psycopg.Cursor[Row], position: int, number_index: int) -> int:
    result = cursor.pgresult
    assert result is not None
    value = result.get_value(position, number_index)
    assert value is not None
    return int.from_bytes(value, "big") if result.fformat(number_index) == Format.BINARY else int(value)


COLUMNS: Final[Mapping[str, str]] = {
    "message_id": "text",
    "due": "timestamptz",
    "destination": "text",
    "expires_at": "timestamptz",
    "headers": "text",
    "body": "bytea",
}
"""The stored columns of a message, in the order of :func:`row_of`, with their types."""

PENDING_COLUMNS: Final = "p.message_id, p.due, p.destination, p.expires_at, p.failures, c.headers, c.body"
"""Columns of a pending message and its content ``c``, for :func:`message_of`."""

LISTED_COLUMNS: Final = (
    f"p.number, p.message_id, {microseconds('p.due')}, p.destination, {microseconds('p.expires_at')}, p.failures, "
    f"c.headers, c.body"
)
"""Columns of a pending message and its content ``c``, for :func:`page_of_rows`: the same text for every session."""

QUEUED_COLUMNS: Final = "m.message_id, m.due, m.expires_at, m.failures, m.unanswered, c.headers, c.body"
"""Columns of a message in a queue and its content ``c``, for :func:`envelope_of`."""


def check_present(headers: str | None) -> str:
    """Return headers; raise `InvalidHeaders` if their content was deleted by hand."""
    if headers is None:
        raise InvalidHeaders("the headers and the body are missing")
    return headers


def row_of(message: DelayedMessage, largest_message_bytes: int) -> Row:
    """Return the row of a message. Raises `MessageTooLarge`."""
    headers = encode_for_store(message, largest_message_bytes)
    return (message.message_id, message.due, message.destination, message.expires_at, headers, message.body)


def queued_row(envelope: Envelope, headers: str, now: datetime) -> Row:
    """Return the row of a message to a queue.

    Its last values are its expiry, and the time left, counted from the arrival.

    A copy in the error queue never expires.
    """
    columns = (envelope.destination, envelope.message_id, envelope.due, headers, envelope.body)
    if Headers.FAILED_QUEUE in envelope.headers:
        return (*columns, None, None)
    lifetime = envelope.time_left(now)
    return (*columns, envelope.expires_at, None if lifetime is None or lifetime > _LONGEST_LIFETIME else lifetime)


def message_of(  # noqa: PLR0913 - the columns
    message_id: str, due: Any, destination: str, expires_at: Any, failures: int, headers: str | None, body: bytes
) -> DelayedMessage:
    decoded_headers = decode_headers(check_present(headers))
    return DelayedMessage.from_store(message_id, due, destination, decoded_headers, body, expires_at, failures)


def page_of_rows(rows: Sequence[Sequence[Any]], limit: int | None) -> PendingPage:
    """Return the page of the rows of :data:`LISTED_COLUMNS`, without damaged rows."""
    messages = list[tuple[int, DelayedMessage]]()
    for number, message_id, due, destination, expires_at, failures, headers, body in rows:
        with suppress(MessageError):
            content = (failures, headers, bytes(body or b""))
            message = message_of(message_id, _instant(due), destination, _instant(expires_at), *content)
            messages.append((number, message))
    return page_of(messages, [(due, number) for number, _, due, *_ in rows], limit)


def _instant(number: int | None) -> datetime | None:
    if number == OUTSIDE_CALENDAR:
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
    """Return the envelope of a message in a queue, its number of failures, and how many processes died with it."""
    decoded_headers = decode_headers(check_present(headers))
    return (
        Envelope.from_queue(queue, message_id, decoded_headers, body, utc(expires_at), utc(due)),
        failures,
        unanswered,
    )


def utc(instant: datetime | None) -> datetime | None:
    return None if instant is None else instant.astimezone(UTC)
