"""What a process knows of single messages: bounded, and never more than a duplicate or a delay. Source: ADR 45."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from postdate import DelayedMessage
from postdate.core.health.message_memory import FORGOTTEN_AFTER_SUCCESSES, MessageMemory, UnwrittenOutcome, fingerprint
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
    memory = MessageMemory()
    assert [memory.report_failure("m-1") for _ in range(3)] == [1, 1, 1]
    assert not memory.has_success_since_failure("m-1")
    memory.report_success("other")
    assert memory.has_success_since_failure("m-1")
    assert memory.report_failure("m-1") == 2
    memory.report_success("m-1")
    assert not memory
    assert memory.report_failure("m-1") == 1


def test_an_outage_of_a_whole_store_counts_against_no_message() -> None:
    memory = MessageMemory()
    assert memory.report_own_failure("m-1", StoreUnreachable("away")) == 0
    assert memory.report_own_failure("m-1", StoreTroubled("page 7")) == 1


@pytest.mark.parametrize(
    ("successes", "failures"), [(FORGOTTEN_AFTER_SUCCESSES, 2), (FORGOTTEN_AFTER_SUCCESSES + 1, 1)]
)
def test_a_failure_is_forgotten_when_much_has_succeeded_since(successes: int, failures: int) -> None:
    memory = MessageMemory()
    for message_id in ("often", "once", "often"):
        memory.report_failure(message_id)
        memory.report_success("other")
    for _ in range(successes - 2):
        memory.report_success("other")
    assert (memory.report_failure("once"), memory.report_failure("often")) == (failures, 3)


def test_what_is_known_is_bounded_and_the_oldest_is_forgotten_first() -> None:
    memory = MessageMemory(100)
    for number in range(1_000):
        memory.report_failure(f"m-{number}")
        assert len(memory) <= 110
    assert memory.find("m-0") is None
    assert memory.find("m-999") is not None


def test_an_outcome_whose_claim_is_held_is_never_dropped() -> None:
    """Nobody else can have the message: forgotten, it would be sent a second time."""
    memory = MessageMemory(100)
    for number in range(300):
        memory.remember_unwritten(unwritten(f"claimed-{number}", claimed=True))
    for number in range(300):
        memory.remember_unwritten(unwritten(f"lost-{number}", claimed=False))
    assert len(memory.outcomes_with_claim) == 300
    assert len(memory) <= 310
    for number in range(300):
        memory.forget_unwritten_outcome(f"claimed-{number}")
    assert not memory.outcomes_with_claim


def test_an_outcome_counts_as_claimed_until_its_claim_is_lost() -> None:
    memory, outcome = MessageMemory(), unwritten("m-1", claimed=True)
    memory.remember_unwritten(outcome)
    assert memory.outcomes_with_claim == {"m-1": outcome}
    outcome.claim = None
    memory.remember_unwritten(outcome)
    assert not memory.outcomes_with_claim
    assert memory.has_unwritten
    assert memory.unwritten_of("m-1") is outcome


def test_lost_claims_are_forgotten_by_the_time_at_which_they_were_lost() -> None:
    memory = MessageMemory()
    memory.report_failure("suspect")
    for second in range(10):
        memory.remember_unwritten(unwritten(f"m-{second}", claimed=False, lost_at=second))
    memory.remember_unwritten(unwritten("claimed", claimed=True))
    memory.forget_claims_lost_before(4.5)
    assert [memory.unwritten_of(f"m-{second}") is None for second in range(10)] == [True] * 5 + [False] * 5
    assert memory.find("suspect") is not None
    assert list(memory.outcomes_with_claim) == ["claimed"]


@pytest.mark.parametrize(
    ("changed", "seconds", "is_doomed"),
    [({}, 119.0, True), ({}, 121.0, False), ({"body": b"new"}, 1.0, False), ({"number_of_failures": 0}, 1.0, False)],
)
def test_a_doomed_message_goes_to_the_error_queue_once_if_it_is_unchanged(
    changed: dict[str, object], seconds: float, is_doomed: bool
) -> None:
    memory, failed = MessageMemory(), replace(message(), number_of_failures=3)
    memory.doom(failed, NACK, 3, 0.0)
    assert (memory.pop_doom(replace(failed, **changed), seconds) is NACK) is is_doomed
    assert memory.pop_doom(failed, seconds) is None
    assert not memory


def test_what_is_known_of_one_kind_stays_when_another_kind_is_forgotten() -> None:
    memory = MessageMemory()
    memory.remember_unwritten(unwritten("m-1", claimed=False))
    memory.report_failure("m-1")
    memory.doom(message(), NACK, 0, 0.0)
    memory.report_success("m-1")
    assert memory.unwritten_of("m-1") is not None
    assert memory.pop_doom(message(), 0.0) is NACK
    memory.forget_unwritten_outcome("m-1")
    assert not memory
