"""Outboxes in a table of an SQL database, in which handlers have a transaction: all except the connections.

Records of messages that are received together are read in one call, and written in one. So a database may use one
statement, or one transaction, for them. The messages that handlers sent are stored as bytes between the commit and the
dispatch. Every instant in them is absolute, so that a late or repeated dispatch does not delay a message any longer.
Source: ADR 0017, 0058, 0059.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final, Generic, TypeVar

import anyio
import msgspec
from typing_extensions import override

from postdate.backends.sql.dialect import SqlDialect, Values
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import ConfigurationError, PostdateError, SagaConflict, StoreError, StoreUnreachable
from postdate.messages import DelayedMessage, Envelope
from postdate.ports import BatchedWork, NativeTransaction, OutboxStore, OutboxTransaction, Work, run_works
from postdate.ports.endpoint import Operation, OutboxRecord
from postdate.runtime import forks
from postdate.runtime.threads import run_in_group, run_in_thread

_VERSION: Final = 1  # of the encoded operations
_MICROSECOND: Final = timedelta(microseconds=1)


_RecordWork = tuple[Values, Sequence[Work]]
"""A record, and the works that are run if the record is new."""


class _StoredOperation(msgspec.Struct, omit_defaults=True):
    """One operation; instants are microseconds since 1970 UTC, spans microseconds."""

    destination: str
    message_id: str
    headers: dict[str, str]
    body: bytes
    delayed: bool = False
    due: int | None = None
    expires_at: int | None = None
    time_to_be_received: int | None = None
    use_dead_letter_queue: bool | None = None


class _StoredOperations(msgspec.Struct):
    version: int
    operations: list[_StoredOperation]


def encode_operations(operations: Sequence[Operation]) -> bytes:
    return msgspec.msgpack.encode(_StoredOperations(_VERSION, [_stored_form(each) for each in operations]))


def decode_operations(encoded: bytes) -> tuple[Operation, ...]:
    """Return the operations of :func:`encode_operations`. Raise `StoreError` if damaged, or of a later version."""
    try:
        stored = msgspec.msgpack.decode(encoded, type=_StoredOperations)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the operations of a message in the outbox are damaged: {error}") from error
    if stored.version != _VERSION:
        raise StoreError(
            f"the outbox was written by a newer Postdate (version {stored.version}): upgrade Postdate here"
        )
    return tuple(_operation(each) for each in stored.operations)


def _stored_form(operation: Operation) -> _StoredOperation:
    stored = _StoredOperation(operation.destination, operation.message_id, dict(operation.headers), operation.body)
    stored.due = None if operation.due is None else to_microseconds(operation.due)
    stored.expires_at = None if operation.expires_at is None else to_microseconds(operation.expires_at)
    if isinstance(operation, DelayedMessage):
        stored.delayed = True
        return stored
    span = operation.time_to_be_received
    stored.time_to_be_received = None if span is None else span // _MICROSECOND
    stored.use_dead_letter_queue = operation.use_dead_letter_queue
    return stored


def _operation(stored: _StoredOperation) -> Operation:
    due = None if stored.due is None else from_microseconds(stored.due)
    expires_at = None if stored.expires_at is None else from_microseconds(stored.expires_at)
    if stored.delayed and due is not None:
        return DelayedMessage(stored.message_id, due, stored.destination, stored.headers, stored.body, expires_at)
    span = None if stored.time_to_be_received is None else stored.time_to_be_received * _MICROSECOND
    return Envelope(
        stored.destination,
        stored.message_id,
        stored.headers,
        stored.body,
        expires_at,
        due=due,
        time_to_be_received=span,
        use_dead_letter_queue=stored.use_dead_letter_queue,
    )


T = TypeVar("T")
C = TypeVar("C")

_KEY: Final = ("endpoint", "message_id")
_COLUMNS: Final = (*_KEY, "handled_at", "dispatched_at", "operations")


class OutboxStep(Enum):
    FIND = auto()
    INSERT = auto()
    MARK = auto()


def _record(dispatched_at: object, operations: bytes | None) -> OutboxRecord:
    return OutboxRecord(() if operations is None else decode_operations(operations), dispatched_at is not None)


def connection_semaphore(connections: int) -> anyio.Semaphore:
    """Return a semaphore that limits handlers' connections. Raise `ConfigurationError` below 1."""
    if connections < 1:
        raise ConfigurationError(f"connections must be 1 or more, not {connections}")
    return anyio.Semaphore(connections)


