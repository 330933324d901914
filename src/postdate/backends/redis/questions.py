"""An operator's questions about a store and queues: statistics, lists, histories, who holds what."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.redis.layout import (
    instant_of,
    pairs,
    read_envelope,
    read_instant,
    read_message,
    read_record,
    written,
)
from postdate.backends.redis.liveness import RedisLiveness
from postdate.backends.redis.server import RedisServer, server_now
from postdate.errors import MessageError, QueueNotFound
from postdate.messages import DelayedMessage, Headers
from postdate.ports import (
    AdministrableStore,
    Delivered,
    MessageFilter,
    Observer,
    PendingPage,
    Process,
    Queued,
    Record,
    RecordKind,
    Standing,
    StoreStatistics,
)
from postdate.ports.administration import no_cursor

_PAGE: Final = 500
_PLACE: Final = re.compile(rb"[0-9]{18}:[0-9]{16}")
"""How members of ``:due`` begin: due time and number of storing, which are the cursor of their message."""

_LIVES_FOR: Final = timedelta(minutes=2)
"""Every half minute each process looks at the clock, and so writes its line."""

_MICROSECOND: Final = timedelta(microseconds=1)

log = logging.getLogger("postdate.redis")


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """A waiting message; ``member``: its entry in ``:free``, which begins with the instant of its next attempt."""

    message: DelayedMessage
    member: bytes
    is_claimed: bool


class Questions(AdministrableStore):
    _server: RedisServer

    @property
    @abstractmethod
    def place(self) -> str:
        """Prefix of the store's keys."""

    @override
    async def statistics(self, now: datetime) -> StoreStatistics:
        pending, due, free, failing, unreadable, first = await self._server.run("statistics", self.place, written(now))
        claimed = pending - free
        return StoreStatistics(
            pending=pending,
            overdue=max(due - claimed, 0),
            claimed=claimed,
            failing=failing,
            next_due=instant_of(first) if first else None,
            unreadable=unreadable,
        )

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        return await self._server.run("due_counts", self.place, *map(written, edges))

    @override
    async def record_counts(self) -> Mapping[RecordKind, int]:
        reply: list[bytes] = await self._server.command("HGETALL", f"{self.place}:counts")
        return {RecordKind(int(kind)): int(count) for kind, count in zip(reply[::2], reply[1::2], strict=True)}

    @override
    async def read_pending(self, where: MessageFilter, limit: int) -> PendingPage:
        messages: list[DelayedMessage] = []
        async with aclosing(self.rows(where, min(limit, _PAGE))) as rows:
            async for row in rows:
                if where.matches(row.message):
                    messages.append(row.message)
                if len(messages) >= limit:
                    break
        return PendingPage.of(messages, limit)

    async def rows(self, where: MessageFilter, first_page: int = _PAGE) -> AsyncGenerator[WaitingMessage]:
        """Yield readable messages by due time, page by page; more than ``where`` asks for, never fewer."""
        begin: bytes | str = "-" if where.due_from is None else f"[{written(where.due_from)}"
        if where.after is not None:
            passed = _behind(where.after)
            begin = max(b"(" + passed, begin.encode(), key=lambda bound: bound[1:])
        last = "+" if where.due_to is None else f"({written(where.due_to)}"
        page_size = first_page
        while True:
            call = (self.place, begin, last, page_size, where.destination or "")
            seen, page = await self._server.run("page", *call)
            for message_id, member, *fields in page:
                row, place = _row(message_id, fields), _PLACE.match(member)
                if row is not None and place is not None:
                    row.message.listed(place[0].decode())
                    yield row
            if not seen:
                return
            begin, page_size = b"(" + seen, _PAGE

    async def row(self, message_id: str) -> WaitingMessage | None:
        """Return a waiting message; ``None`` when it does not wait or cannot be read."""
        fields: list[Any] = await self._server.run("row", self.place, message_id)
        return _row(message_id.encode(), fields)

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        row = await self.row(message_id)
        return None if row is None else row.message

    @override
    async def history(self, message_id: str) -> Sequence[Record]:
        lines: list[bytes] = await self._server.command("LRANGE", f"{self.place}:r:{message_id}", 0, -1)
        return [read_record(message_id, line) for line in lines]

    # --- how far the clocks of the processes under a prefix deviate from the server's (ADR 0048) ------------------

    async def report_clock(self, ahead: timedelta) -> None:
        name = f"{platform.node()}:{os.getpid()}"
        now = written(await server_now(self._server))
        line = f"{now} {ahead // _MICROSECOND}"
        await self._server.run("little", "HSET", f"{self._server.login.tag}:clocks", name, line)

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Deletes the fields of dead processes."""
        key, now = f"{self._server.login.tag}:clocks", await server_now(self._server)
        living: dict[str, timedelta] = {}
        for name, line in pairs(await self._server.command("HGETALL", key)).items():
            at, _, ahead = line.partition(b" ")
            if read_instant(at, "the time of a report") < now - _LIVES_FOR:
                await self._server.command("HDEL", key, name)
            else:
                living[name.decode()] = int(ahead) * _MICROSECOND
        return living


def _behind(cursor: str) -> bytes:
    """Return what sorts behind the member of a cursor, and before all others. Raises `InvalidMessage`."""
    if not (isinstance(cursor, str) and _PLACE.fullmatch(cursor.encode(errors="replace"))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise no_cursor(cursor)
    return cursor.encode() + b":\xff"  # no id begins with that


def _row(message_id: bytes, fields: Sequence[Any]) -> WaitingMessage | None:
    if (member := fields[6]) is None:
        return None
    try:
        return WaitingMessage(read_message(message_id, fields), member, fields[7] is not None)
    except MessageError as error:
        log.debug("message %r cannot be read, and is marked when it is due: %s", message_id, error)
        return None


# --- an operator's view; changes nothing ------------------------------------------------------------------------------


class _HolderObserver(Observer):
    """Knows the processes that hold messages under a prefix."""

    def __init__(self, server: RedisServer, liveness: RedisLiveness) -> None:
        self._server, self._own = server, liveness

    async def _about(self) -> Mapping[str, Mapping[str, Any]]:
        """Return each holder's description of itself, by its name."""
        reply = await self._server.command("HGETALL", f"{self._server.login.tag}:about")
        return {holder.decode(): json.loads(description) for holder, description in pairs(reply).items()}

    @override
    async def processes(self) -> Sequence[Process]:
        by_process, tag = dict[tuple[str, int], Process](), self._server.login.tag
        for holder, description in (await self._about()).items():
            key = host, pid = description["machine"], description["pid"]
            if holder == self._own.holder_now or key == (platform.node(), os.getpid()):
                continue
            started = read_instant(str(description["started"]).encode(), "the start of a process")
            alive: list[Any] = await self._server.command("PUBSUB", "NUMSUB", f"{tag}:alive:{holder}")
            receives = tuple(sorted(description.get("receives", ())))
            process = Process(pid, host, started, alive[1] > 0, bool(description.get("delivers")), receives)
            by_process[key] = process.joined(by_process[key]) if key in by_process else process
        return list(by_process.values())


