"""Queues that take no messages, each by itself. Pure; time is an argument, monotonic seconds. Source: ADR 51.

A queue that takes nothing delays only its own messages. Now and then one of them is sent as a probe. The others wait
for its answer and are claimed as seldom as possible, as they could only be given back.
"""

from __future__ import annotations

from typing import Final

from postdate.runtime.bounded import Bounded
from postdate.runtime.resource import Backoff

SHORTEST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 1.5
"""Between two probes of a transport or a destination: that it is back is noticed so late at most."""

FOLLOW_SECONDS: Final = 0.25
"""Messages that wait for the answer to a probe come so long after it, which alone is sent to a full destination."""

ANOTHER_SECONDS: Final = 0.1
"""A message that could not be sent as a probe comes so long after the next, which is to be another message."""

AT_A_TURN: Final = 1_000
"""Messages of one destination that are claimed, and given back, between two probes of it; the others wait for later
turns, none of them further away than :data:`LATEST_TURN_SECONDS`."""

LATEST_TURN_SECONDS: Final = 10.0

_NEARLY_SECONDS: Final = 0.1
_MOST_DESTINATIONS: Final = 10_000


class Destination(Backoff):
    """A queue that takes no messages: when the next probe is sent, and when each of the other messages is claimed."""

    def __init__(self) -> None:
        super().__init__(SHORTEST_SECONDS, LONGEST_SECONDS)
        self._probed_at = -FOLLOW_SECONDS
        self._turn = 0.0
        """When the messages that were given back last may be attempted."""
        self._waiting = 0
        """Messages that were given back until :attr:`_turn`."""

    def wait_seconds(self, seconds: float) -> float:
        """Return how long a message just claimed is to wait; 0: it is sent, as a probe."""
        if self.retry_at - seconds <= _NEARLY_SECONDS:
            self.failed(max(self.retry_at, seconds))
            self._probed_at = seconds
            return 0.0
        follows = self._probed_at + FOLLOW_SECONDS - seconds
        return follows if follows > 0 else self.next_turn(seconds)

    def next_turn(self, seconds: float) -> float:
        """Return in how many seconds one more message may be attempted."""
        if self._turn < self.retry_at:
            self._turn, self._waiting = self.retry_at, 0
        elif self._waiting >= AT_A_TURN and self._turn + LONGEST_SECONDS <= seconds + LATEST_TURN_SECONDS:
            self._turn, self._waiting = self._turn + LONGEST_SECONDS, 0
        self._waiting += 1
        return self._turn - seconds + (FOLLOW_SECONDS if self._waiting > 1 else 0.0)


class Destinations:
    """The queues that take no messages from one dispatcher."""

    def __init__(self) -> None:
        self._full = Bounded[str, Destination](_MOST_DESTINATIONS)
        self._recovered = Bounded[str, Destination](_MOST_DESTINATIONS)
        """Queues that have taken messages again, with the pauses they had."""

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._full)

    def wait_seconds(self, destination: str, seconds: float) -> float:
        """Return how long a message just claimed is to wait; 0: it is sent, perhaps as a probe."""
        full = self._full.get(destination)
        return 0.0 if full is None else full.wait_seconds(seconds)

    def failed(self, destination: str, seconds: float) -> bool:
        """Note that a queue takes nothing; return whether that is new. A queue that recovered just now is not."""
        full = self._full.get(destination)
        if full is not None:
            full.failed(seconds)
            return False
        recovered = self._recovered.pop(destination, None)
        is_new = recovered is None or seconds - recovered.retry_at > LATEST_TURN_SECONDS
        full = Destination() if recovered is None or is_new else recovered
        full.failed(seconds, is_longer=False)
        self._full[destination] = full
        return is_new

    def next_turn(self, destination: str, seconds: float) -> float:
        """Return in how many seconds a message that its destination did not take may be attempted."""
        full = self._full.get(destination)
        return SHORTEST_SECONDS if full is None else full.next_turn(seconds)

    def succeeded(self, destination: str) -> None:
        full = self._full.pop(destination, None)
        if full is not None:
            self._recovered[destination] = full
