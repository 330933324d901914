"""What a healthy broker does not do on demand: a scripted one blocks, refuses, answers late, or is no broker at all."""

import asyncio
import math
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import cast
from unittest.mock import Mock

import anyio
import pytest
from tests.tds_server import issue
from tests.waiting import patience, until

from postdate import Envelope, SystemClock
from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import parse_url
from postdate.backends.rabbitmq.connection import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    AmqpConnection,
    Channel,
    ChannelClosed,
)
from postdate.backends.rabbitmq.consuming import ConsumingChannel, Delivery
from postdate.backends.rabbitmq.properties import UNREADABLE, DecodedMessage, decode_message
from postdate.backends.rabbitmq.publishing import PublishingChannel, SendBatch
from postdate.backends.rabbitmq.stream import _write_to_socket
from postdate.backends.rabbitmq.transport import RabbitMqReceiver, RabbitMqTransport
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.receive.outcomes import StepOutcome
from postdate.core.receive.pump import MessagePump
from postdate.errors import (
    ConfigurationError,
    DestinationUnavailable,
    TransportError,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.ports import HANDLED, Received
from postdate.runtime.reporting import NO_METRICS

NOW = datetime(2026, 1, 31, tzinfo=UTC)
SECOND = timedelta(seconds=1)
Send = Callable[[bytes], None]
Script = Callable[[wire.Method, int, Send], None]
Published = Callable[[str, int, Send], None]

_ANSWERS: dict[wire.Method, tuple[wire.Method, bytes]] = {
    wire.CONNECTION_START_OK: (wire.CONNECTION_TUNE, wire.uint16(0) + wire.uint32(0) + wire.uint16(0)),
    wire.CONNECTION_OPEN: (wire.CONNECTION_OPEN_OK, b"\0"),
    wire.CONNECTION_CLOSE: (wire.CONNECTION_CLOSE_OK, b""),
    wire.CHANNEL_OPEN: (wire.CHANNEL_OPEN_OK, bytes(4)),
    wire.CONFIRM_SELECT: (wire.CONFIRM_SELECT_OK, b""),
}


@pytest.fixture
async def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what moves the clock of the event loop on: what has a limit ends then, and not while a machine stalls."""
    loop, skipped = asyncio.get_running_loop(), list[float]()
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + sum(skipped))
    return skipped.append


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server that says nothing not be taken for a silent one, however much time is skipped."""
    monkeypatch.setattr("postdate.backends.rabbitmq.stream._LATE_SECONDS", math.inf)


@asynccontextmanager
async def broker(
    script: Script, *, published: Published | None = None, silent: frozenset[wire.Method] = frozenset()
) -> AsyncGenerator[str]:
    """Yield the URL of a broker that logs everybody in and answers the rest as the script says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionResetError, asyncio.IncompleteReadError):  # whoever gives a connection up says nothing
            await talk(reader, writer)
        writer.close()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        properties = wire.table({"product": "script"}) + wire.long_bytes(b"PLAIN") + wire.long_bytes(b"en_US")
        writer.write(wire.method_frame(0, wire.CONNECTION_START, b"\0\x09" + properties))
        frames = wire.FrameReader(1 << 20)
        while received := await reader.read(1 << 16):
            for kind, channel, payload in frames.frames(received):
                if kind == wire.METHOD:
                    method = (payload[1], payload[3])
                    script(method, channel, writer.write)
                    if published is not None and method == wire.BASIC_PUBLISH:
                        arguments = wire.Arguments(payload)
                        arguments.read(2)
                        arguments.short_text()
                        published(arguments.short_text(), channel, writer.write)
                    if method in _ANSWERS and method not in silent:
                        writer.write(wire.method_frame(channel, *_ANSWERS[method]))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"amqp://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def answers_of(script: Script, count: int = 1) -> list[object]:
    async with broker(script) as url:
        transport = RabbitMqTransport(url)
        try:
            return list(await transport.send([Envelope("q", f"{n}") for n in range(count)], NOW))
        finally:
            await transport.close()


async def answers_after(
    transport: RabbitMqTransport,
    messages: Sequence[Envelope],
    condition: Callable[[], object],
    skip: Callable[[float], None],
) -> list[object]:
    """Send, and let the time for confirms be over when a condition holds: the send ends then, whatever it waits for."""
    answers: list[object] = []

    async def send() -> None:
        answers.extend(await transport.send(messages, NOW))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await until(condition)
        assert answers == []
        skip(transport.publisher._confirm_seconds)
        await until(lambda: answers)
    return answers


async def test_an_answer_that_came_while_the_event_loop_stood_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock it is late, and it has not been read yet: here the broker says nothing before the time is over."""
    monkeypatch.setattr("postdate.backends.rabbitmq.stream.READ_WITHIN_SECONDS", math.inf)
    async with broker(lambda method, channel, send: None) as url:
        link = await AmqpConnection.open(parse_url(url), 60)
        channel = await link.open_channel(Channel)
        await channel.call(wire.CONFIRM_SELECT, b"\0", wire.CONFIRM_SELECT_OK, 0)
        await link.close()


async def test_what_the_server_said_while_the_event_loop_stood_is_read_before_it_is_taken_for_dead() -> None:
    async with broker(lambda method, channel, send: None) as url:
        link = await AmqpConnection.open(parse_url(url), 60)
        link.last_read_at = before = link.loop.time() - 60
        link._check_silence(1)
        assert link.end_error is None
        link.last_read_at = link.loop.time()
        link._check_silence(1, before)
        assert link.end_error is None
        link.last_read_at = before
        link._check_silence(1, before)
        assert isinstance(link.end_error, TransportUnreachable)
        await link.close()


@pytest.mark.parametrize("closes", [False, True], ids=["used", "closed"])
async def test_a_connection_is_left_when_its_transport_is_used_from_another_event_loop(*, closes: bool) -> None:
    """Its thread went on sending heartbeats: the broker kept what it held for as long as the process lived."""
    async with broker(lambda method, channel, send: None) as url:
        line = RabbitMqTransport(
            f"{url}?heartbeat=600"
        ).receiving_connection  # it is not ended because this broker has none
        link = await line.get_link()
        assert link._beats is not None
        thread = link._beats._thread
        assert thread is not None

        async def elsewhere() -> None:
            if not closes:
                await line.get_link()
            await line.close()

        await anyio.to_thread.run_sync(asyncio.run, elsewhere())
        await until(lambda: link.end_error is not None and not thread.is_alive())
        assert "another event loop" in str(link.end_error)


@pytest.mark.parametrize("closes", [False, True], ids=["used", "closed"])
async def test_a_connection_that_is_made_too_late_for_its_transport_is_left(
    monkeypatch: pytest.MonkeyPatch, *, closes: bool
) -> None:
    """While it was made, the transport was closed, or used from another event loop: nobody else would end it."""
    made = list[AmqpConnection]()
    async with broker(lambda method, channel, send: None) as url:
        line = RabbitMqTransport(f"{url}?heartbeat=0").receiving_connection
        connect = line._connect

        async def elsewhere() -> None:
            await (await line.get_link()).close()

        async def connect_late(loop: asyncio.AbstractEventLoop) -> AmqpConnection:
            made.append(await connect(loop))
            monkeypatch.setattr(line, "_connect", connect)
            await (line.close() if closes else anyio.to_thread.run_sync(asyncio.run, elsewhere()))
            return made[0]

        monkeypatch.setattr(line, "_connect", connect_late)
        try:
            with pytest.raises(TransportUnreachable, match="closed, or is used from another event loop"):
                await line.get_link()
            await until(lambda: made[0].end_error)
        finally:
            await made[0].abort()


async def test_a_connection_that_was_aborted_here_was_not_closed_by_the_server() -> None:
    async with broker(lambda method, channel, send: None) as url:
        link = await AmqpConnection.open(parse_url(url), 60)
        channel = await link.open_channel(Channel)
        await link.abort()
    assert str(channel.end_error) == str(link.end_error) == "the connection was closed here"


@pytest.mark.parametrize("came", [False, True], ids=["no more queues are allowed", "it came meanwhile"])
async def test_a_new_queue_that_is_refused_is_an_error_unless_it_came_meanwhile(*, came: bool) -> None:
    """The broker has one code for a limit of queues and for another queue of that name."""
    codes = [NOT_FOUND, PRECONDITION_FAILED, *([] if came else [NOT_FOUND])]

    def script(method: wire.Method, channel: int, send: Send) -> None:
        if method == wire.QUEUE_DECLARE and codes:
            send(
                wire.method_frame(
                    channel, wire.CHANNEL_CLOSE, wire.uint16(codes.pop(0)) + wire.short_text("no") + bytes(4)
                )
            )
        elif method == wire.QUEUE_DECLARE:
            send(wire.method_frame(channel, wire.QUEUE_DECLARE_OK, wire.short_text("q") + bytes(8)))

    async with broker(script) as url:
        transport = RabbitMqTransport(url)
        refused = pytest.raises(TransportError, match=r"'q' cannot be created: .* 406 no")
        expected: AbstractContextManager[object] = nullcontext() if came else refused
        with expected:
            await transport.create_queues(["q"])
        await transport.close()
    assert codes == []


async def test_what_a_server_says_before_tls_breaks_is_told_with_that_and_so_is_the_server(tmp_path: Path) -> None:
    certificates, context = issue(tmp_path, "127.0.0.1"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    heard, said = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(heard, said, server_side=True)
    link = AmqpConnection(parse_url(f"amqps://127.0.0.1?cacertfile={certificates.authority}"))
    link.connection_made(Mock(write=heard.write))
    with suppress(ssl.SSLWantReadError):
        server.do_handshake()
    link.data_received(said.read())
    server.do_handshake()
    server.write(
        wire.method_frame(0, wire.CONNECTION_CLOSE, wire.uint16(320) + wire.short_text("going down") + bytes(4))
    )
    link.data_received(said.read() + b"no TLS")
    assert re.search(r"closed the connection: 320 going down: \[SSL", str(link.end_error))
    assert server.read() == wire.PROTOCOL_HEADER
    with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
        server.read()


async def test_a_heartbeat_never_waits_for_its_socket() -> None:
    """It has the lock over writes: neither a server that reads nothing nor a default of the process keeps it."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                here.send(bytes(65_536))
        socket.setdefaulttimeout(600)
        try:
            assert _write_to_socket(Mock(get_extra_info=lambda _: here), b"beat") == 0
        finally:
            socket.setdefaulttimeout(None)


async def test_the_thread_of_heartbeats_ends_with_the_loop_of_its_handlers() -> None:
    """Else a connection that nobody closed would keep what it holds, for nobody, as long as the process lives."""
    async with broker(lambda method, channel, send: None) as url:
        link = await AmqpConnection.open(parse_url(url), 60)
        closed, beats = asyncio.new_event_loop(), link._beats
        closed.close()
        link.loop, real = closed, link.loop
        link._send_heartbeat()
        link.loop = real
        assert beats is not None
        assert beats._stop.is_set()
        await link.close()


async def test_a_connection_that_ends_with_the_answer_to_a_consumer_is_noticed_by_who_waits_for_messages() -> None:
    def script(method: wire.Method, channel: int, send: Send) -> None:
        if method == wire.BASIC_QOS:
            send(wire.method_frame(channel, wire.BASIC_QOS_OK))
        if method == wire.BASIC_CONSUME:
            send(wire.method_frame(channel, wire.BASIC_CONSUME_OK, wire.short_text("postdate-1")))
            raise ConnectionResetError

    async with broker(script) as url:
        transport = RabbitMqTransport(url)
        with pytest.raises(TransportUnreachable, match="lost"), patience():
            await transport.receiver("q").receive(1)
        await transport.close()


def uint64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def confirm(tag: int, *, multiple: bool, channel: int = 1) -> bytes:
    return wire.ack_frame(channel, tag, multiple=multiple)


def refuse(tag: int, *, multiple: bool) -> bytes:
    return wire.method_frame(1, wire.BASIC_NACK, uint64(tag) + bytes((multiple,)))


class Counting:
    """Runs a step when so many messages have been published."""

    def __init__(self, count: int, step: Callable[[Send], None]) -> None:
        self.left, self.step = count, step

    def __call__(self, method: wire.Method, channel: int, send: Send) -> None:
        if method == wire.BASIC_PUBLISH:
            self.left -= 1
            if self.left == 0:
                self.step(send)


async def test_confirms_come_in_any_order_and_for_many() -> None:
    def step(send: Send) -> None:
        for tag, multiple in ((5, False), (3, False), (2, True), (2, True), (9, True), (10, False), (10, False)):
            send(confirm(tag, multiple=multiple))

    assert await answers_of(Counting(10, step), 10) == [None] * 10


async def test_a_nack_for_many_leaves_out_what_was_confirmed_before() -> None:
    def step(send: Send) -> None:
        send(confirm(2, multiple=False) + refuse(4, multiple=True) + confirm(6, multiple=True))

    answers = await answers_of(Counting(6, step), 6)
    unavailable = DestinationUnavailable
    assert [type(answer) for answer in answers] == [
        unavailable,
        type(None),
        unavailable,
        unavailable,
        *[type(None)] * 2,
    ]


async def test_a_broker_that_blocks_publishers_is_waited_for_in_vain(skip: Callable[[float], None]) -> None:
    def script(method: wire.Method, channel: int, send: Send) -> None:
        if method == wire.CONFIRM_SELECT:
            send(wire.method_frame(0, wire.CONNECTION_BLOCKED, wire.short_text("low on disk")))
        assert method != wire.BASIC_PUBLISH

    async with broker(script) as url:
        transport = RabbitMqTransport(url)

        def is_blocked() -> bool:
            channel = transport.publisher._channel
            return channel is not None and channel.link.blocked is not None

        (answer,) = await answers_after(transport, [Envelope("q", "m")], is_blocked, skip)
        await transport.close()
    assert isinstance(answer, TransportUnavailable)
    assert "low on disk" in str(answer)


@pytest.mark.parametrize(
    ("reason", "then", "told"),
    [
        ("low on disk", b"", "low on disk"),
        ("low on disk", wire.method_frame(0, wire.CONNECTION_UNBLOCKED), "low on disk"),
        ("", b"", "it does not say why"),
    ],
    ids=["for long", "for a moment", "without a reason"],
)
async def test_what_a_broker_says_that_takes_no_messages_is_told(reason: str, then: bytes, told: str) -> None:
    def script(method: wire.Method, channel: int, send: Send) -> None:
        if method == wire.BASIC_PUBLISH:
            send(wire.method_frame(0, wire.CONNECTION_BLOCKED, wire.short_text(reason)) + then)

    async with broker(script, silent=frozenset({wire.CONFIRM_SELECT})) as url:
        transport = RabbitMqTransport(url)
        assert (await transport.server_facts()).settings == {"blocked": told}
        await transport.close()


async def test_a_broker_that_takes_messages_again_gets_them() -> None:
    def script(method: wire.Method, channel: int, send: Send) -> None:
        if method == wire.CONFIRM_SELECT:
            send(wire.method_frame(0, wire.CONNECTION_BLOCKED, wire.short_text("low on disk")))
            asyncio.get_running_loop().call_later(0.05, send, wire.method_frame(0, wire.CONNECTION_UNBLOCKED))
        elif method == wire.BASIC_PUBLISH:
            send(confirm(1, multiple=False))

    assert await answers_of(script) == [None]


async def test_one_send_without_confirms_holds_up_no_other(skip: Callable[[float], None], trusted: None) -> None:
    published = 0

    def script(method: wire.Method, channel: int, send: Send) -> None:
        nonlocal published
        published += method == wire.BASIC_PUBLISH
        if published == 4:
            send(confirm(4, multiple=False))

    async with broker(script) as url:
        transport = RabbitMqTransport(url, confirm_window=3)
        healthy: list[object] = []

        async def is_confirmed() -> bool:
            if published == 3:
                healthy.extend(await transport.send([Envelope("healthy", "m")], NOW))
            return bool(healthy)

        stuck = [Envelope("stuck", f"{n}") for n in range(3)]
        answers = await answers_after(transport, stuck, is_confirmed, skip)
        await transport.close()
    assert healthy == [None]
    assert [type(answer) for answer in answers] == [DestinationUnavailable] * 3  # the server speaks: it is this queue


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            wire.method_frame(0, wire.CONNECTION_CLOSE, wire.uint16(320) + wire.short_text("going down") + bytes(4)),
            "going down",
        ),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no AMQP"),
        (b"AMQP\0\0\x09\2", "another version"),
    ],
)
async def test_the_end_of_a_connection_is_told_with_its_reason(reply: bytes, expected: str) -> None:
    (answer,) = await answers_of(Counting(1, lambda send: send(reply)))
    assert isinstance(answer, TransportUnavailable)
    assert expected in str(answer)


class Strict:
    """Confirms, except that one routing key makes it close the channel; notes what it was asked for."""

    def __init__(self, guilty: str = "guilty", confirms_again: bool = True) -> None:
        self.guilty, self.confirms_again = guilty, confirms_again
        self.tags: dict[int, int] = {}
        self.opened, self.closed, self.published = 0, 0, 0

    def script(self, method: wire.Method, channel: int, send: Send) -> None:
        if method == wire.CHANNEL_OPEN:
            self.opened += 1
            self.tags[channel] = 0
        elif method == wire.CHANNEL_CLOSE:
            self.closed += 1
            send(wire.method_frame(channel, wire.CHANNEL_CLOSE_OK))

    def take(self, key: str, channel: int, send: Send) -> None:
        if channel not in self.tags:  # closed: what was on the way is dropped
            return
        self.published += 1
        if key == self.guilty:
            del self.tags[channel]
            reason = wire.uint16(406) + wire.short_text("PRECONDITION_FAILED") + bytes(4)
            send(wire.method_frame(channel, wire.CHANNEL_CLOSE, reason))
        elif self.confirms_again or self.opened == 1:
            self.tags[channel] += 1
            send(confirm(self.tags[channel], multiple=False, channel=channel))


async def test_the_message_that_makes_the_broker_close_the_channel_is_found_by_halves() -> None:
    strict = Strict()
    messages = [Envelope("guilty" if n == 137 else "q", f"{n}") for n in range(1_000)]
    async with broker(strict.script, published=strict.take) as url:
        transport = RabbitMqTransport(url)
        answers = await transport.send(messages, NOW)
        await transport.close()
    assert [place for place, answer in enumerate(answers) if answer is not None] == [137]
    assert type(answers[137]) is TransportError
    assert strict.opened <= 25
    assert strict.published <= 2_000


async def test_the_search_for_it_ends_with_the_time_for_confirms_and_leaves_no_channel_behind(
    skip: Callable[[float], None], trusted: None
) -> None:
    strict = Strict(confirms_again=False)
    messages = [Envelope("guilty" if n == 5 else "q", f"{n}") for n in range(10)]
    async with broker(strict.script, published=strict.take) as url:
        transport = RabbitMqTransport(url)
        answers = await answers_after(transport, messages, lambda: strict.opened > 1, skip)
        assert answers[:5] == [None] * 5
        assert all(isinstance(answer, TransportUnavailable) for answer in answers[6:])
        link = await transport.publisher.connection.get_link()
        await until(lambda: not link._channels)
        await transport.close()


async def test_what_was_confirmed_is_known_though_the_send_is_cancelled() -> None:
    def step(send: Send) -> None:
        send(confirm(5, multiple=True))

    async with broker(Counting(10, step)) as url:
        transport = RabbitMqTransport(url)
        answers: list[object] = []

        def has(confirmed: int, messages: int) -> bool:
            channel = transport.publisher._channel
            flights = [] if channel is None else channel._flights
            return any((flight.confirmed_up_to, flight.last) == (confirmed, messages) for flight in flights)

        async def cancel_when(scope: anyio.CancelScope, confirmed: int, messages: int) -> None:
            await until(lambda: has(confirmed, messages))
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel_when, scope, 5, 10)
                answers += await transport.send([Envelope("q", f"{n}") for n in range(10)], NOW)
            assert scope.cancel_called
            assert answers[:5] == [None] * 5
            assert all(isinstance(answer, TransportUnavailable) for answer in answers[5:])
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

            with anyio.CancelScope() as scope:  # of this one nothing is known
                tasks.start_soon(cancel_when, scope, 10, 11)
                answers += await transport.send([Envelope("q", "m")], NOW)
            assert scope.cancelled_caught
            assert len(answers) == 10
        await transport.close()


@pytest.mark.parametrize("silent", [wire.CHANNEL_OPEN, wire.CONFIRM_SELECT])
async def test_a_broker_that_opens_no_channel_takes_no_longer_than_confirms_may(
    silent: wire.Method, skip: Callable[[float], None]
) -> None:
    asked = list[wire.Method]()
    async with broker(lambda method, *_: asked.append(method), silent=frozenset({silent})) as url:
        transport = RabbitMqTransport(url)
        (answer,) = await answers_after(transport, [Envelope("q", "m")], lambda: silent in asked, skip)
        assert isinstance(answer, TransportUnavailable)
        await transport.close()


class Socket:
    """Stands in for a connection whose socket takes nothing for now."""

    ended = blocked = None
    frame_limit = 131_072
    login = parse_url("amqp://host")

    def __init__(self) -> None:
        self.takes_more, self.written = asyncio.Event(), list[bytes]()

    async def wait_until_writable(self) -> None:
        await self.takes_more.wait()

    def write(self, content: bytes) -> None:
        self.written.append(content)

    def forget_channel(self, channel: PublishingChannel) -> None:
        """Its number may be used again."""


def sending_of(*ids: str) -> SendBatch:
    return SendBatch([Envelope("q", each, {}, b"x") for each in ids], NOW, 10_000_000)


async def test_nothing_is_written_on_a_channel_that_ended_while_the_socket_was_full() -> None:
    socket, sending = Socket(), sending_of("a", "b")
    channel = PublishingChannel(cast("AmqpConnection", socket), 1, 1_000)
    async with anyio.create_task_group() as tasks:

        async def publish() -> None:
            with pytest.raises(ChannelClosed):
                await channel.publish(sending)

        tasks.start_soon(publish)
        await anyio.wait_all_tasks_blocked()
        channel.detach(ChannelClosed(404, "no exchange"))
        socket.takes_more.set()
    channel.write_messages(sending, 2)
    assert socket.written == []
    assert [type(answer) for answer in sending.answers] == [ChannelClosed] * 2
    assert sending.in_flight == 0


def came_back(socket: Socket, properties: bytes) -> tuple[wire.Method, wire.Arguments, bytes, bytes]:
    told = wire.uint16(312) + wire.short_text("NO_ROUTE") + wire.short_text("") + wire.short_text("q")
    return wire.BASIC_RETURN, wire.Arguments(bytes(4) + told), properties, b"x"


async def test_what_comes_back_after_its_send_gave_up_is_not_taken_for_another() -> None:
    socket, old, new = Socket(), sending_of("old"), sending_of("new")
    channel = PublishingChannel(cast("AmqpConnection", socket), 1, 1_000)
    channel.write_messages(old, 1)
    (properties,) = [its for _, its in old.flights[0].sent_frames]
    old.abandon(TransportUnavailable("late"))
    channel.write_messages(new, 1)
    channel.on_content(*came_back(socket, properties))
    channel.on_method(wire.BASIC_ACK, bytes(4) + uint64(2) + b"\1")
    assert channel.end_error is None
    assert new.answers == [None]
    assert new.in_flight == 0


async def test_what_may_have_come_back_of_two_alike_is_sent_again_and_not_given_up() -> None:
    socket, old, new = Socket(), sending_of("same"), sending_of("same")
    channel = PublishingChannel(cast("AmqpConnection", socket), 1, 1_000)
    channel.write_messages(old, 1)
    (properties,) = [its for _, its in old.flights[0].sent_frames]
    old.abandon(TransportUnavailable("late"))
    channel.write_messages(new, 1)
    channel.on_content(*came_back(socket, properties))
    assert [type(answer) for answer in new.answers] == [TransportUnreachable]
    assert channel.end_error is None


class Pushed:
    """A channel on which three messages were pushed."""

    ended = None

    async def receive(self, limit: int) -> list[Delivery]:
        bodies = b"first", b"bad", b"last"
        return [Delivery(tag, False, b"\0\0", body, b"") for tag, body in enumerate(bodies, 1)]


async def test_a_message_that_cannot_be_read_keeps_nothing_beside_it_from_being_held() -> None:
    def read(delivery: Delivery) -> DecodedMessage:
        if delivery.body == b"bad":
            raise ZeroDivisionError
        return decode_message("q", delivery.properties, delivery.body, redelivered=delivery.redelivered)

    async def pushed() -> ConsumingChannel:
        return cast("ConsumingChannel", Pushed())

    receiver = RabbitMqReceiver(RabbitMqTransport("amqp://host"), "q", read)
    receiver._open_channel = pushed
    received = await receiver.receive(3)
    assert [each.envelope.body for each in received] == [b"first", b"bad", b"last"]
    assert list(received[1].envelope.headers) == [UNREADABLE]
    assert set(receiver._claims) == {each.token for each in received}


def pushed(tag: int, channel: int, lives: bytes | None = None, **counts: int) -> bytes:
    """Return what pushes a message to the first consumer of a channel; one that came back has counts.

    ``lives``: milliseconds, as a publisher says it; ``None``: for ever.
    """
    arguments = (
        wire.short_text("postdate-1")
        + uint64(tag)
        + bytes((bool(counts),))
        + wire.short_text("")
        + wire.short_text("q")
    )
    fields = b"".join(wire.short_text(f"x-{name}-count") + b"l" + uint64(count) for name, count in counts.items())
    flags, expiration = (1 << 13, b"") if lives is None else (1 << 13 | 1 << 8, wire.short_bytes(lives))
    properties = flags.to_bytes(2, "big") + wire.long_bytes(fields) + expiration
    header = wire.HEADER_FRAME.pack(wire.HEADER, channel, len(properties) + 12, 60, 0, 0)
    return wire.method_frame(channel, wire.BASIC_DELIVER, arguments) + header + properties + wire.END


class Pushing:
    """Pushes messages to whoever consumes, and notes all that it is told from then on."""

    def __init__(self, count: int, lives: Mapping[int, bytes] = MappingProxyType({}), **counts: int) -> None:
        self.count, self.lives, self.counts, self.told = count, lives, counts, list[wire.Method]()

    def __call__(self, method: wire.Method, channel: int, send: Send) -> None:
        self.told.append(method)
        if method == wire.BASIC_QOS:
            send(wire.method_frame(channel, wire.BASIC_QOS_OK))
        if method == wire.BASIC_CONSUME:
            tags = range(1, self.count + 1)
            messages = b"".join(pushed(tag, channel, self.lives.get(tag), **self.counts) for tag in tags)
            send(wire.method_frame(channel, wire.BASIC_CONSUME_OK, wire.short_text("postdate-1")) + messages)
            self.told.clear()
        if method == wire.CHANNEL_CLOSE:
            send(wire.method_frame(channel, wire.CHANNEL_CLOSE_OK))


@pytest.mark.parametrize(
    ("limits", "lives", "minutes", "left"),
    [({}, {}, 21, []), ({"message-ttl": 60_000}, {}, 2, []), ({}, {2: b"60000"}, 2, [3])],
    ids=["the answer", "the queue", "one of them"],
)
async def test_what_is_pushed_ahead_goes_back_before_the_broker_has_waited_too_long_for(
    skip: Callable[[float], None], limits: dict[str, int], lives: dict[int, bytes], minutes: int, left: list[int]
) -> None:
    """It stayed as long as handlers took, and after half an hour the broker took all that the channel held."""
    script = Pushing(3, lives)
    async with broker(script) as url:
        transport = RabbitMqTransport(f"{url}?heartbeat=0", prefetch=2)
        transport.limits["q"] = limits
        receiver = transport.receiver("q")
        await receiver.receive(1)
        await until(lambda: wire.BASIC_CANCEL in script.told)  # nobody has asked for a while
        channel = receiver._channel
        assert channel is not None
        assert len(channel._deliveries) == 2
        skip(60 * minutes)
        await until(lambda: script.told.count(wire.BASIC_NACK) == 2 - len(left))
        assert [each.tag for each in channel._deliveries] == left
        await transport.close()


@pytest.mark.parametrize("first", [{"q": None}, TransportUnreachable("away")], ids=["a new queue", "an outage"])
async def test_limits_that_are_unknown_are_asked_for_again_when_a_message_comes_back(
    monkeypatch: pytest.MonkeyPatch, skip: Callable[[float], None], first: dict[str, None] | Exception
) -> None:
    """In the first seconds of a queue nobody tells, and its receiver did not ask again: a policy was not known."""
    answers = [first, {"q": {"delivery-limit": 4}}]

    def tell(*_: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("postdate.backends.rabbitmq.observation.read_limits", tell)
    async with broker(Pushing(1, delivery=3)) as url:
        transport = RabbitMqTransport(f"{url}?heartbeat=0&management=1")
        receiver = transport.receiver("q")
        await receiver._open_channel()
        skip(31)  # who did not answer is left alone for a while
        (received,) = await receiver.receive(1)
        assert received.is_dropped_if_returned
        assert answers == []
        await transport.close()


@pytest.mark.parametrize(
    ("answer", "at_once", "later"),
    [
        (None, ["q", "p"], ["q", "p"]),
        (TransportUnreachable("away"), ["q"], ["q"]),
        (TransportError("it is none"), ["q"], []),
    ],
    ids=["of a queue", "none", "never"],
)
async def test_limits_are_asked_for_queue_by_queue_and_of_nobody_for_a_while_who_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
    skip: Callable[[float], None],
    answer: TransportError | None,
    at_once: list[str],
    later: list[str],
) -> None:
    asked = list[str]()

    def tell(login: object, version: str, queues: Sequence[str]) -> dict[str, None]:
        asked.extend(queues)
        if answer is not None:
            raise answer
        return dict.fromkeys(queues)

    async def receivers_begin(*queues: str) -> list[str]:
        asked.clear()
        for queue in queues:
            await transport.receiver(queue)._open_channel()
        return asked

    for pause in ("_RETRY_MANAGEMENT_SECONDS", "_REFRESH_LIMITS_SECONDS"):  # so long that none ends by itself
        monkeypatch.setattr(f"postdate.backends.rabbitmq.transport.{pause}", 600)
    monkeypatch.setattr("postdate.backends.rabbitmq.observation.read_limits", tell)
    async with broker(lambda method, channel, send: None) as url:
        transport = RabbitMqTransport(f"{url}?heartbeat=0&management=1")
        assert await receivers_begin("q", "p", "q", "p") == at_once
        skip(601)
        assert await receivers_begin("q", "p") == later
        await transport.close()


async def test_nothing_is_pushed_to_a_pump_that_stops_while_its_handler_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker pushed the next message for each that was acknowledged, and counted that it came back."""
    monkeypatch.setattr("postdate.backends.rabbitmq.consuming._IDLE_SECONDS", 600)
    script, begun, may_end = Pushing(3), anyio.Event(), anyio.Event()

    async def handle(received: Received) -> StepOutcome:
        begun.set()
        await may_end.wait()
        return StepOutcome(HANDLED)

    async with broker(script) as url:
        transport = RabbitMqTransport(url, prefetch=2)
        breaker = RepeatedFailures("Receive", "failed", SECOND, lambda text, error: None, NO_METRICS)
        pump = MessagePump(transport.receiver("q"), handle, 1, SystemClock(), breaker, "q")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump.run)
            await begun.wait()
            pump.stop()
            may_end.set()
        assert script.told[:4] == [wire.BASIC_CANCEL, wire.BASIC_NACK, wire.BASIC_NACK, wire.BASIC_ACK]
        await transport.close()


@pytest.mark.parametrize("is_idle", [False, True], ids=["just now", "while nobody asks"])
async def test_what_was_given_back_is_not_kept_ahead(*, is_idle: bool) -> None:
    script = Pushing(3)
    async with broker(script) as url:
        transport = RabbitMqTransport(url, prefetch=2)
        receiver = transport.receiver("q")
        (first,) = await receiver.receive(1)
        await until(lambda: not is_idle or wire.BASIC_CANCEL in script.told)
        await receiver.roll_back(first)
        await until(lambda: wire.BASIC_NACK in script.told)
        channel = receiver._channel
        assert channel is not None
        assert [each.tag for each in channel._deliveries] == [2, 3]
        await transport.close()


async def test_nobody_listens() -> None:
    async with broker(lambda *_: None) as url:
        pass
    transport = RabbitMqTransport(url)
    answers = [await transport.send([Envelope("q", "m")], NOW) for _ in range(2)]
    assert all(isinstance(answer, TransportUnreachable) for (answer,) in answers)
    assert "next attempt in" in str(answers[1])
    await transport.close()


async def test_a_server_that_never_answers_is_given_up() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"amqp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = RabbitMqTransport(url, confirms_within=0.2 * SECOND)
        (answer,) = await transport.send([Envelope("q", "m")], NOW)
        assert isinstance(answer, TransportUnavailable)
        await transport.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "amqp://",
        "amqp://host:port",
        "amqp://host?heartbeat=soon",
        "amqp://host?hartbeat=1",
        "amqps://host?cacertfile=/missing",
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        RabbitMqTransport(url.replace("//", "//user:secret@") if "host" in url else url)
    assert "secret" not in str(refused.value)


def test_a_url_has_all_its_parts() -> None:
    login = parse_url("amqp://us%40er:p%2Fw@[::1]:7/v%2Fh?heartbeat=5")
    assert (login.host, login.port, login.virtual_host, login.user) == ("::1", 7, "v/h", "us@er")
    assert (login.password, login.heartbeat_seconds) == ("p/w", 5)
    assert "p/w" not in repr(login) + login.description + repr(RabbitMqTransport("amqp://a:p%2Fw@h"))
    assert parse_url("amqps://h").port == 5671
    assert parse_url("amqp://h/").virtual_host == "/"


@pytest.mark.parametrize("setting", [{"queue_type": "stream"}, {"confirm_window": 0}, {"prefetch": -1}])
def test_a_wrong_setting_is_refused(setting: dict) -> None:
    with pytest.raises(ConfigurationError):
        RabbitMqTransport("amqp://h", **setting)
