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
from postdate.backends.postgres.sessions import carries
from postdate.clock import steady_seconds
from postdate.errors import ConfigurationError, PostdateError, StoreUnavailable, StoreUnreachable
from postdate.runtime import forks
from postdate.runtime.resource import Resource

Connection = psycopg.Connection[Any]
Callback = Callable[[str, int, int], None]
"""Called with topic, number and value of a notification. Topic ``lost``: notifications may have been missed."""

_LOOK_EVERY_SECONDS: Final = 1.0
_RECONNECT_AFTER_SECONDS: Final = (0.05, 0.2, 0.5, 1.0)
_START_WITHIN_SECONDS: Final = 15.0
_STOP_WITHIN_SECONDS: Final = 6.0
"""Enough time to release the claims, or to notice that the server is silent. After it the thread is not waited for."""

HOLDS_AT_MOST: Final = timedelta(seconds=60)
_SHOW_LIFE_AT_LEAST_EVERY_SECONDS: Final = 5.0
_LOST_SIGHT_SECONDS: Final = 3.0
"""If a process checks others later than planned by this time, it was frozen itself, and starts the observation again.
"""

_EXPIRED: Final = "what expires in the queues cannot be removed, and stays until received"

# Ends also the session that has the lock of the number, as the name of that session may have been changed.
_END_SESSIONS: Final = sql(f"""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND ({carries("application_name", "%(mark)s::text")}
        OR pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted
            AND classid = %(class)s::integer::oid AND objid::bigint = %(holder)s
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())))""")

T = TypeVar("T")

log = logging.getLogger("postdate.postgres")

_HERE: Final = WeakSet["Listener"]()


@dataclass(frozen=True, slots=True)
class Life:
    """The signs by which other processes know that a process lives.

    Args:
        mark: the end of the name of each session of the process.
        holds_at_most: the process loses its claims if it gives no sign of life for this long; above 0, else
            `ConfigurationError`.
    """

    mark: str
    holds_at_most: timedelta

    def __post_init__(self) -> None:
        if self.holds_at_most <= timedelta(0):
            raise ConfigurationError(f"holds_at_most must be above 0, not {self.holds_at_most}")

    @property
    def every_seconds(self) -> float:
        return min(_SHOW_LIFE_AT_LEAST_EVERY_SECONDS, self.holds_at_most.total_seconds() / 6)


def holders_here(names: SchemaNames) -> set[int]:
    """Return the numbers of this process in schemas with these names, on any server."""
    return {each.number for each in list(_HERE) if each.names == names and each.number is not None}


