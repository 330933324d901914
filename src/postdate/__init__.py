"""Postdate keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.backends.azure.database import AzureStorage
    from postdate.backends.azure.store import AzureTableStore as AzureTableStore
    from postdate.backends.azure.transport import AzureStorageQueueTransport as AzureStorageQueueTransport
    from postdate.backends.mariadb.database import MariaDb
    from postdate.backends.mariadb.store import MariaDbStore as MariaDbStore
    from postdate.backends.mariadb.timeouts import MariaDbTimeouts as MariaDbTimeouts
    from postdate.backends.memory.database import (
        Memory,
        MemorySagaStore as MemorySagaStore,
        MemoryTimeouts as MemoryTimeouts,
    )
    from postdate.backends.memory.store import MemoryStore as MemoryStore
    from postdate.backends.memory.transport import MemoryTransport as MemoryTransport
    from postdate.backends.msmq.transport import Msmq, MsmqTransport as MsmqTransport
    from postdate.backends.postgres.database import Postgres
    from postdate.backends.postgres.outbox import PostgresOutbox as PostgresOutbox
    from postdate.backends.postgres.sagas import PostgresSagaStore as PostgresSagaStore
    from postdate.backends.postgres.store import PostgresStore as PostgresStore
    from postdate.backends.postgres.timeouts import PostgresTimeouts as PostgresTimeouts
    from postdate.backends.postgres.transport import PostgresTransport as PostgresTransport
    from postdate.backends.rabbitmq.transport import RabbitMq, RabbitMqTransport as RabbitMqTransport
    from postdate.backends.sqlite.database import Sqlite
    from postdate.backends.sqlite.outbox import SqliteOutbox as SqliteOutbox
    from postdate.backends.sqlite.sagas import SqliteSagaStore as SqliteSagaStore
    from postdate.backends.sqlite.store import SqliteStore as SqliteStore
    from postdate.backends.sqlite.timeouts import SqliteTimeouts as SqliteTimeouts
    from postdate.backends.sqlite.transport import LocalTransport as LocalTransport
    from postdate.backends.sqlserver.database import SqlServer
    from postdate.backends.sqlserver.store import SqlServerStore as SqlServerStore
    from postdate.backends.sqlserver.timeouts import SqlServerTimeouts as SqlServerTimeouts
    from postdate.client.client import BlockingClient as BlockingClient, Client as Client, connect
    from postdate.clock import Clock as Clock, ScaledClock as ScaledClock, SystemClock as SystemClock
    from postdate.core.changes import Pending as Pending
    from postdate.core.limits import Limits as Limits
    from postdate.core.recoverability import (
        DelayedRetry as DelayedRetry,
        Discard as Discard,
        ImmediateRetry as ImmediateRetry,
        MoveToError as MoveToError,
        Recoverability,
    )
    from postdate.endpoint.endpoint import BlockingEndpoint, Endpoint
    from postdate.endpoint.handler_context import HandlerContext
    from postdate.endpoint.message_types import message, time_to_be_received
    from postdate.endpoint.outbox import Outbox
    from postdate.endpoint.plain_handlers import BlockingHandlerContext as BlockingHandlerContext
    from postdate.endpoint.sagas import Saga, handles, handles_reply, handles_timeout, started_by
    from postdate.endpoint.send_options import SendOptions as SendOptions
    from postdate.endpoint.settings import (
        Audit,
        DelayedDelivery,
        TimeoutManager,
        ExternalTimeoutManager as ExternalTimeoutManager,
    )
    from postdate.errors import PostdateError as PostdateError
    from postdate.messages import DelayedMessage, Envelope as Envelope, Headers as Headers, Origin as Origin
    from postdate.ports import (
        Answer as Answer,
        DelayedMessageStore,
        TransactionMode,
        Transport,
        DelayExchange as DelayExchange,
        ExpiryRules as ExpiryRules,
        Recording as Recording,
        SagaStore as SagaStore,
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "Audit",
    "AzureStorage",
    "BlockingEndpoint",
    "DelayedDelivery",
    "DelayedMessage",
    "DelayedMessageStore",
    "Endpoint",
    "HandlerContext",
    "MariaDb",
    "Memory",
    "Msmq",
    "Outbox",
    "Postgres",
    "RabbitMq",
    "Recoverability",
    "Saga",
    "SqlServer",
    "Sqlite",
    "TimeoutManager",
    "TransactionMode",
    "Transport",
    "connect",
    "handles",
    "handles_reply",
    "handles_timeout",
    "message",
    "started_by",
    "time_to_be_received",
]
"""The front door. The adapters that database objects make, and other names below, are found here as well."""

# Imported at first use: `postdate --help` and Spark's executors start several times as fast without the rest.
_NAMES_BY_MODULE = {
    "client.client": ("BlockingClient", "Client", "connect"),
    "core.changes": ("Pending",),
    "core.limits": ("Limits",),
    "clock": ("Clock", "ScaledClock", "SystemClock"),
    "core.recoverability": ("DelayedRetry", "Discard", "ImmediateRetry", "MoveToError", "Recoverability"),
    "endpoint.endpoint": ("BlockingEndpoint", "Endpoint"),
    "endpoint.message_types": ("message", "time_to_be_received"),
    "endpoint.handler_context": ("HandlerContext",),
    "endpoint.plain_handlers": ("BlockingHandlerContext",),
    "endpoint.outbox": ("Outbox",),
    "endpoint.send_options": ("SendOptions",),
    "endpoint.sagas": ("Saga", "handles", "handles_reply", "handles_timeout", "started_by"),
    "endpoint.settings": ("Audit", "DelayedDelivery", "ExternalTimeoutManager", "TimeoutManager"),
    "errors": ("PostdateError",),
    "messages": ("DelayedMessage", "Envelope", "Headers", "Origin"),
    "backends.azure.database": ("AzureStorage",),
    "backends.memory.database": ("Memory", "MemorySagaStore", "MemoryTimeouts"),
    "backends.postgres.database": ("Postgres",),
    "backends.sqlite.database": ("Sqlite",),
    "backends.postgres.outbox": ("PostgresOutbox",),
    "backends.sqlite.outbox": ("SqliteOutbox",),
    "ports": (
        "Answer",
        "DelayExchange",
        "DelayedMessageStore",
        "ExpiryRules",
        "Recording",
        "SagaStore",
        "TransactionMode",
        "Transport",
    ),
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
    "backends.postgres.timeouts": ("PostgresTimeouts",),
    "backends.sqlite.timeouts": ("SqliteTimeouts",),
    "backends.sqlserver.timeouts": ("SqlServerTimeouts",),
    "backends.azure.transport": ("AzureStorageQueueTransport",),
    "backends.sqlite.transport": ("LocalTransport",),
    "backends.memory.transport": ("MemoryTransport",),
    "backends.msmq.transport": ("Msmq", "MsmqTransport"),
    "backends.postgres.transport": ("PostgresTransport",),
    "backends.rabbitmq.transport": ("RabbitMq", "RabbitMqTransport"),
}
_MODULES_BY_NAME = {name: f"{__name__}.{room}" for room, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    module_name = _MODULES_BY_NAME.get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        from postdate.errors import extra_of

        if (extra := extra_of(error)) is None:
            raise
        advice = f"{name} needs {error.name}: pip install 'postdate[{extra}]'"
        raise ModuleNotFoundError(advice, name=error.name) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES_BY_NAME})
