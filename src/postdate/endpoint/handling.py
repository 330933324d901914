"""One received message from its queue to its handlers, and what they send from there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import anyio

from postdate.core.outages import BORNE, Suspects
from postdate.core.receive.settlements import BACK, Settlement
from postdate.core.receive.watching import WatchedReceiver
from postdate.core.recoverability import text_of
from postdate.core.repetitions import leave_out_repetitions
from postdate.endpoint.audit import Audit
from postdate.endpoint.cancelling import cancelled_task, is_being_cancelled
from postdate.endpoint.context import BusinessTransaction, HandlerContext
from postdate.endpoint.endings import MessageEndings
from postdate.endpoint.handlers import Handlers
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.retries import POLICY_FAILURES, PolicyFailed, cancels_itself, is_lasting
from postdate.endpoint.saga_handling import CONFLICTS_BORNE, OwnStoreUnreachable, calling_own_store
from postdate.errors import (
    DuplicateMessage,
    HandlingInterrupted,
    InvalidTimestamp,
    MessageError,
    PostdateError,
    QueueNotFound,
    SagaConflict,
    TransportUnreachable,
)
from postdate.messages import Envelope
from postdate.ports import HANDLED, End, Received, RecordKind, TransactionMode, Work

log = logging.getLogger("postdate.endpoint")

RESTARTS_BORNE: Final = 5
"""A message may come back so often without an answer before its policy is asked: processes and brokers are restarted,
and the one that stands first in its queue comes back to it from each process that is stopped meanwhile."""


@dataclass(frozen=True, slots=True)
class Handling:
    """Handles one received message completely; the handler of the endpoint's message pump."""

    outgoing: OutgoingMessages
    endings: MessageEndings
    handlers: Handlers
    audit: Audit | None
    receiver: WatchedReceiver
    suspects: Suspects = field(default_factory=Suspects)
    """Of ends with which something is sent or stored."""
    asking: Suspects = field(default_factory=Suspects)
    """Of questions to the store of delayed messages."""

    async def handle(self, received: Received) -> Settlement | None:
        """See :data:`postdate.core.receive.settlements.Step`."""
        unhandled = self.unhandled(received)
        if self.outgoing.mode is not TransactionMode.NONE:
            return unhandled or await self._handle(received)
        discarded = unhandled.end if unhandled is not None and unhandled.refused is None else None
        await self.receiver.commit(received, self.outgoing.clock.now(), discarded or HANDLED)
        await self._end_taken(received, unhandled or await self._handle(received))
        return None

    def unhandled(self, received: Received) -> Settlement | None:
        """Return how a message ends without being handled; ``None``: go on.

        That is what has expired, and what came back without an answer until the policy says that it has failed.
        """
        try:
            reason = self.endings.discard_reason(received)
        except InvalidTimestamp as error:
            return self.recovered(received, error)
        if reason is not None:
            return Settlement(self.endings.discarded(received, reason))
        is_borne = received.unanswered <= RESTARTS_BORNE and not received.is_last
        if is_borne or self.outgoing.mode is TransactionMode.NONE:  # in which it does not come back
            return None
        times, limit = received.unanswered or "many", "; its queue would drop it soon" if received.is_last else ""
        error = HandlingInterrupted(
            f"it came back {times} times without an answer: the process that handled it ended, lost its connection, or "
            f"took too long and lost its claim{limit}; see why, then let it be handled again: postdate errors return"
        )
        settlement = self.recovered(received._replace(failures=max(0, received.failures - 1)), error)
        return None if settlement is BACK else settlement

    async def _handle(self, received: Received, conflicts: int = 0) -> Settlement:
        """Handle a message after so many conflicts of its sagas, of which each left nothing of it.

        Somebody else was faster then: it is decided again, on what they left. An outage of the store of sagas is
        raised: the message is not to blame.
        """
        while True:
            context = HandlerContext(self.outgoing, received)
            try:
                await self._call(received, context)
                end = self.outgoing.end_of(context.outgoing, RecordKind.HANDLED, also=context.work)
                break
            except SagaConflict as error:
                conflicts += 1
                log.debug("message %s is handled again: %s", received.envelope.message_id, error)
                if conflicts >= CONFLICTS_BORNE:
                    return self.recovered(received, error)
            except OwnStoreUnreachable:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failure of its message
                return self.recovered(received, error)
            except anyio.get_cancelled_exc_class() as error:
                if is_being_cancelled() and not cancels_itself(received):
                    raise
                # The handler awaited something that others cancelled, and let that out: it says nothing of this task.
                return self.recovered(received, RuntimeError(f"the handler ended by {type(error).__name__}"))
        leaves = bool(end.outgoing or end.work)
        refused = partial(self._refused, conflicts=conflicts, leaves=leaves) if conflicts or leaves else self._refused
        if self.outgoing.mode is TransactionMode.RECEIVE_ONLY and end.outgoing:
            # Not rolled back when taking the message off the queue fails afterwards (specification 6). What is stored
            # in the database of the queues is: stored again when it has left, it looks like another under its id.
            try:
                end = await self._send_apart(end)
            except PostdateError as error:
                return self._not_sent(received, error)
        if leaves and self.suspects:
            context.afterwards.append(partial(self._ended_well, received.envelope.message_id))
        return Settlement(end, refused, context.afterwards)

    async def _ended_well(self, message_id: str) -> None:
        self.suspects.worked(message_id)

    async def _refused(
        self, received: Received, error: PostdateError, conflicts: int = 0, *, leaves: bool = False
    ) -> Settlement:
        """Return what becomes of a handled message that cannot end as it should."""
        if not isinstance(error, SagaConflict):
            return self._not_sent(received, error, leaves=leaves)
        if conflicts + 1 < CONFLICTS_BORNE:
            return await self._handle(received, conflicts + 1)
        return self.recovered(received, error)

    def _not_sent(self, received: Received, error: PostdateError, *, leaves: bool = True) -> Settlement:
        """Return what becomes of a message when what its handlers sent cannot be; raise what is not its fault."""
        of_message = isinstance(error, (MessageError, QueueNotFound, DuplicateMessage))
        of_message = of_message or (leaves and self.suspects.met(received.envelope.message_id, error) > BORNE)
        if not of_message and self.outgoing.mode is not TransactionMode.NONE:
            raise error
        return self.recovered(received, error)

    # --- in transaction mode ``none`` ---------------------------------------------------------------------------------

    async def _end_taken(self, received: Received, settlement: Settlement | None) -> None:
        """Do what was decided about a message that is off its queue: there is no second try (specification 6)."""
        while settlement is not None and settlement.end is not None and settlement.refused is not None:
            try:
                await self.send_first(settlement.end)
            except PostdateError as error:
                settlement = await settlement.refused(received, error)
            else:
                for each in settlement.afterwards:
                    await each()
                return

    # --- what handling consists of ------------------------------------------------------------------------------------

    async def call(self, received: Received, business: BusinessTransaction) -> HandlerContext:
        """Call the handlers in a transaction of the outbox; return what they were given, with what they sent."""
        context = HandlerContext(self.outgoing, received, business)
        await self._call(received, context)
        for storing in self.outgoing.storing(context.named, self.outgoing.clock.now()):
            # After the commit, one other message under a used id would keep all of them back.
            with calling_own_store(self.asking, received.envelope.message_id):
                await storing.leave_out()
        return context

    async def _call(self, received: Received, context: HandlerContext) -> None:
        """Call the handlers; with what they send leaves the copy for the audit."""
        started = self.outgoing.clock.now() if self.audit is not None else None
        try:
            await self.handlers.call(received, context)
        finally:
            if cancelled_task() is not None:  # by its handler, perhaps, which ended before that was raised
                await asyncio.sleep(0)
        context.end()
        if self.audit is not None and started is not None:
            now = self.outgoing.clock.now()
            context.outgoing.append(self.audit.copy(received.envelope, started, now, self.endings.host))

    async def send_first(self, end: End) -> None:
        """Send and store outside of any receive transaction: with each other, where the queues can have that.

        What is stored already is left out; see :func:`~postdate.core.repetitions.is_stored`.
        """
        rest = await self._send_apart(end)
        await self._send(rest.outgoing, rest.work)

    async def _send_apart(self, end: End) -> End:
        """Send what need not, or cannot, leave in the transaction in which something is stored; return the rest."""
        can = self.outgoing.transport.capabilities
        expiring = any(envelope.time_to_be_received is not None for envelope in end.outgoing)
        if end.work and (can.time_to_be_received_in_transactions or not expiring):
            return end
        await self._send(end.outgoing, ())
        return replace(end, outgoing=())

    async def _send(self, envelopes: Sequence[Envelope], work: Sequence[Work]) -> None:
        if not envelopes and not work:
            return
        transport = self.outgoing.transport
        sending = transport.send(envelopes, self.outgoing.clock.now(), work=work)
        try:
            errors = await self.receiver.watch.call(sending, transport, TransportUnreachable)
        except DuplicateMessage as error:
            await leave_out_repetitions(work, error)
            await self._send(envelopes, work)
            return
        for error in errors:
            if error is not None:
                raise error

    def recovered(self, received: Received, error: Exception) -> Settlement:
        """Return what the policy decides about a failed message.

        What cannot be carried out ends in the error queue of the endpoint (row 111): as an error copy like any other,
        and where that is too large, as one that says only what has failed.
        """
        end = self._decided(received, error)
        if end is None:
            return BACK
        self.suspects.forget(received.envelope.message_id)
        instead = (self.endings.to_error, self.endings.to_error_in_brief)
        return Settlement(end, partial(self._not_carried_out, error, instead))

    async def _not_carried_out(
        self,
        error: Exception,
        instead: Sequence[Callable[[Received, Exception], End]],
        received: Received,
        failure: PostdateError,
    ) -> Settlement:
        is_taken = self.outgoing.mode is TransactionMode.NONE
        if not instead or not (is_taken or is_lasting(failure)):
            if is_taken:
                id_ = received.envelope.message_id
                log.error("message %s is lost: it is off its queue, and no copy can be sent", id_)
            raise failure
        log.warning(
            "message %s goes to the error queue: what was decided after its failure cannot be carried out: %s",
            received.envelope.message_id,
            text_of(failure),
        )
        return Settlement(instead[0](received, error), partial(self._not_carried_out, error, instead[1:]))

    def _decided(self, received: Received, error: Exception) -> End | None:
        """Return how a message ends whose handling failed, or ``None`` when it goes back to its queue."""
        try:
            end = self.endings.end_after_failure(received, error)
        except PolicyFailed as failed:
            self.endings.critical_error(str(failed), failed.reason)
            end = self.endings.to_error(received, error) if received.failures >= POLICY_FAILURES else None
        if end is None and (received.is_last or self.outgoing.mode is TransactionMode.NONE):
            return self.endings.to_error(received, error)
        return end