class SqlOutbox(OutboxStore, forks.ForkAware, ABC, Generic[C]):
    """Keeps outboxes in a table of an SQL database. ``C`` is the type of a handler's connection.

    Args:
        dialect: of the database.
        table: its name in statements.
        where: the description of the database, without secrets.
        connection_limit: limits the connections that handlers use at once.
    """

    longest_id: ClassVar[int | None] = None
    """The most characters of a message's id in the table; a longer id is cut, and ends with a digest."""

    def __init__(self, dialect: SqlDialect, table: str, where: str, connection_limit: anyio.Semaphore) -> None:
        self._dialect, self.where, self.connection_limit = dialect, where, connection_limit
        self._max_connections = connection_limit.value
        forks.register(self)
        self._step_runners = {
            step: partial(self.run_step_blocking, step) for step in (OutboxStep.INSERT, OutboxStep.MARK)
        }
        by_key, is_old = (
            f"WHERE {dialect.equality(*_KEY)}",
            f"{dialect.equality('endpoint')} AND dispatched_at < %(before)s",
        )
        self._find = dialect.statement_of(f"SELECT dispatched_at, operations FROM {table} {by_key}")
        self._insert = dialect.insert_statement(table, _COLUMNS, _KEY)
        self._mark = dialect.statement_of(
            f"UPDATE {table} SET dispatched_at = %(at)s, operations = NULL {by_key} AND dispatched_at IS NULL"
        )
        self._remove = dialect.delete_statement(table, is_old, "dispatched_at", "outbox_dispatched")

    @override
    def after_fork_in_child(self) -> None:
        """Reset the limit: the connections that handlers use belong to the parent."""
        self.connection_limit = connection_semaphore(self._max_connections)

    @property
    @override
    def has_one_writer(self) -> bool:
        return False

    @override
    async def find(self, endpoint: str, message_id: str) -> OutboxRecord | None:
        return (await self._records_of(endpoint, [message_id]))[0]

    @override
    async def find_all(self, endpoint: str, message_ids: Sequence[str]) -> Sequence[OutboxRecord | None] | None:
        return await self._records_of(endpoint, message_ids) if self._dialect.can_batch else None

    async def _records_of(self, endpoint: str, message_ids: Sequence[str]) -> Sequence[OutboxRecord | None]:
        keys = [self._key(endpoint, each) for each in message_ids]
        rows = await run_in_thread(self.query_blocking, partial(self.execute_step, step=OutboxStep.FIND, rows=keys))
        return [None if row is None else _record(*row) for row in rows]

    @override
    def recording_work(self, endpoint: str, message_id: str, now: datetime, work: Sequence[Work]) -> Work:
        return BatchedWork(self._write_new, (self.row(self._key(endpoint, message_id), (), now), work))

    def _write_new(self, session: Any, jobs: Sequence[_RecordWork]) -> None:
        if not all(self.execute_step(session, OutboxStep.INSERT, [row for row, _ in jobs])):
            message_ids = ", ".join(str(row["message_id"]) for row, _ in jobs[:3])
            raise SagaConflict(
                f"{message_ids}, or another message of the same batch, was handled by another process meanwhile"
            )
        run_works(session, chain.from_iterable(work for _, work in jobs))

    @override
    def transaction(self, endpoint: str, message_id: str) -> OutboxTransaction:
        return _SqlOutboxTransaction(self, self._key(endpoint, message_id))

    @override
    async def mark_dispatched(self, endpoint: str, message_id: str, now: datetime) -> None:
        await self.run_step(OutboxStep.MARK, {**self._key(endpoint, message_id), "at": self._dialect.time(now)})

    @override
    async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
        values = {"endpoint": endpoint, "before": self._dialect.time(before), "limit": limit}
        return await self.run_transaction(lambda session: self._dialect.delete_first(session, self._remove, values))

    def _key(self, endpoint: str, message_id: str) -> Values:
        # an id of another program may contain NUL, which no database accepts
        stored_id = message_id.replace("\0", "\\x00")
        if self.longest_id is not None and len(stored_id) > self.longest_id:
            digest = hashlib.sha256(stored_id.encode("utf-8", "surrogatepass")).hexdigest()
            stored_id = f"{stored_id[: self.longest_id - len(digest)]}{digest}"
        return {"endpoint": endpoint, "message_id": stored_id}

    def row(self, key: Values, operations: Sequence[Operation], now: datetime) -> Values:
        at, content = self._dialect.time(now), encode_operations(operations) if operations else None
        times = {"handled_at": at, "dispatched_at": None if operations else at}
        return {**key, **times, "operations": self._dialect.content(content)}

    async def add(self, row: Values, work: Sequence[Work]) -> bool:
        """Write a record and run ``work`` in our own transaction; return ``False`` if the record exists."""
        if work and not self._dialect.can_batch:
            return (await self.run_transaction(lambda session: self.write_all(session, [(row, work)])))[0]
        return await self.run_step(OutboxStep.INSERT, row, work)

    # --- steps of several messages, which run together ----------------------------------------------------------------

    async def run_step(self, step: OutboxStep, values: Values, work: Sequence[Work] = ()) -> Any:
        """Run a step together with the same step of other messages, and return its result."""
        run_together = self._step_runners[step]
        return await run_in_group(run_together, run_together, (values, work))

    def run_step_blocking(self, step: OutboxStep, jobs: Sequence[_RecordWork]) -> Sequence[Any]:
        """Run a step for several records, all or none; return the result of each. Blocks."""
        if any(work for _, work in jobs):
            return self.run_batch_blocking(lambda session: self.write_all(session, jobs))
        return self.run_batch_blocking(
            lambda session: self.execute_step(session, step, [row for row, _ in jobs]), is_one=True
        )

    def write_all(self, session: Any, jobs: Sequence[_RecordWork]) -> Sequence[bool]:
        """Write records, and run the works of each new record; return for each whether it was new."""
        are_new = self.execute_step(session, OutboxStep.INSERT, [row for row, _ in jobs])
        self.run_works(session, [work for is_new, (_, work) in zip(are_new, jobs, strict=True) if is_new and work])
        return are_new

    def run_works(self, transaction: Any, works: Sequence[Sequence[Work]]) -> None:
        """Run the works of messages."""
        run_works(transaction, chain.from_iterable(works))

    def execute_step(self, session: Any, step: OutboxStep, rows: Sequence[Values]) -> Sequence[Any]:
        """Run the statements of a step; return the result of each record. Blocks."""
        dialect = self._dialect
        if step is OutboxStep.FIND:
            return [dialect.row(session, self._find, row) for row in rows]
        if step is OutboxStep.INSERT:
            return [dialect.insert_new(session, self._insert, row) for row in rows]
        return [dialect.change(session, self._mark, row) for row in rows]

    # --- methods of a database ----------------------------------------------------------------------------------------

    @abstractmethod
    def query_blocking(self, work: Callable[[Any], T]) -> T:
        """Run ``work``, which only reads, on our own connection. Blocks."""

    @abstractmethod
    def run_transaction_blocking(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` in our own transaction. Blocks."""

    def run_batch_blocking(self, work: Callable[[Any], T], *, is_one: bool = False) -> T:
        """Run ``work`` for several messages in our own transaction; ``is_one``: a :meth:`execute_step`. Blocks."""
        return self.run_transaction_blocking(work)

    async def run_transaction(self, work: Callable[[Any], T]) -> T:
        """Run :meth:`run_transaction_blocking` in a thread."""
        return await run_in_thread(self.run_transaction_blocking, work)

    @abstractmethod
    async def acquire(self) -> C:
        """Acquire a connection as the application would open it, in no transaction."""

    @abstractmethod
    async def release(self, connection: C) -> None:
        """Release a connection; roll back an open transaction on it."""

    @abstractmethod
    async def begin(self, connection: C) -> None:
        """Begin a transaction that only :meth:`commit` and :meth:`roll_back` end."""

    def native(self, connection: C) -> NativeTransaction:
        return connection

    @abstractmethod
    async def commit(self, connection: C, row: Values, work: Sequence[Work]) -> bool:
        """Run :meth:`write_all` in a handler's transaction and commit; return ``False`` if it was rolled back.

        Raises `StoreError` if nothing was committed: the transaction is still open, or a handler has ended it.
        """

    @abstractmethod
    async def roll_back(self, connection: C) -> None:
        """Roll the transaction back, if there is one. Raise `StoreUnreachable` if the connection was lost."""


class _SqlOutboxTransaction(OutboxTransaction, Generic[C]):
    def __init__(self, outbox: SqlOutbox[C], key: Values) -> None:
        self._outbox, self._key = outbox, key
        self._connection: C | None = None
        self._begin_lock = anyio.Lock()
        self._outage: PostdateError | None = None
        """The outage that the transaction met, even if its handler caught the error."""
        self._has_begun = self._is_over = False

    @property
    @override
    def has_begun(self) -> bool:
        return self._has_begun

    @override
    async def begin(self) -> NativeTransaction:
        async with self._begin_lock:
            self._check_not_over()
            if self._connection is None:
                with self._remember_outage():
                    self._connection = await self._acquire()
            if not self._has_begun:
                try:
                    with self._remember_outage():
                        await self._outbox.begin(self._connection)
                except Exception:
                    await self._release_own_connection()
                    raise
                self._has_begun, self._outage = True, None  # The handler may call this a second time, after an outage.
                self._check_not_over()  # otherwise the roll-back, which waits for this, ends the transaction
            return self._outbox.native(self._connection)

    async def _acquire(self) -> C:
        await self._outbox.connection_limit.acquire()
        try:
            self._check_not_over()
            connection = await self._outbox.acquire()
        except BaseException:
            self._outbox.connection_limit.release()
            raise
        if self._is_over:  # Rolled back during the wait: no other code would release the connection.
            await self._release(connection)
            self._check_not_over()
        return connection

    def _check_not_over(self) -> None:
        """Refuse late calls, for example from a task for which the handler has not waited."""
        if self._is_over:
            raise StoreError(
                f"{self._outbox.where}: the transaction has ended, because the handling of its message has ended"
            )

    @override
    async def commit(self, operations: Sequence[Operation], now: datetime, work: Sequence[Work] = ()) -> bool:
        async with self._begin_lock:  # A task for which the handler has not waited may begin now.
            self._check_not_over()
            self._is_over = True
        row = self._outbox.row(self._key, operations, now)
        with self._remember_outage():
            if self._has_begun and self._connection is not None:
                is_new = await self._outbox.commit(self._connection, row, work)
            else:
                if self._connection is not None:  # Its begin was cancelled: the record needs a connection.
                    await self._roll_back()
                is_new = await self._outbox.add(row, work)
        await self._release_own_connection()
        return is_new

    @override
    async def roll_back(self) -> None:
        self._is_over = True
        if self._connection is not None:  # A task that still waits for a connection releases it itself.
            async with self._begin_lock:  # After the lock it is known whether the transaction has begun.
                await self._roll_back()
        if self._outage is not None:
            raise self._outage

    async def _roll_back(self) -> None:
        try:
            if self._connection is not None and self._has_begun:
                with self._remember_outage():
                    await self._outbox.roll_back(self._connection)
            elif self._connection is not None:
                # Its begin was cancelled. In SQLite the begin continues in a thread, and the roll-back waits for it.
                # psycopg has closed the connection, on which nothing was changed: that is no outage.
                with suppress(StoreUnreachable):
                    await self._outbox.roll_back(self._connection)
        finally:
            await self._release_own_connection()

    async def _release_own_connection(self) -> None:
        connection, self._connection, self._has_begun = self._connection, None, False
        if connection is not None:
            await self._release(connection)

    async def _release(self, connection: C) -> None:
        try:
            await self._outbox.release(connection)
        finally:
            self._outbox.connection_limit.release()

    @contextmanager
    def _remember_outage(self) -> Generator[None]:
        try:
            yield
        except PostdateError as error:
            if error.outage:
                self._outage = error
            raise
