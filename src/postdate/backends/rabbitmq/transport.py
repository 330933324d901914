"""Queues of RabbitMQ, or of any broker that speaks AMQP 0-9-1 with RabbitMQ's confirms.

A message counts as sent when the broker has confirmed it. A received message is acknowledged after it was handled and
the messages of its handler were confirmed. Both are at least once, with stable message ids: AMQP has no transaction
over a confirm and an acknowledgement. Destinations: :mod:`postdate.backends.rabbitmq.address`.

The broker drops expired messages, by its own clock from their arrival, but **only at the head of the queue**. So

- an expired message behind a message that has not expired still counts in the length of the queue, occupies space, and
  is not dead-lettered. It is dropped when it reaches the head, before it is received;
- the broker does not drop a message that it has pushed to a receiver (``prefetch``, or being handled). If it expires
  there, the endpoint discards it by its headers, before any handler;
- the time to live of a requeued message still counts from its first arrival.

A span of more than nine years is not sent to the broker, which refuses ten years; the endpoint discards such a message.
Copies in the error queue, and messages returned from there, do not expire. Source: ADR 0006.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Final, NamedTuple

import anyio
from typing_extensions import override

from postdate import ports
from postdate.backends.rabbitmq import observation
from postdate.backends.rabbitmq.address import EVENT_PREFIX, PREFIXES, parse_address, parse_url
from postdate.backends.rabbitmq.connection import LARGEST_FRAME, ChannelClosed, PersistentConnection
from postdate.backends.rabbitmq.consuming import ConsumingChannel, Delivery, FailureCounts
from postdate.backends.rabbitmq.delays import create_delayed_message, decode_intake_message, expired_queue, intake_queue
from postdate.backends.rabbitmq.properties import DecodedMessage, decode_message, unreadable_message
from postdate.backends.rabbitmq.publisher import Publisher
from postdate.backends.rabbitmq.publishing import largest_headers, send_error_of
from postdate.backends.rabbitmq.topology import bind_queue, declare_exchange, declare_intake, declare_queue
from postdate.errors import (
    ClaimLost,
    ConfigurationError,
    PostdateError,
    QueueNotFound,
    TransportError,
    TransportUnreachable,
)
from postdate.messages import Envelope
from postdate.ports.backends import DatabaseObject
from postdate.ports.transports import foreign_bindings_text
from postdate.runtime.resource import resource_of
from postdate.runtime.threads import run_in_thread

log = logging.getLogger("postdate.rabbitmq")

QUEUE_TYPES: Final = ("quorum", "classic")
_CONNECTS_WITHIN_SECONDS = 5.0
_RETRY_MANAGEMENT_SECONDS = 30.0
"""The pause after the management interface did not answer. It is long, as messages wait during each request."""

_CHECK_BINDINGS_SECONDS = 60.0  # the pause between checks of the bindings of an intake
_REFRESH_LIMITS_SECONDS = 1.0
"""The pause after an answer about a queue. The management interface does not know a new queue for some seconds."""


class RabbitMqTransport(ports.Transport, ports.PublishingTransport, ports.ForeignIntake):
    """Queues of a RabbitMQ server.

    Args:
        url: ``amqp://user:password@host:port/vhost?heartbeat=20``, or ``amqps``; see
            :mod:`postdate.backends.rabbitmq.address`.
        queue_type: of the queues that it creates: ``quorum`` (replicated, counts returns) or ``classic``.
        largest_message_bytes: of headers and body together.
        prefetch: the number of messages that the broker pushes to a receiver in addition to those that it asked for.
            No other receiver gets them, for at most 20 minutes.
        confirm_window: the most unconfirmed messages of one :meth:`send`; the others wait.
        confirms_within: after this time an unconfirmed message counts as not sent, although it may still arrive.
    """

    def __init__(
        self,
        url: str,
        *,
        queue_type: str = "quorum",
        largest_message_bytes: int = 16 * 1024 * 1024,
        prefetch: int = 0,
        confirm_window: int = 1_000,
        confirms_within: timedelta = timedelta(seconds=20),
    ) -> None:
        if queue_type not in QUEUE_TYPES:
            raise ConfigurationError(f"queue_type must be one of {QUEUE_TYPES}, not {queue_type!r}")
        if confirm_window < 1 or prefetch < 0:
            raise ConfigurationError(
                f"confirm_window must be 1 or more and prefetch 0 or more, not {confirm_window} and {prefetch}"
            )
        login = parse_url(url)
        self.publisher = Publisher(
            PersistentConnection(login, _CONNECTS_WITHIN_SECONDS, resource_of(self), "sending"),
            confirm_window,
            confirms_within,
        )
        self.receiving_connection = PersistentConnection(
            login, _CONNECTS_WITHIN_SECONDS, resource_of(self), "receiving"
        )
        self.failure_counts = FailureCounts()
        self.limits: dict[str, Mapping[str, int] | None] = {}
        self._management_retry_at = 0.0 if login.management_port > 0 else math.inf
        self._limits_refresh_at = dict[str, float]()
        self.prefetch = prefetch
        self._queue_type = queue_type
        self._description = login.description
        self._capabilities = ports.TransportCapabilities(
            durable=True,
            transaction_modes=frozenset({ports.TransactionMode.NONE, ports.TransactionMode.RECEIVE_ONLY}),
            largest_message_bytes=largest_message_bytes,
            largest_headers_bytes=largest_headers(LARGEST_FRAME),
            expires_messages=True,
        )

    def __repr__(self) -> str:
        return f"RabbitMqTransport({self._description}, queue_type={self._queue_type!r})"

    @property
    @override
    def capabilities(self) -> ports.TransportCapabilities:
        """The capabilities. ``largest_headers_bytes`` may fall at the first send, if the server has smaller frames."""
        largest = largest_headers(self.publisher.connection.frame_limit)
        if largest != self._capabilities.largest_headers_bytes:
            self._capabilities = replace(self._capabilities, largest_headers_bytes=largest)
        return self._capabilities

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        """Create the missing queues. An existing queue of the other type is not changed."""
        link = await self.receiving_connection.get_link()
        for name in names:
            if name.startswith(PREFIXES):
                raise ConfigurationError(f"{name!r} is the address of an exchange, not the name of a queue")
            try:
                parse_address(name)
                await declare_queue(link, name, self._queue_type)
            except (ChannelClosed, QueueNotFound) as error:
                raise TransportError(f"queue {name!r} cannot be created: {error}") from error

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        ports.check_no_work(work, "of RabbitMQ")
        return await self.publisher.send(envelopes, now, self._capabilities.largest_message_bytes)

    @override
    def receiver(self, queue: str) -> RabbitMqReceiver:
        return RabbitMqReceiver(self, queue)

    @override
    def event_address(self, event: str) -> str:
        """Return the address of the fanout exchange of an event."""
        address = EVENT_PREFIX + event
        try:
            parse_address(address)
        except QueueNotFound as error:
            raise ConfigurationError(f"an event cannot be called {event!r}: {error}") from error
        return address

    @override
    async def subscribe(self, queue: str, events: Sequence[str]) -> None:
        link = await self.receiving_connection.get_link()
        for event in events:
            exchange = parse_address(self.event_address(event)).exchange
            try:
                await declare_exchange(link, exchange, "fanout")
                await bind_queue(link, queue, exchange)
            except ChannelClosed as error:
                raise TransportError(f"{queue!r} cannot be subscribed to {event!r}: {error}") from error

    @override
    async def create_intake(self, exchange: ports.DelayExchange) -> None:
        """Create the exchange for delayed messages and its queues; the exchange may exist already."""
        link = await self.receiving_connection.get_link()
        try:
            await declare_intake(link, exchange, self._queue_type)
        except ChannelClosed as error:
            raise TransportError(
                f"exchange {exchange.name!r} and what belongs to it cannot be created: {error}; grant the right, or "
                f"use no exchange: intake.exchange = ''"
            ) from error
        try:
            bindings = await self.foreign_bindings(exchange)
        except TransportError as error:
            log.warning(
                "it is not known whether queues of applications are bound to exchange %s, which would get each message "
                "twice, at once and when it is due: %s",
                exchange.name,
                error,
            )
        else:
            if bindings:
                raise ConfigurationError(foreign_bindings_text(exchange.name, bindings))

    @override
    async def foreign_bindings(self, exchange: ports.DelayExchange) -> Sequence[str]:
        """Return bindings of the exchange to other queues, read from the broker's management interface."""
        bindings = await run_in_thread(observation.read_bindings, self.receiving_connection.login, exchange.name)
        intake_binding = ("queue", intake_queue(exchange.name))
        return [str(each) for each in bindings if (each.destination_type, each.destination) != intake_binding]

    @override
    def intake_queues(self, exchange: ports.DelayExchange) -> Sequence[ports.IntakeQueue]:
        queue, expired = intake_queue(exchange.name), expired_queue(exchange.name)
        receivers = {
            queue: _IntakeReceiver(self, exchange, queue),
            expired: RabbitMqReceiver(self, expired, partial(decode_intake_message, exchange.name, expired)),
        }
        read = partial(create_delayed_message, exchange.name)
        return [ports.IntakeQueue(name, receiver, read) for name, receiver in receivers.items()]

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the lengths without received messages; the length of an existing exchange is 0."""
        return await observation.lengths_of(await self.receiving_connection.get_link(), names)

    @override
    async def limits_of(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int] | None]:
        """Return the limits of queues, read from the broker's management interface."""
        link = await self.receiving_connection.get_link()
        limits = await run_in_thread(observation.read_limits, link.login, link.server.get("version", ""), names)
        self.limits.update(limits)
        return limits

    async def refresh_limits(self, queue: str) -> None:
        """Ask the broker after how many returns a queue drops a message, unless the last request was recent."""
        if anyio.current_time() >= max(self._management_retry_at, self._limits_refresh_at.get(queue, 0.0)):
            try:
                await self.limits_of([queue])
                self._limits_refresh_at[queue] = anyio.current_time() + _REFRESH_LIMITS_SECONDS
            except TransportError as error:
                is_unreachable = isinstance(error, TransportUnreachable)
                self._management_retry_at = (
                    anyio.current_time() + _RETRY_MANAGEMENT_SECONDS if is_unreachable else math.inf
                )
                log.info("limits of queues by policies are not known: %s", error)

    @override
    async def server_facts(self) -> ports.ServerFacts:
        """Return facts about the server. It publishes an empty message that is routed to no queue."""
        return await observation.server_facts(self.receiving_connection.login, _CONNECTS_WITHIN_SECONDS)

    @override
    async def close(self) -> None:
        await self.publisher.connection.close()
        await self.receiving_connection.close()


