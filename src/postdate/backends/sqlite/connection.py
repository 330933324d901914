"""Opens the file: its identity, settings and migrations, fair waiting for the write lock, and errors.

After a file is replaced (a restored backup, ``mv``), SQLite would use the old log as the log of the new file, and
overwrite or damage the new file. So a note beside the file says to which file the log belongs, and a file is not opened
beside the log of another file. A file is identified by its inode number, which is unique while a process has the file
open. Source: ADR 0003.

There are numbered migrations of store and queues, of sagas, and of outboxes. One table marks the applied ones.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

from filelock import FileLock, Timeout
from typing_extensions import override

from postdate import errors
from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.migrations import (
    Step,
    find_missing_steps,
    migrations,
    missing_tables_error,
    newer_version_error,
    run_migrations,
)
from postdate.backends.sqlite.older_marks import drop_older_marks, shared_condition
from postdate.backends.sqlite.processes import claimants_folder
from postdate.clock import steady_seconds
from postdate.ports.backends import LibraryFacts
from postdate.runtime import forks

# --- paths ---------------------------------------------------------------------------------------------------------


def absolute_path(path: str | Path) -> Path:
    """Return the path of a file, which no later change of the working directory changes."""
    if str(path) == ":memory:":
        raise errors.ConfigurationError(
            "a database in memory cannot be shared by connections: use Memory, MemoryStore, MemoryTransport and the "
            "like, or the path of a file"
        )
    return Path(path).expanduser().resolve()


# --- errors of SQLite as those of Postdate -------------------------------------------------------------------------

_PRIMARY_CODE = 0xFF  # the mask that removes the extension of SQLite's error code
_STATEMENT_ERRORS = frozenset(
    {
        0,  # an error of the driver itself
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
    }
)
"""Codes of errors in the statement or its values.

