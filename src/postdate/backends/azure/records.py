"""Known ids and their records, in a table beside that of the messages; storing each message once; the account's clock.

An id has one row: how the message was scheduled, where it waits, how it ended. Rarer records are rows behind it. So a
message normally costs two changes of one row, in batches. A message is stored after its id, so that an interruption can
be detected. Source: ADR 0004, 0013.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from postdate.backends.azure.groups import Operation, Rounds, Table
from postdate.backends.azure.layout import (
    DelayedEntity,
    changed_at,
    cut,
    etag_of,
    id_hash,
    instant_of,
    read_entity,
    text_of,
)
from postdate.backends.azure.pages import Pages
from postdate.errors import DuplicateMessage, MessageError, StoreUnavailable
from postdate.messages import DelayedMessage
from postdate.ports import Record, RecordKind

_BUCKETS: Final = 4
"""Partitions of the ids: Azure works on some 2,000 rows a second in each. The number is part of the layout."""

_CLOCK: Final = "clock"
_AHEAD: Final = "AheadMicroseconds"
_MICROSECOND: Final = timedelta(microseconds=1)
_LIVES_FOR: Final = timedelta(minutes=2)
"""Every half minute each process looks at the clock, and so writes its row."""

_NOT_IN_KEYS: Final = re.compile(r"[/\\#?\x00-\x1f\x7f-\x9f']")

Row = Mapping[str, Any]


def keys_of(message_id: str, number: int | None = None) -> dict[str, str]:
    """Return the keys of an id's row, or of its record ``number``."""
    digits = id_hash(message_id)
    bucket = int(digits[0], 16) % _BUCKETS
    return {"PartitionKey": f"id{bucket}", "RowKey": digits if number is None else f"{digits}_{number:08}"}


