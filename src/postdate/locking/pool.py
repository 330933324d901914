"""Connections that are used again, and transactions that are run again when they lost against another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from postdate.errors import PostdateError, StoreUnavailable
from postdate.locking.parts import Conflict, Server
from postdate.threads import in_thread

T = TypeVar("T")

_MOST_IDLE: Final = 16
_TRIES: Final = 8
_TRUSTED_SECONDS: Final = 0.5
"""A connection that was used so lately is taken for alive without asking."""


class Pool:
    """Thread-safe.

    Args:
        server: to connect to.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[tuple[Any, float]] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> Any:
        """Return a connection that is alive; give it back with :meth:`put`, or close it.

        Raises:
            StoreUnavailable: closed, or the server does not answer.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable(f"{self._server.where}: closed")
                session, used_at = self._idle.pop() if self._idle else (None, 0.0)
            if session is None:
                return self._server.connect()
            if time.monotonic() - used_at < _TRUSTED_SECONDS or session.is_alive():
                return session
            session.close()

    def put(self, session: Any) -> None:
        """Take a connection back that is in no transaction."""
        with self._lock:
            if not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append((session, time.monotonic()))
                return
        session.close()

    @contextmanager
    def lent(self) -> Generator[Any]:
        """Lend a connection; it is closed when anything goes wrong with it."""
        session = self.take()
        try:
            yield session
        except BaseException:
            session.close()
            raise
        self.put(session)

    def transaction(self, work: Callable[[Any], T]) -> T:
        """Do ``work`` in one transaction, again if it lost against another, and return its result."""
        for tries in range(1, _TRIES + 1):
            session = self.take()
            try:
                session.begin()
                result = work(session)
                session.commit()
            except Conflict:
                self.roll_back(session)
                if tries == _TRIES:
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
            self.put(session)
            return result
        raise AssertionError

    def roll_back(self, session: Any) -> None:
        """Roll back the transaction of a connection and take it back; it is closed if that fails. Never raises."""
        try:
            session.rollback()
        except PostdateError:
            session.close()
        else:
            self.put(session)

    def run(self, work: Callable[[Any], T]) -> T:
        """Do ``work``, one statement, without a transaction around it."""
        for _ in range(_TRIES - 1):
            with suppress(Conflict), self.lent() as session:
                return work(session)
        with self.lent() as session:
            return work(session)

    async def transaction_in_thread(self, work: Callable[[Any], T]) -> T:
        """Do the same as :meth:`transaction` in one of our threads."""
        return await in_thread(self.transaction, work)

    async def run_in_thread(self, work: Callable[[Any], T]) -> T:
        """Do the same as :meth:`run` in one of our threads."""
        return await in_thread(self.run, work)

    def close(self) -> None:
        """Close what is idle; what is given back later is closed then."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for session, _ in idle:
            session.close()
