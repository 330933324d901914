"""Whether a service is well: by its parts, its loop, and its circuit breakers; told to whoever asks, and to the log."""

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
"""Without a beat for so long, the event loop stands still."""

_SUMMARY_SECONDS: Final = 60.0

log = logging.getLogger("postdate.service")


class Vitals:
    """The signs of life of one service. Start :meth:`run` as a task; anything else may be called from any thread.

    Args:
        tally: counts of the service.
        problems: says what is wrong with its parts, in words.
    """

    def __init__(self, tally: CountedMetrics, problems: Callable[[], Sequence[str]]) -> None:
        self._tally, self._problems = tally, problems
        self._beat_at = steady_seconds()
        self.is_ready = False
        """Set once the service receives and delivers, and no more when it stops."""
        self._reported = Counter[str]()

    def ill(self) -> list[str]:
        """Return why the process should be started anew; nothing if it is well."""
        still = steady_seconds() - self._beat_at - _BEAT_SECONDS
        stands = [f"the event loop stands still, for {shown_duration(still)} now"]
        return [*self._problems(), *(stands if still > _STANDS_STILL_SECONDS else ())]

    def unready(self) -> list[str]:
        """Return why it delivers nothing now."""
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
        """Beat once a second, with the watchdog of the service manager; sum up each minute in the log."""
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
    """Return how often the service manager wants to hear from this process, half of what it waits; or ``None``.

    Source: sd_watchdog_enabled(3).
    """
    waits, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return int(waits) / 2_000_000 if waits.isdigit() and process in {"", str(os.getpid())} else None
