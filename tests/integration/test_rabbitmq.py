"""RabbitMqTransport and a real broker: addresses, refusals, lost connections, messages of others, kill -9."""

import ssl
import uuid
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

import anyio
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.proxy import FaultyLink
from tests.rabbitmq_subjects import transport_at
from tests.servers import RabbitMQ
from tests.tds_server import issue
from tests.waiting import Eventually, until

from postdate import Endpoint, Envelope, HandlerContext, Recoverability, errors
from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import exchange_address
from postdate.backends.rabbitmq.transport import RabbitMqReceiver, RabbitMqTransport
from postdate.messages import Headers
from postdate.ports import Completion, Received

pytest_plugins = ["tests.integration.rabbitmq_fixtures"]

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
Kinds = list[type]


@pytest.fixture
def exchange(channel: BlockingChannel) -> Generator[str]:
    """A direct exchange whose name has to be escaped."""
    name = f"постдейт/100%/{uuid.uuid4()}"
    channel.exchange_declare(name, "direct", durable=True)
    yield name
    channel.exchange_delete(name)


@pytest.fixture
def link(rabbitmq_url: str) -> Generator[FaultyLink]:
    """A connection to the broker that breaks on demand."""
    where = urlsplit(rabbitmq_url)
    with FaultyLink(where.hostname or "", where.port or 0) as link:
        yield link


def through(link: FaultyLink, url: str) -> str:
    """Return the URL by way of the link."""
    where = urlsplit(url)
    return f"amqp://{where.username}:{where.password}@127.0.0.1:{link.port}{where.path}"


async def expect_heartbeats_soon(transport: RabbitMqTransport) -> None:
    """Take a broker for dead that is silent for two seconds from now on."""
    link = await transport.receiving_connection.get_link()
    assert link._silence_check is not None
    link._silence_check.cancel()
    link._check_silence(0.5)


def envelope(
    destination: str, message_id: str = "m", body: bytes = b"body", expires_at: datetime | None = None
) -> Envelope:
    return Envelope(destination, message_id, {"kind": "test"}, body, expires_at)


async def kinds_of(transport: RabbitMqTransport, envelopes: Sequence[Envelope]) -> Kinds:
    return [type(answer) for answer in await transport.send(envelopes, NOW)]


async def receive(receiver: RabbitMqReceiver, count: int) -> list[Received]:
    received: list[Received] = []
    while len(received) < count:
        received += await receiver.receive(count - len(received))
    return received


async def ids_in(transport: RabbitMqTransport, queue: str, count: int) -> list[str]:
    receiver = transport.receiver(queue)
    found = [each.envelope.message_id for each in await receive(receiver, count)]
    await receiver.close()
    return found


async def drain(transport: RabbitMqTransport, queue: str, wanted: Iterable[str]) -> None:
    """Receive and commit until everything wanted has come, whatever else comes."""
    missing, receiver = set(wanted), transport.receiver(queue)

    async def all_came() -> bool:
        while missing:
            for each in await receiver.receive(1_000):
                missing.discard(each.envelope.message_id)
                await receiver.commit(each, NOW)
        return True

    await until(all_came, despite=(errors.TransportUnavailable, errors.ClaimLost))
    await receiver.close()


# --- addresses --------------------------------------------------------------------------------------------------------


async def test_each_message_without_a_queue_is_answered_in_its_place(rabbitmq_url: str, queue: str) -> None:
    envelopes = [envelope(queue if n % 3 else f"missing.{n}", "same id" if n % 2 else f"{n}") for n in range(2_500)]
    async with transport_at(rabbitmq_url) as transport:
        assert await kinds_of(transport, envelopes) == [
            NoneType if n % 3 else errors.QueueNotFound for n in range(2_500)
        ]


