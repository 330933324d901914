"""What the client answers: each method, for each state of the message, on each store, in each isolation."""

import asyncio
import os
import re
import threading
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from psycopg import IsolationLevel
from tests.integration.postgres_place import SECOND, now
from tests.integration.test_client import client_of

import postdate
from postdate import Answer, Client, DelayedMessage, Pending, TransactionMode
from postdate.client.background import Background, StoreSession
from postdate.config import load_settings
from postdate.errors import ConfigurationError, DuplicateMessage, InvalidMessage, StoreUnreachable
from postdate.ports import Outcome, RecordKind, answer_of
from postdate.ports.migrating import MOVED_AWAY
from postdate.wiring import open_store

HOUR = timedelta(hours=1)
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "change-of-mind.md"
STATES = {
    "waiting": Answer.DONE,
    "failing": Answer.DONE,
    "held": Answer.BEING_DELIVERED,
    "delivered": Answer.DELIVERED,
    "expired": Answer.EXPIRED,
    "failed": Answer.FAILED,
    "unreadable": Answer.UNREADABLE,
    "cancelled": Answer.CANCELLED,
    "unknown": Answer.NOT_FOUND,
}


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "redis"])
def place(request: pytest.FixtureRequest) -> Generator[tuple[Client, str, dict[str, Any]]]:
    with client_of(request.param, request) as found:
        yield found


async def _opened(url: str, more: dict[str, Any]) -> Any:
    store: Any = open_store(url, **more)
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    return store


async def _bring_about(client: Client, url: str, more: dict[str, Any]) -> tuple[Any, Any]:
    """Store a message for each state and bring it there; return the store, and the claim of the one that is held."""
    await client.list(limit=1)  # creates what is missing
    store = await _opened(url, more)
    past, ids = now() - 60 * SECOND, [each for each in STATES if each != "unknown"]
    await store.store_many([DelayedMessage(each, past, "mails") for each in ids if each != "waiting"], past)
    claims = {each.message.message_id: each for each in await store.claim_due(now(), 99)}
    await store.store(DelayedMessage("waiting", now() + HOUR, "mails"), now())
    for outcome in (Outcome.DELIVERED, Outcome.EXPIRED, Outcome.FAILED):
        await store.finish([claims[outcome.value]], outcome, now())
    assert await store.mark_unreadable(claims["unreadable"], "torn", now())
    await store.retry_later(claims["failing"], now() + HOUR, now(), "refused")
    await store.release([claims["cancelled"]], None)
    assert await store.cancel("cancelled", now())
    return store, claims["held"]


async def test_each_state_has_its_answer(place: tuple[Client, str, dict[str, Any]]) -> None:
    client, url, more = place
    store, held = await _bring_about(client, url, more)
    rescheduled = {each: await client.reschedule(each, delay=HOUR) for each in STATES}
    assert rescheduled == STATES
    for each in ("waiting", "failing"):
        message = await client.get(each)
        assert message is not None
        assert message.number_of_failures == 0, "it has all its retries"
    assert {each: await client.cancel(each) for each in STATES} == STATES
    ended = STATES | {"waiting": Answer.CANCELLED, "failing": Answer.CANCELLED}
    assert {each: await client.cancel(each) for each in STATES} == ended
    assert {each: await client.reschedule(each, delay=HOUR) for each in STATES} == ended
    await store.release([held], None)
    await store.close()


@pytest.mark.parametrize("isolation", list(IsolationLevel), ids=lambda level: level.name)
async def test_each_state_has_its_answer_in_a_transaction(
    isolation: IsolationLevel, request: pytest.FixtureRequest, postgres_url: str
) -> None:
    with client_of("postgres", request) as (client, url, more):
        store, held = await _bring_about(client, url, more)
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            await connection.set_isolation_level(isolation)
            await connection.execute("SELECT 1 FROM pg_class LIMIT 1")  # its view of the database begins
            await client.send(b"", destination="mails", delay=HOUR, message_id="later")
            seen = isolation in {IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED}
            late = Answer.DONE if seen else Answer.UNSEEN
            for each, answer in STATES.items():
                assert await client.reschedule(each, delay=HOUR, transaction=connection) is answer, each
                assert await client.cancel(each, transaction=connection) is answer, each
            assert await client.cancel("waiting", transaction=connection) is Answer.CANCELLED
            assert await client.reschedule("later", delay=2 * HOUR, transaction=connection) is late
            assert await client.cancel("later", transaction=connection) is late
            await connection.rollback()
        assert await client.cancel("later") is Answer.DONE
        await store.release([held], None)
        await store.close()


def test_the_guide_tells_which_answer_follows_from_which_record() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*)\|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {kind: answer for answer, kinds in rows for kind in re.findall(r"\w+", kinds)}
    ended = set(RecordKind) - {RecordKind.SCHEDULED, RecordKind.RESCHEDULED, RecordKind.PRUNED}
    assert told == {kind.name.lower(): answer_of((kind, "")).name for kind in ended}
    assert answer_of(None) is answer_of((RecordKind.CANCELLED, f"{MOVED_AWAY} by …")) is Answer.NOT_FOUND
    assert answer_of((RecordKind.SCHEDULED, "archived")) is Answer.NOT_FOUND


async def test_an_id_is_used_once_and_the_error_says_no_more_than_that(
    place: tuple[Client, str, dict[str, Any]],
) -> None:
    client, *_ = place
    await client.send(b"", destination="mails", delay=HOUR, message_id="once")
    assert await client.cancel("once")
    with pytest.raises(DuplicateMessage, match="an id is used once, even if the first message has ended"):
        await client.send(b"", destination="mails", delay=HOUR, message_id="once")


