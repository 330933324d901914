"""The error queue: listed, shown, and returned in one transaction each."""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Never

import anyio
import pytest

from postdate import Headers, LocalTransport
from postdate.core.recoverability import Host, delayed_retry_headers, error_headers
from postdate.messages import Envelope, format_timestamp

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def put(*envelopes: Envelope) -> None:
    """Send to queues of the store of this test."""

    async def send() -> None:
        transport = LocalTransport("postdate.db")
        assert await transport.send(envelopes, NOW) == [None] * len(envelopes)
        await transport.close()

    anyio.run(send)


def handle(message_id: str) -> Never:
    """Fail, as a handler does."""
    raise ValueError(f"no stock for {message_id}")


def failed(message_id: str, queue: str = "orders", **headers: str) -> Envelope:
    """Return an error copy as an endpoint makes it."""
    own = {Headers.MESSAGE_ID: message_id, "tenant": "7", **headers}
    try:
        handle(message_id)
    except ValueError as error:
        copied = error_headers(own, error, queue, NOW, Host("orders"))
    return Envelope("error", message_id, copied, b'{"a":1}')


@pytest.fixture
def with_errors(cli):
    """Two failed messages, m1 and m2."""
    cli.ok("setup", "--queue", "orders")
    put(failed("m1"), failed("m2"))


def test_failed_messages_are_listed_with_their_reason(cli, with_errors):
    found = cli.ok("errors", "list", "--json").json
    assert (found["queue"], found["total"]) == ("error", 2)
    first = found["messages"][0]
    assert first["message_id"] == "m1"
    assert first["failed_queue"] == "orders"
    assert first["failed_at"] == "2026-01-31T12:00:00Z"
    assert first["reason"] == "no stock for m1"
    assert first["exception_type"] == "builtins.ValueError"
    text = cli.ok("errors", "list", "--limit", "1").out
    assert "no stock for m1" in text
    assert "1 more; use --limit" in text


def test_an_empty_error_queue_is_said_to_be_empty(cli):
    cli.ok("setup")
    assert cli.ok("errors", "list").out == "queue error is empty\n"


def test_one_is_shown_with_its_stack_trace(cli, with_errors):
    out = cli.ok("errors", "show", "m1").out
    assert "Traceback (most recent call last)" in out
    assert '{"a":1}' in out
    assert "ValueError" in cli.ok("errors", "show", "m1", "--json").json["stack_trace"]
    missing = cli("errors", "show", "nonsense")
    assert missing.status == 1
    assert "[message_not_found]" in missing.err


def test_a_returned_message_is_as_it_was_before_it_failed(cli, with_errors):
    ran = cli.ok("errors", "return", "m1", "--json")
    assert ran.json["messages"] == [{"message_id": "m1", "done": True, "queue": "orders", "remark": ""}]
    (place,) = cli.ok("messages", "show", "m1", "--json").json["places"]
    assert place["queue"] == "orders"
    assert place["headers"] == {Headers.MESSAGE_ID: "m1", "tenant": "7"}
    assert place["body"]["text"] == '{"a":1}'
    assert place["number_of_failures"] == 0
    assert cli.ok("errors", "list", "--json").json["total"] == 1


def test_a_returned_message_starts_its_retries_anew(cli):
    cli.ok("setup", "--queue", "orders")
    put(failed("m1", **delayed_retry_headers({}, NOW - timedelta(days=3))))
    cli.ok("errors", "return", "m1")
    (place,) = cli.ok("messages", "show", "m1", "--json").json["places"]
    assert not set(place["headers"]) & {Headers.DELAYED_RETRIES, Headers.DELAYED_RETRIES_TIMESTAMP}


def test_after_a_delayed_retry_a_message_is_returned_by_the_id_of_its_sender(cli):
    """A retry has an id of its own in the queues."""
    cli.ok("setup", "--queue", "orders")
    put(replace(failed("mine"), message_id="retry-1"), replace(failed("twice"), message_id="retry-2"))
    ran = cli.ok("errors", "return", "mine", "--json")
    assert ran.json["messages"] == [{"message_id": "mine", "done": True, "queue": "orders", "remark": ""}]
    (place,) = cli.ok("messages", "show", "mine", "--json").json["places"]
    assert place["queue"] == "orders"
    put(replace(failed("twice"), message_id="retry-3"))
    ran = cli("errors", "return", "twice")
    assert ran.status == 1
    assert ran.out == (
        "twice: not returned: 2 messages there were sent under that id; name their own: retry-2, retry-3\n"
    )


def test_what_another_process_has_in_hand_is_said_with_its_number(cli, with_errors):
    async def while_held() -> None:
        transport = LocalTransport("postdate.db")
        receiver = transport.receiver("error")
        await receiver.receive_by_id("m1")
        ran = await anyio.to_thread.run_sync(cli, "errors", "return", "m1")
        said = f"m1: not returned: process {os.getpid()} has received it\n"
        assert (ran.status, ran.out) == (1, said)
        dry = await anyio.to_thread.run_sync(cli, "errors", "return", "--all", "--dry-run")
        assert (dry.status, dry.out) == (0, f"1 message would be returned\n{said}")
        await receiver.close()
        await transport.close()

    anyio.run(while_held)


