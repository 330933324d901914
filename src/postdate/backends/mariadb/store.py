"""Delayed messages in MariaDB 10.6 or newer.

Due messages are claimed by row locks of an open transaction: a claim ends with its connection and costs no write.
Source: specification 1.1, 1.3; ADR 0008.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from postdate.backends.mariadb import pruning
from postdate.backends.mariadb.names import MariaDbNames
from postdate.backends.mariadb.schema import MariaDbSchema
from postdate.backends.mariadb.setup import setup_statements
from postdate.backends.mariadb.tables import MariaDbTables, old_snapshots
from postdate.backends.rowlocks import LockingStore
from postdate.backends.rowlocks.names import RowLockNames
from postdate.backends.rowlocks.setup import steps_of
from postdate.ports import OldSnapshot, Recording, ScanPart
from postdate.ports.scanning import ArchivableStore, StoredRecord


class MariaDbStore(LockingStore, ArchivableStore):
    """Keeps delayed messages in a table of MariaDB.

    Args:
        url: ``mariadb://user:password@host:port/database``; for TLS, ``?ssl=true`` (see
            :class:`postdate.backends.mariadb.connection.MariaDbServer`). Or a
            :class:`postdate.backends.mariadb.database.MariaDb`, whose connections it uses, and which has the settings
            ``schema``, ``holds_at_most`` and ``answers_within``.
        schema: the database of the tables; ``None``: that of ``url``.
        table: of the waiting messages; at most 64 characters, none of them an emoji. ``None``: ``{endpoint}.timeouts``.
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together. A message travels in one statement, in which a byte may
            take two: the default always fits into the packet of 16 MiB that servers allow by default
            (``max_allowed_packet``).
        holds_at_most: a process that shows no life for so long (frozen, swapped out, cut off) loses its claims: the
            server ends its connections. Whole seconds, 1 at least; ``None``: 60 s.
        answers_within: a connection is given up after so long a silence of the server; above 0. ``None``: 30 s.
            Statements on whole tables may take 10 minutes.

    Raises:
        ConfigurationError: the address, the schema, the table or a time is invalid.
    """

    def __init__(  # noqa: PLR0913 - the settings that stand beside an address
        self,
        url: str | MariaDbSchema,
        *,
        schema: str | None = None,
        table: str | None = None,
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = 7 * 1024 * 1024,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        database = MariaDbSchema.of(url, schema, holds_at_most, answers_within)
        self._schema, self._recording = database.schema, recording
        super().__init__(database, self._tables_of, table, largest_message_bytes, database.holds_at_most)

    def _tables_of(self, table: str) -> MariaDbTables:
        return MariaDbTables(MariaDbNames(self._schema, table), self._recording)

    @override
    def setup_statements(self, endpoint: str) -> str:
        names = MariaDbNames(self._schema, self._table or f"{endpoint}.timeouts")
        return setup_statements(names, steps_of(names))

    @override
    async def old_snapshots(self) -> Sequence[OldSnapshot]:
        """None are visible without the right ``PROCESS``."""
        return await self._pool.run(old_snapshots)

    @property
    @override
    def records_in_commit_order(self) -> bool:
        """Numbers are given out before the commit."""
        return False

    @override
    def tables_of_stores(self) -> Sequence[str]:
        return pruning.tables_of_stores(self._pool, self._names)

    @property
    @override
    def pruned_at_once(self) -> int:
        return 10_000

    @override
    def mark_archived(self, part: ScanPart, numbers: Sequence[int]) -> int:
        return pruning.mark_archived(self._pool, self._names, numbers)

    @override
    def prune(self, part: ScanPart, numbers: Sequence[int]) -> int:
        return pruning.prune(self._pool, self._names, numbers)

    @override
    def restore(self, records: Sequence[StoredRecord]) -> int:
        return pruning.restore(self._pool, self._names, records)

    @property
    def _names(self) -> RowLockNames:
        return self._tables.names
