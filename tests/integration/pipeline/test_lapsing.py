"""The time to be received in Spark says what the rule of the core says (rows 65-70)."""

import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from tests.lapsing_cases import ALLOWANCES, MICROSECOND, Answer, Case, answer, cases, drawn

from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import InvalidTimestamp
from postdate.messages import Headers, encode_headers, format_timestamp
from postdate.pipeline import expiry_of, has_malformed_expiry, is_expired
from postdate.pipeline.lapsing import relative_expiry_of

SENT = datetime(2026, 3, 1, 12, tzinfo=UTC)
_CASES = 1_000


def said_by_spark(spark: SparkSession, asked: list[Case]) -> tuple[list[Answer], list[Answer]]:
    """Ask of all cases in one job: of headers as maps, and of the same as JSON text."""
    rows = [
        (
            number,
            dict(case.headers),
            encode_headers(case.headers),
            to_microseconds(case.now),
            ALLOWANCES.index(case.allowance),
        )
        for number, case in enumerate(asked)
    ]
    found = spark.createDataFrame(rows, "number long, headers map<string,string>, text string, now long, allowance int")
    now = F.timestamp_micros("now")

    def told_of(headers: Column) -> Column:
        past = reduce(
            lambda chosen, number: chosen.when(
                F.col("allowance") == number, is_expired(headers, now, ALLOWANCES[number])
            ),
            range(1, len(ALLOWANCES)),
            F.when(F.col("allowance") == 0, is_expired(headers, now)),
        )
        end, malformed = F.unix_micros(expiry_of(headers)), has_malformed_expiry(headers)
        return F.struct(end.alias("end"), malformed.alias("malformed"), past.alias("lapsed"))

    as_text = F.from_json("text", "map<string,string>")
    told = found.select("number", told_of(F.col("headers")).alias("maps"), told_of(as_text).alias("texts"))
    rows_told = told.orderBy("number").collect()
    return [_answer(row["maps"]) for row in rows_told], [_answer(row["texts"]) for row in rows_told]


def _answer(row: Row) -> Answer:
    return Answer(None if row["end"] is None else from_microseconds(row["end"]), row["malformed"], row["lapsed"])


def differing(asked: list[Case], told: list[Answer]) -> list[tuple[Case, Answer, Answer]]:
    """Return what was told wrongly: what was asked, what the core says, what was told."""
    assert len(told) == len(asked)
    expected = [answer(case) for case in asked]
    return [(case, right, said) for case, right, said in zip(asked, expected, told, strict=True) if right != said]


_WITH = {Headers.TIME_SENT: format_timestamp(SENT)}


def asked_of(
    text: str, passed: timedelta, allowance: timedelta = timedelta(0), others: Mapping[str, str] | None = None
) -> Case:
    return Case({**_WITH, Headers.TIME_TO_BE_RECEIVED: text, **(others or {})}, SENT + passed, allowance)


SECONDS_30 = timedelta(seconds=30)
STORIES: list[tuple[Case, timedelta | None, bool]] = [
    # what is asked, the end after the time sent, and whether it has lapsed
    (asked_of("00:00:05", timedelta(seconds=10)), timedelta(seconds=5), True),
    (asked_of("00:00:10", timedelta(seconds=10)), timedelta(seconds=10), False),
    (asked_of("00:00:10", timedelta(seconds=10) + MICROSECOND), timedelta(seconds=10), True),
    (asked_of("5", timedelta(days=5)), timedelta(days=5), False),
    (asked_of(" 5\n", timedelta(days=5) + MICROSECOND), timedelta(days=5), True),
    (asked_of("0:05", timedelta(minutes=6)), timedelta(minutes=5), True),
    (asked_of("-00:00:01", timedelta(0)), timedelta(seconds=-1), True),
    (asked_of("1.02:03:04.5678909", timedelta(days=1)), timedelta(1, 4 + 60 * 123, 567_890), False),
    (asked_of("soon", timedelta(days=900)), None, False),
    (asked_of("24:00", timedelta(days=900)), None, False),
    (asked_of("00:00:45", timedelta(seconds=75), SECONDS_30), timedelta(seconds=45), False),
    (asked_of("00:00:45", timedelta(seconds=75) + MICROSECOND, SECONDS_30), timedelta(seconds=45), True),
    (Case(_WITH, SENT + timedelta(days=900), timedelta(0)), None, False),
    (Case({Headers.TIME_TO_BE_RECEIVED: "00:00:01"}, SENT, timedelta(0)), None, False),
    (
        asked_of("1", timedelta(hours=2), others={Headers.EXPIRES_AT: format_timestamp(SENT + timedelta(hours=1))}),
        timedelta(hours=1),
        True,
    ),
]


