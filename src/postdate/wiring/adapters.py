"""Which adapter an address means, and what it can be told. Adapters and their drivers are imported when used.

Stores: ``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``postgresql://user@host:port/database``,
``mariadb://…``, ``mssql://…``, ``azure-table://…``, ``memory:``. Transports: ``local:///relative.db``,
``local:////absolute.db``, ``postgresql://…``, ``amqp://…``, ``amqps://…``, ``azure-queues://…``, ``msmq:``,
``msmq://machine``, ``memory:``.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from postdate.config import Address, check_server, resolved
from postdate.errors import ConfigurationError
from postdate.ports import ClaimingStore, Recording, Transport


class BuiltInStore(ClaimingStore, Protocol):
    """A store that Postdate comes with."""

    async def close(self) -> None:
        """Release connections; a second time without effect."""
        ...


BuiltInTransport = Transport


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of store or transport.

    Args:
        scheme: its addresses begin with it.
        product: as people call it.
        adapter: ``module:class``.
        example: of an address.
        settings: names of what its class takes besides the address.
        extra: of the installation, which brings the driver; empty when it needs none.
    """

    scheme: str
    product: str
    adapter: str
    example: str
    settings: frozenset[str]
    extra: str = ""


_SERVER: Final = frozenset({"schema", "table", "recording", "largest_message_bytes", "checksum"})
_HOLDING: Final = frozenset({"holds_at_most"})
_PATIENCE: Final = _HOLDING | {"answers_within"}
_FILE: Final = frozenset({"synchronous", "recording", "largest_message_bytes", "create", "holds_at_most"})
_QUEUE_FILE: Final = _FILE | {"expiry", "clock"}
_POLLING: Final = ("peek_interval", "longest_wait_when_idle", "page_size")
"""How an Azure table is looked at: its store takes them together, as one value."""

STORES: Final = {
    kind.scheme: kind
    for kind in (
        Kind("sqlite", "SQLite", "postdate.stores.sqlite:SqliteStore", "sqlite:///file.db", _FILE | {"checksum"}),
        Kind(
            "postgresql",
            "PostgreSQL",
            "postdate.stores.postgres:PostgresStore",
            "postgresql://user@host/database",
            _SERVER | _PATIENCE,
            extra="postgres",
        ),
        Kind(
            "mariadb",
            "MariaDB",
            "postdate.stores.mariadb:MariaDbStore",
            "mariadb://user@host/database",
            _SERVER | _PATIENCE,
            extra="mariadb",
        ),
        Kind(
            "mssql",
            "SQL Server",
            "postdate.stores.sqlserver:SqlServerStore",
            "mssql://user@host/database",
            _SERVER | _PATIENCE,
            extra="sqlserver",
        ),
        Kind(
            "azure-table",
            "Azure Table Storage",
            "postdate.stores.azure_table:AzureTableStore",
            "azure-table://account:key@account.table.core.windows.net",
            frozenset({"table", "recording", "largest_message_bytes", "checksum", "leases", *_POLLING}),
            extra="azure",
        ),
        Kind(
            "memory",
            "memory",
            "postdate.stores.memory:MemoryStore",
            "memory:",
            frozenset({"recording", "largest_message_bytes"}),
        ),
    )
}
_RABBITMQ: Final = "postdate.transports.rabbitmq:RabbitMqTransport"
TRANSPORTS: Final = {
    kind.scheme: kind
    for kind in (
        Kind("local", "SQLite", "postdate.transports.local:LocalTransport", "local:///file.db", _QUEUE_FILE),
        Kind(
            "postgresql",
            "PostgreSQL",
            "postdate.transports.postgres:PostgresTransport",
            "postgresql://user@host/database",
            frozenset({"schema", "recording", "largest_message_bytes"}) | _PATIENCE,
            extra="postgres",
        ),
        Kind(
            "amqp",
            "RabbitMQ",
            _RABBITMQ,
            "amqp://user@host/vhost",
            frozenset({"queue_type", "largest_message_bytes"}),
            extra="rabbitmq",
        ),
        Kind(
            "amqps",
            "RabbitMQ",
            _RABBITMQ,
            "amqps://user@host/vhost",
            frozenset({"queue_type", "largest_message_bytes"}),
            extra="rabbitmq",
        ),
        Kind(
            "azure-queues",
            "Azure Storage Queues",
            "postdate.transports.azure_queues:AzureStorageQueueTransport",
            "azure-queues://account:key@account.queue.core.windows.net",
            frozenset(
                {
                    "sanitizer",
                    "largest_message_bytes",
                    "concurrent_sends",
                    "hold_for",
                    "peek_interval",
                    "longest_idle_wait",
                }
            ),
            extra="azure",
        ),
        Kind(
            "msmq",
            "MSMQ",
            "postdate.transports.msmq:MsmqTransport",
            "msmq:",
            frozenset(
                {
                    "transactional",
                    "largest_message_bytes",
                    "disable_native_time_to_be_received_in_transactions",
                    "use_dead_letter_queue",
                    "use_dead_letter_queue_for_messages_with_time_to_be_received",
                    "use_journal_queue",
                }
            ),
            extra="msmq",
        ),
        Kind(
            "memory",
            "memory",
            "postdate.transports.memory:MemoryTransport",
            "memory:",
            frozenset({"largest_message_bytes", "clock"}),
        ),
    )
}
STORE_ALIASES: Final = {"postgres": "postgresql", "mysql": "mariadb", "sqlserver": "mssql"}
_TRANSPORT_ALIASES: Final = {"postgres": "postgresql", "sqlite": "local"}


