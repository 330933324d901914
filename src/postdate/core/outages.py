"""Whom an outage is of: of everything, of one destination, or of one message alone. Pure; time is an argument.

Nothing is claimed for a transport that cannot be reached but a probe: what cannot be sent is better held by nobody. A
destination that takes nothing holds up only what is meant for it. Source: ADR 0019.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from postdate.core.recoverability import may_be_of_one
from postdate.runtime.bounded import Bounded

SHORTEST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 1.5
"""Between two probes, of a transport and of a destination: so long after it is back it is noticed at the latest."""

FOLLOW_SECONDS: Final = 0.25
"""What waits for the answer to a probe comes so long after it: nothing else is sent to a destination that is full."""

ANOTHER_SECONDS: Final = 0.1
"""What could not be sent as a probe of the transport comes so long after the next: that is to be another message."""

AT_A_TURN: Final = 1_000
"""Messages of one destination that are claimed, and given back, between two probes of it; the others wait for later
turns, as far as those are not further away than :data:`LATEST_TURN_SECONDS`."""

LATEST_TURN_SECONDS: Final = 10.0

BORNE: Final = 10
"""Times that a message may meet an outage that others do not meet: until then it may be chance."""

_NEARLY_SECONDS: Final = 0.1
_BORNE_BY_TRANSPORTS: Final = 2
"""The same of outages that come with a message as the probe of a transport: until then nothing else is sent."""

_SUSPECTS: Final = 1_000
_FORGOTTEN_AFTER: Final = 100_000
"""A message that others have dealt with does not come again: it is forgotten when so much has gone well since."""

_DESTINATIONS: Final = 10_000


class Suspects:
    """Tells an outage from what concerns one message: that one fails again and again, and others go well in between.

    One for each store, and each kind of call that is made for every message: what others met must be comparable.
    """

    def __init__(self) -> None:
        self._failed = Bounded[str, tuple[int, int]](_SUSPECTS)
        """By message: how often it failed, others having gone well before; and what :attr:`went_well` was then."""
        self.went_well = 0
        """Grows whenever something goes well."""

    def __bool__(self) -> bool:
        """Whether any has failed."""
        return bool(self._failed)

    def are_others_well(self, message_id: str) -> bool:
        """Return whether anything has gone well since a message failed, if it did."""
        return self._failed.get(message_id, (0, -1))[1] != self.went_well

    def failed(self, message_id: str) -> int:
        """Note a failure; return how often it has failed, not counting those before which nothing had gone well."""
        times, before = self._failed.get(message_id, (0, -1))
        times += self.went_well != before
        self._failed[message_id] = (times, self.went_well)
        return times

    def met(self, message_id: str, error: BaseException) -> int:
        """Return the same of an outage, if it may be of a single row; any other is never one of a message: 0."""
        return self.failed(message_id) if may_be_of_one(error) else 0

    def worked(self, *message_ids: str) -> None:
        """Note that these, or others, went well."""
        self.went_well += 1
        self.forget(*message_ids)
        for first, (_, before) in self._failed.items():
            if self.went_well - before > _FORGOTTEN_AFTER:
                del self._failed[first]
            break

    def forget(self, *message_ids: str) -> None:
        """Forget how often these have failed: they are dealt with."""
        if self._failed:
            for message_id in message_ids:
                self._failed.pop(message_id, None)


@dataclass(slots=True)
class _Outage:
    """What fails since some attempts, and may be tried again at an instant in monotonic seconds.

    Args:
        pause: seconds between the last attempt and the next.
        until: the instant of that.
        probed_at: when the last probe left.
        turn: when the last message that was given back may be attempted.
        waiting: how many may be then.
    """

    pause: float
    until: float
    probed_at: float = -FOLLOW_SECONDS
    turn: float = 0.0
    waiting: int = 0

    def fails(self, seconds: float, *, longer: bool = True) -> None:
        """Wait again, longer than before; what fails together with others is one failure."""
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
    """Remembers what cannot be reached, of one dispatcher."""

    def __init__(self) -> None:
        self._transport: _Outage | None = None
        self._destinations = Bounded[str, _Outage](_DESTINATIONS)
        self._over: dict[str, _Outage] = {}
        self._suspects = Suspects()

    @property
    def is_out(self) -> bool:
        """Whether the last that was heard of the transport is that it cannot be reached."""
        return self._transport is not None

    def transport_left(self, seconds: float) -> float:
        """Return how many seconds to wait before the transport may be tried again; 0: now."""
        return 0.0 if self._transport is None else max(self._transport.until - seconds, 0.0)

    def probe(self, seconds: float) -> None:
        """Note that the transport is being tried: not again before a longer pause is over."""
        if self._transport is not None:
            self._transport.fails(seconds)

    def transport_failed(self, seconds: float) -> None:
        """Note that it cannot be reached; what fails together with others is one failure."""
        if self._transport is None:
            self._transport = _Outage(SHORTEST_SECONDS, seconds + SHORTEST_SECONDS)
        else:
            self._transport.fails(seconds)

    def transport_works(self, message_ids: Collection[str]) -> bool:
        """Note that it has taken messages; return whether it was out."""
        self._suspects.worked(*message_ids)
        was_out, self._transport = self._transport is not None, None
        return was_out

    def is_to_blame(self, message_id: str) -> bool:
        """Note that a probe of the transport failed; return whether it is this message that breaks it.

        It is when that has happened to it again and again, and others were sent in between: else it would be the probe
        for ever, and nothing would be sent.
        """
        return self._suspects.failed(message_id) > _BORNE_BY_TRANSPORTS

    # --- one destination --------------------------------------------------------------------------------------------

    @property
    def has_destinations(self) -> bool:
        """Whether any destination takes nothing."""
        return bool(self._destinations)

    def wait_for(self, destination: str, seconds: float) -> float:
        """Return how many seconds a message that has just been claimed is to wait; 0: it is sent.

        Of a destination that takes nothing one is, as a probe, when it is time for that.
        """
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
        """Note that a destination takes nothing; return whether that is new.

        One that took some just now is waited for as long as before that.
        """
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
        """Return in how many seconds a message that a destination did not take may be attempted."""
        outage = self._destinations.get(destination)
        return SHORTEST_SECONDS if outage is None else outage.next_turn(seconds)

    def destination_works(self, destination: str) -> None:
        """Note that a destination takes messages."""
        outage = self._destinations.pop(destination, None)
        if outage is not None:
            if len(self._over) >= _DESTINATIONS:
                self._over.clear()
            self._over[destination] = outage
