"""Limits of destinations in a table of an SQL database. Source: ADR 30, 34."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.questions import SqlQuestions
from postdate.clock import EARLIEST
from postdate.ports.limits import KeptLimits, LimitingStore

_KEY: Final = ("store", "destination")
_COLUMNS: Final = (*_KEY, "limits", "free_at")


class SqlLimits(SqlQuestions, LimitingStore, ABC):
    """A store's limits, whose table has the columns lane, store, destination, limits, free_at."""

    def _of_limits(self, session: Any, **values: Any) -> dict[str, Any]:
        return {"store": 0, **values, **self._of_store(session)}

    @override
    async def kept_limits(self) -> Sequence[KeptLimits]:
        read = self._dialect.spelled(
            f"SELECT destination, lane, limits, free_at FROM {self._sql.limits_table} WHERE store = %(store)s "
            f"ORDER BY destination"
        )
        found = await self._sessions.look(lambda session: self._dialect.rows(session, read, self._of_limits(session)))
        instant = self._dialect.instant
        return [KeptLimits(name, lane, limits, instant(at) or EARLIEST) for name, lane, limits, at in found]

    @override
    async def keep_limits(self, destination: str, limits: str, free_at: datetime, before: str = "") -> bool:
        table, dialect = self._sql.limits_table, self._dialect
        insert = dialect.insert(table, _COLUMNS, _KEY)
        change = dialect.spelled(
            f"UPDATE {table} SET limits = %(limits)s, free_at = %(free_at)s WHERE {self._is()} AND limits = %(before)s"
        )
        said = {"destination": destination, "limits": limits, "free_at": dialect.time(free_at), "before": before}

        def keep(session: Any) -> bool:
            values = self._of_limits(session, **said)
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
