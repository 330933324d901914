"""Delivers messages of limited destinations from their lanes, as soon as the limits allow it. Source: ADR 34."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import anyio

from postdate.clock import Clock, later
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.poller import LONGEST_SLEEP, DueWork, PollResult
from postdate.core.expiry import is_expired
from postdate.core.health.message_memory import Release
from postdate.core.limits import AT_ONCE, NO_LIMITS, SAME_FOR, Limits
from postdate.errors import InvalidTimestamp
from postdate.ports import Claim, Wake
from postdate.ports.limits import LANES, LimitingStore, StoredLimits

_EMPTY_POLL_INTERVAL: Final = 10.0
"""Seconds between polls of an empty lane. Another service may have put messages there and stopped."""

_LONGEST_LANE_POLLS: Final = 0.05
"""Seconds for which lanes are polled, one after the other, before other due messages are polled again."""

_LOST_SLOT_PAUSE: Final = 0.02
"""Seconds until the next poll of a lane after another service reserved the slots first."""

_AFTER_LANES: Final = datetime(9999, 12, 31, tzinfo=UTC)
"""The attempt time of a message whose own due time lies in the far years that lanes use."""

log = logging.getLogger("postdate.limits")


@dataclass(slots=True)
class _Lane:
    """The state of the lane of one destination.

    Args:
        limits: the limits of the destination, as text.
        poll_at: when to poll the lane again (monotonic seconds).
        expired: how many messages of the last claim had expired; the next claim is larger by twice as many.
    """

    limits: str
    poll_at: float = -math.inf
    expired: int = 0


@dataclass(slots=True)
class _LanePoll:
    """One poll of a lane: how many messages may be sent, and the result of the claim."""

    stored: StoredLimits
    limits: Limits
    now: datetime
    allowed: int
    has_lost_slots: bool = False
    """Whether another service reserved the slots first."""
    expired: int = 0
    sent: int = 0


class LimitedWork(DueWork):
    """Due work that also delivers messages from lanes, after each poll, as far as the limits allow.

    Only lanes with messages are polled. The next poll of a lane is at the next slot of its rate, or when a window
    opens; some seconds later if nothing could be claimed; and at once when this service has put a message there.
    """

    def __init__(self, work: DueWork, dispatcher: Dispatcher, store: LimitingStore, clock: Clock) -> None:
        self._work, self._dispatcher, self._store, self._clock = work, dispatcher, store, clock
        self._finisher = dispatcher.finisher
        self._lanes = dict[str, _Lane]()
        self._version = -1
        """The version of the limits that ``_lanes`` was made from."""
        self._poll_at = -math.inf
        """When the first lane is to be polled (monotonic seconds)."""
        self._destinations_without_zone = set[str]()
        """Destinations with a window in a zone that the zone files lack. This was logged once for each."""

    def overlap_batches(self) -> AbstractAsyncContextManager[None]:
        return self._work.overlap_batches()

    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self._work.listen(wake)

    async def deliver_due(self, now: datetime) -> PollResult:
        result = await self._work.deliver_due(now)
        cache = self._dispatcher.limits
        await cache.refresh()
        count = 0
        if cache.version != self._version:
            self._update_lanes()
        if self._poll_at <= self._clock.monotonic():
            count = await self._poll_lanes()
        pause = max(self._poll_at - self._clock.monotonic(), 0.0)
        if cache.has_limits or cache.lanes:
            pause = min(pause, SAME_FOR)
        attempts = [] if result.next_attempt is None else [result.next_attempt]
        if pause < math.inf:
            attempts.append(later(self._clock.now(), timedelta(seconds=pause)))
        more = result.has_more or pause == 0
        return PollResult(result.count + count, more, min(attempts, default=None), has_polled=result.has_polled)

    def _update_lanes(self) -> None:
        """Forget lanes that are empty. Lanes with new messages or changed limits are polled at once."""
        cache, lanes = self._dispatcher.limits, dict[str, _Lane]()
        for destination, (stored, _) in cache.lanes.items():
            lane = self._lanes.get(destination)
            is_new = lane is None or lane.limits != stored.limits or destination in cache.new_lanes
            lanes[destination] = _Lane(stored.limits) if lane is None or is_new else lane
        cache.new_lanes.clear()
        self._lanes, self._version = lanes, cache.version
        self._destinations_without_zone &= lanes.keys()
        self._poll_at = min((each.poll_at for each in lanes.values()), default=math.inf)

    async def _poll_lanes(self) -> int:
        """Poll the lanes whose time has come, the longest overdue first; return how many messages left them.

        It ends after :data:`_LONGEST_LANE_POLLS`, so that many lanes do not delay the messages of other destinations. A
        lane is polled at least once in the poller's longest sleep. The reason: a window opens by the machine's wall
        clock, and monotonic seconds do not advance while the machine is suspended or when its clock is set.
        """
        cache, count, started_at = self._dispatcher.limits, 0, self._clock.monotonic()
        overdue = sorted(
            (each.poll_at, destination) for destination, each in self._lanes.items() if each.poll_at <= started_at
        )
        for _, destination in overdue:
            lane, (stored, limits) = self._lanes[destination], cache.lanes[destination]
            number, pause = await self._poll_lane(lane, stored, limits)
            pause = min(pause, LONGEST_SLEEP.total_seconds())
            count, lane.poll_at = count + number, self._clock.monotonic() + pause
            if self._clock.monotonic() - started_at > _LONGEST_LANE_POLLS:
                break
        self._poll_at = min((each.poll_at for each in self._lanes.values()), default=math.inf)
        return count

    async def _poll_lane(self, lane: _Lane, stored: StoredLimits, limits: Limits) -> tuple[int, float]:
        """Return how many messages left the lane, and the seconds until its next poll; 0: there may be more."""
        now, destination = self._clock.now(), stored.destination
        if limits == NO_LIMITS:
            return await self._release_lane(stored, now)
        try:
            next_opening = limits.next_opening(now)
        except InvalidTimestamp as error:  # affects this lane only; the other lanes go on
            if destination not in self._destinations_without_zone:
                self._destinations_without_zone.add(destination)
                log.error("nothing is delivered to %s until zone files have its zone: %s", destination, error)
            return 0, math.inf
        self._destinations_without_zone.discard(destination)
        allowed_count = limits.allowed_count(stored.free_at, now) if next_opening <= now else 0
        if not allowed_count:
            next_poll = next_opening if next_opening > now else limits.next_slot(stored.free_at)
            return 0, max((next_poll - now).total_seconds(), 0.001)
        lane_poll = _LanePoll(stored, limits, now, allowed_count)
        size = min(allowed_count + 2 * lane.expired, AT_ONCE)
        result = await self._dispatcher.deliver_due(now, size, partial(self._claim_and_reserve, lane_poll))
        lane.expired = lane_poll.expired
        if result.has_polled:
            return result.count, self._pause_after(lane_poll)
        if result.has_more:
            return result.count, 0.0
        # Nothing was claimed, for example because the transport is out of reach. Another batch may be sent before
        # `next_attempt` and show that it is back, so poll soon.
        next_attempt = result.next_attempt or later(now, timedelta(seconds=SAME_FOR))
        return result.count, min(max((next_attempt - self._clock.now()).total_seconds(), 0.001), SAME_FOR)

    def _pause_after(self, lane_poll: _LanePoll) -> float:
        if lane_poll.has_lost_slots:
            return _LOST_SLOT_PAUSE
        # The lane may have messages behind the expired ones.
        if lane_poll.expired and lane_poll.sent < lane_poll.allowed:
            return 0.0
        if not lane_poll.sent:
            return _EMPTY_POLL_INTERVAL
        if lane_poll.limits.per_second is None:
            return 0.0
        free_at = lane_poll.limits.free_at_after(lane_poll.sent, lane_poll.stored.free_at, lane_poll.now)
        return max((lane_poll.limits.next_slot(free_at) - lane_poll.now).total_seconds(), 0.001)

    async def _claim_and_reserve(self, lane_poll: _LanePoll, limit: int) -> Sequence[Claim]:
        """Claim messages of a lane, and reserve a slot for each message to be sent.

        Reserving fails if the destination was paused meanwhile; then its messages stay in the lane. An expired message
        is not sent and needs no slot. It is claimed together with the messages behind it.
        """
        free_at = lane_poll.stored.free_at  # changes below if a message is sent
        claims, to_send = await self._claim_lane(lane_poll.stored, limit, lane_poll.now), list[Claim]()
        expired = [each for each in claims if is_expired(each.message, lane_poll.now)]
        try:
            if unexpired := [each for each in claims if not is_expired(each.message, lane_poll.now)][
                : lane_poll.allowed
            ]:
                free_at = lane_poll.limits.free_at_after(len(unexpired), lane_poll.stored.free_at, lane_poll.now)
                has_slots = await self._dispatcher.store_deadlines.call_in_task(
                    lambda: self._store.reserve_slots(lane_poll.stored, free_at)
                )
                if not has_slots:
                    lane_poll.has_lost_slots = True
                    unexpired = []
                    self._dispatcher.limits.forget()
            to_send = [*expired, *unexpired]
        finally:
            tokens = {id(each) for each in to_send}
            if surplus := [each for each in claims if id(each) not in tokens]:
                if not to_send:
                    self._dispatcher.limits.forget()
                await self._release_claims(
                    [Release(each, lane_poll.stored.attempt_time(each.message.due)) for each in surplus]
                )
        lane_poll.expired, lane_poll.sent = len(expired), len(to_send) - len(expired)
        if lane_poll.sent:
            self._dispatcher.limits.remember(replace(lane_poll.stored, free_at=free_at), lane_poll.limits)
            self._version = self._dispatcher.limits.version
        return to_send

    async def _release_lane(self, stored: StoredLimits, now: datetime) -> tuple[int, float]:
        """Release all messages of a lane whose destination is not limited any more; they are then due as usual."""
        claims = await self._claim_lane(stored, AT_ONCE, now)
        if not claims:
            return 0, _EMPTY_POLL_INTERVAL
        latest_due = max(claim.message.due for claim in claims)  # one time for all: then one call releases all
        await self._release_claims([Release(claim, latest_due) for claim in claims])
        return len(claims), 0.0

    async def _claim_lane(self, stored: StoredLimits, limit: int, now: datetime) -> Sequence[Claim]:
        """Claim messages of a lane.

        A message whose own due time lies in the far year of the lane does not belong to the lane. It gets another
        attempt time, or each poll would claim it before the messages behind it.
        """
        call = partial(self._store.claim_lane, stored, now, limit)
        while claims := await self._dispatcher.store_deadlines.call_in_task(call, self._dispatcher.release_late_claims):
            claims_of_lane, strays = list[Claim](), list[Release]()
            for claim in claims:
                due = claim.message.due
                if due < now and claim.message.destination == stored.destination:
                    claims_of_lane.append(claim)
                else:
                    strays.append(Release(claim, due if due < LANES else max(due, _AFTER_LANES)))
            if strays:
                await self._release_claims(strays)
            if claims_of_lane:
                return claims_of_lane
        return []

    async def _release_claims(self, releases: Sequence[Release]) -> None:
        """Release claims, also while the caller is cancelled: they are in no batch, so no other code releases them."""
        with anyio.CancelScope(shield=True):
            await self._finisher.release_claims(releases)
