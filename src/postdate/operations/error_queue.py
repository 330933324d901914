"""The error queue: list failed messages and their reasons, and return them to where they failed."""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from postdate.core.expiry import discard_reason
from postdate.core.limits import has_limits
from postdate.core.receive.settling import is_stored
from postdate.core.recoverability import checked_answers
from postdate.core.simple_store import enlisting
from postdate.errors import (
    DuplicateMessage,
    InvalidMessage,
    InvalidTimestamp,
    MessageNotFound,
    PostdateError,
    QueueNotFound,
)
from postdate.messages import DelayedMessage, Envelope, Headers, expires_at_of, new_message_id, parse_timestamp
from postdate.operations.needs import queue_view
from postdate.operations.plain import Body, Progress, body_of, unheard
from postdate.operations.queues import try_to_close, try_to_give_back, walking
from postdate.operations.unreadable import UnreadableList, list_unreadable
from postdate.ports import ClaimingStore, End, Observer, Queued, Received, Receiver, RecordKind
from postdate.wiring import OpenDeployment

_PAGE = 500
_OF_A_GROUP = 50
_FAILURE_HEADERS = frozenset(
    {
        Headers.FAILED_QUEUE,
        Headers.TIME_OF_FAILURE,
        Headers.PROCESSING_MACHINE,
        Headers.PROCESSING_ENDPOINT,
        Headers.HOST_ID,
        Headers.HOST_DISPLAY_NAME,
        Headers.ERROR_CODE,
        Headers.EXCEPTION_TYPE,
        Headers.EXCEPTION_INNER_TYPE,
        Headers.EXCEPTION_MESSAGE,
        Headers.EXCEPTION_SOURCE,
        Headers.EXCEPTION_STACK_TRACE,
        # A returned message starts anew: with the old timestamp, retries would count as going on for too long.
        Headers.DELAYED_RETRIES,
        Headers.DELAYED_RETRIES_TIMESTAMP,
        Headers.IMMEDIATE_RETRIES,
        Headers.EDITED_AS,
    }
)

_EXPIRY_HEADERS = frozenset({Headers.TIME_TO_BE_RECEIVED, Headers.EXPIRES_AT})


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """One failed message in a list.

    Args:
        failed_queue: where it failed, and where it is returned to.
        failed_at: UTC; ``None`` when the header is missing or malformed.
        reason: the message of the exception.
        error_code: of an error of Postdate.
        held_by: process that is handling it.
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
    """Which failed messages: those that fulfil every condition that is given.

    Args:
        failed_queue: where they failed; empty: that is not told.
        exception: its type, with or without its module; empty: there is none.
        text: in the reason, or in the body.
        exact: the type is given as it stands in the header, as that of a group is.
    """

    failed_queue: str | None = None
    exception: str | None = None
    text: str | None = None
    exact: bool = False

    def matches(self, envelope: Envelope) -> bool:
        """Return whether a message of an error queue is one of these."""
        headers, text = envelope.headers, self.text
        return self.is_of(headers.get(Headers.EXCEPTION_TYPE), headers.get(Headers.FAILED_QUEUE)) and (
            text is None or text in headers.get(Headers.EXCEPTION_MESSAGE, "") or text.encode() in envelope.body
        )

    def is_of(self, kind: str | None, failed_queue: str | None) -> bool:
        """Return whether messages with this type of exception, which failed there, may be among these."""
        kind = kind or ""
        return (self.failed_queue is None or (failed_queue or "") == self.failed_queue) and (
            self.exception is None or self.exception in {kind, kind if self.exact else kind.rpartition(".")[2]}
        )


ANY_FAILED = ErrorFilter()


def _ids_of(envelope: Envelope) -> set[str]:
    return {envelope.message_id, envelope.headers.get(Headers.MESSAGE_ID, envelope.message_id)}


@dataclass(frozen=True, slots=True)
class Treatment:
    """What becomes of failed messages.

    Args:
        to: they are returned there; ``None``: to the queue where each failed.
        without_expiry: their expiry is taken off; else expired messages stay.
        discard: they are thrown away instead.
        dry_run: nothing becomes of them; the results say what would.
    """

    to: str | None = None
    without_expiry: bool = False
    discard: bool = False
    dry_run: bool = False


RETURN = Treatment()


@dataclass(frozen=True, slots=True)
class Edit:
    """What of a failed message becomes another; ``to``: another queue than that where it failed."""

    body: bytes | None
    headers: Mapping[str, str]
    to: str | None


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Failed messages with one type of exception that failed in one queue; ``reason`` is that of the last one.

    ``first`` are the oldest 50 of them.
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


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of returning or discarding one message.

    ``queue`` is where it is, or was, ``remark`` why it was not done.
    """

    message_id: str
    done: bool
    queue: str
    remark: str = ""


