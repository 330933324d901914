"""Timeouts in PostgreSQL, in the table that upstream's SQL persistence lays out for it.

With queues in the same database, a timeout is stored, or dispatched and removed, in their transaction.
Source: specification 4.6; ADR 0007, ADR 0014.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection, OpenDatabase
from postdate.backends.postgres.answering import BoundedConnection
from postdate.backends.postgres.listening import HOLDS_AT_MOST
from postdate.backends.postgres.names import SchemaNames, check_name, literal, quoted, sql
from postdate.backends.postgres.scripts import own_table_script
from postdate.errors import ConfigurationError, StoreNotSetUp, TimeoutConcurrentlyProcessed
from postdate.persistence import chunks
from postdate.persistence.timeouts import (
    TIME,
    checked,
    decode,
    encode,
    normal_id,
    normal_saga,
    rounded_up,
    table_name,
)
from postdate.ports import Scripted, Work
from postdate.ports.timeouts import DueChunk, Timeout, TimeoutClaim, TimeoutPersister
from postdate.runtime.threads import in_thread

_WHAT: Final = "the table of timeouts (table_prefix=...)"
_BOUND: Final = f"SET LOCAL idle_in_transaction_session_timeout = {HOLDS_AT_MOST // timedelta(milliseconds=1)}"
"""The server lets go of what a process claimed that was frozen since: ADR 19."""

UPSTREAM_SCHEMA: Final = "public"
"""Where a .NET endpoint makes its tables by default: found there without being told."""


class _InAnySchema:
    """The identity of a database, equal to that of whatever is in it: our statements name their schema themselves.

    Args:
        identity: of a :class:`~postdate.backends.postgres.Access`; its last part is the schema.
    """

    def __init__(self, identity: tuple[str, ...]) -> None:
        self._database = identity[:-1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _InAnySchema):
            return self._database == other._database
        return isinstance(other, tuple) and self._database == other[:-1]

    def __hash__(self) -> int:
        return hash(self._database)


class PostgresTimeouts(TimeoutPersister, Scripted):
    """Keeps timeouts in a table of PostgreSQL; :class:`postdate.ports.timeouts.TimeoutPersister`.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that others use, too.
        schema: where the table is; any characters, whatever the schema of the database. Upstream has its tables in
            ``public`` unless it is told otherwise.
            Queues may be in any schema of the same database: their transactions are shared all the same.
        table_prefix: what the name of the table begins with; any characters. ``None``: that of the endpoint, see
            :func:`postdate.persistence.timeouts.table_prefix`.
        answers_within: after so long a silence of the server a connection is given up; above 0. ``None``: as the
            database says, or 20 seconds.

    Raises:
        ConfigurationError: the address, the schema, the table or the duration cannot be.
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
        self._prefix, self._endpoint = table_prefix, ""
        self._sql = None if table_prefix is None else self._statements("")
        self._digits: int | None = None

    @property
    @override
    def database(self) -> object:
        """See :class:`postdate.ports.timeouts.TimeoutPersister`; that of a transport on any schema there."""
        return _InAnySchema(self._connections.identity)

    @override
    async def initialize(self, endpoint: str) -> None:
        """Settle the name of the table; the server is not asked."""
        self._endpoint, self._sql, self._digits = endpoint, self._statements(endpoint), None

    def _statements(self, endpoint: str) -> _TimeoutStatements:
        return _TimeoutStatements(self._schema, check_name(table_name(endpoint, prefix=self._prefix), _WHAT))

    @property
    def _known(self) -> _TimeoutStatements:
        if self._sql is None:
            raise ConfigurationError(
                "PostgresTimeouts does not know its table yet: call initialize(endpoint) first, or give table_prefix="
            )
        return self._sql

    @override
    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that makes what :meth:`setup` does, for a database administrator; may be run again."""
        table = table_name(endpoint, prefix=self._prefix)
        return own_table_script(self._schema, table, self._statements(endpoint).setup[1:])

    @override
    async def setup(self) -> None:
        """Create the schema and the table where they are missing; of a table that is there, nothing is changed."""
        statements = self._known

        def create(connection: Connection) -> None:
            connection.execute("SELECT pg_advisory_xact_lock(%s, 0)", (SchemaNames(self._schema).lock_class,))
            schema, table = connection.execute(statements.exist).fetchone() or (None, None)
            if table is None:  # so that later starts need no right to create
                for statement in statements.setup if schema is None else statements.setup[1:]:
                    connection.execute(sql(statement))

        await self._connections.transaction(create, patiently=True)

    @override
    async def add(self, timeout: Timeout) -> bool:
        row = encode(checked(timeout))
        return await self._connections.run(lambda connection: self._insert(connection, row))

    @override
    def adding(self, timeout: Timeout) -> Work:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.adding`; the transaction is a connection of psycopg."""
        row = encode(checked(timeout))

        def add(connection: Connection) -> None:
            self._insert(connection, row)

        return add

    def _insert(self, connection: Connection, row: dict[str, Any]) -> bool:
        time = rounded_up(row[TIME], self._precision(connection))
        return connection.execute(self._known.insert, {**row, TIME: _naive(time)}).rowcount > 0

    def _precision(self, connection: Connection) -> int:
        """Return how many digits of a second the table keeps; the server would round to the nearest."""
        if self._digits is None:
            found = connection.execute(self._known.precision).fetchone()
            if found is None or found[0] is None:
                raise StoreNotSetUp(
                    f"{self._connections.where} lacks the table {self._known.name}: run `postdate setup`"
                )
            self._digits = int(found[0])
        return self._digits

    @override
    async def peek(self, timeout_id: str) -> Timeout | None:
        statement, values = self._known.peek, {"id": normal_id(timeout_id)}
        row = await self._connections.run(lambda connection: connection.execute(statement, values).fetchone())
        return None if row is None else decode(*row, owner=self._endpoint)

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.claim`: the row is locked by a transaction.

        The server ends it when nothing is said in it for a minute; what is done with the claim after that fails.
        """
        wanted = normal_id(timeout_id)
        return None if wanted is None else await in_thread(self._claim, self._known, wanted)

    def _claim(self, statements: _TimeoutStatements, timeout_id: str) -> TimeoutClaim | None:
        connection = self._connections.take()
        found = None
        try:
            with self._connections.translating():
                # One round trip by one text: after a pipeline, PostgreSQL 15 limits no silence in a transaction.
                claimed = connection.execute(statements.claim(timeout_id))
                while claimed.nextset():
                    pass
                row = claimed.fetchone()
            found = None if row is None else decode(*row, owner=self._endpoint)
        finally:
            if found is None:
                _roll_back(self._connections, connection)
        if found is None:
            return None
        claim = _ConnectionClaim(self._connections, connection, statements, found)
        return TimeoutClaim(found, claim.remove, claim.release)

    @override
    async def try_remove(self, timeout_id: str) -> bool:
        return await self._connections.run(lambda connection: self._remove(connection, timeout_id))

    @override
    def removing(self, timeout_id: str) -> Work:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.removing`; it is given a connection of psycopg."""

        def remove(connection: Connection) -> None:
            if not self._remove(connection, timeout_id):
                raise TimeoutConcurrentlyProcessed(f"timeout {timeout_id} was removed meanwhile")

        return remove

    def _remove(self, connection: Connection, timeout_id: str) -> bool:
        return connection.execute(self._known.delete, {"id": normal_id(timeout_id)}).rowcount > 0

    @override
    async def remove_by_saga(self, saga_id: str) -> int:
        return await self._connections.run(lambda connection: self._remove_by_saga(connection, saga_id))

    @override
    def removing_by_saga(self, saga_id: str) -> Work:
        def remove(connection: Connection) -> None:
            self._remove_by_saga(connection, saga_id)

        return remove

    def _remove_by_saga(self, connection: Connection, saga_id: str) -> int:
        return connection.execute(self._known.delete_saga, {"saga": normal_saga(saga_id)}).rowcount

    @override
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        statements = self._known

        def find(connection: Connection) -> DueChunk:
            def due(after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
                values = {"after": _naive(after), "until": _naive(until), "limit": at_most}
                return connection.execute(statements.due, values).fetchall()

            def first(after: datetime) -> object:
                row = connection.execute(statements.first, {"after": _naive(after)}).fetchone()
                return None if row is None else row[0]

            return chunks.next_chunk(start, now, limit, due, first)

        return await self._connections.run(find)

    @override
    async def close(self) -> None:
        """Close every connection; a second time without effect."""
        await in_thread(self._connections.close_blocking)


class _ConnectionClaim:
    """What a :class:`postdate.ports.timeouts.TimeoutClaim` calls: a row, locked by the transaction of a session."""

    def __init__(
        self, connections: Access, connection: BoundedConnection, statements: _TimeoutStatements, timeout: Timeout
    ) -> None:
        self.timeout = timeout
        self._connections, self._statements = connections, statements
        self._connection: BoundedConnection | None = connection

    async def remove(self) -> bool:
        """Remove it in the transaction that has it locked."""
        connection, self._connection = self._connection, None
        return connection is not None and await in_thread(self._remove, connection)

    def _remove(self, connection: BoundedConnection) -> bool:
        try:
            with self._connections.translating():
                with _one_round_trip(connection):
                    removed = connection.execute(self._statements.delete, {"id": self.timeout.timeout_id})
                    connection.execute("COMMIT")
                return removed.rowcount > 0
        finally:
            self._connections.put(connection)  # which closes it unless the transaction has ended

    async def release(self) -> None:
        """Roll the transaction back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await in_thread(_roll_back, self._connections, connection)


