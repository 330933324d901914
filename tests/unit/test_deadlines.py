"""Deadlines of calls, and errors of ours for whatever adapters raise (ADR 49).

A call that does not end even when it is cancelled stands for one in a blocked thread: it shields itself, and swallows
cancellations by asyncio's own means.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tests.waiting import until

from postdate import MemoryStore, MemoryTransport, ScaledClock
from postdate.clock import SystemClock, steady_seconds
from postdate.core.health.deadlines import (
    CALL_DEADLINE,
    STOP_DEADLINE,
    Deadlines,
    count_abandoned_calls,
    translate_store_errors,
)
from postdate.errors import (
    PostdateError,
    StoreReadOnly,
    StoreUnavailable,
    StoreUnreachable,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.runtime.cancellation import is_cancelled
from postdate.runtime.threads import run_in_thread, thread_limiter
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)
MOMENT = timedelta(microseconds=1)

Call = Callable[[], Awaitable[Any]]
Way = Callable[[Deadlines, Call], Awaitable[Any]]


async def apart(deadlines: Deadlines, call: Call) -> Any:
    return await deadlines.call_in_task(call)


async def in_place(deadlines: Deadlines, call: Call) -> Any:
    return await deadlines.call(call())


both_ways = pytest.mark.parametrize("way", [apart, in_place])


@asynccontextmanager
async def watched(deadlines: Deadlines) -> AsyncGenerator[Deadlines]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.cancel_overdue_calls)
        yield deadlines
        tasks.cancel_scope.cancel()


class Deaf:
    """A call that does not end when it is cancelled, only when it is answered."""

    def __init__(self, result: int = 7, error: Exception | None = None) -> None:
        self.answer = anyio.Event()
        self.begun = anyio.Event()
        self._result, self._error = result, error

    async def __call__(self) -> int:
        self.begun.set()
        with anyio.CancelScope(shield=True):
            while not self.answer.is_set():
                with suppress(asyncio.CancelledError):
                    await self.answer.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Outcome:
    """The end of a call that was made in a task of its own."""

    def __init__(self, make: Callable[[], Awaitable[Any]]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_cancelled_afterwards = False
        self.task = asyncio.create_task(self._run(make))

    async def _run(self, make: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.result = await make()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self.is_cancelled_afterwards = is_cancelled()

    @property
    def text(self) -> str:
        assert isinstance(self.error, PostdateError)
        return f"{self.error.code}: {self.error}"


# --- a call that is not answered --------------------------------------------------------------------------------------


@both_ways
async def test_a_call_without_an_answer_is_cancelled_at_its_deadline(clock: VirtualClock, way: Way) -> None:
    async with watched(Deadlines.of_store(MemoryStore(), clock)) as deadlines:
        outcome = Outcome(lambda: way(deadlines, anyio.sleep_forever))
        await clock.advance(CALL_DEADLINE - MOMENT)
        assert not outcome.task.done()
        await clock.advance(MOMENT)
        assert outcome.task.done()
    assert outcome.text == "store_unreachable: MemoryStore did not answer within 40 s"
    assert not outcome.is_cancelled_afterwards
    assert count_abandoned_calls() == 0


@both_ways
async def test_calls_that_begin_one_after_the_other_have_deadlines_of_their_own(clock: VirtualClock, way: Way) -> None:
    """One watch looks after all of them, in the order in which they began."""
    async with watched(Deadlines.of_transport(MemoryTransport(), clock, 10 * SECOND)) as deadlines:
        outcomes = list[Outcome]()
        for _ in range(3):
            outcomes.append(Outcome(lambda: way(deadlines, anyio.sleep_forever)))
            await clock.advance(4 * SECOND)
        assert [each.task.done() for each in outcomes] == [True, False, False]
        await clock.advance(2 * SECOND)
        assert [each.task.done() for each in outcomes] == [True, True, False]
        await clock.advance(4 * SECOND)
    assert {each.text for each in outcomes} == {"transport_unreachable: MemoryTransport did not answer within 10 s"}


@both_ways
async def test_deadlines_are_real_time_on_a_clock_that_runs_fast(clock: VirtualClock, way: Way) -> None:
    """A day in a minute: the deadline would be over in 70 µs, in which no network answers."""
    fast = ScaledClock(clock.now(), speed=1_440)
    async with watched(Deadlines.of_store(MemoryStore(), fast, SECOND / 10)) as deadlines:
        began = steady_seconds()
        with pytest.raises(StoreUnreachable, match=r"did not answer within 0\.1 s"):
            await way(deadlines, anyio.sleep_forever)
        assert steady_seconds() - began >= 0.09


async def test_a_deadline_ends_a_call_though_calls_that_hang_have_all_threads() -> None:
    """The clock slept the last millisecond of each wait in one of them: no deadline was ever over then."""
    free = threading.Event()
    deadlines = Deadlines.of_store(MemoryStore(), SystemClock(), SECOND / 10)

    async def hang() -> None:
        await run_in_thread(free.wait)

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(int(thread_limiter().total_tokens)):
                tasks.start_soon(hang)
            await until(lambda: not thread_limiter().available_tokens)
            with pytest.raises(StoreUnreachable):
                await deadlines.call_in_task(anyio.sleep_forever)
            free.set()
    finally:
        free.set()


async def test_a_call_that_does_not_end_when_cancelled_is_abandoned_and_its_late_result_is_dealt_with(
    clock: VirtualClock,
) -> None:
    deadlines, deaf, late = Deadlines.of_store(MemoryStore(), clock, 2 * SECOND), Deaf(), list[int]()

    async def keep(result: int) -> None:
        late.append(result)

    outcome = Outcome(lambda: deadlines.call_in_task(deaf, keep))
    await clock.advance(3 * SECOND)  # the deadline, and the grace
    assert isinstance(outcome.error, StoreUnreachable)
    assert count_abandoned_calls() == 1
    deaf.answer.set()
    await clock.run_until_idle()
    assert late == [7]
    assert count_abandoned_calls() == 0


async def test_a_call_that_is_answered_while_it_is_cancelled_has_its_result(clock: VirtualClock) -> None:
    deadlines, deaf = Deadlines.of_store(MemoryStore(), clock, 2 * SECOND), Deaf()
    outcome = Outcome(lambda: deadlines.call_in_task(deaf))
    await clock.advance(2.5 * SECOND)
    deaf.answer.set()
    await clock.run_until_idle()
    assert outcome.result == 7


async def test_a_late_failure_is_logged_and_ends_nothing(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    deadlines, deaf = Deadlines.of_store(MemoryStore(), clock, SECOND), Deaf(error=OSError("connection reset"))
    outcome = Outcome(lambda: deadlines.call_in_task(deaf))
    await clock.advance(2 * SECOND)
    assert isinstance(outcome.error, StoreUnreachable)
    deaf.answer.set()
    await clock.run_until_idle()
    assert caplog.messages == ["an abandoned call failed: connection reset"]


@pytest.mark.parametrize("error", [StoreUnavailable("deadlock"), KeyError("a bug")])
async def test_a_late_result_that_cannot_be_dealt_with_is_logged_and_ends_nothing(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    deadlines, deaf = Deadlines.of_store(MemoryStore(), clock, SECOND), Deaf()

    async def fail(result: int) -> None:
        raise error

    outcome = Outcome(lambda: deadlines.call_in_task(deaf, fail))
    await clock.advance(2 * SECOND)
    deaf.answer.set()
    await clock.run_until_idle()
    assert outcome.task.done()
    assert caplog.messages == [f"the late result of an abandoned call could not be dealt with: {error}"]
    assert count_abandoned_calls() == 0


@pytest.mark.parametrize("ending", ["returns", "raises an error of ours", "is cancelled", "raises another error"])
async def test_however_an_overdue_call_ends_its_task_is_not_cancelled_after_it(
    clock: VirtualClock, ending: str
) -> None:
    """A stray cancellation of a later message was taken for one of ours, and so was that of a user's task group."""

    async def answer() -> None:
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            if ending == "is cancelled":
                raise
            if ending == "raises an error of ours":
                raise TransportUnreachable("translated") from None
            if ending == "raises another error":
                raise KeyError("a bug") from None

    async def call() -> None:
        with suppress(TransportUnavailable):
            await deadlines.call(answer())

    async with watched(Deadlines.of_transport(MemoryTransport(), clock, SECOND)) as deadlines:
        outcome = Outcome(call)
        await clock.advance(2 * SECOND)
        assert outcome.task.done()
    assert outcome.error is None
    assert not outcome.is_cancelled_afterwards
    assert deadlines.count_overdue_calls() == 0


