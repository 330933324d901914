"""A Spark Connect server of a test's own, on loopback; ``tests.spark_drivers`` has its clients."""

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

from postdate.pipeline.java import STARTUP_OPTIONS, find_java_home, prepare_java_home

from .java import SMALL_DATA  # noqa: TID252
from .machine import LOOPBACK, until  # noqa: TID252 - as in servers.py
from .spark_cluster import (  # noqa: TID252
    ENDS_WITHIN_SECONDS,
    SPARK_HOME,
    STARTS_WITHIN_SECONDS,
    ClusterError,
    SparkCluster,
)

_MAIN_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


@contextmanager
def connect_server(cluster: SparkCluster) -> Generator[str]:
    """Run a server in two threads of one JVM, and yield its address for clients.

    Args:
        cluster: whose guard ends the server at the latest; it need not have workers.

    Raises:
        ClusterError: it did not come up.
    """
    port, home = _free_port(), cluster.directory / "connect"
    home.mkdir()
    conf = {
        **SMALL_DATA,
        "spark.master": "local[2,4]",
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.local.dir": str(home / "local"),
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.ui.enabled": "false",
    }
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    java_options = " ".join([*STARTUP_OPTIONS, "-Duser.timezone=UTC"])
    environment = {
        **os.environ,
        **cluster.variables,
        "JAVA_HOME": str(prepare_java_home(find_java_home(None, os.environ), home)),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LAUNCHER_OPTS": " ".join(STARTUP_OPTIONS),
        "SPARK_LOCAL_IP": LOOPBACK,
    }
    command = [SPARK_HOME / "bin" / "spark-submit", "--class", _MAIN_CLASS, "--driver-java-options", java_options]
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *settings, "spark-internal"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=home,
            env=environment,
        )
    try:
        if not until(lambda: server.poll() is not None or _listens(port), STARTS_WITHIN_SECONDS) or server.poll():
            said = (home / "log").read_text(encoding="utf-8", errors="replace")
            raise ClusterError(f"no Connect server within {STARTS_WITHIN_SECONDS:g} s:\n{said[-2_000:]}")
        yield f"sc://{LOOPBACK}:{port}"
    finally:
        server.terminate()
        server.wait(ENDS_WITHIN_SECONDS)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), 1):
        return True
    return False
