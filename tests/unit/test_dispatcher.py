"""A due message to its destination, or back, or to the error queue (rows 12, 37 to 41, 46, 49, 50, 53, 58)."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import anyio
import pytest

from postdate import Envelope, Headers, LocalTransport, MemoryStore, MemoryTransport, SqliteStore, errors
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.moving import Mover
from postdate.core.due.rate_limits import LimitedWork
from postdate.core.health.message_memory import Release
from postdate.core.limits import change_limits, limit_change
from postdate.core.simple_store import enlisting_store
from postdate.ports import Claim, Outcome, RecordKind, Work
from postdate.testing import Fault, FaultyMovingStore, FaultyTransport

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
DOWN = errors.TransportUnavailable("the destination does not answer")
STORE_DOWN = errors.StoreUnavailable("the store does not answer")


@pytest.fixture
async def bench(make):
    return await make()


@pytest.fixture
def make(make_bench) -> Callable:
    async def make(**settings):
        bench = make_bench(**settings)
        await bench.create_queues("billing", "shipping")
        return bench

    return make


async def test_a_due_message_is_sent_and_removed(bench) -> None:
    await bench.keep(bench.message(due_in=-1, headers={"own": "1"}, body=b"body"))
    assert await bench.look() == 1
    (arrived,) = bench.arrived("billing")
    assert (arrived.message_id, arrived.headers, arrived.body) == ("m-1", {"own": "1"}, b"body")
    assert arrived.due == bench.start - SECOND
    assert await bench.waiting() is None
    assert [record.kind for record in await bench.memory.history("m-1")][-1] is RecordKind.DELIVERED


async def test_nothing_is_sent_at_or_before_its_due_time(bench) -> None:
    await bench.keep(bench.message(due_in=0))
    assert await bench.look() == 0
    await bench.clock.advance(MICROSECOND)
    assert await bench.look() == 1


async def test_a_failing_destination_is_tried_as_often_as_configured_and_then_given_up_row_37(make) -> None:
    bench = await make(number_of_retries=3)
    bench.transport.faults.add(lambda call: DOWN if call.method == "send" and call.number <= 4 else None)
    await bench.keep(bench.message(due_in=-1))
    attempts = list[float]()
    for _ in range(60):
        sends = bench.transport.faults.calls["send"]
        await bench.look()
        attempts += [(bench.clock.now() - bench.start).total_seconds()] * (bench.transport.faults.calls["send"] - sends)
        await bench.clock.advance(SECOND)
    assert attempts == [
        0,
        2,
        5,
        10,
        10,
    ]  # four attempts 1, 2 and 4 s apart (looked at every second), and the error copy
    assert bench.ids("error") == ["m-1"]
    assert bench.ids("billing") == []
    assert await bench.waiting() is None


async def test_a_missing_destination_goes_to_the_error_queue_after_one_attempt_row_38(make) -> None:
    bench = await make(number_of_retries=10)
    await bench.keep(bench.message(due_in=-1, destination="nowhere"))
    await bench.look()
    (copy,) = bench.arrived("error")
    assert copy.headers[Headers.ERROR_CODE] == "queue_not_found"
    assert await bench.waiting() is None


async def test_an_error_copy_has_everything_needed_to_return_it_row_39(bench) -> None:
    await bench.keep(bench.message(due_in=-1, destination="nowhere", headers={"own": "1"}, body=b"body"))
    await bench.look()
    (copy,) = bench.arrived("error")
    assert (copy.message_id, copy.body, copy.expires_at) == ("m-1", b"body", None)
    expected = {
        "own": "1",
        Headers.FAILED_QUEUE: "sales.timeouts",
        Headers.TIMEOUT_DESTINATION: "nowhere",
        Headers.TIMEOUT_EXPIRE: "2026-01-31 12:00:04:000000 Z",
        Headers.TIME_OF_FAILURE: "2026-01-31 12:00:05:000000 Z",
        Headers.PROCESSING_ENDPOINT: "sales",
        Headers.PROCESSING_MACHINE: "machine",
        Headers.EXCEPTION_TYPE: "postdate.errors.QueueNotFound",
    }
    assert {name: copy.headers.get(name) for name in expected} == expected


async def test_while_the_error_queue_is_down_the_message_stays_and_goes_there_later_row_41(bench) -> None:
    await bench.keep(bench.message(due_in=-1, destination="nowhere"))
    bench.transport.faults.add(lambda call: DOWN if call.number % 2 == 0 else None)  # the copy, not the message
    await bench.look()
    assert await bench.waiting() == bench.start - SECOND
    bench.transport.faults.clear()
    await bench.look_for(5 * SECOND)
    assert bench.ids("error") == ["m-1"]
    assert await bench.waiting() is None


async def test_without_an_error_queue_the_message_stays_row_41(bench) -> None:
    del bench.queues.queues["error"]
    await bench.keep(bench.message(due_in=-1, destination="nowhere"))
    await bench.look_for(300 * SECOND)
    assert await bench.waiting() == bench.start - SECOND
    await bench.queues.create_queues(["nowhere"])
    await bench.look_for(62 * SECOND)
    assert bench.ids("nowhere") == ["m-1"]


async def test_what_could_not_be_removed_is_removed_later_and_another_process_sends_it_again_rows_12_50(bench) -> None:
    """At least once, with the same id: the process that sent it remembers that, another one cannot know (ADR 52)."""
    await bench.keep(bench.message(due_in=-1, headers={Headers.MESSAGE_ID: "id"}))
    bench.store.faults.add(Fault("finish", STORE_DOWN))
    await bench.look_for(5 * SECOND)
    assert bench.ids("billing") == ["m-1"]
    await let_claims_go(bench)  # as the end of a process does
    bench.store.faults.clear()
    other = Dispatcher(bench.memory, bench.transport, bench.settings, bench.clock, bench.breaker, bench.failure_rate)
    await other.deliver_due(bench.clock.now())
    assert bench.ids("billing") == ["m-1", "m-1"]
    assert {envelope.headers[Headers.MESSAGE_ID] for envelope in bench.arrived("billing")} == {"id"}
    assert await bench.waiting() is None


async def test_a_message_that_was_removed_meanwhile_is_warned_about_row_53(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.keep(bench.message(due_in=-1))

    class RemovesFirst:
        def __call__(self, call) -> None:
            if call.method == "finish" and not call.done:
                bench.memory._entries.clear()

    bench.store.faults.add(RemovesFirst())
    await bench.look()
    assert bench.ids("billing") == ["m-1"]
    assert [record.message for record in caplog.records] == ["1 messages may have been delivered more than once"]


async def test_a_bad_message_does_not_hold_up_the_others_row_58(make) -> None:
    bench = await make(number_of_retries=1000)

    async def refuse_poison(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        return [DOWN if each.message_id == "poison" else None for each in envelopes]

    bench.queues.send = refuse_poison
    await bench.keep(bench.message("poison", -1), *[bench.message(f"m-{n}", n) for n in range(100)])
    for _ in range(101):
        await bench.look()
        counts = await bench.memory.statistics(bench.clock.now())
        assert counts.overdue == 1
        await bench.clock.advance(SECOND)
    assert (await bench.memory.statistics(bench.start)).pending == 1
    poison = await bench.memory.get("poison")
    assert poison is not None
    assert 5 <= poison.number_of_failures <= 10


async def test_an_expired_message_is_recorded_and_not_sent(bench) -> None:
    await bench.clock.advance(10 * SECOND)
    late, just = bench.start + 9 * SECOND, bench.clock.now()
    await bench.keep(bench.message("late", expires_at=late), bench.message("just", expires_at=just))
    await bench.look()
    assert bench.ids("billing") == ["just"]
    assert [record.kind for record in await bench.memory.history("late")][-1] is RecordKind.EXPIRED


async def let_claims_go(bench) -> None:
    """Claims whose answer was lost are held until their process ends: end it."""
    for entry in bench.memory._entries.values():
        if entry.token is not None:
            entry.attempt_at, entry.token = entry.message.due, None


async def test_what_is_on_its_way_when_its_claim_becomes_void_is_not_sent_again_but_removed(bench) -> None:
    """Found by the fault lab: a part of a batch cannot be removed, and the row locks of all of it are gone."""
    await bench.keep(bench.message(due_in=-1))
    send, arrived = bench.queues.send, anyio.Event()

    async def send_slowly(envelopes: Sequence[Envelope], at: datetime, *, work: Sequence[Work] = ()):
        answers = await send(envelopes, at, work=work)
        await arrived.wait()
        return answers

    bench.queues.send = send_slowly
    async with bench.dispatcher.overlap_batches():
        await bench.look()
        await anyio.wait_all_tasks_blocked()
        await let_claims_go(bench)
        await bench.look_for(2 * SECOND)
        assert bench.ids("billing") == ["m-1"]
        arrived.set()
        await bench.look_for(4 * SECOND)
    assert bench.ids("billing") == ["m-1"]
    assert await bench.waiting() is None


async def test_what_could_not_be_removed_while_nothing_could_be_waits_no_longer_for_that(bench) -> None:
    """Found by the simulator, seed 23045: one more failure, just after others could be removed, cost it a minute."""
    finish, refused = bench.memory.finish, {"m-1", "m-2"}

    async def finish_others(claims: Sequence[Claim], outcome: Outcome, at: datetime, detail: str = "") -> int:
        if refused & {claim.message.message_id for claim in claims}:
            raise STORE_DOWN
        return await finish(claims, outcome, at, detail)

    bench.memory.finish = finish_others
    await bench.keep(bench.message(due_in=-1))
    await bench.look_for(40 * SECOND)
    refused.discard("m-2")
    await bench.keep(bench.message("m-2", due_in=40))
    await bench.look_for(4 * SECOND)
    assert bench.ids("billing") == ["m-1", "m-2"]
    refused.clear()
    await bench.look_for(6 * SECOND)
    assert await bench.waiting() is None
    assert (await bench.memory.statistics(bench.clock.now())).claimed == 0


async def test_when_neither_removing_nor_counting_a_failure_works_for_a_minute_that_is_a_critical_error_row_46(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Few are attempted meanwhile, so it is not their rate that says so; and the log says it a few times, not each."""
    bench.store.faults.add(Fault("finish", KeyError("a bug")))
    bench.store.faults.add(Fault("retry_later", KeyError("a bug")))
    await bench.keep(bench.message("m-1", -1), bench.message("m-2", -1))
    await bench.look_for(55 * SECOND)
    assert bench.critical_errors == []
    await bench.look_for(15 * SECOND)
    assert bench.critical_errors == ["failure handling"]
    await bench.look_for(600 * SECOND)
    assert bench.critical_errors == ["failure handling"]
    assert bench.ids("billing") == ["m-1", "m-2"]
    assert bench.ids("error") == []
    said = [record for record in caplog.records if record.name == "postdate.dispatcher"]
    assert len(said) <= 13


