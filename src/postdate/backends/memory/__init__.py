"""Everything in memory: for tests and trials; nothing outlives its process."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

BACKEND: Final = Backend(
    product="memory",
    place=Place.MEMORY,
    addresses=Addresses(("memory",), "memory:"),
    store=Adapter("postdate.backends.memory.store:MemoryStore", frozenset({"recording", "largest_message_bytes"})),
    transport=Adapter(
        "postdate.backends.memory.transport:MemoryTransport", frozenset({"largest_message_bytes", "clock"})
    ),
)
