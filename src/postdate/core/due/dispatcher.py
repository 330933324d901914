"""Claims due messages in batches. Each message is then sent and removed, or released, or moved to the error queue.

A message is sent first and removed afterwards. If the process ends in between, the message is sent again with the same
id (at least once). Where store and queues share a database, sending and removing are one transaction.
Source: specification 1.8, 1.10; ADR 0002.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta

import anyio
from anyio.abc import TaskGroup

from postdate.clock import Clock, in_real_time, later
from postdate.core.due.finishing import NO_JOURNAL, Finisher, Journal
from postdate.core.due.in_flight import HANGS_AFTER, Batch, Group, InFlight, within
from postdate.core.due.poller import PollResult
from postdate.core.due.recovery import DispatchRecovery
from postdate.core.due.sending import Sender
from postdate.core.expiry import is_expired
from postdate.core.health.attempts import Attempts, Release
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures, nobody
from postdate.core.health.deadlines import CALL_DEADLINE, Deadlines
from postdate.core.limits import LimitsCache
from postdate.core.recoverability import DispatchSettings, retry_delay
from postdate.errors import PostdateError
from postdate.ports import Claim, ClaimingStore, Outcome, Transport, Wake
from postdate.runtime.reporting import NO_METRICS, Metrics

PATIENCE = timedelta(milliseconds=250)
"""How long the answered groups of a batch wait for the other groups.

One call that finishes the whole batch costs a store less than one call a group.
"""

_CLAIMED_AT_ONCE = 1_000

LONGEST_LETTING_GO = timedelta(seconds=10)
"""The longest time that a cancelled batch has for removing and releasing its messages.

