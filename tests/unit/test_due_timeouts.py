"""The look for due timeouts by itself: how much is announced at once, what is remembered (specification 4.7)."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.timeouts_bench import MICROSECOND, SECOND, FaultyTimeouts

from postdate import Headers, MemoryTransport
from postdate.backends.memory.database import MemoryTimeouts
from postdate.core.due.poller import PollResult
from postdate.core.timeout_manager.due_query import (
    DISPATCHED_WITHIN,
    POLL_BACK_INTERVAL,
    AnnouncedTimeouts,
    DueTimeouts,
)
from postdate.errors import StoreUnavailable, TransportUnavailable
from postdate.ports.timeouts import DueTimeout, Timeout
from postdate.testing import Fault, FaultyTransport, VirtualClock

QUEUE = "sales.TimeoutsDispatcher"


class Look:
    """Looks on demand; what was announced and not dispatched is in the queue."""

    def __init__(self, clock: VirtualClock, **bounds: Any) -> None:
        self.clock, self.start = clock, clock.now()
        self.memory, self.queues = MemoryTimeouts(), MemoryTransport(clock=clock)
        self.timeouts, self.transport = FaultyTimeouts(self.memory), FaultyTransport(self.queues)
        self.due = DueTimeouts(self.timeouts, self.transport, QUEUE, clock, **bounds)
        self.woken = 0

    async def begin(self) -> None:
        await self.queues.create_queues([QUEUE])
        await self.due.listen(self.wake)

    def wake(self) -> None:
        self.woken += 1

    async def keep(self, count: int, due_in: float = -1, apart: timedelta = MICROSECOND) -> list[Timeout]:
        first = self.start + due_in * SECOND
        kept = [Timeout(str(uuid.uuid4()), first + number * apart, "billing") for number in range(count)]
        for timeout in kept:
            await self.memory.add(timeout)
        return kept

    @property
    def announced(self) -> list[str]:
        return [envelope.headers[Headers.TIMEOUT_ID] for envelope, _ in self.queues.queues[QUEUE].messages]

    async def look(self) -> PollResult:
        """Look until there is no more, as the poller does."""
        while (taken := await self.due.deliver_due(self.clock.now())).has_more:
            pass
        return taken

    async def look_later(self, duration: timedelta = POLL_BACK_INTERVAL) -> PollResult:
        await self.clock.advance(duration)
        return await self.look()

    async def dispatch(self, count: int | None = None, *, here: bool = True) -> None:
        """Remove what was announced; ``here``: the look is told."""
        queue = self.queues.queues[QUEUE]
        for _ in range(len(queue.messages) if count is None else count):
            envelope, _ = queue.pop_first()
            timeout_id = envelope.headers[Headers.TIMEOUT_ID]
            await self.memory.try_remove(timeout_id)
            if here:
                self.due.forget(timeout_id)


@pytest.fixture
async def look(clock: VirtualClock) -> Look:
    look = Look(clock, most_expected=200, most_remembered=100)
    await look.begin()
    return look


@pytest.mark.parametrize("apart", [MICROSECOND, timedelta(0)], ids=["one by one", "all at once"])
async def test_a_backlog_is_announced_piece_by_piece_each_once(look: Look, apart: timedelta) -> None:
    kept = await look.keep(2_500, apart=apart)
    seen: list[str] = []
    for _ in range(100):
        await look.look()
        assert len(look.announced) <= 200
        seen += look.announced
        await look.dispatch()
    assert sorted(seen) == sorted(each.timeout_id for each in kept)
    assert await look.memory.next_chunk(look.start - timedelta(days=1), look.start, 1) == await _nothing(look)


async def _nothing(look: Look):
    return await MemoryTimeouts().next_chunk(look.start, look.start, 1)


async def test_a_full_queue_is_waited_for_until_half_of_it_is_gone(look: Look) -> None:
    await look.keep(500)
    taken = await look.look()
    assert taken.next_attempt is not None
    assert taken.next_attempt > look.start  # it does not spin
    await look.dispatch(99)
    assert look.woken == 0
    await look.dispatch(1)
    assert look.woken == 1


@pytest.mark.parametrize("apart", [MICROSECOND, timedelta(0)], ids=["one by one", "all at once"])
async def test_what_another_process_dispatches_makes_room_too(look: Look, apart: timedelta) -> None:
    await look.keep(500, apart=apart)
    await look.look()
    await look.dispatch(here=False)
    await look.look()
    assert look.announced == []  # nobody has told
    await look.look_later(SECOND + MICROSECOND)
    assert len(look.announced) == 200


async def test_what_is_not_heard_of_for_long_holds_up_nobody_and_is_not_announced_again(look: Look) -> None:
    kept = await look.keep(250)
    await look.look()
    assert len(set(look.announced)) == 200
    await look.look_later(DISPATCHED_WITHIN + SECOND)
    await look.look_later()
    assert sorted(look.announced) == sorted(each.timeout_id for each in kept)


async def test_more_failures_than_can_be_remembered_are_not_announced_again_either(
    look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    kept = await look.keep(180)
    await look.look()
    for timeout in kept:
        look.due.stop_expecting(timeout.timeout_id)
    late = (await look.keep(1, due_in=-0.5))[0]  # later than those that are not looked for any more
    for _ in range(5):
        await look.look_later()
    assert sorted(look.announced) == sorted(each.timeout_id for each in [*kept, late])
    assert "return the messages, or have them removed" in caplog.text


async def test_row_97_what_could_not_be_sent_is_sent_next_and_nothing_is_passed_over(look: Look) -> None:
    kept = await look.keep(3, apart=timedelta(0))
    look.transport.faults.add(Fault("send", TransportUnavailable("no"), calls=[1]))
    with pytest.raises(TransportUnavailable):
        await look.look()
    await look.look()
    assert sorted(look.announced) == sorted(each.timeout_id for each in kept)


async def test_row_97_a_part_that_was_sent_is_not_sent_again(look: Look) -> None:
    kept = await look.keep(3)

    async def send(envelopes, now, *, work=()):
        return [*await MemoryTransport.send(look.queues, envelopes[:1], now), *[StoreUnavailable("no")] * 2]

    look.queues.send = send
    with pytest.raises(StoreUnavailable):
        await look.look()
    del look.queues.send
    await look.look()
    assert look.announced == [each.timeout_id for each in kept]


async def test_a_transport_that_does_not_answer_for_all_has_sent_none(look: Look) -> None:
    await look.keep(3)

    async def send(envelopes, now, *, work=()):
        return [None]

    look.queues.send = send
    with pytest.raises(TransportUnavailable, match="has not answered for every"):
        await look.look()


async def test_row_98_what_is_stored_here_with_an_earlier_time_is_looked_for_at_once(look: Look) -> None:
    await look.keep(1)
    await look.look()
    (late,) = await look.keep(1, due_in=-100)
    look.due.report_stored(late.due)
    assert look.woken == 1
    await look.look()
    assert look.announced[-1] == late.timeout_id


async def test_what_is_due_later_than_the_next_look_wakes_nobody(look: Look) -> None:
    await look.keep(1, due_in=2)
    assert (await look.look()).next_attempt == look.start + 2 * SECOND
    look.due.report_stored(look.start + 3 * SECOND)
    assert look.woken == 0
    look.due.report_stored(look.start + SECOND)
    assert look.woken == 1


async def test_what_is_stored_while_a_look_goes_on_wakes_the_poller(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query may have run before: nobody else would say that the next look is to be earlier."""
    await look.look()
    found = look.memory.next_chunk

    async def slow(start: datetime, now: datetime, limit: int):
        chunk = await found(start, now, limit)
        look.due.report_stored(look.start + SECOND)
        return chunk

    monkeypatch.setattr(look.memory, "next_chunk", slow)
    woken = look.woken
    await look.look()
    assert look.woken > woken


