"""Due messages to their queues inside one database: claim, send and remove are one transaction. Source: ADR 0002."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta

from postdate.clock import Clock
from postdate.core.dispatcher import Dispatcher
from postdate.core.journal import NO_JOURNAL, Journal
from postdate.core.poller import PollResult
from postdate.ports import MoveReport, MovingStore, Wake
from postdate.runtime.metrics import NO_METRICS, Metrics

_MOVED_AT_ONCE = 1_000
_LEFT_BEHIND_AT_ONCE = 25

log = logging.getLogger("postdate.mover")


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
        self._count(report, timedelta(seconds=self._clock.monotonic() - began))
        moved = report.delivered + report.expired
        needed = report.left_behind or self._dispatcher.holds_some
        # A few at a look: messages without a queue must not delay the others (a bad destination never does).
        others = (
            await self._dispatcher.take(now, _LEFT_BEHIND_AT_ONCE)
            if needed
            else PollResult(0, False, report.next_attempt)
        )
        if moved < _MOVED_AT_ONCE:
            own = None if report.left_behind else report.next_attempt  # those left behind are the dispatcher's by now
            attempts = [each for each in (own, others.next_attempt) if each is not None]
            return PollResult(moved + others.count, others.more, min(attempts, default=None))
        await self._asking.call(self._store.pause)
        return PollResult(moved + others.count, more=True)

    def _count(self, report: MoveReport, duration: timedelta) -> None:
        self._metrics.fetched(report.delivered + report.expired, duration)
        if report.delivered:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%d messages delivered in %.1f ms", report.delivered, duration.total_seconds() * 1_000)
            self._metrics.delivered(report.delivered, ())
        if report.expired:
            self._metrics.expired(report.expired)

    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self._dispatcher.listen(wake)
