"""Setting up, sending, and looking at what waits."""

import base64
import json
import sqlite3
import subprocess
import sys
from datetime import timedelta

import pytest

import postdate
from postdate import SystemClock, operations
from postdate.config import parse_instant
from postdate.errors import StoreUnreachable
from postdate.messages import Headers


@pytest.fixture
def store(cli):
    """A store with a queue ``orders``, set up."""
    return cli.ok("setup", "--queue", "orders", "--json").json


def test_setup_says_what_it_created_and_may_be_repeated(cli, store, own_folder):
    assert store["queues"] == store["created"] == ["postdate.timeouts", "error", "orders"]
    again = cli.ok("setup", "--queue", "orders", "--queue", "invoices", "--json").json
    assert again["created"] == ["invoices"]
    assert (own_folder / "postdate.db").exists()


def test_setup_creates_the_queues_of_the_settings(cli, own_folder):
    (own_folder / "postdate.toml").write_text('[endpoint]\nname = "billing"\n[queues]\ncreate = ["orders"]\n')
    assert cli.ok("setup", "--json").json["queues"] == ["billing.timeouts", "error", "orders"]


def test_the_printed_sql_makes_the_same_tables_and_changes_nothing(cli, own_folder):
    sql = cli.ok("setup", "--print-sql").out
    assert list(own_folder.iterdir()) == []
    connection = sqlite3.connect(own_folder / "by_hand.db")
    connection.executescript(sql)
    connection.close()
    assert cli.ok("messages", "stats", "--store", "sqlite:///by_hand.db", "--json").json["pending"] == 0
    assert cli.ok("setup", "--print-sql", "--json").json == {"sql": sql}


def test_a_delayed_message_waits_and_is_listed(cli, store):
    sent = cli.ok("send", "orders", '{"id": 1}', "--delay", "10m", "--id", "m1", "--json").json
    assert sent["message_id"] == "m1"
    assert sent["queue_exists"] is True
    assert sent["services"] == 0
    assert timedelta(minutes=9) < parse_instant(sent["due"]) - SystemClock().now() <= timedelta(minutes=10)
    (listed,) = cli.ok("messages", "list", "--json").json["messages"]
    assert (listed["message_id"], listed["due"], listed["destination"]) == ("m1", sent["due"], "orders")
    assert (listed["overdue"], listed["body_bytes"]) == (False, 9)
    text = cli.ok("messages", "list").out
    assert text.splitlines()[0].split() == ["id", "due", "state", "queue", "failures"]
    assert text.splitlines()[1].split() == ["m1", sent["due"], "waiting", "orders", "0"]


def test_an_absolute_time_is_kept_in_utc(cli, store):
    sent = cli.ok("send", "orders", "x", "--at", "2126-01-31T12:00+01:00", "--json").json
    assert sent["due"] == "2126-01-31T11:00:00Z"


def test_a_message_without_delay_is_in_its_queue_at_once(cli, store):
    sent = cli.ok("send", "orders", "x", "--id", "m1", "--json").json
    assert sent["due"] is None
    assert cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1
    assert cli.ok("messages", "list").out == "no messages wait\n"


def test_an_unknown_queue_is_refused_at_once_and_warned_of_when_delayed(cli, store):
    at_once = cli("send", "nowhere", "x")
    assert at_once.status == 1
    assert "[queue_not_found]" in at_once.err
    assert "postdate setup --queue nowhere" in at_once.err
    delayed = cli.ok("send", "nowhere", "x", "--delay", "1m")
    assert "there is no queue 'nowhere' yet" in delayed.err
    assert "no service is running" in delayed.err


@pytest.mark.parametrize("body", [b'{"a": [1, "\xc3\xa9"]}', b"", b"plain", bytes(range(256))])
def test_the_body_arrives_byte_for_byte_from_every_source(cli, store, own_folder, body):
    (own_folder / "body").write_bytes(body)
    cli.ok("send", "orders", "--delay", "1m", "--id", "stdin", stdin=body)
    cli.ok("send", "orders", "-", "--delay", "1m", "--id", "dash", stdin=body)
    cli.ok("send", "orders", "--file", "body", "--delay", "1m", "--id", "file")
    for message_id in ("stdin", "dash", "file"):
        (place,) = cli.ok("messages", "show", message_id, "--json").json["places"]
        shown = place["body"]
        assert shown["size_bytes"] == len(body)
        assert (base64.b64decode(shown["base64"]) if shown["text"] is None else shown["text"].encode()) == body


