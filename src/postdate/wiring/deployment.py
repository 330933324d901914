"""Open the store and the queues of the settings, and build the endpoint of ``postdate run``."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal, cast

from postdate import ports
from postdate.backends import registry
from postdate.backends.sql.timeouts_layout import table_name
from postdate.clock import Clock, SystemClock
from postdate.config import Address, SectionValues, Settings
from postdate.core.health.deadlines import Deadlines
from postdate.endpoint.delayed_delivery import timeouts_dispatcher_queue, timeouts_queue
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.service import log_critical_error
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
from postdate.endpoint.timeout_manager import timeout_dispatcher_queue, timeout_manager_queue
from postdate.errors import ConfigurationError, StoreNotSetUp, StoreUnreachable
from postdate.ports.backends import Place
from postdate.ports.timeouts import TimeoutPersister
from postdate.runtime.reporting import NO_METRICS, Metrics
from postdate.wiring import adapters
from postdate.wiring.causes import locate_errors, name_setting_in_errors

# --- closing at the end, without waiting for one that never answers ---------------------------------------------------


log = logging.getLogger("postdate.wiring")

CLOSE_DEADLINE: Final = timedelta(seconds=10)
"""Time limit for closing one adapter. Its claims become free when the process ends, even if it was not closed."""


async def close_adapter(name: str, close_call: Callable[[], Awaitable[None]]) -> None:
    """Close an adapter. An adapter that takes too long is abandoned, and a warning is logged."""
    deadlines = Deadlines.of_store(getattr(close_call, "__self__", close_call), SystemClock(), CLOSE_DEADLINE)
    try:
        await deadlines.call_in_task(close_call)
    except StoreUnreachable as error:
        log.warning("%s was not closed: %s", name, error)


# --- saga store and outbox; by default in the database of the delayed messages ----------------------------------------


def open_saga_store(settings: Settings, databases: adapters.Databases | None = None) -> ports.SagaStore:
    """Return the saga store of the settings: by default in the file of the store, or its schema.

    The saga store connects at first use. Pass it to ``Endpoint(sagas=…)``, which creates its tables with the queues.

    Args:
        settings: settings with the section ``sagas``.
        databases: databases that it may share with other adapters, as :attr:`OpenDeployment.databases`.

    Raises:
        ConfigurationError: there is no saga store of that kind.
    """
    return cast("ports.SagaStore", _open_part("sagas", settings.sagas, settings, databases))


def open_outbox(settings: Settings, databases: adapters.Databases | None = None) -> ports.OutboxStore:
    """Return the outbox store of the settings: by default in the file of the store, or its schema of PostgreSQL.

    The outbox store connects at first use. Pass it to ``Endpoint(outbox=Outbox(…))``, which creates its table with the
    queues.

    Args:
        settings: settings with the section ``outbox``.
        databases: see :func:`open_saga_store`.

    Raises:
        ConfigurationError: there is no outbox of that kind.
    """
    return cast("ports.OutboxStore", _open_part("outbox", settings.outbox, settings, databases))


def _open_part(
    section: Literal["sagas", "outbox"],
    section_settings: SectionValues,
    settings: Settings,
    databases: adapters.Databases | None,
) -> object:
    address = address_of_section(section_settings, settings)
    key = f"{section}.address" if section_settings.address is not None else "store.address"
    try:
        kind = adapters.find_adapter(address, section, section)
    except ConfigurationError as error:
        subject = "the outbox is" if section == "outbox" else "sagas are"
        products = " or ".join(dict.fromkeys(each.product for each in adapters.adapters_of(section).values()))
        raise ConfigurationError(
            f"{subject} kept in {products}; {key} is {address!r}: name such a database with {section}.address, "
            f"or pass one of your own to the endpoint"
        ) from error
    schema = section_settings.schema or (settings.store.schema if section_settings.address is None else None)
    arguments = adapters.adapter_arguments(section, kind, settings, schema=schema)
    with name_setting_in_errors(key, address, settings):
        return adapters.open_adapter(kind, address, arguments, databases)


def address_of_section(section_settings: SectionValues, settings: Settings) -> Address:
    """Return the address of a section; by default the address of the store."""
    return settings.store.address if section_settings.address is None else section_settings.address


def is_enabled(section_settings: SectionValues, is_requested: bool) -> bool:
    """Return whether setup creates the tables of a section: it was requested, or has an address or a schema."""
    return is_requested or section_settings.address is not None or section_settings.schema is not None


# --- timeout managers and the storages of their timeouts --------------------------------------------------------------


def check_timeout_managers(settings: Settings) -> None:
    """Refuse settings of timeout managers that contradict each other."""
    manager_settings, delays = settings.timeout_manager, settings.delayed_delivery
    if manager_settings.external_address is not None:
        origin = settings.origin("timeout_manager.external_address")
        if manager_settings.address is not None:
            raise ConfigurationError(
                f"timeout_manager.external_address ({origin}) is for endpoints that have no timeout manager of their "
                f"own, and timeout_manager.address says where one keeps its timeouts: remove one of them"
            )
        if delays.enabled:
            raise ConfigurationError(
                f"timeout_manager.external_address ({origin}) and a delayed delivery of its own exclude each other: "
                f"remove it, or set delayed_delivery.enabled = false"
            )
    if manager_settings.address is None:
        for name, origin in settings.origins.items():
            if name.startswith("timeout_manager.") and not name.endswith("address"):
                raise ConfigurationError(
                    f"{name} ({origin}) is set, and nothing says where timeouts are kept: add "
                    f"timeout_manager.address, such as {adapters.example_of('timeouts', 'postgresql')}"
                )
        return
    _timeout_storage(settings)
    _check_distinct_endpoints(settings)
    if manager_settings.table_prefix is not None and len(managed_endpoints(settings)) > 1:
        raise ConfigurationError(
            f"timeout_manager.table_prefix ({settings.origin('timeout_manager.table_prefix')}) names one table, and "
            f"timeout_manager.endpoints are several, each with a table of its own: run one service for each, or leave "
            f"the prefix out"
        )


def _check_distinct_endpoints(settings: Settings) -> None:
    """Refuse endpoints that would share a table or a queue, because their names differ only in case or in dots."""
    endpoints_by_table: dict[str, str] = {}
    endpoint_names = [settings.endpoint.name] if settings.delayed_delivery.enabled else []
    for name in dict.fromkeys([*endpoint_names, *managed_endpoints(settings)]):
        if (other := endpoints_by_table.setdefault(table_name(name).lower(), name)) != name:
            raise ConfigurationError(
                f"timeout_manager.endpoints ({settings.origin('timeout_manager.endpoints')}): {name!r} and {other!r} "
                f"have one table, or one queue on some servers: write the name in one way, endpoint.name included, or "
                f"run a service for each"
            )


def _timeout_storage(settings: Settings, *, create: bool = True) -> tuple[adapters.AdapterRole, dict[str, Any]]:
    manager_settings = settings.timeout_manager
    assert manager_settings.address is not None
    with name_setting_in_errors("timeout_manager.address", manager_settings.address, settings):
        kind = adapters.find_adapter(manager_settings.address, "storage of timeouts", "timeouts")
    return kind, adapters.adapter_arguments("timeout_manager", kind, settings, create=create)


def managed_endpoints(settings: Settings) -> tuple[str, ...]:
    """Return the endpoints whose timeouts are managed here; none without a storage."""
    manager_settings = settings.timeout_manager
    return (
        ()
        if manager_settings.address is None
        else tuple(dict.fromkeys(manager_settings.endpoints)) or (settings.endpoint.name,)
    )


def open_timeouts(
    settings: Settings, databases: adapters.Databases | None = None, *, create: bool = True
) -> dict[str, TimeoutPersister]:
    """Return the storage of timeouts by managed endpoint. Each connects at first use.

    ``create``: it may create a file.
    """
    if not (endpoints := managed_endpoints(settings)):
        return {}
    kind, arguments = _timeout_storage(settings, create=create)
    address = settings.timeout_manager.address
    assert address is not None
    with name_setting_in_errors("timeout_manager.address", address, settings):
        return {
            name: cast("TimeoutPersister", adapters.open_adapter(kind, address, arguments, databases))
            for name in endpoints
        }


def timeout_manager(
    settings: Settings, endpoint: str, timeouts: Mapping[str, TimeoutPersister]
) -> TimeoutManager | ExternalTimeoutManager | None:
    """Return the settings of an endpoint's timeout manager. ``timeouts`` comes from :func:`open_timeouts`."""
    manager_settings = settings.timeout_manager
    if manager_settings.external_address is not None:
        return ExternalTimeoutManager(manager_settings.external_address)
    if endpoint not in timeouts:
        return None
    return TimeoutManager(timeouts[endpoint], **manager_settings.of(TimeoutManager))


