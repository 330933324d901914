"""The listener thread, with its own connection: it receives notifications, and keeps the claims of this process alive.

Each process with claims has a number, and this connection has an advisory lock on the number. When the process or its
machine dies, the server closes the connection and releases the lock. The next process that checks releases the claims.
No clock is involved.

A frozen process keeps its connections and claims. So each process updates the row of its number from time to time. If a
process does not do so within the time that it promised, other processes end its sessions. From then on it counts as
dead, and has no claims when it wakes. Source: ADR 0007, ADR 0054.
"""

from __future__ import annotations

import logging
import os
import platform
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar
from weakref import WeakSet

import psycopg

from postdate.backends.postgres.answering import AbandonedSessions, BoundedConnection
from postdate.backends.postgres.errors import translate
from postdate.backends.postgres.expiring import Reaper
from postdate.backends.postgres.names import SchemaNames, sql
from postdate.backends.postgres.sessions import mark_condition
from postdate.clock import steady_seconds
from postdate.errors import ConfigurationError, PostdateError, StoreUnavailable, StoreUnreachable
from postdate.runtime import forks
from postdate.runtime.resource import Resource

Connection = psycopg.Connection[Any]
Callback = Callable[[str, int, int], None]
"""Called with topic, number and value of a notification. Topic ``lost``: notifications may have been missed."""

_CHECK_INTERVAL_SECONDS: Final = 1.0  # the longest pause between checks for dead processes
_RECONNECT_AFTER_SECONDS: Final = (0.05, 0.2, 0.5, 1.0)  # after each failure in a row, then the last one
_START_WITHIN_SECONDS: Final = 15.0  # how long a caller waits for a number
_STOP_WITHIN_SECONDS: Final = 6.0
"""Enough time to release the claims, or to notice that the server is silent. After it the thread is not waited for."""

HOLDS_AT_MOST: Final = timedelta(seconds=60)  # default of ``holds_at_most``
_MAX_HEARTBEAT_INTERVAL_SECONDS: Final = 5.0  # or a sixth of ``holds_at_most``, if that is shorter
_OBSERVATION_GAP_SECONDS: Final = 3.0
"""If a process checks others later than planned by this time, it was frozen itself, and starts the observation again.
"""

_EXPIRED: Final = "expired messages cannot be removed from the queues, and stay until they are received"

# Ends also the session that has the lock of the number, as the name of that session may have been changed.
_TERMINATE_SESSIONS: Final = sql(f"""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND ({mark_condition("application_name", "%(mark)s::text")}
        OR pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted
            AND classid = %(class)s::integer::oid AND objid::bigint = %(holder)s
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())))""")

T = TypeVar("T")

log = logging.getLogger("postdate.postgres")

_LISTENERS: Final = WeakSet["Listener"]()


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """The heartbeats by which other processes know that a process is alive.

    Args:
        mark: the end of the name of each session of the process.
        holds_at_most: the process loses its claims if it sends no heartbeat for this long; above 0, else
            `ConfigurationError`.
    """

    mark: str
    holds_at_most: timedelta

    def __post_init__(self) -> None:
        if self.holds_at_most <= timedelta(0):
            raise ConfigurationError(f"holds_at_most must be above 0, not {self.holds_at_most}")

    @property
    def interval_seconds(self) -> float:
        return min(_MAX_HEARTBEAT_INTERVAL_SECONDS, self.holds_at_most.total_seconds() / 6)


def holders_of_process(names: SchemaNames) -> set[int]:
    """Return the numbers of this process in schemas with these names, on any server."""
    return {each.number for each in list(_LISTENERS) if each.names == names and each.number is not None}


def live_holders_query(names: SchemaNames) -> str:
    """Return the query for the numbers whose connections are open."""
    return (
        "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted "
        f"AND classid = ({names.lock_class})::integer::oid "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )


