"""A migration that is killed with -9 while it works, and is then resumed or aborted: nothing lost, nothing twice."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline.old_timeouts import OldFile, by_id, ids, messages
from tests.integration.pipeline.test_migrate import waiting
from tests.machine import Daemon

from postdate.pipeline.migrate import MigrateJob, abort, migrate
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports.migrating import BatchStatus

COUNT, BATCH = 2_000, 10

pytestmark = pytest.mark.soak(
    "a command on Spark is killed with -9, and started again",
    part="kills",
    proven_by=(
        "tests/integration/pipeline/test_migrate.py::test_row_116_whenever_it_ends_each_timeout_is_with_one_of_the_two",
        "tests/integration/pipeline/test_migrate.py::test_row_115_a_run_that_was_killed_goes_on_with_equal_parameters_only",
    ),
)


def run_until(
    origin: Sequence[str], target: StoreSpec, is_time: Callable[[], bool], eventually, *, spark_too: bool
) -> None:
    """Run the command, and kill it as soon as it is time; with its Spark, or let that find out by itself."""
    arguments = ("--all-endpoints", "--batch-size", str(BATCH), "--log-level", "error", "--store", target.address)
    command = [sys.executable, "-m", "postdate.cli", "pipeline", "migrate", "run", *arguments, *origin]
    folder = Path(target.address.removeprefix("sqlite:///")).parent
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as run:
        try:
            eventually(lambda: run.poll() is not None or is_time(), "it is time to kill")
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
    with open_spec(store, create=True) as created:
        created.setup()

    def completed(count: int) -> Callable[[], bool]:
        return lambda: old.batches().count(BatchStatus.COMPLETED) >= count

    origin = ("--from", old.origin.address, "--cores", "2")
    run_until(origin, store, lambda: bool(old.batches()), eventually, spark_too=False)
    run_until(origin, store, completed(30), eventually, spark_too=True)
    job = MigrateJob(old.origin, store, batch_size=BATCH)
    (aborted,) = abort(job).endpoints
    there = ids(waiting(store))
    assert (aborted.is_exact, len(there)) == (True, aborted.moved)
    assert sorted([*there, *old.seen("billing")]) == ids(found)
    assert there, "nothing was moved before the kills"

    (rest,) = migrate(spark, job).endpoints
    assert (rest.status, rest.moved) == ("completed", COUNT - aborted.moved)
    assert old.seen("billing") == []
    assert by_id(waiting(store)) == by_id(found)
