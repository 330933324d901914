"""Polls a storage for due timeouts, and announces each to the dispatch step by a control message.

One poll goes ahead from the last announced timeout. Every few seconds another poll goes back to the first timeout. It
finds timeouts that were committed late with an earlier due time, or stored by other processes (row 98). NServiceBus
finds these at its next start only. Announced timeouts that may still be stored are remembered, so that none is
announced twice. Source: ADR 0014.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from postdate.clock import Clock, later, time_until
from postdate.core.due.poller import PollResult
from postdate.core.health.circuit_breaker import do_nothing
from postdate.core.health.deadlines import Deadlines
from postdate.core.timeout_manager.steps import announcement
from postdate.errors import PostdateError, TransportUnavailable
from postdate.ports import Transport, Wake
from postdate.ports.timeouts import DueTimeout, TimeoutPersister
from postdate.runtime.reporting import NO_METRICS, Metrics

log = logging.getLogger("postdate.timeout_manager")

AT_ONCE: Final = 2_000
"""The largest number of announced timeouts whose dispatch is not reported yet.

A backlog waits in its storage, which is queried in chunks, and not in the queue of the dispatch step.
"""

REMEMBERED: Final = 100_000
"""The largest number of remembered timeouts that are announced and stay stored.

Their control messages are in the error queue, or other processes have claimed them. They do not delay other timeouts.
"""

DISPATCHED_WITHIN: Final = timedelta(minutes=10)
"""A timeout that was announced longer ago and is still stored does not count against :data:`AT_ONCE` any more."""

OLDEST: Final = timedelta(days=3652)
"""Ten years. At its start, a process queries for timeouts that are overdue by at most this time."""

POLL_BACK_INTERVAL: Final = timedelta(seconds=5)
"""The interval between two polls back.

It limits how late a timeout is that another process has stored, or that was committed after its due time.
"""

_POLL_BACK_INTERVAL_WHEN_FULL: Final = timedelta(seconds=1)
"""The interval while no more timeouts may be announced.

Other processes may have dispatched some of the announced timeouts. They do not report it, so only a poll back finds it.
"""

_PAUSE_PER_POLL_BACK: Final = 20
"""The pause between polls back, as a multiple of the duration of the last one.

