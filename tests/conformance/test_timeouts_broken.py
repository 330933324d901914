"""The suite of timeouts has teeth: storage with one defect fails the check of what is broken."""

from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest
from tests.conformance.test_timeouts import SqliteSubject
from tests.conftest import as_another_process

from postdate import LocalTransport, MemoryTimeouts, SqliteTimeouts
from postdate.backends.sql.timeouts_layout import normal_id, sort_by_due
from postdate.errors import StoreUnavailable, TimeoutConcurrentlyProcessed
from postdate.ports import Work
from postdate.ports.timeouts import DueChunk, Timeout, TimeoutPersister
from postdate.testing import ConformanceFailure
from postdate.testing.timeout_suite import TimeoutSubject, timeout_checks

MICROSECOND = timedelta(microseconds=1)


class RoundsDown(MemoryTimeouts):
    async def add(self, timeout: Timeout) -> bool:
        return await super().add(replace(timeout, due=timeout.due.replace(microsecond=0)))


class Overwrites(MemoryTimeouts):
    async def add(self, timeout: Timeout) -> bool:
        await self.try_remove(timeout.timeout_id)
        return await super().add(timeout)


class ForgetsTheBody(MemoryTimeouts):
    async def add(self, timeout: Timeout) -> bool:
        return await super().add(replace(timeout, body=b""))


class MakesUpHeaders(MemoryTimeouts):
    async def add(self, timeout: Timeout) -> bool:
        return await super().add(replace(timeout, headers=timeout.headers or {"made": "up"}))


class TakesIdsAsTheyAre(MemoryTimeouts):
    async def peek(self, timeout_id: str) -> Timeout | None:
        return self._timeouts.get(timeout_id)


class AlwaysRemoves(MemoryTimeouts):
    async def try_remove(self, timeout_id: str) -> bool:
        await super().try_remove(timeout_id)
        return True


class LeavesTheSaga(MemoryTimeouts):
    async def remove_by_saga(self, saga_id: str) -> int:
        return 0


class StartsInclusively(MemoryTimeouts):
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        return await super().next_chunk(start - MICROSECOND, now, limit)


class EndsExclusively(MemoryTimeouts):
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        return await super().next_chunk(start, now - MICROSECOND, limit)


class CutsBetweenEqualTimes(MemoryTimeouts):
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        chunk = await super().next_chunk(start, now, limit)
        return DueChunk(chunk.due[:limit], now if len(chunk.due) > limit else chunk.next_query)


class LatestFirst(MemoryTimeouts):
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        chunk = await super().next_chunk(start, now, 100)
        return DueChunk(sort_by_due(reversed(chunk.due))[-limit:], now if len(chunk.due) > limit else chunk.next_query)


class AsksInAMinute(MemoryTimeouts):
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        chunk = await super().next_chunk(start, now, limit)
        return replace(chunk, next_query=chunk.next_query or now.replace(year=9999))


class SharesOneTable(SqliteTimeouts):
    async def initialize(self, endpoint: str) -> None:
        await super().initialize("Sales.Conformance")
        self._endpoint = endpoint


class LooksAndThenRemoves(SqliteTimeouts):
    async def try_remove(self, timeout_id: str) -> bool:
        there = await self.peek(timeout_id) is not None
        await super().try_remove(timeout_id)
        return there


class LooksAndThenAdds(SqliteTimeouts):
    async def add(self, timeout: Timeout) -> bool:
        new = await self.peek(timeout.timeout_id) is None
        await super().add(timeout)
        return new


class PeeksByWriting(SqliteTimeouts):
    async def peek(self, timeout_id: str) -> Timeout | None:
        await self.file.write(lambda tx: self._checked_table.peek(tx, normal_id(timeout_id) or ""))
        return await super().peek(timeout_id)


class EmptiesAtSetUp(SqliteTimeouts):
    async def setup(self) -> None:
        await super().setup()
        await self.file.write(lambda tx: tx.execute('DELETE FROM "Sales_Conformance_TimeoutData"'))


class SetsUpByItself(SqliteTimeouts):
    async def peek(self, timeout_id: str) -> Timeout | None:
        await self.setup()
        return await super().peek(timeout_id)


class GivesOneToSeveral(MemoryTimeouts):
    async def claim(self, timeout_id: str) -> Any:
        self._claimed_ids.clear()
        return await super().claim(timeout_id)


class NeverLetsGo(MemoryTimeouts):
    async def claim(self, timeout_id: str) -> Any:
        claim = await super().claim(timeout_id)
        return None if claim is None else replace(claim, release=anyio.lowlevel.checkpoint)


class HidesWhatIsClaimed(MemoryTimeouts):
    async def peek(self, timeout_id: str) -> Timeout | None:
        return None if normal_id(timeout_id) in self._claimed_ids else await super().peek(timeout_id)


class AddsBesideTheTransaction(SqliteTimeouts):
    def adding_work(self, timeout: Timeout) -> Work:
        work = super().adding_work(timeout)

        def add(tx: Any) -> None:
            work(tx)
            tx.execute("COMMIT")
            tx.execute("BEGIN IMMEDIATE")

        return add


