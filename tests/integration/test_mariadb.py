"""MariaDB beyond the conformance suite: plans, ends of processes, races, limits of the server."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from tests.mariadb_subjects import drop_schema, fresh_schema

from postdate import DelayedDelivery, DelayedMessage, Endpoint, MemoryTransport, TransactionMode
from postdate.clock import SystemClock
from postdate.errors import (
    ConfigurationError,
    DuplicateMessage,
    MessageTooLarge,
    StoreFromNewerVersion,
    StoreNotSetUp,
    StoreNotWritable,
    UnsupportedTransactionMode,
)
from postdate.mariadb.connection import MariaDbServer, MariaDbSession
from postdate.mariadb.facts import old_snapshots
from postdate.mariadb.names import Names, quoted
from postdate.mariadb.statements import EARLIEST, Statements
from postdate.messages import Headers
from postdate.ports import Claim, DescribesServer, Outcome, Recording, RecordKind, SeesSnapshots
from postdate.stores.mariadb import MariaDbStore

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
    names = Names(schema, TABLE)
    table = names.plain(TABLE)
    session.change(f"USE {quoted(schema)}")
    session.change(
        f"INSERT INTO {table} (number, due, attempt_at, message_id, destination, headers, body) "
        f"SELECT seq, seq * 1000, seq * 1000, seq, 'queue', '{{}}', REPEAT('x', 200) FROM seq_1_to_{ROWS}"
    )
    sql, numbers = Statements(names), list(range(1, 2_001))
    bounds = {"from": EARLIEST, "at": ROWS * 500}
    plans = {
        "claim": ({**bounds, "limit": 1_000}, "attempt"),
        "first_free": (bounds, "attempt"),
        "next_attempt": (bounds, "attempt"),
        "next_attempt_but": ({**bounds, "locked": numbers}, "attempt"),
        "find_leased": ({"holders": [1]}, "attempt"),
        "record_held": (
            {"numbers": numbers, "holder": None, "at": 1, "store": 1, "kind": 2, "detail": None},
            "PRIMARY",
        ),
        "delete_held": ({"numbers": numbers, "holder": None}, "PRIMARY"),
        "lease": ({"numbers": numbers, "holder": 1}, "PRIMARY"),
        "free": ({"numbers": numbers, "holders": [1]}, "PRIMARY"),
        "next_due": ({}, "due"),
        "list_pending": ({"destination": None, "due_from": 0, "due_to": None, "limit": 10}, "due"),
    }
    for name, (values, index) in plans.items():
        for *_, access, _, key, _, _, rows, extra in session.rows(f"EXPLAIN {getattr(sql, name)}", values):
            assert access != "ALL", name
            assert key == index, name
            assert "filesort" not in extra, name
            assert "temporary" not in extra, name
            assert int(rows) <= ROWS, name


# --- processes and connections that end -------------------------------------------------------------------------------

_CLAIM_AND_WAIT = """
import asyncio, sys
from datetime import datetime
from postdate.ports import Outcome
from postdate.stores.mariadb import MariaDbStore

