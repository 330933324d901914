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
from postdate.runtime.reporting import duration_text
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

LOGGED_DIFFERENCE: Final = timedelta(seconds=1)
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

    def shift_to(self, at: float) -> Bounds:
        elapsed = timedelta(seconds=at - self.at)
        drift = abs(elapsed) * _DRIFT
        return Bounds(at, later(self.earliest, elapsed - drift), later(self.latest, elapsed + drift))

    def intersect(self, newer: Bounds) -> Bounds:
        """Return the intersection of both, at the instant of ``newer``.

        If they exclude each other, one of the clocks was set; then return ``newer`` alone.
        """
        older = self.shift_to(newer.at)
        earliest, latest = max(older.earliest, newer.earliest), min(older.latest, newer.latest)
        return newer if latest < earliest else Bounds(newer.at, earliest, latest)


class FollowingClock:
    """A clock of this machine that is set by the clock of a store.

    It shows the earliest time that the measurements allow. So it is never ahead of the store's clock, and no message is
    sent early. It is late by at most half a round trip plus the drift between two measurements. A delay counts from
    :meth:`latest`: counted from the earliest time it would be too short by that difference.

    It runs on the seconds since the machine was started. So setting the machine's time does not change it, and time in
    which the machine was suspended counts. With ``is_authoritative`` the store's clock decides what is due. Without it,
    :meth:`now` shows the machine's time, and the difference is only reported.
    """

    def __init__(self, machine_clock: SystemClock, store: ClaimingStore, *, is_authoritative: bool = True) -> None:
        self._machine_clock, self._store, self._is_authoritative = machine_clock, store, is_authoritative
        self._deadlines = Deadlines.of_store(store, machine_clock, CALL_DEADLINE)
        # Of the store's time; `None` before the first measurement.
        self._bounds: Bounds | None = None
        # Set when a task begins to wait by this clock. From then on the clock is measured more often.
        self._wait_started = anyio.Event()
        self._shortest_round_trip = timedelta(0)
        # The difference that was logged last.
        self._logged_ahead: timedelta | None = None
        self._is_measured = False
        resource = resource_of(store)
        self._outage = resource.calls("cannot read the clock of the store", log, is_rare=True)
        self._report_calls = resource.calls(
            "cannot report by how much the clock of this machine differs", log, logging.WARNING, is_rare=True
        )

    def now(self) -> datetime:
        """Return the time of the store, UTC; that of the machine before the first measurement."""
        bounds = self._bounds
        return (
            self._machine_clock.now()
            if bounds is None or not self._is_authoritative
            else bounds.earliest_at(self._machine_clock.seconds_since_boot())
        )

    def latest(self) -> datetime:
        """Return the latest time that the store's clock may show, UTC; that of the machine where :meth:`now` does."""
        bounds = self._bounds
        return (
            self._machine_clock.now()
            if bounds is None or not self._is_authoritative
            else bounds.latest_at(self._machine_clock.seconds_since_boot())
        )

    @property
    def ahead(self) -> timedelta | None:
        """How far the store's clock is ahead of the machine's; ``None`` before the first measurement.

        It is measured also without ``is_authoritative``.
        """
        bounds = self._bounds
        return (
            None
            if bounds is None
            else bounds.earliest_at(self._machine_clock.seconds_since_boot()) - self._machine_clock.now()
        )

    async def wait(self, event: anyio.Event, until: datetime) -> None:
        self._wait_started.set()
        # Without this it could end too early.
        await self._machine_clock.wait_for(event, (until - self.now()) / (1 - _DRIFT))

    def monotonic(self) -> float:
        return self._machine_clock.monotonic()

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        self._wait_started.set()
        await self._machine_clock.wait_for(event, duration)

    async def sleep(self, duration: timedelta) -> None:
        await self._machine_clock.sleep(duration)

    # --- measuring ------------------------------------------------------------------------------------------------

    async def measure(self) -> None:
        """Read the store's clock, and report the difference of this machine's clock to it. Failures are logged."""
        if not await self._update_bounds(ROUND_TRIPS):
            return
        try:
            await self._report_difference()
        except PostdateError as error:  # a role may be allowed to read and deliver, and not to write this report
            self._report_calls.report_failure(error, self._machine_clock.monotonic())
        else:
            self._report_calls.report_success(self._machine_clock.monotonic())

    async def read(self, round_trips: int = ROUND_TRIPS) -> None:
        """Read the store's clock in a few round trips; the quickest one gives the closest bounds."""
        self._shortest_round_trip = timedelta.max
        for _ in range(round_trips):
            measured = await self._deadlines.call_in_task(self._query_bounds)
            self._bounds = measured if self._bounds is None else self._bounds.intersect(measured)

    async def _update_bounds(self, round_trips: int) -> bool:
        try:
            await self.read(round_trips)
        except PostdateError as error:
            self._is_measured = False
            self._outage.report_failure(error, self._machine_clock.monotonic())
        else:
            self._is_measured = True
            self._outage.report_success(self._machine_clock.monotonic())
        return self._is_measured

    async def _query_bounds(self) -> Bounds:
        asked_at = self._machine_clock.seconds_since_boot()
        server_time = await self._store.server_now()
        answered_at = self._machine_clock.seconds_since_boot()
        round_trip = timedelta(seconds=answered_at - asked_at)
        self._shortest_round_trip = min(self._shortest_round_trip, round_trip)
        return Bounds(answered_at, server_time, later(server_time, round_trip))

    async def _report_difference(self) -> None:
        assert self._bounds is not None
        ahead = self._machine_clock.now() - self._bounds.earliest_at(self._machine_clock.seconds_since_boot())
        self._log_difference(ahead)
        await self._deadlines.call_in_task(partial(self._store.report_clock, ahead))

    def _log_difference(self, ahead: timedelta) -> None:
        """Log a difference once, and again when it has changed by more than a tenth and a second."""
        if self._logged_ahead is None:
            if abs(ahead) > LOGGED_DIFFERENCE:
                self._log_warning(ahead)
        elif abs(ahead) <= LOGGED_DIFFERENCE:
            self._logged_ahead = None
            log.info("the clock of this machine, %s, agrees with that of the store again", platform.node())
        elif abs(ahead - self._logged_ahead) > max(LOGGED_DIFFERENCE, abs(self._logged_ahead) / 10):
            self._log_warning(ahead)

    def _log_warning(self, ahead: timedelta) -> None:
        self._logged_ahead = ahead
        side = "ahead of" if ahead > timedelta(0) else "behind"
        deciding_clock = (
            "the store's" if self._is_authoritative else "the machine's: delayed_delivery.use_store_clock is off"
        )
        log.warning(
            "the clock of this machine, %s (process %d), is %s %s that of the store; due times are judged by %s; set "
            "it right by NTP",
            platform.node(),
            os.getpid(),
            duration_text(abs(ahead).total_seconds()),
            side,
            deciding_clock,
        )

    async def follow(self) -> None:
        """Measure repeatedly until cancelled, more often while a task waits by this clock."""
        measure_at = self._machine_clock.monotonic() + MEASURED_EVERY.total_seconds()
        while True:
            self._wait_started = anyio.Event()
            pause = time_until(measure_at, self._machine_clock.monotonic()) if self._is_measured else TRIED_AGAIN_AFTER
            await self._machine_clock.wait_for(self._wait_started if self._is_measured else anyio.Event(), pause)
            if self._is_measured and self._wait_started.is_set():
                pause = time_until(measure_at, self._machine_clock.monotonic())
                # A measurement helps only if a round trip is shorter than the drift until the next regular one.
                is_useful = self._is_authoritative and self._shortest_round_trip < MEASURED_EVERY * _DRIFT
                await self._machine_clock.wait_for(anyio.Event(), MEASURED_IN_USE_EVERY if is_useful else pause)
            if not self._is_measured or self._machine_clock.monotonic() >= measure_at:
                await self.measure()
                measure_at = self._machine_clock.monotonic() + MEASURED_EVERY.total_seconds()
            else:
                await self._update_bounds(ROUND_TRIPS_IN_USE)


def latest_time(clock: Clock) -> datetime:
    """Return the latest time that a clock may show, UTC. A delay counts from it, so that it is never too short."""
    return clock.latest() if isinstance(clock, FollowingClock) else clock.now()


def clock_of_store(clock: Clock, store: object, *, is_authoritative: bool = True) -> FollowingClock | None:
    """Return a clock that follows the store's clock.

    ``None`` if the store has no clock, or if ``clock`` belongs to a test or a simulation.
    """
    if isinstance(clock, SystemClock) and isinstance(store, ClaimingStore) and store.capabilities.has_clock:
        return FollowingClock(clock, store, is_authoritative=is_authoritative)
    return None
