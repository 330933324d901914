"""The number under which this process claims messages of an SQLite file, and the lock file that shows that it is alive.

Other processes release the claims of a number if its process ended or sent no heartbeat for too long. Then this process
continues under another number, and its writes with the old claims have no effect (ADR 3, 19).
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from typing_extensions import override

from postdate.backends.sqlite.connection import execute_with_retry
from postdate.backends.sqlite.processes import DEFAULT_HOLDS_AT_MOST, FileLiveness, Wakeups, claimants_folder
from postdate.backends.sqlite.rows import DUE, Transaction, queue_topic
from postdate.runtime import forks

_REGISTERED = "SELECT claimant FROM claimant"
_IS_REGISTERED = f"{_REGISTERED} WHERE claimant = ?"
_ADD_CLAIMANT = """
    INSERT INTO claimant (pid, started_at) VALUES (?, CAST(strftime('%s', 'now') AS INTEGER) * 1000000)"""

log = logging.getLogger("postdate.embedded")


class Registration(forks.ForkAware):
    """The registration of this process for one file: number, lock file, listeners, and callbacks for lost claims.

    In the child of a fork it starts empty: number, claims and listeners belong to the parent.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.agreed_bound: timedelta | None = None
        """The ``holds_at_most`` that a store or transport on the file has set; ``None`` if none has set it."""
        self.claimant = 0
        """The number under which this process claims messages; 0 before its first use of the file."""
        self.liveness: FileLiveness | None = None
        """Its lock file; ``None`` while it has no number."""
        self.wakeups = Wakeups()
        self.has_written = False
        """Whether this process has written since its last heartbeat."""
        self.has_other_writers = False
        """Whether another process wrote between the last two transactions of this one."""
        self.start_upkeep: Callable[[], None] = lambda: None
        """A function that is called each time this process has got a number."""
        self._data_version = 0
        """SQLite's ``data_version`` at the last transaction. It changes with each commit of another connection."""
        self._lost_listeners: list[Callable[[int], None]] = []
        forks.register(self)

    @property
    def folder(self) -> Path:
        """The folder with the lock files of all processes."""
        return claimants_folder(self._path)

    @property
    def holds_at_most(self) -> timedelta:
        """The time after which a process without a heartbeat loses its claims."""
        return self.agreed_bound or DEFAULT_HOLDS_AT_MOST

    def listen_for_lost_claims(self, on_lost: Callable[[int], None]) -> Callable[[], None]:
        """Register ``on_lost``, called with a number whose claims were lost; return a function to stop.

        It is called in the thread that noticed the loss.
        """
        self._lost_listeners.append(on_lost)

        def stop() -> None:
            with suppress(ValueError):  # in the child of a fork, which has forgotten it
                self._lost_listeners.remove(on_lost)

        return stop

    def report_lost_claims(self, claimant: int) -> None:
        """Report that the claims under a number are lost."""
        for on_lost in list(self._lost_listeners):
            on_lost(claimant)

    def begin(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        """Begin a transaction under a registered number; other processes would release the claims of another one."""
        while True:
            execute_with_retry(connection, "BEGIN IMMEDIATE", patience)
            version: int = connection.execute("PRAGMA data_version").fetchone()[0]
            self.has_other_writers, self._data_version = version != self._data_version, version
            # Only a commit of another process can have removed the number, so without one no query is needed.
            if not self.has_other_writers or connection.execute(_IS_REGISTERED, (self.claimant,)).fetchone():
                return
            connection.execute("ROLLBACK")
            self._register_again(connection, patience)

    def resume(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        """Register this process. If it has a number, have the next transaction check that it is still registered.

        The process has a number if its connection was closed for a fork.
        """
        if self.liveness is None:
            self._register(connection, patience)
        else:
            self._data_version = -1

    def _register_again(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        previous_claimant, liveness = self.claimant, self.liveness
        self._register(connection, patience)
        log.warning(
            "%s: this process sent no heartbeat, or its lock file was removed: others have its claims now, and what "
            "it still does with that has no effect; it goes on as claimant %d instead of %d",
            self._path,
            self.claimant,
            previous_claimant,
        )
        if liveness is not None:
            liveness.close()
        self.report_lost_claims(previous_claimant)
        self.wakeups.signal(self.wakeups.topics, ())  # wake-ups sent while it was not registered were lost

    def _register(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        """Get a number and its lock file, and register listeners. After an error the state is as before."""
        previous_claimant, liveness = self.claimant, None
        execute_with_retry(connection, "BEGIN IMMEDIATE", patience)
        try:
            # Lock before the commit: otherwise a process could see the row without the lock, and consider this process
            # dead. The number may be locked by a process that has a former file open; then use the next one.
            while liveness is None:
                self.claimant = int(connection.execute(_ADD_CLAIMANT, (os.getpid(),)).lastrowid or 0)
                liveness = FileLiveness.acquire(self.folder, self.claimant, self.holds_at_most)
                if liveness is None:
                    connection.execute("DELETE FROM claimant WHERE claimant = ?", (self.claimant,))
            connection.executemany(
                "INSERT INTO listener VALUES (?, ?, ?)",
                [(self.claimant, topic, self.wakeups.port) for topic in self.wakeups.topics],
            )
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self.claimant = previous_claimant
            if liveness is not None:
                liveness.close()
            raise
        self.liveness = liveness
        self.start_upkeep()

    def lock_again(self) -> None:
        """Lock the lock file once more after it was removed."""
        self.liveness = FileLiveness(self.folder, self.claimant, self.holds_at_most)

    @override
    def after_fork_in_child(self) -> None:
        self.liveness = None
        self.claimant = self._data_version = 0
        self.has_written = self.has_other_writers = False
        self._lost_listeners.clear()
        forks.prevent_destruction(self.wakeups)
        self.wakeups = Wakeups()


def registered_numbers(connection: sqlite3.Connection) -> set[int]:
    """Return the numbers of all processes that are registered."""
    return {claimant for (claimant,) in connection.execute(_REGISTERED)}


def unregister(tx: Transaction, claimant: int, *, has_died: bool = False) -> None:
    """Release the claims of a process, and delete its number. If it died, count that for its messages in queues."""
    released_count = tx.execute(
        "UPDATE delayed_message SET claimant = NULL, attempt_at = due WHERE claimant = ?", (claimant,)
    ).rowcount
    queues = tx.execute(
        "UPDATE queue_message SET claimant = NULL, unanswered = unanswered + ? WHERE claimant = ? RETURNING queue_id",
        (int(has_died), claimant),
    ).fetchall()
    tx.execute("DELETE FROM listener WHERE claimant = ?", (claimant,))
    tx.execute("DELETE FROM claimant WHERE claimant = ?", (claimant,))
    if released_count:
        tx.signal(DUE)
    for queue_id in {queue_id for (queue_id,) in queues}:
        (name,) = tx.execute("SELECT name FROM queue WHERE queue_id = ?", (queue_id,)).fetchone()
        tx.signal(queue_topic(name))