async def list_errors(deployment: OpenDeployment, queue: str, limit: int, where: ErrorFilter = ANY_FAILED) -> ErrorList:
    """Return up to ``limit`` failed messages; ``total`` counts those that match.

    Raises NotSupported where queues cannot be browsed.
    """
    view = queue_view(deployment, "list failed messages")
    if where == ANY_FAILED:
        lines = [_line(each) for each in await view.browse(queue, limit)]
        total = await _length(deployment, queue)
    else:
        lines, total = list[ErrorLine](), 0
        async for page in _pages(view, queue, where):
            total += len(page)
            lines += [_line(each) for each in page[: limit - len(lines)]]
    return ErrorList(queue, total, lines, await list_unreadable(deployment, limit))


async def _length(deployment: OpenDeployment, queue: str) -> int:
    """Return how many messages a queue holds, as its transport counts them; no other queue is counted."""
    return (await deployment.transport.lengths_of([queue]) or {}).get(queue, 0)


async def _pages(
    view: Observer, queue: str, where: ErrorFilter = ANY_FAILED, limit: int | None = None
) -> AsyncGenerator[Sequence[Queued]]:
    """Yield those of the messages in a queue now that match, the oldest first, a page at a time.

    Messages that come meanwhile are left out: while the cause of failures is there, returned messages come back, and a
    reader that takes these as well never ends. ``limit``: how many messages are looked at; ``None``: all.
    """
    last, after, remaining = await view.last_number(queue), 0, sys.maxsize if limit is None else limit
    while after < last and remaining > 0 and (page := await view.browse(queue, min(_PAGE, remaining), after)):
        after = page[-1].number
        remaining -= len(page)
        yield [each for each in page if each.number <= last and where.matches(each.envelope)]


async def group_errors(deployment: OpenDeployment, queue: str, limit: int | None = None) -> ErrorGroups:
    """Return failed messages, the oldest ``limit`` or all, by type of exception and queue.

    Raises NotSupported where these cannot be browsed.
    """
    view = queue_view(deployment, "group failed messages")
    lines = defaultdict[tuple[str | None, str | None], list[ErrorLine]](list)
    count = 0
    async for page in _pages(view, queue, limit=limit):
        for line in map(_line, page):
            lines[line.exception_type, line.failed_queue].append(line)
        count += len(page)
    groups = [_group(kind, where, found) for (kind, where), found in lines.items()]
    total = await _length(deployment, queue) if count == limit else count
    return ErrorGroups(queue, total, sorted(groups, key=lambda group: -group.count))


def _group(kind: str | None, queue: str | None, found: Sequence[ErrorLine]) -> ErrorGroup:
    times = [each.failed_at for each in found if each.failed_at is not None]
    first, last = min(times, default=None), max(times, default=None)
    return ErrorGroup(len(found), kind, queue, first, last, found[-1].reason, found[:_OF_A_GROUP])


def _line(queued: Queued) -> ErrorLine:
    headers = queued.envelope.headers
    return ErrorLine(
        message_id=queued.envelope.message_id,
        failed_queue=headers.get(Headers.FAILED_QUEUE),
        failed_at=_failed_at(headers),
        reason=headers.get(Headers.EXCEPTION_MESSAGE, ""),
        exception_type=headers.get(Headers.EXCEPTION_TYPE),
        error_code=headers.get(Headers.ERROR_CODE),
        message_type=headers.get(Headers.ENCLOSED_MESSAGE_TYPES),
        held_by=queued.held_by,
        body_bytes=len(queued.envelope.body),
    )


