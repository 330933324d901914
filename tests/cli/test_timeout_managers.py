"""Timeout managers by settings: what runs, what is refused, what is shown."""

import os
import re
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from postdate import MariaDbTimeouts, PostgresTimeouts, SqliteTimeouts, SqlServerTimeouts
from postdate.config import load_settings
from postdate.core.simple_store import sharing_store
from postdate.errors import ConfigurationError
from postdate.messages import Headers
from postdate.ports import TransportCapabilities
from postdate.wiring import check_addresses, open_timeouts, open_transport, own_queues, setup_sql

ALONE = """
[endpoint]
name = "billing"
[delayed_delivery]
enabled = false
[timeout_manager]
address = "sqlite:///all.db"
endpoints = ["billing", "sales"]
[queues]
create = ["orders"]
"""


def test_run_is_the_timeout_manager_of_several_endpoints_and_of_nothing_else(cli, own_folder, service, eventually):
    """What is sent with a delay goes through its queue and table; the endpoint named besides has its own."""
    (own_folder / "postdate.toml").write_text(ALONE)
    queues = ["billing.Timeouts", "sales.Timeouts", "billing.TimeoutsDispatcher", "sales.TimeoutsDispatcher"]
    assert cli.ok("setup", "--json").json["queues"] == [*queues, "error", "orders"]
    due = ["--header", f"{Headers.EXPIRE}=2020-01-01 00:00:00:000000 Z"]
    cli.ok("send", "sales.Timeouts", "x", *due, "--header", f"{Headers.ROUTE_EXPIRED_TIMEOUT_TO}=orders", "--id", "m1")
    cli.ok("send", "orders", "x", "--delay", "1100ms", "--id", "m2")  # less than a second would not be stored
    running = service("--no-setup")
    assert "timeout manager of sales: delivering from sqlite:///all.db" in running.log
    assert "intake queue" not in running.log

    eventually(lambda: in_queue(own_folder, "orders") == 2, "both are in their queue")
    ran = cli("messages", "list")
    assert ran.status == 2
    assert "delayed_delivery.enabled is false (postdate.toml:5)" in ran.err


def in_queue(folder: Path, name: str) -> int:
    with closing(sqlite3.connect(folder / "all.db")) as connection:
        sql = "SELECT count(*) FROM queue_message JOIN queue USING (queue_id) WHERE name = ?"
        return connection.execute(sql, (name,)).fetchone()[0]


def put_overdue(folder: Path, table: str) -> None:
    """Store a timeout for the queue orders that was due years ago."""
    with closing(sqlite3.connect(folder / "all.db")) as connection, connection:
        row = (str(uuid.uuid4()), "orders", "2020-01-01 00:00:00.000000", "{}", "1")
        columns = '"Id", "Destination", "Time", "Headers", "PersistenceVersion"'
        connection.execute(f'INSERT INTO "{table}" ({columns}) VALUES (?, ?, ?, ?, ?)', row)


def test_beside_a_delayed_delivery_what_was_stored_still_fires_and_new_delays_are_native(
    cli, own_folder, service, eventually
):
    (own_folder / "postdate.toml").write_text(
        '[store]\naddress = "sqlite:///all.db"\n[timeout_manager]\naddress = "sqlite:///all.db"\n'
        '[queues]\ncreate = ["orders"]\n'
    )
    done = cli.ok("setup", "--json").json
    assert (done["store"], done["timeouts"]) == ("sqlite:///all.db", "sqlite:///all.db")
    put_overdue(own_folder, "postdate_TimeoutData")
    running = service()
    assert "timeout manager of postdate" in running.log
    assert "intake queue postdate.timeouts" in running.log
    cli.ok("send", "orders", "x", "--delay", "1h", "--id", "m1")
    assert [each["message_id"] for each in cli.ok("messages", "list", "--json").json["messages"]] == ["m1"]
    eventually(lambda: in_queue(own_folder, "orders") == 1, "what was stored is delivered")