def dispatcher_queues(settings: Settings, capabilities: ports.TransportCapabilities) -> list[str]:
    """Return the queues in which the due timeouts of the managed endpoints are announced."""
    return [timeout_dispatcher_queue(name, capabilities) for name in managed_endpoints(settings)]


# --- the deployment ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenDeployment:
    """The open store and queues of the settings, with an observer for each.

    Args:
        settings: the settings from which it was opened.
        store: the store of delayed messages; ``None`` without delayed delivery.
        transport: the transport of the queues.
        store_view: observes pending messages and the processes of the store; ``None`` for a store without an observer.
        queue_view: observes the queues; ``None`` for queues without an observer.
        timeouts: storages by endpoint, for the timeout managers that run here.
        databases: databases that these adapters share, and that sagas and an outbox may share, too.
    """

    settings: Settings
    store: ports.ClaimingStore | None
    transport: ports.Transport
    store_view: ports.Observer | None
    queue_view: ports.Observer | None
    timeouts: Mapping[str, TimeoutPersister] = field(default_factory=dict[str, TimeoutPersister])
    databases: adapters.Databases = field(default_factory=adapters.Databases)

    @property
    def required_store(self) -> ports.ClaimingStore:
        """The store, for callers that need one. Raises `ConfigurationError` if there is none."""
        if self.store is None:
            origin = self.settings.origin("delayed_delivery.enabled")
            raise ConfigurationError(
                f"there is no store of delayed messages here: delayed_delivery.enabled is false ({origin}), and "
                f"only the tools of their database show timeouts"
            )
        return self.store