class _Claim(NamedTuple):
    received: ports.Received
    channel: ConsumingChannel
    delivery: Delivery
    message: DecodedMessage


class RabbitMqReceiver(ports.Receiver):
    """The receiver of one queue; ``read`` decodes a delivery.

    Received messages belong to a channel. When the channel ends, with its connection or because the broker waited too
    long for an acknowledgement, the messages are free again, and committing them raises ``ClaimLost``.
    """

    def __init__(
        self, transport: RabbitMqTransport, queue: str, decode: Callable[[Delivery], DecodedMessage] | None = None
    ) -> None:
        self._transport, self._queue = transport, queue
        self._decode: Callable[[Delivery], DecodedMessage] = decode or (
            lambda delivery: decode_message(queue, delivery.properties, delivery.body, redelivered=delivery.redelivered)
        )
        self._channel: ConsumingChannel | None = None
        self._claims: dict[object, _Claim] = {}

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        """Receive messages. After a lost connection it raises once, and connects at the next call.

        With ``wait=False`` it returns none, as the broker has not pushed any yet.
        """
        channel = await self._open_channel()
        if not wait:
            await channel.start_pushing(limit)
            return []
        deliveries = await channel.receive(limit)
        are_limits_unknown = self._transport.limits.get(self._queue) is None
        if are_limits_unknown and any(each.redelivered and each.decoded_message is None for each in deliveries):
            with anyio.CancelScope(shield=True):  # a cancellation here would lose track of the pushed messages
                await self._transport.refresh_limits(self._queue)
        return [self._remember(channel, delivery) for delivery in deliveries]

    async def _open_channel(self) -> ConsumingChannel:
        link = await self._transport.receiving_connection.get_link()
        if self._channel is None or self._channel.end_error is not None:
            self._claims.clear()
            await self._transport.refresh_limits(self._queue)
            queue, prefetch = self._queue, self._transport.prefetch
            channel = await link.open_channel(lambda link, number: ConsumingChannel(link, number, queue, prefetch))
            channel.on_unwanted, channel.time_to_live = partial(self._requeue_unwanted, channel), self._time_to_live
            if self._channel is None or self._channel.end_error is not None:
                self._channel = channel
            else:  # another task has opened a channel meanwhile
                channel.close(TransportUnreachable("this channel is not needed"))
        return self._channel

    def _time_to_live(self) -> float:
        return (self._transport.limits.get(self._queue) or {}).get(observation.TIME_TO_LIVE, math.inf) / 1_000

    def _remember(self, channel: ConsumingChannel, delivery: Delivery) -> ports.Received:
        claim = self._create_claim(channel, delivery)
        self._claims[claim.received.token] = claim
        return claim.received

    def _create_claim(self, channel: ConsumingChannel, delivery: Delivery) -> _Claim:
        try:
            message = delivery.decoded_message or self._decode(delivery)
        except Exception:
            # The other messages must be received all the same; this one goes to the error queue.
            log.exception("a message in %s cannot be read", self._queue)
            message = unreadable_message(self._queue, delivery.properties, delivery.body)
        failures, unanswered = self._transport.failure_counts.count_failures(
            self._queue, message, redelivered=delivery.redelivered
        )
        is_dropped_if_returned = False
        if message.counted_returns:
            limits, version = self._transport.limits.get(self._queue), channel.link.server.get("version", "")
            limit = (
                observation.delivery_limit((), version) if limits is None else limits.get(observation.DELIVERY_LIMIT)
            )
            # One return before the limit, as a return may also be caused by a lost connection.
            is_dropped_if_returned = limit is not None and message.counted_returns >= limit - 1
        received = ports.Received(
            message.envelope, failures, (channel, delivery.tag), unanswered, is_dropped_if_returned
        )
        return _Claim(received, channel, delivery, message)

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        """Wait for the confirms of the outgoing messages, then acknowledge the message.

        After an interruption in between, the message is received again and its messages are sent again. If one of them
        cannot be sent, earlier ones may have been sent.
        """
        ports.check_no_work(completion.work, "of RabbitMQ")
        claim = self._claim_of(received)
        if completion.outgoing:
            await self._send(completion.outgoing, now)
            claim = self._claim_of(received)
        del self._claims[received.token]
        claim.channel.acknowledge(claim.delivery.tag)
        self._transport.failure_counts.forget(self._queue, claim.message)

    async def _send(self, outgoing: Sequence[Envelope], now: datetime) -> None:
        limit = self._transport.capabilities.largest_message_bytes
        send_errors = (send_error_of(envelope, limit) for envelope in outgoing)
        error = next((error for error in send_errors if error is not None), None)
        if error is None:
            error = next((error for error in await self._transport.send(outgoing, now) if error is not None), None)
        if error is not None:
            raise error

    def _claim_of(self, received: ports.Received) -> _Claim:
        claim = self._claims.get(received.token)
        if claim is None or claim.received is not received or claim.channel.end_error is not None:
            raise ClaimLost.of(received.envelope.message_id, queue=self._queue)
        return claim

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        """Reject a message. If its claim is lost there is nothing to do, as the message is free already."""
        with suppress(ClaimLost):
            claim = self._claim_of(received)
            del self._claims[received.token]
            failures = received.failures + int(failed)
            if claim.channel.offer_again(claim.delivery, claim.message):
                self._transport.failure_counts.remember(self._queue, claim.message, failures)
            else:
                self._requeue(claim, failures)

    def _requeue(self, claim: _Claim, failures: int) -> None:
        self._transport.failure_counts.remember(self._queue, claim.message, failures, returns=1)
        claim.channel.requeue(claim.delivery.tag)

    def _requeue_unwanted(self, channel: ConsumingChannel, delivery: Delivery) -> None:
        claim = self._create_claim(channel, delivery)
        self._requeue(claim, claim.received.failures)

    @override
    def stop(self) -> None:
        """Stop receiving, so that the broker can push to other receivers."""
        if self._channel is not None:
            self._channel.stop_pushing()

    @override
    async def close(self) -> None:
        """Requeue all received messages. Without a connection they are free already."""
        channel, self._channel = self._channel, None
        if channel is None or channel.end_error is not None:
            self._claims.clear()
            return
        with suppress(TransportError), anyio.CancelScope(shield=True):
            unreceived_claims = [self._create_claim(channel, delivery) for delivery in await channel.stop()]
            claims, self._claims = self._claims, {}  # later commits raise ClaimLost
            for claim in sorted([*claims.values(), *unreceived_claims], key=lambda claim: claim.delivery.tag):
                self._requeue(claim, claim.received.failures)
            await channel.close_and_wait()
        self._claims.clear()


