"""From settings to an open store and queues, and to the endpoint of ``postdate run``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from postdate.backends.registry import place_of
from postdate.clock import Clock, SystemClock
from postdate.config import Address, Settings
from postdate.endpoint.delayed_delivery import timeouts_dispatcher_queue, timeouts_queue
from postdate.endpoint.endpoint import Endpoint, log_critical_error
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import ConfigurationError, StoreNotSetUp
from postdate.ports import (
    AdministrableStore,
    ClaimingStore,
    DelayExchange,
    ForeignIntake,
    Observer,
    TransactionMode,
    Transport,
    TransportCapabilities,
)
from postdate.ports.backends import Place
from postdate.ports.timeouts import TimeoutPersister
from postdate.wiring.adapters import (
    AdapterRole,
    check_store,
    check_transport,
    chosen_for,
    example_of,
    file_of,
    open_store,
    open_transport,
)
from postdate.wiring.causes import naming, placing_errors
from postdate.wiring.closing import close
from postdate.wiring.databases import Databases
from postdate.wiring.timeouts import (
    check_timeout_managers,
    dispatcher_queues,
    managed_endpoints,
    open_timeouts,
    timeout_manager,
    timeout_queues,
)


@dataclass(frozen=True, slots=True)
class OpenDeployment:
    """Store and queues of the settings, open, with an observer for each.

    Args:
        settings: that made it.
        store: of delayed messages; ``None`` without a delayed delivery.
        transport: of the queues.
        store_view: observes waiting messages and the store's processes; ``None`` for a store without an observer.
        queue_view: observes the queues; ``None`` for queues without an observer.
        timeouts: by endpoint, for the timeout managers that run here.
        databases: that these share, and that sagas and an outbox beside them may share, too.
    """

    settings: Settings
    store: ClaimingStore | None
    transport: Transport
    store_view: Observer | None
    queue_view: Observer | None
    timeouts: Mapping[str, TimeoutPersister] = field(default_factory=dict[str, TimeoutPersister])
    databases: Databases = field(default_factory=Databases)

    @property
    def kept(self) -> ClaimingStore:
        """The store, for callers that need one; without one it raises `ConfigurationError`."""
        if self.store is None:
            origin = self.settings.origins.get("delayed_delivery.enabled", "default")
            raise ConfigurationError(
                f"there is no store of delayed messages here: delayed_delivery.enabled is false ({origin}), and "
                f"timeouts are seen with the tools of their database only"
            )
        return self.store


@asynccontextmanager
async def opened(
    settings: Settings, *, create: bool = False, initialize: bool = True
) -> AsyncGenerator[OpenDeployment]:
    """Open the store and the transport for as long as the context lasts.

    Args:
        settings: of the deployment.
        create: create missing files and their tables; otherwise they must exist. Servers' tables are created by setup
            alone.
        initialize: prepare the store for the endpoint of the settings. An endpoint that is started does that itself.

    Raises:
        ConfigurationError: an address of no adapter, or of one that other processes cannot see, or a setting that the
            adapter does not have, or a database that its server does not know.
        StoreNotSetUp: a file is missing and ``create`` is false; none was made.
        StoreUnavailable: a server does not answer.
    """
    check_addresses(settings)
    stores = settings.delayed_delivery.enabled
    for_store = store_settings(settings, create=create) if stores else {}
    for_transport = transport_settings(settings, create=create)
    if not create:
        for key, address in _files(settings):
            _check_there(key, address, settings)
    async with AsyncExitStack() as stack:
        stack.enter_context(placing_errors(settings))
        store, databases = None, Databases()
        if stores:
            with naming("store.address", settings.store.address, settings):
                store = open_store(settings.store.address, databases, **for_store)
            stack.push_async_callback(close, "the store", store.close)
        with naming("transport.address", settings.transport.address, settings):
            transport = open_transport(settings.transport.address, databases, **for_transport)
        stack.push_async_callback(close, "the transport", transport.close)
        timeouts = open_timeouts(settings, databases)
        for each in timeouts.values():
            stack.push_async_callback(close, "the storage of timeouts", each.close)
        if create and store is not None:
            await _reach_servers(settings, store, transport)
        if initialize and store is not None:
            await store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
        view = None if store is None else store_observer(store)
        yield OpenDeployment(settings, store, transport, view, transport.observer(), timeouts, databases)


def store_observer(store: ClaimingStore) -> Observer | None:
    return store.observer() if isinstance(store, AdministrableStore) else None


def _files(settings: Settings) -> list[tuple[str, Address]]:
    """Return the addresses that may be files, with their keys."""
    found = [("transport.address", settings.transport.address)]
    if settings.delayed_delivery.enabled:
        found.insert(0, ("store.address", settings.store.address))
    if settings.timeout_manager.address is not None:
        found.append(("timeout_manager.address", settings.timeout_manager.address))
    return found


async def _reach_servers(settings: Settings, store: ClaimingStore, transport: Transport) -> None:
    """Reach the server before the other one's file is made: an unusable server must leave nothing behind."""
    files = [file_of(address) is not None for address in (settings.store.address, settings.transport.address)]
    if any(files) and not all(files):
        server = transport if files[0] else store
        if server is store:  # it needs the name of its table
            await store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
        if isinstance(server, AdministrableStore | Transport):
            await server.server_facts()


