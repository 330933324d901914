"""``postdate bench``, small, on every store and every queue; how fast is no matter here, what arrives is."""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime

import pika
import psycopg
import pytest
from pika.exceptions import ChannelClosedByBroker
from redis import Redis
from tests.cli.conftest import Ran
from tests.cli.test_benchmarks import names_in

from postdate.cli.bench import messages, places
from postdate.cli.bench.messages import id_of, lateness_of, message_of, percentiles

RUN = "0123456789ab"
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)
_SERVERS = {"postgres": "postgres_url", "mariadb": "mariadb_url", "rabbitmq": "rabbitmq_url", "redis": "redis_url"}


@pytest.fixture
def measure(cli, request, monkeypatch):
    """Return a function that runs a benchmark on a store and queues, and returns what it printed."""

    def run(store, transport, name, *arguments) -> Ran:
        for kind in {store, transport} & _SERVERS.keys():
            monkeypatch.setenv(f"POSTDATE_{kind.upper()}_URL", request.getfixturevalue(_SERVERS[kind]))
        if "azure" in f"{store} {transport}":
            monkeypatch.setenv("POSTDATE_AZURITE_CONNECTION", request.getfixturevalue("azurite_connection"))
        queues = ["--transport", transport] if transport else []
        return cli("bench", name, "--store", store, *queues, "--json", *arguments)

    return run


@pytest.mark.parametrize(
    ("store", "transport"),
    [
        ("sqlite", None),
        ("postgres", None),
        ("postgres", "rabbitmq"),
        ("mariadb", "rabbitmq"),
        ("redis", None),
        ("azure-table", None),
        ("sqlite", "azure-queues"),
    ],
)
def test_due_messages_are_delivered(measure, store, transport):
    ran = measure(store, transport, "drain", "--n", "120")
    assert ran.status == 0, ran
    figures = ran.json
    assert list(figures) == [
        *("benchmark", "n", "rate", "lost", "duplicated", "early", "cpu_s", "cpu_us_per_message", "fill_s", "servers"),
    ]
    assert (figures["benchmark"], figures["n"]) == ("drain", 120)
    assert (figures["lost"], figures["duplicated"], figures["early"]) == (0, 0, 0)
    assert figures["rate"] > 0
    assert figures["cpu_us_per_message"] == pytest.approx(figures["cpu_s"] / 120 * 1e6, rel=0.01, abs=5)
    assert store in figures["servers"]
    assert all("version" in facts for name, facts in figures["servers"].items() if name != "sqlite")


@pytest.mark.parametrize(
    ("store", "transport"),
    [("sqlite", None), ("postgres", None), ("mariadb", "local"), ("redis", None), ("azure-table", None)],
)
def test_messages_are_stored_in_bulk(measure, store, transport):
    ran = measure(store, transport, "schedule", "--n", "120", "--batch", "50")
    assert ran.status == 0, ran
    assert list(ran.json) == [
        *("benchmark", "n", "rate", "lost", "duplicated", "cpu_s", "cpu_us_per_message", "servers"),
    ]
    assert (ran.json["lost"], ran.json["rate"] > 0) == (0, True)


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_lateness_is_from_due_to_delivered(measure, store):
    ran = measure(store, None, "lateness", "--rate", "50", "--seconds", "1")
    assert ran.status == 0, ran
    figures = ran.json
    assert (figures["n"], figures["lost"], figures["duplicated"], figures["early"]) == (50, 0, 0, 0)
    assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert "stored_when_due" in figures


def test_a_queue_of_the_wanted_type_is_measured(measure):
    for queue_type in ("quorum", "classic"):
        ran = measure("sqlite", "rabbitmq", "drain", "--n", "20", "--queue-type", queue_type)
        assert ran.json["servers"]["rabbitmq"]["queue_type"] == queue_type


