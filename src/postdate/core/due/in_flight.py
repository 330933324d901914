"""The messages that a dispatcher has claimed, and its capacity for more. Source: ADR 0002."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

import anyio

from postdate.clock import Clock, time_until
from postdate.core.health.circuit_breaker import do_nothing
from postdate.core.recoverability import BYTES_IN_FLIGHT
from postdate.errors import PostdateError
from postdate.ports import Claim, ClaimingStore

BATCHES_AT_ONCE = 4
"""The number of batches in flight: while one waits for its confirms, the next ones are claimed and sent."""

MOST_CLAIMS = 8_000
"""The largest number of claimed messages in total, including those whose destination does not answer."""

_FIRST = 100
"""The largest number of messages in the first batch, as their size is not known yet."""

GROUPS_OF_ONE_DESTINATION = 4
"""The number of concurrent sends to one destination. Further groups keep their claims and wait for a slot."""

GROUPS_THAT_WAIT = 2
"""If a destination hangs and this many groups wait for it, claims of further messages for it are released."""

HANGS_AFTER = timedelta(seconds=1)
"""A destination hangs if a send to it takes longer than this. Other destinations do not wait for it."""


T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Group:
    """Messages that are sent in one call, in the order of their due times.

    ``destination`` is empty if one call sends to all destinations. The deadline counts from ``started_at``, in
    monotonic seconds: when the batch was claimed, and once the group has a slot, when it got the slot.
    """

    destination: str
    claims: Sequence[Claim]
    started_at: float
    errors: Sequence[PostdateError | None] | None = None
    attempted: bool = False
    """Whether the group had a slot. A group that only waited for a slot has not failed."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def start_deadline(self, seconds: float) -> None:
        """Start the deadline now: the wait for a slot does not count against the destination."""
        self.attempted, self.started_at = True, seconds

    def is_unanswered(self) -> bool:
        """Return whether the group is neither answered nor cancelled."""
        return self.errors is None and not self.scope.cancel_called


class Batch:
    """Messages claimed in one call.

    A batch that ``is_probe`` has one message, because the transport was out of reach before. ``claimed_at`` is in
    monotonic seconds.
    """

    def __init__(self, claims: Sequence[Claim], now: datetime, claimed_at: float, *, is_probe: bool = False) -> None:
        # All fields belong to the thread of the event loop; metrics read the length of `open_claims` in any thread.
        self.now = now
        """The instant of the poll. Messages that have expired by then are not sent."""
        self.claimed_at = claimed_at
        self.is_probe = is_probe
        self.claim_count = len(claims)
        """The number of messages that were claimed, finished ones included."""
        self.body_bytes = sum(len(claim.message.body) for claim in claims)
        """The size of the bodies of messages in ``open_claims``."""
        self.open_claims = {claim.message.message_id: claim for claim in claims}
        """Claims that are neither finished nor released, by message id."""
        self.groups: list[Group] = []
        self.first_answer = anyio.Event()
        """Set when a group is answered."""
        self.all_answered = anyio.Event()
        """Set when all groups are answered."""
        self.is_late = False
        """Set when the answered groups are finished without the others. Each later group is then finished by itself."""
        self.counts_against_limit = True
        """Whether it counts as one of the :data:`BATCHES_AT_ONCE`."""
        self.is_error_queue_down = False
        """Set when the error queue has refused an error copy with a transient error: it is not tried again here."""
        self.has_released = False
        """Whether a claim was released. A sleeping poller does not know the next attempt of that message."""
        self.recorded_failures: set[str] = set()
        """Ids of messages whose failure is recorded already; the store records no second failure for them."""
        self.lost_ids: set[str] = set()
        """Ids of messages that another process may have by now."""
        self.on_release: Callable[[], None] = do_nothing
        """Called whenever claims are finished or released."""

    def signal_answer(self) -> None:
        self.first_answer.set()
        if all(group.errors is not None for group in self.groups):
            self.all_answered.set()

    def forget_claims(self, claims: Iterable[Claim]) -> None:
        """Remove claims that are finished or released."""
        for claim in claims:
            if self.open_claims.pop(claim.message.message_id, None) is not None:
                self.body_bytes -= len(claim.message.body)
        self.on_release()

    def remember_lost(self, message_ids: Collection[str]) -> None:
        """Remember lost claims, and cancel the sends of groups in which all claims are lost."""
        self.lost_ids |= self.open_claims.keys() & message_ids
        for group in self.groups:
            if group.is_unanswered() and all(claim.message.message_id in self.lost_ids for claim in group.claims):
                group.scope.cancel()

    def is_in_force(self, claim: Claim, store: ClaimingStore) -> bool:
        """Return whether a claim is in force, and remember a lost one. Call this right before a send."""
        if not store.is_in_force(claim):
            self.lost_ids.add(claim.message.message_id)
        return claim.message.message_id not in self.lost_ids

    def sent_claims(self) -> list[Claim]:
        """Return the claims whose messages were sent and are not removed yet."""
        return [
            claim
            for group in self.groups
            for claim, error in zip(group.claims, group.errors or (), strict=False)
            if error is None and claim.message.message_id in self.open_claims
        ]

    async def cancel_late_groups(self, clock: Clock, longest: timedelta) -> None:
        """Wait for all answers, and cancel each group that is not answered ``longest`` after its start."""
        seconds = longest.total_seconds()
        while waiting := [group.started_at for group in self.groups if group.is_unanswered()]:
            await clock.wait_for(self.all_answered, time_until(min(waiting) + seconds, clock.monotonic()))
            now = clock.monotonic()
            for group in self.groups:
                if group.is_unanswered() and group.started_at + seconds <= now:
                    group.scope.cancel()


