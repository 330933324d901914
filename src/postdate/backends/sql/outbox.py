"""Outboxes in a table of an SQL database, in which handlers have a transaction: everything but its connections.

Records of messages that are received together are read in one call, and written in one, so that a database may use one
statement, or one transaction, for them. What handlers sent is kept in bytes between the commit and the dispatch; every
instant in it is absolute, so that a late or repeated dispatch does not delay a message any longer. Source:
specification 7; ADR 0017, 0058, 0059.
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
from postdate.ports import BatchedWork, NativeTransaction, OutboxStore, OutboxTransaction, Work, do_works
from postdate.ports.endpoint import Operation, OutboxRecord
from postdate.runtime import forks
from postdate.runtime.threads import in_thread, together

_VERSION: Final = 1
_MICROSECOND: Final = timedelta(microseconds=1)


_Writing = tuple[Values, Sequence[Work]]
"""A record, and what is done if it is new."""


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
    """Return the operations of :func:`encode_operations`. Raises `StoreError` if damaged, or of a later version."""
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


def places(connections: int) -> anyio.Semaphore:
    """Return a semaphore that limits handlers' connections. Raises `ConfigurationError` below 1."""
    if connections < 1:
        raise ConfigurationError(f"connections must be 1 or more, not {connections}")
    return anyio.Semaphore(connections)


