"""Facts that a broker tells over AMQP: product, whether it blocks publishers, and lengths of given queues.

AMQP has no list of queues, no clock, and no query for a queue's type that might not create the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import PublishAddress, parse_address
from postdate.backends.rabbitmq.connection import NOT_FOUND, AmqpConnection, Channel, ChannelClosed
from postdate.backends.rabbitmq.login import Login
from postdate.backends.rabbitmq.topology import declare_exchange_passively, queue_length
from postdate.backends.rabbitmq.wire import FRAME, HEADER_FRAME, method_frame
from postdate.errors import PostdateError, QueueNotFound, TransportError, TransportUnreachable
from postdate.ports import ServerFacts

_RESOURCE_LOCKED: Final = 405
_NOWHERE: Final = "postdate.doctor.nowhere"
"""A routing key without a queue: messages to it are dropped."""


# --- what the server is -----------------------------------------------------------------------------------------------


async def server_facts(login: Login, within_seconds: float) -> ServerFacts:
    """Ask over a connection of its own."""
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
    """Return why the broker blocks publishers; empty when it does not, ``None`` when it gives no answer.

    It tells only connections that publish. So an empty message is published that is routed to no queue.
    """
    probe = await link.open_channel(_Probe)
    routed_nowhere, no_properties = b"\0\0" + wire.short_text("") + wire.short_text(_NOWHERE) + b"\0", bytes(2)
    size = HEADER_FRAME.size - FRAME.size + len(no_properties)
    header = HEADER_FRAME.pack(wire.HEADER, probe.number, size, wire.BASIC_PUBLISH[0], 0, 0)
    link.write(method_frame(probe.number, wire.BASIC_PUBLISH, routed_nowhere) + header + no_properties + wire.END)
    try:
        await probe.call(wire.CONFIRM_SELECT, b"\0", wire.CONFIRM_SELECT_OK)
    except ChannelClosed:  # it refuses to say
        return None
    except _TakesNothing as refusal:
        return str(refusal)
    return ""


class _TakesNothing(TransportUnreachable):
    """The broker blocks publishers; the text says why."""


class _Probe(Channel):
    """Stops waiting for an answer once the broker says that it blocks publishers: it reads nothing more then."""

    @override
    def on_block(self) -> None:
        if self.link.blocked is not None:
            self.end(_TakesNothing(self.link.blocked or "it does not say why"))


# --- how long queues are ----------------------------------------------------------------------------------------------


async def lengths_of(link: AmqpConnection, destinations: Sequence[str]) -> Mapping[str, int]:
    """Return the lengths of queues; 0 for an exchange that exists."""
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
    try:
        return await queue_length(link, queue)
    except ChannelClosed as error:
        if error.reply_code == _RESOURCE_LOCKED:  # another connection's exclusive queue: it exists, without a length
            return 0
        raise _refusal(f"queue {queue!r}", error) from error


def _refusal(what: str, error: ChannelClosed) -> PostdateError:
    if error.reply_code == NOT_FOUND:
        return QueueNotFound(f"there is no {what}")
    return TransportError(f"{what} cannot be looked at: {error.reply_code} {error.text}")
