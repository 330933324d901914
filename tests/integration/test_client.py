"""The client: what waits is sent, cancelled, rescheduled, replaced, looked at, alone and in an open transaction."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.orm import scoped_session, sessionmaker
from tests import mariadb_subjects, postgres_subjects
from tests.integration.postgres_place import MILLISECOND, SECOND, now
from tests.integration.test_postgres_enqueue import Remind, Sales, begin, sales, sqlalchemy_url
from tests.redis_subjects import Prefix
from tests.waiting import until
from typing_extensions import override

import postdate
from postdate import (
    Answer,
    Client,
    DelayedMessage,
    Endpoint,
    HandlerContext,
    Limits,
    Origin,
    Pending,
    PostdateError,
    Postgres,
    SendOptions,
    SqliteStore,
    TransactionMode,
    errors,
    time_to_be_received,
)
from postdate.core.upkeep.store_clock import FollowingClock
from postdate.endpoint.message_types import type_name
from postdate.messages import Headers
from postdate.ports import Outcome
from postdate.wiring import open_store

__all__ = ["begin", "sales"]

HOUR = timedelta(hours=1)


@contextmanager
def client_of(kind: str, request: pytest.FixtureRequest) -> Generator[tuple[Client, str, dict[str, Any]]]:
    """Return a client of a store of a kind, and its address and settings."""
    more: dict[str, Any]
    if kind == "sqlite":
        url, more = f"sqlite:///{request.getfixturevalue('tmp_path') / 'shop.db'}", {}
        drop: Callable[[], object] = dict
    elif kind == "redis":
        prefix = Prefix(request.getfixturevalue("redis_url"))
        url, more, drop = f"{request.getfixturevalue('redis_url')}?prefix={quote(prefix.name)}", {}, prefix.drop
    else:
        subjects = postgres_subjects if kind == "postgres" else mariadb_subjects
        server, schema = request.getfixturevalue(f"{kind}_url"), subjects.fresh_schema()
        url, more, drop = server, {"schema": schema}, lambda: subjects.drop_schema(server, schema)
    client = postdate.connect(url, **more)
    yield client, url, more
    client.blocking.close()
    drop()


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "redis"])
def place(request: pytest.FixtureRequest) -> Generator[tuple[Client, str, dict[str, Any]]]:
    with client_of(request.param, request) as found:
        yield found


@pytest.fixture
def client(place: tuple[Client, str, dict[str, Any]]) -> Client:
    return place[0]


# --- alone ------------------------------------------------------------------------------------------------------------


def test_a_blocking_client_changes_limits(tmp_path: Path) -> None:
    with postdate.connect(f"sqlite:///{tmp_path / 'shop.db'}").blocking as shop:
        assert shop.limit("q", per_second=5) == Limits(per_second=5)
        assert shop.pause("q") == Limits(paused=True, per_second=5)
        assert shop.limits() == {"q": Limits(paused=True, per_second=5)}
        assert shop.resume("q") == Limits(per_second=5)
        assert shop.limits() == {"q": Limits(per_second=5)}


@time_to_be_received(60 * SECOND)
@dataclass
class Offer:
    """A message that is of no use later."""


async def test_a_message_expires_when_its_type_says_so_or_when_its_sender_does(client: Client) -> None:
    cases: list[tuple[dict[str, Any], int]] = [({}, 60), ({"time_to_be_received": 90 * SECOND}, 90)]
    for options, seconds in cases:
        before = now()
        offer = await client.get(await client.send(Offer(), destination="q", **options))
        assert offer is not None
        assert offer.expires_at is not None
        assert timedelta(0) <= offer.expires_at - before - seconds * SECOND < 20 * SECOND


async def test_a_customer_changes_his_mind(client: Client) -> None:
    before = now()
    first = await client.send(Remind("a lamp"), destination="mails", delay=HOUR, headers={"customer": "7"})
    second = await client.send(b"\0raw", destination="bills", deliver_at=before + 2 * HOUR, message_id="bill-1")
    assert second == "bill-1"
    waits = await client.get(first)
    assert waits is not None
    assert (waits.destination, waits.body, waits.headers["customer"]) == ("mails", b'{"of":"a lamp"}', "7")
    assert waits.headers[Headers.ENCLOSED_MESSAGE_TYPES] == type_name(Remind)
    assert timedelta(0) <= waits.due - before - HOUR < 60 * SECOND
    assert [each.message_id for each in await client.list()] == [first, second]
    assert [each.message_id for each in await client.list(Pending("bills", due_to=before + 3 * HOUR))] == [second]

    assert await client.reschedule(first, deliver_at=before + 3 * HOUR) is Answer.DONE
    assert [each.message_id for each in await client.list(limit=1)] == [second]
    assert await client.cancel(second)
    assert await client.cancel(second) is Answer.CANCELLED
    assert not await client.reschedule(second, delay=HOUR)
    assert await client.cancel("nobody") is Answer.NOT_FOUND
    assert await client.get(second) is None
    with pytest.raises(errors.DuplicateMessage):
        await client.send(b"", destination="bills", delay=HOUR, message_id="bill-1")


async def test_code_that_blocks_has_the_same(client: Client) -> None:
    def request() -> None:
        shop = client.blocking
        ids = shop.send_many([(Remind(f"{n}"), SendOptions("mails", n * HOUR)) for n in (1, 2)])
        assert shop.reschedule(ids[0], delay=3 * HOUR) is Answer.DONE
        assert [each.message_id for each in shop.list(Pending("mails"))] == ids[::-1]
        assert shop.cancel(ids[1])
        assert shop.get(ids[1]) is None
        with pytest.raises(errors.DuplicateMessage):
            shop.send_many([(b"", SendOptions("mails", HOUR, message_id=id_)) for id_ in (ids[0], "new")])
        assert shop.get("new") is not None

    await anyio.to_thread.run_sync(request)


async def test_what_a_service_has_is_answered_as_it_is(place: tuple[Client, str, dict[str, Any]]) -> None:
    client, url, more = place
    in_hand = await client.send(b"", destination="mails")
    gone = await client.send(b"", destination="mails")
    store = open_store(url, **more)
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    await until(lambda: _one_is_due(client))
    claims = await store.claim_due(now() + SECOND, 9)
    (held,) = [each for each in claims if each.message.message_id == in_hand]
    delivered = [each for each in claims if each.message.message_id == gone]
    await store.finish(delivered, Outcome.DELIVERED, now())
    assert await client.cancel(in_hand) is Answer.BEING_DELIVERED
    assert await client.reschedule(in_hand, delay=HOUR) is Answer.BEING_DELIVERED
    assert await client.cancel(gone) is Answer.DELIVERED
    assert await client.reschedule(gone, delay=HOUR) is Answer.DELIVERED
    await store.release([held], None)
    assert await client.cancel(in_hand) is Answer.DONE
    await store.close()


async def _one_is_due(client: Client) -> bool:
    return all(each.due < now() for each in await client.list())


async def test_wrong_types_are_told(client: Client) -> None:
    any_: Any = client
    for call in (
        lambda: any_.list("mails"),
        lambda: any_.cancel_where("mails"),
        lambda: any_.send_many([b"x"]),
        lambda: any_.send_many([(b"x", {})]),
        lambda: any_.cancel(7),
        lambda: any_.get(None),
        lambda: any_.reschedule(7, delay=HOUR),
    ):
        with pytest.raises(errors.InvalidMessage, match=r"Pending\(…\)|pairs|must be str"):
            await call()


async def test_wrong_arguments_are_refused_at_once(client: Client) -> None:
    with pytest.raises(errors.DelayConflict, match="give the time of delivery"):
        await client.reschedule("m")
    with pytest.raises(errors.DelayConflict, match="exclude each other"):
        await client.send(b"", destination="q", delay=HOUR, deliver_at=now())
    with pytest.raises(errors.InvalidMessage, match="JSON"):
        await client.send(object(), destination="q", delay=HOUR)
    with pytest.raises(errors.InvalidMessage, match="needs a destination"):
        await client.send_many([(b"", SendOptions(delay=HOUR))])
    id_ = await client.send(b"", destination="q", delay=HOUR, expires_at=now() + 2 * HOUR)
    with pytest.raises(errors.InvalidMessage, match="expire"):
        await client.reschedule(id_, delay=3 * HOUR)
    assert await client.cancel(id_)


def test_it_may_be_asked_from_any_loop_and_is_opened_again_after_its_end(client: Client) -> None:
    id_ = anyio.run(lambda: client.send(b"", destination="q", delay=HOUR))
    assert anyio.run(client.get, id_) is not None
    client.blocking.close()
    with client.blocking as shop:
        assert shop.cancel(id_)
    assert client.blocking.get(id_) is None


@pytest.mark.parametrize("place", ["sqlite", "postgres", "redis"], indirect=True)
async def test_who_delivers_nothing_is_told_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        await client.send(b"", destination="q", delay=HOUR)
    found = [each.message for each in caplog.records if each.name == "postdate.client"]
    no_service, no_queue = found
    assert no_service.startswith("no other process delivers what is sent: u")
    assert no_queue.startswith("there is no queue 'q'; create it: postdate setup --queue q, or start its consumer")


async def test_it_explains_where_a_message_is(tmp_path: Path) -> None:
    async with postdate.connect(f"sqlite:///{tmp_path / 'shop.db'}") as client:
        id_ = await client.send(b"", destination="mails", delay=HOUR)
        explained = await client.explain(id_)
        assert explained.state.value == "waiting"
        assert "it waits until it is due" in explained.headline


def test_an_address_that_cannot_be_is_told_and_so_is_a_server_that_is_not_there(tmp_path: Path) -> None:
    for url, create, said in (
        ("sqlit:///shop.db", True, r"\(an argument of connect\).* did you mean sqlite"),
        ("postgresql://nobody@127.0.0.1:1/none", True, "127"),
        (f"sqlite:///{tmp_path / 'none.db'}", False, "none.db"),
    ):
        with pytest.raises(PostdateError, match=said), postdate.connect(url, create=create).blocking as shop:
            shop.list()


# --- processes --------------------------------------------------------------------------------------------------------

FORKS = """
import os, sys, threading, time
from datetime import timedelta
import postdate

