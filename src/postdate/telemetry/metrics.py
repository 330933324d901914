"""What an endpoint counts and measures, by OpenTelemetry. Source: ADR 36.

Needs the package ``opentelemetry-api``, which every application with OpenTelemetry has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
from typing_extensions import override

from postdate.runtime.reporting import CountedMetrics, Gauges

LATENESS_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 60.0, 300.0, 3600.0)
_DURATION_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
GAUGES: Final = {
    "pending": ("{message}", "Messages that wait in the store", ""),
    "due": ("{message}", "Messages due until the end of the next minute, hour or day", "postdate.within"),
    "overdue": ("{message}", "Messages that are due and wait still, also what limits hold", ""),
    "overdue.age": ("s", "How long the first of these has been due", ""),
    "claimed": ("{message}", "Messages that a process is delivering", ""),
    "failing": ("{message}", "Messages of which an attempt has failed", ""),
    "errors": ("{message}", "Messages in the error queue", ""),
    "set_aside": ("{message}", "Rows that cannot be read", ""),
    "services": ("{process}", "Processes that deliver from the store", ""),
    "clock.offset": ("s", "How far the clock of the store is ahead of this machine's", ""),
}
_OUTCOMES: Final = ("stored", "expired", "discarded", "failed", "retried", "moved_to_error")
OUTCOME: Final = "postdate.outcome"
DESTINATION: Final = "messaging.destination.name"


class OpenTelemetryMetrics(CountedMetrics):
    """Metrics for ``Endpoint(metrics=…)``, to be exported by whatever the application has set up.

    All are counted where nothing waits, and read by the exporter; only durations and lateness are recorded, once a
    batch. They are listed, each with the question that it answers, in ``docs/guides/operate.md``.

    Args:
        meter: that makes the instruments; default: of the process's own provider.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        super().__init__()
        self._meter = meter = meter or get_meter("postdate")
        meter.create_observable_counter(
            "postdate.messages",
            [self._messages],
            unit="{message}",
            description="What became of messages, and where the delivered ones went",
        )
        _observe(meter, "postdate.breakers.triggered", "{breaker}", "Triggered circuit breakers", self._tripped)
        held = "Messages that this process has claimed"
        _observe(meter, "postdate.claims.held", "{message}", held, lambda: {"": self.claims_held})

        def histogram(name: str, unit: str, meaning: str, bounds: Sequence[float]) -> Callable[[float], None]:
            made = meter.create_histogram(
                name, unit=unit, description=meaning, explicit_bucket_boundaries_advisory=bounds
            )
            return made.record

        self._record_lateness = histogram(
            "postdate.lateness", "s", "From its due time on, of the latest message of each batch", LATENESS_BOUNDS
        )
        self._record_look = histogram(
            "postdate.look.duration", "s", "Looks into the store for due messages", _DURATION_BOUNDS
        )
        self._record_send = histogram(
            "postdate.send.duration", "s", "Calls that send due messages to queues", _DURATION_BOUNDS
        )
        self._record_delay = histogram(
            "postdate.loop.delay", "s", "How long the event loop stood still, looked at once a second", _DURATION_BOUNDS
        )

    @override
    def fetched(self, messages: int, duration: timedelta) -> None:
        self._record_look(duration.total_seconds())

    @override
    def delivered(self, to: Mapping[str, int], lateness_seconds: Sequence[float]) -> None:
        super().delivered(to, lateness_seconds)
        if lateness_seconds:
            self._record_lateness(max(lateness_seconds))

    @override
    def sent(self, messages: int, duration: timedelta) -> None:
        self._record_send(duration.total_seconds())

    @override
    def stood_still(self, seconds: float) -> None:
        self._record_delay(seconds)

    @override
    def show(self, gauges: Callable[[], Gauges]) -> None:
        for name, (unit, meaning, attribute) in GAUGES.items():
            values = partial(_named, gauges, name)
            _observe(self._meter, f"postdate.{name}", unit, meaning, values, attribute)

    def _messages(self, _: CallbackOptions) -> Generator[Observation]:
        for outcome in _OUTCOMES:  # from 0 on, or the first ones would not be seen as an increase
            yield Observation(self.counts[outcome], {OUTCOME: outcome})
        for destination, messages in list(self.delivered_to.items()):
            yield Observation(messages, {OUTCOME: "delivered", DESTINATION: destination})

    def _tripped(self) -> Mapping[str, float]:
        return {"": sum(state == "triggered" for state in list(self.breakers.values()))}


def _observe(
    meter: Meter, name: str, unit: str, meaning: str, values: Callable[[], Mapping[str, float]], attribute: str = ""
) -> None:
    """Make a gauge of values by what their one attribute says."""

    def look(_: CallbackOptions) -> list[Observation]:
        return [Observation(value, {attribute: of} if attribute else {}) for of, value in values().items()]

    meter.create_observable_gauge(name, [look], unit=unit, description=meaning)


def _named(gauges: Callable[[], Gauges], name: str) -> Mapping[str, float]:
    return gauges().get(name, {})


def prometheus() -> tuple[OpenTelemetryMetrics, Any]:
    """Return metrics, and a registry of ``prometheus_client`` with them and those of the process.

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
