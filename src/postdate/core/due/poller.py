"""Sleeps until the next message is due or something was stored that is due earlier; takes what is due; again.

Source: specification 1.7; ADR 0002; ADR 0047 (pauses are durations, whoever sets the clock).
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
from postdate.runtime.reporting import shown_duration
from postdate.runtime.resource import Resource
from postdate.runtime.threads import Alarm

LONGEST_SLEEP = timedelta(minutes=1)
"""The poller looks by itself at least this often, whatever wakes it (specification row 34)."""

_LOOKS_APART = timedelta(milliseconds=1)
"""After a look that found something, the next begins no sooner than this after it began.

Where messages fall due one by one, thousands a second, a look for each would cost the database more than the messages
do; so each look finds the few of a millisecond. A look after a pause begins at once.
"""

_SHORTEST_PAUSE = timedelta(milliseconds=50)
"""Between two looks that fail, however often it is woken."""

_STANDS_STILL_AFTER = timedelta(minutes=2)
"""The end of its longest sleep: calls of stores are given up sooner."""

_SHORTEST_LOOK_AGAIN = timedelta(milliseconds=1)
_LONGEST_LOOK_AGAIN = timedelta(seconds=1)
_JUST_AFTER = timedelta(microseconds=1)
"""A message may go strictly after its due time, and microseconds are what we count in."""

log = logging.getLogger("postdate.poller")


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one look found: ``count`` messages were dealt with, and ``more`` may be due already.

    ``next_attempt`` is when the next message may be attempted, as of the look; ``None`` without any. Without
    ``has_asked`` the look says nothing about the store.
    """

    count: int
    more: bool
    next_attempt: datetime | None = None
    has_asked: bool = True


class DueWork(Protocol):
    """Where due messages come from and what is done with them."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Let what :meth:`take` begins go on while more is taken; leaving waits for all of it."""
        ...

    async def take(self, now: datetime) -> PollResult:
        """Deal with one batch of messages due strictly before ``now``, or begin to."""
        ...

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Have ``wake`` called when something is due earlier than all before."""
        ...


class Poller:
    """One loop. Start :meth:`run` as a task; :meth:`stop` lets it finish what it has in hand."""

    def __init__(
        self,
        work: DueWork,
        clock: Clock,
        breaker: RepeatedFailures,
        recovered: Callable[[], None] = lambda: None,
        longest_sleep: timedelta = LONGEST_SLEEP,
        resource: Resource | None = None,
    ) -> None:
        self._longest_sleep = longest_sleep
        self._work, self._clock, self._recovered = work, clock, recovered
        self._stop = anyio.Event()
        self.listening = anyio.Event()
        """Set once the store wakes it; or once a store has refused that, and is asked again beside the looks."""
        self._alarm: Alarm | None = None
        self._looked_at: float | None = None
        """Seconds of the clock when the last look began; ``None``: it does not run."""
        self._stands_still_after = longest_sleep + in_real_time(clock, _STANDS_STILL_AFTER)
        self._stop_deadline = in_real_time(clock, STOP_DEADLINE)
        self._calls = (resource or Resource("the store")).calls(
            "cannot take due messages", log, logging.WARNING, breaker=breaker
        )
        self._listening_calls = self._calls.resource.calls("cannot be told of what is stored", log, logging.WARNING)

    async def run(self) -> None:
        """Take what is due until stopped; then wait for what was begun."""
        self._alarm = alarm = Alarm()
        async with self._work.running(), anyio.create_task_group() as tasks:
            looking = anyio.CancelScope()
            tasks.start_soon(self._end_soon_after_stop, looking)
            tasks.start_soon(self._listen, alarm)
            with looking:
                await self.listening.wait()  # or what is stored after the first look might wake nothing
                await self._look_until_stopped(alarm)
            self.listening.set()
            tasks.cancel_scope.cancel()

    async def _end_soon_after_stop(self, looking: anyio.CancelScope) -> None:
        """End a look that does not end: stopping does not wait for a store that has fallen silent."""
        await self._stop.wait()
        await self._clock.wait_for(anyio.Event(), self._stop_deadline)
        looking.cancel()

    async def _look_until_stopped(self, alarm: Alarm) -> None:
        look_again = _SHORTEST_LOOK_AGAIN
        while not self._stop.is_set():
            alarm.reset()
            now, began = self._clock.now(), self._clock.monotonic()
            self._looked_at = began
            try:
                with translate_store_errors(self._work):
                    result = await self._work.take(now)
            except PostdateError as error:
                await self._pause_after(error, alarm)
                continue
            if result.has_asked and self._calls.succeeded(self._clock.monotonic()):
                self._recovered()
            if result.more:
                continue
            due_but_not_claimed = result.count == 0 and result.next_attempt is not None and result.next_attempt < now
            look_again = min(look_again * 2, _LONGEST_LOOK_AGAIN) if due_but_not_claimed else _SHORTEST_LOOK_AGAIN
            await self._sleep(alarm, result.next_attempt, look_again)
            if result.count:
                pause = time_until(began + _LOOKS_APART.total_seconds(), self._clock.monotonic())
                await self._clock.wait_for(self._stop, pause)

    async def _listen(self, alarm: Alarm) -> None:
        """Have the store wake the poller, until cancelled. While the store refuses, the poller looks by itself."""
        while True:
            try:
                with translate_store_errors(self._work):
                    stop_listening = await self._work.listen(alarm.ring)
                break
            except PostdateError as error:
                pause = self._listening_calls.failed(error, self._clock.monotonic())
                self.listening.set()
                await self._clock.wait_for(self._stop, pause)
                if self._stop.is_set():
                    return
        try:
            if self._listening_calls.succeeded(self._clock.monotonic()):
                alarm.ring()  # what was stored since the last look has woken nothing
            self.listening.set()
            await anyio.sleep_forever()
        finally:
            stop_listening()

    async def _sleep(self, alarm: Alarm, next_attempt: datetime | None, look_again: timedelta) -> None:
        """Sleep until the next attempt, a wake-up, or the longest sleep; never not at all.

        ``look_again`` bounds the rate when a message is due but could not be taken: somebody else has it (row 57).
        """
        duration = self._longest_sleep
        if next_attempt is not None:
            at_least = look_again if look_again > _SHORTEST_LOOK_AGAIN else timedelta(0)
            duration = min(duration, max(next_attempt - self._clock.now() + _JUST_AFTER, at_least))
        await self._clock.wait_for(alarm.event, duration)

    async def _pause_after(self, error: PostdateError, alarm: Alarm) -> None:
        """Pause after a failure. A wake-up ends it, as it may say that the store is back; many do not make it spin."""
        pause = self._calls.failed(error, self._clock.monotonic())
        await self._clock.wait_for(self._stop, _SHORTEST_PAUSE)
        if not self._stop.is_set():
            await self._clock.wait_for(alarm.event, pause - _SHORTEST_PAUSE)

    @property
    def problem(self) -> str | None:
        """What is wrong if it has not looked for due messages for too long; from any thread."""
        if self._looked_at is None or self._stop.is_set():
            return None
        seconds = self._clock.monotonic() - self._looked_at
        text = f"no look for due messages has begun for {shown_duration(seconds)}"
        return text if seconds > self._stands_still_after.total_seconds() else None

    def stop(self) -> None:
        self._stop.set()
        if self._alarm is not None:
            self._alarm.ring()