def store_settings(settings: Settings, *, create: bool = True) -> dict[str, Any]:
    """Return the store's arguments."""
    return chosen_for("store", check_store(settings.store.address), settings, create=create)


def transport_settings(settings: Settings, *, create: bool = True) -> dict[str, Any]:
    return chosen_for("transport", check_transport(settings.transport.address), settings, create=create)


# --- what cannot work ----------------------------------------------------------------------------------------------


_FILES: Final = {"store.address": "sqlite", "transport.address": "local"}


def check_addresses(settings: Settings) -> None:
    """Refuse unknown adapters, adapters that no other process can see, and queues in a backend that has none."""
    check_timeout_managers(settings)
    delays = settings.delayed_delivery.enabled
    if delays:
        store = _checked("store.address", settings.store.address, settings, check_store)
        if store.is_server and "transport.address" not in settings.origins:
            raise ConfigurationError(
                f"store.address is {settings.store.address!r}, and {store.product} holds no queues here: say where "
                f"they are with transport.address, such as {example_of('transport', 'amqp')}"
            )
    timeouts = settings.timeout_manager.address
    is_server = timeouts is not None and place_of(timeouts.scheme) is Place.SERVER
    if is_server and "transport.address" not in settings.origins:
        origin = settings.origins.get("timeout_manager.address", "default")
        raise ConfigurationError(
            f"timeout_manager.address is {timeouts!r} ({origin}), which holds no "
            f"queues here: say where they are with transport.address, such as {example_of('transport', 'amqp')}"
        )
    transport = _checked("transport.address", settings.transport.address, settings, check_transport)
    if delays and transport.is_server and "store.address" not in settings.origins:
        raise ConfigurationError(
            f"transport.address is {settings.transport.address!r}, and {transport.product} keeps no delayed messages: "
            f"say where they wait with store.address, such as {example_of('store', 'postgresql')} or "
            f"{example_of('store', 'sqlite')}; or, for a timeout manager alone, set delayed_delivery.enabled = false"
        )


def _checked(key: str, address: Address, settings: Settings, check: Callable[[str], AdapterRole]) -> AdapterRole:
    with naming(key, address, settings):
        kind = check(address)
    if kind.backend.place is Place.MEMORY:
        raise ConfigurationError(
            f"{key} is {address!r} ({settings.origins.get(key, 'default')}), which lives in one process only; the "
            f"command line needs a file or a server, such as {_FILES[key]}:///postdate.db"
        )
    return kind


def _check_there(key: str, address: Address, settings: Settings) -> None:
    """Raise when a file is missing that only setup may create."""
    path = file_of(address)
    if path is not None and not path.expanduser().exists():
        origin = settings.origins.get(key, "default")
        other = f"--{key.partition('.')[0]}" if key in _FILES else key
        raise StoreNotSetUp(
            f"there is no file {path} ({key}, {origin}); create it with `postdate setup`, or name another with {other}"
        )


