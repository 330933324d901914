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
    """Store, queues, sagas and timeouts in memory: each made once, when asked; all is lost with the process.

    It shares no transactions, and has no outbox.

    Args:
        recording: how much is kept for audits.
        clock: by which messages expire in queues; ``None``: that of the machine.
    """

    def __init__(self, *, recording: Recording = Recording.ALL, clock: Clock | None = None) -> None:
        super().__init__()
        self._recording, self._clock = recording, clock

    @cached_property
    def store(self) -> MemoryStore:
        """Where delayed messages wait."""
        return self.made(MemoryStore(recording=self._recording))

    @cached_property
    def queues(self) -> MemoryTransport:
        """The queues."""
        return self.made(MemoryTransport() if self._clock is None else MemoryTransport(clock=self._clock))

    @cached_property
    def sagas(self) -> MemorySagaStore:
        """Where saga instances are kept."""
        return self.made(MemorySagaStore())

    @cached_property
    def timeouts(self) -> MemoryTimeouts:
        """Where a timeout manager keeps its timeouts."""
        return self.made(MemoryTimeouts())
