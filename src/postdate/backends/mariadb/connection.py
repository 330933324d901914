"""A connection to MariaDB with our settings, and its address. Source: ADR 0008."""

from __future__ import annotations

import math
import re
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pymysql
from pymysql.constants import CLIENT, ER
from pymysql.cursors import SSCursor
from typing_extensions import override

from postdate.backends.mariadb.errors import translated
from postdate.backends.rowlocks.connection import (
    CONNECT_WITHIN_SECONDS,
    LOG_IN_WITHIN_SECONDS,
    DatabaseServer,
    ServerSession,
    check_options,
    connected,
)
from postdate.errors import ConfigurationError, StoreError

_OLDEST: Final = (10, 6)
_MARK: Final = "postdate_handler"
_TLS: Final = frozenset({"ssl", "ssl_ca", "ssl_cert", "ssl_key"})

# in_predicate_conversion_threshold: a list of more than 999 numbers would become a table of its own, read from its
# beginning to its end. lock_wait_timeout: of locks on tables, which are mostly held for long.
_SETTINGS: Final = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = 3, "
    "lock_wait_timeout = 10, wait_timeout = 28800, idle_transaction_timeout = %(idle)s, "
    "idle_write_transaction_timeout = 0, idle_readonly_transaction_timeout = 0, "
    "in_predicate_conversion_threshold = 0, time_zone = '+00:00'"
)


class MariaDbServer(DatabaseServer["MariaDbSession"]):
    """The address of a server, which connects to it.

    Args:
        url: ``mariadb://user:password@host:port/database``; encrypted, and the server's certificate
            checked, with ``?ssl=true`` or ``?ssl_ca=/path``, besides which may stand ``ssl_cert`` and ``ssl_key``.
        holds_at_most: the server ends a silent transaction after so long, and the silent connection by which a process
            shows that it lives; whole seconds. ``None``: it does not.
        answers_within: see :class:`postdate.backends.rowlocks.connection.DatabaseServer`.

    Raises:
        ConfigurationError: the address is unreadable; the text never has the password.
    """

    product, schemes, port = "MariaDB", ("mariadb", "mysql"), 3306

    def __init__(
        self, url: str, holds_at_most: timedelta | None = None, answers_within: timedelta | None = None
    ) -> None:
        super().__init__(url, answers_within)
        check_options(self.address, _TLS)
        self._silence_seconds = 0 if holds_at_most is None else max(round(holds_at_most.total_seconds()), 1)
        tls = self.address.options
        self._tls = _tls(tls) if tls else None  # once: reading the system's certificates takes 0.1 s

    @override
    def connect(self) -> MariaDbSession:
        """The login may take longer than an answer."""
        session = self._opened(CLIENT.FOUND_ROWS)  # an UPDATE counts what it found
        try:
            session.set_up()
            session.limit(self.seconds_to_answer)
        except BaseException:
            session.close()
            raise
        return session

    @override
    def connect_as_application(self) -> MariaDbSession:
        session = self._opened(0, self.database or None)
        session.limit(math.inf)
        return session

    def _opened(self, client_flag: int, database: str | None = None) -> MariaDbSession:
        with translated(self.where, LOG_IN_WITHIN_SECONDS):
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
            connection.connect(connected((self.address.host, self.address.port), CONNECT_WITHIN_SECONDS))
            session = MariaDbSession(connection, self.where, self._silence_seconds)
        try:
            session.check()
        except BaseException:
            session.close()
            raise
        return session