client = postdate.connect(sys.argv[1], schema=sys.argv[2] or None)
shop = client.blocking
HOUR = timedelta(hours=1)
shop.send(b"parent", destination="q", delay=HOUR, message_id="before")
busy = threading.Thread(target=lambda: [shop.get("before") for _ in range(300)])
busy.start()
children = []
for number in range(4):
    child = os.fork()
    if not child:
        shop.send(b"child", destination="q", delay=HOUR, message_id=f"child-{number}")
        assert shop.get("before") is not None
        sys.exit(0)
    children.append(child)
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
busy.join()
shop.send(b"parent", destination="q", delay=HOUR, message_id="after")
print(sorted(each.message_id for each in shop.list()))
"""


@pytest.mark.parametrize("place", ["sqlite", "postgres", "mariadb"], indirect=True)
def test_children_of_a_fork_have_their_own_and_leave_the_parent_its(place: tuple[Client, str, dict[str, Any]]) -> None:
    """And the program ends although nothing was closed."""
    _, url, more = place
    arguments = [sys.executable, "-W", "error", "-c", FORKS, url, more.get("schema", "")]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=90, check=False)
    assert (ran.stdout, ran.returncode) == (f"{['after', 'before', *(f'child-{n}' for n in range(4))]}\n", 0), (
        ran.stderr
    )


class SlowStore(SqliteStore):
    """A store whose opening ends when the test lets it, and fails while it ``is_down``."""

    may_open: threading.Event
    is_down = False
    attempts = 0
    opened = 0
    closed = 0

    @override
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        type(self).attempts += 1
        await until(self.may_open.is_set)
        if self.is_down:
            raise errors.StoreUnavailable("the server is down")
        await super().initialize(endpoint, mode)
        type(self).opened += 1

    @override
    async def close(self) -> None:
        type(self).closed += 1
        await super().close()


@pytest.fixture
def slow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[SlowStore]:
    """Have clients open stores of a class of this test's own."""

    class Store(SlowStore):
        may_open = threading.Event()

    def open_slow_store(_address: str, **_settings: object) -> SqliteStore:
        return Store(tmp_path / "shop.db")

    monkeypatch.setattr("postdate.client.background.open_store", open_slow_store)
    return Store


