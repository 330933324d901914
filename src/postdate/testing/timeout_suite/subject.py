"""How a storage of timeouts under test is opened, and the timeouts that the suite keeps there."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from postdate.ports import Transport
from postdate.ports.timeouts import Timeout, TimeoutPersister

ENDPOINT = "Sales.Conformance"
QUEUE = "conformance"
NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
SAGA = "5a9a0000-0000-4000-8000-00000000000a"


class TimeoutSubject(ABC):
    """How the suite opens the storage under test. Make a new subject, on empty storage, for every check.

    Attributes:
        durable: whether it outlives its handles, and several processes may share it.
        precision: how much later than asked for a timeout may be kept.
    """

    durable: bool = True
    precision: timedelta = MICROSECOND

    @abstractmethod
    def open(self) -> TimeoutPersister:
        """Return a handle on the storage; called again after the first handle was closed, it is the same storage."""

    def open_elsewhere(self) -> TimeoutPersister:
        """Return a handle as another process would have it. Only called for storage that is ``durable``."""
        return self.open()

    def removing_elsewhere(self, timeout_id: str) -> AbstractContextManager[None]:
        """Remove a timeout in another transaction, which is open inside the block and rolled back at its end.

        Only called for storage that is ``durable``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define removing_elsewhere(): its storage is shared")

    def transport(self) -> Transport:
        """Return queues in the same database. Only called for :class:`postdate.ports.timeouts.TimeoutPersister`."""
        raise NotImplementedError(f"{type(self).__name__} must define transport(): its storage names a database")


@asynccontextmanager
async def prepared(persister: TimeoutPersister, endpoint: str = ENDPOINT) -> AsyncGenerator[TimeoutPersister]:
    """Prepare a handle as a timeout manager does it, and close it at the end."""
    try:
        await persister.initialize(endpoint)
        await persister.setup()
        yield persister
    finally:
        await persister.close()


@asynccontextmanager
async def storage(subject: TimeoutSubject) -> AsyncGenerator[tuple[TimeoutPersister]]:
    """Prepare a handle for a check that needs no more."""
    async with prepared(subject.open()) as persister:
        yield (persister,)


def timeout_id(number: int) -> str:
    """Return an id; ids are ordered as their numbers."""
    return str(uuid.UUID(int=number))


def timeout(
    number: int = 1,
    due: datetime = NOW,
    *,
    saga_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"body",
) -> Timeout:
    """Return a timeout of the suite's endpoint."""
    return Timeout(timeout_id(number), due, QUEUE, saga_id, ENDPOINT, headers or {"kind": "check"}, body)


def named(name: str, of: Timeout) -> Timeout:
    """Return a timeout under another spelling of its id."""
    return replace(of, timeout_id=name)