class ForgivesWhatIsGone(SqliteTimeouts):
    def removing_work(self, timeout_id: str) -> Work:
        work = super().removing_work(timeout_id)

        def remove(tx: Any) -> None:
            try:
                work(tx)
            except TimeoutConcurrentlyProcessed:
                return

        return remove


class NamesAnotherDatabase(SqliteTimeouts):
    @property
    def database(self) -> object:
        return "elsewhere"


class LeavesTheSagaInTheTransaction(SqliteTimeouts):
    def removing_by_saga_work(self, saga_id: str) -> Work:
        return lambda tx: None


BROKEN: dict[str, tuple[type[Any], str]] = {
    "rounds down": (RoundsDown, "timeouts.a_due_time_is_never_earlier"),
    "overwrites": (Overwrites, "timeouts.adding_again_changes_nothing"),
    "forgets the body": (ForgetsTheBody, "timeouts.a_timeout_is_unchanged"),
    "makes up headers": (MakesUpHeaders, "timeouts.what_is_left_out_stays_out"),
    "takes ids as they are": (TakesIdsAsTheyAre, "timeouts.an_id_is_known_however_it_is_written"),
    "always removes": (AlwaysRemoves, "timeouts.what_is_removed_is_gone"),
    "leaves the saga": (LeavesTheSaga, "timeouts.a_saga_takes_all_its_timeouts_along"),
    "starts inclusively": (StartsInclusively, "due.the_start_is_exclusive_and_now_inclusive"),
    "ends exclusively": (EndsExclusively, "due.the_start_is_exclusive_and_now_inclusive"),
    "cuts between equal times": (CutsBetweenEqualTimes, "due.a_chunk_does_not_end_between_equal_due_times"),
    "loses equal times": (CutsBetweenEqualTimes, "due.going_on_finds_each_one_once"),
    "latest first": (LatestFirst, "due.the_next_query_after_a_cut_chunk_is_now"),
    "asks in a minute": (AsksInAMinute, "due.the_next_query_is_the_earliest_to_come"),
    "asks at the end of time": (AsksInAMinute, "due.any_start_will_do"),
    "shares one table": (SharesOneTable, "timeouts.each_endpoint_has_its_own"),
    "looks and then removes": (LooksAndThenRemoves, "timeouts.of_several_who_remove_one_is_told_so"),
    "looks and then adds": (LooksAndThenAdds, "timeouts.of_several_who_add_one_is_told_so"),
    "says it is durable": (MemoryTimeouts, "timeouts.what_is_stored_survives_closing"),
    "peeks by writing": (PeeksByWriting, "timeouts.looking_waits_for_nobody"),
    "empties at set-up": (EmptiesAtSetUp, "timeouts.setting_up_may_be_done_at_once_and_again"),
    "sets up by itself": (SetsUpByItself, "timeouts.without_its_table_it_says_so"),
    "gives one to several": (GivesOneToSeveral, "claiming.of_several_who_claim_one_has_it"),
    "never lets go": (NeverLetsGo, "claiming.what_was_let_go_is_as_it_was"),
    "hides what is claimed": (HidesWhatIsClaimed, "claiming.looking_sees_what_is_claimed"),
    "adds beside the transaction": (AddsBesideTheTransaction, "enlisting.a_timeout_is_added_with_the_transaction"),
    "forgives what is gone": (ForgivesWhatIsGone, "enlisting.a_timeout_is_removed_with_what_is_sent"),
    "names another database": (NamesAnotherDatabase, "enlisting.it_names_the_database_of_the_queues"),
    "leaves the saga in the transaction": (LeavesTheSagaInTheTransaction, "enlisting.a_saga_ends_with_the_transaction"),
}


class BrokenSubject(TimeoutSubject):
    def __init__(self, broken: type[Any], good: SqliteSubject, *, durable: bool) -> None:
        self._broken, self._good, self.durable = broken, good, durable

    def open(self) -> TimeoutPersister:
        if issubclass(self._broken, SqliteTimeouts):
            return self._broken(self._good.path, synchronous="normal")
        return self._broken()

    def open_elsewhere(self) -> TimeoutPersister:
        return as_another_process(self.open)

    def remove_elsewhere(self, timeout_id: str) -> AbstractContextManager[None]:
        return self._good.remove_elsewhere(timeout_id)

    def transport(self) -> LocalTransport:
        return self._good.transport()


@pytest.mark.parametrize("defect", BROKEN)
async def test_broken_timeouts_fail_their_check(defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.backends.sqlite.connection.LOCK_PATIENCE_SECONDS", 0.1)  # for who waits for a lock
    broken, name = BROKEN[defect]
    check = {str(check): check for check in timeout_checks()}[name]
    durable = issubclass(broken, SqliteTimeouts) or name == "timeouts.what_is_stored_survives_closing"
    with pytest.raises((ConformanceFailure, StoreUnavailable)):
        await check(BrokenSubject(broken, SqliteSubject(tmp_path), durable=durable))


def test_every_check_is_failed_by_some_defect() -> None:
    assert {name for _, name in BROKEN.values()} == {str(check) for check in timeout_checks()}
