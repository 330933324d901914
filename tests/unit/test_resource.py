"""A resource: one outage is one line in the log, one a minute, and one for its end, however many loops meet it."""

import gc
import logging
from dataclasses import dataclass
from datetime import timedelta

import pytest

from postdate import MemoryStore
from postdate.errors import StoreError, StoreUnavailable, StoreUnreachable
from postdate.runtime.reporting import duration_text
from postdate.runtime.resource import PAUSE, Backoff, CallHealth, Resource, outage_texts, resource_at, resource_of

DOWN, LOCKED, WRONG = StoreUnreachable("connection refused"), StoreUnavailable("locked"), StoreError("no such column")
LOG = logging.getLogger("postdate.test")


@pytest.fixture
def sales(caplog: pytest.LogCaptureFixture) -> Resource:
    caplog.set_level(logging.INFO)
    return Resource("PostgreSQL sales")


@pytest.fixture
def receiving(sales: Resource) -> CallHealth:
    return sales.calls("cannot receive from sales", LOG)


@pytest.fixture
def claiming(sales: Resource) -> CallHealth:
    return sales.calls("cannot claim due messages", LOG)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_an_outage_that_several_loops_meet_is_one_line_and_one_for_its_end(
    receiving: CallHealth, claiming: CallHealth, sales: Resource, caplog: pytest.LogCaptureFixture
) -> None:
    assert sales.outage_text(1_000) is None
    for third in range(78):
        (receiving, claiming)[third % 2].report_failure(DOWN, 1_000 + third / 3)
    assert sales.outage_text(1_026) == "out of reach for 26 s: connection refused"
    receiving.report_success(1_026)
    assert sales.outage_text(1_026) is not None, "the other loop still fails"
    claiming.report_success(1_026.1)
    claiming.report_success(1_027)
    assert lines(caplog) == [
        ("ERROR", "cannot receive from sales: connection refused"),
        ("INFO", "PostgreSQL sales is reachable again after 26 s (78 failures)"),
    ]
    assert sales.outage_text(1_027) is None
    assert all(record.exc_info is None for record in caplog.records)


