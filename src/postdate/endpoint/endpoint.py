"""An endpoint: a named party that sends, handles and delays messages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, SystemClock, checked_clock
from postdate.core.circuit_breaker import RepeatedFailures
from postdate.core.poller import LONGEST_SLEEP
from postdate.core.receive.outcomes import Step
from postdate.core.receive.pump import MessagePump
from postdate.core.recoverability import (
    DEFAULT_ERROR_QUEUE,
    Host,
    Recoverability,
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
from postdate.endpoint.endings import MessageEndings, Retries
from postdate.endpoint.handlers import Handler, Handlers
from postdate.endpoint.handling import Handling
from postdate.endpoint.outbox import Outbox, OutboxCleanUp, OutboxHandling, check_outbox, prepare_outbox
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.publishing import publishing
from postdate.endpoint.saga_handling import Sagas, check_saga_mode, check_saga_outbox
from postdate.endpoint.saga_instance import SagaSurroundings
from postdate.endpoint.sagas import Saga
from postdate.endpoint.sending import (
    Sender,
    SendKeywords,
    SendOptions,
)
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, ModeName, TimeoutManager, mode_of
from postdate.endpoint.time_to_be_received import Convention, TimesToBeReceived
from postdate.endpoint.timeout_manager import TimeoutManagerService, checked_timeout_manager
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
)
from postdate.messages import (
    DESTINATION_LIMIT,
    check_text,
)
from postdate.ports import (
    NativeTransaction,
    SagaStore,
    TransactionMode,
    Transport,
)
from postdate.runtime.metrics import NO_METRICS, Metrics

log = logging.getLogger("postdate.endpoint")

LONGEST_ENDPOINT_NAME = DESTINATION_LIMIT - len(timeouts_queue(""))
"""So that its timeouts queue is an address, too."""

M = TypeVar("M")


class Endpoint:
    """A named party that sends, handles and delays messages.

    Use it as an asynchronous context manager: it starts on entering, which returns when it has begun to receive from
    its queues and hears of what is stored, and stops on leaving, finishing what is in hand. Queues and stores that are
    away hold up nobody: one refusal is enough, and they are asked again and again.
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

    _makes_outgoing: Callable[..., OutgoingMessages] = OutgoingMessages
    _makes_endings: Callable[..., MessageEndings] = MessageEndings
    """Tests of users have others, which remember."""
    _longest_sleep = LONGEST_SLEEP
    """Of its pollers; longer in tests of users, where nothing is stored and no clock is set unheard."""

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
        policy = replace(policy, error_queue=policy.error_queue or error_queue or DEFAULT_ERROR_QUEUE)
        allowance = _checked_allowance(time_to_be_received_allowance)
        self._concurrency, self._create_queues, self._database = concurrency, create_queues, database
        if audit is not None:
            in_transactions = outbox is None and self.mode is not TransactionMode.NONE
            audit.check(transport.capabilities, [name, str(policy.error_queue)], in_transactions=in_transactions)
        self.audit = audit
        self._critical_errors, self._metrics = CriticalErrors(critical_error), metrics
        self._events: list[str] = []
        self.host = Host(name)
        delays = delays_of(name, transport, delayed_delivery, timeout_manager)
        retries = Retries.of(self.mode, delays=delays.are_possible)
        if not send_only:
            retries.check(policy)
        types = MessageTypes()
        self._handlers = Handlers(types)
        self.outgoing = self._makes_outgoing(
            Sender(name, None if send_only else name),
            transport,
            self.mode,
            delays,
            None if delayed_delivery is None else delayed_delivery.store,
            self.clock,
            types,
            TimesToBeReceived(time_to_be_received),
            self._handlers.handles,
        )
        self._endings = self._makes_endings(
            self.outgoing,
            policy,
            retries,
            self.host,
            self._critical_errors,
            metrics,
            ignore_incoming_time_to_be_received_headers,
            allowance,
        )
        self._handlers.sagas = None if sagas is None else self._sagas_in(sagas)
        around = Surroundings(
            name, transport, self.mode, self.clock, self._critical_errors, metrics, self._longest_sleep
        )
        self._services: list[DelayedDeliveryService | TimeoutManagerService] = []
        manager = None
        if managing is not None:
            manager = TimeoutManagerService(managing, around, self._endings.error_queue, delayed_delivery)
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
        make = self.outgoing
        around = SagaSurroundings(self.name, make.store, make.delays, self.clock, make.types, make.make)
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
            self._handlers.add(message_type, handle)
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
        if self._handlers.sagas is None:
            store = sagas_in(self._database)
            if store is None:
                raise ConfigurationError(
                    f"endpoint {self.name!r} has no saga store; pass sagas=SqliteSagaStore(…) when you create it"
                )
            self._handlers.sagas = self._sagas_in(store)
        definition = self._handlers.sagas.add(saga)
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
        self.outgoing.routes[message_type] = destination

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
        event = self.outgoing.types.name_of(message_type)
        publishing(self.transport).event_address(event)
        self._events.append(event)

    def _add_type(self, message_type: type[Any], name: str | None) -> None:
        self.outgoing.times_to_be_received.of(message_type)  # a wrong one is told where the type is registered
        self.outgoing.types.add(message_type, name)

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
            if self._pump is not None:
                await self._pump.listening.wait()
            for service in self._services:
                await service.listening()
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
            if self._handlers.sagas is not None:
                await self._handlers.sagas.store.setup()
            audit = [] if self.audit is None else [self.audit.queue]
            await self.transport.create_queues([self.name, self._endings.error_queue, *audit])
            if self._events:
                await publishing(self.transport).subscribe(self.name, self._events)
        breaker = RepeatedFailures(
            "Receive", "Failed to receive messages", RECEIVE_BREAKER, self._critical_errors, self._metrics
        )
        self._timers = BreakerTimers([breaker], self.clock)
        receiver = self.transport.receiver(self.name)
        handling = Handling(self.outgoing, self._endings, self._handlers, self.audit, receiver)
        handle = handling.handle if self._outbox is None else await self._with_outbox(self._outbox, handling)
        ahead = self.transport.capabilities.prefetches
        self._pump = MessagePump(
            handling.receiver, handle, self._concurrency, self.clock, breaker, self.name, prefetches=ahead
        )

    async def _with_outbox(self, outbox: Outbox, handling: Handling) -> Step:
        await prepare_outbox(outbox, self.name, set_up=self._create_queues)
        self._clean_up = [OutboxCleanUp(outbox, self.name, self.clock)]
        return OutboxHandling(outbox, handling).handle

    def _check_expiring_types(self) -> None:
        expiring = self.outgoing.times_to_be_received.expiring()
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
            store, delayed = self.outgoing.into_transaction(message, SendOptions(**options))
            await store.enqueue(transaction, [delayed], self.clock.now())
            return delayed.message_id
        outgoing = self.outgoing.make(message, SendOptions(**options))
        await self.outgoing.send([outgoing])
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
        options = self.outgoing.publish_options(message, headers, message_id)
        outgoing = self.outgoing.make(message, options)
        await self.outgoing.send([outgoing])
        return outgoing.message_id

    # --- handling -----------------------------------------------------------------------------------------------


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
