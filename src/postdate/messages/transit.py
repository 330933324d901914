"""Conversions of delayed messages: to and from the headers in a timeouts queue, and to an envelope when due."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from postdate.errors import InvalidHeaders, NotADelayedMessage
from postdate.messages.headers import Headers
from postdate.messages.message import DelayedMessage, Envelope, check_destination, check_id
from postdate.messages.times import format_timestamp, parse_timestamp


def to_envelope(message: DelayedMessage) -> Envelope:
    """Return the envelope to send when ``message`` is due: same id, and the headers without delay headers (row 11)."""
    headers = headers_with_expiry(message)
    if Headers.TIMEOUT_PROPERTIES_PREFIX in "\n".join(headers):  # rare, and one search is faster than a test of each
        headers = strip_delay_headers(headers)
    return Envelope.of(message, headers)


def headers_with_expiry(message: DelayedMessage | Envelope) -> Mapping[str, str]:
    """Return the headers with the absolute expiry, so that it survives queues that have no field for it."""
    if message.expires_at is None or Headers.EXPIRES_AT in message.headers:
        return message.headers
    return {**message.headers, Headers.EXPIRES_AT: format_timestamp(message.expires_at)}


def strip_delay_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without those that only control delayed delivery."""
    prefix = Headers.TIMEOUT_PROPERTIES_PREFIX
    return {key: value for key, value in headers.items() if not key.startswith(prefix)}


def check_not_reserved(headers: Mapping[str, str]) -> None:
    """Refuse headers with the prefix that is reserved for delayed delivery, however the message is sent.

    Raises:
        InvalidHeaders: names the header.
    """
    prefix = Headers.TIMEOUT_PROPERTIES_PREFIX
    if (reserved_key := next((key for key in headers if key.startswith(prefix)), None)) is not None:
        raise InvalidHeaders(
            f"header {reserved_key!r} has the prefix {prefix!r}, which is reserved for delayed delivery"
        )


def delay_headers(message: DelayedMessage) -> dict[str, str]:
    """Return the headers that carry destination and due time through a timeouts queue.

    Raises:
        InvalidHeaders: the message already has a header with the reserved prefix.
    """
    check_not_reserved(message.headers)
    due = format_timestamp(message.due)
    headers = {
        **message.headers,
        Headers.TIMEOUT_DESTINATION: message.destination,
        Headers.TIMEOUT_EXPIRE: due,
        Headers.TIMEOUT_DELIVER_AT: due,
    }
    if message.expires_at is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(message.expires_at)
    return headers


def from_delay_headers(message_id: str, headers: Mapping[str, str], body: bytes) -> DelayedMessage:
    """Return the delayed message that arrived at a timeouts queue.

    Raises:
        InvalidMessage: its id or destination is one that the store uses for its own messages. The store would take the
            message for one of these.
        NotADelayedMessage: destination or due time is missing from the headers.
        InvalidTimestamp: the due time or the expiry is malformed.
    """
    destination, due = headers.get(Headers.TIMEOUT_DESTINATION), headers.get(Headers.TIMEOUT_EXPIRE)
    if not destination or not due:
        missing = Headers.TIMEOUT_EXPIRE if destination else Headers.TIMEOUT_DESTINATION
        raise NotADelayedMessage(f"message {message_id!r} is no delayed message: header {missing!r} is missing")
    check_id(message_id)
    check_destination(destination)
    due_at, expires_at = parse_timestamp(due), expires_at_of(headers)
    if expires_at is not None and expires_at < due_at:
        expires_at = None  # the header stays, so the receiver decides
    return DelayedMessage(message_id, due_at, destination, strip_delay_headers(headers), body, expires_at)


def expires_at_of(headers: Mapping[str, str]) -> datetime | None:
    """Return the instant of the absolute expiry header, or ``None`` without one."""
    text = headers.get(Headers.EXPIRES_AT)
    return None if text is None else parse_timestamp(text)
