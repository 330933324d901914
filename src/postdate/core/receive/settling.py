"""Ends received messages, in batches: outcomes that come during one batch are the next. Source: ADR 0026.

What an end stores may have been stored before, by an attempt that could not take its message off the queue: whether a
message under a known id is that one, or another, is told here. Source: row 17.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import ClassVar, Final, Protocol, TypeAlias

import anyio
from typing_extensions import override

from postdate.clock import LATEST, Clock
from postdate.core.health.deadlines import CALL_DEADLINE, Deadlines, translate_store_errors
from postdate.core.receive.outcomes import StepOutcome
from postdate.core.recoverability import check_answers
from postdate.errors import DuplicateMessage
from postdate.messages import DelayedMessage, Headers, parse_timestamp
from postdate.ports import (
    HANDLED,
    AdministrableStore,
    ClaimingStore,
    Completion,
    MovingStore,
    NativeTransaction,
    Received,
    Receiver,
    Record,
    RecordKind,
    Settlement,
    Work,
)

log = logging.getLogger("postdate.repetitions")

AT_ONCE: Final = 500
"""Messages that end in one batch: with more, a commit costs each no less."""

IN_FLIGHT: Final = 2
"""Batches that are ended at a time: while one waits for the disk, the other is made ready."""

LARGEST_BATCH: Final = 4 * 1024 * 1024
"""Bytes that the messages of one batch send or store, at most; one message alone may do more."""

_RULES_DIFFER_BY: Final = timedelta(hours=12)
"""How far the due times of one wall time are apart at most, by the rules of before and by new ones.

