"""Every store on row locks, beyond the conformance suite: ends of processes, races, setting up, names.

They run on each server there is: see tests/locking_places.py.
"""

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from tests.locking_places import TABLE, LockingPlace
from tests.waiting import claimed, until

from postdate import DelayedDelivery, DelayedMessage, Endpoint, MemoryTransport, TransactionMode
from postdate.backends.sql.row_locks.store import LockingStore
from postdate.clock import SystemClock
from postdate.errors import (
    ConfigurationError,
    DuplicateMessage,
    StoreFromNewerVersion,
    StoreNotSetUp,
    UnsupportedTransactionMode,
)
from postdate.messages import Headers
from postdate.ports import Claim, Outcome, RecordKind

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def message(number: int, due: datetime = NOW) -> DelayedMessage:
    return DelayedMessage(f"m-{number}", due, "queue", {"kind": "check"}, b"body")


# --- processes and connections that end -------------------------------------------------------------------------------

_CLAIM_AND_WAIT = """
import asyncio, sys
from datetime import datetime
from pkgutil import resolve_name
from postdate.ports import Outcome

async def main():
    kind, url, schema, table, now, finished = sys.argv[1:]
    store = resolve_name(kind)(url, schema=schema, table=table)
    claims = await store.claim_due(datetime.fromisoformat(now), 10)
    if int(finished):
        await store.finish(claims[:int(finished)], Outcome.DELIVERED, datetime.fromisoformat(now))
    print(len(claims), flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def _python(script: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def _claimed(store: LockingStore, count: int) -> list[Claim]:
    """Claim until so many were claimed, which others held."""
    found = await claimed(store, count, NOW + SECOND)
    assert len(found) == count
    return found


@pytest.mark.parametrize("finished", [0, 4], ids=["row locks", "leases"])
async def test_what_a_killed_process_held_is_free_again(place: LockingPlace, finished: int) -> None:
    store = place.store()
    await store.setup()
    await store.store_many([message(n) for n in range(20)], NOW)
    stop = await store.listen(lambda: None)
    late = (NOW + SECOND).isoformat()
    process = _python(_CLAIM_AND_WAIT, place.store_class, place.url, place.schema, TABLE, late, str(finished))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"10\n"
        ours = await store.claim_due(NOW + SECOND, 100)
        assert len(ours) == 10, "what the other process holds is not claimed"
        process.kill()
        process.wait()
        found = [*ours, *await _claimed(store, 10 - finished)]
        assert await store.finish(found, Outcome.DELIVERED, NOW) == 20 - finished
        counts = await store.record_counts()
        assert counts == {RecordKind.SCHEDULED: 20, RecordKind.DELIVERED: 20}
    finally:
        process.kill()
        process.communicate()
        stop()
        await store.close()


async def test_a_lease_is_void_once_the_connection_behind_it_is_gone(
    place: LockingPlace, session: Any, expected_logs: list[str]
) -> None:
    expected_logs.append("lost the connection that holds")
    store = place.store()
    await store.setup()
    await store.store_many([message(n) for n in range(3)], NOW)
    claims = await store.claim_due(NOW + SECOND, 10)
    await store.finish(claims[:1], Outcome.DELIVERED, NOW)
    place.end_holders(session)
    again = await _claimed(store, 2)
    assert await store.finish(again, Outcome.DELIVERED, NOW) == 2
    assert await store.finish(claims[1:], Outcome.DELIVERED, NOW) == 0
    await store.close()


async def test_connections_that_died_while_idle_are_replaced(
    place: LockingPlace, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.sql.row_locks.pool._TRUSTED_SECONDS", 0.0)
    store = place.store()
    await store.setup()
    await store.store(message(1), NOW)
    assert store._pool._connections.idle
    place.end_idle(store, session)
    await store.store(message(2), NOW)
    assert (await store.statistics(NOW)).pending == 2
    await store.close()


STORM = 2_000


async def test_a_storm_of_claims_retries_and_stores_delivers_each_message_once(place: LockingPlace) -> None:
    stores = [place.store() for _ in range(2)]
    await stores[0].setup()
    delivered, lost = Counter[str](), list[Exception]()
    lock, all_delivered = threading.Lock(), threading.Event()

    async def deliver(store: LockingStore) -> None:
        while not all_delivered.is_set():
            claims = list(await store.claim_due(NOW + SECOND, 60))
            first, rest = claims[::3], [claim for claim in claims if claim not in claims[::3]]
            for part in (first, rest):
                again = [claim for claim in part if not claim.message.number_of_failures][:2]
                for claim in again:
                    assert await store.retry_later(claim, NOW, NOW, "again")
                done = [claim for claim in part if claim not in again]
                assert await store.finish(done, Outcome.DELIVERED, NOW) == len(done)
                with lock:
                    delivered.update(claim.message.message_id for claim in done)
                    if delivered.total() >= STORM:
                        all_delivered.set()

    async def fill(store: LockingStore) -> None:
        for start in range(0, STORM, 250):  # each batch holds half of the one before
            await store.store_many([message(n) for n in range(max(start - 125, 0), start + 250)], NOW)

    def run(work, store: LockingStore) -> None:
        try:
            anyio.run(work, store)
        except Exception as error:
            lost.append(error)
            all_delivered.set()
            raise

    with ThreadPoolExecutor(6) as pool:
        for number in range(2):
            pool.submit(run, fill, stores[number])
        for number in range(4):
            pool.submit(run, deliver, stores[number % 2])
    assert not lost
    assert delivered == Counter(f"m-{n}" for n in range(STORM))
    counts = await stores[0].record_counts()
    assert (counts[RecordKind.SCHEDULED], counts[RecordKind.DELIVERED]) == (STORM, STORM)
    for store in stores:
        await store.close()


async def test_several_processes_may_set_up_at_once(place: LockingPlace) -> None:
    stores = [place.store() for _ in range(6)]
    async with anyio.create_task_group() as tasks:
        for store in stores:
            tasks.start_soon(store.setup)
    await stores[0].store(message(1), NOW)
    assert await stores[5].get("m-1") is not None
    for store in stores:
        await store.close()


async def test_an_administrator_may_run_the_statements(place: LockingPlace, session: Any) -> None:
    store = place.store()
    place.run_script(session, store.setup_statements("unused"))
    await store.store(message(1), NOW)
    await store.setup()
    assert await store.get("m-1") is not None
    await store.close()


async def test_tables_of_a_newer_postdate_are_left_alone(place: LockingPlace, session: Any) -> None:
    store = place.store()
    await store.setup()
    session.change(f"UPDATE {place.names().qualified_name('postdate_migration')} SET version = 99 WHERE subject = ''")
    with pytest.raises(StoreFromNewerVersion, match="99"):
        await store.setup()
    await store.close()


async def test_what_is_missing_is_said(place: LockingPlace) -> None:
    store = place.store()
    with pytest.raises(StoreNotSetUp, match="postdate setup"):
        await store.store(message(1), NOW)
    await store.setup()
    await store.close()
    other = place.store("other")
    with pytest.raises(StoreNotSetUp, match="other"):
        await other.store(message(1), NOW)
    await other.close()


async def test_two_stores_in_one_database_do_not_see_each_other(place: LockingPlace) -> None:
    one, other = (place.store(name) for name in ("one", "other"))
    for store in (one, other):
        await store.setup()
        await store.store(message(1), NOW)
    await one.finish(await one.claim_due(NOW + SECOND, 10), Outcome.DELIVERED, NOW)
    assert await one.get("m-1") is None
    assert await other.get("m-1") is not None
    assert [record.kind for record in await other.history("m-1")] == [RecordKind.SCHEDULED]
    for store in (one, other):
        await store.close()


async def test_ids_differ_by_case_and_by_trailing_spaces(place: LockingPlace) -> None:
    store = place.store()
    await store.setup()
    ids = ["a", "A", "a ", "á", "a\u0301", "a\\", "a'", "a%s", '"a"', "🕰", "🕰" * 250]
    report = await store.store_many(
        [DelayedMessage(id_, NOW, "очередь 📮 ", {"k": id_}, b"\\'\0%s") for id_ in ids], NOW
    )
    assert report.duplicate_ids == ()
    found = await store.claim_due(NOW + SECOND, 100)
    assert [claim.message.message_id for claim in found] == ids
    assert {claim.message.destination for claim in found} == {"очередь 📮 "}
    assert {claim.message.body for claim in found} == {b"\\'\0%s"}
    with pytest.raises(DuplicateMessage):
        await store.store(DelayedMessage("a ", NOW, "queue"), NOW)
    await store.close()


async def test_transaction_scope_is_refused(place: LockingPlace) -> None:
    store = place.store(None)
    with pytest.raises(UnsupportedTransactionMode, match="sends_atomic_with_receive"):
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    with pytest.raises(ConfigurationError, match="initialize"):
        await store.setup()
    await store.close()


@dataclass
class Reminder:
    number: int = 0


async def test_an_endpoint_delivers_on_time_also_what_another_process_stored(place: LockingPlace) -> None:
    """The other process is another store on connections of its own; nothing but the table tells of what it stores."""
    clock, arrived = SystemClock(), list[tuple[int, timedelta]]()
    store = place.store(None)
    endpoint = Endpoint(
        "sales",
        transport=MemoryTransport(),
        delayed_delivery=DelayedDelivery(store),
        error_queue="error",
    )
    other = place.store("sales.timeouts")
    due = dict[int, datetime]()

    @endpoint.handler(Reminder, name="Reminder")
    async def remind(message: Reminder, _context: object) -> None:
        arrived.append((message.number, clock.now() - due[message.number]))

    async with endpoint:
        for number in range(20):
            due[number] = clock.now() + timedelta(milliseconds=500)
            if number % 2:
                headers = {Headers.ENCLOSED_MESSAGE_TYPES: "Reminder", Headers.MESSAGE_ID: f"other-{number}"}
                body = b'{"number": %d}' % number
                await other.store(DelayedMessage(f"other-{number}", due[number], "sales", headers, body), clock.now())
            else:
                await endpoint.send(Reminder(number), deliver_at=due[number])
        await until(lambda: len(arrived) >= 20)
    await store.close()
    await other.close()
    assert sorted(number for number, _ in arrived) == list(range(20))
    assert all(late > timedelta(0) for _, late in arrived), "nothing arrives before it is due"
