"""Return failed messages to the queues where they failed, or discard them: by id, or all that match, each once."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from postdate.core.expiry import discard_reason
from postdate.core.limits import has_limits
from postdate.core.receive.settling import is_stored
from postdate.core.simple_store import enlisting
from postdate.errors import DuplicateMessage, InvalidMessage, InvalidTimestamp, PostdateError, QueueNotFound
from postdate.messages import DelayedMessage, Envelope, Headers
from postdate.operations.error_queue import (
    ANY_FAILED,
    ErrorFilter,
    ids_of,
    matching_pages,
    missing_text,
    time_of_failure,
)
from postdate.operations.plain import Progress, unheard
from postdate.operations.queues import try_to_close, try_to_give_back, walking
from postdate.ports import ClaimingStore, End, Received, Receiver, RecordKind
from postdate.wiring import OpenDeployment

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
        # Retries of a returned message count from zero. With the old timestamp, they would exceed the allowed time at
        # once.
        Headers.DELAYED_RETRIES,
        Headers.DELAYED_RETRIES_TIMESTAMP,
        Headers.IMMEDIATE_RETRIES,
        Headers.EDITED_AS,
    }
)

_EXPIRY_HEADERS = frozenset({Headers.TIME_TO_BE_RECEIVED, Headers.EXPIRES_AT})


@dataclass(frozen=True, slots=True)
class Treatment:
    """What to do with failed messages.

    Args:
        to: the queue to which they are returned; ``None``: the queue where each one failed.
        without_expiry: remove their expiry; otherwise expired messages stay.
        discard: discard them instead of returning them.
        dry_run: change nothing; the results say what would be done.
    """

    to: str | None = None
    without_expiry: bool = False
    discard: bool = False
    dry_run: bool = False


RETURN = Treatment()


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of returning or discarding one message.

    ``queue`` is the queue where the message is, or was. ``remark`` says why nothing was done.
    """

    message_id: str
    done: bool
    queue: str
    remark: str = ""


def stored_copy(copy: Envelope, own_id: str, now: datetime) -> DelayedMessage:
    """Return the message that the store sends as soon as the limits allow it. Its header keeps the id of the sender.

    The copy has no wall time, because its due time has passed.
    """
    headers = {Headers.MESSAGE_ID: copy.message_id, **copy.headers}
    headers.pop(Headers.WALL_TIME, None)
    expires_at = None if copy.expires_at is None or copy.expires_at < now else copy.expires_at
    return DelayedMessage(own_id, now, copy.destination, headers, copy.body, expires_at)


def returned_to(failed: Envelope, to: str | None) -> str:
    destination = to or failed.headers.get(Headers.FAILED_QUEUE)
    if not destination:
        raise QueueNotFound(f"it has no header {Headers.FAILED_QUEUE}; say where it belongs with --to QUEUE")
    return destination


def past_its_use(headers: Mapping[str, str], now: datetime) -> str | None:
    with suppress(InvalidTimestamp):
        return discard_reason(headers, now)
    return None


async def return_messages(
    deployment: OpenDeployment, queue: str, message_ids: Sequence[str], now: datetime, how: Treatment = RETURN
) -> list[Returned]:
    """Return messages by id without the headers of the failure, or discard them.

    Each message is one transaction: afterwards the message is in exactly one of the two queues. Where messages can only
    be received in the order of the queue, all are received, and the ones that were not named are returned to the queue.
    """
    if not deployment.transport.capabilities.takes_by_id:
        return await _by_ids_in_order(deployment, queue, now, message_ids, how)
    receiver = deployment.transport.receiver(queue)
    returning = Returning(deployment, receiver, queue, now, how)
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
    """Return or discard every message that is in the error queue now and matches, each once.

    A message that cannot be returned stays. A message that arrives meanwhile also stays, even one that was returned and
    has failed again.
    """
    if deployment.queue_view is None:
        results = await _in_order(deployment, queue, now, where, how, progress)
        return await _without_lost_queues(deployment, results) if how.dry_run else results
    results: list[Returned] = []
    async for page in matching_pages(deployment.queue_view, queue, where):
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
    """Return the results of a dry run. A message stays if its destination does not exist and the transport can tell."""
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
    """Return the result for a message that was edited: it stays, and only a return by its own id sends it again."""
    id_, edited_as = envelope.message_id, envelope.headers[Headers.EDITED_AS]
    remark = f"it was edited, and sent as {edited_as}; to return it as well, name it: postdate errors return {id_}"
    return Returned(id_, done=False, queue=queue, remark=remark)


