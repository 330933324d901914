"""Destinations: a queue, or an exchange and a routing key.

``orders`` is the queue ``orders``. ``exchange:NAME/KEY`` is the exchange ``NAME`` with the routing key ``KEY``; the
key may be missing. In the name, ``%`` and ``/`` are written ``%25`` and ``%2F``; in the key, ``%`` is; any other
character may be written as the percent-escapes of its UTF-8 bytes, or as it is. ``exchange-or-queue:NAME/KEY`` is the
same, but a message that the exchange routes to no queue goes to the queue ``KEY``. ``event:NAME`` is the fanout
exchange of the event ``NAME``; without a bound queue, or without the exchange, nobody subscribes to it and the message
is dropped. A queue whose own name begins with one of these words is reached through the default exchange, whose name
is empty: ``exchange:/exchange:odd``.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from postdate.backends.rabbitmq.wire import SHORT_TEXT_LIMIT
from postdate.errors import QueueNotFound

PREFIX = "exchange:"
OR_QUEUE_PREFIX = "exchange-or-queue:"
EVENT_PREFIX = "event:"
PREFIXES = (PREFIX, OR_QUEUE_PREFIX, EVENT_PREFIX)
EVENT_EXCHANGE_PREFIX = "postdate.event."
"""Prefix of event exchanges."""

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class PublishAddress(NamedTuple):
    """Where a message is published; the default exchange has an empty name and routes to the queue that the key names.

    ``or_queue``: if the exchange routes to no queue, publish to the queue that the key names.
    """

    exchange: str
    routing_key: str
    or_queue: bool = False


def parse_address(destination: str) -> PublishAddress:
    """Return the address that a destination means; raises `QueueNotFound` for a malformed escape or too long a name."""
    if destination.startswith(EVENT_PREFIX):
        address = PublishAddress(EVENT_EXCHANGE_PREFIX + destination.removeprefix(EVENT_PREFIX), "")
    elif destination.startswith(PREFIXES):
        or_queue = destination.startswith(OR_QUEUE_PREFIX)
        exchange, _, key = destination.partition(":")[2].partition("/")
        address = PublishAddress(_unescape(exchange, destination), _unescape(key, destination), or_queue)
    else:
        address = PublishAddress("", destination)
    for part in (address.exchange, address.routing_key):
        size = len(part.encode())
        if size > SHORT_TEXT_LIMIT:
            raise QueueNotFound(
                f"{destination!r} cannot exist: a name of {size} bytes in UTF-8; AMQP allows {SHORT_TEXT_LIMIT}"
            )
    return address


def _unescape(part: str, destination: str) -> str:
    if _BAD_ESCAPE.search(part):
        raise QueueNotFound(f"{destination!r} is no address: '%' must be written %25 in {PREFIX}NAME/KEY")
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError as error:
        raise QueueNotFound(f"{destination!r} is no address: its escapes are not UTF-8: {error}") from error


def exchange_address(exchange: str, routing_key: str = "", *, or_queue: bool = False) -> str:
    """Return the destination of an exchange and a routing key."""
    name = exchange.replace("%", "%25").replace("/", "%2F")
    return f"{OR_QUEUE_PREFIX if or_queue else PREFIX}{name}/{routing_key.replace('%', '%25')}"


def queue_address(queue: str) -> str:
    """Return the destination of a queue, even when its name begins like another kind of destination."""
    return exchange_address("", queue) if queue.startswith(PREFIXES) else queue
