"""Closing adapters at the end: nobody waits for one that never answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from postdate.clock import SystemClock
from postdate.core.guard import Guard
from postdate.errors import StoreUnreachable

log = logging.getLogger("postdate.wiring")

CLOSES_WITHIN: Final = timedelta(seconds=10)
"""For each adapter. What it holds is free as soon as the process has ended, closed or not."""

_guards: Final[list[Guard]] = []


async def close(name: str, closing: Callable[[], Awaitable[None]]) -> None:
    """Close an adapter; one that takes too long is left behind, and that is logged.

    Args:
        name: of it, for the log.
        closing: its method.
    """
    guard = Guard.of_store(closing, SystemClock(), CLOSES_WITHIN)
    _guards.append(guard)
    try:
        await guard.call(closing)
    except StoreUnreachable as error:
        log.warning("%s was not closed: %s", name, error if not guard.left_behind else "it does not answer")


def anything_is_left() -> bool:
    """Return whether this process has left calls behind: an ordinary end of it would wait for their threads."""
    return any(guard.left_behind for guard in _guards)