async def _cancelled_while_it_opens(slow_store: type[SlowStore]) -> Client:
    client = postdate.connect("sqlite:///of-the-test")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.limits)
        await until(lambda: slow_store.attempts == 1)
        tasks.cancel_scope.cancel()
    return client


async def test_the_error_of_an_opening_that_was_not_waited_for_is_given_to_no_later_call(
    slow_store: type[SlowStore],
) -> None:
    slow_store.is_down = True
    client = await _cancelled_while_it_opens(slow_store)
    slow_store.may_open.set()
    await until(lambda: slow_store.closed == 1)
    slow_store.is_down = False
    assert await client.limits() == {}
    await client.close()
    assert slow_store.attempts == slow_store.closed == 2


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_store_whose_opening_was_not_waited_for_is_closed_while_it_opens_and_afterwards(
    slow_store: type[SlowStore], is_open: bool
) -> None:
    client = await _cancelled_while_it_opens(slow_store)
    slow_store.may_open.set()
    if is_open:
        await until(lambda: slow_store.opened == 1)
    await client.close()
    assert slow_store.closed == 1


async def test_what_goes_on_ends_before_it_is_closed_and_nobody_waits_for_ever(client: Client) -> None:
    """Opening, and then many calls, beside closing again and again."""
    told = Counter[str]()

    async def work(number: int) -> None:
        for _ in range(20):
            try:
                await client.send(b"", destination="q", delay=HOUR, message_id=f"m-{number}-{told['sent']}")
                told["sent"] += 1
            except (errors.StoreUnavailable, errors.DuplicateMessage) as error:
                told[type(error).__name__] += 1

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(work, number)
        for _ in range(5):
            await client.close()
    assert told.total() == 160
    assert len(await client.list(limit=1_000)) >= told["sent"]


