"""A process that stores for ``benchmarks/churn.py``; the deployment comes as the first line on its standard input.

``python -m benchmarks.closed_loop WINDOW STORED TAKEN`` stores batch after batch, due at once, never more than
``WINDOW`` messages ahead of what is taken off the queue; both are tallies.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from benchmarks.deployment import Deployment, Workload
from benchmarks.partners import store as storing
from benchmarks.shared_count import SharedCount
from postdate.clock import SystemClock, to_microseconds
from postdate.ports import ClaimingStore

_LOOKS_AGAIN_SECONDS = 0.0005


async def closed(
    store: ClaimingStore, load: Workload, window: int, stored: SharedCount, taken: SharedCount
) -> Mapping[str, float]:
    """Store batch after batch, due at once, never more than ``window`` messages ahead of what is taken."""
    clock = SystemClock()
    for first in range(load.start, load.start + load.count, load.batch):
        count = min(load.batch, load.start + load.count - first)
        while stored.value + count - taken.value > window:  # noqa: ASYNC110 - the count is another process'
            await anyio.sleep(_LOOKS_AGAIN_SECONDS)
        now = clock.now()
        part = replace(load, start=first, count=count, first_due=to_microseconds(now), spacing=0.0)
        for batch in part.batches():
            await store.store_many(batch, now)
        stored.add(count)
    return {}


if __name__ == "__main__":
    stored, taken = (SharedCount(Path(path)) for path in sys.argv[2:])
    work = partial(closed, window=int(sys.argv[1]), stored=stored, taken=taken)
    anyio.run(storing, Deployment.from_json(sys.stdin.readline()), work)
