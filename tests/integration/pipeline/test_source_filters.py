"""Filters that the store takes: the rows are the same as if Spark had applied them, whatever they are."""

import operator
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.messages import DelayedMessage
from postdate.pipeline.rows import arrow_schema
from postdate.pipeline.source.reading import MOST_TEXTS, FilteringStoreReader, PushedFilters, ReadPlan
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Scan, ScanFilter

DUE = datetime(2026, 3, 1, 12, 0, 0, 500_000, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)
IDS = ["m1", "m1 ", "M1", "m2", "ü “quoted” 'it\\s'", "100%"]
QUEUES = ["orders", "orders ", "bills"]
ROWS = [
    DelayedMessage(f"{name}{n}" if n else name, DUE + (n - 1) * INSTANT, QUEUES[(n + place) % 3])
    for place, name in enumerate(IDS)
    for n in range(3)
]
Row = dict[str, Any]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    """A store with messages that differ by what a careless comparison would not see."""
    schema = fresh_schema()
    if request.param == "sqlite":
        spec = StoreSpec(f"sqlite:///{tmp_path_factory.mktemp('filters') / 'messages.db'}", synchronous="normal")
    else:
        spec = StoreSpec(request.getfixturevalue("postgres_url"), schema=schema)
    with open_spec(spec, create=True) as store:
        store.setup()
        store.store_many(ROWS, DUE)
    yield spec
    if request.param == "postgresql":
        drop_schema(spec.address, schema)


# --- what a filter means ------------------------------------------------------------------------------------------

COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


def holds(each: Any, row: Row) -> bool:
    if isinstance(each, Not):
        return not holds(each.child, row)
    value = row[each.attribute[0]]
    match each:
        case IsNull():
            return value is None
        case IsNotNull():
            return value is not None
        case In():
            return value is not None and value in each.value
        case StringStartsWith():
            return value.startswith(each.value)
        case _:
            return value is not None and COMPARISONS[type(each)](value, each.value)


texts = st.sampled_from([*IDS, "m11", "m12", "100%2", *QUEUES, "nobody", "nul\0", "\ud800", "", "a' OR 1=1 --"])
instants = st.integers(-3, 3).map(lambda n: DUE + n * INSTANT) | st.sampled_from(
    [datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC) + timedelta(days=2)]
)
text_columns = st.sampled_from([("message_id",), ("destination",)])
filters = st.one_of(
    st.builds(EqualTo, text_columns, texts),
    st.builds(EqualNullSafe, text_columns, texts),
    st.builds(In, text_columns, st.lists(texts | st.none(), min_size=1, max_size=4).map(tuple)),
    st.builds(EqualTo, st.just(("due",)), instants),
    st.builds(In, st.just(("due",)), st.lists(instants, min_size=1, max_size=3).map(tuple)),
    *(st.builds(kind, st.just(("due",)), instants) for kind in COMPARISONS if kind is not EqualNullSafe),
    st.builds(IsNotNull, st.sampled_from([("due",), ("message_id",), ("destination",), ("expires_at",)])),
    st.builds(IsNull, st.sampled_from([("due",), ("expires_at",)])),
    st.builds(StringStartsWith, text_columns, st.just("m1")),
    st.builds(EqualTo, text_columns, texts).map(Not),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(filters, max_size=3), st.sampled_from(["pending", "records"]))
def test_any_filters_give_the_rows_that_spark_would_keep(filled: StoreSpec, given_: list[Filter], what: str) -> None:
    if what == "records":
        given_ = [each for each in given_ if getattr(each, "attribute", ("",))[0] != "expires_at"]
    schema = arrow_schema(what)
    reader = FilteringStoreReader(ReadPlan(filled, Scan(what, tuple(schema.names)), schema, 2))
    left = list(reader.pushFilters(given_))
    assert all(any(each is one for one in given_) for each in left), "only what was offered may be given back"
    batches = [batch for share in reader.partitions() for batch in reader.read(share)]
    rows = [row for batch in batches for row in batch.to_pylist()]
    kept = sorted(row["message_id"] for row in rows if all(holds(each, row) for each in left))
    every: list[Row] = [
        {"message_id": m.message_id, "destination": m.destination, "due": m.due, "expires_at": None} for m in ROWS
    ]
    assert kept == sorted(row["message_id"] for row in every if all(holds(each, row) for each in given_))


