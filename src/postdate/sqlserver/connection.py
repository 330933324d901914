"""A connection to SQL Server as we want it, and the address it goes to. Source: ADR 0008."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from postdate.errors import ConfigurationError, StoreUnavailable
from postdate.sqlserver.errors import translated

_OLDEST: Final = 13
_AZURE: Final = frozenset({5, 8})
_COMPATIBILITY: Final = 130
_PORT: Final = 1433
_CONNECT_WITHIN_SECONDS: Final = 5.0
_ANSWER_WITHIN_SECONDS: Final = 120.0
_OPTIONS: Final = frozenset({"cafile"})

# What filtered indexes ask for; an error ends the transaction; nobody waits for locks for long.
_SETTINGS: Final = (
    "SET QUOTED_IDENTIFIER, ANSI_NULLS, ANSI_PADDING, ANSI_WARNINGS, ARITHABORT, CONCAT_NULL_YIELDS_NULL ON; "
    "SET NUMERIC_ROUNDABORT OFF; SET XACT_ABORT ON; SET LOCK_TIMEOUT 3000; "
    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
)


class SqlServer:
    """Where a server is.

    Args:
        url: ``mssql://user:password@host:port/database``; encrypted, and the server's certificate checked, with
            ``?cafile=/path`` (pytds needs pyOpenSSL for that).

    Raises:
        ConfigurationError: the address cannot be read; the text never has the password.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "localhost", parts.port or _PORT
        except ValueError:  # its text may have a piece of a password that is not escaped
            raise ConfigurationError(
                "the address of the SQL Server database cannot be read; write mssql://user:password@host:port/database"
            ) from None
        self.database = unquote(parts.path.lstrip("/"))
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        self._options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(self._options) - _OPTIONS)
        if parts.scheme not in {"mssql", "sqlserver"} or unknown or not self.database:
            wrong = f"does not know {unknown[0]!r}" if unknown else "is mssql://user:password@host:port/database"
            raise ConfigurationError(f"the address of a SQL Server database {wrong}")
        self.where = f"SQL Server {self._host}:{self._port}/{self.database}"

    def connect(self) -> SqlServerSession:
        """Return a connection; see :class:`postdate.locking.Server`.

        Raises:
            ConfigurationError: it is too old, or its certificates cannot be checked.
            StoreUnavailable: it does not answer.
        """
        import pytds  # pyright: ignore[reportMissingTypeStubs] - it has none

        try:
            with translated(self.where):
                # The driver tries again and again what was refused, and then tells of a timeout only.
                socket.create_connection((self._host, self._port), _CONNECT_WITHIN_SECONDS).close()
                connection = pytds.connect(
                    dsn=self._host,
                    port=self._port,
                    database=self.database,
                    user=self._user,
                    password=self._password,
                    autocommit=True,
                    timeout=_ANSWER_WITHIN_SECONDS,
                    login_timeout=_CONNECT_WITHIN_SECONDS,
                    appname="postdate",
                    cafile=self._options.get("cafile"),
                )
        except ValueError as error:  # certificates that cannot be read, or no pyOpenSSL, which pytds needs for them
            raise ConfigurationError(f"{self.where}: {error}") from error
        session = SqlServerSession(connection, self.where)
        try:
            session.prepare()
        except BaseException:
            session.close()
            raise
        return session


class SqlServerSession:
    """One connection, in autocommit mode outside of :meth:`begin` … :meth:`commit`; one thread at a time.

    Args:
        connection: of the driver.
        where: the address without secrets.
    """

    def __init__(self, connection: Any, where: str) -> None:
        self._connection, self._where = connection, where

    def prepare(self) -> None:
        """Check the server and set what the session needs."""
        self.change(_SETTINGS)
        ((major, edition, compatibility),) = self.rows(
            "SELECT CAST(SERVERPROPERTY('ProductMajorVersion') AS int), CAST(SERVERPROPERTY('EngineEdition') AS int), "
            "(SELECT compatibility_level FROM sys.databases WHERE database_id = DB_ID())"
        )
        too_old = edition not in _AZURE and (major is None or major < _OLDEST)
        if too_old or compatibility < _COMPATIBILITY:
            raise ConfigurationError(
                f"{self._where} has version {major} and compatibility level {compatibility}; Postdate needs SQL Server "
                f"2016 (13) or newer, and level {_COMPATIBILITY} or higher"
            )

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
        """Run a statement and return its rows; with ``values``, a percent sign is doubled in it."""
        with translated(self._where), closing(self._connection.cursor()) as cursor:
            cursor.execute(sql, None if values is None else dict(values))
            while cursor.description is None and cursor.nextset():  # a procedure before the SELECT may count rows
                pass
            return [tuple(row) for row in cursor.fetchall()]

    def change(self, sql: str, values: Mapping[str, Any] | None = None) -> int:
        """Run a statement and return how many rows it changed; with ``values``, a percent sign is doubled in it."""
        with translated(self._where), closing(self._connection.cursor()) as cursor:
            cursor.execute(sql, None if values is None else dict(values))
            return max(cursor.rowcount, 0)

    def pages(self, sql: str, values: Mapping[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield the rows of a statement as the server sends them; nothing else may run meanwhile."""
        with translated(self._where), closing(self._connection.cursor()) as cursor:
            cursor.execute(sql, dict(values))
            while rows := cursor.fetchmany(page):
                yield [tuple(row) for row in rows]

    def begin(self) -> None:
        """Begin a transaction."""
        self.change("BEGIN TRANSACTION")

    def commit(self) -> None:
        """Commit it."""
        self.change("COMMIT TRANSACTION")

    def rollback(self) -> None:
        """Roll it back, if an error has not done so already."""
        self.change("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")

    def close(self) -> None:
        """Close the connection. Never raises."""
        with suppress(Exception):  # the driver closes with what the socket says
            self._connection.close()

    def is_alive(self) -> bool:
        """Ask the server."""
        try:
            self.rows("SELECT 1")
        except StoreUnavailable:
            return False
        return True
