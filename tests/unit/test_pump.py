"""The message pump: when a handler cancels the task it runs in, and how much is received ahead."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from typing_extensions import override

from postdate import Endpoint, HandlerContext, MemoryTransport, Recoverability
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.receive.outcomes import Recovery, Step, StepFailure, StepOutcome
from postdate.core.receive.prefetch import Prefetch
from postdate.core.receive.pump import MessagePump
from postdate.core.recoverability import RecoveryRules, Resolution
from postdate.errors import ClaimLost, PostdateError, StoreTroubled, TransportUnavailable, TransportUnreachable
from postdate.messages import Envelope
from postdate.ports import HANDLED, Completion, Received, Receiver, RecordKind
from postdate.runtime.reporting import NO_METRICS, CountedMetrics
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("waits", [True, False], ids=["and waits", "and ends"])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_handler_that_cancels_its_task_once_ends_neither_endpoint_nor_message(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, concurrency: int, waits: bool
) -> None:
    queues, handled, cancelled = MemoryTransport(), list[bytes](), 0
    endpoint = Endpoint("sales", transport=queues, concurrency=concurrency, clock=clock)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        nonlocal cancelled
        if message == b"odd" and cancelled < 3:
            cancelled += 1
            cancel_this_task()
            if waits:
                await anyio.sleep_forever()
        handled.append(message)

    async with endpoint:
        for body in (b"odd", b"1", b"2", b"3"):
            await endpoint.send(body, destination="sales")
            await clock.advance(60 * SECOND)
        lengths = await queues.queue_lengths()
    assert set(handled) == {b"odd", b"1", b"2", b"3"}
    assert lengths == {"sales": 0, "error": 0}
    if waits:
        assert cancelled == 3
        told = [each.levelno for each in caplog.records if "not finished: the task" in each.message]
        assert told == [logging.ERROR] * 3


@pytest.mark.parametrize("then", ["waits", "returns", "raises"])
async def test_a_handler_that_always_cancels_its_task_is_a_failure_in_the_end(clock: VirtualClock, then: str) -> None:
    """It was handled for ever where it did not wait, once a second, and with one at a time nothing else ever was."""
    queues, handled = MemoryTransport(), list[bytes]()
    settings = Recoverability(immediate_retries=0, delayed_retries=0)
    endpoint = Endpoint("sales", transport=queues, concurrency=1, recoverability=settings, clock=clock)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        handled.append(message)
        if message != b"odd":
            return
        cancel_this_task()
        if then == "waits":
            await anyio.sleep_forever()
        if then == "raises":
            raise ValueError(message)

    async with endpoint:
        for body in (b"odd", b"1", b"2"):
            await endpoint.send(body, destination="sales")
        await clock.advance(timedelta(minutes=10))
        assert await queues.queue_lengths() == {"sales": 0, "error": 1}
        await endpoint.send(b"3", destination="sales")  # to the same worker, which nobody cancels any more
        await clock.advance(SECOND)
    assert handled.count(b"odd") == 11
    assert [each for each in handled if each != b"odd"] == [b"1", b"2", b"3"]


class Holding(Receiver):
    """A receiver of as many messages as are asked for; keeps how many that was, and what came back."""

    def __init__(self) -> None:
        self.limits, self.back = list[int](), list[Received]()
        self.closed, self.came_back = False, anyio.Event()

    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        await anyio.lowlevel.checkpoint()
        self.limits.append(limit)
        return [Received(Envelope("sales", "message"), 0, object()) for _ in range(limit)]

    async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
        """End it, whatever it is."""

    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        assert not failed
        self.back.append(received)
        self.came_back.set()
        self.came_back = anyio.Event()

    async def close(self) -> None:
        self.closed = True


DONE = StepOutcome(HANDLED)


async def ignore(received: Received) -> StepOutcome:
    """Handle nothing."""
    return DONE


class Deciding(Recovery):
    """Notes what it is asked about; of one message it says that it is to blame for the failure of its end."""

    def __init__(self, to_blame: str = "") -> None:
        super().__init__(rules=RecoveryRules(), metrics=CountedMetrics())
        self.to_blame, self.asked = to_blame, list[tuple[int, int]]()

    def resolve(self, received: Received, failure: StepFailure | None, error: PostdateError) -> Resolution:
        self.asked.append((received.failures, received.unanswered))
        return (
            Resolution.POLICY
            if received.envelope.message_id == self.to_blame
            else super().resolve(received, failure, error)
        )

    def decide(self, received: Received, outcome: StepOutcome | None, error: Exception) -> StepOutcome:
        return StepOutcome(Completion(RecordKind.FAILED))

    def move_to_error(self, received: Received, failure: StepFailure, *, brief: bool) -> StepOutcome:
        raise AssertionError("no end was refused twice")


def reading_ahead(receiver: Holding, handle: Step, clock: VirtualClock, **settings: Any) -> MessagePump:
    """Return a pump for four messages at once."""
    breaker = RepeatedFailures("Receive", "failed", SECOND, lambda text, error: None, NO_METRICS)
    given: dict[str, Any] = {"prefetches": True, **settings}
    return MessagePump(receiver, handle, 4, clock, breaker, "sales", **given)


class Empty(Holding):
    """A receiver whose first call never ends; others fail. Keeps what its pump said of itself when that began."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.pump, self.said = error, list[MessagePump](), list[bool]()

    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        self.said.append(self.pump[0].listening.is_set())
        if self.error is not None:
            raise self.error
        await anyio.sleep_forever()
        return []


