"""Tables of timeouts as a .NET endpoint has made and filled them, and what databases do with names, times and sizes."""

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier, Literal
from tests.mariadb_subjects import drop_schema as drop_mariadb
from tests.mariadb_subjects import fresh_schema as fresh_mariadb
from tests.postgres_subjects import drop_schema as drop_postgres
from tests.postgres_subjects import fresh_schema as fresh_postgres

from postdate import (
    LocalTransport,
    MariaDbTimeouts,
    PostgresTimeouts,
    PostgresTransport,
    SqliteTimeouts,
    SqlServerTimeouts,
)
from postdate.backends.mariadb.connection import MariaDbServer, MariaDbSession
from postdate.backends.mariadb.schema import quote_name
from postdate.backends.sql import timeouts_layout
from postdate.backends.sqlite.connection import connect
from postdate.errors import (
    ConfigurationError,
    InvalidHeaders,
    InvalidMessage,
    InvalidTimestamp,
    MessageTooLarge,
    StoreUnreachable,
)
from postdate.messages import Envelope
from postdate.ports.timeouts import DueChunk, DueTimeout, Timeout, TimeoutPersister

ENDPOINT = "Sales.Orders"
TABLE = "Sales_Orders_TimeoutData"
NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
SECOND = timedelta(seconds=1)
EARLY = NOW - timedelta(days=3652)
FIRST = "0ab14c4e-36c7-4b1e-9a10-aa7e00c5b001"
SECOND_ONE = "0ab14c4e-36c7-4b1e-9a10-aa7e00c5b002"
SAGA = "5a9a0000-0000-4000-8000-00000000000a"
HEADERS = {"NServiceBus.IsSagaTimeoutMessage": "True", "script": "отправка-🕰️"}
STORED = (
    Timeout(FIRST, NOW - SECOND, "Sales.Orders", SAGA, ENDPOINT, HEADERS, b"<xml/>"),
    Timeout(SECOND_ONE, NOW, "Sales.Orders@machine", None, ENDPOINT, {}, b""),
)
MINE = Timeout(str(uuid.UUID(int=7)), NOW + SECOND, "очередь", SAGA, ENDPOINT, HEADERS, b"\0\xff'\\")


@pytest.fixture
def postgres_schema(postgres_url: str) -> Iterator[str]:
    name = fresh_postgres()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(SQL("CREATE SCHEMA {}").format(Identifier(name)))
    yield name
    drop_postgres(postgres_url, name)


@pytest.fixture
def mariadb_schema(mariadb_url: str) -> Iterator[str]:
    name = fresh_mariadb()
    with closing(MariaDbServer(mariadb_url).connect()) as session:
        session.change(f"CREATE DATABASE {quote_name(name)}")
    yield name
    drop_mariadb(mariadb_url, name)


@pytest.fixture
def session(mariadb_url: str) -> Iterator[MariaDbSession]:
    with closing(MariaDbServer(mariadb_url).connect()) as opened:
        yield opened


async def is_read_and_fired(persister: TimeoutPersister) -> None:
    """Read both timeouts of a .NET endpoint, add one of our own beside them, and remove all three."""
    await persister.initialize(ENDPOINT)
    await persister.setup()  # changes nothing: the table is there
    for stored in STORED:
        assert await persister.peek(stored.timeout_id) == stored
        assert not await persister.add(stored), "its id is known"
    due = [DueTimeout(each.timeout_id, each.due) for each in STORED]
    assert await persister.next_chunk(EARLY, NOW, 10) == DueChunk(due, None)
    assert await persister.add(MINE)
    assert await persister.peek(MINE.timeout_id) == MINE
    assert await persister.remove_by_saga(SAGA) == 2
    assert [await persister.try_remove(each.timeout_id) for each in (*STORED, MINE)] == [False, True, False]


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def upstream_postgres(url: str, schema: str, headers: str, time: str = "timestamp") -> None:
    table = Identifier(schema, TABLE)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            SQL(
                'CREATE TABLE {} ("Id" uuid NOT NULL, "Destination" varchar(200), "SagaId" uuid, "State" bytea, '
                '"Time" {}, "Headers" {} NOT NULL, "PersistenceVersion" varchar(23) NOT NULL, PRIMARY KEY ("Id"))'
            ).format(table, SQL(time), SQL(headers))  # pyright: ignore[reportArgumentType]
        )
        for each in STORED:
            due = timeouts_layout.text_time(each.due)
            text = json.dumps(each.headers, indent=1, ensure_ascii=False)
            row = (
                each.timeout_id,
                each.destination,
                each.saga_id or timeouts_layout.NO_SAGA,
                each.body or None,
                due,
                text,
            )
            values = SQL(", ").join(map(Literal, (*row, "4.1.0.0")))
            connection.execute(SQL("INSERT INTO {} VALUES ({})").format(table, values))


