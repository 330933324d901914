"""MariaDB beyond what all stores on row locks are tested for: plans, limits and refusals of the server."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pymysql
import pytest
from tests.mariadb_subjects import drop_schema, fresh_schema
from tests.servers import MariaDB
from tests.waiting import until

from postdate import DelayedMessage, errors
from postdate.backends.mariadb.connection import MariaDbServer, MariaDbSession, translate, translate_errors
from postdate.backends.mariadb.schema import MariaDbNames, quote_name
from postdate.backends.mariadb.statements import MariaDbStatements
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.mariadb.tables import old_snapshots
from postdate.backends.sql.row_locks.parts import Conflict
from postdate.backends.sql.row_locks.statements import EARLIEST

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
TABLE = "sales.`timeouts`"


@pytest.fixture
def schema(mariadb_url: str) -> Iterator[str]:
    name = fresh_schema()
    yield name
    drop_schema(mariadb_url, name)


@pytest.fixture
def session(mariadb_url: str) -> Iterator[MariaDbSession]:
    opened = MariaDbServer(mariadb_url).connect()
    yield opened
    opened.close()


def message(number: int, due: datetime = NOW) -> DelayedMessage:
    return DelayedMessage(f"m-{number}", due, "queue", {"kind": "check"}, b"body")


def store_on(url: str, schema: str, **settings) -> MariaDbStore:
    return MariaDbStore(url, schema=schema, table=TABLE, **settings)


# --- plans ------------------------------------------------------------------------------------------------------------

ROWS = 250_000


async def test_every_look_goes_by_its_index_however_many_wait(
    mariadb_url: str, schema: str, session: MariaDbSession
) -> None:
    store = store_on(mariadb_url, schema)
    await store.setup()
    await store.close()
    names = MariaDbNames(schema, TABLE)
    table = names.qualified_name(TABLE)
    session.change(f"USE {quote_name(schema)}")
    session.change(
        f"INSERT INTO {table} (number, due, attempt_at, message_id, destination, headers, body) "
        f"SELECT seq, seq * 1000, seq * 1000, seq, 'queue', '{{}}', REPEAT('x', 200) FROM seq_1_to_{ROWS}"
    )
    sql, numbers = MariaDbStatements(names), list(range(1, 2_001))
    bounds = {"from": EARLIEST, "at": ROWS * 500}
    plans = {
        "claim": ({**bounds, "limit": 1_000}, "attempt"),
        "first_unclaimed": (bounds, "attempt"),
        "next_attempt": (bounds, "attempt"),
        "next_attempt_except": ({**bounds, "locked": numbers}, "attempt"),
        "find_leased": ({"holders": [1]}, "attempt"),
        "record_claimed": (
            {"numbers": numbers, "holder": None, "at": 1, "store": 1, "kind": 2, "detail": None},
            "PRIMARY",
        ),
        "delete_claimed": ({"numbers": numbers, "holder": None}, "PRIMARY"),
        "lease": ({"numbers": numbers, "holder": 1}, "PRIMARY"),
        "release_leases": ({"numbers": numbers, "holders": [1]}, "PRIMARY"),
        "next_due": ({}, "due"),
    }
    for name, (values, index) in plans.items():
        for *_, access, _, key, _, _, rows, extra in session.rows(f"EXPLAIN {getattr(sql, name)}", values):
            assert access != "ALL", name
            assert key == index, name
            assert "filesort" not in extra, name
            assert "temporary" not in extra, name
            assert int(rows) <= ROWS, name
    for behind, due_from in ((-1, -1), (99_000, 5), (5, 200_001_000)):  # the first page, and in the midst of a herd
        session.change(f"UPDATE {table} SET due = 5, attempt_at = 5 WHERE number <= 100000")
        session.change("FLUSH STATUS")
        values = {"destination": None, "due_from": due_from, "behind": behind, "due_to": None, "limit": 10}
        assert len(session.rows(sql.list_pending, values)) == 10
        reads = sum(int(count) for _, count in session.rows("SHOW SESSION STATUS LIKE 'Handler_read%%'"))
        assert reads < 150, (behind, due_from)


# --- names, texts, limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["t" * 65, "clock 🕰", "ends in a space ", "", "nul\0", "Postdate_Record"])
def test_tables_that_cannot_be_are_refused(table: str) -> None:
    with pytest.raises(errors.ConfigurationError):
        MariaDbStore("mariadb://user@localhost/database", table=table)


async def test_a_message_over_the_packet_of_the_server_names_its_setting(mariadb_url: str, schema: str) -> None:
    asked = MariaDbStore(mariadb_url, table=TABLE)
    packet = int((await asked.server_facts()).settings["max_allowed_packet"])
    await asked.close()
    store = store_on(mariadb_url, schema, largest_message_bytes=2 * packet)
    await store.setup()
    with pytest.raises(errors.MessageTooLarge, match="max_allowed_packet"):
        await store.store(DelayedMessage("m-1", NOW, "queue", {}, b"x" * packet), NOW)
    assert await store.next_due() is None
    await store.close()


async def test_the_largest_message_by_default_fits_whatever_its_bytes(mariadb_url: str, schema: str) -> None:
    store = store_on(mariadb_url, schema)
    await store.setup()
    body = b"'\\" * (store.capabilities.largest_message_bytes // 2 - 1)
    await store.store(DelayedMessage("m-1", NOW, "queue", {}, body), NOW)
    (claim,) = await store.claim_due(NOW + SECOND, 10)
    assert claim.message.body == body
    await store.close()


async def test_batches_longer_than_a_packet_are_stored_whole(mariadb_url: str, schema: str) -> None:
    store = store_on(mariadb_url, schema)
    await store.setup()
    batch = [DelayedMessage(f"m-{n}", NOW, "queue", {}, bytes(500_000)) for n in range(50)]
    assert (await store.store_many(batch, NOW)).stored == 50
    assert (await store.statistics(NOW)).pending == 50
    await store.close()


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_a_wrong_password_is_not_in_the_error(mariadb_url: str) -> None:
    head, _, place = mariadb_url.rpartition("@")
    user = head.partition("://")[2].partition(":")[0]
    store = MariaDbStore(f"mariadb://{user}:secret-secret@{place}", table=TABLE)
    with pytest.raises(errors.StoreNotWritable) as caught:
        await store.next_due()
    assert "secret-secret" not in str(caught.value)
    await store.close()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1205, Conflict),
        (1146, errors.StoreNotSetUp),
        (1114, errors.StoreFull),
        (1021, errors.StoreFull),
        (1040, errors.StoreUnreachable),
    ],
)
def test_errors_of_the_server_are_translated(number: int, expected: type[errors.StoreError]) -> None:
    found = translate(pymysql.err.OperationalError(number, "said by the server"), "MariaDB here")
    assert isinstance(found, expected)
    assert str(found).startswith("MariaDB here")
    assert "said by the server" in str(found)


@pytest.mark.parametrize(
    ("number", "statement"),
    [
        (1300, "SELECT _utf8mb4 x'FF'"),
        (1267, "SELECT _utf8mb4'a' COLLATE utf8mb4_bin = _utf8mb4'b' COLLATE utf8mb4_general_ci"),
    ],
)
def test_general_errors_about_the_data_of_a_statement_are_no_outage(
    session: MariaDbSession, number: int, statement: str
) -> None:
    with pytest.raises(errors.StoreError) as caught:
        session.rows(statement)
    assert isinstance(caught.value.__cause__, pymysql.Error)
    assert caught.value.__cause__.args[0] == number
    assert not caught.value.outage


@pytest.mark.parametrize("url", ["mariadb://host:port/database", "postgresql://host/database", "mariadb://host/d?x=1"])
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(errors.ConfigurationError):
        MariaDbStore(url)


@pytest.mark.parametrize("version", ["10.5.29-MariaDB", "8.4.3", "5.7.44-log"])
def test_old_servers_and_other_servers_are_refused(
    session: MariaDbSession, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(session, "rows", lambda _sql: [(version, 16_777_216)])
    with pytest.raises(errors.ConfigurationError, match=r"10\.6"):
        session.check_server()


async def test_the_server_says_how_safe_it_is(mariadb_url: str, schema: str) -> None:
    store = store_on(mariadb_url, schema)
    facts = await store.server_facts()
    assert (facts.product, facts.schema_version, facts.newest_schema_version) == ("MariaDB", 0, 3)
    assert facts.settings["isolation"] == "READ-COMMITTED"
    assert facts.settings["innodb_flush_log_at_trx_commit"] in {"0", "1", "2"}
    assert facts.now is not None
    await store.setup()
    assert (await store.server_facts()).schema_version == 3
    await store.close()


def test_of_what_the_server_lists_old_snapshots_are_told_the_oldest_first(
    session: MariaDbSession, monkeypatch: pytest.MonkeyPatch, schema: str
) -> None:
    """The list is a table of the test's own here: the server makes its own anew from time to time only."""
    ((me,),) = session.rows("SELECT CONNECTION_ID()")
    session.change(f"CREATE DATABASE {quote_name(schema)}")
    table = f"{quote_name(schema)}.trx"
    session.change(f"CREATE TABLE {table} AS SELECT * FROM information_schema.innodb_trx LIMIT 0")
    table = table.replace("%", "%%")  # as in every statement with values
    for level, seconds, state in (
        ("REPEATABLE READ", 70, None),
        ("SERIALIZABLE", 3_600, "updating"),
        ("READ COMMITTED", 3_600, None),
        ("REPEATABLE READ", 30, None),
    ):
        session.change(
            f"INSERT IGNORE INTO {table} SET trx_mysql_thread_id = %(me)s, trx_isolation_level = %(level)s, "
            "trx_operation_state = %(state)s, trx_started = SYSDATE() - INTERVAL %(seconds)s SECOND",
            {"me": me, "level": level, "state": state, "seconds": seconds},
        )
    asked = old_snapshots.__globals__["_OLD_SNAPSHOTS"]
    assert "FROM information_schema.innodb_trx" in asked
    monkeypatch.setitem(
        old_snapshots.__globals__, "_OLD_SNAPSHOTS", asked.replace("information_schema.innodb_trx", table)
    )
    oldest, old = old_snapshots(session)
    assert (oldest.pid, oldest.user, oldest.state) == (me, "postdate", "updating")
    assert oldest.age >= timedelta(hours=1) > old.age >= 70 * SECOND
    assert (old.pid, old.state) == (me, "Query")


