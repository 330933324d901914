"""Services hold what limits of its destination hold, and let it through when they allow it (ADR 34)."""

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.waiting import until

from postdate import DelayedDelivery, DelayedMessage, Endpoint, Envelope, MemoryStore, MemoryTransport, Sqlite
from postdate.core import zones
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.moving import due_work
from postdate.core.due.poller import DueWork, PollResult
from postdate.core.due.rate_limits import LimitedWork
from postdate.core.limits import Limits, add_pause, change_limits, limit_change, remove_pause
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import (
    DestinationUnavailable,
    PostdateError,
    StoreUnavailable,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.ports import Claim, ClaimingStore, RecordKind, Transport
from postdate.ports.limits import LimitingStore, StoredLimits
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)


class Services:
    """Endpoints that deliver from one store, on a clock that the test moves."""

    def __init__(self, store: ClaimingStore, transport: Transport, clock: VirtualClock) -> None:
        assert isinstance(store, LimitingStore)
        self.limits: LimitingStore = store
        self.store, self.transport, self.clock, self.start = store, transport, clock, clock.now()

    async def send(self, count: int, queue: str = "q", due: timedelta = SECOND) -> None:
        found = [DelayedMessage(f"{queue}-{n:05}", self.start + due, queue) for n in range(count)]
        await self.store.store_many(found, self.clock.now())

    async def arrived(self, queue: str = "q") -> int:
        """Count what is in a queue."""
        return (await self.transport.lengths_of([queue]) or {}).get(queue, 0)

    async def pass_time(self, seconds: float, steps: int = 10) -> None:
        for _ in range(steps):
            await self.clock.advance(timedelta(seconds=seconds / steps))

    async def all_arrive(self, count: int, queue: str = "q") -> None:
        async def there() -> bool:
            await self.clock.advance(SECOND / 10)
            return await self.arrived(queue) == count

        await until(there)

    async def delivered_at(self, count: int, queue: str = "q") -> list[datetime]:
        found = [await self.store.history(f"{queue}-{n:05}") for n in range(count)]  # type: ignore[attr-defined]
        return sorted(each.at for records in found for each in records if each.kind is RecordKind.DELIVERED)


Running = Callable[..., AbstractAsyncContextManager[Services]]


@pytest.fixture(params=["queues elsewhere", "queues in the same database"])
def services(request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    @asynccontextmanager
    async def running(count: int = 1) -> AsyncGenerator[Services]:
        clock = VirtualClock()
        async with AsyncExitStack() as stack:
            store: ClaimingStore = MemoryStore()
            transport: Transport = MemoryTransport(clock=clock)
            if request.param == "queues in the same database":
                database = Sqlite(tmp_path / "shop.db", synchronous="normal")
                store, transport = database.store, database.queues
                stack.push_async_callback(database.close)
            await transport.create_queues(["q", "free", "error"])
            for _ in range(count):
                delivery = DelayedDelivery(store, retention=timedelta(0))
                await stack.enter_async_context(
                    Endpoint("shop", transport=transport, delayed_delivery=delivery, error_queue="error", clock=clock)
                )
            yield Services(store, transport, clock)

    return running


async def test_what_is_paused_waits_and_goes_out_when_it_is_resumed(
    services: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "q", add_pause, shop.clock.now())
        await shop.send(30)
        await shop.send(3, "free")
        await shop.pass_time(200)
        assert (await shop.arrived("free"), await shop.arrived()) == (3, 0)
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.all_arrive(30)
        await shop.pass_time(30)
    assert "cannot claim due messages" not in caplog.text


async def test_what_others_pause_and_resume_is_obeyed_within_a_second(services: Running) -> None:
    """By a service that was looking all the time, and had just seen that there were no limits, or some."""
    async with services() as shop:
        found = [DelayedMessage(f"q-{n:05}", shop.start + (n + 1) / 10 * SECOND, "q") for n in range(40)]
        await shop.store.store_many(found, shop.clock.now())
        await shop.pass_time(1.05, 21)
        assert await shop.arrived() == 10
        paused_at = shop.clock.now()
        await change_limits(shop.limits, "q", add_pause, paused_at)
        await shop.pass_time(20, 200)
        times = await shop.delivered_at(40)
        assert len(times) < 25
        assert times[-1] <= paused_at + SECOND
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.pass_time(1.1, 11)
        assert await shop.arrived() == 40


async def test_a_pause_of_a_queue_that_had_no_limits_is_obeyed_beside_limits_of_another(services: Running) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "free", add_pause, shop.clock.now())
        await shop.send(1)
        await shop.all_arrive(1)
        await change_limits(shop.limits, "q", add_pause, shop.clock.now())
        await shop.pass_time(1.1)
        await shop.store.store(DelayedMessage("late", shop.clock.now(), "q"), shop.clock.now())
        await shop.pass_time(10)
        assert await shop.arrived() == 1
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.all_arrive(2)


