"""Migrating timeouts from an SQLite file. Only Postdate writes such files: .NET has no such persistence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.timeouts_layout import ID, TIME, text_time
from postdate.backends.sql.timeouts_migration.dialect import NUMBER, Dialect, Hiding, Session
from postdate.backends.sqlite.connection import connect, patiently, translated
from postdate.backends.sqlite.rows import SqliteSqlDialect
from postdate.clock import Clock, SystemClock
from postdate.errors import PostdateError, StoreNotSetUp

_spelled: Final = SqliteSqlDialect().spelled


class SqliteSession:
    """A connection that only reads until its first transaction; see :class:`Session`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path, read_only=True)
        self._may_write = False

    def rows(self, sql: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        with translated(self._path):
            return self._connection.execute(_spelled(sql), values).fetchall()

    def change(self, sql: str, values: Mapping[str, Any]) -> int:
        with translated(self._path):
            return max(self._connection.execute(_spelled(sql), values).rowcount, 0)

    def pages(self, sql: str, values: dict[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        with translated(self._path):
            cursor = self._connection.execute(_spelled(sql), values)
            while rows := cursor.fetchmany(page):
                yield rows

    def begin(self) -> None:
        with translated(self._path):
            if not self._may_write:
                self._connection.close()
                self._connection, self._may_write = connect(self._path), True
            patiently(self._connection, "BEGIN IMMEDIATE")

    def commit(self) -> None:
        with translated(self._path):
            self._connection.execute("COMMIT")

    def rollback(self) -> None:
        with translated(self._path):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def close(self) -> None:
        with suppress(PostdateError), translated(self._path):
            self._connection.close()


class SqliteDialect(Dialect):
    """The SQL of SQLite; ``clock`` is that of the machine, which is the database's."""

    text = long_text = instant = "text"
    names_of_tables = "SELECT name FROM sqlite_master WHERE type = 'table'"

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        super().__init__("main", str(path))
        self._path, self._clock = path, clock or SystemClock()

    @override
    def connect(self) -> Session:
        """A missing file is not created."""
        if not self._path.exists():
            raise StoreNotSetUp(f"there is no file {self._path}; a migration creates none")
        return SqliteSession(self._path)

    @override
    def now(self, session: Session) -> datetime:
        return self._clock.now()

    @override
    def columns(self, session: Session, table: str) -> Sequence[str]:
        return [name for (name,) in session.rows("SELECT name FROM pragma_table_info(%(table)s)", {"table": table})]

    @override
    def limit(self, session: Session, margin: timedelta) -> None:
        """No limit is needed: after BEGIN a writer waits for nobody. The clock is checked before the commit."""

    @override
    def value(self, instant: datetime) -> object:
        """Return a text, as SQLite has no type for times."""
        return text_time(instant)

    @override
    def floor(self, instant: datetime) -> object:
        """Return a text without trailing zeros, so that it compares well with texts of fewer digits."""
        return text_time(instant).rstrip("0").rstrip(".")

    @override
    def is_due_from(self) -> str:
        """The index serves the first part of the condition, in which a ``T`` would count as late."""
        return f"{self.quoted(TIME)} >= %(floor)s AND {self._spaced()} >= %(floor)s"

    @override
    def is_due_before(self) -> str:
        return f"{self._spaced()} < %(floor)s"

    def _spaced(self) -> str:
        return f"replace({self.quoted(TIME)}, 'T', ' ')"

    @override
    def size_of(self, column: str) -> str:
        return f"LENGTH(CAST({self.quoted(column)} AS BLOB))"

    @override
    def quoted(self, name: str) -> str:
        return '"' + name.replace('"', '""').replace("%", "%%") + '"'

    @override
    def creating_staging(self, staging: str, live: str, columns: Sequence[str]) -> Sequence[str]:
        hidden, key = self.table(staging), self.list_of((NUMBER, ID))
        index = self.table(f"{staging}_key")
        return (
            (
                f"CREATE TABLE IF NOT EXISTS {hidden} AS SELECT {self.list_of(columns)}, 0 AS {self.quoted(NUMBER)} "
                f"FROM {self.table(live)} WHERE 0"
            ),
            f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {self.quoted(staging)} ({key})",
        )

    def _removing(self, hiding: Hiding) -> str:
        own = self.quoted(ID)
        hidden = f"SELECT {own} FROM {self.table(hiding.staging)} WHERE {self.quoted(NUMBER)} >= {hiding.first}"
        return f"DELETE FROM {self.table(hiding.live)} WHERE {own} IN ({hidden})"
