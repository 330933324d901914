"""Tables of timeouts in SQL Server as a source of a migration.

The tests parse its SQL, which has never been run against a server: see ADR 0015.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.timeouts_layout import ID, TIME
from postdate.backends.sql.timeouts_migration import dialect
from postdate.backends.sqlserver.connection import SqlServerInstance, SqlServerSession
from postdate.backends.sqlserver.schema import (
    ACQUIRE_LOCK,
    DEFAULT_SCHEMA,
    SqlServerNames,
    check_name,
    literal,
    quote_name,
)
from postdate.errors import StoreUnavailable

_LOCK_MILLISECONDS: Final = 3_000
"""The lock timeout in the settings of our sessions."""


class PlainSession:
    """One connection, see :class:`Session`; the driver does not change percent signs in statements without values."""

    def __init__(self, session: SqlServerSession) -> None:
        self._session = session
        self.begin, self.commit, self.rollback = session.begin, session.commit, session.rollback
        self.close = session.close

    def rows(self, sql: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        return self._session.rows(sql, values) if values else self._session.rows(sql.replace("%%", "%"))

    def change(self, sql: str, values: Mapping[str, Any]) -> int:
        return self._session.change(sql, values) if values else self._session.change(sql.replace("%%", "%"))

    def pages(self, sql: str, values: dict[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        return self._session.pages(sql if values else sql.replace("%%", "%"), values, page)


class SqlServerDialect(dialect.Dialect):
    text = "nvarchar(200)"
    long_text = "nvarchar(max)"
    instant = "datetime2"
    lock_hint = " WITH (UPDLOCK, ROWLOCK)"
    names_of_tables = "SELECT name FROM sys.tables WHERE schema_id = SCHEMA_ID(%(schema)s)"
    run_placeholder = (
        "CAST(%(run)s AS char(32))"  # Without the cast the column would be converted, and every batch read and locked.
    )

    def __init__(self, url: str, schema: str | None) -> None:
        self._server = SqlServerInstance(url)
        super().__init__(check_name(DEFAULT_SCHEMA if schema is None else schema, "schema"), self._server.where)

    @override
    def connect(self) -> dialect.Session:
        return PlainSession(self._server.connect_patiently())

    @override
    def now(self, session: dialect.Session) -> datetime:
        ((now,),) = session.rows("SELECT SYSUTCDATETIME()", {})
        return now.replace(tzinfo=UTC)

    @override
    def columns(self, session: dialect.Session, table: str) -> Sequence[str]:
        """Return the names of a table's columns, without computed ones."""
        sql = (
            "SELECT name FROM sys.columns WHERE object_id = OBJECT_ID(%(table)s, 'U') AND is_computed = 0 "
            "AND system_type_id <> 189 ORDER BY column_id"  # 189 is a row version
        )
        return [name for (name,) in session.rows(sql, {"table": f"{quote_name(self.schema)}.{quote_name(table)}"})]

    @override
    def limit_waits(self, session: dialect.Session, margin: timedelta) -> None:
        """Limit waits for locks; the server has no limit for statements. The clock is checked before the commit."""
        session.change(f"SET LOCK_TIMEOUT {min(margin // timedelta(milliseconds=8), _LOCK_MILLISECONDS)}", {})

    @override
    def reset_limits(self, session: dialect.Session) -> None:
        session.change(f"SET LOCK_TIMEOUT {_LOCK_MILLISECONDS}", {})

    @override
    def acquire_turn(self, session: dialect.Session) -> None:
        """Acquire a lock, which is held until the end of the transaction."""
        values = {
            "name": SqlServerNames(self.schema, "any").lock_name("migration"),
            "wait": dialect.TURN_SECONDS * 1_000,
        }
        ((granted,),) = session.rows(ACQUIRE_LOCK, values)
        if granted < 0:
            raise StoreUnavailable(
                f"{self.where}: another migration has not finished its start for too long; try again"
            )

    @override
    def size_of(self, column: str) -> str:
        return f"DATALENGTH({self.quote_name(column)})"

    @override
    def quote_name(self, name: str) -> str:
        return quote_name(name).replace("%", "%%")

    def _create_if_missing(self, name: str, table: str) -> str:
        table_literal = literal(f"{quote_name(self.schema)}.{quote_name(name)}").replace("%", "%%")
        return f"IF OBJECT_ID({table_literal}, N'U') IS NULL CREATE TABLE {table}"

    def _unique_constraint(self) -> str:
        return ""  # for this server, two NULLs are equal

    def _statements_after_state(self) -> Sequence[str]:
        index, ongoing, state = (
            f"{dialect.STATE_TABLE}_Ongoing",
            self.quote_name(dialect.ONGOING),
            self.qualified_table(dialect.STATE_TABLE),
        )
        table_literal = literal(f"{quote_name(self.schema)}.{quote_name(dialect.STATE_TABLE)}").replace("%", "%%")
        return (
            (
                f"IF NOT EXISTS (SELECT 1 FROM sys.indexes WHERE object_id = OBJECT_ID({table_literal}, N'U') "
                f"AND name = {literal(index)}) "
                f"CREATE UNIQUE INDEX {quote_name(index)} ON {state} ({ongoing}) WHERE {ongoing} IS NOT NULL"
            ),
        )

    @override
    def staging_table_statements(self, staging: str, live: str, columns: Sequence[str]) -> Sequence[str]:
        number, hidden = self.quote_name(dialect.NUMBER), self.qualified_table(staging)
        key = self.list_of((dialect.NUMBER, ID))
        return (
            (
                f"SELECT {self.list_of(columns)}, CAST(0 AS int) AS {number} INTO {hidden} FROM "
                f"{self.qualified_table(live)} "
                f"WHERE 1 = 0"
            ),
            f"CREATE UNIQUE CLUSTERED INDEX {quote_name(f'{staging}_key')} ON {hidden} ({key})",
        )

    def _earliest_query(self, request: dialect.HideRequest, columns: str) -> str:
        # READPAST skips locked rows, and is refused without READCOMMITTEDLOCK where row versions are switched on.
        # UPDLOCK keeps the rows that were read until they are removed.
        return (
            f"SELECT TOP ({request.limit}) {columns} FROM {self.qualified_table(request.live)} "
            f"WITH (UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK) "
            f"WHERE {self.due_from_condition()} ORDER BY {self.quote_name(TIME)}"
        )
