"""Postdate's own stores as sources of a migration, on real servers: what is hidden, and what comes back. Row 115."""

import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import anyio
import psycopg
import pytest
from tests.integration.migration_places import LONG_AGO, NEXT_YEAR
from tests.integration.migration_stores import StorePlace, place_in
from tests.integration.pipeline.old_timeouts import by_id, ids, messages
from tests.waiting import PATIENCE_SECONDS

from postdate import SystemClock
from postdate.backends.postgres.names import SchemaNames
from postdate.errors import ConfigurationError, DuplicateMessage, MigrationConflict
from postdate.migrating.store_tables import StoreTables
from postdate.ports import RecordKind
from postdate.ports.migrating import BatchStatus, MigrationRun, MigrationStatus
from postdate.wiring.migration_sources import migration_source, store_source

MARGIN, HOUR = timedelta(minutes=10), timedelta(hours=1)
KINDS = ("sqlite", "postgres", "mariadb")


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[StorePlace]:
    """Return an empty store of the endpoint ``billing``."""
    with place_in(request.param, request) as made:
        yield made


@pytest.fixture
def source(place: StorePlace) -> Iterator[StoreTables]:
    """Return the store as a source."""
    source = store_source(place.spec.address, schema=place.spec.schema)
    yield source
    source.close()


def begun(source: StoreTables, endpoint: str, cutoff: datetime = LONG_AGO) -> MigrationRun:
    now = SystemClock().now()
    run = MigrationRun(uuid.uuid4().hex, endpoint, MigrationStatus.PREPARING, {"target": "x"}, cutoff, now)
    source.begin(run)
    return run


def test_a_preview_counts_and_changes_nothing(place: StorePlace, source: StoreTables) -> None:
    here, elsewhere = messages(3, NEXT_YEAR), messages(2, NEXT_YEAR + HOUR, "invoices")
    place.add([*messages(4, NEXT_YEAR - HOUR), *here, *elsewhere])
    assert source.endpoints() == [place.name]
    seen = source.preview(place.name, NEXT_YEAR)
    assert (seen.count, seen.left, seen.problems) == (5, 4, ())
    assert (seen.earliest, seen.latest) == (here[0].due, elsewhere[-1].due)
    assert seen.destinations == {"orders": 3, "invoices": 2}
    assert (source.history(), len(place.waiting())) == ([], 9)
    nothing = source.preview(place.name, NEXT_YEAR + 9 * HOUR)
    assert (nothing.count, nothing.left, nothing.earliest, nothing.latest) == (0, 9, None, None)


def test_what_nobody_holds_is_hidden_and_comes_back_as_it_was(place: StorePlace, source: StoreTables) -> None:
    now = SystemClock().now()
    soon, far = messages(2, now + MARGIN / 2), messages(7, NEXT_YEAR)
    expiring = replace(messages(1, NEXT_YEAR + HOUR)[0], expires_at=NEXT_YEAR + 2 * HOUR)
    place.add([*soon, *far, expiring])
    before = place.waiting()
    run = begun(source, place.name)
    first, second = source.hide(run, 5, 2, MARGIN)
    assert (first.count, second.count, first.earliest) == (5, 3, far[0].due)
    assert source.hide(run, 5, 2, MARGIN) == []
    assert ids(place.waiting()) == ids(soon)
    read = [*source.read(run, 1), *source.read(run, 2)]
    assert ([message.message_id for message in read[:5]], by_id(read)) == (
        [message.message_id for message in far[:5]],
        by_id([*far, expiring]),
    )
    assert read[-1].expires_at == expiring.expires_at

    hidden = far[0].message_id
    assert not place.ask(lambda store: store.cancel(hidden, now))
    assert not place.ask(lambda store: store.reschedule(hidden, NEXT_YEAR, now))
    assert place.ask(lambda store: store.store_many(far[:1], now)).already_there == (hidden,)
    with pytest.raises(DuplicateMessage):
        place.ask(lambda store: store.store(far[0], now))

    assert (source.give_back(run, 1), source.give_back(run, 1), source.give_back(run, 2)) == (5, 0, 3)
    assert ([batch.status for batch in source.batches(run)], source.read(run, 1)) == ([BatchStatus.RETURNED] * 2, [])
    assert by_id(place.waiting()) == by_id(before)
    said = [(record.kind, record.due, record.destination, record.detail) for record in place.history(hidden)]
    assert said == [
        (RecordKind.SCHEDULED, far[0].due, "orders", ""),
        (RecordKind.CANCELLED, far[0].due, "orders", f"moved to another store by migration {run.run_id}"),
        (RecordKind.RESCHEDULED, far[0].due, "orders", f"given back by migration {run.run_id}"),
    ]
    assert place.ask(lambda store: store.cancel(hidden, now))
    assert sorted(place.deliver()) == sorted(set(ids(before)) - {hidden})


