"""Tables of timeouts in MariaDB as a source of a migration."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

from typing_extensions import override

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames, check_name, quote_name
from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.timeouts_layout import ID
from postdate.backends.sql.timeouts_migration.dialect import NUMBER, TURN_SECONDS, Dialect, Session
from postdate.errors import ConfigurationError, StoreUnavailable


class MariaDbDialect(Dialect):
    """The SQL of MariaDB.

    ``schema`` is a database; ``None``: the database in the URL. Raises `ConfigurationError` if neither names one.
    """

    long_text = "longtext"
    instant = "datetime(6)"
    integer_division = "DIV"
    lock_clause, skip_locked_clause = " FOR UPDATE", " FOR UPDATE SKIP LOCKED"
    names_of_tables = (
        "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %(schema)s AND TABLE_TYPE = 'BASE TABLE'"
    )

    def __init__(self, url: str, schema: str | None) -> None:
        self._server = MariaDbServer(url)
        super().__init__(check_name(schema or self._server.address.database, "schema"), self._server.where)

    @override
    def connect(self) -> Session:
        session = cast("Session", self._server.connect_patiently())
        with closing_on_error(session):  # A DELETE resolves an alias in the selected database.
            session.change(f"USE {self.quote_name(self.schema)}", {})
        return session

    @override
    def now(self, session: Session) -> datetime:
        ((now,),) = session.rows("SELECT UTC_TIMESTAMP(6)", {})
        return now.replace(tzinfo=UTC)

    @override
    def columns(self, session: Session, table: str) -> Sequence[str]:
        values = {"schema": self.schema, "table": table}
        is_table = "TABLE_SCHEMA = %(schema)s AND TABLE_NAME = %(table)s"
        engines = session.rows(f"SELECT ENGINE FROM information_schema.TABLES WHERE {is_table}", values)
        if engines and str(engines[0][0]).lower() != "innodb":
            raise ConfigurationError(
                f"{self.where}: table {table} uses the storage engine {engines[0][0]}, which has no transactions, "
                f"so its timeouts cannot be moved safely; change it to InnoDB first"
            )
        rows = session.rows(
            f"SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE {is_table} ORDER BY ORDINAL_POSITION", values
        )
        return [name for (name,) in rows]

    @override
    def limit_waits(self, session: Session, margin: timedelta) -> None:
        """Limit waits for locks; the server also ends a transaction whose client is suspended."""
        seconds = margin.total_seconds()
        self._set_limits(session, max(seconds / 4, 0.000001), int(seconds / 8), max(int(seconds / 4), 1))

    @override
    def reset_limits(self, session: Session) -> None:
        """Restore the settings of our sessions."""
        self._set_limits(session, 0, 3, 0)

    @staticmethod
    def _set_limits(session: Session, statement: float, lock: int, idle: int) -> None:
        session.change(
            f"SET SESSION max_statement_time = {statement:.6f}, innodb_lock_wait_timeout = {lock}, "
            f"idle_write_transaction_timeout = {idle}",
            {},
        )

    @override
    def acquire_turn(self, session: Session) -> None:
        """Acquire a lock of the session, because creating a table ends a transaction."""
        ((granted,),) = session.rows(
            "SELECT GET_LOCK(%(name)s, %(wait)s)", {"name": self._turn_lock_name(), "wait": TURN_SECONDS}
        )
        if granted != 1:
            raise StoreUnavailable(
                f"{self.where}: another migration has not finished its start for too long; try again"
            )

    @override
    def release_turn(self, session: Session) -> None:
        session.rows("SELECT RELEASE_LOCK(%(name)s)", {"name": self._turn_lock_name()})

    def _turn_lock_name(self) -> str:
        return MariaDbNames(self.schema, "any").lock_name("migration")

    @override
    def quote_name(self, name: str) -> str:
        return quote_name(name).replace("%", "%%")

    @override
    def staging_table_statements(self, staging: str, live: str, columns: Sequence[str]) -> Sequence[str]:
        key = f"PRIMARY KEY ({self.list_of((NUMBER, ID))})"
        return (
            (
                f"CREATE TABLE IF NOT EXISTS {self.qualified_table(staging)} "
                f"({self.quote_name(NUMBER)} int NOT NULL DEFAULT 0, {key}) "
                f"ENGINE = InnoDB AS SELECT {self.list_of(columns)} FROM {self.qualified_table(live)} WHERE FALSE"
            ),
        )
