"""What each way of publishing to RabbitMQ reaches of what the broker takes. Source of the figures in ADR 0006.

    eval "$(scripts/services env)"; .venv/bin/python benchmarks/rabbitmq_clients.py [--queue-type quorum] [--rounds 3]

Persistent messages with about 200 bytes of headers and 300 of body, each confirmed, 1,000 on the way. The ways take
turns, so that a busy machine slows all of them; the medians are compared.
"""

import argparse
import asyncio
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
import pika

from postdate import Envelope
from postdate.backends.rabbitmq.publishing import PublishingChannel, SendBatch
from postdate.backends.rabbitmq.transport import RabbitMqTransport

QUEUE = "benchmark.clients"
WINDOW = 1_000
NOW = datetime(2026, 1, 1, tzinfo=UTC)
BODY = bytes(300)
HEADERS = {
    "NServiceBus.MessageId": "0193a4c7-7e67-7000-8000-0123456789ab",
    "NServiceBus.EnclosedMessageTypes": "Shop.Orders.PaymentTimeout",
    "NServiceBus.ContentType": "application/json",
    "NServiceBus.TimeSent": "2026-01-01 00:00:00:000000 Z",
}


class Watch:
    """Counts seconds, and what of them this process used of a processor."""

    def __init__(self) -> None:
        self._began, self._used = time.perf_counter(), time.process_time()

    def rate(self, count: int) -> "Rate":
        used = time.process_time() - self._used
        return Rate(count / (time.perf_counter() - self._began), used / count * 1e6)


class Rate(NamedTuple):
    per_second: float
    processor_us: float


def envelopes(count: int) -> list[Envelope]:
    return [Envelope(QUEUE, f"0193a4c7-7e67-7000-8000-{n:012d}", HEADERS, BODY, due=NOW) for n in range(count)]


# --- the broker itself: frames made beforehand, on a bare socket ------------------------------------------------------


class Recorder:
    """Stands in for a connection and keeps what would be sent."""

    def __init__(self, user: str) -> None:
        self.login = type("Login", (), {"user": user})
        self.frame_limit, self.blocked, self.loop = 131_072, None, None
        self.written: list[bytes] = []

    def write(self, content: bytes) -> None:
        self.written.append(content)


async def frames(count: int) -> bytes:
    recorder = Recorder("guest")
    channel = PublishingChannel(recorder, 1, count)
    sending = SendBatch(envelopes(count), NOW, 1 << 30)
    while sending.position < count:
        channel.write_messages(sending, count)
    return b"".join(recorder.written)


