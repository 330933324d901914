"""Numbered migrations of a database server's tables: those that all stores share, and the one of each store."""

from __future__ import annotations

from collections.abc import Mapping

from postdate.persistence.migrations import Step, bare, filled_in, migrations


def steps(room: str, table: str, replacements: Mapping[str, str]) -> tuple[Step, ...]:
    """Return the migrations of a database and of one of its stores, in order, statement by statement.

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