@pytest.mark.parametrize("headers", ["text", "json", "jsonb"])
async def test_a_table_of_a_dotnet_endpoint_in_postgresql(
    headers: str, postgres_url: str, postgres_schema: str
) -> None:
    upstream_postgres(postgres_url, postgres_schema, headers)
    persister = PostgresTimeouts(postgres_url, schema=postgres_schema)
    await is_read_and_fired(persister)
    await persister.close()


async def test_it_is_fired_in_the_transaction_of_queues_in_another_schema(
    postgres_url: str, postgres_schema: str
) -> None:
    upstream_postgres(postgres_url, postgres_schema, "text")
    queues = fresh_postgres()
    persister = PostgresTimeouts(postgres_url, schema=postgres_schema)
    transport = PostgresTransport(postgres_url, schema=queues)
    try:
        await persister.initialize(ENDPOINT)
        assert persister.database == transport.capabilities.database
        await transport.create_queues(["q"])
        work = [persister.removing_work(FIRST), persister.adding_work(MINE)]
        assert list(await transport.send([Envelope("q", "m")], NOW, work=work)) == [None]
        assert [await persister.peek(each) for each in (FIRST, MINE.timeout_id)] == [None, MINE]
    finally:
        await transport.close()
        await persister.close()
        drop_postgres(postgres_url, queues)


async def test_what_a_dotnet_endpoint_reads_of_ours_in_postgresql(postgres_url: str, postgres_schema: str) -> None:
    persister = PostgresTimeouts(postgres_url, schema=postgres_schema)
    await persister.initialize(ENDPOINT)
    await persister.setup()
    await persister.add(replace(MINE, saga_id=None))
    await persister.close()
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute(SQL("SELECT * FROM {}").format(Identifier(postgres_schema, TABLE))).fetchone()
        assert row is not None
        given, destination, saga, state, time, headers, _ = row
        assert (given, destination, saga) == (uuid.UUID(MINE.timeout_id), MINE.destination, uuid.UUID(int=0))
        assert (state, time, json.loads(headers)) == (MINE.body, MINE.due.replace(tzinfo=None), HEADERS)
        found = connection.execute(
            "SELECT count(*) FROM pg_indexes WHERE schemaname = %s AND tablename = %s", (postgres_schema, TABLE)
        )
        assert found.fetchone() == (3,)  # of the id, the saga and the time


async def test_a_due_time_is_rounded_up_to_what_a_column_of_postgresql_keeps(
    postgres_url: str, postgres_schema: str
) -> None:
    upstream_postgres(postgres_url, postgres_schema, "text", "timestamp(3)")
    persister = PostgresTimeouts(postgres_url, schema=postgres_schema)
    await persister.initialize(ENDPOINT)
    await persister.add(replace(MINE, due=NOW + timedelta(microseconds=1_001)))
    found = await persister.peek(MINE.timeout_id)
    assert found is not None
    assert found.due == NOW + timedelta(microseconds=2_000)
    await persister.close()


# --- MariaDB ----------------------------------------------------------------------------------------------------------


def upstream_mariadb(
    session: MariaDbSession, schema: str, table: str, settings: str, write: Callable[[str], str]
) -> str:
    """Make a table and fill it; ids are written as ``write`` says."""
    name = f"{quote_name(schema)}.{quote_name(table)}"
    session.change(
        f"CREATE TABLE {name} (Id varchar(38) NOT NULL, Destination varchar(200), SagaId varchar(38), State longblob, "
        f"Time datetime, Headers {settings.partition(' ')[0]} NOT NULL, PersistenceVersion varchar(23) NOT NULL, "
        f"PRIMARY KEY (Id), KEY Index_SagaId (SagaId), KEY Index_Time (Time)) {settings.partition(' ')[2]}"
    )
    for each in STORED:
        values: dict[str, Any] = {
            "id": write(each.timeout_id),
            "destination": each.destination,
            "saga": write(each.saga_id or timeouts_layout.NO_SAGA),
            "state": each.body or None,
            "time": timeouts_layout.text_time(each.due)[:19],
            "headers": json.dumps(each.headers),
        }
        session.change(
            f"INSERT INTO {name.replace('%', '%%')} VALUES "
            f"(%(id)s, %(destination)s, %(saga)s, %(state)s, %(time)s, %(headers)s, '4.1.0.0')",
            values,
        )
    return name


