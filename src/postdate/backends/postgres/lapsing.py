"""The time to be received as an SQL expression over the text of headers: when a message is past its use.

The same rule as in the core, to the microsecond; a test holds the two together. Where that one raises (a malformed
time sent or absolute expiry, an end outside the calendar) nothing is past its use here: what should live is never lost,
and no statement fails over one row. Immutable: nothing depends on the time zone or any other setting of a session.

Source: specification 2.4.
"""

from __future__ import annotations

from typing import Final

from postdate.backends.postgres.names import literal
from postdate.messages import Headers

_DAY: Final = 86_400_000_000
_CALENDAR_DAYS: Final = 3_652_059
"""Days of the years 1 to 9999."""

_LONGEST_SPAN_DAYS: Final = 10_675_198

# Lengths and digits are checked, separators are not, as in messages.py; and there \s means these six characters, while
# here it would depend on the database.
_TIMESTAMP: Final = (
    "'^(?!0000)[0-9]{4}.(0[1-9]|1[0-2]).(0[1-9]|[12][0-9]|3[01]).([01][0-9]|2[0-3]).[0-5][0-9].[0-5][0-9].[0-9]{6}..$'"
)
_WHITE: Final = r"[ \\t\\n\\r\\f\\v]*"
_TIME_SPAN: Final = (
    f"E'^{_WHITE}(-)?(?:([0-9]{{1,8}})"
    f"|(?:([0-9]{{1,8}})[.])?([0-9]{{1,2}}):([0-9]{{1,2}})(?::([0-9]{{1,2}})(?:[.]([0-9]{{1,7}}))?)?){_WHITE}$'"
)

# In jsonb there is no NUL. What replaces it is in no header name, time or time span that could be read, either.
_NUL, _IN_ITS_PLACE = r"E'\\u0000'", r"E'\\u0001'"


def lapsed(headers: str, now: str, allowance: str) -> str:
    """Return an expression that says whether a message is past its use; never null.

    Strict: at the very instant of its end a message still counts. One whose end cannot be told always counts.

    Args:
        headers: expression of the headers, a JSON object of texts.
        now: expression of a ``timestamptz``.
        allowance: expression of an ``interval`` that is added to the end, for clocks that differ.
    """
    # Few messages have an end of use, and to look for its name costs much less than to parse. A name could hide from
    # that only behind an escape; we write none in names, but others may.
    may_end = " OR ".join(
        f"strpos({headers}, {text}) > 0"
        for text in (literal(Headers.TIME_TO_BE_RECEIVED), literal(Headers.EXPIRES_AT), r"E'\\u'")
    )
    past = f"coalesce({now} - {end_of_use(headers)} > {allowance}, false)"
    return f"CASE WHEN {may_end} THEN {past} ELSE false END"


def end_of_use(headers: str) -> str:
    """Return an expression of the instant after which nobody wants a message any more: ``timestamptz``.

    Null when it does not expire, and when its end cannot be told: see :func:`malformed_end_of_use`.

    Args:
        headers: see :func:`lapsed`.
    """
    end = "least(absolute, relative)"
    # Days and the rest apart: either is a number that an interval multiplies by exactly.
    instant = (
        f"(timestamp '0001-01-01' + ({end} / {_DAY}) * interval '1 day' "
        f"+ mod({end}, {_DAY}) * interval '1 microsecond') AT TIME ZONE 'UTC'"
    )
    return _of_headers(headers, f"CASE WHEN NOT malformed THEN {instant} END")


def malformed_end_of_use(headers: str) -> str:
    """Return an expression that says whether the end of use of a message cannot be told; null without headers.

    Args:
        headers: see :func:`lapsed`.
    """
    return _of_headers(headers, "malformed")


def _of_headers(headers: str, what: str) -> str:
    """Return what is asked of the ends of use. Each step is computed once: OFFSET 0 keeps it from being copied."""
    found = ", ".join(
        f"object ->> {literal(name)} AS {column}"
        for name, column in (
            (Headers.EXPIRES_AT, "expires_at"),
            (Headers.TIME_SENT, "sent"),
            (Headers.TIME_TO_BE_RECEIVED, "wanted_for"),
        )
    )
    relative = f"CASE WHEN sent_at + span BETWEEN 0 AND {_CALENDAR_DAYS * _DAY - 1} THEN sent_at + span END"
    return f"""(
        SELECT {what} FROM (SELECT replace({headers}, {_NUL}, {_IN_ITS_PLACE})::jsonb AS object OFFSET 0) AS whole,
            LATERAL (SELECT {found} OFFSET 0) AS found,
            LATERAL (SELECT regexp_match(wanted_for, {_TIME_SPAN}) AS part OFFSET 0) AS parted,
            LATERAL (
                SELECT {_instant("expires_at")} AS absolute, {_instant("sent")} AS sent_at, {_SPAN} AS span OFFSET 0
            ) AS read,
            LATERAL (SELECT {relative} AS relative OFFSET 0) AS counted,
            LATERAL (
                SELECT (expires_at IS NOT NULL AND absolute IS NULL)
                    OR (span IS NOT NULL AND sent IS NOT NULL AND relative IS NULL) AS malformed OFFSET 0
            ) AS judged)"""


def _instant(text: str) -> str:
    """Return an expression of a wire timestamp in microseconds since the beginning of year 1, null when it is none."""

    def number(first: int, count: int) -> str:
        return f"substr({text}, {first}, {count})::bigint"

    month = f"substr({text}, 6, 2)::integer"
    # Counted from the first of the month, so that a day that does not exist is one of the next month, and no error.
    day = f"(make_date(substr({text}, 1, 4)::integer, {month}, 1) + substr({text}, 9, 2)::integer - 1)"
    since = (
        f"({day} - date '0001-01-01')::bigint * {_DAY} + {number(12, 2)} * 3600000000 + {number(15, 2)} * 60000000 "
        f"+ {number(18, 2)} * 1000000 + {number(21, 6)}"
    )
    exists = f"CASE WHEN extract(month FROM {day}) = {month} THEN {since} END"
    return f"CASE WHEN {text} ~ {_TIMESTAMP} THEN {exists} END"


def _part(number: int) -> str:
    return f"coalesce(part[{number}], '0')::bigint"


_DAYS: Final = "coalesce(part[2], part[3], '0')::bigint"
_SPAN: Final = (
    f"CASE WHEN part IS NOT NULL AND {_DAYS} <= {_LONGEST_SPAN_DAYS} AND {_part(4)} <= 23 AND {_part(5)} <= 59 "
    f"AND {_part(6)} <= 59 THEN (CASE WHEN part[1] IS NULL THEN 1 ELSE -1 END) * ({_DAYS} * {_DAY} "
    f"+ {_part(4)} * 3600000000 + {_part(5)} * 60000000 + {_part(6)} * 1000000 "
    f"+ rpad(coalesce(part[7], ''), 6, '0')::bigint) END"
)
"""Of a time span in parts: its microseconds, null when it is none; digits below a microsecond are dropped."""
