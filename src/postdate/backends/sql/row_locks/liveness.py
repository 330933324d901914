"""A thread with its own connection: it sends heartbeats, and finds newly stored messages and dead processes.

While the connection is open, leases under its number are in force. When the process or its machine dies, the server
closes the connection, and the next process that checks releases the leases. No clock is involved.

Only :meth:`Liveness.stop` ends the thread. No number outlives its connection: after a failure of the connection the
next connection gets another number. A failure of the tables is logged once, the step is retried later, and the number
stays.

These servers do not notify of stored messages. So the thread reads the next attempt ten times a second, which is the
first entry of an index, and only while a poller listens.

Source: ADR 0008.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.row_locks.claims import Claims, LockedBatch
from postdate.backends.sql.row_locks.connection import DatabaseServer
from postdate.backends.sql.row_locks.parts import Conflict
from postdate.backends.sql.row_locks.tables import RowLockTables
from postdate.clock import steady_seconds
from postdate.errors import PostdateError, StoreFull, StoreTroubled, StoreUnreachable
from postdate.runtime import forks
from postdate.runtime.next_due import NextDue

_POLL_INTERVAL_SECONDS: Final = 0.1  # the servers do not notify of stored messages
_RELEASE_INTERVAL_SECONDS: Final = 1.0  # between two checks for dead processes
_PING_AFTER_SECONDS: Final = 10.0
"""The longest silence on a batch's connection; less if the server ends silent ones earlier."""
_PINGS_BEFORE_TIMEOUT: Final = 4
"""The number of pings within the time after which the server ends a silent connection."""
_RECONNECT_PAUSES_SECONDS: Final = (0.1, 0.2, 0.5, 1.0)  # after each failure in a row, then the last one
_START_WITHIN_SECONDS: Final = 15.0  # how long a caller waits for a number
_STOP_WITHIN_SECONDS: Final = 20.0
"""The time in which a silent server is noticed. After that the thread ends by itself and is not waited for."""

log = logging.getLogger("postdate.stores")


