"""The outbox of an endpoint: each message is handled once, however often it is received, and its sends are never lost.

Phase 1 commits business data, the id of the message, and the messages that its handlers sent, in one transaction of the
application's database. Phase 2 sends these messages, marks them as sent, and acknowledges the handled message. An
interrupted phase 2 goes on with the same ids when the message is received again. If the handlers sent nothing and began
no transaction, the transaction that acknowledges the message records it, if the queue is in the same database.
Source: ADR 0017; docs/specification-rows.md, row 114.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

import anyio

from postdate import ports
from postdate.clock import Clock, later
from postdate.core.health.deadlines import Deadlines, translate_store_errors
from postdate.core.health.message_memory import MessageMemory
from postdate.core.receive.outcomes import OnCompleted, StepFailure, StepOutcome
from postdate.core.recoverability import MOST_OWN_FAILURES, is_outage
from postdate.core.simple_store import sharing_store
from postdate.endpoint.handler_context import BusinessTransaction
from postdate.endpoint.handling import Handling, failure_of
from postdate.endpoint.saga_handling import translate_own_store_errors
from postdate.errors import ConfigurationError, PostdateError, StoreUnavailable, UnsupportedTransactionMode
from postdate.messages import Envelope, Headers
from postdate.runtime.bounded import Bounded
from postdate.runtime.cancellation import is_cancelled
from postdate.runtime.resource import resource_of

log = logging.getLogger("postdate.outbox")

_MOST_PRELOADED: Final = 2_000
"""The largest number of records that are remembered by :meth:`OutboxHandling.preload`."""

CLEAN_UP_BATCH: Final = 1_000
"""The number of records removed in one transaction. It takes milliseconds, so other transactions hardly wait for it."""

LONGEST_RETENTION: Final = timedelta(days=36_500)
"""The longest retention. It is short enough to be subtracted from any current time."""

LONGEST_PAUSE: Final = timedelta(days=1)
"""The longest pause between two removals of old records."""

_HANDLED_BEFORE: Final = "handled before, as the outbox knows: its handlers were not called"


@dataclass(frozen=True, slots=True)
class Outbox:
    """The outbox of an endpoint: each message is handled once, although queues deliver at least once.

    Args:
        store: store of the outbox, in the database of the application, so that one commit covers its data, too.
        retention: how long a handled message is remembered after its messages were sent; above zero, at most 36,500
            days. It must be longer than the time in which a duplicate can arrive, including retries, delays, and
            outages of the queues.
        clean_up_every: interval at which older records are removed; above zero, at most a day.

    Raises:
        ConfigurationError: a span is out of these bounds, or ``store`` is no outbox store.
    """

    store: ports.OutboxStore
    retention: timedelta = timedelta(days=7)
    clean_up_every: timedelta = timedelta(minutes=1)

    def __post_init__(self) -> None:
        _check_span("retention", self.retention, LONGEST_RETENTION)
        _check_span("clean_up_every", self.clean_up_every, LONGEST_PAUSE)
        if not isinstance(self.store, ports.OutboxStore):  # pyright: ignore[reportUnnecessaryIsInstance] - callers without types
            raise ConfigurationError(
                f"an outbox needs a store of outboxes, SqliteOutbox or PostgresOutbox, not {type(self.store).__name__}"
            )


def _check_span(setting: str, span: object, longest: timedelta) -> None:
    if not isinstance(span, timedelta):
        raise ConfigurationError(f"{setting} must be a timedelta, not {type(span).__name__} {span!r}")
    if span <= timedelta(0):
        raise ConfigurationError(f"{setting} must be above zero, not {span}")
    if span > longest:
        raise ConfigurationError(f"{setting} must be at most {longest.days:,} day(s), not {span}")


def check_outbox(chosen_mode: object, mode: ports.TransactionMode, *, send_only: bool) -> None:
    """Raise an error for an outbox that cannot keep its promise.

    The endpoint must have the mode ``receive_only``, set explicitly. Stronger modes are not needed with an outbox, and
    a default mode would change when the queues change.
    """
    if send_only:
        raise ConfigurationError("a send-only endpoint handles nothing, so it has no outbox: leave one of them out")
    if chosen_mode is None or mode is not ports.TransactionMode.RECEIVE_ONLY:
        mode_text = "none is given" if chosen_mode is None else f"not {mode.value!r}"
        raise UnsupportedTransactionMode(
            f"an outbox needs transaction_mode='receive_only', explicitly ({mode_text}): the messages that a handler "
            f"sends "
            f"are sent after its commit, which no other mode guarantees"
        )


class OutboxHandling:
    """The step of the message pump of an endpoint with an outbox.

    While the database of the outbox, of sagas or of delayed messages is out of reach, messages return to their queue
    after a pause, without a counted failure. The same holds for a handler whose own statement fails in such an outage,
    unless only its message fails so repeatedly. Any other error is a failure of its message.
    """

    def __init__(self, outbox: Outbox, handling: Handling) -> None:
        self._store, self._handling, self._outgoing = outbox.store, handling, handling.outgoing
        # A message that was handled and committed does not expire any more: its messages must still be sent.
        completions = replace(handling.completions, ignore_time_to_be_received=True)
        self._send_recovery = replace(handling.send_recovery, completions=completions)
        queues = self._outgoing.transport.capabilities.database
        self._shares_database = sharing_store(self._store, self._store.database, queues) is not None
        self._preloaded = Bounded[str, tuple[Envelope, ports.OutboxRecord | None]](_MOST_PRELOADED)
        """Records that :meth:`preload` has found, by message id."""
        self._commit_memory = MessageMemory()
        """The memory of commits. Commits write to another table than later marks, and can fail for other reasons."""

    async def handle(self, received: ports.Received) -> StepOutcome:
        """Handle a message, or finish an earlier attempt at it."""
        id_, record = message_id_of(received), None
        on_completed: list[OnCompleted] = []
        try:
            envelope, record = self._preloaded.pop(id_, (None, None))
            if envelope is not received.envelope:  # another copy, or it was received alone
                record = await self._find(id_)
            detail = _HANDLED_BEFORE
            if record is not None:
                state = "nothing is left" if record.is_dispatched else "it goes on"
                log.info("message %s was handled before; %s", id_, state)
                on_completed += self._outgoing.zone_callbacks(record.operations)
            else:
                record_or_outcome = await self._handle_first_time(received, on_completed)
                if isinstance(record_or_outcome, StepOutcome):
                    return record_or_outcome
                record, detail = record_or_outcome, ""
            if not record.is_dispatched:
                await self._handling.send(self._outgoing.completion_of(record.operations, ports.RecordKind.HANDLED))
                with translate_store_errors(self._store):
                    await self._store.mark_dispatched(self._outgoing.endpoint, id_, self._outgoing.clock.now())
                await self._send_recovery.report_success(received.envelope.message_id)
        except PostdateError as error:  # messages that cannot be sent stay in the outbox
            recovery = self._handling.send_recovery if record is None else self._send_recovery
            return StepOutcome(None, recovery, failure=StepFailure(error))
        finally:
            self._handling.handlers.forget(received.envelope)
        return StepOutcome(ports.Completion(ports.RecordKind.HANDLED, detail), self._send_recovery, on_completed)

    async def preload(self, received_messages: Sequence[ports.Received]) -> None:
        """Load the records of messages that were received together, in one query. If it fails, each loads its own."""
        try:
            with translate_store_errors(self._store):
                records = await self._store.find_all(
                    self._outgoing.endpoint, [message_id_of(each) for each in received_messages]
                )
        except PostdateError:
            return  # sagas are in the same database
        for received, record in zip(received_messages, records or (), strict=False):
            self._preloaded[message_id_of(received)] = received.envelope, record
        await self._handling.handlers.preload(received_messages)

    async def _find(self, id_: str) -> ports.OutboxRecord | None:
        with translate_store_errors(self._store):
            return await self._store.find(self._outgoing.endpoint, id_)

    async def _handle_first_time(
        self, received: ports.Received, on_completed: list[OnCompleted]
    ) -> ports.OutboxRecord | StepOutcome:
        """Handle a message; return its record, or its outcome if it was not handled.

        Callbacks of its handlers are added to ``on_completed``. Raises :class:`SagaConflict` if the message must be
        handled again.
        """
        outcome = self._handling.outcome_without_handling(received)
        if outcome is not None:
            return outcome
        transaction = self._store.transaction(self._outgoing.endpoint, message_id_of(received))
        try:
            return await self._handle_in_transaction(received, transaction, on_completed)
        except (Exception, anyio.get_cancelled_exc_class()) as error:  # noqa: BLE001 - `failure_of` raises other errors again
            try:
                failure = failure_of(received, error)
            except BaseException:
                with anyio.CancelScope(shield=is_cancelled()):
                    await self._roll_back(transaction, error)
                raise
            has_begun = transaction.has_begun
            await self._roll_back(transaction, failure)
            outage = self._store.outage_of(failure) if has_begun else None
            if (
                outage is not None
                and self._commit_memory.report_failure(received.envelope.message_id) <= MOST_OWN_FAILURES
            ):
                raise outage from failure
            return self._handling.outcome_after_error(received, failure)

    async def _handle_in_transaction(
        self,
        received: ports.Received,
        transaction: ports.OutboxTransaction,
        on_completed: list[OnCompleted],
    ) -> ports.OutboxRecord | StepOutcome:
        business = BusinessTransaction(transaction, self._store, self._outgoing.transport.capabilities.database)
        context, now = await self._handling.call(received, business), self._outgoing.clock.now()
        if self._shares_database and not (transaction.has_begun or context.outgoing or context.on_completed):
            recording_work = self._store.recording_work(
                self._outgoing.endpoint, message_id_of(received), now, context.work
            )
            if recording_work is not None:
                await transaction.roll_back()  # so that a task that the handler left behind cannot begin it
                return self._handling.outcome_after_handling(
                    received, ports.Completion(ports.RecordKind.HANDLED, work=[recording_work])
                )
        with translate_own_store_errors(self._commit_memory, received.envelope.message_id):
            is_first = await transaction.commit(context.outgoing, now, context.work)
        if is_first:
            on_completed.extend(context.on_completed)
            return ports.OutboxRecord(context.outgoing, is_dispatched=not context.outgoing)
        log.info("message %s was handled by somebody else meanwhile", message_id_of(received))
        record = await self._find(message_id_of(received))
        if record is None:  # removed just now: the retention is far too short, or clocks differ
            raise StoreUnavailable(f"the outbox lost message {message_id_of(received)} while it was being handled")
        return record

    async def _roll_back(self, transaction: ports.OutboxTransaction, failure: BaseException) -> None:
        """Roll back the transaction of a handler. Raise an outage of the database, as no message has caused it."""
        try:
            await transaction.roll_back()
        except PostdateError as error:
            if is_outage(error) or not isinstance(failure, Exception):
                raise error from failure
            log.warning("a transaction could not be rolled back: %s", error)


class OutboxCleanUp:
    """The loop that removes records that are older than the retention, in batches."""

    def __init__(self, outbox: Outbox, endpoint: str, clock: Clock) -> None:
        self._outbox, self._endpoint, self._clock = outbox, endpoint, clock
        self._stop, self._deadlines = anyio.Event(), Deadlines.of_store(outbox.store, clock)
        self._outage = resource_of(outbox.store).calls(
            "cannot remove old messages of the outbox", log, logging.WARNING, is_rare=True
        )

    async def run(self) -> None:
        while not self._stop.is_set():
            started_at = self._clock.monotonic()
            try:
                await self._remove_old_records(later(self._clock.now(), -self._outbox.retention))
            except PostdateError as error:
                self._outage.report_failure(error, started_at)
            else:
                self._outage.report_success(started_at)
            duration = timedelta(seconds=self._clock.monotonic() - started_at)
            await self._clock.wait_for(self._stop, self._outbox.clean_up_every - duration)

    async def _remove_old_records(self, before: datetime) -> None:
        removed_count = CLEAN_UP_BATCH
        while removed_count == CLEAN_UP_BATCH and not self._stop.is_set():
            removed_count = await self._deadlines.call_in_task(
                lambda: self._outbox.store.remove_dispatched(self._endpoint, before, CLEAN_UP_BATCH)
            )

    def stop(self) -> None:
        self._stop.set()
        self._deadlines.shorten()


def message_id_of(received: ports.Received) -> str:
    """Return the id of a message, which all its copies have, and not the id of one delivery."""
    return received.envelope.headers.get(Headers.MESSAGE_ID) or received.envelope.message_id
