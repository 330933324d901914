"""Limits of destinations: paused, so many a second, within windows. All services of a store keep them together.

What is due for a destination with limits is not sent, but held: given back with an attempt time in the lane of its
destination, whoever claims it. From there a service lets through what the limits allow at that moment; how many a rate
allows is taken from one instant in the store, which only one of several services moves on. Source: ADR 34.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from postdate.clock import LATEST, Clock, later
from postdate.core.guard import Guard
from postdate.core.windows import Window
from postdate.errors import InvalidMessage, NotSupported, PostdateError
from postdate.messages import DESTINATION_LIMIT, check_text
from postdate.ports import Claim, ClaimingStore
from postdate.ports.limits import KeptLimits, LimitingStore

AT_ONCE: Final = 1_000
SAME_FOR: Final = 1.0
"""Seconds for which what a store said of its limits counts, where some are in force."""

_TURN: Final = 0.1
"""Seconds: under a rate, messages go in turns so far apart, or one by one if that is slower."""

_MADE_UP_FOR: Final = 2.0
_MADE_UP_FOR_ONE_BY_ONE: Final = 1.5
"""So many turns may go at once after a late look, or after nothing was held; where they are of one message, one."""

_AHEAD: Final = timedelta(minutes=1)
"""An instant so far ahead was set by a clock that is wrong: it counts as now. Nearer ones are waited for."""

log = logging.getLogger("postdate.limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a destination may be sent: everything, unless something is said.

    Args:
        paused: nothing, until that is taken back.
        per_second: so many messages on average, spread over each second; above 0.
        windows: only within one of these, such as ``mon-fri 09:00-17:00 Europe/Paris``.

    Raises:
        InvalidMessage: a rate that is none.
        InvalidTimestamp: a window that is none.
    """

    paused: bool = False
    per_second: float | None = None
    windows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rate: object = self.per_second
        if rate is not None and not (type(rate) in (int, float) and 0.0001 <= rate <= 1_000_000):
            raise InvalidMessage(f"{rate!r} messages a second is no rate: give 0.0001 to 1,000,000, or none")
        for each in self.windows:
            Window.read(each)

    def __str__(self) -> str:
        said = ["paused"] if self.paused else []
        if self.per_second is not None:
            said.append(f"at most {self.per_second:g} a second")
        return ", ".join([*said, *(f"within {each}" for each in self.windows)]) or "no limits"

    def opens(self, now: datetime) -> datetime:
        """Return ``now`` if messages may go then, as far as that is known beforehand; else when they may; UTC."""
        if self.paused:
            return LATEST
        return min((Window.read(each).opens(now) for each in self.windows), default=now)

    def allowed(self, free_at: datetime, now: datetime) -> int:
        """Return how many messages may go at once; ``free_at``: when the next might at the earliest."""
        if self.per_second is None:
            return AT_ONCE
        passed = (now - self._since(free_at, now)).total_seconds()
        return min(max(math.floor(passed * self.per_second + 1e-6), 0), AT_ONCE)

    def after(self, count: int, free_at: datetime, now: datetime) -> datetime:
        """Return ``free_at`` after ``count`` messages have gone; always another."""
        if self.per_second is None:
            return later(free_at, timedelta(microseconds=1))
        return later(self._since(free_at, now), timedelta(seconds=count / self.per_second))

    def next_turn(self, free_at: datetime) -> datetime:
        """Return when more may go."""
        return later(free_at, timedelta(seconds=self._turn))

    @property
    def _turn(self) -> float:
        return 0.0 if self.per_second is None else max(_TURN, 1 / self.per_second)

    def _since(self, free_at: datetime, now: datetime) -> datetime:
        turn = timedelta(seconds=self._turn)
        if free_at > later(now, _AHEAD):
            return later(now, -turn)
        made_up_for = _MADE_UP_FOR if self._turn == _TURN else _MADE_UP_FOR_ONE_BY_ONE
        return max(free_at, later(now, -made_up_for * turn))


NO_LIMITS: Final = Limits()
_UNREADABLE: Final = Limits(paused=True)


def limits_in(kept: KeptLimits) -> Limits:
    """Return what a store keeps. What is damaged, or of a newer version, lets nothing through."""
    if (limits := _read(kept.limits)) is not None:
        return limits
    log.error("nothing is delivered to %s: set its limits anew, for %r cannot be read", kept.destination, kept.limits)
    return _UNREADABLE


