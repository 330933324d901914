"""A migration's source beside an old manager that goes on, in trouble, and where it is refused. Row 116."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.integration.migration_places import (
    LONG_AGO,
    MARGIN,
    NEXT_YEAR,
    PLACES,
    SECOND,
    MariaDbPlace,
    Place,
    PostgresPlace,
    Row,
    SqlitePlace,
    hours,
    new_begun,
    new_run,
    opened,
)

from postdate import SystemClock
from postdate.backends.sql.timeouts_migration.dialect import Session
from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.backends.sqlite.timeouts_source import SqliteDialect
from postdate.errors import (
    ConfigurationError,
    MigrationConflict,
    StoreNotSetUp,
    StoreUnavailable,
    StoreUnreachable,
)
from postdate.ports.migrating import MigrationStatus
from postdate.wiring.sources import migration_source


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return an empty table of the endpoint ``Sales.Orders``."""
    yield from opened(request)


@pytest.fixture(params=["postgres", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return the same, on servers where two may write at once."""
    yield from opened(request)


# --- beside an old manager --------------------------------------------------------------------------------------------


def test_beside_an_old_manager_none_is_lost_and_none_sent_twice(place: Place) -> None:
    """Row 116: the manager looks without locks, sends, and removes then; what is hidden is never among it."""
    start = SystemClock().now()
    rows = place.insert([*(Row(start + number * timedelta(milliseconds=5)) for number in range(200)), *hours(5)])
    last, sent, beaten = rows[199].due, list[str](), list[str]()
    over = threading.Event()

    def manage() -> None:
        with closing(place.connect()) as connection:
            while not (over.is_set() and SystemClock().now() > last):
                for identity in place.due(connection, SystemClock().now()):
                    sent.append(str(identity).lower())
                    if not place.remove(connection, identity):
                        beaten.append(str(identity))
            sent.extend(str(identity).lower() for identity in place.due(connection, SystemClock().now()))

    source = place.source()
    run = new_begun(source)
    with ThreadPoolExecutor(1) as threads:
        manager = threads.submit(manage)
        try:
            left = True
            while left:
                try:
                    left = bool(source.hide(run, 5, 1, SECOND / 4))
                except StoreUnavailable:  # too slow for so small a margin: nothing was hidden
                    left = SystemClock().now() <= last
            source.hide(run, 5, 1, MARGIN)
        finally:
            over.set()
        manager.result()
    hidden = [message.message_id for batch in source.batches(run) for message in source.read_batch(run, batch.number)]
    assert beaten == []
    assert sorted([*sent, *hidden]) == sorted(row.timeout_id for row in rows)
    assert sent
    assert {row.timeout_id for row in rows[200:]} <= set(hidden)


def test_what_the_old_manager_has_locked_stays_with_it(server: Place) -> None:
    rows = server.insert(hours(6))
    source = server.source()
    run = new_begun(source)
    removed, kept = rows[0], rows[3]
    with closing(server.connect()) as one, closing(server.connect()) as other:
        for connection, row in ((one, removed), (other, kept)):
            server.execute(connection, "BEGIN")
            assert server.remove(connection, row.timeout_id)
        assert sum(batch.count for batch in source.hide(run, 10, 1, MARGIN)) == 4
        server.execute(one, "COMMIT")
        server.execute(other, "ROLLBACK")
    assert server.ids() == {kept.timeout_id}
    assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [1]
    hidden = {message.message_id for number in (1, 2) for message in source.read_batch(run, number)}
    assert hidden == {row.timeout_id for row in rows} - {removed.timeout_id}


def test_an_old_manager_that_removes_what_is_being_hidden_finds_it_gone(server: Place) -> None:
    """A saga completes meanwhile: its removal waits for the transaction, and then removes nothing."""
    rows = server.insert(hours(3))
    source = server.source()
    run = new_begun(source)
    source.hide(run, 10, 1, MARGIN)
    with closing(server.connect()) as connection:
        assert not server.remove(connection, rows[0].timeout_id)
    assert len(source.read_batch(run, 1)) == 3


# --- giving up --------------------------------------------------------------------------------------------------------


def test_hiding_gives_up_before_the_margin_is_used_up(server: Place) -> None:
    """Somebody has the whole table locked; the server ends the wait, and nothing has happened."""
    server.insert(hours(3))
    before = server.rows()
    source = server.source()
    run = new_begun(source)
    with closing(server.connect()) as connection:
        table = server.table("Sales_Orders_TimeoutData")
        postgres = isinstance(server, PostgresPlace)
        server.execute(connection, "BEGIN" if postgres else f"LOCK TABLES {table} WRITE")
        if postgres:
            server.execute(connection, f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreUnavailable):
            source.hide(run, 10, 1, SECOND)
        server.execute(connection, "ROLLBACK" if postgres else "UNLOCK TABLES")
    assert (server.rows(), source.batches(run)) == (before, [])
    assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [3]


def test_a_margin_that_no_transaction_keeps_hides_nothing(server: Place) -> None:
    """Whichever gives up first: a statement, the wait for the client, or the look at the clock."""
    server.insert(hours(3))
    before = server.rows()
    source = server.source()
    run = new_begun(source)
    with pytest.raises(StoreUnavailable):
        source.hide(run, 10, 1, timedelta(microseconds=1))
    assert (server.rows(), source.batches(run)) == (before, [])
    assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [3]


def test_a_lost_connection_hides_nothing_and_the_next_call_has_another(postgres_url: str) -> None:
    place = PostgresPlace(postgres_url)
    place.create()
    place.insert(hours(3))
    source = place.source()
    run = new_begun(source)
    with closing(place.connect()) as connection:
        table = place.table("Sales_Orders_TimeoutData")
        place.execute(
            connection,
            f"CREATE FUNCTION {place.table('die')}() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN OLD; END'",
        )
        place.execute(
            connection, f"CREATE TRIGGER die BEFORE DELETE ON {table} EXECUTE FUNCTION {place.table('die')}()"
        )
        with pytest.raises(StoreUnreachable):
            source.hide(run, 10, 1, MARGIN)
        place.execute(connection, f"DROP TRIGGER die ON {table}")
    assert len(place.ids()) == 3
    assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [3]
    place.drop()


def test_the_limits_of_hiding_are_for_hiding_only(server: Place) -> None:
    server.insert(hours(3))
    source = MigrationSource(server.dialect())
    run = new_begun(source)
    assert source._open_session is not None
    if isinstance(server, MariaDbPlace):
        look = "SELECT @@max_statement_time, @@innodb_lock_wait_timeout, @@idle_write_transaction_timeout"
    else:
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        look = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
    before = source._open_session.rows(look, {})
    source.hide(run, 10, 1, MARGIN)
    assert source._open_session.rows(look, {}) == before
    source.close()


def test_the_server_ends_a_transaction_whose_client_is_suspended(
    server: Place, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before it would look at the clock, it sleeps; what it does when it wakes up comes too late."""
    server.insert(hours(3))
    before = server.rows()
    dialect = server.dialect()
    source, run, looks = MigrationSource(dialect), new_run(), list[datetime]()
    source.start_run(run)

    def now(session: Session) -> datetime:
        if looks:
            eventually(lambda: not server.holds_rows(), "the server gives the rows free")
        looks.append(type(dialect).now(dialect, session))
        return looks[-1]

    with monkeypatch.context() as patch:
        patch.setattr(dialect, "now", now)
        with pytest.raises(StoreUnreachable):
            source.hide(run, 10, 1, 4 * SECOND)
    assert len(looks) == 1
    assert (server.rows(), source.batches(run)) == (before, [])
    assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [3]
    source.close()


class _SteppingClock(SystemClock):
    """Each look at it takes a minute."""

    def __init__(self) -> None:
        self._now = SystemClock().now()

    def now(self) -> datetime:
        self._now += timedelta(minutes=1)
        return self._now


@pytest.mark.parametrize(("margin", "count"), [(119 * SECOND, 0), (121 * SECOND, 3)])
def test_the_clock_is_looked_at_before_the_commit(tmp_path: Path, margin: timedelta, count: int) -> None:
    """A minute passes while timeouts are hidden: with half of the margin left nothing is committed."""
    place = SqlitePlace(tmp_path / "old.db")
    place.create()
    place.insert(hours(3))
    source, run = MigrationSource(SqliteDialect(place.path, _SteppingClock())), new_run()
    source.start_run(run)
    if count:
        assert [batch.count for batch in source.hide(run, 10, 1, margin)] == [count]
    else:
        with pytest.raises(StoreUnavailable, match=r"took 60\.0 s"):
            source.hide(run, 10, 1, margin)
        assert source.batches(run) == []
    assert len(place.ids()) == 3 - count
    source.close()
    place.drop()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_the_table_of_another_tool_is_not_touched(place: Place) -> None:
    with closing(place.connect()) as connection:
        table, column = place.table("TimeoutsMigration_State"), place.quoted("MigrationRunId")
        place.execute(connection, f"CREATE TABLE {table} ({column} varchar(500))")
    source = place.source()
    for attempt in (source.history, lambda: source.start_run(new_run())):
        with pytest.raises(MigrationConflict, match="another tool"):
            attempt()


def test_a_run_that_an_older_version_hid_with_its_table_is_left_to_that_version(postgres_url: str) -> None:
    """A large table of PostgreSQL got another name; what is in there is in no table that is read today."""
    place = PostgresPlace(postgres_url)
    place.create()
    source = place.source()
    run = new_begun(source)
    (row,) = place.insert(hours(1))
    live, former = place.table("Sales_Orders_TimeoutData"), f"TimeoutData_former_{run.run_id}"
    with closing(place.connect()) as connection:
        place.execute(connection, f'ALTER TABLE {live} RENAME TO "{former}"')
        place.execute(connection, f"CREATE TABLE {live} (LIKE {place.table(former)})")
        ranges = place.table(f"TimeoutData_ranges_{run.run_id}")
        place.execute(connection, f'CREATE TABLE {ranges} ("BatchNumber" integer PRIMARY KEY)')
    with pytest.raises(MigrationConflict, match=rf"{run.run_id} .* resume or abort it with the version that began it"):
        source.history()
    assert place.ids(former) == {row.timeout_id}
    source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
    assert [each.status for each in place.source().history()] == [MigrationStatus.ABORTED]
    place.drop()


def test_a_table_without_the_columns_of_timeouts_is_refused(place: Place) -> None:
    with closing(place.connect()) as connection:
        place.execute(connection, f"CREATE TABLE {place.table('Odd_TimeoutData')} ({place.quoted('Id')} integer)")
    with pytest.raises(ConfigurationError, match="no column 'Destination'"):
        place.source().preview("Odd", LONG_AGO)


def test_a_table_without_transactions_is_refused(mariadb_url: str) -> None:
    place = MariaDbPlace(mariadb_url)
    place.create()
    with closing(place.connect()) as connection:
        place.execute(connection, f"ALTER TABLE {place.table('Sales_Orders_TimeoutData')} ENGINE = MyISAM")
    with pytest.raises(ConfigurationError, match="change it to InnoDB"):
        place.source().start_run(new_run())
    place.drop()


@pytest.mark.parametrize(
    ("address", "settings", "said"),
    [
        ("amqp://user:secret@here/", {}, "no migration can be made"),
        ("postgresql:user:secret@here", {}, "names no server"),
        ("postgresql://user:sec/ret@here:1/x", {}, "cannot be parsed"),
        ("mariadb://user:secret@here:99999/x", {}, "no port"),
        ("mssql://user:secret@here", {}, "SQL Server"),
        ("sqlite:old.db", {}, "names no file"),
        ("sqlite:///old.db", {"schema": "dbo"}, "no schemas"),
        ("env:POSTDATE_NOT_SET_ANYWHERE", {}, "not set"),
    ],
)
def test_what_is_no_source_is_refused_without_its_password(address: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        migration_source(address, **settings)
    assert "secret" not in str(caught.value)
    assert "sec/ret" not in str(caught.value)


def test_a_file_that_is_not_there_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreNotSetUp, match="no file"):
        migration_source(f"sqlite:///{tmp_path / 'none.db'}").endpoints()
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_answer_is_told_without_its_password() -> None:
    for scheme in ("postgresql", "mariadb", "mssql"):
        with pytest.raises(StoreUnreachable) as caught:
            migration_source(f"{scheme}://user:secret@127.0.0.1:1/x").endpoints()
        assert "secret" not in str(caught.value)
