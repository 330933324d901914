"""The rule of the time to be received: when a message expires. Pure. Source: docs/guides/time-to-be-received.md."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from postdate.errors import InvalidTimestamp
from postdate.messages import DelayedMessage, Headers, expires_at_of, format_timestamp, parse_time_span, parse_timestamp


def is_expired(message: DelayedMessage, now: datetime) -> bool:
    """Return whether ``now`` is strictly after the expiry of a message."""
    return message.expires_at is not None and message.expires_at < now


def discard_reason(headers: Mapping[str, str], now: datetime, allowance: timedelta = timedelta(0)) -> str | None:
    """Return why a received message is discarded; ``None`` to process it. At the instant of expiry it is processed.

    ``allowance`` is added to the expiry, for clocks that differ.
    """
    expiry = expiry_of(headers)
    if expiry is None or now - expiry <= allowance:
        return None
    return f"expired at {format_timestamp(expiry)}"


def expiry_of(headers: Mapping[str, str]) -> datetime | None:
    """Return when a message expires, UTC; ``None`` if it does not.

    There are two rules, and the earlier end counts. The time to be received counts from the time sent and needs both
    headers. The absolute expiry needs its own header only. An unreadable time to be received is ignored.

    Raises:
        InvalidTimestamp: the time sent or the absolute expiry is malformed, or the sum is outside the calendar.
    """
    absolute, relative = expires_at_of(headers), relative_expiry_of(headers)
    if absolute is None or relative is None:
        return absolute or relative
    return min(absolute, relative)


def relative_expiry_of(headers: Mapping[str, str]) -> datetime | None:
    """Return the end of the time to be received, UTC, without an absolute expiry; ``None`` if there is none.

    Raises:
        InvalidTimestamp: the time sent is malformed, or the sum is outside the calendar.
    """
    text, time_sent = headers.get(Headers.TIME_TO_BE_RECEIVED), headers.get(Headers.TIME_SENT)
    span = None if text is None else parse_time_span(text)
    if span is None or time_sent is None:
        return None
    try:
        return parse_timestamp(time_sent) + span
    except OverflowError as error:
        raise InvalidTimestamp(
            f"time sent {time_sent!r} and time to be received {text!r} end outside the calendar"
        ) from error
