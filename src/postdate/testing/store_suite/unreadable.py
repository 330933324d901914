"""Checks that unreadable rows are marked, one by one, and do not delay anything else (ADR 0043)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest import mock

from postdate import ports
from postdate.errors import DuplicateMessage
from postdate.testing.conformance import expect, expect_equal, expect_error, expect_in_time
from postdate.testing.damaged import GOOD, Rows, damaged_id, rows_of
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    QUEUE,
    SECOND,
    StoreSubject,
    claim_one,
    expect_history,
    ids,
    message,
    open_beside_queues,
    open_claiming,
    open_with_rows,
)
from postdate.testing.unreadable import BODY, DamagedSource, unreadable_topic

_CLAIM_LIMIT = 7


@asynccontextmanager
async def _open_source(subject: StoreSubject) -> AsyncGenerator[DamagedSource | None]:
    async with open_with_rows(subject) as store_with_rows:
        if store_with_rows is None:
            yield None
            return
        store, rows = store_with_rows

        async def add(message_ids: Sequence[str]) -> None:
            dues = (NOW + number * MICROSECOND for number in range(len(message_ids)))
            await store.store_many([message(*each, body=BODY) for each in zip(message_ids, dues, strict=True)], NOW)

        async def fetch() -> list[str]:
            claimed = list[str]()
            while claims := await store.claim_due(NOW + SECOND, _CLAIM_LIMIT):  # empty only when no message is left
                claimed += ids(claims)
                expect_equal(await store.finish(claims, ports.Outcome.DELIVERED, NOW), len(claims), "finished")
            expect_equal(await store.next_attempt(), None, "next attempt with nothing left that can be read")
            return claimed

        yield DamagedSource(rows, "", add, fetch)


unreadable = unreadable_topic(_open_source)


async def _store_with_damage(store: ports.ClaimingStore, rows: Rows) -> None:
    """Store fifty good messages, and one for each kind of damage among them; the oldest message is a damaged one."""
    damaged = [
        message(damaged_id(damage), NOW + 7 * number * MICROSECOND) for number, damage in enumerate(rows.damages)
    ]
    good = [message(id_, NOW + number * MICROSECOND) for number, id_ in enumerate(GOOD, 1)]
    await store.store_many([*damaged, *good], NOW)
    for damage in rows.damages:
        rows.damage(damaged_id(damage), damage)


@asynccontextmanager
async def _open_moving(subject: StoreSubject) -> AsyncGenerator[tuple[ports.MovingStore, ports.Transport, Rows] | None]:
    async with open_beside_queues(subject) as adapters:
        rows = adapters and rows_of(adapters[0], subject.damages())
        yield adapters and rows and (*adapters, rows)


@unreadable.with_fixtures(_open_moving)
async def a_move_loses_nothing_that_is_unreadable(
    store: ports.MovingStore, transport: ports.Transport, rows: Rows
) -> None:
    """Moving: the others arrive in their order, and each damaged message is marked, here or in its queue."""
    await _store_with_damage(store, rows)
    for _ in range(len(GOOD) + len(rows.damages)):  # enough moves, even if each moves only one message
        await store.move_due(NOW + SECOND, _CLAIM_LIMIT)
    expect_equal(ids(await store.claim_due(NOW + SECOND, 100)), [], "claims of what could not be moved")
    receiver, received = transport.receiver(QUEUE), list[str]()
    with expect_in_time("receiving what was moved beside damaged messages"):
        while len(received) < len(GOOD):
            received += [each.envelope.message_id for each in await receiver.receive(100)]
    await receiver.close()
    expect_equal(received, GOOD, "moved beside damaged messages")
    marked = [each.message_id for each in await rows.adapter.list_unreadable(100)]
    in_queues = rows_of(transport, rows.damages)
    if in_queues is not None:
        marked += [each.message_id for each in await in_queues.adapter.list_unreadable(100)]
    expect_equal(sorted(marked), sorted(damaged_id(damage) for damage in rows.damages), "unreadable rows")
    expect_equal(await store.next_attempt(), None, "next attempt with nothing left")


@unreadable.with_fixtures(open_with_rows)
async def the_oldest_that_can_be_read_is_fetched(store: ports.ClaimingStore, rows: Rows) -> None:
    """One is asked for, and the oldest cannot be read: the next one is fetched."""
    await _store_with_damage(store, rows)
    fetched = await store.fetch_next_due(NOW + SECOND)
    expect_equal(fetched and fetched.message_id, GOOD[0], "fetched beside damaged messages")


@unreadable.with_fixtures(open_with_rows)
async def an_operator_sees_the_others(store: ports.ClaimingStore, rows: Rows) -> None:
    """Questions about pending messages are answered as if the damaged ones were not there."""
    if not isinstance(store, ports.AdministrableStore):
        return
    await _store_with_damage(store, rows)
    await store.next_due()
    await store.next_attempt()
    await store.statistics(NOW)
    expect_equal(ids(await store.list_pending(ports.MessageFilter(), 1000)), GOOD, "pending messages")
    for damage in rows.damages:
        expect_equal(await store.get(damaged_id(damage)), None, "a damaged message, asked for by its id")
    one = await store.get(GOOD[0])
    expect_equal(one and one.message_id, GOOD[0], "a good message, asked for by its id")


@unreadable.with_fixtures(open_with_rows)
async def unreadable_messages_do_not_end_a_list(store: ports.ClaimingStore, rows: Rows) -> None:
    """In pages of one, the first of which has none that can be read."""
    if not isinstance(store, ports.AdministrableStore):
        return
    await _store_with_damage(store, rows)
    listed, where = list[str](), ports.MessageFilter()
    for _ in range(len(GOOD) + len(rows.damages) + 1):
        page = await store.read_pending(where, 1)
        listed += ids(page.messages)
        where = replace(where, after=page.after)
        if page.after is None:
            break
    expect_equal(listed, GOOD, "good messages, in pages of one")


@unreadable.with_fixtures(open_with_rows)
async def an_unreadable_message_does_not_wait(store: ports.ClaimingStore, rows: Rows) -> None:
    """It is recorded as failed, and neither cancelled, rescheduled, removed nor stored again, until it is discarded."""
    for damage in rows.damages:
        id_ = damaged_id(damage)
        await store.store(message(id_), NOW)
        rows.damage(id_, damage)
        expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "claims of a damaged message")
        expect(not await store.remove(id_, NOW), "an unreadable message is not removed")
        expect(not await store.increment_failure_count(id_, NOW), "no failure of an unreadable message is counted")
        with expect_error(DuplicateMessage, "storing the id of an unreadable message"):
            await store.store(message(id_), NOW)
        if not isinstance(store, ports.AdministrableStore):
            continue
        expect(not await store.cancel(id_, NOW), "an unreadable message is not cancelled")
        expect(not await store.reschedule(id_, NOW + SECOND, NOW), "an unreadable message is not rescheduled")
        await expect_history(store, id_, "SCHEDULED", "FAILED")
        why = (await store.history(id_))[-1].detail
        expect(why.startswith("unreadable: "), f"it says why, not {why!r}")
        await rows.adapter.discard_unreadable((await rows.find_row(damage)).number, NOW)
        await expect_history(store, id_, "SCHEDULED", "FAILED", "DISCARDED")


@unreadable.with_fixtures(open_with_rows)
async def unreadable_messages_are_counted_alone(store: ports.ClaimingStore, rows: Rows) -> None:
    """Beside the others, in every count of what waits, and by when it is due."""
    if not isinstance(store, ports.AdministrableStore):
        return
    await _store_with_damage(store, rows)
    await store.release(await store.claim_due(NOW + SECOND, 100), None)
    counts = await store.statistics(NOW + SECOND)
    expect_equal((counts.pending, counts.overdue), (len(GOOD), len(GOOD)), "messages that wait, and are overdue")
    expect_equal((counts.claimed, counts.failing), (0, 0), "messages that are claimed, and fail")
    expect_equal(counts.unreadable, len(rows.damages), "unreadable rows")
    expect_equal(counts.next_due, NOW + MICROSECOND, "the first due time")
    expect_equal(await store.next_due(), NOW + MICROSECOND, "the first due time, asked for alone")
    second = NOW.replace(microsecond=0)
    expect_equal(list(await store.due_counts([second, second + 2 * SECOND])), [len(GOOD)], "due within two seconds")


@unreadable
async def what_no_queue_takes_is_marked(subject: StoreSubject) -> None:
    """By the holder of its claim only: its bytes and the reason are kept, and nothing claims it."""
    async with open_claiming(subject) as store:
        rows = rows_of(store, subject.damages())
        await store.store_many([message("large", NOW - SECOND, body=BODY), message("other")], NOW)
        released, other = await store.claim_due(NOW + SECOND, 10)
        await store.release([released], None)
        expect(not await store.mark_unreadable(released, "too large", NOW), "a claim that was released marks nothing")
        claim = await claim_one(store)
        done = await store.mark_unreadable(claim, "too large", NOW)
        expect_equal(done, rows is not None, "marked, by a store that has UnreadableRows")
        if rows is None:
            return
        expect(not await store.mark_unreadable(claim, "too large", NOW), "nothing is marked twice")
        await store.finish([other], ports.Outcome.DELIVERED, NOW)
        expect_equal(await store.next_attempt(), None, "next attempt")
        expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "claims of what is marked")
        (row,) = await rows.adapter.list_unreadable(10)
        expect_equal((row.message_id, row.reason), ("large", "too large"), "the row that is marked")
        expect(BODY in row.raw.values(), f"the body is kept, got {sorted(row.raw)}")
        if isinstance(store, ports.AdministrableStore):
            record = (await store.history("large"))[-1]
            expect_equal((record.kind, record.detail), (ports.RecordKind.FAILED, "unreadable: too large"), "its record")


@unreadable
async def tightened_limits_refuse_nothing_that_is_stored(subject: StoreSubject) -> None:
    """Messages stored under wider limits are claimed and listed unchanged: only new ones are checked."""
    stored = message("a-long-id" * 20, destination="a-long-destination" * 5, body=b"b" * 5_000)
    async with open_claiming(subject) as store:
        await store.store(stored, NOW)
    with mock.patch.multiple("postdate.messages.message", MESSAGE_ID_LIMIT=5, DESTINATION_LIMIT=5):
        async with open_claiming(subject, largest_message_bytes=1_000) as store:
            if not store.capabilities.durable:
                return
            if isinstance(store, ports.AdministrableStore):
                expect_equal(await store.list_pending(ports.MessageFilter(), 10), [stored], "pending messages")
                expect_equal(await store.get(stored.message_id), stored, "the message by its id")
            expect_equal((await claim_one(store)).message, stored, "the message as it is claimed")
