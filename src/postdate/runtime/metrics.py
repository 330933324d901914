"""What the core counts and measures, to be exported. Called once a batch, never once a message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol


class Metrics(Protocol):
    """Receives numbers. Methods are called in the endpoint's event loop: they must return at once and not raise."""

    def stored(self, messages: int) -> None:
        """Note that messages arrived through the timeouts queue and were stored."""

    def fetched(self, messages: int, duration: timedelta) -> None:
        """Note one look for due messages: how many it brought, and how long the store took for it."""

    def delivered(self, messages: int, lateness_seconds: Sequence[float]) -> None:
        """Note messages that reached their destination.

        Args:
            messages: how many.
            lateness_seconds: of each, from its due time until it was removed; empty where the messages were moved
                inside the database and nobody looked at them.
        """

    def expired(self, messages: int) -> None:
        """Note messages that were past their expiry when they became due."""

    def discarded(self, messages: int) -> None:
        """Note received messages that were past their time to be received, and so were not handled."""

    def failed(self, messages: int) -> None:
        """Note attempts to deliver that failed."""

    def retried(self, messages: int) -> None:
        """Note messages that were given back for a later attempt."""

    def moved_to_error(self, messages: int) -> None:
        """Note messages that went to the error queue."""

    def breaker_changed(self, breaker: str, state: str) -> None:
        """Note that a circuit breaker is ``armed``, ``triggered`` or ``disarmed`` now."""


class NoMetrics(Metrics):
    """Counts nothing; what an endpoint does unless told otherwise."""


NO_METRICS = NoMetrics()
