"""A connection with a thread of its own: it hears the wake-ups of others, and lives as long as what this process holds.

Every holder of messages has a number and an advisory lock on it, held by this connection. When the process dies, or its
machine, the server closes the connection, and with it the lock is gone: whoever looks next frees what was held. No
clock is involved. Source: ADR 0007.
"""

from __future__ import annotations

import logging
import os
import platform
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

import psycopg

from postdate.errors import PostdateError, StoreUnavailable, StoreUnreachable
from postdate.outage_log import OutageLog
from postdate.postgres.errors import translate
from postdate.postgres.expiring import Reaper
from postdate.postgres.names import Names, sql

Connection = psycopg.Connection[Any]
Heard = Callable[[str, int, int], None]
"""Called with topic, number and value of a notification; topic ``lost`` means that some may have been missed."""

_LOOK_EVERY_SECONDS: Final = 1.0
_RECONNECT_AFTER_SECONDS: Final = (0.05, 0.2, 0.5, 1.0)
_START_WITHIN_SECONDS: Final = 15.0

_EXPIRED: Final = "(expired)"
"""What is complained of once, as tables are by their names, which are quoted."""

log = logging.getLogger("postdate.postgres")

_HERE: Final = WeakSet["Listener"]()


def holders_here(names: Names) -> set[int]:
    """Return the numbers under which this process holds messages in such a schema, on whatever server."""
    return {each.number for each in list(_HERE) if each.names == names and each.number is not None}


