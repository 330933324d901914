"""Claims due messages in batches. Each message is then sent and removed, or released, or moved to the error queue.

A message is sent first and removed afterwards. If the process ends in between, the message is sent again with the same
id (at least once). Where store and queues share a database, sending and removing are one transaction.
Source: ADR 0002.
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
from postdate.core.due.in_flight import HANGS_AFTER, Batch, Group, InFlight, run_within
from postdate.core.due.poller import PollResult
from postdate.core.due.recovery import DispatchRecovery
from postdate.core.due.sending import Sender
from postdate.core.expiry import is_expired
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures, do_nothing
from postdate.core.health.deadlines import CALL_DEADLINE, Deadlines
from postdate.core.health.message_memory import MessageMemory, Release
from postdate.core.limits import LimitsCache
from postdate.core.recoverability import DispatchSettings, retry_delay
from postdate.errors import PostdateError
from postdate.ports import Claim, ClaimingStore, Outcome, Transport, Wake
from postdate.runtime.reporting import NO_METRICS, Metrics

PATIENCE = timedelta(milliseconds=250)
"""How long the answered groups of a batch wait for the other groups.

One call that finishes the whole batch costs a store less than one call for each group.
"""

_CLAIMED_AT_ONCE = 1_000
"""The largest number of messages claimed in one call."""

CANCELLED_BATCH_DEADLINE = timedelta(seconds=10)
"""The longest time that a cancelled batch has for removing and releasing its messages.

