"""An endpoint that is given a database as one object."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

import postdate
from postdate import (
    DelayedDelivery,
    Endpoint,
    ExternalTimeoutManager,
    HandlerContext,
    Memory,
    MemoryStore,
    MemoryTransport,
    Outbox,
    Saga,
    Sqlite,
    SqliteOutbox,
    TimeoutManager,
    TransactionMode,
    started_by,
)
from postdate.errors import ConfigurationError

Database = Memory | Sqlite


@dataclass
class Order:
    number: int


@dataclass
class Reminder:
    number: int


@dataclass
class State:
    number: int


class Orders(Saga[State], correlated_by="number"):
    @started_by(Order)
    async def start(self, message: Order, context: HandlerContext) -> None:
        await context.send(Reminder(message.number), delay=timedelta(milliseconds=10))


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Database]:
    return Memory if request.param == "memory" else lambda: Sqlite(tmp_path / "all.db")


async def test_an_endpoint_takes_queues_delayed_delivery_and_sagas_from_its_database(
    make: Callable[[], Database],
) -> None:
    async with make() as database:
        endpoint = Endpoint("shop", database)
        endpoint.saga(Orders)
        reminded = anyio.Event()

        @endpoint.handler(Reminder)
        async def remind(message: Reminder, context: HandlerContext) -> None:
            reminded.set()

        async with endpoint:
            await endpoint.send(Order(1))
            await reminded.wait()
        assert endpoint.transport is database.queues
        assert endpoint.delayed_delivery is not None
        assert endpoint.delayed_delivery.store is database.store


async def test_a_database_in_one_file_gives_the_strongest_mode(tmp_path: Path) -> None:
    async with Sqlite(tmp_path / "all.db") as database:
        assert Endpoint("shop", database).mode is TransactionMode.TRANSACTION_SCOPE


async def test_the_outbox_of_a_database_is_used_when_it_is_asked_for(tmp_path: Path) -> None:
    async with Sqlite(tmp_path / "all.db") as database:
        endpoint = Endpoint("shop", database, outbox=True, transaction_mode="receive_only")
        handled = anyio.Event()

        @endpoint.handler(Order)
        async def order(message: Order, context: HandlerContext) -> None:
            connection: Any = await context.transaction()
            assert connection.execute("SELECT 1").fetchone() == (1,)
            handled.set()

        async with endpoint:
            await endpoint.send(Order(1), message_id="order-1")
            await handled.wait()
        assert await database.outbox.find("shop", "order-1") is not None


async def test_what_is_named_explicitly_wins(tmp_path: Path) -> None:
    async with Sqlite(tmp_path / "all.db") as database, Sqlite(tmp_path / "other.db") as other:
        outbox = Outbox(SqliteOutbox(tmp_path / "third.db"))
        endpoint = Endpoint(
            "shop",
            database,
            transport=other.queues,
            delayed_delivery=DelayedDelivery(other.store),
            outbox=outbox,
            transaction_mode="receive_only",
        )
        assert endpoint.transport is other.queues
        assert endpoint.delayed_delivery is not None
        assert endpoint.delayed_delivery.store is other.store
        assert not (tmp_path / "all.db").exists()


@pytest.mark.parametrize("how", ["timeout manager here", "timeout manager elsewhere"])
async def test_a_timeout_manager_takes_the_place_of_the_delayed_delivery(
    how: str, make: Callable[[], Database]
) -> None:
    async with make() as database:
        manager = TimeoutManager(database.timeouts) if how.endswith("here") else ExternalTimeoutManager("a.Timeouts")
        assert Endpoint("shop", database, timeout_manager=manager).delayed_delivery is None


async def test_each_adapter_is_made_once_and_closed_with_the_database(make: Callable[[], Database]) -> None:
    database = make()
    assert database.store is database.store
    assert database.queues is database.queues
    assert database.sagas is database.sagas
    assert database.timeouts is database.timeouts
    await database.close()
    await database.close()


def test_an_endpoint_without_queues_is_told_what_is_missing() -> None:
    with pytest.raises(ConfigurationError, match=r"has no queues.*Postgres\(url\).*transport="):
        Endpoint("shop", delayed_delivery=DelayedDelivery(MemoryStore()))


def test_an_outbox_of_a_database_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"outbox=True.*has none"):
        Endpoint("shop", transport=MemoryTransport(), outbox=True, transaction_mode="receive_only")


def test_a_database_without_outboxes_is_refused_as_one() -> None:
    with pytest.raises(ConfigurationError, match=r"Memory has no outbox"):
        Endpoint("shop", Memory(), outbox=True, transaction_mode="receive_only")


def test_a_transport_in_place_of_a_database_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"second argument.*not MemoryTransport.*transport="):
        Endpoint("shop", MemoryTransport())  # pyright: ignore[reportArgumentType] - the mistake


# --- the front door --------------------------------------------------------------------------------------------------


def test_the_front_door_is_narrow_and_every_name_is_there() -> None:
    """57 names were exported, 22 of them adapters; what database objects make can still be named one by one."""
    assert len(postdate.__all__) <= 28
    assert all(getattr(postdate, name) is not None for name in [*postdate.__all__, "PostgresStore", "LocalTransport"])
    assert set(postdate.__all__) < set(dir(postdate))


OBJECTS: dict[str, Callable[[], Any]] = {
    "postgres": lambda: postdate.Postgres("postgresql://nobody@127.0.0.1:1/none"),
    "mariadb": lambda: postdate.MariaDb("mariadb://nobody@127.0.0.1:1/none"),
    "sqlserver": lambda: postdate.SqlServer("mssql://nobody@127.0.0.1:1/none"),
    "azure": lambda: postdate.AzureStorage("UseDevelopmentStorage=true"),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
async def test_a_store_with_a_table_for_each_endpoint_is_that_of_one(make: Callable[[], Any]) -> None:
    async with make() as database:
        first = Endpoint("sales", database, transport=MemoryTransport())
        assert first.delayed_delivery is not None
        assert first.delayed_delivery.store is database.store is database.store
        with pytest.raises(ConfigurationError, match=rf"'sales' wait in the store of this {type(database).__name__}"):
            Endpoint("billing", database, transport=MemoryTransport())


@pytest.mark.parametrize(
    "make",
    [
        lambda: postdate.RabbitMq("amqp://nobody@127.0.0.1:1/"),
        postdate.Msmq,
    ],
    ids=["rabbitmq", "msmq"],
)
async def test_a_broker_gives_queues_and_needs_a_store_besides(make: Callable[[], Any]) -> None:
    broker = make()
    with pytest.raises(ConfigurationError, match=f"{type(broker).__name__} has no store for an endpoint"):
        Endpoint("sales", broker)


async def test_queues_of_a_broker_and_a_store_of_a_database_make_an_endpoint() -> None:
    async with postdate.RabbitMq("amqp://nobody@127.0.0.1:1/") as broker, Memory() as memory:
        endpoint = Endpoint("sales", broker, delayed_delivery=DelayedDelivery(memory.store))
        assert endpoint.transport is broker.queues
