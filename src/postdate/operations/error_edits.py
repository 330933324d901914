"""Edit a failed message: send a new one, which names it, with another body or other headers in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from postdate.core.limits import has_limits
from postdate.core.recoverability import checked_answers
from postdate.core.simple_store import enlisting
from postdate.errors import InvalidMessage, MessageNotFound, PostdateError
from postdate.messages import Envelope, Headers, expires_at_of, new_message_id
from postdate.operations.error_queue import ids_of, missing_text
from postdate.operations.error_returns import (
    RETURN,
    Returned,
    Returning,
    past_its_use,
    returned_copy,
    returned_to,
    stored_copy,
)
from postdate.operations.queues import try_to_close, try_to_give_back, walking
from postdate.ports import End
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
) -> Returned:
    """Send a failed message to the queue where it failed, or to another queue, with another body or other headers.

    The edited message is a new message, which names the failed one. The failed message stays in the error queue with a
    header that marks it as edited, so that it is not returned together with all others. Both changes are one
    transaction, where the queues have transactions.

    Raises:
        InvalidMessage: the edited message would have expired.
        MessageNotFound: there is no such message, or another process is handling it.
    """
    if not deployment.transport.capabilities.takes_by_id:
        async with walking(deployment, queue, now) as walk:
            async for (received,) in walk.pages():
                if message_id in ids_of(received.envelope):
                    edited, marked = _edited(received.envelope, queue, now, change)
                    end = await _end_of_edited(deployment, edited, marked, now)
                    # First the edited message, then the mark: without transactions, a message whose edit cannot be sent
                    # must not be marked.
                    sent = [each for each in end.outgoing if each is edited]
                    errors = await deployment.transport.send(sent, now)
                    if any(checked_answers(deployment.transport, len(sent), errors)):
                        raise next(filter(None, errors))
                    await walk.receiver.commit(received, now, replace(end, outgoing=[marked]))
                    walk.ended([received])
                    return Returned(edited.message_id, done=True, queue=edited.destination)
        raise MessageNotFound(missing_text(queue, message_id))
    receiver = deployment.transport.receiver(queue)
    try:
        received, why_not = await Returning(deployment, receiver, queue, now, RETURN).take(message_id)
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
    """Return the edited message, and the failed message with the mark with which it goes back to the error queue."""
    copy, new_id = returned_copy(failed, returned_to(failed, change.to)), new_message_id()
    own = {**copy.headers, **change.headers, Headers.MESSAGE_ID: new_id, Headers.EDIT_OF: failed.message_id}
    if (reason := past_its_use(own, now)) is not None:
        over = (expires_at := expires_at_of(own)) is not None and expires_at < now
        name = Headers.EXPIRES_AT if over else Headers.TIME_TO_BE_RECEIVED
        raise InvalidMessage(f"it {reason} and would be discarded there; have it end later: --header {name}=…")
    edited = replace(copy, message_id=new_id, headers=own, body=copy.body if change.body is None else change.body)
    marked = replace(failed, destination=queue, headers={**failed.headers, Headers.EDITED_AS: new_id})
    return edited, marked


async def _end_of_edited(deployment: OpenDeployment, edited: Envelope, marked: Envelope, now: datetime) -> End:
    """Return the end of the failed message: the edited message is sent, and the marked one returns to the error queue.

    If the destination has limits, the store sends the edited message when the limits allow it (ADR 39).
    """
    store = deployment.store
    if store is None or not await has_limits(store, edited.destination):
        return End(record=None, outgoing=[edited, marked])
    message = stored_copy(edited, edited.message_id, now)
    if (moving := enlisting(store, deployment.transport)) is not None:
        return End(record=None, outgoing=[marked], work=[moving.storing([message], now)])
    await store.store(message, now)
    return End(record=None, outgoing=[marked])