WRITTEN: dict[str, Callable[[str], str]] = {
    "lower": str,
    "UPPER": str.upper,
    "{braces}": lambda text: f"{{{text}}}",
    "{BRACES}": lambda text: f"{{{text.upper()}}}",
}


@pytest.mark.parametrize(
    "settings", ["json CHARACTER SET utf8mb4", "longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"]
)
@pytest.mark.parametrize("write", WRITTEN)
async def test_a_table_of_a_dotnet_endpoint_in_mariadb(
    write: str, settings: str, mariadb_url: str, mariadb_schema: str, session: MariaDbSession
) -> None:
    upstream_mariadb(session, mariadb_schema, TABLE, settings, WRITTEN[write])
    persister = MariaDbTimeouts(mariadb_url, schema=mariadb_schema)
    await is_read_and_fired(persister)
    await persister.close()


async def test_a_table_of_mariadb_may_have_a_character_set_of_its_own_and_times_of_whole_seconds(
    mariadb_url: str, mariadb_schema: str, session: MariaDbSession
) -> None:
    name = upstream_mariadb(session, mariadb_schema, TABLE, "longtext CHARACTER SET latin1", str)
    persister = MariaDbTimeouts(mariadb_url, schema=mariadb_schema)
    await persister.initialize(ENDPOINT)
    kept = replace(MINE, destination="queue", due=NOW + timedelta(microseconds=1))
    assert await persister.add(kept)
    assert await persister.peek(kept.timeout_id) == replace(kept, due=NOW + SECOND)
    early = await persister.next_chunk(NOW, NOW + timedelta(microseconds=999_999), 10)
    assert early == DueChunk([], NOW + SECOND)
    await persister.close()
    where = {"id": MINE.timeout_id}
    found = session.rows(f"SELECT Id, SagaId, Time FROM {name.replace('%', '%%')} WHERE Id = %(id)s", where)
    assert found == ((MINE.timeout_id, SAGA, (NOW + SECOND).replace(tzinfo=None)),)


