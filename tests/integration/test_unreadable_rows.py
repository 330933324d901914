"""Damaged rows of an SQLite file, met by whatever reads them; damaged by hand, as no program of ours writes them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.waiting import patience

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Envelope,
    LocalTransport,
    MemoryTransport,
    SqliteStore,
    SystemClock,
    TransactionMode,
)
from postdate.backends.sqlite.housekeeping import DEAD_LETTERS
from postdate.backends.sqlite.observation import FileObserver
from postdate.errors import MessageNotFound, StoreError
from postdate.ports import ExpiryRules, MessageFilter, RecordKind, Scan
from postdate.testing import VirtualClock

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


class OneFile:
    """Store and queues in one file, and a hand that damages rows in it."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.path = path
        self.store = SqliteStore(path)
        self.transport = LocalTransport(path, **settings)  # type: ignore[arg-type]

    def damage(self, sql: str) -> None:
        with closing(sqlite3.connect(self.path)) as file, file:
            assert file.execute(sql).rowcount, "nothing was damaged"

    def contents(self) -> list[tuple[str, str, str]]:
        with closing(sqlite3.connect(self.path)) as file:
            return file.execute("SELECT typeof(headers), hex(headers), hex(body) FROM content ORDER BY seq").fetchall()

    async def close(self) -> None:
        await self.store.close()
        await self.transport.close()


@pytest.fixture
async def one_file(tmp_path: Path) -> AsyncGenerator[OneFile]:
    one_file = OneFile(tmp_path / "one.db")
    await one_file.transport.create_queues(["q"])
    yield one_file
    await one_file.close()


def messages(count: int) -> list[DelayedMessage]:
    return [DelayedMessage(f"m-{n}", NOW + timedelta(microseconds=n), "q", {"a": "b"}, b"x") for n in range(count)]


