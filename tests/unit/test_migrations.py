"""Numbered migrations: which are missing, in what order they are applied, and what a newer version's marks mean."""

import pytest

from postdate.backends.mariadb.schema import MariaDbNames
from postdate.backends.postgres.names import part_steps
from postdate.backends.postgres.names import steps as postgres_steps
from postdate.backends.sql.migrations import Step, missing, run, standing
from postdate.backends.sql.row_locks.names import RowLockNames, steps_of
from postdate.backends.sqlserver.schema import SqlServerNames
from postdate.errors import StoreFromNewerVersion

STEPS = [Step("", 1, "one", ("a", "b")), Step("", 2, "two", ("c",)), Step("t", 1, "one", ("d",))]


def mark(step: Step) -> str:
    return f"mark {step.subject} {step.version} {step.name}"


def test_only_what_was_not_done_is_done() -> None:
    assert missing(STEPS, [], "here") == STEPS
    assert missing(STEPS, [("", 1), ("other", 7)], "here") == STEPS[1:]
    assert missing(STEPS, [("", 1), ("", 2), ("t", 1)], "here") == []


def test_each_step_is_applied_in_order_with_its_mark_behind_it() -> None:
    executed: list[str] = []
    run(STEPS, [("", 2)], "here", executed.append, mark)
    assert executed == ["a", "b", "mark  1 one", "d", "mark t 1 one"]


def test_marks_of_a_newer_version_are_refused_and_nothing_is_done() -> None:
    executed: list[str] = []
    said = r"here was set up by a newer Postdate \(version 2 of its tables, this one knows 1\): upgrade Postdate here"
    with pytest.raises(StoreFromNewerVersion, match=said):
        run(STEPS, [("t", 2)], "here", executed.append, mark)
    assert executed == []


def test_what_lags_behind_is_what_is_said() -> None:
    assert standing(STEPS, []) == (0, 2)
    assert standing(STEPS, [("", 1), ("", 2)]) == (0, 1)
    assert standing(STEPS, [("", 1), ("", 2), ("t", 1)]) == (2, 2)


@pytest.mark.parametrize("kind", [MariaDbNames, SqlServerNames])
def test_names_may_have_anything_in_them(kind: type[RowLockNames]) -> None:
    hostile, plain = (kind(name, name) for name in ("x -- ;\n{table} y", "t"))
    assert [len(step.statements) for step in steps_of(hostile)] == [len(step.statements) for step in steps_of(plain)]
    for step, simple in zip(steps_of(hostile), steps_of(plain), strict=True):
        for statement, expected in zip(step.statements, simple.statements, strict=True):
            for name in ("{schema}", "{name}", "{name_in_text}"):
                statement = statement.replace(hostile.in_migrations[name], plain.in_migrations[name])  # noqa: PLW2901
            assert statement == expected
            assert " -- " not in expected


def test_parts_of_a_schema_are_marked_by_the_names_of_their_tables() -> None:
    assert {step.subject for step in postgres_steps("s", "orders")} == {"", "orders"}
    assert {step.subject for step in part_steps("s", "sagas", "saga")} == {"saga"}
