"""The mover: moves due messages to queues inside one database, if store and queues share it. Source: ADR 2."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Final

from postdate.clock import Clock
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.finishing import NO_JOURNAL, Journal
from postdate.core.due.poller import DueWork, PollResult
from postdate.core.due.rate_limits import LimitedWork
from postdate.core.simple_store import enlisting_store
from postdate.ports import ClaimingStore, MoveReport, MovingStore, Transport, Wake
from postdate.ports.limits import LimitingStore
from postdate.runtime.reporting import NO_METRICS, Metrics

_MOVED_AT_ONCE: Final = 1_000
"""The largest number of messages moved in one call."""

_UNMOVED_AT_ONCE: Final = 25
"""The largest number of messages that the dispatcher claims after a move, while no destination is limited."""

log = logging.getLogger("postdate.dispatcher")


def due_work(
    store: ClaimingStore,
    transport: Transport,
    dispatcher: Dispatcher,
    clock: Clock,
    metrics: Metrics = NO_METRICS,
    journal: Journal = NO_JOURNAL,
) -> DueWork:
    """Return the work that delivers due messages.

    It is a mover if store and queues share a database, else the dispatcher. Limits are applied if the store has them.
    """
    moving_store = enlisting_store(store, transport)
    work: DueWork = dispatcher if moving_store is None else Mover(moving_store, dispatcher, clock, metrics, journal)
    return LimitedWork(work, dispatcher, store, clock) if isinstance(store, LimitingStore) else work


class Mover:
    """Moves due messages inside the database of store and queues. ``dispatcher`` sends messages for other queues."""

    def __init__(
        self,
        store: MovingStore,
        dispatcher: Dispatcher,
        clock: Clock,
        metrics: Metrics = NO_METRICS,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        self._store, self._dispatcher, self._clock, self._metrics = store, dispatcher, clock, metrics
        # Shared with the dispatcher: stopping waits only once for a store that does not answer.
        self._deadlines = dispatcher.store_deadlines
        self._journal, self._listing = journal, journal is not NO_JOURNAL

    def overlap_batches(self) -> AbstractAsyncContextManager[None]:
        return self._dispatcher.overlap_batches()

    async def deliver_due(self, now: datetime) -> PollResult:
        started_at = self._clock.monotonic()
        report = await self._deadlines.call_in_task(
            lambda: self._store.move_due(now, _MOVED_AT_ONCE, listing=self._listing)
        )
        if report.messages is not None:
            self._journal.record_move(report.messages, now)
        self._report_move(report, now, timedelta(seconds=self._clock.monotonic() - started_at))
        moved_count = report.delivered + report.expired
        needs_dispatch = report.needs_claim or self._dispatcher.finisher.unwritten_outcomes
        limits = self._dispatcher.limits
        if report.needs_claim:  # the limits of these messages may be newer than the cached ones
            limits.forget()
        # Only a few at each poll: messages whose destination has no queue must not delay the others.
        dispatch_result = (
            await self._dispatcher.deliver_due(now, _MOVED_AT_ONCE if limits.has_limits else _UNMOVED_AT_ONCE)
            if needs_dispatch
            else PollResult(0, False, report.next_attempt)
        )
        if moved_count < _MOVED_AT_ONCE:
            # Messages that were not moved belong to the dispatcher now, and its attempt times count.
            own_attempt = None if report.needs_claim else report.next_attempt
            attempts = [each for each in (own_attempt, dispatch_result.next_attempt) if each is not None]
            return PollResult(
                moved_count + dispatch_result.count, dispatch_result.has_more, min(attempts, default=None)
            )
        await self._deadlines.call_in_task(self._store.yield_to_writers)
        return PollResult(moved_count + dispatch_result.count, has_more=True)

    def _report_move(self, report: MoveReport, now: datetime, duration: timedelta) -> None:
        if report.delivered and log.isEnabledFor(logging.DEBUG):
            log.debug("%d messages delivered in %.1f ms", report.delivered, duration.total_seconds() * 1_000)
        if self._metrics is NO_METRICS:
            return
        self._metrics.report_poll(report.delivered + report.expired, duration)
        if report.delivered:
            first = [] if report.first_due is None else [(now - report.first_due + duration).total_seconds()]
            self._metrics.report_deliveries(report.by_destination, first)
        if report.expired:
            self._metrics.count("expired", report.expired)

    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self._dispatcher.listen(wake)
