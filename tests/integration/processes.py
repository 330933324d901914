"""What the processes of the integration tests run: ``python processes.py ROLE FILE [ARGUMENTS]``.

A role says ``ready`` on its standard output when it works, and ends at SIGTERM, finishing what is in hand.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import anyio

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    HandlerContext,
    LocalTransport,
    SqliteStore,
    SystemClock,
    TransactionMode,
)
from postdate.clock import from_microseconds, to_microseconds
from postdate.messages import format_timestamp, parse_timestamp


@dataclass
class Work:
    """What the consumer is asked to do."""

    number: int


@dataclass
class Done:
    """What it says when it did it: how late the message was."""

    number: int
    late_microseconds: int


class Opened:
    """Store and queues in one file, and an endpoint on them."""

    def __init__(self, path: str, name: str, *, send_only: bool) -> None:
        self.store = SqliteStore(path, synchronous="normal")
        self.transport = LocalTransport(path, synchronous="normal")
        self.endpoint = Endpoint(
            name,
            transport=self.transport,
            delayed_delivery=DelayedDelivery(self.store),
            transaction_mode=TransactionMode.TRANSACTION_SCOPE,
            send_only=send_only,
        )

    async def run_until_terminated(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self.close)
                await stack.enter_async_context(self.endpoint)
                say("ready")
                async for _ in signals:
                    return

    async def close(self) -> None:
        await self.store.close()
        await self.transport.close()


def wait_for(file: Path) -> None:
    """Block until another process has made the file."""
    while not file.exists():
        threading.Event().wait(0.005)


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def service(path: str) -> None:
    """Deliver delayed messages."""
    await Opened(path, "service", send_only=True).run_until_terminated()


async def consumer(path: str) -> None:
    """Handle messages; say in the queue ``done`` that each was."""
    opened = Opened(path, "consumer", send_only=False)

    @opened.endpoint.handler(Work, name="Work")
    async def handle(message: Work, context: HandlerContext) -> None:
        assert context.due is not None
        late = SystemClock().now() - context.due
        done = Done(message.number, late // timedelta(microseconds=1))
        await context.send(done, destination="done", message_id=f"done-{message.number}")

    await opened.run_until_terminated()


async def slow_consumer(path: str, go: str) -> None:
    """Handle one message, which takes until the file ``go`` is there."""
    opened = Opened(path, "consumer", send_only=False)

    @opened.endpoint.handler(Work, name="Work")
    async def handle(message: Work, context: HandlerContext) -> None:
        say("handling")
        await anyio.to_thread.run_sync(wait_for, Path(go))
        await context.send(Done(message.number, 0), destination="done")

    await opened.run_until_terminated()


async def holder(path: str) -> None:
    """Claim what is due and keep it."""
    store = SqliteStore(path, synchronous="normal")
    claims = await store.claim_due(SystemClock().now(), 1_000)
    say(f"ready {len(claims)}")
    await anyio.sleep_forever()


async def clocks(path: str) -> None:
    """Do with time everything that a local time zone could spoil, and print what came out."""
    store = SqliteStore(path, synchronous="normal")
    noon = parse_timestamp("2026-03-29 01:30:00:123456 Z")
    ambiguous = parse_timestamp("2026-04-04 14:45:00:000001 Z").astimezone()  # local, in whatever zone
    await store.store(DelayedMessage("noon", noon, "queue"), noon)
    await store.store(DelayedMessage("ambiguous", ambiguous, "queue"), noon)
    found = await store.claim_due(noon + timedelta(days=365), 10)
    history = await store.history("noon")
    await store.close()
    real = SystemClock().now()
    say(
        json.dumps(
            {
                "stored": [[claim.message.message_id, format_timestamp(claim.message.due)] for claim in found],
                "recorded": format_timestamp(history[0].at),
                "microseconds": to_microseconds(noon),
                "back": format_timestamp(from_microseconds(to_microseconds(ambiguous))),
                "local": format_timestamp(datetime.fromtimestamp(1_775_313_900).astimezone()),
                "now_is_aware_utc": str(real.utcoffset()),
                "now": real.timestamp(),
                "zone": os.environ["TZ"],
            }
        )
    )


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    role.__name__: role for role in (service, consumer, slow_consumer, holder, clocks)
}

if __name__ == "__main__":
    anyio.run(ROLES[sys.argv[1]], *sys.argv[2:])
