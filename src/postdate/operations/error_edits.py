"""Edit a failed message: send a new one, which names it, with another body or other headers in its place."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from postdate.core.limits import has_limits
from postdate.core.recoverability import check_answers
from postdate.core.simple_store import enlisting_store
from postdate.errors import InvalidMessage, MessageNotFound, PostdateError
from postdate.messages import Envelope, Headers, expires_at_of, is_saga_timeout
from postdate.operations import error_returns
from postdate.operations.error_queue import find_by_id, missing_text
from postdate.operations.queues import close_receiver, requeue_message, walk_queue
from postdate.ports import Completion
from postdate.wiring import OpenDeployment


@dataclass(frozen=True, slots=True)
class Edit:
    """The changes that turn a failed message into a new one.

    ``to``: a queue other than the one where the message failed.
    """

    body: bytes | None
    headers: Mapping[str, str]
    to: str | None


async def edit(
    deployment: OpenDeployment,
    queue: str,
    message_id: str,
    now: datetime,
    change: Edit,
) -> error_returns.ReturnResult:
    """Send a failed message to the queue where it failed, or to another queue, with another body or other headers.

    The edited message is a new message, which names the failed one. The failed message stays in the error queue with a
    header that marks it as edited, so that it is not returned together with all others. Both changes are one
    transaction, where the queues have transactions.

    Raises:
        InvalidMessage: the edited message would have expired.
        MessageNotFound: there is no such message, or another process is handling it.
    """
    if not deployment.transport.capabilities.receives_by_id:
        async with walk_queue(deployment, queue, now) as walk:
            matches = await find_by_id(walk, message_id)
            if not matches:
                raise MessageNotFound(missing_text(queue, message_id))
            if len(matches) > 1:
                reason = error_returns.duplicate_id_text([each.envelope.message_id for each in matches])
                raise MessageNotFound(f"message {message_id!r} cannot be edited: {reason}")
            (received,) = matches
            edited_message, marked_message = _apply_edit(received.envelope, queue, now, change)
            completion = await _prepare_completion(deployment, received.envelope, edited_message, marked_message, now)
            # First the edited message, then the mark: without transactions, a message whose edit cannot be sent must
            # not be marked.
            sent = [each for each in completion.outgoing if each is edited_message]
            errors = await deployment.transport.send(sent, now)
            if any(check_answers(deployment.transport, len(sent), errors)):
                raise next(filter(None, errors))
            await walk.receiver.commit(received, now, replace(completion, outgoing=[marked_message]))
            walk.forget_settled([received])
            return error_returns.ReturnResult(edited_message.message_id, done=True, queue=edited_message.destination)
    receiver = deployment.transport.receiver(queue)
    try:
        received, reason = await error_returns.FailedMessageReturner(
            deployment, receiver, queue, now, error_returns.RETURN
        ).receive_message(message_id)
        if received is None:
            raise MessageNotFound(f"message {message_id!r} cannot be edited: {reason}")
        try:
            edited_message, marked_message = _apply_edit(received.envelope, queue, now, change)
            await receiver.commit(
                received,
                now,
                await _prepare_completion(deployment, received.envelope, edited_message, marked_message, now),
            )
        except PostdateError:
            await requeue_message(receiver, received, now)
            raise
    finally:
        await close_receiver(receiver, queue)
    return error_returns.ReturnResult(edited_message.message_id, done=True, queue=edited_message.destination)


def _apply_edit(failed: Envelope, queue: str, now: datetime, change: Edit) -> tuple[Envelope, Envelope]:
    """Return the edited message, and the failed message with the mark with which it goes back to the error queue."""
    copy = error_returns.copy_without_failure(failed, error_returns.return_destination(failed, change.to))
    new_id = _id_of_edit(failed, copy.destination, change)
    # A saga knows its timeouts by the id of their sender.
    sender_id = failed.headers.get(Headers.MESSAGE_ID, failed.message_id) if is_saga_timeout(failed.headers) else new_id
    headers = {**copy.headers, **change.headers, Headers.MESSAGE_ID: sender_id, Headers.EDIT_OF: failed.message_id}
    if (reason := error_returns.readable_discard_reason(headers, now)) is not None:
        has_expired = (expires_at := expires_at_of(headers)) is not None and expires_at < now
        name = Headers.EXPIRES_AT if has_expired else Headers.TIME_TO_BE_RECEIVED
        raise InvalidMessage(f"it {reason} and would be discarded there; give it a later expiry: --header {name}=…")
    edited_message = replace(
        copy, message_id=new_id, headers=headers, body=copy.body if change.body is None else change.body
    )
    marked_message = replace(failed, destination=queue, headers={**failed.headers, Headers.EDITED_AS: new_id})
    return edited_message, marked_message


def _id_of_edit(failed: Envelope, destination: str, change: Edit) -> str:
    """Return the id of an edited message. An edit that is repeated after an error has the same one."""
    body = b"" if change.body is None else change.body
    parts = (
        failed.message_id,
        failed.headers.get(Headers.TIME_OF_FAILURE),
        destination,
        sorted(change.headers.items()),
    )
    digest = hashlib.sha256(repr((*parts, change.body is None)).encode() + body).hexdigest()
    return str(uuid.uuid5(uuid.NAMESPACE_OID, digest))


async def _prepare_completion(
    deployment: OpenDeployment, failed: Envelope, edited_message: Envelope, marked_message: Envelope, now: datetime
) -> Completion:
    """Return the end of the failed message: the edited message is sent, and the marked one returns to the error queue.

    If the destination has limits, the store sends the edited message when the limits allow it (ADR 39).
    """
    store = deployment.store
    if store is None or not await has_limits(store, edited_message.destination):
        return Completion(record=None, outgoing=[edited_message, marked_message])
    message = error_returns.delayed_message_of(edited_message, edited_message.message_id, now)
    if (moving := enlisting_store(store, deployment.transport)) is not None:
        return Completion(record=None, outgoing=[marked_message], work=[moving.storing_work([message], now)])
    await error_returns.store_once(store, message, failed, now)
    return Completion(record=None, outgoing=[marked_message])
