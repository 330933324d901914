"""Numbers for operators: counts and measurements of messages, to be exported. Pure.

Metrics are called once for each batch, never once for each message. Time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Literal

from typing_extensions import override

Counted = Literal["stored", "expired", "handled", "discarded", "failed", "retried", "moved_to_error"]
"""Events of messages that are counted, except deliveries.

``stored``: the messages arrived through the timeouts queue. ``expired``: they were past their expiry when they became
due. ``handled``: their handlers succeeded, and they left their queue. ``discarded``: they were received past their time
to be received and therefore not handled, or the recoverability policy discarded them. ``failed``: attempts to deliver
or to handle them failed. ``retried``: they were released, or stored, for another attempt. ``moved_to_error``: they were
moved to the error queue.
"""


class Metrics:
    """The receiver of all numbers. This base class ignores them, which is the default of an endpoint.

    Methods are called in the endpoint's event loop: they must return at once and not raise.
    """

    def count(self, outcome: Counted, messages: int) -> None:
        """Count messages with this outcome."""

    def report_poll(self, messages: int, duration: timedelta) -> None:
        """Count one query for due messages: the number of messages, and how long the store took."""

    def report_deliveries(self, counts: Mapping[str, int], lateness_seconds: Sequence[float]) -> None:
        """Count messages that reached their destinations.

        Args:
            counts: number of messages by destination.
            lateness_seconds: lateness of each message, from its due time until it was removed, or until its first
                removal failed. Where messages were moved inside the database and not read, it has only the lateness of
                the first message. That is the latest message, except for messages with retries.
        """

    def report_handler_runs(self, message_type: str, runs: int, seconds: float, longest_seconds: float) -> None:
        """Count runs of the handlers of one message type, successful or not, for messages that ended together.

        Args:
            message_type: name of a type that the endpoint handles.
            runs: number of messages.
            seconds: total duration of all runs.
            longest_seconds: duration of the longest run.
        """

    def report_send(self, messages: int, duration: timedelta) -> None:
        """Count one call that sent due messages to queues elsewhere, successful or not, and how long it took."""

    def report_breaker_state(self, breaker: str, state: str) -> None:
        """Record that a circuit breaker is ``armed``, ``triggered`` or ``disarmed`` now."""

    def register_dispatcher(self, dispatcher: object, claims: Callable[[], int] | None) -> None:
        """Register a callable that returns the dispatcher's number of claims. It is called from any thread.

        ``None`` unregisters it, because the dispatcher has stopped.
        """

    def report_stall(self, seconds: float) -> None:
        """Record how long the event loop of a service was blocked in the last second; called once a second."""


NO_METRICS = Metrics()

Gauges = Mapping[str, Mapping[str, float]]
"""Values by name of the gauge, then by the value of its only attribute; that is empty for a gauge with one value."""

OTHER_DESTINATIONS = "(others)"
_DESTINATIONS_AT_MOST = 200
"""Number of destinations that are counted by name. The others are counted together, because each destination is a time
series where metrics are kept."""


class CountedMetrics(Metrics):
    """Counts messages since this object was made, by event and by destination."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        """Number of messages by event: ``stored``, ``report_deliveries`` and so on, see :data:`Counted`."""
        self.delivered_to = Counter[str]()
        """Number of delivered messages by destination; some may be under :data:`OTHER_DESTINATIONS`."""
        self.handler_runs = Counter[str]()
        """Number of runs of handlers by message type."""
        self.handler_seconds = Counter[str]()
        """Total duration of these runs by message type, in seconds."""
        self.breakers = dict[str, str]()
        """State of each circuit breaker whose state has ever changed."""
        self._dispatchers = dict[object, Callable[[], int]]()

    @property
    def open_claims(self) -> int:
        """Number of messages that dispatchers of this process have claimed, and neither finished nor released."""
        return sum(claims() for claims in list(self._dispatchers.values()))

    def register_gauges(self, gauges: Callable[[], Gauges]) -> None:
        """Register a function that returns more gauges for the export. It is called from any thread."""

    @override
    def count(self, outcome: Counted, messages: int) -> None:
        self.counts[outcome] += messages

    @override
    def report_deliveries(self, counts: Mapping[str, int], lateness_seconds: Sequence[float]) -> None:
        for destination, messages in counts.items():
            self.counts["delivered"] += messages
            has_own_counter = destination in self.delivered_to or len(self.delivered_to) < _DESTINATIONS_AT_MOST
            self.delivered_to[destination if has_own_counter else OTHER_DESTINATIONS] += messages

    @override
    def report_handler_runs(self, message_type: str, runs: int, seconds: float, longest_seconds: float) -> None:
        self.handler_runs[message_type] += runs
        self.handler_seconds[message_type] += seconds  # pyright: ignore[reportArgumentType] - counters add any number

    @override
    def report_breaker_state(self, breaker: str, state: str) -> None:
        self.breakers[breaker] = state

    @override
    def register_dispatcher(self, dispatcher: object, claims: Callable[[], int] | None) -> None:
        if claims is None:
            del self._dispatchers[dispatcher]
        else:
            self._dispatchers[dispatcher] = claims


def duration_text(seconds: float) -> str:
    """Return a duration as an operator reads it: ``0.4 s``, ``26 s``, ``3 min``, ``2 h 5 min``."""
    if seconds < 1:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