async def test_a_scoped_session_is_that_of_the_caller(sales: Sales, shop: Client) -> None:
    """And not the one that its registry has for the thread in which blocking connections are used."""
    engine = sqlalchemy.create_engine(sqlalchemy_url(sales.place.url, "psycopg"))
    session = scoped_session(sessionmaker(engine))
    id_ = await shop.send(Remind("x"), destination="sales", delay=HOUR, transaction=session)
    session.rollback()
    assert await shop.get(id_) is None
    id_ = await shop.send(Remind("x"), destination="sales", delay=HOUR, transaction=session)
    session.commit()
    assert await shop.get(id_) is not None
    session.remove()
    engine.dispose()


async def test_times_are_utc_whatever_the_session_says(sales: Sales, shop: Client) -> None:
    due = datetime(2027, 3, 28, 0, 30, tzinfo=UTC)  # half an hour before clocks are put forward in Berlin
    id_ = await shop.send(Remind("x"), destination="sales", deliver_at=due)
    async with await psycopg.AsyncConnection.connect(sales.place.url) as connection:
        await connection.execute("SET TIME ZONE 'Europe/Berlin'")
        await shop.reschedule_where(Pending("sales"), later_by=HOUR, transaction=connection)
        found = await shop.get(id_, transaction=connection)
        await connection.commit()
    assert found is not None
    assert (found.due, found.due.tzinfo) == (due + HOUR, UTC)


# --- in a transaction of the application ------------------------------------------------------------------------------


@pytest.fixture
def shop(sales: Sales) -> Generator[Client]:
    client = postdate.connect(sales.place.url, endpoint="service", schema=sales.place.schema)
    yield client
    client.blocking.close()


async def test_a_change_is_made_with_the_commit_and_never_was_with_a_roll_back(
    sales: Sales, shop: Client, begin
) -> None:
    kept, moved, ended = [await shop.send(Remind(each), destination="sales", delay=HOUR) for each in ("a", "b", "c")]
    async with begin(sales.place.url) as application:
        given = application.connection
        assert await shop.cancel(kept, transaction=given) is Answer.DONE
        assert await shop.reschedule(moved, delay=2 * HOUR, transaction=given) is Answer.DONE
        sent = await shop.send(Remind("d"), destination="sales", delay=HOUR, transaction=given)
        assert await shop.get(kept, transaction=given) is None
        assert await shop.get(kept) is not None, "others see it until the commit"
        assert await shop.get(sent) is None
        assert await shop.cancel(kept) is Answer.BEING_DELIVERED, "somebody else has it"
        await application.roll_back()
    assert await shop.get(kept) is not None
    assert await shop.get(sent) is None
    async with begin(sales.place.url) as application:
        given = application.connection
        assert await shop.cancel(kept, transaction=given) is Answer.DONE
        assert await shop.cancel(kept, transaction=given) is Answer.CANCELLED
        assert await shop.cancel("nobody", transaction=given) is Answer.NOT_FOUND
        two = await shop.send_many(
            [(Remind(each), SendOptions("sales", HOUR)) for each in ("e", "f")], transaction=given
        )
        assert await shop.cancel(two[0], transaction=given) is Answer.DONE, "what was sent in the same transaction"
        at_nine = await shop.reschedule(two[1], deliver_at="2099-07-01 09:00", zone="Europe/Paris", transaction=given)
        assert at_nine is Answer.DONE
        waiting = await shop.get(two[1], transaction=given)
        assert waiting is not None
        assert waiting.due == datetime(2099, 7, 1, 7, tzinfo=UTC)
        assert "Europe/Paris" in waiting.headers[Headers.WALL_TIME]
        assert await shop.reschedule(two[1], delay=timedelta(0), transaction=given) is Answer.DONE
        assert await shop.reschedule(moved, delay=timedelta(0), transaction=given) is Answer.DONE
        await application.commit()
    await sales.handles("b", "f")
    async with begin(sales.place.url) as application:
        assert await shop.cancel(moved, transaction=application.connection) is Answer.DELIVERED
        assert await shop.cancel(ended, transaction=application.connection) is Answer.DONE
        await application.commit()
    assert [await shop.get(each) for each in (kept, two[0], ended)] == [None] * 3
    history = await sales.place.store.history(kept)
    assert [each.kind.name for each in history] == ["SCHEDULED", "CANCELLED"]


