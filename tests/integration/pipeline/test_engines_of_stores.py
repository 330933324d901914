"""The local engine and Spark: a store has the same forecast and the same audit on both."""

import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline.test_audit_state import (
    DELIVER_TWICE,
    LOSE,
    ORPHAN,
    deliver_the_rest,
    first_day,
    live,
    minutes,
    path_of,
    second_day,
    tamper,
)

from postdate.messages import DelayedMessage
from postdate.pipeline.audit import audit
from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.forecast import forecast, forecast_frame
from postdate.pipeline.forecast_result import ForecastOptions, ForecastResult
from postdate.pipeline.local.audit import audit as audit_locally
from postdate.pipeline.local.forecast import forecast as forecast_locally
from postdate.pipeline.local.forecast import forecast_table
from postdate.pipeline.rows import INSTANT
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import RecordKind

LATE_AFTER = timedelta(minutes=5)


def plain(result: Any) -> dict[str, Any]:
    """Return all of a result but what differs between any two runs."""
    return {
        name: value
        for name, value in result.to_json().items()
        if name not in {"took_seconds", "engine", "findings_to", "destinations_to"}
    }


def lines_in(folder: Path) -> list[str]:
    files = [*folder.glob("part-*")]
    if folder.name.endswith(".json"):
        rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    else:
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)


# --- audit ------------------------------------------------------------------------------------------------------------


def check_audit(spark: SparkSession, store: StoreSpec, now: datetime, folder: Path) -> Any:
    """Fail unless both engines have the same audit of a store, and return it."""
    results = list[Any]()
    for engine, run in (
        ("spark", lambda **o: audit(spark, store, now, **o)),
        ("local", lambda **o: audit_locally(store, now, **o)),
    ):
        outputs = {"findings_to": folder / f"{engine}.json", "destinations_to": folder / engine}
        results.append(run(late_after=LATE_AFTER, **outputs))
    on_spark, local = results
    assert (on_spark.engine, local.engine) == ("spark", "local")
    assert plain(local) == plain(on_spark)
    assert lines_in(folder / "local.json") == lines_in(folder / "spark.json")
    assert lines_in(folder / "local") == lines_in(folder / "spark")
    return local


