"""One PostgreSQL schema as an adapter uses it: connections in threads, wake-ups, and a sign of life for what is held.

Connections are those of psycopg for blocking code, used in threads of ours: one round trip costs a thread hand-over of
some 50 microseconds, and the same code serves the event loop, pipeline processes and Spark executors. Source: ADR 0007.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postdate.errors import ConfigurationError, StoreFromNewerVersion, StoreUnavailable
from postdate.ports import Recording
from postdate.postgres.errors import is_conflict, translate, translated
from postdate.postgres.expiring import Reaper
from postdate.postgres.listening import Listener
from postdate.postgres.names import Names, Step, foundation, quoted, sql, steps
from postdate.threads import in_thread

T = TypeVar("T")
Connection = psycopg.Connection[Any]

_MOST_IDLE: Final = 16
_TRIES: Final = 5
_SETTINGS: Final = (
    "-c timezone=UTC "
    # Every statement of ours is meant to go by an index and to stop early. A plan made while a table was small must not
    # turn into a scan of millions of rows later, so the planner is told at the door.
    "-c enable_seqscan=off -c enable_bitmapscan=off -c enable_sort=off -c jit=off "
    # One plan fits all: to plan a move anew takes as long as to do one of a single message.
    "-c plan_cache_mode=force_generic_plan "
    "-c idle_in_transaction_session_timeout=0 "
    # The server, too, notices within 15 s when our machine has vanished; by itself it would hold on for two hours.
    "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=3 -c tcp_keepalives_count=3"
)


class PostgresDatabase:
    """A schema of a database, opened by one adapter of this process.

    Args:
        url: ``postgresql://user:password@host:port/database``, or any connection string of libpq.
        schema: in which all tables are.
        recording: whether it is recorded what expires in queues.

    Raises:
        ConfigurationError: the address or the schema cannot be.
    """

    def __init__(self, url: str, schema: str, recording: Recording = Recording.ALL) -> None:
        self.names = Names(schema)
        self._conninfo, self.where, self.identity = _address(url, schema)
        self.reaper = Reaper(self.names, self.identity, recording)
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._listener: Listener | None = None

    # --- connections --------------------------------------------------------------------------------------------

    @property
    def conninfo(self) -> str:
        """What another driver on libpq connects with; it holds the password."""
        return self._conninfo

    def connect(self, **settings: Any) -> Connection:
        """Return a connection of the caller's own, in autocommit mode."""
        with translated(self.where):
            connection = psycopg.connect(self._conninfo, autocommit=True, **settings)
            connection.prepare_threshold = 2
            return connection

    def take(self) -> Connection:
        """Return an idle connection that is alive, or a new one; give it back with :meth:`put`."""
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable(f"{self.where}: closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self.connect()
            if _is_quiet(connection):
                return connection
            connection.close()

    def put(self, connection: Connection) -> None:
        """Take a connection back; one that is broken or in a transaction is closed."""
        usable = not connection.closed and connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            if usable and not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        with suppress(psycopg.Error):
            connection.close()

    def translating(self) -> AbstractContextManager[None]:
        """Raise errors of the driver as errors of Postdate."""
        return translated(self.where)

    @contextmanager
    def leased(self) -> Generator[Connection]:
        """Lend a connection in autocommit mode; errors of the driver are translated."""
        connection = self.take()
        try:
            with translated(self.where):
                yield connection
        finally:
            self.put(connection)

    def run_blocking(self, work: Callable[[Connection], T]) -> T:
        """Do ``work`` on a connection in autocommit mode; a lost race with another transaction is run again."""
        for tries in range(1, _TRIES + 1):
            connection = self.take()
            try:
                return work(connection)
            except psycopg.Error as error:
                if not is_conflict(error) or tries == _TRIES:
                    raise translate(error, self.where) from error
            finally:
                self.put(connection)
        raise AssertionError

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Do ``work`` on a connection in a thread; a cancelled caller waits for its end."""
        return await in_thread(self.run_blocking, work)

    async def transaction(self, work: Callable[[Connection], T]) -> T:
        """Do ``work`` in one transaction."""
        return await in_thread(self.transaction_blocking, work)

    def transaction_blocking(self, work: Callable[[Connection], T]) -> T:
        """Do ``work`` in one transaction, in the calling thread."""

        def whole(connection: Connection) -> T:
            with connection.transaction():
                return work(connection)

        return self.run_blocking(whole)

    # --- being alive --------------------------------------------------------------------------------------------

    def listener(self) -> Listener:
        """Return the thread that hears of other processes, and by whose connection they know that we live.

        It also takes out of the queues what has expired there.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self.where}: closed")
            if self._listener is None:
                self._listener = Listener(self.connect, self.names, self.reaper)
                self._listener.start()
            return self._listener

    def close_blocking(self) -> None:
        """Close every connection; what is held is free again."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        for connection in idle:
            connection.close()

    # --- set-up -------------------------------------------------------------------------------------------------

    def setup_blocking(self, table: str | None = None) -> None:
        """Create what is missing; several processes may do it at once."""
        wanted = steps(self.names.schema, table)
        with self.leased() as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s, 0)", (self.names.lock_class,))
            if not self._is_founded(connection):  # so that later starts need no right to create
                connection.execute(sql(foundation(self.names.schema)))
            for subject in dict.fromkeys(step.subject for step in wanted):
                self._bring_up_to_date(connection, subject, [step for step in wanted if step.subject == subject])

    def _is_founded(self, connection: Connection) -> bool:
        marks = f"{quoted(self.names.schema)}.migration"
        return connection.execute("SELECT to_regclass(%s)", (marks,)).fetchone() != (None,)

    def _bring_up_to_date(self, connection: Connection, subject: str, wanted: list[Step]) -> None:
        rows = connection.execute(
            sql(f"SELECT version FROM {self.names.of('migration')} WHERE subject = %s"), (subject,)
        ).fetchall()
        done = {version for (version,) in rows}
        newest = wanted[-1].version
        if done and max(done) > newest:
            raise StoreFromNewerVersion(
                f"{self.where} was set up by a newer Postdate (version {max(done)} of its tables, this one knows "
                f"{newest}); upgrade Postdate here"
            )
        for step in wanted:
            if step.version not in done:
                connection.execute(sql(step.sql))
                connection.execute(sql(step.mark(self.names.schema)))


def _address(url: str, schema: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the connection string, the address without secrets, and what tells this database from others."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # its text may have a piece of a password that is not escaped
        raise ConfigurationError(
            "the address of the PostgreSQL database cannot be read; write postgresql://user:password@host:port/database"
        ) from None
    defaults = {
        "application_name": f"postdate {os.getpid()}",  # by which an operator is told who holds a row lock
        "connect_timeout": "5",
        # A server that vanished without a word is noticed within 15 s or so.
        "keepalives_idle": "5",
        "keepalives_interval": "3",
        "keepalives_count": "3",
        "tcp_user_timeout": "15000",
    }
    settings = {**defaults, **{k: str(v) for k, v in given.items() if v is not None}}
    settings["options"] = f"{_SETTINGS} {settings.get('options', '')}".strip()
    host, port = settings.get("host", ""), settings.get("port", "5432")
    database = settings.get("dbname", settings.get("user", ""))
    where = f"PostgreSQL {host or 'local'}:{port}/{database}, schema {schema}"
    # Whatever leads elsewhere tells two databases apart; that two ways lead to one is not known, and costs a shared
    # transaction only.
    elsewhere = [settings.get(name, "") for name in ("hostaddr", "service")]
    return make_conninfo("", **settings), where, ("postgres", host, *elsewhere, port, database, schema)


def _is_quiet(connection: Connection) -> bool:
    """Return whether an idle connection is open and the server has said nothing: it speaks up only when it goes."""
    if connection.closed:
        return False
    try:
        readable, _, _ = select.select([connection.fileno()], [], [], 0)
    except (OSError, ValueError, psycopg.Error):
        return False
    return not readable