def _tls(settings: Mapping[str, str]) -> ssl.SSLContext | None:
    if settings.get("ssl", "true").lower() in {"0", "false", "no"}:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.get("ssl_ca"))
        if "ssl_cert" in settings:
            context.load_cert_chain(settings["ssl_cert"], settings.get("ssl_key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the certificates of the MariaDB connection cannot be read: {error}") from error
    return context


class _Connection(pymysql.Connection[Any] if TYPE_CHECKING else pymysql.Connection):
    """The driver's connection, with adjustable time limits; another thread may end it."""

    _sock: socket.socket | None
    largest_packet = 2**30

    @property
    def seconds(self) -> float:
        return math.inf if self._read_timeout is None else self._read_timeout

    def limit(self, seconds: float) -> None:
        self._read_timeout = self._write_timeout = None if seconds == math.inf else seconds

    def query(self, sql: str | bytes, unbuffered: bool = False) -> int:
        """Refuse a statement larger than the server's packet, which it would answer by hanging up."""
        text = sql.encode(self.encoding, "surrogateescape") if isinstance(sql, str) else sql
        if len(text) >= self.largest_packet:
            raise pymysql.err.OperationalError(ER.NET_PACKET_TOO_LARGE, f"a statement of {len(text):,} bytes")
        return super().query(text, unbuffered)  # pyright: ignore[reportUnknownMemberType] - it says nothing of its types

    def abort(self) -> None:
        if self._sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # of TLS, too: nothing is to be said any more


def literal(value: str | bytes | int | None) -> bytes:
    """Return a value as SQL, for many rows: the driver's own way takes five times as long.

    Our sessions read backslashes as escapes (``sql_mode``), and in UTF-8 no byte of a longer character is a quote or a
    backslash, so only these two need escaping.
    """
    if value is None:
        return b"NULL"
    if isinstance(value, int):
        return b"%d" % value
    text = value.encode() if isinstance(value, str) else value
    escaped = text.replace(b"\\", b"\\\\").replace(b"'", b"\\'")
    return b"'%b'" % escaped if isinstance(value, str) else b"_binary'%b'" % escaped


class MariaDbSession(ServerSession):
    """One connection; see :class:`postdate.backends.rowlocks.connection.ServerSession`.

    Values in statements: a percent sign is doubled if there are any. ``silence_seconds``: see ``holds_at_most`` of
    :class:`MariaDbServer`; 0: no limit.
    """

    def __init__(self, connection: _Connection, where: str, silence_seconds: int = 0) -> None:
        self._connection, self._where, self._silence_seconds = connection, where, silence_seconds
        self.version = ""
        self.largest_packet = 0

    def check(self) -> None:
        ((version, packet),) = self.rows("SELECT VERSION(), @@max_allowed_packet")
        self.version, self.largest_packet, self._connection.largest_packet = version, packet, packet
        found = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.\d+-mariadb", version.lower())
        if found is None or (int(found[1]), int(found[2])) < _OLDEST:
            raise ConfigurationError(
                f"{self._where} is {version}; Postdate needs MariaDB {_OLDEST[0]}.{_OLDEST[1]} or newer, which skips "
                f"locked rows (MySQL lacks INSERT … RETURNING)"
            )

    def set_up(self) -> None:
        self.change("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.change(_SETTINGS, {"idle": self._silence_seconds})

    @property
    @override
    def driver(self) -> pymysql.Connection[Any]:
        return self._connection

    @override
    def begin_marked(self) -> object:
        """The mark is a savepoint, which also ends when the server itself rolls the transaction back."""
        self.begin()
        self.change(f"SAVEPOINT {_MARK}")
        return _MARK

    @override
    def is_in(self, mark: object) -> bool:
        try:
            self.change(f"RELEASE SAVEPOINT {mark}")
        except StoreError as error:
            if error.transient:
                raise
            return False
        return True

    def show_life(self) -> None:
        """Let the server end this connection, and its locks, when we fall silent."""
        if self._silence_seconds:
            self.change("SET SESSION wait_timeout = %(silence)s", {"silence": self._silence_seconds})

    @property
    @override
    def seconds(self) -> float:
        return self._connection.seconds

    @override
    def limit(self, seconds: float) -> None:
        self._connection.limit(seconds)

    def _speaking(self) -> AbstractContextManager[None]:
        return translated(self._where, self._connection.seconds)

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
        with self._speaking(), self._connection.cursor() as cursor:
            cursor.execute(sql, values or {})
            return cursor.fetchall()

    def change(self, sql: str, values: Mapping[str, Any] | None = None) -> int:
        with self._speaking(), self._connection.cursor() as cursor:
            return cursor.execute(sql, values)

    def change_bytes(self, sql: bytes) -> int:
        with self._speaking(), self._connection.cursor() as cursor:
            return cursor.execute(sql, None)

    def rows_of_bytes(self, sql: bytes) -> Sequence[tuple[Any, ...]]:
        with self._speaking(), self._connection.cursor() as cursor:
            cursor.execute(sql, None)
            return cursor.fetchall()

    def pages(self, sql: str, values: Mapping[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        with self.patient(), self._speaking(), self._connection.cursor(SSCursor) as cursor:
            cursor.execute(sql, dict(values))
            while rows := cursor.fetchmany(page):
                yield list(rows)

    def begin(self) -> None:
        with self._speaking():
            self._connection.begin()

    def commit(self) -> None:
        with self._speaking():
            self._connection.commit()

    def rollback(self) -> None:
        with self._speaking():
            self._connection.rollback()

    def close(self) -> None:
        with suppress(pymysql.Error, OSError):
            self._connection.close()

    def abort(self) -> None:
        self._connection.abort()

    @override
    def ping(self) -> None:
        with self._speaking():
            self._connection.ping(reconnect=False)
