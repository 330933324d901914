"""A checksum that a store keeps with a message goes with it into its queue, and is checked by whoever receives it."""

import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import anyio
import psycopg
import pyarrow as pa
import pytest
from tests.damage import flipped
from tests.integration.migration_places import NEXT_YEAR
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import DelayedMessage, LocalTransport, PostgresStore, PostgresTransport, SqliteStore, TransactionMode
from postdate.backends.sqlite.expiring import DEAD_LETTERS, take_out_expired
from postdate.errors import InvalidMessage
from postdate.messages import sealed
from postdate.pipeline.migrate import StoreMove
from postdate.pipeline.migrate.verifying import checksums
from postdate.pipeline.stores import StoreSpec, opened
from postdate.ports import Mending, Outcome, Scan
from postdate.testing.store_suite.columns import message_batch

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HEADERS = {"kind": "é", "Work": "1"}


class Place(Protocol):
    """Store and queues in one database, and SQL in it."""

    @property
    def transport(self) -> LocalTransport | PostgresTransport: ...

    def store(self, *, checksum: bool) -> SqliteStore | PostgresStore: ...

    def rows(self, sql: str) -> list[tuple[Any, ...]]: ...


class OneFile:
    """See :class:`Place`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._transport = LocalTransport(path)

    @property
    def transport(self) -> LocalTransport:
        return self._transport

    def store(self, *, checksum: bool) -> SqliteStore:
        return SqliteStore(self._path, checksum=checksum)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._path)) as file, file:
            return file.execute(sql).fetchall()


class OneSchema:
    """See :class:`Place`."""

    def __init__(self, url: str) -> None:
        self._url, self.schema = url, fresh_schema()
        self._transport = PostgresTransport(url, schema=self.schema)

    @property
    def transport(self) -> PostgresTransport:
        return self._transport

    def store(self, *, checksum: bool) -> PostgresStore:
        return PostgresStore(self._url, schema=self.schema, checksum=checksum)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (self.schema,))
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield OneFile(tmp_path / "one.db")
            return
        url: str = request.getfixturevalue("postgres_url")
        schema = OneSchema(url)
        stack.callback(drop_schema, url, schema.schema)
        yield schema


@pytest.fixture
async def place(empty: Place) -> AsyncIterator[Place]:
    await empty.transport.create_queues(["q"])
    yield empty
    await empty.transport.close()


async def opened_store(place: Place, *, checksum: bool) -> SqliteStore | PostgresStore:
    store = place.store(checksum=checksum)
    await store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
    await store.setup()
    return store


def flip(place: Place) -> None:
    ((body,),) = place.rows("SELECT body FROM content WHERE headers LIKE '%bad%'")
    literal = f"X'{flipped(body).hex()}'" if isinstance(place, OneFile) else f"'\\x{flipped(body).hex()}'"
    place.rows(f"UPDATE content SET body = {literal} WHERE headers LIKE '%bad%'")


def two() -> list[DelayedMessage]:
    good = DelayedMessage("good", NOW, "q", HEADERS, b"\0body")
    return [good, DelayedMessage("bad", NOW - SECOND, "q", {"is": "bad"}, b"\0body")]


async def test_who_receives_a_moved_message_is_the_first_to_read_it_and_checks_it(place: Place) -> None:
    """Its row moves unread; to other readers of the queue's table its headers are the same JSON."""
    store = await opened_store(place, checksum=True)
    await store.store_many(two(), NOW)
    assert (await store.move_due(NOW + SECOND, 10)).delivered == 2
    found = [json.loads(headers) for (headers,) in place.rows("SELECT headers FROM content")]
    assert sorted(found, key=len) == [{"is": "bad"}, HEADERS]
    flip(place)
    receiver = place.transport.receiver("q")
    (received,) = await receiver.receive(10)
    assert (received.envelope.headers, received.envelope.body) == (HEADERS, b"\0body")
    (aside,) = await place.transport.quarantined(10)
    assert (aside.message_id, aside.place, aside.raw["body"]) == ("bad", "q", flipped(b"\0body"))
    assert "its content is damaged" in aside.reason
    await receiver.close()
    await store.close()


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
async def test_turning_it_on_or_off_leaves_all_readable(place: Place, first: bool, then: bool) -> None:
    store = await opened_store(place, checksum=first)
    await store.store_many(two(), NOW)
    await store.close()
    store = await opened_store(place, checksum=then)
    claims = await store.claim_due(NOW + SECOND, 10)
    assert [claim.message for claim in claims] == [*reversed(two())]
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 2
    await store.close()


