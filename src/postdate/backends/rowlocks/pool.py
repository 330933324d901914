"""Connections that are used again, and transactions that are run again when they lost against another."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from postdate.backends.rowlocks.parts import Conflict, Server
from postdate.errors import PostdateError, StoreUnavailable
from postdate.threads import in_thread

T = TypeVar("T")

_MOST_IDLE: Final = 16
_TRIES: Final = 8
_GIVE_UP_AFTER_SECONDS: Final = 20.0
"""What loses against others for so long is not tried again: most likely somebody has locked a whole table."""
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
        self._lent: weakref.WeakSet[Any] = weakref.WeakSet()
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
                return self._now_lent(self._server.connect())
            if time.monotonic() - used_at < _TRUSTED_SECONDS or session.is_alive():
                return self._now_lent(session)
            session.close()
            self._close_idle()  # most likely they all are gone, and to ask each may take two seconds

    def _now_lent(self, session: Any) -> Any:
        with self._lock:
            self._lent.add(session)
        return session

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for session, _ in idle:
            session.close()

    def abort(self) -> None:
        """End every connection that is lent: who waits on one hears that no answer comes."""
        with self._lock:
            lent = list(self._lent)
        for session in lent:
            session.abort()

    def put(self, session: Any) -> None:
        """Take a connection back that is in no transaction."""
        with self._lock:
            self._lent.discard(session)
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
        started = time.monotonic()
        for tries in range(1, _TRIES + 1):
            session = self.take()
            try:
                session.begin()
                result = work(session)
                session.commit()
            except Conflict:
                self.roll_back(session)
                if tries == _TRIES or time.monotonic() - started >= _GIVE_UP_AFTER_SECONDS:
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
        started = time.monotonic()
        for tries in range(1, _TRIES + 1):
            try:
                with self.lent() as session:
                    return work(session)
            except Conflict:
                if tries == _TRIES or time.monotonic() - started >= _GIVE_UP_AFTER_SECONDS:
                    raise
        raise AssertionError

    def run_patiently(self, work: Callable[[Any], T]) -> T:
        """Do the same as :meth:`run` with what reads or changes whole tables: the server may take long to answer."""

        def patiently(session: Any) -> T:
            with session.patient():
                return work(session)

        return self.run(patiently)

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
        self._close_idle()
