"""Calls that were given up and do not end: held here, or they would be garbage-collected. Source: ADR 0019."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from postdate.core.recoverability import text_of

log = logging.getLogger("postdate.adapters")

_tasks = set[asyncio.Task[Any]]()


def leave_behind(task: asyncio.Task[Any]) -> None:
    """Let a task go on by itself; should it fail at last, that is logged."""
    _tasks.add(task)
    task.add_done_callback(_ended)


def left_behind() -> int:
    """Return how many such calls of this process have not ended: its ordinary end would wait for their threads."""
    return len(_tasks)


def _ended(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.warning("a call that nobody waited for any more failed: %s", text_of(error))
