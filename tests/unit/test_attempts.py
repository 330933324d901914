"""What a process knows of single messages: bounded, and never more than a duplicate or a delay. Source: ADR 45."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from postdate import DelayedMessage
from postdate.core.health.attempts import FORGOTTEN_AFTER_SUCCESSES, Attempts, UnwrittenOutcome, fingerprint
from postdate.errors import StoreTroubled, StoreUnreachable, TransportUnavailable
from postdate.ports import Claim, Outcome

NACK = TransportUnavailable("nack")


def message(message_id: str = "m-1") -> DelayedMessage:
    return DelayedMessage(message_id, datetime(2026, 1, 1, tzinfo=UTC), "billing", body=b"body")


def unwritten(message_id: str, *, claimed: bool, lost_at: float = 0.0) -> UnwrittenOutcome:
    subject = message(message_id)
    claim = Claim(subject, 1) if claimed else None
    return UnwrittenOutcome(message_id, fingerprint(subject), claim, Outcome.DELIVERED, lost_at=lost_at)


def test_a_message_fails_once_more_only_when_others_have_succeeded_since() -> None:
    attempts = Attempts()
    assert [attempts.report_failure("m-1") for _ in range(3)] == [1, 1, 1]
    assert not attempts.has_success_since_failure("m-1")
    attempts.report_success("other")
    assert attempts.has_success_since_failure("m-1")
    assert attempts.report_failure("m-1") == 2
    attempts.report_success("m-1")
    assert not attempts
    assert attempts.report_failure("m-1") == 1


def test_an_outage_of_a_whole_store_counts_against_no_message() -> None:
    attempts = Attempts()
    assert attempts.report_own_failure("m-1", StoreUnreachable("away")) == 0
    assert attempts.report_own_failure("m-1", StoreTroubled("page 7")) == 1


@pytest.mark.parametrize(
    ("successes", "failures"), [(FORGOTTEN_AFTER_SUCCESSES, 2), (FORGOTTEN_AFTER_SUCCESSES + 1, 1)]
)
def test_a_failure_is_forgotten_when_much_has_succeeded_since(successes: int, failures: int) -> None:
    attempts = Attempts()
    for message_id in ("often", "once", "often"):
        attempts.report_failure(message_id)
        attempts.report_success("other")
    for _ in range(successes - 2):
        attempts.report_success("other")
    assert (attempts.report_failure("once"), attempts.report_failure("often")) == (failures, 3)


def test_what_is_known_is_bounded_and_the_oldest_is_forgotten_first() -> None:
    attempts = Attempts(100)
    for number in range(1_000):
        attempts.report_failure(f"m-{number}")
        assert len(attempts) <= 110
    assert attempts.find("m-0") is None
    assert attempts.find("m-999") is not None


def test_an_outcome_whose_claim_is_held_is_never_dropped() -> None:
    """Nobody else can have the message: forgotten, it would be sent a second time."""
    attempts = Attempts(100)
    for number in range(300):
        attempts.remember_unwritten(unwritten(f"claimed-{number}", claimed=True))
    for number in range(300):
        attempts.remember_unwritten(unwritten(f"lost-{number}", claimed=False))
    assert len(attempts.outcomes_with_claim) == 300
    assert len(attempts) <= 310
    for number in range(300):
        attempts.forget_unwritten_outcome(f"claimed-{number}")
    assert not attempts.outcomes_with_claim


def test_an_outcome_counts_as_claimed_until_its_claim_is_lost() -> None:
    attempts, outcome = Attempts(), unwritten("m-1", claimed=True)
    attempts.remember_unwritten(outcome)
    assert attempts.outcomes_with_claim == {"m-1": outcome}
    outcome.claim = None
    attempts.remember_unwritten(outcome)
    assert not attempts.outcomes_with_claim
    assert attempts.has_unwritten
    assert attempts.unwritten_of("m-1") is outcome


def test_lost_claims_are_forgotten_by_the_time_at_which_they_were_lost() -> None:
    attempts = Attempts()
    attempts.report_failure("suspect")
    for second in range(10):
        attempts.remember_unwritten(unwritten(f"m-{second}", claimed=False, lost_at=second))
    attempts.remember_unwritten(unwritten("claimed", claimed=True))
    attempts.forget_claims_lost_before(4.5)
    assert [attempts.unwritten_of(f"m-{second}") is None for second in range(10)] == [True] * 5 + [False] * 5
    assert attempts.find("suspect") is not None
    assert list(attempts.outcomes_with_claim) == ["claimed"]


@pytest.mark.parametrize(
    ("changed", "seconds", "is_doomed"),
    [({}, 119.0, True), ({}, 121.0, False), ({"body": b"new"}, 1.0, False), ({"number_of_failures": 0}, 1.0, False)],
)
def test_a_doomed_message_goes_to_the_error_queue_once_if_it_is_unchanged(
    changed: dict[str, object], seconds: float, is_doomed: bool
) -> None:
    attempts, failed = Attempts(), replace(message(), number_of_failures=3)
    attempts.doom(failed, NACK, 3, 0.0)
    assert (attempts.pop_doom(replace(failed, **changed), seconds) is NACK) is is_doomed
    assert attempts.pop_doom(failed, seconds) is None
    assert not attempts


def test_what_is_known_of_one_kind_stays_when_another_kind_is_forgotten() -> None:
    attempts = Attempts()
    attempts.remember_unwritten(unwritten("m-1", claimed=False))
    attempts.report_failure("m-1")
    attempts.doom(message(), NACK, 0, 0.0)
    attempts.report_success("m-1")
    assert attempts.unwritten_of("m-1") is not None
    assert attempts.pop_doom(message(), 0.0) is NACK
    attempts.forget_unwritten_outcome("m-1")
    assert not attempts
