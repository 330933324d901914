"""Old records are removed in every store that can do it, and counted; ids stay known as long as they should."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import anyio
import psycopg
import pytest
from tests.mariadb_subjects import drop_schema as drop_database
from tests.mariadb_subjects import fresh_schema as fresh_database
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quote_name
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.postgres.names import SchemaNames
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.sqlite.bulk import _PRUNE_OLD
from postdate.backends.sqlite.connection import connect, create_schema
from postdate.backends.sqlite.store import SqliteStore
from postdate.errors import DuplicateMessage
from postdate.messages import DelayedMessage
from postdate.pipeline.audit.stores import AuditedStore, read_pruned_counts
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Outcome, RecordKind, Scan, ScanPart, TransactionMode
from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.scanning import PRUNED_ID, PrunableStore, PrunedCounts

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
AnyStore = SqliteStore | PostgresStore | MariaDbStore


class StoredRecord(NamedTuple):
    """A record as a scan returns it."""

    number: int
    kind: int
    message_id: str
    at: int
    due: int | None
    destination: str | None
    detail: str | None


COLUMNS = StoredRecord._fields


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyStore]:
    """A store that does not exist yet."""
    if request.param == "sqlite":
        yield SqliteStore(tmp_path / "messages.db", synchronous="normal")
        return
    url = request.getfixturevalue(f"{request.param}_url")
    if request.param == "postgres":
        schema = fresh_schema()
        yield PostgresStore(url, schema=schema)
        drop_schema(url, schema)
        return
    database = fresh_database()
    session = MariaDbServer(url).connect()
    session.change(f"CREATE DATABASE {quote_name(database)}")
    session.close()
    yield MariaDbStore(url, schema=database)
    drop_database(url, database)


def records(store: PrunableStore) -> list[tuple[StoredRecord, ScanPart]]:
    """Return every record with the share that it is in."""
    return [
        (StoredRecord(*row), part)
        for part in store.scan_parts("records", 2)
        for page in store.scan(Scan("records", COLUMNS), part, 100)
        for row in page
    ]


def plain(store: PrunableStore) -> list[StoredRecord]:
    return sorted(record for record, _ in records(store))


async def delivered(store: AnyStore, *names: str) -> None:
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    await store.store_many([DelayedMessage(name, NOW, "queue") for name in names], NOW)
    claims = await store.claim_due(NOW + timedelta(seconds=1), 100)
    await store.finish(claims, Outcome.DELIVERED, NOW + timedelta(seconds=1), "50 % of it's \\ there")


async def mark_archived(store: AnyStore, message_id: str) -> None:
    """Mark the *scheduled* record of a message, as archives of earlier versions did."""
    condition = f"message_id = '{message_id}' AND kind = 1"
    if isinstance(store, SqliteStore):
        await store.file.write(lambda tx: tx.execute(f"UPDATE record SET detail = 'archived' WHERE {condition}"))
    elif isinstance(store, PostgresStore):
        table = store.database.names.qualified_name("record")
        update = f"UPDATE {table} SET detail = 'archived' WHERE {condition}".encode()
        store.database.run_blocking(lambda connection: connection.execute(update))
    else:
        table = store._tables.names.name_of("record")
        update = f"UPDATE {table} SET detail = 'archived' WHERE {condition}"
        store._pool.transaction_blocking(lambda session: session.change(update, {}))


async def test_the_last_number_of_a_file_is_never_given_twice(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "messages.db", synchronous="normal")
    await delivered(store, "m-1")
    assert prune_all(store, OLD) == 1
    (marker,) = pruned(store)
    await store.store(DelayedMessage("m-2", NOW, "queue"), NOW)
    assert [(r.number, r.message_id) for r in plain(store)] == [(2, "m-1"), (3, PRUNED_ID), (4, "m-2")]
    assert marker.number == 3
    await store.close()


async def test_a_store_knows_the_others_that_share_its_records(store: AnyStore) -> None:
    assert isinstance(store, PrunableStore)
    await delivered(store, "m-1")
    expected = [] if isinstance(store, SqliteStore) else ["orders.timeouts"]
    assert list(store.tables_of_stores()) == expected
    assert store.records_in_commit_order is isinstance(store, SqliteStore)
    await store.close()


# --- what is removed for its age --------------------------------------------------------------------------------------

OLD = NOW + timedelta(days=31)
"""Everything of today is from before it, and today is its due time."""
A_DAY = timedelta(days=1)


def prune_all(store: PrunableStore, before: datetime, width: int = 3) -> int:
    return sum(
        store.prune_before(ScanPart(first, min(first + width, whole.end)), before, OLD)
        for whole in store.scan_parts("records", 1)
        for first in range(whole.first, whole.end, width)
    )


def pruned(store: PrunableStore) -> list[StoredRecord]:
    return [record for record in plain(store) if record.kind == RecordKind.PRUNED]


async def finish(store: AnyStore, message_id: str, outcome: Outcome, now: datetime) -> None:
    (claim,) = [claim for claim in await store.claim_due(now, 100) if claim.message.message_id == message_id]
    await store.finish([claim], outcome, now, "why")


async def test_what_is_over_for_long_is_removed_and_counted(store: AnyStore) -> None:
    assert isinstance(store, PrunableStore)
    await delivered(store, "over", "archived")
    await mark_archived(store, "archived")
    for failed in ("failed", "failed, and came back"):
        await store.store(DelayedMessage(failed, NOW, "queue"), NOW)
        await finish(store, failed, Outcome.FAILED, NOW + A_DAY)
    await store.store(DelayedMessage("failed, and came back", NOW, "queue"), NOW + A_DAY)
    await finish(store, "failed, and came back", Outcome.DELIVERED, NOW + A_DAY)
    await store.store(DelayedMessage("moved", NOW, "queue"), NOW)
    assert await store.reschedule("moved", OLD, NOW)
    await finish(store, "moved", Outcome.DELIVERED, OLD + A_DAY)
    await store.store(DelayedMessage("cancelled", NOW, "queue"), NOW)
    assert await store.cancel("cancelled", NOW)
    await store.store(DelayedMessage("moved to be earlier", OLD + A_DAY, "queue"), NOW)
    assert await store.reschedule("moved to be earlier", NOW, NOW)
    await finish(store, "moved to be earlier", Outcome.DELIVERED, NOW + A_DAY)
    await store.store(DelayedMessage("moved away", NOW, "queue"), NOW)
    (claim,) = [each for each in await store.claim_due(NOW + A_DAY, 9) if each.message.message_id == "moved away"]
    await store.finish([claim], Outcome.CANCELLED, NOW, f"{MOVED_AWAY}1")
    for key in (1, 2, 11):
        await store.store(DelayedMessage(f"key~{key:08d}", NOW, "queue"), NOW)
        await finish(store, f"key~{key:08d}", Outcome.DELIVERED, NOW + A_DAY)
    await store.store(DelayedMessage("no key~of mine", NOW, "queue"), NOW)
    await finish(store, "no key~of mine", Outcome.DELIVERED, NOW + A_DAY)
    await store.store(DelayedMessage("overdue", NOW, "queue"), NOW)
    (claim,) = [each for each in await store.claim_due(NOW + A_DAY, 9) if each.message.message_id == "overdue"]
    await store.retry_later(claim, NOW + A_DAY, NOW + A_DAY, "why")
    await store.store(DelayedMessage("due later", OLD + A_DAY, "queue"), NOW)
    before = await store.record_counts()

    gone = prune_all(store, OLD) + prune_all(store, OLD)  # that it came back goes after the failure
    left = {(r.message_id, RecordKind(r.kind).name) for r in plain(store) if r.kind != RecordKind.PRUNED}
    assert left == {
        ("archived", "SCHEDULED"),  # which keeps its id known
        ("failed", "SCHEDULED"),
        ("failed", "FAILED"),
        ("moved", "SCHEDULED"),
        ("moved", "RESCHEDULED"),
        ("moved", "DELIVERED"),
        ("moved to be earlier", "SCHEDULED"),
        ("moved to be earlier", "RESCHEDULED"),
        ("moved to be earlier", "DELIVERED"),
        ("moved away", "CANCELLED"),
        ("key~00000011", "SCHEDULED"),  # the next one under this key gets another id
        ("overdue", "SCHEDULED"),
        ("overdue", "RETRIED"),
        ("due later", "SCHEDULED"),
    }
    assert gone == sum(before.values()) - len(left)
    assert await store.record_counts() == before
    assert prune_all(store, OLD) == 0
    with pytest.raises(DuplicateMessage):
        await store.store(DelayedMessage("archived", OLD, "queue"), OLD)
    await store.store(DelayedMessage("over", OLD, "queue"), OLD)  # its id is free

    # An operator who gives a longer time later does not make what is gone come back; and a damaged count ends nothing.
    (told,) = pruned(store)
    assert prune_all(store, OLD - A_DAY) == 0
    await store.cancel("overdue", NOW)
    assert prune_all(store, OLD - A_DAY) == 3
    (again,) = pruned(store)
    assert (again.message_id, again.due) == (PRUNED_ID, told.due)
    assert await store.record_counts() == {
        **before,
        RecordKind.SCHEDULED: before[RecordKind.SCHEDULED] + 1,  # the free id, once more
        RecordKind.CANCELLED: before[RecordKind.CANCELLED] + 1,
    }
    await store.close()


async def test_a_return_goes_after_the_failure_that_it_ends(store: AnyStore) -> None:
    """In whatever order shares are looked at: else the message would count as in the error queue for ever."""
    assert isinstance(store, PrunableStore)
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    await store.store(DelayedMessage("m", NOW, "queue"), NOW)
    await finish(store, "m", Outcome.FAILED, NOW + A_DAY)
    await store.store(DelayedMessage("m", NOW, "queue"), NOW + A_DAY)
    await finish(store, "m", Outcome.DELIVERED, NOW + A_DAY)
    await store.store(DelayedMessage("newest", OLD + A_DAY, "queue"), NOW)
    for record, part in reversed(records(store)):
        place = ScanPart(record.number, record.number + 1) if not isinstance(store, PostgresStore) else part
        store.prune_before(place, OLD, OLD)
    prune_all(store, OLD)
    assert {r.message_id for r in plain(store) if r.kind != RecordKind.PRUNED} == {"newest"}
    await store.close()


async def test_records_of_a_neighbour_are_left_to_it(postgres_url: str) -> None:
    """What is recorded beside a queue names no store: it goes with its message's."""
    schema = fresh_schema()
    mine, other = (PostgresStore(postgres_url, schema=schema, table=name) for name in ("mine", "other"))
    for each in (mine, other):
        await each.initialize("orders", TransactionMode.RECEIVE_ONLY)
        await each.setup()
    await other.store(DelayedMessage("m", NOW, "queue"), NOW)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for id_ in ("m", "of nobody"):
            record = SchemaNames(schema).name_of("record")
            insert = f"INSERT INTO {record} (at, due, kind, message_id) VALUES (%s, %s, 3, %s)"
            connection.execute(insert.encode(), (NOW, NOW, id_))
    assert prune_all(mine, OLD) == 1
    assert {record.message_id for record in plain(other) if record.kind == RecordKind.HANDLED} == {"m"}
    for each in (mine, other):
        await each.close()
    drop_schema(postgres_url, schema)


