"""Messages that a dispatcher has claimed, and when it may claim more. Source: specification 1.7; ADR 0002."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

import anyio

from postdate.clock import Clock, time_until
from postdate.core.health.circuit_breaker import nobody
from postdate.core.recoverability import BYTES_IN_FLIGHT
from postdate.errors import PostdateError
from postdate.ports import Claim, ClaimingStore

BATCHES_AT_ONCE = 4
"""While one batch waits for its confirms the next are claimed and sent."""

MOST_CLAIMS = 8_000
"""Messages held in all, those of destinations that do not answer included."""

_FIRST = 100
"""Messages of the first batch, when their size is not known."""

GROUPS_OF_ONE_DESTINATION = 4
"""Sends to one destination at once; further groups wait for their turn, in hand."""

GROUPS_THAT_WAIT = 2
"""When a destination hangs and so many groups wait for it already, other messages for it are given back."""

HANGS_AFTER = timedelta(seconds=1)
"""A send that takes longer has met a destination that hangs: others do not wait for it."""


T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Group:
    """Messages that are sent in one call, in the order of their due times.

    ``destination`` is empty where one call takes all destinations. The deadline counts from ``since``, in monotonic
    seconds: when the batch began, and once the group has its turn, when that began.
    """

    destination: str
    claims: Sequence[Claim]
    since: float
    errors: Sequence[PostdateError | None] | None = None
    attempted: bool = False
    """Whether it had its turn; a group that only waited has not failed."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def begin_turn(self, seconds: float) -> None:
        """Count the deadline from now: waiting for a turn does not count against the destination."""
        self.attempted, self.since = True, seconds

    def is_hanging_on(self) -> bool:
        """Return whether it has neither an answer nor been cut off."""
        return self.errors is None and not self.scope.cancel_called


class Batch:
    """Messages claimed in one call; one message if it ``is_probe``, as the transport could not be reached before."""

    def __init__(self, claims: Sequence[Claim], now: datetime, began: float, *, is_probe: bool = False) -> None:
        self.now, self.began, self.is_probe = now, began, is_probe
        self.count, self.bytes = len(claims), sum(len(claim.message.body) for claim in claims)
        """Of all its messages; and of the bodies of those that are held."""
        self.held = {claim.message.message_id: claim for claim in claims}
        """Claims that are neither finished nor given back, by message id."""
        self.groups: list[Group] = []
        self.first_answer, self.all_answered = anyio.Event(), anyio.Event()
        self.is_late = False
        """Set when the answered groups have settled without the rest, of which each then settles by itself."""
        self.takes_a_place = True
        self.error_queue_is_down = False
        self.gave_back = False
        """Whether a message was given back, of whose next attempt a sleeping poller does not know."""
        self.counted: set[str] = set()
        """Ids of messages whose failure was written when they were given back: they leave without another record."""
        self.lost: set[str] = set()
        """Ids of messages that another process may have by now."""
        self.holds_less: Callable[[], None] = nobody
        """Called whenever claims have settled."""

    def answered(self) -> None:
        self.first_answer.set()
        if all(group.errors is not None for group in self.groups):
            self.all_answered.set()

    def settled(self, claims: Iterable[Claim]) -> None:
        """Note claims that are finished or given back."""
        for claim in claims:
            if self.held.pop(claim.message.message_id, None) is not None:
                self.bytes -= len(claim.message.body)
        self.holds_less()

    def lose(self, message_ids: Collection[str]) -> None:
        """Note claims that others may have, and end the sends of nothing but these."""
        self.lost |= self.held.keys() & message_ids
        for group in self.groups:
            if group.is_hanging_on() and all(claim.message.message_id in self.lost for claim in group.claims):
                group.scope.cancel()

    def is_ours(self, claim: Claim, store: ClaimingStore) -> bool:
        """Return whether a claim is in force, and note a lost one; asked right before anything leaves because of it."""
        if not store.still_holds(claim):
            self.lost.add(claim.message.message_id)
        return claim.message.message_id not in self.lost

    def sent(self) -> list[Claim]:
        """Return claims whose messages were sent and are still to be removed."""
        return [
            claim
            for group in self.groups
            for claim, error in zip(group.claims, group.errors or (), strict=False)
            if error is None and claim.message.message_id in self.held
        ]

    async def cut_off(self, clock: Clock, longest: timedelta) -> None:
        """Wait for all answers, and end each group that has none ``longest`` after it began."""
        seconds = longest.total_seconds()
        while waiting := [group.since for group in self.groups if group.is_hanging_on()]:
            await clock.wait_for(self.all_answered, time_until(min(waiting) + seconds, clock.monotonic()))
            now = clock.monotonic()
            for group in self.groups:
                if group.is_hanging_on() and group.since + seconds <= now:
                    group.scope.cancel()


