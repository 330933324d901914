"""Consuming: a pushed message is claimed until it is acknowledged or requeued, or until its channel ends."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.connection import NOT_FOUND, AmqpConnection, Channel, ChannelClosed, node_away_error
from postdate.backends.rabbitmq.properties import DecodedMessage, seconds_to_live
from postdate.errors import PostdateError, QueueNotFound
from postdate.runtime.bounded import Bounded

_MOST_CONSUMERS: Final = 8  # of one channel; then all are cancelled and one with the whole prefetch is started
_LARGEST_PREFETCH: Final = 65_535  # the largest number in the 16 bits of the protocol
_NOT_WAITING: Final = b"\x01"  # the bit ``no-wait``: the server sends no answer
_IDLE_SECONDS: Final = 0.1
"""If a receiver asks for no message for this time, or up to twice this time, the broker is told to stop pushing."""

_LONGEST_CLAIM_SECONDS: Final = 20 * 60.0
"""Messages that were pushed longer ago are requeued. By default the broker waits 30 minutes for an answer."""


class Delivery(NamedTuple):
    """A message as the broker pushed it, still encoded.

    ``tag`` is its number within the channel. ``route`` has the exchange it was published to, and its routing key, as
    two short strings. ``received_at`` is when it was pushed, in seconds of the event loop's clock. ``decoded_message``
    is the decoded message, if it was received here before and is offered again.
    """

    tag: int
    redelivered: bool
    properties: bytes
    body: bytes
    route: bytes
    received_at: float = 0.0
    decoded_message: DecodedMessage | None = None


class ConsumingChannel(Channel):
    """A channel that receives from one queue.

    The broker pushes as many messages as its prefetch allows. So the prefetch is exactly the number of claimed messages
    plus those that the receiver asks for, and other consumers can receive the rest. When the receiver stops asking,
    messages that were pushed meanwhile are requeued, except ``ahead`` of them for a limited time. A quorum queue drops
    a message that was requeued too often. So a message that is rejected while the receiver asks is offered here again,
    without the broker. Source: ADR 0028.
    """

    def __init__(self, link: AmqpConnection, number: int, queue: str, prefetch: int) -> None:
        super().__init__(link, number)
        self._queue = queue
        self._prefetch = prefetch  # messages to push in addition to those that the receiver asks for
        # Called with a message that was pushed and that the receiver no longer asks for.
        self.on_unwanted: Callable[[Delivery], None] = lambda delivery: self.requeue(delivery.tag)
        self.time_to_live: Callable[[], float] = lambda: math.inf
        """Returns the seconds after which the queue drops each message, if they are known; otherwise infinity."""

        self._consumers: dict[str, int] = {}  # the prefetch of each consumer, by name
        self._consumer_count = 0  # of all consumers so far; makes their names unique
        self._deliveries: deque[Delivery] = deque()  # messages that were pushed and not received
        self._unsettled_tags: dict[int, None] = {}  # neither acknowledged nor requeued; an ordered set
        self._attached_count = 0  # unsettled messages that count against the prefetch of the current consumers
        self._last_tag = 0  # of the last pushed message
        self._last_detached_tag = 0  # of the last message that was pushed before the consumers were cancelled
        self._acknowledged_tags: set[int] = set()  # not written yet
        self._change_event = asyncio.Event()  # set when a message arrives, or the channel or the queue ends
        self._waiting_count = 0  # callers of `receive`
        self._queue_is_deleted = False
        self._was_requested = False  # whether the receiver asked since the last call of `_stop_if_idle`
        self._requeue_at = -math.inf  # when `_deliveries` must be requeued, in seconds of the event loop's clock
        self._idle_timer: asyncio.TimerHandle | None = None

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for a message; return up to ``limit``, in order."""
        self._waiting_count += 1
        self._was_requested = True
        try:
            while not self._deliveries:
                # before the call: the connection may end right after its answer, which sets this
                self._change_event.clear()
                await self._request_push(limit)
                if not self._deliveries:
                    await self._change_event.wait()
                self._check_open()
        except asyncio.CancelledError:
            if self._waiting_count == 1:  # No other receiver waits for the messages in flight.
                self.stop_pushing()
            raise
        finally:
            self._waiting_count -= 1
        return [self._deliveries.popleft() for _ in range(min(limit, len(self._deliveries)))]

    async def start_pushing(self, limit: int) -> None:
        """Ask for messages; return when the broker has agreed to push them."""
        self._was_requested = True
        await self._request_push(limit)
        self._check_open()

    def _check_open(self) -> None:
        if self.end_error is not None:
            raise self.end_error
        if self._queue_is_deleted and not self._deliveries:
            error = QueueNotFound(f"queue {self._queue!r} was deleted")
            self.close(error)
            raise error

    async def _request_push(self, limit: int) -> None:
        """Let the broker push ``limit`` messages in addition to those that are claimed."""
        # Messages of cancelled consumers do not count against the prefetch of the current ones.
        prefetch = min(self._attached_count - len(self._deliveries) + limit + self._prefetch, _LARGEST_PREFETCH)
        if (missing_count := prefetch - sum(self._consumers.values())) <= 0:
            return
        if len(self._consumers) == _MOST_CONSUMERS:
            self.stop_pushing()
            missing_count = min(limit + self._prefetch, _LARGEST_PREFETCH)
        try:
            await self.call(wire.BASIC_QOS, bytes(4) + wire.uint16(missing_count) + b"\0", wire.BASIC_QOS_OK)
            self._consumer_count += 1
            name = f"postdate-{self._consumer_count}"
            arguments = b"\0\0" + wire.short_text(self._queue) + wire.short_text(name) + bytes(5)
            self._consumers[name] = missing_count
            self._start_idle_timer()
            await self.call(wire.BASIC_CONSUME, arguments, wire.BASIC_CONSUME_OK)
        except ChannelClosed as error:
            if (away_error := node_away_error(error, self._queue)) is not None:
                raise away_error from error
            if error.reply_code == NOT_FOUND:
                raise QueueNotFound.of(self._queue) from error
            raise

    def _stop_if_idle(self) -> None:
        is_idle, self._was_requested, self._idle_timer = not (self._waiting_count or self._was_requested), False, None
        if is_idle and (self._consumers or self.link.loop.time() > self._requeue_at):
            self.stop_pushing(self._prefetch)
        if self._consumers or self._deliveries:
            self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        if self._idle_timer is None:
            self._idle_timer = self.link.loop.call_later(_IDLE_SECONDS, self._stop_if_idle)

    def stop_pushing(self, prefetch: int = 0) -> None:
        """Cancel the consumers and requeue messages that were pushed and not received.

        Keeps up to ``prefetch`` messages that are new here and not too old.
        """
        for name in self._consumers:
            self.link.write(wire.method_frame(self.number, wire.BASIC_CANCEL, wire.short_text(name) + _NOT_WAITING))
        self._consumers.clear()
        self._attached_count, self._last_detached_tag = 0, self._last_tag
        deliveries, self._deliveries = self._deliveries, deque()
        self._requeue_at, now = math.inf, self.link.loop.time()
        for delivery in deliveries:
            if (
                len(self._deliveries) < prefetch
                and delivery.decoded_message is None
                and (deadline := self._requeue_deadline_of(delivery)) >= now
            ):
                self._deliveries.append(delivery)
                self._requeue_at = min(self._requeue_at, deadline)
            else:
                self.on_unwanted(delivery)

    def _requeue_deadline_of(self, delivery: Delivery) -> float:
        """Return until when a message may stay here: until the broker's limit for acknowledgements, or its expiry.

        In seconds of the event loop's clock.
        """
        return delivery.received_at + min(
            _LONGEST_CLAIM_SECONDS, self.time_to_live(), seconds_to_live(delivery.properties)
        )

    def acknowledge(self, tag: int) -> None:
        """Acknowledge a message. Acknowledgements within one turn of the event loop share a frame."""
        if not self._acknowledged_tags:
            self.link.loop.call_soon(self._write_acknowledgements)
        self._acknowledged_tags.add(tag)

    def _write_acknowledgements(self) -> None:
        acknowledged_tags, unsettled_tags, last_tag, count = self._acknowledged_tags, self._unsettled_tags, 0, 0
        for tag in unsettled_tags:
            if tag not in acknowledged_tags:
                break
            last_tag, count = tag, count + 1
        frames = [wire.ack_frame(self.number, last_tag, multiple=count > 1)] if count else []
        frames += [
            wire.ack_frame(self.number, tag, multiple=False) for tag in sorted(acknowledged_tags) if tag > last_tag
        ]
        for tag in acknowledged_tags:
            self._forget_tag(tag)
        acknowledged_tags.clear()
        if self.end_error is None:
            self.link.write(b"".join(frames))

    def offer_again(self, delivery: Delivery, message: DecodedMessage) -> bool:
        """Offer a message here again, and requeue it if the receiver does not ask soon.

        Return ``False`` if the message is too old for that and must be requeued now.
        """
        if self._requeue_deadline_of(delivery) < self.link.loop.time():
            return False
        self._deliveries.appendleft(delivery._replace(redelivered=True, decoded_message=message))
        self._requeue_at = -math.inf  # so that `_stop_if_idle` requeues it if the receiver does not ask soon
        self._was_requested = True
        self._change_event.set()
        self._start_idle_timer()
        return True

    def requeue(self, tag: int) -> None:
        """Requeue a message; the broker may push it here again."""
        self.link.write(wire.requeue_frame(self.number, tag))
        self._forget_tag(tag)

    def _forget_tag(self, tag: int) -> None:
        self._unsettled_tags.pop(tag, None)
        if tag > self._last_detached_tag:
            self._attached_count -= 1

    async def stop(self) -> list[Delivery]:
        """Stop receiving; return messages that were pushed and not received. The caller must requeue them."""
        for name in list(self._consumers):
            await self.call(wire.BASIC_CANCEL, wire.short_text(name) + b"\0", wire.BASIC_CANCEL_OK)
        self._consumers.clear()
        self._write_acknowledgements()
        deliveries, self._deliveries = list(self._deliveries), deque()
        return deliveries

    # --- what the server says

    @override
    def on_method(self, method: wire.Method, payload: bytes) -> None:
        """Handle a cancelled consumer: the broker cancels it when the queue was deleted or has moved."""
        if method == wire.BASIC_CANCEL:
            self._consumers.pop(wire.Arguments(payload).short_text(), None)
            self._queue_is_deleted = True
            self._change_event.set()

    @override
    def on_content(self, method: wire.Method, arguments: wire.Arguments, properties: bytes, body: bytes) -> None:
        consumer = arguments.short_text()
        tag, redelivered = arguments.unsigned(8), arguments.unsigned(1) != 0
        route_bytes = arguments.content[arguments.position :]
        delivery = Delivery(tag, redelivered, properties, body, route_bytes, self.link.loop.time())
        self._unsettled_tags[tag], self._last_tag = None, tag
        self._attached_count += 1
        if consumer in self._consumers:
            self._deliveries.append(delivery)
            self._change_event.set()
        else:
            self.on_unwanted(delivery)

    @override
    def on_end(self, error: PostdateError) -> None:
        """Forget all messages: the broker requeues unacknowledged messages by itself."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._consumers.clear()
        self._deliveries.clear()
        self._unsettled_tags.clear()
        self._acknowledged_tags.clear()
        self._change_event.set()


class FailureCounts:
    """The number of failures of each message, from facts of this process and of the broker.

    A quorum queue counts all returns of a message, and from RabbitMQ 4.3 on also the returns without an answer. A
    classic queue only states that there was a return. This process remembers its own returns, and their reason, for the
    last 10,000 messages.
    """

    def __init__(self) -> None:
        self._counts = Bounded[bytes, tuple[int, int]](10_000)

    def count_failures(self, queue: str, message: DecodedMessage, *, redelivered: bool) -> tuple[int, int]:
        """Return the number of failures, and how many of these attempts certainly ended without an answer."""
        if not redelivered:
            return 0, 0
        failures, returns = self._counts.get(_key(queue, message), (0, -1 if message.returns is None else 0))
        unanswered = max(0, (message.returns or 0) - returns)  # 1 for a classic queue, which does not count returns
        return failures + unanswered, min(unanswered, message.counted_returns)

    def remember(self, queue: str, message: DecodedMessage, failures: int, returns: int = 0) -> None:
        """Remember the failures of a returned message; ``returns``: 0 if it is offered here again, 1 if requeued."""
        self._counts[_key(queue, message)] = (failures, (message.returns or 0) + returns)

    def forget(self, queue: str, message: DecodedMessage) -> None:
        if self._counts:
            self._counts.pop(_key(queue, message), None)


def _key(queue: str, message: DecodedMessage) -> bytes:
    """Return the key of a message: queue and id, or a hash of the whole message if it has no id."""
    envelope = message.envelope
    if message.has_id:
        return f"{queue}\0{envelope.message_id}".encode()
    digest = hashlib.blake2b(repr((queue, sorted(envelope.headers.items()))).encode())
    digest.update(envelope.body)
    return digest.digest()
