"""A database that was restored without its indexes, without a table, or at an earlier version: start and doctor name
what is missing, and setup creates again what it can.
"""

import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests import mariadb_subjects, postgres_subjects
from tests.cli.conftest import CommandLine

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quote_name
from postdate.backends.postgres.objects import find_missing_objects
from postdate.backends.sqlite.connection import missing_objects


class Restored:
    """A schema that is set up, with sagas and an outbox."""

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, postgres_subjects.fresh_schema()

    @contextmanager
    def connect(self) -> Generator[psycopg.Connection[Any]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(self.schema)))
            yield connection

    def indexes(self) -> list[str]:
        """Return the definitions of all indexes but that of the marks, without names."""
        with self.connect() as connection:
            return [
                text.partition(" ON ")[2] + (" unique" if text.startswith("CREATE UNIQUE") else "")
                for (text,) in connection.execute(
                    "SELECT indexdef FROM pg_indexes WHERE schemaname = %s AND tablename <> 'migration' ORDER BY 1",
                    [self.schema],
                )
            ]

    def drop_indexes(self) -> int:
        """Drop what `pg_restore --section=pre-data --section=data` leaves out; return the number."""
        with self.connect() as connection:
            constraints = connection.execute(
                "SELECT c.relname, k.conname FROM pg_constraint AS k JOIN pg_class AS c ON c.oid = k.conrelid "
                "JOIN pg_namespace AS n ON n.oid = c.relnamespace "
                "WHERE n.nspname = %s AND k.contype IN ('p', 'u') AND c.relname <> 'migration'",
                [self.schema],
            ).fetchall()
            for table, name in constraints:
                connection.execute(
                    sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}").format(sql.Identifier(table), sql.Identifier(name))
                )
            indexes = connection.execute(
                "SELECT indexname FROM pg_indexes WHERE schemaname = %s AND tablename <> 'migration'", [self.schema]
            ).fetchall()
            for (name,) in indexes:
                connection.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(name)))
            return len(constraints) + len(indexes)

    def missing(self) -> list[str]:
        with self.connect() as connection:
            subjects = ["", "postdate.timeouts", "saga", "outbox"]
            return find_missing_objects(connection, self.schema, subjects).texts()


