"""One Spark cluster of two workers for all tests of this folder, a driver on it, and a local one to compare with."""

import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql
from tests.spark_cluster import SparkCluster, spark_cluster
from tests.spark_drivers import RestartedDriver, SparkDriver

PASSWORD = "never-to-be-seen-7Q9x"
SECRET = "POSTDATE_CLUSTER_STORE"
"""The environment variable of driver and executors that has the address of the store, with the password."""

_NUMBERS = itertools.count(1)


@contextmanager
def fresh_database(url: str) -> Generator[str]:
    """Lend a database, with a password in its address; whoever is still connected at the end is thrown out."""
    database = f"cluster_{os.getpid()}_{next(_NUMBERS)}"
    name = sql.Identifier(database)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(name))
    try:
        where = urlsplit(url)
        at = f"{where.username}:{PASSWORD}@{where.hostname}:{where.port}"
        yield where._replace(netloc=at, path=f"/{database}").geturl()
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@pytest.fixture
def database(postgres_url: str) -> Iterator[str]:
    """The address of an empty database of the test's own."""
    with fresh_database(postgres_url) as address:
        yield address


@pytest.fixture(scope="session")
def secret_database(postgres_url: str) -> Iterator[str]:
    """The database whose address the processes of the cluster have in an environment variable."""
    with fresh_database(postgres_url) as address:
        yield address


@pytest.fixture(scope="session")
def cluster(secret_database: str) -> Iterator[SparkCluster]:
    """A master and two workers."""
    with spark_cluster(environment={SECRET: secret_database}) as cluster:
        (cluster.directory / "events").mkdir()
        yield cluster


@pytest.fixture(scope="session")
def driver(cluster: SparkCluster) -> Iterator[RestartedDriver]:
    """A driver on the cluster that tells all it can: event log, web page, every log message; speculation is on."""
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (cluster.directory / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.log.level": "INFO",
        "spark.task.maxFailures": "8",
        "spark.speculation": "true",
        "spark.speculation.interval": "20ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.minTaskRuntime": "20ms",
    }
    driver = RestartedDriver(lambda: SparkDriver(cluster, "on-the-cluster", conf=conf))
    yield driver
    driver.stop()


@pytest.fixture(scope="session")
def local_driver(cluster: SparkCluster) -> Iterator[SparkDriver]:
    """A driver that runs its tasks itself."""
    driver = SparkDriver(cluster, "local", local=True)
    yield driver
    driver.stop()
