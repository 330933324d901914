"""Windows and spreads are a pure function of the rules of a zone: held against what its clocks show (ADR 42)."""

import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import available_timezones

import pytest

from postdate import SendOptions
from postdate.clock import EARLIEST, LATEST
from postdate.core.windows import Window
from postdate.core.zones import offset_intervals, rules_of, zone_of

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
MICROSECOND = timedelta(microseconds=1)
ALL_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

WINDOWS = (
    "02:00-03:00", "22:00-02:30", "01:00-02:30", "02:30-04:00", "00:00-03:00", "22:00-06:00", "09:00-17:00",
    "00:00-24:00", "12:00-12:00", "02:30-02:31", "23:59-00:00", "24:00-01:00", "00:00-00:01", "sun 02:00-03:00",
    "fri 22:00-02:00", "sat,sun 00:00-24:00", "mon-fri 00:30-23:45", "thu-fri 23:30-00:30",
)  # fmt: skip

HOSTILE = {
    "Europe/Paris": (2026, 2100),
    "Australia/Lord_Howe": (2026,),  # by half an hour
    "Pacific/Chatham": (2026,),  # 12:45 ahead, changed at 02:45
    "Asia/Kathmandu": (2026,),
    "Pacific/Apia": (2011,),  # no 30 December
    "Africa/Casablanca": (2026, 2087),  # back for Ramadan
    "Africa/El_Aaiun": (2030,),
    "America/St_Johns": (2006,),  # one minute after midnight
    "America/Sao_Paulo": (2018,),  # at midnight: a day begins at one
    "America/Havana": (2026,),  # back at one, to midnight
    "Antarctica/Troll": (2026,),  # by two hours
    "Asia/Pyongyang": (2015, 2018),
    "America/Caracas": (2007, 2016),
    "Asia/Gaza": (2026,),
    "Pacific/Kiritimati": (2028,),
    "Etc/GMT+12": (2028,),  # 29 February
}


def clocks_show(window: str, zone: str, instant: datetime) -> bool:
    """Return whether clocks show a time in a window: what it says, word for word."""
    days, _, hours = window.rpartition(" ")
    begin, end = (int(each[:2]) * 60 + int(each[3:]) for each in hours.split("-"))
    local = instant.astimezone(zone_of(rules_of(zone)))
    minute = local.hour * 60 + local.minute
    if begin == 24 * 60:
        return minute < end and _is_of(days, local.weekday() - 1)
    if begin < end:
        return begin <= minute < end and _is_of(days, local.weekday())
    return (minute >= begin and _is_of(days, local.weekday())) or (minute < end and _is_of(days, local.weekday() - 1))


def _is_of(days: str, weekday: int) -> bool:
    if not days:
        return True
    first, _, last = days.partition("-")
    names = ALL_DAYS[ALL_DAYS.index(first) : ALL_DAYS.index(last) + 1] if last else tuple(days.split(","))
    return ALL_DAYS[weekday % 7] in names


def at(second: int) -> datetime:
    return EPOCH + timedelta(seconds=second)


def changes_of(zone: str, year: int) -> list[datetime]:
    """Return when the clocks of a zone are changed in a year, and its 29 February or 1 March."""
    begin, end = (int((datetime(each, 1, 1, tzinfo=UTC) - EPOCH).total_seconds()) for each in (year, year + 1))
    stretches = list(islice(offset_intervals(rules_of(zone), begin), 20))
    changes = [at(b[0]) for a, b in pairwise(stretches) if a[2] != b[2] and b[0] < end]
    return [*changes, datetime(year, 2, 28, tzinfo=UTC) + DAY]


def check_nights(zone: str, year: int, step: timedelta) -> None:
    """Hold what windows say against what clocks show, a day before and after each change of a year."""
    for change in changes_of(zone, year):
        count = int(2 * DAY / step)
        instants = [change - DAY + number * step for number in range(count)]
        instants = sorted({*instants, change, change - MICROSECOND, change + MICROSECOND})
        for text in WINDOWS:
            window, expected = Window.parse_and_check_zone(f"{text} {zone}"), None
            shown = [clocks_show(text, zone, each) for each in instants]
            for instant, is_open in zip(reversed(instants), reversed(shown), strict=True):
                opens = window.next_opening(instant)
                assert (opens == instant) is is_open, f"{text} {zone} at {instant}"
                assert instant <= opens < instant + 15 * DAY  # clocks may leave one out
                expected = instant if is_open else expected
                assert expected is None or opens <= expected, f"{text} {zone} at {instant}"
                if opens != instant:
                    assert clocks_show(text, zone, opens)
                    assert not clocks_show(text, zone, opens - MICROSECOND)


@pytest.mark.parametrize("zone", HOSTILE)
def test_a_window_is_open_exactly_when_clocks_show_a_time_in_it(zone: str) -> None:
    for year in HOSTILE[zone]:
        check_nights(zone, year, timedelta(minutes=45))


def instants_of(zone: str, years: range) -> Iterator[datetime]:
    chance = random.Random(zone)
    for year in years:
        yield datetime(year, 1, 1, tzinfo=UTC) + chance.random() * 365 * DAY


