"""Outboxes in an SQLite file: the one with the tables of the application, so that one commit covers both.

SQLite has one writer at a time, so the transactions of a process take turns, from where a handler asks for its
connection, or has ended, to the commit. Source: specification 7; ADR 0017.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from typing_extensions import override

from postdate.backends.sql.operations import decode_operations, encode_operations, storable
from postdate.backends.sqlite.connection import connect, patiently
from postdate.backends.sqlite.errors import translated
from postdate.backends.sqlite.setup import OUTBOX_MARKS, bring_up_to_date, steps
from postdate.backends.sqlite.transaction import QueueRules, Transaction
from postdate.clock import to_microseconds
from postdate.errors import ConfigurationError, StoreError, StoreNotSetUp
from postdate.ports import NativeTransaction, OutboxStore, OutboxTransaction, Recording, Work
from postdate.ports.outbox import Operation, OutboxRecord
from postdate.runtime.threads import in_thread

T = TypeVar("T")

_FIND: Final = "SELECT dispatched_at, operations FROM postdate_outbox WHERE endpoint = ? AND message_id = ?"
_INSERT: Final = """
    INSERT INTO postdate_outbox (endpoint, message_id, handled_at, dispatched_at, operations) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (endpoint, message_id) DO NOTHING"""
_MARK: Final = """
    UPDATE postdate_outbox SET dispatched_at = ?, operations = NULL
    WHERE endpoint = ? AND message_id = ? AND dispatched_at IS NULL"""
_REMOVE: Final = """
    DELETE FROM postdate_outbox WHERE seq IN (
        SELECT seq FROM postdate_outbox WHERE endpoint = ? AND dispatched_at < ? ORDER BY dispatched_at LIMIT ?)"""


class SqliteOutbox(OutboxStore):
    """Keeps outboxes in an SQLite file; several processes may use one file at once.

    It may be the file of a delayed message store and of queues. While a handler has the connection of its transaction,
    nobody else writes to the file: short handlers are good ones.

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
        self._synchronous = synchronous
        self._connection: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._using, self._reading = threading.Lock(), threading.Lock()
        self._guarded = False
        self._closed = False
        self.turn = anyio.Semaphore(1)
        """Held by whoever has a transaction open; for the transactions of this outbox only."""

    @property
    @override
    def database(self) -> object:
        return ("sqlite", str(self.path))

    @property
    @override
    def has_one_writer(self) -> bool:
        """See :class:`postdate.ports.OutboxStore`: so it is with SQLite."""
        return True

    @override
    async def setup(self) -> None:
        """Create the file and its tables; idempotent."""
        await self._in_turn(self._set_up)

    @override
    async def find(self, endpoint: str, message_id: str) -> OutboxRecord | None:
        row = await in_thread(self._found, (endpoint, storable(message_id)))
        if row is None:
            return None
        dispatched_at, operations = row
        return OutboxRecord(() if operations is None else decode_operations(operations), dispatched_at is not None)

    @override
    def transaction(self, endpoint: str, message_id: str) -> SqliteOutboxTransaction:
        return SqliteOutboxTransaction(self, (endpoint, storable(message_id)))

    @override
    async def mark_dispatched(self, endpoint: str, message_id: str, now: datetime) -> None:
        await self._write(_MARK, (to_microseconds(now), endpoint, storable(message_id)))

    @override
    async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
        return await self._write(_REMOVE, (endpoint, to_microseconds(before), limit))

    @override
    async def close(self) -> None:
        """Close the file; a second time without effect."""
        await in_thread(self._close)

    def _close(self) -> None:
        with self._using, self._reading:
            self._closed = True
            if self._reader is not None:  # first: only a writer that closes last takes the log away
                self._reader.close()
                self._reader = None
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # --- in threads ---------------------------------------------------------------------------------------------

    async def _in_turn(self, work: Callable[[], T]) -> T:
        async with self.turn:
            return await in_thread(work)

    async def _write(self, statement: str, values: Sequence[Any]) -> int:
        def write() -> int:
            with self._using, translated(self.path):
                connection = self._begun()
                try:
                    count = connection.execute(statement, values).rowcount
                    self.end(connection.commit)
                except BaseException:
                    self.end(connection.rollback)
                    raise
                return count

        return await self._in_turn(write)

    def _found(self, key: tuple[str, str]) -> tuple[int | None, bytes | None] | None:
        with self._reading, translated(self.path):
            if self._reader is None:
                self._check_open()
                if not self.path.exists():
                    raise StoreNotSetUp(f"there is no file {self.path} for the outbox: let the endpoint create it")
                self._reader = connect(self.path, synchronous=self._synchronous)  # only a writer may create the log
            return self._reader.execute(_FIND, key).fetchone()

    def _set_up(self) -> None:
        with self._using, translated(self.path):
            connection = self._begun()
            try:
                where = f"the outbox in {self.path}"
                bring_up_to_date(connection.execute, steps("outbox"), OUTBOX_MARKS, where)
                self.end(connection.commit)
            except BaseException:
                self.end(connection.rollback)
                raise

    def begin(self) -> sqlite3.Connection:
        """Begin a transaction that only :meth:`end` ends; inside :meth:`do`, for whoever has the turn."""
        connection = self._begun()
        self._guarded = True
        return connection

    def _begun(self) -> sqlite3.Connection:
        if self._connection is None:
            self._check_open()
            self._connection = connect(self.path, synchronous=self._synchronous)
            self._connection.set_authorizer(self._may)
        connection = self._connection
        if connection.in_transaction:  # of one that was cancelled while it began
            self.end(connection.rollback)
        as_opened(connection)
        patiently(connection, "BEGIN IMMEDIATE")
        return connection

    def _may(self, action: int, *_: object) -> int:
        """Refuse to end a transaction while a handler has it: its data must not be committed without the record."""
        refused = self._guarded and action == sqlite3.SQLITE_TRANSACTION
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    def end(self, how: Callable[[], None]) -> None:
        """Call ``commit`` or ``rollback`` of the connection; inside :meth:`do`."""
        self._guarded = False
        how()

    def undo(self) -> None:
        """Roll back what is open; inside :meth:`do`, for whoever has the turn."""
        if self._connection is not None:
            self.end(self._connection.rollback)

    def do(self, work: Callable[[], T]) -> T:
        """Do something on the connection; for whoever has the turn. Blocking."""
        with self._using, translated(self.path):
            return work()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the outbox in {self.path} was closed in this process")


