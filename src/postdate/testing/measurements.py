"""Metrics kept in memory, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from typing_extensions import override

from postdate.runtime.reporting import CountedMetrics


class RecordedMetrics(CountedMetrics):
    """Counts messages, and keeps the measurements; implements :class:`postdate.runtime.reporting.Metrics`."""

    def __init__(self) -> None:
        super().__init__()
        self.lateness_seconds: list[float] = []
        self.batches: list[int] = []
        """Numbers of messages that queries for due messages returned; empty results are left out."""
        self.fetch_durations: list[timedelta] = []
        self.sent_batches: list[int] = []
        self.breaker_changes: list[tuple[str, str]] = []

    @override
    def report_poll(self, messages: int, duration: timedelta) -> None:
        if messages:
            self.batches.append(messages)
        self.fetch_durations.append(duration)

    @override
    def report_deliveries(self, counts: Mapping[str, int], lateness_seconds: Sequence[float]) -> None:
        super().report_deliveries(counts, lateness_seconds)
        self.lateness_seconds += lateness_seconds

    @override
    def report_send(self, messages: int, duration: timedelta) -> None:
        self.sent_batches.append(messages)

    @override
    def report_breaker_state(self, breaker: str, state: str) -> None:
        super().report_breaker_state(breaker, state)
        self.breaker_changes.append((breaker, state))
