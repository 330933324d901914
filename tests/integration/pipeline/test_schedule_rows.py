"""What Arrow says of a whole batch of rows is what the message says of each row."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postdate.clock import to_microseconds
from postdate.messages import OF_THE_STORE, DelayedMessage, encode_headers
from postdate.pipeline.rows import INSTANT, MESSAGE_COLUMNS, messages_of, split_columns, split_rows, to_columns

DUE = to_microseconds(datetime(2026, 4, 1, tzinfo=UTC))
FIRST, LAST = (to_microseconds(each.replace(tzinfo=UTC)) for each in (datetime.min, datetime.max))  # noqa: DTZ901
LIMIT = 120

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NAMES = st.sampled_from(["", " ", "\t\u2003", "\x1c", "\0", "a\0b", "отправка", "e\u0301", "🕰", "q", None]) | TEXTS
IDS = NAMES | st.integers(248, 252).map("é".__mul__) | st.integers(198, 202).map("🕰".__mul__)
TIMES = st.sampled_from([None, FIRST - 1, FIRST, DUE - 1, DUE, DUE + 1, LAST, LAST + 1, -(2**62), 2**62])
SPECIAL = st.sampled_from(
    ['"', ":", '":', '":"', "\\", "\\u0041", "/", "\b\f\n\r\t", "\x00", "\x1f", "\x7f", "\u2028", '":null', "{", "😀"]
)
HEADERS = st.none() | st.lists(st.tuples(TEXTS | SPECIAL, TEXTS | SPECIAL | st.none()), max_size=4)
BODIES = st.none() | st.binary(max_size=8) | st.integers(LIMIT - 30, LIMIT + 1).map(bytes)
ROWS = st.lists(st.tuples(IDS, IDS, TIMES, TIMES, HEADERS, BODIES), min_size=1, max_size=8)

Row = tuple[Any, ...]


def in_json(pairs: Sequence[tuple[str, str | None]] | None) -> str | None:
    """Write pairs as Spark does: each name as often as it stands there."""
    if pairs is None:
        return None
    texts = [f"{json.dumps(key, ensure_ascii=False)}:{json.dumps(value, ensure_ascii=False)}" for key, value in pairs]
    return "{" + ",".join(texts) + "}"


def batch_of(rows: Sequence[Row], *, as_text: bool) -> pa.RecordBatch:
    ids, destinations, due, expires_at, headers, bodies = zip(*rows, strict=True)
    headers_type = pa.string() if as_text else pa.map_(pa.string(), pa.string())
    given_headers = [in_json(each) for each in headers] if as_text else headers
    return pa.record_batch(
        {
            "body": pa.array(bodies, pa.binary()),
            "headers": pa.array(given_headers, headers_type),
            "expires_at": pa.array(expires_at, pa.int64()).cast(INSTANT),
            "message_id": pa.array(ids, pa.string()),
            "due": pa.array(due, pa.int64()).cast(INSTANT),
            "destination": pa.array(destinations, pa.string()),
        }
    )


def as_set(messages: Sequence[DelayedMessage]) -> Counter[tuple[Any, ...]]:
    return Counter(
        (each.message_id, each.destination, each.due, each.expires_at, encode_headers(each.headers), each.body)
        for each in messages
    )


@settings(max_examples=200, deadline=None)
@given(ROWS)
@example([("a", "q", DUE, None, [("k", "v"), ("k", "w")], b"")])
@example([("a", "q", DUE, None, [("k", None)], b""), ("b", "q", DUE, None, [("", "v")], b"")])
@example([("a", "q", DUE, None, [(":", "v"), (":", "w")], b""), ("b", "q", DUE, None, [("k", '":"'), ("l", ":")], b"")])
@example([("a", "q", DUE, None, [('":', "v"), ("k", "v"), ("k", "w")], b""), ("b", "q", DUE, None, [(":", "v")], b"")])
@example([(each, "q", DUE, None, [("k", each), ("l", "v"), ("m", each)], b"") for each in "ab"])
@example([("a", "q", DUE, None, [("é" * 40, "")], b"x" * 30), ("b", "q", DUE, None, [("e" * 80, "")], b"x" * 33)])
def test_the_same_rows_are_messages_and_the_same_reasons_are_given(rows: list[Row]) -> None:
    expected, expected_bad = split_rows(batch_of(rows, as_text=False), LIMIT)
    good, bad = split_columns(batch_of(rows, as_text=True), LIMIT)
    assert good.schema == MESSAGE_COLUMNS
    assert as_set(messages_of(good)) == as_set(expected)
    assert good.column("headers").to_pylist() == [encode_headers(each.headers) for each in messages_of(good)]
    assert bad == expected_bad


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(TEXTS.filter(bool), TEXTS), max_size=6).map(dict))
def test_ordinary_headers_are_not_looked_at_one_by_one(headers: dict[str, str]) -> None:
    """Text that needs no ``\\u`` is taken as it is: exactly what the message would have written."""
    row = ("a", "q", DUE, None, list(headers.items()), b"")
    text = in_json(row[4])
    good, bad = split_columns(batch_of([row], as_text=True), 10_000)
    assert bad == []
    assert good.column("headers").to_pylist() == [encode_headers(headers)]
    assert "\\u" in str(text) or good.column("headers")[0].as_py() == text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"a"', "{garbage}", '{"a": "b"} ', '{"a":"b",}', '{"a":"b"}{', "{,}", "{'a':'b'}", "null"]
)
def test_text_that_is_no_object_is_no_headers(text: str) -> None:
    batch = pa.record_batch({"message_id": ["a"], "destination": ["q"], "due": [DUE], "headers": [text]})
    good, bad = split_columns(batch, LIMIT)
    expected, expected_bad = split_rows(batch, LIMIT)
    assert ([row.code for row in bad], good.num_rows) == ([row.code for row in expected_bad], len(expected))
    assert text in ("", '{"a": "b"} ') or [row.code for row in bad] == ["invalid_headers"]


def test_optional_columns_may_be_missing() -> None:
    batch = pa.record_batch({"message_id": ["a"], "destination": ["q"], "due": pa.array([DUE]).cast(INSTANT)})
    good, bad = split_columns(batch, LIMIT)
    messages, _ = split_rows(batch, LIMIT)
    assert (messages_of(good), bad) == (messages, [])
    assert to_columns(messages) == good


def test_a_batch_without_messages_has_the_columns() -> None:
    batch = pa.record_batch({"message_id": [" "], "destination": ["q"], "due": pa.array([DUE]).cast(INSTANT)})
    good, bad = split_columns(batch, LIMIT)
    assert (good.num_rows, good.schema, [row.position for row in bad]) == (0, MESSAGE_COLUMNS, [0])


def test_ids_of_the_stores_own_messages_are_refused() -> None:
    """Stored, such a row would take the place of the rules of a zone (ADR 41)."""
    ids = ["postdate~Europe/Paris~00000001", "postdate", "a"]
    batch = pa.record_batch({"message_id": ids, "destination": ["q"] * 3, "due": pa.array([DUE] * 3).cast(INSTANT)})
    good, bad = split_columns(batch, LIMIT)
    assert good.column("message_id").to_pylist() == ["postdate", "a"]
    assert [(row.position, row.code) for row in bad] == [(0, "invalid_message")]
    assert split_rows(batch, LIMIT)[1] == bad


@pytest.mark.parametrize("destination", sorted(OF_THE_STORE))
def test_destinations_of_the_stores_own_messages_are_refused(destination: str) -> None:
    """Those of a store pass: a migration moves them, too."""
    ids = ["postdate~Europe/Paris~00000001", "a", "b"]
    destinations = [destination, destination, "q"]
    batch = pa.record_batch({"message_id": ids, "destination": destinations, "due": pa.array([DUE] * 3).cast(INSTANT)})
    good, bad = split_columns(batch, LIMIT)
    assert (good.column("message_id").to_pylist(), [row.position for row in bad]) == (["b"], [0, 1])
    assert f"destination {destination!r} is a name for the store's own messages" in bad[1].detail
    good, bad = split_columns(batch, LIMIT, allows_internal_messages=True)
    assert (good.column("message_id").to_pylist(), bad) == (["b", *ids[:2]], [])
