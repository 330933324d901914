"""The way in which common statements are run, and the differences between databases. Source: ADR 0058.

Statements are templates: ``%(name)s`` stands for a value, and any other percent sign is doubled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, Protocol, TypeVar

from postdate.clock import nearest_instant, to_microseconds

T = TypeVar("T")

Values = Mapping[str, Any]


class Closable(Protocol):
    def close(self) -> object: ...


@contextmanager
def closing_on_error(connection: Closable) -> Generator[None]:
    """Close a new connection that the caller does not get, because the block raises or is cancelled."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


class Sessions(Protocol):
    """Runs the statements of an adapter on a database that other adapters may use, too."""

    @property
    def where(self) -> str:
        """The description of the database, without secrets."""
        ...

    def query_blocking(self, work: Callable[[Any], T], /) -> T:
        """Run ``work``, which only reads, in the calling thread."""
        ...

    def query(self, work: Callable[[Any], T], /, *, patiently: bool = False) -> Awaitable[T]:
        """Run ``work``, which only reads; ``patiently``: it reads whole tables, which may take minutes."""
        ...

    def run(self, work: Callable[[Any], T], /) -> Awaitable[T]:
        """Run ``work``, one statement that may write, and return its result after the commit."""
        ...

    def transaction(self, work: Callable[[Any], T], /) -> Awaitable[T]:
        """Run ``work`` in one transaction, and return its result after the commit."""
        ...


class SqlDialect(ABC):
    """The differences between databases in statements that all of them have."""

    can_batch: ClassVar[bool] = False
    """Whether the reads or writes of several messages are one statement, or cost no more round trips."""

    @abstractmethod
    def statement_of(self, template: str) -> Any:
        """Return a template as a statement of this database."""

    def rows(self, session: Any, statement: Any, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement; ``values`` may have more values than the statement names."""
        return session.execute(statement, values).fetchall()

    def row(self, session: Any, statement: Any, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
        return next(iter(self.rows(session, statement, values)), None)

    def change(self, session: Any, statement: Any, values: Mapping[str, Any]) -> int:
        return session.execute(statement, values).rowcount

    def equality(self, *columns: str) -> str:
        """Return the condition that each column equals the value of its name in every character."""
        return " AND ".join(f"{column} = {self.placeholder(column)}" for column in columns)

    def placeholder(self, column: str) -> str:
        """Return the placeholder for the value of a column."""
        return f"%({column})s"

    def insert_statement(self, table: str, columns: Iterable[str], key: Sequence[str]) -> Any:
        """Return the statement of :meth:`insert_new`; ``key`` is unique."""
        names = list(columns)
        return self.statement_of(
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(map(self.placeholder, names))}) "
            f"ON CONFLICT DO NOTHING"
        )

    def insert_new(self, session: Any, statement: Any, values: Mapping[str, Any]) -> bool:
        """Insert one row; return ``False`` if its key exists, or existed until a moment ago."""
        return self.change(session, statement, values) == 1

    @abstractmethod
    def delete_statement(self, table: str, condition: str, order: str, index: str) -> Any:
        """Return the statement of :meth:`delete_first`.

        ``index`` has the rows in that order. It is named wherever the server would choose another one: with statistics
        from a time of few rows, the server would read and sort all rows that match ``condition``.
        """

    def delete_first(self, session: Any, statement: Any, values: Mapping[str, Any]) -> int:
        """Delete up to ``limit`` rows, the first by their order; return how many were deleted."""
        return self.change(session, statement, values)

    def first_rows(self, query: str) -> str:
        """Return a query, with its order, for up to ``limit`` rows."""
        return f"{query} LIMIT %(limit)s"

    def time(self, instant: datetime) -> Any:
        """Return an instant as a column's value: whole microseconds since 1970-01-01 UTC."""
        return to_microseconds(instant)

    def time_at(self, microseconds: int) -> Any:
        """Return an instant, in microseconds since 1970-01-01 UTC, as a column's value.

        It may be outside the calendar.
        """
        return microseconds

    def instant(self, value: Any) -> datetime | None:
        """Return the time of a column, clamped to the calendar; ``None`` for no time."""
        return nearest_instant(value) if type(value) is int else None

    def content(self, content: bytes | None) -> Any:
        return content
