"""Every benchmark runs, small, on every plant; how fast is no matter here, what arrives is."""

import itertools
import os
import signal
import subprocess
import sys

import pytest
from azure.data.tables import TableServiceClient
from azure.storage.blob import BlobServiceClient
from azure.storage.queue import QueueServiceClient

from postdate.bench.plants import STORES
from postdate.bench.runs import handling
from postdate.bench.workload import Ping

PLANTS = ("sqlite-local", "sqlite-rabbitmq", "postgres-postgres", "postgres-rabbitmq")
SAME_DATABASE = ("sqlite-local", "postgres-postgres")
_AZURE = {"azure": "azure-table"}
_SERVERS = {"postgres": "postgres_url", "mariadb": "mariadb_url", "rabbitmq": "rabbitmq_url", "redis": "redis_url"}


@pytest.fixture
def bench(cli, request, monkeypatch):
    """Return a function that runs a benchmark on a plant and returns what it printed."""

    def run(plant, *arguments):
        store, transport = plant.split("-")
        for kind in {store, transport} & _SERVERS.keys():
            monkeypatch.setenv(f"POSTDATE_{kind.upper()}_URL", request.getfixturevalue(_SERVERS[kind]))
        if "azure" in plant:
            monkeypatch.setenv("POSTDATE_AZURITE_CONNECTION", request.getfixturevalue("azurite_connection"))
        store, transport = _AZURE.get(store, store), {"azure": "azure-queues"}.get(transport, transport)
        name, *rest = arguments
        return cli.ok("bench", name, "--store", store, "--transport", transport, "--json", *rest).json

    return run


def nothing_is_lost_doubled_or_early(found):
    return (found["lost"], found["duplicated"], found["early"]) == (0, 0, 0)


@pytest.mark.parametrize("plant", [*PLANTS, "mariadb-rabbitmq", "redis-redis"])
def test_a_drain_delivers_everything_beside_its_limit(bench, plant):
    found = bench(plant, "drain", "--n", "500")
    assert found["benchmark"] == "drain"
    assert nothing_is_lost_doubled_or_early(found)
    assert found["rate"] > 0
    assert found["limit"] > 0
    assert found["ratio"] == pytest.approx(found["rate"] / found["limit"], abs=0.01)


@pytest.mark.parametrize("plant", SAME_DATABASE)
def test_two_services_share_a_drain(bench, plant):
    found = bench(plant, "drain", "--n", "5000", "--services", "2")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["services"] == 2
    assert found["of_one"] > 0


@pytest.mark.parametrize("plant", SAME_DATABASE)
def test_a_drain_beside_a_writer_says_how_long_its_stores_took(bench, plant):
    found = bench(plant, "drain", "--n", "500", "--beside-writer")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["stores_per_s"] > 0


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_queue_of_the_wanted_type_is_measured(bench, queue_type):
    found = bench("postgres-rabbitmq", "drain", "--n", "500", "--queue-type", queue_type)
    assert found["servers"]["rabbitmq"]["queue_type"] == queue_type


@pytest.mark.parametrize("plant", SAME_DATABASE)
def test_what_is_not_due_stays_in_the_backlog(bench, plant):
    found = bench(plant, "backlog", "--n", "500", "--pending", "2000")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["pending"] == 2000


@pytest.mark.parametrize(
    ("plant", "stored_by"),
    [*((plant, "before") for plant in PLANTS), *itertools.product(SAME_DATABASE, ("service", "other"))],
)
def test_lateness_stands_beside_its_floor(bench, plant, stored_by):
    found = bench(plant, "lateness", "--rate", "50", "--seconds", "1", "--stored-by", stored_by)
    assert nothing_is_lost_doubled_or_early(found)
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["floor_p99_ms"] > 0


@pytest.mark.parametrize("plant", SAME_DATABASE)
def test_another_process_receives_what_is_delivered(bench, plant):
    found = bench(plant, "lateness", "--rate", "50", "--seconds", "1", "--receiver")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["received_p50_ms"] > 0


@pytest.mark.parametrize("plant", PLANTS)
def test_a_herd_goes_at_its_instant(bench, plant):
    found = bench(plant, "herd", "--n", "500")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["last_after_s"] > 0
    assert found["times_limit"] > 0


@pytest.mark.parametrize("plant", PLANTS)
def test_what_flows_is_measured_in_tenths(bench, plant):
    found = bench(plant, "churn", "--n", "5000", "--pending", "500", "--batch", "100")
    assert nothing_is_lost_doubled_or_early(found)
    assert len(found["tenths"]) == 10
    assert found["last_by_first"] > 0


def test_a_forgotten_transaction_may_hold_a_snapshot_meanwhile(bench):
    found = bench("postgres-postgres", "churn", "--n", "5000", "--pending", "500", "--idle-transaction")
    assert nothing_is_lost_doubled_or_early(found)


@pytest.mark.parametrize("plant", [*SAME_DATABASE, "mariadb-rabbitmq"])
def test_storing_in_bulk_stands_beside_bare_rows(bench, plant):
    found = bench(plant, "schedule", "--n", "500", "--batch", "100")
    assert found["lost"] == 0
    assert found["ratio"] > 0


@pytest.mark.parametrize("plant", ["sqlite-local", "sqlite-postgres"])
def test_an_endpoint_handles_everything_beside_the_raw_limit(bench, plant):
    found = bench(plant, "handle", "--n", "300", "--concurrency", "20")
    assert found["benchmark"] == "handle"
    assert (found["lost"], found["duplicated"], found["concurrency"]) == (0, 0, 20)
    assert found["ratio"] == pytest.approx(found["rate"] / found["limit"], abs=0.01)
    assert list(found["servers"]) == [plant.split("-")[1].replace("local", "sqlite")]