async def _is_seen(store: MariaDbStore, connection: int) -> bool:
    """Return whether a connection has an old snapshot; the server makes its list anew if nobody has asked for 0.1 s."""
    await anyio.sleep(0.2)  # noqa: TID251 - there is nothing to ask meanwhile
    return connection in {snapshot.pid for snapshot in await store.old_snapshots()}


@pytest.mark.soak(
    "whoever asks a shared server for its list meanwhile keeps it as it is",
    part="servers",
    proven_by="tests/integration/test_mariadb.py::test_of_what_the_server_lists_old_snapshots_are_told_the_oldest_first",
)
async def test_a_session_with_an_old_snapshot_is_found(server_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MariaDB(server_folder)
    server.start()
    try:
        await _an_old_snapshot_is_found(server.url, monkeypatch)
    finally:
        server.stop()


async def _an_old_snapshot_is_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(old_snapshots.__globals__, "_OLD_SECONDS", 0)  # by name it may be another copy of the module
    session = MariaDbServer(url).connect()
    session.change("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.change("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    ((me,),) = session.rows("SELECT CONNECTION_ID()")
    store = MariaDbStore(url, table=TABLE)
    await until(lambda: _is_seen(store, me))
    session.rollback()

    async def is_gone() -> bool:
        return not await _is_seen(store, me)

    await until(is_gone)
    session.close()
    await store.close()


@pytest.mark.parametrize(
    "error", [AssertionError("cut short"), IndexError(), pymysql.err.InternalError("Packet sequence number wrong")]
)
def test_a_packet_that_cannot_be_read_is_a_lost_connection(error: Exception) -> None:
    with pytest.raises(errors.StoreUnreachable), translate_errors("here"):
        raise error
