"""The functions of the pipeline raise errors of Postdate in one line, whatever Spark raises."""

import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from postdate.cli.pipeline.common import SparkOptions
from postdate.errors import PipelineError
from postdate.pipeline.files import read_input
from postdate.pipeline.forecast import forecast_frame
from postdate.pipeline.schedule import ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
COLUMNS = "message_id string, due string, destination string"
HEADER = "message_id,due,destination\n"


def message_of(run: Callable[[], object]) -> str:
    with pytest.raises(PipelineError) as raised:
        run()
    text = str(raised.value)
    assert "\n" not in text
    assert "Py4J" not in text
    assert "An error occurred while calling" not in text
    return text


def stream_of(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()


def test_a_stream_that_is_scheduled(spark: SparkSession, store: StoreSpec) -> None:
    rows = stream_of(spark).selectExpr("string(value) AS message_id", "timestamp AS due", "'q' AS destination")
    assert "schedule has failed" in message_of(lambda: schedule(rows, ScheduleJob(store, NOW)))


def test_a_stream_that_is_forecast(spark: SparkSession) -> None:
    rows = stream_of(spark).selectExpr("timestamp AS due", "'q' AS destination")
    assert "forecast has failed" in message_of(lambda: forecast_frame(rows, NOW))


def test_a_worker_that_is_killed_each_time(spark: SparkSession, store: StoreSpec) -> None:
    def die(batches: Any) -> Any:
        for _ in batches:
            os.kill(os.getpid(), signal.SIGKILL)
            yield _

    rows = spark.createDataFrame([("m", "2026-04-01T12:00:00Z", "q")], COLUMNS).mapInArrow(die, COLUMNS)
    text = message_of(lambda: schedule(rows, ScheduleJob(store, NOW)))
    assert "Python worker exited unexpectedly" in text


def test_a_file_system_that_is_not_there(spark: SparkSession) -> None:
    text = message_of(lambda: read_input(spark, "nosuch://bucket/in.csv"))
    assert 'No FileSystem for scheme "nosuch"' in text


def test_files_that_a_pattern_names_are_one_input(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.csv").write_text(f"{HEADER}{name},2026-04-01T12:00:00Z,q\n")
    (tmp_path / "in" / "c.json").write_text("{}\n")
    rows = read_input(spark, str(tmp_path / "in" / "*.csv"))
    assert schedule(rows, ScheduleJob(store, NOW)).accepted == 2


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_several_files_are_one_input(kind: str, spark: SparkSession, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.{kind}") for name in ("a", "b")]
    for path in paths:
        rows = spark.createDataFrame([(Path(path).stem, "2026-04-01T12:00:00Z", "q")], COLUMNS)
        rows.write.format(kind).options(header=True).save(path)
    assert sorted(row["message_id"] for row in read_input(spark, paths).collect()) == ["a", "b"]


def test_files_of_several_formats_are_refused(spark: SparkSession) -> None:
    assert "'a.csv', 'b.json' have different formats, csv and json" in message_of(
        lambda: read_input(spark, ["a.csv", "b.json"])
    )


def test_settings_of_spark_on_the_command_line() -> None:
    options = SparkOptions(conf=["spark.a=b=c", " spark.d ="], py_files="one.zip,two.zip")
    assert options.settings() == {"spark.a": "b=c", "spark.d": "", "spark.submit.pyFiles": "one.zip,two.zip"}
