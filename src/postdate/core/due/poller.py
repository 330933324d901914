"""The loop that polls a store for due messages.

It sleeps until the next message is due, or until a message is stored that is due earlier. Then it claims and delivers
the due messages, and sleeps again.

Source: ADR 0002; ADR 0047 (pauses are durations, so setting the machine's clock does not change
them).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

import anyio

from postdate.clock import Clock, in_real_time, time_until
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.health.deadlines import STOP_DEADLINE, translate_store_errors
from postdate.errors import PostdateError
from postdate.ports import Wake
from postdate.runtime.reporting import duration_text
from postdate.runtime.resource import Resource
from postdate.runtime.threads import WakeUp

LONGEST_SLEEP = timedelta(minutes=1)
"""The poller polls at least this often, also if nothing wakes it (docs/specification-rows.md, row 34)."""

_SHORTEST_POLL_INTERVAL = timedelta(milliseconds=1)
"""The shortest time between the beginnings of two polls, if the first one returned messages.

Where messages fall due one by one, thousands a second, a poll for each message would cost the database more than the
messages do. With this pause, each poll returns the few messages of a millisecond. A poll after a sleep begins at once.
"""

_SHORTEST_PAUSE = timedelta(milliseconds=50)
"""The shortest pause after a failed poll. A wake-up does not shorten it."""

_STALLED_AFTER = timedelta(minutes=2)
"""This long after the longest sleep a poller without a new poll is reported as a problem.

Calls of stores have shorter deadlines, so a poll that is merely slow is not reported.
"""

_SHORTEST_REPOLL_PAUSE = timedelta(milliseconds=1)
_LONGEST_REPOLL_PAUSE = timedelta(seconds=1)
_JUST_AFTER = timedelta(microseconds=1)
"""A message is due strictly after its due time. One microsecond is the smallest step of a `datetime`."""

log = logging.getLogger("postdate.poller")


@dataclass(frozen=True, slots=True)
class PollResult:
    """The result of one poll.

    Args:
        count: number of messages that the poll claimed or moved.
        has_more: whether more messages may be due already; then the poller does not sleep.
        next_attempt: when the next message may be attempted, as known at the poll; ``None`` if there is no message.
        has_polled: whether the store was called. If not, the result does not say whether the store works.
    """

    count: int
    has_more: bool
    next_attempt: datetime | None = None
    has_polled: bool = True


class DueWork(Protocol):
    """The source of due messages, and the work on them."""

    def overlap_batches(self) -> AbstractAsyncContextManager[None]:
        """Let batches that :meth:`deliver_due` starts overlap.

        Leaving the context waits until all of them have ended.
        """
        ...

    async def deliver_due(self, now: datetime) -> PollResult:
        """Deliver one batch of messages that are due strictly before ``now``, or start its delivery."""
        ...

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Register ``wake``, called when a message is stored that is due before all others; return a function to stop.

        ``wake`` may be called in any thread.
        """
        ...


