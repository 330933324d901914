"""Checks of the six methods of a user's own store (docs/specification-rows.md, rows 18 to 25)."""

from __future__ import annotations

from dataclasses import fields, replace

from postdate.ports import DelayedMessageStore, capabilities_of
from postdate.testing.conformance import Topic, expect, expect_equal
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    SECOND,
    StoreSubject,
    expect_history,
    message,
    open_prepared,
)

contract: Topic[StoreSubject] = Topic("contract")


@contract.with_fixture(open_prepared)
async def oldest_due_first(store: DelayedMessageStore) -> None:
    """Of messages due 3 s ago, 1 s ago and in 1 s, the one due 3 s ago is fetched first, the last one not (row 18)."""
    for offset in (1, -3, -1):
        await store.store(message(f"{offset}", NOW + offset * SECOND), NOW)
    fetched = [await store.fetch_next_due(NOW) for _ in range(3)]
    expect_equal([each and each.message_id for each in fetched], ["-3", "-1", None], "fetched ids")


@contract.with_fixture(open_prepared)
async def due_is_compared_strictly(store: DelayedMessageStore) -> None:
    """A message due at the very instant asked for is not fetched; one microsecond later it is (row 19)."""
    await store.store(message(), NOW)
    expect(await store.fetch_next_due(NOW) is None, "nothing is fetched at its due time")
    step = max(MICROSECOND, capabilities_of(store).time_precision)
    expect(await store.fetch_next_due(NOW + step) is not None, "it is fetched one step later")


@contract.with_fixture(open_prepared)
async def nothing_is_fetched_early(store: DelayedMessageStore) -> None:
    """With only future messages nothing is fetched (row 20)."""
    await store.store(message(due=NOW + MICROSECOND), NOW)
    await store.store(message("m-2", due=NOW + 1000 * SECOND), NOW)
    expect(await store.fetch_next_due(NOW) is None, "nothing is fetched before its due time")


@contract.with_fixture(open_prepared)
async def next_due_is_the_earliest(store: DelayedMessageStore) -> None:
    """The earliest due time, overdue and fetched messages included; none on an empty store (row 21)."""
    expect_equal(await store.next_due(), None, "next due of an empty store")
    await store.store(message("later", NOW + SECOND), NOW)
    await store.store(message("overdue", NOW - SECOND), NOW)
    expect_equal(await store.next_due(), NOW - SECOND, "next due")
    await store.fetch_next_due(NOW)
    expect_equal(await store.next_due(), NOW - SECOND, "next due with the earliest message fetched")
    await store.remove("overdue", NOW)
    expect_equal(await store.next_due(), NOW + SECOND, "next due with the earliest message removed")


@contract.with_fixture(open_prepared)
async def remove_says_whether_it_was_there(store: DelayedMessageStore) -> None:
    """The first remove is true, the second false, that of an unknown id false (row 22)."""
    await store.store(message(), NOW)
    await store.fetch_next_due(NOW + SECOND)
    removed = [await store.remove(id_, NOW) for id_ in ("m-1", "m-1", "unknown")]
    expect_equal(removed, [True, False, False], "results of remove")
    expect_equal(await store.next_due(), None, "next due after remove")


@contract.with_fixture(open_prepared)
async def increment_says_whether_it_was_there(store: DelayedMessageStore) -> None:
    """Counting a failure is true and the count grows by one; after removal, and of an unknown id, false (row 23)."""
    await store.store(message(), NOW)
    for expected in range(3):
        fetched = await store.fetch_next_due(NOW + SECOND)
        expect_equal(fetched and fetched.number_of_failures, expected, "number of failures")
        expect(await store.increment_failure_count("m-1", NOW), "counting a failure of a fetched message is true")
    await store.remove("m-1", NOW)
    expect(not await store.increment_failure_count("m-1", NOW), "counting a failure of a removed message is false")
    expect(not await store.increment_failure_count("unknown", NOW), "counting a failure of an unknown id is false")


@contract.with_fixture(open_prepared)
async def a_fetched_message_is_hidden(store: DelayedMessageStore) -> None:
    """The second fetch passes over the message of the first and returns the next one, then none (row 24)."""
    await store.store(message("first", NOW - 2 * SECOND), NOW)
    await store.store(message("second", NOW - SECOND), NOW)
    fetched = [await store.fetch_next_due(NOW) for _ in range(3)]
    expect_equal([each and each.message_id for each in fetched], ["first", "second", None], "fetched ids")


@contract.with_fixture(open_prepared)
async def a_failed_message_is_fetched_again_unchanged(store: DelayedMessageStore) -> None:
    """After a counted failure the message can be fetched again, all else unchanged (row 25)."""
    await store.store(message(expires_at=NOW + SECOND), NOW)
    before = await store.fetch_next_due(NOW + SECOND)
    await store.increment_failure_count("m-1", NOW)
    after = await store.fetch_next_due(NOW + SECOND)
    expect(before is not None and after is not None, "the message is fetched before and after its failure")
    assert before is not None
    assert after is not None
    expected = replace(before, number_of_failures=1)
    for field in fields(expected):
        expect_equal(getattr(after, field.name), getattr(expected, field.name), f"{field.name} after a failure")


@contract.with_fixture(open_prepared)
async def remove_is_a_delivery(store: DelayedMessageStore) -> None:
    """A message that ``remove`` removes was delivered, and is recorded so where records are kept."""
    await store.store(message(), NOW)
    await store.fetch_next_due(NOW + SECOND)
    await store.remove("m-1", NOW + SECOND)
    await expect_history(store, "m-1", "SCHEDULED", "DELIVERED")