async def test_a_deaf_call_in_its_caller_s_task_counts_as_overdue_until_it_ends(clock: VirtualClock) -> None:
    deaf = Deaf()
    async with watched(Deadlines.of_transport(MemoryTransport(), clock, SECOND)) as deadlines:
        outcome = Outcome(lambda: deadlines.call(deaf()))
        await clock.advance(SECOND - MOMENT)
        assert deadlines.count_overdue_calls() == 0
        await clock.advance(SECOND)
        assert deadlines.count_overdue_calls() == 1
        another = Outcome(lambda: deadlines.call(anyio.sleep_forever()))  # has a deadline all the same
        await clock.advance(SECOND)
        assert isinstance(another.error, TransportUnreachable)
        deaf.answer.set()
        await clock.run_until_idle()
        assert (outcome.result, outcome.is_cancelled_afterwards) == (7, False)
        assert deadlines.count_overdue_calls() == 0


async def test_calls_are_watched_only_while_there_are_any(clock: VirtualClock) -> None:
    """A month of virtual time is not made of looks."""
    async with watched(Deadlines.of_store(MemoryStore(), clock)) as deadlines:
        await deadlines.call(anyio.lowlevel.checkpoint())
        await clock.advance(timedelta(minutes=2))
        assert clock.next_wait is None


