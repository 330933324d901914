"""Checks of limits of destinations, and of messages that wait because of limits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta

from postdate.clock import LATEST
from postdate.ports import AdministrableStore, ClaimingStore, MovingStore, Outcome, RecordKind, Transport
from postdate.ports.limits import LimitingStore, LimitsInUse, StoredLimits
from postdate.testing.conformance import Damage, Topic, expect, expect_equal
from postdate.testing.damaged import Rows, damaged_id
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    QUEUE,
    SECOND,
    StoreSubject,
    fixture_with_role,
    ids,
    message,
    open_beside_queues,
    open_with_rows,
)

limiting: Topic[StoreSubject] = Topic("limiting")
open_limiting = fixture_with_role(LimitingStore)


@limiting.with_fixtures(open_limiting)
async def limits_are_kept(store: ClaimingStore, limits: LimitingStore) -> None:
    """Those of each destination, whose name is taken as it is, with a lane of its own."""
    names = ("q", "Q", "q ", "ключ'\"%s")
    for number, name in enumerate(names):
        expect(await limits.store_limits(name, f"{number}", NOW + number * SECOND), "the first limits are kept")
    stored = await limits.load_limits()
    values = {each.destination: (each.limits, each.free_at) for each in stored}
    expect_equal(values, {name: (f"{n}", NOW + n * SECOND) for n, name in enumerate(names)}, "what is kept")
    expect_equal(len({each.lane for each in stored}), len(names), "lanes")
    expect(all(each.lane > 0 for each in stored), "lanes are numbered from 1")


@limiting.with_fixtures(open_limiting)
async def limits_are_read_by_destination(store: ClaimingStore, limits: LimitingStore) -> None:
    """Those of many destinations at once; the others are left out, and names without limits have none."""
    names = ["first", *(f"q-{number}" for number in range(120))]
    for name in [*names, "other", "Q-7", "q-7 "]:
        await limits.store_limits(name, "limits", NOW)
    stored = await limits.load_limits([*names, "none", "ключ'\"%s"])
    expect_equal(sorted(each.destination for each in stored), sorted(names), "whose limits are read")
    expect_equal(list(await limits.load_limits([])), [], "the limits of no destination")


@limiting.with_fixtures(open_limiting)
async def lanes_with_messages_are_in_use(store: ClaimingStore, limits: LimitingStore) -> None:
    """In force or lifted; empty lanes, and what is due in the far years of the lanes by itself, are not."""
    expect_equal(
        await limits.load_limits_in_use(), LimitsInUse(has_limits=False), "the limits in use before there are any"
    )
    for number in range(12):
        await limits.store_limits(f"q-{number}", "limits", NOW)
    stored = {each.destination: each for each in await limits.load_limits()}
    in_use = await limits.load_limits_in_use()
    expect_equal(
        (in_use.has_limits, list(in_use.lanes)),
        (True, list[StoredLimits]()),
        "the limits in use while no lane has messages",
    )
    last = max(stored.values(), key=lambda each: each.lane)
    far = [message("far", last.lane_end + SECOND), message("farther", LATEST)]
    chosen = [*sorted(stored)[2:5], last.destination]
    await store.store_many([*far, *(message(f"m-{each}", NOW, destination=each) for each in chosen)], NOW)
    for claim in await store.claim_due(NOW + SECOND, 20):
        await store.release([claim], stored[claim.message.destination].attempt_time(claim.message.due))
    in_use = await limits.load_limits_in_use()
    expect_equal({each.destination for each in in_use.lanes}, set(chosen), "destinations with held messages")
    expect(all(each == stored[each.destination] for each in in_use.lanes), "what is in use is what is kept")
    for each in stored:
        await limits.store_limits(each, "", NOW, "limits")
    in_use = await limits.load_limits_in_use()
    expect(not in_use.has_limits, "no limits are in force once all are lifted")
    expect_equal({each.limits for each in in_use.lanes}, {""}, "the limits of lanes with messages")
    expect_equal({each.destination for each in in_use.lanes}, set(chosen), "destinations with held messages, then")


@limiting.with_fixtures(open_limiting)
async def limits_of_before_are_changed_once(store: ClaimingStore, limits: LimitingStore) -> None:
    """Who has seen what a destination had changes it; who has seen what it had before that does not."""
    answers = [await limits.store_limits("q", each, NOW) for each in ("1", "2")]
    answers += [await limits.store_limits("q", each, NOW, "1") for each in ("3", "4")]
    answers += [await limits.store_limits("other", "5", NOW, "1")]
    expect_equal(answers, [True, False, True, False, False], "whether limits were kept")
    expect_equal([each.limits for each in await limits.load_limits()], ["3"], "what is kept")


@limiting.with_fixtures(open_limiting)
async def lifted_limits_are_kept_as_lifted(store: ClaimingStore, limits: LimitingStore) -> None:
    """Empty, with the lane that they had: something may be held there still."""
    await limits.store_limits("q", "limits", NOW)
    (before,) = await limits.load_limits()
    await limits.store_limits("q", "", NOW + SECOND, "limits")
    expect_equal(await limits.load_limits(), [StoredLimits("q", before.lane, "", NOW + SECOND)], "what is kept")
    expect(await limits.store_limits("q", "again", NOW), "limits are kept instead of none")


@limiting.with_fixtures(open_limiting)
async def one_of_many_takes_a_turn(store: ClaimingStore, limits: LimitingStore) -> None:
    """Who has seen what is kept moves its time on; who has seen what was kept before does not."""
    await limits.store_limits("q", "limits", NOW)
    (stored,) = await limits.load_limits()
    expect_equal([await limits.reserve_slots(stored, NOW + n * MICROSECOND) for n in (1, 2)], [True, False], "turns")
    (stored,) = await limits.load_limits()
    expect_equal(stored.free_at, NOW + MICROSECOND, "the time of the next")
    await limits.store_limits("q", "others", NOW + MICROSECOND, "limits")
    expect(not await limits.reserve_slots(stored, NOW + SECOND), "no turn is taken by limits of before")


@limiting.with_fixtures(open_limiting)
async def what_is_held_is_claimed_by_its_lane_alone(store: ClaimingStore, limits: LimitingStore) -> None:
    """The first due first, whatever the order of storing, by one claim each; others do not see it, but for counts."""
    for name in ("q", "other"):
        await limits.store_limits(name, "limits", NOW)
    stored = {each.destination: each for each in await limits.load_limits()}
    dues = {"m-1": NOW, "m-2": NOW - timedelta(days=1), "m-3": NOW - timedelta(days=9)}
    await store.store_many([message(id_, due, destination="q") for id_, due in dues.items()], NOW)
    for claim in await store.claim_due(NOW + SECOND, 10):
        await store.release([claim], stored["q"].attempt_time(claim.message.due))
    expect_equal(ids(await store.claim_due(NOW + timedelta(days=365_000), 10)), [], "claims of what is due")
    expect_equal(ids(await limits.claim_lane(stored["other"], NOW, 10)), [], "claims of another lane")
    if isinstance(store, AdministrableStore):
        statistics = await store.statistics(NOW + SECOND)
        expect_equal(
            (statistics.overdue, statistics.next_due), (3, min(dues.values())), "how many are overdue, and the first"
        )
        days = [NOW.replace(microsecond=0) + timedelta(days=n) for n in (-10, -5, 1)]
        expect_equal(list(await store.due_counts(days)), [1, 2], "how many are due by interval")
    claimed = await limits.claim_lane(stored["q"], NOW, 2)
    expect_equal(sorted(ids(claimed)), ["m-2", "m-3"], "claims of the first two")
    expect_equal(ids(await limits.claim_lane(stored["q"], NOW, 10)), ["m-1"], "claims of the rest")
    await store.release([each for each in claimed if each.message.message_id == "m-3"], NOW)
    expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), ["m-3"], "claims of what was let go")
    expect_equal(await store.finish(claimed, Outcome.DELIVERED, NOW), 1, "how many are still held")


@asynccontextmanager
async def _open_damaged(subject: StoreSubject) -> AsyncGenerator[tuple[ClaimingStore, LimitingStore, Rows] | None]:
    async with open_with_rows(subject) as store_with_rows:
        yield (
            (store_with_rows[0], store_with_rows[0], store_with_rows[1])
            if store_with_rows is not None and isinstance(store_with_rows[0], LimitingStore)
            else None
        )


@limiting.with_fixtures(_open_damaged)
async def what_is_held_and_cannot_be_read_keeps_its_due_time(
    store: ClaimingStore, limits: LimitingStore, rows: Rows
) -> None:
    """It is marked at the time of the look, and recorded with its due time, not with that of its lane."""
    await limits.store_limits(QUEUE, "limits", NOW)
    (stored,) = await limits.load_limits()
    due, id_ = NOW - timedelta(days=1), damaged_id(Damage.HEADERS)
    await store.store(message(id_, due), NOW)
    await store.release(await store.claim_due(NOW, 1), stored.attempt_time(due))
    rows.damage(id_, Damage.HEADERS)
    expect_equal(ids(await limits.claim_lane(stored, NOW, 10)), [], "claims of a damaged message")
    if isinstance(store, AdministrableStore):
        record = (await store.history(id_))[-1]
        expect_equal((record.kind, record.at, record.due), (RecordKind.FAILED, NOW, due), "the record of that")
    expect_equal((await rows.find_row(Damage.HEADERS)).at, NOW, "when it was marked")


@limiting.with_fixtures(open_beside_queues)
async def no_move_takes_what_is_limited(store: MovingStore, transport: Transport) -> None:
    """It is left behind, to be claimed; when the limits are lifted it moves."""
    if not isinstance(store, LimitingStore):
        return
    await store.store_limits(QUEUE, "limits", NOW)
    await store.store_many([message("m-1"), message("m-2", NOW + MICROSECOND)], NOW)
    report = await store.move_due(NOW + SECOND, 10)
    expect_equal((report.delivered, report.needs_claim), (0, True), "moved, and whether something is left behind")
    (claim,) = await store.claim_due(NOW + SECOND, 1)
    (stored,) = await store.load_limits()
    await store.release([claim], stored.attempt_time(NOW))
    await store.store_limits(QUEUE, "", NOW, "limits")
    expect_equal((await store.move_due(NOW + SECOND, 10)).delivered, 1, "moved of what was not held")
    expect_equal(ids(await store.claim_lane(stored, NOW, 10)), ["m-1"], "what is held still")