async def _in_order(
    deployment: OpenDeployment, queue: str, now: datetime, where: ErrorFilter, how: Treatment, progress: Progress
) -> list[Returned]:
    """Return or discard as many messages as are in the queue now, in the order of the queue.

    If the messages cannot be counted, the first message that failed after ``now`` ends the loop: it arrived meanwhile,
    and so did the messages behind it. A service with a slow clock may record an earlier time of failure, so messages
    that were returned are remembered, and none is returned twice.
    """
    results, moved_ids = list[Returned](), set[str]()
    async with walking(deployment, queue, now) as walk:
        returning = Returning(deployment, walk.receiver, queue, now, how)
        async for page in walk.pages():
            for received in page:
                if not walk.is_counted and (time_of_failure(received.envelope.headers) or now) > now:
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
    """Receive all messages, return the named ones as :meth:`Returning.put_back` does, and give the others back."""
    results: list[Returned] = []
    async with walking(deployment, queue, now) as walk:
        returning = Returning(deployment, walk.receiver, queue, now, how)
        there = [received async for page in walk.pages() for received in page]
        for id_ in dict.fromkeys(message_ids):
            matches = [each for each in there if id_ in ids_of(each.envelope)]
            meant = [each for each in matches if each.envelope.message_id == id_] or matches
            if len(meant) == 1:
                result = await returning.try_to_move(meant[0])
                if result.done:
                    walk.ended(meant)
                    there.remove(meant[0])
                results.append(replace(result, message_id=id_))
            else:
                names = [each.envelope.message_id for each in meant]
                why_not = _several(names) if names else missing_text(queue, id_)
                results.append(Returned(id_, done=False, queue=queue, remark=why_not))
    return results


def _several(ids: Sequence[str]) -> str:
    return f"{len(ids)} messages there were sent under that id; name their own: {', '.join(ids)}"


@dataclass(frozen=True, slots=True)
class Returning:
    deployment: OpenDeployment
    receiver: Receiver
    queue: str
    now: datetime
    how: Treatment

    async def put_back(self, message_id: str) -> Returned:
        """Return or discard a message; see :meth:`take`."""
        received, why_not = await self.take(message_id)
        if received is None:
            return self._stays(message_id, why_not)
        result = await self.try_to_move(received)
        if not result.done:
            await try_to_give_back(self.receiver, received, self.now)
        return replace(result, message_id=message_id)

    async def take(self, message_id: str) -> tuple[Received | None, str]:
        """Receive a message by its id in the queue, or by the id of its sender. A retry has a new id in the queue.

        If there is no such message, the text says why.
        """
        received = await self.receiver.take(message_id)
        if received is not None:
            return received, ""
        free, why_not = await self._by_header(message_id)
        return (await self.receiver.take(free[0]) if len(free) == 1 else None), why_not

    async def try_to_move(self, received: Received) -> Returned:
        """Return or discard a message. If that fails, the receiver still holds the message."""
        try:
            return await self._move(received)
        except PostdateError as error:
            return self._stays(received.envelope.message_id, str(error))

    async def _move(self, received: Received) -> Returned:
        queue, end = _end_of(received.envelope, self.queue, self.now, self.how)
        if end.outgoing and await has_limits(self.deployment.store, queue):
            end = await self._end_through_limits(received.envelope, end)
        await self.receiver.commit(received, self.now, end)
        return Returned(received.envelope.message_id, done=True, queue=queue)

    async def _end_through_limits(self, failed: Envelope, end: End) -> End:
        """Return the end of a message whose destination has limits: the store sends it when they allow it (ADR 39).

        If a message is stored but cannot be removed from the error queue, the next try to return it uses the same id.
        """
        store, (copy,) = self.deployment.store, end.outgoing
        assert isinstance(store, ClaimingStore)  # A destination has limits only if the store can claim messages.
        failed_at, digest = failed.headers.get(Headers.TIME_OF_FAILURE, ""), hashlib.sha256(copy.body).hexdigest()
        own_id = uuid.uuid5(uuid.NAMESPACE_OID, f"{failed.message_id}\n{failed_at}\n{copy.destination}\n{digest}")
        message = stored_copy(copy, str(own_id), self.now)
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
        """Return the ids of free messages with this id from a sender, or the reason why there is not exactly one."""
        if self.deployment.queue_view is None:
            return (), f"it is not in {self.queue!r}, or another process has it in hand"
        everywhere = await self.deployment.queue_view.find_in_queues(message_id)
        in_queue = [each for each in everywhere if each.queue == self.queue]
        free = [each.envelope.message_id for each in in_queue if each.held_by is None]
        if not in_queue:
            return free, missing_text(self.queue, message_id)
        if len(free) > 1:
            return free, _several(free)
        return free, f"{'another process' if free else f'process {in_queue[0].held_by}'} has it in hand"


def _would_be(envelope: Envelope, queue: str, now: datetime, how: Treatment, held_by: int | None = None) -> Returned:
    """Return what would become of a failed message. ``held_by``: the process that is handling the message, if any."""
    if held_by is not None:
        return Returned(envelope.message_id, done=False, queue=queue, remark=f"process {held_by} has it in hand")
    try:
        return Returned(envelope.message_id, done=True, queue=_end_of(envelope, queue, now, how)[0])
    except PostdateError as error:
        return Returned(envelope.message_id, done=False, queue=queue, remark=str(error))


def _end_of(envelope: Envelope, queue: str, now: datetime, how: Treatment) -> tuple[str, End]:
    """Return the queue of a failed message after its end, and its end in ``queue``. Raises if the message must stay."""
    if how.discard:
        return queue, End(RecordKind.DISCARDED, "discarded by hand from the error queue")
    destination = returned_to(envelope, how.to)
    copy = returned_copy(envelope, destination)
    if how.without_expiry:
        lasting = {key: value for key, value in copy.headers.items() if key not in _EXPIRY_HEADERS}
        copy = replace(copy, headers=lasting, expires_at=None)
    reason = past_its_use(copy.headers, now)
    # The message does not expire in the error queue. The destination would discard it, and there is no other copy.
    if reason is not None:
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
