"""Outboxes in a schema of PostgreSQL, beside the tables of the application, so that one commit covers both.

A handler gets an asynchronous connection of psycopg, opened with the settings of the application: those of our own
connections are made for our own statements. What the outbox does by itself goes through these, that of several messages
in one statement. Source: specification 7; ADR 0017, 0026.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any, Final

import anyio
import psycopg
from psycopg.pq import TransactionStatus
from typing_extensions import override

from postdate.backends.postgres.access import Access, OpenDatabase
from postdate.backends.postgres.answering import BoundedAsyncConnection, BoundedConnection
from postdate.backends.postgres.errors import is_conflict, translate
from postdate.backends.postgres.names import part_steps, sql
from postdate.backends.postgres.pool import as_opened
from postdate.backends.postgres.scripts import part_script
from postdate.backends.sql.operations import decode_operations, encode_operations, storable
from postdate.errors import ConfigurationError, StoreError, StoreUnavailable, StoreUnreachable
from postdate.ports import NativeTransaction, OutboxStore, OutboxTransaction, Scripted, Work
from postdate.ports.outbox import Operation, OutboxRecord
from postdate.runtime.group_commit import Job, do_jobs, group_of
from postdate.runtime.threads import in_thread

AsyncConnection = BoundedAsyncConnection

_AT_ONCE: Final = 500


class _Step(Enum):
    """What is done of records by one statement."""

    FIND = auto()
    INSERT = auto()
    MARK = auto()


_Work = tuple[_Step, Sequence[object]]


class PostgresOutbox(OutboxStore, Scripted):
    """Keeps outboxes in the table ``outbox`` of a schema. For event loops of asyncio, as psycopg's connections are.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that others use, too; that with the tables of the application.
        schema: where the table is; it may be that of a delayed message store and of queues.
        connections: open at once, 1 or more; as many messages can be handled at once that use the transaction.
        answers_within: after so long a silence of the server a connection is given up; above 0. The statements of
            handlers are theirs, and may take as long as they like. ``None``: as the database says, or 20 seconds.

    Raises:
        ConfigurationError: the address, the schema or the duration cannot be, or there would be no connection.
    """

    def __init__(
        self,
        database: str | OpenDatabase,
        *,
        schema: str | None = None,
        connections: int = 16,
        answers_within: timedelta | None = None,
    ) -> None:
        if connections < 1:
            raise ConfigurationError(f"connections must be 1 or more, not {connections}")
        self._database = Access(database, schema, answers_within=answers_within)
        self.statements = _OutboxStatements(self._database.names.of("outbox"))
        self._free = anyio.Semaphore(connections)

    @property
    @override
    def database(self) -> object:
        return self._database.identity

    @property
    @override
    def has_one_writer(self) -> bool:
        """See :class:`postdate.ports.OutboxStore`: rows are locked, not databases."""
        return False

    @property
    def where(self) -> str:
        """The database in words, without the password."""
        return self._database.where

    @override
    async def setup(self) -> None:
        """Create schema and table; idempotent, and several processes may do it at once."""
        await in_thread(self._set_up)

    @override
    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that makes what :meth:`setup` does, for a database administrator; may be run again."""
        schema = self._database.names.schema
        return part_script(schema, part_steps(schema, "outbox", "outbox"), with_queues=False)

    def _set_up(self) -> None:
        self._database.setup_part_blocking(part_steps(self._database.names.schema, "outbox", "outbox"))

    @override
    async def find(self, endpoint: str, message_id: str) -> OutboxRecord | None:
        is_there, dispatched, operations = await self._together(_Step.FIND, (endpoint, storable(message_id)))
        if not is_there:
            return None
        return OutboxRecord(() if operations is None else decode_operations(operations), dispatched)

    @override
    def transaction(self, endpoint: str, message_id: str) -> PostgresOutboxTransaction:
        return PostgresOutboxTransaction(self, (endpoint, storable(message_id)))

    @override
    async def mark_dispatched(self, endpoint: str, message_id: str, now: datetime) -> None:
        await self._together(_Step.MARK, (endpoint, storable(message_id), now))

    async def add(self, row: Sequence[object]) -> bool:
        """Write a record in a transaction of its own; return whether there was none of that message."""
        return await self._together(_Step.INSERT, row)

    # --- what comes at the same time is one statement -----------------------------------------------------------------

    async def _together(self, step: _Step, row: Sequence[object]) -> Any:
        return await group_of(self, _AT_ONCE).run(self._do_jobs, (step, row))

    def _do_jobs(self, jobs: Sequence[Job[_Work, Any]]) -> None:
        for step, do in ((_Step.FIND, self._found), (_Step.INSERT, self._inserted), (_Step.MARK, self._marked)):
            some = [job for job in jobs if job.work[0] is step]
            if some:
                do_jobs(some, do, StoreUnreachable)

    def _executed(self, statement: bytes, works: Sequence[_Work]) -> list[tuple[Any, ...]]:
        columns = [list(column) for column in zip(*(row for _, row in works), strict=True)]
        return self._database.run_blocking(lambda c: c.execute(statement, columns, prepare=True).fetchall())

    def _found(self, works: Sequence[_Work]) -> Sequence[tuple[Any, ...]]:
        return self._executed(self.statements.find, works)

    def _inserted(self, works: Sequence[_Work]) -> Sequence[bool]:
        new = set(self._executed(self.statements.insert_all, works))
        found = list[bool]()
        for _, (endpoint, message_id, *_) in works:  # one that stands here twice is new the first time
            found.append((endpoint, message_id) in new)
            new.discard((endpoint, message_id))
        return found

    def _marked(self, works: Sequence[_Work]) -> Sequence[None]:
        self._executed(self.statements.mark, works)
        return [None] * len(works)

    @override
    async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
        values = (endpoint, before, limit)
        return await self._database.run(lambda c: c.execute(self.statements.remove, values).rowcount)

    @override
    async def close(self) -> None:
        """Close every connection; a second time without effect."""
        await in_thread(self._database.close_blocking)

    # --- connections --------------------------------------------------------------------------------------------

    async def take(self) -> AsyncConnection:
        """Return a connection in autocommit mode, to be given back with :meth:`put`; wait until there is one."""
        await self._free.acquire()
        try:
            return await self._database.take_for_application()
        except BaseException:
            self._free.release()
            raise

    def bound(self, connection: AsyncConnection) -> None:
        """Have a connection that is lent to a handler wait no longer than ours do: what comes now is ours."""
        self._database.bound(connection)

    async def put(self, connection: AsyncConnection) -> None:
        """Take a connection back as it was lent; one that cannot be is closed."""
        self._free.release()
        await self._database.put_of_application(connection)