class Listener:
    """One thread. See the module.

    Args:
        connect: opens its connection.
        names: of the schema.
        reaper: of what expires in the queues; the thread has the time for it, and lives as long as its process works.
    """

    def __init__(self, connect: Callable[[], Connection], names: Names, reaper: Reaper) -> None:
        self._connect, self._names, self._reaper = connect, names, reaper
        _HERE.add(self)
        self._ears: list[Heard] = []
        self._lock = threading.Lock()
        self._waking, self._wake = os.pipe()
        self._stopping = False
        self._ready = threading.Event()
        self._holder: int | None = None
        self._failure: PostdateError | None = None
        self._delivers, self._receives = False, set[str]()
        self._told = False
        self._living = (
            "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted "
            f"AND classid = ({names.lock_class})::integer::oid "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        self._complained = set[str]()
        self._thread = threading.Thread(target=self._run, name="postdate-postgres-listener", daemon=True)

    @property
    def names(self) -> Names:
        """Of the schema."""
        return self._names

    @property
    def number(self) -> int | None:
        """The number under which this process holds messages now, if any."""
        return self._holder

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the connection."""
        self._stopping = True
        os.write(self._wake, b"x")
        self._thread.join()
        os.close(self._waking)
        os.close(self._wake)

    def hear(self, heard: Heard) -> Callable[[], None]:
        """Have ``heard`` called, in the thread, for each notification; return the way to stop that."""
        with self._lock:
            self._ears.append(heard)

        def stop() -> None:
            with self._lock, suppress(ValueError):
                self._ears.remove(heard)

        return stop

    def holder(self) -> int:
        """Return the number under which this process holds messages now; blocking.

        Raises:
            StoreUnavailable: there is no connection at the moment.
        """
        if not self._ready.wait(_START_WITHIN_SECONDS) or self._holder is None:
            raise self._failure or StoreUnreachable("the connection to PostgreSQL that holds messages is gone")
        return self._holder

    def introduce(self, *, delivers: bool = False, receives: str | None = None) -> None:
        """Say what this process does, for operators."""
        with self._lock:
            self._delivers |= delivers
            self._receives |= set() if receives is None else {receives}
            self._told = False
        os.write(self._wake, b"i")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures, what = 0, "no connection to PostgreSQL that hears of stored messages"
        outage = OutageLog(log, what, "PostgreSQL is", logging.WARNING)
        while not self._stopping:
            try:
                with self._connect() as connection:
                    self._present(connection)
                    failures = 0
                    outage.succeeded(time.monotonic())
                    self._tell("lost", 0, 0)
                    self._listen(connection)
            except Exception as error:  # noqa: BLE001 - without this thread nothing that we hold would be ours
                self._failure = _as_ours(error)
                self._holder = None
                self._ready.set()
                outage.failed(self._failure, time.monotonic())
                self._pause(_RECONNECT_AFTER_SECONDS[min(failures, len(_RECONNECT_AFTER_SECONDS) - 1)])
                failures += 1

    def _pause(self, seconds: float) -> None:
        if select.select([self._waking], [], [], seconds)[0]:
            os.read(self._waking, 1024)

    def _present(self, connection: Connection) -> None:
        """Take a number, lock it, say who we are, and listen."""
        names = self._names
        row = connection.execute(
            "SELECT number, pg_advisory_lock(%s, number) FROM (SELECT nextval(%s)::integer AS number) AS n",
            (names.lock_class, names.of("holder_number").replace("%%", "%")),
        ).fetchone()
        assert row is not None
        connection.execute(
            sql(
                f"INSERT INTO {names.of('holder')} (holder, pid, machine, started_at) VALUES (%s, %s, %s, now()) "
                f"ON CONFLICT (holder) DO UPDATE SET pid = excluded.pid, machine = excluded.machine"
            ),
            (row[0], os.getpid(), platform.node()),
        )
        # What comes in the middle of an answer to a statement of ours, the driver gives to whoever has asked for it.
        connection.add_notify_handler(lambda notification: self._notice(notification.payload))
        connection.execute(sql(f"LISTEN {names.channel}"))
        self._told = False
        self._holder = row[0]
        self._failure = None
        self._ready.set()

    def _listen(self, connection: Connection) -> None:
        # Also whoever lives for a moment only, as a command that sends, looks once.
        socket, looked_at, more_to_reap = connection.fileno(), time.monotonic(), True
        while not self._stopping:
            patience = 0.0 if more_to_reap else _LOOK_EVERY_SECONDS
            readable, _, _ = select.select([socket, self._waking], [], [], patience)
            if self._waking in readable:
                os.read(self._waking, 1024)
            if socket in readable:
                connection.pgconn.consume_input()
                if connection.pgconn.status != psycopg.pq.ConnStatus.OK:
                    raise psycopg.OperationalError("the server closed the connection")
            if not self._told:
                self._introduce(connection)
            if time.monotonic() - looked_at >= _LOOK_EVERY_SECONDS:
                looked_at = time.monotonic()
                self._free_what_the_dead_hold(connection)
            more_to_reap = self._reap(connection)
            self._hear(connection)
        self._free(connection, [self._holder])  # whatever could not be given back: nobody looks for it after this

    def _reap(self, connection: Connection) -> bool:
        """Take out of the queues what has expired; return whether there is more. Whoever may not do it leaves it."""
        try:
            return self._reaper.reap_in_turn(connection)
        except psycopg.Error as error:
            if connection.closed:
                raise
            if _EXPIRED not in self._complained:
                self._complained.add(_EXPIRED)
                log.warning("what expires in the queues cannot be removed, and stays until received: %s", error)
            return False

    def _hear(self, connection: Connection) -> None:
        """Take note of what has come, also behind the answer to a statement of ours: nothing else may wake us."""
        while (notification := connection.pgconn.notifies()) is not None:
            self._notice(notification.extra.decode(errors="replace"))

    def _notice(self, payload: str) -> None:
        try:
            topic, number, value = payload.split(" ")
            said = topic, int(number), int(value)
            self._tell(*said)
        except (ValueError, OverflowError):  # anybody can notify anybody
            log.warning("a notification that is none of ours: %.80r", payload)

    def _tell(self, topic: str, number: int, value: int) -> None:
        with self._lock:
            ears = list(self._ears)
        for heard in ears:
            heard(topic, number, value)

    def _introduce(self, connection: Connection) -> None:
        with self._lock:
            self._told = True
            what = (self._delivers, sorted(self._receives), self._holder)
        connection.execute(
            sql(f"UPDATE {self._names.of('holder')} SET delivers = %s, receives = %s WHERE holder = %s"), what
        )

    def _free_what_the_dead_hold(self, connection: Connection) -> None:
        """Free the messages of holders whose lock is gone; whoever comes first does it for all.

        The messages themselves are asked, too: a process that lost its number may have held more under it since.
        """
        known = self._names.of("holder")
        held = [f"SELECT DISTINCT holder FROM {each} WHERE holder IS NOT NULL" for each, _ in self._tables(connection)]
        holders = " UNION ".join([f"SELECT holder FROM {known}", *held])
        find = sql(f"SELECT holder FROM ({holders}) AS h WHERE holder NOT IN ({self._living})")
        dead = [holder for (holder,) in connection.execute(find, ())]
        if dead:
            self._free(connection, dead)

    def _tables(self, connection: Connection) -> list[tuple[str, str]]:
        """Return the tables of messages that are there and that we may change, and what else is to be set there."""
        names = self._names
        stores = connection.execute(
            sql(
                f"SELECT name FROM {names.of('store')} WHERE coalesce(has_table_privilege("
                f"to_regclass(format('%%I.%%I', %s::text, name)), 'SELECT, UPDATE'), false) ORDER BY name"
            ),
            (names.schema,),
        )
        return [(names.of("queue_message"), ""), *((names.of(name), ", attempt_at = due") for (name,) in stores)]

    def _free(self, connection: Connection, dead: list[int | None]) -> None:
        """Free what some hold, each table by itself: what goes wrong in one must not keep the others."""
        names, freed = self._names, 0
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


def _as_ours(error: Exception) -> PostdateError:
    if isinstance(error, PostdateError):
        return error
    if isinstance(error, psycopg.Error):
        return translate(error, "PostgreSQL")
    log.error("the thread that hears of stored messages failed, and goes on", exc_info=error)
    return StoreUnavailable(f"PostgreSQL: {type(error).__name__}: {error}")
