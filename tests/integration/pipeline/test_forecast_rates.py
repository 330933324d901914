"""Rates and herds are what a plain simulation says."""

from collections.abc import Sequence
from fractions import Fraction
from statistics import quantiles

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.pipeline.forecast_rates import HerdSpan, Load, find_herds, horizon, needed_rate, round_width

HOUR = 3_600
YEAR_9998 = 253_339_228_800

plans = st.dictionaries(st.integers(0, 60), st.integers(1, 50), min_size=1, max_size=25)


def load(plan: dict[int, int], step: int = 1) -> Load:
    seconds, counts = (np.array(column, np.int64) for column in (sorted(plan), [plan[each] for each in sorted(plan)]))
    return Load(seconds, counts, step)


def longest_wait(plan: dict[int, int], rate: float) -> float:
    """Dispatch the messages of one second after the other, and return how late the latest is."""
    longest = free = 0.0
    for second in sorted(plan):
        free = max(free, second) + plan[second] / rate
        longest = max(longest, free - second)
    return longest


@given(plans, st.integers(1, 90))
def test_the_needed_rate_is_that_of_the_hardest_stretch(plan: dict[int, int], tolerance: int) -> None:
    seconds = sorted(plan)
    stretches = [(a, b) for a in seconds for b in seconds if a <= b]
    hardest = max(
        Fraction(sum(plan[each] for each in seconds if a <= each <= b), b - a + tolerance) for a, b in stretches
    )
    assert needed_rate(load(plan), tolerance) == pytest.approx(float(hardest), rel=1e-12)


@given(plans, st.integers(1, 90))
def test_less_than_the_needed_rate_is_too_little(plan: dict[int, int], tolerance: int) -> None:
    rate = needed_rate(load(plan), tolerance)
    assert longest_wait(plan, rate) == pytest.approx(tolerance)
    assert longest_wait(plan, rate * 0.999) > tolerance


def test_a_steady_load_needs_its_own_rate() -> None:
    steady = Load(np.arange(100_000, dtype=np.int64), np.full(100_000, 1_000, np.int64))
    assert needed_rate(steady, 1) == 1_000


def test_a_message_of_the_year_9998_hides_nothing_of_today() -> None:
    now = 1_772_366_400
    plan = {now: 3_000, now + 1: 500, now + 2: 4_001, YEAR_9998: 1}
    assert needed_rate(load(plan), 1) == 4_001
    assert needed_rate(load(plan), 10) == 7_501 / 12
    assert horizon(load({**plan, now + 60: 20_000})) == now + 60


def test_a_dispatcher_that_begins_finds_what_is_overdue() -> None:
    begun = load({10: 3, 20: 4}).starting_at(15, 5)
    assert (begun.seconds.tolist(), begun.counts.tolist()) == ([15, 20], [8, 4])
    nothing = load({}).starting_at(15, 0)
    assert (len(nothing), needed_rate(nothing, 1)) == (0, 0)


# --- herds ------------------------------------------------------------------------------------------------------------


def usual_by_hour(plan: dict[int, int]) -> dict[int, int]:
    """Sort all seconds of each hour, take the greatest of nine in ten, and of that the greatest of three hours."""
    seconds = {hour: range(hour * HOUR, (hour + 1) * HOUR) for hour in range(-1, 8)}
    alone = {hour: sorted(plan.get(each, 0) for each in seconds[hour])[HOUR * 9 // 10 - 1] for hour in seconds}
    return {hour: max(alone[hour - 1], alone[hour], alone[hour + 1]) for hour in range(7)}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=5),
    st.integers(300, 420),
    st.integers(2, 12),
)
def test_herds_are_what_nine_in_ten_seconds_are_not(
    shapes: Sequence[tuple[int, int, int]], steady: int, factor: int
) -> None:
    """Herds of different sizes among hours that have a load in more or fewer than one in ten seconds."""
    plan = dict[int, int]()
    for hour, thousands, length in shapes:
        plan |= {hour * HOUR + each: 10 * thousands + 1 for each in range(steady)}
        plan |= {hour * HOUR + 1_800 + each: 1_000 * (thousands + 1) // length for each in range(length)}
    usual = usual_by_hour(plan)
    expected = {each for each, count in plan.items() if count >= 500 and count > factor * usual[each // HOUR]}
    found = find_herds(load(plan), factor, 500)
    covered = [each for herd in found for each in range(herd.start, herd.start + herd.seconds)]
    assert sorted(covered) == sorted(expected)
    assert all(herd.start + herd.seconds not in expected for herd in found)
    assert [herd.messages for herd in found] == sorted((herd.messages for herd in found), reverse=True)
    assert sum(herd.messages for herd in found) == sum(plan[each] for each in expected)
    assert all(herd.usual == usual[herd.start // HOUR] for herd in found)


def test_one_herd_alone_is_a_herd() -> None:
    assert find_herds(load({7: 2_000}), 10, 1_000) == [HerdSpan(7, 1, 2_000, 2_000, 0)]
    assert find_herds(load({7: 2_000}), 10, 2_001) == []


def test_a_batch_every_minute_is_a_herd_every_minute() -> None:
    assert len(find_herds(load({60 * each: 2_000 for each in range(600)}), 10, 1_000)) == 600


def test_a_small_herd_is_seen_beside_a_giant() -> None:
    plan = dict.fromkeys(range(HOUR), 10) | {100: 10_000_000, 900: 2_000}
    assert [(herd.start, herd.usual) for herd in find_herds(load(plan), 10, 1_000)] == [(100, 10), (900, 10)]


def test_a_steady_load_has_no_herds_where_it_begins_and_ends() -> None:
    assert find_herds(load(dict.fromkeys(range(HOUR - 60, 2 * HOUR + 30), 2000)), 10, 1_000) == []


def test_longer_steps_have_herds_too() -> None:
    plan = dict.fromkeys(range(0, HOUR, 10), 100) | {600: 30_000, 610: 20_000}
    assert find_herds(load(plan, 10), 10, 1_000) == [HerdSpan(600, 20, 50_000, 30_000, 100)]


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "last"),
    [
        ({5: 1}, 5),
        ({5: 100, 50: 1}, 5),
        ({5: 100, 15: 1}, 15),
        ({5: 100, 6: 100, 50: 1}, 6),
        ({5: 100, 6: 100, 8: 1, 50: 1}, 8),
        ({5: 100, 6: 100, 5_000: 60}, 5_000),
        (dict.fromkeys(range(11), 1) | {YEAR_9998: 1}, 10),
    ],
)
def test_a_picture_ends_before_what_is_far_out(plan: dict[int, int], last: int) -> None:
    assert horizon(load(plan)) == last


@given(st.integers(1, 400 * 31_536_000), st.integers(0, 10**6))
def test_intervals_are_few_and_no_longer_than_that_needs(span: int, first: int) -> None:
    width = round_width(span, 400)
    assert (first + span - 1) // width - first // width + 1 <= 400
    assert width == 1 or round_width(span, 400, at_least=width) == width
    assert round_width(span, 400, at_least=86_400) >= 86_400


def test_quantiles_agree_with_the_standard_library() -> None:
    """The usual load of a full hour lies where the library puts nine in ten."""
    plan = {each: each + 1 for each in range(HOUR)} | {HOUR - 1: 10**6}
    (herd,) = find_herds(load(plan), 10, 1_000)
    assert herd.usual == int(quantiles(plan.values(), n=10, method="inclusive")[-1])
