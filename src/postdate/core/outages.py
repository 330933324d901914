"""Tells outages of the transport and of one destination. Pure; time is an argument, monotonic seconds.

While the transport is out of reach only a probe is claimed: messages that cannot be sent are better left to others. A
destination that takes nothing delays only its own messages. Source: ADR 0019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postdate.runtime.bounded import Bounded

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
_DESTINATIONS: Final = 10_000


@dataclass(slots=True)
class _Outage:
    """The next attempt is at ``until``, in monotonic seconds; ``waiting`` messages were given back until ``turn``."""

    pause: float
    until: float
    probed_at: float = -FOLLOW_SECONDS
    turn: float = 0.0
    waiting: int = 0

    def fails(self, seconds: float, *, longer: bool = True) -> None:
        """Wait again, longer than before; failures at the same time are one failure."""
        if seconds >= self.until:
            self.pause = min(self.pause * 2, LONGEST_SECONDS) if longer else self.pause
            self.until = seconds + self.pause

    def next_turn(self, seconds: float) -> float:
        """Return in how many seconds one more message may be attempted."""
        if self.turn < self.until:
            self.turn, self.waiting = self.until, 0
        elif self.waiting >= AT_A_TURN and self.turn + LONGEST_SECONDS <= seconds + LATEST_TURN_SECONDS:
            self.turn, self.waiting = self.turn + LONGEST_SECONDS, 0
        self.waiting += 1
        return self.turn - seconds + (FOLLOW_SECONDS if self.waiting > 1 else 0.0)


class Outages:
    """The transport and the destinations that one dispatcher cannot reach."""

    def __init__(self) -> None:
        self._transport: _Outage | None = None
        self._destinations = Bounded[str, _Outage](_DESTINATIONS)
        self._over: dict[str, _Outage] = {}

    @property
    def is_out(self) -> bool:
        """Whether the transport was out of reach when it was last tried."""
        return self._transport is not None

    def transport_left(self, seconds: float) -> float:
        """Return how many seconds to wait before the transport may be tried again; 0: now."""
        return 0.0 if self._transport is None else max(self._transport.until - seconds, 0.0)

    def probe(self, seconds: float) -> None:
        """Note that the transport is being tried; the next probe waits longer."""
        if self._transport is not None:
            self._transport.fails(seconds)

    def transport_failed(self, seconds: float) -> None:
        if self._transport is None:
            self._transport = _Outage(SHORTEST_SECONDS, seconds + SHORTEST_SECONDS)
        else:
            self._transport.fails(seconds)

    def transport_works(self) -> bool:
        """Note that it has taken messages; return whether it was out."""
        was_out, self._transport = self._transport is not None, None
        return was_out

    # --- one destination --------------------------------------------------------------------------------------------

    @property
    def has_destinations(self) -> bool:
        return bool(self._destinations)

    def wait_for(self, destination: str, seconds: float) -> float:
        """Return seconds that a message just claimed is to wait; 0: it is sent, perhaps as a probe."""
        outage = self._destinations.get(destination)
        if outage is None:
            return 0.0
        if outage.until - seconds <= _NEARLY_SECONDS:
            outage.fails(max(outage.until, seconds))
            outage.probed_at = seconds
            return 0.0
        follows = outage.probed_at + FOLLOW_SECONDS - seconds
        return follows if follows > 0 else outage.next_turn(seconds)

    def destination_failed(self, destination: str, seconds: float) -> bool:
        """Return whether an outage of a destination is new; one that ended just now goes on with its former pause."""
        outage = self._destinations.get(destination)
        if outage is not None:
            outage.fails(seconds)
            return False
        outage = self._over.pop(destination, None)
        is_new = outage is None or seconds - outage.until > LATEST_TURN_SECONDS
        if outage is None or is_new:
            outage = _Outage(SHORTEST_SECONDS, seconds + SHORTEST_SECONDS)
        outage.fails(seconds, longer=False)
        self._destinations[destination] = outage
        return is_new

    def next_turn(self, destination: str, seconds: float) -> float:
        """Return in how many seconds a message that its destination did not take may be attempted."""
        outage = self._destinations.get(destination)
        return SHORTEST_SECONDS if outage is None else outage.next_turn(seconds)

    def destination_works(self, destination: str) -> None:
        outage = self._destinations.pop(destination, None)
        if outage is not None:
            if len(self._over) >= _DESTINATIONS:
                self._over.clear()
            self._over[destination] = outage
