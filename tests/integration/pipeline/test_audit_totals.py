"""What an audit adds up is bounded, and its percentiles are right to a percent."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from postdate.errors import PipelineError
from postdate.pipeline.audit import AuditCounts, AuditResult, audit
from postdate.pipeline.report import render_html
from postdate.pipeline.stores import StoreSpec

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
RECORD = "kind string, message_id string, at timestamp, due timestamp, destination string, detail string"
QUEUES = 2_000


def records_of(spark: SparkSession, folder: Path, messages: int, queues: int) -> Path:
    """Write records of messages, each due in an hour of its own; the last was never scheduled."""
    due = "timestamp'2026-03-01 12:00:00' + make_interval(0, 0, 0, 0, cast(id AS int))"
    rows = spark.range(messages).selectExpr(
        "id",
        "concat('m-', lpad(id, 6, '0')) AS message_id",
        f"{due} AS due",
        f"concat('reply-queue-', lpad(id % {queues}, 6, '0')) AS destination",
        "cast(null AS string) AS detail",
    )
    columns = ("kind", "message_id", "at", "due", "destination", "detail")
    scheduled = rows.where(f"id < {messages - 1}").selectExpr("*", "'scheduled' AS kind", "due AS at")
    delivered = rows.selectExpr("*", "'delivered' AS kind", "due + make_interval(0, 0, 0, 0, 0, 0, 2) AS at")
    scheduled.select(*columns).unionByName(delivered.select(*columns)).write.parquet(str(folder))
    return folder


@pytest.fixture(scope="module")
def many(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditResult, DataFrame]:
    """An audit of as many destinations as messages, and the table of destinations that it wrote."""
    folder = tmp_path_factory.mktemp("many")
    records = records_of(spark, folder / "records", QUEUES, QUEUES)
    result = audit(spark, (), START, records=[records], destinations_to=folder / "destinations")
    return result, spark.read.parquet(str(folder / "destinations"))


def test_the_worst_destinations_are_named_and_the_others_are_added_up(many: tuple[AuditResult, DataFrame]) -> None:
    result, _ = many
    assert (len(result.by_destination), result.number_of_destinations) == (200, QUEUES)
    assert result.by_destination[0].key == f"reply-queue-{QUEUES - 1:06}"
    assert result.by_destination[0].counts == AuditCounts(delivered=1, orphaned=1, late=1)
    assert [row.key for row in result.by_destination[1:4]] == [f"reply-queue-{n:06}" for n in range(3)]
    assert result.other_destinations is not None
    assert result.other_destinations.counts == AuditCounts(scheduled=1_800, delivered=1_800, late=1_800)
    assert (len(result.by_hour), result.number_of_hours) == (1_000, QUEUES)
    assert result.other_hours is not None
    assert result.other_hours.counts == AuditCounts(scheduled=1_000, delivered=1_000, late=1_000)


def test_a_page_of_many_destinations_stays_small(many: tuple[AuditResult, DataFrame]) -> None:
    result, _ = many
    page = render_html(result)
    assert len(page) < 600_000
    assert page.count("reply-queue-") < 450
    assert "1,800 more destinations" in page


def test_the_table_has_every_destination(many: tuple[AuditResult, DataFrame]) -> None:
    result, table = many
    assert table.count() == QUEUES
    sums = table.selectExpr("sum(scheduled)", "sum(delivered)", "sum(orphaned)", "min(p50_seconds)", "max(max_seconds)")
    assert tuple(sums.collect()[0]) == (QUEUES - 1, QUEUES, 1, 2.0, 2.0)
    assert result.destinations_to is not None


def test_a_table_is_written_to_a_new_folder_only(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is there already; name a new folder for the destinations"):
        audit(spark, store, START, destinations_to=tmp_path)


def test_percentiles_are_right_to_a_percent(spark: SparkSession, tmp_path: Path) -> None:
    """Lateness from 1 ms to 10,000 s on a logarithmic scale, and one delivery that is early."""
    number = 7_001
    late = [-0.5, *(10 ** (n / 1_000) / 1_000 for n in range(number))]
    rows = [
        (kind, f"m-{n}", START + timedelta(seconds=seconds if kind == "delivered" else -1), START, "orders", None)
        for n, seconds in enumerate(late)
        for kind in ("scheduled", "delivered")
    ]
    spark.createDataFrame(rows, RECORD).write.parquet(str(tmp_path / "records"))
    lateness = audit(spark, (), START + timedelta(days=1), records=[tmp_path / "records"]).lateness
    exact = sorted(late)
    shares = {0.5: lateness.p50_seconds, 0.95: lateness.p95_seconds, 0.99: lateness.p99_seconds}
    for share, value in shares.items():
        assert value is not None
        right = exact[math.ceil(share * len(exact)) - 1]
        assert right - 1e-6 <= value <= right * 1.01, share
    assert lateness.max_seconds == 10_000.0
