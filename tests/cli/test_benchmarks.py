"""Every benchmark of ``python -m benchmarks`` runs, small, on every deployment; what arrives counts, not how fast."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from azure.data.tables import TableServiceClient
from azure.storage.blob import BlobServiceClient
from azure.storage.queue import QueueServiceClient
from benchmarks import runs
from benchmarks.__main__ import main
from benchmarks.deployment import Ping
from tests.cli.conftest import Ran

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ("sqlite-local", "sqlite-rabbitmq", "postgres-postgres", "postgres-rabbitmq")
SAME_DATABASE = ("sqlite-local", "postgres-postgres")
DRAIN = "test_a_drain_delivers_everything_beside_its_limit"
LATENESS = "test_lateness_stands_beside_its_floor"
_SERVERS = {"postgres": "postgres_url", "mariadb": "mariadb_url", "rabbitmq": "rabbitmq_url", "redis": "redis_url"}


def more(*proven_by: str) -> pytest.MarkDecorator:
    """Return the mark of what measures again, elsewhere or with more options, what the gate measures once."""
    proofs = [f"tests/cli/test_benchmarks.py::{test}" for test in proven_by]
    return pytest.mark.soak("one more measurement", part="bench", proven_by=proofs)


def measured_on(*deployments: str, in_gate: str) -> Callable[[Callable], Callable]:
    """Run a test on each of these deployments; in the gate on those that ``in_gate`` names."""

    def mark(test: Callable) -> Callable:
        marked = [
            each if each in in_gate.split() else pytest.param(each, marks=more(test.__name__)) for each in deployments
        ]
        return pytest.mark.parametrize("deployment", marked)(test)

    return mark


@pytest.fixture
def bench(capsys, request, monkeypatch):
    """Return a function that runs a benchmark on a deployment and returns what it printed."""

    def run(deployment, *arguments):
        store, transport = deployment.split("-")
        for kind in {store, transport} & _SERVERS.keys():
            monkeypatch.setenv(f"POSTDATE_{kind.upper()}_URL", request.getfixturevalue(_SERVERS[kind]))
        if "azure" in deployment:
            monkeypatch.setenv("POSTDATE_AZURITE_CONNECTION", request.getfixturevalue("azurite_connection"))
        store, transport = store.replace("azure", "azure-table"), transport.replace("azure", "azure-queues")
        name, *rest = arguments
        status = main([name, "--store", store, "--transport", transport, "--json", *rest])
        ran = Ran(status, *capsys.readouterr())
        assert ran.status == 0, ran
        return ran.json

    return run


def nothing_is_lost_doubled_or_early(found):
    return (found["lost"], found["duplicated"], found["early"]) == (0, 0, 0)


@measured_on(
    *DEPLOYMENTS,
    "mariadb-rabbitmq",
    "redis-redis",
    in_gate="sqlite-local mariadb-rabbitmq redis-redis",
)
def test_a_drain_delivers_everything_beside_its_limit(bench, deployment):
    found = bench(deployment, "drain", "--n", "500")
    assert found["benchmark"] == "drain"
    assert nothing_is_lost_doubled_or_early(found)
    assert found["rate"] > 0
    assert found["limit"] > 0
    assert found["ratio"] == pytest.approx(found["rate"] / found["limit"], abs=0.01)
    assert not any("limit" in facts for facts in found["servers"].values()), "each product has a limit of its own"


@measured_on(*SAME_DATABASE, in_gate="sqlite-local")
def test_two_services_share_a_drain(bench, deployment):
    found = bench(deployment, "drain", "--n", "5000", "--services", "2")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["services"] == 2
    assert found["of_one"] > 0


@measured_on(*SAME_DATABASE, in_gate="sqlite-local")
def test_a_drain_beside_a_writer_says_how_long_its_stores_took(bench, deployment):
    found = bench(deployment, "drain", "--n", "500", "--beside-writer")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["stores_per_s"] > 0


@pytest.mark.parametrize("queue_type", [pytest.param("quorum", marks=more(DRAIN)), "classic"])
def test_frames_go_to_a_queue_of_the_wanted_type(bench, queue_type):
    found = bench("postgres-rabbitmq", "drain", "--n", "500", "--queue-type", queue_type)
    assert found["servers"]["rabbitmq"]["queue_type"] == queue_type


@measured_on(*SAME_DATABASE, in_gate="sqlite-local")
def test_what_is_not_due_stays_in_the_backlog(bench, deployment):
    found = bench(deployment, "backlog", "--n", "500", "--pending", "2000")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["pending"] == 2000


@pytest.mark.parametrize(
    ("deployment", "stored_by"),
    [
        ("sqlite-local", "before"),
        *(
            pytest.param(*each, marks=more(LATENESS))
            for each in (
                *((deployment, "before") for deployment in DEPLOYMENTS if deployment != "sqlite-local"),
                *itertools.product(SAME_DATABASE, ("service", "other")),
            )
        ),
    ],
)
def test_lateness_stands_beside_its_floor(bench, deployment, stored_by):
    found = bench(deployment, "lateness", "--rate", "50", "--seconds", "1", "--stored-by", stored_by)
    assert nothing_is_lost_doubled_or_early(found)
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["floor_p99_ms"] > 0
    assert ("thread_floor_p99_ms" in found) == (deployment == "sqlite-local"), "the floor only sleeps"


@measured_on(*SAME_DATABASE, in_gate="sqlite-local")
def test_another_process_receives_what_is_delivered(bench, deployment):
    found = bench(deployment, "lateness", "--rate", "50", "--seconds", "1", "--receiver")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["received_p50_ms"] > 0


@measured_on(*DEPLOYMENTS, in_gate="sqlite-local")
def test_a_herd_goes_at_its_instant(bench, deployment):
    found = bench(deployment, "herd", "--n", "500")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["last_after_s"] > 0
    assert found["times_limit"] > 0


@measured_on(*DEPLOYMENTS, in_gate="sqlite-local")
def test_what_flows_is_measured_in_tenths(bench, deployment):
    found = bench(deployment, "churn", "--n", "5000", "--pending", "500", "--batch", "100")
    assert nothing_is_lost_doubled_or_early(found)
    assert len(found["tenths"]) == 10
    assert found["last_by_first"] > 0


def test_a_forgotten_transaction_may_hold_a_snapshot_meanwhile(bench):
    found = bench("postgres-postgres", "churn", "--n", "5000", "--pending", "500", "--idle-transaction")
    assert nothing_is_lost_doubled_or_early(found)


@pytest.mark.parametrize("deployment", [*SAME_DATABASE, "mariadb-rabbitmq"])
def test_storing_in_bulk_stands_beside_bare_rows(bench, deployment):
    found = bench(deployment, "schedule", "--n", "500", "--batch", "100")
    assert found["lost"] == 0
    assert found["ratio"] > 0


@measured_on("sqlite-local", "sqlite-postgres", in_gate="sqlite-local")
def test_an_endpoint_handles_everything_beside_the_raw_limit(bench, deployment):
    found = bench(deployment, "handle", "--n", "300", "--concurrency", "20")
    assert found["benchmark"] == "handle"
    assert (found["lost"], found["duplicated"], found["concurrency"]) == (0, 0, 20)
    assert found["ratio"] == pytest.approx(found["rate"] / found["limit"], abs=0.01)
    assert list(found["servers"]) == [deployment.split("-")[1].replace("local", "sqlite")]


def test_a_message_that_its_handler_never_saw_or_saw_twice_is_counted(capsys, monkeypatch):
    monkeypatch.setattr(runs, "Ping", lambda number: Ping(6 if number == 5 else number))
    ran = Ran(main(["handle", "--n", "20", "--json"]), *capsys.readouterr())
    assert ran.status == 1
    assert (ran.json["lost"], ran.json["duplicated"]) == (1, 1)


def test_handling_is_measured_only_where_the_limit_of_receiving_is_known(capsys, monkeypatch, rabbitmq_url):
    monkeypatch.setenv("POSTDATE_RABBITMQ_URL", rabbitmq_url)
    assert main(["handle", "--n", "10", "--transport", "rabbitmq"]) == 2
    assert "the limit of receiving is not known for rabbitmq" in capsys.readouterr().err


# --- Azure Storage -----------------------------------------------------------------------------------------------


def names_in(connection):
    """Return the names of all tables, queues and containers that benchmarks made."""
    with (
        TableServiceClient.from_connection_string(connection) as tables,
        QueueServiceClient.from_connection_string(connection) as queues,
        BlobServiceClient.from_connection_string(connection) as blobs,
    ):
        found = [each.name for each in (*tables.list_tables(), *queues.list_queues(), *blobs.list_containers())]
    return {name for name in found if name.replace("-", "").lower().removeprefix("records").startswith("postdatebench")}


@more("test_storing_in_a_table_stands_beside_bare_entities_and_leaves_nothing")
def test_a_table_is_drained_into_a_queue_of_the_account_beside_the_plain_sdk_and_nothing_is_left(
    bench, azurite_connection
):
    before = names_in(azurite_connection)
    found = bench("azure-azure", "drain", "--n", "120")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["ratio"] == pytest.approx(found["rate"] / found["limit"], abs=0.01)
    assert list(found["servers"]) == ["azure-table"]
    assert names_in(azurite_connection) <= before


@more(LATENESS)
@pytest.mark.parametrize("stored_by", ["service", "other"])
def test_lateness_of_a_table_stands_beside_that_of_bare_sends(bench, stored_by):
    found = bench("azure-azure", "lateness", "--rate", "5", "--seconds", "1", "--stored-by", stored_by)
    assert nothing_is_lost_doubled_or_early(found)
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["floor_p99_ms"] > 0


@more("test_storing_in_a_table_stands_beside_bare_entities_and_leaves_nothing")
def test_another_store_drains_into_a_queue_of_an_account(bench):
    found = bench("sqlite-azure", "drain", "--n", "50")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["limit"] > 0


def test_storing_in_a_table_stands_beside_bare_entities_and_leaves_nothing(bench, azurite_connection, eventually):
    before = names_in(azurite_connection)
    found = bench("azure-azure", "schedule", "--n", "200", "--batch", "100")
    assert found["lost"] == 0
    assert found["ratio"] > 0
    eventually(lambda: names_in(azurite_connection) <= before, "nothing is left, nor of others that run beside it")


# --- wrong use ---------------------------------------------------------------------------------------------------


def test_who_stores_is_named(capsys):
    assert main(["lateness", "--stored-by", "nobody"]) == 2
    assert "--stored-by must be one of service, other, before, not 'nobody'" in capsys.readouterr().err


def test_reading_in_bulk_is_measured_on_postgres_only(capsys):
    assert main(["pipeline", "--n", "1000"]) == 2
    assert "the limit of reading in bulk is known for postgres only, not for sqlite" in capsys.readouterr().err


def test_a_forgotten_transaction_is_held_in_postgres_only(capsys):
    assert main(["churn", "--idle-transaction", "--n", "1", "--pending", "1"]) == 2
    assert "--idle-transaction needs a store that keeps" in capsys.readouterr().err


# --- nothing is left ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=more("test_an_interrupt_leaves_nothing_on_the_server")),
        signal.SIGTERM,
    ],
)
def test_an_interrupt_leaves_nothing_on_the_server(postgres_url, own_folder, number, eventually):
    import psycopg

    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "churn",
        "--store",
        "postgres",
        "--folder",
        str(own_folder),
    ]
    environment = {**os.environ, "POSTDATE_POSTGRES_URL": postgres_url}
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def schemas():
            rows = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'postdate_bench_%'")
            return {name for (name,) in rows}

        before = schemas()
        with (own_folder / "log").open("wb") as log:
            running = subprocess.Popen(
                [*command, "--pending", "1", "--json"], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        eventually(lambda: list(own_folder.glob("*/taken.tally")), "messages flow")
        (made,) = schemas() - before
        running.send_signal(number)
        assert running.wait() == 130
        eventually(lambda: made not in schemas(), "the schema is gone")
    assert list(own_folder.iterdir()) == [own_folder / "log"]
