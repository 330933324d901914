"""Unreadable messages of a store or of the queues: list and discard them. Source: ADR 0043."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from typing_extensions import override

from postdate.backends.redis.layout import FIELDS, format_instant, pairs, read_instant
from postdate.backends.redis.server import RedisServer
from postdate.errors import MessageNotFound
from postdate.ports import UnreadableRow, UnreadableRows

_NAMES: Final = {b"i": "message_id", **FIELDS, b"Q": "queue"}
_MARK_FIELDS: Final = frozenset({b"reason", b"at"})


class UnreadableHashes(UnreadableRows):
    """The unreadable messages of one store, or of all queues of a prefix."""

    _server: RedisServer

    @property
    @abstractmethod
    def _unreadable_scope(self) -> str:
        """``s`` and the prefix of a store's keys, or ``q``."""

    @override
    async def list_unreadable(self, limit: int) -> Sequence[UnreadableRow]:
        rows = await self._server.run("list_unreadable", self._unreadable_scope, limit)
        return [_unreadable_row(int(number), pairs(fields)) for number, fields in rows]

    @override
    async def count_unreadable(self) -> int:
        scope = self._unreadable_scope
        keys = f"{self._server.login.tag}:q" if scope == "q" else scope.removeprefix("s")
        return await self._server.execute_command("ZCARD", f"{keys}:xs")

    @override
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        if not await self._server.run("discard_unreadable", self._unreadable_scope, format_instant(now), number):
            raise MessageNotFound(f"no unreadable message in {self._server.login.description} has the number {number}")

    async def _migrate_unreadable(self) -> None:
        """Bring back messages that earlier versions had moved to other keys. Until 0.2.0: ADR 46."""
        await self._server.run("bring_back_unreadable", self._unreadable_scope)


def _unreadable_row(number: int, fields: Mapping[bytes, bytes]) -> UnreadableRow:
    raw = {_NAMES.get(name, name.decode()): value for name, value in fields.items() if name not in _MARK_FIELDS}
    return UnreadableRow(
        number,
        fields.get(b"Q", b"").decode(errors="replace"),
        fields.get(b"i", b"").decode(errors="replace"),
        fields.get(b"reason", b"").decode(errors="replace"),
        read_instant(fields.get(b"at"), "the time of marking"),
        raw,
    )