class IndexRow:
    """The row of an id."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.message_id: str = row["MessageId"]
        self.etag = etag_of(row)
        self.records = int(row.get("Records") or 0)
        ended = int(row.get("Ended") or 0)
        self.end = RecordKind(ended) if ended else None

    @property
    def places(self) -> list[str]:
        """The row keys at which the message may wait, the latest last: at one of them, unless it has left.

        At both while it moves, and after a move that was interrupted.
        """
        named = (self._row.get("Former"), self._row.get("Location"))
        return list(dict.fromkeys(place for place in named if place))  # equal when it was changed where it stood

    def scheduled(self) -> list[Record]:
        """Return the record of scheduling; none for messages of upstream or of older versions."""
        at = self._row.get("ScheduledAt")
        return [] if at is None else [self._record(RecordKind.SCHEDULED, at, self._row["ScheduledDue"], "")]

    def ended(self) -> list[Record]:
        if self.end is None:
            return []
        return [self._record(self.end, self._row["EndedAt"], self._row["Due"], self._row.get("Detail") or "")]

    def _record(self, kind: RecordKind, at: str, due: str, detail: str) -> Record:
        return Record(kind, self.message_id, instant_of(at), instant_of(due), self._row["Destination"], detail)


class Records:
    """The records of one store's messages."""

    def __init__(self, table: Table, *, keeps_retries: bool) -> None:
        self.table, self.keeps_retries = table, keeps_retries
        name = _NOT_IN_KEYS.sub("_", f"{platform.node()}:{os.getpid()}")
        self._clock_keys = {"PartitionKey": _CLOCK, "RowKey": name}
        self.rounds = Rounds(table)
        """For the ends of messages."""

    # --- entering --------------------------------------------------------------------------------------------------

    async def enter(self, messages: Sequence[DelayedEntity], now: datetime) -> list[bool]:
        """Add the ids that are new; return for each whether it was."""
        return await self.table.each([Operation("create", self._entry(each, now)) for each in messages])

    def _entry(self, waiting: DelayedEntity, now: datetime) -> dict[str, Any]:
        scheduled = {"ScheduledAt": text_of(now), "ScheduledDue": text_of(waiting.message.due)}
        return {**self._base(waiting), "Location": waiting.row, **scheduled}

    @staticmethod
    def _base(waiting: DelayedEntity) -> dict[str, Any]:
        message = waiting.message
        return {
            **keys_of(message.message_id),
            "MessageId": message.message_id,
            "Destination": message.destination,
            "Due": text_of(message.due),
        }

    async def find(self, message_id: str) -> IndexRow | None:
        row = await self.table.get(keys_of(message_id))
        return None if row is None else IndexRow(row)

    async def has_ended(self, message_id: str) -> bool:
        index = await self.find(message_id)
        return index is not None and index.end is not None

    async def take_over(self, index: IndexRow, waiting: DelayedEntity) -> bool:
        """Point a known id at a message: its own was never stored, or upstream, which keeps no records, took it."""
        entry = {**self._base(waiting), "Location": waiting.row, "Former": ""}
        return await self.table.atomically([Operation("change", entry, index.etag)])

    async def come_back(self, index: IndexRow, waiting: DelayedEntity, now: datetime) -> bool:
        """Point an id whose message had failed at its new place; return ``False`` when another process was faster."""
        message, why = waiting.message, "came back from the error queue"
        record = Record(RecordKind.RESCHEDULED, message.message_id, now, message.due, None, why)
        return await self.append(index, next(reversed(index.places), ""), waiting, record)

    async def append(self, index: IndexRow, former: str, waiting: DelayedEntity, record: Record) -> bool:
        """Add a record after the existing ones, its end included, and set the message's place and the former one.

        Returns ``False``, with nothing done, when the row had changed.
        """
        message = waiting.message
        added = [*index.ended(), record]
        operations = [
            Operation("create", _row(each, message.destination, index.records + number))
            for number, each in enumerate(added, 1)
        ]
        entry = {
            **self._base(waiting),
            "Location": waiting.row,
            "Former": former,
            "Records": index.records + len(added),
            "Ended": 0,
        }
        return await self.table.atomically([Operation("change", entry, index.etag), *operations])

    # --- what happens ----------------------------------------------------------------------------------------------

    async def retried(self, old: DelayedEntity, new: DelayedEntity, now: datetime, reason: str) -> None:
        """Record a failed attempt, and the message's place for the next one."""
        message = old.message
        entry = {**self._base(new), "Location": new.row, "Former": old.row, "Ended": 0}
        operations = [Operation("merge", entry)]
        if self.keeps_retries:
            entry["Records"] = new.records
            record = Record(RecordKind.RETRIED, message.message_id, now, message.due, None, reason)
            operations.append(Operation("upsert", _row(record, message.destination, new.records)))
        await self.table.atomically(operations)

    async def end(self, messages: Sequence[DelayedEntity], kind: RecordKind, now: datetime, detail: str = "") -> None:
        """Record the ends of messages; called before they are deleted, so that none is ever gone without a record."""
        end = _end(kind, now, detail)
        await self.rounds.each([Operation("merge", {**self._base(each), **end}) for each in messages])

    async def not_ended(self, index: IndexRow) -> None:
        """Take back an end whose deletion failed, unless the row has changed since it was read."""
        await self.table.atomically([Operation("change", {**keys_of(index.message_id), "Ended": 0}, index.etag)])

    async def not_moved(self, old: DelayedEntity, new: DelayedEntity) -> None:
        """Take back the record and the place of a rescheduling that was not done."""
        index = await self.find(old.message.message_id)
        if index is None or index.places[-1:] != [new.row]:
            return
        entry = {**self._base(old), "Location": old.row, "Former": "", "Records": index.records - 1}
        record = Operation("delete", keys_of(index.message_id, index.records))
        await self.table.atomically([Operation("change", entry, index.etag), record])

    async def end_unread(self, message_id: str, destination: str, now: datetime, detail: str) -> None:
        """Record the failure of an unreadable message, of which perhaps only the id is known."""
        entry = {**keys_of(message_id), "MessageId": message_id, **_end(RecordKind.FAILED, now, detail)}
        if not await self.table.atomically([Operation("change", entry)]):
            unknown = {"Destination": destination, "Due": text_of(now)}
            await self.table.atomically([Operation("upsert", {**entry, **unknown})])

    async def discard_failed(self, message_id: str, now: datetime) -> None:
        """Record that a failed message was discarded; nothing for one that waits again or is unknown."""
        index = await self.find(message_id)
        if index is None or index.end is not RecordKind.FAILED:
            return
        (failed,) = index.ended()
        number = index.records + 1
        entry = {**keys_of(message_id), "Records": number, **_end(RecordKind.DISCARDED, now)}
        row = _row(failed, failed.destination or "", number)
        await self.table.atomically([Operation("change", entry, index.etag), Operation("create", row)])

    # --- reading ---------------------------------------------------------------------------------------------------

    async def history(self, message_id: str) -> list[Record]:
        keys = keys_of(message_id)
        bounds = f"PartitionKey eq '{keys['PartitionKey']}' and RowKey ge '{keys['RowKey']}' and RowKey lt "
        rows = [row async for row in self.table.query(f"{bounds}'{keys['RowKey']}~'")]
        if not rows or "_" in rows[0]["RowKey"]:
            return []
        index = IndexRow(rows[0])
        return [*index.scheduled(), *map(_record, rows[1:]), *index.ended()]

    async def counts(self) -> Mapping[RecordKind, int]:
        counts: dict[RecordKind, int] = {}
        select = ["RowKey", "Kind", "ScheduledAt", "Ended"]
        async for row in self.table.query(f"PartitionKey ge 'id0' and PartitionKey le 'id{_BUCKETS}'", select):
            scheduled = int(RecordKind.SCHEDULED) if row.get("ScheduledAt") else 0
            for kind in (int(row.get("Kind") or 0), scheduled, int(row.get("Ended") or 0)):
                if kind:
                    counts[RecordKind(kind)] = counts.get(RecordKind(kind), 0) + 1
        return counts

    # --- the account's clock, and how far processes deviate from it ----------------------------------------------
    # The header ``Date`` has whole seconds, too coarse for due times; the timestamp of a row is finer than a
    # microsecond. So each process writes a row beside the records. Source: postdate.ports.stores; ADR 0048.

    async def server_now(self) -> datetime:
        """Return the server's UTC time to the microsecond: the timestamp of a write, read by a second request."""
        await self.table.atomically([Operation("merge", self._clock_keys)])
        row = await self.table.get(self._clock_keys)
        if row is None:  # another process deleted it as a dead one's
            raise StoreUnavailable(f"the row with the time of this process in {self.table.what} is gone")
        return changed_at(row).astimezone(UTC)

    async def report_clock(self, ahead: timedelta) -> None:
        await self.table.atomically([Operation("merge", {**self._clock_keys, _AHEAD: str(ahead // _MICROSECOND)})])

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Deletes the rows of dead processes."""
        now = await self.server_now()
        rows: list[Mapping[str, Any]] = [row async for row in self.table.query(f"PartitionKey eq '{_CLOCK}'")]
        dead = [row for row in rows if changed_at(row) < now - _LIVES_FOR]
        await self.table.each([Operation("delete", {**self._clock_keys, "RowKey": row["RowKey"]}) for row in dead])
        living = [row for row in rows if row not in dead and row.get(_AHEAD) is not None]
        return {row["RowKey"]: int(row[_AHEAD]) * _MICROSECOND for row in living}


def _end(kind: RecordKind, now: datetime, detail: str = "") -> dict[str, Any]:
    return {"Ended": int(kind), "EndedAt": text_of(now), "Detail": cut(detail)}


def _row(record: Record, destination: str, number: int) -> dict[str, Any]:
    return {
        **keys_of(record.message_id, number),
        "MessageId": record.message_id,
        "Kind": int(record.kind),
        "At": text_of(record.at),
        "Due": None if record.due is None else text_of(record.due),
        "Destination": destination,
        "Detail": cut(record.detail),
    }


def _record(row: Row) -> Record:
    due = row.get("Due")
    return Record(
        RecordKind(int(row["Kind"])),
        row["MessageId"],
        instant_of(row["At"]),
        None if due is None else instant_of(due),
        row["Destination"],
        row.get("Detail") or "",
    )


# --- storing ----------------------------------------------------------------------------------------------------------


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

    async def _store_again(self, waiting: DelayedEntity, now: datetime, *, may_come_back: bool) -> DelayedEntity:
        """Store a message whose id is known: its message is missing, or has failed and ``may_come_back``."""
        records, id_ = self._records, waiting.message.message_id
        if (index := await records.find(id_)) is None:  # it left a moment ago, and nothing is kept of it
            (is_entered,) = await records.enter([waiting], now)
        elif index.end is RecordKind.FAILED and may_come_back:
            is_entered = not await self._is_there(index) and await records.come_back(index, waiting, now)
            waiting = DelayedEntity.new(waiting.message, index.records + 2)
        else:  # an id without a message: storing was interrupted, or upstream's poller took it
            is_entered = (
                index.end is None and not await self._is_there(index) and await records.take_over(index, waiting)
            )
        if not (is_entered and await self._put(waiting)):
            raise DuplicateMessage.of(id_)
        return waiting

    async def _put(self, waiting: DelayedEntity) -> bool:
        return await self._table.atomically([Operation("create", waiting.entity())])

    async def find(self, message_id: str) -> tuple[IndexRow, list[DelayedEntity]] | None:
        """Return the copies of a waiting message, the latest last, and its id's row; ``None`` when it does not wait."""
        index = await self._records.find(message_id)
        while index is not None:
            if copies := await self._copies(index):
                return index, copies
            if index.end is not None:
                return None
            read_before, index = index, await self._records.find(message_id)
            if index is not None and index.etag == read_before.etag:
                return None  # else it has moved since its row was read
        return None

    async def _is_there(self, index: IndexRow) -> bool:
        """Return whether a message waits, or is marked as unreadable."""
        if await self._copies(index):
            return True
        return any([await self._pages.is_unreadable(row) for row in index.places])

    async def _copies(self, index: IndexRow) -> list[DelayedEntity]:
        """Read the places in their order: a move adds at the latest before it deletes at the former one."""
        copies: list[DelayedEntity] = []
        for row in index.places:
            if (entity := await self._pages.at(row)) is not None:
                with suppress(MessageError):  # marked when it is due
                    copies.append(read_entity(entity))
        return copies
