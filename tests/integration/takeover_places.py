"""Databases that earlier commits made: restored from dumps into a fresh file, schema or database, and looked into.

``takeover/make.py`` made the dumps in ``takeover``, with the code of the commit in their names.
"""

import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from tests.mariadb_subjects import drop_schema as drop_database
from tests.mariadb_subjects import fresh_schema as fresh_database
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import (
    LocalTransport,
    MariaDbStore,
    MariaDbTimeouts,
    PostgresOutbox,
    PostgresSagaStore,
    PostgresStore,
    PostgresTimeouts,
    PostgresTransport,
    SqliteOutbox,
    SqliteSagaStore,
    SqliteStore,
    SqliteTimeouts,
)
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames, MariaDbOutbox, MariaDbSagaStore, quote_name
from postdate.backends.postgres import names as postgres_names
from postdate.backends.postgres.names import quote_name as quoted_in_postgres
from postdate.backends.postgres.names import steps as postgres_steps
from postdate.backends.sql.migrations import Step
from postdate.backends.sql.row_locks.names import mark_statement, steps_of
from postdate.backends.sqlite import connection as sqlite_connection

DUMPS = Path(__file__).parent / "takeover"
TABLE = "service.timeouts"


class Place(ABC):
    """A place for one database, and its adapters."""

    backend: str
    settings: dict[str, str]
    marks: str
    """Table of marks of migrations."""

    def restore(self, commit: str) -> None:
        """Make the database from the dump of a commit."""
        self.run_script((DUMPS / f"{self.backend}-{commit}.sql").read_text())

    def transactions(self, step: Step) -> list[list[str]]:
        """Return the statements of a migration by transaction: between two of them a process may be killed."""
        return [[*step.statements, self.mark_done(step)]]

    @abstractmethod
    def run_script(self, script: str) -> None:
        """Run the dump of a database that is not there yet."""

    @abstractmethod
    def change(self, *statements: str) -> None:
        """Run statements in one session."""

    @abstractmethod
    def run_administrators_script(self, script: str) -> None: ...

    @abstractmethod
    def mark_done(self, step: Step) -> str: ...

    @abstractmethod
    def steps(self) -> Sequence[Step]:
        """Return the migrations of the store."""

    @abstractmethod
    def query(self, sql: str) -> Sequence[tuple[Any, ...]]: ...

    @abstractmethod
    def columns(self) -> dict[str, list[str]]:
        """Return the columns of each table."""

    @abstractmethod
    def catalog(self) -> Any:
        """Return all tables with their columns, indexes and constraints."""

    @abstractmethod
    def store(self, table: str = TABLE) -> Any: ...

    @abstractmethod
    def transport(self) -> Any: ...

    @abstractmethod
    def sagas(self) -> Any: ...

    @abstractmethod
    def outbox(self) -> Any: ...

    @abstractmethod
    def timeouts(self) -> Any: ...

    @abstractmethod
    def named(self, table: str) -> str:
        """Return a table's name in SQL."""

    @abstractmethod
    def drop(self) -> None: ...

    def contents(self, tables: Mapping[str, Collection[str]]) -> dict[str, Counter[str]]:
        """Return the rows of tables, of the given columns, as text."""
        return {
            table: Counter(map(repr, self.query(f"SELECT {', '.join(columns)} FROM {self.named(table)}")))
            for table, columns in tables.items()
        }

    def without_name(self, definition: str) -> str:
        """Return a definition without what differs between places."""
        return " ".join(definition.split())


def settings_of(url: str, schema: str) -> dict[str, str]:
    place = {"ADDRESS": url, "SCHEMA": schema}
    return {f"{part}__{name}": value for part in ("STORE", "TIMEOUT_MANAGER") for name, value in place.items()}


