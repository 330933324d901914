"""What becomes of a message whose step failed, or whose end was refused: the whole decision as a table. ADR 0026."""

import pytest

from postdate import errors
from postdate.clock import SystemClock
from postdate.core import recoverability
from postdate.messages import Envelope, Headers
from postdate.ports import Received

HANDLER = recoverability.RecoveryRules(retry_now_errors=(errors.SagaConflict,))
TAKEN = recoverability.RecoveryRules(is_off_queue=True)
STORING = recoverability.RecoveryRules(waits_in_hand=True, counts_transient=True)
IN_ONE = recoverability.RecoveryRules(waits_in_hand=True, shares_database=True, counts_transient=True)
SENDING = recoverability.RecoveryRules(retry_now_errors=(errors.DestinationUnavailable,), counts_transient=True)
ITSELF = recoverability.RecoveryRules()
NEW = Received(Envelope("sales", "m-1"), 0, object())
LAST = NEW._replace(is_dropped_if_returned=True)
DECIDED = [
    recoverability.Resolution.POLICY,
    recoverability.Resolution.ERROR_COPY,
    recoverability.Resolution.BRIEF_ERROR_COPY,
]


@pytest.mark.parametrize(
    ("rules", "error", "resolution"),
    [
        (HANDLER, errors.SagaConflict("somebody was faster"), recoverability.Resolution.RETRY_NOW),
        (HANDLER, errors.MessageTooLarge("64 KiB"), recoverability.Resolution.POLICY),
        (HANDLER, errors.QueueNotFound("nowhere"), recoverability.Resolution.POLICY),
        (HANDLER, errors.DuplicateMessage("another"), recoverability.Resolution.POLICY),
        (HANDLER, errors.StoreError("never"), recoverability.Resolution.POLICY),
        (HANDLER, errors.TransportUnavailable("nack"), recoverability.Resolution.REQUEUE),
        (HANDLER, errors.TransportUnreachable("away"), recoverability.Resolution.REQUEUE),
        (HANDLER, errors.StoreFull("full"), recoverability.Resolution.REQUEUE),
        (HANDLER, errors.ClaimLost("lost"), recoverability.Resolution.REQUEUE),
        (TAKEN, errors.SagaConflict("somebody was faster"), recoverability.Resolution.POLICY),
        (TAKEN, errors.TransportUnavailable("nack"), recoverability.Resolution.POLICY),
        (TAKEN, errors.TransportUnreachable("away"), recoverability.Resolution.POLICY),
        (STORING, errors.StoreFull("full"), recoverability.Resolution.WAIT_FOR_STORE),
        (STORING, errors.DestinationUnavailable("full"), recoverability.Resolution.WAIT_FOR_STORE),
        (STORING, errors.TransportUnreachable("away"), recoverability.Resolution.REQUEUE),
        (IN_ONE, errors.TransportUnreachable("away"), recoverability.Resolution.WAIT_FOR_STORE),
        (IN_ONE, errors.StoreTroubled("locked"), recoverability.Resolution.WAIT_FOR_STORE),
        (STORING, errors.StoreUnavailable("not now"), recoverability.Resolution.POLICY),
        (STORING, errors.StoreError("never"), recoverability.Resolution.POLICY),
        (STORING, errors.ClaimLost("lost"), recoverability.Resolution.REQUEUE),
        (SENDING, errors.DestinationUnavailable("full"), recoverability.Resolution.RETRY_NOW),
        (SENDING, errors.TransportUnreachable("away"), recoverability.Resolution.REQUEUE),
        (SENDING, errors.TransportUnavailable("nack"), recoverability.Resolution.POLICY),
        (ITSELF, errors.StoreFull("full"), recoverability.Resolution.REQUEUE),
        (ITSELF, errors.TransportUnavailable("nack"), recoverability.Resolution.REQUEUE),
    ],
)
def test_a_first_failure(
    rules: recoverability.RecoveryRules, error: errors.PostdateError, resolution: recoverability.Resolution
) -> None:
    assert recoverability.resolve_failure(None, error, NEW, 0, rules) is resolution


def test_a_message_that_its_queue_would_drop_soon_does_not_stay_in_hand() -> None:
    assert (
        recoverability.resolve_failure(None, errors.StoreFull("full"), LAST, 0, STORING)
        is recoverability.Resolution.POLICY
    )
    assert (
        recoverability.resolve_failure(None, errors.TransportUnreachable("away"), LAST, 0, SENDING)
        is recoverability.Resolution.REQUEUE
    )


def test_who_is_asked_anew_again_and_again_has_failed_in_the_end() -> None:
    tired = NEW._replace(attempts=recoverability.MOST_STEP_RETRIES - 1)
    assert (
        recoverability.resolve_failure(
            None,
            errors.SagaConflict("faster"),
            tired._replace(attempts=recoverability.MOST_STEP_RETRIES - 2),
            0,
            HANDLER,
        )
        is recoverability.Resolution.RETRY_NOW
    )
    assert (
        recoverability.resolve_failure(None, errors.SagaConflict("faster"), tired, 0, HANDLER)
        is recoverability.Resolution.POLICY
    )


@pytest.mark.parametrize("rules", [HANDLER, STORING, SENDING, ITSELF])
def test_trouble_of_one_row_counts_from_the_eleventh_time_on(rules: recoverability.RecoveryRules) -> None:
    troubled = errors.StoreTroubled("page 7")
    assert (
        recoverability.resolve_failure(None, troubled, NEW, recoverability.MOST_OWN_FAILURES, rules)
        is not recoverability.Resolution.POLICY
    )
    assert (
        recoverability.resolve_failure(None, troubled, NEW, recoverability.MOST_OWN_FAILURES + 1, rules)
        is recoverability.Resolution.POLICY
    )


