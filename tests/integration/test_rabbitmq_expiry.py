"""What expires in queues of RabbitMQ: what the broker is told, as another client sees it, and what it makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import anyio
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.rabbitmq_subjects import transport_at
from tests.waiting import until
from typing_extensions import override

from postdate import Endpoint, Envelope, HandlerContext, Headers, SystemClock, TransactionMode
from postdate.backends.rabbitmq.transport import RabbitMqReceiver, RabbitMqTransport
from postdate.operations.error_returns import copy_without_failure
from postdate.ports import Completion, Received

pytest_plugins = ["tests.integration.rabbitmq_fixtures"]

NOW = datetime(2000, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
"""What the sender's clock says: it is years behind."""

MILLISECOND, SECOND, DAY = timedelta(milliseconds=1), timedelta(seconds=1), timedelta(days=1)
ODD = {"amqp.priority": "1"}
"""A header that takes the long way to the properties of a message."""


def lasting(queue: str, span: timedelta | None, message_id: str = "m", **more: str) -> Envelope:
    return Envelope(queue, message_id, {"kind": "test", **more}, b"body", time_to_be_received=span)


async def receive(receiver: RabbitMqReceiver, count: int) -> list[Received]:
    received: list[Received] = []
    while len(received) < count:
        received += await receiver.receive(count - len(received))
    return received


def ids(received: Sequence[Received]) -> list[str]:
    return [each.envelope.message_id for each in received]


def seen(queue: str, channel: BlockingChannel) -> pika.BasicProperties | None:
    """Take a message off a queue as another client; return its properties, or ``None``: there is none."""
    frame, properties, _ = channel.basic_get(queue, auto_ack=True)
    return None if frame is None else properties


def length(queue: str, channel: BlockingChannel) -> int:
    return channel.queue_declare(queue, passive=True).method.message_count


async def runs_out(transport: RabbitMqTransport, channel: BlockingChannel, span: timedelta) -> None:
    """Return when a time to live that has begun is over, by the clock of the broker: that of a later message is."""
    name = channel.queue_declare("", exclusive=True).method.queue
    await transport.send([lasting(name, span)], NOW)
    await until(lambda: length(name, channel) == 0)


# --- what the broker is told ------------------------------------------------------------------------------------------

ENDS = [
    (timedelta(seconds=30), None, "30000"),
    (timedelta(seconds=30), NOW + 20 * SECOND, "20000"),
    (20 * SECOND, NOW + DAY, "20000"),
    (timedelta(microseconds=30_000_001), None, "30001"),
    (timedelta(days=9 * 365), None, "283824000000"),
    (timedelta(days=9 * 365, microseconds=1), None, None),
    (timedelta.max, None, None),
    (timedelta.max, NOW + 20 * SECOND, "20000"),
    (None, None, None),
]


@pytest.mark.parametrize("odd", [{}, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize(("span", "expires_at", "expiration"), ENDS)
async def test_another_client_sees_the_time_to_live_row_59(
    rabbitmq_url: str,
    queue: str,
    channel: BlockingChannel,
    odd: dict[str, str],
    span: timedelta | None,
    expires_at: datetime | None,
    expiration: str | None,
) -> None:
    """In milliseconds, rounded up; of a span and an instant the sooner, and none where the broker would refuse it."""
    async with transport_at(rabbitmq_url) as transport:
        headers = {"kind": "test", **odd}
        sent = Envelope(queue, "m", headers, b"body", expires_at, time_to_be_received=span)
        assert await transport.send([sent], NOW) == [None]
        properties = seen(queue, channel)
        assert properties is not None
        assert (properties.expiration, properties.message_id, properties.delivery_mode) == (expiration, "m", 2)


@pytest.mark.parametrize("odd", [{}, ODD], ids=["plain", "odd"])
async def test_what_was_received_has_no_time_to_live_any_more(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, odd: dict[str, str]
) -> None:
    """It came with one, and that was between its sender and the broker: a copy of it does not expire."""
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([lasting(queue, DAY, **odd)], NOW)
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver, 1)
        assert received.envelope == Envelope(queue, "m", {"kind": "test", **odd}, b"body")
        await receiver.commit(received, NOW, Completion(outgoing=[received.envelope]))
        await receiver.close()
        properties = seen(queue, channel)
        assert properties is not None
        assert properties.expiration is None


@pytest.mark.parametrize(("theirs", "ours", "expiration"), [("5000", 30, "5000"), ("50000", 30, "30000")])
async def test_of_their_time_to_live_and_ours_the_lesser_counts_and_theirs_is_remembered(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, theirs: str, ours: int, expiration: str
) -> None:
    async with transport_at(rabbitmq_url) as transport:
        sent = lasting(queue, ours * SECOND, **{"amqp.expiration": theirs})
        await transport.send([sent, sent], NOW)
        properties = seen(queue, channel)
        assert properties is not None
        assert properties.expiration == expiration
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver, 1)
        assert received.envelope.headers == sent.headers
        await receiver.close()


