"""Postdate keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.clock import Clock, ScaledClock, SystemClock
    from postdate.core.recoverability import Recoverability
    from postdate.endpoint.blocking import BlockingEndpoint
    from postdate.endpoint.endpoint import Endpoint, HandlerContext
    from postdate.endpoint.sending import SendOptions
    from postdate.endpoint.settings import DelayedDelivery
    from postdate.errors import PostdateError
    from postdate.messages import DelayedMessage, Envelope, Headers
    from postdate.ports import DelayedMessageStore, Recording, TransactionMode, Transport
    from postdate.stores.memory import MemoryStore
    from postdate.stores.sqlite import SqliteStore
    from postdate.transports.local import LocalTransport
    from postdate.transports.memory import MemoryTransport

__version__ = "0.1.0"

__all__ = [
    "BlockingEndpoint",
    "Clock",
    "DelayedDelivery",
    "DelayedMessage",
    "DelayedMessageStore",
    "Endpoint",
    "Envelope",
    "HandlerContext",
    "Headers",
    "LocalTransport",
    "MemoryStore",
    "MemoryTransport",
    "PostdateError",
    "Recording",
    "Recoverability",
    "ScaledClock",
    "SendOptions",
    "SqliteStore",
    "SystemClock",
    "TransactionMode",
    "Transport",
    "__version__",
]

# Imported at first use: `postdate --help` and Spark's executors start several times as fast without the rest.
_ROOMS = {
    "clock": ("Clock", "ScaledClock", "SystemClock"),
    "core.recoverability": ("Recoverability",),
    "endpoint.blocking": ("BlockingEndpoint",),
    "endpoint.endpoint": ("Endpoint", "HandlerContext"),
    "endpoint.sending": ("SendOptions",),
    "endpoint.settings": ("DelayedDelivery",),
    "errors": ("PostdateError",),
    "messages": ("DelayedMessage", "Envelope", "Headers"),
    "ports": ("DelayedMessageStore", "Recording", "TransactionMode", "Transport"),
    "stores.memory": ("MemoryStore",),
    "stores.sqlite": ("SqliteStore",),
    "transports.local": ("LocalTransport",),
    "transports.memory": ("MemoryTransport",),
}
_HOMES = {name: f"{__name__}.{room}" for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
