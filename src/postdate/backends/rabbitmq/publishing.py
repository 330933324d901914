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
from postdate.backends.rabbitmq.wire import FRAME, FRAME_OVERHEAD, HEADER_FRAME, Arguments, Method
from postdate.errors import (
    DestinationUnavailable,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    TransportUnreachable,
)
from postdate.messages import Envelope, encode_headers, why_too_large

log = logging.getLogger("postdate.rabbitmq")

Answers = list[PostdateError | None]

_WRITTEN_AT_ONCE_BYTES = 1024 * 1024
_MOST_ADDRESSES = 10_000
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
    return frame_limit - FRAME_OVERHEAD - HEADER_FRAME.size - _BESIDE_HEADERS


class Sending:
    """Messages of one send, and their answers.

    ``limit`` is the most bytes of a message. ``began`` is the time of the first write, in seconds of the event loop's
    clock.
    """

    __slots__ = ("answers", "began", "envelopes", "flights", "limit", "news", "now", "on_the_way", "position")

    def __init__(self, envelopes: Sequence[Envelope], now: datetime, limit: int) -> None:
        self.envelopes, self.now, self.limit = envelopes, now, limit
        self.answers: Answers = [None] * len(envelopes)
        self.flights: list[Flight] = []
        self.position = self.on_the_way = 0
        self.news = asyncio.Event()
        self.began = 0.0

    @property
    def is_open(self) -> bool:
        """Whether any message has no answer yet."""
        return self.on_the_way > 0 or self.position < len(self.envelopes)

    def answer(self, destination: str, error: PostdateError) -> None:
        """Set the error of all messages to one destination."""
        for place, envelope in enumerate(self.envelopes):
            if envelope.destination == destination:
                self.answers[place] = error

    def give_up(self, error: PostdateError) -> None:
        """Set the error of all unconfirmed messages."""
        for flight in self.flights:
            flight.give_up(error)
        for place in range(self.position, len(self.answers)):
            self.answers[place] = self.answers[place] or error
        self.position = len(self.answers)


class Flight:
    """Messages of one send that were written together: delivery tags ``first`` to ``last``, in order.

    ``places`` has the index of each message in the sending. All tags up to ``low`` are confirmed.
    """

    __slots__ = ("_apart", "_came_back", "_cursor", "first", "last", "low", "places", "sending", "sent")

    def __init__(self, first: int, sending: Sending) -> None:
        self.first, self.last, self.low = first, first - 1, first - 1
        self.sending = sending
        self.places: list[int] = []
        self.sent: list[tuple[bytes, bytes]] = []
        self._apart: set[int] = set()
        self._came_back: set[int] = set()
        self._cursor = 0

    @property
    def is_abandoned(self) -> bool:
        """Whether no caller waits for its answers any more."""
        return self.sending is _NOBODY

    @property
    def on_the_way(self) -> int:
        """Number of unconfirmed messages."""
        return self.last - self.low - len(self._apart)

    def settle(self, tag: int, *, multiple: bool) -> None:
        """Note that a tag is confirmed; with ``multiple`` all tags up to it are."""
        if multiple:
            self.low = max(self.low, min(tag, self.last))
            self._apart = {each for each in self._apart if each > self.low}
        elif tag > self.low:
            self._apart.add(tag)
        while self.low + 1 in self._apart:
            self.low += 1
            self._apart.remove(self.low)

    def unsettled(self) -> list[int]:
        return [tag for tag in range(self.low + 1, self.last + 1) if tag not in self._apart]

    def fail(self, tag: int, error: PostdateError) -> None:
        """Set the error of a message, unless it is answered."""
        if not self.is_unanswered(tag):
            return
        if self.is_abandoned:
            self._came_back.add(tag)
        else:
            self.sending.answers[self.places[tag - self.first]] = error

    def is_unanswered(self, tag: int) -> bool:
        if tag <= self.low or tag in self._apart:
            return False
        if self.is_abandoned:
            return tag not in self._came_back
        return self.sending.answers[self.places[tag - self.first]] is None

    def give_up(self, error: PostdateError) -> None:
        """Set the error of every unanswered message, ignore later confirms, and free the window.

        Addresses and properties are kept: a message that is returned later must not be mistaken for one of another
        send.
        """
        if self.is_abandoned:
            return
        for tag in self.unsettled():
            self.fail(tag, error)
        self.places, self.sending = [], _NOBODY

    def find(self, method: bytes, properties: bytes | None) -> int | None:
        """Return the tag of the next unanswered message to this address, with these properties if given."""
        for index in chain(range(self._cursor, len(self.sent)), range(self._cursor)):
            tag = self.first + index
            to, its = self.sent[index]
            if to == method and properties in {None, its} and self.is_unanswered(tag):
                self._cursor = index + 1
                return tag
        return None