def _read(text: str) -> Limits | None:
    try:
        said = msgspec.json.decode(text or "{}", type=dict[str, Any])
        return msgspec.convert(said, Limits) if said.keys() <= set(Limits.__dataclass_fields__) else None
    except (msgspec.MsgspecError, PostdateError):
        return None


def limiting(store: object) -> LimitingStore:
    """Return the store if it keeps limits. Raises `NotSupported`."""
    if isinstance(store, LimitingStore):
        return store
    raise NotSupported(
        f"{type(store).__name__} keeps no limits of destinations; PostgreSQL, SQLite, MariaDB and memory do"
    )


async def limits_of(store: LimitingStore) -> dict[str, Limits]:
    """Return the limits that are in force, by destination."""
    return {each.destination: limits_in(each) for each in await store.kept_limits() if each.limits}


async def change_limits(
    store: LimitingStore, destination: str, change: Callable[[Limits], Limits], now: datetime
) -> Limits:
    """Have all services of a store keep other limits of a destination than before; return them.

    What cannot be read counts as no limits. A rate goes on where it was.

    Raises:
        InvalidMessage: no queue has such a name.
    """
    check_text(destination, "destination", DESTINATION_LIMIT)
    while True:
        kept = next((each for each in await store.kept_limits() if each.destination == destination), None)
        before = NO_LIMITS if kept is None else _read(kept.limits) or NO_LIMITS
        limits = change(before)
        text = "" if limits == NO_LIMITS else msgspec.json.encode(limits).decode()
        if text == ("" if kept is None else kept.limits):
            return limits
        goes_on = kept is not None and None not in (before.per_second, limits.per_second)
        free_at = kept.free_at if kept is not None and goes_on else now
        if await store.keep_limits(destination, text, free_at, "" if kept is None else kept.limits):
            return limits


def paused(limits: Limits) -> Limits:
    return replace(limits, paused=True)


def resumed(limits: Limits) -> Limits:
    return replace(limits, paused=False)


def limited(per_second: float | None, windows: str | Sequence[str]) -> Callable[[Limits], Limits]:
    """Return the change to these limits; what is paused stays so."""
    several = tuple(windows) if isinstance(windows, list | tuple) else (str(windows),)
    return lambda limits: Limits(limits.paused, per_second, several)


# --- in a service -----------------------------------------------------------------------------------------------------


class SeenLimits:
    """The limits of a store as a service has seen them, not long ago."""

    def __init__(self, store: ClaimingStore, asking: Guard, clock: Clock) -> None:
        self._store = store if isinstance(store, LimitingStore) else None
        self._asking, self._clock = asking, clock
        self.kept = dict[str, tuple[KeptLimits, Limits]]()
        """By destination; with lifted ones."""
        self._until = -math.inf
        self.any = False
        """Whether limits are in force."""
        self.held = set[str]()
        """Destinations for which something was held since this was emptied."""

    @property
    def is_forgotten(self) -> bool:
        """Whether the next look asks the store."""
        return self._until == -math.inf

    def forget(self) -> None:
        """See anew at the next look."""
        self._until = -math.inf

    def note(self, kept: KeptLimits) -> None:
        """Note what this service has changed."""
        if kept.destination in self.kept:
            self.kept[kept.destination] = (kept, self.kept[kept.destination][1])

    async def look(self) -> None:
        """See what the store has, unless that was a moment ago. Raises `PostdateError`."""
        if self._store is None or self._clock.monotonic() < self._until:
            return
        found = await self._asking.call(self._store.kept_limits)
        self._until = self._clock.monotonic() + SAME_FOR
        before, self.kept = self.kept, dict[str, tuple[KeptLimits, Limits]]()
        for kept in found:
            known = before.get(kept.destination)
            limits = known[1] if known is not None and known[0].limits == kept.limits else limits_in(kept)
            self.kept[kept.destination] = (kept, limits)
        self.any = any(kept.limits for kept in found)

    def holds(self, claim: Claim) -> datetime | None:
        """Return with which attempt time a message is given back that its destination's limits hold."""
        kept, limits = self.kept.get(claim.message.destination, (None, NO_LIMITS))
        if kept is None or limits == NO_LIMITS:
            return None
        self.held.add(kept.destination)
        return kept.place(claim.message.due)
