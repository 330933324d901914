"""A clock that follows the clock of a store, so that all services judge due times by one clock. Source: ADR 0048."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import anyio

from postdate.clock import Clock, SystemClock, later, time_until
from postdate.core.health.deadlines import Deadlines
from postdate.errors import PostdateError
from postdate.ports import ClaimingStore
from postdate.runtime.reporting import shown_duration
from postdate.runtime.resource import resource_of

log = logging.getLogger("postdate.clock")

MEASURED_EVERY: Final = timedelta(seconds=30)
MEASURED_IN_USE_EVERY: Final = timedelta(seconds=1)
"""The interval while the clock is in use and the store answers quickly.

In half a minute two clocks may drift 3 ms apart, and this clock would be late by that.
"""

TRIED_AGAIN_AFTER: Final = timedelta(seconds=1)
"""The pause after a failed measurement. It is short, as a clock that may be wrong is in use until the next one."""

ROUND_TRIPS: Final = 5
ROUND_TRIPS_IN_USE: Final = 3
CALL_DEADLINE: Final = timedelta(seconds=10)
"""The deadline of each round trip."""

WORTH_SAYING: Final = timedelta(seconds=1)
"""A difference above this is logged with the name of the machine. A clock that NTP adjusts never differs so much."""

_DRIFT: Final = 100e-6
"""Seconds by which two clocks may drift apart in a second. Older bounds are widened by it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a server's time, UTC, at one instant.

    ``at`` is that instant, in seconds since this machine was started, including time in which it was suspended.
    """

    at: float
    earliest: datetime
    latest: datetime

    def earliest_at(self, at: float) -> datetime:
        """Return the earliest time that the server can show at a later instant."""
        return later(self.earliest, timedelta(seconds=(at - self.at) * (1 - _DRIFT)))

    def latest_at(self, at: float) -> datetime:
        """Return the latest time that the server can show at a later instant."""
        return later(self.latest, timedelta(seconds=(at - self.at) * (1 + _DRIFT)))

    def moved_to(self, at: float) -> Bounds:
        passed = timedelta(seconds=at - self.at)
        apart = abs(passed) * _DRIFT
        return Bounds(at, later(self.earliest, passed - apart), later(self.latest, passed + apart))

    def narrowed_by(self, newer: Bounds) -> Bounds:
        """Return the intersection of both, at the instant of ``newer``.

        If they exclude each other, one of the clocks was set; then return ``newer`` alone.
        """
        older = self.moved_to(newer.at)
        earliest, latest = max(older.earliest, newer.earliest), min(older.latest, newer.latest)
        return newer if latest < earliest else Bounds(newer.at, earliest, latest)


class FollowingClock:
    """A clock of this machine that is set by the clock of a store.

    It shows the earliest time that the measurements allow. So it is never ahead of the store's clock, and no message is
    sent early. It is late by at most half a round trip plus the drift between two measurements. A delay counts from
    :meth:`latest`: counted from the earliest time it would be too short by that difference.

    It runs on the seconds since the machine was started. So setting the machine's time does not change it, and time in
    which the machine was suspended counts. Without ``judges``, :meth:`now` shows the machine's time, and the difference
    is only reported.
    """

    def __init__(self, own: SystemClock, store: ClaimingStore, *, judges: bool = True) -> None:
        self._own, self._store, self._judges = own, store, judges
        self._deadlines = Deadlines.of_store(store, own, CALL_DEADLINE)
        self._bounds: Bounds | None = None
        self._used, self._took = anyio.Event(), timedelta(0)
        self._reported_ahead: timedelta | None = None
        self._measured = False
        resource = resource_of(store)
        self._outage = resource.calls("cannot read the clock of the store", log, is_rare=True)
        self._untold = resource.calls(
            "cannot tell others how far the clock of this machine is off", log, logging.WARNING, is_rare=True
        )

    def now(self) -> datetime:
        """Return the time of the store, UTC; that of the machine before the first measurement."""
        bounds = self._bounds
        return self._own.now() if bounds is None or not self._judges else bounds.earliest_at(self._own.since_boot())

    def latest(self) -> datetime:
        """Return the latest time that the store's clock may show, UTC; that of the machine where :meth:`now` does."""
        bounds = self._bounds
        return self._own.now() if bounds is None or not self._judges else bounds.latest_at(self._own.since_boot())

    @property
    def ahead(self) -> timedelta | None:
        """How far the store's clock is ahead of the machine's; ``None`` before the first measurement.

        It is measured also without ``judges``.
        """
        bounds = self._bounds
        return None if bounds is None else bounds.earliest_at(self._own.since_boot()) - self._own.now()

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        self._used.set()
        await self._own.wait_for(event, (until - self.now()) / (1 - _DRIFT))  # without this it could end too early

    def monotonic(self) -> float:
        return self._own.monotonic()

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        self._used.set()
        await self._own.wait_for(event, duration)

    async def sleep(self, duration: timedelta) -> None:
        await self._own.sleep(duration)

    # --- measuring ------------------------------------------------------------------------------------------------

    async def measure(self) -> None:
        """Read the store's clock, and report the difference of this machine's clock to it. Failures are logged."""
        if not await self._try_to_read(ROUND_TRIPS):
            return
        try:
            await self._tell()
        except PostdateError as error:  # a role may be allowed to read and deliver, and not to write this report
            self._untold.failed(error, self._own.monotonic())
        else:
            self._untold.succeeded(self._own.monotonic())

    async def read(self, round_trips: int = ROUND_TRIPS) -> None:
        """Read the store's clock in a few round trips; the quickest one gives the closest bounds."""
        self._took = timedelta.max
        for _ in range(round_trips):
            measured = await self._deadlines.call_apart(self._ask)
            self._bounds = measured if self._bounds is None else self._bounds.narrowed_by(measured)

    async def _try_to_read(self, round_trips: int) -> bool:
        try:
            await self.read(round_trips)
        except PostdateError as error:
            self._measured = False
            self._outage.failed(error, self._own.monotonic())
        else:
            self._measured = True
            self._outage.succeeded(self._own.monotonic())
        return self._measured

    async def _ask(self) -> Bounds:
        before = self._own.since_boot()
        shown = await self._store.server_now()
        after = self._own.since_boot()
        took = timedelta(seconds=after - before)
        self._took = min(self._took, took)
        return Bounds(after, shown, later(shown, took))

    async def _tell(self) -> None:
        assert self._bounds is not None
        ahead = self._own.now() - self._bounds.earliest_at(self._own.since_boot())
        self._say(ahead)
        await self._deadlines.call_apart(partial(self._store.report_clock, ahead))

    def _say(self, ahead: timedelta) -> None:
        """Log a difference once, and again when it has changed by more than a tenth and a second."""
        if self._reported_ahead is None:
            if abs(ahead) > WORTH_SAYING:
                self._warn(ahead)
        elif abs(ahead) <= WORTH_SAYING:
            self._reported_ahead = None
            log.info("the clock of this machine, %s, agrees with that of the store again", platform.node())
        elif abs(ahead - self._reported_ahead) > max(WORTH_SAYING, abs(self._reported_ahead) / 10):
            self._warn(ahead)

    def _warn(self, ahead: timedelta) -> None:
        self._reported_ahead = ahead
        side = "ahead of" if ahead > timedelta(0) else "behind"
        judged = "the store's" if self._judges else "the machine's: delayed_delivery.use_store_clock is off"
        log.warning(
            "the clock of this machine, %s (process %d), is %s %s that of the store; due times are judged by %s; set "
            "it right by NTP",
            platform.node(),
            os.getpid(),
            shown_duration(abs(ahead).total_seconds()),
            side,
            judged,
        )

    async def follow(self) -> None:
        """Measure repeatedly until cancelled, more often while a task waits by this clock."""
        measure_at = self._own.monotonic() + MEASURED_EVERY.total_seconds()
        while True:
            self._used = anyio.Event()
            in_time = time_until(measure_at, self._own.monotonic()) if self._measured else TRIED_AGAIN_AFTER
            await self._own.wait_for(self._used if self._measured else anyio.Event(), in_time)
            if self._measured and self._used.is_set():
                in_time = time_until(measure_at, self._own.monotonic())
                # A measurement helps only if a round trip is shorter than the drift until the next regular one.
                gains = self._judges and self._took < MEASURED_EVERY * _DRIFT
                await self._own.wait_for(anyio.Event(), MEASURED_IN_USE_EVERY if gains else in_time)
            if not self._measured or self._own.monotonic() >= measure_at:
                await self.measure()
                measure_at = self._own.monotonic() + MEASURED_EVERY.total_seconds()
            else:
                await self._try_to_read(ROUND_TRIPS_IN_USE)


def latest_time(clock: Clock) -> datetime:
    """Return the latest time that a clock may show, UTC. A delay counts from it, so that it is never too short."""
    return clock.latest() if isinstance(clock, FollowingClock) else clock.now()


def clock_of_store(clock: Clock, store: object, *, judges: bool = True) -> FollowingClock | None:
    """Return a clock that follows the store's clock.

    ``None`` if the store has no clock, or if ``clock`` belongs to a test or a simulation.
    """
    if isinstance(clock, SystemClock) and isinstance(store, ClaimingStore) and store.capabilities.has_clock:
        return FollowingClock(clock, store, judges=judges)
    return None
