"""Metrics kept in memory, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta


class RecordedMetrics:
    """Counts, and keeps what was measured; implements :class:`postdate.runtime.reporting.Metrics`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Messages by what happened to them: ``stored``, ``delivered`` and so on, by the names of the methods."""
        self.lateness_seconds: list[float] = []
        self.batches: list[int] = []
        """Sizes of the batches that looks brought, empty ones left out."""
        self.fetch_durations: list[timedelta] = []
        self.breaker_changes: list[tuple[str, str]] = []

    def stored(self, messages: int) -> None:
        self.counts["stored"] += messages

    def fetched(self, messages: int, duration: timedelta) -> None:
        if messages:
            self.batches.append(messages)
        self.fetch_durations.append(duration)

    def delivered(self, messages: int, lateness_seconds: Sequence[float]) -> None:
        self.counts["delivered"] += messages
        self.lateness_seconds += lateness_seconds

    def expired(self, messages: int) -> None:
        self.counts["expired"] += messages

    def discarded(self, messages: int) -> None:
        self.counts["discarded"] += messages

    def failed(self, messages: int) -> None:
        self.counts["failed"] += messages

    def retried(self, messages: int) -> None:
        self.counts["retried"] += messages

    def moved_to_error(self, messages: int) -> None:
        self.counts["moved_to_error"] += messages

    def breaker_changed(self, breaker: str, state: str) -> None:
        self.breaker_changes.append((breaker, state))
