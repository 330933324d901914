"""A sweep sends what has lapsed, and its receiver decides; a schedule refuses what will have lapsed (row 75)."""

import json
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline.test_sweep import made, now

from postdate import DelayedMessage
from postdate.messages import Headers, format_timestamp
from postdate.pipeline.dispatching import SweepSpec, drain_due
from postdate.pipeline.schedule import Rejects, ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, open_spec

SECOND = timedelta(seconds=1)
_PAGE = Path(__file__).parents[3] / "docs" / "cli" / "pipeline-sweep.md"


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return made(tmp_path / "postdate.db")


def put(spec: SweepSpec, headers: dict[str, dict[str, str]]) -> None:
    messages = [DelayedMessage(name, now() - SECOND, "orders", each, b"") for name, each in headers.items()]
    with open_spec(spec.store) as store:
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


def test_a_sweep_sends_what_has_lapsed_too(spec: SweepSpec) -> None:
    messages = some_of_each_kind(now() - timedelta(hours=1))
    put(spec, messages)
    assert drain_due(spec) == {"delivered": len(messages)}


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
    with open_spec(store) as there:
        assert there.count_overdue(due + SECOND) == 2 * (len(rows) - 1)


def test_the_page_shows_how_to_ask_it_of_a_store(
    spark: SparkSession, spec: SweepSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of the page runs as it stands, beside a file with one message of each kind."""
    (example,) = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
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
