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
from postdate.errors import NotSupported, QueueNotFound
from postdate.operations.needs import read_present
from postdate.runtime.resource import resource_of
from postdate.wiring import OpenDeployment

T = TypeVar("T")

log = logging.getLogger("postdate.looking")

_LEAST_PAUSE: Final = timedelta(seconds=2)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
_PAUSE_AFTER_ERROR: Final = timedelta(seconds=10)
_CALL_DEADLINE: Final = timedelta(minutes=2)
_PAUSE_FACTOR: Final = 49
"""The pause after a look, as a multiple of the time that the look took: looking takes a fiftieth of the time."""

_WATCHED_SECONDS: Final = 60.0
"""Seconds after a request during which its user counts as watching."""

_NEWS_SECONDS: Final = 0.2
"""Seconds that a request waits for a newer look when the last look is older than `_WATCHED_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Observation(Generic[T]):
    """One look.

    ``number`` counts looks from 1. ``at`` is when the look began, by the clock that judges due times. ``end_seconds``
    is when the look ended, on the monotonic clock.
    """

    number: int
    at: datetime
    end_seconds: float
    result: T | Exception

    @property
    def value(self) -> T:
        """The result of the look. Raises the error of the look, if it failed."""
        if isinstance(self.result, Exception):
            # Several requests may raise the same error, and each would lengthen its traceback.
            raise self.result.with_traceback(None)
        return self.result


class Refresher(Generic[T]):
    """The result of the last look. Requests never look themselves, so the load does not grow with their number.

    Args:
        observe: one look, as of the time that is its second argument.
        clock: for the pauses.
        asks_queues: the look asks only the queues, so its failures are theirs. Otherwise they are the store's.
    """

    def __init__(
        self,
        observe: Callable[[OpenDeployment, datetime], Awaitable[T]],
        clock: Clock,
        *,
        asks_queues: bool = False,
    ) -> None:
        self._observe, self._clock, self._asks_queues = observe, clock, asks_queues
        # On the monotonic clock, in seconds. The first look waits for a request, so this begins in the past.
        self._last_request_seconds = clock.monotonic() - _WATCHED_SECONDS
        self._request_event, self._new_observation = anyio.Event(), anyio.Event()
        self._latest: Observation[T] | None = None
        self._previous: Observation[T] | None = None

    async def run(self, deployment: OpenDeployment) -> None:
        """Look repeatedly until this task is cancelled. Sleep while no user watches."""
        store_deadlines = deadlines = Deadlines.of_store(deployment.store, self._clock, _CALL_DEADLINE)
        if self._asks_queues:
            deadlines = Deadlines.of_transport(deployment.transport, self._clock, _CALL_DEADLINE)
        time_calls = resource_of(deployment.store).calls("cannot ask the store for the time", log, is_rare=True)
        # Queues may be elsewhere than the store, and only one of the two is out of reach.
        look_calls = resource_of(deployment.transport if self._asks_queues else deployment.store).calls(
            "cannot look at what waits, for metrics or the page", log, is_rare=True
        )
        while True:
            while self._clock.monotonic() - self._last_request_seconds >= _WATCHED_SECONDS:
                # An event cannot be cleared, and an earlier request has set the old one.
                self._request_event = anyio.Event()
                await self._request_event.wait()
            start_seconds, observed_at = self._clock.monotonic(), self._clock.now()
            calls = time_calls
            try:
                observed_at = await store_deadlines.call_in_task(lambda: read_present(deployment))
                calls.report_success(self._clock.monotonic())
                calls = look_calls
                result = await deadlines.call_in_task(lambda at=observed_at: self._observe(deployment, at))
            except Exception as error:  # noqa: BLE001 - the requests raise it
                if isinstance(error, (NotSupported, QueueNotFound)):  # an answer, and no outage
                    calls.report_success(self._clock.monotonic())
                else:
                    calls.report_failure(error, self._clock.monotonic())
                result = error
            else:
                calls.report_success(self._clock.monotonic())
            end_seconds = self._clock.monotonic()
            number = 1 if self._latest is None else self._latest.number + 1
            self._previous, self._latest = self._latest, Observation(number, observed_at, end_seconds, result)
            # Wake the requests that wait now. The next requests need a new event.
            self._new_observation.set()
            self._new_observation = anyio.Event()
            await self._clock.sleep(
                _PAUSE_AFTER_ERROR if isinstance(result, Exception) else compute_pause(end_seconds - start_seconds)
            )

    def remember_request(self) -> tuple[Observation[T] | None, Observation[T] | None]:
        """Note that a user watches.

        Return the last look and the one before; ``None`` for a look that does not exist yet.
        """
        self._last_request_seconds = self._clock.monotonic()
        self._request_event.set()
        return self._latest, self._previous

    @property
    def last_value(self) -> T | None:
        """The result of the last look, or ``None`` if the look failed or is too old.

        It may be read from any thread. A read does not count as watching.
        """
        latest = self._latest
        if latest is None or isinstance(latest.result, Exception):
            return None
        return (
            latest.result if self._clock.monotonic() - latest.end_seconds < 2 * _LONGEST_PAUSE.total_seconds() else None
        )

    async def get_latest(self) -> Observation[T]:
        """Return the last look. Wait for the first look; after a pause without users, wait briefly for a newer one."""
        self.remember_request()
        while (latest := self._latest) is None:
            await self._new_observation.wait()
        if self._clock.monotonic() - latest.end_seconds >= _WATCHED_SECONDS:
            return await self.wait_for_newer(latest.number, _NEWS_SECONDS) or latest
        return latest

    async def wait_for_newer(self, number: int, seconds: float) -> Observation[T] | None:
        """Return the first available look with a number above ``number``; ``None`` if none ends within ``seconds``."""
        self.remember_request()
        with anyio.move_on_after(seconds):
            while self._latest is None or self._latest.number <= number:
                await self._new_observation.wait()
        return self._latest if self._latest is not None and self._latest.number > number else None


def compute_pause(seconds: float) -> timedelta:
    """Return the pause after a look that took so many seconds."""
    return min(max(_LEAST_PAUSE, timedelta(seconds=_PAUSE_FACTOR * seconds)), _LONGEST_PAUSE)
