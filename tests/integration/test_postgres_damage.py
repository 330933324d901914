"""Rows that were damaged by hand hold up no move, no receive and no question. ADR 0019, point 6."""

import os
from unittest import mock
from urllib.parse import urlsplit

import pytest
from tests.integration.postgres_place import SECOND, TABLE, Place, now, placed
from tests.waiting import claimed, received, until

from postdate import TransactionMode
from postdate.backends.postgres.sessions import mark
from postdate.errors import QueueNotFound, StoreUnavailable
from postdate.messages import Envelope
from postdate.ports import Mending, Outcome, Scan

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
    aside = await place.store.quarantined_count() + await place.transport.quarantined_count()
    assert aside == (0 if how == "expiry BC" else 1)  # that one has simply expired
    assert await place.store.next_attempt() is None
    await receiver.close()


@pytest.mark.parametrize("how", DAMAGES)
async def test_a_damaged_row_holds_up_no_claim(place: Place, how: str) -> None:
    """Fifty good messages that were claimed with it stayed claimed for ever, over restarts."""
    await damage_one_of_ten(place, how, "elsewhere")
    claims = await place.store.claim_due(now(), 100)
    assert [claim.message.message_id for claim in claims] == [f"m-{n}" for n in range(1, 10)]
    (aside,) = await place.store.quarantined(10)
    assert (aside.message_id, aside.place) == ("m-0", "")
    left = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND application_name LIKE %s"
    await until(lambda: place.rows(left, f"%{mark()}") == [(1,)])  # of the claims; those of other tests have ended


async def test_what_is_damaged_for_good_is_looked_at_by_operators_and_jobs_without_failing(place: Place) -> None:
    await damage_one_of_ten(place, "due infinity")
    place.run(f"UPDATE \"{TABLE}\" SET attempt_at = 'infinity' WHERE message_id = 'm-0'")  # never due
    observer = place.store.observer()
    assert await observer.standing("m-0") is None
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


async def test_without_rights_on_the_table_of_what_is_set_aside_the_others_go_on(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an upgrade without its grants: every claim and every receive failed, and so did the statistics."""
    role = f"without_{os.getpid()}"
    schema = place.schema.replace('"', '""')
    place.run(f'CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA "{schema}" TO {role}')
    for what in ("TABLES", "SEQUENCES"):
        place.run(f'GRANT ALL ON ALL {what} IN SCHEMA "{schema}" TO {role}')
    place.run(f"REVOKE ALL ON quarantine FROM {role}")
    server = urlsplit(place.url)
    url = server._replace(netloc=f"{role}@{server.hostname}:{server.port}").geturl()
    store, transport = place.another_store(url), place.another_transport(url)
    try:
        await store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
        await damage_one_of_ten(place, "headers", "elsewhere")
        claims = await store.claim_due(now(), 100)
        assert [claim.message.message_id for claim in claims] == [f"m-{n}" for n in range(1, 10)]
        assert await store.finish(claims, Outcome.DELIVERED, now()) == 9
        assert await store.claim_due(now(), 100) == []
        assert (await store.statistics(now())).pending == 1
        await place.transport.send([Envelope("consumer", "e-1")], now())
        place.run("UPDATE content SET headers = 'torn'")
        await place.transport.send([Envelope("consumer", "e-2")], now())
        receiver = transport.receiver("consumer")
        assert [each.envelope.message_id for each in await received(receiver, 1)] == ["e-2"]
        await receiver.close()
        assert caplog.text.count("grants included") == 2  # once for the store, once for the queues
    finally:
        await store.close()
        await transport.close()
        place.run(f"DROP OWNED BY {role}; DROP ROLE {role}")
    # Whoever may set aside does it when that process has gone.
    assert await place.store.claim_due(now(), 100) == []
    assert await place.store.quarantined_count() == 1


async def test_a_mended_message_whose_queue_is_gone_stays_set_aside(place: Place) -> None:
    await place.transport.send([Envelope("done", "e-1")], now())
    place.run("UPDATE content SET headers = 'torn'")
    receiver = place.transport.receiver("done")
    await place.transport.send([Envelope("done", "e-2")], now())
    assert [each.envelope.message_id for each in await received(receiver, 1)] == ["e-2"]
    await receiver.close()
    (aside,) = await place.transport.quarantined(10)
    place.run("DELETE FROM queue WHERE name = 'done'")
    with pytest.raises(QueueNotFound):
        await place.transport.put_back(aside.number, Mending(headers={}), now())
    assert await place.transport.quarantined_count() == 1
