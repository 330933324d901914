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
from postdate.operations.needs import lengths
from postdate.operations.plain import Body, Progress, body_of
from postdate.ports import End, Ending, Received, Receiver, RecordKind
from postdate.wiring import OpenDeployment

log = logging.getLogger("postdate.operations")

_PURGED_AT_ONCE = 100
_LAST_MESSAGE_SECONDS = 2.0
"""Seconds without a message after which a queue that cannot be browsed counts as empty."""


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message of a queue. ``due`` is when it was due, if it was delayed."""

    message_id: str
    due: datetime | None
    headers: Mapping[str, str]
    body: Body

    @classmethod
    def of(cls, envelope: Envelope) -> QueuedMessage:
        return cls(envelope.message_id, envelope.due, envelope.headers, body_of(envelope.body))


@dataclass(frozen=True, slots=True)
class QueuedMessages:
    """The first messages of a queue.

    ``total`` counts all messages, including those that processes are handling where these can be seen.
    """

    queue: str
    total: int
    messages: Sequence[QueuedMessage]


@dataclass(frozen=True, slots=True)
class Purged:
    """The number of messages that were purged, or would be."""

    queue: str
    count: int
    dry_run: bool


class Walk:
    """The messages that are in a queue now, received one after the other. Messages that do not end return to the queue.

    They return only at the end of the walk: if each returned at once, it would be received again before the others.
    """

    def __init__(self, receiver: Receiver, now: datetime, counted: int | None) -> None:
        self.receiver, self._now, self._counted = receiver, now, counted
        self.is_counted = counted is not None
        self._received: list[Received] = []

    async def pages(self, at_once: int = 1) -> AsyncGenerator[Sequence[Received]]:
        """Yield the messages, up to ``at_once`` at a time.

        A caller that ends some of them reports them to :meth:`ended`.
        """
        remaining = math.inf if self._counted is None else self._counted
        while remaining > 0:
            page: Sequence[Received] = ()
            with anyio.move_on_after(_LAST_MESSAGE_SECONDS):
                page = await self.receiver.receive(int(min(at_once, remaining)))
            if not page:
                return
            remaining -= len(page)
            self._received += page
            yield page

    def ended(self, page: Sequence[Received]) -> None:
        ended_ids = {id(each) for each in page}
        self._received = [each for each in self._received if id(each) not in ended_ids]

    async def give_back(self) -> None:
        for received in self._received:
            await try_to_give_back(self.receiver, received, self._now)


async def try_to_give_back(receiver: Receiver, received: Received, now: datetime) -> None:
    """Return a message to its queue.

    If that fails, the message is free again when the receiver is closed or this process ends. An error is logged and
    not raised, because the caller still has to report the results of all other messages.
    """
    try:
        # Its queue would discard a message that comes back too often, so a copy goes to its end instead.
        if received.is_last:
            await receiver.commit(received, now, End(None, outgoing=[received.envelope]))
        else:
            await receiver.roll_back(received, failed=False)
    except PostdateError as error:
        log.warning("message %s cannot be given back now: %s", received.envelope.message_id, error)


async def try_to_close(receiver: Receiver, queue: str) -> None:
    """Close a receiver. If that fails, its messages are free again when this process ends, and the error is logged."""
    try:
        await receiver.close()
    except PostdateError as error:
        log.warning("a receiver of %s cannot be closed: %s", queue, error)


@asynccontextmanager
async def walking(deployment: OpenDeployment, queue: str, now: datetime) -> AsyncGenerator[Walk]:
    """Receive the messages that are in a queue, through any transport. Raises `QueueNotFound`."""
    walk = Walk(deployment.transport.receiver(queue), now, await _counted(deployment, queue))
    try:
        yield walk
    finally:
        # Shielded: after Ctrl-C, too, messages must return to the queue, and the receiver must be closed.
        with anyio.CancelScope(shield=True):
            await walk.give_back()
            await try_to_close(walk.receiver, queue)


async def _counted(deployment: OpenDeployment, queue: str) -> int | None:
    queue_lengths = await lengths(deployment, [queue])
    if queue_lengths is not None and queue not in queue_lengths:
        raise QueueNotFound(f"there is no queue {queue!r}")
    return None if queue_lengths is None else queue_lengths[queue]


async def peek(deployment: OpenDeployment, queue: str, limit: int, now: datetime) -> QueuedMessages:
    """Return the first messages of a queue, and leave them there.

    A queue that cannot be browsed gives the messages out and gets them back. Meanwhile no other receiver gets them.
    """
    counted = await _counted(deployment, queue)
    if deployment.queue_view is not None:
        browsed = await deployment.queue_view.browse(queue, limit)
        return QueuedMessages(queue, counted or 0, [QueuedMessage.of(each.envelope) for each in browsed])
    messages = list[QueuedMessage]()
    async with walking(deployment, queue, now) as walk:
        async for page in walk.pages():
            messages += [QueuedMessage.of(each.envelope) for each in page]
            if len(messages) == limit:
                break
    return QueuedMessages(queue, max(counted or 0, len(messages)), messages)


async def receive(
    deployment: OpenDeployment, queue: str, limit: int, now: datetime, print_out: Callable[[QueuedMessage], None]
) -> int:
    """Acknowledge up to ``limit`` messages of a queue.

    Each is printed before it is acknowledged, so that none is lost.
    """
    count = 0
    async with walking(deployment, queue, now) as walk:
        async for page in walk.pages():
            for received in page:
                print_out(QueuedMessage.of(received.envelope))
                await walk.receiver.commit(received, now, End(RecordKind.HANDLED, "received by hand"))
            walk.ended(page)
            count += len(page)
            if count == limit:
                break
    return count


async def purge(deployment: OpenDeployment, queue: str, now: datetime, progress: Progress, *, dry_run: bool) -> Purged:
    """Discard the messages that are in a queue now and that no process has received.

    ``progress`` receives the number of discarded messages.
    """
    if dry_run:
        return Purged(queue, await _counted(deployment, queue) or 0, dry_run=True)
    count = 0
    async with walking(deployment, queue, now) as walk:
        async for page in walk.pages(_PURGED_AT_ONCE):
            endings = [Ending(each, now, End(RecordKind.DISCARDED, "purged by hand")) for each in page]
            for error in filter(None, await walk.receiver.settle(endings)):
                raise error
            walk.ended(page)
            count += len(page)
            progress(count)
    return Purged(queue, count, dry_run=False)
