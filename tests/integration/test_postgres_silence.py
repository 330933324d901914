"""A server that says nothing any more is given up, and what was begun there harms nobody. ADR 0049, 0053."""

import os
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import anyio
import psycopg
import pytest
from tests.integration.postgres_place import SECOND, TABLE, Place, now, placed
from tests.proxy import FaultyLink
from tests.waiting import until

from postdate import DelayedDelivery, Endpoint, LocalTransport, TransactionMode
from postdate.backends.postgres.answering import Answers, BoundedConnection, NoAnswer
from postdate.backends.postgres.pool import PostgresPool
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.errors import StoreNotWritable, StoreUnreachable, TransportUnreachable
from postdate.messages import Envelope
from postdate.ports import Claim, Outcome, Received

pytestmark = pytest.mark.anyio


@pytest.fixture
async def place(postgres_url: str):
    async with placed(postgres_url) as place:
        yield place


@pytest.fixture
def link(postgres_url: str) -> Generator[FaultyLink]:
    server = urlsplit(postgres_url)
    assert server.hostname is not None
    assert server.port is not None
    with FaultyLink(server.hostname, server.port) as link:
        yield link


def through(link: FaultyLink, url: str) -> str:
    server = urlsplit(url)
    user = f"{server.netloc.rpartition('@')[0]}@" if "@" in server.netloc else ""
    return server._replace(netloc=f"{user}127.0.0.1:{link.port}").geturl()


@contextmanager
def impatient(adapter: PostgresStore | PostgresTransport, within: timedelta = SECOND / 2) -> Generator[None]:
    """Wait for answers for a short time only, while what must fail is done: good answers may take theirs."""
    answers = adapter.database._answers, adapter.database.shared._answers
    before = answers[0].within
    for each in answers:
        each.within = within
    try:
        yield
    finally:
        for each in answers:
            each.within = before


def waiting(place: Place) -> int:
    return place.rows(f'SELECT count(*) FROM "{TABLE}"')[0][0]


async def store_over(link: FaultyLink, place: Place) -> PostgresStore:
    store = PostgresStore(through(link, place.url), schema=place.schema, table=TABLE)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    return store


def queues_over(link: FaultyLink, place: Place) -> PostgresTransport:
    return PostgresTransport(through(link, place.url), schema=place.schema)


async def test_delivery_goes_on_when_all_connections_are_forgotten(place: Place, link: FaultyLink, tmp_path) -> None:
    """Behind a balancer that acknowledges what it has forgotten: nothing ever fails there, it only stays silent."""
    queues = LocalTransport(tmp_path / "queues.db")
    await queues.create_queues(["q"])
    store = await store_over(link, place)
    endpoint = Endpoint("service", transport=queues, delayed_delivery=DelayedDelivery(store), send_only=True)
    async with endpoint:
        begin = now()
        work = [place.work(n, begin + n * SECOND / 40, "q") for n in range(100)]
        await place.store.store_many(work, begin)
        await until(lambda: waiting(place) < 100)
        accepted = link.accepted
        with impatient(store):
            link.forget()
            await until(lambda: link.accepted >= accepted + 2)  # one that listens, and one that delivers
        await until(lambda: waiting(place) == 0)
    assert (await queues.queue_lengths())["q"] == 100
    await store.close()
    await queues.close()


async def test_what_was_claimed_on_a_forgotten_connection_is_free_again(place: Place, link: FaultyLink) -> None:
    """Its session lives on with its row locks, as far as the server knows: another one ends it."""
    store = await store_over(link, place)
    await place.store.store_many([place.work(n, now() - SECOND, "elsewhere") for n in range(3)], now())
    claims = await store.claim_due(now(), 10)
    link.forget()
    with impatient(store), pytest.raises(StoreUnreachable, match=r"did not answer within 0\.5 s"):
        await store.finish(claims, Outcome.DELIVERED, now())
    again = list[Claim]()

    async def claimed() -> bool:
        again.extend(await store.claim_due(now(), 10))
        return len(again) >= 3

    await until(claimed)
    assert len(again) == 3
    await store.close()