Polling back takes long where many announced timeouts are stored. This limits its part of the time.
"""

CHUNK: Final = 1_000
"""The largest number of timeouts in one query of the storage."""

_SENT_AT_ONCE: Final = 200
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Announcement:
    due: datetime
    announced_at: datetime


class AnnouncedTimeouts:
    """The announced timeouts that may still be stored, a limited number."""

    def __init__(self, floor: datetime, at_once: int = AT_ONCE, remembered: int = REMEMBERED) -> None:
        self.floor = floor
        """The due time, exclusive, at which polls back begin.

        It rises when too many timeouts would have to be remembered. Timeouts due before it have been announced. A
        timeout with such a due time that is stored later is found at the next start only.
        """
        self._at_once, self._remembered = at_once, remembered
        self._announcements: dict[str, _Announcement] = {}
        self._unexpected_dues: dict[str, datetime] = {}

    def __contains__(self, timeout_id: str) -> bool:
        return timeout_id in self._announcements or timeout_id in self._unexpected_dues

    @property
    def free_capacity(self) -> int:
        """The number of timeouts that may be announced now; 0 or more."""
        return max(self._at_once - len(self._announcements), 0)

    @property
    def has_much_capacity(self) -> bool:
        """Whether enough timeouts may be announced to make a poll worth its cost."""
        return 2 * self.free_capacity >= self._at_once

    def add(self, timeouts: Collection[DueTimeout], now: datetime) -> None:
        for each in timeouts:
            self._announcements[each.timeout_id] = _Announcement(each.due, now)

    def forget(self, timeout_id: str) -> None:
        """Forget a timeout because it is not stored any more, or because announcing it failed."""
        self._announcements.pop(timeout_id, None)
        self._unexpected_dues.pop(timeout_id, None)

    def stop_expecting(self, timeout_id: str) -> None:
        """Count a timeout as announced and stored, but not as waiting for its dispatch any more."""
        entry = self._announcements.pop(timeout_id, None)
        if entry is not None:
            self._unexpected_dues[timeout_id] = entry.due
            self._enforce_bounds()

    def reconcile(self, after: datetime, until: datetime, timeouts: Collection[DueTimeout], now: datetime) -> None:
        """Forget timeouts due in ``(after, until]`` that are not stored; ``timeouts`` are all stored ones of this span.

        Stop expecting timeouts that were announced more than :data:`DISPATCHED_WITHIN` ago.
        """
        stored = {each.timeout_id for each in timeouts}
        for timeout_id, entry in list(self._announcements.items()):
            if after < entry.due <= until and timeout_id not in stored:
                self.forget(timeout_id)
            elif not timedelta(0) <= now - entry.announced_at <= DISPATCHED_WITHIN:
                # Or announced in the future, because the clock was set back. Another process may have dispatched this
                # timeout long ago, and polls do not reach its due time now. It must not delay timeouts due earlier.
                self.stop_expecting(timeout_id)
        for timeout_id, due in list(self._unexpected_dues.items()):
            if after < due <= until and timeout_id not in stored:
                self.forget(timeout_id)

    def _enforce_bounds(self) -> None:
        if len(self._unexpected_dues) <= self._remembered:
            return
        by_due = sorted(self._unexpected_dues.items(), key=lambda each: each[1])
        oldest_half = by_due[: len(by_due) // 2]
        self.floor = max(self.floor, oldest_half[-1][1])
        self._unexpected_dues = {timeout_id: due for timeout_id, due in by_due if due > self.floor}
        log.warning(
            "%d due timeouts are stored whose control messages went to the error queue; those due until %s are not "
            "looked for any more before the next start: return the messages, or have them removed",
            len(by_due),
            self.floor,
        )


class DueTimeouts:
    """The due work that announces due timeouts. With ``set_up`` it sets up the storage before its first poll."""

    def __init__(  # noqa: PLR0913 - collaborators; put together in one place
        self,
        persister: TimeoutPersister,
        transport: Transport,
        queue: str,
        clock: Clock,
        *,
        set_up: bool = False,
        metrics: Metrics = NO_METRICS,
        most_expected: int = AT_ONCE,
        most_remembered: int = REMEMBERED,
    ) -> None:
        # All fields belong to the thread of the event loop.
        self._persister = persister
        self._transport = transport
        # The queue of the dispatch step.
        self._queue = queue
        self._clock = clock
        # `False` once the storage is set up.
        self._set_up = set_up
        self._metrics = metrics
        self._store_deadlines = Deadlines.of_store(persister, clock)
        self._send_deadlines = Deadlines.of_transport(transport, clock)
        now = clock.now()
        self._announced = AnnouncedTimeouts(later(now, -OLDEST), most_expected, most_remembered)
        # A due time. Every stored timeout due up to this time was announced, except for timeouts that polls back find.
        self._all_announced_until = self._announced.floor
        # The latest due time of an announced timeout. Polls back end here.
        self._latest_announced = self._announced.floor
        # Timeouts of the last query that are not announced yet, in the order of their due times.
        self._fetched: deque[DueTimeout] = deque()
        # When the last query asked to be repeated.
        self._next_query: datetime | None = now
        # The due time at which the current poll back goes on; `None`: the next one begins at the floor.
        self._polled_back_to: datetime | None = None
        # When to poll back next, in monotonic seconds.
        self._poll_back_at = clock.monotonic() + POLL_BACK_INTERVAL.total_seconds()
        # How long the current poll back has taken so far, over all of its chunks.
        self._poll_back_duration = timedelta(0)
        self._removed_meanwhile: set[str] | None = None
        """Ids of timeouts removed during the query of a poll back, whose answer may still have them; else ``None``."""
        # The instant until which the poller sleeps, as far as this work knows.
        self._next_poll = _NEVER
        self._wake: Wake = do_nothing

    # --- the work of a poller -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def overlap_batches(self) -> AsyncGenerator[None]:
        yield

    async def listen(self, wake: Wake) -> Callable[[], None]:
        self._wake = wake

        def stop() -> None:
            self._wake = do_nothing

        return stop

    async def deliver_due(self, now: datetime) -> PollResult:
        """Announce some of the timeouts due by ``now``, inclusive. After a failure, the next poll goes on."""
        self._next_poll = _NEVER  # this poll may miss timeouts that are stored meanwhile: they wake the poller
        if self._set_up:
            await self._store_deadlines.call_in_task(self._persister.setup)
            self._set_up = False
        if now < self._announced.floor:  # the clock was set back by years: it was far ahead when the floor was set
            self._announced.floor = self._all_announced_until = self._latest_announced = later(now, -OLDEST)
        started_at = self._clock.monotonic()
        count = await self._poll_ahead(now)
        self._poll_back_within(self._poll_back_pause())
        if self._clock.monotonic() >= self._poll_back_at:
            count += await self._poll_back(now)
        self._metrics.report_poll(count, timedelta(seconds=self._clock.monotonic() - started_at))
        next_query = self._next_query
        if self._fetched:  # more than the capacity; polling back may have freed some
            next_query = now if self._announced.free_capacity else None
        next_poll_back = later(self._clock.now(), time_until(self._poll_back_at, self._clock.monotonic()))
        self._next_poll = next_poll_back if next_query is None else min(next_poll_back, next_query)
        return PollResult(count, self._next_poll <= now, self._next_poll)

    async def _poll_ahead(self, now: datetime) -> int:
        if self._fetched and self._fetched[-1].due > now:  # the clock was set back, and these are not due any more
            self._fetched.clear()
        if not self._fetched:
            chunk = await self._store_deadlines.call_in_task(
                lambda: self._persister.next_chunk(self._all_announced_until, now, CHUNK)
            )
            self._fetched.extend(chunk.due)
            self._next_query = chunk.next_query
        count = 0
        while self._fetched and (capacity := self._announced.free_capacity):
            batch = [self._fetched[i] for i in range(min(capacity, _SENT_AT_ONCE, len(self._fetched)))]
            count += await self._announce(batch)
            for _ in batch:
                self._fetched.popleft()
            if not self._fetched:  # only now, so that a timeout that could not be announced is not skipped (row 97)
                self._all_announced_until = max(self._all_announced_until, batch[-1].due)
        return count

    async def _poll_back(self, now: datetime) -> int:
        """Query one chunk of due timeouts that was queried before; announce timeouts that are not announced yet."""
        started_at = self._clock.monotonic()
        after, until = self._polled_back_to or self._announced.floor, min(self._latest_announced, now)
        self._removed_meanwhile = removed_meanwhile = set[str]()
        try:
            chunk = await self._store_deadlines.call_in_task(lambda: self._persister.next_chunk(after, until, CHUNK))
        finally:
            self._removed_meanwhile = None
        is_cut = bool(chunk.due) and chunk.next_query is not None and chunk.next_query <= until
        last_due = chunk.due[-1].due if is_cut else until
        # Not `now`: timeouts that were announced since then would look as if the clock had been set back.
        self._announced.reconcile(after, last_due, chunk.due, self._clock.now())
        floor = self._announced.floor  # read now: `reconcile` may have raised it
        new_timeouts = [
            each
            for each in chunk.due
            if each.timeout_id not in self._announced and each.timeout_id not in removed_meanwhile
        ]
        count = await self._announce(
            [each for each in new_timeouts if each.due > floor][: self._announced.free_capacity]
        )
        self._poll_back_duration += timedelta(seconds=self._clock.monotonic() - started_at)
        self._polled_back_to = last_due if is_cut else None
        if not is_cut:
            self._poll_back_at = math.inf
            self._poll_back_within(self._poll_back_pause())
            self._poll_back_duration = timedelta(0)
        return count

    def _poll_back_within(self, pause: timedelta) -> None:
        self._poll_back_at = min(self._poll_back_at, self._clock.monotonic() + pause.total_seconds())

    def _poll_back_pause(self) -> timedelta:
        usual = _POLL_BACK_INTERVAL_WHEN_FULL if self._fetched else POLL_BACK_INTERVAL
        return max(usual, _PAUSE_PER_POLL_BACK * self._poll_back_duration)

    async def _announce(self, timeouts: Sequence[DueTimeout]) -> int:
        """Send control messages for timeouts that were not announced yet; return how many."""
        new_timeouts = [each for each in timeouts if each.timeout_id not in self._announced]
        for start in range(0, len(new_timeouts), _SENT_AT_ONCE):
            await self._send(new_timeouts[start : start + _SENT_AT_ONCE])
        return len(new_timeouts)

    async def _send(self, timeouts: Sequence[DueTimeout]) -> None:
        # Before the send: when all control messages are sent, the first timeouts may be dispatched already.
        self._announced.add(timeouts, self._clock.now())
        no_answer = TransportUnavailable("the transport has not answered for every control message")
        errors: Sequence[PostdateError | None] = [no_answer] * len(timeouts)
        try:
            envelopes = [announcement(each.timeout_id, self._queue) for each in timeouts]
            answers = await self._send_deadlines.call_in_task(
                lambda: self._transport.send(envelopes, self._clock.now())
            )
            if len(answers) == len(timeouts):
                errors = answers
        finally:
            for each, error in zip(timeouts, errors, strict=True):
                if error is None:
                    self._latest_announced = max(self._latest_announced, each.due)
                else:
                    self._announced.forget(each.timeout_id)
        for error in errors:
            if error is not None:
                raise error

    # --- reports of the steps -------------------------------------------------------------------------------------

    def report_stored(self, due: datetime) -> None:
        """Report a timeout that was stored and committed; wake the poller if it is due before the next poll."""
        if due <= self._all_announced_until:
            self._poll_back_within(max(due - self._clock.now(), timedelta(0)))
        if due < self._next_poll:
            self._wake()

    def forget(self, timeout_id: str) -> None:
        """Forget a timeout because it is not stored any more."""
        self._announced.forget(timeout_id)
        if self._removed_meanwhile is not None:
            self._removed_meanwhile.add(timeout_id)
        self._wake_if_capacity_freed()

    def stop_expecting(self, timeout_id: str) -> None:
        """Stop expecting the dispatch of a timeout: it stays stored, as its control message is in the error queue."""
        self._announced.stop_expecting(timeout_id)
        self._wake_if_capacity_freed()

    def _wake_if_capacity_freed(self) -> None:
        if self._fetched and self._announced.has_much_capacity:
            self._wake()