def test_headers_type_and_content_type_go_along(cli, store):
    cli.ok(
        "send", "orders", '{"a":1}', "--id", "m1", "--type", "Shop.Order",
        "--header", "tenant=7=seven", "--header", f"{Headers.CORRELATION_ID}=c1",
    )  # fmt: skip
    (place,) = cli.ok("messages", "show", "m1", "--json").json["places"]
    headers = place["headers"]
    assert headers[Headers.ENCLOSED_MESSAGE_TYPES] == "Shop.Order"
    assert headers[Headers.CONTENT_TYPE] == "application/json"
    assert headers["tenant"] == "7=seven"
    assert headers[Headers.CORRELATION_ID] == "c1"
    cli.ok("send", "orders", "no json", "--id", "m2")
    (place,) = cli.ok("messages", "show", "m2", "--json").json["places"]
    assert Headers.CONTENT_TYPE not in place["headers"]


def test_an_id_that_was_used_is_refused_and_the_first_message_stays(cli, store):
    cli.ok("send", "orders", "first", "--delay", "1m", "--id", "m1")
    again = cli("send", "orders", "second", "--delay", "1m", "--id", "m1")
    assert again.status == 1
    assert "[duplicate_message]" in again.err
    assert "first" in cli.ok("messages", "show", "m1").out


def test_a_list_can_be_narrowed_and_says_when_there_is_more(cli, store):
    for number in range(3):
        cli.ok("send", "orders", "x", "--at", f"2126-01-0{number + 1}T00:00Z", "--id", f"m{number}")
    cli.ok("send", "invoices", "x", "--at", "2126-01-01T00:00Z", "--id", "other")

    def ids(*options: str) -> list[str]:
        return [each["message_id"] for each in cli.ok("messages", "list", "--json", *options).json["messages"]]

    assert ids("--queue", "orders") == ["m0", "m1", "m2"]
    assert ids("--queue", "orders", "--due-from", "2126-01-02T00:00Z") == ["m1", "m2"]
    assert ids("--queue", "orders", "--due-to", "2126-01-02T00:00Z") == ["m0"]
    assert ids("--queue", "nowhere") == []
    assert cli.ok("messages", "list", "--limit", "2", "--json").json["more"] is True
    cursor = cli.ok("messages", "list", "--limit", "2", "--json").json["cursor"]
    assert f"continue with --after '{cursor}'" in cli.ok("messages", "list", "--limit", "2").out
    assert [*ids("--limit", "2"), *ids("--after", cursor)] == ids()
    assert cli.ok("messages", "list", "--limit", "4", "--json").json["more"] is False


def test_a_cancelled_message_is_gone_for_good(cli, store):
    cli.ok("send", "orders", "x", "--delay", "1m", "--id", "m1")
    ran = cli("messages", "cancel", "m1", "nonsense", "--json")
    assert ran.status == 1
    first, second = ran.json["messages"]
    assert (first["message_id"], first["done"]) == ("m1", True)
    assert (second["done"], second["reason"]) == (False, "it was never scheduled in sqlite:///postdate.db")
    assert cli("messages", "cancel", "m1").out.startswith("m1: not cancelled: it was cancelled at ")
    assert cli.ok("messages", "list", "--json").json["messages"] == []


@pytest.mark.parametrize("command", [["cancel"], ["reschedule", "--delay", "1h"]])
def test_messages_of_the_stores_own_are_left_alone(cli, store, command: list[str]):
    """They keep the rules of time zones (ADR 41)."""
    ran = cli("messages", *command, "postdate~Europe/Paris~00000001")
    assert ran.status == 2
    assert "begins with 'postdate~'" in ran.err


def test_a_rescheduled_message_has_its_new_time(cli, store):
    cli.ok("send", "orders", "x", "--delay", "1m", "--id", "m1", "--expires-at", "2127-01-01T00:00Z")
    ran = cli.ok("messages", "reschedule", "m1", "--at", "2126-01-31T12:00+01:00")
    assert ran.out == "m1: rescheduled, due at 2126-01-31T11:00:00Z\n"
    assert cli.ok("messages", "list", "--json").json["messages"][0]["due"] == "2126-01-31T11:00:00Z"
    cli.ok("messages", "reschedule", "m1", "--delay", "2h")
    too_late = cli("messages", "reschedule", "m1", "--at", "2128-01-01T00:00Z")
    assert too_late.status == 2
    assert "[invalid_message]" in too_late.err
    assert cli("messages", "reschedule", "m1", "--delay", "99999w").status == 2
    assert cli("messages", "reschedule", "nonsense", "--delay", "1s").status == 1


def test_of_several_messages_each_says_whether_it_was_changed_also_after_an_error(cli, store):
    """An error used to hide which of the messages before it had been changed."""
    for message_id, more in (("m1", ()), ("m2", ("--expires-at", "2126-12-01T00:00Z")), ("m3", ())):
        cli.ok("send", "orders", "x", "--id", message_id, "--delay", "10m", *more)
    ran = cli("messages", "reschedule", "m1", "m2", "m3", "--at", "2127-01-01T00:00Z", "--json")
    assert (ran.status, ran.err) == (2, "")
    assert [(each["message_id"], each["done"]) for each in ran.json["messages"]] == [
        ("m1", True),
        ("m2", False),
        ("m3", True),
    ]
    assert "expires" in ran.json["messages"][1]["reason"]
    ran = cli("messages", "cancel", "m1", "nowhere", "m3")
    assert (ran.status, ran.err) == (1, "")
    assert ran.out.splitlines()[0] == "m1: cancelled"
    assert ran.out.splitlines()[2] == "m3: cancelled"


