"""Looks for due timeouts, and announces each to the dispatch step by a control message. Source: specification 4.7.

One look goes forward from the last announced timeout. Every few seconds another begins at the beginning, for timeouts
that were committed late with an earlier due time, or stored by other processes (row 98): upstream finds these at its
next start. Announced timeouts that may still be stored are remembered: none is announced twice. Source: ADR 0014.
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
"""Timeouts announced and not heard of since: with so many, no others are announced. A backlog waits in its storage,
which is asked for it piece by piece, not in the queue of the dispatcher."""

REMEMBERED: Final = 100_000
"""Timeouts announced whose control messages are in the error queue, or that others have claimed: these hold up no
others."""

DISPATCHED_WITHIN: Final = timedelta(minutes=10)
"""A timeout that was announced longer ago and is still stored does not count as on its way any more."""

OLDEST: Final = timedelta(days=3652)
"""Ten years: how far back a process looks for due timeouts when it starts."""

POLL_BACK_INTERVAL: Final = timedelta(seconds=5)
"""How late a timeout may be that another process has stored, or that was committed after its due time."""

_POLL_BACK_INTERVAL_WHEN_FULL: Final = timedelta(seconds=1)
"""While as many are announced as may be: others may have dispatched some of them, which is not told."""

_PAUSE_PER_POLL_BACK: Final = 20
"""Where many stored timeouts have been announced, looking back takes one part in so many of the time."""

CHUNK: Final = 1_000
_SENT_AT_ONCE: Final = 200
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Announcement:
    due: datetime
    announced_at: datetime


class AnnouncedTimeouts:
    """Remembers announced timeouts, within bounds."""

    def __init__(self, floor: datetime, at_once: int = AT_ONCE, remembered: int = REMEMBERED) -> None:
        self.floor = floor
        """Due time, exclusive, where looks for missed timeouts begin. It rises when more would have to be remembered
        than there is room for: timeouts due below it have been announced, and one stored there later is found at the
        next start only."""
        self._at_once, self._remembered = at_once, remembered
        self._announcements: dict[str, _Announcement] = {}
        self._unexpected_dues: dict[str, datetime] = {}

    def __contains__(self, timeout_id: str) -> bool:
        return timeout_id in self._announcements or timeout_id in self._unexpected_dues

    @property
    def free_capacity(self) -> int:
        """How many more may be announced now; 0 or more."""
        return max(self._at_once - len(self._announcements), 0)

    @property
    def has_much_capacity(self) -> bool:
        """Whether announcing more is worth a look."""
        return 2 * self.free_capacity >= self._at_once

    def add(self, timeouts: Collection[DueTimeout], now: datetime) -> None:
        for each in timeouts:
            self._announcements[each.timeout_id] = _Announcement(each.due, now)

    def forget(self, timeout_id: str) -> None:
        """Note that a timeout is not stored any more, or was not announced after all."""
        self._announcements.pop(timeout_id, None)
        self._unexpected_dues.pop(timeout_id, None)

    def stop_expecting(self, timeout_id: str) -> None:
        """Note that a timeout stays stored, and that nothing will be heard of it for now."""
        entry = self._announcements.pop(timeout_id, None)
        if entry is not None:
            self._unexpected_dues[timeout_id] = entry.due
            self._enforce_bounds()

    def reconcile(self, after: datetime, until: datetime, timeouts: Collection[DueTimeout], now: datetime) -> None:
        """Reconcile with the storage: ``timeouts`` are all that is due in ``(after, until]``; forget others."""
        stored = {each.timeout_id for each in timeouts}
        for timeout_id, entry in list(self._announcements.items()):
            if after < entry.due <= until and timeout_id not in stored:
                self.forget(timeout_id)
            elif not timedelta(0) <= now - entry.announced_at <= DISPATCHED_WITHIN:
                # Announced in the future: the clock was set back. Others may have dispatched it long ago, and looks do
                # not come as far as its due time: it must not delay timeouts that are due before.
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
    """Announces due timeouts; the work of a poller. With ``set_up`` it sets up the storage before its first look."""

    def __init__(  # noqa: PLR0913 - collaborators; put together in one place
        self,
        persister: TimeoutPersister,
        transport: Transport,
        queue: str,
        clock: Clock,
        *,
        set_up: bool = False,
        metrics: Metrics = NO_METRICS,
        at_once: int = AT_ONCE,
        remembered: int = REMEMBERED,
    ) -> None:
        self._persister, self._transport, self._queue, self._clock = persister, transport, queue, clock
        self._set_up, self._metrics = set_up, metrics
        self._store_deadlines = Deadlines.of_store(persister, clock)
        self._send_deadlines = Deadlines.of_transport(transport, clock)
        now = clock.now()
        self._announced = AnnouncedTimeouts(later(now, -OLDEST), at_once, remembered)
        # Due times. Every timeout due up to the first was announced, and some may be that are due up to the second.
        self._all_announced_until = self._latest_announced = self._announced.floor
        self._fetched: deque[DueTimeout] = deque()
        self._next_query: datetime | None = now
        self._polled_back_to: datetime | None = None
        self._poll_back_at = clock.monotonic() + POLL_BACK_INTERVAL.total_seconds()
        self._poll_back_duration = timedelta(0)
        self._removed_meanwhile: set[str] | None = None
        """Ids removed while the storage is looked through again: its answer may still have them."""
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
        """Announce some of the timeouts due by ``now``, inclusive; one that cannot be sent is next."""
        self._next_poll = _NEVER  # this look may miss timeouts that are stored meanwhile: they wake the poller
        if self._set_up:
            await self._store_deadlines.call_in_task(self._persister.setup)
            self._set_up = False
        if now < self._announced.floor:  # the clock was set back by years: it was far ahead when this was made
            self._announced.floor = self._all_announced_until = self._latest_announced = later(now, -OLDEST)
        started_at = self._clock.monotonic()
        count = await self._poll_ahead(now)
        self._poll_back_within(self._poll_back_pause())
        if self._clock.monotonic() >= self._poll_back_at:
            count += await self._poll_back(now)
        self._metrics.report_poll(count, timedelta(seconds=self._clock.monotonic() - started_at))
        next_query = self._next_query
        if self._fetched:  # more than there was room for; looking back may have made some
            next_query = now if self._announced.free_capacity else None
        next_poll_back = later(self._clock.now(), time_until(self._poll_back_at, self._clock.monotonic()))
        self._next_poll = next_poll_back if next_query is None else min(next_poll_back, next_query)
        return PollResult(count, self._next_poll <= now, self._next_poll)

    async def _poll_ahead(self, now: datetime) -> int:
        if self._fetched and self._fetched[-1].due > now:  # the clock was set back, and this is not due any more
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
            if not self._fetched:  # only now: one that could not be announced is not passed over (row 97)
                self._all_announced_until = max(self._all_announced_until, batch[-1].due)
        return count

    async def _poll_back(self, now: datetime) -> int:
        """Look again at one chunk of due timeouts that were looked at before; announce those that are new."""
        started_at = self._clock.monotonic()
        after, until = self._polled_back_to or self._announced.floor, min(self._latest_announced, now)
        self._removed_meanwhile = removed_meanwhile = set[str]()
        try:
            chunk = await self._store_deadlines.call_in_task(lambda: self._persister.next_chunk(after, until, CHUNK))
        finally:
            self._removed_meanwhile = None
        is_cut = bool(chunk.due) and chunk.next_query is not None and chunk.next_query <= until
        last_due = chunk.due[-1].due if is_cut else until
        # Not `now`: some were announced after it was read, and would count as announced before the clock was set back.
        self._announced.reconcile(after, last_due, chunk.due, self._clock.now())
        floor = self._announced.floor  # which may just have risen
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
        # Noted before: by the time that all are sent, some may be gone already.
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

    # --- what others tell ---------------------------------------------------------------------------------------

    def report_stored(self, due: datetime) -> None:
        """Note that a timeout was stored and committed."""
        if due <= self._all_announced_until:
            self._poll_back_within(max(due - self._clock.now(), timedelta(0)))
        if due < self._next_poll:
            self._wake()

    def forget(self, timeout_id: str) -> None:
        """Note that a timeout is not stored any more."""
        self._announced.forget(timeout_id)
        if self._removed_meanwhile is not None:
            self._removed_meanwhile.add(timeout_id)
        self._wake_if_capacity_freed()

    def stop_expecting(self, timeout_id: str) -> None:
        """Note that a timeout stays stored, as its control message is in the error queue now."""
        self._announced.stop_expecting(timeout_id)
        self._wake_if_capacity_freed()

    def _wake_if_capacity_freed(self) -> None:
        if self._fetched and self._announced.has_much_capacity:
            self._wake()
