"""Rows that cannot be read are set aside, one by one, and put back once they are mended (ADR 0019)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from unittest import mock

from postdate import messages
from postdate.core.dispatcher import has_lapsed
from postdate.errors import DuplicateMessage, InvalidHeaders, InvalidMessage, MessageNotFound
from postdate.messages import Headers, format_timestamp, rescheduled
from postdate.ports import (
    Claim,
    ClaimingStore,
    Mending,
    MessageFilter,
    MoveReport,
    Outcome,
    Quarantined,
    Recording,
    RecordKind,
)
from postdate.ports.stores import Discarding
from postdate.testing.conformance import (
    ConformanceFailure,
    Damage,
    Topic,
    damages_of,
    expect,
    expect_equal,
    expect_error,
    in_time,
)
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    QUEUE,
    SECOND,
    StoreSubject,
    administrable,
    claim_one,
    claiming,
    close,
    ids,
    message,
    moving,
    quarantining,
)

quarantine: Topic[StoreSubject] = Topic("quarantine")

_GOOD = [f"good-{number:02d}" for number in range(50)]
_AT_ONCE = 7
MENDED = {
    Damage.HEADERS: Mending(headers={"mended": "é"}),
    Damage.DUE: Mending(due=NOW),
    Damage.CONTENT: Mending(headers={"mended": "é"}, body=b"mended"),
    Damage.DESTINATION: Mending(destination=QUEUE),
    Damage.FLIP: Mending(body=b"mended"),
}


def _bad(damage: Damage) -> str:
    return f"bad-{damage.value}"


async def _store_damaged(subject: StoreSubject, store: ClaimingStore, damages: list[Damage]) -> None:
    """Store fifty good messages, and among them one damaged in each way; the oldest of all is a damaged one."""
    bad = [message(_bad(damage), NOW + 7 * number * MICROSECOND) for number, damage in enumerate(damages)]
    good = [message(id_, NOW + number * MICROSECOND) for number, id_ in enumerate(_GOOD, 1)]
    await store.store_many([*bad, *good], NOW)
    for damage in damages:
        subject.damage(_bad(damage), damage)


async def _claim_all(store: ClaimingStore) -> list[Claim]:
    """Claim in small batches until nothing comes; a batch is empty only when nothing is left."""
    found = list[Claim]()
    while batch := await store.claim_due(NOW + SECOND, _AT_ONCE):
        found += batch
    return found


@quarantine
async def an_unreadable_message_holds_up_nothing(subject: StoreSubject) -> None:
    """Of fifty good messages and damaged ones among them, the fifty are claimed in their order, and finished."""
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        if found is None:
            return
        await _store_damaged(subject, store, found[1])
        claims = await _claim_all(store)
        expect_equal(ids(claims), _GOOD, "claims beside damaged messages")
        expect_equal(await store.finish(claims, Outcome.DELIVERED, NOW), len(_GOOD), "finished")
        expect_equal(await store.next_attempt(), None, "next attempt with nothing left that can be read")
        expect_equal(await found[0].quarantined_count(), len(found[1]), "set aside")


async def _move_beside(
    subject: StoreSubject, store: ClaimingStore, move: Callable[[int], Awaitable[MoveReport]]
) -> None:
    """Have a move meet damaged messages; each must be set aside, by the store or by whoever receives it."""
    found = quarantining(subject, store)
    if found is None:
        return
    place, damages = found
    transport = subject.transport()
    try:
        await transport.create_queues([QUEUE])
        await _store_damaged(subject, store, damages)
        for _ in range(len(_GOOD) + len(damages)):  # enough, however few of a batch can be moved
            await move(_AT_ONCE)
        expect_equal(ids(await store.claim_due(NOW + SECOND, 100)), [], "claims of what could not be moved")
        receiver, received = transport.receiver(QUEUE), list[str]()
        with in_time("receiving what was moved beside damaged messages"):
            while len(received) < len(_GOOD):
                received += [each.envelope.message_id for each in await receiver.receive(100)]
        await receiver.close()
        expect_equal(received, _GOOD, "moved beside damaged messages")
        set_aside = [each.message_id for each in await place.quarantined(100)]
        in_queues = damages_of(frozenset(damages), transport)
        if in_queues is not None:
            set_aside += [each.message_id for each in await in_queues[0].quarantined(100)]
        expect_equal(sorted(set_aside), sorted(_bad(damage) for damage in damages), "set aside")
        expect_equal(await store.next_attempt(), None, "next attempt with nothing left")
    finally:
        await close(transport)


@quarantine
async def a_move_loses_nothing_that_is_unreadable(subject: StoreSubject) -> None:
    """Moving: the others arrive in their order, and each damaged message is set aside, here or in its queue."""
    async with claiming(subject) as store:
        mover = moving(store)
        if mover is not None:
            await _move_beside(subject, store, lambda limit: mover.move_due(NOW + SECOND, limit))


@quarantine
async def a_move_that_looks_into_headers_loses_nothing_that_is_unreadable(subject: StoreSubject) -> None:
    """Moving with the rule of what nobody wants any more: a damaged message is not taken for one that has lapsed."""
    discarding = Discarding(timedelta(0), has_lapsed)
    async with claiming(subject) as store:
        mover = moving(store)
        if mover is not None:
            move = partial(mover.move_due, NOW + SECOND, discarding=discarding)
            await _move_beside(subject, store, move)


@quarantine
async def the_oldest_that_can_be_read_is_fetched(subject: StoreSubject) -> None:
    """One is asked for, and the oldest cannot be read: the next one is fetched."""
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        if found is None:
            return
        await _store_damaged(subject, store, found[1])
        fetched = await store.fetch_next_due(NOW + SECOND)
        expect_equal(fetched and fetched.message_id, _GOOD[0], "fetched beside damaged messages")


@quarantine
async def an_operator_sees_the_others(subject: StoreSubject) -> None:
    """Questions about what waits are answered as if the damaged messages were not there."""
    async with claiming(subject) as store:
        found, operator = quarantining(subject, store), administrable(store)
        if found is None or operator is None:
            return
        await _store_damaged(subject, store, found[1])
        await store.next_due()
        await store.next_attempt()
        await operator.statistics(NOW)
        expect_equal(ids(await operator.list_pending(MessageFilter(), 1000)), _GOOD, "pending messages")
        for damage in found[1]:
            expect_equal(await operator.get(_bad(damage)), None, "a damaged message, asked for by its id")
        one = await operator.get(_GOOD[0])
        expect_equal(one and one.message_id, _GOOD[0], "a good message, asked for by its id")


async def _set_aside(subject: StoreSubject, store: ClaimingStore, damage: Damage) -> tuple[bytes, Quarantined]:
    """Store one message, damage it and have it met; return what stands there, and what is set aside."""
    await store.store(message(_bad(damage), headers={"kind": "check"}, body=b"\0body"), NOW)
    there = subject.damage(_bad(damage), damage)
    expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "claims of a damaged message")
    found = quarantining(subject, store)
    assert found is not None
    (aside,) = [each for each in await found[0].quarantined(10) if each.message_id == _bad(damage)]
    return there, aside


@quarantine
async def an_unreadable_message_is_set_aside_with_its_bytes(subject: StoreSubject) -> None:
    """It does not wait any more; its bytes and the reason are kept, over a restart, and it is recorded as failed."""
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        if found is None:
            return
        for damage in found[1]:
            there, aside = await _set_aside(subject, store, damage)
            expect_equal(aside.place, "", "place")
            expect(bool(aside.reason.strip()), "a reason is given")
            expect(aside.at.tzinfo is not None, "the time of setting aside is aware")
            if damage not in {Damage.CONTENT, Damage.FLIP}:
                expect(b"\0body" in aside.raw.values(), f"the body is kept, got {sorted(aside.raw)}")
            if damage is not Damage.CONTENT:
                expect(there in aside.raw.values(), f"what stood there is kept, got {dict(aside.raw)}")
            operator = administrable(store)
            if operator is not None:
                history = await operator.history(_bad(damage))
                expect_equal([each.kind.name for each in history], ["SCHEDULED", "FAILED"], "history")
                expect(history[-1].detail.startswith("unreadable: "), f"it says why, not {history[-1].detail!r}")
        operator = administrable(store)
        if operator is not None:
            statistics = await operator.statistics(NOW)
            expect_equal((statistics.pending, statistics.quarantined), (0, len(found[1])), "pending and set aside")
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        assert found is not None
        expect_equal(await found[0].quarantined_count(), len(found[1]), "set aside, after a restart")
        expect_equal(len(await found[0].quarantined(1)), 1, "set aside, up to one")


@quarantine
async def a_mended_message_is_put_back(subject: StoreSubject) -> None:
    """With what was damaged put in its place it waits again, is recorded as returned, wakes, and is claimed."""
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        if found is None:
            return
        for damage in found[1]:
            _, aside = await _set_aside(subject, store, damage)
            woken = list[str]()
            stop = await store.listen(lambda woken=woken: woken.append("woken"))
            await found[0].put_back(aside.number, MENDED[damage], NOW)
            stop()
            expect(bool(woken), "a message that is put back wakes")
            expect_equal(await found[0].quarantined_count(), 0, "set aside, after it was put back")
            claim = await claim_one(store)
            headers = MENDED[damage].headers or {"kind": "check"}
            body = MENDED[damage].body or b"\0body"
            expected = message(_bad(damage), headers=headers, body=body)
            expect_equal(claim.message, expected, "the mended message")
            expect_equal(await store.finish([claim], Outcome.DELIVERED, NOW), 1, "finished")
            operator = administrable(store)
            if operator is not None:
                kinds = [each.kind.name for each in await operator.history(_bad(damage))]
                expect_equal(kinds, ["SCHEDULED", "FAILED", "RETURNED", "DELIVERED"], "history")


@quarantine
async def what_no_queue_takes_is_set_aside(subject: StoreSubject) -> None:
    """By who has claimed it, not by who has given it back: its bytes and the reason are kept; it can be put back."""
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        await store.store_many([message("large", NOW - SECOND, body=b"\0body"), message("other")], NOW)
        given_back, other = await store.claim_due(NOW + SECOND, 10)
        await store.release([given_back], None)
        expect(
            not await store.set_aside(given_back, "too large", NOW), "a claim that was given back sets nothing aside"
        )
        claim = await claim_one(store)
        done = await store.set_aside(claim, "too large", NOW)
        expect_equal(done, found is not None, "set aside, by a store that is a Quarantine")
        if found is None:
            return
        expect(not await store.set_aside(claim, "too large", NOW), "nothing is set aside twice")
        await store.finish([other], Outcome.DELIVERED, NOW)
        expect_equal(await store.next_attempt(), None, "next attempt")
        (aside,) = await found[0].quarantined(10)
        expect_equal((aside.message_id, aside.reason), ("large", "too large"), "set aside")
        expect(b"\0body" in aside.raw.values(), f"the body is kept, got {sorted(aside.raw)}")
        await found[0].put_back(aside.number, Mending(destination="another"), NOW)
        expect_equal((await claim_one(store)).message.destination, "another", "destination of what was put back")


@quarantine
async def what_is_still_unreadable_stays_set_aside(subject: StoreSubject) -> None:
    """Put back unmended it says why not and stays; a number that is not there is refused; it can be discarded."""
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        if found is None:
            return
        place, damages = found
        for damage in damages:
            _, aside = await _set_aside(subject, store, damage)
            try:
                await place.put_back(aside.number, Mending(), NOW)
            except (InvalidMessage, InvalidHeaders):
                pass
            else:
                raise ConformanceFailure("put back unmended: expected InvalidMessage or InvalidHeaders")
            expect_equal(await place.quarantined_count(), 1, "set aside, after it was refused")
            await place.discard_quarantined(aside.number, NOW)
            expect_equal(await place.quarantined_count(), 0, "set aside, after it was discarded")
            for call in (place.put_back(aside.number, Mending(), NOW), place.discard_quarantined(aside.number, NOW)):
                with expect_error(MessageNotFound, "naming what is not set aside any more"):
                    await call
            operator = administrable(store)
            if operator is not None:
                kinds = [each.kind for each in await operator.history(_bad(damage))]
                expect_equal(kinds[-1], RecordKind.DISCARDED, "the last record")


@quarantine
async def a_flipped_bit_is_noticed(subject: StoreSubject) -> None:
    """With a checksum: what is damaged is not claimed; what was rescheduled is, with the headers that it was given.

    What is damaged is not put back as it is; with a body that is given for it, it has a checksum again.
    """
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        if found is None or Damage.FLIP not in found[1]:
            return
        moved = message("moved", headers={Headers.DELIVER_AT: format_timestamp(NOW), "kind": "check"})
        await store.store_many([moved, message(_bad(Damage.FLIP), NOW - SECOND, body=b"\0body")], NOW)
        operator = administrable(store)
        due = NOW if operator is None else NOW + MICROSECOND
        if operator is not None:
            expect(await operator.reschedule("moved", due, NOW), "rescheduled")
        subject.damage(_bad(Damage.FLIP), Damage.FLIP)
        claim = await claim_one(store)
        expect_equal(claim.message, rescheduled(moved, due), "the message that is whole")
        await store.finish([claim], Outcome.DELIVERED, NOW)
        (aside,) = await found[0].quarantined(10)
        with expect_error(InvalidMessage, "putting back what is damaged"):
            await found[0].put_back(aside.number, Mending(), NOW)
        await found[0].put_back(aside.number, Mending(body=b"mended"), NOW)
        subject.damage(_bad(Damage.FLIP), Damage.FLIP)
        expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "claims of what was mended and damaged again")


@quarantine
async def what_came_back_otherwise_is_not_put_back(subject: StoreSubject) -> None:
    """Stored anew under its id, as what failed may be, it is there already: DuplicateMessage, and nothing changes."""
    async with claiming(subject) as store:
        found = quarantining(subject, store)
        if found is None:
            return
        damage = found[1][0]
        _, aside = await _set_aside(subject, store, damage)
        await store.store(message(_bad(damage)), NOW)
        with expect_error(DuplicateMessage, "putting back what was stored anew"):
            await found[0].put_back(aside.number, MENDED[damage], NOW)
        expect_equal(await found[0].quarantined_count(), 1, "set aside")
        expect_equal((await claim_one(store)).message.headers, {"kind": "check"}, "headers of what was stored anew")


@quarantine
async def without_records_its_id_can_be_stored_again(subject: StoreSubject) -> None:
    """Where nothing is recorded, nothing stays of what was discarded; and what was stored anew meanwhile stays."""
    async with claiming(subject, recording=Recording.NONE) as store:
        found = quarantining(subject, store)
        if found is None:
            return
        place, (damage, *_) = found
        _, aside = await _set_aside(subject, store, damage)
        await place.discard_quarantined(aside.number, NOW)
        _, aside = await _set_aside(subject, store, damage)
        await place.put_back(aside.number, MENDED[damage], NOW)
        expect_equal(await store.finish([await claim_one(store)], Outcome.DELIVERED, NOW), 1, "finished")
        _, aside = await _set_aside(subject, store, damage)
        await store.store(message(_bad(damage)), NOW)
        with expect_error(DuplicateMessage, "putting back what was stored anew"):
            await place.put_back(aside.number, MENDED[damage], NOW)


@quarantine
async def tightened_limits_refuse_nothing_that_is_stored(subject: StoreSubject) -> None:
    """What was stored under wider limits is claimed and listed unchanged: it was checked once, and that is over."""
    kept = message("a-long-id" * 20, destination="a-long-destination" * 5, body=b"b" * 5_000)
    async with claiming(subject) as store:
        await store.store(kept, NOW)
    with mock.patch.multiple(messages, MESSAGE_ID_LIMIT=5, DESTINATION_LIMIT=5):
        async with claiming(subject, largest_message_bytes=1_000) as store:
            operator = administrable(store)
            if not store.capabilities.durable:
                return
            if operator is not None:
                expect_equal(await operator.list_pending(MessageFilter(), 10), [kept], "pending messages")
                expect_equal(await operator.get(kept.message_id), kept, "the message by its id")
            expect_equal((await claim_one(store)).message, kept, "the message as it is claimed")
