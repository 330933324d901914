"""Services of an endpoint: pumps, a poller, and timers of breakers, prepared and run together; critical errors."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, time_until
from postdate.core.due.poller import LONGEST_SLEEP, Poller
from postdate.core.health.circuit_breaker import Breaker, BreakerState, CriticalError, RepeatedFailures
from postdate.core.health.deadlines import Deadlines
from postdate.core.receive.outcomes import StoreWaits
from postdate.core.receive.pump import MessagePump
from postdate.errors import PostdateError
from postdate.ports import TransactionMode, Transport
from postdate.runtime.reporting import NO_METRICS, Metrics
from postdate.runtime.resource import Resource, resource_of

log = logging.getLogger("postdate.endpoint")

RECEIVE_BREAKER = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """What all parts of one endpoint share."""

    endpoint: str
    transport: Transport
    mode: TransactionMode
    clock: Clock
    critical_error: CriticalError
    metrics: Metrics = NO_METRICS
    longest_sleep: timedelta = LONGEST_SLEEP
    send_only: bool = False
    reported_outages: dict[Resource, tuple[int, str]] = field(default_factory=dict[Resource, tuple[int, str]])
    """Resources whose outages raised a critical error: the number of the last such outage, and by which breaker."""

    def create_breaker(
        self,
        name: str,
        critical: str,
        adapter: object,
        time_to_trigger: timedelta = RECEIVE_BREAKER,
        queue: str = "",
    ) -> RepeatedFailures:
        """Return a breaker for calls of an adapter.

        It is named after its queue, or the endpoint, too: metrics tell breakers apart by their names. Breakers of one
        resource raise one critical error for one outage.
        """
        resource, breaker_name = resource_of(adapter), f"{name} {queue or self.endpoint}"

        def trigger(text: str, error: BaseException) -> None:
            outage, reporting_breaker = self.reported_outages.get(resource, (0, breaker_name))
            if outage != resource.outage_count or reporting_breaker == breaker_name:
                self.reported_outages[resource] = resource.outage_count, breaker_name
                self.critical_error(text, error)

        return RepeatedFailures(breaker_name, critical, time_to_trigger, trigger, self.metrics)


class _Runnable(Protocol):
    async def run(self) -> None: ...

    def stop(self) -> None: ...


class Service(ABC):
    """A part of an endpoint that runs beside others. Start :meth:`run` as a task; :meth:`stop` ends it."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context
        self._outages: list[StoreWaits] = []
        """For which messages stay in hand: ended before the pumps are stopped."""
        self._deadlines: list[Deadlines] = []
        """Of what the steps of the pumps call: short from the stop on."""
        self._parts: list[_Runnable] = []
        self._breakers: list[Breaker] = []
        self._ended_parts, self._is_stopping = list[str](), False

    @abstractmethod
    async def prepare(self, *, set_up: bool) -> None:
        """Make pumps and poller for one run; with ``set_up``, set up databases and create queues."""

    async def run(self) -> None:
        """Run until :meth:`stop`, then finish messages in hand; once after each :meth:`prepare`."""
        self._ended_parts.clear()
        self._context.reported_outages.clear()
        self._is_stopping = False
        try:
            async with anyio.create_task_group() as timers:
                timers.start_soon(run_timers, self._breakers, self._context.clock)
                async with anyio.create_task_group() as tasks:
                    for each in self._parts:
                        tasks.start_soon(self._run_part, each)
                timers.cancel_scope.cancel()
        finally:
            for breaker in self._breakers:  # nobody tries any more; the next run has others
                if breaker.state is not BreakerState.DISARMED:
                    self._context.metrics.report_breaker_state(breaker.name, BreakerState.DISARMED.value)

    async def _run_part(self, part: _Runnable) -> None:
        await part.run()
        self._ended_parts.append(type(part).__name__)

    def problems(self) -> list[str]:
        """Return, in words, which parts have ended though they were not stopped, or stand still. From any thread."""
        problems_of_ended = [] if self._is_stopping else [f"{each} has ended" for each in list(self._ended_parts)]
        return problems_of_ended + [
            each.problem for each in self._parts if isinstance(each, Poller) and each.problem is not None
        ]

    async def wait_until_listening(self) -> None:
        """Return when its pumps receive, and its store wakes its poller; after :meth:`run` began.

        A queue or store that is out of reach counts once it has refused; see :attr:`MessagePump.listening` and
        :attr:`Poller.listening`.
        """
        for each in self._parts:
            if isinstance(each, MessagePump | Poller):
                await each.listening.wait()

    def stop(self) -> None:
        """End :meth:`run`: the pumps first, then the poller. Does nothing before :meth:`prepare`."""
        self._is_stopping = True
        for deadlines in self._deadlines:
            deadlines.shorten()
        for each in (*self._outages, *self._parts):
            each.stop()


CriticalErrorAction = Callable[[str, BaseException], Awaitable[None] | None]
"""What an application does when its endpoint cannot do its work any more: a function, async or not."""


def log_critical_error(text: str, error: BaseException) -> None:
    """Log a critical error: what an endpoint does unless told otherwise (specification row 113).

    The text of an outage says it all; any other error needs its traceback.
    """
    is_expected = isinstance(error, PostdateError) and (error.transient or error.outage)
    log.critical("%s: %s", text, error, exc_info=None if is_expected else error)


class CriticalErrors:
    """Calls the action; an asynchronous one as a task of the endpoint. What it raises is logged and forgotten."""

    def __init__(self, action: CriticalErrorAction) -> None:
        self._action = action
        self.tasks: TaskGroup | None = None
        """Of the running endpoint."""

    def __call__(self, text: str, error: BaseException) -> None:
        result = self._action(text, error)
        if result is not None and self.tasks is not None:
            self.tasks.start_soon(self._await_action, text, result)
        elif result is not None:
            if inspect.iscoroutine(result):
                result.close()
            log_critical_error(text, error)

    async def _await_action(self, text: str, result: Awaitable[None]) -> None:
        try:
            await result
        except Exception:
            log.critical("the critical-error action failed on %r", text, exc_info=True)


async def run_timers(breakers: Sequence[Breaker], clock: Clock) -> None:
    """Let breakers trip when their time is up, whether or not anything fails at that moment; until it is cancelled."""
    wake_event = anyio.Event()

    def wake() -> None:
        wake_event.set()

    for breaker in breakers:
        breaker.on_armed = wake
    while True:
        wake_event = anyio.Event()
        seconds = clock.monotonic()
        for breaker in breakers:
            breaker.update_state(seconds)
        deadlines = [breaker.deadline for breaker in breakers if breaker.deadline is not None]
        if deadlines:
            await clock.wait_for(wake_event, time_until(min(deadlines), seconds))
        else:
            await wake_event.wait()
