"""When the poller looks and when it sleeps (specification 1.7, rows 32 to 35, 44, 57)."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import datetime, timedelta

import anyio
import pytest

from postdate.core.due.poller import Poller, PollResult
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.health.deadlines import STOP_DEADLINE
from postdate.errors import StoreUnavailable
from postdate.ports import Wake
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)


class Work:
    """Due times instead of messages. Notes every look, and when each due time was taken."""

    def __init__(self, clock: VirtualClock, batch: int = 100) -> None:
        self.clock, self.batch = clock, batch
        self.due: list[datetime] = []
        self.looks: list[datetime] = []
        self.taken: list[tuple[datetime, datetime]] = []
        self.fails = False
        self.held_elsewhere = False
        self.wake: Wake = lambda: None
        self.during: Callable[[], None] = lambda: None

    def overlap_batches(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def deliver_due(self, now: datetime) -> PollResult:
        self.looks.append(now)
        if self.fails:
            raise StoreUnavailable("down")
        ready = [] if self.held_elsewhere else sorted(due for due in self.due if due < now)[: self.batch]
        for due in ready:
            self.due.remove(due)
            self.taken.append((due, self.clock.now()))
        self.during()
        return PollResult(len(ready), len(ready) == self.batch, min(self.due, default=None))

    async def listen(self, wake: Wake) -> Callable[[], None]:
        if self.fails:
            raise StoreUnavailable("down")
        self.wake = wake

        def stop() -> None:
            self.wake = lambda: None

        return stop

    def store(self, due: datetime, *, wake: bool = True) -> None:
        self.due.append(due)
        if wake:
            self.wake()


@pytest.fixture
def work(clock: VirtualClock) -> Work:
    return Work(clock)


@pytest.fixture
def critical() -> list[str]:
    return []


@asynccontextmanager
async def polling(work: Work, critical: list[str]) -> AsyncGenerator[Poller]:
    breaker = RepeatedFailures("fetch", "cannot fetch", 30 * SECOND, lambda text, _: critical.append(text))
    poller = Poller(work, work.clock, breaker)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)
        await work.clock.run_until_idle()
        yield poller
        poller.stop()


async def test_what_is_due_is_taken_without_any_trigger_row_32(work: Work, critical: list[str]) -> None:
    work.store(work.clock.now() - SECOND)
    async with polling(work, critical):
        assert len(work.taken) == 1


async def test_a_thousand_due_at_one_instant_are_taken_without_waiting_row_33(work: Work, critical: list[str]) -> None:
    start = work.clock.now()
    work.due = [start - SECOND] * 1000
    async with polling(work, critical):
        assert [at for _, at in work.taken] == [start] * 1000


async def test_a_message_nobody_told_of_is_at_most_a_minute_late_row_34(work: Work, critical: list[str]) -> None:
    start = work.clock.now()
    work.store(start + 600 * SECOND)
    async with polling(work, critical):
        await work.clock.advance(SECOND)
        work.store(start + 5 * SECOND, wake=False)
        await work.clock.advance(60 * SECOND)
        ((due, at),) = work.taken
    assert due == start + 5 * SECOND
    assert at == start + 60 * SECOND


async def test_it_sleeps_a_minute_at_most_and_does_not_look_in_between_row_34(work: Work, critical: list[str]) -> None:
    async with polling(work, critical):
        await work.clock.advance(10 * 60 * SECOND)
    assert len(work.looks) == 11


async def test_a_look_that_does_not_end_is_a_problem(
    work: Work, critical: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with polling(work, critical) as poller:
        await work.clock.advance(10 * 60 * SECOND)
        assert poller.problem is None
        monkeypatch.setattr(work, "deliver_due", lambda _: anyio.sleep_forever())
        work.wake()
        await work.clock.advance(3 * 60 * SECOND)
        assert poller.problem is None
        await work.clock.advance(60 * SECOND)
        assert poller.problem == "due messages have not been polled for 4 min"
        poller.stop()
        assert poller.problem is None
        await work.clock.advance(2 * STOP_DEADLINE)


async def test_a_due_time_years_away_is_slept_for_a_minute_at_a_time_row_34(work: Work, critical: list[str]) -> None:
    work.store(work.clock.now() + timedelta(days=40_000))
    async with polling(work, critical):
        await work.clock.advance(timedelta(hours=1))
        assert len(work.looks) == 61
        work.store(work.clock.now() + SECOND)
        await work.clock.advance(2 * SECOND)
        assert len(work.taken) == 1


async def test_a_stored_message_wakes_it_row_35(work: Work, critical: list[str]) -> None:
    start = work.clock.now()
    work.store(start + 120 * SECOND)
    async with polling(work, critical):
        await work.clock.advance(SECOND)
        work.store(start + 5 * SECOND)
        await work.clock.advance(10 * SECOND)
        assert work.taken == [(start + 5 * SECOND, start + 5 * SECOND + MICROSECOND)]


async def test_a_wake_up_during_a_look_is_not_lost_row_35(work: Work, critical: list[str]) -> None:
    start = work.clock.now()

    def store_meanwhile() -> None:
        work.during = lambda: None
        work.due.append(start - SECOND)
        work.wake()

    work.during = store_meanwhile
    async with polling(work, critical):
        await work.clock.run_until_idle()
        assert [at for _, at in work.taken] == [start]


async def test_nothing_is_taken_early_and_nothing_later_than_one_microsecond_after_its_time(
    work: Work, critical: list[str]
) -> None:
    start = work.clock.now()
    work.due = [start + offset * timedelta(milliseconds=7.3) for offset in range(1, 300)]
    async with polling(work, critical):
        await work.clock.advance(10 * SECOND)
    assert len(work.taken) == 299
    assert {at - due for due, at in work.taken} == {MICROSECOND}


async def test_messages_that_fall_due_one_by_one_share_looks_a_millisecond_apart(
    work: Work, critical: list[str]
) -> None:
    start = work.clock.now()
    work.due = [start + offset * timedelta(microseconds=50) for offset in range(1, 1_001)]  # 20,000 a second
    async with polling(work, critical):
        await work.clock.advance(SECOND)
    assert len(work.taken) == 1_000
    assert len(work.looks) <= 53
    assert all(timedelta(0) < at - due <= timedelta(milliseconds=1.05) for due, at in work.taken)


async def test_after_an_idle_look_a_stored_message_is_taken_at_once(work: Work, critical: list[str]) -> None:
    async with polling(work, critical):
        work.store(work.clock.now() - SECOND)
        await work.clock.run_until_idle()
        assert len(work.taken) == 1
        await work.clock.advance(timedelta(milliseconds=2))
        work.store(work.clock.now() - SECOND)
        await work.clock.run_until_idle()
        assert len(work.taken) == 2


async def test_wake_ups_in_quick_succession_share_a_look(work: Work, critical: list[str]) -> None:
    async with polling(work, critical):
        for _ in range(10):
            work.store(work.clock.now() - SECOND)
            await work.clock.run_until_idle()
        assert len(work.taken) == 1
        await work.clock.advance(timedelta(milliseconds=2))
        assert len(work.taken) == 10
        assert len(work.looks) == 3


async def test_while_others_hold_what_is_due_it_looks_seldom_row_57(work: Work, critical: list[str]) -> None:
    work.store(work.clock.now() - SECOND)
    work.held_elsewhere = True
    async with polling(work, critical):
        await work.clock.advance(60 * SECOND)
        assert len(work.looks) <= 75
        work.held_elsewhere = False
        await work.clock.advance(SECOND)
        assert len(work.taken) == 1


async def test_after_a_wait_for_others_it_looks_again_at_once_row_57(work: Work, critical: list[str]) -> None:
    start = work.clock.now()
    work.store(start - SECOND)
    work.held_elsewhere = True
    async with polling(work, critical):
        await work.clock.advance(10 * SECOND)
        work.held_elsewhere = False
        await work.clock.advance(SECOND)
        work.store(start + 15 * SECOND)
        await work.clock.advance(10 * SECOND)
        assert work.taken[-1] == (start + 15 * SECOND, start + 15 * SECOND + MICROSECOND)


async def test_a_clock_set_forward_makes_it_at_most_a_minute_late(work: Work, critical: list[str]) -> None:
    work.store(work.clock.now() + 3600 * SECOND)
    async with polling(work, critical):
        work.clock.step(timedelta(hours=2))
        await work.clock.advance(60 * SECOND)
        assert len(work.taken) == 1


async def test_a_clock_set_back_makes_nothing_early_and_does_not_make_it_spin(work: Work, critical: list[str]) -> None:
    due = work.clock.now() + 30 * SECOND
    work.store(due)
    async with polling(work, critical):
        await work.clock.advance(SECOND)
        work.clock.step(timedelta(hours=-1))
        await work.clock.advance(timedelta(hours=1))
        assert work.taken == []
        await work.clock.advance(60 * SECOND)
        ((_, at),) = work.taken
    assert due < at
    assert len(work.looks) < 70


async def test_failing_looks_pause_and_after_30_seconds_they_are_a_critical_error_row_44(
    work: Work, critical: list[str]
) -> None:
    async with polling(work, critical):
        work.fails = True
        work.wake()
        await work.clock.run_until_idle()
        looks = len(work.looks)
        await work.clock.advance(29 * SECOND)
        assert len(work.looks) - looks == 29
        assert critical == []
        await work.clock.advance(2 * SECOND)
        assert critical == ["cannot fetch"]
        looks = len(work.looks)
        await work.clock.advance(60 * SECOND)
        assert len(work.looks) - looks == 6
    assert critical == ["cannot fetch"]


async def test_a_wake_up_ends_the_pause_after_a_failure_and_many_do_not_make_it_spin(
    work: Work, critical: list[str]
) -> None:
    """The store's listener knows first that the server is back."""
    async with polling(work, critical):
        work.fails = True
        work.wake()
        await work.clock.advance(40 * SECOND)  # it pauses for ten seconds by now
        looks = len(work.looks)
        for _ in range(1_000):
            work.wake()
            await work.clock.advance(timedelta(milliseconds=1))
        assert 15 <= len(work.looks) - looks <= 21
        work.fails = False
        work.store(work.clock.now() - SECOND)
        await work.clock.advance(timedelta(milliseconds=50))
        assert len(work.taken) == 1


