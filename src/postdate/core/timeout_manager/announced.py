"""Announced timeouts that may still be stored: none is announced twice. Pure. Source: specification 4.7; ADR 0014."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from postdate.ports.timeouts import DueTimeout

AT_ONCE: Final = 2_000
"""Timeouts announced and not heard of since: with so many, no others are announced. A backlog waits in its storage,
which is asked for it piece by piece, not in the queue of the dispatcher."""

REMEMBERED: Final = 100_000
"""Timeouts announced whose control messages are in the error queue, or that others have claimed: these hold up no
others."""

HEARD_OF_WITHIN: Final = timedelta(minutes=10)
"""A timeout that was announced longer ago and is still stored does not count as on its way any more."""

log = logging.getLogger("postdate.timeout_manager")


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    due: datetime
    since: datetime


class Announced:
    """Remembers announced timeouts, within bounds."""

    def __init__(self, floor: datetime, at_once: int = AT_ONCE, remembered: int = REMEMBERED) -> None:
        self.floor = floor
        """Due time, exclusive, where looks for missed timeouts begin. It rises when more would have to be remembered
        than there is room for: timeouts due below it have been announced, and one stored there later is found at the
        next start only."""
        self._at_once, self._remembered = at_once, remembered
        self._on_their_way: dict[str, _OnItsWay] = {}
        self._left: dict[str, datetime] = {}

    def __contains__(self, timeout_id: str) -> bool:
        return timeout_id in self._on_their_way or timeout_id in self._left

    @property
    def room(self) -> int:
        """How many more may be announced now; 0 or more."""
        return max(self._at_once - len(self._on_their_way), 0)

    @property
    def has_much_room(self) -> bool:
        """Whether announcing more is worth a look."""
        return 2 * self.room >= self._at_once

    def add(self, timeouts: Collection[DueTimeout], now: datetime) -> None:
        for each in timeouts:
            self._on_their_way[each.timeout_id] = _OnItsWay(each.due, now)

    def discard(self, timeout_id: str) -> None:
        """Note that a timeout is not stored any more, or was not announced after all."""
        self._on_their_way.pop(timeout_id, None)
        self._left.pop(timeout_id, None)

    def leave(self, timeout_id: str) -> None:
        """Note that a timeout stays stored, and that nothing will be heard of it for now."""
        known = self._on_their_way.pop(timeout_id, None)
        if known is not None:
            self._left[timeout_id] = known.due
            self._keep_bounds()

    def found(self, after: datetime, until: datetime, timeouts: Collection[DueTimeout], now: datetime) -> None:
        """Reconcile with the storage: ``timeouts`` are all that is due in ``(after, until]``; forget others."""
        stored = {each.timeout_id for each in timeouts}
        for timeout_id, on_its_way in list(self._on_their_way.items()):
            if after < on_its_way.due <= until and timeout_id not in stored:
                self.discard(timeout_id)
            elif not timedelta(0) <= now - on_its_way.since <= HEARD_OF_WITHIN:
                # Announced in the future: the clock was set back. Others may have dispatched it long ago, and looks do
                # not come as far as its due time: it must not delay timeouts that are due before.
                self.leave(timeout_id)
        for timeout_id, due in list(self._left.items()):
            if after < due <= until and timeout_id not in stored:
                self.discard(timeout_id)

    def _keep_bounds(self) -> None:
        if len(self._left) <= self._remembered:
            return
        by_due = sorted(self._left.items(), key=lambda each: each[1])
        forgotten = by_due[: len(by_due) // 2]
        self.floor = max(self.floor, forgotten[-1][1])
        self._left = {timeout_id: due for timeout_id, due in by_due if due > self.floor}
        log.warning(
            "%d due timeouts are stored whose control messages went to the error queue; those due until %s are not "
            "looked for any more before the next start: return the messages, or have them removed",
            len(by_due),
            self.floor,
        )
