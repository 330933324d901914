"""Setting up, and sending by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.sending import SendOptions
from postdate.endpoint.serialization import JSON_CONTENT_TYPE
from postdate.messages import DelayedMessage, Headers
from postdate.ports import TransactionMode
from postdate.wiring import Plant, build_endpoint


@dataclass(frozen=True, slots=True)
class SetUp:
    """What there is after setting up.

    Args:
        store, transport: addresses, without secrets.
        queues: the endpoint's own and those asked for.
        created: of these, the ones that were not there before.
    """

    store: str
    transport: str
    queues: Sequence[str]
    created: Sequence[str]


async def set_up(plant: Plant, queues: Sequence[str] = ()) -> SetUp:
    """Create the tables, the endpoint's queues, the configured ones and ``queues``; what is there already is left."""
    settings = plant.settings
    wanted = [timeouts_queue(settings.endpoint.name), settings.endpoint.error_queue, *settings.queues.create, *queues]
    wanted = list(dict.fromkeys(wanted))
    await plant.store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
    await plant.store.setup()
    before = await plant.queue_view.queue_lengths()
    await plant.transport.create_queues(wanted)
    return SetUp(
        store=settings.store.address.shown,
        transport=settings.transport.address.shown,
        queues=wanted,
        created=[name for name in wanted if name not in before],
    )


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent by hand.

    Args:
        destination: queue.
        body: bytes, sent as they are.
        headers: of the sender's own; they win over everything Postdate would write.
        message_type: name of the type that the receiver knows it by.
        delay, deliver_at, expires_at, message_id: see :class:`postdate.SendOptions`.
    """

    destination: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    message_type: str | None = None
    delay: timedelta | None = None
    deliver_at: datetime | None = None
    expires_at: datetime | None = None
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent.

    Args:
        message_id: to ask for it later.
        destination: queue.
        due: when it falls due; ``None``: it is in its queue already.
        queue_exists: whether there is such a queue yet; without one it goes to the error queue when due.
        services: processes that deliver due messages at the moment.
    """

    message_id: str
    destination: str
    due: datetime | None
    queue_exists: bool
    services: int


async def send(plant: Plant, message: Outgoing) -> Sent:
    """Send a message at once, or keep it until it is due; returns after the commit.

    Raises:
        DelayConflict, InvalidMessage, InvalidHeaders, MessageTooLarge: the request is wrong; nothing was sent.
        DuplicateMessage: the id was used before.
        QueueNotFound: the queue of a message without delay is missing; nothing was sent.
    """
    endpoint = build_endpoint(plant)
    options = SendOptions(
        destination=message.destination,
        delay=message.delay,
        deliver_at=message.deliver_at,
        expires_at=message.expires_at,
        headers={**_content_headers(message), **message.headers},
        message_id=message.message_id,
    )
    outgoing = endpoint.outgoing(message.body, options)
    await endpoint.send_now([outgoing])
    processes = await plant.store_view.processes()
    return Sent(
        message_id=outgoing.message_id,
        destination=message.destination,
        due=outgoing.due if isinstance(outgoing, DelayedMessage) else None,
        queue_exists=message.destination in await plant.queue_view.queue_lengths(),
        services=sum(process.alive and process.delivers for process in processes),
    )


def _content_headers(message: Outgoing) -> dict[str, str]:
    headers: dict[str, str] = {}
    if message.message_type is not None:
        headers[Headers.ENCLOSED_MESSAGE_TYPES] = message.message_type
    try:
        json.loads(message.body)
    except ValueError:
        return headers
    return {Headers.CONTENT_TYPE: JSON_CONTENT_TYPE, **headers}
