"""A connection to SQL Server with our settings, its address, and the translation of its errors. Source: ADR 0008."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, cast

from typing_extensions import override

from postdate import errors
from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.row_locks.connection import (
    CONNECT_WITHIN_SECONDS,
    LOG_IN_WITHIN_SECONDS,
    DatabaseServer,
    ServerSession,
    check_options,
    connect_socket,
)
from postdate.backends.sql.row_locks.parts import Conflict, Meanings, error_of, meaning_of
from postdate.backends.sqlserver import BACKEND
from postdate.backends.sqlserver.channel import DriverSocket, LoginRefused, LoginRouted
from postdate.backends.sqlserver.login import OPTIONS, encryption_of

_MEANINGS: Final[Meanings] = {
    # Deadlock, lock request timed out, update conflict under snapshot isolation, lost a race for one id.
    Conflict: frozenset({1205, 1222, 2601, 2627, 3960}),
    errors.StoreNotSetUp: frozenset({207, 208, 911, 2812, 4902}),
    errors.StoreFull: frozenset({1101, 1105, 3257, 9002, 40544}),
    errors.StoreNotWritable: frozenset({229, 230, 262, 297, 300, 916, 2760, 6102, 15247, 18452, 18456}),
    errors.StoreReadOnly: frozenset({3906, 3908, 978}),
    # The server stops or starts, or has ended our session; or the database (4060) does not exist, or not yet.
    errors.StoreUnreachable: frozenset(
        {64, 233, 596, 921, 922, 927, 976, 983, 4014, 6005, 10053, 10054, 10060, 11001, 4060, 17142, 17187, 40143}
        | {40197, 40540, 40613}
    ),
    # Data: a conversion, an overflow, a missing value, a constraint, a text, row or index row that is too long, invalid
    # JSON, a value that the protocol cannot represent. A transaction that a trigger ended (3609, 3616), or one of the
    # application that has failed already (3930).
    errors.StoreError: frozenset(
        {206, 220, 232, 241, 242, 244, 245, 248, 295, 296, 298, 511, 512, 513, 515, 517, 530, 537, 547, 550, 1946}
        | {2628, 3609, 3616, 3930, 7139, 8009, 8016, 8023, 8114, 8115, 8134, 8152, 8169, 9402, 9420, 9803}
        | {13608, 13609, 13610, 13612, 13613}
    ),
}
"""Our error for each number; for every other number it is `StoreTroubled`.

An error counts against a message only where Microsoft's documentation says that it is about data. Numbers from 50000 on
are raised by a trigger or procedure of the application. Source: ADR 50.
"""

_FIRST_OF_APPLICATIONS: Final = 50_000  # numbers from this one on are raised by triggers and procedures


def translate(error: Exception, where: str) -> errors.PostdateError:
    if isinstance(error, TimeoutError) and not error.args and isinstance(error.__cause__, Exception):
        return translate(error.__cause__, where)  # the driver gave up; the cause is the reason
    number = getattr(error, "number", 0) or getattr(error, "msg_no", 0)
    text = str(getattr(error, "text", "") or error).strip().partition("\n")[0] or type(error).__name__
    if (meaning := meaning_of((number,), _MEANINGS)) is not None:
        return error_of(meaning, text, where)
    if not number:  # The error is not the server's: the connection was lost, or never opened.
        return errors.StoreUnreachable(f"{where}: {text}")
    return (errors.StoreError if number >= _FIRST_OF_APPLICATIONS else errors.StoreTroubled)(
        f"{where}: {text} ({number})"
    )


@contextmanager
def translate_errors(where: str) -> Generator[None]:
    from pytds import Error  # pyright: ignore[reportMissingTypeStubs] - it has none

    try:
        yield
    except (Error, LoginRefused, OSError, EOFError) as error:
        raise translate(error, where) from error
    except (AssertionError, IndexError, struct.error) as error:  # The driver raises these for a truncated packet.
        raise errors.StoreUnreachable(f"{where}: the answer cannot be read ({error!r})") from error


_OLDEST: Final = 13  # SQL Server 2016
_AZURE: Final = frozenset({5, 8})  # editions of Azure, whose version is not checked
_COMPATIBILITY: Final = 130  # the level of SQL Server 2016
_MAX_ROUTES: Final = 3  # then the routing is taken for a loop

_INDEX_SETTINGS: Final = (
    "SET QUOTED_IDENTIFIER, ANSI_NULLS, ANSI_PADDING, ANSI_WARNINGS, ARITHABORT, CONCAT_NULL_YIELDS_NULL ON; "
    "SET NUMERIC_ROUNDABORT OFF"
)
"""Settings that filtered indexes and indexes on computed columns need; sqlcmd's QUOTED_IDENTIFIER is off by default."""

