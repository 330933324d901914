"""Timeouts on database servers that have no queues: everything but the SQL, for MariaDB and SQL Server.

Source: specification 4.6; ADR 0008, ADR 0014.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Protocol

from postdate.backends.rowlocks import Pool, Server
from postdate.errors import ConfigurationError
from postdate.persistence import chunks
from postdate.persistence.timeouts import checked, decode, encode, normal_id, normal_saga, table_name
from postdate.ports import Scripted
from postdate.ports.timeouts import DueChunk, Timeout, TimeoutClaim, TimeoutPersister
from postdate.threads import in_thread


class Table(Protocol):
    """The SQL of one table of timeouts. Ids are normal ones; each method is one statement, or begins its own work."""

    def setup(self, session: Any) -> None:
        """Create what is missing; several processes may do it at once."""
        ...

    def insert(self, session: Any, row: dict[str, Any]) -> bool:
        """Write a row of :func:`postdate.persistence.timeouts.encode`; ``False``: its id is there already."""
        ...

    def peek(self, session: Any, timeout_id: str) -> tuple[Any, ...] | None:
        """Return ``Id``, ``Destination``, ``SagaId``, ``State``, ``Time`` and ``Headers``; waits for nobody."""
        ...

    def claim(self, session: Any, timeout_id: str) -> tuple[Any, ...] | None:
        """Return the same and lock the row for the transaction; ``None`` also while somebody else has it locked."""
        ...

    def delete(self, session: Any, timeout_id: str) -> int:
        """Delete a row; return how many were there."""
        ...

    def delete_saga(self, session: Any, saga_id: str) -> int:
        """Delete the rows of a saga; return how many were there."""
        ...

    def due(self, session: Any, after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
        """See :data:`postdate.persistence.chunks.Due`."""
        ...

    def first(self, session: Any, after: datetime) -> object:
        """See :data:`postdate.persistence.chunks.First`."""
        ...


class ServerTimeouts(TimeoutPersister, Scripted):
    """Keeps timeouts in a table of a database server. The queues are elsewhere, so delivery is at least once.

    Args:
        server: of the database.
        make_table: makes the SQL of a table from its name, which it checks.
        table_prefix: what the name begins with; ``None``: see :func:`postdate.persistence.timeouts.table_prefix`.
    """

    def __init__(self, server: Server, make_table: Callable[[str], Table], table_prefix: str | None) -> None:
        self._pool, self._make_table = Pool(server), make_table
        self._prefix, self._endpoint = table_prefix, ""
        self._table = None if table_prefix is None else self._named("")

    def _named(self, endpoint: str) -> Table:
        return self._make_table(table_name(endpoint, prefix=self._prefix))

    async def initialize(self, endpoint: str) -> None:
        """Settle the name of the table; the server is not asked."""
        self._endpoint, self._table = endpoint, self._named(endpoint)

    @property
    def _known(self) -> Table:
        if self._table is None:
            raise ConfigurationError(
                f"{type(self).__name__} does not know its table yet: call initialize(endpoint) first, or give "
                f"table_prefix="
            )
        return self._table

    async def setup(self) -> None:
        """Create the table where it is missing; of one that is there, nothing is changed."""
        table = self._known

        def create() -> None:
            with self._pool.lent() as session, session.patient():
                table.setup(session)

        await in_thread(create)

    async def add(self, timeout: Timeout) -> bool:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.add`."""
        table, row = self._known, encode(checked(timeout))
        return await self._pool.run_in_thread(lambda session: table.insert(session, row))

    async def peek(self, timeout_id: str) -> Timeout | None:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.peek`."""
        table, wanted = self._known, normal_id(timeout_id)
        if wanted is None:
            return None
        row = await self._pool.run_in_thread(lambda session: table.peek(session, wanted))
        return None if row is None else decode(*row, owner=self._endpoint)

    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.claim`: the row is locked by a transaction."""
        table, wanted = self._known, normal_id(timeout_id)
        return None if wanted is None else await in_thread(self._claim, table, wanted)

    def _claim(self, table: Table, timeout_id: str) -> TimeoutClaim | None:
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
        claim = _Claim(self._pool, session, table, found)
        return TimeoutClaim(found, claim.remove, claim.release)

    async def try_remove(self, timeout_id: str) -> bool:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.try_remove`."""
        table, wanted = self._known, normal_id(timeout_id)
        if wanted is None:
            return False
        return await self._pool.run_in_thread(lambda session: table.delete(session, wanted)) > 0

    async def remove_by_saga(self, saga_id: str) -> int:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.remove_by_saga`."""
        table, saga = self._known, normal_saga(saga_id)
        if saga is None:
            return 0
        return await self._pool.run_in_thread(lambda session: table.delete_saga(session, saga))

    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.next_chunk`."""
        table = self._known

        def find(session: Any) -> DueChunk:
            def due(after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
                return table.due(session, after, until, at_most)

            return chunks.next_chunk(start, now, limit, due, lambda after: table.first(session, after))

        return await self._pool.run_in_thread(find)

    async def close(self) -> None:
        """Close every connection; a second time without effect."""
        await in_thread(self._pool.close)


class _Claim:
    """What a :class:`postdate.ports.timeouts.TimeoutClaim` calls: a row, locked by the transaction of a session."""

    def __init__(self, pool: Pool, session: Any, table: Table, timeout: Timeout) -> None:
        self.timeout = timeout
        self._pool, self._session, self._table = pool, session, table

    async def remove(self) -> bool:
        """Remove it in the transaction that has it locked."""
        session, self._session = self._session, None
        return await in_thread(self._remove, session)

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
        session, self._session = self._session, None
        if session is not None:
            await in_thread(self._pool.roll_back, session)
