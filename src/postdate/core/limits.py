"""Limits of destinations: a pause, a rate, or windows. All services of a store apply them together.

A due message for a limited destination is not sent. The service that claims it releases it with an attempt time in the
lane of its destination. From the lane a service sends as many messages as the limits allow at that moment. A rate is
counted from one instant in the store; if several services try to advance it, only one succeeds. Source: ADR 34.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import msgspec

from postdate.clock import LATEST, Clock, later
from postdate.core.health.deadlines import Deadlines
from postdate.core.windows import Window
from postdate.errors import InvalidMessage, NotSupported, PostdateError
from postdate.messages import DESTINATION_LIMIT, check_text
from postdate.ports import Claim, ClaimingStore
from postdate.ports.limits import LimitingStore, StoredLimits
from postdate.runtime.bounded import Bounded

AT_ONCE: Final = 1_000
SAME_FOR: Final = 1.0
"""Seconds for which the limits read from a store are used before they are read again."""

_SLOT_SECONDS: Final = 0.1
"""Seconds between two turns of a rate. If the rate allows less than one message in a turn, a turn is one message."""

_CATCH_UP_SLOTS: Final = 2.0
_CATCH_UP_SLOTS_ONE_BY_ONE: Final = 1.5
"""The number of turns that may be sent together after a late poll, or if the lane was empty before.

If a turn is one message, only one message may be sent: 1.5 turns leave time for a late poll.
"""

_DECODED: Final = 10_000
"""The most destinations whose decoded limits are cached."""

_AHEAD: Final = timedelta(minutes=1)
"""An instant further ahead than this was set by a wrong clock, and counts as now. A nearer one is waited for."""

log = logging.getLogger("postdate.limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a destination; by default it has none.

    Args:
        paused: no message is sent until the destination is resumed.
        per_second: the number of messages a second on average, spread over each second; above 0.
        windows: messages are sent only within one of these, such as ``mon-fri 09:00-17:00 Europe/Paris``. Zones are
            read when the limits are set, and by each call of :meth:`next_opening`: zone files of machines differ and
            change.

    Raises:
        InvalidMessage: the rate is invalid.
        InvalidTimestamp: a window is invalid.
    """

    paused: bool = False
    per_second: float | None = None
    windows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rate: object = self.per_second
        if rate is not None and not (type(rate) in (int, float) and 0.0001 <= rate <= 1_000_000):
            raise InvalidMessage(f"{rate!r} messages a second is not a valid rate: give 0.0001 to 1,000,000, or none")
        for each in self.windows:
            Window.parse(each)

    @property
    def is_unreadable(self) -> bool:
        """Whether these stand for stored limits that cannot be read: they hold everything until they are replaced."""
        return self is _UNREADABLE

    def __str__(self) -> str:
        if self.is_unreadable:
            return "cannot be read: they hold everything until new limits are set"
        parts = ["paused"] if self.paused else []
        if self.per_second is not None:
            parts.append(f"at most {self.per_second:g} a second")
        return ", ".join([*parts, *(f"within {each}" for each in self.windows)]) or "no limits"

    def next_opening(self, now: datetime) -> datetime:
        """Return the next instant, UTC, at which pause and windows allow messages; ``now`` if they do so now.

        Raises:
            InvalidTimestamp: the zone files of this machine do not have the zone of a window, or not any more.
        """
        if self.paused:
            return LATEST
        return min((Window.parse(each).next_opening(now) for each in self.windows), default=now)

    def allowed_count(self, free_at: datetime, now: datetime) -> int:
        """Return how many messages the rate allows now; ``free_at``: the earliest instant of the next message."""
        if self.per_second is None:
            return AT_ONCE
        elapsed = (now - self._accrual_start(free_at, now)).total_seconds()
        return min(max(math.floor(elapsed * self.per_second + 1e-6), 0), AT_ONCE)

    def free_at_after(self, count: int, free_at: datetime, now: datetime) -> datetime:
        """Return ``free_at`` after ``count`` messages were sent. It always differs, so that other services notice."""
        if self.per_second is None:
            return later(free_at, timedelta(microseconds=1))
        return later(self._accrual_start(free_at, now), timedelta(seconds=count / self.per_second))

    def next_slot(self, free_at: datetime) -> datetime:
        """Return when more messages may be sent."""
        return later(free_at, timedelta(seconds=self._slot_seconds))

    @property
    def _slot_seconds(self) -> float:
        return 0.0 if self.per_second is None else max(_SLOT_SECONDS, 1 / self.per_second)

    def _accrual_start(self, free_at: datetime, now: datetime) -> datetime:
        slot = timedelta(seconds=self._slot_seconds)
        if free_at > later(now, _AHEAD):
            return later(now, -slot)
        catch_up_slots = _CATCH_UP_SLOTS if self._slot_seconds == _SLOT_SECONDS else _CATCH_UP_SLOTS_ONE_BY_ONE
        return max(free_at, later(now, -catch_up_slots * slot))