def _failed_at(headers: Mapping[str, str]) -> datetime | None:
    try:
        return parse_timestamp(headers.get(Headers.TIME_OF_FAILURE, ""))
    except InvalidTimestamp:
        return None


async def show_error(deployment: OpenDeployment, queue: str, message_id: str, now: datetime) -> ErrorDetails:
    """Return one failed message."""
    queued = await _find(deployment, queue, message_id, now)
    headers = queued.envelope.headers
    trace = headers.get(Headers.EXCEPTION_STACK_TRACE)
    return ErrorDetails(queue, _line(queued), trace, headers, body_of(queued.envelope.body))


async def _find(deployment: OpenDeployment, queue: str, message_id: str, now: datetime) -> Queued:
    """Return a failed message, which stays where it is. Raises `MessageNotFound`."""
    if deployment.queue_view is not None:
        for found in await deployment.queue_view.find_in_queues(message_id):
            if found.queue == queue:
                return found
        raise MessageNotFound(_not_there(queue, message_id))
    async with walking(deployment, queue, now) as walk:
        async for (received,) in walk.pages():
            if message_id in _ids_of(received.envelope):
                return Queued(queue, received.envelope, received.failures, None)
    raise MessageNotFound(_not_there(queue, message_id))


async def edit(
    deployment: OpenDeployment,
    queue: str,
    message_id: str,
    now: datetime,
    change: Edit,
) -> Returned:
    """Send a failed message to the queue where it failed, or elsewhere, with another body or other headers.

    What is sent is another message, which names the one it was made of. That stays in the error queue, and says in a
    header that it was edited, so that it is not returned with all others. Both are one transaction, where the queues
    have these.

    Raises:
        InvalidMessage: the other one would be past its use.
        MessageNotFound: no such message is there, or a process has it in hand.
    """
    if not deployment.transport.capabilities.takes_by_id:
        async with walking(deployment, queue, now) as walk:
            async for (received,) in walk.pages():
                if message_id in _ids_of(received.envelope):
                    edited, marked = _edited(received.envelope, queue, now, change)
                    end = await _end_of_edited(deployment, edited, marked, now)
                    # One after the other: without transactions the mark would stay where the other cannot be sent.
                    sent = [each for each in end.outgoing if each is edited]
                    errors = await deployment.transport.send(sent, now)
                    if any(checked_answers(deployment.transport, len(sent), errors)):
                        raise next(filter(None, errors))
                    await walk.receiver.commit(received, now, replace(end, outgoing=[marked]))
                    walk.ended([received])
                    return Returned(edited.message_id, done=True, queue=edited.destination)
        raise MessageNotFound(_not_there(queue, message_id))
    receiver = deployment.transport.receiver(queue)
    try:
        received, why_not = await _Returning(deployment, receiver, queue, now, RETURN).take(message_id)
        if received is None:
            raise MessageNotFound(f"message {message_id!r} cannot be edited: {why_not}")
        try:
            edited, marked = _edited(received.envelope, queue, now, change)
            await receiver.commit(received, now, await _end_of_edited(deployment, edited, marked, now))
        except PostdateError:
            await try_to_give_back(receiver, received, now)
            raise
    finally:
        await try_to_close(receiver, queue)
    return Returned(edited.message_id, done=True, queue=edited.destination)


def _edited(failed: Envelope, queue: str, now: datetime, change: Edit) -> tuple[Envelope, Envelope]:
    """Return the edited message, and the failed one with the mark with which it goes back to the error queue."""
    copy, new_id = returned_copy(failed, _returned_to(failed, change.to)), new_message_id()
    own = {**copy.headers, **change.headers, Headers.MESSAGE_ID: new_id, Headers.EDIT_OF: failed.message_id}
    if (reason := _past_its_use(own, now)) is not None:
        over = (expires_at := expires_at_of(own)) is not None and expires_at < now
        name = Headers.EXPIRES_AT if over else Headers.TIME_TO_BE_RECEIVED
        raise InvalidMessage(f"it {reason} and would be discarded there; have it end later: --header {name}=…")
    edited = replace(copy, message_id=new_id, headers=own, body=copy.body if change.body is None else change.body)
    marked = replace(failed, destination=queue, headers={**failed.headers, Headers.EDITED_AS: new_id})
    return edited, marked


