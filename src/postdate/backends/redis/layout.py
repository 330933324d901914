"""The encoding of messages: instants, and fields of a hash. ``lua/common.lua`` lists the keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from postdate.clock import EARLIEST, from_microseconds, to_microseconds
from postdate.errors import InvalidMessage
from postdate.messages import DelayedMessage, Envelope, decode_headers, encode_headers, size_in_bytes
from postdate.ports import Record, RecordKind

Part = bytes | str | int
"""An argument of a script."""

_BEFORE_1970: Final = -to_microseconds(EARLIEST)
_DIGITS: Final = 18  # enough for microseconds of all years up to 9999, so that texts sort as instants do


def format_instant(instant: datetime) -> str:
    """Return an instant as 18 digits: microseconds since the year 1. Their order as text is the order of time."""
    return f"{to_microseconds(instant) + _BEFORE_1970:0{_DIGITS}d}"


def read_instant(digits: bytes | None, what: str) -> datetime:
    """Return an instant from :func:`format_instant`; raises `InvalidMessage` for any other bytes."""
    if digits is None or len(digits) != _DIGITS or not digits.isdigit():
        raise InvalidMessage(f"{what} is {digits!r}, not {_DIGITS} digits")
    try:
        return from_microseconds(int(digits) - _BEFORE_1970)
    except OverflowError as error:
        raise InvalidMessage(f"{what} {digits!r} is outside the calendar") from error


def microseconds_of(member: bytes) -> int:
    """Return the microseconds since 1970 of an instant, or of a sorted set's member, which begins with an instant."""
    return int(member[:_DIGITS]) - _BEFORE_1970


def instant_of(member: bytes) -> datetime:
    """Return the instant at the beginning of a sorted set's member."""
    return from_microseconds(microseconds_of(member))


def size_of(message: DelayedMessage | Envelope) -> int:
    return size_in_bytes(encode_headers(message.headers), message.body)


def _read_text(raw: bytes | None, what: str) -> str:
    if raw is None:
        raise InvalidMessage(f"{what} is gone")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"{what} is not UTF-8 text: {error}") from error


def _read_content(headers: bytes | None, body: bytes | None) -> tuple[dict[str, str], bytes]:
    if not headers or body is None:
        raise InvalidMessage("its content is missing: there are no headers, or there is no body")
    return decode_headers(headers), body


def _read_failures(count: bytes | None) -> int:
    if count is None:
        return 0
    if not count.isdigit():
        raise InvalidMessage(f"its count of failures is {count!r}")
    return int(count)


# --- messages of a store ------------------------------------------------------------------------------------------


FIELDS: Final = {
    b"d": "due",
    b"q": "destination",
    b"h": "headers",
    b"b": "body",
    b"x": "expires_at",
    b"f": "number_of_failures",
}
"""The fields of a pending message's hash, with the names of their contents."""


def message_parts(message: DelayedMessage) -> tuple[Part, ...]:
    """Return a message as script arguments, in the order of ``taken_message``."""
    return (
        message.message_id,
        format_instant(message.due),
        message.destination,
        encode_headers(message.headers),
        message.body,
        "" if message.expires_at is None else format_instant(message.expires_at),
    )


def read_message(message_id: bytes, fields: Sequence[bytes | None]) -> DelayedMessage:
    """Return a message from its id and the :data:`FIELDS`; raises `MessageError`."""
    due, destination, headers, body, expires_at, failures = fields[:6]
    content = _read_content(headers, body)
    return DelayedMessage.from_store(
        _read_text(message_id, "its id"),
        read_instant(due, "its due time"),
        _read_text(destination, "its destination"),
        *content,
        None if expires_at is None else read_instant(expires_at, "its expiry"),
        _read_failures(failures),
    )


# --- messages of a queue ------------------------------------------------------------------------------------------


def envelope_parts(envelope: Envelope) -> tuple[Part, ...]:
    """Return an outgoing message as arguments of ``transact.lua``."""
    lifetime = envelope.time_to_be_received
    return (
        envelope.destination,
        envelope.message_id,
        encode_headers(envelope.headers),
        envelope.body,
        "" if envelope.expires_at is None else format_instant(envelope.expires_at),
        "" if envelope.due is None else format_instant(envelope.due),
        "" if lifetime is None else (lifetime.days * 86_400 + lifetime.seconds) * 1_000_000 + lifetime.microseconds,
    )


def read_envelope(queue: str, fields: Sequence[bytes | None]) -> tuple[Envelope, int, int]:
    """Return a message, its number of failures, and its number of deaths.

    The fields are ``i h b x d f u``. A death is an attempt whose process died. Raises `MessageError`.
    """
    message_id, headers, body, expires_at, due, failures, deaths = fields[:7]
    content = _read_content(headers, body)
    envelope = Envelope.from_queue(
        queue,
        _read_text(message_id, "its id"),
        *content,
        None if expires_at is None else read_instant(expires_at, "its expiry"),
        None if due is None else read_instant(due, "its due time"),
    )
    return envelope, _read_failures(failures), _read_failures(deaths)


# --- records ------------------------------------------------------------------------------------------------------


def read_record(message_id: str, line: bytes) -> Record:
    """Return a record from a line of ``record`` in ``common.lua``."""
    kind, recorded_at, due, destination, detail = line.split(b"\0", 4)
    return Record(
        RecordKind(int(kind)),
        message_id,
        instant_of(recorded_at),
        instant_of(due) if due else None,
        destination.decode(errors="replace") or None,
        detail.decode(errors="replace"),
    )


def pairs(reply: Sequence[Any]) -> dict[bytes, bytes]:
    """Return a reply of alternating names and values as a dictionary."""
    return dict(zip(reply[::2], reply[1::2], strict=True))
