"""Plants: one kind of store with one kind of transport, opened in a scratch place for one run.

Which places exist, which variable or option names each server, and which pair shares one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

from postdate.bench.places.embedded import EmbeddedPlace
from postdate.bench.places.place import Place, QueuePlace, StorePlace
from postdate.bench.places.rabbitmq import RabbitMqPlace
from postdate.bench.places.room import RoomPlace
from postdate.bench.site import Site
from postdate.config import Address, resolved
from postdate.errors import ConfigurationError
from postdate.ports.benchmarks import BenchRoom
from postdate.wiring.adapters import kinds, loaded

if TYPE_CHECKING:
    from postdate.bench.places.postgres import PostgresPlace

ROOMS: Final = {scheme: kind for scheme, kind in kinds("bench").items() if scheme == kind.addresses.schemes[0]}
"""Kinds whose backend says itself how it is measured: store and queues on one server."""

VARIABLES: Final = {
    "postgres": "POSTDATE_POSTGRES_URL",
    "mariadb": "POSTDATE_MARIADB_URL",
    "mssql": "POSTDATE_SQLSERVER_URL",
    "rabbitmq": "POSTDATE_RABBITMQ_URL",
    "azure-table": "POSTDATE_AZURITE_CONNECTION",
    "azure-queues": "POSTDATE_AZURITE_CONNECTION",
    **{scheme: f"POSTDATE_{scheme.upper()}_URL" for scheme in ROOMS},
}
STORES: Final = ("sqlite", "postgres", "mariadb", "mssql", "azure-table", *ROOMS)
TRANSPORTS: Final = ("local", "postgres", "rabbitmq", "azure-queues", *ROOMS)
_DEFAULT_TRANSPORT: Final = {
    "sqlite": "local",
    "postgres": "postgres",
    "mariadb": "rabbitmq",
    "mssql": "rabbitmq",
    "azure-table": "azure-queues",
    **{scheme: scheme for scheme in ROOMS},
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a benchmark measures, as the command line has it.

    Args:
        store: kind of store.
        transport: kind of transport; ``None``: the one that goes with the store.
        store_address: of the server; ``None``: from the environment.
        transport_address: likewise.
        folder: empty; on the disk to be measured, for what lives in files.
        synchronous: durability of files.
        recording: how much the store records.
        queue_type: of RabbitMQ: ``quorum`` or ``classic``.
    """

    store: str
    transport: str | None
    store_address: str | None
    transport_address: str | None
    folder: Path
    synchronous: str = "full"
    recording: str = "all"
    queue_type: str = "quorum"

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--store", self.store, STORES),
            ("--transport", self.transport_kind, TRANSPORTS),
            ("--synchronous", self.synchronous, ("full", "normal")),
            ("--recording", self.recording, ("all", "outcomes", "none")),
            ("--queue-type", self.queue_type, ("quorum", "classic")),
        ):
            if value not in known:
                raise ConfigurationError(f"{option} must be one of {', '.join(known)}, not {value!r}")

    @property
    def transport_kind(self) -> str:
        """The kind of transport."""
        return self.transport or _DEFAULT_TRANSPORT.get(self.store, "")


@dataclass(frozen=True, slots=True)
class Plant:
    """Store and queues in their places, for one run.

    Args:
        site: what other processes need to know.
        store: where messages wait.
        queues: where they go; the same object when they share a server.
    """

    site: Site
    store: StorePlace
    queues: QueuePlace

    @property
    def places(self) -> tuple[Place, ...]:
        """Each place once."""
        return tuple(dict.fromkeys((self.store, self.queues)))

    def facts(self) -> dict[str, Mapping[str, str]]:
        """Return version and settings of each place."""
        return {place.name: place.facts() for place in self.places}

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all servers so far; None without any, or when one cannot be seen from here."""
        used = [place.cpu_seconds() for place in self.places if place.is_server]
        return None if not used or None in used else sum(filter(None, used))

    def cpu_seconds_by_role(self) -> dict[str, float]:
        """Return the processor time of the servers' connections by role of process."""
        return {role: used for place in self.places for role, used in place.cpu_seconds_by_role().items()}


