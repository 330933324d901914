"""Settings to objects: a store and queues that are open, and the endpoint that ``postdate run`` is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

from postdate.clock import Clock, SystemClock
from postdate.config import SERVERS, Address, Settings
from postdate.endpoint.delayed_delivery import timeouts_dispatcher_queue, timeouts_queue
from postdate.endpoint.endpoint import Endpoint, log_critical_error
from postdate.endpoint.settings import DelayedDelivery, ErrorsReturnTo
from postdate.errors import ConfigurationError, PostdateError, StoreNotSetUp
from postdate.ports import (
    ClaimingStore,
    DelayExchange,
    DescribesServer,
    ForeignIntake,
    QueueObserver,
    StoreObserver,
    TransactionMode,
    Transport,
)
from postdate.wiring.adapters import (
    STORES,
    TRANSPORTS,
    Kind,
    check_store,
    check_transport,
    file_of,
    open_store,
    open_transport,
)
from postdate.wiring.causes import placed
from postdate.wiring.observers import queue_observer, store_observer


@dataclass(frozen=True, slots=True)
class Plant:
    """Store and queues as the settings say, open, with a look at each.

    Args:
        settings: that made it.
        store: where messages wait.
        transport: where the queues are.
        store_view: looks at what waits and at who uses the store; ``None`` where the store cannot be looked into.
        queue_view: looks at the queues; ``None`` where they cannot be looked into.
    """

    settings: Settings
    store: ClaimingStore
    transport: Transport
    store_view: StoreObserver | None
    queue_view: QueueObserver | None


@asynccontextmanager
async def opened(settings: Settings, *, create: bool = False, initialize: bool = True) -> AsyncGenerator[Plant]:
    """Open the store and the transport for as long as the context lasts.

    Args:
        settings: which.
        create: create missing files and their tables; otherwise they must be there. Servers' tables are created by
            setting up alone.
        initialize: prepare the store for the endpoint of the settings. An endpoint that is started does that itself.

    Raises:
        ConfigurationError: an address of no adapter, or of one that other processes cannot see, or a setting that the
            adapter does not have, or a database that its server does not know.
        StoreNotSetUp: a file is missing and ``create`` is false; none was made.
        StoreUnavailable: a server does not answer.
    """
    check_addresses(settings)
    for_store, for_transport = store_settings(settings, create=create), transport_settings(settings, create=create)
    if not create:
        _check_there("store.address", settings.store.address, settings)
        _check_there("transport.address", settings.transport.address, settings)
    async with AsyncExitStack() as stack:
        stack.enter_context(_placing_errors(settings))
        store = open_store(settings.store.address, **for_store)
        stack.push_async_callback(store.close)
        transport = open_transport(settings.transport.address, **for_transport)
        stack.push_async_callback(transport.close)
        if create:
            await _reach_servers(settings, store, transport)
        if initialize:
            await store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
        yield Plant(settings, store, transport, store_observer(store), queue_observer(transport))


@contextmanager
def _placing_errors(settings: Settings) -> Generator[None]:
    """Say of errors of servers which setting leads there, and what to do next."""
    try:
        yield
    except PostdateError as error:
        found = placed(error, settings)
        if found is error:
            raise
        raise found from error


async def _reach_servers(settings: Settings, store: ClaimingStore, transport: Transport) -> None:
    """Before a file is made for the one: a server of the other that cannot be used must leave nothing behind."""
    files = [file_of(address) is not None for address in (settings.store.address, settings.transport.address)]
    if any(files) and not all(files):
        server = transport if files[0] else store
        if server is store:  # which asks for the name of its table
            await store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
        if isinstance(server, DescribesServer):
            await server.server_facts()


def store_settings(settings: Settings, *, create: bool = True) -> dict[str, Any]:
    """Return what the store of the settings is opened with.

    Raises:
        ConfigurationError: something was set that this store does not have.
    """
    chosen = settings.store
    given = {
        "schema": chosen.schema,
        "table": chosen.table,
        "synchronous": chosen.synchronous,
        "recording": chosen.recording,
        "largest_message_bytes": chosen.largest_message_bytes,
        "leases": chosen.leases,
        "peek_interval": chosen.peek_interval,
        "longest_wait_when_idle": chosen.longest_wait_when_idle,
        "page_size": chosen.page_size,
        "create": create,
    }
    return _taken("store", check_store(chosen.address), given, settings)


def transport_settings(settings: Settings, *, create: bool = True) -> dict[str, Any]:
    """Return what the transport of the settings is opened with; see :func:`store_settings`."""
    chosen = settings.transport
    given = {
        "schema": chosen.schema,
        "queue_type": chosen.queue_type,
        "synchronous": settings.store.synchronous,
        "recording": settings.store.recording,
        "largest_message_bytes": chosen.largest_message_bytes,
        "sanitizer": chosen.sanitizer,
        "concurrent_sends": chosen.concurrent_sends,
        "hold_for": chosen.hold_for,
        "peek_interval": chosen.peek_interval,
        "longest_idle_wait": chosen.longest_idle_wait,
        "create": create,
    }
    return _taken("transport", check_transport(chosen.address), given, settings)


def _taken(section: str, kind: Kind, given: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    for name in given:
        key = f"{section}.{name}"
        if name not in kind.settings and settings.origins.get(key, "default") != "default":
            origin = settings.origins[key]
            takes = ", ".join(f"{section}.{each}" for each in given if each in kind.settings and each != "create")
            raise ConfigurationError(f"{key} ({origin}) is not for {kind.product}, which takes {takes}; remove it")
    return {name: value for name, value in given.items() if name in kind.settings and value is not None}


# --- what cannot work ----------------------------------------------------------------------------------------------


_FILES: Final = {"store.address": "sqlite", "transport.address": "local"}


def check_addresses(settings: Settings) -> None:
    """Refuse what is no adapter, what no other process can see, and queues where there can be none.

    Raises:
        ConfigurationError: says which setting, where it stands, and what to write instead.
    """
    store = _checked("store.address", settings.store.address, settings, check_store)
    if store.scheme in SERVERS and "transport.address" not in settings.origins:
        raise ConfigurationError(
            f"store.address is {settings.store.address!r}, and {store.product} holds no queues here: say where they "
            f"are with transport.address, such as {TRANSPORTS['amqp'].example}"
        )
    transport = _checked("transport.address", settings.transport.address, settings, check_transport)
    if transport.scheme in SERVERS and "store.address" not in settings.origins:
        raise ConfigurationError(
            f"transport.address is {settings.transport.address!r}, and {transport.product} keeps no delayed messages: "
            f"say where they wait with store.address, such as {STORES['postgresql'].example} or "
            f"{STORES['sqlite'].example}"
        )


def _checked(key: str, address: Address, settings: Settings, check: Callable[[str], Kind]) -> Kind:
    origin = settings.origins.get(key, "default")
    try:
        kind = check(address)
    except ConfigurationError as error:
        raise ConfigurationError(f"{key} is {address!r} ({origin}): {error}") from error
    if kind.scheme == "memory":
        raise ConfigurationError(
            f"{key} is {address!r} ({origin}), which lives in one process only; the command line needs a file or a "
            f"server, such as {_FILES[key]}:///postdate.db"
        )
    return kind


def _check_there(key: str, address: Address, settings: Settings) -> None:
    """Refuse a missing file that must not be made by the way."""
    path = file_of(address)
    if path is not None and not path.expanduser().exists():
        origin, option = settings.origins.get(key, "default"), f"--{key.partition('.')[0]}"
        raise StoreNotSetUp(
            f"there is no file {path} ({key}, {origin}); create it with `postdate setup`, or name another with {option}"
        )


# --- the endpoint --------------------------------------------------------------------------------------------------


def own_queues(settings: Settings) -> list[str]:
    """Return the queues that the endpoint of the settings needs, and those that the settings name besides.

    It handles nothing, so with a poison queue nothing of it goes to the error queue.
    """
    endpoint, delays = settings.endpoint, settings.delayed_delivery
    own = [timeouts_queue(endpoint.name), delays.poison_queue or endpoint.error_queue]
    if delays.drain_timeout_manager:
        own.append(timeouts_dispatcher_queue(endpoint.name))
    return list(dict.fromkeys([*own, *settings.queues.create]))


def delay_exchange(settings: Settings, transport: Transport) -> DelayExchange | None:
    """Return the exchange through which programs without Postdate delay messages, or ``None``: there is none."""
    chosen = settings.intake
    if not chosen.exchange or not isinstance(transport, ForeignIntake):
        return None
    return DelayExchange(chosen.exchange, chosen.due_exchange_type)


def delayed_delivery(
    settings: Settings, store: ClaimingStore, exchange: DelayExchange | None = None
) -> DelayedDelivery:
    """Return the settings of delayed delivery as an endpoint takes them."""
    chosen = settings.delayed_delivery
    return DelayedDelivery(
        store,
        number_of_retries=chosen.number_of_retries,
        time_to_trigger_store_circuit_breaker=chosen.time_to_trigger_store_circuit_breaker,
        time_to_trigger_fetch_circuit_breaker=chosen.time_to_trigger_fetch_circuit_breaker,
        time_to_trigger_dispatch_circuit_breaker=chosen.time_to_trigger_dispatch_circuit_breaker,
        maximum_recovery_failures_per_second=chosen.maximum_recovery_failures_per_second,
        delay_exchange=exchange,
        poison_queue=chosen.poison_queue,
        errors_return_to=cast("ErrorsReturnTo", chosen.errors_return_to),
        drain_timeout_manager=chosen.drain_timeout_manager,
    )


def build_endpoint(
    plant: Plant,
    *,
    clock: Clock | None = None,
    create_queues: bool = True,
    critical_error: Callable[[str, BaseException], None] = log_critical_error,
) -> Endpoint:
    """Return the send-only endpoint that ``postdate run`` is: it delivers delayed messages and handles none."""
    settings = plant.settings
    return Endpoint(
        settings.endpoint.name,
        transport=plant.transport,
        delayed_delivery=delayed_delivery(settings, plant.store, delay_exchange(settings, plant.transport)),
        transaction_mode=settings.endpoint.transaction_mode,
        error_queue=settings.endpoint.error_queue,
        send_only=True,
        concurrency=settings.endpoint.concurrency,
        create_queues=create_queues,
        clock=clock or SystemClock(),
        critical_error=critical_error,
    )