@asynccontextmanager
async def open_deployment(
    settings: Settings, *, create: bool = False, initialize: bool = True
) -> AsyncGenerator[OpenDeployment]:
    """Open the store and the transport for the length of the context.

    Args:
        settings: of the deployment.
        create: create missing files and their tables; otherwise they must exist. Only setup creates tables of servers.
        initialize: prepare the store for the endpoint of the settings. An endpoint that is started does this itself.

    Raises:
        ConfigurationError: an address belongs to no adapter, or to one that other processes cannot see; the adapter
            does not have a setting; or the server does not have the database.
        StoreNotSetUp: a file is missing and ``create`` is false. No file was created.
        StoreUnavailable: a server does not answer.
    """
    check_addresses(settings)
    has_store = settings.delayed_delivery.enabled
    store_arguments = store_settings(settings, create=create) if has_store else {}
    transport_arguments = transport_settings(settings, create=create)
    if not create:
        for key, address in _files(settings):
            _check_exists(key, address, settings)
    async with AsyncExitStack() as stack:
        stack.enter_context(locate_errors(settings))
        store, databases = None, adapters.Databases()
        if has_store:
            with name_setting_in_errors("store.address", settings.store.address, settings):
                store = adapters.open_store(settings.store.address, databases, **store_arguments)
            stack.push_async_callback(close_adapter, "the store", store.close)
        with name_setting_in_errors("transport.address", settings.transport.address, settings):
            transport = adapters.open_transport(settings.transport.address, databases, **transport_arguments)
        stack.push_async_callback(close_adapter, "the transport", transport.close)
        timeouts = open_timeouts(settings, databases, create=create)
        for each in timeouts.values():
            stack.push_async_callback(close_adapter, "the storage of timeouts", each.close)
        if create and store is not None:
            await _reach_servers(settings, store, transport)
        if initialize and store is not None:
            await store.initialize(settings.endpoint.name, ports.TransactionMode.RECEIVE_ONLY)
        view = None if store is None else store_observer(store)
        yield OpenDeployment(settings, store, transport, view, transport.observer(), timeouts, databases)


def store_observer(store: ports.ClaimingStore) -> ports.Observer | None:
    return store.observer() if isinstance(store, ports.AdministrableStore) else None