class PostgresOutboxTransaction(OutboxTransaction):
    """See :class:`postdate.ports.OutboxTransaction`; the native transaction is a ``psycopg.AsyncConnection``."""

    def __init__(self, outbox: PostgresOutbox, key: tuple[str, str]) -> None:
        self._outbox, self._key = outbox, key
        self._connection: AsyncConnection | None = None
        self._block: AbstractAsyncContextManager[object] | None = None
        self._beginning = anyio.Lock()
        self._lost: StoreUnreachable | None = None
        self._over = False

    @property
    @override
    def begun(self) -> bool:
        return self._block is not None

    @override
    async def begin(self) -> NativeTransaction:
        async with self._beginning:
            return await self._begun()

    async def _begun(self) -> AsyncConnection:
        async with self._translating():
            self._check_not_over()
            if self._connection is None:
                connection = await self._outbox.take()
                if self._over:  # rolled back while this waited: nobody else would give the connection back
                    await self._outbox.put(connection)
                    self._check_not_over()
                self._connection = connection
            if self._block is None:
                # The connection commits by itself except in this block, which refuses to let a handler do it.
                block = self._connection.transaction()
                try:
                    await block.__aenter__()
                except Exception:
                    await self._give_back()
                    raise
                self._block = block
                self._connection.answers = None
                self._check_not_over()  # else the roll-back, which waits for this, ends what it has begun
            return self._connection

    def _check_not_over(self) -> None:
        """Refuse what comes too late, as from a task that the handler has not waited for."""
        if self._over:
            raise StoreError(f"{self._outbox.where}: the transaction is over, as the handling of its message is")

    @override
    async def commit(self, operations: Sequence[Operation], now: datetime, work: Sequence[Work] = ()) -> bool:
        encoded = encode_operations(operations) if operations else None
        row = (*self._key, now, None if operations else now, encoded)
        if not self.begun and not work:
            return await self._commit_with_others(row)
        connection = await self.begin()
        self._over = True
        async with self._translating():
            if connection.info.transaction_status is TransactionStatus.IDLE:
                raise StoreError(
                    f"{self._outbox.where}: a handler has ended the transaction that is not its own to end"
                )
            if connection.info.transaction_status is TransactionStatus.INERROR:
                raise StoreError(
                    f"{self._outbox.where}: a statement of a handler failed, and the handler went on, but its "
                    f"transaction cannot be committed any more: put what may fail into a savepoint, `async with "
                    f"connection.transaction()`, or let the error out"
                )
            as_opened(connection)
            self._outbox.bound(connection)
            new = (await connection.execute(self._outbox.statements.insert, row)).rowcount == 1
            if new and work:
                await in_thread(_do, connection, work)
            block, self._block = self._block, None  # which is over, also where the commit is refused
            assert block is not None
            await block.__aexit__(*((None, None, None) if new else _undone()))
        await self._give_back()
        return new

    async def _commit_with_others(self, row: Sequence[object]) -> bool:
        """Commit a record that is all there is to commit, as no handler has begun the transaction."""
        self._check_not_over()
        self._over = True
        try:
            return await self._outbox.add(row)
        except StoreUnreachable as error:
            self._lost = error
            raise

    @override
    async def roll_back(self) -> None:
        self._over = True
        if self._connection is None:  # who waits for one gives it back
            await self._rolled_back()
            return
        async with self._beginning:  # who begins just now knows whether it has begun
            await self._rolled_back()

    async def _rolled_back(self) -> None:
        try:
            if self._block is not None and self._connection is not None:
                self._outbox.bound(self._connection)
                async with self._translating():
                    await self._block.__aexit__(*_undone())
        finally:
            if self._connection is not None and self._connection.broken:  # whatever the handler has made of that
                self._lost = self._lost or StoreUnreachable(f"{self._outbox.where}: the connection was lost")
            self._block = None
            await self._give_back()
        if self._lost is not None:
            raise self._lost

    async def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._outbox.put(connection)

    @asynccontextmanager
    async def _translating(self) -> AsyncGenerator[None]:
        try:
            yield
        except psycopg.Error as error:
            translated = translate(error, self._outbox.where)
            if is_conflict(error):  # of what its handler did with others: no outage, it is handled again at once
                translated = StoreUnavailable(str(translated))
            elif isinstance(translated, StoreUnreachable):
                self._lost = translated
            raise translated from error


