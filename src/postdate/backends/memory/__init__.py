"""A store, queues, sagas and timeouts in the memory of one process, for tests and trials.

Nothing survives the process.

Differences from the other backends: there is no I/O, so no call fails by itself. Tests wrap these classes to make calls
fail. Store and queues share no transactions.

Read ``store`` first, the smallest complete store; then ``transport``.
"""

from dataclasses import dataclass
from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.common import Recording
from postdate.ports.settings import HowMuchIsRecorded, LimitedMessages


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInMemory(LimitedMessages):
    """Settings of the store."""

    recording: HowMuchIsRecorded = Recording.ALL


BACKEND: Final = Backend(
    product="memory",
    place=Place.MEMORY,
    addresses=Addresses(("memory",), "memory:"),
    store=Adapter("postdate.backends.memory.store:MemoryStore", KeptInMemory),
    transport=Adapter(
        "postdate.backends.memory.transport:MemoryTransport", LimitedMessages, arguments=frozenset({"clock"})
    ),
)
