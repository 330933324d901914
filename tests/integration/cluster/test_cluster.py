"""The jobs on a real cluster: same results as in one process, whoever is killed; and no secret is shown anywhere."""

import html
import json
import random
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import psycopg
import pytest
from tests.integration.cluster.conftest import PASSWORD, SECRET
from tests.machine import daemons_with
from tests.spark_cluster import PROJECT, SparkCluster, listening_addresses
from tests.spark_drivers import JobFailed, RestartedDriver, SparkDriver
from tests.spark_kills import kill_rounds, killing

JOBS = "tests.integration.cluster.jobs"
NOW = "2030-05-01T00:00:00+00:00"
MESSAGES = 4_000
"""In a round of kills."""

_LOCAL, _COLUMNS = (f"tests/integration/pipeline/{file}.py" for file in ("test_local_cluster", "test_schedule_columns"))


def _on_five_jvms(*proven_by: str) -> pytest.MarkDecorator:
    return pytest.mark.soak(
        "five JVMs start before the first test runs, and others when drivers are killed",
        part="cluster",
        proven_by=proven_by,
    )


pytestmark = _on_five_jvms(
    f"{_LOCAL}::test_a_cluster_has_the_results_of_one_process_by_its_package_and_shows_no_secret"
)


def of(address: str) -> dict[str, str]:
    return {"address": address}