@dataclass(slots=True)
class SendsToDestination:
    """The sends to one destination.

    ``groups`` counts groups that wait or are being sent. ``sending_since`` has the monotonic seconds at which each
    current send began, the oldest first.
    """

    slots: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(GROUPS_OF_ONE_DESTINATION))
    sending_since: list[float] = field(default_factory=list[float])
    groups: int = 0


class InFlight:
    """The batches in flight, with the number and size of their messages."""

    def __init__(self, hangs_after: timedelta = HANGS_AFTER, bytes_at_most: int = BYTES_IN_FLIGHT) -> None:
        self._hangs_after, self._bytes_at_most = hangs_after, bytes_at_most
        self._expected_body_bytes: float | None = None
        """Expected size of a message. It rises at once with larger messages, and falls by at most half with a batch."""
        self._sends: defaultdict[str, SendsToDestination] = defaultdict(SendsToDestination)
        self._batches: set[Batch] = set()
        self._capacity_freed = anyio.Event()

    @property
    def batch_count(self) -> int:
        """The number of batches that count against :data:`BATCHES_AT_ONCE`."""
        return sum(batch.counts_against_limit for batch in self._batches)

    @property
    def claim_count(self) -> int:
        """The number of messages that are neither finished nor released. Read in any thread."""
        return sum(len(batch.open_claims) for batch in list(self._batches))

    @property
    def body_bytes(self) -> int:
        return sum(batch.body_bytes for batch in self._batches)

    def claimed_ids(self, message_ids: Collection[str]) -> set[str]:
        """Return the ids of messages that this process has claimed earlier and not finished yet."""
        return {each for batch in self._batches for each in message_ids if each in batch.open_claims}

    def expect_message_size(self, body_bytes: float) -> None:
        """Set the expected size of the next messages. Until this is called, a batch has only a few messages."""
        self._expected_body_bytes = body_bytes

    def affordable_count(self, limit: int) -> int:
        """Return how many of ``limit`` messages may be claimed now, if they are as large as the previous ones."""
        if self._expected_body_bytes is None:
            return min(limit, _FIRST)
        return max(1, min(limit, int(self._bytes_at_most / BATCHES_AT_ONCE / max(self._expected_body_bytes, 1.0))))

    async def wait_for_capacity(self, limit: int) -> bool:
        """Wait until a further batch of ``limit`` messages may be claimed; return whether there was a wait."""
        has_waited = False
        while self._batches and (
            self.batch_count >= BATCHES_AT_ONCE
            or self.claim_count + limit > MOST_CLAIMS
            or self.body_bytes >= self._bytes_at_most
        ):
            has_waited = True
            self._capacity_freed = anyio.Event()
            await self._capacity_freed.wait()
        return has_waited

    def add_batch(self, batch: Batch) -> None:
        self._batches.add(batch)
        if batch.claim_count:
            self.expect_message_size(max(batch.body_bytes / batch.claim_count, (self._expected_body_bytes or 0.0) / 2))
        batch.on_release = self._signal_capacity

    def stop_counting(self, batch: Batch) -> None:
        """Stop counting a batch against :data:`BATCHES_AT_ONCE`, as its last groups may take long."""
        batch.counts_against_limit = False
        self._signal_capacity()

    def remember_lost(self, message_ids: Collection[str]) -> None:
        for batch in self._batches:
            batch.remember_lost(message_ids)

    def forget_batch(self, batch: Batch) -> None:
        self._batches.discard(batch)
        self._signal_capacity()

    def _signal_capacity(self) -> None:
        self._capacity_freed.set()

    @asynccontextmanager
    async def acquire_slot(self, destination: str, clock: Clock) -> AsyncGenerator[None]:
        """Wait for a slot to send a group to a destination; leaving the context releases the slot."""
        sends = self._sends[destination]
        sends.groups += 1
        try:
            async with sends.slots:
                since = clock.monotonic()
                sends.sending_since.append(since)
                try:
                    yield
                finally:
                    sends.sending_since.remove(since)
        finally:
            sends.groups -= 1
            if not sends.groups:
                del self._sends[destination]

    def is_full(self, destination: str, seconds: float) -> bool:
        """Return whether a destination hangs, and enough groups wait for a slot already."""
        sends = self._sends.get(destination)
        if sends is None or not sends.sending_since or sends.groups < GROUPS_OF_ONE_DESTINATION + GROUPS_THAT_WAIT:
            return False
        return seconds - sends.sending_since[0] >= self._hangs_after.total_seconds()


async def run_within(clock: Clock, longest: timedelta, call: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of ``call``, which must not raise; ``None`` if it was cancelled after ``longest``."""
    is_done, scope, result = anyio.Event(), anyio.CancelScope(), None

    async def cancel_at_deadline() -> None:
        await clock.wait_for(is_done, longest)
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_at_deadline)
        try:
            with scope:
                result = await call()
        finally:
            is_done.set()
    return result
