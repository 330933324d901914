"""What operators get to see of messages: counts and measurements, to be exported. Pure.

Metrics are called once a batch, never once a message. Time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Literal

from typing_extensions import override

Counted = Literal["stored", "expired", "handled", "discarded", "failed", "retried", "moved_to_error"]
"""What becomes of messages, but for their delivery.

``stored``: they arrived through the timeouts queue. ``expired``: past their expiry when they became due. ``handled``:
their handlers ended well, and they left their queue. ``discarded``: received past their time to be received, and so not
handled, or thrown away by the policy of recoverability. ``failed``: attempts to deliver or to handle them.
``retried``: given back, or stored, for another attempt. ``moved_to_error``: to the error queue.
"""


class Metrics:
    """Receives numbers, and does nothing with them: what an endpoint does unless told otherwise.

    Methods are called in the endpoint's event loop: they must return at once and not raise.
    """

    def count(self, outcome: Counted, messages: int) -> None:
        """Note what became of messages."""

    def fetched(self, messages: int, duration: timedelta) -> None:
        """Note one look for due messages: how many it brought, and how long the store took for it."""

    def delivered(self, to: Mapping[str, int], lateness_seconds: Sequence[float]) -> None:
        """Note messages that reached their destinations.

        Args:
            to: how many, by destination.
            lateness_seconds: of each, from its due time until it was removed; where they were moved inside the database
                and nobody looked at them, of the first one alone, which is the latest but for retries.
        """

    def handlers_ran(self, message_type: str, runs: int, seconds: float, longest_seconds: float) -> None:
        """Note that the handlers of one type of message ran, well or not, for messages that ended together.

        Args:
            message_type: its name, of those that the endpoint handles.
            runs: for how many messages.
            seconds: how long all runs took.
            longest_seconds: how long the longest of them took.
        """

    def sent(self, messages: int, duration: timedelta) -> None:
        """Note one call that sent due messages to queues elsewhere, answered or not, and how long it took."""

    def breaker_changed(self, breaker: str, state: str) -> None:
        """Note that a circuit breaker is ``armed``, ``triggered`` or ``disarmed`` now."""

    def dispatches(self, dispatcher: object, claims: Callable[[], int] | None) -> None:
        """Note by what a dispatcher tells, in any thread, how many claims it holds; ``None``: it runs no more."""

    def stood_still(self, seconds: float) -> None:
        """Note, once a second, how long the event loop of a service stood still in it."""


NO_METRICS = Metrics()

Gauges = Mapping[str, Mapping[str, float]]
"""By name, values by what their one attribute says; it is empty where there is one value."""

OTHER_DESTINATIONS = "(others)"
_DESTINATIONS_AT_MOST = 200
"""Counted by name; what goes to more is counted together: each is a time series where metrics are kept."""


class CountedMetrics(Metrics):
    """Counts messages since it was made, by what became of them and where."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        """Messages by what happened to them: ``stored``, ``delivered`` and so on, see :data:`Counted`."""
        self.delivered_to = Counter[str]()
        """Of these, the delivered ones by destination; some may be :data:`OTHER_DESTINATIONS`."""
        self.handler_runs = Counter[str]()
        """Runs of handlers by type of message."""
        self.handler_seconds = Counter[str]()
        """How long these runs took in total."""
        self.breakers = dict[str, str]()
        """States of circuit breakers that were ever in one."""
        self._dispatchers = dict[object, Callable[[], int]]()

    @property
    def open_claims(self) -> int:
        """Messages that dispatchers of this process have claimed, and neither finished nor given back."""
        return sum(claims() for claims in list(self._dispatchers.values()))

    def show(self, gauges: Callable[[], Gauges]) -> None:
        """Have whoever exports the counts ask for these, too, in any thread."""

    @override
    def count(self, outcome: Counted, messages: int) -> None:
        self.counts[outcome] += messages

    @override
    def delivered(self, to: Mapping[str, int], lateness_seconds: Sequence[float]) -> None:
        for destination, messages in to.items():
            self.counts["delivered"] += messages
            has_own_counter = destination in self.delivered_to or len(self.delivered_to) < _DESTINATIONS_AT_MOST
            self.delivered_to[destination if has_own_counter else OTHER_DESTINATIONS] += messages

    @override
    def handlers_ran(self, message_type: str, runs: int, seconds: float, longest_seconds: float) -> None:
        self.handler_runs[message_type] += runs
        self.handler_seconds[message_type] += seconds  # pyright: ignore[reportArgumentType] - counters add any number

    @override
    def breaker_changed(self, breaker: str, state: str) -> None:
        self.breakers[breaker] = state

    @override
    def dispatches(self, dispatcher: object, claims: Callable[[], int] | None) -> None:
        if claims is None:
            del self._dispatchers[dispatcher]
        else:
            self._dispatchers[dispatcher] = claims


def shown_duration(seconds: float) -> str:
    """Return a duration as an operator reads it: ``0.4 s``, ``26 s``, ``3 min``, ``2 h 5 min``."""
    if seconds < 1:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
