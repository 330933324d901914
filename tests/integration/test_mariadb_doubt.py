"""MariaDB when an answer is lost: nothing stays held that nobody holds, nothing is lost, and all of it soon."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pymysql
import pytest
from tests.mariadb_subjects import drop_schema, fresh_schema

from postdate import DelayedMessage
from postdate.errors import StoreUnavailable, StoreUnreachable
from postdate.mariadb.connection import MariaDbServer, MariaDbSession
from postdate.mariadb.errors import translated
from postdate.mariadb.names import Names
from postdate.ports import Claim, Outcome
from postdate.stores.mariadb import MariaDbStore

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
TABLE = "sales.timeouts"


@dataclass
class Place:
    """A store with three messages that are due, and a connection that looks at it from outside."""

    store: MariaDbStore
    session: MariaDbSession
    names: Names

    def leased_under(self) -> set[int]:
        found = self.session.rows(f"SELECT DISTINCT holder FROM {self.names.pending} WHERE holder IS NOT NULL")
        return {holder for (holder,) in found}

    def holders(self) -> set[int]:
        return {holder for (holder,) in self.session.rows(f"SELECT holder FROM {self.names.of('holder')}")}

    async def claimed(self, count: int) -> Sequence[Claim]:
        """Claim until so many were claimed."""
        found = list[Claim]()
        with anyio.fail_after(20):
            while len(found) < count:
                found += await self.store.claim_due(NOW + SECOND, 10)
                await anyio.sleep(0.02)
        return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    with anyio.fail_after(20):
        while True:
            if condition():
                return
            await anyio.sleep(0.02)


@pytest.fixture
def schema(mariadb_url: str) -> Iterator[str]:
    name = fresh_schema()
    yield name
    drop_schema(mariadb_url, name)


@pytest.fixture
async def place(mariadb_url: str, schema: str) -> AsyncIterator[Place]:
    store = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await store.setup()
    await store.store_many([DelayedMessage(f"m-{n}", NOW, "queue") for n in range(3)], NOW)
    session = MariaDbServer(mariadb_url).connect()
    yield Place(store, session, Names(schema, TABLE))
    session.close()
    await store.close()


@pytest.fixture
def lose_answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what makes the next COMMIT arrive, or not, and its answer get lost, and the connection with it."""

    def lose(arrives: bool) -> None:
        commit = MariaDbSession.commit

        def commit_without_answer(session: MariaDbSession) -> None:
            monkeypatch.setattr(MariaDbSession, "commit", commit)
            if arrives:
                commit(session)
            session.close()
            raise StoreUnreachable("the answer was lost")

        monkeypatch.setattr(MariaDbSession, "commit", commit_without_answer)

    return lose


# --- the rest of a batch ----------------------------------------------------------------------------------------------


async def test_the_rest_of_a_batch_can_be_given_back_though_the_answer_was_lost(
    place: Place, lose_answer: Callable[[bool], None]
) -> None:
    first, *rest = await place.store.claim_due(NOW + SECOND, 10)
    lose_answer(True)
    with pytest.raises(StoreUnavailable):
        await place.store.finish([first], Outcome.DELIVERED, NOW)
    assert not await place.store.retry_later(first, NOW, NOW, "in doubt"), "it was finished"
    assert [await place.store.retry_later(claim, NOW, NOW, "in doubt") for claim in rest] == [True, True]
    assert await place.store.finish(await place.claimed(2), Outcome.DELIVERED, NOW) == 2


async def test_the_rest_of_a_batch_can_be_finished_though_the_answer_was_lost(
    place: Place, lose_answer: Callable[[bool], None]
) -> None:
    first, *rest = await place.store.claim_due(NOW + SECOND, 10)
    lose_answer(True)
    with pytest.raises(StoreUnavailable):
        await place.store.retry_later(first, NOW, NOW, "again")
    assert await place.store.finish(rest, Outcome.DELIVERED, NOW) == 2
    (again,) = await place.claimed(1)
    assert again.message.number_of_failures == 1


async def test_what_was_not_committed_is_free_and_the_old_claims_do_nothing(
    place: Place, lose_answer: Callable[[bool], None]
) -> None:
    claims = await place.store.claim_due(NOW + SECOND, 10)
    lose_answer(False)
    with pytest.raises(StoreUnavailable):
        await place.store.finish(claims[:1], Outcome.DELIVERED, NOW)
    again = await place.claimed(3)
    assert await place.store.finish(claims, Outcome.FAILED, NOW) == 0
    assert not await place.store.retry_later(claims[2], NOW, NOW, "in doubt")
    assert await place.store.finish(again, Outcome.DELIVERED, NOW) == 3


