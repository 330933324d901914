"""In time, whatever happens: late commits, old snapshots, cut connections, restarted servers, clocks that disagree."""

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import psycopg
import pytest
from tests.integration.postgres_place import MILLISECOND, SECOND, Place, now, placed
from tests.integration.test_postgres_plans import fill, plan_of
from tests.proxy import FaultyLink
from tests.servers import PostgreSQL
from tests.waiting import UntilWoken, claimed, received, until

from postdate import DelayedDelivery, Endpoint, TransactionMode
from postdate.backends.postgres.low_water import LowWater
from postdate.errors import ClaimLost, StoreUnavailable
from postdate.ports import Outcome

MINUTE = timedelta(minutes=1)
SOON = 100 * MILLISECOND


@pytest.fixture
async def place(postgres_url: str):
    async with placed(postgres_url) as place:
        yield place


@asynccontextmanager
async def service(place: Place, ahead: timedelta = timedelta(0), *, url: str | None = None) -> AsyncGenerator[Endpoint]:
    """A service with connections of its own, as in another process, which sleeps until it is woken."""
    woken = UntilWoken(ahead)
    store, transport = place.another_store(url), place.another_transport(url)
    endpoint = Endpoint(
        "service", transport=transport, delayed_delivery=DelayedDelivery(store), send_only=True, clock=woken
    )
    try:
        async with endpoint:
            await woken.sleeps_again()
            yield endpoint
    finally:
        await store.close()
        await transport.close()


async def done(place: Place, messages: int) -> None:
    """Wait until so many messages are in the queue ``done``."""
    await until(lambda: place.length("done") >= messages)


def none_is_early(place: Place, messages: int) -> None:
    assert place.rows("SELECT at > due, count(*) FROM record WHERE kind = 2 GROUP BY 1") == [(True, messages)]


# --- hearing ----------------------------------------------------------------------------------------------------------


async def test_no_announcement_is_missed_while_the_listener_does_other_things(place: Place) -> None:
    """Its connection has questions of its own each second; what comes in between their answers counts as well."""
    listener, heard = place.store.database.listener(), list[int]()
    stop = listener.listen(lambda topic, _, value: heard.append(value) if topic == "due" else None)
    listener.wait_for_holder()
    ended = threading.Event()

    def busy() -> None:
        while not ended.is_set():
            listener.add_role(delivers_from=1)

    asking = threading.Thread(target=busy)
    asking.start()
    try:
        with place.connect() as connection:
            channel = place.store.database.names.channel
            for number in range(2_000):
                connection.execute("SELECT pg_notify(%s, %s)", (channel, f"due 1 {number}"))
    finally:
        ended.set()
        asking.join()
    await until(lambda: len(heard) >= 2_000)
    stop()
    assert heard == list(range(2_000))


async def test_a_notification_by_somebody_else_does_no_harm(place: Place) -> None:
    async with service(place):
        with place.connect() as connection:
            for payload in ("", "hello", "due x y", "due 1 2 3", "queue"):
                connection.execute("SELECT pg_notify(%s, %s)", (place.store.database.names.channel, payload))
        await place.store.store(place.work(1, now() + SOON, "done"), now())
        await done(place, 1)
    none_is_early(place, 1)


@pytest.mark.soak(
    "measures lateness",
    part="clocks",
    proven_by=(
        "tests/integration/test_postgres_wakeups.py::test_a_notification_by_somebody_else_does_no_harm",
        "tests/integration/test_postgres_wakeups.py::test_what_a_long_transaction_stored_is_delivered_as_soon_as_it_ends",
    ),
)
@pytest.mark.parametrize("by", ["store", "enqueue"])
async def test_who_sleeps_is_woken_in_time(place: Place, by: str) -> None:
    async with service(place):
        for number in range(10):
            message = place.work(number, now() + SOON, "done")
            if by == "store":
                await place.store.store(message, now())
            else:
                with psycopg.connect(place.url) as connection:
                    await place.store.enqueue(connection, [message], now())
            await done(place, number + 1)
    lateness = place.lateness()
    assert len(lateness) == 10
    assert all(timedelta(0) < late < SECOND for late in lateness), lateness


# --- looks that begin where the last one ended ------------------------------------------------------------------------


@asynccontextmanager
async def old_snapshot(place: Place) -> AsyncGenerator[None]:
    """Somebody holds a snapshot, so that the server keeps everything that is delivered meanwhile."""
    with place.connect() as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM record")
        yield
        connection.execute("ROLLBACK")


