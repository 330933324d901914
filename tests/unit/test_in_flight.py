"""Several batches at once, and destinations that do not answer: nobody waits for them, and nothing is lost (row 55)."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.unit.test_telemetry import exported

from postdate import Envelope, ScaledClock
from postdate.clock import in_real_time
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.in_flight import BATCHES_AT_ONCE, MOST_CLAIMS, Batch, Group, InFlight
from postdate.core.due.poller import Poller
from postdate.errors import PostdateError, StoreUnavailable, TransportUnavailable
from postdate.ports import RecordKind, Work
from postdate.telemetry.metrics import OpenTelemetryMetrics
from postdate.testing import Fault

SECOND = timedelta(seconds=1)
MILLISECOND = timedelta(milliseconds=1)
DOWN = TransportUnavailable("down")


class Gates:
    """Holds up sends to chosen destinations until they are let through."""

    def __init__(self, bench) -> None:
        self.closed: dict[str, anyio.Event] = {}
        self.sends: list[Counter[str]] = []
        self._send, bench.queues.send = bench.queues.send, self.send

    def close(self, *destinations: str) -> None:
        self.closed.update({destination: anyio.Event() for destination in destinations})

    def open(self, destination: str) -> None:
        self.closed.pop(destination).set()

    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        self.sends.append(Counter(envelope.destination for envelope in envelopes))
        for destination in self.sends[-1]:
            if destination in self.closed:
                await self.closed[destination].wait()
        return await self._send(envelopes, now, work=work)


@pytest.fixture
def make(make_bench) -> Callable:
    async def make(**settings):
        bench = make_bench(**settings)
        await bench.create_queues("billing", "shipping", "slow")
        bench.gates = Gates(bench)
        return bench

    return make


@pytest.fixture
async def bench(make):
    return await make()


def pipelined(bench) -> None:
    bench.queues._capabilities = replace(bench.queues.capabilities, pipelines=True)


# --- the common case --------------------------------------------------------------------------------------------------


async def test_a_batch_to_many_destinations_is_removed_by_one_call(bench) -> None:
    await bench.keep(*[bench.message(f"m-{n}", -1, ("billing", "shipping", "slow")[n % 3]) for n in range(900)])
    await bench.look()
    assert bench.store.faults.calls["claim_due"] == bench.store.faults.calls["finish"] == 1
    assert bench.gates.sends == [Counter(billing=300), Counter(shipping=300), Counter(slow=300)]


async def test_a_transport_that_pipelines_gets_a_batch_in_one_call(bench) -> None:
    pipelined(bench)
    batch = [bench.message(f"m-{n}", n - 10, ("billing", "shipping", "nowhere")[n % 3]) for n in range(9)]
    await bench.keep(*batch)
    await bench.look()
    assert bench.gates.sends[0] == Counter(billing=3, shipping=3, nowhere=3)
    assert bench.ids("error") == ["m-2", "m-5", "m-8"]
    assert await bench.waiting() is None


async def test_batches_overlap_but_no_more_than_four(bench) -> None:
    pipelined(bench)
    bench.gates.close("billing")
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(6_000)])
    async with bench.polling():
        assert len(bench.gates.sends) == BATCHES_AT_ONCE == 4
        bench.gates.open("billing")
        await bench.clock.run_until_idle()
        assert bench.ids("billing") == [f"m-{n}" for n in range(6_000)]
    assert bench.store.faults.calls["finish"] == 6


async def test_a_message_that_is_due_alone_leaves_at_once(bench) -> None:
    await bench.keep(bench.message(due_in=1))
    async with bench.polling():
        await bench.clock.advance(SECOND + timedelta(microseconds=1))
        assert bench.ids("billing") == ["m-1"]


# --- destinations that hang -------------------------------------------------------------------------------------------


async def test_a_slow_destination_does_not_hold_up_another(bench) -> None:
    bench.gates.close("slow")
    await bench.keep(bench.message("slow", -2, "slow"), bench.message("quick", -1, "billing"))
    async with bench.polling():
        assert bench.ids("billing") == ["quick"]
        assert await bench.memory.get("quick") is not None  # not removed yet: the rest has a moment to answer
        await bench.clock.advance(250 * MILLISECOND)
        assert await bench.memory.get("quick") is None
        await bench.keep(bench.message("next", -1))
        await bench.clock.run_until_idle()
        assert bench.ids("billing") == ["quick", "next"]
        await bench.clock.advance(30 * SECOND)
        assert bench.ids("error") == []
        bench.gates.open("slow")
        await bench.clock.advance(SECOND)
        assert bench.ids("slow") == ["slow"]
    assert RecordKind.RETRIED not in {record.kind for record in await bench.memory.history("slow")}


async def test_thousands_for_a_destination_that_hangs_hold_up_others_for_no_more_than_two_seconds(make) -> None:
    bench = await make(number_of_retries=0)
    bench.gates.close("slow")
    await bench.keep(*[bench.message(f"s-{n}", -2, "slow") for n in range(12_000)], bench.message("quick", -1))
    held: list[int] = []
    async with bench.polling():
        for _ in range(20):
            await bench.clock.advance(100 * MILLISECOND)
            held.append((await bench.memory.statistics(bench.clock.now())).claimed)
        assert bench.ids("billing") == ["quick"]
        assert max(held) <= MOST_CLAIMS
        assert bench.ids("error") == []  # what only waited for its turn is not given up
        bench.gates.open("slow")
        await bench.clock.advance(200 * SECOND)
    assert len(bench.ids("slow")) == len(set(bench.ids("slow"))) == 12_000
    assert bench.ids("error") == []
    assert await bench.waiting() is None


async def test_a_destination_gets_four_sends_at_once_and_no_more(bench) -> None:
    bench.gates.close("slow")
    await bench.keep(*[bench.message(f"s-{n}", -2, "slow") for n in range(6_000)])
    async with bench.polling():
        assert [each["slow"] for each in bench.gates.sends] == [1_000] * 4
        bench.gates.open("slow")
        await bench.clock.run_until_idle()
        assert len(bench.ids("slow")) == 6_000


async def test_what_waits_long_for_its_turn_has_as_long_for_its_answer_as_what_went_first(bench) -> None:
    """Cut off 30 s after it was claimed, it would have been sent, and be sent again."""
    send = bench.queues.send

    async def take_20_seconds(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        await bench.clock.sleep(20 * SECOND)
        return await send(envelopes, now, work=work)

    bench.queues.send = take_20_seconds
    await bench.keep(*[bench.message(f"s-{n}", -2, "slow") for n in range(6_000)])
    async with bench.polling():
        await bench.clock.advance(41 * SECOND)
        assert sorted(bench.ids("slow")) == sorted(f"s-{n}" for n in range(6_000))
        assert await bench.waiting() is None
    assert bench.ids("error") == []


async def test_what_never_had_a_turn_waits_no_longer_than_30_seconds_and_was_not_attempted(clock) -> None:
    began = clock.monotonic()
    batch = Batch([], clock.now(), began)
    turned, never = Group("slow", [], began), Group("slow", [], began)
    batch.groups = [turned, never]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batch.cancel_late_groups, clock, 30 * SECOND)
        await clock.advance(20 * SECOND)
        turned.start_deadline(clock.monotonic())
        await clock.advance(10 * SECOND)
        assert [group.scope.cancel_called for group in batch.groups] == [False, True]
        assert [group.attempted for group in batch.groups] == [True, False]
        assert never.started_at == began
        await clock.advance(19 * SECOND)
        assert not turned.scope.cancel_called
        await clock.advance(SECOND)
        assert turned.scope.cancel_called


async def test_an_error_queue_that_hangs_gives_up_after_30_seconds_and_the_message_stays_row_41(bench) -> None:
    bench.gates.close("error")
    await bench.keep(bench.message("bad", -2, "nowhere"), bench.message("good", -1))
    async with bench.polling():
        assert bench.ids("billing") == ["good"]
        await bench.clock.advance(30 * SECOND)
        bad = await bench.memory.get("bad")
        assert bad is not None
        assert bad.number_of_failures == 1
        bench.gates.open("error")
        await bench.clock.advance(2 * SECOND)
        assert bench.ids("error") == ["bad"]


async def test_an_error_queue_that_hangs_is_asked_once_for_a_batch(bench) -> None:
    bench.gates.close("error")
    await bench.keep(*[bench.message(f"m-{n}", -2, "nowhere") for n in range(500)])
    async with bench.polling():
        await bench.clock.advance(30 * SECOND)
        assert [each for each in bench.gates.sends if each["error"]] == [Counter(error=1)]
        counts = await bench.memory.statistics(bench.clock.now())
        assert (counts.claimed, counts.failing) == (0, 500)
        bench.gates.open("error")
        await bench.clock.advance(2 * SECOND)
        assert len(bench.ids("error")) == 500


async def test_patience_is_real_time_on_a_clock_that_runs_fast(make) -> None:
    """A day in a minute: 30 s of that clock are 21 ms, in which no network answers."""
    bench = await make()
    fast = ScaledClock(bench.start, speed=1_440)
    assert in_real_time(fast, SECOND) == 1_440 * SECOND
    assert in_real_time(bench.clock, SECOND) == SECOND
    dispatcher = Dispatcher(bench.store, bench.transport, bench.settings, fast, bench.breaker, bench.failure_rate)
    assert dispatcher._sender.longest_send == timedelta(hours=12)


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_transport_that_answers_for_fewer_messages_than_it_was_given_has_failed(make) -> None:
    bench = await make(number_of_retries=5)

    async def forget(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()) -> list[None]:
        return []

    bench.queues.send = forget
    await bench.keep(bench.message(due_in=-1))
    await bench.look()
    waiting = await bench.memory.get("m-1")
    assert waiting is not None
    assert waiting.number_of_failures == 1


async def test_metrics_tell_of_the_claims_that_all_dispatchers_of_a_process_hold(bench) -> None:
    reader, fixed = InMemoryMetricReader(), (bench.settings, bench.clock, bench.breaker, bench.failure_rate)
    metrics = OpenTelemetryMetrics(MeterProvider(metric_readers=[reader]).get_meter("test"))

    def told() -> list[int]:
        return [point.value for point in exported(reader)["postdate.claims.held"].data.data_points]

    bench.gates.close("billing")
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(3)], bench.message("answers", -1, "shipping"))
    async with anyio.create_task_group() as tasks:
        pollers = [
            Poller(Dispatcher(bench.store, bench.transport, *fixed, metrics), bench.clock, bench.breaker)
            for _ in range(2)
        ]
        tasks.start_soon(pollers[0].run)
        await bench.clock.advance(2 * SECOND)
        assert told() == [3]
        tasks.start_soon(pollers[1].run)
        await bench.keep(bench.message("later", -1))
        await bench.clock.advance(2 * SECOND)
        assert told() == [4]
        bench.gates.open("billing")
        await bench.clock.advance(2 * SECOND)
        assert told() == [0]
        for poller in pollers:
            poller.stop()
    assert metrics.open_claims == 0


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_stopping_waits_for_what_is_in_flight_row_55(bench) -> None:
    bench.gates.close("billing")
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(1_500)])
    async with anyio.create_task_group() as tasks, bench.polling() as poller:
        poller.stop()
        tasks.start_soon(let_through, bench)
    assert len(bench.ids("billing")) == 1_500
    assert await bench.waiting() is None


async def test_stopping_claims_no_more_row_55(bench) -> None:
    bench.gates.close("billing")
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(9_000)])
    pipelined(bench)
    async with anyio.create_task_group() as tasks, bench.polling() as poller:
        poller.stop()
        tasks.start_soon(let_through, bench)
    assert len(bench.ids("billing")) % 1_000 == 0
    assert len(bench.ids("billing")) <= 8_000
    counts = await bench.memory.statistics(bench.clock.now())
    assert (counts.pending, counts.claimed) == (9_000 - len(bench.ids("billing")), 0)


async def let_through(bench) -> None:
    await bench.clock.advance(5 * SECOND)
    assert bench.ids("billing") == []
    bench.gates.open("billing")


@asynccontextmanager
async def by_force(bench) -> AsyncGenerator[None]:
    """Poll; then end that without asking."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Poller(bench.dispatcher, bench.clock, bench.breaker).run)
        await bench.clock.run_until_idle()
        yield
        tasks.cancel_scope.cancel()


