"""Makes, sends and stores an endpoint's messages, at once or with a handler, by its context.

Source: specification 5; ADR 9, 14.
"""

from __future__ import annotations

import logging
import platform
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from random import random
from types import MappingProxyType
from typing import Any, Final, TypedDict, Unpack

from postdate.clock import EARLIEST, Clock, later
from postdate.core.receive.settling import RepeatableStoring
from postdate.core.recoverability import checked_answers
from postdate.core.simple_store import enlisting
from postdate.core.timeout_manager.steps import clear_timeouts, to_timeout_manager
from postdate.core.upkeep.store_clock import latest_time
from postdate.core.upkeep.wall_times import KeptZones, WallTime
from postdate.core.windows import Window
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.message_types import INFINITE, MessageTypes, TimesToBeReceived, finite, type_name
from postdate.endpoint.service import EndpointContext
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
from postdate.endpoint.timeout_manager import timeout_manager_queue
from postdate.errors import (
    ConfigurationError,
    DelayConflict,
    DelayedDeliveryNotConfigured,
    InvalidMessage,
    InvalidTimestamp,
    MessageError,
    MessageTooLarge,
    NotSupported,
    PostdateError,
    UnknownMessageType,
)
from postdate.messages import (
    LONGEST_TIME_TO_BE_RECEIVED,
    DelayedMessage,
    Envelope,
    Headers,
    aware_utc,
    check_destination,
    check_headers,
    check_id,
    check_not_reserved,
    delay_headers,
    encode_headers,
    format_time_span,
    format_timestamp,
    new_message_id,
    parse_timestamp,
    size_in_bytes,
)
from postdate.ports import (
    End,
    JoiningStore,
    NativeTransaction,
    OutboxStore,
    OutboxTransaction,
    PublishingTransport,
    Received,
    RecordKind,
    TransactionMode,
    Transport,
    TransportCapabilities,
    Work,
)
from postdate.ports.changing import no_transaction_of_yours
from postdate.runtime import tracing


class SendKeywords(TypedDict, total=False):
    """The keywords of every ``send``; what each means: :meth:`postdate.Endpoint.send`."""

    destination: str | None
    delay: timedelta | None
    deliver_at: datetime | str | None
    expires_at: datetime | None
    time_to_be_received: timedelta | None
    use_dead_letter_queue: bool | None
    headers: Mapping[str, str] | None
    message_id: str | None
    zone: str | None
    window: str | None
    spread: timedelta | None


log = logging.getLogger("postdate.endpoint")

_TYPES: Final = {
    "delay": timedelta,
    "time_to_be_received": timedelta,
    "spread": timedelta,
    "zone": str,
    "window": str,
    "headers": Mapping,
}
"""Of options that no other check asks for their type."""


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
    deliver_at: datetime | str | None = None
    expires_at: datetime | None = None
    time_to_be_received: timedelta | None = None
    use_dead_letter_queue: bool | None = None
    headers: Mapping[str, str] | None = None
    message_id: str | None = None
    zone: str | None = None
    window: str | None = None
    spread: timedelta | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.destination is not None:
            check_destination(self.destination)
        if self.message_id is not None:
            check_id(self.message_id)
        if self.delay is not None and self.deliver_at is not None:
            raise DelayConflict("delay and deliver_at exclude each other: give one of them")
        if self.zone is not None and (self.window, self.spread) != (None, None):
            raise DelayConflict("what follows the clocks of a zone is due just then: no window, and no spread")
        for name in ("delay", "spread"):
            if (getattr(self, name) or timedelta(0)) < timedelta(0):
                raise InvalidMessage(f"{name} must not be negative, not {getattr(self, name)}")
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
        self._check_due()
        if self.expires_at is not None:
            aware_utc(self.expires_at, "expires_at")

    def _check_types(self) -> None:
        """Refuse values of another type, which callers without type checks may give."""
        for name, kind in _TYPES.items():
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidMessage(f"{name} must be a {kind.__name__}, not {type(value).__name__} {value!r}")

    def _check_due(self) -> None:
        """Refuse a due time or a window that cannot be."""
        self._due(EARLIEST, EARLIEST)
        if self.window is not None:
            Window.read(self.window)

    @property
    def is_delayed(self) -> bool:
        """Whether it is to be delivered later."""
        return (self.delay, self.deliver_at, self.window, self.spread) != (None,) * 4

    @property
    def wall_time(self) -> WallTime | None:
        """What the clocks of ``zone`` show when it is due."""
        return None if self.zone is None else WallTime.read(self.deliver_at, self.zone)

    def due(self, now: datetime, latest: datetime | None = None) -> datetime | None:
        """Return the due time in UTC, or ``None`` for at once; the end of the calendar means never.

        A delay counts from ``latest``, the latest time that it may be where a clock is not exact; ``None``: ``now``.
        With ``spread`` it is another one at each call, as likely at each instant of the spread at which the window is
        open.
        """
        due = self._due(now, now if latest is None else latest)
        if self.window is None and self.spread is None:
            return due
        due, spread = max(due or now, now), self.spread or timedelta(0)
        share = random()  # noqa: S311 - no secret
        if self.window is not None:
            return Window.read(self.window).instant_within(due, spread, share)
        return due + share * (later(due, spread) - due)

    def _due(self, now: datetime, latest: datetime) -> datetime | None:
        if (wall := self.wall_time) is not None:
            return wall.instant()
        if isinstance(self.deliver_at, str):
            raise InvalidTimestamp(f"deliver_at={self.deliver_at!r} is what clocks show: say where, with zone='…'")
        if self.deliver_at is not None:
            return aware_utc(self.deliver_at, "deliver_at")
        if self.delay is None:
            return None
        return later(latest, self.delay) if self.delay else now  # without any, it is due already


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


