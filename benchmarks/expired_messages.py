"""How large a file is whose messages expire in their queue, and how long it takes until it is small again.

    .venv/bin/python benchmarks/expired_messages.py [--n 200000] [--bytes 1000]

Messages with a short time to be received are sent into the file; nobody receives. Printed are the sizes of the file
(database and log) before, full, when the last message has left it, and when the room was given back, and how long each
took. Meanwhile a sender sends messages that live, one a commit: how long it waits, compared with the seconds before
anything was in the file, is what the housekeeping costs others.
"""

import argparse
import json
import os
import sqlite3
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import anyio

from postdate import Envelope, LocalTransport, SystemClock

QUEUE = "orders"
BATCH = 1_000
LOOK_SECONDS = 0.05
PAUSE_SECONDS = 0.02
QUIET_SECONDS = 5.0


def size(path: Path) -> int:
    """Return the bytes of the database and its log."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*") if each.is_file())


async def fill(transport: LocalTransport, n: int, body: bytes, lives: timedelta) -> None:
    clock = SystemClock()
    for first in range(0, n, BATCH):
        ids = range(first, min(first + BATCH, n))
        batch = [Envelope(QUEUE, f"m-{number}", {}, body, time_to_be_received=lives) for number in ids]
        await transport.send(batch, clock.now())


async def send_others(transport: LocalTransport, waits: list[float]) -> None:
    """Send messages of another queue, one after the other, until cancelled; note how long each took."""
    clock = SystemClock()
    while True:
        started = time.perf_counter()
        await transport.send([Envelope("others", f"o-{len(waits)}", {}, b"lives")], clock.now())
        waits.append(time.perf_counter() - started)
        await anyio.sleep(PAUSE_SECONDS)


def holds_any(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM queue_message WHERE queue_id = 1 LIMIT 1").fetchone() is not None


async def until_empty(transport: LocalTransport) -> None:
    while await transport.file.read(holds_any):  # noqa: ASYNC110 - nothing tells
        await anyio.sleep(LOOK_SECONDS)


async def until_given_back(transport: LocalTransport) -> None:
    """Return when less than a quarter of the file is free, or so little that it is left."""

    def is_large(connection: sqlite3.Connection) -> bool:
        (free,), (pages,) = (
            connection.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_count")
        )
        return free > max(pages // 4, 2_048)

    while await transport.file.read(is_large):  # noqa: ASYNC110 - nothing tells
        await anyio.sleep(LOOK_SECONDS)
    await anyio.sleep(1)  # the round that gave back ends with a checkpoint


def shown_waits(waits: list[float]) -> dict[str, float]:
    in_ms = [wait * 1_000 for wait in waits]
    found = {"median": statistics.median(in_ms), "p99": statistics.quantiles(in_ms, n=100)[98], "longest": max(in_ms)}
    return {"sends": len(waits), **{name: round(value, 1) for name, value in found.items()}}


async def measure(path: Path, n: int, body: bytes) -> dict[str, object]:
    """Fill, wait, and return what was seen."""
    transport = LocalTransport(path)
    await transport.create_queues([QUEUE, "others"])
    found: dict[str, object] = {"n": n, "body_bytes": len(body), "before": size(path)}
    quiet = list[float]()
    with anyio.move_on_after(QUIET_SECONDS):
        await send_others(transport, quiet)
    found["others_waited_before_ms"] = shown_waits(quiet)
    lives = timedelta(seconds=20)
    started = time.monotonic()
    await fill(transport, n, body, lives)
    found["fill_s"] = round(time.monotonic() - started, 1)
    found["full"] = size(path)
    # The last batch ends when all have: from here on nothing but the housekeeping works.
    await anyio.sleep(max(lives.total_seconds() - (time.monotonic() - started), 0))
    waits, started = list[float](), time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_others, transport, waits)
        await until_empty(transport)
        found["left_after_s"] = round(time.monotonic() - started, 1)
        found["left"] = size(path)
        await until_given_back(transport)
        found["given_back_after_s"] = round(time.monotonic() - started, 1)
        found["given_back"] = size(path)
        tasks.cancel_scope.cancel()
    found["others_waited_ms"] = shown_waits(waits)
    await transport.close()
    found["closed"] = size(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--bytes", type=int, default=1_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "queues.db"
        found = anyio.run(measure, path, given.n, os.urandom(given.bytes))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
