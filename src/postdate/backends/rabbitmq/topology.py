"""Declarations of queues, and of the exchanges through which other programs delay messages. Source: ADR 0009."""

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
from postdate.ports.transports import DUE_EXCHANGE_TYPES

log = logging.getLogger("postdate.rabbitmq")

_PASSIVE: Final = b"\x01"
_DURABLE: Final = b"\x02"
_COMMAND_INVALID: Final = 503


async def declare_intake(link: AmqpConnection, exchange: DelayExchange, queue_type: str) -> None:
    """Create an intake's queues and exchanges; existing ones stay. Raise as :func:`declare_exchange`.

    A message that expires before it was stored goes to a queue beside the intake queue, and is delayed nevertheless,
    because its time to live begins at its destination.
    """
    queue, expired = intake_queue(exchange.name), expired_queue(exchange.name)
    await declare_exchange(link, exchange.name, "fanout")
    await declare_exchange(link, expired, "fanout")
    await declare_due_exchange(link, due_exchange(exchange.name), exchange.due_type)
    await declare_queue(link, expired, queue_type)
    quorum_arguments = (
        {"x_dead_letter_strategy": "at-least-once", "x_overflow": "reject-publish"} if queue_type == "quorum" else {}
    )
    await declare_queue(link, queue, queue_type, x_dead_letter_exchange=expired, **quorum_arguments)
    await bind_queue(link, expired, expired)
    await bind_queue(link, queue, exchange.name)


async def declare_exchange(link: AmqpConnection, exchange: str, kind: str) -> None:
    """Create a durable exchange.

    Raises:
        ConfigurationError: an exchange with other properties exists, or there is no such type.
        ChannelClosed: the user has no permission.
    """
    try:
        await _declare_exchange(link, exchange, kind)
    except ChannelClosed as error:
        if error.reply_code not in {PRECONDITION_FAILED, _COMMAND_INVALID}:
            raise
        raise ConfigurationError(
            f"exchange {exchange!r} cannot be declared as a durable {kind} exchange: {error.text}; delete it if the "
            f"plugin declared it, or choose another name with intake.exchange"
        ) from error


async def declare_due_exchange(link: AmqpConnection, exchange: str, kind: str) -> None:
    """Create the exchange for due messages; an existing one must have this type, and keeps its other properties."""
    try:
        await _declare_exchange(link, exchange, kind)
    except ChannelClosed as error:
        if error.reply_code == PRECONDITION_FAILED and _has_other_type(error.text):
            raise ConfigurationError(
                f"exchange {exchange!r} exists and is not of the type {kind!r} that intake.due_exchange_type asks for: "
                f"{error.text}; set it to the type that it has, or delete the exchange, with its bindings, first"
            ) from error
        with suppress(ChannelClosed):  # another type, or no permission: it is sufficient that it exists
            await declare_exchange_passively(link, exchange)
            return
        raise


def _has_other_type(text: str) -> bool:
    """Return whether the type is the reason; a plugin's type, which no setting can name, is accepted."""
    _, separator, current = text.partition("arg 'type'")
    return bool(separator) and any(f"current is '{each}'" in current for each in DUE_EXCHANGE_TYPES)


async def bind_queue(link: AmqpConnection, queue: str, exchange: str) -> None:
    """Bind a queue to a fanout exchange; raise `ChannelClosed` when either is missing, or without permission."""
    names = wire.short_text(queue) + wire.short_text(exchange) + wire.short_text("")
    await link.request(wire.QUEUE_BIND, b"\0\0" + names + b"\0" + wire.table({}), wire.QUEUE_BIND_OK)


async def declare_exchange_passively(
    link: AmqpConnection, exchange: str, within_seconds: float = ANSWERS_WITHIN_SECONDS
) -> None:
    """Return if the exchange exists; otherwise raise `ChannelClosed` (404)."""
    arguments = b"\0\0" + wire.short_text(exchange) + wire.short_text("direct") + _PASSIVE + bytes(4)
    await link.request(wire.EXCHANGE_DECLARE, arguments, wire.EXCHANGE_DECLARE_OK, within_seconds)


async def _declare_exchange(link: AmqpConnection, exchange: str, kind: str) -> None:
    arguments = b"\0\0" + wire.short_text(exchange) + wire.short_text(kind) + _DURABLE + wire.table({})
    await link.request(wire.EXCHANGE_DECLARE, arguments, wire.EXCHANGE_DECLARE_OK)


async def declare_queue(link: AmqpConnection, queue: str, queue_type: str, **extra_arguments: str) -> None:
    """Create a durable queue; an existing one is not changed, with a warning if it is of another type.

    An existing one needs no permission to configure it. Raises `ChannelClosed` when a new one is refused.
    ``extra_arguments``: arguments of the declaration, with underscores for hyphens.
    """
    exists = await _has_queue(link, queue)
    named_arguments = {name.replace("_", "-"): extra_arguments[name] for name in extra_arguments}
    table = wire.table({"x-queue-type": queue_type, **({} if exists else named_arguments)})
    arguments = b"\0\0" + wire.short_text(queue) + _DURABLE + table
    try:
        await link.request(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)
    except ChannelClosed as error:  # an existing queue stays with its messages
        if exists and error.reply_code == PRECONDITION_FAILED and "'x-queue-type'" in error.text:
            log.warning("queue %s exists and is not of the type %s: left as it is (%s)", queue, queue_type, error.text)
        elif not exists and not await _has_queue(link, queue):  # It was not created meanwhile either.
            raise


async def _has_queue(link: AmqpConnection, queue: str) -> bool:
    with suppress(ChannelClosed):
        await queue_length(link, queue)
        return True
    return False


async def queue_length(link: AmqpConnection, queue: str) -> int:
    """Return the number of ready messages; raise `ChannelClosed` (404) when there is no such queue."""
    arguments = b"\0\0" + wire.short_text(queue) + _PASSIVE + bytes(4)
    answer = await link.request(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)
    answer.short_text()
    return answer.unsigned(4)