async def test_a_wake_up_while_a_look_fails_is_not_lost(work: Work, critical: list[str]) -> None:
    async with polling(work, critical):
        await work.clock.advance(SECOND)
        work.fails, looks = True, len(work.looks)
        work.wake()
        await work.clock.run_until_idle()
        work.fails = False
        work.store(work.clock.now() - SECOND)  # in the shortest pause, which hears nothing
        await work.clock.advance(timedelta(milliseconds=50))
        assert len(work.taken) == 1
        assert len(work.looks) == looks + 2


async def test_a_clock_set_back_after_a_delivery_does_not_lengthen_the_pause(work: Work, critical: list[str]) -> None:
    """A clock five minutes fast is set right while it sleeps after a delivery: nothing came for five minutes."""
    start = work.clock.now()
    work.store(start + SECOND)
    work.store(start + 10 * SECOND)
    async with polling(work, critical):
        await work.clock.advance(2 * SECOND)
        assert len(work.taken) == 1
        work.clock.step(timedelta(minutes=-5))
        work.store(work.clock.now() + SECOND)
        await work.clock.advance(2 * SECOND)
        assert len(work.taken) == 2


async def test_a_clock_set_while_it_fails_changes_no_pause(work: Work, critical: list[str]) -> None:
    async with polling(work, critical):
        work.fails = True
        work.wake()
        await work.clock.run_until_idle()
        for minutes in (-5, 60, -120):
            work.clock.step(timedelta(minutes=minutes))
            looks = len(work.looks)
            await work.clock.advance(3 * SECOND)
            assert len(work.looks) - looks == 3


