"""Outgoing messages of an endpoint: creates them, and sends or stores them.

Source: ADR 9, 14.
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

from postdate import errors, messages, ports
from postdate.clock import Clock, later
from postdate.core.receive.settling import RepeatableStoring
from postdate.core.recoverability import check_answers
from postdate.core.simple_store import enlisting_store
from postdate.core.timeout_manager.steps import clear_order, timeout_manager_envelope
from postdate.core.upkeep.store_clock import latest_time
from postdate.core.upkeep.wall_times import WallTime, ZoneMarkers
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.message_types import MessageTypes, TimesToBeReceived, finite_span, type_name
from postdate.endpoint.send_options import SendOptions
from postdate.endpoint.service import EndpointContext
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
from postdate.endpoint.timeout_manager import timeout_manager_queue
from postdate.ports.changing import cannot_join_error
from postdate.runtime import tracing

log = logging.getLogger("postdate.endpoint")


def sender_headers(endpoint: str, replies_to: str | None) -> Mapping[str, str]:
    sender = {messages.Headers.ORIGINATING_ENDPOINT: endpoint, messages.Headers.ORIGINATING_MACHINE: platform.node()}
    return sender if replies_to is None else {**sender, messages.Headers.REPLY_TO_ADDRESS: replies_to}


def originating_saga_headers(saga_id: str, saga_type: str) -> Mapping[str, str]:
    return {messages.Headers.ORIGINATING_SAGA_ID: saga_id, messages.Headers.ORIGINATING_SAGA_TYPE: saga_type}


def reply_saga_headers(incoming: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers with which a reply finds the saga instance that sent a message, if there is one (ADR 16).

    Their values come from the saga, and their names are those of timeouts, so an endpoint in any language can reply.
    """
    saga_id = incoming.get(messages.Headers.ORIGINATING_SAGA_ID, "")
    saga_type = incoming.get(messages.Headers.ORIGINATING_SAGA_TYPE, "")
    return {messages.Headers.SAGA_ID: saga_id, messages.Headers.SAGA_TYPE: saga_type} if saga_id and saga_type else {}


def reply_options(incoming: Mapping[str, str], message_id: str, headers: Mapping[str, str] | None) -> SendOptions:
    """Return the options of a reply. Headers of the application replace other headers."""
    address = incoming.get(messages.Headers.REPLY_TO_ADDRESS)
    if not address:
        raise errors.InvalidMessage(
            f"message {message_id!r} has no header {messages.Headers.REPLY_TO_ADDRESS!r} to reply to"
        )
    own = {messages.Headers.MESSAGE_INTENT: "Reply", **reply_saga_headers(incoming), **(headers or {})}
    return SendOptions(destination=address, headers=own)


def publishing_transport(transport: ports.Transport) -> ports.PublishingTransport:
    """Return the transport if it can publish, else raise an error."""
    if not isinstance(transport, ports.PublishingTransport):
        raise errors.NotSupported(
            f"the queues of {type(transport).__name__} support neither publishing nor subscribing: send the "
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
) -> messages.Envelope | messages.DelayedMessage:
    """Return a :class:`DelayedMessage`, or an :class:`Envelope` if the message is due already or has no delay.

    ``content`` has the headers that describe the body. Headers of ``options`` replace headers of the same name.

    Raises:
        DelayConflict: a delay together with a time to be received (row 75); the text names the message type.
        InvalidHeaders: a header is no text, or, with a delay, it has the prefix that is reserved for delayed messages.
    """
    now = clock.now()
    application_headers, due = options.headers or {}, options.due(now, latest_time(clock))
    span = finite_span(options.time_to_be_received)
    messages.check_headers(application_headers)
    message_id = messages.new_message_id() if options.message_id is None else options.message_id
    headers = {
        messages.Headers.MESSAGE_ID: message_id,
        messages.Headers.CORRELATION_ID: message_id,
        messages.Headers.CONVERSATION_ID: message_id,
        messages.Headers.MESSAGE_INTENT: "Send",
        messages.Headers.TIME_SENT: messages.format_timestamp(now),
        **sender,
        **content,
        **application_headers,
    }
    for name in (messages.Headers.WALL_TIME, messages.Headers.LOAD):
        headers.pop(name, None)  # it belongs to another message, whose headers were copied
    if span is not None:
        headers[messages.Headers.TIME_TO_BE_RECEIVED] = messages.format_time_span(span)
    if options.expires_at is not None:
        headers[messages.Headers.EXPIRES_AT] = messages.format_timestamp(options.expires_at)
    if options.wall_time is not None:
        headers[messages.Headers.WALL_TIME] = str(options.wall_time)
    if due is not None:
        messages.check_not_reserved(application_headers)
        if messages.Headers.TIME_TO_BE_RECEIVED in headers:
            type_text = content.get(messages.Headers.ENCLOSED_MESSAGE_TYPES, "this message")
            raise errors.DelayConflict(
                f"{type_text} has both a delay and a time to be received, which counts from sending and may run out "
                f"before "
                f"the message is due; use expires_at for an absolute expiry"
            )
        headers.setdefault(messages.Headers.DELIVER_AT, messages.format_timestamp(due))
    headers.pop(messages.Headers.START_NEW_TRACE, None)
    headers |= tracing.current.trace_message(message_id, destination, delayed=due is not None and due > now)
    if due is not None and due > now:
        return messages.DelayedMessage(message_id, due, destination, headers, body, options.expires_at)
    return messages.Envelope(
        destination,
        message_id,
        headers,
        body,
        options.expires_at,
        time_to_be_received=span,
        use_dead_letter_queue=options.use_dead_letter_queue,
    )


