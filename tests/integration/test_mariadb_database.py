"""One database object of MariaDB: what is made from it shares connections, and ends by itself."""

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from tests.mariadb_subjects import drop_schema, fresh_schema
from tests.waiting import claimed, until

from postdate import DelayedMessage, Endpoint, HandlerContext, MariaDb, MemoryTransport, Saga, SqlServer, started_by
from postdate.backends.mariadb.connection import MariaDbServer, MariaDbSession
from postdate.backends.mariadb.schema import quote_name
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.mariadb.timeouts import MariaDbTimeouts
from postdate.backends.sqlserver.store import SqlServerStore
from postdate.errors import ConfigurationError, StoreUnavailable
from postdate.ports import Correlation, Outcome, TransactionMode
from postdate.ports.timeouts import Timeout

NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
SECOND = timedelta(seconds=1)
TIMEOUT = Timeout("0ab14c4e-36c7-4b1e-9a10-aa7e00c5b001", NOW, "queue", None, "sales", {}, b"")


@pytest.fixture
def schema(mariadb_url: str) -> Iterator[str]:
    name = fresh_schema()
    yield name
    drop_schema(mariadb_url, name)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[MariaDbSession]:
    """Return the connections that are made from now on."""
    made, connect = list[MariaDbSession](), MariaDbServer.connect

    def connect_and_note(server: MariaDbServer) -> MariaDbSession:
        made.append(connect(server))
        return made[-1]

    monkeypatch.setattr(MariaDbServer, "connect", connect_and_note)
    return made


@pytest.fixture
async def database(mariadb_url: str, schema: str) -> AsyncIterator[MariaDb]:
    made = MariaDb(mariadb_url, schema=schema)
    await made.store.initialize("sales", TransactionMode.SENDS_ATOMIC_WITH_RECEIVE)
    await made.timeouts.initialize("sales")
    yield made
    await made.close()


async def set_up(database: MariaDb) -> None:
    await database.store.setup()
    await database.timeouts.setup()
    await database.store.store_many([DelayedMessage(f"m-{n}", NOW, "queue") for n in range(3)], NOW)
    assert await database.timeouts.add(TIMEOUT)


async def test_a_store_and_timeouts_share_connections(connected: list[MariaDbSession], database: MariaDb) -> None:
    await set_up(database)
    assert len(connected) == 1
    claims = await database.store.claim_due(NOW + SECOND, 10)
    claim = await database.timeouts.claim(TIMEOUT.timeout_id)
    assert claim is not None
    assert await claim.remove()
    assert await database.store.finish(claims[:1], Outcome.DELIVERED, NOW) == 1
    assert len(connected) <= 3, "a batch, a timeout, and the one that shows life"


async def test_each_is_made_once(database: MariaDb) -> None:
    assert database.store is database.store
    assert database.timeouts is database.timeouts
    other = MariaDbStore(database, table="other")
    assert other is not database.store
    await other.close()


async def test_closing_the_store_gives_back_its_claims_and_leaves_the_timeouts_alone(database: MariaDb) -> None:
    await set_up(database)
    assert len(await database.store.claim_due(NOW + SECOND, 10)) == 3
    await database.store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await database.store.claim_due(NOW + SECOND, 10)
    assert await database.timeouts.peek(TIMEOUT.timeout_id)
    again = MariaDbStore(database, table="sales.timeouts")
    await claimed(again, 3, NOW + SECOND)
    await again.close()


async def test_closing_the_timeouts_gives_back_their_claims_and_leaves_the_store_alone(
    mariadb_url: str, schema: str, database: MariaDb
) -> None:
    await set_up(database)
    held = await database.timeouts.claim(TIMEOUT.timeout_id)
    assert held is not None
    elsewhere = MariaDbTimeouts(mariadb_url, schema=schema, table_prefix="sales_")
    assert await elsewhere.claim(TIMEOUT.timeout_id) is None
    await database.timeouts.close()
    assert not await held.remove(), "it was given back"
    again = await until(lambda: elsewhere.claim(TIMEOUT.timeout_id))  # the server sees that the connection has ended
    assert await again.remove()
    await elsewhere.close()
    assert len(await database.store.claim_due(NOW + SECOND, 10)) == 3


async def test_the_last_that_closes_closes_the_connections(connected: list[MariaDbSession], database: MariaDb) -> None:
    await set_up(database)
    await database.timeouts.close()
    assert await database.store.next_due() == NOW
    assert len(connected) == 1
    await database.store.close()
    assert not database.connections.idle
    await database.close()
    await database.close()


def test_what_belongs_to_the_database_is_given_there() -> None:
    database = MariaDb("mariadb://user@localhost/database")
    with pytest.raises(ConfigurationError, match="schema="):
        MariaDbStore(database, schema="other")
    with pytest.raises(ConfigurationError, match="answers_within="):
        MariaDbStore(database, answers_within=SECOND)
    with pytest.raises(ConfigurationError, match="holds_at_most="):
        SqlServerStore(SqlServer("mssql://user@localhost/database"), holds_at_most=SECOND)


def test_the_schema_of_sql_server_is_dbo_by_default() -> None:
    database = SqlServer("mssql://user@localhost/database")
    assert database.schema == "dbo"
    assert database.store is database.store
    assert "[dbo].[Sales_TimeoutData]" in database.timeouts.setup_statements("Sales")


@dataclass
class Order:
    number: str


@dataclass
class OrderState:
    number: str
    orders: int = 0


class Orders(Saga[OrderState], correlated_by="number", name="Orders"):
    @started_by(Order)
    async def begin(self, message: Order, context: HandlerContext) -> None:
        self.state.orders += 1


async def test_an_endpoint_has_its_sagas_and_its_outbox_in_one_commit(mariadb_url: str, schema: str) -> None:
    """Of a message that comes twice, each time with a row of the handler's own, everything is there once."""
    table = f"{quote_name(schema)}.`sold`".replace("%", "%%")
    async with MariaDb(mariadb_url, schema=schema) as database:
        shop = Endpoint("shop", database, transport=MemoryTransport(), outbox=True, transaction_mode="receive_only")
        shop.saga(Orders)

        @shop.handler(Order)
        async def sell(message: Order, context: HandlerContext) -> None:
            connection = await context.transaction()
            await connection.execute(f"INSERT INTO {table} VALUES (%s)", [message.number])

        async def both_were_handled() -> bool:
            record = await database.sagas.find("Orders", Correlation("number", "o-1"))
            return record is not None and '"orders":2' in record.state

        await database.store.initialize("shop", TransactionMode.RECEIVE_ONLY)
        await database.store.setup()
        with closing(MariaDbServer(mariadb_url).connect()) as session:
            session.change(f"CREATE TABLE {table} (number varchar(10))", {})
            async with shop:
                for id_ in ("first", "first", "last"):
                    await shop.send(Order("o-1"), destination="shop", message_id=id_)
                await until(both_were_handled)
            assert session.rows(f"SELECT count(*) FROM {table}") == ((2,),)
        for id_ in ("first", "last"):
            kept = await database.outbox.find("shop", id_)
            assert kept is not None
            assert kept.is_dispatched
