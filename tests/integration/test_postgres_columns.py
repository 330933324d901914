"""Columns into PostgreSQL and out of it: whatever they are called, whoever stores the same, whatever dies meanwhile."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest
from anyio import to_thread
from tests.integration.postgres_place import SECOND, Place, now, placed
from tests.waiting import until

from postdate import DelayedMessage, TransactionMode
from postdate.backends.postgres import columnar
from postdate.backends.postgres.bulk import scan_query
from postdate.backends.postgres.store import PostgresStore
from postdate.errors import StoreNotSetUp, StoreUnavailable
from postdate.ports import Scan, ScanFilter, ScanPart
from postdate.runtime.threads import WakeUp
from postdate.testing.store_suite.columns import message_batch, rows_of_columns

pytestmark = pytest.mark.anyio
FAR = now() + timedelta(days=1_000)

STORER = """
import sys, anyio
from urllib.parse import unquote
from datetime import timedelta
from postdate import DelayedMessage, SystemClock, TransactionMode
from postdate.backends.postgres.store import PostgresStore
from postdate.testing.store_suite.columns import message_batch

url, schema, first, step = sys.argv[1], unquote(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
store = PostgresStore(url, schema=schema, table="service.timeouts")
now = SystemClock().now()
ids = [f"{n:05}" for n in range(4_000)][::step]
cuts = [0, *range(first, 4_000, 200), 4_000]
batches = [message_batch([DelayedMessage(id_, now + timedelta(days=1), "q") for id_ in ids[a:b]])
           for a, b in zip(cuts, cuts[1:]) if a < b]
store.store_columns(batches[0].slice(0, 0), now)
print("ready", flush=True)
sys.stdin.readline()
reports = [store.store_columns(batch, now) for batch in batches]
print(sum(report.stored for report in reports), sum(len(report.duplicate_ids) for report in reports), flush=True)
anyio.run(store.close)
"""


@pytest.fixture
async def place(postgres_url: str) -> AsyncIterator[Place]:
    async with placed(postgres_url) as place:
        yield place


def batch_of(*ids: str, due=FAR):
    return message_batch([DelayedMessage(id_, due, "consumer", {"k": "v"}, b"body") for id_ in ids])


def waiting(place: Place) -> list[str]:
    return [id_ for (id_,) in place.rows('SELECT message_id FROM "service.timeouts" ORDER BY message_id')]


def nothing_is_half_stored(place: Place) -> None:
    counts = "SELECT (SELECT count(*) FROM record), (SELECT count(*) FROM content)"
    assert place.rows(counts) == [(len(waiting(place)),) * 2]


async def test_names_may_have_anything_in_them(postgres_url: str) -> None:
    place = Place(postgres_url, schema='we"ird.Schéma %s')
    store = PostgresStore(postgres_url, schema=place.schema, table="ta\"b'le \\ %d.тест")
    try:
        await store.setup()
        assert store.store_columns(batch_of("a", "b"), now()).stored == 2
        assert tuple(store.store_columns(batch_of("b", "c"), now()).duplicate_ids) == ("b",)
        scan = Scan("pending", ("message_id", "body"), ScanFilter(message_ids=("a", "c")))
        rows = rows_of_columns(store, scan, store.scan_parts("pending", 1))
        assert sorted(rows) == [("a", b"body"), ("c", b"body")]
    finally:
        await store.close()
        await place.close()


async def test_another_process_is_woken_by_what_is_due_soon(place: Place) -> None:
    other = place.another_store()
    alarm = WakeUp()
    stop = await other.listen(alarm.wake)
    try:
        place.store.store_columns(batch_of("soon", due=now() + SECOND), now())
        await until(alarm.event.is_set)
    finally:
        stop()
        await other.close()


def compete(place: Place) -> list[tuple[int, int]]:
    """Have two processes store the same at once; return how much each stored, and how much was there already."""
    arguments = [place.url, place.schema.replace("%", "%25")]
    command = [sys.executable, "-c", STORER, *arguments]
    processes = [
        subprocess.Popen([*command, *order], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for order in (("200", "1"), ("100", "-1"))
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [(int(stored), int(there)) for stored, there in map(str.split, answers)]


async def test_two_processes_that_store_the_same_in_opposite_order_store_each_once(place: Place) -> None:
    """Their batches overlap by halves, so each of them meets what the other has not committed yet."""
    reports = await to_thread.run_sync(compete, place)
    assert [sum(each) for each in zip(*reports, strict=True)] == [4_000, 4_000]
    assert waiting(place) == [f"{n:05}" for n in range(4_000)]
    nothing_is_half_stored(place)


def blocked(place: Place, id_: str) -> psycopg.Connection:
    """Return a connection whose open transaction has the id: who stores it has to wait."""
    connection = place.connect()
    connection.execute("BEGIN")
    insert = "INSERT INTO record (at, store_id, kind, message_id) SELECT now(), store_id, 1, %s FROM store"
    connection.execute(insert, (id_,))
    return connection


def waits(place: Place, eventually) -> int:
    """Return the process of the server that waits for a lock while it copies."""
    found = (
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'COPY%%' "
        "AND datname = current_database() "
        "AND pid = ANY (SELECT pid FROM pg_locks WHERE relation = 'record'::regclass)"
    )
    eventually(lambda: place.rows(found), "it waits for the other transaction")
    return place.rows(found)[0][0]


async def test_a_batch_that_loses_a_deadlock_is_stored_after_all(place: Place, eventually) -> None:
    """Who looks for deadlocks after the other waits loses it; a slow machine may have us be the one."""
    for late in range(20):
        a, b, z = f"a-{late}", f"b-{late}", f"z-{late}"
        with ThreadPoolExecutor() as threads, closing(blocked(place, z)) as other:
            storing = threads.submit(place.store.store_columns, batch_of(z, b, a), now())
            waits(place, eventually)  # it has inserted a by now, waits for z, and will look for deadlocks
            try:
                other.execute("INSERT INTO record (at, store_id, kind, message_id) SELECT now(), 1, 1, %s", (a,))
            except psycopg.errors.DeadlockDetected:
                continue
            other.execute("COMMIT")
            report = storing.result()
            break
    else:
        raise AssertionError("the batch never lost")
    assert (report.stored, tuple(report.duplicate_ids)) == (1, (z, a))
    assert b in waiting(place)


async def test_a_connection_that_dies_while_it_copies_leaves_nothing_and_is_not_used_again(
    place: Place, eventually
) -> None:
    assert place.store.store_columns(batch_of("before"), now()).stored == 1
    with ThreadPoolExecutor() as threads, closing(blocked(place, "z")):
        storing = threads.submit(place.store.store_columns, batch_of("z", "a"), now())
        place.rows("SELECT pg_terminate_backend(%s)", waits(place, eventually))
        with pytest.raises(StoreUnavailable):
            storing.result()
    assert waiting(place) == ["before"]
    nothing_is_half_stored(place)
    assert place.store.store_columns(batch_of("z", "a"), now()).stored == 2
    nothing_is_half_stored(place)


async def test_a_scan_whose_connection_dies_ends_with_an_error(place: Place) -> None:
    messages = [DelayedMessage(f"m-{n}", FAR, "q", {}, b"x" * 10_000) for n in range(3_000)]
    place.store.store_columns(message_batch(messages), now())
    (part,) = place.store.scan_parts("pending", 1)
    batches = iter(place.store.scan_columns(Scan("pending", ("message_id", "body")), part))
    read = next(batches).num_rows
    place.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND query LIKE 'COPY (SELECT%%'"
    )
    with pytest.raises(StoreUnavailable):
        read += sum(batch.num_rows for batch in batches)
    assert read < 3_000


async def test_a_batch_that_loses_again_and_again_goes_another_way(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.store.store_columns(batch_of("a"), now())
    monkeypatch.setattr(columnar, "_MAX_ATTEMPTS", 0)
    batch = message_batch(
        [
            DelayedMessage("a", FAR, "q"),
            DelayedMessage("b", FAR, "q", {"k": "é"}, b"\0", FAR + SECOND),
            DelayedMessage("b", FAR, "other"),
        ]
    )
    report = place.store.store_columns(batch, now())
    assert (report.stored, tuple(report.duplicate_ids)) == (1, ("a", "b"))
    stored = await place.store.get("b")
    assert stored == DelayedMessage("b", FAR, "q", {"k": "é"}, b"\0", FAR + SECOND)
    nothing_is_half_stored(place)


async def test_errors_say_what_is_wrong_and_never_the_password(postgres_url: str, place: Place) -> None:
    missing = PostgresStore(postgres_url, schema=place.schema, table="missing")
    with pytest.raises(StoreNotSetUp, match="postdate setup"):
        missing.store_columns(batch_of("a"), now())
    with pytest.raises(StoreNotSetUp, match="postdate setup"):
        list(missing.scan_columns(Scan("pending", ()), ScanPart(0, 1)))
    await missing.close()
    nowhere = re.sub(r"//.*@[^/]*/", "//someone:geheim@127.0.0.1:1/", postgres_url)
    unreachable = PostgresStore(nowhere, schema=place.schema, table="service.timeouts")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1") as storing:
        unreachable.store_columns(batch_of("a"), now())
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1") as scanning:
        list(unreachable.scan_columns(Scan("pending", ()), ScanPart(0, 1)))
    assert "geheim" not in str(storing.value) + str(scanning.value)
    await unreachable.close()


async def test_what_is_queued_is_read_by_its_queue(place: Place) -> None:
    soon = now() - SECOND
    work = [place.work(n, soon, "consumer" if n % 2 else "done") for n in range(6)]
    place.store.store_columns(message_batch(work), now())
    assert (await place.store.move_due(now(), 100)).delivered == 6
    scan = Scan("queued", ("message_id", "queue"), ScanFilter(destinations=("done",), due_to=now()))
    expected = Counter((f"m-{n}", "done") for n in (0, 2, 4))
    parts = place.store.scan_parts("queued", 2)
    assert Counter(rows_of_columns(place.store, scan, parts)) == expected
    assert Counter(row for part in parts for page in place.store.scan(scan, part, 10) for row in page) == expected


async def test_a_share_reads_its_own_pages_and_a_few_ids_are_found_by_the_index(place: Place) -> None:
    await place.store.initialize("service", TransactionMode.RECEIVE_ONLY)
    place.store.store_columns(batch_of(*(f"m-{n}" for n in range(5_000))), now())
    place.run('ANALYZE record, content, "service.timeouts"')

    def plan(scan: Scan) -> str:
        (first, *_) = place.store.scan_parts(scan.row_kind, 4)
        query = scan_query(place.store.database.names, "service.timeouts", scan, first, plain=False)
        with place.store.database.connect() as connection:
            return "\n".join(line for (line,) in connection.execute(b"EXPLAIN " + query.encode()).fetchall())

    for what in ("pending", "records"):
        share = plan(Scan(what, ("message_id", *(("body",) if what == "pending" else ()))))
        assert "Tid Range Scan" in share, share
        assert "Seq Scan" not in share, share
    by_id = plan(Scan("pending", ("body",), ScanFilter(message_ids=("m-1", "m-2"))))
    assert "record_scheduled" in by_id, by_id
    assert "content_pkey" in by_id, by_id