class _OutboxStatements:
    """The SQL of one schema."""

    def __init__(self, table: str) -> None:
        keys = "unnest(%s::text[], %s::text[]"
        self.find = sql(f"""
            SELECT o.message_id IS NOT NULL, o.dispatched_at IS NOT NULL, o.operations
            FROM {keys}) WITH ORDINALITY AS k(endpoint, message_id, position)
                LEFT JOIN {table} AS o USING (endpoint, message_id)
            ORDER BY k.position""")
        self.insert_all = sql(f"""
            INSERT INTO {table} (endpoint, message_id, handled_at, dispatched_at, operations)
            SELECT * FROM {keys}, %s::timestamptz[], %s::timestamptz[], %s::bytea[])
            ON CONFLICT (endpoint, message_id) DO NOTHING RETURNING endpoint, message_id""")
        self.insert = sql(
            f"INSERT INTO {table} (endpoint, message_id, handled_at, dispatched_at, operations) "
            f"VALUES (%s, %s, %s, %s, %s) ON CONFLICT (endpoint, message_id) DO NOTHING"
        )
        self.mark = sql(f"""
            UPDATE {table} AS o SET dispatched_at = k.at, operations = NULL
            FROM {keys}, %s::timestamptz[]) AS k(endpoint, message_id, at)
            WHERE o.endpoint = k.endpoint AND o.message_id = k.message_id AND o.dispatched_at IS NULL
            RETURNING o.message_id""")
        # Skips what another process removes just now: two that clean up do not wait for each other.
        self.remove = sql(
            f"DELETE FROM {table} WHERE (endpoint, message_id) IN (SELECT endpoint, message_id FROM {table} "
            f"WHERE endpoint = %s AND dispatched_at < %s ORDER BY dispatched_at LIMIT %s FOR UPDATE SKIP LOCKED)"
        )


class _Borrowed(BoundedConnection):
    """A second way to use an open connection to the server, which it does not own."""

    def __del__(self, *_: object) -> None:
        """Say nothing of a connection left open, as the base class would: its owner closes it."""


def _do(connection: AsyncConnection, work: Sequence[Work]) -> None:
    """Do the work of other adapters, which block, on the same connection to the server while nobody else uses it."""
    blocking = _Borrowed(connection.pgconn)
    blocking.answers, blocking.opened_at = connection.answers, connection.opened_at
    blocking.prepare_threshold = None  # the names of what was prepared are counted by the other object
    for each in work:
        each(blocking)


def _undone() -> tuple[type[psycopg.Rollback], psycopg.Rollback, None]:
    """Return what a transaction block of psycopg is left with when it is to be rolled back."""
    return psycopg.Rollback, psycopg.Rollback(), None
