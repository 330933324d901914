"""How fast messages are stored in bulk."""

from __future__ import annotations

import time
from datetime import timedelta

import anyio

from postdate.bench.bench import Bench
from postdate.bench.plants import Plant
from postdate.bench.result import Result
from postdate.bench.workload import Load, load
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError
from postdate.ports import AdministrableStore, TransactionMode


def schedule(bench: Bench, n: int, batch: int) -> Result:
    """Store ``n`` messages in batches; the limit is bare rows in the same batches. Making messages is not counted."""
    with bench.plant() as plant:
        bench.report(f"limit: inserting {n:,} bare rows, {batch:,} at a time")
        limit = plant.store.insert_limit(n, batch)
        bench.report(f"storing {n:,} messages, {batch:,} at a time")
        messages = load(
            plant.site, range(n), SystemClock().now() + timedelta(hours=1), timedelta(milliseconds=1), batch
        )
        return anyio.run(_schedule, plant, messages, limit)


async def _schedule(plant: Plant, messages: Load, limit: float) -> Result:
    store, clock, seconds, used = plant.site.open_store(), SystemClock(), 0.0, 0.0
    try:
        await store.initialize(plant.site.endpoint, TransactionMode.RECEIVE_ONLY)
        if not isinstance(store, AdministrableStore):
            raise ConfigurationError("this store cannot count what it has")
        before = plant.cpu_seconds()
        for group in messages.batches():
            started, used_before = time.perf_counter(), time.process_time()
            await store.store_many(group, clock.now())
            seconds += time.perf_counter() - started
            used += time.process_time() - used_before
        after = plant.cpu_seconds()
        stored = (await store.statistics(clock.now())).pending
    finally:
        await store.close()
    server = None if before is None or after is None else after - before
    return Result(
        "schedule", messages.count, messages.count / seconds, limit, lost=messages.count - stored, duplicated=0,
        cpu_s=used, server_cpu_s=server, servers={plant.store.name: plant.store.facts()},
    )  # fmt: skip
