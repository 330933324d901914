"""An endpoint: a named party that sends, handles and delays messages."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, SystemClock
from postdate.core.circuit_breaker import RepeatedFailures
from postdate.core.dispatcher import enlisting
from postdate.core.expiry import discard_reason
from postdate.core.pump import MessagePump
from postdate.core.recoverability import (
    DEFAULT_ERROR_QUEUE,
    DelayedRetry,
    Host,
    ImmediateRetry,
    Recoverability,
    after_handling_failed,
    delayed_retry_headers,
    error_headers,
    text_of,
)
from postdate.endpoint.delayed_delivery import (
    RECEIVE_BREAKER,
    DelayedDeliveryService,
    Surroundings,
    check_transport_mode,
    timeouts_queue,
)
from postdate.endpoint.sending import Sender, SendKeywords, SendOptions, outgoing_message, through_queue
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import (
    ConfigurationError,
    DelayedDeliveryNotConfigured,
    InvalidMessage,
    InvalidTimestamp,
    MessageError,
    QueueNotFound,
    UnknownMessageType,
)
from postdate.messages import (
    DESTINATION_LIMIT,
    DelayedMessage,
    Envelope,
    Headers,
    check_text,
    expires_at_of,
    headers_with_expiry,
    new_message_id,
)
from postdate.ports import End, Received, RecordKind, TransactionMode, Transport, Work

log = logging.getLogger("postdate.endpoint")

LONGEST_ENDPOINT_NAME = DESTINATION_LIMIT - len(timeouts_queue(""))
"""So that its timeouts queue is an address, too."""

M = TypeVar("M")


def log_critical_error(text: str, error: BaseException) -> None:
    """Log a critical error: what an endpoint does unless told otherwise (specification row 113)."""
    log.critical("%s: %s", text, error, exc_info=error)


class HandlerContext:
    """What a handler is given besides the message.

    What it sends leaves when the handler has succeeded, together with the completion of the incoming message; when it
    fails, nothing leaves (in transaction mode ``none``, sends leave at once).
    """

    def __init__(self, endpoint: Endpoint, received: Received) -> None:
        self._endpoint, self._received = endpoint, received
        self.outgoing: list[Envelope | DelayedMessage] = []
        self._ended = False

    def end(self) -> Sequence[Envelope | DelayedMessage]:
        """Return what was sent; from now on nothing can be."""
        self._ended = True
        return self.outgoing

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the incoming message."""
        return self._received.envelope.headers

    @property
    def message_id(self) -> str:
        """Id of the incoming message: stable, however often it is delivered."""
        return self.headers.get(Headers.MESSAGE_ID, self._received.envelope.message_id)

    @property
    def due(self) -> datetime | None:
        """When a delayed message was due, UTC; ``None`` for others, and where the transport does not keep it."""
        return self._received.envelope.due

    async def send(self, message: object, **options: Unpack[SendKeywords]) -> str:
        """Send a message; see :meth:`Endpoint.send`."""
        outgoing = self._endpoint.outgoing(message, SendOptions(**options), related_to=self.headers)
        await self._leave(outgoing)
        return outgoing.message_id

    async def reply(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """Send a message to where the incoming one asked for replies. A reply cannot be delayed (row 7).

        Raises:
            InvalidMessage: the incoming message names no address for replies.
        """
        address = self.headers.get(Headers.REPLY_TO_ADDRESS)
        if not address:
            raise InvalidMessage(f"message {self.message_id!r} has no header {Headers.REPLY_TO_ADDRESS!r} to reply to")
        options = SendOptions(destination=address, headers={Headers.MESSAGE_INTENT: "Reply", **(headers or {})})
        outgoing = self._endpoint.outgoing(message, options, related_to=self.headers)
        await self._leave(outgoing)
        return outgoing.message_id

    async def _leave(self, outgoing: Envelope | DelayedMessage) -> None:
        if self._ended:
            raise MessageError(
                f"the handler of message {self.message_id!r} has ended: what it sends now cannot leave with it"
            )
        if self._endpoint.mode is TransactionMode.NONE:
            await self._endpoint.send_now([outgoing])
        else:
            self.outgoing.append(outgoing)


Handler = Callable[[Any, HandlerContext], Awaitable[None]]


class Endpoint:
    """A named party that sends, handles and delays messages.

    Use it as an asynchronous context manager: it starts on entering and stops on leaving, finishing what is in hand.
    Several messages are handled at once, each by all handlers of its type.

    Args:
        name: of the endpoint and of its input queue.
        transport: of all queues.
        delayed_delivery: how delayed messages are kept; without it, delayed sends are refused.
        transaction_mode: default: the strongest that transport and store can keep together.
        error_queue: for messages that cannot be handled or delivered.
        recoverability: how often handling is tried; its error queue defaults to ``error_queue``.
        send_only: handles nothing and has no input queue; delayed messages are still delivered.
        concurrency: messages handled at once.
        create_queues: create queues and tables at start.
        ignore_incoming_time_to_be_received_headers: handle messages also after their time to be received.
        clock: only tests and simulations need another.
        critical_error: what to do when the endpoint cannot do its work any more.

    Raises:
        ConfigurationError: when built from settings that do not fit together.
    """

    def __init__(  # noqa: PLR0913 - the one place where everything comes together; all but the name by keyword
        self,
        name: str,
        *,
        transport: Transport,
        delayed_delivery: DelayedDelivery | None = None,
        transaction_mode: TransactionMode | None = None,
        error_queue: str | None = "error",
        recoverability: Recoverability | None = None,
        send_only: bool = False,
        concurrency: int = 16,
        create_queues: bool = True,
        ignore_incoming_time_to_be_received_headers: bool = False,
        clock: Clock | None = None,
        critical_error: Callable[[str, BaseException], None] = log_critical_error,
    ) -> None:
        _check_names(name, error_queue)
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be 1 or more, not {concurrency}")
        self.name, self.transport, self.send_only = name, transport, send_only
        self.clock = clock or SystemClock()
        self.delayed_delivery = delayed_delivery
        self.mode = transaction_mode or strongest_mode(transport, delayed_delivery)
        check_transport_mode(transport, self.mode)
        policy = recoverability or Recoverability()
        self._error_queue = policy.error_queue or error_queue or DEFAULT_ERROR_QUEUE
        self._recoverability = replace(policy, error_queue=self._error_queue)
        self._concurrency, self._create_queues = concurrency, create_queues
        self._ignore_time_to_be_received = ignore_incoming_time_to_be_received_headers
        self._critical_error = critical_error
        self._types = MessageTypes()
        self._handlers: dict[type[Any], list[Handler]] = {}
        self._routes: dict[type[Any], str] = {}
        self._host = Host(name)
        around = Surroundings(name, transport, self.mode, self.clock, critical_error)
        self._service = (
            None if delayed_delivery is None else DelayedDeliveryService(delayed_delivery, around, error_queue)
        )
        self._enlisting = None if delayed_delivery is None else enlisting(delayed_delivery.store, transport)
        self._pump: MessagePump | None = None
        self._running: AsyncExitStack | None = None
        self._tasks: TaskGroup | None = None

    # --- configuration ------------------------------------------------------------------------------------------

    def handler(self, message_type: type[M], *, name: str | None = None) -> Callable[[Handler], Handler]:
        """Register an asynchronous function ``handle(message, context)`` for messages of ``message_type``.

        Args:
            message_type: a dataclass or ``msgspec.Struct``.
            name: of the type on the wire; default ``module.Class``.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")

        def register(handle: Handler) -> Handler:
            if not inspect.iscoroutinefunction(handle):
                raise ConfigurationError(f"handler {handle!r} must be an async function (message, context)")
            self._types.add(message_type, name)
            self._handlers.setdefault(message_type, []).append(handle)
            return handle

        return register

    def route(self, message_type: type[Any], destination: str, *, name: str | None = None) -> None:
        """Send messages of ``message_type`` to ``destination`` unless a send says otherwise."""
        self._types.add(message_type, name)
        self._routes[message_type] = destination

    # --- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._running is not None:
            raise ConfigurationError(f"endpoint {self.name!r} is running already")
        await self._prepare()
        async with AsyncExitStack() as stack:
            self._tasks = tasks = await stack.enter_async_context(anyio.create_task_group())
            if self._pump is not None:
                tasks.start_soon(self._pump.run)
            if self._service is not None:
                tasks.start_soon(self._service.run)
            self._running = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.stop()
        running, self._running = self._running, None
        if running is None:
            return None
        if error is not None and self._tasks is not None:
            # Given to the task group, the program's own error would come back in an ExceptionGroup.
            self._tasks.cancel_scope.cancel()
        return await running.__aexit__(None, None, None)

    def stop(self) -> None:
        """Stop receiving and polling; leaving the context waits for what is in hand."""
        if self._pump is not None:
            self._pump.stop()
        if self._service is not None:
            self._service.stop()

    async def _prepare(self) -> None:
        if self._service is not None:
            await self._service.prepare(set_up=self._create_queues)
        if self.send_only:
            return
        if self._create_queues:
            await self.transport.create_queues([self.name, self._error_queue])
        breaker = RepeatedFailures("Receive", "Failed to receive messages", RECEIVE_BREAKER, self._critical_error)
        receiver = self.transport.receiver(self.name)
        handling = _Handling(self, receiver.commit, receiver.roll_back)
        self._pump = MessagePump(receiver, handling.handle, self._concurrency, self.clock, breaker)

    # --- sending ------------------------------------------------------------------------------------------------

    async def send(self, message: object, **options: Unpack[SendKeywords]) -> str:
        """Send a message at once, or with ``delay`` or ``deliver_at`` when it is due; return its id.

        Returns after the message is durable where it waits. Options: see :class:`SendOptions`. ``bytes`` are sent as
        they are, anything else as JSON under the name of its type.

        Raises:
            DelayedDeliveryNotConfigured: a delayed send without ``delayed_delivery`` (row 15).
            UnknownMessageType: no destination is given and none is routed.
            QueueNotFound, MessageTooLarge, TransportUnavailable, StoreUnavailable: nothing was sent.
            DuplicateMessage: ``message_id`` was used for a delayed message before.
        """
        outgoing = self.outgoing(message, SendOptions(**options))
        await self.send_now([outgoing])
        return outgoing.message_id

    def outgoing(
        self, message: object, options: SendOptions, related_to: Mapping[str, str] | None = None
    ) -> Envelope | DelayedMessage:
        """Return what :meth:`send` would send; sends nothing."""
        content, body = ({}, message) if isinstance(message, bytes) else self._types.encode(message)
        destination = options.destination or self._routes.get(type(message))
        if destination is None and type(message) in self._handlers:
            destination = self.name
        if destination is None:
            raise UnknownMessageType(
                f"no destination for {type_name(type(message))}: pass destination='queue', or route its type with "
                f"endpoint.route({type(message).__name__}, 'queue')"
            )
        if options.is_delayed and self.delayed_delivery is None:
            raise DelayedDeliveryNotConfigured(
                f"endpoint {self.name!r} cannot delay messages: it has no delayed message store; pass "
                f"delayed_delivery=DelayedDelivery(store) when you create it"
            )
        if related_to:
            content = {**_conversation(related_to), **content}
        sender = Sender(self.name, None if self.send_only else self.name)
        return outgoing_message(content, body, destination, options, sender, self.clock.now())

    async def send_now(self, messages: Sequence[Envelope | DelayedMessage]) -> None:
        """Send or store what :meth:`outgoing` made, outside any handler's transaction."""
        envelopes = [message for message in messages if isinstance(message, Envelope)]
        delayed = [message for message in messages if isinstance(message, DelayedMessage)]
        if self._enlisting is not None:
            for message in delayed:
                await self._enlisting.store(message, self.clock.now())
        else:
            envelopes += [through_queue(message, timeouts_queue(self.name)) for message in delayed]
        if envelopes:
            for error in await self.transport.send(envelopes, self.clock.now()):
                if error is not None:
                    raise error

    def end_of(self, outgoing: Sequence[Envelope | DelayedMessage], record: RecordKind, detail: str = "") -> End:
        """Return the end of a handled message that sends or stores ``outgoing`` in the same transaction."""
        envelopes = [message for message in outgoing if isinstance(message, Envelope)]
        delayed = [message for message in outgoing if isinstance(message, DelayedMessage)]
        work: list[Work] = []
        if self._enlisting is not None and delayed:
            work.append(self._enlisting.storing(delayed, self.clock.now()))
        else:
            envelopes += [through_queue(message, timeouts_queue(self.name)) for message in delayed]
        return End(record, detail, envelopes, work)

    # --- handling -----------------------------------------------------------------------------------------------

    def discard_reason(self, received: Received) -> str | None:
        """Return why an incoming message is past its use, or ``None``."""
        if self._ignore_time_to_be_received:
            return None
        now, expires_at = self.clock.now(), received.envelope.expires_at
        if expires_at is not None and expires_at < now:
            return f"expired at {expires_at.isoformat()}"
        return discard_reason(received.envelope.headers, now)

    async def call_handlers(self, received: Received, context: HandlerContext) -> None:
        """Decode the message and call every handler of its type, one after the other."""
        message = self._types.decode(received.envelope.headers, received.envelope.body)
        handlers = self._handlers.get(type(message), [])
        if not handlers:
            raise UnknownMessageType(f"no handler for {type_name(type(message))}")
        for handle in handlers:
            await handle(message, context)

    def end_after_failure(self, received: Received, error: Exception) -> End | None:
        """Return how a message ends whose handling failed, or ``None`` when it goes back to its queue."""
        now, headers = self.clock.now(), received.envelope.headers
        decision = after_handling_failed(error, received.failures + 1, headers, self._recoverability, now)
        reason = f"{type(error).__name__}: {text_of(error)}"
        if isinstance(decision, DelayedRetry) and self.delayed_delivery is None:
            log.warning("message %s goes to the error queue: no delayed retry without a store", _id(received))
            return self.to_error(received, error)
        match decision:
            case ImmediateRetry():
                log.info("message %s is retried at once: %s", _id(received), reason)
                return None
            case DelayedRetry(delay) if self._expires_before(received, now + delay):
                log.info("message %s is discarded: it expires before it would be retried", _id(received))
                return End(RecordKind.DISCARDED, f"expires before its retry: {reason}")
            case DelayedRetry(delay):
                log.warning("message %s is retried in %s: %s", _id(received), delay, reason)
                retry = self._retry(received, now + delay, now)
                return self.end_of([retry], RecordKind.RETRIED, f"retried as {retry.message_id}: {reason}")
            case _:
                return self.to_error(received, error)

    def _retry(self, received: Received, due: datetime, now: datetime) -> DelayedMessage:
        """Return the message for its delayed retry: a send of its own, so it has an id of its own in the store."""
        envelope = received.envelope
        own = headers_with_expiry(envelope.headers, envelope.expires_at)
        headers = {Headers.MESSAGE_ID: envelope.message_id, **delayed_retry_headers(own, now)}
        return DelayedMessage(new_message_id(), due, self.name, headers, envelope.body)

    def _expires_before(self, received: Received, instant: datetime) -> bool:
        if self._ignore_time_to_be_received:
            return False
        try:
            expires_at = received.envelope.expires_at or expires_at_of(received.envelope.headers)
        except InvalidTimestamp:  # unreadable: it does not expire
            return False
        return expires_at is not None and expires_at < instant

    def to_error(self, received: Received, error: Exception) -> End:
        """Return the end of a message that goes to the error queue."""
        reason = f"{type(error).__name__}: {text_of(error)}"
        envelope, queue = received.envelope, self._error_queue
        log.error("message %s moved to error queue %s: %s", _id(received), queue, reason)
        own = headers_with_expiry(envelope.headers, envelope.expires_at)
        headers = error_headers(own, error, self.name, self.clock.now(), self._host)
        copy = Envelope(queue, envelope.message_id, headers, envelope.body, due=envelope.due)
        return End(RecordKind.FAILED, reason, outgoing=[copy])


@dataclass(frozen=True, slots=True)
class _Handling:
    """Handles one received message completely; the handler of the endpoint's message pump."""

    endpoint: Endpoint
    commit: Callable[[Received, datetime, End], Awaitable[None]]
    roll_back: Callable[[Received], Awaitable[None]]

    async def handle(self, received: Received) -> None:
        endpoint = self.endpoint
        if endpoint.mode is TransactionMode.NONE:
            await self.commit(received, endpoint.clock.now(), End(RecordKind.HANDLED))
        try:
            end = await self._end(received)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failure of its message
            await self._recover(received, error)
            return
        except anyio.get_cancelled_exc_class() as error:
            if _is_being_cancelled():
                raise
            # The handler awaited something that others cancelled, and let that out: it says nothing about this task.
            await self._recover(received, RuntimeError(f"the handler ended by {type(error).__name__}"))
            return
        if endpoint.mode is TransactionMode.NONE:
            return
        try:
            if endpoint.mode is TransactionMode.RECEIVE_ONLY and (end.outgoing or end.work):
                # Not rolled back when taking the message off the queue fails afterwards (specification 6).
                await self._send_first(end)
                end = End(end.record, end.detail)
            await self.commit(received, endpoint.clock.now(), end)
        except (MessageError, QueueNotFound) as error:  # what the handler sent cannot be sent
            await self._recover(received, error)

    async def _end(self, received: Received) -> End:
        endpoint = self.endpoint
        reason = endpoint.discard_reason(received)
        if reason is not None:
            log.debug("message %s is discarded: %s", _id(received), reason)
            return End(RecordKind.DISCARDED, reason)
        context = HandlerContext(endpoint, received)
        await endpoint.call_handlers(received, context)
        return endpoint.end_of(context.end(), RecordKind.HANDLED)

    async def _send_first(self, end: End) -> None:
        now = self.endpoint.clock.now()
        errors = await self.endpoint.transport.send(end.outgoing, now, work=end.work)
        for error in errors:
            if error is not None:
                raise error

    async def _recover(self, received: Received, error: Exception) -> None:
        """Carry out what the policy decides; in transaction mode ``none`` there is no second try (specification 6)."""
        endpoint = self.endpoint
        end = endpoint.end_after_failure(received, error)
        if endpoint.mode is TransactionMode.NONE:
            await self._send_first(end or endpoint.to_error(received, error))
        elif end is None:
            await self.roll_back(received)
        else:
            await self.commit(received, endpoint.clock.now(), end)


def strongest_mode(transport: Transport, delayed_delivery: DelayedDelivery | None) -> TransactionMode:
    """Return the strongest transaction mode that transport and store can keep together."""
    modes = transport.capabilities.transaction_modes
    if delayed_delivery is not None:
        modes &= delayed_delivery.store.capabilities.transaction_modes
        if enlisting(delayed_delivery.store, transport) is None:
            modes -= {TransactionMode.TRANSACTION_SCOPE}
    strength = list(TransactionMode)
    return max(modes, key=strength.index, default=TransactionMode.NONE)


def _check_names(endpoint: str, error_queue: str | None) -> None:
    try:
        check_text(endpoint, "the name of an endpoint", LONGEST_ENDPOINT_NAME)
        if error_queue:
            check_text(error_queue, "the name of the error queue", DESTINATION_LIMIT)
    except InvalidMessage as error:
        raise ConfigurationError(str(error)) from error


def _conversation(incoming: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that tie a message to the one being handled."""
    tied = {Headers.RELATED_TO: incoming.get(Headers.MESSAGE_ID, "")}
    for header in (Headers.CONVERSATION_ID, Headers.CORRELATION_ID):
        if header in incoming:
            tied[header] = incoming[header]
    return {key: value for key, value in tied.items() if value}


def _is_being_cancelled() -> bool:
    """Return whether it is this task that somebody cancels: through anyio, or by asyncio's own means."""
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # another event loop than asyncio's
        return False
    return task is not None and task.cancelling() > 0


def _id(received: Received) -> str:
    return received.envelope.message_id
