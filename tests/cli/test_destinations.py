"""Queues are paused, resumed and limited; what is held says why."""

import pytest


def test_limits_are_set_shown_and_lifted(cli) -> None:
    cli.ok("setup", "--queue", "orders")
    assert cli.ok("destinations", "list").out == "no queue has limits\n"
    assert cli.ok("destinations", "pause", "orders").out == "orders: paused\n"
    window = "mon-fri 09:00-17:00 Europe/Paris"
    found = cli.ok("destinations", "limit", "orders", "--per-second", "50", "--window", window, "--json").json
    assert found == {
        "destination": "orders",
        "limits": {"paused": True, "per_second": 50.0, "windows": [window]},
    }
    assert cli.ok("destinations", "resume", "orders").out == f"orders: at most 50 a second, within {window}\n"
    assert cli.ok("destinations", "list", "--json").json == {
        "destinations": {"orders": {"paused": False, "per_second": 50.0, "windows": [window]}}
    }
    assert cli.ok("destinations", "limit", "orders").out == "orders: no limits\n"


def test_explain_says_what_holds_a_message(cli) -> None:
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "{}", "--delay", "0s", "--id", "due")
    cli.ok("send", "orders", "{}", "--at", "2126-02-02T12:00Z", "--id", "later")  # a Saturday
    cli.ok("destinations", "limit", "orders", "--window", "mon-fri 09:00-17:00 UTC")
    later = cli.ok("messages", "explain", "later", "--json").json
    assert later["state"] == "waiting"
    assert "the limits of its queue 'orders' are: within mon-fri 09:00-17:00 UTC" in later["facts"]
    assert "no message is sent to it before 2126-02-04T09:00:00Z" in later["facts"]
    cli.ok("destinations", "pause", "orders")
    due = cli.ok("messages", "explain", "later", "--json").json
    assert "its queue 'orders' is paused" in due["facts"]
    cli.ok("messages", "reschedule", "later", "--at", "2026-01-31T12:00Z")
    assert cli.ok("messages", "list").out.splitlines()[1].split()[2] == "held"
    (line,) = cli.ok("messages", "list", "--json").json["messages"]
    assert (line["held"], line["overdue"]) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pause"], "QUEUE"),
        (["limit", "orders", "--per-second", "0"], "0.0 messages a second is not a valid rate"),
        (["limit", "orders", "--window", "09:00-17:00"], "'09:00-17:00' is not a window of time, such as"),
        (["limit", "orders", "--window", "09:00-17:00 Europe/Pari"], "no time zone 'Europe/Pari'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(cli, arguments, said) -> None:
    cli.ok("setup", "--queue", "orders")
    found = cli("destinations", *arguments)
    assert found.status == 2
    assert said in found.err
    assert cli.ok("destinations", "list").out == "no queue has limits\n"


@pytest.mark.parametrize("change", [["pause"], ["resume"], ["limit", "--per-second", "5"]])
def test_a_queue_that_does_not_exist_is_refused_unless_asked_for(cli, change) -> None:
    cli.ok("setup", "--queue", "orders")
    refused = cli("destinations", change[0], "ordres", *change[1:])
    assert refused.status == 1
    assert "there is no queue 'ordres'; did you mean 'orders'?" in refused.err
    assert cli.ok("destinations", "list").out == "no queue has limits\n"
    cli.ok("destinations", change[0], "ordres", *change[1:], "--missing-ok")


def test_limits_of_a_queue_that_does_not_exist_are_lifted(cli) -> None:
    cli.ok("setup", "--queue", "orders")
    cli.ok("destinations", "pause", "ordres", "--missing-ok")
    assert cli.ok("destinations", "resume", "ordres").out == "ordres: no limits\n"
