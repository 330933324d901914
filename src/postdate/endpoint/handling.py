"""One received message from its queue to its handlers, and what they send from there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from postdate.core.receiving import WatchedReceiver
from postdate.core.recoverability import text_of
from postdate.endpoint.audit import Audit
from postdate.endpoint.cancelling import is_being_cancelled
from postdate.endpoint.context import HandlerContext
from postdate.endpoint.endings import MessageEndings
from postdate.endpoint.handlers import Handlers
from postdate.endpoint.outbox import BusinessTransaction, Handled
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.retries import POLICY_FAILURES, PolicyFailed, cancels_itself, is_lasting
from postdate.endpoint.saga_handling import CONFLICTS_BORNE, SagaStoreUnreachable
from postdate.errors import (
    InvalidTimestamp,
    MessageError,
    PostdateError,
    QueueNotFound,
    SagaConflict,
    TransportUnreachable,
)
from postdate.messages import DelayedMessage, Envelope
from postdate.ports import End, Received, RecordKind, TransactionMode, Work

log = logging.getLogger("postdate.endpoint")


@dataclass(frozen=True, slots=True)
class Handling:
    """Handles one received message completely; the handler of the endpoint's message pump."""

    outgoing: OutgoingMessages
    endings: MessageEndings
    handlers: Handlers
    audit: Audit | None
    receiver: WatchedReceiver

    async def handle(self, received: Received) -> None:
        """See :data:`postdate.core.pump.Handle`."""
        if self.outgoing.mode is TransactionMode.NONE and not await self._is_taken(received):
            return
        conflicts = 0
        while True:
            try:
                await self._handle_once(received)
            except SagaConflict as error:  # somebody else was first: decided again, on what they left
                conflicts += 1
                log.debug("message %s is handled again: %s", received.envelope.message_id, error)
                if conflicts < CONFLICTS_BORNE:
                    continue
                await self.recover(received, error)
            return

    async def _handle_once(self, received: Received) -> None:
        """Handle a message; raises :class:`SagaConflict` when nothing of that was kept and it is to be done again.

        An outage of the store of sagas is raised, too: the message is not to blame.
        """
        context = HandlerContext(self.outgoing, received)
        try:
            end = await self._end(received, context)
        except (SagaConflict, SagaStoreUnreachable):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failure of its message
            await self.recover(received, error)
            return
        except anyio.get_cancelled_exc_class() as error:
            if is_being_cancelled() and not cancels_itself(received):
                raise
            # The handler awaited something that others cancelled, and let that out: it says nothing about this task.
            await self.recover(received, RuntimeError(f"the handler ended by {type(error).__name__}"))
            return
        try:
            leaves_first = self.outgoing.mode in {TransactionMode.NONE, TransactionMode.RECEIVE_ONLY}
            if leaves_first and (end.outgoing or end.work):
                # Not rolled back when taking the message off the queue fails afterwards (specification 6).
                await self.send_first(end)
                end = End(end.record, end.detail)
            if self.outgoing.mode is not TransactionMode.NONE:
                await self.receiver.commit(received, self.outgoing.clock.now(), end)
        except PostdateError as error:  # what the handler sent cannot be sent
            of_message = isinstance(error, (MessageError, QueueNotFound))
            if not of_message and self.outgoing.mode is not TransactionMode.NONE:
                raise
            await self.recover(received, error)  # in mode none always: the message is off its queue
            return
        for each in context.afterwards:
            await each()

    async def _is_taken(self, received: Received) -> bool:
        """Take a message off its queue before it is handled; return whether it is to be."""
        try:
            reason = self.endings.discard_reason(received)
        except InvalidTimestamp as error:
            await self.receiver.commit(received, self.outgoing.clock.now(), End(RecordKind.HANDLED))
            await self.recover(received, error)
            return False
        end = End(RecordKind.HANDLED) if reason is None else self.endings.discarded(received, reason)
        await self.receiver.commit(received, self.outgoing.clock.now(), end)
        return reason is None

    async def _end(self, received: Received, context: HandlerContext) -> End:
        # Asked before of what is off its queue already: by now its time may be over, and it must be handled.
        reason = None if self.outgoing.mode is TransactionMode.NONE else self.endings.discard_reason(received)
        if reason is not None:
            return self.endings.discarded(received, reason)
        return self.outgoing.end_of(await self._outgoing(received, context), RecordKind.HANDLED, also=context.work)

    async def call(self, received: Received, business: BusinessTransaction) -> Handled:
        """Call the handlers, in a transaction of the outbox."""
        context = HandlerContext(self.outgoing, received, business)
        outgoing = await self._outgoing(received, context)
        return Handled(outgoing, context.work, context.afterwards)

    async def _outgoing(self, received: Received, context: HandlerContext) -> Sequence[Envelope | DelayedMessage]:
        """Call the handlers; return what they sent, with the copy for the audit."""
        started = self.outgoing.clock.now()
        await self.handlers.call(received, context)
        outgoing = context.end()
        if self.audit is not None:
            copy = self.audit.copy(received.envelope, started, self.outgoing.clock.now(), self.endings.host)
            outgoing = [*outgoing, copy]
        return outgoing

    async def send_first(self, end: End) -> None:
        """Send and store outside of any receive transaction: with each other, where the queues can have that."""
        can = self.outgoing.transport.capabilities
        expiring = any(envelope.time_to_be_received is not None for envelope in end.outgoing)
        if end.work and expiring and not can.time_to_be_received_in_transactions:
            await self._send(end.outgoing, ())
            await self._send((), end.work)
        else:
            await self._send(end.outgoing, end.work)

    async def _send(self, envelopes: Sequence[Envelope], work: Sequence[Work]) -> None:
        transport = self.outgoing.transport
        sending = transport.send(envelopes, self.outgoing.clock.now(), work=work)
        for error in await self.receiver.watch.call(sending, transport, TransportUnreachable):
            if error is not None:
                raise error

    async def recover(self, received: Received, error: Exception) -> None:
        """Carry out what the policy decides; in transaction mode ``none`` there is no second try (specification 6).

        What cannot be carried out ends in the error queue of the endpoint (row 111): as an error copy like any other,
        and where that is too large, as one that says only what has failed.
        """
        end = self._decided(received, error)
        if end is None:
            await self.receiver.roll_back(received)
            return
        for instead in (self.endings.to_error, self.endings.to_error_in_brief):
            try:
                await self._carry_out(received, end)
            except PostdateError as failure:
                if self.outgoing.mode is not TransactionMode.NONE and not is_lasting(failure):
                    raise
                log.warning(
                    "message %s goes to the error queue: what was decided after its failure cannot be carried out: %s",
                    received.envelope.message_id,
                    text_of(failure),
                )
                end = instead(received, error)
            else:
                return
        try:
            await self._carry_out(received, end)
        except PostdateError:
            if self.outgoing.mode is TransactionMode.NONE:
                id_ = received.envelope.message_id
                log.error("message %s is lost: it is off its queue, and no copy can be sent", id_)
            raise

    def _decided(self, received: Received, error: Exception) -> End | None:
        """Return how a message ends whose handling failed, or ``None`` when it goes back to its queue."""
        try:
            end = self.endings.end_after_failure(received, error)
        except PolicyFailed as failed:
            self.endings.critical_error(str(failed), failed.reason)
            end = self.endings.to_error(received, error) if received.failures >= POLICY_FAILURES else None
        if end is None and self.outgoing.mode is TransactionMode.NONE:
            return self.endings.to_error(received, error)
        return end

    async def _carry_out(self, received: Received, end: End) -> None:
        if self.outgoing.mode is TransactionMode.NONE:
            await self.send_first(end)
        else:
            await self.receiver.commit(received, self.outgoing.clock.now(), end)
