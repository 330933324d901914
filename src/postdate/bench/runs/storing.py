"""The rate at which messages are stored in bulk."""

from __future__ import annotations

import time
from datetime import timedelta

import anyio

from postdate.bench.bench import Bench
from postdate.bench.limits import insert_limit
from postdate.bench.result import BenchmarkResult
from postdate.bench.targets import Targets
from postdate.bench.workload import Workload, load
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError
from postdate.ports import AdministrableStore, TransactionMode


def schedule(bench: Bench, n: int, batch: int) -> BenchmarkResult:
    """Store ``n`` messages in batches; the limit is bare rows in the same batches. Making messages is not counted."""
    with bench.targets() as targets:
        bench.report(f"limit: inserting {n:,} bare rows, {batch:,} at a time")
        limit = insert_limit(targets, n, batch)
        bench.report(f"storing {n:,} messages, {batch:,} at a time")
        messages = load(
            targets.deployment, range(n), SystemClock().now() + timedelta(hours=1), timedelta(milliseconds=1), batch
        )
        return anyio.run(_schedule, targets, messages, limit)


async def _schedule(targets: Targets, messages: Workload, limit: float | None) -> BenchmarkResult:
    store, clock, seconds, used = targets.deployment.open_store(), SystemClock(), 0.0, 0.0
    try:
        await store.initialize(targets.deployment.endpoint, TransactionMode.RECEIVE_ONLY)
        if not isinstance(store, AdministrableStore):
            raise ConfigurationError("this store cannot count what it has")
        before = targets.cpu_seconds()
        for group in messages.batches():
            started, used_before = time.perf_counter(), time.process_time()
            await store.store_many(group, clock.now())
            seconds += time.perf_counter() - started
            used += time.process_time() - used_before
        after = targets.cpu_seconds()
        stored = (await store.statistics(clock.now())).pending
    finally:
        await store.close()
    server = None if before is None or after is None else after - before
    return BenchmarkResult(
        "schedule", messages.count, messages.count / seconds, limit, lost=messages.count - stored, duplicated=0,
        cpu_s=used, server_cpu_s=server, servers={targets.store.name: targets.store.facts},
    )  # fmt: skip
