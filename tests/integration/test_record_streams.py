"""The records of a store as they are written: none is left out, none comes twice, in whatever order writers commit."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import until

from postdate.backends.postgres.bulk import PostgresRecordStream
from postdate.backends.postgres.names import SchemaNames
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.sqlite.store import SqliteStore
from postdate.errors import NotSupported, StoreNotSetUp
from postdate.messages import DelayedMessage
from postdate.operations.doctor.traffic import read_store_traffic
from postdate.ports import TransactionMode
from postdate.ports.scanning import RecordStreamStore, StreamPosition
from postdate.wiring.sources import open_record_stream

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TABLE = "orders.timeouts"


@pytest.fixture
def schema(postgres_url: str) -> Iterator[str]:
    """A schema with one store in it."""
    name = fresh_schema()
    store = PostgresStore(postgres_url, schema=name, table=TABLE)
    store.database.setup_blocking(TABLE)
    store.database.close_blocking()
    yield name
    for writer in Writer.all:  # what a failed test has left open would keep the schema
        writer.close()
    Writer.all.clear()
    drop_schema(postgres_url, name)


def message(message_id: str) -> DelayedMessage:
    return DelayedMessage(message_id, NOW + timedelta(hours=1), "orders")


class Writer:
    """A transaction of an application that stores messages in it."""

    all: ClassVar[list["Writer"]] = []

    def __init__(self, url: str, schema: str) -> None:
        self.all.append(self)
        self._store = PostgresStore(url, schema=schema, table=TABLE)
        self.connection = psycopg.connect(url)

    def store(self, *message_ids: str) -> None:
        self._store.enqueue_blocking(self.connection, [message(each) for each in message_ids], NOW)

    def commit(self) -> None:
        self.connection.commit()
        self.close()

    def roll_back(self) -> None:
        self.connection.rollback()
        self.close()

    def close(self) -> None:
        self.connection.close()
        self._store.database.close_blocking()


def ids(stream: RecordStreamStore, first: int, end: int) -> list[str]:
    return [row[0] for page in stream.read_records(first, end, ["message_id"], 3) for row in page]


def test_nothing_below_the_safe_end_is_written_later(postgres_url: str, schema: str) -> None:
    early, late = Writer(postgres_url, schema), Writer(postgres_url, schema)
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        early.store("a")
        late.store("b", "c")
        late.commit()
        assert stream.safe_end() == 0, "b and c are there, and a lower number may still come"
        early.commit()
        end = stream.safe_end()
        assert sorted(ids(stream, 0, end)) == ["a", "b", "c"]
        assert end == stream.next_number()


def test_the_safe_end_gets_past_writers_that_come_and_go(postgres_url: str, schema: str) -> None:
    """There is always somebody who writes; each of them ends in the end."""
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        writing = [Writer(postgres_url, schema)]
        writing[0].store("0")
        ends = list[int]()
        for number in range(1, 6):
            writing.append(Writer(postgres_url, schema))
            writing[-1].store(str(number))
            ends.append(stream.safe_end())
            writing.pop(0).commit()
        ends.append(stream.safe_end())
        writing.pop().commit()
        assert ends == sorted(ends)
        assert ends[-1] > 0
        assert sorted(ids(stream, 0, stream.safe_end())) == ["0", "1", "2", "3", "4", "5"]


async def test_a_new_position_waits_for_a_removal_that_runs(postgres_url: str, schema: str) -> None:
    """The removal has not seen the position: its stream must not begin to read before it is over."""
    store = PostgresStore(postgres_url, schema=schema, table=TABLE)
    table = SchemaNames(schema).qualified_name("stream_position")
    read = f"SELECT min(number) FROM {table}".encode()
    waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
    with psycopg.connect(postgres_url) as removal, psycopg.connect(postgres_url, autocommit=True) as watching:
        removal.execute(read)
        setting = asyncio.create_task(asyncio.to_thread(store.set_stream_position, "lake", 1, NOW))
        await until(lambda: watching.execute(waits, (table,)).fetchone() is not None)
        assert not setting.done()
        removal.rollback()
        await setting
        removal.execute(read)
        await asyncio.to_thread(store.set_stream_position, "lake", 2, NOW)  # it only moves: no removal needs to end
    traffic = await read_store_traffic(store, store.observer(), NOW)
    assert list(traffic.positions) == [StreamPosition("lake", 2, NOW)]
    await store.close()


def test_a_transaction_that_has_only_drawn_a_number_is_awaited(postgres_url: str, schema: str) -> None:
    """Bulk writers draw the numbers of a whole batch before they write any of it."""
    quoted = schema.replace('"', '""')
    with (
        closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream,
        psycopg.connect(postgres_url) as drawing,
    ):
        row = drawing.execute(f"SELECT nextval('\"{quoted.replace('%%', '%')}\".number')".encode()).fetchone()
        other = Writer(postgres_url, schema)
        other.store("other")
        other.commit()
        assert row is not None
        assert stream.safe_end() <= row[0]
        drawing.rollback()
        assert ids(stream, 0, stream.safe_end()) == ["other"]


def test_what_is_rolled_back_holds_nothing_up_and_is_not_seen(postgres_url: str, schema: str) -> None:
    gone, kept = Writer(postgres_url, schema), Writer(postgres_url, schema)
    gone.store("gone")
    kept.store("kept")
    kept.commit()
    gone.roll_back()
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        assert ids(stream, 0, stream.safe_end()) == ["kept"]


def test_random_writers_commit_in_any_order_and_every_record_is_read_once(postgres_url: str, schema: str) -> None:
    chance = random.Random(20260301)
    names = (f"m{number}" for number in range(10_000))
    open_writers, committed, read = list[tuple[Writer, list[str]]](), set[str](), list[str]()
    reached = 0
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        for _ in range(150):
            match chance.choice(["begin", "write", "end", "read"]):
                case "begin" if len(open_writers) < 6:
                    open_writers.append((Writer(postgres_url, schema), []))
                case "write" if open_writers:
                    writer, written = chance.choice(open_writers)
                    some = [next(names) for _ in range(chance.randint(1, 4))]
                    writer.store(*some)
                    written.extend(some)
                case "end" if open_writers:
                    writer, written = open_writers.pop(chance.randrange(len(open_writers)))
                    if chance.random() < 0.8:
                        writer.commit()
                        committed.update(written)
                    else:
                        writer.roll_back()
                case _:
                    end = stream.safe_end()
                    read += ids(stream, reached, end)
                    reached = end
        for writer, written in open_writers:
            writer.commit()
            committed.update(written)
        for _ in range(2):
            end = stream.safe_end()
            read += ids(stream, reached, end)
            reached = end
    assert len(committed) > 50
    assert sorted(read) == sorted(committed)


def test_writers_in_threads_are_followed_while_they_write(postgres_url: str, schema: str) -> None:
    def write(name: str) -> None:
        store = PostgresStore(postgres_url, schema=schema, table=TABLE)
        for batch in range(20):
            store.store_many_blocking([message(f"{name}-{batch}-{n}") for n in range(7)], NOW)
        store.database.close_blocking()

    threads = [threading.Thread(target=write, args=(f"w{number}",)) for number in range(4)]
    read, reached = list[str](), 0
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            end = stream.safe_end()
            read += ids(stream, reached, end)
            reached = end
        for thread in threads:
            thread.join()
        for _ in range(2):
            end = stream.safe_end()
            read += ids(stream, reached, end)
            reached = end
    assert len(read) == len(set(read)) == 4 * 20 * 7


def test_another_store_of_the_schema_is_not_read(postgres_url: str, schema: str) -> None:
    other = PostgresStore(postgres_url, schema=schema, table="other.timeouts")
    other.database.setup_blocking("other.timeouts")
    other.store_many_blocking([message("theirs")], NOW)
    other.database.close_blocking()
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        assert ids(stream, 0, stream.safe_end()) == []
        with closing(PostgresRecordStream(postgres_url, schema=schema, table="other.timeouts")) as others:
            assert ids(others, 0, others.safe_end()) == ["theirs"]
            assert others.identity != stream.identity


def test_a_schema_made_anew_is_another_store(postgres_url: str, schema: str) -> None:
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        before = stream.identity
    drop_schema(postgres_url, schema)
    store = PostgresStore(postgres_url, schema=schema, table=TABLE)
    store.database.setup_blocking(TABLE)
    store.database.close_blocking()
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        assert stream.identity != before


def test_a_store_that_is_not_set_up_is_named(postgres_url: str, schema: str) -> None:
    with (
        closing(PostgresRecordStream(postgres_url, schema=schema, table="nobody.timeouts")) as stream,
        pytest.raises(StoreNotSetUp, match=r"nobody\.timeouts"),
    ):
        _ = stream.identity


def test_new_records_are_found_by_their_index(postgres_url: str, schema: str) -> None:
    """The end of a long table of records is read without the rest of it."""
    store = PostgresStore(postgres_url, schema=schema, table=TABLE)
    store.store_many_blocking([message("first")], NOW)
    name = '"' + schema.replace('"', '""') + '"'
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            f"INSERT INTO {name}.record (at, due, store_id, kind, message_id) "
            f"SELECT now(), now(), 1, 4, 'filler' FROM generate_series(1, 50000)".encode()
        )
        connection.execute(f"VACUUM ANALYZE {name}.record".encode())
    with closing(PostgresRecordStream(postgres_url, schema=schema, table=TABLE)) as stream:
        end = stream.next_number()
        with store.database.lend_connection() as connection, connection.transaction():
            connection.execute("SET LOCAL enable_bitmapscan = on")
            plan = connection.execute(
                b"EXPLAIN " + stream.query(["message_id"]), {"first": end - 10, "end": end, "table": TABLE}
            ).fetchall()
        assert "Bitmap Index Scan on record_number" in str(plan)
        assert len(ids(stream, end - 10, end)) == 10
    store.database.close_blocking()


def test_a_file_is_followed_in_the_order_of_its_commits(tmp_path: Path) -> None:
    async def store(*message_ids: str) -> None:
        store = SqliteStore(path)
        await store.initialize("orders", TransactionMode.RECEIVE_ONLY)
        await store.store_many([message(each) for each in message_ids], NOW)
        await store.close()

    path = tmp_path / "messages.db"
    asyncio.run(store("a", "b"))
    with closing(open_record_stream(f"sqlite:///{path}")) as stream:
        end = stream.safe_end()
        assert ids(stream, 0, end) == ["a", "b"]
        asyncio.run(store("b", "c"))
        assert ids(stream, end, stream.safe_end()) == ["c"]


def test_a_file_that_is_missing_is_not_made(tmp_path: Path) -> None:
    with (
        closing(open_record_stream(f"sqlite:///{tmp_path / 'none.db'}")) as stream,
        pytest.raises(StoreNotSetUp),
    ):
        stream.safe_end()
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("address", ["mariadb://user@host/database", "mssql://user@host/database", "memory:"])
def test_stores_that_cannot_be_followed_say_why(address: str) -> None:
    with pytest.raises(NotSupported, match="not in the order of commits"):
        open_record_stream(address)
