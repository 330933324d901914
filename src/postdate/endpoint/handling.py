"""One received message from its queue to its handlers, and what they send from there."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack

import anyio

from postdate.core.receiving import CallWatch
from postdate.core.recoverability import text_of
from postdate.endpoint.cancelling import is_being_cancelled
from postdate.endpoint.outbox import BusinessTransaction, Handled
from postdate.endpoint.replying import reply_options
from postdate.endpoint.retries import POLICY_FAILURES, PolicyFailed, cancels_itself, is_lasting
from postdate.endpoint.saga_handling import CONFLICTS_BORNE, SagaStoreUnreachable
from postdate.endpoint.sending import SendKeywords, SendOptions
from postdate.errors import (
    ConfigurationError,
    InvalidTimestamp,
    MessageError,
    PostdateError,
    QueueNotFound,
    SagaConflict,
    TransportUnreachable,
)
from postdate.messages import DelayedMessage, Envelope, Headers
from postdate.ports import End, NativeTransaction, Received, RecordKind, TransactionMode, Work

if TYPE_CHECKING:
    from postdate.endpoint.endpoint import Endpoint

log = logging.getLogger("postdate.endpoint")


class HandlerContext:
    """What a handler is given besides the message.

    What it sends leaves when the handler has succeeded, together with the completion of the incoming message; when it
    fails, nothing leaves, except what was sent ``isolated``; in transaction mode ``none``, all of it leaves at once.
    """

    def __init__(self, endpoint: Endpoint, received: Received, business: BusinessTransaction | None = None) -> None:
        self._endpoint, self._received, self._business = endpoint, received, business
        self._headers = MappingProxyType(received.envelope.headers)
        self.outgoing: list[Envelope | DelayedMessage] = []
        self.work: list[Work] = []
        """Done in the transaction in which what was sent leaves; only with queues, or an outbox, in the database of the
        work."""
        self.afterwards: list[Callable[[], Awaitable[None]]] = []
        """Done when the message has ended well; must raise nothing."""
        self.saga: Mapping[str, str] = {}
        """Headers that say which saga instance sends; empty while none is at work."""
        self._ended = False

    def end(self) -> Sequence[Envelope | DelayedMessage]:
        """Return what was sent; from now on nothing can be."""
        self._ended = True
        return self.outgoing

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the incoming message; read-only, since a retry and the error queue get them as they came.

        What is sent takes its own: ``headers={**context.headers, "Mine": "1"}``.
        """
        return self._headers

    @property
    def message_id(self) -> str:
        """Id of the incoming message: stable, however often it is delivered."""
        return self.headers.get(Headers.MESSAGE_ID, self._received.envelope.message_id)

    @property
    def due(self) -> datetime | None:
        """When a delayed message was due, UTC; ``None`` for others, and where the transport does not keep it."""
        return self._received.envelope.due

    async def transaction(self) -> NativeTransaction:
        """Return a connection of the outbox's database with a transaction open on it, for data of the application.

        What is written on it is committed together with what this handler sends, and with the mark that the message was
        handled; when the handler fails, it is rolled back. All handlers of a message have the same one.

        Returns:
            With :class:`~postdate.PostgresOutbox` a ``psycopg.AsyncConnection``, with :class:`~postdate.SqliteOutbox`
            an ``sqlite3.Connection``. It refuses to commit or roll back.

        Raises:
            ConfigurationError: the endpoint has no outbox.
            StoreUnavailable: the database cannot be reached.
        """
        if self._business is None:
            raise ConfigurationError(
                f"endpoint {self._endpoint.name!r} has no outbox, so its handlers have no transaction: pass "
                f"outbox=Outbox(…) when you create it"
            )
        return await self._business.begin()

    async def send(self, message: object, *, isolated: bool = False, **options: Unpack[SendKeywords]) -> str:
        """Send a message; see :meth:`Endpoint.send`.

        Args:
            message: see there.
            isolated: let it leave at once, whatever becomes of the message being handled.
            options: see there.
        """
        outgoing = self._made(message, SendOptions(**options))
        await self._leave(outgoing, isolated=isolated)
        return outgoing.message_id

    async def reply(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """Send a message to where the incoming one asked for replies, and to the saga instance that sent that, if any.

        A reply cannot be delayed (row 7).

        Raises:
            InvalidMessage: the incoming message names no address for replies.
        """
        outgoing = self._made(message, reply_options(self.headers, self.message_id, headers))
        await self._leave(outgoing)
        return outgoing.message_id

    async def publish(
        self, message: object, headers: Mapping[str, str] | None = None, *, message_id: str | None = None
    ) -> str:
        """Send a message to everybody who is subscribed to its type; see :meth:`Endpoint.publish`."""
        options = self._endpoint.publish_options(message, headers, message_id)
        outgoing = self._made(message, options)
        await self._leave(outgoing)
        return outgoing.message_id

    def _made(self, message: object, options: SendOptions) -> Envelope | DelayedMessage:
        if self.saga:
            options = replace(options, headers={**self.saga, **(options.headers or {})})
        return self._endpoint.outgoing(message, options, related_to=self.headers)

    async def _leave(self, outgoing: Envelope | DelayedMessage, *, isolated: bool = False) -> None:
        if self._ended:
            raise MessageError(
                f"the handler of message {self.message_id!r} has ended: what it sends now cannot leave with it"
            )
        if isolated or self._endpoint.mode is TransactionMode.NONE:
            if self._business is not None:
                self._business.check_isolated_send()
            await self._endpoint.send_now([outgoing])
        else:
            self.outgoing.append(outgoing)


@dataclass(frozen=True, slots=True)
class Handling:
    """Handles one received message completely; the handler of the endpoint's message pump."""

    endpoint: Endpoint
    commit: Callable[[Received, datetime, End], Awaitable[None]]
    roll_back: Callable[[Received], Awaitable[None]]
    watch: CallWatch

    async def handle(self, received: Received) -> None:
        """See :data:`postdate.core.pump.Handle`."""
        if self.endpoint.mode is TransactionMode.NONE and not await self._is_taken(received):
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
        endpoint, context = self.endpoint, HandlerContext(self.endpoint, received)
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
            if endpoint.mode in {TransactionMode.NONE, TransactionMode.RECEIVE_ONLY} and (end.outgoing or end.work):
                # Not rolled back when taking the message off the queue fails afterwards (specification 6).
                await self.send_first(end)
                end = End(end.record, end.detail)
            if endpoint.mode is not TransactionMode.NONE:
                await self.commit(received, endpoint.clock.now(), end)
        except PostdateError as error:  # what the handler sent cannot be sent
            of_message = isinstance(error, (MessageError, QueueNotFound))
            if not of_message and endpoint.mode is not TransactionMode.NONE:
                raise
            await self.recover(received, error)  # in mode none always: the message is off its queue
            return
        for each in context.afterwards:
            await each()

    async def _is_taken(self, received: Received) -> bool:
        """Take a message off its queue before it is handled; return whether it is to be."""
        endpoint = self.endpoint
        try:
            reason = endpoint.discard_reason(received)
        except InvalidTimestamp as error:
            await self.commit(received, endpoint.clock.now(), End(RecordKind.HANDLED))
            await self.recover(received, error)
            return False
        end = End(RecordKind.HANDLED) if reason is None else endpoint.discarded(received, reason)
        await self.commit(received, endpoint.clock.now(), end)
        return reason is None

    async def _end(self, received: Received, context: HandlerContext) -> End:
        endpoint = self.endpoint
        # Asked before of what is off its queue already: by now its time may be over, and it must be handled.
        reason = None if endpoint.mode is TransactionMode.NONE else endpoint.discard_reason(received)
        if reason is not None:
            return endpoint.discarded(received, reason)
        return endpoint.end_of(await self._outgoing(received, context), RecordKind.HANDLED, also=context.work)

    async def call(self, received: Received, business: BusinessTransaction) -> Handled:
        """Call the handlers, in a transaction of the outbox."""
        context = HandlerContext(self.endpoint, received, business)
        outgoing = await self._outgoing(received, context)
        return Handled(outgoing, context.work, context.afterwards)

    async def _outgoing(self, received: Received, context: HandlerContext) -> Sequence[Envelope | DelayedMessage]:
        """Call the handlers; return what they sent, with the copy for the audit."""
        endpoint, started = self.endpoint, self.endpoint.clock.now()
        await endpoint.call_handlers(received, context)
        outgoing = context.end()
        if endpoint.audit is not None:
            copy = endpoint.audit.copy(received.envelope, started, endpoint.clock.now(), endpoint.host)
            outgoing = [*outgoing, copy]
        return outgoing

    async def send_first(self, end: End) -> None:
        """Send and store outside of any receive transaction: with each other, where the queues can have that."""
        can = self.endpoint.transport.capabilities
        expiring = any(envelope.time_to_be_received is not None for envelope in end.outgoing)
        if end.work and expiring and not can.time_to_be_received_in_transactions:
            await self._send(end.outgoing, ())
            await self._send((), end.work)
        else:
            await self._send(end.outgoing, end.work)

    async def _send(self, envelopes: Sequence[Envelope], work: Sequence[Work]) -> None:
        transport = self.endpoint.transport
        sending = transport.send(envelopes, self.endpoint.clock.now(), work=work)
        for error in await self.watch.call(sending, transport, TransportUnreachable):
            if error is not None:
                raise error

    async def recover(self, received: Received, error: Exception) -> None:
        """Carry out what the policy decides; in transaction mode ``none`` there is no second try (specification 6).

        What cannot be carried out ends in the error queue of the endpoint (row 111): as an error copy like any other,
        and where that is too large, as one that says only what has failed.
        """
        endpoint = self.endpoint
        end = self._decided(received, error)
        if end is None:
            await self.roll_back(received)
            return
        for instead in (endpoint.to_error, endpoint.to_error_in_brief):
            try:
                await self._carry_out(received, end)
            except PostdateError as failure:
                if endpoint.mode is not TransactionMode.NONE and not is_lasting(failure):
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
            if endpoint.mode is TransactionMode.NONE:
                id_ = received.envelope.message_id
                log.error("message %s is lost: it is off its queue, and no copy can be sent", id_)
            raise

    def _decided(self, received: Received, error: Exception) -> End | None:
        """Return how a message ends whose handling failed, or ``None`` when it goes back to its queue."""
        endpoint = self.endpoint
        try:
            end = endpoint.end_after_failure(received, error)
        except PolicyFailed as failed:
            endpoint.critical_error(str(failed), failed.reason)
            end = endpoint.to_error(received, error) if received.failures >= POLICY_FAILURES else None
        if end is None and endpoint.mode is TransactionMode.NONE:
            return endpoint.to_error(received, error)
        return end

    async def _carry_out(self, received: Received, end: End) -> None:
        if self.endpoint.mode is TransactionMode.NONE:
            await self.send_first(end)
        else:
            await self.commit(received, self.endpoint.clock.now(), end)
