"""A database that 468e06b or 505b2f32 made is taken over by ``postdate setup``, with all that is in it.

``takeover/make.py`` says how the databases were made. A row of them is missed twice: as a row, and by who reads it.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from tests.integration.takeover_places import TABLE, MariaDbPlace, Place, PostgresPlace, SqlitePlace

import postdate
from postdate import DelayedMessage, ports
from postdate.backends.sql.migrations import find_missing_steps
from postdate.cli.entry import run
from postdate.core.changes import administrable_store
from postdate.errors import PostdateError
from postdate.messages import Envelope, Headers

COMMITS = ["468e06b", "505b2f32"]
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
THEN = NOW + timedelta(seconds=1)
HOUR = timedelta(hours=1)
CENTURY = timedelta(days=36_525)
LATER = NOW + 5 * HOUR
TORN = b"{torn"


def waiting(message_id: str, due: timedelta = HOUR, destination: str = "orders", **more: Any) -> DelayedMessage:
    return DelayedMessage(message_id, NOW + due, destination, {"kind": message_id}, message_id.encode(), **more)


WAITING = [
    waiting("plain"),
    replace(waiting("with-headers"), headers={"kind": "é 🕰", "quote": 'it\'s "so"\\', "line": "a\nb"}),
    waiting("expiring", expires_at=NOW + CENTURY),
    replace(waiting('ü 🕰 it\'s "id"'), body=bytes(range(256))),
    replace(waiting("large"), body=b"".join(bytes(range(first, 256)) for first in range(32))),
    waiting("rescheduled", 2 * HOUR),
    waiting("retried", timedelta(0), number_of_failures=1),
    waiting("claimed", timedelta(0)),
]
WAITING_IN = {
    "468e06b": [*WAITING, waiting("key~00000001"), waiting("sealed"), replace(waiting("stored-anew"), body=b"second")],
    "505b2f32": [*WAITING, waiting("key~00000001"), waiting("held", timedelta(0), "paused")],
}
"""What waits, but for what waits under a key."""

SCHEDULED, DELIVERED, FAILED = ports.RecordKind.SCHEDULED, ports.RecordKind.DELIVERED, ports.RecordKind.FAILED
RECORDS = {
    "plain": [SCHEDULED],
    "rescheduled": [SCHEDULED, ports.RecordKind.RESCHEDULED],
    "cancelled": [SCHEDULED, ports.RecordKind.CANCELLED],
    "delivered": [SCHEDULED, DELIVERED],
    "expired": [SCHEDULED, ports.RecordKind.EXPIRED],
    "failed": [SCHEDULED, FAILED],
    "retried": [SCHEDULED, ports.RecordKind.RETRIED],
    "torn": [SCHEDULED, FAILED],
    "no-content": [SCHEDULED, FAILED],
}
RECORDS_BESIDE_QUEUES = {
    "handled": [SCHEDULED, DELIVERED, ports.RecordKind.HANDLED],
    "moved": [SCHEDULED, DELIVERED],
    "moved-torn": [SCHEDULED, DELIVERED, FAILED],
}


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = fresh_place(request.param, request, monkeypatch)
    yield place
    place.drop()


def fresh_place(backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place without a database, and have the command line know it."""
    folder: Path = request.getfixturevalue("tmp_path")
    monkeypatch.chdir(folder)
    place: Place
    match backend:
        case "sqlite":
            place = SqlitePlace(folder / "takeover.db")
        case "postgres":
            place = PostgresPlace(request.getfixturevalue("postgres_url"))
        case _:
            place = MariaDbPlace(request.getfixturevalue("mariadb_url"))
    for name, value in {**place.settings, "ENDPOINT__NAME": "service"}.items():
        monkeypatch.setenv(f"POSTDATE_{name}", value)
    return place


async def command(*arguments: str) -> int:
    """Run ``postdate`` and return its status."""
    return await anyio.to_thread.run_sync(run, arguments)


