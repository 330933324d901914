"""The properties of a message as bytes: decoded, encoded, and passed on unchanged.

A message of another program that is only delayed leaves as it came, byte for byte, by two headers:

``amqp.as_it_came``
    All properties, base64. The other headers are then only for people to read.
``amqp.as_it_came.to``
    The destination for which that holds. For any other one, such as the error queue, the message is encoded as ours.

Source: ADR 0009.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from postdate.backends.rabbitmq.wire import Arguments, short_bytes
from postdate.messages import Envelope

ORIGINAL_PROPERTIES: Final = "amqp.as_it_came"
ONLY_TO: Final = "amqp.as_it_came.to"

NUMBER_BYTES: Final = {"delivery_mode": 1, "priority": 1, "timestamp": 8}
BITS: Final = {
    "content_type": 0x8000,
    "content_encoding": 0x4000,
    "headers": 0x2000,
    "delivery_mode": 0x1000,
    "priority": 0x0800,
    "correlation_id": 0x0400,
    "reply_to": 0x0200,
    "expiration": 0x0100,
    "message_id": 0x0080,
    "timestamp": 0x0040,
    "type": 0x0020,
    "user_id": 0x0010,
    "app_id": 0x0008,
    "cluster_id": 0x0004,
}
"""The flag of each property, in the order of encoding."""


def parts_of(properties: bytes) -> dict[str, bytes]:
    """Return the properties of a message by name, each still encoded; raise `MalformedFrame`."""
    arguments = Arguments(properties, 0)
    flags = arguments.unsigned(2)
    parts: dict[str, bytes] = {}
    for name, bit in BITS.items():
        if flags & bit:
            start = arguments.position
            if name == "headers":
                arguments.long_bytes()
            elif name in NUMBER_BYTES:
                arguments.read(NUMBER_BYTES[name])
            else:
                arguments.short_bytes()
            parts[name] = properties[start : arguments.position]
    return parts


def join_parts(parts: Mapping[str, bytes]) -> bytes:
    """Return encoded properties from their parts, the reverse of :func:`parts_of`."""
    names = [name for name in BITS if name in parts]
    return sum(BITS[name] for name in names).to_bytes(2, "big") + b"".join(parts[name] for name in names)


def values_of(properties: bytes) -> dict[str, Any]:
    """Return the properties of a message by name: bytes, or numbers."""
    return {name: _value(name, part) for name, part in parts_of(properties).items()}


def _value(name: str, part: bytes) -> bytes | int:
    if name in NUMBER_BYTES:
        return int.from_bytes(part, "big")
    return part[4 if name == "headers" else 1 :]


def encode_original_properties(properties: bytes) -> dict[str, str]:
    """Return the header that keeps the properties of a message."""
    return {ORIGINAL_PROPERTIES: base64.b64encode(properties).decode()}


def decode_original_properties(headers: Mapping[str, str]) -> bytes | None:
    """Return the stored properties; ``None`` when none were stored. Raise `ValueError` when they are damaged."""
    encoded = headers.get(ORIGINAL_PROPERTIES)
    return None if encoded is None else base64.b64decode(encoded, validate=True)


def unchanged_properties(envelope: Envelope, user: str) -> bytes | None:
    """Return the properties of a message that leaves as it came; ``None`` for any other.

    ``user`` is the user of the connection: RabbitMQ closes the channel because of a message with another user's name.
    """
    headers = envelope.headers
    if ORIGINAL_PROPERTIES not in headers or headers.get(ONLY_TO) != envelope.destination:
        return None
    try:
        properties = decode_original_properties(headers)
        parts = parts_of(properties or b"")
    except Exception:  # noqa: BLE001 - damaged: it leaves as a message of ours, with all that was kept
        return None
    if parts.get("user_id", short_bytes(user.encode())) == short_bytes(user.encode()):
        return properties
    del parts["user_id"]
    return join_parts(parts)


def redirect(envelope: Envelope, destination: str) -> Envelope:
    """Return the message for an equivalent destination."""
    headers = envelope.headers
    if headers.get(ONLY_TO) == envelope.destination:
        headers = {**headers, ONLY_TO: destination}
    return replace(envelope, destination=destination, headers=headers)
