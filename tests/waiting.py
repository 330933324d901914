"""Waiting, in real time, for what others do, which tells the test nothing. Nothing else in the tests waits for time."""

import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio

PATIENCE_SECONDS = 90.0

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
