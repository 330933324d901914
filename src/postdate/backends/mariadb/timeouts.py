"""Timeouts in MariaDB 10.6 or newer, in the table of upstream's SQL persistence for MySQL.

Its ids are texts. They are written in lower case with hyphens, and found in upper and lower case, with and without
braces. Source: ADR 0008, ADR 0014.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.mariadb.connection import larger_than_packet_error, literal, max_statement_bytes
from postdate.backends.mariadb.schema import TABLE_EXISTS, MariaDbSchema, check_name, quote_name
from postdate.backends.mariadb.statements import MariaDbSqlDialect
from postdate.backends.sql import timeouts_layout
from postdate.backends.sql.row_locks.parts import DuplicateKey
from postdate.backends.sql.row_locks.timeouts import RowLockTimeoutTable, ServerTimeouts
from postdate.backends.sql.timeouts import TimeoutStatements
from postdate.errors import StoreNotSetUp

_TABLE_DESCRIPTION: Final = "the table of timeouts (table_prefix=...)"
_SCHEMA_EXISTS: Final = "SELECT 1 FROM information_schema.schemata WHERE schema_name = %(schema)s"
_PRECISION: Final = (
    "SELECT datetime_precision FROM information_schema.columns "
    "WHERE table_schema = %(schema)s AND table_name = %(table)s AND column_name = 'Time'"
)


class MariaDbTimeouts(ServerTimeouts):
    """Keeps timeouts in a table of MariaDB; :class:`postdate.ports.timeouts.TimeoutPersister`.

    Args:
        url: ``mariadb://user:password@host:port/database``; for TLS, ``?ssl=true`` (see
            :class:`postdate.backends.mariadb.connection.MariaDbServer`). Or a
            :class:`postdate.backends.mariadb.database.MariaDb`, whose connections and ``schema`` it uses.
        schema: the database of the table; ``None``: the database in ``url``.
        table_prefix: of the table's name, which has at most 64 characters, none of them an emoji. ``None``: the prefix
            of the endpoint, see :func:`postdate.backends.sql.timeouts_layout.table_prefix`.

    Raises:
        ConfigurationError: the address, the schema or the table's name is invalid.
    """

    def __init__(self, url: str | MariaDbSchema, *, schema: str | None = None, table_prefix: str | None = None) -> None:
        database = MariaDbSchema.of(url, schema)
        super().__init__(database, lambda name: MariaDbTable(database.schema, name), table_prefix)


class MariaDbTable(RowLockTimeoutTable):
    dialect = MariaDbSqlDialect()

    def __init__(self, schema: str, name: str) -> None:
        self._values = {"schema": schema, "table": check_name(name, _TABLE_DESCRIPTION)}
        self._digits: int | None = None
        plain = f"{quote_name(schema)}.{quote_name(name)}"
        table = plain.replace("%", "%%")
        create = (
            f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)} CHARACTER SET utf8mb4",
            (
                f"CREATE TABLE IF NOT EXISTS {plain} (\n"
                f"    `Id` varchar(38) NOT NULL, `Destination` varchar(200), `SagaId` varchar(38), `State` longblob,\n"
                f"    `Time` datetime(6), `Headers` longtext NOT NULL, `PersistenceVersion` varchar(23) NOT NULL,\n"
                f"    PRIMARY KEY (`Id`), KEY `Index_SagaId` (`SagaId`), KEY `Index_Time` (`Time`)\n"
                f") ENGINE = InnoDB CHARACTER SET utf8mb4"
            ),
        )
        of_id = f"FROM {table} WHERE `Id` IN %(ids)s"
        peek = f"SELECT `Id`, `Destination`, `SagaId`, `State`, `Time`, `Headers` {of_id}"
        self._find = f"SELECT 1 {of_id}"
        sql = TimeoutStatements(
            insert=(
                f"INSERT INTO {table} "
                f"(`Id`, `Destination`, `SagaId`, `State`, `Time`, `Headers`, `PersistenceVersion`) "
                f"SELECT %(Id)s, %(Destination)s, %(SagaId)s, %(State)s, %(Time)s, %(Headers)s, %(PersistenceVersion)s "
                f"FROM DUAL WHERE NOT EXISTS (SELECT 1 {of_id})"
            ),
            peek=peek,
            claim=f"{peek} FOR UPDATE SKIP LOCKED",
            delete=f"DELETE {of_id}",
            delete_saga=f"DELETE FROM {table} WHERE `SagaId` IN %(ids)s",
            due=(
                f"SELECT `Id`, `Time` FROM {table} WHERE `Time` > %(after)s AND `Time` <= %(until)s "
                f"ORDER BY `Time` LIMIT %(limit)s"
            ),
            first=f"SELECT min(`Time`) FROM {table} WHERE `Time` > %(after)s",
        )
        super().__init__(plain, create, sql)

    @override
    def setup(self, session: Any) -> None:
        """Create the table only if it is missing, so that later starts need no right to create tables."""
        create_schema, create = self.create
        if session.rows(TABLE_EXISTS, self._values):
            return
        if not session.rows(_SCHEMA_EXISTS, self._values):
            session.change(create_schema)
        session.change(create)

    @override
    def key(self, normal: str) -> Mapping[str, Any]:
        """Return all spellings of an id."""
        return {"ids": timeouts_layout.spellings(normal)}

    @override
    def instant(self, instant: datetime) -> object:
        return timeouts_layout.text_time(instant)

    @override
    def insert(self, session: Any, row: dict[str, Any]) -> bool:
        """Insert a row; its time is rounded up to the table's precision."""
        _check_size(row, max_statement_bytes(session))
        time, ids = (
            timeouts_layout.round_up(row[timeouts_layout.TIME], self._time_digits(session)),
            self.key(row[timeouts_layout.ID]),
        )
        try:
            return (
                session.change(self.sql.insert, {**row, **ids, timeouts_layout.TIME: timeouts_layout.text_time(time)})
                > 0
            )
        except DuplicateKey:  # If two sessions add the same id at once, the second one gets this error.
            if not session.rows(self._find, ids):
                raise
            return False

    def _time_digits(self, session: Any) -> int:
        """Return how many digits of a second the table stores; tables of older .NET endpoints store none."""
        if self._digits is None:
            rows = session.rows(_PRECISION, self._values)
            if not rows or rows[0][0] is None:
                where = f"database {self._values['schema']!r} has no table {self._values['table']!r}"
                raise StoreNotSetUp(f"{where} with a date and time of day in `Time`: run `postdate setup`")
            self._digits = int(rows[0][0])
        return self._digits


def _check_size(row: dict[str, Any], limit: int) -> None:
    """Raise `MessageTooLarge` for a row that exceeds one packet: the server would close the connection."""
    if (
        2 * (len(row[timeouts_layout.HEADERS]) + len(row[timeouts_layout.STATE])) <= limit
    ):  # an escaped character takes two characters
        return
    if (size := len(literal(row[timeouts_layout.HEADERS])) + len(literal(row[timeouts_layout.STATE]))) > limit:
        raise larger_than_packet_error(f"timeout {row[timeouts_layout.ID]}", size, limit)
