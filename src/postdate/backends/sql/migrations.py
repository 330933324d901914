"""Numbered SQL: each part of a database has one initial migration, and the migrations after it.

A database without marks runs the initial migration, which has the number of the last migration that it replaced. A
database of an earlier version runs the migrations in the folder ``older`` instead. These folders are removed after
0.2.0; only :func:`migrations` reads them. Source: ADR 46.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from postdate.errors import StoreFromNewerVersion, StoreNotSetUp

log = logging.getLogger("postdate.stores")


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file; its name is part of the file's name.

    ``is_initial``: it creates all tables in an empty database. Any other migration changes the tables of the version
    before.
    """

    version: int
    name: str
    sql: str
    is_initial: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One migration of a database's shared tables, or of a part with its own tables.

    ``subject`` is empty for the shared tables; otherwise it is the name of a store's table, ``sagas`` or ``outbox``.
    ``statements`` are single ones, or several in one text if the driver accepts that. ``is_initial``: see
    :class:`Migration`.
    """

    subject: str
    version: int
    name: str
    statements: tuple[str, ...]
    is_initial: bool


def setup_command(table: str) -> str:
    """Return the command that creates the table of a store, with the endpoint's name if the table's name has it."""
    if (endpoint := table.removesuffix(".timeouts")) in {table, "postdate"}:
        return "run `postdate setup`"
    return f"run `POSTDATE_ENDPOINT__NAME={shlex.quote(endpoint)} postdate setup`, or name it with endpoint.name"


@cache
def migrations(package: str, part: str = "database") -> tuple[Migration, ...]:
    """Return the migrations of a part of a backend, in order: those of older databases, the initial one, later ones.

    ``package`` is the backend's package. ``part`` is a folder of its ``migrations``: ``database`` for the tables that
    all stores and queues share, ``store``, ``sagas``, ``outbox``.
    """
    folder = resources.files(package) / "migrations" / part
    initial, *later = _files(folder)
    older = _files(folder / "older") if (folder / "older").is_dir() else []
    return tuple(
        Migration(int(file.name[:4]), file.name[5:-4].replace("_", " "), file.read_text("utf-8"), file is initial)
        for file in (*older, initial, *later)
    )


def _files(folder: Traversable) -> list[Traversable]:
    return sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)


def strip_comments(sql: str) -> str:
    """Return SQL without its comments."""
    lines = (line.partition(" -- ")[0].rstrip() for line in sql.splitlines() if not line.startswith("--"))
    return "\n".join(lines).strip()


def fill_placeholders(sql: str, replacements: Mapping[str, str]) -> str:
    """Return SQL with values for placeholders such as ``{schema}`` and ``{table}``.

    SQL must be split into statements before, because a name may contain anything, even a semicolon or dashes.
    """
    return re.sub(r"\{\w+\}", lambda match: replacements[match[0]], sql)


def find_missing_steps(required: Iterable[Step], marks: Iterable[Sequence[object]], where: str) -> list[Step]:
    """Return the ``required`` steps that are not in ``marks`` (subject and version of the existing marks).

    Raises:
        StoreFromNewerVersion: there are marks that this Postdate does not know.
        StoreNotSetUp: the tables were created by a version that this Postdate cannot migrate.
    """
    steps, versions = list(required), _versions(marks)
    newest = {step.subject: step.version for step in steps}
    for subject, version in sorted(versions.items()):
        if version > newest.get(subject, version):
            raise newer_version_error(where, version, newest[subject])
        if version < (oldest := oldest_versions(steps).get(subject, version)):
            raise StoreNotSetUp(f"{where} has version {version} of its tables; {too_old_advice(oldest)}")
    missing_steps = list[Step]()
    for step in steps:
        version = versions.get(step.subject, 0)
        if version == 0 if step.is_initial else 0 < version < step.version:
            missing_steps.append(step)
            versions[step.subject] = step.version
    return missing_steps


def _versions(marks: Iterable[Sequence[object]]) -> dict[str, int]:
    """Return the newest version of each subject."""
    versions = dict[str, int]()
    for subject, version in marks:
        versions[str(subject)] = max(int(str(version)), versions.get(str(subject), 0))
    return versions


def oldest_versions(required: Iterable[Step]) -> dict[str, int]:
    """Return the oldest version that can be migrated, for each subject that has older versions."""
    oldest = dict[str, int]()
    for step in required:
        oldest.setdefault(step.subject, step.version if step.is_initial else step.version - 1)
    return {subject: version for subject, version in oldest.items() if version > 1}


_LAST_WITH_ALL_MIGRATIONS: Final = "505b2f32"


def too_old_advice(oldest: int) -> str:
    """Return advice about tables that are older than ``oldest``, the oldest version that can be migrated."""
    return (
        f"this Postdate upgrades version {oldest} and later: run `postdate setup` of its commit "
        f"{_LAST_WITH_ALL_MIGRATIONS} there first, then that of this one. Nothing was changed."
    )


def missing_tables_error(where: str, tables: Sequence[str]) -> StoreNotSetUp:
    """Return the error of a database without tables whose migrations were applied, as after an incomplete restore."""
    names = ", ".join(tables)
    return StoreNotSetUp(
        f"{where} lacks tables whose migrations were applied there: {names}. Restore them with their rows from the "
        f"backup; if nothing in this place is needed any more, drop all of it and run `postdate setup`"
    )


def newer_version_error(where: str, version: int, newest: int) -> StoreFromNewerVersion:
    return StoreFromNewerVersion(
        f"{where} was set up by a newer Postdate (version {version} of its tables, this one knows {newest}): upgrade "
        f"Postdate here. Nothing was changed."
    )


def run_migrations(
    required: Iterable[Step],
    applied_marks: Iterable[Sequence[object]],
    where: str,
    execute: Callable[[str], object],
    mark_statement: Callable[[Step], str],
) -> None:
    """Apply the missing steps, each with its mark; the caller locks out other processes.

    ``mark_statement`` returns the statement that records a step. The errors of :func:`find_missing_steps` come before
    any change. Migrated tables of an earlier version are logged.
    """
    marks = list(applied_marks)
    steps = find_missing_steps(required, marks, where)
    for step in steps:
        for statement in (*step.statements, mark_statement(step)):
            execute(statement)
    versions = _versions(marks)
    for subject, version in {step.subject: step.version for step in steps}.items():
        if subject in versions:
            tables = f"the table {subject!r}" if subject else "the shared tables"
            text = "%s was set up by an earlier Postdate: %s went from version %d to %d, with all rows"
            log.warning(text, where, tables, versions[subject], version)


def current_and_newest_version(required: Iterable[Step], marks: Iterable[Sequence[object]]) -> tuple[int, int]:
    """Return the current version and the newest one: of the shared tables, or of the part that lags most."""
    current, newest = _versions(marks), {step.subject: step.version for step in required}
    return min(
        ((current.get(subject, 0), version) for subject, version in newest.items()), key=lambda pair: pair[0] - pair[1]
    )
