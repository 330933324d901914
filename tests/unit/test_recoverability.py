"""What is decided after a failure (specification 5, rows 37, 38, 39, 109, 112)."""

from datetime import UTC, datetime, timedelta

import pytest

from postdate.core import recoverability
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    QueueNotFound,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.messages import Headers, format_timestamp

NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
POLICY = recoverability.Recoverability()
HOST = recoverability.Host("sales", "machine", "f" * 32, "machine 1")
OLD, TOO_OLD = NOW - timedelta(hours=24), NOW - timedelta(hours=24, microseconds=1)


def live(policy: recoverability.Recoverability) -> tuple[int, list[timedelta], str]:
    """Let a message fail until it is given up: attempts, delays, queue."""
    headers, attempts, delays = dict[str, str](), 0, list[timedelta]()
    while True:
        failures, decision = 0, recoverability.ImmediateRetry()
        while isinstance(decision, recoverability.ImmediateRetry):
            attempts, failures = attempts + 1, failures + 1
            decision = recoverability.decide_handling_failure(ValueError("x"), failures, headers, policy, NOW)
        match decision:
            case recoverability.DelayedRetry(delay):
                delays.append(delay)
                headers = recoverability.delayed_retry_headers(headers, NOW)
            case recoverability.MoveToError(queue):
                return attempts, delays, queue or "(the endpoint's)"
            case recoverability.Discard():
                raise AssertionError("nothing is discarded by default")


def test_by_default_a_message_is_tried_24_times_row_109() -> None:
    assert live(POLICY) == (24, [timedelta(seconds=each) for each in (10, 20, 30)], "error")


def test_without_retries_it_is_tried_once() -> None:
    assert live(recoverability.Recoverability("broken", immediate_retries=0, delayed_retries=0)) == (1, [], "broken")


def test_delayed_retries_end_after_24_hours_row_109() -> None:
    headers = {Headers.DELAYED_RETRIES: "1", Headers.DELAYED_RETRIES_TIMESTAMP: format_timestamp(OLD)}
    assert recoverability.decide_handling_failure(ValueError(), 6, headers, POLICY, NOW) == recoverability.DelayedRetry(
        timedelta(seconds=20)
    )
    headers[Headers.DELAYED_RETRIES_TIMESTAMP] = format_timestamp(TOO_OLD)
    assert recoverability.decide_handling_failure(ValueError(), 6, headers, POLICY, NOW) == recoverability.MoveToError(
        "error"
    )


def test_a_message_returned_from_the_error_queue_days_later_has_its_delayed_retries_again() -> None:
    """An error copy has no count of retries, and keeps the timestamp."""
    headers = {Headers.DELAYED_RETRIES_TIMESTAMP: format_timestamp(TOO_OLD)}
    assert recoverability.decide_handling_failure(ValueError(), 6, headers, POLICY, NOW) == recoverability.DelayedRetry(
        timedelta(seconds=10)
    )


@pytest.mark.parametrize("text", ["", "yesterday"])
def test_an_unreadable_timestamp_of_the_last_retry_is_ignored(text: str) -> None:
    headers = {Headers.DELAYED_RETRIES: "1", Headers.DELAYED_RETRIES_TIMESTAMP: text}
    assert recoverability.decide_handling_failure(ValueError(), 6, headers, POLICY, NOW) == recoverability.DelayedRetry(
        timedelta(seconds=20)
    )


@pytest.mark.parametrize("text", ["-1", "many", "", "²", "1.5", "1" * 5_000])
def test_an_unreadable_count_of_retries_is_none(text: str) -> None:
    headers = {Headers.DELAYED_RETRIES: text}
    assert recoverability.decide_handling_failure(ValueError(), 6, headers, POLICY, NOW) == recoverability.DelayedRetry(
        timedelta(seconds=10)
    )


def test_what_no_retry_mends_goes_to_the_error_queue_at_once() -> None:
    assert recoverability.decide_handling_failure(
        InvalidMessage("x"), 1, {}, POLICY, NOW
    ) == recoverability.MoveToError("error")
    policy = recoverability.Recoverability(unrecoverable=(LookupError,))
    assert recoverability.decide_handling_failure(
        KeyError("subclass"), 1, {}, policy, NOW
    ) == recoverability.MoveToError("error")
    assert (
        recoverability.decide_handling_failure(InvalidMessage("x"), 1, {}, policy, NOW)
        == recoverability.ImmediateRetry()
    )


def test_incoming_headers_are_left_alone_and_the_next_ones_count() -> None:
    incoming = {"own": "1", Headers.DELAYED_RETRIES: "2"}
    assert recoverability.delayed_retry_headers(incoming, NOW) == {
        "own": "1",
        Headers.DELAYED_RETRIES: "3",
        Headers.DELAYED_RETRIES_TIMESTAMP: "2026-01-31 12:00:05:000000 Z",
    }
    assert incoming == {"own": "1", Headers.DELAYED_RETRIES: "2"}


