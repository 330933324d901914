"""The error queue: list failed messages and their reasons, group them by cause, show one."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from postdate.errors import InvalidMessage, InvalidTimestamp, MessageNotFound
from postdate.messages import Envelope, Headers, parse_timestamp
from postdate.operations.needs import require_queue_view
from postdate.operations.plain import Body, body_of
from postdate.operations.queues import QueueWalk, walk_queue
from postdate.operations.unreadable import UnreadableList, list_unreadable
from postdate.ports import Observer, QueuedMessage, Received
from postdate.wiring import OpenDeployment

M = TypeVar("M", QueuedMessage, Received)

_PAGE = 500
_LINES_PER_GROUP = 50


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """One failed message in a list.

    Args:
        failed_queue: the queue where the message failed, and to which it is returned.
        failed_at: UTC; ``None`` when the header is missing or malformed.
        reason: the message of the exception.
        error_code: the code, if the exception is an error of Postdate.
        held_by: the process that is handling the message.
    """

    message_id: str
    failed_queue: str | None
    failed_at: datetime | None
    reason: str
    exception_type: str | None
    error_code: str | None
    message_type: str | None
    held_by: int | None
    body_bytes: int


@dataclass(frozen=True, slots=True)
class ErrorFilter:
    """A filter of failed messages. A message matches if it fulfils every condition that is given.

    Args:
        failed_queue: the queue where the message failed; empty: the message does not say where it failed.
        exception: the type of the exception, with or without its module; empty: the message names no exception.
        text: a text that the reason or the body contains.
        exact: the type must be equal to the one in the header, as the type of a group is.

    Raises InvalidMessage if the text is empty: every message would match.
    """

    failed_queue: str | None = None
    exception: str | None = None
    text: str | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if self.text == "":
            raise InvalidMessage("the text to look for is empty: leave it out, or give some")

    def matches(self, envelope: Envelope) -> bool:
        """Return whether a message of an error queue matches."""
        headers, text = envelope.headers, self.text
        return self.can_match(headers.get(Headers.EXCEPTION_TYPE), headers.get(Headers.FAILED_QUEUE)) and (
            text is None or text in headers.get(Headers.EXCEPTION_MESSAGE, "") or text.encode() in envelope.body
        )

    def can_match(self, kind: str | None, failed_queue: str | None) -> bool:
        """Return whether messages with this type of exception that failed in ``failed_queue`` may match."""
        kind = kind or ""
        return (self.failed_queue is None or (failed_queue or "") == self.failed_queue) and (
            self.exception is None or self.exception in {kind, kind if self.exact else kind.rpartition(".")[2]}
        )


ANY_FAILED = ErrorFilter()


def select_by_id(messages: Sequence[M], message_id: str) -> list[M]:
    """Return the messages with this id in the queue; if there are none, those that a sender gave this id.

    A message is received by its id in the queue first, so it is shown and edited by that id first, too.
    """
    if own := [each for each in messages if each.envelope.message_id == message_id]:
        return own
    return [each for each in messages if each.envelope.headers.get(Headers.MESSAGE_ID) == message_id]


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Failed messages with one type of exception that failed in one queue. ``reason`` is the reason of the last one.

    ``first`` has the oldest 50 of them.
    """

    count: int
    exception_type: str | None
    failed_queue: str | None
    first_at: datetime | None
    last_at: datetime | None
    reason: str
    first: Sequence[ErrorLine] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class ErrorGroups:
    """The failed messages of a queue, the largest group first; ``total`` counts the whole queue."""

    queue: str
    total: int
    groups: Sequence[ErrorGroup]


@dataclass(frozen=True, slots=True)
class ErrorList:
    """Failed messages, the oldest first, and unreadable rows; ``total`` counts the whole queue."""

    queue: str
    total: int
    messages: Sequence[ErrorLine]
    unreadable: UnreadableList = field(default_factory=UnreadableList)


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    queue: str
    message: ErrorLine
    stack_trace: str | None
    headers: Mapping[str, str]
    body: Body


async def list_errors(
    deployment: OpenDeployment, queue: str, limit: int, error_filter: ErrorFilter = ANY_FAILED
) -> ErrorList:
    """Return up to ``limit`` failed messages; ``total`` counts all that match.

    Raises NotSupported if the queues cannot be browsed.
    """
    view = require_queue_view(deployment, "list failed messages")
    if error_filter == ANY_FAILED:
        lines = [_line(each) for each in await view.browse(queue, limit)]
        total = await _count_messages(deployment, queue)
    else:
        lines, total = list[ErrorLine](), 0
        async for page in read_matching_pages(view, queue, error_filter):
            total += len(page)
            lines += [_line(each) for each in page[: limit - len(lines)]]
    return ErrorList(queue, total, lines, await list_unreadable(deployment, limit))


