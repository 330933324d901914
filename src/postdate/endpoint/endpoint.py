"""An endpoint: a named party that sends, handles and delays messages."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, SystemClock
from postdate.core.circuit_breaker import RepeatedFailures
from postdate.core.dispatcher import enlisting
from postdate.core.expiry import discard_reason, end_of_use
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
from postdate.endpoint.audit import Audit
from postdate.endpoint.critical import BreakerTimers, CriticalErrorAction, CriticalErrors, log_critical_error
from postdate.endpoint.delayed_delivery import (
    RECEIVE_BREAKER,
    DelayedDeliveryService,
    Surroundings,
    check_transport_mode,
    timeouts_queue,
)
from postdate.endpoint.saga_handling import Sagas, check_saga_mode, enlisting_sagas, is_saga_timeout
from postdate.endpoint.saga_instance import SagaSurroundings
from postdate.endpoint.sagas import Saga
from postdate.endpoint.sending import (
    Sender,
    SendKeywords,
    SendOptions,
    kept,
    outgoing_message,
    through_queue,
    transactional,
)
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.endpoint.settings import DelayedDelivery, ModeName, mode_of
from postdate.endpoint.time_to_be_received import Convention, TimesToBeReceived, finite
from postdate.errors import (
    ConfigurationError,
    DelayedDeliveryNotConfigured,
    InvalidMessage,
    InvalidTimestamp,
    MessageError,
    NotSupported,
    QueueNotFound,
    SagaConflict,
    UnknownMessageType,
)
from postdate.messages import (
    DESTINATION_LIMIT,
    DelayedMessage,
    Envelope,
    Headers,
    check_text,
    headers_with_expiry,
    new_message_id,
)
from postdate.metrics import NO_METRICS, Metrics
from postdate.ports import (
    End,
    NativeTransaction,
    Received,
    RecordKind,
    SagaStore,
    TransactionalStore,
    TransactionMode,
    Transport,
    Work,
)

log = logging.getLogger("postdate.endpoint")

LONGEST_ENDPOINT_NAME = DESTINATION_LIMIT - len(timeouts_queue(""))
"""So that its timeouts queue is an address, too."""

_CONFLICTS_BORNE = 1_000
"""Each says that another message got on. So many in a row are no coincidence: their store says so whatever happens."""

M = TypeVar("M")


class HandlerContext:
    """What a handler is given besides the message.

    What it sends leaves when the handler has succeeded, together with the completion of the incoming message; when it
    fails, nothing leaves, except what was sent ``isolated``; in transaction mode ``none``, all of it leaves at once.
    """

    def __init__(self, endpoint: Endpoint, received: Received) -> None:
        self._endpoint, self._received = endpoint, received
        self.outgoing: list[Envelope | DelayedMessage] = []
        self.work: list[Work] = []
        """Done in the transaction in which what was sent leaves; only with queues in the database of the work."""
        self.afterwards: list[Callable[[], Awaitable[None]]] = []
        """Done when the message has ended well; must raise nothing."""
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

    async def send(self, message: object, *, isolated: bool = False, **options: Unpack[SendKeywords]) -> str:
        """Send a message; see :meth:`Endpoint.send`.

        Args:
            message: see there.
            isolated: let it leave at once, whatever becomes of the message being handled.
            options: see there.
        """
        outgoing = self._endpoint.outgoing(message, SendOptions(**options), related_to=self.headers)
        await self._leave(outgoing, isolated=isolated)
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

    async def _leave(self, outgoing: Envelope | DelayedMessage, *, isolated: bool = False) -> None:
        if self._ended:
            raise MessageError(
                f"the handler of message {self.message_id!r} has ended: what it sends now cannot leave with it"
            )
        if isolated or self._endpoint.mode is TransactionMode.NONE:
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
        transaction_mode: a mode or its name; default: the strongest that transport and store can keep together.
        error_queue: for messages that cannot be handled or delivered.
        recoverability: how often handling is tried; its error queue defaults to ``error_queue``.
        send_only: handles nothing and has no input queue; delayed messages are still delivered.
        concurrency: messages handled at once.
        create_queues: create queues and tables at start.
        ignore_incoming_time_to_be_received_headers: handle messages also after their time to be received.
        time_to_be_received_allowance: how much later than the end of its time a message is still handled, for clocks
            that differ: twice the largest difference between them (specification 2.4).
        time_to_be_received: from a message type to how long its messages are wanted; goes before what the decorator
            :func:`~postdate.time_to_be_received` says on the type.
        audit: keep copies of handled messages.
        clock: only tests and simulations need another.
        critical_error: what to do when the endpoint cannot do its work any more: a function, async or not, of a text
            and the last error. By default it is logged.
        metrics: what is counted and measured is told to it.
        sagas: where the instances of sagas are kept; see :meth:`saga`.

    Raises:
        ConfigurationError: when built from settings that do not fit together.
    """

    def __init__(  # noqa: PLR0913 - the one place where everything comes together; all but the name by keyword
        self,
        name: str,
        *,
        transport: Transport,
        delayed_delivery: DelayedDelivery | None = None,
        transaction_mode: TransactionMode | ModeName | None = None,
        error_queue: str | None = "error",
        recoverability: Recoverability | None = None,
        send_only: bool = False,
        concurrency: int = 16,
        create_queues: bool = True,
        ignore_incoming_time_to_be_received_headers: bool = False,
        time_to_be_received_allowance: timedelta = timedelta(0),
        time_to_be_received: Convention | None = None,
        audit: Audit | None = None,
        clock: Clock | None = None,
        critical_error: CriticalErrorAction = log_critical_error,
        metrics: Metrics = NO_METRICS,
        sagas: SagaStore | None = None,
    ) -> None:
        _check_names(name, error_queue)
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be 1 or more, not {concurrency}")
        self.name, self.transport, self.send_only = name, transport, send_only
        self.clock = clock or SystemClock()
        self.delayed_delivery = delayed_delivery
        self.mode = mode_of(transaction_mode) or strongest_mode(transport, delayed_delivery, sagas)
        check_transport_mode(transport, self.mode)
        if sagas is not None:
            check_saga_mode(sagas, transport, self.mode)
        policy = recoverability or Recoverability()
        self._error_queue = policy.error_queue or error_queue or DEFAULT_ERROR_QUEUE
        self._recoverability = replace(policy, error_queue=self._error_queue)
        self._concurrency, self._create_queues = concurrency, create_queues
        if (
            not isinstance(time_to_be_received_allowance, timedelta)  # pyright: ignore[reportUnnecessaryIsInstance]
            or time_to_be_received_allowance < timedelta(0)
        ):
            raise ConfigurationError(
                f"time_to_be_received_allowance must not be negative, and a timedelta: not "
                f"{time_to_be_received_allowance!r}"
            )
        self._ignore_time_to_be_received = ignore_incoming_time_to_be_received_headers
        self._allowance = time_to_be_received_allowance
        self._times_to_be_received = TimesToBeReceived(time_to_be_received)
        if audit is not None:
            audit.check(self.mode, transport.capabilities, [name, self._error_queue])
        self.audit = audit
        self._critical_errors, self._metrics = CriticalErrors(critical_error), metrics
        self._types = MessageTypes()
        self._handlers: dict[type[Any], list[Handler]] = {}
        self._routes: dict[type[Any], str] = {}
        self.host = Host(name)
        around = Surroundings(name, transport, self.mode, self.clock, self._critical_errors, metrics)
        self._service = (
            None if delayed_delivery is None else DelayedDeliveryService(delayed_delivery, around, error_queue)
        )
        self._enlisting = None if delayed_delivery is None else enlisting(delayed_delivery.claims, transport)
        delays = None if delayed_delivery is None else delayed_delivery.store
        around_sagas = SagaSurroundings(name, transport, delays, self.clock, self._types, self.outgoing)
        self._sagas = None if sagas is None else Sagas(sagas, around_sagas)
        self._pump: MessagePump | None = None
        self._timers: BreakerTimers | None = None
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
            self._add_type(message_type, name)
            self._handlers.setdefault(message_type, []).append(handle)
            return handle

        return register

    def saga(self, saga: type[Saga[Any]]) -> None:
        """Register a saga: a subclass of :class:`~postdate.Saga`; its message types are registered, too.

        Raises:
            ConfigurationError: the endpoint is send-only or was created without ``sagas``, or the saga has timeouts and
                the endpoint no ``delayed_delivery``.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")
        if self._sagas is None:
            raise ConfigurationError(
                f"endpoint {self.name!r} has no saga store; pass sagas=SqliteSagaStore(…) when you create it"
            )
        definition = self._sagas.add(saga)
        for message_type in (*definition.messages, *definition.timeouts):
            self._add_type(message_type, None)

    def route(self, message_type: type[Any], destination: str, *, name: str | None = None) -> None:
        """Send messages of ``message_type`` to ``destination`` unless a send says otherwise."""
        self._add_type(message_type, name)
        self._routes[message_type] = destination

    def _add_type(self, message_type: type[Any], name: str | None) -> None:
        self._times_to_be_received.of(message_type)  # a wrong one is told where the type is registered
        self._types.add(message_type, name)

    # --- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._running is not None:
            raise ConfigurationError(f"endpoint {self.name!r} is running already")
        await self._prepare()
        async with AsyncExitStack() as stack:
            self._tasks = tasks = await stack.enter_async_context(anyio.create_task_group())
            self._critical_errors.tasks = tasks
            if self._pump is not None:
                tasks.start_soon(self._run_pump, self._pump)
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

    async def _run_pump(self, pump: MessagePump) -> None:
        async with anyio.create_task_group() as timers:
            if self._timers is not None:
                timers.start_soon(self._timers.run)
            await pump.run()
            if self._timers is not None:
                self._timers.stop()

    def stop(self) -> None:
        """Stop receiving and polling; leaving the context waits for what is in hand."""
        if self._pump is not None:
            self._pump.stop()
        if self._service is not None:
            self._service.stop()

    async def _prepare(self) -> None:
        self._check_expiring_types()
        if self._service is not None:
            await self._service.prepare(set_up=self._create_queues)
        if self.send_only:
            return
        if self._create_queues:
            if self._sagas is not None:
                await self._sagas.store.setup()
            audit = [] if self.audit is None else [self.audit.queue]
            await self.transport.create_queues([self.name, self._error_queue, *audit])
        breaker = RepeatedFailures(
            "Receive", "Failed to receive messages", RECEIVE_BREAKER, self._critical_errors, self._metrics
        )
        self._timers = BreakerTimers([breaker], self.clock)
        receiver = self.transport.receiver(self.name)
        handling = _Handling(self, receiver.commit, receiver.roll_back)
        self._pump = MessagePump(receiver, handling.handle, self._concurrency, self.clock, breaker, self.name)

    def _check_expiring_types(self) -> None:
        expiring = self._times_to_be_received.expiring()
        if expiring and not self.transport.capabilities.expires_messages:
            raise ConfigurationError(
                f"the queues of {type(self.transport).__name__} do not expire messages, but these message types have a "
                f"time to be received: {', '.join(expiring)}; use another transport, or give them none"
            )

    # --- sending ------------------------------------------------------------------------------------------------

    async def send(
        self, message: object, *, transaction: NativeTransaction | None = None, **options: Unpack[SendKeywords]
    ) -> str:
        """Send a message at once, or with ``delay`` or ``deliver_at`` when it is due; return its id.

        Returns after the message is durable where it waits. ``bytes`` are sent as they are, anything else as JSON under
        the name of its type.

        Args:
            message: see above.
            transaction: a connection of your own with a transaction open on the store's database: the message is stored
                in it, is durable with its commit, and never was with its roll-back. Without a delay it is due at once.
            options: see :class:`SendOptions`.

        Raises:
            ConfigurationError: ``transaction`` with a store that cannot take part in it, or outside of any.
            DelayedDeliveryNotConfigured: a delayed send without ``delayed_delivery`` (row 15).
            UnknownMessageType: no destination is given and none is routed.
            QueueNotFound, MessageTooLarge, TransportUnavailable, StoreUnavailable: nothing was sent.
            NotSupported: a time to be received, or dead letters, with queues that have none; nothing was sent.
            DuplicateMessage: ``message_id`` was used for a delayed message before.
        """
        if transaction is not None:
            store, delayed = self.into_transaction(message, SendOptions(**options))
            await store.enqueue(transaction, [delayed], self.clock.now())
            return delayed.message_id
        outgoing = self.outgoing(message, SendOptions(**options))
        await self.send_now([outgoing])
        return outgoing.message_id

    def into_transaction(self, message: object, options: SendOptions) -> tuple[TransactionalStore, DelayedMessage]:
        """Return what :meth:`send` would store in a transaction of the application, and where; stores nothing."""
        store = transactional(None if self.delayed_delivery is None else self.delayed_delivery.store, self.name)
        return store, kept(self.outgoing(message, options), self.clock.now())

    def outgoing(
        self, message: object, options: SendOptions, related_to: Mapping[str, str] | None = None
    ) -> Envelope | DelayedMessage:
        """Return what :meth:`send` would send; sends nothing."""
        content, body = ({}, message) if isinstance(message, bytes) else self._types.encode(message)
        destination = options.destination or self._routes.get(type(message))
        if destination is None and self._handles(type(message)):
            destination = self.name
        if destination is None:
            raise UnknownMessageType(
                f"no destination for {type_name(type(message))}: pass destination='queue', or route its type with "
                f"endpoint.route({type(message).__name__}, 'queue')"
            )
        options = self._expiring(type(message), options)
        if options.is_delayed and self.delayed_delivery is None:
            raise DelayedDeliveryNotConfigured(
                f"endpoint {self.name!r} cannot delay messages: it has no delayed message store; pass "
                f"delayed_delivery=DelayedDelivery(store) when you create it"
            )
        if related_to:
            content = {**_conversation(related_to), **content}
        sender = Sender(self.name, None if self.send_only else self.name)
        return outgoing_message(content, body, destination, options, sender, self.clock.now())

    def _handles(self, message_type: type[Any]) -> bool:
        return message_type in self._handlers or (self._sagas is not None and self._sagas.handles(message_type))

    def _expiring(self, message_type: type[Any], options: SendOptions) -> SendOptions:
        """Return the options with the time to be received of the message type, unless this send has its own."""
        if options.time_to_be_received is None:
            span = None if message_type is bytes else self._times_to_be_received.of(message_type)
            if span is not None:
                options = replace(options, time_to_be_received=span)
        can, queues = self.transport.capabilities, f"the queues of {type(self.transport).__name__}"
        if finite(options.time_to_be_received) is not None and not can.expires_messages:
            raise NotSupported(
                f"{queues} do not expire messages: send {type_name(message_type)} without time_to_be_received"
            )
        if options.use_dead_letter_queue is not None and not can.dead_letters:
            raise NotSupported(f"{queues} have no dead letters: send without use_dead_letter_queue")
        return options

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

    def end_of(
        self,
        outgoing: Sequence[Envelope | DelayedMessage],
        record: RecordKind,
        detail: str = "",
        also: Sequence[Work] = (),
    ) -> End:
        """Return the end of a handled message that sends or stores ``outgoing`` in the same transaction."""
        envelopes = [message for message in outgoing if isinstance(message, Envelope)]
        delayed = [message for message in outgoing if isinstance(message, DelayedMessage)]
        work: list[Work] = [*also]
        if self._enlisting is not None and delayed:
            work.append(self._enlisting.storing(delayed, self.clock.now()))
        else:
            envelopes += [through_queue(message, timeouts_queue(self.name)) for message in delayed]
        return End(record, detail, envelopes, work)

    # --- handling -----------------------------------------------------------------------------------------------

    def discard_reason(self, received: Received) -> str | None:
        """Return why an incoming message is past its use, or ``None``.

        Queues that expire messages have looked at what is not in the headers, by their own clock.
        """
        if self._ignore_time_to_be_received:
            return None
        now, envelope = self.clock.now(), received.envelope
        headers = envelope.headers
        if not self.transport.capabilities.expires_messages:
            headers = _own_headers(envelope)
        return discard_reason(headers, now, self._allowance)

    def discarded(self, received: Received, reason: str) -> End:
        """Return the end of a message that is past its use: counted, recorded, and in no other queue."""
        if received.failures:  # so this was not just too late: it is worth knowing
            reason = f"{reason}, after {received.failures} failed attempts"
        level = logging.WARNING if received.failures else logging.DEBUG
        log.log(level, "Discarding message %s due to lapsed Time To Be Received header: %s", _id(received), reason)
        self._metrics.discarded(1)
        return End(RecordKind.DISCARDED, reason)

    async def call_handlers(self, received: Received, context: HandlerContext) -> None:
        """Decode the message and call every handler of its type, one after the other."""
        message = self._types.decode(received.envelope.headers, received.envelope.body)
        if self._sagas is not None and is_saga_timeout(received.envelope.headers):
            await self._sagas.handle_timeout(message, context)
            return
        if not self._handles(type(message)):
            raise UnknownMessageType(f"no handler for {type_name(type(message))}")
        for handle in self._handlers.get(type(message), ()):
            await handle(message, context)
        if self._sagas is not None:
            await self._sagas.handle(message, context)

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
                log.warning("message %s is not retried, as it would expire before that: %s", _id(received), reason)
                return self.discarded(received, f"expires before its retry: {reason}")
            case DelayedRetry(delay):
                log.warning("message %s is retried in %s: %s", _id(received), delay, reason)
                retry = self._retry(received, now + delay, now)
                return self.end_of([retry], RecordKind.RETRIED, f"retried as {retry.message_id}: {reason}")
            case _:
                return self.to_error(received, error)

    def _retry(self, received: Received, due: datetime, now: datetime) -> DelayedMessage:
        """Return the message for its delayed retry: a send of its own, so it has an id of its own in the store."""
        envelope = received.envelope
        own = _own_headers(envelope)
        headers = {Headers.MESSAGE_ID: envelope.message_id, **delayed_retry_headers(own, now)}
        return DelayedMessage(new_message_id(), due, self.name, headers, envelope.body)

    def _expires_before(self, received: Received, instant: datetime) -> bool:
        if self._ignore_time_to_be_received:
            return False
        try:
            end = end_of_use(_own_headers(received.envelope))
        except InvalidTimestamp:  # unreadable: it does not expire
            return False
        return end is not None and instant - end > self._allowance

    def to_error(self, received: Received, error: Exception) -> End:
        """Return the end of a message that goes to the error queue."""
        reason = f"{type(error).__name__}: {text_of(error)}"
        envelope, queue = received.envelope, self._error_queue
        log.error("message %s moved to error queue %s: %s", _id(received), queue, reason)
        own = _own_headers(envelope)
        headers = error_headers(own, error, self.name, self.clock.now(), self.host)
        copy = Envelope(queue, envelope.message_id, headers, envelope.body, due=envelope.due)
        return End(RecordKind.FAILED, reason, outgoing=[copy])


@dataclass(frozen=True, slots=True)
class _Handling:
    """Handles one received message completely; the handler of the endpoint's message pump."""

    endpoint: Endpoint
    commit: Callable[[Received, datetime, End], Awaitable[None]]
    roll_back: Callable[[Received], Awaitable[None]]

    async def handle(self, received: Received) -> None:
        if self.endpoint.mode is TransactionMode.NONE and not await self._is_taken(received):
            return
        conflicts = 0
        while True:
            try:
                await self._handle_once(received)
            except SagaConflict as error:  # somebody else was first: decided again, on what they left
                conflicts += 1
                log.debug("message %s is handled again: %s", _id(received), error)
                if conflicts < _CONFLICTS_BORNE:
                    continue
                await self._recover(received, error)
            return

    async def _handle_once(self, received: Received) -> None:
        """Handle a message; raises :class:`SagaConflict` when nothing of that was kept and it is to be done again."""
        endpoint, context = self.endpoint, HandlerContext(self.endpoint, received)
        try:
            end = await self._end(received, context)
        except SagaConflict:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failure of its message
            await self._recover(received, error)
            return
        except anyio.get_cancelled_exc_class() as error:
            if _is_being_cancelled():
                raise
            # The handler awaited something that others cancelled, and let that out: it says nothing about this task.
            await self._recover(received, RuntimeError(f"the handler ended by {type(error).__name__}"))
            return
        try:
            if endpoint.mode in {TransactionMode.NONE, TransactionMode.RECEIVE_ONLY} and (end.outgoing or end.work):
                # Not rolled back when taking the message off the queue fails afterwards (specification 6).
                await self._send_first(end)
                end = End(end.record, end.detail)
            if endpoint.mode is not TransactionMode.NONE:
                await self.commit(received, endpoint.clock.now(), end)
        except (MessageError, QueueNotFound) as error:  # what the handler sent cannot be sent
            await self._recover(received, error)
            return
        for each in context.afterwards:
            await each()

    async def _is_taken(self, received: Received) -> bool:
        """Take a message off its queue before it is handled; return whether it is to be."""
        endpoint = self.endpoint
        try:
            reason = endpoint.discard_reason(received)
        except InvalidTimestamp as error:
            await self.commit(received, endpoint.clock.now(), End(RecordKind.HANDLED))
            await self._recover(received, error)
            return False
        end = End(RecordKind.HANDLED) if reason is None else endpoint.discarded(received, reason)
        await self.commit(received, endpoint.clock.now(), end)
        return reason is None

    async def _end(self, received: Received, context: HandlerContext) -> End:
        endpoint = self.endpoint
        # Asked before of what is off its queue already: by now its time may be over, and it must be handled.
        reason = None if endpoint.mode is TransactionMode.NONE else endpoint.discard_reason(received)
        if reason is not None:
            return endpoint.discarded(received, reason)
        started = endpoint.clock.now()
        await endpoint.call_handlers(received, context)
        outgoing = context.end()
        if endpoint.audit is not None:
            copy = endpoint.audit.copy(received.envelope, started, endpoint.clock.now(), endpoint.host)
            outgoing = [*outgoing, copy]
        return endpoint.end_of(outgoing, RecordKind.HANDLED, also=context.work)

    async def _send_first(self, end: End) -> None:
        """Send and store outside of any receive transaction: with each other, where the queues can have that."""
        can = self.endpoint.transport.capabilities
        expiring = any(envelope.time_to_be_received is not None for envelope in end.outgoing)
        if end.work and expiring and not can.time_to_be_received_in_transactions:
            await self._send(end.outgoing, ())
            await self._send((), end.work)
        else:
            await self._send(end.outgoing, end.work)

    async def _send(self, envelopes: Sequence[Envelope], work: Sequence[Work]) -> None:
        for error in await self.endpoint.transport.send(envelopes, self.endpoint.clock.now(), work=work):
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


def strongest_mode(
    transport: Transport, delayed_delivery: DelayedDelivery | None, sagas: SagaStore | None = None
) -> TransactionMode:
    """Return the strongest transaction mode that transport and stores can keep together."""
    modes = transport.capabilities.transaction_modes
    if delayed_delivery is not None:
        modes &= delayed_delivery.claims.capabilities.transaction_modes
        if enlisting(delayed_delivery.claims, transport) is None:
            modes -= {TransactionMode.TRANSACTION_SCOPE}
    if sagas is not None and enlisting_sagas(sagas, transport) is None:
        modes -= {TransactionMode.TRANSACTION_SCOPE}
    strength = list(TransactionMode)
    return max(modes, key=strength.index, default=TransactionMode.NONE)


def _own_headers(envelope: Envelope) -> Mapping[str, str]:
    """Return the headers with the expiry that only the queue knew; a time to be received is in them already."""
    if Headers.TIME_TO_BE_RECEIVED in envelope.headers:
        return envelope.headers
    return headers_with_expiry(envelope.headers, envelope.expires_at)


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
