"""Limits of destinations in a table of an SQL database. Source: ADR 34, 58."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.dialect import Values
from postdate.backends.sql.questions import SqlQuestions
from postdate.clock import EARLIEST
from postdate.ports.limits import NONE_IN_USE, LimitingStore, LimitsInUse, StoredLimits

_KEY: Final = ("store", "destination")
_COLUMNS: Final = (*_KEY, "limits", "free_at")
_READ: Final = "l.destination, l.lane, l.limits, l.free_at"

_NAMES_AT_ONCE: Final = 50
"""The number of names in one query. A query always has this number, some of them twice, so it is prepared once."""


class SqlLimits(SqlQuestions, LimitingStore, ABC):
    """The limits of a store, whose table has the columns lane, store, destination, limits, free_at.

    ``limits_of_held``, a statement of each database, returns the rows whose lanes have messages. It goes from one lane
    with messages to the next by the index of attempt times.
    """

    def _limit_values(self, session: Any, **values: Any) -> dict[str, Any]:
        return {"store": 0, **values, **self._store_values(session)}

    @override
    async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
        if destinations is None:
            return await self._sessions.query(
                lambda session: self._select_limits(session, "1 = 1 ORDER BY l.destination")
            )
        names = sorted(set(destinations))

        def read_limits(session: Any) -> list[StoredLimits]:
            limits = list[StoredLimits]()
            for start in range(0, len(names), _NAMES_AT_ONCE):
                batch = names[start : start + _NAMES_AT_ONCE]
                batch += batch[:1] * (_NAMES_AT_ONCE - len(batch))
                values = {f"name_{number}": name for number, name in enumerate(batch)}
                limits += self._select_limits(
                    session, f"l.destination IN ({', '.join(f'%({each})s' for each in values)})", values
                )
            # SQL Server ignores spaces at the end of names
            return [each for each in limits if each.destination in names]

        return await self._sessions.query(read_limits)

    @override
    async def load_limits_in_use(self) -> LimitsInUse:
        dialect = self._dialect
        of_store = f"SELECT limits FROM {self._sql.limits_table} WHERE store = %(store)s"
        any_limit, limit_in_force = (
            dialect.statement_of(dialect.first_rows(f"{of_store}{more}")) for more in ("", " AND limits <> ''")
        )

        def read_limits_in_use(session: Any) -> LimitsInUse:
            values = self._limit_values(session, limit=1)
            if dialect.row(session, any_limit, values) is None:
                return NONE_IN_USE
            has_limit_in_force = dialect.row(session, limit_in_force, values) is not None
            return LimitsInUse(
                has_limit_in_force, self._limits_of(dialect.rows(session, self._sql.limits_of_held, values))
            )

        return await self._sessions.query(read_limits_in_use)

    def _select_limits(self, session: Any, condition: str, values: Values | None = None) -> list[StoredLimits]:
        select = f"SELECT {_READ} FROM {self._sql.limits_table} AS l WHERE l.store = %(store)s AND {condition}"
        return self._limits_of(
            self._dialect.rows(
                session, self._dialect.statement_of(select), self._limit_values(session, **(values or {}))
            )
        )

    def _limits_of(self, rows: Sequence[tuple[Any, ...]]) -> list[StoredLimits]:
        instant = self._dialect.instant
        return [StoredLimits(name, lane, limits, instant(at) or EARLIEST) for name, lane, limits, at in rows]

    @override
    async def store_limits(self, destination: str, limits: str, free_at: datetime, previous_limits: str = "") -> bool:
        table, dialect = self._sql.limits_table, self._dialect
        insert = dialect.insert_statement(table, _COLUMNS, _KEY)
        change = dialect.statement_of(
            f"UPDATE {table} SET limits = %(limits)s, free_at = %(free_at)s WHERE {self._key_condition()} AND limits "
            f"= %(before)s"
        )
        columns = {
            "destination": destination,
            "limits": limits,
            "free_at": dialect.time(free_at),
            "before": previous_limits,
        }

        def store_limits(session: Any) -> bool:
            values = self._limit_values(session, **columns)
            changed = dialect.change(session, change, values) > 0
            return changed or (not previous_limits and dialect.insert_new(session, insert, values))

        return await self._sessions.transaction(store_limits)

    @override
    async def reserve_slots(self, stored_limits: StoredLimits, free_at: datetime) -> bool:
        dialect = self._dialect
        change = dialect.statement_of(
            f"UPDATE {self._sql.limits_table} SET free_at = %(free_at)s "
            f"WHERE {self._key_condition()} AND free_at = %(before)s AND limits = %(limits)s"
        )
        values = {"destination": stored_limits.destination, "limits": stored_limits.limits}
        values |= {"before": dialect.time(stored_limits.free_at), "free_at": dialect.time(free_at)}

        return await self._sessions.run(
            lambda session: dialect.change(session, change, self._limit_values(session, **values)) > 0
        )

    def _key_condition(self) -> str:
        return self._dialect.equality(*_KEY)