def _files(settings: Settings) -> list[tuple[str, Address]]:
    """Return the addresses that may be files, with their keys."""
    addresses = [("transport.address", settings.transport.address)]
    if settings.delayed_delivery.enabled:
        addresses.insert(0, ("store.address", settings.store.address))
    if settings.timeout_manager.address is not None:
        addresses.append(("timeout_manager.address", settings.timeout_manager.address))
    return addresses


async def _reach_servers(settings: Settings, store: ports.ClaimingStore, transport: ports.Transport) -> None:
    """Reach the server before the file of the other adapter is created.

    If the server cannot be used, nothing must be left behind.
    """
    files = [adapters.file_of(address) is not None for address in (settings.store.address, settings.transport.address)]
    if any(files) and not all(files):
        server = transport if files[0] else store
        if server is store:  # The store must know the name of its table first.
            await store.initialize(settings.endpoint.name, ports.TransactionMode.RECEIVE_ONLY)
        if isinstance(server, ports.AdministrableStore | ports.Transport):
            await server.server_facts()


def store_settings(settings: Settings, *, create: bool = True) -> dict[str, Any]:
    """Return the arguments of the store's adapter."""
    return adapters.adapter_arguments("store", adapters.check_store(settings.store.address), settings, create=create)


def transport_settings(settings: Settings, *, create: bool = True) -> dict[str, Any]:
    return adapters.adapter_arguments(
        "transport", adapters.check_transport(settings.transport.address), settings, create=create
    )


# --- what cannot work ----------------------------------------------------------------------------------------------


_FILES: Final = {"store.address": "sqlite", "transport.address": "local"}


def check_addresses(settings: Settings) -> None:
    """Refuse unknown adapters, adapters that other processes cannot see, and queues in a backend without queues."""
    check_timeout_managers(settings)
    if delays := settings.delayed_delivery.enabled:
        store = _check_address("store.address", settings.store.address, settings, adapters.check_store)
        if store.is_server and "transport.address" not in settings.origins:
            raise ConfigurationError(
                f"store.address is {settings.store.address!r}, and {store.product} holds no queues here: say where "
                f"they are with transport.address, such as {adapters.example_of('transport', 'amqp')}"
            )
    timeouts = settings.timeout_manager.address
    is_server = timeouts is not None and registry.place_of(timeouts.scheme) is Place.SERVER
    if is_server and "transport.address" not in settings.origins:
        raise ConfigurationError(
            f"timeout_manager.address is {timeouts!r} ({settings.origin('timeout_manager.address')}), which holds no "
            f"queues here: say where they are with transport.address, such as "
            f"{adapters.example_of('transport', 'amqp')}"
        )
    transport = _check_address("transport.address", settings.transport.address, settings, adapters.check_transport)
    if delays and transport.is_server and "store.address" not in settings.origins:
        raise ConfigurationError(
            f"transport.address is {settings.transport.address!r}, and {transport.product} keeps no delayed messages: "
            f"say where they wait with store.address, such as {adapters.example_of('store', 'postgresql')} or "
            f"{adapters.example_of('store', 'sqlite')}; or, for a timeout manager alone, set "
            f"delayed_delivery.enabled = false"
        )


def _check_address(
    key: str, address: Address, settings: Settings, check: Callable[[str], adapters.AdapterRole]
) -> adapters.AdapterRole:
    with name_setting_in_errors(key, address, settings):
        kind = check(address)
    if kind.backend.place is Place.MEMORY:
        raise ConfigurationError(
            f"{key} is {address!r} ({settings.origin(key)}), which lives in one process only; the "
            f"command line needs a file or a server, such as {_FILES[key]}:///postdate.db"
        )
    return kind


def _check_exists(key: str, address: Address, settings: Settings) -> None:
    """Raise an error if a file is missing that only setup may create."""
    path = adapters.file_of(address)
    if path is not None and not path.expanduser().exists():
        other = f"--{key.partition('.')[0]}" if key in _FILES else key
        raise StoreNotSetUp(
            f"there is no file {path} ({key}, {settings.origin(key)}); create it with `postdate setup`, or name "
            f"another with {other}"
        )


# --- the endpoint --------------------------------------------------------------------------------------------------