async def test_closing_does_not_wait_for_a_server_that_says_nothing(
    place: Place, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for so long as answers may take, nor connections; and each tries once to end what it leaves behind.

    To give back what it holds it needs another connection where none is idle, which is up to the machine; not one for
    each message.
    """
    url, hour = f"{through(link, place.url)}?connect_timeout=3600", timedelta(hours=1)
    store = PostgresStore(url, schema=place.schema, table=TABLE, answers_within=hour)
    transport = PostgresTransport(url, schema=place.schema, answers_within=hour)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    await place.store.store_many([place.work(n, now() - SECOND, "elsewhere") for n in range(4)], now())
    await place.transport.send([Envelope("consumer", "e-1")], now())
    receiver = transport.receiver("consumer")
    assert len(await receiver.receive(1)) == 1
    assert sum([len(await store.claim_due(now(), 1)) for _ in range(4)]) == 4
    tried, connect = list[threading.Thread](), PostgresPool.connect

    def noted(pool: PostgresPool, *arguments: Any) -> BoundedConnection:
        tried.append(threading.current_thread())
        return connect(pool, *arguments)

    link.stall()
    monkeypatch.setattr(PostgresPool, "connect", noted)
    monkeypatch.setattr("postdate.backends.postgres.answering._CLOSING_SECONDS", 0.3)
    await store.close()
    await transport.close()
    assert 2 <= len([each for each in tried if each.name != "postdate-postgres-listener"]) <= 4


@pytest.mark.parametrize("then", ["cut", "restore"])
async def test_closing_does_not_wait_for_the_thread_that_listens_while_that_connects(
    place: Place, link: FaultyLink, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """It holds nothing then, and ends by itself; nor does it take a number when it can connect after all."""
    store = PostgresStore(f"{through(link, place.url)}?connect_timeout=600", schema=place.schema, table=TABLE)
    stop = await store.listen(lambda: None)
    listener = store.database.listener()
    await until(lambda: listener.number is not None)
    with impatient(store):
        link.stall()
        await until(lambda: listener._is_lost)
    numbers = place.rows("SELECT last_value FROM holder_number")
    with monkeypatch.context() as leaving:
        leaving.setattr("postdate.backends.postgres.answering._CLOSING_SECONDS", 0.3)
        stop()
        await store.close()
    assert listener._thread.is_alive()
    getattr(link, then)()
    await until(lambda: not listener._thread.is_alive())
    assert listener.number is None
    assert place.rows("SELECT last_value FROM holder_number") == numbers


def test_who_leaves_tries_a_server_that_answers_again(postgres_url: str, link: FaultyLink) -> None:
    """Whatever others were told before: only who left has waited in vain, and only until somebody was answered."""
    pool = PostgresPool(through(link, postgres_url))
    stays, leaves = (Answers(timedelta(minutes=1), pool.abandoned) for _ in range(2))
    leaves.shorten_deadlines()
    link.cut()
    with pytest.raises(psycopg.OperationalError):
        pool.connect(stays)
    link.restore()
    pool.connect(leaves).close()
    link.stall()
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        pool.connect(leaves)
    link.restore()
    with pytest.raises(NoAnswer, match="just now"):
        pool.connect(leaves)
    pool.connect(stays).close()
    pool.connect(leaves).close()


async def test_a_receiver_goes_on_when_all_connections_are_forgotten(place: Place, link: FaultyLink) -> None:
    transport = queues_over(link, place)
    receiver = transport.receiver("consumer")
    await place.transport.send([Envelope("consumer", "e-1")], now())
    (first,) = await receiver.receive(1)
    await receiver.commit(first, now())
    link.forget()
    await place.transport.send([Envelope("consumer", "e-2")], now())
    received: list[Received] = []
    with impatient(transport), suppress(TransportUnreachable):  # unless the thread that listens notices it before
        received += await receiver.receive(1)
    received = received or await until(lambda: receiver.receive(1), despite=TransportUnreachable)
    await receiver.commit(received[0], now())
    assert received[0].envelope.message_id == "e-2"
    await transport.close()


async def test_a_locked_table_ends_no_call_later_than_the_silence_it_may_keep(place: Place) -> None:
    """And the statement is not done afterwards, when nobody waits for it any more."""
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    await store.store(place.work(1, now() + 60 * SECOND), now())
    with place.connect() as other, other.transaction():
        other.execute(f'LOCK TABLE "{TABLE}"')
        with impatient(store), pytest.raises(StoreUnreachable, match=r"did not answer within 0\.5 s"):
            await store.store(place.work(2, now() + 60 * SECOND), now())
        with impatient(store), pytest.raises(StoreUnreachable, match=r"did not answer within 0\.5 s"):
            await store.get("nobody")  # which reads one row, and not the table
        assert await store.history("nobody") == []  # a connection that works, which ends the session that waits
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%record%' "
            "AND datname = current_database()"
        )
        await until(lambda: place.rows(waiting.replace("%", "%%")) == [(0,)])
    assert (await store.statistics(now())).pending == 1
    await store.close()


async def test_a_locked_table_does_not_cost_a_process_what_it_holds(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection that holds looks into that table, too, and must not be given up for that."""
    monkeypatch.setattr("postdate.backends.postgres.access._SHORT_WAIT", "lock_timeout=100ms")
    transport = PostgresTransport(place.url, schema=place.schema)
    await place.transport.send([Envelope("consumer", "e-1")], now())
    receiver = transport.receiver("consumer")
    (received,) = await receiver.receive(1)
    number = transport.database.listener().wait_for_holder()
    with place.connect() as other, other.transaction():
        other.execute(f'LOCK TABLE "{TABLE}"')
        await until(lambda: "claims of processes that have ended cannot be released" in caplog.text)
    assert transport.database.listener().wait_for_holder() == number
    await receiver.commit(received, now())
    await transport.close()


async def test_a_session_with_the_number_of_one_that_was_given_up_lives_on_if_it_is_not_ours(place: Place) -> None:
    """Behind a link that was given up another server may have taken over, where the number is somebody else's."""
    shared = place.store.database.shared
    with place.connect(application_name="report") as other, shared.connect() as ours:
        shared.pool.abandoned._sessions.append((other.info.backend_pid, ours.opened_at))
        shared.connect().close()
        assert other.execute("SELECT 1").fetchone() == (1,)


async def test_the_address_does_not_make_the_connection_that_holds_wait_for_locks(place: Place) -> None:
    """What an address sets came last, and so counted."""
    store = PostgresStore(f"{place.url}?options=-c%20lock_timeout%3D0", schema=place.schema, table=TABLE)
    with store.database.shared.connect("lock_timeout=5s") as holding:
        assert holding.execute("SHOW lock_timeout").fetchone() == ("5s",)
    await store.close()


async def test_the_listener_notices_that_it_was_forgotten_and_wakes_who_sleeps(place: Place, link: FaultyLink) -> None:
    store, woken = await store_over(link, place), threading.Event()
    stop = await store.listen(woken.set)
    await store.next_attempt()
    woken.clear()
    accepted = link.accepted
    with impatient(store):
        link.forget()
        await until(lambda: link.accepted > accepted)
    await until(woken.is_set)
    stop()
    await store.close()


async def test_a_question_that_reads_whole_tables_may_take_its_time(place: Place) -> None:
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    await store.next_due()
    with impatient(store, SECOND / 10):
        sleepy = await store.database.run(lambda c: c.execute("SELECT pg_sleep(0.5)").fetchone(), patiently=True)
        assert sleepy is not None
        with pytest.raises(StoreUnreachable):
            await store.database.run(lambda c: c.execute("SELECT pg_sleep(60)").fetchone())
    await store.close()


@pytest.mark.parametrize("question", ["statistics", "due_counts"])
async def test_what_counts_all_that_waits_may_take_its_time(place: Place, question: str) -> None:
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    await store.store(place.work(1, now() + 60 * SECOND), now())
    waits_long = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database() "
        "AND clock_timestamp() - query_start > interval '0.3 s'"
    )
    counts = list[int]()

    async def count() -> None:
        if question == "statistics":
            counts.append((await store.statistics(now())).pending)
        else:
            counts.extend(await store.due_counts([now(), now() + 120 * SECOND]))

    with impatient(store, SECOND / 10):
        async with anyio.create_task_group() as tasks:
            with place.connect() as other, other.transaction():
                other.execute(f'LOCK TABLE "{TABLE}"')
                tasks.start_soon(count)
                await until(lambda: place.rows(waits_long) == [(1,)])
    assert counts == [1]
    await store.close()


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
async def test_limits_of_the_role_are_no_failure_of_a_message(place: Place, setting: str) -> None:
    url = f"{place.url}?options=-c%20{setting}%3D100ms"
    store = PostgresStore(url, schema=place.schema, table=TABLE)
    with place.connect() as other, other.transaction():
        other.execute(f'LOCK TABLE "{TABLE}"')
        with pytest.raises(StoreUnreachable):
            await store.store(place.work(1, now()), now())
    await store.close()


