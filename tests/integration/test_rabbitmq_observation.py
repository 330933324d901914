"""What RabbitMqTransport tells an operator: what the broker is, whether it takes messages, how long queues are."""

import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.rabbitmq_subjects import transport_at
from tests.servers import RabbitMQ, started

from postdate import Envelope
from postdate.backends.rabbitmq.address import exchange_address
from postdate.errors import TransportUnavailable

pytest_plugins = ["tests.integration.rabbitmq_fixtures"]

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


async def test_queues_are_counted_and_those_that_do_not_exist_are_left_out(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([Envelope(queue, f"{n}") for n in range(3)], NOW)
        missing = [f"{queue}.missing", "й" * 200, ""]
        assert await transport.lengths_of([missing[0], queue, *missing[1:]]) == {queue: 3}
        assert await transport.lengths_of([]) == {}


async def test_what_somebody_has_in_hand_is_not_counted_and_stays_there(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([Envelope(queue, f"{n}") for n in range(3)], NOW)
        receiver = transport.receiver(queue)
        (held,) = await receiver.receive(1)
        assert await transport.lengths_of([queue]) == {queue: 2}
        await receiver.commit(held, NOW)
        await receiver.close()
        assert await transport.lengths_of([queue]) == {queue: 2}


async def test_an_exchange_is_there_or_not_and_holds_nothing(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    exchange = f"postdate/test/{uuid.uuid4()}"
    channel.exchange_declare(exchange, "topic", durable=True)
    there, absent = exchange_address(exchange, "key"), exchange_address(f"{exchange} no", "key")
    by_default = exchange_address("", queue)
    or_queue, or_nothing = (exchange_address(f"{exchange} no", key, or_queue=True) for key in (queue, f"{queue} no"))
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([Envelope(queue, "m")], NOW)
        found = await transport.lengths_of([there, absent, by_default, or_queue, or_nothing, "exchange:50%/key"])
    channel.exchange_delete(exchange)
    assert found == {there: 0, by_default: 1, or_queue: 1}


async def test_a_queue_that_another_connection_keeps_for_itself_is_there(
    rabbitmq_url: str, channel: BlockingChannel
) -> None:
    name = channel.queue_declare("", exclusive=True).method.queue
    async with transport_at(rabbitmq_url) as transport:
        assert await transport.lengths_of([name]) == {name: 0}


async def test_the_broker_says_what_it_is_and_that_it_takes_messages(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        facts = await transport.server_facts()
        assert (facts.product, facts.settings) == ("RabbitMQ", {"blocked": ""})
        assert tuple(int(part) for part in facts.version.split(".")[:2]) >= (3, 10)
        assert (facts.now, facts.schema_version) == (None, None)
        assert await transport.lengths_of([queue]) == {queue: 0}


async def test_a_broker_that_cannot_be_reached_is_unavailable() -> None:
    async with transport_at("amqp://guest:guest@127.0.0.1:1/") as transport:
        with pytest.raises(TransportUnavailable, match="cannot be reached"):
            await transport.server_facts()
        with pytest.raises(TransportUnavailable):
            await transport.lengths_of(["orders"])


class FullBroker(RabbitMQ):
    """A broker that wants more free disk than any has: it takes no messages."""

    disk_free_limit = "900000GB"


@pytest.mark.soak(
    "starts a broker of its own",
    part="silence",
    proven_by="tests/integration/test_rabbitmq_protocol.py::test_what_a_broker_says_that_takes_no_messages_is_told",
)
async def test_a_broker_with_an_alarm_says_why_it_takes_no_messages(server_folder: Path) -> None:
    with started(FullBroker(server_folder / "rabbitmq")) as broker:
        async with transport_at(broker.url) as transport:
            assert (await transport.server_facts()).settings == {"blocked": "low on disk"}
            assert await transport.lengths_of(["orders"]) == {}