class RedisStoreObserver(_HolderObserver):
    def __init__(self, server: RedisServer, store: Questions, liveness: RedisLiveness) -> None:
        super().__init__(server, liveness)
        self._store = store

    @override
    async def standing(self, message_id: str) -> Standing | None:
        row = await self._store.row(message_id)
        return None if row is None else await self._stands(row)

    async def _stands(self, row: WaitingMessage) -> Standing:
        if not row.is_claimed:
            return Standing(row.message, instant_of(row.member))
        token: bytes | None = await self._server.command("HGET", f"{self._store.place}:m:{row.message.message_id}", "t")
        holder = (await self._about()).get((token or b"").partition(b":")[0].decode(), {})
        return Standing(row.message, None, holder.get("pid"))

    @override
    async def retries_of(self, message_id: str) -> Sequence[Standing]:
        standings: list[Standing] = []
        async for row in self._store.rows(MessageFilter()):
            message = row.message
            if message.message_id != message_id and message.headers.get(Headers.MESSAGE_ID) == message_id:
                standings.append(await self._stands(row))
        return standings

    @override
    async def last_delivered(self, limit: int) -> Sequence[Delivered]:
        """Return the last one alone: no more is kept, nor when it was due."""
        at: bytes | None = await self._server.command("GET", f"{self._store.place}:last")
        return [] if at is None else [Delivered(instant_of(at), None)][:limit]

    @override
    async def next_destinations(self, messages: int) -> Mapping[str, int]:
        counts = Counter[str]()
        async for row in self._store.rows(MessageFilter()):
            if counts.total() == messages:
                break
            counts[row.message.destination] += 1
        return counts