async def test_two_services_remove_each_record_once(store: AnyStore) -> None:
    assert isinstance(store, PrunableStore)
    await delivered(store, *(f"m-{number}" for number in range(60)), "newest")
    before = await store.record_counts()
    counts = list[int]()

    async def prune() -> None:
        counts.append(await anyio.to_thread.run_sync(prune_all, store, OLD))

    async with anyio.create_task_group() as group:
        group.start_soon(prune)
        group.start_soon(prune)
    assert await store.record_counts() == before
    left = [record for record in plain(store) if record.kind != RecordKind.PRUNED]
    assert sum(counts) == sum(before.values()) - len(left)
    assert len(left) <= 1  # a file keeps its last number
    await store.close()


def test_an_audit_of_several_stores_has_what_all_of_them_have_removed_and_the_latest_time(tmp_path: Path) -> None:
    """What was due before that is called lost in none of them."""
    found = list[AuditedStore]()
    for number, before in enumerate((OLD, NOW + A_DAY, None)):
        found.append(AuditedStore(f"{number}", StoreSpec(f"sqlite:///{tmp_path / f'{number}.db'}")))
        store = SqliteStore(tmp_path / f"{number}.db", synchronous="normal")
        anyio.run(delivered, store, "m", "newest")
        assert before is None or prune_all(store, before) == 4
        anyio.run(store.close)
    pruned = read_pruned_counts(found)
    assert (pruned.before, pruned.counts) == (OLD, {RecordKind.SCHEDULED: 4, RecordKind.DELIVERED: 4})


