"""Closes adapters at the end, without waiting for one that never answers."""

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
"""For each adapter. Its claims are free once the process has ended, closed or not."""


async def close(name: str, closing: Callable[[], Awaitable[None]]) -> None:
    """Close an adapter; one that takes too long is abandoned, which is logged."""
    guard = Guard.of_store(getattr(closing, "__self__", closing), SystemClock(), CLOSES_WITHIN)
    try:
        await guard.call(closing)
    except StoreUnreachable as error:
        log.warning("%s was not closed: %s", name, error)
