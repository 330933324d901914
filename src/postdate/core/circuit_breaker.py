"""Repeated failures over time, and failures at too high a rate: when to stop hoping. Pure; time is an argument.

Source: specification 1.11.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from datetime import datetime, timedelta

log = logging.getLogger("postdate.circuit_breaker")

CriticalError = Callable[[str, BaseException], None]
"""What to do when the endpoint cannot do its work any more: a text, and the last failure."""

PAUSE_ARMED = timedelta(seconds=1)
PAUSE_TRIGGERED = timedelta(seconds=10)
RATE_WINDOW = timedelta(seconds=30)


class State(enum.Enum):
    """Disarmed: all is well. Armed: it fails, for how long? Triggered: too long; said so once."""

    DISARMED = "disarmed"
    ARMED = "armed"
    TRIGGERED = "triggered"


class RepeatedFailures:
    """Trips when something keeps failing for a given time without one success.

    Args:
        name: for logs.
        critical: text of the critical error.
        time_to_trigger: how long failures may go on.
        trigger: called once each time the breaker trips.
    """

    def __init__(self, name: str, critical: str, time_to_trigger: timedelta, trigger: CriticalError) -> None:
        self.name, self.state = name, State.DISARMED
        self._critical, self._time_to_trigger, self._trigger = critical, time_to_trigger, trigger
        self._armed_at: datetime | None = None

    def failure(self, error: BaseException, now: datetime) -> timedelta:
        """Note a failure; return how long to pause before the next attempt."""
        if self._armed_at is None:
            self.state, self._armed_at = State.ARMED, now
            log.warning("circuit breaker %s armed: %s", self.name, error)
        elif self.state is State.ARMED and now - self._armed_at >= self._time_to_trigger:
            self.state = State.TRIGGERED
            log.warning("circuit breaker %s triggered after %s: %s", self.name, self._time_to_trigger, error)
            _call(self._trigger, self._critical, error)
        return PAUSE_TRIGGERED if self.state is State.TRIGGERED else PAUSE_ARMED

    def success(self) -> None:
        """Note a success: disarms."""
        if self.state is not State.DISARMED:
            log.info("circuit breaker %s disarmed", self.name)
            self.state, self._armed_at = State.DISARMED, None


class FailureRate:
    """Trips when more than a number of failures a second, over 30 s, cannot even be handled.

    Args:
        name: for logs.
        critical: text of the critical error.
        per_second: limit; times 30 in each window.
        trigger: called for every failure above the limit.
    """

    def __init__(self, name: str, critical: str, per_second: int, trigger: CriticalError) -> None:
        self.name = name
        self._critical, self._limit, self._trigger = critical, per_second * RATE_WINDOW.seconds, trigger
        self._window_end: datetime | None = None
        self._failures = 0

    def failure(self, error: BaseException, now: datetime) -> None:
        """Note a failure."""
        if self._window_end is None or now >= self._window_end:
            self._window_end, self._failures = now + RATE_WINDOW, 0
            log.warning("circuit breaker %s armed: %s", self.name, error)
        self._failures += 1
        if self._failures > self._limit:
            _call(self._trigger, self._critical, error)


def _call(trigger: CriticalError, critical: str, error: BaseException) -> None:
    try:
        trigger(critical, error)
    except Exception:
        log.critical("the critical-error action failed on %r", critical, exc_info=True)
