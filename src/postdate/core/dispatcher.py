"""A due message to its destination, or back for another attempt, or to the error queue. Never lost on the way.

The order is: send, then remove. What is interrupted in between is sent again with the same id (at least once), except
where store and queues share a database: there both are one transaction (exactly once). Source: specification 1.8, 1.10;
ADR 0002.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, in_real_time
from postdate.core.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.expiry import discard_reason
from postdate.core.foreign import calling_store, calling_transport
from postdate.core.in_flight import HANGS_AFTER, Batch, Group, InFlight, within
from postdate.core.journal import NO_JOURNAL, Journal
from postdate.core.poller import Taken
from postdate.core.recoverability import (
    DelayedRetry,
    Host,
    after_dispatch_failed,
    error_headers,
    is_outage,
    reason_of,
    retry_delay,
)
from postdate.errors import InvalidTimestamp, PostdateError, StoreUnavailable, TransportUnavailable
from postdate.messages import DelayedMessage, Envelope, delay_headers, to_envelope, without_delay_headers
from postdate.metrics import NO_METRICS, Metrics
from postdate.outage_log import OutageLog
from postdate.ports import (
    OUTCOME_RECORDS,
    Claim,
    ClaimingStore,
    EnlistingStore,
    Outcome,
    RecordKind,
    RevocableStore,
    Transport,
    Wake,
)
from postdate.ports.stores import Discarding

LONGEST_SEND = timedelta(seconds=30)
"""A destination that has not answered by then counts as unavailable."""

PATIENCE = timedelta(milliseconds=250)
"""How long the answered part of a batch waits for the rest once the first destination has answered.

Finishing a batch whole is what costs a store least; nothing of it should wait longer than this for a stranger.
"""

_CLAIMED_AT_ONCE = 1_000
_GIVEN_BACK_AT_ONCE = 16
_GIVE_BACK_AGAIN_AFTER = timedelta(seconds=1)

LONGEST_LETTING_GO = timedelta(seconds=10)
"""A batch that is ended by force takes no longer; what it still holds then is free when the store is closed."""

log = logging.getLogger("postdate.dispatcher")


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Where failures go.

    Args:
        timeouts_queue: the queue of delayed messages; returning an error copy to it dispatches it again (row 40).
        error_queue: for messages that cannot be sent.
        number_of_retries: attempts after the first.
        host: named in error copies.
        discard_lapsed_after: how long after the end that their headers give messages are recorded as expired instead of
            sent; ``None``: never, as their receivers decide (specification 2.4).
        errors_return_to_destination: error copies of due messages name the queue that these were meant for, not the
            timeouts queue, as the queue to return them to (specification 3.6).
    """

    timeouts_queue: str
    error_queue: str
    number_of_retries: int
    host: Host
    discard_lapsed_after: timedelta | None = None
    errors_return_to_destination: bool = False


