"""Every store on row locks when an answer is lost: nothing stays held that nobody holds, nothing is lost."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from tests.locking_places import TABLE, LockingPlace
from tests.waiting import claimed, until

from postdate import DelayedMessage
from postdate.backends.sql.row_locks.store import LockingStore
from postdate.errors import DuplicateMessage, StoreUnavailable, StoreUnreachable
from postdate.ports import Claim, Outcome

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@dataclass
class Place:
    """A store with three messages that are due, and a connection that looks at it from outside."""

    at: LockingPlace
    store: LockingStore
    session: Any

    @property
    def names(self) -> Any:
        return self.at.names()

    def leased_under(self) -> set[int]:
        found = self.session.rows(f"SELECT DISTINCT holder FROM {self.names.pending} WHERE holder IS NOT NULL")
        return {holder for (holder,) in found}

    def holders(self) -> set[int]:
        return {holder for (holder,) in self.session.rows(f"SELECT holder FROM {self.names.name_of('holder')}")}

    async def claimed(self, count: int) -> Sequence[Claim]:
        """Claim until so many were claimed."""
        return await claimed(self.store, count, NOW + SECOND)


@pytest.fixture
async def doubtful(place: LockingPlace) -> AsyncIterator[Place]:
    store = place.store()
    await store.setup()
    await store.store_many([DelayedMessage(f"m-{n}", NOW, "queue") for n in range(3)], NOW)
    session = place.connect()
    yield Place(place, store, session)
    session.close()
    await store.close()


@pytest.fixture
def lose_answer(place: LockingPlace, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what makes the next COMMIT arrive, or not, and its answer get lost, and the connection with it."""

    def lose(arrives: bool) -> None:
        commit = place.session_class.commit

        def commit_without_answer(session: Any) -> None:
            monkeypatch.setattr(place.session_class, "commit", commit)
            if arrives:
                commit(session)
            session.close()
            raise StoreUnreachable("the answer was lost")

        monkeypatch.setattr(place.session_class, "commit", commit_without_answer)

    return lose


# --- the rest of a batch ----------------------------------------------------------------------------------------------


async def test_the_rest_of_a_batch_can_be_given_back_though_the_answer_was_lost(
    doubtful: Place, lose_answer: Callable[[bool], None]
) -> None:
    first, *rest = await doubtful.store.claim_due(NOW + SECOND, 10)
    lose_answer(True)
    with pytest.raises(StoreUnavailable):
        await doubtful.store.finish([first], Outcome.DELIVERED, NOW)
    assert not await doubtful.store.retry_later(first, NOW, NOW, "in doubt"), "it was finished"
    assert [await doubtful.store.retry_later(claim, NOW, NOW, "in doubt") for claim in rest] == [True, True]
    assert await doubtful.store.finish(await doubtful.claimed(2), Outcome.DELIVERED, NOW) == 2


async def test_the_rest_of_a_batch_can_be_finished_though_the_answer_was_lost(
    doubtful: Place, lose_answer: Callable[[bool], None]
) -> None:
    first, *rest = await doubtful.store.claim_due(NOW + SECOND, 10)
    lose_answer(True)
    with pytest.raises(StoreUnavailable):
        await doubtful.store.retry_later(first, NOW, NOW, "again")
    assert await doubtful.store.finish(rest, Outcome.DELIVERED, NOW) == 2
    (again,) = await doubtful.claimed(1)
    assert again.message.number_of_failures == 1


async def test_what_was_not_committed_is_free_and_the_old_claims_do_nothing(
    doubtful: Place, lose_answer: Callable[[bool], None]
) -> None:
    claims = await doubtful.store.claim_due(NOW + SECOND, 10)
    lose_answer(False)
    with pytest.raises(StoreUnavailable):
        await doubtful.store.finish(claims[:1], Outcome.DELIVERED, NOW)
    assert not doubtful.store.is_in_force(claims[0])
    again = await doubtful.claimed(3)
    assert all(map(doubtful.store.is_in_force, again))
    assert await doubtful.store.finish(claims, Outcome.FAILED, NOW) == 0
    assert not await doubtful.store.retry_later(claims[2], NOW, NOW, "in doubt")
    assert await doubtful.store.finish(again, Outcome.DELIVERED, NOW) == 3


async def test_a_lease_whose_end_was_not_committed_can_be_ended_again(
    doubtful: Place, lose_answer: Callable[[bool], None]
) -> None:
    claims = await doubtful.store.claim_due(NOW + SECOND, 10)
    await doubtful.store.finish(claims[:1], Outcome.DELIVERED, NOW)
    lose_answer(False)
    with pytest.raises(StoreUnavailable):
        await doubtful.store.finish(claims[1:], Outcome.DELIVERED, NOW)
    assert await doubtful.store.finish(claims[1:], Outcome.DELIVERED, NOW) == 2