Claims that it still has after this time are released when the store is closed.
"""

log = logging.getLogger("postdate.dispatcher")


class Dispatcher:
    """Claims due messages in batches and sends them. Batches overlap, and destinations are served concurrently.

    One call removes a batch when all its destinations have answered. A destination that does not answer does not delay
    the others: after :data:`PATIENCE` their messages are removed, and the send to the silent destination goes on alone
    until `sending.LONGEST_SEND`. The circuit breaker does not pause the dispatcher. Instead each message waits longer
    after each of its failures, while all other messages go on (row 58).
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
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self.store_deadlines = Deadlines.of_store(store, clock, call_deadline)
        """Deadlines of all calls of the store, also those of a mover. They are shorter while the dispatcher stops."""
        self.limits = LimitsCache(store, self.store_deadlines, clock)
        self._attempts = Attempts()
        self.finisher = Finisher(store, self.store_deadlines, clock, failure_rate, journal, self._attempts)
        self._hangs_after = in_real_time(clock, HANGS_AFTER)
        self._patience = in_real_time(clock, PATIENCE)
        self._longest_letting_go = in_real_time(clock, LONGEST_LETTING_GO)
        self._in_flight = InFlight(self._hangs_after, settings.bytes_in_flight)
        self._sender = Sender(store, transport, clock, self.finisher, self._in_flight, metrics, journal, call_deadline)
        self._recovery = DispatchRecovery(
            store,
            transport,
            settings,
            clock,
            self._sender,
            self.finisher,
            self._attempts,
            breaker,
            failure_rate,
            metrics,
        )
        self._tasks: TaskGroup | None = None
        """Tasks of overlapping batches.

        ``None`` outside of :meth:`running`, and where store and queues share a database.
        """
        self._wake: Wake = nobody
        """Wakes the poller."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Let a batch go on while the next ones are claimed. Leaving the context waits for all batches (row 55).

        That wait is bounded, as sends and calls of the store have deadlines. Outside of this context, and where store
        and queues share a database, :meth:`take` returns when its batch is done.
        """
        stop_listening = self._store.when_lost(self._in_flight.lose) or nobody
        self._metrics.dispatches(self, lambda: self._in_flight.held)
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = None if self._sender.enlisting else tasks
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
        """Claim one batch and deliver it, or begin to.

        Args:
            now: instant of the poll; messages due strictly before it are claimed.
            limit: the most messages to claim.
            claim_held: claims messages of a lane instead of due messages. Without it, due messages whose destination
                is limited are moved to the lane of that destination and not sent.
        """
        await self.finisher.write_remembered()
        if await self._in_flight.wait_for_room(limit):
            # The wait took time. The poller must read its clock again, and may have to stop.
            return PollResult(0, more=True, has_asked=False)
        seconds = self._clock.monotonic()
        if pause := self._recovery.probing.remaining(seconds):
            return replace(self._paused(0, pause), has_asked=False)
        is_probe = self._recovery.probing.is_waiting
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
        except BaseException:  # cancelled: no batch has these claims yet, so no other code would release them
            with anyio.CancelScope(shield=True):
                back = [Release(claim, None) for claim in wanted]
                await within(self._clock, self._longest_letting_go, lambda: self.finisher.give_back(back))
            raise
        if wanted:
            batch = Batch(wanted, now, began, is_probe=is_probe)
            # Count the probe as failed until it is answered, so that no second probe is claimed meanwhile. Not if
            # another batch was sent while this one was claimed: then the transport is back.
            if is_probe and self._recovery.probing.is_waiting:
                self._recovery.probing.failed(began)
            self._in_flight.begin(batch)
            if self._tasks is None:
                await self._deliver(batch)
            else:
                self._tasks.start_soon(self._deliver, batch)
        if pause := self._recovery.probing.remaining(self._clock.monotonic()):
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
        """Return a result that says: claim nothing for ``pause`` seconds, but outcomes may be written earlier."""
        left = self.finisher.next_attempt(self._after(pause), claims_from=self._clock.monotonic() + pause)
        return PollResult(count, more=False, next_attempt=left)

    def _after(self, seconds: float) -> datetime:
        return later(self._clock.now(), timedelta(seconds=seconds))

    async def give_back_late(self, claims: Sequence[Claim]) -> None:
        """Release the claims of a call that was answered after its deadline, and wake the poller."""
        if claims:
            log.warning("%d messages were claimed by a call that had been given up, and go back", len(claims))
            await self.finisher.give_back([Release(claim, None) for claim in claims])
            self._wake()

    async def _without_those_that_wait(
        self, claims: Sequence[Claim], now: datetime, seconds: float, *, are_held: bool
    ) -> Sequence[Claim]:
        """Release claims whose messages must wait, and return the other claims.

        A message waits in three cases:

        - Its destination takes no messages now.
        - It is being sent. It was claimed again because its first claim was lost; sent again, it would arrive twice.
        - Its destination is limited. With ``are_held`` the claims come from a lane, and the limits have allowed them
          already. A message that has expired by ``now`` is not sent, so limits do not apply to it.
        """
        being_sent = self._in_flight.among([claim.message.message_id for claim in claims])
        if not self._recovery.destinations and not being_sent and (are_held or not self.limits.any):
            return claims
        wanted, waiting = list[Claim](), list[Release]()
        at = self._clock.now()  # one time for all: releases with the same attempt time share one call of the store
        for claim in claims:
            is_being_sent = claim.message.message_id in being_sent
            if self.limits.any and not is_being_sent and is_expired(claim.message, now):
                wanted.append(claim)
                continue
            if not are_held and not is_being_sent and (place := self.limits.hold(claim)) is not None:
                # Check limits first: `wait_seconds` below would count this message as the probe of its destination.
                waiting.append(Release(claim, place))
                continue
            wait = self._recovery.destinations.wait_seconds(claim.message.destination, seconds)
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
        except BaseException:  # cancelled: the process may go on, and would keep these claims
            with anyio.CancelScope(shield=True):
                await within(self._clock, self._longest_letting_go, lambda: self._let_go(batch))
            # Messages that were sent and not removed within that time must not be sent again; remove them later.
            sent = batch.sent()
            self.finisher.remember_sent(sent, are_held=True)
            batch.settled(sent)
            self.finisher.release_later([Release(claim, None) for claim in batch.held.values()])
            raise
        finally:
            self._in_flight.end(batch)
        if self._tasks is not None and (batch.gave_back or self.finisher.unwritten):
            self._wake()  # the poller sleeps until an attempt that may be later than that of a released message

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
        batch.groups = self._sender.groups(wanted, batch.began)
        async with anyio.create_task_group() as tasks:
            for group in batch.groups:
                tasks.start_soon(self._see_through, batch, group)
            if expired:
                await self.finisher.finish(expired, Outcome.EXPIRED)
                batch.settled(expired)
                self._metrics.count("expired", len(expired))
            await self._recovery.retry_or_move(batch, doomed)
            if batch.groups:
                await self._settle_what_answers(batch)

    async def _settle_what_answers(self, batch: Batch) -> None:
        """Wait for all destinations, at most :data:`PATIENCE` after the first answer; then settle the answered groups.

        Each later group settles by itself when it is answered.
        """
        await self._clock.wait_for(batch.first_answer, self._hangs_after)
        if not batch.all_answered.is_set():
            await self._clock.wait_for(batch.all_answered, self._patience)
        answered = [group for group in batch.groups if group.errors is not None]
        batch.is_late = len(answered) < len(batch.groups)
        if batch.is_late:
            self._in_flight.give_up_place(batch)
        await self._settle(batch, answered)
        if not batch.all_answered.is_set():
            await batch.cut_off(self._clock, self._sender.longest_send)

    async def _see_through(self, batch: Batch, group: Group) -> None:
        group.errors = await self._sender.answer(batch, group)
        batch.answered()
        if batch.is_late:
            await self._settle(batch, [group])

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
            if self._recovery.succeeded(sent):
                self._wake()
            await self._remove(batch, sent)
        to_recover = [each for each in failures if each[0].message.message_id not in batch.lost]
        batch.settled([claim for claim, _, _ in failures if claim.message.message_id in batch.lost])
        if to_recover:
            self._in_flight.give_up_place(batch)
            await self._recovery.recover(batch, to_recover)

    async def _remove(self, batch: Batch, sent: Sequence[Claim]) -> None:
        if self._sender.enlisting is None:
            await self.finisher.finish(sent, Outcome.DELIVERED)
        batch.settled(sent)
        if log.isEnabledFor(logging.DEBUG):
            _log_delivered(sent, self._clock.now())
        if self._metrics is not NO_METRICS:
            now, to = self._clock.now(), Counter(claim.message.destination for claim in sent)
            self._metrics.delivered(to, [(now - claim.message.due).total_seconds() for claim in sent])

    async def _let_go(self, batch: Batch) -> None:
        """End a batch early: remove the messages that were sent, and release the other claims."""
        sent = batch.sent()
        if sent:
            await self._remove(batch, sent)
        await self._recovery.give_back(batch, [Release(claim, None) for claim in batch.held.values()])


async def _stop_at_once(stop_listening: Callable[[], None]) -> None:
    stop_listening()


def _log_delivered(sent: Sequence[Claim], now: datetime) -> None:
    destinations = list(dict.fromkeys(claim.message.destination for claim in sent))
    others = f" and {len(destinations) - 1} other queues" if len(destinations) > 1 else ""
    late = (now - min(claim.message.due for claim in sent)) / timedelta(milliseconds=1)
    log.debug("%d messages delivered to %s%s, latest %.0f ms late", len(sent), destinations[0], others, late)
