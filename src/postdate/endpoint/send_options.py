"""Options of sending one message: the keywords of every ``send``, and their checks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import random
from typing import Final, TypedDict

from postdate.clock import EARLIEST, later
from postdate.core.upkeep.wall_times import WallTime
from postdate.core.windows import Window
from postdate.endpoint.message_types import INFINITE
from postdate.errors import DelayConflict, InvalidMessage, InvalidTimestamp
from postdate.messages import LONGEST_TIME_TO_BE_RECEIVED, aware_utc, check_destination, check_id


class SendKeywords(TypedDict, total=False):
    """The keywords of every ``send``. :meth:`postdate.Endpoint.send` describes them."""

    destination: str | None
    delay: timedelta | None
    deliver_at: datetime | str | None
    expires_at: datetime | None
    time_to_be_received: timedelta | None
    use_dead_letter_queue: bool | None
    headers: Mapping[str, str] | None
    message_id: str | None
    zone: str | None
    window: str | None
    spread: timedelta | None


_TYPES: Final = {
    "delay": timedelta,
    "time_to_be_received": timedelta,
    "spread": timedelta,
    "zone": str,
    "window": str,
    "headers": Mapping,
}
"""The types of options that no other check verifies."""


_NAMES_ELSEWHERE: Final = {
    "countdown": "delay",
    "eta": "deliver_at",
    "expires": "expires_at",
    "name": "@postdate.message(name) above the class, or headers={Headers.ENCLOSED_MESSAGE_TYPES: name} for a class of "
    "somebody else",
    "queue": "destination",
    "routing_key": "destination",
    "run_at": "deliver_at",
    "schedule_at": "deliver_at",
    "scheduled_at": "deliver_at",
    "schedule_in": "delay",
    "task_id": "message_id",
    "ttl": "time_to_be_received",
}
"""Keywords of other libraries, and of :meth:`postdate.Endpoint.handler`, with what to write instead. The types of the
values may differ."""


def read_send_options(method: str, keywords: SendKeywords) -> SendOptions:
    """Return the options of a call of ``method``.

    Raises:
        TypeError: a keyword is unknown; the text names the method, and the keyword that is probably meant.
    """
    for name in keywords:
        if name not in SendKeywords.__annotations__:
            near = difflib.get_close_matches(name, SendKeywords.__annotations__, n=1)
            meant = _NAMES_ELSEWHERE.get(name) or next(iter(near), None)
            hint = f"use {meant}" if meant else f"it has {', '.join(SendKeywords.__annotations__)}"
            raise TypeError(f"{method}() has no keyword {name!r}; {hint}")
    return SendOptions(**keywords)


@dataclass(frozen=True, slots=True)
class SendOptions:
    """Options of sending one message: the keywords of :meth:`postdate.Endpoint.send`. They can be used several times.

    Raises:
        DelayConflict: options that exclude each other.
        InvalidMessage: a destination or an id that is blank or too long, a negative delay, or a time to be received of
            zero or less.
        InvalidTimestamp: a date-time without a time zone.
    """

    destination: str | None = None
    delay: timedelta | None = None
    deliver_at: datetime | str | None = None
    expires_at: datetime | None = None
    time_to_be_received: timedelta | None = None
    use_dead_letter_queue: bool | None = None
    headers: Mapping[str, str] | None = None
    message_id: str | None = None
    zone: str | None = None
    window: str | None = None
    spread: timedelta | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.destination is not None:
            check_destination(self.destination)
        if self.message_id is not None:
            check_id(self.message_id)
        if self.delay is not None and self.deliver_at is not None:
            raise DelayConflict("delay and deliver_at exclude each other: give one of them")
        if self.zone is not None and (self.window, self.spread) != (None, None):
            raise DelayConflict(
                "a message with a zone is due exactly at its local time: leave out the window and the spread"
            )
        for name in ("delay", "spread"):
            if (getattr(self, name) or timedelta(0)) < timedelta(0):
                raise InvalidMessage(f"{name} must not be negative, not {getattr(self, name)}")
        if self.time_to_be_received is not None and self.time_to_be_received <= timedelta(0):
            raise InvalidMessage(f"time_to_be_received must be above zero, not {self.time_to_be_received}")
        if self.time_to_be_received is not None and (LONGEST_TIME_TO_BE_RECEIVED < self.time_to_be_received < INFINITE):
            raise InvalidMessage(
                f"time_to_be_received is longer than {LONGEST_TIME_TO_BE_RECEIVED.days:,} days: "
                f"{self.time_to_be_received}; leave it out, or use timedelta.max for a message that never expires"
            )
        if self.use_dead_letter_queue is not None and self.is_delayed:
            raise DelayConflict(
                "use_dead_letter_queue is for the queue that a message is sent to at once: not with a delay"
            )
        self._check_due()
        if self.expires_at is not None:
            aware_utc(self.expires_at, "expires_at")

    def _check_types(self) -> None:
        """Raise an error for values of another type, which callers without type checks may pass."""
        for name, kind in _TYPES.items():
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidMessage(f"{name} must be a {kind.__name__}, not {type(value).__name__} {value!r}")

    def _check_due(self) -> None:
        """Raise an error for an impossible due time or window."""
        self._due(EARLIEST, EARLIEST)
        if self.window is not None:
            Window.parse_and_check_zone(self.window)

    @property
    def is_delayed(self) -> bool:
        """Whether the message has a delay, a due time, a window or a spread."""
        return (self.delay, self.deliver_at, self.window, self.spread) != (None,) * 4

    @property
    def wall_time(self) -> WallTime | None:
        """The due time as a local time of ``zone``; ``None`` without a zone."""
        return None if self.zone is None else WallTime.parse(self.deliver_at, self.zone)

    def due(self, now: datetime, latest: datetime | None = None) -> datetime | None:
        """Return the due time in UTC; ``None``: at once; the last instant of the calendar: never.

        A delay counts from ``latest``, the latest time that an inexact clock may mean; ``None``: from ``now``. With
        ``spread`` each call returns another time. All instants of the spread at which the window is open are equally
        likely.
        """
        due = self._due(now, now if latest is None else latest)
        if self.window is None and self.spread is None:
            return due
        due, spread = max(due or now, now), self.spread or timedelta(0)
        share = random()  # noqa: S311 - no secret
        if self.window is not None:
            return Window.parse_and_check_zone(self.window).instant_within(due, spread, share)
        return due + share * (later(due, spread) - due)

    def _due(self, now: datetime, latest: datetime) -> datetime | None:
        if (wall_time := self.wall_time) is not None:
            return wall_time.instant()
        if isinstance(self.deliver_at, str):
            raise InvalidTimestamp(f"deliver_at={self.deliver_at!r} is a local time: name its time zone with zone='…'")
        if self.deliver_at is not None:
            return aware_utc(self.deliver_at, "deliver_at")
        if self.delay is None:
            return None
        return later(latest, self.delay) if self.delay else now  # with a delay of zero, it is due already
