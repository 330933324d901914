"""Outboxes on database servers whose drivers block: a handler's statements run in threads. Source: ADR 0017, 0030."""

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

from postdate.backends.rowlocks.connection import ServerSession
from postdate.backends.rowlocks.database import KeptOnServer, RowLockSchema
from postdate.backends.rowlocks.parts import Conflict
from postdate.backends.sql.outbox import SqlOutbox, Values, places
from postdate.errors import StoreError, StoreUnavailable
from postdate.messages import MESSAGE_ID_LIMIT
from postdate.ports import Work
from postdate.runtime.threads import in_thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement has brought.

    Args:
        rows: of a statement that has some, as the driver gives them.
        rowcount: how many it found or changed, as the driver counts them.
    """

    rows: Sequence[tuple[Any, ...]]
    rowcount: int


class ThreadedConnection:
    """A connection of a driver that blocks, for coroutines: each call is done in a thread, one after the other.

    It is in the transaction of an outbox, which ends it; a commit of a handler's own is found, and undoes the message.
    """

    def __init__(self, session: ServerSession) -> None:
        self.session = session
        self.mark: object = None
        self._using, self._thread = threading.Lock(), anyio.CapacityLimiter(1)

    async def execute(self, statement: str, values: Mapping[str, Any] | Sequence[Any] | None = None) -> Result:
        """Run a statement and return all that it brings.

        Args:
            statement: with parameters as the driver has them: ``%s`` or ``%(name)s``.
            values: of the parameters; ``None``: a percent sign is itself.

        Raises:
            Error: of the driver.
        """

        def execute(driver: Any) -> Result:
            with closing(driver.cursor()) as cursor:
                cursor.execute(statement, values)
                rows = [] if cursor.description is None else list(cursor.fetchall())
                count: int = cursor.rowcount
                while cursor.nextset():  # to its end: what is left unread would be in the way of the next statement
                    pass
                return Result(rows, count)

        return await self.run(execute)

    async def run(self, work: Callable[[Any], T]) -> T:
        """Call ``work`` in a thread with the connection of the driver, and return its result."""
        return await self.do(lambda session: work(session.driver))

    async def do(self, work: Callable[[Any], T]) -> T:
        """Do something with the session, when nothing else is done with it any more.

        In a thread of its own: that of a commit must not be taken by others, who wait for the locks that it frees.
        """

        def alone() -> T:
            with self._using:  # who was cancelled by asyncio's own means does not wait for the end
                return work(self.session)

        return await to_thread.run_sync(alone, limiter=self._thread)


class ServerOutbox(KeptOnServer, SqlOutbox[ThreadedConnection]):
    """Keeps outboxes in the table ``postdate_outbox`` of a schema; several processes may use it at once.

    Handlers are given a :class:`ThreadedConnection`, opened for them in the database that the address names.

    Args:
        url: of the database with the tables of the application, or its database object.
        schema: that the table is in; ``None``: the default of the server.
        connections: open at once, 1 or more; as many messages can be handled at once that use the transaction.
        answers_within: after so long a silence of the server a connection is given up; above 0. The statements of
            handlers are theirs, and may take as long as they like. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or the duration cannot be, or there would be no connection.
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
        free = places(connections)
        self._use(url, schema, answers_within)
        super().__init__(self._database.dialect, self._names.of(self.table), self._pool.where, free)

    @property
    @override
    def database(self) -> object:
        return self._database.identity

    @override
    def looking(self, work: Callable[[Any], T]) -> T:
        return self._pool.run_blocking(work)

    @override
    def writing(self, work: Callable[[Any], T]) -> T:
        return self._pool.transaction_blocking(work)

    # --- on connections of handlers -----------------------------------------------------------------------------------

    @override
    async def take(self) -> ThreadedConnection:
        self._pool.check_open()
        return ThreadedConnection(await in_thread(self._database.server.connect_as_application))

    @override
    async def put(self, connection: ThreadedConnection) -> None:
        """Close it: what a handler may have set on it cannot be told, and must not meet another one."""
        await connection.do(lambda session: session.close())

    @override
    async def begin(self, connection: ThreadedConnection) -> None:
        connection.mark = await connection.do(lambda session: session.begin_marked())

    @override
    async def commit(self, connection: ThreadedConnection, row: Values, work: Sequence[Work]) -> bool:
        def commit(session: Any) -> bool:
            session.limit(self._database.server.seconds_to_answer)
            if not session.is_in(connection.mark):
                raise StoreError(
                    f"{self.where}: a handler has ended the transaction that is not its own to end, or has gone on "
                    f"after an error by which the server undid it, such as a deadlock"
                )
            is_new = self.write(session, row, work)
            session.commit() if is_new else session.rollback()
            return is_new

        try:
            return await connection.do(commit)
        except Conflict as error:  # of what its handler did with others: no outage, it is handled again at once
            raise StoreUnavailable(str(error)) from error

    @override
    async def undo(self, connection: ThreadedConnection) -> None:
        if connection.mark is not None:
            connection.mark = None

            def undo(session: Any) -> None:
                session.limit(self._database.server.seconds_to_answer)
                session.rollback()

            await connection.do(undo)
