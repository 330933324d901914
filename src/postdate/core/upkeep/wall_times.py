"""Messages that are due when the clocks of a zone show a time, also if the rules of the zone change. Source: ADR 33.

A store with such messages has a *marker* for each of their zones. A marker is a message that waits for ever; its body
has the rules by which the messages are due, and the former rules. A service compares these rules with its own at its
start and once a day. It reads messages only if the rules differ, or did so recently. A message that an operator has
rescheduled has no wall time header any more (ADR 42), and is not changed.
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
from postdate.core import zones
from postdate.core.changes import Pending, PendingPages
from postdate.core.upkeep.daily import Daily
from postdate.errors import InvalidMessage, InvalidTimestamp, NotSupported
from postdate.messages import MARKERS, OWN_PREFIX, DelayedMessage, Headers, Origin
from postdate.ports import AdministrableStore, ClaimingStore, MessageFilter, ReplacingStore
from postdate.ports.changing import KeyedIds

_KEY: Final = OWN_PREFIX + "{}"
"""The key under which the marker of a zone waits."""

_SECOND_TIME: Final = ";fold=1"
"""The suffix of a time that clocks show twice; it means the second of the two instants."""

_SEARCH_DURATION: Final = timedelta(days=30)
"""After new rules, the search for messages goes on this long: senders with the former rules may still store some."""

_RENEWED_AFTER: Final = timedelta(days=1)
"""A sender that still has former rules extends the search by writing the marker, at most once in this time."""

_MOST_RULES: Final = 8

log = logging.getLogger("postdate.wall_times")


@dataclass(frozen=True, slots=True)
class WallTime:
    """A time as the clocks of a zone show it.

    A time that the clocks show twice is the first of the two instants. A time that they skip counts from the begin of
    the gap: 02:30 becomes 03:30 if clocks go from 2 to 3. With ``fold=1`` it is the second of the two instants, and a
    skipped time counts back from the end of the gap, as in :mod:`zoneinfo`.

    Args:
        local: date and time, without a time zone.
        zone: such as ``Europe/Paris``.
    """

    local: datetime
    zone: str

    @classmethod
    def parse(cls, local: datetime | str | None, zone: str) -> Self:
        """Return the wall time that an application passed. Raises `InvalidTimestamp`."""
        try:
            parsed = _parse_local(local) if isinstance(local, str) else local
        except ValueError as error:
            raise InvalidTimestamp(
                f"deliver_at={local!r} is not a date and time, such as '2027-03-28 09:00'"
            ) from error
        if not isinstance(parsed, datetime) or parsed.tzinfo is not None:
            raise InvalidTimestamp(
                f"with zone={zone!r}, deliver_at is a local time in that zone, without an offset, such as "
                f"'2027-03-28 09:00'; not {local!r}"
            )
        wall_time = cls(parsed, zone)
        wall_time.instant()
        return wall_time

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self | None:
        """Return the wall time of a message, or ``None`` if it has none or one that cannot be read."""
        local, _, zone = headers.get(Headers.WALL_TIME, "").rpartition(" ")
        try:
            return cls(_parse_local(local), zone) if local else None
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.local.isoformat()}{_SECOND_TIME if self.local.fold else ''} {self.zone}"

    def instant(self, rules: bytes | None = None) -> datetime:
        """Return the instant, UTC, by ``rules``, or by the current rules of this machine. Raises `InvalidTimestamp`."""
        zone = zones.zone_of(zones.rules_of(self.zone) if rules is None else rules)
        try:
            return self.local.replace(tzinfo=zone).astimezone(UTC)
        except OverflowError as error:
            raise InvalidTimestamp(f"{self} is outside of the years 1 to 9999") from error


def _parse_local(text: str) -> datetime:
    """Return the date and time of a text. Raises `ValueError`."""
    return datetime.fromisoformat(text.removesuffix(_SECOND_TIME)).replace(fold=int(text.endswith(_SECOND_TIME)))


# --- markers ----------------------------------------------------------------------------------------------------------


class ZoneStore(ReplacingStore, AdministrableStore, ClaimingStore, ABC):
    """A store in which messages can follow a zone."""

    @classmethod
    def is_zone_store(cls, store: object) -> TypeGuard[ZoneStore]:
        return isinstance(store, ReplacingStore) and isinstance(store, AdministrableStore)


def decode_rules(marker: DelayedMessage) -> list[bytes]:
    """Return the rules of a marker, the newest first. Raises `ValueError` for one that is damaged."""
    try:
        rules = [base64.b64decode(each, validate=True) for each in json.loads(marker.body)]
        if rules and all(map(zones.zone_of, rules)):
            return rules
    except (TypeError, *zones.DAMAGED) as error:
        raise ValueError(f"its marker is damaged: {error}") from error
    raise ValueError("its marker is damaged: there are no rules in it")


async def list_markers(store: AdministrableStore) -> list[DelayedMessage]:
    """Return the markers of a store, if it can have any. It reads the rows of all messages, but not their content."""
    if not ZoneStore.is_zone_store(store):
        return []
    return list(await store.list_pending(MessageFilter(MARKERS, due_from=LATEST), 1_000))


class ZoneMarkers:
    """Ensures that a store has a marker for each zone of the messages that are stored."""

    def __init__(self, store: ClaimingStore) -> None:
        self._store, self._marked_at, self._rules = store, dict[str, float](), dict[str, bytes]()

    def check_store(self, zone: str) -> ZoneStore:
        """Return the store. Raises `NotSupported` if messages cannot follow a zone there."""
        if ZoneStore.is_zone_store(self._store):
            return self._store
        raise NotSupported(
            f"{type(self._store).__name__} does not support messages with a wall time in {zone}: give deliver_at as an "
            f"instant, with its offset, and no zone"
        )

    async def ensure_marker(self, zone: str, now: datetime, *, at_once: bool = False) -> bytes:
        """Ensure that a zone has its marker; return the rules by which its messages are due.

        The marker is checked once a minute, and now if ``at_once``.

        These are the rules of this machine. If its zone files are older than those of the marker, they are the rules of
        the marker: by its own, an intake would send a message early.

        Raises:
            NotSupported, InvalidTimestamp: as :meth:`check_store`, and there is no such zone.
        """
        store, seconds = self.check_store(zone), zones.SOURCE.get().seconds()
        if at_once or seconds - self._marked_at.get(zone, float("-inf")) >= zones.SAME_FOR_SECONDS:
            rules = zones.read_rules(zone)
            newest = await ensure_rules(store, zone, [rules.content], rules.version, now)
            self._rules[zone] = newest.content if "" < rules.version < newest.version else rules.content
            self._marked_at[zone] = seconds
        return self._rules[zone]


async def ensure_rules(
    store: ZoneStore, zone: str, rules: Sequence[bytes], version: str, now: datetime
) -> zones.ZoneRules:
    """Ensure that the marker of a zone exists and contains ``rules``.

    Rules of newer files come first, before the rules that the marker has already. Then a service with the older files
    does not move a message of this process back. Other rules come last. So services search for messages that are due by
    them, sent by a machine with older zone files. The search lasts for some time after the last such message.
    ``version`` is the version of the files of the first of ``rules``.

    Returns:
        The newest rules of the marker.
    """
    marker = await store.get(KeyedIds(_KEY.format(zone)).first)
    if marker is None or marker.destination != MARKERS:  # it was cancelled and created again, with another number
        marker = next((each for each in await list_markers(store) if each.headers.get("zone") == zone), None)
    marker_rules, search_start, moved_count = list[bytes](), now, 0
    if marker is not None:
        with suppress(ValueError):  # a damaged marker is written again below
            marker_rules, search_start, moved_count = (
                decode_rules(marker),
                _search_start(marker),
                int(marker.headers.get("moved", "")),
            )
    new_rules = [
        each for each in rules if not any(zones.has_same_rules(each, other, now.year) for other in marker_rules)
    ]
    has_former = bool(marker_rules) and not all(zones.has_same_rules(each, marker_rules[0], now.year) for each in rules)
    if marker is not None and marker_rules:
        if "" < marker.headers.get("version", "") < version:
            if zones.has_same_rules(rules[0], marker_rules[0], now.year):
                all_rules = [*marker_rules, *new_rules]
            else:
                all_rules = [*rules, *(each for each in marker_rules if each not in rules)]
                moved_count, search_start = 0, now
            await _write_marker(store, zone, all_rules, version, moved_count, search_start)
            return zones.ZoneRules(all_rules[0], version)
        version = marker.headers.get("version", "")
    newest = zones.ZoneRules((marker_rules or rules)[0], version)
    if not new_rules and not (has_former and now - search_start > _RENEWED_AFTER):
        return newest
    if marker_rules:
        log.warning("the rules of %s here are not those that messages wait by: update the zone files", zone)
    await _write_marker(store, zone, [*marker_rules, *new_rules], version, 0 if new_rules else moved_count, now)
    return newest


def _search_start(marker: DelayedMessage) -> datetime:
    """Return the begin of the search for messages that are due by former rules. Raises `ValueError`."""
    return datetime.fromisoformat(marker.headers.get("at", ""))


async def _write_marker(
    store: ZoneStore, zone: str, rules: Sequence[bytes], version: str, moved_count: int, search_start: datetime
) -> None:
    """Write the marker of a zone. ``rules`` has the newest first; ``version`` is the version of their files."""
    headers = {"zone": zone, "moved": str(moved_count), "at": search_start.isoformat(), "version": version}
    body = json.dumps([base64.b64encode(each).decode() for each in rules[:_MOST_RULES]]).encode()
    await store.replace(
        _KEY.format(zone), lambda id_, _: DelayedMessage(id_, LATEST, MARKERS, headers, body), search_start
    )


# --- following --------------------------------------------------------------------------------------------------------


def wall_time_loop(store: ZoneStore, clock: Clock) -> Daily:
    """Return the loop that reschedules messages when the rules of their zone change."""

    async def follow_zones(daily: Daily) -> bool:
        claimed = 0
        for marker in await daily.call_store(partial(list_markers, store)):
            zone = marker.headers.get("zone", "")
            try:
                claimed += await _follow_zone(daily, marker, zone)
            except (InvalidTimestamp, ValueError) as error:
                log.warning("messages for %r stay where they are: %s", zone, error)
        if claimed:
            log.warning("somebody holds %d messages that new rules of a zone move; they are moved in an hour", claimed)
        return not claimed

    async def _follow_zone(daily: Daily, marker: DelayedMessage, zone: str) -> int:
        """Return how many messages could not be rescheduled because a process has claimed them."""
        now, own_rules, all_rules = clock.now(), zones.read_rules(zone), decode_rules(marker)
        search_start, moved_count = _search_start(marker), int(marker.headers.get("moved", ""))
        if changed := not zones.has_same_rules(own_rules.content, all_rules[0], now.year):
            if "" < own_rules.version < marker.headers.get("version", ""):
                log.warning(
                    "the zone files here are %s, older than those that messages wait by: update them", own_rules.version
                )
                return 0
            # Write the marker before any message is moved: if the process is killed in between, the former rules are
            # still in the marker, and the search goes on.
            all_rules, search_start, moved_count = (
                [own_rules.content, *(each for each in all_rules if each != own_rules.content)],
                now,
                0,
            )
            await daily.call_store(partial(_write_marker, store, zone, all_rules, own_rules.version, 0, now))
        if not changed and (len(all_rules) == 1 or now - search_start > _SEARCH_DURATION):
            return 0
        moved, claimed = await _reschedule_zone(daily, zone, own_rules.content)
        if moved:
            log.warning("the rules of %s have changed: %d messages were moved", zone, moved)
            await daily.call_store(
                partial(_write_marker, store, zone, all_rules, own_rules.version, moved_count + moved, search_start)
            )
        return claimed

    async def _reschedule_zone(daily: Daily, zone: str, rules: bytes) -> tuple[int, int]:
        """Return how many messages were rescheduled, and how many could not be because a process has claimed them.

        Each message with a wall time header is rescheduled, whichever rules its due time follows now. The reason: if
        two services with different rules run at the same time, one may overwrite the marker of the other, and then no
        marker has the rules of the other.
        """
        pages, counts = PendingPages(Pending(zone=zone, origins=frozenset(Origin)), None), {True: 0, False: 0}
        while not pages.is_over and await daily.pause(0):
            for message in pages.accept(await daily.call_store(partial(store.read_pending, *pages.next_query()))):
                wall = WallTime.of(message.headers)
                with suppress(InvalidTimestamp, InvalidMessage):  # no such instant, or the message expires before it
                    if wall is not None and (due := wall.instant(rules)) != message.due:
                        counts[await _reschedule_message(daily, message, wall, due)] += 1
        return counts[True], counts[False]

    async def _reschedule_message(daily: Daily, message: DelayedMessage, wall: WallTime, due: datetime) -> bool:
        current = await daily.call_store(partial(store.get, message.message_id))
        if current is None or (current.due, current.headers) != (message.due, message.headers):
            return True  # it ended or was changed since its page was read: do not change it
        is_rescheduled = await daily.call_store(
            partial(store.reschedule, message.message_id, due, clock.now(), str(wall))
        )
        if is_rescheduled:
            log.info("message %s, for %s, is due at %s instead of %s", message.message_id, wall, due, message.due)
        return is_rescheduled or await daily.call_store(partial(store.get, message.message_id)) is None

    return Daily(store, clock, "due times are not adapted to changes of time zones", timedelta(0), follow_zones)
