"""Settling: acknowledges received messages in batches. Source: ADR 0026.

The outcomes that come during one batch are the next batch. A delayed message that is stored together with an
acknowledgement may be in the store already: an earlier attempt stored it and could not acknowledge its message. This
module decides whether a stored message under the same id is this message or another one. Source: row 17.
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

from postdate import ports
from postdate.clock import LATEST, Clock
from postdate.core.health.deadlines import CALL_DEADLINE, Deadlines, translate_store_errors
from postdate.core.receive.outcomes import StepOutcome
from postdate.core.recoverability import check_answers
from postdate.errors import DuplicateMessage
from postdate.messages import DelayedMessage, Headers, parse_timestamp

log = logging.getLogger("postdate.repetitions")

AT_ONCE: Final = 500
"""The largest number of messages in one batch. In larger batches a commit costs each message no less."""

IN_FLIGHT: Final = 2
"""Batches that are settled at a time: while one waits for the disk, the next one is prepared."""

LARGEST_BATCH: Final = 4 * 1024 * 1024
"""The largest number of bytes that one batch sends or stores. A single message may exceed it."""

_RULES_DIFFER_BY: Final = timedelta(hours=12)
"""The largest difference between the due times of one wall time by old and new rules of its zone.

New rules usually shift clocks by an hour or less. A message that is due a day later is another message.
"""

SettledMessage: TypeAlias = tuple[ports.Received, StepOutcome, Exception | None]
"""A message, its outcome, and the error that settling it raised; ``None``: it was settled."""

Report: TypeAlias = Callable[[Sequence[ports.Completion]], None]
"""Called once for each batch, with the completions that were carried out."""


class OnBatchSettled(Protocol):
    """Called when a batch is finished, settled or not."""

    def __call__(self, *, has_acknowledged: bool) -> None: ...


OnSettled: TypeAlias = Callable[[Sequence[SettledMessage]], None]
"""Called with messages that need more work: settling them failed, or they have an ``on_completed``."""


class WatchedReceiver(ports.Receiver):
    """A receiver whose calls have deadlines, and whose errors are translated.

    A commit without an answer would occupy its message and its worker for ever, and keep the endpoint from stopping.
    Messages that are stored already are left out of the work of a completion.
    """

    settles_in_batches: ClassVar[bool] = True
    """Whether messages of a queue that is prefetched may wait to be settled in a batch."""

    def __init__(self, receiver: ports.Receiver, clock: Clock, call_deadline: timedelta = CALL_DEADLINE) -> None:
        self._receiver = receiver
        self.deadlines = Deadlines.of_transport(receiver, clock, call_deadline)
        """The deadlines of the calls. The pump that runs the receiver cancels overdue calls."""

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        """Receive messages, without a deadline: this may wait for ever."""
        try:
            return await self._receiver.receive(limit, wait=wait)
        except BaseException as error:  # noqa: BLE001 - all of it is raised again
            self.deadlines.raise_translated(error)

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        try:
            await self.deadlines.call(self._receiver.commit(received, now, completion))
        except DuplicateMessage as error:
            await skip_repetitions(completion.work, error)
            await self.commit(received, now, completion)

    @override
    async def settle(self, settlements: Sequence[ports.Settlement]) -> Sequence[Exception | None]:
        errors = await self.deadlines.call(self._receiver.settle(settlements))
        check_answers(self._receiver, len(settlements), errors)
        if not any(errors):
            return errors
        return [
            (await ports.Receiver.settle(self, [settlement]))[0] if isinstance(error, DuplicateMessage) else error
            for settlement, error in zip(settlements, errors, strict=True)
        ]

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        await self.deadlines.call(self._receiver.roll_back(received, failed=failed))

    @override
    async def receive_by_id(self, message_id: str) -> ports.Received | None:
        return await self._receiver.receive_by_id(message_id)

    @override
    def stop(self) -> None:
        self._receiver.stop()

    @override
    async def close(self) -> None:
        await self._receiver.close()


class Settler:
    """The settler of one receiver: acknowledges its messages in batches.

    Start :meth:`run` as a task. After :meth:`stop_when_empty` it settles the messages that it has, and returns.
    """

    def __init__(self, receiver: WatchedReceiver, clock: Clock, report: Report | None = None) -> None:
        self._receiver, self._clock, self._report = receiver, clock, report
        self._unsettled: deque[tuple[ports.Received, StepOutcome]] = deque()
        self._wake, self._is_stopping = anyio.Event(), False
        self.count = 0
        """The number of messages that are not settled yet."""
        self.calls = 0
        """The number of batches that are being settled."""

    def add(self, received: ports.Received, outcome: StepOutcome) -> None:
        """Add a message to settle soon. Its outcome must have a completion."""
        self._unsettled.append((received, outcome))
        self.count += 1
        if not self._wake.is_set():
            self._wake.set()

    def stop_when_empty(self) -> None:
        self._is_stopping = True
        self._wake.set()

    async def run(self, on_settled: OnSettled, on_batch_settled: OnBatchSettled) -> None:
        """Settle messages until stopped. When it is cancelled, it still settles the messages that were handled."""
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

    def _next_batch(self) -> Sequence[tuple[ports.Received, StepOutcome]]:
        batch, remaining_bytes = list[tuple[ports.Received, StepOutcome]](), LARGEST_BATCH
        while self._unsettled and len(batch) < AT_ONCE:
            received, outcome = self._unsettled[0]
            completion = outcome.completion
            if completion is not None and (completion.outgoing or completion.work):
                # An estimate: the size of the rows that the work stores is not known here.
                stored_bytes = len(received.envelope.body) if completion.work else 0
                remaining_bytes -= stored_bytes + sum(len(each.body) for each in completion.outgoing)
                if remaining_bytes < 0 and batch:
                    break
            batch.append(self._unsettled.popleft())
        return batch

    async def _settle_batch(self, batch: Sequence[tuple[ports.Received, StepOutcome]], on_settled: OnSettled) -> bool:
        """Settle a batch; return whether any of its messages was settled."""
        now = self._clock.now()
        settlements = [
            ports.Settlement(received, now, outcome.completion or ports.HANDLED) for received, outcome in batch
        ]
        errors: Sequence[Exception | None] = ()
        self.calls += 1
        try:
            with anyio.CancelScope(shield=True):
                errors = await self._receiver.settle(settlements)
        except Exception as error:  # noqa: BLE001 - it is reported for each message
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


async def is_stored(store: ports.ClaimingStore, message: DelayedMessage) -> bool:
    """Return whether a store has, or had, this message; ``False``: the id is unused, or its message has failed.

    A pending message is compared by its content. Its due time does not count, as a repeated send has another one. Of a
    message that is not pending any more, only records remain, with destination and due time. Its due time may differ
    by the rules of its zone, if it follows a wall time. In a store without records and queries, the id decides.

    A message with the header :attr:`Headers.MAY_REPEAT_SINCE` may repeat any message that was scheduled since that
    time. It may have new headers, and in records only the destination is compared.

    Raises:
        DuplicateMessage: the store has, or had, another message under the id.
        InvalidTimestamp: the header is malformed.
    """
    if not isinstance(store, ports.AdministrableStore):
        return True
    with translate_store_errors(store):
        pending = await store.get(message.message_id)
        records = await store.history(message.message_id) if pending is None else ()
    if pending is None and (not records or records[-1].kind is ports.RecordKind.FAILED):
        return False
    may_repeat = Headers.MAY_REPEAT_SINCE in message.headers
    since = parse_timestamp(message.headers[Headers.MAY_REPEAT_SINCE]) if may_repeat else LATEST
    if pending is not None:
        is_same = _content(pending, may_repeat=may_repeat) == _content(message, may_repeat=may_repeat)
    else:
        is_same = any(
            _has_due_time(each, message) or (each.kind is ports.RecordKind.SCHEDULED and each.at >= since)
            for each in records
            if each.destination == message.destination
        )
    _check_is_same(message, is_same=is_same)
    log.debug("message %s, due %s, is not stored: it was before, and is unchanged", message.message_id, message.due)
    return True


def _has_due_time(record: ports.Record, message: DelayedMessage) -> bool:
    if record.due is None or Headers.WALL_TIME not in message.headers:
        return record.due == message.due
    return abs(record.due - message.due) <= _RULES_DIFFER_BY


_TRACE_HEADERS: Final = frozenset({Headers.TRACE_PARENT, "tracestate", "baggage"})
"""These headers differ when a handler sends the same message a second time."""


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
    """Work that stores messages in a transaction of the queues, and can leave out messages that are stored already."""

    def __init__(self, store: ports.MovingStore, messages: Sequence[DelayedMessage], now: datetime) -> None:
        self._store, self._messages, self._now = store, messages, now
        self._work = self._storing_work(messages)

    def __call__(self, transaction: ports.NativeTransaction) -> None:
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

    def _storing_work(self, messages: Sequence[DelayedMessage]) -> ports.Work:
        return self._store.storing_work([strip_repeat_header(each) for each in messages], self._now)


async def skip_repetitions(work: Sequence[ports.Work], error: DuplicateMessage) -> None:
    """Leave stored messages out of work that was refused with ``error``; raise ``error`` if none is stored."""
    if not any([await each.skip_stored() for each in work if isinstance(each, RepeatableStoring)]):
        raise error
