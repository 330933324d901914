"""Reads due messages in pages, in key order, finds the next attempt, and answers questions. Source: ADR 0013."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from postdate.backends.azure import layout as azure_layout
from postdate.backends.azure.groups import Table
from postdate.clock import later
from postdate.errors import ConfigurationError, InvalidMessage, MessageError
from postdate.messages import DelayedMessage
from postdate.ports import MessageFilter, PendingPage, StoreStatistics, counts_between
from postdate.ports.administration import invalid_cursor_error

LARGEST_PAGE: Final = 1_000
"""The most entities in one answer of Azure."""

_SHORTEST_IDLE: Final = timedelta(milliseconds=100)
_LONGEST_IDLE: Final = timedelta(seconds=60)
_ROW_TIME_LENGTH: Final = 14
_BEHIND_ALL_TIMES: Final = ":"
"""A text that sorts after every digit. Keys that are no times belong to other programs."""

_SEARCH_PAGE_SIZE: Final = 250

Entity = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Polling:
    """How the store polls for messages that other processes stored.

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
        if not 1 <= self.page_size <= LARGEST_PAGE:
            raise ConfigurationError(f"page_size must be 1 to {LARGEST_PAGE:,}, not {self.page_size}")


class BackOff:
    """Pauses that grow while there is nothing to do (row 82)."""

    def __init__(self, polling: Polling) -> None:
        self._polling = polling
        self._pause = timedelta(0)

    def lengthen_pause(self) -> timedelta:
        self._pause = min(self._pause + self._polling.peek_interval, self._polling.longest_wait_when_idle)
        return self._pause

    def reset(self) -> None:
        self._pause = timedelta(0)


