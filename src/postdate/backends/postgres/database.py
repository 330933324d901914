"""One PostgreSQL schema as an adapter uses it: connections in threads, wake-ups, and a sign of life for what is held.

Connections are those of psycopg for blocking code, used in threads of ours: one round trip costs a thread hand-over of
some 50 microseconds, and the same code serves the event loop, pipeline processes and Spark executors. Those that are
lent wait for an answer for a limited time. Source: ADR 0007, ADR 0019.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postdate.backends.postgres.answering import ANSWERS_WITHIN, Answers, BoundedConnection
from postdate.backends.postgres.errors import is_conflict, translate, translated
from postdate.backends.postgres.expiring import Reaper
from postdate.backends.postgres.listening import HOLDS_AT_MOST, Life, Listener
from postdate.backends.postgres.names import Names, foundation, mark_done, quoted, sql, steps
from postdate.backends.postgres.sessions import mark, session_name
from postdate.errors import ConfigurationError, PostdateError, StoreUnavailable
from postdate.persistence.migrations import Step, run
from postdate.ports import Recording
from postdate.threads import in_thread

T = TypeVar("T")
Connection = psycopg.Connection[Any]

_MOST_IDLE: Final = 16
_TRIES: Final = 5
_SHORT_WAIT: Final = "lock_timeout=5s"
"""For the connection that holds: it must be heard of, whatever tables others have locked."""
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
        answers_within: after so long a silence of the server a connection is given up; above 0.
        holds_at_most: when this process shows no life for so long, others end its sessions; above 0.

    Raises:
        ConfigurationError: the address, the schema or a duration cannot be.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        recording: Recording = Recording.ALL,
        *,
        answers_within: timedelta = ANSWERS_WITHIN,
        holds_at_most: timedelta = HOLDS_AT_MOST,
    ) -> None:
        self.names = Names(schema)
        self._conninfo, self._options, self.where, self.identity = _address(url, schema)
        self._life = Life(mark(), holds_at_most)
        self.reaper = Reaper(self.names, self.identity, recording)
        self._answers = Answers(answers_within)
        self._idle: list[BoundedConnection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._listener: Listener | None = None

    # --- connections --------------------------------------------------------------------------------------------

    @property
    def conninfo(self) -> str:
        """What another driver on libpq connects with; it holds the password."""
        return self._conninfo

    def connect(self, **settings: Any) -> Connection:
        """Return a connection of the caller's own, in autocommit mode, that waits for answers however long it takes."""
        with translated(self.where):
            return self._opened(psycopg.Connection[Any].connect(self._conninfo, autocommit=True, **settings))

    def connect_bounded(self, *options: str) -> BoundedConnection:
        """Return a connection of the caller's own, in autocommit mode, that gives a silent server up.

        Args:
            options: more settings of the session, as ``name=value``; they count, whatever the address says.
        """
        more = " ".join(f"-c {option}" for option in options)
        with translated(self.where):
            connection = BoundedConnection.connect(
                self._conninfo, autocommit=True, options=f"{self._options} {more}".strip()
            )
            self._opened(connection)
            connection.opened_at, connection.answers = time.monotonic(), self._answers
            try:
                self._end_given_up(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    @staticmethod
    def _opened(connection: Connection) -> Connection:
        connection.prepare_threshold = 2
        return connection

    def _end_given_up(self, connection: Connection) -> None:
        if self._answers.has_given_up:
            self._answers.end_given_up(connection)

    @property
    def knows_what_was_done(self) -> bool:
        """Whether no session is left whose last statement, given up here, may still be done on the server."""
        return not self._answers.has_given_up

    def take(self) -> BoundedConnection:
        """Return an idle connection that is alive, or a new one; give it back with :meth:`put`."""
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable(f"{self.where}: closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self.connect_bounded()
            if self._answers.distrusts(connection):
                self._answers.give_up(connection, silent=False)
            elif _is_quiet(connection):
                return connection
            else:
                connection.close()

    def put(self, connection: Connection) -> None:
        """Take a connection back; one that is broken or in a transaction is closed."""
        usable = not connection.closed and connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            fits = usable and not self._closed and len(self._idle) < _MOST_IDLE
            if fits and isinstance(connection, BoundedConnection):
                connection.patient = False
                self._idle.append(connection)
                return
        with suppress(psycopg.Error):
            connection.close()

    def roll_back(self, connection: Connection) -> None:
        """End a transaction on a connection that was taken, and close that; if it is silent, without waiting for it."""
        if isinstance(connection, BoundedConnection) and self._answers.distrusts(connection):
            self._answers.give_up(connection, silent=False)
        with suppress(psycopg.Error):  # free at once, not when the server has noticed that we are gone
            connection.execute("ROLLBACK")
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

    def run_blocking(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        """Do ``work`` on a connection in autocommit mode; a lost race with another transaction is run again.

        Args:
            work: what to do.
            patiently: it reads or writes whole tables, and may take minutes.
        """
        for tries in range(1, _TRIES + 1):
            connection = self.take()
            connection.patient = patiently
            try:
                return work(connection)
            except psycopg.Error as error:
                if not is_conflict(error) or tries == _TRIES:
                    raise translate(error, self.where) from error
            finally:
                self.put(connection)
        raise AssertionError

    async def run(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        """Do ``work`` on a connection in a thread; a cancelled caller waits for its end."""
        return await in_thread(partial(self.run_blocking, patiently=patiently), work)

    async def transaction(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        """Do ``work`` in one transaction."""
        return await in_thread(partial(self.transaction_blocking, patiently=patiently), work)

    def transaction_blocking(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        """Do ``work`` in one transaction, in the calling thread."""

        def whole(connection: Connection) -> T:
            with connection.transaction():
                return work(connection)

        return self.run_blocking(whole, patiently=patiently)

    # --- being alive --------------------------------------------------------------------------------------------

    def listener(self) -> Listener:
        """Return the thread that hears of other processes, and by whose connection they know that we live.

        It also takes out of the queues what has expired there.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self.where}: closed")
            if self._listener is None:
                self._listener = Listener(
                    partial(self.connect_bounded, _SHORT_WAIT), self._end_given_up, self.names, self.reaper, self._life
                )
                self._listener.start()
            return self._listener

    @property
    def answers(self) -> Answers:
        """How long connections to this database wait; for those that somebody else opens."""
        return self._answers

    def end_given_up(self) -> None:
        """End sessions that were given up and may hold something, on a connection of its own; see :meth:`connect`."""
        if self._answers.has_given_up:
            self.connect_bounded().close()

    def leave(self) -> None:
        """Wait for no answer any more for longer than a moment: what comes now is the end."""
        self._answers.hurry()

    def close_blocking(self) -> None:
        """Close every connection; what is held is free again. A server that does not answer is not waited for."""
        self.leave()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        for connection in idle:
            connection.close()
        with suppress(PostdateError):  # what those sessions hold would be theirs for as long as they live
            self.end_given_up()

    # --- set-up -------------------------------------------------------------------------------------------------

    def setup_blocking(self, table: str | None = None, part: Sequence[Step] = ()) -> None:
        """Create what is missing of the schema, a store's table, and a part; several processes may do it at once."""
        self._bring_up_to_date([*steps(self.names.schema, table), *part])

    def setup_part_blocking(self, part: Sequence[Step]) -> None:
        """Create what is missing of a part alone; several processes may do it at once."""
        self._bring_up_to_date(part)

    def _bring_up_to_date(self, wanted: Sequence[Step]) -> None:
        schema = self.names.schema
        with self.translating(), self.connect() as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s, 0)", (self.names.lock_class,))
            if not self._is_founded(connection):  # so that later starts need no right to create
                connection.execute(sql(foundation(schema)))
            done = connection.execute(sql(f"SELECT subject, version FROM {self.names.of('migration')}"), ()).fetchall()
            run(
                wanted,
                done,
                self.where,
                execute=lambda text: connection.execute(sql(text)),
                mark=lambda step: mark_done(schema, step),
            )

    def _is_founded(self, connection: Connection) -> bool:
        marks = f"{quoted(self.names.schema)}.migration"
        return connection.execute("SELECT to_regclass(%s)", (marks,)).fetchone() != (None,)


def _address(url: str, schema: str) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the connection string and the options in it, the address without secrets, and what tells databases apart.

    Args:
        url: of the database.
        schema: in it.
    """
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # its text may have a piece of a password that is not escaped
        raise ConfigurationError(
            "the address of the PostgreSQL database cannot be read; write postgresql://user:password@host:port/database"
        ) from None
    defaults = {
        "connect_timeout": "5",
        # A server that vanished without a word is noticed within 15 s or so.
        "keepalives_idle": "5",
        "keepalives_interval": "3",
        "keepalives_count": "3",
        "tcp_user_timeout": "15000",
    }
    settings = {**defaults, **{k: str(v) for k, v in given.items() if v is not None}}
    settings["options"] = options = f"{_SETTINGS} {settings.get('options', '')}".strip()
    # By it an operator is told who holds a row lock.
    settings["application_name"] = session_name(settings.get("application_name", ""))
    # The environment or a connection string made for others may name another, in which not every text can be said.
    settings["client_encoding"] = "UTF8"
    host, port = settings.get("host", ""), settings.get("port", "5432")
    database = settings.get("dbname", settings.get("user", ""))
    where = f"PostgreSQL {host or 'local'}:{port}/{database}, schema {schema}"
    # Whatever leads elsewhere tells two databases apart; that two ways lead to one is not known, and costs a shared
    # transaction only.
    elsewhere = [settings.get(name, "") for name in ("hostaddr", "service")]
    return make_conninfo("", **settings), options, where, ("postgres", host, *elsewhere, port, database, schema)


def _is_quiet(connection: Connection) -> bool:
    """Return whether an idle connection is open and the server has said nothing: it speaks up only when it goes."""
    if connection.closed:
        return False
    try:
        readable, _, _ = select.select([connection.fileno()], [], [], 0)
    except (OSError, ValueError, psycopg.Error):
        return False
    return not readable
