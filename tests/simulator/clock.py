"""The clock of one process: wall time that may be wrong and is set, and seconds that go on."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import anyio
import anyio.lowlevel
from typing_extensions import override

from postdate.clock import SystemClock, later
from postdate.testing.clock import START


class ProcessClock(SystemClock):
    """The machine's clock of a process, on the time of the event loop.

    Args:
        ahead: how far its wall time is ahead of the true time; negative: behind.
    """

    def __init__(self, ahead: timedelta = timedelta(0)) -> None:
        self.ahead = ahead

    @override
    def now(self) -> datetime:
        """Return what the wall clock of this process shows, UTC."""
        return true_now() + self.ahead

    @override
    def monotonic(self) -> float:
        """Return the seconds of the loop."""
        return asyncio.get_running_loop().time()

    @override
    def seconds_since_boot(self) -> float:
        """Return the same: no machine is suspended here."""
        return self.monotonic()

    @override
    async def wait(self, event: anyio.Event, until: datetime) -> None:
        await self.wait_for(event, until - self.now())

    @override
    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        if event.is_set() or duration <= timedelta(0):
            await anyio.lowlevel.checkpoint()
            return
        with anyio.move_on_after(duration.total_seconds()):
            await event.wait()

    @override
    async def sleep(self, duration: timedelta) -> None:
        """Sleep for ``duration``."""
        await anyio.sleep(max(duration.total_seconds(), 0))


def true_now() -> datetime:
    """Return the time that every clock would show if it were right, UTC."""
    return at_second(asyncio.get_running_loop().time())


def at_second(second: float) -> datetime:
    """Return the true time, UTC, so many seconds after the beginning."""
    return later(START, timedelta(seconds=second))
