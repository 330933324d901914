"""A due message to its destination, or back for another attempt, or to the error queue. Never lost on the way.

The order is: send, then remove. What is interrupted in between is sent again with the same id (at least once), except
where store and queues share a database: there both are one transaction (exactly once). Source: specification 1.8, 1.10;
ADR 0002.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import anyio

from postdate.clock import Clock
from postdate.core.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.poller import Taken
from postdate.core.recoverability import DelayedRetry, Host, after_dispatch_failed, error_headers, retry_delay
from postdate.errors import PostdateError, TransportUnavailable
from postdate.messages import DelayedMessage, Envelope, delay_headers, to_envelope, without_delay_headers
from postdate.ports import Claim, ClaimingStore, EnlistingStore, MovingStore, Outcome, Transport, Wake

LONGEST_SEND = timedelta(seconds=30)
"""A destination that has not answered by then counts as unavailable."""

_MOVED_AT_ONCE = 1_000
_CLAIMED_AT_ONCE = 250
_LEFT_BEHIND_AT_ONCE = 25

log = logging.getLogger("postdate.dispatcher")


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Where failures go.

    Args:
        timeouts_queue: the queue of delayed messages; returning an error copy to it dispatches it again (row 40).
        error_queue: for messages that cannot be sent.
        number_of_retries: attempts after the first.
        host: named in error copies.
    """

    timeouts_queue: str
    error_queue: str
    number_of_retries: int
    host: Host


class Dispatcher:
    """Claims due messages and sends them; one batch at a time, destinations side by side.

    Args:
        store: with claims.
        transport: of the destinations and the error queue.
        settings: where failures go.
        clock: for the time of each step.
        breaker: for failing sends.
        failure_rate: for failures of the failure handling itself.
    """

    def __init__(
        self,
        store: ClaimingStore,
        transport: Transport,
        settings: DispatchSettings,
        clock: Clock,
        breaker: RepeatedFailures,
        failure_rate: FailureRate,
    ) -> None:
        self._store, self._transport, self._settings, self._clock = store, transport, settings, clock
        self._breaker, self._failure_rate = breaker, failure_rate
        self._enlisting = enlisting(store, transport)
        self._still_held: list[tuple[Claim, PostdateError]] = []

    @property
    def holds_some(self) -> bool:
        """Whether claims could not be given back and must be before anybody can have their messages."""
        return bool(self._still_held)

    async def take(self, now: datetime, limit: int = _CLAIMED_AT_ONCE) -> Taken:
        """See :class:`postdate.core.poller.DueWork`; deals with at most ``limit`` messages."""
        held, self._still_held = self._still_held, []
        for claim, error in held:
            await self._give_back(claim, error)
        claims = await self._store.claim_due(now, limit)
        if not claims:
            return Taken(0, more=False, next_attempt=await self._store.next_attempt())
        expired = [claim for claim in claims if is_expired(claim.message, now)]
        by_destination: defaultdict[str, list[Claim]] = defaultdict(list)
        for claim in claims:
            if not is_expired(claim.message, now):
                by_destination[claim.message.destination].append(claim)
        try:
            async with anyio.create_task_group() as destinations:
                if expired:
                    destinations.start_soon(self._see_through, expired, self._expire)
                for group in by_destination.values():
                    destinations.start_soon(self._see_through, group, self._dispatch)
        except BaseException:  # cancelled: the process may go on without us, and with it what it holds
            with anyio.CancelScope(shield=True):
                for claim in claims:
                    await self._give_back(claim, TransportUnavailable("the endpoint was stopped while it was sending"))
            raise
        if len(claims) == limit:
            return Taken(len(claims), more=True)
        return Taken(len(claims), more=False, next_attempt=await self._store.next_attempt())

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """See :class:`postdate.core.poller.DueWork`."""
        return await self._store.listen(wake)

    async def _see_through(self, claims: Sequence[Claim], step: Callable[[Sequence[Claim]], Awaitable[None]]) -> None:
        """Do ``step``. When the handling itself fails, that is counted, and a later attempt gets the messages."""
        try:
            await step(claims)
        except PostdateError as error:
            log.error("cannot finish %d messages for %s: %s", len(claims), claims[0].message.destination, error)
            self._failure_rate.failure(error, self._clock.now())
            for claim in claims:  # those that are finished are not held any more: giving them back has no effect
                await self._give_back(claim, error)

    async def _give_back(self, claim: Claim, error: PostdateError) -> None:
        """Give a claim back for a later attempt; while the store refuses that, too, keep it and try at every look."""
        now = self._clock.now()
        delay = retry_delay(claim.message.number_of_failures)
        try:
            await self._store.retry_later(claim, now + delay, now, f"{error.code}: {error}")
        except PostdateError as again:
            log.error("message %s cannot be given back now: %s", claim.message.message_id, again)
            self._still_held.append((claim, error))

    async def _expire(self, claims: Sequence[Claim]) -> None:
        await self._store.finish(claims, Outcome.EXPIRED, self._clock.now())

    async def _dispatch(self, claims: Sequence[Claim]) -> None:
        """Send the messages of one destination."""
        errors = await (self._send_together(claims) if self._enlisting else self._send_then_remove(claims))
        for claim, error in zip(claims, errors, strict=True):
            if error is not None:
                await self._failed(claim, error)

    async def _send_then_remove(self, claims: Sequence[Claim]) -> Sequence[PostdateError | None]:
        now = self._clock.now()
        errors = await self._send([to_envelope(claim.message) for claim in claims], now)
        sent = [claim for claim, error in zip(claims, errors, strict=True) if error is None]
        if sent:
            self._breaker.success()
            removed = await self._store.finish(sent, Outcome.DELIVERED, self._clock.now())
            if removed < len(sent):  # somebody removed it while we sent it (row 53)
                log.warning("%d messages may have been delivered more than once", len(sent) - removed)
        return errors

    async def _send_together(self, claims: Sequence[Claim]) -> Sequence[PostdateError | None]:
        """Send and remove each message in a transaction of its own, so that one failure does not undo the others."""
        return [await self._send_enlisted(claim, to_envelope(claim.message), Outcome.DELIVERED, "") for claim in claims]

    async def _send_enlisted(
        self, claim: Claim, envelope: Envelope, outcome: Outcome, detail: str
    ) -> PostdateError | None:
        assert self._enlisting is not None
        now = self._clock.now()
        work = self._enlisting.finishing([claim], outcome, now, detail)
        try:
            (error,) = await self._transport.send([envelope], now, work=[work])
        except PostdateError as failure:
            error = failure
        return error

    async def _send(self, envelopes: Sequence[Envelope], now: datetime) -> Sequence[PostdateError | None]:
        with anyio.move_on_after(LONGEST_SEND.total_seconds()):
            try:
                return await self._transport.send(envelopes, now)
            except PostdateError as error:
                return [error] * len(envelopes)
        late = TransportUnavailable(f"{envelopes[0].destination} did not answer within {LONGEST_SEND.seconds} s")
        return [late] * len(envelopes)

    async def _failed(self, claim: Claim, error: PostdateError) -> None:
        message, now = claim.message, self._clock.now()
        log.error("cannot send message %s to %s: %s", message.message_id, message.destination, error)
        decision = after_dispatch_failed(
            error, message.number_of_failures, self._settings.number_of_retries, self._settings.error_queue
        )
        if error.transient:
            self._breaker.failure(error, now)
        if isinstance(decision, DelayedRetry):
            await self._store.retry_later(claim, now + decision.delay, now, f"{error.code}: {error}")
        else:
            await self._move_to_error(claim, error)

    async def _move_to_error(self, claim: Claim, error: PostdateError) -> None:
        """Send the error copy, then remove: when the error queue fails, too, the message stays (row 41)."""
        now, detail = self._clock.now(), f"{error.code}: {error}"
        copy = error_copy(claim.message, error, self._settings, now)
        if self._enlisting is not None:
            failure = await self._send_enlisted(claim, copy, Outcome.FAILED, detail)
        else:
            (failure,) = await self._send([copy], now)
            if failure is None:
                await self._store.finish([claim], Outcome.FAILED, self._clock.now(), detail)
        if failure is None:
            log.error("message %s moved to error queue %s", claim.message.message_id, copy.destination)
            return
        log.error("error queue %s does not take message %s: %s", copy.destination, claim.message.message_id, failure)
        self._failure_rate.failure(failure, now)
        delay = retry_delay(claim.message.number_of_failures)
        await self._store.retry_later(claim, now + delay, now, f"error queue: {failure.code}: {failure}")