def check_headers_fit(message: messages.Envelope | messages.DelayedMessage, limit: int | None) -> None:
    """Raise an error for headers of more than ``limit`` encoded bytes: when the message is due, it is too late."""
    if limit is None:
        return
    size = messages.size_in_bytes(messages.encode_headers(message.headers), b"")
    if size > limit:
        raise errors.MessageTooLarge(
            f"message {message.message_id!r} has {size:,} bytes of headers, more than the {limit:,} that its queues "
            f"take: put what is large into the body"
        )


def timeouts_queue_envelope(message: messages.DelayedMessage, queue: str) -> messages.Envelope:
    """Return the envelope that carries a delayed message to a timeouts queue."""
    return messages.Envelope(queue, message.message_id, messages.delay_headers(message), message.body)


def delayed_message_of(message: messages.Envelope | messages.DelayedMessage, clock: Clock) -> messages.DelayedMessage:
    """Return the delayed message to store. An envelope, which has no delay, is due now.

    The time to be received counts from the latest time that the clock may mean, as a delay does, so it is never short.
    """
    if isinstance(message, messages.DelayedMessage):
        return message
    messages.check_not_reserved(message.headers)
    latest = latest_time(clock)
    remaining = message.time_left(latest)
    expiry = None if remaining is None else later(latest, remaining)
    return messages.DelayedMessage(
        message.message_id, clock.now(), message.destination, message.headers, message.body, expiry
    )


Outgoing = messages.Envelope | messages.DelayedMessage