class Dispatcher:
    """Claims due messages in batches and sends them; several batches overlap, destinations go side by side.

    A batch is removed by one call once all its destinations have answered. A destination that does not answer holds up
    nobody: after :data:`PATIENCE` the others are removed without it, and it goes on alone until :data:`LONGEST_SEND`.

    Args:
        store: with claims.
        transport: of the destinations and the error queue.
        settings: where failures go.
        clock: for the time of each step.
        breaker: for failing sends. It does not make the dispatcher pause: each message waits longer after each of its
            failures, so that what works goes on (row 58).
        failure_rate: for failures of the failure handling itself.
        metrics: what is counted.
        journal: told of what became of each message.
    """

    def __init__(  # noqa: PLR0913 - collaborators; put together in one place
        self,
        store: ClaimingStore,
        transport: Transport,
        settings: DispatchSettings,
        clock: Clock,
        breaker: RepeatedFailures,
        failure_rate: FailureRate,
        metrics: Metrics = NO_METRICS,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        self._store, self._transport, self._settings, self._clock = store, transport, settings, clock
        self._breaker, self._failure_rate, self._metrics, self._journal = breaker, failure_rate, metrics, journal
        self._enlisting = enlisting(store, transport)
        self._hangs_after, self._patience = in_real_time(clock, HANGS_AFTER), in_real_time(clock, PATIENCE)
        self._longest_send = in_real_time(clock, LONGEST_SEND)
        self._in_flight = InFlight(self._hangs_after)
        self._longest_letting_go = in_real_time(clock, LONGEST_LETTING_GO)
        self._still_held: deque[tuple[Claim, PostdateError]] = deque()
        self._tasks: TaskGroup | None = None
        self._wake: Wake = _wake_nobody
        queues = type(transport).__name__
        self._sending_outage = OutageLog(log, f"cannot send due messages, as {queues} is out of reach", f"{queues} is")
        self._finishing_outage = OutageLog(log, "cannot finish or give back due messages", "for that, the store is")

    @property
    def discarding(self) -> Discarding | None:
        """Which messages are recorded as expired because of their headers; ``None``: their receivers decide."""
        allowance = self._settings.discard_lapsed_after
        return None if allowance is None else Discarding(allowance, has_lapsed)

    @property
    def holds_some(self) -> bool:
        """Whether claims could not be given back and must be before anybody can have their messages."""
        return bool(self._still_held)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Let batches go on while the next are taken; leaving waits for them (row 55).

        Outside, and where store and queues share a database, :meth:`take` returns when its batch is done.
        """
        revocable = self._store if isinstance(self._store, RevocableStore) else None
        stop_listening = revocable.when_lost(self._in_flight.lose) if revocable else None
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = None if self._enlisting else tasks
                try:
                    yield
                finally:
                    self._tasks = None
        finally:
            if stop_listening is not None:
                stop_listening()

    async def take(self, now: datetime, limit: int = _CLAIMED_AT_ONCE) -> Taken:
        """See :class:`postdate.core.poller.DueWork`; deals with at most ``limit`` messages."""
        await self._give_back_again()
        if await self._in_flight.wait_for_room(limit):
            return Taken(0, more=True)  # that took time: whoever asked looks at the clock, and whether to go on at all
        with calling_store(self._store):
            claims = await self._store.claim_due(now, limit)
        if self._finishing_outage.is_out and not self._still_held:
            self._finishing_outage.succeeded(now.timestamp())
        self._metrics.fetched(len(claims), self._clock.now() - now)
        if claims:
            batch = Batch(claims, now)
            self._in_flight.begin(batch)
            if self._tasks is None:
                await self._deliver(batch)
            else:
                self._tasks.start_soon(self._deliver, batch)
        if len(claims) == limit:
            return Taken(len(claims), more=True)
        return Taken(len(claims), more=False, next_attempt=await self._next_attempt())

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """See :class:`postdate.core.poller.DueWork`."""
        with calling_store(self._store):
            stop_listening = await self._store.listen(wake)
        self._wake = wake

        def stop() -> None:
            self._wake = _wake_nobody
            stop_listening()

        return stop

    async def _next_attempt(self) -> datetime | None:
        with calling_store(self._store):
            next_attempt = await self._store.next_attempt()
        if not self._still_held:
            return next_attempt
        again = self._clock.now() + _GIVE_BACK_AGAIN_AFTER
        return again if next_attempt is None else min(next_attempt, again)

    # --- a batch ------------------------------------------------------------------------------------------------

    async def _deliver(self, batch: Batch) -> None:
        try:
            await self._send_and_settle(batch)
        except BaseException:  # cancelled: the process may go on without us, and with it what it holds
            with anyio.CancelScope(shield=True):
                await within(self._clock, self._longest_letting_go, lambda: self._let_go(batch))
            stopped = _stopped()
            self._still_held.extend((claim, stopped) for claim in batch.held.values())
            raise
        finally:
            self._in_flight.end(batch)
        if self._tasks is not None and batch.gave_back:
            self._wake()  # what was given back may be the next to be attempted

    async def _send_and_settle(self, batch: Batch) -> None:
        now = batch.began
        expired, wanted = list[Claim](), list[Claim]()
        for claim in batch.held.values():
            (expired if self._is_unwanted(claim.message, now) else wanted).append(claim)
        batch.groups = self._groups(wanted, now)
        async with anyio.create_task_group() as tasks:
            for group in batch.groups:
                tasks.start_soon(self._see_through, batch, group)
            if expired:
                await self._guarded(batch, expired, lambda: self._expire(batch, expired))
            if batch.groups:
                await self._settle_what_answers(batch)

    def _is_unwanted(self, message: DelayedMessage, now: datetime) -> bool:
        allowance = self._settings.discard_lapsed_after
        return is_expired(message, now) or (allowance is not None and has_lapsed(message.headers, now, allowance))

    async def _settle_what_answers(self, batch: Batch) -> None:
        """Wait for all destinations, or for as long as patience lasts; what comes later settles by itself."""
        await self._clock.wait(batch.first_answer, batch.began + self._hangs_after)
        if not batch.all_answered.is_set():
            await self._clock.wait(batch.all_answered, self._clock.now() + self._patience)
        answered = [group for group in batch.groups if group.errors is not None]
        batch.is_late = len(answered) < len(batch.groups)
        if batch.is_late:
            self._in_flight.give_up_place(batch)
        await self._settle(batch, answered)
        if not batch.all_answered.is_set():
            await batch.cut_off(self._clock, self._longest_send)

    def _groups(self, claims: Sequence[Claim], began: datetime) -> list[Group]:
        """Return what goes in one call each: everything, or the messages of one destination."""
        if self._transport.capabilities.pipelines and self._enlisting is None:
            return [Group("", claims, began)] if claims else []
        by_destination: defaultdict[str, list[Claim]] = defaultdict(list)
        for claim in claims:
            by_destination[claim.message.destination].append(claim)
        return [Group(destination, group, began) for destination, group in by_destination.items()]

    async def _see_through(self, batch: Batch, group: Group) -> None:
        group.errors = await self._answer(group)
        batch.answered()
        if batch.is_late:
            await self._settle(batch, [group])

    # --- sending ------------------------------------------------------------------------------------------------

    async def _answer(self, group: Group) -> Sequence[PostdateError | None]:
        """Send a group and return what became of each message."""
        if self._enlisting is not None:
            group.begin_turn(self._clock.now())
            return [await self._send_enlisted(claim, to_envelope(claim.message)) for claim in group.claims]
        with group.scope:
            if not group.destination:
                return await self._attempt(group)
            if not self._in_flight.is_full(group.destination, self._clock.now()):
                with self._in_flight.lane(group.destination) as lane:
                    async with lane.turn(self._clock):
                        return await self._attempt(group)
        return [_no_answer(group.destination or type(self._transport).__name__)] * len(group.claims)

    async def _attempt(self, group: Group) -> Sequence[PostdateError | None]:
        group.begin_turn(self._clock.now())
        return await self._send([to_envelope(claim.message) for claim in group.claims])

    async def _send(self, envelopes: Sequence[Envelope]) -> Sequence[PostdateError | None]:
        try:
            with calling_transport(self._transport):
                errors = await self._transport.send(envelopes, self._clock.now())
        except PostdateError as error:
            return [error] * len(envelopes)
        if len(errors) != len(envelopes):
            wrong = f"{type(self._transport).__name__} answered for {len(errors)} of {len(envelopes)} messages"
            return [TransportUnavailable(wrong)] * len(envelopes)
        return errors

    async def _send_enlisted(
        self, claim: Claim, envelope: Envelope, outcome: Outcome = Outcome.DELIVERED, detail: str = ""
    ) -> PostdateError | None:
        """Send and remove in one transaction, so that the failure of one message does not undo others."""
        assert self._enlisting is not None
        now = self._clock.now()
        try:
            with calling_transport(self._transport):
                work = self._enlisting.finishing([claim], outcome, now, detail)
                (error,) = await self._transport.send([envelope], now, work=[work])
        except PostdateError as failure:
            error = failure
        if error is None:
            self._journal.ended(OUTCOME_RECORDS[outcome], [claim.message], now, detail)
        return error

    # --- afterwards ---------------------------------------------------------------------------------------------

    async def _settle(self, batch: Batch, groups: Sequence[Group]) -> None:
        """Remove what was sent, in one call; then deal with each failure."""
        answers = [
            (claim, error, group.attempted)
            for group in groups
            for claim, error in zip(group.claims, group.errors or (), strict=True)
        ]
        sent = [claim for claim, error, _ in answers if error is None]
        if sent:
            self._breaker.success()
            if self._sending_outage.is_out:
                self._sending_outage.succeeded(self._clock.now().timestamp())
            await self._guarded(batch, sent, lambda: self._remove(batch, sent))
        failures = [(claim, error, attempted) for claim, error, attempted in answers if error is not None]
        failed = [each for each in failures if each[0].message.message_id not in batch.lost]
        batch.settled([claim for claim, _, _ in failures if claim.message.message_id in batch.lost])
        if failed:
            self._in_flight.give_up_place(batch)
            self._metrics.failed(len(failed))
            claims = [claim for claim, _, _ in failed]
            await self._guarded(batch, claims, lambda: self._failed(batch, failed))

    async def _remove(self, batch: Batch, sent: Sequence[Claim]) -> None:
        if self._enlisting is None:
            at = self._clock.now()
            removed = await self._store.finish(sent, Outcome.DELIVERED, at)
            self._journal.ended(RecordKind.DELIVERED, _messages(sent), at)
            if removed < len(sent):  # somebody removed it while we sent it (row 53)
                log.warning("%d messages may have been delivered more than once", len(sent) - removed)
        batch.settled(sent)
        if self._metrics is NO_METRICS and not log.isEnabledFor(logging.DEBUG):
            return
        now = self._clock.now()
        _log_delivered(sent, now)
        if self._metrics is not NO_METRICS:
            self._metrics.delivered(len(sent), [(now - claim.message.due).total_seconds() for claim in sent])

    async def _expire(self, batch: Batch, claims: Sequence[Claim]) -> None:
        at = self._clock.now()
        await self._store.finish(claims, Outcome.EXPIRED, at)
        self._journal.ended(RecordKind.EXPIRED, _messages(claims), at)
        batch.settled(claims)
        self._metrics.expired(len(claims))

    async def _failed(self, batch: Batch, failed: Sequence[tuple[Claim, PostdateError, bool]]) -> None:
        retried = 0
        outage = next((error for _, error, _ in failed if is_outage(error)), None)
        if outage is not None:
            self._sending_outage.failed(outage, self._clock.now().timestamp())
        _log_failures([(claim, error) for claim, error, _ in failed if not is_outage(error)])
        for claim, error, attempted in failed:
            if await self._retry_or_move(batch, claim, error, attempted=attempted and not batch.error_queue_is_down):
                retried += 1
            batch.settled([claim])
        if retried:
            self._metrics.retried(retried)
        if retried < len(failed):
            self._metrics.moved_to_error(len(failed) - retried)

    async def _retry_or_move(self, batch: Batch, claim: Claim, error: PostdateError, *, attempted: bool) -> bool:
        """Return whether the message stays.

        What only waited for its turn is not given up for that; and an error queue that did not take one message is not
        asked about each of the others: claims are not held that long.
        """
        message, now = claim.message, self._clock.now()
        failures, retries = message.number_of_failures, self._settings.number_of_retries
        decision = after_dispatch_failed(error, failures, retries, self._settings.error_queue)
        if error.transient:
            self._breaker.failure(error, now)
        if attempted and not isinstance(decision, DelayedRetry):
            return await self._move_to_error(batch, claim, error)
        await self._retry(batch, claim, error, reason_of(error))
        return True

    async def _retry(self, batch: Batch, claim: Claim, error: PostdateError, reason: str) -> None:
        now = self._clock.now()
        batch.gave_back = True
        attempt_at = now + retry_delay(claim.message.number_of_failures, error)
        if await self._store.retry_later(claim, attempt_at, now, reason):
            self._journal.ended(RecordKind.RETRIED, [claim.message], now, reason)
        else:
            log.warning("message %s was removed by another while it was being sent", claim.message.message_id)

    async def _move_to_error(self, batch: Batch, claim: Claim, error: PostdateError) -> bool:
        """Send the error copy, then remove: when the error queue fails, too, the message stays (row 41)."""
        now, detail = self._clock.now(), reason_of(error)
        copy = error_copy(claim.message, error, self._settings, now)
        if self._enlisting is not None:
            failure = await self._send_enlisted(claim, copy, Outcome.FAILED, detail)
        else:
            (failure,) = await within(self._clock, self._longest_send, lambda: self._send([copy])) or [
                _no_answer(copy.destination)
            ]
            if failure is None:
                at = self._clock.now()
                await self._store.finish([claim], Outcome.FAILED, at, detail)
                self._journal.ended(RecordKind.FAILED, [claim.message], at, detail)
        if failure is None:
            log.error("message %s moved to error queue %s", claim.message.message_id, copy.destination)
            return False
        log.error("error queue %s does not take message %s: %s", copy.destination, claim.message.message_id, failure)
        self._failure_rate.failure(failure, now)
        batch.error_queue_is_down = failure.transient
        await self._retry(batch, claim, failure, f"error queue: {reason_of(failure)}")
        return True

    # --- when that fails ----------------------------------------------------------------------------------------

    async def _guarded(self, batch: Batch, claims: Sequence[Claim], step: Callable[[], Awaitable[None]]) -> None:
        """Do ``step``. When the handling itself fails, that is counted, and a later attempt gets the messages."""
        try:
            with calling_store(self._store):
                await step()
        except PostdateError as error:
            if is_outage(error):
                self._finishing_outage.failed(error, self._clock.now().timestamp())
            else:
                log.error("cannot finish %d messages for %s: %s", len(claims), claims[0].message.destination, error)
            self._failure_rate.failure(error, self._clock.now())
            # Those that are finished are not held any more: giving them back has no effect.
            await self._give_back_all(batch, [each for each in claims if each.message.message_id in batch.held], error)

    async def _let_go(self, batch: Batch) -> None:
        """End a batch in the middle: remove what was sent, give the rest back."""
        sent = batch.sent()
        if sent:
            await self._guarded(batch, sent, lambda: self._remove(batch, sent))
        await self._give_back_all(batch, list(batch.held.values()), _stopped())

    async def _give_back_all(self, batch: Batch, claims: Sequence[Claim], error: PostdateError) -> None:
        """Give many back, several at once: most of the time of each is waiting for its commit.

        A store that cannot be reached is not asked for each of them: finding that out may take seconds.
        """
        left = deque(claims)
        batch.gave_back = True

        async def give_back() -> None:
            while left:
                claim = left.popleft()
                refused = await self._give_back(claim, error)
                if refused is not None:
                    self._still_held.append((claim, error))
                batch.settled([claim])  # not before: whoever is cancelled meanwhile must still know of it
                if isinstance(refused, StoreUnavailable):
                    self._still_held.extend((each, error) for each in left)
                    batch.settled(left)
                    left.clear()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(_GIVEN_BACK_AT_ONCE, len(claims))):
                tasks.start_soon(give_back)

    async def _give_back(self, claim: Claim, error: PostdateError) -> PostdateError | None:
        """Give a claim back for a later attempt; return why the store refuses that, too."""
        now = self._clock.now()
        delay = retry_delay(claim.message.number_of_failures, error)
        try:
            with calling_store(self._store):
                if await self._store.retry_later(claim, now + delay, now, reason_of(error)):
                    self._journal.ended(RecordKind.RETRIED, [claim.message], now, reason_of(error))
        except PostdateError as refused:
            if is_outage(refused):
                self._finishing_outage.failed(refused, now.timestamp())
            else:
                log.error("message %s cannot be given back now: %s", claim.message.message_id, refused)
            return refused
        return None

    async def _give_back_again(self) -> None:
        """Try again with what the store refused to take back; keep it at every look at which it refuses."""
        for _ in range(len(self._still_held)):
            claim, error = self._still_held[0]  # it stays there for the case that we are cancelled
            refused = await self._give_back(claim, error)
            self._still_held.popleft()
            if refused is not None:
                self._still_held.append((claim, error))  # last: should it be the only one refused, others go first
            if isinstance(refused, StoreUnavailable):
                return


def _messages(claims: Sequence[Claim]) -> list[DelayedMessage]:
    return [claim.message for claim in claims]


def _stopped() -> TransportUnavailable:
    return TransportUnavailable("the endpoint was stopped while it was sending")


def _no_answer(who: str) -> TransportUnavailable:
    return TransportUnavailable(f"{who} did not answer within {LONGEST_SEND.total_seconds():g} s")


def _wake_nobody() -> None:
    """Stand in for the poller until it listens."""


def _log_failures(failed: Sequence[tuple[Claim, PostdateError]]) -> None:
    """Log one line for each destination and kind of failure: a thousand messages of one batch say no more than one."""
    kinds: defaultdict[tuple[str, str], list[tuple[Claim, PostdateError]]] = defaultdict(list)
    for claim, error in failed:
        kinds[claim.message.destination, error.code].append((claim, error))
    for (destination, _), (first, *others) in kinds.items():
        more = f" and {len(others)} more" if others else ""
        log.error("cannot send message %s%s to %s: %s", first[0].message.message_id, more, destination, first[1])


def _log_delivered(sent: Sequence[Claim], now: datetime) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    destinations = list(dict.fromkeys(claim.message.destination for claim in sent))
    others = f" and {len(destinations) - 1} other queues" if len(destinations) > 1 else ""
    late = (now - min(claim.message.due for claim in sent)) / timedelta(milliseconds=1)
    log.debug("%d messages delivered to %s%s, latest %.0f ms late", len(sent), destinations[0], others, late)


def enlisting(store: ClaimingStore, transport: Transport) -> EnlistingStore | None:
    """Return the store if it can share a transaction with the transport."""
    database = store.capabilities.database
    if database is None or database != transport.capabilities.database or not isinstance(store, EnlistingStore):
        return None
    return store


def is_expired(message: DelayedMessage, now: datetime) -> bool:
    """Return whether nobody wants the message any more: strictly after its expiry."""
    return message.expires_at is not None and message.expires_at < now


def has_lapsed(headers: Mapping[str, str], now: datetime, allowance: timedelta) -> bool:
    """Return whether a message is past the use that its headers give it; not where that cannot be told."""
    try:
        return discard_reason(headers, now, allowance) is not None
    except InvalidTimestamp:  # the receiver cannot tell, either, and fails it: so it is seen, and not lost
        return False


def error_copy(message: DelayedMessage, error: BaseException, settings: DispatchSettings, now: datetime) -> Envelope:
    """Return what goes to the error queue: everything needed to return it to the timeouts queue (rows 39, 40).

    Or, when settings say so, to its destination, as the ordinary message that it is by now (row 84).

    It does not expire: an operator must find it.
    """
    if settings.errors_return_to_destination:
        own, failed_queue = to_envelope(message).headers, message.destination
    else:
        clean = replace(message, headers=without_delay_headers(message.headers))  # as on every other way out
        own, failed_queue = delay_headers(clean), settings.timeouts_queue
    headers = error_headers(own, error, failed_queue, now, settings.host)
    return Envelope(settings.error_queue, message.message_id, headers, message.body, due=message.due)