def living(names: SchemaNames) -> str:
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
        life: Life,
        resource: Resource,
    ) -> None:
        self._resource = resource
        self._connect, self._abandoned = connect, abandoned
        self.names, self._reaper, self._life = names, reaper, life
        self._watched = Watched()
        _HERE.add(self)
        self._callbacks: list[Callback] = []
        self._lock = forks.lock()
        self._waking, self._wake = os.pipe()
        self._users = 2
        self._stopping = self._renewing = False
        self._is_lost = False
        """Whether the thread waits for another connection after a failure. Guarded by ``_lock``."""
        self._ready = threading.Event()
        self._holder: int | None = None
        self._failure: PostdateError | None = None
        self._delivers, self._receives = False, set[str]()
        self._is_introduced = False
        self._living = living(names)
        self._complained = set[str]()
        self._thread = threading.Thread(target=self._run, name="postdate-postgres-listener", daemon=True)

    @property
    def number(self) -> int | None:
        """The number under which this process claims messages now; ``None`` without a connection."""
        return self._holder

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the connection, without waiting for a silent server.

        A thread that has lost its connection has no claims, so this does not wait for it. Such a thread ends by itself,
        and closes a new connection without using it.
        """
        with self._lock:
            self._stopping, lost = True, self._is_lost
        os.write(self._wake, b"x")
        self._thread.join(0 if lost else _STOP_WITHIN_SECONDS)
        self._close_pipe()

    def _close_pipe(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self._waking)
                os.close(self._wake)

    def leave_to_parent(self) -> None:
        """Forget the listener in the child of a fork: the thread and its number belong to the parent."""
        _HERE.discard(self)
        os.close(self._waking)
        os.close(self._wake)
        forks.keep_for_ever(self)

    def renew(self) -> None:
        """Take another number, which releases all claims under the current one.

        Called when an adapter is closed that may have left claims. The other adapters lose their claims, too, as after
        a loss of the connection, and claim those messages again.
        """
        self._renewing = True
        os.write(self._wake, b"r")

    def hear(self, callback: Callback) -> Callable[[], None]:
        """Register ``callback``, called in the listener thread for each notification; return a function to stop."""
        with self._lock:
            self._callbacks.append(callback)

        def stop() -> None:
            with self._lock, suppress(ValueError):
                self._callbacks.remove(callback)

        return stop

    def holder(self) -> int:
        """Return the number under which this process claims messages now. Waits for the first connection.

        Raises:
            StoreUnavailable: there is no connection at the moment.
        """
        is_ready = self._ready.wait(_START_WITHIN_SECONDS)
        with self._lock:
            if not is_ready or self._holder is None:
                raise self._failure or StoreUnreachable("the connection to PostgreSQL that holds messages is gone")
            return self._holder

    def introduce(self, *, delivers: bool = False, receives: str | None = None) -> None:
        with self._lock:
            self._delivers |= delivers
            self._receives |= set() if receives is None else {receives}
            self._is_introduced = False
        os.write(self._wake, b"i")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ready.set()  # callers of `holder` must not wait: there will be no number any more
            self._close_pipe()

    def _serve(self) -> None:
        failures = 0
        calls = self._resource.calls("no connection to PostgreSQL that hears of stored messages", log, logging.WARNING)
        while not self._stopping:
            try:
                with self._connected(again=failures > 0) as connection:
                    if self._stopping:  # `stop` may have returned already, so take no number any more
                        return
                    self._present(connection)
                    failures = 0
                    calls.succeeded(steady_seconds())
                    self._notify_callbacks("lost", 0, 0)
                    self._listen(connection)
            except Exception as error:  # noqa: BLE001 - without this thread the process would lose all claims
                failure = _translated(error)
                with self._lock:
                    self._failure, self._holder = failure, None
                self._ready.set()
                calls.failed(failure, steady_seconds())
                self._pause(_RECONNECT_AFTER_SECONDS[min(failures, len(_RECONNECT_AFTER_SECONDS) - 1)])
                failures += 1

    def _connected(self, *, again: bool) -> BoundedConnection:
        with self._lock:
            self._is_lost = again
        try:
            return self._connect()
        finally:
            with self._lock:
                self._is_lost = False

    def _pause(self, seconds: float) -> None:
        if select.select([self._waking], [], [], seconds)[0]:
            os.read(self._waking, 1024)

    def _present(self, connection: Connection) -> None:
        """Take a number, lock it, write the row of this process, and start to listen."""
        names, self._renewing = self.names, False
        row = connection.execute(
            "SELECT number, pg_advisory_lock(%s, number) FROM (SELECT nextval(%s)::integer AS number) AS n",
            (names.lock_class, names.of("holder_number").replace("%%", "%")),
        ).fetchone()
        assert row is not None
        connection.execute(
            sql(
                f"INSERT INTO {names.of('holder')} (holder, pid, machine, started_at, mark, seen, holds_at_most) "
                f"VALUES (%s, %s, %s, now(), %s, clock_timestamp(), %s) ON CONFLICT (holder) DO UPDATE SET "
                f"(pid, machine, mark, seen, holds_at_most, ahead) = "
                f"(excluded.pid, excluded.machine, excluded.mark, excluded.seen, excluded.holds_at_most, NULL)"
            ),
            (row[0], os.getpid(), platform.node(), self._life.mark, self._life.holds_at_most),
        )
        # The driver calls this handler with notifications that arrive in the answer to a statement.
        connection.add_notify_handler(lambda notification: self._notice(notification.payload))
        connection.execute(sql(f"LISTEN {names.channel}"))
        with self._lock:
            self._is_introduced = False
            self._holder, self._failure = row[0], None
        self._ready.set()

    def _listen(self, connection: BoundedConnection) -> None:
        # True at first, so that a process that lives only for a moment, such as a command that sends, reaps once.
        socket, looked_at, more_to_reap = connection.fileno(), steady_seconds(), True
        seen_at = looked_at
        look_every = min(_LOOK_EVERY_SECONDS, self._life.every_seconds)
        while not (self._stopping or self._renewing):
            readable, _, _ = select.select([socket, self._waking], [], [], 0.0 if more_to_reap else look_every)
            if self._waking in readable:
                os.read(self._waking, 1024)
            if socket in readable:
                connection.pgconn.consume_input()
                if connection.pgconn.status != psycopg.pq.ConnStatus.OK:
                    raise psycopg.OperationalError("the server closed the connection")
            if not self._is_introduced:
                self._try(connection, "who this process is cannot be written down", self._introduce)
            if steady_seconds() - seen_at >= self._life.every_seconds:
                seen_at = steady_seconds()
                self._try(connection, "this process cannot show that it lives", self._show_life)
                self._try(connection, "who lives cannot be read", self._end_the_frozen)
            if steady_seconds() - looked_at >= look_every:
                looked_at = steady_seconds()
                if self._abandoned:
                    self._abandoned.end(connection)
                self._try(connection, "what dead processes hold cannot be freed", self._free_what_the_dead_hold)
            more_to_reap = self._try(connection, _EXPIRED, self._reaper.reap_in_turn) or False
            self._hear(connection)
        if self._stopping and self._abandoned.distrusts(connection):  # the server may be silent here, too: do not wait
            self._abandoned.add(connection, silent=False)
            return
        previous = self._holder
        if self._renewing:  # callers of `holder` wait for the next number
            self._ready.clear()
            with self._lock:
                self._holder = None
        self._free(connection, [previous])  # claims that could not be released: no other code releases them later

    def _try(self, connection: Connection, what: str, step: Callable[[Connection], T]) -> T | None:
        """Run a periodic step. If it fails and the connection stays open, log that once; it is retried later."""
        try:
            return step(connection)
        except psycopg.Error as error:
            if connection.closed:
                raise
            if what not in self._complained:
                self._complained.add(what)
                log.warning("%s: %s", what, error)
            return None

    def _hear(self, connection: Connection) -> None:
        """Handle notifications, also those that arrived with an answer, after which the socket is not readable."""
        while (notification := connection.pgconn.notifies()) is not None:
            self._notice(notification.extra.decode(errors="replace"))

    def _notice(self, payload: str) -> None:
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

    def _introduce(self, connection: Connection) -> None:
        with self._lock:
            self._is_introduced = True
            what = (self._delivers, sorted(self._receives), self._holder)
        connection.execute(
            sql(f"UPDATE {self.names.of('holder')} SET delivers = %s, receives = %s WHERE holder = %s"), what
        )

    def _show_life(self, connection: Connection) -> None:
        connection.execute(
            sql(f"UPDATE {self.names.of('holder')} SET seen = clock_timestamp() WHERE holder = %s"), (self._holder,)
        )

    def _end_the_frozen(self, connection: Connection) -> None:
        """End the sessions of processes without a sign of life in the time that they promised. Then they count as dead.

        The time is measured by this process's monotonic clock, so no process looks frozen if the server's clock is set.
        """
        find = sql(
            f"SELECT holder, mark, seen::text, extract(epoch FROM holds_at_most)::float8, pid, machine "
            f"FROM {self.names.of('holder')} "
            f"WHERE holds_at_most IS NOT NULL AND holder <> %s AND holder IN ({self._living})"
        )
        rows = connection.execute(find, (self._holder,)).fetchall()
        seen = {holder: (promised, seconds) for holder, _, promised, seconds, _, _ in rows}
        silent = self._watched.silent(seen, steady_seconds(), self._life.every_seconds + _LOST_SIGHT_SECONDS)
        # If the process gives signs of life under another number, end only the session that has the silent number.
        lively = {self._life.mark, *(mark for holder, mark, *_ in rows if holder not in silent)}
        for holder, mark, _, seconds, pid, machine in rows:
            if holder not in silent:
                continue
            if (who := f"process {pid} on {machine} (number {holder})") not in self._complained:
                self._complained.add(who)
                log.warning(
                    "%s has shown no life for %g s: its sessions are ended, what it holds is free", who, seconds
                )
            values = {"mark": None if mark in lively else mark, "class": self.names.lock_class, "holder": holder}
            what = f"sessions of {who} cannot be ended; that needs its role, or one that is a member of it"
            self._try(connection, what, lambda connection, values=values: connection.execute(_END_SESSIONS, values))

    def _free_what_the_dead_hold(self, connection: Connection) -> None:
        """Release the messages of numbers without a lock. Each process does this for all processes.

        Numbers are also read from messages: a process may have claimed more after the row of its number was deleted.
        """
        holder_table = self.names.of("holder")
        numbers_in_use = [_holders_in(each) for each, _ in self._tables(connection)]
        holders = " UNION ".join([f"SELECT holder FROM {holder_table}", *numbers_in_use])
        find = sql(f"SELECT holder FROM ({holders}) AS h WHERE holder NOT IN ({self._living})")
        if dead := [holder for (holder,) in connection.execute(find, ())]:
            self._free(connection, dead)

    def _tables(self, connection: Connection) -> list[tuple[str, str]]:
        """Return the message tables that this role may change, each with more SQL for its SET clause."""
        names = self.names
        stores = connection.execute(
            sql(
                f"SELECT name FROM {names.of('store')} WHERE coalesce(has_table_privilege("
                f"to_regclass(format('%%I.%%I', %s::text, name)), 'SELECT, UPDATE'), false) ORDER BY name"
            ),
            (names.schema,),
        )
        return [
            (names.of("queue_message"), ", unanswered = unanswered + 1"),
            *((names.of(name), ", attempt_at = due") for (name,) in stores),
        ]

    def _free(self, connection: Connection, dead: list[int | None]) -> None:
        """Release the messages of some numbers, table by table: a failure in one table must not stop the others."""
        names, freed = self.names, 0
        for table, more in self._tables(connection):
            try:
                statement = sql(f"UPDATE {table} SET holder = NULL{more} WHERE holder = ANY(%s)")
                freed += connection.execute(statement, (dead,)).rowcount
            except psycopg.Error as error:
                if connection.closed:
                    raise
                if table not in self._complained:
                    self._complained.add(table)
                    log.warning("what dead processes hold in %s cannot be freed: %s", table, error)
        connection.execute(sql(f"DELETE FROM {names.of('holder')} WHERE holder = ANY(%s)"), (dead,))
        if freed:
            connection.execute("SELECT pg_notify(%s, 'lost 0 0')", (names.channel,))


class Watched:
    """The last sign of life of each other process, and since when it is unchanged by this process's clock."""

    def __init__(self) -> None:
        self._since = dict[int, tuple[object, float]]()
        self._looked_at = float("-inf")

    def silent(self, seen: Mapping[int, tuple[object, float]], now: float, within: float) -> set[int]:
        """Return the numbers whose sign has been unchanged for too long.

        Args:
            seen: for each number the current sign, and how many seconds it may be unchanged.
            now: monotonic seconds.
            within: seconds. If the last call was longer ago, the caller was frozen itself, and the observation starts
                again.
        """
        lost_sight, self._looked_at = now - self._looked_at > within, now
        before = {} if lost_sight else self._since
        self._since = {
            number: before[number] if number in before and before[number][0] == shown else (shown, now)
            for number, (shown, _) in seen.items()
        }
        return {number for number, (_, at_most) in seen.items() if now - self._since[number][1] >= at_most}


def _holders_in(table: str) -> str:
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


def _translated(error: Exception) -> PostdateError:
    if isinstance(error, PostdateError):
        return error
    if isinstance(error, psycopg.Error):
        return translate(error, "PostgreSQL")
    log.error("the thread that hears of stored messages failed, and goes on", exc_info=error)
    return StoreUnavailable(f"PostgreSQL: {type(error).__name__}: {error}")
