"""A virtual host of RabbitMQ as one object. Source: ADR 0021."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.rabbitmq.transport import RabbitMqTransport
from postdate.persistence.databases import DatabaseObject


class RabbitMq(DatabaseObject):
    """The queues of a virtual host. It cannot keep messages until they are due: give an endpoint a store besides.

    ``Endpoint("sales", RabbitMq(url), delayed_delivery=DelayedDelivery(Postgres(other).store))``.

    Args:
        url: ``amqp://user:password@host:port/vhost``, or ``amqps://…`` for TLS.
        queue_type: of queues that are created: ``quorum`` or ``classic``.

    Raises:
        ConfigurationError: the address or the type of queues is not valid; at first use of the queues.
    """

    def __init__(self, url: str, *, queue_type: str = "quorum") -> None:
        super().__init__()
        self._url, self._queue_type = url, queue_type

    @cached_property
    def queues(self) -> RabbitMqTransport:
        """The transport."""
        return self.made(RabbitMqTransport(self._url, queue_type=self._queue_type))
