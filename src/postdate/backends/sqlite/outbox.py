"""Outboxes in an SQLite file: the file with the tables of the application, so that one commit covers both.

SQLite has one writer at a time, so the transactions of a process run one after the other. A transaction begins with the
handler's request for its connection, or at its end, and lasts to the commit. Source: ADR 0017.
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

from postdate import errors
from postdate.backends.sql.dialect import Values
from postdate.backends.sql.outbox import SqlOutbox, connection_semaphore
from postdate.backends.sqlite import connection as sqlite_connection
from postdate.backends.sqlite.rows import QueueRules, SqliteSqlDialect, Transaction
from postdate.clock import steady_seconds
from postdate.ports import Recording, Work
from postdate.runtime import forks
from postdate.runtime.threads import run_in_thread

T = TypeVar("T")

_IS_CHANGED: Final = """
    SELECT EXISTS (SELECT 1 FROM temp.sqlite_master) OR (SELECT query_only FROM pragma_query_only)
        OR EXISTS (SELECT 1 FROM pragma_database_list WHERE name NOT IN ('main', 'temp'))"""
"""Whether a connection has temporary tables or other databases, or is set to read only."""


class SqliteOutbox(SqlOutbox[sqlite3.Connection]):
    """Keeps outboxes in an SQLite file; several processes may use one file at once.

    It may be the file of a delayed message store and of queues. Handlers get an ``sqlite3.Connection``. While a handler
    has it, no other code writes to the file, so handlers should be short.

    Args:
        path: of the file; created, with its tables, by :meth:`setup`. It is put into WAL mode.
        synchronous: ``full``: a commit survives loss of power; ``normal``: it survives any end of the process.

    Raises:
        ConfigurationError: ``synchronous`` is unknown.
    """

    def __init__(self, path: str | Path, *, synchronous: str = "full") -> None:
        if synchronous not in {"full", "normal"}:
            raise errors.ConfigurationError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        self.path = sqlite_connection.absolute_path(path)
        super().__init__(SqliteSqlDialect(), "postdate_outbox", str(self.path), connection_semaphore(1))
        self._synchronous = synchronous
        self._connection: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._file: sqlite_connection.Identity | None = None
        self._connection_lock, self._reader_lock = forks.rlock(), forks.rlock()
        self._locked_for_fork = list[threading.RLock]()
        """The locks of both connections that the forking thread holds now."""
        self._is_lent = False
        """Whether a handler has the connection, or is about to."""
        self._is_guarded = False
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
        await self.run_transaction(
            lambda tx: sqlite_connection.apply_migrations(tx.execute, sqlite_connection.steps("outbox"), where)
        )

    @override
    async def close(self) -> None:
        await run_in_thread(self._close)

    def _close(self) -> None:
        forks.check_process()
        with self._connection_lock, self._reader_lock:
            self._closed = True
            self._close_connections()

    def _close_connections(self) -> None:
        """Close the connections; the caller holds both locks."""
        if self._reader is not None:  # before the writer: only a writer that closes last removes the log
            self._reader.close()
            self._reader = None
        if self._connection is not None:
            with suppress(sqlite3.Error, errors.StoreUnreachable):
                if self._is_replaced():  # The remaining log would be used as the log of the other file.
                    self._finish_transaction(self._connection.rollback)
                    self._connection.execute("PRAGMA wal_checkpoint(truncate)")
            self._connection.close()
            self._connection = None

    # --- forks --------------------------------------------------------------------------------------------------------

    @override
    def before_fork(self, deadline: float) -> None:
        """Close the connections, as :class:`postdate.backends.sqlite.access.FileAccess` does.

        It does not wait for a handler that has one, because that handler may cause the fork. Then the child cannot use
        the file.
        """
        for each in (self._connection_lock, self._reader_lock):
            if not each.acquire(timeout=max(deadline - steady_seconds(), 0)):
                return
            self._locked_for_fork.append(each)
        if not self._is_lent and not (self._connection is not None and self._connection.in_transaction):
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
                forks.prevent_destruction(connection)
        self._reader = self._connection = self._file = None
        self._is_lent = self._is_guarded = False
        self._locked_for_fork.clear()

    # --- our own transactions -----------------------------------------------------------------------------------------

    @override
    def run_batch_blocking(self, work: Callable[[Any], T], *, is_one: bool = False) -> T:
        """Run ``work`` when no other transaction is open, as for handlers."""
        from_thread.run(self.connection_limit.acquire)
        try:
            return self.run_transaction_blocking(work)
        finally:
            from_thread.run_sync(self.connection_limit.release)

    @override
    async def run_transaction(self, work: Callable[[Any], T]) -> T:
        async with self.connection_limit:
            return await run_in_thread(self.run_transaction_blocking, work)

    @override
    def query_blocking(self, work: Callable[[Any], T]) -> T:
        forks.check_process()
        with self._reader_lock, sqlite_connection.translate_errors(self.path):
            self._check_in_place()
            if self._reader is None:
                self._check_open()
                if not self.path.exists():
                    raise errors.StoreNotSetUp(
                        f"there is no file {self.path} for the outbox: let the endpoint create it"
                    )
                self._reader = self._connect()  # Only a writer may create the log.
            return work(self._reader)

    @override
    def run_transaction_blocking(self, work: Callable[[Any], T]) -> T:
        def write() -> T:
            connection = self._begin_transaction()
            try:
                result = work(_transaction(connection))
                self._finish_transaction(connection.commit)
            except BaseException:
                self._finish_transaction(connection.rollback)
                raise
            return result

        return self._run_locked(write)

    # --- transactions of handlers -------------------------------------------------------------------------------------

    @override
    async def acquire(self) -> sqlite3.Connection:
        def acquire() -> sqlite3.Connection:
            connection = self._open_connection()
            self._is_lent = True
            return connection

        return await run_in_thread(self._run_locked, acquire)

    @override
    async def release(self, connection: sqlite3.Connection) -> None:
        """Keep the connection. An open transaction was ended already, or is ended before the next one begins."""
        self._is_lent = False

    @override
    async def begin(self, connection: sqlite3.Connection) -> None:
        def begin() -> None:
            self._begin_transaction()
            self._is_guarded = True

        await run_in_thread(self._run_locked, begin)

    @override
    async def commit(self, connection: sqlite3.Connection, row: Values, work: Sequence[Work]) -> bool:
        return await run_in_thread(self._run_locked, partial(self._commit, connection, row, work))

    def _commit(self, connection: sqlite3.Connection, row: Values, work: Sequence[Work]) -> bool:
        if not connection.in_transaction:  # A full disk, for example, ends the transaction.
            raise errors.StoreError(f"{self.path}: the transaction has ended before its commit")
        self._check_in_place()
        reset_handler_settings(connection)
        (is_new,) = self.write_all(_transaction(connection), [(row, work)])
        self._finish_transaction(connection.commit if is_new else connection.rollback)
        self._close_if_changed(connection)
        return is_new

    @override
    async def roll_back(self, connection: sqlite3.Connection) -> None:
        def roll_back() -> None:
            if not self._closed:
                self._finish_transaction(connection.rollback)
                self._close_if_changed(connection)

        await run_in_thread(self._run_locked, roll_back)

    @override
    def outage_of(self, error: Exception) -> errors.PostdateError | None:
        outage = sqlite_connection.translate(error, self.path) if isinstance(error, sqlite3.Error) else None
        return outage if isinstance(outage, errors.StoreFull | errors.StoreNotWritable) else None

    # --- in threads ---------------------------------------------------------------------------------------------------

    def _run_locked(self, work: Callable[[], T]) -> T:
        forks.check_process()
        with self._connection_lock, sqlite_connection.translate_errors(self.path):
            return work()

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            self._check_open()
            self._connection = self._connect()
            self._connection.set_authorizer(self._authorize)
        return self._connection

    def _begin_transaction(self) -> sqlite3.Connection:
        connection = self._open_connection()
        if connection.in_transaction:  # It is the transaction of a handler that was cancelled while it began.
            self._finish_transaction(connection.rollback)
        reset_handler_settings(connection)
        self._check_in_place()
        sqlite_connection.execute_with_retry(connection, "BEGIN IMMEDIATE")
        if self._is_replaced():  # the wait for the lock may have been long
            self._finish_transaction(connection.rollback)
            raise sqlite_connection.replaced_error(self.path)
        return connection

    def _close_if_changed(self, connection: sqlite3.Connection) -> None:
        """Close the connection if its handler has left settings in it that would reach another handler."""
        reset_handler_settings(connection)
        (is_changed,) = connection.execute(_IS_CHANGED).fetchone()
        if is_changed and connection is self._connection:
            self._connection = None
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        identity_before = sqlite_connection.identity_of(self.path)
        connection = sqlite_connection.connect(self.path, synchronous=self._synchronous)
        self._file = self._file or sqlite_connection.opened_identity(self.path, identity_before)
        return connection

    def _is_replaced(self) -> bool:
        return self._file is not None and sqlite_connection.identity_of(self.path) != self._file

    def _check_in_place(self) -> None:
        """Raise `StoreReplaced` if another file, or none, is at the path: SQLite would write to the former one."""
        if self._is_replaced():
            raise sqlite_connection.replaced_error(self.path)

    def _authorize(self, action: int, *_: object) -> int:
        """Refuse statements that end the handler's transaction, as SQLite's authorizer.

        Such a statement would commit without the record.
        """
        is_refused = self._is_guarded and action == sqlite3.SQLITE_TRANSACTION
        return sqlite3.SQLITE_DENY if is_refused else sqlite3.SQLITE_OK

    def _finish_transaction(self, finish: Callable[[], None]) -> None:
        self._is_guarded = False
        finish()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.StoreError(f"the outbox in {self.path} was closed in this process")


def _transaction(connection: sqlite3.Connection) -> Transaction:
    return Transaction(connection, 0, Recording.ALL, QueueRules())


def reset_handler_settings(connection: sqlite3.Connection) -> None:
    """Undo settings of a handler for rows, because our statements, and those of other adapters, read tuples of text."""
    connection.row_factory, connection.text_factory = None, str
