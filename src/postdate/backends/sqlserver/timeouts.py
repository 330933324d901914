"""Timeouts in SQL Server 2016 or newer, in the table that upstream's SQL persistence lays out.

Not run against a server so far: none can be installed where Postdate is built. The conformance suite runs it when
``POSTDATE_SQLSERVER_URL`` is set; without, its statements are parsed, and the rest is what MariaDB proves.
Source: specification 4.6; ADR 0008, ADR 0014.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from postdate.backends.rowlocks.timeouts import ServerTimeouts
from postdate.backends.sqlserver.connection import SqlServerInstance, SqlServerSession
from postdate.backends.sqlserver.names import SqlServerNames, check_name, literal, quoted
from postdate.backends.sqlserver.setup import TAKE_TURN
from postdate.errors import InvalidMessage, StoreUnavailable
from postdate.messages import DESTINATION_LIMIT
from postdate.persistence.timeouts import DESTINATION, ID, STATE, TIME, rounded_up, table_name

_WHAT: Final = "the table of timeouts (table_prefix=...)"
_WAIT_MILLISECONDS: Final = 30_000
_ALL: Final = 2**63 - 1
_ENDINGS: Final = (0, 3, 7)
"""The last digits that milliseconds have in a ``datetime``, which counts in 300ths of a second."""

EARLIEST: Final = datetime(1753, 1, 1, tzinfo=UTC)
"""The first instant of a ``datetime``."""
_LATEST: Final = datetime(9999, 12, 31, 23, 59, 59, 997_000, tzinfo=UTC)

_SKIPPING: Final = "WITH (READPAST, READCOMMITTEDLOCK)"
"""Looks at no row that somebody has changed: whoever is removing one has it in hand, whatever comes of it; and a row
that is being added is seen by a later look. What is only claimed is seen: an update lock is no bar to readers.
READCOMMITTEDLOCK: with row versions switched on in the database, READPAST is refused without it."""


_CLAIMING: Final = "WITH (UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)"
"""Locks the row for the transaction, or does not see it because somebody else has it locked."""


class SqlServerTimeouts(ServerTimeouts):
    """Keeps timeouts in a table of SQL Server; :class:`postdate.ports.timeouts.TimeoutPersister`.

    A due time is rounded up to one that a ``datetime`` has: by 3 ms at most.

    Args:
        url: ``mssql://user:password@host:port/database``, in TLS unless it says otherwise; for its options see
            :class:`postdate.backends.sqlserver.connection.SqlServerInstance`.
        schema: that the table is in.
        table_prefix: what the name of the table begins with; the name has at most 128 characters. ``None``: that of the
            endpoint, see :func:`postdate.persistence.timeouts.table_prefix`.

    Raises:
        ConfigurationError: the address, the schema or the table cannot be.
    """

    def __init__(self, url: str, *, schema: str = "dbo", table_prefix: str | None = None) -> None:
        self.server = SqlServerInstance(url)
        self._schema = check_name(schema, "schema")
        super().__init__(self.server, lambda name: SqlServerTable(schema, name), table_prefix)

    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that :meth:`setup` runs where nothing is there yet, for a database administrator."""
        table = SqlServerTable(self._schema, table_name(endpoint, prefix=self._prefix))
        rights = (
            f"For a user who may not create tables:\nGRANT SELECT, INSERT, UPDATE, DELETE ON {table.name} TO the_user;"
        )
        create = "".join(f"{statement};\n" for statement in table.create)
        return f"{create}{textwrap.indent(rights, '-- ', lambda line: True)}\n"


