"""An operator's questions about a store: statistics, lists, histories."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.redis.layout import instant_of, read_message, read_record, written
from postdate.backends.redis.server import RedisServer
from postdate.errors import MessageError
from postdate.messages import DelayedMessage
from postdate.ports import AdministrableStore, MessageFilter, Record, RecordKind, StoreStatistics

_PAGE: Final = 500

log = logging.getLogger("postdate.redis")


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """A waiting message; ``member``: its entry in ``:free``, which begins with the instant of its next attempt."""

    message: DelayedMessage
    member: bytes
    is_held: bool


class Questions(AdministrableStore):
    _server: RedisServer

    @property
    @abstractmethod
    def place(self) -> str:
        """Prefix of the store's keys."""

    @override
    async def statistics(self, now: datetime) -> StoreStatistics:
        found = await self._server.run("statistics", self.place, written(now))
        pending, due, free, failing, aside, first = found
        claimed = pending - free
        return StoreStatistics(
            pending=pending,
            overdue=max(due - claimed, 0),
            claimed=claimed,
            failing=failing,
            next_due=instant_of(first) if first else None,
            quarantined=aside,
        )

    @override
    async def record_counts(self) -> Mapping[RecordKind, int]:
        reply: list[bytes] = await self._server.command("HGETALL", f"{self.place}:counts")
        return {RecordKind(int(kind)): int(count) for kind, count in zip(reply[::2], reply[1::2], strict=True)}

    @override
    async def list_pending(self, where: MessageFilter, limit: int) -> Sequence[DelayedMessage]:
        found: list[DelayedMessage] = []
        async for row in self.rows(where):
            if len(found) >= limit:
                break
            if where.matches(row.message):
                found.append(row.message)
        return found

    async def rows(self, where: MessageFilter) -> AsyncGenerator[WaitingMessage]:
        """Yield readable messages by due time, page by page; more than ``where`` asks for, never fewer."""
        first = "-" if where.due_from is None else f"[{written(where.due_from)}"
        last = "+" if where.due_to is None else f"({written(where.due_to)}"
        begin: bytes | str = first
        while True:
            call = (self.place, begin, last, _PAGE, where.destination or "")
            seen, page = await self._server.run("page", *call)
            for message_id, *fields in page:
                row = _row(message_id, fields)
                if row is not None:
                    yield row
            if not seen:
                return
            begin = b"(" + seen

    async def row(self, message_id: str) -> WaitingMessage | None:
        """Return a waiting message; ``None`` when it does not wait or cannot be read."""
        fields: list[Any] = await self._server.run("row", self.place, message_id)
        return _row(message_id.encode(), fields)

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        found = await self.row(message_id)
        return None if found is None else found.message

    @override
    async def history(self, message_id: str) -> Sequence[Record]:
        lines: list[bytes] = await self._server.command("LRANGE", f"{self.place}:r:{message_id}", 0, -1)
        return [read_record(message_id, line) for line in lines]


def _row(message_id: bytes, fields: Sequence[Any]) -> WaitingMessage | None:
    member = fields[6]
    if member is None:
        return None
    try:
        return WaitingMessage(read_message(message_id, fields), member, fields[7] is not None)
    except MessageError as error:
        log.debug("message %r cannot be read, and is set aside when it is due: %s", message_id, error)
        return None
