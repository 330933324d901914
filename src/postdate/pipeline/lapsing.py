"""The time to be received as Spark SQL: the expiry of messages from a column of headers, without Python.

The rule is the same as in :mod:`postdate.core.expiry`, to the microsecond; a test compares the two. The rule in Python
raises an error if a time sent or an absolute expiry is malformed, or if the end would be outside the calendar. Here
such a message does not expire: no message is lost by mistake, and no job fails because of one row.
:func:`has_malformed_expiry` finds such messages; their receiver moves them to its error queue.

Headers are a ``map<string,string>``; from JSON text: ``from_json(text, "map<string,string>")``.
Source: docs/guides/time-to-be-received.md.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import to_microseconds
from postdate.messages import Headers, aware_utc
from postdate.pipeline.rows import CALENDAR

_MICROSECOND: Final = timedelta(microseconds=1)
_SECOND, _MINUTE, _HOUR, _DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
_BEYOND_EVERY_DIFFERENCE: Final = 10**18
"""Microseconds.

This is more than the distance of any two instants of the calendar, and sums of it still fit into 64 bits.
"""

# The length and the digits are checked, the separators are not: as in messages/times.py. Spark's calendar checks which
# days a month has.
_TIMESTAMP: Final = (
    r"(?s)\A(?!0000)[0-9]{4}.(0[1-9]|1[0-2]).(0[1-9]|[12][0-9]|3[01])"
    r".([01][0-9]|2[0-3]).[0-5][0-9].[0-5][0-9].[0-9]{6}..\z"
)
_TIME_SPAN: Final = (
    r"\A\s*(-)?(?:([0-9]{1,8})"
    r"|(?:([0-9]{1,8})\.)?([0-9]{1,2}):([0-9]{1,2})(?::([0-9]{1,2})(?:\.([0-9]{1,7}))?)?)\s*\z"
)
_PARTS: Final = "$1,0$2$3,0$4,0$5,0$6,$7"
"""Sign, days, hours, minutes, seconds, fraction.

