"""Tables of timeouts as a .NET endpoint writes them, made by plain SQL, and an old manager that works on them."""

import itertools
import json
import os
import sqlite3
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from pymysql.constants import CLIENT

from postdate import SystemClock
from postdate.backends.mariadb.timeouts_source import MariaDbDialect
from postdate.backends.postgres.timeouts_source import PostgresDialect
from postdate.backends.sql.timeouts_migration.dialect import Dialect
from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.backends.sqlite.timeouts_source import SqliteDialect
from postdate.ports.migrating import MigrationRun, MigrationStatus
from postdate.wiring.sources import migration_source

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
MARGIN = timedelta(minutes=10)
NEXT_YEAR = (SystemClock().now() + timedelta(days=365)).replace(microsecond=0)
LONG_AGO = datetime(2012, 1, 1, tzinfo=UTC)
_NUMBERS = itertools.count(1)
NO_SAGA = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True)
class Row:
    """A timeout as it stands in its table."""

    due: datetime
    timeout_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    destination: str | None = "Sales"
    headers: str = json.dumps({"NServiceBus.MessageId": "m-1", "NServiceBus.Timeout.Expire": "2100-01-01"})
    body: bytes | None = b"<xml/>"

    def values(self) -> tuple[Any, ...]:
        due = self.due.astimezone(UTC).replace(tzinfo=None)
        return self.timeout_id, self.destination, NO_SAGA, self.body, due, self.headers, "6.6.5.0"


def new_run(endpoint: str = "Sales.Orders", cutoff: datetime = datetime(2012, 1, 1, tzinfo=UTC)) -> MigrationRun:
    started = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
    return MigrationRun(uuid.uuid4().hex, endpoint, MigrationStatus.PREPARING, {"target": "x"}, cutoff, started)


class Place(ABC):
    """A database with tables of timeouts; every connection that it opens is one of an old manager."""

    upper_case_ids = True
    mark = "%s"

    def __init__(self, address: str, schema: str | None) -> None:
        self.address, self.schema = address, schema
        self._sources: list[MigrationSource] = []

    def source(self, **settings: Any) -> MigrationSource:
        source = migration_source(self.address, schema=self.schema, **settings)
        self._sources.append(source)
        return source

    @abstractmethod
    def dialect(self) -> Dialect:
        """Return what a source of one's own is made of."""

    def holds_rows(self) -> bool:
        """Return whether somebody has rows of the table locked in a transaction."""
        skip = f"SELECT 1 FROM {self.table('Sales_Orders_TimeoutData')} FOR UPDATE SKIP LOCKED"
        all_of_them = f"SELECT 1 FROM {self.table('Sales_Orders_TimeoutData')}"
        with closing(self.connect()) as connection:
            free = len(self.execute(connection, skip).fetchall())
            return free < len(self.execute(connection, all_of_them).fetchall())

    @abstractmethod
    def connect(self) -> Any:
        """Return a connection of the driver's own, in autocommit mode."""

    @abstractmethod
    def execute(self, connection: Any, sql: str, values: Sequence[Any] = ()) -> Any:
        """Run a statement; return the cursor."""

    @abstractmethod
    def table(self, name: str) -> str:
        """Return a table as SQL."""

    @abstractmethod
    def create(self, table: str = "Sales_Orders_TimeoutData") -> None:
        """Create a table of timeouts."""

    @abstractmethod
    def tables(self) -> set[str]:
        """Return the names of all tables."""

    def insert(self, rows: Iterable[Row], table: str = "Sales_Orders_TimeoutData") -> list[Row]:
        written = list(rows)
        marks = ", ".join([self.mark] * 7)
        with closing(self.connect()) as connection:
            self.execute(connection, "BEGIN")
            for row in written:
                identity, *others = row.values()
                values = (identity.upper() if self.upper_case_ids else identity, *others)
                self.execute(connection, f"INSERT INTO {self.table(table)} VALUES ({marks})", values)
            self.execute(connection, "COMMIT")
        return written

    def rows(self, table: str = "Sales_Orders_TimeoutData") -> set[tuple[Any, ...]]:
        with closing(self.connect()) as connection:
            found = self.execute(connection, f"SELECT * FROM {self.table(table)}").fetchall()
        return {tuple(map(str, row)) for row in found}

    def ids(self, table: str = "Sales_Orders_TimeoutData") -> set[str]:
        return {row[0].lower() for row in self.rows(table)}

    def due(self, connection: Any, now: datetime) -> list[Any]:
        """Look for what is due, as an old manager does: by what is committed, and without any lock."""
        sql = (
            f"SELECT {self.quoted('Id')} FROM {self.table('Sales_Orders_TimeoutData')} WHERE {self.quoted('Time')} <= "
        )
        values = [now.astimezone(UTC).replace(tzinfo=None)]
        return [identity for (identity,) in self.execute(connection, sql + self.mark, values).fetchall()]

    def remove(self, connection: Any, identity: Any) -> bool:
        sql = f"DELETE FROM {self.table('Sales_Orders_TimeoutData')} WHERE {self.quoted('Id')} = {self.mark}"
        return self.execute(connection, sql, [identity]).rowcount == 1

    def quoted(self, name: str) -> str:
        return f'"{name}"'

    def drop(self) -> None:
        for source in self._sources:
            source.close()


