"""What a broker tells over AMQP: what it is, whether it takes messages, and how long the queues are that one names.

AMQP has no list of queues, no clock, and no way to ask for the type of a queue that could not make one by mistake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import anyio
from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import PublishAddress, parse_address
from postdate.backends.rabbitmq.connection import (
    ANSWERS_WITHIN_SECONDS,
    NOT_FOUND,
    AmqpConnection,
    Channel,
    ChannelClosed,
    declare_exchange_passively,
)
from postdate.backends.rabbitmq.login import Login
from postdate.backends.rabbitmq.wire import FRAME, HEADER_FRAME, Method, method_frame
from postdate.errors import PostdateError, QueueNotFound, TransportError, TransportUnreachable
from postdate.ports import ServerFacts

_RESOURCE_LOCKED: Final = 405
_NOWHERE: Final = "postdate.doctor.nowhere"
"""A routing key without a queue: what is published to it is dropped."""


# --- what the server is -----------------------------------------------------------------------------------------------


async def server_facts(login: Login, within_seconds: float) -> ServerFacts:
    """See :meth:`postdate.ports.Transport.server_facts`; over a connection of its own.

    Args:
        login: where to, and as whom.
        within_seconds: how long connecting may take.
    """
    link = await AmqpConnection.open(login, within_seconds)
    try:
        blocked = await _why_blocked(link)
        settings = {} if blocked is None else {"blocked": blocked}
        product, version = link.server.get("product", "an AMQP broker"), link.server.get("version", "without a version")
        return ServerFacts(product, version, settings=settings)
    finally:
        if link.blocked is None:
            await link.close()
        else:  # it reads nothing any more, so it would not answer
            await link.abort()


async def _why_blocked(link: AmqpConnection) -> str | None:
    """Return why the broker takes no messages; empty when it takes them, ``None`` when it does not say.

    It says so only to those who publish. So an empty message is published that no queue gets.
    """
    probe = await link.open_channel(_Probe)
    probe.publish()
    with anyio.move_on_after(ANSWERS_WITHIN_SECONDS) as scope:
        await probe.settled.wait()
    if scope.cancelled_caught:
        raise TransportUnreachable(f"{link.login.place} did not answer a message within {ANSWERS_WITHIN_SECONDS:g} s")
    if link.ended is not None:
        raise link.ended
    if link.blocked is not None:
        return link.blocked or "it does not say why"
    return "" if probe.went_on else None


class _Probe(Channel):
    """Publishes once and asks for something else: a broker that takes no messages says that, and does not go on."""

    def __init__(self, link: AmqpConnection, number: int) -> None:
        super().__init__(link, number)
        self.settled = asyncio.Event()
        self.went_on = False

    def publish(self) -> None:
        routed_nowhere = b"\0\0" + wire.short_text("") + wire.short_text(_NOWHERE) + b"\0"
        no_properties = bytes(2)
        size = HEADER_FRAME.size - FRAME.size + len(no_properties)
        header = HEADER_FRAME.pack(wire.HEADER, self.number, size, wire.BASIC_PUBLISH[0], 0, 0)
        self.link.write(
            method_frame(self.number, wire.BASIC_PUBLISH, routed_nowhere)
            + header
            + no_properties
            + wire.END
            + method_frame(self.number, wire.CONFIRM_SELECT, b"\0")
        )

    @override
    def on_method(self, method: Method, payload: bytes) -> None:
        """Take note that the broker goes on."""
        self.went_on = True
        self.settled.set()

    @override
    def on_block(self) -> None:
        """Take note that it does not."""
        self.settled.set()

    @override
    def on_end(self, error: PostdateError) -> None:
        """Take note that it refuses to say."""
        self.settled.set()


# --- how long queues are ----------------------------------------------------------------------------------------------


async def lengths_of(link: AmqpConnection, destinations: Sequence[str]) -> Mapping[str, int]:
    """See :meth:`postdate.ports.Transport.lengths_of`.

    An exchange holds no messages: the length of one that exists is 0, whether or not it leads to a queue.
    """
    lengths: dict[str, int] = {}
    for destination in destinations:
        with suppress(QueueNotFound):
            lengths[destination] = await _length_of(link, parse_address(destination))
    return lengths


async def _length_of(link: AmqpConnection, address: PublishAddress) -> int:
    if not address.exchange:
        return await _queue_length(link, address.routing_key)
    if address.or_queue:
        with suppress(QueueNotFound):
            return await _queue_length(link, address.routing_key)
    try:
        await declare_exchange_passively(link, address.exchange)
    except ChannelClosed as error:
        raise _refusal(f"exchange {address.exchange!r}", error) from error
    return 0


async def _queue_length(link: AmqpConnection, queue: str) -> int:
    channel = await link.open_channel(Channel)
    passive = b"\x01"
    arguments = b"\0\0" + wire.short_text(queue) + passive + bytes(4)
    try:
        answer = await channel.call(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)
    except ChannelClosed as error:
        if error.reply_code == _RESOURCE_LOCKED:  # another connection's own queue: it is there, and not to be counted
            return 0
        raise _refusal(f"queue {queue!r}", error) from error
    finally:
        channel.close(TransportUnreachable("this channel has done its work"))
    answer.short_text()
    return answer.unsigned(4)


def _refusal(what: str, error: ChannelClosed) -> PostdateError:
    if error.reply_code == NOT_FOUND:
        return QueueNotFound(f"there is no {what}")
    return TransportError(f"{what} cannot be looked at: {error.reply_code} {error.text}")
