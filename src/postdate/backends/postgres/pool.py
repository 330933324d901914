"""The connections of this process to one database, shared by all adapters there. There are two kinds.

Our own connections block, have settings for our own statements, and are used in threads. One round trip costs a thread
hand-over of some 50 microseconds, and the same code serves the event loop, pipeline processes and Spark executors. The
connections of handlers are asynchronous, with the settings of the application.

Once an endpoint has said how many messages it handles at once, the pool opens only two connections more. Two are
reserved for brief work, which holds nothing that other work waits for. The transactions of handlers share the remaining
ones, and wait for them. Claims of rows never wait. Any wait ends after seconds: the limit saves connections, and must
never stop messages. Source: ADR 0021, ADR 0055.
"""

from __future__ import annotations

import select
import threading
from contextlib import suppress
from typing import Final

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from postdate.backends.postgres.answering import (
    AbandonedSessions,
    Answers,
    Bounded,
    BoundedAsyncConnection,
    BoundedConnection,
    NoAnswer,
)
from postdate.backends.postgres.sessions import address_of, check_unpooled
from postdate.clock import steady_seconds
from postdate.runtime import forks
from postdate.runtime.threads import run_in_thread

_MOST_IDLE: Final = 16
"""The most idle connections of each kind without an endpoint's limit."""

FOR_BRIEF_WORK: Final = 2  # connections that handlers do not get
# For a connection; after that the limit is exceeded, because it must never stop messages.
_MAX_WAIT_SECONDS: Final = 5.0
_FAIL_FAST_SECONDS: Final = 5.0
"""After a closing adapter has waited in vain for a connection, closing adapters fail at once for so long."""


