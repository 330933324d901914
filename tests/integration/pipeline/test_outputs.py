"""Folders that jobs write to: on any file system of Hadoop, and refused before anything is stored."""

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from postdate.errors import PipelineError
from postdate.pipeline.audit import audit
from postdate.pipeline.forecast import forecast
from postdate.pipeline.outputs import check_new_folder, is_uri, url_of
from postdate.pipeline.schedule import Rejects, ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def authority() -> str:
    """Return the name of a file system of the test's own: Java keeps those that it has opened, by name."""
    return f"cluster{uuid.uuid4().hex}"


@pytest.fixture
def mounted(spark: SparkSession, authority: str, tmp_path: Path) -> Iterator[Path]:
    """The folder behind ``viewfs://authority/data``: a file system of Hadoop's that is not that of the machine."""
    (tmp_path / "mounted").mkdir()
    name = f"fs.viewfs.mounttable.{authority}.link./data"
    spark.conf.set(name, f"file://{tmp_path / 'mounted'}")
    yield tmp_path / "mounted"
    spark.conf.unset(name)


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    """One message, and one row that is none."""
    made: list[tuple[str, str, str]] = [("good", "2026-04-01T12:00:00Z", "q"), ("bad", "soon", "q")]
    return spark.createDataFrame(made, ["message_id", "due", "destination"])


def stored(spec: StoreSpec) -> bool:
    return Path(spec.address.removeprefix("sqlite:///")).exists()


def test_a_uri_is_told_from_a_path() -> None:
    for uri in ("s3a://bucket/x", "hdfs:///x", "file:/x", "gs://b"):
        assert is_uri(uri)
    for path in ("x", "/x", "./a:b", "C:/x", "a b/c"):
        assert not is_uri(path)


def test_a_path_is_one_of_this_machine_whatever_the_default_of_spark(tmp_path: Path) -> None:
    assert url_of(tmp_path / "a b") == f"file://{tmp_path}/a b"
    assert url_of("x") == f"file://{Path('x').absolute()}"
    with pytest.raises(PipelineError, match="give it as text"):
        url_of(Path("s3a://bucket/x"))


def test_every_table_is_written_to_a_uri(
    spark: SparkSession, store: StoreSpec, rows: DataFrame, mounted: Path, authority: str
) -> None:
    at = f"viewfs://{authority}/data/new"
    job = ScheduleJob(store, NOW, rejects=Rejects(f"{at}/rejected"), report=f"{at}/report")
    result = schedule(rows, job)
    assert (result.accepted, result.set_aside) == (1, {"malformed_time": 1})
    assert (result.rejected_to, result.reported_to) == (f"{at}/rejected", f"{at}/report")
    assert [row["message_id"] for row in spark.read.json(str(mounted / "new" / "rejected")).collect()] == ["bad"]
    report = {row["outcome"]: row["rows"] for row in spark.read.parquet(str(mounted / "new" / "report")).collect()}
    assert report == {"accepted": 1, "already_there": 0, "set_aside": 1}
    audit(spark, store, NOW, findings_to=f"{at}/findings.json")
    assert (mounted / "new" / "findings.json" / "_SUCCESS").exists()
    forecast(spark, store, NOW).write_load(f"{at}/load", "csv")
    assert spark.read.csv(str(mounted / "new" / "load"), header=True).count() == 1


def test_a_file_uri_is_a_path(spark: SparkSession, store: StoreSpec, rows: DataFrame, tmp_path: Path) -> None:
    schedule(rows, ScheduleJob(store, NOW, rejects=Rejects(f"file://{tmp_path}/a b/rejected", "parquet")))
    assert [row["message_id"] for row in spark.read.parquet(f"{tmp_path}/a b/rejected").collect()] == ["bad"]


@pytest.mark.parametrize("location", ["nosuch://bucket/x", "viewfs://AUTHORITY/not-mounted/x", "/proc/no/folder"])
@pytest.mark.parametrize("which", ["rejects", "report"])
def test_a_folder_that_cannot_be_written_is_refused_in_a_line_before_anything_is_stored(
    which: str, location: str, store: StoreSpec, rows: DataFrame, mounted: Path, authority: str
) -> None:
    location = location.replace("AUTHORITY", authority)
    given: Any = Rejects(location) if which == "rejects" else location
    with pytest.raises(PipelineError) as refused:
        schedule(rows, ScheduleJob(store, NOW, **{which: given}))
    assert str(refused.value).startswith(f"{location} cannot be written: ")
    assert "\n" not in str(refused.value)
    assert not stored(store)
    assert list(mounted.iterdir()) == []


def test_an_unknown_scheme_is_named(spark: SparkSession) -> None:
    with pytest.raises(PipelineError, match='No FileSystem for scheme "nosuch"'):
        check_new_folder(spark, "nosuch://bucket/x", "the table")


def test_a_folder_that_is_there_is_refused_before_anything_is_stored(
    store: StoreSpec, rows: DataFrame, mounted: Path, authority: str
) -> None:
    (mounted / "old").mkdir()
    with pytest.raises(PipelineError, match=f"viewfs://{authority}/data/old is there already"):
        schedule(rows, ScheduleJob(store, NOW, rejects=Rejects(f"viewfs://{authority}/data/old")))
    assert not stored(store)


def test_a_check_leaves_nothing(spark: SparkSession, mounted: Path, authority: str) -> None:
    check_new_folder(spark, f"viewfs://{authority}/data/a/b/c", "the table")
    check_new_folder(spark, mounted / "d" / "e", "the table")
    assert list(mounted.iterdir()) == []


def test_findings_are_refused_before_a_store_is_read(spark: SparkSession, tmp_path: Path) -> None:
    nowhere = StoreSpec(f"sqlite:///{tmp_path / 'no.db'}")
    with pytest.raises(PipelineError, match="nosuch://b/findings cannot be written"):
        audit(spark, nowhere, NOW, findings_to="nosuch://b/findings")
