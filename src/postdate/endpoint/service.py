"""Services of an endpoint: pumps, a poller, and the timers of their breakers, prepared and run together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import anyio

from postdate.clock import Clock
from postdate.core.circuit_breaker import Breaker, CriticalError, RepeatedFailures
from postdate.core.poller import LONGEST_SLEEP, Poller
from postdate.core.receive.pump import MessagePump
from postdate.endpoint.critical import BreakerTimers
from postdate.ports import TransactionMode, Transport
from postdate.runtime.metrics import NO_METRICS, Metrics

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

    def breaker(self, name: str, critical: str, time_to_trigger: timedelta = RECEIVE_BREAKER) -> RepeatedFailures:
        return RepeatedFailures(name, critical, time_to_trigger, self.critical_error, self.metrics)


class _Stops(Protocol):
    def stop(self) -> None: ...


class _Runs(_Stops, Protocol):
    async def run(self) -> None: ...


class Service:
    """A part of an endpoint that runs beside others. Start :meth:`run` as a task; :meth:`stop` ends it."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context
        self._steps: list[_Stops] = []
        """Parts of its pumps, which are stopped after these."""
        self._runs: list[_Runs] = []
        self._breakers: list[Breaker] = []

    async def prepare(self, *, set_up: bool) -> None:
        """Make pumps and poller for one run; with ``set_up``, set up databases and create queues."""
        raise NotImplementedError

    async def run(self) -> None:
        """Run until :meth:`stop`, then finish messages in hand; once after each :meth:`prepare`."""
        timers = BreakerTimers(self._breakers, self._context.clock)
        async with anyio.create_task_group() as beside:
            beside.start_soon(timers.run)
            async with anyio.create_task_group() as tasks:
                for each in self._runs:
                    tasks.start_soon(each.run)
            timers.stop()

    async def listening(self) -> None:
        """Return when its pumps receive, and its store wakes its poller; after :meth:`run` began.

        A queue or store that is out of reach counts once it has refused; see :attr:`MessagePump.listening` and
        :attr:`Poller.listening`.
        """
        for each in self._runs:
            if isinstance(each, MessagePump | Poller):
                await each.listening.wait()

    def stop(self) -> None:
        """End :meth:`run`: the pumps first, then the poller. Does nothing before :meth:`prepare`."""
        for each in (*self._steps, *self._runs):
            each.stop()
