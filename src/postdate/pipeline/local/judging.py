"""One value a message: its events, and the lines of the audit that apply: :mod:`postdate.pipeline.audit.judging`.

The rules are those that it explains; a test compares the results of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_ENDS: Final = ("delivered", "expired", "cancelled", "failed")
_OF_STORE: Final = ("delivered", "expired", "cancelled")
_OF_RECEIVER: Final = ("handled", "discarded", "failed", "returned", "retried", "sent_again")
_BEFORE_ALL_TIMES: Final = -(10**18)
"""Microseconds: in an order of times, one that is missing comes first."""


class AuditEvent(NamedTuple):
    """What happened to a message; times in microseconds since 1970.

    ``archived``, ``times`` and ``before`` are those of :class:`postdate.pipeline.audit.reading.AuditEvents`.
    """

    kind: str
    message_id: str
    at: int | None
    due: int | None
    destination: str | None
    archived: bool
    times: int
    before: int


class _Delivery(NamedTuple):
    """The delivery of a message. The last one is the largest, in the order of these fields."""

    at: int
    destination: str
    due: int


@dataclass(slots=True)
class AuditFacts:
    """What the events of a message add up to; the names are those of :data:`postdate.pipeline.audit.judging.FACTS`."""

    message_id: str
    # How often each kind of event happened, and how often it had happened when the audit began.
    times: Counter[str] = field(default_factory=Counter[str])
    before: Counter[str] = field(default_factory=Counter[str])
    last_delivery: _Delivery | None = None
    # The event with the latest time, and its due time.
    last_event: tuple[int, int] | None = None
    last_due: int | None = None
    pending_due: int | None = None
    pending_destination: str | None = None
    scheduled_destination: str | None = None
    any_destination: str | None = None
    # From due to delivered, in microseconds: of the latest and the earliest delivery, each by its own due time.
    late_microseconds: int | None = None
    earliest_microseconds: int | None = None
    handled_microseconds: int | None = None
    delivered_at: int | None = None
    recorded_here: bool = False
    # Whether all records of scheduling are marked as archived; None without such a record.
    archived: bool | None = None

    def add(self, event: AuditEvent) -> None:
        kind, at, due, destination = event.kind, event.at, event.due, event.destination
        self.times[kind] += event.times
        self.before[kind] += event.before
        self.last_due = _larger(self.last_due, due)
        self.any_destination = _larger_text(self.any_destination, destination)
        if at is not None:
            last = at, _BEFORE_ALL_TIMES if due is None else due
            self.last_event = last if self.last_event is None else max(self.last_event, last)
        after_due = None if at is None or due is None else at - due
        match kind:
            case "delivered":
                delivery = _Delivery(_first(at), destination or "", _first(due))
                self.last_delivery = delivery if self.last_delivery is None else max(self.last_delivery, delivery)
                self.late_microseconds = _larger(self.late_microseconds, after_due)
                self.earliest_microseconds = _smaller(self.earliest_microseconds, after_due)
                self.delivered_at = _smaller(self.delivered_at, at)
            case "handled":
                self.recorded_here = True
                self.handled_microseconds = _smaller(self.handled_microseconds, after_due)
            case "pending":
                self.pending_due = _larger(self.pending_due, due)
                self.pending_destination = _larger_text(self.pending_destination, destination)
            case "scheduled":
                self.scheduled_destination = _larger_text(self.scheduled_destination, destination)
                if event.times > 0:
                    self.archived = event.archived and self.archived is not False
            case _:
                pass

    @property
    def destination(self) -> str | None:
        """The queue where the message was delivered or waits: a message that replaces it may be for another queue."""
        delivered = None if self.last_delivery is None else self.last_delivery.destination or None
        return delivered or self.pending_destination or self.scheduled_destination or self.any_destination

    @property
    def due(self) -> int | None:
        """The due time of the delivery, else the latest due time: a rescheduled message has had several."""
        if self.last_delivery is not None and self.last_delivery.due != _BEFORE_ALL_TIMES:
            return self.last_delivery.due
        if self.pending_due is not None:
            return self.pending_due
        last = None if self.last_event is None else self.last_event[1]
        return None if last == _BEFORE_ALL_TIMES else last

    def sum_before(self, kinds: Iterable[str]) -> int:
        return sum(self.before[kind] for kind in kinds)

    @property
    def existed_before(self) -> bool:
        """Whether the store had records of the message when the audit began."""
        kinds = ("scheduled", *_ENDS, *_OF_RECEIVER)
        return self.times["pending"] > 0 or self.sum_before(kinds) > 0


def _first(time: int | None) -> int:
    return _BEFORE_ALL_TIMES if time is None else time


def _larger(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)


def _smaller(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _larger_text(one: str | None, other: str | None) -> str | None:
    return other if one is None else one if other is None else max(one, other)


def collect_messages(events: Iterable[AuditEvent]) -> list[AuditFacts]:
    """Return the messages in the events that existed when the audit began."""
    facts = dict[str, AuditFacts]()
    for event in events:
        message = facts.get(event.message_id)
        if message is None:
            message = facts[event.message_id] = AuditFacts(event.message_id)
        message.add(event)
    return [message for message in facts.values() if message.existed_before]


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """A judged message.

    Args:
        lines: the lines of :class:`postdate.pipeline.audit.AuditCounts` that apply.
        about: a text for each finding.
    """

    message_id: str
    destination: str | None
    due: int | None
    delivered_at: int | None
    late_microseconds: int | None
    lines: frozenset[str]
    about: Mapping[str, str]


def judge_messages(
    messages: Iterable[AuditFacts], as_of: int, late_after: int, pruned_before: int | None
) -> list[AuditVerdict]:
    """Decide for each message which lines apply to it; times in microseconds since 1970."""
    messages = list(messages)
    places = _find_places(messages)
    verdicts = (judge_message(message, places, as_of, late_after, pruned_before) for message in messages)
    return [verdict for verdict in verdicts if verdict is not None]


class _Place(NamedTuple):
    """A destination: whether handling there is recorded, and whether this store delivers to it."""

    is_recording: bool = False
    is_fed: bool = False


def _find_places(messages: Iterable[AuditFacts]) -> dict[str, _Place]:
    places = dict[str, _Place]()
    for message in messages:
        destination = message.destination
        if destination is not None and message.times["scheduled"] + message.times["delivered"] > 0:
            place = places.get(destination, _Place())
            is_fed = place.is_fed or message.times["delivered"] > 0
            places[destination] = _Place(place.is_recording or message.recorded_here, is_fed)
    return places


def judge_message(
    message: AuditFacts, places: Mapping[str, _Place], as_of: int, late_after: int, pruned_before: int | None
) -> AuditVerdict | None:
    """Return the verdict on a message; ``None`` if the audit is not about it."""
    times, before, due = message.times, message.before, message.due
    place = places.get(message.destination or "", _Place())
    ended = sum(times[kind] for kind in _ENDS)
    ended_before = message.sum_before(_ENDS)
    is_in_store = times["scheduled"] > 0 or times["pending"] > 0
    from_nowhere = message.sum_before(_OF_STORE) > 0 or (message.sum_before(_OF_RECEIVER) > 0 and place.is_fed)
    is_unknown = not is_in_store and before["scheduled"] == 0
    undelayed = is_unknown and times["discarded"] > 0 and message.last_due is None
    orphaned = is_unknown and from_nowhere and not undelayed
    if not (is_in_store or ended_before > 0 or orphaned or undelayed):
        return None
    receptions = times["handled"] + times["discarded"] + times["queued"]
    is_nowhere = before["scheduled"] > 0 and times["scheduled"] > 0 and ended + times["pending"] + receptions == 0
    unhandled = receptions + times["failed"] + times["sent_again"] == 0
    has_vanished = place.is_recording and before["delivered"] > 0 and unhandled
    ends_in_order = 1 + times["came_back"]
    is_repeated = times["delivered"] > ends_in_order or times["handled"] + times["discarded"] > ends_in_order
    waits_after_its_end = ended_before > times["came_back"] and times["pending"] > 0
    is_pending = times["pending"] > 0 and ended <= times["came_back"]
    early = message.earliest_microseconds
    early = message.handled_microseconds if early is None else early
    late = message.late_microseconds
    is_pruned = pruned_before is not None and due is not None and due < pruned_before
    is_failed = times["failed"] > times["returned"] + times["came_back"]
    is_archived = message.archived is True
    conditions = {
        "scheduled": is_in_store,
        "delivered": times["delivered"] > 0,
        "handled": times["handled"] > 0,
        "queued": times["queued"] > 0 and not is_failed,
        "pending": is_pending,
        "overdue": is_pending and due is not None and due < as_of,
        "expired": times["expired"] + times["discarded"] > 0 and not undelayed,
        "discarded": times["discarded"] > 0,
        "undelayed": undelayed,
        "cancelled": times["cancelled"] > 0,
        "failed": is_failed,
        "retried": times["retried"] + times["sent_again"] > 0,
        "archived": is_archived,
        "lost": (is_nowhere or has_vanished) and not is_archived and not orphaned and not is_pruned,
        "duplicated": (is_repeated or waits_after_its_end) and not undelayed and not is_pruned,
        "early": early is not None and early < 0,
        "orphaned": orphaned and not is_pruned,
        "late": late is not None and late > late_after,
    }
    counts = ", ".join(f"{kind} {times[kind]}" for kind in ("delivered", "handled", "expired", "cancelled", "failed"))
    details = {
        "lost": (
            "delivered, and not handled; it is not in its queue any more"
            if has_vanished
            else "scheduled; it does not wait and has not ended"
        ),
        "duplicated": (
            f"delivered {times['delivered']}, handled {times['handled']}, discarded {times['discarded']} times"
            f"{'; it still waits' if waits_after_its_end else ''}"
        ),
        "early": f"{-(early or 0) / 1e6:.6f} s before it was due",
        "orphaned": f"{counts} times; never scheduled",
        "overdue": "waits",
        "failed": "in the error queue",
        "late": f"{(late or 0) / 1e6:.6f} s after it was due",
    }
    return AuditVerdict(
        message.message_id,
        message.destination,
        due,
        message.delivered_at,
        late,
        frozenset(name for name, applies in conditions.items() if applies),
        {name: text for name, text in details.items() if conditions[name]},
    )
