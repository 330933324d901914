"""Rows that were damaged by hand hold up no move, no receive and no question. ADR 0043."""

from unittest import mock

import pytest
from tests.integration.postgres_place import SECOND, TABLE, Place, now, placed
from tests.waiting import claimed, received, until

from postdate.backends.postgres.sessions import mark
from postdate.errors import StoreUnavailable
from postdate.messages import Envelope
from postdate.ports import Outcome, Scan

pytestmark = pytest.mark.anyio

_DUE = 'UPDATE "service.timeouts" SET due = {due}, attempt_at = {due} WHERE number = {number}'
DAMAGES = {
    "headers": "UPDATE content SET headers = '{\"torn' WHERE number = {number}",
    "content": "DELETE FROM content WHERE number = {number}",
    "due -infinity": _DUE.replace("{due}", "'-infinity'"),
    "due infinity": "UPDATE \"service.timeouts\" SET due = 'infinity' WHERE number = {number}",
    "expiry infinity": "UPDATE \"service.timeouts\" SET expires_at = 'infinity' WHERE number = {number}",
    "expiry BC": "UPDATE \"service.timeouts\" SET expires_at = '0044-03-15 BC' WHERE number = {number}",
}


@pytest.fixture
async def place(postgres_url: str):
    async with placed(postgres_url) as place:
        yield place


async def damage_one_of_ten(place: Place, how: str, destination: str = "consumer") -> None:
    """Store ten due messages; the oldest is damaged."""
    await place.store.store_many([place.work(n, now() - (20 - n) * SECOND, destination) for n in range(10)], now())
    ((number,),) = place.rows("SELECT number FROM record WHERE message_id = 'm-0' AND kind = 1")
    place.run(DAMAGES[how].replace("{number}", str(number)))


@pytest.mark.parametrize("how", DAMAGES)
async def test_a_damaged_row_holds_up_neither_a_move_nor_who_receives(place: Place, how: str) -> None:
    """Headers that were no JSON kept the whole queue from being received; a due time out of all bounds, every look."""
    await damage_one_of_ten(place, how)
    report = await place.store.move_due(now(), 5, listing=True)
    assert report.next_attempt is not None
    while (await place.store.move_due(now(), 5, listing=True)).delivered:
        pass
    receiver = place.transport.receiver("consumer")
    found = await received(receiver, 9)
    assert sorted(each.envelope.message_id for each in found) == [f"m-{n}" for n in range(1, 10)]
    unreadable = await place.store.count_unreadable() + await place.transport.count_unreadable()
    assert unreadable == (0 if how == "expiry BC" else 1)  # that one has simply expired
    assert await place.store.next_attempt() is None
    await receiver.close()


@pytest.mark.parametrize("how", DAMAGES)
async def test_a_damaged_row_holds_up_no_claim(place: Place, how: str) -> None:
    """Fifty good messages that were claimed with it stayed claimed for ever, over restarts."""
    await damage_one_of_ten(place, how, "elsewhere")
    claims = await place.store.claim_due(now(), 100)
    assert [claim.message.message_id for claim in claims] == [f"m-{n}" for n in range(1, 10)]
    (row,) = await place.store.list_unreadable(10)
    assert (row.message_id, row.queue) == ("m-0", "")
    left = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND application_name LIKE %s"
    await until(lambda: place.rows(left, f"%{mark()}") == [(1,)])  # of the claims; those of other tests have ended


async def test_what_is_damaged_for_good_is_looked_at_by_operators_and_jobs_without_failing(place: Place) -> None:
    await damage_one_of_ten(place, "due infinity")
    place.run(f"UPDATE \"{TABLE}\" SET attempt_at = 'infinity' WHERE message_id = 'm-0'")  # never due
    observer = place.store.observer()
    assert await observer.pending_state_of("m-0") is None
    assert await place.store.next_attempt() is not None
    assert (await place.store.statistics(now())).pending == 10
    (part,) = place.store.scan_parts("pending", 1)
    read = [row for page in place.store.scan(Scan("pending", ("message_id", "due")), part, 100) for row in page]
    assert len(read) == 10
    await place.transport.send([Envelope("consumer", "e-1")], now())
    place.run("UPDATE content SET headers = 'torn'")
    assert await place.store.observer().browse("consumer", 10) == []
    assert await place.store.observer().find_in_queues("e-1") == []


async def test_what_was_claimed_while_the_store_was_closed_is_free_again(place: Place) -> None:
    """It was locked until the garbage collector came by."""
    await place.store.store(place.work(0, now() - SECOND), now())
    listener = mock.patch.object(place.store.database, "listener", side_effect=StoreUnavailable("closed"))
    with listener, pytest.raises(StoreUnavailable) as failure:
        await place.store.claim_due(now(), 10)
    assert [claim.message.message_id for claim in await claimed(place.store, 1, now())] == ["m-0"]
    del failure  # which has kept whatever was open then


async def test_a_mended_message_of_a_store_is_delivered(place: Place) -> None:
    """By the statements of docs/guides/operate.md."""
    await damage_one_of_ten(place, "headers", "elsewhere")
    await place.store.finish(await place.store.claim_due(now(), 100), Outcome.DELIVERED, now())
    (row,) = await place.store.list_unreadable(10)
    place.run(f"UPDATE content SET headers = '{{}}' WHERE number = {row.number}")
    place.run(f"""
        UPDATE "{TABLE}" SET attempt_at = due, unreadable = NULL, unreadable_at = NULL
        WHERE number = {row.number} AND unreadable IS NOT NULL""")
    store = place.another_store()
    (claim,) = await store.claim_due(now(), 100)
    assert (claim.message.message_id, claim.message.headers) == ("m-0", {})
    await store.close()


async def test_a_mended_message_of_a_queue_is_received(place: Place) -> None:
    """Likewise; what cannot be read does not expire meanwhile."""
    lasts = 3600 * SECOND
    await place.transport.send([Envelope("done", "e-1", {}, b"1", time_to_be_received=lasts)], now())
    place.run("UPDATE content SET headers = 'torn'")
    receiver = place.transport.receiver("done")
    await place.transport.send([Envelope("done", "e-2")], now())
    assert [each.envelope.message_id for each in await received(receiver, 1)] == ["e-2"]
    (row,) = await place.transport.list_unreadable(10)
    assert (row.queue, place.rows("SELECT ends_at FROM queue_message WHERE queue_id < 0")) == ("done", [(None,)])
    content = f"(SELECT content FROM queue_message WHERE number = {row.number})"
    place.run(f"UPDATE content SET headers = '{{}}' WHERE number = {content}")
    place.run(f"""
        UPDATE queue_message SET queue_id = -queue_id, unreadable = NULL, unreadable_at = NULL
        WHERE number = {row.number} AND unreadable IS NOT NULL""")
    assert [each.envelope.message_id for each in await received(receiver, 1)] == ["e-1"]
    await receiver.close()


async def test_a_row_whose_queue_is_gone_is_listed_and_discarded(place: Place) -> None:
    await place.transport.send([Envelope("done", "e-1")], now())
    place.run("UPDATE content SET headers = 'torn'")
    receiver = place.transport.receiver("done")
    await place.transport.send([Envelope("done", "e-2")], now())
    assert [each.envelope.message_id for each in await received(receiver, 1)] == ["e-2"]
    await receiver.close()
    place.run("DELETE FROM queue WHERE name = 'done'")
    (row,) = await place.transport.list_unreadable(10)
    assert row.queue.isdecimal()
    await place.transport.discard_unreadable(row.number, now())
    assert await place.transport.count_unreadable() == 0
