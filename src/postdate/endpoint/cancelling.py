"""Whose cancellation it is that a handler lets out."""

from __future__ import annotations

import asyncio
import math

import anyio


def is_being_cancelled() -> bool:
    """Return whether it is this task that somebody cancels: through anyio, or by asyncio's own means."""
    return anyio.current_effective_deadline() == -math.inf or cancelled_task() is not None


def cancelled_task() -> asyncio.Task[object] | None:
    """Return this task if it was cancelled by asyncio's own means, also where nothing has raised that yet."""
    task = asyncio.current_task()
    return task if task is not None and task.cancelling() else None
