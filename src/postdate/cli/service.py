"""``postdate run``: deliver delayed messages until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from types import FrameType
from typing import Annotated, Any

import anyio
import typer

from postdate.cli.command import Exit, LogLevel, Use, command, instant, logging_to_stderr, option, wrong_usage
from postdate.clock import Clock, ScaledClock, SystemClock, steady_seconds
from postdate.config import Settings
from postdate.core.health.deadlines import count_abandoned_calls
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.service import log_critical_error
from postdate.errors import StoreReplaced
from postdate.operations import check_readable, check_set_up, overview
from postdate.operations.looking import Refresher
from postdate.ports import AdministrableStore
from postdate.runtime.process import READY, STOPPING, freeze_what_is_loaded, notify
from postdate.runtime.reporting import CountedMetrics
from postdate.runtime.threads import Alarm
from postdate.telemetry.server import serving
from postdate.telemetry.standing import standing
from postdate.telemetry.vitals import Vitals
from postdate.wiring import OpenDeployment, build_endpoint, delay_exchange, endpoints_to_run, opened

app = typer.Typer(name="run", add_completion=False)

ONE_ORDER_SECONDS = 1.0
"""Signals within this many seconds count as one, because supervisors and terminals signal a process and its group."""

log = logging.getLogger("postdate.service")


@command(app, "run", reports=False)
def run(
    use: Use,
    log_level: LogLevel = "INFO",
    log_json: Annotated[bool, option("--log-json", "Log JSON objects, a line each.")] = False,
    no_setup: Annotated[
        bool, option("--no-setup", "Fail if tables or queues are missing; do not create them.")
    ] = False,
    exit_on_critical: Annotated[
        bool, option("--exit-on-critical", "Stop, with exit code 3, at the first critical error.")
    ] = False,
    clock_start: Annotated[datetime | None, instant("--clock-start", "For tests.", hidden=True)] = None,
    clock_speed: Annotated[float, typer.Option("--clock-speed", hidden=True)] = 1.0,
    clock_real_start: Annotated[float | None, typer.Option("--clock-real-start", hidden=True)] = None,
) -> None:
    """Deliver delayed messages until SIGTERM or Ctrl-C; a second signal, 1 s later or more, ends at once.

    Stores what arrives in the queue {endpoint}.timeouts, and puts every message into its queue when it is due. Any
    number of services may run on one store. Tables and queues that are missing are created.
    """
    settings, clock = use.settings(), _clock(clock_start, clock_speed, clock_real_start)

    async def serve() -> Exit:
        service = _Service(settings, clock, exit_on_critical=exit_on_critical)
        await service.run(create=not no_setup)
        return service.ending

    with logging_to_stderr(log_level, as_json=log_json):
        ending = anyio.run(serve)
    if ending is not Exit.OK:
        raise typer.Exit(ending)


def _clock(start: datetime | None, speed: float, real_start: float | None) -> Clock:
    if start is None:
        return SystemClock()
    if speed <= 0:
        raise wrong_usage(f"--clock-speed must be above 0, not {speed}")
    return ScaledClock(start, speed=speed) if real_start is None else ScaledClock(start, real_start, speed)


def _metrics(listen: str | None) -> tuple[CountedMetrics, Any]:
    """Return the metrics, and the ``prometheus_client`` registry that exposes them; ``None`` if nothing listens."""
    try:
        from postdate.telemetry.metrics import OpenTelemetryMetrics, prometheus
        from postdate.telemetry.tracing import instrument_if_exported

        instrument_if_exported()
        return (OpenTelemetryMetrics(), None) if listen is None else prometheus()
    except (ModuleNotFoundError, TypeError):  # OpenTelemetry is not installed, or its version is too old.
        if listen is not None:
            raise
        return CountedMetrics(), None


class _Service:
    """One run of the service, created in its event loop.

    ``exit_on_critical``: stop at the first critical error of any kind, not only after the store was replaced.
    """

    def __init__(self, settings: Settings, clock: Clock, *, exit_on_critical: bool) -> None:
        self._settings, self._clock, self._exit_on_critical = settings, clock, exit_on_critical
        self._alarm = Alarm()
        self._first_signal_at: float | None = None
        self.ending = Exit.OK
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        self._metrics, self._registry = _metrics(settings.metrics.listen)

    async def run(self, *, create: bool) -> None:
        """Deliver until a signal arrives, then finish the messages in progress."""
        async with (
            opened(self._settings, create=create, initialize=False) as deployment,
            AsyncExitStack() as running,
        ):
            endpoints = [
                build_endpoint(
                    deployment,
                    name,
                    clock=self._clock,
                    create_queues=create,
                    critical_error=self._critical_error,
                    metrics=self._metrics,
                )
                for name in endpoints_to_run(self._settings)
            ]
            if not create:
                await check_set_up(deployment)
            elif queues := self._settings.queues.create:  # Before delivery starts: a due message needs its queue.
                await deployment.transport.create_queues(queues)
            vitals = self._tell(running, deployment, endpoints)
            for endpoint in endpoints:
                await running.enter_async_context(endpoint)
            await check_readable(deployment)
            self._say_what_runs(deployment, {each.name: each.mode.value for each in endpoints})
            freeze_what_is_loaded()
            log.info("ready")  # This is the last line of the start: a reader that waits for it has all other lines.
            notify(READY)
            vitals.is_ready = True
            try:
                await self._alarm.wait()
            finally:
                vitals.is_ready = False
            notify(STOPPING)
            log.info("stopping: finishing what is in hand")
        log.info("stopped")
        if count_abandoned_calls():  # A normal exit would wait for the threads of abandoned calls.
            os._exit(self.ending)

    def _tell(self, running: AsyncExitStack, deployment: OpenDeployment, endpoints: Sequence[Endpoint]) -> Vitals:
        """Start the reports about the health of the service. They end with ``running``."""
        vitals = Vitals(self._metrics, lambda: [each for endpoint in endpoints for each in endpoint.problems()])
        running.callback(asyncio.create_task(vitals.run()).cancel)
        if isinstance(deployment.store, AdministrableStore):
            looking = Refresher(partial(overview, look_ahead=0), endpoints[0].clock)
            running.callback(asyncio.create_task(looking.run(deployment)).cancel)
            self._metrics.show(standing(looking, endpoints[0].clock))
        if (listen := self._settings.metrics.listen) is not None:
            port = running.enter_context(serving(listen, vitals, self._registry))
            log.info("metrics and health at port %d", port)
        return vitals

    def _say_what_runs(self, deployment: OpenDeployment, modes: Mapping[str, str]) -> None:
        settings = self._settings
        errors, own = settings.endpoint.error_queue, settings.endpoint.name
        if deployment.store is not None:
            text = "delivering from %s; intake queue %s.timeouts, error queue %s, transaction mode %s"
            poison_queue = settings.delayed_delivery.poison_queue or errors
            log.info(text, settings.store.address.shown, own, poison_queue, modes[own])
        place = "" if settings.timeout_manager.address is None else settings.timeout_manager.address.shown
        for name in deployment.timeouts:
            text = "timeout manager of %s: delivering from %s, error queue %s, transaction mode %s"
            log.info(text, name, place, errors, modes[name])
        if (exchange := delay_exchange(settings, deployment.transport)) is not None:
            log.info("taking in what is published to exchange %s with a header x-delay", exchange.name)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now = steady_seconds()
        if self._first_signal_at is None:
            self._first_signal_at = now
            self._alarm.ring()
        elif now - self._first_signal_at >= ONE_ORDER_SECONDS:
            # An immediate exit is safe at any instant: uncommitted work has no effect.
            os.write(2, b"postdate: error [interrupted]: ended at once by a second signal\n")
            os._exit(Exit.INTERRUPTED)

    def _critical_error(self, text: str, error: BaseException) -> None:
        log_critical_error(text, error)
        if self._exit_on_critical or isinstance(error, StoreReplaced):
            self.ending = Exit.UNAVAILABLE
            self._alarm.ring()
