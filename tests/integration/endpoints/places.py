"""Queues, store and outbox as users put them together, one pair a transport, and queues of a test's own."""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
from tests.rabbitmq_subjects import channel_of
from tests.waiting import patience, until

from postdate import (
    DelayedDelivery,
    Endpoint,
    Envelope,
    HandlerContext,
    LocalTransport,
    PostgresOutbox,
    PostgresSagaStore,
    PostgresStore,
    PostgresTimeouts,
    PostgresTransport,
    RabbitMqTransport,
    SqliteOutbox,
    SqliteSagaStore,
    SqliteStore,
    SqliteTimeouts,
    SystemClock,
)

MILLISECOND = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)

KINDS = ("local+sqlite", "postgres+postgres", "rabbitmq+postgres")


@dataclass
class Pay:
    """What the tests send."""

    amount: int = 0


@dataclass(frozen=True)
class Handled:
    """A message that came to the handler of a test, and when."""

    message: Any
    at: datetime
    context: HandlerContext


def now() -> datetime:
    return SystemClock().now()


class Place:
    """Adapters of one kind.

    Args:
        kind: one of :data:`KINDS`.
        file: of SQLite.
        postgres: its address; empty: it is not needed.
        schema: in it.
        rabbitmq: likewise.
    """

    def __init__(self, kind: str, file: Path, postgres: str, schema: str, rabbitmq: str) -> None:
        self.kind, self._file, self._postgres, self._schema, self._rabbitmq = kind, file, postgres, schema, rabbitmq
        self.transport, self.store = self._adapters()
        self._opened: list[Any] = [self.transport, self.store]
        self._queues: set[str] = set()
        self.name = self.queue("sales")
        self.error = self.queue("error")
        self.handled: list[Handled] = []
        self._one_more = anyio.Event()

    def _adapters(self) -> tuple[Any, Any]:
        if self.kind == "local+sqlite":
            file = self._file
            return LocalTransport(file, synchronous="normal"), SqliteStore(file, synchronous="normal")
        store = PostgresStore(self._postgres, schema=self._schema)
        if self.kind == "postgres+postgres":
            return PostgresTransport(self._postgres, schema=self._schema), store
        return RabbitMqTransport(self._rabbitmq, queue_type="classic"), store

    def outbox(self) -> Any:
        """Open an outbox in the database of the store; of SQLite, in a file of its own, as the guide advises."""
        if self.kind == "local+sqlite":
            return self._open(SqliteOutbox(self._file.with_name("outbox.db"), synchronous="normal"))
        return self._open(PostgresOutbox(self._postgres, schema=self._schema, connections=2))

    def sagas(self) -> Any:
        """Open a store of sagas in the database of the store."""
        if self.kind == "local+sqlite":
            return self._open(SqliteSagaStore(self._file, synchronous="normal"))
        return self._open(PostgresSagaStore(self._postgres, schema=self._schema))

    def timeouts(self) -> Any:
        """Open the storage of a timeout manager there."""
        if self.kind == "local+sqlite":
            return self._open(SqliteTimeouts(self._file, synchronous="normal"))
        return self._open(PostgresTimeouts(self._postgres, schema=self._schema))

    def _open(self, adapter: Any) -> Any:
        self._opened.append(adapter)
        return adapter

    @property
    def table(self) -> str:
        """A table of the application beside the outbox, in SQL; whoever needs it creates it."""
        schema = "" if self.kind == "local+sqlite" else '"{}".'.format(self._schema.replace('"', '""'))
        return f'{schema}"paid in {self.name}"'

    def queue(self, name: str) -> str:
        """Return the name of a queue, and of its endpoint, that no other test has."""
        own = f"{name}-{uuid.uuid4().hex[:12]}"
        self._queues |= {own, *(f"{own}.{end}" for end in ("timeouts", "Timeouts", "TimeoutsDispatcher"))}
        return own

    def endpoint(
        self, handle: Callable[[Any, HandlerContext], Awaitable[None]] | None = None, **settings: Any
    ) -> Endpoint:
        """Return an endpoint that notes what comes, or handles it as told."""
        settings.setdefault("transport", self.transport)
        settings.setdefault("delayed_delivery", DelayedDelivery(self.store))
        endpoint = Endpoint(settings.pop("name", self.name), error_queue=self.error, **settings)
        for kind in (Pay, bytes):
            endpoint.handler(kind)(handle or self.note)
        return endpoint

    async def note(self, message: object, context: HandlerContext) -> None:
        """Handle a message by noting it."""
        self.handled.append(Handled(message, now(), context))
        self._one_more.set()

    async def handles(self, number: int) -> Sequence[Handled]:
        """Wait until so many messages have come; return them."""
        with patience():
            while len(self.handled) < number:
                self._one_more = anyio.Event()
                await self._one_more.wait()
        return self.handled

    async def take(self, queue: str) -> Envelope:
        """Wait for a message in a queue; take and return it."""
        receiver = self.transport.receiver(queue)
        try:
            with patience():
                received: list[Any] = []
                while not received:
                    received = await receiver.receive(1)
            await receiver.commit(received[0], now())
        finally:
            await receiver.close()
        return received[0].envelope

    async def put(self, queue: str, *envelopes: Envelope) -> None:
        """Put messages into a queue as they are, as somebody else does."""
        await self.transport.create_queues([queue])
        assert not [error for error in await self.transport.send(envelopes, now()) if error is not None]

    async def put_raw(self, queue: str, body: bytes) -> None:
        """Put a body without anything about it there: into RabbitMQ with another client, which has no more to say."""
        if self.kind != "rabbitmq+postgres":
            await self.put(queue, Envelope(queue, str(uuid.uuid4()), {}, body))
            return
        await self.transport.create_queues([queue])
        with channel_of(self._rabbitmq) as channel:
            channel.basic_publish("", queue, body)

    async def is_empty(self, *queues: str) -> None:
        """Wait until there is nothing in queues."""

        async def there_is_nothing() -> bool:
            return not set((await self.transport.lengths_of(queues)).values()) - {0}

        await until(there_is_nothing)

    async def waiting(self) -> int:
        """Return how many messages wait in the store."""
        return (await self.store.statistics(now())).pending

    async def nothing_waits(self) -> None:
        """Wait until nothing waits: what was sent to queues elsewhere may be handled before it is removed."""

        async def there_is_nothing() -> bool:
            return not await self.waiting()

        await until(there_is_nothing)

    async def close(self) -> None:
        for each in self._opened:
            await each.close()
        if self.kind == "rabbitmq+postgres":
            with channel_of(self._rabbitmq) as channel:
                for queue in self._queues:
                    channel.queue_delete(queue)
