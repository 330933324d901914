"""Return failed messages to the queues where they failed, or discard them: by id, or all that match, each once."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from postdate.clock import EARLIEST
from postdate.core.expiry import discard_reason
from postdate.core.limits import has_limits
from postdate.core.receive.settling import is_stored
from postdate.core.simple_store import enlisting_store
from postdate.errors import DuplicateMessage, InvalidMessage, InvalidTimestamp, PostdateError, QueueNotFound
from postdate.messages import DelayedMessage, Envelope, Headers, format_timestamp
from postdate.operations.error_queue import (
    ANY_FAILED,
    ErrorFilter,
    missing_text,
    read_matching_pages,
    select_by_id,
    time_of_failure,
)
from postdate.operations.plain import Progress, ignore_progress
from postdate.operations.queues import close_receiver, requeue_message, walk_queue
from postdate.ports import ClaimingStore, Completion, QueuedMessage, Received, Receiver, RecordKind
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
class ReturnResult:
    """Result of returning or discarding one message.

    ``queue`` is the queue where the message is, or was. ``remark`` says why nothing was done.
    """

    message_id: str
    done: bool
    queue: str
    remark: str = ""


def delayed_message_of(copy: Envelope, own_id: str, now: datetime) -> DelayedMessage:
    """Return the message that the store sends as soon as the limits allow it. Its header keeps the id of the sender.

    The copy has no wall time, because its due time has passed. It belongs to no load: the message of the load has
    ended, and the copy has an id of its own.
    """
    headers = {Headers.MESSAGE_ID: copy.message_id, **copy.headers}
    headers.pop(Headers.WALL_TIME, None)
    headers.pop(Headers.LOAD, None)
    expires_at = None if copy.expires_at is None or copy.expires_at < now else copy.expires_at
    return DelayedMessage(own_id, now, copy.destination, headers, copy.body, expires_at)


async def store_once(store: ClaimingStore, message: DelayedMessage, failed: Envelope, now: datetime) -> None:
    """Store a message in place of a failed one; without effect if an earlier try has stored it since the failure.

    The id of the message must be made of the failed one. Raise DuplicateMessage if another message has it.
    """
    try:
        await store.store(message, now)
    except DuplicateMessage:
        # The earlier try had another due time, and its message may have been sent since.
        since = failed.headers.get(Headers.TIME_OF_FAILURE) or format_timestamp(EARLIEST)
        repetition = replace(message, headers={**message.headers, Headers.MAY_REPEAT_SINCE: since})
        if not await is_stored(store, repetition):
            raise


def return_destination(failed: Envelope, to: str | None) -> str:
    destination = to or failed.headers.get(Headers.FAILED_QUEUE)
    if not destination:
        raise QueueNotFound(f"it has no header {Headers.FAILED_QUEUE}; name its queue with --to QUEUE")
    return destination


def readable_discard_reason(headers: Mapping[str, str], now: datetime) -> str | None:
    with suppress(InvalidTimestamp):
        return discard_reason(headers, now)
    return None


async def return_messages(
    deployment: OpenDeployment, queue: str, message_ids: Sequence[str], now: datetime, treatment: Treatment = RETURN
) -> list[ReturnResult]:
    """Return messages by id without the headers of the failure, or discard them.

    Each message is one transaction: afterwards the message is in exactly one of the two queues. Where messages can only
    be received in the order of the queue, all are received, and the ones that were not named are returned to the queue.
    """
    if not deployment.transport.capabilities.receives_by_id:
        return await _treat_by_id_in_order(deployment, queue, now, message_ids, treatment)
    receiver = deployment.transport.receiver(queue)
    returning = FailedMessageReturner(deployment, receiver, queue, now, treatment)
    try:
        return [await returning.treat_by_id(each) for each in message_ids]
    finally:
        await close_receiver(receiver, queue)


async def return_all(
    deployment: OpenDeployment,
    queue: str,
    now: datetime,
    error_filter: ErrorFilter = ANY_FAILED,
    treatment: Treatment = RETURN,
    progress: Progress = ignore_progress,
) -> list[ReturnResult]:
    """Return or discard every message that is in the error queue now and matches, each once.

    A message that cannot be returned stays. A message that arrives meanwhile also stays, even one that was returned and
    has failed again.
    """
    if deployment.queue_view is None:
        results = await _treat_in_order(deployment, queue, now, error_filter, treatment, progress)
        return await _refuse_missing_queues(deployment, results) if treatment.dry_run else results
    results: list[ReturnResult] = []
    async for page in read_matching_pages(deployment.queue_view, queue, error_filter):
        edited = [] if treatment.discard else [each for each in page if Headers.EDITED_AS in each.envelope.headers]
        results += [_refuse_edited(each.envelope, queue) for each in edited]
        others = [each for each in page if each not in edited] if edited else page
        if treatment.dry_run:
            results += [_preview_treatment(each.envelope, queue, now, treatment, each.received_by) for each in others]
            continue
        results += await _treat_page(deployment, queue, others, now, treatment)
        progress(len(results))
    return await _refuse_missing_queues(deployment, results) if treatment.dry_run else results


async def _treat_page(
    deployment: OpenDeployment, queue: str, messages: Sequence[QueuedMessage], now: datetime, treatment: Treatment
) -> list[ReturnResult]:
    """Return or discard the messages that were read in the queue. Others may have their ids, and stay."""
    if not deployment.transport.capabilities.receives_by_id:
        return await return_messages(deployment, queue, [each.envelope.message_id for each in messages], now, treatment)
    receiver = deployment.transport.receiver(queue)
    returning = FailedMessageReturner(deployment, receiver, queue, now, treatment)
    try:
        return [await returning.treat_envelope(each.envelope) for each in messages]
    finally:
        await close_receiver(receiver, queue)


async def _refuse_missing_queues(
    deployment: OpenDeployment, expected_results: Sequence[ReturnResult]
) -> list[ReturnResult]:
    """Return the results of a dry run. A message stays if its destination does not exist and the transport can tell."""
    names = sorted({each.queue for each in expected_results if each.done})
    queue_lengths = await deployment.transport.lengths_of(names) if names else None
    if queue_lengths is None:
        return list(expected_results)
    return [
        replace(each, done=False, remark=str(QueueNotFound.of(each.queue, each.message_id)))
        if each.done and each.queue not in queue_lengths
        else each
        for each in expected_results
    ]


def _refuse_edited(envelope: Envelope, queue: str) -> ReturnResult:
    """Return the result for a message that was edited: it stays, and only a return by its own id sends it again."""
    id_, edited_as = envelope.message_id, envelope.headers[Headers.EDITED_AS]
    remark = f"it was edited and sent as {edited_as}; to return it as well, name it: postdate errors return {id_}"
    return ReturnResult(id_, done=False, queue=queue, remark=remark)


async def _treat_in_order(
    deployment: OpenDeployment,
    queue: str,
    now: datetime,
    error_filter: ErrorFilter,
    treatment: Treatment,
    progress: Progress,
) -> list[ReturnResult]:
    """Return or discard as many messages as are in the queue now, in the order of the queue.

    If the messages cannot be counted, the first message that failed after ``now`` ends the loop: it arrived meanwhile,
    and so did the messages behind it. A service with a slow clock may record an earlier time of failure, so messages
    that were returned are remembered, and none is returned twice.
    """
    results, moved_ids = list[ReturnResult](), set[str]()
    async with walk_queue(deployment, queue, now) as walk:
        returning = FailedMessageReturner(deployment, walk.receiver, queue, now, treatment)
        async for page in walk.receive_pages():
            for received in page:
                if not walk.is_counted and (time_of_failure(received.envelope.headers) or now) > now:
                    return results
                if not walk.is_counted and received.envelope.message_id in moved_ids:
                    continue
                if not error_filter.matches(received.envelope):
                    continue
                if Headers.EDITED_AS in received.envelope.headers and not treatment.discard:
                    results.append(_refuse_edited(received.envelope, queue))
                    continue
                if treatment.dry_run:
                    results.append(_preview_treatment(received.envelope, queue, now, treatment))
                    continue
                result = await returning.treat_received(received)
                results.append(result)
                progress(len(results))
                if result.done:
                    walk.forget_settled([received])
                    moved_ids.add(received.envelope.message_id)
    return results


async def _treat_by_id_in_order(
    deployment: OpenDeployment, queue: str, now: datetime, message_ids: Sequence[str], treatment: Treatment
) -> list[ReturnResult]:
    """Receive all messages, treat those with the ids, and requeue the others."""
    results: list[ReturnResult] = []
    async with walk_queue(deployment, queue, now) as walk:
        returning = FailedMessageReturner(deployment, walk.receiver, queue, now, treatment)
        received_messages = [received async for page in walk.receive_pages() for received in page]
        for id_ in dict.fromkeys(message_ids):
            candidates = select_by_id(received_messages, id_)
            if len(candidates) == 1:
                result = await returning.treat_received(candidates[0])
                if result.done:
                    walk.forget_settled(candidates)
                    received_messages.remove(candidates[0])
                results.append(replace(result, message_id=id_))
            else:
                names = [each.envelope.message_id for each in candidates]
                reason = duplicate_id_text(names) if names else missing_text(queue, id_)
                results.append(ReturnResult(id_, done=False, queue=queue, remark=reason))
    return results


def duplicate_id_text(ids: Sequence[str]) -> str:
    return f"{len(ids)} messages there were sent under that id; name their own: {', '.join(ids)}"


@dataclass(frozen=True, slots=True)
class FailedMessageReturner:
    deployment: OpenDeployment
    receiver: Receiver
    queue: str
    now: datetime
    treatment: Treatment

    async def treat_by_id(self, message_id: str) -> ReturnResult:
        """Return or discard a message; see :meth:`receive_message`."""
        received, reason = await self.receive_message(message_id)
        if received is None:
            return self._refuse(message_id, reason)
        result = await self.treat_received(received)
        if not result.done:
            await requeue_message(self.receiver, received, self.now)
        return replace(result, message_id=message_id)

    async def treat_envelope(self, envelope: Envelope) -> ReturnResult:
        """Return or discard the message that was read in the queue, and no other one with its id."""
        others = list[Received]()
        try:
            while (received := await self.receiver.receive_by_id(envelope.message_id)) is not None:
                if (received.envelope.headers, received.envelope.body) != (envelope.headers, envelope.body):
                    others.append(received)
                    continue
                result = await self.treat_received(received)
                if not result.done:
                    others.append(received)
                return result
        finally:
            for each in others:
                await requeue_message(self.receiver, each, self.now)
        return self._refuse(envelope.message_id, "it is not there any more, or another process has received it")

    async def receive_message(self, message_id: str) -> tuple[Received | None, str]:
        """Receive a message by its id in the queue, or by the id of its sender. A retry has a new id in the queue.

        If there is no such message, the text says why.
        """
        received = await self.receiver.receive_by_id(message_id)
        if received is not None:
            return received, ""
        free_ids, reason = await self._find_by_header(message_id)
        return (await self.receiver.receive_by_id(free_ids[0]) if len(free_ids) == 1 else None), reason

    async def treat_received(self, received: Received) -> ReturnResult:
        """Return or discard a message. If that fails, the receiver still holds the message."""
        try:
            return await self._treat(received)
        except PostdateError as error:
            return self._refuse(received.envelope.message_id, str(error))

    async def _treat(self, received: Received) -> ReturnResult:
        queue, completion = _completion_of(received.envelope, self.queue, self.now, self.treatment)
        if completion.outgoing and await has_limits(self.deployment.store, queue):
            completion = await self._store_for_limits(received.envelope, completion)
        await self.receiver.commit(received, self.now, completion)
        return ReturnResult(received.envelope.message_id, done=True, queue=queue)

    async def _store_for_limits(self, failed: Envelope, completion: Completion) -> Completion:
        """Return the end of a message whose destination has limits: the store sends it when they allow it (ADR 39).

        If a message is stored but cannot be removed from the error queue, the next try to return it uses the same id.
        """
        store, (copy,) = self.deployment.store, completion.outgoing
        assert isinstance(store, ClaimingStore)  # A destination has limits only if the store can claim messages.
        failed_at, digest = failed.headers.get(Headers.TIME_OF_FAILURE, ""), hashlib.sha256(copy.body).hexdigest()
        own_id = uuid.uuid5(uuid.NAMESPACE_OID, f"{failed.message_id}\n{failed_at}\n{copy.destination}\n{digest}")
        message = delayed_message_of(copy, str(own_id), self.now)
        if (moving := enlisting_store(store, self.deployment.transport)) is not None:
            return replace(completion, outgoing=[], work=[moving.storing_work([message], self.now)])
        await store_once(store, message, failed, self.now)
        return replace(completion, outgoing=[])

    def _refuse(self, message_id: str, remark: str) -> ReturnResult:
        return ReturnResult(message_id, done=False, queue=self.queue, remark=remark)

    async def _find_by_header(self, message_id: str) -> tuple[Sequence[str], str]:
        """Return the ids of free messages with this id from a sender, or the reason why there is not exactly one."""
        if self.deployment.queue_view is None:
            return (), f"it is not in {self.queue!r}, or another process has received it"
        queued_messages = await self.deployment.queue_view.find_in_queues(message_id)
        in_queue = [each for each in queued_messages if each.queue == self.queue]
        free_ids = [each.envelope.message_id for each in in_queue if each.received_by is None]
        if not in_queue:
            return free_ids, missing_text(self.queue, message_id)
        if len(free_ids) > 1:
            return free_ids, duplicate_id_text(free_ids)
        return free_ids, f"{'another process' if free_ids else f'process {in_queue[0].received_by}'} has received it"


def _preview_treatment(
    envelope: Envelope, queue: str, now: datetime, treatment: Treatment, held_by: int | None = None
) -> ReturnResult:
    """Return what would become of a failed message. ``held_by``: the process that is handling the message, if any."""
    if held_by is not None:
        return ReturnResult(envelope.message_id, done=False, queue=queue, remark=f"process {held_by} has received it")
    try:
        return ReturnResult(envelope.message_id, done=True, queue=_completion_of(envelope, queue, now, treatment)[0])
    except PostdateError as error:
        return ReturnResult(envelope.message_id, done=False, queue=queue, remark=str(error))


def _completion_of(envelope: Envelope, queue: str, now: datetime, treatment: Treatment) -> tuple[str, Completion]:
    """Return the queue of a failed message after its end, and its end in ``queue``. Raises if the message must stay."""
    if treatment.discard:
        return queue, Completion(RecordKind.DISCARDED, "discarded by hand from the error queue")
    destination = return_destination(envelope, treatment.to)
    copy = copy_without_failure(envelope, destination)
    if treatment.without_expiry:
        lasting_headers = {key: value for key, value in copy.headers.items() if key not in _EXPIRY_HEADERS}
        copy = replace(copy, headers=lasting_headers, expires_at=None)
    reason = readable_discard_reason(copy.headers, now)
    # The message does not expire in the error queue. The destination would discard it, and there is no other copy.
    if reason is not None:
        raise InvalidMessage(
            f"it {reason} and would be discarded there; to handle it anyway, return it with --without-expiry"
        )
    return destination, Completion(RecordKind.RETURNED, f"to {destination}", outgoing=[copy])


def copy_without_failure(envelope: Envelope, destination: str) -> Envelope:
    """Return a copy for ``destination`` without the headers of the failure."""
    headers = {
        key: value
        for key, value in envelope.headers.items()
        if key not in _FAILURE_HEADERS and not key.startswith(Headers.EXCEPTION_DATA_PREFIX)
    }
    return replace(envelope, destination=destination, headers=headers)
