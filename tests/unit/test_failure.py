"""What becomes of a message whose step failed, or whose end was refused: the whole decision as a table. ADR 0026."""

import pytest

from postdate import errors
from postdate.clock import SystemClock
from postdate.core.recoverability import (
    MOST_OWN_FAILURES,
    MOST_STEP_RETRIES,
    ErrorQueue,
    Host,
    RecoveryRules,
    Resolution,
    resolve_copy_failure,
    resolve_failure,
)
from postdate.errors import (
    ClaimLost,
    DestinationUnavailable,
    DuplicateMessage,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    SagaConflict,
    StoreError,
    StoreFull,
    StoreTroubled,
    StoreUnavailable,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.messages import Envelope, Headers
from postdate.ports import Received

HANDLER = RecoveryRules(retry_now_errors=(SagaConflict,))
TAKEN = RecoveryRules(is_off_queue=True)
STORING = RecoveryRules(waits_in_hand=True, counts_transient=True)
IN_ONE = RecoveryRules(waits_in_hand=True, shares_database=True, counts_transient=True)
SENDING = RecoveryRules(retry_now_errors=(DestinationUnavailable,), counts_transient=True)
ITSELF = RecoveryRules()
NEW = Received(Envelope("sales", "m-1"), 0, object())
LAST = NEW._replace(is_dropped_if_returned=True)
DECIDED = [Resolution.POLICY, Resolution.ERROR_COPY, Resolution.BRIEF_ERROR_COPY]


@pytest.mark.parametrize(
    ("rules", "error", "resolution"),
    [
        (HANDLER, SagaConflict("somebody was faster"), Resolution.RETRY_NOW),
        (HANDLER, MessageTooLarge("64 KiB"), Resolution.POLICY),
        (HANDLER, QueueNotFound("nowhere"), Resolution.POLICY),
        (HANDLER, DuplicateMessage("another"), Resolution.POLICY),
        (HANDLER, StoreError("never"), Resolution.POLICY),
        (HANDLER, TransportUnavailable("nack"), Resolution.REQUEUE),
        (HANDLER, TransportUnreachable("away"), Resolution.REQUEUE),
        (HANDLER, StoreFull("full"), Resolution.REQUEUE),
        (HANDLER, ClaimLost("lost"), Resolution.REQUEUE),
        (TAKEN, SagaConflict("somebody was faster"), Resolution.POLICY),
        (TAKEN, TransportUnavailable("nack"), Resolution.POLICY),
        (TAKEN, TransportUnreachable("away"), Resolution.POLICY),
        (STORING, StoreFull("full"), Resolution.WAIT_FOR_STORE),
        (STORING, DestinationUnavailable("full"), Resolution.WAIT_FOR_STORE),
        (STORING, TransportUnreachable("away"), Resolution.REQUEUE),
        (IN_ONE, TransportUnreachable("away"), Resolution.WAIT_FOR_STORE),
        (IN_ONE, StoreTroubled("locked"), Resolution.WAIT_FOR_STORE),
        (STORING, StoreUnavailable("not now"), Resolution.POLICY),
        (STORING, StoreError("never"), Resolution.POLICY),
        (STORING, ClaimLost("lost"), Resolution.REQUEUE),
        (SENDING, DestinationUnavailable("full"), Resolution.RETRY_NOW),
        (SENDING, TransportUnreachable("away"), Resolution.REQUEUE),
        (SENDING, TransportUnavailable("nack"), Resolution.POLICY),
        (ITSELF, StoreFull("full"), Resolution.REQUEUE),
        (ITSELF, TransportUnavailable("nack"), Resolution.REQUEUE),
    ],
)
def test_a_first_failure(rules: RecoveryRules, error: PostdateError, resolution: Resolution) -> None:
    assert resolve_failure(None, error, NEW, 0, rules) is resolution


def test_a_message_that_its_queue_would_drop_soon_does_not_stay_in_hand() -> None:
    assert resolve_failure(None, StoreFull("full"), LAST, 0, STORING) is Resolution.POLICY
    assert resolve_failure(None, TransportUnreachable("away"), LAST, 0, SENDING) is Resolution.REQUEUE


def test_who_is_asked_anew_again_and_again_has_failed_in_the_end() -> None:
    tired = NEW._replace(attempts=MOST_STEP_RETRIES - 1)
    assert (
        resolve_failure(None, SagaConflict("faster"), tired._replace(attempts=MOST_STEP_RETRIES - 2), 0, HANDLER)
        is Resolution.RETRY_NOW
    )
    assert resolve_failure(None, SagaConflict("faster"), tired, 0, HANDLER) is Resolution.POLICY


@pytest.mark.parametrize("rules", [HANDLER, STORING, SENDING, ITSELF])
def test_trouble_of_one_row_counts_from_the_eleventh_time_on(rules: RecoveryRules) -> None:
    troubled = StoreTroubled("page 7")
    assert resolve_failure(None, troubled, NEW, MOST_OWN_FAILURES, rules) is not Resolution.POLICY
    assert resolve_failure(None, troubled, NEW, MOST_OWN_FAILURES + 1, rules) is Resolution.POLICY


def test_who_is_alone_in_trouble_waits_alone_and_once_may_be_chance() -> None:
    resolutions = [
        resolve_failure(None, StoreTroubled("7"), NEW, met, STORING, other_messages_succeeded=True) for met in (0, 1, 2)
    ]
    assert resolutions == [Resolution.WAIT_FOR_STORE, Resolution.WAIT_FOR_STORE, Resolution.WAIT_ALONE]
    assert resolve_failure(None, StoreTroubled("7"), NEW, 2, STORING) is Resolution.WAIT_FOR_STORE


@pytest.mark.parametrize(
    ("error", "resolutions"),
    [
        (MessageTooLarge("64 KiB"), [Resolution.ERROR_COPY, Resolution.BRIEF_ERROR_COPY, Resolution.STUCK]),
        (QueueNotFound("no error queue"), [Resolution.ERROR_COPY, Resolution.BRIEF_ERROR_COPY, Resolution.REQUEUE]),
        (TransportUnavailable("nack"), [Resolution.REQUEUE] * 3),
        (TransportUnreachable("away"), [Resolution.REQUEUE] * 3),
        (ClaimLost("lost"), [Resolution.REQUEUE] * 3),
    ],
    ids=lambda each: each.code if isinstance(each, PostdateError) else "",
)
def test_what_was_decided_and_is_refused_becomes_a_copy_in_full_then_in_brief(
    error: PostdateError, resolutions: list[Resolution]
) -> None:
    assert [resolve_failure(each, error, LAST, 0, STORING) for each in DECIDED] == resolutions


@pytest.mark.parametrize("rules", [HANDLER, STORING, SENDING, ITSELF])
def test_what_was_decided_and_is_refused_for_one_message_alone_comes_back_ten_times(rules: RecoveryRules) -> None:
    """It came back for ever, once a second, as every policy decides the same again."""
    for error in (StoreTroubled("page 7"), TransportUnavailable("no such text")):
        before, then = (
            [resolve_failure(each, error, NEW, failed, rules) for each in DECIDED]
            for failed in (MOST_OWN_FAILURES, MOST_OWN_FAILURES + 1)
        )
        assert before == [Resolution.REQUEUE] * 3
        assert then == [Resolution.ERROR_COPY, Resolution.BRIEF_ERROR_COPY, Resolution.REQUEUE]


@pytest.mark.parametrize("rules", [HANDLER, ITSELF])
def test_an_end_that_is_refused_for_one_message_alone_counts_from_the_eleventh_time_on(rules: RecoveryRules) -> None:
    odd = TransportUnavailable("no such text")
    assert resolve_failure(None, odd, NEW, MOST_OWN_FAILURES, rules) is Resolution.REQUEUE
    assert resolve_failure(None, odd, NEW, MOST_OWN_FAILURES + 1, rules) is Resolution.POLICY


def test_off_its_queue_a_message_gets_its_copies_whatever_is_in_the_way() -> None:
    blip = TransportUnavailable("blip")
    assert [resolve_failure(each, blip, NEW, 0, TAKEN) for each in (Resolution.POLICY, Resolution.ERROR_COPY)] == [
        Resolution.ERROR_COPY,
        Resolution.BRIEF_ERROR_COPY,
    ]
    assert resolve_copy_failure(Resolution.BRIEF_ERROR_COPY, blip) is Resolution.REQUEUE


def test_a_copy_in_brief_says_only_what_is_needed_and_nothing_of_an_earlier_failure() -> None:
    errors = ErrorQueue("error", "sales", Host("sales"), lambda headers: {**headers, "more": "x"})
    own = {"own": "1", Headers.EXCEPTION_STACK_TRACE: "of another failure", Headers.DELAYED_RETRIES: "3"}
    original, failure, now = Envelope("sales", "m-1", own, b"body"), MessageTooLarge("x" * 1_000), SystemClock().now()
    full = errors.copy(original, failure, now)
    brief = errors.copy(original, failure, now, brief=True)
    assert (full.headers["more"], full.headers[Headers.FAILED_QUEUE]) == ("x", "sales")
    assert "MessageTooLarge" in full.headers[Headers.EXCEPTION_STACK_TRACE]
    assert (brief.destination, brief.message_id, brief.body) == ("error", "m-1", b"body")
    assert (brief.headers["own"], brief.headers[Headers.FAILED_QUEUE]) == ("1", "sales")
    assert len(brief.headers[Headers.EXCEPTION_MESSAGE]) == 200
    assert not {"more", Headers.EXCEPTION_STACK_TRACE, Headers.DELAYED_RETRIES} & brief.headers.keys()


def test_codes_of_errors_are_stable():
    """Logs, headers and the command line have them; a class that is renamed would take its code along."""
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PostdateError)]
    assert sorted(each.code for each in kinds) == [
        *("claim_lost", "configuration_error", "delay_conflict", "delayed_delivery_not_configured"),
        *("destination_unavailable", "duplicate_message", "error_queue_not_configured", "handling_interrupted"),
        *("invalid_headers", "invalid_message", "invalid_timestamp", "message_error", "message_not_found"),
        *("message_too_large", "migration_conflict", "not_a_database", "not_a_delayed_message", "not_supported"),
        *("pipeline_error", "postdate_error", "queue_not_found", "saga_conflict", "store_error"),
        *("store_from_newer_version", "store_full", "store_not_set_up", "store_not_writable", "store_read_only"),
        *("store_replaced", "store_troubled", "store_unavailable", "store_unreachable"),
        *("time_to_be_received_in_transaction", "timeout_concurrently_processed", "transport_error"),
        *("transport_unavailable", "transport_unreachable", "unknown_message_type", "unknown_setting"),
        "unsupported_transaction_mode",
    ]
    assert type("Own", (errors.StoreFull,), {}).code == "store_full"  # of another module
