"""Makes the messages of an endpoint, and sends them or stores them, wherever delayed ones go.

Source: specification 5; ADR 9, 14.
"""

from __future__ import annotations

import logging
import platform
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from postdate.clock import Clock, later
from postdate.core.receive.settling import RepeatableStoring
from postdate.core.recoverability import checked_answers
from postdate.core.simple_store import enlisting
from postdate.core.timeout_manager.steps import clear_timeouts, to_timeout_manager
from postdate.core.upkeep.store_clock import latest_time
from postdate.core.upkeep.wall_times import KeptZones, WallTime
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.message_types import MessageTypes, TimesToBeReceived, finite, type_name
from postdate.endpoint.send_options import SendOptions
from postdate.endpoint.service import EndpointContext
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
from postdate.endpoint.timeout_manager import timeout_manager_queue
from postdate.errors import (
    DelayConflict,
    DelayedDeliveryNotConfigured,
    InvalidMessage,
    MessageTooLarge,
    NotSupported,
    PostdateError,
    UnknownMessageType,
)
from postdate.messages import (
    DelayedMessage,
    Envelope,
    Headers,
    check_headers,
    check_not_reserved,
    delay_headers,
    encode_headers,
    format_time_span,
    format_timestamp,
    new_message_id,
    size_in_bytes,
)
from postdate.ports import (
    End,
    JoiningStore,
    PublishingTransport,
    RecordKind,
    TransactionMode,
    Transport,
    TransportCapabilities,
    Work,
)
from postdate.ports.changing import no_transaction_of_yours
from postdate.runtime import tracing

log = logging.getLogger("postdate.endpoint")


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
    clock: Clock,
) -> Envelope | DelayedMessage:
    """Return a :class:`DelayedMessage`, or an :class:`Envelope` where the message is due already or has no delay.

    ``content`` are headers that describe the body; those of ``options`` win where both say the same name.

    Raises:
        DelayConflict: a delay together with a time to be received (row 75); names the message type.
        InvalidHeaders: headers that are no texts, or, with a delay, one with the prefix that is reserved for it.
    """
    now = clock.now()
    own, due = options.headers or {}, options.due(now, latest_time(clock))
    span = finite(options.time_to_be_received)
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
    headers.pop(Headers.WALL_TIME, None)  # of another message, whose headers were copied
    if span is not None:
        headers[Headers.TIME_TO_BE_RECEIVED] = format_time_span(span)
    if options.expires_at is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(options.expires_at)
    if options.wall_time is not None:
        headers[Headers.WALL_TIME] = str(options.wall_time)
    if due is not None:
        check_not_reserved(own)
        if Headers.TIME_TO_BE_RECEIVED in headers:
            kind = content.get(Headers.ENCLOSED_MESSAGE_TYPES, "this message")
            raise DelayConflict(
                f"{kind} has both a delay and a time to be received, which counts from sending and may run out before "
                f"the message is due; use expires_at for an absolute end"
            )
        headers.setdefault(Headers.DELIVER_AT, format_timestamp(due))
    headers.pop(Headers.START_NEW_TRACE, None)
    headers |= tracing.current.created(message_id, destination, delayed=due is not None and due > now)
    if due is not None and due > now:
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


def kept(message: Envelope | DelayedMessage, clock: Clock) -> DelayedMessage:
    """Return the delayed message that a store keeps; one that is due already is due now.

    Its time to be received counts from the latest time that it may be, as a delay does, so that it is never short.
    """
    if isinstance(message, DelayedMessage):
        return message
    check_not_reserved(message.headers)
    latest = latest_time(clock)
    remaining = message.time_left(latest)
    end = None if remaining is None else later(latest, remaining)
    return DelayedMessage(message.message_id, clock.now(), message.destination, message.headers, message.body, end)


Outgoing = Envelope | DelayedMessage