async def test_what_does_not_fit_into_a_packet_of_mariadb_is_too_large(
    mariadb_url: str, mariadb_schema: str, session: MariaDbSession
) -> None:
    persister = MariaDbTimeouts(mariadb_url, schema=mariadb_schema)
    await persister.initialize(ENDPOINT)
    await persister.setup()
    with pytest.raises(MessageTooLarge, match="max_allowed_packet"):
        await persister.add(replace(MINE, body=b"'" * (session.largest_packet // 2)))
    assert await persister.add(MINE)
    await persister.close()


# --- SQLite -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncGenerator[SqliteTimeouts]:
    timeouts = SqliteTimeouts(tmp_path / "t.db", synchronous="normal")
    await timeouts.initialize(ENDPOINT)
    await timeouts.setup()
    yield timeouts
    await timeouts.close()


def insert(path: Path, rows: Iterable[tuple[str, str]], headers: str = "{}") -> None:
    """Write rows with these ids and times past the adapter."""
    with closing(connect(path / "t.db")) as connection:
        for timeout_id, time in rows:
            row = (timeout_id, "q", timeouts_layout.NO_SAGA, None, time, headers, "1")
            connection.execute(f'INSERT INTO "{TABLE}" VALUES (?, ?, ?, ?, ?, ?, ?)', row)


async def test_times_of_sqlite_may_have_fewer_digits(sqlite: SqliteTimeouts, tmp_path: Path) -> None:
    times = {
        1: "2026-01-31 12:00:05",
        2: "2026-01-31 12:00:05.0",
        3: "2026-01-31 12:00:05.000000",
        4: "2026-01-31 12:00:05.5",
        5: "2026-01-31 12:00:05.500001",
        6: "2026-01-31 12:00:06.000",
    }
    insert(tmp_path, [(str(uuid.UUID(int=number)), time) for number, time in times.items()])
    half = NOW + timedelta(milliseconds=500)
    for limit in (1, 2, 3, 4, 5, 6):
        chunk = await sqlite.next_chunk(NOW - SECOND, half, limit)
        expected = [1, 2, 3] if limit <= 3 else [1, 2, 3, 4]
        assert [each.timeout_id for each in chunk.due] == [str(uuid.UUID(int=number)) for number in expected]
        assert chunk.next_query == (half if limit <= 3 else half + timedelta(microseconds=1))
    chunk = await sqlite.next_chunk(NOW, NOW + SECOND, 10)
    assert [uuid.UUID(each.timeout_id).int for each in chunk.due] == [4, 5, 6]


async def test_timeouts_go_by_their_indexes_in_sqlite(sqlite: SqliteTimeouts, tmp_path: Path) -> None:
    sql = sqlite._checked_table.sql
    with closing(connect(tmp_path / "t.db")) as connection:
        for statement, index in ((sql.due, "_Time"), (sql.first, "_Time"), (sql.delete_saga, "_SagaId")):
            values: dict[str, str] = dict.fromkeys(("after", "until", "limit", "id"), "2026")
            plan = str(connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall())
            assert f"{TABLE}{index}" in plan, plan
            assert "SCAN" not in plan, plan
            assert "TEMP" not in plan, plan


async def test_headers_that_are_no_object_of_texts_are_told_with_the_id(sqlite: SqliteTimeouts, tmp_path: Path) -> None:
    for number, headers in enumerate(("[]", '{"a": 1}', "no json")):
        insert(tmp_path, [(str(uuid.UUID(int=number)), "2026-01-31 12:00:05")], headers)
    for number in range(3):
        with pytest.raises(InvalidHeaders, match=str(uuid.UUID(int=number))):
            await sqlite.peek(str(uuid.UUID(int=number)))


async def test_headers_may_have_nulls_which_are_empty(sqlite: SqliteTimeouts, tmp_path: Path) -> None:
    insert(tmp_path, [(MINE.timeout_id, "2026-01-31 12:00:05")], '{"a": null, "b": "c"}')
    found = await sqlite.peek(MINE.timeout_id)
    assert found is not None
    assert found.headers == {"a": "", "b": "c"}


async def test_rows_that_cannot_be_read_hold_up_nobody_and_are_told_once(
    sqlite: SqliteTimeouts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable = [(f"no-uuid-{tmp_path.name}-{number}", "2026-01-31 12:00:04") for number in range(3)]
    good = (MINE.timeout_id, "2026-01-31 12:00:05")
    insert(tmp_path, [*unreadable, good])
    for limit in (1, 2, 3, 4, 5):  # with fewer than four, nothing of the first query can be read
        chunk = await sqlite.next_chunk(NOW - 5 * SECOND, NOW + SECOND, limit)
        assert [each.timeout_id for each in chunk.due] == [MINE.timeout_id]
    for timeout_id, _ in unreadable:
        assert sum(timeout_id in record.getMessage() for record in caplog.records) == 1


async def test_a_time_that_cannot_be_read_holds_up_nothing_that_is_due(sqlite: SqliteTimeouts, tmp_path: Path) -> None:
    insert(tmp_path, [(MINE.timeout_id, "2026-01-31 12:00:05"), (str(uuid.UUID(int=1)), "never")])
    chunk = await sqlite.next_chunk(NOW - SECOND, NOW + SECOND, 10)
    assert [each.timeout_id for each in chunk.due] == [MINE.timeout_id]


@pytest.mark.parametrize("end", ["infinity", "10000-01-01"])
async def test_the_end_of_all_times_holds_up_nothing_that_is_due_in_postgresql(postgres_url: str, end: str) -> None:
    """``infinity`` is what .NET writes for its latest date-time; Python has no year 10000."""
    prefix = f"end_{uuid.uuid4().hex}_"
    persister = PostgresTimeouts(postgres_url, table_prefix=prefix)
    await persister.initialize(ENDPOINT)
    await persister.setup()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        table = Identifier("public", f"{prefix}TimeoutData")
        for timeout_id, time in ((MINE.timeout_id, "2026-01-31 12:00:05"), (str(uuid.UUID(int=1)), end)):
            insert = SQL("INSERT INTO {} VALUES (%s, 'q', %s, NULL, {}::timestamp, '{{}}', '1')")
            connection.execute(insert.format(table, Literal(time)), (timeout_id, timeouts_layout.NO_SAGA))
        chunk = await persister.next_chunk(NOW - SECOND, NOW + SECOND, 10)
        assert [each.timeout_id for each in chunk.due] == [MINE.timeout_id]
        assert chunk.next_query is None
        await persister.close()
        connection.execute(SQL("DROP TABLE {}").format(table))


async def test_timeouts_store_and_queues_share_one_file(tmp_path: Path) -> None:
    persister = SqliteTimeouts(tmp_path / "t.db")
    transport = LocalTransport(tmp_path / "t.db")
    await transport.create_queues(["q"])
    await persister.initialize(ENDPOINT)
    await persister.setup()
    assert list(await transport.send([Envelope("q", "m")], NOW, work=[persister.adding_work(MINE)])) == [None]
    assert await persister.peek(MINE.timeout_id) == MINE
    await transport.close()
    await persister.close()
    await persister.close()


# --- names, and servers that are not there ----------------------------------------------------------------------------

ADDRESSES: dict[str, Callable[..., TimeoutPersister]] = {
    "PostgreSQL": lambda **settings: PostgresTimeouts("postgresql://u:secret-secret@127.0.0.1:1/d", **settings),
    "MariaDB": lambda **settings: MariaDbTimeouts("mariadb://u:secret-secret@127.0.0.1:1/d", **settings),
    "SQL Server": lambda **settings: SqlServerTimeouts("mssql://u:secret-secret@127.0.0.1:1/d", **settings),
}
LONGEST = {"PostgreSQL": 63, "MariaDB": 64, "SQL Server": 128}


@pytest.mark.parametrize("server", ADDRESSES)
async def test_an_endpoint_starts_while_its_storage_is_down(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.backends.sqlserver.connection.CONNECT_WITHIN_SECONDS", 0.5)
    persister = ADDRESSES[server]()
    await persister.initialize("postdate")  # a name that begins like tables of Postdate's own
    for call in (
        persister.setup(),
        persister.add(MINE),
        persister.peek(FIRST),
        persister.try_remove(FIRST),
        persister.remove_by_saga(SAGA),
        persister.next_chunk(EARLY, NOW, 10),
    ):
        with pytest.raises(StoreUnreachable) as caught:
            await call
        assert caught.value.transient
        assert "secret-secret" not in str(caught.value)
    await persister.close()


@pytest.mark.parametrize("server", ADDRESSES)
async def test_a_name_that_is_too_long_is_told_at_the_start(server: str) -> None:
    longest = LONGEST[server] - len("TimeoutData")
    persister = ADDRESSES[server]()
    await persister.initialize("e" * (longest - 1))
    with pytest.raises(ConfigurationError, match="table_prefix"):
        await persister.initialize("e" * longest)
    ADDRESSES[server](table_prefix="p" * longest)
    with pytest.raises(ConfigurationError, match="table_prefix"):
        ADDRESSES[server](table_prefix="p" * (longest + 1))
    await persister.close()


@pytest.mark.parametrize("server", ADDRESSES)
async def test_without_an_endpoint_there_is_no_table(server: str) -> None:
    persister = ADDRESSES[server]()
    with pytest.raises(ConfigurationError, match="initialize"):
        await persister.peek(FIRST)
    await persister.close()


@pytest.mark.parametrize("prefix", ["sqlite_", "SQLite_", "a\0", "\ud800"])
def test_tables_that_sqlite_cannot_have_are_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="table_prefix"):
        SqliteTimeouts(tmp_path / "t.db", table_prefix=prefix)


def test_the_script_for_an_administrator_makes_the_table() -> None:
    for timeouts in (persister() for persister in ADDRESSES.values()):
        script = timeouts.setup_statements(ENDPOINT)  # pyright: ignore[reportAttributeAccessIssue]
        assert f"{TABLE}" in script
        assert script.count("CREATE TABLE") == 1
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON" in script


# --- the layout -------------------------------------------------------------------------------------------------------


def test_names_ids_and_times_of_the_layout() -> None:
    assert timeouts_layout.table_name(ENDPOINT) == TABLE
    assert timeouts_layout.table_name(ENDPOINT, prefix="") == "TimeoutData"
    assert timeouts_layout.normal_id(f"{{{FIRST.upper()}}}") == timeouts_layout.normal_id(uuid.UUID(FIRST)) == FIRST
    assert timeouts_layout.normal_id("none") is None
    assert timeouts_layout.normal_saga(timeouts_layout.NO_SAGA) is timeouts_layout.normal_saga(None) is None
    assert timeouts_layout.read_time("2026-01-31T12:00:05.0000001") == NOW + timedelta(microseconds=1)
    assert timeouts_layout.read_time("2026-01-31 12:00:05.003") == NOW + timedelta(
        milliseconds=3
    )  # of a datetime of SQL Server
    assert timeouts_layout.read_time(NOW.replace(tzinfo=None)) == NOW
    assert timeouts_layout.round_up(NOW.replace(microsecond=1), 3).microsecond == 1000
    assert timeouts_layout.round_up(NOW, 0) == NOW
    assert timeouts_layout.round_up(NOW.replace(microsecond=999_999), 0) == NOW + SECOND
    with pytest.raises(InvalidMessage):
        timeouts_layout.round_up(datetime.max.replace(tzinfo=UTC), 0)
    for wrong in ("", "2026-02-30 00:00:00", None, 7, "9999-12-31 23:59:59.9999999"):
        with pytest.raises(InvalidTimestamp):
            timeouts_layout.read_time(wrong)
