"""What limits of destinations say: windows, rates, and what a store keeps of them (ADR 34)."""

import logging
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate import MemoryStore, SendOptions
from postdate.core.limits import (
    NO_LIMITS,
    Limits,
    add_pause,
    change_limits,
    decode_limits,
    limit_change,
    load_limits_in_force,
    remove_pause,
)
from postdate.core.windows import Window
from postdate.errors import DelayConflict, InvalidMessage, InvalidTimestamp, PostdateError
from postdate.ports.limits import StoredLimits

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)  # a Friday
SECOND = timedelta(seconds=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("window", "now", "opens"),
    [
        ("mon-fri 09:00-17:00 Europe/Paris", "2026-11-27 07:59:59", "2026-11-27 08:00"),
        ("mon-fri 09:00-17:00 Europe/Paris", "2026-11-27 08:00", "2026-11-27 08:00"),
        ("mon-fri 09:00-17:00 Europe/Paris", "2026-11-27 15:59:59", "2026-11-27 15:59:59"),
        ("mon-fri 09:00-17:00 Europe/Paris", "2026-11-27 16:00", "2026-11-30 08:00"),
        ("09:00-17:00 Europe/Paris", "2026-11-27 16:00", "2026-11-28 08:00"),
        ("09:00-17:00 Europe/Paris", "2026-03-28 16:00", "2026-03-29 07:00"),  # summer begins
        ("sat 22:00-02:00 UTC", "2026-11-29 01:59", "2026-11-29 01:59"),  # of Saturday
        ("sat 22:00-02:00 UTC", "2026-11-29 02:00", "2026-12-05 22:00"),
        ("sat-mon,wed 00:00-24:00 UTC", "2026-12-01 12:00", "2026-12-02 00:00"),
        ("sat-mon,wed 00:00-24:00 UTC", "2026-11-29 23:59", "2026-11-29 23:59"),
        ("sat-mon,wed 00:00-24:00 UTC", "2026-11-30 12:00", "2026-11-30 12:00"),
        ("12:00-12:00 UTC", "2026-11-27 11:59", "2026-11-27 11:59"),  # all day
        ("mon 09:00-10:00 Pacific/Kiritimati", "2026-11-29 18:59", "2026-11-29 19:00"),
        ("02:30-02:45 Europe/Paris", "2026-03-29 00:30", "2026-03-30 00:30"),  # clocks leave it out that night
        ("02:30-03:00 Europe/Paris", "2026-03-29 00:45", "2026-03-30 00:30"),
        ("00:00-24:00 UTC", "9999-12-30 23:59", "9999-12-30 23:59"),
    ],
)
def test_a_window_is_open_or_opens(window: str, now: str, opens: str) -> None:
    assert Window.parse_and_check_zone(window).next_opening(at(now)) == at(opens)


@pytest.mark.parametrize(
    "window",
    [
        "",
        "mon-fri",
        "9:00-17:00 UTC",
        "09:00-17:00",
        "09:00-25:00 UTC",
        "09:60-17:00 UTC",
        "funday 09:00-17:00 UTC",
        "mon- 09:00-17:00 UTC",
        "09:00-17:00 Europe/Pari",
        "mon-fri 09:00-17:00 Europe/Paris ",
    ],
)
def test_what_is_no_window_is_refused(window: str) -> None:
    with pytest.raises(InvalidTimestamp):
        limit_change(None, window)(NO_LIMITS)


@pytest.mark.parametrize("windows", [5, [None], "", ["", "x"]])
def test_windows_of_wrong_types_are_refused(windows: Any) -> None:
    with pytest.raises(InvalidTimestamp, match="is not a window of time"):
        limit_change(None, windows)(NO_LIMITS)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), 1e-9, "50", timedelta(1)])
def test_what_is_no_rate_is_refused(rate: Any) -> None:
    with pytest.raises(InvalidMessage, match="is not a valid rate"):
        Limits(per_second=rate)


