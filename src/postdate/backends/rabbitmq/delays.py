"""Messages that other programs delay: ``x-delay`` in the table of headers, as with the delayed-message plugin.

``x-delay``
    Milliseconds from the arrival at the service: a number of any type, or its digits as text. Without it, or below
    zero: at once.
``x-delay-exchange``, ``x-delay-routing-key``
    The destination when due; either may be missing. A routing key alone means the queue of that name.
``x-delay-id``
    The id of the delayed message, for ``postdate messages``; a known id is not stored again.

A message without a destination goes to the exchange ``{name}.due`` with its own routing key. If that exchange routes to
no queue, the message goes to the queue that the key names. Pure: bytes in, values out. Source: ADR 0009.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast

from postdate.backends.rabbitmq import properties as rabbitmq_properties
from postdate.backends.rabbitmq.address import exchange_address, queue_address
from postdate.backends.rabbitmq.content import (
    ONLY_TO,
    decode_original_properties,
    encode_original_properties,
    join_parts,
    parts_of,
)
from postdate.backends.rabbitmq.wire import Arguments, MalformedFrame, elements_of, fields_of, long_bytes, short_bytes
from postdate.clock import EARLIEST
from postdate.errors import InvalidHeaders, InvalidMessage, InvalidTimestamp
from postdate.messages import DESTINATION_LIMIT, DelayedMessage, Envelope, Headers, format_timestamp, new_message_id

if TYPE_CHECKING:
    from postdate.backends.rabbitmq.consuming import Delivery

DELAY: Final = "x-delay"
TO_EXCHANGE: Final = "x-delay-exchange"
TO_ROUTING_KEY: Final = "x-delay-routing-key"
ID: Final = "x-delay-id"

EXCHANGE: Final = "amqp.exchange"
ROUTING_KEY: Final = "amqp.routing_key"
_DEATHS: Final = b"x-death"
_FIRST_DEATH: Final = b"x-first-death-"
_FIRST_DEATH_QUEUE: Final = b"x-first-death-queue"
_LAST_DEATH: Final = b"x-last-death-"
_NUMBER: Final = re.compile(r"\s*[+-]?[0-9]{1,30}(\.[0-9]{0,30})?\s*", re.ASCII)
_LARGEST_MILLISECONDS: Final = 10**15
"""Some 31,700 years: more than the calendar has left, and no overflow."""


def intake_queue(exchange: str) -> str:
    """Return the name of the queue in which messages wait for the service."""
    return f"{exchange}.intake"


def expired_queue(exchange: str) -> str:
    """Return the name of the queue, and of its exchange, for messages that expired in the intake queue."""
    return f"{exchange}.intake.expired"


def due_exchange(exchange: str) -> str:
    """Return the name of the exchange for due messages that name no other."""
    return f"{exchange}.due"


# --- messages as they arrive ------------------------------------------------------------------------------------------


def decode_intake_message(intake: str, queue: str, delivery: Delivery) -> rabbitmq_properties.DecodedMessage:
    """Return a message of the intake queue of exchange ``intake``, with everything needed to send it on unchanged.

    It gets a new id at every arrival, because its publisher's id need not be unique. A message from the error queue
    keeps its id.
    """
    route = Arguments(delivery.route, 0)
    exchange, key = route.short_bytes(), route.short_bytes()
    if not exchange:
        returned_message = rabbitmq_properties.decode_message(
            queue, delivery.properties, delivery.body, redelivered=delivery.redelivered
        )
        with suppress(ValueError):
            if decode_original_properties(returned_message.envelope.headers) is not None:
                return returned_message
    properties, counts = delivery.properties, dict[bytes, int]()
    headers: dict[str, str] = {}
    with suppress(MalformedFrame):  # Decoding it refuses it later, and then it goes to the error queue.
        if delivery.redelivered:
            properties, counts = _split_counts(properties)
        if exchange == expired_queue(intake).encode():
            properties, exchange = _restore_expired(properties, intake_queue(intake))
        headers = rabbitmq_properties.readable_headers(properties)
    headers |= dict(
        [rabbitmq_properties.header_of(EXCHANGE, exchange), rabbitmq_properties.header_of(ROUTING_KEY, key)]
    ) | encode_original_properties(properties)
    envelope = Envelope(queue, new_message_id(), headers, delivery.body)
    return rabbitmq_properties.DecodedMessage(
        envelope,
        max(counts.values(), default=None),
        has_id=False,
        counted_returns=counts.get(rabbitmq_properties.DELIVERY_COUNT, 0),
    )


def _split_counts(properties: bytes) -> tuple[bytes, dict[bytes, int]]:
    """Return the properties without a quorum queue's counters of returned messages, and the counters."""
    parts = parts_of(properties)
    fields = fields_of(parts.get("headers", bytes(4))[4:])
    counts = {
        each.name: each.value
        for each in fields
        if each.name in rabbitmq_properties.COUNTS and isinstance(each.value, int)
    }
    if not counts:
        return properties, counts
    remaining = b"".join(short_bytes(field.name) + field.raw for field in fields if field.name not in counts)
    parts["headers"] = long_bytes(remaining)
    if not remaining:
        del parts["headers"]
    return join_parts(parts), counts