# Long after, what cannot be told has not lapsed, and is named.
_LONG_AFTER = timedelta(days=900)
MALFORMED = [
    asked_of("00:00:01", _LONG_AFTER, others={Headers.TIME_SENT: "yesterday"}),
    asked_of("00:00:01", _LONG_AFTER, others={Headers.TIME_SENT: ""}),
    asked_of("00:00:01", _LONG_AFTER, others={Headers.EXPIRES_AT: "2026-02-30 00:00:00:000000 Z"}),
    asked_of("10675198", _LONG_AFTER),
    asked_of("-10675198", _LONG_AFTER),
]


def test_python_and_spark_agree_on_each_rule_and_on_random_headers_rows_65_to_70(
    spark: SparkSession, chance: random.Random
) -> None:
    """One job for all that is asked."""
    told = [
        *((case, Answer(None if end is None else SENT + end, False, past)) for case, end, past in STORIES),
        *((case, Answer(None, True, False)) for case in MALFORMED),
    ]
    assert [answer(case) for case, _ in told] == [right for _, right in told]
    asked = [*(case for case, _ in told), *drawn(cases(), _CASES, chance)]
    answers = [answer(case) for case in asked]
    # What is asked about is of every kind, in numbers that say something.
    for kind in (
        sum(each.lapsed for each in answers),
        sum(each.malformed for each in answers),
        sum(each.end is not None and not each.lapsed for each in answers),
        sum(each.end is None and not each.malformed for each in answers),
        sum(
            each.end is not None and case.now - each.end == MICROSECOND
            for case, each in zip(asked, answers, strict=True)
        ),
    ):
        assert kind > _CASES / 100
    as_maps, as_texts = said_by_spark(spark, asked)
    assert differing(asked, as_maps) == []
    assert differing(asked, as_texts) == []


def test_no_headers_never_lapse(spark: SparkSession) -> None:
    one = spark.createDataFrame([(None,)], "headers map<string,string>")
    headers = F.col("headers")
    told = one.select(expiry_of(headers), is_expired(headers, SENT), has_malformed_expiry(headers)).collect()[0]
    assert tuple(told) == (None, False, False)


def test_a_column_of_instants_and_one_instant_say_the_same(spark: SparkSession) -> None:
    frame = headers_of(spark, {**_WITH, Headers.TIME_TO_BE_RECEIVED: "00:00:05"})
    for now, past in ((SENT + timedelta(seconds=5), False), (SENT + timedelta(seconds=5) + MICROSECOND, True)):
        by_value, by_column = is_expired(F.col("headers"), now), is_expired(F.col("headers"), F.lit(now))
        assert tuple(frame.select(by_value, by_column).collect()[0]) == (past, past)
    unknown = is_expired(F.col("headers"), F.lit(None).cast("timestamp"))
    assert frame.select(unknown).collect()[0][0] is False


def test_an_instant_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidTimestamp, match="no time zone"):
        is_expired(F.col("headers"), datetime(2026, 3, 1))  # noqa: DTZ001 - that is what is refused


def test_an_absolute_expiry_is_no_time_to_be_received(spark: SparkSession) -> None:
    absolute = {Headers.EXPIRES_AT: format_timestamp(SENT)}
    both = {**absolute, **_WITH, Headers.TIME_TO_BE_RECEIVED: "1:00"}
    frame = headers_of(spark, absolute, both)
    told = frame.select(F.unix_micros(relative_expiry_of(F.col("headers")))).collect()
    assert [row[0] for row in told] == [None, to_microseconds(SENT + timedelta(hours=1))]


def headers_of(spark: SparkSession, *headers: dict[str, str]) -> DataFrame:
    rows: list[Any] = [(each,) for each in headers]
    return spark.createDataFrame(rows, "headers map<string,string>").coalesce(1)
