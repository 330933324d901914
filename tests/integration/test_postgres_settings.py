"""Settings of a database, a role or an address that are not ours change nothing; see also the rights of a role."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import closing
from datetime import timedelta
from urllib.parse import quote

import psycopg
import pytest
from tests.integration.postgres_place import SECOND, TABLE, Place, now

from postdate import PostgresStore, TransactionMode
from postdate.backends.postgres.bulk import PostgresRecordStream

UNUSUAL = (
    "-c datestyle=German -c intervalstyle=sql_standard -c standard_conforming_strings=off "
    "-c default_transaction_isolation=repeatable\\ read"
)


@pytest.fixture
async def unusual(postgres_url: str) -> AsyncGenerator[Place]:
    place = Place(f"{postgres_url}?options={quote(UNUSUAL)}")
    await place.create()
    yield place
    await place.close()


async def test_how_a_session_writes_times_and_reads_texts_is_its_own_matter(unusual: Place) -> None:
    store, at = unusual.store, now()
    await store.store_many([unusual.work(number, at - SECOND) for number in range(3)], at)
    assert (await store.next_attempt()) is not None
    statistics = await store.statistics(at)
    assert (statistics.overdue, statistics.next_due) == (3, at - SECOND)
    assert list(await store.due_counts([at - 2 * SECOND, at])) == [3]
    assert [each.due for each in await store.history("m-0")] == [at - SECOND]
    assert abs(await store.server_now() - at) < timedelta(hours=1)
    assert not await store.reported_clocks()
    assert (await store.server_facts()).product == "PostgreSQL"
    assert await store.observer().processes() == []
    state = await store.observer().pending_state_of("m-0")
    assert state is not None
    assert state.attempt_at == at - SECOND
    report = await store.move_due(now(), 2)
    assert report.delivered == 2
    ((body, _),) = unusual.in_queue("consumer")[:1]
    assert body == "m-0"


async def test_a_name_with_a_backslash_is_found_again(unusual: Place) -> None:
    store = PostgresStore(unusual.url, schema=unusual.schema, table="DOM\\sales.timeouts")
    await store.initialize("DOM\\sales", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    await store.store(unusual.work(1, now()), now())
    assert (await store.statistics(now())).pending == 1
    await store.close()


async def test_several_claim_and_set_up_at_once_whatever_the_isolation_of_the_database(unusual: Place) -> None:
    await unusual.store.store_many([unusual.work(number, now() - SECOND) for number in range(400)], now())
    stores = [unusual.another_store() for _ in range(4)]
    await asyncio.gather(*(each.setup() for each in stores))
    claims = [claim for some in await asyncio.gather(*(each.claim_due(now(), 50) for each in stores)) for claim in some]
    assert len({each.message.message_id for each in claims}) == len(claims) == 200
    for each in stores:
        await each.close()


async def test_a_claim_has_the_content_of_the_version_that_it_has_locked(unusual: Place) -> None:
    """What is replaced while a claim reads is left to the next claim, and not delivered with its old content."""
    rows, rounds = 3_000, 12
    store, at = unusual.store, now()
    await store.store_many([unusual.work(number, at - 10 * SECOND) for number in range(rows)], at)
    (last,) = unusual.rows(f'SELECT number FROM "{TABLE}" ORDER BY attempt_at DESC, number DESC LIMIT 1')[0]
    ended = threading.Event()

    def replace() -> None:
        version = 0
        with unusual.connect() as connection:
            while not ended.is_set():
                version += 1
                with connection.transaction():
                    statement = f'UPDATE "{TABLE}" SET failures = %s WHERE number = %s'
                    connection.execute(statement.encode(), (version, last))
                    connection.execute(b"UPDATE content SET body = %s WHERE number = %s", (str(version).encode(), last))

    replacing = threading.Thread(target=replace)
    replacing.start()
    try:
        for _ in range(rounds):
            claims = await store.claim_due(now(), rows)
            mixed = [
                each.message
                for each in claims
                if each.message.number_of_failures
                and each.message.body != str(each.message.number_of_failures).encode()
            ]
            await store.release(claims, None)
            assert mixed == []
    finally:
        ended.set()
        replacing.join()


async def test_the_rights_that_are_printed_are_enough_to_stream_records(unusual: Place) -> None:
    await unusual.store.store(unusual.work(1, now()), now())
    role = f"clerk_{os.getpid()}"
    with psycopg.connect(unusual.url, autocommit=True) as admin:
        admin.execute(f'CREATE ROLE "{role}" LOGIN'.encode())
        try:
            printed = unusual.store.setup_statements("service")
            for line in printed.splitlines():
                if line.startswith("-- GRANT"):
                    admin.execute(line.removeprefix("-- ").replace("the_role", f'"{role}"').encode())
            address = unusual.url.replace("//postdate@", f"//{role}@")
            with closing(PostgresRecordStream(address, schema=unusual.schema, table=TABLE)) as stream:
                assert stream.next_number() > 1
        finally:
            admin.execute(f'DROP OWNED BY "{role}"'.encode())
            admin.execute(f'DROP ROLE "{role}"'.encode())
