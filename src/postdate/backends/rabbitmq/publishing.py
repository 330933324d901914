"""Publishing with confirms: many messages are in flight at once, each with an answer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Final

from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import PublishAddress, parse_address
from postdate.backends.rabbitmq.connection import AmqpConnection, Channel
from postdate.backends.rabbitmq.properties import properties_of
from postdate.errors import (
    DestinationUnavailable,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    TransportUnreachable,
)
from postdate.messages import Envelope, encode_headers, too_large_error

log = logging.getLogger("postdate.rabbitmq")

Answers = list[PostdateError | None]

_WRITTEN_AT_ONCE_BYTES = 1024 * 1024  # then the channel waits until the socket accepts more
_MOST_ADDRESSES = 10_000  # limits the memory for encoded addresses
_MOST_ABANDONED = 100_000
"""The most abandoned messages that are remembered. If an older one is returned, it may be mistaken for another one."""

_MANDATORY: Final = b"\x01"
_JSON_GROWTH: Final = 6
"""The most bytes of JSON for one byte of a header. The size of a message is measured in JSON."""


_BESIDE_HEADERS: Final = 8 * 1024
"""Bytes reserved for other properties, and for the headers that a brief error copy adds."""


def largest_headers(frame_limit: int) -> int:
    """Return the most bytes of headers, as JSON, that fit into one frame together with those of a brief error copy.

    In JSON each header is at least as long as in a table of AMQP or as a property.
    """
    return frame_limit - wire.FRAME_OVERHEAD - wire.HEADER_FRAME.size - _BESIDE_HEADERS


class SendBatch:
    """Messages of one send, and their answers.

    ``limit`` is the most bytes of a message. ``started_at`` is the time of the first write, in seconds of the event
    loop's clock.
    """

    __slots__ = (
        "answers",
        "change_event",
        "envelopes",
        "flights",
        "in_flight",
        "limit",
        "now",
        "position",
        "started_at",
    )

    def __init__(self, envelopes: Sequence[Envelope], now: datetime, limit: int) -> None:
        self.envelopes, self.now, self.limit = envelopes, now, limit
        self.answers: Answers = [None] * len(envelopes)
        self.flights: list[Flight] = []
        self.position = self.in_flight = 0
        self.change_event = asyncio.Event()
        self.started_at = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether any message has no answer yet."""
        return self.in_flight > 0 or self.position < len(self.envelopes)

    def set_error(self, destination: str, error: PostdateError) -> None:
        """Set the error of all messages to one destination."""
        for index, envelope in enumerate(self.envelopes):
            if envelope.destination == destination:
                self.answers[index] = error

    def abandon(self, error: PostdateError) -> None:
        """Set the error of all unconfirmed messages."""
        for flight in self.flights:
            flight.abandon(error)
        for index in range(self.position, len(self.answers)):
            self.answers[index] = self.answers[index] or error
        self.position = len(self.answers)


class Flight:
    """Messages of one send that were written together: delivery tags ``first`` to ``last``, in order.

    ``indexes`` has the index of each message in the sending. All tags up to ``confirmed_up_to`` are confirmed.
    """

    __slots__ = (
        "_confirmed_tags",
        "_cursor",
        "_returned_tags",
        "batch",
        "confirmed_up_to",
        "first",
        "indexes",
        "last",
        "sent_frames",
    )

    def __init__(self, first: int, batch: SendBatch) -> None:
        self.first, self.last, self.confirmed_up_to = first, first - 1, first - 1
        self.batch = batch
        self.indexes: list[int] = []
        self.sent_frames: list[tuple[bytes, bytes]] = []
        self._confirmed_tags: set[int] = set()
        self._returned_tags: set[int] = set()
        self._cursor = 0

    @property
    def is_abandoned(self) -> bool:
        """Return whether no caller waits for its answers any more."""
        return self.batch is _NO_OWNER

    @property
    def in_flight(self) -> int:
        """The number of unconfirmed messages."""
        return self.last - self.confirmed_up_to - len(self._confirmed_tags)

    def confirm(self, tag: int, *, multiple: bool) -> None:
        """Remember that a tag is confirmed; with ``multiple`` all tags up to it are confirmed."""
        if multiple:
            self.confirmed_up_to = max(self.confirmed_up_to, min(tag, self.last))
            self._confirmed_tags = {each for each in self._confirmed_tags if each > self.confirmed_up_to}
        elif tag > self.confirmed_up_to:
            self._confirmed_tags.add(tag)
        while self.confirmed_up_to + 1 in self._confirmed_tags:
            self.confirmed_up_to += 1
            self._confirmed_tags.remove(self.confirmed_up_to)

    def unconfirmed_tags(self) -> list[int]:
        return [tag for tag in range(self.confirmed_up_to + 1, self.last + 1) if tag not in self._confirmed_tags]

    def set_error(self, tag: int, error: PostdateError) -> None:
        """Set the error of a message, unless it is answered."""
        if not self.is_unanswered(tag):
            return
        if self.is_abandoned:
            self._returned_tags.add(tag)
        else:
            self.batch.answers[self.indexes[tag - self.first]] = error

    def is_unanswered(self, tag: int) -> bool:
        if tag <= self.confirmed_up_to or tag in self._confirmed_tags:
            return False
        if self.is_abandoned:
            return tag not in self._returned_tags
        return self.batch.answers[self.indexes[tag - self.first]] is None

    def abandon(self, error: PostdateError) -> None:
        """Set the error of every unanswered message, ignore later confirms, and free the window.

        Addresses and properties are kept: a message that is returned later must not be mistaken for one of another
        send.
        """
        if self.is_abandoned:
            return
        for tag in self.unconfirmed_tags():
            self.set_error(tag, error)
        self.indexes, self.batch = [], _NO_OWNER

    def find_tag(self, method: bytes, properties: bytes | None) -> int | None:
        """Return the tag of the next unanswered message to this address, with these properties if given."""
        for index in chain(range(self._cursor, len(self.sent_frames)), range(self._cursor)):
            tag = self.first + index
            sent_method, sent_properties = self.sent_frames[index]
            if sent_method == method and properties in {None, sent_properties} and self.is_unanswered(tag):
                self._cursor = index + 1
                return tag
        return None