async def test_a_window_opens_and_closes(services: Running) -> None:
    async with services() as shop:
        opens = shop.start.replace(second=0, microsecond=0) + timedelta(minutes=4)
        closes = opens + timedelta(minutes=2)
        window = f"{opens:%H:%M}-{closes:%H:%M} UTC"
        await change_limits(shop.limits, "q", limit_change(None, window), shop.clock.now())
        await shop.send(20)
        await shop.pass_time((opens - shop.clock.now()).total_seconds() - 1)
        assert await shop.arrived() == 0
        await shop.all_arrive(20)
        assert all(opens <= at < closes for at in await shop.delivered_at(20))
        await shop.store.store(DelayedMessage("late", closes + SECOND, "q"), shop.clock.now())
        await shop.pass_time(300)
        assert await shop.arrived() == 20


async def test_a_window_opens_in_time_although_the_machine_was_suspended(services: Running) -> None:
    """Or its clock was set forward: its monotonic seconds are behind then."""
    async with services() as shop:
        opens = shop.start.replace(second=0, microsecond=0) + timedelta(hours=10)
        window = f"{opens:%H:%M}-{opens + timedelta(hours=1):%H:%M} UTC"
        await change_limits(shop.limits, "q", limit_change(None, window), shop.clock.now())
        await shop.send(1)
        await shop.pass_time(60)
        shop.clock.step(opens - shop.clock.now() - SECOND)
        await shop.pass_time(62, 62)
        assert await shop.arrived() == 1


class Files:
    """Zone files of a machine, from which a test takes a zone away."""

    version = "2026a"

    def __init__(self) -> None:
        self.missing = set[str]()

    def read(self, zone: str) -> bytes | None:
        return None if zone in self.missing else zones.ZoneFiles(None, "").read(zone)


@pytest.fixture
def files(clock: VirtualClock) -> Iterator[Files]:
    files = Files()
    token = zones.SOURCE.set(zones.ZoneSource(lambda: [files], clock.monotonic))  # type: ignore[list-item]
    yield files
    zones.SOURCE.reset(token)


WINDOW = "00:00-24:00 Europe/Kyiv"