@pytest.mark.parametrize("arrives", [True, False], ids=["committed", "not committed"])
async def test_what_a_failed_fetch_leased_is_free_again(
    doubtful: Place, lose_answer: Callable[[bool], None], arrives: bool
) -> None:
    lose_answer(arrives)
    with pytest.raises(StoreUnavailable):
        await doubtful.store.fetch_next_due(NOW + SECOND)
    assert await doubtful.store.finish(await doubtful.claimed(3), Outcome.DELIVERED, NOW) == 3


# --- numbers that are dead --------------------------------------------------------------------------------------------


async def test_nothing_is_leased_under_a_number_that_was_buried(doubtful: Place) -> None:
    claims = await doubtful.store.claim_due(NOW + SECOND, 10)
    doubtful.store._claims._holder = lambda: 4_711
    with pytest.raises(StoreUnavailable, match="4711"):
        await doubtful.store.finish(claims[:1], Outcome.DELIVERED, NOW)
    assert await doubtful.claimed(3)
    assert not doubtful.leased_under()


async def test_leases_under_a_number_that_nobody_knows_are_freed(doubtful: Place) -> None:
    doubtful.session.change(f"UPDATE {doubtful.names.pending} SET holder = 4711, attempt_at = NULL", {})
    stop = await doubtful.store.listen(lambda: None)
    assert await doubtful.store.finish(await doubtful.claimed(3), Outcome.DELIVERED, NOW) == 3
    stop()


async def test_a_number_is_not_buried_while_somebody_leases_under_it(doubtful: Place) -> None:
    """Otherwise what is leased between the freeing and the burying would be nobody's."""
    stop = await doubtful.store.listen(lambda: None)
    (holder,) = doubtful.holders()
    other = doubtful.at.connect()
    other.begin()
    doubtful.store._tables.lease(other, [number for (number,) in _numbers(doubtful)], holder)
    doubtful.at.wait_for_no_lock(doubtful.session)
    with pytest.raises(StoreUnavailable):
        doubtful.store._tables.remove_holders(doubtful.session, [holder])
    other.rollback()
    other.close()
    stop()


def _numbers(doubtful: Place) -> Sequence[tuple[int]]:
    return [(number,) for (number,) in doubtful.session.rows(f"SELECT number FROM {doubtful.names.pending}")]


async def test_another_number_follows_whatever_ended_the_connection(
    doubtful: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, expected_logs: list[str]
) -> None:
    expected_logs.append("lost the connection that holds")
    stop = await doubtful.store.listen(lambda: None)
    (before,) = doubtful.holders()
    tables, broken = doubtful.store._tables, ["once"]
    look = tables.next_attempt

    def look_once_broken(session: Any, locked: Sequence[int]) -> int | None:
        if broken:
            broken.clear()
            raise TypeError("'NoneType' object is not subscriptable")  # as the driver raises it: none of its own tree
        return look(session, locked)

    monkeypatch.setattr(tables, "next_attempt", look_once_broken)
    await until(lambda: before not in doubtful.holders())
    claims = await doubtful.claimed(3)
    assert await doubtful.store.finish(claims[:1], Outcome.DELIVERED, NOW) == 1
    assert doubtful.leased_under() == doubtful.holders()
    assert len([record for record in caplog.records if "lost the connection" in record.message]) == 1
    stop()


async def test_a_table_that_is_gone_does_not_end_the_connection_that_holds_messages(
    doubtful: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, expected_logs: list[str]
) -> None:
    expected_logs.append("only in part")
    stop = await doubtful.store.listen(lambda: None)
    (number,) = doubtful.holders()
    tables, looks = doubtful.store._tables, list[str]()
    dead = tables.find_dead_holders

    def dead_and_noted(session: Any) -> Sequence[int]:
        found = dead(session)
        looks.extend(["dead"] if found else [])
        return found

    monkeypatch.setattr(tables, "find_dead_holders", dead_and_noted)
    with caplog.at_level(logging.ERROR, "postdate.stores"):
        doubtful.at.rename(doubtful.session, TABLE, "away")
        doubtful.at.add_dead_holder(doubtful.session)
        await until(lambda: looks.count("dead") >= 2)
        assert len(doubtful.holders()) == 2, "what is not freed is not buried, and our own number stays"
        doubtful.at.rename(doubtful.session, "away", TABLE)
    await until(lambda: doubtful.holders() == {number})
    steps = 3  # freeing what nobody holds (a slow machine has not done that yet), what the dead hold, and looking
    assert len([record for record in caplog.records if "only in part" in record.message]) <= steps, "once for each"
    stop()


# --- races ------------------------------------------------------------------------------------------------------------


async def test_who_loses_a_race_for_an_id_does_not_deadlock(
    place: LockingPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loser locked what all had found, together with the others, and then wanted it alone."""
    monkeypatch.setattr("postdate.backends.sql.row_locks.pool._MAX_ATTEMPTS", 1)
    store, lost = place.store(), list[str]()
    await store.setup()
    await store.store(DelayedMessage("m-1", NOW, "queue"), NOW)

    async def again() -> None:
        with pytest.raises(DuplicateMessage):
            await store.store(DelayedMessage("m-1", NOW, "queue"), NOW)
        lost.append("lost")

    async with anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(again)
    assert len(lost) == 30
    await store.close()
