"""What is declared in the broker so that programs without Postdate can delay messages. Source: ADR 0009."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.connection import (
    PRECONDITION_FAILED,
    AmqpConnection,
    Channel,
    ChannelClosed,
    declare_exchange_passively,
    declare_queue,
)
from postdate.backends.rabbitmq.delays import due_exchange, expired_queue, intake_queue
from postdate.errors import ConfigurationError, TransportUnreachable
from postdate.ports import DelayExchange
from postdate.ports.intake import DUE_EXCHANGE_TYPES

_DURABLE: Final = b"\x02"
_COMMAND_INVALID: Final = 503
_DONE: Final = "this channel has done its work"


async def declare_intake(link: AmqpConnection, exchange: DelayExchange, queue_type: str) -> None:
    """Create everything that belongs to an intake, and leave what is there.

    A message whose own time to live ends before it was stored is kept, in a queue beside the intake queue: that time
    begins when it has reached its destination.

    Raises:
        ConfigurationError, ChannelClosed, TransportUnavailable: see :func:`declare_exchange`.
    """
    queue, expired = intake_queue(exchange.name), expired_queue(exchange.name)
    await declare_exchange(link, exchange.name, "fanout")
    await declare_exchange(link, expired, "fanout")
    await declare_due_exchange(link, due_exchange(exchange.name), exchange.due_type)
    await declare_queue(link, expired, queue_type)
    at_least_once = {"x_dead_letter_strategy": "at-least-once", "x_overflow": "reject-publish"}
    more = at_least_once if queue_type == "quorum" else {}
    await declare_queue(link, queue, queue_type, x_dead_letter_exchange=expired, **more)
    await bind_queue(link, expired, expired)
    await bind_queue(link, queue, exchange.name)


async def subscribe(link: AmqpConnection, queue: str, exchange: str) -> None:
    """Let a queue receive what is published to the exchange of an event, which is created if it is missing.

    Raises:
        ConfigurationError, ChannelClosed, TransportUnavailable: see :func:`declare_exchange` and :func:`bind_queue`.
    """
    await declare_exchange(link, exchange, "fanout")
    await bind_queue(link, queue, exchange)


async def declare_exchange(link: AmqpConnection, exchange: str, kind: str) -> None:
    """Create a durable exchange.

    Raises:
        ConfigurationError: there is one already that is otherwise, or there is no such type.
        ChannelClosed: we may not.
        TransportUnavailable: the server does not answer.
    """
    channel = await link.open_channel(Channel)
    arguments = b"\0\0" + wire.short_text(exchange) + wire.short_text(kind) + _DURABLE + wire.table({})
    try:
        await channel.call(wire.EXCHANGE_DECLARE, arguments, wire.EXCHANGE_DECLARE_OK)
    except ChannelClosed as error:
        if error.reply_code not in {PRECONDITION_FAILED, _COMMAND_INVALID}:
            raise
        raise ConfigurationError(
            f"exchange {exchange!r} cannot be declared as a durable {kind} exchange: {error.text}; delete it if it is "
            f"the one of the plugin, or choose another name with intake.exchange"
        ) from error
    finally:
        channel.close(TransportUnreachable(_DONE))


async def declare_due_exchange(link: AmqpConnection, exchange: str, kind: str) -> None:
    """Create the exchange for due messages; one of this type that exists stays as it is, whatever else it has.

    Raises:
        ConfigurationError: there is one of another type.
        ChannelClosed, TransportUnavailable: see :func:`declare_exchange`.
    """
    channel = await link.open_channel(Channel)
    arguments = b"\0\0" + wire.short_text(exchange) + wire.short_text(kind) + _DURABLE + wire.table({})
    try:
        await channel.call(wire.EXCHANGE_DECLARE, arguments, wire.EXCHANGE_DECLARE_OK)
    except ChannelClosed as error:
        if error.reply_code == PRECONDITION_FAILED and _is_of_another_type(error.text):
            raise ConfigurationError(
                f"exchange {exchange!r} exists and is not of the type {kind!r} that intake.due_exchange_type asks for: "
                f"{error.text}; set it to the type that it has, or delete the exchange, with its bindings, first"
            ) from error
        with suppress(ChannelClosed):  # otherwise than ours, or not ours to create: it will do if it is there
            await declare_exchange_passively(link, exchange)
            return
        raise
    finally:
        channel.close(TransportUnreachable(_DONE))


def _is_of_another_type(text: str) -> bool:
    """Return whether that is why; a type of a plugin, which no setting can name, is what somebody wanted."""
    _, found, current = text.partition("arg 'type'")
    return bool(found) and any(f"current is '{each}'" in current for each in DUE_EXCHANGE_TYPES)


async def bind_queue(link: AmqpConnection, queue: str, exchange: str) -> None:
    """Let a queue receive everything that is published to a fanout exchange.

    Raises:
        ChannelClosed: one of the two is missing, or we may not.
        TransportUnavailable: the server does not answer.
    """
    channel = await link.open_channel(Channel)
    names = wire.short_text(queue) + wire.short_text(exchange) + wire.short_text("")
    try:
        await channel.call(wire.QUEUE_BIND, b"\0\0" + names + b"\0" + wire.table({}), wire.QUEUE_BIND_OK)
    finally:
        channel.close(TransportUnreachable(_DONE))
