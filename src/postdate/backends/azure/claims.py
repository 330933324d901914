"""Claims of this process, in memory only: nobody else dispatches under the lease. Source: ADR 0013."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from postdate.backends.azure.layout import DelayedEntity
from postdate.backends.azure.lease import ContainerLease
from postdate.ports import Claim

_SLOW_SECONDS: Final = 0.8
_SHORTEST: Final = 16
_PIECES_IN_HAND: Final = 4
_KNOWN_FOR_SECONDS: Final = 2.0


class ClaimLimit:
    """How many messages `claim_due` returns at once: fewer while finishing them takes long.

    A destination that takes more than a second counts as hanging, and its other messages are released, at four writes
    each. Large claims against an account that is merely slow would be released over and over.
    """

    def __init__(self, longest: int) -> None:
        self._longest = self._length = longest
        self._known_until = 0.0

    def room(self, held: int, now: float) -> int:
        """Return how many more messages to claim while ``held`` are in progress; ``now`` by the event loop's clock.

        After some seconds without a finished batch, the full limit again: one hanging destination must not stop the
        others.
        """
        if now >= self._known_until:
            self._length = self._longest
        if self._length == self._longest:
            return self._longest
        return max(min(self._length, _PIECES_IN_HAND * self._length - held), 0)

    def done(self, now: float, seconds: float) -> None:
        """Adjust the limit: a batch took ``seconds`` from claim to finish."""
        self._known_until = now + _KNOWN_FOR_SECONDS
        if seconds > _SLOW_SECONDS:
            self._length = min(max(self._length // 2, _SHORTEST), self._longest)
        elif seconds < _SLOW_SECONDS / 2:
            self._length = min(self._length + max(self._length // 4, 1), self._longest)


@dataclass(eq=False, slots=True)
class Held:
    """A claimed message; the token of its `Claim`.

    ``since`` is by the clock of the event loop. One that ``is_removed`` from the table already (mode ``none``) stays
    ours when the lease is lost; any other only during the ``term`` of the lease.
    """

    waiting: DelayedEntity
    term: int
    is_removed: bool = False
    since: float = 0.0


class AzureClaims:
    """All claims of this process in one store, and the messages that it leaves alone until a given time."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._deferred: dict[str, datetime] = {}
        self._when_lost: list[Callable[[Collection[str]], None]] = []

    def __contains__(self, message_id: object) -> bool:
        return message_id in self._held

    def of(self, message_id: str) -> Held | None:
        return self._held.get(message_id)

    def hold(self, held: Held) -> Claim:
        self._held[held.waiting.message.message_id] = held
        return Claim(held.waiting.message, held)

    def let_go(self, held: Iterable[Held]) -> None:
        """Drop these claims; a newer claim of the same message stays."""
        for each in held:
            if self._held.get(each.waiting.message.message_id) is each:
                del self._held[each.waiting.message.message_id]

    def defer(self, message_id: str, attempt_at: datetime) -> None:
        """Do not claim a message until ``attempt_at``; not written to the table, as only this process claims."""
        self._deferred[message_id] = attempt_at

    def is_deferred(self, message_id: object) -> bool:
        return message_id in self._deferred

    def end_deferring(self, now: datetime) -> bool:
        """Stop deferring messages whose time has come; return whether there were any."""
        over = [id_ for id_, attempt_at in self._deferred.items() if attempt_at < now]
        for id_ in over:
            del self._deferred[id_]
        return bool(over)

    def no_longer_defer(self, message_id: str) -> None:
        self._deferred.pop(message_id, None)

    @property
    def next_deferred(self) -> datetime | None:
        return min(self._deferred.values(), default=None)

    def forget(self) -> None:
        self._held.clear()
        self._deferred.clear()

    def __len__(self) -> int:
        return len(self._held)

    def lose(self) -> None:
        """Drop the claims that a new holder of the lease may take, and tell the listeners of `when_lost`."""
        ids = [id_ for id_, held in self._held.items() if not held.is_removed]
        for id_ in ids:
            del self._held[id_]
        for lost in list(self._when_lost) if ids else ():
            lost(ids)

    def still_holds(self, claim: Claim, lease: ContainerLease) -> bool:
        return bool(self._ours([claim], lease))

    def when_lost(self, lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        self._when_lost.append(lost)
        return lambda: self._when_lost.remove(lost)

    async def still_held(self, claims: Sequence[Claim], lease: ContainerLease) -> list[Held]:
        """Return the claims that are certainly ours: a lease that may have ended is renewed first."""
        if any(not held.is_removed for held in self._ours(claims, lease)):
            await lease.sure()
        return self._ours(claims, lease)

    def _ours(self, claims: Sequence[Claim], lease: ContainerLease) -> list[Held]:
        ours: list[Held] = []
        for claim in claims:
            held = self._held.get(claim.message.message_id)
            if held is None or held is not claim.token:
                continue
            if held.is_removed or lease.is_held_since(held.term):
                ours.append(held)
        return ours