async def test_a_lease_whose_end_was_not_committed_can_be_ended_again(
    place: Place, lose_answer: Callable[[bool], None]
) -> None:
    claims = await place.store.claim_due(NOW + SECOND, 10)
    await place.store.finish(claims[:1], Outcome.DELIVERED, NOW)
    lose_answer(False)
    with pytest.raises(StoreUnavailable):
        await place.store.finish(claims[1:], Outcome.DELIVERED, NOW)
    assert await place.store.finish(claims[1:], Outcome.DELIVERED, NOW) == 2


@pytest.mark.parametrize("arrives", [True, False], ids=["committed", "not committed"])
async def test_what_a_failed_fetch_leased_is_free_again(
    place: Place, lose_answer: Callable[[bool], None], arrives: bool
) -> None:
    lose_answer(arrives)
    with pytest.raises(StoreUnavailable):
        await place.store.fetch_next_due(NOW + SECOND)
    assert await place.store.finish(await place.claimed(3), Outcome.DELIVERED, NOW) == 3


# --- numbers that are dead --------------------------------------------------------------------------------------------


async def test_nothing_is_leased_under_a_number_that_was_buried(place: Place) -> None:
    claims = await place.store.claim_due(NOW + SECOND, 10)
    place.store._held._holder = lambda: 4_711
    with pytest.raises(StoreUnavailable, match="4711"):
        await place.store.finish(claims[:1], Outcome.DELIVERED, NOW)
    assert await place.claimed(3)
    assert not place.leased_under()


async def test_leases_under_a_number_that_nobody_knows_are_freed(place: Place) -> None:
    place.session.change(f"UPDATE {place.names.pending} SET holder = 4711, attempt_at = NULL", {})
    stop = await place.store.listen(lambda: None)
    assert await place.store.finish(await place.claimed(3), Outcome.DELIVERED, NOW) == 3
    stop()


async def test_a_number_is_not_buried_while_somebody_leases_under_it(mariadb_url: str, place: Place) -> None:
    """Otherwise what is leased between the freeing and the burying would be nobody's."""
    stop = await place.store.listen(lambda: None)
    (holder,) = place.holders()
    other = MariaDbServer(mariadb_url).connect()
    other.begin()
    place.store._tables.lease(other, [number for (number,) in _numbers(place)], holder)
    place.session.change("SET SESSION innodb_lock_wait_timeout = 0")
    with pytest.raises(StoreUnavailable):
        place.store._tables.bury(place.session, [holder])
    other.rollback()
    other.close()
    stop()


def _numbers(place: Place) -> Sequence[tuple[int]]:
    return [(number,) for (number,) in place.session.rows(f"SELECT number FROM {place.names.pending}")]


async def test_another_number_follows_whatever_ended_the_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = await place.store.listen(lambda: None)
    (before,) = place.holders()
    tables, broken = place.store._tables, ["once"]
    look = tables.next_attempt

    def look_once_broken(session: Any, locked: Sequence[int]) -> int | None:
        if broken:
            broken.clear()
            raise TypeError("'NoneType' object is not subscriptable")  # as the driver raises it: none of its own tree
        return look(session, locked)

    monkeypatch.setattr(tables, "next_attempt", look_once_broken)
    await until(lambda: before not in place.holders())
    claims = await place.claimed(3)
    assert await place.store.finish(claims[:1], Outcome.DELIVERED, NOW) == 1
    assert place.leased_under() == place.holders()
    assert len([record for record in caplog.records if "lost the connection" in record.message]) == 1
    stop()


async def test_a_table_that_is_gone_does_not_end_the_connection_that_holds_messages(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = await place.store.listen(lambda: None)
    (number,) = place.holders()
    names, tables, looks = place.names, place.store._tables, list[str]()
    dead = tables.dead

    def dead_and_noted(session: Any) -> Sequence[int]:
        found = dead(session)
        looks.extend(["dead"] if found else [])
        return found

    monkeypatch.setattr(tables, "dead", dead_and_noted)
    away = names.plain("away")
    with caplog.at_level(logging.ERROR, "postdate.stores"):
        place.session.change(f"RENAME TABLE {names.plain(TABLE)} TO {away}")
        place.session.change(
            f"INSERT INTO {names.plain('postdate_holder')} VALUES (DEFAULT, 1, 'of a dead process', 1, 'machine', 1)"
        )
        await until(lambda: looks.count("dead") == 2)
        assert len(place.holders()) == 2, "what is not freed is not buried, and our own number stays"
        place.session.change(f"RENAME TABLE {away} TO {names.plain(TABLE)}")
    await until(lambda: place.holders() == {number})
    assert len([record for record in caplog.records if "only in part" in record.message]) <= 2, "once for each step"
    stop()


@pytest.mark.parametrize(
    "error", [AssertionError("cut short"), IndexError(), pymysql.err.InternalError("Packet sequence number wrong")]
)
def test_a_packet_that_cannot_be_read_is_a_lost_connection(error: Exception) -> None:
    with pytest.raises(StoreUnreachable), translated("here"):
        raise error