@contextmanager
def opened(options: Options) -> Generator[Plant]:
    """Make a scratch place, and take it away afterwards, whatever happened.

    Raises:
        ConfigurationError: nobody said where a server is, or the driver is not installed.
        StoreUnavailable, TransportUnavailable: the server does not answer.
    """
    run = secrets.token_hex(6)
    with ExitStack() as stack:
        store = stack.enter_context(_store_place(options, run))
        shared = _shared(options, store)
        queues = shared or stack.enter_context(_queue_place(options, run))
        yield Plant(Site(run, store.store, queues.transport), store, queues)


def _shared(options: Options, store: StorePlace) -> QueuePlace | None:
    """Return the place of the store if the queues are to live in the same database."""
    if not isinstance(store, QueuePlace):
        return None
    if (options.store, options.transport_kind) == ("sqlite", "local"):
        return store
    same_kind = options.transport_kind == ("azure-queues" if options.store == "azure-table" else options.store)
    elsewhere = options.transport_address and options.transport_address != options.store_address
    return store if same_kind and not elsewhere else None


def _store_place(options: Options, run: str) -> StorePlace:
    if options.store == "sqlite":
        return _embedded(options, run)
    url = _address(options.store, "--store-address", options.store_address)
    if options.store in ROOMS:
        return _room(run, options.store, url, options)
    if options.store == "postgres":
        return _postgres(run, url, options)
    if options.store == "azure-table":
        return _azure().AzurePlace(run, url, options.folder, options.recording)
    if options.store == "mssql":
        return _sqlserver(run, url, options)
    try:
        from postdate.bench.places.mariadb import MariaDbPlace
    except ModuleNotFoundError as error:
        raise _not_installed("MariaDB", "mariadb", error) from error
    return MariaDbPlace(run, url, options.recording)


def _queue_place(options: Options, run: str) -> QueuePlace:
    if options.transport_kind == "local":
        return _embedded(options, f"{run[:-1]}q")
    url = _address(options.transport_kind, "--transport-address", options.transport_address)
    if options.transport_kind in ROOMS:
        return _room(run, options.transport_kind, url, options)
    if options.transport_kind == "postgres":
        return _postgres(run, url, options)
    if options.transport_kind == "azure-queues":
        return _azure().AzureQueuePlace(run, url, options.folder)
    return RabbitMqPlace(run, url, options.queue_type)


def _embedded(options: Options, run: str) -> EmbeddedPlace:
    return EmbeddedPlace(run, options.folder, options.synchronous, options.recording)


def _room(run: str, scheme: str, url: Address, options: Options) -> RoomPlace:
    opens = cast("Callable[[str, str], BenchRoom]", loaded(ROOMS[scheme]))
    return RoomPlace(run, scheme, lambda: opens(url, run), options.recording)


def _postgres(run: str, url: Address, options: Options) -> PostgresPlace:
    try:
        from postdate.bench.places.postgres import PostgresPlace
    except ModuleNotFoundError as error:
        raise _not_installed("PostgreSQL", "postgres", error) from error
    return PostgresPlace(run, url, options.recording)


def _sqlserver(run: str, url: Address, options: Options) -> StorePlace:
    from postdate.bench.places.sqlserver import SqlServerPlace

    if find_spec("pytds") is None:
        raise _not_installed("SQL Server", "sqlserver", ModuleNotFoundError(name="pytds"))
    return SqlServerPlace(run, url, options.recording)


def _azure() -> ModuleType:
    """Return the module of the places in Azure Storage."""
    try:
        from postdate.bench.places import azure
    except ModuleNotFoundError as error:
        raise _not_installed("Azure Storage", "azure", error) from error
    return azure


def _not_installed(product: str, extra: str, error: ModuleNotFoundError) -> ConfigurationError:
    return ConfigurationError(
        f"{product} needs the driver {error.name!r}, which is not installed: pip install 'postdate[{extra}]'"
    )


def _address(kind: str, option: str, given: str | None) -> Address:
    variable = VARIABLES[kind]
    address = given or os.environ.get(variable)
    if not address:
        raise ConfigurationError(f"no {kind} server to measure: set {variable}, or name one with {option}")
    return resolved(address, os.environ)
