"""Messages that other programs delay on RabbitMQ with a header ``x-delay``: published and received with pika."""

import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pika
import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker
from psycopg import sql
from tests.rabbitmq_subjects import channel_of
from tests.servers import RabbitMQ
from tests.waiting import until

from postdate import DelayedDelivery, Endpoint, SqliteStore, SystemClock
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.rabbitmq.address import parse_url
from postdate.backends.rabbitmq.connection import PersistentConnection
from postdate.backends.rabbitmq.consuming import ConsumingChannel
from postdate.backends.rabbitmq.content import BITS
from postdate.backends.rabbitmq.transport import RabbitMqTransport
from postdate.errors import ConfigurationError
from postdate.operations.error_returns import copy_without_failure
from postdate.ports import Completion, DelayExchange, MessageFilter
from postdate.runtime.resource import Resource

pytest_plugins = ["tests.integration.rabbitmq_fixtures"]

now = SystemClock().now
NEVER = 10**10
"""Milliseconds: far beyond 32 bits, and beyond this test."""


@dataclass
class Site:
    """An exchange, queues and a store of one test, and another client of the same broker."""

    url: str
    name: str
    channel: BlockingChannel
    open_store: Callable[[], Any]
    queues: list[str] = field(default_factory=list)

    @property
    def error_queue(self) -> str:
        return f"{self.name}.error"

    @asynccontextmanager
    async def service(self, **delay_exchange: str) -> AsyncGenerator[SqliteStore | PostgresStore]:
        """Run delayed delivery in this process."""
        store, transport = self.open_store(), RabbitMqTransport(self.url)
        exchange = DelayExchange(self.name, **delay_exchange)
        endpoint = Endpoint(
            self.name,
            transport=transport,
            delayed_delivery=DelayedDelivery(store, delay_exchange=exchange, missing_queue_wait=timedelta(0)),
            error_queue=self.error_queue,
            send_only=True,
        )
        try:
            async with endpoint:
                yield store
        finally:
            await transport.close()
            await store.close()

    def queue(self, name: str = "") -> str:
        queue = f"{self.name}.{name or uuid.uuid4()}"
        self.channel.queue_declare(queue, durable=True)
        self.queues.append(queue)
        return queue

    def length(self, queue: str) -> int:
        return self.channel.queue_declare(queue, passive=True).method.message_count

    def publish(
        self,
        routing_key: str,
        headers: dict[str, Any] | None = None,
        body: bytes = b"body",
        exchange: str | None = None,
        **properties: Any,
    ) -> None:
        content = pika.BasicProperties(headers=headers, **properties)
        self.channel.basic_publish(self.name if exchange is None else exchange, routing_key, body, content)

    async def arrived(self, queue: str) -> tuple[dict[str, Any], bytes | None]:
        """Return properties and body of the next message, as pika sees them."""

        def one() -> tuple[dict[str, Any], bytes | None] | None:
            method, properties, body = self.channel.basic_get(queue, auto_ack=True)
            return None if method is None else (vars(properties), body)

        return await until(one)

    def delete(self) -> None:
        for name in (
            f"{self.name}.intake",
            f"{self.name}.intake.expired",
            f"{self.name}.timeouts",
            self.error_queue,
            *self.queues,
        ):
            self.channel.queue_delete(name)
        for name in (self.name, f"{self.name}.due", f"{self.name}.intake.expired"):
            self.channel.exchange_delete(name)


@pytest.fixture(params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, rabbitmq_url: str, tmp_path: Path) -> Generator[Site]:
    """With each store."""
    name = f"x-{uuid.uuid4().hex[:12]}"
    with channel_of(rabbitmq_url) as channel:
        if request.param == "sqlite":
            site = Site(rabbitmq_url, name, channel, lambda: SqliteStore(tmp_path / "x.db", synchronous="normal"))
            yield site
        else:
            url = request.getfixturevalue("postgres_url")
            site = Site(rabbitmq_url, name, channel, lambda: PostgresStore(url, schema=name, table="t"))
            yield site
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))
        site.delete()


