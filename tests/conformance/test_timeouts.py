"""Every storage of timeouts keeps every promise of its port."""

import inspect
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.sql import SQL, Identifier, Literal
from tests.conformance.test_documents import guaranteed_by
from tests.conftest import as_another_process
from tests.mariadb_subjects import drop_schema as drop_mariadb
from tests.mariadb_subjects import fresh_schema as fresh_mariadb
from tests.postgres_subjects import drop_schema as drop_postgres
from tests.postgres_subjects import fresh_schema as fresh_postgres
from tests.sqlserver_subjects import SqlServerStoreSubject, sqlserver_subjects

from postdate import (
    LocalTransport,
    MariaDbTimeouts,
    MemoryTimeouts,
    PostgresTimeouts,
    PostgresTransport,
    SqliteTimeouts,
    SqlServerTimeouts,
)
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quote_name
from postdate.backends.sql.timeouts_layout import table_name
from postdate.backends.sqlite.connection import connect
from postdate.backends.sqlserver.connection import SqlServerInstance
from postdate.backends.sqlserver.schema import SqlServerNames
from postdate.backends.sqlserver.timeouts import round_up_to_datetime
from postdate.ports import timeouts as ports
from postdate.testing import Check
from postdate.testing.timeout_suite import ENDPOINT, TimeoutSubject, timeout_checks

TABLE = table_name(ENDPOINT)


class MemorySubject(TimeoutSubject):
    durable = False

    def open(self) -> MemoryTimeouts:
        return MemoryTimeouts()


class CoarseTimeouts(MemoryTimeouts):
    """Keeps due times as a ``datetime`` of SQL Server does, which can be found out without one."""

    async def add(self, timeout: ports.Timeout) -> bool:
        return await super().add(replace(timeout, due=round_up_to_datetime(timeout.due)))


class CoarseSubject(TimeoutSubject):
    durable = False
    precision = timedelta(milliseconds=4)

    def open(self) -> CoarseTimeouts:
        return CoarseTimeouts()


class SqliteSubject(TimeoutSubject):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "timeouts.db"

    def open(self) -> SqliteTimeouts:
        return SqliteTimeouts(self.path, synchronous="normal")

    def open_elsewhere(self) -> SqliteTimeouts:
        return as_another_process(self.open)

    @contextmanager
    def remove_elsewhere(self, timeout_id: str) -> Generator[None]:
        with closing(connect(self.path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f'DELETE FROM "{TABLE}" WHERE "Id" = ?', (timeout_id,))
            yield

    def transport(self) -> LocalTransport:
        return LocalTransport(self.path, synchronous="normal")


class PostgresSubject(TimeoutSubject):
    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_postgres()

    def open(self) -> PostgresTimeouts:
        return PostgresTimeouts(self.url, schema=self.schema)

    @contextmanager
    def remove_elsewhere(self, timeout_id: str) -> Generator[None]:
        with closing(psycopg.connect(self.url)) as connection:
            table = Identifier(self.schema, TABLE)
            delete = SQL('DELETE FROM {} WHERE "Id" = {}').format(table, Literal(timeout_id))
            connection.execute(delete)
            yield

    def transport(self) -> PostgresTransport:
        return PostgresTransport(self.url, schema=self.schema)

    def drop(self) -> None:
        drop_postgres(self.url, self.schema)


class MariaDbSubject(TimeoutSubject):
    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_mariadb()

    def open(self) -> MariaDbTimeouts:
        return MariaDbTimeouts(self.url, schema=self.schema)

    @contextmanager
    def remove_elsewhere(self, timeout_id: str) -> Generator[None]:
        with closing(MariaDbServer(self.url).connect()) as session:
            session.begin()
            table = f"{quote_name(self.schema)}.{quote_name(TABLE)}".replace("%", "%%")
            session.change(f"DELETE FROM {table} WHERE Id = %(id)s", {"id": timeout_id})
            yield

    def drop(self) -> None:
        drop_mariadb(self.url, self.schema)


class SqlServerSubject(TimeoutSubject):
    precision = timedelta(milliseconds=4)

    def __init__(self, url: str) -> None:
        self.store = SqlServerStoreSubject(url)

    def open(self) -> SqlServerTimeouts:
        return SqlServerTimeouts(self.store.url, schema=self.store.schema)

    @contextmanager
    def remove_elsewhere(self, timeout_id: str) -> Generator[None]:
        with closing(SqlServerInstance(self.store.url).connect()) as session:
            session.begin()
            table = SqlServerNames(self.store.schema, "any").qualified_name(TABLE).replace("%", "%%")
            session.change(f"DELETE FROM {table} WHERE [Id] = CAST(%(id)s AS uniqueidentifier)", {"id": timeout_id})
            yield

    def drop(self) -> None:
        self.store.drop()


SUBJECTS: dict[str, Callable[[pytest.FixtureRequest], TimeoutSubject]] = {
    "MemoryTimeouts": lambda _request: MemorySubject(),
    "CoarseTimeouts": lambda _request: CoarseSubject(),
    "SqliteTimeouts": lambda request: SqliteSubject(request.getfixturevalue("tmp_path")),
    "PostgresTimeouts": lambda request: PostgresSubject(request.getfixturevalue("postgres_url")),
    "MariaDbTimeouts": lambda request: MariaDbSubject(request.getfixturevalue("mariadb_url")),
    **{
        name.replace("Store", "Timeouts"): lambda _request, url=url: SqlServerSubject(url)
        for name, url in sqlserver_subjects().items()
    },
}


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[TimeoutSubject]:
    """Each storage, empty."""
    subject = SUBJECTS[request.param](request)
    yield subject
    drop = getattr(subject, "drop", None)
    if drop is not None:
        drop()


@pytest.mark.parametrize("check", timeout_checks(), ids=str)
async def test_timeouts(check: Check[TimeoutSubject], subject: TimeoutSubject) -> None:
    await check(subject)


def test_without_a_server_sql_server_is_not_in_the_suite() -> None:
    assert ("SqlServerTimeouts" in SUBJECTS) == bool(os.environ.get("POSTDATE_SQLSERVER_URL"))


def test_every_check_has_a_name_of_its_own_and_says_what_it_proves() -> None:
    names = [str(check) for check in timeout_checks()]
    assert len(set(names)) == len(names)
    assert all(check.proves.endswith(".") for check in timeout_checks())


def test_every_check_is_a_guarantee_of_the_port_and_every_guarantee_a_check() -> None:
    named = {
        name
        for port in (ports.TimeoutPersister, ports.TimeoutPersister, ports.TimeoutPersister)
        for method in vars(port).values()
        for name in guaranteed_by(inspect.getdoc(getattr(method, "fget", method)) or "")
    }
    assert named == {str(check) for check in timeout_checks()}
