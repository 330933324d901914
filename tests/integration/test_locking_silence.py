"""Stores on row locks when the server, or a process, falls silent: every call ends, closing ends, nothing is held."""

import math
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from tests.mariadb_subjects import drop_schema, fresh_schema
from tests.proxy import FaultyLink
from tests.servers import MariaDB
from tests.waiting import freeze_processes, until

from postdate import DelayedMessage
from postdate.backends.mariadb.connection import MariaDbServer, MariaDbSession
from postdate.backends.mariadb.schema import MariaDbNames
from postdate.backends.mariadb.store import MariaDbStore
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError, StoreUnavailable, StoreUnreachable
from postdate.ports import Claim, ClaimingStore, MessageFilter, Outcome, RecordKind
from postdate.wiring import open_store

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
TABLE = "sales.timeouts"
_AN_HOUR = 3_600.0
"""Where a call must not wait for an answer: a test that does is ended long before."""


def messages(count: int) -> list[DelayedMessage]:
    return [DelayedMessage(f"m-{n}", NOW, "queue") for n in range(count)]


@contextmanager
def answers_within(seconds: float, store: MariaDbStore) -> Generator[None]:
    """Have so long for every answer: while what must fail is done, as good answers may take their time."""
    connection = "postdate.backends.sql.row_locks.connection"
    sessions = [*store._pool._lent_sessions, *(session for session, _ in store._pool._connections.idle)]
    before = [session.seconds for session in sessions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("postdate.backends.mariadb.connection.LOG_IN_WITHIN_SECONDS", seconds)
        for name in ("ANSWER_WITHIN", "ALIVE_WITHIN", "PATIENCE"):
            patch.setattr(f"{connection}._{name}_SECONDS", seconds)
        for session in sessions:
            session.set_answer_limit(seconds)
        try:
            yield
        finally:
            for session, own in zip(sessions, before, strict=True):
                session.set_answer_limit(own)


@pytest.fixture
def schema(mariadb_url: str) -> Iterator[str]:
    name = fresh_schema()
    yield name
    drop_schema(mariadb_url, name)


@pytest.fixture
def link(mariadb_url: str) -> Iterator[FaultyLink]:
    where = urlsplit(mariadb_url)
    with FaultyLink(where.hostname or "", where.port or 0) as opened:
        yield opened


async def claimed(store: MariaDbStore, count: int) -> list[Claim]:
    """Claim until there are so many."""
    claims = list[Claim]()

    async def are_there() -> bool:
        claims.extend(await store.claim_due(NOW + SECOND, 100))
        return len(claims) >= count

    await until(are_there)
    return claims


def mend(link: FaultyLink) -> None:
    """What was said meanwhile is lost, as when a network comes back after minutes."""
    link.cut()
    link.restore()


def _behind(url: str, link: FaultyLink) -> str:
    where = urlsplit(url)
    return where._replace(netloc=f"{where.username}:{where.password}@127.0.0.1:{link.port}").geturl()


@pytest.fixture
async def store(mariadb_url: str, schema: str, link: FaultyLink) -> AsyncIterator[MariaDbStore]:
    """A store behind the link, with three messages that are due."""
    opened = MariaDbStore(_behind(mariadb_url, link), schema=schema, table=TABLE)
    await opened.setup()
    await opened.store_many(messages(3), NOW)
    yield opened
    await opened.close()


# --- a server that says nothing ---------------------------------------------------------------------------------------

Call = Callable[[MariaDbStore, list[Claim]], Awaitable[object]]
CALLS: dict[str, Call] = {
    "store": lambda store, _claims: store.store(DelayedMessage("new", NOW, "queue"), NOW),
    "store_many": lambda store, _claims: store.store_many(messages(9), NOW),
    "claim_due": lambda store, _claims: store.claim_due(NOW + SECOND, 10),
    "fetch_next_due": lambda store, _claims: store.fetch_next_due(NOW + SECOND),
    "finish": lambda store, claims: store.finish(claims, Outcome.DELIVERED, NOW),
    "retry_later": lambda store, claims: store.retry_later(claims[0], NOW, NOW, "why"),
    "release": lambda store, claims: store.release(claims, None),
    "next_attempt": lambda store, _claims: store.next_attempt(),
    "next_due": lambda store, _claims: store.next_due(),
    "statistics": lambda store, _claims: store.statistics(NOW),
    "record_counts": lambda store, _claims: store.record_counts(),
    "list_pending": lambda store, _claims: store.list_pending(MessageFilter(), 10),
    "get": lambda store, _claims: store.get("m-0"),
    "history": lambda store, _claims: store.history("m-0"),
    "cancel": lambda store, _claims: store.cancel("m-0", NOW),
    "reschedule": lambda store, _claims: store.reschedule("m-0", NOW, NOW),
    "server_facts": lambda store, _claims: store.server_facts(),
    "list_unreadable": lambda store, _claims: store.list_unreadable(1),
    "discard_unreadable": lambda store, _claims: store.discard_unreadable(1, NOW),
}


_LIKE_OTHERS = pytest.mark.soak(
    "goes the same way as the calls of the gate",
    part="silence",
    proven_by="tests/integration/test_locking_silence.py::test_every_call_ends_where_the_network_swallows_what_is_said",
)
_GATE = {"store", "claim_due", "finish", "next_attempt", "statistics"}


@pytest.mark.parametrize("call", [call if call in _GATE else pytest.param(call, marks=_LIKE_OTHERS) for call in CALLS])
async def test_every_call_ends_where_the_network_swallows_what_is_said(
    store: MariaDbStore, link: FaultyLink, call: str
) -> None:
    """What still acknowledges and forwards nothing is an outage: said as one, and the connection is not used again."""
    claims = list(await store.claim_due(NOW + SECOND, 1))
    link.stall()
    with answers_within(0.3, store), pytest.raises(StoreUnreachable, match="did not answer within"):
        await CALLS[call](store, claims)
    accepted = link.accepted
    mend(link)
    assert await store.get("m-1") is not None
    assert link.accepted > accepted, "on another connection"


@pytest.mark.parametrize("call", ["finish", "retry_later", "release"])
async def test_a_call_for_claims_that_have_ended_asks_the_server(
    store: MariaDbStore, link: FaultyLink, call: str
) -> None:
    """Or who calls again, after the claims have ended with the connection, takes the store for well."""
    claims = list(await store.claim_due(NOW + SECOND, 10))
    link.cut()
    for _ in range(2):
        with pytest.raises(StoreUnreachable):
            await CALLS[call](store, claims)
        assert not any(map(store.is_in_force, claims))
    link.restore()
    assert not await CALLS[call](store, claims)
    assert len(await claimed(store, 3)) == 3


async def test_how_long_a_server_may_be_silent_can_be_set(
    mariadb_url: str, schema: str, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, `[store] answers_within` was refused for MariaDB and SQL Server, which had 30 s."""
    settings = {"schema": schema, "table": TABLE, "answers_within": SECOND / 4}
    with pytest.raises(ConfigurationError, match="above 0"):
        open_store(mariadb_url, **{**settings, "answers_within": timedelta(0)})
    with pytest.raises(ConfigurationError, match="above 0"):
        open_store("mssql://a@localhost/a", answers_within=timedelta(0))
    monkeypatch.setattr("postdate.backends.sql.row_locks.pool._TRUSTED_SECONDS", math.inf)
    store = open_store(_behind(mariadb_url, link), **settings)
    assert isinstance(store, MariaDbStore)
    store._pool.release(await anyio.to_thread.run_sync(store._pool.acquire))  # logging in may take its time
    link.stall()
    with pytest.raises(StoreUnreachable, match=r"did not answer within 0\.25 s"):
        await store.next_due()
    mend(link)
    await store.close()


async def test_closing_ends_where_the_network_swallows_what_is_said(
    store: MariaDbStore, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a batch by row locks, leases, and somebody who listens, however long answers may take."""
    stop = await store.listen(lambda: None)
    one, other = [await store.claim_due(NOW + SECOND, 1), await store.claim_due(NOW + SECOND, 2)]
    await store.finish(other[:1], Outcome.DELIVERED, NOW)
    link.stall()
    stop()
    monkeypatch.setattr("postdate.backends.sql.row_locks.store._CLOSE_WITHIN_SECONDS", 0.3)
    with answers_within(_AN_HOUR, store):
        await store.close()
    mend(link)
    assert one


async def test_closing_ends_what_others_wait_for(store: MariaDbStore, link: FaultyLink) -> None:
    """A call that has an hour left ends with the store."""
    link.stall()

    async def look() -> None:
        with pytest.raises(StoreUnreachable):
            await store.get("m-0")

    with answers_within(_AN_HOUR, store):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await until(lambda: store._pool._lent_sessions)
            store._pool.abort()
        await store.close()
    mend(link)


@pytest.mark.soak(
    "freezes a server of its own",
    part="silence",
    proven_by="tests/integration/test_locking_silence.py::test_every_call_ends_where_the_network_swallows_what_is_said",
)
async def test_a_frozen_server_is_an_outage(server_folder: Path) -> None:
    server = MariaDB(server_folder)
    server.start()
    try:
        store = MariaDbStore(server.url, table=TABLE)
        await store.setup()
        await store.store_many(messages(3), NOW)
        claims = await store.claim_due(NOW + SECOND, 1)
        assert server.pid is not None
        freeze_processes(server.pid)
        try:
            for call in (store.claim_due(NOW + SECOND, 1), store.finish(claims, Outcome.DELIVERED, NOW)):
                with answers_within(0.5, store), pytest.raises(StoreUnreachable, match="did not answer within"):
                    await call
        finally:
            os.kill(server.pid, signal.SIGCONT)
        again = await claimed(store, 3)
        assert await store.finish(again, Outcome.DELIVERED, NOW) == 3
        await store.close()
    finally:
        server.stop()


async def test_a_table_that_somebody_has_locked_is_not_waited_for_for_ever(
    mariadb_url: str, schema: str, store: MariaDbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.sql.row_locks.pool._RETRY_FOR_SECONDS", 0.0)
    settings = MariaDbServer.connect.__globals__["_SETTINGS"]
    assert "lock_wait_timeout = 10," in settings
    monkeypatch.setattr(
        "postdate.backends.mariadb.connection._SETTINGS", settings.replace("wait_timeout = 10,", "wait_timeout = 1,")
    )
    waiting = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    names = MariaDbNames(schema, TABLE)
    with closing(MariaDbServer(mariadb_url).connect()) as other:
        other.change(f"LOCK TABLES {names.qualified_name(TABLE)} WRITE")
        for call in (waiting.claim_due(NOW + SECOND, 1), waiting.next_attempt()):
            with pytest.raises(StoreUnavailable, match="Lock wait timeout"):
                await call
        other.change("UNLOCK TABLES")
    assert len(await waiting.claim_due(NOW + SECOND, 10)) == 3
    await waiting.close()


# --- a process that shows no life -------------------------------------------------------------------------------------

_CLAIM_AND_WAIT = """
import asyncio, sys
from datetime import datetime, timedelta
from postdate.errors import StoreUnavailable
from postdate.ports import Outcome
from postdate.backends.mariadb import store as mariadb

async def main():
    url, schema, table, now, finished = sys.argv[1:]
    late, finished = datetime.fromisoformat(now), int(finished)
    store = mariadb.MariaDbStore(url, schema=schema, table=table, holds_at_most=timedelta(seconds=4))
    claims = await store.claim_due(late, 10)
    if finished:
        await store.finish(claims[:finished], Outcome.DELIVERED, late)
    print(len(claims), flush=True)
    sys.stdin.readline()
    for attempt in range(3):
        try:
            print("finished", await store.finish(claims[finished:], Outcome.FAILED, late), flush=True)
            break
        except StoreUnavailable:
            pass
    await store.close()

asyncio.run(main())
"""


def _started(arguments: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("finished", [0, 4], ids=["row locks", "leases"])
async def test_a_frozen_process_loses_what_it_holds_and_can_do_nothing_to_it(
    mariadb_url: str, schema: str, finished: int
) -> None:
    store = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await store.setup()
    await store.store_many(messages(10), NOW)
    stop = await store.listen(lambda: None)
    late = (NOW + SECOND).isoformat()
    arguments = [sys.executable, "-c", _CLAIM_AND_WAIT, mariadb_url, schema, TABLE, late, str(finished)]
    process = await anyio.to_thread.run_sync(_started, arguments)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"10\n"
        freeze_processes(process.pid)
        found = await claimed(store, 10 - finished)
        assert await store.finish(found[:1], Outcome.DELIVERED, NOW) == 1
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(b"go\n", timeout=60)
        assert said == b"finished 0\n"
        assert await store.finish(found[1:], Outcome.DELIVERED, NOW) == 9 - finished
        assert await store.record_counts() == {RecordKind.SCHEDULED: 10, RecordKind.DELIVERED: 10}
    finally:
        process.kill()
        process.communicate()
        stop()
        await store.close()


@pytest.fixture
def brief(mariadb_url: str, schema: str) -> MariaDbStore:
    """Return a store that holds for a second at most if nothing is said."""
    return MariaDbStore(mariadb_url, schema=schema, table=TABLE, holds_at_most=SECOND)


async def test_a_process_is_heard_of_on_each_connection_by_which_it_holds(
    mariadb_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.sql.row_locks.liveness._PING_AFTER_SECONDS", 0.1)
    store = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await store.setup()
    await store.store_many(messages(3), NOW)
    claims = await store.claim_due(NOW + SECOND, 10)
    (batch,) = {token.batch for token in store._claims._tokens.values()}
    for _ in range(2):
        heard_at = batch.answered_at
        await until(lambda heard_at=heard_at: batch.answered_at > heard_at)
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 3
    await store.close()


@pytest.mark.soak(
    "a process that stands still for a second loses what it holds",
    part="clocks",
    proven_by="tests/integration/test_locking_silence.py::test_a_process_is_heard_of_on_each_connection_by_which_it_holds",
)
async def test_a_process_that_lives_keeps_what_it_holds(brief: MariaDbStore) -> None:
    await brief.setup()
    await brief.store_many(messages(3), NOW)
    claims = await brief.claim_due(NOW + SECOND, 10)
    (batch,) = {token.batch for token in brief._claims._tokens.values()}
    claimed_at = batch.answered_at
    await until(lambda: batch.answered_at - claimed_at > 2.5)
    assert await brief.finish(claims, Outcome.DELIVERED, NOW) == 3
    await brief.close()


async def test_a_server_that_stands_still_for_a_while_ends_nothing_of_a_process_that_lives(
    mariadb_url: str, schema: str, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, whoever got no answer within 2 s gave up what it held, and all of it was sent twice."""
    monkeypatch.setattr("postdate.backends.sql.row_locks.liveness._PING_AFTER_SECONDS", 0.1)
    asked, ask = list[float | None](), MariaDbSession.is_alive

    def asked_in_vain(session: MariaDbSession, at_most: float | None = None) -> bool:
        if not asked:
            link.stall()
            asked.append(at_most)
        return ask(session, at_most)

    store = MariaDbStore(_behind(mariadb_url, link), schema=schema, table=TABLE)
    await store.setup()
    await store.store_many(messages(3), NOW)
    monkeypatch.setattr(MariaDbSession, "is_alive", asked_in_vain)
    claims = await store.claim_due(NOW + SECOND, 10)
    await until(lambda: asked)
    assert asked[0] is not None
    assert asked[0] > 30, "seconds: as long as the server would hold on, not those of an idle connection"
    link.restore()
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 3
    await store.close()


async def test_what_waits_for_one_connection_silences_no_other(
    mariadb_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that shows life goes on while a connection that holds a batch is asked."""
    monkeypatch.setattr("postdate.backends.sql.row_locks.liveness._PING_AFTER_SECONDS", 0.1)
    store = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await store.setup()
    await store.store_many(messages(3), NOW)
    asked, answered = threading.Event(), threading.Event()

    def silent(_session: MariaDbSession, _at_most: float | None = None) -> bool:
        asked.set()
        return answered.wait()

    monkeypatch.setattr(MariaDbSession, "is_alive", silent)
    claims = await store.claim_due(NOW + SECOND, 10)
    await until(asked.is_set)
    heard = threading.Event()
    stop = await store.listen(heard.set)
    elsewhere = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await elsewhere.store(DelayedMessage("new", NOW - SECOND, "queue"), NOW)
    await until(heard.is_set)  # it looks for news
    answered.set()
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 3
    stop()
    await elsewhere.close()
    await store.close()


async def test_a_process_that_has_lost_what_it_held_finds_out(
    brief: MariaDbStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It need not be told by a failing call: whoever looks at its own connections sees that one is gone."""
    monkeypatch.setattr("postdate.backends.sql.row_locks.liveness._PINGS_BEFORE_TIMEOUT", 1 / 1.5)  # too late
    brief._assemble(TABLE)
    await brief.setup()
    await brief.store_many(messages(3), NOW)
    claims = await brief.claim_due(NOW + SECOND, 10)
    await until(lambda: "held no more" in caplog.text)
    assert await brief.finish(claims, Outcome.DELIVERED, NOW) == 0
    assert len(await brief.claim_due(NOW + SECOND, 10)) == 3
    await brief.close()


# --- the clock of the server ------------------------------------------------------------------------------------------


async def test_the_server_tells_its_time_and_processes_see_the_clocks_of_each_other(
    mariadb_url: str, schema: str
) -> None:
    here, there = (MariaDbStore(mariadb_url, schema=schema, table=TABLE) for _ in range(2))
    clock = SystemClock()
    assert isinstance(here, ClaimingStore)
    await here.setup()
    before, told, after = clock.now(), await here.server_now(), clock.now()
    assert before - SECOND < told < after + SECOND, "the server is on this machine"
    assert await here.reported_clocks() == {}
    await there.report_clock(timedelta(seconds=-1.5))
    me = f"{platform.node()}:{os.getpid()}"
    assert await here.reported_clocks() == {me: timedelta(seconds=-1.5)}
    await there.report_clock(timedelta(microseconds=7))
    assert await here.reported_clocks() == {me: timedelta(microseconds=7)}
    await there.close()

    async def is_listed_no_more() -> bool:
        return await here.reported_clocks() == {}

    await until(is_listed_no_more)
    await here.close()
