"""A timeout manager with its storage and its queues in one SQLite file: one transaction each step (specification 4).

Deaths are failures before a transaction commits and after it has: what a process that ends there leaves behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from postdate import Endpoint, Envelope, Headers, LocalTransport, TimeoutManager, TransactionMode
from postdate.backends.sqlite.timeouts import SqliteTimeouts
from postdate.core.timeout_manager.steps import timeout_of
from postdate.errors import TransportUnavailable
from postdate.messages import format_timestamp
from postdate.ports import Transport, Work
from postdate.ports.timeouts import Timeout
from postdate.testing import Fault, FaultyTransport, VirtualClock
from postdate.testing.faults import Call

SECOND = timedelta(seconds=1)
TIMEOUTS, DISPATCHER = "sales.Timeouts", "sales.TimeoutsDispatcher"


class DyingTimeouts(SqliteTimeouts):
    """Its work in the transactions of the queues raises when ``dies`` says so; it counts how often it was asked."""

    dies: Callable[[str, int], bool] = staticmethod(lambda method, number: False)

    def __init__(self, path: Path) -> None:
        super().__init__(path, synchronous="normal")
        self.calls: Counter[str] = Counter()

    def _dying(self, method: str, work: Work) -> Work:
        self.calls[method] += 1
        if not self.dies(method, self.calls[method]):
            return work

        def die(transaction: Any) -> None:
            work(transaction)
            raise RuntimeError("killed")

        return die

    def adding_work(self, timeout: Timeout) -> Work:
        return self._dying("adding", super().adding_work(timeout))

    def removing_work(self, timeout_id: str) -> Work:
        return self._dying("removing", super().removing_work(timeout_id))


class Place:
    """One file, and endpoints on it."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, VirtualClock()
        self.start = self.clock.now()
        self.timeouts = DyingTimeouts(path)
        self.local = LocalTransport(path, synchronous="normal")
        self.transport = FaultyTransport(self.local)

    def endpoint(
        self, timeouts: SqliteTimeouts | None = None, transport: Transport | None = None, **settings: Any
    ) -> Endpoint:
        settings.setdefault("transaction_mode", "transaction_scope")
        return Endpoint(
            "sales",
            transport=transport or self.transport,
            timeout_manager=TimeoutManager(timeouts or self.timeouts),
            clock=self.clock,
            **settings,
        )

    async def defer(self, *due_in: float) -> list[str]:
        """Have messages to ``billing`` delayed, as any endpoint does; return their ids."""
        await self.local.create_queues(["billing", TIMEOUTS])
        deferred = [
            Envelope(
                TIMEOUTS,
                f"m-{number}",
                {
                    Headers.EXPIRE: format_timestamp(self.start + seconds * SECOND),
                    Headers.ROUTE_EXPIRED_TIMEOUT_TO: "billing",
                },
            )
            for number, seconds in enumerate(due_in)
        ]
        assert set(await self.local.send(deferred, self.clock.now())) == {None}
        return [each.message_id for each in deferred]

    async def arrived(self, queue: str = "billing") -> list[Envelope]:
        """Take all messages out of a queue."""
        receiver = self.local.receiver(queue)
        length = (await self.local.queue_lengths())[queue]
        found = list(await receiver.receive(length)) if length else []
        for each in found:
            await receiver.commit(each, self.clock.now())
        await receiver.close()
        return [each.envelope for each in found]

    async def arrived_ids(self) -> list[str]:
        return sorted(each.headers[Headers.MESSAGE_ID] for each in await self.arrived())

    async def stored(self) -> int:
        far = self.start + timedelta(days=10_000)
        return len((await self.timeouts.next_chunk(self.start - timedelta(days=10_000), far, 10_000)).due)

    async def close(self) -> None:
        await self.timeouts.close()
        await self.local.close()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    place = Place(tmp_path / "all.db")
    yield place
    await place.close()


@pytest.mark.parametrize("mode", TransactionMode, ids=lambda mode: mode.value)
async def test_row_105_and_51_every_message_arrives_in_every_mode_also_over_a_restart(
    place: Place, mode: TransactionMode
) -> None:
    ids = await place.defer(*[2 + number / 10 for number in range(100)])
    async with place.endpoint(transaction_mode=mode):
        await place.clock.advance(7 * SECOND)
    before = await place.arrived_ids()
    assert 0 < len(before) < 100
    place.clock.step(timedelta(days=400))
    async with place.endpoint(transaction_mode=mode):
        await place.clock.advance(SECOND)
        assert sorted(before + await place.arrived_ids()) == sorted(ids)
        assert await place.stored() == 0


