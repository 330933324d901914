"""What the timeout manager needs from the storage of its timeouts. Source: specification 4.5, 4.6; ADR 0014."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, runtime_checkable

from postdate.ports.common import Work


@dataclass(frozen=True, slots=True)
class Timeout:
    """One stored timeout.

    Args:
        timeout_id: a UUID as text, lower case with hyphens. Whoever stores it chooses it, so that storing twice is
            noticed; upstream lets its storage choose, and stores a message twice that is received twice.
        due: aware, UTC. Storage with coarser times rounds it up, so that nothing fires early.
        destination: where it is sent; 1 to 200 characters.
        saga_id: a UUID as text; ``None``: it belongs to no saga.
        owner: the endpoint whose timeout manager keeps it.
        headers: of the message, unchanged.
        body: of the message, unchanged.
    """

    timeout_id: str
    due: datetime
    destination: str
    saga_id: str | None = None
    owner: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class DueTimeout:
    """A timeout that is due, as far as the poller needs to know it."""

    timeout_id: str
    due: datetime


@dataclass(frozen=True, slots=True)
class DueChunk:
    """What one query for due timeouts found.

    Args:
        due: by due time; among equal ones by id.
        next_query: when there may be more: ``now`` when the chunk was cut by its limit, else the earliest due time
            after ``now``; ``None`` when nothing else is stored.
    """

    due: Sequence[DueTimeout]
    next_query: datetime | None


@runtime_checkable
class TimeoutPersister(Protocol):
    """Where a timeout manager keeps its timeouts. Every method may be called by several processes at once."""

    async def initialize(self, endpoint: str) -> None:
        """Settle whose timeouts these are. Asks no server: an endpoint starts while its storage is down (row 102)."""
        ...

    async def setup(self) -> None:
        """Create what is missing; idempotent, and safe when several processes do it at once."""
        ...

    async def add(self, timeout: Timeout) -> bool:
        """Keep a timeout; ``False`` when its id is stored already, which changes nothing."""
        ...

    async def peek(self, timeout_id: str) -> Timeout | None:
        """Return a timeout, or ``None`` when it is gone; takes no lock."""
        ...

    async def try_remove(self, timeout_id: str) -> bool:
        """Remove a timeout; ``False`` when it is gone. Of several callers, one is told ``True``."""
        ...

    async def remove_by_saga(self, saga_id: str) -> int:
        """Remove all timeouts of a saga; return how many there were."""
        ...

    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        """Return timeouts due after ``start``, exclusive, and until ``now``, inclusive.

        Args:
            start: aware UTC, exclusive.
            now: aware UTC, inclusive.
            limit: about how many at most. A chunk never ends between timeouts of one due time, so that the next may
                start after the last one's.
        """
        ...

    async def close(self) -> None:
        """Release connections; a second time without effect."""
        ...


@runtime_checkable
class EnlistingTimeouts(TimeoutPersister, Protocol):
    """Storage whose writes can be part of a transaction of the queues, when both share a database."""

    @property
    def database(self) -> object:
        """Identity of the database; see :class:`postdate.ports.TransportCapabilities`."""
        ...

    def adding(self, timeout: Timeout) -> Work:
        """Return the work that keeps ``timeout``; nothing when its id is stored already."""
        ...

    def removing(self, timeout_id: str) -> Work:
        """Return the work that removes a timeout.

        The work raises :class:`~postdate.errors.TimeoutConcurrentlyProcessed` when the timeout is gone.
        """
        ...

    def removing_by_saga(self, saga_id: str) -> Work:
        """Return the work that removes all timeouts of a saga."""
        ...