def raw(url: str, count: int) -> Rate:
    stream = asyncio.run(frames(WINDOW // 2))
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        open_bare(connection)
        watch, sent, confirmed, buffer = Watch(), 0, 0, b""
        while confirmed < count:
            while sent < count and sent - confirmed <= WINDOW // 2:
                connection.sendall(stream)
                sent += WINDOW // 2
            buffer += connection.recv(1 << 16)
            confirmed, buffer = max_confirmed(buffer, confirmed)
        return watch.rate(count)


def open_bare(connection: socket.socket) -> None:
    def method(channel: int, class_: int, number: int, arguments: bytes) -> bytes:
        return struct.pack(">BHIHH", 1, channel, 4 + len(arguments), class_, number) + arguments + b"\xce"

    connection.sendall(b"AMQP\x00\x00\x09\x01")
    skip_to(connection, (10, 10))
    connection.sendall(method(0, 10, 11, bytes(4) + b"\x05PLAIN" + struct.pack(">I", 12) + b"\0guest\0guest\x05en_US"))
    skip_to(connection, (10, 30))
    connection.sendall(method(0, 10, 31, struct.pack(">HIH", 10, 131_072, 0)) + method(0, 10, 40, b"\x01/\0\0"))
    skip_to(connection, (10, 41))
    connection.sendall(method(1, 20, 10, b"\0"))
    skip_to(connection, (20, 11))
    connection.sendall(method(1, 85, 10, b"\0"))
    skip_to(connection, (85, 11))


def skip_to(connection: socket.socket, wanted: tuple[int, int]) -> None:
    buffer = b""
    while True:
        buffer += connection.recv(65_536)
        if len(buffer) >= 11 and struct.unpack_from(">HH", buffer, 7) == wanted:
            return


def max_confirmed(buffer: bytes, confirmed: int) -> tuple[int, bytes]:
    """Count the confirms: those of a single queue come in order, some of them for many."""
    position = 0
    while len(buffer) - position >= 21:
        tag = int.from_bytes(buffer[position + 11 : position + 19], "big")
        confirmed = max(confirmed, tag) if buffer[position + 19] else confirmed + 1
        position += 21
    return confirmed, buffer[position:]


# --- pika -------------------------------------------------------------------------------------------------------------


class PikaPublisher:
    """Publishes on pika's SelectConnection as fast as a window allows; with ``stream``, frames of ours through it."""

    def __init__(self, url: str, count: int, stream: bytes | None) -> None:
        self.count, self.stream = count, stream
        self.sent = self.confirmed = 0
        self.watch: Watch | None = None
        self.reached: Rate | None = None
        self.messages = envelopes(count)
        self.connection = pika.SelectConnection(pika.URLParameters(url), on_open_callback=self.opened)

    def run(self) -> Rate:
        self.connection.ioloop.start()
        return self.reached

    def opened(self, connection) -> None:
        connection.channel(on_open_callback=self.ready)

    def ready(self, channel) -> None:
        self.channel = channel
        channel.confirm_delivery(self.answered, callback=lambda _frame: self.begin())

    def begin(self) -> None:
        self.watch = Watch()
        self.fill()

    def fill(self) -> None:
        if self.stream is not None:
            while self.sent < self.count and self.sent - self.confirmed <= WINDOW // 2:
                self.connection._output_marshaled_frames([self.stream])  # noqa: SLF001
                self.sent += WINDOW // 2
            return
        while self.sent < self.count and self.sent - self.confirmed < WINDOW:
            message = self.messages[self.sent]
            properties = pika.BasicProperties(
                headers={**message.headers, "due": "2026-01-01"}, delivery_mode=2, message_id=message.message_id
            )
            self.channel.basic_publish("", QUEUE, message.body, properties, mandatory=True)
            self.sent += 1

    def answered(self, frame) -> None:
        method = frame.method
        self.confirmed = max(self.confirmed, method.delivery_tag) if method.multiple else self.confirmed + 1
        if self.confirmed < self.count:
            self.fill()
        elif self.reached is None:
            self.reached = self.watch.rate(self.count)
            self.connection.add_on_close_callback(lambda *_: self.connection.ioloop.stop())
            self.connection.close()


def pika_select(url: str, count: int) -> Rate:
    return PikaPublisher(url, count, None).run()


def pika_with_our_frames(url: str, count: int) -> Rate:
    return PikaPublisher(url, count, asyncio.run(frames(WINDOW // 2))).run()


def pika_blocking(url: str, count: int) -> Rate:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.confirm_delivery()
    messages = envelopes(count // 100)
    watch = Watch()
    for message in messages:
        properties = pika.BasicProperties(headers=HEADERS, delivery_mode=2, message_id=message.message_id)
        channel.basic_publish("", QUEUE, message.body, properties, mandatory=True)
    rate = watch.rate(len(messages))
    connection.close()
    return rate


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(batch: int, at_once: int) -> Callable[[str, int], Rate]:
    async def publish(url: str, count: int) -> Rate:
        transport = RabbitMqTransport(url, confirm_window=WINDOW)
        batches = [envelopes(batch) for _ in range(count // batch)]
        await transport.send(envelopes(1), NOW)

        async def worker() -> None:
            while batches:
                answers = await transport.send(batches.pop(), NOW)
                assert not any(answers)

        watch = Watch()
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(worker)
        rate = watch.rate(count // batch * batch)
        await transport.close()
        return rate

    return lambda url, count: anyio.run(publish, url, count)


def ours_writing_only(_url: str, count: int) -> Rate:
    """Return how many messages a second the encoding alone would allow."""
    messages = envelopes(WINDOW)

    async def encode() -> Rate:
        channel = PublishingChannel(Recorder("guest"), 1, count)
        watch = Watch()
        for _ in range(count // WINDOW):
            channel.write_messages(SendBatch(messages, NOW, 1 << 24), WINDOW)
            channel.link.written.clear()
        return watch.rate(count)

    return anyio.run(encode)


WAYS: dict[str, Callable[[str, int], Rate]] = {
    "raw socket, frames made before": raw,
    "pika, BlockingConnection, one at a time": pika_blocking,
    "pika, SelectConnection": pika_select,
    "pika, frames made before in its output": pika_with_our_frames,
    "ours, 1 send of 100 at once": ours(100, 1),
    "ours, 1 send of 1,000 at once": ours(1_000, 1),
    "ours, 4 sends of 250 at once": ours(250, 4),
    "ours, 4 sends of 1,000 at once": ours(1_000, 4),
    "ours, making the frames alone": ours_writing_only,
}


def fresh_queue(url: str, queue_type: str) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.queue_delete(QUEUE)
    channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": queue_type})
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue-type", default="quorum", choices=["quorum", "classic"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=30_000)
    parser.add_argument("--only", default="", help="ways whose name contains this, beside the raw socket")
    options = parser.parse_args()
    url = os.environ["POSTDATE_RABBITMQ_URL"]
    ways = {name: way for name, way in WAYS.items() if way is raw or options.only in name}
    rates: dict[str, list[Rate]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            fresh_queue(url, options.queue_type)
            rates[name].append(way(url, options.count))
    limit = statistics.median(each.per_second for each in next(iter(rates.values())))
    for name, measured in rates.items():
        rate = statistics.median(each.per_second for each in measured)
        used = min(each.processor_us for each in measured)
        print(f"{name:42} {rate:9,.0f}/s  {rate / limit:5.2f} of the limit, {used:6.1f} µs of processor a message")


if __name__ == "__main__":
    main()
