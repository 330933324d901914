"""Everything in memory: for tests and trials; nothing outlives its process."""

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