async def test_row_98_a_clock_set_back_does_not_stop_looking_back(look: Look) -> None:
    look.clock.step(timedelta(days=1))
    await look.keep(1)
    await look.look()
    look.clock.step(-timedelta(days=1))
    await look.look()
    (late,) = await look.keep(1, due_in=-100)
    await look.look_later()
    assert look.announced[-1] == late.timeout_id


async def test_a_clock_that_was_years_ahead_at_the_start_and_is_set_right_hides_nothing(clock: VirtualClock) -> None:
    years = timedelta(days=11 * 365)
    clock.step(years)
    look = Look(clock)
    await look.begin()
    await look.look()
    clock.step(-years)
    look.start = clock.now()
    (timeout,) = await look.keep(1)
    look.due.report_stored(timeout.due)
    await look.look_later()
    assert look.announced == [timeout.timeout_id]


async def test_after_a_clock_was_set_back_what_others_dispatched_holds_up_nothing(clock: VirtualClock) -> None:
    look = Look(clock, most_expected=4)
    await look.begin()
    for timeout in await look.keep(4):
        await look.look()
        await look.memory.try_remove(timeout.timeout_id)  # another process has dispatched it, and tells nobody
    look.clock.step(-timedelta(hours=1))
    late = await look.keep(4, due_in=-3_700)
    await look.look_later()  # which notes that the clock was set back
    await look.look_later()
    assert set(look.announced[4:]) == {each.timeout_id for each in late}


