"""Claims by row locks against a server that loses answers: whatever is settled when, nothing is lost or done twice.

The rules are those at the head of :mod:`postdate.backends.sql.row_locks.claims`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.backends.sql.row_locks.claims import Claims
from postdate.backends.sql.row_locks.connection import DatabaseServer
from postdate.backends.sql.row_locks.pool import Pool
from postdate.errors import StoreUnreachable
from postdate.messages import DelayedMessage
from postdate.ports import Claim

DUE = datetime(2026, 1, 31, tzinfo=UTC)
HOLDER = 7
NUMBERS = range(6)
ANSWERED, LOST_BEFORE, LOST_AFTER = "answered", "lost before the commit", "lost after the commit"


@dataclass
class FakeServer:
    """Rows that are free, locked by a session or leased; the next commits end as it is told."""

    where = "nowhere"
    locked: dict[int, "FakeSession"] = field(default_factory=dict)
    leased: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    def connect(self) -> "FakeSession":
        return FakeSession(self)

    def free(self) -> list[int]:
        return [n for n in NUMBERS if n not in self.locked and n not in self.leased and n not in self.done]


class FakeSession:
    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.finished, self.to_lease, self.to_free = list[int](), dict[int, int](), list[int]()

    def begin(self) -> None:
        self.rollback()

    def lock(self, number: int) -> None:
        assert self.server.locked.setdefault(number, self) is self

    def commit(self) -> None:
        ending = self.server.endings.pop() if self.server.endings else ANSWERED
        if ending != LOST_BEFORE:
            for number in (*self.finished, *self.to_free):
                self.server.leased.pop(number, None)
            assert not set(self.finished) & set(self.server.done), "done twice"
            self.server.done += self.finished
            self.server.leased |= self.to_lease
        self.rollback()
        if ending != ANSWERED:
            raise StoreUnreachable(ending)

    def rollback(self) -> None:
        self.server.locked = {n: session for n, session in self.server.locked.items() if session is not self}
        self.finished, self.to_lease, self.to_free = [], {}, []

    def close(self) -> None:
        self.rollback()

    def is_alive(self, at_most: float | None = None) -> bool:
        return True

    def abort(self) -> None:
        self.rollback()

    def patient(self) -> AbstractContextManager[None]:
        return nullcontext()


class FakeTables:
    """The steps of a dialect: see ``LeasingTables``."""

    def lease(self, session: FakeSession, numbers: Sequence[int], holder: int) -> None:
        assert all(session.server.locked[number] is session for number in numbers)
        session.to_lease |= dict.fromkeys(numbers, holder)

    def release_leases(self, session: FakeSession, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        session.to_free = [
            n for n, holder in session.server.leased.items() if holder in holders and n in (numbers or ())
        ]
        return len(session.to_free)


def finish(session: FakeSession, numbers: Sequence[int], holder: int | None) -> int:
    """Do what ``holder`` holds: the row lock of this session, or a lease."""
    server = session.server
    found = [
        n for n in numbers if (server.locked.get(n) is session if holder is None else server.leased.get(n) == holder)
    ]
    session.finished += found
    return len(found)


@given(st.data())
def test_nothing_is_lost_and_nothing_done_twice_whatever_answers_are_lost(data: st.DataObject) -> None:
    server = FakeServer()
    pool = Pool(cast("DatabaseServer[Any]", server))
    claims, given_out = Claims(pool, FakeTables(), lambda: HOLDER), list[Claim]()
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        if server.free() and data.draw(st.booleans(), "claim"):
            session = pool.acquire()
            numbers = server.free()[: data.draw(st.integers(1, len(NUMBERS)), "how many")]
            for number in numbers:
                session.lock(number)
            tokens = claims.remember_batch(session, [(number, 0) for number in numbers])
            server.endings = [data.draw(st.sampled_from([ANSWERED, LOST_BEFORE, LOST_AFTER]), "ending")]
            if data.draw(st.booleans(), "lease all"):
                try:
                    claims.lease(tokens)
                except StoreUnreachable:
                    continue  # nobody gets them
            given_out += [Claim(DelayedMessage(str(t.number), DUE, "queue"), t) for t in tokens]
        elif given_out:
            some = data.draw(st.lists(st.sampled_from(given_out), unique_by=id), "some")
            server.endings = [data.draw(st.sampled_from([ANSWERED, LOST_BEFORE, LOST_AFTER]), "ending")]
            before = len(server.done)
            try:
                done = claims.settle(some, finish)
            except StoreUnreachable:
                continue
            assert done == len(server.done) - before, "what is reported was done"
    server.endings = []
    claims.release_all()
    for holder, numbers in claims.abandoned_leases().items():

        def free(session: FakeSession, holder: int = holder, numbers: Sequence[int] = numbers) -> int:
            return FakeTables().release_leases(session, [holder], numbers)

        pool.transaction_blocking(free)
    assert sorted([*server.done, *server.free()]) == list(NUMBERS), "done once, or free again"
    assert len(set(server.done)) == len(server.done)


def test_the_fake_server_notices_what_is_done_twice() -> None:
    server = FakeServer(done=[1])
    session = FakeSession(server)
    session.finished = [1]
    with pytest.raises(AssertionError, match="twice"):
        session.commit()
