"""One received message from its queue to its handlers, and what they send from there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final

import anyio
from typing_extensions import override

from postdate.clock import Clock
from postdate.core.failure import Allowed, Way
from postdate.core.outages import Suspects
from postdate.core.receive.outcomes import BACK, Failed, Recovery, StepOutcome
from postdate.core.receive.watching import WatchedReceiver
from postdate.core.repetitions import leave_out_repetitions
from postdate.endpoint.audit import Audit
from postdate.endpoint.cancelling import cancelled_task, cancels_itself, is_being_cancelled
from postdate.endpoint.context import BusinessTransaction, HandlerContext
from postdate.endpoint.endings import MessageEndings
from postdate.endpoint.handlers import Handlers
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.saga_handling import OwnStoreUnreachable, calling_own_store
from postdate.errors import (
    DuplicateMessage,
    HandlingInterrupted,
    InvalidTimestamp,
    PostdateError,
    SagaConflict,
    TransportUnreachable,
)
from postdate.messages import Envelope
from postdate.ports import HANDLED, End, Received, Receiver, RecordKind, TransactionMode, Work

log = logging.getLogger("postdate.endpoint")

RESTARTS_BORNE: Final = 5
"""A message may come back so often without an answer before its policy is asked: processes and brokers are restarted,
and the one that stands first in its queue comes back to it from each process that is stopped meanwhile."""


class TakenReceiver(WatchedReceiver):
    """In transaction mode ``none`` a message is off its queue before it is handled: its end only sends.

    One by one: a process that is killed would lose what waits for a batch.
    """

    ends_in_batches = False

    def __init__(self, receiver: Receiver, clock: Clock, send: Callable[[End], Awaitable[None]]) -> None:
        super().__init__(receiver, clock)
        self.take_off, self._send = super().commit, send

    @override
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        await self._send(end)


@dataclass(slots=True, kw_only=True)
class PolicyRecovery(Recovery):
    """The recovery of handlers: as the policy of the endpoint decides. Source: specification 5; row 111."""

    endings: MessageEndings

    @override
    def decided(self, received: Received, outcome: StepOutcome | None, error: Exception) -> StepOutcome:
        end = self.endings.end_after_failure(received, error)
        if end is None and (received.is_last or self.allowed.is_taken):
            end = self.endings.to_error(received, error)
        if end is None:
            return BACK
        self.forget(received.envelope.message_id)
        return StepOutcome(end, self, failed=Failed(error, Way.DECIDED))

    @override
    def copied(self, received: Received, failed: Failed, *, brief: bool) -> StepOutcome:
        end = self.endings.to_error(received, failed.error, brief=brief)
        return StepOutcome(end, self, failed=failed._replace(way=Way.BRIEF if brief else Way.FULL))

    @override
    def way(self, received: Received, failed: Failed | None, error: PostdateError) -> Way:
        if self.allowed.is_taken and failed is not None and failed.way is Way.BRIEF:
            log.error("message %s is lost: it is off its queue, and no copy can be sent", received.envelope.message_id)
            return Way.BACK
        return Recovery.way(self, received, failed, error)


class Handling:
    """The step of an endpoint's message pump: one received message to its handlers, and what they send from there."""

    def __init__(
        self,
        outgoing: OutgoingMessages,
        endings: MessageEndings,
        handlers: Handlers,
        audit: Audit | None,
        receiver: Receiver,
    ) -> None:
        self.outgoing, self.endings, self.handlers, self.audit = outgoing, endings, handlers, audit
        is_taken = outgoing.mode is TransactionMode.NONE
        self._taking = TakenReceiver(receiver, outgoing.clock, self.send) if is_taken else None
        self.receiver = self._taking or WatchedReceiver(receiver, outgoing.clock)
        """Ends messages as the transaction mode says."""
        self._asking = Suspects()
        # Asked anew, the step would take the message off its queue once more: what is taken has its policy decide.
        allowed = Allowed(anew=() if is_taken else (SagaConflict,), is_taken=is_taken)
        self._recovery = PolicyRecovery(allowed=allowed, endings=endings)
        self.leaving = PolicyRecovery(allowed=allowed, endings=endings, suspects=Suspects())
        """Of messages whose ends send or store something."""

    async def handle(self, received: Received) -> StepOutcome:
        unhandled = self.unhandled(received)
        if self._taking is not None:
            discarded = unhandled.end if unhandled is not None and unhandled.failed is None else None
            await self._taking.take_off(received, self.outgoing.clock.now(), discarded or HANDLED)
        return unhandled or await self._handle(received)

    def unhandled(self, received: Received) -> StepOutcome | None:
        """Return the outcome of a message that has expired, or came back unanswered too often; ``None``: handle it."""
        try:
            reason = self.endings.discard_reason(received)
        except InvalidTimestamp as error:
            return self.recovered(received, error)
        if reason is not None:
            return StepOutcome(self.endings.discarded(received, reason))
        is_borne = received.unanswered <= RESTARTS_BORNE and not received.is_last
        if is_borne or self.outgoing.mode is TransactionMode.NONE:  # in which it does not come back
            return None
        times, limit = received.unanswered or "many", "; its queue would drop it soon" if received.is_last else ""
        error = HandlingInterrupted(
            f"it came back {times} times without an answer: the process that handled it ended, lost its connection, or "
            f"took too long and lost its claim{limit}; see why, then let it be handled again: postdate errors return"
        )
        outcome = self.recovered(received._replace(failures=max(0, received.failures - 1)), error)
        return None if outcome is BACK else outcome

    async def _handle(self, received: Received) -> StepOutcome:
        """Handle a message. An outage of the store of sagas is raised: the message is not to blame."""
        context = HandlerContext(self.outgoing, received)
        try:
            await self._call(received, context)
            end = self.outgoing.end_of(context.outgoing, RecordKind.HANDLED, also=context.work)
        except SagaConflict as error:  # another process was faster: all is undone, and done again on its state
            log.debug("message %s is handled again: %s", received.envelope.message_id, error)
            return StepOutcome(None, self._recovery, failed=Failed(error))
        except OwnStoreUnreachable:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failure of its message
            return self.recovered(received, error)
        except anyio.get_cancelled_exc_class() as error:
            if is_being_cancelled() and not cancels_itself(received):
                raise
            # The handler awaited something that others cancelled, and let that out: it says nothing of this task.
            return self.recovered(received, RuntimeError(f"the handler ended by {type(error).__name__}"))
        if not (end.outgoing or end.work):
            return StepOutcome(end, self._recovery, context.afterwards)
        if self.outgoing.mode is TransactionMode.RECEIVE_ONLY and end.outgoing:
            # Sends are not undone when taking the message off its queue fails (specification 6). Storing is: stored
            # again after it has left, a delayed message would look like another one under its id.
            try:
                end = await self._send_apart(end)
            except PostdateError as error:
                return StepOutcome(None, self.leaving, failed=Failed(error))
        if self.leaving.suspects:
            context.afterwards.append(partial(self.leaving.ended_well, received.envelope.message_id))
        return StepOutcome(end, self.leaving, context.afterwards)

    def recovered(self, received: Received, error: Exception) -> StepOutcome:
        return self.leaving.decided(received, None, error)

    # --- what handling consists of ------------------------------------------------------------------------------------

    async def call(self, received: Received, business: BusinessTransaction) -> HandlerContext:
        """Call the handlers in a transaction of the outbox; return their context, with the messages they sent."""
        context = HandlerContext(self.outgoing, received, business)
        await self._call(received, context)
        for storing in self.outgoing.storing(context.named, self.outgoing.clock.now()):
            # After the commit, one other message under a used id would keep all of them back.
            with calling_own_store(self._asking, received.envelope.message_id):
                await storing.leave_out()
        return context

    async def _call(self, received: Received, context: HandlerContext) -> None:
        started = self.outgoing.clock.now() if self.audit is not None else None
        try:
            await self.handlers.call(received, context)
        finally:
            if cancelled_task() is not None:  # by its handler, perhaps, which ended before this was raised
                await asyncio.sleep(0)
        context.end()
        if self.audit is not None and started is not None:
            now = self.outgoing.clock.now()
            context.outgoing.append(self.audit.copy(received.envelope, started, now, self.endings.host))

    async def send(self, end: End) -> None:
        """Send and store outside of any receive transaction, together where the queues can; leave out repetitions."""
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
