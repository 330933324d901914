"""Limits of a broker below what an endpoint is set to, and handlers that end their process: nothing is dropped."""

import json
import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.rabbitmq_subjects import channel_of, transport_at
from tests.servers import LOOPBACK, RabbitMQ, started
from tests.waiting import received, until

from postdate import Endpoint, Envelope, Headers, MemoryStore, Recoverability, SystemClock
from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import parse_url
from postdate.backends.rabbitmq.consuming import Delivery, FailureCounts
from postdate.backends.rabbitmq.delays import decode_intake_message
from postdate.backends.rabbitmq.observation import delivery_limit, read_limits
from postdate.backends.rabbitmq.properties import DecodedMessage, decode_message
from postdate.backends.rabbitmq.transport import RabbitMqReceiver, RabbitMqTransport
from postdate.config import load_settings
from postdate.errors import ConfigurationError, MessageNotFound, TransportError, TransportUnreachable
from postdate.operations import Treatment, queues, return_messages, show_error
from postdate.operations.doctor.checks import Verdict
from postdate.operations.doctor.servers import diagnose_intake_bindings, diagnose_queue_limits
from postdate.ports import DelayExchange
from postdate.wiring import OpenDeployment

pytest_plugins = ["tests.integration.rabbitmq_fixtures"]


@dataclass
class Work:
    number: int


@pytest.fixture
def name(channel: BlockingChannel) -> Generator[str]:
    """The name of an endpoint without queues."""
    name = f"postdate.test.{uuid.uuid4()}"
    yield name
    for queue in (name, f"{name}.error"):
        channel.queue_delete(queue)


def declare(channel: BlockingChannel, queue: str, **arguments: Any) -> None:
    named = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", **named})


def length(channel: BlockingChannel, queue: str) -> int:
    count: int = channel.queue_declare(queue, passive=True).method.message_count
    return count


async def until_nobody_asks(receiver: RabbitMqReceiver) -> None:
    """Return when the receiver has cancelled its consumers, as nobody has asked it for a while."""
    await until(lambda: receiver._channel is not None and not receiver._channel._consumers)


def interrupt(url: str, queue: str, times: int) -> None:
    """Do what a process does that ends while it has a message in hand."""
    for _ in range(times):
        with channel_of(url) as other:
            assert other.basic_get(queue)[0] is not None


def endpoint_at(transport: RabbitMqTransport, name: str, immediate_retries: int) -> Endpoint:
    settings = Recoverability(immediate_retries=immediate_retries, delayed_retries=0)
    return Endpoint(name, transport=transport, error_queue=f"{name}.error", recoverability=settings)


def error_copy(channel: BlockingChannel, name: str) -> dict[str, Any]:
    """Return the headers of the one message in the error queue."""
    method, properties, _ = channel.basic_get(f"{name}.error", auto_ack=True)
    assert method is not None
    assert method.message_count == 0
    assert properties is not None
    return dict(properties.headers or {})


@pytest.mark.parametrize("arguments", [{"delivery_limit": 20}, {"delivery_limit": 5}, {"queue_type": "classic"}])
async def test_a_message_is_tried_as_often_as_is_set_whatever_the_limit_of_its_queue(
    rabbitmq_url: str, channel: BlockingChannel, name: str, arguments: dict[str, Any]
) -> None:
    """As with the 20 of RabbitMQ 4: after 21 tries of 26 the message was in no queue."""
    declare(channel, name, **arguments)
    tried = list[int]()
    async with transport_at(rabbitmq_url) as transport:
        endpoint = endpoint_at(transport, name, immediate_retries=25)

        @endpoint.handler(Work)
        async def work(message: Work, _: object) -> None:
            tried.append(message.number)
            raise ValueError(message.number)

        async with endpoint:
            await endpoint.send(Work(7), destination=name)
            await until(lambda: length(channel, f"{name}.error"))
    assert tried == [7] * 26
    assert error_copy(channel, name)[Headers.EXCEPTION_TYPE] == "builtins.ValueError"
    assert length(channel, name) == 0