class Liveness(forks.ForkAware):
    """The thread of one store, started at first need. The child of a fork starts another one.

    Args:
        server: opens the connection.
        tables: of the store.
        next_due: the cache to which the next attempt is announced.
        holds_at_most: the server ends connections that are silent for this long; ``None``: it does not end them.
    """

    def __init__(
        self,
        server: DatabaseServer[Any],
        tables: RowLockTables,
        next_due: NextDue[int],
        holds_at_most: timedelta | None = None,
    ) -> None:
        self._ends_after_seconds = math.inf if holds_at_most is None else holds_at_most.total_seconds()
        self._ping_after_seconds = min(_PING_AFTER_SECONDS, self._ends_after_seconds / _PINGS_BEFORE_TIMEOUT)
        self._ping_thread: threading.Thread | None = None  # started by the thread, joined by `stop`
        self._server = server
        self._tables = tables
        self._next_due = next_due
        self._claims: Claims | None = None  # set by `start`, before the thread runs
        self._ready = threading.Event()  # set when there is a number, or after the second failure in a row
        self._stop = threading.Event()
        self._holder: int | None = None  # written by the thread
        self._session: Any | None = None  # of the thread; `abort` ends it from another thread
        self._failure: PostdateError | None = None  # of the last connection; raised to callers of `wait_for_holder`
        self._failures = 0  # in a row
        self._failed_steps: set[str] = set()  # names of steps whose failure was logged; used by the thread only
        self._thread: threading.Thread | None = None
        self._lock = forks.lock()  # guards the start of the thread against `stop`
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Forget thread, connection and number, which belong to the parent."""
        was_stopped = self._stop.is_set()
        self._ready, self._stop = threading.Event(), threading.Event()
        if was_stopped:
            self._stop.set()
        forks.prevent_destruction(self._session)
        self._session = self._holder = self._failure = self._thread = self._ping_thread = None
        self._failures = 0
        self._failed_steps.clear()

    def start(self, claims: Claims) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._claims = claims
                self._thread = threading.Thread(target=self._run, name="postdate-store-liveness", daemon=True)
                self._thread.start()

    def wait_for_holder(self) -> int:
        """Return the number under which this process claims messages now. Waits for the first connection.

        Raises:
            StoreUnavailable: there is no connection at the moment.
        """
        holder = self._holder if self._ready.wait(_START_WITHIN_SECONDS) else None
        if holder is None:
            raise self._failure or StoreUnreachable(f"{self._server.where}: the connection that holds messages is gone")
        return holder

    def stop(self) -> None:
        """End the thread and its connection, which releases all leases."""
        with self._lock:
            self._stop.set()
            thread = self._thread
        if thread is not None:
            thread.join(_STOP_WITHIN_SECONDS)
        if (ping_thread := self._ping_thread) is not None:
            ping_thread.join(_STOP_WITHIN_SECONDS)
        self._ready.set()

    def abort(self) -> None:
        if (session := self._session) is not None:
            session.abort()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with closing(self._server.connect()) as session:
                    self._session = session
                    self._run_session(session)
            except Exception as error:  # noqa: BLE001 - without this thread the process would lose all claims
                self._handle_failure(error)

    def _run_session(self, session: Any) -> None:
        holder = self._tables.register_holder(session)
        try:
            self._failure, self._holder = None, holder
            self._ready.set()
            self._run_steps(session)
            self._run_step(session, self._release_own_leases)
        finally:
            self._ready.clear()  # callers of `wait_for_holder` wait for the next number
            self._holder = None

    def _handle_failure(self, error: Exception) -> None:
        is_translated = isinstance(error, PostdateError)
        self._failure = error if is_translated else StoreUnreachable(f"{self._server.where}: {error!r}")
        if self._failures:  # the second failure in a row: callers of `wait_for_holder` get the error now
            self._ready.set()
        else:
            log.warning("lost the connection that holds messages: %s", error, exc_info=None if is_translated else error)
        pauses = _RECONNECT_PAUSES_SECONDS
        self._stop.wait(pauses[min(self._failures, len(pauses) - 1)])
        self._failures += 1

    def _run_steps(self, session: Any) -> None:
        released_at = steady_seconds()
        self._run_step(session, self._release_unknown_holders)
        self._run_step(session, self._release_dead_holders)
        while not self._stop.is_set():
            self._start_pings()
            if steady_seconds() - released_at >= _RELEASE_INTERVAL_SECONDS:
                released_at = steady_seconds()
                self._run_step(session, self._release_dead_holders)
            self._run_step(session, self._release_abandoned_leases)
            self._run_step(session, self._announce_next_attempt)
            self._failures = 0
            self._stop.wait(_POLL_INTERVAL_SECONDS)

    def _run_step(self, session: Any, step: Callable[[Any], None]) -> None:
        """Run a step. Only errors of the connection are raised. Others are logged once, and the step is retried."""
        name = step.__name__
        try:
            step(session)
        except Conflict:  # another process runs the same step
            session.rollback()
        except PostdateError as error:
            if error.transient and not isinstance(error, StoreFull | StoreTroubled):
                raise
            session.rollback()
            if name not in self._failed_steps:
                log.error("what processes hold of this store is looked after only in part: %s", error)
            self._failed_steps.add(name)
        else:
            self._failed_steps.discard(name)

    def _start_pings(self) -> None:
        """Ping silent batches in another thread: a wait for one of them must not silence this thread's connection."""
        if self._claims is None or (self._ping_thread is not None and self._ping_thread.is_alive()):
            return
        if silent_batches := self._claims.silent_batches(self._ping_after_seconds):
            self._ping_thread = threading.Thread(
                target=self._ping_batches,
                args=(self._claims, silent_batches),
                name="postdate-store-keeper",
                daemon=True,
            )
            self._ping_thread.start()

    def _ping_batches(self, claims: Claims, silent: Sequence[LockedBatch]) -> None:
        if lost := claims.ping_batches(silent, self._ends_after_seconds):
            log.warning("%d messages are held no more: the connection that held them is gone", lost)
            self._next_due.forget()

    def _announce_next_attempt(self, session: Any) -> None:
        if self._next_due.has_listeners and self._claims is not None:
            next_attempt = self._tables.next_attempt(session, self._claims.locked_numbers())
            if next_attempt is not None:
                self._next_due.announce(next_attempt)

    def _release_abandoned_leases(self, session: Any) -> None:
        if self._claims is None:
            return
        for holder, numbers in self._claims.abandoned_leases().items():
            session.begin()
            self._tables.release_leases(session, [holder], numbers)
            session.commit()
            self._claims.forget_abandoned(numbers)
            self._next_due.forget()

    def _release_unknown_holders(self, session: Any) -> None:
        self._release_and_log(session, self._tables.find_unknown_holders(session))

    def _release_dead_holders(self, session: Any) -> None:
        """Release the messages of dead processes. Each process does this for all processes."""
        self._release_and_log(session, self._tables.find_dead_holders(session))

    def _release_own_leases(self, session: Any) -> None:
        if self._holder is not None:
            self._release_holders(session, [self._holder])

    def _release_and_log(self, session: Any, holders: Sequence[int]) -> None:
        if holders and (released_count := self._release_holders(session, holders)):
            log.info("%d messages of processes that ended are free again", released_count)
            self._next_due.forget()

    def _release_holders(self, session: Any, holders: Sequence[int]) -> int:
        """Delete holders, then release their messages. In this order, no process can lease under a deleted number."""
        session.begin()
        self._tables.remove_holders(session, holders)
        released_count = self._tables.release_leases(session, holders)
        session.commit()
        return released_count
