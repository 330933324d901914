"""Rows that cannot be read are set aside, one by one, and put back once they are mended (ADR 0019)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest import mock

from postdate import messages
from postdate.errors import DuplicateMessage
from postdate.ports import (
    AdministrableStore,
    Claim,
    ClaimingStore,
    Mending,
    MessageFilter,
    MovingStore,
    Outcome,
    Quarantined,
    RecordKind,
    Transport,
)
from postdate.testing.conformance import Damage, Topic, expect, expect_equal, expect_error, in_time
from postdate.testing.damaged import GOOD, MENDED, Rows, bad, expect_kept, rows_of
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    QUEUE,
    SECOND,
    StoreSubject,
    beside_queues,
    claim_one,
    claiming,
    expect_history,
    ids,
    message,
    quarantining,
)

quarantine: Topic[StoreSubject] = Topic("quarantine")

_AT_ONCE = 7


async def _store_damaged(store: ClaimingStore, rows: Rows) -> None:
    """Store fifty good messages, and among them one damaged in each way; the oldest of all is a damaged one."""
    damaged = [message(bad(damage), NOW + 7 * number * MICROSECOND) for number, damage in enumerate(rows.damages)]
    good = [message(id_, NOW + number * MICROSECOND) for number, id_ in enumerate(GOOD, 1)]
    await store.store_many([*damaged, *good], NOW)
    for damage in rows.damages:
        rows.damage(bad(damage), damage)


async def _claim_all(store: ClaimingStore) -> list[Claim]:
    """Claim in small batches until nothing comes; a batch is empty only when nothing is left."""
    found = list[Claim]()
    while batch := await store.claim_due(NOW + SECOND, _AT_ONCE):
        found += batch
    return found


@quarantine.given(quarantining)
async def an_unreadable_message_holds_up_nothing(store: ClaimingStore, rows: Rows) -> None:
    """Of fifty good messages and damaged ones among them, the fifty are claimed in their order, and finished."""
    await _store_damaged(store, rows)
    claims = await _claim_all(store)
    expect_equal(ids(claims), GOOD, "claims beside damaged messages")
    expect_equal(await store.finish(claims, Outcome.DELIVERED, NOW), len(GOOD), "finished")
    expect_equal(await store.next_attempt(), None, "next attempt with nothing left that can be read")
    expect_equal(await rows.place.quarantined_count(), len(rows.damages), "set aside")


@asynccontextmanager
async def _moving(subject: StoreSubject) -> AsyncGenerator[tuple[MovingStore, Transport, Rows] | None]:
    async with beside_queues(subject) as found:
        rows = found and rows_of(found[0], subject.damages(), subject.damage)
        yield found and rows and (*found, rows)


@quarantine.given(_moving)
async def a_move_loses_nothing_that_is_unreadable(store: MovingStore, transport: Transport, rows: Rows) -> None:
    """Moving: the others arrive in their order, and each damaged message is set aside, here or in its queue."""
    await _store_damaged(store, rows)
    for _ in range(len(GOOD) + len(rows.damages)):  # enough, however few of a batch can be moved
        await store.move_due(NOW + SECOND, _AT_ONCE)
    expect_equal(ids(await store.claim_due(NOW + SECOND, 100)), [], "claims of what could not be moved")
    receiver, received = transport.receiver(QUEUE), list[str]()
    with in_time("receiving what was moved beside damaged messages"):
        while len(received) < len(GOOD):
            received += [each.envelope.message_id for each in await receiver.receive(100)]
    await receiver.close()
    expect_equal(received, GOOD, "moved beside damaged messages")
    set_aside = [each.message_id for each in await rows.place.quarantined(100)]
    in_queues = rows_of(transport, rows.damages, rows.damage)
    if in_queues is not None:
        set_aside += [each.message_id for each in await in_queues.place.quarantined(100)]
    expect_equal(sorted(set_aside), sorted(bad(damage) for damage in rows.damages), "set aside")
    expect_equal(await store.next_attempt(), None, "next attempt with nothing left")


@quarantine.given(quarantining)
async def the_oldest_that_can_be_read_is_fetched(store: ClaimingStore, rows: Rows) -> None:
    """One is asked for, and the oldest cannot be read: the next one is fetched."""
    await _store_damaged(store, rows)
    fetched = await store.fetch_next_due(NOW + SECOND)
    expect_equal(fetched and fetched.message_id, GOOD[0], "fetched beside damaged messages")


@quarantine.given(quarantining)
async def an_operator_sees_the_others(store: ClaimingStore, rows: Rows) -> None:
    """Questions about pending messages are answered as if the damaged ones were not there."""
    if not isinstance(store, AdministrableStore):
        return
    await _store_damaged(store, rows)
    await store.next_due()
    await store.next_attempt()
    await store.statistics(NOW)
    expect_equal(ids(await store.list_pending(MessageFilter(), 1000)), GOOD, "pending messages")
    for damage in rows.damages:
        expect_equal(await store.get(bad(damage)), None, "a damaged message, asked for by its id")
    one = await store.get(GOOD[0])
    expect_equal(one and one.message_id, GOOD[0], "a good message, asked for by its id")


@quarantine.given(quarantining)
async def unreadable_messages_do_not_end_a_list(store: ClaimingStore, rows: Rows) -> None:
    """In pages of one, the first of which has none that can be read."""
    if not isinstance(store, AdministrableStore):
        return
    await _store_damaged(store, rows)
    found, where = list[str](), MessageFilter()
    for _ in range(len(GOOD) + len(rows.damages) + 1):
        page = await store.read_pending(where, 1)
        found += ids(page.messages)
        where = replace(where, after=page.after)
        if page.after is None:
            break
    expect_equal(found, GOOD, "good messages, in pages of one")


async def _set_aside(store: ClaimingStore, rows: Rows, damage: Damage) -> tuple[bytes, Quarantined]:
    """Store one message, damage it, and claim; return the damaged bytes, and the row that is set aside."""
    await store.store(message(bad(damage), headers={"kind": "check"}, body=b"\0body"), NOW)
    there = rows.damage(bad(damage), damage)
    expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "claims of a damaged message")
    return there, await rows.aside(damage)


@quarantine
async def an_unreadable_message_is_set_aside_with_its_bytes(subject: StoreSubject) -> None:
    """It is no longer pending; its bytes and the reason are kept, over a restart, and it is recorded as failed."""
    async with quarantining(subject) as found:
        if found is None:
            return
        store, rows = found
        for damage in rows.damages:
            there, aside = await _set_aside(store, rows, damage)
            expect_kept(aside, "", damage, there)
            if isinstance(store, AdministrableStore):
                await expect_history(store, bad(damage), "SCHEDULED", "FAILED")
                why = (await store.history(bad(damage)))[-1].detail
                expect(why.startswith("unreadable: "), f"it says why, not {why!r}")
        if isinstance(store, AdministrableStore):
            statistics = await store.statistics(NOW)
            expect_equal((statistics.pending, statistics.quarantined), (0, len(rows.damages)), "pending and set aside")
    async with quarantining(subject) as found:
        assert found is not None
        await found[1].expect_all_aside()


@quarantine.given(quarantining)
async def a_mended_message_is_put_back(store: ClaimingStore, rows: Rows) -> None:
    """With the damaged part replaced it is pending again, is recorded as returned, wakes, and is claimed."""
    for damage in rows.damages:
        _, aside = await _set_aside(store, rows, damage)
        woken = list[str]()
        stop = await store.listen(lambda woken=woken: woken.append("woken"))
        await rows.place.put_back(aside.number, MENDED[damage], NOW)
        stop()
        expect(bool(woken), "a message that is put back wakes")
        expect_equal(await rows.place.quarantined_count(), 0, "set aside, after it was put back")
        claim = await claim_one(store)
        headers = MENDED[damage].headers or {"kind": "check"}
        expected = message(bad(damage), headers=headers, body=MENDED[damage].body or b"\0body")
        expect_equal(claim.message, expected, "the mended message")
        expect_equal(await store.finish([claim], Outcome.DELIVERED, NOW), 1, "finished")
        await expect_history(store, bad(damage), "SCHEDULED", "FAILED", "RETURNED", "DELIVERED")


@quarantine
async def what_no_queue_takes_is_set_aside(subject: StoreSubject) -> None:
    """By the holder of its claim only: its bytes and the reason are kept; it can be put back."""
    async with claiming(subject) as store:
        rows = rows_of(store, subject.damages(), subject.damage)
        await store.store_many([message("large", NOW - SECOND, body=b"\0body"), message("other")], NOW)
        given_back, other = await store.claim_due(NOW + SECOND, 10)
        await store.release([given_back], None)
        expect(
            not await store.set_aside(given_back, "too large", NOW), "a claim that was given back sets nothing aside"
        )
        claim = await claim_one(store)
        done = await store.set_aside(claim, "too large", NOW)
        expect_equal(done, rows is not None, "set aside, by a store that is a Quarantine")
        if rows is None:
            return
        expect(not await store.set_aside(claim, "too large", NOW), "nothing is set aside twice")
        await store.finish([other], Outcome.DELIVERED, NOW)
        expect_equal(await store.next_attempt(), None, "next attempt")
        (aside,) = await rows.place.quarantined(10)
        expect_equal((aside.message_id, aside.reason), ("large", "too large"), "set aside")
        expect(b"\0body" in aside.raw.values(), f"the body is kept, got {sorted(aside.raw)}")
        await rows.place.put_back(aside.number, Mending(destination="another"), NOW)
        expect_equal((await claim_one(store)).message.destination, "another", "destination of what was put back")


@quarantine.given(quarantining)
async def what_is_still_unreadable_stays_set_aside(store: ClaimingStore, rows: Rows) -> None:
    """Put back unmended it is refused with the reason and stays; an unknown number is refused; it can be discarded."""
    for damage in rows.damages:
        _, aside = await _set_aside(store, rows, damage)
        await rows.expect_refused(aside)
        if isinstance(store, AdministrableStore):
            kinds = [each.kind for each in await store.history(bad(damage))]
            expect_equal(kinds[-1], RecordKind.DISCARDED, "the last record")


@quarantine.given(quarantining)
async def what_came_back_otherwise_is_not_put_back(store: ClaimingStore, rows: Rows) -> None:
    """If its id was stored anew, as after a failure it may be: DuplicateMessage, and nothing changes."""
    damage = rows.damages[0]
    _, aside = await _set_aside(store, rows, damage)
    await store.store(message(bad(damage)), NOW)
    with expect_error(DuplicateMessage, "putting back what was stored anew"):
        await rows.place.put_back(aside.number, MENDED[damage], NOW)
    expect_equal(await rows.place.quarantined_count(), 1, "set aside")
    expect_equal((await claim_one(store)).message.headers, {"kind": "check"}, "headers of what was stored anew")


@quarantine
async def tightened_limits_refuse_nothing_that_is_stored(subject: StoreSubject) -> None:
    """Messages stored under wider limits are claimed and listed unchanged: only new ones are checked."""
    kept = message("a-long-id" * 20, destination="a-long-destination" * 5, body=b"b" * 5_000)
    async with claiming(subject) as store:
        await store.store(kept, NOW)
    with mock.patch.multiple(messages, MESSAGE_ID_LIMIT=5, DESTINATION_LIMIT=5):
        async with claiming(subject, largest_message_bytes=1_000) as store:
            if not store.capabilities.durable:
                return
            if isinstance(store, AdministrableStore):
                expect_equal(await store.list_pending(MessageFilter(), 10), [kept], "pending messages")
                expect_equal(await store.get(kept.message_id), kept, "the message by its id")
            expect_equal((await claim_one(store)).message, kept, "the message as it is claimed")
