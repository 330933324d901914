"""Heartbeats, claims of dead processes, expired messages, free pages: a process's work for a file in each second."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from datetime import datetime

from typing_extensions import override

from postdate.backends.sqlite import housekeeping
from postdate.backends.sqlite.processes import SilenceObserver, is_gone, read_heartbeat, remove_files
from postdate.backends.sqlite.registration import registered_numbers, unregister
from postdate.backends.sqlite.rows import DUE, next_attempt
from postdate.backends.sqlite.transactions import FileTransactions
from postdate.clock import steady_seconds
from postdate.runtime.housekeeping import Chore, Housekeeping
from postdate.runtime.resource import resource_at

_HOUSEKEEPING_SECONDS = 1.0
# Between two checks at most this time counts as silence of other processes, as this process may have been frozen.
_MAX_OBSERVED_SECONDS = 2 * _HOUSEKEEPING_SECONDS
_HOLDERS = """
    SELECT claimant FROM delayed_message WHERE claimant IS NOT NULL
    UNION SELECT claimant FROM queue_message WHERE claimant IS NOT NULL"""
_HAS_CLAIMS = """
    SELECT EXISTS (SELECT 1 FROM delayed_message WHERE claimant = :claimant)
        OR EXISTS (SELECT 1 FROM queue_message WHERE claimant = :claimant)"""

log = logging.getLogger("postdate.embedded")


class FileUpkeep(Housekeeping):
    """The chores of one file in this process, in a thread that begins when the process is registered there."""

    def __init__(self, file: FileTransactions) -> None:
        super().__init__(
            resource_at(("sqlite", file.where), file.where),
            _HOUSEKEEPING_SECONDS,
            [
                Chore("cannot inspect the file", self._check_file),
                Chore("cannot write the heartbeat of this process", self._write_heartbeat),
                Chore("cannot query due messages", self._check_next_attempt),
                Chore("cannot find processes that ended", self._check_processes),
                Chore("cannot remove expired messages from their queues", self._remove_expired),
                Chore("cannot free space on the disk", self._release_pages),
            ],
        )
        self._file = file
        self._registration = file.registration
        self._silence_observer = SilenceObserver()
        self._checked_at = 0.0
        """Monotonic seconds of the last check of other processes."""
        self._next_attempt: datetime | None = None
        """The next attempt in the file at the last check."""
        self._free_pages = housekeeping.FreePages()
        file.registration.start_upkeep = self.start

    @override
    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._silence_observer, self._checked_at, self._next_attempt = SilenceObserver(), 0.0, None

    def _check_file(self) -> bool:
        if self._file.access.is_replaced():
            self.stop()
            wakeups = self._registration.wakeups
            wakeups.signal(wakeups.topics, ())  # waiting pollers and receivers then find the error at once
        return False

    def _write_heartbeat(self) -> bool:
        """Write a heartbeat if this process has claims. Without claims none is needed."""
        liveness, now = self._registration.liveness, steady_seconds()
        if liveness is None or not liveness.is_heartbeat_due(now):
            return False
        if self._registration.has_written or self._has_claims():
            self._registration.has_written = False
            with suppress(FileNotFoundError):  # the file was removed: `_check_processes` handles that
                liveness.write_heartbeat(now)
        return False

    def _has_claims(self) -> bool:
        values = {"claimant": self._file.claimant}
        return self._file.read_blocking(lambda c: bool(c.execute(_HAS_CLAIMS, values).fetchone()[0]))

    def _check_next_attempt(self) -> bool:
        """Wake pollers if the next attempt is earlier than at the last check: the wake-up for it may be lost."""
        if DUE in self._registration.wakeups.topics:
            previous, self._next_attempt = self._next_attempt, self._file.read_blocking(next_attempt)
            if self._next_attempt is not None and (previous is None or self._next_attempt < previous):
                self._registration.wakeups.signal([DUE], ())
        return False

    # --- other processes ----------------------------------------------------------------------------------------

    def _check_processes(self) -> bool:
        if self._registration.liveness is not None and not self._registration.liveness.is_in_place():
            self._restore_lock_file()
        self.release_dead_claims()
        return False

    def _restore_lock_file(self) -> None:
        """Create and lock the lock file again after its removal: without it this process counts as dead."""
        previous_claimant = self._file.claimant
        # If another process has released its claims already, this write registers a new number with a new file.
        self._file.write_blocking(lambda _: None)
        if self._file.claimant == previous_claimant:
            folder = self._registration.folder
            log.warning("%s was cleaned while processes were at work; leave it alone", folder)
            self._registration.lock_again()

    def release_dead_claims(self) -> int:
        """Release the claims of processes that ended or are silent; return the number of processes. Blocking."""
        numbers, holders = self._file.read_blocking(lambda c: (registered_numbers(c), _holders(c)))
        own, folder = self._file.claimant, self._registration.folder
        if own and own not in numbers:
            self._file.write_blocking(lambda _: None)  # registers this process again
            own = self._file.claimant
        dead = [claimant for claimant in sorted((numbers | holders) - {own}) if is_gone(folder, claimant)]
        for claimant in dead:
            log.info("process with claimant number %d is gone; what it held is free again", claimant)
            self._file.write_blocking(lambda tx, claimant=claimant: unregister(tx, claimant, has_died=True))
        silent = self._find_silent(holders - {self._file.claimant, *dead})
        for claimant in silent:
            text = (
                "process with claimant number %d sends no heartbeat (frozen, or swapped out); its claims are released"
            )
            log.warning(text, claimant)
            self._file.write_blocking(lambda tx, claimant=claimant: unregister(tx, claimant, has_died=True))
            remove_files(folder, claimant)
        return len(dead) + len(silent)

    def _find_silent(self, holders: set[int]) -> list[int]:
        previous, self._checked_at = self._checked_at, steady_seconds()
        elapsed_seconds = min(self._checked_at - previous, _MAX_OBSERVED_SECONDS)
        return self._silence_observer.find_silent(
            holders, lambda claimant: read_heartbeat(self._registration.folder, claimant), elapsed_seconds
        )

    # --- expired messages, and free pages -----------------------------------------------------------------------

    def _remove_expired(self) -> bool:
        now = self._file.rules.now()
        if not self._file.read_blocking(lambda c: housekeeping.has_expired(c, now)):
            return False
        deleted_count = dead_letter_count = 0

        def remove_batch() -> bool:
            nonlocal deleted_count, dead_letter_count
            batch = self._file.write_blocking(lambda tx: housekeeping.remove_expired(tx, now))
            deleted_count, dead_letter_count = (
                deleted_count + batch.deleted_count,
                dead_letter_count + batch.dead_letter_count,
            )
            return batch.deleted_count + batch.dead_letter_count == housekeeping.BATCH

        try:
            return self.run_shares(remove_batch)
        finally:
            if deleted_count + dead_letter_count:
                text = "%d messages expired in their queues: %d are gone, %d are kept in %s"
                log.info(
                    text, deleted_count + dead_letter_count, deleted_count, dead_letter_count, housekeeping.DEAD_LETTERS
                )

    def _release_pages(self) -> bool:
        counts = self._file.read_blocking(housekeeping.page_counts)
        pages = 0 if counts is None else self._free_pages.count_releasable(*counts)
        if not pages:
            return False
        remaining = pages

        def release_batch() -> bool:
            nonlocal remaining
            remaining = self._file.write_blocking(lambda tx: housekeeping.release_pages(tx, remaining))
            return remaining > 0

        has_more = self.run_shares(release_batch)
        self._file.checkpoint_blocking()  # the file becomes smaller only when the log is copied into it
        log.debug("%s: %d free pages given back", self._file.path, pages - remaining)
        return has_more


def _holders(connection: sqlite3.Connection) -> set[int]:
    return {claimant for (claimant,) in connection.execute(_HOLDERS)}
