"""Numbered migrations: of the tables that all stores of a schema share, and of the one of each store."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from postdate.backends.rowlocks.names import RowLockNames
from postdate.persistence.migrations import Step, bare, filled_in, migrations, run


def steps(room: str, table: str, replacements: Mapping[str, str]) -> tuple[Step, ...]:
    """Return the migrations of a schema and one of its stores, in order, statement by statement.

    ``replacements``: SQL for ``{schema}``, ``{table}`` and ``{name}``.
    """
    return tuple(
        Step(subject, each.version, each.name, _statements(each.sql, replacements))
        for subject, part in (("", "database"), (table, "store"))
        for each in migrations(room, part)
    )


def _statements(sql: str, replacements: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(filled_in(each, replacements).strip() for each in bare(sql).removesuffix(";").split(";\n"))


def steps_of(names: RowLockNames) -> tuple[Step, ...]:
    return steps(names.spelling.room, names.table, names.in_migrations)


def part_steps(names: RowLockNames, part: str) -> tuple[Step, ...]:
    """Return the migrations of a part (``sagas``, ``outbox``) with a table of its own, whose name marks them."""
    return tuple(
        Step(f"postdate_{names.table}", each.version, each.name, _statements(each.sql, names.in_migrations))
        for each in migrations(names.spelling.room, part)
    )


def marks(session: Any, names: RowLockNames) -> Sequence[tuple[Any, ...]]:
    """Return subject and version of each migration applied."""
    return session.rows(f"SELECT subject, version FROM {names.of('migration')}", {})


def mark_done(names: RowLockNames, step: Step, insert: str = "INSERT") -> str:
    literal = names.spelling.literal
    return (
        f"{insert} INTO {names.plain('postdate_migration')} (subject, version, name) "
        f"VALUES ({literal(step.subject)}, {step.version}, {literal(step.name)})"
    )


def migrate(session: Any, names: RowLockNames, wanted: Sequence[Step], where: str, insert: str = "INSERT") -> None:
    """Apply the missing migrations of ``wanted``; the caller keeps others out. Raises `StoreFromNewerVersion`."""
    run(wanted, marks(session, names), where, session.change, lambda step: mark_done(names, step, insert))


def rights_needed(names: RowLockNames, where: str) -> str:
    """Return a comment for the administrator's script: the rights of a user who may not create tables."""
    rights = (
        f"What a user needs that runs Postdate and may not create tables:\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {where} TO the_user;\n"
    )
    return textwrap.indent(rights, "-- ", lambda line: True)