async def test_row_100_in_scope_each_message_arrives_exactly_once_wherever_a_process_dies(place: Place) -> None:
    place.timeouts.dies = lambda method, number: number % 4 == 1
    endings: Counter[bool] = Counter()

    def dies(call: Call) -> Exception | None:
        if call.method != "commit" or call.number % (7 if call.done else 5):
            return None
        endings[call.done] += 1
        return TransportUnavailable("killed")

    place.transport.faults.add(dies)
    ids = await place.defer(*[2 + number / 50 for number in range(60)])
    for _ in range(20):
        async with place.endpoint():  # each time another process
            await place.clock.advance(SECOND)
    place.transport.faults.clear()
    place.timeouts.dies = lambda method, number: False
    async with place.endpoint():
        for copy in await place.arrived("error"):  # of what has died five times
            returned = Envelope(copy.headers[Headers.FAILED_QUEUE], copy.message_id, copy.headers, copy.body)
            await place.local.send([returned], place.clock.now())
        await place.clock.advance(10 * SECOND)
        assert await place.stored() == 0
        assert await place.arrived("error") == []
    assert await place.arrived_ids() == sorted(ids)
    assert min(endings[True], endings[False], place.timeouts.calls["adding"], place.timeouts.calls["removing"]) > 5


async def test_row_100_in_scope_a_failing_removal_sends_nothing(place: Place) -> None:
    place.timeouts.dies = lambda method, number: method == "removing"
    await place.defer(2)
    async with place.endpoint():
        await place.clock.advance(60 * SECOND)
        assert place.timeouts.calls["removing"] == 5  # row 101
        assert await place.arrived() == []
        (copy,) = await place.arrived("error")
        assert copy.headers[Headers.FAILED_QUEUE] == DISPATCHER
        assert await place.stored() == 1
        place.timeouts.dies = lambda method, number: False
        await place.local.send([Envelope(DISPATCHER, copy.message_id, copy.headers)], place.clock.now())
        await place.clock.run_until_idle()
        assert await place.arrived_ids() == ["m-0"]
        assert await place.stored() == 0


async def test_row_99_in_scope_a_timeout_that_others_removed_meanwhile_is_not_sent(place: Place) -> None:
    """Between the look at it and the transaction, somebody else removes it: their send counts, not this one."""
    await place.defer(2)

    class RemovedMeanwhile(DyingTimeouts):
        async def peek(self, timeout_id: str) -> Timeout | None:
            found = await super().peek(timeout_id)
            await self.try_remove(timeout_id)
            return found

    timeouts = RemovedMeanwhile(place.path)
    async with place.endpoint(timeouts):
        await place.clock.advance(10 * SECOND)
        assert timeouts.calls["removing"] == 1  # and then it was gone, which is success
        assert await place.arrived() == await place.arrived("error") == []
        assert (await place.local.queue_lengths())[DISPATCHER] == 0
    await timeouts.close()


async def test_row_92_in_scope_storing_is_part_of_the_transaction_that_takes_the_message(place: Place) -> None:
    place.transport.faults.add(Fault("commit", TransportUnavailable("killed"), calls=[1]))
    place.transport.faults.add(Fault("commit", TransportUnavailable("killed"), calls=[2], after=True))
    await place.defer(600)
    async with place.endpoint():
        await place.clock.run_until_idle()
        assert await place.stored() == 0
        await place.clock.advance(20 * SECOND)
        assert await place.stored() == 1
        assert (await place.local.queue_lengths())[TIMEOUTS] == 0
        assert await place.arrived("error") == []


async def test_row_100_several_processes_on_one_file_deliver_each_message_once_in_scope(place: Place) -> None:
    others = [DyingTimeouts(place.path), DyingTimeouts(place.path)]
    ids = await place.defer(*[2 + number / 100 for number in range(100)])
    async with place.endpoint(), place.endpoint(others[0]), place.endpoint(others[1]):
        await place.clock.advance(20 * SECOND)
        assert await place.arrived_ids() == sorted(ids)
        assert await place.arrived("error") == []
        assert await place.stored() == 0
    for each in others:
        await each.close()


async def test_row_98_a_timeout_committed_late_by_another_process_fires_without_a_restart(place: Place) -> None:
    await place.defer(30)
    async with place.endpoint():
        await place.clock.advance(31 * SECOND)
        assert await place.arrived_ids() == ["m-0"]
        headers = {
            Headers.EXPIRE: format_timestamp(place.start + 20 * SECOND),
            Headers.ROUTE_EXPIRED_TIMEOUT_TO: "billing",
        }
        elsewhere = SqliteTimeouts(place.path, synchronous="normal")
        await elsewhere.initialize("sales")
        await elsewhere.add(timeout_of(Envelope(TIMEOUTS, "late", headers), "sales"))
        await elsewhere.close()
        await place.clock.advance(5 * SECOND)
        assert await place.arrived_ids() == ["late"]
