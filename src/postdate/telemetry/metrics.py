"""The numbers that an endpoint counts and measures, through OpenTelemetry. Source: ADR 36.

This needs the package ``opentelemetry-api``, which every application with OpenTelemetry has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, get_args

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
from typing_extensions import override

from postdate.clock import steady_seconds
from postdate.runtime.reporting import Counted, CountedMetrics, Gauges
from postdate.runtime.resource import outage_texts

LATENESS_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 60.0, 300.0, 3600.0)
_DURATION_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_HISTOGRAMS: Final = {
    "lateness": ("Time since the due time, of the latest message of each batch", LATENESS_BOUNDS),
    "look.duration": ("Polls of the store for due messages", _DURATION_BOUNDS),
    "send.duration": ("Calls that send due messages to queues", _DURATION_BOUNDS),
    "handler.duration": ("Handlers of a type of message, the longest run of each batch that ended", _DURATION_BOUNDS),
    "loop.delay": ("How long the event loop was blocked, measured once a second", _DURATION_BOUNDS),
}
_OF_PROCESS: Final = {
    "outages": ("{resource}", "Stores and servers of queues that are out of reach", ""),
    "breakers.triggered": ("{breaker}", "Triggered circuit breakers", ""),
    "claims.held": ("{message}", "Messages that this process has claimed", ""),
}
GAUGES: Final = {
    "pending": ("{message}", "Messages that wait in the store", ""),
    "due": ("{message}", "Messages due until the end of the next minute, hour or day", "postdate.within"),
    "overdue": ("{message}", "Messages that are due and still pending, including messages held by limits", ""),
    "overdue.age": ("s", "How long the first of these has been due", ""),
    "claimed": ("{message}", "Messages that a process is delivering", ""),
    "failing": ("{message}", "Messages with at least one failed attempt", ""),
    "errors": ("{message}", "Messages in the error queue", ""),
    "unreadable": ("{message}", "Rows that cannot be read", ""),
    "services": ("{process}", "Processes that deliver from the store", ""),
    "clock.offset": ("s", "How far the clock of the store is ahead of this machine's", ""),
}
OUTCOME: Final = "postdate.outcome"
MESSAGE_TYPE: Final = "postdate.message_type"


class OpenTelemetryMetrics(CountedMetrics):
    """Metrics for ``Endpoint(metrics=…)``, exported by the exporter that the application has set up.

    Counters are plain numbers, so the delivering code never waits for them; the exporter reads them. Only durations and
    lateness are recorded, once a batch. ``docs/guides/operate.md`` lists all metrics, each with the question that it
    answers.

    Args:
        meter: the meter that makes the instruments; by default that of the process's provider.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        super().__init__()
        self._meter = meter = meter or get_meter("postdate")
        counted = "Outcomes of messages, and the destinations of delivered ones"
        meter.create_observable_counter(
            "postdate.messages", [self._observe_messages], unit="{message}", description=counted
        )
        runs = "Runs of handlers, successful or failed"
        meter.create_observable_counter(
            "postdate.handler.runs", [_observe_types(self.handler_runs)], unit="{run}", description=runs
        )
        time = "How long these runs took in total"
        meter.create_observable_counter(
            "postdate.handler.time", [_observe_types(self.handler_seconds)], unit="s", description=time
        )
        self._register_gauges(_OF_PROCESS, self._process_gauges)
        self._histograms = {
            name: meter.create_histogram(
                f"postdate.{name}", unit="s", description=meaning, explicit_bucket_boundaries_advisory=bounds
            )
            for name, (meaning, bounds) in _HISTOGRAMS.items()
        }

    @override
    def report_poll(self, messages: int, duration: timedelta) -> None:
        self._histograms["look.duration"].record(duration.total_seconds())

    @override
    def report_deliveries(self, counts: Mapping[str, int], lateness_seconds: Sequence[float]) -> None:
        super().report_deliveries(counts, lateness_seconds)
        if lateness_seconds:
            self._histograms["lateness"].record(max(lateness_seconds))

    @override
    def report_handler_runs(self, message_type: str, runs: int, seconds: float, longest_seconds: float) -> None:
        super().report_handler_runs(message_type, runs, seconds, longest_seconds)
        self._histograms["handler.duration"].record(longest_seconds, {MESSAGE_TYPE: message_type})

    @override
    def report_send(self, messages: int, duration: timedelta) -> None:
        self._histograms["send.duration"].record(duration.total_seconds())

    @override
    def report_stall(self, seconds: float) -> None:
        self._histograms["loop.delay"].record(seconds)

    @override
    def register_gauges(self, gauges: Callable[[], Gauges]) -> None:
        self._register_gauges(GAUGES, gauges)

    def _register_gauges(self, definitions: Mapping[str, tuple[str, str, str]], gauges: Callable[[], Gauges]) -> None:
        for name, (unit, meaning, attribute) in definitions.items():

            def read_gauge(_: CallbackOptions, name: str = name, attribute: str = attribute) -> list[Observation]:
                values = gauges().get(name, {})
                return [Observation(value, {attribute: label} if attribute else {}) for label, value in values.items()]

            self._meter.create_observable_gauge(f"postdate.{name}", [read_gauge], unit=unit, description=meaning)

    def _process_gauges(self) -> Gauges:
        triggered = sum(state == "triggered" for state in list(self.breakers.values()))
        outage_count = len(outage_texts(steady_seconds()))
        return {
            "outages": {"": outage_count},
            "breakers.triggered": {"": triggered},
            "claims.held": {"": self.open_claims},
        }

    def _observe_messages(self, _: CallbackOptions) -> Generator[Observation]:
        # Each counter starts at 0. Otherwise the first message would not be visible as an increase.
        for outcome in get_args(Counted):
            yield Observation(self.counts[outcome], {OUTCOME: outcome})
        for destination, messages in list(self.delivered_to.items()):
            yield Observation(messages, {OUTCOME: "delivered", "messaging.destination.name": destination})


def _observe_types(totals: Mapping[str, int]) -> Callable[[CallbackOptions], list[Observation]]:
    """Return the callback of a counter with one total for each message type."""
    return lambda _: [Observation(total, {MESSAGE_TYPE: name}) for name, total in list(totals.items())]


def prometheus() -> tuple[OpenTelemetryMetrics, Any]:
    """Return metrics, and a registry of ``prometheus_client`` with these metrics and those of the process.

    Raises `ModuleNotFoundError` without ``postdate[metrics]``.
    """
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    provider = MeterProvider(
        metric_readers=[PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)]
    )
    return OpenTelemetryMetrics(provider.get_meter("postdate")), registry
