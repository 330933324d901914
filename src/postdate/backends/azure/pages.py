"""Reads due messages in pages, in key order, finds the next attempt, and answers questions. Source: ADR 0013."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from postdate.backends.azure.groups import Table
from postdate.backends.azure.layout import (
    KEY_COLUMNS,
    UNREADABLE,
    DelayedEntity,
    attempt_of,
    instant_of,
    is_row_key,
    partition_of,
    read_entity,
    second_key,
)
from postdate.clock import later
from postdate.errors import ConfigurationError, InvalidMessage, MessageError
from postdate.messages import DelayedMessage
from postdate.ports import MessageFilter, PendingPage, StoreStatistics, counted_between
from postdate.ports.administration import no_cursor

READ_AT_ONCE: Final = 1_000
"""Azure's most entities in one answer."""

_SHORTEST_IDLE: Final = timedelta(milliseconds=100)
_LONGEST_IDLE: Final = timedelta(seconds=60)
_ROW_TIME_LENGTH: Final = 14
_BEHIND_ALL_TIMES: Final = ":"
"""Sorts after every digit: keys that are no times are others' entities."""

_LOOKED_AT_ONCE: Final = 250

Entity = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Polling:
    """How the store looks for messages that other processes stored.

    Args:
        peek_interval: added to each pause while the table stays empty; more than 0.
        longest_wait_when_idle: the longest pause; 100 ms to 60 s.
        page_size: the most messages in one claim; 1 to 1,000.

    Raises:
        ConfigurationError: one of them is out of range.
    """

    peek_interval: timedelta = timedelta(milliseconds=125)
    longest_wait_when_idle: timedelta = timedelta(seconds=30)
    page_size: int = 50

    def __post_init__(self) -> None:
        longest = self.longest_wait_when_idle
        if self.peek_interval <= timedelta(0):
            raise ConfigurationError(f"peek_interval must be more than 0, not {self.peek_interval}")
        if not _SHORTEST_IDLE <= longest <= _LONGEST_IDLE:
            raise ConfigurationError(f"longest_wait_when_idle must be 100 ms to 60 s, not {longest}")
        if not 1 <= self.page_size <= READ_AT_ONCE:
            raise ConfigurationError(f"page_size must be 1 to {READ_AT_ONCE:,}, not {self.page_size}")


class BackOff:
    """Pauses that grow while there is nothing to do (row 82)."""

    def __init__(self, polling: Polling) -> None:
        self._polling = polling
        self._pause = timedelta(0)

    def longer(self) -> timedelta:
        self._pause = min(self._pause + self._polling.peek_interval, self._polling.longest_wait_when_idle)
        return self._pause

    def reset(self) -> None:
        self._pause = timedelta(0)


