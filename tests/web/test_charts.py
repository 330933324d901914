"""Herds are found by what is usual, and drawings show the numbers they are made from."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from postdate.operations import Interval, RecentLateness
from postdate.operations.state import intervals
from postdate.ports import DeliveredMessage
from postdate.web import charts

MINUTE = timedelta(minutes=1)
START = datetime(2026, 2, 2, 12, 30, tzinfo=UTC)  # a Monday


def of(counts: Sequence[int], step: timedelta = timedelta(minutes=1)) -> list[Interval]:
    return intervals([START + n * step for n in range(len(counts) + 1)], counts)


@pytest.mark.parametrize(
    ("counts", "herds"),
    [
        ([0, 0, 0], []),
        ([5_000], []),  # nothing to compare it with
        ([0, 5_000, 0], []),
        ([10, 10, 999], []),
        ([10, 10, 1_000], [2]),
        ([0, 0, 0, 200, 200, 2_000], [5]),  # what is usual is the middle of those with any
        ([200, 200, 1_999], []),
        ([1, 1, 1, 4_000, 3_000], [3, 4]),
    ],
)
def test_a_herd_is_ten_times_what_is_usual_and_a_thousand(counts: list[int], herds: list[int]) -> None:
    assert [place for place, each in enumerate(of(counts)) if each.herd] == herds


def test_herds_side_by_side_are_one() -> None:
    found = charts.herds_of(of([1, 1, 1, 1_500, 2_000, 1, 1_200]))
    minutes = [(each.begin.minute, each.end.minute, each.count) for each in found]
    assert minutes == [(33, 35, 3_500), (36, 37, 1_200)]


def _heights(drawing: str, kind: str) -> list[float]:
    return [float(each) for each in re.findall(rf'class="{kind}"[^>]* height="([0-9.]+)"', drawing)]


def test_bars_are_as_high_as_what_is_due() -> None:
    drawing = charts.due_chart(of([0, 10, 20, 40]), 400, lambda each: f"/?at={each.begin:%M}&amp")
    assert _heights(drawing, "bar") == pytest.approx([0, 194 / 4, 194 / 2, 194])
    assert re.findall(r'href="([^"]*)"', drawing) == [f"/?at={n}&amp;amp" for n in (30, 31, 32, 33)]
    assert "12:33 to 12:34: 40 due" in drawing
    assert re.findall(r'class="value"[^>]*>([^<]*)<', drawing) == ["0", "10", "20", "30", "40"]


def test_a_herd_is_cut_so_that_the_others_are_seen() -> None:
    drawing = charts.due_chart(of([10, 20, 100_000, 10]), 400, lambda _: "/")
    assert _heights(drawing, "herd") == pytest.approx([194])
    assert _heights(drawing, "bar") == pytest.approx([0.7 * 97, 0.7 * 194, 0.7 * 97])
    assert drawing.count('class="cut"') == 1
    assert ">100,000</text>" in drawing


def test_a_calendar_begins_its_weeks_on_monday() -> None:
    drawing = charts.calendar(of([0, 1, *[2] * 27, 50_000], timedelta(days=1)), 700, lambda _: "/")
    sheets = re.findall(r'class="sheet" x="([0-9.]+)" y="([0-9.]+)"', drawing)
    assert len(sheets) == 30
    assert [sheets[n] for n in (0, 6, 7)] == [("0.00", "24"), (f"{6 * 706 / 7:.2f}", "24"), ("0.00", "84")]
    assert re.findall(r'class="day[^>]*>([^<]*)<', drawing)[::27] == ["2 Feb", "1 Mar"]
    assert re.findall(r'class="many on"[^>]*>([^<]*)<', drawing) == ["50k"]


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (999, "999"), (1_000, "1k"), (1_240, "1.2k"), (99_999, "99k"), (5_100_000, "5.1M")]
)
def test_numbers_are_short(count: int, shown: str) -> None:
    assert charts.shorten_count(count) == shown


def test_lateness_is_that_of_nearly_all_and_never_less_than_none() -> None:
    """Of 200: one recorded before it was due, 197 on time, two late; then some whose due time nobody knows."""
    late = [timedelta(seconds=-3), *[timedelta(milliseconds=1)] * 197, timedelta(minutes=1), timedelta(days=40)]
    newest = START + 1_000 * timedelta(seconds=1)
    found = RecentLateness.of(
        [DeliveredMessage(newest - n * MINUTE, newest - n * MINUTE - each) for n, each in enumerate(late)]
    )
    assert (found.last, found.since, found.count) == (newest, newest - 199 * MINUTE, 200)
    assert (found.median, found.most, found.early) == (timedelta(milliseconds=1), timedelta(milliseconds=1), 1)
    spread = {name: count for name, count in found.spread.items() if count}
    assert spread == {"up to 1 ms": 198, "up to 1 min": 1, "longer": 1}
    unknown, none = RecentLateness.of([DeliveredMessage(newest, None)]), RecentLateness.of([])
    assert (unknown.last, unknown.since, unknown.count) == (newest, None, 0)
    assert (none.last, none.since, none.count) == (None, None, 0)