def test_a_person_reads_a_name_and_a_figure_a_line(cli):
    lines = cli.ok("bench", "drain", "--n", "20").out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [
        *("benchmark", "n", "rate", "lost", "duplicated", "early"),
        *("cpu_s", "cpu_us_per_message"),
        "fill_s",
        "sqlite",
    ]


@pytest.mark.parametrize(
    ("arrivals", "figures"),
    [
        (lambda ids: ids, (0, 0, 0)),
        (lambda ids: ids[1:], (1, 0, 0)),
        (lambda ids: [*ids, *ids[:2]], (0, 2, 0)),
        (lambda ids: [*ids, id_of(99, RUN)], (0, 0, 1)),
    ],
    ids=["each once", "one lost", "two doubled", "one of nobody"],
)
def test_a_promise_that_is_not_kept_is_counted(cli, monkeypatch, arrivals, figures):
    received_ids = messages.receive_ids

    async def received(*arguments):
        return arrivals(await received_ids(*arguments))

    monkeypatch.setattr(messages, "receive_ids", received)
    ran = cli("bench", "drain", "--n", "20", "--json")
    assert (ran.json["lost"], ran.json["duplicated"], ran.json["early"]) == figures
    assert ran.status == (1 if any(figures) else 0)


def test_deliveries_that_do_not_come_end_a_run(cli, monkeypatch):
    monkeypatch.setattr(messages, "STUCK_SECONDS", 0.2)
    monkeypatch.setattr(messages.Deliveries, "add_deliveries", lambda *_: None)
    ran = cli("bench", "drain", "--n", "20", "--json")
    assert ran.status == 1
    assert "nothing was delivered for" in ran.err


# --- whose messages ---------------------------------------------------------------------------------------------------


def test_messages_of_the_user_stay_where_they_are(cli, own_folder):
    file = own_folder / "orders.db"
    cli.ok("setup", "--queue", "orders", "--store", f"sqlite:///{file}")
    cli.ok("send", "orders", "mine", "--delay", "1ms", "--id", "m1", "--store", f"sqlite:///{file}")
    cli.ok("bench", "drain", "--n", "20", "--store", f"sqlite:///{file}")
    listed = cli.ok("messages", "list", "--json", "--store", f"sqlite:///{file}").json
    assert [each["message_id"] for each in listed["messages"]] == ["m1"]
    assert not list(own_folder.glob("postdate-bench-*")), "the file of the run is gone"


def test_messages_of_the_user_stay_in_their_schema(cli, postgres_url):
    settings = ["--store", postgres_url]
    try:
        cli.ok("setup", "--queue", "orders", *settings)
        cli.ok("send", "orders", "mine", "--delay", "1ms", "--id", "bench-m1", *settings)
        cli.ok("bench", "drain", "--n", "20", *settings)
        listed = cli.ok("messages", "list", "--json", *settings).json
        assert "bench-m1" in [each["message_id"] for each in listed["messages"]]
    finally:
        cli.ok("messages", "cancel", "bench-m1", *settings)


# --- nothing is left --------------------------------------------------------------------------------------------------


def schemas(url):
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'postdate_bench_%'")
        return {name for (name,) in rows}


@pytest.fixture
def fixed_run(monkeypatch):
    """Give all runs of this process one name, and return it."""
    name = os.urandom(6).hex()
    monkeypatch.setattr(places.secrets, "token_hex", lambda _bytes: name)
    return name


def test_nothing_is_left_on_servers(measure, fixed_run, postgres_url, redis_url, azurite_connection, eventually):
    for store, transport in (("postgres", "rabbitmq"), ("redis", None), ("azure-table", None)):
        assert measure(store, transport, "drain", "--n", "20").status == 0
    assert f"postdate_bench_{fixed_run}" not in schemas(postgres_url)
    with Redis.from_url(redis_url) as client:
        assert not list(client.scan_iter(match=f"*{fixed_run}*"))
    eventually(lambda: not any(fixed_run in name for name in names_in(azurite_connection)), "nothing is left there")