def check_stretches(zone: str, begin: int, end: int) -> None:
    """Hold stretches against `zoneinfo`: they follow each other, and within each clocks are not changed."""
    rules, last = rules_of(zone), int((datetime(begin, 1, 1, tzinfo=UTC) - EPOCH).total_seconds())
    for start, stop, offset in offset_intervals(rules, last):
        assert start == last < stop
        for second in (start, (start + stop) // 2, stop - 1):
            shown = at(second).astimezone(zone_of(rules)).utcoffset()
            assert shown == timedelta(seconds=offset), f"{zone} at {second}"
        if (last := stop) >= (datetime(end, 1, 1, tzinfo=UTC) - EPOCH).total_seconds():
            return


def check_spread(zone: str, instant: datetime) -> None:
    """A spread stays within what was asked, within the window, and is a spread."""
    chance = random.Random(f"{zone} {instant}")
    for text in WINDOWS:
        window, span = (
            Window.parse_and_check_zone(f"{text} {zone}"),
            chance.choice((MINUTE, 5 * MINUTE, DAY, 40 * DAY, 400 * DAY)),
        )
        opens, shares = window.next_opening(instant), [number / 20 for number in range(20)]
        instants = [window.instant_within(instant, span, share) for share in shares]
        assert instants[0] == opens
        assert instants == sorted(instants)
        assert len(set(instants)) == len(instants)
        assert all(opens <= each <= opens + span and clocks_show(text, zone, each) for each in instants)


ZONES = sorted(available_timezones() - {"localtime"})


@pytest.mark.parametrize("zone", ZONES[::67])
def test_a_sample_of_zones(zone: str) -> None:
    check_stretches(zone, 2000, 2013)
    check_stretches(zone, 2030, 2042)
    for instant in instants_of(zone, range(2000, 2101, 50)):
        check_spread(zone, instant)


@pytest.mark.soak(
    "all zones take minutes",
    part="random",
    proven_by=(
        "tests/unit/test_windows.py::test_a_sample_of_zones",
        "tests/unit/test_windows.py::test_a_window_is_open_exactly_when_clocks_show_a_time_in_it",
    ),
)
@pytest.mark.parametrize("zone", ZONES)
def test_all_zones(zone: str) -> None:
    check_stretches(zone, 2000, 2101)
    for instant in instants_of(zone, range(2000, 2101)):
        check_spread(zone, instant)
    for year in range(2000, 2101, 5):
        check_nights(zone, year, timedelta(minutes=15))


def test_a_window_that_clocks_leave_out_opens_a_week_later() -> None:
    now = datetime(2026, 3, 22, 4, tzinfo=UTC)
    assert SendOptions("q", window="sun 02:00-03:00 Europe/Paris").due(now) == datetime(2026, 4, 5, tzinfo=UTC)


def test_a_day_that_a_zone_left_out_has_no_window() -> None:
    """On 30 December 2011 Samoa went from one side of the date line to the other."""
    window = Window.parse_and_check_zone("fri 09:00-17:00 Pacific/Apia")
    assert window.next_opening(datetime(2011, 12, 29, 20, tzinfo=UTC)) == datetime(2012, 1, 5, 19, tzinfo=UTC)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Etc/GMT+12"])
def test_at_the_begin_of_the_calendar(zone: str) -> None:
    for text in WINDOWS:
        window = Window.parse_and_check_zone(f"{text} {zone}")
        for instant in (EARLIEST, EARLIEST + MINUTE, EARLIEST + 3 * DAY):
            assert instant <= window.next_opening(instant) < instant + 15 * DAY


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Etc/GMT+12"])
def test_at_the_end_of_the_calendar(zone: str) -> None:
    for text in WINDOWS:
        window = Window.parse_and_check_zone(f"{text} {zone}")
        for instant in (LATEST, LATEST - MINUTE, LATEST - 3 * DAY, LATEST - 40 * DAY):
            assert instant <= window.next_opening(instant) <= LATEST
            assert instant <= window.instant_within(instant, timedelta.max, 0.999) <= LATEST
    never = Window.parse_and_check_zone("thu 09:00-10:00 UTC")  # the last day of the calendar is a Friday
    assert never.next_opening(datetime(9999, 12, 31, 12, tzinfo=UTC)) == LATEST
    spread = SendOptions("q", deliver_at=LATEST - MINUTE, spread=timedelta.max)
    assert len({spread.due(EPOCH) for _ in range(100)}) > 90


def test_a_spread_near_the_end_of_a_window_stays_in_it_and_is_a_spread() -> None:
    asked = datetime(2099, 6, 1, 16, 58, tzinfo=UTC)  # a Monday
    how = SendOptions("q", deliver_at=asked, window="mon-fri 09:00-17:00 UTC", spread=5 * MINUTE)
    dues = [how.due(EPOCH) or EPOCH for _ in range(2_000)]
    assert all(asked <= each < asked + 2 * MINUTE for each in dues)
    seconds = Counter(each.replace(microsecond=0) for each in dues)
    assert len(seconds) > 100
    assert max(seconds.values()) < 60
