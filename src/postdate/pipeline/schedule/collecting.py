"""Collect the result of a schedule job from its outcomes. Runs on the driver."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.pipeline import syncing
from postdate.pipeline.outputs import NewFolder, check_new_folder
from postdate.pipeline.schedule import storing
from postdate.pipeline.schedule.job import REJECTED_ROWS, REPORT, ScheduleJob
from postdate.pipeline.schedule.result import SYNC_COUNTS, ScheduleResult, SyncResult
from postdate.ports.scanning import WRITTEN_COLUMNS

_REPORT_SCHEMA = "outcome string, reason string, rows long"


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a job, checked before anything is stored; ``None``: not requested."""

    rejected: NewFolder | None
    rejected_format: str
    report: NewFolder | None


def check_folders(spark: SparkSession, job: ScheduleJob) -> Folders:
    rejects, report = job.rejects, job.report
    return Folders(
        rejected=None if rejects is None or job.dry_run else check_new_folder(spark, rejects.path, REJECTED_ROWS),
        rejected_format="json" if rejects is None else rejects.format,
        report=None if report is None or job.dry_run else check_new_folder(spark, report, REPORT),
    )


def collect_result(
    outcomes: DataFrame, job: ScheduleJob, folders: Folders, sync: SyncResult | None, started: float
) -> ScheduleResult:
    summed = ("stored", "already_there", *(() if sync is None else SYNC_COUNTS))
    counts = outcomes.groupBy("outcome", "reason").agg(
        F.count("*").alias("rows"), *(F.sum(name).alias(name) for name in summed)
    )
    rows = {(row["outcome"], row["reason"]): row for row in counts.collect()}
    seconds = time.perf_counter() - started
    total = rows.get((storing.COUNTS, None))
    accepted, already_there = (total["stored"], total["already_there"]) if total else (0, 0)
    set_aside = {
        reason: row["rows"] for (outcome, reason), row in sorted(rows.items(), key=str) if outcome == storing.REJECTED
    }
    conflicting = sum(row["rows"] for (outcome, _), row in rows.items() if outcome == storing.CONFLICTING)
    if sync is not None and total is not None:
        sync = replace(sync, **{name: total[name] or 0 for name in SYNC_COUNTS})
    result = ScheduleResult(
        read=accepted + already_there + conflicting + sum(set_aside.values()) + (0 if sync is None else sync.rows),
        accepted=accepted,
        already_there=already_there,
        conflicting=conflicting,
        set_aside=set_aside,
        seconds=seconds,
        load=job.load,
        sync=sync,
    )
    rejected = outcomes.where(F.col("outcome").isin(storing.REJECTED, storing.CONFLICTING))
    if job.dry_run:
        sample = outcomes.where(F.col("outcome") == storing.SAMPLE)
        if sync is not None:
            samples = {
                reason: _sample(sample.where(F.col("reason") == reason), WRITTEN_COLUMNS)
                for reason in (syncing.RESCHEDULED, syncing.REPLACED, "cancelled")
            }
            result = replace(result, sync=replace(sync, samples=samples))
        return replace(
            result,
            is_dry_run=True,
            sample=_sample(sample.where("reason IS NULL"), WRITTEN_COLUMNS),
            rejected_sample=_sample(rejected, storing.REJECTED_COLUMNS[:-1]),
        )
    if (set_aside or conflicting) and folders.rejected is not None:
        folders.rejected.write(rejected.select(*storing.REJECTED_COLUMNS), folders.rejected_format)
        result = replace(result, rejected_to=folders.rejected.location)
    if folders.report is not None:
        result = replace(result, reported_to=folders.report.location)
        _write_report(outcomes.sparkSession, result, folders.report)
    return result


def _sample(rows: DataFrame, columns: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    return storing.shorten_samples(row.asDict() for row in rows.select(*columns).limit(storing.SAMPLE_ROWS).collect())


def _write_report(spark: SparkSession, result: ScheduleResult, folder: NewFolder) -> None:
    folder.write(spark.createDataFrame(result.report_lines(), _REPORT_SCHEMA).coalesce(1), "parquet")
