"""Timeouts on database servers that have no queues: everything but the SQL, for MariaDB and SQL Server.

Source: specification 4.6; ADR 0008, ADR 0014.
"""

from __future__ import annotations

import textwrap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from typing_extensions import override

from postdate.backends.rowlocks.database import RowLockSchema
from postdate.backends.rowlocks.pool import Pool
from postdate.errors import ConfigurationError
from postdate.persistence import chunks
from postdate.persistence.timeouts import checked, decode, encode, normal_id, normal_saga, table_name
from postdate.ports import Scripted
from postdate.ports.timeouts import DueChunk, Timeout, TimeoutClaim, TimeoutPersister
from postdate.runtime.threads import in_thread

_ALL: Final = 2**63 - 1


class TimeoutStatements(NamedTuple):
    """Every statement of one table of timeouts; a name in it stands for an id as :meth:`TimeoutTable.key` has it."""

    insert: str
    """Writes a row, unless its id is there."""
    peek: str
    claim: str
    delete: str
    delete_saga: str
    due: str
    first: str


class TimeoutTable(ABC):
    """The SQL of one table of timeouts. Ids are normal ones; each method is one statement, or begins its own work.

    Args:
        name: of the table as SQL.
        create: what makes it where nothing is there yet.
        sql: its statements.
    """

    def __init__(self, name: str, create: tuple[str, ...], sql: TimeoutStatements) -> None:
        self.name, self.create, self.sql = name, create, sql

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

    @abstractmethod
    def insert(self, session: Any, row: dict[str, Any]) -> bool:
        """Write a row of :func:`postdate.persistence.timeouts.encode`; ``False``: its id is there already."""

    @abstractmethod
    def key(self, normal: str) -> Mapping[str, Any]:
        """Return the parameter that finds the rows of an id, of a timeout or of a saga."""

    @abstractmethod
    def instant(self, instant: datetime) -> object:
        """Return a time as a bound to compare ``Time`` with: nothing lies between it and ``instant``."""

    def peek(self, session: Any, timeout_id: str) -> tuple[Any, ...] | None:
        """Return ``Id``, ``Destination``, ``SagaId``, ``State``, ``Time`` and ``Headers``; waits for nobody."""
        found = session.rows(self.sql.peek, self.key(timeout_id))
        return found[0] if found else None

    def claim(self, session: Any, timeout_id: str) -> tuple[Any, ...] | None:
        """Return the same and lock the row for the transaction; ``None`` also while somebody else has it locked."""
        found = session.rows(self.sql.claim, self.key(timeout_id))
        return found[0] if found else None

    def delete(self, session: Any, timeout_id: str) -> int:
        """Delete a row; return how many were there."""
        return session.change(self.sql.delete, self.key(timeout_id))

    def delete_saga(self, session: Any, saga_id: str) -> int:
        """Delete the rows of a saga; return how many were there."""
        return session.change(self.sql.delete_saga, self.key(saga_id))

    def due(self, session: Any, after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
        """See :data:`postdate.persistence.chunks.Due`."""
        limit = _ALL if at_most is None else at_most
        return session.rows(self.sql.due, {"after": self.instant(after), "until": self.instant(until), "limit": limit})

    def first(self, session: Any, after: datetime) -> object:
        """See :data:`postdate.persistence.chunks.First`."""
        found = session.rows(self.sql.first, {"after": self.instant(after)})
        return found[0][0] if found else None


class ServerTimeouts(TimeoutPersister, Scripted):
    """Keeps timeouts in a table of a database server. The queues are elsewhere, so delivery is at least once.

    Args:
        database: that the table is in.
        make_table: makes the SQL of a table from its name, which it checks.
        table_prefix: what the name begins with; ``None``: see :func:`postdate.persistence.timeouts.table_prefix`.
    """

    def __init__(
        self, database: RowLockSchema, make_table: Callable[[str], TimeoutTable], table_prefix: str | None
    ) -> None:
        self.server, self._pool, self._make_table = database.server, Pool(database.connections), make_table
        self._claims = set[_SessionClaim]()
        self._prefix, self._endpoint = table_prefix, ""
        self._table = None if table_prefix is None else self._named("")

    def _named(self, endpoint: str) -> TimeoutTable:
        return self._make_table(table_name(endpoint, prefix=self._prefix))

    @override
    async def initialize(self, endpoint: str) -> None:
        """Settle the name of the table; the server is not asked."""
        self._endpoint, self._table = endpoint, self._named(endpoint)

    @property
    def _known(self) -> TimeoutTable:
        if self._table is None:
            raise ConfigurationError(
                f"{type(self).__name__} does not know its table yet: call initialize(endpoint) first, or give "
                f"table_prefix="
            )
        return self._table

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
    async def add(self, timeout: Timeout) -> bool:
        table, row = self._known, encode(checked(timeout))
        return await self._pool.run_in_thread(lambda session: table.insert(session, row))

    @override
    async def peek(self, timeout_id: str) -> Timeout | None:
        table, wanted = self._known, normal_id(timeout_id)
        if wanted is None:
            return None
        row = await self._pool.run_in_thread(lambda session: table.peek(session, wanted))
        return None if row is None else decode(*row, owner=self._endpoint)

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.claim`: the row is locked by a transaction."""
        table, wanted = self._known, normal_id(timeout_id)
        return None if wanted is None else await in_thread(self._claim, table, wanted)

    def _claim(self, table: TimeoutTable, timeout_id: str) -> TimeoutClaim | None:
        session = self._pool.take()
        try:
            session.begin()
            row = table.claim(session, timeout_id)
            found = None if row is None else decode(*row, owner=self._endpoint)
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
    async def try_remove(self, timeout_id: str) -> bool:
        table, wanted = self._known, normal_id(timeout_id)
        if wanted is None:
            return False
        return await self._pool.run_in_thread(lambda session: table.delete(session, wanted)) > 0

    @override
    async def remove_by_saga(self, saga_id: str) -> int:
        table, saga = self._known, normal_saga(saga_id)
        if saga is None:
            return 0
        return await self._pool.run_in_thread(lambda session: table.delete_saga(session, saga))

    @override
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        table = self._known

        def find(session: Any) -> DueChunk:
            def due(after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
                return table.due(session, after, until, at_most)

            return chunks.next_chunk(start, now, limit, due, lambda after: table.first(session, after))

        return await self._pool.run_in_thread(find)

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
        self, pool: Pool, session: Any, table: TimeoutTable, timeout: Timeout, all_claims: set[_SessionClaim]
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
