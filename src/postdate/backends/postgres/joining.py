"""Changes in a transaction that the application has opened on its own connection.

They are the same statements for every driver, in the driver's own style of parameters. Drivers are recognised by the
names of their classes and not imported, because the application has imported them. Errors of the driver are not
translated, because the transaction, and the decision to repeat it, are the application's; but a missing table is
`StoreNotSetUp`, since no repetition helps. Source: ADR 31.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from psycopg.rows import tuple_row
from psycopg.types.datetime import TimestamptzBinaryLoader

from postdate.backends.postgres.inserting import PARAMETERS
from postdate.backends.postgres.names import sql
from postdate.errors import ConfigurationError
from postdate.ports.changing import Steps
from postdate.runtime.threads import run_in_thread

if TYPE_CHECKING:
    from sqlalchemy import TextClause

NOTICE: Final = timedelta(hours=1)
"""Messages due within this time are announced.

It is longer than an application keeps a transaction open. So a message that becomes due before the commit is delivered
at the commit.
"""

_TYPES: Final[Mapping[str, str]] = {
    **PARAMETERS,
    **dict.fromkeys(("id", "first", "last", "wall"), "text"),
    **dict.fromkeys(("due_from", "due_to"), "timestamptz"),
    **dict.fromkeys(("among", "limit"), "integer"),
    "behind": "bigint",
}
"""The types of the parameters of all steps."""

_TOKEN: Final = re.compile(r"%%|%\((\w+)\)s|[^%]+")

T = TypeVar("T")
Values = Mapping[str, Any]
Rows = Sequence[Sequence[Any]]


async def join(connection: object, steps: Steps[T]) -> T:
    """Run ``steps`` in the transaction that ``connection`` is in, or begins with its first statement.

    Raises `ConfigurationError` if the driver is unknown here, or the connection is in no transaction.
    """
    driver = _driver_of(connection)
    if driver.belongs_to_thread:  # In another thread the proxy is another connection.
        return join_blocking(connection, steps)
    if not driver.is_awaited:
        return await run_in_thread(join_blocking, connection, steps)
    connection, rows = await driver.prepare(connection), None
    try:
        while True:
            rows = await driver.run(connection, *steps.send(rows))
    except StopIteration as ended:
        return ended.value


def join_blocking(connection: object, steps: Steps[T]) -> T:
    """Call :func:`join` for a connection that blocks."""
    driver = _driver_of(connection)
    if driver.is_awaited:
        raise ConfigurationError(
            f"a connection of {_name(type(connection))} must be awaited: use the call with `await`"
        )
    return run_steps(partial(driver.run, driver.prepare(connection)), steps)


def run_steps(run: Callable[[bytes, Values], Rows], steps: Steps[T]) -> T:
    """Run ``steps`` by a function that runs one statement."""
    rows = None
    try:
        while True:
            rows = run(*steps.send(rows))
    except StopIteration as ended:
        return ended.value


def _render_statement(statement: bytes, parameter: Callable[[str], str], text: Callable[[str], str]) -> str:
    """Return a statement in the style of a driver, each parameter cast to its type in :data:`_TYPES`.

    ``statement`` is in psycopg's style: ``%(name)s``, a percent sign doubled. ``parameter`` renders a name. ``text``
    renders the SQL between the parameters, in which percent signs are still doubled.
    """
    return "".join(
        text(token[0]) if token[1] is None else f"CAST({parameter(token[1])} AS {_TYPES[token[1]]})"
        for token in _TOKEN.finditer(statement.decode())
    )


def _names(statement: bytes) -> Sequence[str]:
    """Return the names of the parameters of a statement, each once."""
    return list(dict.fromkeys(token[1] for token in _TOKEN.finditer(statement.decode()) if token[1] is not None))


def _unescape(text: str) -> str:
    return text.replace("%%", "%")


# --- drivers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Driver:
    """The way in which statements run on one kind of connection.

    ``prepare`` returns the object to run them on, and refuses a connection in autocommit mode. ``run`` returns the rows
    of a statement. Both block, or both are awaited. A driver that ``belongs_to_thread`` blocks, and is a proxy for
    another connection in each thread.
    """

    prepare: Callable[[Any], Any]
    run: Callable[[Any, bytes, Values], Any]
    is_awaited: bool = False
    belongs_to_thread: bool = False


def _driver_of(connection: object) -> _Driver:
    kinds: tuple[type[object], ...] = type(connection).__mro__
    for each in kinds:
        if (driver := _DRIVERS.get((each.__module__.partition(".")[0], each.__name__))) is not None:
            return driver
    supported = ", ".join(f"{package}.{name}" for package, name in _DRIVERS)
    raise ConfigurationError(
        f"{_name(type(connection))} is not a connection whose transaction messages can be part of; supported are: "
        f"{supported}"
    )


def _name(kind: type[object]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _no_transaction_error() -> ConfigurationError:
    return ConfigurationError(
        "the connection is in no transaction: it commits every statement by itself, and the change would stay even "
        "if your own work is rolled back; begin a transaction first, or leave out transaction="
    )


# --- psycopg -----------------------------------------------------------------------------------------------------


def _prepare_psycopg(connection: Any) -> Any:
    if connection.autocommit and connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE:
        raise _no_transaction_error()
    return connection


async def _prepare_psycopg_async(connection: Any) -> Any:
    return _prepare_psycopg(connection)


def _run_psycopg(connection: Any, statement: bytes, values: Values) -> Rows:
    # A plain cursor: the application's factory may return one with other parameters or rows. Nothing is prepared: the
    # session has the planner's usual settings, and must not keep a plan that was made while the tables were small. Rows
    # are in binary form, which does not depend on the datestyle of the session.
    with psycopg.Cursor[Any](connection, row_factory=tuple_row) as cursor:
        # Django's loader may omit the time zone.
        cursor.adapters.register_loader("timestamptz", TimestamptzBinaryLoader)
        return cursor.execute(sql(_render_named(statement)), values, prepare=False, binary=True).fetchall()


async def _run_psycopg_async(connection: Any, statement: bytes, values: Values) -> Rows:
    async with psycopg.AsyncCursor[Any](connection, row_factory=tuple_row) as cursor:
        cursor.adapters.register_loader("timestamptz", TimestamptzBinaryLoader)
        await cursor.execute(sql(_render_named(statement)), values, prepare=False, binary=True)
        return await cursor.fetchall()


@cache
def _render_named(statement: bytes) -> str:
    return _render_statement(statement, "%({})s".format, str)


# --- asyncpg -----------------------------------------------------------------------------------------------------


async def _prepare_asyncpg(connection: Any) -> Any:
    if not connection.is_in_transaction():
        raise _no_transaction_error()
    return connection


async def _run_asyncpg(connection: Any, statement: bytes, values: Values) -> Rows:
    text, names = _render_numbered(statement)
    return await connection.fetch(text, *(values[name] for name in names))


@cache
def _render_numbered(statement: bytes) -> tuple[str, Sequence[str]]:
    names = _names(statement)
    return _render_statement(statement, lambda name: f"${names.index(name) + 1}", _unescape), names


# --- SQLAlchemy --------------------------------------------------------------------------------------------------


def _prepare_sqlalchemy(connection: Any) -> Any:
    if connection.dialect.name != "postgresql":
        raise ConfigurationError(f"the connection is to {connection.dialect.name}, and the store is in PostgreSQL")
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise _no_transaction_error()
    return connection


async def _prepare_sqlalchemy_async(connection: Any) -> Any:
    return await connection.run_sync(_prepare_sqlalchemy) and connection


def _prepare_session(session: Any) -> Any:
    return _prepare_sqlalchemy(session.connection())


async def _prepare_session_async(session: Any) -> Any:
    return await _prepare_sqlalchemy_async(await session.connection())


def _run_sqlalchemy(connection: Any, statement: bytes, values: Values) -> Rows:
    return connection.execute(_render_for_sqlalchemy(statement), dict(values)).all()


async def _run_sqlalchemy_async(connection: Any, statement: bytes, values: Values) -> Rows:
    return (await connection.execute(_render_for_sqlalchemy(statement), dict(values))).all()


@cache
def _render_for_sqlalchemy(statement: bytes) -> TextClause:
    from sqlalchemy import TIMESTAMP, BigInteger, Integer, LargeBinary, SmallInteger, Text, bindparam, text

    kinds = {
        "text": Text(),
        "timestamptz": TIMESTAMP(timezone=True),
        "bytea": LargeBinary(),
        "smallint": SmallInteger(),
        "integer": Integer(),
        "bigint": BigInteger(),
    }
    # SQLAlchemy would read colons in names of tables as parameters.
    statement_text = _render_statement(statement, ":{}".format, lambda part: _unescape(part).replace(":", "\\:"))
    return text(statement_text).bindparams(*(bindparam(name, type_=kinds[_TYPES[name]]) for name in _names(statement)))


# --- Django ------------------------------------------------------------------------------------------------------


def _prepare_django(proxy: Any) -> Any:
    """Return the connection of psycopg beneath that of Django, which is in autocommit mode outside ``atomic``."""
    proxy.ensure_connection()
    if not issubclass(type(proxy.connection), psycopg.Connection):
        raise ConfigurationError(
            f"Django's connection {proxy.alias!r} is to {proxy.vendor}: messages can be part of a transaction of "
            f"PostgreSQL, through psycopg 3"
        )
    return _prepare_psycopg(proxy.connection)


_DRIVERS: Final[Mapping[tuple[str, str], _Driver]] = {
    ("psycopg", "Connection"): _Driver(_prepare_psycopg, _run_psycopg),
    ("psycopg", "AsyncConnection"): _Driver(_prepare_psycopg_async, _run_psycopg_async, is_awaited=True),
    ("asyncpg", "Connection"): _Driver(_prepare_asyncpg, _run_asyncpg, is_awaited=True),
    ("asyncpg", "PoolConnectionProxy"): _Driver(_prepare_asyncpg, _run_asyncpg, is_awaited=True),
    ("django", "ConnectionProxy"): _Driver(_prepare_django, _run_psycopg, belongs_to_thread=True),
    ("django", "DatabaseWrapper"): _Driver(_prepare_django, _run_psycopg, belongs_to_thread=True),
    ("sqlalchemy", "Connection"): _Driver(_prepare_sqlalchemy, _run_sqlalchemy),
    ("sqlalchemy", "Session"): _Driver(_prepare_session, _run_sqlalchemy),
    ("sqlalchemy", "scoped_session"): _Driver(_prepare_session, _run_sqlalchemy, belongs_to_thread=True),
    ("sqlalchemy", "AsyncConnection"): _Driver(_prepare_sqlalchemy_async, _run_sqlalchemy_async, is_awaited=True),
    ("sqlalchemy", "AsyncSession"): _Driver(_prepare_session_async, _run_sqlalchemy_async, is_awaited=True),
    ("sqlalchemy", "async_scoped_session"): _Driver(_prepare_session_async, _run_sqlalchemy_async, is_awaited=True),
}
