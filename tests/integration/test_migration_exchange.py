"""A large table of PostgreSQL is hidden by an exchange: nothing about it changes for a manager. Row 116."""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.integration.migration_places import (
    HOUR,
    MARGIN,
    NEXT_YEAR,
    PostgresPlace,
    Row,
    hours,
    new_begun,
    new_run,
)

from postdate import SystemClock
from postdate.backends.postgres import exchange
from postdate.errors import MigrationConflict, StoreUnreachable
from postdate.migrating.dialect import Session
from postdate.migrating.names import former_table
from postdate.migrating.tables import MigrationSource
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationRun, MigrationStatus

LIVE = "Sales_Orders_TimeoutData"
FAR = 25
"""More than ten calls for one batch of two timeouts each would hide."""


@pytest.fixture
def place(postgres_url: str) -> Iterator[PostgresPlace]:
    """Return an empty table of the endpoint ``Sales.Orders``."""
    place = PostgresPlace(postgres_url)
    place.create()
    yield place
    place.drop()


def said(place: PostgresPlace, *statements: str) -> None:
    """Run statements with ``{live}`` in them."""
    with closing(place.connect()) as connection:
        for statement in statements:
            place.execute(connection, statement.replace("{live}", place.table(LIVE)), [])


def hide(source: MigrationSource, run: MigrationRun) -> Sequence[MigrationBatch]:
    return source.hide(run, 2, 1, MARGIN)


def read(source: MigrationSource, run: MigrationRun) -> list[str]:
    """Return the ids of what is hidden, in the order of the batches."""
    return [each.message_id for batch in source.batches(run) for each in source.read(run, batch.number)]


def ids(rows: Sequence[Row]) -> list[str]:
    return [row.timeout_id for row in rows]


def is_exchanged(place: PostgresPlace, run: MigrationRun) -> bool:
    return former_table(run.run_id) in place.tables()


# --- what it hides ----------------------------------------------------------------------------------------------------


def test_all_but_what_is_due_soon_is_hidden_at_once_in_batches_by_due_time(place: PostgresPlace) -> None:
    soon = place.insert([Row(SystemClock().now() + 30 * timedelta(minutes=1))])
    same = [Row(NEXT_YEAR + 5 * HOUR) for _ in range(6)]  # cut between equal due times
    far = sorted(place.insert([*hours(FAR), *same]), key=lambda row: (row.due, row.timeout_id))
    source = place.source()
    run = new_begun(source)
    found = hide(source, run)
    assert [batch.count for batch in found] == [2] * 15 + [1]
    assert (found[0].number, found[0].earliest, found[-1].earliest) == (1, far[0].due, far[-1].due)
    assert read(source, run) == ids(far)
    assert place.ids() == set(ids(soon))
    assert (source.history()[0].batches, source.history()[0].messages) == (16, len(far))


def test_what_comes_later_is_moved_row_by_row_into_further_batches(place: PostgresPlace) -> None:
    far = place.insert(hours(FAR))
    source = place.source()
    run = new_begun(source)
    assert len(hide(source, run)) == 13
    # Stored again under its id, by a manager that received the message twice.
    late = place.insert([far[0], *hours(FAR, start=NEXT_YEAR + 1000 * HOUR)])
    for number in range(13):
        assert [batch.number for batch in hide(place.source(), run)] == [14 + number]
    assert not hide(source, run)
    assert read(source, run) == ids([*far, *late])
    assert place.ids() == set()


def test_a_second_run_exchanges_the_table_again(place: PostgresPlace) -> None:
    for _ in range(2):
        rows = place.insert(hours(FAR))
        source = place.source()
        run = new_begun(source)
        hide(source, run)
        assert (read(source, run), is_exchanged(place, run)) == (ids(rows), True)
        for batch in source.batches(run):
            source.advance(run, batch.number, BatchStatus.PENDING, BatchStatus.COMPLETED)
        source.set_status(run, MigrationStatus.COMPLETED, NEXT_YEAR)


