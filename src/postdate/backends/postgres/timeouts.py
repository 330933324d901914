"""Timeouts in PostgreSQL, in the table of upstream's SQL persistence.

With queues in the same database, a timeout is stored, or dispatched and removed, in their transaction.
Source: ADR 0007, ADR 0014.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection, OpenDatabase
from postdate.backends.postgres.answering import BoundedConnection
from postdate.backends.postgres.listening import HOLDS_AT_MOST
from postdate.backends.postgres.names import SchemaNames, check_name, literal, own_table_script, quote_name, sql
from postdate.backends.postgres.statements import PostgresSqlDialect
from postdate.backends.sql.timeouts import CONTENT, LATER, SharedSqlTimeouts, TimeoutTable, standard_statements
from postdate.backends.sql.timeouts_layout import TIME, normal_id, round_up, table_name
from postdate.errors import StoreNotSetUp
from postdate.ports import Scripted
from postdate.ports.timeouts import Timeout, TimeoutClaim
from postdate.runtime.resource import Resource
from postdate.runtime.threads import run_in_thread

_TABLE_DESCRIPTION: Final = "the table of timeouts (table_prefix=...)"
_LIMIT_IDLE_TRANSACTION: Final = (
    f"SET LOCAL idle_in_transaction_session_timeout = {HOLDS_AT_MOST // timedelta(milliseconds=1)}"
)
"""The server ends the claims of a frozen process: ADR 54."""

UPSTREAM_SCHEMA: Final = "public"
"""The schema in which .NET endpoints create their tables by default."""


class _InAnySchema:
    """The identity of a database without its schema.

    Our statements name their schema, so transactions span all schemas.
    """

    def __init__(self, identity: tuple[str, ...]) -> None:
        self._database = identity[:-1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _InAnySchema):
            return self._database == other._database
        return isinstance(other, tuple) and self._database == other[:-1]

    def __hash__(self) -> int:
        return hash(self._database)


class PostgresTimeouts(SharedSqlTimeouts["_PostgresTable"], Scripted):
    """Keeps timeouts in a table of PostgreSQL; :class:`postdate.ports.timeouts.TimeoutPersister`.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that other adapters use, too.
        schema: of the table; any characters, whatever the schema of the database. Upstream has its tables in
            ``public`` by default. Queues in any schema of the same database share their transactions.
        table_prefix: of the table's name; any characters. ``None``: the prefix of the endpoint, see
            :func:`postdate.backends.sql.timeouts_layout.table_prefix`.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: the
            setting of the database, by default 20 seconds.

    Raises:
        ConfigurationError: the address, the schema, the table or the duration is invalid.
    """

    def __init__(
        self,
        database: str | OpenDatabase,
        *,
        schema: str = UPSTREAM_SCHEMA,
        table_prefix: str | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self._schema = check_name(schema, "schema")
        self._connections = Access(database, schema, answers_within=answers_within)
        super().__init__(
            self._connections,
            lambda name: _PostgresTable(schema, check_name(name, _TABLE_DESCRIPTION), self._connections.where),
            table_prefix,
        )

    @property
    def resource(self) -> Resource:
        """The resource of the database."""
        return self._connections.resource

    @property
    @override
    def database(self) -> object:
        return _InAnySchema(self._connections.identity)

    @override
    def setup_statements(self, endpoint: str) -> str:
        table = table_name(endpoint, prefix=self._prefix)
        return own_table_script(self._schema, table, self._table_of(endpoint).setup[1:])

    @override
    async def setup(self) -> None:
        layout = self._checked_table

        def create(connection: Connection) -> None:
            connection.execute("SELECT pg_advisory_xact_lock(%s, 0)", (SchemaNames(self._schema).lock_class,))
            schema, table = connection.execute(sql(layout.exists_query)).fetchone() or (None, None)
            if table is None:  # Only if it is missing, so that later starts need no right to create tables.
                for statement in layout.setup if schema is None else layout.setup[1:]:
                    connection.execute(sql(statement))

        await self._connections.transaction(create, patiently=True)

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """Claim a timeout by a row lock.

        The server ends its transaction, and the claim, after a minute without statements.
        """
        normal = normal_id(timeout_id)
        return None if normal is None else await run_in_thread(self._claim, self._checked_table, normal)

    def _claim(self, table: _PostgresTable, timeout_id: str) -> TimeoutClaim | None:
        connection = self._connections.acquire()
        timeout = None
        try:
            with self._connections.translate_errors():
                # One round trip by one text, not a pipeline. The driver sends a Flush after the Sync of a pipeline, and
                # that stops the server's timer for an idle transaction (PostgreSQL 15 and 18, ADR 54).
                cursor = connection.execute(table.claim(timeout_id))
                while cursor.nextset():
                    pass
                row = cursor.fetchone()
            timeout = self._decode_row(row)
        finally:
            if timeout is None:
                _roll_back(self._connections, connection)
        if timeout is None:
            return None
        claim = _ConnectionClaim(self._connections, connection, table, timeout)
        return TimeoutClaim(timeout, claim.remove, claim.release)

    @override
    async def close(self) -> None:
        await run_in_thread(self._connections.close_blocking)


class _ConnectionClaim:
    """The state of a :class:`postdate.ports.timeouts.TimeoutClaim`: a row locked by a session's transaction."""

    def __init__(
        self, connections: Access, connection: BoundedConnection, table: _PostgresTable, timeout: Timeout
    ) -> None:
        self.timeout = timeout
        self._connections, self._table = connections, table
        self._connection: BoundedConnection | None = connection

    async def remove(self) -> bool:
        connection, self._connection = self._connection, None
        return connection is not None and await run_in_thread(self._remove, connection)

    def _remove(self, connection: BoundedConnection) -> bool:
        try:
            with self._connections.translate_errors():
                with _one_round_trip(connection):
                    removed = connection.execute(self._table.sql.delete, self._table.key(self.timeout.timeout_id))
                    connection.execute("COMMIT")
                return removed.rowcount > 0
        finally:
            self._connections.release(connection)  # It closes the connection unless the transaction has ended.

    async def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await run_in_thread(_roll_back, self._connections, connection)


