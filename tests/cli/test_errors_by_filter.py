"""Failed messages that options describe are listed and returned; they are counted by what they have in common."""

import anyio
import pytest

from postdate import Envelope, Headers, SystemClock
from postdate.wiring import open_transport


async def _fail() -> None:
    transport = open_transport("local:///postdate.db")
    for number in range(6):
        headers = {
            Headers.MESSAGE_ID: f"m-{number}",
            Headers.FAILED_QUEUE: ("orders", "bills")[number % 2],
            Headers.EXCEPTION_TYPE: ("builtins.ValueError", "shop.NoStock")[number // 4],
            Headers.EXCEPTION_MESSAGE: f"no {number}",
            Headers.TIME_OF_FAILURE: f"2026-01-31 12:00:0{number}:000000 Z",
        }
        (error,) = await transport.send(
            [Envelope("error", f"m-{number}", headers, b"body %d" % number)], SystemClock().now()
        )
        assert error is None
    await transport.close()


@pytest.fixture
def failed(cli):
    """Put six failed messages into the error queue: of two exceptions, from two queues."""
    cli.ok("setup", "--queue", "orders", "--queue", "bills")
    anyio.run(_fail)

    def ids(*options: str) -> list[str]:
        return [each["message_id"] for each in cli.ok("errors", "list", "--json", *options).json["messages"]]

    return ids


def test_they_are_grouped(cli, failed) -> None:
    groups = cli.ok("errors", "groups", "--json").json
    assert (groups["queue"], groups["total"]) == ("error", 6)
    found = [(each["count"], each["exception_type"], each["failed_queue"], each["reason"]) for each in groups["groups"]]
    assert sorted(found, reverse=True) == [
        (2, "builtins.ValueError", "orders", "no 2"),
        (2, "builtins.ValueError", "bills", "no 3"),
        (1, "shop.NoStock", "orders", "no 4"),
        (1, "shop.NoStock", "bills", "no 5"),
    ]
    assert "shop.NoStock" in cli.ok("errors", "groups").out
    assert cli.ok("errors", "groups", "--queue", "orders").out == "queue orders is empty\n"


def test_options_say_which_are_listed_and_returned(cli, failed) -> None:
    assert failed("--exception", "NoStock") == ["m-4", "m-5"]
    assert failed("--exception", "builtins.ValueError", "--failed-queue", "bills") == ["m-1", "m-3"]
    assert failed("--text", "no 2") == ["m-2"]
    assert failed("--text", "body 3", "--limit", "1") == ["m-3"]
    assert failed("--exception", "Error") == []
    returned = cli.ok("errors", "return", "--exception", "ValueError", "--failed-queue", "orders", "--json").json
    assert {each["message_id"] for each in returned["messages"]} == {"m-0", "m-2"}
    assert failed() == ["m-1", "m-3", "m-4", "m-5"]
    queues = cli.ok("messages", "stats", "--json").json["queues"]
    assert (queues["orders"], queues["bills"], queues["error"]) == (2, 0, 4)


def test_a_queue_with_other_messages_is_not_said_to_be_empty(cli, failed) -> None:
    assert cli.ok("errors", "list", "--exception", "Nothing").out == "no message of queue error matches\n"


def test_a_dry_run_says_how_many_and_which_would_have_to_stay(cli, failed) -> None:
    cli.ok("send", "error", "x", "--id", "stray")
    dry = cli.ok("errors", "return", "--all", "--dry-run").out.splitlines()
    assert dry[0] == "6 messages would be returned"
    assert dry[1].startswith("stray: not returned: it has no header NServiceBus.FailedQ")
    would_be = cli.ok("errors", "return", "--exception", "NoStock", "--dry-run", "--json").json
    assert would_be["dry_run"] is True
    assert [(each["message_id"], each["queue"], each["done"]) for each in would_be["messages"]] == [
        ("m-4", "orders", True),
        ("m-5", "bills", True),
    ]
    assert cli.ok("errors", "discard", "--text", "no 2", "--dry-run").out == "1 message would be discarded\n"
    assert len(failed()) == 7
    assert "--dry-run is for --all" in cli("errors", "discard", "m-1", "--dry-run").err


@pytest.mark.parametrize(
    "arguments", [["return"], ["return", "m-1", "--text", "no"], ["return", "--all", "--exception", "NoStock"]]
)
def test_ids_all_and_options_exclude_each_other(cli, failed, arguments: list[str]) -> None:
    ran = cli("errors", *arguments)
    assert ran.status == 2
    assert "name the messages to return" in ran.err
    assert len(failed()) == 6


def test_a_dry_run_tells_of_queues_that_do_not_exist(cli, failed) -> None:
    dry = cli("errors", "return", "--all", "--to", "nowhere", "--dry-run", "--json").json
    real = cli("errors", "return", "--all", "--to", "nowhere", "--json").json
    assert [each["done"] for each in dry["messages"]] == [each["done"] for each in real["messages"]] == [False] * 6
    assert all("there is no queue 'nowhere'" in each["remark"] for each in dry["messages"])