def test_what_is_given_back_is_as_it_was(place: PostgresPlace) -> None:
    place.insert(hours(FAR))
    before = place.rows()
    source = place.source()
    run = new_begun(source)
    numbers = [batch.number for batch in hide(source, run)]
    assert sum(source.give_back(run, number) for number in numbers) == FAR
    assert (place.rows(), source.give_back(run, 1), source.read(run, 1)) == (before, 0, [])
    source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)


# --- what a manager sees ----------------------------------------------------------------------------------------------

_LOOK = """
SELECT 'index ' || indexname, indexdef FROM pg_indexes WHERE schemaname = %s AND tablename = %s
UNION ALL SELECT 'constraint ' || conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = to_regclass(%s)
UNION ALL SELECT 'column ' || attname, concat(format_type(atttypid, atttypmod), attnotnull, attstorage,
    (SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = attrelid AND adnum = attnum),
    col_description(attrelid, attnum)) FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0
UNION ALL SELECT concat('right of ', grantee), concat(privilege_type, is_grantable)
    FROM pg_class AS c, aclexplode(coalesce(relacl, acldefault('r', relowner))) WHERE c.oid = to_regclass(%s)
UNION ALL SELECT 'table', concat(relowner::regrole, obj_description(oid), reloptions,
    (SELECT reloptions FROM pg_class AS t WHERE t.oid = c.reltoastrelid))
    FROM pg_class AS c WHERE oid = to_regclass(%s)
"""


def looks_like(place: PostgresPlace) -> set[Any]:
    table = place.table(LIVE).replace("%%", "%")
    with closing(place.connect()) as connection:
        return set(place.execute(connection, _LOOK, [place.schema, LIVE, *[table] * 4]).fetchall())


@pytest.fixture
def role(place: PostgresPlace) -> Iterator[str]:
    """Return a role with a name that has to be quoted, which may use the schema."""
    quoted = f'"{place.schema} r"'.replace('mi"gr', 'mi""gr').replace("%", "%%")
    said(place, f"CREATE ROLE {quoted}", f"GRANT ALL ON SCHEMA {place._schema.replace('%', '%%')} TO {quoted}")
    yield quoted
    said(place, f"DROP OWNED BY {quoted} CASCADE", f"DROP ROLE {quoted}")


def test_the_table_in_its_place_looks_as_it_did(place: PostgresPlace, role: str) -> None:
    said(
        place,
        "ALTER TABLE {live} ADD COLUMN \"Note\" varchar(20) DEFAULT '100%%' NOT NULL",
        'ALTER TABLE {live} ADD CONSTRAINT "no % s" CHECK ("Note" <> \'%%\')'.replace("% s", "%%s"),
        'ALTER TABLE {live} ADD CONSTRAINT "once % only" UNIQUE ("SagaId", "Id")'.replace("once %", "once %%"),
        'CREATE INDEX "odd %%s" ON {live} (lower("Headers")) WHERE "Destination" <> \'%%\'',
        "COMMENT ON TABLE {live} IS 'it''s %%s'",
        "COMMENT ON COLUMN {live}.\"Time\" IS 'UTC'",
        "ALTER TABLE {live} SET (fillfactor = 70, toast.autovacuum_enabled = false)",
        f"GRANT SELECT, DELETE ON {{live}} TO {role} WITH GRANT OPTION",
        "GRANT SELECT ON {live} TO PUBLIC",
        f"ALTER TABLE {{live}} OWNER TO {role}",
    )
    with closing(place.connect()) as connection:
        for row in hours(FAR):
            table = place.table(LIVE)
            place.execute(connection, f"INSERT INTO {table} VALUES (%s, %s, %s, %s, %s, %s, %s)", row.values())
    before, source = looks_like(place), place.source()
    run = new_begun(source)
    hide(source, run)
    assert is_exchanged(place, run)
    assert looks_like(place) == before
    assert len(before) > 20
    with closing(place.connect()) as connection:
        place.execute(connection, f"SET ROLE {role}")
        assert not place.remove(connection, hours(1)[0].timeout_id)
    assert sum(source.give_back(run, batch.number) for batch in source.batches(run)) == FAR