@contextmanager
def a_role(place: Place) -> Generator[tuple[str, str]]:
    """Make a role that may do everything with rows, and yield its name and the address with it."""
    role, schema = f"bereft_{os.getpid()}", place.schema.replace('"', '""')
    place.run(f'CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA "{schema}" TO {role}')
    for what in ("TABLES", "SEQUENCES"):
        place.run(f'GRANT ALL ON ALL {what} IN SCHEMA "{schema}" TO {role}')
    server = urlsplit(place.url)
    try:
        yield role, server._replace(netloc=f"{role}@{server.hostname}:{server.port}").geturl()
    finally:
        place.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize(("right", "table"), [("DELETE", TABLE), ("INSERT", "record")])
async def test_a_right_that_is_taken_away_holds_up_delivery_and_costs_no_message(
    place: Place, right: str, table: str
) -> None:
    """In one database, and with queues elsewhere, where the message goes back to be claimed again."""
    with a_role(place) as (role, url):
        store = place.another_store(url)
        await store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
        await store.store_many([place.work(n, now() - SECOND) for n in range(2)], now())
        place.run(f'REVOKE {right} ON "{table}" FROM {role}')
        with pytest.raises(StoreNotWritable, match="permission denied"):
            await store.move_due(now(), 10)
        ended, free = await store.claim_due(now(), 2)
        assert store.is_in_force(free)
        with pytest.raises(StoreNotWritable, match="permission denied"):
            await store.finish([ended], Outcome.DELIVERED, now())
        assert not store.is_in_force(free)  # with its transaction, whatever of it failed
        with pytest.raises(StoreNotWritable, match="permission denied"):  # and no sign that all is well again
            await store.finish([ended], Outcome.DELIVERED, now())
        assert (waiting(place), place.length("consumer")) == (2, 0)
        place.run(f'GRANT {right} ON "{table}" TO {role}')
        assert await store.finish(await store.claim_due(now(), 1), Outcome.DELIVERED, now()) == 1
        assert (await store.move_due(now(), 10)).delivered == 1
        assert (waiting(place), place.length("consumer")) == (0, 1)
        await store.close()


