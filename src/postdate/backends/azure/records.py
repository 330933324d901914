"""Known ids and their records, in a table beside that of the messages; storing each message once; the account's clock.

An id has one row: how the message was scheduled, where it is, and its outcome. Rarer records are rows behind it. So a
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

from postdate.backends.azure import layout as azure_layout
from postdate.backends.azure.groups import Operation, OperationBatcher, Table
from postdate.backends.azure.pages import Pages
from postdate.errors import DuplicateMessage, MessageError, StoreUnavailable
from postdate.messages import DelayedMessage
from postdate.ports import Record, RecordKind

_BUCKETS: Final = 4
"""The number of partitions of the ids. Azure handles some 2,000 rows a second in each. It is part of the layout."""

_CLOCK: Final = "clock"
_AHEAD: Final = "AheadMicroseconds"
_MICROSECOND: Final = timedelta(microseconds=1)
_LIVES_FOR: Final = timedelta(minutes=2)
"""The age at which a row is that of a dead process; a living process checks its clock every half minute."""

_NOT_IN_KEYS: Final = re.compile(r"[/\\#?\x00-\x1f\x7f-\x9f']")

Row = Mapping[str, Any]


def keys_of(message_id: str, number: int | None = None) -> dict[str, str]:
    """Return the keys of an id's row, or of its record ``number``."""
    digits = azure_layout.id_hash(message_id)
    bucket = int(digits[0], 16) % _BUCKETS
    return {"PartitionKey": f"id{bucket}", "RowKey": digits if number is None else f"{digits}_{number:08}"}


