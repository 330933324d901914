"""RabbitMQ, over AMQP 0-9-1 (ADR 0006)."""

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
    addresses=Addresses(("amqp", "amqps"), "amqp://user@host/vhost", found_by="env:POSTDATE_RABBITMQ_URL"),
    extra="rabbitmq",
    oldest_version=(3, 10),
    transport=Adapter("postdate.backends.rabbitmq.transport:RabbitMqTransport", CreatedQueues),
    scratch=Adapter("postdate.backends.rabbitmq.scratch:scratch"),
)
