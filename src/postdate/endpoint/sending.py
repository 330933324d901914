"""Makes envelopes and delayed messages of what an application sends. Pure. Source: specification 5."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from postdate.clock import later
from postdate.endpoint.time_to_be_received import INFINITE, finite
from postdate.errors import (
    DelayConflict,
    InvalidMessage,
    MessageTooLarge,
    NotSupported,
)
from postdate.messages import (
    DESTINATION_LIMIT,
    LONGEST_TIME_TO_BE_RECEIVED,
    MESSAGE_ID_LIMIT,
    DelayedMessage,
    Envelope,
    Headers,
    aware_utc,
    check_headers,
    check_not_reserved,
    check_text,
    delay_headers,
    encode_headers,
    format_time_span,
    format_timestamp,
    new_message_id,
    size_in_bytes,
)
from postdate.ports import PublishingTransport, Transport


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How one message is sent: the keywords of :meth:`postdate.Endpoint.send`. May be used again for other messages.

    Raises:
        DelayConflict: options that exclude each other.
        InvalidMessage: a destination or an id that is blank or too long, a negative delay, or a time to be received of
            zero or less.
        InvalidTimestamp: a date-time without a time zone.
    """

    destination: str | None = None
    delay: timedelta | None = None
    deliver_at: datetime | None = None
    expires_at: datetime | None = None
    time_to_be_received: timedelta | None = None
    use_dead_letter_queue: bool | None = None
    headers: Mapping[str, str] | None = None
    message_id: str | None = None

    def __post_init__(self) -> None:
        if self.destination is not None:
            check_text(self.destination, "destination", DESTINATION_LIMIT)
        if self.message_id is not None:
            check_text(self.message_id, "message id", MESSAGE_ID_LIMIT)
        if self.delay is not None and self.deliver_at is not None:
            raise DelayConflict("delay and deliver_at exclude each other: give one of them")
        for name in ("delay", "time_to_be_received"):
            span: object = getattr(self, name)
            if span is not None and not isinstance(span, timedelta):
                raise InvalidMessage(f"{name} must be a timedelta, not {type(span).__name__} {span!r}")
        if self.delay is not None and self.delay < timedelta(0):
            raise InvalidMessage(f"delay must not be negative, not {self.delay}")
        if self.time_to_be_received is not None and self.time_to_be_received <= timedelta(0):
            raise InvalidMessage(f"time_to_be_received must be above zero, not {self.time_to_be_received}")
        if self.time_to_be_received is not None and (LONGEST_TIME_TO_BE_RECEIVED < self.time_to_be_received < INFINITE):
            raise InvalidMessage(
                f"time_to_be_received is longer than {LONGEST_TIME_TO_BE_RECEIVED.days:,} days: "
                f"{self.time_to_be_received}; leave it out, or say timedelta.max, for a message that is wanted for ever"
            )
        if self.use_dead_letter_queue is not None and self.is_delayed:
            raise DelayConflict(
                "use_dead_letter_queue is for the queue that a message is sent to at once: not with a delay"
            )
        for name in ("deliver_at", "expires_at"):
            if getattr(self, name) is not None:
                aware_utc(getattr(self, name), name)

    @property
    def is_delayed(self) -> bool:
        """Whether it is to be delivered later."""
        return self.delay is not None or self.deliver_at is not None

    def due(self, now: datetime) -> datetime | None:
        """Return the due time in UTC, or ``None`` for at once; the end of the calendar means never."""
        if self.deliver_at is not None:
            return aware_utc(self.deliver_at, "deliver_at")
        if self.delay is None:
            return None
        return later(now, self.delay)


def sender_headers(endpoint: str, replies_to: str | None) -> Mapping[str, str]:
    sender = {Headers.ORIGINATING_ENDPOINT: endpoint, Headers.ORIGINATING_MACHINE: platform.node()}
    return sender if replies_to is None else {**sender, Headers.REPLY_TO_ADDRESS: replies_to}


def sent_by_saga(saga_id: str, saga_type: str) -> Mapping[str, str]:
    return {Headers.ORIGINATING_SAGA_ID: saga_id, Headers.ORIGINATING_SAGA_TYPE: saga_type}


