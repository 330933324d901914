"""Critical errors, and the timers of the circuit breakers: where the pure breakers meet clock and event loop."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, time_left
from postdate.core.circuit_breaker import Breaker
from postdate.errors import PostdateError

log = logging.getLogger("postdate.endpoint")

CriticalErrorAction = Callable[[str, BaseException], Awaitable[None] | None]
"""What an application does when its endpoint cannot do its work any more: a function, async or not."""


def log_critical_error(text: str, error: BaseException) -> None:
    """Log a critical error: what an endpoint does unless told otherwise (specification row 113)."""
    log.critical("%s: %s", text, error, exc_info=None if is_expected(error) else error)


def is_expected(error: BaseException) -> bool:
    """Return whether an error is an outage, whose text says it all; any other needs its traceback."""
    return isinstance(error, PostdateError) and (error.transient or error.outage)


class CriticalErrors:
    """Calls the action; an asynchronous one as a task of the endpoint. What it raises is logged and forgotten."""

    def __init__(self, action: CriticalErrorAction) -> None:
        self._action = action
        self.tasks: TaskGroup | None = None
        """Of the running endpoint."""

    def __call__(self, text: str, error: BaseException) -> None:
        result = self._action(text, error)
        if result is None:
            return
        if self.tasks is None:
            if inspect.iscoroutine(result):
                result.close()
            log_critical_error(text, error)
            return
        self.tasks.start_soon(self._finish, text, result)

    async def _finish(self, text: str, result: Awaitable[None]) -> None:
        try:
            await result
        except Exception:
            log.critical("the critical-error action failed on %r", text, exc_info=True)


class BreakerTimers:
    """Lets breakers trip when their time is up, whether or not anything fails at that moment."""

    def __init__(self, breakers: Sequence[Breaker], clock: Clock) -> None:
        self._breakers, self._clock = breakers, clock
        self._armed = anyio.Event()
        self._stopping = False
        for breaker in breakers:
            breaker.on_armed = self._look_again

    async def run(self) -> None:
        while not self._stopping:
            self._armed = anyio.Event()
            seconds = self._clock.monotonic()
            for breaker in self._breakers:
                breaker.check(seconds)
            deadlines = [breaker.deadline for breaker in self._breakers if breaker.deadline is not None]
            if deadlines:
                await self._clock.wait_for(self._armed, time_left(min(deadlines), seconds))
            else:
                await self._armed.wait()

    def stop(self) -> None:
        self._stopping = True
        self._armed.set()

    def _look_again(self) -> None:
        self._armed.set()
