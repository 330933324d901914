"""Assembles an endpoint: gets its parts, and refuses parts that cannot work together. Source: ADR 21."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Final, Literal, Protocol, cast, runtime_checkable

from typing_extensions import override

from postdate.clock import Clock, SystemClock, check_clock
from postdate.core.health.deadlines import Deadlines
from postdate.core.receive.outcomes import report_completions
from postdate.core.receive.pump import MessagePump
from postdate.core.simple_store import enlisting_store, sharing_store
from postdate.core.upkeep.store_clock import clock_of_store
from postdate.endpoint import settings as endpoint_settings
from postdate.endpoint.completions import MessageCompletions
from postdate.endpoint.delayed_delivery import DelayedDeliveryService, check_transport_mode, timeouts_queue
from postdate.endpoint.handling import Handlers, HandlerTimes, Handling
from postdate.endpoint.outbox import Outbox, OutboxCleanUp, OutboxHandling
from postdate.endpoint.outgoing import OutgoingMessages, publishing_transport
from postdate.endpoint.saga_handling import Sagas
from postdate.endpoint.service import EndpointContext, Service
from postdate.endpoint.timeout_manager import TimeoutManagerService
from postdate.errors import ConfigurationError, PostdateError, UnsupportedTransactionMode
from postdate.messages import DESTINATION_LIMIT
from postdate.ports import Completion, DelayedMessageStore, OutboxStore, SagaStore, TransactionMode, Transport
from postdate.runtime.reporting import NO_METRICS, Metrics
from postdate.runtime.resource import resource_of

log = logging.getLogger("postdate.endpoint")

_LONGEST_NAME: Final = DESTINATION_LIMIT - len(timeouts_queue(""))
"""The longest name of an endpoint. The name of its timeouts queue, which is longer, must be an address, too."""

_SUCH_AS: Final = "such as Sqlite(path) or Postgres(url)"


@runtime_checkable
class Database(Protocol):
    """A database as one object. The code that created it must close it.

    Its attributes are the adapters that it supports: ``queues``, a :class:`~postdate.Transport`; ``store``, a
    :class:`~postdate.DelayedMessageStore`; ``sagas``, a :class:`~postdate.SagaStore`; ``outbox``, an
    :class:`~postdate.ports.OutboxStore`.
    """

    def register_endpoint(self, endpoint: str, concurrency: int, *, uses_store: bool) -> None:
        """Register an endpoint that uses this database.

        Args:
            endpoint: name of the endpoint.
            concurrency: number of messages that the endpoint handles at once, 1 or more.
            uses_store: whether the delayed messages of the endpoint wait in ``store``.

        Raises:
            ConfigurationError: the database cannot serve this endpoint beside the registered ones.
        """


def check_names(endpoint: str, error_queue: str | None) -> None:
    endpoint_settings.check_address(endpoint, "the name of an endpoint", _LONGEST_NAME)
    if error_queue:
        endpoint_settings.check_address(error_queue, "the name of the error queue")


def adapters_of(  # noqa: PLR0913 - all that a database may supply, and the endpoint
    endpoint: str,
    concurrency: int,
    database: object,
    transport: Transport | None,
    delayed_delivery: endpoint_settings.DelayedDelivery | None,
    timeout_manager: endpoint_settings.TimeoutManager | endpoint_settings.ExternalTimeoutManager | None,
    outbox: Outbox | bool | None,
) -> tuple[Transport, endpoint_settings.DelayedDelivery | None, Outbox | None]:
    """Return the transport, delayed delivery and outbox of an endpoint: the arguments, or else parts of its database.

    The database delays messages unless another argument does so. Its outbox is used if ``outbox`` is ``True``.
    """
    if database is not None and not isinstance(database, Database):
        raise ConfigurationError(
            f"the second argument of endpoint {endpoint!r} is its database, {_SUCH_AS}, not "
            f"{type(database).__name__}: give queues with transport=, and a store with "
            f"delayed_delivery=DelayedDelivery(store)"
        )
    if database is None and transport is None:
        raise ConfigurationError(
            f"endpoint {endpoint!r} has no queues: give it a database, {_SUCH_AS}, or queues with transport="
        )
    if database is None and outbox is True:
        raise ConfigurationError(
            f"outbox=True is an outbox in the database of endpoint {endpoint!r}, which has none: give it one, "
            f"{_SUCH_AS}, or say where the outbox is with outbox=Outbox(store)"
        )
    uses_store = database is not None and delayed_delivery is None and timeout_manager is None
    if database is not None:
        database.register_endpoint(endpoint, concurrency, uses_store=uses_store)
    if uses_store:
        store = _adapter_of(database, "store", "delayed_delivery=…")
        delayed_delivery = endpoint_settings.DelayedDelivery(cast("DelayedMessageStore", store))
    if transport is None:
        transport = cast("Transport", _adapter_of(database, "queues", "transport=…"))
    if outbox is True:
        outbox = Outbox(cast("OutboxStore", _adapter_of(database, "outbox", "outbox=Outbox(…)")))
    return transport, delayed_delivery, outbox or None


def _adapter_of(database: object, name: Literal["store", "queues", "outbox"], alternative: str) -> object:
    adapter = getattr(database, name, None)
    if adapter is None:
        raise ConfigurationError(
            f"{type(database).__name__} has no {name} for an endpoint: say with {alternative} what to use instead"
        )
    return adapter


def due_clock(clock: Clock | None, delayed_delivery: endpoint_settings.DelayedDelivery | None) -> Clock:
    """Return the clock that decides what is due: the clock of the store, if it has one and the settings ask for it."""
    own_clock = check_clock(clock or SystemClock())
    if delayed_delivery is None:
        return own_clock
    return (
        clock_of_store(own_clock, delayed_delivery.store, is_authoritative=delayed_delivery.use_store_clock)
        or own_clock
    )


def transaction_mode_of(
    chosen_mode: TransactionMode | endpoint_settings.ModeName | None,
    transport: Transport,
    delayed_delivery: endpoint_settings.DelayedDelivery | None,
    timeout_manager: endpoint_settings.TimeoutManager | None,
    sagas: SagaStore | None,
) -> TransactionMode:
    """Return the chosen transaction mode, or the strongest mode that transport and stores support together."""
    mode, database = endpoint_settings.mode_of(chosen_mode), transport.capabilities.database
    if mode is None:
        modes = transport.capabilities.transaction_modes
        if delayed_delivery is not None:
            modes &= delayed_delivery.claiming_store.capabilities.transaction_modes
        is_separate = (
            (delayed_delivery is not None and enlisting_store(delayed_delivery.claiming_store, transport) is None)
            or (
                timeout_manager is not None
                and sharing_store(timeout_manager, timeout_manager.persister.database, database) is None
            )
            or (sagas is not None and sharing_store(sagas, sagas.capabilities.database, database) is None)
        )
        if is_separate:
            modes -= {TransactionMode.TRANSACTION_SCOPE}
        mode = max(modes, key=list(TransactionMode).index, default=TransactionMode.NONE)
    check_transport_mode(transport, mode)
    return mode


def check_allowance(allowance: timedelta) -> timedelta:
    if not isinstance(allowance, timedelta) or allowance < timedelta(0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"time_to_be_received_allowance must not be negative, and a timedelta: not {allowance!r}"
        )
    return allowance


def _check_saga_mode(store: SagaStore, transport: Transport, mode: TransactionMode) -> None:
    """Raise an error for a transaction mode whose promise sagas cannot keep with this store and transport."""
    if mode is TransactionMode.NONE:
        raise UnsupportedTransactionMode(
            "sagas are not possible in transaction mode 'none', which sends messages at once: when two messages "
            "change one instance, one of them is handled again, and the messages that it has sent cannot be undone; "
            "use 'receive_only'"
        )
    shared_store = sharing_store(store, store.capabilities.database, transport.capabilities.database)
    endpoint_settings.check_scope(mode, store, transport, is_one=shared_store is not None)


def _check_saga_outbox(store: SagaStore, outbox: OutboxStore) -> None:
    """Raise an error for sagas whose state is not part of the commit of the outbox.

    A duplicate would change such a state a second time.
    """
    if sharing_store(store, store.capabilities.database, outbox.database) is None:
        raise ConfigurationError(
            f"an outbox promises that each message is handled once, for which sagas must be kept in its database: "
            f"{type(store).__name__} cannot write in the transactions of {type(outbox).__name__}; use a store of the "
            f"same kind, on the same file, or with the same address and schema"
        )


def create_sagas(store: SagaStore, outgoing: OutgoingMessages, outbox: Outbox | None) -> Sagas:
    """Return the sagas. Their state is written in transactions of the outbox or the queues, if in the same database."""
    _check_saga_mode(store, outgoing.transport, outgoing.mode)
    capabilities = outgoing.transport.capabilities
    if outbox is not None:
        _check_saga_outbox(store, outbox.store)
        database = outbox.store.database
    elif outgoing.mode is TransactionMode.RECEIVE_ONLY and not capabilities.time_to_be_received_in_transactions:
        database = None  # some messages could not be sent in the transaction that writes the state
    else:
        database = capabilities.database
    return Sagas(store, database, outgoing)


def create_delay_services(
    context: EndpointContext,
    delayed_delivery: endpoint_settings.DelayedDelivery | None,
    timeout_manager: endpoint_settings.TimeoutManager | None,
    error_queue: str | None,
    errors: str,
) -> list[Service]:
    """Return the services for delayed messages; ``error_queue`` is the argument, ``errors`` the queue in force."""
    services = list[Service]()
    wrap_step = None
    if timeout_manager is not None:
        manager = TimeoutManagerService(timeout_manager, context, errors, delayed_delivery)
        services.append(manager)
        wrap_step = manager.wrap_step if manager.shares_queue else None
    if delayed_delivery is not None:
        services.append(DelayedDeliveryService(delayed_delivery, context, error_queue, wrap_step))
    return services


class ReceivingService(Service):
    """The service that handles messages of the endpoint's queue. At its start it subscribes the queue to events."""

    def __init__(  # noqa: PLR0913 - the parts
        self,
        context: EndpointContext,
        concurrency: int,
        outgoing: OutgoingMessages,
        completions: MessageCompletions,
        handlers: Handlers,
        audit: endpoint_settings.Audit | None,
        outbox: Outbox | None,
        events: Sequence[str],
    ) -> None:
        super().__init__(context)
        self._concurrency, self._outgoing, self._completions, self._handlers = (
            concurrency,
            outgoing,
            completions,
            handlers,
        )
        self._audit, self._outbox, self._events = audit, outbox, events

    @override
    async def prepare(self, *, set_up: bool) -> None:
        context, outbox = self._context, self._outbox
        clock, transport, queue = context.clock, context.transport, context.endpoint
        if set_up:
            if self._handlers.sagas is not None:
                await self._handlers.sagas.store.setup()
            audit = [] if self._audit is None else [self._audit.queue]
            await transport.create_queues([queue, self._completions.error_queue, *audit])
            if self._events:
                await publishing_transport(transport).subscribe(queue, self._events)
        breaker = context.create_breaker("Receive", "Failed to receive messages", transport)
        handling = Handling(self._outgoing, self._completions, self._handlers, self._audit, transport.receiver(queue))
        handle, preload = handling.handle, self._handlers.preload
        if outbox is not None:
            if set_up:
                await outbox.store.setup()
            await _check_outbox(outbox.store, queue, clock)
            outbox_handling = OutboxHandling(outbox, handling)
            handle, preload = outbox_handling.handle, outbox_handling.preload
        # With concurrency 1, each message must find the state of its saga as the message before it left it.
        is_in_order = self._concurrency == 1 and self._handlers.sagas is not None
        prefetches = transport.capabilities.prefetches and not is_in_order
        report = None
        if context.metrics is not NO_METRICS:
            self._handlers.times = times = HandlerTimes()
            report = partial(_report_settled, context.metrics, times)
        pump = MessagePump(
            handling.receiver,
            handle,
            self._concurrency,
            clock,
            breaker,
            queue,
            prefetches=prefetches,
            preload=preload,
            report=report,
            resource=resource_of(transport),
        )
        self._parts = [pump] if outbox is None else [pump, OutboxCleanUp(outbox, queue, clock)]
        self._breakers = [breaker]


async def _check_outbox(store: OutboxStore, queue: str, clock: Clock) -> None:
    """Raise if the outbox cannot be used, as one without tables. An outage is no error here: it may end."""
    try:
        await Deadlines.of_store(store, clock).call_in_task(lambda: store.find(queue, ""))
    except PostdateError as error:
        if not (error.outage and error.transient):
            raise
        log.debug("whether the tables of the outbox exist cannot be seen: %s", error)


def _report_settled(metrics: Metrics, times: HandlerTimes, completions: Sequence[Completion]) -> None:
    """Report messages that were settled together, and the durations of their handlers."""
    report_completions(metrics, completions)
    times.report(metrics)