async def test_what_is_stored_late_with_an_earlier_due_time_is_in_time_beside_an_old_snapshot(
    place: Place, start
) -> None:
    async with service(place), old_snapshot(place):
        begin = now()
        for batch in range(0, 2_000, 500):
            work = [place.work(n, begin + n * MILLISECOND / 4, "done") for n in range(batch, batch + 500)]
            await place.store.store_many(work, begin)
        await done(place, 2_000)
        for number in range(10_000, 10_005):  # by another connection
            await place.store.store(place.work(number, now() + SOON, "done"), now())
            await done(place, 2_001 + number - 10_000)
        process = start("storer", place.address, 10_005, 3)
        assert await anyio.to_thread.run_sync(process.end) == 0
        await done(place, 2_008)
        await place.store.store(place.work(10_015, begin - MINUTE, "done"), now())  # before all that was delivered
        await done(place, 2_009)
    none_is_early(place, 2_009)


async def test_what_a_long_transaction_stored_is_delivered_as_soon_as_it_ends(place: Place) -> None:
    """Meanwhile others are delivered whose due times are later, and the beginning of looks has moved past its own."""
    async with service(place), old_snapshot(place):
        with psycopg.connect(place.url) as connection:
            for number in range(5):
                await place.store.enqueue(connection, [place.work(number, now() + SOON, "done")], now())
            for number in range(100, 200):
                await place.store.store(place.work(number, now() + 2 * SOON, "done"), now())
            await done(place, 100)
            connection.commit()
        await done(place, 105)
    none_is_early(place, 105)


async def test_a_look_beside_an_old_snapshot_does_not_walk_over_what_was_delivered(place: Place) -> None:
    """From where the last one ended it touches a few pages; from the beginning, every message that was delivered."""
    async with old_snapshot(place):
        fill(place, 0, 40_000)  # half of them due
        moved = 0
        while (report := await place.store.move_due(now() - SECOND, 1_000)).delivered:
            moved += report.delivered
        assert moved > 15_000
        since = place.store._next_due.lower_bound()
        touched = dict[str, int]()
        with place.store.database.connect() as connection:
            for name, beginning in (("since", since), ("beginning", None)):
                values = {"now": now() - 60 * MINUTE, "limit": 100, "store": 1, "from": beginning, "listing": False}
                values["now"] = since or values["now"]
                steps = plan_of(connection, place.store._sql.move, values)
                touched[name] = max(step["Shared Hit Blocks"] + step["Shared Read Blocks"] for step in steps)
        assert since is not None
        assert touched["since"] < 50, touched
        assert touched["beginning"] > 100, touched


def test_what_is_freed_while_a_receiver_looks_is_not_below_its_next_look() -> None:
    low = LowWater()
    low.value()
    low.remember_claimed([101, 102])
    assert low.value() == 101
    low.remember_free(100)  # by a transaction that ended after the look had begun, which claims what is behind it
    low.remember_claimed([103, 104])
    assert low.value() == 100
    low.remember_claimed([103, 104])
    assert low.value() == 103
    low.remember_claimed([])
    assert low.value() == 0


# --- connections that break -------------------------------------------------------------------------------------------


async def test_wake_ups_come_again_after_the_connections_were_cut(place: Place) -> None:
    where = urlsplit(place.url)
    with FaultyLink(where.hostname or "", where.port or 0) as link:
        url = place.url.replace(str(where.port), str(link.port))
        async with service(place, url=url):
            for number in range(3):
                accepted = link.accepted
                link.reset()
                await until(lambda accepted=accepted: link.accepted > accepted)
                await place.store.store(place.work(number, now() + SOON, "done"), now())
                await done(place, number + 1)
            link.cut()
            await place.store.store(place.work(3, now(), "done"), now())  # due while nobody can hear of it
            link.restore()
            await done(place, 4)
    none_is_early(place, 4)


@pytest.mark.soak(
    "stops and kills a server of its own",
    part="kills",
    proven_by="tests/integration/test_postgres_wakeups.py::test_wake_ups_come_again_after_the_connections_were_cut",
)
async def test_wake_ups_come_again_after_the_server_was_restarted(server_folder: Path) -> None:
    server = PostgreSQL(server_folder / "postgres")
    server.start()
    place = Place(server.url)
    try:
        await place.create()
        async with service(place):
            for number, end in enumerate((server.stop, server.kill)):
                await anyio.to_thread.run_sync(end)
                with pytest.raises(StoreUnavailable):
                    await place.store.store(place.work(99, now(), "done"), now())
                await anyio.to_thread.run_sync(server.start)
                await place.store.store(place.work(number, now() + SOON, "done"), now())
                await done(place, number + 1)
        none_is_early(place, 2)
    finally:
        await place.close(drop=False)
        server.stop()


def end_listener(place: Place) -> None:
    """End the session that says that a process lives, as a network would that forgets it."""
    place.run(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 "
        f"AND classid = ({place.store.database.names.lock_class})::integer::oid"
    )


