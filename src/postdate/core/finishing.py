"""Writes outcomes of claimed messages to the store, and remembers those that it does not take until it does.

A message that was sent is from then on only removed, however often the store gives it out again. One that failed waits
for its next attempt, also where that cannot be written. Source: ADR 0019. A :class:`Journal` hears of it, for callers
that keep a ledger of their own.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, Protocol

import anyio

from postdate.clock import Clock, later
from postdate.core.circuit_breaker import FailureRate
from postdate.core.health.deadlines import Deadlines
from postdate.core.recoverability import retry_delay
from postdate.errors import PostdateError, StoreUnreachable
from postdate.messages import DelayedMessage
from postdate.ports import OUTCOME_RECORDS, Claim, ClaimingStore, Moved, Outcome, RecordKind
from postdate.runtime.bounded import Bounded
from postdate.runtime.resource import resource_of

REMEMBERED: Final = 10_000
"""Unwritten outcomes at most; with as many, no more messages are claimed."""

_GIVEN_BACK_AT_ONCE: Final = 16
_ALONE: Final = 3
"""When removing many fails, so many are tried alone before the store itself is taken to fail."""

_PROBED_WITH: Final = 16
"""Messages claimed at a look while nothing can be written: when they are sent they stay to be removed, too."""

_LONGEST_PROBE_PAUSE: Final = timedelta(seconds=2)
_COMES_AGAIN_WITHIN_SECONDS: Final = 600.0
"""A message that was sent, and whose claim was lost before it was removed, is claimed again by then, if ever."""

_COUNTED_APART_SECONDS: Final = 1.0
"""Failures within this time count as one failure of the failure handling."""

_DOOMED_FOR_SECONDS: Final = 120.0
"""How long a message is known to be doomed; the pause before its next claim is a minute at most."""

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


@dataclass(slots=True)
class GivingBack:
    """A claim to be given back; not attempted before ``attempt_at``, or with ``None`` at once.

    ``reason`` of a failure is counted and recorded; ``None``: the message has not failed.
    """

    claim: Claim
    attempt_at: datetime | None
    reason: str | None = None


@dataclass(slots=True, eq=False)
class _Ending:
    """Claims, by message id, that one call is removing."""

    claims: dict[str, Claim]
    outcome: Outcome
    detail: str


@dataclass(slots=True)
class _Left:
    """An outcome that is still to be written; without one, ``back`` says how the claim is to be given back.

    ``claim`` is ``None`` when it is void: whoever gets the message next is not known, it may be this process.
    ``failures`` counts failed writes. Times are monotonic seconds.
    """

    message_id: str
    mark: int
    claim: Claim | None
    outcome: Outcome | None
    detail: str
    back: GivingBack | None
    again_at: float
    failures: int = 1
    void_since: float = 0.0


class Finisher:
    """Ends claims. Errors of the store stay in here: the outcome is remembered, and tried again at later looks."""

    def __init__(
        self, store: ClaimingStore, deadlines: Deadlines, clock: Clock, failure_rate: FailureRate, journal: Journal
    ) -> None:
        self._store, self._deadlines, self._clock = store, deadlines, clock
        self._failure_rate, self._journal = failure_rate, journal
        self.left: dict[str, _Left] = {}
        """Unwritten outcomes of claims that are held, by message id: no other process can have these messages."""
        self._void: dict[str, _Left] = {}
        """Outcomes of lost claims, should their messages be claimed again, by id; the oldest is the first."""
        self._ending: list[_Ending] = []
        """Removals under way: a server that fails at one frees its messages before it says so, and may give them out
        meanwhile."""
        self._refuses = 0
        """Not 0 while the store takes no outcome: the number of probes of that, plus one."""
        self._probe_at, self._counted_at, self._failed_at = 0.0, -math.inf, -math.inf
        self._outage = resource_of(store).calls("cannot finish or give back due messages", log)

    # --- what a dispatcher asks before it claims --------------------------------------------------------------------

    def room(self, limit: int) -> int:
        """Return how many of ``limit`` messages may be claimed now."""
        if self._refuses and (self.left or self._void):
            seconds = self._clock.monotonic()
            if seconds < self._probe_at:
                return 0
            limit = min(limit, _PROBED_WITH)
            self._probe_at = seconds + self._pause(retry_delay(self._refuses))
            self._refuses += 1
        return max(min(limit, REMEMBERED - len(self.left)), 0)

    def next_attempt(self, earliest: datetime | None, *, claims_from: float = 0.0) -> datetime | None:
        """Return when to try writing again, or ``earliest``; nothing is claimed before ``claims_from``, monotonic."""
        times = [left.again_at for left in self.left.values()]
        if self._refuses and (self.left or self._void):
            times.append(max(self._probe_at, claims_from))  # only claiming finds out whether it can
        if not times:
            return earliest
        again = later(self._clock.now(), timedelta(seconds=max(min(times) - self._clock.monotonic(), 0.001)))
        return again if earliest is None else min(earliest, again)

    def meet(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims to be sent; one whose outcome is known and unwritten is held until it is written."""
        if not self.left and not self._void and not self._ending:
            return claims
        self._forget_what_is_old()
        ids = {claim.message.message_id for claim in claims}
        known = [self.left, self._void, *(ending.claims for ending in self._ending)]
        if all(each.keys().isdisjoint(ids) for each in known):  # nearly always, and quicker than to ask for each
            return claims
        return [claim for claim in claims if not self._is_known(claim)]

    def _is_known(self, claim: Claim) -> bool:
        message_id = claim.message.message_id
        left = self.left.get(message_id) or self._void.get(message_id)
        if left is None:
            return self._is_ending(claim)
        waits = left.back is not None and left.back.attempt_at is not None
        if left.mark != mark_of(claim.message) or (left.outcome is None and not waits):
            self._forget(message_id)
            return False
        if left.back is not None:
            if (left.back.attempt_at or self._clock.now()) <= self._clock.now():
                self._forget(message_id)
                return False
            left.back.claim = claim
        left.claim = claim
        self._hold(left)
        return True

    def _is_ending(self, claim: Claim) -> bool:
        message_id, mark = claim.message.message_id, mark_of(claim.message)
        found = (each for each in self._ending if message_id in each.claims)
        ending = next((each for each in found if mark_of(each.claims[message_id].message) == mark), None)
        if ending is None:
            return False
        left = _left(claim, claim, ending.outcome, ending.detail)
        left.again_at = self._clock.monotonic() + retry_delay(0).total_seconds()
        self._hold(left)
        return True

    # --- what is remembered -----------------------------------------------------------------------------------------

    def _hold(self, left: _Left) -> None:
        self._forget(left.message_id)  # a failed one goes to the end: others are tried alone before it
        self.left[left.message_id] = left

    def _avoid(self, left: _Left) -> None:
        """Note that a claim was lost; whoever claims its message next, it may be this process."""
        left.claim, left.void_since = None, self._clock.monotonic()
        self.left.pop(left.message_id, None)
        self._void.pop(left.message_id, None)
        self._void[left.message_id] = left

    def _forget(self, message_id: str) -> None:
        self.left.pop(message_id, None)
        self._void.pop(message_id, None)

    def _forget_what_is_old(self) -> None:
        """Forget lost claims whose messages have not come again for long, unless the store has failed meanwhile."""
        before = self._clock.monotonic() - _COMES_AGAIN_WITHIN_SECONDS
        if self._refuses or self._failed_at > before:
            return
        while self._void:
            first = next(iter(self._void.values()))
            if first.void_since > before:
                return
            del self._void[first.message_id]

    def _keep_bounds(self) -> None:
        """Forget the oldest lost claims; claims that are held are bounded by :meth:`room`."""
        for message_id in list(self._void)[: max(len(self.left) + len(self._void) - REMEMBERED, 0)]:
            del self._void[message_id]

    # --- writing ------------------------------------------------------------------------------------------------

    async def finish(self, claims: Sequence[Claim], outcome: Outcome, detail: str = "") -> None:
        at = self._clock.now()
        ending = _Ending({claim.message.message_id: claim for claim in claims}, outcome, detail)
        self._ending.append(ending)
        try:
            finished = await self._finish(claims, outcome, at, detail)
        except PostdateError as error:
            self._failed(error)
            unknown = [claim for claim in claims if claim.message.message_id not in self.left]
            self._remember([_left(claim, claim, outcome, detail) for claim in unknown], error)
            return
        finally:
            self._ending.remove(ending)
        self._journal.ended(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], at, detail)
        if finished < len(claims) and outcome is Outcome.DELIVERED:
            # Somebody removed it while we sent it (row 53); or the claim was lost, and the message may come again.
            log.warning("%d messages may have been delivered more than once", len(claims) - finished)
            self.sent(claims)

    async def _finish(self, claims: Sequence[Claim], outcome: Outcome, at: datetime, detail: str) -> int:
        finished = await self._deadlines.call_apart(lambda: self._store.finish(claims, outcome, at, detail))
        if finished:
            self._works()
        return finished

    def sent(self, claims: Sequence[Claim]) -> None:
        """Note messages that were sent although their claims are void: claimed again, they are only removed."""
        self._forget_what_is_old()
        for claim in claims:
            if claim.message.message_id not in self.left:
                self._avoid(_left(claim, None, Outcome.DELIVERED))
        self._keep_bounds()

    async def give_back(self, given: Sequence[GivingBack]) -> None:
        """Give claims back.

        Those without a failure go in one call, or a few; each failure is written by itself, several at once, as most of
        its time is waiting for the commit. A store that is unavailable is not asked for each of them.
        """
        failed = deque(each for each in given if each.reason is not None)
        await self._release([each for each in given if each.reason is None])

        async def some() -> None:
            while failed:
                each = failed.popleft()
                error = await self._retry_later(each)
                if error is not None:
                    self._give_back_again([each, *failed] if error.transient else [each], error)
                    if error.transient:
                        failed.clear()

        if failed:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(_GIVEN_BACK_AT_ONCE, len(failed))):
                    tasks.start_soon(some)

    async def _release(self, given: Sequence[GivingBack]) -> None:
        by_time: defaultdict[datetime | None, list[GivingBack]] = defaultdict(list)
        for each in given:
            by_time[each.attempt_at].append(each)
        for attempt_at, some in by_time.items():
            release = partial(self._store.release, [each.claim for each in some], attempt_at)
            try:
                await self._deadlines.call_apart(release)
            except PostdateError as error:
                self._failed(error)
                self._give_back_again(some, error)
            else:
                self._works()

    async def _retry_later(self, given: GivingBack) -> PostdateError | None:
        claim, now, reason = given.claim, self._clock.now(), given.reason or ""
        attempt_at = given.attempt_at or now
        try:
            there = await self._deadlines.call_apart(lambda: self._store.retry_later(claim, attempt_at, now, reason))
        except PostdateError as error:
            self._failed(error)
            return error
        self._works()
        if there:
            self._journal.ended(RecordKind.RETRIED, [claim.message], now, reason)
        elif (left := self.left.get(claim.message.message_id)) is not None:
            self._avoid(left)  # should it come again, it still waits
        elif claim.message.message_id not in self._void:
            log.warning("message %s was removed by another while it was being sent", claim.message.message_id)
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

    def keep(self, given: Sequence[GivingBack]) -> None:
        """Give claims back at a later look, as there is no time now."""
        for each in given:
            self._hold(_left(each.claim, each.claim, None, back=each))

    # --- when that fails ----------------------------------------------------------------------------------------

    def _failed(self, error: PostdateError, *, is_known: bool = False) -> None:
        """Note a failed write; one that ``is_known`` to fail alone says nothing about the store."""
        seconds = self._clock.monotonic()
        self._outage.failed(error, seconds)
        self._failed_at = seconds
        if seconds - self._counted_at >= _COUNTED_APART_SECONDS:
            self._counted_at = seconds
            self._failure_rate.failure(error, seconds)
        if not self._refuses and not is_known:
            self._refuses, self._probe_at = 1, seconds + retry_delay(0).total_seconds()

    def _pause(self, pause: timedelta) -> float:
        """Return a pause in seconds, shortened while it is the store that is waited for."""
        return (min(pause, _LONGEST_PROBE_PAUSE) if self._refuses else pause).total_seconds()

    def _works(self) -> None:
        if self._refuses:
            self._refuses = 0
        if self._outage.is_failing:
            self._failure_rate.success()
            self._outage.succeeded(self._clock.monotonic())

    def _remember(self, left: Sequence[_Left], error: PostdateError, at_least: timedelta = timedelta(0)) -> None:
        for each in left:
            pause = max(retry_delay(each.failures - 1, error), at_least)
            each.again_at = self._clock.monotonic() + self._pause(pause)
            self._hold(each)
        self._keep_bounds()

    def _give_back_again(self, given: Sequence[GivingBack], error: PostdateError) -> None:
        self._remember([_left(each.claim, each.claim, None, back=each) for each in given], error)

    async def again(self, *, at_once: bool = False) -> None:
        """Write remembered outcomes whose time has come."""
        if not self.left:
            return
        seconds = self._clock.monotonic()
        due = [left for left in self.left.values() if at_once or left.again_at <= seconds]
        back = [left.back for left in due if left.back is not None]
        ended: defaultdict[tuple[Outcome, str], list[_Left]] = defaultdict(list)
        for left in due:
            if left.outcome is not None:
                ended[left.outcome, left.detail].append(left)
        for (outcome, detail), some in ended.items():
            await self._finish_again(some, outcome, detail)
        if back:
            await self._give_back_what_was_kept(back)

    async def _give_back_what_was_kept(self, back: Sequence[GivingBack]) -> None:
        """Claims stay remembered until they are given back, also when this is cancelled."""
        before = {each.claim.message.message_id: self.left[each.claim.message.message_id] for each in back}
        await self.give_back(back)
        for message_id, left in before.items():
            if self.left.get(message_id) is left:
                del self.left[message_id]

    async def _finish_again(self, some: Sequence[_Left], outcome: Outcome, detail: str) -> None:
        are_their_own = not self._refuses
        error = await self._try_to_finish(some, outcome, detail)
        if error is None:
            return
        in_a_row = 0
        rest = deque(sorted(some, key=lambda left: left.failures))
        if len(some) == 1 or isinstance(error, StoreUnreachable):
            self._remember_again(some, error, are_their_own=are_their_own)
            return
        while rest and in_a_row < _ALONE:  # one that cannot be removed does not keep others
            left, are_their_own = rest.popleft(), not self._refuses
            error = await self._try_to_finish([left], outcome, detail)
            in_a_row = in_a_row + 1 if error else 0
            if error is not None:
                self._remember_again([left], error, are_their_own=are_their_own)
        for left in rest:
            left.again_at = self._clock.monotonic() + _LONGEST_PROBE_PAUSE.total_seconds()

    def _remember_again(self, some: Sequence[_Left], error: PostdateError, *, are_their_own: bool) -> None:
        """Wait longer each time where others could be written meanwhile: then it is not the store that fails."""
        for left in some:
            left.failures += are_their_own
        self._remember(some, error, timedelta(0) if are_their_own else _LONGEST_PROBE_PAUSE)

    async def _try_to_finish(self, some: Sequence[_Left], outcome: Outcome, detail: str) -> PostdateError | None:
        claims = [left.claim for left in some if left.claim is not None]
        at = self._clock.now()
        try:
            finished = await self._finish(claims, outcome, at, detail)
        except PostdateError as error:
            self._failed(error, is_known=len(some) == 1 and some[0].failures > 1)
            return error
        if finished:
            self._journal.ended(OUTCOME_RECORDS[outcome], [claim.message for claim in claims], at, detail)
        for left in some:
            if finished == len(claims) or outcome is not Outcome.DELIVERED:
                # A message that went to the error queue may come back from there, with the same id and content: taken
                # for the one that is to be removed, it would be lost. A second copy is a duplicate.
                self.left.pop(left.message_id, None)
            else:  # some claims were void: they are removed, or come again
                self._avoid(left)
        return None


