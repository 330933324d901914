"""PgQueuer in the place of an endpoint, for ``handle_peers.py``; runs on a Python that has ``pgqueuer[asyncpg]``.

``pgqueuer_peer.py fill N`` installs its tables in the database of PEER_URL and enqueues N jobs, 1,000 a statement;
``pgqueuer_peer.py handle N BATCH_SIZE`` handles them, and prints what it found as JSON: the time ends when the last job
was handled and the table of jobs is empty.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import models, qm, queries, types
from pgqueuer.db import AsyncpgDriver

LOOK_SECONDS = 0.002


async def fill(connection: asyncpg.Connection, n: int) -> None:
    """Make the tables, and the jobs."""
    store = queries.Queries(AsyncpgDriver(connection))
    await store.install()
    text = "z" * 170
    for first in range(0, n, 1_000):
        bodies = [
            json.dumps({"number": number, "text": text}).encode() for number in range(first, min(first + 1_000, n))
        ]
        await store.enqueue(["ping"] * len(bodies), bodies, [0] * len(bodies))


async def handle(connection: asyncpg.Connection, n: int, batch_size: int) -> None:
    """Handle all jobs with a handler that only counts; print what was found."""
    manager, times, handled = qm.QueueManager(queries.Queries(AsyncpgDriver(connection))), [0] * n, 0
    watcher = await asyncpg.connect(os.environ["PEER_URL"])

    @manager.entrypoint("ping")
    async def ping(job: models.Job) -> None:
        nonlocal handled
        times[json.loads(job.payload)["number"]] += 1
        handled += 1

    async def until_empty() -> float:
        while handled < n or await watcher.fetchval("SELECT 1 FROM pgqueuer LIMIT 1"):  # noqa: ASYNC110 - the server knows
            await asyncio.sleep(LOOK_SECONDS)
        return time.perf_counter()

    started, used = time.perf_counter(), time.process_time()
    running = asyncio.create_task(
        manager.run(dequeue_timeout=timedelta(seconds=1), batch_size=batch_size, mode=types.QueueExecutionMode.drain)
    )
    seconds = await asyncio.wait_for(until_empty(), 300) - started
    used = time.process_time() - used
    await running
    await watcher.close()
    lost = times.count(0)
    found = {"rate": n / seconds, "lost": lost, "duplicated": n - lost - times.count(1), "cpu_s": used}
    print(json.dumps(found))


async def main(what: str, *numbers: str) -> None:
    """Do what the arguments say."""
    work: Callable[..., Awaitable[None]] = {"fill": fill, "handle": handle}[what]
    connection = await asyncpg.connect(os.environ["PEER_URL"])
    try:
        await work(connection, *map(int, numbers))
    finally:
        await connection.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
