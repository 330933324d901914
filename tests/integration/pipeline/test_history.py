"""The records of a store as a stream into a lake: each once, over restarts and kills, and nothing is pruned early."""

import json
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline.history_store import (
    DAY,
    NOW,
    SECOND,
    add,
    batches,
    deliver,
    lake_records,
    position,
    prune_all,
    stored_records,
)
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import Eventually

from postdate.errors import NotSupported, PipelineError
from postdate.pipeline.audit import audit
from postdate.pipeline.history import HistoryResult, job, read_history, write_history
from postdate.pipeline.history.job import forget_position, read_positions
from postdate.pipeline.history.lake import Lake
from postdate.pipeline.stores import StoreSpec, open_spec


@pytest.fixture(params=["sqlite", "postgresql"])
def spec(request: pytest.FixtureRequest, store: StoreSpec) -> Iterator[StoreSpec]:
    """A store that is set up."""
    spec = store
    if request.param == "postgresql":
        spec = StoreSpec(request.getfixturevalue("postgres_url"), schema=fresh_schema())
    with open_spec(spec, create=True) as opened:
        opened.setup()
    yield spec
    if spec.schema is not None:
        drop_schema(spec.address, spec.schema)


def _also_on_postgresql(*proven_by: str) -> pytest.MarkDecorator:
    soak = pytest.mark.soak(
        "whole streams; what they ask of PostgreSQL is proven by others",
        part="spark",
        proven_by=tuple(f"tests/integration/pipeline/test_history.py::{test}" for test in proven_by),
    )
    return pytest.mark.parametrize("spec", ["sqlite", pytest.param("postgresql", marks=soak)], indirect=True)


_ONCE = "test_every_record_is_in_the_lake_once_and_again_only_what_is_new[postgresql]"
_POSITION = "test_the_position_follows_the_commit_and_never_the_files[sqlite]"


# --- once, and again --------------------------------------------------------------------------------------------------