Claims that it still has after this time are released when the store is closed.
"""

log = logging.getLogger("postdate.dispatcher")


class Dispatcher:
    """Claims due messages in batches and sends them. Batches overlap, and destinations are served concurrently.

    One call removes a batch when all its destinations have answered. A destination that does not answer does not delay
    the others: after :data:`PATIENCE` their messages are removed, and the unanswered send goes on alone until
    `sending.LONGEST_SEND`. The circuit breaker does not pause the dispatcher. Instead each message waits longer
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
        self._memory = MessageMemory()
        self.finisher = Finisher(store, self.store_deadlines, clock, failure_rate, journal, self._memory)
        # Real time, as durations of `clock`: a scaled clock does not make a network faster.
        self._hangs_after = in_real_time(clock, HANGS_AFTER)
        self._patience = in_real_time(clock, PATIENCE)
        self._cancelled_batch_deadline = in_real_time(clock, CANCELLED_BATCH_DEADLINE)
        self._in_flight = InFlight(self._hangs_after, settings.bytes_in_flight)
        self._sender = Sender(store, transport, clock, self.finisher, self._in_flight, metrics, journal, call_deadline)
        self._recovery = DispatchRecovery(
            store,
            transport,
            settings,
            clock,
            self._sender,
            self.finisher,
            self._memory,
            breaker,
            failure_rate,
            metrics,
        )
        self._tasks: TaskGroup | None = None
        """Tasks of overlapping batches.

        ``None`` outside of :meth:`overlap_batches`, and where store and queues share a database.
        """
        self._wake: Wake = do_nothing
        """Wakes the poller."""

    @asynccontextmanager
    async def overlap_batches(self) -> AsyncGenerator[None]:
        """Let a batch go on while the next ones are claimed. Leaving the context waits for all batches (row 55).

        That wait is bounded, as sends and calls of the store have deadlines. Outside of this context, and where store
        and queues share a database, :meth:`deliver_due` returns when its batch is done.
        """
        stop_listening = self._store.listen_for_lost_claims(self._in_flight.remember_lost) or do_nothing
        self._metrics.register_dispatcher(self, lambda: self._in_flight.claim_count)
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = None if self._sender.enlisting_store else tasks
                try:
                    yield
                finally:
                    self._tasks = None
                    self.store_deadlines.shorten()
            await self.finisher.write_outcomes(at_once=True)
        finally:
            self.store_deadlines.restore()  # the dispatcher may run again
            self._metrics.register_dispatcher(self, None)
            stop_listening()

    async def deliver_due(
        self,
        now: datetime,
        limit: int = _CLAIMED_AT_ONCE,
        claim_from_lane: Callable[[int], Awaitable[Sequence[Claim]]] | None = None,
    ) -> PollResult:
        """Claim one batch and deliver it, or start its delivery.

        Args:
            now: instant of the poll; messages due strictly before it are claimed.
            limit: the largest number of messages to claim.
            claim_from_lane: claims messages of a lane instead of due messages. Without it, due messages whose
                destination is limited are moved to the lane of that destination and not sent.
        """
        await self.finisher.write_outcomes()
        if await self._in_flight.wait_for_capacity(limit):
            # The wait may have been long. The poller must read its clock again, and may have to stop.
            return PollResult(0, has_more=True, has_polled=False)
        seconds = self._clock.monotonic()
        if pause := self._recovery.probing.remaining(seconds):
            return replace(self._pause_result(0, pause), has_polled=False)
        is_probe = self._recovery.probing.is_waiting
        limit = self.finisher.free_capacity(1 if is_probe else self._in_flight.affordable_count(limit))
        if not limit:
            return PollResult(0, has_more=False, next_attempt=self.finisher.next_attempt(None), has_polled=False)
        claims = await (self._claim_due(now, limit) if claim_from_lane is None else claim_from_lane(limit))
        claimed_at = self._clock.monotonic()
        self._metrics.report_poll(len(claims), timedelta(seconds=claimed_at - seconds))
        to_send = self.finisher.select_unsent(claims)
        try:
            if len(to_send) < len(claims):
                await self.finisher.write_outcomes()
            to_send = await self._release_waiting_claims(
                to_send, now, claimed_at, are_from_lane=claim_from_lane is not None
            )
        except BaseException:  # cancelled: no batch has these claims yet, so no other code would release them
            with anyio.CancelScope(shield=True):
                releases = [Release(claim, None) for claim in to_send]
                await run_within(
                    self._clock, self._cancelled_batch_deadline, lambda: self.finisher.release_claims(releases)
                )
            raise
        if to_send:
            batch = Batch(to_send, now, claimed_at, is_probe=is_probe)
            # Count the probe as failed until it is answered, so that no second probe is claimed meanwhile. Not if
            # another batch was sent while this one was claimed: then the transport is back.
            if is_probe and self._recovery.probing.is_waiting:
                self._recovery.probing.report_failure(claimed_at)
            self._in_flight.add_batch(batch)
            if self._tasks is None:
                await self._deliver(batch)
            else:
                self._tasks.start_soon(self._deliver, batch)
        if pause := self._recovery.probing.remaining(self._clock.monotonic()):
            return self._pause_result(len(to_send), pause)
        if len(claims) == limit or claim_from_lane is not None:
            return PollResult(len(to_send), has_more=len(claims) == limit)
        next_attempt = await self.store_deadlines.call_in_task(self._store.next_attempt)
        return PollResult(len(to_send), has_more=False, next_attempt=self.finisher.next_attempt(next_attempt))

    async def _claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        await self.limits.refresh()
        claims = await self.store_deadlines.call_in_task(
            lambda: self._store.claim_due(now, limit), self.release_late_claims
        )
        if not (claims and self.limits.has_limits):
            return claims
        try:
            await self.limits.load_destinations({claim.message.destination for claim in claims})
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.finisher.release_claims([Release(claim, None) for claim in claims])
            raise
        return claims

    def _pause_result(self, count: int, pause: float) -> PollResult:
        """Return a result after which the poller sleeps ``pause`` seconds, or less if outcomes are to be written."""
        next_attempt = self.finisher.next_attempt(
            self._instant_after(pause), claims_from=self._clock.monotonic() + pause
        )
        return PollResult(count, has_more=False, next_attempt=next_attempt)

    def _instant_after(self, seconds: float) -> datetime:
        return later(self._clock.now(), timedelta(seconds=seconds))

    async def release_late_claims(self, claims: Sequence[Claim]) -> None:
        """Release the claims of a call that was answered after its deadline, and wake the poller."""
        if claims:
            log.warning("%d messages were claimed by a call that had been given up, and go back", len(claims))
            await self.finisher.release_claims([Release(claim, None) for claim in claims])
            self._wake()

    async def _release_waiting_claims(
        self, claims: Sequence[Claim], now: datetime, seconds: float, *, are_from_lane: bool
    ) -> Sequence[Claim]:
        """Release claims whose messages must wait, and return the other claims.

        A message waits in three cases:

        - Its destination accepts no messages now.
        - It is being sent. It was claimed again because its first claim was lost; sent again, it would arrive twice.
        - Its destination is limited. With ``are_from_lane`` the claims come from a lane, and the limits have allowed
          them already. A message that has expired by ``now`` is not sent, so limits do not apply to it.
        """
        being_sent = self._in_flight.claimed_ids([claim.message.message_id for claim in claims])
        if not self._recovery.destinations and not being_sent and (are_from_lane or not self.limits.has_limits):
            return claims
        to_send, waiting = list[Claim](), list[Release]()
        at = self._clock.now()  # one time for all: releases with the same attempt time share one call of the store
        for claim in claims:
            is_being_sent = claim.message.message_id in being_sent
            if self.limits.has_limits and not is_being_sent and is_expired(claim.message, now):
                to_send.append(claim)
                continue
            if not are_from_lane and not is_being_sent and (lane_time := self.limits.assign_lane(claim)) is not None:
                # Check limits first: `wait_seconds` below would count this message as the probe of its destination.
                waiting.append(Release(claim, lane_time))
                continue
            wait = self._recovery.destinations.wait_seconds(claim.message.destination, seconds)
            if is_being_sent:
                wait = max(wait, retry_delay(0).total_seconds())
            if wait:
                waiting.append(Release(claim, later(at, timedelta(seconds=wait))))
            else:
                to_send.append(claim)
        if waiting:
            await self.finisher.release_claims(waiting)
        return to_send

    async def listen(self, wake: Wake) -> Callable[[], None]:
        stop_listening = await self.store_deadlines.call_in_task(lambda: self._store.listen(wake), _stop_listening)
        self._wake = wake

        def stop() -> None:
            self._wake = do_nothing
            stop_listening()

        return stop

    # --- a batch ------------------------------------------------------------------------------------------------

    async def _deliver(self, batch: Batch) -> None:
        try:
            await self._send_and_finish(batch)
        except BaseException:  # cancelled: the process may go on, and would keep these claims
            with anyio.CancelScope(shield=True):
                await run_within(self._clock, self._cancelled_batch_deadline, lambda: self._release_batch(batch))
            # Messages that were sent and not removed within that time must not be sent again; remove them later.
            sent = batch.sent_claims()
            self.finisher.remember_sent(sent, are_claimed=True)
            batch.forget_claims(sent)
            self.finisher.release_later([Release(claim, None) for claim in batch.open_claims.values()])
            raise
        finally:
            self._in_flight.forget_batch(batch)
        if self._tasks is not None and (batch.has_released or self.finisher.unwritten_outcomes):
            self._wake()  # the poller sleeps until an attempt that may be later than that of a released message

    async def _send_and_finish(self, batch: Batch) -> None:
        now = batch.now
        expired, to_send, doomed = list[Claim](), list[Claim](), list[tuple[Claim, PostdateError, bool]]()
        seconds = self._clock.monotonic()
        for claim in batch.open_claims.values():
            if is_expired(claim.message, now):
                expired.append(claim)
            elif self._memory and (error := self._memory.pop_doom(claim.message, seconds)) is not None:
                doomed.append((claim, error, True))
                batch.recorded_failures.add(claim.message.message_id)
            else:
                to_send.append(claim)
        batch.groups = self._sender.group_claims(to_send, batch.claimed_at)
        async with anyio.create_task_group() as tasks:
            for group in batch.groups:
                tasks.start_soon(self._send_group, batch, group)
            if expired:
                await self.finisher.finish(expired, Outcome.EXPIRED)
                batch.forget_claims(expired)
                self._metrics.count("expired", len(expired))
            await self._recovery.retry_or_move(batch, doomed)
            if batch.groups:
                await self._finish_answered_groups(batch)

    async def _finish_answered_groups(self, batch: Batch) -> None:
        """Wait for all destinations, at most :data:`PATIENCE` after the first answer; then settle the answered groups.

        Each later group settles by itself when it is answered.
        """
        await self._clock.wait_for(batch.first_answer, self._hangs_after)
        if not batch.all_answered.is_set():
            await self._clock.wait_for(batch.all_answered, self._patience)
        answered = [group for group in batch.groups if group.errors is not None]
        batch.is_late = len(answered) < len(batch.groups)
        if batch.is_late:
            self._in_flight.stop_counting(batch)
        await self._finish_groups(batch, answered)
        if not batch.all_answered.is_set():
            await batch.cancel_late_groups(self._clock, self._sender.longest_send)

    async def _send_group(self, batch: Batch, group: Group) -> None:
        group.errors = await self._sender.send_group(batch, group)
        batch.signal_answer()
        if batch.is_late:
            await self._finish_groups(batch, [group])

    # --- after the send -----------------------------------------------------------------------------------------

    async def _finish_groups(self, batch: Batch, groups: Sequence[Group]) -> None:
        sent, failures = list[Claim](), list[tuple[Claim, PostdateError, bool]]()
        for group in groups:
            for claim, error in zip(group.claims, group.errors or (), strict=True):
                if error is None:
                    sent.append(claim)
                else:
                    failures.append((claim, error, group.attempted))
        if sent:
            if self._recovery.report_sent(sent):
                self._wake()
            await self._finish_sent(batch, sent)
        to_recover = [each for each in failures if each[0].message.message_id not in batch.lost_ids]
        batch.forget_claims([claim for claim, _, _ in failures if claim.message.message_id in batch.lost_ids])
        if to_recover:
            self._in_flight.stop_counting(batch)
            await self._recovery.recover(batch, to_recover)

    async def _finish_sent(self, batch: Batch, sent: Sequence[Claim]) -> None:
        if self._sender.enlisting_store is None:
            await self.finisher.finish(sent, Outcome.DELIVERED)
        batch.forget_claims(sent)
        if log.isEnabledFor(logging.DEBUG):
            _log_delivered(sent, self._clock.now())
        if self._metrics is not NO_METRICS:
            now, to = self._clock.now(), Counter(claim.message.destination for claim in sent)
            self._metrics.report_deliveries(to, [(now - claim.message.due).total_seconds() for claim in sent])

    async def _release_batch(self, batch: Batch) -> None:
        """Stop a batch early: remove the messages that were sent, and release the other claims."""
        sent = batch.sent_claims()
        if sent:
            await self._finish_sent(batch, sent)
        await self._recovery.release_claims(batch, [Release(claim, None) for claim in batch.open_claims.values()])


async def _stop_listening(stop_listening: Callable[[], None]) -> None:
    stop_listening()


def _log_delivered(sent: Sequence[Claim], now: datetime) -> None:
    destinations = list(dict.fromkeys(claim.message.destination for claim in sent))
    others = f" and {len(destinations) - 1} other queues" if len(destinations) > 1 else ""
    late = (now - min(claim.message.due for claim in sent)) / timedelta(milliseconds=1)
    log.debug("%d messages delivered to %s%s, latest %.0f ms late", len(sent), destinations[0], others, late)
