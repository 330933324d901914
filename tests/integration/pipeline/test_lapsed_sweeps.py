"""A sweep that records as expired what its headers say nobody wants any more; a schedule that refuses it (row 75)."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import SparkSession
from tests.lapsing_cases import FIRST, cases, drawn
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import DelayedMessage, LocalTransport, SystemClock
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.backends.sqlite.store import SqliteStore
from postdate.core.dispatcher import has_lapsed
from postdate.messages import Headers, format_timestamp
from postdate.pipeline.audit import audit
from postdate.pipeline.dispatching import SweepSpec, drain_due, swept
from postdate.pipeline.schedule import Rejects, ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, opened
from postdate.pipeline.sweep import sweep
from postdate.ports import ClaimingStore
from postdate.ports.stores import Discarding, MovingStore

SECOND = timedelta(seconds=1)
_PAGE = Path(__file__).parents[3] / "docs" / "cli" / "pipeline-sweep.md"


def now() -> datetime:
    return SystemClock().now()


@pytest.fixture(params=["one file", "postgres", "claimed"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str) -> Iterator[SweepSpec]:
    """Store and queues in one file, in one schema, and in two files: there messages are claimed and sent one by one."""
    if request.param != "postgres":
        path, queues = tmp_path / "messages.db", tmp_path / ("messages.db" if request.param == "one file" else "q.db")
        store = StoreSpec(f"sqlite:///{path}", synchronous="normal")
        anyio.run(_create, LocalTransport(queues))
        with opened(store, create=True) as made:
            made.setup()
        yield SweepSpec(store, f"local:///{queues}", {"synchronous": "normal"})
        return
    schema = fresh_schema()
    store = StoreSpec(postgres_url, schema=schema)
    with opened(store, create=True) as made:
        made.setup()
    anyio.run(_create, PostgresTransport(postgres_url, schema=schema))
    yield SweepSpec(store, postgres_url, {"schema": schema})
    drop_schema(postgres_url, schema)


async def _create(queues: Any) -> None:
    await queues.create_queues(["orders", "error"])
    await queues.close()


def put(spec: SweepSpec, headers: dict[str, dict[str, str]], destination: str = "orders") -> None:
    messages = [DelayedMessage(name, now() - SECOND, destination, each, b"") for name, each in headers.items()]
    with opened(spec.store) as store:
        store.store_many(messages, now())


def wanted_for(text: str, sent: datetime) -> dict[str, str]:
    return {Headers.TIME_SENT: format_timestamp(sent), Headers.TIME_TO_BE_RECEIVED: text}


def some_of_each_kind(sent: datetime) -> dict[str, dict[str, str]]:
    """Return messages that were sent an hour ago; ``lapsed…`` are past their use."""
    past = format_timestamp(sent + timedelta(minutes=1))
    return {
        "no headers": {},
        "wanted": wanted_for("02:00:00", sent),
        "wanted for ever": wanted_for("5", sent),
        "lapsed": wanted_for("00:30:00", sent),
        "lapsed by NUL": {**wanted_for("00:30:00", sent), "other\0": "\0\\u0000"},
        "lapsed at once": wanted_for("-00:00:01", sent),
        "lapsed absolutely": {Headers.EXPIRES_AT: past},
        "lapsed by both": {**wanted_for("5", sent), Headers.EXPIRES_AT: past},
        "unreadable span": wanted_for("soon", sent),
        "no time sent": {Headers.TIME_TO_BE_RECEIVED: "00:00:01"},
        "malformed time sent": {**wanted_for("00:00:01", sent), Headers.TIME_SENT: "yesterday"},
        "out of the calendar": wanted_for("10675198", sent),
    }


def expired_and_delivered(spec: SweepSpec) -> tuple[set[str], set[str]]:
    lines = [line for batch in swept(spec, None) for line in batch.to_pylist()]
    ids = {kind: {line["message_id"] for line in lines if line["kind"] == kind} for kind in ("expired", "delivered")}
    return ids["expired"], ids["delivered"]


def test_what_has_lapsed_is_recorded_as_expired_instead_of_sent(spec: SweepSpec) -> None:
    messages = some_of_each_kind(now() - timedelta(hours=1))
    put(spec, messages)
    lapsed = {name for name in messages if name.startswith("lapsed")}
    expired, delivered = expired_and_delivered(replace(spec, discard_lapsed_after=timedelta(0)))
    assert (expired, delivered) == (lapsed, messages.keys() - lapsed)


def test_without_being_told_a_sweep_sends_everything(spec: SweepSpec) -> None:
    messages = some_of_each_kind(now() - timedelta(hours=1))
    put(spec, messages)
    assert drain_due(spec) == {"delivered": len(messages)}


def test_an_allowance_keeps_what_ended_a_short_while_ago_row_70(spec: SweepSpec) -> None:
    hour = timedelta(hours=1)
    put(spec, {"ended": wanted_for("00:30:00", now() - hour), "long ago": wanted_for("00:30:00", now() - 3 * hour)})
    expired, delivered = expired_and_delivered(replace(spec, discard_lapsed_after=hour))
    assert (expired, delivered) == ({"long ago"}, {"ended"})


def test_what_has_no_queue_here_is_judged_too(spec: SweepSpec) -> None:
    put(spec, {"lapsed": wanted_for("00:00:01", now() - timedelta(hours=1)), "wanted": {}}, destination="nowhere")
    counts = drain_due(replace(spec, discard_lapsed_after=timedelta(0)))
    assert counts == {"expired": 1, "failed": 1}


@pytest.mark.parametrize("spec", ["one file"], indirect=True)  # the tests above are about all three
def test_a_sweep_on_spark_counts_them_and_the_audit_is_clean(spark: SparkSession, spec: SweepSpec) -> None:
    messages = some_of_each_kind(now() - timedelta(hours=1))
    put(spec, messages)
    result = sweep(spark, replace(spec, discard_lapsed_after=timedelta(0)), slots=1)
    assert (result.expired, result.delivered, result.left) == (5, len(messages) - 5, 0)
    audited = audit(spark, spec.store, now())
    assert (audited.clean, audited.counts.expired, audited.counts.delivered) == (True, 5, len(messages) - 5)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_a_store_says_of_random_headers_what_the_rule_says(
    database: str, tmp_path: Path, postgres_url: str, chance: random.Random
) -> None:
    """Moved at the very instant that is asked about: to the microsecond."""
    asked = [case for case in drawn(cases(), 300, chance) if case.now > FIRST + SECOND]
    schema = fresh_schema()
    store: SqliteStore | PostgresStore
    queues: LocalTransport | PostgresTransport
    if database == "sqlite":
        store = SqliteStore(tmp_path / "m.db", synchronous="normal")
        queues = LocalTransport(tmp_path / "m.db", synchronous="normal")
    else:
        store = PostgresStore(postgres_url, schema=schema, table="t")
        queues = PostgresTransport(postgres_url, schema=schema)
    assert isinstance(store, ClaimingStore)
    assert isinstance(store, MovingStore)
    due = min(case.now for case in asked) - SECOND
    try:
        await store.setup()
        await queues.create_queues(["orders"])
        for number, case in enumerate(asked):
            message = DelayedMessage(f"m-{number}", due, "orders", case.headers, b"")
            await store.store(message, due)
            report = await store.move_due(case.now, 10, discarding=Discarding(case.allowance, has_lapsed), listing=True)
            assert report.moved is not None
            assert report.moved.expired == [has_lapsed(case.headers, case.now, case.allowance)], case
    finally:
        await store.close()
        await queues.close()
        if database == "postgres":
            drop_schema(postgres_url, schema)


def test_rows_that_lapse_before_they_are_due_are_set_aside_row_75(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, now: datetime
) -> None:
    due, sent = now + timedelta(hours=1), now
    rows = {
        "no headers": {},
        "wanted": wanted_for("01:00:00", sent),
        "lapses": wanted_for("00:59:59.999999", sent),
        "no time sent": {Headers.TIME_TO_BE_RECEIVED: "00:00:01"},
        "unreadable span": wanted_for("soon", sent),
        "malformed time sent": {**wanted_for("00:00:01", sent), Headers.TIME_SENT: "yesterday"},
        "absolute": {Headers.EXPIRES_AT: format_timestamp(sent)},
    }
    for number, (texts, suffix) in enumerate(((False, "map"), (True, "text"))):
        given = [
            (f"{name} {suffix}", due, "orders", json.dumps(each) if texts else each) for name, each in rows.items()
        ]
        kind = "string" if texts else "map<string,string>"
        frame = spark.createDataFrame(given, f"message_id string, due timestamp, destination string, headers {kind}")
        rejects = Rejects(tmp_path / f"rejected-{number}")
        result = schedule(frame.coalesce(1), ScheduleJob(store, now, rejects=rejects))
        assert (result.accepted, result.set_aside) == (len(rows) - 1, {"lapses_before_due": 1})
        (row,) = spark.read.json(str(rejects.path)).collect()
        assert row["message_id"] == f"lapses {suffix}"
        assert row["detail"] == "its time to be received, which counts from its time sent, ends before it is due"
    with opened(store) as there:
        assert there.overdue(due + SECOND) == 2 * (len(rows) - 1)


def test_the_page_shows_how_to_ask_it_of_a_store(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of the page runs as it stands, beside a file with one message of each kind."""
    (example,) = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    spec = SweepSpec(StoreSpec(f"sqlite:///{tmp_path / 'postdate.db'}", synchronous="normal"), f"local:///{tmp_path}/q")
    with opened(spec.store, create=True) as made:
        made.setup()
    put(spec, some_of_each_kind(now() - timedelta(hours=1)))
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)  # it is that of all tests
    exec(example.replace("sqlite:///postdate.db", spec.store.address), {})
    lapsing, malformed = (
        set(re.findall(r"^\| *([a-z][^|]*?) *\|", each, re.MULTILINE)) for each in _tables(capsys.readouterr().out)
    )
    assert lapsing - {"message_id"} == {name for name in some_of_each_kind(now()) if name.startswith("lapsed")}
    assert malformed - {"message_id"} == {"malformed time sent", "out of the calendar"}


def _tables(printed: str) -> list[str]:
    """Return what Spark has printed, a text for each table."""
    return [each for each in re.split(r"\n\n", printed) if each.strip()]
