"""The other processes of a benchmark; the deployment comes as the first line on their standard input.

``python -m postdate.bench.partners WHAT …`` stores, delivers or handles, and prints one JSON object of figures:

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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from postdate.bench.deployment import Deployment, Ping, Workload
from postdate.bench.processes import SharedCount
from postdate.bench.result import lateness
from postdate.bench.system import peak_rss_mb
from postdate.clock import SystemClock
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.outgoing import HandlerContext
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import PostdateError
from postdate.messages import Envelope
from postdate.ports import Claim, ClaimingStore, MoveReport, MovingStore, TransactionMode, Transport, Work
from postdate.runtime.process import freeze_what_is_loaded

_AT_ONCE = 16
_OTHERS_NUMBERS = 1 << 40


async def fill(store: ClaimingStore, load: Workload, tally: SharedCount) -> Mapping[str, float]:
    clock = SystemClock()
    for batch in load.batches():
        tally.add((await store.store_many(batch, clock.now())).stored)
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


Storing = Callable[[ClaimingStore, Workload], Coroutine[Any, Any, Mapping[str, float]]]


async def store(deployment: Deployment, work: Storing) -> None:
    opened = deployment.open_store()
    await opened.initialize(deployment.names.endpoint, TransactionMode.RECEIVE_ONLY)
    print("ready", flush=True)
    line = await anyio.to_thread.run_sync(sys.stdin.readline)
    if line:  # else nobody is left to work for
        print(json.dumps(await work(opened, Workload.from_json(line))), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)  # until then, what the server did for us is counted
    await opened.close()


class Notes:
    """Notes deliveries, and holds the gate before the first look for due messages."""

    def __init__(self, tally: SharedCount) -> None:
        self.marks: list[tuple[float, int]] = []
        self.gate = anyio.Event()
        self._tally = tally

    def delivered(self, count: int) -> None:
        """Note the machine time at which ``count`` messages are durably in their queue."""
        if count:
            self.marks.append((time.time(), count))
            self._tally.add(count)


def watch(store: ClaimingStore, transport: Transport, notes: Notes) -> None:
    """Hold back claims until the gate opens, and note deliveries.

    Patches the two objects, not their classes, so that the endpoint sees their capabilities unchanged.
    """
    claim_due, send = store.claim_due, transport.send

    async def gated_claim_due(now: datetime, limit: int) -> Sequence[Claim]:
        await notes.gate.wait()
        return await claim_due(now, limit)

    async def noted_send(
        envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        errors = await send(envelopes, now, work=work)
        notes.delivered(sum(error is None for error in errors))
        return errors

    vars(store)["claim_due"] = gated_claim_due
    vars(transport)["send"] = noted_send
    if isinstance(store, MovingStore):
        move_due = store.move_due

        async def noted_move_due(now: datetime, limit: int, **options: Any) -> MoveReport:
            await notes.gate.wait()
            report = await move_due(now, limit, **options)
            notes.delivered(report.delivered)
            return report

        vars(store)["move_due"] = noted_move_due


async def deliver(deployment: Deployment, tally: SharedCount, lead: float, *, at_once: bool) -> None:
    stored: Mapping[str, float] = {}
    store, transport, notes = deployment.open_store(), deployment.open_transport(), Notes(tally)
    watch(store, transport, notes)
    endpoint = Endpoint(
        deployment.names.endpoint,
        transport=transport,
        delayed_delivery=DelayedDelivery(store),
        error_queue=deployment.names.error,
        send_only=True,
    )
    async with endpoint:
        if at_once:
            notes.gate.set()
        freeze_what_is_loaded()  # as `postdate run` does
        print("ready", flush=True)
        line = await anyio.to_thread.run_sync(sys.stdin.readline)
        used_before = time.process_time()
        notes.gate.set()
        if line.strip():
            stored = await paced(store, Workload.from_json(line), lead)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        used = time.process_time() - used_before
    await store.close()
    await transport.close()
    print(json.dumps({"marks": notes.marks, "rss_mb": peak_rss_mb(), "cpu_s": used, "stored": stored}), flush=True)


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
            return partial(store, work=partial(paced, lead=float(lead)))
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
