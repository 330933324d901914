"""Every saga store keeps every promise of its port; one that does not is caught."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests import mariadb_subjects
from tests.conftest import as_another_process
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.sqlserver_subjects import VARIABLE, SqlServerStoreSubject, sqlserver_subjects

from postdate import (
    LocalTransport,
    MemorySagaStore,
    PostgresOutbox,
    PostgresSagaStore,
    PostgresTransport,
    SqliteOutbox,
    SqliteSagaStore,
    Transport,
)
from postdate.backends.mariadb.schema import MariaDbOutbox, MariaDbSagaStore
from postdate.backends.sqlserver.schema import SqlServerOutbox, SqlServerSagaStore
from postdate.errors import SagaConflict, StoreFromNewerVersion, StoreNotSetUp
from postdate.ports import Correlation, OutboxStore, SagaChange, SagaChangeKind, SagaRecord, SagaStore
from postdate.testing import Check, ConformanceFailure, SagaStoreSubject, saga_checks


class MemorySubject(SagaStoreSubject):
    def __init__(self, opens: Callable[[], SagaStore] = MemorySagaStore) -> None:
        self._opens = opens

    def open(self) -> SagaStore:
        return self._opens()


class SqliteSubject(SagaStoreSubject):
    def __init__(self, folder: Path) -> None:
        self._path = folder / "sagas.db"

    def open(self) -> SagaStore:
        return SqliteSagaStore(self._path, synchronous="normal")

    def open_elsewhere(self) -> SagaStore:
        return as_another_process(self.open)

    def transport(self) -> Transport:
        return LocalTransport(self._path, synchronous="normal")

    def outbox(self) -> OutboxStore:
        return SqliteOutbox(self._path, synchronous="normal")


class PostgresSubject(SagaStoreSubject):
    def __init__(self, url: str) -> None:
        self._url, self.schema = url, fresh_schema()

    def open(self) -> SagaStore:
        return PostgresSagaStore(self._url, schema=self.schema)

    def open_elsewhere(self) -> SagaStore:
        return self.open()

    def transport(self) -> Transport:
        return PostgresTransport(self._url, schema=self.schema)

    def outbox(self) -> OutboxStore:
        return PostgresOutbox(self._url, schema=self.schema)

    def drop(self) -> None:
        drop_schema(self._url, self.schema)


class MariaDbSubject(SagaStoreSubject):
    def __init__(self, url: str) -> None:
        self._url, self.schema = url, mariadb_subjects.fresh_schema()

    def open(self) -> SagaStore:
        return MariaDbSagaStore(self._url, schema=self.schema)

    def open_elsewhere(self) -> SagaStore:
        return self.open()

    def outbox(self) -> OutboxStore:
        return MariaDbOutbox(self._url, schema=self.schema)

    def drop(self) -> None:
        mariadb_subjects.drop_schema(self._url, self.schema)


class SqlServerSubject(SagaStoreSubject):
    """Run where POSTDATE_SQLSERVER_URL names a server."""

    def __init__(self, url: str) -> None:
        self._place = SqlServerStoreSubject(url)

    def open(self) -> SagaStore:
        return SqlServerSagaStore(self._place.url, schema=self._place.schema)

    def open_elsewhere(self) -> SagaStore:
        return self.open()

    def outbox(self) -> OutboxStore:
        return SqlServerOutbox(self._place.url, schema=self._place.schema)

    def drop(self) -> None:
        self._place.drop()


@pytest.fixture(params=["memory", "sqlite", "postgres", "mariadb", *(["sqlserver"] if sqlserver_subjects() else [])])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SagaStoreSubject]:
    if request.param in {"memory", "sqlite"}:
        yield MemorySubject() if request.param == "memory" else SqliteSubject(tmp_path)
        return
    if request.param == "sqlserver":
        subject: PostgresSubject | MariaDbSubject | SqlServerSubject = SqlServerSubject(os.environ[VARIABLE])
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        subject = PostgresSubject(url) if request.param == "postgres" else MariaDbSubject(url)
    yield subject
    subject.drop()


@pytest.mark.parametrize("check", saga_checks(), ids=str)
async def test_saga_store(check: Check[SagaStoreSubject], subject: SagaStoreSubject) -> None:
    await check(subject)


async def test_without_its_table_a_store_says_what_to_do(subject: SagaStoreSubject) -> None:
    store = subject.open()
    if store.capabilities.durable:
        with pytest.raises(StoreNotSetUp, match=r"no table of sagas; run `postdate setup --sagas`"):
            await store.find("Order", Correlation("order_id", "o-1"))
    else:
        assert await store.find("Order", Correlation("order_id", "o-1")) is None
    await store.close()


async def test_tables_of_a_later_version_are_left_alone(tmp_path: Path, postgres_url: str) -> None:
    file, schema = SqliteSagaStore(tmp_path / "sagas.db"), fresh_schema()
    database = PostgresSagaStore(postgres_url, schema=schema)
    try:
        for store in (file, database):
            await store.setup()
        later = "INSERT INTO postdate_migration VALUES (99, 'later', 'saga')"
        file.file.write_blocking(lambda tx: tx.execute(later))
        marks = f"INSERT INTO {database.database.names.name_of('migration')} VALUES ('saga', 99, 'later')"
        database.database.run_blocking(lambda c: c.execute(marks.replace("%%", "%").encode()))
        for store in (file, database):
            with pytest.raises(StoreFromNewerVersion, match="newer Postdate"):
                await store.setup()
    finally:
        await file.close()
        await database.close()
        drop_schema(postgres_url, schema)


# --- what is broken is caught ----------------------------------------------------------------------------------------


class LastOneWins(MemorySagaStore):
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        for change in changes:
            now = await self.load(change.record.saga_type, change.record.saga_id)
            version = 0 if now is None else now.version
            await super().apply([replace(change, record=replace(change.record, version=version))])


class OneByOne(MemorySagaStore):
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        for change in changes:
            await super().apply([change])


class TwoOfAKind(MemorySagaStore):
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        for change in changes:
            try:
                await super().apply([change])
            except SagaConflict:
                if change.kind is not SagaChangeKind.CREATED:
                    raise
                record = replace(change.record, version=1)
                self._records[record.saga_type, record.saga_id] = record


class AnyProperty(MemorySagaStore):
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        return await super().find(saga_type, replace(correlation, property="order_id"))


class AnyType(MemorySagaStore):
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        return next((record for (_, id_), record in self._records.items() if id_ == saga_id), None)


class NeverForgets(MemorySagaStore):
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        await super().apply([c for c in changes if c.kind is not SagaChangeKind.COMPLETED])


class StaleVersions(MemorySagaStore):
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        found = await super().find(saga_type, correlation)
        return None if found is None else replace(found, version=1)


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (LastOneWins, "sagas.what_was_changed_meanwhile_is_not_changed_again"),
        (OneByOne, "sagas.changes_are_applied_together_or_not_at_all"),
        (TwoOfAKind, "sagas.a_correlation_has_one_instance_of_a_type"),
        (TwoOfAKind, "sagas.of_several_creators_all_but_one_are_told"),
        (AnyProperty, "sagas.an_instance_is_found_by_type_property_and_value"),
        (AnyType, "sagas.an_instance_is_loaded_by_type_and_id"),
        (NeverForgets, "sagas.a_completed_instance_is_gone_and_its_correlation_free"),
        (StaleVersions, "sagas.every_update_makes_the_next_version"),
    ],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
async def test_a_broken_saga_store_is_caught(broken: Callable[[], SagaStore], caught_by: str) -> None:
    (check,) = [check for check in saga_checks() if str(check) == caught_by]
    with pytest.raises((ConformanceFailure, SagaConflict)):
        await check(MemorySubject(broken))
