"""Files of rows that a stream reads, at any age."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from postdate.pipeline.delay import read_directory
from postdate.pipeline.failures import watched

DAY_SECONDS = 86_400


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


def put(folder: Path, name: str, text: str) -> Path:
    """Put a file into a folder that a stream reads, whole."""
    hidden = folder / f".{name}"
    hidden.write_text(text, encoding="utf-8")
    return hidden.rename(folder / name)


def streamed(stream: DataFrame, place: Path) -> list[dict[str, Any]]:
    """Return all rows of a stream so far, where it ended before or from its beginning."""
    writer = stream.writeStream.option("checkpointLocation", str(place / "state")).format("json")
    watched(writer.trigger(availableNow=True).start(str(place / "out")), "the query", threading.Event())
    files = sorted((place / "out").glob("part-*.json"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_files_that_are_older_than_others_are_read_at_any_age(spark: SparkSession, rows: Path, tmp_path: Path) -> None:
    """As ``mv``, ``cp -p`` and archives leave them; Spark's own source skips what is a week older than the newest."""

    def so_far() -> list[str]:
        return sorted(row["id"] for row in streamed(read_directory(spark, str(rows), "id string"), tmp_path))

    put(rows, "new.json", '{"id": "new"}\n')
    assert so_far() == ["new"]
    now = (rows / "new.json").stat().st_mtime
    for name, age in (("ten days", 10 * DAY_SECONDS), ("of 1970", now)):
        old = put(rows, f"{name}.json", json.dumps({"id": name}))
        os.utime(old, (now - age, now - age))
    assert so_far() == ["new", "of 1970", "ten days"]
