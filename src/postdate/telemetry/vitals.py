"""The health of a service, judged by its parts, its event loop and its circuit breakers; for probes and the log."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from postdate.clock import steady_seconds
from postdate.runtime.process import WATCHDOG, notify
from postdate.runtime.reporting import CountedMetrics, shown_duration
from postdate.runtime.resource import outages

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
        self._beat_at = steady_seconds()
        self.is_ready = False
        """True while the service receives and delivers; false again as soon as it stops."""
        # Counts at the last summary in the log.
        self._reported = Counter[str]()

    def ill(self) -> list[str]:
        """Return the reasons to restart the process; empty if the process is healthy."""
        still = steady_seconds() - self._beat_at - _BEAT_SECONDS
        stands = [f"the event loop stands still, for {shown_duration(still)} now"]
        return [*self._problems(), *(stands if still > _STANDS_STILL_SECONDS else ())]

    def unready(self) -> list[str]:
        """Return the reasons why the service delivers nothing now."""
        breakers = [
            f"{name} is triggered" for name, state in list(self._tally.breakers.items()) if state == "triggered"
        ]
        return [
            *self.ill(),
            *outages(steady_seconds()),
            *breakers,
            *([] if self.is_ready else ["it has not started, or is stopping"]),
        ]

    async def run(self) -> None:
        """Beat once a second, also to the watchdog of the service manager. Log a summary each minute."""
        watched, summed_up = _watchdog_seconds(), steady_seconds()
        apart = min(_BEAT_SECONDS, watched or _BEAT_SECONDS)
        while True:
            self._beat_at = began = steady_seconds()
            if watched is not None and not self.ill():
                notify(WATCHDOG)
            if began - summed_up >= _SUMMARY_SECONDS:
                summed_up = began
                self._sum_up()
            await anyio.sleep(apart)
            self._tally.stood_still(max(steady_seconds() - began - apart, 0.0))

    def _sum_up(self) -> None:
        counts = Counter(self._tally.counts)
        new, self._reported = counts - self._reported, counts
        if new:
            parts = (f"{count:,} {what.replace('_', ' ')}" for what, count in new.items())
            log.info("in the last minute: %s", ", ".join(parts))


def _watchdog_seconds() -> float | None:
    """Return how often the service manager must hear from this process, in seconds: half of its timeout; or ``None``.

    Source: sd_watchdog_enabled(3).
    """
    waits, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return int(waits) / 2_000_000 if waits.isdigit() and process in {"", str(os.getpid())} else None
