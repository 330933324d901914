"""Connections that are used again, and transactions that are run again when they lost against another.

What a dialect gives is a :class:`postdate.backends.rowlocks.parts.SessionSource` with its sessions, and errors that
are a :class:`postdate.backends.rowlocks.parts.Conflict` where a transaction that lost may be run again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, TypeVar

from postdate.backends.rowlocks.parts import Conflict, SessionSource
from postdate.errors import PostdateError, StoreUnavailable
from postdate.runtime.threads import in_thread

T = TypeVar("T")

_MOST_IDLE: Final = 16
_TRIES: Final = 8
_GIVE_UP_AFTER_SECONDS: Final = 20.0
"""What loses against others for so long is not tried again: most likely somebody has locked a whole table."""
_TRUSTED_SECONDS: Final = 0.5
"""A connection that was used so lately is taken for alive without asking."""


class Connections:
    """The idle connections to one server, which the pools of several adapters may share. Thread-safe.

    Args:
        server: to connect to.
    """

    def __init__(self, server: SessionSource) -> None:
        self.server = server
        self.idle: list[tuple[Any, float]] = []
        self._pools = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        """Note that one more pool uses them."""
        with self._lock:
            self._pools += 1

    def leave(self) -> None:
        """Note that one pool less does; without any, the connections are closed."""
        with self._lock:
            self._pools -= 1
            is_last = not self._pools
        if is_last:
            self.close_idle()

    def take(self) -> Any:
        """Return a connection that is alive.

        Raises:
            StoreUnavailable: the server does not answer.
        """
        while True:
            with self._lock:
                session, used_at = self.idle.pop() if self.idle else (None, 0.0)
            if session is None:
                return self.server.connect()
            if time.monotonic() - used_at < _TRUSTED_SECONDS or session.is_alive():
                return session
            session.close()
            self.close_idle()  # most likely they all are gone, and to ask each may take two seconds

    def put(self, session: Any) -> None:
        """Keep a connection that is in no transaction, unless there are enough or nobody uses them any more."""
        with self._lock:
            if self._pools and len(self.idle) < _MOST_IDLE:
                self.idle.append((session, time.monotonic()))
                return
        session.close()

    def close_idle(self) -> None:
        """Close what is idle now."""
        with self._lock:
            idle, self.idle = self.idle, []
        for session, _ in idle:
            session.close()


class Pool:
    """The connections that one adapter has lent. Thread-safe.

    Args:
        connections: shared with other adapters of the same database, or a server to connect to alone.
    """

    def __init__(self, connections: Connections | SessionSource) -> None:
        self._connections = connections if isinstance(connections, Connections) else Connections(connections)
        self._connections.join()
        self._lent: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = self._aborted = False

    def take(self) -> Any:
        """Return a connection that is alive; give it back with :meth:`put`, or close it.

        Raises:
            StoreUnavailable: closed, or the server does not answer.
        """
        self.check_open()
        session = self._connections.take()
        with self._lock:
            self._lent.add(session)
        return session

    def check_open(self) -> None:
        """Refuse to go on after the end."""
        if self._closed or self._aborted:
            raise StoreUnavailable(f"{self.where}: closed")

    def abort(self) -> None:
        """End every connection that is lent, and lend none any more: who waits on one hears that no answer comes."""
        with self._lock:
            self._aborted = True
            lent = list(self._lent)
        for session in lent:
            session.abort()

    def put(self, session: Any) -> None:
        """Take a connection back that is in no transaction."""
        with self._lock:
            self._lent.discard(session)
        self._connections.put(session)

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

    def transaction_blocking(self, work: Callable[[Any], T]) -> T:
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

    def drop(self, session: Any) -> None:
        """Close a connection, with whatever transaction it is in; asks the server nothing. Never raises."""
        session.close()

    def end(self, session: Any) -> None:
        """Roll back the transaction of a connection and close it, whether the server answers or not. Never raises."""
        with suppress(PostdateError):
            session.rollback()
        session.close()

    def run_blocking(self, work: Callable[[Any], T], *, patiently: bool = False) -> T:
        """Do ``work``, one statement, without a transaction around it.

        Args:
            work: what to do.
            patiently: it reads or writes whole tables: the server may take minutes to answer.
        """
        started = time.monotonic()
        for tries in range(1, _TRIES + 1):
            try:
                with self.lent() as session, session.patient() if patiently else nullcontext():
                    return work(session)
            except Conflict:
                if tries == _TRIES or time.monotonic() - started >= _GIVE_UP_AFTER_SECONDS:
                    raise
        raise AssertionError

    @property
    def where(self) -> str:
        """The address without secrets, for texts."""
        return self._connections.server.where

    async def transaction(self, work: Callable[[Any], T]) -> T:
        """Do the same as :meth:`transaction_blocking` in one of our threads."""
        return await in_thread(self.transaction_blocking, work)

    async def run(self, work: Callable[[Any], T], *, patiently: bool = False) -> T:
        """Do the same as :meth:`run_blocking` in one of our threads."""
        return await in_thread(partial(self.run_blocking, patiently=patiently), work)

    async def look(self, work: Callable[[Any], T], *, patiently: bool = False) -> T:
        """Do the same as :meth:`run`: a statement sees one moment."""
        return await self.run(work, patiently=patiently)

    def close(self) -> None:
        """Lend nothing any more; a second time without effect. The last pool closes what is idle or comes back."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._connections.leave()