class SqlitePlace(Place):
    backend, marks = "sqlite", "postdate_migration"

    def __init__(self, path: Path) -> None:
        self.path = path
        url = f"sqlite:///{path}"
        self.settings = {"STORE__ADDRESS": url, "TIMEOUT_MANAGER__ADDRESS": url}

    def run_script(self, script: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(script)

    def change(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    def run_administrators_script(self, script: str) -> None:
        raise AssertionError("for a new file only")

    def mark_done(self, step: Step) -> str:
        return f"INSERT INTO postdate_migration (version, name) VALUES ({step.version}, '{step.name}')"

    def steps(self) -> Sequence[Step]:
        return sqlite_connection.steps("database")

    def query(self, sql: str) -> Sequence[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(sql).fetchall()

    def columns(self) -> dict[str, list[str]]:
        tables = [name for (name,) in self.query("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {table: [name for (name,) in self._pragma("table_info", table, "name")] for table in tables}

    def _pragma(self, name: str, of: str, columns: str = "*") -> Sequence[tuple[Any, ...]]:
        return self.query(f"SELECT {columns} FROM pragma_{name}('{of}')")

    def catalog(self) -> Any:
        """What pragmas do not say is the words behind the columns, and the condition of an index."""
        catalog = dict[str, object]()
        for kind, name, table, sql in self.query("SELECT type, name, tbl_name, sql FROM sqlite_schema"):
            if kind == "table":
                words = [word for word in ("AUTOINCREMENT", "WITHOUT ROWID", "CHECK", "STRICT") if word in (sql or "")]
                catalog[name] = (
                    words,
                    self._pragma("table_xinfo", name),
                    sorted(row[1:] for row in self._pragma("index_list", name)),
                )
            else:
                condition = self.without_name((sql or "").partition(" WHERE ")[2])
                catalog[name] = table, condition, self._pragma("index_xinfo", name)
        return catalog

    def store(self, table: str = TABLE) -> SqliteStore:
        assert table == TABLE
        return SqliteStore(self.path)

    def transport(self) -> LocalTransport:
        return LocalTransport(self.path)

    def sagas(self) -> SqliteSagaStore:
        return SqliteSagaStore(self.path)

    def outbox(self) -> SqliteOutbox:
        return SqliteOutbox(self.path)

    def timeouts(self) -> SqliteTimeouts:
        return SqliteTimeouts(self.path)

    def named(self, table: str) -> str:
        return f'"{table}"'

    def drop(self) -> None:
        """Leave the file to its folder."""


class PostgresPlace(Place):
    backend, marks = "postgres", "migration"

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_schema()
        place = {"ADDRESS": url, "SCHEMA": self.schema}
        self.settings = {
            f"{part}__{name}": value for part in ("STORE", "TIMEOUT_MANAGER") for name, value in place.items()
        }

    def run_script(self, script: str) -> None:
        self.change(f"{script}\nALTER SCHEMA takeover RENAME TO {quoted_in_postgres(self.schema)}")

    def change(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def run_administrators_script(self, script: str) -> None:
        self.change(script)

    def mark_done(self, step: Step) -> str:
        return postgres_names.mark_statement(self.schema, step)

    def steps(self) -> Sequence[Step]:
        return postgres_steps(self.schema, TABLE)

    def query(self, sql: str) -> Sequence[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(sql.encode()).fetchall()

    def columns(self) -> dict[str, list[str]]:
        columns = dict[str, list[str]]()
        for table, name in self.query(
            "SELECT table_name, column_name FROM information_schema.columns "
            f"WHERE table_schema = {postgres_names.literal(self.schema)} ORDER BY table_name, ordinal_position"
        ):
            columns.setdefault(table, []).append(f'"{name}"')
        return columns

    def without_name(self, definition: str) -> str:
        return super().without_name(definition.replace(quoted_in_postgres(self.schema), "{schema}"))

    def catalog(self) -> Any:
        relations = (
            "SELECT c.oid, c.relname, c.relkind::text, c.reloptions, s.seqtypid::regtype::text, s.seqmax, s.seqcycle "
            f"FROM pg_class AS c LEFT JOIN pg_sequence AS s ON s.seqrelid = c.oid WHERE c.relnamespace = "
            f"{postgres_names.literal(quoted_in_postgres(self.schema))}::regnamespace"
        )
        catalog = dict[str, object]()
        for oid, name, *facts in self.query(relations):
            columns = self.query(
                "SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text, "
                "pg_get_expr(d.adbin, d.adrelid), a.attcollation::regcollation::text, a.attstorage::text "
                "FROM pg_attribute AS a LEFT JOIN pg_attrdef AS d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum) "
                f"WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"
            )
            constraints = self.query(
                f"SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = {oid} ORDER BY 1"
            )
            indexes = self.query(f"SELECT pg_get_indexdef({oid})") if facts[0] == "i" else []
            catalog[name] = self.without_name(repr((facts, columns, constraints, indexes)))
        return catalog

    def store(self, table: str = TABLE) -> PostgresStore:
        return PostgresStore(self.url, schema=self.schema, table=table)

    def transport(self) -> PostgresTransport:
        return PostgresTransport(self.url, schema=self.schema)

    def sagas(self) -> PostgresSagaStore:
        return PostgresSagaStore(self.url, schema=self.schema)

    def outbox(self) -> PostgresOutbox:
        return PostgresOutbox(self.url, schema=self.schema)

    def timeouts(self) -> PostgresTimeouts:
        return PostgresTimeouts(self.url, schema=self.schema)

    def named(self, table: str) -> str:
        return f"{quoted_in_postgres(self.schema)}.{quoted_in_postgres(table)}"

    def drop(self) -> None:
        drop_schema(self.url, self.schema)


class MariaDbPlace(Place):
    backend, marks = "mariadb", "postdate_migration"

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_database()
        self.names = MariaDbNames(self.schema, TABLE)
        place = {"ADDRESS": url, "SCHEMA": self.schema}
        self.settings = {
            f"{part}__{name}": value for part in ("STORE", "TIMEOUT_MANAGER") for name, value in place.items()
        }
        self.settings["TRANSPORT__ADDRESS"] = "sqlite:///queues.db"

    def run_script(self, script: str) -> None:
        with closing(MariaDbServer(self.url).connect()) as session:
            session.change(f"CREATE DATABASE {quote_name(self.schema)}")
            session.change(f"USE {quote_name(self.schema)}")
            for statement in script.removesuffix(";\n").split(";\n"):
                session.change(statement.encode())

    def change(self, *statements: str) -> None:
        with closing(MariaDbServer(self.url).connect()) as session:
            for statement in statements:
                session.change(statement)

    def run_administrators_script(self, script: str) -> None:
        self.change(*(statement for statement in script.split(";\n\n") if statement.strip()))

    def transactions(self, step: Step) -> list[list[str]]:
        """Each statement is one, but for those of a prepared statement, which goes with its session."""
        (statements,) = super().transactions(step)
        prepared = [statement for statement in statements if "postdate_end" in statement]
        return [*([each] for each in statements[:-1] if each not in prepared), [*prepared, statements[-1]]]

    def mark_done(self, step: Step) -> str:
        return mark_statement(self.names, step)

    def steps(self) -> Sequence[Step]:
        return steps_of(self.names)

    def query(self, sql: str) -> Sequence[tuple[Any, ...]]:
        with closing(MariaDbServer(self.url).connect()) as session:
            return session.rows(sql.encode())

    def _schema(self) -> str:
        return self.names.spelling.literal(self.schema)

    def columns(self) -> dict[str, list[str]]:
        columns = dict[str, list[str]]()
        for table, name in self.query(
            "SELECT table_name, column_name FROM information_schema.columns "
            f"WHERE table_schema = {self._schema()} ORDER BY table_name, ordinal_position"
        ):
            columns.setdefault(table, []).append(quote_name(name))
        return columns

    def catalog(self) -> Any:
        asked = {
            "tables": "engine, table_collation, create_options",
            "columns": "ordinal_position, column_name, column_type, is_nullable, column_default, extra, collation_name",
            "statistics": "index_name, seq_in_index, column_name, non_unique, collation, sub_part, index_type",
            "table_constraints": "constraint_name, constraint_type",
        }
        return {
            view: sorted(
                self.query(
                    f"SELECT table_name, {columns} FROM information_schema.{view} WHERE table_schema = {self._schema()}"
                ),
                key=repr,
            )
            for view, columns in asked.items()
        }

    def store(self, table: str = TABLE) -> MariaDbStore:
        return MariaDbStore(self.url, schema=self.schema, table=table)

    def transport(self) -> None:
        return None

    def sagas(self) -> MariaDbSagaStore:
        return MariaDbSagaStore(self.url, schema=self.schema)

    def outbox(self) -> MariaDbOutbox:
        return MariaDbOutbox(self.url, schema=self.schema)

    def timeouts(self) -> MariaDbTimeouts:
        return MariaDbTimeouts(self.url, schema=self.schema)

    def named(self, table: str) -> str:
        return f"{quote_name(self.schema)}.{quote_name(table)}"

    def drop(self) -> None:
        drop_database(self.url, self.schema)