# --- the endpoint --------------------------------------------------------------------------------------------------


def own_queues(settings: Settings, can: TransportCapabilities) -> list[str]:
    """Return the queues that the service needs, and those that the settings name besides.

    It handles no messages, so with a poison queue no message of a delayed delivery goes to the error queue.
    """
    delays, errors = settings.delayed_delivery, settings.endpoint.error_queue
    receiving = intake_queues(settings, can)
    own = [*receiving[:1], delays.poison_queue or errors, *receiving[1:]] if delays.enabled else receiving
    if managed_endpoints(settings):
        own += [*dispatcher_queues(settings, can), errors]
    return list(dict.fromkeys([*own, *settings.queues.create]))


def intake_queues(settings: Settings, can: TransportCapabilities) -> list[str]:
    """Return the queues from which the service takes messages to delay."""
    own: list[str] = []
    if settings.delayed_delivery.enabled:
        own.append(timeouts_queue(settings.endpoint.name))
        if settings.delayed_delivery.drain_timeout_manager:
            own.append(timeouts_dispatcher_queue(settings.endpoint.name))
    return [*own, *timeout_queues(settings, can)]


def delay_exchange(settings: Settings, transport: Transport) -> DelayExchange | None:
    """Return the exchange through which other programs delay messages; ``None``: there is none."""
    chosen = settings.intake
    if not settings.delayed_delivery.enabled or not chosen.exchange or not isinstance(transport, ForeignIntake):
        return None
    return DelayExchange(chosen.exchange, chosen.due_exchange_type)


def delayed_delivery(
    settings: Settings, store: ClaimingStore, exchange: DelayExchange | None = None
) -> DelayedDelivery:
    return DelayedDelivery(store, delay_exchange=exchange, **settings.delayed_delivery.of(DelayedDelivery))


def build_endpoint(
    deployment: OpenDeployment,
    *,
    clock: Clock | None = None,
    create_queues: bool = True,
    critical_error: Callable[[str, BaseException], None] = log_critical_error,
) -> Endpoint:
    """Return the send-only endpoint of the settings: it delivers delayed messages and handles none."""
    settings = deployment.settings
    delays = None
    if deployment.store is not None:
        delays = delayed_delivery(settings, deployment.store, delay_exchange(settings, deployment.transport))
    return _endpoint(deployment, settings.endpoint.name, delays, clock, critical_error, create_queues=create_queues)


def build_endpoints(
    deployment: OpenDeployment,
    *,
    clock: Clock,
    create_queues: bool,
    critical_error: Callable[[str, BaseException], None],
) -> list[Endpoint]:
    """Return the endpoints of ``postdate run``: that of the settings, and those whose timeouts are managed here."""
    settings = deployment.settings
    managed = managed_endpoints(settings)
    if deployment.store is None and not managed:
        origin = settings.origins.get("delayed_delivery.enabled", "default")
        raise ConfigurationError(
            f"there is nothing to run: delayed_delivery.enabled is false ({origin}), and no timeout_manager.address "
            f"says where a timeout manager keeps its timeouts"
        )
    others = [name for name in managed if name != settings.endpoint.name]
    return [
        build_endpoint(deployment, clock=clock, create_queues=create_queues, critical_error=critical_error),
        *(_endpoint(deployment, name, None, clock, critical_error, create_queues=create_queues) for name in others),
    ]


def _endpoint(
    deployment: OpenDeployment,
    name: str,
    delays: DelayedDelivery | None,
    clock: Clock | None,
    critical_error: Callable[[str, BaseException], None],
    *,
    create_queues: bool,
) -> Endpoint:
    chosen = deployment.settings.endpoint
    deployment.databases.expect(chosen.concurrency)
    return Endpoint(
        name,
        transport=deployment.transport,
        delayed_delivery=delays,
        timeout_manager=timeout_manager(deployment.settings, name, deployment.timeouts),
        transaction_mode=chosen.transaction_mode,
        error_queue=chosen.error_queue,
        send_only=True,
        concurrency=chosen.concurrency,
        create_queues=create_queues,
        clock=clock or SystemClock(),
        critical_error=critical_error,
    )