async def test_what_waits_behind_slow_handlers_does_not_come_back(
    rabbitmq_url: str, channel: BlockingChannel, name: str
) -> None:
    """With 30 handlers at once, the broker counted 29 returns for messages that nobody had seen."""
    declare(channel, name)
    now = SystemClock().now()
    async with transport_at(rabbitmq_url) as transport:
        await transport.send([Envelope(name, f"{n}", {}, b"") for n in range(12)], now)
        receiver = transport.receiver(name)
        held = list[Any]()
        while len(held) < 5:
            held += await receiver.receive(5 - len(held))
        await until_nobody_asks(receiver)
        held += await receiver.receive(1)
        await until_nobody_asks(receiver)
        assert [each.envelope.message_id for each in held] == [f"{n}" for n in range(6)]
        assert length(channel, name) == 6
        others = [channel.basic_get(name)[0] for _ in range(6)]
        assert [each is not None and each.redelivered for each in others] == [False] * 6
        await receiver.close()


async def test_what_is_pushed_ahead_stays_where_handlers_are_slow(
    rabbitmq_url: str, channel: BlockingChannel, name: str
) -> None:
    declare(channel, name)
    async with transport_at(rabbitmq_url, prefetch=5) as transport:
        await transport.send([Envelope(name, f"{n}", {}, b"") for n in range(12)], SystemClock().now())
        receiver = transport.receiver(name)
        await receiver.receive(1)
        await until_nobody_asks(receiver)
        assert length(channel, name) == 6
        again = await receiver.receive(9)
        assert [(each.envelope.message_id, each.failures) for each in again] == [(f"{n}", 0) for n in range(1, 6)]
        await receiver.close()


async def test_a_message_given_back_goes_to_others_when_nobody_here_asks(
    rabbitmq_url: str, channel: BlockingChannel, name: str
) -> None:
    declare(channel, name)
    async with transport_at(rabbitmq_url) as transport, transport_at(rabbitmq_url) as another:
        await transport.send([Envelope(name, "m", {}, b"")], SystemClock().now())
        one, other = transport.receiver(name), another.receiver(name)
        (held,) = await received(one, 1)
        await one.roll_back(held)
        (elsewhere,) = await received(other, 1)
        assert (elsewhere.failures, elsewhere.unanswered) == (1, 1)
        await one.close()
        await other.close()


@pytest.mark.parametrize(("interrupted", "handled"), [(5, 1), (6, 0)])
async def test_a_message_whose_handler_ends_its_process_goes_to_the_error_queue_after_its_tries(
    rabbitmq_url: str, channel: BlockingChannel, name: str, interrupted: int, handled: int
) -> None:
    """Six tries are configured; it was begun for ever, since a process that ends tells nobody of a failure."""
    declare(channel, name)
    begun = list[int]()
    async with transport_at(rabbitmq_url) as transport:
        endpoint = endpoint_at(transport, name, immediate_retries=5)

        @endpoint.handler(Work)
        async def work(message: Work, _: object) -> None:
            begun.append(message.number)

        await transport.create_queues([f"{name}.error"])
        sender = Endpoint(f"{name}.sender", transport=transport, send_only=True)
        async with sender:
            await sender.send(Work(7), destination=name)
            interrupt(rabbitmq_url, name, interrupted)
            async with endpoint:
                await until(lambda: length(channel, f"{name}.error") or begun)
    assert begun == [7] * handled
    assert length(channel, name) == 0
    if not handled:
        copy = error_copy(channel, name)
        assert copy[Headers.ERROR_CODE] == "handling_interrupted"
        assert "6 times without an answer" in copy[Headers.EXCEPTION_MESSAGE]


# --- what the broker tells of limits ----------------------------------------------------------------------------------


