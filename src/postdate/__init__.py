"""Postdate keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from postdate.outbox.postgres import PostgresOutbox
    from postdate.outbox.sqlite import SqliteOutbox
    from postdate.ports import (
        DelayedMessageStore,
        DelayExchange,
        ExpiryRules,
        Recording,
        SagaStore,
        TransactionMode,
        Transport,
    )
    from postdate.sagas.memory import MemorySagaStore
    from postdate.sagas.postgres import PostgresSagaStore
    from postdate.sagas.sqlite import SqliteSagaStore
    from postdate.stores.azure_table import AzureTableStore
    from postdate.stores.mariadb import MariaDbStore
    from postdate.stores.memory import MemoryStore
    from postdate.stores.postgres import PostgresStore
    from postdate.stores.sqlite import SqliteStore
    from postdate.stores.sqlserver import SqlServerStore
    from postdate.timeouts.mariadb import MariaDbTimeouts
    from postdate.timeouts.memory import MemoryTimeouts
    from postdate.timeouts.postgres import PostgresTimeouts
    from postdate.timeouts.sqlite import SqliteTimeouts
    from postdate.timeouts.sqlserver import SqlServerTimeouts
    from postdate.transports.azure_queues import AzureStorageQueueTransport
    from postdate.transports.local import LocalTransport
    from postdate.transports.memory import MemoryTransport
    from postdate.transports.msmq import MsmqTransport
    from postdate.transports.postgres import PostgresTransport
    from postdate.transports.rabbitmq import RabbitMqTransport

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
    "MariaDbStore",
    "MariaDbTimeouts",
    "MemorySagaStore",
    "MemoryStore",
    "MemoryTimeouts",
    "MemoryTransport",
    "MoveToError",
    "MsmqTransport",
    "Outbox",
    "PostdateError",
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
    "SqlServerStore",
    "SqlServerTimeouts",
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
    "outbox.postgres": ("PostgresOutbox",),
    "outbox.sqlite": ("SqliteOutbox",),
    "ports": (
        "DelayExchange",
        "DelayedMessageStore",
        "ExpiryRules",
        "Recording",
        "SagaStore",
        "TransactionMode",
        "Transport",
    ),
    "sagas.memory": ("MemorySagaStore",),
    "sagas.postgres": ("PostgresSagaStore",),
    "sagas.sqlite": ("SqliteSagaStore",),
    "stores.azure_table": ("AzureTableStore",),
    "stores.memory": ("MemoryStore",),
    "stores.mariadb": ("MariaDbStore",),
    "stores.postgres": ("PostgresStore",),
    "stores.sqlite": ("SqliteStore",),
    "stores.sqlserver": ("SqlServerStore",),
    "timeouts.mariadb": ("MariaDbTimeouts",),
    "timeouts.memory": ("MemoryTimeouts",),
    "timeouts.postgres": ("PostgresTimeouts",),
    "timeouts.sqlite": ("SqliteTimeouts",),
    "timeouts.sqlserver": ("SqlServerTimeouts",),
    "transports.azure_queues": ("AzureStorageQueueTransport",),
    "transports.local": ("LocalTransport",),
    "transports.memory": ("MemoryTransport",),
    "transports.msmq": ("MsmqTransport",),
    "transports.postgres": ("PostgresTransport",),
    "transports.rabbitmq": ("RabbitMqTransport",),
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
