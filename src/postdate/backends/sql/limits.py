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
from postdate.ports.limits import NONE_IN_USE, KeptLimits, LimitingStore, LimitsInUse

_KEY: Final = ("store", "destination")
_COLUMNS: Final = (*_KEY, "limits", "free_at")
_READ: Final = "l.destination, l.lane, l.limits, l.free_at"

_NAMES_AT_ONCE: Final = 50
"""Names of one question. It always has so many, some of them twice, so that it is prepared once."""


class SqlLimits(SqlQuestions, LimitingStore, ABC):
    """A store's limits, whose table has the columns lane, store, destination, limits, free_at.

    ``limits_of_held``, a statement of each database, gives the rows whose lanes have messages. It goes from one lane
    with messages to the next by the index of attempt times.
    """

    def _of_limits(self, session: Any, **values: Any) -> dict[str, Any]:
        return {"store": 0, **values, **self._of_store(session)}

    @override
    async def kept_limits(self, destinations: Collection[str] | None = None) -> Sequence[KeptLimits]:
        if destinations is None:
            return await self._sessions.look(lambda session: self._limits(session, "1 = 1 ORDER BY l.destination"))
        names = sorted(set(destinations))

        def read(session: Any) -> list[KeptLimits]:
            limits = list[KeptLimits]()
            for begin in range(0, len(names), _NAMES_AT_ONCE):
                some = names[begin : begin + _NAMES_AT_ONCE]
                some += some[:1] * (_NAMES_AT_ONCE - len(some))
                values = {f"name_{number}": name for number, name in enumerate(some)}
                limits += self._limits(
                    session, f"l.destination IN ({', '.join(f'%({each})s' for each in values)})", values
                )
            return [each for each in limits if each.destination in names]  # SQL Server ignores spaces at the end

        return await self._sessions.look(read)

    @override
    async def limits_in_use(self) -> LimitsInUse:
        dialect = self._dialect
        of_store = f"SELECT limits FROM {self._sql.limits_table} WHERE store = %(store)s"
        there, in_force = (
            dialect.spelled(dialect.first_rows(f"{of_store}{more}")) for more in ("", " AND limits <> ''")
        )

        def look(session: Any) -> LimitsInUse:
            values = self._of_limits(session, limit=1)
            if dialect.row(session, there, values) is None:
                return NONE_IN_USE
            is_any = dialect.row(session, in_force, values) is not None
            return LimitsInUse(is_any, self._limits_of(dialect.rows(session, self._sql.limits_of_held, values)))

        return await self._sessions.look(look)

    def _limits(self, session: Any, which: str, values: Values | None = None) -> list[KeptLimits]:
        read = f"SELECT {_READ} FROM {self._sql.limits_table} AS l WHERE l.store = %(store)s AND {which}"
        return self._limits_of(
            self._dialect.rows(session, self._dialect.spelled(read), self._of_limits(session, **(values or {})))
        )

    def _limits_of(self, rows: Sequence[tuple[Any, ...]]) -> list[KeptLimits]:
        instant = self._dialect.instant
        return [KeptLimits(name, lane, limits, instant(at) or EARLIEST) for name, lane, limits, at in rows]

    @override
    async def keep_limits(self, destination: str, limits: str, free_at: datetime, before: str = "") -> bool:
        table, dialect = self._sql.limits_table, self._dialect
        insert = dialect.insert(table, _COLUMNS, _KEY)
        change = dialect.spelled(
            f"UPDATE {table} SET limits = %(limits)s, free_at = %(free_at)s WHERE {self._is()} AND limits = %(before)s"
        )
        columns = {"destination": destination, "limits": limits, "free_at": dialect.time(free_at), "before": before}

        def keep(session: Any) -> bool:
            values = self._of_limits(session, **columns)
            changed = dialect.change(session, change, values) > 0
            return changed or (not before and dialect.insert_new(session, insert, values))

        return await self._sessions.transaction(keep)

    @override
    async def take_turns(self, kept: KeptLimits, free_at: datetime) -> bool:
        dialect = self._dialect
        change = dialect.spelled(
            f"UPDATE {self._sql.limits_table} SET free_at = %(free_at)s "
            f"WHERE {self._is()} AND free_at = %(before)s AND limits = %(limits)s"
        )
        values = {"destination": kept.destination, "limits": kept.limits}
        values |= {"before": dialect.time(kept.free_at), "free_at": dialect.time(free_at)}

        return await self._sessions.run(
            lambda session: dialect.change(session, change, self._of_limits(session, **values)) > 0
        )

    def _is(self) -> str:
        return self._dialect.equal(*_KEY)
