"""Timeouts in SQL Server 2016 or newer, in the table of upstream's SQL persistence.

It has never been run against a server; see :mod:`postdate.backends.sqlserver.store`. Source: ADR 0008, ADR 0014.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.row_locks.timeouts import RowLockTimeoutTable, ServerTimeouts
from postdate.backends.sql.timeouts import TimeoutStatements
from postdate.backends.sql.timeouts_layout import DESTINATION, ID, STATE, TIME, round_up
from postdate.backends.sqlserver import schema as sqlserver_schema
from postdate.backends.sqlserver.statements import SqlServerSqlDialect
from postdate.errors import InvalidMessage
from postdate.messages import DESTINATION_LIMIT

_TABLE_DESCRIPTION: Final = "the table of timeouts (table_prefix=...)"
_LAST_DIGITS: Final = (0, 3, 7)
"""The last digits of milliseconds in a ``datetime``, which counts in 300ths of a second."""

EARLIEST: Final = datetime(1753, 1, 1, tzinfo=UTC)
"""The first instant of a ``datetime``."""
_LATEST: Final = datetime(9999, 12, 31, 23, 59, 59, 997_000, tzinfo=UTC)

_SKIP_LOCKED: Final = "WITH (READPAST, READCOMMITTEDLOCK)"
"""Skips rows that another transaction has changed: it removes them, or has added them, for a later query to see.

