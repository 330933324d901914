"""Sagas on real stores and queues: rows 106 to 108, and several processes on one instance."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.conftest import as_another_process
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.rabbitmq_subjects import channel_of
from tests.waiting import patience, until

from postdate import (
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    LocalTransport,
    PostgresSagaStore,
    PostgresStore,
    PostgresTransport,
    RabbitMqTransport,
    Saga,
    SqliteSagaStore,
    SqliteStore,
    TransactionMode,
    handles,
    handles_timeout,
    started_by,
)
from postdate.ports import Correlation, SagaRecord

MILLISECOND = timedelta(milliseconds=1)
ORDERS = 8
MESSAGES_EACH = 10


@dataclass
class Begin:
    order_id: str


@dataclass
class Add:
    order_id: str
    number: int


@dataclass
class Check:
    """Sent as a message and requested as a timeout."""

    order_id: str = ""
    text: str = ""


@dataclass
class Late:
    text: str = ""


@dataclass
class Finish:
    order_id: str


@dataclass
class Counting:
    order_id: str
    numbers: list[int] = field(default_factory=list)
    came: list[str] = field(default_factory=list)


class Order(Saga[Counting], correlated_by="order_id", name="Order"):
    lost: list[object]
    """Messages that belonged to no instance."""

    @started_by(Begin)
    async def begin(self, message: Begin, context: HandlerContext) -> None:
        await self.request_timeout(Check(text=f"check {message.order_id}"), within=60 * MILLISECOND)
        await self.request_timeout(Late(f"late {message.order_id}"), within=30 * MILLISECOND)
        await self.request_timeout(Late(f"later {message.order_id}"), within=90 * MILLISECOND)

    @started_by(Add)
    async def add(self, message: Add, context: HandlerContext) -> None:
        self.state.numbers.append(message.number)
        await context.send(Late(f"{message.number}"), destination=f"{context.headers['queue']}")

    @handles(Check)
    async def check(self, message: Check, context: HandlerContext) -> None:
        self.state.came.append(f"message {message.text}")

    @handles(Finish)
    async def finish(self, message: Finish, context: HandlerContext) -> None:
        self.complete()

    @handles_timeout(Check)
    @handles_timeout(Late)
    async def due(self, timeout: Check | Late, context: HandlerContext) -> None:
        self.state.came.append(timeout.text)

    @classmethod
    async def not_found(cls, message: object, context: HandlerContext) -> None:
        cls.lost.append(message)


class World:
    """Adapters of one kind, opened once for each process that is played, and queues of this test's own."""

    def __init__(self, stack: AsyncExitStack, make: Callable[[], tuple[Any, Any, Any]]) -> None:
        self._stack, self._make = stack, make
        self.name = f"sagas-{uuid.uuid4().hex[:12]}"
        self.queues = [f"{self.name}{end}" for end in ("", ".timeouts", ".error", ".out")]
        self.not_found: list[object] = []
        self.saga: type[Order] = type(
            "Order", (Order,), {"lost": self.not_found}, correlated_by="order_id", name="Order"
        )
        self.store: Any = None
        self.sagas: Any = None

    def _open(self) -> Any:
        """Open the adapters of a process, and return its queues."""
        transport, self.store, self.sagas = self._make()
        for each in (transport, self.store, self.sagas):
            self._stack.push_async_callback(each.close)
        return transport

    def sender(self) -> Endpoint:
        return Endpoint(f"{self.name}.sender", transport=self._open(), send_only=True)

    def endpoint(self, *, mode: TransactionMode | None = None, concurrency: int = 16) -> Endpoint:
        transport = self._open()
        endpoint = Endpoint(
            self.name,
            transport=transport,
            delayed_delivery=DelayedDelivery(self.store),
            sagas=self.sagas,
            error_queue=f"{self.name}.error",
            transaction_mode=mode,
            concurrency=concurrency,
        )
        endpoint.saga(self.saga)
        return endpoint

    async def state(self, order_id: str) -> Counting | None:
        record: SagaRecord | None = await self.sagas.find("Order", Correlation("order_id", order_id))
        return None if record is None else msgspec.json.decode(record.state, type=Counting)

    async def until(self, order_id: str, condition: Callable[[Counting | None], bool]) -> None:
        """Wait until the state of an instance, if there is one, fulfils a condition."""
        seen: Counting | None = None

        async def holds() -> bool:
            nonlocal seen
            seen = await self.state(order_id)
            return condition(seen)

        try:
            await until(holds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {seen}") from error


@pytest.fixture(params=["local", "postgres", "rabbitmq+postgres", "rabbitmq+sqlite"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    kind, file = request.param, tmp_path / "all.db"
    postgres = "" if "postgres" not in kind else request.getfixturevalue("postgres_url")
    rabbit = "" if "rabbitmq" not in kind else request.getfixturevalue("rabbitmq_url")
    schema = fresh_schema()

    def make() -> tuple[Any, Any, Any]:
        def in_file() -> tuple[Any, Any]:
            return SqliteStore(file, synchronous="normal"), SqliteSagaStore(file, synchronous="normal")

        def in_postgres() -> tuple[Any, Any]:
            return PostgresStore(postgres, schema=schema), PostgresSagaStore(postgres, schema=schema)

        if kind == "local":
            return as_another_process(lambda: (LocalTransport(file, synchronous="normal"), *in_file()))
        if kind == "postgres":
            return (PostgresTransport(postgres, schema=schema), *in_postgres())
        stores = in_postgres() if postgres else as_another_process(in_file)
        return (RabbitMqTransport(rabbit, queue_type="classic"), *stores)

    async with AsyncExitStack() as stack:
        world = World(stack, make)
        yield world
    if postgres:
        drop_schema(postgres, schema)
    if rabbit:
        with channel_of(rabbit) as channel:
            for queue in world.queues:
                channel.queue_delete(queue)


def came(*whats: str) -> Callable[[Counting | None], bool]:
    return lambda state: state is not None and sorted(state.came) == sorted(whats)


async def test_row_106_timeouts_reach_the_saga_instance_that_asked_for_them(world: World) -> None:
    async with world.endpoint() as endpoint:
        for number in range(3):
            await endpoint.send(Begin(f"o-{number}"))
        for number in range(3):
            order = f"o-{number}"
            await world.until(order, came(f"late {order}", f"check {order}", f"later {order}"))
    assert world.not_found == []


async def test_row_107_timeouts_and_messages_of_one_type_are_told_apart(world: World) -> None:
    async with world.endpoint() as endpoint:
        await endpoint.send(Begin("o-1"))
        await world.until("o-1", lambda state: state is not None)
        await endpoint.send(Check("o-1", "hello"))
        await world.until("o-1", came("message hello", "late o-1", "check o-1", "later o-1"))


async def test_row_108_a_completed_saga_gets_no_timeouts_and_neither_does_the_next_of_its_name(world: World) -> None:
    async with world.endpoint() as endpoint:
        await endpoint.send(Begin("o-1"))
        await world.until("o-1", lambda state: state is not None)
        await endpoint.send(Finish("o-1"))
        await world.until("o-1", lambda state: state is None)
        await endpoint.send(Begin("o-1"))
        await world.until("o-1", came("late o-1", "check o-1", "later o-1"))

        async def nothing_waits() -> bool:
            return (await world.store.statistics(endpoint.clock.now())).pending == 0

        await until(nothing_waits)
        await world.until("o-1", came("late o-1", "check o-1", "later o-1"))
    assert world.not_found == []


async def test_one_at_a_time_each_message_meets_what_the_one_before_it_has_left(world: World) -> None:
    """Nothing is looked up ahead: a message that met an older state would be handled again, after others."""
    async with world.endpoint() as endpoint:
        await endpoint.transport.create_queues([world.queues[-1]])
    async with world.sender() as sender:
        for number in range(20):
            await sender.send(Add("o-1", number), destination=world.name, headers={"queue": world.queues[-1]})
    async with world.endpoint(concurrency=1):
        await world.until("o-1", lambda state: state is not None and len(state.numbers) == 20)
    state = await world.state("o-1")
    assert state is not None
    assert state.numbers == list(range(20))


@pytest.mark.parametrize("mode", [None, TransactionMode.RECEIVE_ONLY], ids=["strongest", "receive_only"])
async def test_first_messages_at_once_in_two_processes_make_one_instance_and_lose_nothing(
    world: World, mode: TransactionMode | None
) -> None:
    """And no message is sent twice: what met a conflict had not left yet."""
    first, second = world.endpoint(mode=mode), world.endpoint(mode=mode)
    out = world.queues[-1]
    async with first, second:
        await first.transport.create_queues([out])
        async with anyio.create_task_group() as tasks:
            for number in range(MESSAGES_EACH):
                for order in range(ORDERS):
                    sender = (first, second)[number % 2]
                    message = Add(f"o-{order}", number)
                    send = sender.send
                    tasks.start_soon(lambda send=send, message=message: send(message, headers={"queue": out}))
        with patience():
            received = list[str]()
            receiver = first.transport.receiver(out)
            while len(received) < ORDERS * MESSAGES_EACH:
                for each in await receiver.receive(100):
                    received.append(each.envelope.message_id)
                    await receiver.commit(each, first.clock.now())
            await receiver.close()
    for order in range(ORDERS):
        state = await world.state(f"o-{order}")
        assert state is not None
        assert sorted(state.numbers) == list(range(MESSAGES_EACH))
    lengths = await first.transport.lengths_of(world.queues)
    assert lengths is not None
    assert set(lengths.values()) == {0}, lengths
