"""Checks of batches of due messages: claims, releases, void claims, and wake-ups for messages that are due earlier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime

import anyio

from postdate.ports import ClaimingStore, MovingStore, Outcome, Transport
from postdate.runtime.threads import WakeUp
from postdate.testing.conformance import Topic, expect, expect_equal, expect_in_time
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    SECOND,
    StoreSubject,
    claim_one,
    claiming_store_of,
    expect_history,
    ids,
    message,
    open_beside_queues,
    open_claiming,
    store_and_claim_one,
    use_store,
)

_QUERIES = 12
"""Number of queries during which a message is stored. A store that can miss the message does so in some of them."""

claims: Topic[StoreSubject] = Topic("claims")


@claims.with_fixture(open_claiming)
async def oldest_first_up_to_the_limit(store: ClaimingStore) -> None:
    """A batch holds the oldest due messages in the order of their due times, as many as asked for."""
    await store.store_many([message(f"{offset}", NOW + offset * SECOND) for offset in (5, 1, 4, 2, 3)], NOW)
    late = NOW + 10 * SECOND
    batches = [ids(await store.claim_due(late, 2)) for _ in range(4)]
    expect_equal(batches, [["1", "2"], ["3", "4"], ["5"], []], "batches of two")


@claims.with_fixture(open_claiming)
async def due_is_compared_strictly(store: ClaimingStore) -> None:
    """Nothing is claimed at or before its due time, not even by a microsecond."""
    await store.store_many([message("now", NOW), message("later", NOW + MICROSECOND)], NOW)
    expect_equal(ids(await store.claim_due(NOW, 10)), [], "claims at the due time")
    if store.capabilities.time_precision == MICROSECOND:
        expect_equal(ids(await store.claim_due(NOW + MICROSECOND, 10)), ["now"], "claims 1 us later")


@claims.with_fixture(open_claiming)
async def a_claimed_message_is_hidden(store: ClaimingStore) -> None:
    """A claimed message cannot be claimed or fetched again, however late it gets."""
    await store_and_claim_one(store)
    expect_equal(ids(await store.claim_due(NOW + 10_000 * SECOND, 10)), [], "claims of a claimed message")
    expect(await store.fetch_next_due(NOW + 10_000 * SECOND) is None, "a claimed message is not fetched")


@claims.with_fixture(open_claiming)
async def tasks_claim_each_message_once(store: ClaimingStore) -> None:
    """Ten tasks that claim at once get every message, each of them once (row 56, within a process)."""
    await store.store_many([message(f"m-{number}") for number in range(100)], NOW)
    claimed: Counter[str] = Counter()

    async def claim() -> None:
        while (batch := await store.claim_due(NOW + SECOND, 7)) and claimed.total() <= 100:
            claimed.update(ids(batch))

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(claim)
    expect_equal(claimed, Counter(f"m-{number}" for number in range(100)), "claims")


@claims.with_fixture(open_claiming)
async def finish_removes(store: ClaimingStore) -> None:
    """Finished messages are gone; finish says how many were still held."""
    await store.store_many([message("a"), message("b"), message("c", NOW + 100 * SECOND)], NOW)
    claimed = await store.claim_due(NOW + SECOND, 10)
    expect_equal(await store.finish(claimed, Outcome.DELIVERED, NOW), 2, "finished")
    expect_equal(await store.finish(claimed, Outcome.DELIVERED, NOW), 0, "finished a second time")
    expect_equal(await store.next_due(), NOW + 100 * SECOND, "next due")
    expect_equal(ids(await store.claim_due(NOW + 10 * SECOND, 10)), [], "claims after finish")


@claims.with_fixture(open_claiming)
async def retry_later_waits(store: ClaimingStore) -> None:
    """A failed message is given back with its failure counted, and cannot be claimed before the time given."""
    claim = await store_and_claim_one(store)
    attempt_at = NOW + 60 * SECOND
    expect(await store.retry_later(claim, attempt_at, NOW + SECOND, "why"), "giving back a held message is true")
    expect_equal(ids(await store.claim_due(attempt_at, 10)), [], "claims at the time of the next attempt")
    again = await claim_one(store, attempt_at + MICROSECOND)
    expect_equal(again.message.number_of_failures, 1, "number of failures")
    expect_equal(again.message.due, NOW, "the due time stays what it was")


@claims.with_fixture(open_claiming)
async def failures_add_up(store: ClaimingStore) -> None:
    """Every failure counts: after three the count is three."""
    await store.store(message(), NOW)
    for _ in range(3):
        await store.retry_later(await claim_one(store), NOW, NOW, "why")
    expect_equal((await claim_one(store)).message.number_of_failures, 3, "number of failures")


@claims.with_fixture(open_claiming)
async def a_finished_claim_cannot_be_given_back(store: ClaimingStore) -> None:
    """Giving back a finished claim says false and brings nothing back."""
    claim = await store_and_claim_one(store)
    await store.finish([claim], Outcome.DELIVERED, NOW)
    expect(not await store.retry_later(claim, NOW, NOW, "late"), "giving back a finished message is false")
    expect_equal(await store.next_attempt(), None, "next attempt")


@claims.with_fixture(open_claiming)
async def a_claim_given_back_is_void(store: ClaimingStore) -> None:
    """A claim that was given back finishes nothing and counts no second failure, claimed anew or not."""
    old = await store_and_claim_one(store)
    await store.retry_later(old, NOW, NOW, "why")
    expect(not await store.retry_later(old, NOW, NOW, "again"), "giving back twice is false the second time")
    expect_equal(await store.finish([old], Outcome.DELIVERED, NOW), 0, "finished with a claim that was given back")
    new = await claim_one(store)
    expect_equal(new.message.number_of_failures, 1, "number of failures")
    expect_equal(await store.finish([old], Outcome.DELIVERED, NOW), 0, "finished with the old claim")
    expect(not await store.retry_later(old, NOW, NOW, "stale"), "giving back the old claim is false")
    expect_equal(await store.finish([old, new], Outcome.DELIVERED, NOW), 1, "finished with both claims")


@claims.with_fixture(open_claiming)
async def a_claim_from_before_a_comeback_is_void(store: ClaimingStore) -> None:
    """A claim of a message that went to the error queue and came back holds nothing of its new life."""
    old = await store_and_claim_one(store)
    await store.finish([old], Outcome.FAILED, NOW)
    await store.store(message(), NOW)
    expect_equal(await store.finish([old], Outcome.DELIVERED, NOW), 0, "finished with the old claim")
    new = await claim_one(store)
    expect_equal(await store.finish([old], Outcome.DELIVERED, NOW), 0, "finished with the old claim, held anew")
    expect(not await store.retry_later(old, NOW, NOW, "stale"), "giving back the old claim is false")
    expect_equal(await store.finish([new], Outcome.DELIVERED, NOW), 1, "finished with the new claim")


@claims.with_fixture(open_claiming)
async def a_released_claim_counts_nothing(store: ClaimingStore) -> None:
    """A released message can be claimed at once, failed before or not; no failure is counted or recorded."""
    await store.store_many([message("failed"), message("new")], NOW)
    failed = next(c for c in await store.claim_due(NOW + SECOND, 10) if c.message.message_id == "failed")
    await store.retry_later(failed, NOW + 60 * SECOND, NOW, "why")
    later = NOW + 61 * SECOND
    claimed = await store.claim_due(later, 10)
    expect_equal(ids(claimed), ["failed"], "claims of what is free")
    expect_equal(await store.release(claimed, None), 1, "released")
    again = await store.claim_due(later, 10)
    expect_equal(ids(again), ["failed"], "claims after the release")
    expect_equal(again[0].message.number_of_failures, 1, "number of failures")
    await expect_history(store, "failed", "SCHEDULED", "RETRIED")
    expect_equal(await store.finish(again, Outcome.DELIVERED, NOW), 1, "finished with the new claim")


@claims.with_fixture(open_claiming)
async def a_released_message_waits_until_then(store: ClaimingStore) -> None:
    """A batch that is released until some time cannot be claimed before it, and is a batch again after it."""
    await store.store_many([message(f"{n}", NOW + n * MICROSECOND) for n in range(20)], NOW)
    claimed, until = await store.claim_due(NOW + SECOND, 100), NOW + 10 * SECOND
    expect_equal(await store.release(claimed, until), 20, "released")
    expect_equal(ids(await store.claim_due(until, 100)), [], "claims before the time given")
    expect_equal(await store.next_attempt(), until, "next attempt")
    again = await store.claim_due(until + MICROSECOND, 100)
    expect_equal(sorted(ids(again)), sorted(ids(claimed)), "claims after it")
    expect_equal({each.message.due for each in again}, {each.message.due for each in claimed}, "due times")


@claims.with_fixture(open_claiming)
async def a_released_claim_is_void(store: ClaimingStore) -> None:
    """A claim that was released finishes nothing, fails nothing and releases nothing, claimed anew or not."""
    await store.store_many([message("a"), message("b")], NOW)
    old = await store.claim_due(NOW + SECOND, 10)
    expect_equal(await store.finish(old[1:], Outcome.DELIVERED, NOW), 1, "finished before the release")
    expect_equal(await store.release(old, None), 1, "released of one that is held and one that is finished")
    expect_equal(await store.release(old, None), 0, "released a second time")
    expect_equal(await store.finish(old, Outcome.DELIVERED, NOW), 0, "finished with a released claim")
    new = await claim_one(store)
    expect_equal(await store.finish(old, Outcome.DELIVERED, NOW), 0, "finished with the released claim, held anew")
    expect(not await store.retry_later(old[0], NOW, NOW, "stale"), "failing with the released claim is false")
    expect_equal(await store.release(old, None), 0, "released with the released claim")
    expect_equal(await store.finish([new], Outcome.DELIVERED, NOW), 1, "finished with the new claim")


@claims.with_fixture(open_claiming)
async def next_attempt_is_the_earliest(store: ClaimingStore) -> None:
    """The earliest instant at which an unclaimed message may be attempted; none without any."""
    expect_equal(await store.next_attempt(), None, "next attempt of an empty store")
    await store.store_many([message("first"), message("second", NOW + 10 * SECOND)], NOW)
    expect_equal(await store.next_attempt(), NOW, "next attempt")
    claim = await claim_one(store)
    expect_equal(await store.next_attempt(), NOW + 10 * SECOND, "next attempt with the first message claimed")
    await store.retry_later(claim, NOW + 5 * SECOND, NOW, "why")
    expect_equal(await store.next_attempt(), NOW + 5 * SECOND, "next attempt after a failure")
    await store.claim_due(NOW + 11 * SECOND, 10)
    expect_equal(await store.next_attempt(), None, "next attempt with everything claimed")


@claims.with_fixture(open_claiming)
async def what_is_due_earlier_wakes(store: ClaimingStore) -> None:
    """A message due before all others wakes listeners; one due later does not, nor any after listening has ended."""
    woken: list[str] = []
    stop = await store.listen(lambda: woken.append("woken"))
    await store.store(message("first", NOW + 100 * SECOND), NOW)
    expect(bool(woken), "the first message wakes")
    woken.clear()
    await store.store_many([message("later", NOW + 101 * SECOND), message("last", NOW + 200 * SECOND)], NOW)
    expect_equal(woken, [], "wake-ups by messages due later")
    await store.store_many([message("between", NOW + 150 * SECOND), message("earlier", NOW + 99 * SECOND)], NOW)
    expect(bool(woken), "an earlier message wakes")
    woken.clear()
    stop()
    await store.store(message("earliest", NOW), NOW)
    expect_equal(woken, [], "wake-ups after listening ended")
    stop()  # a second call has no effect


async def _store_during_query(store: ClaimingStore, query: Callable[[], Awaitable[datetime | None]]) -> None:
    """Store messages while ``query`` queries the next attempt: each message must wake, or be counted in the answer."""
    woken, answers = list[str](), list[datetime | None]()

    async def run_query() -> None:
        answers.append(await query())

    stop = await store.listen(lambda: woken.append("woken"))
    for number in range(_QUERIES):
        await store.store(message(f"before-{number}", NOW - SECOND), NOW)
        if query == store.next_attempt:
            await store.finish([await claim_one(store, NOW)], Outcome.DELIVERED, NOW)
        woken.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_query)
            for seconds in (2, 0, 1):
                tasks.start_soon(store.store, message(f"during-{number}-{seconds}", NOW + seconds * SECOND), NOW)
        next_attempt = answers.pop()
        is_announced = bool(woken) or (next_attempt is not None and next_attempt <= NOW)
        expect(is_announced, f"a message stored during a look wakes or is in its answer, which is {next_attempt}")
        await store.finish(await store.claim_due(NOW + 4 * SECOND, 10), Outcome.DELIVERED, NOW)
        await store.next_attempt()
    stop()


@claims.with_fixture(open_claiming)
async def what_is_stored_during_a_look_is_not_slept_over(store: ClaimingStore) -> None:
    """A message stored while the next attempt is asked for, due after what was claimed, wakes or is in the answer."""
    await _store_during_query(store, store.next_attempt)


@claims.with_fixtures(open_beside_queues)
async def what_is_stored_during_a_move_is_not_slept_over(store: MovingStore, transport: Transport) -> None:
    """Moving: a message stored while a move is under way, due after what it moves, wakes or is in its answer."""

    async def look() -> datetime | None:
        return (await store.move_due(NOW, 10)).next_attempt

    await _store_during_query(store, look)


@claims.with_fixture(open_claiming)
async def a_wake_up_follows_the_commit(store: ClaimingStore) -> None:
    """A look after a wake-up finds the message: the wake-up never comes before it can be claimed."""
    alarm = WakeUp()
    attempts: list[datetime | None] = []

    async def look() -> None:
        await alarm.wait()
        attempts.append(await store.next_attempt())

    stop = await store.listen(alarm.wake)
    with expect_in_time("a wake-up", is_wake_up=True):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await store.store(message(), NOW)
    stop()
    expect_equal(attempts, [NOW], "what the woken one finds")


@claims
async def other_processes_do_not_claim_it_too(subject: StoreSubject) -> None:
    """Shared: messages that one process holds no other process claims, finishes or gives back (row 24)."""
    async with open_claiming(subject) as store:
        claim = await store_and_claim_one(store)
        if not store.capabilities.shared:
            return
        async with use_store(claiming_store_of(subject.open_elsewhere())) as other:
            expect_equal(ids(await other.claim_due(NOW + SECOND, 10)), [], "claims by another process")
            expect_equal(await other.finish([claim], Outcome.DELIVERED, NOW), 0, "finished by another process")
            expect(not await other.retry_later(claim, NOW, NOW, "foreign"), "another process cannot give it back")
            expect_equal(await store.finish([claim], Outcome.DELIVERED, NOW), 1, "finished by the holder")


@claims
async def claims_end_with_their_process(subject: StoreSubject) -> None:
    """Shared: messages of a process that has ended are free again, unchanged (row 25)."""
    async with open_claiming(subject) as store:
        if not store.capabilities.shared:
            return
        await store.store(message(), NOW)
        async with use_store(claiming_store_of(subject.open_elsewhere())) as other:
            claim = await claim_one(other)
        again = await claim_one(store)
        expect_equal(again.message, claim.message, "the message after its holder ended")
        expect_equal(await store.finish([again], Outcome.DELIVERED, NOW), 1, "finished by the one that took over")


@claims
async def other_processes_are_woken(subject: StoreSubject) -> None:
    """Shared: a message stored by another process wakes listeners here (row 35)."""
    async with open_claiming(subject) as store:
        if not store.capabilities.shared:
            return
        wake_alarm = WakeUp()
        stop = await store.listen(wake_alarm.wake)
        async with use_store(claiming_store_of(subject.open_elsewhere())) as other:
            await other.store(message(), NOW)
            with expect_in_time("a wake-up from another process", is_wake_up=True):
                await wake_alarm.wait()
        stop()
