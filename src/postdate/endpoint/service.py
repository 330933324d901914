"""Services of an endpoint: they prepare and run pumps, a poller and the timers of breakers. Also critical errors."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Protocol

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
"""How long receiving may fail before it is a critical error."""


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """The objects and settings that all parts of one endpoint share."""

    endpoint: str
    transport: Transport
    mode: TransactionMode
    clock: Clock
    critical_error: CriticalError
    metrics: Metrics = NO_METRICS
    longest_sleep: timedelta = LONGEST_SLEEP
    send_only: bool = False
    reported_outages: dict[Resource, tuple[int, RepeatedFailures]] = field(
        default_factory=dict[Resource, "tuple[int, RepeatedFailures]"]
    )
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

        The name contains the queue or the endpoint, as metrics distinguish breakers by their names. Breakers of one
        resource raise one critical error for one outage.
        """
        resource, breaker_name = resource_of(adapter), f"{name} {queue or self.endpoint}"

        def trigger(text: str, error: BaseException) -> None:
            outage, reporter = self.reported_outages.get(resource, (0, breaker))
            # What another breaker has reported speaks for this one as long as that other one has not recovered.
            is_told = outage == resource.outage_count and reporter.state is BreakerState.TRIGGERED
            if reporter is breaker or not is_told:
                self.reported_outages[resource] = resource.outage_count, breaker
                self.critical_error(text, error)

        breaker = RepeatedFailures(breaker_name, critical, time_to_trigger, trigger, self.metrics)
        return breaker


class _Runnable(Protocol):
    async def run(self) -> None: ...

    def stop(self) -> None: ...


class Service(ABC):
    """A part of an endpoint that runs beside other parts. Start :meth:`run` as a task; :meth:`stop` ends it."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context
        self._outages: list[StoreWaits] = []
        """The pauses of received messages until their store answers. They are stopped before the pumps."""
        self._deadlines: list[Deadlines] = []
        """The deadlines of calls that the steps of the pumps make. They are shortened at the stop."""
        self._parts: list[_Runnable] = []
        self._breakers: list[Breaker] = []
        self._ended_parts, self._is_stopping = list[str](), False

    @abstractmethod
    async def prepare(self, *, set_up: bool) -> None:
        """Create pumps and poller for one run; with ``set_up``, set up databases and create queues."""

    async def run(self) -> None:
        """Run until :meth:`stop`, then finish received messages. Call this once after each :meth:`prepare`."""
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
            for breaker in self._breakers:  # no calls are made any more, and the next run has other breakers
                if breaker.state is not BreakerState.DISARMED:
                    self._context.metrics.report_breaker_state(breaker.name, BreakerState.DISARMED.value)

    async def _run_part(self, part: _Runnable) -> None:
        await part.run()
        self._ended_parts.append(type(part).__name__)

    def problems(self) -> list[str]:
        """Return texts about parts that ended without a stop, or do not poll any more. Callable in any thread."""
        problems_of_ended = [] if self._is_stopping else [f"{each} has ended" for each in list(self._ended_parts)]
        return problems_of_ended + [
            each.problem for each in self._parts if isinstance(each, Poller) and each.problem is not None
        ]

    async def wait_until_listening(self) -> None:
        """Wait until the pumps receive and the store wakes the poller. Call this after the start of :meth:`run`.

        A queue or store that is out of reach counts once it has refused. See :attr:`MessagePump.listening` and
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
"""Called when an endpoint cannot do its work any more, with a text and the last error; async or not."""


def log_critical_error(text: str, error: BaseException) -> None:
    """Log a critical error. This is the default action of an endpoint (docs/specification-rows.md, row 113).

    For an outage the text is enough; any other error is logged with its traceback.
    """
    is_expected = isinstance(error, PostdateError) and (error.transient or error.outage)
    log.critical("%s: %s", text, error, exc_info=None if is_expected else error)


_ACTION_FAILED: Final = "the critical-error action failed on %r"


class CriticalErrors:
    """Calls the critical error action. An async action runs as a task of the endpoint, and its errors are logged."""

    def __init__(self, action: CriticalErrorAction) -> None:
        self._action = action
        self.tasks: TaskGroup | None = None
        """The tasks of the running endpoint; ``None`` while it does not run."""

    def __call__(self, text: str, error: BaseException) -> None:
        try:
            result = self._action(text, error)
        except Exception:
            log.critical(_ACTION_FAILED, text, exc_info=True)
            return
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
            log.critical(_ACTION_FAILED, text, exc_info=True)


async def run_timers(breakers: Sequence[Breaker], clock: Clock) -> None:
    """Update breakers at their deadlines, so that they trip also if no call is made then. Run until cancelled."""
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
