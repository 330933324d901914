"""The other processes of a benchmark; the deployment comes as the first line on their standard input.

``python -m benchmarks.partners WHAT …`` stores, delivers or handles, and prints one JSON object of figures:

- ``fill TALLY``: stores in bulk. Who stores says ``ready``, begins when it gets a load, prints its figures, and stays
  connected until its standard input ends.
- ``paced LEAD``: stores each message of the load ``LEAD`` seconds before it is due, one commit each.
- ``flat-out SECONDS``: single commits, one after the other; prints their rate and durations.
- ``deliver TALLY LEAD [now]``: an ordinary send-only endpoint that also notes when each batch was in its queue. It says
  ``ready`` once started, looks for due messages from the second line on (with ``now``: at once), and stops at the next.
  If the second line is a load, it also stores each of its messages, ``LEAD`` seconds before it is due.
- ``handle TALLY N CONCURRENCY``: an ordinary endpoint whose handler only notes which messages it saw. It says ``ready``
  before it has an endpoint, starts one at the second line, and stops it at the next.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from typing_extensions import override

from benchmarks.deployment import Deployment, Ping, Workload, from_json
from benchmarks.result import lateness
from benchmarks.shared_count import SharedCount
from benchmarks.system import peak_rss_mb
from postdate.cli.bench.messages import Deliveries, instrument_adapters, store_paced
from postdate.clock import SystemClock
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.handler_context import HandlerContext
from postdate.endpoint.settings import DelayedDelivery
from postdate.ports import ClaimingStore, TransactionMode
from postdate.runtime.process import freeze_loaded_objects

_AT_ONCE = 16
_OTHERS_NUMBERS = 1 << 40


async def fill(store: ClaimingStore, load: Workload, tally: SharedCount) -> Mapping[str, float]:
    clock = SystemClock()
    for batch in load.batches():
        tally.add((await store.store_many(batch, clock.now())).stored)
    return {}


async def stored_ahead(store: ClaimingStore, load: Workload, lead: float) -> Mapping[str, float]:
    """Store each message ``lead`` seconds before it is due; ``stored_when_due`` counts those stored too late."""
    return {"stored_when_due": await store_paced(store, load.messages(), lead)}


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


Storing = Callable[[ClaimingStore, Workload], Coroutine[Any, Any, Mapping[str, float]]]


async def store(deployment: Deployment, work: Storing) -> None:
    opened = deployment.open_store()
    await opened.initialize(deployment.names.endpoint, TransactionMode.RECEIVE_ONLY)
    print("ready", flush=True)
    line = await anyio.to_thread.run_sync(sys.stdin.readline)
    if line:  # else nobody is left to work for
        print(json.dumps(await work(opened, from_json(line))), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)  # until then, what the server did for us is counted
    await opened.close()


class TalliedDeliveries(Deliveries):
    """Deliveries that other processes can count."""

    def __init__(self, tally: SharedCount) -> None:
        super().__init__()
        self._tally = tally

    @override
    def add_deliveries(self, count: int) -> None:
        super().add_deliveries(count)
        self._tally.add(count)


async def deliver(deployment: Deployment, tally: SharedCount, lead: float, *, at_once: bool) -> None:
    stored: Mapping[str, float] = {}
    store, transport = deployment.open_store(), deployment.open_transport()
    deliveries = TalliedDeliveries(tally)
    instrument_adapters(store, transport, deliveries)
    endpoint = Endpoint(
        deployment.names.endpoint,
        transport=transport,
        delayed_delivery=DelayedDelivery(store),
        error_queue=deployment.names.error,
        send_only=True,
    )
    async with endpoint:
        if at_once:
            deliveries.gate.set()
        freeze_loaded_objects()  # as `postdate run` does
        print("ready", flush=True)
        line = await anyio.to_thread.run_sync(sys.stdin.readline)
        used_before = time.process_time()
        deliveries.gate.set()
        if line.strip():
            stored = await stored_ahead(store, from_json(line), lead)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        used = time.process_time() - used_before
    await store.close()
    await transport.close()
    print(json.dumps({"marks": deliveries.marks, "rss_mb": peak_rss_mb(), "cpu_s": used, "stored": stored}), flush=True)


async def handle(deployment: Deployment, tally: SharedCount, n: int, concurrency: int) -> None:
    transport, times = deployment.open_transport(), [0] * n
    endpoint = Endpoint(
        deployment.names.endpoint, transport=transport, error_queue=deployment.names.error, concurrency=concurrency
    )

    @endpoint.handler(Ping)
    async def note(message: Ping, _context: HandlerContext) -> None:
        times[message.number] += 1
        tally.add(1)

    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    started, used_before = time.time(), time.process_time()
    async with endpoint:
        running = time.time()
        await anyio.to_thread.run_sync(sys.stdin.readline)
        used = time.process_time() - used_before
    await transport.close()
    found = {
        "started": started,
        "start_s": running - started,
        "lost": times.count(0),
        "duplicated": n - times.count(0) - times.count(1),
        "rss_mb": peak_rss_mb(),
        "cpu_s": used,
    }
    print(json.dumps(found), flush=True)


def chosen(what: str, *rest: str) -> Callable[[Deployment], Coroutine[Any, Any, None]]:
    match what, rest:
        case "fill", (tally,):
            return partial(store, work=partial(fill, tally=SharedCount(Path(tally))))
        case "paced", (lead,):
            return partial(store, work=partial(stored_ahead, lead=float(lead)))
        case "flat-out", (seconds,):
            return partial(store, work=partial(flat_out, seconds=float(seconds)))
        case "deliver", (tally, lead, *now):
            return partial(deliver, tally=SharedCount(Path(tally)), lead=float(lead), at_once=now == ["now"])
        case "handle", (tally, n, concurrency):
            return partial(handle, tally=SharedCount(Path(tally)), n=int(n), concurrency=int(concurrency))
        case _:
            raise ValueError(f"no such work: {what} {rest}")


if __name__ == "__main__":
    anyio.run(chosen(*sys.argv[1:]), Deployment.from_json(sys.stdin.readline()))
