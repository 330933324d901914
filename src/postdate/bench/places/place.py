"""What a benchmark needs of the file or server that it measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from postdate.bench.result import Lateness
from postdate.bench.site import Opening
from postdate.errors import ConfigurationError


class Place(ABC):
    """A file or server, with room for one run in it: made on entering, gone after leaving, whatever happened.

    Args:
        run: twelve hexadecimal digits that make its names unique.
    """

    name: str
    is_server = True

    def __init__(self, run: str) -> None:
        self.run = run

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Return the version, and the settings that decide how durable and how fast it is."""

    def cpu_seconds(self) -> float | None:
        """Return the processor time that the server used so far; None when it runs elsewhere."""
        return None

    def cpu_seconds_by_role(self) -> Mapping[str, float]:
        """Return the same of the connections of each role of process, as far as they can be told apart."""
        return {}

    def settle(self) -> None:
        """Do what the server would do in a quiet hour after it was filled."""
        return


class StorePlace(Place):
    """A place for a store."""

    @property
    @abstractmethod
    def store(self) -> Opening:
        """How to open the store."""

    @property
    def fillers(self) -> int:
        """How many processes fill it fastest."""
        return 1

    @abstractmethod
    def insert_limit(self, n: int, batch: int) -> float:
        """Return rows a second of inserting bare rows, ``batch`` a commit."""

    def idle_transaction(self) -> AbstractContextManager[None]:
        """Hold a snapshot open, as a forgotten transaction does."""
        raise ConfigurationError(f"--idle-transaction needs a store that keeps old row versions; {self.name} does not")


class ScannedPlace(StorePlace):
    """A place for a store whose rows can be read in bulk without us."""

    @abstractmethod
    def scan_limit(self, endpoint: str) -> float:
        """Return rows a second of reading all waiting messages of an endpoint in the barest way."""


class QueuePlace(Place):
    """A place for queues."""

    @property
    @abstractmethod
    def transport(self) -> Opening:
        """How to open the transport."""

    @abstractmethod
    def move_limit(self, n: int) -> float:
        """Return messages a second of the barest way to put ``n`` messages into a queue."""

    @abstractmethod
    def floor(self, rate: int, seconds: float) -> Lateness:
        """Return how late the barest loop is that does so with each message when it is due."""

    @abstractmethod
    def arrived(self, queue: str) -> Iterator[str]:
        """Yield the id of every message in a queue; the messages may be gone from it afterwards."""

    @abstractmethod
    def take(self, queue: str, limit: int) -> list[str]:
        """Take up to ``limit`` messages off a queue, by the shortest way, and return their ids."""


class ReceivedPlace(QueuePlace):
    """A place for queues whose messages can be taken off without us, as fast as the server gives them."""

    @abstractmethod
    def receive_limit(self, queue: str, n: int) -> float:
        """Return messages a second of taking all ``n`` messages off a queue in the barest way, headers and body read.

        Raises:
            PostdateError: there were not so many.
        """

    @abstractmethod
    def is_empty(self, queue: str) -> bool:
        """Return whether a queue holds no message, neither a waiting one nor one that is being handled."""
