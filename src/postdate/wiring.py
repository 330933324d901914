"""From addresses and settings to adapters and endpoints. The only module that names the adapters.

Addresses: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` and ``memory:`` for stores; ``local:///relative.db``,
``local:////absolute.db`` and ``memory:`` for transports.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from postdate.clock import Clock, SystemClock
from postdate.config import Address, Settings
from postdate.embedded.observation import FileObserver
from postdate.endpoint.endpoint import Endpoint, log_critical_error
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import ConfigurationError, StoreNotSetUp
from postdate.migrations import migrations
from postdate.ports import Observer, Recording
from postdate.stores.memory import MemoryStore
from postdate.stores.sqlite import SqliteStore
from postdate.transports.local import LocalTransport
from postdate.transports.memory import MemoryTransport

BuiltInStore = SqliteStore | MemoryStore
BuiltInTransport = LocalTransport | MemoryTransport


def open_store(address: str, **settings: Any) -> BuiltInStore:
    """Return the store at ``address``; it connects at first use.

    Args:
        address: see above.
        settings: of the adapter: ``synchronous``, ``recording`` (a name or :class:`Recording`), ``create`` …

    Raises:
        ConfigurationError: no store has such an address.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "sqlite":
        return SqliteStore(_path(address, rest), **_with_recording(settings))
    if scheme == "memory":
        return MemoryStore(**_with_recording(settings))
    raise ConfigurationError(f"no store has the address {_shown(address)}; use sqlite:///file.db or memory:")


def open_transport(address: str, **settings: Any) -> BuiltInTransport:
    """Return the transport at ``address``; see :func:`open_store`."""
    scheme, _, rest = address.partition(":")
    if scheme in {"local", "sqlite"}:
        return LocalTransport(_path(address, rest), **_with_recording(settings))
    if scheme == "memory":
        return MemoryTransport()
    raise ConfigurationError(f"no transport has the address {_shown(address)}; use local:///file.db or memory:")


def _with_recording(settings: Mapping[str, Any]) -> dict[str, Any]:
    recording = settings.get("recording", Recording.ALL)
    return {**settings, "recording": Recording(recording)}


def _path(address: str, rest: str) -> Path:
    if not rest.startswith("///") or len(rest) < 4:
        example = address.partition(":")[0] + ":///file.db"
        raise ConfigurationError(f"{_shown(address)} names no file; write three slashes and the path: {example}")
    return Path(rest[3:])


def _shown(address: str) -> str:
    return repr(Address(address))


def file_of(address: str) -> Path | None:
    """Return the file that an address names, or ``None`` for an address without one.

    Raises:
        ConfigurationError: the address names no file although its kind needs one.
    """
    scheme, _, rest = address.partition(":")
    return _path(address, rest) if scheme in {"sqlite", "local"} else None


# --- settings to objects -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plant:
    """Store and queues as the settings say, open, with a look at each.

    Args:
        settings: that made it.
        store: where messages wait.
        transport: where the queues are.
        store_view: looks at what waits and at who uses the store.
        queue_view: looks at the queues.
    """

    settings: Settings
    store: SqliteStore
    transport: LocalTransport
    store_view: Observer
    queue_view: Observer


@asynccontextmanager
async def opened(settings: Settings, *, create: bool = False) -> AsyncGenerator[Plant]:
    """Open the store and the transport for as long as the context lasts.

    Args:
        settings: which.
        create: create missing files and tables; otherwise they must be there.

    Raises:
        ConfigurationError: an address of no adapter, or of one that other processes cannot see.
        StoreNotSetUp: a file is missing and ``create`` is false; none was made.
    """
    async with AsyncExitStack() as stack:
        chosen = settings.store
        common = {"synchronous": chosen.synchronous, "recording": chosen.recording, "create": create}
        addresses = {"store.address": chosen.address, "transport.address": settings.transport.address}
        for key, address in addresses.items():
            _check_shared(key, address, settings)
        if not create:
            for key, address in addresses.items():
                _check_there(key, address, settings)
        store = open_store(chosen.address, **common, largest_message_bytes=chosen.largest_message_bytes)
        assert isinstance(store, SqliteStore)  # checked above
        stack.push_async_callback(store.close)
        limit = settings.transport.largest_message_bytes
        transport = open_transport(settings.transport.address, **common, largest_message_bytes=limit)
        assert isinstance(transport, LocalTransport)  # checked above
        stack.push_async_callback(transport.close)
        yield Plant(settings, store, transport, FileObserver(store.file), FileObserver(transport.file))


_SCHEMES: Final = {"store.address": ("sqlite",), "transport.address": ("local", "sqlite")}


def _check_shared(key: str, address: Address, settings: Settings) -> None:
    """Refuse what is no adapter, and what no other process can see."""
    scheme, _, rest = address.partition(":")
    origin = settings.origins.get(key, "default")
    if scheme == "memory":
        raise ConfigurationError(
            f"{key} is {address!r} ({origin}), which lives in one process only; the command line needs a file, "
            f"such as {_SCHEMES[key][0]}:///postdate.db"
        )
    if scheme not in _SCHEMES[key]:
        raise ConfigurationError(f"{key} is {address!r} ({origin}); use {_SCHEMES[key][0]}:///file.db")
    _path(address, rest)


def _check_there(key: str, address: Address, settings: Settings) -> None:
    """Refuse a missing file that must not be made by the way."""
    path = file_of(address)
    if path is not None and not path.expanduser().exists():
        origin, option = settings.origins.get(key, "default"), f"--{key.partition('.')[0]}"
        raise StoreNotSetUp(
            f"there is no file {path} ({key}, {origin}); create it with `postdate setup`, or name another with {option}"
        )


def delayed_delivery(settings: Settings, store: SqliteStore) -> DelayedDelivery:
    """Return the settings of delayed delivery as an endpoint takes them."""
    chosen = settings.delayed_delivery
    return DelayedDelivery(
        store,
        number_of_retries=chosen.number_of_retries,
        time_to_trigger_store_circuit_breaker=chosen.time_to_trigger_store_circuit_breaker,
        time_to_trigger_fetch_circuit_breaker=chosen.time_to_trigger_fetch_circuit_breaker,
        time_to_trigger_dispatch_circuit_breaker=chosen.time_to_trigger_dispatch_circuit_breaker,
        maximum_recovery_failures_per_second=chosen.maximum_recovery_failures_per_second,
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
        delayed_delivery=delayed_delivery(settings, plant.store),
        transaction_mode=settings.endpoint.transaction_mode,
        error_queue=settings.endpoint.error_queue,
        send_only=True,
        concurrency=settings.endpoint.concurrency,
        create_queues=create_queues,
        clock=clock or SystemClock(),
        critical_error=critical_error,
    )


def setup_sql(address: str) -> str:
    """Return the SQL that sets up the store at ``address``, as one script.

    Raises:
        ConfigurationError: the store needs no SQL.
    """
    if address.partition(":")[0] not in {"sqlite", "local"}:
        raise ConfigurationError(f"{_shown(address)} needs no SQL")
    parts = ["CREATE TABLE IF NOT EXISTS postdate_migration (version INTEGER PRIMARY KEY, name TEXT NOT NULL);"]
    for each in migrations("sqlite"):
        mark = f"INSERT INTO postdate_migration VALUES ({each.version}, '{each.name}');"
        parts.append(f"-- {each.version:04d} {each.name}\n{each.sql.strip()}\n{mark}")
    return "\n\n".join(parts) + "\n"
