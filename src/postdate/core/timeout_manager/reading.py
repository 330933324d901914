"""What the messages of a timeout manager say, and how they are made. Pure. Source: specification 4.3, 4.5, 4.8."""

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
    """Return what is sent to a timeout manager: when, where, and otherwise the message itself (row 91).

    The time of sending is written anew when the message is dispatched (specification 4.8), and a time to be received
    counts from that: so the end of it goes along as an absolute one, which a delayed retry would lose otherwise.
    """
    headers = {**message.headers, Headers.EXPIRE: format_timestamp(message.due)}
    headers[Headers.ROUTE_EXPIRED_TIMEOUT_TO] = message.destination
    end = _end_of(headers) if Headers.TIME_TO_BE_RECEIVED in headers else message.expires_at
    if end is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(end)
    return Envelope(queue, message.message_id, headers, message.body)


def clear_timeouts(saga_id: uuid.UUID, queue: str, message_id: str) -> Envelope:
    """Return the order to a timeout manager to forget all timeouts of a saga (specification 4.10).

    Args:
        saga_id: of the saga.
        queue: of the timeout manager.
        message_id: of the order.
    """
    headers = {
        Headers.MESSAGE_ID: message_id,
        Headers.CONTROL_MESSAGE: TRUE,
        Headers.CLEAR_TIMEOUTS: TRUE,
        Headers.SAGA_ID: str(saga_id),
    }
    return Envelope(queue, message_id, headers)


def is_clearing(envelope: Envelope) -> bool:
    """Return whether a message orders to forget the timeouts of a saga."""
    return Headers.CLEAR_TIMEOUTS in envelope.headers


def saga_of(envelope: Envelope) -> str | None:
    """Return the id of the saga that a message is about, or ``None``: of none.

    Raises:
        InvalidMessage: the header is no UUID.
    """
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

    All delayed retries of a message may have its id, so the due time and the destination are part of the timeout's.

    Args:
        envelope: as received.
        owner: name of the endpoint whose timeout manager it is.

    Raises:
        NotADelayedMessage: no due time, or nowhere to send it (rows 92, 94).
        InvalidTimestamp: the due time is malformed.
        InvalidMessage: the destination is no address, or the id of the saga no UUID.
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
    # A message that is retried may be a reply to a saga, which others than that saga handle, too. Belonging to it, it
    # would be forgotten with the saga's timeouts.
    saga = None if Headers.DELAYED_RETRIES in headers else saga_of(envelope)
    return Timeout(own_id, due, destination, saga, owner, headers, envelope.body)


def announcement(timeout_id: str, queue: str) -> Envelope:
    """Return the control message that tells the dispatch step of a due timeout.

    Its id is that of the timeout, and so becomes the id of what is dispatched: repetitions can be told as such.
    """
    headers = {Headers.MESSAGE_ID: timeout_id, Headers.CONTROL_MESSAGE: TRUE, Headers.TIMEOUT_ID: timeout_id}
    return Envelope(queue, timeout_id, headers)


def announced_timeout(envelope: Envelope) -> str:
    """Return the id of the timeout that a control message tells of, a UUID as Postdate writes it: others may differ.

    Raises:
        NotADelayedMessage: it tells of none.
    """
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
    """Return what is sent to the destination of a timeout; the headers that steered it stay (specification 4.3).

    It has no due time of its own there: what a message with one ends as is recorded and held against the records of a
    store, and the timeout manager has none.

    Args:
        timeout: as stored, or as read from a message that is due already.
        message_id: of the message in its queue.
    """
    return Envelope(timeout.destination, message_id, timeout.headers, timeout.body, _expires_at(timeout))


def dispatched(timeout: Timeout, message_id: str, now: datetime) -> Envelope:
    """Return what is sent of a stored timeout: sent now, and related to its timeout (specification 4.8)."""
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