async def test_what_is_stopped_by_force_is_given_back_and_what_was_sent_is_removed_row_55(bench) -> None:
    bench.gates.close("slow")
    await bench.keep(bench.message("held", -2, "slow"), bench.message("sent", -1))
    finishing = anyio.Event()
    finish = bench.memory.finish

    async def finish_slowly(*args):
        if not finishing.is_set():
            finishing.set()
            await anyio.sleep_forever()
        return await finish(*args)

    bench.memory.finish = finish_slowly
    async with by_force(bench):
        await bench.clock.advance(SECOND)
        assert finishing.is_set()
    assert bench.ids("billing") == ["sent"]
    assert await bench.memory.get("sent") is None
    counts = await bench.memory.statistics(bench.clock.now())
    assert (counts.pending, counts.claimed, counts.failing) == (1, 0, 0)


async def test_a_store_that_is_down_is_not_asked_to_take_back_each_of_many(bench) -> None:
    bench.gates.close("billing")
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(1_000)])
    bench.store.faults.add(Fault("release", StoreUnavailable("down")))
    async with by_force(bench):
        assert bench.gates.sends == [Counter(billing=1_000)]
    assert bench.store.faults.calls["release"] == 1
    assert bench.dispatcher.finisher.unwritten_outcomes

    bench.store.faults.clear()
    await bench.clock.advance(SECOND)
    bench.gates.open("billing")
    await bench.look()
    assert not bench.dispatcher.finisher.unwritten_outcomes
    assert len(bench.ids("billing")) == 1_000


