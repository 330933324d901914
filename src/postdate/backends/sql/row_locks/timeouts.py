"""Timeouts on database servers without queues (MariaDB, SQL Server): all except the SQL.

Source: ADR 0008, ADR 0014.
"""

from __future__ import annotations

import textwrap
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.row_locks.database import RowLockSchema
from postdate.backends.sql.row_locks.pool import Pool
from postdate.backends.sql.timeouts import SqlTimeouts, TimeoutStatements, TimeoutTable
from postdate.backends.sql.timeouts_layout import normal_id
from postdate.ports import Scripted
from postdate.ports.timeouts import Timeout, TimeoutClaim
from postdate.runtime import forks
from postdate.runtime.threads import run_in_thread


class RowLockTimeoutTable(TimeoutTable):
    """The SQL of one table of timeouts; each method is one statement, or a whole transaction.

    Args:
        name: of the table as SQL.
        create: the statements that create it.
        sql: its statements.
    """

    def __init__(self, name: str, create: tuple[str, ...], sql: TimeoutStatements) -> None:
        super().__init__(sql)
        self.name, self.create = name, create

    def script(self) -> str:
        rights = (
            f"For a user who may not create tables:\nGRANT SELECT, INSERT, UPDATE, DELETE ON {self.name} TO the_user;"
        )
        create = "".join(f"{statement};\n" for statement in self.create)
        return f"{create}{textwrap.indent(rights, '-- ', lambda line: True)}\n"

    @abstractmethod
    def setup(self, session: Any) -> None: ...

    def claim(self, session: Any, timeout_id: str) -> tuple[Any, ...] | None:
        """Return the row as :meth:`peek` does and lock it; ``None`` also while another transaction has locked it."""
        return self.dialect.row(session, self.sql.claim, self.key(timeout_id))


class ServerTimeouts(SqlTimeouts[RowLockTimeoutTable], Scripted):
    """Keeps timeouts in a table of a database server. The queues are elsewhere, so delivery is at least once.

    Args:
        database: of the table.
        build_table: creates the SQL of a table from its name, which it checks.
        table_prefix: of the table's name; ``None``: see :func:`postdate.backends.sql.timeouts_layout.table_prefix`.
    """

    def __init__(
        self, database: RowLockSchema, build_table: Callable[[str], RowLockTimeoutTable], table_prefix: str | None
    ) -> None:
        self.server, self._pool = database.server, Pool(database.connections)
        super().__init__(self._pool, build_table, table_prefix)
        self._claims = set[_SessionClaim]()

    @override
    def setup_statements(self, endpoint: str) -> str:
        return self._table_of(endpoint).script()

    @override
    async def setup(self) -> None:
        await self._pool.run(self._checked_table.setup, patiently=True)

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        table, normal = self._checked_table, normal_id(timeout_id)
        return None if normal is None else await run_in_thread(self._claim, table, normal)

    def _claim(self, table: RowLockTimeoutTable, timeout_id: str) -> TimeoutClaim | None:
        session = self._pool.acquire()
        with closing_on_error(session):
            session.begin()
            timeout = self._decode_row(table.claim(session, timeout_id))
        if timeout is None:
            self._pool.roll_back(session)
            return None
        claim = _SessionClaim(self._pool, session, table, timeout, self._claims)
        self._claims.add(claim)
        return TimeoutClaim(timeout, claim.remove, claim.release)

    @override
    async def close(self) -> None:
        def close_claims() -> None:
            for claim in list(self._claims):
                claim.close()
            self._pool.close()

        await run_in_thread(close_claims)


class _SessionClaim:
    """The state of a :class:`postdate.ports.timeouts.TimeoutClaim`: a row locked by a session's transaction.

    It leaves ``all_claims`` of the adapter when it ends, which happens once.
    """

    def __init__(
        self, pool: Pool, session: Any, table: RowLockTimeoutTable, timeout: Timeout, all_claims: set[_SessionClaim]
    ) -> None:
        self.timeout = timeout
        self._pool, self._session, self._table, self._all_claims = pool, session, table, all_claims
        self._lock = forks.lock()

    def _detach_session(self) -> Any:
        """Return the connection to the first caller, which ends the claim; ``None`` to other callers."""
        with self._lock:
            session, self._session = self._session, None
        self._all_claims.discard(self)
        return session

    async def remove(self) -> bool:
        session = self._detach_session()
        return session is not None and await run_in_thread(self._remove, session)

    def _remove(self, session: Any) -> bool:
        with closing_on_error(session):
            removed = self._table.delete(session, self.timeout.timeout_id) > 0
            session.commit()
        self._pool.release(session)
        return removed

    async def release(self) -> None:
        if (session := self._detach_session()) is not None:
            await run_in_thread(self._pool.roll_back, session)

    def close(self) -> None:
        """End the claim by closing its connection, without waiting for an answer."""
        if (session := self._detach_session()) is not None:
            session.close()