async def set_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``postdate setup``, on servers for both stores."""
    assert await command("setup", "--sagas", "--outbox") == 0
    if not isinstance(place, SqlitePlace):
        monkeypatch.setenv("POSTDATE_STORE__TABLE", "other")
        assert await command("setup", "--sagas", "--outbox") == 0
        monkeypatch.delenv("POSTDATE_STORE__TABLE")


# --- what is in the tables --------------------------------------------------------------------------------------------


def kept_tables(place: Place) -> dict[str, list[str]]:
    """Return the tables, with their columns, of which no row may be missing after a takeover."""
    others = ("quarantine", "migration", "sqlite_")
    return {name: columns for name, columns in place.columns().items() if not any(each in name for each in others)}


@pytest.mark.parametrize("commit", COMMITS)
async def test_no_row_is_missing_and_every_one_can_be_read(
    place: Place,
    commit: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place.restore(commit)
    tables = kept_tables(place)
    before = place.contents(tables)
    is_older = commit == "468e06b" or not isinstance(place, MariaDbPlace)  # which got no migration since then
    if is_older:
        await expect_told_to_set_up(place, capsys)
    for count in (int(is_older), 0):
        caplog.clear()
        await set_up(place, monkeypatch)
        assert caplog.text.count("was set up by an earlier Postdate: the shared tables went from version") == count
    assert lost_rows(before, place.contents(tables)) == []
    await expect_all_readable(place, commit)


def lost_rows(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> list[object]:
    """Return the rows that are gone or changed, but for the record of an id that looks like that of a key."""
    gone = [(table, row) for table, rows in before.items() for row in (rows - after[table])]
    return [(table, row) for table, row in gone if not (table.endswith("record") and "key~00000001" in row)]


async def expect_told_to_set_up(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Services and operators are told what to do before ``postdate setup``, and they change nothing."""
    before = marks(place)
    capsys.readouterr()
    assert await command("doctor") != 0
    assert "postdate setup" in capsys.readouterr().out
    service = await anyio.run_process([sys.executable, "-m", "postdate.cli", "run", "--no-setup"], check=False)
    assert service.returncode != 0
    assert b"postdate setup" in service.stderr
    assert marks(place) == before


async def expect_all_readable(place: Place, commit: str) -> None:
    """Read everything as a service does, and deliver it."""
    store = place.store()
    try:
        await store.initialize("service", postdate.TransactionMode.RECEIVE_ONLY)
        await expect_store(place, store, commit)
        await expect_unreadable_rows(place, store)
        if (transport := place.transport()) is not None:
            await expect_queues(store, transport)
            await transport.close()
    finally:
        await store.close()
    if not (place.backend == "mariadb" and commit == "468e06b"):  # which kept neither there
        await expect_sagas(place)
        await expect_outbox(place)
    await expect_timeouts(place)


async def expect_store(place: Place, store: Any, commit: str) -> None:
    """What waits has all it had, and is delivered when it is due; records say what became of the rest."""
    operator = administrable_store(store)
    listed = {each.message_id: each for each in await operator.list_pending(ports.MessageFilter(), 100)}
    by_client = {each.destination: each for each in listed.values() if each.destination in {"mails", "postdate.zones"}}
    expected = {each.message_id: each for each in WAITING_IN[commit]}
    assert {id_: each for id_, each in listed.items() if each.destination not in by_client} == expected
    assert await operator.get("large") == expected["large"]
    records = RECORDS if place.backend == "mariadb" else {**RECORDS, **RECORDS_BESIDE_QUEUES}
    for message_id, kinds in records.items():
        assert [each.kind for each in await operator.history(message_id)] == kinds, message_id
    (_, retried) = await operator.history("retried")
    assert (retried.at, retried.detail) == (THEN, "no route")
    held = list[str]()
    if commit == "505b2f32":
        assert by_client.keys() == {"mails", "postdate.zones"}
        await expect_client(place, store, by_client["mails"])
        held = ["held"]
    else:
        await expect_key(place)
        del expected["key~00000001"]
    for at, ids in (
        (NOW + 2 * HOUR, expected.keys() - {"rescheduled", "retried", *held}),
        (NOW + 3 * HOUR, {"rescheduled"}),
        (LATER, {"retried"}),
    ):
        claims = list[ports.Claim]()
        while len(claims) < len(ids):  # a claim of a dead process is freed at one of the next
            claims += await store.claim_due(at, 100)
        assert {claim.message.message_id: claim.message for claim in claims} == {id_: expected[id_] for id_ in ids}
        assert await store.finish(claims, ports.Outcome.DELIVERED, at) == len(claims)
    assert [each.kind for each in await operator.history("plain")] == [SCHEDULED, DELIVERED]


def client_of(place: Place) -> postdate.Client:
    url, schema = place.settings["STORE__ADDRESS"], place.settings.get("STORE__SCHEMA")
    return postdate.connect(url, endpoint="service", schema=schema)


async def expect_key(place: Place) -> None:
    """A message whose id has the form of those under keys is replaced: until they were marked, the form told it."""
    async with client_of(place) as client:
        replaced = await client.replace(b"", key="key", destination="orders", deliver_at=NOW + CENTURY)
    assert replaced == "key~00000001"