class Poller:
    """The loop of one process that polls for due messages.

    Start :meth:`run` as a task. After :meth:`stop` the loop claims nothing more, and `run` ends when the batches in
    flight have ended.
    """

    def __init__(
        self,
        work: DueWork,
        clock: Clock,
        breaker: RepeatedFailures,
        on_recovered: Callable[[], None] = lambda: None,
        longest_sleep: timedelta = LONGEST_SLEEP,
        resource: Resource | None = None,
    ) -> None:
        self._longest_sleep = longest_sleep
        self._work, self._clock, self._on_recovered = work, clock, on_recovered
        self._stop = anyio.Event()
        self.listening = anyio.Event()
        """Set when the store has registered the wake-up.

        Also set when the store has refused. Then polling starts without wake-ups, and the registration is retried.
        """
        self._wake_up: WakeUp | None = None
        self._polled_at: float | None = None
        """Monotonic seconds when the last poll began; ``None`` before the first. Read in other threads."""
        self._stalled_after = longest_sleep + in_real_time(clock, _STALLED_AFTER)
        self._stop_deadline = in_real_time(clock, STOP_DEADLINE)
        self._calls = (resource or Resource("the store")).calls(
            "cannot claim due messages", log, logging.WARNING, breaker=breaker
        )
        self._listening_calls = self._calls.resource.calls("cannot be notified of new messages", log, logging.WARNING)

    async def run(self) -> None:
        """Deliver due messages until stopped; then wait for the batches in flight."""
        self._wake_up = wake_up = WakeUp()
        async with self._work.overlap_batches(), anyio.create_task_group() as tasks:
            poll_scope = anyio.CancelScope()
            tasks.start_soon(self._cancel_poll_after_stop, poll_scope)
            tasks.start_soon(self._listen, wake_up)
            with poll_scope:
                await self.listening.wait()  # else a message that is stored after the first poll might wake nothing
                await self._poll_until_stopped(wake_up)
            self.listening.set()
            tasks.cancel_scope.cancel()

    async def _cancel_poll_after_stop(self, poll_scope: anyio.CancelScope) -> None:
        """Cancel a poll that has not ended soon after the stop, as the store may never answer."""
        await self._stop.wait()
        await self._clock.wait_for(anyio.Event(), self._stop_deadline)
        poll_scope.cancel()

    async def _poll_until_stopped(self, wake_up: WakeUp) -> None:
        repoll_pause = _SHORTEST_REPOLL_PAUSE
        while not self._stop.is_set():
            wake_up.reset()  # before the poll: a wake-up during the poll must end the sleep that follows it
            now, started_at = self._clock.now(), self._clock.monotonic()
            self._polled_at = started_at
            try:
                with translate_store_errors(self._work):
                    result = await self._work.deliver_due(now)
            except PostdateError as error:
                await self._pause_after(error, wake_up)
                continue
            if result.has_polled and self._calls.report_success(self._clock.monotonic()):
                self._on_recovered()
            if result.has_more:
                continue
            due_but_not_claimed = result.count == 0 and result.next_attempt is not None and result.next_attempt < now
            repoll_pause = (
                min(repoll_pause * 2, _LONGEST_REPOLL_PAUSE) if due_but_not_claimed else _SHORTEST_REPOLL_PAUSE
            )
            await self._sleep(wake_up, result.next_attempt, repoll_pause)
            if result.count:
                pause = time_until(started_at + _SHORTEST_POLL_INTERVAL.total_seconds(), self._clock.monotonic())
                await self._clock.wait_for(self._stop, pause)

    async def _listen(self, wake_up: WakeUp) -> None:
        """Register the wake-up with the store until this is cancelled.

        While the store refuses, this method retries; meanwhile the poller polls by its own timer.
        """
        while True:
            try:
                with translate_store_errors(self._work):
                    stop_listening = await self._work.listen(wake_up.wake)
                break
            except PostdateError as error:
                pause = self._listening_calls.report_failure(error, self._clock.monotonic())
                self.listening.set()
                await self._clock.wait_for(self._stop, pause)
                if self._stop.is_set():
                    return
        try:
            if self._listening_calls.report_success(self._clock.monotonic()):
                wake_up.wake()  # a message that was stored since the last poll has woken nothing
            self.listening.set()
            await anyio.sleep_forever()
        finally:
            stop_listening()

    async def _sleep(self, wake_up: WakeUp, next_attempt: datetime | None, repoll_pause: timedelta) -> None:
        """Sleep until the next attempt, a wake-up, or the end of the longest sleep.

        ``repoll_pause`` is the shortest sleep when a message is due but could not be claimed, because another process
        has it (row 57). Without it the poller would poll without a pause until that process has finished.
        """
        duration = self._longest_sleep
        if next_attempt is not None:
            at_least = repoll_pause if repoll_pause > _SHORTEST_REPOLL_PAUSE else timedelta(0)
            duration = min(duration, max(next_attempt - self._clock.now() + _JUST_AFTER, at_least))
        await self._clock.wait_for(wake_up.event, duration)

    async def _pause_after(self, error: PostdateError, wake_up: WakeUp) -> None:
        """Pause after a failed poll.

        A wake-up ends the pause, as it may mean that the store is back. The first part of the pause ignores wake-ups,
        so that many of them do not make the poller spin.
        """
        pause = self._calls.report_failure(error, self._clock.monotonic())
        await self._clock.wait_for(self._stop, _SHORTEST_PAUSE)
        if not self._stop.is_set():
            await self._clock.wait_for(wake_up.event, pause - _SHORTEST_PAUSE)

    @property
    def problem(self) -> str | None:
        """A description of the problem if no poll has begun for too long, else ``None``. Read in any thread."""
        if self._polled_at is None or self._stop.is_set():
            return None
        seconds = self._clock.monotonic() - self._polled_at
        text = f"due messages have not been polled for {duration_text(seconds)}"
        return text if seconds > self._stalled_after.total_seconds() else None

    def stop(self) -> None:
        self._stop.set()
        if self._wake_up is not None:
            self._wake_up.wake()
