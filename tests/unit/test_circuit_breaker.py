"""Repeated failures over time, and failures at too high a rate (specification 1.11, rows 43 to 47)."""

import logging
from datetime import timedelta

import pytest

from postdate.core.health.circuit_breaker import BreakerState, FailureRate, RepeatedFailures
from postdate.errors import StoreReplaced
from postdate.testing import RecordedMetrics

NOW = 1_000.0
SECOND = timedelta(seconds=1)
ERROR = OSError("down")


class Critical:
    def __init__(self) -> None:
        self.calls: list[tuple[str, BaseException]] = []

    def __call__(self, text: str, error: BaseException) -> None:
        self.calls.append((text, error))


@pytest.fixture
def critical() -> Critical:
    return Critical()


@pytest.fixture
def breaker(critical: Critical) -> RepeatedFailures:
    return RepeatedFailures("store", "cannot store", 30 * SECOND, critical)


def test_the_first_failure_arms_it_and_pauses_for_a_second_row_47(breaker: RepeatedFailures) -> None:
    assert breaker.state is BreakerState.DISARMED
    assert breaker.report_failure(ERROR, NOW) == SECOND
    assert breaker.state is BreakerState.ARMED


def test_failures_for_too_long_trigger_it_once_with_the_last_error_row_43(
    breaker: RepeatedFailures, critical: Critical
) -> None:
    last = OSError("last")
    breaker.report_failure(ERROR, NOW)
    assert breaker.report_failure(ERROR, NOW + 29) == SECOND
    assert critical.calls == []
    assert breaker.report_failure(last, NOW + 30) == 10 * SECOND
    assert breaker.report_failure(ERROR, NOW + 40) == 10 * SECOND
    assert critical.calls == [("cannot store", last)]
    assert breaker.state is BreakerState.TRIGGERED


def test_what_trying_again_cannot_mend_triggers_it_at_once(breaker: RepeatedFailures, critical: Critical) -> None:
    gone = StoreReplaced("replaced")
    breaker.report_failure(ERROR, NOW)
    assert [breaker.report_failure(gone, NOW + 1), breaker.report_failure(gone, NOW + 40)] == [10 * SECOND] * 2
    assert critical.calls == [("cannot store", gone)]


def test_one_success_in_time_prevents_it_row_44(breaker: RepeatedFailures, critical: Critical) -> None:
    breaker.report_failure(ERROR, NOW)
    breaker.report_success()
    breaker.report_failure(ERROR, NOW + 30)
    breaker.report_failure(ERROR, NOW + 59)
    assert critical.calls == []


def test_a_success_disarms_it_and_it_can_trigger_again_row_47(
    breaker: RepeatedFailures, critical: Critical, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "postdate.circuit_breaker"):
        for start in (NOW, NOW + 3600):
            breaker.report_failure(ERROR, start)
            breaker.report_failure(ERROR, start + 31)
            breaker.report_success()
            breaker.report_success()
    assert len(critical.calls) == 2
    words = [record.message.split(":")[0].removeprefix("circuit breaker store ") for record in caplog.records]
    assert words == ["armed", "triggered after 0", "disarmed"] * 2


def test_a_critical_error_action_that_fails_is_logged_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    def fail(text: str, error: BaseException) -> None:
        raise RuntimeError("the action")

    breaker = RepeatedFailures("store", "cannot store", SECOND, fail)
    breaker.report_failure(ERROR, NOW)
    assert breaker.report_failure(ERROR, NOW + 1) == 10 * SECOND
    assert caplog.records[-1].levelname == "CRITICAL"


def test_thirty_times_the_limit_in_half_a_minute_is_borne_and_one_more_is_not_row_46(critical: Critical) -> None:
    rate = FailureRate("handling", "cannot handle", 2, critical)
    for number in range(60):
        rate.report_failure(ERROR, NOW + number * 0.1)
    assert critical.calls == []
    rate.report_failure(ERROR, NOW + 29)
    rate.report_failure(ERROR, NOW + 29)
    assert len(critical.calls) == 2


def test_the_count_begins_anew_in_every_window_row_46(critical: Critical) -> None:
    rate = FailureRate("handling", "cannot handle", 1, critical)
    for window in range(3):
        for _ in range(30):
            rate.report_failure(ERROR, NOW + window * 30)
        rate.report_success()
    assert critical.calls == []


def test_a_minute_in_which_nothing_could_be_handled_is_a_critical_error_however_few_failures_row_46(
    critical: Critical,
) -> None:
    """Each attempt waits longer than the one before: there are never many in one window."""
    rate = FailureRate("handling", "cannot handle", 1, critical)
    for seconds in (0, 1, 3, 7, 15, 25, 35, 45, 55):
        rate.report_failure(ERROR, NOW + seconds)
    assert critical.calls == []
    rate.report_failure(ERROR, NOW + 65)
    rate.report_failure(ERROR, NOW + 75)
    assert critical.calls == [("cannot handle", ERROR)]
    rate.report_success()
    rate.report_failure(ERROR, NOW + 85)
    assert len(critical.calls) == 1