async def test_what_fell_due_while_a_transaction_had_it_is_delivered_as_soon_as_that_is_rolled_back(
    sales: Sales, shop: Client
) -> None:
    due = now() + 200 * MILLISECOND
    id_ = await shop.send(Remind("late"), destination="sales", deliver_at=due)
    other = await shop.send(Remind("other"), destination="sales", delay=HOUR)
    async with await psycopg.AsyncConnection.connect(sales.place.url) as connection:
        await connection.execute("SELECT 1")
        if await shop.cancel(id_, transaction=connection):
            await until(lambda: now() > due + 100 * MILLISECOND)  # the poller has looked, and found it held
            assert sales.handled == []
            await connection.rollback()
    await sales.handles("late")
    assert await shop.cancel(other)


async def test_a_message_that_expires_before_its_new_due_time_stays_as_it_is(sales: Sales, shop: Client, begin) -> None:
    id_ = await shop.send(Remind("x"), destination="sales", delay=HOUR, expires_at=now() + 2 * HOUR)
    async with begin(sales.place.url) as application:
        with pytest.raises(errors.InvalidMessage, match="expire"):
            await shop.reschedule(id_, delay=3 * HOUR, transaction=application.connection)
        assert await shop.cancel(id_, transaction=application.connection)
        await application.commit()


async def test_a_blocking_client_takes_part_in_transactions(sales: Sales, shop: Client) -> None:
    id_ = await shop.send(Remind("x"), destination="sales", delay=HOUR)

    def request() -> None:
        with psycopg.connect(sales.place.url) as connection:
            assert shop.blocking.cancel(id_, transaction=connection)
            connection.rollback()
            assert shop.blocking.reschedule(id_, delay=2 * HOUR, transaction=connection)
            assert shop.blocking.send(b"", destination="q", delay=HOUR, transaction=connection)

    await anyio.to_thread.run_sync(request)
    assert len(await shop.list()) == 2


async def test_a_handler_changes_messages_in_the_transaction_of_its_outbox(postgres_url: str) -> None:
    schema, handled = postgres_subjects.fresh_schema(), list[str]()
    database = Postgres(postgres_url, schema=schema)
    endpoint = Endpoint("sales", database, outbox=True, transaction_mode=TransactionMode.RECEIVE_ONLY)
    async with postdate.connect(postgres_url, endpoint="sales", schema=schema) as client:

        @endpoint.handler(Remind)
        async def handle(message: Remind, context: HandlerContext) -> None:
            handled.append(message.of)
            assert await client.cancel(message.of, transaction=await context.transaction()) is Answer.DONE
            if handled.count(message.of) == 1:
                raise ValueError("rolled back, and tried again")

        async with endpoint:
            await client.send(Remind("later"), destination="sales", delay=HOUR, message_id="later")
            await endpoint.send(Remind("later"))
            await until(lambda: _is_gone(client, "later"))
    assert handled == ["later", "later"]
    await database.close()
    postgres_subjects.drop_schema(postgres_url, schema)


async def _is_gone(client: Client, message_id: str) -> bool:
    return await client.get(message_id) is None


@pytest.mark.parametrize("place", ["sqlite", "mariadb", "redis"], indirect=True)
async def test_a_store_that_cannot_says_so(client: Client) -> None:
    with pytest.raises(errors.ConfigurationError, match="cannot be part of a transaction of yours"):
        await client.cancel("m", transaction=object())


