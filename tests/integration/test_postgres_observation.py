"""What an operator is told of a PostgreSQL store, its queues, its processes and its server; looking changes nothing."""

import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest
from tests.integration.postgres_place import CONTENT, SECOND, Place, now, placed
from tests.postgres_subjects import fresh_schema
from tests.servers import PostgreSQL

from postdate import DelayedMessage, Headers
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.clock import SystemClock
from postdate.errors import QueueNotFound, StoreUnavailable, TransportUnavailable
from postdate.operations.doctor import Verdict
from postdate.operations.doctor.servers import diagnose_old_snapshot, diagnose_server_settings, inspect_server
from postdate.ports import AdministrableStore, Observer, OldSnapshot, Outcome, ServerFacts

HOUR = timedelta(hours=1)


@pytest.fixture
async def place(postgres_url: str):
    async with placed(postgres_url, "orders") as place:
        yield place


def test_the_adapters_offer_what_operations_ask_for(postgres_url: str) -> None:
    store, transport = PostgresStore(postgres_url, table="t"), PostgresTransport(postgres_url)
    assert isinstance(store, AdministrableStore)
    assert isinstance(store.observer(), Observer)
    assert isinstance(transport.observer(), Observer)


# --- what waits -------------------------------------------------------------------------------------------------------


async def test_a_message_that_waits_stands_as_it_was_stored(place: Place) -> None:
    message = DelayedMessage("🦉", now() + HOUR, "orders", {"k": "v"}, b"body", now() + 2 * HOUR)
    await place.store.store(message, now())
    standing = await place.store.observer().pending_state_of("🦉")
    assert standing is not None
    assert (standing.message, standing.attempt_at, standing.claimed_by) == (message, message.due, None)
    assert await place.store.observer().pending_state_of("nobody") is None


async def test_a_message_that_failed_says_when_it_is_tried_again(place: Place) -> None:
    await place.store.store(place.work(1, now()), now())
    (claim,) = await place.store.claim_due(now(), 1)
    again_at = now() + HOUR
    await place.store.retry_later(claim, again_at, now(), "no answer")
    standing = await place.store.observer().pending_state_of("m-1")
    assert standing is not None
    assert (standing.attempt_at, standing.message.number_of_failures, standing.claimed_by) == (again_at, 1, None)


async def test_who_holds_a_message_by_a_row_lock_is_named(place: Place, start) -> None:
    await place.store.store(place.work(1, now()), now())
    holder = start("holder", place.address)
    holder.says("ready 1")
    standing = await place.store.observer().pending_state_of("m-1")
    assert standing is not None
    assert (standing.attempt_at, standing.claimed_by) == (None, holder._process.pid)
    (process,) = await place.store.observer().processes()
    assert (process.pid, process.alive, process.delivers) == (holder._process.pid, True, False)
    holder.kill()


async def test_who_holds_a_message_by_a_lease_is_named(place: Place) -> None:
    await place.store.store_many([place.work(n, now()) for n in range(2)], now())
    claims = await place.store.claim_due(now(), 2)
    assert await place.store.finish(claims[:1], Outcome.DELIVERED, now()) == 1
    left = claims[1].message.message_id
    standing = await place.store.observer().pending_state_of(left)
    assert standing is not None
    assert (standing.attempt_at, standing.claimed_by) == (None, os.getpid())


async def test_a_stranger_that_locks_a_message_is_named_by_his_session(place: Place) -> None:
    await place.store.store(place.work(1, now()), now())
    with place.connect() as connection, connection.transaction():
        connection.execute('SELECT * FROM "service.timeouts" FOR UPDATE')
        standing = await place.store.observer().pending_state_of("m-1")
        (process,) = await place.store.observer().processes()
        assert standing is not None
        assert standing.claimed_by == connection.info.backend_pid == process.pid
        assert process.alive
    standing = await place.store.observer().pending_state_of("m-1")
    assert standing is not None
    assert standing.claimed_by is None
    assert standing.attempt_at is not None


async def test_delayed_retries_of_a_message_are_found_by_its_header(place: Place) -> None:
    retry = DelayedMessage("r-1", now() + HOUR, "orders", {**CONTENT, Headers.MESSAGE_ID: 'm "1" é'}, b"")
    await place.store.store(retry, now())
    await place.store.store(DelayedMessage("r-2", now() + HOUR, "orders", {Headers.MESSAGE_ID: "m"}, b""), now())
    (standing,) = await place.store.observer().retries_of('m "1" é')
    assert standing.message.message_id == "r-1"


