"""A process that stands still loses what it holds to others, and does no harm when it goes on. ADR 0053, 0054."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator
from urllib.parse import urlsplit

import anyio
import pytest
from tests.integration.postgres_place import SECOND, TABLE, Place, now, placed
from tests.waiting import claimed, freeze_processes, received, until

from postdate import TransactionMode
from postdate.backends.postgres.listening import ObservedHeartbeats
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.messages import Envelope
from postdate.ports import Outcome

pytestmark = pytest.mark.anyio

HOLDER = """
    import sys, anyio
    from datetime import timedelta
    from postdate import SystemClock, TransactionMode
    from postdate.errors import ClaimLost, PostdateError
    from postdate.ports import Outcome
    from postdate.backends.postgres.outbox import PostgresOutbox
    from postdate.backends.postgres.store import PostgresStore
    from postdate.backends.postgres.timeouts import PostgresTimeouts
    from postdate.backends.postgres.transport import PostgresTransport

    async def main(url, schema, table):
        now, held = SystemClock().now, timedelta(seconds=2)
        store = PostgresStore(url, schema=schema, table=table, holds_at_most=held)
        transport = PostgresTransport(url, schema=schema, holds_at_most=held)
        await store.initialize("service", TransactionMode.RECEIVE_ONLY)
        locked = await store.claim_due(now(), 3)
        leased = await store.claim_due(now(), 3)
        await store.finish(leased[:1], Outcome.DELIVERED, now())
        receiver = transport.receiver("consumer")
        received = await receiver.receive(2)
        outbox, timeouts = PostgresOutbox(url, schema=schema), PostgresTimeouts(url, schema=schema)
        lock = "BEGIN; SELECT pg_advisory_xact_lock({key}, hashtext('{schema}'))"
        handling, sending = (await outbox.acquire()).connection, timeouts._connections.acquire()
        await handling.execute(lock.format(key=1, schema=schema).encode())
        sending.execute(lock.format(key=2, schema=schema).encode())
        print("holds", len(locked), len(leased) - 1, len(received), flush=True)
        sys.stdin.readline()
        done = 0
        for claims in (locked, leased[1:]):
            try:
                done += await store.finish(claims, Outcome.DELIVERED, now())
            except PostdateError:
                pass
        for each in received:
            try:
                await receiver.commit(each, now())
                done += 1
            except PostdateError:
                pass
        print("did", done, flush=True)
        sys.stdin.readline()
        again = await store.claim_due(now(), 10)
        print("claims", len(again), flush=True)
        await store.close()
        await transport.close()

    anyio.run(main, *sys.argv[1:])
"""

HANDLER = """
    import sys, anyio
    from datetime import timedelta
    from postdate import TransactionMode
    from postdate.backends.postgres.outbox import PostgresOutbox
    from postdate.backends.postgres.store import PostgresStore

    def wait_to_be_frozen(point):
        print(point, flush=True)
        sys.stdin.readline()

    async def main(url, schema, table, point):
        store = PostgresStore(url, schema=schema, table=table, holds_at_most=timedelta(seconds=2))
        await store.initialize("service", TransactionMode.RECEIVE_ONLY)
        await store.listen(lambda: None)  # so that this process shows life
        outbox = PostgresOutbox(url, schema=schema)
        transaction = await outbox.acquire()
        await outbox.begin(transaction)
        connection = transaction.connection
        await connection.execute(f"SELECT pg_advisory_xact_lock(1, hashtext('{schema}'))".encode())
        await connection.execute("CREATE TEMPORARY TABLE numbers (number integer)")
        if point == "copy":
            async with connection.cursor() as cursor, cursor.copy("COPY numbers FROM STDIN") as copy:
                await copy.write("1\\n")
                wait_to_be_frozen(point)
        else:
            async with connection.pipeline():
                await connection.execute("INSERT INTO numbers VALUES (1)")
                wait_to_be_frozen(point)

    anyio.run(main, *sys.argv[1:])
