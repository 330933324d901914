"""Wall times: messages that are due when the clocks of a zone show a time, whatever becomes of its rules. ADR 33.

A store that has such messages has a *marker* for each of their zones, which waits for ever: its body is the rules by
which they are due, with those of before. A service compares them with its own at its start and once a day, and reads
messages only where they differ, or did so lately. A message that was given another due time by hand has no header of a
wall time any more (ADR 42), and is left alone.
"""

from __future__ import annotations

import base64
import json
import logging
from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, Self, TypeGuard

from postdate.clock import LATEST, Clock
from postdate.core.changes import Pending, PendingPages
from postdate.core.upkeep.daily import Daily
from postdate.core.zones import DAMAGED, SAME_FOR_SECONDS, SOURCE, have_same_rules, read_rules, rules_of, zone_by
from postdate.errors import InvalidMessage, InvalidTimestamp, NotSupported
from postdate.messages import MARKERS, OWN_PREFIX, DelayedMessage, Headers, Origin
from postdate.ports import AdministrableStore, ClaimingStore, MessageFilter, ReplacingStore
from postdate.ports.changing import KeyedIds

_KEY: Final = OWN_PREFIX + "{}"
"""Under which the marker of a zone waits."""

_SECOND_TIME: Final = ";fold=1"
"""Behind a time that clocks show twice: the second of the two instants."""

_LOOKED_FOR: Final = timedelta(days=30)
"""After new rules, messages are looked for that were sent by those of before, and stored since."""

_RENEWED_AFTER: Final = timedelta(days=1)
"""Senders that still have rules of before have the search go on; they write the marker no more often than this."""

_MOST_RULES: Final = 8

log = logging.getLogger("postdate.wall_times")


@dataclass(frozen=True, slots=True)
class WallTime:
    """What the clocks of a zone show.

    A time that they show twice is the first of the two instants; one that they leave out is as long after the gap began
    as it says: 02:30 becomes 03:30 where clocks go from 2 to 3. With ``fold=1`` it is the second of the two instants,
    and a time that is left out is as long before the end of the gap, as :mod:`zoneinfo` has it.

    Args:
        local: date and time, without a time zone.
        zone: such as ``Europe/Paris``.
    """

    local: datetime
    zone: str

    @classmethod
    def read(cls, local: datetime | str | None, zone: str) -> Self:
        """Return what an application says. Raises `InvalidTimestamp`."""
        try:
            parsed = _parse_local(local) if isinstance(local, str) else local
        except ValueError as error:
            raise InvalidTimestamp(f"deliver_at={local!r} is no date and time, such as '2027-03-28 09:00'") from error
        if not isinstance(parsed, datetime) or parsed.tzinfo is not None:
            raise InvalidTimestamp(
                f"with zone={zone!r}, deliver_at is what clocks show there, without an offset, such as "
                f"'2027-03-28 09:00'; not {local!r}"
            )
        wall = cls(parsed, zone)
        wall.instant()
        return wall

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self | None:
        """Return that of a message, if it has one that can be read."""
        local, _, zone = headers.get(Headers.WALL_TIME, "").rpartition(" ")
        try:
            return cls(_parse_local(local), zone) if local else None
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.local.isoformat()}{_SECOND_TIME if self.local.fold else ''} {self.zone}"

    def instant(self, rules: bytes | None = None) -> datetime:
        """Return the instant by these rules, or by those of now, UTC. Raises `InvalidTimestamp`."""
        zone = zone_by(rules_of(self.zone) if rules is None else rules)
        try:
            return self.local.replace(tzinfo=zone).astimezone(UTC)
        except OverflowError as error:
            raise InvalidTimestamp(f"{self} is outside of the years 1 to 9999") from error


def _parse_local(text: str) -> datetime:
    """Return the date and time that a text says. Raises `ValueError`."""
    return datetime.fromisoformat(text.removesuffix(_SECOND_TIME)).replace(fold=int(text.endswith(_SECOND_TIME)))


