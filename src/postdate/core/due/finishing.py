"""Writes outcomes of claimed messages to the store. Outcomes that the store refuses are remembered and written later.

A message that was sent is never sent again by this process; if it is claimed again, it is only removed. A message that
failed waits for its next attempt, even if the store could not record that. Source: ADR 0052. A :class:`Journal` is
called with each committed outcome, for callers that keep a separate ledger.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, Protocol

import anyio

from postdate.clock import Clock, later
from postdate.core.health.circuit_breaker import FailureRate
from postdate.core.health.deadlines import Deadlines
from postdate.core.health.message_memory import MOST_MESSAGES, MessageMemory, Release, UnwrittenOutcome, fingerprint
from postdate.core.recoverability import retry_delay
from postdate.errors import PostdateError, StoreUnreachable
from postdate.messages import DelayedMessage
from postdate.ports import OUTCOME_RECORDS, Claim, ClaimingStore, MovedMessages, Outcome, RecordKind
from postdate.ports.limits import is_in_lane
from postdate.runtime.resource import resource_of

_FAILURES_AT_ONCE: Final = 16
"""The number of failures that are written to the store concurrently."""

_MOST_SINGLE_REMOVALS: Final = 3
"""The number of messages removed one by one after a call for many has failed.

If all of these fail in a row, the store itself is considered to fail.
"""

_PROBE_MESSAGES: Final = 16
"""The largest number of messages claimed at a poll while the store writes no outcomes.

