"""Connections to MariaDB: the address, the settings of a session, and the translation of errors. Source: ADR 0008."""

from __future__ import annotations

import math
import re
import socket
import ssl
import struct
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pymysql
from pymysql.constants import CLIENT, ER
from pymysql.cursors import SSCursor
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
from postdate.backends.sql.row_locks.parts import Conflict, DuplicateKey, Meanings, error_of, meaning_of
from postdate.runtime import forks


class LockedTooLong(Conflict):
    """Another transaction has kept a row lock for longer than the time limit of this session."""


_MEANINGS: Final[Meanings] = {
    LockedTooLong: frozenset({1205}),
    DuplicateKey: frozenset({1062}),
    Conflict: frozenset({1213, 1020}),  # deadlock; record has changed since last read
    errors.StoreNotSetUp: frozenset({1049, 1051, 1054, 1146}),
    errors.StoreFull: frozenset({1021, 1038, 1041, 1114}),
    errors.StoreNotWritable: frozenset({1044, 1045, 1142, 1143, 1227, 1698}),
    errors.StoreReadOnly: frozenset({1290, 1792, 1836, 4047}),
    errors.MessageTooLarge: frozenset({1153, 1301}),
    # Classes of SQLSTATE about data and constraints, also of a trigger: 21, 22, 23, 44, 45. General errors about data:
    # a text that is invalid in its character set, or not comparable; a missing value; a row that is too large; a size
    # above the limit of a statement, transaction or undo record; a row without a partition.
    errors.StoreError: frozenset(
        {"21", "22", "23", "44", "45", 1118, 1197, 1267, 1270, 1271, 1300, 1364, 1366, 1526, 1705, 1713}
    ),
    # The server shuts down, has too many connections, or has ended this one. Errors of the driver itself are handled
    # in `translate`.
    errors.StoreUnreachable: frozenset(
        {1040, 1053, 1077, 1079, 1080, 1129, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1226, 1927}
    ),
}
"""The error of Postdate for each number or class of SQLSTATE. All others are `StoreTroubled`.

An error counts against a message only if MariaDB's documentation states that it is about data. Source: ADR 50.
"""


def translate(error: pymysql.Error, where: str) -> errors.PostdateError:
    number, text = _number_and_text(error)
    state: str = getattr(error, "sqlstate", None) or ""
    if (meaning := meaning_of((number, state[:2]), _MEANINGS)) is not None:
        return error_of(meaning, text, where)
    # An error without a number comes from the driver: the packets are out of order.
    is_out_of_order = number == 0 and isinstance(error, pymysql.err.InternalError)
    if 2000 <= number < 2100 or isinstance(error, pymysql.err.InterfaceError) or is_out_of_order:
        return errors.StoreUnreachable(f"{where}: {text}")
    # Some errors about data have another class, or come from the driver; the driver's exception type shows them.
    is_of_data = isinstance(error, pymysql.DataError | pymysql.IntegrityError)
    return (errors.StoreError if is_of_data else errors.StoreTroubled)(f"{where}: {text} ({number})")


def _number_and_text(error: pymysql.Error) -> tuple[int, str]:
    number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    return number, text.strip().partition("\n")[0] or type(error).__name__


@contextmanager
def translate_errors(where: str, seconds: float | None = None) -> Generator[None]:
    """Translate errors of MariaDB and of its connection to errors of Postdate; ``seconds``: deadline of an answer."""
    try:
        yield
    except pymysql.Error as error:
        if isinstance(error.__context__, TimeoutError) and seconds is not None:  # the driver has ended the connection
            raise errors.StoreUnreachable(f"{where}: did not answer within {seconds:g} s") from error
        raise translate(error, where) from error
    except (OSError, EOFError) as error:
        raise errors.StoreUnreachable(f"{where}: {error or type(error).__name__}") from error
    except (AssertionError, IndexError, struct.error) as error:  # the driver raises these for a truncated packet
        raise errors.StoreUnreachable(f"{where}: the answer cannot be read ({error!r})") from error


_NO_SUCH_SAVEPOINT: Final = 1305  # the server's error number
_OLDEST: Final = (10, 6)
_MARK: Final = "postdate_handler"
_TLS: Final = frozenset({"ssl", "ssl_ca", "ssl_cert", "ssl_key"})

# in_predicate_conversion_threshold: a list of more than 999 numbers would become a table, which is read from beginning
# to end. lock_wait_timeout is for locks on tables, which are mostly held for long.
_SETTINGS: Final = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = 3, "
    "lock_wait_timeout = 10, wait_timeout = 28800, idle_transaction_timeout = %(idle)s, "
    "idle_write_transaction_timeout = 0, idle_readonly_transaction_timeout = 0, "
    "in_predicate_conversion_threshold = 0, time_zone = '+00:00'"
)


