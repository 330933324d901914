"""Limits of queues, as an operator changes them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from datetime import datetime

from postdate.core.limits import Limits, change_limits, has_limits, limiting_store
from postdate.errors import QueueNotFound
from postdate.messages import DESTINATION_LIMIT, check_text
from postdate.operations.needs import has_queue, read_queue_lengths
from postdate.wiring import OpenDeployment


async def change_destination(
    deployment: OpenDeployment,
    queue: str,
    change: Callable[[Limits], Limits],
    now: datetime,
    *,
    must_exist: bool = True,
) -> tuple[Limits, bool | None]:
    """Change the limits of a queue. Return the limits, and whether the queue exists (``None``: that cannot be known).

    Limits of a queue that does not exist can always be lifted.

    Raises:
        InvalidMessage: the name is not valid for a queue.
        QueueNotFound: the queue does not exist and has no limits, and ``must_exist`` is true. The error names queues
            with a similar name.
        NotSupported: the store keeps no limits.
    """
    check_text(queue, "destination", DESTINATION_LIMIT)
    store, queue_exists = limiting_store(deployment.store), await has_queue(deployment, queue)
    if must_exist and queue_exists is False and not await has_limits(store, queue):
        queue_lengths = await read_queue_lengths(deployment, []) or {}
        similar = difflib.get_close_matches(queue, queue_lengths)
        hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else "."
        raise QueueNotFound(f"there is no queue {queue!r}{hint}")
    return await change_limits(store, queue, change, now), queue_exists
