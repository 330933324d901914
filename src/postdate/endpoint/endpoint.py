"""Endpoints: they send, handle and delay messages. A blocking one is for programs without an event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal, start_blocking_portal
from typing_extensions import override

from postdate.clock import Clock
from postdate.core.due.poller import LONGEST_SLEEP
from postdate.core.recoverability import DEFAULT_ERROR_QUEUE, Host, Recoverability
from postdate.core.upkeep.store_clock import FollowingClock
from postdate.endpoint import assemble
from postdate.endpoint.completions import MessageCompletions
from postdate.endpoint.handling import Handler, Handlers
from postdate.endpoint.message_types import Convention, MessageTypes, TimesToBeReceived, type_name
from postdate.endpoint.outbox import Outbox, check_outbox
from postdate.endpoint.outgoing import OutgoingMessages, publishing_transport
from postdate.endpoint.plain_handlers import PlainHandler, threaded_handler
from postdate.endpoint.sagas import Saga
from postdate.endpoint.send_options import SendKeywords, read_send_options
from postdate.endpoint.service import CriticalErrorAction, CriticalErrors, EndpointContext, log_critical_error
from postdate.endpoint.settings import (
    Audit,
    DelayedDelivery,
    ExternalTimeoutManager,
    ModeName,
    TimeoutManager,
    check_address,
)
from postdate.endpoint.timeout_manager import check_timeout_manager
from postdate.errors import ConfigurationError
from postdate.ports import NativeTransaction, SagaStore, TransactionMode, Transport
from postdate.runtime import forks
from postdate.runtime.reporting import NO_METRICS, Metrics

M = TypeVar("M")
C = TypeVar("C")
R = TypeVar("R")


class Endpoint(forks.ForkAware):
    """A named part of an application that sends, handles and delays messages.

    Use it as an asynchronous context manager. Entering starts the endpoint, and returns when it receives from its
    queues and its store reports new messages to it. Leaving stops the endpoint, after it has finished the messages that
    are being handled. The endpoint also starts while queues and stores are out of reach: after one refusal it retries
    in the background. Several messages are handled at once, each by all handlers of its type.

    Args:
        name: name of the endpoint and of its input queue.
        database: the queues, store, sagas and outbox that no other argument sets. It delays messages unless there is a
            ``timeout_manager``. Its sagas are used when a saga is registered, and its outbox when ``outbox`` is
            ``True``. For example ``Sqlite(path)`` or ``Postgres(url)``. It is not closed with the endpoint.
        transport: the transport of all queues.
        delayed_delivery: how delayed messages are stored. Without it, a database and a timeout manager, delayed sends
            are refused.
        timeout_manager: the older way to delay messages, in this endpoint or in another one. Beside
            ``delayed_delivery`` it only dispatches timeouts that it has stored already.
        transaction_mode: a mode or its name. Default: the strongest mode that transport and store support together.
        error_queue: queue for messages that cannot be handled or delivered.
        recoverability: how often handling is tried. Its error queue defaults to ``error_queue``.
        send_only: the endpoint handles nothing and has no input queue. Delayed messages are still delivered.
        concurrency: number of messages that are handled at once.
        create_queues: create queues and tables at the start. If it is ``False`` and the store has no tables, the start
            raises `StoreNotSetUp`.
        ignore_incoming_time_to_be_received_headers: handle messages also after their time to be received.
        time_to_be_received_allowance: how long after its expiry a message is still handled. This is for clocks that
            differ: set twice the largest difference between them.
        time_to_be_received: a function that returns the time to be received of a message type. It has precedence over
            the decorator :func:`~postdate.time_to_be_received`.
        audit: send copies of handled messages to an audit queue.
        clock: another clock, for tests and simulations. By default, the machine's clock is used; it follows the clock
            of the store if the store is on a server; see :class:`DelayedDelivery`.
        critical_error: called when the endpoint cannot do its work any more, with a text and the last error; a
            function, async or not. By default the error is logged.
        metrics: receives counts and durations.
        outbox: handle each message once, with ``transaction_mode="receive_only"``. Without it, a message that is
            delivered again is handled again. ``True``: the outbox of the database.
        sagas: store of saga instances; see :meth:`saga`.

    Raises:
        ConfigurationError: the settings do not fit together.
    """

    _create_outgoing: Callable[..., OutgoingMessages] = OutgoingMessages
    _create_completions: Callable[..., MessageCompletions] = MessageCompletions
    """Classes that :mod:`postdate.testing.endpoints` replaces, by classes that remember messages and failures."""
    _longest_sleep = LONGEST_SLEEP
    """The longest sleep of pollers. It is longer in :mod:`postdate.testing.endpoints`, where set clocks wake them."""

    def __init__(  # noqa: PLR0913 - the one place where everything comes together; all but the name by keyword
        self,
        name: str,
        database: assemble.Database | None = None,
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
        assemble.check_names(name, error_queue)
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be 1 or more, not {concurrency}")
        transport, delayed_delivery, outbox = assemble.adapters_of(
            name, concurrency, database, transport, delayed_delivery, timeout_manager, outbox
        )
        self.name = name
        self.transport = transport
        self.send_only = send_only
        self.host = Host(name)
        self.delayed_delivery = delayed_delivery
        self.audit = audit
        self._outbox = outbox
        self._database = database
        # Whether a start creates queues and tables.
        self._create_queues = create_queues
        # Names of the events to which the next start subscribes the input queue.
        self._events = list[str]()
        # Decides what is due. It may follow the clock of the store.
        self.clock = assemble.due_clock(clock, delayed_delivery)
        running_manager = check_timeout_manager(timeout_manager, name, delayed_delivery)
        self.mode = assemble.transaction_mode_of(transaction_mode, transport, delayed_delivery, running_manager, sagas)
        if outbox is not None:
            check_outbox(transaction_mode, self.mode, send_only=send_only)
        policy = recoverability or Recoverability()
        error_queue_name = policy.error_queue or error_queue or DEFAULT_ERROR_QUEUE
        policy, allowance = (
            replace(policy, error_queue=error_queue_name),
            assemble.check_allowance(time_to_be_received_allowance),
        )
        if audit is not None:
            in_transactions = outbox is None and self.mode is not TransactionMode.NONE
            audit.check(transport.capabilities, [name, error_queue_name], in_transactions=in_transactions)
        self._critical_errors = CriticalErrors(critical_error)
        context = EndpointContext(
            name, transport, self.mode, self.clock, self._critical_errors, metrics, self._longest_sleep, send_only
        )
        types, times_to_be_received_of_types = MessageTypes(), TimesToBeReceived(time_to_be_received)
        self._handlers = Handlers(types)
        self.outgoing = self._create_outgoing(
            context, delayed_delivery, timeout_manager, types, times_to_be_received_of_types, self._handlers.handles
        )
        completions = None
        if not send_only:
            completions = self._create_completions(
                self.outgoing,
                policy,
                self.host,
                self._critical_errors,
                metrics,
                ignore_incoming_time_to_be_received_headers,
                allowance,
            )
        if sagas is not None:
            self._handlers.sagas = assemble.create_sagas(sagas, self.outgoing, outbox)
        self._services = assemble.create_delay_services(
            context, delayed_delivery, running_manager, error_queue, error_queue_name
        )
        if completions is not None:
            self._services.append(
                assemble.ReceivingService(
                    context, concurrency, self.outgoing, completions, self._handlers, audit, outbox, self._events
                )
            )
        # The next three are `None` while the endpoint does not run. They belong to the event loop in which it runs.
        # Closing the stack stops the endpoint.
        self._running_stack: AsyncExitStack | None = None
        self._tasks: TaskGroup | None = None
        # Also `None` if the clock follows no store.
        self._clock_scope: anyio.CancelScope | None = None
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Detach from the run of the parent. The child may send, and start the endpoint for itself."""
        forks.prevent_destruction((self._running_stack, self._tasks, self._clock_scope))
        self._running_stack = self._tasks = self._clock_scope = self._critical_errors.tasks = None

    # --- configuration ------------------------------------------------------------------------------------------

    def handler(
        self, message_type: type[M], *, name: str | None = None
    ) -> Callable[[Callable[[M, C], R]], Callable[[Any, C], R]]:
        """Register a function ``handle(message, context)`` for messages of ``message_type``.

        A plain function runs in a thread, and receives a :class:`postdate.BlockingHandlerContext`.

        Args:
            message_type: a dataclass or ``msgspec.Struct``; or ``bytes``, for messages that were sent as bytes, and all
                others whose headers name no type.
            name: name of the type on the wire. Default: that of :func:`postdate.message`, or ``module.Class``.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")

        def register(handle: Callable[[M, C], R]) -> Callable[[Any, C], R]:
            if not callable(handle):
                raise ConfigurationError(f"handler {handle!r} must be a function (message, context)")
            self._add_type(message_type, name)
            callables: tuple[object, ...] = (handle, type(handle).__call__)  # a function, or an object with `__call__`
            if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in callables):
                raise ConfigurationError(f"handler {handle!r} has a `yield`, and nobody would run what follows it")
            is_plain = not any(map(inspect.iscoroutinefunction, callables))
            async_handler = threaded_handler(cast("PlainHandler", handle)) if is_plain else cast("Handler", handle)
            self._handlers.add(message_type, async_handler)
            return handle

        return register

    def saga(self, saga: type[Saga[Any]]) -> None:
        """Register a saga: a subclass of :class:`~postdate.Saga`; its message types are registered, too.

        Raises:
            ConfigurationError: the endpoint is send-only, or has neither ``sagas`` nor a database with a saga store, or
                the saga has timeouts and the endpoint cannot delay messages.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")
        if self._handlers.sagas is None:
            store: SagaStore | None = getattr(self._database, "sagas", None)
            if store is None:
                raise ConfigurationError(
                    f"endpoint {self.name!r} has no saga store; pass sagas=SqliteSagaStore(…) when you create it"
                )
            self._handlers.sagas = assemble.create_sagas(store, self.outgoing, self._outbox)
        definition = self._handlers.sagas.add(saga)
        for message_type in (*definition.messages, *definition.timeouts):
            self._add_type(message_type, None)

    def route(self, message_type: type[Any], destination: str, *, name: str | None = None) -> None:
        """Send messages of ``message_type`` to ``destination`` by default. A send may name another destination.

        Raises:
            ConfigurationError: ``destination`` is no address.
        """
        check_address(destination, f"the route of {type_name(message_type)}")
        self._add_type(message_type, name)
        self.outgoing.routes[message_type] = destination

    def subscribe(self, message_type: type[Any], *, name: str | None = None) -> None:
        """Subscribe the input queue to published messages of a type, at the next start. The type needs a handler, too.

        A subscription belongs to the queue and outlives the endpoint. It is made when queues are created
        (``create_queues``).

        Raises:
            NotSupported: the queues cannot publish.
            ConfigurationError: the endpoint is send-only.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")
        self._add_type(message_type, name)
        event = self.outgoing.types.name_of(message_type)
        publishing_transport(self.transport).event_address(event)
        self._events.append(event)

    def _add_type(self, message_type: type[Any], name: str | None) -> None:
        self.outgoing.times_to_be_received.span_of(message_type)  # raises now for an invalid time
        self.outgoing.types.add(message_type, name)

    # --- start and stop -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._running_stack is not None:
            raise ConfigurationError(f"endpoint {self.name!r} is running already")
        await self._prepare()
        async with AsyncExitStack() as stack:
            self._tasks = tasks = await stack.enter_async_context(anyio.create_task_group())
            self._critical_errors.tasks = tasks
            if isinstance(self.clock, FollowingClock):
                self._clock_scope = anyio.CancelScope()
                tasks.start_soon(self._follow_clock, self.clock, self._clock_scope)
            for service in self._services:
                tasks.start_soon(service.run)
            for service in self._services:
                await service.wait_until_listening()
            self._running_stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.stop()
        stack, self._running_stack = self._running_stack, None
        if stack is None:
            return None
        if error is not None and self._tasks is not None:
            # If the task group got the error of the application, it would raise it inside an ExceptionGroup.
            self._tasks.cancel_scope.cancel()
        return await stack.__aexit__(None, None, None)

    async def _follow_clock(self, clock: FollowingClock, scope: anyio.CancelScope) -> None:
        with scope:
            await clock.follow()

    def stop(self) -> None:
        """Stop receiving and polling. Leaving the context waits for messages that are being handled."""
        for service in self._services:
            service.stop()
        if self._clock_scope is not None:
            self._clock_scope.cancel()

    def problems(self) -> list[str]:
        """Return texts about problems of the running endpoint, for a health check. May be called in any thread.

        A problem is a part that ended without a stop, or that does not poll for minutes. An outage of a store or of
        queues is no problem: the endpoint waits for its end.
        """
        return [each for service in self._services for each in service.problems()]

    async def _prepare(self) -> None:
        expiring_types = self.outgoing.times_to_be_received.expiring_types()
        if expiring_types and not self.transport.capabilities.expires_messages:
            raise ConfigurationError(
                f"the queues of {type(self.transport).__name__} do not expire messages, but these message types have a "
                f"time to be received: {', '.join(expiring_types)}; use another transport, or give them none"
            )
        for service in self._services:
            await service.prepare(set_up=self._create_queues)
        if isinstance(self.clock, FollowingClock):  # before a message is claimed that is not due by this clock
            await self.clock.measure()

    # --- sending ------------------------------------------------------------------------------------------------

    async def send(
        self,
        message: object,
        *,
        transaction: NativeTransaction | None = None,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """Send a message at once, or with ``delay`` or ``deliver_at`` when it is due; return its id.

        This returns after the message is durable in its store or queue. ``bytes`` are sent unchanged, other messages as
        JSON under the name of their type.

        Args:
            message: see above.
            destination: queue. Default: the route of the message type, or this endpoint if it handles the type.
            delay: the message is not delivered before this long from now; zero is allowed, and ``timedelta.max`` means
                never.
            deliver_at: the message is not delivered before this instant; aware. With a past instant it is delivered
                promptly. With ``zone`` this is a local time there: a text such as ``2027-03-28 09:00``, or a naive
                date-time.
            expires_at: the message is not delivered after this instant; aware. It can be combined with a delay.
            time_to_be_received: the message is discarded if it is not received this long after sending; not with a
                delay. Default: the time of the message type. ``timedelta.max``: for ever, whatever the type has.
            use_dead_letter_queue: whether the message becomes a dead letter if it expires in its queue; not with a
                delay. Default: the setting of the transport.
            headers: headers of the application.
            message_id: an id of the application; unique among delayed messages. Default: a new id.
            zone: such as ``Europe/Paris``. The message follows the clocks of this zone, also when the rules of the zone
                change while it is pending. If clocks show a time twice, the first one counts. A skipped time counts
                from the start of the gap: 02:30 becomes 03:30 if clocks go from 2 to 3. Only with stores that replace
                (PostgreSQL, SQLite, MariaDB, memory).
            window: such as ``mon-fri 09:00-17:00 Europe/Paris``. If the window is closed at the due time, the message
                is due when it opens. To set a window for all messages to a queue, see :meth:`postdate.Client.limit`.
            spread: the message is due up to this much later, at random and within ``window``, so that many messages are
                not due at once.
            transaction: a connection of the application with an open transaction on the store's database. The message
                is stored in this transaction, so it is durable with the commit and undone with a roll-back. Without a
                delay it is due at once.

        Raises:
            DelayConflict: arguments that exclude each other.
            InvalidMessage, InvalidHeaders, InvalidTimestamp: an argument with a wrong value; see :class:`SendOptions`.
            ConfigurationError: ``transaction`` has no open transaction, or the store cannot take part in it.
            DelayedDeliveryNotConfigured: a delayed send without ``delayed_delivery`` or a timeout manager (row 15).
            UnknownMessageType: the message has neither a destination nor a route.
            QueueNotFound, MessageTooLarge, TransportUnavailable, StoreUnavailable: nothing was sent. A delayed message
                with headers that are too large for its queue is refused now, and not when it is due.
            NotSupported: a time to be received, or dead letters, with queues that have none; nothing was sent.
            DuplicateMessage: ``message_id`` was used for a delayed message before.
        """
        options = read_send_options("send", keywords)
        if transaction is not None:
            store, delayed = self.outgoing.prepare_for_transaction(message, options)
            await self.outgoing.ensure_zone(delayed)
            await store.enqueue(transaction, [delayed], self.clock.now())
            return delayed.message_id
        outgoing = self.outgoing.create(message, options)
        await self.outgoing.send([outgoing])
        return outgoing.message_id

    async def publish(
        self, message: object, headers: Mapping[str, str] | None = None, *, message_id: str | None = None
    ) -> str:
        """Send a message to all subscribers of its type, if there are any; return its id.

        An event cannot be delayed (row 7): delay the message whose handler publishes it.

        Raises:
            NotSupported: the queues cannot publish; nothing was sent.
            MessageTooLarge, TransportUnavailable: nothing was sent.
        """
        options = self.outgoing.publish_options(message, headers, message_id)
        outgoing = self.outgoing.create(message, options)
        await self.outgoing.send([outgoing])
        return outgoing.message_id


class BlockingEndpoint(forks.ForkAware):
    """An endpoint that runs in a separate event loop in another thread. Use it as a context manager.

    Handlers run in that thread, in one event loop; a handler that blocks delays the others.

    Args:
        endpoint: the endpoint, with its handlers registered and not started.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Detach from the event loop: its thread exists only in the parent. The child may start the endpoint itself."""
        forks.prevent_destruction((self._stack, self._portal))
        self._stack, self._portal = ExitStack(), None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._endpoint))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._portal = None
        return self._stack.__exit__(kind, error, trace)

    def send(
        self,
        message: object,
        *,
        transaction: NativeTransaction | None = None,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """Send a message and return its id; see :meth:`postdate.Endpoint.send`. May be called from any thread."""
        if self._portal is None:
            raise ConfigurationError("the endpoint is not running; use it as a context manager")
        if transaction is None:
            return self._portal.call(partial(self._endpoint.send, message, **keywords))
        outgoing = self._endpoint.outgoing  # in the thread of the caller, as the connection belongs to it
        store, delayed = outgoing.prepare_for_transaction(message, read_send_options("send", keywords))
        self._portal.call(outgoing.ensure_zone, delayed)
        store.enqueue_blocking(transaction, [delayed], self._endpoint.clock.now())
        return delayed.message_id
