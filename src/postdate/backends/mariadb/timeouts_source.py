"""Timeouts in MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

from typing_extensions import override

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames, check_name, quoted
from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.timeouts_layout import ID
from postdate.backends.sql.timeouts_migration.dialect import NUMBER, TURN_SECONDS, Dialect, Session
from postdate.errors import ConfigurationError, StoreUnavailable


class MariaDbDialect(Dialect):
    """The SQL of MariaDB.

    ``schema`` is a database; ``None``: that of the URL. `ConfigurationError` if neither names one.
    """

    long_text = "longtext"
    instant = "datetime(6)"
    dividing = "DIV"
    locking, skipping = " FOR UPDATE", " FOR UPDATE SKIP LOCKED"
    names_of_tables = (
        "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %(schema)s AND TABLE_TYPE = 'BASE TABLE'"
    )

    def __init__(self, url: str, schema: str | None) -> None:
        self._server = MariaDbServer(url)
        super().__init__(check_name(schema or self._server.address.database, "schema"), self._server.where)

    @override
    def connect(self) -> Session:
        session = cast("Session", self._server.connect_patiently())
        with closing_on_error(session):  # an alias in a DELETE means one in the chosen database
            session.change(f"USE {self.quoted(self.schema)}", {})
        return session

    @override
    def now(self, session: Session) -> datetime:
        ((now,),) = session.rows("SELECT UTC_TIMESTAMP(6)", {})
        return now.replace(tzinfo=UTC)

    @override
    def columns(self, session: Session, table: str) -> Sequence[str]:
        of = {"schema": self.schema, "table": table}
        here = "TABLE_SCHEMA = %(schema)s AND TABLE_NAME = %(table)s"
        engines = session.rows(f"SELECT ENGINE FROM information_schema.TABLES WHERE {here}", of)
        if engines and str(engines[0][0]).lower() != "innodb":
            raise ConfigurationError(
                f"{self.where}: table {table} is kept by {engines[0][0]}, which has no transactions, so that its "
                f"timeouts cannot be moved safely; change it to InnoDB first"
            )
        rows = session.rows(
            f"SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE {here} ORDER BY ORDINAL_POSITION", of
        )
        return [name for (name,) in rows]

    @override
    def limit(self, session: Session, margin: timedelta) -> None:
        """The server also ends a transaction whose client is suspended."""
        seconds = margin.total_seconds()
        self._set(session, max(seconds / 4, 0.000001), int(seconds / 8), max(int(seconds / 4), 1))

    @override
    def unlimit(self, session: Session) -> None:
        """Back to the settings of our sessions."""
        self._set(session, 0, 3, 0)

    @staticmethod
    def _set(session: Session, statement: float, lock: int, idle: int) -> None:
        session.change(
            f"SET SESSION max_statement_time = {statement:.6f}, innodb_lock_wait_timeout = {lock}, "
            f"idle_write_transaction_timeout = {idle}",
            {},
        )

    @override
    def take_turn(self, session: Session) -> None:
        """The lock is the session's: creating a table ends a transaction."""
        ((granted,),) = session.rows(
            "SELECT GET_LOCK(%(name)s, %(wait)s)", {"name": self._turn(), "wait": TURN_SECONDS}
        )
        if granted != 1:
            raise StoreUnavailable(f"{self.where}: another migration has been at its beginning for too long; try again")

    @override
    def end_turn(self, session: Session) -> None:
        session.rows("SELECT RELEASE_LOCK(%(name)s)", {"name": self._turn()})

    def _turn(self) -> str:
        return MariaDbNames(self.schema, "any").lock("migration")

    @override
    def quoted(self, name: str) -> str:
        return quoted(name).replace("%", "%%")

    @override
    def creating_staging(self, staging: str, live: str, columns: Sequence[str]) -> Sequence[str]:
        key = f"PRIMARY KEY ({self.list_of((NUMBER, ID))})"
        return (
            (
                f"CREATE TABLE IF NOT EXISTS {self.table(staging)} "
                f"({self.quoted(NUMBER)} int NOT NULL DEFAULT 0, {key}) "
                f"ENGINE = InnoDB AS SELECT {self.list_of(columns)} FROM {self.table(live)} WHERE FALSE"
            ),
        )
