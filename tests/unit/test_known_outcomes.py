"""What a dispatcher knows of a message decides what becomes of it, in whichever order answers come. Source: ADR 45.

Each of these sequences lost a message, sent it twice although its claim was held, or left the dispatcher throttled.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import anyio
import pytest

from postdate import Envelope
from postdate.core.due.poller import Poller
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.health.message_memory import Release
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import (
    DestinationUnavailable,
    PostdateError,
    StoreUnavailable,
    StoreUnreachable,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.ports import Outcome, Work
from postdate.testing import Fault

SECOND = timedelta(seconds=1)
AWAY = StoreUnreachable("away")


class Sends:
    """The answers of a transport: each call of send waits for its turn, and then has its error, or none."""

    def __init__(self, bench) -> None:
        self._original, bench.queues.send = bench.queues.send, self.send
        bench.queues._capabilities = replace(bench.queues.capabilities, pipelines=True)
        self.gates: list[anyio.Event] = []
        self.errors: list[PostdateError | None] = []

    async def send(self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        if not self.gates:
            return await self._original(envelopes, now)
        gate, error = self.gates.pop(0), self.errors.pop(0)
        await gate.wait()
        return [error] * len(envelopes) if error else await self._original(envelopes, now)

    def next(self, error: PostdateError | None = None) -> anyio.Event:
        """Have the next call wait for the event that is returned."""
        self.gates.append(anyio.Event())
        self.errors.append(error)
        return self.gates[-1]


@pytest.fixture
async def bench(make_bench):
    bench = make_bench()
    await bench.create_queues("billing")
    return bench


def lose_claims(bench) -> None:
    """Free what is claimed, as a server does whose connection was lost."""
    for entry in bench.memory._entries.values():
        if entry.token is not None:
            entry.attempt_at, entry.token = entry.claimed_from, None


async def test_a_message_returned_while_its_removal_is_under_way_is_not_removed_for_it(bench) -> None:
    answered, finish = anyio.Event(), bench.memory.finish

    async def slow(*arguments: object) -> int:
        bench.memory.finish = finish
        count = await finish(*arguments)
        await answered.wait()  # committed, and the answer takes its time
        return count

    bench.memory.finish = slow
    message = bench.message(due_in=-1, destination="nowhere")
    await bench.keep(message)
    async with bench.dispatcher.overlap_batches():
        await bench.look()
        await bench.clock.run_until_idle()
        assert bench.ids("error") == ["m-1"]
        await bench.create_queues("nowhere")
        await bench.memory.store(message, bench.clock.now())
        await bench.look()
        await bench.clock.run_until_idle()
        answered.set()
        await bench.look_for(5 * SECOND)
    assert bench.ids("nowhere") == ["m-1"]
    assert await bench.waiting() is None


async def test_a_failure_is_not_written_under_the_claim_of_a_message_that_may_have_been_returned(bench) -> None:
    """The answer to its removal was lost; claimed again, it could not be released."""
    message = bench.message(due_in=-1)
    await bench.keep(message)
    (first,) = await bench.memory.claim_due(bench.clock.now(), 1)
    lose_claims(bench)
    (second,) = await bench.memory.claim_due(bench.clock.now(), 1)
    bench.dispatcher.finisher.release_later([Release(second, None)])
    bench.store.faults.add(Fault("finish", AWAY))
    await bench.dispatcher.finisher.finish([first], Outcome.FAILED)
    bench.store.faults.clear()
    async with bench.dispatcher.overlap_batches():
        await bench.look_for(5 * SECOND)
    assert bench.ids("billing") == ["m-1"]


async def test_a_message_returned_while_the_row_of_its_failure_is_free_is_not_removed_for_that(bench) -> None:
    """Its claim was lost before the failure was written. The same process claims the row next."""
    message = bench.message(due_in=-1, destination="nowhere")
    bench.store.faults.add(Fault("finish", StoreUnavailable("locked"), calls=[1]))
    await bench.keep(message)
    async with bench.dispatcher.overlap_batches():
        await bench.look()
        await bench.clock.run_until_idle()
        assert bench.ids("error") == ["m-1"]
        await bench.dispatcher.finisher.finish([], Outcome.DELIVERED)  # so the store is known to answer again
        lose_claims(bench)
        await bench.create_queues("nowhere")
        bench.intake = bench.intake_of(bench.memory)
        received = await bench.put_in_timeouts_queue(timeouts_queue_envelope(message, "sales.timeouts"))
        await bench.pump.handle(received._replace(failures=1))
        await bench.look_for(5 * SECOND)
    assert bench.ids("nowhere") == ["m-1"]
    assert await bench.waiting() is None


@pytest.mark.parametrize("error", [None, TransportUnavailable("nack")], ids=["was sent", "was refused"])
async def test_a_claim_that_cannot_be_released_is_so_later_whatever_became_of_the_lost_one(
    bench, error: PostdateError | None
) -> None:
    """It was lost while its message was sent, that was claimed again, and the store refused to take that back."""
    gate = Sends(bench).next(error)
    recovery = bench.dispatcher._recovery
    recovery._settings = replace(recovery._settings, number_of_retries=5)
    await bench.keep(bench.message(due_in=-1))
    async with bench.dispatcher.overlap_batches():
        await bench.look()
        await bench.clock.run_until_idle()
        lose_claims(bench)
        bench.store.faults.add(Fault("release", AWAY))
        await bench.look()
        gate.set()
        await bench.clock.run_until_idle()
        bench.store.faults.clear()
        await bench.look_for(10 * SECOND if error is None else 90 * SECOND)
    assert bench.ids("billing") == ["m-1"]
    assert await bench.waiting() is None


async def test_a_release_of_a_claim_does_not_take_the_place_of_what_was_sent(bench) -> None:
    """Removing failed, the claim was lost, and what was claimed again had to be given back before it was compared."""
    bench.store.faults.add(Fault("finish", StoreUnavailable("locked")))
    await bench.keep(bench.message(due_in=-1))
    async with bench.dispatcher.overlap_batches():
        await bench.look()
        await bench.clock.run_until_idle()
        lose_claims(bench)
        bench.store.faults.add(Fault("release", AWAY))
        claims = await bench.memory.claim_due(bench.clock.now() + SECOND, 10)
        await bench.dispatcher.release_late_claims(claims)
        bench.store.faults.clear()
        await bench.look_for(10 * SECOND)
    assert bench.ids("billing") == ["m-1"]
    assert await bench.waiting() is None


async def test_a_success_while_a_probe_is_claimed_ends_the_backoff(bench) -> None:
    """502 messages waited for a healthy transport: eleven were sent in twelve seconds."""
    sends, claim_due = Sends(bench), bench.memory.claim_due
    slow, gone = sends.next(), sends.next(TransportUnreachable("gone"))
    gone.set()
    async with bench.dispatcher.overlap_batches():
        for id_ in ("slow", "gone"):
            await bench.keep(bench.message(id_, -1))
            await bench.look()
            await bench.clock.run_until_idle()
        assert bench.dispatcher._recovery.probing.is_waiting
        await bench.clock.advance(SECOND)

        async def claims_while_the_other_succeeds(now: datetime, limit: int):
            bench.memory.claim_due = claim_due
            slow.set()
            await bench.clock.run_until_idle()
            return await claim_due(now, limit)

        bench.memory.claim_due = claims_while_the_other_succeeds
        await bench.look()
        await bench.clock.run_until_idle()
        await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(500)])
        await bench.look()
        await bench.look()
        await bench.clock.run_until_idle()
    assert len(bench.ids("billing")) == 502


async def test_a_look_that_asks_nothing_does_not_count_as_an_answer_of_the_store(bench) -> None:
    """Between failing probes it disarmed the breaker, 119 times in two minutes."""
    breaker, recovered = RepeatedFailures("fetch", "fetch", 30 * SECOND, bench.note_critical), list[float]()
    poller = Poller(bench.dispatcher, bench.clock, breaker, lambda: recovered.append(bench.clock.monotonic()))
    await bench.keep(bench.message(due_in=1))
    for method in ("finish", "release", "next_attempt"):
        bench.store.faults.add(Fault(method, AWAY))
    bench.store.faults.add(lambda call: AWAY if call.method == "claim_due" and bench.ids("billing") else None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)
        await bench.clock.advance(120 * SECOND)
        assert "fetch" in bench.critical_errors
        assert recovered == []
        bench.store.faults.clear()
        await bench.clock.advance(20 * SECOND)
        poller.stop()
    assert bench.ids("billing") == ["m-1"]


async def test_an_empty_store_that_answers_is_not_out_of_reach(bench) -> None:
    """The answer to a removal was lost; all that is asked again answers that there is nothing."""
    bench.store.faults.add(Fault("finish", AWAY, calls=[1], after=True))
    await bench.keep(bench.message(due_in=-1))
    async with bench.dispatcher.overlap_batches():
        await bench.look_for(5 * SECOND)
        assert not bench.dispatcher.finisher._outage.is_failing
        claims = bench.store.faults.calls["claim_due"]
        await bench.look_for(60 * SECOND)
    assert bench.store.faults.calls["claim_due"] - claims <= 61
    assert bench.ids("billing") == ["m-1"]


async def test_messages_of_one_full_queue_are_given_back_together(bench) -> None:
    """There were as many calls as messages: each had a time of its own."""
    gate = Sends(bench).next(DestinationUnavailable("full"))
    gate.set()
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(500)])
    bench.dispatcher._in_flight.expect_message_size(100)
    now, calls = bench.clock.now, itertools.count()
    bench.clock.now = lambda: now() + timedelta(microseconds=next(calls))  # as real clocks do, it goes on
    async with bench.dispatcher.overlap_batches():
        await bench.look()
        await bench.clock.run_until_idle()
    assert 1 <= bench.store.faults.calls["release"] <= 4


async def test_a_look_that_is_cancelled_gives_back_what_it_has_claimed(bench) -> None:
    """Between the claim and the batch nobody had it."""
    await bench.keep(bench.message("full-1", -1, "full"), bench.message("m-1", -1))
    bench.dispatcher._recovery.destinations.report_refusal("full", bench.clock.monotonic())
    asked = anyio.Event()

    async def never(*_: object) -> int:
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    release, bench.memory.release = bench.memory.release, never
    async with bench.dispatcher.overlap_batches():
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bench.look)
                await asked.wait()
                bench.memory.release = release
                scope.cancel()
    bench.dispatcher._recovery.destinations.report_success("full")
    async with bench.dispatcher.overlap_batches():
        await bench.look_for(5 * SECOND)
    assert bench.ids("billing") == ["m-1"]
