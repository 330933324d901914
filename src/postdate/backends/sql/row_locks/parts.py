"""Values that the modules of a row-lock store exchange, the protocol of its connections, and the meanings of errors.

Times in rows are whole microseconds since 1970-01-01 UTC. Every method of a connection blocks and may raise the store
errors of :mod:`postdate.errors`. Errors of drivers do not leave the package of their server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

from postdate import errors
from postdate.clock import from_microseconds, nearest_instant, to_microseconds
from postdate.messages import DelayedMessage, decode_headers, encode_for_store
from postdate.ports import ScanFilter

P = TypeVar("P", bytes, str)


class Conflict(errors.StoreTroubled):
    """A transaction had a conflict with another one and was rolled back; it may be run again at once."""


class DuplicateKey(errors.StoreError):
    """A row with that key exists."""


class MessageRow(NamedTuple):
    """A message as it is written and read."""

    message_id: str
    due: int
    destination: str
    expires_at: int | None
    failures: int
    headers: str
    body: bytes


class MarkedRow(NamedTuple):
    """A row that is marked as unreadable; its columns may be invalid."""

    number: int
    at: int
    reason: str
    content: MessageRow


class PendingRow(NamedTuple):
    """A pending message that is locked, without its content."""

    number: int
    due: int
    attempt_at: int | None
    expires_at: int | None
    holder: int | None


@dataclass(frozen=True, slots=True)
class NewRecord:
    """Time, kind and detail of a record."""

    at: int
    kind: int
    detail: str | None = None


def split_texts(texts: Iterable[P], max_length: int, max_count: int | None = None) -> Iterator[list[P]]:
    """Yield the texts of one statement each.

    They have at most ``max_length`` with separators, unless a single text is longer, and are at most ``max_count``.
    """
    piece, size = list[P](), 0
    for text in texts:
        if piece and (size + len(text) > max_length or len(piece) == max_count):
            yield piece
            piece, size = [], 0
        piece.append(text)
        size += len(text) + 1
    if piece:
        yield piece


def filter_values(where: ScanFilter) -> dict[str, Any]:
    """Return the given conditions by name; times as in rows."""
    values: dict[str, Any] = {
        "message_ids": where.message_ids,
        "destinations": where.destinations,
        "due_from": None if where.due_from is None else to_microseconds(where.due_from),
        "due_to": None if where.due_to is None else to_microseconds(where.due_to),
    }
    return {name: value for name, value in values.items() if value is not None}


def to_row(message: DelayedMessage, largest_message_bytes: int) -> MessageRow:
    """Return the row of a message. Raise `MessageTooLarge`."""
    headers = encode_for_store(message, largest_message_bytes)
    expires_at = None if message.expires_at is None else to_microseconds(message.expires_at)
    due = to_microseconds(message.due)
    return MessageRow(message.message_id, due, message.destination, expires_at, 0, headers, message.body)


def from_row(row: MessageRow) -> DelayedMessage:
    """Return the message of a row, without checking limits again. Raise `InvalidMessage` or `InvalidHeaders`."""
    return DelayedMessage.from_store(
        row.message_id,
        _instant(row.due, "the due time"),
        row.destination,
        decode_headers(row.headers),
        bytes(row.body),
        None if row.expires_at is None else _instant(row.expires_at, "the expiry"),
        row.failures,
    )


def _instant(microseconds: int, what: str) -> datetime:
    try:
        return from_microseconds(microseconds)
    except OverflowError as error:
        raise errors.InvalidMessage(f"{what} is outside the years 1 to 9999: {microseconds} us since 1970") from error


def readable_due(row: MessageRow) -> int | None:
    """Return the due time for a record; ``None`` if it is outside the calendar."""
    return row.due if to_microseconds(nearest_instant(row.due)) == row.due else None


def decode_rows(rows: Iterable[tuple[int, MessageRow]]) -> tuple[dict[int, DelayedMessage], dict[int, str]]:
    """Return, by number and in order, the readable messages, and the reasons why the others are unreadable."""
    messages, reasons = dict[int, DelayedMessage](), dict[int, str]()
    for number, row in rows:
        try:
            messages[number] = from_row(row)
        except (errors.InvalidMessage, errors.InvalidHeaders) as error:
            reasons[number] = str(error)
    return messages, reasons


Meaning = type[errors.PostdateError]
Meanings = Mapping[Meaning, Collection[int | str]]
"""Our error for each number or class of a server's errors; a number takes precedence over its class."""

_TEXTS: Final[Mapping[Meaning, str]] = {
    errors.StoreNotSetUp: "{where} lacks tables of Postdate ({said}); run `postdate setup`",
    errors.StoreFull: "{where} has no space left ({said}); nothing was written; free some space",
    errors.StoreNotWritable: "{where} refuses ({said}); check user, password and grants",
    errors.StoreReadOnly: "{where} is read-only ({said}): after a fail-over it is a replica now, or an administrator "
    "has made it read-only; the address must lead to the server that accepts writes",
    errors.MessageTooLarge: "{where} refuses ({said}); raise the server's max_allowed_packet",
}


def error_of(meaning: Meaning, text: str, where: str) -> errors.PostdateError:
    """Return the error for a meaning, with the server's own text; ``where``: the address without the password."""
    return meaning(_TEXTS.get(meaning, "{where}: {said}").format(where=where, said=text))


def meaning_of(keys: Iterable[int | str], meanings: Meanings) -> Meaning | None:
    """Return the meaning of the first known key; ``None`` if all are unknown."""
    return next((meaning for key in keys for meaning, codes in meanings.items() if key in codes), None)