async def test_what_is_due_at_the_end_of_the_calendar_is_never_due_and_ends_nothing(
    work: Work, critical: list[str]
) -> None:
    """The largest instant of .NET, a usual way to say never."""
    work.store(datetime.max.replace(tzinfo=work.clock.now().tzinfo))
    async with polling(work, critical):
        await work.clock.advance(120 * SECOND)
        work.store(work.clock.now() + SECOND)
        await work.clock.advance(2 * SECOND)
        assert len(work.taken) == 1
        assert len(work.due) == 1


async def test_stopping_does_not_wait_for_a_look_that_never_ends(work: Work, critical: list[str]) -> None:
    async def never(now: datetime) -> PollResult:
        await anyio.sleep_forever()
        raise AssertionError

    work.deliver_due = never
    poller, ended = Poller(work, work.clock, RepeatedFailures("fetch", "x", SECOND, lambda *_: None)), anyio.Event()

    async def run() -> None:
        await poller.run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await work.clock.run_until_idle()
        poller.stop()
        await work.clock.advance(4 * SECOND)
        assert not ended.is_set()
        await work.clock.advance(SECOND)
        assert ended.is_set()


async def test_a_store_that_is_down_at_start_is_waited_for(work: Work, critical: list[str]) -> None:
    work.fails = True
    work.due = [work.clock.now() - SECOND]
    async with polling(work, critical):
        await work.clock.advance(10 * SECOND)
        assert work.taken == []
        work.fails = False
        await work.clock.advance(2 * SECOND)
        assert len(work.taken) == 1
        work.store(work.clock.now() - SECOND)
        await work.clock.run_until_idle()
        assert len(work.taken) == 2