async def _count_messages(deployment: OpenDeployment, queue: str) -> int:
    """Return the number of messages in a queue, as its transport counts them. No other queue is counted."""
    return (await deployment.transport.lengths_of([queue]) or {}).get(queue, 0)


async def read_matching_pages(
    view: Observer, queue: str, error_filter: ErrorFilter = ANY_FAILED, limit: int | None = None
) -> AsyncGenerator[Sequence[QueuedMessage]]:
    """Yield the matching messages that are in a queue now, the oldest first, a page at a time.

    Messages that arrive meanwhile are left out. While the cause of the failures lasts, returned messages come back, and
    a reader that included them would never end. ``limit``: number of messages to examine; ``None``: all.
    """
    last_number, after_number, remaining = await view.last_number(queue), 0, sys.maxsize if limit is None else limit
    while (
        after_number < last_number
        and remaining > 0
        and (page := await view.browse(queue, min(_PAGE, remaining), after_number))
    ):
        after_number = page[-1].number
        remaining -= len(page)
        yield [each for each in page if each.number <= last_number and error_filter.matches(each.envelope)]


async def group_errors(deployment: OpenDeployment, queue: str, limit: int | None = None) -> ErrorGroups:
    """Return failed messages, the oldest ``limit`` or all, grouped by type of exception and queue.

    Raises NotSupported if the queues cannot be browsed.
    """
    view = require_queue_view(deployment, "group failed messages")
    lines = defaultdict[tuple[str | None, str | None], list[ErrorLine]](list)
    count = 0
    async for page in read_matching_pages(view, queue, limit=limit):
        for line in map(_line, page):
            lines[line.exception_type, line.failed_queue].append(line)
        count += len(page)
    groups = [_group(kind, failed_queue, group_lines) for (kind, failed_queue), group_lines in lines.items()]
    total = await _count_messages(deployment, queue) if count == limit else count
    return ErrorGroups(queue, total, sorted(groups, key=lambda group: -group.count))


def _group(kind: str | None, queue: str | None, lines: Sequence[ErrorLine]) -> ErrorGroup:
    times = [each.failed_at for each in lines if each.failed_at is not None]
    first, last = min(times, default=None), max(times, default=None)
    return ErrorGroup(len(lines), kind, queue, first, last, lines[-1].reason, lines[:_LINES_PER_GROUP])


def _line(queued: QueuedMessage) -> ErrorLine:
    headers = queued.envelope.headers
    return ErrorLine(
        message_id=queued.envelope.message_id,
        failed_queue=headers.get(Headers.FAILED_QUEUE),
        failed_at=time_of_failure(headers),
        reason=headers.get(Headers.EXCEPTION_MESSAGE, ""),
        exception_type=headers.get(Headers.EXCEPTION_TYPE),
        error_code=headers.get(Headers.ERROR_CODE),
        message_type=headers.get(Headers.ENCLOSED_MESSAGE_TYPES),
        held_by=queued.received_by,
        body_bytes=len(queued.envelope.body),
    )


def time_of_failure(headers: Mapping[str, str]) -> datetime | None:
    try:
        return parse_timestamp(headers.get(Headers.TIME_OF_FAILURE, ""))
    except InvalidTimestamp:
        return None


async def show_error(deployment: OpenDeployment, queue: str, message_id: str, now: datetime) -> ErrorDetails:
    """Return one failed message."""
    queued = await _find_message(deployment, queue, message_id, now)
    headers = queued.envelope.headers
    trace = headers.get(Headers.EXCEPTION_STACK_TRACE)
    return ErrorDetails(queue, _line(queued), trace, headers, body_of(queued.envelope.body))


async def _find_message(deployment: OpenDeployment, queue: str, message_id: str, now: datetime) -> QueuedMessage:
    """Return a failed message, which stays in the error queue. Raises `MessageNotFound`."""
    if deployment.queue_view is not None:
        queued_messages = await deployment.queue_view.find_in_queues(message_id)
        for queued in select_by_id([each for each in queued_messages if each.queue == queue], message_id):
            return queued
        raise MessageNotFound(missing_text(queue, message_id))
    async with walk_queue(deployment, queue, now) as walk:
        for received in await find_by_id(walk, message_id):
            return QueuedMessage(queue, received.envelope, received.failures, None)
    raise MessageNotFound(missing_text(queue, message_id))


async def find_by_id(walk: QueueWalk, message_id: str) -> list[Received]:
    """Receive until a message has this id in the queue, and return it; else as :func:`select_by_id`."""
    messages = list[Received]()
    async for (received,) in walk.receive_pages():
        if received.envelope.message_id == message_id:
            return [received]
        messages.append(received)
    return select_by_id(messages, message_id)


def missing_text(queue: str, message_id: str) -> str:
    return (
        f"no message {message_id!r} is in queue {queue!r}; list them with `postdate errors list`, or ask where it is: "
        f"`postdate messages explain {message_id}`"
    )