async def test_a_window_in_a_zone_that_new_zone_files_have_opens_without_a_restart(
    make_bench, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    await bench.create_queues("billing")
    await change_limits(bench.memory, "billing", limit_change(None, WINDOW), bench.start)
    work = due_work(bench.memory, bench.transport, dispatcher_of(bench), bench.clock)
    files.missing.add("Europe/Kyiv")
    await bench.clock.advance(60 * SECOND)
    await bench.keep(bench.message())
    with caplog.at_level(logging.ERROR, "postdate.limits"):
        await looks(bench, work, 300)
    assert bench.ids("billing") == []
    assert len(caplog.records) == 1
    assert "'Europe/Kyiv'" in caplog.text
    files.missing.clear()
    await looks(bench, work, 121)
    assert bench.ids("billing") == ["m-1"]


async def test_a_zone_that_disappears_holds_up_only_queues_with_windows_in_it(
    make_bench, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    await bench.create_queues("billing", "shipping")
    await change_limits(bench.memory, "billing", limit_change(None, WINDOW), bench.start)
    await change_limits(bench.memory, "shipping", limit_change(10, ()), bench.start)
    work = due_work(bench.memory, bench.transport, dispatcher_of(bench), bench.clock)
    await bench.keep(bench.message("m-1"))
    await looks(bench, work, 2)
    assert bench.ids("billing") == ["m-1"]
    await bench.keep(bench.message("m-2", due_in=100), bench.message("m-3", due_in=100, destination="shipping"))
    files.missing.add("Europe/Kyiv")
    with caplog.at_level(logging.ERROR, "postdate.limits"):
        await looks(bench, work, 300)
    assert (bench.ids("billing"), bench.ids("shipping")) == (["m-1"], ["m-3"])
    assert len(caplog.records) == 1


def dispatcher_of(bench: Any) -> Dispatcher:
    return Dispatcher(bench.memory, bench.transport, bench.settings, bench.clock, bench.breaker, bench.failure_rate)


async def looks(bench: Any, work: DueWork, seconds: int) -> None:
    for _ in range(seconds):
        await bench.clock.advance(SECOND)
        while (await work.deliver_due(bench.clock.now())).has_more:
            pass


@pytest.mark.parametrize("count", [1, 3])
async def test_all_services_together_keep_a_rate(services: Running, count: int) -> None:
    async with services(count) as shop:
        await change_limits(shop.limits, "q", limit_change(50, ()), shop.clock.now())
        await shop.send(200)
        await shop.all_arrive(200)
        times = await shop.delivered_at(200)
        assert len(times) == 200
        assert spans_are_kept(times, 50)


def spans_are_kept(times: Sequence[datetime], rate: float) -> bool:
    """Whether no span had more than its share, and two turns of a tenth of a second that were missed."""
    return all(
        last - first + 1 <= rate * (times[last] - times[first]).total_seconds() + 0.2 * rate + 1e-3
        for first in range(len(times))
        for last in range(first, len(times))
    )


async def test_attempts_after_the_first_count_for_the_rate_too(make_bench) -> None:
    bench, attempts, rate = make_bench(number_of_retries=1), dict[str, list[datetime]](), 20
    await change_limits(bench.memory, "billing", limit_change(rate, ()), bench.start)
    await bench.keep(*[bench.message(f"m-{n}", due_in=-1) for n in range(40)])

    async def fail_once(envelopes: Sequence[Envelope], now: datetime, **_: Any) -> list[PostdateError | None]:
        for each in envelopes:
            attempts.setdefault(each.message_id, []).append(now)
        return [TransportUnavailable("no") if len(attempts[each.message_id]) == 1 else None for each in envelopes]

    bench.queues.send = fail_once
    dispatcher = Dispatcher(
        bench.memory, bench.transport, bench.settings, bench.clock, bench.breaker, bench.failure_rate
    )
    work = due_work(bench.memory, bench.transport, dispatcher, bench.clock)
    for _ in range(200):
        await work.deliver_due(bench.clock.now())
        await bench.clock.advance(SECOND / 20)
    times = sorted(each for found in attempts.values() for each in found)
    assert len(times) == 80
    assert spans_are_kept(times, rate)


async def test_lanes_without_limits_are_left_alone_after_some_minutes(services: Running) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "q", add_pause, shop.clock.now())
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.pass_time(700, 70)
        before = shop.limits.claim_lane
        asked = list[object]()

        async def claim_held(stored_limits, now, limit):
            asked.append(stored_limits)
            return await before(stored_limits, now, limit)

        shop.limits.claim_lane = claim_held
        await shop.pass_time(700, 70)
        assert asked == []


async def test_an_outage_of_a_limited_queue_ends(services: Running) -> None:
    """What is held must not count as the probe of its queue."""
    async with services() as shop:
        if not isinstance(shop.transport, MemoryTransport):
            return
        down, send = {"now": True}, shop.transport.send

        async def faulty(envelopes, now, *, work=()):
            refused = DestinationUnavailable("it is full")
            return [refused] * len(envelopes) if down["now"] else await send(envelopes, now, work=work)

        shop.transport.send = faulty
        await change_limits(shop.limits, "q", limit_change(50, ()), shop.clock.now())
        await shop.send(20)
        await shop.pass_time(10, 100)
        down["now"] = False
        await shop.all_arrive(20)


async def test_what_is_paused_while_a_lane_is_emptied_stays(services: Running) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "q", limit_change(None, "00:00-24:00 UTC"), shop.clock.now())
        held, claim_held = list[int](), shop.limits.claim_lane

        async def pausing(stored_limits, now, limit):
            claims = await claim_held(stored_limits, now, min(limit, 5))
            if claims and not sum(held):
                await change_limits(shop.limits, "q", add_pause, shop.clock.now())
            held.append(len(claims))
            return claims

        shop.limits.claim_lane = pausing
        await shop.send(20)
        await shop.pass_time(30)
        assert (await shop.arrived(), sum(held)) == (0, 5)
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.all_arrive(20)


