"""Start Spark with settings for one machine. Everything here runs on the driver.

One process has one Java virtual machine for Spark. Memory, Java and the start-up options are those of the first
session. A later call returns the running session, with the SQL settings of the call applied.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.errors import PipelineError
from postdate.pipeline.java import STARTUP_OPTIONS, find_java_home, prepare_java_home
from postdate.pipeline.source import register

_LOOPBACK = "127.0.0.1"
_LOG_SETTINGS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
# Spark prints a greeting when this one logger differs from the root.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
# It tells of every query that is stopped in the middle of a micro-batch; what has failed is raised in Python as well.
logger.writing.name = org.apache.spark.sql.execution.datasources.v2.WriteToDataSourceV2Exec
logger.writing.level = off
logger.files.name = org.apache.spark.sql.execution.datasources.FileFormatWriter
logger.files.level = off
# What a task fails of is told by its job, in a line; these would tell the same in pages.
logger.tasks.name = org.apache.spark.executor.Executor
logger.tasks.level = off
logger.stages.name = org.apache.spark.scheduler.TaskSetManager
logger.stages.level = off
logger.state.name = org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkPythonPreInitRunner
logger.state.level = off
logger.batches.name = org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution
logger.batches.level = off
logger.aborting.name = org.apache.spark.util.Utils
logger.aborting.level = off
# A query that is stopped in the middle of a micro-batch interrupts what writes its state, or the start of its Python.
logger.changelog.name = org.apache.spark.sql.execution.streaming.state.StateStoreChangelogWriterV4
logger.changelog.level = off
logger.preinit.name = org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkPythonPreInitRunner
logger.preinit.level = off
# Stopped in the middle of cleaning up, it complains of that; what it has not cleaned goes with the session.
logger.cleaning.name = org.apache.spark.ContextCleaner
logger.cleaning.level = off
"""

FOR_LONG_JOBS: Final = MappingProxyType({"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4"})
"""Settings for jobs of a million rows, and for continuous queries: slower for half a minute, then twice as fast."""

_ROWS_A_BATCH = 20_000
_BYTES_A_BATCH = 64 * 1024 * 1024

_ATTEMPTS_OF_A_TASK = 4
"""The default on clusters. Spark's own default for a local master is one: then a killed Python worker ends the job."""

_MANY = 100_000
"""Rows of a range that is divided into more partitions than any cluster has cores."""

_start_lock = threading.Lock()
"""Held while a session starts, because its environment variables apply to the whole process."""


def spark_session(
    app_name: str = "postdate",
    *,
    cores: int | None = None,
    master: str | None = None,
    with_format: bool = False,
    java_home: Path | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start Spark, or return the session that runs in this process.

    Use the session as a context manager, or call ``stop()``. Temporary files are removed when the process ends.

    Args:
        app_name: shown in logs and in the web interface of a cluster.
        cores: number of threads of a local Spark, at least 1; by default all cores of the machine. A task that fails is
            run up to four times, as on a cluster.
        master: a cluster, or any other Spark master URL; local by default. It excludes ``cores``.
        with_format: register the format ``postdate`` at once. This takes Spark a second or two, and jobs of this
            package do not need it; :func:`postdate.pipeline.source.register` does it later.
        java_home: for the default see :func:`postdate.pipeline.java.find_java_home`.
        conf: Spark settings; they override all defaults here. On a cluster ``spark.pyspark.python`` names the
            Python of the executors; otherwise it is that of ``PYSPARK_PYTHON``, or the path of the driver's own.
            ``spark.log.level`` set to ``INFO`` or ``WARN`` shows Spark's log. Java options are added to those
            here; see :data:`FOR_LONG_JOBS`.

    Raises:
        PipelineError: settings exclude each other, or no Java was found.
    """
    if cores is not None and (master is not None or cores < 1):
        raise PipelineError(f"cores={cores} is for a local Spark and at least 1; with master={master!r} leave it out")
    master = master or f"local[{cores or '*'},{_ATTEMPTS_OF_A_TASK}]"
    settings = _settings(master, conf or {})
    with _start_lock:
        session = SparkSession.getActiveSession()
        if session is None:
            session = _start(app_name, master, settings, java_home)
        else:
            for key, value in settings.items():
                if session.conf.isModifiable(key):
                    session.conf.set(key, value)
    if with_format:
        register(session)
    return session


def check_utc(spark: SparkSession) -> None:
    """Raise PipelineError if a session shows or parses times in a zone other than UTC."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    if zone not in {"UTC", "Etc/UTC", "Z", "+00:00"}:
        raise PipelineError(
            f"the Spark session is in time zone {zone}; set spark.sql.session.timeZone to UTC, "
            f"or get the session from postdate.pipeline.session.spark_session"
        )


def is_connect(spark: SparkSession) -> bool:
    """Return whether a session is a client of Spark Connect. Such a client has no Java of its own."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def count_slots(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at the same time: its default parallelism.

    Only a classic session has a context to ask. Every session divides a range by the same number.
    """
    numbers = spark.range(_MANY).select(F.spark_partition_id().alias("number"))
    return int(numbers.agg(F.max("number")).collect()[0][0]) + 1


def _settings(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    directory = _private_directory()
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # A batch is one transaction in jobs that store rows, and bodies may be large.
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ROWS_A_BATCH),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(_BYTES_A_BATCH),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": "",
    }
    if master.startswith("local"):
        settings |= _local_settings(directory, master)
    settings |= conf
    logging_file = directory / "log4j2.properties"
    logging_file.write_text(_LOG_SETTINGS, encoding="utf-8")
    java_options = [*STARTUP_OPTIONS, "-Duser.timezone=UTC", f"-Dlog4j2.configurationFile={logging_file.as_uri()}"]
    options = settings["spark.driver.extraJavaOptions"]
    settings["spark.driver.extraJavaOptions"] = " ".join([*java_options, options]).strip()
    if not master.startswith("local"):  # ORC shows a time by the zone of the Java that reads it
        options = settings.get("spark.executor.extraJavaOptions", "")
        settings["spark.executor.extraJavaOptions"] = f"-Duser.timezone=UTC {options}".strip()
    return settings