# --- one message a key ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["sqlite", "postgres", "mariadb"], indirect=True)
async def test_of_those_with_a_key_the_last_one_waits_and_no_longer_than_was_said(
    place: tuple[Client, str, dict[str, Any]],
) -> None:
    client, url, more = place
    began = now()
    first = await client.replace(b"1", key="a~ü%_", destination="mails", delay=HOUR, headers={"n": "1"})
    other = await client.replace(b"x", key="a", destination="mails", delay=9 * HOUR)
    second = await client.replace(
        Remind("2"), key="a~ü%_", destination="bills", delay=2 * HOUR, headers={"n": "2"}, expires_at=began + 9 * HOUR
    )
    assert first == second == "a~ü%_~00000001"
    assert other == "a~00000001"
    waits = await client.get(first)
    assert waits is not None
    assert (waits.destination, waits.body, waits.headers["n"]) == ("bills", b'{"of":"2"}', "2")
    assert timedelta(0) <= waits.due - began - 2 * HOUR < 60 * SECOND
    assert waits.expires_at == began + 9 * HOUR
    for _ in range(3):
        await client.replace(b"3", key="a~ü%_", destination="mails", delay=8 * HOUR, longest_wait=3 * HOUR)
    waits = await client.get(first)
    assert waits is not None
    assert timedelta(0) <= waits.due - began - 3 * HOUR < 60 * SECOND
    assert len(await client.list()) == 2
    store: Any = open_store(url, **more)
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    assert [each.kind.name for each in await store.history(first)] == ["SCHEDULED", *["RESCHEDULED"] * 4]
    (held,) = await store.claim_due(began + 4 * HOUR, 9)
    assert await client.replace(b"4", key="a~ü%_", destination="mails", delay=HOUR) == "a~ü%_~00000002"
    await store.finish([held], Outcome.DELIVERED, now())
    assert await client.replace(b"5", key="a~ü%_", destination="mails", delay=2 * HOUR) == "a~ü%_~00000002"
    assert await client.cancel("a~ü%_~00000002")
    assert await client.replace(b"6", key="a~ü%_", destination="mails", delay=HOUR) == "a~ü%_~00000003"
    assert len(await client.list()) == 2
    await store.close()
    with pytest.raises(errors.InvalidMessage, match="key"):
        await client.replace(b"", key="k" * 242, destination="mails", delay=HOUR)
    spread: dict[str, Any] = {"delay": HOUR, "spread": 9 * HOUR, "longest_wait": 2 * HOUR}
    for number in range(20):
        id_ = await client.replace(b"", key=f"spread {number}", destination="mails", **spread)
        waits = await client.get(id_)
        assert waits is not None
        assert waits.due <= now() + 2 * HOUR
    with pytest.raises(errors.InvalidMessage, match="leave out message_id"):
        await client.replace(b"", key="k", destination="mails", delay=HOUR, message_id="mine")


@pytest.mark.parametrize("place", ["sqlite", "postgres", "mariadb"], indirect=True)
async def test_many_who_replace_at_once_leave_one(place: tuple[Client, str, dict[str, Any]]) -> None:
    client, url, more = place
    another = postdate.connect(url, **more)
    async with anyio.create_task_group() as tasks:
        for number in range(40):
            replace = (client, another)[number % 2].replace
            send = partial(replace, b"%d" % number, key=f"k{number % 3}", destination="q", delay=HOUR)
            tasks.start_soon(send)
    assert sorted(each.message_id for each in await client.list()) == [f"k{n}~00000001" for n in range(3)]
    await another.close()


async def test_replacing_is_part_of_a_transaction(sales: Sales, shop: Client, begin) -> None:
    replace = partial(shop.replace, key="k", destination="sales", delay=HOUR)
    async with begin(sales.place.url) as application:
        id_ = await replace(Remind("1"), transaction=application.connection)
        await application.roll_back()
    assert await shop.get(id_) is None
    async with begin(sales.place.url) as application:
        assert await replace(Remind("2"), transaction=application.connection) == id_
        assert await replace(Remind("3"), delay=timedelta(0), transaction=application.connection) == id_
        await application.commit()
    await sales.handles("3")
    async with begin(sales.place.url) as application:
        assert await replace(Remind("4"), transaction=application.connection) == "k~00000002"
        await application.commit()
    waits = await shop.get("k~00000002")
    assert waits is not None
    assert waits.body == b'{"of":"4"}'


