"""How due messages are delivered: moved inside one database, sent by a dispatcher, or held because of limits.

What limits of destinations hold is let through, as many and as soon as they allow. Source: ADR 2, 34.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import anyio

from postdate.clock import Clock, later
from postdate.core.dispatcher import Dispatcher
from postdate.core.finishing import NO_JOURNAL, GivingBack, Journal
from postdate.core.limits import AT_ONCE, NO_LIMITS, SAME_FOR, Limits
from postdate.core.poller import DueWork, PollResult
from postdate.core.simple_store import enlisting
from postdate.ports import Claim, ClaimingStore, MoveReport, MovingStore, Transport, Wake
from postdate.ports.limits import KeptLimits, LimitingStore
from postdate.runtime.reporting import NO_METRICS, Metrics

_MOVED_AT_ONCE: Final = 1_000
_LEFT_BEHIND_AT_ONCE: Final = 25

_LOOKED_FOR: Final = timedelta(minutes=5)
"""After limits were lifted, services are looked for that had not heard of it, and held messages still."""

_LIFTED_APART: Final = 10.0
"""Seconds between these looks."""

_SHUT_APART: Final = 10.0
"""Seconds between two looks at the clock while a window is shut; the store is not asked."""

_EMPTY_APART: Final = 10.0
"""Seconds between looks into an empty lane: another service, which held something since, may have ended."""

_LOST_TURN: Final = 0.02
"""Seconds after which one looks again who was late for a turn."""

log = logging.getLogger("postdate.dispatcher")


def due_work(
    store: ClaimingStore,
    transport: Transport,
    dispatcher: Dispatcher,
    clock: Clock,
    metrics: Metrics = NO_METRICS,
    journal: Journal = NO_JOURNAL,
) -> DueWork:
    """Return how due messages are delivered: moved where store and queues share a database, within limits if kept."""
    moving = enlisting(store, transport)
    work: DueWork = dispatcher if moving is None else Mover(moving, dispatcher, clock, metrics, journal)
    return LimitedWork(work, dispatcher, store, clock) if isinstance(store, LimitingStore) else work


async def free_lanes(store: ClaimingStore, now: datetime) -> None:
    """Have all that is held without limits go the way of all others, where no service does it."""
    if not isinstance(store, LimitingStore):
        return
    for kept in await store.kept_limits():
        while not kept.limits and (claims := await store.claim_held(kept, now, AT_ONCE)):
            await store.release(claims, max(claim.message.due for claim in claims))


class Mover:
    """Moves due messages inside the database of store and queues; ``dispatcher`` sends those for other queues."""

    def __init__(
        self,
        store: MovingStore,
        dispatcher: Dispatcher,
        clock: Clock,
        metrics: Metrics = NO_METRICS,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        self._store, self._dispatcher, self._clock, self._metrics = store, dispatcher, clock, metrics
        self._asking = dispatcher.asking  # one for all calls of the store: once it is silent, stopping waits but once
        self._journal, self._listing = journal, journal is not NO_JOURNAL

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._dispatcher.running()

    async def take(self, now: datetime) -> PollResult:
        began = self._clock.monotonic()
        report = await self._asking.call(lambda: self._store.move_due(now, _MOVED_AT_ONCE, listing=self._listing))
        if report.moved is not None:
            self._journal.moved(report.moved, now)
        self._count(report, now, timedelta(seconds=self._clock.monotonic() - began))
        moved = report.delivered + report.expired
        needed = report.left_behind or self._dispatcher.finisher.left
        limits = self._dispatcher.limits
        if report.left_behind:  # maybe since a moment ago
            limits.forget()
        # A few at a look: messages without a queue must not delay the others (a bad destination never does).
        others = (
            await self._dispatcher.take(now, _MOVED_AT_ONCE if limits.any else _LEFT_BEHIND_AT_ONCE)
            if needed
            else PollResult(0, False, report.next_attempt)
        )
        if moved < _MOVED_AT_ONCE:
            own = None if report.left_behind else report.next_attempt  # those left behind are the dispatcher's by now
            attempts = [each for each in (own, others.next_attempt) if each is not None]
            return PollResult(moved + others.count, others.more, min(attempts, default=None))
        await self._asking.call(self._store.pause)
        return PollResult(moved + others.count, more=True)

    def _count(self, report: MoveReport, now: datetime, duration: timedelta) -> None:
        if report.delivered and log.isEnabledFor(logging.DEBUG):
            log.debug("%d messages delivered in %.1f ms", report.delivered, duration.total_seconds() * 1_000)
        if self._metrics is NO_METRICS:
            return
        self._metrics.fetched(report.delivered + report.expired, duration)
        if report.delivered:
            first = [] if report.first_due is None else [(now - report.first_due + duration).total_seconds()]
            self._metrics.delivered(report.to, first)
        if report.expired:
            self._metrics.count("expired", report.expired)

    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self._dispatcher.listen(wake)


class LimitedWork(DueWork):
    """Due work; after each look, what limits let through of the messages that they hold.

    Each destination has a time at which its lane is looked into again: with the next turn of its rate, when a window
    opens, some seconds after nothing was found, and at once when this service has held something. Nothing is looked at
    while the limits allow nothing, and no lane without limits but for some minutes.
    """

    def __init__(self, work: DueWork, dispatcher: Dispatcher, store: LimitingStore, clock: Clock) -> None:
        self._work, self._dispatcher, self._store, self._clock = work, dispatcher, store, clock
        self._finisher = dispatcher.finisher
        self._looks = dict[str, tuple[str, float]]()
        """Of each destination: its limits as text, and when its lane is looked into again (monotonic)."""

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._work.running()

    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self._work.listen(wake)

    async def take(self, now: datetime) -> PollResult:
        taken = await self._work.take(now)
        seen = self._dispatcher.limits
        await seen.look()
        count, pauses = 0, [SAME_FOR] if seen.any else list[float]()
        for destination, (kept, limits) in list(seen.kept.items()):
            known, look_at = self._looks.get(destination, (None, 0.0))
            is_new = destination in seen.held or known != kept.limits
            if is_new or look_at <= self._clock.monotonic():
                seen.held.discard(destination)
                found, pause = await self._look_into(kept, limits)
                count, look_at = count + found, self._clock.monotonic() + pause
            self._looks[destination] = (kept.limits, look_at)
            pauses.append(max(look_at - self._clock.monotonic(), 0.0))
        pause = min(pauses, default=math.inf)
        attempts = [] if taken.next_attempt is None else [taken.next_attempt]
        if pause < math.inf:
            attempts.append(later(self._clock.now(), timedelta(seconds=pause)))
        return PollResult(taken.count + count, taken.more or pause == 0, min(attempts, default=None))

    async def _look_into(self, kept: KeptLimits, limits: Limits) -> tuple[int, float]:
        """Return how many messages were let through, and after how many seconds to look again; 0: there may be more."""
        now = self._clock.now()
        if limits == NO_LIMITS:
            return await self._free(kept, now)
        opens = limits.opens(now)
        allowed = limits.allowed(kept.free_at, now) if opens <= now else 0
        if not allowed:
            then = opens if opens > now else limits.next_turn(kept.free_at)
            # Not until then: this pause is measured by a clock that neither suspension nor a set clock moves.
            return 0, min(max((then - now).total_seconds(), 0.001), _SHUT_APART)
        taken = await self._dispatcher.take(now, allowed, partial(self._claim, kept, limits, now))
        return taken.count, self._pause_after(taken, kept, limits, now)

    def _pause_after(self, taken: PollResult, kept: KeptLimits, limits: Limits, now: datetime) -> float:
        seen = self._dispatcher.limits
        if seen.is_forgotten or (taken.more and not taken.count):  # somebody else was first, or there was no room
            return _LOST_TURN
        free_at = seen.kept.get(kept.destination, (kept, limits))[0].free_at
        if free_at == kept.free_at:  # nothing was held
            return _EMPTY_APART
        if limits.per_second is None:
            return 0.0
        return max((limits.next_turn(free_at) - now).total_seconds(), 0.001)

    async def _claim(self, kept: KeptLimits, limits: Limits, now: datetime, limit: int) -> Sequence[Claim]:
        """Claim what is held, and take turns for it: so what was paused meanwhile stays."""
        claims, is_ours = await self._held(kept, limit, now), False
        if not claims:
            return ()
        free_at = limits.after(len(claims), kept.free_at, now)
        try:
            is_ours = await self._dispatcher.asking.call(lambda: self._store.take_turns(kept, free_at))
        finally:
            if not is_ours:
                self._dispatcher.limits.forget()
                with anyio.CancelScope(shield=True):
                    await self._finisher.give_back([GivingBack(each, kept.place(each.message.due)) for each in claims])
        if is_ours:
            self._dispatcher.limits.note(replace(kept, free_at=free_at))
        return claims if is_ours else ()

    async def _free(self, kept: KeptLimits, now: datetime) -> tuple[int, float]:
        """Have what was held go the way of all others."""
        claims = await self._held(kept, AT_ONCE, now)
        if claims:
            at_once = max(claim.message.due for claim in claims)  # one call
            await self._finisher.give_back([GivingBack(claim, at_once) for claim in claims])
            return len(claims), 0.0
        return 0, _LIFTED_APART if now < later(kept.free_at, _LOOKED_FOR) else math.inf

    async def _held(self, kept: KeptLimits, limit: int, now: datetime) -> Sequence[Claim]:
        """Claim what is held; a message that is due in the far year of the lane by itself is none of these."""
        call = partial(self._store.claim_held, kept, now, limit)
        claims = await self._dispatcher.asking.call(call, self._dispatcher.give_back_late)
        strays = [each for each in claims if each.message.due >= now or each.message.destination != kept.destination]
        if strays:
            await self._finisher.give_back([GivingBack(claim, claim.message.due) for claim in strays])
        return [claim for claim in claims if claim not in strays] if strays else claims