class Listener:
    """One listener thread. See the module.

    Args:
        connect: opens its connection, with short deadlines for locks and answers.
        abandoned: abandoned sessions of this process; this thread ends them.
        names: of the schema.
        reaper: removes expired messages. This thread runs it, as it lives as long as its process works.
        life: of this process.
        resource: of the database.
    """

    def __init__(
        self,
        connect: Callable[[], BoundedConnection],
        abandoned: AbandonedSessions,
        names: SchemaNames,
        reaper: Reaper,
        life: HeartbeatSettings,
        resource: Resource,
    ) -> None:
        self._resource = resource
        self._connect = connect  # called in the thread
        self._abandoned = abandoned
        self.names = names
        self._reaper = reaper
        self._life = life
        self._heartbeats = ObservedHeartbeats()  # of other processes; used by the thread only
        _LISTENERS.add(self)
        self._callbacks: list[Callback] = []  # changed in any thread, called in the thread; guarded by `_lock`
        self._lock = forks.lock()
        # A byte in this pipe ends the waiting of the thread.
        self._wake_reader, self._wake_writer = os.pipe()
        self._pipe_users = 2  # the thread and `stop`; the last one closes the pipe. Guarded by `_lock`
        self._is_stopping = False  # set by `stop`, read by the thread
        self._is_renewing = False  # set by `renew_holder` in any thread, reset by the thread
        self._is_lost = False
        """Whether the thread waits for another connection after a failure. Guarded by ``_lock``."""
        self._ready = threading.Event()  # set when there is a number, or an attempt to connect has failed
        self.number: int | None = None
        """The number under which this process claims messages now; ``None`` without a connection.

        Written by the thread, guarded by ``_lock``.
        """
        self._failure: PostdateError | None = None  # of the last attempt to connect; guarded by `_lock`
        self._delivers_from = set[int]()  # the numbers of stores; guarded by `_lock`
        self._receives = set[str]()  # the queues of receivers; guarded by `_lock`
        self._is_role_written = False  # whether the row of this process has the latest of these two
        self._live_holders_query = live_holders_query(names)
        self._logged = set[str]()  # failures that were logged already, so that each is logged once
        self._thread = threading.Thread(target=self._run, name="postdate-postgres-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the connection, without waiting for a silent server.

        A thread that has lost its connection has no claims, so this does not wait for it. Such a thread ends by itself,
        and closes a new connection without using it.
        """
        with self._lock:
            self._is_stopping, is_lost = True, self._is_lost
        os.write(self._wake_writer, b"x")
        self._thread.join(0 if is_lost else _STOP_WITHIN_SECONDS)
        self._close_pipe()

    def _close_pipe(self) -> None:
        with self._lock:
            self._pipe_users -= 1
            if not self._pipe_users:
                os.close(self._wake_reader)
                os.close(self._wake_writer)

    def detach_after_fork(self) -> None:
        """Forget the listener in the child of a fork: the thread and its number belong to the parent."""
        _LISTENERS.discard(self)
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        forks.prevent_destruction(self)

    def renew_holder(self) -> None:
        """Get another number, which releases all claims under the current one.

        Called when an adapter is closed that may have left claims. The other adapters lose their claims, too, as after
        a loss of the connection, and claim those messages again.
        """
        self._is_renewing = True
        os.write(self._wake_writer, b"r")

    def listen(self, callback: Callback) -> Callable[[], None]:
        """Register ``callback``, called in the listener thread for each notification; return a function to stop."""
        with self._lock:
            self._callbacks.append(callback)

        def stop() -> None:
            with self._lock, suppress(ValueError):
                self._callbacks.remove(callback)

        return stop

    def wait_for_holder(self) -> int:
        """Return the number under which this process claims messages now. Waits for the first connection.

        Raises:
            StoreUnavailable: there is no connection at the moment.
        """
        is_ready = self._ready.wait(_START_WITHIN_SECONDS)
        with self._lock:
            if not is_ready or self.number is None:
                raise self._failure or StoreUnreachable("the connection to PostgreSQL that holds messages is gone")
            return self.number

    def add_role(self, *, delivers_from: int | None = None, receives: str | None = None) -> None:
        """Tell other processes that this one delivers from a store, whose number is given, or receives from a queue."""
        with self._lock:
            self._delivers_from |= set() if delivers_from is None else {delivers_from}
            self._receives |= set() if receives is None else {receives}
            self._is_role_written = False
        os.write(self._wake_writer, b"i")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ready.set()  # callers of `wait_for_holder` must not wait: there will be no number any more
            self._close_pipe()

    def _serve(self) -> None:
        failures = 0
        calls = self._resource.calls("no connection to PostgreSQL for notifications", log, logging.WARNING)
        while not self._is_stopping:
            try:
                with self._open_connection(is_retry=failures > 0) as connection:
                    if self._is_stopping:  # `stop` may have returned already, so get no number any more
                        return
                    self._register_holder(connection)
                    failures = 0
                    calls.report_success(steady_seconds())
                    self._notify_callbacks("lost", 0, 0)
                    self._serve_connection(connection)
            except Exception as error:  # noqa: BLE001 - without this thread the process would lose all claims
                failure = _translate(error)
                with self._lock:
                    self._failure, self.number = failure, None
                self._ready.set()
                calls.report_failure(failure, steady_seconds())
                self._sleep(_RECONNECT_AFTER_SECONDS[min(failures, len(_RECONNECT_AFTER_SECONDS) - 1)])
                failures += 1

    def _open_connection(self, *, is_retry: bool) -> BoundedConnection:
        with self._lock:
            self._is_lost = is_retry
        try:
            return self._connect()
        finally:
            with self._lock:
                self._is_lost = False

    def _sleep(self, seconds: float) -> None:
        if select.select([self._wake_reader], [], [], seconds)[0]:
            os.read(self._wake_reader, 1024)

    def _register_holder(self, connection: Connection) -> None:
        """Get a number, lock it, write the row of this process, and start to listen."""
        names, self._is_renewing = self.names, False
        row = connection.execute(
            "SELECT number, pg_advisory_lock(%s, number) FROM (SELECT nextval(%s)::integer AS number) AS n",
            (names.lock_class, names.name_of("holder_number").replace("%%", "%")),
        ).fetchone()
        assert row is not None
        connection.execute(
            sql(
                f"INSERT INTO {names.name_of('holder')} (holder, pid, machine, started_at, mark, seen, holds_at_most) "
                f"VALUES (%s, %s, %s, now(), %s, clock_timestamp(), %s) ON CONFLICT (holder) DO UPDATE SET "
                f"(pid, machine, mark, seen, holds_at_most, ahead) = "
                f"(excluded.pid, excluded.machine, excluded.mark, excluded.seen, excluded.holds_at_most, NULL)"
            ),
            (row[0], os.getpid(), platform.node(), self._life.mark, self._life.holds_at_most),
        )
        # The driver calls this handler with notifications that arrive in the answer to a statement.
        connection.add_notify_handler(lambda notification: self._handle_notification(notification.payload))
        connection.execute(sql(f"LISTEN {names.channel}"))
        with self._lock:
            self._is_role_written = False
            self.number, self._failure = row[0], None
        self._ready.set()

    def _serve_connection(self, connection: BoundedConnection) -> None:
        # True at first, so that a process that lives only for a moment, such as a command that sends, reaps once.
        socket, checked_at, more_to_reap = connection.fileno(), steady_seconds(), True
        heartbeat_at = checked_at
        interval_seconds = min(_CHECK_INTERVAL_SECONDS, self._life.interval_seconds)
        while not (self._is_stopping or self._is_renewing):
            readable, _, _ = select.select(
                [socket, self._wake_reader], [], [], 0.0 if more_to_reap else interval_seconds
            )
            if self._wake_reader in readable:
                os.read(self._wake_reader, 1024)
            if socket in readable:
                connection.pgconn.consume_input()
                if connection.pgconn.status != psycopg.pq.ConnStatus.OK:
                    raise psycopg.OperationalError("the server closed the connection")
            if not self._is_role_written:
                self._run_step(connection, "this process cannot be registered", self._write_role)
            if steady_seconds() - heartbeat_at >= self._life.interval_seconds:
                heartbeat_at = steady_seconds()
                self._run_step(connection, "the heartbeat of this process cannot be written", self._write_heartbeat)
                self._run_step(connection, "the heartbeats of processes cannot be read", self._terminate_frozen)
            if steady_seconds() - checked_at >= interval_seconds:
                checked_at = steady_seconds()
                if self._abandoned:
                    self._abandoned.terminate(connection)
                self._run_step(
                    connection, "claims of processes that have ended cannot be released", self._release_dead_holders
                )
            more_to_reap = self._run_step(connection, _EXPIRED, self._reaper.reap_in_turn) or False
            self._handle_notifications(connection)
        # The server may be silent here, too: do not wait.
        if self._is_stopping and self._abandoned.is_distrusted(connection):
            self._abandoned.add(connection, silent=False)
            return
        previous = self.number
        if self._is_renewing:  # callers of `wait_for_holder` wait for the next number
            self._ready.clear()
            with self._lock:
                self.number = None
        # Claims that could not be released: no other code releases them later.
        self._release_holders(connection, [previous])

    def _run_step(self, connection: Connection, failure_text: str, step: Callable[[Connection], T]) -> T | None:
        """Run a periodic step. If it fails and the connection stays open, log that once; it is retried later."""
        try:
            return step(connection)
        except psycopg.Error as error:
            if connection.closed:
                raise
            if failure_text not in self._logged:
                self._logged.add(failure_text)
                log.warning("%s: %s", failure_text, error)
            return None

    def _handle_notifications(self, connection: Connection) -> None:
        """Handle notifications, including any that arrived with an answer, after which the socket is not readable."""
        while (notification := connection.pgconn.notifies()) is not None:
            self._handle_notification(notification.extra.decode(errors="replace"))

    def _handle_notification(self, payload: str) -> None:
        try:
            topic, number, value = payload.split(" ")
            notification = topic, int(number), int(value)
            self._notify_callbacks(*notification)
        except (ValueError, OverflowError):  # any session of the database can send notifications
            log.warning("a notification that is none of ours: %.80r", payload)

    def _notify_callbacks(self, topic: str, number: int, value: int) -> None:
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(topic, number, value)

    def _write_role(self, connection: Connection) -> None:
        with self._lock:
            self._is_role_written = True
            stores = sorted(self._delivers_from)
            values = (bool(stores), stores, sorted(self._receives), self.number)
        holder = self.names.name_of("holder")
        connection.execute(
            sql(f"UPDATE {holder} SET delivers = %s, delivers_from = %s, receives = %s WHERE holder = %s"), values
        )

    def _write_heartbeat(self, connection: Connection) -> None:
        connection.execute(
            sql(f"UPDATE {self.names.name_of('holder')} SET seen = clock_timestamp() WHERE holder = %s"),
            (self.number,),
        )

    def _terminate_frozen(self, connection: Connection) -> None:
        """End the sessions of processes without a heartbeat in the time that they promised. Then they count as dead.

        The time is measured by this process's monotonic clock, so no process looks frozen if the server's clock is set.
        """
        find = sql(
            f"SELECT holder, mark, seen::text, extract(epoch FROM holds_at_most)::float8, pid, machine "
            f"FROM {self.names.name_of('holder')} "
            f"WHERE holds_at_most IS NOT NULL AND holder <> %s AND holder IN ({self._live_holders_query})"
        )
        rows = connection.execute(find, (self.number,)).fetchall()
        heartbeats = {holder: (promised, seconds) for holder, _, promised, seconds, _, _ in rows}
        silent = self._heartbeats.find_silent(
            heartbeats, steady_seconds(), self._life.interval_seconds + _OBSERVATION_GAP_SECONDS
        )
        # If the process sends heartbeats under another number, end only the session that has the silent number.
        live_marks = {self._life.mark, *(mark for holder, mark, *_ in rows if holder not in silent)}
        for holder, mark, _, seconds, pid, machine in rows:
            if holder not in silent:
                continue
            if (process_text := f"process {pid} on {machine} (number {holder})") not in self._logged:
                self._logged.add(process_text)
                log.warning(
                    "%s has sent no heartbeat for %g s: its sessions are ended and its claims released",
                    process_text,
                    seconds,
                )
            values = {"mark": None if mark in live_marks else mark, "class": self.names.lock_class, "holder": holder}
            failure_text = (
                f"sessions of {process_text} cannot be ended; only their own role, or a member of that role, can "
                f"end them"
            )
            self._run_step(
                connection,
                failure_text,
                lambda connection, values=values: connection.execute(_TERMINATE_SESSIONS, values),
            )

    def _release_dead_holders(self, connection: Connection) -> None:
        """Release the messages of numbers without a lock. Each process does this for all processes.

        Numbers are also read from messages: a process may have claimed more after the row of its number was deleted.
        """
        holder_table = self.names.name_of("holder")
        numbers_in_use = [_holders_query(each) for each, _ in self._tables(connection)]
        holders = " UNION ".join([f"SELECT holder FROM {holder_table}", *numbers_in_use])
        find = sql(f"SELECT holder FROM ({holders}) AS h WHERE holder NOT IN ({self._live_holders_query})")
        if dead := [holder for (holder,) in connection.execute(find, ())]:
            self._release_holders(connection, dead)

    def _tables(self, connection: Connection) -> list[tuple[str, str]]:
        """Return the message tables that this role may change, each with what else an end of a claim sets in a row."""
        names = self.names
        stores = connection.execute(
            sql(
                f"SELECT name FROM {names.name_of('store')} WHERE coalesce(has_table_privilege("
                f"to_regclass(format('%%I.%%I', %s::text, name)), 'SELECT, UPDATE'), false) ORDER BY name"
            ),
            (names.schema,),
        )
        return [
            (names.name_of("queue_message"), ", unanswered = unanswered + 1"),
            *((names.name_of(name), ", attempt_at = due") for (name,) in stores),
        ]

    def _release_holders(self, connection: Connection, holders: list[int | None]) -> None:
        """End all claims under these numbers, table by table: a failure in one table must not stop the others.

        They are the numbers of dead processes, or of this one when it stops or takes another number.
        """
        names, released_count = self.names, 0
        for table, more_assignments in self._tables(connection):
            try:
                statement = sql(f"UPDATE {table} SET holder = NULL{more_assignments} WHERE holder = ANY(%s)")
                released_count += connection.execute(statement, (holders,)).rowcount
            except psycopg.Error as error:
                if connection.closed:
                    raise
                if table not in self._logged:
                    self._logged.add(table)
                    log.warning("claims of processes that have ended cannot be released in %s: %s", table, error)
        connection.execute(sql(f"DELETE FROM {names.name_of('holder')} WHERE holder = ANY(%s)"), (holders,))
        if released_count:
            connection.execute("SELECT pg_notify(%s, 'lost 0 0')", (names.channel,))


class ObservedHeartbeats:
    """The last heartbeat of each other process, and since when it is unchanged by this process's clock."""

    def __init__(self) -> None:
        self._since = dict[int, tuple[object, float]]()
        self._checked_at = float("-inf")

    def find_silent(
        self, heartbeats: Mapping[int, tuple[object, float]], now: float, max_gap_seconds: float
    ) -> set[int]:
        """Return the numbers whose heartbeat has been unchanged for too long.

        Args:
            heartbeats: for each number the current heartbeat, and how many seconds it may be unchanged.
            now: monotonic seconds.
            max_gap_seconds: seconds. If the last call was longer ago, the caller was frozen itself, and the observation
                starts again.
        """
        has_gap, self._checked_at = now - self._checked_at > max_gap_seconds, now
        previous = {} if has_gap else self._since
        self._since = {
            number: previous[number] if number in previous and previous[number][0] == shown else (shown, now)
            for number, (shown, _) in heartbeats.items()
        }
        return {number for number, (_, at_most) in heartbeats.items() if now - self._since[number][1] >= at_most}


def _holders_query(table: str) -> str:
    """Return the query for the numbers under which rows are claimed. It goes from one to the next in their index.

    ``DISTINCT`` would read an entry for each claimed row, in each process and every second.
    """
    return f"""(
        WITH RECURSIVE held AS (
            (SELECT holder FROM {table} WHERE holder IS NOT NULL ORDER BY holder LIMIT 1)
            UNION ALL
            SELECT (SELECT holder FROM {table} WHERE holder > held.holder ORDER BY holder LIMIT 1)
            FROM held WHERE held.holder IS NOT NULL)
        SELECT holder FROM held WHERE holder IS NOT NULL)"""


def _translate(error: Exception) -> PostdateError:
    if isinstance(error, PostdateError):
        return error
    if isinstance(error, psycopg.Error):
        return translate(error, "PostgreSQL")
    log.error("the thread for notifications failed, and continues", exc_info=error)
    return StoreUnavailable(f"PostgreSQL: {type(error).__name__}: {error}")