async def test_after_an_outage_the_other_messages_are_left_alone():
    async def change(message_id: str) -> operations.Change:
        if message_id == "m2":
            raise StoreUnreachable("the server is away")
        return operations.Change(message_id, done=True)

    changes, error = await operations.change_each(["m1", "m2", "m3"], change)
    assert [(each.done, each.reason) for each in changes] == [
        (True, ""),
        (False, "the server is away"),
        (False, "not tried after that error"),
    ]
    assert isinstance(error, StoreUnreachable)


def test_a_body_that_is_too_deep_for_a_reader_of_json_is_sent_as_it_is(cli, store, own_folder):
    body = b"[" * 200_000
    (own_folder / "deep.json").write_bytes(body)
    cli.ok("send", "orders", "--id", "deep", "--delay", "10m", "--file", "deep.json")
    assert cli.ok("messages", "show", "deep", "--json").json["places"][0]["body"]["size_bytes"] == len(body)


def test_a_message_that_is_nowhere_is_not_found(cli, store):
    ran = cli("messages", "show", "nonsense")
    assert (ran.status, ran.out) == (1, "")
    assert "[message_not_found]" in ran.err


def test_a_message_cannot_steer_the_terminal_of_its_reader(cli, store):
    cli.ok("send", "orders", "\x1b[2Jgone\x07", "--delay", "1m", "--id", "m1", "--header", "h=\x1b]0;title\x07")
    out = cli.ok("messages", "show", "m1").out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert r"\x1b[2Jgone\x07" in out


def test_statistics_count_what_is_there(cli, store):
    cli.ok("send", "orders", "x", "--delay", "1m", "--id", "m1")
    cli.ok("send", "orders", "x")
    found = cli.ok("messages", "stats", "--json").json
    assert (found["pending"], found["overdue"], found["claimed"], found["failing"]) == (1, 0, 0, 0)
    assert found["records"] == {"scheduled": 1}
    assert found["queues"] == {"error": 0, "orders": 1, "postdate.timeouts": 0}
    assert "waiting" in cli.ok("messages", "stats").out


def test_times_are_utc_whatever_the_zone_of_the_machine(cli, store):
    sent = cli.ok("send", "orders", "x", "--delay", "30m", "--json").json
    assert sent["due"].endswith("Z")
    assert abs(parse_instant(sent["due"]) - SystemClock().now() - timedelta(minutes=30)) < timedelta(seconds=30)


def test_config_show_names_every_value_and_its_origin(cli, own_folder, monkeypatch):
    (own_folder / "postdate.toml").write_text('[endpoint]\nname = "billing"\n')
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", "postgres://me:geheim@host/db")
    ran = cli.ok("config", "show")
    lines = {line.split()[0]: line for line in ran.out.splitlines()}
    assert lines["endpoint.name"].split() == ["endpoint.name", "billing", "postdate.toml:2"]
    assert lines["store.address"].split()[1] == "postgres://me:***@host/db"
    assert "geheim" not in ran.out + cli.ok("config", "show", "--json").out
    found = cli.ok("config", "show", "--json").json
    assert found["file"] == "postdate.toml"
    assert {row["key"] for row in found["settings"]} >= {"store.address", "delayed_delivery.number_of_retries"}


def test_version_is_said(cli):
    assert cli.ok("version", "--json").json["postdate"] == postdate.__version__
    assert cli.ok("version").out.splitlines()[0].split() == ["postdate", postdate.__version__]


def test_json_is_one_object_for_every_reporting_command(cli, store):
    cli.ok("send", "orders", "x", "--delay", "30m", "--id", "m1")
    for arguments in (
        ["setup"],
        ["send", "orders", "x"],
        ["messages", "list"],
        ["messages", "show", "m1"],
        ["messages", "explain", "m1"],
        ["messages", "stats"],
        ["messages", "reschedule", "m1", "--delay", "1h"],
        ["messages", "cancel", "m1"],
        ["errors", "list"],
        ["errors", "return", "--all"],
        ["config", "show"],
        ["doctor"],
        ["version"],
    ):
        ran = cli(*arguments, "--json")
        assert isinstance(json.loads(ran.out), dict), arguments
        assert ran.err == "", arguments


def test_the_package_can_be_run_as_the_command():
    ran = subprocess.run([sys.executable, "-m", "postdate", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("postdate ")
