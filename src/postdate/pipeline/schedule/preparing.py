"""What a schedule job checks and opens before it reads its input."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import pyarrow as pa

from postdate.core.upkeep.wall_times import ZoneMarkers
from postdate.core.zones import read_rules
from postdate.errors import PipelineError, StoreNotSetUp
from postdate.pipeline.clock_times import ZoneTimes
from postdate.pipeline.duplicates import can_compare, find_duplicate_ids
from postdate.pipeline.rows import MESSAGE_COLUMNS
from postdate.pipeline.schedule.job import ScheduleJob
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec

log = logging.getLogger("postdate.pipeline")


def prepare_store(job: ScheduleJob) -> tuple[int, ZoneTimes | None, bool]:
    """Return the limit of a message in bytes, the rules for clock times, and whether the store is set up."""
    with _open_store(job) as (store, is_set_up):
        if not can_compare(store.store):
            log.warning(
                "%s does not show its messages: rows whose ids it knows are not compared with them",
                type(store.store).__name__,
            )
        if job.sync:
            # Only a job on Spark can do that.
            from postdate.pipeline.syncing import check_syncable

            check_syncable(store)
        limit, local_times = store.largest_message_bytes, job.local_times
        if local_times is None:
            return limit, None, is_set_up
        markers = ZoneMarkers(store.store)
        if job.dry_run:
            markers.check_store(local_times.zone)
            rules = read_rules(local_times.zone).content
        else:
            rules = store.portal.call(markers.ensure_marker, local_times.zone, job.now)
    return limit, ZoneTimes(local_times, rules), is_set_up


@contextmanager
def _open_store(job: ScheduleJob) -> Generator[tuple[OpenStore, bool]]:
    """Open the store, and set it up unless the job is a dry run. Yields also whether it is set up."""
    is_set_up = not job.dry_run or _is_set_up(job.store)
    with open_spec(job.store, create=not job.dry_run, connect=is_set_up) as store:
        if not job.dry_run:
            store.setup()
        yield store, is_set_up


def _is_set_up(spec: StoreSpec) -> bool:
    try:
        with open_spec(spec) as store:
            find_duplicate_ids(store, _NO_MESSAGE)
    except StoreNotSetUp:
        return False
    return True


_NO_MESSAGE = pa.RecordBatch.from_pylist([{"message_id": "postdate"}], MESSAGE_COLUMNS)


def check_same_number(counted: int, handled: int, state: str) -> None:
    """Raise PipelineError if the input had other rows when it was read again."""
    if counted != handled:
        raise PipelineError(
            f"the input had {counted:,} rows when they were counted, and {handled:,} when they were read again: it "
            f"gives other rows each time it is read; {state}. Cache the input, and run the job again"
        )
