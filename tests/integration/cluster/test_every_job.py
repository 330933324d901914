"""Every job on a standalone cluster of two workers, and a schedule and a sweep of which one worker is killed."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from tests.integration.cluster.test_cluster import NOW, of, rows, stored
from tests.integration.cluster.test_cluster_sweep import delivered, prepare
from tests.integration.pipeline.every_job import JOBS, check_cell
from tests.spark_cluster import SparkCluster, spark_cluster
from tests.spark_drivers import RestartedDriver, SparkDriver
from tests.waiting import Eventually

RUN = "tests.integration.pipeline.every_job:run"
CLUSTER_JOBS, SWEEP_JOBS = "tests.integration.cluster.jobs", "tests.integration.cluster.sweep_jobs"
CLUSTER = "standalone cluster"
MESSAGES = 20_000
BEFORE_DUE = "2020-01-01T00:00:00+00:00"

pytestmark = pytest.mark.soak(
    "a cluster of five JVMs",
    part="cluster",
    proven_by=(
        "tests/integration/pipeline/test_connect.py::test_a_job_over_connect_has_the_result_of_a_classic_session",
        "tests/integration/pipeline/test_local_cluster.py::test_a_cluster_has_the_results_of_one_process_by_its_package_and_shows_no_secret",
    ),
)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_on_the_cluster_has_the_result_of_one_process(
    job: str, driver: RestartedDriver, local_driver: SparkDriver, tmp_path: Path
) -> None:
    outcome = driver.run(RUN, name=job, folder=str(tmp_path / "cluster"))
    check_cell(job, CLUSTER, outcome)
    assert outcome == local_driver.run(RUN, name=job, folder=str(tmp_path / "local"))


@pytest.fixture
def own_cluster() -> Iterator[SparkCluster]:
    """A cluster of the test's own, one of whose workers it may kill."""
    with spark_cluster() as cluster:
        yield cluster


@pytest.fixture
def own_driver(own_cluster: SparkCluster) -> Iterator[SparkDriver]:
    driver = SparkDriver(own_cluster, "own")
    yield driver
    driver.stop()


def test_a_worker_that_goes_down_loses_and_doubles_nothing(
    own_cluster: SparkCluster, own_driver: SparkDriver, database: str, eventually: Eventually, tmp_path: Path
) -> None:
    """The first worker is killed in a schedule. The sweep then runs on the other one, with one slot for each."""
    anyio.run(prepare, database)
    at_kill = list[int]()

    def kill_a_worker() -> None:
        eventually(lambda: stored(database) >= MESSAGES // 10, "the first batches are stored")
        at_kill.append(stored(database))
        assert own_cluster.kill_worker(0)

    with ExitStack() as stack:
        killer = threading.Thread(target=kill_a_worker)
        stack.callback(killer.join)
        killer.start()
        job = f"{CLUSTER_JOBS}:schedule_overdue"
        done = own_driver.run(job, number=MESSAGES, store=of(database), now=BEFORE_DUE)
    assert 0 < at_kill[0] < MESSAGES, "the worker was killed amid the job"
    assert (done["read"], done["set_aside"]) == (MESSAGES, {})
    assert rows(database, "SELECT count(*), count(DISTINCT message_id) FROM postdate.record") == [(MESSAGES, MESSAGES)]

    ledger = str(tmp_path / "ledger")
    paths = {"checkpoint": str(tmp_path / "checkpoint"), "ledger": ledger}
    own_driver.run(f"{SWEEP_JOBS}:sweep_once", store=database, transport=database, slots=2)
    own_driver.run(f"{SWEEP_JOBS}:sweep_until_nothing_waits", store=database, transport=database, **paths)
    assert delivered(database) == MESSAGES
    queued = rows(database, "SELECT count(*), count(DISTINCT message_id) FROM postdate.queue_message")
    assert queued == [(MESSAGES, MESSAGES)]
    counts = own_driver.run(f"{CLUSTER_JOBS}:audit_store", store=of(database), now=NOW)["counts"]
    assert (counts["lost"], counts["duplicated"], counts["early"], counts["orphaned"]) == (0, 0, 0, 0)
