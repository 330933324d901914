"""A broker as another client sees it, a queue and a broker of the test's own: for modules that name it as a plugin."""

import uuid
from collections.abc import Generator
from pathlib import Path

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.rabbitmq_subjects import channel_of
from tests.servers import RabbitMQ, started


@pytest.fixture
def own_broker(server_folder: Path) -> Generator[RabbitMQ]:
    """A broker of the test's own, to be killed."""
    with started(RabbitMQ(server_folder / "rabbitmq")) as server:
        yield server


@pytest.fixture
def channel(rabbitmq_url: str) -> Generator[BlockingChannel]:
    """Another client of the same broker."""
    with channel_of(rabbitmq_url) as channel:
        yield channel


@pytest.fixture(params=["quorum", "classic"])
def queue(request: pytest.FixtureRequest, channel: BlockingChannel) -> Generator[str]:
    """An empty queue of each type."""
    name = f"postdate.test.{uuid.uuid4()}"
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": request.param})
    yield name
    channel.queue_delete(name)