class IndexRow:
    """The row of an id."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.message_id: str = row["MessageId"]
        self.etag = azure_layout.etag_of(row)
        self.records = int(row.get("Records") or 0)
        end_number = int(row.get("Ended") or 0)
        self.end_kind = RecordKind(end_number) if end_number else None

    @property
    def row_keys(self) -> list[str]:
        """The row keys at which the message may be, the latest last.

        It is at one of them, unless it has left the store.

        It is at both while it moves, and after a move that was interrupted.
        """
        candidates = (self._row.get("Former"), self._row.get("Location"))
        # Both keys are equal if it was changed in place.
        return list(dict.fromkeys(row_key for row_key in candidates if row_key))

    def scheduling_records(self) -> list[Record]:
        """Return the record of scheduling; empty for messages of upstream or of older versions."""
        at = self._row.get("ScheduledAt")
        return [] if at is None else [self._record(RecordKind.SCHEDULED, at, self._row["ScheduledDue"], "")]

    def end_records(self) -> list[Record]:
        if self.end_kind is None:
            return []
        return [self._record(self.end_kind, self._row["EndedAt"], self._row["Due"], self._row.get("Detail") or "")]

    def _record(self, kind: RecordKind, at: str, due: str, detail: str) -> Record:
        return Record(
            kind,
            self.message_id,
            azure_layout.instant_of(at),
            azure_layout.instant_of(due),
            self._row["Destination"],
            detail,
        )


class Records:
    """The records of one store's messages."""

    def __init__(self, table: Table, *, keeps_retries: bool) -> None:
        self.table, self.keeps_retries = table, keeps_retries
        name = _NOT_IN_KEYS.sub("_", f"{platform.node()}:{os.getpid()}")
        self._clock_keys = {"PartitionKey": _CLOCK, "RowKey": name}
        self.rounds = OperationBatcher(table)
        """The batcher for the outcomes of messages."""

    # --- adding ids ------------------------------------------------------------------------------------------------

    async def add_ids(self, messages: Sequence[azure_layout.DelayedEntity], now: datetime) -> list[bool]:
        """Add the ids that are new; return for each whether it was new."""
        return await self.table.apply_each([Operation("create", self._new_id_row(each, now)) for each in messages])

    def _new_id_row(self, entity: azure_layout.DelayedEntity, now: datetime) -> dict[str, Any]:
        scheduled = {"ScheduledAt": azure_layout.text_of(now), "ScheduledDue": azure_layout.text_of(entity.message.due)}
        return {**self._base_columns(entity), "Location": entity.row, **scheduled}

    @staticmethod
    def _base_columns(entity: azure_layout.DelayedEntity) -> dict[str, Any]:
        message = entity.message
        return {
            **keys_of(message.message_id),
            "MessageId": message.message_id,
            "Destination": message.destination,
            "Due": azure_layout.text_of(message.due),
        }

    async def find(self, message_id: str) -> IndexRow | None:
        row = await self.table.get(keys_of(message_id))
        return None if row is None else IndexRow(row)

    async def has_ended(self, message_id: str) -> bool:
        index = await self.find(message_id)
        return index is not None and index.end_kind is not None

    async def update_location(self, index: IndexRow, entity: azure_layout.DelayedEntity) -> bool:
        """Point a known id at a message whose own message was never stored, or left by upstream.

        Upstream keeps no records of the messages that it dispatches.
        """
        entry = {**self._base_columns(entity), "Location": entity.row, "Former": ""}
        return await self.table.apply_atomically([Operation("change", entry, index.etag)])

    async def reschedule_failed(self, index: IndexRow, entity: azure_layout.DelayedEntity, now: datetime) -> bool:
        """Point an id whose message had failed at its new row key; return ``False`` when another process was faster."""
        message, detail = entity.message, "came back from the error queue"
        record = Record(RecordKind.RESCHEDULED, message.message_id, now, message.due, None, detail)
        return await self.append_record(index, next(reversed(index.row_keys), ""), entity, record)

    async def append_record(
        self, index: IndexRow, former_row_key: str, entity: azure_layout.DelayedEntity, record: Record
    ) -> bool:
        """Append a record after the existing ones, including the outcome, and set the message's new and former row key.

        Returns ``False``, with nothing changed, when the row had changed.
        """
        message = entity.message
        new_records = [*index.end_records(), record]
        operations = [
            Operation("create", _record_columns(each, message.destination, index.records + number))
            for number, each in enumerate(new_records, 1)
        ]
        entry = {
            **self._base_columns(entity),
            "Location": entity.row,
            "Former": former_row_key,
            "Records": index.records + len(new_records),
            "Ended": 0,
        }
        return await self.table.apply_atomically([Operation("change", entry, index.etag), *operations])

    # --- records of retries, outcomes and changes ------------------------------------------------------------------

    async def record_retry(
        self, old: azure_layout.DelayedEntity, new: azure_layout.DelayedEntity, now: datetime, reason: str
    ) -> None:
        """Record a failed attempt, and the message's row key for the next one."""
        message = old.message
        entry = {**self._base_columns(new), "Location": new.row, "Former": old.row, "Ended": 0}
        operations = [Operation("merge", entry)]
        if self.keeps_retries:
            entry["Records"] = new.records
            record = Record(RecordKind.RETRIED, message.message_id, now, message.due, None, reason)
            operations.append(Operation("upsert", _record_columns(record, message.destination, new.records)))
        await self.table.apply_atomically(operations)

    async def record_ends(
        self, messages: Sequence[azure_layout.DelayedEntity], kind: RecordKind, now: datetime, detail: str = ""
    ) -> None:
        """Record the outcomes of messages.

        It is called before they are deleted, so that none is ever gone without a record.
        """
        end_columns = _end_columns(kind, now, detail)
        await self.rounds.apply_each(
            [Operation("merge", {**self._base_columns(each), **end_columns}) for each in messages]
        )

    async def undo_end(self, index: IndexRow) -> None:
        """Undo the record of an outcome if the deletion failed, unless the row has changed since it was read."""
        await self.table.apply_atomically([Operation("change", {**keys_of(index.message_id), "Ended": 0}, index.etag)])

    async def undo_reschedule(self, old: azure_layout.DelayedEntity, new: azure_layout.DelayedEntity) -> None:
        """Undo the record and the row key of a rescheduling that did not take place."""
        index = await self.find(old.message.message_id)
        if index is None or index.row_keys[-1:] != [new.row]:
            return
        entry = {**self._base_columns(old), "Location": old.row, "Former": "", "Records": index.records - 1}
        record = Operation("delete", keys_of(index.message_id, index.records))
        await self.table.apply_atomically([Operation("change", entry, index.etag), record])

    async def record_unreadable(self, message_id: str, destination: str, now: datetime, detail: str) -> None:
        """Record the failure of an unreadable message, of which perhaps only the id is known."""
        entry = {**keys_of(message_id), "MessageId": message_id, **_end_columns(RecordKind.FAILED, now, detail)}
        if not await self.table.apply_atomically([Operation("change", entry)]):
            missing_columns = {"Destination": destination, "Due": azure_layout.text_of(now)}
            await self.table.apply_atomically([Operation("upsert", {**entry, **missing_columns})])

    async def record_discard(self, message_id: str, now: datetime) -> None:
        """Record that a failed message was discarded; nothing is recorded for a pending or unknown message."""
        index = await self.find(message_id)
        if index is None or index.end_kind is not RecordKind.FAILED:
            return
        (failure_record,) = index.end_records()
        number = index.records + 1
        entry = {**keys_of(message_id), "Records": number, **_end_columns(RecordKind.DISCARDED, now)}
        row = _record_columns(failure_record, failure_record.destination or "", number)
        await self.table.apply_atomically([Operation("change", entry, index.etag), Operation("create", row)])

    # --- reading ---------------------------------------------------------------------------------------------------

    async def history(self, message_id: str) -> list[Record]:
        keys = keys_of(message_id)
        bounds = f"PartitionKey eq '{keys['PartitionKey']}' and RowKey ge '{keys['RowKey']}' and RowKey lt "
        rows = [row async for row in self.table.query(f"{bounds}'{keys['RowKey']}~'")]
        if not rows or "_" in rows[0]["RowKey"]:
            return []
        index = IndexRow(rows[0])
        return [*index.scheduling_records(), *map(_record_of, rows[1:]), *index.end_records()]

    async def record_counts(self) -> Mapping[RecordKind, int]:
        counts: dict[RecordKind, int] = {}
        select = ["RowKey", "Kind", "ScheduledAt", "Ended"]
        async for row in self.table.query(f"PartitionKey ge 'id0' and PartitionKey le 'id{_BUCKETS}'", select):
            scheduled = int(RecordKind.SCHEDULED) if row.get("ScheduledAt") else 0
            for kind in (int(row.get("Kind") or 0), scheduled, int(row.get("Ended") or 0)):
                if kind:
                    counts[RecordKind(kind)] = counts.get(RecordKind(kind), 0) + 1
        return counts

    # --- the account's clock, and how far processes deviate from it ----------------------------------------------
    # The header ``Date`` has whole seconds, too coarse for due times. The timestamp of a row is finer than a
    # microsecond. So each process writes a row beside the records. Source: postdate.ports.stores; ADR 0048.

    async def server_now(self) -> datetime:
        """Return the server's UTC time to the microsecond: the timestamp of a write, read by a second request."""
        await self.table.apply_atomically([Operation("merge", self._clock_keys)])
        row = await self.table.get(self._clock_keys)
        if row is None:  # Another process took this process for dead and deleted the row.
            raise StoreUnavailable(f"the row with the time of this process in {self.table.description} is gone")
        return azure_layout.changed_at(row).astimezone(UTC)

    async def report_clock(self, ahead: timedelta) -> None:
        await self.table.apply_atomically(
            [Operation("merge", {**self._clock_keys, _AHEAD: str(ahead // _MICROSECOND)})]
        )

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Return how far each process's clock is ahead; delete the rows of dead processes."""
        now = await self.server_now()
        rows: list[Mapping[str, Any]] = [row async for row in self.table.query(f"PartitionKey eq '{_CLOCK}'")]
        dead_rows = [row for row in rows if azure_layout.changed_at(row) < now - _LIVES_FOR]
        await self.table.apply_each(
            [Operation("delete", {**self._clock_keys, "RowKey": row["RowKey"]}) for row in dead_rows]
        )
        living_rows = [row for row in rows if row not in dead_rows and row.get(_AHEAD) is not None]
        return {row["RowKey"]: int(row[_AHEAD]) * _MICROSECOND for row in living_rows}


def _end_columns(kind: RecordKind, now: datetime, detail: str = "") -> dict[str, Any]:
    return {"Ended": int(kind), "EndedAt": azure_layout.text_of(now), "Detail": azure_layout.shorten_note(detail)}


def _record_columns(record: Record, destination: str, number: int) -> dict[str, Any]:
    return {
        **keys_of(record.message_id, number),
        "MessageId": record.message_id,
        "Kind": int(record.kind),
        "At": azure_layout.text_of(record.at),
        "Due": None if record.due is None else azure_layout.text_of(record.due),
        "Destination": destination,
        "Detail": azure_layout.shorten_note(record.detail),
    }


def _record_of(row: Row) -> Record:
    due = row.get("Due")
    return Record(
        RecordKind(int(row["Kind"])),
        row["MessageId"],
        azure_layout.instant_of(row["At"]),
        None if due is None else azure_layout.instant_of(due),
        row["Destination"],
        row.get("Detail") or "",
    )


# --- storing ----------------------------------------------------------------------------------------------------------


class MessageEntities:
    """Stores messages in a table, and finds pending messages by id."""

    def __init__(self, table: Table, records: Records, pages: Pages) -> None:
        self._table, self._records, self._pages = table, records, pages

    async def store(self, message: DelayedMessage, now: datetime) -> azure_layout.DelayedEntity:
        """Store a message and return its entity.

        Raises:
            DuplicateMessage: it was stored before, and has not come back from the error queue.
            StoreUnavailable: it may have been stored; a second call finds out.
        """
        entity = azure_layout.DelayedEntity.new(message)
        (is_new,) = await self._records.add_ids([entity], now)
        if not is_new:
            return await self._store_repeated_id(entity, now, may_replace_failed=True)
        if not await self._put_entity(entity):
            raise DuplicateMessage.of(message.message_id)  # another process found the id without its message
        return entity

    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> list[azure_layout.DelayedEntity]:
        """Store the new messages, the first of each id; return their entities."""
        unique = {message.message_id: message for message in reversed(messages)}
        # The first of each id, in order.
        entities = [azure_layout.DelayedEntity.new(message) for message in reversed(unique.values())]
        are_new = await self._records.add_ids(entities, now)
        new_entities = [each for each, is_new in zip(entities, are_new, strict=True) if is_new]
        create_outcomes = await self._table.apply_each([Operation("create", each.entity()) for each in new_entities])
        stored_entities = [each for each, is_put in zip(new_entities, create_outcomes, strict=True) if is_put]
        for each in (each for each, is_new in zip(entities, are_new, strict=True) if not is_new):
            try:
                stored_entities.append(await self._store_repeated_id(each, now, may_replace_failed=False))
            except DuplicateMessage:
                continue
        return stored_entities

    async def _store_repeated_id(
        self, entity: azure_layout.DelayedEntity, now: datetime, *, may_replace_failed: bool
    ) -> azure_layout.DelayedEntity:
        """Store a message whose id is known: its message is missing, or has failed and ``may_replace_failed``."""
        records, message_id = self._records, entity.message.message_id
        # It left the store a moment ago, and nothing about it is kept.
        if (index := await records.find(message_id)) is None:
            (is_added,) = await records.add_ids([entity], now)
        elif index.end_kind is RecordKind.FAILED and may_replace_failed:
            is_added = not await self._is_stored(index) and await records.reschedule_failed(index, entity, now)
            entity = azure_layout.DelayedEntity.new(entity.message, index.records + 2)
        else:  # An id without a message: storing was interrupted, or upstream's poller dispatched it.
            is_added = (
                index.end_kind is None
                and not await self._is_stored(index)
                and await records.update_location(index, entity)
            )
        if not (is_added and await self._put_entity(entity)):
            raise DuplicateMessage.of(message_id)
        return entity

    async def _put_entity(self, entity: azure_layout.DelayedEntity) -> bool:
        return await self._table.apply_atomically([Operation("create", entity.entity())])

    async def find(self, message_id: str) -> tuple[IndexRow, list[azure_layout.DelayedEntity]] | None:
        """Return the copies of a pending message, the latest last, and its id's row.

        Returns ``None`` when the message is not pending.
        """
        index = await self._records.find(message_id)
        while index is not None:
            if copies := await self._read_copies(index):
                return index, copies
            if index.end_kind is not None:
                return None
            previous_index, index = index, await self._records.find(message_id)
            if index is not None and index.etag == previous_index.etag:
                return None  # otherwise it has moved since its row was read
        return None

    async def _is_stored(self, index: IndexRow) -> bool:
        """Return whether a message is pending, or marked as unreadable."""
        if await self._read_copies(index):
            return True
        return any([await self._pages.is_unreadable(row) for row in index.row_keys])

    async def _read_copies(self, index: IndexRow) -> list[azure_layout.DelayedEntity]:
        """Read the row keys in their order: a move adds at the latest before it deletes at the former one."""
        copies: list[azure_layout.DelayedEntity] = []
        for row in index.row_keys:
            if (entity := await self._pages.get_entity(row)) is not None:
                with suppress(MessageError):  # It is marked when it is due.
                    copies.append(azure_layout.read_entity(entity))
        return copies
