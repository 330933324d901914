"""Opening the file, its settings, its schema, and fair turns at writing."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from postdate.backends.sqlite.errors import damaged, is_busy, translated
from postdate.backends.sqlite.identity import refuse_leftover
from postdate.backends.sqlite.setup import bring_up_to_date, newest_version, steps, version_of
from postdate.errors import StoreNotSetUp, StoreUnreachable
from postdate.persistence.migrations import from_newer

LOCK_PATIENCE_SECONDS = 15.0
"""How long a writer waits for its turn before it raises `StoreUnreachable`."""

_RETRY_SECONDS = 0.0001
# No fair writer keeps others waiting for a second: from then on seldom tries cost less.
_LONG_SECONDS, _SELDOM_SECONDS = 1.0, 0.01
_CACHE_KIB = 16_384
_READING_CACHE_KIB = 4_096
# One checkpoint takes the writer's time; at 4,000 pages (16 MB) it comes seldom enough not to slow a drain and the
# log is still small. Measured: docs/benchmarks.md.
_CHECKPOINT_PAGES = 4_000


_LOOKED_THROUGH_BYTES = 4 * 1024 * 1024


def connect(path: Path, *, synchronous: str = "full", read_only: bool = False) -> sqlite3.Connection:
    """Open the database file; unless ``read_only``, create it where it is missing.

    ``synchronous``: see :class:`postdate.SqliteStore`.
    """
    refuse_leftover(path)
    with translated(path):
        mode = "ro" if read_only else "rwc"
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=0,
            cached_statements=256,
        )
        try:
            _configure(connection, synchronous, read_only=read_only)
        except BaseException:
            connection.close()
            raise
    return connection


def _configure(connection: sqlite3.Connection, synchronous: str, *, read_only: bool) -> None:
    cache = _READING_CACHE_KIB if read_only else _CACHE_KIB
    statements = [f"PRAGMA cache_size = -{cache}", "PRAGMA temp_store = memory"]
    if not read_only:
        if patiently(connection, "PRAGMA page_count").fetchone() == (0,):
            # Only a file created so can shrink later; on an existing one this would write.
            statements.append("PRAGMA auto_vacuum = incremental")
        statements += [
            "PRAGMA journal_mode = wal",
            # Debian's SQLite overwrites every freed page, which doubles what a delivery writes; 'fast' overwrites what
            # is written anyway.
            "PRAGMA secure_delete = fast",
            f"PRAGMA synchronous = {synchronous}",
            f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}",
        ]
    for statement in statements:
        patiently(connection, statement)


def lock_patience() -> float:
    return LOCK_PATIENCE_SECONDS


def patiently(
    connection: sqlite3.Connection, statement: str, patience: Callable[[], float] = lock_patience
) -> sqlite3.Cursor:
    """Execute a statement that needs a lock, trying again every 0.1 ms; return its cursor.

    SQLite's own waiting backs off to 100 ms and so starves processes beside a busy writer
    (facts: 13 instead of 187,000 messages/s); short even waits give every process its turn.

    ``patience`` returns the seconds to wait; it is called at each try, as they fall when the file is being closed. Then
    `StoreUnreachable`: an outage, for no message is to blame.
    """
    started = time.monotonic()
    while True:
        try:
            return connection.execute(statement)
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            waited = time.monotonic() - started
            if waited > patience():
                raise StoreUnreachable(
                    f"the database was locked for {waited:.0f} s: another process writes all the time, or is frozen "
                    f"while it writes; nothing was changed"
                ) from error
        # Nothing tells when the other process releases the lock.
        time.sleep(_RETRY_SECONDS if waited < _LONG_SECONDS else _SELDOM_SECONDS)  # noqa: TID251


def check_intact(connection: sqlite3.Connection, path: Path) -> None:
    """Check a file of up to 4 MB for damage, which is reported at opening instead of when a message meets it.

    SQLite itself notices a truncated file. Damage in a larger one is found when the row is read. Raises `NotADatabase`.
    """
    with translated(path):
        sizes = [patiently(connection, f"PRAGMA {each}").fetchone()[0] for each in ("page_count", "page_size")]
        if sizes[0] * sizes[1] > _LOOKED_THROUGH_BYTES:
            return
        said: str = patiently(connection, "PRAGMA quick_check(1)").fetchone()[0]
    if said != "ok":
        raise damaged(path, said)


def create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Apply the migrations that the file lacks; several processes may do so at once. Raises `StoreFromNewerVersion`."""
    with translated(path):
        if schema_version(connection, path) == newest_version():
            return
        patiently(connection, "BEGIN IMMEDIATE")
        try:
            bring_up_to_date(connection.execute, steps("database"), str(path))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `StoreNotSetUp` or `StoreFromNewerVersion` unless the file has the tables of this version."""
    with translated(path):
        current = schema_version(connection, path)
    if current < newest_version():
        needed = newest_version()
        raise StoreNotSetUp(
            f"{path} has schema version {current}, this version of Postdate needs {needed}; run `postdate setup`"
        )


def schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the number of the last migration applied, 0 without tables of Postdate. Raises `StoreFromNewerVersion`."""
    # Reads wait, too: while another process puts a new file into WAL mode, it is locked.
    version = version_of(partial(patiently, connection))
    if version > newest_version():
        raise from_newer(str(path), version, newest_version())
    return version