class SqlitePlace(Place):
    """A file."""

    mark = "?"

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}", None)
        self.path = path
        with closing(self.connect()) as connection:
            connection.execute("PRAGMA journal_mode = wal")

    def dialect(self) -> Dialect:
        return SqliteDialect(self.path)

    def connect(self) -> Any:
        return sqlite3.connect(self.path, isolation_level=None, timeout=30, check_same_thread=False)

    def execute(self, connection: Any, sql: str, values: Sequence[Any] = ()) -> Any:
        texts = [each.isoformat(" ", "microseconds") if isinstance(each, datetime) else each for each in values]
        return connection.execute(sql, texts)

    def table(self, name: str) -> str:
        return f'"{name}"'

    def create(self, table: str = "Sales_Orders_TimeoutData") -> None:
        with closing(self.connect()) as connection:
            connection.execute(
                f'CREATE TABLE "{table}" ("Id" text PRIMARY KEY, "Destination" text, "SagaId" text, "State" blob, '
                f'"Time" text, "Headers" text NOT NULL, "PersistenceVersion" text NOT NULL)'
            )
            connection.execute(f'CREATE INDEX "{table}_Time" ON "{table}" ("Time")')

    def tables(self) -> set[str]:
        with closing(self.connect()) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


class PostgresPlace(Place):
    """A schema with a name that has to be quoted."""

    upper_case_ids = False

    def __init__(self, url: str) -> None:
        super().__init__(url, f'mi"gr.%s {os.getpid()}.{next(_NUMBERS)}')
        with closing(self.connect()) as connection:
            connection.execute(f"CREATE SCHEMA {self._schema}".encode())

    @property
    def _schema(self) -> str:
        return '"' + str(self.schema).replace('"', '""') + '"'

    def dialect(self) -> Dialect:
        return PostgresDialect(self.address, self.schema)

    def connect(self) -> Any:
        return psycopg.connect(self.address, autocommit=True)

    def execute(self, connection: Any, sql: str, values: Sequence[Any] = ()) -> Any:
        return connection.execute(sql.encode(), values)

    def table(self, name: str) -> str:
        return f'{self._schema}."{name}"'.replace("%", "%%")

    def create(self, table: str = "Sales_Orders_TimeoutData") -> None:
        with closing(self.connect()) as connection:
            self.execute(
                connection,
                f'CREATE TABLE {self.table(table)} ("Id" uuid PRIMARY KEY, "Destination" varchar(200), "SagaId" uuid, '
                f'"State" bytea, "Time" timestamp, "Headers" text NOT NULL, "PersistenceVersion" varchar(23) NOT NULL)',
            )
            self.execute(connection, f'CREATE INDEX ON {self.table(table)} ("Time")')

    def tables(self) -> set[str]:
        with closing(self.connect()) as connection:
            sql = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
            return {name for (name,) in connection.execute(sql, [self.schema])}

    def drop(self) -> None:
        super().drop()
        with closing(self.connect()) as connection:
            connection.execute(f"DROP SCHEMA {self._schema} CASCADE".encode())


class MariaDbPlace(Place):
    """A database with a name that has to be quoted."""

    def __init__(self, url: str) -> None:
        super().__init__(url, f"mi`gr.%s]' {os.getpid()}.{next(_NUMBERS)}")
        with closing(self.connect()) as connection:
            connection.cursor().execute(f"CREATE DATABASE {self._schema}")

    @property
    def _schema(self) -> str:
        return self.quoted(str(self.schema))

    def quoted(self, name: str) -> str:
        return "`" + name.replace("`", "``") + "`"

    def dialect(self) -> Dialect:
        return MariaDbDialect(self.address, self.schema)

    def connect(self) -> Any:
        where = urlsplit(self.address)
        return pymysql.connect(
            host=where.hostname,
            port=where.port or 3306,
            user=where.username,
            password=where.password or "",
            autocommit=True,
            client_flag=CLIENT.FOUND_ROWS,
        )

    def execute(self, connection: Any, sql: str, values: Sequence[Any] = ()) -> Any:
        cursor = connection.cursor()
        cursor.execute(sql, list(values))
        return cursor

    def table(self, name: str) -> str:
        return f"{self._schema}.`{name}`".replace("%", "%%")

    def create(self, table: str = "Sales_Orders_TimeoutData") -> None:
        with closing(self.connect()) as connection:
            self.execute(
                connection,
                f"CREATE TABLE {self.table(table)} (`Id` varchar(38) PRIMARY KEY, `Destination` varchar(200), "
                f"`SagaId` varchar(38), `State` longblob, `Time` datetime(6), `Headers` longtext NOT NULL, "
                f"`PersistenceVersion` varchar(23) NOT NULL, KEY (`Time`), KEY (`SagaId`))",
            )

    def tables(self) -> set[str]:
        with closing(self.connect()) as connection:
            sql = "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s"
            return {name for (name,) in self.execute(connection, sql, [self.schema]).fetchall()}

    def drop(self) -> None:
        super().drop()
        with closing(self.connect()) as connection:
            connection.cursor().execute(f"DROP DATABASE {self._schema}")


PLACES: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "sqlite": lambda request: SqlitePlace(request.getfixturevalue("tmp_path") / "old.db"),
    "postgres": lambda request: PostgresPlace(request.getfixturevalue("postgres_url")),
    "mariadb": lambda request: MariaDbPlace(request.getfixturevalue("mariadb_url")),
}


def opened(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Yield the place of a fixture's parameter, with an empty table of the endpoint ``Sales.Orders``."""
    place = PLACES[request.param](request)
    place.create()
    yield place
    place.drop()


def hours(count: int, start: datetime = NEXT_YEAR) -> list[Row]:
    return [Row(start + number * HOUR) for number in range(count)]


def new_begun(source: MigrationSource) -> MigrationRun:
    run = new_run()
    source.start_run(run)
    return run