@contextmanager
def management(queues: dict[str, Any], status: int = 200) -> Generator[int]:
    """Answer as the broker's plugin does; yield the port."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/queues/%2F/")
            found = queues.get(name)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status if found is not None else 404)
            if found is None:  # where there is no such queue, and not where there is no such page
                self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def expect_it_leaves(url: str, with_management: str, channel: BlockingChannel, name: str) -> None:
    """Come back to a queue with a limit of four three times: the endpoint does not handle it, and it is not lost."""
    begun = list[int]()
    async with transport_at(with_management) as transport:
        endpoint = endpoint_at(transport, name, immediate_retries=25)

        @endpoint.handler(Work)
        async def work(message: Work, _: object) -> None:
            begun.append(message.number)

        await transport.create_queues([f"{name}.error"])
        sender = Endpoint(f"{name}.sender", transport=transport, send_only=True)
        async with sender:
            await sender.send(Work(7), destination=name)
            interrupt(url, name, 3)
            async with endpoint:
                await until(lambda: length(channel, f"{name}.error") or begun)
    assert begun == []
    assert "its queue would discard it soon" in error_copy(channel, name)[Headers.EXCEPTION_MESSAGE]


async def test_a_message_leaves_before_a_delivery_limit_by_a_policy_drops_it(
    rabbitmq_url: str, channel: BlockingChannel, name: str
) -> None:
    """Tries are left, and a process that ends once more would be the end of the message."""
    declare(channel, name, delivery_limit=4)
    told = {name: {"type": "quorum", "arguments": {}, "effective_policy_definition": {"delivery-limit": 4}}}
    with management(told) as port:
        await expect_it_leaves(rabbitmq_url, f"{rabbitmq_url}?management={port}", channel, name)


async def test_the_limits_of_queues_are_said(rabbitmq_url: str) -> None:
    told = {
        "orders": {
            "type": "quorum",
            "arguments": {"x-delivery-limit": 3, "x-max-length": 10},
            "effective_policy_definition": {"delivery-limit": 20, "message-ttl": 60_000},
        },
        "full": {
            "type": "classic",
            "arguments": {"x-max-length": 10, "x-overflow": "reject-publish"},
            "effective_policy_definition": [],
        },
        "new": {"type": "quorum", "arguments": {"x-max-length": 10}},
    }
    with management(told) as port:
        async with transport_at(f"{rabbitmq_url}?management={port}") as transport:
            limits = await transport.limits_of(["orders", "full", "new", "missing"])
            said = await diagnose_queue_limits(transport, ["new", "orders"])
    assert limits == {
        "orders": {"delivery-limit": 3, "max-length": 10, "message-ttl": 60_000},
        "full": {},
        "new": None,
    }
    assert [each.result for each in said] == [Verdict.WARN] * 4
    assert "not known yet: new" in said[0].found
    assert "'orders' has delivery-limit 3" in said[1].found


@pytest.mark.parametrize(
    ("told", "limits"),
    [
        ({}, None),
        ({"effective_policy_definition": None}, {}),  # neither a type nor arguments
        ({"type": "quorum", "arguments": [], "effective_policy_definition": {}}, {"delivery-limit": 20}),
        ({"type": "quorum", "arguments": {"x-delivery-limit": -1}, "effective_policy_definition": []}, {}),
        ({"arguments": {"x-max-length": 9, "x-overflow": 7}, "effective_policy_definition": {}}, {"max-length": 9}),
        ({"arguments": {"x-expires": 10}, "effective_policy_definition": {"expires": -1}}, {"expires": -1}),
    ],
)
def test_an_odd_answer_is_read_as_far_as_it_says_something(told: object, limits: dict[str, int] | None) -> None:
    with management({"q": told}) as port:
        login = parse_url(f"amqp://127.0.0.1?management={port}")
        assert read_limits(login, "4.2.1", ["q"]) == {"q": limits}


@pytest.mark.parametrize(
    "told",
    [
        b"<html>",
        ["q"],
        {"effective_policy_definition": 7},
        {"effective_policy_definition": {"message-ttl": "soon"}},
        {"effective_policy_definition": {"max-length": None}},
        {"type": "quorum", "effective_policy_definition": {"delivery-limit": "often"}},
        {"type": "quorum", "arguments": {"x-delivery-limit": "often"}, "effective_policy_definition": {}},
    ],
)
def test_an_answer_that_cannot_be_one_of_the_broker_tells_no_limits(told: object) -> None:
    with management({"q": told}) as port:
        login = parse_url(f"amqp://127.0.0.1?management={port}")
        with pytest.raises(TransportUnreachable, match=f"at 127.0.0.1:{port} does not report the limits of queues"):
            read_limits(login, "4.2.1", ["q"])


def test_where_nobody_listens_or_somebody_who_speaks_no_http_no_limits_are_told() -> None:
    with management({"q": {}}, status=1_000) as nonsense:
        for port in (1, nonsense):
            with pytest.raises(TransportUnreachable, match="does not report the limits of queues"):
                read_limits(parse_url(f"amqp://127.0.0.1?management={port}"), "4.2.1", ["q"])


@pytest.mark.parametrize(
    ("status", "told", "passes"),
    [
        (None, r"\?management=15672", False),
        (401, "answers 401 Unauthorized: user 'guest' needs the tag 'management'", False),
        (404, r"answers 404 Not Found: this is not the management interface; add \?management=PORT", False),
        (503, "answers 503 Service Unavailable: try again later", True),
    ],
)
async def test_limits_that_cannot_be_read_are_said_to_be_unknown(
    rabbitmq_url: str, name: str, status: int | None, told: str, *, passes: bool
) -> None:
    with management({name: {}}, status or 500) as port:
        asked = f"?management={port}" if status else ""
        async with transport_at(rabbitmq_url + asked) as transport:
            with pytest.raises(TransportError, match=told) as refused:
                await transport.limits_of([name])
            assert isinstance(refused.value, TransportUnreachable) is passes
            (said,) = await diagnose_queue_limits(transport, [name])
            assert said.result is Verdict.WARN
            await transport.create_queues([name])
            await transport.send([Envelope(name, "m", {}, b"")], SystemClock().now())
            receiver = transport.receiver(name)
            assert len(await received(receiver, 1)) == 1  # goes on without
            await receiver.close()


# --- what is bound to the exchange of other programs' messages --------------------------------------------------------


def bound(channel: BlockingChannel, exchange: str, queue: str) -> dict[str, str]:
    """Bind a queue as an application does that came from the plugin; return what the management interface says."""
    channel.queue_declare(queue, durable=True)
    channel.queue_bind(queue, exchange, "mail.*")
    return {"destination": queue, "destination_type": "queue", "routing_key": "mail.*", "source": exchange}


async def expect_bindings_are_refused(
    url: str,
    exchange: DelayExchange,
    channel: BlockingChannel,
    told: list[dict[str, str]],
    log: pytest.LogCaptureFixture,
) -> None:
    """Create the intake with nothing else bound to it, then bind a queue: the next start, doctor and log name it."""
    name = f"app-{exchange.name}"
    async with transport_at(url) as transport:
        await transport.create_intake(exchange)
        assert "not known whether queues" not in log.text
        (check,) = await diagnose_intake_bindings(transport, exchange)
        assert check.result is Verdict.OK

        told.append(bound(channel, exchange.name, name))
        try:
            with pytest.raises(
                ConfigurationError, match=rf"queue '{name}' .*'mail\.\*': bound to .* again when it is due"
            ):
                await transport.create_intake(exchange)
            (check,) = await diagnose_intake_bindings(transport, exchange)
            assert (check.result, f"queue {name!r}" in check.found) == (Verdict.FAIL, True)
            receiver = transport.intake_queues(exchange)[0].receiver
            await receiver.receive(1, wait=False)
            assert [each.levelname for each in log.records if f"queue {name!r}" in each.message] == ["ERROR"]
            await receiver.close()
        finally:
            channel.queue_delete(name)


async def test_a_queue_that_is_bound_to_the_intake_exchange_is_refused(
    rabbitmq_url: str, channel: BlockingChannel, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = DelayExchange(f"intake-{uuid.uuid4().hex[:12]}")
    own = {"destination": f"{exchange.name}.intake", "destination_type": "queue", "routing_key": ""}
    bindings = [own]
    with management({f"/api/exchanges/%2F/{exchange.name}/bindings/source": bindings}) as port:
        url = f"{rabbitmq_url}?management={port}"
        await expect_bindings_are_refused(url, exchange, channel, bindings, caplog)
    for queue in (f"{exchange.name}.intake", f"{exchange.name}.intake.expired"):
        channel.queue_delete(queue)
    for each in (exchange.name, f"{exchange.name}.due", f"{exchange.name}.intake.expired"):
        channel.exchange_delete(each)


async def test_where_the_broker_does_not_tell_bindings_start_and_doctor_warn(
    rabbitmq_url: str, channel: BlockingChannel, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = DelayExchange(f"intake-{uuid.uuid4().hex[:12]}")
    async with transport_at(f"{rabbitmq_url}?management=0") as transport:
        await transport.create_intake(exchange)
        assert "not known whether queues of applications are bound" in caplog.text
        (check,) = await diagnose_intake_bindings(transport, exchange)
        assert (check.result, "management=15672" in check.found) == (Verdict.WARN, True)
    for queue in (f"{exchange.name}.intake", f"{exchange.name}.intake.expired"):
        channel.queue_delete(queue)
    for each in (exchange.name, f"{exchange.name}.due", f"{exchange.name}.intake.expired"):
        channel.exchange_delete(each)


class Managed(RabbitMQ):
    """A broker with its management interface."""

    plugins = ("rabbitmq_management",)
    _port_names = (*RabbitMQ._port_names, "management")

    def _settings_of_plugins(self) -> dict[str, str]:
        return {"management.tcp.ip": LOOPBACK, "management.tcp.port": f"{self.ports['management']}"}


@pytest.mark.soak(
    "starts a broker of its own with its management interface",
    part="servers",
    proven_by=(
        "tests/integration/test_rabbitmq_limits.py::test_a_message_leaves_before_a_delivery_limit_by_a_policy_drops_it",
        "tests/integration/test_rabbitmq_limits.py::test_the_limits_of_queues_are_said",
        "tests/integration/test_rabbitmq_limits.py::test_a_queue_that_is_bound_to_the_intake_exchange_is_refused",
    ),
)
async def test_a_broker_tells_its_limits_and_bindings(server_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(Managed(server_folder / "rabbitmq")) as server:
        policy = json.dumps({"delivery-limit": 4, "max-length": 10})
        await anyio.to_thread.run_sync(server.control, "set_policy", "limits", "^orders", policy)
        with channel_of(server.url) as channel:
            declare(channel, "orders", delivery_limit=7)
            url = f"{server.url}?management={server.ports['management']}"
            async with transport_at(url) as transport:
                told = {"orders": {"delivery-limit": 4, "max-length": 10}}

                async def are_told() -> bool:  # of a new queue, after some seconds
                    return await transport.limits_of(["orders", "missing"]) == told

                await until(are_told)
                await expect_it_leaves(server.url, url, channel, "orders")
                await expect_bindings_are_refused(url, DelayExchange("reminders"), channel, [], caplog)


@pytest.mark.parametrize(
    ("version", "said", "limit"),
    [
        ("3.13.7", [], None),
        ("3.13.7", [-1], 0),
        ("4.0.5", [], 20),
        ("4.2.1", [-1], None),
        ("4.2.1", [50, 7], 7),
        ("4.3.0", [-1, 7], 7),
        ("", [5], 5),
    ],
)
def test_a_delivery_limit_is_what_the_version_makes_of_it(version: str, said: list[int], limit: int | None) -> None:
    assert delivery_limit(said, version) == limit


def test_the_port_of_the_management_interface_is_the_usual_one_beside_the_usual_one() -> None:
    ports = [
        parse_url(url).management_port
        for url in ("amqp://host", "amqps://host", "amqp://host:5673", "amqp://h?management=9", "amqp://h?management=0")
    ]
    assert ports == [15672, 15671, 0, 9, 0]
    with pytest.raises(ConfigurationError, match="management in the URL"):
        parse_url("amqp://host?management=http")


def table(**fields: int) -> bytes:
    """Return the properties of a message with a table of numbers."""
    content = b"".join(
        wire.short_text(f"x-{name}-count") + b"l" + value.to_bytes(8, "big") for name, value in fields.items()
    )
    return (1 << 13).to_bytes(2, "big") + wire.long_bytes(content)


@pytest.mark.parametrize(
    ("properties", "returns", "counted"),
    [
        (table(delivery=3), 3, 3),  # until RabbitMQ 4.2, whatever it came back for
        (table(acquired=3), 3, 0),  # from 4.3 on: given back by a nack
        (table(acquired=3, delivery=1), 3, 1),
        (table(), None, 0),
    ],
)
def test_what_the_queue_counts_is_no_header_of_a_message_that_came_back(
    properties: bytes, returns: int | None, counted: int
) -> None:
    delivery = Delivery(1, True, properties, b"", wire.short_text("delayed") + wire.short_text("key"))
    for came in (
        decode_message("orders", properties, b"", redelivered=True),
        decode_intake_message("delayed", "in", delivery),
    ):
        assert (came.returns, came.counted_returns) == (returns, counted)
        assert not [name for name in came.envelope.headers if "count" in name]


def test_times_that_nobody_here_knows_of_are_unanswered() -> None:
    attempts = FailureCounts()

    def came(returns: int | None) -> tuple[int, int]:
        return attempts.count_failures("orders", message(returns), redelivered=True)

    def message(returns: int | None) -> DecodedMessage:
        return DecodedMessage(Envelope("orders", "m", {}, b""), returns, has_id=True, counted_returns=returns or 0)

    assert came(3) == (3, 3)
    attempts.remember("orders", message(3), failures=4)  # tried again at once
    assert came(3) == (4, 0)
    attempts.remember("orders", message(3), failures=5, returns=1)  # given back to the queue
    assert came(4) == (5, 0)
    assert came(6) == (7, 2)
    attempts.forget("orders", message(6))
    assert came(None) == (1, 0)  # a classic queue does not count
    attempts.remember("orders", message(None), failures=2)
    assert came(None) == (2, 0)


@pytest.mark.parametrize(
    ("properties", "failures"),
    [
        (table(delivery=7), (7, 7)),  # until RabbitMQ 4.2 a nack of another process is not told from its end
        (table(acquired=7), (7, 0)),  # from 4.3 on it is
        (table(acquired=7, delivery=2), (7, 2)),
    ],
    ids=["until 4.2", "given back", "given back and left"],
)
def test_what_others_gave_back_is_no_answer_only_where_the_queue_cannot_tell(
    properties: bytes, failures: tuple[int, int]
) -> None:
    came = decode_message("orders", properties, b"", redelivered=True)
    assert FailureCounts().count_failures("orders", came, redelivered=True) == failures


async def test_looking_into_a_queue_again_and_again_drops_nothing(rabbitmq_url: str, channel: BlockingChannel) -> None:
    """What goes back counts for the delivery limit of its queue, 20 by default; before that it is sent anew."""
    name = f"postdate.test.{uuid.uuid4()}"
    declare(channel, name)
    async with transport_at(rabbitmq_url) as transport:
        deployment, now = (
            OpenDeployment(load_settings(None, {}), MemoryStore(), transport, None, None),
            SystemClock().now(),
        )
        await transport.send([Envelope(name, f"m-{number}", {"own": "1"}, b"body") for number in range(3)], now)

        async def are_there(*ids: str) -> bool:  # what went back a moment ago is not counted yet
            found = await queues.peek(deployment, name, 9, now)
            return sorted(each.message_id for each in found.messages) == list(ids)

        for _ in range(25):
            await until(lambda: are_there("m-0", "m-1", "m-2"))
        for id_, how in {"m-1": Treatment(to=name), "m-2": Treatment(discard=True)}.items():

            async def is_done(id_: str = id_, how: Treatment = how) -> bool:
                (result,) = await return_messages(deployment, name, [id_], now, how)
                return result.done

            await until(is_done)
        await until(lambda: are_there("m-0", "m-1"))
        await until(lambda: show_error(deployment, name, "m-0", now), despite=MessageNotFound)
        await until(lambda: are_there("m-0", "m-1"))
        gone = list[int]()

        async def are_gone() -> bool:
            gone.append((await queues.purge(deployment, name, now, lambda _: None, dry_run=False)).count)
            return sum(gone) == 2

        await until(are_gone)
    assert length(channel, name) == 0
    channel.queue_delete(name)