def test_a_failure_now_and_then_is_none_that_lasts_row_46(critical: Critical) -> None:
    """Each is tried again within a minute. So after a longer time it was handled, although nobody says so here."""
    rate = FailureRate("handling", "cannot handle", 1, critical)
    for hour in range(3):
        rate.report_failure(ERROR, NOW + hour * 3_600)
    assert critical.calls == []
    for seconds in (0, 30, 61, 90):
        rate.report_failure(ERROR, NOW + 20_000 + seconds)
    assert len(critical.calls) == 1


# --- by itself --------------------------------------------------------------------------------------------------------


def test_armed_it_has_a_deadline_at_which_it_trips_by_itself_row_47(
    breaker: RepeatedFailures, critical: Critical
) -> None:
    last = OSError("last")
    assert breaker.deadline is None
    breaker.report_failure(ERROR, NOW)
    assert breaker.deadline == NOW + 30
    breaker.report_failure(last, NOW + 5)
    breaker.update_state(NOW + 29.999999)
    assert breaker.state is BreakerState.ARMED
    breaker.update_state(NOW + 30)
    breaker.update_state(NOW + 60)
    assert critical.calls == [("cannot store", last)]
    assert breaker.deadline is None
    assert breaker.report_failure(ERROR, NOW + 61) == 10 * SECOND


def test_a_success_before_the_deadline_takes_it_away_row_44(breaker: RepeatedFailures, critical: Critical) -> None:
    breaker.report_failure(ERROR, NOW)
    breaker.report_success()
    breaker.update_state(NOW + 60)
    assert (breaker.deadline, breaker.state, critical.calls) == (None, BreakerState.DISARMED, [])


def test_every_failure_pauses_and_longer_once_it_has_tripped_row_47(breaker: RepeatedFailures) -> None:
    pauses = [breaker.report_failure(ERROR, NOW + number).total_seconds() for number in (0, 1, 29, 30, 31, 90)]
    assert pauses == [1, 1, 1, 10, 10, 10]
    breaker.report_success()
    assert breaker.report_failure(ERROR, NOW + 91) == SECOND


def test_who_watches_the_deadline_is_told_once_for_each_arming(breaker: RepeatedFailures) -> None:
    told: list[float | None] = []
    breaker.on_armed = lambda: told.append(breaker.deadline)
    for number in range(3):
        breaker.report_failure(ERROR, NOW + number)
    breaker.report_success()
    breaker.report_failure(ERROR, NOW + 100)
    assert told == [NOW + 30, NOW + 130]


def test_a_window_of_failures_ends_with_a_word_row_46(critical: Critical, caplog: pytest.LogCaptureFixture) -> None:
    rate = FailureRate("handling", "cannot handle", 1, critical)
    with caplog.at_level(logging.DEBUG, "postdate.circuit_breaker"):
        rate.report_failure(ERROR, NOW)
        rate.report_failure(ERROR, NOW + 1)
        rate.update_state(NOW + 29)
        assert rate.state is BreakerState.ARMED
        rate.update_state(NOW + 30)
        rate.update_state(NOW + 90)
    assert rate.state is BreakerState.DISARMED
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "circuit breaker handling armed: down"),
        ("DEBUG", "circuit breaker handling disarmed after 2 failures"),
    ]


def test_above_the_rate_each_further_failure_is_a_critical_error_until_the_window_ends_row_46(
    critical: Critical,
) -> None:
    rate = FailureRate("handling", "cannot handle", 1, critical)
    for _ in range(33):
        rate.report_failure(ERROR, NOW)
    assert len(critical.calls) == 3
    rate.report_failure(ERROR, NOW + 30)
    assert len(critical.calls) == 3


def test_every_change_is_measured(critical: Critical) -> None:
    metrics = RecordedMetrics()
    breaker = RepeatedFailures("store", "cannot store", 30 * SECOND, critical, metrics)
    rate = FailureRate("handling", "cannot handle", 1, critical, metrics)
    breaker.report_failure(ERROR, NOW)
    breaker.report_failure(ERROR, NOW + 1)
    breaker.update_state(NOW + 30)
    breaker.report_success()
    for _ in range(33):
        rate.report_failure(ERROR, NOW)
    rate.update_state(NOW + 30)
    states = ["armed", "triggered", "disarmed"]
    assert metrics.breaker_changes == [*(("store", each) for each in states), *(("handling", each) for each in states)]