def test_pruned_records_are_added_up_and_damage_counts_nothing() -> None:
    told = [
        (NOW, '{"scheduled": 2}'),
        (OLD, '{"scheduled": 1, "no kind": 3}'),
        (None, "[1]"),
        (NOW, '{"delivered": 1}'),
    ]
    found = PrunedCounts.of(told)
    assert (found.before, found.counts) == (OLD, {RecordKind.SCHEDULED: 2, RecordKind.DELIVERED: 1})
    assert PrunedCounts.of([(OLD, found.plus(NOW, [1, 3]).detail)]).counts == {
        RecordKind.SCHEDULED: 3,
        RecordKind.DELIVERED: 1,
        RecordKind.HANDLED: 1,
    }


def test_sqlite_finds_what_happened_after_the_end_by_an_index_that_no_delivery_pays_for(tmp_path: Path) -> None:
    """A list in the condition of an index is made anew for each record: a fifth of the work of a delivery."""
    connection = connect(tmp_path / "postdate.db")
    create_schema(connection, tmp_path / "postdate.db")
    conditions = [
        sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql LIKE '%INDEX% WHERE %'")
    ]
    assert len(conditions) > 3
    assert not [sql for sql in conditions if " IN (" in sql.upper()]
    plan = connection.execute(f"EXPLAIN QUERY PLAN {_PRUNE_OLD}", {"first": 0, "end": 9, "before": 0}).fetchall()
    assert sum("USING INDEX record_after_end" in str(step) for step in plan) == 2
    connection.close()
