"""An endpoint: a named party that sends, handles and delays messages; also for programs without an event loop."""

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
from postdate.endpoint.assemble import (
    Database,
    ReceivingService,
    adapters_of,
    check_allowance,
    check_names,
    create_delay_services,
    create_sagas,
    due_clock,
    transaction_mode_of,
)
from postdate.endpoint.handling import Handler, Handlers, MessageCompletions
from postdate.endpoint.message_types import Convention, MessageTypes, TimesToBeReceived, type_name
from postdate.endpoint.outbox import Outbox, check_outbox
from postdate.endpoint.outgoing import OutgoingMessages, publishing_transport
from postdate.endpoint.plain_handlers import PlainHandler, threaded_handler
from postdate.endpoint.sagas import Saga
from postdate.endpoint.send_options import SendKeywords, SendOptions
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
H = TypeVar("H", bound=Handler | PlainHandler)


class Endpoint(forks.ForkAware):
    """A named party that sends, handles and delays messages.

    Use it as an asynchronous context manager: it starts on entering, which returns when it has begun to receive from
    its queues and hears of what is stored, and stops on leaving, finishing what is in hand. It starts also when queues
    and stores are out of reach: after one refusal it goes on, and asks them again and again. Several messages are
    handled at once, each by all handlers of its type.

    Args:
        name: of the endpoint and of its input queue.
        database: for everything that the other arguments do not name: the queues; delayed messages, unless there is a
            ``timeout_manager``; sagas, when one is registered; the outbox, when it is ``True``. For example
            ``Sqlite(path)`` or ``Postgres(url)``. It is not closed with the endpoint.
        transport: of all queues.
        delayed_delivery: how delayed messages are kept; without it, a database and a timeout manager, delayed sends are
            refused.
        timeout_manager: the older way to delay messages, in this endpoint or in another one; beside
            ``delayed_delivery`` it only dispatches timeouts that it has stored already.
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
        metrics: receives what is counted and measured.
        outbox: handle each message once, with ``transaction_mode="receive_only"``; without it, a message that is
            delivered again is handled again. ``True``: with the outbox of the database.
        sagas: where the instances of sagas are kept; see :meth:`saga`.

    Raises:
        ConfigurationError: when built from settings that do not fit together.
    """

    _create_outgoing: Callable[..., OutgoingMessages] = OutgoingMessages
    _create_completions: Callable[..., MessageCompletions] = MessageCompletions
    """Replaced in :mod:`postdate.testing.endpoints`, by classes that remember messages and failures."""
    _longest_sleep = LONGEST_SLEEP
    """Of its pollers; longer in :mod:`postdate.testing.endpoints`, where every store and every set clock wakes them."""

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
        check_names(name, error_queue)
        if concurrency < 1:
            raise ConfigurationError(f"concurrency must be 1 or more, not {concurrency}")
        transport, delayed_delivery, outbox = adapters_of(
            name, concurrency, database, transport, delayed_delivery, timeout_manager, outbox
        )
        self.name, self.transport, self.send_only, self.host = name, transport, send_only, Host(name)
        self.delayed_delivery, self.audit, self._outbox = delayed_delivery, audit, outbox
        self._database, self._create_queues, self._events = database, create_queues, list[str]()
        self.clock = due_clock(clock, delayed_delivery)
        running_manager = check_timeout_manager(timeout_manager, name, delayed_delivery)
        self.mode = transaction_mode_of(transaction_mode, transport, delayed_delivery, running_manager, sagas)
        if outbox is not None:
            check_outbox(transaction_mode, self.mode, send_only=send_only)
        policy = recoverability or Recoverability()
        error_queue_name = policy.error_queue or error_queue or DEFAULT_ERROR_QUEUE
        policy, allowance = (
            replace(policy, error_queue=error_queue_name),
            check_allowance(time_to_be_received_allowance),
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
            self._handlers.sagas = create_sagas(sagas, self.outgoing, outbox)
        self._services = create_delay_services(
            context, delayed_delivery, running_manager, error_queue, error_queue_name
        )
        if completions is not None:
            self._services.append(
                ReceivingService(
                    context, concurrency, self.outgoing, completions, self._handlers, audit, outbox, self._events
                )
            )
        self._running_stack: AsyncExitStack | None = None
        self._tasks: TaskGroup | None = None
        self._clock_scope: anyio.CancelScope | None = None
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Run no more: only the parent does. This process may send, and start the endpoint for itself."""
        forks.prevent_destruction((self._running_stack, self._tasks, self._clock_scope))
        self._running_stack = self._tasks = self._clock_scope = self._critical_errors.tasks = None

    # --- configuration ------------------------------------------------------------------------------------------

    def handler(self, message_type: type[M], *, name: str | None = None) -> Callable[[H], H]:
        """Register a function ``handle(message, context)`` for messages of ``message_type``.

        A plain function runs in a thread, and is given a :class:`postdate.BlockingHandlerContext`.

        Args:
            message_type: a dataclass or ``msgspec.Struct``.
            name: of the type on the wire; default ``module.Class``.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send-only and handles nothing")

        def register(handle: H) -> H:
            if not callable(handle):
                raise ConfigurationError(f"handler {handle!r} must be a function (message, context)")
            self._add_type(message_type, name)
            callables: tuple[object, ...] = (handle, type(handle).__call__)  # a function, or an object that is called
            is_plain = not any(map(inspect.iscoroutinefunction, callables))
            async_handler = threaded_handler(cast("PlainHandler", handle)) if is_plain else cast("Handler", handle)
            self._handlers.add(message_type, async_handler)
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
            store: SagaStore | None = getattr(self._database, "sagas", None)
            if store is None:
                raise ConfigurationError(
                    f"endpoint {self.name!r} has no saga store; pass sagas=SqliteSagaStore(…) when you create it"
                )
            self._handlers.sagas = create_sagas(store, self.outgoing, self._outbox)
        definition = self._handlers.sagas.add(saga)
        for message_type in (*definition.messages, *definition.timeouts):
            self._add_type(message_type, None)

    def route(self, message_type: type[Any], destination: str, *, name: str | None = None) -> None:
        """Send messages of ``message_type`` to ``destination`` unless a send says otherwise.

        Raises:
            ConfigurationError: ``destination`` is no address.
        """
        check_address(destination, f"the route of {type_name(message_type)}")
        self._add_type(message_type, name)
        self.outgoing.routes[message_type] = destination

    def subscribe(self, message_type: type[Any], *, name: str | None = None) -> None:
        """Receive published messages of this type, from the next start on; the type needs a handler, too.

        A subscription outlives the endpoint: it belongs to the queue, and is made with it (``create_queues``).

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
        self.outgoing.times_to_be_received.span_of(message_type)  # raises where the type is registered
        self.outgoing.types.add(message_type, name)

    # --- life ---------------------------------------------------------------------------------------------------

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
            # Given to the task group, the program's own error would come back in an ExceptionGroup.
            self._tasks.cancel_scope.cancel()
        return await stack.__aexit__(None, None, None)

    async def _follow_clock(self, clock: FollowingClock, scope: anyio.CancelScope) -> None:
        with scope:
            await clock.follow()

    def stop(self) -> None:
        """Stop receiving and polling; leaving the context waits for messages in hand."""
        for service in self._services:
            service.stop()
        if self._clock_scope is not None:
            self._clock_scope.cancel()

    def problems(self) -> list[str]:
        """Return what is wrong with the running endpoint, in words, for a health check; may be called in any thread.

        A part that has ended though nobody stopped it, and one that has stood still for minutes. An outage of a store
        or of queues is none of these: the endpoint waits for its end.
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
        if isinstance(self.clock, FollowingClock):  # before anything is taken that may not be due by it
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

        Returns after the message is durable where it waits. ``bytes`` are sent as they are, anything else as JSON under
        the name of its type.

        Args:
            message: see above.
            destination: queue; by default where messages of this type are routed, or this endpoint where it handles it.
            delay: not to be delivered before this long from now; zero is allowed, and ``timedelta.max`` means never.
            deliver_at: not to be delivered before this instant; aware; a past one is delivered promptly. With ``zone``
                what the clocks show there: a text such as ``2027-03-28 09:00``, or a naive date-time.
            expires_at: not to be delivered after this instant; aware; may go together with a delay.
            time_to_be_received: discarded if not received this long after sending; not with a delay. By default as the
                message's type says; ``timedelta.max``: for ever, whatever that says.
            use_dead_letter_queue: whether it is kept among the dead letters when it expires in its queue; by default as
                the transport is set; not with a delay.
            headers: of your own.
            message_id: of your own; unique among delayed messages. By default a new one.
            zone: such as ``Europe/Paris``: the message follows its clocks, also when its rules change while it waits. A
                time that they show twice is the first, one that they leave out is as long after the gap began as it
                says. With stores that replace (PostgreSQL, SQLite, MariaDB, memory).
            window: such as ``mon-fri 09:00-17:00 Europe/Paris``: due when that opens, if it is not open at the due
                time. For all messages to a queue: :meth:`postdate.Client.limit`.
            spread: due up to so much later, at random, so that many do not fall due at once; within ``window``.
            transaction: a connection of your own with a transaction open on the store's database: the message is stored
                in it, is durable with its commit, and never was with its roll-back. Without a delay it is due at once.

        Raises:
            DelayConflict: arguments that exclude each other.
            InvalidMessage, InvalidHeaders, InvalidTimestamp: an argument with a wrong value; see :class:`SendOptions`.
            ConfigurationError: ``transaction`` with a store that cannot take part in it, or outside of any.
            DelayedDeliveryNotConfigured: a delayed send without ``delayed_delivery`` or a timeout manager (row 15).
            UnknownMessageType: no destination is given and none is routed.
            QueueNotFound, MessageTooLarge, TransportUnavailable, StoreUnavailable: nothing was sent. A delayed message
                whose headers no queue would take when it is due is refused now.
            NotSupported: a time to be received, or dead letters, with queues that have none; nothing was sent.
            DuplicateMessage: ``message_id`` was used for a delayed message before.
        """
        options = SendOptions(**keywords)
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
        """Send a message to all subscribers of its type, of which there may be none; return its id.

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
    """Runs an endpoint in an event loop of its own, in another thread. Use it as a context manager.

    Handlers run in that thread, in one event loop; a handler that blocks delays the others.

    Args:
        endpoint: configured, with its handlers registered, not started.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Run no more: the thread of the event loop is the parent's. This process may start it for itself."""
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
        outgoing = self._endpoint.outgoing  # in the caller's thread, which the connection belongs to
        store, delayed = outgoing.prepare_for_transaction(message, SendOptions(**keywords))
        self._portal.call(outgoing.ensure_zone, delayed)
        store.enqueue_blocking(transaction, [delayed], self._endpoint.clock.now())
        return delayed.message_id