async def pending(store: Any, count: int) -> list[Any]:
    """Wait until so many messages wait in the store; return them."""

    async def found() -> list[Any] | None:
        listed = await store.list_pending(MessageFilter(), count + 1)
        return list(listed) if len(listed) == count else None

    return await until(found)


HEADERS = {
    "int8": 5,
    "int32": -(2**31),
    "int64": 2**62,
    "yes": True,
    "no": False,
    "none": None,
    "bytes": b"\x00\xff",
    "text": "привет",
    "when": datetime(2026, 1, 31, 12, tzinfo=UTC),
    "price": Decimal("12.34"),
    "table": {"a": 1, "b": {"c": ["d", 2, None]}},
    "array": [1, "two", None, {"four": 5}],
    "": "no name",
    "x-postdate-due": 1,
    "x-postdate-id": "not ours",
    "x-postdate-expires-at": 2,
    "NServiceBus.Timeouts.Properties.X": "y",
    "amqp.type": "not a property",
}
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "gzip",
    "delivery_mode": 1,
    "priority": 7,
    "correlation_id": "c",
    "reply_to": "somewhere",
    "expiration": "600000",
    "message_id": "none",
    "timestamp": 1_700_000_000,
    "type": "Order",
    "user_id": "guest",
    "app_id": "app",
    "cluster_id": "cluster",
}


async def test_it_arrives_as_if_it_had_not_been_delayed(site: Site) -> None:
    queue, headers = site.queue(), {**HEADERS, "x-delay": 50}
    site.publish(queue, headers, b"\x00body", exchange="", **PROPERTIES)
    undelayed = await site.arrived(queue)
    async with site.service():
        site.publish(queue, headers, b"\x00body", **PROPERTIES)
        assert await site.arrived(queue) == undelayed
    assert undelayed[0]["headers"]["x-delay"] == 50


async def test_a_message_without_any_property_arrives_without_any(site: Site) -> None:
    queue = site.queue()
    async with site.service():
        site.publish(queue, None, b"")
        assert await site.arrived(queue) == (vars(pika.BasicProperties()), b"")


