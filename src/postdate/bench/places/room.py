"""A place on a server whose backend says itself how it is measured (:mod:`postdate.ports.benchmarks`)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Final, Self

from postdate.bench.limits.sleep import due_times, moving_floor
from postdate.bench.places.place import QueuePlace, StorePlace
from postdate.bench.result import Lateness
from postdate.bench.site import Opening
from postdate.bench.system import LOOPBACK, cpu_seconds, listening_pid
from postdate.bench.workload import BODY
from postdate.ports.benchmarks import BenchRoom

_AT_ONCE: Final = 1_000


class RoomPlace(StorePlace, QueuePlace):
    """Store and queues in one room of a server.

    Args:
        run: see :class:`Place`.
        name: of the kind of store.
        opens: makes the room.
        recording: how much the store records.
    """

    def __init__(self, run: str, name: str, opens: Callable[[], BenchRoom], recording: str) -> None:
        super().__init__(run)
        self.name, self._opens, self._recording = name, opens, recording
        self._opened: BenchRoom | None = None

    @property
    def _room(self) -> BenchRoom:
        assert self._opened is not None
        return self._opened

    def __enter__(self) -> Self:
        self._opened = self._opens()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.close()

    @property
    def store(self) -> Opening:
        """See :class:`StorePlace`."""
        return Opening(self._room.address, {"recording": self._recording})

    @property
    def transport(self) -> Opening:
        """See :class:`QueuePlace`."""
        return Opening(self._room.address, {"recording": self._recording})

    def facts(self) -> Mapping[str, str]:
        """See :class:`Place`."""
        return self._room.facts()

    def cpu_seconds(self) -> float | None:
        """See :class:`Place`."""
        host, port = self._room.endpoint
        pid = listening_pid(port) if host in LOOPBACK else None
        return None if pid is None else cpu_seconds(pid)

    def insert_limit(self, n: int, batch: int) -> float:
        """See :class:`StorePlace`."""
        return _rate(lambda count: self._room.insert(count, BODY), n, batch)

    def move_limit(self, n: int) -> float:
        """See :class:`QueuePlace`."""
        return _rate(lambda count: self._room.put(count, BODY), n, _AT_ONCE)

    def floor(self, rate: int, seconds: float) -> Lateness:
        """See :class:`QueuePlace`."""
        dues, sent = due_times(rate, seconds), 0

        def move(now: float) -> int:
            nonlocal sent
            due = bisect_left(dues, now) - sent
            if due:
                self._room.put(due, BODY)
            sent += due
            return due

        return moving_floor(dues, move)

    def arrived(self, queue: str) -> Iterator[str]:
        """See :class:`QueuePlace`."""
        return self._room.ids(queue)

    def take(self, queue: str, limit: int) -> list[str]:
        """See :class:`QueuePlace`."""
        return self._room.take(queue, limit)


def _rate(write: Callable[[int], None], n: int, batch: int) -> float:
    started, left = time.perf_counter(), n
    while left > 0:
        count = min(batch, left)
        write(count)
        left -= count
    return n / (time.perf_counter() - started)
