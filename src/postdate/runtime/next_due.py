"""The next-due cache: what a store knows of the next attempt without asking, and when to wake its poller.

Whoever looks at what is stored says so before (:meth:`NextDue.look`) and after
(:meth:`NextDue.seen`); whoever stores, gives back or hears of others says :meth:`NextDue.heard`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from typing import Final, Generic, TypeVar

T = TypeVar("T", int, datetime)

_LOOKS_AT_ONCE: Final = 64


class NextDue(Generic[T]):
    """Thread-safe. Instants are all of one kind: microseconds since 1970 UTC, or date-times in UTC."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: T | None = None
        self._looks: dict[int, T | None] = {}
        self._next_look = 0
        self._wakes: list[Callable[[], None]] = []

    @property
    def is_listened_to(self) -> bool:
        """Whether anybody wants to be woken."""
        return bool(self._wakes)

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have ``wake`` called when something is to be attempted before all that is known; return the way to stop."""
        with self._lock:
            self._wakes.append(wake)

        def stop() -> None:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)

        return stop

    def look(self) -> int:
        """Note that a look begins: what is heard of from now on may not be seen by it. Return its number."""
        with self._lock:
            self._next_look += 1
            self._looks[self._next_look] = None
            if len(self._looks) > _LOOKS_AT_ONCE:  # of looks that failed nobody asks any more
                del self._looks[min(self._looks)]
            return self._next_look

    def seen(self, look: int, first: T | None) -> T | None:
        """Note the earliest attempt that a look saw; return when to look again."""
        with self._lock:
            return self._seen(self._looks.pop(look, None), first)

    def _seen(self, heard: T | None, first: T | None) -> T | None:
        if heard is not None and (first is None or heard < first):
            first = heard
        self._known = first
        return first

    def heard(self, attempt_at: T) -> None:
        """Note that something may be attempted after that instant; wake who listens if it is before all known."""
        with self._lock:
            for look, heard in self._looks.items():
                self._looks[look] = attempt_at if heard is None else min(heard, attempt_at)
            if self._known is not None and attempt_at >= self._known:
                return
            self._known = attempt_at
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    def forget(self) -> None:
        """Note that something may be attempted at any time: wake who listens."""
        with self._lock:
            self._known = None
            wakes = list(self._wakes)
        for wake in wakes:
            wake()