@pytest.mark.parametrize("more", [{}, ODD, {"amqp.expiration": "5000"}], ids=["plain", "odd", "theirs"])
async def test_a_copy_in_the_error_queue_does_not_expire_nor_what_is_returned_from_there(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, more: dict[str, str]
) -> None:
    async with transport_at(rabbitmq_url) as transport:
        headers = {"kind": "test", Headers.FAILED_QUEUE: queue, **more}
        copy = Envelope(queue, "m", headers, b"body", NOW + SECOND, time_to_be_received=SECOND)
        await transport.send([copy, Envelope(queue, "m", headers, b"body")], NOW)
        properties = seen(queue, channel)
        assert properties is not None
        assert properties.expiration is None
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver, 1)
        returned = copy_without_failure(received.envelope, queue)
        assert returned.headers.get("amqp.expiration.before") == more.get("amqp.expiration")
        await receiver.commit(received, NOW, Completion(outgoing=[returned]))
        await receiver.close()
        properties = seen(queue, channel)
        assert properties is not None
        assert properties.expiration is None


@dataclass
class Ask:
    """Handled by the endpoint that sends."""


@dataclass
class Answer:
    """What its handler sends."""


@pytest.mark.parametrize("mode", [TransactionMode.NONE, TransactionMode.RECEIVE_ONLY], ids=lambda mode: mode.value)
async def test_in_every_mode_a_handler_may_send_what_expires_row_62(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, mode: TransactionMode
) -> None:
    name = f"{queue}.endpoint"
    async with transport_at(rabbitmq_url) as transport:
        endpoint = Endpoint(name, transport=transport, transaction_mode=mode, error_queue=f"{name}.error")
        handled = anyio.Event()

        @endpoint.handler(Ask)
        async def ask(message: Ask, context: HandlerContext) -> None:
            await context.send(Answer(), destination=queue, time_to_be_received=30 * SECOND)
            await context.send(Answer(), destination=queue)
            handled.set()

        try:
            async with endpoint:
                await endpoint.send(Ask(), destination=name)
                await handled.wait()
        finally:
            for each in (name, f"{name}.error"):
                channel.queue_delete(each)
    found = [seen(queue, channel) for _ in range(2)]
    told = [(each.expiration, (each.headers or {}).get(Headers.TIME_TO_BE_RECEIVED)) for each in found if each]
    assert told == [("30000", "00:00:30"), (None, None)]


# --- what it makes of it ----------------------------------------------------------------------------------------------


async def test_what_nobody_reads_in_time_disappears_row_60(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([lasting(queue, MILLISECOND), lasting(queue, DAY, "lives")], NOW)
        await until(lambda: length(queue, channel) == 1)
        properties = seen(queue, channel)
        assert properties is not None
        assert properties.message_id == "lives"
        assert seen(queue, channel) is None


async def test_behind_one_that_lives_it_stays_in_the_queue_and_is_not_received(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    """The broker looks at the head alone: so the queue is longer than what can be received from it."""
    short = 100 * MILLISECOND
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([lasting(queue, DAY, "long"), lasting(queue, short), lasting(queue, None, "endless")], NOW)
        await runs_out(transport, channel, short)
        assert length(queue, channel) == 3, "it has expired, and is still there"
        assert await transport.lengths_of([queue]) == {queue: 3}
        receiver = transport.receiver(queue)
        (first,) = await receive(receiver, 1)
        await receiver.commit(first, NOW)
        (second,) = await receive(receiver, 1)
        assert ids([first, second]) == ["long", "endless"]
        await receiver.commit(second, NOW)
        await receiver.close()
        assert length(queue, channel) == 0


async def test_one_that_is_given_back_after_its_time_is_not_received_again(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    """In the hands of a receiver it does not expire; in its queue again, its first time to live has gone on."""
    async with transport_at(rabbitmq_url) as transport:
        receiver, span = transport.receiver(queue), SECOND / 2
        while True:
            await transport.send([lasting(queue, span), lasting(queue, None, "endless")], NOW)
            (held,) = await receive(receiver, 1)
            if held.envelope.message_id == "m":
                break
            await receiver.commit(held, NOW)
            span *= 4  # the machine is too slow for less
        await runs_out(transport, channel, span)
        await receiver.roll_back(held)
        assert ids([held, *await receive(receiver, 1)]) == ["m", "endless"]
        await receiver.close()


@dataclass
class Work:
    """Handled one at a time."""

    number: int


class Ahead(SystemClock):
    """A clock that is set ahead while it runs."""

    by = timedelta()

    @override
    def now(self) -> datetime:
        return super().now() + self.by


async def test_what_expires_in_the_hands_of_a_receiver_is_not_handled(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    """For the broker it has a day left, as if pushed long ago: the endpoint discards it, by its headers."""
    clock, handled = Ahead(), list[int]()
    async with transport_at(rabbitmq_url, prefetch=10) as transport:
        endpoint = Endpoint(queue, transport=transport, concurrency=1, error_queue=f"{queue}.error", clock=clock)
        done = anyio.Event()

        @endpoint.handler(Work)
        async def work(message: Work, context: HandlerContext) -> None:
            handled.append(message.number)
            if message.number == 0:
                await sent.wait()
                clock.by = 2 * DAY
            if message.number == 2:
                done.set()

        sent = anyio.Event()
        try:
            async with endpoint:
                for number, lasts in enumerate([None, DAY, None]):
                    await endpoint.send(Work(number), destination=queue, time_to_be_received=lasts)
                sent.set()
                await done.wait()
        finally:
            channel.queue_delete(f"{queue}.error")
    assert handled == [0, 2]
