"""Outboxes on database servers whose drivers block: a handler's statements run in threads. Source: ADR 0017, 0060."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from typing_extensions import override

from postdate.backends.sql.dialect import Values
from postdate.backends.sql.outbox import SqlOutbox, connection_semaphore
from postdate.backends.sql.row_locks.connection import ServerSession
from postdate.backends.sql.row_locks.database import OwnTableOnServer, RowLockSchema
from postdate.backends.sql.row_locks.parts import Conflict
from postdate.errors import StoreError, StoreUnavailable
from postdate.messages import MESSAGE_ID_LIMIT
from postdate.ports import Work
from postdate.runtime.threads import run_in_thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a statement.

    Args:
        rows: as the driver gives them; empty without any.
        rowcount: as the driver counts rows found or changed.
    """

    rows: Sequence[tuple[Any, ...]]
    rowcount: int


class ThreadedConnection:
    """A blocking driver's connection for coroutines: each call runs in a thread, one after the other.

    It is in the transaction of an outbox, which ends it. If a handler commits, that is detected, and the message fails.
    """

    def __init__(self, session: ServerSession) -> None:
        self.session = session
        self.transaction_mark: object = None
        self._session_lock, self._thread = threading.Lock(), anyio.CapacityLimiter(1)

    async def execute(self, statement: str, values: Mapping[str, Any] | Sequence[Any] | None = None) -> Result:
        """Run a statement and return its whole result.

        Args:
            statement: with the driver's parameters: ``%s`` or ``%(name)s``.
            values: of the parameters; ``None``: a percent sign is not doubled.

        Raises:
            Error: of the driver.
        """

        def execute(driver: Any) -> Result:
            with closing(driver.cursor()) as cursor:
                cursor.execute(statement, values)
                rows = [] if cursor.description is None else list(cursor.fetchall())
                count: int = cursor.rowcount
                while cursor.nextset():  # Read all results: an unread result would disturb the next statement.
                    pass
                return Result(rows, count)

        return await self.run(execute)

    async def run(self, work: Callable[[Any], T]) -> T:
        """Call ``work`` with the driver's connection in a thread, and return its result."""
        return await self.run_on_session(lambda session: work(session.driver))

    async def run_on_session(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` on the session, after all earlier calls.

        The thread belongs to the connection, because shared threads may all wait for the locks that its commit
        releases.
        """

        def run_locked() -> T:
            # A call that was cancelled by asyncio itself may still run, without a waiting caller.
            with self._session_lock:
                return work(self.session)

        return await to_thread.run_sync(run_locked, limiter=self._thread)


class ServerOutbox(OwnTableOnServer, SqlOutbox[ThreadedConnection]):
    """Keeps outboxes in the table ``postdate_outbox`` of a schema; several processes may use it at once.

    Handlers get a :class:`ThreadedConnection`, opened for them in the database that the address names.

    Args:
        url: of the database with the tables of the application, or its database object.
        schema: of the table; ``None``: the default of the server.
        connections: the most that are open at once, 1 or more; it limits how many messages that use the transaction
            are handled at once.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. The statements
            of handlers have no limit. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or the duration is invalid, or ``connections`` is below 1.
    """

    part, table = "outbox", "outbox"
    longest_id = MESSAGE_ID_LIMIT

    def __init__(
        self,
        url: str | RowLockSchema,
        *,
        schema: str | None = None,
        connections: int = 16,
        answers_within: timedelta | None = None,
    ) -> None:
        connection_limit = connection_semaphore(connections)
        self._set_database(url, schema, answers_within)
        super().__init__(self._database.dialect, self._names.name_of(self.table), self._pool.where, connection_limit)

    @property
    @override
    def database(self) -> object:
        return self._database.identity

    @override
    def query_blocking(self, work: Callable[[Any], T]) -> T:
        return self._pool.run_blocking(work)

    @override
    def run_transaction_blocking(self, work: Callable[[Any], T]) -> T:
        return self._pool.transaction_blocking(work)

    # --- on connections of handlers -----------------------------------------------------------------------------------

    @override
    async def acquire(self) -> ThreadedConnection:
        self._pool.check_open()
        return ThreadedConnection(await run_in_thread(self._database.server.connect_as_application))

    @override
    async def release(self, connection: ThreadedConnection) -> None:
        """Close the connection: settings of a handler are unknown, and must not reach another handler."""
        await connection.run_on_session(lambda session: session.close())

    @override
    async def begin(self, connection: ThreadedConnection) -> None:
        connection.transaction_mark = await connection.run_on_session(lambda session: session.begin_marked())

    @override
    async def commit(self, connection: ThreadedConnection, row: Values, work: Sequence[Work]) -> bool:
        def commit(session: Any) -> bool:
            session.set_answer_limit(self._database.server.seconds_to_answer)
            if not session.is_in_transaction(connection.transaction_mark):
                raise StoreError(
                    f"{self.where}: a handler has ended the transaction, which only Postdate may end, or has "
                    f"continued after an error for which the server rolled it back, such as a deadlock"
                )
            (is_new,) = self.write_all(session, [(row, work)])
            session.commit() if is_new else session.rollback()
            return is_new

        try:
            return await connection.run_on_session(commit)
        # A conflict of the handler's own statements is no outage: the message is handled again at once.
        except Conflict as error:
            raise StoreUnavailable(str(error)) from error

    @override
    async def roll_back(self, connection: ThreadedConnection) -> None:
        if connection.transaction_mark is not None:
            connection.transaction_mark = None

            def roll_back(session: Any) -> None:
                session.set_answer_limit(self._database.server.seconds_to_answer)
                session.rollback()

            await connection.run_on_session(roll_back)