def test_all_are_returned_and_what_cannot_be_stays(cli, with_errors):
    put(failed("m3", queue="nowhere"), Envelope("error", "m4", {}, b"no trace of where it failed"))
    ran = cli("errors", "return", "--all", "--json")
    assert ran.status == 1
    results = {each["message_id"]: each for each in ran.json["messages"]}
    assert [results[each]["done"] for each in ("m1", "m2", "m3", "m4")] == [True, True, False, False]
    assert "there is no queue 'nowhere'" in results["m3"]["remark"]
    assert "--to QUEUE" in results["m4"]["remark"]
    stayed = cli.ok("errors", "list", "--json").json["messages"]
    assert [(each["message_id"], each["held_by"]) for each in stayed] == [("m3", None), ("m4", None)]
    cli.ok("errors", "return", "--all", "--to", "orders")
    assert cli.ok("messages", "stats", "--json").json["queues"] == {"error": 0, "orders": 4, "postdate.timeouts": 0}
    assert cli.ok("errors", "return", "--all").out == "nothing to return\n"


def test_returning_more_than_one_page(cli):
    cli.ok("setup", "--queue", "orders")
    put(*(failed(f"stuck{number}", queue="nowhere") for number in range(510)))
    put(*(failed(f"m{number}") for number in range(600)))
    ran = cli("errors", "return", "--all", "--json")
    assert sum(each["done"] for each in ran.json["messages"]) == 600
    assert len(ran.json["messages"]) == 1110
    assert cli.ok("messages", "stats", "--json").json["queues"]["error"] == 510


def test_what_is_not_there_is_said(cli, with_errors):
    ran = cli("errors", "return", "m1", "nonsense")
    assert ran.status == 1
    assert ran.out.splitlines()[0] == "m1: returned to orders"
    assert ran.out.splitlines()[1].startswith("nonsense: not returned: no message 'nonsense' is in queue 'error'")
    unknown_queue = cli("errors", "list", "--queue", "nonsense")
    assert unknown_queue.status == 1
    assert "[queue_not_found]" in unknown_queue.err


def test_a_message_past_its_use_stays_unless_its_end_is_taken_off(cli):
    cli.ok("setup", "--queue", "orders")
    put(failed("m1", **{Headers.EXPIRES_AT: format_timestamp(NOW)}), failed("m2"))
    for chosen in (["m1"], ["--all"]):
        ran = cli("errors", "return", *chosen, "--json")
        assert ran.status == 1
        (stays,) = [each for each in ran.json["messages"] if each["message_id"] == "m1"]
        assert (stays["done"], stays["queue"]) == (False, "error")
        assert "would be discarded there; to handle it anyway" in stays["remark"]
    (returned,) = cli.ok("errors", "return", "m1", "--without-expiry", "--json").json["messages"]
    assert (returned["done"], returned["queue"], returned["remark"]) == (True, "orders", "")
    assert Headers.EXPIRES_AT not in (cli.ok("messages", "show", "m1", "--json").out)


@pytest.mark.parametrize("name", [Headers.EXPIRES_AT, Headers.TIME_TO_BE_RECEIVED])
def test_what_is_made_of_a_message_past_its_use_is_sent_only_with_another_end(cli, name):
    ends = {Headers.EXPIRES_AT: (format_timestamp(NOW), format_timestamp(NOW.replace(year=2999)))}
    past, later = ends.get(name, ("00:00:01", "999999.00:00:00"))
    to_come = {Headers.EXPIRES_AT: ends[Headers.EXPIRES_AT][1], Headers.TIME_TO_BE_RECEIVED: "999999.00:00:00"}
    cli.ok("setup", "--queue", "orders")
    put(failed("m1", **{**to_come, Headers.TIME_SENT: format_timestamp(NOW - timedelta(1)), name: past}))
    refused = cli("errors", "edit", "m1", "--body", "new")
    assert refused.status == 2
    assert f"and would be discarded there; give it a later expiry: --header {name}=" in refused.err
    cli.ok("errors", "edit", "m1", "--header", f"{name}={later}")
    (sent,) = cli.ok("queues", "peek", "orders", "--json").json["messages"]
    assert sent["headers"][name] == later


def test_what_is_returned_to_a_queue_with_limits_is_let_through_by_the_store(cli, with_errors):
    cli.ok("destinations", "pause", "orders")
    assert cli.ok("errors", "return", "m1", "--json").json["messages"][0]["done"]
    cli.ok("errors", "edit", "m2", "--header", "tenant=8")
    assert cli.ok("queues", "peek", "orders", "--json").json["messages"] == []
    waiting = cli.ok("messages", "list", "--json").json["messages"]
    assert {each["destination"] for each in waiting} == {"orders"}
    assert len(waiting) == 2
