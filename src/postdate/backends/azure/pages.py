"""What is due, read in pages in the order of its keys, and what is to be attempted next. Source: ADR 0013."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from postdate.backends.azure.groups import Table
from postdate.backends.azure.layout import KEY_COLUMNS, DelayedEntity, attempt_of, partition_of, read_entity, second_key
from postdate.clock import later
from postdate.errors import ConfigurationError, InvalidMessage, MessageError

READ_AT_ONCE: Final = 1_000
"""As many as Azure gives in one answer."""

_SHORTEST_IDLE: Final = timedelta(milliseconds=100)
_LONGEST_IDLE: Final = timedelta(seconds=60)
_ROW_TIME_LENGTH: Final = 14
_BEHIND_ALL_TIMES: Final = ":"
"""What others keep in the table under keys that are no times is no business of ours."""

_LOOKED_AT_ONCE: Final = 250

log = logging.getLogger("postdate.azure.pages")

Entity = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Polling:
    """How the store looks for messages that other processes stored.

    Args:
        peek_interval: by how much each pause between two looks is longer than the one before, as long as there is
            nothing; more than 0.
        longest_wait_when_idle: the longest pause; 100 ms to 60 s.
        page_size: how many messages are claimed in one piece at most; 1 to 1,000.

    Raises:
        ConfigurationError: one of them cannot be.
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
    """Pauses that grow while there is nothing (row 82).

    Args:
        polling: by how much, and up to what.
    """

    def __init__(self, polling: Polling) -> None:
        self._polling = polling
        self._pause = timedelta(0)

    def longer(self) -> timedelta:
        """Return the next pause."""
        self._pause = min(self._pause + self._polling.peek_interval, self._polling.longest_wait_when_idle)
        return self._pause

    def reset(self) -> None:
        """Begin again: there was something."""
        self._pause = timedelta(0)


class Pages:
    """Reads what is due ahead of who claims it.

    What was read is handed out later only while the lease lasts: nobody else takes it meanwhile.

    Args:
        table: where the messages are.
        set_aside: takes an entity that is no message out of the way; told the reason and the time.
    """

    def __init__(self, table: Table, set_aside: Callable[[Entity, MessageError, datetime], Awaitable[None]]) -> None:
        self._table, self._set_aside = table, set_aside
        self._ahead: deque[DelayedEntity] = deque()
        self._read_to = ""
        """The last key that was read; empty when the next look begins at the front."""

    def forget(self) -> None:
        """Begin at the front next time: something may have changed there."""
        self._ahead.clear()
        self._read_to = ""

    def changed(self, attempt_at: datetime) -> None:
        """Note that something may be attempted at that time: it may lie before what was read."""
        if self._read_to and second_key(attempt_at) <= self._read_to:
            self.forget()

    @property
    def next_ahead(self) -> datetime | None:
        """From when on the next may be attempted, as far as that is known without asking."""
        if self._ahead:
            return self._ahead[0].attempt_at
        return attempt_of(self._read_to[:_ROW_TIME_LENGTH], is_ours=False) if self._read_to else None

    async def take(self, now: datetime, limit: int, is_wanted: Callable[[DelayedEntity], bool]) -> list[DelayedEntity]:
        """Return up to ``limit`` messages that may be attempted strictly before ``now``, oldest first."""
        taken: dict[str, DelayedEntity] = {}
        has_read = False
        while len(taken) < limit:
            if not self._ahead:
                if has_read and not self._read_to:
                    break
                await self._read(now)
                has_read = True
                continue
            waiting = self._ahead.popleft()
            id_ = waiting.message.message_id  # two messages of one id go one after the other
            if waiting.attempt_at < now and id_ not in taken and is_wanted(waiting):
                taken[id_] = waiting
        return list(taken.values())

    async def _read(self, now: datetime) -> None:
        """Read one page behind what was read last, or at the front."""
        page = await self.one_page(self._read_to, second_key(later(now, timedelta(seconds=1))))
        self._read_to = page[-1]["RowKey"] if len(page) >= READ_AT_ONCE else ""
        found: list[DelayedEntity] = []
        for entity in page:
            try:
                found.append(read_entity(entity))
            except MessageError as error:
                await self._set_aside(entity, error, now)
        self._ahead.extend(sorted(found, key=lambda waiting: waiting.attempt_at))

    async def one_page(self, after: str, before: str) -> list[Entity]:
        """Return up to :data:`READ_AT_ONCE` entities with a row key above ``after`` and below ``before``.

        An answer may be short, or empty, and still not the last: it is followed until there is a page or the end.
        """
        page: list[Entity] = []
        async with aclosing(self.entities(after, before)) as entities:
            async for entity in entities:
                page.append(entity)
                if len(page) == READ_AT_ONCE:
                    break
        return page

    async def at(self, row: str) -> Entity | None:
        """Return the entity with a row key, or ``None``."""
        return await self._table.get({"PartitionKey": partition_of(row), "RowKey": row})

    async def entities(
        self,
        after: str = "",
        before: str = "",
        *,
        select: Sequence[str] | None = None,
        also: str = "",
        at_once: int = READ_AT_ONCE,
    ) -> AsyncGenerator[Entity]:
        """Yield entities in the order of their keys; row keys begin with the partition key, so these order them all.

        Args:
            after: row keys above this only.
            before: row keys below this only.
            select: which columns; ``None``: all.
            also: another condition, which the server has to look at every entity for.
            at_once: how many in one answer, at most :data:`READ_AT_ONCE`.
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

    async def first(self, is_wanted: Callable[[Entity], bool]) -> datetime | None:
        """Return from when on the first of those wanted may be attempted; ``None`` without any.

        Others' messages are due at the end of their second, wherever they lie in it; so all of a second is looked at
        where it begins with one of theirs.
        """
        found: datetime | None = None
        second = ""
        async with aclosing(self.entities(select=KEY_COLUMNS, at_once=_LOOKED_AT_ONCE)) as entities:
            async for entity in entities:
                row: str = entity["RowKey"]
                if found is not None and row[:_ROW_TIME_LENGTH] != second:
                    break
                attempt_at = _attempt(entity) if is_wanted(entity) else None
                if attempt_at is None:
                    continue
                found = attempt_at if found is None else min(found, attempt_at)
                second = row[:_ROW_TIME_LENGTH]
                if entity.get("Due") is not None:
                    break
        return found


def _attempt(entity: Entity) -> datetime | None:
    """Return from when on an entity may be attempted; ``None`` for one that is no message."""
    try:
        return attempt_of(entity["RowKey"], is_ours=entity.get("Due") is not None)
    except InvalidMessage:  # set aside when it is read whole
        return None


def _quoted(key: str) -> str:
    return key.replace("'", "''")
