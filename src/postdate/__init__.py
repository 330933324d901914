"""Postdate keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost."""

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