class SqlServerTable:
    """Every statement of one table; see :class:`postdate.backends.rowlocks.timeouts.Table`.

    Args:
        schema: it is in.
        name: its name.

    Raises:
        ConfigurationError: SQL Server cannot have such a name.
    """

    def __init__(self, schema: str, name: str) -> None:
        self.name = plain = f"{quoted(schema)}.{quoted(check_name(name, _WHAT))}"
        table = plain.replace("%", "%%")
        missing = f"IF OBJECT_ID({literal(plain)}, N'U') IS NULL"
        # The indexes hang on the table: they are made in one statement, so one question decides on all.
        self.create = (
            f"IF SCHEMA_ID({literal(schema)}) IS NULL EXEC ({literal(f'CREATE SCHEMA {quoted(schema)}')})",
            (
                f"{missing} CREATE TABLE {plain} (\n"
                f"    [Id] uniqueidentifier NOT NULL PRIMARY KEY, [Destination] nvarchar(200), "
                f"[SagaId] uniqueidentifier,\n"
                f"    [State] varbinary(max), [Time] datetime, [Headers] nvarchar(max) NOT NULL,\n"
                f"    [PersistenceVersion] varchar(23) NOT NULL,\n"
                f"    INDEX [Index_SagaId] ([SagaId]), INDEX [Index_Time] ([Time])\n)"
            ),
        )
        self._lock = SqlServerNames(schema, "timeouts").lock("setup")
        of_id = "[Id] = CAST(%(Id)s AS uniqueidentifier)"
        self.insert_one = (
            f"INSERT INTO {table} ([Id], [Destination], [SagaId], [State], [Time], [Headers], [PersistenceVersion]) "
            f"SELECT CAST(%(Id)s AS uniqueidentifier), %(Destination)s, CAST(%(SagaId)s AS uniqueidentifier), "
            f"CONVERT(varbinary(max), CAST(%(State)s AS varchar(max)), 1), CAST(%(Time)s AS datetime), %(Headers)s, "
            f"%(PersistenceVersion)s "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} WITH (UPDLOCK, HOLDLOCK) WHERE {of_id})"
        )
        row = "[Id], [Destination], [SagaId], [State], CONVERT(varchar(27), [Time], 121), [Headers]"
        self.peek_one = f"SELECT {row} FROM {table} {_SKIPPING} WHERE {of_id}"
        self.claim_one = f"SELECT {row} FROM {table} {_CLAIMING} WHERE {of_id}"
        self.delete_one = f"DELETE FROM {table} WHERE {of_id}"
        self.delete_all = f"DELETE FROM {table} WHERE [SagaId] = CAST(%(SagaId)s AS uniqueidentifier)"
        self.find_due = (
            f"SELECT TOP (%(limit)s) [Id], CONVERT(varchar(27), [Time], 121) FROM {table} {_SKIPPING} "
            f"WHERE [Time] > CAST(%(after)s AS datetime) AND [Time] <= CAST(%(until)s AS datetime) ORDER BY [Time]"
        )
        self.find_first = (
            f"SELECT TOP (1) CONVERT(varchar(27), [Time], 121) FROM {table} {_SKIPPING} "
            f"WHERE [Time] > CAST(%(after)s AS datetime) ORDER BY [Time]"
        )

    def setup(self, session: SqlServerSession) -> None:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`."""
        session.begin()
        try:
            self._wait_for_our_turn(session)
            for statement in self.create:
                session.change(statement)
            session.commit()
        except BaseException:
            session.rollback()
            raise

    def _wait_for_our_turn(self, session: SqlServerSession) -> None:
        ((granted,),) = session.rows(TAKE_TURN, {"name": self._lock, "wait": _WAIT_MILLISECONDS})
        if granted < 0:
            raise StoreUnavailable("another process has been setting up this schema for half a minute; try again")

    def insert(self, session: SqlServerSession, row: dict[str, Any]) -> bool:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`; bytes travel as hexadecimal text."""
        _check_destination(row)
        values = {**row, STATE: f"0x{row[STATE].hex()}", TIME: bound(as_stored(row[TIME]))}
        return session.change(self.insert_one, values) > 0

    def peek(self, session: SqlServerSession, timeout_id: str) -> tuple[Any, ...] | None:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`."""
        found = session.rows(self.peek_one, {"Id": timeout_id})
        return found[0] if found else None

    def claim(self, session: SqlServerSession, timeout_id: str) -> tuple[Any, ...] | None:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`."""
        found = session.rows(self.claim_one, {"Id": timeout_id})
        return found[0] if found else None

    def delete(self, session: SqlServerSession, timeout_id: str) -> int:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`."""
        return session.change(self.delete_one, {"Id": timeout_id})

    def delete_saga(self, session: SqlServerSession, saga_id: str) -> int:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`."""
        return session.change(self.delete_all, {"SagaId": saga_id})

    def due(
        self, session: SqlServerSession, after: datetime, until: datetime, at_most: int | None
    ) -> Sequence[tuple[Any, ...]]:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`."""
        values = {"after": bound(after), "until": bound(until), "limit": _ALL if at_most is None else at_most}
        return session.rows(self.find_due, values)

    def first(self, session: SqlServerSession, after: datetime) -> object:
        """See :class:`postdate.backends.rowlocks.timeouts.Table`."""
        found = session.rows(self.find_first, {"after": bound(after)})
        return found[0][0] if found else None


def as_stored(due: datetime) -> datetime:
    """Return the first instant of a ``datetime`` that is not before ``due``.

    Raises:
        InvalidMessage: there is none.
    """
    if due > _LATEST:
        raise InvalidMessage(f"SQL Server keeps no timeout that is due at {due.isoformat()}")
    due = max(rounded_up(due, 3), EARLIEST)
    last = due.microsecond // 1000 % 10
    return due + timedelta(milliseconds=next(ending for ending in (*_ENDINGS, 10) if ending >= last) - last)


def bound(instant: datetime) -> str:
    """Return the text of the last instant of a ``datetime`` that is not after ``instant``: nothing lies in between."""
    instant = max(instant.astimezone(UTC), EARLIEST)
    milliseconds = instant.microsecond // 1000
    last = max(ending for ending in _ENDINGS if ending <= milliseconds % 10)
    return f"{instant:%Y-%m-%dT%H:%M:%S}.{milliseconds // 10 * 10 + last:03d}"


def _check_destination(row: dict[str, Any]) -> None:
    units = len(row[DESTINATION].encode("utf-16-le")) // 2
    if units > DESTINATION_LIMIT:
        raise InvalidMessage(
            f"the destination of timeout {row[ID]} has {units} UTF-16 units; SQL Server takes {DESTINATION_LIMIT}"
        )