class MariaDbServer(DatabaseServer["MariaDbSession"]):
    """The address of a server, and how to connect to it.

    Args:
        url: ``mariadb://user:password@host:port/database``; with ``?ssl=true`` or ``?ssl_ca=/path`` the connection is
            encrypted and the server's certificate checked. Then ``ssl_cert`` and ``ssl_key`` are allowed, too.
        holds_at_most: the server ends a transaction that is silent for so long, and the heartbeat's connection if that
            is silent; whole seconds. ``None``: it does not end them.
        answers_within: see :class:`postdate.backends.sql.row_locks.connection.DatabaseServer`.

    Raises:
        ConfigurationError: the address is invalid; the text never has the password.
    """

    product, schemes, port = "MariaDB", ("mariadb", "mysql"), 3306

    def __init__(
        self, url: str, holds_at_most: timedelta | None = None, answers_within: timedelta | None = None
    ) -> None:
        super().__init__(url, answers_within)
        check_options(self.address, _TLS)
        self._silence_seconds = 0 if holds_at_most is None else max(round(holds_at_most.total_seconds()), 1)
        tls = self.address.options
        self._tls = _tls(tls) if tls else None  # Once, because reading the system's certificates takes 0.1 s.

    @override
    def connect(self) -> MariaDbSession:
        """Open a connection. The login may take longer than an answer."""
        session = self._open_session(CLIENT.FOUND_ROWS)  # With FOUND_ROWS an UPDATE counts the rows that it found.
        with closing_on_error(session):
            session.configure()
            session.set_answer_limit(self.seconds_to_answer)
        return session

    @override
    def connect_as_application(self) -> MariaDbSession:
        session = self._open_session(0, self.address.database or None)
        session.set_answer_limit(math.inf)
        return session

    def _open_session(self, client_flag: int, database: str | None = None) -> MariaDbSession:
        with translate_errors(self.where, LOG_IN_WITHIN_SECONDS):
            connection = _Connection(
                host=self.address.host,
                port=self.address.port,
                user=self.address.user,
                password=self.address.password,
                database=database,
                charset="utf8mb4",
                autocommit=True,
                client_flag=client_flag,
                read_timeout=LOG_IN_WITHIN_SECONDS,
                write_timeout=LOG_IN_WITHIN_SECONDS,
                defer_connect=True,
                ssl=self._tls,
                ssl_disabled=self._tls is None,
            )
            connection.connect(connect_socket((self.address.host, self.address.port), CONNECT_WITHIN_SECONDS))
            forks.register_connection(connection)  # With TLS the connection has another socket than the connected one.
            session = MariaDbSession(connection, self.where, self._silence_seconds)
        with closing_on_error(session):
            session.check_server()
        return session


def _tls(settings: Mapping[str, str]) -> ssl.SSLContext | None:
    if settings.get("ssl", "true").lower() in {"0", "false", "no"}:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.get("ssl_ca"))
        if "ssl_cert" in settings:
            context.load_cert_chain(settings["ssl_cert"], settings.get("ssl_key"))
    except (OSError, ssl.SSLError) as error:
        raise errors.ConfigurationError(
            f"the certificates of the MariaDB connection cannot be read: {error}"
        ) from error
    return context


