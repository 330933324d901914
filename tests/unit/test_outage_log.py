"""An outage in a log: its beginning, a line a minute, its end."""

import logging

import pytest

from postdate.errors import StoreUnavailable, StoreUnreachable
from postdate.runtime.reporting import OutageLog, shown_duration

DOWN, LOCKED = StoreUnreachable("connection refused"), StoreUnavailable("locked")


@pytest.fixture
def outage(caplog: pytest.LogCaptureFixture) -> OutageLog:
    caplog.set_level(logging.INFO)
    return OutageLog(logging.getLogger("postdate.test"), "cannot receive from sales", "sales is")


def test_26_seconds_with_three_failures_each_are_two_lines(outage: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    for third in range(78):
        outage.failed(DOWN, 1_000 + third / 3)
    outage.succeeded(1_026)
    outage.succeeded(1_027)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("ERROR", "cannot receive from sales: connection refused"),
        ("INFO", "sales is reachable again after 26 s (78 failures)"),
    ]
    assert all(record.exc_info is None for record in caplog.records)


def test_a_long_one_is_a_line_a_minute_with_a_count(outage: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    for second in range(181):
        outage.failed(DOWN, second)
    assert [record.message for record in caplog.records[1:]] == [
        "cannot receive from sales, for 60 s now (61 failures): connection refused",
        "cannot receive from sales, for 2 min now (121 failures): connection refused",
        "cannot receive from sales, for 3 min now (181 failures): connection refused",
    ]


def test_another_kind_of_failure_is_said_at_once_and_once(outage: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    for second, error in enumerate([DOWN, LOCKED, DOWN, LOCKED]):
        outage.failed(error, second)
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["connection refused", "locked"]


def test_failures_with_successes_between_them_are_one_outage(
    outage: OutageLog, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(100):
        outage.failed(DOWN, second)
        outage.succeeded(second + 0.5)
    assert [record.message for record in caplog.records] == [
        "cannot receive from sales: connection refused",
        "sales is reachable again after 0.5 s (1 failure)",
        "cannot receive from sales, for 60 s now (61 failures): connection refused",
        "sales is reachable again after 60 s (61 failures)",
    ]
    for second in range(100, 110):  # the last line does not stay untrue
        outage.failed(DOWN, second)
    assert [record.message for record in caplog.records[4:]] == [
        "cannot receive from sales, for 105 s now (106 failures): connection refused"
    ]


def test_the_next_outage_begins_anew(outage: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    for second in (0, 10):
        outage.failed(DOWN, second)
        assert outage.is_out
        outage.succeeded(second + 1)
        assert not outage.is_out
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "ERROR", "INFO"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (26, "26 s"), (119, "119 s"), (150, "2 min"), (7_500, "2 h 5 min")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert shown_duration(seconds) == shown
