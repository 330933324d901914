"""The jobs and commands of the local engine where PySpark is not installed, and which engine a command chooses."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline import every_job
from tests.integration.pipeline.every_job import JOBS, REFUSED, check_cell
from tests.integration.pipeline.jobs_without_spark import LOCAL_JOBS

from postdate.cli.entry import run
from postdate.pipeline import engines

WITHOUT: Final = "without Spark"
ROOT: Final = Path(__file__).parents[3]
ROWS: Final = "message_id,due,destination\na,2031-05-01T12:00:00Z,q\nb,x,q\n"


@pytest.mark.parametrize("job", JOBS)
def test_a_job_without_spark_has_the_result_of_one_on_spark(spark: SparkSession, job: str, tmp_path: Path) -> None:
    if job not in LOCAL_JOBS:
        check_cell(job, WITHOUT, f"{REFUSED}there is no local engine for it")
        return
    command = [sys.executable, "-m", "tests.integration.pipeline.jobs_without_spark", job, str(tmp_path / "local")]
    outcome = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    check_cell(job, WITHOUT, outcome)
    if not str(outcome).startswith(REFUSED):
        assert outcome == json.loads(json.dumps(every_job.run(spark, job, str(tmp_path / "spark"))))


Cli = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call a pipeline command in this process: exit code, JSON of the result, standard error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.csv").write_text(ROWS, encoding="utf-8")

    def call(*arguments: str) -> tuple[int, Any, str]:
        status = run(["pipeline", *arguments, "--store", "sqlite:///s.db", "--json"])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else None, err

    return call


@pytest.fixture
def spark_jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started on Spark, instead of starting it."""
    started = list[str]()

    class StartedError(Exception):
        """Spark would start now."""

    def start(*_: object, **__: object) -> None:
        started.append("spark")
        raise StartedError

    monkeypatch.setattr("postdate.cli.pipeline.common.run_on_spark", start)
    return started


def test_small_work_runs_in_this_process(cli: Cli, spark_jobs: list[str]) -> None:
    status, result, _ = cli(
        "schedule", "in.csv", "--rejected", "rejected", "--report", "report", "--verify", "--cores", "1"
    )
    assert (status, result["engine"], result["read"], result["accepted"]) == (1, "local", 2, 1)
    assert result["set_aside"] == {"malformed_time": 1}
    assert [*Path("rejected").glob("part-*.json")]
    assert [*Path("report").glob("part-*.parquet")]
    assert cli("schedule", "in.csv", "--dry-run", "--engine", "local")[1]["already_there"] == 1
    assert cli("forecast", "--load", "load", "--load-format", "csv")[1]["engine"] == "local"
    assert cli("audit", "--findings", "findings.json", "--all-endpoints")[1]["engine"] == "local"
    assert not spark_jobs


@pytest.mark.parametrize(
    "arguments",
    [
        ("schedule", "in.csv", "--engine", "spark"),
        ("schedule", "in.csv", "--partitions", "2"),
        ("schedule", "in.csv", "--conf", "spark.ui.enabled=false"),
        ("schedule", "in.csv", "--master", "spark://nowhere:7077"),
        ("schedule", "in.csv", "--py-files", "postdate.zip"),
        ("schedule", "in.csv", "--sync", "--load", "spring"),
        ("schedule", "in.csv", "--rejected", "s3a://bucket/rejected"),
        ("schedule", "s3a://bucket/in.csv"),
        ("schedule", "in.csv", "--format", "avro"),
        ("loads", "diff", "spring", "in.csv"),
        ("forecast", "--partitions", "2"),
        ("forecast", "--load", "s3a://bucket/load"),
        ("audit", "--state", "state"),
        ("audit", "--records", "lake"),
    ],
)
def test_what_only_spark_does_runs_on_spark_or_is_refused(
    cli: Cli, spark_jobs: list[str], arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli(*arguments)[0] == 70
    assert spark_jobs == ["spark"]
    assert not Path("s.db").exists()
    if "spark" in arguments or "loads" in arguments:
        return
    status, _, err = cli(*arguments, "--engine", "local")
    assert status != 0
    assert "use --engine spark" in err
    assert err.count("\n") == 1
    monkeypatch.setattr(engines, "is_spark_installed", lambda: False)
    _, _, err = cli(*arguments)
    assert "pip install 'postdate[pipeline]'" in err
    assert (spark_jobs, Path("s.db").exists()) == (["spark"], False)


def test_large_work_runs_on_spark_if_it_is_installed(
    cli: Cli, spark_jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("schedule", "in.csv")
    monkeypatch.setattr(engines, "LARGEST_LOCAL_BYTES", len(ROWS) - 1)
    monkeypatch.setattr(engines, "LARGEST_LOCAL_MESSAGES", 0)
    for arguments in (("schedule", "in.csv"), ("forecast",), ("audit",)):
        assert cli(*arguments)[0] == 70
        assert cli(*arguments, "--engine", "local")[1]["engine"] == "local"
    assert spark_jobs == ["spark"] * 3
    monkeypatch.setattr(engines, "is_spark_installed", lambda: False)
    for arguments in (("schedule", "in.csv"), ("forecast",), ("audit",)):
        assert cli(*arguments)[1]["engine"] == "local"


def test_a_command_runs_where_pyspark_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(ROWS, encoding="utf-8")
    program = (
        "import sys; from tests.integration.pipeline.jobs_without_spark import hide_spark; hide_spark()\n"
        "from postdate.cli.entry import run; sys.exit(run(sys.argv[1:]))"
    )

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        store = ("--store", f"sqlite:///{tmp_path / 's.db'}", "--json")
        command = [sys.executable, "-c", program, "pipeline", *arguments, *store]
        return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    scheduled = call("schedule", str(tmp_path / "in.csv"), "--zone", "Europe/Paris")
    assert json.loads(scheduled.stdout)["engine"] == "local", scheduled.stderr
    assert json.loads(call("forecast").stdout)["messages"] == 1
    assert json.loads(call("audit").stdout)["counts"]["scheduled"] == 1
    assert "pip install 'postdate[pipeline]'" in call("audit", "--html", "page.html").stderr
    assert "pip install 'postdate[pipeline]'" in call("sweep").stderr
    assert "pip install 'postdate[pipeline]'" in call("schedule", str(tmp_path / "in.csv"), "--partitions", "1").stderr


@pytest.mark.parametrize(("delimiter", "said"), [(";", "';'"), ("\t", "'\\t'"), ("|", "'|'")])
def test_a_file_with_another_delimiter_is_refused_with_the_option_for_it(cli: Cli, delimiter: str, said: str) -> None:
    Path("semicolons.csv").write_text(ROWS.replace(",", delimiter), encoding="utf-8")
    status, _, err = cli("schedule", "semicolons.csv")
    assert status != 0
    assert err.endswith(f": if these are several columns, say --delimiter {said}\n")
    assert cli("schedule", "semicolons.csv", "--delimiter", delimiter)[1]["read"] == 2
