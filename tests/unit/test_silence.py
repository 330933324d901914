"""Adapters that never answer, answer late, or end with a cancellation of their own (ADR 0019).

A call that does not end even when it is cancelled stands for one in a blocked thread: it shields itself.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tests.waiting import until

from postdate import DelayedDelivery, DelayedMessage, Endpoint, MemoryStore, MemoryTransport
from postdate.clock import SystemClock
from postdate.core.circuit_breaker import RepeatedFailures
from postdate.core.finishing import GivingBack
from postdate.core.guard import ANSWERS_WITHIN, OF_TRANSPORTS, CallWatch, Guard, calling_store, left_behind
from postdate.core.intake import Intake
from postdate.core.letting_through import Mover
from postdate.core.poller import Poller
from postdate.core.receive.settling import WatchedReceiver
from postdate.endpoint.outgoing import through_queue
from postdate.errors import StoreUnavailable, StoreUnreachable, TransportUnavailable, TransportUnreachable
from postdate.messages import Envelope
from postdate.ports import RecordKind
from postdate.runtime.threads import in_thread, our_threads
from postdate.testing import Fault, FaultyMovingStore, VirtualClock

SECOND = timedelta(seconds=1)


class Silent:
    """Makes calls of a method wait, whatever is done to them, until :attr:`answers` is set; then they take effect."""

    def __init__(self, adapter: Any, method: str, *, shielded: bool = True, calls: int = 1_000_000) -> None:
        self.answers, self.calls, self._shielded = anyio.Event(), 0, shielded
        self._call: Callable[..., Awaitable[Any]] = getattr(adapter, method)
        self._silent = calls
        setattr(adapter, method, self)

    async def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls <= self._silent:
            with anyio.CancelScope(shield=self._shielded):
                await self.answers.wait()
        return await self._call(*args, **more)


@pytest.fixture
async def bench(make_bench):
    bench = make_bench()
    await bench.create_queues("billing")
    return bench


@asynccontextmanager
async def polling(bench) -> AsyncGenerator[Poller]:
    poller = Poller(bench.dispatcher, bench.clock, RepeatedFailures("fetch", "fetch", 30 * SECOND, bench.note_critical))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)
        await bench.clock.settle()
        yield poller
        poller.stop()


# --- the guard --------------------------------------------------------------------------------------------------------


async def raises(guard: Guard, call: Callable[[], Awaitable[Any]], clock: VirtualClock, after: timedelta) -> str:
    """Return the text of the error, which comes ``after`` so long."""
    told = list[str]()

    async def make() -> None:
        try:
            await guard.call(call)
        except StoreUnavailable as error:
            told.append(f"{error.code}: {error}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make)
        await clock.advance(after - timedelta(microseconds=1))
        assert told == []
        await clock.advance(timedelta(microseconds=1))
        assert told
    return told[0]


async def test_a_call_that_is_not_answered_is_cancelled(clock: VirtualClock) -> None:
    guard = Guard.of_store(MemoryStore(), clock)
    text = await raises(guard, anyio.sleep_forever, clock, ANSWERS_WITHIN)
    assert text == "store_unreachable: MemoryStore did not answer within 40 s"
    assert left_behind() == 0


async def test_a_call_that_does_not_let_itself_be_cancelled_is_left_behind_and_what_it_brings_is_dealt_with(
    clock: VirtualClock,
) -> None:
    guard, answer, brought = Guard.of_store(MemoryStore(), clock, 2 * SECOND), anyio.Event(), list[int]()

    async def deaf() -> int:
        with anyio.CancelScope(shield=True):
            await answer.wait()
        return 7

    async def late(result: int) -> None:
        brought.append(result)

    async def make() -> None:
        with pytest.raises(StoreUnreachable):
            await guard.call(deaf, late)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make)
        await clock.advance(3 * SECOND)
    assert left_behind() == 1
    answer.set()
    await clock.settle()
    assert brought == [7]
    assert left_behind() == 0


async def test_a_deadline_ends_a_call_though_calls_that_hang_have_all_threads() -> None:
    """The clock slept the last millisecond of each wait in one of them: no deadline was ever over then."""
    free = threading.Event()
    guard = Guard.of_store(MemoryStore(), SystemClock(), SECOND / 10)

    async def hang() -> None:
        await in_thread(free.wait)

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(int(our_threads().total_tokens)):
                tasks.start_soon(hang)
            await until(lambda: not our_threads().available_tokens)
            with pytest.raises(StoreUnreachable):
                await guard.call(anyio.sleep_forever)
            free.set()
    finally:
        free.set()


async def test_a_late_failure_is_said_and_ends_nothing(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    guard, answer = Guard.of_store(MemoryStore(), clock, SECOND), anyio.Event()

    async def deaf() -> None:
        with anyio.CancelScope(shield=True):
            await answer.wait()
        raise OSError("connection reset")

    await raises(guard, deaf, clock, 2 * SECOND)
    answer.set()
    await clock.settle()
    assert caplog.messages == ["a call that nobody waited for any more failed: connection reset"]


async def test_a_cancellation_of_the_adapters_own_is_an_outage_like_any_other(clock: VirtualClock) -> None:
    """It ended delivery, and nothing said so."""

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(StoreUnavailable, match="MemoryStore failed with CancelledError"):
        await Guard.of_store(MemoryStore(), clock).call(cancelled)
    with pytest.raises(TransportUnavailable):
        await Guard.of_transport(MemoryTransport(), clock).call(cancelled)


async def test_who_is_cancelled_gets_what_the_call_has_brought_and_ends_at_the_next_wait(clock: VirtualClock) -> None:
    guard, answer, got = Guard.of_store(MemoryStore(), clock), anyio.Event(), list[int]()

    async def deaf() -> int:
        with anyio.CancelScope(shield=True):
            await answer.wait()
        return 7

    async def make() -> None:
        got.append(await guard.call(deaf))
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make)
        await clock.settle()
        tasks.cancel_scope.cancel()
        asyncio.get_running_loop().call_soon(answer.set)
    assert got == [7]


async def test_a_failure_has_its_traceback_in_the_log_once(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard.of_store(MemoryStore(), clock)

    async def fail() -> None:
        raise KeyError("a bug")

    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await guard.call(fail)
    assert [bool(record.exc_info) for record in caplog.records] == [True]


@pytest.mark.parametrize("slots", [False, True])
async def test_so_it_has_where_no_guard_makes_the_call(caplog: pytest.LogCaptureFixture, slots: bool) -> None:
    """A pump that cannot receive tried each second, with a traceback each time."""
    adapter = WithSlots() if slots else MemoryStore()
    for text in ("first", "first", "second", "first"):
        with pytest.raises(StoreUnavailable), calling_store(adapter):
            raise KeyError(f"{text} of {slots}")
    assert [bool(record.exc_info) for record in caplog.records] == [True, True]


class WithSlots:
    """Cannot be a weak key."""

    __slots__ = ()


async def test_no_connection_of_an_adapter_of_ones_own_says_nothing_about_a_message(clock: VirtualClock) -> None:
    async def refused() -> None:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(TransportUnreachable):
        await Guard.of_transport(MemoryTransport(), clock).call(refused)


# --- a store that falls silent ----------------------------------------------------------------------------------------


async def test_a_look_that_is_never_answered_is_an_outage_and_what_it_claims_at_last_goes_back(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    silent = Silent(bench.memory, "claim_due", calls=1)
    await bench.keep(bench.message("m-1", -1))
    async with polling(bench):
        await bench.clock.advance(41 * SECOND)
        assert "cannot take due messages: FaultyStore did not answer within 40 s" in caplog.messages
        await bench.clock.advance(5 * SECOND)  # the next look is answered
        assert bench.ids("billing") == ["m-1"]
        await bench.keep(bench.message("m-2", 90), bench.message("m-3", 3_600))
        await bench.clock.settle()
        bench.memory._entries["m-2"].attempt_at = bench.start - SECOND  # due, of which the poller does not know
        silent.answers.set()
        await bench.clock.settle()
        assert (await bench.memory.statistics(bench.clock.now())).claimed == 0
        assert bench.ids("billing") == ["m-1", "m-2"]  # what is given back wakes
    assert len([each for each in caplog.messages if each.startswith("cannot take due")]) == 1


async def test_what_a_late_look_has_claimed_goes_back_though_the_store_fails_at_that_first(bench) -> None:
    """It comes late when the store has just recovered: then one failure is likely, and all of it was held for good."""
    silent = Silent(bench.memory, "claim_due", calls=1)
    await bench.keep(*[bench.message(f"m-{n}", 50) for n in range(5)])
    async with polling(bench):
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
    async with polling(bench) as poller:
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
    bench.dispatcher.finisher.keep([GivingBack(claim, None)])
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


async def test_what_was_sent_while_removing_was_never_answered_is_removed_and_not_sent_again(bench) -> None:
    silent = Silent(bench.memory, "finish", calls=1)
    await bench.keep(bench.message("m-1", -1))
    async with polling(bench):
        await bench.clock.advance(60 * SECOND)
        assert await bench.waiting() is None
        silent.answers.set()
        await bench.clock.settle()
    assert bench.ids("billing") == ["m-1"]


async def test_the_intake_waits_for_a_silent_store_without_counting_and_stores_once(bench) -> None:
    Silent(bench.memory, "store", shielded=False, calls=1)
    received = await bench.put_in_timeouts_queue(through_queue(bench.message(due_in=600), "sales.timeouts"))
    watch = bench.receiver.watch
    bench.intake = Intake(watch, bench.store, bench.transport, bench.settings, bench.clock, bench.store_breaker)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        tasks.start_soon(bench.pump.handle, received)
        await bench.clock.advance(39 * SECOND)
        assert (await bench.memory.statistics(bench.start)).pending == 0
        await bench.clock.advance(10 * SECOND)
        assert (await bench.memory.statistics(bench.start)).pending == 1
        tasks.cancel_scope.cancel()
    assert bench.ids("error") == bench.ids("sales.timeouts") == []
    assert (await bench.memory.statistics(bench.start)).pending == 1


# --- queues that fall silent ------------------------------------------------------------------------------------------


async def test_a_send_that_is_never_answered_counts_nothing_and_when_it_is_answered_late_nothing_is_sent_again(
    bench,
) -> None:
    silent = Silent(bench.queues, "send", calls=1)
    await bench.keep(bench.message("m-1", -1))
    async with polling(bench):
        await bench.clock.advance(35 * SECOND)
        waiting = await bench.memory.get("m-1")
        assert waiting is not None
        assert waiting.number_of_failures == 0
        silent.answers.set()
        await bench.clock.settle()
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


async def test_a_commit_that_is_never_answered_is_an_outage_said_once_and_its_message_is_handled_again(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    queues, handled = MemoryTransport(), list[bytes]()
    make, silent = queues.receiver, list[Silent]()

    def receiver(queue: str) -> Any:
        made = make(queue)
        silent.append(Silent(made, "commit", shielded=False, calls=1))
        return made

    queues.receiver = receiver
    endpoint = Endpoint("sales", transport=queues, clock=clock)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: object) -> None:
        handled.append(message)

    async with endpoint:
        await endpoint.send(b"1", destination="sales")
        await clock.advance(39 * SECOND)
        assert handled == [b"1"]
        await clock.advance(5 * SECOND)
        assert handled == [b"1", b"1"]
        assert await queues.queue_lengths() == {"sales": 0, "error": 0}
    said = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert said == ["cannot receive from sales: MemoryReceiver did not answer within 40 s"]


@pytest.mark.parametrize("ending", ["returns", "raises an error of ours", "is cancelled"])
async def test_however_a_call_ends_that_was_cancelled_for_want_of_an_answer_its_task_is_not_cancelled_after_it(
    clock: VirtualClock, ending: str
) -> None:
    """A stray cancellation of a later message was taken for one of ours, and so was that of a user's task group."""
    watch, counts = CallWatch(clock, SECOND), list[int]()

    async def answer() -> None:
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            if ending == "is cancelled":
                raise
            if ending != "returns":
                raise TransportUnreachable("translated") from None

    async def call() -> None:
        with suppress(TransportUnreachable):
            await watch.call(answer(), watch, OF_TRANSPORTS)
        task = asyncio.current_task()
        assert task is not None
        counts.append(task.cancelling())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        calling = asyncio.create_task(call())
        await clock.advance(2 * SECOND)
        await calling
        tasks.cancel_scope.cancel()
    assert counts == [0]
    assert watch.overdue == 0


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