async def test_the_last_delivery_is_that_of_this_store(place: Place) -> None:
    observer, at = place.store.observer(), now()
    assert await observer.latest_deliveries(5) == []
    await place.store.store_many([place.work(n, at - HOUR, "orders") for n in range(3)], at)
    await place.store.move_due(at, 2)
    await place.store.move_due(at + SECOND, 2)
    moments = [(each.at, each.due) for each in await observer.latest_deliveries(5)]
    assert moments == [(at + SECOND, at - HOUR), (at, at - HOUR), (at, at - HOUR)]
    assert len(await observer.latest_deliveries(2)) == 2
    other = PostgresStore(place.url, schema=place.schema, table="other")
    await other.setup()
    assert await other.observer().latest_deliveries(5) == []
    await other.close()


async def test_the_next_destinations_are_those_of_what_is_due_first(place: Place) -> None:
    for number, destination in enumerate(["b", "a", "b", "c"]):
        await place.store.store(place.work(number, now() + number * HOUR, destination), now())
    assert await place.store.observer().next_destinations(3) == {"a": 1, "b": 2}


# --- queues and processes ---------------------------------------------------------------------------------------------


async def test_queues_are_looked_into_without_taking_anything_out(place: Place) -> None:
    observer = place.transport.observer()
    await place.store.store_many([place.work(n, now() - HOUR, "orders") for n in range(5)], now())
    await place.store.move_due(now(), 10)
    receiver = place.transport.receiver("orders")
    (held,) = await receiver.receive(1)
    browsed = await observer.browse("orders", 3)
    assert [each.envelope.message_id for each in browsed] == ["m-0", "m-1", "m-2"]
    assert [each.received_by for each in browsed] == [os.getpid(), None, None]
    assert browsed[1].envelope.body == b'{"number": 1}'
    assert browsed[1].envelope.due is not None
    assert (await observer.queue_lengths())["orders"] == 5
    (found,) = await observer.find_in_queues("m-4")
    assert (found.queue, found.envelope.message_id, found.failures) == ("orders", "m-4", 0)
    assert await observer.find_in_queues("m-9") == []
    await receiver.roll_back(held)
    assert [each.failures for each in await observer.browse("orders", 2)] == [1, 0]
    with pytest.raises(QueueNotFound, match="postdate setup --queue nowhere"):
        await observer.browse("nowhere", 1)


async def test_other_processes_are_named_with_what_they_do_and_the_dead_are_told(
    place: Place, start, eventually
) -> None:
    assert await place.store.observer().processes() == []
    began = now()
    service, consumer = start("service", place.address), start("consumer", place.address)
    for process in (service, consumer):
        process.says("ready")
    place.store.database.listener().wait_for_holder()  # we are one ourselves, and leave ourselves out
    store = place.another_store()
    sees = store.observer()
    pids = {service._process.pid: ("service", "service.timeouts"), consumer._process.pid: ("consumer",)}
    eventually(
        lambda: place.rows("SELECT count(*) FROM holder WHERE delivers OR cardinality(receives) > 0") == [(4,)],
        "both have said what they do, with their store and with their queues",
    )
    processes = await sees.processes()
    assert {each.pid for each in processes} == set(pids)
    assert all(each.alive and each.delivers for each in processes)
    receives = {each.pid: each.receives for each in processes}
    assert receives[service._process.pid] == ("service.timeouts",)
    assert receives[consumer._process.pid] == ("consumer", "consumer.timeouts")
    assert all(began < each.started_at < now() for each in processes)
    for process in (service, consumer):
        process.kill()
    eventually(lambda: place.rows("SELECT count(*) FROM holder") == [(1,)], "we have noticed that they died")
    assert await sees.processes() == []
    await store.close()


async def test_a_process_delivers_from_the_stores_that_it_says_and_from_no_other(place: Place) -> None:
    """Several endpoints share a schema; a service of another one delivers nothing from this store."""
    await place.store.next_attempt()
    ((store_id,),) = place.rows("SELECT store_id FROM store")
    for holder, stores in ((1, [store_id]), (2, [store_id + 1]), (3, [store_id + 1, store_id]), (4, None)):
        listed = "NULL" if stores is None else f"ARRAY{stores}::smallint[]"
        place.run(
            f"INSERT INTO holder (holder, pid, machine, started_at, delivers, delivers_from) "
            f"VALUES ({holder}, {holder}, 'elsewhere', '2026-01-01T00:00:00Z', true, {listed})"
        )
    found = await place.store.observer().processes()
    assert {each.pid: each.delivers for each in found} == {1: True, 2: False, 3: True, 4: True}


async def test_a_process_that_died_is_told_until_somebody_noticed(place: Place) -> None:
    place.run(
        "INSERT INTO holder (holder, pid, machine, started_at, delivers, receives) "
        "VALUES (4711, 4711, 'elsewhere', '2026-01-01T00:00:00Z', true, '{a}')"
    )
    (dead,) = await place.store.observer().processes()
    assert (dead.pid, dead.host, dead.alive, dead.delivers) == (4711, "elsewhere", False, True)
    assert dead.receives == ("a",)
    place.store.database.listener().wait_for_holder()


# --- the server -------------------------------------------------------------------------------------------------------


