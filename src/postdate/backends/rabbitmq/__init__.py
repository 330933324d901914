"""RabbitMQ: AMQP 0-9-1 as it speaks it: wire, link, confirmed publishing, consuming (ADR 0006)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

BACKEND: Final = Backend(
    product="RabbitMQ",
    place=Place.SERVER,
    addresses=Addresses(("amqp", "amqps"), "amqp://user@host/vhost", found_by="env:POSTDATE_RABBITMQ_URL"),
    extra="rabbitmq",
    oldest_version=(3, 10),
    transport=Adapter(
        "postdate.backends.rabbitmq.transport:RabbitMqTransport", frozenset({"queue_type", "largest_message_bytes"})
    ),
    benchmark=Adapter("postdate.backends.rabbitmq.benchmark:RabbitMqTarget"),
)
