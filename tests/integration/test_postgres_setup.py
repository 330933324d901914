"""Tables made by hand or by many at once, with any names; refused where they would not be what they seem."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from tests.integration.postgres_place import Place, now, placed
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import PATIENCE_SECONDS

from postdate import DelayedMessage, TransactionMode
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.errors import ConfigurationError, StoreFromNewerVersion, StoreNotSetUp, StoreNotWritable
from postdate.ports import Scan

NAMES = [
    "a.b",
    "a]b[",
    'a"b',
    "100%",
    "%s %(x)s",
    "🦉 ü",
    "select",
    "it's",
    "a\\b",
    " ",
    "x" * 63,
    "🦉" * 15 + "abc",
    "$1 :x ?",
]


@pytest.mark.parametrize("name", [name for name in NAMES if name.strip()])
async def test_any_name_will_do(postgres_url: str, name: str) -> None:
    """For the schema, the table and the queue; two such stores in one schema keep apart."""
    schema = name
    drop_schema(postgres_url, schema)
    store, other = (PostgresStore(postgres_url, schema=schema, table=table) for table in (name, "another"))
    transport = PostgresTransport(postgres_url, schema=schema)
    try:
        for each in (store, other):
            await each.setup()
        await transport.create_queues([name])
        due = now()
        await store.store(DelayedMessage("m", due, name, {}, b"1"), due)
        await other.store(DelayedMessage("m", due, name, {}, b"2"), due)
        stop = await store.listen(lambda: None)
        report = await store.move_due(due + timedelta(seconds=1), 10)
        stop()
        assert report.delivered == 1
        assert await transport.queue_lengths() == {name: 1}
        (received,) = await transport.receiver(name).receive(10)
        assert received.envelope.body == b"1"
        (claim,) = await other.claim_due(due + timedelta(seconds=1), 10)
        assert claim.message.body == b"2"
        (standing,) = [await other.observer().pending_state_of("m")]
        assert standing is not None
        assert list(other.scan(Scan("pending", ("message_id",)), other.scan_parts("pending", 1)[0], 10)) == [[("m",)]]
    finally:
        for adapter in (store, other, transport):
            await adapter.close()
        drop_schema(postgres_url, schema)


@pytest.mark.parametrize("name", ["x" * 64, "🦉" * 16, "", "  ", "a\0b"])
def test_a_name_that_the_server_would_cut_off_is_refused(postgres_url: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        PostgresStore(postgres_url, schema=name)
    with pytest.raises(ConfigurationError, match="schema"):
        PostgresTransport(postgres_url, schema=name)
    with pytest.raises(ConfigurationError, match="table"):
        PostgresStore(postgres_url, table=name)


async def test_an_endpoint_whose_table_would_be_cut_off_is_refused(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    with pytest.raises(ConfigurationError, match="64 bytes; PostgreSQL allows at most 63"):
        await store.initialize("x" * 55, TransactionMode.RECEIVE_ONLY)
    await store.close()


async def test_setting_up_at_the_same_time_is_harmless_row_30(postgres_url: str) -> None:
    """Eight threads find no schema and all create it, twice; one version of its tables comes out."""
    schema, together = fresh_schema(), threading.Barrier(8)

    def set_up(number: int) -> None:
        store = PostgresStore(postgres_url, schema=schema, table=f"table {number % 2}")
        together.wait(PATIENCE_SECONDS)
        for _ in range(2):
            store.database.setup_blocking(f"table {number % 2}")
        store.database.close_blocking()

    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(set_up, range(8)))
        place = Place(postgres_url, schema)
        versions = place.rows("SELECT subject, version FROM migration ORDER BY 1, 2")
        assert versions == [("", 6), ("", 7), ("", 8), ("", 9), ("table 0", 4), ("table 1", 4)]
        assert place.rows("SELECT name FROM store ORDER BY name") == [("table 0",), ("table 1",)]
        await place.close()
    finally:
        drop_schema(postgres_url, schema)


@pytest.fixture
def clerk(postgres_url: str):
    """A user who may work with tables, and create none; the address to come in by."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS postdate_clerk")
        connection.execute("CREATE ROLE postdate_clerk LOGIN")
        yield postgres_url.replace("//postdate@", "//postdate_clerk@")
        connection.execute("DROP OWNED BY postdate_clerk")
        connection.execute("DROP ROLE postdate_clerk")


async def test_who_may_not_create_needs_not_when_everything_is_there(postgres_url: str, clerk: str) -> None:
    async with placed(postgres_url) as place:
        store = place.another_store(clerk)
        with pytest.raises(StoreNotWritable, match=r"check user, password and grants"):
            await store.setup()
        schema = place.schema.replace('"', '""')
        place.run(f'GRANT USAGE ON SCHEMA "{schema}" TO postdate_clerk')
        place.run(f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "{schema}" TO postdate_clerk')
        place.run(f'GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA "{schema}" TO postdate_clerk')
        transport = place.another_transport(clerk)
        for _ in range(2):
            await store.setup()
            await transport.create_queues(["another"])
        await store.store_many([place.work(n, now(), "another") for n in range(10)], now())
        stop = await store.listen(lambda: None)
        assert (await store.move_due(now(), 100)).delivered == 10
        received = await transport.receiver("another").receive(100)
        assert len(received) == 10
        stop()
        await store.close()
        await transport.close()


async def test_who_may_create_nothing_is_told_so(postgres_url: str, clerk: str) -> None:
    store = PostgresStore(clerk, schema=fresh_schema(), table="t")
    with pytest.raises(StoreNotWritable, match=r"permission denied"):
        await store.setup()
    with pytest.raises(StoreNotSetUp, match=r"postdate setup"):
        await store.store(DelayedMessage("m", now(), "q", {}, b""), now())
    await store.close()


@pytest.mark.parametrize(("subject", "newest"), [("", 9), ("service.timeouts", 4)])
async def test_tables_of_a_newer_version_are_left_alone(postgres_url: str, subject: str, newest: int) -> None:
    async with placed(postgres_url) as place:
        place.run(f"INSERT INTO migration VALUES ('{subject}', 999, 'from the future')")
        store = place.another_store()
        with pytest.raises(StoreFromNewerVersion, match=r"version 999 .* upgrade Postdate here"):
            await store.setup()
        facts = await store.server_facts()
        assert (facts.schema_version, facts.newest_schema_version) == (999, newest)
        await store.close()


async def test_the_script_for_an_administrator_makes_what_setting_up_makes(postgres_url: str) -> None:
    place = Place(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(place.store.setup_statements("service").encode())
    assert (await place.store.server_facts()).schema_version == 9
    await place.create()
    await place.store.store(place.work(1, now()), now())
    assert (await place.store.move_due(now(), 10)).delivered == 1
    await place.close()
