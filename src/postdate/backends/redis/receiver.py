"""Receiving from one queue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, NamedTuple, Protocol

import anyio
from typing_extensions import override

from postdate.backends.redis.layout import read_envelope, written
from postdate.backends.redis.liveness import Claimant, OpenRedis
from postdate.backends.redis.server import RedisServer, server_now
from postdate.errors import ClaimLost, MessageError, PostdateError
from postdate.messages import Envelope
from postdate.ports import HANDLED, End, Received, Receiver
from postdate.runtime.wakeup import Alarm

_LOOKS_AGAIN_AFTER_SECONDS: Final = 30.0
"""Without a wake-up: the channel announces every message, but only to connected listeners."""

_MOST_BYTES_AT_ONCE: Final = 16 * 1024 * 1024

log = logging.getLogger("postdate.redis")


class _HoldToken(NamedTuple):
    """A message's number in its queue, and the token of the claim."""

    number: bytes
    token: str


class ReceiversQueues(Protocol):
    """The transport as its receivers see it."""

    async def commit(self, number: bytes, token: str, envelope: Envelope, now: datetime, end: End) -> None:
        """End a message that is held under a token."""
        ...

    async def make_again(self, queue: str) -> None:
        """Create the queues of this process again after the server has lost its data."""
        ...

    def opened(self, receiver: RedisReceiver) -> None: ...

    def ended(self, receiver: RedisReceiver) -> None: ...


class RedisReceiver(Receiver):
    """Holds received messages until they are committed, rolled back, or the process is dead.

    Only the server knows whether a message is held, by the claim's token. Nothing is noted here: a message that was
    rolled back may be received again under the same number before the answer to the roll-back arrives.
    """

    def __init__(self, transport: ReceiversQueues, server: RedisServer, opened: OpenRedis, queue: str) -> None:
        self._transport, self._server, self._opened = transport, server, opened
        self.queue = queue
        self._claimant = Claimant(server, opened.liveness)
        self._alarm: Alarm | None = None
        self._stops_hearing: Callable[[], None] | None = None
        self._has_failed = False

    @override
    async def receive(self, limit: int) -> Sequence[Received]:
        try:
            return await self._receive(limit)
        except PostdateError:
            self._has_failed = True
            raise

    async def _receive(self, limit: int) -> Sequence[Received]:
        alarm = await self._listen()
        while True:
            alarm.reset()
            found = await self._take(limit, "")
            if found or self._has_failed:
                self._has_failed = False
                return found
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
        found = await self._take(1, message_id)
        return found[0] if found else None

    async def _take(self, limit: int, message_id: str) -> Sequence[Received]:
        """Claim messages; unreadable ones are quarantined and replaced by others."""
        while True:
            token, rows = await self._claimant.claim("receive", self.queue, limit, _MOST_BYTES_AT_ONCE, message_id)
            if rows == 1:
                await self._transport.make_again(self.queue)
                continue
            found: list[Received] = []
            unread: list[tuple[bytes, MessageError]] = []
            for number, *fields in rows:
                try:
                    envelope, failures = read_envelope(self.queue, fields)
                except MessageError as error:
                    unread.append((number, error))
                    continue
                found.append(Received(envelope, failures, _HoldToken(number, token)))
            try:
                for number, error in unread:
                    await self._set_aside(number, token, error)
            except BaseException:
                self._claimant.doubt(token)
                raise
            if found or not rows or message_id:
                return found

    async def _set_aside(self, number: bytes, token: str, error: MessageError) -> None:
        key = f"{self._server.login.tag}:qm:".encode() + number
        at = written(await server_now(self._server))
        await self._server.run("aside", "q", at, key, "", token, str(error))
        text = "a message of queue %r cannot be read and was set aside (%s); `postdate errors` shows what is to be done"
        log.error(text, self.queue, error)

    @override
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        number, token = self._hold(received)
        await self._transport.commit(number, token, received.envelope, now, end)

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
