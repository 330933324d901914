"""The clock that other tests rely on."""

from datetime import datetime, timedelta

import anyio
import pytest

from postdate import Clock, Endpoint, MemoryTransport
from postdate.clock import time_until
from postdate.errors import ConfigurationError
from postdate.testing import VirtualClock
from postdate.testing.clock import START

SECOND = timedelta(seconds=1)


def test_it_is_a_clock(clock: VirtualClock) -> None:
    assert isinstance(clock, Clock)


async def test_waits_end_in_the_order_of_their_times_whatever_the_order_in_which_they_began(
    clock: VirtualClock,
) -> None:
    start, ended = clock.now(), list[tuple[int, float]]()

    async def sleep(seconds: int) -> None:
        await clock.sleep(seconds * SECOND)
        ended.append((seconds, (clock.now() - start).total_seconds()))

    async with anyio.create_task_group() as tasks:
        for seconds in (30, 10, 20, 10):
            tasks.start_soon(sleep, seconds)
        await clock.advance(15 * SECOND)
        assert ended == [(10, 10.0), (10, 10.0)]
        await clock.advance(SECOND * 15)
    assert ended == [(10, 10.0), (10, 10.0), (20, 20.0), (30, 30.0)]


async def test_a_task_that_waits_again_and_again_does_so_within_one_advance(clock: VirtualClock) -> None:
    times = 0

    async def tick() -> None:
        nonlocal times
        while True:
            await clock.sleep(SECOND)
            times += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await clock.advance(60 * SECOND)
        assert times == 60
        tasks.cancel_scope.cancel()


async def test_an_event_ends_a_wait_without_time_passing(clock: VirtualClock) -> None:
    event, woken = anyio.Event(), list[object]()

    async def wait() -> None:
        await clock.wait(event, clock.now() + 3600 * SECOND)
        woken.append(clock.now())

    start = clock.now()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await clock.advance(SECOND)
        assert woken == []
        event.set()
        await clock.run_until_idle()
        assert woken == [start + SECOND]
    assert clock.next_wait is None


async def test_tasks_in_threads_are_waited_for(clock: VirtualClock) -> None:
    done: list[int] = []

    async def work() -> None:
        await clock.sleep(SECOND)
        done.append(await anyio.to_thread.run_sync(sum, range(100_000)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await clock.advance(SECOND)
        assert done == [sum(range(100_000))]


async def test_a_cancelled_wait_is_forgotten(clock: VirtualClock) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, SECOND)
        await clock.run_until_idle()
        assert clock.next_wait == clock.now() + SECOND
        tasks.cancel_scope.cancel()
    assert clock.next_wait is None


@pytest.mark.parametrize("by", [timedelta(hours=-1), timedelta(days=1)])
async def test_setting_the_clock_ends_no_wait(clock: VirtualClock, by: timedelta) -> None:
    start, ended = clock.now(), list[object]()

    async def sleep() -> None:
        await clock.sleep(10 * SECOND)
        ended.append(clock.now() - start)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleep)
        await clock.advance(SECOND)
        clock.step(by)
        await clock.advance(8 * SECOND)
        assert ended == []
        await clock.advance(SECOND)
        assert ended == [by + 10 * SECOND]


async def test_time_does_not_run_backwards(clock: VirtualClock) -> None:
    with pytest.raises(ValueError, match="backwards"):
        await clock.advance(-SECOND)


async def test_a_wait_for_the_past_ends_at_once(clock: VirtualClock) -> None:
    await clock.wait(anyio.Event(), clock.now())
    await clock.advance_to(clock.now() + SECOND)
    await clock.sleep(timedelta(0))


# --- clocks of one's own ----------------------------------------------------------------------------------------------


def test_a_clock_from_before_monotonic_is_refused_with_what_is_missing() -> None:
    class Old:
        def now(self) -> datetime:
            return START

        async def wait(self, event: anyio.Event, until: datetime) -> None: ...

        async def sleep(self, duration: timedelta) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Old is not a clock: it has no monotonic\(\) and no wait_for\(\)"):
        Endpoint("sales", transport=MemoryTransport(), clock=Old())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("deadline", "seconds", "microseconds"),
    [(2.0, 1.0, 1_000_000), (1.0, 1.0, 0), (1.0, 2.0, 0), (1.0 + 4e-15, 1.0, 1), (30.1, 0.1, 30_000_000)],
)
def test_who_waits_for_the_time_left_finds_that_the_deadline_has_come(
    deadline: float, seconds: float, microseconds: int
) -> None:
    assert time_until(deadline, seconds) == timedelta(microseconds=microseconds)
