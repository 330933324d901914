"""The two connections of this process to an SQLite file: one writes, one reads, each in one thread at a time.

They are opened at first use. After another file is at the path, every call is refused. Before a fork they are closed;
parent and child open their own at the next use. The reason: SQLite has one table of locks for a process, and a child
would inherit it. The child would consider the locks of its parent as its own. The parent would consider itself the last
user of the file, and remove the log while the child writes to it (ADR 40).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sqlite import connection as sqlite_connection
from postdate.backends.sqlite.registration import Registration
from postdate.clock import steady_seconds
from postdate.errors import PostdateError, StoreError, StoreNotSetUp, StoreUnavailable, StoreUnreachable
from postdate.runtime import forks

_CLOSING_PATIENCE_SECONDS = 1.0  # how long a writer waits for the lock while the file is being closed

log = logging.getLogger("postdate.embedded")

T = TypeVar("T")


class _ForkAhead(Exception):
    """Raised in a thread that waits to write, because another thread is about to fork and waits for it."""


class FileAccess(forks.ForkAware):
    """The connections to a file: opened at first use, used by one thread at a time, closed for forks and at the end."""

    def __init__(self, path: Path, registration: Registration, *, synchronous: str, create: bool) -> None:
        self._path = path
        self._registration = registration
        self._synchronous = synchronous
        self._create = create
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._identity: sqlite_connection.Identity | None = None
        """The file that was opened; ``None`` before the first use."""
        self.is_known_replaced = False
        """Whether another file, or none, was seen at the path. This is never reset in this process."""
        self.is_closing = False
        """Whether the last user is about to close it; then writers wait for a short time only."""
        self.is_closed = False
        self.write_lock = forks.rlock()  # held by the thread that uses the writer
        self.read_lock = forks.rlock()  # held by the thread that uses the reader
        self._locked_for_fork = list[threading.RLock]()
        """The locks of both connections that the forking thread holds now."""
        self._no_fork_ahead = threading.Event()
        """Cleared while a thread is about to fork. Other threads wait for it, as locks are not fair."""
        self._no_fork_ahead.set()
        self._can_yield_to_fork = True
        """Whether the writing thread holds no other lock, and so may let a fork go first. Guarded by ``write_lock``."""
        forks.register(self)

    # --- use ----------------------------------------------------------------------------------------------------

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` with the writing connection, one thread at a time. It is repeated if it let a fork go first."""
        while True:
            with suppress(_ForkAhead), self._lock_for_writing(), sqlite_connection.translate_errors(self._path):
                return work(self._writing_connection())

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` with the reading connection, in a transaction and so on one consistent snapshot."""
        self._wait_for_fork()
        with self.read_lock, sqlite_connection.translate_errors(self._path):
            connection = self._reading_connection()
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("COMMIT")

    def snapshot(self) -> sqlite3.Connection:
        """Return a connection in a read transaction, which the caller closes."""
        self._wait_for_fork()
        with self.read_lock:  # no fork while the connection is being opened
            connection = sqlite_connection.connect(self._path, read_only=True)
            with closing_on_error(connection):
                self.check_in_place()
                sqlite_connection.check_schema(connection, self._path)
                with sqlite_connection.translate_errors(self._path):
                    connection.execute("BEGIN")
        return connection

    def setup(self) -> None:
        """Open the file for writing, which creates the file and its tables if they are missing."""
        self.write(lambda _: None)

    @contextmanager
    def _lock_for_writing(self) -> Generator[None]:
        is_outermost = self._wait_for_fork()
        if not self.write_lock.acquire(timeout=self._patience_seconds):
            raise StoreUnreachable(f"{self._path}: another thread of this process waits to write to it")
        previous, self._can_yield_to_fork = self._can_yield_to_fork, is_outermost
        try:
            yield
        finally:
            self._can_yield_to_fork = previous
            self.write_lock.release()

    def _wait_for_fork(self) -> bool:
        """Wait until an announced fork is over. Return ``False`` at once if it waits for a lock of this thread."""
        forks.check_process()
        if forks.is_owned(self.read_lock) or forks.is_owned(self.write_lock):
            return False
        if not self._no_fork_ahead.is_set():
            self._no_fork_ahead.wait(forks.QUIET_WITHIN_SECONDS)
        return True

    @property
    def _patience_seconds(self) -> float:
        """Seconds that a writer waits for the lock; few while closing, as a frozen process may hold the lock."""
        return _CLOSING_PATIENCE_SECONDS if self.is_closing else sqlite_connection.lock_patience()

    def patience(self) -> float:
        """Return the seconds that a writer waits. Called while it waits, outside of a transaction.

        Raises:
            _ForkAhead: the writer must let a fork go first and begin again.
        """
        if self._can_yield_to_fork and not self._no_fork_ahead.is_set():
            raise _ForkAhead
        return self._patience_seconds

    # --- opening and closing ------------------------------------------------------------------------------------

    def _writing_connection(self) -> sqlite3.Connection:
        self.check_in_place()
        if self._writer is None:
            self._check_usable()
            self._open_writer()
        assert self._writer is not None
        return self._writer

    def check_in_place(self) -> None:
        """Raise `StoreReplaced` if another file, or none, is at the path: SQLite would still write to the former one.

        No committed data is lost: it is in the former file or in its log, and no other file is opened with that log.
        """
        if self.is_replaced():
            raise sqlite_connection.replaced_error(self._path)

    def is_replaced(self) -> bool:
        """Return whether another file, or none, is at the path; then report this process's claims as lost."""
        if (
            not self.is_known_replaced
            and self._identity is not None
            and sqlite_connection.identity_of(self._path) != self._identity
        ):
            self.is_known_replaced = True
            self._registration.report_lost_claims(self._registration.claimant)
        return self.is_known_replaced

    def _open_writer(self) -> None:
        if not self._create and not self._path.exists():  # SQLite would create it, empty.
            raise StoreNotSetUp(f"there is no file {self._path}; create it with `postdate setup`, or name another")
        with sqlite_connection.lock_for_opening(self._path):
            identity_before = sqlite_connection.identity_of(self._path)
            connection = sqlite_connection.connect(self._path, synchronous=self._synchronous)
            with closing_on_error(connection):
                try:
                    sqlite_connection.check_intact(connection, self._path)
                    (sqlite_connection.create_schema if self._create else sqlite_connection.check_schema)(
                        connection, self._path
                    )
                    identity = sqlite_connection.opened_identity(self._path, identity_before)
                    self._registration.resume(connection, self.patience)
                except OSError as error:
                    raise StoreUnavailable(f"{self._registration.folder}: {error}") from error
        self._writer, self._identity = connection, self._identity or identity

    def _check_usable(self) -> None:
        """Refuse a closed handle."""
        if self.is_closed:
            raise StoreError(f"{self._path} was closed in this process; open a store or transport on it again")

    def _reading_connection(self) -> sqlite3.Connection:
        self._check_usable()
        self.check_in_place()
        if self._reader is None:
            identity_before = sqlite_connection.identity_of(self._path)
            self._reader = self._open_reader()
            # If the file was replaced during the opening, `identity_before` differs, and the next use notices it.
            self._identity = self._identity or sqlite_connection.opened_identity(self._path, identity_before)
        return self._reader

    def _open_reader(self) -> sqlite3.Connection:
        """Open the file for reading. It does not register the process or write, so it works on a full disk."""
        try:
            connection = sqlite_connection.connect(self._path, read_only=True)
        except PostdateError:
            self.setup()  # the file or its log is missing; only a writer may create them
            return sqlite_connection.connect(self._path, read_only=True)
        with closing_on_error(connection):
            try:
                sqlite_connection.check_schema(connection, self._path)
            except StoreNotSetUp:
                self.setup()
        return connection

    def close_connections(self) -> None:
        """Close the connections that have no open transaction. The caller holds both locks."""
        if self._reader is not None and not self._reader.in_transaction:
            self._reader.close()  # before the writer: only a writer that closes last removes the log
            self._reader = None
        if self._writer is not None and not self._writer.in_transaction:
            with suppress(sqlite3.Error, PostdateError):
                # Move committed data from the log into the former file, wherever that is now.
                if self.is_replaced():
                    self._writer.execute("PRAGMA wal_checkpoint(truncate)")
            self._writer.close()
            self._writer = None
            sqlite_connection.remove_log_note(self._path)

    # --- forks --------------------------------------------------------------------------------------------------

    @override
    def before_fork(self, deadline: float) -> None:
        """Close the connections when no other thread uses them, and keep them closed until the fork is over.

        If that takes too long, or if the forking thread itself is in a transaction, they stay open. Then the child
        cannot use the file, and raises an error (:func:`postdate.backends.sqlite.connection.connect`).
        """
        self._no_fork_ahead.clear()
        for each in (self.read_lock, self.write_lock):
            if not each.acquire(timeout=max(deadline - steady_seconds(), 0)):
                text = "%s: a fork did not wait for another thread any longer; its child cannot use the file"
                log.warning(text, self._path)
                return
            self._locked_for_fork.append(each)
        self.close_connections()

    @override
    def after_fork_in_parent(self) -> None:
        while self._locked_for_fork:
            self._locked_for_fork.pop().release()
        self._no_fork_ahead.set()

    @override
    def after_fork_in_child(self) -> None:
        """Forget the connections, which belong to the parent. The next use opens the file again."""
        for connection in (self._reader, self._writer):
            if connection is not None:  # closing it would release locks of the parent, and might remove its log
                forks.prevent_destruction(connection)
        self._reader = self._writer = self._identity = None
        self.is_known_replaced = False
        self._can_yield_to_fork = True
        self._locked_for_fork.clear()
        self._no_fork_ahead = threading.Event()  # another thread may have held the old one's lock at the fork
        self._no_fork_ahead.set()
