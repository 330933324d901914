"""Circuit breakers; pure: times are arguments, in monotonic seconds. Source: ADR 0047."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable
from datetime import timedelta

from postdate.errors import StoreReplaced
from postdate.runtime.reporting import NO_METRICS, Metrics

log = logging.getLogger("postdate.circuit_breaker")

CriticalError = Callable[[str, BaseException], None]
"""Called with a text and the last failure when the endpoint cannot do its work any more."""

PAUSE_ARMED = timedelta(seconds=1)
"""The pause after a failure while the breaker is armed."""

PAUSE_TRIGGERED = timedelta(seconds=10)
"""The pause after a failure while the breaker is triggered."""

RATE_WINDOW = timedelta(seconds=30)
"""The time over which :class:`FailureRate` counts failures."""

NOTHING_HANDLED = timedelta(minutes=1)
"""The time without a success after which :class:`FailureRate` trips, however few failures there are."""

_LONGEST_BETWEEN_FAILURES = timedelta(minutes=3)
"""What fails is tried again within a minute. So after a longer time, the message that failed last was handled."""


class BreakerState(enum.Enum):
    """Disarmed: no failure. Armed: calls fail. Triggered: calls failed for too long, and this was reported once."""

    DISARMED = "disarmed"
    ARMED = "armed"
    TRIGGERED = "triggered"


class RepeatedFailures:
    """A breaker that trips if calls fail for ``time_to_trigger`` without a success, or at once if retries are useless.

    When it trips, it calls ``trigger`` once, with the text ``critical`` and the last error. The loop that runs the
    breaker calls :meth:`update_state` at :attr:`deadline`, so that it trips also if no call is made any more. Its
    states are logged at level *debug* only: :class:`postdate.runtime.resource.Resource` logs the outage itself.

    With ``forgets_after`` it trips only at a failure, and a failure this long after the last one starts a new series.
    This is for calls that are repeated soon while they fail, and that may stop because another process has the message.
    """

    def __init__(
        self,
        name: str,
        critical: str,
        time_to_trigger: timedelta,
        trigger: CriticalError,
        metrics: Metrics = NO_METRICS,
        *,
        forgets_after: timedelta | None = None,
    ) -> None:
        self.name, self.state = name, BreakerState.DISARMED
        self.on_armed: Callable[[], None] = do_nothing
        """Called when it is armed; from then on it has a :attr:`deadline`."""
        self._critical, self._time_to_trigger, self._trigger = critical, time_to_trigger, trigger
        self._metrics, self._forgets_after = metrics, forgets_after
        self._armed_at: float | None = None
        self._failed_at = 0.0
        self._last_error: BaseException | None = None

    def create_for_calls(self, call_name: str, forgets_after: timedelta) -> RepeatedFailures:
        """Return a breaker for other calls of the same loop, with the same critical error; see ``forgets_after``."""
        name = f"{self.name} {call_name}"
        span, trigger = self._time_to_trigger, self._trigger
        return RepeatedFailures(name, self._critical, span, trigger, self._metrics, forgets_after=forgets_after)

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds at which it trips unless a call succeeds before; ``None`` while it is not armed."""
        return self._trips_at if self._forgets_after is None else None

    @property
    def _trips_at(self) -> float | None:
        if self.state is not BreakerState.ARMED or self._armed_at is None:
            return None
        return self._armed_at + self._time_to_trigger.total_seconds()

    def report_failure(self, error: BaseException, seconds: float) -> timedelta:
        """Report a failure; return how long to pause before the next attempt."""
        if self._forgets_after is not None and seconds - self._failed_at >= self._forgets_after.total_seconds():
            self.report_success()
        self._last_error, self._failed_at = error, seconds
        if self.state is BreakerState.DISARMED:
            self._armed_at = seconds
            log.debug("circuit breaker %s armed: %s", self.name, error)
            self._set_state(BreakerState.ARMED)
            self.on_armed()
        if isinstance(error, StoreReplaced) and self.state is BreakerState.ARMED:
            self._trip("at once", error)
        self.update_state(seconds)
        return PAUSE_TRIGGERED if self.state is BreakerState.TRIGGERED else PAUSE_ARMED

    def update_state(self, seconds: float) -> None:
        trips_at, last_error = self._trips_at, self._last_error
        if trips_at is None or last_error is None or seconds < trips_at:
            return
        self._trip(f"after {self._time_to_trigger}", last_error)

    def _trip(self, when: str, error: BaseException) -> None:
        log.debug("circuit breaker %s triggered %s: %s", self.name, when, error)
        self._set_state(BreakerState.TRIGGERED)
        _call_trigger(self._trigger, self._critical, error)

    def report_success(self) -> None:
        if self.state is not BreakerState.DISARMED:
            log.debug("circuit breaker %s disarmed", self.name)
            self._armed_at, self._last_error = None, None
            self._set_state(BreakerState.DISARMED)

    def _set_state(self, state: BreakerState) -> None:
        self.state = state
        self._metrics.report_breaker_state(self.name, state.value)


