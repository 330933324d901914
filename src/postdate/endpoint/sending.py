"""From a message of the application to what is sent or stored. Pure; time is an argument. Source: specification 5."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypedDict

from postdate.clock import later
from postdate.endpoint.time_to_be_received import INFINITE, finite
from postdate.errors import (
    DelayConflict,
    DelayedDeliveryNotConfigured,
    InvalidMessage,
    MessageTooLarge,
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
from postdate.ports import DelayedMessageStore, MovingStore
from postdate.ports.stores import no_transaction_of_yours


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How one message is sent. May be used again for other messages.

    Args:
        destination: queue; ``None``: where messages of this type are routed.
        delay: not to be delivered before this long from now; zero is allowed, and ``timedelta.max`` means never.
        deliver_at: not to be delivered before this instant; aware; a past one is delivered promptly.
        expires_at: not to be delivered after this instant; aware; may go together with a delay.
        time_to_be_received: discarded if not received this long after sending; excludes a delay, because it counts
            from sending. ``None``: as the message's type says; ``timedelta.max``: for ever, whatever that says.
        use_dead_letter_queue: whether it is kept among the dead letters when it expires in its queue; ``None``: as the
            transport is set. Only for transports with dead letters, and not with a delay.
        headers: of your own.
        message_id: of your own; must be unique among delayed messages.

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
        """Return the absolute due time in UTC, or ``None`` for a message to be sent at once.

        A delay that ends after the year 9999 ends with it: ``timedelta.max`` means never, as it does elsewhere.
        """
        if self.deliver_at is not None:
            return aware_utc(self.deliver_at, "deliver_at")
        if self.delay is None:
            return None
        return later(now, self.delay)


class SendKeywords(TypedDict, total=False):
    """The fields of :class:`SendOptions` as keywords of ``send``."""

    destination: str | None
    delay: timedelta | None
    deliver_at: datetime | None
    expires_at: datetime | None
    time_to_be_received: timedelta | None
    use_dead_letter_queue: bool | None
    headers: Mapping[str, str] | None
    message_id: str | None


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends."""

    endpoint: str
    replies_to: str | None


def outgoing_headers(
    content: Mapping[str, str], options: SendOptions, sender: Sender, message_id: str, now: datetime
) -> dict[str, str]:
    """Return the headers of a message that is sent; the caller's own win where both say the same name.

    Raises:
        DelayConflict: a delay together with a time to be received (row 75); names the message type.
        InvalidHeaders: headers that are no texts, or, with a delay, one with the prefix that is reserved for it.
    """
    own = options.headers or {}
    check_headers(own)
    if options.is_delayed:
        check_not_reserved(own)
    headers = {
        Headers.MESSAGE_ID: message_id,
        Headers.CORRELATION_ID: message_id,
        Headers.CONVERSATION_ID: message_id,
        Headers.MESSAGE_INTENT: "Send",
        Headers.ORIGINATING_ENDPOINT: sender.endpoint,
        Headers.ORIGINATING_MACHINE: platform.node(),
        Headers.TIME_SENT: format_timestamp(now),
        **content,
        **own,
    }
    if sender.replies_to is not None:
        headers.setdefault(Headers.REPLY_TO_ADDRESS, sender.replies_to)
    span = finite(options.time_to_be_received)
    if span is not None:
        headers[Headers.TIME_TO_BE_RECEIVED] = format_time_span(span)
    if options.is_delayed and Headers.TIME_TO_BE_RECEIVED in headers:
        kind = content.get(Headers.ENCLOSED_MESSAGE_TYPES, "this message")
        raise DelayConflict(
            f"{kind} has both a delay and a time to be received, which counts from sending and may run out before the "
            f"message is due; use expires_at for an absolute end"
        )
    if options.expires_at is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(options.expires_at)
    due = options.due(now)
    if due is not None:
        headers.setdefault(Headers.DELIVER_AT, format_timestamp(due))
    return headers


def outgoing_message(
    content: Mapping[str, str], body: bytes, destination: str, options: SendOptions, sender: Sender, now: datetime
) -> Envelope | DelayedMessage:
    """Return what is to be kept until it is due, or the envelope of what is due already.

    Args:
        content: headers that describe the body.
        body: bytes.
        destination: queue.
        options: of this send.
        sender: who sends.
        now: UTC.
    """
    message_id = new_message_id() if options.message_id is None else options.message_id
    headers = outgoing_headers(content, options, sender, message_id, now)
    due = options.due(now)
    if due is None or due <= now:
        return Envelope(
            destination,
            message_id,
            headers,
            body,
            options.expires_at,
            time_to_be_received=finite(options.time_to_be_received),
            use_dead_letter_queue=options.use_dead_letter_queue,
        )
    return DelayedMessage(message_id, due, destination, headers, body, options.expires_at)


def check_headers_fit(message: Envelope | DelayedMessage, limit: int | None) -> None:
    """Refuse headers that no queue takes: found out when the message is due, that would be too late.

    Args:
        message: to be sent or stored.
        limit: bytes of encoded headers that the queues take; ``None``: they have no limit of their own.

    Raises:
        MessageTooLarge: with the size and the limit.
    """
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
    """Return what a store keeps of a message, also of one that is due already: its time begins now.

    Raises:
        InvalidHeaders: a header with the prefix that is reserved for delayed delivery.
    """
    if isinstance(message, DelayedMessage):
        return message
    check_not_reserved(message.headers)
    expires_at, span = message.expires_at, message.time_to_be_received
    if span is not None:
        end = later(now, span)
        expires_at = end if expires_at is None else min(expires_at, end)
    return DelayedMessage(message.message_id, now, message.destination, message.headers, message.body, expires_at)


def transactional(store: DelayedMessageStore | None, endpoint: str) -> MovingStore:
    """Return the store if it can be part of a transaction of the application.

    Raises:
        DelayedDeliveryNotConfigured: there is no store.
        ConfigurationError: it cannot.
    """
    if store is None:
        raise DelayedDeliveryNotConfigured(
            f"endpoint {endpoint!r} cannot send in a transaction of yours: it has no delayed message store; pass "
            f"delayed_delivery=DelayedDelivery(store) when you create it"
        )
    if not isinstance(store, MovingStore):
        raise no_transaction_of_yours(store)
    return store
