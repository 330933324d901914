"""One SQLite file in this process: grouped write transactions, fair to others; snapshots for reading; claims; signals.

A process opens a file once for all stores and transports on it. They share one writing connection, so they never wait
for each other's locks, and writes that arrive together are committed together.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anyio
from typing_extensions import override

from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sqlite.connection import (
    Identity,
    alone,
    check_intact,
    check_schema,
    connect,
    create_schema,
    first_opened,
    forget_log,
    identity_of,
    lock_patience,
    patiently,
    replaced,
    translate,
    translated,
)
from postdate.backends.sqlite.housekeeping import (
    BATCH,
    DEAD_LETTERS,
    RoomToGiveBack,
    give_back,
    has_expired,
    shape,
    take_out_expired,
)
from postdate.backends.sqlite.processes import (
    HELD_AT_MOST,
    SHORTEST_BOUND,
    FileLiveness,
    Silence,
    Wakeups,
    forget,
    is_gone,
    last_sign,
    presence_folder,
)
from postdate.backends.sqlite.rows import DUE, QueueRules, Transaction, next_attempt, queue_topic
from postdate.clock import steady_seconds
from postdate.errors import (
    ConfigurationError,
    PostdateError,
    StoreError,
    StoreNotSetUp,
    StoreUnavailable,
    StoreUnreachable,
)
from postdate.ports import Recording, Wake
from postdate.runtime import forks
from postdate.runtime.housekeeping import Chore, Housekeeping
from postdate.runtime.resource import resource_at
from postdate.runtime.threads import Job, group_of, in_thread

_DEFAULT_RULES = QueueRules()
_JOBS_IN_ONE_COMMIT = 500
_HOUSEKEEPING_SECONDS = 1.0
# After a commit beside another writer: long enough for its turn (it asks every 0.1 ms), short beside a batch.
_COURTESY_SECONDS = 0.001

log = logging.getLogger("postdate.embedded")

_REGISTERED = "SELECT claimant FROM claimant"
_IS_REGISTERED = f"{_REGISTERED} WHERE claimant = ?"
_TAKE_NUMBER = """
    INSERT INTO claimant (pid, started_at) VALUES (?, CAST(strftime('%s', 'now') AS INTEGER) * 1000000)"""
_HOLDERS = """
    SELECT claimant FROM delayed_message WHERE claimant IS NOT NULL
    UNION SELECT claimant FROM queue_message WHERE claimant IS NOT NULL"""
_HOLDS = """
    SELECT EXISTS (SELECT 1 FROM delayed_message WHERE claimant = :claimant)
        OR EXISTS (SELECT 1 FROM queue_message WHERE claimant = :claimant)"""
_PATIENCE_AT_THE_END_SECONDS = 1.0
# At most this counts as silence of others between two looks, as this process may have been frozen itself.
_LONGEST_BETWEEN_LOOKS_SECONDS = 2 * _HOUSEKEEPING_SECONDS

T = TypeVar("T")

_Work = Callable[[Transaction], Any]


class _ForkAhead(Exception):
    """A thread of this process is about to fork, and waits for the one in which this is raised."""


class SqliteFile(forks.ForkAware):
    """The shared handle of one file in this process: call :meth:`close` once for each :meth:`open`.

    Before a fork its connections are closed; parent and child open their own at the next use. SQLite keeps one table of
    locks for a process, which a child would inherit: it would take what its parent has locked for locked by itself, the
    parent would take itself for the last user of the file, and remove the log while the child writes to it.
    """

    _open: ClassVar[dict[tuple[int, Path], SqliteFile]] = {}
    """By process, so that a child opens handles of its own; those that it inherited begin anew, each by itself."""

    _open_lock: ClassVar[threading.Lock] = forks.lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        create: bool = True,
        rules: QueueRules | None = None,
        holds_at_most: timedelta | None = None,
    ) -> SqliteFile:
        """Return the handle of this process for ``path``; nothing is read or written before the first use.

        Args as :class:`postdate.SqliteStore` has them, but ``rules`` are given by transports only. Without ``rules`` or
        ``holds_at_most`` those of an earlier opener are valid, else defaults.

        Raises:
            ConfigurationError: it is open already with other settings, or a setting is invalid.
        """
        if synchronous not in {"full", "normal"}:
            raise ConfigurationError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        if holds_at_most is not None and holds_at_most < SHORTEST_BOUND:
            raise ConfigurationError(f"holds_at_most must be {SHORTEST_BOUND} or more, not {holds_at_most}")
        real = Path(path).expanduser().resolve()
        with cls._open_lock:
            if (file := cls._open.get((os.getpid(), real))) is None:
                file = cls(real, synchronous=synchronous, recording=recording, create=create)
                cls._open[os.getpid(), real] = file
            if (file.synchronous, file.recording) != (synchronous, recording):
                raise ConfigurationError(
                    f"{real} is open in this process with synchronous={file.synchronous!r} and "
                    f"recording={file.recording.value!r}; store and transport on one file need the same settings"
                )
            file._agree_on(rules, holds_at_most)
            file._users += 1
        return file

    def __init__(self, path: Path, *, synchronous: str, recording: Recording, create: bool) -> None:
        self.path = path
        self.synchronous = synchronous
        self.recording = recording
        self._create = create
        self._users = 0
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._opened: Identity | None = None
        self._replaced = False
        self._presence: FileLiveness | None = None
        self.claimant = 0
        """Number under which this process holds messages; 0 before its first use of the file."""
        self._writing = forks.rlock()
        self._reading = forks.rlock()
        self._locked_for_fork = list[threading.RLock]()
        """Those of these locks that the thread which forks holds just now."""
        self._no_fork_ahead = threading.Event()
        """Cleared while a thread is about to fork, which others let go first: locks are not fair."""
        self._no_fork_ahead.set()
        self._gives_way = True
        """Whether the turn to write is all that its thread holds; under the lock."""
        self._beside_others = False
        self._data_version = 0
        self._holds_at_most: timedelta | None = None
        self._has_written = False
        self._closing = False
        self._silence = Silence()
        self._when_fenced: list[Callable[[int], None]] = []
        self._next_attempt: datetime | None = None
        self._looked_at = 0.0
        self._rules: QueueRules | None = None
        self._room = RoomToGiveBack()
        self._wakeups = Wakeups()
        self._chores = Housekeeping(
            resource_at(("sqlite", str(path)), str(path)),
            _HOUSEKEEPING_SECONDS,
            [
                Chore("cannot look at the file", self._look_at_the_file),
                Chore("cannot show that this process lives", self._show_life),
                Chore("cannot look for what is due", self._look_for_news),
                Chore("cannot look for processes that ended", self._look_for_the_dead),
                Chore("cannot take expired messages out of their queues", self._take_out_expired),
                Chore("cannot give back room on the disk", self._give_back_room),
            ],
        )
        forks.register(self)

    def _agree_on(self, rules: QueueRules | None, holds_at_most: timedelta | None) -> None:
        if rules is not None and self._rules is not None and not self._rules.agrees_with(rules):
            raise ConfigurationError(
                f"{self.path} is open in this process with {self._rules}; transports on one file need the same clock "
                f"and rules of expiry, not {rules}"
            )
        if holds_at_most is not None and self._holds_at_most not in {None, holds_at_most}:
            raise ConfigurationError(
                f"{self.path} is open in this process with holds_at_most={self._holds_at_most}; store and transport on "
                f"one file need the same, not {holds_at_most}"
            )
        self._rules, self._holds_at_most = self._rules or rules, self._holds_at_most or holds_at_most

    @property
    def holds_at_most(self) -> timedelta:
        """A process without a sign of life for this long loses its claims."""
        return self._holds_at_most or HELD_AT_MOST

    @property
    def rules(self) -> QueueRules:
        """How the queues treat expired messages; the system's clock and no rules until a transport gives its own."""
        return self._rules or _DEFAULT_RULES

    @property
    def where(self) -> str:
        return str(self.path)

    # --- writing ------------------------------------------------------------------------------------------------

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run ``work`` in a write transaction and return its result after the commit.

        Works that arrive while a transaction runs share the next one; a work that raises is rolled back alone.
        """
        return await group_of(self, _JOBS_IN_ONE_COMMIT).run(self._commit_together, work)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        return await self.write(work)

    async def transaction(self, work: Callable[[Transaction], T]) -> T:
        return await self.write(work)

    def write_blocking(self, work: Callable[[Transaction], T]) -> T:
        """:meth:`write` in the calling thread, for pipeline processes and the command line."""
        job = Job[_Work, Any](work)
        self._commit_together([job])
        return job.outcome()

    def checkpoint_blocking(self) -> None:
        # Read to its end within the turn: a statement that is in progress fails the commit of the next writer.
        self._in_turn(lambda connection: connection.execute("PRAGMA wal_checkpoint(truncate)").fetchall())

    async def give_way(self) -> None:
        """Give other processes a turn if one wrote lately; called between batches."""
        if self._beside_others:
            await anyio.sleep(_COURTESY_SECONDS)

    def _commit_together(self, jobs: Sequence[Job[_Work, Any]]) -> None:
        try:
            topics, elsewhere = self._in_turn(lambda connection: self._transaction(connection, jobs))
        except BaseException as error:  # noqa: BLE001 - handed to each caller, whose thread this is not
            for job in jobs:
                job.error = job.error or error
            return
        finally:
            for job in jobs:
                job.done = True
        self._wakeups.signal(topics, elsewhere)

    def _in_turn(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` with the writing connection, beside no other thread; again if it gave way to a fork."""
        while True:
            with suppress(_ForkAhead), self._turn(), translated(self.path):
                return work(self._writing_connection())

    @contextmanager
    def _turn(self) -> Generator[None]:
        is_outermost = self._let_fork()
        if not self._writing.acquire(timeout=self._patience_seconds):
            raise StoreUnreachable(f"{self.path}: another thread of this process waits to write to it")
        before, self._gives_way = self._gives_way, is_outermost
        try:
            yield
        finally:
            self._gives_way = before
            self._writing.release()

    def _let_fork(self) -> bool:
        """Wait until a fork that is ahead is over; return ``False``, at once, if it waits for this thread itself."""
        forks.check_process()
        if forks.is_owned(self._reading) or forks.is_owned(self._writing):
            return False
        if not self._no_fork_ahead.is_set():
            self._no_fork_ahead.wait(forks.QUIET_WITHIN_SECONDS)
        return True

    @property
    def _patience_seconds(self) -> float:
        """How long a writer waits for its turn: short while closing, as the lock may be a frozen process'."""
        return _PATIENCE_AT_THE_END_SECONDS if self._closing else lock_patience()

    def _patience(self) -> float:
        """Return the seconds that a writer waits; called while it does, in no transaction.

        Raises:
            _ForkAhead: it is to let a fork go first, and to begin anew.
        """
        if self._gives_way and not self._no_fork_ahead.is_set():
            raise _ForkAhead
        return self._patience_seconds

    def _transaction(
        self, connection: sqlite3.Connection, jobs: Sequence[Job[_Work, Any]]
    ) -> tuple[set[str], list[tuple[str, int]]]:
        self._begin(connection)
        try:
            self._check_in_place()  # it may have waited long for its turn
            topics: set[str] = set()
            for job in jobs:
                topics |= self._part(connection, job, alone=len(jobs) == 1)
            elsewhere = self._listeners(connection, topics)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._has_written = True
        return topics, elsewhere

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Begin a transaction under a registered number, as claims of an unregistered one would be freed by others."""
        while True:
            patiently(connection, "BEGIN IMMEDIATE", self._patience)
            version: int = connection.execute("PRAGMA data_version").fetchone()[0]
            self._beside_others, self._data_version = version != self._data_version, version
            # Only another process' commit can have removed it.
            if not self._beside_others or connection.execute(_IS_REGISTERED, (self.claimant,)).fetchone():
                return
            connection.execute("ROLLBACK")
            self._register_anew(connection)

    def _register_anew(self, connection: sqlite3.Connection) -> None:
        before, presence = self.claimant, self._presence
        self._register(connection)
        log.warning(
            "%s: this process showed no life, or its lock file was removed: what it held is with others now, and what "
            "it still does with that has no effect; it goes on as claimant %d instead of %d",
            self.path,
            self.claimant,
            before,
        )
        if presence is not None:
            presence.leave()
        for fenced in list(self._when_fenced):
            fenced(before)
        self._wakeups.signal(self._wakeups.topics, ())  # nobody could wake a process that was not registered

    def _part(self, connection: sqlite3.Connection, job: Job[_Work, Any], *, alone: bool) -> set[str]:
        transaction = Transaction(connection, self.claimant, self.recording, self.rules)
        if alone:
            job.result = job.work(transaction)
            return transaction.topics
        connection.execute("SAVEPOINT part")
        try:
            job.result = job.work(transaction)
        except Exception as error:
            if not connection.in_transaction:  # a full disk rolls back the whole transaction, not only this part
                raise
            connection.execute("ROLLBACK TO part")
            job.error = translate(error, self.path) if isinstance(error, sqlite3.Error) else error
            transaction.topics.clear()
        connection.execute("RELEASE part")
        return transaction.topics

    def _listeners(self, connection: sqlite3.Connection, topics: set[str]) -> list[tuple[str, int]]:
        if not topics:
            return []
        marks = ",".join("?" * len(topics))
        return connection.execute(
            f"SELECT topic, port FROM listener WHERE topic IN ({marks}) AND claimant <> ?",
            (*topics, self.claimant),
        ).fetchall()

    # --- reading ------------------------------------------------------------------------------------------------

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``work`` on one consistent snapshot, however long it takes."""
        return await in_thread(self.read_blocking, work)

    async def look(self, work: Callable[[sqlite3.Connection], T], *, patiently: bool = False) -> T:
        return await self.read(work)

    def read_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._let_fork()
        with self._reading, translated(self.path):
            connection = self._reading_connection()
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("COMMIT")

    look_blocking = read_blocking

    def snapshot(self) -> sqlite3.Connection:
        """Return a connection in a read transaction, which the caller closes. Blocking."""
        self._let_fork()
        with self._reading:  # no fork while it is being opened
            connection = connect(self.path, read_only=True)
            with closing_on_error(connection):
                self._check_in_place()
                check_schema(connection, self.path)
                with translated(self.path):
                    connection.execute("BEGIN")
        return connection

    def when_fenced(self, fenced: Callable[[int], None]) -> Callable[[], None]:
        """Call ``fenced`` with a number whose claims became void, in the thread that noticed; return how to stop."""
        self._when_fenced.append(fenced)

        def stop() -> None:
            with suppress(ValueError):  # in the child of a fork, which has forgotten it
                self._when_fenced.remove(fenced)

        return stop

    def is_in_force(self, claimant: int) -> bool:
        """Return whether claims under a number are still in force; reads the file only after a long silence."""
        presence = self._presence
        if claimant != self.claimant or presence is None or self._replaced:
            return False
        if not presence.is_overdue(steady_seconds()):
            return True
        with suppress(PostdateError):
            return claimant in self.read_blocking(lambda c: _numbers(c.execute(_REGISTERED)))
        return False

    # --- claims and news ----------------------------------------------------------------------------------------

    async def listen(self, topic: str, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` at each signal of ``topic``, by any process, until the returned function is called."""
        return await in_thread(self.listen_blocking, topic, wake)

    def listen_blocking(self, topic: str, wake: Wake) -> Callable[[], None]:
        port = self._wakeups.port
        self.write_blocking(
            lambda tx: tx.execute("INSERT OR REPLACE INTO listener VALUES (?, ?, ?)", (tx.claimant, topic, port))
        )
        return self._wakeups.subscribe(topic, wake)

    def setup_blocking(self) -> None:
        self._in_turn(lambda _: None)

    async def setup(self) -> None:
        await in_thread(self.setup_blocking)

    def _show_life(self) -> bool:
        """Give a sign of life while this process holds messages; without claims its silence harms nobody."""
        presence, now = self._presence, steady_seconds()
        if presence is None or not presence.sign_is_wanted(now):
            return False
        if self._has_written or self._holds_something():
            self._has_written = False
            with suppress(FileNotFoundError):  # removed, which the look for the dead is about
                presence.show_life(now)
        return False

    def _look_at_the_file(self) -> bool:
        if self._is_replaced():
            self._chores.stop()
            self._wakeups.signal(self._wakeups.topics, ())  # whoever waits for news is told at once
        return False

    def _look_for_news(self) -> bool:
        """Wake pollers when the next due time has come nearer: the datagram that says so may be lost."""
        if DUE in self._wakeups.topics:
            before, self._next_attempt = self._next_attempt, self.read_blocking(next_attempt)
            if self._next_attempt is not None and (before is None or self._next_attempt < before):
                self._wakeups.signal([DUE], ())
        return False

    def _holds_something(self) -> bool:
        values = {"claimant": self.claimant}
        return self.read_blocking(lambda c: bool(c.execute(_HOLDS, values).fetchone()[0]))

    def _look_for_the_dead(self) -> bool:
        if self._presence is not None and not self._presence.stands():
            self._reappear()
        self.free_claims_of_the_dead()
        return False

    def _take_out_expired(self) -> bool:
        now = self.rules.now()
        if not self.read_blocking(lambda c: has_expired(c, now)):
            return False
        dropped = kept = 0

        def share() -> bool:
            nonlocal dropped, kept
            batch = self.write_blocking(lambda tx: take_out_expired(tx, now))
            dropped, kept = dropped + batch.dropped, kept + batch.kept
            return batch.dropped + batch.kept == BATCH

        try:
            return self._chores.in_shares(share)
        finally:
            if dropped + kept:
                text = "%d messages expired in their queues: %d are gone, %d are kept in %s"
                log.info(text, dropped + kept, dropped, kept, DEAD_LETTERS)

    def _give_back_room(self) -> bool:
        found = self.read_blocking(shape)
        pages = 0 if found is None else self._room.look(*found)
        if not pages:
            return False
        left = pages

        def share() -> bool:
            nonlocal left
            left = self.write_blocking(lambda tx: give_back(tx, left))
            return left > 0

        more = self._chores.in_shares(share)
        self.checkpoint_blocking()  # the file itself becomes smaller only now
        log.debug("%s: %d free pages given back", self.path, pages - left)
        return more

    def _reappear(self) -> None:
        """Lock the lock file anew after its removal: without it other processes take this one for dead."""
        before = self.claimant
        self.write_blocking(lambda _: None)  # if they have done so already, it has another number and file now
        if self.claimant == before:
            log.warning("%s was cleaned while processes were at work; leave it alone", self._presence_folder)
            self._presence = FileLiveness(self._presence_folder, self.claimant, self.holds_at_most)

    def free_claims_of_the_dead(self) -> int:
        """Free the claims of processes that ended or show no life; return how many processes. Blocking."""
        registered, holders = self.read_blocking(
            lambda c: (_numbers(c.execute(_REGISTERED)), _numbers(c.execute(_HOLDERS)))
        )
        if self.claimant and self.claimant not in registered:
            self.write_blocking(lambda _: None)  # which makes it known again
        folder, others = self._presence_folder, (registered | holders) - {self.claimant}
        gone = [claimant for claimant in sorted(others) if is_gone(folder, claimant)]
        for claimant in gone:
            log.info("process with claimant number %d is gone; what it held is free again", claimant)
            self.write_blocking(lambda tx, claimant=claimant: _forget(tx, claimant))
        silent = self._silent(holders - {self.claimant, *gone})
        for claimant in silent:
            text = "process with claimant number %d shows no life (frozen, or swapped out); what it held is free again"
            log.warning(text, claimant)
            self.write_blocking(lambda tx, claimant=claimant: _forget(tx, claimant))
            forget(folder, claimant)
        return len(gone) + len(silent)

    def _silent(self, holders: set[int]) -> list[int]:
        before, self._looked_at = self._looked_at, steady_seconds()
        passed = min(self._looked_at - before, _LONGEST_BETWEEN_LOOKS_SECONDS)
        return self._silence.look(holders, lambda claimant: last_sign(self._presence_folder, claimant), passed)

    # --- connections --------------------------------------------------------------------------------------------

    @property
    def _presence_folder(self) -> Path:
        return presence_folder(self.path)

    def _writing_connection(self) -> sqlite3.Connection:
        self._check_in_place()
        if self._writer is None:
            self._check_usable()
            self._open_writer()
        assert self._writer is not None
        return self._writer

    def _check_in_place(self) -> None:
        """Refuse everything once another file, or none, is at the path: SQLite would go on writing to the one before.

        Nothing that was committed is lost: it is in the file before, or in its log, which no other file is opened with.
        """
        if self._is_replaced():
            raise replaced(self.path)

    def _is_replaced(self) -> bool:
        """Once it is, that is for good, and what this process holds is void."""
        if not self._replaced and self._opened is not None and identity_of(self.path) != self._opened:
            self._replaced = True
            for fenced in list(self._when_fenced):
                fenced(self.claimant)
        return self._replaced

    def _open_writer(self) -> None:
        with alone(self.path):
            before = identity_of(self.path)
            connection = connect(self.path, synchronous=self.synchronous)
            with closing_on_error(connection):
                try:
                    check_intact(connection, self.path)
                    (create_schema if self._create else check_schema)(connection, self.path)
                    opened = first_opened(self.path, before)
                    if self._presence is None:
                        self._register(connection)
                    else:  # closed for a fork; whether the number is registered still is looked for at the next turn
                        self._data_version = -1
                except OSError as error:
                    raise StoreUnavailable(f"{self._presence_folder}: {error}") from error
        self._writer, self._opened = connection, self._opened or opened
        self._chores.start()

    def _register(self, connection: sqlite3.Connection) -> None:
        """Take a number and its lock file, and listen under it. After a failure the state is as before."""
        before, presence = self.claimant, None
        patiently(connection, "BEGIN IMMEDIATE", self._patience)
        try:
            # Locked before the commit: no process ever sees the row without the lock. A process with a former file open
            # may have locked the number.
            while presence is None:
                self.claimant = int(connection.execute(_TAKE_NUMBER, (os.getpid(),)).lastrowid or 0)
                presence = FileLiveness.take(self._presence_folder, self.claimant, self.holds_at_most)
                if presence is None:
                    connection.execute("DELETE FROM claimant WHERE claimant = ?", (self.claimant,))
            connection.executemany(
                "INSERT INTO listener VALUES (?, ?, ?)",
                [(self.claimant, topic, self._wakeups.port) for topic in self._wakeups.topics],
            )
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self.claimant = before
            if presence is not None:
                presence.leave()
            raise
        self._presence = presence

    def _check_usable(self) -> None:
        """Refuse a closed handle."""
        if self._users <= 0:
            raise StoreError(f"{self.path} was closed in this process; open a store or transport on it again")

    def _reading_connection(self) -> sqlite3.Connection:
        self._check_usable()
        self._check_in_place()
        if self._reader is None:
            before = identity_of(self.path)
            self._reader = self._looking_connection()
            # If it may be another file than before, the next use finds it replaced.
            self._opened = self._opened or first_opened(self.path, before)
        return self._reader

    def _looking_connection(self) -> sqlite3.Connection:
        """Open the file for reading. It takes no number and writes nothing, so it works on a full disk."""
        try:
            connection = connect(self.path, read_only=True)
        except PostdateError:
            self.setup_blocking()  # it is missing; or its log is, which only a writer may create
            return connect(self.path, read_only=True)
        with closing_on_error(connection):
            try:
                check_schema(connection, self.path)
            except StoreNotSetUp:
                self.setup_blocking()
        return connection

    def close(self) -> None:
        """Give the handle back; the last user's call frees claims and closes the file. Blocking."""
        forks.check_process()
        with self._open_lock:
            if self._users == 1:
                self._closing = True
                self._chores.stop()  # first: what it would begin now would find the file closed
            self._users -= 1
            if self._users > 0:
                return
            if self._open.get((os.getpid(), self.path)) is self:
                del self._open[os.getpid(), self.path]
        self._chores.join()
        self._wakeups.stop_listening()
        with self._reading, self._writing:
            if self._presence is not None:
                with suppress(PostdateError):  # full or unwritable by now: the next process finds us gone and does it
                    self._users = 1  # its connection may have been closed for a fork, and is opened once more
                    self.write_blocking(lambda tx: _forget(tx, tx.claimant))
                self._users = 0
            self._close_connections()
            if self._presence is not None:
                self._presence.leave()
                self._presence = None
        self._wakeups.close()

    def _close_connections(self) -> None:
        """Close the connections that no transaction is open on; both locks are held."""
        if self._reader is not None and not self._reader.in_transaction:
            self._reader.close()  # first: only a writer that closes last takes the log away
            self._reader = None
        if self._writer is not None and not self._writer.in_transaction:
            with suppress(sqlite3.Error, PostdateError):
                if (
                    self._is_replaced()
                ):  # what was committed goes into the file that it was committed to, wherever that is
                    self._writer.execute("PRAGMA wal_checkpoint(truncate)")
            self._writer.close()
            self._writer = None
            forget_log(self.path)

    # --- forks --------------------------------------------------------------------------------------------------

    @override
    def before_fork(self, deadline: float) -> None:
        """Close the connections, once no other thread uses them, and keep them closed.

        Where that takes too long, or the thread that forks is in a transaction itself, they stay open: then the child
        cannot use the file, and says so (:func:`postdate.backends.sqlite.connection.connect`).
        """
        self._no_fork_ahead.clear()
        for each in (self._reading, self._writing):
            if not each.acquire(timeout=max(deadline - steady_seconds(), 0)):
                text = "%s: a fork did not wait for another thread any longer; its child cannot use the file"
                log.warning(text, self.path)
                return
            self._locked_for_fork.append(each)
        self._close_connections()

    @override
    def after_fork_in_parent(self) -> None:
        while self._locked_for_fork:
            self._locked_for_fork.pop().release()
        self._no_fork_ahead.set()

    @override
    def after_fork_in_child(self) -> None:
        """Forget number, claims and listeners, which are the parent's. The next use opens the file anew."""
        for connection in (self._reader, self._writer):
            if connection is not None:  # to close it would end locks, and maybe the log, of the parent
                forks.keep_for_ever(connection)
        self._reader = self._writer = self._presence = self._opened = self._next_attempt = None
        self.claimant, self._data_version, self._looked_at = 0, 0, 0.0
        self._replaced = self._has_written = self._beside_others = False
        self._gives_way = True
        self._locked_for_fork.clear()
        self._no_fork_ahead = threading.Event()  # another thread may have had the lock of the one before
        self._no_fork_ahead.set()
        self._when_fenced.clear()
        forks.keep_for_ever(self._wakeups)
        self._silence, self._wakeups = Silence(), Wakeups()


def _numbers(cursor: sqlite3.Cursor) -> set[int]:
    return {claimant for (claimant,) in cursor}


def _forget(tx: Transaction, claimant: int) -> None:
    freed = tx.execute(
        "UPDATE delayed_message SET claimant = NULL, attempt_at = due WHERE claimant = ?", (claimant,)
    ).rowcount
    queues = tx.execute(
        "UPDATE queue_message SET claimant = NULL WHERE claimant = ? RETURNING queue_id", (claimant,)
    ).fetchall()
    tx.execute("DELETE FROM listener WHERE claimant = ?", (claimant,))
    tx.execute("DELETE FROM claimant WHERE claimant = ?", (claimant,))
    if freed:
        tx.signal(DUE)
    for queue_id in {queue_id for (queue_id,) in queues}:
        (name,) = tx.execute("SELECT name FROM queue WHERE queue_id = ?", (queue_id,)).fetchone()
        tx.signal(queue_topic(name))


class OnFile:
    """An adapter on a file, whose handle it gives back once it is closed."""

    file: SqliteFile
    _closed = False

    async def close(self) -> None:
        closed, self._closed = self._closed, True
        if not closed:
            self.file.close()
