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
from postdate.backends.rabbitmq.connection import NOT_FOUND, AmqpConnection, Channel, ChannelClosed, node_away
from postdate.backends.rabbitmq.properties import Arrived, seconds_to_live
from postdate.backends.rabbitmq.wire import Arguments, Method, ack_frame, method_frame, requeue_frame
from postdate.errors import PostdateError, QueueNotFound
from postdate.runtime.bounded import Bounded

_MOST_CONSUMERS: Final = 8
_LARGEST_PREFETCH: Final = 65_535
_NOT_WAITING: Final = b"\x01"
_IDLE_SECONDS: Final = 0.1
"""If a receiver asks for no message for this time, or up to twice this time, the broker is told to stop pushing."""

_LONGEST_CLAIM_SECONDS: Final = 20 * 60.0
"""Messages that were pushed longer ago are requeued. By default the broker waits 30 minutes for an answer."""


class Delivery(NamedTuple):
    """A message as the broker pushed it, still encoded.

    ``tag`` is its number within the channel. ``route`` has the exchange it was published to, and its routing key, as
    two short strings. ``at`` is when it was pushed, in seconds of the event loop's clock. ``seen`` is the decoded
    message, if it was received here before and is offered again.
    """

    tag: int
    redelivered: bool
    properties: bytes
    body: bytes
    route: bytes
    at: float = 0.0
    seen: Arrived | None = None


class ConsumingChannel(Channel):
    """A channel that receives from one queue.

    The broker pushes as many messages as its prefetch allows. So the prefetch is exactly the number of claimed messages
    plus those that the receiver asks for, and other consumers can receive the rest. When the receiver stops asking,
    messages that were pushed meanwhile are requeued, except ``ahead`` of them for a limited time. A quorum queue drops
    a message that was requeued too often. So a message that is rejected while the receiver asks is offered here again,
    without the broker. Source: ADR 0028.
    """

    def __init__(self, link: AmqpConnection, number: int, queue: str, ahead: int) -> None:
        super().__init__(link, number)
        self._queue, self._ahead = queue, ahead
        self.unwanted: Callable[[Delivery], None] = lambda delivery: self.give_back(delivery.tag)
        self.time_to_live: Callable[[], float] = lambda: math.inf
        """Returns the seconds after which the queue drops each message, if they are known; else infinity."""

        self._consumers: dict[str, int] = {}
        self._consumers_so_far = 0
        self._pushed: deque[Delivery] = deque()
        self._outstanding: dict[int, None] = {}
        self._attached = self._last_tag = self._detached_up_to = 0
        self._done: set[int] = set()
        self._news = asyncio.Event()
        self._waiting = 0
        self._queue_is_deleted = False
        self._asked = False
        self._pushed_until = -math.inf
        self._idle: asyncio.TimerHandle | None = None

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for a message; return up to ``limit``, in order."""
        self._waiting += 1
        self._asked = True
        try:
            while not self._pushed:
                self._news.clear()  # before the call: the connection may end right after its answer, which sets this
                await self._ask_for(limit)
                if not self._pushed:
                    await self._news.wait()
                self._check()
        except asyncio.CancelledError:
            if self._waiting == 1:  # no other receiver waits for messages on their way
                self.stop_pushing()
            raise
        finally:
            self._waiting -= 1
        return [self._pushed.popleft() for _ in range(min(limit, len(self._pushed)))]

    async def begin(self, limit: int) -> None:
        """Ask for messages; return when the broker has agreed to push them."""
        self._asked = True
        await self._ask_for(limit)
        self._check()

    def _check(self) -> None:
        if self.ended is not None:
            raise self.ended
        if self._queue_is_deleted and not self._pushed:
            error = QueueNotFound(f"queue {self._queue!r} was deleted")
            self.close(error)
            raise error

    async def _ask_for(self, limit: int) -> None:
        """Let the broker push ``limit`` messages in addition to those that are claimed."""
        # Messages of cancelled consumers do not count against the prefetch of the current ones.
        prefetch = min(self._attached - len(self._pushed) + limit + self._ahead, _LARGEST_PREFETCH)
        if (missing := prefetch - sum(self._consumers.values())) <= 0:
            return
        if len(self._consumers) == _MOST_CONSUMERS:
            self.stop_pushing()
            missing = min(limit + self._ahead, _LARGEST_PREFETCH)
        try:
            await self.call(wire.BASIC_QOS, bytes(4) + wire.uint16(missing) + b"\0", wire.BASIC_QOS_OK)
            self._consumers_so_far += 1
            name = f"postdate-{self._consumers_so_far}"
            arguments = b"\0\0" + wire.short_text(self._queue) + wire.short_text(name) + bytes(5)
            self._consumers[name] = missing
            self._look_later()
            await self.call(wire.BASIC_CONSUME, arguments, wire.BASIC_CONSUME_OK)
        except ChannelClosed as error:
            if (away := node_away(error, self._queue)) is not None:
                raise away from error
            if error.reply_code == NOT_FOUND:
                raise QueueNotFound.of(self._queue) from error
            raise

    def _stop_if_idle(self) -> None:
        idle, self._asked, self._idle = not (self._waiting or self._asked), False, None
        if idle and (self._consumers or self.link.loop.time() > self._pushed_until):
            self.stop_pushing(self._ahead)
        if self._consumers or self._pushed:
            self._look_later()

    def _look_later(self) -> None:
        if self._idle is None:
            self._idle = self.link.loop.call_later(_IDLE_SECONDS, self._stop_if_idle)

    def stop_pushing(self, ahead: int = 0) -> None:
        """Cancel the consumers and requeue messages that were pushed and not received.

        Keeps up to ``ahead`` messages that are new here and not too old.
        """
        for name in self._consumers:
            self.link.write(method_frame(self.number, wire.BASIC_CANCEL, wire.short_text(name) + _NOT_WAITING))
        self._consumers.clear()
        self._attached, self._detached_up_to = 0, self._last_tag
        pushed, self._pushed = self._pushed, deque()
        self._pushed_until, now = math.inf, self.link.loop.time()
        for delivery in pushed:
            if len(self._pushed) < ahead and delivery.seen is None and (until := self._may_stay_until(delivery)) >= now:
                self._pushed.append(delivery)
                self._pushed_until = min(self._pushed_until, until)
            else:
                self.unwanted(delivery)

    def _may_stay_until(self, delivery: Delivery) -> float:
        """Return until when a message may stay here: until the broker's limit for acknowledgements, or its expiry.

        In seconds of the event loop's clock.
        """
        return delivery.at + min(_LONGEST_CLAIM_SECONDS, self.time_to_live(), seconds_to_live(delivery.properties))

    def acknowledge(self, tag: int) -> None:
        """Acknowledge a message. Acknowledgements within one turn of the event loop share a frame."""
        if not self._done:
            self.link.loop.call_soon(self._write_acknowledgements)
        self._done.add(tag)

    def _write_acknowledgements(self) -> None:
        done, outstanding, last, count = self._done, self._outstanding, 0, 0
        for tag in outstanding:
            if tag not in done:
                break
            last, count = tag, count + 1
        frames = [ack_frame(self.number, last, multiple=count > 1)] if count else []
        frames += [ack_frame(self.number, tag, multiple=False) for tag in sorted(done) if tag > last]
        for tag in done:
            self._settled(tag)
        done.clear()
        if self.ended is None:
            self.link.write(b"".join(frames))

    def again(self, delivery: Delivery, seen: Arrived) -> bool:
        """Offer a message here again, and requeue it if the receiver does not ask soon.

        Return ``False`` if the message is too old for that and must be requeued now.
        """
        if self._may_stay_until(delivery) < self.link.loop.time():
            return False
        self._pushed.appendleft(delivery._replace(redelivered=True, seen=seen))
        self._pushed_until = -math.inf  # so that `_stop_if_idle` requeues it if the receiver does not ask soon
        self._asked = True
        self._news.set()
        self._look_later()
        return True

    def give_back(self, tag: int) -> None:
        """Requeue a message; the broker may push it here again."""
        self.link.write(requeue_frame(self.number, tag))
        self._settled(tag)

    def _settled(self, tag: int) -> None:
        self._outstanding.pop(tag, None)
        if tag > self._detached_up_to:
            self._attached -= 1

    async def stop(self) -> list[Delivery]:
        """Stop receiving; return messages that were pushed and not received. The caller must requeue them."""
        for name in list(self._consumers):
            await self.call(wire.BASIC_CANCEL, wire.short_text(name) + b"\0", wire.BASIC_CANCEL_OK)
        self._consumers.clear()
        self._write_acknowledgements()
        pushed, self._pushed = list(self._pushed), deque()
        return pushed

    # --- what the server says

    @override
    def on_method(self, method: Method, payload: bytes) -> None:
        """Handle a cancelled consumer: the broker cancels it when the queue was deleted or has moved."""
        if method == wire.BASIC_CANCEL:
            self._consumers.pop(Arguments(payload).short_text(), None)
            self._queue_is_deleted = True
            self._news.set()

    @override
    def on_content(self, method: Method, arguments: Arguments, properties: bytes, body: bytes) -> None:
        consumer = arguments.short_text()
        tag, redelivered = arguments.unsigned(8), arguments.unsigned(1) != 0
        route = arguments.content[arguments.position :]
        delivery = Delivery(tag, redelivered, properties, body, route, self.link.loop.time())
        self._outstanding[tag], self._last_tag = None, tag
        self._attached += 1
        if consumer in self._consumers:
            self._pushed.append(delivery)
            self._news.set()
        else:
            self.unwanted(delivery)

    @override
    def on_end(self, error: PostdateError) -> None:
        """Forget all messages: the broker requeues unacknowledged messages by itself."""
        if self._idle is not None:
            self._idle.cancel()
        self._consumers.clear()
        self._pushed.clear()
        self._outstanding.clear()
        self._done.clear()
        self._news.set()


class FailureCounts:
    """The number of failures of each message, from facts of this process and of the broker.

    A quorum queue counts all returns of a message, and from RabbitMQ 4.3 on also the returns without an answer. A
    classic queue only states that there was a return. This process remembers its own returns, and their reason, for the
    last 10,000 messages.
    """

    def __init__(self) -> None:
        self._counts = Bounded[bytes, tuple[int, int]](10_000)

    def failures(self, queue: str, arrived: Arrived, *, redelivered: bool) -> tuple[int, int]:
        """Return the number of failures, and how many of these attempts certainly ended without an answer."""
        if not redelivered:
            return 0, 0
        failures, returns = self._counts.get(_key(queue, arrived), (0, -1 if arrived.returns is None else 0))
        unknown = max(0, (arrived.returns or 0) - returns)  # 1 for a classic queue, which does not count returns
        return failures + unknown, min(unknown, arrived.counted)

    def remember(self, queue: str, arrived: Arrived, failures: int, returns: int = 0) -> None:
        """Remember the failures of a returned message; ``returns``: 0 if it is offered here again, 1 if requeued."""
        self._counts[_key(queue, arrived)] = (failures, (arrived.returns or 0) + returns)

    def forget(self, queue: str, arrived: Arrived) -> None:
        if self._counts:
            self._counts.pop(_key(queue, arrived), None)


def _key(queue: str, arrived: Arrived) -> bytes:
    """Return the key of a message: queue and id, or a hash of the whole message if it has no id."""
    envelope = arrived.envelope
    if arrived.has_id:
        return f"{queue}\0{envelope.message_id}".encode()
    digest = hashlib.blake2b(repr((queue, sorted(envelope.headers.items()))).encode())
    digest.update(envelope.body)
    return digest.digest()