_NO_OWNER: Final = SendBatch((), datetime.min.replace(tzinfo=UTC), 0)
"""The owner of abandoned flights, so that their messages are not kept in memory."""


class PublishingChannel(Channel):
    """A channel in confirm mode, for any number of tasks.

    Each send has its own window, so a queue that does not confirm does not delay other sends.
    """

    def __init__(self, link: AmqpConnection, number: int, window: int) -> None:
        super().__init__(link, number)
        self._window = window
        self._next_tag = 1
        self._flights: deque[Flight] = deque()
        self._methods: dict[str, bytes] = {}
        self._may_publish = asyncio.Event()
        self.on_block()

    async def publish(self, batch: SendBatch) -> None:
        """Publish the messages without an answer, in order, and wait for their answers."""
        count = len(batch.envelopes)
        while batch.position < count:
            await self._wait_for_window(batch, min(count - batch.position, max(1, self._window // 4)))
            self.write_messages(batch, min(count, batch.position + self._window - batch.in_flight))
        while batch.in_flight:
            batch.change_event.clear()
            await batch.change_event.wait()

    async def _wait_for_window(self, batch: SendBatch, count: int) -> None:
        """Wait until ``count`` messages may be written."""
        while self.end_error is None:
            await self.link.wait_until_writable()
            if self.end_error is not None:  # it ended during the wait: another channel may have its number now
                break
            if not self._may_publish.is_set():
                await self._may_publish.wait()
            elif self._window - batch.in_flight >= count:
                return
            else:
                batch.change_event.clear()
                await batch.change_event.wait()
        raise self.end_error

    def write_messages(self, batch: SendBatch, end: int) -> None:
        """Write messages up to an index, or up to a megabyte; one loop without calls, because it is hot."""
        envelopes, answers, position, limit = batch.envelopes, batch.answers, batch.position, batch.limit
        number, user, methods, now = self.number, self.link.login.user, self._methods, batch.now
        frame_limit = self.link.frame_limit - wire.FRAME_OVERHEAD
        flight = Flight(self._next_tag, batch)
        content: list[bytes] = []
        size = 0
        while position < end and size < _WRITTEN_AT_ONCE_BYTES:
            envelope, index = envelopes[position], position
            position += 1
            if answers[index] is not None:
                continue
            body = envelope.body
            try:
                method = methods.get(envelope.destination) or self._method_frame(envelope.destination)
                properties = properties_of(envelope, now, user)
            except PostdateError as error:
                answers[index] = error
                continue
            length, header_length = len(body), len(properties) + 12
            if header_length > frame_limit or header_length * _JSON_GROWTH + length > limit:
                error = _too_large(envelope, header_length, frame_limit, limit)
                if error is not None:
                    answers[index] = error
                    continue
            content += (method, wire.HEADER_FRAME.pack(2, number, header_length, 60, 0, length), properties)
            if length <= frame_limit:
                if length:
                    content += (b"\xce", wire.FRAME.pack(3, number, length), body)
            else:
                content += self._split_body(body, frame_limit)
            content.append(b"\xce")
            size += length + header_length
            flight.indexes.append(index)
            flight.sent_frames.append((method, properties))
        batch.position = position
        if flight.indexes:
            self._write_flight(flight, b"".join(content))

    def _write_flight(self, flight: Flight, content: bytes) -> None:
        count = len(flight.indexes)
        flight.last = flight.first + count - 1
        self._next_tag += count
        if self.end_error is not None:
            flight.abandon(self.end_error)
            return
        flight.batch.flights.append(flight)
        flight.batch.in_flight += count
        self._flights.append(flight)
        self.link.write(content)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the oldest abandoned messages, as some are never confirmed: this bounds the memory."""
        for flight in self._flights:
            if flight.first > self._next_tag - _MOST_ABANDONED:
                break
            if flight.is_abandoned:
                flight.sent_frames = []

    def _split_body(self, body: bytes, limit: int) -> list[bytes]:
        """Return a body as frames. Each begins with the end mark of the frame before; the last end mark is missing."""
        parts: list[bytes] = []
        for start in range(0, len(body), limit):
            part = body[start : start + limit]
            parts += (wire.END, wire.FRAME.pack(wire.BODY, self.number, len(part)), part)
        return parts

    def _method_frame(self, destination: str) -> bytes:
        method = self._publish_frame(parse_address(destination))
        if len(self._methods) < _MOST_ADDRESSES:
            self._methods[destination] = method
        return method

    def _publish_frame(self, address: PublishAddress) -> bytes:
        names = wire.short_text(address.exchange) + wire.short_text(address.routing_key)
        return wire.method_frame(self.number, wire.BASIC_PUBLISH, b"\0\0" + names + _MANDATORY)

    # --- what the server says

    @override
    def on_method(self, method: wire.Method, payload: bytes) -> None:
        if method not in {wire.BASIC_ACK, wire.BASIC_NACK}:
            return
        # The arguments are after class and method.
        tag, multiple = int.from_bytes(payload[4:12], "big"), payload[12] & 1 == 1
        if method == wire.BASIC_NACK:
            error = DestinationUnavailable("the queue accepts no message now (nack): it is full, or has no leader")
            for flight in self._flights:
                for each in flight.unconfirmed_tags():
                    if each == tag or (multiple and each < tag):
                        flight.set_error(each, error)
        self._confirm(tag, multiple=multiple)  # After setting an error: a confirmed message gets no error.

    def _confirm(self, tag: int, *, multiple: bool) -> None:
        confirmed_flights: list[Flight] = []
        for flight in self._flights:
            if flight.first > tag:
                break
            if not multiple and tag > flight.last:
                continue
            previous_count = flight.in_flight
            flight.confirm(tag, multiple=multiple)
            if previous_count != flight.in_flight:
                flight.batch.in_flight -= previous_count - flight.in_flight
                flight.batch.change_event.set()
            if flight.confirmed_up_to == flight.last:
                confirmed_flights.append(flight)
        for flight in confirmed_flights:
            self._flights.remove(flight)

    @override
    def on_content(self, method: wire.Method, arguments: wire.Arguments, properties: bytes, body: bytes) -> None:
        """Handle a returned message: no queue took it. Its confirm follows."""
        if method != wire.BASIC_RETURN:
            return
        code, text = arguments.unsigned(2), arguments.short_text()
        address = PublishAddress(arguments.short_text(), arguments.short_text())
        frame = self._publish_frame(address)
        error: PostdateError = _unrouted_error(address)
        for returned_properties in (properties, None):
            awaited_match, abandoned = (
                self._find(frame, returned_properties, abandoned=False),
                self._find(frame, returned_properties, abandoned=True),
            )
            if awaited_match is not None and abandoned is not None:
                abandoned[0].set_error(abandoned[1], error)
                error = TransportUnreachable(f"RabbitMQ returned this message or an identical one: {error}")
            match = awaited_match or abandoned
            if match is not None:
                match[0].set_error(match[1], error)
                return
        if any(flight.is_abandoned for flight in self._flights):  # The message may be of a forgotten flight.
            return
        log.error("RabbitMQ returned a message that is not in flight: %d %s: %s", code, text, error)
        self.close(TransportUnreachable("RabbitMQ returned a message that is not in flight"))

    def _find(self, method: bytes, properties: bytes | None, *, abandoned: bool) -> tuple[Flight, int] | None:
        for flight in self._flights:
            if flight.is_abandoned is abandoned and (tag := flight.find_tag(method, properties)) is not None:
                return flight, tag
        return None

    @override
    def on_block(self) -> None:
        if self.link.blocked is None:
            self._may_publish.set()
        else:
            self._may_publish.clear()

    @override
    def on_end(self, error: PostdateError) -> None:
        self._may_publish.set()
        for flight in self._flights:
            batch = flight.batch
            flight.abandon(error)
            batch.in_flight = 0
            batch.change_event.set()
        self._flights.clear()


def _unrouted_error(address: PublishAddress) -> QueueNotFound:
    if address.exchange:
        return QueueNotFound(
            f"exchange {address.exchange!r} has no queue for the routing key {address.routing_key!r}; bind a queue "
            f"to it"
        )
    return QueueNotFound.of(address.routing_key)


def _too_large(envelope: Envelope, header_length: int, frame_limit: int, limit: int) -> MessageTooLarge | None:
    if header_length > frame_limit:
        return MessageTooLarge(
            f"the headers of message {envelope.message_id!r} to {envelope.destination!r} have {header_length:,} bytes, "
            f"AMQP takes {frame_limit:,} on this connection; put large content into the body"
        )
    return too_large_error(envelope, encode_headers(envelope.headers), limit)


def send_error_of(envelope: Envelope, limit: int) -> PostdateError | None:
    """Return the reason why a message cannot be sent, as far as it is known without sending; else ``None``."""
    try:
        parse_address(envelope.destination)
    except QueueNotFound as error:
        return error
    return _too_large(envelope, 0, 0, limit)
