"""Tells whose cancellation a handler lets out."""

from __future__ import annotations

import asyncio
import math

import anyio

from postdate.endpoint.endings import POLICY_FAILURES
from postdate.ports import Received


def is_being_cancelled() -> bool:
    """Return whether this task is being cancelled: through anyio, or by asyncio's own means."""
    return anyio.current_effective_deadline() == -math.inf or cancelled_task() is not None


def cancelled_task() -> asyncio.Task[object] | None:
    """Return this task if it was cancelled by asyncio's own means, also where nothing has raised that yet."""
    task = asyncio.current_task()
    return task if task is not None and task.cancelling() else None


def cancels_itself(received: Received) -> bool:
    """Return whether a handler cancels its own task however often its message comes, which is a failure.

    Only from the eleventh time on: before, it may be the program that cancels all its tasks, by asyncio's own means.
    """
    if received.failures < POLICY_FAILURES or anyio.current_effective_deadline() == -math.inf:
        return False
    while (task := cancelled_task()) is not None:  # it has other messages to handle
        task.uncancel()
    return True