def test_two_days_have_the_same_audit_on_both_engines(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    steps: list[tuple[Callable[[], None], float]] = [
        (lambda: live(store, first_day), 10),
        (lambda: live(store, deliver_the_rest), 45),
        (lambda: live(store, second_day), 120),
        (lambda: tamper(store, DELIVER_TWICE, LOSE, ORPHAN), 120),
    ]
    results = list[Any]()
    for number, (step, minute) in enumerate(steps):
        step()
        (folder := tmp_path / str(number)).mkdir()
        results.append(check_audit(spark, store, minutes(minute), folder))
    assert [result.is_clean for result in results] == [True, True, True, False]


DETAILS = {
    RecordKind.SCHEDULED: (None, "archived"),
    RecordKind.RESCHEDULED: (None, "came back from the error queue", "another due time"),
    RecordKind.RETRIED: (None, "retried as x", "no queue"),
}


def test_random_records_have_the_same_audit_on_both_engines(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, chance: random.Random
) -> None:
    async def wait_and_arrive(store: Any, transport: Any) -> None:
        pending = [message(f"m{n}", minutes(chance.randrange(200)), f"q{n % 5}") for n in range(0, 300, 3)]
        await store.store_many(pending, minutes(0))
        queued = [message(f"m{n}", minutes(chance.randrange(5)), "orders") for n in range(1, 60, 3)]
        await store.store_many(queued, minutes(0))
        await store.move_due(minutes(5), 20)

    live(store, wait_and_arrive)
    kinds = [kind for kind in RecordKind if kind is not RecordKind.PRUNED]
    rows = list[tuple[Any, ...]]()
    for _ in range(1_500):
        kind = chance.choice(kinds)
        at, due = (int(minutes(chance.choice((0, 1, 60, chance.random() * 200))).timestamp() * 1e6) for _ in range(2))
        due = due if chance.random() < 0.9 else None
        destination = chance.choice(("orders", "mails", "q1", "é", None))
        detail = chance.choice(DETAILS.get(kind, (None, "x")))
        rows.append((kind.value, f"m{chance.randrange(400)}", at, due, destination, detail))
    with closing(sqlite3.connect(path_of(store))) as connection, connection:
        insert = (
            "INSERT OR IGNORE INTO record (kind, message_id, at, due, destination, detail) VALUES (?, ?, ?, ?, ?, ?)"
        )
        connection.executemany(insert, rows)
    result = check_audit(spark, store, minutes(100), tmp_path)
    assert {finding.name for finding in result.findings} >= {"duplicated", "early", "orphaned", "overdue", "late"}


def test_an_empty_store_has_the_same_audit_on_both_engines(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, now: datetime
) -> None:
    with open_spec(store, create=True) as opened:
        opened.setup()
    assert check_audit(spark, store, now, tmp_path).is_clean


# --- forecast ---------------------------------------------------------------------------------------------------------


def message(name: str, due: datetime, destination: str = "orders") -> DelayedMessage:
    return DelayedMessage(name, due, destination, {}, b"")


def table_of(result: ForecastResult) -> list[Any]:
    rows = result.load.to_pylist() if result.engine == "local" else [row.asDict() for row in result.load.collect()]
    return sorted(
        (row["start"].astimezone(UTC).replace(tzinfo=None), row["destination"] or "", row["messages"], row["overdue"])
        for row in rows
    )


@pytest.mark.parametrize("options", [ForecastOptions(), ForecastOptions("hour", timedelta(seconds=5), 1, 1)])
def test_a_store_has_the_same_forecast_on_both_engines(
    spark: SparkSession,
    store: StoreSpec,
    tmp_path: Path,
    now: datetime,
    chance: random.Random,
    options: ForecastOptions,
) -> None:
    with open_spec(store, create=True) as opened:
        opened.setup()
        dues = [now + timedelta(seconds=chance.gauss(0, 3_000)) for _ in range(500)]
        dues += [now + timedelta(seconds=60)] * 300 + [now + timedelta(days=900)]
        opened.store_many([message(f"m{n}", due, f"q{n % 12}") for n, due in enumerate(dues)], now)
    on_spark, local = forecast(spark, store, now, options), forecast_locally(store, now, options)
    assert plain(local) == plain(on_spark)
    assert table_of(local) == table_of(on_spark)
    for load_format in ("csv", "json"):
        texts = list[list[str]]()
        for result in (local, on_spark):
            folder = tmp_path / f"{result.engine}-{load_format}"
            result.write_load(folder, load_format)
            files = sorted(folder.glob("part-*"))
            texts.append(
                [
                    line
                    for file in files
                    for line in file.read_text("utf-8").replace(", ", ",").replace(": ", ":").splitlines()
                ]
            )
        assert list(dict.fromkeys(texts[0])) == list(dict.fromkeys(texts[1]))


def test_a_table_has_the_same_forecast_on_both_engines(spark: SparkSession, now: datetime) -> None:
    micros = int(now.timestamp() * 1e6)
    dues = [None, 253_402_300_800_000_000, micros - 1, micros, micros + 86_400_000_000]
    table = pa.table({"due": pa.array(dues, pa.int64()).cast(INSTANT), "destination": ["a", "b", None, None, "é"]})
    on_spark, local = forecast_frame(spark.createDataFrame(table), now), forecast_table(table, now)
    assert plain(local) == plain(on_spark)
    assert table_of(local) == table_of(on_spark)
    empty = table.slice(0, 0)
    assert plain(forecast_table(empty, now)) == plain(forecast_frame(spark.createDataFrame(empty), now))


def test_a_large_store_is_left_to_spark(store: StoreSpec, now: datetime) -> None:
    with open_spec(store, create=True) as opened:
        opened.setup()
        opened.store_many([message(f"m{n}", now) for n in range(11)], now)
    assert forecast_locally(store, now, most_messages=11).messages == 11
    with pytest.raises(NeedsSpark, match="more than 10 rows"):
        forecast_locally(store, now, most_messages=10)
    with pytest.raises(NeedsSpark, match="more than 21 rows"):
        audit_locally(store, now, most_records=21)
    assert audit_locally(store, now, most_records=22).counts.scheduled == 11