def test_delayed_sends_go_to_the_timeout_manager_of_somebody_else(cli, own_folder):
    (own_folder / "postdate.toml").write_text(
        '[delayed_delivery]\nenabled = false\n[timeout_manager]\nexternal_address = "sales.Timeouts"\n'
        '[transport]\naddress = "local:///all.db"\n[queues]\ncreate = ["sales.Timeouts"]\n'
    )
    cli.ok("setup")
    cli.ok("send", "orders", "x", "--delay", "1h")
    assert in_queue(own_folder, "sales.Timeouts") == 1
    assert "nothing to run" in cli("run").err
    doctor = cli.ok("doctor").out
    assert "sales.Timeouts" in doctor


# --- settings -----------------------------------------------------------------------------------------------------

SERVER = "postgresql://me:s3cret@nobody.invalid/db"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SCHEMA": "x"}, "timeout_manager.schema .* says where timeouts are kept: add timeout_manager.address"),
        ({"CONCURRENCY": "2"}, "timeout_manager.concurrency .* says where timeouts are kept"),
        ({"TIME_TO_WAIT_BEFORE_TRIGGERING_CRITICAL_ERROR": "1m"}, "says where timeouts are kept"),
        ({"ADDRESS": "memory:"}, "no storage of timeouts has the address 'memory:'; there are sqlite:, postgresql:"),
        ({"ADDRESS": "amqp://h/"}, "no storage of timeouts has the address"),
        (
            {"ADDRESS": "sqlite:///a.db", "SCHEMA": "x"},
            "schema .* is not for SQLite, which takes timeout_manager.table",
        ),
        ({"ADDRESS": "sqlite:///a.db", "TABLE_PREFIX": "x", "ENDPOINTS": "a,b"}, "table_prefix .* names one table"),
        ({"ADDRESS": "sqlite:///a.db", "ENDPOINTS": "Sales,sales"}, "'sales' and 'Sales' have one table"),
        ({"ADDRESS": "sqlite:///a.db", "ENDPOINTS": "Postdate"}, "'Postdate' and 'postdate' have one table"),
        ({"ADDRESS": "sqlite:///a.db", "ENDPOINTS": "Shop.Eu,Shop_Eu"}, "'Shop_Eu' and 'Shop.Eu' have one table"),
        ({"ADDRESS": "sqlite:///a.db", "EXTERNAL_ADDRESS": "o"}, "timeout manager of their own"),
        ({"EXTERNAL_ADDRESS": "o"}, "delayed delivery of its own exclude each other"),
        ({"ADDRESS": SERVER.replace("postgresql", "mariadb")}, "holds no queues here: say where they are"),
        ({"CONCURRENCY": "0"}, "timeout_manager.concurrency must be a whole number, 1 or more"),
        ({"TIME_TO_WAIT_BEFORE_TRIGGERING_CRITICAL_ERROR": "-1s"}, "must be a duration"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_say_where_they_stand(variables, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        check_addresses(load_settings(None, {f"POSTDATE_TIMEOUT_MANAGER__{key}": at for key, at in variables.items()}))
    assert "s3cret" not in str(caught.value)
    assert "environment POSTDATE_TIMEOUT_MANAGER__" in str(caught.value)


def test_zero_is_a_time_to_wait_and_the_environment_says_so_as_well_as_the_file(own_folder):
    key = "time_to_wait_before_triggering_critical_error"
    (own_folder / "postdate.toml").write_text(f"[timeout_manager]\n{key} = 0\n")
    for environment in ({}, {f"POSTDATE_TIMEOUT_MANAGER__{key.upper()}": "0s"}):
        assert not getattr(load_settings(None, environment).timeout_manager, key)


def test_what_is_shown_has_no_secrets_and_truth_values_as_they_are_written(cli, own_folder, monkeypatch):
    (own_folder / "address").write_text(SERVER)
    monkeypatch.setenv("POSTDATE_TIMEOUT_MANAGER__ADDRESS", "file:address")
    monkeypatch.setenv("POSTDATE_DELAYED_DELIVERY__ENABLED", "false")
    shown = cli.ok("config", "show").out
    assert "s3cret" not in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    hidden = SERVER.replace("s3cret", "***")
    assert rows["timeout_manager.address"][:2] == [hidden, "file:address,"]
    assert rows["transport.address"][:3] == [hidden, "as", "timeout_manager.address,"]
    assert rows["delayed_delivery.enabled"][0] == "false"
    by_key = {row["key"]: row["value"] for row in cli.ok("config", "show", "--json").json["settings"]}
    assert by_key["delayed_delivery.enabled"] is False


def test_the_queues_are_called_as_the_transport_names_them():
    settings = load_settings(
        None, {"POSTDATE_TIMEOUT_MANAGER__ADDRESS": SERVER, "POSTDATE_DELAYED_DELIVERY__ENABLED": "false"}
    )
    can = TransportCapabilities(durable=True, transaction_modes=frozenset(), queue_name_separator="-")
    assert own_queues(settings, can) == ["postdate-Timeouts", "postdate-TimeoutsDispatcher", "error"]


@pytest.mark.parametrize(
    ("address", "kind", "schema"),
    [
        ("sqlite:///a.db", SqliteTimeouts, None),
        ("postgres://nobody.invalid/db", PostgresTimeouts, "dbo"),
        ("mysql://nobody.invalid/db", MariaDbTimeouts, "other"),
        ("sqlserver://nobody.invalid/db", SqlServerTimeouts, "sales"),
    ],
)
async def test_each_kind_of_storage_has_an_address(address, kind, schema):
    variables = {"ADDRESS": address, "TABLE_PREFIX": "Old_", **({"SCHEMA": schema} if schema else {})}
    settings = load_settings(None, {f"POSTDATE_TIMEOUT_MANAGER__{key}": at for key, at in variables.items()})
    (persister,) = open_timeouts(settings).values()
    assert isinstance(persister, kind)
    await persister.close()


def test_timeouts_in_any_schema_share_the_transactions_of_the_queues_there():
    variables = {"POSTDATE_TIMEOUT_MANAGER__ADDRESS": SERVER, "POSTDATE_TRANSPORT__SCHEMA": "queues"}
    settings = load_settings(None, variables)
    (persister,) = open_timeouts(settings).values()
    queues = open_transport(settings.transport.address, schema="queues")
    assert sharing_store(persister, persister.database, queues.capabilities.database) is persister
    elsewhere = open_transport(SERVER.replace("/db", "/other"))
    assert sharing_store(persister, persister.database, elsewhere.capabilities.database) is None


def test_doctor_says_what_the_timeouts_wait_for(cli, own_folder):
    (own_folder / "postdate.toml").write_text(ALONE)
    assert "there is no file all.db" in cli("doctor").out
    cli.ok("setup")
    assert "timeouts        of 'sales': the storage answers, and no timeout is overdue" in cli.ok("doctor").out
    put_overdue(own_folder, "sales_TimeoutData")
    assert "of 'sales': the earliest has been due since 2020-01-01T00:00:00Z" in cli.ok("doctor").out
    with closing(sqlite3.connect(own_folder / "all.db")) as connection, connection:
        connection.execute('DROP TABLE "billing_TimeoutData"')
    ran = cli("doctor")
    assert ran.status == 1
    assert "run `postdate setup`" in ran.out


def test_the_settings_in_the_guide_are_settings(own_folder, monkeypatch):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "timeout-manager.md"
    for name, scheme in (("TIMEOUTS_URL", "postgresql"), ("DELAYS_URL", "postgresql"), ("RABBITMQ_URL", "amqp")):
        monkeypatch.setenv(name, f"{scheme}://me:s3cret@nobody.invalid/db")
    blocks = re.findall(r"^```toml\n(.*?)^```", guide.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        (own_folder / "postdate.toml").write_text(block)
        settings = load_settings(None, os.environ)
        check_addresses(settings)
        script = setup_sql(settings)
        assert '"Billing_TimeoutData"' in script
        assert "s3cret" not in script