async def test_what_is_stopped_by_force_lets_go_within_ten_seconds_and_forgets_nothing(bench) -> None:
    bench.gates.close("billing")
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(100)])
    ended, polled = anyio.Event(), anyio.CancelScope()

    async def never_answers(*args) -> int:
        await anyio.sleep_forever()
        return 0

    async def poll() -> None:
        with polled:
            await Poller(bench.dispatcher, bench.clock, bench.breaker).run()
        ended.set()

    release, bench.memory.release = bench.memory.release, never_answers
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poll)
        await bench.clock.run_until_idle()
        polled.cancel()
        await bench.clock.advance(4 * SECOND)
        assert not ended.is_set()
        await bench.clock.advance(6 * SECOND)
        assert ended.is_set()
    with anyio.CancelScope() as looking:  # cancelled while it gives back, it still forgets nothing
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.look)
            await bench.clock.run_until_idle()
            looking.cancel()
    bench.memory.release = release
    bench.gates.open("billing")
    await bench.look_for(3 * SECOND)
    assert len(bench.ids("billing")) == 100


async def test_room_is_noticed_when_some_of_a_batch_is_done_row_55(bench) -> None:
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(1_000)])
    claims = await bench.memory.claim_due(bench.clock.now(), 1_000)
    in_flight, batch = InFlight(), Batch(claims, bench.clock.now(), bench.clock.monotonic())
    batch.open_claims |= {f"more-{n}": claims[0] for n in range(MOST_CLAIMS - 1_000)}
    in_flight.add_batch(batch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_flight.wait_for_capacity, 100)
        await anyio.wait_all_tasks_blocked()
        batch.forget_claims(claims[:100])