ADMINISTRATORS_SETTINGS: Final = f"{_INDEX_SETTINGS}; SET XACT_ABORT ON"
"""The same, and an error ends a transaction."""

# LOCK_TIMEOUT: no session waits long for a lock.
_SETTINGS: Final = f"{ADMINISTRATORS_SETTINGS}; SET LOCK_TIMEOUT 3000; SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


class SqlServerInstance(DatabaseServer["SqlServerSession"]):
    """The address of a server, and how to connect to it.

    Args:
        url: ``mssql://user:password@host:port/database``. The connection is encrypted and the server's certificate
            checked against the system's authorities, or those in the file of ``?cafile=``. The certificate must name
            the host of the address, or the name in ``hostnameincertificate=``. ``trustservercertificate=yes`` accepts
            any certificate; ``encrypt=no`` sends everything in the clear, the password too; ``encrypt=strict`` begins
            with TLS (TDS 8).
        answers_within: see :class:`postdate.backends.sql.row_locks.connection.DatabaseServer`.

    Raises:
        ConfigurationError: the address is invalid; the text never has the password.
    """

    product, schemes, port = "SQL Server", ("mssql", "sqlserver"), 1433

    def __init__(self, url: str, answers_within: timedelta | None = None) -> None:
        super().__init__(url, answers_within)
        options = {name.lower(): value for name, value in self.address.options.items()}
        check_options(replace(self.address, options=options), OPTIONS)
        if not self.address.database:
            raise errors.ConfigurationError(
                "the address of a SQL Server database is mssql://user:password@host:port/database"
            )
        self._encryption = encryption_of(options)  # Once, because reading the system's certificates takes 0.1 s.

    @override
    def connect(self) -> SqlServerSession:
        """Open a connection; follow a routing to another server."""
        return self._connect_following_routes(lambda session: session.configure())

    @override
    def connect_as_application(self) -> SqlServerSession:
        # Other drivers set these, too.
        session = self._connect_following_routes(lambda session: session.configure(_INDEX_SETTINGS))
        session.set_answer_limit(math.inf)
        return session

    def _connect_following_routes(self, prepare: Callable[[SqlServerSession], None]) -> SqlServerSession:
        address = (self.address.host, self.address.port)
        for _ in range(_MAX_ROUTES):
            try:
                session = self._connect_to(*address, prepare)
            except LoginRouted as route:
                address = route.address
            else:
                BACKEND.warn_if_untested()
                return session
        raise errors.StoreUnreachable(
            f"{self.where}: was redirected from server to server, last to {address[0]}:{address[1]}"
        )

    def _connect_to(self, host: str, port: int, prepare: Callable[[SqlServerSession], None]) -> SqlServerSession:
        import pytds  # pyright: ignore[reportMissingTypeStubs] - it has none

        with translate_errors(self.where):
            raw = connect_socket((host, port), CONNECT_WITHIN_SECONDS)
            with closing_on_error(raw):
                raw.settimeout(LOG_IN_WITHIN_SECONDS)
                channel = DriverSocket(raw, host, self._encryption, self.where)
                connection = pytds.connect(
                    dsn=host,
                    port=port,
                    database=self.address.database,
                    user=self.address.user,
                    password=self.address.password,
                    autocommit=True,
                    timeout=self.seconds_to_answer,
                    login_timeout=LOG_IN_WITHIN_SECONDS,
                    appname="postdate",
                    sock=cast("Any", channel),  # the part of a socket that the driver uses
                    disable_connect_retry=True,  # the first attempt has all the time
                )
        session = SqlServerSession(connection, channel, self.where)
        with closing_on_error(session):
            prepare(session)
        return session


