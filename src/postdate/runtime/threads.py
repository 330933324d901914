"""Threads for blocking calls, apart from the event loop's common ones: the application may hold all of those."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_AT_ONCE = 32
_LIMITER: RunVar[anyio.CapacityLimiter] = RunVar("postdate.runtime.threads")


def our_threads() -> anyio.CapacityLimiter:
    try:
        return _LIMITER.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_AT_ONCE)
        _LIMITER.set(limiter)
        return limiter


async def in_thread(function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Call a blocking function in one of our threads; a cancelled caller waits for its end."""
    return await to_thread.run_sync(function, *arguments, limiter=our_threads())
