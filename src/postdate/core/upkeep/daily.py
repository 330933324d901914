"""The loop for work on a store that a service does once a day. Source: ADR 32, 33."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, TypeVar

import anyio

from postdate.clock import Clock
from postdate.core.health.deadlines import Deadlines
from postdate.errors import PostdateError
from postdate.runtime.reporting import duration_text
from postdate.runtime.resource import Backoff

_INTERVAL: Final = timedelta(days=1)
_AGAIN_AFTER: Final = timedelta(hours=1)
"""The pause after a lasting failure, and when the work is not complete."""

_SHORTEST_PAUSE: Final = timedelta(seconds=1)
"""The pause after a transient failure, such as a store that is out of reach just after the start.

It is short, as new rules of a zone wait for the work.
"""

_CALL_DEADLINE: Final = timedelta(minutes=10)

log = logging.getLogger("postdate.daily")

T = TypeVar("T")


class Daily:
    """One loop. Start :meth:`run` as a task. :meth:`stop` ends it, and does not wait for a silent store.

    Args:
        store: the store that is worked on.
        clock: of the service.
        failure_text: the text for the log after a failure, such as ``old records are not removed``.
        first_after: the time from the start to the first run.
        run_once: does the work, by :meth:`call_store` and :meth:`pause`, and returns whether it is complete. It is
            called again after a day if it is, and after an hour if not.
    """

    def __init__(
        self,
        store: object,
        clock: Clock,
        failure_text: str,
        first_after: timedelta,
        run_once: Callable[[Daily], Awaitable[bool]],
    ) -> None:
        self._clock, self._failure_text, self._first_after, self._run_once = clock, failure_text, first_after, run_once
        self._deadlines, self._stop = Deadlines.of_store(store, clock, _CALL_DEADLINE), anyio.Event()
        self._backoff = Backoff(_SHORTEST_PAUSE.total_seconds(), _AGAIN_AFTER.total_seconds())

    async def call_store(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call of the store. Raises `PostdateError`."""
        return await self._deadlines.call_in_task(call)

    async def pause(self, seconds: float) -> bool:
        """Pause for real seconds; return whether to go on."""
        with anyio.move_on_after(seconds):
            await self._stop.wait()
        return not self._stop.is_set()

    def stop(self) -> None:
        self._deadlines.shorten()
        self._stop.set()

    async def run(self) -> None:
        pause = self._first_after
        while True:
            await self._clock.wait_for(self._stop, pause)
            if self._stop.is_set():
                return
            pause = _AGAIN_AFTER
            try:
                if await self._run_once(self):
                    pause = _INTERVAL
                self._backoff.report_success()
            except PostdateError as error:
                # Only the first failure of an outage is a warning, as the pauses are short.
                level = logging.INFO if self._backoff.is_waiting else logging.WARNING
                if error.transient:
                    self._backoff.report_failure(self._clock.monotonic())
                    pause = timedelta(seconds=self._backoff.pause)
                pause_text = duration_text(pause.total_seconds())
                log.log(level, "%s; it is tried again in %s: %s", self._failure_text, pause_text, error)
            except Exception:  # an error here must not end the service and with it the deliveries
                log.exception("%s; it is tried again in an hour", self._failure_text)