async def test_a_dry_run_comes_true(place: tuple[Client, str, dict[str, Any]]) -> None:
    client, *_ = place
    for hours in (2, 4, 9):
        await client.send(b"", destination="mails", delay=HOUR, expires_at=now() + hours * HOUR)
    expected = {Answer.DONE: 1, Answer.WOULD_EXPIRE: 2}
    for when in ({"delay": 5 * HOUR}, {"deliver_at": now() + 5 * HOUR}, {"later_by": 4 * HOUR}):
        how: Any = when
        assert await client.reschedule_where(Pending("mails"), **how, dry_run=True) == expected
    assert await client.reschedule_where(Pending("mails"), later_by=4 * HOUR) == expected
    assert await client.cancel_where(Pending("mails"), dry_run=True) == {Answer.DONE: 3}
    assert await client.cancel_where(Pending("mails")) == {Answer.DONE: 3}


async def test_a_dry_run_in_a_transaction_comes_true(request: pytest.FixtureRequest, postgres_url: str) -> None:
    with client_of("postgres", request) as (client, *_):
        for hours in (2, 4, 9):
            await client.send(b"", destination="mails", delay=HOUR, expires_at=now() + hours * HOUR)
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            for dry_run in (True, False):
                counts = await client.reschedule_where(
                    Pending("mails"), later_by=4 * HOUR, dry_run=dry_run, transaction=connection
                )
                assert counts == {Answer.DONE: 1, Answer.WOULD_EXPIRE: 2}


@pytest.mark.parametrize("place", ["sqlite", "postgres", "mariadb"], indirect=True)
async def test_the_longest_wait_counts_from_the_first_message(place: tuple[Client, str, dict[str, Any]]) -> None:
    client, url, more = place
    await client.list(limit=1)
    store, first = await _opened(url, more), now() - 2 * HOUR
    id_ = await store.replace("k", lambda id_, _: DelayedMessage(id_, now() + HOUR, "mails"), first)
    assert await client.replace(b"2", key="k", destination="mails", delay=8 * HOUR, longest_wait=3 * HOUR) == id_
    waits = await client.get(id_)
    assert waits is not None
    assert waits.due == first + 3 * HOUR
    await store.close()


@pytest.mark.parametrize("place", ["sqlite", "postgres", "mariadb"], indirect=True)
async def test_the_ids_of_the_store_cannot_be_named(place: tuple[Client, str, dict[str, Any]]) -> None:
    client, *_ = place
    follows: Any = {"destination": "mails", "zone": "Europe/Paris", "deliver_at": "2100-07-01 09:00"}
    await client.send(b"", **follows)
    own = "postdate~Europe/Paris"
    for call in (
        lambda: client.cancel(f"{own}~00000001"),
        lambda: client.reschedule(f"{own}~00000001", delay=HOUR),
        lambda: client.get(f"{own}~00000001"),
        lambda: client.send(b"", destination="mails", message_id=f"{own}~00000002"),
        lambda: client.replace(b"", key=own, destination="mails"),
    ):
        with pytest.raises(InvalidMessage, match="begins with 'postdate~'"):
            await call()
    with pytest.raises(InvalidMessage, match=r"destination 'postdate\.zones' is a name for the store's own messages"):
        await client.send(b"", destination="postdate.zones", delay=HOUR)
    assert len(await client.list()) == 1


async def test_a_transaction_of_another_database_is_refused(request: pytest.FixtureRequest, postgres_url: str) -> None:
    name = f"other_{os.getpid()}"
    with psycopg.connect(postgres_url, autocommit=True) as server, client_of("postgres", request) as (client, _, more):
        server.execute(f'CREATE DATABASE "{name}"'.encode())
        other = postgres_url.rpartition("/")[0] + f"/{name}"
        try:
            async with postdate.connect(other, **more) as twin:  # with tables of the same names
                await twin.send(b"", destination="mails", delay=HOUR, message_id="twin")
            await client.list(limit=1)
            async with await psycopg.AsyncConnection.connect(other) as connection:
                for _ in range(2):
                    with pytest.raises(ConfigurationError, match=f"is in the database '{name}'"):
                        await client.cancel("twin", transaction=connection)
            with psycopg.connect(other) as connection, pytest.raises(ConfigurationError, match="is in the database"):
                await anyio.to_thread.run_sync(lambda: client.blocking.cancel("twin", transaction=connection))
            with psycopg.connect(postgres_url) as connection:
                await anyio.to_thread.run_sync(lambda: client.blocking.cancel("twin", transaction=connection))
        finally:
            server.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


async def test_a_call_under_way_when_the_client_is_closed_ends_with_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.client.background._CLOSE_TIMEOUT_SECONDS", 1.0)
    settings = load_settings(None, {}, {"store.address": f"sqlite:///{tmp_path / 'shop.db'}"})
    background, begun = Background(lambda: settings, create=True), threading.Event()

    async def hang(_: StoreSession) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def hang_whatever_happens(_: StoreSession) -> None:
        begun.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    for work in (hang, hang_whatever_happens):
        begun.clear()
        future = background.submit(work)
        await anyio.to_thread.run_sync(begun.wait)
        await anyio.to_thread.run_sync(background.close)
        with pytest.raises(StoreUnreachable, match="closed before this call ended"):
            future.result(0)