def own_queues(settings: Settings, capabilities: ports.TransportCapabilities) -> list[str]:
    """Return the queues that the service needs, and the queues that the settings name."""
    return list(dict.fromkeys([*service_queues(settings, capabilities), *settings.queues.create]))


def service_queues(settings: Settings, capabilities: ports.TransportCapabilities) -> list[str]:
    """Return the queues that the service needs.

    The service handles no messages. So if the settings name a poison queue, no message of delayed delivery goes to the
    error queue.
    """
    delays, error_queue = settings.delayed_delivery, settings.endpoint.error_queue
    intake = intake_queues(settings, capabilities)
    queues = [*intake[:1], delays.poison_queue or error_queue, *intake[1:]] if delays.enabled else intake
    if managed_endpoints(settings):
        queues += [*dispatcher_queues(settings, capabilities), error_queue]
    return queues


def intake_queues(settings: Settings, capabilities: ports.TransportCapabilities) -> list[str]:
    """Return the queues from which the service receives messages to delay, with those of managed timeouts last."""
    queues: list[str] = []
    if settings.delayed_delivery.enabled:
        queues.append(timeouts_queue(settings.endpoint.name))
        if settings.delayed_delivery.drain_timeout_manager:
            queues.append(timeouts_dispatcher_queue(settings.endpoint.name))
    return [*queues, *(timeout_manager_queue(name, capabilities) for name in managed_endpoints(settings))]


def delay_exchange(settings: Settings, transport: ports.Transport) -> ports.DelayExchange | None:
    """Return the exchange through which other programs delay messages; ``None``: there is no exchange."""
    intake_settings = settings.intake
    if (
        not settings.delayed_delivery.enabled
        or not intake_settings.exchange
        or not isinstance(transport, ports.ForeignIntake)
    ):
        return None
    return ports.DelayExchange(intake_settings.exchange, intake_settings.due_exchange_type)


def build_delayed_delivery(
    settings: Settings, store: ports.ClaimingStore, exchange: ports.DelayExchange | None = None
) -> DelayedDelivery:
    return DelayedDelivery(store, delay_exchange=exchange, **settings.delayed_delivery.of(DelayedDelivery))


def build_endpoint(
    deployment: OpenDeployment,
    name: str | None = None,
    *,
    clock: Clock | None = None,
    create_queues: bool = True,
    critical_error: Callable[[str, BaseException], None] = log_critical_error,
    metrics: Metrics = NO_METRICS,
) -> Endpoint:
    """Return the send-only endpoint of the settings: it delivers delayed messages and handles none.

    ``name``: the name of another endpoint, whose timeouts are managed here. The endpoint then delivers nothing else.
    """
    settings, endpoint_settings, delays = deployment.settings, deployment.settings.endpoint, None
    if deployment.store is not None and name is None:
        delays = build_delayed_delivery(settings, deployment.store, delay_exchange(settings, deployment.transport))
    deployment.databases.ensure_connections(endpoint_settings.concurrency)
    return Endpoint(
        name or endpoint_settings.name,
        transport=deployment.transport,
        delayed_delivery=delays,
        timeout_manager=timeout_manager(settings, name or endpoint_settings.name, deployment.timeouts),
        transaction_mode=endpoint_settings.transaction_mode,
        error_queue=endpoint_settings.error_queue,
        send_only=True,
        concurrency=endpoint_settings.concurrency,
        create_queues=create_queues,
        clock=clock or SystemClock(),
        critical_error=critical_error,
        metrics=metrics,
    )


def endpoints_to_run(settings: Settings) -> list[str | None]:
    """Return the names for which :func:`build_endpoint` builds the endpoints of ``postdate run``.

    ``None`` stands for the endpoint of the settings. The others are endpoints whose timeouts are managed here.
    """
    managed_names = managed_endpoints(settings)
    if not settings.delayed_delivery.enabled and not managed_names:
        origin = settings.origin("delayed_delivery.enabled")
        raise ConfigurationError(
            f"there is nothing to run: delayed_delivery.enabled is false ({origin}), and no timeout_manager.address "
            f"says where a timeout manager keeps its timeouts"
        )
    return [None, *(name for name in managed_names if name != settings.endpoint.name)]
