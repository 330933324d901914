"""What Azure Storage does without us: the plain SDK on a table and a queue of their own, on the same account.

As many requests are on their way as a service has, entities have the same columns, and messages the same text. There
are no unique ids, no records, no lease, no expiry, no other destinations, and nothing is tried again.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

import anyio
from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError, ServiceRequestError
from azure.data.tables import TableServiceClient
from azure.storage.blob import BlobLeaseClient, BlobServiceClient
from azure.storage.queue import QueueServiceClient

from postdate.backends.azure.envelope import from_text, to_text
from postdate.backends.azure.layout import Waiting, read_entity, second_key
from postdate.backends.azure.login import AzureLogin
from postdate.bench.limits.sleep import due_times, moving_floor
from postdate.bench.result import Lateness
from postdate.bench.workload import BODY, headers_of, id_of
from postdate.clock import SystemClock
from postdate.messages import DelayedMessage, Envelope

if TYPE_CHECKING:
    from azure.storage.queue.aio import QueueClient

Error = AzureError
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


async def insert_limit(login: AzureLogin, table: str, n: int, batch: int) -> float:
    """Return entities a second of inserting ``batch`` at a time, in transactions side by side."""
    due, seconds = SystemClock().now() + timedelta(hours=1), 0.0
    async with _table(login, table) as waiting:
        for first in range(0, n, batch):
            entities = list(_entities(range(first, min(first + batch, n)), due))
            started = time.perf_counter()
            await _insert(waiting, entities)
            seconds += time.perf_counter() - started
    return n / seconds


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
        yield Waiting.new(DelayedMessage(message_id, at, "bench", headers_of(message_id), BODY)).entity(checksum=False)


def _text(entity: dict[str, Any]) -> str:
    message = read_entity(entity).message
    return to_text(Envelope("bench", message.message_id, message.headers, message.body, due=message.due))


# --- lateness -----------------------------------------------------------------------------------------------------


def floor(login: AzureLogin, queue: str, rate: int, seconds: float) -> Lateness:
    """Return how late a bare loop is that sleeps until each due time and sends what is due, one after the other."""
    with _queues(login) as service:
        to = service.create_queue(queue)
        try:
            to.get_queue_properties()  # connects
            text, dues, sent = _text(next(_entities(range(1), SystemClock().now()))), due_times(rate, seconds), 0

            def move(now: float) -> int:
                nonlocal sent
                due = bisect_left(dues, now) - sent
                for _ in range(due):
                    to.send_message(text, time_to_live=-1)
                sent += due
                return due

            return moving_floor(dues, move)
        finally:
            to.delete_queue()


# --- the account --------------------------------------------------------------------------------------------------


def facts(login: AzureLogin, service: str) -> dict[str, str]:
    """Return what the account says of a service, ``queue`` or ``table``.

    Raises:
        AzureError: it does not answer, or refuses us.
    """
    headers: dict[str, str] = {}

    def keep(response: Any) -> None:
        headers.update({name.lower(): value for name, value in response.http_response.headers.items()})

    client: Any = _queues(login) if service == "queue" else _tables(login)
    with client:
        client.get_service_properties(raw_response_hook=keep)
    return {"version": headers.get("x-ms-version", ""), "server": headers.get("server", "")}


def port_of(login: AzureLogin, service: str) -> tuple[str, int | None]:
    """Return host and port of a service."""
    parts = urlsplit(login.endpoint(service))
    return parts.hostname or "", parts.port


def ids_in(login: AzureLogin, queue: str, limit: int | None = None) -> Iterator[str]:
    """Yield the ids of messages in a queue; they are hidden from then on for longer than any run takes."""
    with _queues(login) as service:
        found = service.get_queue_client(queue).receive_messages(
            messages_per_page=_RECEIVED_AT_ONCE, visibility_timeout=_HIDDEN_SECONDS, max_messages=limit
        )
        for message in found:
            yield from_text(queue, message.id, message.content).message_id


def remove(login: AzureLogin, *, queues: Iterable[str] = (), tables: Iterable[str] = (), container: str = "") -> None:
    """Delete queues, tables and a container; those that are not there are no matter."""
    with _queues(login) as service:
        for queue in queues:
            with suppress(ResourceNotFoundError):
                service.delete_queue(queue)
    if container:
        client: Any = _tables(login)
        with client:
            for table in tables:
                client.delete_table(table)
        with BlobServiceClient(login.endpoint("blob"), login.credential) as service:
            _delete_container(service, container)


def _delete_container(service: BlobServiceClient, container: str) -> None:
    """Delete a container, even one that a process of the run leased and did not give up."""
    client = service.get_container_client(container)
    with suppress(ResourceNotFoundError):
        try:
            client.delete_container()
        except HttpResponseError as error:
            if error.status_code != 412:
                raise
            BlobLeaseClient(client).break_lease(lease_break_period=0)
            client.delete_container()


def _queues(login: AzureLogin) -> QueueServiceClient:
    return QueueServiceClient(login.endpoint("queue"), login.credential, retry_total=0)


def _tables(login: AzureLogin) -> TableServiceClient:
    return TableServiceClient(endpoint=login.endpoint("table"), credential=login.credential, retry_total=0)


@asynccontextmanager
async def _queue(login: AzureLogin, name: str) -> AsyncGenerator[QueueClient]:
    async with login.queue_service() as service:
        client = await service.create_queue(name)
        try:
            yield client
        finally:
            with anyio.CancelScope(shield=True):
                await client.delete_queue()


@asynccontextmanager
async def _table(login: AzureLogin, name: str) -> AsyncGenerator[TableClient]:
    service: Any = login.table_service()
    async with service:
        client = await service.create_table(name)
        try:
            yield client
        finally:
            with anyio.CancelScope(shield=True):
                await client.delete_table()
