"""The barest waiting: how late a loop is that only sleeps until each due time."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from postdate.bench.result import Lateness, lateness


def due_times(rate: int, seconds: float, ahead: float = 0.1) -> list[float]:
    """Return ``rate`` instants a second for ``seconds``, from ``ahead`` seconds after now on, in seconds since 1970."""
    first = time.time() + ahead
    return [first + number / rate for number in range(int(rate * seconds))]


def sleep_floor(rate: int, seconds: float) -> Lateness:
    """Return how late a bare loop is that only sleeps until each due time: of a thread, the best the system can do."""
    late: list[float] = []
    for due in due_times(rate, seconds):
        time.sleep(max(due - time.time(), 0))
        late.append(time.time() - due)
    return lateness(late)


async def event_loop_floor(rate: int, seconds: float) -> Lateness:
    """Return the same of an event loop, which is what an asynchronous service is made of."""
    late: list[float] = []
    for due in due_times(rate, seconds):
        await anyio.sleep(max(due - time.time(), 0))
        late.append(time.time() - due)
    return lateness(late)


def moving_floor(dues: list[float], move: Callable[[float], int]) -> Lateness:
    """Return how late a bare loop is that sleeps until the next due time, moves what is due, and sleeps again.

    Args:
        dues: of the rows, ascending, in seconds since 1970.
        move: moves everything due before an instant, durably, and says how many.
    """
    late: list[float] = []
    while len(late) < len(dues):
        time.sleep(max(dues[len(late)] - time.time(), 0))
        moved = move(time.time())
        at = time.time()
        late += [at - due for due in dues[len(late) : len(late) + moved]]
    return lateness(late)
