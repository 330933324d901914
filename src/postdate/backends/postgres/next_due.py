"""What a store knows of the next due time without asking: when to wake its poller, and where its looks begin.

Looks begin at the earliest message that the last look saw, not at the beginning of time: while any session holds an old
snapshot, PostgreSQL keeps every delivered row in the index, and a look from the beginning would walk over all of them.
What is stored with an earlier due time is announced by its transaction and moves the beginning back; from time to time
a look begins at the beginning all the same. Source: ADR 0007.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from postdate.clock import from_microseconds
from postdate.ports import Wake

_SWEEP_EVERY_SECONDS: Final = 30.0
_CLAIMS_WITHOUT_A_LOOK: Final = 16
_LOOKS_AT_ONCE: Final = 64
_BEGINNING: Final = datetime.min.replace(tzinfo=UTC)


class PostgresNextDue:
    """Thread-safe."""

    NOTICE: Final = timedelta(minutes=5)
    """What is due within this is announced to other processes: far more than the minute that a poller sleeps at most,
    so that clocks may differ by minutes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: datetime | None = None
        self._known: datetime | None = None
        self._looks: dict[int, datetime | None] = {}
        self._next_look = 0
        self._swept_at = time.monotonic()
        self._wakes: list[Wake] = []
        self._claims = 0

    def listen(self, wake: Wake) -> Callable[[], None]:
        """Have ``wake`` called when something is due before all that is known; return the way to stop."""
        with self._lock:
            self._wakes.append(wake)

        def stop() -> None:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)

        return stop

    def since(self) -> datetime | None:
        """Return where a look begins; ``None``: at the beginning."""
        with self._lock:
            now = time.monotonic()
            if now - self._swept_at >= _SWEEP_EVERY_SECONDS:
                self._swept_at, self._since = now, None
            # What lies before the calendar is damaged, and only a look from the beginning finds it.
            return None if self._since == _BEGINNING else self._since

    def lags(self) -> bool:
        """Return whether so many batches were claimed since the last look that looks begin far behind by now."""
        with self._lock:
            self._claims += 1
            return self._claims >= _CLAIMS_WITHOUT_A_LOOK

    def look(self) -> int:
        """Note that a look begins: what is announced from now on may not be seen by it. Return its number."""
        with self._lock:
            self._claims = 0
            self._next_look += 1
            self._looks[self._next_look] = None
            if len(self._looks) > _LOOKS_AT_ONCE:  # of looks that failed nobody asks any more
                del self._looks[min(self._looks)]
            return self._next_look

    def seen(
        self, look: int, first: datetime | None, first_held: datetime | None, now: datetime | None
    ) -> datetime | None:
        """Note what a look saw; return when to look again.

        Args:
            look: its number.
            first: the earliest attempt among what nobody of this process holds; ``None`` without any.
            first_held: the earliest among what this process holds by row locks, and may have to give back.
            now: of the look, if it looked at everything due before that.
        """
        first = None if first is None else first.astimezone(UTC)
        with self._lock:
            heard = self._looks.pop(look, None)
            lowest = min((each for each in (first, first_held) if each is not None), default=now)
            if heard is _BEGINNING:  # whoever sleeps was woken: the next look is at once
                self._since = None
            elif lowest is not None:
                self._since = lowest if heard is None else min(lowest, heard)
            if heard is not None and heard is not _BEGINNING and (first is None or heard < first):
                first = heard
            self._known = first
            return first

    def heard(self, microseconds: int) -> None:
        """Take note of an announcement: something was stored that is due then."""
        self.stored(from_microseconds(microseconds))

    def stored(self, due: datetime) -> None:
        """Take note of something stored; wake who listens if it is due before all that is known."""
        with self._lock:
            if self._since is not None and due < self._since:
                self._since = due
            for look, heard in self._looks.items():
                self._looks[look] = due if heard is None else min(heard, due)
            if self._known is not None and due >= self._known:
                return
            self._known = due
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    def forget(self) -> None:
        """Announcements may have been missed: begin at the beginning, now."""
        with self._lock:
            self._since = self._known = None
            self._looks = dict.fromkeys(self._looks, _BEGINNING)
            wakes = list(self._wakes)
        for wake in wakes:
            wake()