def test_what_was_taken_is_told_exactly() -> None:
    pushed = PushedFilters("pending")
    late, kind = GreaterThan(("due",), DUE), EqualTo(("number_of_failures",), 1)
    left = pushed.accept(
        [IsNotNull(("due",)), late, LessThanOrEqual(("due",), DUE), In(("message_id",), ("b", "a")), kind]
    )
    assert left == [kind]
    assert pushed.scan_filter == ScanFilter(("a", "b"), None, DUE + INSTANT, DUE + INSTANT)
    assert pushed.is_impossible


@pytest.mark.parametrize(
    "each",
    [
        EqualTo(("headers", "k"), "v"),
        EqualTo(("due",), DUE.replace(tzinfo=None)),
        GreaterThan(("due",), "2026-03-01"),
        GreaterThan(("due",), datetime.max.replace(tzinfo=UTC)),
        EqualTo(("message_id",), 7),
        EqualTo(("message_id",), None),
        EqualTo(("body",), b"m1"),
        In(("message_id",), tuple(f"m{n}" for n in range(MOST_TEXTS + 1))),
        IsNotNull(("headers", "k")),
    ],
)
def test_what_the_store_cannot_fulfil_exactly_is_left_to_spark(each: Filter) -> None:
    pushed = PushedFilters("pending")
    assert pushed.accept([each]) == [each]
    assert pushed.scan_filter == ScanFilter()


def test_a_store_that_compares_loosely_narrows_and_spark_decides(store: StoreSpec) -> None:
    schema = arrow_schema("pending")
    offered: list[Filter] = [EqualTo(("message_id",), "m1"), GreaterThan(("due",), DUE)]
    reading = ReadPlan(store, Scan("pending", tuple(schema.names)), schema, 1, compares_loosely=True)
    reader = FilteringStoreReader(reading)
    assert reader.pushFilters(offered) == offered
    assert reader._pushed_filters.scan_filter.message_ids == ("m1",)


def test_queues_are_destinations() -> None:
    pushed = PushedFilters("queued")
    assert pushed.accept([EqualTo(("queue",), "orders")]) == []
    assert pushed.scan_filter.destinations == ("orders",)


# --- in Spark -----------------------------------------------------------------------------------------------------


def plan_of(frame: DataFrame) -> str:
    java: Any = frame._jdf
    return java.queryExecution().executedPlan().toString()


def test_spark_gets_the_same_rows_with_and_without_push_down(
    spark: SparkSession, filled: StoreSpec, request: pytest.FixtureRequest
) -> None:
    reads = spark.read.format("postdate").option("store", filled.address).option("partitions", 1)
    frame = reads.options(**({"schema": filled.schema} if filled.schema else {"synchronous": "normal"})).load()
    kept = frame.where(
        f"due >= timestamp'{DUE.isoformat()}' AND due < timestamp'{(DUE + INSTANT).isoformat()}' "
        "AND message_id IN ('m11', 'M11', '100%1', 'm2', 'm21') AND destination <> 'bills'"
    ).select("message_id", "due")
    with_push_down = [tuple(row) for row in kept.sort("message_id").collect()]
    # Only what the store does not fulfil is left in the plan.
    by_spark = plan_of(kept).partition("BatchScan")[0]
    assert "bills" in by_spark
    assert "m11" not in by_spark
    assert ">=" not in by_spark
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    request.addfinalizer(lambda: spark.conf.set("spark.sql.python.filterPushdown.enabled", "true"))
    without = [tuple(row) for row in kept.where("true").sort("message_id").collect()]
    assert with_push_down == without
    expected = {m.message_id for m in ROWS if m.due == DUE and m.destination != "bills"}
    assert {row[0] for row in without} == expected & {"m11", "M11", "100%1", "m2", "m21"} != set()