def test_a_message_that_its_handler_never_saw_or_saw_twice_is_counted(cli, monkeypatch):
    monkeypatch.setattr(handling, "Ping", lambda number: Ping(6 if number == 5 else number))
    ran = cli("bench", "handle", "--n", "20", "--json")
    assert ran.status == 1
    assert (ran.json["lost"], ran.json["duplicated"]) == (1, 1)


def test_handling_is_measured_only_where_the_limit_of_receiving_is_known(cli, monkeypatch, rabbitmq_url):
    monkeypatch.setenv("POSTDATE_RABBITMQ_URL", rabbitmq_url)
    refused = cli("bench", "handle", "--n", "10", "--transport", "rabbitmq")
    assert refused.status == 2
    assert "known for local and postgres only" in refused.err


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


def test_a_table_is_drained_into_a_queue_of_the_account_beside_the_plain_sdk_and_nothing_is_left(
    bench, azurite_connection
):
    before = names_in(azurite_connection)
    found = bench("azure-azure", "drain", "--n", "120")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["ratio"] == pytest.approx(found["rate"] / found["limit"], abs=0.01)
    assert list(found["servers"]) == ["azure-table"]
    assert names_in(azurite_connection) <= before


@pytest.mark.parametrize("stored_by", ["service", "other"])
def test_lateness_of_a_table_stands_beside_that_of_bare_sends(bench, stored_by):
    found = bench("azure-azure", "lateness", "--rate", "5", "--seconds", "1", "--stored-by", stored_by)
    assert nothing_is_lost_doubled_or_early(found)
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["floor_p99_ms"] > 0


def test_another_store_drains_into_a_queue_of_an_account(bench):
    found = bench("sqlite-azure", "drain", "--n", "50")
    assert nothing_is_lost_doubled_or_early(found)
    assert found["limit"] > 0


def test_storing_in_a_table_stands_beside_bare_entities(bench):
    found = bench("azure-azure", "schedule", "--n", "200", "--batch", "100")
    assert found["lost"] == 0
    assert found["ratio"] > 0


def test_an_account_that_does_not_answer_is_named_without_its_key(cli):
    key = "c2VjcmV0LWtleQ=="
    address = f"azure-table://someone:{key}@127.0.0.1:1/someone?protocol=http&queues=127.0.0.1:1&blobs=127.0.0.1:1"
    ran = cli("bench", "drain", "--store", "azure-table", "--store-address", address)
    assert ran.status == 3
    assert "127.0.0.1:1" in ran.err
    assert key not in ran.err


# --- wrong use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["drain", "--store", "oracle"],
            f"--store must be one of {', '.join(STORES)}, not 'oracle'",
        ),
        (["drain", "--transport", "carrier-pigeon"], "--transport must be one of local, postgres, rabbitmq"),
        (["drain", "--queue-type", "stack"], "--queue-type must be one of quorum, classic, not 'stack'"),
        (["drain", "--synchronous", "off"], "--synchronous must be one of full, normal, not 'off'"),
        (["drain", "--folder", "nowhere"], "there is no folder nowhere"),
        (["drain", "--store", "postgres"], "set POSTDATE_POSTGRES_URL, or name one with --store-address"),
        (["drain", "--transport", "rabbitmq"], "set POSTDATE_RABBITMQ_URL, or name one with --transport-address"),
        (["drain", "--store", "azure-table"], "set POSTDATE_AZURITE_CONNECTION, or name one with --store-address"),
        (["churn", "--idle-transaction", "--n", "1", "--pending", "1"], "--idle-transaction needs a store that keeps"),
        (["lateness", "--stored-by", "nobody"], "--stored-by must be one of service, other, before, not 'nobody'"),
    ],
)
def test_what_cannot_be_measured_is_refused(cli, arguments, said):
    ran = cli("bench", *arguments)
    assert ran.status == 2
    assert said in ran.err


@pytest.mark.parametrize(
    ("option", "address", "kinds"),
    [
        ("--store-address", "postgresql://someone:secret@127.0.0.1:1/nowhere", ["--store", "postgres"]),
        ("--store-address", "mariadb://someone:secret@127.0.0.1:1/nowhere", ["--store", "mariadb"]),
        ("--transport-address", "amqp://someone:secret@127.0.0.1:1/", ["--transport", "rabbitmq"]),
    ],
)
def test_a_server_that_does_not_answer_is_named_without_its_password(cli, option, address, kinds):
    ran = cli("bench", "drain", *kinds, option, address, "--transport-address", "amqp://someone:secret@127.0.0.1:1/")
    assert ran.status == 3
    assert "127.0.0.1:1" in ran.err
    assert "secret" not in ran.err


# --- nothing is left ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_on_the_server(postgres_url, own_folder, number, eventually):
    import psycopg

    command = [
        sys.executable,
        "-m",
        "postdate.cli",
        "bench",
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
            running = subprocess.Popen([*command, "--pending", "1", "--json"], env=environment, stdout=log, stderr=log)
        eventually(lambda: list(own_folder.glob("*/taken.tally")), "messages flow", seconds=120)
        (made,) = schemas() - before
        running.send_signal(number)
        assert running.wait(120) == 130
        eventually(lambda: made not in schemas(), "the schema is gone", seconds=60)
    assert list(own_folder.iterdir()) == [own_folder / "log"]
