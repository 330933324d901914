"""Unreadable entities, kept with all columns in a partition of their own, which no query for due messages reads.

They stay in their table and keep their row keys, so marking twice is idempotent. They are copied first and deleted
then, because no transaction spans two partitions. No entity is ever lost, and after an interruption the step is
repeated.

Source: :class:`postdate.ports.UnreadableRows`; ADR 0013, 0043.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from postdate.backends.azure.groups import Operation, Table
from postdate.backends.azure.layout import UNREADABLE, changed_at, shorten_note
from postdate.backends.azure.pages import Entity
from postdate.backends.azure.records import Records
from postdate.errors import InvalidMessage, MessageError, MessageNotFound, PostdateError
from postdate.messages import MESSAGE_ID_LIMIT, check_text
from postdate.ports import UnreadableRow
from postdate.ports.observation import UNREADABLE as UNREADABLE_DETAIL

_FORMER_PARTITION: Final = "malformed"
"""The partition of the records table in which earlier versions kept them."""

_REASON: Final = "Reason"
_MARK_COLUMNS: Final = frozenset({"PartitionKey", "Timestamp", _REASON})
_NUMBER_BYTES: Final = 5  # of the hash that is an entity's number
_LONGEST_LOGGED: Final = 500

log = logging.getLogger("postdate.stores.azure_table")


def number_of(row: str) -> int:
    """Return the operator's number of an entity, a hash of its row key."""
    return int.from_bytes(hashlib.sha256(row.encode()).digest()[:_NUMBER_BYTES], "big")


class UnreadableEntities:
    """The unreadable entities of one table."""

    def __init__(self, table: Table, records: Records) -> None:
        self._table, self._records = table, records

    async def mark(self, entity: Entity, error: MessageError, now: datetime) -> None:
        """Move an entity into the partition of unreadable ones, and record it as failed, if its id can be read.

        An entity that the table refuses there stays in its place, and is logged.
        """
        row, reason = entity["RowKey"], shorten_note(str(error))
        try:
            await self._store_copy(entity, reason)
            if message_id := _id_of(entity):
                destination = entity.get("Destination")
                destination_text = destination if isinstance(destination, str) else ""
                await self._records.record_unreadable(message_id, destination_text, now, f"{UNREADABLE_DETAIL}{reason}")
            await self._table.apply_atomically(
                [Operation("delete", {"PartitionKey": entity["PartitionKey"], "RowKey": row})]
            )
        except PostdateError as failure:  # Also an error about the content: raising it would stop dispatching for ever.
            if failure.transient:
                raise
            log.error(
                "entity %s of %s is no message, and cannot be marked so: %s", row, self._table.description, failure
            )
            return
        text = "cannot be read, and marked so: entity %s of %s (%s); `postdate messages list --unreadable` lists it"
        log.error(text, row, self._table.description, reason[:_LONGEST_LOGGED])

    async def _store_copy(self, entity: Entity, reason: str) -> None:
        copy = {name: value for name, value in entity.items() if name not in _MARK_COLUMNS}
        await self._table.apply_atomically([Operation("upsert", {**copy, "PartitionKey": UNREADABLE, _REASON: reason})])

    async def migrate_former_rows(self) -> None:
        """Bring back entities that earlier versions kept in the records table. Until 0.2.0: ADR 46."""
        async for entity in self._records.table.query(f"PartitionKey eq '{_FORMER_PARTITION}'"):
            await self._store_copy(entity, entity[_REASON])
            keys = {"PartitionKey": _FORMER_PARTITION, "RowKey": entity["RowKey"]}
            await self._records.table.apply_atomically([Operation("delete", keys)])

    async def list(self, limit: int) -> Sequence[UnreadableRow]:
        rows = [row async for row in self._table.query(f"PartitionKey eq '{UNREADABLE}'")]
        return [_unreadable_row(row) for row in sorted(rows, key=changed_at)[:limit]]

    async def count(self) -> int:
        return len([row async for row in self._table.query(f"PartitionKey eq '{UNREADABLE}'", ["RowKey"])])

    async def discard(self, number: int, now: datetime) -> None:
        entity = await self._find(number)
        if message_id := _id_of(entity):
            await self._records.record_discard(message_id, now)
        keys = {"PartitionKey": UNREADABLE, "RowKey": entity["RowKey"]}
        await self._table.apply_atomically([Operation("delete", keys)])

    async def _find(self, number: int) -> Entity:
        async for row in self._table.query(f"PartitionKey eq '{UNREADABLE}'"):
            if number_of(row["RowKey"]) == number:
                return row
        raise MessageNotFound(f"no unreadable entity of {self._table.description} has the number {number}")


def _id_of(entity: Entity) -> str:
    """Return the message id, or an empty text when it cannot be read."""
    message_id: object = entity.get("MessageId")
    if not isinstance(message_id, str):
        return ""
    try:
        check_text(message_id, "message id", max(MESSAGE_ID_LIMIT, len(message_id)))
    except InvalidMessage:
        return ""
    return message_id


def _unreadable_row(row: Entity) -> UnreadableRow:
    raw = {name: _bytes_of(value) for name, value in row.items() if name not in _MARK_COLUMNS}
    key: str = row["RowKey"]
    return UnreadableRow(number_of(key), "", _id_of(row), row[_REASON], changed_at(row), raw)


def _bytes_of(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
