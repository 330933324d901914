"""Queues in Redis: a sorted set of numbers each, and a hash for each message.

Receivers listen to the channel of their queue; nobody polls.

Source: docs/guides/redis.md, ``lua/common.lua`` (the keys); ADR 0043 (damage), ADR 0050 (outages).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import anyio
from typing_extensions import override

from postdate.backends.redis.layout import envelope_parts, read_envelope, written
from postdate.backends.redis.liveness import Claimant, OpenRedis
from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.questions import RedisQueueObserver
from postdate.backends.redis.server import (
    QUEUES,
    RedisServer,
    RedisTransaction,
    check_eviction,
    server_facts,
    server_now,
)
from postdate.backends.redis.unreadable import UnreadableHashes
from postdate.errors import ClaimLost, MessageError, PostdateError, QueueNotFound
from postdate.messages import Envelope, check_headers, encode_headers, why_too_large
from postdate.ports import (
    HANDLED,
    SUSPECT_AFTER,
    End,
    Observer,
    Received,
    Receiver,
    Recording,
    RecordKind,
    ServerFacts,
    TransactionMode,
    Transport,
    TransportCapabilities,
    Work,
    do_works,
)
from postdate.runtime.threads import Alarm

log = logging.getLogger("postdate.redis")


class RedisTransport(UnreadableHashes, Transport):
    """Queues in a database of a Redis server.

    Args:
        address: ``redis://…`` or ``rediss://…`` (see :mod:`postdate.backends.redis.login`), or an open database.
        recording: how much is kept for audits of messages that a store of the same database delivered here.
        largest_message_bytes: of headers and body together.
        holds_at_most: a process that is silent for so long loses the messages that it received; ``None``: 60 s.
        answers_within: a connection that is silent for so long is given up; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be read.
    """

    def __init__(
        self,
        address: str | RedisLogin | OpenRedis,
        *,
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self._opened = OpenRedis.of(address, holds_at_most, answers_within)
        self._server = RedisServer(self._opened.connections, QUEUES)
        self.recording = recording
        self._capabilities = TransportCapabilities(
            durable=True,
            transaction_modes=frozenset(TransactionMode),
            database=self._server.login.identity,
            largest_message_bytes=largest_message_bytes,
            expires_messages=True,
            time_to_be_received_precision=timedelta(microseconds=1),
            pipelines=True,
            prefetches=True,
            takes_by_id=True,
        )
        self._liveness = self._opened.liveness
        self._receives: list[str] = self._liveness.about.setdefault("receives", [])
        self._liveness.when_lost.append(self._lost)
        self._opened.used_by(self)
        self._receivers: list[RedisReceiver] = []
        self._made = set[str]()

    def __repr__(self) -> str:
        return f"RedisTransport({self._server!r})"

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        await check_eviction(self._server)
        await self._bring_back_unreadable()
        if names:
            await self._make(names)
            self._made.update(names)

    async def _make(self, names: Collection[str]) -> int:
        return await self._server.run("little", "SADD", f"{self._server.login.tag}:queues", *names)

    async def make_again(self, queue: str) -> None:
        """Create this object's queues again: the server was restarted without its data."""
        if queue not in self._made:
            raise QueueNotFound.of(queue)
        if await self._make(self._made):
            names = ", ".join(sorted(self._made))
            log.error("%r has lost queues and all that was in them, and they are made again: %s", self, names)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        answers: list[PostdateError | None] = [self.why_not(envelope) for envelope in envelopes]
        refused = next((answer for answer in answers if answer is not None), None)
        if work and refused is not None:
            raise refused
        sent = [place for place, answer in enumerate(answers) if answer is None]
        if not sent and not work:
            return answers
        transaction = self.transaction(work)
        self.add_send(transaction, [envelopes[place] for place in sent], now, strict=bool(work))
        for missing in await transaction.commit(self._server):
            envelope = envelopes[sent[missing]]
            answers[sent[missing]] = QueueNotFound.of(envelope.destination, envelope.message_id)
        return answers

    def why_not(self, envelope: Envelope) -> PostdateError | None:
        """Return why a message cannot be sent, or ``None``; does not check its queue."""
        check_headers(envelope.headers)
        return why_too_large(envelope, encode_headers(envelope.headers), self._capabilities.largest_message_bytes)

    def transaction(self, work: Sequence[Work]) -> RedisTransaction:
        """Return a transaction that contains ``work``; if that raises, nothing was done."""
        transaction = RedisTransaction(self._capabilities.database)
        do_works(transaction, work)
        return transaction

    def add_send(
        self, transaction: RedisTransaction, envelopes: Sequence[Envelope], now: datetime, *, strict: bool
    ) -> None:
        """Add messages to a transaction; with ``strict`` a missing queue undoes it."""
        parts = [part for envelope in envelopes for part in envelope_parts(envelope)]
        transaction.add("send", int(strict), written(now), len(envelopes), *parts, messages=envelopes)

    @property
    @override
    def _unreadable_place(self) -> str:
        return "q"

    @override
    def receiver(self, queue: str) -> Receiver:
        return RedisReceiver(self, self._server, self._opened, queue)

    def opened(self, receiver: RedisReceiver) -> None:
        self._receivers.append(receiver)
        self._receives.append(receiver.queue)

    def ended(self, receiver: RedisReceiver) -> None:
        if receiver in self._receivers:
            self._receivers.remove(receiver)
            self._receives.remove(receiver.queue)

    def _lost(self) -> None:
        for receiver in list(self._receivers):
            receiver.lost()

    @override
    async def close(self) -> None:
        receivers = list(self._receivers)
        if await self._opened.close_for(self):
            return
        for receiver in receivers:
            await receiver.close_soon()

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        lengths: list[int] = await self._server.run("lengths", *names) if names else []
        return {name: length for name, length in zip(names, lengths, strict=True) if length >= 0}

    @override
    def observer(self) -> Observer:
        return RedisQueueObserver(self._server, self._liveness)

    @override
    async def server_facts(self) -> ServerFacts:
        return await server_facts(self._server)


