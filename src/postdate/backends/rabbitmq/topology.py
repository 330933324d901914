"""What is declared in the broker: queues, and what programs without Postdate delay messages by. Source: ADR 0009."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.connection import (
    ANSWERS_WITHIN_SECONDS,
    PRECONDITION_FAILED,
    AmqpConnection,
    ChannelClosed,
)
from postdate.backends.rabbitmq.delays import due_exchange, expired_queue, intake_queue
from postdate.errors import ConfigurationError
from postdate.ports import DelayExchange
from postdate.ports.intake import DUE_EXCHANGE_TYPES

log = logging.getLogger("postdate.rabbitmq")

_PASSIVE: Final = b"\x01"
_DURABLE: Final = b"\x02"
_COMMAND_INVALID: Final = 503


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
    try:
        await _declare_exchange(link, exchange, kind)
    except ChannelClosed as error:
        if error.reply_code not in {PRECONDITION_FAILED, _COMMAND_INVALID}:
            raise
        raise ConfigurationError(
            f"exchange {exchange!r} cannot be declared as a durable {kind} exchange: {error.text}; delete it if it is "
            f"the one of the plugin, or choose another name with intake.exchange"
        ) from error


async def declare_due_exchange(link: AmqpConnection, exchange: str, kind: str) -> None:
    """Create the exchange for due messages; one of this type that exists stays as it is, whatever else it has.

    Raises:
        ConfigurationError: there is one of another type.
        ChannelClosed, TransportUnavailable: see :func:`declare_exchange`.
    """
    try:
        await _declare_exchange(link, exchange, kind)
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
    names = wire.short_text(queue) + wire.short_text(exchange) + wire.short_text("")
    await link.ask(wire.QUEUE_BIND, b"\0\0" + names + b"\0" + wire.table({}), wire.QUEUE_BIND_OK)


async def declare_exchange_passively(
    link: AmqpConnection, exchange: str, within_seconds: float = ANSWERS_WITHIN_SECONDS
) -> None:
    """Return if the exchange exists.

    Raises:
        ChannelClosed: it does not (404), or we may not know.
        TransportUnavailable: the server does not answer.
    """
    arguments = b"\0\0" + wire.short_text(exchange) + wire.short_text("direct") + _PASSIVE + bytes(4)
    await link.ask(wire.EXCHANGE_DECLARE, arguments, wire.EXCHANGE_DECLARE_OK, within_seconds)


async def _declare_exchange(link: AmqpConnection, exchange: str, kind: str) -> None:
    arguments = b"\0\0" + wire.short_text(exchange) + wire.short_text(kind) + _DURABLE + wire.table({})
    await link.ask(wire.EXCHANGE_DECLARE, arguments, wire.EXCHANGE_DECLARE_OK)


async def declare_queue(link: AmqpConnection, queue: str, queue_type: str, **more: str) -> None:
    """Create a durable queue; one that exists stays as it is.

    Args:
        link: the connection.
        queue: its name.
        queue_type: of RabbitMQ.
        more: arguments of the declaration, with underscores for hyphens.

    Raises:
        ChannelClosed: we may not, or the name is reserved.
        TransportUnavailable: the server does not answer.
    """
    is_there = False
    with suppress(ChannelClosed):
        await queue_length(link, queue)
        is_there = True
    named = {name.replace("_", "-"): more[name] for name in more}
    table = wire.table({"x-queue-type": queue_type, **({} if is_there else named)})
    arguments = b"\0\0" + wire.short_text(queue) + _DURABLE + table
    try:
        await link.ask(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)
    except ChannelClosed as error:  # it stays as it is, with its messages, all of it
        if is_there and error.reply_code == PRECONDITION_FAILED and "'x-queue-type'" in error.text:
            log.warning("queue %s exists and is not of the type %s: left as it is (%s)", queue, queue_type, error.text)
        elif not is_there and error.reply_code != PRECONDITION_FAILED:
            raise


async def queue_length(link: AmqpConnection, queue: str) -> int:
    """Return how many messages wait in a queue.

    Raises:
        ChannelClosed: there is no such queue (404), or we may not know.
        TransportUnavailable: the server does not answer.
    """
    arguments = b"\0\0" + wire.short_text(queue) + _PASSIVE + bytes(4)
    answer = await link.ask(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)
    answer.short_text()
    return answer.unsigned(4)