CLAIM_CALLS: dict[str, Callable[[PostgresStore, Sequence[Claim]], Awaitable[object]]] = {
    "finish": lambda store, claims: store.finish(claims, Outcome.DELIVERED, now()),
    "retry_later": lambda store, claims: store.retry_later(claims[0], now(), now(), "why"),
    "release": lambda store, claims: store.release(claims, None),
    "mark_unreadable": lambda store, claims: store.mark_unreadable(claims[0], "why", now()),
}


@pytest.mark.parametrize("call", CLAIM_CALLS)
async def test_a_call_for_claims_that_have_ended_asks_the_server(place: Place, link: FaultyLink, call: str) -> None:
    """Or who calls again, after the claims have ended with the connection, takes the store for well."""
    store = await store_over(link, place)
    await store.store_many([place.work(n, now() - SECOND) for n in range(2)], now())
    claims = await store.claim_due(now(), 2)
    link.cut()
    for _ in range(2):
        with pytest.raises(StoreUnreachable):
            await CLAIM_CALLS[call](store, claims)
        assert not any(map(store.is_in_force, claims))
    link.restore()
    assert not await CLAIM_CALLS[call](store, claims)
    assert len(await store.claim_due(now(), 10)) == 2
    await store.close()


async def test_a_slow_link_costs_nothing_but_time(place: Place, link: FaultyLink) -> None:
    link.delay(SECOND / 20)
    store = await store_over(link, place)
    await store.store_many([place.work(n, now() - SECOND, "elsewhere") for n in range(10)], now())
    claims = await store.claim_due(now(), 5)
    assert await place.store.finish(claims, Outcome.DELIVERED, now()) == 0, "they are another's"
    assert len(await place.store.claim_due(now(), 10)) == 5, "nothing is claimed twice"
    assert await store.finish(claims, Outcome.DELIVERED, now()) == 5
    assert link.accepted <= 4, "nothing was given up for being slow"
    await store.close()


async def test_texts_are_what_they_are_whatever_the_environment_says(place: Place, monkeypatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    message = place.work(1, now() + SECOND, "Aufträge 🕰 例")
    await store.store(message, now())
    assert await store.get("m-1") == message
    await store.close()


def test_a_silence_must_have_a_length(postgres_url: str) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        PostgresStore(postgres_url, answers_within=timedelta(0))
    with pytest.raises(ValueError, match="must be above 0"):
        PostgresStore(postgres_url, holds_at_most=timedelta(seconds=-1))