def as_opened(connection: sqlite3.Connection) -> None:
    """Undo what a handler has set about rows: our own statements, and those of other adapters, read tuples of text."""
    connection.row_factory, connection.text_factory = None, str


class SqliteOutboxTransaction(OutboxTransaction):
    """See :class:`postdate.ports.OutboxTransaction`; the native transaction is an ``sqlite3.Connection``."""

    def __init__(self, outbox: SqliteOutbox, key: tuple[str, str]) -> None:
        self._outbox, self._key = outbox, key
        self._connection: sqlite3.Connection | None = None
        self._beginning = anyio.Semaphore(1)
        self._has_turn = self._over = False

    @property
    @override
    def begun(self) -> bool:
        return self._has_turn

    @override
    async def begin(self) -> NativeTransaction:
        async with self._beginning:
            self._check_not_over()
            if not self._has_turn:
                await self._take_turn()
            if self._connection is None:
                self._connection = await self._connected()
            return self._connection

    async def _take_turn(self) -> None:
        await self._outbox.turn.acquire()
        if self._over:  # rolled back while this waited: nobody else would give the turn up again
            self._outbox.turn.release()
            self._check_not_over()
        self._has_turn = True

    async def _connected(self) -> sqlite3.Connection:
        try:
            connection = await in_thread(self._outbox.do, self._begin)
        except Exception:
            if not self._over:  # else it is the roll-back that gives the turn up
                self._give_up_turn()
            raise
        self._check_not_over()
        return connection

    def _begin(self) -> sqlite3.Connection:
        self._check_not_over()  # rolled back while this waited for its thread
        return self._outbox.begin()

    def _check_not_over(self) -> None:
        """Refuse what comes too late, as from a task that the handler has not waited for."""
        if self._over:
            raise StoreError(f"{self._outbox.path}: the transaction is over, as the handling of its message is")

    @override
    async def commit(self, operations: Sequence[Operation], now: datetime, work: Sequence[Work] = ()) -> bool:
        connection, at = await self.begin(), to_microseconds(now)
        encoded = encode_operations(operations) if operations else None
        row = (*self._key, at, None if operations else at, encoded)
        self._over = True
        done = await in_thread(self._outbox.do, partial(self._commit, connection, row, work))
        self._give_up_turn()
        return done

    def _commit(self, connection: sqlite3.Connection, row: Sequence[Any], work: Sequence[Work]) -> bool:
        if not connection.in_transaction:  # as a full disk does it
            raise StoreError(f"{self._outbox.path}: the transaction has ended before its commit")
        as_opened(connection)
        new = connection.execute(_INSERT, row).rowcount == 1
        if new:
            for each in work:
                each(Transaction(connection, 0, Recording.ALL, QueueRules()))
        self._outbox.end(connection.commit if new else connection.rollback)
        return new

    @override
    async def roll_back(self) -> None:
        self._over = True
        if not self._has_turn:
            return
        try:
            await in_thread(self._outbox.do, self._outbox.undo)
        finally:
            self._give_up_turn()

    def _give_up_turn(self) -> None:
        self._connection, self._has_turn = None, False
        self._outbox.turn.release()
