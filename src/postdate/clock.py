"""Clocks: they read the wall time. In other code ``now`` is an argument.

There are two exceptions: new message ids contain the time for their order in an index, and ``postdate bench`` measures.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol, runtime_checkable

import anyio

from postdate.errors import ConfigurationError
from postdate.runtime.threads import run_in_thread, thread_limiter

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

EARLIEST = datetime.min.replace(tzinfo=UTC)
LATEST = datetime.max.replace(tzinfo=UTC)
"""The ends of the calendar; see :func:`later`."""


@runtime_checkable
class Clock(Protocol):
    """A clock: it returns the time, and waits for a time. Every instant is aware and in UTC."""

    def now(self) -> datetime:
        """Return the current instant, aware, in UTC, to the microsecond."""
        ...

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        """Return when ``event`` is set or ``until`` has come, whichever is first.

        It may return a little before ``until`` if the clock was set during the wait: callers read ``now`` again.
        """

    def monotonic(self) -> float:
        """Return seconds of this clock that never go back, even if the wall clock is set.

        Only differences have a meaning. Durations, pauses, time-outs and circuit breakers are measured by these
        seconds; ``now`` is for due times and records.
        """
        ...

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        """Wait for ``event``, at most for ``duration``; setting the wall clock does not change how long that is."""

    async def sleep(self, duration: timedelta) -> None:
        """Sleep for ``duration`` on this clock."""


_SINCE_BOOT: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux

_MONOTONIC_CLOCK: Final[int | None] = getattr(time, "CLOCK_MONOTONIC", None)  # not on Windows


def steady_seconds() -> float:
    """Return seconds that never go back, in any thread. All durations are differences of values of this function.

    `time.monotonic` cannot be used. Libraries for tests replace it in some threads and not in others, so the difference
    of two values would be decades. `freezegun` decides by the call stack; it does not replace `time.clock_gettime`.
    """
    return time.monotonic() if _MONOTONIC_CLOCK is None else time.clock_gettime(_MONOTONIC_CLOCK)


_TIMER_SLACK_SECONDS = 0.0015
"""Event loops round their timers up to a millisecond. So a thread sleeps through the last part of a wait instead."""


async def _wait_precisely(event: anyio.Event, seconds: float) -> None:
    """Wait for ``event`` or ``seconds``, to a tenth of a millisecond; the last 1.5 ms ignore ``event``."""
    if seconds > _TIMER_SLACK_SECONDS:
        started_at = steady_seconds()
        with anyio.move_on_after(seconds - _TIMER_SLACK_SECONDS):
            await event.wait()
            return
        seconds -= steady_seconds() - started_at
    if seconds <= 0 or event.is_set():
        return
    if thread_limiter().available_tokens > 0:
        await run_in_thread(time.sleep, seconds)
    else:  # hanging calls have all threads; if this waited for a thread, the deadlines of these calls would never end
        with anyio.move_on_after(seconds):
            await event.wait()


class SystemClock:
    """The machine's clock; it waits in real time."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        await _wait_precisely(event, (until - self.now()).total_seconds())

    def monotonic(self) -> float:
        return steady_seconds()

    def seconds_since_boot(self) -> float:
        """Return seconds as :meth:`monotonic` does, and include the time of suspension where the system can tell."""
        return steady_seconds() if _SINCE_BOOT is None else time.clock_gettime(_SINCE_BOOT)

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        await _wait_precisely(event, duration.total_seconds())

    async def sleep(self, duration: timedelta) -> None:
        await anyio.sleep(max(duration.total_seconds(), 0))


@dataclass(frozen=True, slots=True)
class ScaledClock:
    """A clock that runs ``speed`` times as fast as the machine's, from a common start.

    Processes with the same three values agree on the time, so a service and a consumer can
    live through one day together in a minute.

    Args:
        starts_at: time of this clock at ``real_start``; aware.
        real_start: machine time in seconds since 1970 (UTC) at which the clock starts.
        speed: seconds of this clock in one real second; greater than 0.
    """

    starts_at: datetime
    real_start: float = field(default_factory=time.time)
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.starts_at.tzinfo is None or self.speed <= 0:
            raise ValueError("a scaled clock needs an aware start and a speed above 0")

    def now(self) -> datetime:
        elapsed = timedelta(seconds=(time.time() - self.real_start) * self.speed)
        return (self.starts_at + elapsed).astimezone(UTC)

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        await _wait_precisely(event, (until - self.now()).total_seconds() / self.speed)

    def monotonic(self) -> float:
        return steady_seconds() * self.speed

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        await _wait_precisely(event, duration.total_seconds() / self.speed)

    async def sleep(self, duration: timedelta) -> None:
        await anyio.sleep(max(duration.total_seconds() / self.speed, 0))


def in_real_time(clock: Clock, duration: timedelta) -> timedelta:
    """Return how long ``duration`` of real time is on ``clock``. A faster clock does not make networks faster."""
    return duration * clock.speed if isinstance(clock, ScaledClock) else duration


def later(instant: datetime, duration: timedelta) -> datetime:
    """Return the sum of an aware UTC instant and a duration, or the end of the calendar if the sum is outside.

    All code adds times with this function. A message that is due at the last microsecond of the year 9999 is a usual
    way to say *never*, and must not cause an error in a computation.
    """
    try:
        return instant + duration
    except OverflowError:
        return LATEST if duration > timedelta(0) else EARLIEST


def earliest_time_now(clock_time: datetime, read_at: float) -> datetime:
    """Return the earliest time that a clock can show now, from the time that it showed when it was read.

    Args:
        clock_time: time that the clock showed; aware, UTC.
        read_at: when the clock was read, in seconds of :func:`steady_seconds`; in any thread.
    """
    return later(clock_time, timedelta(seconds=steady_seconds() - read_at))


def time_until(deadline: float, seconds: float) -> timedelta:
    """Return how long it is from ``seconds`` of :meth:`Clock.monotonic` until ``deadline``; zero if it has passed.

    The result is rounded up, so that the deadline has passed after a wait of this length.
    """
    remaining = deadline - seconds
    return timedelta(microseconds=max(math.ceil(round(remaining * 1_000_000, 3)), 1)) if remaining > 0 else timedelta(0)


def check_clock(clock: Clock) -> Clock:
    """Return the clock of an endpoint if it has all methods of :class:`Clock`.

    Raises:
        ConfigurationError: methods are missing, as in a clock that was written for an earlier version.
    """
    methods = ("now", "wait", "monotonic", "wait_for", "sleep")
    missing = [f"{method}()" for method in methods if not callable(getattr(clock, method, None))]
    if missing:
        raise ConfigurationError(
            f"{type(clock).__name__} is not a clock: it has no {' and no '.join(missing)}; subclass SystemClock, or "
            f"define the missing methods (monotonic and wait_for measure durations; setting the clock must not "
            f"change them)"
        )
    return clock


def to_microseconds(instant: datetime) -> int:
    """Return microseconds since 1970-01-01 UTC of an aware instant; exact, no floating point."""
    since = instant - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds  # four times as fast as a division


def from_microseconds(microseconds: int) -> datetime:
    """Return the aware UTC instant so many microseconds after 1970-01-01 UTC; reverses :func:`to_microseconds`."""
    return _EPOCH + timedelta(microseconds=microseconds)


def nearest_instant(microseconds: int) -> datetime:
    """Return the instant so long after 1970 UTC, clamped to the calendar; for display and for sleeping."""
    return later(_EPOCH, timedelta(microseconds=microseconds))
