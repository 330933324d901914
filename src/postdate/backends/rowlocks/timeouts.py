"""Timeouts on database servers that have no queues: everything but the SQL, for MariaDB and SQL Server.

Source: specification 4.6; ADR 0008, ADR 0014.
"""

from __future__ import annotations

import textwrap
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from postdate.backends.rowlocks.database import RowLockSchema
from postdate.backends.rowlocks.pool import Pool
from postdate.backends.sql.timeouts import SqlTimeouts, TimeoutStatements, TimeoutTable
from postdate.persistence.timeouts import normal_id
from postdate.ports import Scripted
from postdate.ports.timeouts import Timeout, TimeoutClaim
from postdate.runtime.threads import in_thread


class RowLockTimeoutTable(TimeoutTable):
    """The SQL of one table of timeouts; each method is one statement, or begins its own work.

    Args:
        name: of the table as SQL.
        create: what makes it where nothing is there yet.
        sql: its statements.
    """

    def __init__(self, name: str, create: tuple[str, ...], sql: TimeoutStatements) -> None:
        super().__init__(sql)
        self.name, self.create = name, create

    def script(self) -> str:
        """Return the SQL that makes the table where nothing is there yet, for a database administrator."""
        rights = (
            f"For a user who may not create tables:\nGRANT SELECT, INSERT, UPDATE, DELETE ON {self.name} TO the_user;"
        )
        create = "".join(f"{statement};\n" for statement in self.create)
        return f"{create}{textwrap.indent(rights, '-- ', lambda line: True)}\n"

    @abstractmethod
    def setup(self, session: Any) -> None:
        """Create what is missing; several processes may do it at once."""

    def claim(self, session: Any, timeout_id: str) -> tuple[Any, ...] | None:
        """Return what :meth:`peek` does, with its row locked; ``None`` also while somebody else has it locked."""
        return self.dialect.row(session, self.sql.claim, self.key(timeout_id))


class ServerTimeouts(SqlTimeouts[RowLockTimeoutTable], Scripted):
    """Keeps timeouts in a table of a database server. The queues are elsewhere, so delivery is at least once.

    Args:
        database: that the table is in.
        make_table: makes the SQL of a table from its name, which it checks.
        table_prefix: what the name begins with; ``None``: see :func:`postdate.persistence.timeouts.table_prefix`.
    """

    def __init__(
        self, database: RowLockSchema, make_table: Callable[[str], RowLockTimeoutTable], table_prefix: str | None
    ) -> None:
        self.server, self._pool = database.server, Pool(database.connections)
        super().__init__(self._pool, make_table, table_prefix)
        self._claims = set[_SessionClaim]()

    @override
    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that :meth:`setup` runs where nothing is there yet, for a database administrator."""
        return self._named(endpoint).script()

    @override
    async def setup(self) -> None:
        """Create the table where it is missing; of one that is there, nothing is changed."""
        table = self._known

        def create() -> None:
            with self._pool.lent() as session, session.patient():
                table.setup(session)

        await in_thread(create)

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.claim`: the row is locked by a transaction."""
        table, wanted = self._known, normal_id(timeout_id)
        return None if wanted is None else await in_thread(self._claim, table, wanted)

    def _claim(self, table: RowLockTimeoutTable, timeout_id: str) -> TimeoutClaim | None:
        session = self._pool.take()
        try:
            session.begin()
            row = table.claim(session, timeout_id)
            found = self._read(row)
        except BaseException:
            session.close()
            raise
        if found is None:
            self._pool.roll_back(session)
            return None
        claim = _SessionClaim(self._pool, session, table, found, self._claims)
        self._claims.add(claim)
        return TimeoutClaim(found, claim.remove, claim.release)

    @override
    async def close(self) -> None:
        """Give back what is claimed, and close every connection; a second time without effect."""

        def give_back() -> None:
            for claim in list(self._claims):
                claim.end()
            self._pool.close()

        await in_thread(give_back)


class _SessionClaim:
    """What a :class:`postdate.ports.timeouts.TimeoutClaim` calls: a row, locked by the transaction of a session.

    Args:
        pool: that the connection goes back to.
        session: in the transaction.
        table: of the timeout.
        timeout: that is claimed.
        all_claims: of the adapter; it leaves them with its end, which comes once.
    """

    def __init__(
        self, pool: Pool, session: Any, table: RowLockTimeoutTable, timeout: Timeout, all_claims: set[_SessionClaim]
    ) -> None:
        self.timeout = timeout
        self._pool, self._session, self._table, self._all_claims = pool, session, table, all_claims
        self._lock = threading.Lock()

    def _ended(self) -> Any:
        """Return the connection, to whoever ends the claim first; to others ``None``."""
        with self._lock:
            session, self._session = self._session, None
        self._all_claims.discard(self)
        return session

    async def remove(self) -> bool:
        """Remove it in the transaction that has it locked; ``False`` also after the claim has ended."""
        session = self._ended()
        return session is not None and await in_thread(self._remove, session)

    def _remove(self, session: Any) -> bool:
        try:
            removed = self._table.delete(session, self.timeout.timeout_id) > 0
            session.commit()
        except BaseException:
            session.close()
            raise
        self._pool.put(session)
        return removed

    async def release(self) -> None:
        """Roll the transaction back."""
        session = self._ended()
        if session is not None:
            await in_thread(self._pool.roll_back, session)

    def end(self) -> None:
        """Give it back by ending its connection, which waits for no answer."""
        session = self._ended()
        if session is not None:
            session.close()
