"""The schedule job on Spark. Runs on the driver."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from postdate.core.zones import read_rules
from postdate.errors import PipelineError
from postdate.pipeline import rows as pipeline_rows
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.frames import persist_frame
from postdate.pipeline.local_time import differs_from_java
from postdate.pipeline.schedule import storing
from postdate.pipeline.schedule.collecting import check_folders, collect_result
from postdate.pipeline.schedule.columns import resolve_columns
from postdate.pipeline.schedule.job import ScheduleJob
from postdate.pipeline.schedule.preparing import check_same_number, prepare_store
from postdate.pipeline.schedule.result import ScheduleResult
from postdate.pipeline.schedule.selecting import find_checksums, mark_conflicts, select_messages
from postdate.pipeline.schedule.sync import check_rows, sync_load
from postdate.pipeline.session import check_utc

log = logging.getLogger("postdate.pipeline")


@shorten_errors("the schedule has failed")
def schedule(messages: DataFrame, job: ScheduleJob) -> ScheduleResult:
    """Store every row of ``messages`` that is a message, and set the other rows aside.

    This runs on the driver. The rows are checked, turned into messages and stored on the executors.

    Args:
        messages: one message a row; the frame is computed twice, so cache an expensive one.
        job: see :class:`ScheduleJob`.

    Returns:
        Counts of all rows. If Spark repeats a task, messages that its first attempt stored count as already there, and
        those that it changed as unchanged.

    Raises:
        PipelineError: a column is missing, misspelt or of a wrong type, or a folder exists or cannot be written;
            nothing was stored. Or a task failed, or the input returned different rows when it was read again; messages
            stored by then stay, and the job can be run again.
        StoreError: the store failed before any task began; nothing was stored.
    """
    started = time.perf_counter()
    spark = messages.sparkSession
    check_utc(spark)
    # Columns are resolved as Spark does it: without regard to case, unless the session says otherwise.
    case_sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
    columns, unused = resolve_columns(job.columns, messages.columns, job.unused, case_sensitive=case_sensitive)
    folders = check_folders(spark, job)
    limit, zone_times, is_set_up = prepare_store(job)
    if zone_times is not None and differs_from_java(spark, zone_times, job.now):
        zone = zone_times.local_times.zone
        log.warning(
            "the rules of %s in Spark's Java are not those of Python (%s): times are read by those of Python, as by "
            "services",
            zone,
            read_rules(zone).version or "of an unknown version",
        )
    with ExitStack() as stack:
        checksums = persist_frame(stack, find_checksums(messages, columns))
        read = sum(row["rows"] for row in checksums.where("id_checksum IS NULL").collect())
        if job.expected_rows not in {None, read}:
            raise PipelineError(
                f"another reader counts {job.expected_rows:,} rows in the input, and Spark reads {read:,}; nothing was "
                f"stored"
            )
        if job.sync and not read:
            raise PipelineError(
                f"the input has no rows, so every message of the load {job.load!r} would be cancelled: if you mean "
                f"that, use `postdate pipeline loads undo`"
            )
        rows = select_messages(messages, columns, zone_times, limit)
        candidates = checksums.where("id_checksum IS NOT NULL").select("id_checksum")
        may_repeat = bool(candidates.count())
        if may_repeat:
            rows = mark_conflicts(rows, candidates, limit)
            if job.dry_run and not job.sync:  # Rows with one id come to one task, which counts them.
                rows = rows.repartition("message_id")
        if job.sync:
            # Without a checkpoint, Spark optimizes all expressions about times and headers again for each comparison,
            # which takes minutes. If an executor dies with its part, the job fails, and can be run again.
            checked = check_rows(rows, limit, job.load).localCheckpoint(storageLevel=StorageLevel.DISK_ONLY)
            outcomes, sync = sync_load(stack, checked, read, job, is_set_up=is_set_up, may_repeat=may_repeat)
        else:
            handling = (
                partial(storing.check_all, job.store if is_set_up else None, limit, job.load)
                if job.dry_run
                else partial(storing.store_all, job.store, job.now, job.batch, job.load)
            )
            outcomes, sync = rows.mapInArrow(handling, pipeline_rows.spark_schema(storing.OUTCOME_COLUMNS)), None
        outcomes = persist_frame(stack, outcomes, StorageLevel.DISK_ONLY)
        result = replace(collect_result(outcomes, job, folders, sync, started), unused=unused)
    check_same_number(read, result.read, "what was stored stays")
    return result
