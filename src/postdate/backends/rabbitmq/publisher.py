"""Publishes for a transport: one connection and one channel for all senders, opened again after they were lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import anyio

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import EVENT_PREFIX, OR_QUEUE_PREFIX, PREFIXES, exchange_address, parse_address
from postdate.backends.rabbitmq.connection import (
    ANSWERS_WITHIN_SECONDS,
    CONTENT_TOO_LARGE,
    NOT_FOUND,
    PRECONDITION_FAILED,
    AmqpConnection,
    ChannelClosed,
    PersistentConnection,
    node_away,
)
from postdate.backends.rabbitmq.content import redirected
from postdate.backends.rabbitmq.publishing import Answers, PublishingChannel, Sending
from postdate.backends.rabbitmq.topology import declare_exchange_passively
from postdate.errors import (
    DestinationUnavailable,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    TransportError,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.messages import Envelope

_ACCESS_REFUSED = 403
_ABOUT_CONTENT = frozenset({PRECONDITION_FAILED, 501, 502, 503})
"""Reply codes about the message: an invalid property, or a frame, syntax or command that cannot be read.

Each other reply is an outage of the destination: no permission, locked by another connection, out of resources, not
allowed, not implemented, a fault of the server. Source: the reply codes of AMQP 0-9-1, and ADR 50.
"""

_PARTS_AT_ONCE = 8


class Publisher:
    """Publishes for a transport, and renews channels and connections."""

    def __init__(self, line: PersistentConnection, window: int, confirms_within: timedelta) -> None:
        self.line = line
        self._window, self._within = window, confirms_within.total_seconds()
        self._channel: PublishingChannel | None = None
        self._exchanges: set[str] = set()
        self._exchanges_of: AmqpConnection | None = None

    async def send(self, envelopes: Sequence[Envelope], now: datetime, limit: int) -> Answers:
        """Send each message or return its error, all within the time for confirms.

        If the broker closes the channel because of one message, the other messages in flight fail, too, and the broker
        does not state which message it was. So all of them are sent again on other channels, in halves, until that
        message is alone. It gets the error; the others arrive, some of them twice.
        """
        sending = Sending(envelopes, now, limit)
        with anyio.move_on_after(self._within):
            try:
                await self._send_all(sending)
            except anyio.get_cancelled_exc_class():
                if sending.is_open:
                    sending.give_up(self._late(sending))
                # True if an enclosing scope was cancelled: then the next wait of the caller is cancelled, too.
                is_for_good = anyio.current_effective_deadline() == -math.inf
                if not is_for_good or None not in sending.answers:
                    raise
                # Return the confirms so far: without them all messages would be sent again.
        return [
            None if isinstance(answer, QueueNotFound) and envelope.destination.startswith(EVENT_PREFIX) else answer
            for envelope, answer in zip(envelopes, sending.answers, strict=True)
        ]  # an event without subscribers is published

    async def _send_all(self, sending: Sending) -> None:
        """Send; if this is cancelled, abandon the unconfirmed messages and keep the answers so far."""
        try:
            await self._send_each(sending)
        except BaseException:
            for place in _stranded(sending):  # unrouted messages: sending to the queue itself was not tried yet
                sending.answers[place] = self._late(sending)
            raise
        if stranded := _stranded(sending):
            await self._send_to_queues(stranded, sending)

    async def _send_to_queues(self, places: Sequence[int], sending: Sending) -> None:
        """Send unrouted messages to the queues that their routing keys name."""
        sent: list[tuple[int, Envelope]] = []
        for place in places:
            envelope = sending.envelopes[place]
            with suppress(QueueNotFound):  # a malformed address has its error already
                key = parse_address(envelope.destination).routing_key
                sent.append((place, redirected(envelope, exchange_address("", key))))
        later = Sending([envelope for _, envelope in sent], sending.now, sending.limit)
        try:
            await self._send_each(later)
        finally:
            for (place, _), answer in zip(sent, later.answers, strict=True):
                first = sending.answers[place]
                both = QueueNotFound(f"{first}; and {answer}")
                sending.answers[place] = both if isinstance(answer, QueueNotFound) else answer

    async def _send_each(self, sending: Sending) -> None:
        if not sending.envelopes:
            return
        await self._publish(sending)
        suspects = [place for place, answer in enumerate(sending.answers) if isinstance(answer, ChannelClosed)]
        if suspects:
            self._exchanges.clear()
            await self._send_apart(sending, suspects)

    async def _publish(self, sending: Sending, *, apart: bool = False) -> None:
        """Publish the messages and set all answers, on the shared channel or (``apart``) on a new one."""
        channel: PublishingChannel | None = None
        try:
            link = await self.line.link()
            sending.began = link.loop.time()
            await self._look_for_exchanges(link, sending)
            channel = await (self._new_channel(link) if apart else self._open(link))
            await channel.publish(sending)
        except PostdateError as error:
            sending.give_up(error)
        finally:
            if sending.is_open:
                sending.give_up(self._late(sending))
            if apart and channel is not None:
                channel.close(TransportUnreachable("this channel has done its work"))

    async def _send_apart(self, sending: Sending, suspects: Sequence[int]) -> None:
        """Find the messages because of which the broker closes a channel, by halving; send the others."""
        refused: dict[str, PostdateError] = {}
        parts = deque([suspects])

        async def send_parts() -> None:
            while parts:
                part = parts.popleft()
                for place in part:
                    sending.answers[place] = refused.get(sending.envelopes[place].destination, sending.answers[place])
                if remaining := [place for place in part if isinstance(sending.answers[place], ChannelClosed)]:
                    await self._send_part(sending, remaining)
                closed = [place for place in remaining if isinstance(answer := sending.answers[place], ChannelClosed)]
                if len(remaining) > 1 and closed:
                    half = (len(closed) + 1) // 2
                    parts.extend(each for each in (closed[:half], closed[half:]) if each)
                elif closed:
                    answer = sending.answers[closed[0]]
                    assert isinstance(answer, ChannelClosed)
                    destination = sending.envelopes[closed[0]].destination
                    error = sending.answers[closed[0]] = _refusal(answer, destination)
                    if answer.reply_code in {NOT_FOUND, _ACCESS_REFUSED}:  # caused by the address, so valid for others
                        refused[destination] = error

        while parts:  # one round; halves that are added meanwhile are sent in the next one
            async with anyio.create_task_group() as tasks:
                for _ in range(min(_PARTS_AT_ONCE, len(parts))):
                    tasks.start_soon(send_parts)

    async def _send_part(self, sending: Sending, places: Sequence[int]) -> None:
        """Send some of the messages on a channel of their own; keep their answers even when that fails."""
        part = Sending([sending.envelopes[place] for place in places], sending.now, sending.limit)
        try:
            await self._publish(part, apart=True)
        finally:
            for place, answer in zip(places, part.answers, strict=True):
                sending.answers[place] = answer

    async def _open(self, link: AmqpConnection) -> PublishingChannel:
        """Return the shared channel; a new one when it was closed."""
        if not self._is_of(link):
            channel = await self._new_channel(link)
            if self._is_of(link):  # another task was faster
                channel.close(TransportUnreachable("this channel is not needed"))
            else:
                self._channel = channel
        assert self._channel is not None
        return self._channel

    def _is_of(self, link: AmqpConnection) -> bool:
        return self._channel is not None and self._channel.link is link and self._channel.ended is None

    async def _new_channel(self, link: AmqpConnection) -> PublishingChannel:
        channel = await link.open_channel(
            lambda link, number: PublishingChannel(link, number, self._window), _remaining_seconds()
        )
        try:
            await channel.call(wire.CONFIRM_SELECT, b"\0", wire.CONFIRM_SELECT_OK, _remaining_seconds())
        except BaseException:
            channel.close(TransportUnreachable("this channel was not waited for"))
            raise
        return channel

    def _late(self, sending: Sending) -> TransportUnavailable:
        """Return why there are no confirms: the server is blocked, or silent, or one queue does not confirm.

        A silent server's connection is abandoned: it would read what is written to it now when it wakes, long after it
        was sent again.
        """
        late = f"{self.line.login.place} did not confirm within {self._within:g} s"
        link = None if self._channel is None else self._channel.link
        if link is None or link.ended is not None:
            return TransportUnreachable(late)
        if link.blocked is not None:
            return TransportUnreachable(f"{late}; it has blocked publishers: {link.blocked}")
        if link.last_read_at > sending.began and not link.is_silent:
            return DestinationUnavailable(f"{late}, though it speaks; a queue may have no leader, or no room")
        silent = TransportUnreachable(f"{late}, and says nothing")
        if link.is_silent:
            link.abandon(silent)
        return silent

    async def _look_for_exchanges(self, link: AmqpConnection, sending: Sending) -> None:
        """Answer messages to missing exchanges: publishing one would close the channel for all."""
        if self._exchanges_of is not link:
            self._exchanges_of, self._exchanges = link, set()
        for destination in {envelope.destination for envelope in sending.envelopes}:
            if destination.startswith(PREFIXES) and (error := await self._look_for_exchange(link, destination)):
                sending.answer(destination, error)

    async def _look_for_exchange(self, link: AmqpConnection, destination: str) -> PostdateError | None:
        try:
            exchange = parse_address(destination).exchange
            if exchange and exchange not in self._exchanges:
                await declare_exchange_passively(link, exchange, _remaining_seconds())
                self._exchanges.add(exchange)
        except QueueNotFound as error:
            return error
        except ChannelClosed as error:
            return _refusal(error, destination)
        return None


def _stranded(sending: Sending) -> list[int]:
    """Return the indexes of unrouted messages that may go to a queue instead."""
    return [
        place
        for place, answer in enumerate(sending.answers)
        if isinstance(answer, QueueNotFound) and sending.envelopes[place].destination.startswith(OR_QUEUE_PREFIX)
    ]


def _remaining_seconds() -> float:
    """Return the limit for a call that cannot be interrupted: no longer than the send it is part of."""
    return min(ANSWERS_WITHIN_SECONDS, max(0.0, anyio.current_effective_deadline() - anyio.current_time()))


def _refusal(error: ChannelClosed, destination: str) -> PostdateError:
    """Return the error for the only message on a channel that the broker closed."""
    text = f"RabbitMQ refuses the message to {destination!r}: {error.reply_code} {error.text}"
    if (away := node_away(error, destination)) is not None:
        return away
    if error.reply_code == NOT_FOUND:
        return QueueNotFound(text)
    if error.reply_code == CONTENT_TOO_LARGE or "message size" in error.text:
        return MessageTooLarge(text)
    return (TransportError if error.reply_code in _ABOUT_CONTENT else DestinationUnavailable)(text)
