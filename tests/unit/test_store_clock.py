"""The clock that follows a store's: never ahead of it, whoever sets the machine's, and it says how far that is off."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

import postdate
from postdate import DelayedDelivery, Endpoint, MemoryStore, MemoryTransport, SystemClock
from postdate.clock import ScaledClock, earliest_time_now, steady_seconds
from postdate.core.upkeep.store_clock import FollowingClock, clock_of_store, latest_time
from postdate.endpoint.outgoing import outgoing_message
from postdate.endpoint.send_options import SendOptions
from postdate.errors import StoreNotWritable, StoreUnreachable
from postdate.messages import DelayedMessage, Envelope
from postdate.ports import StoreCapabilities
from postdate.testing import VirtualClock

MILLISECOND = timedelta(milliseconds=1)
MINUTE = timedelta(minutes=1)
START = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)


ON_A_SERVER = replace(MemoryStore().capabilities, has_clock=True)


@dataclass
class Machine(SystemClock):
    """A machine whose wall clock and monotonic clock are both moved by hand."""

    wall: datetime = START
    seconds: float = 100.0
    suspended: float = 0.0

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.seconds

    def seconds_since_boot(self) -> float:
        return self.seconds + self.suspended

    def suspend(self, span: timedelta) -> None:
        self.wall += span
        self.suspended += span.total_seconds()

    def pass_(self, span: timedelta) -> None:
        self.wall += span
        self.seconds += span.total_seconds()

    async def wait_for(self, event: anyio.Event, duration: timedelta) -> None:
        for _ in range(10):  # others run first: what is waited for costs no time
            await anyio.lowlevel.checkpoint()
            if event.is_set():
                return
        self.pass_(duration)


@dataclass
class Server(MemoryStore):
    """A store's server whose clock is ahead of the machine's wall clock of the start, and so far away."""

    machine: Machine
    ahead: timedelta = timedelta(0)
    there: timedelta = MILLISECOND
    back: timedelta = MILLISECOND
    failures: int = 0
    mute: bool = False
    asked: int = 0
    reported: list[timedelta] = field(default_factory=list)

    @property
    def capabilities(self) -> StoreCapabilities:
        return ON_A_SERVER

    def true_now(self) -> datetime:
        return START + timedelta(seconds=self.machine.seconds_since_boot() - 100) + self.ahead

    async def server_now(self) -> datetime:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise StoreUnreachable("away")
        self.machine.pass_(self.there)
        now = self.true_now()
        self.machine.pass_(self.back)
        return now

    async def report_clock(self, ahead: timedelta) -> None:
        if self.mute:
            raise StoreNotWritable("permission denied")
        self.reported.append(ahead)

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        return {}


async def follow(clock: FollowingClock, machine: Machine, wait: Callable[[], Awaitable[object]]) -> None:
    """Follow the store for five minutes, and wait meanwhile again and again."""
    end = machine.seconds + 300
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.follow)
        while machine.seconds < end:
            await wait()
        tasks.cancel_scope.cancel()


def behind(clock: FollowingClock, server: Server) -> timedelta:
    return server.true_now() - clock.now()


@pytest.mark.parametrize("minutes", [-10, 0, 10])
async def test_it_shows_the_store_s_time_and_is_never_ahead_of_it(minutes: int) -> None:
    machine = Machine()
    server = Server(machine, ahead=minutes * MINUTE, there=5 * MILLISECOND, back=3 * MILLISECOND)
    clock = FollowingClock(machine, server)
    assert clock.now() == machine.now(), "before the first measurement"
    await clock.measure()
    assert behind(clock, server) == 3 * MILLISECOND, "what the answer took to come back"
    machine.pass_(MINUTE)
    assert behind(clock, server) == 9 * MILLISECOND, "and what two clocks may come apart in a minute"


@pytest.mark.parametrize("minutes", [-10, 0, 10])
async def test_the_latest_time_is_never_behind_that_of_the_store(minutes: int) -> None:
    machine = Machine()
    server = Server(machine, ahead=minutes * MINUTE, there=5 * MILLISECOND, back=3 * MILLISECOND)
    clock = FollowingClock(machine, server)
    assert latest_time(clock) == machine.now(), "before the first measurement"
    await clock.measure()
    assert latest_time(clock) - server.true_now() == 5 * MILLISECOND, "what the question took on its way"
    machine.pass_(MINUTE)
    assert latest_time(clock) - server.true_now() == 11 * MILLISECOND, "and what two clocks may come apart in a minute"
    assert latest_time(VirtualClock(START)) == START, "a clock that is exact"
    not_judging = FollowingClock(machine, server, is_authoritative=False)
    await not_judging.measure()
    assert latest_time(not_judging) == machine.now()


@pytest.mark.parametrize("delay", [MILLISECOND, MINUTE])
async def test_no_delay_is_short_by_what_a_clock_does_not_know(delay: timedelta) -> None:
    """Before, one of 50 ms was over before it began, ten minutes after the clock was read."""
    machine = Machine()
    server = Server(machine, back=3 * MILLISECOND)
    clock = FollowingClock(machine, server)
    await clock.measure()
    machine.pass_(10 * MINUTE)

    message = outgoing_message({}, {}, b"", "q", SendOptions("q", delay=delay), clock)
    assert isinstance(message, DelayedMessage)
    assert timedelta(0) <= message.due - (server.true_now() + delay) < 70 * MILLISECOND

    due = server.true_now() + delay
    message = outgoing_message({}, {}, b"", "q", SendOptions("q", deliver_at=due), clock)
    assert isinstance(message, DelayedMessage)
    assert message.due == due, "an instant is no delay, and not due before the clock must show it"

    at_once = outgoing_message({}, {}, b"", "q", SendOptions("q", delay=timedelta(0)), clock)
    assert isinstance(at_once, Envelope)


@pytest.mark.parametrize("judges", [True, False])
@pytest.mark.parametrize("minutes", [-10, 10])
async def test_it_says_how_far_the_store_is_ahead_of_the_machine_whichever_judges(minutes: int, judges: bool) -> None:
    machine = Machine()
    clock = FollowingClock(
        machine, Server(machine, ahead=minutes * MINUTE, back=3 * MILLISECOND), is_authoritative=judges
    )
    assert clock.ahead is None, "before the first measurement"
    await clock.measure()
    assert clock.ahead == minutes * MINUTE - 3 * MILLISECOND
    machine.wall += MINUTE
    assert clock.ahead == (minutes - 1) * MINUTE - 3 * MILLISECOND, "somebody has set the machine's clock"


async def test_a_machine_that_was_suspended_does_not_take_the_time_before_for_the_present() -> None:
    machine = Machine()
    server = Server(machine)
    clock = FollowingClock(machine, server)
    await clock.measure()
    machine.suspend(60 * MINUTE)
    assert timedelta(0) <= behind(clock, server) < timedelta(seconds=1)


async def test_who_may_not_tell_others_measures_no_more_often_for_it() -> None:
    machine = Machine()
    server = Server(machine, mute=True)
    clock = FollowingClock(machine, server)
    await clock.measure()
    assert behind(clock, server) == MILLISECOND, "what was measured counts"
    asked = server.asked
    await follow(clock, machine, anyio.lowlevel.checkpoint)
    assert server.asked - asked <= 55


async def test_while_it_is_waited_by_it_is_measured_every_second_so_that_drift_delays_nothing() -> None:
    """Before, what was due half a minute after a measurement was 3 ms late."""
    machine = Machine()
    server = Server(machine)
    clock = FollowingClock(machine, server)
    await clock.measure()
    asked, furthest = server.asked, timedelta(0)

    async def wait() -> None:
        nonlocal furthest
        await clock.wait_for(anyio.Event(), 100 * MILLISECOND)  # as the poller does
        furthest = max(furthest, behind(clock, server))

    await follow(clock, machine, wait)
    assert furthest < 1.5 * MILLISECOND, "of which one is the way back of an answer"
    assert server.asked - asked <= 1_000
    assert len(server.reported) <= 12, "others are told as rarely as before"


@pytest.mark.parametrize(("there", "judges"), [(5 * MILLISECOND, True), (MILLISECOND, False)])
async def test_a_store_that_takes_longer_to_answer_than_clocks_come_apart_or_does_not_judge_is_not_asked_more_often(
    there: timedelta, judges: bool
) -> None:
    machine = Machine()
    server = Server(machine, there=there)
    clock = FollowingClock(machine, server, is_authoritative=judges)
    await clock.measure()
    asked = server.asked
    await follow(clock, machine, lambda: clock.wait_for(anyio.Event(), 100 * MILLISECOND))
    assert server.asked - asked <= 55


async def test_a_store_is_asked_more_often_by_its_quickest_answer_not_by_its_last() -> None:
    class Uneven(Server):
        async def server_now(self) -> datetime:
            self.there = 50 * MILLISECOND if self.asked % 2 else MILLISECOND
            return await super().server_now()

    machine = Machine()
    server = Uneven(machine)
    clock = FollowingClock(machine, server)
    await clock.measure()
    asked = server.asked
    await follow(clock, machine, lambda: clock.wait_for(anyio.Event(), 100 * MILLISECOND))
    assert server.asked - asked > 300, "more than once a second"


async def test_the_quickest_answer_counts() -> None:
    machine = Machine()
    server = Server(machine, ahead=MINUTE, back=100 * MILLISECOND)
    clock = FollowingClock(machine, server)
    await clock.measure()
    server.back = 2 * MILLISECOND
    await clock.measure()
    server.back = 50 * MILLISECOND
    await clock.measure()
    assert timedelta(0) <= behind(clock, server) < 3 * MILLISECOND


async def test_setting_the_machine_s_clock_changes_nothing_and_making_nothing_early() -> None:
    machine = Machine()
    server = Server(machine)
    clock = FollowingClock(machine, server)
    await clock.measure()
    machine.wall += 10 * MINUTE
    assert timedelta(0) <= behind(clock, server) <= MILLISECOND
    await clock.measure()
    assert timedelta(0) <= behind(clock, server) <= MILLISECOND
    assert server.reported[-1] - 10 * MINUTE < 2 * MILLISECOND


@pytest.mark.parametrize("minutes", [-10, 10])
async def test_a_store_whose_clock_is_set_is_followed(minutes: int) -> None:
    machine = Machine()
    server = Server(machine)
    clock = FollowingClock(machine, server)
    await clock.measure()
    server.ahead = minutes * MINUTE
    await clock.measure()
    assert timedelta(0) <= behind(clock, server) <= MILLISECOND


async def test_it_waits_until_the_store_s_clock_shows_it() -> None:
    machine = Machine()
    server = Server(machine, ahead=-10 * MINUTE)
    clock = FollowingClock(machine, server)
    await clock.measure()
    until = clock.now() + 5 * MINUTE
    await clock.wait(anyio.Event(), until)
    assert clock.now() == until


async def test_a_failed_measurement_is_logged_and_tried_again_soon(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    server = Server(machine, ahead=MINUTE, failures=3)
    clock = FollowingClock(machine, server)
    await clock.measure()
    assert clock.now() == machine.now()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clock.follow)
            while not server.reported:
                await anyio.lowlevel.checkpoint()
            scope.cancel()
    assert machine.seconds < 105, "a second between tries"
    assert timedelta(0) <= behind(clock, server) <= MILLISECOND
    lines = [record.getMessage() for record in caplog.records if record.name == "postdate.clock"]
    assert lines[0] == "cannot read the clock of the store: away"


async def test_a_wrong_clock_is_named_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "postdate.clock")
    machine = Machine()
    server = Server(machine, ahead=10 * MINUTE)
    clock = FollowingClock(machine, server)

    async def said() -> list[str]:
        caplog.clear()
        await clock.measure()
        return [record.getMessage() for record in caplog.records if record.name == "postdate.clock"]

    first = await said()
    assert len(first) == 1
    assert "is 10 min behind that of the store; due times are judged by the store's" in first[0]
    assert await said() == []
    machine.wall += 5 * MINUTE
    assert "is 5 min behind" in (await said())[0]
    machine.wall += 5 * MINUTE
    assert "agrees with that of the store again" in (await said())[0]
    assert await said() == []


async def test_a_difference_of_less_than_a_second_is_not_worth_saying(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    clock = FollowingClock(machine, Server(machine, ahead=900 * MILLISECOND))
    await clock.measure()
    assert not caplog.records


async def test_turned_off_it_shows_the_machine_s_time_and_still_warns(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    server = Server(machine, ahead=-10 * MINUTE)
    clock = FollowingClock(machine, server, is_authoritative=False)
    await clock.measure()
    assert clock.now() == machine.now()
    assert "is 10 min ahead of that of the store" in caplog.text
    assert "use_store_clock is off" in caplog.text


def test_no_server_goes_before_a_clock_of_tests_or_simulations() -> None:
    machine = Machine()
    server = Server(machine)
    assert clock_of_store(VirtualClock(), server) is None
    assert clock_of_store(ScaledClock(START), server) is None
    assert clock_of_store(machine, MemoryStore()) is None
    assert clock_of_store(machine, server) is not None


class TimekeepingMemoryStore(MemoryStore):
    """On a server, so to speak, whose clock is ten minutes behind that of this machine."""

    behind = 10 * MINUTE

    @property
    def capabilities(self) -> StoreCapabilities:
        return ON_A_SERVER

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[timedelta] = []

    async def server_now(self) -> datetime:
        return SystemClock().now() - self.behind

    async def report_clock(self, ahead: timedelta) -> None:
        self.reported.append(ahead)

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        return {}


@pytest.mark.parametrize("use_store_clock", [True, False])
async def test_an_endpoint_delays_and_judges_by_the_store_s_clock(*, use_store_clock: bool) -> None:
    store, transport = TimekeepingMemoryStore(), MemoryTransport()
    delays = DelayedDelivery(store, use_store_clock=use_store_clock)
    due_by_the_machine, due_by_the_store = SystemClock().now() - MINUTE, SystemClock().now() - 11 * MINUTE
    async with Endpoint("sales", transport=transport, delayed_delivery=delays, send_only=True) as endpoint:
        await transport.create_queues(["billing"])
        await endpoint.send(b"", destination="billing", deliver_at=due_by_the_machine)
        delayed_id = await endpoint.send(b"", destination="billing", delay=MINUTE)
        await endpoint.send(b"", destination="billing", deliver_at=due_by_the_store)
        receiver = transport.receiver("billing")
        arrived = await receiver.receive(10)
        while (delayed := await store.get(delayed_id)) is None:  # it comes through the timeouts queue
            await anyio.lowlevel.checkpoint()
        await receiver.close()
    judged_by = SystemClock().now() - (10 * MINUTE if use_store_clock else timedelta(0))
    assert abs(delayed.due - judged_by - MINUTE) < MINUTE / 2
    assert len(arrived) == (1 if use_store_clock else 2)
    assert store.reported, "other services can see how far this machine's clock is off"
    assert abs(store.reported[0] - 10 * MINUTE) < MINUTE / 2


def test_a_frozen_monotonic_clock_brings_no_instant_decades_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that freeze time for tests set `time.monotonic` to seconds since 1970, in some threads."""
    heard_at = steady_seconds()
    monkeypatch.setattr(time, "monotonic", lambda: 1_800_000_000.0)
    assert earliest_time_now(START, heard_at) - START < MINUTE
    assert SystemClock().monotonic() - heard_at < 60


def test_only_the_clock_reads_the_clock_that_libraries_for_tests_freeze() -> None:
    source = Path(postdate.__file__).parent
    readers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "time.monotonic()" in (text := path.read_text()) or "import monotonic" in text
    }
    # Leases count the machine's sleep, too; forks wait in one thread, before the clock; benchmarks are no service.
    allowed = {"clock.py", "backends/azure/lease.py", "runtime/forks.py"}
    assert {each for each in readers if "bench" not in each} == allowed