def _one_round_trip(connection: Connection) -> AbstractContextManager[object]:
    """Send the statements of a block together, where the library of the driver can: libpq 14 or newer."""
    return connection.pipeline() if psycopg.Pipeline.is_supported() else nullcontext()


def _roll_back(connections: Access, connection: BoundedConnection) -> None:
    """End a transaction and give its connection back, which closes it if that has failed. Never raises."""
    with suppress(psycopg.Error):
        connection.execute("ROLLBACK")
    connections.put(connection)


def _naive(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(tzinfo=None)


class _TimeoutStatements:
    """Every statement of one table, and its name.

    Args:
        schema: it is in.
        table: its name.
    """

    def __init__(self, schema: str, table: str) -> None:
        self.name = f"{quoted(schema)}.{quoted(table)}"
        name = self.name.replace("%", "%%")
        self.setup = (
            f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}",
            (
                f"CREATE TABLE {self.name} (\n"
                f'    "Id" uuid NOT NULL PRIMARY KEY, "Destination" varchar(200), "SagaId" uuid, "State" bytea,\n'
                f'    "Time" timestamp, "Headers" text NOT NULL, "PersistenceVersion" varchar(23) NOT NULL\n)'
            ),
            f'CREATE INDEX ON {self.name} ("SagaId")',
            f'CREATE INDEX ON {self.name} ("Time")',
        )
        self.exist = sql(f"SELECT to_regnamespace({literal(quoted(schema))}), to_regclass({literal(self.name)})")
        self.precision = sql(
            f"SELECT datetime_precision FROM information_schema.columns WHERE table_schema = {literal(schema)} "
            f"AND table_name = {literal(table)} AND column_name = {literal(TIME)}"
        )
        self.insert = sql(
            f'INSERT INTO {name} ("Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion") '
            f"VALUES (%(Id)s, %(Destination)s, %(SagaId)s, %(State)s, %(Time)s, %(Headers)s, %(PersistenceVersion)s) "
            f'ON CONFLICT ("Id") DO NOTHING'
        )
        columns = '"Id", "Destination", "SagaId", "State", "Time", "Headers"::text'
        self.peek = sql(f'SELECT {columns} FROM {name} WHERE "Id" = %(id)s')
        self._claim = f'SELECT {columns} FROM {self.name} WHERE "Id" = '
        self.delete = sql(f'DELETE FROM {name} WHERE "Id" = %(id)s')
        self.delete_saga = sql(f'DELETE FROM {name} WHERE "SagaId" = %(saga)s')
        self.due = sql(
            f'SELECT "Id", "Time" FROM {name} WHERE "Time" > %(after)s AND "Time" <= %(until)s ORDER BY "Time" '
            f"LIMIT %(limit)s"
        )
        # What .NET writes for the end of all times is 'infinity', which no date-time of Python's can be.
        later = """"Time" > %(after)s AND "Time" < 'infinity'"""
        self.first = sql(f'SELECT "Time" FROM {name} WHERE {later} ORDER BY "Time" LIMIT 1')

    def claim(self, timeout_id: str) -> bytes:
        """Return the text, without parameters, that begins a transaction and locks a row in it, or finds none."""
        wanted = literal(timeout_id)
        return sql(f"BEGIN; {_BOUND}; {self._claim}{wanted} FOR UPDATE SKIP LOCKED")
