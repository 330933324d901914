"""Creating the tables by numbered migrations: those that all stores of a schema share, and the one of each store."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from postdate.backends.rowlocks.names import RowLockNames
from postdate.persistence.migrations import Step, bare, filled_in, migrations, run


def steps(room: str, table: str, replacements: Mapping[str, str]) -> tuple[Step, ...]:
    """Return the migrations of a schema and of one of its stores, in order, statement by statement.

    Args:
        room: package of the backend.
        table: of the store.
        replacements: what stands for ``{schema}``, ``{table}`` and ``{name}``.
    """
    return tuple(
        Step(subject, each.version, each.name, _statements(each.sql, replacements))
        for subject, part in (("", "database"), (table, "store"))
        for each in migrations(room, part)
    )


def _statements(sql: str, replacements: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(filled_in(each, replacements).strip() for each in bare(sql).removesuffix(";").split(";\n"))


def steps_of(names: RowLockNames) -> tuple[Step, ...]:
    """Return the migrations of the store that ``names`` are of."""
    return steps(names.spelling.room, names.table, names.in_migrations)


def part_steps(names: RowLockNames, part: str) -> tuple[Step, ...]:
    """Return the migrations of a part of a schema that has a table of its own, by whose name they are marked.

    Args:
        names: of the schema, with the name of the table, but for what all of ours begin with.
        part: ``sagas`` or ``outbox``.
    """
    return tuple(
        Step(f"postdate_{names.table}", each.version, each.name, _statements(each.sql, names.in_migrations))
        for each in migrations(names.spelling.room, part)
    )


def marks(session: Any, names: RowLockNames) -> Sequence[tuple[Any, ...]]:
    """Return subject and version of each migration that was done."""
    return session.rows(f"SELECT subject, version FROM {names.of('migration')}", {})


def mark_done(names: RowLockNames, step: Step, insert: str = "INSERT") -> str:
    """Return the statement that says that a step was done."""
    literal = names.spelling.literal
    return (
        f"{insert} INTO {names.plain('postdate_migration')} (subject, version, name) "
        f"VALUES ({literal(step.subject)}, {step.version}, {literal(step.name)})"
    )


def migrate(session: Any, names: RowLockNames, wanted: Sequence[Step], where: str, insert: str = "INSERT") -> None:
    """Apply what is missing of ``wanted``; nobody else sets up meanwhile.

    Raises:
        StoreFromNewerVersion: a newer Postdate was here.
    """
    run(wanted, marks(session, names), where, session.change, lambda step: mark_done(names, step, insert))


def rights_needed(names: RowLockNames, where: str) -> str:
    """Return the comment in the administrator's script on a user without the right to create tables."""
    rights = (
        f"What a user needs that runs Postdate and may not create tables:\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {where} TO the_user;\n"
    )
    return textwrap.indent(rights, "-- ", lambda line: True)
