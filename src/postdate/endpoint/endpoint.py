"""An endpoint: a named party that sends, handles and delays messages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, SystemClock, checked_clock, later
from postdate.core.circuit_breaker import RepeatedFailures
from postdate.core.expiry import discard_reason, end_of_use
from postdate.core.pump import Handle, MessagePump
from postdate.core.receiving import WatchedReceiver
from postdate.core.recoverability import (
    DEFAULT_ERROR_QUEUE,
    DelayedRetry,
    Discard,
    Host,
    ImmediateRetry,
    MoveToError,
    Recoverability,
    customized,
    delayed_retry_headers,
    error_headers,
    error_headers_in_brief,
    text_of,
)
from postdate.core.store_clock import FollowingClock, clock_of_store
from postdate.endpoint.audit import Audit
from postdate.endpoint.critical import BreakerTimers, CriticalErrorAction, CriticalErrors, log_critical_error
from postdate.endpoint.database import Database, parts_of, sagas_in
from postdate.endpoint.delayed_delivery import (
    RECEIVE_BREAKER,
    DelayedDeliveryService,
    Surroundings,
    check_transport_mode,
    timeouts_queue,
)
from postdate.endpoint.delaying import delays_of, strongest_mode
from postdate.endpoint.handling import HandlerContext, Handling
from postdate.endpoint.outbox import Outbox, OutboxCleanUp, OutboxHandling, Steps, check_outbox, prepare_outbox
from postdate.endpoint.publishing import publish_options, publishing
from postdate.endpoint.retries import Retries
from postdate.endpoint.saga_handling import Sagas, check_saga_mode, check_saga_outbox, is_saga_timeout
from postdate.endpoint.saga_instance import SagaSurroundings
from postdate.endpoint.sagas import Saga
from postdate.endpoint.sending import (
    Sender,
    SendKeywords,
    SendOptions,
    check_headers_fit,
    kept,
    outgoing_message,
    transactional,
)
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, ModeName, TimeoutManager, mode_of
from postdate.endpoint.time_to_be_received import Convention, TimesToBeReceived, finite
from postdate.endpoint.timeout_manager import TimeoutManagerService, checked_timeout_manager
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    InvalidTimestamp,
    NotSupported,
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
    without_delay_headers,
)
from postdate.metrics import NO_METRICS, Metrics
from postdate.ports import (
    End,
    MovingStore,
    NativeTransaction,
    Received,
    RecordKind,
    SagaStore,
    TransactionMode,
    Transport,
    Work,
)

log = logging.getLogger("postdate.endpoint")

LONGEST_ENDPOINT_NAME = DESTINATION_LIMIT - len(timeouts_queue(""))
"""So that its timeouts queue is an address, too."""

M = TypeVar("M")


Handler = Callable[[Any, HandlerContext], Awaitable[None]]


class Endpoint:
    """A named party that sends, handles and delays messages.

    Use it as an asynchronous context manager: it starts on entering and stops on leaving, finishing what is in hand.
    Several messages are handled at once, each by all handlers of its type.

    Args:
        name: of the endpoint and of its input queue.
        database: in which all is kept that the other arguments do not name: the queues; delayed messages, unless there
            is a ``timeout_manager``; sagas, when one is registered; the outbox, when it is ``True``. For example
            ``Sqlite(path)`` or ``Postgres(url)``. It is not closed with the endpoint.
        transport: of all queues.
        delayed_delivery: how delayed messages are kept; without it, a database and a timeout manager, delayed sends are
            refused.
        timeout_manager: the older way, in this endpoint or in another one; beside ``delayed_delivery`` it only ends
            what it has begun.
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
        clock: only tests and simulations need another. The machine's follows that of the store, where the store is on a
            server; see :class:`DelayedDelivery`.
        critical_error: what to do when the endpoint cannot do its work any more: a function, async or not, of a text
            and the last error. By default it is logged.
        metrics: what is counted and measured is told to it.
        outbox: handle each message once, with ``transaction_mode="receive_only"``; without it, a message that is
            delivered again is handled again. ``True``: with the outbox of the database.
        sagas: where the instances of sagas are kept; see :meth:`saga`.

    Raises:
        ConfigurationError: when built from settings that do not fit together.
    """

    def __init__(  # noqa: PLR0913 - the one place where everything comes together; all but the name by keyword
        self,
        name: str,
        database: Database | None = None,
        *,
        transport: Transport | None = None,
        delayed_delivery: DelayedDelivery | None = None,
        timeout_manager: TimeoutManager | ExternalTimeoutManager | None = None,
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
        outbox: Outbox | bool | None = None,
        sagas: SagaStore | None = None,
    ) -> None:
        _check_names(name, error_queue)
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be 1 or more, not {concurrency}")
        parts = parts_of(name, concurrency, database, transport, delayed_delivery, timeout_manager, outbox)
        transport, delayed_delivery, outbox = parts.transport, parts.delayed_delivery, parts.outbox
        self.name, self.transport, self.send_only = name, transport, send_only
        self.clock = _judging(checked_clock(clock or SystemClock()), delayed_delivery)
        self.delayed_delivery = delayed_delivery
        managing = checked_timeout_manager(timeout_manager, name, delayed_delivery)
        self.mode = mode_of(transaction_mode) or strongest_mode(transport, delayed_delivery, managing, sagas)
        check_transport_mode(transport, self.mode)
        if outbox is not None:
            check_outbox(transaction_mode, self.mode, send_only=send_only)
        self._outbox, self._clean_up = outbox, list[OutboxCleanUp]()
        policy = recoverability or Recoverability()
        self._error_queue = policy.error_queue or error_queue or DEFAULT_ERROR_QUEUE
        self._recoverability = replace(policy, error_queue=self._error_queue)
        self._concurrency, self._create_queues, self._database = concurrency, create_queues, database
        self._ignore_time_to_be_received = ignore_incoming_time_to_be_received_headers
        self._allowance = _checked_allowance(time_to_be_received_allowance)
        self._times_to_be_received = TimesToBeReceived(time_to_be_received)
        if audit is not None:
            in_transactions = outbox is None and self.mode is not TransactionMode.NONE
            audit.check(transport.capabilities, [name, self._error_queue], in_transactions=in_transactions)
        self.audit = audit
        self._critical_errors, self._metrics = CriticalErrors(critical_error), metrics
        self._types = MessageTypes()
        self._handlers: dict[type[Any], list[Handler]] = {}
        self._routes: dict[type[Any], str] = {}
        self._events: list[str] = []
        self.host = Host(name)
        around = Surroundings(name, transport, self.mode, self.clock, self._critical_errors, metrics)
        self.delays = delays_of(name, transport, delayed_delivery, timeout_manager)
        self._retries = Retries.of(self.mode, delays=self.delays.are_possible)
        if not send_only:
            self._retries.check(policy)
        self._sagas = None if sagas is None else self._sagas_in(sagas)
        self._services: list[DelayedDeliveryService | TimeoutManagerService] = []
        manager = None
        if managing is not None:
            manager = TimeoutManagerService(managing, around, self._error_queue, delayed_delivery)
            self._services.append(manager)
        if delayed_delivery is not None:
            orders_before = manager.orders_before if manager is not None and manager.shares_queue else None
            self._services.append(DelayedDeliveryService(delayed_delivery, around, error_queue, orders_before))
        self._pump: MessagePump | None = None
        self._timers: BreakerTimers | None = None
        self._running: AsyncExitStack | None = None
        self._tasks: TaskGroup | None = None
        self._following: anyio.CancelScope | None = None

    def _sagas_in(self, store: SagaStore) -> Sagas:
        """Return the sagas; what is kept of them is part of the transactions of outbox or queues, where it is there."""
        check_saga_mode(store, self.transport, self.mode)
        can = self.transport.capabilities
        if self._outbox is not None:
            check_saga_outbox(store, self._outbox.store)
            database = self._outbox.store.database
        elif self.mode is TransactionMode.RECEIVE_ONLY and not can.time_to_be_received_in_transactions:
            database = None  # there some messages cannot leave in the transaction in which state would be kept
        else:
            database = can.database
        delays = None if self.delayed_delivery is None else self.delayed_delivery.store
        around = SagaSurroundings(self.name, delays, self.delays, self.clock, self._types, self.outgoing)
        return Sagas(store, database, around)

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
            ConfigurationError: the endpoint is send-only or was created without ``sagas`` and a database that keeps
                some, or the saga has timeouts and the endpoint can delay nothing.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")
        if self._sagas is None:
            store = sagas_in(self._database)
            if store is None:
                raise ConfigurationError(
                    f"endpoint {self.name!r} has no saga store; pass sagas=SqliteSagaStore(…) when you create it"
                )
            self._sagas = self._sagas_in(store)
        definition = self._sagas.add(saga)
        for message_type in (*definition.messages, *definition.timeouts):
            self._add_type(message_type, None)

    def route(self, message_type: type[Any], destination: str, *, name: str | None = None) -> None:
        """Send messages of ``message_type`` to ``destination`` unless a send says otherwise.

        Raises:
            ConfigurationError: ``destination`` is no address.
        """
        try:
            check_text(destination, f"the route of {type_name(message_type)}", DESTINATION_LIMIT)
        except InvalidMessage as error:
            raise ConfigurationError(str(error)) from error
        self._add_type(message_type, name)
        self._routes[message_type] = destination

    def subscribe(self, message_type: type[Any], *, name: str | None = None) -> None:
        """Receive what anybody publishes of this type, from the next start on; it needs a handler, too.

        A subscription outlives the endpoint: it belongs to the queue, and is made with it (``create_queues``).

        Raises:
            NotSupported: the queues cannot publish.
            ConfigurationError: the endpoint is send-only.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")
        self._add_type(message_type, name)
        event = self._types.name_of(message_type)
        publishing(self.transport).event_address(event)
        self._events.append(event)

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
            if isinstance(self.clock, FollowingClock):
                self._following = anyio.CancelScope()
                tasks.start_soon(self._follow, self.clock, self._following)
            for service in self._services:
                tasks.start_soon(service.run)
            for clean_up in self._clean_up:
                tasks.start_soon(clean_up.run)
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

    async def _follow(self, clock: FollowingClock, scope: anyio.CancelScope) -> None:
        with scope:
            await clock.follow()

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
        for service in self._services:
            service.stop()
        for clean_up in self._clean_up:
            clean_up.stop()
        if self._following is not None:
            self._following.cancel()

    async def _prepare(self) -> None:
        self._check_expiring_types()
        for service in self._services:
            await service.prepare(set_up=self._create_queues)
        if isinstance(self.clock, FollowingClock):  # before anything is taken that may not be due by it
            await self.clock.measure()
        if self.send_only:
            return
        if self._create_queues:
            if self._sagas is not None:
                await self._sagas.store.setup()
            audit = [] if self.audit is None else [self.audit.queue]
            await self.transport.create_queues([self.name, self._error_queue, *audit])
            if self._events:
                await publishing(self.transport).subscribe(self.name, self._events)
        breaker = RepeatedFailures(
            "Receive", "Failed to receive messages", RECEIVE_BREAKER, self._critical_errors, self._metrics
        )
        self._timers = BreakerTimers([breaker], self.clock)
        receiver = WatchedReceiver(self.transport.receiver(self.name), self.clock)
        handling = Handling(self, receiver.commit, receiver.roll_back, receiver.watch)
        handle = handling.handle if self._outbox is None else await self._with_outbox(self._outbox, handling)
        ahead = self.transport.capabilities.reads_ahead
        self._pump = MessagePump(receiver, handle, self._concurrency, self.clock, breaker, self.name, reads_ahead=ahead)

    async def _with_outbox(self, outbox: Outbox, handling: Handling) -> Handle:
        await prepare_outbox(outbox, self.name, set_up=self._create_queues)
        self._clean_up = [OutboxCleanUp(outbox, self.name, self.clock)]
        steps = Steps(handling.call, handling.send_first, handling.commit, handling.recover)
        return OutboxHandling(self, outbox, steps).handle

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
            DelayedDeliveryNotConfigured: a delayed send without ``delayed_delivery`` or a timeout manager (row 15).
            UnknownMessageType: no destination is given and none is routed.
            QueueNotFound, MessageTooLarge, TransportUnavailable, StoreUnavailable: nothing was sent. A delayed message
                whose headers no queue would take when it is due is refused now.
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

    async def publish(
        self, message: object, headers: Mapping[str, str] | None = None, *, message_id: str | None = None
    ) -> str:
        """Send a message to everybody who is subscribed to its type, which may be nobody; return its id.

        An event cannot be delayed (row 7): delay the message whose handler publishes it.

        Raises:
            NotSupported: the queues cannot publish; nothing was sent.
            MessageTooLarge, TransportUnavailable: nothing was sent.
        """
        outgoing = self.outgoing(message, self.publish_options(message, headers, message_id))
        await self.send_now([outgoing])
        return outgoing.message_id

    def publish_options(
        self, message: object, headers: Mapping[str, str] | None, message_id: str | None
    ) -> SendOptions:
        """Return how :meth:`publish` sends; sends nothing."""
        return publish_options(self.transport, self._types.name_of(type(message)), headers, message_id)

    def into_transaction(self, message: object, options: SendOptions) -> tuple[MovingStore, DelayedMessage]:
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
        if options.is_delayed:
            self.delays.check()
        if related_to:
            content = {**_conversation(related_to), **content}
        sender = Sender(self.name, None if self.send_only else self.name)
        outgoing = outgoing_message(content, body, destination, options, sender, self.clock.now())
        check_headers_fit(outgoing, self.transport.capabilities.largest_headers_bytes)
        return outgoing

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
        envelopes, delayed = self.delays.split(messages)
        await self.delays.store_now(delayed, self.clock.now())
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
        envelopes, delayed = self.delays.split(outgoing)
        return End(record, detail, envelopes, [*also, *self.delays.storing(delayed, self.clock.now())])

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
        now = self.clock.now()
        decision = self._retries.decide(error, received, self._recoverability, now)
        reason = f"{type(error).__name__}: {text_of(error)}"
        match decision:
            case ImmediateRetry():
                log.info("message %s is retried at once: %s", _id(received), reason)
                return None
            case DelayedRetry(delay) if self._expires_before(received, later(now, delay)):
                log.warning("message %s is not retried, as it would expire before that: %s", _id(received), reason)
                return self.discarded(received, f"expires before its retry: {reason}")
            case DelayedRetry(delay):
                log.warning("message %s is retried in %s: %s", _id(received), delay, reason)
                retry = self._retry(received, later(now, delay), now)
                return self.end_of([retry], RecordKind.RETRIED, f"retried as {retry.message_id}: {reason}")
            case Discard(why):
                log.info("message %s is discarded by the recoverability policy: %s", _id(received), why)
                self._metrics.discarded(1)
                return End(RecordKind.DISCARDED, f"{why}: {reason}")
            case MoveToError(queue):
                return self.to_error(received, error, queue)

    def _retry(self, received: Received, due: datetime, now: datetime) -> DelayedMessage:
        """Return the message for its delayed retry: a send of its own, so it has an id of its own in the store."""
        envelope = received.envelope
        own = _own_headers(envelope)
        # Without those that would steer the delay: on the way through a queue they would be taken for its own.
        retried = without_delay_headers(delayed_retry_headers(own, now))
        headers = {Headers.MESSAGE_ID: envelope.message_id, **retried}
        return DelayedMessage(new_message_id(), due, self.name, headers, envelope.body)

    def _expires_before(self, received: Received, instant: datetime) -> bool:
        if self._ignore_time_to_be_received:
            return False
        try:
            end = end_of_use(_own_headers(received.envelope))
        except InvalidTimestamp:  # unreadable: it does not expire
            return False
        return end is not None and instant - end > self._allowance

    def critical_error(self, text: str, error: BaseException) -> None:
        """Call what the application does about critical errors."""
        self._critical_errors(text, error)

    def to_error(self, received: Received, error: Exception, queue: str | None = None) -> End:
        """Return the end of a message that goes to an error queue; ``None``: that of the endpoint."""
        reason = f"{type(error).__name__}: {text_of(error)}"
        envelope, queue = received.envelope, queue or self._error_queue
        log.error("message %s moved to error queue %s: %s", _id(received), queue, reason)
        own = _own_headers(envelope)
        headers = error_headers(own, error, self.name, self.clock.now(), self.host)
        headers = customized(headers, self._recoverability.customize_headers)
        copy = Envelope(queue, envelope.message_id, headers, envelope.body, due=envelope.due)
        return End(RecordKind.FAILED, reason, outgoing=[copy])

    def to_error_in_brief(self, received: Received, error: Exception) -> End:
        """Return the end of a message whose error copy was refused: with another that says only what is needed."""
        reason = f"{type(error).__name__}: {text_of(error)}"
        envelope, own = received.envelope, _own_headers(received.envelope)
        headers = error_headers_in_brief(own, error, self.name, self.clock.now(), self.host)
        copy = Envelope(self._error_queue, envelope.message_id, headers, envelope.body, due=envelope.due)
        return End(RecordKind.FAILED, reason, outgoing=[copy])


def _own_headers(envelope: Envelope) -> Mapping[str, str]:
    """Return the headers with the expiry that only the queue knew; a time to be received is in them already."""
    if Headers.TIME_TO_BE_RECEIVED in envelope.headers:
        return envelope.headers
    return headers_with_expiry(envelope.headers, envelope.expires_at)


def _judging(own: Clock, delayed_delivery: DelayedDelivery | None) -> Clock:
    """Return the clock that judges what is due: that of the store, where it has one and is asked for."""
    if delayed_delivery is None:
        return own
    return clock_of_store(own, delayed_delivery.store, judges=delayed_delivery.use_store_clock) or own


def _checked_allowance(allowance: timedelta) -> timedelta:
    if not isinstance(allowance, timedelta) or allowance < timedelta(0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"time_to_be_received_allowance must not be negative, and a timedelta: not {allowance!r}"
        )
    return allowance


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


def _id(received: Received) -> str:
    return received.envelope.message_id