async def test_whoever_is_ended_by_force_as_he_takes_a_turn_gives_back_what_he_claimed_for_it(make_bench) -> None:
    bench = make_bench()
    await bench.create_queues("billing")
    await change_limits(bench.memory, "billing", limit_change(50, ()), bench.start)
    await bench.keep(bench.message(due_in=-1))
    await bench.clock.advance(SECOND)
    dispatcher = Dispatcher(
        bench.memory, bench.transport, bench.settings, bench.clock, bench.breaker, bench.failure_rate
    )

    async def ended(*_: object) -> bool:
        assert (await bench.memory.statistics(bench.clock.now())).claimed == 1
        looking.cancel()
        await anyio.sleep_forever()
        return True

    async def asked(*given: Any) -> int:
        await anyio.lowlevel.checkpoint()  # as a server is
        return await release(*given)

    release, bench.memory.release = bench.memory.release, asked
    take_turns, bench.memory.reserve_slots = bench.memory.reserve_slots, ended
    work = due_work(bench.memory, bench.transport, dispatcher, bench.clock)
    with anyio.CancelScope() as looking:
        await work.deliver_due(bench.clock.now())
    assert looking.cancelled_caught
    assert (await bench.memory.statistics(bench.clock.now())).claimed == 0
    bench.memory.reserve_slots = take_turns
    await due_work(bench.memory, bench.transport, dispatcher, bench.clock).deliver_due(bench.clock.now())
    assert bench.ids("billing") == ["m-1"]


@pytest.mark.parametrize("change", [remove_pause, lambda _: Limits(per_second=50)], ids=["lifted", "a rate"])
async def test_claims_of_a_lane_are_released_although_the_look_is_cancelled(make_bench, change) -> None:
    """Those of a lane whose limits were lifted, and those of messages that are due by themselves within a lane."""
    bench = make_bench()
    await change_limits(bench.memory, "billing", add_pause, bench.start)
    (kept,) = await bench.memory.load_limits(["billing"])
    stray = DelayedMessage("stray", kept.lane_start, "billing")
    await bench.keep(stray, bench.message("m-1", due_in=-2), bench.message("m-2", due_in=-1))
    work = due_work(bench.memory, bench.transport, dispatcher_of(bench), bench.clock)
    await looks(bench, work, 2)
    await change_limits(bench.memory, "billing", change, bench.clock.now())
    claim_held, release = bench.memory.claim_lane, bench.memory.release

    async def claim_and_cancel(*given: Any) -> Sequence[Claim]:
        claims = await claim_held(*given)
        assert claims
        looking.cancel()
        return claims

    async def release_over_network(*given: Any) -> int:
        await anyio.lowlevel.checkpoint()
        return await release(*given)

    bench.memory.claim_lane, bench.memory.release = claim_and_cancel, release_over_network
    with anyio.CancelScope() as looking:
        await looks(bench, work, 20)
    assert looking.cancelled_caught
    assert (await bench.memory.statistics(bench.clock.now())).claimed == 0


async def test_a_release_into_a_lane_is_not_repeated_after_the_limits_were_lifted(make_bench) -> None:
    """Nobody polls the lane of a destination without limits: the message would wait there. Simulator seed 109640."""
    bench = make_bench()
    await bench.create_queues("billing")
    await change_limits(bench.memory, "billing", add_pause, bench.start)
    await bench.keep(bench.message(due_in=-1))
    dispatcher = dispatcher_of(bench)
    work = due_work(bench.memory, bench.transport, dispatcher, bench.clock)

    async def refuse(*_: Any) -> int:
        raise StoreUnavailable("busy")

    release, bench.memory.release = bench.memory.release, refuse
    await looks(bench, work, 1)
    assert dispatcher.finisher.unwritten_outcomes
    await change_limits(bench.memory, "billing", remove_pause, bench.clock.now())
    await bench.clock.advance(2 * SECOND)
    await dispatcher.limits.refresh()
    bench.memory.release = release
    await dispatcher.finisher.write_outcomes(at_once=True)
    assert not (await bench.memory.load_limits_in_use()).lanes
    await looks(bench, work, 1)
    assert bench.ids("billing") == ["m-1"]


