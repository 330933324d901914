"""Reading rows as messages, one by one: one that cannot be read keeps no other from being read. Source: ADR 0019."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg
from psycopg.pq import Format

from postdate.errors import InvalidHeaders, MessageError
from postdate.messages import DelayedMessage, decode_headers

Row = tuple[Any, ...]
T = TypeVar("T")

_DAMAGED: Final = (psycopg.DataError, MessageError, ValueError, OverflowError)
"""What the driver says of a value that Python does not have (a time outside the calendar), and we of a message."""

EARLIEST_TIME: Final = "'0001-01-01 00:00:00+00'::timestamptz"
LATEST_TIME: Final = "'9999-12-31 23:59:59.999999+00'::timestamptz"


def in_calendar(time: str) -> str:
    """Return an expression of a time that lies in the calendar, the end of it that is nearest; null for null."""
    within = f"least(greatest({time}, {EARLIEST_TIME}), {LATEST_TIME})"
    return f"CASE WHEN {time} IS NOT NULL THEN {within} END"


def only_in_calendar(time: str) -> str:
    """Return an expression of a time; null where it lies outside the calendar."""
    return f"CASE WHEN {time} BETWEEN {EARLIEST_TIME} AND {LATEST_TIME} THEN {time} END"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that is no message.

    Args:
        number: of it in its table.
        reason: why it cannot be read.
    """

    number: int
    reason: str


def read(cursor: psycopg.Cursor[Row], number_at: int, decode: Callable[[Row], T]) -> tuple[list[T], list[Unreadable]]:
    """Return what a statement found, in its order, and which rows of it cannot be read.

    Args:
        cursor: that has executed the statement.
        number_at: the column with the number of the row.
        decode: makes something of a row; raises :class:`MessageError` where that cannot be done.
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


def present(headers: str | None) -> str:
    """Return headers that are there; their content may have been deleted by hand."""
    if headers is None:
        raise InvalidHeaders("the headers and the body are gone")
    return headers


def message_of(  # noqa: PLR0913 - the columns
    message_id: str, due: Any, destination: str, expires_at: Any, failures: int, headers: str | None, body: bytes
) -> DelayedMessage:
    """Return a row of the table as a message."""
    found = decode_headers(present(headers))
    return DelayedMessage.restored(message_id, due, destination, found, body, expires_at, failures)
