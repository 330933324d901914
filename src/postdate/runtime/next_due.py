"""The next-due cache: the next attempt of a store as far as it is known without a query, and when to wake its poller.

:meth:`NextDue.start_query` announces a query of stored messages, and :meth:`NextDue.finish_query` ends it. Messages
that are stored, released, or announced by other processes go to :meth:`NextDue.announce`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, Generic, TypeVar

from postdate.runtime import forks

T = TypeVar("T", int, datetime)

_MOST_QUERIES: Final = 64


class NextDue(Generic[T]):
    """The earliest known attempt of a store. Thread-safe.

    All instants have one type: microseconds since 1970 UTC, or date-times in UTC.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._earliest: T | None = None
        self._queries: dict[int, T | None] = {}
        self._last_query = 0
        self._wakes: list[Callable[[], None]] = []

    @property
    def has_listeners(self) -> bool:
        return bool(self._wakes)

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` when a message may be attempted before all known ones; return a function that stops this."""
        with self._lock:
            self._wakes.append(wake)

        def stop() -> None:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)

        return stop

    def start_query(self) -> int:
        """Return the number of a query that begins now. It may not see messages that are announced from now on."""
        with self._lock:
            self._last_query += 1
            self._queries[self._last_query] = None
            if len(self._queries) > _MOST_QUERIES:  # a query that failed never calls seen()
                del self._queries[min(self._queries)]
            return self._last_query

    def finish_query(self, query: int, earliest: T | None) -> T | None:
        """Record the earliest attempt that a query saw; return when to query again.

        The result also counts the messages that were announced since the query began, because the query may not have
        seen them.
        """
        with self._lock:
            return self._set_earliest(self._queries.pop(query, None), earliest)

    def _set_earliest(self, announced_attempt: T | None, earliest: T | None) -> T | None:
        if announced_attempt is not None and (earliest is None or announced_attempt < earliest):
            earliest = announced_attempt
        self._earliest = earliest
        return earliest

    def announce(self, attempt_at: T) -> None:
        """Record a message that may be attempted at an instant; wake listeners if that is before all known ones."""
        with self._lock:
            for query, announced_attempt in self._queries.items():
                self._queries[query] = attempt_at if announced_attempt is None else min(announced_attempt, attempt_at)
            if self._earliest is not None and attempt_at >= self._earliest:
                return
            self._earliest = attempt_at
            wakes = list(self._wakes)
        # Outside of the lock, which is not re-entrant: a listener may call this object.
        for wake in wakes:
            wake()

    def forget(self) -> None:
        """Forget the earliest attempt, because messages may be attempted at any time, and wake listeners."""
        with self._lock:
            self._earliest = None
            wakes = list(self._wakes)
        for wake in wakes:
            wake()