Claimed rows are read, because an update lock does not block readers. READCOMMITTEDLOCK: with row versions switched on
in the database, READPAST is refused without it.
"""


_LOCK_FOR_CLAIM: Final = "WITH (UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)"
"""Locks the row for the transaction, or skips it if another transaction has locked it."""


class SqlServerTimeouts(ServerTimeouts):
    """Keeps timeouts in a table of SQL Server; :class:`postdate.ports.timeouts.TimeoutPersister`.

    A due time is rounded up to one that a ``datetime`` can store: by 3 ms at most.

    Args:
        url: ``mssql://user:password@host:port/database``, in TLS unless it says otherwise; for its options see
            :class:`postdate.backends.sqlserver.connection.SqlServerInstance`. Or a
            :class:`postdate.backends.sqlserver.database.SqlServer`, whose connections and ``schema`` it uses.
        schema: of the table; ``None``: ``dbo``.
        table_prefix: of the table's name, which has at most 128 characters. ``None``: the prefix of the endpoint, see
            :func:`postdate.backends.sql.timeouts_layout.table_prefix`.

    Raises:
        ConfigurationError: the address, the schema or the table's name is invalid.
    """

    def __init__(
        self, url: str | sqlserver_schema.SqlServerSchema, *, schema: str | None = None, table_prefix: str | None = None
    ) -> None:
        database = sqlserver_schema.SqlServerSchema.of(url, schema)
        super().__init__(database, lambda name: SqlServerTable(database.schema, name), table_prefix)


class SqlServerTable(RowLockTimeoutTable):
    dialect = SqlServerSqlDialect()

    def __init__(self, schema: str, name: str) -> None:
        plain = (
            f"{sqlserver_schema.quote_name(schema)}."
            f"{sqlserver_schema.quote_name(sqlserver_schema.check_name(name, _TABLE_DESCRIPTION))}"
        )
        table = plain.replace("%", "%%")
        # The indexes are part of CREATE TABLE, so one check is enough for all.
        create = (
            sqlserver_schema.create_schema_statement(schema),
            (
                f"IF OBJECT_ID({sqlserver_schema.literal(plain)}, N'U') IS NULL CREATE TABLE {plain} (\n"
                f"    [Id] uniqueidentifier NOT NULL PRIMARY KEY, [Destination] nvarchar(200), "
                f"[SagaId] uniqueidentifier,\n"
                f"    [State] varbinary(max), [Time] datetime, [Headers] nvarchar(max) NOT NULL,\n"
                f"    [PersistenceVersion] varchar(23) NOT NULL,\n"
                f"    INDEX [Index_SagaId] ([SagaId]), INDEX [Index_Time] ([Time])\n)"
            ),
        )
        self._lock = sqlserver_schema.SqlServerNames(schema, "timeouts").lock_name("setup")
        of_id = "[Id] = CAST(%(Id)s AS uniqueidentifier)"
        row = "[Id], [Destination], [SagaId], [State], CONVERT(varchar(27), [Time], 121), [Headers]"
        sql = TimeoutStatements(
            insert=(
                f"INSERT INTO {table} "
                f"([Id], [Destination], [SagaId], [State], [Time], [Headers], [PersistenceVersion]) "
                f"SELECT CAST(%(Id)s AS uniqueidentifier), %(Destination)s, CAST(%(SagaId)s AS uniqueidentifier), "
                f"CONVERT(varbinary(max), CAST(%(State)s AS varchar(max)), 1), CAST(%(Time)s AS datetime), "
                f"%(Headers)s, %(PersistenceVersion)s "
                f"WHERE NOT EXISTS (SELECT 1 FROM {table} WITH (UPDLOCK, HOLDLOCK) WHERE {of_id})"
            ),
            peek=f"SELECT {row} FROM {table} {_SKIP_LOCKED} WHERE {of_id}",
            claim=f"SELECT {row} FROM {table} {_LOCK_FOR_CLAIM} WHERE {of_id}",
            delete=f"DELETE FROM {table} WHERE {of_id}",
            delete_saga=f"DELETE FROM {table} WHERE [SagaId] = CAST(%(Id)s AS uniqueidentifier)",
            due=(
                f"SELECT TOP (%(limit)s) [Id], CONVERT(varchar(27), [Time], 121) FROM {table} {_SKIP_LOCKED} "
                f"WHERE [Time] > CAST(%(after)s AS datetime) AND [Time] <= CAST(%(until)s AS datetime) ORDER BY [Time]"
            ),
            first=(
                f"SELECT TOP (1) CONVERT(varchar(27), [Time], 121) FROM {table} {_SKIP_LOCKED} "
                f"WHERE [Time] > CAST(%(after)s AS datetime) ORDER BY [Time]"
            ),
        )
        super().__init__(plain, create, sql)

    @override
    def setup(self, session: Any) -> None:
        with sqlserver_schema.lock_setup(session, self._lock):
            for statement in self.create:
                session.change(statement)

    @override
    def key(self, normal: str) -> Mapping[str, Any]:
        return {"Id": normal}

    @override
    def instant(self, instant: datetime) -> object:
        return time_bound(instant)

    @override
    def insert(self, session: Any, row: dict[str, Any]) -> bool:
        """Insert a row; bytes are sent as hexadecimal text."""
        if (units := len(row[DESTINATION].encode("utf-16-le")) // 2) > DESTINATION_LIMIT:
            raise InvalidMessage(
                f"the destination of timeout {row[ID]} has {units} UTF-16 units; SQL Server allows at most "
                f"{DESTINATION_LIMIT}"
            )
        values = {**row, STATE: f"0x{row[STATE].hex()}", TIME: time_bound(round_up_to_datetime(row[TIME]))}
        return session.change(self.sql.insert, values) > 0


def round_up_to_datetime(due: datetime) -> datetime:
    """Return the first ``datetime`` of SQL Server not before ``due``. Raise `InvalidMessage` if there is none."""
    if due > _LATEST:
        raise InvalidMessage(f"SQL Server cannot store a timeout that is due at {due.isoformat()}")
    due = max(round_up(due, 3), EARLIEST)
    last = due.microsecond // 1000 % 10
    return due + timedelta(milliseconds=next(ending for ending in (*_LAST_DIGITS, 10) if ending >= last) - last)


def time_bound(instant: datetime) -> str:
    """Return the text of the last ``datetime`` of SQL Server not after ``instant``."""
    instant = max(instant.astimezone(UTC), EARLIEST)
    milliseconds = instant.microsecond // 1000
    last = max(ending for ending in _LAST_DIGITS if ending <= milliseconds % 10)
    return f"{instant:%Y-%m-%dT%H:%M:%S}.{milliseconds // 10 * 10 + last:03d}"