@given(
    st.sampled_from([0.01, 0.3, 1.0, 7.0, 50.0, 333.0]),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 2_000)), max_size=60),
)
def test_no_more_goes_than_the_rate_allows(rate: float, looks: list[tuple[float, int]]) -> None:
    """Whenever looks are made, and however many they find: of any span, its share, and two turns that were missed."""
    limits, now, free_at, gone = Limits(per_second=rate), NOW, NOW, list[tuple[datetime, int]]()
    for pause, found in looks:
        now += timedelta(seconds=pause)
        count = min(limits.allowed_count(free_at, now), found)
        if count:
            free_at = limits.free_at_after(count, free_at, now)
            gone.append((now, count))
    for first, (since, _) in enumerate(gone):
        total = 0
        for until, count in gone[first:]:
            total += count
            seconds = (until - since).total_seconds()
            assert total <= rate * seconds + 2 * max(0.1 * rate, 1) + 1e-3


@pytest.mark.parametrize("rate", [0.5, 3, 50, 1_000])
def test_looks_at_every_turn_reach_the_rate(rate: float) -> None:
    limits, now, free_at, gone = Limits(per_second=rate), NOW, NOW, 0
    for _ in range(1_000):
        now = max(limits.next_slot(free_at), now) + timedelta(milliseconds=3)  # late, as looks are
        count = limits.allowed_count(free_at, now)
        gone, free_at = gone + count, limits.free_at_after(count, free_at, now)
    assert gone == pytest.approx(rate * (now - NOW).total_seconds(), rel=0.01, abs=2)


def test_a_time_set_by_a_clock_that_is_ahead_holds_nothing_up() -> None:
    limits = Limits(per_second=50)
    assert limits.allowed_count(NOW + SECOND, NOW) == 0  # of another service, whose clock is a little ahead
    assert limits.allowed_count(NOW + timedelta(hours=1), NOW) == 5
    assert limits.free_at_after(5, NOW + timedelta(hours=1), NOW) == NOW


def test_a_message_of_its_own_waits_for_its_window_and_is_spread() -> None:
    window = "mon-fri 09:00-17:00 UTC"
    assert SendOptions(window=window).due(NOW) == NOW
    late = at("2026-11-27 20:00")
    assert SendOptions(deliver_at=NOW, window=window).due(late) == at("2026-11-30 09:00")
    assert SendOptions(delay=timedelta(hours=5), window=window).due(NOW) == at("2026-11-30 09:00")
    assert SendOptions(deliver_at=at("2026-11-28 12:00"), window=window).due(NOW) == at("2026-11-30 09:00")
    spread = SendOptions(delay=SECOND, spread=timedelta(hours=4, minutes=59))
    assert len({spread.due(NOW) for _ in range(100)}) > 90
    assert all(NOW + SECOND <= (spread.due(NOW) or NOW) < NOW + timedelta(hours=5) for _ in range(100))
    both = {SendOptions(window=window, spread=timedelta(hours=6)).due(NOW) for _ in range(100)}
    assert len(both) > 90
    assert all(due is not None and NOW <= due < at("2026-11-27 17:00") for due in both)  # the sixth hour is after that


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"window": "at night"}, InvalidTimestamp),
        ({"spread": -SECOND}, InvalidMessage),
        ({"spread": 5}, InvalidMessage),
        ({"deliver_at": "2027-03-28 09:00", "zone": "Europe/Paris", "spread": SECOND}, DelayConflict),
        ({"window": "09:00-17:00 UTC", "use_dead_letter_queue": True}, DelayConflict),
    ],
)
def test_windows_and_spreads_that_cannot_be_are_refused(options: dict[str, Any], error: type[PostdateError]) -> None:
    with pytest.raises(error):
        SendOptions(**options)


async def test_limits_are_changed_one_by_one_and_lifted() -> None:
    store = MemoryStore()
    await change_limits(store, "q", limit_change(50, "mon-fri 09:00-17:00 Europe/Paris"), NOW)
    assert str(await change_limits(store, "q", add_pause, NOW)) == (
        "paused, at most 50 a second, within mon-fri 09:00-17:00 Europe/Paris"
    )
    assert await change_limits(store, "q", limit_change(None, ()), NOW) == Limits(paused=True)
    assert await load_limits_in_force(store) == {"q": Limits(paused=True)}
    assert await change_limits(store, "q", remove_pause, NOW) == NO_LIMITS
    assert await load_limits_in_force(store) == {}
    assert await store.store_limits("q", "nonsense", NOW)
    assert (await load_limits_in_force(store))["q"].paused
    assert await change_limits(store, "q", limit_change(5, ()), NOW) == Limits(per_second=5)


