"""For ``postdate bench``: room for a run in a backend, and the least work that it can be. Source: ADR 22."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self


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
    """One run of a benchmark, for which a target makes room.

    Args:
        name: twelve hexadecimal digits, unique.
        queues: names of the queues of the run.
        settings: with which adapters are opened, if they have them: ``synchronous``, ``recording``, ``queue_type``.
        has_store: whether the run's store is in this target, too, and not only its queues.
    """

    name: str
    queues: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    has_store: bool = True


class BenchmarkTarget:
    """A database or broker with room for one run in it: made on entering, removed on leaving, whatever happened.

    A backend refers to a subclass as :attr:`postdate.ports.backends.Backend.benchmark`. ``bench`` does without what a
    subclass leaves out: with this class itself any backend is measured, by its adapters alone. A subclass does things
    and measures nothing: rates and lateness are taken by ``bench``, in the same way for all.

    Args:
        address: of the database or broker, which exists; of the file, which does not.
        run: for which room is made.
    """

    name_parameter: str = ""
    """Parameter of the address by which a process tells the server its name; empty: there is none."""

    moved_at_once: tuple[int, ...] = (1_000,)
    """How many rows a mover may move in one commit; the best of these rates is the limit."""

    server_process: str = ""
    """Name of the server's processes, which all have one parent, where each connection has a process of its own."""

    def __init__(self, address: str, run: BenchmarkRun) -> None:
        self.address, self.run = address, run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def address_of(self, scheme: str) -> str:
        """Return the target's address with another scheme."""
        return f"{scheme}:{self.address.partition(':')[2]}"

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings by which adapters work inside the run's room; each adapter gets those that it has."""
        return {}

    def facts(self) -> Mapping[str, str]:
        """Return settings that decide how fast and durable it is, besides those in the adapters' ``server_facts``."""
        return {}

    def connections(self) -> Sequence[tuple[int, str]]:
        """Return process and name of each connection to the server, our own first; see :attr:`server_process`."""
        return ()

    def settle(self) -> None:
        """Do maintenance that the server would begin after tables were filled, so that it does not during the run."""

    def arrived(self, queue: str) -> Iterable[str] | None:
        """Return the ids of the messages in a queue; ``None``: ``bench`` receives them to count them."""
        return None

    def is_empty(self, queue: str) -> bool:
        """Return whether a queue holds no message, waiting or being handled; only asked where there is a taker."""
        raise NotImplementedError(f"{type(self).__name__} has a taker, and does not say when its queue is empty")

    def remove_queue(self, queue: str) -> None:
        """Delete a queue that is not needed any more, with what is in it."""

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