async def _end_of_edited(deployment: OpenDeployment, edited: Envelope, marked: Envelope, now: datetime) -> End:
    """Return the end of the failed message: the edited one goes out, the marked one back into the error queue.

    Where the destination has limits, the store lets the edited one through (ADR 39).
    """
    store = deployment.store
    if store is None or not await has_limits(store, edited.destination):
        return End(record=None, outgoing=[edited, marked])
    message = _stored_copy(edited, edited.message_id, now)
    if (moving := enlisting(store, deployment.transport)) is not None:
        return End(record=None, outgoing=[marked], work=[moving.storing([message], now)])
    await store.store(message, now)
    return End(record=None, outgoing=[marked])


def _stored_copy(copy: Envelope, own_id: str, now: datetime) -> DelayedMessage:
    """Return the message that the store lets through as soon as limits allow; its sender's id stays in its header.

    Its wall time does not: it has been due.
    """
    headers = {Headers.MESSAGE_ID: copy.message_id, **copy.headers}
    headers.pop(Headers.WALL_TIME, None)
    expires_at = None if copy.expires_at is None or copy.expires_at < now else copy.expires_at
    return DelayedMessage(own_id, now, copy.destination, headers, copy.body, expires_at)


def _returned_to(failed: Envelope, to: str | None) -> str:
    destination = to or failed.headers.get(Headers.FAILED_QUEUE)
    if not destination:
        raise QueueNotFound(f"it has no header {Headers.FAILED_QUEUE}; say where it belongs with --to QUEUE")
    return destination


def _past_its_use(headers: Mapping[str, str], now: datetime) -> str | None:
    with suppress(InvalidTimestamp):
        return discard_reason(headers, now)
    return None


def _not_there(queue: str, message_id: str) -> str:
    return (
        f"no message {message_id!r} is in queue {queue!r}; list them with `postdate errors list`, or ask where it is: "
        f"`postdate messages explain {message_id}`"
    )


async def return_messages(
    deployment: OpenDeployment, queue: str, message_ids: Sequence[str], now: datetime, how: Treatment = RETURN
) -> list[Returned]:
    """Return failed messages without the headers of the failure, or discard them.

    Each is one transaction: afterwards it is in exactly one of the two queues. Where queues give out messages in their
    order only, all are received, and those that are not meant go back.
    """
    if not deployment.transport.capabilities.takes_by_id:
        return await _by_ids_in_order(deployment, queue, now, message_ids, how)
    receiver = deployment.transport.receiver(queue)
    returning = _Returning(deployment, receiver, queue, now, how)
    try:
        return [await returning.put_back(each) for each in message_ids]
    finally:
        await try_to_close(receiver, queue)


async def return_all(
    deployment: OpenDeployment,
    queue: str,
    now: datetime,
    where: ErrorFilter = ANY_FAILED,
    how: Treatment = RETURN,
    progress: Progress = unheard,
) -> list[Returned]:
    """Return, or discard, every message that is in the error queue now and matches, each once.

    What cannot be returned stays, and so does what comes meanwhile: also what was returned and failed again.
    """
    if deployment.queue_view is None:
        results = await _in_order(deployment, queue, now, where, how, progress)
        return await _without_lost_queues(deployment, results) if how.dry_run else results
    results: list[Returned] = []
    async for page in _pages(deployment.queue_view, queue, where):
        edited = [] if how.discard else [each for each in page if Headers.EDITED_AS in each.envelope.headers]
        results += [_stays_edited(each.envelope, queue) for each in edited]
        others = [each for each in page if each not in edited] if edited else page
        if how.dry_run:
            results += [_would_be(each.envelope, queue, now, how, each.held_by) for each in others]
            continue
        results += await return_messages(deployment, queue, [each.envelope.message_id for each in others], now, how)
        progress(len(results))
    return await _without_lost_queues(deployment, results) if how.dry_run else results


async def _without_lost_queues(deployment: OpenDeployment, expected: Sequence[Returned]) -> list[Returned]:
    """Return the results of a dry run, of which those stay whose queue does not exist, where the transport can tell."""
    names = sorted({each.queue for each in expected if each.done})
    there = await deployment.transport.lengths_of(names) if names else None
    if there is None:
        return list(expected)
    return [
        replace(each, done=False, remark=str(QueueNotFound.of(each.queue, each.message_id)))
        if each.done and each.queue not in there
        else each
        for each in expected
    ]


