"""What a seed stands for: how many processes, which messages, and which troubles when."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Final

from tests.simulator.network import Trouble, Weather
from tests.simulator.zones import LARGEST_SHIFT_SECONDS, ZoneRules

from postdate.testing.clock import START


class Happening(enum.Enum):
    """What happens to a process, a site, or a message at some time."""

    SEND = "is sent"
    STORE = "is stored"
    CANCEL = "is cancelled"
    RESCHEDULE = "is rescheduled"
    KILL = "is killed"
    STOP = "is stopped"
    FREEZE = "is frozen"
    STEP = "clock is set"
    STORE_WEATHER = "store"
    QUEUES_WEATHER = "queues"
    FULL = "is full"
    NOT_REMOVED = "cannot be removed"
    NOT_LISTED = "cannot be listed"
    LIMIT = "is limited"
    RETURN = "is returned from the error queue"
    SEND_BY_CLOCKS = "is sent for a wall time"
    RESCHEDULE_BY_CLOCKS = "is rescheduled to a wall time"
    FIX = "is rescheduled to the instant at which it is due"
    NEW_FILES = "has new zone files"
    DEPLOY = "is deployed with new zone files"


WINDOW: Final = 1_000_000.0
"""In the place of a rate: the queue takes messages within a minute of the near future only, and of other days."""


@dataclass(frozen=True, slots=True)
class ScenarioEvent:
    """One of them.

    Args:
        at: seconds of the run.
        what: happens.
        process: to which process, or through which.
        seconds: how long, how far, or when a message is due after it was sent; of limits: their rate a second, 0 for
            a pause, :data:`WINDOW` for a window that opens soon, or below 0, for none.
        message: number of a message, of a limited queue, or of a version of zone files.
        weather: of a site.
    """

    at: float
    what: Happening
    process: int = 0
    seconds: float = 0.0
    message: int = 0
    weather: Weather = Weather.FAIR


class Kind(enum.Enum):
    """What a message does."""

    TO_OTHERS = "to others"
    HANDLED = "handled"
    FAILS_ONCE = "fails once"
    FAILS = "fails"
    SENDS = "sends"
    NO_QUEUE = "to a queue that does not exist"
    UNREADABLE = "unreadable"
    NEVER = "due at the end of the calendar"


@dataclass(frozen=True, slots=True)
class Profile:
    """Which troubles a run has.

    Args:
        name: in reports.
        weight: how often seeds draw it.
        calls: what may become of single calls.
        happens: to processes and sites.
        weathers: of sites.
        standstill: seconds within which everything goes on when it is over.
        kinds: of messages besides the ordinary.
        store_clock: the store has a clock, and processes have wrong ones.
    """

    name: str
    weight: int
    calls: Sequence[Trouble] = ()
    happens: Sequence[Happening] = ()
    weathers: Sequence[Weather] = ()
    standstill: float = 2.0
    kinds: Sequence[Kind] = ()
    store_clock: bool = False


_OUTAGE: Final = (Happening.STORE_WEATHER, Happening.QUEUES_WEATHER)
_PROCESSES: Final = (Happening.KILL, Happening.STOP, Happening.FREEZE)

PROFILES: Final = (
    Profile("calm", 1, kinds=tuple(Kind)),
    Profile("clock set", 2, happens=(Happening.STEP,), kinds=tuple(Kind)),
    Profile("wrong clocks", 2, store_clock=True),
    Profile("store down", 2, happens=(Happening.STORE_WEATHER,), weathers=(Weather.DOWN,), standstill=4.0),
    Profile("servers down", 2, happens=_OUTAGE, weathers=(Weather.DOWN,), standstill=15.0),
    Profile("servers silent", 3, happens=_OUTAGE, weathers=(Weather.SILENT, Weather.DEADLINE), standstill=15.0),
    Profile(
        "clock set in an outage",
        2,
        happens=(*_OUTAGE, Happening.STEP, Happening.STEP),
        weathers=(Weather.DOWN,),
        standstill=15.0,
    ),
    Profile("queues full", 1, happens=(Happening.FULL,), standstill=15.0),
    Profile("removing fails", 2, happens=(Happening.NOT_REMOVED,), standstill=6.0),
    Profile("processes", 3, happens=_PROCESSES, standstill=5.0, kinds=tuple(Kind)),
    Profile("frozen", 2, happens=(Happening.FREEZE, Happening.FREEZE, Happening.STEP), standstill=5.0),
    Profile("calls", 5, calls=tuple(Trouble), standstill=25.0, kinds=tuple(Kind)),
    Profile("no answers", 2, calls=(Trouble.SILENT, Trouble.DEAF, Trouble.LATE), standstill=25.0),
    Profile(
        "everything",
        5,
        calls=tuple(Trouble),
        happens=(*_OUTAGE, *_PROCESSES, Happening.STEP, Happening.FULL, Happening.NOT_REMOVED),
        weathers=(Weather.DOWN, Weather.SILENT, Weather.DEADLINE),
        standstill=30.0,
        kinds=tuple(Kind),
    ),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """See the module.

    Args:
        profile: which troubles there are.
        same_database: store and queues are one.
        pipelines: one send takes messages for any destinations.
        processes: how many.
        ahead: by how many seconds the clock of each is ahead.
        window: of the loop: among how many it chooses who runs next.
        retries: of dispatching.
        rate: share of calls that come to no good.
        trouble_until: seconds of the run.
        kinds: what each message does.
        events: in order.
        is_limited: somebody limits queues; the store keeps that.
        rules: of the zone, one version after the other; empty: no message has a wall time.
        counts_unanswered: queues count how often a message came back without an answer.
        is_patient: processes are not started again in the end, when nothing fails any more: they look for new rules
            by themselves.
    """

    profile: Profile
    same_database: bool
    pipelines: bool
    processes: int
    ahead: Sequence[float]
    window: int
    retries: int
    rate: float
    trouble_until: float
    kinds: Sequence[Kind]
    events: Sequence[ScenarioEvent]
    is_limited: bool
    rules: Sequence[ZoneRules]
    counts_unanswered: bool
    is_patient: bool

    @property
    def end(self) -> float:
        """When everything must have arrived if nothing had failed."""
        dues = [each.at + max(each.seconds, 0) for each in self.events if each.what in _ABOUT_DUE]
        by_clocks = [
            each.at + each.seconds + LARGEST_SHIFT_SECONDS for each in self.events if each.what in _ABOUT_WALL_TIMES
        ]
        return max([self.trouble_until, *dues, *by_clocks])


_ABOUT_DUE: Final = (Happening.SEND, Happening.STORE, Happening.RESCHEDULE)
_ABOUT_WALL_TIMES: Final = (Happening.SEND_BY_CLOCKS, Happening.RESCHEDULE_BY_CLOCKS)


def scenario(chance: Random) -> Scenario:
    """Return what a seed stands for."""
    (profile,) = chance.choices(PROFILES, [each.weight for each in PROFILES])
    processes = chance.choice((1, 2, 2, 3))
    trouble_until = chance.uniform(20, 200)
    kinds = [_kind(chance, profile) for _ in range(chance.randint(2, 20))]
    events = [
        *_messages(chance, kinds, processes, trouble_until),
        *_troubles(chance, profile, processes, trouble_until),
    ]
    limits = _limits(chance, processes, trouble_until, len(kinds))
    kinds += [Kind.TO_OTHERS] * sum(each.what is Happening.STORE for each in limits)
    returns = _returns(chance, processes, trouble_until, len(kinds))
    kinds += [Kind.FAILS] * sum(each.what is Happening.STORE for each in returns)
    counts_unanswered = _beside(chance, 3).random() < 0.5
    zone = _zone(chance, processes, trouble_until, len(kinds))
    kinds += zone.kinds
    ahead = [chance.uniform(-600, 600) if profile.store_clock else 0.0 for _ in range(processes)]
    return Scenario(
        profile,
        same_database=chance.random() < 0.4,
        pipelines=chance.random() < 0.5,
        processes=processes,
        ahead=ahead,
        window=chance.choice((1, 2, 4, 16)),
        retries=chance.choice((0, 0, 1, 3)),
        rate=chance.choice((0.01, 0.05, 0.2)),
        trouble_until=trouble_until,
        kinds=kinds,
        events=sorted([*events, *limits, *returns, *zone.events], key=lambda event: event.at),
        is_limited=bool(limits),
        rules=zone.rules,
        counts_unanswered=counts_unanswered,
        is_patient=zone.is_patient,
    )


def _beside(chance: Random, what: int) -> Random:
    """Return chance for something that is drawn beside the rest, so that nothing else of a seed depends on it."""
    copy = Random()
    copy.setstate(chance.getstate())
    return Random(copy.getrandbits(64) + what)


def _returns(chance: Random, processes: int, until: float, number: int) -> list[ScenarioEvent]:
    """Draw for one seed in three when an operator returns all that is in the error queue; the last time at the end.

    Messages from ``number`` on fail before that.
    """
    own = _beside(chance, 1)
    if own.random() >= 1 / 3:
        return []
    ats = [own.uniform(1, until) for _ in range(own.randint(1, 4))]
    returns = [ScenarioEvent(at, Happening.RETURN, own.randrange(processes)) for at in [*ats, until]]
    failing = [
        ScenarioEvent(own.uniform(0, until / 2), Happening.STORE, own.randrange(processes), 1.0, number + index)
        for index in range(own.randint(1, 3))
    ]
    return [*returns, *failing]


@dataclass(frozen=True, slots=True)
class _Zone:
    """Versions of the rules of a zone, and what happens to messages with wall times there; empty: nothing.

    Args:
        rules: the first version holds in every process from the begin on.
        kinds: of the messages.
        events: to them, and new zone files.
        is_patient: see :class:`Scenario`.
    """

    rules: Sequence[ZoneRules] = ()
    kinds: Sequence[Kind] = ()
    events: Sequence[ScenarioEvent] = ()
    is_patient: bool = False


LOOKS_AGAIN_WITHIN_SECONDS: Final = 4_300.0
"""A process that failed to move what new rules move tries again in an hour; a call of it may last for ten minutes."""

FROZEN_AT_MOST_SECONDS: Final = 900.0

_KINDS_BY_CLOCKS: Final = (Kind.TO_OTHERS, Kind.TO_OTHERS, Kind.HANDLED, Kind.FAILS, Kind.NO_QUEUE)


def _zone(chance: Random, processes: int, until: float, number: int) -> _Zone:
    """Draw a zone for one seed in four: its rules change once or twice, in each process at a time of its own.

    Messages from ``number`` on have wall times there. Operators reschedule some, and return what has failed.
    """
    own = _beside(chance, 2)
    if own.random() >= 0.25:
        return _Zone()
    rules = [_rules(own, "2026a", 3_600)]
    for version in own.choice((["2026b"], ["2026b"], ["2026b", "2026c"])):
        rules.append(_rules(own, version, rules[0].before))
    kinds, events = list[Kind](), list[ScenarioEvent]()
    for index in range(own.randint(2, 10)):
        kinds.append(own.choice(_KINDS_BY_CLOCKS))
        events += _by_clocks(own, processes, until, number + index)
    begin = 0.0
    for version in range(1, len(rules)):
        begin, delay = own.uniform(begin, max(begin, 0.7 * until)), 0.0
        for process in own.sample(range(processes), processes):
            what = own.choice((Happening.DEPLOY, Happening.DEPLOY, Happening.NEW_FILES))
            events.append(ScenarioEvent(min(begin + delay, until), what, process, own.uniform(0.1, 10), version))
            if delay > 20:  # it is started again with older files than another process has
                at = min(begin + own.uniform(10, delay), until)
                events.append(ScenarioEvent(at, Happening.STOP, process, own.uniform(1, 10)))
            delay = own.choice((own.uniform(0, 20), own.uniform(20, 120)))
    returns = [ScenarioEvent(own.uniform(1, until), Happening.RETURN, own.randrange(processes)) for _ in range(2)]
    if not (is_patient := own.random() < 0.15):
        return _Zone(rules, kinds, [*events, *returns])
    for index in range(len(kinds), len(kinds) + own.randint(1, 3)):
        kinds.append(Kind.TO_OTHERS)
        seconds = until + FROZEN_AT_MOST_SECONDS + LOOKS_AGAIN_WITHIN_SECONDS + own.uniform(200, 400)
        at, process = own.uniform(0, until), own.randrange(processes)
        events.append(ScenarioEvent(at, Happening.SEND_BY_CLOCKS, process, seconds, number + index))
    first_deploy = min(each.at for each in events if each.what in {Happening.DEPLOY, Happening.NEW_FILES})
    at = max(first_deploy - own.uniform(0, 10), 0)
    events.append(ScenarioEvent(at, Happening.NOT_LISTED, seconds=own.choice((until, own.uniform(10, until)))))
    return _Zone(rules, kinds, [*events, *returns], is_patient)


def _rules(own: Random, version: str, before: int) -> ZoneRules:
    """Draw rules by which clocks are ``before`` seconds ahead at first, or are so no more."""
    shift, change = own.choice((-45, -15, 0, 15, 45)), START + timedelta(seconds=15 * own.randrange(20))
    if version == "2026a":
        return ZoneRules(version, before, before + own.choice((0, 0, shift)), change)
    other = before + shift if own.random() < 0.7 else before
    return ZoneRules(version, other, before + own.choice((-45, -15, 15, 45)), change)


def _by_clocks(own: Random, processes: int, until: float, number: int) -> list[ScenarioEvent]:
    """Draw when a message with a wall time is sent, and what an operator does with it meanwhile."""
    at, process = own.uniform(0, until), own.randrange(processes)
    seconds = own.choice((own.uniform(0, 30), own.uniform(30, 150), own.uniform(100, 250)))
    events = [ScenarioEvent(at, Happening.SEND_BY_CLOCKS, process, seconds, number)]
    if own.random() < 0.4:
        what = own.choice((Happening.FIX, Happening.RESCHEDULE, Happening.RESCHEDULE, Happening.RESCHEDULE_BY_CLOCKS))
        delay = own.choice((0.0, 0.0, own.uniform(0, 60), own.uniform(60, 200)))
        second = min(at + own.uniform(0, seconds), until)
        events.append(ScenarioEvent(second, what, own.randrange(processes), delay, number))
    return events


def _limits(chance: Random, processes: int, until: float, number: int) -> list[ScenarioEvent]:
    """Draw limits for one seed in four, and a herd that meets them: messages from ``number`` on."""
    own = _beside(chance, 0)
    if own.random() >= 0.25:
        return []
    limits = [
        ScenarioEvent(
            own.uniform(0, until),
            Happening.LIMIT,
            own.randrange(processes),
            own.choice((-1.0, 0.0, 0.0, 0.5, 2.0, 20.0, WINDOW, WINDOW)),
            own.randrange(2),
        )
        for _ in range(own.randint(1, 6))
    ]
    due = own.uniform(1, until)
    ats = [own.uniform(0, min(10.0, due)) for _ in range(own.randint(1, 15))]
    herd = [
        ScenarioEvent(at, Happening.STORE, own.randrange(processes), due - at, number + index)
        for index, at in enumerate(ats)
    ]
    return [*limits, *herd]


def _kind(chance: Random, profile: Profile) -> Kind:
    if profile.kinds and chance.random() < 0.3:
        return chance.choice(profile.kinds)
    return Kind.TO_OTHERS if chance.random() < 0.6 else Kind.HANDLED


def _messages(chance: Random, kinds: Sequence[Kind], processes: int, trouble_until: float) -> list[ScenarioEvent]:
    events: list[ScenarioEvent] = []
    herd = chance.random() < 0.5
    due = chance.uniform(1, trouble_until)
    for number in range(len(kinds)):
        at = chance.uniform(0, min(10.0, due)) if herd else chance.uniform(0, trouble_until)
        delay = (
            due - at if herd else chance.choice((chance.uniform(0, 2), chance.uniform(0, 30), chance.uniform(0, 120)))
        )
        way = Happening.SEND if chance.random() < 0.8 else Happening.STORE
        process = chance.randrange(processes)
        events.append(ScenarioEvent(at, way, process, delay, number))
        if chance.random() < 0.1:
            events.append(ScenarioEvent(at + chance.uniform(0, 10), Happening.CANCEL, process, 0, number))
        elif chance.random() < 0.1:
            later = ScenarioEvent(
                at + chance.uniform(0, 10), Happening.RESCHEDULE, process, chance.uniform(0, 60), number
            )
            events.append(later)
    return events


def _troubles(chance: Random, profile: Profile, processes: int, until: float) -> list[ScenarioEvent]:
    if not profile.happens:
        return []
    events: list[ScenarioEvent] = []
    for _ in range(chance.randint(1, 5)):
        what, at = chance.choice(profile.happens), chance.uniform(1, until)
        seconds = chance.choice((chance.uniform(0.1, 3), chance.uniform(1, 90), chance.uniform(40, 120)))
        if what is Happening.STEP:
            seconds = chance.choice((-1, 1)) * chance.choice((0.5, 5, 60, 3600))
        elif what is Happening.FREEZE:
            seconds = chance.choice((chance.uniform(1, 50), chance.uniform(70, FROZEN_AT_MOST_SECONDS)))
        weather = chance.choice(profile.weathers) if profile.weathers else Weather.FAIR
        events.append(ScenarioEvent(at, what, chance.randrange(processes), seconds, 0, weather))
    return events