def _one_round_trip(connection: Connection) -> AbstractContextManager[object]:
    return connection.pipeline() if psycopg.Pipeline.is_supported() else nullcontext()


def _roll_back(connections: Access, connection: BoundedConnection) -> None:
    """Roll back and release the connection, which closes it if the rollback failed. Never raise."""
    with suppress(psycopg.Error):
        connection.execute("ROLLBACK")
    connections.release(connection)


class _PostgresTable(TimeoutTable):
    dialect, no_limit = PostgresSqlDialect(), None

    def __init__(self, schema: str, table: str, where: str) -> None:
        self._qualified_name, self._where = f"{quote_name(schema)}.{quote_name(table)}", where
        self._digits: int | None = None
        self.setup = (
            f"CREATE SCHEMA IF NOT EXISTS {quote_name(schema)}",
            (
                f"CREATE TABLE {self._qualified_name} (\n"
                f'    "Id" uuid NOT NULL PRIMARY KEY, "Destination" varchar(200), "SagaId" uuid, "State" bytea,\n'
                f'    "Time" timestamp, "Headers" text NOT NULL, "PersistenceVersion" varchar(23) NOT NULL\n)'
            ),
            f'CREATE INDEX ON {self._qualified_name} ("SagaId")',
            f'CREATE INDEX ON {self._qualified_name} ("Time")',
        )
        self.exists_query = (
            f"SELECT to_regnamespace({literal(quote_name(schema))}), to_regclass({literal(self._qualified_name)})"
        )
        self._precision = sql(
            f"SELECT datetime_precision FROM information_schema.columns WHERE table_schema = {literal(schema)} "
            f"AND table_name = {literal(table)} AND column_name = {literal(TIME)}"
        )
        name = self._qualified_name.replace("%", "%%")
        # Python has no later years, and no 'infinity', which is how .NET writes its latest time: psycopg would raise.
        later = f"""{LATER} AND "Time" < '10000-01-01'"""
        first = f'SELECT "Time" FROM {name} WHERE {later} ORDER BY "Time" LIMIT 1'
        super().__init__(standard_statements(name, '"Headers"::text', first))
        self._claim = f'SELECT {CONTENT}, "Headers"::text FROM {self._qualified_name} WHERE "Id" = '

    def claim(self, timeout_id: str) -> bytes:
        """Return a text without parameters that begins a transaction and locks the row, if it is not locked."""
        return sql(f"BEGIN; {_LIMIT_IDLE_TRANSACTION}; {self._claim}{literal(timeout_id)} FOR UPDATE SKIP LOCKED")

    @override
    def instant(self, instant: datetime) -> datetime:
        return instant.astimezone(UTC).replace(tzinfo=None)

    @override
    def insert(self, session: Connection, row: dict[str, Any]) -> bool:
        time = round_up(row[TIME], self._time_digits(session))
        return self.dialect.change(session, self.sql.insert, {**row, TIME: self.instant(time)}) > 0

    def _time_digits(self, connection: Connection) -> int:
        """Return how many digits of a second the table stores: the server would round to the nearest, perhaps down."""
        if self._digits is None:
            row = connection.execute(self._precision).fetchone()
            if row is None or row[0] is None:
                raise StoreNotSetUp(f"{self._where} lacks the table {self._qualified_name}: run `postdate setup`")
            self._digits = int(row[0])
        return self._digits
