"""An operator's questions to a store in SQL tables and its records. Source: row 119, ADR 58."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate import ports
from postdate.backends.sql.dialect import Sessions, SqlDialect, Values
from postdate.clock import EARLIEST, to_microseconds
from postdate.messages import DelayedMessage, Headers
from postdate.ports.administration import cursor_text, parse_cursor
from postdate.ports.scanning import PRUNED_ID, PrunedCounts, pruned_details


def header_text(message_id: str) -> str:
    """Return a message id as it appears in the text of encoded headers, which is compact JSON."""
    return f"{json.dumps(Headers.MESSAGE_ID)}:{json.dumps(message_id, ensure_ascii=False)}"


def page_values(message_filter: ports.MessageFilter, limit: int, dialect: SqlDialect) -> dict[str, Any]:
    """Return the values of a statement that reads a page of the list of pending messages. Raise `InvalidMessage`.

    The page has the rows whose due time and number, compared as a pair, are above ``due_from`` and ``behind``. So a
    page may begin between messages that are due at one instant, and costs as much as any other page.
    """
    start = (
        _BEFORE_ALL_TIMES if message_filter.due_from is None else to_microseconds(message_filter.due_from),
        _BEFORE_ALL_NUMBERS,
    )
    if message_filter.after is not None:
        start = max(start, parse_cursor(message_filter.after))
    return {
        "destination": message_filter.destination,
        "due_from": dialect.time_at(start[0]),
        "behind": start[1],
        "due_to": None if message_filter.due_to is None else dialect.time(message_filter.due_to),
        "among": message_filter.search_limit,
        "limit": limit,
    }


_BEFORE_ALL_TIMES: Final = -(2**63) + 1
"""Before the calendar, too: values of other programs there must be read, and marked as unreadable."""

_BEFORE_ALL_NUMBERS: Final = -1


def page_of(
    messages: Iterable[tuple[int, DelayedMessage]], places: Sequence[tuple[int, int]], limit: int | None
) -> ports.PendingPage:
    """Return the page of the readable ``messages``, by number, and of the ``places`` of all rows, in order.

    ``places``: due time in microseconds since 1970 UTC, and number. ``limit``: the most rows; ``None``: there are no
    more.
    """
    due_of = {number: due for due, number in places}
    page_messages = [message.set_cursor(cursor_text(due_of[number], number)) for number, message in messages]
    return ports.PendingPage(page_messages, cursor_text(*places[-1]) if places and len(places) == limit else None)


class SqlQuestions(ports.AdministrableStore, ABC):
    """The answers of a store, from statements that have the same name in each database."""

    _dialect: SqlDialect
    _sessions: Sessions
    _sql: Any
    """The statements, with the values that they need.

    ``statistics`` (``at``) returns pending, overdue, claimed, failing, the first due time, and unreadable.
    ``due_count`` (``first end``) returns how many are due, by an index. ``moved_dues`` (likewise) returns due times, to
    the second, and how many more, or fewer, are due then than that index says; ``None``: the index knows all of them.
    ``next_due``, ``record_counts``. ``list_pending`` (see :func:`page_values`) and ``get`` (``id``) return messages,
    with their numbers. ``history`` (``id``) returns kind, id, at, due, destination and detail of records.
    ``limits_table`` is no statement: see :class:`postdate.backends.sql.limits.SqlLimits`.
    """

    @abstractmethod
    async def _page(self, statement: Any, values: Values) -> ports.PendingPage:
        """Return the readable messages that a statement finds, in order; the store marks unreadable ones.

        The next page begins after the last row that the statement finds, readable or not; see :func:`page_of`.
        """

    def _store_values(self, session: Any) -> Values:
        """Return the values that identify the store, for every statement."""
        return {}

    def _query_rows(self, session: Any, statement: Any, values: Values) -> Sequence[tuple[Any, ...]]:
        return self._dialect.rows(session, statement, {**values, **self._store_values(session)})

    def _query_statistics(self, session: Any, at: Any) -> Sequence[Any]:
        return self._query_rows(session, self._sql.statistics, {"at": at})[0]

    @override
    async def statistics(self, now: datetime) -> ports.StoreStatistics:
        at = self._dialect.time(now)
        *counts, first, unreadable = await self._sessions.query(
            lambda session: self._query_statistics(session, at), patiently=True
        )
        return ports.StoreStatistics(*map(int, counts), next_due=self._dialect.instant(first), unreadable=unreadable)

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        return await self._sessions.query(lambda session: self._due_counts(session, edges), patiently=True)

    def _due_counts(self, session: Any, edges: Sequence[datetime]) -> list[int]:
        times, moved_counts = [self._dialect.time(each) for each in edges], list[tuple[datetime, int]]()
        if self._sql.moved_dues:
            rows = self._query_rows(session, self._sql.moved_dues, {"first": times[0], "end": times[-1]})
            moved_counts = [(self._dialect.instant(at) or edges[0], int(count)) for at, count in rows]
        counts = ports.counts_between(edges, moved_counts)
        for position, (first, end) in enumerate(itertools.pairwise(times)):
            ((count,),) = self._query_rows(session, self._sql.due_count, {"first": first, "end": end})
            counts[position] = max(counts[position] + int(count), 0)
        return counts

    async def next_due(self) -> datetime | None:
        """Return the earliest due time. It reads every message, including claimed ones."""
        rows = await self._sessions.query(lambda session: self._query_rows(session, self._sql.next_due, {}))
        return self._dialect.instant(rows[0][0]) if rows else None

    @override
    async def record_counts(self) -> Mapping[ports.RecordKind, int]:
        counts = self._sql.record_counts
        rows = await self._sessions.query(lambda session: self._query_rows(session, counts, {}), patiently=True)
        totals = Counter({ports.RecordKind(kind): count for kind, count in rows})
        if totals.pop(ports.RecordKind.PRUNED, 0):
            totals.update(PrunedCounts.of(pruned_details(await self.history(PRUNED_ID))).counts)
        return totals

    @override
    async def read_pending(self, message_filter: ports.MessageFilter, limit: int) -> ports.PendingPage:
        return await self._page(self._sql.list_pending, page_values(message_filter, limit, self._dialect))

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        page = await self._page(self._sql.get, {"id": message_id})
        return page.messages[0] if page.messages else None

    @override
    async def history(self, message_id: str) -> Sequence[ports.Record]:
        values, statement = {"id": message_id}, self._sql.history
        return self._records(await self._sessions.query(lambda session: self._query_rows(session, statement, values)))

    def _records(self, rows: Iterable[tuple[Any, ...]]) -> list[ports.Record]:
        instant = self._dialect.instant
        return [
            ports.Record(ports.RecordKind(kind), id_, instant(at) or EARLIEST, instant(due), destination, detail or "")
            for kind, id_, at, due, destination, detail in rows
        ]
