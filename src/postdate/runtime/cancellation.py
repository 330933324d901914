"""Questions about cancellation: whether the running task is being cancelled, and in which way.

A task is cancelled by a scope of anyio around it, or by asyncio's own ``Task.cancel()``. An application, or an adapter,
may use either. If neither is the case, a ``CancelledError`` says nothing about the task: something that the task
awaited was cancelled.
"""

from __future__ import annotations

import asyncio
import math

import anyio


def is_scope_cancelled() -> bool:
    """Return whether a scope of anyio around the caller is cancelled."""
    return anyio.current_effective_deadline() == -math.inf


def is_task_cancelled() -> bool:
    """Return whether ``Task.cancel()`` was called on this task, even if nothing has raised that yet."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_cancelled() -> bool:
    """Return whether this task is being cancelled, by a scope or by ``Task.cancel()``."""
    return is_scope_cancelled() or is_task_cancelled()


def undo_task_cancellation() -> None:
    """Undo every ``Task.cancel()`` of this task, so that the task can continue with other work."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
