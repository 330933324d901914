"""Queues of RabbitMQ over AMQP 0-9-1, and the exchange to which other programs publish with ``x-delay``.

Differences from the other backends:

- There is no store: delayed messages are in a database, and get there through the queue ``{endpoint}.timeouts``.
- The broker pushes messages, counts how often one came back, and drops it at the delivery limit of its queue.
- Sends are confirmed one by one, while many are in flight.
- The client is ours (``wire``, ``stream``, ``connection``): pika costs four times the processor time and changes
  headers that it does not know (ADR 0006). A thread sends heartbeats while a handler blocks the event loop (ADR 0029).

Read first: ``transport``; then ``publishing`` and ``consuming``; ``delays`` for ``x-delay``. Source: ADR 0006.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.settings import LimitedMessages


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedQueues(LimitedMessages):
    """Settings of the queues."""

    queue_type: Annotated[
        Literal["quorum", "classic"], Meta(description="of the queues that are created, on RabbitMQ")
    ] = "quorum"


BACKEND: Final = Backend(
    product="RabbitMQ",
    place=Place.SERVER,
    addresses=Addresses(("amqp", "amqps"), "amqp://user@host/vhost", bench_address="env:POSTDATE_RABBITMQ_URL"),
    extra="rabbitmq",
    oldest_version=(3, 10),
    transport=Adapter("postdate.backends.rabbitmq.transport:RabbitMqTransport", CreatedQueues),
    scratch=Adapter("postdate.backends.rabbitmq.scratch:scratch"),
)
