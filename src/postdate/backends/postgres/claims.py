"""The claims of a PostgreSQL store: the claims of all stores with row locks, with psycopg.

In addition, messages may be completed in the transaction of a queue, whose commit is not visible here. Source: ADR
0007.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.answering import BoundedConnection
from postdate.backends.postgres.names import array
from postdate.backends.postgres.statements import Statements
from postdate.backends.sql.row_locks.claims import Claims, ClaimToken, LockedBatch, SettlingStep
from postdate.errors import PostdateError

T = TypeVar("T")

log = logging.getLogger("postdate.postgres")


class PostgresClaims(Claims):
    """All claims of one store object. Thread-safe; every method that talks to the database blocks.

    ``statements`` are those of the store, once its table is known.
    """

    def __init__(self, database: Access, statements: Callable[[], Statements]) -> None:
        super().__init__(
            _ClaimConnections(database), _Leases(statements), lambda: database.listener().wait_for_holder()
        )
        self._database, self._statements = database, statements
        self._finished: list[ClaimToken] = []
        self.may_leave_leases = False
        """Whether leases may remain. They end only with the process, or when it gets another number."""

    def first_locked(self) -> datetime | None:
        """Return the earliest attempt among messages that are claimed by row locks."""
        with self._lock:
            return min((token.attempt_at for token in self._tokens.values() if token.holder is None), default=None)

    @override
    def _settle(
        self, batch: LockedBatch, tokens: Sequence[ClaimToken], step: SettlingStep, *, is_unchanged: bool
    ) -> int:
        with self._database.translate_errors():
            return super()._settle(batch, tokens, step, is_unchanged=is_unchanged)

    @override
    def lease(self, tokens: Sequence[ClaimToken]) -> None:
        try:
            super().lease(tokens)
        except BaseException:
            try:
                self._pool.transaction_blocking(self.release_abandoned)
            except PostdateError as error:
                log.debug("leases that nobody was given are freed at the next look: %s", error)
            raise

    def release_abandoned(self, connection: Connection) -> None:
        for holder, numbers in self.abandoned_leases().items():
            self._tables.release_leases(connection, [holder], numbers)
            self.forget_abandoned(numbers)

    def remember_finished(self, tokens: Iterable[ClaimToken]) -> None:
        """Remember claims that end with another adapter's transaction, whose commit is not visible here."""
        with self._lock:
            self._finished += tokens

    def forget_finished(self, connection: Connection) -> None:
        """Forget remembered claims whose rows are not claimed any more, because their transactions have committed."""
        with self._lock:
            finished = list(self._finished)
        if not finished:
            return
        values = {"numbers": array(token.number for token in finished)}
        claimed_numbers = {number for (number,) in connection.execute(self._statements().still_claimed, values)}
        finished_tokens = {token for token in finished if token.number not in claimed_numbers}
        self._forget(finished_tokens)
        with self._lock:
            self._finished = [token for token in self._finished if token not in finished_tokens]

    @override
    def release_all(self) -> None:
        try:
            super().release_all()
        except PostdateError:  # The database is unreachable.
            self.may_leave_leases = True


class _Leases:
    """Leases of one store; see :class:`postdate.backends.sql.row_locks.claims.LeasingTables`."""

    def __init__(self, statements: Callable[[], Statements]) -> None:
        self._statements = statements

    def lease(self, session: BoundedConnection, numbers: Sequence[int], holder: int) -> None:
        session.execute(self._statements().lease, {"numbers": array(numbers), "holder": holder})

    def release_leases(self, session: Connection, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        values = {"numbers": array(numbers or ()), "holders": list(holders)}
        return session.execute(self._statements().release_leases, values).rowcount


class _ClaimConnections:
    """Lends connections of the database to the claims of a store.

    It is a :class:`postdate.backends.sql.row_locks.claims.ClaimConnections`.
    """

    def __init__(self, database: Access) -> None:
        self.release, self.close_connection, self.roll_back_and_close = (
            database.release,
            database.close_connection,
            database.roll_back_and_close,
        )
        self._database = database

    def transaction_blocking(self, work: Callable[[Connection], T], /) -> T:
        return self._database.run_blocking(work)  # Each step is one statement, which is atomic without BEGIN.


def group_by_holder(tokens: Iterable[ClaimToken]) -> list[tuple[int | None, list[int]]]:
    groups: dict[int | None, list[int]] = {}
    for token in tokens:
        groups.setdefault(token.holder, []).append(token.number)
    return list(groups.items())
