"""Outboxes in an SQLite file: the one with the tables of the application, so that one commit covers both.

SQLite has one writer at a time, so the transactions of a process take turns. A turn lasts from the handler's request
for its connection, or from its end, to the commit. Source: specification 7; ADR 0017.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from anyio import from_thread
from typing_extensions import override

from postdate.backends.sql.dialect import Values
from postdate.backends.sql.outbox import SqlOutbox, places
from postdate.backends.sqlite.connection import (
    Identity,
    bring_up_to_date,
    connect,
    first_opened,
    identity_of,
    patiently,
    replaced,
    steps,
    translate,
    translated,
)
from postdate.backends.sqlite.rows import QueueRules, SqliteSqlDialect, Transaction
from postdate.clock import steady_seconds
from postdate.errors import (
    ConfigurationError,
    PostdateError,
    StoreError,
    StoreFull,
    StoreNotSetUp,
    StoreNotWritable,
    StoreUnreachable,
)
from postdate.ports import Recording, Work
from postdate.runtime import forks
from postdate.runtime.threads import in_thread

T = TypeVar("T")

_IS_CHANGED: Final = "SELECT EXISTS (SELECT 1 FROM temp.sqlite_master) OR (SELECT query_only FROM pragma_query_only)"
"""Whether a connection has temporary tables, or does not write."""


class SqliteOutbox(SqlOutbox[sqlite3.Connection]):
    """Keeps outboxes in an SQLite file; several processes may use one file at once.

    It may be the file of a delayed message store and of queues. Handlers are given an ``sqlite3.Connection``; while one
    has it, nobody else writes to the file: short handlers are good ones.

    Args:
        path: of the file; created, with its tables, by :meth:`setup`. It is put into WAL mode.
        synchronous: ``full``: a commit survives loss of power; ``normal``: it survives any end of the process.

    Raises:
        ConfigurationError: ``synchronous`` is unknown.
    """

    def __init__(self, path: str | Path, *, synchronous: str = "full") -> None:
        if synchronous not in {"full", "normal"}:
            raise ConfigurationError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        self.path = Path(path).expanduser().resolve()
        super().__init__(SqliteSqlDialect(), "postdate_outbox", str(self.path), places(1))
        self._synchronous = synchronous
        self._connection: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._file: Identity | None = None
        self._using, self._reading = forks.rlock(), forks.rlock()
        self._locked_for_fork = list[threading.RLock]()
        """Those of these locks that the thread which forks holds just now."""
        self._lent = False
        """Whether a handler has the connection, or is about to."""
        self._guarded = False
        self._closed = False

    @property
    @override
    def database(self) -> object:
        return ("sqlite", str(self.path))

    @property
    @override
    def has_one_writer(self) -> bool:
        return True

    @override
    async def setup(self) -> None:
        where = f"the outbox in {self.path}"
        await self.alone(lambda tx: bring_up_to_date(tx.execute, steps("outbox"), where))

    @override
    async def close(self) -> None:
        await in_thread(self._close)

    def _close(self) -> None:
        forks.check_process()
        with self._using, self._reading:
            self._closed = True
            self._close_connections()

    def _close_connections(self) -> None:
        """Close the connections; both locks are held."""
        if self._reader is not None:  # first: only a writer that closes last takes the log away
            self._reader.close()
            self._reader = None
        if self._connection is not None:
            with suppress(sqlite3.Error, StoreUnreachable):
                if self._is_replaced():  # a log that stayed would be taken for that of the other file
                    self._end(self._connection.rollback)
                    self._connection.execute("PRAGMA wal_checkpoint(truncate)")
            self._connection.close()
            self._connection = None

    # --- forks --------------------------------------------------------------------------------------------------------

    @override
    def before_fork(self, deadline: float) -> None:
        """Close the connections, as :class:`postdate.backends.sqlite.access.FileAccess` does.

        A handler that has one is not waited for: it may be what forks. Then the child cannot use the file.
        """
        for each in (self._using, self._reading):
            if not each.acquire(timeout=max(deadline - steady_seconds(), 0)):
                return
            self._locked_for_fork.append(each)
        if not self._lent and not (self._connection is not None and self._connection.in_transaction):
            self._close_connections()

    @override
    def after_fork_in_parent(self) -> None:
        while self._locked_for_fork:
            self._locked_for_fork.pop().release()

    @override
    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        for connection in (self._reader, self._connection):
            if connection is not None:
                forks.keep_for_ever(connection)
        self._reader = self._connection = self._file = None
        self._lent = self._guarded = False
        self._locked_for_fork.clear()

    # --- transactions of our own --------------------------------------------------------------------------------------

    @override
    def changing(self, work: Callable[[Any], T], *, is_one: bool = False) -> T:
        """Waits for its turn, as handlers do."""
        from_thread.run(self.free.acquire)
        try:
            return self.writing(work)
        finally:
            from_thread.run_sync(self.free.release)

    @override
    async def alone(self, work: Callable[[Any], T]) -> T:
        async with self.free:
            return await in_thread(self.writing, work)

    @override
    def looking(self, work: Callable[[Any], T]) -> T:
        forks.check_process()
        with self._reading, translated(self.path):
            self._check_in_place()
            if self._reader is None:
                self._check_open()
                if not self.path.exists():
                    raise StoreNotSetUp(f"there is no file {self.path} for the outbox: let the endpoint create it")
                self._reader = self._connected()  # only a writer may create the log
            return work(self._reader)

    @override
    def writing(self, work: Callable[[Any], T]) -> T:
        def write() -> T:
            connection = self._begun()
            try:
                result = work(_transaction(connection))
                self._end(connection.commit)
            except BaseException:
                self._end(connection.rollback)
                raise
            return result

        return self._do(write)

    # --- those of handlers --------------------------------------------------------------------------------------------

    @override
    async def take(self) -> sqlite3.Connection:
        def take() -> sqlite3.Connection:
            connection = self._opened()
            self._lent = True
            return connection

        return await in_thread(self._do, take)

    @override
    async def put(self, connection: sqlite3.Connection) -> None:
        """Keep the connection: an open transaction was ended already, or is ended before the next begins."""
        self._lent = False

    @override
    async def begin(self, connection: sqlite3.Connection) -> None:
        def begin() -> None:
            self._begun()
            self._guarded = True

        await in_thread(self._do, begin)

    @override
    async def commit(self, connection: sqlite3.Connection, row: Values, work: Sequence[Work]) -> bool:
        return await in_thread(self._do, partial(self._commit, connection, row, work))

    def _commit(self, connection: sqlite3.Connection, row: Values, work: Sequence[Work]) -> bool:
        if not connection.in_transaction:  # as a full disk does it
            raise StoreError(f"{self.path}: the transaction has ended before its commit")
        self._check_in_place()
        as_opened(connection)
        (is_new,) = self.write_all(_transaction(connection), [(row, work)])
        self._end(connection.commit if is_new else connection.rollback)
        self._close_if_changed(connection)
        return is_new

    @override
    async def undo(self, connection: sqlite3.Connection) -> None:
        def undo() -> None:
            if not self._closed:
                self._end(connection.rollback)
                self._close_if_changed(connection)

        await in_thread(self._do, undo)

    @override
    def outage_of(self, error: Exception) -> PostdateError | None:
        outage = translate(error, self.path) if isinstance(error, sqlite3.Error) else None
        return outage if isinstance(outage, StoreFull | StoreNotWritable) else None

    # --- in threads ---------------------------------------------------------------------------------------------------

    def _do(self, work: Callable[[], T]) -> T:
        forks.check_process()
        with self._using, translated(self.path):
            return work()

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._check_open()
            self._connection = self._connected()
            self._connection.set_authorizer(self._may)
        return self._connection

    def _begun(self) -> sqlite3.Connection:
        connection = self._opened()
        if connection.in_transaction:  # of one that was cancelled while it began
            self._end(connection.rollback)
        as_opened(connection)
        self._check_in_place()
        patiently(connection, "BEGIN IMMEDIATE")
        if self._is_replaced():  # it may have waited long for its turn
            self._end(connection.rollback)
            raise replaced(self.path)
        return connection

    def _close_if_changed(self, connection: sqlite3.Connection) -> None:
        """Close the connection if its handler has left anything in it that would reach another."""
        as_opened(connection)
        (is_changed,) = connection.execute(_IS_CHANGED).fetchone()
        if is_changed and connection is self._connection:
            self._connection = None
            connection.close()

    def _connected(self) -> sqlite3.Connection:
        before = identity_of(self.path)
        connection = connect(self.path, synchronous=self._synchronous)
        self._file = self._file or first_opened(self.path, before)
        return connection

    def _is_replaced(self) -> bool:
        return self._file is not None and identity_of(self.path) != self._file

    def _check_in_place(self) -> None:
        """Raise `StoreReplaced` once another file, or none, is at the path: SQLite would write to the one before."""
        if self._is_replaced():
            raise replaced(self.path)

    def _may(self, action: int, *_: object) -> int:
        """SQLite's authorizer: handlers must not end their transaction, which would commit without the record."""
        refused = self._guarded and action == sqlite3.SQLITE_TRANSACTION
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    def _end(self, how: Callable[[], None]) -> None:
        self._guarded = False
        how()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the outbox in {self.path} was closed in this process")


def _transaction(connection: sqlite3.Connection) -> Transaction:
    return Transaction(connection, 0, Recording.ALL, QueueRules())


def as_opened(connection: sqlite3.Connection) -> None:
    """Undo settings of a handler about rows: our statements, and those of other adapters, read tuples of text."""
    connection.row_factory, connection.text_factory = None, str
