"""The command line on real servers: the same commands, the same promises, and honest words where less can be seen."""

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pika
import psycopg
import pymysql
import pytest
from psycopg import sql

from postdate.config import load_settings
from postdate.messages import DelayedMessage
from postdate.pipeline.stores import StoreSpec, open_spec

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@dataclass
class Site:
    """A store and queues of this test's own, named by settings in the environment."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def orders(self) -> str:
        return f"{self.name}.orders"

    @property
    def queues(self) -> list[str]:
        return [f"{self.name}.timeouts", f"{self.name}.error", self.orders]


def _drop_schema(url: str, schema: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


def _delete_queues(url: str, queues: list[str]) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    for queue in queues:
        channel.queue_delete(queue)
    connection.close()


def _drop_database(url: str, name: str) -> None:
    place = urlsplit(url)
    connection = pymysql.connect(
        host=place.hostname, port=place.port or 3306, user=place.username, password=place.password or ""
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS `{name}`")


@pytest.fixture(params=["postgres", "postgres and rabbitmq", "sqlite and rabbitmq", "mariadb and rabbitmq"])
def site(request, postgres_url, mariadb_url, rabbitmq_url, monkeypatch) -> Iterator[Site]:
    """Each combination, empty."""
    site = Site(f"cli-{uuid.uuid4().hex[:12]}")
    variables = {"ENDPOINT__NAME": site.name, "ENDPOINT__ERROR_QUEUE": f"{site.name}.error"}
    if "postgres" in request.param:
        variables |= {"STORE__ADDRESS": postgres_url, "STORE__SCHEMA": site.name}
    if "mariadb" in request.param:
        variables |= {"STORE__ADDRESS": mariadb_url, "STORE__SCHEMA": site.name}
    if "sqlite" in request.param:
        variables |= {"STORE__ADDRESS": "sqlite:///postdate.db"}
    if "rabbitmq" in request.param:
        variables |= {"TRANSPORT__ADDRESS": rabbitmq_url}
    for name, value in variables.items():
        monkeypatch.setenv(f"POSTDATE_{name}", value)
    site.variables = {f"POSTDATE_{name}": value for name, value in variables.items()}
    yield site
    if "postgres" in request.param:
        _drop_schema(postgres_url, site.name)
    if "mariadb" in request.param:
        _drop_database(mariadb_url, site.name)
    if "rabbitmq" in request.param:
        _delete_queues(rabbitmq_url, site.queues)


def kinds(cli, message_id: str) -> list[str]:
    """What was recorded of a message, in order."""
    shown = cli("messages", "show", message_id, "--json")
    return [] if shown.status else [event["what"] for event in shown.json["history"]]


def test_queues_and_tables_are_created_and_left_alone_the_second_time(cli, site):
    for _ in range(2):
        done = cli.ok("setup", "--queue", site.orders, "--json").json
        assert done["queues"] == site.queues


def test_what_is_due_is_delivered_by_the_service(cli, site, service, eventually):
    cli.ok("setup", "--queue", site.orders)
    running = service("--no-setup")
    sent = cli.ok("send", site.orders, '{"id": 1}', "--delay", "1s", "--id", "m1", "--json").json
    assert sent["due"] is not None
    eventually(lambda: "delivered" in kinds(cli, "m1"), "delivered")
    assert kinds(cli, "m1") == ["scheduled", "delivered"]
    explained = cli.ok("messages", "explain", "m1", "--json").json
    assert explained["state"] in {"in_queue", "delivered"}
    running.process.terminate()
    assert running.end() == 0


def test_the_service_creates_what_is_missing(cli, site, service, eventually, monkeypatch):
    monkeypatch.setenv("POSTDATE_QUEUES__CREATE", site.orders)
    service()
    cli.ok("send", site.orders, "x")
    cli.ok("send", site.orders, "x", "--delay", "1s", "--id", "m1")
    eventually(lambda: "delivered" in kinds(cli, "m1"), "delivered")


def test_what_waits_can_be_listed_changed_and_cancelled(cli, site):
    cli.ok("setup", "--queue", site.orders)
    with open_spec(StoreSpec.of(load_settings(None, site.variables))) as store:
        store.store_many([DelayedMessage(f"m{n}", NOW.replace(year=2126 + n), site.orders) for n in range(3)], NOW)
    listed = cli.ok("messages", "list", "--json").json["messages"]
    assert [each["message_id"] for each in listed] == ["m0", "m1", "m2"]
    cli.ok("messages", "reschedule", "m2", "--at", "2100-01-01T00:00Z")
    cli.ok("messages", "cancel", "m0")
    listed = cli.ok("messages", "list", "--json").json["messages"]
    assert [each["message_id"] for each in listed] == ["m2", "m1"]
    assert cli.ok("messages", "stats", "--json").json["pending"] == 2
    assert cli.ok("messages", "explain", "m1", "--json").json["state"] == "waiting"
    assert cli("messages", "explain", "nonsense", "--json").status == 1


def test_what_failed_is_returned(cli, site, service, eventually, monkeypatch):
    monkeypatch.setenv("POSTDATE_DELAYED_DELIVERY__MISSING_QUEUE_WAIT", "0s")
    cli.ok("setup")
    running = service()
    cli.ok("send", site.orders, "x", "--delay", "1s", "--id", "m1")
    eventually(lambda: "failed" in kinds(cli, "m1"), "failed, for its queue is missing")
    running.process.terminate()
    assert running.end() == 0
    cli.ok("setup", "--queue", site.orders)
    returned = cli.ok("errors", "return", "--all", "--json").json["messages"]
    assert [(each["message_id"], each["done"]) for each in returned] == [("m1", True)]
    assert cli.ok("errors", "return", "--all", "--json").json["messages"] == []


def test_the_doctor_says_whether_all_is_well(cli, site):
    before = cli("doctor", "--json")
    assert before.status == 1, before.out
    assert any("postdate setup" in check["mend"] for check in before.json["checks"])
    cli.ok("setup", "--queue", site.orders)
    after = cli("doctor", "--json").json["checks"]
    # The servers of the tests may be set to lose what a power cut would lose.
    assert not [check for check in after if check["result"] == "fail" and check["name"] != "fsync"]


@pytest.mark.parametrize("site", ["sqlite and rabbitmq"], indirect=True)
def test_the_doctor_asks_a_broker_what_it_is_and_looks_for_the_queues_that_messages_wait_for(cli, site):
    missing, there, nowhere = f"{site.name}.missing", "exchange:amq.direct/key", f"exchange:{site.name}/key"
    cli.ok("setup", "--queue", site.orders)
    destinations = [site.orders, missing, there, nowhere]
    with open_spec(StoreSpec.of(load_settings(None, site.variables))) as store:
        later = NOW.replace(year=2126)
        store.store_many([DelayedMessage(f"m{n}", later, each) for n, each in enumerate(destinations)], NOW)
    checks = {check["name"]: check for check in cli("doctor", "--json").json["checks"]}
    assert checks["queue server"]["result"] == "ok"
    assert re.fullmatch(r"RabbitMQ \d+\.\d+\S* answers", checks["queue server"]["found"])
    assert checks["broker alarm"]["result"] == "ok"
    assert checks["queues"]["result"] == "ok"
    assert checks["destinations"]["result"] == "warn"
    said = checks["destinations"]["found"].partition(": ")[2]
    assert sorted(said.split(", ")) == sorted([missing, nowhere])


@pytest.mark.parametrize("site", ["sqlite and rabbitmq"], indirect=True)
def test_what_a_broker_does_not_offer_is_said_with_a_code_of_its_own(cli, site):
    cli.ok("setup")
    for command in (["errors", "list"], ["errors", "groups"]):
        ran = cli(*command)
        assert (ran.status, ran.out) == (2, "")
        assert "[not_supported]" in ran.err
        assert "cannot be browsed" in ran.err


def test_no_command_shows_a_password(cli, site, monkeypatch):
    for section in ("STORE", "TRANSPORT"):
        address = site.variables.get(f"POSTDATE_{section}__ADDRESS")
        if address is not None and "://" in address:
            _, _, place = address.rpartition("@")
            scheme = address.partition(":")[0]
            monkeypatch.setenv(f"POSTDATE_{section}__ADDRESS", f"{scheme}://nobody:s3cret@{place}")
    for command in (["doctor"], ["setup"], ["messages", "list"], ["config", "show"], ["doctor", "--json"]):
        ran = cli(*command)
        assert ran.status != 70, ran.err
        assert "s3cret" not in ran.out + ran.err


def test_a_server_that_is_not_there_is_said_to_be_unavailable(cli, monkeypatch):
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", "postgresql://me:s3cret@127.0.0.1:1/db")
    ran = cli("messages", "list")
    assert (ran.status, ran.out) == (3, "")
    assert "[store_unreachable]" in ran.err
    doctor = cli("doctor", "--json")
    assert doctor.status == 1
    assert "fail" in {check["result"] for check in json.loads(doctor.out)["checks"]}


# --- what does not work, and what to do --------------------------------------------------------------------------


def test_without_setup_the_service_does_not_start_where_nothing_was_set_up(cli, site):
    ran = cli("run", "--no-setup")
    assert ran.status == 3
    assert "[store_not_set_up]" in ran.err
    assert "delivering from" not in ran.err


CLOSED = "127.0.0.1:1"
FILE = ("--store", "sqlite:///a.db")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (("--store", f"postgresql://me@{CLOSED}/db"), "store.address, option --store"),
        (("--store", f"mariadb://me@{CLOSED}/db", "--transport", "local:///a.db"), "store.address, option --store"),
        (("--store", f"mssql://me@{CLOSED}/db", "--transport", "local:///a.db"), "store.address, option --store"),
        (("--store", f"redis://{CLOSED}/0", "--transport", "local:///a.db"), "store.address, option --store"),
        ((*FILE, "--transport", f"redis://{CLOSED}/0"), "transport.address, option --transport"),
        ((*FILE, "--transport", f"amqp://me@{CLOSED}/"), "transport.address, option --transport"),
        ((*FILE, "--transport", f"postgresql://me@{CLOSED}/db"), "transport.address, option --transport"),
    ],
)
def test_a_server_that_refuses_connections_is_known_at_once_with_its_setting(cli, own_folder, options, key):
    """Whatever ends a wait for an answer would say so, and give other advice."""
    ran = cli("setup", *options)
    assert (ran.status, ran.out) == (3, "")
    assert re.fullmatch(rf"postdate: error \[.*\]: .* \({key}\): is the server running there\? .*\n", ran.err), ran.err
    assert list(own_folder.iterdir()) == []


def test_what_a_redis_server_says_of_its_address_is_told_with_the_setting(cli, own_folder, redis_url):
    known = urlsplit(redis_url).netloc
    place = known.rpartition("@")[2]
    for options, key in (
        (("--store", "{}", "--transport", "local:///a.db"), "store.address, option --store"),
        ((*FILE, "--transport", "{}"), "transport.address, option --transport"),
    ):
        for address, status, said in (
            (f"redis://nobody:wrong@{place}/0", 3, "the server runs and refuses this login"),
            (f"redis://{known}/99999", 2, "correct the number of the database"),
        ):
            ran = cli("setup", *(each.format(address) for each in options))
            assert (ran.status, ran.out) == (status, ""), ran.err
            assert f"({key}): {said}" in ran.err
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("address", ["redis://host/first", "redis://host/0?prefx=a", "redis://host/0?ca=a.pem"])
def test_an_address_of_redis_that_cannot_be_is_told_with_the_setting(cli, own_folder, address):
    for option, key in (("--store", "store.address"), ("--transport", "transport.address")):
        other = ("--transport", "local:///a.db") if option == "--store" else FILE
        ran = cli("setup", option, address, *other)
        assert (ran.status, ran.out) == (2, "")
        assert f"{key} is '{address}' (option {option}): " in ran.err
        told = [check["found"] for check in cli("doctor", "--json", option, address, *other).json["checks"]]
        assert any(f"{key} is '{address}' (option {option}): " in each for each in told)


def test_what_the_server_does_not_know_is_a_wrong_setting(cli, own_folder, postgres_url, rabbitmq_url):
    host, role = urlsplit(postgres_url).netloc.rpartition("@")[2], urlsplit(postgres_url).username
    for options, said in (
        (("--store", f"postgresql://nobody_here@{host}/db"), "name a user that the server has"),
        (("--store", f"postgresql://{role}@{host}/no_such_database"), "create the database, or correct its name"),
        ((*FILE, "--transport", f"{rabbitmq_url.rstrip('/')}/no_such_vhost"), "create the virtual host, or correct"),
    ):
        ran = cli("setup", *options)
        assert (ran.status, ran.out) == (2, "")
        assert said in ran.err
    assert list(own_folder.iterdir()) == []


def test_the_doctor_tells_a_refused_login_from_a_server_that_is_down(cli, rabbitmq_url):
    place = rabbitmq_url.rpartition("@")[2]
    for address, said in (
        (f"amqp://nobody:wrong@{place}", "refuses this login"),
        (f"amqp://nobody:wrong@{CLOSED}/", "is the server running there?"),
    ):
        checks = cli("doctor", "--json", *FILE, "--transport", address).json["checks"]
        assert said in next(check["mend"] for check in checks if check["name"] == "queue server")
