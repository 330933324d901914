"""Unreadable messages of a store or of the queues: listed, repaired, put back, discarded. Source: ADR 0019."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from typing_extensions import override

from postdate.backends.redis.layout import (
    FIELDS,
    message_parts,
    pairs,
    read_envelope,
    read_instant,
    read_message,
    written,
)
from postdate.backends.redis.server import RedisServer
from postdate.errors import DuplicateMessage, InvalidMessage, MessageNotFound, QueueNotFound
from postdate.messages import encode_headers
from postdate.ports import Mending, Quarantine, Quarantined

_NAMES: Final = {b"i": "message_id", **FIELDS, b"Q": "queue"}
_OF_THE_QUARANTINE: Final = frozenset({b"reason", b"at"})
_REFUSED: Final = 2
"""Answer of the scripts that put back; 0: there is no such number."""

Fields = dict[bytes, bytes]


class _SetAside(Quarantine):
    _server: RedisServer

    @property
    @abstractmethod
    def place(self) -> str:
        """Prefix of the keys."""

    @override
    async def quarantined(self, limit: int) -> Sequence[Quarantined]:
        rows = await self._server.run("shown_aside", self.place, limit)
        return [_shown(int(number), pairs(fields)) for number, fields in rows]

    @override
    async def quarantined_count(self) -> int:
        return await self._server.command("ZCARD", f"{self.place}:xs")

    async def _fields(self, number: int) -> Fields:
        if not (fields := pairs(await self._server.command("HGETALL", f"{self.place}:x:{number}"))):
            raise self._missing(number)
        return fields

    def _missing(self, number: int) -> MessageNotFound:
        return MessageNotFound(f"nothing with the number {number} is set aside in {self._server.login.place}")


class StoreQuarantine(_SetAside):
    @override
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        fields = _with(await self._fields(number), mending)
        if b"i" not in fields:
            raise InvalidMessage("its id is gone, so it cannot be put back; store it anew, and discard this")
        message = read_message(fields[b"i"], [fields.get(name) for name in FIELDS])
        message = replace(message)  # made anew, it is checked
        call = (self.place, written(now), number)
        done = await self._server.run("put_back", *call, *message_parts(message), message.number_of_failures)
        if not done:
            raise self._missing(number)
        if done == _REFUSED:
            raise DuplicateMessage.of_set_aside(message.message_id)

    @override
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        if not await self._server.run("discard", f"s{self.place}", written(now), number):
            raise self._missing(number)


class QueueQuarantine(_SetAside):
    """The quarantine of all queues; a message that is put back goes to the end of its queue."""

    @property
    @override
    def place(self) -> str:
        return f"{self._server.login.tag}:q"

    @override
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        fields = _with(await self._fields(number), mending)
        queue = fields.get(b"Q", b"").decode(errors="replace")
        found, _ = read_envelope(queue, [fields.get(name) for name in (b"i", b"h", b"b", b"x", b"d", b"f")])
        replace(found)  # which checks it
        call = (number, fields[b"h"], fields[b"b"], fields.get(b"d", b""))
        done = await self._server.run("put_back_queued", *call)
        if not done:
            raise self._missing(number)
        if done == _REFUSED:
            raise QueueNotFound(f"the queue {queue!r} of what is set aside as number {number} is gone")

    @override
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        if not await self._server.run("discard", "q", written(now), number):
            raise self._missing(number)


def _with(fields: Fields, mending: Mending) -> Fields:
    """Return the fields after the repair."""
    mended = dict(fields)
    if mending.headers is not None:
        mended[b"h"] = encode_headers(mending.headers).encode()
    if mending.body is not None:
        mended[b"b"] = mending.body
    if mending.destination is not None:
        mended[b"q"] = mending.destination.encode()
    if mending.due is not None:
        mended[b"d"] = written(mending.due).encode()
    return mended


def _shown(number: int, fields: Fields) -> Quarantined:
    raw = {_NAMES.get(name, name.decode()): value for name, value in fields.items() if name not in _OF_THE_QUARANTINE}
    return Quarantined(
        number,
        fields.get(b"Q", b"").decode(errors="replace"),
        fields.get(b"i", b"").decode(errors="replace"),
        fields.get(b"reason", b"").decode(errors="replace"),
        read_instant(fields.get(b"at"), "the time of setting aside"),
        raw,
    )
