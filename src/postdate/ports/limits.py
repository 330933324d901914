"""Limits of destinations, which all services of a store keep together. Source: ADR 34."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from postdate.ports.stores import Claim

LANES: Final = datetime(9000, 1, 1, tzinfo=UTC)
"""Messages that wait because of limits have attempt times later than this."""

LANE_WIDTH: Final = timedelta(seconds=1_000)
"""The length of the interval of attempt times of one lane."""

_FIRST_DUE: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LANE_SPAN: Final = timedelta(days=365 * 500)
"""A due time that is later than 1970 plus this has its place at the end of the lane."""

_POSITIONS: Final = 1_000_000
"""In a lane: messages that are due within four hours of each other have one place, and wait in the order of storing."""


def is_in_lane(attempt_at: datetime | None, due: datetime) -> bool:
    """Return whether a message waits in a lane, to judge by its attempt time."""
    return attempt_at is not None and attempt_at > LANES > due


@dataclass(frozen=True, slots=True)
class StoredLimits:
    """The limits of one destination, as a store keeps them.

    Limited messages wait in a *lane*: an interval of attempt times for one destination, far later than all due times.
    A claim finds the messages by this interval, in the order of their due times.

    Args:
        destination: queue.
        lane: number of the destination in this store, from 1.
        limits: as text, which only the core reads; empty: the limits were lifted.
        free_at: when the next message may be sent, UTC, as far as a rate is limited. At first, the time when the limits
            were set.
    """

    destination: str
    lane: int
    limits: str
    free_at: datetime

    @property
    def lane_start(self) -> datetime:
        """The first attempt time of the lane."""
        return LANES + self.lane * LANE_WIDTH

    @property
    def lane_end(self) -> datetime:
        """The first attempt time after the lane."""
        return self.lane_start + LANE_WIDTH

    def attempt_time(self, due: datetime) -> datetime:
        """Return the attempt time with which a message waits in the lane."""
        fraction = min(max((due - _FIRST_DUE) / _LANE_SPAN, 0.0), 1.0)
        return self.lane_start + int(fraction * (_POSITIONS - 1)) * (LANE_WIDTH / _POSITIONS)


@dataclass(frozen=True, slots=True)
class LimitsInUse:
    """The facts about limits that a service needs, however many destinations have limits.

    Args:
        has_limits: limits are in force for at least one destination.
        lanes: the limits, or lifted limits, of the destinations whose lanes have messages.
    """

    has_limits: bool
    lanes: Sequence[StoredLimits] = ()


NONE_IN_USE: Final = LimitsInUse(has_limits=False)


class LimitingStore(ABC):
    """A store that keeps limits of destinations, and lets messages wait because of them.

    A due message for a destination with limits is claimed like any other message, and then released with an attempt
    time in the lane (:meth:`postdate.ports.ClaimingStore.release`). A move never takes messages for such a destination.
    """

    @abstractmethod
    async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
        """Return the limits of every destination that ever had any, by name.

        Args:
            destinations: only the limits of these, by an index; ``None``: of all.

        Guarantees:
            limiting.limits_are_kept, lifted_limits_are_kept_as_lifted, limits_are_read_by_destination.
        """

    @abstractmethod
    async def load_limits_in_use(self) -> LimitsInUse:
        """Return whether limits are in force, and the limits of destinations whose lanes have messages.

        A claimed message may count or not. Services ask once a second. The cost grows with the lanes that have
        messages, not with the empty lanes.

        Guarantees:
            limiting.lanes_with_messages_are_in_use.
        """

    @abstractmethod
    async def store_limits(self, destination: str, limits: str, free_at: datetime, previous_limits: str = "") -> bool:
        """Set the limits of a destination; an empty text lifts them.

        From now on, moves leave out messages for this destination. After limits were lifted, moves include them again.

        Args:
            destination: queue.
            limits: the new limits.
            free_at: see :class:`StoredLimits`.
            previous_limits: the limits that the caller has read; empty: none. If the destination has other limits by
                now, nothing is changed.

        Returns:
            ``False`` if the destination has other limits than ``previous_limits``.

        Guarantees:
            limiting.limits_are_kept, lifted_limits_are_kept_as_lifted, no_move_takes_what_is_limited,
            limits_of_before_are_changed_once.
        """

    @abstractmethod
    async def reserve_slots(self, stored_limits: StoredLimits, free_at: datetime) -> bool:
        """Set ``free_at``; ``False`` if the limits have changed, or another process has set ``free_at`` meanwhile.

        Guarantees:
            limiting.one_of_many_takes_a_turn.
        """

    @abstractmethod
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[Claim]:
        """Claim up to ``limit`` messages that wait in a lane, as :meth:`postdate.ports.ClaimingStore.claim_due` does.

        ``now`` is the time in the record of an unreadable row.

        Guarantees:
            limiting.what_is_held_is_claimed_by_its_lane_alone, what_is_held_and_cannot_be_read_keeps_its_due_time.
        """