After the send, these messages also wait for their removal.
"""

_LONGEST_PROBE_PAUSE: Final = timedelta(seconds=2)
"""The longest pause between two probes, or two writes of an outcome, while the store writes no outcomes."""

_CLAIMED_AGAIN_WITHIN_SECONDS: Final = 600.0
"""How long the outcome of a lost claim is remembered. A message that is claimed again is claimed by then."""

_SAME_FAILURE_SECONDS: Final = 1.0
"""Failures within this time count as one failure in the failure rate."""

log = logging.getLogger("postdate.dispatcher")


class Journal(Protocol):
    """A receiver of records that the store has committed. Its methods return at once and do not raise.

    The records of the store contain the same events, with the same ``at``. If the process ends between a commit and the
    call, only the store has the event.
    """

    def record_events(
        self, kind: RecordKind, messages: Sequence[DelayedMessage], at: datetime, detail: str = ""
    ) -> None:
        """Record messages that were delivered, expired, failed or retried. They have the content that was claimed."""

    def record_move(self, moved: MovedMessages, at: datetime) -> None:
        """Record messages that were moved inside the database, or had expired there."""


class _NoJournal(Journal):
    """A journal that ignores its calls."""


NO_JOURNAL: Final[Journal] = _NoJournal()


@dataclass(slots=True, eq=False)
class _Removal:
    """A call in progress that removes messages: the claims by message id, and the outcome of the messages."""

    claims: dict[str, Claim]
    outcome: Outcome
    detail: str


class Finisher:
    """Finishes and releases claims. It does not raise errors of the store, but remembers the outcome and retries.

    While the store writes no outcomes it is probed: from time to time a few messages are claimed, sent and removed. To
    send many messages would be useless, as none of them could be removed.
    """

    def __init__(
        self,
        store: ClaimingStore,
        deadlines: Deadlines,
        clock: Clock,
        failure_rate: FailureRate,
        journal: Journal,
        memory: MessageMemory,
    ) -> None:
        self._store, self._deadlines, self._clock = store, deadlines, clock
        self._failure_rate, self._journal = failure_rate, journal
        self._memory = memory
        self._removals: list[_Removal] = []
        """Removals in progress. A server that fails during a removal may release the claims before it answers.

        So the messages may be claimed again before this process knows that the removal has failed.
        """
        self._is_probing = False
        """Whether the store has refused an outcome, and has written none since."""
        self._probe_count = 0
        """The number of probes since then."""
        self._probe_at = -math.inf
        """Monotonic seconds of the next probe."""
        self._counted_at = -math.inf
        """Monotonic seconds when a failure was last reported to the failure rate."""
        self._failed_at = -math.inf
        """Monotonic seconds of the last failed write."""
        self._outage = resource_of(store).calls("cannot complete or release due messages", log)

    @property
    def unwritten_outcomes(self) -> Mapping[str, UnwrittenOutcome]:
        """Outcomes to be written, by message id, with the claim under which each is written.

        With row locks, a claim ends with the write that fails. Then the next write finds that it has ended, and another
        process may have claimed the message meanwhile.
        """
        return self._memory.outcomes_with_claim

    # --- before a claim ---------------------------------------------------------------------------------------------

    def free_capacity(self, limit: int) -> int:
        """Return how many of ``limit`` messages may be claimed now."""
        if self._is_probing and self._memory.has_unwritten:
            seconds = self._clock.monotonic()
            if seconds < self._probe_at:
                return 0
            limit = min(limit, _PROBE_MESSAGES)
            self._probe_count += 1
            self._probe_at = seconds + self._shorten_in_outage(retry_delay(self._probe_count))
        return max(min(limit, MOST_MESSAGES - len(self.unwritten_outcomes)), 0)

    def next_attempt(self, earliest: datetime | None, *, claims_from: float = 0.0) -> datetime | None:
        """Return when to write outcomes again, or ``earliest`` if that is before.

        Args:
            earliest: next attempt of a message in the store; ``None`` if there is none.
            claims_from: monotonic seconds before which nothing is claimed.
        """
        times = [unwritten.retry_at for unwritten in self.unwritten_outcomes.values()]
        if self._is_probing and self._memory.has_unwritten:
            times.append(max(self._probe_at, claims_from))  # only a claim and its outcome show if the store is back
        if not times:
            return earliest
        next_write = later(self._clock.now(), timedelta(seconds=max(min(times) - self._clock.monotonic(), 0.001)))
        return next_write if earliest is None else min(earliest, next_write)

    def select_unsent(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims whose messages are to be sent.

        If the outcome of a message is known and not yet written, its claim is kept until the outcome is written.
        """
        if not self._memory and not self._removals:
            return claims
        self._forget_old_claims()
        ids = {claim.message.message_id for claim in claims}
        is_being_removed = any(not removal.claims.keys().isdisjoint(ids) for removal in self._removals)
        # The usual case: one check of the whole batch is quicker than a check of each claim.
        if not is_being_removed and not self._memory.has_any(ids):
            return claims
        return [claim for claim in claims if not self._has_outcome(claim)]

    def _has_outcome(self, claim: Claim) -> bool:
        """Return whether a claimed message has an outcome already; if so, that is written later under this claim."""
        message_id = claim.message.message_id
        unwritten = self._memory.unwritten_of(message_id)
        if unwritten is None:
            return self._is_being_removed(claim)
        attempt_at = None if unwritten.release is None else unwritten.release.attempt_at
        # A failed message that was removed may be returned from the error queue, with the same id and content. If it
        # were mistaken for the message to remove, it would be lost. A second error copy is only a duplicate.
        may_have_returned = unwritten.outcome is Outcome.FAILED and unwritten.may_be_written
        is_another = may_have_returned or unwritten.fingerprint != fingerprint(claim.message)
        is_due_again = unwritten.outcome is None and (attempt_at is None or attempt_at <= self._clock.now())
        if is_another or is_due_again:
            self._memory.forget_unwritten_outcome(message_id)
            return False
        if unwritten.release is not None:
            unwritten.release.claim = claim
        unwritten.claim = claim
        self._memory.remember_unwritten(unwritten)
        return True

    def _is_being_removed(self, claim: Claim) -> bool:
        message_id, claimed_fingerprint = claim.message.message_id, fingerprint(claim.message)
        for removal in self._removals:
            removed_claim = removal.claims.get(message_id)
            has_failed = removal.outcome is Outcome.FAILED  # it may have been returned from the error queue, as above
            if (
                removed_claim is not None
                and not has_failed
                and fingerprint(removed_claim.message) == claimed_fingerprint
            ):
                unwritten = _unwritten(claim, removal.outcome, removal.detail)
                unwritten.retry_at = self._clock.monotonic() + retry_delay(0).total_seconds()
                self._memory.remember_unwritten(unwritten)
                return True
        return False

    # --- lost claims ------------------------------------------------------------------------------------------------

    def _remember_lost_claim(self, unwritten: UnwrittenOutcome) -> None:
        """Remember the outcome of a lost claim.

        This process may claim the same message again. Then it must write the outcome and not send the message again.
        """
        unwritten.claim, unwritten.lost_at = None, self._clock.monotonic()
        self._memory.remember_unwritten(unwritten)

    def _forget_old_claims(self) -> None:
        """Forget claims that were lost long ago, unless a write to the store has failed since then."""
        before = self._clock.monotonic() - _CLAIMED_AGAIN_WITHIN_SECONDS
        if not self._is_probing and self._failed_at <= before:
            self._memory.forget_claims_lost_before(before)

    def remember_sent(self, claims: Sequence[Claim], *, are_claimed: bool = False) -> None:
        """Remember messages that were sent: if they are claimed again, they are only removed.

        With ``are_claimed`` this process still has the claims; without, they are lost.
        """
        self._forget_old_claims()
        for claim in claims:
            if self._replace_pending_release(claim, Outcome.DELIVERED):
                continue
            unwritten = _unwritten(claim, Outcome.DELIVERED)
            if are_claimed:
                self._memory.remember_unwritten(unwritten)
            else:
                self._remember_lost_claim(unwritten)

    def _replace_pending_release(self, claim: Claim, outcome: Outcome, detail: str = "") -> bool:
        """Return whether an unwritten outcome of a message is remembered under a claim of this process.

        An unwritten release becomes this outcome. The case: the claim was lost while the message was being sent, this
        process claimed it again, and could not release that second claim. Now the message only needs to be removed,
        under the second claim.
        """
        unwritten = self._memory.unwritten_of(claim.message.message_id)
        if unwritten is None or unwritten.claim is None or unwritten.fingerprint != fingerprint(claim.message):
            return False
        # A failed message may have been returned from the error queue; the later claim may be one of the returned one.
        if unwritten.outcome is None and outcome is not Outcome.FAILED:
            unwritten.outcome, unwritten.detail, unwritten.release = outcome, detail, None
        return True

    # --- writing ----------------------------------------------------------------------------------------------------

    async def finish(self, claims: Sequence[Claim], outcome: Outcome, detail: str = "") -> None:
        """Remove messages from the store. If that fails the outcome is remembered, and they are removed later."""
        at = self._clock.now()
        removal = _Removal({claim.message.message_id: claim for claim in claims}, outcome, detail)
        self._removals.append(removal)
        try:
            finished = await self._finish_in_store(claims, outcome, at, detail)
        except PostdateError as error:
            self._report_failure(error)
            new = [claim for claim in claims if not self._replace_pending_release(claim, outcome, detail)]
            self._write_later([_unwritten(claim, outcome, detail) for claim in new], error)
            return
        finally:
            self._removals.remove(removal)
        self._journal.record_events(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], at, detail)
        if finished < len(claims) and outcome is Outcome.DELIVERED:
            # Another process removed a message while this one sent it (row 53), or a claim was lost and the message may
            # be claimed again.
            log.warning("%d messages may have been delivered more than once", len(claims) - finished)
            self.remember_sent(claims)

    async def _finish_in_store(self, claims: Sequence[Claim], outcome: Outcome, at: datetime, detail: str) -> int:
        finished = await self._deadlines.call_in_task(lambda: self._store.finish(claims, outcome, at, detail))
        self._report_success()  # also if it removed nothing: see ClaimingStore.finish
        return finished

    async def release_claims(self, releases: Sequence[Release]) -> None:
        """Release claims.

        Claims without a failure are released in one call for each attempt time. Each failure is written by a call of
        its own. Several of these calls run concurrently, as each mostly waits for its commit. After a transient error
        the remaining failures are not tried, but remembered.
        """
        failures = deque(each for each in releases if each.reason is not None)
        await self._release([each for each in releases if each.reason is None])

        async def write_failures() -> None:
            while failures:
                failure = failures.popleft()
                error = await self._retry_later(failure)
                if error is not None:
                    self.release_later([failure, *failures] if error.transient else [failure], error)
                    if error.transient:
                        failures.clear()

        if failures:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(_FAILURES_AT_ONCE, len(failures))):
                    tasks.start_soon(write_failures)

    async def _release(self, releases: Sequence[Release]) -> None:
        by_time: defaultdict[datetime | None, list[Release]] = defaultdict(list)
        for each in releases:
            by_time[each.attempt_at].append(each)
        for attempt_at, same_time_releases in by_time.items():
            release = partial(self._store.release, [each.claim for each in same_time_releases], attempt_at)
            try:
                await self._deadlines.call_in_task(release)
            except PostdateError as error:
                self._report_failure(error)
                self.release_later(same_time_releases, error)
            else:
                self._report_success()

    async def _retry_later(self, release: Release) -> PostdateError | None:
        """Record a failure and release its claim; return the error if the store did not do so."""
        claim, now, reason = release.claim, self._clock.now(), release.reason or ""
        attempt_at = release.attempt_at or now
        try:
            is_stored = await self._deadlines.call_in_task(
                lambda: self._store.retry_later(claim, attempt_at, now, reason)
            )
        except PostdateError as error:
            self._report_failure(error)
            return error
        self._report_success()
        message_id = claim.message.message_id
        unwritten = self._memory.unwritten_of(message_id)
        if is_stored:
            self._journal.record_events(RecordKind.RETRIED, [claim.message], now, reason)
        elif unwritten is None:
            log.warning("message %s was removed by another while it was being sent", message_id)
        elif unwritten.claim is claim:  # not a later claim of this process, which is still in force
            self._remember_lost_claim(unwritten)  # if it is claimed again, it still waits for its next attempt
        return None

    async def mark_unreadable(self, claim: Claim, reason: str) -> bool:
        """Mark a message as unreadable because no queue accepts it; return whether the store did so."""
        now = self._clock.now()
        try:
            if not await self._deadlines.call_in_task(lambda: self._store.mark_unreadable(claim, reason, now)):
                return False
        except PostdateError as refused:
            log.error("message %s cannot be marked as unreadable: %s", claim.message.message_id, refused)
            return False
        self._journal.record_events(OUTCOME_RECORDS[Outcome.FAILED], [claim.message], now, reason)
        text = "message %s is marked as unreadable (`postdate messages list --unreadable` lists it): %s"
        log.error(text, claim.message.message_id, reason)
        return True

    # --- writing later ----------------------------------------------------------------------------------------------

    def release_later(self, releases: Sequence[Release], error: PostdateError | None = None) -> None:
        """Release claims at a later poll, because the store failed (``error``) or because there is no time now."""
        outcomes = [_unwritten(each.claim, None, release=each) for each in releases if not self._is_sent(each.claim)]
        if error is not None:
            self._write_later(outcomes, error)
            return
        for unwritten in outcomes:
            self._memory.remember_unwritten(unwritten)

    def _is_sent(self, claim: Claim) -> bool:
        """Return whether a message was sent before this claim; if so, it is removed later under this claim."""
        unwritten = self._memory.unwritten_of(claim.message.message_id)
        is_sent = unwritten is not None and unwritten.outcome is Outcome.DELIVERED
        if unwritten is None or not is_sent or unwritten.fingerprint != fingerprint(claim.message):
            return False
        unwritten.claim = claim
        self._memory.remember_unwritten(unwritten)
        return True

    def _write_later(
        self, outcomes: Sequence[UnwrittenOutcome], error: PostdateError, at_least: timedelta = timedelta(0)
    ) -> None:
        for unwritten in outcomes:
            pause = max(retry_delay(unwritten.failed_writes - 1, error), at_least)
            unwritten.may_be_written |= isinstance(error, StoreUnreachable)
            unwritten.retry_at = self._clock.monotonic() + self._shorten_in_outage(pause)
            self._memory.remember_unwritten(unwritten)

    def _shorten_in_outage(self, pause: timedelta) -> float:
        """Return a pause in seconds; while the store writes no outcomes, a short one, to notice its recovery soon."""
        return (min(pause, _LONGEST_PROBE_PAUSE) if self._is_probing else pause).total_seconds()

    async def write_outcomes(self, *, at_once: bool = False) -> None:
        """Write remembered outcomes whose retry time has come, or all of them if ``at_once``."""
        if not self.unwritten_outcomes:
            return
        seconds = self._clock.monotonic()
        due = [unwritten for unwritten in self.unwritten_outcomes.values() if at_once or unwritten.retry_at <= seconds]
        releases = [unwritten.release for unwritten in due if unwritten.release is not None]
        removals: defaultdict[tuple[Outcome, str], list[UnwrittenOutcome]] = defaultdict(list)
        for unwritten in due:
            if unwritten.outcome is not None:
                removals[unwritten.outcome, unwritten.detail].append(unwritten)
        for (outcome, detail), some in removals.items():
            await self._finish_again(some, outcome, detail)
        if releases:
            await self._release_again(releases)

    async def _release_again(self, releases: Sequence[Release]) -> None:
        """Release remembered claims. They stay remembered until that is done, so a cancellation loses none."""
        # The removals were written first. Meanwhile a message may have been sent, or claimed again: read them again.
        release_ids = {id(release) for release in releases}
        remembered_outcomes = {
            message_id: unwritten
            for message_id, unwritten in self.unwritten_outcomes.items()
            if id(unwritten.release) in release_ids
        }
        releases_again = [each.release for each in remembered_outcomes.values() if each.release is not None]
        # The limits may have been lifted meanwhile. Nobody polls the lane of a destination without limits and without
        # messages, so a message would wait there. When it is due as usual, the limits in force then decide again.
        into_lanes = [each for each in releases_again if is_in_lane(each.attempt_at, each.claim.message.due)]
        latest_due = max((each.claim.message.due for each in into_lanes), default=None)
        for release in into_lanes:  # one time for all, which has passed: then one call releases all
            release.attempt_at = latest_due
        await self.release_claims(releases_again)
        for message_id, unwritten in remembered_outcomes.items():
            if self.unwritten_outcomes.get(message_id) is unwritten:
                self._memory.forget_unwritten_outcome(message_id)

    async def _finish_again(self, outcomes: Sequence[UnwrittenOutcome], outcome: Outcome, detail: str) -> None:
        """Remove messages in one call. If that fails, remove some one by one, as a single message may be the cause."""
        is_store_well = not self._is_probing
        error = await self._finish_once(outcomes, outcome, detail)
        if error is None:
            return
        if len(outcomes) == 1 or isinstance(error, StoreUnreachable):
            self._write_again_later(outcomes, error, is_store_well=is_store_well)
            return
        failures_in_a_row = 0
        remaining = deque(sorted(outcomes, key=lambda unwritten: unwritten.failed_writes))
        while remaining and failures_in_a_row < _MOST_SINGLE_REMOVALS:
            unwritten, is_store_well = remaining.popleft(), not self._is_probing
            error = await self._finish_once([unwritten], outcome, detail)
            failures_in_a_row = failures_in_a_row + 1 if error else 0
            if error is not None:
                self._write_again_later([unwritten], error, is_store_well=is_store_well)
        for unwritten in remaining:
            unwritten.retry_at = self._clock.monotonic() + _LONGEST_PROBE_PAUSE.total_seconds()

    def _write_again_later(
        self, outcomes: Sequence[UnwrittenOutcome], error: PostdateError, *, is_store_well: bool
    ) -> None:
        """Remember outcomes for a later write.

        If the store writes other outcomes, these outcomes are the cause: then each pause is longer than the last.
        """
        for unwritten in outcomes:
            unwritten.failed_writes += is_store_well
        self._write_later(outcomes, error, timedelta(0) if is_store_well else _LONGEST_PROBE_PAUSE)

    async def _finish_once(
        self, outcomes: Sequence[UnwrittenOutcome], outcome: Outcome, detail: str
    ) -> PostdateError | None:
        """Remove messages whose outcome is not written yet, in one call. Return the error if the store fails."""
        claims = [unwritten.claim for unwritten in outcomes if unwritten.claim is not None]
        at = self._clock.now()
        try:
            finished = await self._finish_in_store(claims, outcome, at, detail)
        except PostdateError as error:
            self._report_failure(error, fails_alone=len(outcomes) == 1 and outcomes[0].failed_writes > 1)
            return error
        if finished:
            self._journal.record_events(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], at, detail)
        for unwritten in outcomes:
            if finished == len(claims) or outcome is not Outcome.DELIVERED:
                # A message may be returned from the error queue, with the same id and content. If it were mistaken for
                # the message to remove, it would be lost. A second error copy is only a duplicate.
                self._memory.forget_unwritten_outcome(unwritten.message_id)
            else:  # some claims were lost: their messages are removed already, or will be claimed again
                self._remember_lost_claim(unwritten)
        return None

    # --- outages of the store ---------------------------------------------------------------------------------------

    def _report_failure(self, error: PostdateError, *, fails_alone: bool = False) -> None:
        """Report a failed write. A write that ``fails_alone`` does not count as an outage of the store."""
        seconds = self._clock.monotonic()
        self._outage.report_failure(error, seconds)
        self._failed_at = seconds
        if seconds - self._counted_at >= _SAME_FAILURE_SECONDS:
            self._counted_at = seconds
            self._failure_rate.report_failure(error, seconds)
        if not self._is_probing and not fails_alone:
            self._is_probing, self._probe_count = True, 0
            self._probe_at = seconds + retry_delay(0).total_seconds()

    def _report_success(self) -> None:
        self._is_probing = False
        if self._outage.is_failing:
            self._failure_rate.report_success()
            self._outage.report_success(self._clock.monotonic())


def _unwritten(
    claim: Claim, outcome: Outcome | None, detail: str = "", release: Release | None = None
) -> UnwrittenOutcome:
    """Return the outcome to write for a claim that is in force."""
    return UnwrittenOutcome(claim.message.message_id, fingerprint(claim.message), claim, outcome, detail, release)
