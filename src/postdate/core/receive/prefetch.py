"""How many messages a pump may receive ahead of its workers. Source: ADR 0026."""

from __future__ import annotations

import math
from typing import Final

LONGEST_WAIT_SECONDS: Final = 0.5
"""Prefetched messages return to the queue about this long after handling has become slow."""


class Prefetch:
    """The number of messages that a pump may have received: ``concurrency``, or as many as it handles in 50 ms.

    Recent handling decides. If handling is slow, no message is prefetched, and other processes can receive the waiting
    messages. If a message takes microseconds, handling does not wait for receiving.
    """

    _AHEAD_SECONDS: Final = 0.05
    _MOST: Final = 1_000
    _SHORTEST_SECONDS: Final = _AHEAD_SECONDS  # over less time, slow messages that end together would look quick

    def __init__(self, concurrency: int) -> None:
        self._concurrency = self._limit = concurrency
        self._measured_at = -math.inf
        self.handled = 0
        """The number of messages handled since :meth:`limit_at` last measured."""

    def limit_at(self, now: float) -> int:
        """Return how many messages may be received or being handled; ``now`` is in monotonic seconds."""
        elapsed = now - self._measured_at
        if elapsed >= self._SHORTEST_SECONDS:
            pace = self.handled / elapsed
            self._measured_at, self.handled = now, 0
            self._limit = max(self._concurrency, min(int(pace * self._AHEAD_SECONDS), self._MOST))
        return self._limit
