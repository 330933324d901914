"""Waiting, in real time, for what others do, which tells the test nothing. Nothing else in the tests waits for time."""

import inspect
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio

from postdate import SystemClock
from postdate.core.due.poller import LONGEST_SLEEP
from postdate.ports import Claim, ClaimingStore, Received, Receiver

PATIENCE_SECONDS = 300.0
"""Only a test that fails waits so long: no test depends on how fast a machine is, or on what else it does."""

READY = "postdate.service: ready\n"
"""The last line that a service logs as it starts: by then it has written all others, and hears of what is stored."""


def patience() -> AbstractContextManager[object]:
    """Fail what is waited for inside after a while: events, and messages."""
    return anyio.fail_after(PATIENCE_SECONDS)


class Eventually:
    """Waits for what another process or thread does, in a test that has a thread for itself."""

    def __call__(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Return as soon as ``condition`` holds; fail after ``seconds``."""
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            pause.wait(0.002)


def freeze_processes(*pids: int) -> None:
    """Stop processes, and return when none of their threads runs any more: one of them must meet the signal first."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        Eventually()(lambda pid=pid: _stands_still(pid), f"process {pid} is stopped")


def _stands_still(pid: int) -> bool:
    states = set[str]()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.add(thread.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return states <= {"T", "t", "Z", "X"}


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]],
    *,
    despite: type[Exception] | tuple[type[Exception], ...] = (),
) -> Any:
    """Return what ``condition`` gives as soon as that is true; fail after a while. For a test in an event loop.

    Args:
        condition: a function, asynchronous or not.
        despite: errors after which it is asked again.
    """
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            try:
                found: Any = condition()
                if inspect.isawaitable(found):
                    found = await found
            except despite:
                found = None
            if found:
                return found
            await anyio.sleep(0.01)


async def received(receiver: Receiver, count: int) -> list[Received]:
    """Receive until so many messages have come, or more."""
    found = list[Received]()
    while len(found) < count:
        found += await until(lambda: receiver.receive(100))
    return found


async def claimed(store: ClaimingStore, count: int, at: datetime) -> list[Claim]:
    """Claim what is due at an instant until there were so many messages, or more, which others may have held."""
    found = list[Claim]()

    async def there_are_enough() -> bool:
        found.extend(await store.claim_due(at, 100))
        return len(found) >= count

    await until(there_are_enough)
    return found


class UntilWoken(SystemClock):
    """The clock of a service whose poller never ends its longest sleep by itself: what it finds, a wake-up told it of.

    Args:
        ahead: of the clock of the machine.

    Attributes:
        sleeps: how often the poller has begun its longest sleep.
    """

    def __init__(self, ahead: timedelta = timedelta(0)) -> None:
        self.ahead, self.sleeps = ahead, 0

    def now(self) -> datetime:
        """Return the machine's time, moved."""
        return super().now() + self.ahead

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        """Wait as in real time; for the longest sleep, wait for the event alone."""
        if duration != LONGEST_SLEEP:
            await super().wait_for(event, duration)
            return
        self.sleeps += 1
        await event.wait()

    async def sleeps_again(self, before: int = 0) -> None:
        """Return once the poller sleeps that had begun ``before`` sleeps."""
        await until(lambda: self.sleeps > before)
