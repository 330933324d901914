"""An operator's questions about a store and queues: statistics, lists, histories, holders."""

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

from postdate import ports
from postdate.backends.redis import layout as redis_layout
from postdate.backends.redis.liveness import RedisLiveness
from postdate.backends.redis.server import RedisServer, server_now
from postdate.errors import MessageError, QueueNotFound
from postdate.messages import DelayedMessage, Headers
from postdate.ports.administration import invalid_cursor_error

_PAGE: Final = 500  # messages read by one script, as other clients wait for a script
_CURSOR: Final = re.compile(rb"[0-9]{18}:[0-9]{16}")
"""The beginning of a member of ``:due``: due time and number of storing, which are the message's cursor."""

_LIVES_FOR: Final = timedelta(minutes=2)
"""The age at which a line is that of a dead process; a living process checks its clock every half minute."""

_MICROSECOND: Final = timedelta(microseconds=1)

log = logging.getLogger("postdate.redis")


@dataclass(frozen=True, slots=True)
class ListedMessage:
    """A pending message. ``member`` is its entry in ``:free``, which begins with the instant of its next attempt."""

    message: DelayedMessage
    member: bytes
    is_claimed: bool


class Questions(ports.AdministrableStore):
    _server: RedisServer

    @property
    @abstractmethod
    def key_prefix(self) -> str:
        """Prefix of the store's keys."""

    @override
    async def statistics(self, now: datetime) -> ports.StoreStatistics:
        pending, due, free, failing, unreadable, first = await self._server.run(
            "statistics", self.key_prefix, redis_layout.format_instant(now)
        )
        claimed = pending - free
        return ports.StoreStatistics(
            pending=pending,
            overdue=max(due - claimed, 0),
            claimed=claimed,
            failing=failing,
            next_due=redis_layout.instant_of(first) if first else None,
            unreadable=unreadable,
        )

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        return await self._server.run("due_counts", self.key_prefix, *map(redis_layout.format_instant, edges))

    @override
    async def record_counts(self) -> Mapping[ports.RecordKind, int]:
        reply: list[bytes] = await self._server.execute_command("HGETALL", f"{self.key_prefix}:counts")
        return {ports.RecordKind(int(kind)): int(count) for kind, count in zip(reply[::2], reply[1::2], strict=True)}

    @override
    async def read_pending(self, message_filter: ports.MessageFilter, limit: int) -> ports.PendingPage:
        messages: list[DelayedMessage] = []
        async with aclosing(self.list_rows(message_filter, min(limit, _PAGE))) as rows:
            async for row in rows:
                if message_filter.matches(row.message):
                    messages.append(row.message)
                if len(messages) >= limit:
                    break
        return ports.PendingPage.of(messages, limit)

    async def list_rows(
        self, message_filter: ports.MessageFilter, first_page: int = _PAGE
    ) -> AsyncGenerator[ListedMessage]:
        """Yield readable messages by due time, page by page.

        They are all messages that match ``message_filter``, and maybe others.
        """
        lower_bound: bytes | str = (
            "-" if message_filter.due_from is None else f"[{redis_layout.format_instant(message_filter.due_from)}"
        )
        if message_filter.after is not None:
            cursor_bound = _bound_after(message_filter.after)
            lower_bound = max(b"(" + cursor_bound, lower_bound.encode(), key=lambda bound: bound[1:])
        upper_bound = "+" if message_filter.due_to is None else f"({redis_layout.format_instant(message_filter.due_to)}"
        page_size = first_page
        while True:
            call = (self.key_prefix, lower_bound, upper_bound, page_size, message_filter.destination or "")
            last_member, page = await self._server.run("page", *call)
            for message_id, member, *fields in page:
                row, cursor_match = _read_row(message_id, fields), _CURSOR.match(member)
                if row is not None and cursor_match is not None:
                    row.message.set_cursor(cursor_match[0].decode())
                    yield row
            if not last_member:
                return
            lower_bound, page_size = b"(" + last_member, _PAGE

    async def find_row(self, message_id: str) -> ListedMessage | None:
        """Return a pending message; ``None`` when it is not pending or cannot be read."""
        fields: list[Any] = await self._server.run("row", self.key_prefix, message_id)
        return _read_row(message_id.encode(), fields)

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        row = await self.find_row(message_id)
        return None if row is None else row.message

    @override
    async def history(self, message_id: str) -> Sequence[ports.Record]:
        lines: list[bytes] = await self._server.execute_command("LRANGE", f"{self.key_prefix}:r:{message_id}", 0, -1)
        return [redis_layout.read_record(message_id, line) for line in lines]

    # --- how far the clocks of the processes under a prefix deviate from the server's (ADR 0048) ------------------

    async def report_clock(self, ahead: timedelta) -> None:
        name = f"{platform.node()}:{os.getpid()}"
        now = redis_layout.format_instant(await server_now(self._server))
        line = f"{now} {ahead // _MICROSECOND}"
        await self._server.run("little", "HSET", f"{self._server.login.tag}:clocks", name, line)

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Return how far each process's clock is ahead; delete the fields of dead processes."""
        key, now = f"{self._server.login.tag}:clocks", await server_now(self._server)
        clock_offsets: dict[str, timedelta] = {}
        for name, line in redis_layout.pairs(await self._server.execute_command("HGETALL", key)).items():
            reported_at, _, ahead = line.partition(b" ")
            if redis_layout.read_instant(reported_at, "the time of a report") < now - _LIVES_FOR:
                await self._server.execute_command("HDEL", key, name)
            else:
                clock_offsets[name.decode()] = int(ahead) * _MICROSECOND
        return clock_offsets


