"""Transactions on an SQLite file in this process. Writes that arrive together share a commit; reads have a snapshot.

All stores and transports of the process on one file share this object, so they never wait for each other's locks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio

from postdate.backends.sqlite.access import FileAccess
from postdate.backends.sqlite.connection import translate
from postdate.backends.sqlite.registration import Registration, registered_numbers
from postdate.backends.sqlite.rows import QueueRules, Transaction
from postdate.clock import steady_seconds
from postdate.errors import PostdateError
from postdate.ports import Recording, Wake
from postdate.runtime.threads import Job, group_of, run_in_thread

DEFAULT_RULES = QueueRules()
_JOBS_IN_ONE_COMMIT = 500  # the most works that share a commit
# The pause after a commit if another process writes, too. It is long enough for that process to get the lock, as it
# tries every 0.1 ms, and short compared with a batch.
_YIELD_SECONDS = 0.001

T = TypeVar("T")

_Work = Callable[[Transaction], Any]


class FileTransactions:
    """Reads and writes one file, and listens for writes of other processes.

    Args:
        path: of the file.
        recording: how much is recorded for audits.
        access: to its connections.
        registration: of this process.
    """

    def __init__(self, path: Path, recording: Recording, access: FileAccess, registration: Registration) -> None:
        self.path = path
        self.recording = recording
        self.rules = DEFAULT_RULES
        """The rules for expired messages in queues, which a transport may replace.

        By default messages expire by the machine's clock, without more rules.
        """
        self.access = access
        self.registration = registration

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def claimant(self) -> int:
        """The number under which this process claims messages; 0 before its first use of the file."""
        return self.registration.claimant

    # --- writing ------------------------------------------------------------------------------------------------

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run ``work`` in a write transaction and return its result after the commit.

        Works that arrive while a transaction runs share the next one. A work that raises is rolled back alone.
        """
        return await group_of(self, _JOBS_IN_ONE_COMMIT).run(self._commit_jobs, work)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        return await self.write(work)

    async def transaction(self, work: Callable[[Transaction], T]) -> T:
        return await self.write(work)

    def write_blocking(self, work: Callable[[Transaction], T]) -> T:
        """Call :meth:`write` in the calling thread, for pipeline processes and the command line."""
        job = Job[_Work, Any](work)
        self._commit_jobs([job])
        return job.get_result()

    def checkpoint_blocking(self) -> None:
        # Fetch all rows while holding the lock: an unfinished statement would make the commit of the next writer fail.
        self.access.write(lambda connection: connection.execute("PRAGMA wal_checkpoint(truncate)").fetchall())

    async def yield_to_writers(self) -> None:
        """Let another process write if one has written recently; called between batches."""
        if self.registration.has_other_writers:
            await anyio.sleep(_YIELD_SECONDS)

    def _commit_jobs(self, jobs: Sequence[Job[_Work, Any]]) -> None:
        try:
            topics, listeners = self.access.write(lambda connection: self._run_transaction(connection, jobs))
        except BaseException as error:  # noqa: BLE001 - each caller raises it in its own thread
            for job in jobs:
                job.error = job.error or error
            return
        finally:
            for job in jobs:
                job.is_done = True
        self.registration.wakeups.signal(topics, listeners)

    def _run_transaction(
        self, connection: sqlite3.Connection, jobs: Sequence[Job[_Work, Any]]
    ) -> tuple[set[str], list[tuple[str, int]]]:
        self.registration.begin(connection, self.access.patience)
        try:
            # once more: BEGIN may have waited long, and the file may have been replaced meanwhile
            self.access.check_in_place()
            topics: set[str] = set()
            for job in jobs:
                topics |= self._run_job(connection, job, is_only=len(jobs) == 1)
            listeners = self._listeners(connection, topics)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.registration.has_written = True
        return topics, listeners

    def _run_job(self, connection: sqlite3.Connection, job: Job[_Work, Any], *, is_only: bool) -> set[str]:
        transaction = Transaction(connection, self.claimant, self.recording, self.rules)
        if is_only:
            job.result = job.work(transaction)
            return transaction.topics
        connection.execute("SAVEPOINT part")
        try:
            job.result = job.work(transaction)
        except Exception as error:
            if not connection.in_transaction:  # SQLite rolled back the whole transaction, as when the disk is full
                raise
            connection.execute("ROLLBACK TO part")
            job.error = translate(error, self.path) if isinstance(error, sqlite3.Error) else error
            transaction.topics.clear()
        connection.execute("RELEASE part")
        return transaction.topics

    def _listeners(self, connection: sqlite3.Connection, topics: set[str]) -> list[tuple[str, int]]:
        if not topics:
            return []
        placeholders = ",".join("?" * len(topics))
        return connection.execute(
            f"SELECT topic, port FROM listener WHERE topic IN ({placeholders}) AND claimant <> ?",
            (*topics, self.claimant),
        ).fetchall()

    # --- reading ------------------------------------------------------------------------------------------------

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``work`` on one consistent snapshot, however long it takes."""
        return await run_in_thread(self.read_blocking, work)

    async def query(self, work: Callable[[sqlite3.Connection], T], *, patiently: bool = False) -> T:
        return await self.read(work)

    def read_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return self.access.read(work)

    query_blocking = read_blocking

    def is_in_force(self, claimant: int) -> bool:
        """Return whether claims under a number are in force. It reads the file only if the last heartbeat is old."""
        liveness = self.registration.liveness
        if claimant != self.claimant or liveness is None or self.access.is_known_replaced:
            return False
        if not liveness.is_overdue(steady_seconds()):
            return True
        with suppress(PostdateError):
            return claimant in self.read_blocking(registered_numbers)
        return False

    # --- listening ----------------------------------------------------------------------------------------------

    async def listen(self, topic: str, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` at each signal of ``topic``, by any process, until the returned function is called."""
        return await run_in_thread(self.listen_blocking, topic, wake)

    def listen_blocking(self, topic: str, wake: Wake) -> Callable[[], None]:
        wakeups = self.registration.wakeups
        port = wakeups.port
        self.write_blocking(
            lambda tx: tx.execute("INSERT OR REPLACE INTO listener VALUES (?, ?, ?)", (tx.claimant, topic, port))
        )
        return self.registration.wakeups.subscribe(topic, wake)
