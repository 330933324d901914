"""Reads and makes the messages of a timeout manager. Pure. Source: specification 4.3, 4.5, 4.8."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

from postdate.core.expiry import end_of_use
from postdate.errors import InvalidMessage, InvalidTimestamp, NotADelayedMessage
from postdate.messages import (
    DESTINATION_LIMIT,
    DelayedMessage,
    Envelope,
    Headers,
    check_text,
    expires_at_of,
    format_timestamp,
    parse_timestamp,
)
from postdate.ports.timeouts import Timeout

TRUE: Final = "True"
_NO_SAGA: Final = uuid.UUID(int=0)


def to_timeout_manager(message: DelayedMessage, queue: str) -> Envelope:
    """Return the envelope for a timeout manager: the message, with its due time and destination in headers (row 91).

    The time of sending is written anew when the message is dispatched (specification 4.8), and a time to be received
    counts from that: so its end goes along as an absolute one, which a delayed retry would lose otherwise.
    """
    headers = {**message.headers, Headers.EXPIRE: format_timestamp(message.due)}
    headers[Headers.ROUTE_EXPIRED_TIMEOUT_TO] = message.destination
    end = _end_of(headers) if Headers.TIME_TO_BE_RECEIVED in headers else message.expires_at
    if end is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(end)
    return Envelope(queue, message.message_id, headers, message.body)


def clear_timeouts(saga_id: uuid.UUID, queue: str, message_id: str) -> Envelope:
    """Return the order to a timeout manager to forget all timeouts of a saga (specification 4.10)."""
    headers = {
        Headers.MESSAGE_ID: message_id,
        Headers.CONTROL_MESSAGE: TRUE,
        Headers.CLEAR_TIMEOUTS: TRUE,
        Headers.SAGA_ID: str(saga_id),
    }
    return Envelope(queue, message_id, headers)


def is_clearing(envelope: Envelope) -> bool:
    return Headers.CLEAR_TIMEOUTS in envelope.headers


def saga_of(envelope: Envelope) -> str | None:
    """Return the id of the saga that a message is about, or ``None``; one that is no UUID is an invalid message."""
    text = envelope.headers.get(Headers.SAGA_ID)
    if text is None:
        return None
    try:
        saga = uuid.UUID(text.strip())
    except ValueError as error:
        raise InvalidMessage(
            f"message {envelope.message_id!r} has header {Headers.SAGA_ID!r} with {text[:60]!r}, which is no UUID"
        ) from error
    return None if saga == _NO_SAGA else str(saga)


def timeout_of(envelope: Envelope, owner: str) -> Timeout:
    """Return the timeout that a message asks for; the same message, received again, asks for the same one.

    Delayed retries of a message may have its id, so due time and destination are part of the timeout's. Raises
    :class:`NotADelayedMessage` without either of these (rows 92, 94), and errors for what is malformed.
    """
    headers, message_id = dict(envelope.headers), envelope.message_id
    expire = headers.get(Headers.EXPIRE)
    if expire is None:
        raise NotADelayedMessage(
            f"Non timeout message arrived at the timeout manager: message {message_id!r} has no header "
            f"{Headers.EXPIRE!r}"
        )
    destination = headers.get(Headers.ROUTE_EXPIRED_TIMEOUT_TO) or headers.get(Headers.REPLY_TO_ADDRESS)
    if not destination:
        raise NotADelayedMessage(
            f"message {message_id!r} is due at {expire}, but nobody knows where: it has neither header "
            f"{Headers.ROUTE_EXPIRED_TIMEOUT_TO!r} nor an address for replies; add one of them and return it"
        )
    check_text(destination, f"the destination of message {message_id!r}", DESTINATION_LIMIT)
    headers.setdefault(Headers.MESSAGE_ID, message_id)
    due = parse_timestamp(expire)
    own_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{message_id}\n{format_timestamp(due)}\n{destination}"))
    # A retried message may be a reply to a saga that other handlers take, too: as a timeout of that saga it would be
    # forgotten with the others.
    saga = None if Headers.DELAYED_RETRIES in headers else saga_of(envelope)
    return Timeout(own_id, due, destination, saga, owner, headers, envelope.body)


def announcement(timeout_id: str, queue: str) -> Envelope:
    """Return the control message of a due timeout, with the timeout's id, which the dispatched message gets, too."""
    headers = {Headers.MESSAGE_ID: timeout_id, Headers.CONTROL_MESSAGE: TRUE, Headers.TIMEOUT_ID: timeout_id}
    return Envelope(queue, timeout_id, headers)


def announced_timeout(envelope: Envelope) -> str:
    """Return the id of the timeout that a control message announces; a UUID is spelled as Postdate does."""
    timeout_id = envelope.headers.get(Headers.TIMEOUT_ID)
    if not timeout_id:
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} arrived at the dispatcher of the timeout manager without header "
            f"{Headers.TIMEOUT_ID!r}"
        )
    try:
        return str(uuid.UUID(timeout_id.strip()))
    except ValueError:  # of a storage of one's own, whose ids may be anything
        return timeout_id


def undelayed(timeout: Timeout, message_id: str) -> Envelope:
    """Return the envelope for a timeout's destination; the headers that steered it stay (specification 4.3).

    It has no due time: how a message with one ends is held against the records of a store, and the timeout manager has
    none. ``message_id`` is that in the timeout manager's queue.
    """
    return Envelope(timeout.destination, message_id, timeout.headers, timeout.body, _expires_at(timeout))


def dispatched(timeout: Timeout, message_id: str, now: datetime) -> Envelope:
    """Return the envelope of a stored timeout: sent now, and related to its timeout (specification 4.8)."""
    headers = {
        **timeout.headers,
        Headers.TIME_SENT: format_timestamp(now),
        Headers.RELATED_TO_TIMEOUT_ID: timeout.timeout_id,
    }
    return undelayed(replace(timeout, headers=headers), message_id)


def _expires_at(timeout: Timeout) -> datetime | None:
    """Return when the queue lets it expire; the header stays in any case, and its receiver decides."""
    try:
        expires_at = expires_at_of(timeout.headers)
    except InvalidTimestamp:
        return None
    return None if expires_at is None or expires_at < timeout.due else expires_at


def _end_of(headers: Mapping[str, str]) -> datetime | None:
    try:
        return end_of_use(headers)
    except InvalidTimestamp:  # its receiver decides
        return None