# --- a caller that is cancelled ---------------------------------------------------------------------------------------


async def test_a_caller_that_a_scope_cancels_gets_the_result_that_was_on_its_way_and_ends_at_its_next_wait(
    clock: VirtualClock,
) -> None:
    deadlines, deaf, results = Deadlines.of_store(MemoryStore(), clock), Deaf(), list[int]()

    async def make() -> None:
        results.append(await deadlines.call_in_task(deaf))
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make)
        await clock.run_until_idle()
        tasks.cancel_scope.cancel()
        asyncio.get_running_loop().call_soon(deaf.answer.set)
    assert results == [7]


async def test_the_result_of_a_caller_that_asyncio_cancels_counts_as_late(clock: VirtualClock) -> None:
    """It cannot be returned: such a cancellation is raised once only, and the caller would go on."""
    deadlines, deaf, late = Deadlines.of_store(MemoryStore(), clock), Deaf(), list[int]()

    async def keep(result: int) -> None:
        late.append(result)

    outcome = Outcome(lambda: deadlines.call_in_task(deaf, keep))
    await clock.run_until_idle()
    outcome.task.cancel()
    await clock.run_until_idle()
    deaf.answer.set()
    await clock.run_until_idle()
    assert isinstance(outcome.error, asyncio.CancelledError)
    assert late == [7]
    assert count_abandoned_calls() == 0


