"""Facts that a broker reports: product, whether it blocks publishers, lengths and limits of given queues.

AMQP has no list of queues and no clock. Any query for a queue's type might create the queue.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import quote

import msgspec
from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import Login, PublishAddress, parse_address
from postdate.backends.rabbitmq.connection import NOT_FOUND, AmqpConnection, Channel, ChannelClosed
from postdate.backends.rabbitmq.topology import declare_exchange_passively, queue_length
from postdate.errors import PostdateError, QueueNotFound, TransportError, TransportUnreachable
from postdate.ports import ServerFacts

_RESOURCE_LOCKED: Final = 405
_NOWHERE: Final = "postdate.doctor.nowhere"
"""A routing key without a queue: messages to it are dropped."""


# --- the server -------------------------------------------------------------------------------------------------------


async def server_facts(login: Login, within_seconds: float) -> ServerFacts:
    """Return facts about the server, over a separate connection."""
    link = await AmqpConnection.open(login, within_seconds)
    try:
        block_reason = await _probe_block_reason(link)
        settings = {} if block_reason is None else {"blocked": block_reason}
        product, version = link.server.get("product", "an AMQP broker"), link.server.get("version", "without a version")
        return ServerFacts(product, version, settings=settings)
    finally:
        if link.blocked is None:
            await link.close()
        else:  # A server that blocks publishers reads nothing more, so it would not answer.
            await link.abort()


async def _probe_block_reason(link: AmqpConnection) -> str | None:
    """Return why the broker blocks publishers; empty when it does not, ``None`` when it gives no answer.

    It says so only to connections that publish. So an empty message is published that is routed to no queue.
    """
    probe = await link.open_channel(_Probe)
    publish_arguments, no_properties = b"\0\0" + wire.short_text("") + wire.short_text(_NOWHERE) + b"\0", bytes(2)
    size = wire.HEADER_FRAME.size - wire.FRAME.size + len(no_properties)
    header = wire.HEADER_FRAME.pack(wire.HEADER, probe.number, size, wire.BASIC_PUBLISH[0], 0, 0)
    link.write(
        wire.method_frame(probe.number, wire.BASIC_PUBLISH, publish_arguments) + header + no_properties + wire.END
    )
    try:
        await probe.call(wire.CONFIRM_SELECT, b"\0", wire.CONFIRM_SELECT_OK)
    except ChannelClosed:  # The broker refuses the probe.
        return None
    except _PublishersBlocked as refusal:
        return str(refusal)
    return ""


class _PublishersBlocked(TransportUnreachable):
    """The broker blocks publishers; the text says why."""


class _Probe(Channel):
    """A channel that waits for no answer once the broker says that it blocks publishers: it reads nothing more then."""

    @override
    def on_block(self) -> None:
        if self.link.blocked is not None:
            self.detach(_PublishersBlocked(self.link.blocked or "it does not say why"))


# --- the lengths of queues --------------------------------------------------------------------------------------------


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
        # another connection's exclusive queue: it exists, but its length is unknown
        if error.reply_code == _RESOURCE_LOCKED:
            return 0
        raise _refusal(f"queue {queue!r}", error) from error


def _refusal(target: str, error: ChannelClosed) -> PostdateError:
    if error.reply_code == NOT_FOUND:
        return QueueNotFound(f"there is no {target}")
    return TransportError(f"{target} cannot be inspected: {error.reply_code} {error.text}")


# --- limits at which a queue drops messages, from arguments and policies; AMQP reports neither (ADR 0028) -------------


DELIVERY_LIMIT: Final = "delivery-limit"
TIME_TO_LIVE: Final = "message-ttl"
_LIMITS: Final = ("max-length", "max-length-bytes", TIME_TO_LIVE, "expires")
_ANSWERS_WITHIN_SECONDS: Final = 2.0


def read_limits(login: Login, version: str, queues: Sequence[str]) -> dict[str, dict[str, int] | None]:
    """Read the limits at which queues drop messages from the management interface; blocks.

    Returns them by queue and RabbitMQ's name for the limit, in its units (numbers, bytes, milliseconds); ``None``: not
    known yet. Queues that do not exist are left out. The ``version`` of the broker decides the default. Raises
    `TransportError` when there is no such interface or the user may not use it, `TransportUnreachable` when it does not
    answer.
    """
    limits: dict[str, dict[str, int] | None] = {}
    with _open_management(login, "the limits of queues") as get:
        for name in queues:
            path = f"queues/{quote(login.virtual_host, safe='')}/{quote(name, safe='')}"
            if (queue := get(path)) is not None:
                limits[name] = _limits_of(msgspec.convert(queue, dict[str, Any]), version)
    return limits


def read_bindings(login: Login, exchange: str) -> list[Binding]:
    """Read the bindings of an exchange, which may be missing, from the management interface; blocks.

    Raises as :func:`read_limits`. Source: ADR 9, decision 8.
    """
    path = f"exchanges/{quote(login.virtual_host, safe='')}/{quote(exchange, safe='')}/bindings/source"
    with _open_management(login, "the bindings of exchanges") as get:
        return msgspec.convert(get(path) or [], list[Binding])


class Binding(msgspec.Struct, frozen=True):
    """A queue, or an exchange, that is bound to an exchange."""

    destination: str
    destination_type: str
    routing_key: str

    def __str__(self) -> str:
        with_key = f" with the routing key {self.routing_key!r}" if self.routing_key else ""
        return f"{self.destination_type} {self.destination!r}{with_key}"


@contextmanager
def _open_management(login: Login, topic: str) -> Generator[Callable[[str], Any]]:
    """Open the management interface. The callable returns the JSON value at a path; ``None`` without one."""
    port, description = login.management_port, f"the management interface at {login.host}:{login.management_port}"
    if not port:
        raise TransportError(
            f"{login.description} needs rabbitmq_management to answer this: add ?management=15672 to the address"
        )
    kind = HTTPConnection if login.tls is None else partial(HTTPSConnection, context=login.tls)
    secret = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()

    def get(path: str) -> Any:
        connection.request("GET", f"/api/{path}", headers={"Authorization": f"Basic {secret}"})
        response = connection.getresponse()
        content = response.read()
        if response.status == HTTPStatus.OK:
            return msgspec.json.decode(content)
        # A missing queue is reported in JSON, a missing interface by a page of another server.
        if response.status == HTTPStatus.NOT_FOUND and response.headers.get_content_type() == "application/json":
            return None
        raise _management_refusal(response, description, login.user)

    with closing(kind(login.host, port, timeout=_ANSWERS_WITHIN_SECONDS)) as connection:
        try:
            yield get
        except (OSError, HTTPException, ValueError, TypeError) as error:
            raise TransportUnreachable(f"{description} does not report {topic}: {error}") from error


def _management_refusal(answer: HTTPResponse, description: str, user: str) -> TransportError:
    text = f"{description} answers {answer.status} {answer.reason}"
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return TransportError(f"{text}: user {user!r} needs the tag 'management'")
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # for example while the server starts
        return TransportUnreachable(f"{text}: try again later; the log of the broker has the details")
    return TransportError(
        f"{text}: this is not the management interface; add ?management=PORT to the address, the "
        f"port of rabbitmq_management"
    )


def delivery_limit(limits: Sequence[int], version: str) -> int | None:
    """Return how often a message may return to a quorum queue; ``limits`` are those of its argument and policies."""
    digits = re.match(r"\d+", version)
    # before version 4 there is no limit by default, and a limit below 0 counts as 0
    if digits is None or int(digits[0]) < 4:
        return max(0, min(limits)) if limits else None
    limit = max(limits) if limits and min(limits) < 0 else min(limits, default=20)
    return limit if limit >= 0 else None


def _limits_of(queue: Mapping[str, Any], version: str) -> dict[str, int] | None:
    if "effective_policy_definition" not in queue:  # The policy is unknown for a queue's first seconds.
        return None
    arguments: Mapping[str, Any] = queue.get("arguments") or {}
    policy: Mapping[str, Any] = queue["effective_policy_definition"] or {}

    def values_of(name: str) -> list[Any]:
        return [table[key] for table, key in ((arguments, f"x-{name}"), (policy, name)) if key in table]

    limits = {name: int(min(values_of(name))) for name in _LIMITS if values_of(name)}
    # a sender notices a rejected message
    if any(str(each).startswith("reject-publish") for each in values_of("overflow")):
        limits = {name: limit for name, limit in limits.items() if not name.startswith("max")}
    limit = delivery_limit(values_of(DELIVERY_LIMIT), version) if queue.get("type") == "quorum" else None
    return limits if limit is None else {DELIVERY_LIMIT: limit, **limits}
