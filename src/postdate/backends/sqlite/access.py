"""The two connections of this process to an SQLite file: one writes and one reads, each in one thread at a time.

They are opened at first use, and refuse everything once another file is at the path. Before a fork they are closed;
parent and child open their own at the next use. SQLite keeps one table of locks for a process, which a child would
inherit: it would take what its parent has locked for locked by itself, the parent would take itself for the last user
of the file, and remove the log while the child writes to it (ADR 40).
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
from postdate.backends.sqlite.connection import (
    Identity,
    alone,
    check_intact,
    check_schema,
    connect,
    create_schema,
    first_opened,
    forget_log,
    identity_of,
    lock_patience,
    replaced,
    translated,
)
from postdate.backends.sqlite.registration import Registration
from postdate.clock import steady_seconds
from postdate.errors import PostdateError, StoreError, StoreNotSetUp, StoreUnavailable, StoreUnreachable
from postdate.runtime import forks

_PATIENCE_AT_THE_END_SECONDS = 1.0

log = logging.getLogger("postdate.embedded")

T = TypeVar("T")


class _ForkAhead(Exception):
    """A thread of this process is about to fork, and waits for the one in which this is raised."""


class FileAccess(forks.ForkAware):
    """Opens a file when it is used, gives threads their turns, and closes the file for forks and at the end."""

    def __init__(self, path: Path, registration: Registration, *, synchronous: str, create: bool) -> None:
        self._path = path
        self._registration = registration
        self._synchronous = synchronous
        self._create = create
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._opened: Identity | None = None
        """Which file that is."""
        self.is_known_replaced = False
        """Whether another file, or none, was seen at the path: then that is for good."""
        self.is_closing = False
        """Whether the last user is about to close it: writers wait for a short time only."""
        self.is_closed = False
        self.writing = forks.rlock()
        self.reading = forks.rlock()
        self._locked_for_fork = list[threading.RLock]()
        """Those of these locks that the thread which forks holds just now."""
        self._no_fork_ahead = threading.Event()
        """Cleared while a thread is about to fork, which others let go first: locks are not fair."""
        self._no_fork_ahead.set()
        self._gives_way = True
        """Whether the turn to write is all that its thread holds; under the lock."""
        forks.register(self)

    # --- use ----------------------------------------------------------------------------------------------------

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` with the writing connection, beside no other thread; again if it gave way to a fork."""
        while True:
            with suppress(_ForkAhead), self._turn(), translated(self._path):
                return work(self._writing_connection())

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` with the reading connection, in a transaction: on one consistent snapshot."""
        self._let_fork()
        with self.reading, translated(self._path):
            connection = self._reading_connection()
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("COMMIT")

    def snapshot(self) -> sqlite3.Connection:
        """Return a connection in a read transaction, which the caller closes."""
        self._let_fork()
        with self.reading:  # no fork while it is being opened
            connection = connect(self._path, read_only=True)
            with closing_on_error(connection):
                self.check_in_place()
                check_schema(connection, self._path)
                with translated(self._path):
                    connection.execute("BEGIN")
        return connection

    def setup(self) -> None:
        """Open the file for writing, which creates what is missing."""
        self.write(lambda _: None)

    @contextmanager
    def _turn(self) -> Generator[None]:
        is_outermost = self._let_fork()
        if not self.writing.acquire(timeout=self._patience_seconds):
            raise StoreUnreachable(f"{self._path}: another thread of this process waits to write to it")
        before, self._gives_way = self._gives_way, is_outermost
        try:
            yield
        finally:
            self._gives_way = before
            self.writing.release()

    def _let_fork(self) -> bool:
        """Wait until a fork that is ahead is over; return ``False``, at once, if it waits for this thread itself."""
        forks.check_process()
        if forks.is_owned(self.reading) or forks.is_owned(self.writing):
            return False
        if not self._no_fork_ahead.is_set():
            self._no_fork_ahead.wait(forks.QUIET_WITHIN_SECONDS)
        return True

    @property
    def _patience_seconds(self) -> float:
        """How long a writer waits for its turn: short while closing, as the lock may be a frozen process'."""
        return _PATIENCE_AT_THE_END_SECONDS if self.is_closing else lock_patience()

    def patience(self) -> float:
        """Return the seconds that a writer waits; called while it does, in no transaction.

        Raises:
            _ForkAhead: it is to let a fork go first, and to begin anew.
        """
        if self._gives_way and not self._no_fork_ahead.is_set():
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
        """Refuse everything once another file, or none, is at the path: SQLite would go on writing to the one before.

        Nothing that was committed is lost: it is in the file before, or in its log, which no other file is opened with.
        """
        if self.is_replaced():
            raise replaced(self._path)

    def is_replaced(self) -> bool:
        """Look whether another file, or none, is at the path; then what this process holds is void, and it is told."""
        if not self.is_known_replaced and self._opened is not None and identity_of(self._path) != self._opened:
            self.is_known_replaced = True
            self._registration.fence(self._registration.claimant)
        return self.is_known_replaced

    def _open_writer(self) -> None:
        with alone(self._path):
            before = identity_of(self._path)
            connection = connect(self._path, synchronous=self._synchronous)
            with closing_on_error(connection):
                try:
                    check_intact(connection, self._path)
                    (create_schema if self._create else check_schema)(connection, self._path)
                    opened = first_opened(self._path, before)
                    self._registration.resume(connection, self.patience)
                except OSError as error:
                    raise StoreUnavailable(f"{self._registration.folder}: {error}") from error
        self._writer, self._opened = connection, self._opened or opened

    def _check_usable(self) -> None:
        """Refuse a closed handle."""
        if self.is_closed:
            raise StoreError(f"{self._path} was closed in this process; open a store or transport on it again")

    def _reading_connection(self) -> sqlite3.Connection:
        self._check_usable()
        self.check_in_place()
        if self._reader is None:
            before = identity_of(self._path)
            self._reader = self._looking_connection()
            # If it may be another file than before, the next use finds it replaced.
            self._opened = self._opened or first_opened(self._path, before)
        return self._reader

    def _looking_connection(self) -> sqlite3.Connection:
        """Open the file for reading. It takes no number and writes nothing, so it works on a full disk."""
        try:
            connection = connect(self._path, read_only=True)
        except PostdateError:
            self.setup()  # it is missing; or its log is, which only a writer may create
            return connect(self._path, read_only=True)
        with closing_on_error(connection):
            try:
                check_schema(connection, self._path)
            except StoreNotSetUp:
                self.setup()
        return connection

    def close_connections(self) -> None:
        """Close the connections that no transaction is open on; both locks are held."""
        if self._reader is not None and not self._reader.in_transaction:
            self._reader.close()  # first: only a writer that closes last takes the log away
            self._reader = None
        if self._writer is not None and not self._writer.in_transaction:
            with suppress(sqlite3.Error, PostdateError):
                # What was committed goes into the file that it was committed to, wherever that is.
                if self.is_replaced():
                    self._writer.execute("PRAGMA wal_checkpoint(truncate)")
            self._writer.close()
            self._writer = None
            forget_log(self._path)

    # --- forks --------------------------------------------------------------------------------------------------

    @override
    def before_fork(self, deadline: float) -> None:
        """Close the connections, once no other thread uses them, and keep them closed.

        Where that takes too long, or the thread that forks is in a transaction itself, they stay open: then the child
        cannot use the file, and says so (:func:`postdate.backends.sqlite.connection.connect`).
        """
        self._no_fork_ahead.clear()
        for each in (self.reading, self.writing):
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
        """Forget the connections, which are the parent's. The next use opens the file anew."""
        for connection in (self._reader, self._writer):
            if connection is not None:  # to close it would end locks, and maybe the log, of the parent
                forks.keep_for_ever(connection)
        self._reader = self._writer = self._opened = None
        self.is_known_replaced = False
        self._gives_way = True
        self._locked_for_fork.clear()
        self._no_fork_ahead = threading.Event()  # another thread may have had the lock of the one before
        self._no_fork_ahead.set()
