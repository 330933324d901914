"""The jobs on executors of their own: same results as in one process, by the package alone, and no secret is shown."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import java
from tests.integration.cluster import jobs
from tests.integration.cluster.conftest import PASSWORD, SECRET, fresh_database
from tests.integration.cluster.test_cluster import JOBS, audited_alike, events, logs, scheduled_alike
from tests.machine import LOOPBACK, daemons_with
from tests.spark_cluster import PROJECT, SparkCluster, listening_addresses, spark_cluster
from tests.spark_drivers import SparkDriver
from tests.waiting import Eventually


@pytest.fixture
def databases(postgres_url: str) -> Iterator[list[str]]:
    """Two empty databases, whose addresses have a password."""
    with fresh_database(postgres_url) as one, fresh_database(postgres_url) as two:
        yield [one, two]


@pytest.fixture
def cluster(databases: list[str]) -> Iterator[SparkCluster]:
    """Two executors in processes of their own; they know the first database by the name of a variable."""
    with spark_cluster(environment={SECRET: databases[0]}, within_driver=True) as cluster:
        (cluster.directory / "events").mkdir()
        yield cluster


@pytest.fixture
def driver(cluster: SparkCluster) -> Iterator[SparkDriver]:
    conf = {
        **java.SMALL_DATA,
        **java.PATIENCE,
        "spark.sql.shuffle.partitions": "2",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (cluster.directory / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.log.level": "INFO",
    }
    driver = SparkDriver(cluster, "on-the-cluster", conf=conf)
    yield driver
    driver.stop()


def test_a_cluster_has_the_results_of_one_process_by_its_package_and_shows_no_secret(
    spark: SparkSession, cluster: SparkCluster, driver: SparkDriver, databases: list[str], tmp_path: Path
) -> None:
    found = driver.run(f"{JOBS}:where")
    assert {Path(task["package"]).parts[-3:] for task in found} == {("postdate.zip", "postdate", "__init__.py")}
    assert {task["python"] for task in found} == {str(cluster.python)}
    assert str(PROJECT / "src") not in json.dumps(found)
    assert listening_addresses(cluster.processes()) == {LOOPBACK}

    ways = [
        (lambda job, **given: driver.run(f"{JOBS}:{job}", **given), f"env:{SECRET}", databases[0]),
        (lambda job, **given: getattr(jobs, job)(spark, **given), databases[1], databases[1]),
    ]
    assert scheduled_alike(ways, 400, tmp_path)["accepted"] == 398
    audited_alike(ways, "2030-05-01T12:10:00+00:00")
    # Its preparation runs on the driver, in a Python that has Postdate by the package alone, and not as a task.
    assert driver.run("tests.integration.pipeline.every_job:run", name="delay", folder=str(tmp_path / "delay")) == 50

    driver.stop()
    assert list((cluster.directory / "temporary").iterdir()) == [], "nothing is left behind"
    shown = {"events": events(cluster), "logs": logs(cluster)}
    assert "SparkListenerTaskEnd" in shown["events"]
    assert "MapInArrow" in shown["events"], "the plans are there"
    assert "INFO" in shown["logs"]
    assert [place for place, text in shown.items() if PASSWORD in text] == []


def test_what_belongs_to_a_cluster_ends_with_the_process_that_started_it(eventually: Eventually) -> None:
    program = (
        "import subprocess\n"
        "from tests.spark_cluster import spark_cluster\n"
        "with spark_cluster(within_driver=True) as cluster:\n"
        "    subprocess.Popen(['sleep', 'infinity'], env=cluster.variables)\n"
        "    print(cluster.directory, flush=True)\n"
        "    input()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with starter:
        assert starter.stdout is not None
        directory = Path(starter.stdout.readline().strip())
        # Its environment is to be seen a moment after a process runs.
        eventually(lambda: len(daemons_with(f"POSTDATE_SPARK_CLUSTER={directory}")) == 1, "its process is there")
        starter.send_signal(signal.SIGKILL)
    eventually(lambda: not daemons_with(f"POSTDATE_SPARK_CLUSTER={directory}"), "its processes have ended")
    eventually(lambda: not directory.parent.exists(), "its directory is gone")
