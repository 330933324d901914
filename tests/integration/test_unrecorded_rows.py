"""Rows that versions up to 468e06b left with ``recording = "none"``: of what had left its store nothing was kept."""

import sqlite3
from contextlib import closing

import psycopg
import pytest
from azure.data.tables import TableClient, UpdateMode
from tests.azure_store_subjects import AzureTableStoreSubject
from tests.conftest import SqliteStoreSubject
from tests.mariadb_subjects import MariaDbStoreSubject
from tests.postgres_subjects import PostgresStoreSubject
from tests.redis_subjects import RedisStoreSubject

from postdate.backends.azure.table_names import records_table
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames
from postdate.core.changes import administrable_store
from postdate.errors import DuplicateMessage
from postdate.ports import Outcome, RecordKind
from postdate.testing import Damage, StoreSubject
from postdate.testing.store_suite.subject import NOW, SECOND, ids, message, open_claiming, open_with_rows


def forget(subject: StoreSubject) -> None:
    """Delete all records by hand."""
    match subject:
        case SqliteStoreSubject():
            with closing(sqlite3.connect(subject.path)) as file, file:
                file.execute("DELETE FROM record")
        case PostgresStoreSubject():
            with psycopg.connect(subject.url) as connection:
                connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (subject.schema,))
                connection.execute("DELETE FROM record")
        case MariaDbStoreSubject():
            with closing(MariaDbServer(subject.url).connect()) as session:
                session.change(f"DELETE FROM {MariaDbNames(subject.schema, 'any').name_of('record')}", {})
        case RedisStoreSubject():
            for key in subject.prefix.all_keys():
                if b":r:" in key or key.endswith(b":counts"):
                    subject.prefix.client.delete(key)
        case AzureTableStoreSubject():
            with TableClient.from_connection_string(subject.connection, records_table(subject.table)) as client:
                for entity in client.query_entities("PartitionKey ge 'id0' and PartitionKey le 'id9'"):
                    client.delete_entity(entity)
        case _:
            raise NotImplementedError(subject)


def forget_scheduling(subject: AzureTableStoreSubject) -> None:
    """Leave of an id what makes it unique: where its message waits."""
    with TableClient.from_connection_string(subject.connection, records_table(subject.table)) as client:
        for entity in client.query_entities("PartitionKey ge 'id0' and PartitionKey le 'id9'"):
            del entity["ScheduledAt"], entity["ScheduledDue"]
            client.update_entity(entity, UpdateMode.REPLACE)


@pytest.mark.parametrize("store_subject", ["SqliteStore", "RedisStore", "AzureTableStore"], indirect=True)
async def test_what_waits_without_a_record_is_delivered_beside_what_is_stored_now(store_subject: StoreSubject) -> None:
    """In a file of SQLite so was what had been rescheduled: its number is not given to the next one."""
    async with open_claiming(store_subject) as store:
        await store.store(message("old"), NOW)
        if isinstance(store_subject, AzureTableStoreSubject):
            forget_scheduling(store_subject)
        else:
            forget(store_subject)
        await store.store(message("new"), NOW)
        claims = await store.claim_due(NOW + SECOND, 10)
        assert sorted(ids(claims)) == ["new", "old"]
        assert await store.finish(claims, Outcome.DELIVERED, NOW) == 2
        operator = administrable_store(store)
        assert [record.kind for record in await operator.history("old")] == [RecordKind.DELIVERED]
        assert len(await operator.history("new")) == 2


@pytest.mark.parametrize("store_subject", ["RedisStore", "AzureTableStore"], indirect=True)
async def test_the_id_of_what_waits_without_a_record_is_known(store_subject: StoreSubject) -> None:
    async with open_claiming(store_subject) as store:
        await store.store(message(), NOW)
        if isinstance(store_subject, AzureTableStoreSubject):
            forget_scheduling(store_subject)
        else:
            forget(store_subject)
        with pytest.raises(DuplicateMessage):
            await store.store(message(), NOW)


@pytest.mark.parametrize(
    "store_subject", ["SqliteStore", "PostgresStore", "MariaDbStore", "RedisStore", "AzureTableStore"], indirect=True
)
async def test_what_is_unreadable_without_a_record_can_be_discarded(store_subject: StoreSubject) -> None:
    async with open_with_rows(store_subject) as opened:
        assert opened is not None
        store, rows = opened
        await store.store_many([message("gone"), message("other", NOW + SECOND)], NOW)
        rows.damage("gone", Damage.DUE)
        assert await store.claim_due(NOW + SECOND, 10) == []
        forget(store_subject)
        (row,) = await rows.adapter.list_unreadable(10)
        await rows.adapter.discard_unreadable(row.number, NOW)
        assert await rows.adapter.count_unreadable() == 0
        assert ids(await store.claim_due(NOW + 2 * SECOND, 10)) == ["other"]
