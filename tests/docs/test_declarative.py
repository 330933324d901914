"""The project of the guide about declarative pipelines runs by Spark's own command, twice, and stores nothing twice."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet
import pyspark
import pytest
from pyspark.pipelines.flow import Flow
from pyspark.pipelines.graph_element_registry import GraphElementRegistry, graph_element_registration_context
from pyspark.pipelines.output import Output, Sink
from pyspark.sql import DataFrame
from tests import java

from postdate.pipeline.java import find_java_home, prepare_java_home
from postdate.pipeline.session import spark_session
from postdate.pipeline.stores import StoreSpec, open_spec

LOADS = {("2030-05-01 12:00:00", "reminders"): 2, ("2030-05-01 13:00:00", "invoices"): 1}
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
    proven_by="tests/docs/test_declarative.py::test_what_the_files_describe_stores_orders_once_and_becomes_tables",
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
    assert loads == LOADS
    assert [(row["kind"], row["messages"]) for row in _table(project, "records_by_day")] == [("scheduled", 3)]


@dataclass
class Described(GraphElementRegistry):
    """What files describe, where nobody runs it: Spark's own command does, on a server and with a metastore."""

    outputs: dict[str, Output] = field(default_factory=dict[str, Output])
    flows: dict[str, Flow] = field(default_factory=dict[str, Flow])

    def register_output(self, output: Output) -> None:
        self.outputs[output.name] = output

    def register_flow(self, flow: Flow) -> None:
        self.flows[flow.name] = flow

    def register_auto_cdc_flow(self, flow: object) -> None:
        raise NotImplementedError

    def register_sql(self, sql_text: str, file_path: Path) -> None:
        raise NotImplementedError

    def frame(self, name: str) -> DataFrame:
        return self.flows[name].func()


def test_what_the_files_describe_stores_orders_once_and_becomes_tables(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each flow runs as Spark's command would run it, one after the other, in the Java of the documentation."""
    address = f"sqlite:///{project / 'orders.db'}"
    with open_spec(StoreSpec(address), create=True) as store:
        store.setup()
    described = Described()
    with java.lasting(java.folder(tmp_path_factory)), spark_session("orders", with_format=True, cores=1) as spark:
        for name, value in {**java.SMALL_DATA, "spark.sql.shuffle.partitions": "1"}.items():
            spark.conf.set(name, value)
        with graph_element_registration_context(described):
            for file in sorted((project / "transformations").glob("*.py")):
                code = file.read_text(encoding="utf-8").replace('.json("incoming")', f'.json("{project}/incoming")')
                code = code.replace("env:ORDERS_STORE", address)  # Spark's Python has the environment of its start
                exec(compile(code, str(file), "exec"), {"__name__": file.stem})
        sink = described.outputs["orders_store"]
        assert isinstance(sink, Sink)
        assert described.flows["orders_intake"].target == sink.name
        for name in ("orders.json", "again.json"):
            if name != "orders.json":
                shutil.copy(project / "incoming" / "orders.json", project / "incoming" / name)
            described.frame("incoming").createOrReplaceTempView("incoming")
            for flow, writes in (
                (
                    "orders_intake",
                    described.frame("orders_intake").writeStream.format(sink.format).options(**sink.options),
                ),
                (
                    "set_aside",
                    described.frame("set_aside").writeStream.format("parquet").option("path", f"{project}/aside"),
                ),
            ):
                checkpoint = f"{project}/checkpoints/{flow}"
                writes.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
        aside = [row["message_id"] for row in spark.read.parquet(f"{project}/aside").collect()]
        described.frame("pending").createOrReplaceTempView("pending")
        waiting = sorted(row["message_id"] for row in described.frame("pending").collect())
        found = described.frame("load_by_hour").selectExpr("string(start) AS start", "destination", "messages")
        loads = {(row["start"], row["destination"]): row["messages"] for row in found.collect()}
        happened = [(row["kind"], row["messages"]) for row in described.frame("records_by_day").collect()]
        for view in ("incoming", "pending"):
            spark.catalog.dropTempView(view)
    assert (aside, waiting) == (["order-4", "order-4"], ["order-1", "order-2", "order-3"])
    assert loads == LOADS
    assert happened == [("scheduled", 3)]


def _environment(project: Path) -> dict[str, str]:
    home = prepare_java_home(find_java_home(None, os.environ), project.parent)
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