def test_what_a_dispatcher_holds_stays_until_it_is_given_back(place: StorePlace, source: StoreTables) -> None:
    far = messages(6, NEXT_YEAR)
    place.add(far)

    async def held(store: Any) -> list[str]:
        """Hold three by row locks or a claim; end one of these, so that the others are leased; let one fail."""
        claims = await store.claim_due(far[3].due, 3)
        run = begun(source, place.name)
        hidden = await anyio.to_thread.run_sync(lambda: source.hide(run, 2, 1, MARGIN))
        assert [batch.count for batch in hidden] == [2]
        assert await store.retry_later(claims[0], far[0].due + HOUR, NEXT_YEAR, "no")
        await anyio.to_thread.run_sync(lambda: source.hide(run, 10, 1, MARGIN))
        batches = source.batches(run)
        assert [batch.count for batch in batches] == [2, 2]
        moved = [message for batch in batches for message in source.read(run, batch.number)]
        return [message.message_id for message in moved]

    assert sorted(place.ask(held)) == sorted([far[0].message_id, *ids(far[3:])])
    assert sorted(place.deliver()) == ids(far[1:3])


def test_the_first_process_of_a_new_store_does_not_stand_in_the_way(postgres_url: str, request) -> None:
    """Its number is 1; that was the key of a run's turn, too, and no run began for as long as it lived."""
    with place_in("postgres", request) as place, psycopg.connect(postgres_url) as first:
        place.add(messages(2, NEXT_YEAR))
        names = SchemaNames(place.spec.schema or "")
        first.execute("SELECT pg_advisory_lock(%s, 1)", (names.lock_class,))
        source = store_source(place.spec.address, schema=place.spec.schema)
        run = begun(source, place.name)
        assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [2]
        source.close()


def test_messages_that_come_back_wake_who_sleeps(place: StorePlace, source: StoreTables, eventually) -> None:
    far = messages(3, NEXT_YEAR)
    place.add(far)
    run = begun(source, place.name)
    source.hide(run, 10, 1, MARGIN)

    async def listening(store: Any) -> None:
        woken = threading.Event()
        stop = await store.listen(woken.set)
        assert await store.next_attempt() is None
        woken.clear()
        await anyio.to_thread.run_sync(lambda: source.give_back(run, 1))
        assert await anyio.to_thread.run_sync(lambda: woken.wait(PATIENCE_SECONDS))
        assert await store.next_attempt() == far[0].due
        stop()

    place.ask(listening)


def test_two_services_and_a_migration_share_every_message_out(place: StorePlace, source: StoreTables) -> None:
    """Dispatchers whose clock is far ahead claim what is being hidden: each message is with one of them, once."""
    far = messages(600, NEXT_YEAR)
    place.add(far)
    run, delivered = begun(source, place.name), list[str]()
    ended = threading.Event()

    def dispatch() -> None:
        while not ended.is_set():
            delivered.extend(place.deliver(far[-1].due))  # strictly before: the last one stays

    async def share() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, dispatch)
            for _ in range(12):
                await anyio.to_thread.run_sync(lambda: source.hide(run, 20, 1, MARGIN))
                place_more = messages(20, NEXT_YEAR)
                far.extend(place_more)
                await anyio.to_thread.run_sync(place.add, place_more)
            ended.set()

    anyio.run(share)
    hidden = [message.message_id for batch in source.batches(run) for message in source.read(run, batch.number)]
    assert sorted([*delivered, *hidden, *ids(place.waiting())]) == ids(far)


def test_the_same_place_is_known_by_whatever_address(place: StorePlace, source: StoreTables, tmp_path) -> None:
    address = place.spec.address.replace("127.0.0.1", "localhost").replace(
        str(tmp_path), f"{tmp_path}/../{tmp_path.name}"
    )
    assert address != place.spec.address
    other = store_source(address, schema=place.spec.schema)
    assert source.same_place(other)
    assert source.table_of(place.name) == other.table_of(place.name)
    other.close()


def test_it_is_known_what_was_given_away(place: StorePlace, source: StoreTables) -> None:
    far = messages(4, NEXT_YEAR)
    place.add(far)
    table = source.table_of(place.name)
    assert (source.being_emptied(table), source.given_away(table)) == (None, set())
    run = begun(source, place.name)
    source.hide(run, 2, 1, MARGIN)
    found = source.being_emptied(table)
    assert found is not None
    assert (found.run_id, source.given_away(table)) == (run.run_id, set(ids(far[:2])))
    with pytest.raises(MigrationConflict, match="is neither completed nor aborted"):
        begun(source, place.name)
    source.advance(run, 1, BatchStatus.PENDING, BatchStatus.STAGED)
    source.advance(run, 1, BatchStatus.STAGED, BatchStatus.COMPLETED)
    source.set_status(run, MigrationStatus.COMPLETED, SystemClock().now())
    assert (source.being_emptied(table), source.given_away(table)) == (None, set(ids(far[:2])))
    assert source.waiting_among(place.name, set(ids(far[1:])), LONG_AGO) == ids(far[2:])


def test_the_wrong_kind_is_told_with_the_option_for_it(place: StorePlace, tmp_path) -> None:
    timeouts = migration_source(place.spec.address, schema=place.spec.schema)
    with pytest.raises(ConfigurationError, match=r"is a Postdate store; name it with --from-store instead of --from"):
        timeouts.endpoints()
    timeouts.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "mssql://user@host/db",
            "the store 'mssql://user@host/db'; it can from sqlite:, postgresql: and mariadb: addresses",
        ),
        ("azure-table://?connection=env:X", "no migration can be made from the store"),
        ("sqlite:", "names no file"),
        ("mariadb:", "names no server"),
    ],
)
def test_a_store_that_nothing_can_be_moved_out_of_is_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        store_source(address)
