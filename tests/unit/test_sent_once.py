"""What was sent is from then on only removed, whatever the store says to that (specification 1.8; ADR 0052)."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import anyio
import pytest

from postdate import DelayedMessage
from postdate.core.due.poller import Poller, PollResult
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.health.message_memory import MOST_MESSAGES
from postdate.errors import StoreUnavailable, StoreUnreachable, TransportUnavailable, TransportUnreachable
from postdate.ports import Claim, RecordKind
from postdate.testing import Call, Fault

SECOND = timedelta(seconds=1)
LOCKED = StoreUnavailable("canceling statement due to lock timeout")
NACK = TransportUnavailable("nack")


@pytest.fixture
async def bench(make_bench):
    bench = make_bench(number_of_retries=1_000)
    await bench.create_queues("billing", "shipping")
    return bench


def free(bench) -> None:
    """End all claims, as the end of a connection does that held them."""
    for entry in bench.memory._entries.values():
        if entry.token is not None:
            entry.attempt_at, entry.token = entry.claimed_from, None


class LosesClaims:
    """A store whose claims are row locks: a call that fails ends them, and the messages are given out again."""

    def __init__(self, bench, *methods: str) -> None:
        self.bench, self.methods = bench, methods

    def __call__(self, call: Call) -> StoreUnavailable | None:
        if call.method not in self.methods or call.done:
            return None
        free(self.bench)
        return LOCKED


@pytest.mark.parametrize("loses_claims", [False, True], ids=["claims stay", "claims are lost"])
async def test_while_removing_fails_for_ten_minutes_each_is_sent_once(bench, loses_claims: bool) -> None:
    """Somebody builds an index, and the role has a time limit for locks: 20 messages were sent a thousand times."""
    bench.store.faults.add(LosesClaims(bench, "finish") if loses_claims else Fault("finish", LOCKED))
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(20)])
    await bench.look_for(600 * SECOND)
    assert sorted(bench.ids("billing")) == sorted(f"m-{n}" for n in range(20))
    assert bench.store.faults.calls["finish"] < 5 * 300
    assert bench.store.faults.calls["retry_later"] == 0
    bench.store.faults.clear()
    await bench.look_for(6 * SECOND)
    assert await bench.waiting() is None
    assert len(bench.ids("billing")) == 20
    assert not [
        each for n in range(20) for each in await bench.memory.history(f"m-{n}") if each.kind is RecordKind.RETRIED
    ]


@pytest.mark.parametrize("loses_claims", [False, True], ids=["claims stay", "claims are lost"])
async def test_while_nothing_can_be_removed_little_more_is_sent_and_all_of_it_once_after(
    bench, loses_claims: bool
) -> None:
    """What has been sent and not removed is sent again should this process end: so it is not to be much."""
    bench.store.faults.add(LosesClaims(bench, "finish") if loses_claims else Fault("finish", LOCKED))
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(5_000)])
    await bench.look_for(20 * SECOND)
    assert 1_000 <= len(bench.ids("billing")) <= 1_000 + 20 * 16
    bench.store.faults.clear()
    await bench.look_for(10 * SECOND)
    assert sorted(bench.ids("billing")) == sorted(f"m-{n}" for n in range(5_000))
    assert await bench.waiting() is None


async def test_one_that_can_never_be_removed_holds_up_none_of_the_others(bench) -> None:
    finish = bench.memory.finish

    async def not_poison(claims: Sequence[Claim], *args, **more) -> int:
        if any(claim.message.message_id == "poison" for claim in claims):
            raise LOCKED
        return await finish(claims, *args, **more)

    bench.memory.finish = not_poison
    await bench.keep(*[bench.message(f"m-{n}", -2) for n in range(500)], bench.message("poison", -1))
    await bench.look_for(10 * SECOND)
    assert list(bench.memory._entries) == ["poison"]
    for number in range(60):
        await bench.keep(bench.message(f"later-{number}", -1))
        await bench.look_for(3 * SECOND)
    assert list(bench.memory._entries) == ["poison"]
    assert bench.ids("billing").count("poison") == 1


async def test_a_claim_that_was_lost_while_sending_and_comes_again_is_removed_and_not_sent(bench) -> None:
    bench.transport.faults.add(lambda call: free(bench) if call.method == "send" and call.done else None)
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(3)])
    await bench.look_for(3 * SECOND)
    assert bench.ids("billing") == ["m-0", "m-1", "m-2"]
    assert await bench.waiting() is None


async def test_an_id_that_was_used_again_for_another_message_is_sent(bench) -> None:
    bench.store.faults.add(Fault("finish", StoreUnreachable("connection lost"), calls=[1]))
    await bench.keep(bench.message("m-1", -1, body=b"first"))
    await bench.look()
    bench.memory._entries.clear()
    other: DelayedMessage = bench.message("m-1", -1, body=b"second")
    bench.memory._known_ids.discard("m-1")
    await bench.keep(other)
    await bench.look_for(5 * SECOND)
    assert [each.body for each in bench.arrived("billing")] == [b"first", b"second"]
    assert await bench.waiting() is None


@pytest.mark.parametrize("loses_claims", [False, True], ids=["claims stay", "claims are lost"])
async def test_a_failure_that_cannot_be_written_waits_all_the_same(bench, loses_claims: bool) -> None:
    bench.transport.faults.add(Fault("send", NACK))
    bench.store.faults.add(LosesClaims(bench, "retry_later") if loses_claims else Fault("retry_later", LOCKED))
    await bench.keep(bench.message(due_in=-1))
    for _ in range(600):
        await bench.look()
        await bench.look()
        await bench.clock.advance(SECOND / 10)
    assert bench.transport.faults.calls["send"] <= 60
    bench.store.faults.clear()
    bench.transport.faults.clear()
    await bench.look_for(5 * SECOND)
    assert bench.ids("billing") == ["m-1"]


async def test_an_error_copy_whose_message_cannot_be_removed_leaves_once(bench) -> None:
    bench.store.faults.add(LosesClaims(bench, "finish"))
    await bench.keep(bench.message(due_in=-1, destination="nowhere"))
    await bench.look_for(120 * SECOND)
    assert bench.ids("error") == ["m-1"]
    bench.store.faults.clear()
    await bench.look_for(5 * SECOND)
    assert bench.ids("error") == ["m-1"]
    assert await bench.waiting() is None


async def test_what_expired_and_cannot_be_removed_is_not_tried_at_every_look(bench) -> None:
    await bench.keep(bench.message(expires_at=bench.start))
    await bench.clock.advance(SECOND)
    bench.store.faults.add(LosesClaims(bench, "finish"))
    for _ in range(100):
        await bench.look()
    assert bench.store.faults.calls["finish"] <= 2
    bench.store.faults.clear()
    await bench.look_for(5 * SECOND)
    assert await bench.waiting() is None


async def test_what_is_remembered_is_bounded_and_does_not_keep_others_from_being_claimed(bench) -> None:
    """Claims that were all lost: others may have the messages, and never give them to us."""
    claims = [Claim(bench.message(f"gone-{n}", -1), n) for n in range(MOST_MESSAGES * 2)]
    bench.dispatcher.finisher.remember_sent(claims)
    assert MOST_MESSAGES <= len(bench.dispatcher._memory) <= MOST_MESSAGES * 1.1
    await bench.keep(bench.message(due_in=-1))
    await bench.look()
    assert bench.ids("billing") == ["m-1"]


async def test_what_was_lost_while_it_was_sent_is_nothing_still_to_be_written_and_is_forgotten_in_time(bench) -> None:
    """One of a batch was cancelled: all of it was walked three times a look, and woke the poller, for good."""
    bench.transport.faults.add(lambda call: bench.memory._entries.pop("m-1", None) and None)
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(1_000)])
    await bench.look_for(SECOND)
    assert not bench.dispatcher.finisher.unwritten_outcomes
    assert len(bench.dispatcher._memory) == 1_000
    await bench.clock.advance(700 * SECOND)
    await bench.keep(bench.message("later", 0))
    await bench.look_for(SECOND)
    assert not bench.dispatcher._memory


async def test_nothing_is_looked_for_in_a_hurry_while_nothing_can_be_written(bench) -> None:
    """What is left to be written was taken by others meanwhile: there is nothing to find out by."""
    bench.store.faults.add(LosesClaims(bench, "finish"))
    await bench.keep(bench.message(due_in=-1))
    await bench.look()
    bench.memory._entries.clear()
    now, looks = bench.clock.now(), 0
    while bench.clock.now() < now + 60 * SECOND:
        taken = await bench.dispatcher.deliver_due(bench.clock.now())
        looks += 1
        ahead = datetime.max.replace(tzinfo=now.tzinfo) if taken.next_attempt is None else taken.next_attempt
        await bench.clock.advance(max(min(ahead - bench.clock.now(), 60 * SECOND), timedelta(microseconds=1)))
    assert looks < 200
    bench.store.faults.clear()
    await bench.keep(replace(bench.message("m-2", -1)))
    await bench.look_for(3 * SECOND)
    assert bench.ids("billing") == ["m-1", "m-2"]


async def test_nothing_is_looked_for_in_a_hurry_while_nothing_can_be_written_nor_sent(bench) -> None:
    """Whether the store takes anything is found out by claiming, and nothing is claimed for a broker away."""
    bench.store.faults.add(Fault("finish", LOCKED))
    await bench.keep(*[bench.message(f"m-{n}", -1) for n in range(5)])
    await bench.look()
    bench.transport.faults.add(Fault("send", TransportUnreachable("away")))
    await bench.keep(*[bench.message(f"later-{n}", 0.5) for n in range(5)])
    take, looks = bench.dispatcher.deliver_due, 0

    async def count(now: datetime, limit: int = 1_000) -> PollResult:
        nonlocal looks
        looks += 1
        return await take(now, limit)

    bench.dispatcher.deliver_due = count
    poller = Poller(bench.dispatcher, bench.clock, RepeatedFailures("fetch", "fetch", 30 * SECOND, bench.note_critical))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)
        for _ in range(30_000):
            await bench.clock.advance(SECOND / 1_000)
            if looks > 200:
                break
        poller.stop()
    assert looks <= 200
