"""The only code that reads wall time. Everywhere else ``now`` is an argument (house-style.md, "Time")."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol, runtime_checkable

import anyio

from postdate.threads import in_thread

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@runtime_checkable
class Clock(Protocol):
    """Tells the time and waits for it. Every instant is aware and in UTC."""

    def now(self) -> datetime:
        """Return the present instant, aware, in UTC, to the microsecond."""
        ...

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        """Return when ``event`` is set or ``until`` has come, whichever is first.

        May return a little before ``until`` if the clock was set while waiting: callers look at ``now`` again.
        """
        ...

    async def sleep(self, duration: timedelta) -> None:
        """Sleep for ``duration`` on this clock."""
        ...


_TIMER_SLACK_SECONDS = 0.0015
"""Event loops round their timers up to a millisecond; the last stretch of a wait is slept by a thread instead."""


async def _wait_precisely(event: anyio.Event, seconds: float) -> None:
    """Wait for ``event`` or ``seconds``, to about a tenth of a millisecond; deaf to ``event`` in the last stretch."""
    if seconds > _TIMER_SLACK_SECONDS:
        started = time.monotonic()
        with anyio.move_on_after(seconds - _TIMER_SLACK_SECONDS):
            await event.wait()
            return
        seconds -= time.monotonic() - started
    if seconds > 0 and not event.is_set():
        await in_thread(time.sleep, seconds)


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the machine's UTC time."""
        return datetime.now(UTC)

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        """Wait on the machine's clock; see :meth:`Clock.wait`."""
        await _wait_precisely(event, (until - self.now()).total_seconds())

    async def sleep(self, duration: timedelta) -> None:
        """Sleep in real time."""
        await anyio.sleep(max(duration.total_seconds(), 0))


@dataclass(frozen=True, slots=True)
class ScaledClock:
    """A clock that runs ``speed`` times as fast as the machine's, from a common start.

    Processes that are given the same three values agree on the time, so a service and a consumer can
    live through one day together in a minute.

    Args:
        starts_at: what this clock shows at ``real_start``; aware.
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
        """Return the scaled time in UTC."""
        elapsed = timedelta(seconds=(time.time() - self.real_start) * self.speed)
        return (self.starts_at + elapsed).astimezone(UTC)

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        """Wait on the scaled clock; see :meth:`Clock.wait`."""
        await _wait_precisely(event, (until - self.now()).total_seconds() / self.speed)

    async def sleep(self, duration: timedelta) -> None:
        """Sleep for ``duration`` of scaled time."""
        await anyio.sleep(max(duration.total_seconds() / self.speed, 0))


def in_real_time(clock: Clock, duration: timedelta) -> timedelta:
    """Return how long ``duration`` of real time is on ``clock``: networks do not hurry because a clock runs faster."""
    return duration * clock.speed if isinstance(clock, ScaledClock) else duration


def to_microseconds(instant: datetime) -> int:
    """Return microseconds since 1970-01-01 UTC of an aware instant; exact, no floating point."""
    since = instant - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds  # four times as quick as dividing


def from_microseconds(microseconds: int) -> datetime:
    """Return the aware UTC instant that :func:`to_microseconds` was given."""
    return _EPOCH + timedelta(microseconds=microseconds)