# --- markers ----------------------------------------------------------------------------------------------------------


class Keeping(ReplacingStore, AdministrableStore, ClaimingStore, ABC):
    """A store that can have messages follow a zone."""

    @classmethod
    def is_one(cls, store: object) -> TypeGuard[Keeping]:
        return isinstance(store, ReplacingStore) and isinstance(store, AdministrableStore)


def rules_in(marker: DelayedMessage) -> list[bytes]:
    """Return the rules of a marker, the newest first. Raises `ValueError` for one that is damaged."""
    try:
        rules = [base64.b64decode(each, validate=True) for each in json.loads(marker.body)]
        if rules and all(map(zone_by, rules)):
            return rules
    except (TypeError, *DAMAGED) as error:
        raise ValueError(f"its marker is damaged: {error}") from error
    raise ValueError("its marker is damaged: there are no rules in it")


async def markers(store: AdministrableStore) -> list[DelayedMessage]:
    """Return the markers of a store, if it can have any. It looks at the rows of all messages, not at their content."""
    if not Keeping.is_one(store):
        return []
    return list(await store.list_pending(MessageFilter(MARKERS, due_from=LATEST), 1_000))


class KeptZones:
    """Sees to it that a store has a marker for each zone of the messages that it is given."""

    def __init__(self, store: ClaimingStore) -> None:
        self._store, self._marked_at = store, dict[str, float]()

    def check(self, zone: str) -> Keeping:
        """Return the store. Raises `NotSupported` if it cannot have messages follow a zone."""
        if Keeping.is_one(self._store):
            return self._store
        raise NotSupported(
            f"{type(self._store).__name__} cannot have messages follow the clocks of {zone}: give deliver_at as an "
            f"instant, with its offset, and no zone"
        )

    async def keep(self, zone: str, now: datetime) -> None:
        """See to its marker, once a minute. Raises `NotSupported`, `InvalidTimestamp`."""
        store, seconds = self.check(zone), SOURCE.get().seconds()
        if seconds - self._marked_at.get(zone, float("-inf")) >= SAME_FOR_SECONDS:
            rules = read_rules(zone)
            await note_rules(store, zone, [rules.content], rules.version, now)
            self._marked_at[zone] = seconds


async def note_rules(store: Keeping, zone: str, rules: Sequence[bytes], version: str, now: datetime) -> None:
    """See to it that the marker of a zone is there and has ``rules``, behind those that it has.

    So messages that are due by them, sent where zone files are older, are found by services for some time: counted anew
    as long as such messages come. ``version`` is that of the files that the first of ``rules`` are from.
    """
    marker = await store.get(KeyedIds(_KEY.format(zone)).first)
    if marker is None or marker.destination != MARKERS:  # it was cancelled, and made anew, under another number
        marker = next((each for each in await markers(store) if each.headers.get("zone") == zone), None)
    marker_rules, since, moved = list[bytes](), now, 0
    if marker is not None:
        with suppress(ValueError):  # what is damaged is made anew
            marker_rules, since, moved = rules_in(marker), _since(marker), int(marker.headers.get("moved", ""))
    new = [each for each in rules if not any(have_same_rules(each, there, now.year) for there in marker_rules)]
    has_former = bool(marker_rules) and not all(have_same_rules(each, marker_rules[0], now.year) for each in rules)
    if not new and not (has_former and now - since > _RENEWED_AFTER):
        return
    if marker_rules:
        log.warning("the rules of %s here are not those that messages wait by: update the zone files", zone)
        version = marker.headers.get("version", "") if marker is not None else version
    await _mark(store, zone, [*marker_rules, *new], version, 0 if new else moved, now)


def _since(marker: DelayedMessage) -> datetime:
    """Return since when messages are looked for that are due by rules of before. Raises `ValueError`."""
    return datetime.fromisoformat(marker.headers.get("at", ""))


