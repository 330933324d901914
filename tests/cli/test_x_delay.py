"""``postdate run`` in place of the delayed-message plugin: a real service, pika, and the commands of an operator."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pika
import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from psycopg import sql
from tests.rabbitmq_subjects import channel_of


@dataclass
class Site:
    """An exchange of this test's own, named by settings in the environment."""

    name: str
    channel: BlockingChannel

    @property
    def orders(self) -> str:
        return f"{self.name}.orders"

    def publish(self, body: bytes, **headers: str | int) -> None:
        self.channel.basic_publish(
            self.name,
            self.orders,
            body,
            pika.BasicProperties(
                "application/json", headers={name.replace("_", "-"): headers[name] for name in headers}
            ),
        )

    def arrived(self) -> bytes | None:
        return self.channel.basic_get(self.orders, auto_ack=True)[2]


@pytest.fixture(params=["sqlite", "postgres"])
def site(request, rabbitmq_url, monkeypatch) -> Iterator[Site]:
    name = f"cli-x-{uuid.uuid4().hex[:12]}"
    variables = {
        "ENDPOINT__NAME": name,
        "ENDPOINT__ERROR_QUEUE": f"{name}.error",
        "STORE__ADDRESS": "sqlite:///postdate.db",
        "TRANSPORT__ADDRESS": rabbitmq_url,
        "INTAKE__EXCHANGE": name,
        "QUEUES__CREATE": f"{name}.orders",
    }
    url = request.getfixturevalue("postgres_url")
    if request.param == "postgres":
        variables |= {"STORE__ADDRESS": url, "STORE__SCHEMA": name}
    for variable, value in variables.items():
        monkeypatch.setenv(f"POSTDATE_{variable}", value)
    with channel_of(rabbitmq_url) as channel:
        yield Site(name, channel)
        for queue in ("timeouts", "error", "orders", "intake", "intake.expired"):
            channel.queue_delete(f"{name}.{queue}")
        for exchange in (name, f"{name}.due", f"{name}.intake.expired"):
            channel.exchange_delete(exchange)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


def waiting(cli) -> list[str]:
    return [each["message_id"] for each in cli.ok("messages", "list", "--json").json["messages"]]


def test_the_service_delays_what_pika_publishes(cli, site, service, eventually):
    running = service()
    eventually(lambda: f"published to exchange {site.name}" in running.log, "it says what it takes in")
    site.publish(b'{"id": 1}', x_delay=500, number=7)
    received: list[bytes] = []
    eventually(lambda: received.append(site.arrived() or b"") or received[-1], "the message arrives")
    assert received[-1] == b'{"id": 1}'
    running.process.terminate()
    assert running.end() == 0
    site.publish(b"while nobody runs", x_delay=1)
    service()
    eventually(lambda: received.append(site.arrived() or b"") or received[-1], "the queue has kept it")
    assert received[-1] == b"while nobody runs"


def test_what_waits_is_seen_and_changed_by_an_operator(cli, site, service, eventually):
    service()
    for number in range(3):
        site.publish(b'{"id": 42}', x_delay=2**40 + number, x_delay_id=f"m{number}", total=3)
    eventually(lambda: len(waiting(cli)) == 3, "all wait")
    assert waiting(cli) == ["m0", "m1", "m2"]
    (place,) = cli.ok("messages", "show", "m0", "--json").json["places"]
    assert place["body"]["text"] == '{"id": 42}'
    assert place["queue"] == f"exchange-or-queue:{site.name}.due/{site.orders}"
    shown = {"amqp.content_type": "application/json", "amqp.routing_key": site.orders, "amqp.exchange": site.name}
    assert place["headers"].items() >= {**shown, "total": "3", "x-delay": str(2**40)}.items()
    explained = cli.ok("messages", "explain", "m0", "--json").json
    assert explained["state"] == "waiting", explained
    cli.ok("messages", "cancel", "m0")
    cli.ok("messages", "reschedule", "m1", "--delay", "1ms")
    eventually(site.arrived, "what was brought forward arrives")
    assert waiting(cli) == ["m2"]
    history = cli.ok("messages", "show", "m1", "--json").json["history"]
    assert [event["what"] for event in history][-1] == "delivered"


def test_setup_creates_all_of_it_and_none_if_so_set(cli, site, monkeypatch):
    assert cli.ok("setup", "--json").json["exchange"] == site.name
    assert cli.ok("setup", "--json").json["exchange"] == site.name
    site.channel.exchange_declare(site.name, passive=True)
    site.channel.queue_declare(f"{site.name}.intake", passive=True)
    monkeypatch.setenv("POSTDATE_INTAKE__EXCHANGE", "")
    assert cli.ok("setup", "--json").json["exchange"] is None


def test_a_broker_that_still_has_the_plugins_exchange_says_what_to_do(cli, site):
    site.channel.exchange_declare(site.name, "direct", durable=True)
    ran = cli("setup")
    assert ran.status != 0
    assert "delete it if the plugin declared it" in ran.err
