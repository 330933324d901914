"""The work of a process for a file in each second: signs of life, claims of dead processes, expired messages, pages."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from datetime import datetime

from typing_extensions import override

from postdate.backends.sqlite.housekeeping import (
    BATCH,
    DEAD_LETTERS,
    RoomToGiveBack,
    give_back,
    has_expired,
    shape,
    take_out_expired,
)
from postdate.backends.sqlite.processes import Silence, forget, is_gone, last_sign
from postdate.backends.sqlite.registration import registered_numbers, unregister
from postdate.backends.sqlite.rows import DUE, next_attempt
from postdate.backends.sqlite.transactions import FileTransactions
from postdate.clock import steady_seconds
from postdate.runtime.housekeeping import Chore, Housekeeping
from postdate.runtime.resource import resource_at

_HOUSEKEEPING_SECONDS = 1.0
# Between two checks at most this time counts as silence of other processes, as this process may have been frozen.
_LONGEST_BETWEEN_LOOKS_SECONDS = 2 * _HOUSEKEEPING_SECONDS
_HOLDERS = """
    SELECT claimant FROM delayed_message WHERE claimant IS NOT NULL
    UNION SELECT claimant FROM queue_message WHERE claimant IS NOT NULL"""
_HOLDS = """
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
                Chore("cannot look at the file", self._look_at_the_file),
                Chore("cannot show that this process lives", self._show_life),
                Chore("cannot look for what is due", self._look_for_news),
                Chore("cannot look for processes that ended", self._look_for_the_dead),
                Chore("cannot take expired messages out of their queues", self._take_out_expired),
                Chore("cannot give back room on the disk", self._give_back_room),
            ],
        )
        self._file = file
        self._registration = file.registration
        self._silence = Silence()
        self._looked_at = 0.0
        """Monotonic seconds of the last check of other processes."""
        self._next_attempt: datetime | None = None
        """The next attempt in the file at the last check."""
        self._room = RoomToGiveBack()
        file.registration.start_upkeep = self.start

    @override
    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._silence, self._looked_at, self._next_attempt = Silence(), 0.0, None

    def _look_at_the_file(self) -> bool:
        if self._file.access.is_replaced():
            self.stop()
            wakeups = self._registration.wakeups
            wakeups.signal(wakeups.topics, ())  # waiting pollers and receivers then find the error at once
        return False

    def _show_life(self) -> bool:
        """Give a sign of life if this process has claims. Without claims no sign is needed."""
        liveness, now = self._registration.liveness, steady_seconds()
        if liveness is None or not liveness.sign_is_wanted(now):
            return False
        if self._registration.has_written or self._holds_something():
            self._registration.has_written = False
            with suppress(FileNotFoundError):  # the file was removed: `_look_for_the_dead` handles that
                liveness.show_life(now)
        return False

    def _holds_something(self) -> bool:
        values = {"claimant": self._file.claimant}
        return self._file.read_blocking(lambda c: bool(c.execute(_HOLDS, values).fetchone()[0]))

    def _look_for_news(self) -> bool:
        """Wake pollers if the next attempt is earlier than at the last check: the wake-up for it may be lost."""
        if DUE in self._registration.wakeups.topics:
            before, self._next_attempt = self._next_attempt, self._file.read_blocking(next_attempt)
            if self._next_attempt is not None and (before is None or self._next_attempt < before):
                self._registration.wakeups.signal([DUE], ())
        return False

    # --- other processes ----------------------------------------------------------------------------------------

    def _look_for_the_dead(self) -> bool:
        if self._registration.liveness is not None and not self._registration.liveness.stands():
            self._reappear()
        self.free_claims_of_the_dead()
        return False

    def _reappear(self) -> None:
        """Create and lock the lock file again after its removal: without it this process counts as dead."""
        before = self._file.claimant
        # If another process has released its claims already, this write registers a new number with a new file.
        self._file.write_blocking(lambda _: None)
        if self._file.claimant == before:
            folder = self._registration.folder
            log.warning("%s was cleaned while processes were at work; leave it alone", folder)
            self._registration.lock_anew()

    def free_claims_of_the_dead(self) -> int:
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
        silent = self._silent(holders - {self._file.claimant, *dead})
        for claimant in silent:
            text = "process with claimant number %d shows no life (frozen, or swapped out); what it held is free again"
            log.warning(text, claimant)
            self._file.write_blocking(lambda tx, claimant=claimant: unregister(tx, claimant, has_died=True))
            forget(folder, claimant)
        return len(dead) + len(silent)

    def _silent(self, holders: set[int]) -> list[int]:
        before, self._looked_at = self._looked_at, steady_seconds()
        passed = min(self._looked_at - before, _LONGEST_BETWEEN_LOOKS_SECONDS)
        return self._silence.look(holders, lambda claimant: last_sign(self._registration.folder, claimant), passed)

    # --- messages that expired, and the room that messages left -------------------------------------------------

    def _take_out_expired(self) -> bool:
        now = self._file.rules.now()
        if not self._file.read_blocking(lambda c: has_expired(c, now)):
            return False
        dropped = kept = 0

        def share() -> bool:
            nonlocal dropped, kept
            batch = self._file.write_blocking(lambda tx: take_out_expired(tx, now))
            dropped, kept = dropped + batch.dropped, kept + batch.kept
            return batch.dropped + batch.kept == BATCH

        try:
            return self.in_shares(share)
        finally:
            if dropped + kept:
                text = "%d messages expired in their queues: %d are gone, %d are kept in %s"
                log.info(text, dropped + kept, dropped, kept, DEAD_LETTERS)

    def _give_back_room(self) -> bool:
        room = self._file.read_blocking(shape)
        pages = 0 if room is None else self._room.look(*room)
        if not pages:
            return False
        remaining = pages

        def share() -> bool:
            nonlocal remaining
            remaining = self._file.write_blocking(lambda tx: give_back(tx, remaining))
            return remaining > 0

        more = self.in_shares(share)
        self._file.checkpoint_blocking()  # the file becomes smaller only when the log is copied into it
        log.debug("%s: %d free pages given back", self._file.path, pages - remaining)
        return more


def _holders(connection: sqlite3.Connection) -> set[int]:
    return {claimant for (claimant,) in connection.execute(_HOLDERS)}
