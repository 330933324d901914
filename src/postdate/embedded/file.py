"""One SQLite file as this process uses it: fair, grouped write transactions, snapshots for reading, claims, news.

A process opens a file once, however many stores and transports are on it: they share one writing connection, so they
never wait for each other's locks, and writes that arrive together are committed together.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import anyio
from anyio.lowlevel import RunVar

from postdate.embedded.connection import check_schema, connect, create_schema, patiently
from postdate.embedded.errors import translate, translated
from postdate.embedded.expiring import BATCH, DEAD_LETTERS, has_expired, take_out_expired
from postdate.embedded.housekeeping import Chore, Housekeeping
from postdate.embedded.presence import Presence, is_gone, presence_folder
from postdate.embedded.space import RoomToGiveBack, give_back, shape
from postdate.embedded.transaction import QueueRules, Transaction, queue_topic
from postdate.embedded.wakeup import Wakeups
from postdate.errors import ConfigurationError, PostdateError, StoreError, StoreNotSetUp, StoreUnavailable
from postdate.ports import Recording, Wake
from postdate.threads import in_thread
from postdate.together import Job, Together

__all__ = ["DUE", "SqliteFile", "Transaction", "queue_topic"]

DUE = "due"
"""Topic: a message was stored that is due before all others."""

_DEFAULT_RULES = QueueRules()
_JOBS_IN_ONE_COMMIT = 500
_HOUSEKEEPING_SECONDS = 1.0
# After a commit beside another writer: long enough for its turn (it asks every 0.1 ms), short beside a batch.
_COURTESY_SECONDS = 0.001

log = logging.getLogger("postdate.embedded")

# Not only those that are registered: should a lock file be removed by hand, a living process is taken for gone, and
# what it holds afterwards must not stay held when it really ends.
_CLAIMANTS = """
    SELECT claimant FROM claimant
    UNION SELECT claimant FROM delayed_message WHERE claimant IS NOT NULL
    UNION SELECT claimant FROM queue_message WHERE claimant IS NOT NULL"""

T = TypeVar("T")

_Work = Callable[[Transaction], Any]
_GROUPS: RunVar[WeakKeyDictionary[SqliteFile, Together[_Work, Any]]] = RunVar("postdate.embedded.groups")


class SqliteFile:
    """The shared handle of one file in this process. Use :meth:`open`, and :meth:`close` as often.

    Args:
        path: absolute.
        synchronous: see :func:`postdate.embedded.connection.connect`.
        recording: how much the store and the queues of this process record.
    """

    _open: ClassVar[dict[tuple[int, Path], SqliteFile]] = {}
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        create: bool = True,
        rules: QueueRules | None = None,
    ) -> SqliteFile:
        """Return the handle of this process for ``path``; nothing is read or written before the first use.

        Args:
            path: of the file.
            synchronous: see :func:`postdate.embedded.connection.connect`.
            recording: how much the store and the queues of this process record.
            create: create the file and its tables when they are missing.
            rules: of the queues, from a transport; ``None``, from a store: as the transport on this file has them.

        Raises:
            ConfigurationError: it is open already with other settings, or ``synchronous`` is unknown.
        """
        if synchronous not in {"full", "normal"}:
            raise ConfigurationError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        real = Path(path).expanduser().resolve()
        with cls._open_lock:
            file = cls._open.get((os.getpid(), real))
            if file is None:
                file = cls(real, synchronous=synchronous, recording=recording, create=create)
                cls._open[os.getpid(), real] = file
            if (file.synchronous, file.recording) != (synchronous, recording):
                raise ConfigurationError(
                    f"{real} is open in this process with synchronous={file.synchronous!r} and "
                    f"recording={file.recording.value!r}; store and transport on one file need the same settings"
                )
            file._agree_on(rules)
            file._users += 1
        return file

    def __init__(self, path: Path, *, synchronous: str, recording: Recording, create: bool) -> None:
        self.path = path
        self.synchronous = synchronous
        self.recording = recording
        self._create = create
        self._users = 0
        self._pid = os.getpid()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._presence: Presence | None = None
        self._claimant = 0
        self._writing = threading.RLock()
        self._reading = threading.RLock()
        self._beside_others = False
        self._data_version = 0
        self._rules: QueueRules | None = None
        self._room = RoomToGiveBack()
        self._wakeups = Wakeups()
        self._chores = Housekeeping(
            str(path),
            _HOUSEKEEPING_SECONDS,
            [
                Chore("cannot look for processes that ended", self._look_for_the_dead),
                Chore("cannot take expired messages out of their queues", self._take_out_expired),
                Chore("cannot give back room on the disk", self._give_back_room),
            ],
        )

    def _agree_on(self, rules: QueueRules | None) -> None:
        """Take the rules of a transport; the first one decides."""
        if rules is None:
            return
        if self._rules is None:
            self._rules = rules
        elif not self._rules.agrees_with(rules):
            raise ConfigurationError(
                f"{self.path} is open in this process with {self._rules}; transports on one file need the same clock "
                f"and rules of expiry, not {rules}"
            )

    @property
    def rules(self) -> QueueRules:
        """How the queues treat what has expired; by the system's clock as long as no transport has said otherwise."""
        return self._rules or _DEFAULT_RULES

    @property
    def claimant(self) -> int:
        """Number under which this process holds messages; 0 before its first use of the file."""
        return self._claimant

    # --- writing ------------------------------------------------------------------------------------------------

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Do ``work`` in a write transaction and return its result after the commit.

        Works that arrive while a transaction runs share the next one; one that raises is rolled back alone.

        Raises:
            StoreError: the transaction failed; nothing of it was kept.
        """
        return await self._group().run(self._commit_together, work)

    def _group(self) -> Together[_Work, Any]:
        try:
            groups = _GROUPS.get()
        except LookupError:
            groups = WeakKeyDictionary[SqliteFile, Together[_Work, Any]]()
            _GROUPS.set(groups)
        return groups.setdefault(self, Together(_JOBS_IN_ONE_COMMIT))

    def write_blocking(self, work: Callable[[Transaction], T]) -> T:
        """Do the same as :meth:`write` in the calling thread; for pipeline processes and the command line."""
        job = Job[_Work, Any](work)
        self._commit_together([job])
        return job.outcome()

    def checkpoint_blocking(self) -> None:
        """Bring everything from the log into the database file and start the log anew."""
        with self._writing, translated(self.path):
            self._writing_connection().execute("PRAGMA wal_checkpoint(truncate)")

    async def give_way(self) -> None:
        """Give other processes a turn if one wrote lately; for whoever writes batch after batch."""
        if self._beside_others:
            await anyio.sleep(_COURTESY_SECONDS)

    def _commit_together(self, jobs: Sequence[Job[_Work, Any]]) -> None:
        with self._writing:
            try:
                with translated(self.path):
                    topics, elsewhere = self._transaction(self._writing_connection(), jobs)
            except BaseException as error:  # noqa: BLE001 - handed to each caller, whose thread this is not
                for job in jobs:
                    job.error = job.error or error
                return
            finally:
                for job in jobs:
                    job.done = True
        self._wakeups.signal(topics, elsewhere)

    def _transaction(
        self, connection: sqlite3.Connection, jobs: Sequence[Job[_Work, Any]]
    ) -> tuple[set[str], list[tuple[str, int]]]:
        patiently(connection, "BEGIN IMMEDIATE")
        try:
            self._notice_others(connection)
            topics: set[str] = set()
            for job in jobs:
                topics |= self._part(connection, job, alone=len(jobs) == 1)
            elsewhere = self._listeners(connection, topics)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return topics, elsewhere

    def _part(self, connection: sqlite3.Connection, job: Job[_Work, Any], *, alone: bool) -> set[str]:
        transaction = Transaction(connection, self._claimant, self.recording, self.rules)
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

    def _notice_others(self, connection: sqlite3.Connection) -> None:
        version: int = connection.execute("PRAGMA data_version").fetchone()[0]
        self._beside_others, self._data_version = version != self._data_version, version

    def _listeners(self, connection: sqlite3.Connection, topics: set[str]) -> list[tuple[str, int]]:
        if not topics:
            return []
        marks = ",".join("?" * len(topics))
        rows = connection.execute(
            f"SELECT topic, port FROM listener WHERE topic IN ({marks}) AND claimant <> ?",
            (*topics, self._claimant),
        )
        return rows.fetchall()

    # --- reading ------------------------------------------------------------------------------------------------

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what ``work`` reads from one consistent snapshot."""
        return await in_thread(self.read_blocking, work)

    def read_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do the same as :meth:`read` in the calling thread."""
        with self._reading, translated(self.path):
            connection = self._reading_connection()
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("COMMIT")

    def snapshot(self) -> sqlite3.Connection:
        """Return a connection of the caller's own, in a read transaction; to be closed by the caller. Blocking."""
        connection = connect(self.path, read_only=True)
        with translated(self.path):
            check_schema(connection, self.path)
            connection.execute("BEGIN")
        return connection

    # --- claims and news ----------------------------------------------------------------------------------------

    async def listen(self, topic: str, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` at news of ``topic``, from any process, until the returned function is called."""
        return await in_thread(self.listen_blocking, topic, wake)

    def listen_blocking(self, topic: str, wake: Wake) -> Callable[[], None]:
        """Do the same as :meth:`listen` in the calling thread."""
        port = self._wakeups.port
        self.write_blocking(
            lambda tx: tx.execute("INSERT OR REPLACE INTO listener VALUES (?, ?, ?)", (tx.claimant, topic, port))
        )
        return self._wakeups.subscribe(topic, wake)

    def setup_blocking(self) -> None:
        """Create the file and its tables."""
        with self._writing, translated(self.path):
            self._writing_connection()

    async def setup(self) -> None:
        """Create the file and its tables; idempotent."""
        await in_thread(self.setup_blocking)

    def _housekeeping(self) -> None:
        """Do one round of what a thread does every second."""
        self._chores.round()

    def _look_for_the_dead(self) -> bool:
        """Free what processes held that are gone."""
        if self._presence is not None and not self._presence.stands():
            self._reappear()
        self.free_claims_of_the_dead()
        return False

    def _take_out_expired(self) -> bool:
        """Take messages out of their queues whose time has run out: nobody may ever receive there again."""
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
        """Make the file smaller when much of it has been free for a while."""
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
        """Take a lock file anew that somebody has removed: without it other processes take this one for gone."""
        log.warning("%s was cleaned while processes were at work; leave it alone", self._presence_folder)
        self._presence = Presence(self._presence_folder, self._claimant)
        listening = [(self._claimant, topic, self._wakeups.port) for topic in self._wakeups.topics]

        def register(tx: Transaction) -> None:
            tx.execute(
                "INSERT OR IGNORE INTO claimant (claimant, pid, started_at) VALUES (?, ?, 0)",
                (tx.claimant, os.getpid()),
            )
            tx.executemany("INSERT OR REPLACE INTO listener VALUES (?, ?, ?)", listening)

        self.write_blocking(register)

    def free_claims_of_the_dead(self) -> int:
        """Give back what processes held that are gone; return how many were. Blocking."""
        known = self.read_blocking(lambda c: c.execute(_CLAIMANTS).fetchall())
        others = {claimant for (claimant,) in known} - {self._claimant}
        gone = [claimant for claimant in sorted(others) if is_gone(self._presence_folder, claimant)]
        for claimant in gone:
            log.info("process with claimant number %d is gone; what it held is free again", claimant)
            self.write_blocking(lambda tx, claimant=claimant: _forget(tx, claimant))
        return len(gone)

    # --- connections --------------------------------------------------------------------------------------------

    @property
    def _presence_folder(self) -> Path:
        return presence_folder(self.path)

    def _writing_connection(self) -> sqlite3.Connection:
        if self._writer is None:
            self._check_usable()
            connection = connect(self.path, synchronous=self.synchronous)
            try:
                if self._create:
                    create_schema(connection, self.path)
                else:
                    check_schema(connection, self.path)
                self._register(connection)
            except OSError as error:
                connection.close()
                raise StoreUnavailable(f"{self._presence_folder}: {error}") from error
            except BaseException:
                connection.close()
                raise
            self._writer = connection
            self._chores.start()
        return self._writer

    def _register(self, connection: sqlite3.Connection) -> None:
        patiently(connection, "BEGIN IMMEDIATE")
        try:
            cursor = connection.execute(
                "INSERT INTO claimant (pid, started_at) VALUES (?, CAST(strftime('%s', 'now') AS INTEGER) * 1000000)",
                (os.getpid(),),
            )
            # Locked before the commit: nobody ever sees the row without the lock.
            self._claimant = int(cursor.lastrowid or 0)
            self._presence = Presence(self._presence_folder, self._claimant)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if self._presence is not None:
                self._presence.leave()
                self._presence = None
            raise

    def _check_usable(self) -> None:
        """Refuse a handle that was closed, or that a forked child has inherited: SQLite forbids to share it."""
        if self._users <= 0:
            raise StoreError(f"{self.path} was closed in this process; open a store or transport on it again")
        if self._pid != os.getpid():
            raise StoreError(f"{self.path} was opened before this process was forked; open it afterwards")

    def _reading_connection(self) -> sqlite3.Connection:
        self._check_usable()
        if self._reader is None:
            self._reader = self._looking_connection()
        return self._reader

    def _looking_connection(self) -> sqlite3.Connection:
        """Open the file for looking, which needs no number in it and writes nothing, so a full disk does not matter."""
        try:
            connection = connect(self.path, read_only=True)
        except PostdateError:
            self.setup_blocking()  # it is missing; or its log is, which only a writer may create
            return connect(self.path, read_only=True)
        try:
            check_schema(connection, self.path)
        except StoreNotSetUp:
            self.setup_blocking()
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Give the handle back; the last user's call frees what is still held and closes the file. Blocking."""
        if self._pid != os.getpid():  # a forked child: everything belongs to its parent
            return
        with self._open_lock:
            if self._users == 1:
                self._chores.stop()  # first: what it would begin now would find the file closed
            self._users -= 1
            if self._users > 0:
                return
            self._open.pop((os.getpid(), self.path), None)
        self._chores.join()
        self._wakeups.stop_listening()
        with self._reading, self._writing:
            if self._reader is not None:  # first: only a writer that closes last takes the log away
                self._reader.close()
                self._reader = None
            if self._writer is not None:
                with suppress(PostdateError):  # full or unwritable by now: the next process finds us gone and does it
                    self.write_blocking(lambda tx: _forget(tx, tx.claimant))
                self._writer.close()
                self._writer = None
            if self._presence is not None:
                self._presence.leave()
                self._presence = None
        self._wakeups.close()


def _forget(tx: Transaction, claimant: int) -> None:
    """Free what a claimant holds and forget it."""
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