async def test_the_server_says_what_a_diagnosis_needs(place: Place) -> None:
    facts = await place.store.server_facts()
    assert facts.product == "PostgreSQL"
    assert int(facts.version.split(".")[0].split()[0]) >= 13
    assert facts.now is not None
    assert abs(facts.now - now()) < 10 * SECOND
    assert facts.schema_version == facts.newest_schema_version == 9
    assert facts.settings["fsync"] in {"on", "off"}
    assert facts.settings["synchronous_commit"] == "on"
    assert facts.settings["in_recovery"] == "off"
    queues = await place.transport.server_facts()
    assert (queues.schema_version, queues.settings) == (9, facts.settings)


async def test_without_tables_the_server_tells_so(postgres_url: str) -> None:
    store, transport = (
        PostgresStore(postgres_url, schema=fresh_schema(), table="t"),
        PostgresTransport(postgres_url, schema=fresh_schema()),
    )
    assert (await store.server_facts()).schema_version == 0
    assert (await transport.server_facts()).schema_version == 0
    await store.close()
    await transport.close()


async def test_a_table_that_is_missing_from_a_good_schema_is_told(place: Place) -> None:
    store = PostgresStore(place.url, schema=place.schema, table="another")
    facts = await store.server_facts()
    assert (facts.schema_version, facts.newest_schema_version) == (0, 4)
    await store.close()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    url = "postgresql://postdate@127.0.0.1:1/postdate"
    with pytest.raises(StoreUnavailable):
        await PostgresStore(url, table="t").server_facts()
    with pytest.raises(TransportUnavailable):
        await PostgresTransport(url).server_facts()


async def test_a_diagnosis_of_this_server_goes_through(place: Place) -> None:
    checks, answers = await inspect_server("store server", place.store, SystemClock())
    assert answers
    names = {check.name: check.result for check in checks}
    assert names["store server"] is names["schema"] is Verdict.OK


def test_a_standby_is_no_place_to_store(postgres_url: str) -> None:
    (check,) = diagnose_server_settings(ServerFacts("PostgreSQL", "17", settings={"in_recovery": "on"}))
    assert (check.name, check.result) == ("writes", Verdict.FAIL)


@pytest.fixture
def matters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot counts as old from its first moment on."""
    monkeypatch.setattr("postdate.backends.postgres.observation._OLD", timedelta(0))


@pytest.mark.usefixtures("matters_at_once")
async def test_sessions_with_old_snapshots_are_named(place: Place) -> None:
    with ExitStack() as stack:
        reader, writer = (
            stack.enter_context(place.connect(application_name=name)) for name in ("old reader", "old writer")
        )
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1 FROM record")
        writer.execute("BEGIN")
        writer.execute("CREATE TEMP TABLE t (n int)")
        found = {each.application: each for each in await place.store.old_snapshots()}
        assert found["old reader"].pid == reader.info.backend_pid
        assert found["old reader"].state == "idle in transaction"
        assert found["old reader"].user == "postdate"
        assert timedelta(0) <= found["old reader"].age < timedelta(minutes=1)
        assert "old writer" in found
        assert not any(each.application.startswith(f"postdate {os.getpid()}") for each in found.values())


async def test_young_snapshots_matter_to_nobody(place: Place) -> None:
    with place.connect(application_name="young") as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1 FROM record")
        assert all(each.application != "young" for each in await place.store.old_snapshots())


@pytest.fixture
def server_with_two_phases(server_folder: Path):
    """A server that has prepared transactions switched on."""

    class Prepared(PostgreSQL):
        _settings: ClassVar[dict[str, str]] = {**PostgreSQL._settings, "max_prepared_transactions": "5"}

    server = Prepared(server_folder / "postgres")
    server.start()
    yield server
    server.stop()


@pytest.mark.usefixtures("matters_at_once")
async def test_prepared_transactions_are_named_with_what_ends_them(server_with_two_phases: PostgreSQL) -> None:
    place = Place(server_with_two_phases.url)
    await place.create()
    with psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (n int)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'it''s old'")
        (found,) = await place.store.old_snapshots()
        assert (found.pid, found.application) == (0, "prepared transaction it's old")
        check = diagnose_old_snapshot(found, "PostgreSQL")
        assert check.found.startswith("prepared transaction it's old, user postdate has held a snapshot for ")
        assert check.mend.endswith(": ROLLBACK PREPARED 'it''s old'")
        connection.execute(found.mend.encode())
        assert await place.store.old_snapshots() == []
    await place.close()


def test_a_slot_is_dropped_not_terminated() -> None:
    slot = OldSnapshot(
        0, "replication slot s", "", timedelta(0), "9 transactions behind", "SELECT pg_drop_replication_slot('s')"
    )
    check = diagnose_old_snapshot(slot, "PostgreSQL")
    assert check.found.startswith("replication slot s has held a snapshot")
    assert check.mend.endswith(": SELECT pg_drop_replication_slot('s')")
