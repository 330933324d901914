"""What many ask for is looked at beforehand, seldom, and only while somebody asks. Source: ADR 35."""

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
"""After a look so many times its length passes: looking takes a fiftieth of the time."""

_WATCHED_SECONDS: Final = 60.0
"""So long after a request somebody watches."""

_NEWS_SECONDS: Final = 0.2
"""A request that finds an answer from before anybody watched waits so long for another one."""


@dataclass(frozen=True, slots=True)
class Look(Generic[T]):
    """One look: its number, and when it ended, on the wall clock and on the monotonic one."""

    number: int
    at: datetime
    ended: float
    result: T | Exception

    @property
    def value(self) -> T:
        """What was found. Raises the error of the look."""
        if isinstance(self.result, Exception):
            raise self.result.with_traceback(None)  # many may raise it
        return self.result


class Refresher(Generic[T]):
    """Keeps what the last look has found. Requests never look themselves, so any number of them costs the same."""

    def __init__(self, look: Callable[[OpenDeployment, datetime], Awaitable[T]], clock: Clock) -> None:
        self._look, self._clock = look, clock
        self._watched_at = clock.monotonic() - _WATCHED_SECONDS
        self._watched, self._news = anyio.Event(), anyio.Event()
        self._last: Look[T] | None = None
        self._before: Look[T] | None = None

    async def run(self, deployment: OpenDeployment) -> None:
        """Look again and again, until it is cancelled."""
        deadlines = Deadlines.of_store(deployment.store, self._clock, _CALL_DEADLINE)
        what = "cannot look at what waits, for metrics or the page"
        calls = resource_of(deployment.store).calls(what, log, is_rare=True)
        while True:
            while self._clock.monotonic() - self._watched_at >= _WATCHED_SECONDS:
                self._watched = anyio.Event()
                await self._watched.wait()
            begun, at = self._clock.monotonic(), self._clock.now()
            try:
                at = await deadlines.call_apart(lambda: present(deployment))
                result = await deadlines.call_apart(lambda at=at: self._look(deployment, at))
            except Exception as error:  # noqa: BLE001 - raised by whoever asks what was found
                calls.failed(error, self._clock.monotonic())
                result = error
            else:
                calls.succeeded(self._clock.monotonic())
            ended = self._clock.monotonic()
            number = 1 if self._last is None else self._last.number + 1
            self._before, self._last = self._last, Look(number, at, ended, result)
            self._news.set()
            self._news = anyio.Event()
            await self._clock.sleep(_AFTER_AN_ERROR if isinstance(result, Exception) else pause_after(ended - begun))

    def watched(self) -> tuple[Look[T] | None, Look[T] | None]:
        """Return the last look and that before, as far as there are any; somebody watches."""
        self._watched_at = self._clock.monotonic()
        self._watched.set()
        return self._last, self._before

    @property
    def last_value(self) -> T | None:
        """What the last look has found, if it found anything and was not long ago; in any thread, and for nobody."""
        last = self._last
        if last is None or isinstance(last.result, Exception):
            return None
        return last.result if self._clock.monotonic() - last.ended < 2 * _LONGEST_PAUSE.total_seconds() else None

    async def last(self) -> Look[T]:
        """Return the last look; the first one, and one after long, is waited for."""
        self.watched()
        while (look := self._last) is None:
            await self._news.wait()
        if self._clock.monotonic() - look.ended >= _WATCHED_SECONDS:
            return await self.newer(look.number, _NEWS_SECONDS) or look
        return look

    async def newer(self, number: int, seconds: float) -> Look[T] | None:
        """Return a look after that of the number as soon as there is one; ``None`` after so many seconds."""
        self.watched()
        with anyio.move_on_after(seconds):
            while self._last is None or self._last.number <= number:
                await self._news.wait()
        return self._last if self._last is not None and self._last.number > number else None


def pause_after(seconds: float) -> timedelta:
    """Return how long not to look after a look that took so long."""
    return min(max(_LEAST_PAUSE, timedelta(seconds=_PAUSES * seconds)), _LONGEST_PAUSE)
