"""Queues that take no messages: a probe now and then, and few claims of the others. Source: ADR 51."""

from datetime import timedelta

from postdate.core.health.destinations import (
    FOLLOW_SECONDS,
    LATEST_ATTEMPT_SECONDS,
    LONGEST_SECONDS,
    MESSAGES_PER_PROBE,
    SHORTEST_SECONDS,
    Destinations,
)


def test_a_queue_that_takes_messages_makes_nobody_wait() -> None:
    destinations = Destinations()
    assert not destinations
    assert destinations.wait_seconds("billing", 0.0) == 0.0


def test_the_first_message_after_a_pause_is_a_probe_and_the_next_wait_for_its_answer() -> None:
    destinations = Destinations()
    assert destinations.report_refusal("full", 100.0)
    assert destinations.wait_seconds("full", 100.0) > 0
    assert destinations.wait_seconds("billing", 100.0) == 0.0
    assert destinations.wait_seconds("full", 100.0 + SHORTEST_SECONDS) == 0.0
    assert destinations.wait_seconds("full", 100.0 + SHORTEST_SECONDS) == FOLLOW_SECONDS


def test_pauses_between_probes_grow_to_the_longest() -> None:
    destinations, seconds, pauses = Destinations(), 100.0, list[float]()
    destinations.report_refusal("full", seconds)
    for _ in range(6):
        before, seconds = seconds, seconds + 0.01
        while destinations.wait_seconds("full", seconds):
            seconds += 0.01
        pauses.append(round(seconds - before, 1))
        destinations.report_refusal("full", seconds)
    assert pauses == sorted(pauses)
    assert LONGEST_SECONDS - 0.2 <= pauses[-1] <= LONGEST_SECONDS


def test_of_thousands_a_thousand_come_at_each_turn_and_none_after_the_latest() -> None:
    destinations = Destinations()
    destinations.report_refusal("full", 100.0)
    waits = [destinations.retry_wait_seconds("full", 100.0) for _ in range(MESSAGES_PER_PROBE * 20)]
    turns = [sum(1 for wait in waits if low <= wait < low + LONGEST_SECONDS) for low in (0.0, LONGEST_SECONDS)]
    assert turns == [MESSAGES_PER_PROBE, MESSAGES_PER_PROBE]
    assert max(waits) <= LATEST_ATTEMPT_SECONDS + FOLLOW_SECONDS


def test_a_queue_that_drains_slowly_is_no_new_outage_each_time_it_takes_one() -> None:
    destinations = Destinations()
    assert destinations.report_refusal("full", 100.0)
    destinations.report_success("full")
    assert not destinations
    assert not destinations.report_refusal("full", 101.0)
    destinations.report_success("full")
    assert destinations.report_refusal("full", 101.0 + LATEST_ATTEMPT_SECONDS + LONGEST_SECONDS)


def test_a_queue_that_was_full_is_waited_for_as_long_as_any_other_once_it_is_missing() -> None:
    """As while an operator deletes it and makes it anew."""
    destinations, wait = Destinations(), timedelta(minutes=10)
    for seconds in range(0, 700, 100):
        destinations.report_refusal("q", float(seconds))
    assert destinations.should_wait_for("q", 700.0, wait)
    destinations.report_refusal("q", 700.0, is_missing=True)
    assert destinations.should_wait_for("q", 1_299.0, wait)
    assert not destinations.should_wait_for("q", 1_300.0, wait)
