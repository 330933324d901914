"""What the processes of the integration tests run: ``python processes.py ROLE PLACE [ARGUMENTS]``.

A place is a file, or ``postgresql://…#schema``, where the store has the table ``service.timeouts``: store and queues in
one. ``FILE amqp://…`` is a store in a file, of the service alone, and queues in RabbitMQ. Any other address is opened
as the command line opens it.

A role says ``ready`` on its standard output when it works, and ends at SIGTERM, finishing what is in hand.
"""

import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote

import anyio

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Envelope,
    HandlerContext,
    LocalTransport,
    Recoverability,
    SqliteStore,
    SystemClock,
    TransactionMode,
)
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.errors import ClaimLost
from postdate.ports import ClaimingStore, Completion, Outcome, Transport
from postdate.wiring import open_store, open_transport


@dataclass
class Work:
    """What the consumer is asked to do."""

    number: int


@dataclass
class Done:
    """What it says when it did it: how late the message was, and under which id it came."""

    number: int
    late_microseconds: int
    came_as: str = ""


def store_in(place: str) -> ClaimingStore:
    if "://" in place and "#" not in place:
        return open_store(place, table="service.timeouts")
    url, _, schema = place.partition("#")
    if schema:
        return PostgresStore(url, schema=unquote(schema), table="service.timeouts")
    return SqliteStore(place, synchronous="normal")


def queues_in(place: str) -> Transport:
    if "://" in place and "#" not in place:
        return open_transport(place)
    url, _, schema = place.partition("#")
    if schema:
        return PostgresTransport(url, schema=unquote(schema))
    return LocalTransport(place, synchronous="normal")


class Opened:
    """Store and queues, and an endpoint on them; a consumer delivers too where both are in one database."""

    def __init__(self, place: str, name: str, *, send_only: bool, recoverability: Recoverability | None = None) -> None:
        storing, _, queueing = place.partition(" ")
        self.store, self.transport = store_in(storing), queues_in(queueing or storing)
        # A broker that is back between a failed attempt and its error copy would get the copy.
        retries = 5 if queueing else 0
        self.endpoint = Endpoint(
            name,
            transport=self.transport,
            delayed_delivery=DelayedDelivery(self.store, retries) if send_only or not queueing else None,
            transaction_mode=TransactionMode.RECEIVE_ONLY if queueing else TransactionMode.TRANSACTION_SCOPE,
            send_only=send_only,
            recoverability=recoverability,
        )

    async def run_until_terminated(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self.close)
                await stack.enter_async_context(self.endpoint)
                say("ready")
                async for _ in signals:
                    say("ending")
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
        done = Done(message.number, late // timedelta(microseconds=1), context.message_id)
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


async def fragile_consumer(path: str) -> None:
    """Handle messages; one with a number below zero kills the process, as a lack of memory does."""
    opened = Opened(path, "consumer", send_only=False, recoverability=Recoverability(delayed_retries=0))

    @opened.endpoint.handler(Work, name="Work")
    async def handle(message: Work, context: HandlerContext) -> None:
        if message.number < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        await context.send(Done(message.number, 0), destination="done", message_id=f"done-{message.number}")

    await opened.run_until_terminated()


async def holder(path: str) -> None:
    """Claim what is due and keep it."""
    store = store_in(path)
    claims = await store.claim_due(SystemClock().now(), 1_000)
    say(f"ready {len(claims)}")
    await anyio.sleep_forever()


async def zombie(path: str, seconds: str, go: str) -> None:
    """Hold what is due and what is in a queue; once the file ``go`` is there, end all of it and say what came of it."""
    store = SqliteStore(path, synchronous="normal", holds_at_most=timedelta(seconds=float(seconds)))
    transport = LocalTransport(path, synchronous="normal")
    now = SystemClock().now()
    claims, receiver = await store.claim_due(now, 10_000), transport.receiver("done")
    received = await receiver.receive(10_000)
    say(f"ready {len(claims)} {len(received)}")
    await anyio.to_thread.run_sync(wait_for, Path(go))
    finished = await store.finish(claims[::2], Outcome.DELIVERED, now)
    retried = [await store.retry_later(claim, now, now, "") for claim in claims[1::2]]
    released = await store.release(claims, None)
    lost = 0
    for each in received:
        try:
            await receiver.commit(each, now, Completion(outgoing=[Envelope("sent", f"by-{each.envelope.message_id}")]))
        except ClaimLost:
            lost += 1
    await store.store(DelayedMessage("afterwards", now, "done"), now)
    claims = await store.claim_due(SystemClock().now(), 10_000)
    afterwards = [claim for claim in claims if claim.message.message_id == "afterwards"]
    again = await store.finish(afterwards, Outcome.DELIVERED, now)
    say(f"ended {finished} {sum(retried)} {released} {lost} {again}")
    await receiver.close()
    await store.close()
    await transport.close()


async def storer(path: str, first: str, count: str) -> None:
    """Store messages for the queue ``done``, each due a tenth of a second later; wait that long between them."""
    store = store_in(path)
    say("ready")
    for number in range(int(first), int(first) + int(count)):
        now = SystemClock().now()
        await store.store(DelayedMessage(f"m-{number}", now + timedelta(milliseconds=100), "done"), now)
        await anyio.sleep(0.1)  # noqa: TID251 - paces what it stores
    await store.close()


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    role.__name__: role for role in (service, consumer, slow_consumer, fragile_consumer, holder, zombie, storer)
}

if __name__ == "__main__":
    anyio.run(ROLES[sys.argv[1]], *sys.argv[2:])