def rows(address: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(address, autocommit=True) as connection:
        return connection.execute(sql.encode()).fetchall()


def stored(address: str) -> int:
    """Return how many messages wait; 0 before there is a table for them."""
    try:
        return rows(address, 'SELECT count(*) FROM postdate."postdate.timeouts"')[0][0]
    except psycopg.errors.UndefinedTable:
        return 0


# --- the cluster ------------------------------------------------------------------------------------------------------


def test_executors_find_postdate_in_the_package_of_the_job_only(cluster: SparkCluster, driver: RestartedDriver) -> None:
    found = driver.run(f"{JOBS}:where")
    assert {Path(task["package"]).parts[-3:] for task in found} == {("postdate.zip", "postdate", "__init__.py")}
    assert {task["python"] for task in found} == {str(cluster.python)}
    assert str(PROJECT / "src") not in json.dumps(found)
    assert all(Path(task["directory"]).is_relative_to(cluster.directory) for task in found)
    command = [cluster.python, "-I", "-c", "import psycopg, pyarrow, anyio, msgspec; import postdate"]
    alone = subprocess.run(command, cwd=cluster.directory, capture_output=True, text=True, check=False)
    assert "No module named 'postdate'" in alone.stderr


def test_everything_listens_on_loopback_only(cluster: SparkCluster, driver: RestartedDriver) -> None:
    driver.run(f"{JOBS}:where")
    processes = cluster.processes()
    assert len(cluster.executors()) == 2
    assert {executor.jvm for executor in cluster.executors()} < set(processes)
    assert all(executor.python_workers for executor in cluster.executors())
    assert listening_addresses(processes) == {"127.0.0.1", "127.0.0.2"}


@_on_five_jvms(f"{_LOCAL}::test_what_belongs_to_a_cluster_ends_with_the_process_that_started_it")
def test_a_cluster_leaves_nothing_when_the_process_that_started_it_is_killed() -> None:
    program = (
        "from tests.spark_cluster import spark_cluster\n"
        "with spark_cluster(workers=1) as cluster:\n"
        "    print(cluster.directory, flush=True)\n"
        "    input()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with starter:
        assert starter.stdout is not None
        directory = Path(starter.stdout.readline().strip())
        mark = f"POSTDATE_SPARK_CLUSTER={directory}"
        processes = daemons_with(mark)
        assert len(processes) >= 2
        starter.send_signal(signal.SIGKILL)
    assert all(process.ends_within(30) for process in processes)
    assert daemons_with(mark) == []


# --- same results -----------------------------------------------------------------------------------------------------


def input_rows(number: int) -> Iterator[dict[str, Any]]:
    """Return messages with every kind of fault among them."""
    due = datetime(2030, 5, 1, 12, tzinfo=UTC)
    for n in range(number):
        good = {"message_id": f"m-{n}", "due": (due + timedelta(seconds=n)).isoformat(), "destination": f"q{n % 7}"}
        yield {**good, "body": f"body of {n} “ü”", "headers": json.dumps({"Number": str(n)})}
        match n % 200:
            case 0:
                yield {**good, "message_id": " "}
            case 1:
                yield {**good, "due": "soon", "message_id": f"soon-{n}"}
            case 2:
                yield {**good, "due": "2030-05-01T12:00:00", "message_id": f"local-{n}"}
            case 3:
                yield {**good, "headers": "{", "message_id": f"headers-{n}"}
            case 4:
                yield {**good, "message_id": f"m-{n}", "body": "another body"}
            case 5:
                yield {**good, "body": f"body of {n} “ü”", "headers": json.dumps({"Number": str(n)})}
            case 6:
                yield {**good, "message_id": "x" * 300, "body": str(n)}
            case _:
                pass


def set_aside(rejects: Path) -> list[str]:
    return sorted(line for file in rejects.glob("part-*") for line in file.read_text(encoding="utf-8").splitlines())


Way = tuple[Callable[..., Any], str, str]
"""What runs a job of ``jobs.py``, its store as it is told to that, and the address of the store."""


def scheduled_alike(ways: Sequence[Way], number: int, folder: Path) -> dict[str, Any]:
    """Schedule the same file in two ways; return the counts, which are the same, as are the messages."""
    lines = [json.dumps(row) for row in input_rows(number)]
    (folder / "messages.json").write_text("\n".join(lines), encoding="utf-8")
    with_content = """
        SELECT message_id, due, destination, headers, body
        FROM postdate."same.timeouts" AS t JOIN postdate.content AS c USING (number) ORDER BY 1"""
    results, tables = [], []
    for place, (run, store, address) in enumerate(ways):
        arguments = {"path": str(folder / "messages.json"), "store": same(store), "now": NOW}
        result = run("schedule_file", **arguments, rejects=str(folder / f"rejects-{place}"))
        results.append(json.loads(json.dumps(result)))  # as it comes from another process
        tables.append(rows(address, with_content))
    assert results[0] == results[1]
    assert results[0]["read"] == len(lines)
    assert results[0]["set_aside"].keys() >= {"missing_id", "malformed_time", "time_without_zone", "conflicting_rows"}
    assert tables[0] == tables[1]
    assert len(tables[0]) == results[0]["accepted"]
    assert set_aside(folder / "rejects-0") == set_aside(folder / "rejects-1") != []
    return results[0]


def audited_alike(ways: Sequence[Way], now: str) -> dict[str, Any]:
    """Take a message away, and audit in two ways; return the counts, which are the same, and know of it."""
    for _, _, address in ways:
        rows(address, """DELETE FROM postdate."same.timeouts" WHERE message_id = 'm-77' RETURNING 1""")
    audits: list[dict[str, Any]] = [
        {**run("audit_store", store=same(store), now=now), "store": ""} for run, store, _ in ways
    ]
    assert audits[0] == audits[1]
    assert [finding["sample"] for finding in audits[0]["findings"] if finding["name"] == "lost"] == [["m-77"]]
    assert audits[0]["counts"]["lost"] == 1
    return audits[0]["counts"]


def same(store: str) -> dict[str, str]:
    return {**of(store), "endpoint": "same"}


def test_a_schedule_and_an_audit_have_the_same_result_as_in_one_process(
    database: str, secret_database: str, driver: RestartedDriver, local_driver: SparkDriver, tmp_path: Path
) -> None:
    there, here = (lambda job, one=one, **given: one.run(f"{JOBS}:{job}", **given) for one in (driver, local_driver))
    ways = [(there, database, database), (here, secret_database, secret_database)]
    assert scheduled_alike(ways, 20_000, tmp_path)["accepted"] == 19_900
    counts = audited_alike([(run, database, database) for run in (there, here)], "2030-05-01T13:00:00+00:00")
    assert counts["scheduled"] == 19_900
    assert counts["overdue"] > 3_000


@_on_five_jvms(
    f"{_LOCAL}::test_a_cluster_has_the_results_of_one_process_by_its_package_and_shows_no_secret",
    "tests/integration/pipeline/test_source.py::test_messages_are_read_as_they_were_written",
)
def test_the_format_is_known_on_the_cluster_by_its_name(secret_database: str, driver: RestartedDriver) -> None:
    done = driver.run(f"{JOBS}:by_name", address=f"env:{SECRET}", number=500)
    assert sorted(done["ids"]) == sorted(f"m-{n}" for n in range(500))
    assert PASSWORD not in done["plan"]
    assert stored(secret_database) >= 500


# --- kills ------------------------------------------------------------------------------------------------------------


@_on_five_jvms(
    f"{_COLUMNS}::test_a_task_that_dies_and_runs_again_stores_nothing_twice",
    f"{_COLUMNS}::test_what_is_scheduled_again_is_there_already_and_is_read_as_of_one_instant",
)
@pytest.mark.timeout(900 + 120 * kill_rounds())
@pytest.mark.parametrize("kind", ["executor", "python", "driver"])
def test_kills_during_a_schedule_lose_and_double_nothing(
    kind: str, cluster: SparkCluster, driver: RestartedDriver, database: str, chance: random.Random
) -> None:
    """In each round the first kill strikes when a random part of the messages is stored."""
    killed = 0
    for number in range(kill_rounds()):
        first = number * MESSAGES
        enough = first + chance.randrange(1, MESSAGES // 2)
        # Killed without end, executors that take a second to start would never finish a task.
        at_most = 1 if kind == "driver" else chance.randrange(1, 4)
        with killing(
            cluster,
            chance.randrange(1_000_000),
            0.5,
            {kind},
            driver=driver,
            ready=lambda: stored(database) >= enough,  # noqa: B023 - asked in this round only
            at_most=at_most,
        ) as kills:
            done = driver.run(
                f"{JOBS}:schedule_numbers", first=first, end=first + MESSAGES, store=of(database), now=NOW
            )
        assert kills.total >= 1
        assert (done["read"], done["set_aside"]) == (MESSAGES, {})
        killed += kills.total
        print(f"{kind}, round {number + 1}: {kills.total} kills, {done}")  # noqa: T201
    audited = driver.run(f"{JOBS}:audit_store", store=of(database), now=NOW)["counts"]
    print(f"{kind}: {killed} kills in {kill_rounds()} rounds; audit: {audited}")  # noqa: T201
    expected = kill_rounds() * MESSAGES
    assert (audited["scheduled"], audited["pending"]) == (expected, expected)
    assert (audited["lost"], audited["duplicated"], audited["early"]) == (0, 0, 0)
    assert rows(database, "SELECT count(*), count(DISTINCT message_id) FROM postdate.record") == [(expected, expected)]
    assert rows(database, "SELECT count(*) FROM postdate.content") == [(expected,)]


@_on_five_jvms(f"{_COLUMNS}::test_a_task_that_runs_twice_at_once_stores_nothing_twice")
def test_a_task_that_spark_runs_twice_at_once_stores_nothing_twice(
    cluster: SparkCluster, driver: RestartedDriver, database: str
) -> None:
    before = events(cluster).count('"Speculative":true')
    done = driver.run(f"{JOBS}:schedule_unevenly", end=10_000, store=of(database), now=NOW)
    assert (done["read"], done["set_aside"]) == (10_000, {})
    assert stored(database) == 10_000
    assert rows(database, "SELECT count(*), count(DISTINCT message_id) FROM postdate.record") == [(10_000, 10_000)]
    assert events(cluster).count('"Speculative":true') > before


# --- secrets ----------------------------------------------------------------------------------------------------------


def events(cluster: SparkCluster) -> str:
    files = [file for file in (cluster.directory / "events").rglob("*") if file.is_file()]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def logs(cluster: SparkCluster) -> str:
    """Return what master, workers, executors and drivers have written."""
    files = [
        *cluster.directory.glob("*/log"),
        *cluster.directory.glob("*.log"),
        *cluster.directory.glob("*/work/*/*/std*"),
    ]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def command_lines(cluster: SparkCluster) -> str:
    return "\n".join(Path(f"/proc/{daemon.pid}/cmdline").read_text() for daemon in cluster.processes())


NOT_FOLLOWED = re.compile("/kill|/static/|sort=|heapHistogram")
"""Links that end something, lead to Spark's own files, or show the same in another order."""


def pages(start: str) -> dict[str, str]:
    """Return all pages of a server that can be reached from the first one by links."""
    found: dict[str, str] = {}
    pending = [start]
    while pending:
        url = pending.pop()
        if url in found or not url.startswith(start):
            continue
        with _answer(url) as answer:
            found[url] = answer.read().decode("utf-8", "replace")
        if "html" in answer.headers.get_content_type():
            links = re.findall(r"""href=['"]([^'"#]+)""", found[url])
            pending += [urljoin(url, html.unescape(link)) for link in links if not NOT_FOLLOWED.search(link)]
    return found


def _answer(url: str) -> HTTPResponse | urllib.error.HTTPError:
    """Return what the server says, also when that is an error: a page of an executor that has gone answers with one."""
    try:
        return urllib.request.urlopen(url, timeout=120)
    except urllib.error.HTTPError as error:
        return error


def test_a_secret_given_by_reference_is_shown_nowhere(
    cluster: SparkCluster, driver: RestartedDriver, secret_database: str, tmp_path: Path
) -> None:
    (tmp_path / "address").write_text(secret_database + "\n", encoding="utf-8")
    (tmp_path / "nobody-there").write_text(re.sub(r":\d+/", ":1/", secret_database), encoding="utf-8")
    by_variable = {**of(f"env:{SECRET}"), "endpoint": "secret"}
    by_file = {**by_variable, "address": f"file:{tmp_path / 'address'}"}
    for number, store in enumerate((by_variable, by_file)):
        numbers = {"first": number * 200, "end": (number + 1) * 200, "tasks": 4}
        assert driver.run(f"{JOBS}:schedule_numbers", **numbers, store=store, now=NOW)["accepted"] == 200
    assert driver.run(f"{JOBS}:audit_store", store=by_variable, now=NOW)["counts"]["pending"] == 400
    plan = driver.run(f"{JOBS}:plan_of_scan", store=by_variable)
    with pytest.raises(JobFailed) as failed:
        driver.run(f"{JOBS}:fail_in_a_task", address=f"file:{tmp_path / 'nobody-there'}")

    shown = {"plan": plan, "error": str(failed.value), "events": events(cluster), "logs": logs(cluster)}
    shown["command lines"] = command_lines(cluster)
    web = driver.run(f"{JOBS}:web_url")
    shown |= pages(web) | pages(cluster.web_url)
    # What is searched is really there.
    assert "MapInArrow" in plan
    assert "SparkListenerTaskEnd" in shown["events"]
    assert "StoreUnreachable" in shown["error"]
    assert "StoreUnreachable" in shown["logs"]
    assert "CoarseGrainedExecutorBackend" in shown["command lines"]
    assert "spark.speculation" in shown[f"{web}/environment/"]
    assert any("SQL/execution" in url for url in shown)
    assert [place for place, text in shown.items() if PASSWORD in text] == []
