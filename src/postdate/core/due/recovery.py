"""Handles due messages that could not be sent: releases them, retries them later, or moves them to the error queue.

:mod:`postdate.core.recoverability` decides; this module acts. Source: ADR 45.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from postdate.clock import Clock, in_real_time, later
from postdate.core import recoverability
from postdate.core.due.finishing import Finisher
from postdate.core.due.in_flight import Batch, run_within
from postdate.core.due.sending import Sender
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.health.destinations import ANOTHER_SECONDS, LONGEST_SECONDS, SHORTEST_SECONDS, Destinations
from postdate.core.health.message_memory import MessageMemory, Release
from postdate.errors import (
    DestinationUnavailable,
    MessageError,
    PostdateError,
    QueueNotFound,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.ports import Claim, ClaimingStore, Outcome, Transport
from postdate.runtime.reporting import Metrics, duration_text
from postdate.runtime.resource import Backoff, Resource, resource_of

FRESH_CLAIM_AGE = timedelta(seconds=10)
"""An error copy is sent only under a claim that is younger than this. Leases last longer, so the claim is in force.

A message with an older claim is released, and its error copy is sent after the next claim.
"""

_MOST_PROBE_FAILURES = 2
"""The number of times that a message may fail as the probe of a transport while other messages are sent in between.

