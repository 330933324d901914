"""Numbered SQL: the same numbers and names in all dialects with queues, and in all without."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from postdate.errors import StoreFromNewerVersion


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step of 1, 2, 3 … without gaps; its name is in that of the file."""

    version: int
    name: str
    sql: str


@dataclass(frozen=True, slots=True)
class Step:
    """One migration of a database's shared tables, or of a part with its own tables.

    ``subject`` is empty for the shared tables, else the name of a store's table, ``sagas``, ``outbox``. ``statements``
    are single ones, or several in one text where the driver takes that.
    """

    subject: str
    version: int
    name: str
    statements: tuple[str, ...]


def setup_command(table: str) -> str:
    """Return the command that creates the table of a store, with the endpoint's name if the table's shows it."""
    if (endpoint := table.removesuffix(".timeouts")) in {table, "postdate"}:
        return "run `postdate setup`"
    return f"run `POSTDATE_ENDPOINT__NAME={shlex.quote(endpoint)} postdate setup`, or name it with endpoint.name"


@cache
def migrations(room: str, part: str = "database") -> tuple[Migration, ...]:
    """Return the migrations of a part of a backend, in order.

    ``room`` is the backend's package, ``part`` a folder of its ``migrations``: ``database`` for the tables that all
    stores and queues share, ``store``, ``sagas``, ``outbox``.
    """
    folder = resources.files(room) / "migrations" / part
    return tuple(
        Migration(int(file[:4]), file[5:-4].replace("_", " "), (folder / file).read_text(encoding="utf-8"))
        for file in sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    )


def bare(sql: str) -> str:
    """Return SQL without its comments."""
    lines = (line.partition(" -- ")[0].rstrip() for line in sql.splitlines() if not line.startswith("--"))
    return "\n".join(lines).strip()


def filled_in(sql: str, replacements: Mapping[str, str]) -> str:
    """Return SQL with values for ``{schema}``, ``{table}`` and the like.

    SQL must be split into statements before: a name may contain anything, even a semicolon or dashes.
    """
    return re.sub(r"\{\w+\}", lambda found: replacements[found[0]], sql)


def missing(wanted: Iterable[Step], done: Iterable[Sequence[object]], where: str) -> list[Step]:
    """Return the ``wanted`` steps that are not ``done`` (subject and version of the existing marks).

    Raises:
        StoreFromNewerVersion: there are marks that this Postdate does not know.
    """
    known, marks = list(wanted), {(str(subject), int(str(version))) for subject, version in done}
    newest = {step.subject: step.version for step in known}
    for subject, version in sorted(marks):
        if version > newest.get(subject, version):
            raise from_newer(where, version, newest[subject])
    return [step for step in known if (step.subject, step.version) not in marks]


def from_newer(where: str, version: int, newest: int) -> StoreFromNewerVersion:
    return StoreFromNewerVersion(
        f"{where} was set up by a newer Postdate (version {version} of its tables, this one knows {newest}): upgrade "
        f"Postdate here. Nothing was changed."
    )


def run(
    wanted: Iterable[Step],
    done: Iterable[Sequence[object]],
    where: str,
    execute: Callable[[str], object],
    mark: Callable[[Step], str],
) -> None:
    """Apply the missing steps, each with its mark; the caller locks out other processes.

    ``mark`` returns the statement that records a step. The error of :func:`missing` comes before any change.
    """
    for step in missing(wanted, done, where):
        for statement in (*step.statements, mark(step)):
            execute(statement)


def standing(wanted: Iterable[Step], done: Iterable[Sequence[object]]) -> tuple[int, int]:
    """Return the current version and the newest one: of the shared tables, or of the part that lags most."""
    there, newest = dict[str, int](), {step.subject: step.version for step in wanted}
    for subject, version in done:
        there[str(subject)] = max(int(str(version)), there.get(str(subject), 0))
    return min(
        ((there.get(subject, 0), version) for subject, version in newest.items()), key=lambda pair: pair[0] - pair[1]
    )