async def test_messages_of_a_lost_holder_are_free_for_others_and_its_commit_is_refused(place: Place) -> None:
    await place.store.store_many([place.work(n, now() - SECOND, "done") for n in range(3)], now())
    assert (await place.store.move_due(now(), 10)).delivered == 3
    receiver, other = place.transport.receiver("done"), place.another_transport()
    held = await receiver.receive(2)
    assert len(held) == 2
    end_listener(place)
    again = await received(other.receiver("done"), 3)
    assert sorted(each.envelope.message_id for each in again) == ["m-0", "m-1", "m-2"]
    for each in held:
        with pytest.raises(ClaimLost):
            await receiver.commit(each, now())
    await other.close()


async def test_leases_of_a_lost_holder_are_free_for_others_and_end_nothing(place: Place) -> None:
    await place.store.store_many([place.work(n, now() - SECOND, "done") for n in range(10)], now())
    claims = await place.store.claim_due(now(), 10)
    assert await place.store.finish(claims[:5], Outcome.DELIVERED, now()) == 5  # the rest is leased from here on
    other = place.another_store()
    assert await other.claim_due(now(), 10) == []
    end_listener(place)
    stop = await other.listen(lambda: None)  # somebody has to look
    again = await claimed(other, 5, now())
    assert await place.store.finish(claims[5:], Outcome.DELIVERED, now()) == 0
    assert await other.finish(again, Outcome.DELIVERED, now()) == 5
    stop()
    await other.close()


async def test_what_could_not_be_given_back_at_the_end_is_free_all_the_same(place: Place) -> None:
    """A process that ends in good order leaves nothing held under a number that nobody looks for any more."""
    transport = place.another_transport()
    await place.store.store(place.work(1, now() - SECOND, "done"), now())
    await place.store.move_due(now(), 10)
    receiver = transport.receiver("done")
    assert len(await receiver.receive(1)) == 1
    receiver._claimed.clear()  # as if giving it back had failed
    await transport.close()
    (again,) = await received(place.transport.receiver("done"), 1)
    assert again.envelope.message_id == "m-1"


# --- clocks -----------------------------------------------------------------------------------------------------------


async def test_two_services_whose_clocks_disagree_by_minutes_lose_and_double_nothing(place: Place) -> None:
    """Nobody delivers before the due time on his own clock; the one that is ahead delivers what is due for it."""
    async with service(place, 3 * MINUTE) as early, service(place, -2 * MINUTE) as late:
        for number in range(20):
            await early.send(b"{}", destination="done", delay=SOON, message_id=f"ahead-{number}")
            await late.send(b"{}", destination="done", delay=SOON, message_id=f"behind-{number}")
        await done(place, 40)
        await place.store.store(place.work(1, now() + SOON, "done"), now())  # of which they have to hear
        await done(place, 41)
    assert place.length("done") == 41
    delivered = place.rows("SELECT message_id, at - due FROM record WHERE kind = 2")
    assert len({id_ for id_, _ in delivered}) == len(delivered) == 41
    assert all(lateness > timedelta(0) for _, lateness in delivered)


async def test_the_clock_of_the_server_does_not_matter(place: Place) -> None:
    """A service a day ahead of its server is woken by what another process stores as by what it sends itself."""
    async with service(place, timedelta(days=1)) as tomorrow:
        await tomorrow.send(b"{}", destination="done", delay=SOON, message_id="m-1")
        await done(place, 1)
        await place.store.store(place.work(2, now() + SOON, "done"), now())  # of which it has to hear
        await done(place, 2)
    none_is_early(place, 2)


async def test_modes_that_share_nothing_but_the_table_share_its_claims(place: Place) -> None:
    """A service that moves, and one that claims, since its queues are elsewhere: each message goes to one of them."""
    from postdate import MemoryTransport

    elsewhere, other = MemoryTransport(), place.another_store()
    claiming = Endpoint(
        "service",
        transport=elsewhere,
        delayed_delivery=DelayedDelivery(other),
        send_only=True,
        transaction_mode=TransactionMode.RECEIVE_ONLY,
        clock=UntilWoken(),
    )
    await elsewhere.create_queues(["done"])
    begin = now()
    async with service(place), claiming:
        for batch in range(0, 2_000, 500):
            work = [place.work(n, begin + n * MILLISECOND / 2, "done") for n in range(batch, batch + 500)]
            await place.store.store_many(work, begin)
        await until(lambda: place.rows('SELECT count(*) FROM "service.timeouts"') == [(0,)])
    moved = {id_ for (id_,) in place.rows("SELECT message_id FROM queue_message")}
    receiver, claimed = elsewhere.receiver("done"), set[str]()
    while sum((await elsewhere.queue_lengths()).values()) > len(claimed):
        claimed |= {each.envelope.message_id for each in await receiver.receive(1_000)}
    assert moved | claimed == {f"m-{n}" for n in range(2_000)}
    assert not moved & claimed
    await receiver.close()
    await elsewhere.close()
    await other.close()