@dataclass(slots=True)
class SendsToDestination:
    """The sends to one destination: how many groups wait or are being sent, and since when each of the latter is."""

    turns: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(GROUPS_OF_ONE_DESTINATION))
    sending_since: list[float] = field(default_factory=list[float])
    groups: int = 0


class InFlight:
    """Counts the batches in flight and the messages held."""

    def __init__(self, hangs_after: timedelta = HANGS_AFTER, bytes_at_most: int = BYTES_IN_FLIGHT) -> None:
        self._hangs_after, self._bytes_at_most = hangs_after, bytes_at_most
        self._body_bytes: float | None = None
        """Expected size of a message; goes up at once and down by degrees."""
        self._sends: defaultdict[str, SendsToDestination] = defaultdict(SendsToDestination)
        self._batches: set[Batch] = set()
        self._capacity_freed = anyio.Event()

    @property
    def batches(self) -> int:
        """Batches that take one of the places, :data:`BATCHES_AT_ONCE`."""
        return sum(batch.takes_a_place for batch in self._batches)

    @property
    def held(self) -> int:
        """Messages that are neither finished nor given back; to be read in any thread."""
        return sum(len(batch.held) for batch in list(self._batches))

    @property
    def bytes(self) -> int:
        return sum(batch.bytes for batch in self._batches)

    def among(self, message_ids: Collection[str]) -> set[str]:
        """Return ids whose messages are held already, by an earlier claim."""
        return {each for batch in self._batches for each in message_ids if each in batch.held}

    def expect_message_size(self, body_bytes: float) -> None:
        """Expect the next messages to be of this size; without a call only a few are claimed."""
        self._body_bytes = body_bytes

    def affordable(self, limit: int) -> int:
        """Return how many of ``limit`` messages may be claimed at once, if they are as large as those before."""
        if self._body_bytes is None:
            return min(limit, _FIRST)
        return max(1, min(limit, int(self._bytes_at_most / BATCHES_AT_ONCE / max(self._body_bytes, 1.0))))

    async def wait_for_room(self, limit: int) -> bool:
        """Wait until another batch of ``limit`` messages may be claimed; return whether that took any time."""
        waited = False
        while self._batches and (
            self.batches >= BATCHES_AT_ONCE or self.held + limit > MOST_CLAIMS or self.bytes >= self._bytes_at_most
        ):
            waited = True
            self._capacity_freed = anyio.Event()
            await self._capacity_freed.wait()
        return waited

    def begin(self, batch: Batch) -> None:
        self._batches.add(batch)
        if batch.count:
            self.expect_message_size(max(batch.bytes / batch.count, (self._body_bytes or 0.0) / 2))
        batch.holds_less = self._signal_capacity

    def give_up_place(self, batch: Batch) -> None:
        """Let another batch take the place of one whose rest takes long."""
        batch.takes_a_place = False
        self._signal_capacity()

    def lose(self, message_ids: Collection[str]) -> None:
        for batch in self._batches:
            batch.lose(message_ids)

    def end(self, batch: Batch) -> None:
        self._batches.discard(batch)
        self._signal_capacity()

    def _signal_capacity(self) -> None:
        self._capacity_freed.set()

    @asynccontextmanager
    async def turn(self, destination: str, clock: Clock) -> AsyncGenerator[None]:
        """Wait for a turn of a group to be sent to its destination."""
        sends = self._sends[destination]
        sends.groups += 1
        try:
            async with sends.turns:
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
        """Return whether its oldest send has taken too long already and enough groups wait for a turn."""
        sends = self._sends.get(destination)
        if sends is None or not sends.sending_since or sends.groups < GROUPS_OF_ONE_DESTINATION + GROUPS_THAT_WAIT:
            return False
        return seconds - sends.sending_since[0] >= self._hangs_after.total_seconds()


async def within(clock: Clock, longest: timedelta, call: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of ``call``, which raises nothing, or ``None`` when it was cancelled after ``longest``."""
    done, scope, result = anyio.Event(), anyio.CancelScope(), None

    async def end_it() -> None:
        await clock.wait_for(done, longest)
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_it)
        try:
            with scope:
                result = await call()
        finally:
            done.set()
    return result