async def test_a_row_that_was_mended_by_hand_is_put_back_once_it_has_no_checksum(place: Place) -> None:
    """The body is what it is to be, says whoever takes the white space off the headers."""
    store = await opened_store(place, checksum=True)
    await store.store_many(two(), NOW)
    flip(place)
    (claim,) = await store.claim_due(NOW + SECOND, 10)
    await store.finish([claim], Outcome.DELIVERED, NOW)
    (aside,) = await store.quarantined(10)
    with pytest.raises(InvalidMessage, match="its content is damaged"):
        await store.put_back(aside.number, Mending(due=NOW), NOW)
    blank = "char(9, 32)" if isinstance(place, OneFile) else "E' \\t'"
    place.rows(f"UPDATE quarantine SET headers = rtrim(headers, {blank})")
    await store.put_back(aside.number, Mending(), NOW)
    (claim,) = await store.claim_due(NOW + SECOND, 10)
    assert (claim.message.headers, claim.message.body) == ({"is": "bad"}, flipped(b"\0body"))
    await store.finish([claim], Outcome.DELIVERED, NOW)
    await store.close()


async def test_scans_see_the_json_of_the_headers(place: Place) -> None:
    store = await opened_store(place, checksum=True)
    await store.store_many(two(), NOW)
    (part,) = store.scan_parts("pending", 1)
    found = [headers for page in store.scan(Scan("pending", ("headers",)), part, 10) for (headers,) in page]
    assert sorted(map(json.loads, found), key=len) == [{"is": "bad"}, HEADERS]
    await store.close()


def test_a_migration_moves_rows_with_a_checksum_and_sets_one_aside_that_is_damaged(tmp_path: Path) -> None:
    """Told apart from those without one neither in the source nor by who compares what was moved."""
    old, new = (StoreSpec(f"sqlite:///{tmp_path}/{name}.db", checksum=True) for name in ("one", "other"))
    for spec in (old, new):
        with opened(spec, create=True) as store:
            store.setup()
            store.store_many([replace(each, due=NEXT_YEAR) for each in two()] if spec is old else [], NOW)
    place = OneFile(tmp_path / "one.db")
    flip(place)
    anyio.run(place.transport.close)
    (moved,) = StoreMove(old, new).run().endpoints
    assert (moved.moved, moved.verified, moved.problems) == (1, 1, ("1 cannot be read: `postdate errors` shows them",))


def test_a_copy_is_the_same_message_with_and_without_a_checksum() -> None:
    plain = message_batch(two())
    headers = pa.array([sealed(text, b"\0body") for text in map(str, plain.column("headers").to_pylist())], pa.string())
    place = plain.schema.get_field_index("headers")
    with_checksums = plain.set_column(place, "headers", headers)
    assert checksums(with_checksums).tolist() == checksums(plain).tolist()


async def test_a_damaged_message_becomes_no_dead_letter(tmp_path: Path) -> None:
    """What is written anew without a checksum is checked before."""
    place = OneFile(tmp_path / "one.db")
    await place.transport.create_queues(["q"])
    store = place.store(checksum=True)
    good, bad = (
        DelayedMessage(each.message_id, each.due, "q", each.headers, each.body, expires_at=NOW + 9 * SECOND)
        for each in two()
    )
    await store.store_many([good, bad], NOW)
    assert (await store.move_due(NOW + SECOND, 10)).delivered == 2
    place.rows("UPDATE queue_message SET dead_letter = 1, ends_at = 1")
    flip(place)
    await store.file.write(lambda tx: take_out_expired(tx, 2))
    assert await place.transport.quarantined_count() == 1
    assert (await place.transport.queue_lengths())[DEAD_LETTERS] == 1
    await store.close()
    await place.transport.close()
