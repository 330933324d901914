"""Why was it discarded, and what can be done about it? Also of messages that were never delayed."""

from datetime import timedelta

import pytest
from anyio import to_thread
from tests.cli.test_explain import MINUTE, NOW, scene

from postdate.messages import Envelope
from postdate.operations import MessageState
from postdate.operations.messages import show_message, statistics
from postdate.ports import Completion, RecordKind

REASON = "expired at 2026-01-31 11:59:00:000000 Z"
AGAINST_IT = ("clocks", "time_to_be_received_allowance", "ignore_incoming_time_to_be_received_headers", "longer")


async def _discarded(here, reason: str = REASON) -> None:
    receiver = here.transport.receiver("orders")
    (received,) = await receiver.receive(1)
    await receiver.commit(received, NOW, Completion(RecordKind.DISCARDED, reason))
    await receiver.close()


async def test_one_that_had_been_delayed_says_when_why_and_what_to_do():
    async with scene() as here:
        await here.store(due=NOW - MINUTE)
        await here.sqlite.move_due(NOW - timedelta(seconds=59), 10)
        await _discarded(here)
        found = await here.explain()
    assert found.state is MessageState.DISCARDED
    assert found.headline == f"the consumer of 'orders' discarded it at 2026-01-31T12:00:00Z: {REASON}"
    assert found.facts == ("it was delivered there at 2026-01-31T11:59:01Z, 1s after it was due",)
    assert [any(word in advice for advice in found.advice) for word in AGAINST_IT] == [True] * len(AGAINST_IT)
    assert [event.what for event in found.history] == ["scheduled", "delivered", "discarded"]


async def test_one_that_never_was_delayed_is_known_all_the_same():
    async with scene() as here:
        await here.transport.send([Envelope("orders", "u1", {}, b"")], NOW)
        await _discarded(here)
        found = await here.explain("u1")
        shown = await show_message(here.deployment, "u1")
        counts = await statistics(here.deployment, NOW)
    assert found.state is MessageState.DISCARDED
    assert found.headline == f"the consumer of 'orders' discarded it at 2026-01-31T12:00:00Z: {REASON}"
    assert found.facts == ("it was sent without a delay: the store has no other records of it",)
    assert len(found.advice) == 4
    assert [(event.what, event.due, event.detail) for event in shown.history] == [("discarded", None, REASON)]
    assert (counts.pending, counts.records) == (0, {"discarded": 1})


async def test_what_its_queue_discarded_is_not_laid_to_the_receiver():
    async with scene() as here:
        await here.transport.send([Envelope("orders", "u1", {}, b"")], NOW)
        await _discarded(here, "expired in its queue at 2026-01-31T11:59:00+00:00")
        found = await here.explain("u1")
    assert found.headline.startswith("queue 'orders' discarded it at 2026-01-31T12:00:00Z: expired in its queue")
    (advice,) = found.advice  # no setting of a receiver would have kept it
    assert "longer time to be received" in advice


async def test_the_command_says_it(cli):
    async with scene() as here:
        await here.transport.send([Envelope("orders", "u1", {}, b"")], NOW)
        await _discarded(here)
    said = await to_thread.run_sync(lambda: cli.ok("messages", "explain", "u1", "--json").json)
    assert (said["state"], [event["what"] for event in said["history"]]) == ("discarded", ["discarded"])
    assert REASON in said["headline"]
    assert any("ignore_incoming_time_to_be_received_headers" in advice for advice in said["advice"])


@pytest.mark.parametrize("options", [["--discard-lapsed"], ["--allowance", "30s"]])
def test_a_sweep_leaves_it_to_the_receivers_and_says_so(cli, options):
    ran = cli("pipeline", "sweep", *options)
    assert (ran.status, "receivers discard by the same rule" in ran.err) == (2, True)