def _stays_edited(envelope: Envelope, queue: str) -> Returned:
    """Return the result of a message that only its own id returns: an edited one was sent in its place."""
    id_, edited_as = envelope.message_id, envelope.headers[Headers.EDITED_AS]
    remark = f"it was edited, and sent as {edited_as}; to return it as well, name it: postdate errors return {id_}"
    return Returned(id_, done=False, queue=queue, remark=remark)


async def _in_order(
    deployment: OpenDeployment, queue: str, now: datetime, where: ErrorFilter, how: Treatment, progress: Progress
) -> list[Returned]:
    """Deal with as many messages as are in the queue now, as they come.

    Where they cannot be counted, the first one that failed after ``now`` ends it: those behind it came meanwhile, too.
    A service whose clock is behind says that it failed before; so none is dealt with a second time.
    """
    results, moved_ids = list[Returned](), set[str]()
    async with walking(deployment, queue, now) as walk:
        returning = _Returning(deployment, walk.receiver, queue, now, how)
        async for page in walk.pages():
            for received in page:
                if not walk.is_counted and (_failed_at(received.envelope.headers) or now) > now:
                    return results
                if not walk.is_counted and received.envelope.message_id in moved_ids:
                    continue
                if not where.matches(received.envelope):
                    continue
                if Headers.EDITED_AS in received.envelope.headers and not how.discard:
                    results.append(_stays_edited(received.envelope, queue))
                    continue
                if how.dry_run:
                    results.append(_would_be(received.envelope, queue, now, how))
                    continue
                result = await returning.try_to_move(received)
                results.append(result)
                progress(len(results))
                if result.done:
                    walk.ended([received])
                    moved_ids.add(received.envelope.message_id)
    return results


async def _by_ids_in_order(
    deployment: OpenDeployment, queue: str, now: datetime, message_ids: Sequence[str], how: Treatment
) -> list[Returned]:
    """Receive all, deal with those that are meant, as :meth:`_Returning.put_back`, and give the others back."""
    results: list[Returned] = []
    async with walking(deployment, queue, now) as walk:
        returning = _Returning(deployment, walk.receiver, queue, now, how)
        there = [received async for page in walk.pages() for received in page]
        for id_ in dict.fromkeys(message_ids):
            found = [each for each in there if id_ in _ids_of(each.envelope)]
            meant = [each for each in found if each.envelope.message_id == id_] or found
            if len(meant) == 1:
                result = await returning.try_to_move(meant[0])
                if result.done:
                    walk.ended(meant)
                    there.remove(meant[0])
                results.append(replace(result, message_id=id_))
            else:
                names = [each.envelope.message_id for each in meant]
                why_not = _several(names) if names else _not_there(queue, id_)
                results.append(Returned(id_, done=False, queue=queue, remark=why_not))
    return results


def _several(ids: Sequence[str]) -> str:
    return f"{len(ids)} messages there were sent under that id; name their own: {', '.join(ids)}"


