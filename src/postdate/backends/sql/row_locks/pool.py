"""Connections that are used again, and transactions that are repeated after a conflict.

A dialect provides a `DatabaseServer` and its sessions, and raises `Conflict` if a transaction may be repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeVar

from typing_extensions import override

from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.row_locks.connection import DatabaseServer
from postdate.backends.sql.row_locks.parts import Conflict
from postdate.clock import steady_seconds
from postdate.errors import PostdateError, StoreUnavailable
from postdate.runtime import forks
from postdate.runtime.threads import run_in_thread

T = TypeVar("T")

_MOST_IDLE: Final = 16
_MAX_ATTEMPTS: Final = 8  # of a transaction that has conflicts
_RETRY_FOR_SECONDS: Final = 20.0
"""After conflicts for so long a transaction is not repeated: most likely a whole table is locked."""
_TRUSTED_SECONDS: Final = 0.5
"""A connection that was used so recently is not pinged before use."""


class Connections(forks.ForkAware):
    """The idle connections to one server, which the pools of several adapters may share. Thread-safe.

    They are closed when the last pool is closed.
    """

    def __init__(self, server: DatabaseServer[Any]) -> None:
        self.server = server
        self.idle: list[tuple[Any, float]] = []
        self._pools = 0
        self._lock = forks.lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Forget idle connections: they belong to the parent."""
        forks.prevent_destruction(self.idle)
        self.idle = []

    def attach_pool(self) -> None:
        with self._lock:
            self._pools += 1

    def detach_pool(self) -> None:
        with self._lock:
            self._pools -= 1
            is_last = not self._pools
        if is_last:
            self.close_idle()

    def acquire(self) -> Any:
        """Acquire a live connection. Raise `StoreUnavailable`."""
        while True:
            with self._lock:
                session, used_at = self.idle.pop() if self.idle else (None, 0.0)
            if session is None:
                return self.server.connect()
            if steady_seconds() - used_at < _TRUSTED_SECONDS or session.is_alive():
                return session
            session.close()
            self.close_idle()  # Most likely all of them are lost, and a ping of each may take two seconds.

    def release(self, session: Any) -> None:
        """Release a connection that is in no transaction; close it if enough are idle, or all pools are closed."""
        with self._lock:
            if self._pools and len(self.idle) < _MOST_IDLE:
                self.idle.append((session, steady_seconds()))
                return
        session.close()

    def close_idle(self) -> None:
        with self._lock:
            idle, self.idle = self.idle, []
        for session, _ in idle:
            session.close()


class Pool:
    """The connections that one adapter has acquired. Thread-safe.

    ``connections`` are shared with other adapters; given a server, the adapter has its own.
    """

    def __init__(self, connections: Connections | DatabaseServer[Any]) -> None:
        self._connections = connections if isinstance(connections, Connections) else Connections(connections)
        self._connections.attach_pool()
        self._lent_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = forks.lock()
        self._closed = self._aborted = False

    def acquire(self) -> Any:
        """Acquire a live connection; put it back with :meth:`release`, or close it. Raise `StoreUnavailable`."""
        self.check_open()
        session = self._connections.acquire()
        with self._lock:
            self._lent_sessions.add(session)
        return session

    def check_open(self) -> None:
        if self._closed or self._aborted:
            raise StoreUnavailable(f"{self.where}: closed")

    def abort(self) -> None:
        """End every acquired connection, so that calls on them fail, and allow no more."""
        with self._lock:
            self._aborted = True
            sessions = list(self._lent_sessions)
        for session in sessions:
            session.abort()

    def release(self, session: Any) -> None:
        with self._lock:
            self._lent_sessions.discard(session)
        self._connections.release(session)

    @contextmanager
    def lend_session(self) -> Generator[Any]:
        """Acquire a connection for the block; it is closed after any exception."""
        session = self.acquire()
        with closing_on_error(session):
            yield session
        self.release(session)

    def transaction_blocking(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` in one transaction, repeated after a conflict, and return its result."""
        started = steady_seconds()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            session = self.acquire()
            try:
                session.begin()
                result = work(session)
                session.commit()
            except Conflict:
                self.roll_back(session)
                if attempt == _MAX_ATTEMPTS or steady_seconds() - started >= _RETRY_FOR_SECONDS:
                    raise
                continue
            except PostdateError as error:
                if error.transient:
                    session.close()
                else:
                    self.roll_back(session)
                raise
            except BaseException:
                session.close()
                raise
            self.release(session)
            return result
        raise AssertionError

    def roll_back(self, session: Any) -> None:
        """Roll back and release the connection, or close it if that fails. Never raise."""
        try:
            session.rollback()
        except PostdateError:
            session.close()
        else:
            self.release(session)

    def close_connection(self, session: Any) -> None:
        session.close()

    def roll_back_and_close(self, session: Any) -> None:
        with suppress(PostdateError):
            session.rollback()
        session.close()

    def run_blocking(self, work: Callable[[Any], T], *, patiently: bool = False) -> T:
        """Run ``work``, one statement, in autocommit mode, repeated after a conflict.

        ``patiently``: it reads or writes whole tables, so the server may take minutes.
        """
        started = steady_seconds()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                with self.lend_session() as session, session.patient() if patiently else nullcontext():
                    return work(session)
            except Conflict:
                if attempt == _MAX_ATTEMPTS or steady_seconds() - started >= _RETRY_FOR_SECONDS:
                    raise
        raise AssertionError

    @property
    def where(self) -> str:
        return self._connections.server.where

    async def transaction(self, work: Callable[[Any], T]) -> T:
        return await run_in_thread(self.transaction_blocking, work)

    async def run(self, work: Callable[[Any], T], *, patiently: bool = False) -> T:
        return await run_in_thread(partial(self.run_blocking, patiently=patiently), work)

    query_blocking = run_blocking

    async def query(self, work: Callable[[Any], T], *, patiently: bool = False) -> T:
        return await self.run(work, patiently=patiently)

    def close(self) -> None:
        """Allow no more connections; idempotent. The last pool closes idle connections, and those released later."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._connections.detach_pool()