def test_rights_that_new_tables_have_by_default_are_not_given(place: PostgresPlace, role: str) -> None:
    place.insert(hours(FAR))
    before = looks_like(place)
    schema = place._schema.replace("%", "%%")
    said(place, f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT ALL ON TABLES TO {role}")
    source = place.source()
    run = new_begun(source)
    hide(source, run)
    assert is_exchanged(place, run)
    assert looks_like(place) == before


def test_a_manager_that_fires_meanwhile_fires_each_once_and_sees_no_error(place: PostgresPlace) -> None:
    """It peeks at what is due, and removes it later: the exchange may come between the two, again and again."""
    start = SystemClock().now()
    due = place.insert([Row(start + number * timedelta(milliseconds=20)) for number in range(50)])
    fired, beaten, over = list[str](), list[str](), threading.Event()
    sources, runs, far = list[MigrationSource](), list[MigrationRun](), list[Row]()

    def manage() -> None:
        with closing(place.connect()) as connection:
            now = start
            while not over.is_set() or now <= due[-1].due:
                now = SystemClock().now()
                for identity in place.due(connection, now):
                    fired.append(str(identity))
                    if not place.remove(connection, identity):
                        beaten.append(str(identity))

    with ThreadPoolExecutor(1) as threads:
        manager = threads.submit(manage)
        try:
            while len(runs) < 3:
                far += place.insert(hours(500))
                source = place.source()
                run = new_begun(source)
                while source.hide(run, 10, 5, MARGIN):
                    pass
                source.set_status(run, MigrationStatus.PREPARED, NEXT_YEAR)
                for batch in source.batches(run):
                    source.advance(run, batch.number, BatchStatus.PENDING, BatchStatus.COMPLETED)
                source.set_status(run, MigrationStatus.COMPLETED, NEXT_YEAR)
                sources.append(source)
                runs.append(run)
        finally:
            over.set()
        manager.result()
    assert all(is_exchanged(place, run) for run in runs)
    assert beaten == []
    hidden = [each for source, run in zip(sources, runs, strict=True) for each in read(source, run)]
    assert sorted(fired) == sorted(ids(due))
    assert sorted(hidden) == sorted(ids(far))


# --- when it ends in the middle ---------------------------------------------------------------------------------------


class _Dying(Exception):
    """The process ended here."""


def dying(place: PostgresPlace, point: int) -> MigrationSource:
    """Return a source that dies before a statement of :meth:`hide`, or before the commit that follows."""
    dialect = place.dialect()
    connect, left = dialect.connect, [point]

    def counted(session: Session) -> Session:
        def dies(call: Any) -> Any:
            def step(*values: Any) -> Any:
                if not left[0]:
                    session.close()
                    raise _Dying
                left[0] -= 1
                return call(*values)

            return step

        wrapped: Any = type("Counted", (), {})()
        for name in ("rows", "change", "commit"):
            setattr(wrapped, name, dies(getattr(session, name)))
        for name in ("begin", "rollback", "close", "pages"):
            setattr(wrapped, name, getattr(session, name))
        return wrapped

    dialect.connect = lambda: counted(connect())
    return MigrationSource(dialect)


def test_whenever_it_dies_each_timeout_is_live_or_hidden_and_it_goes_on(place: PostgresPlace) -> None:
    """Every point of the exchange, and of cutting it into batches; then it is gone on with, or aborted."""
    rows, ends = place.insert(hours(FAR)), {"live": 0, "hidden": 0}
    everything, survived = set(ids(rows)), False
    for point in range(0, 200, 5):
        source, dead = place.source(), dying(place, point)
        run = new_begun(source)
        try:
            hide(dead, run)
            survived = True
        except (_Dying, StoreUnreachable):
            dead.close()
        exchanged = is_exchanged(place, run)
        assert place.ids() == (set() if exchanged else everything)
        ends["hidden" if exchanged else "live"] += 1
        if point % 2:
            hide(source, run)
            assert set(read(source, run)) == everything
        source.set_status(run, MigrationStatus.PREPARED, NEXT_YEAR)
        for batch in source.batches(run):
            source.give_back(run, batch.number)
        source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
        assert place.ids() == everything
        if survived:
            dead.close()
            break
    assert survived
    assert ends["live"] > 5
    assert ends["hidden"] > 1


def test_a_run_that_is_cut_by_nobody_cannot_end(place: PostgresPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died between the two transactions: none of its timeouts is in a batch, and none is forgotten."""
    place.insert(hours(FAR))
    source = MigrationSource(place.dialect())
    run = new_begun(source)
    with monkeypatch.context() as patch:
        patch.setattr(source, "_cut", lambda *_: (_ for _ in ()).throw(_Dying()))
        with pytest.raises(_Dying):
            hide(source, run)
    assert (place.ids(), source.batches(run)) == (set(), [])
    with pytest.raises(MigrationConflict, match="batch 1 is PENDING"):
        source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
    assert sum(source.give_back(run, batch.number) for batch in source.batches(run)) == FAR
    source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
    source.close()


# --- when rows are moved instead --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("CREATE VIEW {schema}.seen AS SELECT * FROM {live}", "depends on it"),
        ("CREATE TABLE {schema}.other (id uuid REFERENCES {live})", "foreign key"),
        ("CREATE TABLE {schema}.other (row {live})", "depends on it"),
        ("CREATE TABLE {schema}.other () INHERITS ({live})", "inherit"),
        ("CREATE RULE odd AS ON DELETE TO {live} DO ALSO NOTHING", "the rule odd"),
        ("ALTER TABLE {live} ENABLE ROW LEVEL SECURITY", "row security"),
        ('GRANT SELECT ("Id") ON {live} TO PUBLIC', "the column Id"),
        ("ALTER TABLE {live} REPLICA IDENTITY FULL", "replica identity"),
        ("ALTER TABLE {live} ADD COLUMN odd serial", "sequence"),
        ("ALTER TABLE {live} SET UNLOGGED", "no plain table"),
        ('ALTER TABLE {live} ALTER "Time" TYPE timestamptz', "another type"),
        ('DROP INDEX {schema}."Sales_Orders_TimeoutData_Time_idx"', "no index on Time"),
        ('ALTER TABLE {live} DROP CONSTRAINT "Sales_Orders_TimeoutData_pkey"', "no unique index on Id"),
    ],
)
def test_what_cannot_be_carried_over_is_said_and_rows_are_moved(
    place: PostgresPlace, caplog: pytest.LogCaptureFixture, statement: str, why: str
) -> None:
    rows = place.insert(hours(FAR))
    said(place, statement.replace("{schema}", place._schema.replace("%", "%%")))
    source = place.source()
    run = new_begun(source)
    with caplog.at_level(logging.WARNING, "postdate.migrating"):
        while hide(source, run):
            pass
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"{LIVE} is not exchanged" in told
    assert why in told
    assert read(source, run) == ids(rows)
    assert not is_exchanged(place, run)


def test_a_table_in_use_is_exchanged_later(place: PostgresPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_LOCK_SECONDS", 0.1)
    rows = place.insert(hours(FAR + 2))
    source = place.source()
    run = new_begun(source)
    with closing(place.connect()) as connection:
        place.execute(connection, "BEGIN")
        assert place.due(connection, NEXT_YEAR - HOUR) == []  # a look without locks, in a transaction
        assert len(hide(source, run)) == 1
        assert not is_exchanged(place, run)
        place.execute(connection, "COMMIT")
    assert len(hide(source, run)) == 13
    assert is_exchanged(place, run)
    assert read(source, run) == ids(rows)


def test_a_table_of_which_much_would_have_to_stay_is_not_exchanged(place: PostgresPlace) -> None:
    rows = place.insert(hours(2 * FAR))
    source = place.source()
    run = replace(new_run(), cutoff=rows[FAR].due)
    source.begin(run)
    while hide(source, run):
        pass
    assert (read(source, run), is_exchanged(place, run)) == (ids(rows[FAR:]), False)


def test_a_run_that_is_prepared_hides_nothing_more(place: PostgresPlace) -> None:
    rows = place.insert(hours(FAR))
    source = place.source()
    run = new_begun(source)
    source.set_status(run, MigrationStatus.PREPARED, NEXT_YEAR)
    assert (list(hide(source, run)), place.ids()) == ([], set(ids(rows)))