class Pages:
    """A buffer of due messages that are read before they are claimed.

    It is valid only under one lease, because then no other process claims them.
    """

    def __init__(
        self, table: Table, mark_unreadable: Callable[[Entity, MessageError, datetime], Awaitable[None]]
    ) -> None:
        self._table, self._mark_unreadable = table, mark_unreadable
        self._buffer: deque[azure_layout.DelayedEntity] = deque()
        self._last_row_key = ""
        """The last key that was read; empty to begin at the start of the table."""

    def forget_buffer(self) -> None:
        """Read from the start of the table next time, because something may have changed there."""
        self._buffer.clear()
        self._last_row_key = ""

    def forget_if_before(self, attempt_at: datetime) -> None:
        """Forget the buffer if a message with an attempt at ``attempt_at`` lies before the position reached."""
        if self._last_row_key and azure_layout.second_key(attempt_at) <= self._last_row_key:
            self.forget_buffer()

    @property
    def next_cached_attempt(self) -> datetime | None:
        """The time of the next attempt, as far as it is known without a request."""
        if self._buffer:
            return self._buffer[0].attempt_at
        return (
            azure_layout.attempt_of(self._last_row_key[:_ROW_TIME_LENGTH], is_own=False) if self._last_row_key else None
        )

    async def read_due(
        self, now: datetime, limit: int, is_selected: Callable[[azure_layout.DelayedEntity], bool]
    ) -> list[azure_layout.DelayedEntity]:
        """Return up to ``limit`` messages that may be attempted strictly before ``now``, oldest first."""
        entities_by_id: dict[str, azure_layout.DelayedEntity] = {}
        has_read = False
        while len(entities_by_id) < limit:
            if not self._buffer:
                if has_read and not self._last_row_key:
                    break
                await self._load_page(now)
                has_read = True
                continue
            candidate = self._buffer.popleft()
            message_id = candidate.message.message_id  # of two messages with one id, only one at a time
            if candidate.attempt_at < now and message_id not in entities_by_id and is_selected(candidate):
                entities_by_id[message_id] = candidate
        return list(entities_by_id.values())

    async def _load_page(self, now: datetime) -> None:
        """Read the next page, or the first one."""
        page = await self.read_page(self._last_row_key, azure_layout.second_key(later(now, timedelta(seconds=1))))
        messages: list[azure_layout.DelayedEntity] = []
        for entity in page:
            try:
                messages.append(azure_layout.read_entity(entity))
            except MessageError as error:
                await self._mark_unreadable(entity, error, now)
        # Only now: if marking fails, the page must be read again, because otherwise its messages would be skipped.
        self._last_row_key = page[-1]["RowKey"] if len(page) >= LARGEST_PAGE else ""
        self._buffer.extend(sorted(messages, key=lambda waiting: waiting.attempt_at))

    async def read_page(self, after: str, before: str) -> list[Entity]:
        """Return up to :data:`LARGEST_PAGE` entities with a row key above ``after`` and below ``before``.

        A short or empty answer may not be the last one. Answers are read until the page is full or the table ends.
        """
        page: list[Entity] = []
        async with aclosing(self.query_entities(after, before)) as entities:
            async for entity in entities:
                page.append(entity)
                if len(page) == LARGEST_PAGE:
                    break
        return page

    async def get_entity(self, row: str) -> Entity | None:
        return await self._table.get({"PartitionKey": azure_layout.partition_of(row), "RowKey": row})

    async def is_unreadable(self, row: str) -> bool:
        """Return whether the entity with that row key is marked as unreadable."""
        return await self._table.get({"PartitionKey": azure_layout.UNREADABLE, "RowKey": row}) is not None

    async def query_entities(
        self,
        after: str = "",
        before: str = "",
        *,
        select: Sequence[str] | None = None,
        extra_condition: str = "",
        page_size: int = LARGEST_PAGE,
    ) -> AsyncGenerator[Entity]:
        """Yield entities in key order. Row keys begin with the partition key, so they order the whole table.

        Their row keys are above ``after`` and below ``before``. ``extra_condition`` is another condition, which no
        index supports. An answer has up to ``page_size`` entities, at most :data:`LARGEST_PAGE`.
        """
        bounds = [f"PartitionKey lt '{_BEHIND_ALL_TIMES}'"]
        if after:
            bounds += [f"PartitionKey ge '{_quote(azure_layout.partition_of(after))}'", f"RowKey gt '{_quote(after)}'"]
        if before:
            bounds += [
                f"PartitionKey le '{_quote(azure_layout.partition_of(before))}'",
                f"RowKey lt '{_quote(before)}'",
            ]
        if extra_condition:
            bounds.append(extra_condition)
        async for entity in self._table.query(" and ".join(bounds), select, page_size):
            yield entity

    async def find_first_attempt(self, is_selected: Callable[[Entity], bool]) -> datetime | None:
        """Return the earliest attempt of the selected entities; ``None`` without any.

        Upstream's messages are due at the end of their second, wherever their keys sort in it. Therefore a second that
        begins with one of them is read to its end.
        """
        earliest: datetime | None = None
        second = ""
        async with aclosing(
            self.query_entities(select=azure_layout.KEY_COLUMNS, page_size=_SEARCH_PAGE_SIZE)
        ) as entities:
            async for entity in entities:
                row: str = entity["RowKey"]
                if earliest is not None and row[:_ROW_TIME_LENGTH] != second:
                    break
                attempt_at = _attempt_of(entity) if is_selected(entity) else None
                if attempt_at is None:
                    continue
                earliest = attempt_at if earliest is None else min(earliest, attempt_at)
                second = row[:_ROW_TIME_LENGTH]
                if entity.get("Due") is not None:
                    break
        return earliest

    # --- an administrator's questions, answered from the columns of all entities ---------------------------------

    async def next_due(self) -> datetime | None:
        """Return the earliest due time. It reads every message that has failed before."""
        dues: list[datetime] = []
        async with aclosing(self.query_entities(select=azure_layout.KEY_COLUMNS, page_size=1)) as entities:
            async for entity in entities:
                if (due := _due_of(entity)) is not None:
                    dues.append(due)
                    break
        failing = self.query_entities(select=azure_layout.KEY_COLUMNS, extra_condition="Failures gt 0")
        all_dues = [*dues, *[_due_of(entity) async for entity in failing]]
        return min((due for due in all_dues if due is not None), default=None)

    async def statistics(self, claims: Container[object], now: datetime) -> StoreStatistics:
        """Count the messages; those in ``claims`` are claimed."""
        pending = overdue = claimed = failing = 0
        earliest: datetime | None = None
        async for entity in self.query_entities(select=(*azure_layout.KEY_COLUMNS, "Failures")):
            due, is_claimed = _due_of(entity), entity.get("MessageId") in claims
            pending, claimed = pending + 1, claimed + is_claimed
            failing += bool(entity.get("Failures"))
            if due is not None:
                overdue += due < now and not is_claimed
                earliest = due if earliest is None else min(earliest, due)
        return StoreStatistics(pending, overdue, claimed, failing, earliest)

    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        """Count messages by due time.

        A message that has failed is counted at its next attempt, perhaps after the last edge.
        """
        keys = self.query_entities(_key_before_second(edges[0]), select=azure_layout.KEY_COLUMNS)
        dues = [due async for entity in keys if (due := _due_of(entity)) is not None]
        return counts_between(edges, ((due, 1) for due in dues))

    async def read_pending(self, message_filter: MessageFilter, limit: int) -> PendingPage:
        """List messages in key order. A message that has failed is listed at its next attempt."""
        messages: list[DelayedMessage] = []
        start_key = "" if message_filter.due_from is None else _key_before_second(message_filter.due_from)
        if message_filter.after is not None:
            start_key = max(start_key, _read_cursor(message_filter.after))
        page_size = min(max(limit, _SEARCH_PAGE_SIZE), LARGEST_PAGE)
        async with aclosing(self.query_entities(start_key, page_size=page_size)) as entities:
            async for entity in entities:
                try:
                    message = azure_layout.read_entity(entity).message
                except MessageError:  # It is marked when it is due.
                    continue
                if message_filter.matches(message):
                    messages.append(message.set_cursor(entity["RowKey"]))
                    if len(messages) == limit:
                        break
        return PendingPage.of(messages, limit)


def _read_cursor(cursor: str) -> str:
    """Return the row key after which a list continues. Raise `InvalidMessage`."""
    if not (isinstance(cursor, str) and cursor.isprintable() and azure_layout.is_row_key(cursor)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid_cursor_error(cursor)
    return cursor


def _key_before_second(instant: datetime) -> str:
    """Return a text that sorts before all keys of a second, even the one without a GUID."""
    return azure_layout.second_key(instant)[:-1]


def _attempt_of(entity: Entity) -> datetime | None:
    """Return the time of an entity's attempt; ``None`` when it is no message."""
    try:
        return azure_layout.attempt_of(entity["RowKey"], is_own=entity.get("Due") is not None)
    except InvalidMessage:  # It is marked when the whole entity is read.
        return None


def _quote(key: str) -> str:
    return key.replace("'", "''")


def _due_of(entity: Entity) -> datetime | None:
    """Return the due time of an entity; ``None`` when it cannot be read. It is marked when it is due."""
    due = entity.get("Due")
    try:
        return azure_layout.attempt_of(entity["RowKey"], is_own=False) if due is None else azure_layout.instant_of(due)
    except (InvalidMessage, ValueError, TypeError, OverflowError):
        return None
