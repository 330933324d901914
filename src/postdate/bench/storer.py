"""A process that stores beside a benchmark; the deployment comes as the first line on its standard input.

``python -m postdate.bench.storer WHAT …`` says ``ready``, begins when it gets a load, prints its figures, and stays
connected until its standard input ends:

- ``fill TALLY``: stores the load in bulk.
- ``paced LEAD``: stores each message of the load ``LEAD`` seconds before it is due, one commit each.
- ``flat-out SECONDS``: single commits, one after the other; prints their rate and durations.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from postdate.bench.deployment import Deployment
from postdate.bench.result import lateness
from postdate.bench.tally import SharedCount
from postdate.bench.workload import Workload
from postdate.clock import SystemClock
from postdate.ports import ClaimingStore, TransactionMode

_AT_ONCE = 16
_OTHERS_NUMBERS = 1 << 40


async def fill(store: ClaimingStore, load: Workload, tally: SharedCount) -> Mapping[str, float]:
    clock = SystemClock()
    for batch in load.batches():
        report = await store.store_many(batch, clock.now())
        tally.add(report.stored)
    return {}


async def paced(store: ClaimingStore, load: Workload, lead: float) -> Mapping[str, float]:
    """Store each message ``lead`` seconds before it is due, one commit each, several at the same time.

    ``stored_when_due`` counts messages that were already due when stored: their lateness is unknown.
    """
    clock, too_late, limiter = SystemClock(), [0], anyio.CapacityLimiter(_AT_ONCE)

    async def store_one(number: int) -> None:
        async with limiter:
            message = load.message(number)
            await store.store(message, clock.now())
            too_late[0] += clock.now() >= message.due

    async with anyio.create_task_group() as tasks:
        for number, due in enumerate(load.dues(), load.start):
            await anyio.sleep(max(due - lead - time.time(), 0))
            tasks.start_soon(store_one, number)
    return {"stored_when_due": too_late[0]}


async def flat_out(store: ClaimingStore, load: Workload, seconds: float) -> Mapping[str, float]:
    """Store messages due in an hour, one commit each; return rate and percentiles of the store time."""
    clock, durations = SystemClock(), list[float]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        now = clock.now()
        message = replace(load.message(_OTHERS_NUMBERS + len(durations)), due=now + timedelta(hours=1))
        started = time.perf_counter()
        await store.store(message, now)
        durations.append(time.perf_counter() - started)
    found = lateness(durations)
    return {"stores_per_s": len(durations) / seconds, "store_p50_ms": found.p50_ms, "store_p99_ms": found.p99_ms,
            "store_max_ms": found.max_ms}  # fmt: skip


Work = Callable[[ClaimingStore, Workload], Coroutine[Any, Any, Mapping[str, float]]]


async def main(deployment: Deployment, work: Work) -> None:
    store = deployment.open_store()
    await store.initialize(deployment.endpoint, TransactionMode.RECEIVE_ONLY)
    print("ready", flush=True)
    line = await anyio.to_thread.run_sync(sys.stdin.readline)
    if line:  # else nobody is left to work for
        print(json.dumps(await work(store, Workload.from_json(line))), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)  # until then, what the server did for us is counted
    await store.close()


def chosen(what: str, *rest: str) -> Work:
    match what, rest:
        case "fill", (tally,):
            counted = SharedCount(Path(tally))
            return lambda store, load: fill(store, load, counted)
        case "paced", (lead,):
            return lambda store, load: paced(store, load, float(lead))
        case "flat-out", (seconds,):
            return lambda store, load: flat_out(store, load, float(seconds))
        case _:
            raise ValueError(f"no such work: {what} {rest}")


if __name__ == "__main__":
    anyio.run(main, Deployment.from_json(sys.stdin.readline()), chosen(*sys.argv[1:]))
