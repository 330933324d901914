"""RabbitMqTransport as a subject of the conformance suite, one test at a time on one server, and for other tests."""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker
from tests.waiting import Eventually

from postdate.backends.rabbitmq.transport import RabbitMqTransport
from postdate.ports import Transport
from postdate.testing import TransportSubject

_LOCK = "postdate.tests.turn"
_LOCKED = 405
_QUEUES = ("conformance.in", "conformance.out", "another", "missing")


class RabbitMqTransportSubject(TransportSubject):
    """Queues of one type. The names are the suite's, so tests take turns: by an exclusive queue, which dies with them.

    Args:
        url: of the server.
        queue_type: of the queues.
    """

    def __init__(self, url: str, queue_type: str) -> None:
        self._url, self._type = url, queue_type
        self._turn = pika.BlockingConnection(pika.URLParameters(url))
        _take_turn(self._turn)
        self._delete_queues()

    def open(self, **settings) -> Transport:
        return RabbitMqTransport(self._url, queue_type=self._type, **settings)

    def open_elsewhere(self) -> Transport:
        return self.open()

    def _delete_queues(self) -> None:
        channel = self._turn.channel()
        for name in _QUEUES:
            channel.queue_delete(name)
        channel.close()

    def drop(self) -> None:
        self._delete_queues()
        self._turn.close()


def _take_turn(connection: pika.BlockingConnection) -> None:
    def taken() -> bool:
        try:
            connection.channel().queue_declare(_LOCK, exclusive=True)
        except ChannelClosedByBroker as error:
            if error.reply_code != _LOCKED:
                raise
            return False
        return True

    Eventually()(taken, "others have had their turn")


@asynccontextmanager
async def transport_at(url: str, **settings) -> AsyncGenerator[RabbitMqTransport]:
    """Make queues of a server, and close them."""
    transport = RabbitMqTransport(url, **settings)
    try:
        yield transport
    finally:
        await transport.close()


@contextmanager
def channel_of(url: str) -> Generator[BlockingChannel]:
    """Open a channel as any other client would; with confirms."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel
    finally:
        if connection.is_open:
            connection.close()
