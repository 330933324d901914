"""Outboxes in a schema of PostgreSQL, beside the tables of the application, so that one commit covers both.

A handler gets an asynchronous connection of psycopg with the settings of the application, because ours suit only our
own statements. Reads and writes without a handler use our connections, several messages in one statement.
Source: ADR 0017, 0026.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from typing_extensions import override

from postdate.backends.postgres.access import Access, OpenDatabase, SchemaPart
from postdate.backends.postgres.answering import BoundedAsyncConnection, BoundedConnection
from postdate.backends.postgres.errors import is_conflict, translate
from postdate.backends.postgres.names import lookup_join, part_steps, sql
from postdate.backends.postgres.pool import reset_handler_settings
from postdate.backends.postgres.queues import run_works_with_timeout
from postdate.backends.postgres.statements import PostgresSqlDialect, columns_of
from postdate.backends.sql.dialect import Values
from postdate.backends.sql.outbox import OutboxStep, SqlOutbox, connection_semaphore
from postdate.errors import PostdateError, StoreError, StoreFull, StoreReadOnly, StoreUnavailable, StoreUnreachable
from postdate.ports import NativeTransaction, Work
from postdate.runtime.threads import run_in_thread

T = TypeVar("T")


@dataclass
class _LentConnection:
    """A connection that a handler uses.

    Args:
        connection: in autocommit mode outside the block.
        block: psycopg's transaction block, in which the driver refuses to commit.
    """

    connection: BoundedAsyncConnection
    block: AbstractAsyncContextManager[object] | None = None


class PostgresOutbox(SchemaPart, SqlOutbox[_LentConnection]):
    """Keeps outboxes in the table ``outbox`` of a schema. For event loops of asyncio, as psycopg's connections are.

    Handlers get a ``psycopg.AsyncConnection``.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that other adapters use, too: the database with the tables of the application.
        schema: of the table; it may be that of a delayed message store and of queues.
        connections: the most that are open at once, 1 or more; it limits how many messages that use the transaction
            are handled at once.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. The statements
            of handlers have no limit. ``None``: the setting of the database, by default 20 seconds.

    Raises:
        ConfigurationError: the address, the schema or the duration is invalid, or ``connections`` is below 1.
    """

    longest_id = 450
    """The most characters of a message's id.

    The name of an endpoint is in the same index entry, with four bytes a character. An entry has 2,704 bytes at most.
    """

    def __init__(
        self,
        database: str | OpenDatabase,
        *,
        schema: str | None = None,
        connections: int = 16,
        answers_within: timedelta | None = None,
    ) -> None:
        connection_limit, self._database = (
            connection_semaphore(connections),
            Access(database, schema, answers_within=answers_within),
        )
        table = self._database.names.name_of("outbox")
        super().__init__(PostgresSqlDialect(), table, self._database.where, connection_limit)
        self._batch_statements = _build_batch_statements(table)
        self._set_database(self._database, part_steps(self._database.names.schema, "outbox", "outbox"))

    @property
    @override
    def database(self) -> object:
        return self._database.identity

    # --- on our own connections ---------------------------------------------------------------------------------------

    @override
    def execute_step(self, session: BoundedConnection, step: OutboxStep, rows: Sequence[Values]) -> Sequence[Any]:
        results = session.execute(self._batch_statements[step], columns_of(rows), prepare=True).fetchall()
        if step is OutboxStep.FIND:
            return [columns if is_there else None for is_there, *columns in results]
        if step is OutboxStep.MARK:
            return [None] * len(rows)
        new = set(results)
        are_new = list[bool]()
        for row in rows:  # An id that occurs twice here is new the first time.
            key = (row["endpoint"], row["message_id"])
            are_new.append(key in new)
            new.discard(key)
        return are_new

    @override
    def query_blocking(self, work: Callable[[Any], T]) -> T:
        return self._database.run_blocking(work)

    @override
    def run_works(self, transaction: BoundedConnection, works: Sequence[Sequence[Work]]) -> None:
        run_works_with_timeout(transaction, works)

    @override
    def run_batch_blocking(self, work: Callable[[Any], T], *, is_one: bool = False) -> T:
        # One statement needs no transaction.
        return self._database.run_blocking(work) if is_one else self.run_transaction_blocking(work)

    @override
    def run_transaction_blocking(self, work: Callable[[Any], T]) -> T:
        return self._database.transaction_blocking(work)

    # --- on connections of handlers -----------------------------------------------------------------------------------

    @override
    async def acquire(self) -> _LentConnection:
        async with self._translate_errors():
            return _LentConnection(await self._database.acquire_for_application())

    @override
    async def release(self, connection: _LentConnection) -> None:
        """Release a connection in the state in which it was acquired, or close it."""
        await self._database.release_for_application(connection.connection)

    @override
    async def begin(self, connection: _LentConnection) -> None:
        block = connection.connection.transaction()
        async with self._translate_errors():
            await block.__aenter__()
        connection.block, connection.connection.answers = block, None

    @override
    def outage_of(self, error: Exception) -> PostdateError | None:
        outage = translate(error, self.where) if isinstance(error, psycopg.Error) else None
        return outage if isinstance(outage, StoreFull | StoreReadOnly) else None

    @override
    def native(self, connection: _LentConnection) -> NativeTransaction:
        return connection.connection

    @override
    async def commit(self, connection: _LentConnection, row: Values, work: Sequence[Work]) -> bool:
        native = connection.connection
        async with self._translate_errors():
            if native.info.transaction_status is TransactionStatus.IDLE:
                raise StoreError(f"{self.where}: a handler has ended the transaction, which only Postdate may end")
            if native.info.transaction_status is TransactionStatus.INERROR:
                raise StoreError(
                    f"{self.where}: a statement of a handler failed, and the handler continued, but its transaction "
                    f"cannot be committed any more: execute statements that may fail in a savepoint, `async with "
                    f"connection.transaction()`, or do not catch the error"
                )
            reset_handler_settings(native)
            self._database.set_answer_deadline(native)
            if work:
                (is_new,) = await run_in_thread(self.write_all, _borrow_connection(native), [(row, work)])
            else:
                is_new = (await native.execute(self._insert, row)).rowcount == 1
            block, connection.block = connection.block, None  # The block is over, also if the commit is refused.
            assert block is not None
            await block.__aexit__(*((None, None, None) if is_new else _rollback_arguments()))
        return is_new

    @override
    async def roll_back(self, connection: _LentConnection) -> None:
        block, connection.block = connection.block, None
        if block is not None:
            self._database.set_answer_deadline(connection.connection)
            async with self._translate_errors():
                await block.__aexit__(*_rollback_arguments())
        if connection.connection.broken:  # The handler may have caught the error.
            raise StoreUnreachable(f"{self.where}: the connection was lost")

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncGenerator[None]:
        try:
            yield
        except psycopg.Error as error:
            translated = translate(error, self.where)
            # A conflict of the handler's own statements is no outage: the message is handled again at once.
            if is_conflict(error):
                translated = StoreUnavailable(str(translated))
            raise translated from error


def _build_batch_statements(table: str) -> dict[OutboxStep, bytes]:
    keys = "unnest(%(endpoint)s::text[], %(message_id)s::text[]"
    is_key = f"{table}.endpoint = k.endpoint AND {table}.message_id = k.message_id"
    return {
        OutboxStep.FIND: sql(f"""
            SELECT o.message_id IS NOT NULL, o.dispatched_at, o.operations
            FROM {keys}) WITH ORDINALITY AS k(endpoint, message_id, position)
                LEFT JOIN LATERAL (SELECT * FROM {table} WHERE {is_key} OFFSET 0) AS o ON true
            ORDER BY k.position"""),
        OutboxStep.INSERT: sql(f"""
            INSERT INTO {table} (endpoint, message_id, handled_at, dispatched_at, operations)
            SELECT * FROM {keys}, %(handled_at)s::timestamptz[], %(dispatched_at)s::timestamptz[],
                %(operations)s::bytea[])
            ON CONFLICT (endpoint, message_id) DO NOTHING RETURNING endpoint, message_id"""),
        OutboxStep.MARK: sql(f"""
            UPDATE {table} AS o SET dispatched_at = k.at, operations = NULL
            FROM {keys}, %(at)s::timestamptz[]) AS k(endpoint, message_id, at)
                {lookup_join("ctid AS place", table, is_key, "target")}
            WHERE o.ctid = target.place AND o.dispatched_at IS NULL
            RETURNING o.message_id"""),
    }


class _BorrowedConnection(BoundedConnection):
    """A blocking connection object over the socket of another connection, which owns the socket."""

    def __del__(self, *_: object) -> None:
        """Suppress the base class's warning about an open connection: the owner closes it."""


def _borrow_connection(connection: BoundedAsyncConnection) -> BoundedConnection:
    """Return a blocking connection over the same socket, which the caller must not use otherwise meanwhile."""
    blocking = _BorrowedConnection(connection.pgconn)
    blocking.answers, blocking.opened_at = connection.answers, connection.opened_at
    blocking.prepare_threshold = None  # The other object counts the names of prepared statements.
    return blocking


def _rollback_arguments() -> tuple[type[psycopg.Rollback], psycopg.Rollback, None]:
    """Return the arguments of ``__exit__`` with which a transaction block of psycopg rolls back."""
    return psycopg.Rollback, psycopg.Rollback(), None
