"""Writes outcomes of claimed messages to the store, and remembers those that it does not take until it does.

A message that was sent is from then on only removed, however often the store gives it out again. One that failed waits
for its next attempt, also where that cannot be written. Source: ADR 0052. A :class:`Journal` hears of it, for callers
that keep a ledger of their own.
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
from postdate.core.health.attempts import MOST_ATTEMPTS, Attempts, Release, UnwrittenOutcome, fingerprint
from postdate.core.health.circuit_breaker import FailureRate
from postdate.core.health.deadlines import Deadlines
from postdate.core.recoverability import retry_delay
from postdate.errors import PostdateError, StoreUnreachable
from postdate.messages import DelayedMessage
from postdate.ports import OUTCOME_RECORDS, Claim, ClaimingStore, Moved, Outcome, RecordKind
from postdate.runtime.resource import resource_of

_FAILURES_AT_ONCE: Final = 16
"""Failures of messages that are written at once."""

_TRIED_ALONE: Final = 3
"""When removing many fails, so many are tried alone before the store itself is taken to fail."""

_PROBE_MESSAGES: Final = 16
"""Messages claimed at a poll while nothing can be written: when they are sent they stay to be removed, too."""

_LONGEST_PROBE_PAUSE: Final = timedelta(seconds=2)

_CLAIMED_AGAIN_WITHIN_SECONDS: Final = 600.0
"""A message that was sent, and whose claim was lost before it was removed, is claimed again by then, if ever."""

_COUNTED_APART_SECONDS: Final = 1.0
"""Failures within this time count as one failure of the failure handling."""

log = logging.getLogger("postdate.dispatcher")


class Journal(Protocol):
    """Hears of records that the store has committed. Methods return at once and do not raise.

    The same events, with the same ``at``, are in the records of the store. When the process ends between a commit and
    the call, an event is there only.
    """

    def ended(self, kind: RecordKind, messages: Sequence[DelayedMessage], at: datetime, detail: str = "") -> None:
        """Note messages that were delivered, expired, failed or retried, as they were claimed."""

    def moved(self, moved: Moved, at: datetime) -> None:
        """Note messages that were moved inside the database, or had expired there."""


class _NoJournal(Journal):
    """Hears nothing."""


NO_JOURNAL: Final[Journal] = _NoJournal()


@dataclass(slots=True, eq=False)
class _Removal:
    """A call under way that removes messages: the claims by message id, and how the messages ended."""

    claims: dict[str, Claim]
    outcome: Outcome
    detail: str


class Finisher:
    """Finishes and releases claims. Errors of the store stay in here: an outcome is remembered, and written later.

    While the store takes no outcomes it is probed: now and then a few messages are claimed, sent, and removed. Sending
    many would be in vain, as none of them could be removed.
    """

    def __init__(
        self,
        store: ClaimingStore,
        deadlines: Deadlines,
        clock: Clock,
        failure_rate: FailureRate,
        journal: Journal,
        attempts: Attempts,
    ) -> None:
        self._store, self._deadlines, self._clock = store, deadlines, clock
        self._failure_rate, self._journal = failure_rate, journal
        self._attempts = attempts
        self._removals: list[_Removal] = []
        """Removals under way. A server that fails at one frees its messages before it answers, and may let them be
        claimed meanwhile."""
        self._probes = 0
        """0 while the store takes outcomes; else the number of probes since it refused one, plus one."""
        self._probe_at = -math.inf
        self._counted_at = -math.inf
        """When a failure was reported to the failure rate last."""
        self._failed_at = -math.inf
        self._outage = resource_of(store).calls("cannot finish or give back due messages", log)

    @property
    def unwritten(self) -> Mapping[str, UnwrittenOutcome]:
        """Outcomes to be written, by message id. Their claims are held."""
        return self._attempts.outcomes_with_claim

    # --- what a dispatcher asks before it claims --------------------------------------------------------------------

    def free_capacity(self, limit: int) -> int:
        """Return how many of ``limit`` messages may be claimed now."""
        if self._probes and self._attempts.has_unwritten:
            seconds = self._clock.monotonic()
            if seconds < self._probe_at:
                return 0
            limit = min(limit, _PROBE_MESSAGES)
            self._probe_at = seconds + self._shorten_in_outage(retry_delay(self._probes))
            self._probes += 1
        return max(min(limit, MOST_ATTEMPTS - len(self.unwritten)), 0)

    def next_attempt(self, earliest: datetime | None, *, claims_from: float = 0.0) -> datetime | None:
        """Return when to write outcomes again, or ``earliest`` if that is before.

        Args:
            earliest: attempt at a message in the store.
            claims_from: monotonic seconds before which nothing is claimed.
        """
        times = [unwritten.retry_at for unwritten in self.unwritten.values()]
        if self._probes and self._attempts.has_unwritten:
            times.append(max(self._probe_at, claims_from))  # claiming is the only way to find out
        if not times:
            return earliest
        again = later(self._clock.now(), timedelta(seconds=max(min(times) - self._clock.monotonic(), 0.001)))
        return again if earliest is None else min(earliest, again)

    def skip_known(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims whose messages are to be sent.

        A claim of a message whose outcome is known and unwritten is held until that is written.
        """
        if not self._attempts and not self._removals:
            return claims
        self._forget_old_claims()
        ids = {claim.message.message_id for claim in claims}
        is_being_removed = any(not removal.claims.keys().isdisjoint(ids) for removal in self._removals)
        if not is_being_removed and not self._attempts.knows_any(ids):  # nearly always, and quicker than each by itself
            return claims
        return [claim for claim in claims if not self._has_ended(claim)]

    def _has_ended(self, claim: Claim) -> bool:
        """Return whether a claimed message has ended already; then its outcome is written under this claim."""
        message_id = claim.message.message_id
        unwritten = self._attempts.unwritten_of(message_id)
        if unwritten is None:
            return self._is_being_removed(claim)
        attempt_at = None if unwritten.release is None else unwritten.release.attempt_at
        # Once it is removed, a failed message may be returned from the error queue with the same id and content. Taken
        # for the one that is to be removed, it would be lost; a second error copy is only a duplicate.
        may_have_returned = unwritten.outcome is Outcome.FAILED and unwritten.may_be_written
        is_another = may_have_returned or unwritten.fingerprint != fingerprint(claim.message)
        is_due_again = unwritten.outcome is None and (attempt_at is None or attempt_at <= self._clock.now())
        if is_another or is_due_again:
            self._attempts.forget_unwritten(message_id)
            return False
        if unwritten.release is not None:
            unwritten.release.claim = claim
        unwritten.claim = claim
        self._attempts.remember_unwritten(unwritten)
        return True

    def _is_being_removed(self, claim: Claim) -> bool:
        message_id, mark = claim.message.message_id, fingerprint(claim.message)
        for removal in self._removals:
            removed = removal.claims.get(message_id)
            has_failed = removal.outcome is Outcome.FAILED  # it may have come back, as above
            if removed is not None and not has_failed and fingerprint(removed.message) == mark:
                unwritten = _unwritten(claim, removal.outcome, removal.detail)
                unwritten.retry_at = self._clock.monotonic() + retry_delay(0).total_seconds()
                self._attempts.remember_unwritten(unwritten)
                return True
        return False

    # --- lost claims ------------------------------------------------------------------------------------------------

    def _remember_lost_claim(self, unwritten: UnwrittenOutcome) -> None:
        """Remember the outcome of a lost claim.

        This process may claim the same message again, and must then write its outcome, and not send it a second time.
        """
        unwritten.claim, unwritten.lost_at = None, self._clock.monotonic()
        self._attempts.remember_unwritten(unwritten)

    def _forget_old_claims(self) -> None:
        """Forget lost claims whose messages were not claimed again for long, unless the store has failed meanwhile."""
        before = self._clock.monotonic() - _CLAIMED_AGAIN_WITHIN_SECONDS
        if not self._probes and self._failed_at <= before:
            self._attempts.forget_claims_lost_before(before)

    def remember_sent(self, claims: Sequence[Claim], *, are_held: bool = False) -> None:
        """Note messages that were sent: claimed again, they are only removed. Claims are lost, or ``are_held``."""
        self._forget_old_claims()
        for claim in claims:
            if self._resolve_release(claim, Outcome.DELIVERED):
                continue
            unwritten = _unwritten(claim, Outcome.DELIVERED)
            if are_held:
                self._attempts.remember_unwritten(unwritten)
            else:
                self._remember_lost_claim(unwritten)

    def _resolve_release(self, claim: Claim, outcome: Outcome, detail: str = "") -> bool:
        """Return whether an unwritten outcome of a message is remembered.

        A release becomes the outcome: while a message was being sent its claim was lost, and it was claimed again and
        could not be released. It is only to be removed now, under the claim that is held.
        """
        unwritten = self._attempts.unwritten_of(claim.message.message_id)
        if unwritten is None or unwritten.claim is None or unwritten.fingerprint != fingerprint(claim.message):
            return False
        # A failed message may have been returned from the error queue: the later claim may be of that one.
        if unwritten.outcome is None and outcome is not Outcome.FAILED:
            unwritten.outcome, unwritten.detail, unwritten.release = outcome, detail, None
        return True

    # --- writing ----------------------------------------------------------------------------------------------------

    async def finish(self, claims: Sequence[Claim], outcome: Outcome, detail: str = "") -> None:
        """Remove messages from the store. If that fails they are remembered, and removed later."""
        at = self._clock.now()
        removal = _Removal({claim.message.message_id: claim for claim in claims}, outcome, detail)
        self._removals.append(removal)
        try:
            finished = await self._finish(claims, outcome, at, detail)
        except PostdateError as error:
            self._note_failure(error)
            new = [claim for claim in claims if not self._resolve_release(claim, outcome, detail)]
            self._write_later([_unwritten(claim, outcome, detail) for claim in new], error)
            return
        finally:
            self._removals.remove(removal)
        self._journal.ended(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], at, detail)
        if finished < len(claims) and outcome is Outcome.DELIVERED:
            # Another process removed it while we sent it (row 53), or our claim was lost and it may be claimed again.
            log.warning("%d messages may have been delivered more than once", len(claims) - finished)
            self.remember_sent(claims)

    async def _finish(self, claims: Sequence[Claim], outcome: Outcome, at: datetime, detail: str) -> int:
        finished = await self._deadlines.call_apart(lambda: self._store.finish(claims, outcome, at, detail))
        self._note_success()  # also when it has removed none: it answers
        return finished

    async def give_back(self, releases: Sequence[Release]) -> None:
        """Release claims.

        Those without a failure go in one call, or a few. Each failure is written by itself, several at once, as most of
        its time is waiting for the commit. A store that is unavailable is not asked for each of them.
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
        for attempt_at, some in by_time.items():
            release = partial(self._store.release, [each.claim for each in some], attempt_at)
            try:
                await self._deadlines.call_apart(release)
            except PostdateError as error:
                self._note_failure(error)
                self.release_later(some, error)
            else:
                self._note_success()

    async def _retry_later(self, release: Release) -> PostdateError | None:
        """Record a failure and release its claim; return the error if the store did not take that."""
        claim, now, reason = release.claim, self._clock.now(), release.reason or ""
        attempt_at = release.attempt_at or now
        try:
            is_stored = await self._deadlines.call_apart(
                lambda: self._store.retry_later(claim, attempt_at, now, reason)
            )
        except PostdateError as error:
            self._note_failure(error)
            return error
        self._note_success()
        message_id = claim.message.message_id
        unwritten = self._attempts.unwritten_of(message_id)
        if is_stored:
            self._journal.ended(RecordKind.RETRIED, [claim.message], now, reason)
        elif unwritten is None:
            log.warning("message %s was removed by another while it was being sent", message_id)
        elif unwritten.claim is claim:  # and not another claim of this process, which is held
            self._remember_lost_claim(unwritten)  # claimed again, it still waits for its next attempt
        return None

    async def mark_unreadable(self, claim: Claim, reason: str) -> bool:
        """Mark a message that no queue takes; return whether that was done."""
        now = self._clock.now()
        try:
            if not await self._deadlines.call_apart(lambda: self._store.mark_unreadable(claim, reason, now)):
                return False
        except PostdateError as refused:
            log.error("message %s cannot be marked as unreadable: %s", claim.message.message_id, refused)
            return False
        self._journal.ended(OUTCOME_RECORDS[Outcome.FAILED], [claim.message], now, reason)
        text = "message %s is marked as unreadable (`postdate messages list --unreadable` lists it): %s"
        log.error(text, claim.message.message_id, reason)
        return True

    # --- writing later ----------------------------------------------------------------------------------------------

    def release_later(self, releases: Sequence[Release], error: PostdateError | None = None) -> None:
        """Release claims at a later poll: for an error of the store, or without one because there is no time now."""
        outcomes = [_unwritten(each.claim, None, release=each) for each in releases if not self._is_sent(each.claim)]
        if error is not None:
            self._write_later(outcomes, error)
            return
        for unwritten in outcomes:
            self._attempts.remember_unwritten(unwritten)

    def _is_sent(self, claim: Claim) -> bool:
        """Return whether a message was sent before it was claimed again; then it is removed under this claim."""
        unwritten = self._attempts.unwritten_of(claim.message.message_id)
        is_sent = unwritten is not None and unwritten.outcome is Outcome.DELIVERED
        if unwritten is None or not is_sent or unwritten.fingerprint != fingerprint(claim.message):
            return False
        unwritten.claim = claim
        self._attempts.remember_unwritten(unwritten)
        return True

    def _write_later(
        self, outcomes: Sequence[UnwrittenOutcome], error: PostdateError, at_least: timedelta = timedelta(0)
    ) -> None:
        for unwritten in outcomes:
            pause = max(retry_delay(unwritten.failed_writes - 1, error), at_least)
            unwritten.may_be_written |= isinstance(error, StoreUnreachable)
            unwritten.retry_at = self._clock.monotonic() + self._shorten_in_outage(pause)
            self._attempts.remember_unwritten(unwritten)

    def _shorten_in_outage(self, pause: timedelta) -> float:
        """Return a pause in seconds. While it is the store that is waited for, it is short."""
        return (min(pause, _LONGEST_PROBE_PAUSE) if self._probes else pause).total_seconds()

    async def write_remembered(self, *, at_once: bool = False) -> None:
        """Write remembered outcomes whose time has come, or all of them."""
        if not self.unwritten:
            return
        seconds = self._clock.monotonic()
        due = [unwritten for unwritten in self.unwritten.values() if at_once or unwritten.retry_at <= seconds]
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
        """Release claims that are remembered until that is done, also when this is cancelled."""
        # Removals were written before these, and meanwhile a message may have been sent, or claimed again.
        due = {id(release) for release in releases}
        before = {
            message_id: unwritten for message_id, unwritten in self.unwritten.items() if id(unwritten.release) in due
        }
        await self.give_back([unwritten.release for unwritten in before.values() if unwritten.release is not None])
        for message_id, unwritten in before.items():
            if self.unwritten.get(message_id) is unwritten:
                self._attempts.forget_unwritten(message_id)

    async def _finish_again(self, some: Sequence[UnwrittenOutcome], outcome: Outcome, detail: str) -> None:
        """Remove messages in one call; if that fails, a few by themselves, as one of them may keep all others."""
        is_store_well = not self._probes
        error = await self._try_to_finish(some, outcome, detail)
        if error is None:
            return
        if len(some) == 1 or isinstance(error, StoreUnreachable):
            self._write_again_later(some, error, is_store_well=is_store_well)
            return
        failures_in_a_row = 0
        remaining = deque(sorted(some, key=lambda unwritten: unwritten.failed_writes))
        while remaining and failures_in_a_row < _TRIED_ALONE:
            unwritten, is_store_well = remaining.popleft(), not self._probes
            error = await self._try_to_finish([unwritten], outcome, detail)
            failures_in_a_row = failures_in_a_row + 1 if error else 0
            if error is not None:
                self._write_again_later([unwritten], error, is_store_well=is_store_well)
        for unwritten in remaining:
            unwritten.retry_at = self._clock.monotonic() + _LONGEST_PROBE_PAUSE.total_seconds()

    def _write_again_later(
        self, some: Sequence[UnwrittenOutcome], error: PostdateError, *, is_store_well: bool
    ) -> None:
        """Wait longer each time where others could be written meanwhile: then it is not the store that fails."""
        for unwritten in some:
            unwritten.failed_writes += is_store_well
        self._write_later(some, error, timedelta(0) if is_store_well else _LONGEST_PROBE_PAUSE)

    async def _try_to_finish(
        self, some: Sequence[UnwrittenOutcome], outcome: Outcome, detail: str
    ) -> PostdateError | None:
        claims = [unwritten.claim for unwritten in some if unwritten.claim is not None]
        at = self._clock.now()
        try:
            finished = await self._finish(claims, outcome, at, detail)
        except PostdateError as error:
            self._note_failure(error, fails_alone=len(some) == 1 and some[0].failed_writes > 1)
            return error
        if finished:
            self._journal.ended(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], at, detail)
        for unwritten in some:
            if finished == len(claims) or outcome is not Outcome.DELIVERED:
                # A message in the error queue may be returned from there with the same id and content. Taken for the
                # one that is to be removed, it would be lost. A second copy is only a duplicate.
                self._attempts.forget_unwritten(unwritten.message_id)
            else:  # some claims were lost: their messages are removed, or will be claimed again
                self._remember_lost_claim(unwritten)
        return None

    # --- how the store is -------------------------------------------------------------------------------------------

    def _note_failure(self, error: PostdateError, *, fails_alone: bool = False) -> None:
        """Note a failed write. A write that ``fails_alone`` says nothing about the store."""
        seconds = self._clock.monotonic()
        self._outage.failed(error, seconds)
        self._failed_at = seconds
        if seconds - self._counted_at >= _COUNTED_APART_SECONDS:
            self._counted_at = seconds
            self._failure_rate.failure(error, seconds)
        if not self._probes and not fails_alone:
            self._probes, self._probe_at = 1, seconds + retry_delay(0).total_seconds()

    def _note_success(self) -> None:
        self._probes = 0
        if self._outage.is_failing:
            self._failure_rate.success()
            self._outage.succeeded(self._clock.monotonic())


def _unwritten(
    claim: Claim, outcome: Outcome | None, detail: str = "", release: Release | None = None
) -> UnwrittenOutcome:
    """Return the outcome of a claim that is held."""
    return UnwrittenOutcome(claim.message.message_id, fingerprint(claim.message), claim, outcome, detail, release)