async def test_a_message_with_reserved_headers_reaches_the_error_queue_too(bench) -> None:
    await bench.keep(bench.message(due_in=-1, destination="nowhere", headers={Headers.TIMEOUT_DELAY: "x", "own": "1"}))
    await bench.look()
    (copy,) = bench.arrived("error")
    assert copy.headers["own"] == "1"
    assert Headers.TIMEOUT_DELAY not in copy.headers


async def test_batches_follow_each_other_without_a_pause(bench) -> None:
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(2_100)])
    taken = [await bench.dispatcher.deliver_due(bench.clock.now()) for _ in range(3)]
    assert [(each.count, each.has_more) for each in taken] == [(1_000, True), (1_000, True), (100, False)]
    assert bench.ids("billing") == [f"m-{n}" for n in range(2_100)]


async def test_an_error_queue_that_fails_too_often_is_a_critical_error_row_46(bench) -> None:
    """Upstream only logs it (specification D7)."""
    del bench.queues.queues["error"]
    await bench.keep(*[bench.message(f"m-{n}", -1, "nowhere") for n in range(31)])
    await bench.look()
    assert bench.critical_errors == ["failure handling"]
    assert (await bench.memory.statistics(bench.start)).pending == 31


async def test_a_failure_that_cannot_be_counted_because_the_message_is_gone_is_said_row_23(
    make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make(number_of_retries=5)
    await bench.keep(bench.message(due_in=-1))

    def fail_and_remove(call) -> errors.PostdateError | None:
        if call.method != "send":
            return None
        bench.memory._entries.clear()
        return DOWN

    bench.transport.faults.add(fail_and_remove)
    await bench.look()
    assert "was removed by another while it was being sent" in caplog.text
    assert bench.ids("error") == []


async def test_an_error_copy_has_its_own_failed_queue_whatever_the_message_said_before(bench) -> None:
    headers = {Headers.FAILED_QUEUE: "elsewhere", Headers.EXCEPTION_TYPE: "Old"}
    await bench.keep(bench.message(due_in=-1, destination="nowhere", headers=headers))
    await bench.look()
    (copy,) = bench.arrived("error")
    assert copy.headers[Headers.FAILED_QUEUE] == "sales.timeouts"
    assert copy.headers[Headers.EXCEPTION_TYPE] == "postdate.errors.QueueNotFound"


# --- in one database --------------------------------------------------------------------------------------------------


class OneFile:
    """Store and queues in one SQLite file."""

    def __init__(self, path: Path, bench) -> None:
        self.bench, self.clock = bench, bench.clock
        self.sqlite = SqliteStore(path, synchronous="normal")
        self.local = LocalTransport(path, synchronous="normal")
        self.store, self.transport = FaultyMovingStore(self.sqlite), FaultyTransport(self.local)
        self.dispatcher = Dispatcher(
            self.store, self.transport, bench.settings, bench.clock, bench.breaker, bench.failure_rate
        )
        self.mover = Mover(self.store, self.dispatcher, bench.clock)

    async def lengths(self) -> dict[str, int]:
        return {name: length for name, length in (await self.local.queue_lengths()).items() if length}


@pytest.fixture
async def one_file(make, tmp_path: Path):
    bench = await make(number_of_retries=2)
    one_file = OneFile(tmp_path / "one.db", bench)
    await one_file.local.create_queues(["billing", "error"])
    yield one_file
    await one_file.sqlite.close()
    await one_file.local.close()


async def test_sending_and_removing_are_one_transaction_row_49(one_file: OneFile) -> None:
    assert enlisting_store(one_file.store, one_file.transport) is not None
    await one_file.sqlite.store(one_file.bench.message(due_in=-1), one_file.bench.start)
    claim_due = one_file.sqlite.claim_due

    async def claim_and_lose(now: datetime, limit: int) -> Sequence[Claim]:
        claims = await claim_due(now, limit)
        await one_file.sqlite.finish(claims, Outcome.CANCELLED, now)  # somebody finished it meanwhile
        return claims

    one_file.sqlite.claim_due = claim_and_lose
    await one_file.dispatcher.deliver_due(one_file.clock.now())
    assert await one_file.lengths() == {}


@pytest.mark.parametrize(
    ("cause", "sends", "arrive"),
    [(errors.StoreTroubled("one row"), [3, 1, 1, 1], 2), (errors.StoreUnreachable("no answer"), [3], 0)],
    ids=["of one", "of all"],
)
async def test_what_limits_let_through_goes_in_one_transaction_and_only_what_may_be_of_one_is_tried_one_by_one(
    one_file: OneFile, cause: errors.PostdateError, sends: list[int], arrive: int
) -> None:
    await change_limits(one_file.sqlite, "billing", limit_change(50, ()), one_file.bench.start)
    await one_file.sqlite.store_many([one_file.bench.message(f"m-{n}", -1) for n in range(3)], one_file.bench.start)
    await one_file.clock.advance(SECOND)
    send, tried = one_file.local.send, list[int]()

    async def refuse(envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()):
        tried.append(len(envelopes))
        if "m-1" in {each.message_id for each in envelopes}:
            raise errors.TransportUnreachable("the queues are out of reach") from cause
        return await send(envelopes, now, work=work)

    one_file.local.send = refuse
    work = LimitedWork(one_file.mover, one_file.dispatcher, one_file.sqlite, one_file.clock)
    await work.deliver_due(one_file.clock.now())
    assert tried == sends
    assert (await one_file.lengths()).get("billing", 0) == arrive
    assert (await one_file.sqlite.statistics(one_file.clock.now())).claimed == 0


async def test_a_move_delivers_without_claiming(one_file: OneFile) -> None:
    await one_file.sqlite.store(one_file.bench.message(due_in=-1), one_file.bench.start)
    taken = await one_file.mover.deliver_due(one_file.clock.now())
    assert (taken.count, taken.has_more, taken.next_attempt) == (1, False, None)
    assert one_file.store.faults.calls["claim_due"] == 0
    assert await one_file.lengths() == {"billing": 1}


async def test_a_full_batch_is_followed_by_the_next_at_once_although_some_of_it_has_expired(one_file: OneFile) -> None:
    start = one_file.bench.start
    ends = (None, start - SECOND / 2)
    batch = [one_file.bench.message(f"m-{n}", -1, expires_at=ends[n % 2]) for n in range(1_000)]
    await one_file.sqlite.store_many(batch, start - 2 * SECOND)
    result = await one_file.mover.deliver_due(one_file.clock.now())
    assert (result.count, result.has_more) == (1_000, True)
    assert await one_file.lengths() == {"billing": 500}


async def test_what_has_no_queue_in_the_database_goes_the_ordinary_way_to_the_error_queue_row_38(
    one_file: OneFile,
) -> None:
    batch = [one_file.bench.message(f"m-{n}", -1, "nowhere" if n % 2 else "billing") for n in range(10)]
    await one_file.sqlite.store_many(batch, one_file.bench.start)
    taken = await one_file.mover.deliver_due(one_file.clock.now())
    assert taken.count == 10
    assert await one_file.lengths() == {"billing": 5, "error": 5}
    assert await one_file.sqlite.next_due() is None


async def test_a_move_looks_again_when_the_next_is_due_though_the_dispatcher_waits_for_something_later(
    one_file: OneFile,
) -> None:
    await one_file.sqlite.store(one_file.bench.message(due_in=0.01), one_file.bench.start)
    one_file.dispatcher.finisher.release_later([Release(Claim(one_file.bench.message("m-2"), None), None)])
    one_file.dispatcher.finisher.unwritten_outcomes["m-2"].retry_at = one_file.clock.monotonic() + 60
    one_file.dispatcher.finisher.free_capacity = lambda limit: 0
    taken = await one_file.mover.deliver_due(one_file.clock.now())
    assert taken.next_attempt == one_file.bench.start + timedelta(seconds=0.01)


async def test_a_failed_move_moves_nothing_and_the_next_one_everything(one_file: OneFile) -> None:
    await one_file.sqlite.store(one_file.bench.message(due_in=-1), one_file.bench.start)
    one_file.store.faults.add(Fault("move_due", STORE_DOWN, calls=[1]))
    with pytest.raises(errors.StoreUnavailable):
        await one_file.mover.deliver_due(one_file.clock.now())
    assert await one_file.lengths() == {}
    await one_file.mover.deliver_due(one_file.clock.now())
    assert await one_file.lengths() == {"billing": 1}


def test_queues_elsewhere_share_no_transaction() -> None:
    assert enlisting_store(MemoryStore(), MemoryTransport()) is None


def test_errors_of_the_tree_know_whether_they_pass() -> None:
    assert errors.TransportUnavailable.transient
    assert not errors.QueueNotFound.transient
    assert issubclass(errors.QueueNotFound, errors.PostdateError)