class FailureRate:
    """A breaker that trips if the handling of failures itself fails: more than ``per_second`` times on average in 30 s.

    A window of 30 s begins at the first failure, and the next one at the first failure after its end. ``trigger`` is
    called for each failure above the limit. If each retry waits longer than the one before, there are never many
    failures in one window. Then the breaker trips once, after :data:`NOTHING_HANDLED` without one success.
    """

    def __init__(
        self, name: str, critical: str, per_second: int, trigger: CriticalError, metrics: Metrics = NO_METRICS
    ) -> None:
        self.name, self.state = name, BreakerState.DISARMED
        self._critical, self._limit, self._trigger = critical, per_second * RATE_WINDOW.seconds, trigger
        self._metrics = metrics
        self.on_armed: Callable[[], None] = do_nothing
        """Called when a window begins; its end is the :attr:`deadline`."""
        self.deadline: float | None = None
        self._failures = 0
        self._failing_since: float | None = None
        self._failed_at = -math.inf
        self._is_reported = False

    def report_failure(self, error: BaseException, seconds: float) -> None:
        self.update_state(seconds)
        if self.deadline is None:
            self.deadline, self._failures = seconds + RATE_WINDOW.total_seconds(), 0
            log.debug("circuit breaker %s armed: %s", self.name, error)
            self._set_state(BreakerState.ARMED)
            self.on_armed()
        self._failures += 1
        if seconds - self._failed_at > _LONGEST_BETWEEN_FAILURES.total_seconds():
            self.report_success()
        self._failed_at = seconds
        if self._failing_since is None:
            self._failing_since = seconds
        if self._failures > self._limit:
            log.debug("circuit breaker %s triggered by failure %d: %s", self.name, self._failures, error)
            self._trip(error)
        elif not self._is_reported and seconds - self._failing_since >= NOTHING_HANDLED.total_seconds():
            self._is_reported = True
            log.debug("circuit breaker %s triggered after %s: %s", self.name, NOTHING_HANDLED, error)
            self._trip(error)

    def report_success(self) -> None:
        """Report that a failure, or the message that failed, was handled."""
        self._failing_since, self._is_reported = None, False

    def _trip(self, error: BaseException) -> None:
        if self.state is not BreakerState.TRIGGERED:
            self._set_state(BreakerState.TRIGGERED)
        _call_trigger(self._trigger, self._critical, error)

    def update_state(self, seconds: float) -> None:
        """End the window if ``seconds`` is at or after its end."""
        if self.deadline is not None and seconds >= self.deadline:
            log.debug("circuit breaker %s disarmed after %d failures", self.name, self._failures)
            self.deadline = None
            self._set_state(BreakerState.DISARMED)

    def _set_state(self, state: BreakerState) -> None:
        self.state = state
        self._metrics.report_breaker_state(self.name, state.value)


Breaker = RepeatedFailures | FailureRate


def do_nothing() -> None:
    """Do nothing: the callback until another one is registered."""


def _call_trigger(trigger: CriticalError, critical: str, error: BaseException) -> None:
    try:
        trigger(critical, error)
    except Exception:
        log.critical("the critical-error action failed on %r", critical, exc_info=True)
