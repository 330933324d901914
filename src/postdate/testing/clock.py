"""A clock that stands still until a test moves it: a month of waiting takes only as long as the work in that month."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sized
from datetime import UTC, datetime, timedelta

import anyio
import anyio.lowlevel
import anyio.to_thread

from postdate.clock import later
from postdate.messages import aware_utc
from postdate.runtime.threads import thread_limiter

START = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)

_IDLE_ROUNDS = 5
# A worker thread ends in real time. This is how often the clock checks whether it has ended.
_THREAD_CHECK_SECONDS = 0.0002


class VirtualClock:
    """Implements :class:`postdate.Clock` without real time.

    Waits end in the order of their times; waits for one instant end in the order in which they began. After each wait,
    every task runs until all of them wait again. So a program does the same things in the same order every time.

    For asyncio. Tasks that wait for something outside the program (a socket, a real timer) count as waiting. The clock
    waits for worker threads.

    Args:
        start: first time of the clock; aware.
    """

    def __init__(self, start: datetime = START) -> None:
        self._now = aware_utc(start, "the start of the clock")
        # A wait lasts for a duration, as on a real machine: setting the clock does not end it.
        self._elapsed = timedelta(0)
        self._waits: list[tuple[timedelta, int, anyio.CancelScope]] = []
        self._numbers = itertools.count()

    def now(self) -> datetime:
        """Return the virtual instant, in UTC."""
        return self._now

    def monotonic(self) -> float:
        """Return the virtual seconds that have passed; :meth:`step` does not change them."""
        return self._elapsed.total_seconds()

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        """Return when ``event`` is set or the clock was moved to ``until``."""
        await self.wait_for(event, until - self._now)

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        """Return when ``event`` is set or the clock was moved on by ``duration``."""
        if duration <= timedelta(0):
            await anyio.lowlevel.checkpoint()
            return
        with anyio.CancelScope() as scope:
            heapq.heappush(self._waits, (self._elapsed + duration, next(self._numbers), scope))
            try:
                await event.wait()
            finally:
                self._forget(scope)

    def _forget(self, scope: anyio.CancelScope) -> None:
        remaining = [wait for wait in self._waits if wait[2] is not scope]
        if len(remaining) != len(self._waits):
            heapq.heapify(remaining)
            self._waits = remaining

    async def sleep(self, duration: timedelta) -> None:
        """Return when the clock was moved on by ``duration``."""
        await self.wait_for(anyio.Event(), duration)

    async def advance(self, duration: timedelta) -> None:
        """Move the clock on by ``duration``; tasks run as their waits end.

        Raises:
            ValueError: the duration is negative; see :meth:`step` for a clock that is set back.
        """
        if duration < timedelta(0):
            raise ValueError(f"time does not run backwards by {-duration}; step() sets the clock")
        end = self._elapsed + duration
        await self.run_until_idle()
        while self._waits and self._waits[0][0] <= end:
            wake_at, _, scope = heapq.heappop(self._waits)
            self._advance_elapsed(wake_at)
            # A scope that is cancelled from a callback does not build a description of the cancelling task. That saves
            # a third of the time.
            asyncio.get_running_loop().call_soon(scope.cancel)
            await self.run_until_idle()
        self._advance_elapsed(end)
        await self.run_until_idle()

    async def advance_to(self, instant: datetime) -> None:
        """Move the clock on to ``instant``; see :meth:`advance`."""
        await self.advance(instant - self._now)

    def step(self, duration: timedelta) -> None:
        """Set the clock forwards or backwards, as an operator or a time server does; waits last as long as before."""
        self._now += duration

    def _advance_elapsed(self, elapsed: timedelta) -> None:
        if elapsed > self._elapsed:
            self._now += elapsed - self._elapsed
            self._elapsed = elapsed

    @property
    def next_wait(self) -> datetime | None:
        """When the next wait ends, UTC; ``None`` when no task waits for this clock."""
        return later(self._now, self._waits[0][0] - self._elapsed) if self._waits else None

    async def run_until_idle(self) -> None:
        """Let every other task run until all of them wait."""
        threads, ready_callbacks = (
            (anyio.to_thread.current_default_thread_limiter(), thread_limiter()),
            _ready_callbacks(),
        )
        idle_rounds = 0
        while idle_rounds < _IDLE_ROUNDS:
            await asyncio.sleep(0)
            if any(limiter.borrowed_tokens for limiter in threads):
                await asyncio.sleep(_THREAD_CHECK_SECONDS)
                idle_rounds = 0
            elif ready_callbacks is None:
                idle_rounds += 1
            elif not ready_callbacks:
                return


def _ready_callbacks() -> Sized | None:
    """Return the callbacks that asyncio's event loop is about to run, or ``None`` if the loop does not show them."""
    return getattr(asyncio.get_running_loop(), "_ready", None)