class Raw(pika.BasicProperties):
    """Properties as bytes, to be published as they are."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    def encode(self) -> list[bytes]:
        return [self._content]


def field_of(name: str, content: bytes) -> bytes:
    return bytes((len(name),)) + name.encode() + content


EVERY_TYPE = b"".join(
    [
        field_of("x-delay", b"I\x00\x00\x00\x32"),
        field_of("t", b"t\x01"),
        field_of("b", b"b\xff"),
        field_of("B", b"B\xff"),
        field_of("s", b"s\xff\xfe"),
        field_of("u", b"u\xff\xfe"),
        field_of("I", b"I\xff\xff\xff\xfe"),
        field_of("i", b"i\xff\xff\xff\xfe"),
        field_of("l", b"l" + b"\xfe" * 8),
        field_of("f", b"f\x3f\xc0\x00\x01"),
        field_of("d", b"d\x3f\xf8\x00\x00\x00\x00\x00\x01"),
        field_of("D", b"D\x02\x00\x00\x04\xd2"),
        field_of("S", b"S\x00\x00\x00\x02\xff\x00"),
        field_of("x", b"x\x00\x00\x00\x02\xff\x00"),
        field_of("A", b"A\x00\x00\x00\x05b\x01s\x00\x02"),
        field_of("T", b"T\x00\x00\x00\x00\x65\x00\x00\x00"),
        field_of("F", b"F\x00\x00\x00\x04\x01ab\x07"),
        field_of("V", b"V"),
        field_of("twice", b"b\x01"),
        field_of("twice", b"b\x02"),
    ]
)


async def test_every_type_of_the_table_arrives_bit_for_bit(site: Site) -> None:
    queue = site.queue()
    content = (BITS["headers"] | BITS["type"]).to_bytes(2, "big") + len(EVERY_TYPE).to_bytes(4, "big")
    content += EVERY_TYPE + b"\x02\xff\x00"
    line = PersistentConnection(parse_url(site.url), 10, Resource("a broker"))
    async with site.service():
        site.channel.basic_publish(site.name, queue, b"x", Raw(content))
        link = await line.get_link()
        channel = await link.open_channel(lambda link, number: ConsumingChannel(link, number, queue, 0))
        (delivery,) = await channel.receive(1)
        assert delivery.properties == content
    await line.close()


async def test_headers_say_where_it_goes(site: Site) -> None:
    queue, exchange = site.queue(), f"{site.name}/100%"
    site.channel.exchange_declare(exchange, "direct")
    site.channel.queue_bind(queue, exchange, "ключ")
    site.channel.queue_bind(queue, exchange, "original")
    async with site.service():
        site.publish("x", {"x-delay-exchange": exchange, "x-delay-routing-key": "ключ"}, b"1")
        assert (await site.arrived(queue))[1] == b"1"
        site.publish("original", {"x-delay": 20, "x-delay-exchange": exchange}, b"2")
        assert (await site.arrived(queue))[1] == b"2"
        site.publish("x", {"x-delay": "20", "x-delay-routing-key": queue}, b"3")
        assert (await site.arrived(queue))[1] == b"3"
    site.channel.exchange_delete(exchange)


async def test_what_is_bound_to_the_exchange_for_due_messages_gets_them_and_a_queue_of_that_name_does_not(
    site: Site,
) -> None:
    invoices, everything, named = site.queue(), site.queue(), site.queue("orders.eu")
    async with site.service():
        site.channel.queue_bind(invoices, f"{site.name}.due", "*.orders.*")
        site.channel.queue_bind(everything, f"{site.name}.due", f"{site.name}.#")
        site.publish(named, {"x-delay": 20}, b"1", expiration="600000")
        for queue in (invoices, everything):
            properties, body = await site.arrived(queue)
            assert (properties["expiration"], body) == ("600000", b"1")
        site.channel.queue_unbind(invoices, f"{site.name}.due", "*.orders.*")
        site.channel.queue_unbind(everything, f"{site.name}.due", f"{site.name}.#")
        site.publish(named, {"x-delay": 20}, b"2")
        assert (await site.arrived(named))[1] == b"2"


async def test_an_exchange_of_ones_own_may_be_bound_to_it(site: Site) -> None:
    queue, mine = site.queue(), f"{site.name}.mine"
    site.channel.exchange_declare(mine, "topic")
    async with site.service(due_type="direct"):
        site.channel.exchange_bind(site.name, mine, "later.#")
        site.channel.queue_bind(queue, f"{site.name}.due", "later.orders")
        site.publish("later.orders", {"x-delay": 20}, exchange=mine)
        assert (await site.arrived(queue))[1] == b"body"
    site.channel.exchange_delete(mine)


async def test_another_type_than_the_exchange_for_due_messages_has_is_refused(site: Site) -> None:
    async with site.service(due_type="topic"):
        pass
    with pytest.raises(ConfigurationError, match=r"intake\.due_exchange_type .* current is 'topic'"):
        async with site.service(due_type="direct"):
            raise AssertionError
    async with site.service(due_type="topic"):
        pass


@pytest.mark.parametrize("delay", [2**32 + 5, 2**40, "1099511627777"])
async def test_there_is_no_overflow_after_49_days(site: Site, delay: int | str) -> None:
    async with site.service() as store:
        before = now()
        site.publish("orders", {"x-delay": delay})
        (message,) = await pending(store, 1)
        after = now()
    span = timedelta(milliseconds=int(delay))
    assert before + span <= message.due <= after + span
    assert message.destination == f"exchange-or-queue:{site.name}.due/orders"
    assert message.headers["x-delay"] == str(delay)


@pytest.mark.parametrize("delay", [-1, -(2**62), "-5000", 0, "00", None])
async def test_without_a_delay_or_with_a_negative_one_it_is_sent_on_at_once(site: Site, delay: object) -> None:
    queue = site.queue()
    async with site.service():
        site.publish(queue, {} if delay is None else {"x-delay": delay})
        assert (await site.arrived(queue))[1] == b"body"


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"x-delay": "soon"}, "'x-delay' must be a number of milliseconds"),
        ({"x-delay": True}, "'x-delay' must be a number of milliseconds"),
        ({"x-delay": {"a": 1}}, "'x-delay' must be a number of milliseconds"),
        ({"x-delay": 2**62}, "after the year 9999"),
        ({"x-delay": "9" * 29}, "after the year 9999"),
        ({"x-delay": 1, "x-delay-exchange": 5}, "'x-delay-exchange' must be text"),
        ({"x-delay": 1, "x-delay-routing-key": "k" * 201}, "at most 200"),
        ({"x-delay": 1, "x-delay-id": "i" * 251}, "at most 250"),
    ],
)
async def test_what_cannot_be_understood_goes_to_the_error_queue_and_can_be_returned(
    site: Site, headers: dict[str, Any], error: str
) -> None:
    async with site.service():
        site.publish("orders", headers, b"\x00body", type="Order", expiration="1000000", message_id="m")
        properties, body = await site.arrived(site.error_queue)
    assert error in properties["headers"]["NServiceBus.ExceptionInfo.Message"]
    assert properties["headers"]["NServiceBus.FailedQ"] == f"{site.name}.intake"
    assert (properties["type"], properties["expiration"], body) == ("Order", None, b"\x00body")


async def test_what_failed_can_be_returned_and_goes_out_as_it_came(site: Site) -> None:
    queue = f"{site.name}.later"
    site.queues.append(queue)
    headers = {**HEADERS, "x-delay": 20}
    async with site.service():
        site.publish(queue, headers, b"\x00body", **PROPERTIES)
        transport = RabbitMqTransport(site.url)
        receiver = transport.receiver(site.error_queue)
        (failed,) = await receiver.receive(1)
        site.queue("later")
        failed_in = failed.envelope.headers["NServiceBus.FailedQ"]
        copy = copy_without_failure(failed.envelope, failed_in)
        await receiver.commit(failed, now(), Completion(outgoing=[copy]))
        await receiver.close()
        await transport.close()
        assert failed_in == f"{site.name}.timeouts"
        delayed = await site.arrived(queue)
    site.publish(queue, headers, b"\x00body", exchange="", **PROPERTIES)
    assert delayed == await site.arrived(queue)


async def test_what_would_come_back_for_ever_is_refused(site: Site) -> None:
    async with site.service():
        for headers, exchange, key in (
            ({"x-delay-exchange": site.name}, site.name, "a"),
            ({"x-delay-routing-key": f"{site.name}.intake"}, site.name, "a"),
            ({"x-delay": 1}, "", f"{site.name}.intake"),
        ):
            site.publish(key, headers, exchange=exchange)
            properties, _ = await site.arrived(site.error_queue)
            assert "again and again" in properties["headers"]["NServiceBus.ExceptionInfo.Message"]


async def test_an_id_of_the_publisher_names_it_and_is_stored_once(site: Site) -> None:
    queue = site.queue()
    async with site.service() as store:
        for body in (b"first", b"second"):
            site.publish(queue, {"x-delay": NEVER, "x-delay-id": "reminder-1"}, body, message_id="constant")
        for _ in range(2):
            site.publish(queue, {"x-delay": NEVER}, message_id="constant")
        ids = [message.message_id for message in await pending(store, 3)]
        assert ids.count("reminder-1") == 1
        assert "constant" not in ids
        assert len(set(ids)) == 3
        assert await store.cancel("reminder-1", now())
        for message in await pending(store, 2):
            assert await store.reschedule(message.message_id, now(), now())
        assert [(await site.arrived(queue))[1] for _ in range(2)] == [b"body"] * 2


async def test_hundreds_arrive_once(site: Site) -> None:
    queue = site.queue()
    async with site.service():
        for number in range(300):
            site.publish(queue, {"x-delay": number % 50, "n": number}, b"%d" % number, message_id="constant")
        bodies = [(await site.arrived(queue))[1] for _ in range(300)]
    assert sorted(int(body or b"") for body in bodies) == list(range(300))


async def test_what_is_published_while_no_service_runs_is_kept_by_the_queue(site: Site) -> None:
    queue = site.queue()
    async with site.service():
        pass
    for number in range(20):
        site.publish(queue, {"x-delay": 10}, b"%d" % number)
    async with site.service():
        assert len({(await site.arrived(queue))[1] for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {"x-delay": 10, "a": 1},
        {"x-delay": 10, "x-death": [{"queue": "another", "reason": "rejected", "count": 1}]},
        {"x-delay": 10, "x-first-death-queue": "b", "x-death": [{"queue": "b", "reason": "expired", "count": 1}]},
        {"x-delay": 10, "CC": ["nowhere"], "x-delay-id": "e"},
    ],
    ids=["bare", "plain", "died-before", "first-died-elsewhere", "copies"],
)
async def test_a_time_to_live_begins_when_it_is_due_and_takes_nothing_from_the_intake(
    site: Site, headers: dict[str, Any] | None
) -> None:
    queue, expired = site.queue(), f"{site.name}.intake.expired"
    async with site.service():
        pass
    received: list[tuple[dict[str, Any], bytes]] = []
    # Somebody waits: a short time to live is long enough then.
    site.channel.basic_consume(
        queue, lambda channel, method, properties, body: received.append((vars(properties), body)), auto_ack=True
    )
    site.publish(queue, headers, exchange="", expiration="50")
    site.publish(queue, headers, expiration="50")
    await until(lambda: site.length(expired) == 1)

    def came() -> bool:
        site.channel.connection.process_data_events(0)
        return len(received) >= 2

    async with site.service():
        await until(came)
    assert received[0] == received[1]
    assert received[0][0]["expiration"] == "50"


async def test_another_exchange_of_that_name_is_a_clear_error(site: Site) -> None:
    site.channel.exchange_declare(site.name, "topic", durable=True)
    with pytest.raises(ConfigurationError, match=r"cannot be declared as a durable fanout exchange.*intake\.exchange"):
        async with site.service():
            pass


async def test_what_keeps_delays_is_declared_durable(site: Site) -> None:
    """The broker says so: it refuses to declare an exchange or a queue again that is not the same."""
    async with site.service():
        pass
    site.channel.exchange_declare(site.name, "fanout", durable=True)
    for queue in (f"{site.name}.intake", f"{site.name}.timeouts", site.error_queue):
        with channel_of(site.url) as channel, pytest.raises(ChannelClosedByBroker, match="arg 'durable'"):
            channel.queue_declare(queue, durable=False)


@pytest.mark.soak(
    "restarts a broker of its own, twice",
    part="kills",
    proven_by=(
        "tests/integration/test_x_delay.py::test_what_is_published_while_no_service_runs_is_kept_by_the_queue",
        "tests/integration/test_x_delay.py::test_what_keeps_delays_is_declared_durable",
        "tests/integration/test_rabbitmq_expiry.py::test_another_client_sees_the_time_to_live_row_59",
        "tests/integration/test_rabbitmq.py::test_a_receiver_whose_connection_is_cut_receives_again",
    ),
)
async def test_messages_survive_a_restart_of_the_broker(own_broker: RabbitMQ, tmp_path: Path) -> None:
    def site_on(channel: BlockingChannel) -> Site:
        return Site(own_broker.url, "x", channel, lambda: SqliteStore(tmp_path / "x.db", synchronous="normal"))

    async def restart() -> None:
        await anyio.to_thread.run_sync(own_broker.stop)
        await anyio.to_thread.run_sync(own_broker.start)

    with channel_of(own_broker.url) as channel:
        queue = site_on(channel).queue("orders")
        async with site_on(channel).service():
            pass
        site_on(channel).publish(queue, {"x-delay": 10}, b"in the queue", delivery_mode=2)
    await restart()
    with channel_of(own_broker.url) as channel:
        site = site_on(channel)
        async with site.service():
            assert (await site.arrived(queue))[1] == b"in the queue"
            site.publish(queue, {"x-delay": 3_000}, b"in the store")
            await until(lambda: site.length("x.intake") == 0)
            site.channel.connection.close()
            await restart()
            with channel_of(own_broker.url) as again:
                assert (await site_on(again).arrived(queue))[1] == b"in the store"