class Pages:
    """Reads due messages ahead of their claims; valid only under one lease, as nobody else takes them meanwhile."""

    def __init__(self, table: Table, mark: Callable[[Entity, MessageError, datetime], Awaitable[None]]) -> None:
        self._table, self._mark = table, mark
        self._ahead: deque[DelayedEntity] = deque()
        self._read_to = ""
        """The last key that was read; empty to start at the front."""

    def forget(self) -> None:
        """Read from the start of the table next time: something may have changed there."""
        self._ahead.clear()
        self._read_to = ""

    def changed(self, attempt_at: datetime) -> None:
        """A message may be attempted at ``attempt_at``: read again if that lies before the position reached."""
        if self._read_to and second_key(attempt_at) <= self._read_to:
            self.forget()

    @property
    def next_ahead(self) -> datetime | None:
        """Time of the next attempt as far as it is known without a request."""
        if self._ahead:
            return self._ahead[0].attempt_at
        return attempt_of(self._read_to[:_ROW_TIME_LENGTH], is_own=False) if self._read_to else None

    async def take(
        self, now: datetime, limit: int, is_selected: Callable[[DelayedEntity], bool]
    ) -> list[DelayedEntity]:
        """Return up to ``limit`` messages that may be attempted strictly before ``now``, oldest first."""
        selected: dict[str, DelayedEntity] = {}
        has_read = False
        while len(selected) < limit:
            if not self._ahead:
                if has_read and not self._read_to:
                    break
                await self._read(now)
                has_read = True
                continue
            waiting = self._ahead.popleft()
            id_ = waiting.message.message_id  # two messages with one id: one at a time
            if waiting.attempt_at < now and id_ not in selected and is_selected(waiting):
                selected[id_] = waiting
        return list(selected.values())

    async def _read(self, now: datetime) -> None:
        """Read the next page, or the first one."""
        page = await self.one_page(self._read_to, second_key(later(now, timedelta(seconds=1))))
        messages: list[DelayedEntity] = []
        for entity in page:
            try:
                messages.append(read_entity(entity))
            except MessageError as error:
                await self._mark(entity, error, now)
        # Only now: when a mark fails, the page is read again, else its messages would be passed over.
        self._read_to = page[-1]["RowKey"] if len(page) >= READ_AT_ONCE else ""
        self._ahead.extend(sorted(messages, key=lambda waiting: waiting.attempt_at))

    async def one_page(self, after: str, before: str) -> list[Entity]:
        """Return up to :data:`READ_AT_ONCE` entities with a row key above ``after`` and below ``before``.

        A short or empty answer may not be the last: answers are followed until the page is full or the table ends.
        """
        page: list[Entity] = []
        async with aclosing(self.entities(after, before)) as entities:
            async for entity in entities:
                page.append(entity)
                if len(page) == READ_AT_ONCE:
                    break
        return page

    async def at(self, row: str) -> Entity | None:
        return await self._table.get({"PartitionKey": partition_of(row), "RowKey": row})

    async def is_unreadable(self, row: str) -> bool:
        """Return whether the entity with that row key is marked as unreadable."""
        return await self._table.get({"PartitionKey": UNREADABLE, "RowKey": row}) is not None

    async def entities(
        self,
        after: str = "",
        before: str = "",
        *,
        select: Sequence[str] | None = None,
        also: str = "",
        at_once: int = READ_AT_ONCE,
    ) -> AsyncGenerator[Entity]:
        """Yield entities in key order; row keys begin with the partition key, so they order the whole table.

        Their row keys are above ``after`` and below ``before``. ``also`` is another condition, which no index serves.
        An answer has up to ``at_once`` entities, at most :data:`READ_AT_ONCE`.
        """
        bounds = [f"PartitionKey lt '{_BEHIND_ALL_TIMES}'"]
        if after:
            bounds += [f"PartitionKey ge '{_quoted(partition_of(after))}'", f"RowKey gt '{_quoted(after)}'"]
        if before:
            bounds += [f"PartitionKey le '{_quoted(partition_of(before))}'", f"RowKey lt '{_quoted(before)}'"]
        if also:
            bounds.append(also)
        async for entity in self._table.query(" and ".join(bounds), select, at_once):
            yield entity

    async def first(self, is_selected: Callable[[Entity], bool]) -> datetime | None:
        """Return the earliest attempt of the wanted entities; ``None`` without any.

        Upstream's messages are due at the end of their second, wherever their keys sort in it; so a second that begins
        with one of them is read to its end.
        """
        earliest: datetime | None = None
        second = ""
        async with aclosing(self.entities(select=KEY_COLUMNS, at_once=_LOOKED_AT_ONCE)) as entities:
            async for entity in entities:
                row: str = entity["RowKey"]
                if earliest is not None and row[:_ROW_TIME_LENGTH] != second:
                    break
                attempt_at = _attempt(entity) if is_selected(entity) else None
                if attempt_at is None:
                    continue
                earliest = attempt_at if earliest is None else min(earliest, attempt_at)
                second = row[:_ROW_TIME_LENGTH]
                if entity.get("Due") is not None:
                    break
        return earliest

    # --- an administrator's questions, answered from the columns of all entities ---------------------------------

    async def next_due(self) -> datetime | None:
        """Return the earliest due time; reads every message that has failed before."""
        dues: list[datetime] = []
        async with aclosing(self.entities(select=KEY_COLUMNS, at_once=1)) as entities:
            async for entity in entities:
                if (due := _due_of(entity)) is not None:
                    dues.append(due)
                    break
        failing = self.entities(select=KEY_COLUMNS, also="Failures gt 0")
        all_dues = [*dues, *[_due_of(entity) async for entity in failing]]
        return min((due for due in all_dues if due is not None), default=None)

    async def statistics(self, holding: Container[object], now: datetime) -> StoreStatistics:
        """Count the messages; those in ``holding`` are claimed."""
        pending = overdue = claimed = failing = 0
        earliest: datetime | None = None
        async for entity in self.entities(select=(*KEY_COLUMNS, "Failures")):
            due, is_claimed = _due_of(entity), entity.get("MessageId") in holding
            pending, claimed = pending + 1, claimed + is_claimed
            failing += bool(entity.get("Failures"))
            if due is not None:
                overdue += due < now and not is_claimed
                earliest = due if earliest is None else min(earliest, due)
        return StoreStatistics(pending, overdue, claimed, failing, earliest)

    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        """Count by due time; what has failed before stands at its next attempt, behind the last edge maybe."""
        keys = self.entities(_since(edges[0]), select=KEY_COLUMNS)
        dues = [due async for entity in keys if (due := _due_of(entity)) is not None]
        return counted_between(edges, ((due, 1) for due in dues))

    async def pending(self, where: MessageFilter, limit: int) -> PendingPage:
        """List messages in key order; one that has failed stands at its next attempt."""
        messages: list[DelayedMessage] = []
        begin = "" if where.due_from is None else _since(where.due_from)
        if where.after is not None:
            begin = max(begin, _read_cursor(where.after))
        at_once = min(max(limit, _LOOKED_AT_ONCE), READ_AT_ONCE)
        async with aclosing(self.entities(begin, at_once=at_once)) as entities:
            async for entity in entities:
                try:
                    message = read_entity(entity).message
                except MessageError:  # marked when it is due
                    continue
                if where.matches(message):
                    messages.append(message.listed(entity["RowKey"]))
                    if len(messages) == limit:
                        break
        return PendingPage.of(messages, limit)


def _read_cursor(cursor: str) -> str:
    """Return the row key behind which a list goes on. Raises `InvalidMessage`."""
    if not (isinstance(cursor, str) and cursor.isprintable() and is_row_key(cursor)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise no_cursor(cursor)
    return cursor


def _since(instant: datetime) -> str:
    """Return what sorts before all keys of a second, even the one without a GUID."""
    return second_key(instant)[:-1]


def _attempt(entity: Entity) -> datetime | None:
    """Return the attempt time of an entity; ``None`` when it is no message."""
    try:
        return attempt_of(entity["RowKey"], is_own=entity.get("Due") is not None)
    except InvalidMessage:  # marked when it is read whole
        return None


def _quoted(key: str) -> str:
    return key.replace("'", "''")


def _due_of(entity: Entity) -> datetime | None:
    """Return the due time of an entity; ``None`` when it cannot be read: it is marked when it is due."""
    due = entity.get("Due")
    try:
        return attempt_of(entity["RowKey"], is_own=False) if due is None else instant_of(due)
    except (InvalidMessage, ValueError, TypeError, OverflowError):
        return None