# --- receiving from one queue -----------------------------------------------------------------------------------------


_LOOKS_AGAIN_AFTER_SECONDS: Final = 30.0
"""Without a wake-up: the channel announces every message, but only to connected listeners."""

_MOST_BYTES_AT_ONCE: Final = 16 * 1024 * 1024


class _HoldToken(NamedTuple):
    """A message's number in its queue, and the token of the claim."""

    number: bytes
    token: str


class RedisReceiver(Receiver):
    """Holds received messages until they are committed, rolled back, or the process is dead.

    Only the server knows whether a message is held, by the claim's token. Nothing is noted here: a message that was
    rolled back may be received again under the same number before the answer to the roll-back arrives.
    """

    def __init__(self, transport: RedisTransport, server: RedisServer, opened: OpenRedis, queue: str) -> None:
        self._transport, self._server, self._opened = transport, server, opened
        self.queue = queue
        self._claimant = Claimant(server, opened.liveness)
        self._alarm: Alarm | None = None
        self._stops_hearing: Callable[[], None] | None = None

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        alarm = await self._listen()
        while True:
            alarm.reset()
            if (messages := await self._claim(limit, "")) or not wait:
                return messages
            with anyio.move_on_after(_LOOKS_AGAIN_AFTER_SECONDS):
                await alarm.wait()

    async def _listen(self) -> Alarm:
        if self._alarm is None:
            self._alarm = Alarm()
            self._transport.opened(self)
        if self._stops_hearing is None:
            alarm = self._alarm
            channel = f"{self._server.login.tag}:q:{self.queue}:wake"
            listening = self._opened.listening.listen(channel, lambda _text: alarm.ring())
            self._stops_hearing = await self._server.calling(listening)
        return self._alarm

    @override
    async def take(self, message_id: str) -> Received | None:
        messages = await self._claim(1, message_id)
        return messages[0] if messages else None

    async def _claim(self, limit: int, message_id: str) -> Sequence[Received]:
        """Claim messages; unreadable ones are marked and replaced by others."""
        while True:
            token, rows = await self._claimant.claim(
                "receive", self.queue, limit, _MOST_BYTES_AT_ONCE, message_id, SUSPECT_AFTER
            )
            if rows == 1:
                await self._transport.make_again(self.queue)
                continue
            messages: list[Received] = []
            unread: list[tuple[bytes, MessageError]] = []
            for number, *fields in rows:
                try:
                    envelope, failures, unanswered = read_envelope(self.queue, fields)
                except MessageError as error:
                    unread.append((number, error))
                    continue
                is_suspect = unanswered >= SUSPECT_AFTER
                hold = _HoldToken(number, token)
                messages.append(Received(envelope, failures + unanswered, hold, unanswered, is_suspect=is_suspect))
            try:
                for number, error in unread:
                    await self._mark(number, token, error)
            except BaseException:
                self._claimant.doubt(token)
                raise
            if messages or not rows or message_id:
                return messages

    async def _mark(self, number: bytes, token: str, error: MessageError) -> None:
        key = f"{self._server.login.tag}:qm:".encode() + number
        now = written(await server_now(self._server))
        await self._server.run("mark_unreadable", "q", now, key, "", token, str(error))
        text = "cannot be read, and marked so: one message of %r (%s); `postdate messages list --unreadable` lists it"
        log.error(text, self.queue, error)

    @override
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        """In one script, with everything in ``end``."""
        (number, token), transport = self._hold(received), self._transport
        for each in end.outgoing:
            if (refused := transport.why_not(each)) is not None:
                raise refused
        transaction = transport.transaction(end.work)
        is_recorded = end.record is not RecordKind.HANDLED or transport.recording is Recording.ALL
        kind = "" if end.record is None or not is_recorded else int(end.record)
        transaction.ended.append(received.envelope)
        transaction.add("hold", number, token, kind, end.detail, written(now))
        if end.outgoing:
            transport.add_send(transaction, end.outgoing, now, strict=True)
        await transaction.commit(self._server)

    @override
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        number, token = self._hold(received)
        if not await self._server.run("roll_back", number, token, int(failed)):
            raise self._lost_hold(received)

    def _hold(self, received: Received) -> _HoldToken:
        hold = received.token
        if not isinstance(hold, _HoldToken) or not self._claimant.made(hold.token):
            raise self._lost_hold(received)
        return hold

    def _lost_hold(self, received: Received) -> ClaimLost:
        return ClaimLost.of(received.envelope.message_id, queue=self.queue)

    def lost(self) -> None:
        """Look at the queue again: the messages that were held may be back in it."""
        if self._alarm is not None:
            self._alarm.ring()

    @override
    async def close(self) -> None:
        self._end()
        await self._claimant.close()

    async def close_soon(self) -> None:
        self._end()
        await self._claimant.close_soon()

    def _end(self) -> None:
        if self._stops_hearing is not None:
            self._stops_hearing()
            self._stops_hearing = None
        self._transport.ended(self)
        self._alarm = None