def test_every_record_is_in_the_lake_once_and_again_only_what_is_new(
    spark: SparkSession, spec: StoreSpec, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    add(spec, *(f"m{n}" for n in range(20)), "it's \\ 50 %", due=NOW)
    first = write_history(spark, spec, lake, rows_per_batch=8)
    assert first.records == 21
    assert lake_records(lake) == stored_records(spec)
    written = batches(lake)
    assert len(written) >= 3
    assert position(spec) == first.next > max(lake_records(lake))
    again = write_history(spark, spec, lake)
    assert (again.records, again.next, batches(lake)) == (0, first.next, written)
    deliver(spec, NOW + DAY)
    add(spec, "late", now=NOW + DAY)
    more = write_history(spark, spec, lake)
    assert more.records == 22
    assert lake_records(lake) == stored_records(spec)
    assert position(spec) == more.next
    rows = read_history(spark, lake)
    assert {row["endpoint"] for row in rows.collect()} == {spec.endpoint}
    assert rows.where("day = '2026-03-02'").count() == 22
    assert len({each.name for each in lake.glob("batch=*/day=*")}) == 2


@_also_on_postgresql(
    _ONCE,
    "test_a_stream_goes_on_with_new_records_until_it_is_stopped[sqlite]",
)
def test_a_stream_goes_on_with_new_records_until_it_is_stopped(
    spark: SparkSession, spec: StoreSpec, tmp_path: Path, eventually: Eventually
) -> None:
    lake, stop, results = tmp_path / "lake", threading.Event(), list[HistoryResult]()
    add(spec, "a", "b")

    def follow() -> None:
        results.append(write_history(spark, spec, lake, continuous=True, trigger=SECOND / 2, stop=stop))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        eventually(lambda: read_positions(spec), "it has begun")
        with pytest.raises(PipelineError, match="another process is at work on the lake"):
            write_history(spark, spec, lake)
        for name in ("c", "d"):
            eventually(lambda: read_positions(spec) and position(spec) > max(stored_records(spec)), "it has all")
            add(spec, name)
        eventually(lambda: position(spec) > max(stored_records(spec)), "it has all")
    finally:
        stop.set()
        thread.join()
    assert lake_records(lake) == stored_records(spec)
    assert [each.records for each in results] == [4]


# --- restarts, and what was lost --------------------------------------------------------------------------------------


def test_a_repeated_micro_batch_replaces_itself(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    """As after a kill between the files and the commit: the folder is there, and has more than it should."""
    lake = tmp_path / "lake"
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, "a", "b", "c")
    write_history(spark, store, lake)
    (commit,) = (lake / "_checkpoint" / "commits").glob("[0-9]*")
    number = commit.name
    for each in (lake / "_checkpoint" / "commits").iterdir():
        each.unlink()
    (day,) = lake.glob(f"batch={number}/day=*")
    (file,) = day.glob("*.parquet")
    shutil.copy(file, day / "part-killed.parquet")
    (lake / f"batch={number}" / "day=1999-01-01").mkdir()
    shutil.copy(file, lake / f"batch={number}" / "day=1999-01-01" / "part-killed.parquet")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        write_history(spark, store, lake)
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert batches(lake) == [f"batch={number}"]
    assert lake_records(lake) == stored_records(store)


@_also_on_postgresql(_ONCE, _POSITION)
def test_the_position_follows_the_commit_and_never_the_files(
    spark: SparkSession, spec: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second micro-batch writes its files and dies: retention waits for it, and the next run has it."""
    lake, write = tmp_path / "lake", job._write_batch
    add(spec, *(f"m{n}" for n in range(9)), due=NOW)
    deliver(spec)
    add(spec, "waits")
    before = stored_records(spec)

    def write_and_die(url: str, rows: Any, batch: int) -> None:
        write(url, rows, batch)
        if batch > 0:
            raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(job, "_write_batch", write_and_die)
        with pytest.raises(PipelineError, match="the history has failed"):
            write_history(spark, spec, lake, rows_per_batch=5)
    assert len(batches(lake)) == 2
    numbers, reached = sorted(before), position(spec)
    assert numbers[0] < reached <= numbers[0] + 5
    prune_all(spec, NOW + 2 * DAY)
    assert {number for number in before if number >= reached} <= stored_records(spec).keys()
    write_history(spark, spec, lake)
    assert lake_records(lake) == before


def test_a_lake_without_its_checkpoint_is_left_alone(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    """With a new checkpoint, micro-batches would be numbered from 0 again, and replace those of the lake."""
    lake, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, "a", "b")
    write_history(spark, store, lake, checkpoint=checkpoint)
    before = lake_records(lake)
    add(store, "c")
    with pytest.raises(PipelineError, match="was written with another one"):
        write_history(spark, store, lake)
    checkpoint.rename(tmp_path / "aside")
    with pytest.raises(PipelineError, match="its micro-batches would replace those that are there"):
        write_history(spark, store, lake, checkpoint=checkpoint)
    other = tmp_path / "other"
    write_history(spark, store, other)
    with pytest.raises(PipelineError, match="is that of another job: lake"):
        write_history(spark, store, lake, checkpoint=other / "_checkpoint")
    with pytest.raises(PipelineError, match="is that of another job: lake"):
        write_history(spark, store, tmp_path / "new", checkpoint=other / "_checkpoint")
    assert lake_records(lake) == before
    shutil.rmtree(checkpoint, ignore_errors=True)
    (tmp_path / "aside").rename(checkpoint)
    write_history(spark, store, lake, checkpoint=checkpoint)
    assert lake_records(lake) == lake_records(other) == stored_records(store)
    assert len(read_positions(store)) == 2


def test_a_folder_of_something_else_and_another_store_are_refused(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(PipelineError, match="is no lake of `postdate pipeline history`; name a new folder"):
        write_history(spark, store, tmp_path / "full")
    with pytest.raises(PipelineError, match="is no lake"):
        read_history(spark, tmp_path / "full")
    write_history(spark, store, tmp_path / "lake")
    other = StoreSpec(f"sqlite:///{tmp_path / 'other.db'}", synchronous="normal")
    with open_spec(other, create=True) as opened:
        opened.setup()
    with pytest.raises(PipelineError, match=r"has the records of another store \(SQLite .*messages.db\)"):
        write_history(spark, other, tmp_path / "lake")
    with closing(sqlite3.connect(tmp_path / "messages.db")) as connection, connection:
        connection.execute("DELETE FROM record")
    with pytest.raises(PipelineError, match="and the store has none so high"):
        write_history(spark, store, tmp_path / "lake")


def test_a_run_that_was_killed_before_the_mark_leaves_no_lake_without_a_lock(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    with open_spec(store, create=True) as opened:
        opened.setup()
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "_lock").touch()
    lake = Lake.at(tmp_path / "lake", None)
    with lake.lock(spark), pytest.raises(PipelineError, match="another process is at work on the lake"):
        write_history(spark, store, tmp_path / "lake")


def test_a_lake_that_was_put_back_from_a_backup_says_what_may_be_missing(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, "a")
    write_history(spark, store, tmp_path / "lake")
    shutil.copytree(tmp_path / "lake", tmp_path / "backup")
    add(store, "b")
    write_history(spark, store, tmp_path / "lake")
    assert "put back" not in caplog.text
    shutil.rmtree(tmp_path / "lake")
    (tmp_path / "backup").rename(tmp_path / "lake")
    write_history(spark, store, tmp_path / "lake")
    assert "the lake was put back from a backup: records that retention has removed since are missing" in caplog.text


def test_a_restored_store_is_refused_and_its_records_are_kept(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    """A position of the time before would let retention remove records that are in no lake."""
    file, backup = tmp_path / "messages.db", tmp_path / "backup.db"
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, "a")
    shutil.copy(file, backup)
    add(store, "b", "c")
    write_history(spark, store, tmp_path / "lake")
    for name in ("messages.db-wal", "messages.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    shutil.copy(backup, file)
    add(store, "d", "e", "f")
    with pytest.raises(PipelineError, match="number 3 is another record now: the store was made anew, restored"):
        write_history(spark, store, tmp_path / "lake")
    assert read_positions(store) == ()


def test_a_store_that_cannot_be_followed_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="keep the store in PostgreSQL or SQLite"):
        write_history(spark, StoreSpec("mariadb://me@127.0.0.1:1/db"), tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


# --- retention --------------------------------------------------------------------------------------------------------


@_also_on_postgresql(
    _ONCE,
    "test_the_position_follows_the_commit_and_never_the_files[sqlite]",
)
def test_retention_removes_only_what_is_in_the_lake_and_all_of_it_when_the_lake_is_forgotten(
    spark: SparkSession, spec: StoreSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = tmp_path / "lake"
    add(spec, "a", "b", due=NOW)
    deliver(spec)
    result = write_history(spark, spec, lake)
    add(spec, "c", due=NOW)
    deliver(spec)
    add(spec, "waits")
    records = stored_records(spec)
    assert prune_all(spec, NOW + 2 * DAY) == 4
    assert stored_records(spec) == {number: row for number, row in records.items() if number >= result.next}
    write_history(spark, spec, lake)
    assert lake_records(lake) == records
    assert prune_all(spec, NOW + 2 * DAY) == 2
    add(spec, "d", due=NOW)
    deliver(spec)
    add(spec, "newest")
    assert prune_all(spec, NOW + 2 * DAY) == 0
    with pytest.raises(PipelineError, match=r"has no position 'nothing'; it has .*lake#"):
        forget_position(spec, "nothing")
    forget_position(spec, result.position)
    assert read_positions(spec) == ()
    assert prune_all(spec, NOW + 2 * DAY) == 2
    with caplog.at_level(logging.WARNING, "postdate.pipeline"):
        write_history(spark, spec, lake)
    assert "are missing in the lake" in caplog.text
    assert [row[2] for row in lake_records(lake).values()].count("d") == 0
    assert len(read_positions(spec)) == 1


# --- audits -----------------------------------------------------------------------------------------------------------


@_also_on_postgresql(
    _ONCE,
    "test_an_audit_reads_store_and_lake_and_counts_each_record_once[sqlite]",
)
def test_an_audit_reads_store_and_lake_and_counts_each_record_once(
    spark: SparkSession, spec: StoreSpec, tmp_path: Path
) -> None:
    """Some records are in the lake alone, some in both, some in the store alone; one message was delivered twice."""
    lake = tmp_path / "lake"
    add(spec, "old", due=NOW)
    deliver(spec)
    write_history(spark, spec, lake)
    add(spec, "both", "both, waits", due=NOW + DAY, now=NOW + DAY)
    write_history(spark, spec, lake)
    assert prune_all(spec, NOW + SECOND) == 2
    deliver(spec, NOW + DAY)
    write_history(spark, spec, lake)
    add(spec, "new", due=NOW + DAY, now=NOW + DAY)
    deliver(spec, NOW + DAY)
    add(spec, "waits", due=NOW + 9 * DAY, now=NOW + DAY)
    alone = audit(spark, spec, NOW + 2 * DAY)
    together = audit(spark, spec, NOW + 2 * DAY, records=[lake])
    assert (alone.counts.scheduled, alone.counts.delivered) == (4, 3)
    assert (together.counts.scheduled, together.counts.delivered, together.counts.pending) == (5, 4, 1)
    assert together.is_clean
    assert [row.key for row in together.by_endpoint] == [row.key for row in alone.by_endpoint]
    of_lake = audit(spark, [], NOW + 2 * DAY, records=[lake])
    assert (of_lake.counts.scheduled, of_lake.counts.delivered) == (3, 3)


def test_a_delivery_that_happened_twice_in_a_microsecond_counts_twice_in_store_and_lake_together(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    """The numbers tell a repeated delivery from a copy; the same instant does not."""
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, "a", due=NOW)
    deliver(store)
    write_history(spark, store, tmp_path / "lake")
    add(store, "newest", due=NOW + 9 * DAY)
    with closing(sqlite3.connect(tmp_path / "messages.db")) as connection, connection:
        connection.execute(
            "INSERT INTO record (kind, message_id, at, due, destination, detail) "
            "SELECT kind, message_id, at, due, destination, detail FROM record WHERE kind = 2"
        )
        connection.execute("DELETE FROM record WHERE kind = 2 AND seq < 3")
    assert audit(spark, store, NOW + DAY).counts.duplicated == 0
    together = audit(spark, store, NOW + DAY, records=[tmp_path / "lake"])
    assert together.counts.duplicated == 1


def test_an_archive_of_an_earlier_version_is_still_read(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    """Its folder has a mark and days, and the store the marked *scheduled* record."""
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, "old", due=NOW)
    deliver(store)
    add(store, "newest")
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "_archive.json").write_text(json.dumps({"format": 1, "endpoint": "postdate", "store": store.address}))
    assert audit(spark, store, NOW + DAY, records=[archive]).counts.delivered == 1
    write_history(spark, store, tmp_path / "lake")
    rows = read_history(spark, tmp_path / "lake").where("message_id = 'old'").drop("batch")
    rows.write.mode("append").partitionBy("day").parquet(str(archive))
    with closing(sqlite3.connect(tmp_path / "messages.db")) as connection, connection:
        connection.execute("UPDATE record SET detail = 'archived' WHERE message_id = 'old' AND kind = 1")
        connection.execute("DELETE FROM record WHERE message_id = 'old' AND kind > 1")
    assert audit(spark, store, NOW + DAY).counts.archived == 1
    both = audit(spark, store, NOW + DAY, records=[archive])
    assert (both.counts.delivered, both.counts.archived, both.is_clean) == (1, 0, True)