class RedisQueueObserver(_HolderObserver):
    async def _names(self) -> list[str]:
        names: list[bytes] = await self._server.command("SMEMBERS", f"{self._server.login.tag}:queues")
        return sorted(name.decode() for name in names)

    @override
    async def queue_lengths(self) -> Mapping[str, int]:
        names = await self._names()
        lengths = dict(zip(names, await self._server.run("lengths", *names), strict=True)) if names else {}
        for queue, _, _ in await self._claimed():
            if queue in lengths:
                lengths[queue] += 1
        return lengths

    async def _claimed(self) -> list[tuple[str, int, Queued | None]]:
        """Return queue, number and message of each held message; ``None`` for one that cannot be read."""
        about = await self._about()
        claimed: list[tuple[str, int, Queued | None]] = []
        for holder, number, queue, *fields in await self._server.run("held"):
            name = queue.decode()
            pid = about.get(holder.decode(), {}).get("pid")
            claimed.append((name, int(number), _queued(name, fields, pid, int(number))))
        return claimed

    @override
    async def browse(self, queue: str, limit: int, after: int = 0) -> Sequence[Queued]:
        await self._check_exists(queue)
        messages = {
            number: each
            for name, number, each in await self._claimed()
            if name == queue and each is not None and number > after
        }
        free = 0
        async for number, each in self._free(queue, after):
            if free == limit:
                break
            messages[number] = each
            free += 1
        return [each for _, each in sorted(messages.items())][:limit]

    @override
    async def last_number(self, queue: str) -> int:
        await self._check_exists(queue)
        claimed = [number for name, number, _ in await self._claimed() if name == queue]
        free: list[bytes] = await self._server.command(
            "ZRANGE", f"{self._server.login.tag}:q:{queue}:ready", "0", "0", "REV"
        )
        return max([0, *claimed, *map(int, free)])

    async def _check_exists(self, queue: str) -> None:
        if queue not in await self._names():
            raise QueueNotFound.of(queue)

    async def _free(self, queue: str, after: int = 0) -> AsyncGenerator[tuple[int, Queued]]:
        last = after
        while True:
            rows = await self._server.run("look", queue, last, _PAGE)
            for number, *fields in rows:
                last = int(number)
                if (message := _queued(queue, fields, None, last)) is not None:
                    yield last, message
            if len(rows) < _PAGE:
                return

    @override
    async def find_in_queues(self, message_id: str) -> Sequence[Queued]:
        messages = [each for _, _, each in await self._claimed() if each is not None and _is(each, message_id)]
        for queue in await self._names():
            messages += [each async for _, each in self._free(queue) if _is(each, message_id)]
        return messages


def _is(queued: Queued, message_id: str) -> bool:
    envelope = queued.envelope
    return message_id in {envelope.message_id, envelope.headers.get(Headers.MESSAGE_ID)}


def _queued(queue: str, fields: Sequence[Any], pid: int | None, number: int) -> Queued | None:
    """Return a queued message; ``None`` when it cannot be read: it is marked when it is received."""
    try:
        envelope, failures, unanswered = read_envelope(queue, fields)
    except MessageError:
        return None
    return Queued(queue, envelope, failures + unanswered, pid, number)
