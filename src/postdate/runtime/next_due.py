"""The next-due cache: the next attempt of a store as far as it is known without a query, and when to wake its poller.

:meth:`NextDue.look` announces a query of stored messages, and :meth:`NextDue.seen` ends it. Messages that are stored,
released, or announced by other processes go to :meth:`NextDue.announce`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, Generic, TypeVar

from postdate.runtime import forks

T = TypeVar("T", int, datetime)

_LOOKS_AT_ONCE: Final = 64


class NextDue(Generic[T]):
    """The earliest known attempt of a store. Thread-safe.

    All instants have one type: microseconds since 1970 UTC, or date-times in UTC.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._earliest: T | None = None
        self._looks: dict[int, T | None] = {}
        self._next_look = 0
        self._wakes: list[Callable[[], None]] = []

    @property
    def is_listened_to(self) -> bool:
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

    def look(self) -> int:
        """Return the number of a query that begins now. It may not see messages that are announced from now on."""
        with self._lock:
            self._next_look += 1
            self._looks[self._next_look] = None
            if len(self._looks) > _LOOKS_AT_ONCE:  # a query that failed never calls seen()
                del self._looks[min(self._looks)]
            return self._next_look

    def seen(self, look: int, first: T | None) -> T | None:
        """Record the earliest attempt that a query saw; return when to query again.

        The result also counts the messages that were announced since the query began, because the query may not have
        seen them.
        """
        with self._lock:
            return self._seen(self._looks.pop(look, None), first)

    def _seen(self, announced: T | None, first: T | None) -> T | None:
        if announced is not None and (first is None or announced < first):
            first = announced
        self._earliest = first
        return first

    def announce(self, attempt_at: T) -> None:
        """Record a message that may be attempted at an instant; wake listeners if that is before all known ones."""
        with self._lock:
            for look, announced in self._looks.items():
                self._looks[look] = attempt_at if announced is None else min(announced, attempt_at)
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
