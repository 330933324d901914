"""Sends due messages to their destinations, or gives them back for another attempt, or moves them to the error queue.

First it sends, then it removes. What is interrupted in between is sent again with the same id (at least once), except
where store and queues share a database: there both are one transaction. Source: specification 1.8, 1.10; ADR 0002.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, in_real_time, later
from postdate.core.due.destinations import ANOTHER_SECONDS, LONGEST_SECONDS, SHORTEST_SECONDS, Destinations
from postdate.core.due.finishing import NO_JOURNAL, Finisher, Journal
from postdate.core.due.in_flight import HANGS_AFTER, Batch, Group, InFlight, within
from postdate.core.due.poller import PollResult
from postdate.core.expiry import is_expired
from postdate.core.health.attempts import Attempts, Release
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures, nobody
from postdate.core.health.deadlines import CALL_DEADLINE, Deadlines, translate_store_errors
from postdate.core.limits import LimitsCache
from postdate.core.recoverability import (
    DelayedRetry,
    DispatchSettings,
    Resolution,
    after_copy,
    after_dispatch_failed,
    checked_answers,
    is_lasting,
    is_outage,
    may_be_of_one,
    reason_of,
    retry_delay,
)
from postdate.core.simple_store import enlisting
from postdate.errors import (
    DestinationUnavailable,
    MessageError,
    PostdateError,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.messages import Envelope, to_envelope
from postdate.ports import OUTCOME_RECORDS, Claim, ClaimingStore, Outcome, Transport, Wake
from postdate.runtime import tracing
from postdate.runtime.reporting import NO_METRICS, Metrics
from postdate.runtime.resource import Backoff, Resource, resource_of

LONGEST_SEND = timedelta(seconds=30)
"""A destination that has not answered by then counts as unavailable."""

PATIENCE = timedelta(milliseconds=250)
"""How long the answered part of a batch waits for the rest, as one call to finish all of it costs a store least."""

_CLAIMED_AT_ONCE = 1_000

FRESH = timedelta(seconds=10)
"""Error copies leave only under younger claims, as leases last longer; under an older one the message is claimed again
first."""

_BORNE_AS_PROBE = 2
"""A message may fail so often as the probe of a transport, others being sent in between; then it is to blame for it."""

LONGEST_LETTING_GO = timedelta(seconds=10)
"""A batch that is ended by force takes no longer; what it still holds then is free when the store is closed."""

log = logging.getLogger("postdate.dispatcher")


class Dispatcher:
    """Claims due messages in batches and sends them; several batches overlap, destinations go side by side.

    A batch is removed by one call once all its destinations have answered. A destination that does not answer does not
    delay others: after :data:`PATIENCE` they are removed without it, and it goes on alone until :data:`LONGEST_SEND`.
    The breaker does not make the dispatcher pause: each message waits longer after each of its failures, so that all
    others go on (row 58).
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
        call_deadline: timedelta = CALL_DEADLINE,
    ) -> None:
        self._store, self._transport, self._settings, self._clock = store, transport, settings, clock
        self._failure_rate, self._metrics, self._journal = failure_rate, metrics, journal
        self.store_deadlines = Deadlines.of_store(store, clock, call_deadline)
        """Of all calls of the store, also those of a mover; short when it stops."""
        # Not short when it stops: what is being sent is waited for (row 55).
        self._send_deadlines = Deadlines.of_transport(transport, clock, call_deadline)
        self.limits = LimitsCache(store, self.store_deadlines, clock)
        self._attempts = Attempts()
        self.finisher = Finisher(store, self.store_deadlines, clock, failure_rate, journal, self._attempts)
        self._probing = Backoff(SHORTEST_SECONDS, LONGEST_SECONDS)
        """While the transport is out of reach only a probe is claimed: another process may be able to send the rest."""
        self._destinations = Destinations()
        self._enlisting = enlisting(store, transport)
        self._hangs_after, self._patience = in_real_time(clock, HANGS_AFTER), in_real_time(clock, PATIENCE)
        self._longest_send, self._fresh = in_real_time(clock, LONGEST_SEND), in_real_time(clock, FRESH)
        self._in_flight = InFlight(self._hangs_after, settings.bytes_in_flight)
        self._longest_letting_go = in_real_time(clock, LONGEST_LETTING_GO)
        self._tasks: TaskGroup | None = None
        self._wake: Wake = nobody
        # In the database of the queues the store is out of reach, too, and nothing can be claimed.
        backoff = None if self._enlisting else self._probing
        self._sending = resource_of(transport).calls("cannot send due messages", log, breaker=breaker, backoff=backoff)
        self._full = Resource("every queue").calls("some queues take no messages now", log)
        error_queue = f"error queue {settings.error_queue}"
        self._refused = Resource(error_queue).calls(f"{error_queue} does not take messages", log)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Let batches go on while the next are taken; leaving waits for them (row 55), as long as that is bounded.

        Outside, and where store and queues share a database, :meth:`take` returns when its batch is done.
        """
        stop_listening = self._store.when_lost(self._in_flight.lose) or nobody
        self._metrics.dispatches(self, lambda: self._in_flight.held)
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = None if self._enlisting else tasks
                try:
                    yield
                finally:
                    self._tasks = None
                    self.store_deadlines.shorten()
            await self.finisher.write_remembered(at_once=True)
        finally:
            self.store_deadlines.restore()  # it may run again
            self._metrics.dispatches(self, None)
            stop_listening()

    async def take(
        self,
        now: datetime,
        limit: int = _CLAIMED_AT_ONCE,
        claim_held: Callable[[int], Awaitable[Sequence[Claim]]] | None = None,
    ) -> PollResult:
        """Deal with one batch; by default of what is due, which is held where limits of its destination say so."""
        await self.finisher.write_remembered()
        if await self._in_flight.wait_for_room(limit):
            # That took time: the poller looks at its clock, and may have to stop.
            return PollResult(0, more=True, has_asked=False)
        seconds = self._clock.monotonic()
        if pause := self._probing.remaining(seconds):
            return replace(self._paused(0, pause), has_asked=False)
        is_probe = self._probing.is_waiting
        limit = self.finisher.free_capacity(1 if is_probe else self._in_flight.affordable(limit))
        if not limit:
            return PollResult(0, more=False, next_attempt=self.finisher.next_attempt(None), has_asked=False)
        claims = await (self._claim_due(now, limit) if claim_held is None else claim_held(limit))
        began = self._clock.monotonic()
        self._metrics.fetched(len(claims), timedelta(seconds=began - seconds))
        wanted = self.finisher.skip_known(claims)
        try:
            if len(wanted) < len(claims):
                await self.finisher.write_remembered()
            wanted = await self._without_those_that_wait(wanted, now, began, are_held=claim_held is not None)
        except BaseException:  # cancelled: no batch has these claims yet, so nobody else would give them back
            with anyio.CancelScope(shield=True):
                back = [Release(claim, None) for claim in wanted]
                await within(self._clock, self._longest_letting_go, lambda: self.finisher.give_back(back))
            raise
        if wanted:
            batch = Batch(wanted, now, began, is_probe=is_probe)
            if is_probe and self._probing.is_waiting:  # no other batch has succeeded while this one was claimed
                self._probing.failed(began)  # until it has an answer
            self._in_flight.begin(batch)
            if self._tasks is None:
                await self._deliver(batch)
            else:
                self._tasks.start_soon(self._deliver, batch)
        if pause := self._probing.remaining(self._clock.monotonic()):
            return self._paused(len(wanted), pause)
        if len(claims) == limit or claim_held is not None:
            return PollResult(len(wanted), more=len(claims) == limit)
        next_attempt = await self.store_deadlines.call_apart(self._store.next_attempt)
        return PollResult(len(wanted), more=False, next_attempt=self.finisher.next_attempt(next_attempt))

    async def _claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        await self.limits.refresh()
        claims = await self.store_deadlines.call_apart(lambda: self._store.claim_due(now, limit), self.give_back_late)
        if not (claims and self.limits.any):
            return claims
        try:
            await self.limits.learn({claim.message.destination for claim in claims})
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.finisher.give_back([Release(claim, None) for claim in claims])
            raise
        return claims

    def _paused(self, count: int, pause: float) -> PollResult:
        """Return the result of a look: no claims for ``pause`` seconds, but outcomes may be written earlier."""
        left = self.finisher.next_attempt(self._after(pause), claims_from=self._clock.monotonic() + pause)
        return PollResult(count, more=False, next_attempt=left)

    def _after(self, seconds: float) -> datetime:
        return later(self._clock.now(), timedelta(seconds=seconds))

    async def give_back_late(self, claims: Sequence[Claim]) -> None:
        """Give back the claims of a call that was answered after its deadline."""
        if claims:
            log.warning("%d messages were claimed by a call that had been given up, and go back", len(claims))
            await self.finisher.give_back([Release(claim, None) for claim in claims])
            self._wake()

    async def _without_those_that_wait(
        self, claims: Sequence[Claim], now: datetime, seconds: float, *, are_held: bool
    ) -> Sequence[Claim]:
        """Give back claims of destinations that take nothing now, and of messages being sent; return the rest.

        A message being sent was claimed again because its first claim became void: sent again, it would arrive twice.
        Where limits have held a message, they have let it through by now. What has expired by ``now`` is not sent, so
        limits do not hold it.
        """
        being_sent = self._in_flight.among([claim.message.message_id for claim in claims])
        if not self._destinations and not being_sent and (are_held or not self.limits.any):
            return claims
        wanted, waiting = list[Claim](), list[Release]()
        at = self._clock.now()  # one time for all: what is attempted at one time is given back in one call
        for claim in claims:
            is_being_sent = claim.message.message_id in being_sent
            if self.limits.any and not is_being_sent and is_expired(claim.message, now):
                wanted.append(claim)
                continue
            if not are_held and not is_being_sent and (place := self.limits.hold(claim)) is not None:
                waiting.append(Release(claim, place))  # before it counts as the probe of a destination
                continue
            wait = self._destinations.wait_seconds(claim.message.destination, seconds)
            if is_being_sent:
                wait = max(wait, retry_delay(0).total_seconds())
            if wait:
                waiting.append(Release(claim, later(at, timedelta(seconds=wait))))
            else:
                wanted.append(claim)
        if waiting:
            await self.finisher.give_back(waiting)
        return wanted

    async def listen(self, wake: Wake) -> Callable[[], None]:
        stop_listening = await self.store_deadlines.call_apart(lambda: self._store.listen(wake), _stop_at_once)
        self._wake = wake

        def stop() -> None:
            self._wake = nobody
            stop_listening()

        return stop

    # --- a batch ------------------------------------------------------------------------------------------------

    async def _deliver(self, batch: Batch) -> None:
        try:
            await self._send_and_settle(batch)
        except BaseException:  # cancelled: the process may go on, and with it its claims
            with anyio.CancelScope(shield=True):
                await within(self._clock, self._longest_letting_go, lambda: self._let_go(batch))
            sent = batch.sent()  # what was sent and could not be removed within that time is only removed
            self.finisher.remember_sent(sent, are_held=True)
            batch.settled(sent)
            self.finisher.release_later([Release(claim, None) for claim in batch.held.values()])
            raise
        finally:
            self._in_flight.end(batch)
        if self._tasks is not None and (batch.gave_back or self.finisher.unwritten):
            self._wake()  # a message given back, or unwritten, may be the next to be attempted

    async def _send_and_settle(self, batch: Batch) -> None:
        now = batch.now
        expired, wanted, doomed = list[Claim](), list[Claim](), list[tuple[Claim, PostdateError, bool]]()
        seconds = self._clock.monotonic()
        for claim in batch.held.values():
            if is_expired(claim.message, now):
                expired.append(claim)
            elif self._attempts and (error := self._attempts.take_doom(claim.message, seconds)) is not None:
                doomed.append((claim, error, True))
                batch.counted.add(claim.message.message_id)
            else:
                wanted.append(claim)
        batch.groups = self._groups(wanted, batch.began)
        async with anyio.create_task_group() as tasks:
            for group in batch.groups:
                tasks.start_soon(self._see_through, batch, group)
            if expired:
                await self.finisher.finish(expired, Outcome.EXPIRED)
                batch.settled(expired)
                self._metrics.count("expired", len(expired))
            await self._failed(batch, doomed)
            if batch.groups:
                await self._settle_what_answers(batch)

    async def _settle_what_answers(self, batch: Batch) -> None:
        """Wait for all destinations, :data:`PATIENCE` after the first at most; later groups settle by themselves."""
        await self._clock.wait_for(batch.first_answer, self._hangs_after)
        if not batch.all_answered.is_set():
            await self._clock.wait_for(batch.all_answered, self._patience)
        answered = [group for group in batch.groups if group.errors is not None]
        batch.is_late = len(answered) < len(batch.groups)
        if batch.is_late:
            self._in_flight.give_up_place(batch)
        await self._settle(batch, answered)
        if not batch.all_answered.is_set():
            await batch.cut_off(self._clock, self._longest_send)

    def _groups(self, claims: Sequence[Claim], began: float) -> list[Group]:
        """Return one group for each call to the transport: of all messages, or of those of one destination."""
        if self._transport.capabilities.pipelines and self._enlisting is None:
            return [Group("", claims, began)] if claims else []
        by_destination: defaultdict[str, list[Claim]] = defaultdict(list)
        for claim in claims:
            by_destination[claim.message.destination].append(claim)
        return [Group(destination, group, began) for destination, group in by_destination.items()]

    async def _see_through(self, batch: Batch, group: Group) -> None:
        group.errors = await self._answer(batch, group)
        batch.answered()
        if batch.is_late:
            await self._settle(batch, [group])

    # --- sending ------------------------------------------------------------------------------------------------

    async def _answer(self, batch: Batch, group: Group) -> Sequence[PostdateError | None]:
        if self._enlisting is not None:
            group.begin_turn(self._clock.monotonic())
            return await self._answer_enlisted(group.claims)
        with group.scope:
            if not group.destination:
                return await self._attempt(batch, group)
            if not self._in_flight.is_full(group.destination, self._clock.monotonic()):
                async with self._in_flight.turn(group.destination, self._clock):
                    return await self._attempt(batch, group)
        return [self._no_answer(group.destination)] * len(group.claims)

    async def _attempt(self, batch: Batch, group: Group) -> Sequence[PostdateError | None]:
        group.begin_turn(self._clock.monotonic())
        self._notice_losses(batch, group)
        if not group.claims:
            return []

        async def answered_late(errors: Sequence[PostdateError | None]) -> None:
            """Remember these messages as sent: claimed again, they are only removed."""
            sent = [claim for claim, error in zip(group.claims, errors, strict=False) if error is None]
            self.finisher.remember_sent(sent)

        return await self._send([to_envelope(claim.message) for claim in group.claims], answered_late)

    def _notice_losses(self, batch: Batch, group: Group) -> None:
        """Drop claims that others may have by now: this process may have stood still since it claimed them."""
        ours = [claim for claim in group.claims if batch.is_ours(claim, self._store)]
        if len(ours) < len(group.claims):
            log.warning("%d claims were lost before their messages could be sent", len(group.claims) - len(ours))
            batch.settled([claim for claim in group.claims if claim.message.message_id in batch.lost])
            group.claims = ours

    async def _send(
        self,
        envelopes: Sequence[Envelope],
        late: Callable[[Sequence[PostdateError | None]], Awaitable[None]] | None = None,
    ) -> Sequence[PostdateError | None]:
        began = self._clock.monotonic()
        try:
            with tracing.current.dispatching([each.headers for each in envelopes]):
                errors = await self._send_deadlines.call_apart(
                    lambda: self._transport.send(envelopes, self._clock.now()), late
                )
        except PostdateError as error:
            return [error] * len(envelopes)
        finally:
            self._metrics.sent(len(envelopes), timedelta(seconds=self._clock.monotonic() - began))
        try:
            return checked_answers(self._transport, len(envelopes), errors)
        except TransportUnavailable as error:
            return [error] * len(envelopes)

    async def _answer_enlisted(self, claims: Sequence[Claim]) -> Sequence[PostdateError | None]:
        """Send and remove all in one transaction; where one fails, each in its own, so as not to undo the others."""
        error = await self._send_enlisted(claims, [to_envelope(claim.message) for claim in claims])
        if error is None or (is_outage(error) and not may_be_of_one(error)) or len(claims) == 1:
            return [error] * len(claims)
        return [await self._send_enlisted([claim], [to_envelope(claim.message)]) for claim in claims]

    async def _send_enlisted(
        self,
        claims: Sequence[Claim],
        envelopes: Sequence[Envelope],
        outcome: Outcome = Outcome.DELIVERED,
        detail: str = "",
    ) -> PostdateError | None:
        """Send and remove messages in one transaction."""
        assert self._enlisting is not None
        now = self._clock.now()
        try:
            with translate_store_errors(self._store):
                work = self._enlisting.finishing(claims, outcome, now, detail)
            errors = await self._send_deadlines.call_apart(lambda: self._transport.send(envelopes, now, work=[work]))
            error = next(filter(None, errors), None)
        except PostdateError as failure:
            error = failure
        if error is None:
            self._journal.ended(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], now, detail)
        return error

    # --- afterwards ---------------------------------------------------------------------------------------------

    async def _settle(self, batch: Batch, groups: Sequence[Group]) -> None:
        sent, failures = list[Claim](), list[tuple[Claim, PostdateError, bool]]()
        for group in groups:
            for claim, error in zip(group.claims, group.errors or (), strict=True):
                if error is None:
                    sent.append(claim)
                else:
                    failures.append((claim, error, group.attempted))
        if sent:
            self._note_success(sent)
            await self._remove(batch, sent)
        failed = [
            (claim, self._blamed(batch, claim, error), attempted)
            for claim, error, attempted in failures
            if claim.message.message_id not in batch.lost
        ]
        batch.settled([claim for claim, _, _ in failures if claim.message.message_id in batch.lost])
        if failed:
            self._in_flight.give_up_place(batch)
            self._metrics.count("failed", len(failed))
            await self._wait_out(batch, [(claim, error) for claim, error, _ in failed if is_outage(error)])
            await self._failed(batch, [each for each in failed if not is_outage(each[1])])

    def _blamed(self, batch: Batch, claim: Claim, error: PostdateError) -> PostdateError:
        """Turn an outage that comes with this message, whenever it is sent, into a failure of the message.

        Otherwise it would be the probe for ever, and nothing else would be sent.
        """
        is_suspect = batch.is_probe and isinstance(error, TransportUnreachable)
        if is_suspect and self._attempts.failed(claim.message.message_id) > _BORNE_AS_PROBE:
            return TransportUnavailable(f"whenever this message is sent, and no other: {error}")
        return error

    def _note_success(self, sent: Sequence[Claim]) -> None:
        self._attempts.succeeded(*(claim.message.message_id for claim in sent))
        seconds = self._clock.monotonic()
        if self._sending.succeeded(seconds):
            self._wake()
        if self._destinations:
            for destination in {claim.message.destination for claim in sent}:
                self._destinations.succeeded(destination)
            if not self._destinations:
                self._full.succeeded(seconds)

    async def _remove(self, batch: Batch, sent: Sequence[Claim]) -> None:
        if self._enlisting is None:
            await self.finisher.finish(sent, Outcome.DELIVERED)
        batch.settled(sent)
        if log.isEnabledFor(logging.DEBUG):
            _log_delivered(sent, self._clock.now())
        if self._metrics is not NO_METRICS:
            now, to = self._clock.now(), Counter(claim.message.destination for claim in sent)
            self._metrics.delivered(to, [(now - claim.message.due).total_seconds() for claim in sent])

    # --- failures -----------------------------------------------------------------------------------------------

    async def _wait_out(self, batch: Batch, failed: Sequence[tuple[Claim, PostdateError]]) -> None:
        """Give claims back after an outage: their messages have not failed, so nothing is counted or recorded."""
        seconds, noted, back = self._clock.monotonic(), set[str](), list[Release]()
        at = self._clock.now()
        for claim, error in failed:
            destination = claim.message.destination if isinstance(error, DestinationUnavailable) else ""
            if destination not in noted:
                noted.add(destination)
                self._note_outage(destination, error, seconds)
            wait = self._destinations.next_turn(destination, seconds) if destination else self._wait(batch, seconds)
            back.append(Release(claim, later(at, timedelta(seconds=wait)) if wait else None))
        if back:
            await self._give_back(batch, back)

    def _note_outage(self, destination: str, error: PostdateError, seconds: float) -> None:
        """Note an outage of one destination, or of the whole transport: ``""``."""
        if destination:
            self._full.failed(error, seconds)
            if self._destinations.failed(destination, seconds):  # known by now, it says nothing about others
                self._sending.refused(error, seconds)
        else:
            self._sending.failed(error, seconds)

    def _wait(self, batch: Batch, seconds: float) -> float:
        """Return the seconds until a message may be attempted again while the transport is out of reach."""
        if self._enlisting is not None:  # with the queues the store is out of reach: looks for what is due fail, too
            return retry_delay(0).total_seconds()
        return self._probing.remaining(seconds) + ANOTHER_SECONDS if batch.is_probe else 0.0

    async def _failed(self, batch: Batch, failed: Sequence[tuple[Claim, PostdateError, bool]]) -> None:
        if not failed:
            return
        back, gone = list[Release](), 0
        _log_failures([(claim, error) for claim, error, _ in failed])
        for claim, error, attempted in failed:
            may_go = attempted and not batch.error_queue_is_down
            again = await self._move_or_retry(batch, claim, error, attempted=may_go)
            if again is None:
                batch.settled([claim])
                gone += claim.message.message_id not in batch.lost
            else:
                back.append(again)
        if back:
            await self._give_back(batch, back)
            self._metrics.count("retried", len(back))
        if gone:
            self._metrics.count("moved_to_error", gone)

    async def _give_back(self, batch: Batch, back: Sequence[Release]) -> None:
        batch.gave_back = True
        await self.finisher.give_back(back)
        batch.settled([each.claim for each in back])

    async def _move_or_retry(
        self, batch: Batch, claim: Claim, error: PostdateError, *, attempted: bool
    ) -> Release | None:
        """Return how a message is given back; ``None``: it is in the error queue, or another process has it.

        A message that was not ``attempted`` is retried: it only waited for its turn, or the error queue refused another
        one of its batch, and claims are not held long enough to ask again for each.
        """
        failures, retries = claim.message.number_of_failures, self._settings.number_of_retries
        decision = after_dispatch_failed(error, failures, retries, self._settings.error_queue)
        if error.transient:
            self._sending.refused(error, self._clock.monotonic())
        again = self._retry(claim, error, reason_of(error))
        is_counted = claim.message.message_id in batch.counted
        if not attempted or isinstance(decision, DelayedRetry):
            return self._still_doomed(claim, error, again) if is_counted else again
        if not batch.is_ours(claim, self._store):
            return None
        if self._clock.monotonic() - batch.began > self._fresh.total_seconds():
            # The destination is slow, or this process stood still, and others have the message and may have sent it.
            # Whoever claims it next, has it beyond doubt; if that is us, it leaves for the error queue at once.
            if is_counted:
                return self._still_doomed(claim, error, again)
            self._attempts.doom(claim.message, error, failures + 1, self._clock.monotonic())
            return again
        return await self._move_to_error(batch, claim, error)

    def _still_doomed(self, claim: Claim, error: PostdateError, again: Release) -> Release:
        """Retry without another record: the failure is written already, only the error copy could not leave."""
        self._attempts.doom(claim.message, error, claim.message.number_of_failures, self._clock.monotonic())
        return replace(again, reason=None)

    def _retry(self, claim: Claim, error: PostdateError, reason: str) -> Release:
        pause = retry_delay(claim.message.number_of_failures, error)
        return Release(claim, later(self._clock.now(), pause), reason)

    async def _move_to_error(self, batch: Batch, claim: Claim, error: PostdateError) -> Release | None:
        """Send the error copy, then remove the message; when the error queue fails, too, it stays (row 41).

        A copy that is too large goes in brief. If even that is refused, or none can be made of what the row holds, the
        store marks the message as unreadable; where it cannot, the message stays and waits longer each time.
        """
        resolution, failure = Resolution.ERROR_COPY, error
        while resolution in (Resolution.ERROR_COPY, Resolution.BRIEF_ERROR_COPY):
            if not batch.is_ours(claim, self._store):
                return None
            refused = await self._send_copy(claim, error, brief=resolution is Resolution.BRIEF_ERROR_COPY)
            if refused is None:
                self._refused.succeeded(self._clock.monotonic())
                self._failure_rate.success()
                log.error("message %s moved to error queue %s", claim.message.message_id, self._settings.error_queue)
                return None
            failure, resolution = (
                refused,
                after_copy(resolution, refused) if is_lasting(refused) else Resolution.REQUEUE,
            )
        if resolution is Resolution.STUCK:
            why = f"it cannot be sent ({reason_of(error)}), nor its copy to the error queue ({reason_of(failure)})"
            if await self.finisher.mark_unreadable(claim, why):
                return None
        self._refused.failed(failure, self._clock.monotonic())
        self._failure_rate.failure(failure, self._clock.monotonic())
        batch.error_queue_is_down = failure.transient
        again = self._retry(claim, failure, f"error queue: {reason_of(failure)}")
        if claim.message.message_id in batch.counted and is_outage(failure):
            return self._still_doomed(claim, error, again)
        return again

    async def _send_copy(self, claim: Claim, error: PostdateError, *, brief: bool) -> PostdateError | None:
        detail = reason_of(error)
        try:
            copy = self._settings.error_copy(claim.message, error, self._clock.now(), brief=brief)
        except MessageError as failure:  # its row holds what nobody could have stored
            return failure
        if self._enlisting is not None:
            return await self._send_enlisted([claim], [copy], Outcome.FAILED, detail)
        (failure,) = await within(self._clock, self._longest_send, lambda: self._send([copy])) or [
            self._no_answer(copy.destination)
        ]
        if failure is None:
            await self.finisher.finish([claim], Outcome.FAILED, detail)
        return failure

    def _no_answer(self, destination: str) -> PostdateError:
        """Return the error of a send that timed out: an outage, which says nothing about the messages."""
        text = f"did not answer within {LONGEST_SEND.total_seconds():g} s"
        if destination:
            return DestinationUnavailable(f"{destination} {text}")
        return TransportUnreachable(f"{type(self._transport).__name__} {text}")

    async def _let_go(self, batch: Batch) -> None:
        """End a batch in the middle: remove messages that were sent, give the rest back."""
        sent = batch.sent()
        if sent:
            await self._remove(batch, sent)
        await self._give_back(batch, [Release(claim, None) for claim in batch.held.values()])


async def _stop_at_once(stop_listening: Callable[[], None]) -> None:
    stop_listening()


def _log_failures(failed: Sequence[tuple[Claim, PostdateError]]) -> None:
    """Log one line for each destination and kind of failure: a thousand messages of one batch say no more than one."""
    kinds: defaultdict[tuple[str, str], list[tuple[Claim, PostdateError]]] = defaultdict(list)
    for claim, error in failed:
        kinds[claim.message.destination, error.code].append((claim, error))
    for (destination, _), (first, *others) in kinds.items():
        more = f" and {len(others)} more" if others else ""
        log.error("cannot send message %s%s to %s: %s", first[0].message.message_id, more, destination, first[1])


def _log_delivered(sent: Sequence[Claim], now: datetime) -> None:
    destinations = list(dict.fromkeys(claim.message.destination for claim in sent))
    others = f" and {len(destinations) - 1} other queues" if len(destinations) > 1 else ""
    late = (now - min(claim.message.due for claim in sent)) / timedelta(milliseconds=1)
    log.debug("%d messages delivered to %s%s, latest %.0f ms late", len(sent), destinations[0], others, late)
