"""What stores on servers with row locks share, without a server: running again, waking, migrations."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest

from postdate.backends.sql.row_locks.claims import Claims
from postdate.backends.sql.row_locks.connection import DatabaseServer
from postdate.backends.sql.row_locks.liveness import Liveness
from postdate.backends.sql.row_locks.parts import Conflict
from postdate.backends.sql.row_locks.pool import Connections, Pool
from postdate.backends.sql.row_locks.tables import RowLockTables
from postdate.errors import (
    InvalidMessage,
    PostdateError,
    StoreFull,
    StoreNotSetUp,
    StoreTroubled,
    StoreUnavailable,
)
from postdate.runtime.next_due import NextDue


class Session:
    def __init__(self, log: list[str]) -> None:
        self.log, self.alive = log, True

    def begin(self) -> None:
        self.log.append("begin")

    def commit(self) -> None:
        self.log.append("commit")

    def rollback(self) -> None:
        self.log.append("rollback")

    def close(self) -> None:
        self.log.append("close")

    def is_alive(self, at_most: float | None = None) -> bool:
        return self.alive

    def abort(self) -> None:
        self.log.append("abort")

    def patient(self) -> AbstractContextManager[None]:
        return nullcontext()


class Server:
    where = "nowhere"

    def __init__(self) -> None:
        self.log = list[str]()
        self.sessions = list[Session]()

    def connect(self) -> Session:
        self.sessions.append(Session(self.log))
        self.log.append("connect")
        return self.sessions[-1]

    def typed(self) -> DatabaseServer[Any]:
        return cast("DatabaseServer[Any]", self)


@pytest.fixture
def server() -> Server:
    return Server()


# --- transactions -----------------------------------------------------------------------------------------------------


def _failing(times: int, error: PostdateError) -> Callable[[Session], str]:
    failures = [error] * times

    def work(_session: Session) -> str:
        if failures:
            raise failures.pop()
        return "done"

    return work


def test_a_transaction_that_lost_against_another_is_run_again(server: Server) -> None:
    assert Pool(server.typed()).transaction_blocking(_failing(2, Conflict("deadlock"))) == "done"
    assert server.log == ["connect", "begin", "rollback", "begin", "rollback", "begin", "commit"]


def test_it_is_not_run_again_for_ever(server: Server) -> None:
    with pytest.raises(Conflict):
        Pool(server.typed()).transaction_blocking(_failing(100, Conflict("deadlock")))
    assert server.log.count("begin") == server.log.count("rollback") == 8


@pytest.mark.parametrize(
    ("error", "ending"), [(InvalidMessage("wrong"), "rollback"), (StoreUnavailable("gone"), "close")]
)
def test_other_errors_end_it_at_once(server: Server, error: PostdateError, ending: str) -> None:
    with pytest.raises(type(error)):
        Pool(server.typed()).transaction_blocking(_failing(1, error))
    assert server.log == ["connect", "begin", ending]


def test_a_connection_that_died_while_idle_is_replaced(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.backends.sql.row_locks.pool._TRUSTED_SECONDS", 0.0)
    pool = Pool(server.typed())
    pool.run_blocking(lambda _session: None)
    server.sessions[0].alive = False
    pool.run_blocking(lambda _session: None)
    assert server.log == ["connect", "close", "connect"]


def test_a_closed_pool_lends_nothing_and_keeps_nothing(server: Server) -> None:
    pool = Pool(server.typed())
    session = pool.acquire()
    pool.close()
    pool.release(session)
    assert server.log == ["connect", "close"]
    with pytest.raises(StoreUnavailable, match="closed"):
        pool.acquire()


def test_what_several_pools_share_is_closed_by_the_last(server: Server) -> None:
    shared = Connections(server.typed())
    first, second = Pool(shared), Pool(shared)
    first.run_blocking(lambda _session: None)
    second.run_blocking(lambda _session: None)
    assert server.log == ["connect"], "one connection serves both"
    first.close()
    first.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        first.acquire()
    second.run_blocking(lambda _session: None)
    assert server.log == ["connect"]
    lent = second.acquire()
    second.close()
    second.release(lent)
    assert server.log == ["connect", "close"]


# --- who is alive -----------------------------------------------------------------------------------------------------


class FewTables:
    """As much of the tables as the connection needs that holds messages; goes wrong as often as it is told to."""

    def __init__(self) -> None:
        self.errors = list[Exception]()
        self.appeared, self.looked = 0, threading.Event()

    def register_holder(self, _session: Session) -> int:
        self.appeared += 1
        return self.appeared

    def find_unknown_holders(self, _session: Session) -> list[int]:
        return []

    def find_dead_holders(self, _session: Session) -> list[int]:
        looked = self.looked
        if self.errors:
            raise self.errors.pop()
        looked.set()
        return []

    def release_leases(self, _session: Session, _holders: list[int], _numbers: list[int] | None = None) -> int:
        return 0

    def remove_holders(self, _session: Session, _holders: list[int]) -> None:
        return None


@pytest.fixture
def tables() -> FewTables:
    return FewTables()


@pytest.fixture
def liveness(server: Server, tables: FewTables, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liveness]:
    monkeypatch.setattr("postdate.backends.sql.row_locks.liveness._RELEASE_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr("postdate.backends.sql.row_locks.liveness._POLL_INTERVAL_SECONDS", 0.01)
    shared = cast("RowLockTables", tables)
    liveness = Liveness(server.typed(), shared, NextDue[int]())
    liveness.start(Claims(Pool(server.typed()), shared, liveness.wait_for_holder))
    yield liveness
    liveness.stop()


def _look(tables: FewTables) -> None:
    """Wait until all went well once more, from the beginning: what was on its way already sets the event before."""
    looked = tables.looked = threading.Event()
    looked.wait()


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), TypeError("as drivers raise it"), AssertionError()])
def test_whatever_ends_the_connection_another_number_follows(
    liveness: Liveness, tables: FewTables, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert liveness.wait_for_holder() == 1
    tables.errors += [error, error]
    _look(tables)
    assert liveness.wait_for_holder() == 3
    assert len([record for record in caplog.records if "lost the connection" in record.message]) == 1


@pytest.mark.parametrize(
    "error", [StoreNotSetUp("no table"), StoreFull("full"), StoreTroubled("internal error"), Conflict("deadlock")]
)
def test_what_is_not_wrong_with_the_connection_does_not_end_it(
    liveness: Liveness, tables: FewTables, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    _look(tables)
    tables.errors += [error] * 3
    _look(tables)
    assert (liveness.wait_for_holder(), tables.appeared) == (1, 1)
    assert len(caplog.records) == (0 if isinstance(error, Conflict) else 1)


def test_no_number_outlives_its_connection(liveness: Liveness) -> None:
    assert liveness.wait_for_holder() == 1
    liveness.stop()
    with pytest.raises(StoreUnavailable):
        liveness.wait_for_holder()


# --- waking -----------------------------------------------------------------------------------------------------------


def test_only_what_comes_before_all_that_is_known_wakes() -> None:
    next_due, woken = NextDue[int](), list[str]()
    stop = next_due.listen(lambda: woken.append("woken"))
    for attempt_at, count in ((100, 1), (100, 1), (101, 1), (99, 2)):
        next_due.announce(attempt_at)
        assert len(woken) == count
    stop()
    next_due.announce(1)
    assert len(woken) == 2
    assert not next_due.has_listeners


def test_what_is_heard_of_during_a_look_is_not_forgotten_by_it() -> None:
    next_due = NextDue[int]()
    look = next_due.start_query()
    next_due.announce(50)
    assert next_due.finish_query(look, 100) == 50
    assert next_due.finish_query(next_due.start_query(), 100) == 100
    assert next_due.finish_query(next_due.start_query(), None) is None


def test_what_is_heard_of_during_two_looks_is_forgotten_by_neither() -> None:
    next_due = NextDue[int]()
    first = next_due.start_query()
    next_due.announce(50)
    second = next_due.start_query()
    assert next_due.finish_query(second, 100) == 100
    assert next_due.finish_query(first, None) == 50


def test_it_may_be_woken_from_any_thread() -> None:
    next_due, woken = NextDue[int](), threading.Event()
    next_due.listen(woken.set)
    threading.Thread(target=next_due.forget).start()
    woken.wait()
