"""The next-due cache of PostgreSQL. It also has the lower bound at which a query for due messages may begin.

A query begins at the earliest message of the last query, and not at the earliest possible time. The reason: while a
session has an old snapshot, PostgreSQL keeps each delivered row in the index, and a query without a lower bound would
read all of them. The transaction that stores a message with an earlier due time notifies, and this lowers the bound.
From time to time a query has no bound, to find messages that were missed. Source: ADR 0057.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from typing_extensions import override

from postdate.clock import steady_seconds
from postdate.runtime.next_due import NextDue

_SWEEP_EVERY_SECONDS: Final = 30.0  # how often a query has no lower bound, to find messages that were missed
_CLAIMS_WITHOUT_A_QUERY: Final = 16  # batches after which the lower bound is far behind
_BEGINNING: Final = datetime.min.replace(tzinfo=UTC)


class PostgresNextDue(NextDue[datetime]):
    """Thread-safe. Date-times in UTC."""

    NOTICE: Final = timedelta(minutes=5)
    """Messages due within this time are announced to other processes.

    It is far more than the minute that a poller sleeps at most, so that clocks may differ by minutes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lower_bound: datetime | None = None
        self._swept_at = steady_seconds()
        self._claims = 0

    def lower_bound(self) -> datetime | None:
        """Return the attempt time at which a query begins; ``None``: without a lower bound."""
        with self._lock:
            now = steady_seconds()
            if now - self._swept_at >= _SWEEP_EVERY_SECONDS:
                self._swept_at, self._lower_bound = now, None
            # A row with a time before the calendar is damaged, and only a query without a bound finds it.
            return None if self._lower_bound == _BEGINNING else self._lower_bound

    def count_batch(self) -> bool:
        """Count a batch; return whether the lower bound is far behind, as many were claimed since the last query."""
        with self._lock:
            self._claims += 1
            return self._claims >= _CLAIMS_WITHOUT_A_QUERY

    @override
    def start_query(self) -> int:
        self._claims = 0
        return super().start_query()

    def finish_bounded_query(
        self, query: int, first: datetime | None, first_locked: datetime | None, now: datetime | None
    ) -> datetime | None:
        """Remember the result of a query; return when to poll again.

        Args:
            query: the number of the query.
            first: the earliest attempt among messages that this process has not claimed; ``None`` without any.
            first_locked: the earliest attempt among messages that it has locked, and may have to release.
            now: the instant of the query, if it has read all messages due before that.
        """
        first = None if first is None else first.astimezone(UTC)
        with self._lock:
            announced_attempt = self._queries.pop(query, None)
            lowest = min((each for each in (first, first_locked) if each is not None), default=now)
            if announced_attempt is _BEGINNING:  # the poller was woken already, so the next query is made at once
                self._lower_bound = announced_attempt = None
            elif lowest is not None:
                self._lower_bound = lowest if announced_attempt is None else min(lowest, announced_attempt)
            return self._set_earliest(announced_attempt, first)

    @override
    def announce(self, attempt_at: datetime) -> None:
        with self._lock:
            if self._lower_bound is not None and attempt_at < self._lower_bound:
                self._lower_bound = attempt_at
        super().announce(attempt_at)

    @override
    def forget(self) -> None:
        """Forget the bound, as notifications may have been missed: the next query is made at once, without a bound."""
        with self._lock:
            self._lower_bound = None
            self._queries = dict.fromkeys(self._queries, _BEGINNING)
        super().forget()
