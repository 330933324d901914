"""Unreadable entities, kept with all columns in a partition of the records table, and put back once repaired.

They keep their row keys, so quarantining twice is idempotent. Both directions copy first and delete then, so that no
entity is ever lost; after an interruption the copy is found and the step repeated.

Source: :mod:`postdate.ports.observation`; ADR 0013, 0019.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.azure.groups import Operation, Table
from postdate.backends.azure.layout import DelayedEntity, changed_at, read_entity, row_key, text_of
from postdate.backends.azure.pages import Entity
from postdate.backends.azure.records import Records, Storing
from postdate.errors import InvalidMessage, MessageError, MessageNotFound, StoreError
from postdate.messages import MESSAGE_ID_LIMIT, check_text, encode_headers
from postdate.ports import Mending, Quarantine, Quarantined

_PARTITION: Final = "malformed"
_REASON: Final = "Reason"
_OF_THE_QUARANTINE: Final = frozenset({"PartitionKey", "Timestamp", _REASON})
_NUMBER_BYTES: Final = 5

log = logging.getLogger("postdate.stores.azure_table")


def number_of(row: str) -> int:
    """Return the operator's number of an entity, a hash of its row key."""
    return int.from_bytes(hashlib.sha256(row.encode()).digest()[:_NUMBER_BYTES], "big")


class TableQuarantine(Quarantine):
    """The quarantine of one table; ``returned`` is called with each message that waits again."""

    def __init__(
        self, table: Table, records: Records, storing: Storing, returned: Callable[[DelayedEntity], None]
    ) -> None:
        self._table, self._records, self._storing, self._returned = table, records, storing, returned

    async def set_aside(self, entity: Entity, error: MessageError, now: datetime) -> None:
        """Move an unreadable entity out of the table; one that the records table refuses stays, and is logged."""
        row = entity["RowKey"]
        try:
            copy = {name: value for name, value in entity.items() if name not in {"PartitionKey", "Timestamp"}}
            copy |= {"PartitionKey": _PARTITION, _REASON: str(error)}
            await self._records.table.atomically([Operation("upsert", copy)])
            if message_id := _id_of(entity):
                destination = entity.get("Destination")
                known = destination if isinstance(destination, str) else ""
                await self._records.end_unread(message_id, known, now, f"unreadable: {error}")
            await self._table.atomically([Operation("delete", {"PartitionKey": entity["PartitionKey"], "RowKey": row})])
        except StoreError as failure:
            if failure.transient:
                raise
            log.error("entity %s of %s is no message, and cannot be set aside: %s", row, self._table.what, failure)
            return
        text = "entity %s of %s cannot be read and was set aside (%s); `postdate errors` shows what is to be done"
        log.error(text, row, self._table.what, error)

    @override
    async def quarantined(self, limit: int) -> list[Quarantined]:
        rows = [row async for row in self._records.table.query(f"PartitionKey eq '{_PARTITION}'")]
        return [_shown(row) for row in sorted(rows, key=changed_at)[:limit]]

    @override
    async def quarantined_count(self) -> int:
        return len([row async for row in self._records.table.query(f"PartitionKey eq '{_PARTITION}'", ["RowKey"])])

    @override
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        """Copies back, then deletes: no transaction spans both tables."""
        entity = await self._find(number)
        stored = await self._storing.store_returned(mended(entity, mending).message, now)
        await self._forget(entity)
        self._returned(stored)

    @override
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        entity = await self._find(number)
        if message_id := _id_of(entity):
            await self._records.discard_failed(message_id, now)
        await self._forget(entity)

    async def _find(self, number: int) -> Entity:
        async for row in self._records.table.query(f"PartitionKey eq '{_PARTITION}'"):
            if number_of(row["RowKey"]) == number:
                return row
        raise MessageNotFound(f"nothing with the number {number} is set aside in {self._table.what}")

    async def _forget(self, entity: Entity) -> None:
        keys = {"PartitionKey": _PARTITION, "RowKey": entity["RowKey"]}
        await self._records.table.atomically([Operation("delete", keys)])


def mended(entity: Entity, mending: Mending) -> DelayedEntity:
    """Return the message of an entity after the repair; raises `MessageError` when it is still unreadable."""
    columns: dict[str, Any] = dict(entity)
    if mending.headers is not None:
        columns["Headers"] = encode_headers(mending.headers)
    if mending.body is not None:
        columns["Body"] = mending.body
    if mending.destination is not None:
        columns["Destination"] = mending.destination
    if mending.due is not None:
        columns |= {"Due": text_of(mending.due), "RowKey": row_key(_id_of(entity), mending.due)}
    return DelayedEntity.new(replace(read_entity(columns).message))  # made anew, it is checked


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


def _shown(row: Entity) -> Quarantined:
    raw = {name: _bytes_of(value) for name, value in row.items() if name not in _OF_THE_QUARANTINE}
    key: str = row["RowKey"]
    return Quarantined(number_of(key), "", _id_of(row), row[_REASON], changed_at(row), raw)


def _bytes_of(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
