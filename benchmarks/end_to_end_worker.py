"""The processes of :mod:`benchmarks.end_to_end`: an application that stores, and an endpoint that handles."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from benchmarks.shared_count import SharedCount
from postdate import Endpoint, HandlerContext, Recoverability, Saga, started_by
from postdate.messages import DelayedMessage, Headers
from postdate.wiring import open_store, open_transport

QUEUE = "consumer"
_STORED_AT_ONCE = 2_000


class Work(msgspec.Struct):
    """A message."""

    number: int


class Counted(msgspec.Struct):
    """State of a saga."""

    number: int = -1


def handlers() -> dict[str, Callable[[Endpoint, Callable[[int, HandlerContext], None]], None]]:
    """Return what is registered, by its name."""

    def empty(endpoint: Endpoint, note: Callable[[int, HandlerContext], None]) -> None:
        @endpoint.handler(Work, name="Work")
        async def handle(message: Work, context: HandlerContext) -> None:
            note(message.number, context)

    def sends(endpoint: Endpoint, note: Callable[[int, HandlerContext], None]) -> None:
        @endpoint.handler(Work, name="Work")
        async def handle(message: Work, context: HandlerContext) -> None:
            await context.send(message, destination="done")
            note(message.number, context)

    def waits(endpoint: Endpoint, note: Callable[[int, HandlerContext], None]) -> None:
        @endpoint.handler(Work, name="Work")
        async def handle(message: Work, context: HandlerContext) -> None:
            await asyncio.sleep(0.01)
            note(message.number, context)

    def fails(endpoint: Endpoint, note: Callable[[int, HandlerContext], None]) -> None:
        failed = set[int]()

        @endpoint.handler(Work, name="Work")
        async def handle(message: Work, context: HandlerContext) -> None:
            if message.number % 10 == 0 and message.number not in failed:
                failed.add(message.number)
                raise ValueError("every tenth fails once")
            note(message.number, context)

    def saga(endpoint: Endpoint, note: Callable[[int, HandlerContext], None]) -> None:
        class Counting(Saga[Counted], correlated_by="number"):
            @started_by(Work)
            async def begin(self, message: Work, context: Any) -> None:
                note(message.number, context)

        endpoint.route(Work, QUEUE, name="Work")
        endpoint.saga(Counting)

    return {"empty": empty, "sends": sends, "waits": waits, "fails": fails, "saga": saga, "outbox": empty}


HANDLERS = handlers()


async def store(job: dict[str, Any]) -> None:
    """Store the messages, as an application does that has many, when a line comes."""
    place = open_store(job["store"])
    await place.initialize("postdate", next(iter(place.capabilities.transaction_modes)))
    await place.setup()
    begins, rate = datetime.fromtimestamp(job["due"], UTC), job["rate"]
    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    for first in range(0, job["n"], _STORED_AT_ONCE):
        batch = [
            DelayedMessage(
                f"m-{number:08d}",
                begins + timedelta(seconds=number / rate if rate else 0),
                QUEUE,
                {Headers.ENCLOSED_MESSAGE_TYPES: "Work", Headers.CONTENT_TYPE: "application/json"},
                b'{"number":%d}' % number,
            )
            for number in range(first, min(first + _STORED_AT_ONCE, job["n"]))
        ]
        await place.store_many(batch, datetime.now(UTC))
    await place.close()


async def handle(job: dict[str, Any]) -> None:
    """Run the endpoint until a line comes."""
    n = job["n"]
    times, late = [0] * n, [0.0] * n
    more = {"concurrency": job["concurrency"]} if job["concurrency"] else {}
    transport = open_transport(job["queues"] or job["store"])
    if job["handler"] in {"saga", "outbox"}:
        database = _database(job["store"])
        if job["handler"] == "outbox":
            more |= {"outbox": True, "transaction_mode": "receive_only"}
        endpoint = Endpoint(QUEUE, database, recoverability=Recoverability(), **more)
    else:
        endpoint = Endpoint(QUEUE, transport=transport, recoverability=Recoverability(), **more)
    with SharedCount(Path(job["tally"])) as tally:

        def note(number: int, context: HandlerContext) -> None:
            times[number] += 1
            if context.due is not None:
                late[number] = time.time() - context.due.timestamp()
            tally.add(1)

        HANDLERS[job["handler"]](endpoint, note)
        await transport.create_queues(["done"])
        async with endpoint:
            print("ready", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.readline)
    await transport.close()
    late.sort()
    found = {
        "p50": late[n // 2] * 1e3,
        "p99": late[n * 99 // 100] * 1e3,
        "max": late[-1] * 1e3,
        "lost": times.count(0),
        "doubled": n - times.count(0) - times.count(1),
        "early": sum(each < 0 for each in late),
    }
    print(json.dumps(found), flush=True)


def _database(address: str) -> Any:
    from postdate import Postgres, Sqlite

    return Sqlite(address.removeprefix("sqlite:///")) if address.startswith("sqlite") else Postgres(address)


if __name__ == "__main__":
    anyio.run({"store": store, "handle": handle}[sys.argv[1]], json.loads(sys.argv[2]))
