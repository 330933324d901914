"""Checks that messages come back unchanged, once, or were refused."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime, timedelta, timezone
from functools import partial

import anyio
from anyio import to_thread

from postdate.core.receive.settling import is_stored
from postdate.errors import DuplicateMessage, MessageTooLarge, PostdateError
from postdate.messages import DelayedMessage, Headers, encode_headers, format_timestamp
from postdate.ports import AdministrableStore, ClaimingStore, Outcome, RecordKind, capabilities_of
from postdate.ports.scanning import ScannableStore
from postdate.testing.conformance import ConformanceFailure, Topic, expect, expect_equal, expect_error
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
    open_claiming,
    open_columnar,
    open_prepared,
    store_and_claim_one,
)

storing: Topic[StoreSubject] = Topic("storing")


async def _expect_unchanged(store: ClaimingStore, stored: DelayedMessage, *, is_there: bool = False) -> None:
    if not is_there:
        await store.store(stored, NOW)
    claimed = (await claim_one(store, stored.due + MICROSECOND)).message
    for field in fields(stored):
        expect_equal(getattr(claimed, field.name), getattr(stored, field.name), f"{field.name} of a stored message")


@storing.with_fixture(open_claiming)
async def a_message_is_unchanged(store: ClaimingStore) -> None:
    """Id, destination, due time, headers, body and expiry come back as they were, with no failures (row 16)."""
    await _expect_unchanged(
        store, message(headers={"a": "1", "b": ""}, body=bytes(range(256)), expires_at=NOW + SECOND)
    )


@storing.with_fixture(open_claiming)
async def failures_start_at_zero(store: ClaimingStore) -> None:
    """A message arrives with the failures of its former life; in the store it begins with none."""
    await store.store(DelayedMessage("m-1", NOW, "queue", number_of_failures=7), NOW)
    expect_equal((await claim_one(store)).message.number_of_failures, 0, "failures of a new message")


@storing.with_fixture(open_claiming)
async def unicode_survives(store: ClaimingStore) -> None:
    """Ids, destinations and headers in any script, emoji included, come back unchanged (row 10)."""
    stored = message(
        "отправка-🕰️-\u0301",
        destination="очередь.配達.📮",
        headers={"ключ 🔑": "значение", "naïve": "e\u0301≠é", "emoji": "👩\u200d🚀", "space": " \t\r\n", "empty": ""},
    )
    await _expect_unchanged(store, stored)


@storing.with_fixture(open_claiming)
async def an_empty_body_and_no_headers_survive(store: ClaimingStore) -> None:
    """An empty body comes back empty, and no headers as none."""
    await _expect_unchanged(store, DelayedMessage("m-1", NOW, "queue", {}, b""))


@storing.with_fixture(open_claiming)
async def a_large_body_survives(store: ClaimingStore) -> None:
    """A body of one megabyte, or as large as the store takes, comes back byte for byte."""
    free_bytes = store.capabilities.largest_message_bytes - len(encode_headers(message().headers).encode())
    await _expect_unchanged(store, message(body=(bytes(range(256)) * 4096)[:free_bytes]))


@storing.with_fixture(open_claiming)
async def microseconds_survive(store: ClaimingStore) -> None:
    """Due times and expiries are kept to the declared precision and never rounded to an earlier instant."""
    precision = store.capabilities.time_precision
    stored = message(due=NOW + MICROSECOND, expires_at=NOW + 3 * MICROSECOND)
    await store.store(stored, NOW)
    claimed = (await claim_one(store, stored.due + precision)).message
    expect(stored.due <= claimed.due < stored.due + precision, f"{stored.due} came back as {claimed.due}")
    assert stored.expires_at is not None
    expect(claimed.expires_at is not None, "the expiry comes back")
    assert claimed.expires_at is not None
    expect(stored.expires_at <= claimed.expires_at < stored.expires_at + precision, f"expiry {claimed.expires_at}")


@storing.with_fixture(open_claiming)
async def far_due_times_survive(store: ClaimingStore) -> None:
    """Due times of other centuries are kept as they are."""
    years = (1900, 1969, 1970, 2100, 9998)
    for year in years:
        await store.store(message(str(year), NOW.replace(year=year)), NOW)
    claims = await store.claim_due(NOW.replace(year=9999), 10)
    expect_equal([claim.message.due.year for claim in claims], list(years), "years of due times")


@storing.with_fixture(open_claiming)
async def due_times_are_instants(store: ClaimingStore) -> None:
    """A due time given in another time zone is the same instant and comes back in UTC."""
    await store.store(message(due=NOW.astimezone(timezone(timedelta(hours=13, minutes=45)))), NOW)
    due = (await claim_one(store)).message.due
    expect_equal((due, due.utcoffset()), (NOW, timedelta(0)), "due time and offset")


@storing.with_fixture(open_claiming)
async def of_many_at_once_each_id_is_stored_once(store: ClaimingStore) -> None:
    """Of messages that many tasks store at a time, one of each id is stored, and all others are duplicates (row 17)."""
    duplicates = list[str]()

    async def keep(id_: str) -> None:
        try:
            await store.store(message(id_), NOW)
        except DuplicateMessage:
            duplicates.append(id_)

    async with anyio.create_task_group() as tasks:
        for n in range(30):
            tasks.start_soon(keep, f"m-{n % 20}")
    expect_equal(sorted(duplicates), sorted(f"m-{n}" for n in range(10)), "ids that were there already")
    claims = await store.claim_due(NOW + SECOND, 100)
    expect_equal(sorted(ids(claims)), sorted(f"m-{n}" for n in range(20)), "stored messages")


@storing.with_fixture(open_claiming)
async def a_duplicate_is_refused(store: ClaimingStore) -> None:
    """Storing an id twice raises DuplicateMessage; the first message is unchanged (row 17)."""
    first = message(body=b"first")
    await store.store(first, NOW)
    with expect_error(DuplicateMessage, "storing an id twice"):
        await store.store(message(due=NOW - SECOND, body=b"second"), NOW)
    await _expect_unchanged(store, first, is_there=True)


@storing.with_fixture(open_claiming)
async def a_duplicate_is_refused_after_delivery(store: ClaimingStore) -> None:
    """While records are kept an id stays taken: a late copy of a delivered message is not delivered again."""
    await store.finish([await store_and_claim_one(store)], Outcome.DELIVERED, NOW)
    with expect_error(DuplicateMessage, "storing the id of a delivered message"):
        await store.store(message(), NOW)


@storing
async def a_repetition_is_told_from_another_message(subject: StoreSubject) -> None:
    """A pending message is the same if its content is, one that has left if due time and destination are."""
    async with open_claiming(subject) as store:
        if not isinstance(store, AdministrableStore):
            return
        expect(not await is_stored(store, message()), "nothing is known of an id that was never used")
        await store.store(message(), NOW)
        expect(await is_stored(store, message(due=NOW + SECOND)), "a message that waits is known, sent again later")
        for other in (message(body=b"other"), message(headers={"kind": "other"}), message(destination="other")):
            with expect_error(DuplicateMessage, "another message under the id of one that waits"):
                await is_stored(store, other)
        await store.finish([await claim_one(store)], Outcome.DELIVERED, NOW)
        expect(await is_stored(store, message()), "a message that was delivered is known")
        for other in (message(due=NOW + SECOND), message(destination="other"), _repeated_message(since=NOW + SECOND)):
            with expect_error(DuplicateMessage, "another message under the id of one that was delivered"):
                await is_stored(store, other)
        expect(await is_stored(store, _repeated_message(since=NOW)), "what was scheduled since then is known")
        await store.store(message("m-2"), NOW)
        await store.finish([await claim_one(store)], Outcome.FAILED, NOW)
        expect(not await is_stored(store, message("m-2", due=NOW + SECOND)), "what failed may come back")


def _repeated_message(since: datetime) -> DelayedMessage:
    return message(due=NOW + SECOND, headers={Headers.MAY_REPEAT_SINCE: format_timestamp(since)})


@storing.with_fixture(open_claiming)
async def a_failed_message_may_come_back(store: ClaimingStore) -> None:
    """A message that went to the error queue may be stored again under its id; one that was delivered may not."""
    for number in range(3):
        await store.store(message(body=b"%d" % number), NOW)
        with expect_error(DuplicateMessage, "storing the id again while it waits"):
            await store.store(message(), NOW)
        claim = await claim_one(store)
        expect_equal((claim.message.body, claim.message.number_of_failures), (b"%d" % number, 0), "what came back")
        outcome = Outcome.FAILED if number < 2 else Outcome.DELIVERED
        expect_equal(await store.finish([claim], outcome, NOW), 1, "finished")
    with expect_error(DuplicateMessage, "storing the id of a message delivered after it had failed"):
        await store.store(message(), NOW)
    await expect_history(store, "m-1", "SCHEDULED", *["FAILED", "RESCHEDULED"] * 2, "DELIVERED")


@storing.with_fixture(open_claiming)
async def a_race_for_one_id_has_one_winner(store: ClaimingStore) -> None:
    """Of ten stores of one id at the same time one succeeds and nine raise DuplicateMessage."""
    won: list[int] = []

    async def contend(number: int) -> None:
        try:
            await store.store(message(body=b"%d" % number), NOW)
        except DuplicateMessage:
            return
        won.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(contend, number)
    expect_equal(len(won), 1, "winners")
    expect_equal((await claim_one(store)).message.body, b"%d" % won[0], "body of the winner")


@storing.with_fixture(open_claiming)
async def a_batch_is_idempotent(store: ClaimingStore) -> None:
    """Storing a batch again stores new messages, reports the rest in order, and changes nothing that was there."""
    report = await store.store_many([message(f"m-{number}", body=b"first") for number in range(3)], NOW)
    expect_equal((report.stored, tuple(report.duplicate_ids)), (3, ()), "report of a new batch")
    report = await store.store_many([message(f"m-{number}", body=b"again") for number in (2, 3, 0)], NOW)
    expect_equal((report.stored, tuple(report.duplicate_ids)), (1, ("m-2", "m-0")), "report of a repeated batch")
    bodies = {claim.message.message_id: claim.message.body for claim in await store.claim_due(NOW + SECOND, 10)}
    expect_equal(bodies, {"m-0": b"first", "m-1": b"first", "m-2": b"first", "m-3": b"again"}, "bodies")


@storing.with_fixture(open_claiming)
async def an_id_twice_in_a_batch_counts_once(store: ClaimingStore) -> None:
    """The first of two messages with one id in one batch is stored, the second is reported."""
    report = await store.store_many([message("a", body=b"first"), message("b"), message("a", body=b"second")], NOW)
    expect_equal((report.stored, tuple(report.duplicate_ids)), (2, ("a",)), "report")
    bodies = {claim.message.message_id: claim.message.body for claim in await store.claim_due(NOW + SECOND, 10)}
    expect_equal(bodies, {"a": b"first", "b": b"body"}, "bodies")


@storing.with_fixture(open_claiming)
async def an_empty_batch_is_nothing(store: ClaimingStore) -> None:
    """An empty batch is stored without effect."""
    report = await store.store_many([], NOW)
    expect_equal((report.stored, tuple(report.duplicate_ids)), (0, ()), "report")
    expect_equal(await store.next_due(), None, "next due")


@storing.with_fixture(partial(open_claiming, largest_message_bytes=1_000))
async def too_large_is_refused(store: ClaimingStore) -> None:
    """A message over the declared limit raises MessageTooLarge and nothing is stored; one at the limit is stored."""
    headers = {"h": "value"}
    overhead = len(encode_headers(headers).encode())
    limit = store.capabilities.largest_message_bytes
    with expect_error(MessageTooLarge, "a body over the limit"):
        await store.store(message(headers=headers, body=b"x" * (limit - overhead + 1)), NOW)
    expect_equal(await store.next_due(), None, "next due after a refused message")
    await store.store(message(headers=headers, body=b"x" * (limit - overhead)), NOW)


@storing.with_fixture(partial(open_claiming, largest_message_bytes=1_000))
async def the_limit_counts_bytes(store: ClaimingStore) -> None:
    """Headers count in bytes, not in characters: an emoji is four of them."""
    with expect_error(MessageTooLarge, "headers of 1,200 bytes in 300 characters"):
        await store.store(message(headers={"h": "🕰" * 300}, body=b""), NOW)


@storing.with_fixture(partial(open_claiming, largest_message_bytes=1_000))
async def a_batch_with_one_too_large_is_refused_whole(store: ClaimingStore) -> None:
    """One message over the limit, and nothing of its batch is stored."""
    batch = [message("fits"), message("large", body=b"x" * 1_000)]
    with expect_error(MessageTooLarge, "a batch with one message over the limit"):
        await store.store_many(batch, NOW)
    expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "stored messages")


@storing
async def what_a_store_says_of_itself_blames_no_message(subject: StoreSubject) -> None:
    """A read-only or full store refuses with an error that is an outage; afterwards it stores the same message."""
    async with open_claiming(subject) as store:
        for name, refusing in subject.refusals(store).items():
            refused = message(name, body=bytes(200_000))
            with refusing:
                for do in (partial(store.store, refused, NOW), partial(store.store_many, [refused], NOW)):
                    try:
                        await do()
                    except PostdateError as error:
                        expect(error.outage, f"{name} is an outage, not {type(error).__name__}: {error}")
                    else:
                        raise ConformanceFailure(f"{name}: nothing was raised by {do}")
            await store.store(refused, NOW)


@storing
async def what_is_stored_survives_closing(subject: StoreSubject) -> None:
    """A durable store still has the message after it was closed and opened again; one that is not durable has not."""
    async with open_prepared(subject) as store:
        durable = capabilities_of(store).durable
        await store.store(message(), NOW)
    async with open_prepared(subject) as store:
        claims = await claiming_store_of(store).claim_due(NOW + SECOND, 10)
        expect_equal(ids(claims), ["m-1"] if durable else [], f"messages after reopening (durable={durable})")


@storing.with_fixtures(open_columnar)
async def columns_are_stored_as_messages_are(store: ClaimingStore, columns: ScannableStore) -> None:
    """A batch of columns is stored as the same messages are: once, unchanged, with the record, and others may claim."""
    from postdate.testing.store_suite.columns import message_batch

    async def store_all(messages: list[DelayedMessage]) -> tuple[int, tuple[str, ...]]:
        report = await to_thread.run_sync(columns.store_columns, message_batch(messages), NOW)
        return report.stored, tuple(report.duplicate_ids)

    expect_equal(await store_all([]), (0, ()), "report of an empty batch")
    await store.store(message("m-0", body=b"first"), NOW)
    await store_all([message("other", NOW + 2 * SECOND)])  # a store may remember that this batch had no repeated id
    for attempt in range(2):
        first = [
            message(f"a-{attempt}", headers={"ключ 🔑": '"\\\n\0', "b": ""}, expires_at=NOW + SECOND + MICROSECOND),
            message(f"b-{attempt}", NOW - MICROSECOND, destination="очередь.配達", body=bytes(range(256))),
            DelayedMessage(f"c-{attempt}", NOW.replace(year=1900), "queue", {}, b""),
        ]
        batch = [first[0], message("m-0", body=b"again"), *first[1:], message(f"a-{attempt}", body=b"again")]
        expect_equal(await store_all(batch), (3, ("m-0", f"a-{attempt}")), "report of a batch with known ids")
        batch_ids = tuple(each.message_id for each in batch)
        expect_equal(await store_all(batch), (0, batch_ids), "report of a batch that was stored before")
        for each in first:
            if isinstance(store, AdministrableStore):
                (record,) = await store.history(each.message_id)
                expected = (RecordKind.SCHEDULED, NOW, each.due, each.destination)
                expect_equal((record.kind, record.at, record.due, record.destination), expected, "record")
        claims = {claim.message.message_id: claim for claim in await store.claim_due(NOW + SECOND, 10)}
        expect_equal([claims[each.message_id].message for each in first], first, "messages that were stored as columns")
        if not attempt:
            expect_equal(claims["m-0"].message.body, b"first", "body of what was there")
        await store.finish(list(claims.values()), Outcome.DELIVERED, NOW)
        expect_equal(await store_all(batch), (0, batch_ids), "report of a batch that was delivered")
    expect_equal(await store.next_due(), NOW + 2 * SECOND, "next due")