async def test_where_zone_files_lack_its_zone_a_window_stays_when_a_queue_is_paused_and_resumed() -> None:
    store, text = MemoryStore(), '{"paused":false,"per_second":5.0,"windows":["09:00-17:00 Europe/Neverland"]}'
    await store.store_limits("q", text, NOW)
    assert (await change_limits(store, "q", add_pause, NOW)).paused
    limits = await change_limits(store, "q", remove_pause, NOW)
    assert str(limits) == "at most 5 a second, within 09:00-17:00 Europe/Neverland"
    with pytest.raises(InvalidTimestamp, match="no time zone 'Europe/Neverland'"):
        limits.next_opening(NOW)
    with pytest.raises(InvalidTimestamp, match="no time zone 'Europe/Neverland'"):
        await change_limits(store, "q", limit_change(5, limits.windows), NOW)


@pytest.mark.parametrize("change", [add_pause, remove_pause])
async def test_limits_that_cannot_be_read_are_not_changed_in_part(change: Callable[[Limits], Limits]) -> None:
    store, text = MemoryStore(), '{"per_minute": 5}'  # as of a newer version
    await store.store_limits("q", text, NOW)
    with pytest.raises(InvalidMessage, match="cannot be read"):
        await change_limits(store, "q", change, NOW)
    assert [each.limits for each in await store.load_limits()] == [text]


async def test_limits_that_are_set_again_leave_a_rate_alone() -> None:
    store = MemoryStore()
    for minutes in range(5):
        await change_limits(store, "q", limit_change(0.01, ()), NOW + timedelta(minutes=minutes))
    await change_limits(store, "q", limit_change(0.02, ()), NOW + timedelta(minutes=9))
    assert [each.free_at for each in await store.load_limits()] == [NOW]


async def test_a_rate_of_a_queue_that_had_none_begins_when_it_is_set() -> None:
    store = MemoryStore()
    changes = [add_pause, limit_change(0.01, ()), limit_change(None, ()), limit_change(0.01, ())]
    for minutes, change in enumerate(changes):
        await change_limits(store, "q", change, NOW + timedelta(minutes=minutes))
        assert [each.free_at for each in await store.load_limits()] == [NOW + timedelta(minutes=minutes)]


async def test_of_changes_at_once_none_is_lost() -> None:
    class Slow(MemoryStore):
        async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
            found = await super().load_limits(destinations)
            await anyio.lowlevel.checkpoint()
            return found

    store = Slow()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(change_limits, store, "q", add_pause, NOW)
        tasks.start_soon(change_limits, store, "q", limit_change(5, ()), NOW)
    assert await load_limits_in_force(store) == {"q": Limits(paused=True, per_second=5)}


async def test_names_that_no_queue_has_are_refused() -> None:
    store = MemoryStore()
    with pytest.raises(PostdateError):
        await change_limits(store, "", add_pause, NOW)


@pytest.mark.parametrize(
    "text", ["nonsense", "[]", '{"paused": 7}', '{"per_second": -1}', '{"windows": ["x"]}', '{"per_minute": 5}']
)
def test_damaged_limits_let_nothing_through(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "postdate.limits"):
        assert decode_limits(StoredLimits("q", 1, text, NOW)).paused
    assert "set its limits anew" in caplog.text


@given(st.datetimes(), st.datetimes())
def test_places_in_a_lane_are_in_the_order_of_due_times(one: datetime, other: datetime) -> None:
    kept = StoredLimits("q", 7, "", NOW)
    first, last = (kept.attempt_time(each.replace(tzinfo=UTC)) for each in sorted([one, other]))
    assert kept.lane_start <= first <= last < kept.lane_end
