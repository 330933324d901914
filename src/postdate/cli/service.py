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

from postdate.cli import command as cli
from postdate.clock import Clock, ScaledClock, SystemClock, steady_seconds
from postdate.config import Settings
from postdate.core.health.deadlines import count_abandoned_calls
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.service import log_critical_error
from postdate.errors import StoreReplaced
from postdate.operations import check_readable, check_setup, overview
from postdate.operations.looking import Refresher
from postdate.ports import AdministrableStore
from postdate.runtime.process import READY, STOPPING, freeze_loaded_objects, notify_service_manager
from postdate.runtime.reporting import CountedMetrics
from postdate.runtime.threads import WakeUp
from postdate.telemetry.server import serve_status
from postdate.telemetry.standing import build_gauge_reader
from postdate.telemetry.vitals import Vitals
from postdate.wiring import OpenDeployment, build_endpoint, delay_exchange, endpoints_to_run, open_deployment

app = typer.Typer(name="run", add_completion=False)

SAME_SIGNAL_SECONDS = 1.0
"""Signals within this many seconds count as one, because supervisors and terminals signal a process and its group."""

log = logging.getLogger("postdate.service")


@cli.command(app, "run", reports=False)
def run(
    use: cli.Use,
    log_level: cli.LogLevel = "INFO",
    log_json: Annotated[bool, cli.option("--log-json", "Log JSON objects, a line each.")] = False,
    no_setup: Annotated[
        bool, cli.option("--no-setup", "Fail if tables or queues are missing; do not create them.")
    ] = False,
    exit_on_critical: Annotated[
        bool, cli.option("--exit-on-critical", "Stop, with exit code 3, at the first critical error.")
    ] = False,
    clock_start: Annotated[datetime | None, cli.instant_option("--clock-start", "For tests.", hidden=True)] = None,
    clock_speed: Annotated[float, typer.Option("--clock-speed", hidden=True)] = 1.0,
    clock_real_start: Annotated[float | None, typer.Option("--clock-real-start", hidden=True)] = None,
) -> None:
    """Deliver delayed messages until SIGTERM or Ctrl-C; a second signal, 1 s later or more, ends at once.

    Stores what arrives in the queue {endpoint}.timeouts, and puts every message into its queue when it is due. Any
    number of services may run on one store. Tables and queues that are missing are created.
    """
    settings, clock = use.settings(), _create_clock(clock_start, clock_speed, clock_real_start)

    async def serve() -> cli.Exit:
        service = _Service(settings, clock, exit_on_critical=exit_on_critical)
        await service.run(create=not no_setup)
        return service.exit_code

    with cli.log_to_stderr(log_level, as_json=log_json):
        exit_code = anyio.run(serve)
    if exit_code is not cli.Exit.OK:
        raise typer.Exit(exit_code)


def _create_clock(start: datetime | None, speed: float, real_start: float | None) -> Clock:
    if start is None:
        return SystemClock()
    if speed <= 0:
        raise cli.usage_error(f"--clock-speed must be above 0, not {speed}")
    return ScaledClock(start, speed=speed) if real_start is None else ScaledClock(start, real_start, speed)


def _create_metrics(listen: str | None) -> tuple[CountedMetrics, Any]:
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
        self._stop_alarm = WakeUp()
        self._first_signal_at: float | None = None
        self.exit_code = cli.Exit.OK
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        self._metrics, self._registry = _create_metrics(settings.metrics.listen)

    async def run(self, *, create: bool) -> None:
        """Deliver until a signal arrives, then finish the messages in progress."""
        async with (
            open_deployment(self._settings, create=create, initialize=False) as deployment,
            AsyncExitStack() as stack,
        ):
            endpoints = [
                build_endpoint(
                    deployment,
                    name,
                    clock=self._clock,
                    create_queues=create,
                    critical_error=self._on_critical_error,
                    metrics=self._metrics,
                )
                for name in endpoints_to_run(self._settings)
            ]
            if not create:
                await check_setup(deployment)
            elif queues := self._settings.queues.create:  # Before delivery starts: a due message needs its queue.
                await deployment.transport.create_queues(queues)
            vitals = self._start_reports(stack, deployment, endpoints)
            for endpoint in endpoints:
                await stack.enter_async_context(endpoint)
            await check_readable(deployment)
            self._log_endpoints(deployment, {each.name: each.mode.value for each in endpoints})
            freeze_loaded_objects()
            log.info("ready")  # This is the last line of the start: a reader that waits for it has all other lines.
            notify_service_manager(READY)
            vitals.is_ready = True
            try:
                await self._stop_alarm.wait()
            finally:
                vitals.is_ready = False
            notify_service_manager(STOPPING)
            log.info("stopping: finishing what is in hand")
        log.info("stopped")
        if count_abandoned_calls():  # A normal exit would wait for the threads of abandoned calls.
            os._exit(self.exit_code)

    def _start_reports(
        self, stack: AsyncExitStack, deployment: OpenDeployment, endpoints: Sequence[Endpoint]
    ) -> Vitals:
        """Start the reports about the health of the service. They end with ``stack``."""
        vitals = Vitals(self._metrics, lambda: [each for endpoint in endpoints for each in endpoint.problems()])
        stack.callback(asyncio.create_task(vitals.run()).cancel)
        if isinstance(deployment.store, AdministrableStore):
            refresher = Refresher(partial(overview, look_ahead=0), endpoints[0].clock)
            stack.callback(asyncio.create_task(refresher.run(deployment)).cancel)
            self._metrics.register_gauges(build_gauge_reader(refresher, endpoints[0].clock))
        if (listen := self._settings.metrics.listen) is not None:
            port = stack.enter_context(serve_status(listen, vitals, self._registry))
            log.info("metrics and health at port %d", port)
        return vitals

    def _log_endpoints(self, deployment: OpenDeployment, modes: Mapping[str, str]) -> None:
        settings = self._settings
        error_queue, endpoint_name = settings.endpoint.error_queue, settings.endpoint.name
        if deployment.store is not None:
            text = "delivering from %s; intake queue %s.timeouts, error queue %s, transaction mode %s"
            poison_queue = settings.delayed_delivery.poison_queue or error_queue
            log.info(text, settings.store.address.redacted_text, endpoint_name, poison_queue, modes[endpoint_name])
        address = settings.timeout_manager.address
        manager_address = "" if address is None else address.redacted_text
        for name in deployment.timeouts:
            text = "timeout manager of %s: delivering from %s, error queue %s, transaction mode %s"
            log.info(text, name, manager_address, error_queue, modes[name])
        if (exchange := delay_exchange(settings, deployment.transport)) is not None:
            log.info("taking in what is published to exchange %s with a header x-delay", exchange.name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = steady_seconds()
        if self._first_signal_at is None:
            self._first_signal_at = now
            self._stop_alarm.wake()
        elif now - self._first_signal_at >= SAME_SIGNAL_SECONDS:
            # An immediate exit is safe at any instant: uncommitted work has no effect.
            os.write(2, b"postdate: error [interrupted]: ended at once by a second signal\n")
            os._exit(cli.Exit.INTERRUPTED)

    def _on_critical_error(self, text: str, error: BaseException) -> None:
        log_critical_error(text, error)
        if self._exit_on_critical or isinstance(error, StoreReplaced):
            self.exit_code = cli.Exit.UNAVAILABLE
            self._stop_alarm.wake()
