"""Makes, sends and stores an endpoint's messages, at once or with a handler. Source: specification 5; ADR 9, 14."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from postdate.core.dispatcher import enlisting
from postdate.core.repetitions import RepeatableStoring
from postdate.core.timeout_manager.reading import clear_timeouts, to_timeout_manager
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.sending import (
    SendOptions,
    check_headers_fit,
    kept,
    outgoing_message,
    publishing,
    sender_headers,
    through_queue,
)
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.endpoint.service import EndpointContext
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
from postdate.endpoint.time_to_be_received import TimesToBeReceived, finite
from postdate.endpoint.timeout_manager import timeout_manager_queue
from postdate.errors import DelayedDeliveryNotConfigured, NotSupported, UnknownMessageType
from postdate.messages import DelayedMessage, Envelope, Headers, new_message_id
from postdate.ports import End, MovingStore, RecordKind, TransactionMode, TransportCapabilities, Work
from postdate.ports.stores import no_transaction_of_yours

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
        if related_to:
            content = {**_conversation(related_to), **content}
        outgoing = outgoing_message(self._sender, content, body, destination, options, self.clock.now())
        check_headers_fit(outgoing, can.largest_headers_bytes)
        return outgoing

    def publish_options(
        self, message: object, headers: Mapping[str, str] | None, message_id: str | None
    ) -> SendOptions:
        """Return how an event is sent. It cannot be delayed (row 7)."""
        address = publishing(self.transport).event_address(self.types.name_of(type(message)))
        own = {Headers.MESSAGE_INTENT: "Publish", **(headers or {})}
        return SendOptions(address, headers=own, message_id=message_id)

    def into_transaction(self, message: object, options: SendOptions) -> tuple[MovingStore, DelayedMessage]:
        """Return the store, and the delayed message for a transaction of the application; stores nothing."""
        if self.store is None:
            raise DelayedDeliveryNotConfigured(
                f"endpoint {self.endpoint!r} cannot send in a transaction of yours: it has no delayed message store; "
                f"pass delayed_delivery=DelayedDelivery(store) when you create it"
            )
        if not isinstance(self.store, MovingStore):
            raise no_transaction_of_yours(self.store)
        return self.store, kept(self.make(message, options), self.clock.now())

    async def send(self, messages: Sequence[Outgoing]) -> None:
        """Send or store what :meth:`make` made, outside any handler's transaction."""
        envelopes, delayed = self._split(messages)
        for message in delayed:  # each in a transaction of its own
            assert self._enlisted is not None
            await self._enlisted.store(message, self.clock.now())
        if envelopes:
            for error in await self.transport.send(envelopes, self.clock.now()):
                if error is not None:
                    raise error

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
