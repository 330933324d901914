"""Messages that this process dispatches: noted in memory, for as long as the lease they were claimed under lasts.

Claiming costs no request: nobody else dispatches meanwhile. Source: ADR 0013.
"""

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
    """How many messages are claimed in one piece: fewer, and few in hand, while it takes long to get them done.

    A destination whose answers take more than a second counts as one that hangs, and what else waits for it is given
    back, at the cost of four changes a message. Whoever claims what an account, or a processor, gets done only in some
    seconds would so be kept from getting anything done.

    Args:
        longest: the most, and what is claimed as long as nothing is known to be slow.
    """

    def __init__(self, longest: int) -> None:
        self._longest = self._length = longest
        self._known_until = 0.0

    def room(self, held: int, now: float) -> int:
        """Return how many more to claim.

        Args:
            held: how many are in hand.
            now: by the clock of the event loop. What is known does not last: when nothing gets done any more, it may be
                one destination that hangs, and nobody else is to wait for it.
        """
        if now >= self._known_until:
            self._length = self._longest
        if self._length == self._longest:
            return self._longest
        return max(min(self._length, _PIECES_IN_HAND * self._length - held), 0)

    def done(self, now: float, seconds: float) -> None:
        """Note how long a piece took, from being claimed to being finished."""
        self._known_until = now + _KNOWN_FOR_SECONDS
        if seconds > _SLOW_SECONDS:
            self._length = min(max(self._length // 2, _SHORTEST), self._longest)
        elif seconds < _SLOW_SECONDS / 2:
            self._length = min(self._length + max(self._length // 4, 1), self._longest)


@dataclass(eq=False, slots=True)
class Held:
    """A message that is held; it is the token of its claim.

    Args:
        waiting: what is held.
        term: of the lease under which it was claimed.
        is_removed: whether it is out of the table already, and so ours whatever becomes of the lease (mode ``none``).
        since: when it was claimed, by the clock of the event loop.
    """

    waiting: DelayedEntity
    term: int
    is_removed: bool = False
    since: float = 0.0


class AzureClaims:
    """Everything that this process holds of one store."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._deferred: dict[str, datetime] = {}
        self._when_lost: list[Callable[[Collection[str]], None]] = []

    def __contains__(self, message_id: object) -> bool:
        return message_id in self._held

    def of(self, message_id: str) -> Held | None:
        """Return what holds a message; ``None`` when it is not held."""
        return self._held.get(message_id)

    def hold(self, held: Held) -> Claim:
        """Hold a message."""
        self._held[held.waiting.message.message_id] = held
        return Claim(held.waiting.message, held)

    def let_go(self, held: Iterable[Held]) -> None:
        """Hold these no more; another claim of the same message stays."""
        for each in held:
            if self._held.get(each.waiting.message.message_id) is each:
                del self._held[each.waiting.message.message_id]

    def defer(self, message_id: str, attempt_at: datetime) -> None:
        """Leave a message alone until then. Nobody else dispatches meanwhile, so it is written down nowhere."""
        self._deferred[message_id] = attempt_at

    def is_deferred(self, message_id: object) -> bool:
        """Return whether a message is left alone for now."""
        return message_id in self._deferred

    def end_deferring(self, now: datetime) -> bool:
        """Leave no message alone whose time has come; return whether there were any."""
        over = [id_ for id_, attempt_at in self._deferred.items() if attempt_at < now]
        for id_ in over:
            del self._deferred[id_]
        return bool(over)

    def no_longer_defer(self, message_id: str) -> None:
        """Leave one message alone no more, as somebody gave it another time."""
        self._deferred.pop(message_id, None)

    @property
    def next_deferred(self) -> datetime | None:
        """When the first of those that are left alone is to be attempted."""
        return min(self._deferred.values(), default=None)

    def forget(self) -> None:
        """Hold nothing more."""
        self._held.clear()
        self._deferred.clear()

    def __len__(self) -> int:
        return len(self._held)

    def lose(self) -> None:
        """Hold nothing more that another may have by now, because the lease is gone; tell who sends it."""
        ids = [id_ for id_, held in self._held.items() if not held.is_removed]
        for id_ in ids:
            del self._held[id_]
        for lost in list(self._when_lost) if ids else ():
            lost(ids)

    def still_holds(self, claim: Claim, lease: ContainerLease) -> bool:
        """See :meth:`postdate.ports.ClaimingStore.still_holds`."""
        return bool(self._ours([claim], lease))

    def when_lost(self, lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        """See :meth:`postdate.ports.ClaimingStore.when_lost`."""
        self._when_lost.append(lost)
        return lambda: self._when_lost.remove(lost)

    async def still_held(self, claims: Sequence[Claim], lease: ContainerLease) -> list[Held]:
        """Return what is ours beyond doubt; a lease that may have ended is asked for first.

        Raises:
            StoreUnavailable: whether the lease is still ours cannot be found out now.
        """
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