NO_LIMITS: Final = Limits()
_UNREADABLE: Final = Limits(paused=True)


def decode_limits(stored: StoredLimits) -> Limits:
    """Return the limits that a store keeps. Limits that are damaged or of a newer version stop all messages."""
    if (limits := _parse_limits(stored.limits)) is not None:
        return limits
    log.error(
        "nothing is delivered to %s: set its limits anew, for %r cannot be read", stored.destination, stored.limits
    )
    return _UNREADABLE


def _parse_limits(text: str) -> Limits | None:
    try:
        fields = msgspec.json.decode(text or "{}", type=dict[str, Any])
        return msgspec.convert(fields, Limits) if fields.keys() <= set(Limits.__dataclass_fields__) else None
    except (msgspec.MsgspecError, PostdateError):
        return None


def limiting_store(store: object) -> LimitingStore:
    """Return the store if it keeps limits; else raise `NotSupported`."""
    if isinstance(store, LimitingStore):
        return store
    raise NotSupported(
        f"{type(store).__name__} does not support limits of destinations; PostgreSQL, SQLite, MariaDB and memory do"
    )


async def load_limits_in_force(store: LimitingStore) -> dict[str, Limits]:
    """Return the limits that are in force, by destination."""
    return {each.destination: decode_limits(each) for each in await store.load_limits() if each.limits}


async def has_limits(store: object, destination: str) -> bool:
    """Return whether limits of a destination are in force. Then messages may be sent to it only through the store."""
    if not isinstance(store, LimitingStore):
        return False
    return any(each.limits for each in await store.load_limits([destination]))


async def change_limits(
    store: LimitingStore, destination: str, change: Callable[[Limits], Limits], now: datetime
) -> Limits:
    """Change the limits of a destination for all services of a store; return the new limits.

    If there was a rate before, the instant from which it counts stays.

    Raises:
        InvalidMessage: the name is invalid for a queue, or the change keeps a part of limits that cannot be read.
    """
    check_text(destination, "destination", DESTINATION_LIMIT)
    while True:
        stored = next(iter(await store.load_limits([destination])), None)
        previous_limits = NO_LIMITS if stored is None else _parse_limits(stored.limits) or _UNREADABLE
        limits = change(previous_limits)
        text = "" if limits == NO_LIMITS else msgspec.json.encode(limits).decode()
        if text == ("" if stored is None else stored.limits):
            return limits
        keeps_rate = stored is not None and None not in (previous_limits.per_second, limits.per_second)
        free_at = stored.free_at if stored is not None and keeps_rate else now
        if await store.store_limits(destination, text, free_at, "" if stored is None else stored.limits):
            return limits


def add_pause(limits: Limits) -> Limits:
    return replace(_check_readable(limits), paused=True)


def remove_pause(limits: Limits) -> Limits:
    return replace(_check_readable(limits), paused=False)


def _check_readable(limits: Limits) -> Limits:
    """Return limits that a change keeps in part. Raises `InvalidMessage` if they cannot be read."""
    if limits.is_unreadable:
        raise InvalidMessage(
            "the limits of this queue cannot be read: they are damaged, or of a newer version of postdate. Use that "
            "version, or set other limits in their place: postdate destinations limit"
        )
    return limits


def limit_change(per_second: float | None, windows: str | Sequence[str]) -> Callable[[Limits], Limits]:
    """Return the change to these limits. A pause stays; limits that cannot be read count as no limits."""
    window_texts = tuple(windows) if isinstance(windows, list | tuple) else (str(windows),)

    def change(limits: Limits) -> Limits:
        for each in window_texts:
            Window.parse_and_check_zone(each)  # with its zone
        return Limits(limits.paused and not limits.is_unreadable, per_second, window_texts)

    return change