def test_a_long_one_is_a_line_a_minute_that_names_what_fails(
    receiving: CallHealth, claiming: CallHealth, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(181):
        receiving.report_failure(DOWN, second)
        if second > 100:
            claiming.report_failure(DOWN, second)
    assert [text for _, text in lines(caplog)[1:]] == [
        "cannot receive from sales, for 60 s now (61 failures): connection refused",
        "cannot receive from sales; cannot claim due messages, for 2 min now (140 failures): connection refused",
        "cannot receive from sales; cannot claim due messages, for 3 min now (260 failures): connection refused",
    ]


def test_another_outage_within_it_is_no_line_and_an_error_of_another_kind_is_one(
    receiving: CallHealth, claiming: CallHealth, caplog: pytest.LogCaptureFixture
) -> None:
    for second, error in enumerate([DOWN, LOCKED, DOWN, WRONG, WRONG]):
        receiving.report_failure(error, second)
        claiming.report_failure(error, second)
    assert [text.rpartition(": ")[2] for _, text in lines(caplog)] == ["connection refused", "no such column"]


def test_failures_with_successes_between_them_are_one_outage(
    receiving: CallHealth, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(100):
        receiving.report_failure(DOWN, second)
        receiving.report_success(second + 0.5)
    assert [text for _, text in lines(caplog)] == [
        "cannot receive from sales: connection refused",
        "PostgreSQL sales is reachable again after 0.5 s (1 failure)",
        "cannot receive from sales, for 60 s now (61 failures): connection refused",
        "PostgreSQL sales is reachable again after 60 s (61 failures)",
    ]
    for second in range(100, 110):  # the last line does not stay untrue
        receiving.report_failure(DOWN, second)
    assert [text for _, text in lines(caplog)[4:]] == [
        "cannot receive from sales, for 105 s now (106 failures): connection refused"
    ]


def test_what_fails_while_all_else_goes_well_is_an_outage_until_it_goes_well(
    receiving: CallHealth, claiming: CallHealth, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(50):
        receiving.report_failure(DOWN, second)
        claiming.report_success(second)
    receiving.report_success(50)
    assert [level for level, _ in lines(caplog)] == ["ERROR", "INFO"]


def test_the_next_outage_begins_anew(receiving: CallHealth, caplog: pytest.LogCaptureFixture) -> None:
    for second in (0, 10):
        receiving.report_failure(DOWN, second)
        assert receiving.is_failing
        receiving.report_success(second + 1)
        assert not receiving.is_failing
    assert [level for level, _ in lines(caplog)] == ["ERROR", "INFO", "ERROR", "INFO"]


def test_a_loop_that_ended_while_it_failed_is_forgotten(
    receiving: CallHealth, claiming: CallHealth, sales: Resource, caplog: pytest.LogCaptureFixture
) -> None:
    receiving.report_failure(DOWN, 0)
    assert sales.outage_text(149) is not None
    assert sales.outage_text(150) is None
    claiming.report_failure(DOWN, 200)
    claiming.report_success(201)
    assert lines(caplog)[-1] == ("INFO", "PostgreSQL sales is reachable again after 1 s (1 failure)")


def test_an_outage_ends_when_all_goes_well_and_lasted_until_something_did(
    receiving: CallHealth, claiming: CallHealth, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(60):
        receiving.report_failure(DOWN, second)
        claiming.report_failure(DOWN, second)
    claiming.report_success(60)
    receiving.report_success(69)  # its pause is longer
    assert lines(caplog)[-1] == ("INFO", "PostgreSQL sales is reachable again after 60 s (120 failures)")


def test_the_end_of_an_outage_does_not_wait_for_calls_that_are_rare(
    receiving: CallHealth, sales: Resource, caplog: pytest.LogCaptureFixture
) -> None:
    rare = sales.calls("cannot read the clock", LOG, is_rare=True)
    rare.report_failure(DOWN, 0)
    assert sales.outage_text(1) is not None
    receiving.report_failure(DOWN, 1)
    receiving.report_success(2)
    assert sales.outage_text(2) is None
    assert [level for level, _ in lines(caplog)] == ["ERROR", "INFO"]
    rare.report_success(30)
    assert len(caplog.records) == 2


def test_outages_are_counted(receiving: CallHealth, claiming: CallHealth, sales: Resource) -> None:
    for number, begin in enumerate((0, 1_000), 1):
        receiving.report_failure(DOWN, begin)
        claiming.report_failure(DOWN, begin)
        assert sales.outage_count == number
        receiving.report_success(begin + 60)
        claiming.report_success(begin + 60)


# --- which resource ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    database: object


class OfDatabase:
    def __init__(self, database: object) -> None:
        self.capabilities = Capabilities(database)


def test_adapters_of_one_database_share_a_resource_and_others_have_one_each() -> None:
    one, two, other = OfDatabase(("sqlite", "a")), OfDatabase(("sqlite", "a")), OfDatabase(("sqlite", "b"))
    resource = resource_of(one)
    assert resource is resource_of(two) is resource_at(("sqlite", "a"), "a")
    assert resource is not resource_of(other)
    memory, another = MemoryStore(), MemoryStore()
    assert resource_of(memory) is resource_of(memory) is not resource_of(another)
    assert resource_of(memory).name == "MemoryStore"
    own = OfDatabase(("sqlite", "a"))
    own.resource = Resource("its own")  # pyright: ignore[reportAttributeAccessIssue]
    assert resource_of(own).name == "its own"
    assert resource_of(slots := []).name == "list", slots  # it cannot be a key


def test_an_outage_is_told_also_if_another_resource_has_its_name() -> None:
    stores = [MemoryStore() for _ in range(8)]
    for away in (stores[:1], stores[-1:], stores[2:4]):
        outages = [resource_of(each).calls("cannot", LOG) for each in away]
        for number, calls in enumerate(outages):
            calls.report_failure(StoreUnreachable(f"no answer of {number}"), 1_000)
        told = [each for each in outage_texts(1_001) if each.startswith("MemoryStore")]
        assert told == [f"MemoryStore is out of reach for 1 s: no answer of {n}" for n in range(len(away))]
        for calls in outages:
            calls.report_success(1_002)


def test_a_resource_ends_with_those_who_use_it() -> None:
    calls = resource_at("a place", "first").calls("cannot", LOG)
    assert resource_at("a place", "second") is calls.resource
    del calls
    gc.collect()
    assert resource_at("a place", "third").name == "third"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (26, "26 s"), (119, "119 s"), (150, "2 min"), (7_500, "2 h 5 min")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown


class CountingBreaker:
    def __init__(self) -> None:
        self.failures = self.successes = 0

    def report_failure(self, error: BaseException, seconds: float) -> timedelta:
        self.failures += 1
        return timedelta(seconds=10)

    def report_success(self) -> None:
        self.successes += 1


def test_a_loop_reports_a_failure_once_and_resource_breaker_and_backoff_hear_of_it(
    sales: Resource, caplog: pytest.LogCaptureFixture
) -> None:
    breaker, backoff = CountingBreaker(), Backoff(0.25, 1.5)
    calls = sales.calls("cannot send", LOG, breaker=breaker, backoff=backoff)
    assert calls.report_failure(DOWN, 1_000) == timedelta(seconds=10)
    assert (breaker.failures, backoff.remaining(1_000), sales.outage_count) == (1, 0.25, 1)
    assert calls.report_success(1_001)
    assert not calls.report_success(1_002), "it was well before"
    assert (breaker.successes, backoff.is_waiting) == (2, False)
    assert [level for level, _ in lines(caplog)] == ["ERROR", "INFO"]


def test_a_refusal_of_one_message_is_no_outage_of_its_resource(
    sales: Resource, caplog: pytest.LogCaptureFixture
) -> None:
    breaker, backoff = CountingBreaker(), Backoff(0.25, 1.5)
    calls = sales.calls("cannot send", LOG, breaker=breaker, backoff=backoff)
    assert calls.report_refusal(WRONG, 1_000) == timedelta(seconds=10)
    assert (breaker.failures, backoff.is_waiting, calls.is_failing, sales.outage_count) == (1, False, False, 0)
    assert lines(caplog) == []
    assert sales.calls("cannot receive", LOG).report_refusal(WRONG, 1_000) == PAUSE


def test_a_backoff_doubles_its_pause_and_failures_before_the_next_attempt_are_one() -> None:
    backoff, seconds, pauses = Backoff(0.25, 1.5), 1_000.0, list[float]()
    for _ in range(5):
        backoff.report_failure(seconds)
        backoff.report_failure(seconds + 0.1)
        pauses.append(backoff.remaining(seconds))
        seconds = backoff.retry_at
    assert pauses == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert backoff.remaining(seconds) == 0
    backoff.report_success()
    backoff.report_failure(seconds)
    assert backoff.remaining(seconds) == 0.25