async def main():
    url, schema, table, now, finished = sys.argv[1:]
    store = MariaDbStore(url, schema=schema, table=table)
    claims = await store.claim_due(datetime.fromisoformat(now), 10)
    if int(finished):
        await store.finish(claims[:int(finished)], Outcome.DELIVERED, datetime.fromisoformat(now))
    print(len(claims), flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def _python(script: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def _claimed(store: MariaDbStore, count: int) -> list[Claim]:
    """Claim until so many were claimed, which others held."""
    found = list[Claim]()
    with anyio.fail_after(30):
        while len(found) < count:
            found += await store.claim_due(NOW + SECOND, 100)
            await anyio.sleep(0.01)
    assert len(found) == count
    return found


@pytest.mark.parametrize("finished", [0, 4], ids=["row locks", "leases"])
async def test_what_a_killed_process_held_is_free_again(mariadb_url: str, schema: str, finished: int) -> None:
    store = store_on(mariadb_url, schema)
    await store.setup()
    await store.store_many([message(n) for n in range(20)], NOW)
    stop = await store.listen(lambda: None)
    late = (NOW + SECOND).isoformat()
    process = _python(_CLAIM_AND_WAIT, mariadb_url, schema, TABLE, late, str(finished))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"10\n"
        ours = await store.claim_due(NOW + SECOND, 100)
        assert len(ours) == 10, "what the other process holds is not claimed"
        process.kill()
        process.wait()
        found = [*ours, *await _claimed(store, 10 - finished)]
        assert await store.finish(found, Outcome.DELIVERED, NOW) == 20 - finished
        counts = await store.record_counts()
        assert counts == {RecordKind.SCHEDULED: 20, RecordKind.DELIVERED: 20}
    finally:
        process.kill()
        process.communicate()
        stop()
        await store.close()


async def test_a_lease_is_void_once_the_connection_behind_it_is_gone(
    mariadb_url: str, schema: str, session: MariaDbSession
) -> None:
    store = store_on(mariadb_url, schema)
    await store.setup()
    await store.store_many([message(n) for n in range(3)], NOW)
    claims = await store.claim_due(NOW + SECOND, 10)
    await store.finish(claims[:1], Outcome.DELIVERED, NOW)
    holder = Names(schema, TABLE)
    ((connection,),) = session.rows(f"SELECT IS_USED_LOCK(lock_name) FROM {holder.of('holder')}")
    session.change(f"KILL {connection}")
    again = await _claimed(store, 2)
    assert await store.finish(again, Outcome.DELIVERED, NOW) == 2
    assert await store.finish(claims[1:], Outcome.DELIVERED, NOW) == 0
    await store.close()


async def test_connections_that_died_while_idle_are_replaced(
    mariadb_url: str, schema: str, session: MariaDbSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.locking.pool._TRUSTED_SECONDS", 0.0)
    store = store_on(mariadb_url, schema)
    await store.setup()
    await store.store(message(1), NOW)
    idle = [kept._connection.thread_id() for kept, _ in store._pool._idle]
    assert idle
    for connection in idle:
        session.change(f"KILL {connection}")
    await store.store(message(2), NOW)
    assert (await store.statistics(NOW)).pending == 2
    await store.close()


# --- races ------------------------------------------------------------------------------------------------------------

STORM = 5_000


async def test_a_storm_of_claims_retries_and_stores_delivers_each_message_once(mariadb_url: str, schema: str) -> None:
    stores = [store_on(mariadb_url, schema) for _ in range(2)]
    await stores[0].setup()
    delivered, lost = Counter[str](), list[Exception]()
    lock, all_delivered = threading.Lock(), threading.Event()

    async def deliver(store: MariaDbStore) -> None:
        while not all_delivered.is_set():
            claims = list(await store.claim_due(NOW + SECOND, 60))
            first, rest = claims[::3], [claim for claim in claims if claim not in claims[::3]]
            for part in (first, rest):
                again = [claim for claim in part if not claim.message.number_of_failures][:2]
                for claim in again:
                    assert await store.retry_later(claim, NOW, NOW, "again")
                done = [claim for claim in part if claim not in again]
                assert await store.finish(done, Outcome.DELIVERED, NOW) == len(done)
                with lock:
                    delivered.update(claim.message.message_id for claim in done)
                    if delivered.total() >= STORM:
                        all_delivered.set()

    async def fill(store: MariaDbStore) -> None:
        for start in range(0, STORM, 250):  # each batch holds half of the one before
            await store.store_many([message(n) for n in range(max(start - 125, 0), start + 250)], NOW)

    def run(work, store: MariaDbStore) -> None:
        try:
            anyio.run(work, store)
        except Exception as error:
            lost.append(error)
            all_delivered.set()
            raise

    with ThreadPoolExecutor(6) as pool:
        for number in range(2):
            pool.submit(run, fill, stores[number])
        for number in range(4):
            pool.submit(run, deliver, stores[number % 2])
    assert not lost
    assert delivered == Counter(f"m-{n}" for n in range(STORM))
    counts = await stores[0].record_counts()
    assert (counts[RecordKind.SCHEDULED], counts[RecordKind.DELIVERED]) == (STORM, STORM)
    for store in stores:
        await store.close()


async def test_several_processes_may_set_up_at_once(mariadb_url: str, schema: str) -> None:
    stores = [store_on(mariadb_url, schema) for _ in range(6)]
    async with anyio.create_task_group() as tasks:
        for store in stores:
            tasks.start_soon(store.setup)
    await stores[0].store(message(1), NOW)
    assert await stores[5].get("m-1") is not None
    for store in stores:
        await store.close()


# --- setting up -------------------------------------------------------------------------------------------------------


async def test_an_administrator_may_run_the_statements(mariadb_url: str, schema: str, session: MariaDbSession) -> None:
    store = store_on(mariadb_url, schema)
    for statement in store.setup_statements("unused").split(";\n\n"):
        if statement.strip():
            session.change(statement)
    await store.store(message(1), NOW)
    await store.setup()
    assert await store.get("m-1") is not None
    await store.close()


async def test_tables_of_a_newer_postdate_are_left_alone(
    mariadb_url: str, schema: str, session: MariaDbSession
) -> None:
    store = store_on(mariadb_url, schema)
    await store.setup()
    session.change(f"UPDATE {Names(schema, TABLE).plain('postdate_migration')} SET version = 99")
    with pytest.raises(StoreFromNewerVersion, match="99"):
        await store.setup()
    await store.close()


async def test_what_is_missing_is_said(mariadb_url: str, schema: str) -> None:
    store = store_on(mariadb_url, schema)
    with pytest.raises(StoreNotSetUp, match="postdate setup"):
        await store.store(message(1), NOW)
    await store.setup()
    await store.close()
    other = MariaDbStore(mariadb_url, schema=schema, table="other")
    with pytest.raises(StoreNotSetUp, match="other"):
        await other.store(message(1), NOW)
    await other.close()


async def test_two_stores_in_one_database_do_not_see_each_other(mariadb_url: str, schema: str) -> None:
    one, other = (MariaDbStore(mariadb_url, schema=schema, table=name) for name in ("one", "other"))
    for store in (one, other):
        await store.setup()
        await store.store(message(1), NOW)
    await one.finish(await one.claim_due(NOW + SECOND, 10), Outcome.DELIVERED, NOW)
    assert await one.get("m-1") is None
    assert await other.get("m-1") is not None
    assert [record.kind for record in await other.history("m-1")] == [RecordKind.SCHEDULED]
    for store in (one, other):
        await store.close()


# --- names, texts, limits ---------------------------------------------------------------------------------------------


async def test_ids_differ_by_case_and_by_trailing_spaces(mariadb_url: str, schema: str) -> None:
    store = store_on(mariadb_url, schema)
    await store.setup()
    ids = ["a", "A", "a ", "á", "a\u0301", "a\\", "a'", "a%s", '"a"', "🕰", "🕰" * 250]
    report = await store.store_many(
        [DelayedMessage(id_, NOW, "очередь 📮 ", {"k": id_}, b"\\'\0%s") for id_ in ids], NOW
    )
    assert report.already_there == ()
    found = await store.claim_due(NOW + SECOND, 100)
    assert [claim.message.message_id for claim in found] == ids
    assert {claim.message.destination for claim in found} == {"очередь 📮 "}
    assert {claim.message.body for claim in found} == {b"\\'\0%s"}
    with pytest.raises(DuplicateMessage):
        await store.store(DelayedMessage("a ", NOW, "queue"), NOW)
    await store.close()


@pytest.mark.parametrize("table", ["t" * 65, "clock 🕰", "ends in a space ", "", "nul\0", "Postdate_Record"])
def test_tables_that_cannot_be_are_refused(table: str) -> None:
    with pytest.raises(ConfigurationError):
        MariaDbStore("mariadb://user@localhost/database", table=table)


async def test_a_message_over_the_packet_of_the_server_names_its_setting(mariadb_url: str, schema: str) -> None:
    asked = MariaDbStore(mariadb_url, table=TABLE)
    packet = int((await asked.server_facts()).settings["max_allowed_packet"])
    await asked.close()
    store = store_on(mariadb_url, schema, largest_message_bytes=2 * packet)
    await store.setup()
    with pytest.raises(MessageTooLarge, match="max_allowed_packet"):
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


async def test_transaction_scope_is_refused(mariadb_url: str) -> None:
    store = MariaDbStore(mariadb_url)
    with pytest.raises(UnsupportedTransactionMode, match="sends_atomic_with_receive"):
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    with pytest.raises(ConfigurationError, match="initialize"):
        await store.setup()
    await store.close()


async def test_a_wrong_password_is_not_in_the_error(mariadb_url: str) -> None:
    head, _, place = mariadb_url.rpartition("@")
    user = head.partition("://")[2].partition(":")[0]
    store = MariaDbStore(f"mariadb://{user}:secret-secret@{place}", table=TABLE)
    with pytest.raises(StoreNotWritable) as caught:
        await store.next_due()
    assert "secret-secret" not in str(caught.value)
    await store.close()


@pytest.mark.parametrize("url", ["mariadb://host:port/database", "postgresql://host/database", "mariadb://host/d?x=1"])
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        MariaDbStore(url)


@pytest.mark.parametrize("version", ["10.5.29-MariaDB", "8.4.3", "5.7.44-log"])
def test_old_servers_and_other_servers_are_refused(
    session: MariaDbSession, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(session, "rows", lambda _sql: [(version, 16_777_216)])
    with pytest.raises(ConfigurationError, match=r"10\.6"):
        session.prepare()


async def test_the_server_says_how_safe_it_is(mariadb_url: str, schema: str) -> None:
    store = store_on(mariadb_url, schema)
    facts = await store.server_facts()
    assert (facts.product, facts.schema_version, facts.newest_schema_version) == ("MariaDB", 0, 1)
    assert facts.settings["isolation"] == "READ-COMMITTED"
    assert facts.settings["innodb_flush_log_at_trx_commit"] in {"0", "1", "2"}
    assert facts.now is not None
    await store.setup()
    assert (await store.server_facts()).schema_version == 1
    assert isinstance(store, DescribesServer)
    await store.close()


async def _is_seen(store: MariaDbStore, connection: int, expected: bool) -> None:
    """Wait until it is so: the server makes its list anew for who has not asked for 0.1 s."""
    with anyio.fail_after(10):
        while True:
            found = {snapshot.pid for snapshot in await store.old_snapshots()}
            if (connection in found) is expected:
                return
            await anyio.sleep(0.2)


async def test_a_session_with_an_old_snapshot_is_found(
    mariadb_url: str, session: MariaDbSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(old_snapshots.__globals__, "_OLD_SECONDS", 0)  # by name it may be another copy of the module
    session.change("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.change("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    ((me,),) = session.rows("SELECT CONNECTION_ID()")
    store = MariaDbStore(mariadb_url, table=TABLE)
    await _is_seen(store, me, True)
    session.rollback()
    await _is_seen(store, me, False)
    assert isinstance(store, SeesSnapshots)
    await store.close()


async def test_without_records_nothing_is_left(mariadb_url: str, schema: str) -> None:
    store = store_on(mariadb_url, schema, recording=Recording.NONE)
    await store.setup()
    await store.store_many([message(n) for n in range(3)], NOW)
    claims = await store.claim_due(NOW + SECOND, 10)
    await store.finish(claims[:1], Outcome.DELIVERED, NOW)
    await store.finish(claims[1:], Outcome.FAILED, NOW)
    assert not await store.record_counts()
    await store.close()


# --- an endpoint ------------------------------------------------------------------------------------------------------


@dataclass
class Reminder:
    number: int = 0


async def test_an_endpoint_delivers_on_time_also_what_another_process_stored(mariadb_url: str, schema: str) -> None:
    """The other process is another store on connections of its own; nothing but the table tells of what it stores."""
    clock, arrived = SystemClock(), list[tuple[int, timedelta]]()
    store = MariaDbStore(mariadb_url, schema=schema)
    endpoint = Endpoint(
        "sales",
        transport=MemoryTransport(),
        delayed_delivery=DelayedDelivery(store),
        error_queue="error",
    )
    other = MariaDbStore(mariadb_url, schema=schema, table="sales.timeouts")
    due = dict[int, datetime]()
    all_here = anyio.Event()

    @endpoint.handler(Reminder, name="Reminder")
    async def remind(message: Reminder, _context: object) -> None:
        arrived.append((message.number, clock.now() - due[message.number]))
        if len(arrived) == 20:
            all_here.set()

    async with endpoint:
        for number in range(20):
            due[number] = clock.now() + timedelta(milliseconds=500)
            if number % 2:
                headers = {Headers.ENCLOSED_MESSAGE_TYPES: "Reminder", Headers.MESSAGE_ID: f"other-{number}"}
                body = b'{"number": %d}' % number
                await other.store(DelayedMessage(f"other-{number}", due[number], "sales", headers, body), clock.now())
            else:
                await endpoint.send(Reminder(number), deliver_at=due[number])
        with anyio.fail_after(20):
            await all_here.wait()
    await store.close()
    await other.close()
    assert sorted(number for number, _ in arrived) == list(range(20))
    assert all(late > timedelta(0) for _, late in arrived), "nothing arrives before it is due"