HEADERS = 'UPDATE content SET headers = \'{"a": "b\' WHERE seq = {}'
DAMAGES = {
    "headers that are no JSON": [HEADERS],
    "headers that are no UTF-8": ["UPDATE content SET headers = CAST(X'7BFF7D' AS TEXT) WHERE seq = {}"],
    "headers that are no text": ["UPDATE content SET headers = 7 WHERE seq = {}"],
    "a body that is no bytes": ["UPDATE content SET body = 'text' WHERE seq = {}"],
    "content that is gone": ["DELETE FROM content WHERE seq = {}"],
    "an id that is no UTF-8": ["UPDATE TABLE SET message_id = CAST(X'6DFF' AS TEXT) WHERE content = {}"],
    "a due time after the calendar": ["UPDATE TABLE SET due = 9223372036854775807 WHERE content = {}"],
    "a due time that is no number": ["UPDATE TABLE SET due = 'soon' WHERE content = {}"],
    "an expiry before the calendar": ["UPDATE TABLE SET expires_at = -9223372036854775807 WHERE content = {}"],
    "failures that are no number": ["UPDATE TABLE SET failures = 'many' WHERE content = {}"],
    "a header without a name": ['UPDATE content SET headers = \'{"": "b"}\' WHERE seq = {}'],
    "a blank id": ["UPDATE TABLE SET message_id = ' ' WHERE content = {}"],
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_whatever_is_damaged_in_a_waiting_row_the_others_are_claimed(damage: str, one_file: OneFile) -> None:
    await one_file.store.store_many(messages(51), NOW)
    for sql in DAMAGES[damage]:
        one_file.damage(sql.replace("TABLE", "delayed_message").replace("{}", "7"))
    claims = await one_file.store.claim_due(LATER, 100)
    assert [each.message.message_id for each in claims] == [f"m-{n}" for n in range(51) if n != 6]
    assert await one_file.store.count_unreadable() == 1
    (row,) = await one_file.store.list_unreadable(10)
    assert row.message_id in {"m-6", "m\ufffd", " "}


@pytest.mark.parametrize("damage", [each for each in DAMAGES if "header" in each or "content" in each])
async def test_headers_that_cannot_be_read_stay_as_they_are_when_their_message_is_rescheduled(
    damage: str, one_file: OneFile
) -> None:
    await one_file.store.store_many(messages(2), NOW)
    for sql in DAMAGES[damage]:
        one_file.damage(sql.replace("{}", "1"))
    before = one_file.contents()
    assert await one_file.store.reschedule("m-0", NOW + timedelta(days=1), NOW)
    assert one_file.contents() == before
    assert await one_file.store.next_attempt() == NOW + timedelta(microseconds=1)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_whatever_is_damaged_in_a_queue_the_others_are_received(damage: str, one_file: OneFile) -> None:
    """In one file due messages move unread: the row is met in its queue, and marked there."""
    await one_file.store.store_many(messages(51), NOW)
    for sql in DAMAGES[damage]:
        one_file.damage(sql.replace("TABLE", "delayed_message").replace("{}", "7"))
    report = await one_file.store.move_due(LATER, 1_000, listing=True)
    receiver = one_file.transport.receiver("q")
    with patience():
        received = await receiver.receive(100)
    ids = {each.envelope.message_id for each in received}
    unreadable = await one_file.transport.count_unreadable()
    assert ids >= {f"m-{n}" for n in range(51) if n != 6}
    # An expiry or a number of failures is another one in its queue, or has let the message expire before.
    assert len(ids) + unreadable + report.expired == 51
    await receiver.close()


WHAT_NOBODY_COULD_HAVE_STORED = {
    "no destination": "destination = ''",
    "a blank destination": "destination = ' '",
    "a destination that is too long": "destination = replace(hex(zeroblob(200)), '00', 'long')",
    "NUL in the destination": "destination = 'a' || char(0)",
    "an id that is too long": "message_id = replace(hex(zeroblob(200)), '00', 'long'), destination = 'nowhere'",
    "NUL in the id": "message_id = 'm' || char(0), destination = 'nowhere'",
}


@pytest.mark.parametrize("is_at_destination", [False, True])
async def test_whatever_a_row_holds_the_service_lives_and_the_row_is_marked(
    tmp_path: Path, *, is_at_destination: bool
) -> None:
    """What reading accepts and making refuses: such a row had no error copy, and the service ended at every start."""
    one_file, queues, clock = OneFile(tmp_path / "one.db"), MemoryTransport(), VirtualClock(NOW)
    await one_file.store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await one_file.store.store_many(messages(20), NOW)
    for seq, change in enumerate(WHAT_NOBODY_COULD_HAVE_STORED.values(), 5):
        one_file.damage(f"UPDATE delayed_message SET {change} WHERE seq = {seq}")
    delivery = DelayedDelivery(
        one_file.store,
        errors_return_to="destination" if is_at_destination else "timeouts_queue",
        missing_queue_wait=timedelta(0),
    )
    await queues.create_queues(["q"])
    async with Endpoint("sales", transport=queues, delayed_delivery=delivery, clock=clock):
        await clock.advance(timedelta(minutes=5))
    lengths, unreadable = await queues.queue_lengths(), await one_file.store.count_unreadable()
    assert lengths["q"] == 20 - len(WHAT_NOBODY_COULD_HAVE_STORED)
    assert unreadable + lengths["error"] == len(WHAT_NOBODY_COULD_HAVE_STORED)
    assert unreadable == len(WHAT_NOBODY_COULD_HAVE_STORED) or is_at_destination
    assert (await one_file.store.statistics(clock.now())).pending == 0
    await one_file.close()


async def test_what_no_queue_takes_is_marked_and_goes_on_when_it_is_mended_with_sql(tmp_path: Path) -> None:
    """Headers that are too much for the queues, stored past them: neither the message nor a brief copy can leave."""
    one_file, clock = OneFile(tmp_path / "one.db"), VirtualClock(NOW)
    queues = MemoryTransport(largest_message_bytes=1_000)
    large = DelayedMessage("large", NOW, "q", {"large": "x" * 400_000}, b"body")
    await queues.create_queues(["q"])
    await one_file.store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await one_file.store.store_many([large, *messages(5)], NOW)
    delivery = DelayedDelivery(one_file.store, number_of_retries=2)
    async with Endpoint("sales", transport=queues, delayed_delivery=delivery, clock=clock):
        await clock.advance(timedelta(minutes=5))
        (row,) = await one_file.store.list_unreadable(10)
        assert row.message_id == "large"
        assert "nor its copy to the error queue (message_too_large" in row.reason
        assert await queues.queue_lengths() == {"q": 5, "error": 0, "sales": 0, "sales.timeouts": 0}
        mend_in_store(one_file, row.number, '{"small": "x"}')
        await clock.advance(timedelta(minutes=5))
    assert (await queues.queue_lengths())["q"] == 6
    kinds = [each.kind for each in await one_file.store.history("large")]
    assert kinds == [RecordKind.SCHEDULED, RecordKind.FAILED, RecordKind.DELIVERED]
    await one_file.close()


UNREADABLE_HEADERS = {
    "no UTF-8": b'{"NServiceBus.TimeToBeReceived": "\xff"}',
    "an escape in what is no UTF-8": b'{"a": "\\u00\xff"}',
    "a NUL": b'{"\\u0000": "\x00NServiceBus.TimeToBeReceived"',
    "a number": b'{"NServiceBus.TimeToBeReceived": 5}',
    "an array in arrays": b'{"Postdate.ExpiresAt": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("headers", UNREADABLE_HEADERS)
@pytest.mark.parametrize("kind", ["TEXT", "BLOB"])
async def test_headers_that_cannot_be_read_hold_up_nothing(headers: str, kind: str, one_file: OneFile) -> None:
    await one_file.store.store_many(messages(3), NOW)
    raw = UNREADABLE_HEADERS[headers].hex()
    one_file.damage(f"UPDATE content SET headers = CAST(X'{raw}' AS {kind}) WHERE seq = 1")
    assert (await one_file.store.move_due(LATER, 1_000)).delivered == 3
    await assert_received(one_file, ["m-1", "m-2"])
    assert [each.message_id for each in await one_file.transport.list_unreadable(10)] == ["m-0"]


@pytest.mark.parametrize("damage", ["CAST('abc' AS TEXT)", "CAST(X'FF' AS TEXT)", "X'00'", "-1e300"])
async def test_an_expiry_that_is_no_number_is_marked_by_whoever_receives(damage: str, one_file: OneFile) -> None:
    """Before, the message counted as delivered, had an end long past in its queue, and was gone."""
    await one_file.store.store_many(messages(3), NOW)
    one_file.damage(f"UPDATE delayed_message SET expires_at = {damage} WHERE message_id = 'm-0'")
    report = await one_file.store.move_due(LATER, 1_000)
    assert (report.delivered, report.expired) == (3, 0)
    one_file.transport.file._upkeep.run_chores()
    await assert_received(one_file, ["m-1", "m-2"])
    assert [each.message_id for each in await one_file.transport.list_unreadable(10)] == ["m-0"]


async def assert_received(one_file: OneFile, expected: list[str]) -> None:
    receiver = one_file.transport.receiver("q")
    with patience():
        assert [each.envelope.message_id for each in await receiver.receive(100)] == expected
    await receiver.close()


async def test_a_listing_has_texts_whatever_the_ids_are(one_file: OneFile) -> None:
    """Before, an id that is no UTF-8 was bytes, and whoever wrote it down failed."""
    await one_file.store.store_many(messages(2), NOW)
    one_file.damage("UPDATE delayed_message SET message_id = CAST(X'6DFF' AS TEXT) WHERE message_id = 'm-0'")
    report = await one_file.store.move_due(LATER, 10, listing=True)
    assert report.messages is not None
    assert list(report.messages.message_ids) == ["m\ufffd", "m-1"]


def scanned(store: SqliteStore, what: str) -> list[str]:
    parts = store.scan_parts(what, 1)
    return [row[0] for part in parts for page in store.scan(Scan(what, ("message_id",)), part, 10) for row in page]


async def test_a_record_that_is_no_utf_8_does_not_end_a_scan(one_file: OneFile) -> None:
    """Before, one of them ended audits, archives and pruning, with an error that is not ours."""
    await one_file.store.store_many(messages(51), NOW)
    one_file.damage(
        "UPDATE record SET message_id = CAST(X'6DFF' || message_id AS TEXT) WHERE message_id IN ('m-0', 'm-33')"
    )
    assert scanned(one_file.store, "records") == [f"m-{n}" if n not in {0, 33} else f"m\ufffdm-{n}" for n in range(51)]


async def test_what_waits_is_not_changed_by_a_scan(one_file: OneFile) -> None:
    """It is copied to other stores: there must be nothing in a copy that was not stored."""
    await one_file.store.store_many(messages(51), NOW)
    one_file.damage("UPDATE delayed_message SET message_id = CAST(X'6DFF' AS TEXT) WHERE message_id = 'm-33'")
    with pytest.raises(StoreError, match="decode"):
        scanned(one_file.store, "pending")
    await one_file.store.list_pending(MessageFilter(), 100)
    assert scanned(one_file.store, "pending") == [f"m-{n}" for n in range(51) if n != 33]


async def test_fifty_good_messages_arrive_beside_a_damaged_one(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """Store and queues in two files, as with a broker: before, the fifty stayed claimed for ever."""
    store, transport = SqliteStore(tmp_path / "store.db"), LocalTransport(tmp_path / "queues.db")
    await transport.create_queues(["q"])
    await store.setup()
    now = SystemClock().now()
    await store.store_many([DelayedMessage(f"m-{n}", now, "q", {}, b"x") for n in range(51)], now)
    with closing(sqlite3.connect(tmp_path / "store.db")) as file, file:
        file.execute(HEADERS.replace("{}", "7"))
    receiver, received = transport.receiver("q"), list[str]()
    async with Endpoint("lab", transport=transport, delayed_delivery=DelayedDelivery(store), send_only=True):
        with patience():
            while len(received) < 50:
                received += [each.envelope.message_id for each in await receiver.receive(100)]
    await receiver.close()
    statistics = await store.statistics(now)
    assert (statistics.pending, statistics.claimed, statistics.unreadable) == (0, 0, 1)
    await store.close()
    await transport.close()


async def test_an_expired_message_that_cannot_be_kept_as_a_dead_letter_is_marked(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """Before, none of those that expired behind it left their queue."""
    clock = VirtualClock(NOW)
    rules = ExpiryRules(use_dead_letter_queue_for_messages_with_time_to_be_received=True)
    one_file = OneFile(tmp_path / "one.db", expiry=rules, clock=clock)
    await one_file.transport.create_queues(["q"])
    sent = [Envelope("q", f"e-{n}", time_to_be_received=timedelta(seconds=1)) for n in range(5)]
    await one_file.transport.send(sent, NOW)
    one_file.damage(HEADERS.replace("{}", "1"))
    await clock.advance(timedelta(minutes=1))
    one_file.transport.file._upkeep.run_chores()
    assert (await one_file.transport.queue_lengths())[DEAD_LETTERS] == 4
    assert [each.message_id for each in await one_file.transport.list_unreadable(10)] == ["e-0"]
    await one_file.close()


async def test_an_operator_who_looks_marks_what_nobody_holds(one_file: OneFile) -> None:
    await one_file.store.store_many(messages(3), NOW)
    held = await one_file.store.claim_due(NOW + timedelta(microseconds=1), 1)
    one_file.damage(HEADERS.replace("{}", "1"))
    one_file.damage(HEADERS.replace("{}", "2"))
    observer = FileObserver(one_file.store.file)
    assert await observer.pending_state_of("m-1") is None
    assert [each.message_id for each in await one_file.store.list_unreadable(10)] == ["m-1"]
    assert [each.message_id for each in await one_file.store.list_pending(MessageFilter(), 10)] == ["m-2"]
    assert len(held) == (await one_file.store.statistics(LATER)).claimed == 1
    await one_file.transport.send([Envelope("q", "e-1"), Envelope("q", "e-2")], NOW)
    one_file.damage("UPDATE content SET headers = 'x' WHERE seq = (SELECT min(content) FROM queue_message)")
    assert [each.envelope.message_id for each in await observer.browse("q", 10)] == ["e-2"]
    assert [each.message_id for each in await one_file.transport.list_unreadable(10)] == ["e-1"]


async def test_a_row_of_a_queue_is_received_once_it_is_mended_with_sql(one_file: OneFile) -> None:
    """Store and queues of one file have their own rows."""
    await one_file.store.store_many(messages(1), NOW)
    one_file.damage(HEADERS.replace("{}", "1"))
    await one_file.store.move_due(LATER, 10)
    receiver = one_file.transport.receiver("q")
    await one_file.transport.send([Envelope("q", "behind")], NOW)
    await receiver.receive(10)
    (row,) = await one_file.transport.list_unreadable(10)
    assert (row.queue, row.message_id, await one_file.store.list_unreadable(10)) == ("q", "m-0", [])
    with pytest.raises(MessageNotFound):
        await one_file.store.discard_unreadable(row.number, NOW)
    one_file.damage(f"""
        UPDATE content SET headers = '{{"a": "mended"}}'
        WHERE seq = (SELECT content FROM queue_message WHERE seq = {row.number})""")
    one_file.damage(f"""
        UPDATE queue_message SET queue_id = -queue_id, unreadable = NULL, unreadable_at = NULL
        WHERE seq = {row.number} AND unreadable IS NOT NULL""")
    with patience():
        (received,) = await receiver.receive(10)
    assert (received.envelope.headers, received.envelope.due, received.envelope.body) == ({"a": "mended"}, NOW, b"x")
    await receiver.commit(received, NOW)
    await receiver.close()
    kinds = [record.kind for record in await one_file.store.history("m-0")]
    assert kinds == [RecordKind.SCHEDULED, RecordKind.DELIVERED, RecordKind.FAILED, RecordKind.HANDLED]


async def test_a_row_without_content_does_not_get_that_of_another_message(one_file: OneFile) -> None:
    """Numbers of content are given again: discarding the row would delete the content of a message that waits."""
    await one_file.store.store_many(messages(1), NOW)
    one_file.damage("DELETE FROM content WHERE seq = 1")
    assert await one_file.store.claim_due(LATER, 10) == []
    await one_file.store.store(DelayedMessage("other", NOW, "q", {"a": "b"}, b"other"), NOW)
    (row,) = await one_file.store.list_unreadable(10)
    assert not {"headers", "body"} & row.raw.keys()
    await one_file.store.discard_unreadable(row.number, NOW)
    (claim,) = await one_file.store.claim_due(LATER, 10)
    assert claim.message.body == b"other"


async def test_an_unreadable_message_in_a_queue_does_not_expire(one_file: OneFile) -> None:
    await one_file.transport.send([Envelope("q", "e-1", time_to_be_received=timedelta(milliseconds=1))], NOW)
    one_file.damage("UPDATE content SET headers = 'x'")
    one_file.damage("UPDATE queue_message SET ends_at = 253402300799999999")
    assert await one_file.store.observer().browse("q", 10) == []
    one_file.transport.file._upkeep.run_chores()
    assert [each.message_id for each in await one_file.transport.list_unreadable(10)] == ["e-1"]
    assert await one_file.transport.queue_lengths() == {"q": 0}


def mend_in_store(one_file: OneFile, number: int, headers: str) -> None:
    """What docs/guides/operate.md says."""
    one_file.damage(f"""
        UPDATE content SET headers = '{headers}'
        WHERE seq = (SELECT content FROM delayed_message WHERE seq = {number})""")
    one_file.damage(f"""
        UPDATE delayed_message SET attempt_at = due, unreadable = NULL, unreadable_at = NULL
        WHERE seq = {number} AND unreadable IS NOT NULL""")
