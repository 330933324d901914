"""The memory of this process as one object, for tests and trials. Source: ADR 0021."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.memory.sagas import MemorySagaStore
from postdate.backends.memory.store import MemoryStore
from postdate.backends.memory.timeouts import MemoryTimeouts
from postdate.backends.memory.transport import MemoryTransport
from postdate.clock import Clock
from postdate.persistence.databases import DatabaseObject
from postdate.ports import Recording


class Memory(DatabaseObject):
    """Store, queues, sagas and timeouts in memory: each is made once, at first use; all is lost with the process.

    It shares no transactions, and has no outbox.

    Args:
        recording: how much is kept for audits.
        clock: by which messages expire in queues; ``None``: the machine's.
    """

    def __init__(self, *, recording: Recording = Recording.ALL, clock: Clock | None = None) -> None:
        super().__init__()
        self._recording, self._clock = recording, clock

    @cached_property
    def store(self) -> MemoryStore:
        """The store of delayed messages."""
        return self.made(MemoryStore(recording=self._recording))

    @cached_property
    def queues(self) -> MemoryTransport:
        """The transport."""
        return self.made(MemoryTransport() if self._clock is None else MemoryTransport(clock=self._clock))

    @cached_property
    def sagas(self) -> MemorySagaStore:
        """The saga store."""
        return self.made(MemorySagaStore())

    @cached_property
    def timeouts(self) -> MemoryTimeouts:
        """The timeouts of a timeout manager."""
        return self.made(MemoryTimeouts())