After that the failure counts as a failure of the message, and not of the transport.
"""

log = logging.getLogger("postdate.dispatcher")


class _QueueMissing(DestinationUnavailable):
    """A queue does not exist yet, which is no failure of the transport: it delays the messages of this queue only."""

    transient = False


class DispatchRecovery:
    """The recovery of a dispatcher: handles messages that could not be sent.

    It remembers which destinations accept no messages. An outage is no failure of its messages: their claims are
    released, and no failure is counted.
    """

    def __init__(  # noqa: PLR0913 - collaborators; put together in one place
        self,
        store: ClaimingStore,
        transport: Transport,
        settings: recoverability.DispatchSettings,
        clock: Clock,
        sender: Sender,
        finisher: Finisher,
        memory: MessageMemory,
        breaker: RepeatedFailures,
        failure_rate: FailureRate,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._sender = sender
        self._finisher = finisher
        self._memory = memory
        self._failure_rate = failure_rate
        self._metrics = metrics
        # Real time, as a duration of `clock`.
        self._fresh_claim_age = in_real_time(clock, FRESH_CLAIM_AGE)
        self.probing = Backoff(SHORTEST_SECONDS, LONGEST_SECONDS)
        """Backoff of the transport. While the transport is out of reach only one message is claimed, as a probe.

        Another process may be able to send the other messages.
        """
        self.destinations = Destinations()
        # Where store and queues share a database, both are out of reach and nothing can be claimed: no probe is needed.
        backoff = None if sender.enlisting_store else self.probing
        self._transport_calls = resource_of(transport).calls(
            "cannot send due messages", log, breaker=breaker, backoff=backoff
        )
        self._queue_calls = Resource("every queue").calls("some queues accept no messages now", log)
        error_queue = f"error queue {settings.error_queue}"
        self._error_queue_calls = Resource(error_queue).calls(f"{error_queue} does not accept messages", log)

    def report_sent(self, sent: Sequence[Claim]) -> bool:
        """Report messages that were sent; return whether the transport was out of reach before."""
        self._memory.report_success(*(claim.message.message_id for claim in sent))
        seconds = self._clock.monotonic()
        is_back = self._transport_calls.report_success(seconds)
        if self.destinations:
            for destination in {claim.message.destination for claim in sent}:
                self.destinations.report_success(destination)
            if not self.destinations:
                self._queue_calls.report_success(seconds)
        return is_back

    async def recover(self, batch: Batch, failures: Sequence[tuple[Claim, PostdateError, bool]]) -> None:
        """Handle messages that could not be sent.

        Args:
            batch: batch of the claims.
            failures: the claim, the error, and whether a send was attempted at all.
        """
        self._metrics.count("failed", len(failures))
        failures = [
            (claim, self._error_to_handle(batch, claim, error), attempted) for claim, error, attempted in failures
        ]
        await self._release_after_outage(
            batch, [(claim, error) for claim, error, _ in failures if recoverability.is_outage(error)]
        )
        await self.retry_or_move(batch, [each for each in failures if not recoverability.is_outage(each[1])])

    def _error_to_handle(self, batch: Batch, claim: Claim, error: PostdateError) -> PostdateError:
        """Return the error to handle.

        A queue that is missing is first awaited, as if it were full: at a first deployment, its consumer may start
        later. An outage that occurs whenever this message is sent becomes its own failure. Otherwise the message would
        remain the probe for ever, and no other message would be sent.
        """
        if isinstance(error, QueueNotFound):
            wait, seconds = self._settings.missing_queue_wait, self._clock.monotonic()
            if self.destinations.should_wait_for(claim.message.destination, seconds, wait):
                return _QueueMissing(f"{error}; messages wait {duration_text(wait.total_seconds())} for it")
        is_suspect = batch.is_probe and isinstance(error, TransportUnreachable)
        if is_suspect and self._memory.report_failure(claim.message.message_id) > _MOST_PROBE_FAILURES:
            return TransportUnavailable(f"this error occurs only when this message is sent: {error}")
        return error

    async def _release_after_outage(self, batch: Batch, failed: Sequence[tuple[Claim, PostdateError]]) -> None:
        """Release claims after an outage. Their messages have not failed, so no failure is counted or recorded."""
        seconds, reported, releases = self._clock.monotonic(), set[str](), list[Release]()
        at = self._clock.now()
        for claim, error in failed:
            destination = claim.message.destination if isinstance(error, DestinationUnavailable) else ""
            if destination not in reported:
                reported.add(destination)
                self._report_outage(destination, error, seconds)
            wait = (
                self.destinations.retry_wait_seconds(destination, seconds)
                if destination
                else self._wait_seconds(batch, seconds)
            )
            releases.append(Release(claim, later(at, timedelta(seconds=wait)) if wait else None))
        if releases:
            await self.release_claims(batch, releases)

    def _report_outage(self, destination: str, error: PostdateError, seconds: float) -> None:
        """Report an outage of one destination, or of the whole transport if ``destination`` is ``""``."""
        if destination:
            self._queue_calls.report_failure(error, seconds)
            # Only a new outage counts against the transport. A destination that is known to be full would trip the
            # breaker although other destinations work.
            is_new = self.destinations.report_refusal(destination, seconds, is_missing=isinstance(error, _QueueMissing))
            if is_new and error.transient:
                self._transport_calls.report_refusal(error, seconds)
        else:
            self._transport_calls.report_failure(error, seconds)

    def _wait_seconds(self, batch: Batch, seconds: float) -> float:
        """Return the seconds until a message may be attempted again while the transport is out of reach; 0: at once."""
        # The store is in the same database and out of reach: polls fail, too.
        if self._sender.enlisting_store is not None:
            return recoverability.retry_delay(0).total_seconds()
        return self.probing.remaining(seconds) + ANOTHER_SECONDS if batch.is_probe else 0.0

    async def retry_or_move(self, batch: Batch, failures: Sequence[tuple[Claim, PostdateError, bool]]) -> None:
        """Release failed messages for a retry, or move them to the error queue."""
        if not failures:
            return
        releases, moved_count = list[Release](), 0
        _log_failures([(claim, error) for claim, error, _ in failures])
        for claim, error, attempted in failures:
            may_move = attempted and not batch.is_error_queue_down
            release = await self._move_or_retry(batch, claim, error, attempted=may_move)
            if release is None:
                batch.forget_claims([claim])
                moved_count += claim.message.message_id not in batch.lost_ids
            else:
                releases.append(release)
        if releases:
            await self.release_claims(batch, releases)
            self._metrics.count("retried", len(releases))
        if moved_count:
            self._metrics.count("moved_to_error", moved_count)

    async def release_claims(self, batch: Batch, releases: Sequence[Release]) -> None:
        """Release claims of a batch; the poller is woken when the batch ends."""
        batch.has_released = True
        await self._finisher.release_claims(releases)
        batch.forget_claims([each.claim for each in releases])

    async def _move_or_retry(
        self, batch: Batch, claim: Claim, error: PostdateError, *, attempted: bool
    ) -> Release | None:
        """Return how to release a message; ``None`` if it is in the error queue, or another process may have it.

        A message that was not ``attempted`` is retried: it only waited for a slot, or the error queue refused another
        message of the batch. Claims do not last long enough to try the error queue once for each message.
        """
        failures, retries = claim.message.number_of_failures, self._settings.number_of_retries
        decision = recoverability.decide_dispatch_failure(error, failures, retries, self._settings.error_queue)
        if error.transient:
            self._transport_calls.report_refusal(error, self._clock.monotonic())
        release = self._retry_release(claim, error, recoverability.reason_of(error))
        is_counted = claim.message.message_id in batch.recorded_failures
        if not attempted or isinstance(decision, recoverability.DelayedRetry):
            return self._release_doomed(claim, error, release) if is_counted else release
        if not batch.is_in_force(claim, self._store):
            return None
        if self._clock.monotonic() - batch.claimed_at > self._fresh_claim_age.total_seconds():
            # The destination is slow, or this process was suspended. Another process may have claimed the message and
            # sent it. Only the next claim proves which process has it. If this process makes that claim, it sends the
            # error copy at once.
            if is_counted:
                return self._release_doomed(claim, error, release)
            self._memory.doom(claim.message, error, failures + 1, self._clock.monotonic())
            return release
        return await self._move_to_error(batch, claim, error)

    def _release_doomed(self, claim: Claim, error: PostdateError, release: Release) -> Release:
        """Retry without another record: the failure is recorded already, only the error copy could not be sent."""
        self._memory.doom(claim.message, error, claim.message.number_of_failures, self._clock.monotonic())
        return replace(release, reason=None)

    def _retry_release(self, claim: Claim, error: PostdateError, reason: str) -> Release:
        pause = recoverability.retry_delay(claim.message.number_of_failures, error)
        return Release(claim, later(self._clock.now(), pause), reason)

    async def _move_to_error(self, batch: Batch, claim: Claim, error: PostdateError) -> Release | None:
        """Send the error copy, then remove the message; return how to release it if the error queue fails (row 41).

        If the copy is too large, a brief copy is sent. If the error queue refuses that too, or no copy can be made from
        the row, the store marks the message as unreadable. If the store cannot, the message stays and waits longer
        after each attempt.
        """
        resolution, failure = recoverability.Resolution.ERROR_COPY, error
        while resolution in (recoverability.Resolution.ERROR_COPY, recoverability.Resolution.BRIEF_ERROR_COPY):
            if not batch.is_in_force(claim, self._store):
                return None
            refused = await self._send_copy(
                claim, error, brief=resolution is recoverability.Resolution.BRIEF_ERROR_COPY
            )
            if refused is None:
                self._error_queue_calls.report_success(self._clock.monotonic())
                self._failure_rate.report_success()
                log.error("message %s moved to error queue %s", claim.message.message_id, self._settings.error_queue)
                return None
            failure, resolution = (
                refused,
                recoverability.resolve_copy_failure(resolution, refused)
                if recoverability.is_lasting(refused)
                else recoverability.Resolution.REQUEUE,
            )
        if resolution is recoverability.Resolution.STUCK:
            why = (
                f"it cannot be sent ({recoverability.reason_of(error)}), "
                f"nor its copy to the error queue ({recoverability.reason_of(failure)})"
            )
            if await self._finisher.mark_unreadable(claim, why):
                return None
        self._error_queue_calls.report_failure(failure, self._clock.monotonic())
        self._failure_rate.report_failure(failure, self._clock.monotonic())
        batch.is_error_queue_down = failure.transient
        release = self._retry_release(claim, failure, f"error queue: {recoverability.reason_of(failure)}")
        if claim.message.message_id in batch.recorded_failures and recoverability.is_outage(failure):
            return self._release_doomed(claim, error, release)
        return release

    async def _send_copy(self, claim: Claim, error: PostdateError, *, brief: bool) -> PostdateError | None:
        detail = recoverability.reason_of(error)
        try:
            copy = self._settings.error_copy(claim.message, error, self._clock.now(), brief=brief)
        except MessageError as failure:  # the row holds a content that Postdate never stores
            return failure
        if self._sender.enlisting_store is not None:
            return await self._sender.send_enlisted([claim], [copy], Outcome.FAILED, detail)
        (failure,) = await run_within(self._clock, self._sender.longest_send, lambda: self._sender.send([copy])) or [
            self._sender.no_answer_error(copy.destination)
        ]
        if failure is None:
            await self._finisher.finish([claim], Outcome.FAILED, detail)
        return failure


def _log_failures(failed: Sequence[tuple[Claim, PostdateError]]) -> None:
    """Log one line for each destination and error code, as a batch may have a thousand messages with one cause."""
    kinds: defaultdict[tuple[str, str], list[tuple[Claim, PostdateError]]] = defaultdict(list)
    for claim, error in failed:
        kinds[claim.message.destination, error.code].append((claim, error))
    for (destination, _), (first, *others) in kinds.items():
        more = f" and {len(others)} more" if others else ""
        log.error("cannot send message %s%s to %s: %s", first[0].message.message_id, more, destination, first[1])
