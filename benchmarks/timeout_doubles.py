"""How many timeouts arrive twice when several processes are the timeout manager of one endpoint, in a lower mode.

    eval "$(scripts/services env)"
    .venv/bin/python benchmarks/timeout_doubles.py [--n 2000] [--processes 3] [--apart 0] [--without-claims]
        [--storage postgres|mariadb|sqlite] [--rounds 3]

The storage is a server or a file, the queues are in RabbitMQ. Timeouts are stored that fall due at one instant, or
``--apart`` milliseconds after each other, while the processes run and wait. Printed are how many were stored, how many
of them arrived more than once, and how long after the last was due the last one arrived. ``--without-claims`` hides
from the timeout manager that timeouts can be claimed.
"""

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import anyio

from postdate import (
    Endpoint,
    MariaDbTimeouts,
    PostgresTimeouts,
    RabbitMqTransport,
    SqliteTimeouts,
    SystemClock,
    TimeoutManager,
)
from postdate.messages import Headers
from postdate.ports.timeouts import Timeout, TimeoutPersister

QUIET_SECONDS = 3.0
METHODS = ("initialize", "setup", "add", "peek", "try_remove", "remove_by_saga", "next_chunk", "close")


class WithoutClaims:
    """A storage with the methods of any, and no other."""

    def __init__(self, persister: TimeoutPersister) -> None:
        for name in METHODS:
            setattr(self, name, getattr(persister, name))


def opened(storage: str, name: str, folder: str) -> TimeoutPersister:
    prefix = f"{name}_"
    if storage == "postgres":
        return PostgresTimeouts(os.environ["POSTDATE_POSTGRES_URL"], table_prefix=prefix)
    if storage == "mariadb":
        return MariaDbTimeouts(os.environ["POSTDATE_MARIADB_URL"], table_prefix=prefix)
    return SqliteTimeouts(Path(folder) / "timeouts.db", table_prefix=prefix)


async def serve(options: argparse.Namespace) -> None:
    transport = RabbitMqTransport(os.environ["POSTDATE_RABBITMQ_URL"])
    persister = opened(options.storage, options.serve, options.folder)
    used = cast("TimeoutPersister", WithoutClaims(persister)) if options.without_claims else persister
    logging.disable(logging.ERROR)  # each copy is one
    async with Endpoint(options.serve, transport=transport, timeout_manager=TimeoutManager(used), send_only=True):
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
    await persister.close()
    await transport.close()


async def store(persister: TimeoutPersister, n: int, apart: timedelta, destination: str) -> list[Timeout]:
    first = SystemClock().now() + timedelta(seconds=2 + n / 500)
    found = [
        Timeout(str(uuid.uuid4()), first + number * apart, destination, headers={Headers.MESSAGE_ID: str(number)})
        for number in range(n)
    ]
    limit = anyio.CapacityLimiter(8)

    async def add(each: Timeout) -> None:
        async with limit:
            await persister.add(each)

    async with anyio.create_task_group() as tasks:
        for each in found:
            tasks.start_soon(add, each)
    late = SystemClock().now() - first
    assert late < timedelta(0), f"storing took {late} longer than there was time"
    return found


def started(command: list[str], n: int) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(n)]


async def one_round(options: argparse.Namespace, folder: str) -> dict[str, object]:
    name = f"doubles{uuid.uuid4().hex[:8]}"
    transport = RabbitMqTransport(os.environ["POSTDATE_RABBITMQ_URL"])
    persister = opened(options.storage, name, folder)
    await persister.initialize(name)
    await persister.setup()
    await transport.create_queues([name, f"{name}.Timeouts", f"{name}.TimeoutsDispatcher"])
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", name, "--folder", folder]
    processes = started(command, options.processes)
    receiver = transport.receiver(name)
    try:
        for each in processes:
            assert each.stdout is not None
            assert await anyio.to_thread.run_sync(each.stdout.readline) == b"ready\n"
        stored = await store(persister, options.n, timedelta(milliseconds=options.apart), name)
        last_due = stored[-1].due
        await anyio.sleep((last_due - SystemClock().now()).total_seconds())
        arrived: Counter[str] = Counter()
        last = last_due
        while True:
            with anyio.move_on_after(QUIET_SECONDS) as patience:
                for received in await receiver.receive(100):
                    arrived[received.envelope.headers[Headers.RELATED_TO_TIMEOUT_ID]] += 1
                    await receiver.commit(received, SystemClock().now())
                last = SystemClock().now()
            if patience.cancelled_caught:
                break
        assert arrived.keys() == {each.timeout_id for each in stored}, "something is missing"
        return {
            "stored": options.n,
            "more than once": sum(count > 1 for count in arrived.values()),
            "copies too many": arrived.total() - options.n,
            "seconds until the last": round((last - last_due).total_seconds(), 2),
        }
    finally:
        for each in processes:
            assert each.stdin is not None
            each.stdin.close()
        for each in processes:
            with suppress(subprocess.TimeoutExpired):
                each.wait(30)
        await receiver.close()
        await transport.close()
        await persister.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2_000)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--apart", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--storage", choices=["postgres", "mariadb", "sqlite"], default="postgres")
    parser.add_argument("--without-claims", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
        return
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            print(json.dumps(asyncio.run(one_round(options, folder))), flush=True)


if __name__ == "__main__":
    main()
