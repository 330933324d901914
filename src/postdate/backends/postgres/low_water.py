"""The number below which a queue has nothing to claim."""

from __future__ import annotations

from collections.abc import Sequence

from postdate.clock import steady_seconds
from postdate.runtime import forks


class LowWater:
    """The number at which a search for free messages begins: no message with a lower number is free.

    Without it each search would read all index entries of rows that were deleted since the oldest snapshot. If a
    transaction with a lower number commits later, its notification lowers this number. Thread-safe.
    """

    _SWEEP_EVERY_SECONDS = 10.0

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._value = 0
        self._swept_at = steady_seconds()
        self._freed_during_query: int | None = None

    def value(self) -> int:
        """Return the number; once in ten seconds 0, to find messages that were missed."""
        with self._lock:
            self._freed_during_query = None
            now = steady_seconds()
            if now - self._swept_at >= self._SWEEP_EVERY_SECONDS:  # rows that other processes locked may be free again
                self._value, self._swept_at = 0, now
            return self._value

    def remember_claimed(self, numbers: Sequence[int]) -> None:
        """Remember the claimed numbers, which were the lowest free ones.

        If there are none, the next search begins at 0.
        """
        with self._lock:
            lowest, freed = min(numbers, default=0), self._freed_during_query
            # A message that became free during the search may not be in its result.
            self._value = lowest if freed is None else min(lowest, freed)

    def remember_free(self, number: int) -> None:
        """Remember that a message is free."""
        with self._lock:
            self._value = min(self._value, number)
            freed = self._freed_during_query
            self._freed_during_query = number if freed is None else min(freed, number)

    def forget(self) -> None:
        self.remember_free(0)