class SqlServerSession(ServerSession):
    """One connection, on a ``channel``; see :class:`postdate.backends.sql.row_locks.connection.ServerSession`."""

    def __init__(self, connection: Any, channel: DriverSocket, where: str) -> None:
        self._connection, self._channel, self._where = connection, channel, where

    @property
    @override
    def driver(self) -> Any:
        return self._connection

    @override
    def begin_marked(self) -> object:
        self.begin()
        return self.rows("SELECT CURRENT_TRANSACTION_ID()")[0][0]

    @override
    def is_in_transaction(self, mark: object) -> bool:
        return self.rows("SELECT CURRENT_TRANSACTION_ID(), XACT_STATE()")[0] == (mark, 1)

    def configure(self, settings: str = _SETTINGS) -> None:
        self.change(settings)
        self.check_server()

    def check_server(self) -> None:
        ((major, edition, compatibility),) = self.rows(
            "SELECT CAST(SERVERPROPERTY('ProductMajorVersion') AS int), CAST(SERVERPROPERTY('EngineEdition') AS int), "
            "(SELECT compatibility_level FROM sys.databases WHERE database_id = DB_ID())"
        )
        too_old = edition not in _AZURE and (major is None or major < _OLDEST)
        if too_old or compatibility < _COMPATIBILITY:
            raise errors.ConfigurationError(
                f"{self._where} has version {major} and compatibility level {compatibility}; Postdate needs SQL Server "
                f"2016 (13) or newer, and level {_COMPATIBILITY} or higher"
            )

    @contextmanager
    def _cursor(self) -> Generator[Any]:
        """Yield a cursor, and read the rest of the answer before it is closed.

        The driver would cancel an answer that was not read to its end. That costs two more round trips for each
        statement, and an attention that meets a running request would silently roll its transaction back
        (``XACT_ABORT``).
        """
        with translate_errors(self._where), closing(self._connection.cursor()) as cursor:
            try:
                yield cursor
            except OSError:  # no more data can come
                raise
            except Exception:
                with suppress(Exception):  # Only the first error is reported.
                    _drain(cursor)
                raise
            _drain(cursor)

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
        with self._cursor() as cursor:
            cursor.execute(sql, None if values is None else dict(values))
            while cursor.description is None and cursor.nextset():  # a procedure before the SELECT may count rows
                pass
            return [tuple(row) for row in cursor.fetchall()]

    def change(self, sql: str, values: Mapping[str, Any] | None = None) -> int:
        with self._cursor() as cursor:
            cursor.execute(sql, None if values is None else dict(values))
            return max(cursor.rowcount, 0)

    def pages(self, sql: str, values: Mapping[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        with self.patient(), self._cursor() as cursor:
            cursor.execute(sql, dict(values))
            while rows := cursor.fetchmany(page):
                yield [tuple(row) for row in rows]

    @property
    @override
    def seconds(self) -> float:
        seconds = self._channel.gettimeout()
        return math.inf if seconds is None else seconds

    @override
    def set_answer_limit(self, seconds: float) -> None:
        self._channel.settimeout(None if seconds == math.inf else seconds)

    @override
    def begin(self) -> None:
        self.change("BEGIN TRANSACTION")

    @override
    def commit(self) -> None:
        self.change("COMMIT TRANSACTION")

    @override
    def rollback(self) -> None:
        """Roll back; without effect if an error has rolled back already."""
        self.change("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")

    @override
    def close(self) -> None:
        with suppress(Exception):  # The driver closes with any error of the socket.
            self._connection.close()

    @override
    def abort(self) -> None:
        self._channel.abort()

    @override
    def ping(self) -> None:
        self.rows("SELECT 1")


def _drain(cursor: Any) -> None:
    while cursor.nextset():
        pass