@pytest.mark.parametrize("by", ["a scope", "asyncio"])
async def test_a_caller_that_is_cancelled_does_not_wait_for_ever(clock: VirtualClock, by: str) -> None:
    deadlines, deaf, late = Deadlines.of_store(MemoryStore(), clock), Deaf(), list[int]()
    scope = anyio.CancelScope()

    async def keep(result: int) -> None:
        late.append(result)

    async def make() -> None:
        with scope:
            await deadlines.call_in_task(deaf, keep)

    outcome = Outcome(make)
    await clock.run_until_idle()
    _ = scope.cancel() if by == "a scope" else outcome.task.cancel()
    await clock.advance(STOP_DEADLINE - MOMENT)
    assert not outcome.task.done()
    await clock.advance(MOMENT)
    assert outcome.task.done()
    assert count_abandoned_calls() == 1
    deaf.answer.set()
    await clock.run_until_idle()
    assert late == [7]


async def test_a_caller_that_is_cancelled_beside_the_deadline_stays_cancelled(clock: VirtualClock) -> None:
    """Both cancellations come as one: only that of the deadline is taken back."""
    async with watched(Deadlines.of_transport(MemoryTransport(), clock, SECOND)) as deadlines:
        release = anyio.Event()

        async def end_late() -> None:
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                await release.wait()
                raise

        outcome = Outcome(lambda: deadlines.call(end_late()))
        await clock.advance(2 * SECOND)
        outcome.task.cancel()
        await clock.run_until_idle()
    assert isinstance(outcome.error, asyncio.CancelledError)
    assert outcome.is_cancelled_afterwards
    assert outcome.task.cancelling() == 1