async def test_what_was_announced_after_the_look_read_its_time_is_on_its_way(look: Look) -> None:
    await look.keep(500)
    started = look.clock.now()
    await look.clock.advance(POLL_BACK_INTERVAL)
    await look.due.deliver_due(started)
    await look.look()
    assert len(look.announced) == 200


async def test_what_waits_for_room_while_the_clock_is_set_back_is_not_early(clock: VirtualClock) -> None:
    look = Look(clock, most_expected=2)
    await look.begin()
    kept = await look.keep(4)
    await look.look()
    look.clock.step(-timedelta(hours=1))
    for timeout in kept[:2]:
        await look.memory.try_remove(timeout.timeout_id)
        look.due.forget(timeout.timeout_id)
    await look.look_later()
    assert look.announced == [each.timeout_id for each in kept[:2]]
    await look.look_later(timedelta(hours=1))
    assert look.announced == [each.timeout_id for each in kept]


async def test_what_is_dispatched_while_looking_back_is_not_announced_again(look: Look) -> None:
    await look.keep(3)
    await look.look()
    found = look.memory.next_chunk

    async def slow(start: datetime, now: datetime, limit: int):
        chunk = await found(start, now, limit)
        if chunk.due:
            await look.dispatch()
        return chunk

    look.memory.next_chunk = slow
    await look.look_later()
    assert look.announced == []


async def test_looking_back_goes_on_where_a_chunk_ends(clock: VirtualClock) -> None:
    look = Look(clock, most_expected=5_000)
    await look.begin()
    await look.keep(2_500)
    await look.look()
    (late,) = await look.keep(1, due_in=-1 + 0.0024)
    await look.look_later()
    assert len(look.announced) == 2_501
    assert look.announced[-1] == late.timeout_id


# --- what is remembered -----------------------------------------------------------------------------------------------

NOW = datetime.fromisoformat("2026-01-31T12:00:00+00:00")


def test_what_is_not_found_any_more_is_forgotten() -> None:
    announced = AnnouncedTimeouts(NOW - timedelta(days=1))
    stays, goes, later = (DueTimeout(name, NOW + number * SECOND) for number, name in enumerate("abc"))
    announced.add([stays, goes, later], NOW)
    announced.reconcile(NOW - SECOND, NOW + SECOND, [stays], NOW)
    assert [name in announced for name in "abc"] == [True, False, True]
    announced.stop_expecting("a")
    announced.reconcile(NOW - SECOND, NOW + SECOND, [], NOW)
    assert "a" not in announced


def test_the_bounds_hold_whatever_fails() -> None:
    announced = AnnouncedTimeouts(NOW - timedelta(days=1), remembered=10)
    for number in range(100):
        announced.add([DueTimeout(str(number), NOW + number * SECOND)], NOW)
        announced.stop_expecting(str(number))
        assert sum(str(each) in announced for each in range(100)) <= 10
    assert NOW < announced.floor < NOW + 99 * SECOND
    assert all(str(number) in announced for number in range(100) if NOW + number * SECOND > announced.floor)