async def expect_client(place: Place, store: Any, message: DelayedMessage) -> None:
    """The last message under a key is replaced by the next; limits and pauses are in force."""
    assert (message.body, message.headers["n"]) == (b"second", "1")
    assert message.headers[Headers.WALL_TIME] == "2099-03-28T09:00:00 Europe/Paris"
    assert message.due == datetime(2099, 3, 28, 8, tzinfo=UTC)
    async with client_of(place) as client:
        third = await client.replace(b"third", key="k", destination="mails", deliver_at=NOW + CENTURY)
        assert third == message.message_id
        assert {name: str(limits) for name, limits in (await client.limits()).items()} == {
            "mails": "at most 2 a second, within mon-fri 09:00-17:00 Europe/Paris",
            "paused": "paused",
        }
    paused = {each.destination: each for each in await store.load_limits()}["paused"]
    (claim,) = await store.claim_lane(paused, LATER, 10)
    assert claim.message == waiting("held", timedelta(0), "paused")
    assert await store.finish([claim], ports.Outcome.DELIVERED, LATER) == 1


async def expect_unreadable_rows(place: Place, store: Any) -> None:
    """Rows that cannot be read are marked, hold up nothing else, and can be discarded; so in the other store."""
    ids = {"torn", "stored-anew", "delivered-anew", "no-content"}
    rows = {row.message_id: row for row in await store.list_unreadable(100)}
    assert rows.keys() == ids
    assert rows["torn"].number == 1  # its former number, under which it is found once it is mended
    for message_id, row in rows.items():
        has_content = message_id != "no-content" or place.backend == "mariadb"
        assert row.raw.get("headers") == (TORN if has_content else None)
        assert row.raw.get("body") == (message_id.encode() if has_content else None)
        assert row.reason.startswith("headers must be" if has_content else "the headers ")
        assert (row.queue, row.at) == ("", THEN)
    operator = administrable_store(store)
    assert not await operator.cancel("torn", LATER)
    for row in rows.values():
        await store.discard_unreadable(row.number, LATER)
    assert await store.count_unreadable() == 0
    assert [each.kind for each in await operator.history("torn")] == [SCHEDULED, FAILED, ports.RecordKind.DISCARDED]
    if place.backend != "sqlite":
        other = place.store("other")
        assert [row.message_id for row in await other.list_unreadable(100)] == ["torn"]
        await other.close()


async def expect_queues(store: Any, transport: Any) -> None:
    """Messages in queues are received, in the order in which they came; what the dead process received, too."""
    rows = {row.message_id: row for row in await transport.list_unreadable(100)}
    assert {id_: (row.queue, row.raw["body"]) for id_, row in rows.items()} == {
        "moved-torn": ("orders", b"moved-torn"),
        "sent-torn": ("orders", b"sent-torn"),
    }
    for row in rows.values():
        await transport.discard_unreadable(row.number, LATER)
    lengths = await transport.queue_lengths()
    assert {queue: count for queue, count in lengths.items() if count} == {"orders": 2, "paused": 1, "error": 1}
    assert "service" in lengths
    await store.store(waiting("new", timedelta(0)), NOW)
    assert (await store.move_due(THEN, 10)).delivered == 1
    received = {
        queue: await received_from(transport, queue, count)
        for queue, count in (("orders", 3), ("paused", 1), ("error", 1))
    }
    assert received["orders"] == [
        Envelope("orders", "moved", {"kind": "moved"}, b"moved", due=NOW),
        Envelope("orders", "sent", {"kind": "sent"}, b"sent"),
        Envelope("orders", "new", {"kind": "new"}, b"new", due=NOW),
    ]
    assert received["paused"] == [Envelope("paused", "in-hand", {}, b"in-hand")]
    (copy,) = received["error"]
    assert copy.headers[Headers.FAILED_QUEUE] == "service"
    assert copy.headers[Headers.EXCEPTION_MESSAGE] == "it's broken"


async def received_from(transport: Any, queue: str, count: int) -> list[Envelope]:
    receiver = transport.receiver(queue)
    received = list[Any]()
    while len(received) < count:
        received += await receiver.receive(10)
    for each in received:
        await receiver.commit(each, LATER)
    await receiver.close()
    return [each.envelope for each in received]


async def expect_sagas(place: Place) -> None:
    sagas = place.sagas()
    saga = ports.SagaRecord("id-1", "Order", ports.Correlation("order_id", "o-1 é"), '{"n":2}', '{"timeouts":{}}', 2)
    assert await sagas.find("Order", saga.correlation) == await sagas.load("Order", "id-1") == saga
    assert await sagas.load("Order", "id-2") is None
    await sagas.close()


async def expect_outbox(place: Place) -> None:
    """What was handled is not handled again, and what had not left leaves."""
    outbox = place.outbox()
    assert await outbox.find("service", "dispatched") == ports.OutboxRecord((), is_dispatched=True)
    operations = (
        Envelope("orders", "undispatched-1", {"kind": "é"}, b"\0now"),
        waiting("undispatched-2"),
    )
    record = await outbox.find("service", "undispatched")
    assert record is not None
    assert (tuple(record.operations), record.is_dispatched) == (operations, False)
    await outbox.mark_dispatched("service", "undispatched", LATER)
    assert await outbox.find("service", "undispatched") == ports.OutboxRecord((), is_dispatched=True)
    await outbox.close()