_NOBODY: Final = Sending((), datetime.min.replace(tzinfo=UTC), 0)
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

    async def publish(self, sending: Sending) -> None:
        """Publish the messages without an answer, in order, and wait for their answers."""
        count = len(sending.envelopes)
        while sending.position < count:
            await self._wait_for_window(sending, min(count - sending.position, max(1, self._window // 4)))
            self.write_some(sending, min(count, sending.position + self._window - sending.on_the_way))
        while sending.on_the_way:
            sending.news.clear()
            await sending.news.wait()

    async def _wait_for_window(self, sending: Sending, enough: int) -> None:
        """Wait until ``enough`` messages may be written."""
        while self.ended is None:
            await self.link.flushed()
            if self.ended is not None:  # it ended during the wait: another channel may have its number now
                break
            if not self._may_publish.is_set():
                await self._may_publish.wait()
            elif self._window - sending.on_the_way >= enough:
                return
            else:
                sending.news.clear()
                await sending.news.wait()
        raise self.ended

    def write_some(self, sending: Sending, end: int) -> None:
        """Write messages up to an index, or up to a megabyte; one loop without calls, because it is hot."""
        envelopes, answers, position, limit = sending.envelopes, sending.answers, sending.position, sending.limit
        number, user, methods, now = self.number, self.link.login.user, self._methods, sending.now
        frame_limit = self.link.frame_limit - FRAME_OVERHEAD
        flight = Flight(self._next_tag, sending)
        content: list[bytes] = []
        size = 0
        while position < end and size < _WRITTEN_AT_ONCE_BYTES:
            envelope, place = envelopes[position], position
            position += 1
            if answers[place] is not None:
                continue
            body = envelope.body
            try:
                method = methods.get(envelope.destination) or self._method_frame(envelope.destination)
                properties = properties_of(envelope, now, user)
            except PostdateError as error:
                answers[place] = error
                continue
            length, header_length = len(body), len(properties) + 12
            if header_length > frame_limit or header_length * _JSON_GROWTH + length > limit:
                error = _too_large(envelope, header_length, frame_limit, limit)
                if error is not None:
                    answers[place] = error
                    continue
            content += (method, HEADER_FRAME.pack(2, number, header_length, 60, 0, length), properties)
            if length <= frame_limit:
                if length:
                    content += (b"\xce", FRAME.pack(3, number, length), body)
            else:
                content += self._cut(body, frame_limit)
            content.append(b"\xce")
            size += length + header_length
            flight.places.append(place)
            flight.sent.append((method, properties))
        sending.position = position
        if flight.places:
            self._take_off(flight, b"".join(content))

    def _take_off(self, flight: Flight, content: bytes) -> None:
        count = len(flight.places)
        flight.last = flight.first + count - 1
        self._next_tag += count
        if self.ended is not None:
            flight.give_up(self.ended)
            return
        flight.sending.flights.append(flight)
        flight.sending.on_the_way += count
        self._flights.append(flight)
        self.link.write(content)
        self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        """Forget the oldest abandoned messages, as some are never confirmed: this bounds the memory."""
        for flight in self._flights:
            if flight.first > self._next_tag - _MOST_ABANDONED:
                break
            if flight.is_abandoned:
                flight.sent = []

    def _cut(self, body: bytes, limit: int) -> list[bytes]:
        """Return a body as frames. Each begins with the end mark of the frame before; the last end mark is missing."""
        parts: list[bytes] = []
        for start in range(0, len(body), limit):
            part = body[start : start + limit]
            parts += (wire.END, FRAME.pack(wire.BODY, self.number, len(part)), part)
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
    def on_method(self, method: Method, payload: bytes) -> None:
        if method not in {wire.BASIC_ACK, wire.BASIC_NACK}:
            return
        tag, multiple = int.from_bytes(payload[4:12], "big"), payload[12] & 1 == 1  # behind class and method
        if method == wire.BASIC_NACK:
            error = DestinationUnavailable("the queue takes no message now (nack): it is full, or has no leader")
            for flight in self._flights:
                for each in flight.unsettled():
                    if each == tag or (multiple and each < tag):
                        flight.fail(each, error)
        self._settle(tag, multiple=multiple)  # after fail: a settled message takes no error

    def _settle(self, tag: int, *, multiple: bool) -> None:
        landed: list[Flight] = []
        for flight in self._flights:
            if flight.first > tag:
                break
            if not multiple and tag > flight.last:
                continue
            before = flight.on_the_way
            flight.settle(tag, multiple=multiple)
            if before != flight.on_the_way:
                flight.sending.on_the_way -= before - flight.on_the_way
                flight.sending.news.set()
            if flight.low == flight.last:
                landed.append(flight)
        for flight in landed:
            self._flights.remove(flight)

    @override
    def on_content(self, method: Method, arguments: Arguments, properties: bytes, body: bytes) -> None:
        """Handle a returned message: no queue took it. Its confirm follows."""
        if method != wire.BASIC_RETURN:
            return
        code, text = arguments.unsigned(2), arguments.short_text()
        address = PublishAddress(arguments.short_text(), arguments.short_text())
        frame = self._publish_frame(address)
        error: PostdateError = _nowhere(address)
        for its in (properties, None):
            waited_for, abandoned = self._find(frame, its, abandoned=False), self._find(frame, its, abandoned=True)
            if waited_for is not None and abandoned is not None:
                abandoned[0].fail(abandoned[1], error)
                error = TransportUnreachable(f"perhaps not this message, but one like it came back: {error}")
            sent = waited_for or abandoned
            if sent is not None:
                sent[0].fail(sent[1], error)
                return
        if any(flight.is_abandoned for flight in self._flights):  # of a forgotten flight
            return
        log.error("RabbitMQ returned a message that is not on the way: %d %s: %s", code, text, error)
        self.close(TransportUnreachable("RabbitMQ returned a message that is not on the way"))

    def _find(self, method: bytes, properties: bytes | None, *, abandoned: bool) -> tuple[Flight, int] | None:
        for flight in self._flights:
            if flight.is_abandoned is abandoned and (tag := flight.find(method, properties)) is not None:
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
            sending = flight.sending
            flight.give_up(error)
            sending.on_the_way = 0
            sending.news.set()
        self._flights.clear()


def _nowhere(address: PublishAddress) -> QueueNotFound:
    if address.exchange:
        return QueueNotFound(
            f"exchange {address.exchange!r} leads to no queue with the routing key {address.routing_key!r}; "
            f"bind a queue to it"
        )
    return QueueNotFound.of(address.routing_key)


def _too_large(envelope: Envelope, header_length: int, frame_limit: int, limit: int) -> MessageTooLarge | None:
    if header_length > frame_limit:
        return MessageTooLarge(
            f"the headers of message {envelope.message_id!r} to {envelope.destination!r} have {header_length:,} bytes, "
            f"AMQP takes {frame_limit:,} on this connection; put large content into the body"
        )
    return why_too_large(envelope, encode_headers(envelope.headers), limit)


def why_not(envelope: Envelope, limit: int) -> PostdateError | None:
    """Return the reason why a message cannot be sent, as far as it is known without sending; else ``None``."""
    try:
        parse_address(envelope.destination)
    except QueueNotFound as error:
        return error
    return _too_large(envelope, 0, 0, limit)
