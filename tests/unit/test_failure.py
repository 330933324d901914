"""What becomes of a message whose step failed, or whose end was refused: the whole decision as a table. ADR 0026."""

import pytest

from postdate import errors
from postdate.clock import SystemClock
from postdate.core.recoverability import ASKED_ANEW, BORNE, Allowed, ErrorQueue, Host, Way, after_copy, way_after
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

HANDLER = Allowed(anew=(SagaConflict,))
TAKEN = Allowed(is_taken=True)
STORING = Allowed(stays=True, counts=True)
IN_ONE = Allowed(stays=True, is_one=True, counts=True)
SENDING = Allowed(anew=(DestinationUnavailable,), counts=True)
ITSELF = Allowed()
NEW = Received(Envelope("sales", "m-1"), 0, object())
LAST = NEW._replace(is_last=True)


@pytest.mark.parametrize(
    ("allowed", "error", "way"),
    [
        (HANDLER, SagaConflict("somebody was faster"), Way.ANEW),
        (HANDLER, MessageTooLarge("64 KiB"), Way.DECIDED),
        (HANDLER, QueueNotFound("nowhere"), Way.DECIDED),
        (HANDLER, DuplicateMessage("another"), Way.DECIDED),
        (HANDLER, StoreError("never"), Way.DECIDED),
        (HANDLER, TransportUnavailable("nack"), Way.BACK),
        (HANDLER, TransportUnreachable("away"), Way.BACK),
        (HANDLER, StoreFull("full"), Way.BACK),
        (HANDLER, ClaimLost("lost"), Way.BACK),
        (TAKEN, SagaConflict("somebody was faster"), Way.DECIDED),
        (TAKEN, TransportUnavailable("nack"), Way.DECIDED),
        (TAKEN, TransportUnreachable("away"), Way.DECIDED),
        (STORING, StoreFull("full"), Way.STAYS),
        (STORING, DestinationUnavailable("full"), Way.STAYS),
        (STORING, TransportUnreachable("away"), Way.BACK),
        (IN_ONE, TransportUnreachable("away"), Way.STAYS),
        (IN_ONE, StoreTroubled("locked"), Way.STAYS),
        (STORING, StoreUnavailable("not now"), Way.DECIDED),
        (STORING, StoreError("never"), Way.DECIDED),
        (STORING, ClaimLost("lost"), Way.BACK),
        (SENDING, DestinationUnavailable("full"), Way.ANEW),
        (SENDING, TransportUnreachable("away"), Way.BACK),
        (SENDING, TransportUnavailable("nack"), Way.DECIDED),
        (ITSELF, StoreFull("full"), Way.BACK),
        (ITSELF, TransportUnavailable("nack"), Way.BACK),
    ],
)
def test_a_first_failure(allowed: Allowed, error: PostdateError, way: Way) -> None:
    assert way_after(None, error, NEW, 0, allowed) is way


def test_a_message_that_its_queue_would_drop_soon_does_not_stay_in_hand() -> None:
    assert way_after(None, StoreFull("full"), LAST, 0, STORING) is Way.DECIDED
    assert way_after(None, TransportUnreachable("away"), LAST, 0, SENDING) is Way.BACK


def test_who_is_asked_anew_again_and_again_has_failed_in_the_end() -> None:
    tired = NEW._replace(tries=ASKED_ANEW - 1)
    assert way_after(None, SagaConflict("faster"), tired._replace(tries=ASKED_ANEW - 2), 0, HANDLER) is Way.ANEW
    assert way_after(None, SagaConflict("faster"), tired, 0, HANDLER) is Way.DECIDED


@pytest.mark.parametrize("allowed", [HANDLER, STORING, SENDING, ITSELF])
def test_trouble_of_one_row_counts_from_the_eleventh_time_on(allowed: Allowed) -> None:
    troubled = StoreTroubled("page 7")
    assert way_after(None, troubled, NEW, BORNE, allowed) is not Way.DECIDED
    assert way_after(None, troubled, NEW, BORNE + 1, allowed) is Way.DECIDED


def test_who_is_alone_in_trouble_waits_alone_and_once_may_be_chance() -> None:
    ways = [way_after(None, StoreTroubled("7"), NEW, met, STORING, others_are_well=True) for met in (0, 1, 2)]
    assert ways == [Way.STAYS, Way.STAYS, Way.ALONE]
    assert way_after(None, StoreTroubled("7"), NEW, 2, STORING) is Way.STAYS


@pytest.mark.parametrize(
    ("error", "ways"),
    [
        (MessageTooLarge("64 KiB"), [Way.FULL, Way.BRIEF, Way.KEPT]),
        (QueueNotFound("no error queue"), [Way.FULL, Way.BRIEF, Way.BACK]),
        (TransportUnavailable("nack"), [Way.BACK] * 3),
        (TransportUnreachable("away"), [Way.BACK] * 3),
        (ClaimLost("lost"), [Way.BACK] * 3),
    ],
    ids=lambda each: each.code if isinstance(each, PostdateError) else "",
)
def test_what_was_decided_and_is_refused_becomes_a_copy_in_full_then_in_brief(
    error: PostdateError, ways: list[Way]
) -> None:
    gone = [Way.DECIDED, Way.FULL, Way.BRIEF]
    assert [way_after(each, error, LAST, BORNE + 1, STORING) for each in gone] == ways


def test_off_its_queue_a_message_gets_its_copies_whatever_is_in_the_way() -> None:
    blip = TransportUnavailable("blip")
    assert [way_after(each, blip, NEW, 0, TAKEN) for each in (Way.DECIDED, Way.FULL)] == [Way.FULL, Way.BRIEF]
    assert after_copy(Way.BRIEF, blip) is Way.BACK


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