class SqlOutbox(OutboxStore, forks.ForkAware, ABC, Generic[C]):
    """Keeps outboxes in a table of an SQL database. ``C`` is its handle of a connection lent to a handler.

    Args:
        dialect: of the database.
        table: its name in statements.
        where: the database in words, without secrets.
        free: limits the connections lent to handlers at once.
    """

    longest_id: ClassVar[int | None] = None
    """Characters of a message's id that the table takes; a longer id is cut, and ends with a digest."""

    def __init__(self, dialect: SqlDialect, table: str, where: str, free: anyio.Semaphore) -> None:
        self._dialect, self.where, self.free = dialect, where, free
        self._places = free.value
        forks.register(self)
        self._together = {step: partial(self.do_together, step) for step in (OutboxStep.INSERT, OutboxStep.MARK)}
        one, old = f"WHERE {dialect.equal(*_KEY)}", f"{dialect.equal('endpoint')} AND dispatched_at < %(before)s"
        self._find = dialect.spelled(f"SELECT dispatched_at, operations FROM {table} {one}")
        self._insert = dialect.insert(table, _COLUMNS, _KEY)
        self._mark = dialect.spelled(
            f"UPDATE {table} SET dispatched_at = %(at)s, operations = NULL {one} AND dispatched_at IS NULL"
        )
        self._remove = dialect.delete(table, old, "dispatched_at", "outbox_dispatched")

    @override
    def after_fork_in_child(self) -> None:
        """Nobody has a connection here: those that are lent are the parent's."""
        self.free = places(self._places)

    @property
    @override
    def has_one_writer(self) -> bool:
        return False

    @override
    async def find(self, endpoint: str, message_id: str) -> OutboxRecord | None:
        return (await self._records_of(endpoint, [message_id]))[0]

    @override
    async def find_all(self, endpoint: str, message_ids: Sequence[str]) -> Sequence[OutboxRecord | None] | None:
        return await self._records_of(endpoint, message_ids) if self._dialect.batches else None

    async def _records_of(self, endpoint: str, message_ids: Sequence[str]) -> Sequence[OutboxRecord | None]:
        keys = [self._key(endpoint, each) for each in message_ids]
        rows = await in_thread(self.looking, partial(self.do, step=OutboxStep.FIND, rows=keys))
        return [None if row is None else _record(*row) for row in rows]

    @override
    def handled(self, endpoint: str, message_id: str, now: datetime, work: Sequence[Work]) -> Work:
        return BatchedWork(self._write_new, (self.row(self._key(endpoint, message_id), (), now), work))

    def _write_new(self, session: Any, jobs: Sequence[_Writing]) -> None:
        if not all(self.do(session, OutboxStep.INSERT, [row for row, _ in jobs])):
            message_ids = ", ".join(str(row["message_id"]) for row, _ in jobs[:3])
            raise SagaConflict(f"{message_ids}, or one of those with it, was handled by somebody else meanwhile")
        do_works(session, chain.from_iterable(work for _, work in jobs))

    @override
    def transaction(self, endpoint: str, message_id: str) -> OutboxTransaction:
        return _SqlOutboxTransaction(self, self._key(endpoint, message_id))

    @override
    async def mark_dispatched(self, endpoint: str, message_id: str, now: datetime) -> None:
        await self.done(OutboxStep.MARK, {**self._key(endpoint, message_id), "at": self._dialect.time(now)})

    @override
    async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
        values = {"endpoint": endpoint, "before": self._dialect.time(before), "limit": limit}
        return await self.alone(lambda session: self._dialect.delete_first(session, self._remove, values))

    def _key(self, endpoint: str, message_id: str) -> Values:
        stored_id = message_id.replace("\0", "\\x00")  # a foreign id may have such, and no database takes them
        if self.longest_id is not None and len(stored_id) > self.longest_id:
            digest = hashlib.sha256(stored_id.encode("utf-8", "surrogatepass")).hexdigest()
            stored_id = f"{stored_id[: self.longest_id - len(digest)]}{digest}"
        return {"endpoint": endpoint, "message_id": stored_id}

    def row(self, key: Values, operations: Sequence[Operation], now: datetime) -> Values:
        at, content = self._dialect.time(now), encode_operations(operations) if operations else None
        times = {"handled_at": at, "dispatched_at": None if operations else at}
        return {**key, **times, "operations": self._dialect.content(content)}

    async def add(self, row: Values, work: Sequence[Work]) -> bool:
        """Write a record and do ``work`` in a transaction of our own; ``False``: the record is there."""
        if work and not self._dialect.batches:
            return (await self.alone(lambda session: self.write_all(session, [(row, work)])))[0]
        return await self.done(OutboxStep.INSERT, row, work)

    # --- what comes at the same time is done together -----------------------------------------------------------------

    async def done(self, step: OutboxStep, values: Values, work: Sequence[Work] = ()) -> Any:
        """Run a step together with that of other messages, and return its result."""
        do = self._together[step]
        return await together(do, do, (values, work))

    def do_together(self, step: OutboxStep, jobs: Sequence[_Writing]) -> Sequence[Any]:
        """Run a step for several records, all or none; return the result of each. Blocks."""
        if any(work for _, work in jobs):
            return self.changing(lambda session: self.write_all(session, jobs))
        return self.changing(lambda session: self.do(session, step, [row for row, _ in jobs]), is_one=True)

    def write_all(self, session: Any, jobs: Sequence[_Writing]) -> Sequence[bool]:
        """Write records, and do what belongs to each that was not there; return which these are."""
        are_new = self.do(session, OutboxStep.INSERT, [row for row, _ in jobs])
        self.do_works(session, [work for is_new, (_, work) in zip(are_new, jobs, strict=True) if is_new and work])
        return are_new

    def do_works(self, transaction: Any, works: Sequence[Sequence[Work]]) -> None:
        """Run the works of messages."""
        do_works(transaction, chain.from_iterable(works))

    def do(self, session: Any, step: OutboxStep, rows: Sequence[Values]) -> Sequence[Any]:
        """Run the statements of a step; return the result of each record. Blocks."""
        dialect = self._dialect
        if step is OutboxStep.FIND:
            return [dialect.row(session, self._find, row) for row in rows]
        if step is OutboxStep.INSERT:
            return [dialect.insert_new(session, self._insert, row) for row in rows]
        return [dialect.change(session, self._mark, row) for row in rows]

    # --- what a database gives ----------------------------------------------------------------------------------------

    @abstractmethod
    def looking(self, work: Callable[[Any], T]) -> T:
        """Run ``work``, which reads, on a connection of our own. Blocks."""

    @abstractmethod
    def writing(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` in a transaction of our own. Blocks."""

    def changing(self, work: Callable[[Any], T], *, is_one: bool = False) -> T:
        """Run ``work`` for several messages in a transaction of our own; ``is_one``: a :meth:`do`. Blocks."""
        return self.writing(work)

    async def alone(self, work: Callable[[Any], T]) -> T:
        """:meth:`writing` in a thread."""
        return await in_thread(self.writing, work)

    @abstractmethod
    async def take(self) -> C:
        """Return a connection as the application would open it, in no transaction."""

    @abstractmethod
    async def put(self, connection: C) -> None:
        """Take a connection back; an open transaction on it is rolled back."""

    @abstractmethod
    async def begin(self, connection: C) -> None:
        """Begin a transaction that only :meth:`commit` and :meth:`undo` end."""

    def native(self, connection: C) -> NativeTransaction:
        return connection

    @abstractmethod
    async def commit(self, connection: C, row: Values, work: Sequence[Work]) -> bool:
        """Run :meth:`write_all` in a handler's transaction and commit; ``False``: it was rolled back.

        Raises `StoreError` if nothing was committed: the transaction is still open, or a handler has ended it.
        """

    @abstractmethod
    async def undo(self, connection: C) -> None:
        """Roll the transaction back, if there is one. Raises `StoreUnreachable` if the connection was lost."""


class _SqlOutboxTransaction(OutboxTransaction, Generic[C]):
    def __init__(self, outbox: SqlOutbox[C], key: Values) -> None:
        self._outbox, self._key = outbox, key
        self._connection: C | None = None
        self._beginning = anyio.Lock()
        self._outage: PostdateError | None = None
        """That the transaction met, whatever its handler has made of it."""
        self._begun = self._over = False

    @property
    @override
    def begun(self) -> bool:
        return self._begun

    @override
    async def begin(self) -> NativeTransaction:
        async with self._beginning:
            self._check_not_over()
            if self._connection is None:
                with self._noting_outage():
                    self._connection = await self._acquire()
            if not self._begun:
                try:
                    with self._noting_outage():
                        await self._outbox.begin(self._connection)
                except Exception:
                    await self._give_back()
                    raise
                self._begun, self._outage = True, None  # it may have been asked for a second time
                self._check_not_over()  # else the roll-back, which waits for this, ends what it has begun
            return self._outbox.native(self._connection)

    async def _acquire(self) -> C:
        await self._outbox.free.acquire()
        try:
            self._check_not_over()
            connection = await self._outbox.take()
        except BaseException:
            self._outbox.free.release()
            raise
        if self._over:  # rolled back while this waited: nobody else would give the connection back
            await self._put(connection)
            self._check_not_over()
        return connection

    def _check_not_over(self) -> None:
        """Refuse late calls, as from a task that the handler has not waited for."""
        if self._over:
            raise StoreError(f"{self._outbox.where}: the transaction is over, as the handling of its message is")

    @override
    async def commit(self, operations: Sequence[Operation], now: datetime, work: Sequence[Work] = ()) -> bool:
        async with self._beginning:  # a task that the handler has not waited for may begin just now
            self._check_not_over()
            self._over = True
        row = self._outbox.row(self._key, operations, now)
        with self._noting_outage():
            if self._begun and self._connection is not None:
                is_new = await self._outbox.commit(self._connection, row, work)
            else:
                if self._connection is not None:  # its begin was cancelled: the record needs the place
                    await self._roll_back()
                is_new = await self._outbox.add(row, work)
        await self._give_back()
        return is_new

    @override
    async def roll_back(self) -> None:
        self._over = True
        if self._connection is not None:  # who waits for one gives it back
            async with self._beginning:  # who begins just now knows whether it has begun
                await self._roll_back()
        if self._outage is not None:
            raise self._outage

    async def _roll_back(self) -> None:
        try:
            if self._connection is not None and self._begun:
                with self._noting_outage():
                    await self._outbox.undo(self._connection)
            elif self._connection is not None:
                # Its begin was cancelled. In SQLite that goes on in a thread, and the roll-back waits for it; psycopg
                # has closed the connection, on which nothing was done: that is no outage.
                with suppress(StoreUnreachable):
                    await self._outbox.undo(self._connection)
        finally:
            await self._give_back()

    async def _give_back(self) -> None:
        connection, self._connection, self._begun = self._connection, None, False
        if connection is not None:
            await self._put(connection)

    async def _put(self, connection: C) -> None:
        try:
            await self._outbox.put(connection)
        finally:
            self._outbox.free.release()

    @contextmanager
    def _noting_outage(self) -> Generator[None]:
        try:
            yield
        except PostdateError as error:
            if error.outage:
                self._outage = error
            raise
