"""The health of a service, judged by its parts, its event loop and its circuit breakers; for probes and the log."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from postdate.clock import steady_seconds
from postdate.runtime.process import WATCHDOG, notify_service_manager
from postdate.runtime.reporting import CountedMetrics, duration_text
from postdate.runtime.resource import outage_texts

_BEAT_SECONDS: Final = 1.0
_STANDS_STILL_SECONDS: Final = 10.0
"""The event loop counts as stopped when it has not beaten for this many seconds."""

_SUMMARY_SECONDS: Final = 60.0

log = logging.getLogger("postdate.service")


class Vitals:
    """The health of one service. Start :meth:`run` as a task. All other methods may be called from any thread.

    Args:
        tally: counts of the service.
        problems: a function that returns descriptions of what is wrong with the parts of the service.
    """

    def __init__(self, tally: CountedMetrics, problems: Callable[[], Sequence[str]]) -> None:
        self._tally, self._problems = tally, problems
        # On the monotonic clock, in seconds. The event loop writes it, and the threads of the HTTP server read it.
        self._last_beat_seconds = steady_seconds()
        self.is_ready = False
        """True while the service receives and delivers; false again as soon as it stops."""
        # Counts at the last summary in the log.
        self._reported_counts = Counter[str]()

    def health_problems(self) -> list[str]:
        """Return the reasons to restart the process; empty if the process is healthy."""
        stopped_seconds = steady_seconds() - self._last_beat_seconds - _BEAT_SECONDS
        stopped_texts = [f"the event loop has been blocked for {duration_text(stopped_seconds)}"]
        return [*self._problems(), *(stopped_texts if stopped_seconds > _STANDS_STILL_SECONDS else ())]

    def readiness_problems(self) -> list[str]:
        """Return the reasons why the service delivers nothing now."""
        breakers = [
            f"{name} is triggered" for name, state in list(self._tally.breakers.items()) if state == "triggered"
        ]
        return [
            *self.health_problems(),
            *outage_texts(steady_seconds()),
            *breakers,
            *([] if self.is_ready else ["it has not started, or is stopping"]),
        ]

    async def run(self) -> None:
        """Beat once a second, also to the watchdog of the service manager. Log a summary each minute."""
        watchdog_seconds, last_summary = _watchdog_seconds(), steady_seconds()
        interval = min(_BEAT_SECONDS, watchdog_seconds or _BEAT_SECONDS)
        while True:
            self._last_beat_seconds = beat_seconds = steady_seconds()
            if watchdog_seconds is not None and not self.health_problems():
                notify_service_manager(WATCHDOG)
            if beat_seconds - last_summary >= _SUMMARY_SECONDS:
                last_summary = beat_seconds
                self._log_summary()
            await anyio.sleep(interval)
            self._tally.report_stall(max(steady_seconds() - beat_seconds - interval, 0.0))

    def _log_summary(self) -> None:
        counts = Counter(self._tally.counts)
        new_counts, self._reported_counts = counts - self._reported_counts, counts
        if new_counts:
            parts = (f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in new_counts.items())
            log.info("in the last minute: %s", ", ".join(parts))


def _watchdog_seconds() -> float | None:
    """Return how often the service manager must hear from this process, in seconds: half of its timeout; or ``None``.

    Source: sd_watchdog_enabled(3).
    """
    watchdog_usec, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return int(watchdog_usec) / 2_000_000 if watchdog_usec.isdigit() and process in {"", str(os.getpid())} else None