# --- in a service -----------------------------------------------------------------------------------------------------


class LimitsCache:
    """The limits of a store as a service has read them, at most :data:`SAME_FOR` seconds old.

    It reads only the limits of destinations with messages: of those in a claimed batch, and of those whose lanes have
    messages. So limits of destinations without messages cost nothing, even if there are many.
    """

    def __init__(self, store: ClaimingStore, deadlines: Deadlines, clock: Clock) -> None:
        self._store = store if isinstance(store, LimitingStore) else None
        self._deadlines, self._clock = deadlines, clock
        self.has_limits = False
        """Whether limits are in force for any destination."""
        self.lanes = dict[str, tuple[StoredLimits, Limits]]()
        """The limits of destinations whose lanes have messages, including limits that were removed."""
        self.new_lanes = set[str]()
        """Destinations whose lanes have got messages from this service. The poll of a lane removes its entry."""
        self.version = 0
        """Changes whenever ``lanes`` or ``new_lanes`` do."""
        self._by_destination = dict[str, tuple[StoredLimits, Limits] | None]()
        self._fresh_until = -math.inf
        self._decoded = Bounded[str, tuple[str, Limits]](_DECODED)

    @property
    def is_forgotten(self) -> bool:
        """Whether the next call of :meth:`refresh` asks the store."""
        return self._fresh_until == -math.inf

    def forget(self) -> None:
        """Have the next call of :meth:`refresh` ask the store."""
        self._fresh_until = -math.inf

    def remember(self, stored: StoredLimits, limits: Limits) -> None:
        """Remember limits that this service has changed, or because of which it has put a message into a lane."""
        self.lanes[stored.destination] = (stored, limits)
        self.version += 1

    async def refresh(self) -> None:
        """Ask the store which limits are in use, unless the last answer is recent. Raises `PostdateError`."""
        if self._store is None or self._clock.monotonic() < self._fresh_until:
            return
        in_use = await self._deadlines.call_in_task(self._store.load_limits_in_use)
        self._fresh_until = self._clock.monotonic() + SAME_FOR
        self._by_destination.clear()
        self.has_limits, self.lanes = (
            in_use.has_limits,
            {each.destination: (each, self._decode(each)) for each in in_use.lanes},
        )
        self.version += 1

    async def load_destinations(self, destinations: Collection[str]) -> None:
        """Ask the store for the limits of destinations, for :meth:`entry_of`, unless the last answer is recent.

        Raises:
            PostdateError: the limits are not known.
        """
        await self.refresh()
        if self._store is None or not self.has_limits:
            return
        if unknown := set(destinations) - self._by_destination.keys():
            stored = await self._deadlines.call_in_task(partial(self._store.load_limits, unknown))
            self._by_destination |= dict.fromkeys(unknown)
            self._by_destination |= {each.destination: (each, self._decode(each)) for each in stored}

    def entry_of(self, destination: str) -> tuple[StoredLimits, Limits] | None:
        """Return the limits in force of a destination passed to :meth:`load_destinations` before.

        ``None``: it has none.
        """
        entry = self._by_destination.get(destination)
        return None if entry is None or entry[1] == NO_LIMITS else entry

    async def has_limits_for(self, destination: str) -> bool:
        """Return whether limits of a destination are in force. Then messages may be sent to it only through the store.

        Raises:
            PostdateError: the store does not answer.
        """
        await self.load_destinations([destination])
        return self.entry_of(destination) is not None

    def assign_lane(self, claim: Claim) -> datetime | None:
        """Return the attempt time with which to release a claim because of limits; ``None``: it may be sent."""
        if (entry := self.entry_of(claim.message.destination)) is None:
            return None
        stored, limits = entry
        if stored.destination not in self.lanes:
            self.remember(stored, limits)
        if stored.destination not in self.new_lanes:
            self.new_lanes.add(stored.destination)
            self.version += 1
        return stored.attempt_time(claim.message.due)

    def _decode(self, stored: StoredLimits) -> Limits:
        """Decode limits once for each text: unreadable limits are logged only once, and decoding windows takes time."""
        text, limits = self._decoded.get(stored.destination, (None, NO_LIMITS))
        if text != stored.limits:
            limits = decode_limits(stored)
            self._decoded[stored.destination] = (stored.limits, limits)
        return limits