@dataclass(frozen=True, slots=True)
class _Returning:
    deployment: OpenDeployment
    receiver: Receiver
    queue: str
    now: datetime
    how: Treatment

    async def put_back(self, message_id: str) -> Returned:
        """Move a message; see :meth:`take`."""
        received, why_not = await self.take(message_id)
        if received is None:
            return self._stays(message_id, why_not)
        result = await self.try_to_move(received)
        if not result.done:
            await try_to_give_back(self.receiver, received, self.now)
        return replace(result, message_id=message_id)

    async def take(self, message_id: str) -> tuple[Received | None, str]:
        """Receive a message by its id in the queue, or by its sender's id: a retry has a new one in the queue.

        Without one, the text says why.
        """
        received = await self.receiver.take(message_id)
        if received is not None:
            return received, ""
        free, why_not = await self._by_header(message_id)
        return (await self.receiver.take(free[0]) if len(free) == 1 else None), why_not

    async def try_to_move(self, received: Received) -> Returned:
        """Move a message; if that fails, it is still held."""
        try:
            return await self._move(received)
        except PostdateError as error:
            return self._stays(received.envelope.message_id, str(error))

    async def _move(self, received: Received) -> Returned:
        queue, end = _end_of(received.envelope, self.queue, self.now, self.how)
        if end.outgoing and await has_limits(self.deployment.store, queue):
            end = await self._held(received.envelope, end)
        await self.receiver.commit(received, self.now, end)
        return Returned(received.envelope.message_id, done=True, queue=queue)

    async def _held(self, failed: Envelope, end: End) -> End:
        """Return the end of a message whose destination has limits: the store lets it through (ADR 39).

        A message that is stored and cannot be taken off the error queue has the same id when it is returned again.
        """
        store, (copy,) = self.deployment.store, end.outgoing
        assert isinstance(store, ClaimingStore)  # it has limits
        failed_at, digest = failed.headers.get(Headers.TIME_OF_FAILURE, ""), hashlib.sha256(copy.body).hexdigest()
        own_id = uuid.uuid5(uuid.NAMESPACE_OID, f"{failed.message_id}\n{failed_at}\n{copy.destination}\n{digest}")
        message = _stored_copy(copy, str(own_id), self.now)
        if (moving := enlisting(store, self.deployment.transport)) is not None:
            return replace(end, outgoing=[], work=[moving.storing([message], self.now)])
        try:
            await store.store(message, self.now)
        except DuplicateMessage:
            if not await is_stored(store, message):
                raise
        return replace(end, outgoing=[])

    def _stays(self, message_id: str, remark: str) -> Returned:
        return Returned(message_id, done=False, queue=self.queue, remark=remark)

    async def _by_header(self, message_id: str) -> tuple[Sequence[str], str]:
        """Return the ids of free messages that a sender gave this id, and the reason when there is not exactly one."""
        if self.deployment.queue_view is None:
            return (), f"it is not in {self.queue!r}, or another process has it in hand"
        everywhere = await self.deployment.queue_view.find_in_queues(message_id)
        found = [each for each in everywhere if each.queue == self.queue]
        free = [each.envelope.message_id for each in found if each.held_by is None]
        if not found:
            return free, _not_there(self.queue, message_id)
        if len(free) > 1:
            return free, _several(free)
        return free, f"{'another process' if free else f'process {found[0].held_by}'} has it in hand"


def _would_be(envelope: Envelope, queue: str, now: datetime, how: Treatment, held_by: int | None = None) -> Returned:
    """Return what would become of a failed message, which a process may have in hand."""
    if held_by is not None:
        return Returned(envelope.message_id, done=False, queue=queue, remark=f"process {held_by} has it in hand")
    try:
        return Returned(envelope.message_id, done=True, queue=_end_of(envelope, queue, now, how)[0])
    except PostdateError as error:
        return Returned(envelope.message_id, done=False, queue=queue, remark=str(error))


def _end_of(envelope: Envelope, queue: str, now: datetime, how: Treatment) -> tuple[str, End]:
    """Return the queue where a failed message is then, or was, and its end in ``queue``. Raises: it has to stay."""
    if how.discard:
        return queue, End(RecordKind.DISCARDED, "discarded by hand from the error queue")
    destination = _returned_to(envelope, how.to)
    copy = returned_copy(envelope, destination)
    if how.without_expiry:
        lasting = {key: value for key, value in copy.headers.items() if key not in _EXPIRY_HEADERS}
        copy = replace(copy, headers=lasting, expires_at=None)
    reason = _past_its_use(copy.headers, now)
    if reason is not None:  # it does not expire here, and would be discarded there: this is the only one
        raise InvalidMessage(
            f"it {reason} and would be discarded there; to have it handled all the same, return it with "
            f"--without-expiry"
        )
    return destination, End(RecordKind.RETURNED, f"to {destination}", outgoing=[copy])


def returned_copy(envelope: Envelope, destination: str) -> Envelope:
    """Return a copy for ``destination`` without the headers of the failure."""
    headers = {
        key: value
        for key, value in envelope.headers.items()
        if key not in _FAILURE_HEADERS and not key.startswith(Headers.EXCEPTION_DATA_PREFIX)
    }
    return replace(envelope, destination=destination, headers=headers)