All other codes are about SQLite itself: locked, out of memory, a failing disk, interrupted.
"""


def is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE


def translate(error: sqlite3.Error, path: Path) -> errors.PostdateError:
    text = str(error)
    if "no such table" in text or "no such column" in text:
        return errors.StoreNotSetUp(f"{path} lacks tables of Postdate ({text}); run `postdate setup`")
    return _error_of_code(_code(error), text, path)


def damaged_error(path: Path, text: str) -> errors.NotADatabase:
    return errors.NotADatabase(
        f"{path} is not a SQLite database or is damaged ({' '.join(text.split())}); it was not changed. Name "
        f"another file, replace it with a backup, or recover its readable rows: "
        f"sqlite3 '{path}' .recover | sqlite3 recovered.db"
    )


def _error_of_code(code: int, text: str, path: Path) -> errors.PostdateError:
    if code == sqlite3.SQLITE_FULL:
        return errors.StoreFull(
            f"{path}: the disk or the database is full ({text}); nothing was written; free some space"
        )
    if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}:
        return errors.StoreNotWritable(
            f"{path} may not be written ({text}); check the owner and mode of the file and folder"
        )
    if code == sqlite3.SQLITE_CANTOPEN:
        return errors.StoreNotWritable(
            f"{path} cannot be opened or created ({text}); check that the folder {path.parent} exists and is writable"
        )
    if code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
        return damaged_error(path, text)
    return (errors.StoreError if code in _STATEMENT_ERRORS else errors.StoreTroubled)(f"{path}: {text}")


@contextmanager
def translate_errors(path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error


# --- which file is at a path, and whose log is beside it -----------------------------------------------------------

Identity = tuple[int, int]
"""Device and inode number of a file."""

_LOCK: Final = "opening.lock"
_OPENING_SECONDS: Final = 10.0  # how long to wait for another process that opens the file
_NAME: Final = "log-of"
_PINNED: Final = "file-of-log"
"""A hard link to the file, made by earlier versions while it had a log. It would keep the disk space of a removed file.
"""


def identity_of(path: Path) -> Identity | None:
    """Return the identity of the file at ``path``; ``None``: there is no file. Raises `StoreUnreachable` if unknown."""
    try:
        status = os.stat(path)  # noqa: PTH116 - faster than Path.stat, and called for every transaction
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise errors.StoreUnreachable(f"cannot inspect {path}: {error}") from error
    return status.st_dev, status.st_ino


def log_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def has_leftover_log(path: Path) -> bool:
    """Return whether the log beside ``path`` belongs to a former file."""
    log_identity, note = identity_of(log_path(path)), _read_log_note(path)
    # If file and log were copied together, both have new inode numbers, and the log belongs to the file.
    return note is not None and note[1] == log_identity and note[0] != identity_of(path)


def check_no_leftover_log(path: Path) -> None:
    """Raise `StoreReplaced` if the log beside ``path`` belongs to a former file."""
    if not has_leftover_log(path):
        return
    name = log_path(path).name
    if identity_of(path) is None:
        raise errors.StoreReplaced(
            f"{path} is gone: it was removed or moved away while it was in use. Put it back; or, to start with an "
            f"empty file, stop every process that uses it and remove {name}"
        )
    raise errors.StoreReplaced(
        f"{path} was replaced while it was in use, and {name} belongs to the previous file: stop every process that "
        f"uses it. If {name} still exists then, a process was killed: move {name} next to the previous file if you "
        f"have it, or remove {name}"
    )


def opened_identity(path: Path, before: Identity | None) -> Identity | None:
    """Return the identity of the file that was just opened; ``before`` if it may have been replaced meanwhile."""
    after = identity_of(path)
    return after if before in {None, after} else before


def replaced_error(path: Path) -> errors.StoreReplaced:
    return errors.StoreReplaced(
        f"{path} was replaced, removed or moved away while this process had it open: stop every process that uses it, "
        f"put the right file there, and start them again"
    )


@contextmanager
def lock_for_opening(path: Path) -> Generator[None]:
    """Hold the lock under which a file is opened; on leaving, note to which file the log belongs.

    Raises `StoreUnreachable` if another process has had the lock for too long.
    """
    folder = claimants_folder(path)
    lock = FileLock(folder / _LOCK, thread_local=False, is_singleton=False)
    try:
        folder.mkdir(exist_ok=True)
        lock.acquire(timeout=_OPENING_SECONDS)
    except Timeout as error:
        raise errors.StoreUnreachable(
            f"{path}: another process has been opening it for {_OPENING_SECONDS:.0f} s"
        ) from error
    except OSError:  # the folder is not writable: opening the file for writing fails, too, with a better error
        yield
        return
    try:
        yield
        _write_log_note(path)
    finally:
        lock.release()


def remove_log_note(path: Path) -> None:
    """Remove the note if the log is gone. Call this after a file was closed. Never raises.

    An empty log of a file that was replaced is removed, too: its content is already in the former file.
    """
    folder = claimants_folder(path)
    # A process that opens the file now writes the note again, so nothing is lost if this removes it.
    with suppress(OSError, Timeout, errors.StoreUnreachable):
        if not folder.exists():
            return
        with FileLock(folder / _LOCK, timeout=0, thread_local=False, is_singleton=False):
            log = log_path(path)
            if identity_of(path) is not None and has_leftover_log(path) and not log.stat().st_size:
                # Remove the index of the log, too: a process that still has the former file open would share it with
                # processes that open the new file.
                path.with_name(path.name + "-shm").unlink(missing_ok=True)
                log.unlink()
            if identity_of(log) is None:
                _note_path(path).unlink(missing_ok=True)
                (folder / _PINNED).unlink(missing_ok=True)


def _write_log_note(path: Path) -> None:
    identity, log_identity = identity_of(path), identity_of(log_path(path))
    if identity is not None and log_identity is not None and _read_log_note(path) != (identity, log_identity):
        _note_path(path).write_text(" ".join(map(str, (*identity, *log_identity))), encoding="ascii")


def _read_log_note(path: Path) -> tuple[Identity, Identity] | None:
    try:
        device, number, log_device, log_number = map(int, _note_path(path).read_text(encoding="ascii").split())
    except (OSError, ValueError):  # there is no note, or it was written in part when the machine failed
        return None
    return (device, number), (log_device, log_number)


def _note_path(path: Path) -> Path:
    return claimants_folder(path) / _NAME


# --- files that were open when this process was forked ---------------------------------------------------------------


class _InheritedFiles(forks.ForkAware):
    """The files that were open when this process was forked, by any code of the parent.

    While such a descriptor is open, SQLite in this process assumes that it holds the locks of the parent. So a
    connection to the file would lock nothing, and its commits could be lost when another process considers itself the
    last user of the file.
    """

    def __init__(self) -> None:
        self._descriptors = dict[int, Identity]()

    @override
    def after_fork_in_child(self) -> None:
        self._descriptors = forks.open_descriptors()

    def check_not_inherited(self, path: Path) -> None:
        """Raise `StoreError` if the file at ``path`` is one of them."""
        if not self._descriptors or (identity := identity_of(path)) is None:
            return
        open_now = forks.open_descriptors()
        if any(each == identity and open_now.get(number) == each for number, each in self._descriptors.items()):
            raise errors.StoreError(
                f"{path} cannot be used in this process, because its parent had it open at the fork: in a "
                f"transaction, in a "
                f"connection of the application (sqlite3), or because it forked in C, unknown to Python (uWSGI: set "
                f"lazy-apps = true). Close it before the fork, or start this process without one (spawn, forkserver)"
            )


_inherited: Final = forks.register(_InheritedFiles())


# --- opening -------------------------------------------------------------------------------------------------------

LOCK_PATIENCE_SECONDS = 15.0
"""How long a writer waits for the lock before it raises `StoreUnreachable`."""

_RETRY_SECONDS = 0.0001
# A fair writer never keeps others waiting for a second. So after that, the waits are longer and cost less CPU.
_LONG_SECONDS, _SELDOM_SECONDS = 1.0, 0.01
_CACHE_KIB = 16_384
_READING_CACHE_KIB = 4_096
# A checkpoint blocks the writer. At 4,000 pages (16 MB) it is rare enough not to slow a drain, and the log is still
# small. Measured: docs/benchmarks.md.
_CHECKPOINT_PAGES = 4_000


_CHECKED_BYTES = 4 * 1024 * 1024  # a larger file is not checked for damage when it is opened


def connect(path: Path, *, synchronous: str = "full", read_only: bool = False) -> sqlite3.Connection:
    """Open the database file; unless ``read_only``, create it where it is missing.

    ``synchronous``: see :class:`postdate.SqliteStore`.
    """
    _inherited.check_not_inherited(path)
    check_no_leftover_log(path)
    with translate_errors(path):
        mode = "ro" if read_only else "rwc"
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=0,
            cached_statements=256,
        )
        with closing_on_error(connection):
            _configure(connection, synchronous, read_only=read_only)
    return connection


def _configure(connection: sqlite3.Connection, synchronous: str, *, read_only: bool) -> None:
    cache = _READING_CACHE_KIB if read_only else _CACHE_KIB
    statements = [f"PRAGMA cache_size = -{cache}", "PRAGMA temp_store = memory"]
    if not read_only:
        if execute_with_retry(connection, "PRAGMA page_count").fetchone() == (0,):
            # Only a file that is created with this setting can shrink later; on an existing file it would write.
            statements.append("PRAGMA auto_vacuum = incremental")
        statements += [
            "PRAGMA journal_mode = wal",
            # Debian's SQLite overwrites every freed page, which doubles the writes of a delivery. With 'fast' it
            # overwrites only pages that are written anyway.
            "PRAGMA secure_delete = fast",
            f"PRAGMA synchronous = {synchronous}",
            f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}",
        ]
    for statement in statements:
        execute_with_retry(connection, statement)


def lock_patience() -> float:
    return LOCK_PATIENCE_SECONDS


def execute_with_retry(
    connection: sqlite3.Connection, statement: str, patience: Callable[[], float] = lock_patience
) -> sqlite3.Cursor:
    """Execute a statement that needs a lock, and retry every 0.1 ms; return its cursor.

    SQLite's own waiting backs off to 100 ms and so starves processes beside a busy writer (measured: 13 instead of
    187,000 messages/s). Short equal waits give every process its turn.

    ``patience`` returns the seconds to wait. It is called at each try, as the value falls when the file is being
    closed. After that time it raises `StoreUnreachable`: this is an outage, and no message caused it.
    """
    started = steady_seconds()
    while True:
        try:
            return connection.execute(statement)
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            if (waited := steady_seconds() - started) > patience():
                raise errors.StoreUnreachable(
                    f"the database was locked for {waited:.0f} s: another process writes all the time, or is frozen "
                    f"while it writes; nothing was changed"
                ) from error
        # SQLite does not notify when the other process releases the lock, so poll.
        time.sleep(_RETRY_SECONDS if waited < _LONG_SECONDS else _SELDOM_SECONDS)  # noqa: TID251


def check_intact(connection: sqlite3.Connection, path: Path) -> None:
    """Check a file of up to 4 MB for damage, so that it is reported at opening and not when a message is read.

    SQLite itself notices a truncated file. Damage in a larger one is found when a row is read. Raises `NotADatabase`.
    """
    with translate_errors(path):
        sizes = [execute_with_retry(connection, f"PRAGMA {each}").fetchone()[0] for each in ("page_count", "page_size")]
        if sizes[0] * sizes[1] > _CHECKED_BYTES:
            return
        answer: str = execute_with_retry(connection, "PRAGMA quick_check(1)").fetchone()[0]
    if answer != "ok":
        raise damaged_error(path, answer)


def create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Apply the migrations that the file lacks; several processes may do so at once. Raises the errors of `missing`."""
    with translate_errors(path):
        if schema_version(connection, path) == newest_version() and not missing_objects(connection):
            return
        execute_with_retry(connection, "BEGIN IMMEDIATE")
        try:
            apply_migrations(connection.execute, steps("database"), str(path))
            _restore_indexes(connection, path)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `StoreNotSetUp` or `StoreFromNewerVersion` unless the file has the tables and indexes of this version."""
    with translate_errors(path):
        current, needed = schema_version(connection, path), newest_version()
        missing = missing_objects(connection) if current == needed else {}
    if current < needed:
        raise errors.StoreNotSetUp(
            f"{path} has schema version {current}, this version of Postdate needs {needed}; run `postdate setup`"
        )
    if missing:
        raise errors.StoreNotSetUp(
            f"{path} lacks {', '.join(missing)}; run `postdate setup`, which creates indexes again. Restore a missing "
            f"table with its rows from the backup"
        )


_CREATED: Final = re.compile(r"^CREATE (?:TABLE|(?:UNIQUE )?INDEX) (\w+)", re.MULTILINE)
_INDEX: Final = re.compile(r"^CREATE (?:UNIQUE )?INDEX ", re.MULTILINE)


def missing_objects(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the statements that create missing tables and indexes of the newest version, by their names."""
    names = {name for (name,) in execute_with_retry(connection, "SELECT name FROM sqlite_master")}
    return {name: statement for name, statement in _required_objects().items() if name not in names}


