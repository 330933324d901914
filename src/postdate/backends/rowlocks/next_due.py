"""The next-due cache: what a store knows of the next attempt without asking, and when to wake its poller.

It needs nothing of a dialect. Whoever looks at the table says so before (:meth:`NextDue.look`) and after
(:meth:`NextDue.seen`); whoever stores, gives back or hears of others says :meth:`NextDue.heard`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from postdate.ports import Wake


class NextDue:
    """Thread-safe. Times are microseconds since 1970 UTC."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: int | None = None
        self._heard_while_looking: int | None = None
        self._wakes: list[Wake] = []

    @property
    def is_listened_to(self) -> bool:
        """Whether anybody wants to be woken."""
        return bool(self._wakes)

    def listen(self, wake: Wake) -> Callable[[], None]:
        """Have ``wake`` called when something is to be attempted before all that is known; return the way to stop."""
        with self._lock:
            self._wakes.append(wake)

        def stop() -> None:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)

        return stop

    def look(self) -> None:
        """Note that a look begins: what is heard of from now on may not be seen by it."""
        with self._lock:
            self._heard_while_looking = None

    def seen(self, first: int | None) -> int | None:
        """Note the earliest attempt that a look saw; return when to look again."""
        with self._lock:
            heard = self._heard_while_looking
            if heard is not None and (first is None or heard < first):
                first = heard
            self._known = first
            return first

    def heard(self, attempt_at: int) -> None:
        """Note that something may be attempted after that instant; wake who listens if it is before all known."""
        with self._lock:
            if self._heard_while_looking is None or attempt_at < self._heard_while_looking:
                self._heard_while_looking = attempt_at
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
