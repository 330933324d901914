"""Timeouts in a table of an SQL database: all except the SQL, the sessions and the claims.

Source: ADR 0014; docs/specification-rows.md, row 95.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from typing_extensions import override

from postdate.backends.sql import timeouts_layout
from postdate.backends.sql.dialect import Sessions, SqlDialect
from postdate.errors import ConfigurationError, MessageError, TimeoutConcurrentlyProcessed
from postdate.ports import Work
from postdate.ports.timeouts import DueChunk, DueTimeout, Timeout, TimeoutPersister

log = logging.getLogger("postdate.timeouts")

_MOST_REPORTED: Final = 10_000
"""The number of remembered errors, so that each is logged once."""

CONTENT: Final = '"Id", "Destination", "SagaId", "State", "Time"'
LATER: Final = '"Time" > %(after)s'

Due = Callable[[datetime, datetime, int | None], Sequence[tuple[Any, ...]]]
"""Returns ``Id`` and ``Time`` of rows after the first instant and until the second, by ``Time``.

The integer limits the number of rows; ``None``: all.
"""

First = Callable[[datetime], object]
"""Returns the earliest ``Time`` after an instant, or ``None``."""


class TimeoutStatements(NamedTuple):
    """Every statement of one table of timeouts. A named parameter is an id in the form of :meth:`TimeoutTable.key`."""

    insert: Any
    """Writes a row, unless its id exists."""
    peek: Any
    delete: Any
    delete_saga: Any
    due: Any
    first: Any
    claim: Any = ""


def standard_statements(table: str, headers: str, first: str) -> TimeoutStatements:
    """Return the statements for databases that quote names with double quotes.

    Args:
        table: its name in statements.
        headers: the column of the headers, as text.
        first: the statement for the earliest time after an instant.
    """
    columns, values = (
        ", ".join(f'"{name}"' for name in timeouts_layout.COLUMNS),
        ", ".join(f"%({name})s" for name in timeouts_layout.COLUMNS),
    )
    return TimeoutStatements(
        insert=f'INSERT INTO {table} ({columns}) VALUES ({values}) ON CONFLICT ("Id") DO NOTHING',
        peek=f'SELECT {CONTENT}, {headers} FROM {table} WHERE "Id" = %(id)s',
        delete=f'DELETE FROM {table} WHERE "Id" = %(id)s',
        delete_saga=f'DELETE FROM {table} WHERE "SagaId" = %(id)s',
        due=(f'SELECT "Id", "Time" FROM {table} WHERE {LATER} AND "Time" <= %(until)s ORDER BY "Time" LIMIT %(limit)s'),
        first=first,
    )


class TimeoutTable(ABC):
    """The SQL of one table of timeouts. Ids are normal ones; ``sql`` has the templates of its statements."""

    dialect: ClassVar[SqlDialect]
    no_limit: ClassVar[int | None] = 2**63 - 1

    def __init__(self, sql: TimeoutStatements) -> None:
        self.sql = TimeoutStatements(*map(self.dialect.statement_of, sql))

    @abstractmethod
    def insert(self, session: Any, row: dict[str, Any]) -> bool:
        """Insert a row of :func:`postdate.backends.sql.timeouts_layout.encode`; return ``False`` if its id exists."""

    @abstractmethod
    def instant(self, instant: datetime) -> object:
        """Return a bound for ``Time``: no time that the column can store lies between it and ``instant``."""

    def key(self, normal: str) -> Mapping[str, Any]:
        """Return the parameters that find an id, of a timeout or of a saga."""
        return {"id": normal}

    def peek(self, session: Any, timeout_id: str) -> tuple[Any, ...] | None:
        """Return ``Id``, ``Destination``, ``SagaId``, ``State``, ``Time`` and ``Headers``; it waits for no lock."""
        return self.dialect.row(session, self.sql.peek, self.key(timeout_id))

    def delete(self, session: Any, timeout_id: str) -> int:
        """Delete a row; return how many were deleted."""
        return self.dialect.change(session, self.sql.delete, self.key(timeout_id))

    def delete_saga(self, session: Any, saga_id: str) -> int:
        """Delete the rows of a saga; return how many were deleted."""
        return self.dialect.change(session, self.sql.delete_saga, self.key(saga_id))

    def due(self, session: Any, after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
        limit = self.no_limit if at_most is None else at_most
        values = {"after": self.instant(after), "until": self.instant(until), "limit": limit}
        return self.dialect.rows(session, self.sql.due, values)

    def first(self, session: Any, after: datetime) -> object:
        row = self.dialect.row(session, self.sql.first, {"after": self.instant(after)})
        return None if row is None else row[0]


Table = TypeVar("Table", bound=TimeoutTable)


class SqlTimeouts(TimeoutPersister, Generic[Table]):
    """Keeps timeouts in a table of an SQL database.

    Args:
        sessions: run its statements.
        build_table: creates the SQL of a table from its name, which it checks.
        table_prefix: of the table's name; ``None``: see :func:`postdate.backends.sql.timeouts_layout.table_prefix`.
    """

    def __init__(self, sessions: Sessions, build_table: Callable[[str], Table], table_prefix: str | None) -> None:
        self._sessions, self._build_table, self._prefix, self._endpoint = sessions, build_table, table_prefix, ""
        self._table = None if table_prefix is None else self._table_of("")

    def _table_of(self, endpoint: str) -> Table:
        return self._build_table(timeouts_layout.table_name(endpoint, prefix=self._prefix))

    @property
    def _checked_table(self) -> Table:
        if self._table is None:
            raise ConfigurationError(
                f"{type(self).__name__} does not know its table yet: call initialize(endpoint) first, or give "
                f"table_prefix="
            )
        return self._table

    def _decode_row(self, row: tuple[Any, ...] | None) -> Timeout | None:
        return None if row is None else timeouts_layout.decode(*row, owner=self._endpoint)

    @override
    async def initialize(self, endpoint: str) -> None:
        self._endpoint, self._table = endpoint, self._table_of(endpoint)

    @override
    async def add(self, timeout: Timeout) -> bool:
        table, row = self._checked_table, timeouts_layout.encode(timeouts_layout.normalize_timeout(timeout))
        return await self._sessions.run(lambda session: table.insert(session, row))

    @override
    async def peek(self, timeout_id: str) -> Timeout | None:
        table, normal = self._checked_table, timeouts_layout.normal_id(timeout_id)
        if normal is None:
            return None
        return self._decode_row(await self._sessions.query(lambda session: table.peek(session, normal)))

    @override
    async def try_remove(self, timeout_id: str) -> bool:
        table, normal = self._checked_table, timeouts_layout.normal_id(timeout_id)
        return normal is not None and await self._sessions.run(lambda session: table.delete(session, normal)) > 0

    @override
    async def remove_by_saga(self, saga_id: str) -> int:
        table, saga = self._checked_table, timeouts_layout.normal_saga(saga_id)
        return 0 if saga is None else await self._sessions.run(lambda session: table.delete_saga(session, saga))

    @override
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        table = self._checked_table

        def read_chunk(session: Any) -> DueChunk:
            return next_chunk(start, now, limit, partial(table.due, session), partial(table.first, session))

        return await self._sessions.query(read_chunk)


class SharedSqlTimeouts(SqlTimeouts[Table]):
    """Keeps timeouts in a database that may have queues, too, whose transactions then store and remove timeouts."""

    @override
    def adding_work(self, timeout: Timeout) -> Work:
        table, row = self._checked_table, timeouts_layout.encode(timeouts_layout.normalize_timeout(timeout))

        def add(transaction: Any) -> None:
            table.insert(transaction, row)

        return add

    @override
    def removing_work(self, timeout_id: str) -> Work:
        table, normal = self._checked_table, timeouts_layout.normal_id(timeout_id)

        def remove(transaction: Any) -> None:
            if normal is None or not table.delete(transaction, normal):
                raise TimeoutConcurrentlyProcessed(f"timeout {timeout_id} was removed meanwhile")

        return remove

    @override
    def removing_by_saga_work(self, saga_id: str) -> Work:
        table, saga = self._checked_table, timeouts_layout.normal_saga(saga_id)

        def remove(transaction: Any) -> None:
            if saga is not None:
                table.delete_saga(transaction, saga)

        return remove


def next_chunk(start: datetime, now: datetime, limit: int, due: Due, first: First) -> DueChunk:
    """Return a chunk as described at :meth:`postdate.ports.timeouts.TimeoutPersister.next_chunk`.

    Unreadable rows are logged and skipped, because they must not delay others.
    """
    size = max(limit, 1)
    while True:
        rows = due(start, now, size + 1)
        timeouts = _decode_readable(rows[:size])
        if len(rows) <= size:
            return DueChunk(timeouts_layout.sort_by_due(timeouts), _next_query(now, first(now), None))
        if timeouts:
            break
        size *= 2  # there are so many unreadable rows that the limit hides the rows after them
    last = timeouts[-1].due
    earlier = [each for each in timeouts if each.due < last]
    # More rows may be due at the time of the last one than the limit allows, and the next chunk starts after that time.
    due_with_last = _decode_readable(due(earlier[-1].due if earlier else start, last, None))
    return DueChunk(timeouts_layout.sort_by_due([*earlier, *due_with_last]), _next_query(now, first(last), now))


def _decode_readable(rows: Iterable[tuple[Any, ...]]) -> list[DueTimeout]:
    timeouts: list[DueTimeout] = []
    for row in rows:
        try:
            timeouts.append(timeouts_layout.decode_due(*row))
        except MessageError as error:
            _log_once(str(error))
    return timeouts


@lru_cache(maxsize=_MOST_REPORTED)
def _log_once(error: str) -> None:
    log.error("a row of the timeouts cannot be read and is passed over until it is mended: %s", error)


def _next_query(now: datetime, next_time: object, if_unreadable: datetime | None) -> datetime | None:
    """Return when to query again, from the time of the first timeout after a chunk: ``now`` if that is due.

    Args:
        now: end of the chunk's query.
        next_time: the time as stored; ``None``: there is none.
        if_unreadable: returned if it cannot be read: ``now`` after a full chunk, after which more may be due.
    """
    try:
        return None if next_time is None else max(timeouts_layout.read_time(next_time), now)
    except MessageError as error:  # due timeouts must not wait until somebody repairs the row
        _log_once(str(error))
        return if_unreadable