Each is a number even if the text does not have it, because a failing cast costs Spark ten times as much as all the
rest.
"""

_LONGEST_SPAN_DAYS: Final = 10_675_198


def expiry_of(headers: Column) -> Column:
    """Return the instant at which a message expires: a timestamp.

    The result is null if the message does not expire, or if its end is malformed: see :func:`has_malformed_expiry`.

    Args:
        headers: ``map<string,string>``; null counts as empty.
    """
    return F.timestamp_micros(_expiry_fields(headers)["end"])


def is_expired(headers: Column, now: datetime | Column, allowance: timedelta = timedelta(0)) -> Column:
    """Return whether a message is expired; never null.

    The comparison is strict: a message is still valid at the very instant of its end, and always if its end is
    malformed.

    Args:
        headers: see :func:`expiry_of`.
        now: an aware instant, or a column of timestamps; if a timestamp is null, the message is not expired.
        allowance: added to the end, for clocks that differ.

    Raises:
        InvalidTimestamp: ``now`` has no time zone.
    """
    now_microseconds = F.unix_micros(now) if isinstance(now, Column) else F.lit(to_microseconds(aware_utc(now, "now")))
    # The allowance is limited to 64 bits, with the same effect.
    bounded_allowance = max(-_BEYOND_EVERY_DIFFERENCE, min(allowance // _MICROSECOND, _BEYOND_EVERY_DIFFERENCE))
    return F.coalesce(now_microseconds - _expiry_fields(headers)["end"] > _long(bounded_allowance), F.lit(False))


def has_malformed_expiry(headers: Column) -> Column:
    """Return whether the expiry of a message is malformed; never null.

    True if its absolute expiry is malformed, or the time sent from which its time to be received counts, or if the end
    would be outside the years 1 to 9999. Its receiver cannot read the expiry either, and fails the message.

    Args:
        headers: see :func:`expiry_of`.
    """
    return F.coalesce(_expiry_fields(headers)["malformed"], F.lit(False))


def relative_expiry_of(headers: Column) -> Column:
    """Return the end of the time to be received, without an absolute expiry. It is null as in :func:`expiry_of`."""
    return F.timestamp_micros(_expiry_fields(headers)["relative"])


# --- in microseconds since 1970: numbers are compared exactly, and no sum of them overflows ---------------------------


def _expiry_fields(headers: Column) -> Column:
    """Return ``relative``, ``malformed`` and ``end`` of headers; null without any expiry.

    Most messages have no expiry, and cost two lookups in their headers.
    """
    expires_at, time_to_be_received = headers[Headers.EXPIRES_AT], headers[Headers.TIME_TO_BE_RECEIVED]
    texts = F.struct(
        expires_at.alias("expires_at"),
        headers[Headers.TIME_SENT].alias("sent"),
        time_to_be_received.alias("wanted_for"),
    )
    expiry_struct = _compute_once(
        texts,
        lambda texts_of_row: _compute_once(
            _numbers(texts_of_row), lambda numbers: _evaluate_expiry(texts_of_row, numbers)
        ),
    )
    return F.when(expires_at.isNotNull() | time_to_be_received.isNotNull(), expiry_struct)


def _compute_once(value: Column, function: Callable[[Column], Column]) -> Column:
    """Return ``use(value)`` with the value computed once. Spark computes an expression again each time it is named."""
    return F.transform(F.array(value), function)[0]


def _numbers(texts: Column) -> Column:
    return F.struct(
        _instant_microseconds(texts["expires_at"]).alias("absolute"),
        _instant_microseconds(texts["sent"]).alias("sent"),
        _span_microseconds(texts["wanted_for"]).alias("span"),
    )


def _evaluate_expiry(texts: Column, numbers: Column) -> Column:
    absolute, relative_sum = numbers["absolute"], numbers["sent"] + numbers["span"]
    relative = F.when(relative_sum.between(*CALENDAR), relative_sum)
    has_span = numbers["span"].isNotNull() & texts["sent"].isNotNull()
    malformed = (texts["expires_at"].isNotNull() & absolute.isNull()) | (has_span & relative.isNull())
    return F.struct(
        relative.alias("relative"),
        malformed.alias("malformed"),
        F.when(~malformed, F.least(absolute, relative)).alias("end"),
    )


def _instant_microseconds(text: Column) -> Column:
    """Return a wire timestamp in microseconds, or null if the text is not one."""

    def digits(first: int, count: int) -> Column:
        return F.substring(text, first, count)

    day = F.concat_ws("-", digits(1, 4), digits(6, 2), digits(9, 2))
    clock = F.concat_ws(":", digits(12, 2), digits(15, 2), digits(18, 2))
    instant = F.concat(day, F.lit(" "), clock, F.lit("."), digits(21, 6), F.lit("Z")).try_cast("timestamp")
    return F.when(text.rlike(_TIMESTAMP), F.unix_micros(instant))


def _span_microseconds(text: Column) -> Column:
    """Return a time span in microseconds, or null if the text is not one."""
    return F.when(
        text.rlike(_TIME_SPAN), _compute_once(F.split(F.regexp_replace(text, _TIME_SPAN, _PARTS), ","), _span_length)
    )


def _span_length(parts: Column) -> Column:
    days, hours, minutes, seconds = (parts[number].try_cast("long") for number in range(1, 5))
    microseconds = F.rpad(parts[5], 6, "0").try_cast("long")  # Digits below a microsecond are dropped.
    in_range = (days <= _LONGEST_SPAN_DAYS) & (hours <= 23) & (minutes <= 59) & (seconds <= 59)
    length = days * _long(_DAY) + hours * _long(_HOUR) + minutes * _long(_MINUTE) + seconds * _long(_SECOND)
    sign = F.when(parts[0] == "-", _long(-1)).otherwise(_long(1))
    return F.when(in_range, sign * (length + microseconds))


def _long(number: int) -> Column:
    return F.lit(number).cast("long")
