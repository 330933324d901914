"""Messages that wait in a Postdate store in PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

from postdate.backends.postgres.names import DEFAULT_SCHEMA, literal
from postdate.backends.postgres.timeouts_source import PostgresDialect
from postdate.migrating.dialect import Given, Hiding, Session
from postdate.migrating.names import NUMBER, run_of
from postdate.migrating.store_dialect import ENDING, StoreDialect
from postdate.ports.common import RecordKind
from postdate.ports.migrating import MOVED_AWAY


class PostgresStoreDialect(StoreDialect, PostgresDialect):
    """The SQL of PostgreSQL. Content stays where it is, under the number of its message.

    Args:
        url: of the database.
        schema: of the stores; ``None``: Postdate's default.
    """

    def __init__(self, url: str, schema: str | None) -> None:
        super().__init__(url, DEFAULT_SCHEMA if schema is None else schema)

    @override
    def stores(self, session: Session) -> Mapping[str, str]:
        if not self.columns(session, "store"):
            return {}
        found = session.rows(f"SELECT name FROM {self.table('store')} ORDER BY name", {})
        return {name.removesuffix(ENDING): name for (name,) in found}

    @override
    def is_here(self, session: Session, other: Session, schema: str) -> bool:
        """See :class:`StoreDialect`; a lock that one of them has, the other cannot have in the same database."""
        key = {"key": secrets.randbits(62)}
        session.rows("SELECT pg_advisory_lock(%(key)s)", key)
        try:
            ((free,),) = other.rows("SELECT pg_try_advisory_lock(%(key)s)", key)
            if free:
                other.rows("SELECT pg_advisory_unlock(%(key)s)", key)
        finally:
            session.rows("SELECT pg_advisory_unlock(%(key)s)", key)
        return not free and schema == self.schema

    @override
    def floor(self, instant: datetime) -> object:
        return instant.astimezone(UTC)

    @override
    def instant_of(self, value: Any) -> datetime:
        return value.astimezone(UTC)

    @override
    def hide(self, session: Session, hiding: Hiding, floor: datetime) -> int:
        """See :class:`StoreDialect`; in one statement, which reads and writes each row once."""
        return session.change(self._moving(hiding), {"floor": self.floor(floor)})

    def _moving(self, hiding: Hiding) -> str:
        columns, live = self.list_of(hiding.columns), self.table(hiding.live)
        all_of = ", ".join(f"t.{self.quoted(column)}" for column in hiding.columns)
        number = f"({hiding.first} + (row_number() OVER (ORDER BY due, number) - 1) / {hiding.batch_size})::integer"
        said = f"{MOVED_AWAY}{run_of(hiding.staging)}"
        # By its number, not by its place: a row that was rescheduled while the statement ran is found where it is now.
        return (
            f"WITH earliest AS MATERIALIZED ({self._earliest(hiding)}), "
            f"numbered AS MATERIALIZED (SELECT number, {number} AS batch FROM earliest), "
            f"gone AS (DELETE FROM {live} AS t USING numbered AS n WHERE t.number = n.number "
            f"RETURNING {all_of}, n.batch), "
            f"recorded AS (INSERT INTO {self._records()} "
            f"(at, due, store_id, kind, message_id, destination, detail) "
            f"SELECT clock_timestamp(), due, {self._store_number(hiding.live)}{int(RecordKind.CANCELLED)}, message_id, "
            f"destination, '{said}' FROM gone ORDER BY number) "
            f"INSERT INTO {self.table(hiding.staging)} ({columns}, {self.quoted(NUMBER)}) "
            f"SELECT {columns}, batch FROM gone"
        )

    def _earliest(self, hiding: Hiding) -> str:
        return f"SELECT number, due FROM {self.table(hiding.live)} {self._free(hiding)} FOR UPDATE SKIP LOCKED"

    def _records(self) -> str:
        return self.table("record")

    def _store_number(self, live: str) -> str:
        name = literal(live).replace("%", "%%")
        return f"(SELECT s.store_id FROM {self.table('store')} AS s WHERE s.name = {name}), "

    def _content(self) -> str:
        return f"c.headers, c.body FROM {{hidden}} AS h JOIN {self.table('content')} AS c ON c.number = h.number"

    @override
    def give_back(self, session: Session, run_id: str, number: int, live: str, columns: Sequence[str]) -> Given:
        """See :class:`StoreDialect`; dispatchers look from the beginning when the transaction has ended."""
        given = super().give_back(session, run_id, number, live, columns)
        channel = self.database.names.channel
        session.rows("SELECT pg_notify(%(channel)s, 'lost 0 0')", {"channel": channel})
        return given