def test_who_is_alone_in_trouble_waits_alone_and_once_may_be_chance() -> None:
    resolutions = [
        recoverability.resolve_failure(
            None, errors.StoreTroubled("7"), NEW, met, STORING, other_messages_succeeded=True
        )
        for met in (0, 1, 2)
    ]
    assert resolutions == [
        recoverability.Resolution.WAIT_FOR_STORE,
        recoverability.Resolution.WAIT_FOR_STORE,
        recoverability.Resolution.WAIT_ALONE,
    ]
    assert (
        recoverability.resolve_failure(None, errors.StoreTroubled("7"), NEW, 2, STORING)
        is recoverability.Resolution.WAIT_FOR_STORE
    )


@pytest.mark.parametrize(
    ("error", "resolutions"),
    [
        (
            errors.MessageTooLarge("64 KiB"),
            [
                recoverability.Resolution.ERROR_COPY,
                recoverability.Resolution.BRIEF_ERROR_COPY,
                recoverability.Resolution.STUCK,
            ],
        ),
        (
            errors.QueueNotFound("no error queue"),
            [
                recoverability.Resolution.ERROR_COPY,
                recoverability.Resolution.BRIEF_ERROR_COPY,
                recoverability.Resolution.REQUEUE,
            ],
        ),
        (errors.TransportUnavailable("nack"), [recoverability.Resolution.REQUEUE] * 3),
        (errors.TransportUnreachable("away"), [recoverability.Resolution.REQUEUE] * 3),
        (errors.ClaimLost("lost"), [recoverability.Resolution.REQUEUE] * 3),
    ],
    ids=lambda each: each.code if isinstance(each, errors.PostdateError) else "",
)
def test_what_was_decided_and_is_refused_becomes_a_copy_in_full_then_in_brief(
    error: errors.PostdateError, resolutions: list[recoverability.Resolution]
) -> None:
    assert [recoverability.resolve_failure(each, error, LAST, 0, STORING) for each in DECIDED] == resolutions


@pytest.mark.parametrize("rules", [HANDLER, STORING, SENDING, ITSELF])
def test_what_was_decided_and_is_refused_for_one_message_alone_comes_back_ten_times(
    rules: recoverability.RecoveryRules,
) -> None:
    """It came back for ever, once a second, as every policy decides the same again."""
    for error in (errors.StoreTroubled("page 7"), errors.TransportUnavailable("no such text")):
        before, then = (
            [recoverability.resolve_failure(each, error, NEW, failed, rules) for each in DECIDED]
            for failed in (recoverability.MOST_OWN_FAILURES, recoverability.MOST_OWN_FAILURES + 1)
        )
        assert before == [recoverability.Resolution.REQUEUE] * 3
        assert then == [
            recoverability.Resolution.ERROR_COPY,
            recoverability.Resolution.BRIEF_ERROR_COPY,
            recoverability.Resolution.REQUEUE,
        ]


@pytest.mark.parametrize("rules", [HANDLER, ITSELF])
def test_an_end_that_is_refused_for_one_message_alone_counts_from_the_eleventh_time_on(
    rules: recoverability.RecoveryRules,
) -> None:
    odd = errors.TransportUnavailable("no such text")
    assert (
        recoverability.resolve_failure(None, odd, NEW, recoverability.MOST_OWN_FAILURES, rules)
        is recoverability.Resolution.REQUEUE
    )
    assert (
        recoverability.resolve_failure(None, odd, NEW, recoverability.MOST_OWN_FAILURES + 1, rules)
        is recoverability.Resolution.POLICY
    )


def test_off_its_queue_a_message_gets_its_copies_whatever_is_in_the_way() -> None:
    blip = errors.TransportUnavailable("blip")
    assert [
        recoverability.resolve_failure(each, blip, NEW, 0, TAKEN)
        for each in (recoverability.Resolution.POLICY, recoverability.Resolution.ERROR_COPY)
    ] == [
        recoverability.Resolution.ERROR_COPY,
        recoverability.Resolution.BRIEF_ERROR_COPY,
    ]
    assert (
        recoverability.resolve_copy_failure(recoverability.Resolution.BRIEF_ERROR_COPY, blip)
        is recoverability.Resolution.REQUEUE
    )


def test_a_copy_in_brief_says_only_what_is_needed_and_nothing_of_an_earlier_failure() -> None:
    error_queue = recoverability.ErrorQueue(
        "error", "sales", recoverability.Host("sales"), lambda headers: {**headers, "more": "x"}
    )
    own = {"own": "1", Headers.EXCEPTION_STACK_TRACE: "of another failure", Headers.DELAYED_RETRIES: "3"}
    original, failure, now = (
        Envelope("sales", "m-1", own, b"body"),
        errors.MessageTooLarge("x" * 1_000),
        SystemClock().now(),
    )
    full = error_queue.copy(original, failure, now)
    brief = error_queue.copy(original, failure, now, brief=True)
    assert (full.headers["more"], full.headers[Headers.FAILED_QUEUE]) == ("x", "sales")
    assert "MessageTooLarge" in full.headers[Headers.EXCEPTION_STACK_TRACE]
    assert (brief.destination, brief.message_id, brief.body) == ("error", "m-1", b"body")
    assert (brief.headers["own"], brief.headers[Headers.FAILED_QUEUE]) == ("1", "sales")
    assert len(brief.headers[Headers.EXCEPTION_MESSAGE]) == 200
    assert not {"more", Headers.EXCEPTION_STACK_TRACE, Headers.DELAYED_RETRIES} & brief.headers.keys()


def test_codes_of_errors_are_stable():
    """Logs, headers and the command line have them; a class that is renamed would take its code along."""
    kinds = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.PostdateError)
    ]
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
