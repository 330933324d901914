"""Stores on row locks when the server, or a process, falls silent: every call ends, closing ends, nothing is held."""

import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest
from tests.mariadb_subjects import drop_schema, fresh_schema
from tests.proxy import FaultyLink
from tests.servers import MariaDB

from postdate import DelayedMessage
from postdate.backends.mariadb.connection import MariaDbServer, MariaDbSession
from postdate.backends.mariadb.names import MariaDbNames
from postdate.backends.mariadb.store import MariaDbStore
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError, StoreUnavailable, StoreUnreachable
from postdate.ports import Claim, ClaimingStore, Mending, MessageFilter, Outcome, RecordKind
from postdate.wiring import open_store

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
TABLE = "sales.timeouts"


def messages(count: int) -> list[DelayedMessage]:
    return [DelayedMessage(f"m-{n}", NOW, "queue") for n in range(count)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have half a second for every answer."""
    monkeypatch.setattr("postdate.backends.mariadb.connection.LOG_IN_WITHIN_SECONDS", 0.5)
    for name in ("ANSWER_WITHIN", "ALIVE_WITHIN"):
        monkeypatch.setattr(f"postdate.backends.rowlocks.connection._{name}_SECONDS", 0.5)
    monkeypatch.setattr("postdate.backends.rowlocks.connection._PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr("postdate.backends.rowlocks.store._CLOSE_WITHIN_SECONDS", 0.5)


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


def mend(link: FaultyLink) -> None:
    """What was said meanwhile is lost, as when a network comes back after minutes."""
    link.cut()
    link.restore()


def _behind(url: str, link: FaultyLink) -> str:
    where = urlsplit(url)
    return where._replace(netloc=f"{where.username}:{where.password}@127.0.0.1:{link.port}").geturl()


@pytest.fixture
async def store(mariadb_url: str, schema: str, link: FaultyLink, impatient: None) -> AsyncIterator[MariaDbStore]:
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
    "quarantined": lambda store, _claims: store.quarantined(1),
    "put_back": lambda store, _claims: store.put_back(1, Mending(), NOW),
}


@pytest.mark.parametrize("call", CALLS)
async def test_every_call_ends_where_the_network_swallows_what_is_said(
    store: MariaDbStore, link: FaultyLink, call: str
) -> None:
    """What still acknowledges and forwards nothing is an outage: said as one, and the connection is not used again."""
    claims = list(await store.claim_due(NOW + SECOND, 1))
    link.stall()
    with anyio.fail_after(20), pytest.raises(StoreUnreachable, match="did not answer within"):
        await CALLS[call](store, claims)
    accepted = link.accepted
    mend(link)
    assert await store.get("m-1") is not None
    assert link.accepted > accepted, "on another connection"


async def test_how_long_a_server_may_be_silent_can_be_set(mariadb_url: str, schema: str, link: FaultyLink) -> None:
    """Before, `[store] answers_within` was refused for MariaDB and SQL Server, which had 30 s."""
    settings = {"schema": schema, "table": TABLE, "answers_within": SECOND / 4}
    with pytest.raises(ConfigurationError, match="above 0"):
        open_store(mariadb_url, **{**settings, "answers_within": timedelta(0)})
    with pytest.raises(ConfigurationError, match="above 0"):
        open_store("mssql://a@localhost/a", answers_within=timedelta(0))
    store = open_store(_behind(mariadb_url, link), **settings)
    await store.setup()
    assert await store.next_due() is None
    link.stall()
    with anyio.fail_after(20), pytest.raises(StoreUnreachable, match=r"did not answer within 0\.25 s"):
        await store.next_due()
    mend(link)
    await store.close()


async def test_closing_ends_where_the_network_swallows_what_is_said(store: MariaDbStore, link: FaultyLink) -> None:
    """With a batch by row locks, leases, and somebody who listens."""
    stop = await store.listen(lambda: None)
    one, other = [await store.claim_due(NOW + SECOND, 1), await store.claim_due(NOW + SECOND, 2)]
    await store.finish(other[:1], Outcome.DELIVERED, NOW)
    link.stall()
    stop()
    with anyio.fail_after(20):
        await store.close()
    mend(link)
    assert one


async def test_closing_ends_what_others_wait_for(
    store: MariaDbStore, link: FaultyLink, monkeypatch: pytest.MonkeyPatch, eventually: Callable
) -> None:
    """A call that has a minute left ends with the store."""
    store._pool._connections.close_idle()
    monkeypatch.setattr("postdate.backends.rowlocks.connection._ANSWER_WITHIN_SECONDS", 60.0)
    monkeypatch.setattr("postdate.backends.rowlocks.connection._ALIVE_WITHIN_SECONDS", 60.0)
    await store.get("m-0")
    link.stall()

    async def look() -> None:
        with pytest.raises(StoreUnreachable):
            await store.get("m-0")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await anyio.to_thread.run_sync(eventually, lambda: store._pool._lent, "it waits for an answer")
            store._pool.abort()
        await store.close()
    mend(link)


async def test_a_frozen_server_is_an_outage(server_folder: Path, impatient: None, eventually: Callable) -> None:
    server = MariaDB(server_folder)
    server.start()
    try:
        store = MariaDbStore(server.url, table=TABLE)
        await store.setup()
        await store.store_many(messages(3), NOW)
        claims = await store.claim_due(NOW + SECOND, 1)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for call in (store.claim_due(NOW + SECOND, 1), store.finish(claims, Outcome.DELIVERED, NOW)):
                with anyio.fail_after(20), pytest.raises(StoreUnreachable, match="did not answer within"):
                    await call
        finally:
            os.kill(server.pid, signal.SIGCONT)
        again = list[Claim]()
        with anyio.fail_after(20):
            while len(again) < 3:
                again += await store.claim_due(NOW + SECOND, 10)
                await anyio.sleep(0.01)
        assert await store.finish(again, Outcome.DELIVERED, NOW) == 3
        await store.close()
    finally:
        server.stop()


async def test_a_table_that_somebody_has_locked_is_not_waited_for_for_ever(
    mariadb_url: str, schema: str, store: MariaDbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.rowlocks.pool._GIVE_UP_AFTER_SECONDS", 0.0)
    settings = MariaDbServer.connect.__globals__["_SETTINGS"]
    assert "lock_wait_timeout = 10," in settings
    monkeypatch.setattr(
        "postdate.backends.mariadb.connection._SETTINGS", settings.replace("wait_timeout = 10,", "wait_timeout = 1,")
    )
    monkeypatch.setattr("postdate.backends.rowlocks.connection._ANSWER_WITHIN_SECONDS", 20.0)
    waiting = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    names = MariaDbNames(schema, TABLE)
    with closing(MariaDbServer(mariadb_url).connect()) as other:
        other.change(f"LOCK TABLES {names.plain(TABLE)} WRITE")
        for call in (waiting.claim_due(NOW + SECOND, 1), waiting.next_attempt()):
            with anyio.fail_after(20), pytest.raises(StoreUnavailable, match="Lock wait timeout"):
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
    store = mariadb.MariaDbStore(url, schema=schema, table=table, holds_at_most=timedelta(seconds=2))
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
        process.send_signal(signal.SIGSTOP)
        found = list[Claim]()
        with anyio.fail_after(30):
            while len(found) < 10 - finished:
                found += await store.claim_due(NOW + SECOND, 100)
                await anyio.sleep(0.02)
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


async def test_a_process_that_lives_keeps_what_it_holds(brief: MariaDbStore, eventually: Callable) -> None:
    await brief.setup()
    await brief.store_many(messages(3), NOW)
    claims = await brief.claim_due(NOW + SECOND, 10)
    (batch,) = {token.batch for token in brief._claims._held.values()}
    claimed_at = batch.heard_at
    await anyio.to_thread.run_sync(eventually, lambda: batch.heard_at - claimed_at > 2.5, "it was kept for longer")
    assert await brief.finish(claims, Outcome.DELIVERED, NOW) == 3
    await brief.close()


async def test_a_server_that_stands_still_for_a_while_ends_nothing_of_a_process_that_lives(
    mariadb_url: str, schema: str, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, whoever got no answer within 2 s gave up what it held, and all of it was sent twice."""
    monkeypatch.setattr("postdate.backends.rowlocks.connection._ALIVE_WITHIN_SECONDS", 0.1)
    monkeypatch.setattr("postdate.backends.rowlocks.liveness._SPEAK_AFTER_SECONDS", 0.1)
    asked, ask = threading.Event(), MariaDbSession.is_alive

    def asked_in_vain(session: MariaDbSession, at_most: float | None = None) -> bool:
        if not asked.is_set():
            link.stall()
            asked.set()
        return ask(session) if at_most is None else ask(session, at_most)

    store = MariaDbStore(_behind(mariadb_url, link), schema=schema, table=TABLE)
    await store.setup()
    await store.store_many(messages(3), NOW)
    monkeypatch.setattr(MariaDbSession, "is_alive", asked_in_vain)
    claims = await store.claim_due(NOW + SECOND, 10)
    assert await anyio.to_thread.run_sync(asked.wait, 20)
    await anyio.sleep(1)  # for so long it stands still, ten times what an idle connection has
    link.restore()
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 3
    await store.close()


async def test_what_waits_for_one_connection_silences_no_other(
    mariadb_url: str, schema: str, monkeypatch: pytest.MonkeyPatch, eventually: Callable
) -> None:
    """The thread that shows life goes on while a connection that holds a batch is asked."""
    monkeypatch.setattr("postdate.backends.rowlocks.liveness._SPEAK_AFTER_SECONDS", 0.1)
    store = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await store.setup()
    await store.store_many(messages(3), NOW)
    asked, answered = threading.Event(), threading.Event()

    def silent(_session: MariaDbSession, _at_most: float | None = None) -> bool:
        asked.set()
        return answered.wait(60)

    monkeypatch.setattr(MariaDbSession, "is_alive", silent)
    claims = await store.claim_due(NOW + SECOND, 10)
    assert await anyio.to_thread.run_sync(asked.wait, 20)
    heard = threading.Event()
    stop = await store.listen(heard.set)
    elsewhere = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await elsewhere.store(DelayedMessage("new", NOW - SECOND, "queue"), NOW)
    assert await anyio.to_thread.run_sync(heard.wait, 20), "it looks for news"
    answered.set()
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 3
    stop()
    await elsewhere.close()
    await store.close()


async def test_a_process_that_has_lost_what_it_held_finds_out(
    brief: MariaDbStore, monkeypatch: pytest.MonkeyPatch, eventually: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """It need not be told by a failing call: whoever looks at its own connections sees that one is gone."""
    monkeypatch.setattr("postdate.backends.rowlocks.liveness._SPEAKS_IN_TIME", 1 / 1.5)  # too late
    brief._assemble(TABLE)
    await brief.setup()
    await brief.store_many(messages(3), NOW)
    claims = await brief.claim_due(NOW + SECOND, 10)
    await anyio.to_thread.run_sync(eventually, lambda: "held no more" in caplog.text, "it is noticed")
    assert await brief.finish(claims, Outcome.DELIVERED, NOW) == 0
    assert len(await brief.claim_due(NOW + SECOND, 10)) == 3
    await brief.close()


# --- rights that are missing ------------------------------------------------------------------------------------------


@pytest.fixture
async def granted(mariadb_url: str, schema: str) -> AsyncIterator[MariaDbStore]:
    """A store of a user without rights on the table of what is set aside, with three messages, the first damaged."""
    where, user = urlsplit(mariadb_url), f"clerk{os.getpid()}"
    owner = MariaDbStore(mariadb_url, schema=schema, table=TABLE)
    await owner.setup()
    await owner.store_many(messages(3), NOW)
    await owner.close()
    names = MariaDbNames(schema, TABLE)
    tables = [names.pending, *(names.of(each) for each in ("record", "store", "holder"))]
    with closing(MariaDbServer(mariadb_url).connect()) as session:
        session.change(f"CREATE OR REPLACE USER {user}@'127.0.0.1' IDENTIFIED BY 'secret'")
        for table in tables:
            session.change(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {user}@'127.0.0.1'", {})
        assert session.change(f"UPDATE {names.pending} SET headers = 'no JSON' WHERE message_id = 'm-0'", {})
        address = f"mariadb://{user}:secret@{where.hostname}:{where.port}/"
        opened = MariaDbStore(address, schema=schema, table=TABLE)
        yield opened
        await opened.close()
        session.change(f"DROP USER {user}@'127.0.0.1'")


async def test_without_rights_to_set_aside_the_others_go_on(
    granted: MariaDbStore,
    mariadb_url: str,
    schema: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after an upgrade whose grants an administrator forgot. Before, no message was claimed any more."""
    assert (await granted.statistics(NOW + SECOND)).quarantined == 0
    (claim,) = await granted.claim_due(NOW + SECOND, 1)
    assert claim.message.message_id == "m-1"
    assert await granted.finish([claim], Outcome.DELIVERED, NOW) == 1
    claims = await granted.claim_due(NOW + SECOND, 10)
    assert [each.message.message_id for each in claims] == ["m-2"]
    assert await granted.finish(claims, Outcome.DELIVERED, NOW) == 1
    assert (await granted.claim_due(NOW + SECOND, 10), await granted.next_attempt()) == ([], None)
    said = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(said) == 1, said
    assert "--print-sql" in said[0]

    monkeypatch.setattr(granted._shelf, "_left_until", 0.0)  # a minute later
    assert await granted.next_attempt() == NOW
    with closing(MariaDbServer(mariadb_url).connect()) as session:
        aside = MariaDbNames(schema, TABLE).of("quarantine")
        session.change(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {aside} TO clerk{os.getpid()}@'127.0.0.1'", {})
    assert await granted.claim_due(NOW + SECOND, 10) == []
    assert [each.message_id for each in await granted.quarantined(10)] == ["m-0"]
    assert (await granted.statistics(NOW + SECOND)).quarantined == 1


# --- the clock of the server ------------------------------------------------------------------------------------------


async def test_the_server_tells_its_time_and_processes_see_the_clocks_of_each_other(
    mariadb_url: str, schema: str, eventually: Callable
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
    assert await here.reported_clocks() == {}, "who has ended is not listed"
    await here.close()
