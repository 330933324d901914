"""Axes, durations and names of the pages of reports are those that people read."""

from datetime import UTC, datetime, timedelta

import pytest

from postdate.pipeline.page import format_seconds, shorten_name, time_ticks, usual_height

FRIDAY = datetime(2026, 11, 20, 5, 13, tzinfo=UTC)


def ticks(span: timedelta) -> list[str]:
    return [label for _, label in time_ticks(FRIDAY.timestamp(), (FRIDAY + span).timestamp())]


def test_a_week_has_a_tick_at_each_midnight_with_the_day_of_the_week() -> None:
    assert ticks(timedelta(days=6)) == [
        "Sat\n21 Nov", "Sun\n22 Nov", "Mon\n23 Nov", "Tue\n24 Nov", "Wed\n25 Nov", "Thu\n26 Nov",
    ]  # fmt: skip


def test_a_day_has_full_hours_and_a_quarter_of_an_hour_has_minutes() -> None:
    assert ticks(timedelta(days=1)) == ["06:00\nFri\n20 Nov", "12:00", "18:00", "00:00\nSat\n21 Nov"]
    assert ticks(timedelta(minutes=14))[1:] == ["05:16", "05:18", "05:20", "05:22", "05:24", "05:26"]


def test_a_month_has_mondays_and_years_have_other_ticks() -> None:
    assert ticks(timedelta(days=30)) == ["Mon\n23 Nov", "Mon\n30 Nov", "Mon\n7 Dec", "Mon\n14 Dec"]
    assert ticks(timedelta(days=700)) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (25e-6, "25 µs"), (0.0431, "43.1 ms"), (0.9999, "1 s"), (59.4, "59.4 s"), (59.9, "1 min"),
        (100, "1 min 40 s"), (10_000, "2 h 47 min"), (7_170, "2 h"), (86_400, "1 d"), (270_000, "3 d 3 h"),
        (-100, "-1 min 40 s"),
    ],
)  # fmt: skip
def test_durations_have_the_units_of_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_long_name_keeps_both_ends() -> None:
    assert shorten_name("orders") == "orders"
    name = shorten_name("reply-3f2b9c1e-77aa-4d0e-9a55-0123456789ab-shipping-eu-west-1")
    assert (len(name), name[:8], name[-9:]) == (28, "reply-3f", "eu-west-1")


def test_one_herd_gets_a_second_panel_and_ordinary_peaks_do_not() -> None:
    assert usual_height([4_000] * 90 + [400_000]) == pytest.approx(4_600)
    assert usual_height([4_000, 8_000] * 20) is None
    assert usual_height([0, 0]) is None