async def test_a_key_that_an_open_transaction_has_is_not_waited_for_for_long(
    sales: Sales, shop: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.postgres.changing._SHORT_LOCK_TIMEOUT", b"SET LOCAL lock_timeout = '10ms'")
    replace = partial(shop.replace, destination="sales", delay=HOUR)
    async with await psycopg.AsyncConnection.connect(sales.place.url) as application:
        id_ = await replace(b"1", key="k", transaction=application)
        with pytest.raises(errors.StoreUnavailable, match=r"'k' was replaced in a transaction that is open .* commit"):
            await replace(b"2", key="k")
        assert await replace(b"other", key="other") == "other~00000001"
        await application.commit()
    assert await replace(b"3", key="k") == id_
    waits = await shop.get(id_)
    assert waits is not None
    assert waits.body == b"3"


@pytest.mark.parametrize("place", ["redis"], indirect=True)
async def test_a_store_without_keys_says_so(client: Client) -> None:
    with pytest.raises(errors.NotSupported, match="cannot replace a message by its key"):
        await client.replace(b"", key="k", destination="q", delay=HOUR)


# --- all that match ---------------------------------------------------------------------------------------------------


async def _some(client: Client) -> datetime:
    """Store thirty messages, of three customers, ten at each of three hours, half with a lamp in it; return when."""
    began = now().replace(microsecond=0)
    hours = [began + (number // 10 + 1) * HOUR for number in range(30)]
    made = [
        (b"a lamp" if number % 2 else "ein Stühlchen".encode(), f"m-{number:02d}", hours[number], str(number % 3))
        for number in range(30)
    ]
    await client.send_many(
        [
            (body, SendOptions("mails", deliver_at=due, message_id=id_, headers={"customer": customer}))
            for body, id_, due, customer in made
        ]
    )
    return began


async def test_a_client_reads_the_clock_of_its_store_again_after_some_minutes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = FollowingClock.read, list[None]()

    async def count_read(clock: FollowingClock) -> None:
        reads.append(await read(clock))

    monkeypatch.setattr(FollowingClock, "read", count_read)
    with client_of("postgres", request) as (client, _, _):
        for minutes, count in ((10, 1), (10, 1), (0, 2), (0, 3), (10, 3)):
            monkeypatch.setattr("postdate.client.background._READ_AGAIN_AFTER", timedelta(minutes=minutes))
            assert await client.get("m") is None
            assert len(reads) == count


async def test_delays_count_from_the_latest_time_that_the_store_may_show(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, from the earliest one: they were short by what the client's clock did not know."""
    monkeypatch.setattr(FollowingClock, "latest", lambda clock: clock.now() + 5 * HOUR)
    with client_of("postgres", request) as (client, url, _):
        began = now()
        await client.send(b"", destination="q", delay=HOUR, message_id="sent")
        await client.send(b"", destination="q", delay=9 * HOUR, message_id="rescheduled")
        await client.reschedule("rescheduled", delay=HOUR)
        await client.replace(b"", key="replaced", destination="q", delay=HOUR)
        await client.send_many([(b"", SendOptions("q", delay=HOUR))] * 2)
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await client.send(b"", destination="q", delay=HOUR, message_id="in", transaction=connection)
            await client.replace(b"", key="in", destination="q", delay=HOUR, transaction=connection)
            await client.send(b"", destination="q", delay=9 * HOUR, message_id="moved", transaction=connection)
            await client.reschedule("moved", delay=HOUR, transaction=connection)
            await connection.commit()
        for each in await client.list():
            assert timedelta(0) <= each.due - began - 6 * HOUR < 60 * SECOND, each.message_id
        assert len(await client.list()) == 8
        await client.send(b"", destination="q", message_id="at once")
        at_once = await client.get("at once")
        assert at_once is not None
        assert at_once.due - began < 60 * SECOND


def _ids(found: Sequence[DelayedMessage]) -> list[str]:
    return [each.message_id for each in found]


async def test_those_that_match_are_found_cancelled_and_moved(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.core.changes._PAGE", 4)  # ten are due at one instant
    began = await _some(client)
    assert sorted(_ids(await client.list())) == [f"m-{number:02d}" for number in range(30)]
    assert len(await client.list(Pending(text="Stühl"))) == 15
    of_one = Pending("mails", headers={"customer": "1"}, text="lamp", due_from=began + 2 * HOUR)
    assert _ids(await client.list(of_one)) == ["m-13", "m-19", "m-25"]
    assert _ids(client.blocking.list(of_one)) == ["m-13", "m-19", "m-25"]
    assert _ids(await client.list(of_one, limit=2)) == ["m-13", "m-19"]
    assert await client.list(Pending(failing=True)) == []
    pages = [await client.list(limit=7)]
    while pages[-1]:
        pages.append(await client.list(limit=7, after=pages[-1][-1].cursor))
    assert [len(each) for each in pages] == [7, 7, 7, 7, 2, 0]
    assert [id_ for page in pages for id_ in _ids(page)] == _ids(await client.list())
    lamps = Pending(text="lamp")
    assert await client.list(lamps, after=pages[1][-1].cursor) == (await client.list(lamps))[7:]

    assert await client.cancel_where(of_one, dry_run=True) == {Answer.DONE: 3}
    assert len(await client.list(of_one)) == 3
    assert await client.cancel_where(of_one) == {Answer.DONE: 3}
    assert await client.list(of_one) == []
    later = Pending(headers={"customer": "2"})
    assert await client.reschedule_where(later, later_by=9 * HOUR) == {Answer.DONE: 10}
    assert {each.due for each in await client.list(later)} == {began + hours * HOUR for hours in (10, 11, 12)}
    assert await client.reschedule_where(later, deliver_at=began + 20 * HOUR) == {Answer.DONE: 10}
    assert {each.due for each in await client.list(later)} == {began + 20 * HOUR}
    await client.send(b"x", destination="short", delay=HOUR, expires_at=began + 2 * HOUR)
    assert await client.reschedule_where(Pending("short"), delay=5 * HOUR) == {Answer.WOULD_EXPIRE: 1}
    for nothing in (Pending(), Pending(failing=None)):
        with pytest.raises(errors.InvalidMessage, match="no condition"):
            await client.cancel_where(nothing)
    wrong: list[dict[str, Any]] = [{"headers": {}}, {"text": ""}, {"destination": ""}, {"headers": {"customer": None}}]
    wrong += [{"origins": each} for each in ((), "retry", {Origin.RETRY, "retry"})]
    for each in wrong:
        with pytest.raises(errors.MessageError, match=r"empty|must be str|must be some of Origin"):
            Pending(**each)
    gone, *others = await client.list(later)
    await client.cancel(gone.message_id)
    assert await client.list(later, after=gone.cursor) == others
    assert await client.list(later, after=others[0].cursor) == others[1:]
    monkeypatch.setattr("postdate.core.changes._PAGE", 500)
    moved = (await client.list())[3]
    await client.reschedule(moved.message_id, deliver_at=began + 15 * HOUR)
    assert await client.list(after=moved.cursor) == (await client.list())[3:]  # behind where it was
    with pytest.raises(errors.InvalidMessage, match="not a cursor"):
        await client.list(after=gone.message_id)
    with pytest.raises(errors.InvalidMessage, match="negative"):
        await client.reschedule_where(Pending("none"), delay=-HOUR)
    with pytest.raises(errors.DelayConflict, match="give the time of delivery"):
        await client.reschedule_where(Pending("short"))
    with pytest.raises(PostdateError, match="due_to"):
        Pending(due_to=datetime(2026, 1, 1))  # noqa: DTZ001 - which is what is refused
    assert len(await client.list()) == 27


async def test_the_first_error_ends_the_change_of_those_that_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an operator waits until a store out of reach has refused each of them."""
    client, cancel, tries = postdate.connect(f"sqlite:///{tmp_path / 'shop.db'}"), SqliteStore.cancel, list[str]()

    async def fail_first(store: SqliteStore, message_id: str, at: datetime) -> bool:
        tries.append(message_id)
        if len(tries) == 1:
            raise errors.StoreUnavailable("away")
        return await cancel(store, message_id, at)

    async with client:
        await client.send_many([(b"", SendOptions("mails", HOUR)) for _ in range(100)])
        monkeypatch.setattr(SqliteStore, "cancel", fail_first)
        with pytest.raises(errors.StoreUnavailable, match="away"):
            await client.cancel_where(Pending("mails"))
        assert len(await client.list()) > 80


async def test_those_that_match_are_changed_in_a_transaction(sales: Sales, shop: Client, begin) -> None:
    began = await _some(shop)
    of_one = Pending(headers={"customer": "1"})
    async with begin(sales.place.url) as application:
        given = application.connection
        await shop.send(b"", destination="mails", delay=HOUR, headers={"customer": "1"}, transaction=given)
        assert len(await shop.list(of_one, transaction=given)) == 11
        assert await shop.cancel_where(of_one, transaction=given, dry_run=True) == {Answer.DONE: 11}
        assert await shop.cancel_where(of_one, transaction=given) == {Answer.DONE: 11}
        moved = await shop.reschedule_where(
            Pending("mails", due_to=began + 90 * 60 * SECOND), later_by=HOUR, transaction=given
        )
        assert moved == {Answer.DONE: 7}
        await application.roll_back()
    assert len(await shop.list()) == 30
    async with begin(sales.place.url) as application:
        await shop.cancel_where(of_one, transaction=application.connection)
        await application.commit()
    assert len(await shop.list()) == 20


async def test_a_session_may_write_times_in_its_own_way(sales: Sales, shop: Client) -> None:
    """What a session sets for itself (``datestyle``) breaks no call in its transaction."""
    async with await psycopg.AsyncConnection.connect(sales.place.url) as connection:
        await connection.execute("SET datestyle = 'German, DMY'")
        await shop.replace(b"", key="k", destination="mails", delay=HOUR, transaction=connection)
        replaced = await shop.replace(b"", key="k", destination="mails", delay=HOUR, transaction=connection)
        (listed,) = await shop.list(Pending("mails"), transaction=connection)
        assert await shop.get(replaced, transaction=connection) == listed
        assert await shop.reschedule(replaced, delay=2 * HOUR, transaction=connection)
        assert await shop.cancel(replaced, transaction=connection)
        assert await shop.cancel(replaced, transaction=connection) is Answer.CANCELLED
        await connection.rollback()
