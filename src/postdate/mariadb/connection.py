"""A connection to MariaDB as we want it, and the address it goes to. Source: ADR 0008."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT
from pymysql.cursors import SSCursor

from postdate.errors import ConfigurationError, StoreUnavailable
from postdate.mariadb.errors import translated

_OLDEST: Final = (10, 6)
_PORT: Final = 3306
_CONNECT_WITHIN_SECONDS: Final = 5.0
_ANSWER_WITHIN_SECONDS: Final = 120.0
_TLS: Final = frozenset({"ssl", "ssl_ca", "ssl_cert", "ssl_key"})

# in_predicate_conversion_threshold: a list of more than 999 numbers would become a table of its own, read from its
# beginning to its end.
_SETTINGS: Final = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = 3, "
    "lock_wait_timeout = 30, wait_timeout = 28800, idle_transaction_timeout = 0, idle_write_transaction_timeout = 0, "
    "in_predicate_conversion_threshold = 0, time_zone = '+00:00'"
)
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
"""A server that vanished without a word is noticed within 15 s or so."""


class MariaDbServer:
    """Where a server is.

    Args:
        url: ``mariadb://user:password@host:port/database``; encrypted, and the server's certificate
            checked, with ``?ssl=true`` or ``?ssl_ca=/path``, besides which may stand ``ssl_cert`` and ``ssl_key``.

    Raises:
        ConfigurationError: the address cannot be read; the text never has the password.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self._address = (parts.hostname or "localhost", parts.port or _PORT)
        except ValueError:  # its text may have a piece of a password that is not escaped
            raise ConfigurationError(
                "the address of the MariaDB database cannot be read; write mariadb://user:password@host:port/database"
            ) from None
        self.database = unquote(parts.path.lstrip("/"))
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        tls = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(tls) - _TLS)
        if parts.scheme not in {"mariadb", "mysql"} or unknown:
            wrong = f"does not know {unknown[0]!r}" if unknown else "begins with mariadb://"
            raise ConfigurationError(
                f"the address of a MariaDB database {wrong}; it may have {', '.join(sorted(_TLS))}"
            )
        self._tls = _tls(tls) if tls else None  # once: reading the system's certificates takes 0.1 s
        self.where = f"MariaDB {self._address[0]}:{self._address[1]}/{self.database}"

    def connect(self) -> MariaDbSession:
        """Return a connection; see :class:`postdate.locking.Server`.

        Raises:
            ConfigurationError: it is no MariaDB, or too old.
            StoreUnavailable: it does not answer.
        """
        with translated(self.where):
            connection = pymysql.connect(
                host=self._address[0],
                port=self._address[1],
                user=self._user,
                password=self._password,
                charset="utf8mb4",
                autocommit=True,
                client_flag=CLIENT.FOUND_ROWS,  # an UPDATE counts what it found
                read_timeout=_ANSWER_WITHIN_SECONDS,
                write_timeout=_ANSWER_WITHIN_SECONDS,
                defer_connect=True,
                ssl=self._tls,
                ssl_disabled=self._tls is None,
            )
            connection.connect(_socket(self._address))
            session = MariaDbSession(connection, self.where)
        try:
            session.prepare()
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


def _socket(address: tuple[str, int]) -> socket.socket:
    connected = socket.create_connection(address, _CONNECT_WITHIN_SECONDS)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        with suppress(AttributeError, OSError):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connected.settimeout(_ANSWER_WITHIN_SECONDS)
    return connected


def literal(value: str | bytes) -> bytes:
    """Return a text or bytes as SQL for many rows: the driver's own way takes five times as long.

    Our sessions read backslashes as escapes (``sql_mode``), and in UTF-8 no byte of a longer character is a quote or a
    backslash: so these two are all there is to escape.
    """
    text = value.encode() if isinstance(value, str) else value
    escaped = text.replace(b"\\", b"\\\\").replace(b"'", b"\\'")
    return b"'%b'" % escaped if isinstance(value, str) else b"_binary'%b'" % escaped


class MariaDbSession:
    """One connection, in autocommit mode outside of :meth:`begin` … :meth:`commit`; one thread at a time.

    Args:
        connection: of the driver.
        where: the address without secrets.
    """

    def __init__(self, connection: pymysql.Connection[Any], where: str) -> None:
        self._connection, self._where = connection, where
        self.version = ""
        self.largest_packet = 0

    def prepare(self) -> None:
        """Check the server and set what the session needs."""
        ((version, packet),) = self.rows("SELECT VERSION(), @@max_allowed_packet")
        self.version, self.largest_packet = version, packet
        found = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.\d+-mariadb", version.lower())
        if found is None or (int(found[1]), int(found[2])) < _OLDEST:
            raise ConfigurationError(
                f"{self._where} is {version}; Postdate needs MariaDB {_OLDEST[0]}.{_OLDEST[1]} or newer, which skips "
                f"locked rows (MySQL lacks INSERT … RETURNING)"
            )
        self.change("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.change(_SETTINGS)

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
        """Run a statement in which percent signs are doubled, and return its rows."""
        with translated(self._where), self._connection.cursor() as cursor:
            cursor.execute(sql, values or {})
            return cursor.fetchall()

    def change(self, sql: str, values: Mapping[str, Any] | None = None) -> int:
        """Run a statement, percent signs doubled if it has ``values``, and return how many rows it found."""
        with translated(self._where), self._connection.cursor() as cursor:
            return cursor.execute(sql, values)

    def change_bytes(self, sql: bytes) -> int:
        """Run a statement that is complete and return how many rows it found."""
        with translated(self._where), self._connection.cursor() as cursor:
            return cursor.execute(sql, None)

    def rows_of_bytes(self, sql: bytes) -> Sequence[tuple[Any, ...]]:
        """Run a statement that is complete and return its rows."""
        with translated(self._where), self._connection.cursor() as cursor:
            cursor.execute(sql, None)
            return cursor.fetchall()

    def pages(self, sql: str, values: dict[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield the rows of a statement as the server sends them; nothing else may run meanwhile."""
        with translated(self._where), self._connection.cursor(SSCursor) as cursor:
            cursor.execute(sql, values)
            while rows := cursor.fetchmany(page):
                yield list(rows)

    def begin(self) -> None:
        """Begin a transaction."""
        with translated(self._where):
            self._connection.begin()

    def commit(self) -> None:
        """Commit it."""
        with translated(self._where):
            self._connection.commit()

    def rollback(self) -> None:
        """Roll it back."""
        with translated(self._where):
            self._connection.rollback()

    def close(self) -> None:
        """Close the connection. Never raises."""
        with suppress(pymysql.Error, OSError):
            self._connection.close()

    def is_alive(self) -> bool:
        """Ask the server."""
        try:
            with translated(self._where):
                self._connection.ping(reconnect=False)
        except StoreUnavailable:
            return False
        return True
