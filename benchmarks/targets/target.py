"""A database or broker to compare with: the least work that the same thing can be. Source: ADR 22."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from postdate.errors import ConfigurationError
from postdate.ports.backends import Scratch


class BareRow(NamedTuple):
    """A message in a bare table.

    Args:
        message_id: unique in the run.
        due: microseconds since 1970 UTC.
        headers: encoded.
        body: bytes.
    """

    message_id: str
    due: int
    headers: str
    body: bytes


Mover = Callable[[int], int]
"""Moves a batch of rows that are due before an instant (microseconds since 1970), durably, and says how many."""

Inserter = Callable[[Sequence[BareRow]], Callable[[], object]]
"""Prepares rows, and returns what inserts them in one commit; only that is timed."""

Taker = Callable[[], int]
"""Takes a batch of messages off a queue in one commit, headers and body read, and says how many; 0: it is empty."""


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """One run of a benchmark.

    Args:
        name: twelve hexadecimal digits, unique.
        settings: with which adapters are opened, if they have them: ``synchronous``, ``recording``, ``queue_type``.
        has_store: whether the run's store is in this target, too, and not only its queues.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    has_store: bool = True


class BenchmarkTarget:
    """A database or broker with a place for one run, and the barest ways to do there what adapters do.

    A subclass does things and measures nothing: rates and lateness are taken by ``benchmarks``, in the same way for
    all. What a subclass leaves out, ``benchmarks`` does without; with this class itself any backend is measured, by its
    adapters alone.

    Args:
        scratch: the place of the run, which its backend made and removes.
        run: that is measured.
    """

    name_parameter: str = ""
    """Parameter of the address by which a process tells the server its name; empty: there is none."""

    moved_at_once: tuple[int, ...] = (1_000,)
    """How many rows a mover may move in one commit; the best of these rates is the limit."""

    server_process: str = ""
    """Name of the server's processes, which all have one parent, where each connection has a process of its own."""

    def __init__(self, scratch: Scratch, run: BenchmarkRun) -> None:
        self.scratch, self.run = scratch, run
        self.address = scratch.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def facts(self) -> Mapping[str, str]:
        """Return settings that decide how fast and durable it is, besides those that the adapters tell."""
        return {}

    def connections(self) -> Sequence[tuple[int, str]]:
        """Return process and name of each connection to the server, our own first; see :attr:`server_process`."""
        return ()

    def settle(self) -> None:
        """Do maintenance that the server would begin after tables were filled, so that it does not during the run."""

    def arrived(self, queue: str) -> Iterable[str] | None:
        """Return the ids of the messages in a queue; ``None``: they are received and counted."""
        return None

    def is_empty(self, queue: str) -> bool:
        """Return whether a queue holds no message, waiting or being handled; only asked where there is a taker."""
        raise NotImplementedError(f"{type(self).__name__} has a taker, and does not say when its queue is empty")

    def take(self, queue: str, limit: int) -> list[str]:
        """Take up to ``limit`` messages off a queue and return their ids.

        Raises:
            ConfigurationError: only the transport can take messages off these queues.
        """
        raise ConfigurationError(
            "nothing but their transport takes messages off these queues: choose queues of SQLite, "
            "PostgreSQL, RabbitMQ or Azure Storage"
        )

    # --- the barest way -----------------------------------------------------------------------------------------

    def moved_per_second(self, n: int) -> float | None:
        """Return messages a second without an adapter, where :meth:`mover` cannot tell; ``None``: it can."""
        return None

    def mover(self, rows: Iterable[BareRow], at_once: int) -> AbstractContextManager[Mover] | None:
        """Fill a bare table, from which the mover moves up to ``at_once`` due rows a call into a bare queue.

        ``None``: sending through the transport alone is measured instead.
        """
        return None

    def inserter(self) -> AbstractContextManager[Inserter] | None:
        """Make a bare table with an index on the due time; ``None``: there is no barer way to store."""
        return None

    def taker(self, queue: str) -> AbstractContextManager[Taker] | None:
        """Return a function that takes messages off a queue without the transport; ``None``: there is none."""
        return None