@pytest.mark.parametrize(
    "wrong", [{"immediate_retries": -1}, {"delayed_retries": -1}, {"time_increase": timedelta(seconds=-1)}]
)
def test_negative_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigurationError, match="negative"):
        recoverability.Recoverability(**wrong)


# --- dispatch ---------------------------------------------------------------------------------------------------------


def test_dispatch_is_retried_as_often_as_configured_row_37() -> None:
    decisions = [
        recoverability.decide_dispatch_failure(TransportUnavailable("x"), failures, 2, "error") for failures in range(3)
    ]
    delays = [recoverability.DelayedRetry(timedelta(seconds=1)), recoverability.DelayedRetry(timedelta(seconds=2))]
    assert decisions == [*delays, recoverability.MoveToError("error")]


def test_a_missing_queue_and_a_bad_message_are_not_retried_row_38() -> None:
    for error in (QueueNotFound("x"), InvalidMessage("x")):
        assert recoverability.decide_dispatch_failure(error, 0, 10, "error") == recoverability.MoveToError("error")


def test_delays_double_up_to_a_minute() -> None:
    assert [recoverability.retry_delay(failures).total_seconds() for failures in (0, 1, 2, 5, 6, 10_000)] == [
        1,
        2,
        4,
        32,
        60,
        60,
    ]


def test_after_an_outage_messages_do_not_sleep_for_long():
    gone = TransportUnreachable("gone")
    assert [recoverability.retry_delay(failures, gone).total_seconds() for failures in (0, 1, 3, 4, 10_000)] == [
        1,
        2,
        8,
        10,
        10,
    ]


# --- error copies -----------------------------------------------------------------------------------------------------


def fail() -> Exception:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    return error


def test_an_error_copy_has_exactly_these_headers_row_112() -> None:
    headers = {"own": "1", Headers.DELAYED_RETRIES: "3", Headers.IMMEDIATE_RETRIES: "5"}
    copy = recoverability.error_headers(headers, fail(), "sales", NOW, HOST)
    trace = copy.pop(Headers.EXCEPTION_STACK_TRACE)
    assert "KeyError: 'inner'" in trace
    assert "ValueError: outer" in trace
    assert copy == {
        "own": "1",
        "NServiceBus.FailedQ": "sales",
        "NServiceBus.TimeOfFailure": "2026-01-31 12:00:05:000000 Z",
        "NServiceBus.ProcessingMachine": "machine",
        "NServiceBus.ProcessingEndpoint": "sales",
        "$.diagnostics.hostid": "f" * 32,
        "$.diagnostics.hostdisplayname": "machine 1",
        "NServiceBus.ExceptionInfo.ExceptionType": "builtins.ValueError",
        "NServiceBus.ExceptionInfo.InnerExceptionType": "builtins.KeyError",
        "NServiceBus.ExceptionInfo.Message": "outer",
        "NServiceBus.ExceptionInfo.Source": "builtins",
    }


def test_an_error_copy_has_the_code_of_our_own_errors_and_a_message_cut_to_16384_characters_row_112() -> None:
    copy = recoverability.error_headers({}, QueueNotFound("x" * 20_000), "sales", NOW, HOST)
    assert copy[Headers.ERROR_CODE] == "queue_not_found"
    assert len(copy[Headers.EXCEPTION_MESSAGE]) == 16_384


def test_a_long_text_does_not_keep_the_frames_out_of_an_error_copy_row_112() -> None:
    def refuse() -> None:
        raise ValueError("x" * 20_000 + " end")

    with pytest.raises(ValueError, match=" end") as raised:
        refuse()
    trace = recoverability.error_headers({}, raised.value, "sales", NOW, HOST)[Headers.EXCEPTION_STACK_TRACE]
    assert len(trace) == 16_384
    assert "in refuse" in trace
    assert "left out" in trace
    assert trace.endswith(" end\n")


def test_an_exception_with_text_that_no_header_can_carry_still_reaches_the_error_queue() -> None:
    copy = recoverability.error_headers({}, ValueError("lone \ud800 surrogate"), "sales", NOW, HOST)
    assert copy[Headers.EXCEPTION_MESSAGE] == "lone \\ud800 surrogate"


def test_what_is_told_of_a_failure_can_be_stored_anywhere() -> None:
    assert (
        recoverability.text_of(ValueError("bad \0 byte, lone \ud800 surrogate"))
        == "bad \\x00 byte, lone \\ud800 surrogate"
    )
    assert recoverability.reason_of(QueueNotFound("no \0")) == "queue_not_found: no \\x00"
    copy = recoverability.error_headers({}, ValueError("bad \0 byte"), "sales", NOW, HOST)
    assert not [value for value in copy.values() if "\0" in value]
