"""The clock of the server, what processes say of theirs, and claims that are given back. ADR 0048, 0050."""

import os
import platform
from datetime import timedelta

import pytest
from tests.integration.postgres_place import SECOND, now, placed

from postdate.ports import ClaimingStore, Outcome, RecordKind

pytestmark = pytest.mark.anyio


async def test_the_server_tells_its_time(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        assert isinstance(place.store, ClaimingStore)
        ((before,),) = place.rows("SELECT clock_timestamp()")
        told = await place.store.server_now()
        ((after,),) = place.rows("SELECT clock_timestamp()")
        assert before < told < after
        assert told.utcoffset() == timedelta(0)


async def test_services_see_how_far_each_others_clocks_are_off_while_they_live(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        assert await place.store.reported_clocks() == {}
        await place.store.report_clock(timedelta(minutes=-10))
        other = place.another_store()
        ours = f"{platform.node()}:{os.getpid()}"
        assert await other.reported_clocks() == {ours: timedelta(minutes=-10)}
        await place.store.report_clock(timedelta(milliseconds=3))
        assert await other.reported_clocks() == {ours: timedelta(milliseconds=3)}
        await place.store.close()
        assert await other.reported_clocks() == {}
        await other.close()


async def test_a_batch_given_back_whole_costs_no_write_and_counts_nothing(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        store = place.store
        assert isinstance(store, ClaimingStore)
        await store.store_many([place.work(n, now() - SECOND, "elsewhere") for n in range(5)], now())
        places = 'SELECT message_id, ctid FROM "service.timeouts" ORDER BY 1'
        before = place.rows(places)
        claims = await store.claim_due(now(), 10)
        assert await store.release(claims, None) == 5
        assert place.rows(places) == before
        assert await store.release(claims, None) == 0
        assert await store.finish(claims, Outcome.DELIVERED, now()) == 0
        assert sorted(claim.message.message_id for claim in await store.claim_due(now(), 10)) == [
            f"m-{n}" for n in range(5)
        ]
        assert await store.record_counts() == {RecordKind.SCHEDULED: 5}


async def test_a_part_of_a_batch_is_given_back_and_waits(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        store, later = place.store, now() + 60 * SECOND
        await store.store_many([place.work(n, now() - SECOND, "elsewhere") for n in range(4)], now())
        claims = await store.claim_due(now(), 10)
        assert await store.release(claims[:2], later) == 2
        assert await store.release(claims[2:3], None) == 1  # of a lease
        assert [claim.message.message_id for claim in await store.claim_due(now(), 10)] == ["m-2"]
        assert {claim.message.message_id for claim in await store.claim_due(later + SECOND, 10)} == {"m-0", "m-1"}
        assert await store.finish(claims, Outcome.DELIVERED, now()) == 1
        assert await store.record_counts() == {RecordKind.SCHEDULED: 4, RecordKind.DELIVERED: 1}
