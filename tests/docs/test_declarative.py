"""The project of the guide about declarative pipelines runs by Spark's own command, twice, and stores nothing twice."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pyspark
import pytest

from postdate.pipeline.java import find_java_home, runnable_java_home

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, with the orders of the guide."""
    project = shutil.copytree(GUIDES / "declarative", tmp_path / "orders")
    spec = project / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("file:///tmp/orders-pipeline", (tmp_path / "storage").as_uri()))
    (orders,) = re.findall(r"^```python\n(.*?)^```", (GUIDES / "declarative.md").read_text(), re.DOTALL | re.MULTILINE)
    _run(project, dict(os.environ), sys.executable, "-c", orders)
    return project


@pytest.mark.soak(
    "Spark's own command, twice, with a metastore",
    part="docs",
    proven_by=(
        "tests/integration/pipeline/test_source_streams.py::test_a_stream_is_stored_and_one_that_is_read_again_changes_nothing",
        "tests/integration/pipeline/test_source.py::test_writing_again_stores_nothing_twice",
    ),
)
def test_orders_are_stored_once_and_become_tables(project: Path) -> None:
    environment = _environment(project)
    _run(project, environment, sys.executable, "-m", "postdate.cli", "setup", "--store", environment["ORDERS_STORE"])
    command = [str(Path(pyspark.__path__[0]) / "bin" / "spark-pipelines"), "run"]
    lasting = ["--conf", "spark.sql.catalogImplementation=hive"]
    assert "Run is COMPLETED" in _run(project, environment, *command, *lasting)
    shutil.copy(project / "incoming" / "orders.json", project / "incoming" / "again.json")
    assert "Run is COMPLETED" in _run(project, environment, *command, *lasting)
    with sqlite3.connect(project / "orders.db") as store:
        ids = store.execute("SELECT message_id FROM delayed_message ORDER BY message_id").fetchall()
    assert ids == [("order-1",), ("order-2",), ("order-3",)]
    assert [row["message_id"] for row in _table(project, "set_aside")] == ["order-4", "order-4"]
    loads = {(str(row["start"]), row["destination"]): row["messages"] for row in _table(project, "load_by_hour")}
    assert loads == {("2030-05-01 12:00:00", "reminders"): 2, ("2030-05-01 13:00:00", "invoices"): 1}
    assert [(row["kind"], row["messages"]) for row in _table(project, "records_by_day")] == [("scheduled", 3)]


def _environment(project: Path) -> dict[str, str]:
    home = runnable_java_home(find_java_home(None, os.environ), project.parent)
    return {
        **os.environ,
        "JAVA_HOME": str(home),
        "ORDERS_STORE": f"sqlite:///{project / 'orders.db'}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": pyspark.__path__[0],
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def _run(directory: Path, environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _table(project: Path, name: str) -> list[dict[str, object]]:
    return pyarrow.parquet.read_table(project / "spark-warehouse" / name).to_pylist()
