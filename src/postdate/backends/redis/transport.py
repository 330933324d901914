"""Queues in Redis: each is a sorted set of numbers, with a hash for each message.

Receivers listen to the channel of their queue. They poll only in case a notification was lost.

Source: docs/guides/redis.md, ``lua/common.lua`` (the keys); ADR 0043 (damage), ADR 0050 (outages).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import anyio
from typing_extensions import override

from postdate import ports
from postdate.backends.redis.layout import envelope_parts, format_instant, read_envelope
from postdate.backends.redis.liveness import Claimer, OpenRedis
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
from postdate.messages import Envelope, check_headers, encode_headers, too_large_error
from postdate.runtime.threads import WakeUp

log = logging.getLogger("postdate.redis")


class RedisTransport(UnreadableHashes, ports.Transport):
    """Queues in a database of a Redis server.

    Args:
        address: ``redis://…`` or ``rediss://…`` (see :mod:`postdate.backends.redis.login`), or an open database.
        recording: how much is recorded about messages that a store of the same database delivered here.
        largest_message_bytes: of headers and body together.
        holds_at_most: after so long without a heartbeat a process loses the messages that it received; ``None``: 60 s.
        answers_within: a call that is not answered for so long fails; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be parsed.
    """

    def __init__(
        self,
        address: str | RedisLogin | OpenRedis,
        *,
        recording: ports.Recording = ports.Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self._database = OpenRedis.of(address, holds_at_most, answers_within)
        self._server = RedisServer(self._database.connections, QUEUES)
        self.recording = recording
        self._capabilities = ports.TransportCapabilities(
            durable=True,
            transaction_modes=frozenset(ports.TransactionMode),
            database=self._server.login.identity,
            largest_message_bytes=largest_message_bytes,
            expires_messages=True,
            time_to_be_received_precision=timedelta(microseconds=1),
            pipelines=True,
            prefetches=True,
            receives_by_id=True,
        )
        self._liveness = self._database.liveness
        self._receiving_queues: list[str] = self._liveness.process_facts.setdefault("receives", [])
        self._liveness.loss_callbacks.append(self._wake_receivers)
        self._database.attach_user(self)
        self._receivers: list[RedisReceiver] = []
        self._created_queues = set[str]()

    def __repr__(self) -> str:
        return f"RedisTransport({self._server!r})"

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        await check_eviction(self._server)
        await self._migrate_unreadable()
        if names:
            await self._add_queues(names)
            self._created_queues.update(names)

    async def _add_queues(self, names: Collection[str]) -> int:
        return await self._server.run("little", "SADD", f"{self._server.login.tag}:queues", *names)

    async def recreate_queues(self, queue: str) -> None:
        """Create this object's queues again, because the server was restarted without its data."""
        if queue not in self._created_queues:
            raise QueueNotFound.of(queue)
        if await self._add_queues(self._created_queues):
            names = ", ".join(sorted(self._created_queues))
            log.error("%r has lost queues and all that was in them, and they are made again: %s", self, names)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        errors: list[PostdateError | None] = [self.send_error_of(envelope) for envelope in envelopes]
        first_error = next((answer for answer in errors if answer is not None), None)
        if work and first_error is not None:
            raise first_error
        sendable_indexes = [index for index, answer in enumerate(errors) if answer is None]
        if not sendable_indexes and not work:
            return errors
        transaction = self.transaction(work)
        self.add_send(transaction, [envelopes[place] for place in sendable_indexes], now, is_strict=bool(work))
        for position in await transaction.commit(self._server):
            envelope = envelopes[sendable_indexes[position]]
            errors[sendable_indexes[position]] = QueueNotFound.of(envelope.destination, envelope.message_id)
        return errors

    def send_error_of(self, envelope: Envelope) -> PostdateError | None:
        """Return the error that forbids sending a message, or ``None``. The queue is not checked."""
        check_headers(envelope.headers)
        return too_large_error(envelope, encode_headers(envelope.headers), self._capabilities.largest_message_bytes)

    def transaction(self, work: Sequence[ports.Work]) -> RedisTransaction:
        """Return a transaction that contains ``work``. If a work raises, nothing was changed."""
        transaction = RedisTransaction(self._capabilities.database)
        ports.run_works(transaction, work)
        return transaction

    def add_send(
        self, transaction: RedisTransaction, envelopes: Sequence[Envelope], now: datetime, *, is_strict: bool
    ) -> None:
        """Add messages to a transaction; with ``is_strict`` a missing queue undoes the transaction."""
        parts = [part for envelope in envelopes for part in envelope_parts(envelope)]
        transaction.add("send", int(is_strict), format_instant(now), len(envelopes), *parts, messages=envelopes)

    @property
    @override
    def _unreadable_scope(self) -> str:
        return "q"

    @override
    def receiver(self, queue: str) -> ports.Receiver:
        return RedisReceiver(self, self._server, self._database, queue)

    def add_receiver(self, receiver: RedisReceiver) -> None:
        self._receivers.append(receiver)
        self._receiving_queues.append(receiver.queue)

    def forget_receiver(self, receiver: RedisReceiver) -> None:
        if receiver in self._receivers:
            self._receivers.remove(receiver)
            self._receiving_queues.remove(receiver.queue)

    def _wake_receivers(self) -> None:
        for receiver in list(self._receivers):
            receiver.wake()

    @override
    async def close(self) -> None:
        receivers = list(self._receivers)
        if await self._database.detach_user(self):
            return
        for receiver in receivers:
            await receiver.close_or_log()

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        lengths: list[int] = await self._server.run("lengths", *names) if names else []
        return {name: length for name, length in zip(names, lengths, strict=True) if length >= 0}

    @override
    def observer(self) -> ports.Observer:
        return RedisQueueObserver(self._server, self._liveness)

    @override
    async def server_facts(self) -> ports.ServerFacts:
        return await server_facts(self._server)


