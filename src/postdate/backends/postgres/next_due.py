"""The next-due cache of PostgreSQL, which also knows where a look for due messages may begin.

A look begins at the earliest message of the last look, not at the beginning of time: while any session holds an old
snapshot, PostgreSQL keeps every delivered row in the index, and a look from the beginning would walk over all of them.
A message stored with an earlier due time is announced by its transaction and moves the beginning back; now and then a
look begins at the beginning all the same. Source: ADR 0057.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from typing_extensions import override

from postdate.clock import steady_seconds
from postdate.runtime.next_due import NextDue

_SWEEP_EVERY_SECONDS: Final = 30.0
_CLAIMS_WITHOUT_A_LOOK: Final = 16
_BEGINNING: Final = datetime.min.replace(tzinfo=UTC)


class PostgresNextDue(NextDue[datetime]):
    """Thread-safe. Date-times in UTC."""

    NOTICE: Final = timedelta(minutes=5)
    """Messages due within this are announced to other processes: far more than the minute that a poller sleeps at most,
    so that clocks may differ by minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._since: datetime | None = None
        self._swept_at = steady_seconds()
        self._claims = 0

    def since(self) -> datetime | None:
        """Return the attempt time at which a look begins; ``None``: without a lower bound."""
        with self._lock:
            now = steady_seconds()
            if now - self._swept_at >= _SWEEP_EVERY_SECONDS:
                self._swept_at, self._since = now, None
            # A time before the calendar is damaged, and only a look without a bound finds it.
            return None if self._since == _BEGINNING else self._since

    def lags(self) -> bool:
        """Count a batch; return whether so many were claimed since the last look that its lower bound is far behind."""
        with self._lock:
            self._claims += 1
            return self._claims >= _CLAIMS_WITHOUT_A_LOOK

    @override
    def look(self) -> int:
        self._claims = 0
        return super().look()

    def seen_all(
        self, look: int, first: datetime | None, first_locked: datetime | None, now: datetime | None
    ) -> datetime | None:
        """Note what a look saw; return when to look again.

        Args:
            look: its number.
            first: the earliest attempt among messages that this process does not hold; ``None`` without any.
            first_locked: the earliest among those it holds by row locks, and may have to give back.
            now: of the look, if it saw everything due before that.
        """
        first = None if first is None else first.astimezone(UTC)
        with self._lock:
            announced = self._looks.pop(look, None)
            lowest = min((each for each in (first, first_locked) if each is not None), default=now)
            if announced is _BEGINNING:  # whoever sleeps was woken: the next look is at once
                self._since = announced = None
            elif lowest is not None:
                self._since = lowest if announced is None else min(lowest, announced)
            return self._seen(announced, first)

    @override
    def announce(self, attempt_at: datetime) -> None:
        with self._lock:
            if self._since is not None and attempt_at < self._since:
                self._since = attempt_at
        super().announce(attempt_at)

    @override
    def forget(self) -> None:
        """Announcements may have been missed: look at once, without a lower bound."""
        with self._lock:
            self._since = None
            self._looks = dict.fromkeys(self._looks, _BEGINNING)
        super().forget()
