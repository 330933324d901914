"""Services whose stores and queues never answer, or answer late (ADR 49). What a deadline does is in test_deadlines.

A call that does not end even when it is cancelled stands for one in a blocked thread: it shields itself. One in the
task of its caller swallows cancellations, too: there a deadline comes by asyncio's own means.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tests.unit.timeouts_bench import deferred

from postdate import DelayedDelivery, DelayedMessage, Endpoint, MemoryStore, MemoryTransport, TimeoutManager
from postdate.backends.memory.database import MemoryTimeouts
from postdate.core.due.moving import Mover
from postdate.core.due.poller import Poller
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.health.message_memory import Release
from postdate.core.receive.outcomes import StepOutcome
from postdate.core.receive.pump import MessagePump
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import StoreUnavailable
from postdate.messages import Envelope
from postdate.ports import HANDLED, Received, RecordKind
from postdate.testing import Fault, FaultyMovingStore, VirtualClock

SECOND = timedelta(seconds=1)


class Silent:
    """Makes calls of a method wait, whatever is done to them, until :attr:`answers` is set; then they take effect."""

    def __init__(
        self, adapter: Any, method: str, *, shielded: bool = True, swallows: bool = False, calls: int = 1_000_000
    ) -> None:
        """``swallows``: cancellations; :attr:`answers` must be set in the end, as the loop waits for all tasks."""
        self.answers, self.calls, self._shielded, self._swallows = anyio.Event(), 0, shielded, swallows
        self._call: Callable[..., Awaitable[Any]] = getattr(adapter, method)
        self._silent = calls
        setattr(adapter, method, self)

    async def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls <= self._silent:
            with anyio.CancelScope(shield=self._shielded):
                while not self.answers.is_set():
                    with suppress(asyncio.CancelledError) if self._swallows else nullcontext():
                        await self.answers.wait()
        return await self._call(*args, **more)


@pytest.fixture
async def bench(make_bench):
    bench = make_bench()
    await bench.create_queues("billing")
    return bench


# --- a store that falls silent ----------------------------------------------------------------------------------------


async def test_a_look_that_is_never_answered_is_an_outage_and_what_it_claims_at_last_goes_back(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Silent(bench.memory, "claim_due", calls=1)
    await bench.keep(bench.message("m-1", -1))
    async with bench.polling():
        await bench.clock.advance(41 * SECOND)
        assert "cannot claim due messages: FaultyStore did not answer within 40 s" in caplog.messages
        await bench.clock.advance(5 * SECOND)  # the next look is answered
        assert bench.ids("billing") == ["m-1"]
        await bench.keep(bench.message("m-2", 90), bench.message("m-3", 3_600))
        await bench.clock.run_until_idle()
        bench.memory._entries["m-2"].attempt_at = bench.start - SECOND  # due, of which the poller does not know
        silent.answers.set()
        await bench.clock.run_until_idle()
        assert (await bench.memory.statistics(bench.clock.now())).claimed == 0
        assert bench.ids("billing") == ["m-1", "m-2"]  # what is given back wakes
    assert len([each for each in caplog.messages if each.startswith("cannot claim due")]) == 1


async def test_what_a_late_look_has_claimed_goes_back_though_the_store_fails_at_that_first(bench) -> None:
    """It comes late when the store has just recovered: then one failure is likely, and all of it was held for good."""
    silent = Silent(bench.memory, "claim_due", calls=1)
    await bench.keep(*[bench.message(f"m-{n}", 50) for n in range(5)])
    async with bench.polling():
        await bench.clock.advance(41 * SECOND)
        bench.store.faults.add(Fault("release", StoreUnavailable("deadlock detected"), calls=[1]))
        for entry in bench.memory._entries.values():
            entry.attempt_at = bench.start - SECOND  # the late look finds them
        silent.answers.set()
        await bench.clock.advance(5 * SECOND)
    assert sorted(bench.ids("billing")) == [f"m-{n}" for n in range(5)]


async def test_a_call_that_was_left_behind_long_ago_keeps_no_other_from_being_made_at_the_stop(bench) -> None:
    """What had been sent was not removed for that, and was sent again by the next process."""
    send = bench.queues.send
    silent = Silent(bench.memory, "next_attempt", calls=1)
    await bench.keep(bench.message("m-1", 100))

    async def be_slow(*args: Any, **more: Any) -> Any:
        await bench.clock.sleep(3 * SECOND)
        return await send(*args, **more)

    bench.queues.send = be_slow
    async with bench.polling() as poller:
        await bench.clock.advance(101 * SECOND)
        poller.stop()
        await bench.clock.advance(5 * SECOND)
    assert bench.ids("billing") == ["m-1"]
    assert await bench.waiting() is None
    silent.answers.set()


@pytest.mark.parametrize("method", ["claim_due", "finish", "next_attempt"])
async def test_stopping_does_not_wait_for_a_store_that_is_silent(bench, method: str) -> None:
    Silent(bench.memory, method)
    await bench.keep(bench.message("m-1", -1))
    ended = anyio.Event()
    poller = Poller(bench.dispatcher, bench.clock, bench.breaker)

    async def run() -> None:
        await poller.run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await bench.clock.advance(SECOND)
        poller.stop()
        await bench.clock.advance(12 * SECOND)
        assert ended.is_set()


async def test_a_mover_that_stops_waits_for_its_silent_store_once(bench) -> None:
    """Not for the move, and then again for what was still to be written."""
    store = FaultyMovingStore(bench.memory)
    Silent(store, "move_due")
    Silent(bench.memory, "release")
    await bench.keep(bench.message("m-1", -1))
    (claim,) = await bench.memory.claim_due(bench.clock.now(), 1)
    bench.dispatcher.finisher.release_later([Release(claim, None)])
    poller = Poller(Mover(store, bench.dispatcher, bench.clock), bench.clock, bench.breaker)
    ended, stopped = list[float](), 0.0

    async def run() -> None:
        await poller.run()
        ended.append(bench.clock.monotonic())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await bench.clock.advance(SECOND)
        poller.stop()
        stopped = bench.clock.monotonic()
        await bench.clock.advance(60 * SECOND)
    assert ended[0] - stopped <= 12


# --- queues that fall silent ------------------------------------------------------------------------------------------


async def test_a_send_that_is_never_answered_counts_nothing_and_when_it_is_answered_late_nothing_is_sent_again(
    bench,
) -> None:
    silent = Silent(bench.queues, "send", calls=1)
    await bench.keep(bench.message("m-1", -1))
    async with bench.polling():
        await bench.clock.advance(35 * SECOND)
        waiting = await bench.memory.get("m-1")
        assert waiting is not None
        assert waiting.number_of_failures == 0
        silent.answers.set()
        await bench.clock.run_until_idle()
        await bench.clock.advance(30 * SECOND)
        assert await bench.waiting() is None
    assert bench.ids("billing") == ["m-1"]
    assert bench.ids("error") == []
    assert RecordKind.RETRIED not in {record.kind for record in await bench.memory.history("m-1")}


async def run_endpoint(
    clock: VirtualClock, endpoint: Endpoint, while_it_runs: Callable[[], Awaitable[None]]
) -> timedelta:
    """Run an endpoint and leave it; return how long leaving took."""
    lasted = timedelta(0)
    async with anyio.create_task_group() as tasks:
        left = anyio.Event()

        async def run() -> None:
            async with endpoint:
                await while_it_runs()
            left.set()

        tasks.start_soon(run)
        await clock.advance(5 * SECOND)
        began = clock.now()
        while not left.is_set():
            await clock.advance(SECOND)
            lasted = clock.now() - began
            assert lasted < timedelta(minutes=3)
    return lasted


@pytest.mark.parametrize("shielded", [True, False], ids=["deaf", "cancellable"])
@pytest.mark.parametrize("method", ["commit", "receive", "close"])
async def test_leaving_an_endpoint_does_not_wait_for_a_queue_that_is_silent(
    clock: VirtualClock, method: str, shielded: bool
) -> None:
    queues = MemoryTransport()
    await queues.create_queues(["sales"])
    make = queues.receiver

    def receiver(queue: str) -> Any:
        made = make(queue)
        if queue == "sales":
            Silent(made, method, shielded=shielded)
        return made

    queues.receiver = receiver
    endpoint = Endpoint("sales", transport=queues, clock=clock)
    handled = anyio.Event()

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: object) -> None:
        handled.set()

    async def one() -> None:
        await endpoint.send(b"1", destination="sales")
        if method == "commit":
            await handled.wait()

    assert await run_endpoint(clock, endpoint, one) <= 20 * SECOND


async def messages_in_hand(
    clock: VirtualClock, count: int, *, shielded: bool, prefetches: bool
) -> tuple[MessagePump, anyio.Event]:
    """Return a pump of so many messages, whose queue takes and gives back none; and an event that has it answer."""
    queues = MemoryTransport()
    await queues.create_queues(["sales"])
    await queues.send([Envelope("sales", f"m-{n}") for n in range(count)], clock.now())
    receiver, answers = queues.receiver("sales"), anyio.Event()
    for method in ("commit", "settle", "roll_back"):
        Silent(receiver, method, shielded=shielded, swallows=shielded).answers = answers

    async def handle(received: Received) -> StepOutcome:
        return StepOutcome(HANDLED)

    breaker = RepeatedFailures("Receive", "failed", 30 * SECOND, lambda text, error: None)
    return MessagePump(receiver, handle, 4, clock, breaker, "sales", prefetches=prefetches), answers


@pytest.mark.parametrize("prefetches", [True, False], ids=["in batches", "one by one"])
@pytest.mark.parametrize("shielded", [True, False], ids=["deaf", "cancellable"])
async def test_a_pump_that_stops_waits_once_for_its_silent_queue_however_many_messages_are_in_hand(
    clock: VirtualClock, shielded: bool, prefetches: bool
) -> None:
    """It waited for each message: eight minutes for a hundred of them."""
    pump, answers = await messages_in_hand(clock, 100, shielded=shielded, prefetches=prefetches)
    task = asyncio.create_task(pump.run())
    await clock.advance(SECOND)
    pump.stop()
    await clock.advance(20 * SECOND)
    assert task.done()
    answers.set()


@pytest.mark.parametrize("prefetches", [True, False], ids=["in batches", "one by one"])
@pytest.mark.parametrize("shielded", [True, False], ids=["deaf", "cancellable"])
async def test_a_pump_that_is_cancelled_does_not_wait_for_ever_for_its_silent_queue(
    clock: VirtualClock, shielded: bool, prefetches: bool
) -> None:
    """With it, the watch ended by which it knew which calls were overdue."""
    pump, answers = await messages_in_hand(clock, 1, shielded=shielded, prefetches=prefetches)
    task = asyncio.create_task(pump.run())
    await clock.advance(SECOND)
    task.cancel()
    await clock.advance(20 * SECOND)
    assert task.done()
    answers.set()


async def test_a_handler_may_take_as_long_as_it_likes(clock: VirtualClock) -> None:
    queues, done = MemoryTransport(), anyio.Event()
    endpoint = Endpoint("sales", transport=queues, clock=clock)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: object) -> None:
        await clock.sleep(timedelta(hours=3))
        done.set()

    async def one() -> None:
        await endpoint.send(b"1", destination="sales")

    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            async with endpoint:
                await one()
                await clock.sleep(SECOND)

        tasks.start_soon(run)
        await clock.advance(timedelta(hours=4))
    assert done.is_set()
    assert await queues.queue_lengths() == {"sales": 0, "error": 0}


async def test_an_endpoint_whose_store_is_silent_is_left_within_a_bound(clock: VirtualClock) -> None:
    queues, store = MemoryTransport(), MemoryStore()
    await queues.create_queues(["billing"])
    delayed = DelayedDelivery(store)
    endpoint = Endpoint("sales", transport=queues, delayed_delivery=delayed, send_only=True, clock=clock)

    async def one() -> None:
        Silent(store, "claim_due")
        Silent(store, "store")
        late = timeouts_queue_envelope(make_message(clock), "sales.timeouts")
        await queues.send([late], clock.now())
        await clock.sleep(SECOND)

    assert await run_endpoint(clock, endpoint, one) <= 20 * SECOND


@pytest.mark.parametrize("method", ["add", "claim", "next_chunk"])
async def test_an_endpoint_whose_storage_of_timeouts_is_silent_is_left_within_a_bound(
    clock: VirtualClock, method: str
) -> None:
    """What was in hand at the stop waited for its usual deadline."""
    queues, timeouts = MemoryTransport(), MemoryTimeouts()
    silent = Silent(timeouts, method)
    endpoint = Endpoint("sales", transport=queues, timeout_manager=TimeoutManager(timeouts), clock=clock)

    async def one() -> None:
        await queues.send([deferred(clock.now() + 2 * SECOND)], clock.now())
        await clock.sleep(4 * SECOND)
        assert silent.calls

    assert await run_endpoint(clock, endpoint, one) <= 20 * SECOND


def make_message(clock: VirtualClock) -> DelayedMessage:
    return DelayedMessage("m-1", clock.now() + timedelta(hours=1), "billing")