New rules shift clocks by an hour or less, as a rule. A day later is another message.
"""

SettledMessage: TypeAlias = tuple[Received, StepOutcome, Exception | None]
"""A message, its outcome, and the error with which ending it failed."""

Report: TypeAlias = Callable[[Sequence[Completion]], None]
"""Called once for messages that ended together, with the ends that were carried out."""


class OnBatchSettled(Protocol):
    """Called when a batch is done with."""

    def __call__(self, *, has_acknowledged: bool) -> None: ...


OnSettled: TypeAlias = Callable[[Sequence[SettledMessage]], None]
"""Called with messages that need more work: ending them failed, or they have an ``afterwards``."""


class WatchedReceiver(Receiver):
    """A receiver whose calls have deadlines and whose errors are ours. Leaves stored messages out of ends.

    A commit that is never answered would keep its message, its place and, when the endpoint stops, all of it.
    """

    settles_in_batches: ClassVar[bool] = True
    """Whether messages may wait for their end, where the queue is read ahead."""

    def __init__(self, receiver: Receiver, clock: Clock, call_deadline: timedelta = CALL_DEADLINE) -> None:
        self._receiver = receiver
        self.deadlines = Deadlines.of_transport(receiver, clock, call_deadline)
        """Whoever runs the receiver watches them."""

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        """Has no deadline: it may wait for ever."""
        try:
            return await self._receiver.receive(limit, wait=wait)
        except BaseException as error:  # noqa: BLE001 - all of it is raised again
            self.deadlines.raise_translated(error)

    @override
    async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
        try:
            await self.deadlines.call(self._receiver.commit(received, now, completion))
        except DuplicateMessage as error:
            await skip_repetitions(completion.work, error)
            await self.commit(received, now, completion)

    @override
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Exception | None]:
        errors = await self.deadlines.call(self._receiver.settle(settlements))
        check_answers(self._receiver, len(settlements), errors)
        if not any(errors):
            return errors
        return [
            (await Receiver.settle(self, [settlement]))[0] if isinstance(error, DuplicateMessage) else error
            for settlement, error in zip(settlements, errors, strict=True)
        ]

    @override
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        await self.deadlines.call(self._receiver.roll_back(received, failed=failed))

    @override
    async def receive_by_id(self, message_id: str) -> Received | None:
        return await self._receiver.receive_by_id(message_id)

    @override
    def stop(self) -> None:
        self._receiver.stop()

    @override
    async def close(self) -> None:
        await self._receiver.close()


class Settler:
    """Ends the messages of one receiver.

    Start :meth:`run` as a task; :meth:`stop_when_empty` lets it end what there is.
    """

    def __init__(self, receiver: WatchedReceiver, clock: Clock, report: Report | None = None) -> None:
        self._receiver, self._clock, self._report = receiver, clock, report
        self._unsettled: deque[tuple[Received, StepOutcome]] = deque()
        self._wake, self._is_stopping = anyio.Event(), False
        self.count = 0
        """Messages that are not ended yet."""
        self.calls = 0
        """Batches that are being ended."""

    def add(self, received: Received, outcome: StepOutcome) -> None:
        """Have a message ended, soon; its outcome must have an end."""
        self._unsettled.append((received, outcome))
        self.count += 1
        if not self._wake.is_set():
            self._wake.set()

    def stop_when_empty(self) -> None:
        self._is_stopping = True
        self._wake.set()

    async def run(self, on_settled: OnSettled, on_batch_settled: OnBatchSettled) -> None:
        """End messages until finished. Cancelled, it still ends those that were handled."""
        async with anyio.create_task_group() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.start_soon(self._settle_until_stopped, on_settled, on_batch_settled)

    async def _settle_until_stopped(self, on_settled: OnSettled, on_batch_settled: OnBatchSettled) -> None:
        try:
            while not self._is_stopping or self._unsettled:
                if self._unsettled:
                    has_acknowledged = await self._settle_batch(self._next_batch(), on_settled)
                    on_batch_settled(has_acknowledged=has_acknowledged)
                else:
                    if self._wake.is_set():
                        self._wake = anyio.Event()
                    await self._wake.wait()
        finally:
            with anyio.CancelScope(shield=True):
                while self._unsettled:
                    await self._settle_batch(self._next_batch(), on_settled)

    def _next_batch(self) -> Sequence[tuple[Received, StepOutcome]]:
        batch, remaining_bytes = list[tuple[Received, StepOutcome]](), LARGEST_BATCH
        while self._unsettled and len(batch) < AT_ONCE:
            received, outcome = self._unsettled[0]
            completion = outcome.completion
            if completion is not None and (completion.outgoing or completion.work):
                stored_bytes = len(received.envelope.body) if completion.work else 0  # as far as that can be told
                remaining_bytes -= stored_bytes + sum(len(each.body) for each in completion.outgoing)
                if remaining_bytes < 0 and batch:
                    break
            batch.append(self._unsettled.popleft())
        return batch

    async def _settle_batch(self, batch: Sequence[tuple[Received, StepOutcome]], on_settled: OnSettled) -> bool:
        """End a batch; return whether any of its messages has ended as it was to."""
        now = self._clock.now()
        settlements = [Settlement(received, now, outcome.completion or HANDLED) for received, outcome in batch]
        errors: Sequence[Exception | None] = ()
        self.calls += 1
        try:
            with anyio.CancelScope(shield=True):
                errors = await self._receiver.settle(settlements)
        except Exception as error:  # noqa: BLE001 - told to each message, which deals with it
            errors = [error] * len(batch)
        finally:
            self.calls -= 1
            self.count -= len(batch)
        settled_messages = [
            (received, outcome, error)
            for (received, outcome), error in zip(batch, errors, strict=True)
            if error is not None or outcome.on_completed
        ]
        if self._report is not None:
            self._report(
                [settlement.completion for settlement, error in zip(settlements, errors, strict=True) if error is None]
            )
        if settled_messages:
            on_settled(settled_messages)
        return not all(errors)


async def is_stored(store: ClaimingStore, message: DelayedMessage) -> bool:
    """Return whether a store has, or had, this message; ``False``: the id is free, or was that of one that failed.

    A message that waits is compared by its content, and not by its due time, as a repeated send has another one. Of one
    that has left there are records only, with destination and due time; by other rules of its zone, a message that
    follows one has another due time. Of a store without records and queries, the id decides.

    A message with the header :attr:`Headers.MAY_REPEAT_SINCE` may be a repetition of any that was scheduled from then
    on: its own headers may be new ones, and of one that has left the destination alone decides.

    Raises:
        DuplicateMessage: it has, or had, another message under the id.
        InvalidTimestamp: that header is malformed.
    """
    if not isinstance(store, AdministrableStore):
        return True
    with translate_store_errors(store):
        pending = await store.get(message.message_id)
        records = await store.history(message.message_id) if pending is None else ()
    if pending is None and (not records or records[-1].kind is RecordKind.FAILED):
        return False
    may_repeat = Headers.MAY_REPEAT_SINCE in message.headers
    since = parse_timestamp(message.headers[Headers.MAY_REPEAT_SINCE]) if may_repeat else LATEST
    if pending is not None:
        is_same = _content(pending, may_repeat=may_repeat) == _content(message, may_repeat=may_repeat)
    else:
        is_same = any(
            _has_due_time(each, message) or (each.kind is RecordKind.SCHEDULED and each.at >= since)
            for each in records
            if each.destination == message.destination
        )
    _check_is_same(message, is_same=is_same)
    log.debug("message %s, due %s, is not stored: it was before, and is unchanged", message.message_id, message.due)
    return True


def _has_due_time(record: Record, message: DelayedMessage) -> bool:
    if record.due is None or Headers.WALL_TIME not in message.headers:
        return record.due == message.due
    return abs(record.due - message.due) <= _RULES_DIFFER_BY


_TRACE_HEADERS: Final = frozenset({Headers.TRACE_PARENT, "tracestate", "baggage"})
"""A message that its handler sends a second time has other ones."""


def _content(message: DelayedMessage, *, may_repeat: bool = False) -> object:
    skipped_prefixes = "" if may_repeat else ("NServiceBus.", "Postdate.")
    own = {
        name: text
        for name, text in message.headers.items()
        if name not in _TRACE_HEADERS and not name.startswith(skipped_prefixes)
    }
    return message.destination, message.body, message.headers.get(Headers.ENCLOSED_MESSAGE_TYPES), own


def strip_repeat_header(message: DelayedMessage) -> DelayedMessage:
    """Return a message without the header that only :func:`is_stored` reads."""
    if Headers.MAY_REPEAT_SINCE not in message.headers:
        return message
    return replace(
        message, headers={name: text for name, text in message.headers.items() if name != Headers.MAY_REPEAT_SINCE}
    )


def _check_is_same(message: DelayedMessage, *, is_same: bool) -> None:
    if is_same:
        return
    raise DuplicateMessage(
        f"another message was stored under the id {message.message_id!r} before and is unchanged; give this one its own"
    )


class RepeatableStoring:
    """Work that stores messages in a transaction of the queues, and can leave out those that are stored already."""

    def __init__(self, store: MovingStore, messages: Sequence[DelayedMessage], now: datetime) -> None:
        self._store, self._messages, self._now = store, messages, now
        self._work = self._storing_work(messages)

    def __call__(self, transaction: NativeTransaction) -> None:
        self._work(transaction)

    async def skip_stored(self) -> bool:
        """Leave out messages that are stored already; return whether there were any."""
        unique_messages: dict[str, DelayedMessage] = {}
        for each in self._messages:
            _check_is_same(each, is_same=_content(unique_messages.setdefault(each.message_id, each)) == _content(each))
        missing = [each for each in unique_messages.values() if not await is_stored(self._store, each)]
        self._messages, previous_count = missing, len(self._messages)
        self._work = self._storing_work(missing)
        return len(missing) < previous_count

    def _storing_work(self, messages: Sequence[DelayedMessage]) -> Work:
        return self._store.storing_work([strip_repeat_header(each) for each in messages], self._now)


async def skip_repetitions(work: Sequence[Work], error: DuplicateMessage) -> None:
    """Leave stored messages out of work that was refused as a whole, for ``error``; raise that if there are none."""
    if not any([await each.skip_stored() for each in work if isinstance(each, RepeatableStoring)]):
        raise error
