"""A connection to SQL Server as we want it, and the address it goes to. Source: ADR 0008."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from postdate.backends.rowlocks.sockets import check_answers_within, connected
from postdate.backends.sqlserver.channel import Channel, Routed
from postdate.backends.sqlserver.encryption import OPTIONS, encryption_of
from postdate.backends.sqlserver.errors import translated
from postdate.errors import ConfigurationError, StoreUnavailable, StoreUnreachable

_OLDEST: Final = 13
_AZURE: Final = frozenset({5, 8})
_COMPATIBILITY: Final = 130
_PORT: Final = 1433
_CONNECT_WITHIN_SECONDS: Final = 5.0
_LOG_IN_WITHIN_SECONDS: Final = 10.0
_ANSWER_WITHIN_SECONDS: Final = 30.0
_PATIENCE_SECONDS: Final = 600.0
_ALIVE_WITHIN_SECONDS: Final = 2.0
_MOST_ROUTES: Final = 3

ADMINISTRATORS_SETTINGS: Final = (
    "SET QUOTED_IDENTIFIER, ANSI_NULLS, ANSI_PADDING, ANSI_WARNINGS, ARITHABORT, CONCAT_NULL_YIELDS_NULL ON; "
    "SET NUMERIC_ROUNDABORT OFF; SET XACT_ABORT ON"
)
"""What filtered indexes ask for (sqlcmd has QUOTED_IDENTIFIER off unless it is told), and: an error ends a transaction.
"""

# Nobody waits for locks for long.
_SETTINGS: Final = f"{ADMINISTRATORS_SETTINGS}; SET LOCK_TIMEOUT 3000; SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


class SqlServer:
    """Where a server is.

    Args:
        url: ``mssql://user:password@host:port/database``. The connection is encrypted and the server's certificate
            checked against the system's authorities, or those in the file of ``?cafile=``. The certificate must name
            the host of the address, or what ``hostnameincertificate=`` says. ``trustservercertificate=yes`` takes any
            certificate; ``encrypt=no`` sends everything in the clear, the password too; ``encrypt=strict`` begins with
            TLS (TDS 8).
        answers_within: after so long a silence of the server a connection is given up; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be read; the text never has the password.
    """

    def __init__(self, url: str, answers_within: timedelta | None = None) -> None:
        self._answers_within = check_answers_within(answers_within)
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "localhost", parts.port or _PORT
        except ValueError:  # its text may have a piece of a password that is not escaped
            raise ConfigurationError(
                "the address of the SQL Server database cannot be read; write mssql://user:password@host:port/database"
            ) from None
        self.database = unquote(parts.path.lstrip("/"))
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        options = {name.lower(): value for name, value in parse_qsl(parts.query, keep_blank_values=True)}
        unknown = sorted(set(options) - OPTIONS)
        if parts.scheme not in {"mssql", "sqlserver"} or unknown or not self.database:
            wrong = (
                f"does not know {unknown[0]!r}; it may have {', '.join(sorted(OPTIONS))}"
                if unknown
                else "is mssql://user:password@host:port/database"
            )
            raise ConfigurationError(f"the address of a SQL Server database {wrong}")
        self._encryption = encryption_of(options)  # once: reading the system's certificates takes 0.1 s
        self.where = f"SQL Server {self._host}:{self._port}/{self.database}"

    def connect(self) -> SqlServerSession:
        """Return a connection; see :class:`postdate.backends.rowlocks.Server`.

        Raises:
            ConfigurationError: it is too old, its certificate cannot be trusted, or it does not encrypt.
            StoreUnavailable: it does not answer.
        """
        address = (self._host, self._port)
        for _ in range(_MOST_ROUTES):
            try:
                session = self._connected(*address)
            except Routed as route:
                address = route.address
            else:
                return session
        raise StoreUnreachable(f"{self.where}: was sent from server to server, at last to {address[0]}:{address[1]}")

    def connect_patiently(self) -> SqlServerSession:
        """Return a connection for long statements, such as a migration's; see :meth:`connect`."""
        session = self.connect()
        session.wait_for_long()
        return session

    def _connected(self, host: str, port: int) -> SqlServerSession:
        import pytds  # pyright: ignore[reportMissingTypeStubs] - it has none

        within = _ANSWER_WITHIN_SECONDS if self._answers_within is None else self._answers_within.total_seconds()
        with translated(self.where):
            raw = connected((host, port), _CONNECT_WITHIN_SECONDS)
            try:
                raw.settimeout(_LOG_IN_WITHIN_SECONDS)
                channel = Channel(raw, host, self._encryption, self.where)
                connection = pytds.connect(
                    dsn=host,
                    port=port,
                    database=self.database,
                    user=self._user,
                    password=self._password,
                    autocommit=True,
                    timeout=within,
                    login_timeout=_LOG_IN_WITHIN_SECONDS,
                    appname="postdate",
                    sock=cast("Any", channel),  # as much of a socket as the driver uses
                    disable_connect_retry=True,  # the first try has all the time there is
                )
            except BaseException:
                raw.close()
                raise
        session = SqlServerSession(connection, channel, self.where)
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
        channel: beneath it.
        where: the address without secrets.
    """

    def __init__(self, connection: Any, channel: Channel, where: str) -> None:
        self._connection, self._channel, self._where = connection, channel, where

    @property
    def tls_version(self) -> str | None:
        """The version of TLS that is spoken; ``None``: the connection is in the clear."""
        return self._channel.tls_version

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

    @contextmanager
    def _cursor(self) -> Generator[Any]:
        """Lend a cursor, and read what is left of the answer before it is closed.

        The driver cancels what it has not read to the end: two more round trips for each statement, and an attention
        that met a request still running would roll its transaction back without a word (``XACT_ABORT``).
        """
        with translated(self._where), closing(self._connection.cursor()) as cursor:
            try:
                yield cursor
            except OSError:  # no more will come
                raise
            except Exception:
                with suppress(Exception):  # the first error is the one that counts
                    _drain(cursor)
                raise
            _drain(cursor)

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
        """Run a statement and return its rows; with ``values``, a percent sign is doubled in it."""
        with self._cursor() as cursor:
            cursor.execute(sql, None if values is None else dict(values))
            while cursor.description is None and cursor.nextset():  # a procedure before the SELECT may count rows
                pass
            return [tuple(row) for row in cursor.fetchall()]

    def change(self, sql: str, values: Mapping[str, Any] | None = None) -> int:
        """Run a statement and return how many rows it changed; with ``values``, a percent sign is doubled in it."""
        with self._cursor() as cursor:
            cursor.execute(sql, None if values is None else dict(values))
            return max(cursor.rowcount, 0)

    def pages(self, sql: str, values: Mapping[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield the rows of a statement as the server sends them; nothing else may run meanwhile."""
        with self.patient(), self._cursor() as cursor:
            cursor.execute(sql, dict(values))
            while rows := cursor.fetchmany(page):
                yield [tuple(row) for row in rows]

    def wait_for_long(self) -> None:
        """Wait longer for every answer from now on."""
        self._channel.settimeout(_PATIENCE_SECONDS)

    @contextmanager
    def patient(self) -> Generator[None]:
        """Wait longer for answers within: for what reads or changes whole tables."""
        with self._limited(_PATIENCE_SECONDS):
            yield

    @contextmanager
    def _limited(self, seconds: float) -> Generator[None]:
        before = self._channel.gettimeout()
        self._channel.settimeout(seconds)
        try:
            yield
        finally:
            self._channel.settimeout(before)

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

    def abort(self) -> None:
        """End the connection from another thread: whoever waits for an answer hears that none comes. Never raises."""
        self._channel.abort()

    def is_alive(self, at_most: float | None = None) -> bool:
        """See :meth:`postdate.backends.rowlocks.parts.Session.is_alive`."""
        before = self._channel.gettimeout()
        within = _ALIVE_WITHIN_SECONDS if at_most is None else min(before or _ANSWER_WITHIN_SECONDS, at_most)
        try:
            with self._limited(within):
                self.rows("SELECT 1")
        except StoreUnavailable:
            return False
        return True


def _drain(cursor: Any) -> None:
    while cursor.nextset():
        pass
