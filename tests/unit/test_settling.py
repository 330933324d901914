"""Messages of a queue that is read ahead are handled by workers and ended behind them, in batches. ADR 0026."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from tests.waiting import until

from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.receive.outcomes import REQUEUE, Recovery, StepFailure, StepOutcome
from postdate.core.receive.pump import MessagePump
from postdate.core.receive.settling import AT_ONCE, IN_FLIGHT, LARGEST_BATCH
from postdate.core.recoverability import RecoveryRules, Resolution
from postdate.errors import ClaimLost, MessageTooLarge, PostdateError, TransportUnreachable
from postdate.messages import Envelope
from postdate.ports import HANDLED, Completion, Received, Receiver, Settlement
from postdate.runtime.reporting import NO_METRICS, CountedMetrics
from postdate.testing import VirtualClock

DONE = StepOutcome(HANDLED)


class Queue(Receiver):
    """So many messages; notes how each ends. What ends in batches waits until it may."""

    def __init__(self, count: int) -> None:
        self.ready = [Received(Envelope("sales", f"{n}"), 0, object()) for n in range(count)]
        self.batches, self.ended, self.back = list[list[str]](), list[str](), list[str]()
        self.may_end = anyio.Event()
        self.fails: Mapping[str, Exception] = {}
        self.settling = self.settling_at_most = 0
        self.closed = False

    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        if not self.ready:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        found, self.ready = self.ready[:limit], self.ready[limit:]
        return found

    async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
        self.ended.append(received.envelope.message_id)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Exception | None]:
        ids = [each.received.envelope.message_id for each in settlements]
        self.batches.append(ids)
        self.settling += 1
        self.settling_at_most = max(self.settling, self.settling_at_most)
        await self.may_end.wait()
        await anyio.lowlevel.checkpoint()
        self.settling -= 1
        errors = [self.fails.get(id_) for id_ in ids]
        self.ended += [id_ for id_, error in zip(ids, errors, strict=True) if error is None]
        return errors

    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        self.back.append(received.envelope.message_id)

    async def close(self) -> None:
        self.closed = True


def reading(queue: Queue, step: Callable[[Received], Awaitable[StepOutcome]], clock: VirtualClock) -> MessagePump:
    """Return a pump for four messages at once."""
    breaker = RepeatedFailures("Receive", "failed", timedelta(seconds=1), lambda text, error: None, NO_METRICS)
    return MessagePump(queue, step, 4, clock, breaker, "sales", prefetches=True)


async def handle_all(queue: Queue, pump: MessagePump, handled: Callable[[], bool]) -> None:
    """Run the pump until a condition holds; then let all end, and stop."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await until(handled)
        queue.may_end.set()
        pump.stop()
    assert queue.closed


async def test_handlers_go_on_while_ends_are_under_way_and_these_share_batches(clock: VirtualClock) -> None:
    queue, handled = Queue(700), list[str]()

    async def step(received: Received) -> StepOutcome:
        handled.append(received.envelope.message_id)
        return DONE

    await handle_all(queue, reading(queue, step, clock), lambda: len(handled) == 700)
    assert sorted(queue.ended) == sorted(handled) == sorted(f"{n}" for n in range(700))
    assert queue.settling_at_most == IN_FLIGHT
    assert max(map(len, queue.batches)) > 100
    assert not queue.back


