"""Numbered SQL: the same numbers and names in all dialects with queues, and in all without.

Applied in order, each together with its mark, by :func:`run`, for every database.
"""

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
    """One numbered step.

    Args:
        version: 1, 2, 3 … without gaps.
        name: what it does, from the file name.
        sql: its statements.
    """

    version: int
    name: str
    sql: str


@dataclass(frozen=True, slots=True)
class Step:
    """One migration of what a database's stores and queues share, or of a part of it that has tables of its own.

    Args:
        subject: empty for what is shared, else what the part is called in the marks: the name of a store's table,
            ``sagas``, ``outbox``.
        version: number.
        name: what it does.
        statements: one by one, or several in one text where the driver takes that.
    """

    subject: str
    version: int
    name: str
    statements: tuple[str, ...]


def setup_command(table: str) -> str:
    """Return the command that creates the table of a store, the endpoint it belongs to included where that is known."""
    endpoint = table.removesuffix(".timeouts")
    if endpoint in {table, "postdate"}:
        return "run `postdate setup`"
    return f"run `POSTDATE_ENDPOINT__NAME={shlex.quote(endpoint)} postdate setup`, or name it with endpoint.name"


@cache
def migrations(room: str, part: str = "database") -> tuple[Migration, ...]:
    """Return the migrations of a part of a backend, in order.

    Args:
        room: package of the backend, which has a folder ``migrations``.
        part: name of a folder in that: ``database`` for what all stores and queues of a database share, ``store``,
            ``sagas``, ``outbox``.
    """
    folder = resources.files(room) / "migrations" / part
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return tuple(
        Migration(int(file[:4]), file[5:-4].replace("_", " "), (folder / file).read_text(encoding="utf-8"))
        for file in files
    )


def bare(sql: str) -> str:
    """Return SQL without its comments."""
    lines = (line.partition(" -- ")[0].rstrip() for line in sql.splitlines() if not line.startswith("--"))
    return "\n".join(lines).strip()


def filled_in(sql: str, replacements: Mapping[str, str]) -> str:
    """Return SQL with what stands for ``{schema}``, ``{table}`` and the like.

    It is split before, where it is: a name may have anything in it, a semicolon or dashes too.
    """
    return re.sub(r"\{\w+\}", lambda found: replacements[found[0]], sql)


def missing(wanted: Iterable[Step], done: Iterable[Sequence[object]], where: str) -> list[Step]:
    """Return the steps to be done.

    Args:
        wanted: what this Postdate knows, in order.
        done: subject and version of the marks that are there.
        where: the tables are, for texts.

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
    """Return the error for tables of a newer version than this Postdate knows."""
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
    """Apply the steps that are missing, each with its mark; one process at a time, in a transaction where there is one.

    Args:
        wanted: see :func:`missing`.
        done: likewise.
        where: likewise.
        execute: runs a statement.
        mark: returns the statement that says that a step was done.

    Raises:
        StoreFromNewerVersion: see :func:`missing`; nothing was executed.
    """
    for step in missing(wanted, done, where):
        for statement in (*step.statements, mark(step)):
            execute(statement)


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