class _Connection(pymysql.Connection[Any] if TYPE_CHECKING else pymysql.Connection):
    """A connection of the driver with adjustable deadlines; another thread may end it."""

    _sock: socket.socket | None
    largest_packet = 2**30

    def fileno(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def seconds(self) -> float:
        return math.inf if self._read_timeout is None else self._read_timeout

    def set_answer_limit(self, seconds: float) -> None:
        self._read_timeout = self._write_timeout = None if seconds == math.inf else seconds

    def query(self, sql: str | bytes, unbuffered: bool = False) -> int:
        """Refuse a statement larger than the server's packet, because the server would close the connection."""
        text = sql.encode(self.encoding, "surrogateescape") if isinstance(sql, str) else sql
        if len(text) >= self.largest_packet:
            raise pymysql.err.OperationalError(ER.NET_PACKET_TOO_LARGE, f"a statement of {len(text):,} bytes")
        return super().query(text, unbuffered)  # pyright: ignore[reportUnknownMemberType] - it says nothing of its types

    def abort(self) -> None:
        if self._sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # Also with TLS: no more data is to be sent.


def literal(value: str | bytes | int | None) -> bytes:
    """Return a value as SQL, for many rows: the driver's own conversion takes five times as long.

    Our sessions read backslashes as escapes (``sql_mode``). In UTF-8 no byte of a longer character is a quote or a
    backslash, so only these two need escaping.
    """
    if value is None:
        return b"NULL"
    if isinstance(value, int):
        return b"%d" % value
    text = value.encode() if isinstance(value, str) else value
    escaped = text.replace(b"\\", b"\\\\").replace(b"'", b"\\'")
    return b"'%b'" % escaped if isinstance(value, str) else b"_binary'%b'" % escaped


_PACKET_ROOM: Final = 64 * 1024
"""The bytes of a packet that are reserved for the statement around the content."""


def max_statement_bytes(session: MariaDbSession) -> int:
    return session.largest_packet - _PACKET_ROOM


def larger_than_packet_error(what: str, size: int, limit: int) -> errors.MessageTooLarge:
    return errors.MessageTooLarge(
        f"{what} takes {size:,} bytes in a statement; the server takes {limit:,} (max_allowed_packet, but for some "
        f"room): raise max_allowed_packet there, or keep large content elsewhere and send a reference"
    )


class MariaDbSession(ServerSession):
    """One connection; see :class:`postdate.backends.sql.row_locks.connection.ServerSession`.

    Values in statements: a percent sign is doubled if there are any. ``silence_seconds``: see ``holds_at_most`` of
    :class:`MariaDbServer`; 0: no limit.
    """

    def __init__(self, connection: _Connection, where: str, silence_seconds: int = 0) -> None:
        self._connection, self._where, self._silence_seconds = connection, where, silence_seconds
        self.version = ""
        self.largest_packet = 0

    def check_server(self) -> None:
        ((version, packet),) = self.rows("SELECT VERSION(), @@max_allowed_packet")
        self.version, self.largest_packet, self._connection.largest_packet = version, packet, packet
        match = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.\d+-mariadb", version.lower())
        if match is None or (int(match[1]), int(match[2])) < _OLDEST:
            raise errors.ConfigurationError(
                f"{self._where} is {version}; Postdate needs MariaDB {_OLDEST[0]}.{_OLDEST[1]} or newer, which skips "
                f"locked rows (MySQL lacks INSERT … RETURNING)"
            )

    def configure(self) -> None:
        self.change("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.change(_SETTINGS, {"idle": self._silence_seconds})

    @property
    @override
    def driver(self) -> pymysql.Connection[Any]:
        return self._connection

    @override
    def begin_marked(self) -> object:
        """Begin a transaction for a handler.

        Its mark is a savepoint, which also ends when the server rolls it back itself.
        """
        self.begin()
        self.change(f"SAVEPOINT {_MARK}")
        return _MARK

    @override
    def is_in_transaction(self, mark: object) -> bool:
        try:
            self.change(f"RELEASE SAVEPOINT {mark}")
        except errors.PostdateError as error:
            if isinstance(error.__cause__, pymysql.Error) and error.__cause__.args[0] == _NO_SUCH_SAVEPOINT:
                return False
            raise
        return True

    def limit_silence(self) -> None:
        """Let the server end this connection, and its locks, when it is silent for too long."""
        if self._silence_seconds:
            self.change("SET SESSION wait_timeout = %(silence)s", {"silence": self._silence_seconds})

    @property
    @override
    def seconds(self) -> float:
        return self._connection.seconds

    @override
    def set_answer_limit(self, seconds: float) -> None:
        self._connection.set_answer_limit(seconds)

    def _translate_errors(self) -> AbstractContextManager[None]:
        return translate_errors(self._where, self._connection.seconds)

    def rows(self, sql: str | bytes, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement. A statement in bytes has no values, and no percent sign in it is doubled."""
        with self._translate_errors(), self._connection.cursor() as cursor:
            cursor.execute(sql, None if isinstance(sql, bytes) else values or {})
            return cursor.fetchall()

    def change(self, sql: str | bytes, values: Mapping[str, Any] | None = None) -> int:
        with self._translate_errors(), self._connection.cursor() as cursor:
            return cursor.execute(sql, values)

    def pages(self, sql: str, values: Mapping[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        with self.patient(), self._translate_errors(), self._connection.cursor(SSCursor) as cursor:
            cursor.execute(sql, dict(values))
            while rows := cursor.fetchmany(page):
                yield list(rows)

    @override
    def begin(self) -> None:
        with self._translate_errors():
            self._connection.begin()

    @override
    def commit(self) -> None:
        with self._translate_errors():
            self._connection.commit()

    @override
    def rollback(self) -> None:
        with self._translate_errors():
            self._connection.rollback()

    @override
    def close(self) -> None:
        with suppress(pymysql.Error, OSError):
            self._connection.close()

    @override
    def abort(self) -> None:
        self._connection.abort()

    @override
    def ping(self) -> None:
        with self._translate_errors():
            self._connection.ping(reconnect=False)