@pytest.mark.parametrize("error", [None, TransportUnavailable("away")], ids=["no answer", "a refusal"])
async def test_a_pump_listens_when_a_call_to_receive_has_begun_or_has_failed_and_not_before(
    clock: VirtualClock, error: Exception | None
) -> None:
    receiver = Empty(error)

    async def handle(received: Received) -> StepOutcome:
        raise AssertionError("there is nothing to handle")

    pump = reading_ahead(receiver, handle, clock)
    receiver.pump.append(pump)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await pump.listening.wait()
        assert receiver.said == [False]
        pump.stop()
        await clock.advance(60 * SECOND)


async def test_more_is_received_than_is_handled_at_once_while_that_takes_moments_and_goes_back_when_it_does_not(
    clock: VirtualClock,
) -> None:
    receiver, handled, is_slow = Holding(), 0, anyio.Event()

    async def handle(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        if is_slow.is_set():
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        return DONE

    pump = reading_ahead(receiver, handle, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        while max(receiver.limits, default=0) < 20:
            await anyio.lowlevel.checkpoint()
        assert not receiver.back
        is_slow.set()
        while len(receiver.back) < sum(receiver.limits) - handled:
            await receiver.came_back.wait()
        assert receiver.limits[0] == 4
        tasks.cancel_scope.cancel()
    assert receiver.closed


@pytest.mark.parametrize("prefetches", [True, False])
async def test_messages_that_a_step_prepares_for_go_back_at_a_stop_or_are_handled_as_those_in_hand(
    clock: VirtualClock, prefetches: bool
) -> None:
    receiver, handled, expected, answered = Holding(), 0, list[int](), anyio.Event()

    async def expect(arrived: Sequence[Received]) -> None:
        expected.append(len(arrived))
        pump.stop()
        await answered.wait()

    async def handle(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        return DONE

    pump = reading_ahead(receiver, handle, clock, prefetches=prefetches, preload=expect)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        while not expected:
            await anyio.lowlevel.checkpoint()
        if not prefetches:
            answered.set()
    assert (expected, handled, receiver.closed) == ([4], 0 if prefetches else 4, True)


async def test_a_step_prepares_for_no_message_that_comes_alone(clock: VirtualClock) -> None:
    handled = anyio.Event()

    async def expect(arrived: Sequence[Received]) -> None:
        raise AssertionError(arrived)

    async def handle(received: Received) -> StepOutcome:
        handled.set()
        return DONE

    breaker = RepeatedFailures("Receive", "failed", SECOND, lambda text, error: None, NO_METRICS)
    pump = MessagePump(Holding(), handle, 1, clock, breaker, "sales", preload=expect)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await handled.wait()
        pump.stop()


class Suspecting(Holding):
    """Gives out messages of other receivers' dead processes: suspects alone, or among others.

    Args:
        batches: what each call returns: "s" for a suspect, "-" for another message. Then there is nothing.
    """

    def __init__(self, *batches: str) -> None:
        super().__init__()
        self.batches = list(batches)
        self.unended = set[object]()

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        await anyio.lowlevel.checkpoint()
        if not self.batches:
            await anyio.sleep_forever()
        batch = self.batches.pop(0)
        return [
            Received(Envelope("sales", f"{kind}{place}"), 3, object(), 3, is_suspect=kind == "s")
            for place, kind in enumerate(batch)
        ]

    @override
    async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
        await anyio.lowlevel.checkpoint()
        self.unended.remove(received.token)


@pytest.mark.parametrize("prefetches", [True, False])
async def test_a_suspect_is_handled_while_no_other_message_is_in_hand(clock: VirtualClock, prefetches: bool) -> None:
    receiver, beside, handled = Suspecting("---", "s", "-s-s", "--"), list[int](), list[str]()
    ended = anyio.Event()

    async def handle(received: Received) -> StepOutcome:
        if received.is_suspect:
            beside.append(len(receiver.unended))
        receiver.unended.add(received.token)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        handled.append(received.envelope.message_id)
        if len(handled) == 7:
            ended.set()
        return DONE

    pump = reading_ahead(receiver, handle, clock, prefetches=prefetches)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await ended.wait()
        pump.stop()
    assert handled == ["-0", "-1", "-2", "s0", "s1", "-0", "-1"]
    assert beside == [0, 0]
    assert [each.envelope.message_id for each in receiver.back] == ["-0", "-2", "s3"]


class Losing(Holding):
    """Has one message: its claim is lost whenever it was handled, until it has failed.

    Args:
        counts: the queue counts that.
    """

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts, self.lost = counts, 0
        self.there, self.news, self.ends = True, anyio.Event(), list[RecordKind | None]()

    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        while not self.there:
            await self.news.wait()
        self.there = False
        counted = self.lost if self.counts else 0
        return [Received(Envelope("sales", "message"), counted, object(), counted)]

    async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
        if completion.record is RecordKind.HANDLED:
            self.lost += 1
            raise ClaimLost("it is not claimed by this process any more")
        self.ends.append(completion.record)
        self.lost = 0

    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        self.come()
        raise ClaimLost("it is not claimed by this process any more")

    def come(self) -> None:
        self.there = True
        self.news.set()
        self.news = anyio.Event()


@pytest.mark.parametrize("counts", [True, False], ids=["counted by its queue", "counted here"])
@pytest.mark.parametrize("prefetches", [True, False], ids=["ended in batches", "ended alone"])
async def test_a_message_that_loses_its_claim_whenever_it_is_handled_has_failed_in_the_end_and_begins_anew_later(
    clock: VirtualClock, *, prefetches: bool, counts: bool
) -> None:
    receiver, came, recovery = Losing(counts=counts), list[tuple[int, int]](), Deciding()

    async def handle(received: Received) -> StepOutcome:
        came.append((received.failures, received.unanswered))
        return StepOutcome(HANDLED if received.unanswered < 3 else Completion(RecordKind.FAILED), recovery)

    breaker = RepeatedFailures("Receive", "failed", SECOND, lambda text, error: None, NO_METRICS)
    pump = MessagePump(receiver, handle, 4, clock, breaker, "sales", prefetches=prefetches)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await clock.advance(60 * SECOND)
        assert came == [(n, n) for n in range(4)]
        assert receiver.ends == [RecordKind.FAILED]
        assert recovery.asked == [(n, n) for n in range(3)]
        receiver.come()  # from the error queue, by an operator
        await clock.advance(60 * SECOND)
        assert came == [(n, n) for n in range(4)] * 2
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("handled", "seconds", "most"),
    [(0, 1.0, 16), (10, 1.0, 16), (400, 1.0, 20), (500, 0.0625, 400), (10**6, 1.0, 1_000), (10**6, 0.04, 16)],
    ids=["nothing", "slow", "quick", "quicker", "bounded", "too short a look"],
)
def test_what_is_handled_in_a_twentieth_of_a_second_is_received_ahead(handled: int, seconds: float, most: int) -> None:
    reading = Prefetch(16)
    assert reading.limit_at(100.0) == 16
    reading.handled = handled
    assert reading.limit_at(100.0 + seconds) == most


async def test_messages_of_a_batch_that_meets_trouble_wait_once_together_and_one_that_is_to_blame_ends(
    clock: VirtualClock,
) -> None:
    """Each waited by itself, and nothing else was handled meanwhile, though the store was back."""

    class Troubled(Holding):
        async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
            self.limits.append(limit)
            if len(self.limits) > 1:
                await anyio.sleep_forever()
            return [Received(Envelope("sales", str(number)), 0, object()) for number in range(200)]

        async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
            if completion.record is not RecordKind.FAILED:
                raise StoreTroubled("its disk fails")
            ended.append(received.envelope.message_id)

    async def handle(received: Received) -> StepOutcome:
        return StepOutcome(HANDLED, recovery)

    ended, receiver, recovery = list[str](), Troubled(), Deciding(to_blame="7")
    pump = reading_ahead(receiver, handle, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await clock.advance(10 * SECOND)
        assert ended == ["7"]
        assert len(receiver.back) == 199
        tasks.cancel_scope.cancel()


async def test_what_was_received_ahead_goes_back_at_a_stop_although_a_handler_takes_its_time(
    clock: VirtualClock,
) -> None:
    receiver, handled, ends = Holding(), 0, anyio.Event()

    async def handle(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        if handled == 1:
            await ends.wait()
        await anyio.lowlevel.checkpoint()
        return DONE

    pump = reading_ahead(receiver, handle, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        while max(receiver.limits, default=0) < 20:
            await anyio.lowlevel.checkpoint()
        pump.stop()
        begun = handled
        while not receiver.back:
            await receiver.came_back.wait()
        assert handled == begun
        ends.set()
    assert receiver.closed


async def test_what_comes_of_a_receive_that_a_stop_met_is_not_handled(clock: VirtualClock) -> None:
    """Closing the receiver gives it back: handled, it would keep the pump from ending."""
    receives, comes, handled = anyio.Event(), anyio.Event(), list[Received]()

    class Slow(Holding):
        async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
            with anyio.CancelScope(shield=True):
                receives.set()
                await comes.wait()
            self.limits.append(limit)
            return [Received(Envelope("sales", "message"), 0, object()) for _ in range(limit)]

    async def handle(received: Received) -> StepOutcome:
        handled.append(received)
        return DONE

    receiver = Slow()
    pump = reading_ahead(receiver, handle, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await receives.wait()
        pump.stop()
        comes.set()
    assert receiver.closed
    assert receiver.limits
    assert handled == []


async def test_queues_that_were_away_for_long_are_asked_again_within_a_second(clock: VirtualClock) -> None:
    """The breaker, which has tripped, would have it wait for ten; and nobody tells when they are back.

    The first call after an error waits for no message, and so tells that they are.
    """
    waits, is_away = list[bool](), True

    class Away(Holding):
        async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
            if is_away:
                raise TransportUnreachable("away")
            waits.append(wait)
            if wait:
                await anyio.sleep_forever()
            return []

    pump = reading_ahead(Away(), ignore, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await clock.advance(45 * SECOND)
        is_away = False
        await clock.advance(SECOND)
        assert waits == [False, True]
        pump.stop()