async def test_calls_of_a_receiver_are_looked_after_only_while_there_are_any(clock: VirtualClock) -> None:
    """A month of virtual time is not made of looks."""
    queues = MemoryTransport()
    await queues.create_queues(["sales"])
    await queues.send([Envelope("sales", "m-1")], clock.now())
    receiver = WatchedReceiver(queues.receiver("sales"), clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receiver.watch.run)
        (received,) = await receiver.receive(1)
        await receiver.commit(received, clock.now())
        await clock.advance(timedelta(minutes=2))
        assert clock.next_wait is None
        tasks.cancel_scope.cancel()


async def test_an_endpoint_whose_store_is_silent_is_left_within_a_bound(clock: VirtualClock) -> None:
    queues, store = MemoryTransport(), MemoryStore()
    await queues.create_queues(["billing"])
    delayed = DelayedDelivery(store)
    endpoint = Endpoint("sales", transport=queues, delayed_delivery=delayed, send_only=True, clock=clock)

    async def one() -> None:
        Silent(store, "claim_due")
        Silent(store, "store")
        late = through_queue(make_message(clock), "sales.timeouts")
        await queues.send([late], clock.now())
        await clock.sleep(SECOND)

    assert await run_endpoint(clock, endpoint, one) <= 20 * SECOND


def make_message(clock: VirtualClock) -> DelayedMessage:
    return DelayedMessage("m-1", clock.now() + timedelta(hours=1), "billing")