class PostgresPool:
    """A pool of connections; see the module. Thread-safe. Raises `ConfigurationError` for an invalid ``url``."""

    def __init__(self, url: str) -> None:
        self._url, self.address = url, address_of(url)
        self.abandoned = AbandonedSessions()
        self._changed = threading.Condition()
        self._idle: list[BoundedConnection] = []
        self._idle_application_connections: list[BoundedAsyncConnection] = []
        self._open_count = self._application_count = self._brief_count = 0
        self._max_open: int | None = None
        self._keeps_idle = True
        self._connect_failed_at = float("-inf")

    def raise_limit(self, concurrency: int) -> None:
        """Raise the limit on connections by ``concurrency``; the first call also adds two for brief work."""
        with self._changed:
            self._max_open = (self._max_open or FOR_BRIEF_WORK) + concurrency

    def open(self) -> None:
        with self._changed:
            self._keeps_idle = True

    def close(self) -> None:
        """Close idle connections now, and acquired ones when they are released."""
        with self._changed:
            self._keeps_idle = False
            idle, self._idle = self._idle, []
            of_applications, self._idle_application_connections = self._idle_application_connections, []
            self._open_count -= len(idle) + len(of_applications)
            self._application_count -= len(of_applications)
            self._changed.notify_all()
        for each in (*idle, *of_applications):
            each.pgconn.finish()

    # --- unpooled connections -------------------------------------------------------------------------------------

    def connect(self, answers: Answers, *options: str) -> BoundedConnection:
        """Open an unpooled connection in autocommit mode, which the caller closes.

        ``options`` are more settings of the session, as ``name=value``; they override the address. A closing adapter
        fails at once if another one has just waited in vain.
        """
        if answers.is_closing and steady_seconds() - self._connect_failed_at < _FAIL_FAST_SECONDS:
            raise NoAnswer("has not answered just now")
        option_text = " ".join(f"-c {option}" for option in options)
        try:
            connection = BoundedConnection.connect(
                self.address.conninfo,
                autocommit=True,
                options=f"{self.address.options} {option_text}".strip(),
                connect_timeout=answers.connect_timeout_seconds,
            )
        except psycopg.errors.ConnectionTimeout:
            if answers.is_closing:
                self._connect_failed_at = steady_seconds()
            raise
        self._connect_failed_at = float("-inf")
        forks.register_connection(connection).prepare_threshold = 2
        connection.opened_at, connection.answers = steady_seconds(), answers
        try:
            check_unpooled(connection)
            if self.abandoned:
                self.abandoned.terminate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    # --- our own connections --------------------------------------------------------------------------------------

    def acquire(self, answers: Answers, *, brief: bool) -> BoundedConnection:
        """Acquire a live connection; put it back with :meth:`release`, or close it with :meth:`close_connection`.

        ``answers`` limit its silence while it is acquired; ``brief``: for one piece of work that waits for no other.
        """
        while True:
            connection = self._acquire_idle(brief=brief)
            try:
                if connection is None:
                    connection = self.connect(answers)
                elif not self._is_usable(connection):
                    connection.pgconn.finish()
                    self._count_closed(brief=brief)
                    continue
            except BaseException:
                self._count_closed(brief=brief)
                raise
            connection.answers, connection.brief, connection.patient = answers, brief, False
            return connection

    def _acquire_idle(self, *, brief: bool) -> BoundedConnection | None:
        with self._changed:
            if brief:
                self._changed.wait_for(self._has_room_for_brief_work, _MAX_WAIT_SECONDS)
                self._brief_count += 1
            if self._idle:
                return self._idle.pop()
            surplus = (
                self._idle_application_connections.pop(0)
                if self._is_full() and self._idle_application_connections
                else None
            )
            if surplus is None:
                self._open_count += 1
            else:
                self._application_count -= 1
        if surplus is not None:
            surplus.pgconn.finish()
        return None

    def _is_full(self) -> bool:
        return self._max_open is not None and self._open_count >= self._max_open

    def _has_room_for_brief_work(self) -> bool:
        return bool(self._idle) or not self._is_full() or self._brief_count < FOR_BRIEF_WORK

    def release(self, connection: BoundedConnection) -> None:
        idle = not connection.closed and connection.info.transaction_status is TransactionStatus.IDLE
        with self._changed:
            stays_open = idle and self._can_stay_open(len(self._idle))
            if stays_open:
                self._idle.append(connection)
            self._count_returned(connection, stays_open=stays_open)
        if not stays_open:
            with suppress(psycopg.Error):
                connection.close()

    def _can_stay_open(self, idle: int) -> bool:
        fits = idle < _MOST_IDLE if self._max_open is None else self._open_count <= self._max_open
        return self._keeps_idle and fits

    def _count_returned(self, connection: BoundedConnection, *, stays_open: bool) -> None:
        self._brief_count -= connection.brief
        self._open_count -= not stays_open
        connection.brief = False
        self._changed.notify_all()

    def close_connection(self, connection: BoundedConnection) -> None:
        """Close an acquired connection; the server rolls its transaction back when it notices."""
        with self._changed:
            self._count_returned(connection, stays_open=False)
        connection.close()

    def _count_closed(self, *, brief: bool) -> None:
        with self._changed:
            self._open_count -= 1
            self._brief_count -= brief
            self._changed.notify_all()

    def _is_usable(self, connection: Bounded) -> bool:
        """Return whether an idle connection is usable.

        It is abandoned if another one fell silent after it was opened.
        """
        if self.abandoned.is_distrusted(connection):
            self.abandoned.add(connection, silent=False)
            return False
        return _is_quiet(connection)

    # --- connections of applications ------------------------------------------------------------------------------

    async def acquire_for_application(self, answers: Answers) -> BoundedAsyncConnection:
        """Acquire a connection with the application's settings, in autocommit mode; see :meth:`acquire`."""
        while True:
            has_place, connection = self._reserve_for_application(0)
            if not has_place:  # Wait until brief work has ended.
                _, connection = await run_in_thread(self._reserve_for_application, _MAX_WAIT_SECONDS)
            try:
                if connection is None:
                    connection = await self._connect_for_application(answers)
                elif not self._is_usable(connection):
                    connection.pgconn.finish()
                    self._count_closed_for_application()
                    continue
            except BaseException:
                self._count_closed_for_application()
                raise
            connection.answers = answers
            return connection

    def _reserve_for_application(self, seconds: float) -> tuple[bool, BoundedAsyncConnection | None]:
        """Reserve a connection; return whether there is capacity, and an idle connection if there is one.

        It waits up to ``seconds`` for capacity; after the wait a connection is reserved in any case.
        """
        with self._changed:
            has_room = self._has_room_for_application()
            if not has_room and not seconds:
                return False, None
            if not has_room:
                self._changed.wait_for(self._has_room_for_application, seconds)
            if self._idle_application_connections:
                return True, self._idle_application_connections.pop()
            surplus = self._idle.pop(0) if self._is_full() and self._idle else None
            self._open_count += surplus is None
            self._application_count += 1
        if surplus is not None:
            surplus.pgconn.finish()
        return True, None

    def _has_room_for_application(self) -> bool:
        if self._idle_application_connections or self._max_open is None:
            return True
        return self._application_count < self._max_open - FOR_BRIEF_WORK and (
            self._open_count < self._max_open or bool(self._idle)
        )

    async def _connect_for_application(self, answers: Answers) -> BoundedAsyncConnection:
        if self.abandoned:
            await run_in_thread(lambda: self.connect(answers).close())
        connection = await BoundedAsyncConnection.connect(self.address.for_applications, autocommit=True)
        self._connect_failed_at = float("-inf")
        forks.register_connection(connection).opened_at = steady_seconds()
        reset_handler_settings(connection)
        return connection

    async def release_for_application(self, connection: BoundedAsyncConnection, answers: Answers) -> None:
        """Release a connection of a handler; close it unless it is idle. ``answers`` limit its silence now.

        The session state that a handler has left, such as settings, locks and temporary tables, must not reach another
        handler.
        """
        reset_handler_settings(connection)
        connection.answers = answers
        is_clean = False
        try:
            if not connection.closed and connection.info.transaction_status is TransactionStatus.IDLE:
                with suppress(psycopg.Error):
                    await connection.execute("DISCARD ALL")
                    is_clean = True
        finally:
            with self._changed:
                stays_open = is_clean and self._can_stay_open(len(self._idle_application_connections))
                if stays_open:
                    self._idle_application_connections.append(connection)
                else:
                    self._open_count -= 1
                    self._application_count -= 1
                self._changed.notify_all()
            if not stays_open:
                with suppress(psycopg.Error):
                    await connection.close()

    def _count_closed_for_application(self) -> None:
        with self._changed:
            self._open_count -= 1
            self._application_count -= 1
            self._changed.notify_all()

    def reset_after_fork(self) -> None:
        """Forget all connections in the child of a fork, because the parent uses them."""
        # A connection that is garbage-collected while open warns.
        forks.prevent_destruction([*self._idle, *self._idle_application_connections])
        # The sessions of the child have their own mark.
        self.address, self.abandoned = address_of(self._url), AbandonedSessions()
        self._changed = threading.Condition()
        self._idle, self._idle_application_connections = [], []
        self._open_count = self._application_count = self._brief_count = 0


def reset_handler_settings(connection: BoundedAsyncConnection) -> None:
    """Undo settings of a handler for rows and statements, because our own statements read tuples.

    No statement is prepared, even if a call asks for it. The session has the planner's usual settings, and must not
    keep a plan that was made while the tables were small (ADR 37).
    """
    connection.row_factory, connection.cursor_factory = tuple_row, psycopg.AsyncCursor
    connection.prepare_threshold = None


def _is_quiet(connection: Bounded) -> bool:
    """Return whether an idle connection is open and has no input.

    To an idle client a server sends only that it closes.
    """
    if connection.closed:
        return False
    try:
        readable, _, _ = select.select([connection.fileno()], [], [], 0)
    except (OSError, ValueError, psycopg.Error):
        return False
    return not readable
