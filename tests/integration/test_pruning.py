"""Records are marked, taken out and put back in every store that can do it; ids stay known as long as they should."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.mariadb_subjects import drop_schema as drop_database
from tests.mariadb_subjects import fresh_schema as fresh_database
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quoted
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.sqlite.store import SqliteStore
from postdate.errors import DuplicateMessage, StoreError
from postdate.messages import DelayedMessage
from postdate.ports import Outcome, Scan, ScanPart, TransactionMode
from postdate.ports.scanning import ArchivableStore, StoredRecord

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
AnyStore = SqliteStore | PostgresStore | MariaDbStore
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
    session.change(f"CREATE DATABASE {quoted(database)}")
    session.close()
    yield MariaDbStore(url, schema=database)
    drop_database(url, database)


def records(store: ArchivableStore) -> list[tuple[StoredRecord, ScanPart]]:
    """Return every record with the share that it is in."""
    return [
        (StoredRecord(*row), part)
        for part in store.scan_parts("records", 2)
        for page in store.scan(Scan("records", COLUMNS), part, 100)
        for row in page
    ]


def change(act: Any, chosen: list[tuple[StoredRecord, ScanPart]]) -> int:
    return sum(act(part, [record.number]) for record, part in chosen)


def plain(store: ArchivableStore) -> list[StoredRecord]:
    return sorted(record for record, _ in records(store))


async def delivered(store: AnyStore, *names: str) -> None:
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    await store.store_many([DelayedMessage(name, NOW, "queue") for name in names], NOW)
    claims = await store.claim_due(NOW + timedelta(seconds=1), 100)
    await store.finish(claims, Outcome.DELIVERED, NOW + timedelta(seconds=1), "50 % of it's \\ there")


async def test_records_go_and_come_back(store: AnyStore) -> None:
    assert isinstance(store, ArchivableStore)
    names = ("m-1", "m-2", "m'3 %s \\")
    await delivered(store, *names, "newest")
    before = plain(store)
    gone = [(record, part) for record, part in records(store) if record.message_id in names]
    scheduled = [each for each in gone if each[0].kind == 1]
    others = [each for each in gone if each[0].kind != 1]

    assert change(store.mark_archived, gone) == 3
    assert change(store.mark_archived, [e for e in records(store) if e[0].message_id in names]) == 0
    assert change(store.prune, others) == 3
    assert change(store.prune, others) == 0
    left = plain(store)
    assert [(r.kind, r.detail) for r in left if r.message_id in names] == [(1, "archived")] * 3
    assert [r for r in left if r.message_id == "newest"] == [r for r in before if r.message_id == "newest"]
    with pytest.raises(DuplicateMessage):
        await store.store(DelayedMessage("m-1", NOW, "queue"), NOW)

    archived = [record for record, _ in gone]
    assert store.restore([r for r in archived if r.message_id == "m-1"]) == 1
    assert store.restore(archived) == 2
    assert store.restore(archived) == 0
    assert plain(store) == before

    assert change(store.prune, others) == 3
    assert change(store.prune, [e for e in records(store) if e[0].message_id in names]) == len(scheduled)
    await store.store(DelayedMessage("m-2", NOW + timedelta(days=1), "queue"), NOW)
    assert store.restore(archived) == 2  # the other id is in use again
    await store.cancel("m-2", NOW)
    assert [r for r in plain(store) if r.message_id != "m-2"] == [r for r in before if r.message_id != "m-2"]
    assert len(plain(store)) == len({record.number for record in plain(store)})
    await store.close()


async def test_new_records_of_a_new_store_are_numbered_after_those_that_came_back(store: AnyStore) -> None:
    assert isinstance(store, ArchivableStore)
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    at = 1_700_000_000_000_000
    old = [StoredRecord(5_000, 1, "old", at, at, "queue", None), StoredRecord(5_001, 2, "old", at, at, "queue", None)]
    assert store.restore(old) == 1
    await store.store(DelayedMessage("new", NOW, "queue"), NOW)
    assert [(r.message_id, r.number > 5_001) for r in plain(store)] == [("old", False), ("old", False), ("new", True)]
    await store.close()


async def test_numbers_are_reserved_for_what_comes_back_while_others_draw_them(store: AnyStore) -> None:
    """Tasks restore the highest and the lowest at the same time, and a service schedules: no number is given twice."""
    assert isinstance(store, ArchivableStore)
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    at = 1_700_000_000_000_000
    messages = [
        [StoredRecord(2 * n + kind, kind, f"old-{n}", at, at, "queue", None) for kind in (1, 2)] for n in range(40)
    ]
    newest = messages[-1][-1]
    assert store.restore([newest]) == 0  # without its scheduled record
    assert plain(store) == []
    if isinstance(store, SqliteStore):
        assert store.restore(messages.pop()) == 1

    async def restore(chosen: list[list[StoredRecord]]) -> None:
        for each in chosen:
            assert await anyio.to_thread.run_sync(store.restore, each) == 1

    async with anyio.create_task_group() as group:
        group.start_soon(restore, messages[::2])
        group.start_soon(restore, messages[1::2])
        for n in range(30):
            await store.store(DelayedMessage(f"new-{n}", NOW, "queue"), NOW)
    found = plain(store)
    assert len({record.number for record in found}) == len(found) == 2 * 40 + 30
    assert min(record.number for record in found if record.message_id.startswith("new")) > newest.number
    await store.close()


async def test_a_lower_number_never_sets_the_count_back(store: AnyStore) -> None:
    assert isinstance(store, ArchivableStore)
    await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    for number in (9_000, 50):
        pair = [StoredRecord(number + kind, kind, f"m-{number}", 0, 0, "queue", None) for kind in (1, 2)]
        assert store.restore(pair) == 1
    await store.store(DelayedMessage("new", NOW, "queue"), NOW)
    assert plain(store)[-1].message_id == "new"
    await store.close()


async def test_a_number_in_use_is_not_taken_for_an_id_in_use(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "messages.db", synchronous="normal")
    await delivered(store, "m-1")
    before = plain(store)
    with pytest.raises(StoreError):
        store.restore([StoredRecord(1, 1, "other", 0, 0, "queue", None)])
    assert plain(store) == before
    await store.close()


async def test_the_last_number_of_a_file_is_never_given_twice(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "messages.db", synchronous="normal")
    await delivered(store, "m-1")
    assert change(store.prune, records(store)) == 1
    await store.store(DelayedMessage("m-2", NOW, "queue"), NOW)
    assert [(r.number, r.message_id) for r in plain(store)] == [(2, "m-1"), (3, "m-2")]
    await store.close()


async def test_a_store_knows_the_others_that_share_its_records(store: AnyStore) -> None:
    assert isinstance(store, ArchivableStore)
    await delivered(store, "m-1")
    expected = [] if isinstance(store, SqliteStore) else ["orders.timeouts"]
    assert list(store.tables_of_stores()) == expected
    assert store.records_in_commit_order is isinstance(store, SqliteStore)
    await store.close()
