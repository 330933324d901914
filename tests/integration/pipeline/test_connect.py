"""Every job over Spark Connect: the same results as in a classic session, or a refusal in one line.

The guide's table of jobs and kinds of sessions is what these tests find.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline import every_job
from tests.integration.pipeline.every_job import JOBS, check_cell, table_in_guide
from tests.spark_cluster import spark_cluster
from tests.spark_connect import connect_server
from tests.spark_drivers import SparkDriver

RUN = "tests.integration.pipeline.every_job:run"
CLASSIC, CONNECT = "one process", "Spark Connect"
REFUSALS = {"delay, started again": "start the query from a classic session"}


@pytest.fixture(scope="module")
def client() -> Iterator[SparkDriver]:
    """A client, in a process of its own, of a server in another one."""
    with spark_cluster(within_driver=True) as cluster, connect_server(cluster) as address:
        driver = SparkDriver(cluster, "client", remote=address)
        yield driver
        driver.stop()


@pytest.fixture
def classic(spark: SparkSession) -> Iterator[SparkSession]:
    """The session of all tests; the settings that a job makes are undone."""
    before = dict(spark.conf.getAll)
    yield spark
    for query in spark.streams.active:
        query.stop()
    for name in dict(spark.conf.getAll).keys() - before.keys():
        spark.conf.unset(name)
    for name, value in before.items():
        if spark.conf.get(name, None) != value:
            spark.conf.set(name, value)


IN_THE_GATE = {"schedule", "delay, started again"}
_SOAK = pytest.mark.soak(
    "ten more jobs take some minutes",
    part="spark",
    proven_by="tests/integration/pipeline/test_connect.py::test_a_job_over_connect_has_the_result_of_a_classic_session",
)


@pytest.mark.parametrize("job", [job if job in IN_THE_GATE else pytest.param(job, marks=_SOAK) for job in JOBS])
def test_a_job_over_connect_has_the_result_of_a_classic_session(
    job: str, classic: SparkSession, client: SparkDriver, tmp_path: Path
) -> None:
    expected = json.loads(json.dumps(every_job.run(classic, job, str(tmp_path / "classic"))))
    outcome = client.run(RUN, name=job, folder=str(tmp_path / "connect"))
    check_cell(job, CLASSIC, expected)
    check_cell(job, CONNECT, outcome)
    if job in REFUSALS:
        assert outcome.startswith(every_job.REFUSED)
        assert REFUSALS[job] in outcome
        assert "\n" not in outcome
    else:
        assert outcome == expected
        assert not str(expected).startswith(every_job.REFUSED)


def test_the_table_in_the_guide_has_every_job() -> None:
    assert list(table_in_guide()) == list(JOBS)
