"""Run expensive queries in advance, rarely, and only while a user watches the results. Source: ADR 35."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Generic, TypeVar

import anyio

from postdate.clock import Clock
from postdate.core.health.deadlines import Deadlines
from postdate.operations.needs import present
from postdate.runtime.resource import resource_of
from postdate.wiring import OpenDeployment

T = TypeVar("T")

log = logging.getLogger("postdate.looking")

_LEAST_PAUSE: Final = timedelta(seconds=2)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
_AFTER_AN_ERROR: Final = timedelta(seconds=10)
_CALL_DEADLINE: Final = timedelta(minutes=2)
_PAUSES: Final = 49
"""The pause after a look, as a multiple of the time that the look took: looking takes a fiftieth of the time."""

_WATCHED_SECONDS: Final = 60.0
"""Seconds after a request during which its user counts as watching."""

_NEWS_SECONDS: Final = 0.2
"""Seconds that a request waits for a newer look when the last look is older than `_WATCHED_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Look(Generic[T]):
    """One look.

    ``number`` counts looks from 1. ``at`` is when the look began, by the clock that judges due times. ``ended`` is
    when the look ended, on the monotonic clock.
    """

    number: int
    at: datetime
    ended: float
    result: T | Exception

    @property
    def value(self) -> T:
        """The result of the look. Raises the error of the look, if it failed."""
        if isinstance(self.result, Exception):
            # Several requests may raise the same error, and each would lengthen its traceback.
            raise self.result.with_traceback(None)
        return self.result


class Refresher(Generic[T]):
    """The result of the last look. Requests never look themselves, so the load does not grow with their number."""

    def __init__(self, look: Callable[[OpenDeployment, datetime], Awaitable[T]], clock: Clock) -> None:
        self._look, self._clock = look, clock
        # On the monotonic clock, in seconds. The first look waits for a request, so this begins in the past.
        self._watched_at = clock.monotonic() - _WATCHED_SECONDS
        self._watched, self._news = anyio.Event(), anyio.Event()
        self._last: Look[T] | None = None
        self._before: Look[T] | None = None

    async def run(self, deployment: OpenDeployment) -> None:
        """Look repeatedly until this task is cancelled. Sleep while no user watches."""
        deadlines = Deadlines.of_store(deployment.store, self._clock, _CALL_DEADLINE)
        what = "cannot look at what waits, for metrics or the page"
        calls = resource_of(deployment.store).calls(what, log, is_rare=True)
        while True:
            while self._clock.monotonic() - self._watched_at >= _WATCHED_SECONDS:
                self._watched = anyio.Event()  # An event cannot be cleared, and an earlier request has set the old one.
                await self._watched.wait()
            begun, at = self._clock.monotonic(), self._clock.now()
            try:
                at = await deadlines.call_apart(lambda: present(deployment))
                result = await deadlines.call_apart(lambda at=at: self._look(deployment, at))
            except Exception as error:  # noqa: BLE001 - the requests raise it
                calls.failed(error, self._clock.monotonic())
                result = error
            else:
                calls.succeeded(self._clock.monotonic())
            ended = self._clock.monotonic()
            number = 1 if self._last is None else self._last.number + 1
            self._before, self._last = self._last, Look(number, at, ended, result)
            # Wake the requests that wait now. The next requests need a new event.
            self._news.set()
            self._news = anyio.Event()
            await self._clock.sleep(_AFTER_AN_ERROR if isinstance(result, Exception) else pause_after(ended - begun))

    def watched(self) -> tuple[Look[T] | None, Look[T] | None]:
        """Note that a user watches.

        Return the last look and the one before; ``None`` for a look that does not exist yet.
        """
        self._watched_at = self._clock.monotonic()
        self._watched.set()
        return self._last, self._before

    @property
    def last_value(self) -> T | None:
        """The result of the last look, or ``None`` if the look failed or is too old.

        It may be read from any thread. A read does not count as watching.
        """
        last = self._last
        if last is None or isinstance(last.result, Exception):
            return None
        return last.result if self._clock.monotonic() - last.ended < 2 * _LONGEST_PAUSE.total_seconds() else None

    async def last(self) -> Look[T]:
        """Return the last look. Wait for the first look; after a pause without users, wait briefly for a newer one."""
        self.watched()
        while (look := self._last) is None:
            await self._news.wait()
        if self._clock.monotonic() - look.ended >= _WATCHED_SECONDS:
            return await self.newer(look.number, _NEWS_SECONDS) or look
        return look

    async def newer(self, number: int, seconds: float) -> Look[T] | None:
        """Return the first available look with a number above ``number``; ``None`` if none ends within ``seconds``."""
        self.watched()
        with anyio.move_on_after(seconds):
            while self._last is None or self._last.number <= number:
                await self._news.wait()
        return self._last if self._last is not None and self._last.number > number else None


def pause_after(seconds: float) -> timedelta:
    """Return the pause after a look that took so many seconds."""
    return min(max(_LEAST_PAUSE, timedelta(seconds=_PAUSES * seconds)), _LONGEST_PAUSE)
