"""Sleeps until the next message is due or something was stored that is due earlier; takes what is due; again.

Source: specification 1.7; ADR 0002.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from postdate.clock import Clock
from postdate.core.circuit_breaker import RepeatedFailures
from postdate.errors import PostdateError
from postdate.ports import Wake
from postdate.wakeup import Alarm

LONGEST_SLEEP = timedelta(minutes=1)
"""The poller looks by itself at least this often, whatever wakes it (specification row 34)."""

_SHORTEST_LOOK_AGAIN = timedelta(milliseconds=1)
_LONGEST_LOOK_AGAIN = timedelta(seconds=1)
_JUST_AFTER = timedelta(microseconds=1)
"""A message may go strictly after its due time, and microseconds are what we count in."""

log = logging.getLogger("postdate.poller")


@dataclass(frozen=True, slots=True)
class Taken:
    """What one look found.

    Args:
        count: how many messages were dealt with.
        more: more may be due already.
        next_attempt: when the next message may be attempted, as of the look; ``None`` without any.
    """

    count: int
    more: bool
    next_attempt: datetime | None = None


class DueWork(Protocol):
    """Where due messages come from and what is done with them."""

    async def take(self, now: datetime) -> Taken:
        """Deal with one batch of messages due strictly before ``now``."""
        ...

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Have ``wake`` called when something is due earlier than all before."""
        ...


class Poller:
    """One loop. Start :meth:`run` as a task; :meth:`stop` lets it finish what it has in hand.

    Args:
        work: see :class:`DueWork`.
        clock: tells and waits.
        breaker: for failing looks.
    """

    def __init__(self, work: DueWork, clock: Clock, breaker: RepeatedFailures) -> None:
        self._work, self._clock, self._breaker = work, clock, breaker
        self._stopping = False
        self._alarm: Alarm | None = None

    async def run(self) -> None:
        """Take what is due until stopped."""
        self._alarm = alarm = Alarm()
        stop_listening = await self._listen(alarm)
        look_again = _SHORTEST_LOOK_AGAIN
        try:
            while not self._stopping:
                alarm.reset()
                now = self._clock.now()
                try:
                    taken = await self._work.take(now)
                except PostdateError as error:
                    log.warning("cannot take due messages: %s", error)
                    await self._pause(alarm, self._breaker.failure(error, now))
                    continue
                self._breaker.success()
                if taken.more:
                    continue
                due_but_not_taken = taken.count == 0 and taken.next_attempt is not None and taken.next_attempt < now
                look_again = min(look_again * 2, _LONGEST_LOOK_AGAIN) if due_but_not_taken else _SHORTEST_LOOK_AGAIN
                await self._sleep(alarm, taken.next_attempt, look_again)
        finally:
            stop_listening()

    async def _listen(self, alarm: Alarm) -> Callable[[], None]:
        while True:
            try:
                return await self._work.listen(alarm.ring)
            except PostdateError as error:
                log.warning("cannot listen for stored messages: %s", error)
                await self._pause(alarm, self._breaker.failure(error, self._clock.now()))
                if self._stopping:
                    return lambda: None

    async def _sleep(self, alarm: Alarm, next_attempt: datetime | None, look_again: timedelta) -> None:
        """Sleep until the next attempt, a wake-up, or the longest sleep; never not at all.

        ``look_again`` bounds the rate when a message is due but could not be taken: somebody else has it (row 57).
        """
        now = self._clock.now()
        until = now + LONGEST_SLEEP
        if next_attempt is not None:
            earliest = now + look_again if look_again > _SHORTEST_LOOK_AGAIN else now
            until = min(until, max(next_attempt + _JUST_AFTER, earliest))
        await self._clock.wait(alarm.event, until)

    async def _pause(self, alarm: Alarm, duration: timedelta) -> None:
        """Pause after a failure; only :meth:`stop` ends it early."""
        until = self._clock.now() + duration
        while not self._stopping and (now := self._clock.now()) < until:
            until = min(until, now + duration)  # should the clock have been set back
            alarm.reset()
            await self._clock.wait(alarm.event, until)

    def stop(self) -> None:
        """End :meth:`run` once the batch in hand is done."""
        self._stopping = True
        if self._alarm is not None:
            self._alarm.ring()
