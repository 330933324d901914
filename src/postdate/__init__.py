"""Postdate keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.backends.azure.store import AzureTableStore
    from postdate.backends.azure.transport import AzureStorageQueueTransport
    from postdate.backends.mariadb.database import MariaDb
    from postdate.backends.mariadb.store import MariaDbStore
    from postdate.backends.mariadb.timeouts import MariaDbTimeouts
    from postdate.backends.memory.database import Memory
    from postdate.backends.memory.sagas import MemorySagaStore
    from postdate.backends.memory.store import MemoryStore
    from postdate.backends.memory.timeouts import MemoryTimeouts
    from postdate.backends.memory.transport import MemoryTransport
    from postdate.backends.msmq.transport import MsmqTransport
    from postdate.backends.postgres.database import Postgres
    from postdate.backends.postgres.outbox import PostgresOutbox
    from postdate.backends.postgres.sagas import PostgresSagaStore
    from postdate.backends.postgres.store import PostgresStore
    from postdate.backends.postgres.timeouts import PostgresTimeouts
    from postdate.backends.postgres.transport import PostgresTransport
    from postdate.backends.rabbitmq.transport import RabbitMqTransport
    from postdate.backends.sqlite.database import Sqlite
    from postdate.backends.sqlite.outbox import SqliteOutbox
    from postdate.backends.sqlite.sagas import SqliteSagaStore
    from postdate.backends.sqlite.store import SqliteStore
    from postdate.backends.sqlite.timeouts import SqliteTimeouts
    from postdate.backends.sqlite.transport import LocalTransport
    from postdate.backends.sqlserver.database import SqlServer
    from postdate.backends.sqlserver.store import SqlServerStore
    from postdate.backends.sqlserver.timeouts import SqlServerTimeouts
    from postdate.clock import Clock, ScaledClock, SystemClock
    from postdate.core.recoverability import DelayedRetry, Discard, ImmediateRetry, MoveToError, Recoverability
    from postdate.endpoint.audit import Audit
    from postdate.endpoint.blocking import BlockingEndpoint
    from postdate.endpoint.endpoint import Endpoint
    from postdate.endpoint.handling import HandlerContext
    from postdate.endpoint.outbox import Outbox
    from postdate.endpoint.sagas import Saga, handles, handles_reply, handles_timeout, started_by
    from postdate.endpoint.sending import SendOptions
    from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
    from postdate.endpoint.time_to_be_received import time_to_be_received
    from postdate.errors import PostdateError
    from postdate.messages import DelayedMessage, Envelope, Headers
    from postdate.ports import (
        DelayedMessageStore,
        DelayExchange,
        ExpiryRules,
        Recording,
        SagaStore,
        TransactionMode,
        Transport,
    )

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "AzureStorageQueueTransport",
    "AzureTableStore",
    "BlockingEndpoint",
    "Clock",
    "DelayExchange",
    "DelayedDelivery",
    "DelayedMessage",
    "DelayedMessageStore",
    "DelayedRetry",
    "Discard",
    "Endpoint",
    "Envelope",
    "ExpiryRules",
    "ExternalTimeoutManager",
    "HandlerContext",
    "Headers",
    "ImmediateRetry",
    "LocalTransport",
    "MariaDb",
    "MariaDbStore",
    "MariaDbTimeouts",
    "Memory",
    "MemorySagaStore",
    "MemoryStore",
    "MemoryTimeouts",
    "MemoryTransport",
    "MoveToError",
    "MsmqTransport",
    "Outbox",
    "PostdateError",
    "Postgres",
    "PostgresOutbox",
    "PostgresSagaStore",
    "PostgresStore",
    "PostgresTimeouts",
    "PostgresTransport",
    "RabbitMqTransport",
    "Recording",
    "Recoverability",
    "Saga",
    "SagaStore",
    "ScaledClock",
    "SendOptions",
    "SqlServer",
    "SqlServerStore",
    "SqlServerTimeouts",
    "Sqlite",
    "SqliteOutbox",
    "SqliteSagaStore",
    "SqliteStore",
    "SqliteTimeouts",
    "SystemClock",
    "TimeoutManager",
    "TransactionMode",
    "Transport",
    "__version__",
    "handles",
    "handles_reply",
    "handles_timeout",
    "started_by",
    "time_to_be_received",
]

# Imported at first use: `postdate --help` and Spark's executors start several times as fast without the rest.
_ROOMS = {
    "clock": ("Clock", "ScaledClock", "SystemClock"),
    "core.recoverability": ("DelayedRetry", "Discard", "ImmediateRetry", "MoveToError", "Recoverability"),
    "endpoint.audit": ("Audit",),
    "endpoint.blocking": ("BlockingEndpoint",),
    "endpoint.endpoint": ("Endpoint",),
    "endpoint.handling": ("HandlerContext",),
    "endpoint.outbox": ("Outbox",),
    "endpoint.sagas": ("Saga", "handles", "handles_reply", "handles_timeout", "started_by"),
    "endpoint.sending": ("SendOptions",),
    "endpoint.settings": ("DelayedDelivery", "ExternalTimeoutManager", "TimeoutManager"),
    "endpoint.time_to_be_received": ("time_to_be_received",),
    "errors": ("PostdateError",),
    "messages": ("DelayedMessage", "Envelope", "Headers"),
    "backends.memory.database": ("Memory",),
    "backends.postgres.database": ("Postgres",),
    "backends.sqlite.database": ("Sqlite",),
    "backends.postgres.outbox": ("PostgresOutbox",),
    "backends.sqlite.outbox": ("SqliteOutbox",),
    "ports": (
        "DelayExchange",
        "DelayedMessageStore",
        "ExpiryRules",
        "Recording",
        "SagaStore",
        "TransactionMode",
        "Transport",
    ),
    "backends.memory.sagas": ("MemorySagaStore",),
    "backends.postgres.sagas": ("PostgresSagaStore",),
    "backends.sqlite.sagas": ("SqliteSagaStore",),
    "backends.azure.store": ("AzureTableStore",),
    "backends.memory.store": ("MemoryStore",),
    "backends.mariadb.database": ("MariaDb",),
    "backends.mariadb.store": ("MariaDbStore",),
    "backends.postgres.store": ("PostgresStore",),
    "backends.sqlite.store": ("SqliteStore",),
    "backends.sqlserver.database": ("SqlServer",),
    "backends.sqlserver.store": ("SqlServerStore",),
    "backends.mariadb.timeouts": ("MariaDbTimeouts",),
    "backends.memory.timeouts": ("MemoryTimeouts",),
    "backends.postgres.timeouts": ("PostgresTimeouts",),
    "backends.sqlite.timeouts": ("SqliteTimeouts",),
    "backends.sqlserver.timeouts": ("SqlServerTimeouts",),
    "backends.azure.transport": ("AzureStorageQueueTransport",),
    "backends.sqlite.transport": ("LocalTransport",),
    "backends.memory.transport": ("MemoryTransport",),
    "backends.msmq.transport": ("MsmqTransport",),
    "backends.postgres.transport": ("PostgresTransport",),
    "backends.rabbitmq.transport": ("RabbitMqTransport",),
}
_EXTRAS = {"aiohttp": "azure", "azure": "azure", "psycopg": "postgres", "pymysql": "mariadb", "pytds": "sqlserver"}
_HOMES = {name: f"{__name__}.{room}" for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise ImportError(f"{name} needs {error.name}: pip install 'postdate[{extra}]'", name=error.name) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
