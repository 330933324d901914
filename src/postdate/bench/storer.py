"""A process that stores beside a benchmark: ``python -m postdate.bench.storer FILE SYNCHRONOUS WHAT …``.

``flat-out SECONDS``: single commits, one after the other; prints their rate and durations.
``paced RATE SECONDS LEAD``: so many a second, each due ``LEAD`` seconds later; prints the due times.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.to_thread

from postdate.bench.result import lateness
from postdate.bench.workload import message
from postdate.clock import SystemClock
from postdate.ports import TransactionMode
from postdate.stores.sqlite import SqliteStore


async def flat_out(store: SqliteStore, seconds: float) -> dict[str, float]:
    """Store messages due in an hour, one commit each, and return rate and percentiles of the store time."""
    clock, durations = SystemClock(), list[float]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        now = clock.now()
        await store.store(message(now + timedelta(hours=1)), now)
        durations.append(time.perf_counter() - started)
    found = lateness(durations)
    return {"stores_per_s": len(durations) / seconds, "store_p50_ms": found.p50_ms, "store_p99_ms": found.p99_ms,
            "store_max_ms": found.max_ms}  # fmt: skip


async def paced(store: SqliteStore, rate: int, seconds: float, lead: float) -> list[float]:
    """Store ``rate`` messages a second and return their due times in order, in seconds since 1970.

    The distance from storing to being due is no multiple of the distance between messages, so that storing and
    delivering do not meet each time.
    """
    clock, dues = SystemClock(), list[float]()
    first = time.time() + 0.2  # the schedule of the benchmark
    for number in range(int(rate * seconds)):
        due = datetime.fromtimestamp(first + (number + 0.37) / rate + lead, UTC)
        await anyio.sleep(max(first + number / rate - time.time(), 0))
        await store.store(message(due), clock.now())
        dues.append(due.timestamp())
    return dues


async def main(path: Path, synchronous: str, what: str, *numbers: str) -> None:
    """Open the store, say ``ready``, wait for a line, do the work, print what was found."""
    store = SqliteStore(path, synchronous=synchronous)
    await store.initialize("bench", TransactionMode.RECEIVE_ONLY)
    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    if what == "flat-out":
        found: object = await flat_out(store, float(numbers[0]))
    else:
        found = await paced(store, int(numbers[0]), float(numbers[1]), float(numbers[2]))
    print(json.dumps(found), flush=True)
    await store.close()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2], sys.argv[3], *sys.argv[4:])
