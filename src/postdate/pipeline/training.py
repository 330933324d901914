"""What Spark does while its classes are archived: a little of everything that Postdate's jobs do.

Runs in a process of its own (:mod:`postdate.pipeline.class_archive`), never in a job.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.pipeline.session import spark_session


def train() -> None:
    """Start Spark, read, write, join, aggregate and run Python on the executors, then stop.

    Returns when the virtual machine has ended, and with it the writing of the archive.
    """
    with tempfile.TemporaryDirectory() as directory, spark_session("postdate-training", cores=2) as spark:
        _exercise(spark, Path(directory))
        # Spark has no public way to await the end of its virtual machine.
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    virtual_machine: Popen[bytes] = gateway.proc
    assert virtual_machine.stdin is not None
    virtual_machine.stdin.close()
    virtual_machine.wait(timeout=300)


def _exercise(spark: SparkSession, directory: Path) -> None:
    rows = spark.range(1000).select(
        F.col("id"),
        F.col("id").cast("string").alias("message_id"),
        F.timestamp_seconds(F.col("id")).alias("due"),
        F.create_map(F.lit("a"), F.lit("b")).alias("headers"),
        F.encode(F.to_json(F.struct("id")), "UTF-8").alias("body"),
    )
    rows.write.parquet(str(directory / "rows"))
    rows.select("message_id", F.date_format("due", "yyyy-MM-dd HH").alias("hour")).write.csv(str(directory / "csv"))
    rows.select("message_id", "due").write.json(str(directory / "json"))
    stored = spark.read.parquet(str(directory / "rows"))
    stored.join(rows, "message_id", "left_anti").groupBy(F.hour("due")).agg(F.count("*")).collect()
    stored.mapInArrow(_same, stored.schema).groupBy("headers.a").agg(F.percentile_approx("id", 0.5)).collect()
    spark.createDataFrame(pa.table({"x": [1, 2, 3]})).orderBy("x").toPandas()
    stored.unionByName(rows).dropDuplicates(["message_id"]).select(F.explode(F.array("id", "id"))).count()


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on executors: hand Arrow batches through."""
    yield from batches
