"""When a message is past its use (specification 2.4, rows 65 to 70)."""

from datetime import UTC, datetime, timedelta

import pytest

from postdate.core.expiry import discard_reason
from postdate.errors import InvalidTimestamp
from postdate.messages import Headers, format_timestamp

NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def sent(ago: timedelta, lives: str = "00:00:10") -> dict[str, str]:
    return {Headers.TIME_SENT: format_timestamp(NOW - ago), Headers.TIME_TO_BE_RECEIVED: lives}


def test_past_its_time_it_is_discarded_row_65() -> None:
    assert discard_reason(sent(timedelta(seconds=11)), NOW) == "expired at 2026-01-31 12:00:04:000000 Z"


def test_within_its_time_it_is_processed_row_66() -> None:
    assert discard_reason(sent(timedelta(seconds=5)), NOW) is None


@pytest.mark.parametrize("missing", [Headers.TIME_SENT, Headers.TIME_TO_BE_RECEIVED])
def test_both_headers_are_needed_row_67(missing: str) -> None:
    headers = sent(timedelta(days=1))
    del headers[missing]
    assert discard_reason(headers, NOW) is None


def test_an_unreadable_time_to_be_received_counts_as_none_row_67() -> None:
    assert discard_reason(sent(timedelta(days=1), "soon"), NOW) is None


def test_at_the_very_instant_it_is_processed_and_one_microsecond_later_discarded_row_68() -> None:
    headers = sent(timedelta(seconds=10))
    assert discard_reason(headers, NOW) is None
    assert discard_reason(headers, NOW + MICROSECOND) is not None


def test_an_allowance_for_clocks_that_differ_is_added_row_70() -> None:
    headers = sent(timedelta(seconds=30))
    assert discard_reason(headers, NOW, allowance=timedelta(seconds=20)) is None
    assert discard_reason(headers, NOW + MICROSECOND, allowance=timedelta(seconds=20)) is not None


def test_of_an_absolute_expiry_and_a_time_to_be_received_the_earlier_counts() -> None:
    headers = {Headers.EXPIRES_AT: format_timestamp(NOW)}
    assert discard_reason(headers, NOW) is None
    assert discard_reason(headers, NOW + MICROSECOND) is not None
    assert discard_reason({**headers, **sent(timedelta(days=1))}, NOW) is not None
    later = {**headers, **sent(timedelta(seconds=1))}
    assert discard_reason(later, NOW) is None
    assert discard_reason(later, NOW + MICROSECOND) is not None


def test_a_malformed_time_sent_is_a_failure_of_the_message() -> None:
    with pytest.raises(InvalidTimestamp):
        discard_reason({Headers.TIME_SENT: "yesterday", Headers.TIME_TO_BE_RECEIVED: "00:00:01"}, NOW)


def test_a_sum_outside_the_calendar_is_a_failure_of_the_message() -> None:
    with pytest.raises(InvalidTimestamp, match="calendar"):
        discard_reason(sent(timedelta(0), "10675198.00:00:00"), NOW)