def _local_settings(directory: Path, master: str) -> dict[str, str]:
    """Return settings for a local Spark only: nothing listens beyond loopback, and no file is left behind.

    Python workers are reached over loopback with a secret. Unix domain sockets would also work, but then a worker that
    is stopped while it waits prints a broken pipe.
    """
    cores_match = re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", master)
    cores = int(cores_match[1]) if cores_match else os.cpu_count() or 1
    return {
        "spark.sql.shuffle.partitions": str(max(cores, 2)),
        "spark.driver.host": _LOOPBACK,
        "spark.driver.bindAddress": _LOOPBACK,
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }


def _start(app_name: str, master: str, settings: dict[str, str], java_home: Path | None) -> SparkSession:
    launch_environment = {
        "JAVA_HOME": str(prepare_java_home(find_java_home(java_home, os.environ), _private_directory())),
        "SPARK_LAUNCHER_OPTS": " ".join(STARTUP_OPTIONS),
    }
    if master.startswith("local"):
        launch_environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": _LOOPBACK}
    else:
        launch_environment["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
    # Outside spark-submit, PySpark reads only the environment variable.
    if worker_python := settings.get("spark.pyspark.python"):
        launch_environment["PYSPARK_PYTHON"] = worker_python
    launch_environment |= _paths_of_packages(settings.get("spark.submit.pyFiles", ""))
    builder = SparkSession.Builder().appName(app_name).master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    # The logger of py4j reports every connection, even while Python ends.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # Spark's launcher and its JVM inherit the environment.
    with set_temporarily(launch_environment, os.environ.get, os.environ.__setitem__, os.environ.pop):
        return builder.getOrCreate()


def _paths_of_packages(packages: str) -> dict[str, str]:
    """Return the variable that puts packages of a job on the path of each Python that the JVM of the driver starts.

    Spark distributes packages to tasks, but not to these processes: the start of a stateful operator, and the streams
    of a format. They run under the Python of the executors, which need not have Postdate.
    """
    paths = [urlsplit(package) for package in packages.split(",") if package]
    here = [path.path for path in paths if path.scheme in {"", "file", "local"}]
    if not here:
        return {}
    before = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    return {"PYTHONPATH": os.pathsep.join([*(str(Path(path).absolute()) for path in here), *before])}


@contextlib.contextmanager
def set_temporarily(
    values: Mapping[str, str],
    get: Callable[[str], str | None],
    write: Callable[[str, str], None],
    remove: Callable[[str], object],
) -> Generator[None]:
    """Set values under their names for the length of the block. Then restore or remove each of them."""
    values_before = {name: get(name) for name in values}
    for name, value in values.items():
        write(name, value)
    try:
        yield
    finally:
        for name, value_before in values_before.items():
            if value_before is None:
                remove(name)
            else:
                write(name, value_before)


@cache
def _private_directory() -> Path:
    """Return a directory of this process alone. It is removed when the process ends, after Spark has ended."""
    directory = Path(tempfile.mkdtemp(prefix="postdate-spark-"))
    atexit.register(_remove_directory, directory, os.getpid())
    return directory


def _remove_directory(directory: Path, owner: int) -> None:
    if os.getpid() != owner:  # A forked child must not remove the directory of its parent.
        return
    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
    shutil.rmtree(directory, ignore_errors=True)
