"""Events on RabbitMQ: everybody who asked for them gets them, once each; nobody may have (specification 5)."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from tests.rabbitmq_subjects import channel_of

from postdate import (
    Endpoint,
    HandlerContext,
    Headers,
    MemoryTransport,
    Outbox,
    RabbitMqTransport,
    SqliteOutbox,
)
from postdate.backends.rabbitmq.address import parse_address
from postdate.errors import ConfigurationError, NotSupported, QueueNotFound
from postdate.messages import Envelope


@dataclass
class Pay:
    number: int


@dataclass
class Paid:
    number: int


class Site:
    """Endpoints with names of this process' own, and what each of them has handled."""

    def __init__(self, url: str) -> None:
        self.url, self.prefix = url, f"publishing-{os.getpid()}"
        self.transport = RabbitMqTransport(url, queue_type="classic")
        self.event = f"{self.prefix}.Paid"
        self.handled: dict[str, list[tuple[int, str, str]]] = {}
        self.news = anyio.Event()

    def endpoint(self, name: str, *, subscribed: bool = True, **settings) -> Endpoint:
        endpoint = Endpoint(
            f"{self.prefix}.{name}", transport=self.transport, error_queue=f"{self.prefix}.error", **settings
        )
        handled = self.handled.setdefault(name, [])

        @endpoint.handler(Paid, name=self.event)
        async def handle(message: Paid, context: HandlerContext) -> None:
            handled.append((message.number, context.message_id, context.headers[Headers.MESSAGE_INTENT]))
            self.news.set()

        if subscribed:
            endpoint.subscribe(Paid)
        return endpoint

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.news = anyio.Event()
            await self.news.wait()


@pytest.fixture
async def site(rabbitmq_url: str) -> AsyncIterator[Site]:
    site = Site(rabbitmq_url)
    yield site
    await site.transport.close()
    with channel_of(rabbitmq_url) as channel:
        for name in (*site.handled, "error"):
            channel.queue_delete(f"{site.prefix}.{name}")
        channel.exchange_delete(parse_address(f"event:{site.event}").exchange)


async def test_all_subscribers_receive_an_event_and_nobody_else(site: Site) -> None:
    async with AsyncExitStack() as stack:
        for name in ("stock", "shipping"):
            await stack.enter_async_context(site.endpoint(name))
        bystander = await stack.enter_async_context(site.endpoint("bystander", subscribed=False))
        id_ = await bystander.publish(Paid(1))
        await site.until(lambda: len(site.handled["stock"]) + len(site.handled["shipping"]) >= 2)
        await bystander.send(Paid(2))
        await site.until(lambda: len(site.handled["bystander"]) >= 1)
    assert site.handled["stock"] == site.handled["shipping"] == [(1, id_, "Publish")]
    assert [number for number, _, _ in site.handled["bystander"]] == [2]


async def test_what_nobody_wants_is_published_all_the_same(site: Site) -> None:
    async with site.endpoint("alone", subscribed=False) as alone:
        await alone.publish(Paid(1))  # there is no exchange
        await site.transport.subscribe(alone.name, [site.event])
        with channel_of(site.url) as channel:
            channel.queue_unbind(alone.name, parse_address(f"event:{site.event}").exchange, routing_key="")
        await alone.publish(Paid(2))  # and now no queue
        (error,) = await site.transport.send([Envelope("exchange:nowhere/x", "m-1")], alone.clock.now())
        assert isinstance(error, QueueNotFound)  # other exchanges are meant to lead somewhere
        await site.transport.subscribe(alone.name, [site.event])
        await site.transport.subscribe(alone.name, [site.event])
        await alone.publish(Paid(3))
        await site.until(lambda: len(site.handled["alone"]) >= 1)
    assert [number for number, _, _ in site.handled["alone"]] == [3]


async def test_what_a_handler_publishes_leaves_with_its_outbox(site: Site, tmp_path: Path) -> None:
    outbox = SqliteOutbox(tmp_path / "shop.db", synchronous="normal")
    # One at a time: a second copy handled beside the first may find it on its way, and send it, too, with the same id.
    settings = {"outbox": Outbox(outbox), "transaction_mode": "receive_only", "concurrency": 1}
    sales = site.endpoint("sales", subscribed=False, **settings)
    failures: list[int] = []

    @sales.handler(Pay)
    async def pay(message: Pay, context: HandlerContext) -> None:
        await context.publish(Paid(message.number), {"own": "1"}, message_id=f"paid-{message.number}")
        if not failures:
            failures.append(1)
            raise RuntimeError("once")

    async with site.endpoint("stock"), sales:
        await sales.send(Pay(7), message_id="pay-7")
        await sales.send(Pay(7), message_id="pay-7")
        await sales.send(Pay(8), message_id="pay-8")
        await site.until(lambda: len(site.handled["stock"]) >= 2)
    assert sorted(site.handled["stock"]) == [(7, "paid-7", "Publish"), (8, "paid-8", "Publish")]
    await outbox.close()


async def test_queues_that_cannot_publish_say_so() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    with pytest.raises(NotSupported, match="MemoryTransport support neither publishing"):
        await endpoint.publish(Paid(1))
    with pytest.raises(NotSupported, match="neither publishing nor subscribing"):
        endpoint.subscribe(Paid)
    with pytest.raises(ConfigurationError, match="send-only"):
        Endpoint("sales", transport=MemoryTransport(), send_only=True).subscribe(Paid)


async def test_a_name_that_no_event_can_have_is_refused(rabbitmq_url: str) -> None:
    endpoint = Endpoint("sales", transport=RabbitMqTransport(rabbitmq_url))
    with pytest.raises(ConfigurationError, match="cannot be called"):
        endpoint.subscribe(Paid, name="x" * 250)