class Mover:
    """Moves due messages inside the database that store and queues share; claims only what has no queue there.

    Args:
        store: in the database of the transport.
        dispatcher: for messages whose destination is not a queue of that database: they go the ordinary way.
    """

    def __init__(self, store: MovingStore, dispatcher: Dispatcher) -> None:
        self._store, self._dispatcher = store, dispatcher

    async def take(self, now: datetime) -> Taken:
        """See :class:`postdate.core.poller.DueWork`."""
        report = await self._store.move_due(now, _MOVED_AT_ONCE)
        moved = report.delivered + report.expired
        needed = report.left_behind or self._dispatcher.holds_some
        # A few at a look: what has no queue must not hold up what has (a bad destination never holds up the rest).
        others = (
            await self._dispatcher.take(now, _LEFT_BEHIND_AT_ONCE) if needed else Taken(0, False, report.next_attempt)
        )
        if moved < _MOVED_AT_ONCE:
            return Taken(moved + others.count, others.more, others.next_attempt)
        await self._store.pause()
        return Taken(moved + others.count, more=True)

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """See :class:`postdate.core.poller.DueWork`."""
        return await self._store.listen(wake)


def enlisting(store: ClaimingStore, transport: Transport) -> EnlistingStore | None:
    """Return the store if it can share a transaction with the transport."""
    database = store.capabilities.database
    if database is None or database != transport.capabilities.database or not isinstance(store, EnlistingStore):
        return None
    return store


def is_expired(message: DelayedMessage, now: datetime) -> bool:
    """Return whether nobody wants the message any more: strictly after its expiry."""
    return message.expires_at is not None and message.expires_at < now


def error_copy(message: DelayedMessage, error: BaseException, settings: DispatchSettings, now: datetime) -> Envelope:
    """Return what goes to the error queue: everything needed to return it to the timeouts queue (rows 39, 40).

    It does not expire: an operator must find it.
    """
    message = replace(message, headers=without_delay_headers(message.headers))  # as on every other way out of the store
    headers = error_headers(delay_headers(message), error, settings.timeouts_queue, now, settings.host)
    return Envelope(settings.error_queue, message.message_id, headers, message.body, due=message.due)
