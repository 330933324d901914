"""What a destination means: a queue, or an exchange and a routing key.

``orders`` is the queue ``orders``. ``exchange:NAME/KEY`` is the exchange ``NAME`` with the routing key ``KEY``; the
key may be missing. In the name, ``%`` and ``/`` are written ``%25`` and ``%2F``; in the key, ``%`` is; any other
character may be written as the percent-escapes of its UTF-8 bytes, or as it is. ``exchange-or-queue:NAME/KEY`` is the
same, and where that exchange leads to no queue, the queue ``KEY``. ``event:NAME`` is the fanout exchange of the events
``NAME``, which need not lead anywhere, nor be there: nobody wants them then. A queue whose own name begins with one of
these words is reached through the default exchange, which has no name: ``exchange:/exchange:odd``.
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
"""Begins the names of the exchanges of events."""

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class PublishAddress(NamedTuple):
    """Where a message is published.

    Args:
        exchange: its name; empty for the default exchange, which routes to the queue that is named as the key.
        routing_key: of the message.
        or_queue: where the exchange leads to no queue, the message goes to the queue that is named as the key.
    """

    exchange: str
    routing_key: str
    or_queue: bool = False


def parse_address(destination: str) -> PublishAddress:
    """Return what a destination means.

    Raises:
        QueueNotFound: nothing can have this address: an escape is malformed, or a name is longer than AMQP allows.
    """
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
    """Return the destination that means an exchange and a routing key; with ``or_queue``, or the queue named so."""
    name = exchange.replace("%", "%25").replace("/", "%2F")
    return f"{OR_QUEUE_PREFIX if or_queue else PREFIX}{name}/{routing_key.replace('%', '%25')}"


def queue_address(queue: str) -> str:
    """Return the destination that means a queue, whatever its name looks like."""
    return exchange_address("", queue) if queue.startswith(PREFIXES) else queue
