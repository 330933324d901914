"""The number under which this process holds messages of an SQLite file, and its lock file: signs that it lives.

Other processes free the claims of a number whose process ended, or showed no life for too long. Then this process goes
on under another number, and what it still does with those claims has no effect (ADR 3, 19).
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

from postdate.backends.sqlite.connection import patiently
from postdate.backends.sqlite.processes import HELD_AT_MOST, FileLiveness, Wakeups, presence_folder
from postdate.backends.sqlite.rows import DUE, Transaction, queue_topic
from postdate.runtime import forks

_REGISTERED = "SELECT claimant FROM claimant"
_IS_REGISTERED = f"{_REGISTERED} WHERE claimant = ?"
_TAKE_NUMBER = """
    INSERT INTO claimant (pid, started_at) VALUES (?, CAST(strftime('%s', 'now') AS INTEGER) * 1000000)"""

log = logging.getLogger("postdate.embedded")


class Registration(forks.ForkAware):
    """This process among those that use one file: its number, its lock file, its listeners, and who is told of a loss.

    It begins anew in the child of a fork: number, claims and listeners are the parent's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.agreed_bound: timedelta | None = None
        """As the stores and transports on the file want it; ``None``: none has said so."""
        self.claimant = 0
        """Number under which this process holds messages; 0 before its first use of the file."""
        self.liveness: FileLiveness | None = None
        """Its lock file; ``None`` while it has no number."""
        self.wakeups = Wakeups()
        self.has_written = False
        """Since the last sign of life."""
        self.is_beside_others = False
        """Whether another process wrote between the last two transactions of this one."""
        self.start_upkeep: Callable[[], None] = lambda: None
        """Called with each number that this process takes."""
        self._data_version = 0
        """Of SQLite: changes with each commit of another connection."""
        self._when_fenced: list[Callable[[int], None]] = []
        forks.register(self)

    @property
    def folder(self) -> Path:
        """Where processes have their lock files."""
        return presence_folder(self._path)

    @property
    def holds_at_most(self) -> timedelta:
        """A process without a sign of life for this long loses its claims."""
        return self.agreed_bound or HELD_AT_MOST

    def when_fenced(self, fenced: Callable[[int], None]) -> Callable[[], None]:
        """Call ``fenced`` with a number whose claims became void, in the thread that noticed; return how to stop."""
        self._when_fenced.append(fenced)

        def stop() -> None:
            with suppress(ValueError):  # in the child of a fork, which has forgotten it
                self._when_fenced.remove(fenced)

        return stop

    def fence(self, claimant: int) -> None:
        """Tell that the claims under a number are void."""
        for fenced in list(self._when_fenced):
            fenced(claimant)

    def begin(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        """Begin a transaction under a registered number, as claims of an unregistered one would be freed by others."""
        while True:
            patiently(connection, "BEGIN IMMEDIATE", patience)
            version: int = connection.execute("PRAGMA data_version").fetchone()[0]
            self.is_beside_others, self._data_version = version != self._data_version, version
            # Only another process' commit can have removed it.
            if not self.is_beside_others or connection.execute(_IS_REGISTERED, (self.claimant,)).fetchone():
                return
            connection.execute("ROLLBACK")
            self._register_anew(connection, patience)

    def resume(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        """Register this process, or have its next transaction look whether its number is registered still.

        It has a number if its connection was closed for a fork.
        """
        if self.liveness is None:
            self._register(connection, patience)
        else:
            self._data_version = -1

    def _register_anew(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        before, liveness = self.claimant, self.liveness
        self._register(connection, patience)
        log.warning(
            "%s: this process showed no life, or its lock file was removed: what it held is with others now, and what "
            "it still does with that has no effect; it goes on as claimant %d instead of %d",
            self._path,
            self.claimant,
            before,
        )
        if liveness is not None:
            liveness.leave()
        self.fence(before)
        self.wakeups.signal(self.wakeups.topics, ())  # nobody could wake a process that was not registered

    def _register(self, connection: sqlite3.Connection, patience: Callable[[], float]) -> None:
        """Take a number and its lock file, and listen under it. After a failure the state is as before."""
        before, liveness = self.claimant, None
        patiently(connection, "BEGIN IMMEDIATE", patience)
        try:
            # Locked before the commit: no process ever sees the row without the lock. A process with a former file open
            # may have locked the number.
            while liveness is None:
                self.claimant = int(connection.execute(_TAKE_NUMBER, (os.getpid(),)).lastrowid or 0)
                liveness = FileLiveness.take(self.folder, self.claimant, self.holds_at_most)
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
            self.claimant = before
            if liveness is not None:
                liveness.leave()
            raise
        self.liveness = liveness
        self.start_upkeep()

    def lock_anew(self) -> None:
        """Lock the lock file once more after it was removed."""
        self.liveness = FileLiveness(self.folder, self.claimant, self.holds_at_most)

    @override
    def after_fork_in_child(self) -> None:
        self.liveness = None
        self.claimant = self._data_version = 0
        self.has_written = self.is_beside_others = False
        self._when_fenced.clear()
        forks.keep_for_ever(self.wakeups)
        self.wakeups = Wakeups()


def registered_numbers(connection: sqlite3.Connection) -> set[int]:
    """Return the numbers of all processes that are registered."""
    return {claimant for (claimant,) in connection.execute(_REGISTERED)}


def unregister(tx: Transaction, claimant: int, *, has_died: bool = False) -> None:
    """Free the claims of a process, and forget its number; of one that has died, count that for messages in queues."""
    freed = tx.execute(
        "UPDATE delayed_message SET claimant = NULL, attempt_at = due WHERE claimant = ?", (claimant,)
    ).rowcount
    queues = tx.execute(
        "UPDATE queue_message SET claimant = NULL, unanswered = unanswered + ? WHERE claimant = ? RETURNING queue_id",
        (int(has_died), claimant),
    ).fetchall()
    tx.execute("DELETE FROM listener WHERE claimant = ?", (claimant,))
    tx.execute("DELETE FROM claimant WHERE claimant = ?", (claimant,))
    if freed:
        tx.signal(DUE)
    for queue_id in {queue_id for (queue_id,) in queues}:
        (name,) = tx.execute("SELECT name FROM queue WHERE queue_id = ?", (queue_id,)).fetchone()
        tx.signal(queue_topic(name))
