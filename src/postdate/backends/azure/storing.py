"""Stores a message once: its id first, then the message, so that an interruption can be detected. Source: ADR 0013."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from postdate.backends.azure.groups import Operation, Table
from postdate.backends.azure.layout import DelayedEntity, read_entity
from postdate.backends.azure.pages import Pages
from postdate.backends.azure.records import Known, Records
from postdate.errors import DuplicateMessage, MessageError
from postdate.messages import DelayedMessage
from postdate.ports import RecordKind


class Storing:
    """Puts messages into a table, and finds waiting messages by id."""

    def __init__(self, table: Table, records: Records, pages: Pages) -> None:
        self._table, self._records, self._pages = table, records, pages

    async def store(self, message: DelayedMessage, now: datetime) -> DelayedEntity:
        """Store a message and return its entity.

        Raises:
            DuplicateMessage: it was stored before, and has not come back from the error queue.
            StoreUnavailable: it may have been stored; storing it again finds out.
        """
        waiting = DelayedEntity.new(message)
        (is_new,) = await self._records.enter([waiting], now)
        if not is_new:
            return await self._store_again(waiting, now, may_come_back=True)
        if not await self._put(waiting):
            raise DuplicateMessage.of(message.message_id)  # another process found the id without its message
        return waiting

    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> list[DelayedEntity]:
        """Store the new messages, the first of each id; return their entities."""
        unique = {message.message_id: message for message in reversed(messages)}
        waiting = [DelayedEntity.new(message) for message in reversed(unique.values())]  # the first of each, in order
        entered = await self._records.enter(waiting, now)
        fresh = [each for each, is_new in zip(waiting, entered, strict=True) if is_new]
        put = await self._table.each([Operation("create", each.entity()) for each in fresh])
        stored = [each for each, is_put in zip(fresh, put, strict=True) if is_put]
        for each in (each for each, is_new in zip(waiting, entered, strict=True) if not is_new):
            try:
                stored.append(await self._store_again(each, now, may_come_back=False))
            except DuplicateMessage:
                continue
        return stored

    async def store_returned(self, message: DelayedMessage, now: datetime) -> DelayedEntity:
        """Store a repaired message from the quarantine, and record that."""
        waiting = DelayedEntity.new(message)
        return await self._store_again(waiting, now, may_come_back=True, back=RecordKind.RETURNED)

    async def _store_again(
        self, waiting: DelayedEntity, now: datetime, *, may_come_back: bool, back: RecordKind = RecordKind.RESCHEDULED
    ) -> DelayedEntity:
        """Store a message whose id is known: its message is missing, or has failed and ``may_come_back``."""
        records, id_ = self._records, waiting.message.message_id
        known = await records.find(id_)
        if known is None:  # it left a moment ago, and nothing is kept of it
            (taken,) = await records.enter([waiting], now)
        elif known.end is RecordKind.FAILED and may_come_back:
            taken = not await self._is_there(known) and await records.come_back(known, waiting, now, back)
            waiting = DelayedEntity.new(waiting.message, known.records + 2)
        else:  # an id without a message: storing was interrupted, or upstream's poller took it
            taken = known.end is None and not await self._is_there(known) and await records.take_over(known, waiting)
        if not (taken and await self._put(waiting)):
            raise DuplicateMessage.of(id_)
        return waiting

    async def _put(self, waiting: DelayedEntity) -> bool:
        return await self._table.atomically([Operation("create", waiting.entity())])

    async def find(self, message_id: str) -> tuple[Known, DelayedEntity] | None:
        """Return a waiting message and its id's row; ``None`` when it does not wait."""
        known = await self._records.find(message_id)
        waiting = None if known is None else await self._at_one_of(known)
        return None if known is None or waiting is None else (known, waiting)

    async def _is_there(self, known: Known) -> bool:
        return await self._at_one_of(known) is not None

    async def _at_one_of(self, known: Known) -> DelayedEntity | None:
        for row in known.places:
            entity = await self._pages.at(row)
            if entity is not None:
                with suppress(MessageError):  # quarantined when it is due
                    return read_entity(entity)
        return None