async def test_no_more_handlers_run_than_there_is_concurrency(clock: VirtualClock) -> None:
    queue, running, most, go = Queue(40), 0, 0, anyio.Event()
    queue.may_end.set()

    async def step(received: Received) -> StepOutcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        await anyio.lowlevel.checkpoint()
        running -= 1
        return DONE

    pump = reading(queue, step, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await until(lambda: running == 4)
        go.set()
        await until(lambda: len(queue.ended) == 40)
        pump.stop()
    assert most == 4


async def test_a_refused_end_is_decided_anew_and_spoils_no_other(clock: VirtualClock) -> None:
    queue, asked = Queue(10), list[str]()
    queue.fails = {"3": MessageTooLarge("too large"), "4": ClaimLost("lost"), "5": TransportUnreachable("away")}

    class Noting(Recovery):
        def resolve(self, received: Received, failure: StepFailure | None, error: PostdateError) -> Resolution:
            asked.append(f"{received.envelope.message_id}: {error.code}")
            return Recovery.resolve(self, received, failure, error)

        def decide(self, received: Received, outcome: StepOutcome | None, error: Exception) -> StepOutcome:
            return StepOutcome(Completion(detail="to the error queue"))

        def move_to_error(self, received: Received, failure: StepFailure, *, brief: bool) -> StepOutcome:
            raise AssertionError("no end was refused twice")

    recovery = Noting(rules=RecoveryRules(), metrics=CountedMetrics())

    async def step(received: Received) -> StepOutcome:
        return StepOutcome(HANDLED, recovery)

    pump = reading(queue, step, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        queue.may_end.set()
        await until(lambda: len(queue.ended) == 8)
        await clock.advance(timedelta(seconds=5))
        pump.stop()
    assert asked == ["3: message_too_large", "4: claim_lost", "5: transport_unreachable"]
    assert sorted(queue.ended) == ["0", "1", "2", "3", "6", "7", "8", "9"]
    assert sorted(queue.back) == ["4", "5"]  # giving back what is lost has no effect


async def test_a_queue_that_cancels_what_it_is_asked_for_is_out_of_reach_and_no_more(clock: VirtualClock) -> None:
    queue, settle = Queue(30), Queue.settle
    queue.may_end.set()

    async def cancelled_once(settlements: Sequence[Settlement]) -> Sequence[Exception | None]:
        queue.settle = partial(settle, queue)
        raise asyncio.CancelledError

    async def step(received: Received) -> StepOutcome:
        return DONE

    queue.settle = cancelled_once
    pump = reading(queue, step, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await until(lambda: queue.ended)
        await clock.advance(timedelta(seconds=2))
        pump.stop()
    assert len(queue.ended) + len(queue.back) == 30
    assert queue.ended
    assert queue.back


class OneByOne(Queue):
    """A queue whose messages end one by one."""

    async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
        await anyio.lowlevel.checkpoint()
        if received.envelope.message_id == "3":
            raise asyncio.CancelledError
        if received.envelope.message_id == "4":
            raise ClaimLost("lost")
        self.ended.append(received.envelope.message_id)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Exception | None]:
        return await Receiver.settle(self, settlements)


async def test_what_ends_one_by_one_does_so_whatever_happens_to_others(clock: VirtualClock) -> None:
    queue = OneByOne(10)
    errors = await queue.settle([Settlement(each, clock.now(), HANDLED) for each in queue.ready])
    assert [type(error).__name__ for error in errors if error is not None] == ["TransportUnreachable", "ClaimLost"]
    assert sorted(queue.ended) == ["0", "1", "2", "5", "6", "7", "8", "9"]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await queue.settle([Settlement(each, clock.now(), HANDLED) for each in queue.ready])
        raise AssertionError("whoever is cancelled goes on")


async def test_what_was_handled_ends_though_its_pump_is_cancelled(clock: VirtualClock) -> None:
    queue, handled = Queue(30), 0

    async def step(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        if handled > 20:
            await anyio.sleep_forever()
        return DONE

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reading(queue, step, clock).run)
        await until(lambda: handled == 24)
        queue.may_end.set()
        tasks.cancel_scope.cancel()
    assert len(queue.ended) == 20
    assert queue.closed


async def test_a_message_that_goes_back_is_in_no_batch(clock: VirtualClock) -> None:
    queue, handled = Queue(3), 0

    async def step(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        return REQUEUE if received.envelope.message_id == "0" else DONE

    await handle_all(queue, reading(queue, step, clock), lambda: handled == 3)
    assert (queue.back, sorted(queue.ended)) == (["0"], ["1", "2"])


async def test_what_is_to_be_done_afterwards_is_done_when_the_message_has_ended(clock: VirtualClock) -> None:
    queue, seen = Queue(20), list[bool]()

    async def afterwards(id_: str) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(id_ in queue.ended)

    async def step(received: Received) -> StepOutcome:
        return StepOutcome(HANDLED, on_completed=[partial(afterwards, received.envelope.message_id)])

    pump = reading(queue, step, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        queue.may_end.set()
        await until(lambda: len(queue.ended) == 20)
        pump.stop()
    assert seen == [True] * 20


@pytest.mark.parametrize(
    ("bytes_each", "most"), [(1, AT_ONCE), (LARGEST_BATCH // 2, 2), (LARGEST_BATCH + 1, 1)], ids=["few", "half", "more"]
)
async def test_a_batch_has_so_many_messages_and_sends_so_many_bytes_at_most(
    clock: VirtualClock, bytes_each: int, most: int
) -> None:
    count = min(3 * most + 1, 1_200)
    queue, handled, body = Queue(count), 0, bytes(bytes_each)

    async def step(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        return StepOutcome(Completion(outgoing=[Envelope("out", "sent", body=body)]))

    await handle_all(queue, reading(queue, step, clock), lambda: handled == count)
    assert max(map(len, queue.batches)) == most
    assert len(queue.ended) == count


async def test_an_outage_is_waited_for_once_by_all_that_ended_in_it(clock: VirtualClock) -> None:
    queue, handled = Queue(600), 0
    queue.fails = {f"{n}": TransportUnreachable("away") for n in range(600)}

    async def step(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        return DONE

    pump = reading(queue, step, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await until(lambda: handled == 600)
        queue.may_end.set()
        await clock.advance(timedelta(seconds=4))  # a second a batch, of which several are told at once
        assert sorted(queue.back) == sorted(f"{n}" for n in range(600))
        pump.stop()


async def test_what_a_batch_stores_counts_as_what_it_sends(clock: VirtualClock) -> None:
    """Five hundred messages on their way to the store would be one transaction, however large they are."""
    queue, handled = Queue(0), 0
    queue.ready = [Received(Envelope("in", f"{n}", body=bytes(LARGEST_BATCH // 2)), 0, object()) for n in range(7)]

    async def step(received: Received) -> StepOutcome:
        nonlocal handled
        handled += 1
        return StepOutcome(Completion(work=[lambda transaction: None]))

    await handle_all(queue, reading(queue, step, clock), lambda: handled == 7)
    assert max(map(len, queue.batches)) == 2
    assert len(queue.ended) == 7
