"""Whose cancellation it is that a handler lets out."""

from __future__ import annotations

import asyncio
import math

import anyio


def is_being_cancelled() -> bool:
    """Return whether it is this task that somebody cancels: through anyio, or by asyncio's own means."""
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # another event loop than asyncio's
        return False
    return task is not None and task.cancelling() > 0