"""


class Holder:
    """A process that holds messages of all kinds, or what ``program`` holds, and says so."""

    def __init__(self, place: Place, program: str = HOLDER, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), place.url, place.schema, TABLE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go on\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def freeze(self) -> None:
        freeze_processes(self._process.pid)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
async def place(postgres_url: str):
    async with placed(postgres_url) as place:
        await place.store.store_many([place.work(n, now() - (10 - n) * SECOND, "elsewhere") for n in range(6)], now())
        await place.transport.send([Envelope("consumer", f"e-{n}") for n in range(2)], now())
        yield place


@pytest.fixture
def holder(place: Place) -> Generator[Holder]:
    holder = Holder(place)
    yield holder
    holder.end()


@pytest.fixture
async def watcher(place: Place):
    """A process that holds nothing and looks every second for those that stand still."""
    store = PostgresStore(place.url, schema=place.schema, table=TABLE, holds_at_most=6 * SECOND)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


async def test_what_a_frozen_process_holds_is_free_after_a_while_and_it_does_no_harm_when_it_wakes(
    place: Place, holder: Holder, watcher: PostgresStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Row locks, leases, and what was received: 2,500 messages were held for as long as it was frozen.

    So was what handlers had locked on the connection of the outbox, and timeouts that were being sent.
    """
    assert await anyio.to_thread.run_sync(holder.says) == "holds 3 2 2"
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    transport = PostgresTransport(place.url, schema=place.schema)
    receiver = transport.receiver("consumer")
    await watcher.listen(lambda: None)
    holder.freeze()
    claims, taken = await claimed(store, 5, now()), await received(receiver, 2)
    assert sorted(claim.message.message_id for claim in claims) == ["m-0", "m-1", "m-2", "m-4", "m-5"]
    assert "has sent no heartbeat for 2 s" in caplog.text
    free = "SELECT bool_and(pg_try_advisory_lock(key, hashtext(%s))) FROM generate_series(1, 2) AS key"
    await until(lambda: place.rows(free, place.schema) == [(True,)])
    holder.signal(signal.SIGCONT)
    holder.go_on()
    assert await anyio.to_thread.run_sync(holder.says) == "did 0"
    for each in taken:
        await receiver.commit(each, now())
    await store.close()  # which gives back what it holds
    holder.go_on()
    assert await anyio.to_thread.run_sync(holder.says) == "claims 5"
    await transport.close()


@pytest.mark.parametrize("point", ["copy", "pipeline"])
async def test_a_handler_that_is_frozen_amid_a_copy_or_a_pipeline_loses_its_locks(
    place: Place, watcher: PostgresStore, point: str
) -> None:
    """The server waits for the rest of the copy or of the pipeline: no time-out of a resting session counts. ADR 54."""
    handler = Holder(place, HANDLER, point)
    try:
        assert await anyio.to_thread.run_sync(handler.says) == point
        lock = "SELECT pg_try_advisory_lock(1, hashtext(%s))"
        assert place.rows(lock, place.schema) == [(False,)]
        await watcher.listen(lambda: None)
        handler.freeze()
        await until(lambda: place.rows(lock, place.schema) == [(True,)])
    finally:
        handler.end()