async def expect_timeouts(place: Place) -> None:
    timeouts = place.timeouts()
    await timeouts.initialize("service")
    first, second = (f"00000000-0000-4000-8000-{number:012}" for number in (1, 2))
    chunk = await timeouts.next_chunk(NOW - HOUR, LATER, 10)
    assert [each.timeout_id for each in chunk.due] == [first]
    assert chunk.next_query == NOW + 24 * HOUR
    for timeout_id, body in ((first, b"timeout 1"), (second, b"timeout 2")):
        timeout = await timeouts.peek(timeout_id)
        assert timeout is not None
        assert (timeout.destination, timeout.headers["kind"], timeout.body) == ("orders", "é", body)
        assert await timeouts.try_remove(timeout_id)
    await timeouts.close()


# --- what tables there are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", COMMITS)
async def test_its_tables_are_those_of_a_fresh_database(
    place: Place, commit: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    place.restore(commit)
    await set_up(place, monkeypatch)
    taken_over = place.catalog()
    (request.getfixturevalue("tmp_path") / "takeover.db").unlink(missing_ok=True)
    fresh = fresh_place(place.backend, request, monkeypatch)
    try:
        await set_up(fresh, monkeypatch)
        assert taken_over == fresh.catalog()
    finally:
        fresh.drop()


# --- when it is interrupted -------------------------------------------------------------------------------------------


async def test_it_goes_on_where_it_was_killed(place: Place, tmp_path: Path) -> None:
    """Behind every migration; in MariaDB, which commits after each statement, behind every one of these."""
    place.restore("468e06b")
    steps = find_missing_steps(place.steps(), marks(place), "here")
    place.drop()
    transactions = [statements for step in steps for statements in place.transactions(step)]
    for number in range(1, len(transactions)):
        (tmp_path / "takeover.db").unlink(missing_ok=True)
        place.restore("468e06b")
        tables = kept_tables(place)
        before = place.contents(tables)
        place.change(*(statement for statements in transactions[:number] for statement in statements))
        await set_up_stores(place)
        assert lost_rows(before, place.contents(tables)) == []
        store = place.store()
        await expect_unreadable_rows(place, store)
        await store.close()
        place.drop()


async def set_up_stores(place: Place) -> None:
    for table in (TABLE, "other")[: 1 if place.backend == "sqlite" else 2]:
        store = place.store(table)
        await store.setup()
        await store.close()


def marks(place: Place) -> Any:
    if isinstance(place, SqlitePlace):
        return [("", version) for (version,) in place.query("SELECT version FROM postdate_migration")]
    return place.query(f"SELECT subject, version FROM {place.named(place.marks)}")


async def test_several_processes_take_over_at_once(place: Place) -> None:
    place.restore("468e06b")
    stores = [place.store() for _ in range(6)]
    async with anyio.create_task_group() as tasks:
        for store in stores:
            tasks.start_soon(store.setup)
    for store in stores:
        await store.close()
    store = place.store()
    await expect_store(place, store, "468e06b")
    await store.close()


# --- by an administrator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["postgres", "mariadb"], indirect=True)
async def test_the_administrators_script_takes_over_as_setup_does(place: Place) -> None:
    place.restore("468e06b")
    tables = kept_tables(place)
    before = place.contents(tables)
    scripts = [place.store(table).setup_statements("service") for table in (TABLE, "other")]
    for script in scripts * 2:
        place.run_administrators_script(script)
    taken_over = place.catalog()
    await set_up_stores(place)
    assert place.catalog() == taken_over
    assert lost_rows(before, place.contents(tables)) == []
    await expect_all_readable(place, "468e06b")


# --- what is too old --------------------------------------------------------------------------------------------------


async def test_tables_that_are_older_are_refused_and_nothing_is_changed(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.restore("468e06b")
    shared = "" if isinstance(place, SqlitePlace) else "subject = '' AND "
    place.change(f"DELETE FROM {place.named(place.marks)} WHERE {shared}version > 1")
    before, rows = place.catalog(), place.contents(place.columns())
    capsys.readouterr()
    assert await command("setup", "--sagas", "--outbox") != 0
    said = capsys.readouterr().err
    assert "has version 1 of its tables; this Postdate upgrades version" in said
    assert "run `postdate setup` of its commit 505b2f32 there first, then that of this one" in said
    if not isinstance(place, SqlitePlace):
        with pytest.raises(
            (psycopg.Error, PostdateError),
            match=r"is too old: this Postdate upgrades version .* Nothing was changed\.",
        ):
            place.run_administrators_script(place.store().setup_statements("service"))
    assert (place.catalog(), place.contents(place.columns())) == (before, rows)