@pytest.fixture
def restored(postgres_url: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Generator[Restored]:
    place = Restored(postgres_url)
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", postgres_url)
    monkeypatch.setenv("POSTDATE_STORE__SCHEMA", place.schema)
    cli.ok("setup", "--sagas", "--outbox")
    yield place
    postgres_subjects.drop_schema(postgres_url, place.schema)


def test_nothing_is_missing_after_a_setup(restored: Restored, cli: CommandLine) -> None:
    assert restored.missing() == []
    assert "ok    schema          version 9" in cli("doctor").out


def test_every_index_that_was_lost_is_named_and_created_again(restored: Restored, cli: CommandLine) -> None:
    before = restored.indexes()
    assert restored.drop_indexes() == len(before) == len(restored.missing())
    start = cli("run", "--no-setup")
    assert start.status == 3
    assert "[store_not_set_up]" in start.err
    diagnosis = cli("doctor")
    assert diagnosis.status == 1
    for text in (start.err, diagnosis.out):
        assert "the index of 'postdate.timeouts' on (attempt_at, number)" in text
        assert "the index of 'record' on (message_id, store_id)" in text
        assert "postdate setup" in text
    cli.ok("setup", "--sagas", "--outbox")
    assert restored.missing() == []
    assert restored.indexes() == before
    assert "lacks" not in cli("doctor").out


def test_an_index_that_is_invalid_counts_as_missing(restored: Restored) -> None:
    """As `CREATE INDEX CONCURRENTLY` leaves one behind that did not run to its end."""
    with restored.connect() as connection:
        connection.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'record_other'::regclass")
    assert restored.missing() == ["the index of 'record' on (message_id)"]


def test_an_index_of_another_name_is_as_good(restored: Restored) -> None:
    with restored.connect() as connection:
        connection.execute("ALTER INDEX record_other RENAME TO something_else")
    assert restored.missing() == []


@pytest.mark.parametrize("table", ["content", "postdate.timeouts", "holder_number"])
def test_a_lost_table_is_named_and_no_empty_one_takes_its_place(
    table: str, restored: Restored, cli: CommandLine
) -> None:
    kind = sql.SQL("SEQUENCE" if table == "holder_number" else "TABLE")
    with restored.connect() as connection:
        connection.execute(sql.SQL("DROP {} {}").format(kind, sql.Identifier(table)))
    assert restored.missing() == [f"the table or sequence {table!r}"]
    for command in ("setup", "run"):
        ran = cli(command)
        assert ran.status == 3
        assert f"migrations were applied there: {table}. Restore" in ran.err
    assert f"the table or sequence {table!r}" in cli("doctor").out


def test_an_earlier_version_is_named(restored: Restored, cli: CommandLine) -> None:
    with restored.connect() as connection:
        connection.execute("ALTER TABLE holder DROP COLUMN delivers_from")
        connection.execute("DELETE FROM migration WHERE subject = '' AND version = 9")
    start = cli("run", "--no-setup")
    assert start.status == 3
    assert "has version 8 of its tables, this Postdate needs 9; run `postdate setup`" in start.err
    assert "version 8, this Postdate needs 9" in cli("doctor").out
    cli.ok("setup")
    assert restored.missing() == []


def test_what_cannot_be_seen_after_a_send_is_no_error(restored: Restored, cli: CommandLine) -> None:
    """The message is stored by then: whoever got an error would send it again."""
    with restored.connect() as connection:
        connection.execute("ALTER TABLE queue RENAME TO lost")
    sent = cli.ok("send", "orders", "x", "--delay", "1h", "--json").json
    assert sent["queue_exists"] is None
    with restored.connect() as connection:
        connection.execute("ALTER TABLE lost RENAME TO queue")
    listed = cli.ok("messages", "list", "--json").json["messages"]
    assert [each["message_id"] for each in listed] == [sent["message_id"]]


# --- a database of MariaDB --------------------------------------------------------------------------------------------


@pytest.fixture
def restored_mariadb(
    mariadb_url: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> Generator[Callable[[str], object]]:
    """Set up a store; return what changes it."""
    schema = mariadb_subjects.fresh_schema()
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", mariadb_url)
    monkeypatch.setenv("POSTDATE_STORE__SCHEMA", schema)
    monkeypatch.setenv("POSTDATE_TRANSPORT__ADDRESS", "sqlite:///queues.db")
    cli.ok("setup")
    with closing(MariaDbServer(mariadb_url).connect()) as session:
        place = quote_name(schema)
        yield lambda change: session.change(change.format(place=place))
    mariadb_subjects.drop_schema(mariadb_url, schema)


def test_an_index_that_mariadb_lost_is_named_and_created_again(
    restored_mariadb: Callable[[str], object], cli: CommandLine
) -> None:
    assert "lacks" not in cli("doctor").out
    for table, index in (
        ("postdate.timeouts", "attempt"),
        ("postdate.timeouts", "due"),
        ("postdate_record", "record_scheduled"),
        ("postdate_store", "name"),
        ("postdate_destination_limit", "destination_limit_name"),
    ):
        restored_mariadb(f"ALTER TABLE {{place}}.`{table}` DROP INDEX `{index}`")
    start = cli("run", "--no-setup")
    assert start.status == 3
    for text in (start.err, cli("doctor").out):
        for index in (
            "the index of 'postdate.timeouts' on (attempt_at, number)",
            "the index of 'postdate.timeouts' on (due, number, failures)",
            "the index of 'postdate_record' on (message_id, store_id, once)",
            "the index of 'postdate_store' on (name)",
            "the index of 'postdate_destination_limit' on (store, destination)",
        ):
            assert index in text
    cli.ok("setup")
    assert "lacks" not in cli("doctor").out


def test_a_table_that_mariadb_lost_is_named(restored_mariadb: Callable[[str], object], cli: CommandLine) -> None:
    restored_mariadb("DROP TABLE {place}.`postdate_holder`")
    assert "lacks the table 'postdate_holder'" in cli("doctor").out
    for command in ("setup", "run"):
        ran = cli(command)
        assert ran.status == 3
        assert "migrations were applied there: postdate_holder. Restore" in ran.err


# --- a file -----------------------------------------------------------------------------------------------------------

OWN_INDEXES = "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL ORDER BY name"


def test_every_index_that_a_file_lost_is_named_and_created_again(cli: CommandLine) -> None:
    cli.ok("setup")
    with closing(sqlite3.connect("postdate.db")) as connection:
        assert missing_objects(connection) == {}
        names = [name for (name,) in connection.execute(OWN_INDEXES)]
        for name in names:
            connection.execute(f"DROP INDEX {name}")
    assert len(names) >= 10
    for ran in (cli("run", "--no-setup"), cli("messages", "list"), cli("doctor")):
        assert ran.status != 0
        assert all(name in ran.err + ran.out for name in names)
        assert "postdate setup" in ran.err + ran.out
    cli.ok("setup")
    with closing(sqlite3.connect("postdate.db")) as connection:
        assert [name for (name,) in connection.execute(OWN_INDEXES)] == names
    cli.ok("messages", "list")


def test_a_table_that_a_file_lost_is_named_and_no_empty_one_takes_its_place(cli: CommandLine) -> None:
    cli.ok("setup")
    with closing(sqlite3.connect("postdate.db")) as connection:
        connection.execute("DROP TABLE content")
    for command in ("setup", "run"):
        ran = cli(command)
        assert ran.status == 3
        assert "migrations were applied there: content. Restore" in ran.err
    assert "lacks content" in cli("doctor").out