# --- which adapter -----------------------------------------------------------------------------------------------


def check_store(address: str) -> Kind:
    """Return the kind of store that an address means.

    Raises:
        ConfigurationError: no store has such an address; says which one may have been meant.
    """
    return kind_of(address, "store", STORES, STORE_ALIASES)


def check_transport(address: str) -> Kind:
    """Return the kind of transport that an address means; see :func:`check_store`."""
    return kind_of(address, "transport", TRANSPORTS, _TRANSPORT_ALIASES)


def kind_of(address: str, what: str, kinds: Mapping[str, Kind], aliases: Mapping[str, str]) -> Kind:
    """Return which of ``kinds`` an address means; see :func:`check_store`.

    Args:
        address: not a reference.
        what: they are, for the error.
        kinds: by scheme.
        aliases: other names of schemes.
    """
    scheme = Address(address).scheme
    kind = kinds.get(aliases.get(scheme, scheme))
    if kind is None:
        close = difflib.get_close_matches(scheme, [*kinds, *aliases], n=1)
        schemes = ", ".join(f"{each}:" for each in kinds)
        hint = f"did you mean {kinds[aliases.get(close[0], close[0])].example}?" if close else f"there are {schemes}"
        raise ConfigurationError(f"no {what} has the address {_shown(address)}; {hint}")
    if kind.scheme in {"sqlite", "local"}:
        _path(address)
    elif kind.scheme not in {"memory", "msmq"} and "://" not in address:  # msmq: is this machine
        raise ConfigurationError(f"{_shown(address)} names no server; write it as {kind.example}")
    check_server(address)
    return kind


def _path(address: str) -> Path:
    scheme, _, rest = address.partition(":")
    if not rest.startswith("///") or len(rest) < 4:
        raise ConfigurationError(
            f"{_shown(address)} names no file; write three slashes and the path: {scheme}:///file.db"
        )
    return Path(rest[3:])


def _shown(address: str) -> str:
    return repr(address if isinstance(address, Address) else Address(address))


def file_of(address: str) -> Path | None:
    """Return the file that an address names, or ``None`` for an address without one.

    Raises:
        ConfigurationError: the address names no file although its kind needs one.
    """
    return _path(address) if Address(address).scheme in {"sqlite", "local"} else None


# --- opening -----------------------------------------------------------------------------------------------------


def taken_by_store(address: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``settings`` that the store at ``address`` knows and that have a value."""
    return _taken(check_store(address), settings)


def _taken(kind: Kind, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in kind.settings and value is not None}


def open_store(address: str, **settings: Any) -> BuiltInStore:
    """Return the store at ``address``; it connects at first use.

    Args:
        address: see above, or a reference to one: ``env:NAME``, ``file:PATH``.
        settings: of the adapter: ``schema``, ``table``, ``synchronous``, ``recording`` (a name or :class:`Recording`) …

    Raises:
        ConfigurationError: no store has such an address or such settings, or its driver is not installed.
    """
    place = resolved(address, os.environ)
    return cast("BuiltInStore", open_adapter(check_store(place), place, settings))


def open_transport(address: str, **settings: Any) -> BuiltInTransport:
    """Return the transport at ``address``; see :func:`open_store`."""
    place = resolved(address, os.environ)
    return cast("BuiltInTransport", open_adapter(check_transport(place), place, settings))


def open_adapter(kind: Kind, address: Address, settings: Mapping[str, Any]) -> object:
    """Return the adapter of a kind at an address; see :func:`open_store`."""
    unknown = sorted(settings.keys() - kind.settings)
    if unknown:
        raise ConfigurationError(f"{kind.product} takes no {', '.join(unknown)}; it takes {_known(kind)}")
    adapter = _adapter(kind)
    chosen = dict(settings)
    if "recording" in chosen:
        chosen["recording"] = Recording(chosen["recording"])
    if kind.scheme == "memory":
        return adapter(**chosen)
    if kind.scheme == "azure-table":
        chosen = _with_polling(chosen)
    return adapter(file_of(address) or str(_canonical(kind, address)), **chosen)


def _with_polling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of looking at a table put together; not before its driver is known to be there."""
    from postdate.azure.pages import Polling

    how = {name: settings[name] for name in _POLLING if name in settings}
    others = {name: value for name, value in settings.items() if name not in how}
    return {**others, "polling": Polling(**how)} if how else others


def _canonical(kind: Kind, address: Address) -> str:
    """Return an address with the scheme that the adapter of ``kind`` knows it by."""
    return f"{kind.scheme}:{address.partition(':')[2]}"


def _known(kind: Kind) -> str:
    return ", ".join(sorted(kind.settings)) or "no settings"


def _adapter(kind: Kind) -> Any:
    module, _, name = kind.adapter.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("postdate."):
            raise ConfigurationError(f"this version of Postdate cannot use {kind.product}") from error
        raise ConfigurationError(
            f"{kind.product} needs the driver {error.name!r}, which is not installed: "
            f"pip install 'postdate[{kind.extra}]'"
        ) from error