# --- receiving from one queue -----------------------------------------------------------------------------------------


_POLL_SECONDS: Final = 30.0
"""The interval of polling without a notification: the channel announces messages only to connected listeners."""

_MOST_BYTES_AT_ONCE: Final = 16 * 1024 * 1024  # of headers and bodies in one call; a single message may have more


class _ReceiveToken(NamedTuple):
    """A message's number in its queue, and the token of the claim."""

    number: bytes
    token: str


class RedisReceiver(ports.Receiver):
    """Keeps the claims on received messages until they are committed, rolled back, or the process is dead.

    Only the server knows whether a message is claimed, by the claim's token. This object remembers nothing: a message
    that was rolled back may be received again under the same number before the answer to the roll-back arrives.
    """

    def __init__(self, transport: RedisTransport, server: RedisServer, database: OpenRedis, queue: str) -> None:
        self._transport, self._server, self._database = transport, server, database
        self.queue = queue
        self._claimer = Claimer(server, database.liveness)
        self._wake_up: WakeUp | None = None
        self._unsubscribe: Callable[[], None] | None = None

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        wake_up = await self._listen()
        while True:
            wake_up.reset()
            if (messages := await self._receive_messages(limit, "")) or not wait:
                return messages
            with anyio.move_on_after(_POLL_SECONDS):
                await wake_up.wait()

    async def _listen(self) -> WakeUp:
        if self._wake_up is None:
            self._wake_up = WakeUp()
            self._transport.add_receiver(self)
        if self._unsubscribe is None:
            wake_up = self._wake_up
            channel = f"{self._server.login.tag}:q:{self.queue}:wake"
            subscription = self._database.subscriptions.listen(channel, lambda _text: wake_up.wake())
            self._unsubscribe = await self._server.translate_errors(subscription)
        return self._wake_up

    @override
    async def receive_by_id(self, message_id: str) -> ports.Received | None:
        messages = await self._receive_messages(1, message_id)
        return messages[0] if messages else None

    async def _receive_messages(self, limit: int, message_id: str) -> Sequence[ports.Received]:
        """Claim messages; mark unreadable ones, and claim others instead."""
        while True:
            token, rows = await self._claimer.claim(
                "receive", self.queue, limit, _MOST_BYTES_AT_ONCE, message_id, ports.SUSPECT_AFTER
            )
            if rows == 1:
                await self._transport.recreate_queues(self.queue)
                continue
            messages: list[ports.Received] = []
            unreadable_rows: list[tuple[bytes, MessageError]] = []
            for number, *fields in rows:
                try:
                    envelope, failures, unanswered = read_envelope(self.queue, fields)
                except MessageError as error:
                    unreadable_rows.append((number, error))
                    continue
                is_suspect = unanswered >= ports.SUSPECT_AFTER
                receive_token = _ReceiveToken(number, token)
                messages.append(
                    ports.Received(envelope, failures + unanswered, receive_token, unanswered, is_suspect=is_suspect)
                )
            try:
                for number, error in unreadable_rows:
                    await self._mark_unreadable(number, token, error)
            except BaseException:
                self._claimer.void_claim(token)
                raise
            if messages or not rows or message_id:
                return messages

    async def _mark_unreadable(self, number: bytes, token: str, error: MessageError) -> None:
        key = f"{self._server.login.tag}:qm:".encode() + number
        now = format_instant(await server_now(self._server))
        await self._server.run("mark_unreadable", "q", now, key, "", token, str(error))
        text = "cannot be read, and marked so: one message of %r (%s); `postdate messages list --unreadable` lists it"
        log.error(text, self.queue, error)

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        """Acknowledge the message in one script, together with everything in ``completion``."""
        (number, token), transport = self._token_of(received), self._transport
        for each in completion.outgoing:
            if (send_error := transport.send_error_of(each)) is not None:
                raise send_error
        transaction = transport.transaction(completion.work)
        is_recorded = completion.record is not ports.RecordKind.HANDLED or transport.recording is ports.Recording.ALL
        kind = "" if completion.record is None or not is_recorded else int(completion.record)
        transaction.ended_messages.append(received.envelope)
        transaction.add("hold", number, token, kind, completion.detail, format_instant(now))
        if completion.outgoing:
            transport.add_send(transaction, completion.outgoing, now, is_strict=True)
        await transaction.commit(self._server)

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        number, token = self._token_of(received)
        if not await self._server.run("roll_back", number, token, int(failed)):
            raise self._claim_lost_error(received)

    def _token_of(self, received: ports.Received) -> _ReceiveToken:
        token = received.token
        if not isinstance(token, _ReceiveToken) or not self._claimer.has_created(token.token):
            raise self._claim_lost_error(received)
        return token

    def _claim_lost_error(self, received: ports.Received) -> ClaimLost:
        return ClaimLost.of(received.envelope.message_id, queue=self.queue)

    def wake(self) -> None:
        """Poll the queue again: the messages that were claimed may be back in it."""
        if self._wake_up is not None:
            self._wake_up.wake()

    @override
    async def close(self) -> None:
        self._stop_receiving()
        await self._claimer.close()

    async def close_or_log(self) -> None:
        self._stop_receiving()
        await self._claimer.close_or_log()

    def _stop_receiving(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self._transport.forget_receiver(self)
        self._wake_up = None