class OutgoingMessages:
    """Makes envelopes and delayed messages of what an endpoint sends, and sends them.

    Delayed messages go into the store where it is in the database of the queues, else through a queue: of the delayed
    delivery, where there is one, else of the timeout manager (row 88). A message type without a route goes to the
    endpoint itself, if that ``handles`` it.
    """

    def __init__(
        self,
        context: EndpointContext,
        delayed_delivery: DelayedDelivery | None,
        timeout_manager: TimeoutManager | ExternalTimeoutManager | None,
        types: MessageTypes,
        times_to_be_received: TimesToBeReceived,
        handles: Callable[[type[Any]], bool],
    ) -> None:
        self.endpoint, self.transport = context.endpoint, context.transport
        self.mode, self.clock = context.mode, context.clock
        self.types, self.times_to_be_received, self._handles = types, times_to_be_received, handles
        self.routes = dict[type[Any], str]()
        """From a message type to its destination."""
        self._sender = sender_headers(self.endpoint, None if context.send_only else self.endpoint)
        self.store = None if delayed_delivery is None else delayed_delivery.store
        self._enlisted = None if delayed_delivery is None else enlisting(delayed_delivery.claims, self.transport)
        self._zones = None if delayed_delivery is None else KeptZones(delayed_delivery.claims)
        self._manager: str | None = None
        if isinstance(timeout_manager, ExternalTimeoutManager):
            self._manager = timeout_manager.address
        elif timeout_manager is not None:
            self._manager = timeout_manager_queue(self.endpoint, self.transport.capabilities)
        self._to_queue: Callable[[DelayedMessage], Envelope] | None = None
        if delayed_delivery is not None:
            self._to_queue = partial(through_queue, queue=timeouts_queue(self.endpoint))
        elif self._manager is not None:
            self._to_queue = partial(to_timeout_manager, queue=self._manager)

    @property
    def can_delay(self) -> bool:
        return self._to_queue is not None

    @property
    def delays_leave_first(self) -> bool:
        """Whether delayed messages of a handler leave before its message does, for a store that knows used ids."""
        return self.mode is TransactionMode.RECEIVE_ONLY and self._enlisted is None and self._manager is None

    def make(self, message: object, options: SendOptions, related_to: Mapping[str, str] | None = None) -> Outgoing:
        """Return the envelope, or the delayed message, for a message of the application; sends nothing."""
        content, body = ({}, message) if isinstance(message, bytes) else self.types.encode(message)
        destination = options.destination or self.routes.get(type(message))
        if destination is None and self._handles(type(message)):
            destination = self.endpoint
        if destination is None:
            raise UnknownMessageType(
                f"no destination for {type_name(type(message))}: pass destination='queue', or route its type with "
                f"endpoint.route({type(message).__name__}, 'queue')"
            )
        can = self.transport.capabilities
        options = self._expiring(type(message), options, can)
        if options.is_delayed:
            self._delaying()
        if options.zone is not None:
            if self._zones is None:
                raise NotSupported("a timeout manager keeps instants: give deliver_at with its offset, and no zone")
            self._zones.check(options.zone)
        if related_to:
            content = {**_conversation(related_to), **content}
        outgoing = outgoing_message(self._sender, content, body, destination, options, self.clock)
        check_headers_fit(outgoing, can.largest_headers_bytes)
        return outgoing

    def publish_options(
        self, message: object, headers: Mapping[str, str] | None, message_id: str | None
    ) -> SendOptions:
        """Return how an event is sent. It cannot be delayed (row 7)."""
        address = publishing(self.transport).event_address(self.types.name_of(type(message)))
        own = {Headers.MESSAGE_INTENT: "Publish", **(headers or {})}
        return SendOptions(address, headers=own, message_id=message_id)

    def into_transaction(self, message: object, options: SendOptions) -> tuple[JoiningStore, DelayedMessage]:
        """Return the store, and the delayed message for a transaction of the application; stores nothing."""
        if self.store is None:
            raise DelayedDeliveryNotConfigured(
                f"endpoint {self.endpoint!r} cannot send in a transaction of yours: it has no delayed message store; "
                f"pass delayed_delivery=DelayedDelivery(store) when you create it"
            )
        if not isinstance(self.store, JoiningStore):
            raise no_transaction_of_yours(self.store)
        return self.store, kept(self.make(message, options), self.clock)

    async def send(self, messages: Sequence[Outgoing]) -> None:
        """Send or store what :meth:`make` made, outside any handler's transaction."""
        envelopes, delayed = self._split(messages)
        for message in delayed:  # each in a transaction of its own
            assert self._enlisted is not None
            await self.keep_zone(message)
            await self._enlisted.store(message, self.clock.now())
        if envelopes:
            errors = await self.transport.send(envelopes, self.clock.now())
            for error in checked_answers(self.transport, len(envelopes), errors):
                if error is not None:
                    raise error

    async def keep_zone(self, outgoing: Outgoing) -> None:
        """Have the store know the zone whose clocks a message follows, if it goes there directly."""
        wall = WallTime.of(outgoing.headers)
        if wall is not None and self._zones is not None and isinstance(outgoing, DelayedMessage):
            await self._zones.keep(wall.zone, self.clock.now())

    async def keep_zone_afterwards(self, outgoing: Outgoing) -> None:
        """Do the same for a message that has been stored: a handler may have a file's only writer."""
        try:
            if self._enlisted is not None:
                await self.keep_zone(outgoing)
        except PostdateError as error:
            log.warning("message %s may not follow the clocks of its zone: %s", outgoing.message_id, error)

    def zones_to_keep(self, outgoing: Sequence[Outgoing]) -> list[Callable[[], Awaitable[None]]]:
        """Return what is to be done for those of stored messages that follow a zone."""
        by_clocks = [each for each in outgoing if Headers.WALL_TIME in each.headers]
        return [partial(self.keep_zone_afterwards, each) for each in by_clocks]

    def end_of(
        self, outgoing: Sequence[Outgoing], record: RecordKind, detail: str = "", also: Sequence[Work] = ()
    ) -> End:
        """Return the end of a handled message that sends or stores ``outgoing`` in the same transaction."""
        if not outgoing and not also:
            return End(record, detail)
        envelopes, delayed = self._split(outgoing)
        return End(record, detail, envelopes, [*also, *self.storing(delayed, self.clock.now())])

    def storing(self, delayed: Sequence[DelayedMessage], now: datetime) -> list[RepeatableStoring]:
        """Return the work that stores delayed messages in the queues' database; none if the store is elsewhere."""
        return [RepeatableStoring(self._enlisted, delayed, now)] if self._enlisted is not None and delayed else []

    def clear_timeouts(self, saga_id: uuid.UUID) -> Envelope | None:
        """Return the order to forget all timeouts of a completed saga; ``None``: there is no timeout manager.

        Timeouts that a delayed delivery keeps arrive, and are ignored (specification 4.10). Beside one, the order is
        about those that the timeout manager still has.
        """
        return None if self._manager is None else clear_timeouts(saga_id, self._manager, new_message_id())

    def _delaying(self) -> Callable[[DelayedMessage], Envelope]:
        """Return the function that wraps a delayed message for its queue; refuse if there is none (row 15)."""
        if self._to_queue is None:
            raise DelayedDeliveryNotConfigured(
                f"endpoint {self.endpoint!r} cannot delay messages: it has no delayed message store; pass "
                f"delayed_delivery=DelayedDelivery(store) when you create it"
            )
        return self._to_queue

    def _split(self, outgoing: Sequence[Outgoing]) -> tuple[list[Envelope], list[DelayedMessage]]:
        """Return envelopes to be sent, and delayed messages to be stored in the database of the queues."""
        envelopes = [message for message in outgoing if isinstance(message, Envelope)]
        delayed = [message for message in outgoing if isinstance(message, DelayedMessage)]
        if self._enlisted is not None or not delayed:
            return envelopes, delayed
        return [*envelopes, *map(self._delaying(), delayed)], []

    def _expiring(self, message_type: type[Any], options: SendOptions, can: TransportCapabilities) -> SendOptions:
        """Return the options with the time to be received of the message type, unless this send has its own."""
        if options.time_to_be_received is None:
            span = None if message_type is bytes else self.times_to_be_received.of(message_type)
            if span is not None:
                options = replace(options, time_to_be_received=span)
        if finite(options.time_to_be_received) is not None and not can.expires_messages:
            raise NotSupported(
                f"the queues of {type(self.transport).__name__} do not expire messages: send {type_name(message_type)} "
                f"without time_to_be_received"
            )
        if options.use_dead_letter_queue is not None and not can.dead_letters:
            raise NotSupported(
                f"the queues of {type(self.transport).__name__} have no dead letters: send without "
                f"use_dead_letter_queue"
            )
        return options


def _conversation(incoming: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that tie a message to the one being handled."""
    tied = {Headers.RELATED_TO: incoming.get(Headers.MESSAGE_ID, "")}
    for header in (Headers.CONVERSATION_ID, Headers.CORRELATION_ID):
        if header in incoming:
            tied[header] = incoming[header]
    return {key: value for key, value in tied.items() if value}