def _bound_after(cursor: str) -> bytes:
    """Return a bound that sorts after the member of a cursor, and before all later ones. Raises `InvalidMessage`."""
    if not (isinstance(cursor, str) and _CURSOR.fullmatch(cursor.encode(errors="replace"))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid_cursor_error(cursor)
    return cursor.encode() + b":\xff"  # no id begins with this byte


def _read_row(message_id: bytes, fields: Sequence[Any]) -> ListedMessage | None:
    if (member := fields[6]) is None:
        return None
    try:
        return ListedMessage(redis_layout.read_message(message_id, fields), member, fields[7] is not None)
    except MessageError as error:
        log.debug("message %r cannot be read, and is marked when it is due: %s", message_id, error)
        return None


# --- an operator's view; changes nothing ------------------------------------------------------------------------------


class _HolderObserver(ports.Observer):
    """Lists the processes that have claims under a prefix."""

    def __init__(self, server: RedisServer, liveness: RedisLiveness) -> None:
        self._server, self._liveness = server, liveness

    async def _read_descriptions(self) -> Mapping[str, Mapping[str, Any]]:
        """Return each holder's description of itself, by its name."""
        reply = await self._server.execute_command("HGETALL", f"{self._server.login.tag}:about")
        return {holder.decode(): json.loads(description) for holder, description in redis_layout.pairs(reply).items()}

    def _delivers(self, stores: bool | Sequence[str]) -> bool:
        """Return whether a process delivers due messages; ``stores``: from which; ``True``: an earlier version."""
        return bool(stores)

    @override
    async def processes(self) -> Sequence[ports.Process]:
        by_process, tag = dict[tuple[str, int], ports.Process](), self._server.login.tag
        for holder, description in (await self._read_descriptions()).items():
            key = host, pid = description["machine"], description["pid"]
            if holder == self._liveness.current_holder or key == (platform.node(), os.getpid()):
                continue
            started = redis_layout.read_instant(str(description["started"]).encode(), "the start of a process")
            subscriber_counts: list[Any] = await self._server.execute_command(
                "PUBSUB", "NUMSUB", f"{tag}:alive:{holder}"
            )
            receives = tuple(sorted(description.get("receives", ())))
            delivers = self._delivers(description.get("delivers", ()))
            process = ports.Process(pid, host, started, subscriber_counts[1] > 0, delivers, receives)
            by_process[key] = process.merge(by_process[key]) if key in by_process else process
        return list(by_process.values())


class RedisStoreObserver(_HolderObserver):
    def __init__(self, server: RedisServer, store: Questions, liveness: RedisLiveness) -> None:
        super().__init__(server, liveness)
        self._store = store

    @override
    def _delivers(self, stores: bool | Sequence[str]) -> bool:
        """A process of another endpoint delivers from another store under the same prefix."""
        return stores if isinstance(stores, bool) else self._store.key_prefix in stores

    @override
    async def pending_state_of(self, message_id: str) -> ports.PendingState | None:
        row = await self._store.find_row(message_id)
        return None if row is None else await self._read_pending_state(row)

    async def _read_pending_state(self, row: ListedMessage) -> ports.PendingState:
        if not row.is_claimed:
            return ports.PendingState(row.message, redis_layout.instant_of(row.member))
        token: bytes | None = await self._server.execute_command(
            "HGET", f"{self._store.key_prefix}:m:{row.message.message_id}", "t"
        )
        holder = (await self._read_descriptions()).get((token or b"").partition(b":")[0].decode(), {})
        return ports.PendingState(row.message, None, holder.get("pid"))

    @override
    async def retries_of(self, message_id: str) -> Sequence[ports.PendingState]:
        standings: list[ports.PendingState] = []
        async for row in self._store.list_rows(ports.MessageFilter()):
            message = row.message
            if message.message_id != message_id and message.headers.get(Headers.MESSAGE_ID) == message_id:
                standings.append(await self._read_pending_state(row))
        return standings

    @override
    async def latest_deliveries(self, limit: int) -> Sequence[ports.DeliveredMessage]:
        """Return the last delivery only: the server keeps no other, and not its due time."""
        delivered_at: bytes | None = await self._server.execute_command("GET", f"{self._store.key_prefix}:last")
        return (
            []
            if delivered_at is None
            else [ports.DeliveredMessage(redis_layout.instant_of(delivered_at), None)][:limit]
        )

    @override
    async def next_destinations(self, messages: int) -> Mapping[str, int]:
        counts = Counter[str]()
        async for row in self._store.list_rows(ports.MessageFilter()):
            if counts.total() == messages:
                break
            counts[row.message.destination] += 1
        return counts


class RedisQueueObserver(_HolderObserver):
    async def _queue_names(self) -> list[str]:
        names: list[bytes] = await self._server.execute_command("SMEMBERS", f"{self._server.login.tag}:queues")
        return sorted(name.decode() for name in names)

    @override
    async def queue_lengths(self) -> Mapping[str, int]:
        names = await self._queue_names()
        lengths = dict(zip(names, await self._server.run("lengths", *names), strict=True)) if names else {}
        for queue, _, _ in await self._received_messages():
            if queue in lengths:
                lengths[queue] += 1
        return lengths

    async def _received_messages(self) -> list[tuple[str, int, ports.QueuedMessage | None]]:
        """Return queue, number and message of each received message; ``None`` for a message that cannot be read."""
        about = await self._read_descriptions()
        received_messages: list[tuple[str, int, ports.QueuedMessage | None]] = []
        for holder, number, queue, *fields in await self._server.run("held"):
            name = queue.decode()
            pid = about.get(holder.decode(), {}).get("pid")
            received_messages.append((name, int(number), _read_queued(name, fields, pid, int(number))))
        return received_messages

    @override
    async def browse(self, queue: str, limit: int, after: int = 0) -> Sequence[ports.QueuedMessage]:
        await self._check_exists(queue)
        messages = {
            number: each
            for name, number, each in await self._received_messages()
            if name == queue and each is not None and number > after
        }
        ready_count = 0
        async for number, each in self._ready_messages(queue, after):
            if ready_count == limit:
                break
            messages[number] = each
            ready_count += 1
        return [each for _, each in sorted(messages.items())][:limit]

    @override
    async def last_number(self, queue: str) -> int:
        await self._check_exists(queue)
        received_numbers = [number for name, number, _ in await self._received_messages() if name == queue]
        ready_numbers: list[bytes] = await self._server.execute_command(
            "ZRANGE", f"{self._server.login.tag}:q:{queue}:ready", "0", "0", "REV"
        )
        return max([0, *received_numbers, *map(int, ready_numbers)])

    async def _check_exists(self, queue: str) -> None:
        if queue not in await self._queue_names():
            raise QueueNotFound.of(queue)

    async def _ready_messages(self, queue: str, after: int = 0) -> AsyncGenerator[tuple[int, ports.QueuedMessage]]:
        last_number = after
        while True:
            rows = await self._server.run("look", queue, last_number, _PAGE)
            for number, *fields in rows:
                last_number = int(number)
                if (message := _read_queued(queue, fields, None, last_number)) is not None:
                    yield last_number, message
            if len(rows) < _PAGE:
                return

    @override
    async def find_in_queues(self, message_id: str) -> Sequence[ports.QueuedMessage]:
        messages = [
            each for _, _, each in await self._received_messages() if each is not None and _has_id(each, message_id)
        ]
        for queue in await self._queue_names():
            messages += [each async for _, each in self._ready_messages(queue) if _has_id(each, message_id)]
        return messages


def _has_id(queued: ports.QueuedMessage, message_id: str) -> bool:
    envelope = queued.envelope
    return message_id in {envelope.message_id, envelope.headers.get(Headers.MESSAGE_ID)}


def _read_queued(queue: str, fields: Sequence[Any], pid: int | None, number: int) -> ports.QueuedMessage | None:
    """Return a queued message; ``None`` when it cannot be read. It is marked when it is received."""
    try:
        envelope, failures, unanswered = redis_layout.read_envelope(queue, fields)
    except MessageError:
        return None
    return ports.QueuedMessage(queue, envelope, failures + unanswered, pid, number)
