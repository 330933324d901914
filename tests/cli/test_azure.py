"""The command line on Azure Storage: a table, queues, a poison queue, and what can be done about what lies there."""

import base64
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from azure.storage.queue import QueueServiceClient
from tests.azure_store_subjects import drop_table

from postdate.backends.azure.table_names import default_table


class Site:
    """An endpoint of this test's own in the account, named by settings in the environment."""

    def __init__(self, connection: str, name: str) -> None:
        self.name, self.orders, self.nowhere, self.poison = name, f"{name}.orders", f"{name}.nowhere", f"{name}.poison"
        self.queues = QueueServiceClient.from_connection_string(connection)

    def in_queue(self, queue: str) -> list[dict[str, Any]]:
        """Return what the plain SDK sees in a queue."""
        seen = self.queues.get_queue_client(queue.replace(".", "-")).peek_messages(32)
        return [json.loads(base64.b64decode(message.content)) for message in seen]

    def drop(self) -> None:
        for queue in self.queues.list_queues(name_starts_with=self.name):
            self.queues.delete_queue(queue)
        self.queues.close()


@pytest.fixture
def site(azurite_connection: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(azurite_connection, f"cli-{uuid.uuid4().hex[:12]}")
    variables = {
        "ENDPOINT__NAME": site.name,
        "STORE__ADDRESS": "azure-table://?connection=env:AZURE_STORAGE_CONNECTION_STRING",
        "STORE__PAGE_SIZE": "20",
        "TRANSPORT__ADDRESS": "azure-queues://?connection=env:AZURE_STORAGE_CONNECTION_STRING",
        "DELAYED_DELIVERY__POISON_QUEUE": site.poison,
        "DELAYED_DELIVERY__ERRORS_RETURN_TO": "destination",
        "DELAYED_DELIVERY__MISSING_QUEUE_WAIT": "0s",
        "QUEUES__CREATE": site.orders,
    }
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite_connection)
    for name, value in variables.items():
        monkeypatch.setenv(f"POSTDATE_{name}", value)
    yield site
    site.drop()
    drop_table(azurite_connection, default_table(site.name))


def test_the_service_delivers_from_a_table_and_what_it_cannot_deliver_goes_to_the_poison_queue_and_back_row_86(
    cli, site: Site, service, eventually
) -> None:
    running = service()
    cli.ok("send", site.orders, '{"id": 1}', "--delay", "1s", "--id", "m1")
    cli.ok("send", site.nowhere, '{"id": 2}', "--delay", "1s", "--id", "m2")
    eventually(lambda: site.in_queue(site.orders), "the one is delivered")
    eventually(lambda: site.in_queue(site.poison), "the other is in the poison queue")
    (delivered,) = site.in_queue(site.orders)
    assert (delivered["Id"], base64.b64decode(delivered["Body"])) == ("m1", b'{"id": 1}')
    (failed,) = site.in_queue(site.poison)
    assert (failed["Id"], failed["Headers"]["NServiceBus.FailedQ"]) == ("m2", site.nowhere)
    eventually(lambda: cli("messages", "explain", "m2", "--json").json["state"] == "failed", "it is recorded")
    running.process.terminate()
    assert running.end() == 0

    stays = cli("errors", "return", "--all", "--queue", site.poison, "--json")
    assert stays.status == 1
    assert site.nowhere.replace(".", "-") in stays.json["messages"][0]["remark"]
    cli.ok("setup", "--queue", site.nowhere)
    (returned,) = cli.ok("errors", "return", "--all", "--queue", site.poison, "--json").json["messages"]
    assert (returned["message_id"], returned["done"], returned["queue"]) == ("m2", True, site.nowhere)
    assert [each["Id"] for each in site.in_queue(site.nowhere)] == ["m2"]
    assert site.in_queue(site.poison) == []


def test_setting_up_makes_every_queue_and_the_table_and_the_settings_say_so(
    cli, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTDATE_DELAYED_DELIVERY__DRAIN_TIMEOUT_MANAGER", "true")
    own = [site.name + end for end in (".timeouts", ".poison", ".timeoutsdispatcher", ".orders")]
    assert cli.ok("setup", "--json").json["queues"] == own
    made = {queue.name for queue in site.queues.list_queues(name_starts_with=site.name)}
    assert made == {name.replace(".", "-") for name in own}
    shown = {row["key"]: row["value"] for row in cli.ok("config", "show", "--json").json["settings"]}
    assert shown["delayed_delivery.drain_timeout_manager"] is True
    assert shown["store.page_size"] == 20


def test_what_such_queues_do_not_show_is_said(cli, site: Site) -> None:
    """As with RabbitMQ: they are looked into with the tools of the account, and returned as a whole."""
    cli.ok("setup")
    ran = cli("errors", "list", "--queue", site.poison)
    assert "[not_supported]" in ran.err
    assert "cannot be browsed without removing messages" in ran.err
