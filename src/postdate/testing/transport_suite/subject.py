"""The subject through which the suite opens the transport under test, and the envelopes that the suite sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import anyio
import anyio.lowlevel

from postdate.messages import Envelope
from postdate.ports import MovingStore, OutboxStore, Received, Receiver, SagaStore, Transport
from postdate.ports.timeouts import TimeoutPersister
from postdate.testing.conformance import expect_in_time
from postdate.testing.damaged import DamagingSubject, Rows, rows_of

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
IN, OUT = "conformance.in", "conformance.out"
LARGEST_MESSAGE = 16 * 1024 * 1024

Adapter = TypeVar("Adapter", bound=OutboxStore | Receiver | SagaStore | TimeoutPersister | Transport)


class TransportSubject(DamagingSubject, ABC):
    """How the suite opens the transport under test. Make a new subject, on empty storage, for every check."""

    @abstractmethod
    def open(self, *, largest_message_bytes: int = LARGEST_MESSAGE) -> Transport:
        """Return a transport object on the queues. After it was closed, the next call opens the same queues again."""

    def open_elsewhere(self) -> Transport:
        """Return a transport object such as another process would have. Only called for durable transports."""
        raise NotImplementedError(f"{type(self).__name__} must define open_elsewhere(): its transport is durable")

    def store(self) -> MovingStore:
        """Return a store in the same database. Only called for transports that name a database."""
        raise NotImplementedError(f"{type(self).__name__} must define store(): its transport names a database")

    async def pass_time(self, span: timedelta) -> None:
        """Return when ``span`` has passed by the clock of the queues; override this where tests can set that clock."""
        await anyio.sleep(span.total_seconds())


@asynccontextmanager
async def closing(adapter: Adapter) -> AsyncGenerator[Adapter]:
    """Close an adapter at the end of the block."""
    try:
        yield adapter
    finally:
        await adapter.close()


@asynccontextmanager
async def open_queues(subject: TransportSubject, **settings: int) -> AsyncGenerator[Transport]:
    """Open a transport with two queues, and close it at the end."""
    async with closing(subject.open(**settings)) as transport:
        await transport.create_queues([IN, OUT])
        yield transport


def receiver_of(transport: Transport, queue: str = IN) -> AbstractAsyncContextManager[Receiver]:
    """Return a receiver of a queue as a context; at its end, messages that are not acknowledged return to the queue."""
    return closing(transport.receiver(queue))


@asynccontextmanager
async def open_receiver(subject: TransportSubject, **settings: int) -> AsyncGenerator[tuple[Transport, Receiver]]:
    """Open a transport, and a receiver of :data:`IN`."""
    async with open_queues(subject, **settings) as transport, receiver_of(transport) as receiver:
        yield transport, receiver


@asynccontextmanager
async def open_with_rows(subject: TransportSubject) -> AsyncGenerator[tuple[Transport, Rows] | None]:
    """Open a transport that marks unreadable rows."""
    async with open_queues(subject) as transport:
        rows = rows_of(transport, subject.damages())
        yield rows and (transport, rows)


def envelope(
    message_id: str = "e-1",
    destination: str = IN,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"body",
    expires_at: datetime | None = None,
    due: datetime | None = None,
) -> Envelope:
    return Envelope(destination, message_id, headers or {"kind": "check"}, body, expires_at, due)


async def receive(receiver: Receiver, limit: int = 100) -> Sequence[Received]:
    """Receive messages that are in the queue, or must arrive there in time."""
    with expect_in_time("receiving a message"):
        return await receiver.receive(limit)
    return ()


async def receive_one(receiver: Receiver) -> Received:
    return (await receive(receiver, 1))[0]


async def receive_and_commit_one(transport: Transport) -> Envelope:
    """Receive one message of :data:`IN`, acknowledge it, and return it."""
    async with receiver_of(transport) as receiver:
        received = await receive_one(receiver)
        await receiver.commit(received, NOW)
    return received.envelope


async def receive_all(receiver: Receiver, count: int) -> list[Received]:
    """Receive ``count`` messages, however many come at a time."""
    messages: list[Received] = []
    while len(messages) < count:
        messages += await receive(receiver, count - len(messages))
    return messages


async def ids_in(transport: Transport, queue: str, count: int) -> list[str]:
    """Return the ids of the next ``count`` messages of a queue. They return to the queue.

    Fails when there are fewer messages.
    """
    message_ids: list[str] = []
    async with receiver_of(transport, queue) as receiver:
        while len(message_ids) < count:
            message_ids += ids(await receive(receiver))
    return message_ids


async def is_empty(transport: Transport, queue: str) -> bool:
    """Return whether a queue is empty: then a message that is sent now is the first to be received."""
    await transport.send([envelope("probe", queue)], NOW)
    async with receiver_of(transport, queue) as receiver:
        received = await receive(receiver)
        await receiver.commit(received[0], NOW)
    return ids(received) == ["probe"]


def ids(received: Sequence[Received]) -> list[str]:
    return [each.envelope.message_id for each in received]


async def run_other_tasks() -> None:
    """Let other tasks run until they wait for something."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()