async def test_it_says_when_it_is_told_of_what_is_stored(work: Work, critical: list[str]) -> None:
    async with polling(work, critical) as poller:
        assert poller.listening.is_set()


async def test_a_store_that_refuses_only_to_wake_it_is_looked_at_and_asked_again_row_34(
    work: Work, critical: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, it was not looked at until it agreed."""
    start, listen = work.clock.now(), work.listen

    async def refuse(_wake: Wake) -> Callable[[], None]:
        raise StoreUnavailable("no connection to listen on")

    monkeypatch.setattr(work, "listen", refuse)
    work.store(start + 5 * SECOND)
    async with polling(work, critical) as poller:
        await work.clock.advance(90 * SECOND)
        assert work.taken == [(start + 5 * SECOND, start + 5 * SECOND + MICROSECOND)]
        work.store(start + 91 * SECOND)
        await work.clock.advance(60 * SECOND)
        assert [due for due, _ in work.taken] == [start + 5 * SECOND, start + 91 * SECOND], "within a minute"
        assert len(work.looks) <= 6
        assert poller.problem is None
        assert critical == []
        assert "cannot be notified of new messages: no connection to listen on" in caplog.text
        assert "reachable again" not in caplog.text
        resource = poller._listening_calls.resource
        assert "no connection to listen on" in str(resource.outage_text(work.clock.monotonic())), "/readyz says so"

        work.store(work.clock.now() + 2 * SECOND)
        monkeypatch.setattr(work, "listen", listen)
        await work.clock.advance(3 * SECOND)
        assert len(work.taken) == 3, "what was stored while it was deaf is found as soon as it hears"
        assert resource.outage_text(work.clock.monotonic()) is None
        work.store(work.clock.now() - SECOND)
        await work.clock.run_until_idle()
        assert len(work.taken) == 4, "it is woken"


@pytest.mark.parametrize("fails", [False, True])
async def test_who_waits_for_it_to_listen_is_held_up_by_no_outage_and_no_stop(
    work: Work, critical: list[str], fails: bool
) -> None:
    """A store that is away is asked again, as for every look; one that never answers is left when it stops."""
    work.fails = fails
    never = anyio.Event()

    async def listen(wake: Wake) -> Callable[[], None]:
        await never.wait()
        raise AssertionError

    if not fails:
        work.listen = listen
    async with polling(work, critical) as poller:
        assert poller.listening.is_set() is fails
        poller.stop()
        await work.clock.advance(STOP_DEADLINE)
        assert poller.listening.is_set()


async def test_stopping_ends_the_sleep_at_once_and_the_listening(work: Work, critical: list[str]) -> None:
    start = work.clock.now()
    async with polling(work, critical):
        listening = work.wake
    assert work.clock.now() == start
    assert work.wake is not listening


async def test_stopping_while_the_store_is_down_ends_it_row_55(work: Work, critical: list[str]) -> None:
    work.fails = True
    async with polling(work, critical):
        pass
    assert len(work.looks) <= 1


async def test_stopping_during_a_look_lets_it_finish_row_55(work: Work, critical: list[str]) -> None:
    work.due = [work.clock.now() - SECOND] * 1000
    looks = 0
    async with polling_stopped_by(work, critical, after=3):
        pass
    looks = len(work.looks)
    assert looks == 3
    assert len(work.taken) == 300


@asynccontextmanager
async def polling_stopped_by(work: Work, critical: list[str], after: int) -> AsyncGenerator[None]:
    """Stop the poller in the middle of its n-th look."""
    poller = Poller(work, work.clock, RepeatedFailures("fetch", "x", SECOND, lambda *_: None))
    work.during = lambda: poller.stop() if len(work.looks) == after else None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)
        yield


async def test_a_poller_stopped_before_it_runs_ends_at_once(work: Work) -> None:
    poller = Poller(work, work.clock, RepeatedFailures("fetch", "x", SECOND, lambda *_: None))
    poller.stop()
    await poller.run()
    assert work.looks == []
