"""Headers with times to be received, readable, odd and broken; and what the rule of the core says of them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from postdate.core.expiry import discard_reason, expiry_of
from postdate.errors import InvalidTimestamp
from postdate.messages import Headers, format_time_span, format_timestamp

T = TypeVar("T")

MICROSECOND = timedelta(microseconds=1)
ALLOWANCES = (timedelta(0), timedelta(seconds=30), MICROSECOND, timedelta(seconds=-5), timedelta.max, timedelta.min)
"""Few, so that each can be an expression of its own."""


@dataclass(frozen=True)
class Case:
    """What is asked of the rule."""

    headers: Mapping[str, str]
    now: datetime
    allowance: timedelta


@dataclass(frozen=True)
class Answer:
    """What it says: no end and malformed, where the rule of the core raises."""

    end: datetime | None
    malformed: bool
    lapsed: bool


def answer(case: Case) -> Answer:
    """Return what the rule of the core says."""
    try:
        end = expiry_of(case.headers)
        return Answer(end, False, discard_reason(case.headers, case.now, case.allowance) is not None)
    except InvalidTimestamp:
        return Answer(None, True, False)


# --- texts ------------------------------------------------------------------------------------------------------------

_INSTANTS = st.datetimes(timezones=st.just(UTC)) | st.datetimes(
    datetime(2026, 1, 1),  # noqa: DTZ001 - hypothesis takes bounds without a zone
    datetime(2026, 12, 31),  # noqa: DTZ001
    timezones=st.just(UTC),
)
_SEPARATORS = st.sampled_from([" ", "-", ":", "T", "\n", "\0", "\\", '"', "ä", "\N{PILE OF POO}", "u", "0"])
_DIGITS = "0123456789"
_ODD = st.sampled_from(
    [
        *("2024-02-29 00:00:00:000000 Z", "2023-02-29 00:00:00:000000 Z", "1900-02-29 00:00:00:000000 Z"),
        *("2000-02-29 23:59:59:999999 Z", "2026-04-31 00:00:00:000000 Z", "2026-02-30 00:00:00:000000 Z"),
        *("0000-01-01 00:00:00:000000 Z", "0001-01-01 00:00:00:000000 Z", "9999-12-31 23:59:59:999999 Z"),
        *("2026-13-01 00:00:00:000000 Z", "2026-00-10 00:00:00:000000 Z", "2026-01-00 00:00:00:000000 Z"),
        *("2026-01-01 24:00:00:000000 Z", "2026-01-01 23:60:00:000000 Z", "2026-01-01 23:59:60:000000 Z"),
        *("2026-01-01 00:00:00:00000 Z", "2026-01-01 00:00:00:000000 ZZ", "2026-01-01 00:00:00:000000 Z\n"),
        *("\uff12026-01-01 00:00:00:000000 Z"[:28], "2026-01-01 00:00:00:00000\u0660 Z", "", " " * 28, "Z" * 28),
        *("2026-1-01 00:00:00:0000000 Z", "+026-01-01 00:00:00:000000 Z", "2026-01-01 00:00:00:000000\\u"),
    ]
)


@st.composite
def _with_other_separators(draw: st.DrawFn) -> str:
    text = format_timestamp(draw(_INSTANTS))
    return "".join(character if character in _DIGITS else draw(_SEPARATORS) for character in text)


@st.composite
def _damaged(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    text = draw(texts)
    place = draw(st.integers(0, len(text)))
    return text[:place] + draw(st.sampled_from(["", "0", "9", "x", "-", "\u0661", " "])) + text[place + 1 :]


TIMESTAMPS = st.one_of(
    _INSTANTS.map(format_timestamp),
    _INSTANTS.map(format_timestamp),
    _with_other_separators(),
    _ODD,
    _damaged(_INSTANTS.map(format_timestamp)),
)

_WHITE = st.text(" \t\n\r\f\v", max_size=2) | st.sampled_from(["\u00a0", "\u2003", "\x1c", "\x85"])
_SIGN = st.sampled_from(["", "", "-", "--", "+"])


def _digits(longest: int) -> st.SearchStrategy[str]:
    return st.text(_DIGITS, min_size=1, max_size=longest)


@st.composite
def _pieced_together(draw: st.DrawFn) -> str:
    days = draw(st.just("") | _digits(9).map(lambda digits: f"{digits}."))
    clock = f"{draw(st.integers(0, 30))}:{draw(st.integers(0, 70)):02d}"
    seconds = draw(st.just("") | st.integers(0, 70).map(lambda count: f":{count}"))
    fraction = draw(st.just("") | _digits(8).map(lambda digits: f".{digits}"))
    return f"{days}{clock}{seconds}{fraction}"


_BARE_DAYS = _digits(9) | st.integers(10_675_190, 10_675_205).map(str)
_SPANS = st.one_of(
    st.timedeltas(timedelta(days=-4_000_000), timedelta(days=4_000_000)).map(format_time_span),
    st.timedeltas(timedelta(days=-2), timedelta(days=2)).map(format_time_span),
    _pieced_together(),
    _BARE_DAYS,
    st.sampled_from(["10675199.02:48:05.4775807", "10675198.23:59:59.9999999", "0", "-0", "5", "00:00", "1.24:00"]),
    st.sampled_from(
        ["soon", "", " ", "PT5S", "1:2:3.", "1.", ".5", "1:2:3,5", "\uff15", "5\u0661:00", "1 00:00", "5d"]
    ),
)
TIME_SPANS = st.tuples(_WHITE, _SIGN, _SPANS, _WHITE).map("".join) | _SPANS | _damaged(_SPANS)

_OTHERS = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
    | st.sampled_from([f"{Headers.TIME_SENT}\0", Headers.TIME_TO_BE_RECEIVED.lower(), f'"{Headers.EXPIRES_AT}":"']),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
    | st.sampled_from(["\\u0000", "\\\0", f'","{Headers.TIME_TO_BE_RECEIVED}":"00:00:01', "\\", '"']),
    max_size=2,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Headers, and an instant that is often close to their end."""
    headers = dict(draw(_OTHERS))
    for name, texts, often in (
        (Headers.TIME_SENT, TIMESTAMPS, 9),
        (Headers.TIME_TO_BE_RECEIVED, TIME_SPANS, 9),
        (Headers.EXPIRES_AT, TIMESTAMPS, 2),
    ):
        if draw(st.integers(0, 9)) < often:
            headers[name] = draw(texts)
    allowance = draw(st.sampled_from(ALLOWANCES))
    now = draw(_INSTANTS)
    end = answer(Case(headers, now, allowance)).end
    if end is not None and draw(st.integers(0, 3)):
        around = draw(st.sampled_from([-MICROSECOND, timedelta(0), MICROSECOND]))
        now = _moved(end, (allowance if abs(allowance) < timedelta(days=1) else timedelta(0)) + around)
    return Case(headers, now, allowance)


def _moved(instant: datetime, span: timedelta) -> datetime:
    try:
        return instant + span
    except OverflowError:
        return instant


def drawn(strategy: st.SearchStrategy[T], count: int, chance: random.Random) -> Sequence[T]:
    """Return many examples at once: for what is too costly to be asked one by one."""
    found: list[T] = []

    @seed(chance.getrandbits(64))
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        deadline=None,
    )
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect_all: Callable[[], None] = collect
    collect_all()
    return found