def _restore_expired(properties: bytes, queue: str) -> tuple[bytes, bytes]:
    """Return an expired message's properties without the broker's changes, and the exchange it was published to.

    The broker moves the time to live into ``x-death``, before the entries of other queues.
    """
    parts = parts_of(properties)
    fields = fields_of(parts.get("headers", bytes(4))[4:])
    is_first_death = any(field.name == _FIRST_DEATH_QUEUE and field.value == queue.encode() for field in fields)
    exchange, remaining = b"", list[bytes]()
    for field in fields:
        raw = field.raw
        if field.name == _DEATHS and field.kind == b"A":
            other_deaths, death = _split_deaths(raw[5:], queue)
            raw = b"A" + long_bytes(other_deaths) if other_deaths else b""
            exchange = death.get("exchange", b"")
            parts["expiration"] = short_bytes(death.get("original-expiration", b"0"))
        elif field.name.startswith(_LAST_DEATH) or (is_first_death and field.name.startswith(_FIRST_DEATH)):
            raw = b""
        if raw:
            remaining.append(short_bytes(field.name) + raw)
    parts["headers"] = long_bytes(b"".join(remaining))
    if not remaining:
        del parts["headers"]
    return join_parts(parts), exchange


def _split_deaths(content: bytes, queue: str) -> tuple[bytes, Mapping[str, bytes]]:
    """Return the ``x-death`` entries of other queues, still encoded, and the text fields of this queue's."""
    other_deaths, own_death = b"", dict[str, bytes]()
    for element, death in elements_of(content):
        entry = cast("dict[str, Any]", death) if isinstance(death, dict) else {}  # publishers may write any value there
        if (entry.get("queue"), entry.get("reason")) == (queue.encode(), b"expired"):
            own_death = {name: value for name, value in entry.items() if isinstance(value, bytes)}
        else:
            other_deaths += element
    return other_deaths, own_death


# --- messages as they are stored --------------------------------------------------------------------------------------


def create_delayed_message(exchange: str, envelope: Envelope, now: datetime) -> DelayedMessage:
    """Return the delayed message of an envelope; its delay starts at ``now``.

    Raises:
        InvalidHeaders, InvalidTimestamp, InvalidMessage: its delay or destination is not valid; says what to do.
    """
    fields = _fields(envelope)
    destination, message_id = _destination(exchange, envelope, fields), _text(fields, ID)
    headers = {**envelope.headers, ONLY_TO: destination}
    if message_id:
        headers[Headers.MAY_REPEAT_SINCE] = format_timestamp(EARLIEST)
    return DelayedMessage(message_id or envelope.message_id, _due(fields, now), destination, headers, envelope.body)


def _fields(envelope: Envelope) -> Mapping[str, Any]:
    try:
        fields = fields_of(
            parts_of(decode_original_properties(envelope.headers) or bytes(2)).get("headers", bytes(4))[4:]
        )
    except (MalformedFrame, ValueError) as error:
        raise InvalidHeaders(f"the properties of the message cannot be read: {error}") from error
    return {field.name.decode(errors="replace"): field.value for field in reversed(fields)}


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    if (value := fields.get(name)) is None:
        return None
    try:
        return value.decode()
    except (AttributeError, UnicodeDecodeError) as error:
        raise InvalidHeaders(f"header {name!r} must be text in UTF-8, not {value!r}") from error


def _due(fields: Mapping[str, Any], now: datetime) -> datetime:
    milliseconds = _milliseconds(fields.get(DELAY, 0))
    try:
        return now + timedelta(milliseconds=max(0, milliseconds))
    except OverflowError as error:
        raise InvalidTimestamp(
            f"header {DELAY!r} is {milliseconds}: {milliseconds} milliseconds from now is after the year 9999"
        ) from error


def _milliseconds(value: Any) -> int:
    match value:
        case bool():
            number = None
        case bytes():
            text = value.decode(errors="replace")
            number = Decimal(text.strip()) if _NUMBER.fullmatch(text) else None
        case int() | float() | Decimal():
            number = value if math.isfinite(value) else None
        case _:
            number = None
    if number is None:
        raise InvalidHeaders(f"header {DELAY!r} must be a number of milliseconds, or its digits as text, not {value!r}")
    return math.ceil(min(number, _LARGEST_MILLISECONDS))


# --- destinations -----------------------------------------------------------------------------------------------------


def _destination(exchange: str, envelope: Envelope, fields: Mapping[str, Any]) -> str:
    target_exchange, key = _text(fields, TO_EXCHANGE), _text(fields, TO_ROUTING_KEY)
    if key is not None:
        target_exchange = target_exchange or ""
    elif (key := envelope.headers.get(ROUTING_KEY)) is None:
        raise InvalidMessage(
            f"its routing key is not UTF-8 ({envelope.headers.get(ROUTING_KEY + rabbitmq_properties.BASE64)} in "
            f"base64); name its destination with the headers {TO_EXCHANGE!r} and {TO_ROUTING_KEY!r}"
        )
    if target_exchange == exchange or (key == intake_queue(exchange) and not target_exchange):
        raise InvalidMessage(
            f"it would return to exchange {exchange!r} again and again: publish it to that exchange with its final "
            f"routing key, or name its destination with the headers {TO_EXCHANGE!r} and {TO_ROUTING_KEY!r}"
        )
    if target_exchange is None:
        address = exchange_address(due_exchange(exchange), key, or_queue=True)
    else:
        address = exchange_address(target_exchange, key) if target_exchange else queue_address(key)
    if len(address) > DESTINATION_LIMIT:
        raise InvalidMessage(
            f"exchange and routing key make an address of {len(address)} characters, at most {DESTINATION_LIMIT} "
            f"are allowed: {address[:60]!r}…; shorten them"
        )
    return address