class OutgoingMessages:
    """The outgoing messages of an endpoint: creates envelopes and delayed messages, and sends them.

    If the store is in the database of the queues, delayed messages are stored directly. Else they are sent to a queue:
    that of the delayed delivery, or without one that of the timeout manager (row 88). A message type without a route
    goes to the endpoint itself, if it ``handles`` the type.
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
        self.endpoint = context.endpoint
        self.transport = context.transport
        self.mode = context.mode
        self.clock = context.clock
        self.types = types
        self.times_to_be_received = times_to_be_received
        self._handles = handles
        self.routes = dict[type[Any], str]()
        """Destinations by message type."""
        # Headers that name the sender. A send-only endpoint has no queue for replies.
        self._sender = sender_headers(self.endpoint, None if context.send_only else self.endpoint)
        # The store of the application; `None` without a delayed delivery.
        self.store = None if delayed_delivery is None else delayed_delivery.store
        # The store, if it is in the database of the queues and can store in their transactions.
        self._enlisting_store = (
            None if delayed_delivery is None else enlisting_store(delayed_delivery.claiming_store, self.transport)
        )
        self._zones = None if delayed_delivery is None else ZoneMarkers(delayed_delivery.claiming_store)
        # The queue of the timeout manager, here or in another endpoint.
        self._manager: str | None = None
        if isinstance(timeout_manager, ExternalTimeoutManager):
            self._manager = timeout_manager.address
        elif timeout_manager is not None:
            self._manager = timeout_manager_queue(self.endpoint, self.transport.capabilities)
        # Wraps a delayed message for its queue; `None`: the endpoint cannot delay messages.
        self._to_queue: Callable[[messages.DelayedMessage], messages.Envelope] | None = None
        if delayed_delivery is not None:
            self._to_queue = partial(timeouts_queue_envelope, queue=timeouts_queue(self.endpoint))
        elif self._manager is not None:
            self._to_queue = partial(timeout_manager_envelope, queue=self._manager)

    @property
    def can_delay(self) -> bool:
        return self._to_queue is not None

    @property
    def has_early_delays(self) -> bool:
        """Whether delayed messages of a handler are sent to a store before the handled message is acknowledged."""
        return (
            self.mode is ports.TransactionMode.RECEIVE_ONLY and self._enlisting_store is None and self._manager is None
        )

    def create(self, message: object, options: SendOptions, related_to: Mapping[str, str] | None = None) -> Outgoing:
        """Return the envelope or the delayed message for a message of the application. Nothing is sent."""
        content, body = ({}, message) if isinstance(message, bytes) else self.types.encode(message)
        destination = options.destination or self.routes.get(type(message))
        if destination is None and self._handles(type(message)):
            destination = self.endpoint
        if destination is None:
            raise errors.UnknownMessageType(
                f"no destination for {type_name(type(message))}: pass destination='queue', or route its type with "
                f"endpoint.route({type(message).__name__}, 'queue')"
            )
        capabilities = self.transport.capabilities
        options = self._add_time_to_be_received(type(message), options, capabilities)
        if options.is_delayed:
            self._require_delay()
        if options.zone is not None:
            if self._zones is None:
                raise errors.NotSupported(
                    "a timeout manager keeps instants: give deliver_at with its offset, and no zone"
                )
            self._zones.check_store(options.zone)
        if related_to:
            content = {**_conversation_headers(related_to), **content}
        outgoing = outgoing_message(self._sender, content, body, destination, options, self.clock)
        check_headers_fit(outgoing, capabilities.largest_headers_bytes)
        return outgoing

    def publish_options(
        self, message: object, headers: Mapping[str, str] | None, message_id: str | None
    ) -> SendOptions:
        """Return the options of an event. It cannot be delayed (row 7)."""
        address = publishing_transport(self.transport).event_address(self.types.name_of(type(message)))
        own = {messages.Headers.MESSAGE_INTENT: "Publish", **(headers or {})}
        return SendOptions(address, headers=own, message_id=message_id)

    def prepare_for_transaction(
        self, message: object, options: SendOptions
    ) -> tuple[ports.JoiningStore, messages.DelayedMessage]:
        """Return the store, and the delayed message for a transaction of the application. Nothing is stored."""
        if self.store is None:
            raise errors.DelayedDeliveryNotConfigured(
                f"endpoint {self.endpoint!r} cannot send in a transaction of yours: it has no delayed message store; "
                f"pass delayed_delivery=DelayedDelivery(store) when you create it"
            )
        if not isinstance(self.store, ports.JoiningStore):
            raise cannot_join_error(self.store)
        return self.store, delayed_message_of(self.create(message, options), self.clock)

    async def send(self, outgoing_messages: Sequence[Outgoing]) -> None:
        """Send or store messages of :meth:`create`, outside of a handler's transaction."""
        envelopes, delayed = self._split(outgoing_messages)
        for message in delayed:  # each in a separate transaction
            assert self._enlisting_store is not None
            await self.ensure_zone(message)
            await self._enlisting_store.store(message, self.clock.now())
        if envelopes:
            answers = await self.transport.send(envelopes, self.clock.now())
            for error in check_answers(self.transport, len(envelopes), answers):
                if error is not None:
                    raise error

    async def ensure_zone(self, outgoing: Outgoing) -> None:
        """Store the zone whose clocks a message follows in the store, if the message is stored directly."""
        wall_time = WallTime.of(outgoing.headers)
        if wall_time is not None and self._zones is not None and isinstance(outgoing, messages.DelayedMessage):
            await self._zones.ensure_marker(wall_time.zone, self.clock.now())

    async def ensure_zone_or_log(self, outgoing: Outgoing) -> None:
        """Store the zone of a message that is stored already, and log a failure.

        It is stored afterwards, as a handler may be the only writer of its file.
        """
        try:
            if self._enlisting_store is not None:
                await self.ensure_zone(outgoing)
        except errors.PostdateError as error:
            log.warning("message %s may not follow the clocks of its zone: %s", outgoing.message_id, error)

    def zone_callbacks(self, outgoing: Sequence[Outgoing]) -> list[Callable[[], Awaitable[None]]]:
        """Return callbacks that store the zones of stored messages, one for each message that follows a zone."""
        zone_messages = [each for each in outgoing if messages.Headers.WALL_TIME in each.headers]
        return [partial(self.ensure_zone_or_log, each) for each in zone_messages]

    def completion_of(
        self, outgoing: Sequence[Outgoing], record: ports.RecordKind, detail: str = "", work: Sequence[ports.Work] = ()
    ) -> ports.Completion:
        """Return the completion of a handled message that sends or stores ``outgoing`` in the same transaction."""
        if not outgoing and not work:
            return ports.Completion(record, detail)
        envelopes, delayed = self._split(outgoing)
        return ports.Completion(record, detail, envelopes, [*work, *self.storing_works(delayed, self.clock.now())])

    def storing_works(self, delayed: Sequence[messages.DelayedMessage], now: datetime) -> list[RepeatableStoring]:
        """Return the work that stores delayed messages in the queues' database; none if the store is elsewhere."""
        return (
            [RepeatableStoring(self._enlisting_store, delayed, now)]
            if self._enlisting_store is not None and delayed
            else []
        )

    def clear_order(self, saga_id: uuid.UUID) -> messages.Envelope | None:
        """Return the order to remove all timeouts of a completed saga; ``None``: there is no timeout manager.

        Timeouts in the store of a delayed delivery are delivered and ignored. With a delayed
        delivery, the order removes the timeouts that the timeout manager still has.
        """
        return None if self._manager is None else clear_order(saga_id, self._manager, messages.new_message_id())

    def _require_delay(self) -> Callable[[messages.DelayedMessage], messages.Envelope]:
        """Return the function that wraps a delayed message for its queue; raise an error if there is none (row 15)."""
        if self._to_queue is None:
            raise errors.DelayedDeliveryNotConfigured(
                f"endpoint {self.endpoint!r} cannot delay messages: it has no delayed message store; pass "
                f"delayed_delivery=DelayedDelivery(store) when you create it"
            )
        return self._to_queue

    def _split(self, outgoing: Sequence[Outgoing]) -> tuple[list[messages.Envelope], list[messages.DelayedMessage]]:
        """Return envelopes to be sent, and delayed messages to be stored in the database of the queues."""
        envelopes = [message for message in outgoing if isinstance(message, messages.Envelope)]
        delayed = [message for message in outgoing if isinstance(message, messages.DelayedMessage)]
        if self._enlisting_store is not None or not delayed:
            return envelopes, delayed
        return [*envelopes, *map(self._require_delay(), delayed)], []

    def _add_time_to_be_received(
        self, message_type: type[Any], options: SendOptions, capabilities: ports.TransportCapabilities
    ) -> SendOptions:
        """Return the options with the time to be received of the message type, unless this send has its own."""
        if options.time_to_be_received is None:
            span = None if message_type is bytes else self.times_to_be_received.span_of(message_type)
            if span is not None:
                options = replace(options, time_to_be_received=span)
        if finite_span(options.time_to_be_received) is not None and not capabilities.expires_messages:
            raise errors.NotSupported(
                f"the queues of {type(self.transport).__name__} do not expire messages: send {type_name(message_type)} "
                f"without time_to_be_received"
            )
        if options.use_dead_letter_queue is not None and not capabilities.dead_letters:
            raise errors.NotSupported(
                f"the queues of {type(self.transport).__name__} have no dead letters: send without "
                f"use_dead_letter_queue"
            )
        return options


def _conversation_headers(incoming: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that relate a message to the incoming one."""
    headers = {messages.Headers.RELATED_TO: incoming.get(messages.Headers.MESSAGE_ID, "")}
    for header in (messages.Headers.CONVERSATION_ID, messages.Headers.CORRELATION_ID):
        if header in incoming:
            headers[header] = incoming[header]
    return {key: value for key, value in headers.items() if value}