async def _mark(store: Keeping, zone: str, rules: Sequence[bytes], version: str, moved: int, since: datetime) -> None:
    """Write the marker of a zone: its ``rules`` are the newest first, and those are from files of ``version``."""
    headers = {"zone": zone, "moved": str(moved), "at": since.isoformat(), "version": version}
    body = json.dumps([base64.b64encode(each).decode() for each in rules[:_MOST_RULES]]).encode()
    await store.replace(_KEY.format(zone), lambda id_, _: DelayedMessage(id_, LATEST, MARKERS, headers, body), since)


# --- following --------------------------------------------------------------------------------------------------------


def wall_times(store: Keeping, clock: Clock) -> Daily:
    """Return the loop that moves what waits to where new rules of its zone have it."""

    async def follow(daily: Daily) -> bool:
        claimed = 0
        for marker in await daily.ask(partial(markers, store)):
            zone = marker.headers.get("zone", "")
            try:
                claimed += await _follow_zone(daily, marker, zone)
            except (InvalidTimestamp, ValueError) as error:
                log.warning("messages for %r stay where they are: %s", zone, error)
        if claimed:
            log.warning("somebody holds %d messages that new rules of a zone move; they are moved in an hour", claimed)
        return not claimed

    async def _follow_zone(daily: Daily, marker: DelayedMessage, zone: str) -> int:
        """Return how many messages could not be moved, as somebody holds them."""
        now, mine, all_rules = clock.now(), read_rules(zone), rules_in(marker)
        since, total = _since(marker), int(marker.headers.get("moved", ""))
        if changed := not have_same_rules(mine.content, all_rules[0], now.year):
            if "" < mine.version < marker.headers.get("version", ""):
                log.warning(
                    "the zone files here are %s, older than those that messages wait by: update them", mine.version
                )
                return 0
            # Before anything is moved: a process that is killed half way leaves the rules of before.
            all_rules, since, total = [mine.content, *(each for each in all_rules if each != mine.content)], now, 0
            await daily.ask(partial(_mark, store, zone, all_rules, mine.version, 0, now))
        if not changed and (len(all_rules) == 1 or now - since > _LOOKED_FOR):
            return 0
        moved, claimed = await _move(daily, zone, mine.content)
        if moved:
            log.warning("the rules of %s have changed: %d messages were moved", zone, moved)
            await daily.ask(partial(_mark, store, zone, all_rules, mine.version, total + moved, since))
        return claimed

    async def _move(daily: Daily, zone: str, rules: bytes) -> tuple[int, int]:
        """Return how many messages were moved, and how many could not be as somebody holds them.

        Whatever has the header of a wall time moves, by whichever rules it is due now: of two services that look at
        once with different rules, one may overwrite the marker of the other, so that its rules are in none.
        """
        reading, counts = PendingPages(Pending(zone=zone, origins=frozenset(Origin)), None), {True: 0, False: 0}
        while not reading.is_over and await daily.pause(0):
            for message in reading.take(await daily.ask(partial(store.read_pending, *reading.ask()))):
                wall = WallTime.of(message.headers)
                with suppress(InvalidTimestamp, InvalidMessage):  # there is no such instant, or it expires before
                    if wall is not None and (due := wall.instant(rules)) != message.due:
                        counts[await _moved(daily, message, wall, due)] += 1
        return counts[True], counts[False]

    async def _moved(daily: Daily, message: DelayedMessage, wall: WallTime, due: datetime) -> bool:
        current = await daily.ask(partial(store.get, message.message_id))
        if current is None or (current.due, current.headers) != (message.due, message.headers):
            return True  # it ended, or was changed since its page was read, and is left alone
        done = await daily.ask(partial(store.reschedule, message.message_id, due, clock.now(), str(wall)))
        if done:
            log.info("message %s, for %s, is due at %s instead of %s", message.message_id, wall, due, message.due)
        return done or await daily.ask(partial(store.get, message.message_id)) is None

    return Daily(store, clock, "changes of time zones are not followed", timedelta(0), follow)