def _left(
    of: Claim, claim: Claim | None, outcome: Outcome | None, detail: str = "", back: GivingBack | None = None
) -> _Left:
    return _Left(of.message.message_id, mark_of(of.message), claim, outcome, detail, back, 0.0)


class Doomed(Bounded[str, tuple[PostdateError, int, int, float]]):
    """Messages for the error queue, if they are claimed again, unchanged, within two minutes.

    By id: why, the mark, the number of failures, and until when, in monotonic seconds.
    """

    def add(self, message: DelayedMessage, error: PostdateError, failures: int, seconds: float) -> None:
        """Send a message to the error queue when it is claimed again with so many failures."""
        self[message.message_id] = error, mark_of(message), failures, seconds + _DOOMED_FOR_SECONDS

    def doom_of(self, message: DelayedMessage, seconds: float) -> PostdateError | None:
        """Return why a message goes to the error queue at once; ``None``: send it, as after a return from there."""
        if (doomed := self.pop(message.message_id, None)) is None:
            return None
        error, mark, failures, until = doomed
        is_it = mark == mark_of(message) and failures == message.number_of_failures
        return error if is_it and until >= seconds else None


def mark_of(message: DelayedMessage) -> int:
    """Return a hash of all that makes a message this one, should its id be used again for another."""
    return hash((message.due, message.destination, message.body, frozenset(message.headers.items())))
