"""Time to be received: when a message is past its use. The rule itself, pure. Source: specification 2.4."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from postdate.errors import InvalidTimestamp
from postdate.messages import DelayedMessage, Headers, expires_at_of, format_timestamp, parse_time_span, parse_timestamp


def is_expired(message: DelayedMessage, now: datetime) -> bool:
    """Return whether a message is strictly after its expiry."""
    return message.expires_at is not None and message.expires_at < now


def discard_reason(headers: Mapping[str, str], now: datetime, allowance: timedelta = timedelta(0)) -> str | None:
    """Return why a received message is discarded, or ``None``. At the very instant of expiry it is still processed.

    ``allowance`` is added to the expiry, for clocks that differ.
    """
    end = end_of_use(headers)
    if end is None or now - end <= allowance:
        return None
    return f"expired at {format_timestamp(end)}"


def end_of_use(headers: Mapping[str, str]) -> datetime | None:
    """Return when a message expires, UTC, or ``None``: it does not.

    Two rules, of which the earlier end counts: the time to be received counts from the time sent and needs both
    headers; the absolute expiry stands for itself. A time to be received that cannot be read counts as none.

    Raises:
        InvalidTimestamp: the time sent or the absolute expiry is malformed, or the sum is outside the calendar.
    """
    absolute, relative = expires_at_of(headers), _end_of_time_to_be_received(headers)
    if absolute is None or relative is None:
        return absolute or relative
    return min(absolute, relative)


def _end_of_time_to_be_received(headers: Mapping[str, str]) -> datetime | None:
    text, sent = headers.get(Headers.TIME_TO_BE_RECEIVED), headers.get(Headers.TIME_SENT)
    span = None if text is None else parse_time_span(text)
    if span is None or sent is None:
        return None
    try:
        return parse_timestamp(sent) + span
    except OverflowError as error:
        raise InvalidTimestamp(
            f"time sent {sent!r} and time to be received {text!r} end outside the calendar"
        ) from error
