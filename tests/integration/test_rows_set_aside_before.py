"""What versions up to 6b98bbd had set aside in a table of its own comes back to the tables it was in, marked.

The files of SQL are dumps of what that version had made: messages that were torn by hand and set aside; one without its
content; one whose id was stored anew, and waits; one whose id was stored anew, and was delivered; a delayed message and
another one in a queue. On servers there is another store with one of its own.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from tests.azure_store_subjects import TablePlace
from tests.mariadb_subjects import drop_schema as drop_database
from tests.mariadb_subjects import fresh_schema as fresh_database
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.redis_subjects import Prefix

from postdate import DelayedMessage, LocalTransport, SqliteStore
from postdate.backends.azure.table_names import records_table
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quoted
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.backends.redis.layout import written
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.backends.sql.questions import SqlQuestions
from postdate.core.changes import administrable
from postdate.errors import DuplicateMessage
from postdate.ports import ClaimingStore, Outcome, RecordKind, UnreadableRow, UnreadableRows

DUMPS = Path(__file__).parent / "set_aside_before"
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = datetime(2027, 1, 31, 12, tzinfo=UTC)
TORN = b"{torn"
IN_QUEUES = {"moved": b"\0moved", "sent": b"\0sent"}


def bodies(rows: Sequence[UnreadableRow]) -> dict[str, bytes | None]:
    return {row.message_id: row.raw.get("body") for row in rows}


async def expect_back(store: ClaimingStore, ids: Sequence[str]) -> None:
    """Check that rows are back with all they had, hold up nothing, and can be discarded; what waits is delivered."""
    assert isinstance(store, UnreadableRows)
    assert isinstance(store, SqlQuestions)
    rows = await store.list_unreadable(100)
    assert bodies(rows) == {id_: None if id_ == "no-content" else b"\0" + id_.encode() for id_ in ids}
    for row in rows:
        assert row.raw.get("headers") == (None if row.message_id == "no-content" else TORN)
        assert row.reason.startswith("the headers " if row.message_id == "no-content" else "headers must be")
        assert (row.queue, row.at) == ("", NOW.replace(second=1))
    operator = administrable(store)
    counts = await operator.statistics(LATER)
    assert (counts.pending, counts.unreadable) == (int("stored-anew" in ids), len(ids))
    claims = await store.claim_due(LATER, 100)
    assert [(claim.message.message_id, claim.message.body) for claim in claims] == (
        [("stored-anew", b"second")] if "stored-anew" in ids else []
    )
    assert await store.finish(claims, Outcome.DELIVERED, LATER) == len(claims)
    assert not await operator.cancel("torn", LATER)
    for row in rows:
        await store.discard_unreadable(row.number, LATER)
    assert await store.count_unreadable() == 0
    assert [each.kind for each in await operator.history("torn")] == [
        RecordKind.SCHEDULED,
        RecordKind.FAILED,
        RecordKind.DISCARDED,
    ]


async def test_in_a_file_of_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "before.db"
    with closing(sqlite3.connect(path)) as file:
        file.executescript((DUMPS / "sqlite.sql").read_text())
    store, transport = SqliteStore(path), LocalTransport(path)
    await store.setup()
    assert bodies(await transport.list_unreadable(10)) == IN_QUEUES
    assert {row.queue for row in await transport.list_unreadable(10)} == {"orders"}
    assert await transport.queue_lengths() == {"orders": 0}
    with closing(sqlite3.connect(path)) as file:  # under its former number a message is found once it is mended
        assert file.execute("SELECT seq FROM delayed_message WHERE message_id = 'torn'").fetchall() == [(1,)]
        assert file.execute("SELECT name FROM sqlite_master WHERE name = 'quarantine'").fetchall() == []
    await expect_back(store, ["torn", "stored-anew", "delivered-anew", "no-content"])
    for row in await transport.list_unreadable(10):
        await transport.discard_unreadable(row.number, LATER)
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM content").fetchone() == (0,)
    await store.close()
    await transport.close()


async def test_in_a_schema_of_postgresql(postgres_url: str) -> None:
    schema = fresh_schema()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute((DUMPS / "postgres.sql").read_text().encode())
        connection.execute(f'ALTER SCHEMA set_aside_before RENAME TO "{schema.replace(chr(34), chr(34) * 2)}"'.encode())
    store = PostgresStore(postgres_url, schema=schema, table="service.timeouts")
    other = PostgresStore(postgres_url, schema=schema, table="other")
    transport = PostgresTransport(postgres_url, schema=schema)
    try:
        await store.setup()
        assert bodies(await transport.list_unreadable(10)) == IN_QUEUES
        assert {row.queue for row in await transport.list_unreadable(10)} == {"orders"}
        assert await transport.queue_lengths() == {"orders": 0}
        await expect_back(store, ["torn", "stored-anew", "delivered-anew", "no-content"])
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            name = f'"{schema.replace(chr(34), chr(34) * 2)}".quarantine'
            assert connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name,)).fetchone() == (True,)
            await other.setup()
            assert connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name,)).fetchone() == (False,)
        await expect_back(other, ["torn"])
    finally:
        for each in (store, other, transport):
            await each.close()
        drop_schema(postgres_url, schema)


async def test_in_a_database_of_mariadb(mariadb_url: str) -> None:
    schema = fresh_database()
    with closing(MariaDbServer(mariadb_url).connect()) as session:
        session.change(f"CREATE DATABASE {quoted(schema)}")
        session.change(f"USE {quoted(schema)}")
        for statement in (DUMPS / "mariadb.sql").read_text().strip().removesuffix(";").split(";\n"):
            session.change(statement.encode())
    store = MariaDbStore(mariadb_url, schema=schema, table="service.timeouts")
    other = MariaDbStore(mariadb_url, schema=schema, table="other")
    try:
        for each in (store, other):
            await each.setup()
        with closing(MariaDbServer(mariadb_url).connect()) as session:
            tables = session.rows(f"SHOW TABLES FROM {quoted(schema)}".replace("%", "%%"), {})
        assert "postdate_quarantine" not in {name for (name,) in tables}
        await expect_back(store, ["torn", "stored-anew", "delivered-anew"])
        await expect_back(other, ["torn"])
    finally:
        for each in (store, other):
            await each.close()
        drop_database(mariadb_url, schema)


async def test_under_a_prefix_of_redis(redis_url: str) -> None:
    """That version moved a message to a key of its own, by number; the id of one was stored anew."""
    prefix = Prefix(redis_url)
    place, queues = f"{prefix.login.tag}:s:conformance.timeouts", f"{prefix.login.tag}:q"
    at = {"d": written(NOW), "h": TORN, "reason": "headers must be a JSON object", "at": written(NOW)}
    for number, id_ in enumerate(("torn", "stored-anew"), 1):
        prefix.client.hset(f"{place}:x:{number}", mapping={**at, "i": id_, "q": "orders", "b": b"\0" + id_.encode()})
        prefix.client.zadd(f"{place}:xs", {str(number): number})
    prefix.client.set(f"{place}:xnumber", 2)
    prefix.client.hset(f"{queues}:x:1", mapping={**at, "i": "moved", "Q": "orders", "b": b"\0moved"})
    prefix.client.zadd(f"{queues}:xs", {"1": 1})
    store, transport = RedisStore(prefix.login, table="conformance.timeouts"), RedisTransport(prefix.login)
    await store.store(DelayedMessage("stored-anew", NOW, "orders", {"kind": "new"}, b"second"), NOW)
    await transport.create_queues(["orders"])
    for _ in range(2):
        await store.setup()
    assert bodies(await transport.list_unreadable(10)) == {"moved": b"\0moved"}
    assert bodies(await store.list_unreadable(10)) == {"torn": b"\0torn", "stored-anew": b"\0stored-anew"}
    (claim,) = await store.claim_due(LATER, 10)
    assert claim.message.body == b"second"
    assert await store.finish([claim], Outcome.DELIVERED, LATER) == 1
    with pytest.raises(DuplicateMessage):
        await store.store(DelayedMessage("torn", NOW, "orders"), NOW)
    for source in (store, transport):
        for row in await source.list_unreadable(10):
            await source.discard_unreadable(row.number, LATER)
    left = [
        key for key in prefix.all_keys() if b":m:" in key or b":qm:" in key or b":x:" in key or key.endswith(b":xs")
    ]
    assert left == []
    await store.close()
    await transport.close()
    prefix.drop()


async def test_in_a_table_of_azure(azurite_connection: str) -> None:
    """That version moved an entity to the partition ``malformed`` of the records."""
    place = TablePlace(azurite_connection)
    store = await place.open()
    await store.setup()
    row = {"RowKey": f"20260131120000_{'0' * 32}", "MessageId": "torn", "Headers": TORN.decode(), "Body": b"\0torn"}
    place.add({**row, "PartitionKey": "malformed", "Reason": "headers must be"}, records_table(place.table))
    for _ in range(2):
        await store.setup()
    (back,) = await store.list_unreadable(10)
    assert (back.message_id, back.reason, back.raw["Headers"]) == ("torn", "headers must be", TORN)
    assert [each["PartitionKey"] for each in place.entities(records_table(place.table))] == []
    assert await store.claim_due(LATER, 10) == []
    await store.discard_unreadable(back.number, LATER)
    assert place.entities() == []
    await place.close()