def to_saga_of(incoming: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers by which a reply finds the saga instance that sent a message, if one did (ADR 16).

    They are the saga's, under the names by which timeouts find instances: so an endpoint in any language can reply.
    """
    saga_id = incoming.get(Headers.ORIGINATING_SAGA_ID, "")
    saga_type = incoming.get(Headers.ORIGINATING_SAGA_TYPE, "")
    return {Headers.SAGA_ID: saga_id, Headers.SAGA_TYPE: saga_type} if saga_id and saga_type else {}


def reply_options(incoming: Mapping[str, str], message_id: str, headers: Mapping[str, str] | None) -> SendOptions:
    """Return how a reply is sent; headers of the application win."""
    address = incoming.get(Headers.REPLY_TO_ADDRESS)
    if not address:
        raise InvalidMessage(f"message {message_id!r} has no header {Headers.REPLY_TO_ADDRESS!r} to reply to")
    own = {Headers.MESSAGE_INTENT: "Reply", **to_saga_of(incoming), **(headers or {})}
    return SendOptions(destination=address, headers=own)


def publishing(transport: Transport) -> PublishingTransport:
    """Return the transport if it can publish; refuse if it cannot."""
    if not isinstance(transport, PublishingTransport):
        raise NotSupported(
            f"the queues of {type(transport).__name__} cannot publish, and nobody can subscribe there: send the "
            f"message to each of its receivers, or use RabbitMqTransport"
        )
    return transport


def outgoing_message(
    sender: Mapping[str, str],
    content: Mapping[str, str],
    body: bytes,
    destination: str,
    options: SendOptions,
    now: datetime,
) -> Envelope | DelayedMessage:
    """Return a :class:`DelayedMessage`, or an :class:`Envelope` where the message is due already or has no delay.

    ``content`` are headers that describe the body; those of ``options`` win where both say the same name.

    Raises:
        DelayConflict: a delay together with a time to be received (row 75); names the message type.
        InvalidHeaders: headers that are no texts, or, with a delay, one with the prefix that is reserved for it.
    """
    own, due, span = options.headers or {}, options.due(now), finite(options.time_to_be_received)
    check_headers(own)
    message_id = new_message_id() if options.message_id is None else options.message_id
    headers = {
        Headers.MESSAGE_ID: message_id,
        Headers.CORRELATION_ID: message_id,
        Headers.CONVERSATION_ID: message_id,
        Headers.MESSAGE_INTENT: "Send",
        Headers.TIME_SENT: format_timestamp(now),
        **sender,
        **content,
        **own,
    }
    if span is not None:
        headers[Headers.TIME_TO_BE_RECEIVED] = format_time_span(span)
    if options.expires_at is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(options.expires_at)
    if due is not None:
        check_not_reserved(own)
        if Headers.TIME_TO_BE_RECEIVED in headers:
            kind = content.get(Headers.ENCLOSED_MESSAGE_TYPES, "this message")
            raise DelayConflict(
                f"{kind} has both a delay and a time to be received, which counts from sending and may run out before "
                f"the message is due; use expires_at for an absolute end"
            )
        headers.setdefault(Headers.DELIVER_AT, format_timestamp(due))
        if due > now:
            return DelayedMessage(message_id, due, destination, headers, body, options.expires_at)
    return Envelope(
        destination,
        message_id,
        headers,
        body,
        options.expires_at,
        time_to_be_received=span,
        use_dead_letter_queue=options.use_dead_letter_queue,
    )


def check_headers_fit(message: Envelope | DelayedMessage, limit: int | None) -> None:
    """Refuse headers over ``limit`` bytes, encoded, now: when the message is due, that would be too late."""
    if limit is None:
        return
    size = size_in_bytes(encode_headers(message.headers), b"")
    if size > limit:
        raise MessageTooLarge(
            f"message {message.message_id!r} has {size:,} bytes of headers, more than the {limit:,} that its queues "
            f"take: put what is large into the body"
        )


def through_queue(message: DelayedMessage, queue: str) -> Envelope:
    """Return the envelope that carries a delayed message to a timeouts queue."""
    return Envelope(queue, message.message_id, delay_headers(message), message.body)


def kept(message: Envelope | DelayedMessage, now: datetime) -> DelayedMessage:
    """Return the delayed message that a store keeps; one that is due already is due ``now``."""
    if isinstance(message, DelayedMessage):
        return message
    check_not_reserved(message.headers)
    left = message.time_left(now)
    end = None if left is None else later(now, left)
    return DelayedMessage(message.message_id, now, message.destination, message.headers, message.body, end)