async def test_bodies_in_flight_have_so_many_bytes_at_most(bench) -> None:
    body, most = bytes(10_000), 400_000
    await bench.keep(*[bench.message(f"m-{n}", -1, body=body) for n in range(300)])
    in_flight, claimed = InFlight(bytes_at_most=most), list[int]()
    batches = list[Batch]()
    while not claimed or in_flight.body_bytes < most:
        limit = in_flight.affordable_count(1_000)
        claims = await bench.memory.claim_due(bench.clock.now(), limit)
        batches.append(Batch(claims, bench.clock.now(), bench.clock.monotonic()))
        in_flight.add_batch(batches[-1])
        claimed.append(len(claims))
        if len(claimed) == 1:  # nobody knew how large they are
            in_flight.forget_batch(batches.pop())
    assert claimed == [100, 10, 10, 10, 10]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_flight.wait_for_capacity, 10)
        await anyio.wait_all_tasks_blocked()
        in_flight.forget_batch(batches[0])
    assert in_flight.affordable_count(1_000) == 10


async def test_what_has_settled_makes_room_for_bytes_though_the_rest_of_its_batch_hangs(bench) -> None:
    """Four batches with one such rest each held up all others for half a minute."""
    await bench.keep(*[bench.message(f"m-{n}", -1, body=bytes(10_000)) for n in range(10)])
    claims = await bench.memory.claim_due(bench.clock.now(), 10)
    in_flight, batch = InFlight(bytes_at_most=100_000), Batch(claims, bench.clock.now(), bench.clock.monotonic())
    in_flight.add_batch(batch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_flight.wait_for_capacity, 1)
        await anyio.wait_all_tasks_blocked()
        batch.forget_claims([*claims[1:], claims[1]])
    assert in_flight.body_bytes == 10_000


async def test_one_message_that_is_larger_than_all_may_be_goes_alone_and_smaller_ones_by_more_again(bench) -> None:
    in_flight = InFlight(bytes_at_most=40_000)
    for number, (size, most) in enumerate([(1_000_000, 1), (1, 1), *[(1, None)] * 20]):
        await bench.keep(bench.message(f"m-{number}", -1, body=bytes(size)))
        batch = Batch(await bench.memory.claim_due(bench.clock.now(), 1), bench.clock.now(), bench.clock.monotonic())
        in_flight.add_batch(batch)
        in_flight.forget_batch(batch)
        assert most is None or in_flight.affordable_count(1_000) == most
    assert in_flight.affordable_count(1_000) == 1_000
