"""A migration that is killed with -9 while it works, and is then resumed or aborted: nothing lost, nothing twice."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.migration_stores import place_in
from tests.integration.pipeline.old_timeouts import OldFile, by_id, ids, messages
from tests.integration.pipeline.test_migrate import waiting
from tests.machine import Daemon

from postdate.pipeline.migrate import MigrateJob, OriginSpec, abort, migrate
from postdate.pipeline.stores import StoreSpec, opened
from postdate.ports.migrating import BatchStatus
from postdate.wiring.migration_sources import store_source

COUNT, BATCH = 2_000, 10

pytestmark = pytest.mark.soak(
    "a command on Spark is killed with -9, and started again",
    part="kills",
    proven_by=(
        "tests/integration/pipeline/test_migrate.py::test_row_116_whenever_it_ends_each_timeout_is_with_one_of_the_two",
        "tests/integration/pipeline/test_migrate.py::test_row_115_a_run_that_was_killed_goes_on_with_equal_parameters_only",
        "tests/integration/pipeline/test_migrate_stores.py::test_row_115_a_run_that_was_killed_goes_on_or_is_aborted",
    ),
)


def run_until(
    origin: OriginSpec, target: StoreSpec, is_time: Callable[[], bool], eventually, *, spark_too: bool
) -> None:
    """Run the command, and kill it as soon as it is time; with its Spark, or let that find out by itself."""
    arguments = ("--all-endpoints", "--cores", "2", "--batch-size", str(BATCH), "--log-level", "error")
    command = [sys.executable, "-m", "postdate.cli", "pipeline", "migrate", "run", *arguments]
    addresses = ["--from-store" if origin.is_store else "--from", origin.address, "--store", target.address]
    schema = [] if origin.schema is None else ["--schema", origin.schema]
    folder = Path(target.address.removeprefix("sqlite:///")).parent
    with subprocess.Popen([*command, *addresses, *schema], cwd=folder, stdout=subprocess.DEVNULL) as run:
        try:
            eventually(lambda: run.poll() is not None or is_time(), "it is time to kill", seconds=300)
        finally:
            driver = Daemon.of(run.pid)
            children = [] if driver is None else driver.descendants()
            run.kill()
            if spark_too:
                for each in children:
                    each.send(signal.SIGKILL)
        run.wait()


def test_row_116_after_kills_each_timeout_is_delivered_by_one_of_the_two(
    spark: SparkSession, tmp_path: Path, store: StoreSpec, eventually
) -> None:
    old, found = OldFile(tmp_path / "old.db"), messages(COUNT)
    old.add("billing", found)
    with opened(store, create=True) as created:
        created.setup()

    def completed(count: int) -> Callable[[], bool]:
        return lambda: old.batches().count(BatchStatus.COMPLETED) >= count

    run_until(old.origin, store, lambda: bool(old.batches()), eventually, spark_too=False)
    run_until(old.origin, store, completed(30), eventually, spark_too=True)
    job = MigrateJob(old.origin, store, batch_size=BATCH)
    (aborted,) = abort(job).endpoints
    there = ids(waiting(store))
    assert (aborted.exact, len(there)) == (True, aborted.moved)
    assert sorted([*there, *old.seen("billing")]) == ids(found)
    assert there, "nothing was moved before the kills"

    (rest,) = migrate(spark, job).endpoints
    assert (rest.status, rest.moved) == ("completed", COUNT - aborted.moved)
    assert old.seen("billing") == []
    assert by_id(waiting(store)) == by_id(found)


def test_row_116_after_a_kill_each_message_is_in_one_of_two_stores(
    spark: SparkSession, request: pytest.FixtureRequest, eventually
) -> None:
    found = messages(COUNT)
    with place_in("postgres", request) as old, place_in("sqlite", request, "postdate") as new:
        old.add(found)
        with closing(store_source(old.spec.address, schema=old.spec.schema)) as source:

            def some_have_moved() -> bool:
                batches = [batch.status for run in source.history() for batch in source.batches(run)]
                return batches.count(BatchStatus.COMPLETED) >= 20

            run_until(old.origin, new.spec, some_have_moved, eventually, spark_too=True)
        job = MigrateJob(old.origin, new.spec, batch_size=BATCH)
        (aborted,) = abort(job).endpoints
        here, there = ids(old.waiting()), ids(new.waiting())
        assert (aborted.exact, len(there), sorted([*here, *there])) == (True, aborted.moved, ids(found))
        (rest,) = migrate(spark, replace(job, batch_size=COUNT)).endpoints
        assert (rest.status, rest.moved, old.waiting()) == ("completed", len(here), [])
        assert by_id(new.waiting()) == by_id(found)