# --- what adapters raise ----------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(
    ("raised", "ours"),
    [
        (KeyError("a bug"), StoreUnavailable),
        (ConnectionRefusedError("nobody listens"), StoreUnreachable),
        (TimeoutError("too slow"), StoreUnreachable),
        (asyncio.CancelledError(), StoreUnreachable),
        (StoreReadOnly("a replica"), StoreReadOnly),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
async def test_whatever_an_adapter_raises_is_an_error_of_ours(
    clock: VirtualClock, way: Way, raised: BaseException, ours: type[PostdateError]
) -> None:
    """A cancellation of the adapter's own ended delivery, and nothing said so."""

    async def fail() -> None:
        raise raised

    with pytest.raises(PostdateError) as caught:
        await way(Deadlines.of_store(MemoryStore(), clock), fail)
    assert type(caught.value) is ours
    if caught.value is not raised:
        assert str(caught.value).startswith(f"MemoryStore failed with {type(raised).__name__}")
        assert caught.value.__cause__ is raised


class Killed(BaseException):
    """Neither an error nor a cancellation."""


@both_ways
async def test_what_is_no_error_passes(clock: VirtualClock, way: Way) -> None:
    async def fail() -> None:
        raise Killed

    with pytest.raises(Killed):
        await way(Deadlines.of_store(MemoryStore(), clock), fail)


@both_ways
async def test_the_errors_of_a_transport_are_those_of_transports(clock: VirtualClock, way: Way) -> None:
    async def refuse() -> None:
        raise ConnectionRefusedError("nobody listens")

    async def fail() -> None:
        raise ValueError("a bug")

    deadlines = Deadlines.of_transport(MemoryTransport(), clock)
    with pytest.raises(TransportUnreachable):  # says nothing about a message
        await way(deadlines, refuse)
    with pytest.raises(TransportUnavailable) as caught:
        await way(deadlines, fail)
    assert not isinstance(caught.value, TransportUnreachable)


@both_ways
async def test_a_failure_has_its_traceback_in_the_log_once(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    async def fail() -> None:
        raise KeyError("a bug")

    store = MemoryStore()
    for _ in range(3):  # also when another loop calls it
        with pytest.raises(StoreUnavailable):
            await way(Deadlines.of_store(store, clock), fail)
    assert [bool(record.exc_info) for record in caplog.records] == [True]


class WithSlots:
    """Cannot be a weak key."""

    __slots__ = ()


@pytest.mark.parametrize("slots", [False, True])
async def test_so_it_has_where_a_call_has_no_deadline(caplog: pytest.LogCaptureFixture, slots: bool) -> None:
    """A pump that cannot receive tried each second, with a traceback each time."""
    adapter = WithSlots() if slots else MemoryStore()
    for text in ("first", "first", "second", "first"):
        with pytest.raises(StoreUnavailable), translate_store_errors(adapter):
            raise KeyError(f"{text} of {slots}")
    assert [bool(record.exc_info) for record in caplog.records] == [True, True]


# --- a service that stops ---------------------------------------------------------------------------------------------


@both_ways
async def test_calls_in_progress_get_a_short_deadline_from_the_stop_on(clock: VirtualClock, way: Way) -> None:
    async with watched(Deadlines.of_store(MemoryStore(), clock)) as deadlines:
        outcome = Outcome(lambda: way(deadlines, anyio.sleep_forever))
        await clock.advance(20 * SECOND)
        deadlines.shorten()
        await clock.advance(STOP_DEADLINE - MOMENT)
        assert not outcome.task.done()
        await clock.advance(MOMENT)
    assert outcome.text == "store_unreachable: MemoryStore did not answer within 5 s"


@both_ways
async def test_a_deadline_that_is_shorter_stays(clock: VirtualClock, way: Way) -> None:
    async with watched(Deadlines.of_store(MemoryStore(), clock, 2 * SECOND)) as deadlines:
        deadlines.shorten()
        outcome = Outcome(lambda: way(deadlines, anyio.sleep_forever))
        await clock.advance(2 * SECOND)
    assert outcome.text == "store_unreachable: MemoryStore did not answer within 2 s"


@both_ways
async def test_the_first_call_without_an_answer_after_the_stop_is_the_last(clock: VirtualClock, way: Way) -> None:
    """A pump with a hundred messages in hand waited five seconds for each of them."""
    calls = 0

    async def count() -> None:
        nonlocal calls
        calls += 1
        await anyio.sleep_forever()

    async with watched(Deadlines.of_store(MemoryStore(), clock)) as deadlines:
        deadlines.shorten()
        first = Outcome(lambda: way(deadlines, count))
        await clock.advance(STOP_DEADLINE)
        assert first.task.done()
        second = Outcome(lambda: way(deadlines, count))
        await clock.run_until_idle()
    assert second.text == "store_unreachable: MemoryStore did not answer within 5 s"
    assert calls == 1


@pytest.mark.parametrize(("seconds", "is_called"), [(4, False), (6, True)])
async def test_a_call_that_was_abandoned_just_before_the_stop_counts_and_one_long_before_does_not(
    clock: VirtualClock, seconds: int, is_called: bool
) -> None:
    deadlines, deaf, calls = Deadlines.of_store(MemoryStore(), clock, SECOND), Deaf(), list[int]()

    async def note() -> None:
        calls.append(1)

    Outcome(lambda: deadlines.call_in_task(deaf))
    await clock.advance(2 * SECOND)
    assert count_abandoned_calls() == 1
    await clock.advance(seconds * SECOND)
    await deadlines.call_in_task(note)  # as long as nothing stops, every call is made
    deadlines.shorten()
    with suppress(StoreUnreachable):
        await deadlines.call_in_task(note)
    deaf.answer.set()
    await clock.run_until_idle()
    assert len(calls) == 1 + is_called


async def test_a_loop_that_begins_again_has_its_deadlines_back(clock: VirtualClock) -> None:
    deadlines = Deadlines.of_store(MemoryStore(), clock)
    deadlines.shorten()
    outcome = Outcome(lambda: deadlines.call_in_task(anyio.sleep_forever))
    await clock.advance(STOP_DEADLINE)
    assert isinstance(outcome.error, StoreUnreachable)
    deadlines.restore()
    outcome = Outcome(lambda: deadlines.call_in_task(anyio.sleep_forever))
    await clock.advance(STOP_DEADLINE)
    assert not outcome.task.done()
    await clock.advance(CALL_DEADLINE - STOP_DEADLINE)
    assert outcome.text == "store_unreachable: MemoryStore did not answer within 40 s"