async def test_what_was_held_is_let_go_in_one_call_a_thousand(services: Running) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "q", add_pause, shop.clock.now())
        found = [DelayedMessage(f"q-{n:05}", shop.start + (2 + n / 10) * SECOND, "q") for n in range(100)]
        await shop.store.store_many(found, shop.clock.now())
        await shop.pass_time(30)
        calls, release = list[int](), shop.store.release

        async def counted(claims, attempt_at):
            calls.append(len(claims))
            return await release(claims, attempt_at)

        shop.store.release = counted
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.all_arrive(100)
        assert calls == [100]


async def test_what_has_expired_takes_no_turns(services: Running) -> None:
    """Whether it expired while it was held, or before it could be."""
    async with services() as shop:
        await change_limits(shop.limits, "q", lambda _: Limits(paused=True, per_second=10), shop.clock.now())
        end = shop.start + 20 * SECOND
        old = [DelayedMessage(f"old-{n}", shop.start + SECOND, "q", expires_at=end) for n in range(150)]
        late = [DelayedMessage(f"late-{n}", shop.start + SECOND, "q", expires_at=end + SECOND) for n in range(50)]
        await shop.store.store_many([*old, *late], shop.clock.now())
        await shop.pass_time(25)
        await shop.store.store_many([DelayedMessage(f"q-{n:05}", shop.clock.now(), "q") for n in range(5)], shop.start)
        resumed_at = shop.clock.now()
        await change_limits(shop.limits, "q", remove_pause, resumed_at)
        await shop.all_arrive(5)
        assert (await shop.delivered_at(5))[-1] <= resumed_at + 5 * SECOND


async def test_what_is_due_in_the_far_year_of_a_lane_by_itself_is_not_let_through(services: Running) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "q", lambda _: Limits(paused=True, per_second=50), shop.clock.now())
        (kept,) = await shop.limits.load_limits(["q"])
        far = [DelayedMessage(f"far-{queue}", kept.lane_start, queue) for queue in ("q", "free")]
        await shop.store.store_many(far, shop.clock.now())
        await shop.send(3)
        await shop.pass_time(30)
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.all_arrive(3)
        await shop.pass_time(30)
        assert (await shop.arrived(), await shop.arrived("free")) == (3, 0)
        assert await shop.store.next_due() == kept.lane_start


async def test_a_message_that_is_due_by_itself_in_the_far_year_of_a_lane_does_not_hold_up_the_lane(
    services: Running,
) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "q", limit_change(5, ()), shop.clock.now())
        (kept,) = await shop.limits.load_limits(["q"])
        far = [DelayedMessage(f"far-{n}", kept.lane_start + n * SECOND, "free") for n in range(3)]
        await shop.store.store_many(far, shop.clock.now())
        await shop.send(5)
        await shop.pass_time(20, 200)
        assert (await shop.arrived(), await shop.arrived("free")) == (5, 0)
        assert [await shop.store.cancel(each.message_id, shop.clock.now()) for each in far] == [True] * 3  # type: ignore[attr-defined]


async def test_while_the_transport_is_away_lanes_are_not_looked_into_all_the_time(make_bench) -> None:
    bench, down = make_bench(), TransportUnreachable("down")
    await bench.create_queues("billing")
    await change_limits(bench.memory, "billing", limit_change(100, ()), bench.start)
    await bench.keep(*[bench.message(f"m-{n}") for n in range(20)])
    bench.transport.faults.add(lambda call: down if call.method == "send" else None)
    work = due_work(bench.memory, bench.transport, dispatcher_of(bench), bench.clock)
    times = list[datetime]()
    while bench.clock.now() < bench.start + 60 * SECOND:
        now = bench.clock.now()
        result = await work.deliver_due(now)
        times.append(now)
        wait = SECOND if result.next_attempt is None else result.next_attempt - bench.clock.now()
        await bench.clock.advance(timedelta(0) if result.has_more else max(wait, timedelta(milliseconds=1)))
    late = [each for each in times if each > bench.start + 20 * SECOND]
    assert 10 < len(late) < 200
    bench.transport.faults.clear()
    await looks(bench, work, 5)
    assert len(bench.ids("billing")) == 20


