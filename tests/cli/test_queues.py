"""Messages of any queue are looked at, taken off, thrown away."""

from dataclasses import replace

import pytest

from postdate.operations import queues


@pytest.fixture
def orders(cli):
    """A queue with three messages."""
    cli.ok("setup", "--queue", "orders")
    for number in range(3):
        cli.ok("send", "orders", f'{{"number": {number}}}', "--id", f"m-{number}", "--header", "own=1")
    return cli


def test_peek_leaves_them_there(orders) -> None:
    found = orders.ok("queues", "peek", "orders", "--json", "--limit", "2").json
    assert (found["queue"], found["total"]) == ("orders", 3)
    assert [each["message_id"] for each in found["messages"]] == ["m-0", "m-1"]
    assert found["messages"][0]["headers"]["own"] == "1"
    shown = orders.ok("queues", "peek", "orders", "--limit", "1").out
    assert "message m-0" in shown
    assert '{"number": 0}' in shown
    assert "… and 2 more; use --limit" in shown


def test_receive_takes_them_off(orders) -> None:
    assert orders.ok("queues", "receive", "orders", "--json").json["body"]["text"] == '{"number": 0}'
    assert orders.ok("queues", "receive", "orders", "--limit", "9").out.count("message m-") == 2
    assert orders.ok("queues", "receive", "orders").out == "queue orders is empty\n"
    assert orders.ok("queues", "peek", "orders").out == "queue orders is empty\n"


def test_purge_empties_it_or_counts(orders) -> None:
    assert orders.ok("queues", "purge", "orders", "--dry-run").out == "3 messages would be thrown away\n"
    assert orders.ok("queues", "purge", "orders").out == "3 messages thrown away\n"
    assert orders.ok("queues", "purge", "orders").out == "0 messages thrown away\n"


@pytest.mark.parametrize("what", ["peek", "receive", "purge"])
def test_an_interrupt_ends_in_one_line_and_loses_nothing(orders, monkeypatch, what) -> None:
    """It comes with the second message in hand, or with all of them; peek is that of queues that cannot be browsed."""
    pages, peek, arrived = queues.QueueWalk.receive_pages, queues.peek, list[str]()

    async def interrupted(walk, *at_once):
        async for page in pages(walk, *at_once):
            arrived.extend(each.envelope.message_id for each in page)
            if len(arrived) > 1:
                raise KeyboardInterrupt
            yield page

    with monkeypatch.context() as patch:
        patch.setattr(queues.QueueWalk, "receive_pages", interrupted)
        patch.setattr(queues, "peek", lambda here, *rest: peek(replace(here, queue_view=None), *rest))
        ran = orders("queues", what, "orders", *["--limit=3"][: what != "purge"])
    assert (ran.status, ran.err) == (130, "postdate: error [interrupted]: stopped by the user\n")
    shown = ["m-0"] if what == "receive" else []
    assert [each for each in arrived if f"message {each}\n" in ran.out] == shown
    left = orders.ok("queues", "receive", "orders", "--limit", "9").out
    assert [f"m-{n}" for n in range(3) if f"message m-{n}\n" in left] == [f"m-{n}" for n in range(len(shown), 3)]


@pytest.mark.parametrize("what", ["peek", "receive", "purge"])
def test_a_queue_that_is_not_there_is_said(orders, what) -> None:
    ran = orders("queues", what, "oders")
    assert ran.status != 0
    assert "there is no queue 'oders'" in ran.err


def test_failed_messages_are_edited_and_discarded(cli) -> None:
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "error", "{}", "--id", "bad", "--header", "NServiceBus.FailedQ=orders")
    assert cli("errors", "edit", "bad").status == 2
    assert cli.ok("errors", "edit", "bad", "--body", "new", "--header", "own=1").out.startswith(
        "bad: sent to orders as "
    )
    (sent,) = cli.ok("queues", "peek", "orders", "--json").json["messages"]
    assert (sent["body"]["text"], sent["headers"]["own"], sent["headers"]["Postdate.EditOf"]) == ("new", "1", "bad")
    assert cli("errors", "discard").status == 2
    assert cli.ok("errors", "discard", "bad").out == "bad: discarded\n"
    assert cli.ok("errors", "discard", "--all").out == "nothing to discard\n"
    assert cli.ok("errors", "list").out == "queue error is empty\n"
