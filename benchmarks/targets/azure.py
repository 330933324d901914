"""What Azure Storage does without us: the plain SDK on a table and a queue of their own, on the same account.

As many requests are on their way as a service has, entities have the same columns, and messages the same text. There
are no unique ids, no records, no lease, no expiry, no other destinations, and nothing is tried again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
from anyio.from_thread import start_blocking_portal
from azure.core.exceptions import AzureError, ServiceRequestError
from azure.storage.queue import QueueServiceClient

from benchmarks.deployment import number_of
from benchmarks.targets.target import BareRow, BenchmarkRun, BenchmarkTarget, Inserter, Mover
from postdate.backends.azure.envelope import from_text, to_text
from postdate.backends.azure.layout import DelayedEntity, read_entity, second_key
from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.scratch import sanitize_queue
from postdate.cli.bench.messages import BODY, headers_of, id_of
from postdate.clock import SystemClock
from postdate.errors import TransportUnavailable
from postdate.messages import DelayedMessage, Envelope
from postdate.ports.backends import Scratch

if TYPE_CHECKING:
    from azure.storage.queue.aio import QueueClient

TableClient = Any  # the SDK leaves the types of its keyword arguments open

_RUN: Final = "0" * 12
_SENDS_AT_ONCE: Final = 32
"""As the transport has by default."""

_TRANSACTIONS_AT_ONCE: Final = 16
_GROUP: Final = 100
"""Entities in a transaction: the most that there can be."""

_PAGE: Final = 1_000
_RECEIVED_AT_ONCE: Final = 32
_HIDDEN_SECONDS: Final = 24 * 3600


def run(measured: Callable[[], Awaitable[float]]) -> float:
    """Return what is measured in an event loop of its own.

    Raises:
        AzureError: the first of those that several requests ended with.
    """
    try:
        return anyio.run(measured)
    except BaseExceptionGroup as group:
        first = _first_of(group)
        if first is None:
            raise
        raise first from group


def _first_of(group: BaseExceptionGroup[BaseException]) -> AzureError | None:
    found: BaseException | None = group.subgroup(AzureError)
    while isinstance(found, BaseExceptionGroup):
        found = cast("BaseExceptionGroup[BaseException]", found).exceptions[0]
    return found if isinstance(found, AzureError) else None


class PlainAzure(BenchmarkTarget):
    """An account, used by the plain SDK."""

    def __init__(self, scratch: Scratch, run: BenchmarkRun) -> None:
        super().__init__(scratch, run)
        self.login = parse_login(scratch.address)

    def moved_per_second(self, n: int) -> float:
        """Return the rate from a table of the account to a queue of it; of sending alone, without a store there."""
        queue = f"postdate-bench-{self.run.name}-bare"
        if self.run.has_store:
            return self._asked(partial(move_limit, self.login, f"postdatebenchbare{self.run.name}", queue, n))
        return self._asked(partial(send_limit, self.login, queue, n))

    def _asked(self, measured: Callable[[], Awaitable[float]]) -> float:
        try:
            return run(measured)
        except AzureError as error:
            reason = str(error).partition("\n")[0]
            raise TransportUnavailable(f"{self.login.describe_service('queue')} does not answer: {reason}") from error

    @contextmanager
    def mover(self, rows: Iterable[BareRow], at_once: int) -> Generator[Mover]:
        """Send a message for each row that is due, one after the other."""
        dues, sent, queue = [row.due for row in rows], 0, f"postdate-bench-{self.run.name}-bare"
        text = _text(next(_entities(range(1), SystemClock().now())))
        with QueueServiceClient(self.login.endpoint("queue"), self.login.credential, retry_total=0) as service:
            to = service.create_queue(queue)
            to.get_queue_properties()  # connects

            def move(before: int) -> int:
                nonlocal sent
                due = sum(each < before for each in dues[sent : sent + at_once])
                for _ in range(due):
                    to.send_message(text, time_to_live=-1)
                sent += due
                return due

            try:
                yield move
            finally:
                to.delete_queue()

    @contextmanager
    def inserter(self) -> Generator[Inserter]:
        """Insert entities of as many bytes, in transactions side by side."""
        with start_blocking_portal() as portal:
            table = _table(self.login, f"postdatebenchbare{self.run.name}")
            with portal.wrap_async_context_manager(table) as waiting:

                def prepared(rows: Sequence[BareRow]) -> Callable[[], object]:
                    due = SystemClock().now() + timedelta(hours=1)
                    first = number_of(rows[0].message_id)
                    entities = list(_entities(range(first, first + len(rows)), due))
                    return lambda: portal.call(_insert, waiting, entities)

                yield prepared

    def take(self, queue: str, limit: int) -> list[str]:
        """Hide messages of a queue and return their ids: one request for many, where deleting takes one each."""
        with QueueServiceClient(self.login.endpoint("queue"), self.login.credential, retry_total=0) as service:
            found = service.get_queue_client(sanitize_queue(queue)).receive_messages(
                messages_per_page=_RECEIVED_AT_ONCE, visibility_timeout=_HIDDEN_SECONDS, max_messages=limit
            )
            return [from_text(queue, each.id, each.content).message_id for each in found]


# --- rates --------------------------------------------------------------------------------------------------------


async def move_limit(login: AzureLogin, table: str, queue: str, n: int) -> float:
    """Return messages a second from table to queue: due ones read in pages, sent, and deleted in transactions."""
    now = SystemClock().now()
    async with _queue(login, queue) as to, _table(login, table) as waiting:
        await _insert(waiting, _entities(range(n), now - timedelta(hours=1)))
        started, moved = time.perf_counter(), 0
        while moved < n:
            page = await _page(waiting, second_key(now))
            room = anyio.Semaphore(_SENDS_AT_ONCE)
            async with anyio.create_task_group() as tasks:
                for first in range(0, len(page), _GROUP):
                    tasks.start_soon(_move, waiting, to, page[first : first + _GROUP], room)
            moved += len(page)
        return n / (time.perf_counter() - started)


async def send_limit(login: AzureLogin, queue: str, n: int) -> float:
    """Return messages a second of sending alone, for messages that wait in a store of another kind."""
    entities = list(_entities(range(n), SystemClock().now()))
    texts = [_text(entity) for entity in entities]
    async with _queue(login, queue) as to:
        started, room = time.perf_counter(), anyio.Semaphore(_SENDS_AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for text in texts:
                await room.acquire()
                tasks.start_soon(_send, to, text, room)
        return n / (time.perf_counter() - started)


async def _move(waiting: TableClient, to: QueueClient, group: Sequence[dict[str, Any]], room: anyio.Semaphore) -> None:
    async with anyio.create_task_group() as tasks:
        for entity in group:
            await room.acquire()
            tasks.start_soon(_send, to, _text(entity), room)
    deletions = [("delete", entity) for entity in group]
    try:
        await waiting.submit_transaction(deletions)
    except ServiceRequestError:  # a connection that had idled was closed under it
        await waiting.submit_transaction(deletions)


async def _send(to: QueueClient, text: str, room: anyio.Semaphore) -> None:
    """Send one message, and free the place that was taken for it."""
    try:
        await to.send_message(text, time_to_live=-1)
    finally:
        room.release()


async def _page(waiting: TableClient, before: str) -> list[dict[str, Any]]:
    where = f"PartitionKey le '{before[:10]}' and RowKey lt '{before}'"
    found: list[dict[str, Any]] = []
    async for entity in waiting.query_entities(where, results_per_page=_PAGE):
        found.append(entity)
        if len(found) == _PAGE:
            break
    return found


async def _insert(waiting: TableClient, entities: Iterable[dict[str, Any]]) -> None:
    room = anyio.Semaphore(_TRANSACTIONS_AT_ONCE)

    async def insert(group: list[dict[str, Any]]) -> None:
        async with room:
            await waiting.submit_transaction([("create", entity) for entity in group])

    async with anyio.create_task_group() as tasks:
        for group in _groups(entities):
            tasks.start_soon(insert, group)


def _groups(entities: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield what can be one transaction: of one partition, a hundred at most."""
    group: list[dict[str, Any]] = []
    for entity in entities:
        if group and (len(group) == _GROUP or group[0]["PartitionKey"] != entity["PartitionKey"]):
            yield group
            group = []
        group.append(entity)
    if group:
        yield group


def _entities(numbers: range, due: datetime) -> Iterator[dict[str, Any]]:
    """Yield entities as the store has them, due one after the other."""
    for number in numbers:
        message_id = id_of(number, _RUN)
        at = due + timedelta(microseconds=100 * number)
        yield DelayedEntity.new(DelayedMessage(message_id, at, "bench", headers_of(message_id), BODY)).entity()


def _text(entity: dict[str, Any]) -> str:
    message = read_entity(entity).message
    return to_text(Envelope("bench", message.message_id, message.headers, message.body, due=message.due))


@asynccontextmanager
async def _queue(login: AzureLogin, name: str) -> AsyncGenerator[QueueClient]:
    async with login.create_queue_service() as service:
        client = await service.create_queue(name)
        try:
            yield client
        finally:
            with anyio.CancelScope(shield=True):
                await client.delete_queue()


@asynccontextmanager
async def _table(login: AzureLogin, name: str) -> AsyncGenerator[TableClient]:
    service: Any = login.create_table_service()
    async with service:
        client = await service.create_table(name)
        try:
            yield client
        finally:
            with anyio.CancelScope(shield=True):
                await client.delete_table()