class _IntakeReceiver(RabbitMqReceiver):
    """Receives delayed messages of other programs, and checks the bindings of their exchange while the service runs.

    An application that binds its queue there after the start gets each message twice. The service cannot refuse that,
    as the messages of all other programs come through the same exchange. So it logs each new binding once.
    """

    def __init__(self, transport: RabbitMqTransport, exchange: ports.DelayExchange, queue: str) -> None:
        super().__init__(transport, queue, partial(decode_intake_message, exchange.name, queue))
        self._exchange = exchange
        self._next_binding_check = 0.0
        """In seconds of the event loop's clock."""
        self._reported_bindings = set[str]()

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        if anyio.current_time() >= self._next_binding_check:
            self._next_binding_check = anyio.current_time() + _CHECK_BINDINGS_SECONDS
            with suppress(TransportError):  # a warning was logged at the start already
                bindings = await self._transport.foreign_bindings(self._exchange)
                if new_bindings := [each for each in bindings if each not in self._reported_bindings]:
                    log.error("%s", foreign_bindings_text(self._exchange.name, new_bindings))
                self._reported_bindings = set(bindings)
        return await super().receive(limit, wait=wait)


class RabbitMq(DatabaseObject):
    """The queues of a virtual host. It has no store for delayed messages, so an endpoint also needs a store.

    ``Endpoint("sales", RabbitMq(url), delayed_delivery=DelayedDelivery(Postgres(other).store))``.

    Args:
        url: ``amqp://user:password@host:port/vhost``, or ``amqps://…`` for TLS.
        queue_type: of queues that are created: ``quorum`` or ``classic``.

    Raises:
        ConfigurationError: the address or the type of queues is not valid; at first use of the queues.
    """

    def __init__(self, url: str, *, queue_type: str = "quorum") -> None:
        super().__init__()
        self._url, self._queue_type = url, queue_type

    @cached_property
    def queues(self) -> RabbitMqTransport:
        """The transport for the queues."""
        return self.register_adapter(RabbitMqTransport(self._url, queue_type=self._queue_type))