async def test_a_process_shows_life_while_it_holds_something(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.backends.postgres.listening._MAX_HEARTBEAT_INTERVAL_SECONDS", 0.1)
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    try:
        claims = await store.claim_due(now(), 3)
        sign = "SELECT seen FROM holder WHERE holder = %s", store.database.listener().wait_for_holder()
        for _ in range(2):
            seen = place.rows(*sign)
            await until(lambda seen=seen: place.rows(*sign) > seen)
        assert await store.finish(claims, Outcome.DELIVERED, now()) == 3
    finally:
        await store.close()  # else the schema could not be dropped, of which it holds rows


@pytest.mark.soak(
    "a process must show life in time",
    part="silence",
    proven_by=(
        "tests/integration/test_postgres_frozen.py::test_a_process_shows_life_while_it_holds_something",
        "tests/integration/test_postgres_frozen.py::test_whoever_stood_still_itself_takes_nobody_for_frozen",
    ),
)
async def test_a_process_that_lives_keeps_what_it_holds_however_long(place: Place, holder: Holder) -> None:
    assert await anyio.to_thread.run_sync(holder.says) == "holds 3 2 2"
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    await store.initialize("service", TransactionMode.RECEIVE_ONLY)
    stop = await store.listen(lambda: None)
    # Seen often enough for three times as long as it may hold without a sign of life.
    shown = set[object]()

    def has_shown_life() -> bool:
        shown.update(place.rows("SELECT holder, seen FROM holder WHERE holds_at_most = '2 s'"))
        return len(shown) >= 2 * 18

    await until(has_shown_life)
    holder.go_on()
    assert await anyio.to_thread.run_sync(holder.says) == "did 7"
    stop()
    await store.close()


def test_whoever_stood_still_itself_takes_nobody_for_frozen() -> None:
    watched = ObservedHeartbeats()
    assert watched.find_silent({1: ("a", 10)}, 0, 8) == set()
    assert watched.find_silent({1: ("a", 10)}, 5, 8) == set()
    assert watched.find_silent({1: ("a", 10)}, 100, 8) == set()
    assert watched.find_silent({1: ("a", 10)}, 105, 8) == set()
    assert watched.find_silent({1: ("a", 10), 2: ("b", 10)}, 110, 8) == {1}
    assert watched.find_silent({1: ("c", 10), 2: ("b", 10)}, 112, 8) == set()


@pytest.mark.parametrize("mark", ["", "by_tander%", "bystander"])
async def test_what_stands_in_the_table_ends_no_session_that_is_not_ours(
    place: Place, watcher: PostgresStore, mark: str
) -> None:
    """Anybody who may write there could have ended others by a mark that is a pattern."""
    number = watcher.database.listener().wait_for_holder() + 1000
    with place.connect(application_name="bystander") as other, place.connect(application_name="frozen") as frozen:
        frozen.execute("SELECT pg_advisory_lock(%s, %s)", (place.store.database.names.lock_class, number))
        frozen.execute(
            "INSERT INTO holder (holder, pid, machine, started_at, mark, seen, holds_at_most) "
            "VALUES (%s, 1, '', now(), %s, now(), '1 s')",
            (number, mark),
        )
        there = "SELECT 1 FROM holder WHERE holder = %s"
        await until(lambda: not place.rows(there, number))  # ended, and cleared
        assert other.execute("SELECT 1").fetchone() == (1,)


async def test_whoever_may_not_end_the_sessions_says_so_once(
    place: Place, holder: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    """Ending needs the role of the other process, or one that is a member of it."""
    assert await anyio.to_thread.run_sync(holder.says) == "holds 3 2 2"
    other = f"other_{os.getpid()}"
    schema = place.schema.replace('"', '""')
    place.run(f'CREATE ROLE {other} LOGIN; GRANT USAGE ON SCHEMA "{schema}" TO {other}')
    for what in ("TABLES", "SEQUENCES"):
        place.run(f'GRANT ALL ON ALL {what} IN SCHEMA "{schema}" TO {other}')
    server = urlsplit(place.url)
    url = server._replace(netloc=f"{other}@{server.hostname}:{server.port}").geturl()
    try:
        store = PostgresStore(url, schema=place.schema, table=TABLE, holds_at_most=6 * SECOND)
        await store.initialize("service", TransactionMode.RECEIVE_ONLY)
        stop = await store.listen(lambda: None)
        holder.freeze()
        refused = "cannot be ended; only their own role"
        await until(lambda: caplog.text.count(refused) >= 2)
        assert caplog.text.count("has sent no heartbeat") == 2  # of its store, and of its queues
        stop()
        await store.close()
    finally:
        place.run(f"DROP OWNED BY {other}; DROP ROLE {other}")