async def test_a_look_that_asked_nothing_says_nothing_about_the_store(make_bench) -> None:
    bench = make_bench()
    dispatcher = dispatcher_of(bench)
    work = due_work(bench.memory, bench.transport, dispatcher, bench.clock)
    assert (await work.deliver_due(bench.clock.now())).has_polled
    dispatcher._recovery.probing.report_failure(bench.clock.monotonic())
    assert not (await work.deliver_due(bench.clock.now())).has_polled


async def test_a_service_that_waits_for_a_turn_does_not_look_all_the_time(
    services: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, take = list[datetime](), LimitedWork.deliver_due

    async def count_take(work: LimitedWork, now: datetime) -> PollResult:
        looks.append(now)
        return await take(work, now)

    monkeypatch.setattr(LimitedWork, "deliver_due", count_take)
    async with services() as shop:
        await change_limits(shop.limits, "q", limit_change(0.5, ()), shop.clock.now())
        await shop.send(5)
        await shop.pass_time(5, 50)
        assert 1 <= await shop.arrived() <= 3
        assert len(looks) < 50


async def test_an_empty_lane_is_not_looked_into_whenever_something_comes_into_another(services: Running) -> None:
    async with services() as shop:
        for queue in ("q", "free"):
            await change_limits(shop.limits, queue, limit_change(1_000, ()), shop.clock.now())
        claim_held, looks = shop.limits.claim_lane, Counter[str]()

        async def count_look(stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[Claim]:
            looks[stored_limits.destination] += 1
            return await claim_held(stored_limits, now, limit)

        shop.limits.claim_lane = count_look
        await shop.send(1)
        dues = [shop.start + (1 + n / 50) * SECOND for n in range(50)]
        messages = [DelayedMessage(f"free-{n:05}", due, "free") for n, due in enumerate(dues)]
        await shop.store.store_many(messages, shop.clock.now())
        await shop.pass_time(3, 300)
        assert (await shop.arrived(), await shop.arrived("free")) == (1, 50)
        assert 1 <= looks["q"] <= 4
        assert looks["free"] > 4


async def test_what_comes_into_an_empty_lane_goes_out_at_once(services: Running) -> None:
    """However lately a service has seen that the lane is empty."""
    async with services() as shop:
        await change_limits(shop.limits, "q", limit_change(1_000, ()), shop.clock.now())
        dues = [shop.start + (n + 1) * 0.3 * SECOND for n in range(20)]
        messages = [DelayedMessage(f"q-{n:05}", due, "q") for n, due in enumerate(dues)]
        await shop.store.store_many(messages, shop.clock.now())
        await shop.pass_time(30, 600)
        late = [at - due for at, due in zip(await shop.delivered_at(20), dues, strict=True)]
        assert max(late) < 0.3 * SECOND


async def test_limits_of_queues_without_messages_are_neither_read_nor_looked_into(services: Running) -> None:
    async with services() as shop:
        for number in range(50):
            await change_limits(shop.limits, f"idle-{number}", limit_change(10, ()), shop.clock.now())
        kept_limits, claim_held = shop.limits.load_limits, shop.limits.claim_lane
        read, looked_into = list[list[str]](), list[str]()

        async def reading(destinations=None):
            read.append(list(destinations or ()))
            return await kept_limits(destinations)

        async def looking(stored_limits, now, limit):
            looked_into.append(stored_limits.destination)
            return await claim_held(stored_limits, now, limit)

        shop.limits.load_limits, shop.limits.claim_lane = reading, looking
        await shop.send(3, "free")
        await shop.pass_time(60)
        assert await shop.arrived("free") == 3
        assert set().union(*(set(each) for each in read)) <= {"free"}
        assert looked_into == []


async def test_what_is_due_already_in_the_timeouts_queue_is_held(services: Running) -> None:
    async with services() as shop:
        await change_limits(shop.limits, "q", add_pause, shop.clock.now())
        await shop.pass_time(1.1)  # by then every service knows
        due = [DelayedMessage(f"{queue}-1", shop.start - SECOND, queue) for queue in ("q", "free")]
        await shop.transport.send([timeouts_queue_envelope(each, "shop.timeouts") for each in due], shop.clock.now())
        await shop.pass_time(30)
        assert (await shop.arrived("free"), await shop.arrived()) == (1, 0)
        await change_limits(shop.limits, "q", remove_pause, shop.clock.now())
        await shop.all_arrive(1)
