"""Destinations: a queue, or an exchange and a routing key; below, the URL of a server.

``orders`` is the queue ``orders``. ``exchange:NAME/KEY`` is the exchange ``NAME`` with the routing key ``KEY``; the key
may be missing. In the name, ``%`` and ``/`` are written ``%25`` and ``%2F``; in the key, only ``%`` is. Any other
character may be written as the percent-escapes of its UTF-8 bytes, or unescaped.

``exchange-or-queue:NAME/KEY`` is the same, but a message that the exchange routes to no queue goes to the queue
``KEY``. ``event:NAME`` is the fanout exchange of the event ``NAME``. Without a bound queue, or without the exchange,
the event has no subscribers and the message is dropped.

A queue whose own name begins with one of these words is reached through the default exchange, whose name is empty:
``exchange:/exchange:odd``.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, unquote_to_bytes, urlsplit

from postdate.backends.rabbitmq.wire import SHORT_TEXT_LIMIT
from postdate.errors import ConfigurationError, QueueNotFound

PREFIX = "exchange:"
OR_QUEUE_PREFIX = "exchange-or-queue:"
EVENT_PREFIX = "event:"
PREFIXES = (PREFIX, OR_QUEUE_PREFIX, EVENT_PREFIX)
EVENT_EXCHANGE_PREFIX = "postdate.event."
"""Prefix of event exchanges."""

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class PublishAddress(NamedTuple):
    """The place to publish to. The default exchange has an empty name and routes to the queue that the key names.

    ``or_queue``: if the exchange routes to no queue, publish to the queue that the key names.
    """

    exchange: str
    routing_key: str
    or_queue: bool = False


def parse_address(destination: str) -> PublishAddress:
    """Return the address that a destination means; raise `QueueNotFound` for a malformed escape or too long a name."""
    if destination.startswith(EVENT_PREFIX):
        address = PublishAddress(EVENT_EXCHANGE_PREFIX + destination.removeprefix(EVENT_PREFIX), "")
    elif destination.startswith(PREFIXES):
        or_queue = destination.startswith(OR_QUEUE_PREFIX)
        exchange, _, key = destination.partition(":")[2].partition("/")
        address = PublishAddress(_unescape(exchange, destination), _unescape(key, destination), or_queue)
    else:
        address = PublishAddress("", destination)
    for part in (address.exchange, address.routing_key):
        if (size := len(part.encode())) > SHORT_TEXT_LIMIT:
            raise QueueNotFound(
                f"{destination!r} cannot exist: the name has {size} bytes in UTF-8; AMQP allows {SHORT_TEXT_LIMIT}"
            )
    return address


def _unescape(part: str, destination: str) -> str:
    if _BAD_ESCAPE.search(part):
        raise QueueNotFound(f"{destination!r} is not an address: '%' must be written %25 in {PREFIX}NAME/KEY")
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError as error:
        raise QueueNotFound(f"{destination!r} is not an address: its escapes are not UTF-8: {error}") from error


def exchange_address(exchange: str, routing_key: str = "", *, or_queue: bool = False) -> str:
    """Return the destination of an exchange and a routing key."""
    name = exchange.replace("%", "%25").replace("/", "%2F")
    return f"{OR_QUEUE_PREFIX if or_queue else PREFIX}{name}/{routing_key.replace('%', '%25')}"


def queue_address(queue: str) -> str:
    """Return the destination of a queue, even when its name begins like another kind of destination."""
    return exchange_address("", queue) if queue.startswith(PREFIXES) else queue


# --- the server: the parts of an AMQP URL -----------------------------------------------------------------------------


_PORTS = {"amqp": 5672, "amqps": 5671}
_MANAGEMENT_PORTS = {5672: 15672, 5671: 15671}
_OPTIONS = ("heartbeat", "management", "cacertfile", "certfile", "keyfile")
HEARTBEAT_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Login:
    """Server, virtual host and account.

    A server that is silent for two ``heartbeat_seconds`` is considered dead; 0: never. ``management_port`` is the port
    of the interface that reports the limits of queues; 0: it is not used.
    """

    host: str
    port: int
    virtual_host: str
    user: str
    password: str = field(repr=False)
    heartbeat_seconds: int = HEARTBEAT_SECONDS
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    management_port: int = 0

    @property
    def description(self) -> str:
        """The server for texts, without secrets."""
        return f"RabbitMQ at {self.host}:{self.port} (virtual host {self.virtual_host!r}, user {self.user!r})"


def parse_url(url: str) -> Login:
    """Return the parts of ``amqp://user:password@host:port/virtual%20host?heartbeat=20``.

    ``amqps`` is AMQP over TLS; ``cacertfile``, ``certfile`` and ``keyfile`` are then paths of PEM files. ``management``
    is the port of the management interface; by default the usual one if AMQP's port is the usual one. The text of a
    `ConfigurationError` shows no password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # The text of the error may contain a part of a password that is not escaped.
        raise ConfigurationError(
            "the URL of RabbitMQ cannot be read; write amqp://user:password@host:5672/vhost, with / in a password as "
            "%2F, @ as %40, # as %23"
        ) from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigurationError(
            "the URL of RabbitMQ must look like amqp://user:password@host:5672/vhost or amqps://…; this one has no "
            "such scheme, or no host"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise ConfigurationError(f"the URL of RabbitMQ has the unknown option {unknown[0]!r}; known: {_OPTIONS}")
    return Login(
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        virtual_host=unquote(parts.path[1:]) or "/",
        user=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        heartbeat_seconds=_number(options, "heartbeat", HEARTBEAT_SECONDS),
        tls=_tls(options) if parts.scheme == "amqps" else None,
        management_port=_number(options, "management", _MANAGEMENT_PORTS.get(port or _PORTS[parts.scheme], 0)),
    )


def _number(options: dict[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) > 65_535:
        raise ConfigurationError(f"{name} in the URL of RabbitMQ must be a whole number up to 65535, not {text!r}")
    return int(text)


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("cacertfile"))
        if "certfile" in options:
            context.load_cert_chain(options["certfile"], options.get("keyfile"))
    except OSError as error:
        raise ConfigurationError(f"a certificate that the URL of RabbitMQ names cannot be loaded: {error}") from error
    return context