def _restore_indexes(connection: sqlite3.Connection, path: Path) -> None:
    """Create missing indexes again, in the open transaction. An empty table would hide that its rows are lost."""
    missing = missing_objects(connection)
    if tables := [name for name, statement in missing.items() if not _INDEX.search(statement)]:
        raise missing_tables_error(str(path), tables)
    for statement in missing.values():
        connection.execute(statement)


@cache
def _required_objects() -> dict[str, str]:
    required = steps("database")
    (first,) = (number for number, each in enumerate(required) if each.is_initial)
    statements = [statement for step in required[first:] for statement in step.statements]
    return {match[1]: each for each in statements if (match := _CREATED.search(each)) is not None}


def schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the number of the last migration applied, 0 without tables of Postdate. Raises `StoreFromNewerVersion`."""
    # Reads wait, too: while another process puts a new file into WAL mode, it is locked.
    table = execute_with_retry(connection, _TABLE_OF_MARKS).fetchone()
    if table is None:
        return 0
    newest = f"SELECT coalesce(max(version), 0) FROM postdate_migration {shared_condition(table[0])}"
    version: int = execute_with_retry(connection, newest).fetchone()[0]
    if version > newest_version():
        raise newer_version_error(str(path), version, newest_version())
    return version


# --- migrations ----------------------------------------------------------------------------------------------------

_CREATE_MARKS: Final = (
    "CREATE TABLE IF NOT EXISTS postdate_migration (version INTEGER NOT NULL, name TEXT NOT NULL, "
    "subject TEXT NOT NULL DEFAULT '', PRIMARY KEY (subject, version))"
)
_TABLE_OF_MARKS: Final = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = 'postdate_migration'"
_SUBJECTS: Final = {"database": "", "sagas": "saga", "outbox": "outbox"}


def apply_migrations(execute: Callable[..., sqlite3.Cursor], required: Sequence[Step], where: str) -> None:
    """Apply the missing migrations in the open transaction, with its ``execute``. Raises the errors of `missing`."""
    marks = drop_older_marks(execute)
    execute(_CREATE_MARKS)
    for mark in marks:
        execute("INSERT OR IGNORE INTO postdate_migration VALUES (?, ?, ?)", mark)
    run_migrations(
        required, execute("SELECT subject, version FROM postdate_migration").fetchall(), where, execute, mark_statement
    )


def steps(part: str) -> tuple[Step, ...]:
    """Return the migrations of a part of a file: ``database``, ``sagas`` or ``outbox``."""
    files, subject = migrations("postdate.backends.sqlite", part), _SUBJECTS[part]
    return tuple(
        Step(subject, each.version, each.name, tuple(statements_of(each.sql)), each.is_initial) for each in files
    )


def newest_version() -> int:
    return migrations("postdate.backends.sqlite")[-1].version


def library_facts() -> LibraryFacts:
    return LibraryFacts("sqlite", sqlite3.sqlite_version_info, newest_version())


def mark_statement(step: Step) -> str:
    return f"INSERT INTO postdate_migration VALUES ({step.version}, '{step.name}', '{step.subject}')"


def setup_script(part: str) -> str:
    """Return the SQL that creates a part in a file that has no table of it."""
    parts = [f"{_CREATE_MARKS};"]
    for step in find_missing_steps(steps(part), (), "a new file"):
        sql = "".join(step.statements).strip()
        parts.append(f"-- {step.version:04d} {step.name}\n{sql}\n{mark_statement(step)};")
    return "\n\n".join(parts) + "\n"


def statements_of(script: str) -> list[str]:
    """Split a script into statements: Python's `executescript` would commit the open transaction first."""
    statements: list[str] = []
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements
