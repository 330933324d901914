"""The messages of any queue: peek at them, receive them, purge them."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

import anyio

from postdate.errors import PostdateError, QueueNotFound
from postdate.messages import Envelope
from postdate.operations.needs import read_queue_lengths
from postdate.operations.plain import Body, Progress, body_of
from postdate.ports import Completion, Received, Receiver, RecordKind, Settlement
from postdate.wiring import OpenDeployment

log = logging.getLogger("postdate.operations")

_PURGE_PAGE = 100
_LAST_MESSAGE_SECONDS = 2.0
"""Seconds without a message after which a queue that cannot be browsed counts as empty."""


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A message of a queue. ``due`` is when it was due, if it was delayed."""

    message_id: str
    due: datetime | None
    headers: Mapping[str, str]
    body: Body

    @classmethod
    def of(cls, envelope: Envelope) -> MessageContent:
        return cls(envelope.message_id, envelope.due, envelope.headers, body_of(envelope.body))


@dataclass(frozen=True, slots=True)
class QueueContents:
    """The first messages of a queue.

    ``total`` counts all messages, including those that processes are handling where these can be seen.
    """

    queue: str
    total: int
    messages: Sequence[MessageContent]


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """The number of messages that were purged, or would be."""

    queue: str
    count: int
    dry_run: bool


class QueueWalk:
    """The messages that are in a queue now, received one after the other. Messages that do not end return to the queue.

    They return only at the end of the walk: if each returned at once, it would be received again before the others.
    """

    def __init__(self, receiver: Receiver, now: datetime, length: int | None) -> None:
        self.receiver, self._now, self._length = receiver, now, length
        self.is_counted = length is not None
        self._received: list[Received] = []

    async def receive_pages(self, page_size: int = 1) -> AsyncGenerator[Sequence[Received]]:
        """Yield the messages, up to ``page_size`` at a time.

        A caller that ends some of them reports them to :meth:`forget_settled`.
        """
        remaining = math.inf if self._length is None else self._length
        while remaining > 0:
            page: Sequence[Received] = ()
            with anyio.move_on_after(_LAST_MESSAGE_SECONDS):
                page = await self.receiver.receive(int(min(page_size, remaining)))
            if not page:
                return
            remaining -= len(page)
            self._received += page
            yield page

    def forget_settled(self, page: Sequence[Received]) -> None:
        settled_ids = {id(each) for each in page}
        self._received = [each for each in self._received if id(each) not in settled_ids]

    async def requeue_remaining(self) -> None:
        for received in self._received:
            await requeue_message(self.receiver, received, self._now)


async def requeue_message(receiver: Receiver, received: Received, now: datetime) -> None:
    """Return a message to its queue.

    If that fails, the message is free again when the receiver is closed or this process ends. An error is logged and
    not raised, because the caller still has to report the results of all other messages.
    """
    try:
        # Its queue would discard a message that comes back too often, so a copy goes to its end instead.
        if received.is_dropped_if_returned:
            await receiver.commit(received, now, Completion(None, outgoing=[received.envelope]))
        else:
            await receiver.roll_back(received, failed=False)
    except PostdateError as error:
        log.warning("message %s cannot be returned to its queue now: %s", received.envelope.message_id, error)


async def close_receiver(receiver: Receiver, queue: str) -> None:
    """Close a receiver. If that fails, its messages are free again when this process ends, and the error is logged."""
    try:
        await receiver.close()
    except PostdateError as error:
        log.warning("a receiver of %s cannot be closed: %s", queue, error)


@asynccontextmanager
async def walk_queue(deployment: OpenDeployment, queue: str, now: datetime) -> AsyncGenerator[QueueWalk]:
    """Receive the messages that are in a queue, through any transport. Raises `QueueNotFound`."""
    walk = QueueWalk(deployment.transport.receiver(queue), now, await _count_messages(deployment, queue))
    try:
        yield walk
    finally:
        # Shielded: after Ctrl-C, too, messages must return to the queue, and the receiver must be closed.
        with anyio.CancelScope(shield=True):
            await walk.requeue_remaining()
            await close_receiver(walk.receiver, queue)


async def _count_messages(deployment: OpenDeployment, queue: str) -> int | None:
    queue_lengths = await read_queue_lengths(deployment, [queue])
    if queue_lengths is not None and queue not in queue_lengths:
        raise QueueNotFound(f"there is no queue {queue!r}")
    return None if queue_lengths is None else queue_lengths[queue]


async def peek(deployment: OpenDeployment, queue: str, limit: int, now: datetime) -> QueueContents:
    """Return the first messages of a queue, and leave them there.

    A queue that cannot be browsed gives the messages out and gets them back. Meanwhile no other receiver gets them.
    """
    length = await _count_messages(deployment, queue)
    if deployment.queue_view is not None:
        queued_messages = await deployment.queue_view.browse(queue, limit)
        return QueueContents(queue, length or 0, [MessageContent.of(each.envelope) for each in queued_messages])
    messages = list[MessageContent]()
    async with walk_queue(deployment, queue, now) as walk:
        async for page in walk.receive_pages():
            messages += [MessageContent.of(each.envelope) for each in page]
            if len(messages) == limit:
                break
    return QueueContents(queue, max(length or 0, len(messages)), messages)


async def receive(
    deployment: OpenDeployment, queue: str, limit: int, now: datetime, print_out: Callable[[MessageContent], None]
) -> int:
    """Acknowledge up to ``limit`` messages of a queue.

    Each is printed before it is acknowledged, so that none is lost.
    """
    count = 0
    async with walk_queue(deployment, queue, now) as walk:
        async for page in walk.receive_pages():
            for received in page:
                print_out(MessageContent.of(received.envelope))
                await walk.receiver.commit(received, now, Completion(RecordKind.HANDLED, "received by hand"))
            walk.forget_settled(page)
            count += len(page)
            if count == limit:
                break
    return count


async def purge(
    deployment: OpenDeployment, queue: str, now: datetime, progress: Progress, *, dry_run: bool
) -> PurgeResult:
    """Discard the messages that are in a queue now and that no process has received.

    ``progress`` receives the number of discarded messages.
    """
    if dry_run:
        return PurgeResult(queue, await _count_messages(deployment, queue) or 0, dry_run=True)
    count = 0
    async with walk_queue(deployment, queue, now) as walk:
        async for page in walk.receive_pages(_PURGE_PAGE):
            settlements = [Settlement(each, now, Completion(RecordKind.DISCARDED, "purged by hand")) for each in page]
            for error in filter(None, await walk.receiver.settle(settlements)):
                raise error
            walk.forget_settled(page)
            count += len(page)
            progress(count)
    return PurgeResult(queue, count, dry_run=False)