async def test_an_exchange_is_an_address(
    rabbitmq_url: str, queue: str, exchange: str, channel: BlockingChannel
) -> None:
    channel.queue_bind(queue, exchange, "ключ/50%")
    async with transport_at(rabbitmq_url) as transport:
        to, nowhere = exchange_address(exchange, "ключ/50%"), exchange_address(exchange, "unbound")
        assert await kinds_of(transport, [envelope(to, "a"), envelope(nowhere, "b")]) == [
            NoneType,
            errors.QueueNotFound,
        ]
        assert await kinds_of(transport, [envelope(f"exchange:/{queue}", "c")]) == [NoneType]
        assert await ids_in(transport, queue, 2) == ["a", "c"]


async def test_a_missing_exchange_is_answered_and_takes_nothing_else_down(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    async with transport_at(rabbitmq_url) as transport:
        envelopes = [envelope(queue, "a"), envelope("exchange:missing/key", "b"), envelope(queue, "c")]
        assert await kinds_of(transport, envelopes) == [NoneType, errors.QueueNotFound, NoneType]
        assert await ids_in(transport, queue, 2) == ["a", "c"]


async def test_an_exchange_that_vanishes_is_found_out_though_it_closes_the_channel(
    rabbitmq_url: str, queue: str, exchange: str, channel: BlockingChannel
) -> None:
    channel.queue_bind(queue, exchange, "key")
    to = exchange_address(exchange, "key")
    async with transport_at(rabbitmq_url) as transport:
        assert await kinds_of(transport, [envelope(to)]) == [NoneType]
        channel.exchange_delete(exchange)
        envelopes = [envelope(queue, "a"), envelope(to, "gone"), envelope(queue, "b")]
        assert await kinds_of(transport, envelopes) == [NoneType, errors.QueueNotFound, NoneType]
        await drain(transport, queue, {"a", "b", "m"})


@pytest.mark.parametrize("address", ["exchange:50%/key", "exchange:a/%zz", "exchange:a/%ff", "й" * 200])
async def test_an_address_that_nothing_can_have_is_a_value(rabbitmq_url: str, queue: str, address: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        kinds = await kinds_of(transport, [envelope(address), envelope(queue)])
    assert kinds == [errors.QueueNotFound, NoneType]


async def test_a_queue_of_the_other_type_stays_as_it_is(rabbitmq_url: str, queue: str) -> None:
    for queue_type in ("quorum", "classic"):
        async with transport_at(rabbitmq_url, queue_type=queue_type) as transport:
            await transport.create_queues([queue])
            assert await kinds_of(transport, [envelope(queue)]) == [NoneType]


async def test_headers_that_are_not_text_are_a_value_too(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        bad = Envelope(queue, "bad", {"lone": "\ud800"})
        assert await kinds_of(transport, [envelope(queue), bad, envelope(queue)]) == [
            NoneType,
            errors.InvalidHeaders,
            NoneType,
        ]


# --- what the broker does not take ------------------------------------------------------------------------------------


async def test_a_full_queue_makes_a_message_wait(rabbitmq_url: str, channel: BlockingChannel) -> None:
    name = f"postdate.test.{uuid.uuid4()}"
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    async with transport_at(rabbitmq_url) as transport:
        assert await kinds_of(transport, [envelope(name)]) == [NoneType]
        answers = await transport.send([envelope(name), envelope(name)], NOW)
        assert [type(answer) for answer in answers] == [errors.DestinationUnavailable] * 2
        assert "nack" in str(answers[0])
    channel.queue_delete(name)


async def test_headers_beyond_a_frame_are_too_large(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        large = Envelope(queue, "large", {"h": "x" * 140_000})
        assert await kinds_of(transport, [large, envelope(queue)]) == [errors.MessageTooLarge, NoneType]


async def test_bodies_of_many_frames_arrive(rabbitmq_url: str, queue: str) -> None:
    bodies = [bytes(range(256)) * 40_000, b"", b"x" * 131_064, b"y" * 131_065]
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([envelope(queue, f"{n}", body=body) for n, body in enumerate(bodies)], NOW)
        receiver = transport.receiver(queue)
        assert [each.envelope.body for each in await receive(receiver, 4)] == bodies
        await receiver.close()


async def test_what_is_past_its_expiry_is_not_received_and_what_is_not_is(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        microsecond = timedelta(microseconds=1)
        late, soon = NOW - microsecond, NOW + timedelta(hours=1) + microsecond
        await transport.send([envelope(queue, "late", expires_at=late), envelope(queue, "soon", expires_at=soon)], NOW)
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver, 1)
        assert (received.envelope.message_id, received.envelope.expires_at) == ("soon", soon)
        await receiver.close()


# --- lost connections -------------------------------------------------------------------------------------------------


async def test_a_send_over_a_cut_connection_is_answered_and_a_later_one_arrives(
    rabbitmq_url: str, queue: str, link: FaultyLink
) -> None:
    async with transport_at(through(link, rabbitmq_url)) as transport:
        assert await kinds_of(transport, [envelope(queue, "before")]) == [NoneType]
        link.cut()
        assert await kinds_of(transport, [envelope(queue, "cut")] * 2) == [errors.TransportUnreachable] * 2
        link.restore()

        async def is_sent() -> bool:
            return await transport.send([envelope(queue, "after")], NOW) == [None]

        await until(is_sent)
        assert await ids_in(transport, queue, 2) == ["before", "after"]


async def test_a_connection_cut_under_many_sends_loses_nothing_confirmed(
    rabbitmq_url: str, queue: str, link: FaultyLink
) -> None:
    confirmed: list[str] = []
    async with transport_at(through(link, rabbitmq_url)) as transport:
        enough = anyio.Event()

        async def send(worker: int) -> None:
            for batch in range(40):
                names = [f"{worker}-{batch}-{n}" for n in range(100)]
                answers = await transport.send([envelope(queue, name) for name in names], NOW)
                assert {type(answer) for answer in answers} <= {NoneType, errors.TransportUnreachable}
                confirmed.extend(name for name, answer in zip(names, answers, strict=True) if answer is None)
                if len(confirmed) > 500:
                    enough.set()

        async with anyio.create_task_group() as tasks:
            for worker in range(4):
                tasks.start_soon(send, worker)
            await enough.wait()
            link.reset()
    assert len(confirmed) > 500
    async with transport_at(rabbitmq_url) as transport:
        await drain(transport, queue, confirmed)


async def test_a_broker_that_falls_silent_is_answered_for(rabbitmq_url: str, queue: str, link: FaultyLink) -> None:
    async with transport_at(through(link, rabbitmq_url)) as transport:
        await transport.send([envelope(queue)], NOW)
        link.stall()
        transport.publisher._confirm_seconds = 0.5
        answers = await transport.send([envelope(queue)] * 3, NOW)
        assert [type(answer) for answer in answers] == [errors.TransportUnreachable] * 3
        assert "0.5 s" in str(answers[0])
        link.restore()


async def test_a_broker_that_says_nothing_is_left_and_leaving_does_not_wait(
    rabbitmq_url: str, queue: str, link: FaultyLink
) -> None:
    async with transport_at(through(link, rabbitmq_url)) as transport:
        await transport.send([envelope(queue)], NOW)
        receiver = transport.receiver(queue)
        (held,) = await receive(receiver, 1)
        await receiver.commit(held, NOW)
        publishing = await transport.publisher.connection.get_link()
        link.stall()
        await expect_heartbeats_soon(transport)
        publishing._silence_seconds, transport.publisher._confirm_seconds = 0.2, 0.5
        answers = await transport.send([envelope(queue)] * 2, NOW)
        assert [type(answer) for answer in answers] == [errors.TransportUnreachable] * 2
        assert "sends nothing" in str(answers[0])
        (again,) = await transport.send([envelope(queue)], NOW)
        assert isinstance(again, errors.TransportUnreachable)
        assert "sends nothing" not in str(again)  # it has been left: nothing more is written to it
        await receiver.close()
        await transport.close()


async def test_a_receiver_notices_a_silent_broker_by_its_heartbeats(
    rabbitmq_url: str, queue: str, link: FaultyLink
) -> None:
    async with transport_at(through(link, rabbitmq_url)) as transport:
        await transport.send([envelope(queue)], NOW)
        receiver = transport.receiver(queue)
        (held,) = await receive(receiver, 1)
        link.stall()
        await expect_heartbeats_soon(transport)
        with pytest.raises(errors.TransportUnavailable, match="silent"):
            await receiver.receive(1)
        with pytest.raises(errors.ClaimLost):
            await receiver.commit(held, NOW)
        await receiver.roll_back(held)  # it is free already
        link.restore()
        (again,) = await until(lambda: receive(receiver, 1), despite=errors.TransportUnavailable)
        assert again.envelope == held.envelope
        await receiver.close()


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
async def test_a_receiver_whose_event_loop_stands_keeps_what_it_holds(
    rabbitmq_url: str, queue: str, tmp_path: Path, eventually: Eventually, scheme: str
) -> None:
    """A broker ends connections on which it hears nothing for twice the heartbeat; of these it hears all the time."""
    where, certificates = urlsplit(rabbitmq_url), issue(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with FaultyLink(where.hostname or "", where.port or 0, context if scheme == "amqps" else None) as link:
        url = f"{scheme}{through(link, rabbitmq_url).removeprefix('amqp')}?heartbeat=2"
        url += f"&cacertfile={certificates.authority}" if scheme == "amqps" else ""
        async with transport_at(url) as transport:
            bodies = [b"short", bytes(500_000)]
            assert await transport.send([envelope(queue, body=body) for body in bodies], NOW) == [None, None]
            receiver = transport.receiver(queue)
            held = await receive(receiver, 2)
            assert [each.envelope.body for each in held] == bodies
            heard = link.asked + 4 * len(wire.HEARTBEAT_FRAME)
            eventually(lambda: link.asked >= heard, "heartbeats, while this test keeps the event loop")
            for each in held:
                await receiver.commit(each, NOW)
            await receiver.close()
            assert await transport.lengths_of([queue]) == {queue: 0}
        assert link.accepted == 2


async def test_a_server_that_cannot_prove_who_it_is_is_told_no_password(rabbitmq_url: str, tmp_path: Path) -> None:
    where, certificates = urlsplit(rabbitmq_url), issue(tmp_path, "elsewhere.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with FaultyLink(where.hostname or "", where.port or 0, context) as link:
        url = f"amqps{through(link, rabbitmq_url).removeprefix('amqp')}?cacertfile={certificates.authority}"
        async with transport_at(url) as transport:
            with pytest.raises(errors.TransportUnreachable, match=r"cannot be reached: .*certificate"):
                await transport.lengths_of(["any"])
        assert link.asked == 0


async def test_a_message_that_loses_its_claim_whenever_it_is_handled_ends_in_the_error_queue(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.endpoint.handling.MOST_RESTARTS", 2)
    error_queue = f"{queue}.error"
    settings = Recoverability(immediate_retries=0, delayed_retries=0, error_queue=error_queue)
    async with transport_at(rabbitmq_url) as transport, transport_at(rabbitmq_url) as elsewhere:
        endpoint = Endpoint(queue, transport=transport, recoverability=settings)

        @endpoint.handler(bytes)
        async def handle(message: bytes, context: HandlerContext) -> None:
            (await transport.receiving_connection.get_link()).abandon(errors.TransportUnreachable("cut by the test"))

        async with endpoint:
            await endpoint.send(b"slow", destination=queue)
            (failed,) = await receive(elsewhere.receiver(error_queue), 1)
    assert failed.envelope.headers[Headers.ERROR_CODE] == "handling_interrupted"
    channel.queue_delete(error_queue)


async def test_a_receiver_on_a_connection_that_was_forgotten_on_the_way_notices_and_connects_anew(
    rabbitmq_url: str, queue: str, link: FaultyLink
) -> None:
    """What is in between goes on acknowledging: nothing but heartbeats shows that nobody is there any more."""
    async with transport_at(through(link, rabbitmq_url)) as transport, transport_at(rabbitmq_url) as elsewhere:
        receiver = transport.receiver(queue)
        await elsewhere.send([envelope(queue, "before")], NOW)
        (held,) = await receive(receiver, 1)
        await receiver.commit(held, NOW)
        link.forget()
        await expect_heartbeats_soon(transport)
        with pytest.raises(errors.TransportUnreachable, match="silent"):
            await receiver.receive(1)
        await elsewhere.send([envelope(queue, "after")], NOW)
        await drain(transport, queue, {"after"})
        await receiver.close()


async def test_a_receiver_whose_connection_is_cut_receives_again(
    rabbitmq_url: str, queue: str, link: FaultyLink
) -> None:
    async with transport_at(through(link, rabbitmq_url)) as transport:
        await transport.send([envelope(queue, f"{n}") for n in range(10)], NOW)
        receiver = transport.receiver(queue)
        held = await receive(receiver, 10)
        await receiver.commit(held[0], NOW)
        await ids_in_order_of_commit(receiver, held[1:3])
        link.reset()
        with pytest.raises(errors.TransportUnavailable):
            await receive(receiver, 1)
        with pytest.raises(errors.ClaimLost):
            await receiver.commit(held[3], NOW)
        await receiver.close()
        await drain(transport, queue, {f"{n}" for n in range(3, 10)})


async def ids_in_order_of_commit(receiver: RabbitMqReceiver, held: Sequence[Received]) -> None:
    for each in reversed(held):
        await receiver.commit(each, NOW)


async def test_a_deleted_queue_ends_receiving(rabbitmq_url: str, queue: str, channel: BlockingChannel) -> None:
    async with transport_at(rabbitmq_url) as transport:
        receiver = transport.receiver(queue)
        await transport.send([envelope(queue)], NOW)
        (held,) = await receive(receiver, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_it_gone, receiver)
            await anyio.wait_all_tasks_blocked()
            channel.queue_delete(queue)
        with pytest.raises(errors.ClaimLost):
            await receiver.commit(held, NOW)
        await receiver.close()


async def expect_it_gone(receiver: RabbitMqReceiver) -> None:
    with pytest.raises(errors.QueueNotFound):
        await receiver.receive(1)


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_queues_are_declared_durable(rabbitmq_url: str, channel: BlockingChannel, kind: str) -> None:
    """The broker says so: it refuses to declare a queue again that is not the same."""
    queue, same = f"q-{uuid.uuid4()}", {"x-queue-type": kind}
    async with transport_at(rabbitmq_url, queue_type=kind) as transport:
        await transport.create_queues([queue])
    channel.queue_declare(queue, durable=True, exclusive=False, auto_delete=False, arguments=same)
    channel.queue_delete(queue)


@pytest.mark.soak(
    "kills a broker of its own",
    part="kills",
    proven_by=(
        "tests/integration/test_rabbitmq.py::test_queues_are_declared_durable",
        "tests/integration/test_rabbitmq_expiry.py::test_another_client_sees_the_time_to_live_row_59",
        "tests/integration/test_rabbitmq.py::test_a_connection_cut_under_many_sends_loses_nothing_confirmed",
    ),
)
async def test_kill_9_of_the_broker_loses_nothing_confirmed(own_broker: RabbitMQ) -> None:
    confirmed: dict[str, list[str]] = {"quorum": [], "classic": []}
    for kind in confirmed:
        async with transport_at(own_broker.url, queue_type=kind) as transport:
            await transport.create_queues([kind])
    # A quorum queue that is a second old when its node is killed does not come back (RabbitMQ 3.10).
    await anyio.to_thread.run_sync(own_broker.stop)
    await anyio.to_thread.run_sync(own_broker.start)
    async with transport_at(own_broker.url) as transport:
        enough = anyio.Event()

        async def send_until_it_fails(kind: str) -> None:
            for batch in range(10_000):
                names = [f"{batch}-{n}" for n in range(50)]
                answers = await transport.send([envelope(kind, name) for name in names], NOW)
                confirmed[kind] += [name for name, answer in zip(names, answers, strict=True) if answer is None]
                if all(len(names) > 1_000 for names in confirmed.values()):
                    enough.set()
                if any(answers):
                    return

        async with anyio.create_task_group() as tasks:
            for kind in confirmed:
                tasks.start_soon(send_until_it_fails, kind)
            await enough.wait()
            await anyio.to_thread.run_sync(own_broker.kill)
        await anyio.to_thread.run_sync(own_broker.start)
        for kind, names in confirmed.items():
            await drain(transport, kind, names)


# --- messages of others -----------------------------------------------------------------------------------------------

TYPED = {
    "x-delay": 5_000,
    "large": 2**40,
    "text": "текст",
    "empty": "",
    "yes": True,
    "nothing": None,
    "bytes": b"\xff\x00",
    "price": Decimal("12.34"),
    "when": datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC),
    "list": [1, "two", [3], {"four": 5}],
    "table": {"a": {"b": b"\xfe"}},
    "amqp.type": "not ours",
    "x-postdate-due": "not ours, either",
    "CC": ["conformance.nowhere"],
}
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "gzip",
    "delivery_mode": 1,
    "priority": 7,
    "correlation_id": "корр-1",
    "reply_to": "replies",
    "expiration": "3600000",
    "timestamp": 1_769_860_805,
    "type": "order",
    "user_id": "guest",
    "app_id": "shop",
    "cluster_id": "c",
}


@pytest.mark.parametrize("message_id", [None, "their id", " ", "x" * 251])
@pytest.mark.parametrize("headers", [None, {}, {"a": "b"}, TYPED], ids=["none", "empty", "text", "typed"])
async def test_a_message_of_others_comes_through_untouched(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, message_id: str | None, headers: dict | None
) -> None:
    sent = pika.BasicProperties(headers=headers, message_id=message_id, **PROPERTIES)
    channel.basic_publish("", queue, b"\x00body", sent)
    async with transport_at(rabbitmq_url) as transport:
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver, 1)
        assert received.envelope.headers["amqp.content_type"] == "application/json"
        assert received.envelope.message_id.strip()
        bare = {**received.envelope.headers, "amqp.bare": "true"}
        onward = Envelope(queue, received.envelope.message_id, bare, received.envelope.body, due=NOW)
        await receiver.commit(received, NOW, Completion(outgoing=[onward]))
        await receiver.close()
        assert taken_from(queue, channel) == (vars(sent), b"\x00body")


async def test_properties_absent_stay_absent(rabbitmq_url: str, queue: str, channel: BlockingChannel) -> None:
    channel.basic_publish("", queue, b"", pika.BasicProperties())
    async with transport_at(rabbitmq_url) as transport:
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver, 1)
        nothing = ("amqp.table", "amqp.message_id", "amqp.delivery_mode")
        assert received.envelope.headers == dict.fromkeys(nothing, "none")
        await receiver.commit(received, NOW, Completion(outgoing=[envelope_as_it_was(received, queue)]))
        await receiver.close()
    assert taken_from(queue, channel) == (vars(pika.BasicProperties()), b"")


def taken_from(queue: str, channel: BlockingChannel) -> tuple[dict, bytes | None]:
    """Return properties and body of the next message, as another client receives them."""
    for _, properties, body in channel.consume(queue, auto_ack=True):
        channel.cancel()
        return vars(properties), body
    raise AssertionError(queue)


def envelope_as_it_was(received: Received, queue: str) -> Envelope:
    headers = {**received.envelope.headers, "amqp.bare": "true"}
    return Envelope(queue, received.envelope.message_id, headers, received.envelope.body)


async def test_failures_of_a_message_without_an_id_are_counted(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    channel.basic_publish("", queue, b"no id")
    async with transport_at(rabbitmq_url) as transport:
        receiver = transport.receiver(queue)
        failures = []
        for failed in (True, True, False, True):
            (received,) = await receive(receiver, 1)
            failures.append(received.failures)
            await receiver.roll_back(received, failed=failed)
        assert failures == [0, 1, 2, 2]
        await receiver.close()


async def test_what_another_process_gave_back_counts_as_a_failure_of_it(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as one, transport_at(rabbitmq_url) as other:
        await one.send([envelope(queue)], NOW)
        receiver, elsewhere = one.receiver(queue), other.receiver(queue)
        (received,) = await receive(receiver, 1)
        await receiver.roll_back(received)
        (received,) = await receive(elsewhere, 1)
        assert received.failures == 1
        await elsewhere.close()
        await receiver.close()


async def test_a_name_of_another_account_does_not_keep_a_message_back(rabbitmq_url: str, queue: str) -> None:
    async with transport_at(rabbitmq_url) as transport:
        odd = {
            "amqp.user_id": "somebody else",
            "amqp.priority": "high",
            "amqp.expiration": "soon",
            "CC": "x",
            "amqp.x": "",
        }
        sent = Envelope(queue, "номер" * 50, {**odd, "й" * 200: "long name", "x-postdate-due": "text"}, due=NOW)
        assert await kinds_of(transport, [sent]) == [NoneType]
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver, 1)
        assert received.envelope == sent
        assert received.envelope.headers == sent.headers
        await receiver.close()


# --- many -------------------------------------------------------------------------------------------------------------


async def test_many_are_sent_and_acknowledged_in_any_order_once(
    rabbitmq_url: str, queue: str, channel: BlockingChannel
) -> None:
    received: Counter[str] = Counter()
    async with transport_at(rabbitmq_url, confirm_window=300) as transport:
        async with anyio.create_task_group() as tasks:
            for worker in range(3):
                tasks.start_soon(transport.send, [envelope(queue, f"{worker}-{n}") for n in range(2_000)], NOW)
        receiver = transport.receiver(queue)
        while received.total() < 6_000:
            for each in reversed(await receive(receiver, 10)):
                received[each.envelope.message_id] += 1
                await receiver.commit(each, NOW)
        await receiver.close()
    assert max(received.values()) == 1
    assert channel.queue_declare(queue, passive=True).method.message_count == 0


# --- what is said, and to whom ----------------------------------------------------------------------------------------


async def test_a_missing_queue_is_answered_with_what_to_type(rabbitmq_url: str) -> None:
    name = f"postdate.test.{uuid.uuid4()}"
    text = f"there is no queue {name!r}; create it: postdate setup --queue {name}"
    async with transport_at(rabbitmq_url) as transport:
        (answer,) = await transport.send([envelope(name)], NOW)
        assert str(answer) == text
        with pytest.raises(errors.QueueNotFound) as refused:
            await receive(transport.receiver(name), 1)
        assert str(refused.value) == text


async def test_a_queue_of_the_other_type_is_said_once(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[int] = []
    for queue_type in ("quorum", "classic"):
        caplog.clear()
        async with transport_at(rabbitmq_url, queue_type=queue_type) as transport:
            await transport.create_queues([queue])
        lines = [message for message in caplog.messages if message.startswith(f"queue {queue} exists and is not of")]
        said.append(len(lines))
    assert sorted(said) == [0, 1]


async def test_a_receiver_of_an_empty_queue_says_when_the_broker_answers_again(
    rabbitmq_url: str, queue: str, channel: BlockingChannel, link: FaultyLink
) -> None:
    """Otherwise an outage of seconds would trip the breaker, for as long as nobody sends anything."""
    async with transport_at(through(link, rabbitmq_url)) as transport:
        receiver = transport.receiver(queue)
        async with anyio.create_task_group() as tasks:

            async def lose() -> None:
                with pytest.raises(errors.TransportUnreachable):
                    await receive(receiver, 1)

            tasks.start_soon(lose)
            await until(lambda: channel.queue_declare(queue, passive=True).method.consumer_count == 1)
            link.reset()
        assert await receiver.receive(1, wait=False) == []
        await transport.send([envelope(queue, "a")], NOW)
        assert [each.envelope.message_id for each in await receive(receiver, 1)] == ["a"]
        await receiver.close()
