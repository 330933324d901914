"""Tables of timeouts in an SQLite file as a source of a migration. Only Postdate writes them; .NET cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.timeouts_layout import ID, TIME, text_time
from postdate.backends.sql.timeouts_migration.dialect import NUMBER, Dialect, HideRequest, Session
from postdate.backends.sqlite.connection import connect, execute_with_retry, translate_errors
from postdate.backends.sqlite.rows import SqliteSqlDialect
from postdate.clock import Clock, SystemClock
from postdate.errors import PostdateError, StoreNotSetUp

_statement_of: Final = SqliteSqlDialect().statement_of


class SqliteSession:
    """A connection that only reads until its first transaction; see :class:`Session`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path, read_only=True)
        self._may_write = False

    def rows(self, sql: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        with translate_errors(self._path):
            return self._connection.execute(_statement_of(sql), values).fetchall()

    def change(self, sql: str, values: Mapping[str, Any]) -> int:
        with translate_errors(self._path):
            return max(self._connection.execute(_statement_of(sql), values).rowcount, 0)

    def pages(self, sql: str, values: dict[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        with translate_errors(self._path):
            cursor = self._connection.execute(_statement_of(sql), values)
            while rows := cursor.fetchmany(page):
                yield rows

    def begin(self) -> None:
        with translate_errors(self._path):
            if not self._may_write:
                self._connection.close()
                self._connection, self._may_write = connect(self._path), True
            execute_with_retry(self._connection, "BEGIN IMMEDIATE")

    def commit(self) -> None:
        with translate_errors(self._path):
            self._connection.execute("COMMIT")

    def rollback(self) -> None:
        with translate_errors(self._path):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def close(self) -> None:
        with suppress(PostdateError), translate_errors(self._path):
            self._connection.close()


class SqliteDialect(Dialect):
    """The SQL of SQLite; ``clock`` is the machine's clock, which is also the database's."""

    text = long_text = instant = "text"
    names_of_tables = "SELECT name FROM sqlite_master WHERE type = 'table'"

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        super().__init__("main", str(path))
        self._path, self._clock = path, clock or SystemClock()

    @override
    def connect(self) -> Session:
        """Open the file; a missing file is not created."""
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
    def limit_waits(self, session: Session, margin: timedelta) -> None:
        """Do nothing: after BEGIN a writer waits for no other. The clock is checked before the commit."""

    @override
    def value_of(self, instant: datetime) -> object:
        """Return a text, because SQLite has no type for times."""
        return text_time(instant)

    @override
    def floor_of(self, instant: datetime) -> object:
        """Return a text without trailing zeros, so that it compares well with texts of fewer digits."""
        return text_time(instant).rstrip("0").rstrip(".")

    @override
    def due_from_condition(self) -> str:
        """Return the condition that a timeout is due at ``floor`` or later.

        The index supports its first part, in which a ``T`` would count as late.
        """
        return f"{self.quote_name(TIME)} >= %(floor)s AND {self._time_with_space()} >= %(floor)s"

    @override
    def due_before_condition(self) -> str:
        return f"{self._time_with_space()} < %(floor)s"

    def _time_with_space(self) -> str:
        return f"replace({self.quote_name(TIME)}, 'T', ' ')"

    @override
    def size_of(self, column: str) -> str:
        return f"LENGTH(CAST({self.quote_name(column)} AS BLOB))"

    @override
    def quote_name(self, name: str) -> str:
        return '"' + name.replace('"', '""').replace("%", "%%") + '"'

    @override
    def staging_table_statements(self, staging: str, live: str, columns: Sequence[str]) -> Sequence[str]:
        staging_name, key = self.qualified_table(staging), self.list_of((NUMBER, ID))
        index = self.qualified_table(f"{staging}_key")
        return (
            (
                f"CREATE TABLE IF NOT EXISTS {staging_name} AS SELECT {self.list_of(columns)}, 0 AS "
                f"{self.quote_name(NUMBER)} "
                f"FROM {self.qualified_table(live)} WHERE 0"
            ),
            f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {self.quote_name(staging)} ({key})",
        )

    def _remove_statement(self, request: HideRequest) -> str:
        id_column = self.quote_name(ID)
        staging, number = self.qualified_table(request.staging), self.quote_name(NUMBER)
        hidden = f"SELECT {id_column} FROM {staging} WHERE {number} >= {request.first}"
        return f"DELETE FROM {self.qualified_table(request.live)} WHERE {id_column} IN ({hidden})"
