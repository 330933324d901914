"""Numbered migrations: which are missing, in what order they are applied, and what marks of other versions mean."""

from importlib import resources

import pytest

from postdate.backends.mariadb.schema import MariaDbNames
from postdate.backends.postgres.names import part_steps
from postdate.backends.postgres.names import steps as postgres_steps
from postdate.backends.sql.migrations import (
    Step,
    current_and_newest_version,
    find_missing_steps,
    migrations,
    run_migrations,
)
from postdate.backends.sql.row_locks.names import RowLockNames, steps_of
from postdate.backends.sqlserver.schema import SqlServerNames
from postdate.errors import StoreFromNewerVersion, StoreNotSetUp

OLDER = [Step("", 4, "four", ("a",), is_initial=False), Step("", 5, "five", ("b", "c"), is_initial=False)]
INITIAL = [Step("", 5, "initial", ("d",), is_initial=True)]
LATER = [Step("", 6, "six", ("e",), is_initial=False)]
OF_STORE = [Step("t", 1, "initial", ("f",), is_initial=True)]
STEPS = [*OLDER, *INITIAL, *LATER, *OF_STORE]
PARTS = [
    (backend, part)
    for backend in ("sqlite", "postgres", "mariadb", "sqlserver")
    for part in ("database", "store", "sagas", "outbox")
    if (backend, part) != ("sqlite", "store")
]


def mark(step: Step) -> str:
    return f"mark {step.subject} {step.version} {step.name}"


def test_a_database_without_marks_runs_the_initial_migration_and_later_ones() -> None:
    assert find_missing_steps(STEPS, [], "here") == [*INITIAL, *LATER, *OF_STORE]
    assert find_missing_steps(STEPS, [("t", 1), ("other", 7)], "here") == [*INITIAL, *LATER]


@pytest.mark.parametrize("version", [3, 4, 5, 6])
def test_a_database_of_an_earlier_version_runs_the_migrations_behind_its_last_mark(version: int) -> None:
    marks = [("", each) for each in range(1, version + 1)]
    expected = [*OLDER, *LATER][version - 3 :]
    assert find_missing_steps(STEPS, [*marks, ("t", 1)], "here") == expected
    assert find_missing_steps(STEPS, marks, "here") == [*expected, *OF_STORE]


def test_a_database_that_ran_the_initial_migration_needs_only_later_ones() -> None:
    assert find_missing_steps(STEPS, [("", 5), ("t", 1)], "here") == LATER


@pytest.mark.parametrize(("steps", "oldest"), [(STEPS, 3), ([*INITIAL, *LATER], 5)], ids=["older", "without older"])
def test_a_database_that_is_too_old_is_refused_and_nothing_is_done(steps: list[Step], oldest: int) -> None:
    executed: list[str] = []
    said = (
        rf"here has version 2 of its tables; this Postdate upgrades version {oldest} and later: run `postdate setup` "
        r"of its commit 505b2f32 there first, then that of this one\. Nothing was changed\."
    )
    with pytest.raises(StoreNotSetUp, match=said):
        run_migrations(steps, [("", 1), ("", 2), ("t", 1)], "here", executed.append, mark)
    assert executed == []


def test_each_step_is_applied_in_order_with_its_mark_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    executed: list[str] = []
    run_migrations(STEPS, [("", 3)], "here", executed.append, mark)
    said = "here was set up by an earlier Postdate: the shared tables went from version 3 to 6, with all rows"
    assert [record.message for record in caplog.records] == [said]
    assert executed == ["a", "mark  4 four", "b", "c", "mark  5 five", "e", "mark  6 six", "f", "mark t 1 initial"]


def test_marks_of_a_newer_version_are_refused_and_nothing_is_done() -> None:
    executed: list[str] = []
    said = r"here was set up by a newer Postdate \(version 2 of its tables, this one knows 1\): upgrade Postdate here"
    with pytest.raises(StoreFromNewerVersion, match=said):
        run_migrations(STEPS, [("t", 2)], "here", executed.append, mark)
    assert executed == []


def test_what_lags_behind_is_what_is_said() -> None:
    assert current_and_newest_version(STEPS, []) == (0, 6)
    assert current_and_newest_version(STEPS, [("", 5), ("", 6)]) == (0, 1)
    assert current_and_newest_version(STEPS, [("", 3), ("t", 1)]) == (3, 6)
    assert current_and_newest_version(STEPS, [("", 5), ("", 6), ("t", 1)]) == (6, 6)


@pytest.mark.parametrize(("backend", "part"), PARTS)
def test_files_of_a_part_are_numbered_without_gaps(backend: str, part: str) -> None:
    """The last one in ``older`` has the number of the initial one, as a database of that version lacks nothing."""
    room = f"postdate.backends.{backend}"
    steps = migrations(room, part)
    (initial,) = (step for step in steps if step.is_initial)
    position = steps.index(initial)
    older, later = [step.version for step in steps[:position]], [step.version for step in steps[position + 1 :]]
    assert initial.name == "initial"
    assert older == list(range(initial.version - len(older) + 1, initial.version + 1))
    assert later == list(range(initial.version + 1, initial.version + len(later) + 1))
    folder = resources.files(room) / "migrations" / part
    files = [file.name for place in (folder, folder / "older") if place.is_dir() for file in place.iterdir()]
    assert len([name for name in files if name.endswith(".sql")]) == len(steps)


@pytest.mark.parametrize("kind", [MariaDbNames, SqlServerNames])
def test_names_may_have_anything_in_them(kind: type[RowLockNames]) -> None:
    hostile, plain = (kind(name, name) for name in ("x -- ;\n{table} y", "t"))
    assert [len(step.statements) for step in steps_of(hostile)] == [len(step.statements) for step in steps_of(plain)]
    for step, simple in zip(steps_of(hostile), steps_of(plain), strict=True):
        for statement, expected in zip(step.statements, simple.statements, strict=True):
            for name in ("{schema}", "{name}", "{name_in_text}"):
                statement = statement.replace(hostile.migration_replacements[name], plain.migration_replacements[name])  # noqa: PLW2901
            assert statement == expected
            assert " -- " not in expected


def test_parts_of_a_schema_are_marked_by_the_names_of_their_tables() -> None:
    assert {step.subject for step in postgres_steps("s", "orders")} == {"", "orders"}
    assert {step.subject for step in part_steps("s", "sagas", "saga")} == {"saga"}
