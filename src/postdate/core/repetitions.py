"""Whether a message under a known id is the one that was stored before, or another. Source: row 17."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from postdate.clock import LATEST
from postdate.core.guard import calling_store
from postdate.errors import DuplicateMessage
from postdate.messages import DelayedMessage, Headers, parse_timestamp
from postdate.ports import AdministrableStore, ClaimingStore, MovingStore, NativeTransaction, RecordKind, Work

log = logging.getLogger("postdate.repetitions")


async def is_stored(store: ClaimingStore, message: DelayedMessage) -> bool:
    """Return whether a store has, or had, this message; ``False``: the id is free, or was that of one that failed.

    A message that waits is compared by its content, and not by its due time, as a repeated send has another one. Of one
    that has left there are records only, with destination and due time. Of a store without records and queries, the id
    decides.

    A message with the header :attr:`Headers.MAY_REPEAT_SINCE` may be a repetition of any that was scheduled from then
    on: its own headers may be new ones, and of one that has left the destination alone decides.

    Raises:
        DuplicateMessage: it has, or had, another message under the id.
        InvalidTimestamp: that header is malformed.
    """
    if not isinstance(store, AdministrableStore):
        return True
    with calling_store(store):
        waiting = await store.get(message.message_id)
        records = await store.history(message.message_id) if waiting is None else ()
    if waiting is None and (not records or records[-1].kind is RecordKind.FAILED):
        return False
    may_repeat = Headers.MAY_REPEAT_SINCE in message.headers
    since = parse_timestamp(message.headers[Headers.MAY_REPEAT_SINCE]) if may_repeat else LATEST
    if waiting is not None:
        is_same = _content(waiting, may_repeat=may_repeat) == _content(message, may_repeat=may_repeat)
    else:
        is_same = any(
            each.due == message.due or (each.kind is RecordKind.SCHEDULED and each.at >= since)
            for each in records
            if each.destination == message.destination
        )
    _check(message, is_same=is_same)
    log.debug("message %s, due %s, is not stored: it was before, and is unchanged", message.message_id, message.due)
    return True


def _content(message: DelayedMessage, *, may_repeat: bool = False) -> object:
    ours = "" if may_repeat else ("NServiceBus.", "Postdate.")
    own = {name: text for name, text in message.headers.items() if not name.startswith(ours)}
    return message.destination, message.body, message.headers.get(Headers.ENCLOSED_MESSAGE_TYPES), own


def to_be_stored(message: DelayedMessage) -> DelayedMessage:
    """Return a message without the header that only :func:`is_stored` reads."""
    if Headers.MAY_REPEAT_SINCE not in message.headers:
        return message
    return replace(
        message, headers={name: text for name, text in message.headers.items() if name != Headers.MAY_REPEAT_SINCE}
    )


def _check(message: DelayedMessage, *, is_same: bool) -> None:
    if is_same:
        return
    raise DuplicateMessage(
        f"another message was stored under the id {message.message_id!r} before and is unchanged; give this one its own"
    )


class RepeatableStoring:
    """Work that stores messages in a transaction of the queues, and can leave out those that are stored already."""

    def __init__(self, store: MovingStore, messages: Sequence[DelayedMessage], now: datetime) -> None:
        self._store, self._messages, self._now = store, messages, now
        self._work = self._storing(messages)

    def __call__(self, transaction: NativeTransaction) -> None:
        self._work(transaction)

    async def leave_out(self) -> bool:
        """Leave out messages that are stored already; return whether there were any."""
        new: dict[str, DelayedMessage] = {}
        for each in self._messages:
            _check(each, is_same=_content(new.setdefault(each.message_id, each)) == _content(each))
        kept = [each for each in new.values() if not await is_stored(self._store, each)]
        self._messages, before = kept, len(self._messages)
        self._work = self._storing(kept)
        return len(kept) < before

    def _storing(self, messages: Sequence[DelayedMessage]) -> Work:
        return self._store.storing([to_be_stored(each) for each in messages], self._now)


async def leave_out_repetitions(work: Sequence[Work], error: DuplicateMessage) -> None:
    """Leave stored messages out of work that was refused as a whole, for ``error``; raise that if there are none."""
    if not any([await each.leave_out() for each in work if isinstance(each, RepeatableStoring)]):
        raise error
