"""Addresses of database servers, and the base of their connections. Source: ADR 0008."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final, Generic, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from postdate.errors import ConfigurationError, StoreUnavailable
from postdate.runtime import forks

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
"""The keep-alive options of a socket: a vanished server is noticed after about 15 s."""
CONNECT_WITHIN_SECONDS: Final = 5.0
LOG_IN_WITHIN_SECONDS: Final = 10.0
_ANSWER_WITHIN_SECONDS: Final = 30.0
_PATIENCE_SECONDS: Final = 600.0  # the deadline for statements on whole tables
_ALIVE_WITHIN_SECONDS: Final = 2.0  # for the ping of an idle connection, as opening another one is as good


def connect_socket(address: tuple[str, int], seconds: float) -> socket.socket:
    """Return a connected TCP socket; connecting and every operation take at most ``seconds``. Raises `OSError`."""
    tcp_socket = socket.create_connection(address, seconds)
    tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        with suppress(AttributeError, OSError):  # not every system has all options
            tcp_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return forks.register_connection(tcp_socket)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The parts of a URL; an empty ``database`` means that the URL names none."""

    product: str
    host: str
    port: int
    database: str
    user: str
    password: str = field(repr=False)
    options: Mapping[str, str]


def address_of(url: str, product: str, schemes: tuple[str, ...], port: int) -> ServerAddress:
    """Return the parts of a URL; ``port`` is the server's usual one.

    Raises:
        ConfigurationError: the URL is invalid, or has another scheme; the text never has the password.
    """
    example = f"{schemes[0]}://user:password@host:port/database"
    try:
        parts = urlsplit(url)
        host, actual_port = parts.hostname or "localhost", parts.port or port
    except ValueError:  # The text of the error may contain a part of a password that is not escaped.
        raise ConfigurationError(f"the address of the {product} database cannot be read; write {example}") from None
    if parts.scheme not in schemes:
        raise ConfigurationError(f"the address of a {product} database is {example}")
    name, user, password = unquote(parts.path.lstrip("/")), unquote(parts.username or ""), unquote(parts.password or "")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    return ServerAddress(product, host, actual_port, name, user, password, options)


def check_options(address: ServerAddress, allowed: frozenset[str]) -> None:
    """Raise `ConfigurationError` for an option of the URL that is not ``allowed``."""
    if unknown := sorted(set(address.options) - allowed):
        raise ConfigurationError(
            f"the address of a {address.product} database does not know {unknown[0]!r}; it may have "
            f"{', '.join(sorted(allowed))}"
        )


class ServerSession(ABC):
    """One connection, in autocommit mode outside of :meth:`begin` … :meth:`commit`; one thread at a time.

    ``rows(sql, values)`` returns the rows of a statement. ``change(sql, values)`` returns how many rows it changed or
    found unchanged. ``pages(sql, values, page)`` yields rows as the server sends them, while no other statement may
    run. A percent sign is doubled in statements with ``values``.
    """

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction."""

    @abstractmethod
    def rollback(self) -> None:
        """Roll the transaction back."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection, which releases its locks. Never raise."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection from another thread: a call that waits for an answer fails. Never raise."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """The deadline of an answer in seconds."""

    @abstractmethod
    def set_answer_limit(self, seconds: float) -> None:
        """Set the deadline of an answer."""

    @abstractmethod
    def ping(self) -> None:
        """Wait for any answer of the server. Raise `StoreUnavailable`."""

    @property
    @abstractmethod
    def driver(self) -> Any: ...

    @abstractmethod
    def begin_marked(self) -> object:
        """Begin a transaction for a handler; return its mark, which no later transaction has."""

    @abstractmethod
    def is_in_transaction(self, mark: object) -> bool:
        """Return whether the transaction with this mark is open and may be committed."""

    def patient(self) -> AbstractContextManager[None]:
        """Raise the deadline within the block, for statements on whole tables."""
        return self._answer_limit(_PATIENCE_SECONDS)

    @contextmanager
    def _answer_limit(self, seconds: float) -> Generator[None]:
        previous_seconds = self.seconds
        self.set_answer_limit(seconds)
        try:
            yield
        finally:
            self.set_answer_limit(previous_seconds)

    def is_alive(self, at_most: float | None = None) -> bool:
        """Return whether the server answers; ``None``: within two seconds, whatever the session's deadline is."""
        try:
            with self._answer_limit(_ALIVE_WITHIN_SECONDS if at_most is None else min(self.seconds, at_most)):
                self.ping()
        except StoreUnavailable:
            return False
        return True


S = TypeVar("S", bound=ServerSession)


class DatabaseServer(ABC, Generic[S]):
    """The address of a server, and how to connect to it.

    ``answers_within``: a connection is abandoned if the server does not answer for this long; ``None``: 30 s. Raises
    `ConfigurationError` if it is not above 0, or if ``url`` is invalid.
    """

    product: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]
    port: ClassVar[int]

    def __init__(self, url: str, answers_within: timedelta | None = None) -> None:
        if answers_within is not None and answers_within <= timedelta(0):
            raise ConfigurationError(f"answers_within must be above 0, not {answers_within}")
        self._answers_within = answers_within
        self.address = address_of(url, self.product, self.schemes, self.port)

    @property
    def where(self) -> str:
        return f"{self.product} {self.address.host}:{self.address.port}/{self.address.database}"

    @property
    def seconds_to_answer(self) -> float:
        return _ANSWER_WITHIN_SECONDS if self._answers_within is None else self._answers_within.total_seconds()

    @abstractmethod
    def connect(self) -> S:
        """Open a new connection. Raise `StoreUnavailable`.

        Raises `ConfigurationError` for a server that is another product, too old, or not trusted.
        """

    @abstractmethod
    def connect_as_application(self) -> S:
        """Open a new connection as the application would open it, without deadlines; raise as :meth:`connect`."""

    def connect_patiently(self) -> S:
        """Open a connection for long statements, such as those of a migration; raise as :meth:`connect`."""
        session = self.connect()
        session.set_answer_limit(_PATIENCE_SECONDS)
        return session