def test_queues_are_deleted_on_rabbitmq(measure, fixed_run, rabbitmq_url):
    assert measure("sqlite", "rabbitmq", "drain", "--n", "20").status == 0
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq_url))
    for queue in places.queue_names(fixed_run):
        with pytest.raises(ChannelClosedByBroker, match="no queue"):
            connection.channel().queue_declare(queue, passive=True)
    connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(postgres_url, own_folder, number, eventually):
    folder = own_folder / "measured"
    folder.mkdir()
    command = [sys.executable, "-m", "postdate.cli", "bench", "lateness", "--store", postgres_url, "--folder", folder]
    before = schemas(postgres_url)
    with (own_folder / "log").open("wb") as log:
        running = subprocess.Popen([*command, "--seconds", "600"], stdout=log, stderr=log)
    eventually(lambda: b"delivering" in (own_folder / "log").read_bytes(), "messages flow")
    (made,) = schemas(postgres_url) - before
    running.send_signal(number)
    assert running.wait(60) == 130, (own_folder / "log").read_text()
    assert made not in schemas(postgres_url)
    assert not list(folder.iterdir())


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_the_help_names_the_place_of_all_other_measurements(cli):
    assert "python -m benchmarks" in " ".join(cli.ok("bench", "--help").out.split())


@pytest.mark.parametrize(
    ("option", "address"),
    [
        ("--store", "postgresql://someone:secret@127.0.0.1:1/nowhere"),
        ("--store", "mariadb://someone:secret@127.0.0.1:1/nowhere"),
        ("--store", "redis://someone:secret@127.0.0.1:1/0"),
        ("--transport", "amqp://someone:secret@127.0.0.1:1/"),
    ],
)
def test_a_server_that_does_not_answer_is_named_without_its_password(cli, option, address):
    queues = ["--transport", "local"] if option == "--store" else []
    ran = cli("bench", "drain", option, address, *queues)
    assert ran.status == 3
    assert "127.0.0.1:1" in ran.err
    assert "secret" not in ran.err


def test_an_account_that_does_not_answer_is_named_without_its_key(cli):
    key = "c2VjcmV0LWtleQ=="
    address = f"azure-table://someone:{key}@127.0.0.1:1/someone?protocol=http&queues=127.0.0.1:1&blobs=127.0.0.1:1"
    ran = cli("bench", "drain", "--store", address)
    assert ran.status == 3
    assert "127.0.0.1:1" in ran.err
    assert key not in ran.err


def test_a_role_that_may_make_no_schema_is_told(cli, postgres_url):
    role = f"postdate_bench_{os.urandom(4).hex()}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'p'".encode())
        try:
            address = postgres_url.replace(f"//{connection.info.user}", f"//{role}:p", 1)
            ran = cli("bench", "drain", "--store", address)
        finally:
            connection.execute(f"DROP ROLE {role}".encode())
    assert ran.status == 2, ran
    assert "permission denied" in ran.err


# --- what the figures are made of -------------------------------------------------------------------------------------


def test_ids_ascend_with_their_numbers():
    ids = [id_of(number, RUN) for number in (0, 9, 10, 255, 65_535, 65_536, 1 << 40)]
    assert ids == sorted(ids)


def test_messages_have_the_size_of_the_facts():
    message = message_of(0, RUN, "orders", NOON)
    assert 180 <= sum(len(key) + len(value) for key, value in message.headers.items()) <= 220
    assert len(message.body) == 300


def test_lateness_is_that_of_the_batch_in_which_a_message_was_delivered():
    assert lateness_of([13.0, 10.0, 10.5], [(11.0, 2), (13.5, 1)]) == [1.0, 0.5, 0.5]


def test_percentiles():
    assert percentiles(each / 1_000 for each in range(100)) == {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 99}
    assert set(percentiles([0.002]).values()) == {2}
    assert set(percentiles([]).values()) == {0}