def kept(message: Envelope | DelayedMessage, now: datetime) -> DelayedMessage:
    """Return the delayed message that a store keeps; one that is due already is due ``now``."""
    if isinstance(message, DelayedMessage):
        return message
    check_not_reserved(message.headers)
    left = message.time_left(now)
    end = None if left is None else later(now, left)
    return DelayedMessage(message.message_id, now, message.destination, message.headers, message.body, end)


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
        return self.store, kept(self.make(message, options), self.clock.now())

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


class BusinessTransaction:
    """The outbox's transaction in which a handler runs; ``queues`` is the identity of the queues' database, if any."""

    def __init__(self, transaction: OutboxTransaction, store: OutboxStore, queues: object | None) -> None:
        self.transaction, self._store, self._queues = transaction, store, queues

    def check_isolated_send(self) -> None:
        """Refuse a send that would wait for itself: for the handler's transaction, the only writer of its file."""
        if self.transaction.begun and self._store.has_one_writer and self._store.database == self._queues:
            raise NotSupported(
                "an isolated send into the file in which the handler has a transaction open would wait for itself: "
                "send before context.transaction() is called, or without isolated, or keep the outbox in another file"
            )


class IncomingMessage:
    """What a handler can ask of its message."""

    received: Received
    _headers: Mapping[str, str]

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the incoming message; read-only, since a retry and the error queue get them as they came.

        Messages that are sent have headers of their own: ``headers={**context.headers, "Mine": "1"}``.
        """
        return self._headers

    @property
    def message_id(self) -> str:
        """Id of the incoming message: stable, however often it is delivered."""
        return self.headers.get(Headers.MESSAGE_ID, self.received.envelope.message_id)

    @property
    def due(self) -> datetime | None:
        """When a delayed message was due, UTC; ``None`` for others, and where the transport does not keep it."""
        return self.received.envelope.due


class HandlerContext(IncomingMessage):
    """The second argument of a handler: headers of its message, sends, and the transaction of the outbox.

    Messages that it sends leave when the handler has succeeded, together with the completion of the incoming message;
    when it fails, none leaves, except those sent ``isolated``. In transaction mode ``none`` all of them leave at once.
    """

    def __init__(
        self, messages: OutgoingMessages, received: Received, business: BusinessTransaction | None = None
    ) -> None:
        self._messages, self.received, self._business = messages, received, business
        self._headers = MappingProxyType(received.envelope.headers)
        self.outgoing: list[Outgoing] = []
        self.named: list[DelayedMessage] = []
        """Delayed messages with an id of the application that are to leave by an outbox: another message may have that
        id."""
        self.work: list[Work] = []
        """Done in the transaction in which sent messages leave; only with queues, or an outbox, in the database of the
        work."""
        self.afterwards: list[Callable[[], Awaitable[None]]] = []
        """Done when the message has ended well; must raise nothing."""
        self.saga: Mapping[str, str] = {}
        """Headers that say which saga instance sends; empty while none is at work."""
        self.has_ended = False
        """Set when its handlers have ended: what is sent from then on is refused."""

    async def transaction(self) -> NativeTransaction:
        """Return a connection of the outbox's database with a transaction open on it, for data of the application.

        What is written on it is committed together with what this handler sends, and with the mark that the message was
        handled; when the handler fails, it is rolled back. All handlers of a message have the same one.

        Returns:
            With :class:`~postdate.PostgresOutbox` a ``psycopg.AsyncConnection``, with :class:`~postdate.SqliteOutbox`
            an ``sqlite3.Connection``. It refuses to commit or roll back.

        Raises:
            ConfigurationError: the endpoint has no outbox.
            StoreUnavailable: the database cannot be reached.
        """
        if self._business is None:
            raise ConfigurationError(
                f"endpoint {self._messages.endpoint!r} has no outbox, so its handlers have no transaction: pass "
                f"outbox=Outbox(…) when you create it"
            )
        return await self._business.transaction.begin()

    async def send(
        self,
        message: object,
        *,
        isolated: bool = False,
        **how: Unpack[SendKeywords],
    ) -> str:
        """Send a message and return its id: as :meth:`Endpoint.send`, with the end of the message being handled.

        With ``isolated`` it leaves at once, also if handling fails. A ``message_id`` that was used for another delayed
        message fails the handler as it ends.
        """
        how["headers"] = self._with_saga(how.get("headers"))
        options = SendOptions(**how)
        outgoing = self._messages.make(message, options, related_to=self.headers)
        if options.message_id is not None and isinstance(outgoing, DelayedMessage):
            outgoing = self._named(outgoing, isolated=isolated)
        return await self._leave(outgoing, isolated=isolated)

    def _named(self, outgoing: DelayedMessage, *, isolated: bool) -> DelayedMessage:
        """Mark a message with an id of the application which an earlier attempt of this handler may have sent.

        It may where the incoming message came back unanswered, and delayed messages leave through a queue before its
        end.
        """
        if self._business is not None:
            self.named += () if isolated else (outgoing,)
        elif self.received.unanswered and self._messages.delays_leave_first:
            with suppress(KeyError, InvalidTimestamp):
                since = self.due or parse_timestamp(self.headers[Headers.TIME_SENT])
                return replace(
                    outgoing, headers={**outgoing.headers, Headers.MAY_REPEAT_SINCE: format_timestamp(since)}
                )
        return outgoing

    async def reply(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """Send a message to where the incoming one asked for replies, and to the saga instance that sent that, if any.

        A reply cannot be delayed (row 7).

        Raises:
            InvalidMessage: the incoming message names no address for replies.
        """
        options = reply_options(self.headers, self.message_id, self._with_saga(headers))
        return await self._leave(self._messages.make(message, options, related_to=self.headers))

    async def publish(
        self, message: object, headers: Mapping[str, str] | None = None, *, message_id: str | None = None
    ) -> str:
        """Send a message to all subscribers of its type; see :meth:`Endpoint.publish`."""
        options = self._messages.publish_options(message, self._with_saga(headers), message_id)
        return await self._leave(self._messages.make(message, options, related_to=self.headers))

    def _with_saga(self, headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
        return {**self.saga, **(headers or {})} if self.saga else headers

    async def _leave(self, outgoing: Outgoing, *, isolated: bool = False) -> str:
        """Have a message leave, at once or at the end; return its id."""
        if self.has_ended:
            raise MessageError(
                f"the handler of message {self.message_id!r} has ended: what it sends now cannot leave with it"
            )
        if isolated or self._messages.mode is TransactionMode.NONE:
            if self._business is not None:
                self._business.check_isolated_send()
            await self._messages.send([outgoing])
        else:
            if Headers.WALL_TIME in outgoing.headers:
                self.afterwards.append(partial(self._messages.keep_zone_afterwards, outgoing))
            self.outgoing.append(outgoing)
        return outgoing.message_id
