"""Numbered migrations of a database server's tables: those that all stores share, and the one of each store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from postdate.errors import StoreFromNewerVersion
from postdate.migrations import Migration, migrations


@dataclass(frozen=True, slots=True)
class Step:
    """One migration of what stores share, or of the table of one store.

    Args:
        subject: empty for what is shared, else the name of the table.
        version: number.
        statements: what it does and, last, the mark that it was done.
    """

    subject: str
    version: int
    statements: tuple[str, ...]


def steps(
    dialect: str, table: str, replacements: Mapping[str, str], mark: Callable[[str, Migration], str]
) -> tuple[Step, ...]:
    """Return the migrations of ``dialect`` and of ``{dialect}_store``, in order.

    Args:
        dialect: name of the folder of migrations.
        table: of the store.
        replacements: what stands for ``{schema}``, ``{table}`` and ``{name}``.
        mark: returns the statement that says of a subject that a migration was done.
    """
    return tuple(
        Step(subject, migration.version, (*_statements(migration.sql, replacements), mark(subject, migration)))
        for subject, folder in (("", dialect), (table, f"{dialect}_store"))
        for migration in migrations(folder)
    )


def _statements(sql: str, replacements: Mapping[str, str]) -> list[str]:
    """Split first, fill in then: a name may have anything in it, a semicolon or dashes too."""
    lines = [line.partition(" -- ")[0].rstrip() for line in sql.splitlines() if not line.startswith("--")]
    bare = "\n".join(lines).strip().removesuffix(";")
    return [
        re.sub(r"\{\w+\}", lambda found: replacements[found[0]], statement).strip() for statement in bare.split(";\n")
    ]


def missing(wanted: Iterable[Step], done: Iterable[Sequence[object]], where: str) -> list[Step]:
    """Return the steps to be done.

    Args:
        wanted: what this Postdate knows.
        done: subject and version of the marks that are there.
        where: the tables are, for texts.

    Raises:
        StoreFromNewerVersion: there are marks that this Postdate does not know.
    """
    known, marks = list(wanted), {(str(subject), int(str(version))) for subject, version in done}
    newest = {step.subject: step.version for step in known}
    for subject, version in sorted(marks):
        if version > newest.get(subject, version):
            raise StoreFromNewerVersion(
                f"{where} was set up by a newer Postdate (version {version} of its tables, this one knows "
                f"{newest[subject]}); upgrade Postdate here"
            )
    return [step for step in known if (step.subject, step.version) not in marks]


def standing(wanted: Iterable[Step], done: Iterable[Sequence[object]]) -> tuple[int, int]:
    """Return the version that is there and the newest one: of what is shared, or of the table where that lags behind.

    Args:
        wanted: what this Postdate knows.
        done: subject and version of the marks that are there.
    """
    there, newest = dict[str, int](), dict[str, int]()
    for subject, version in done:
        there[str(subject)] = max(int(str(version)), there.get(str(subject), 0))
    for step in wanted:
        newest[step.subject] = step.version
    return min(
        ((there.get(subject, 0), version) for subject, version in newest.items()), key=lambda pair: pair[0] - pair[1]
    )
