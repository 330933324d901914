"""What SQLite does without us: the barest SQL for the same rows, in files of its own with the same durability."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from postdate.backends.sqlite.connection import connect
from postdate.bench.workload import BODY, encoded_headers_of, id_of
from postdate.errors import PostdateError

_MOVE_BATCHES = (1_000, 5_000)
_RECEIVED_AT_ONCE = 1_000
_RUN = "0" * 12
_FIRST = f"FROM queue_message WHERE queue_id = ? ORDER BY seq LIMIT {_RECEIVED_AT_ONCE}"


def sqlite_version() -> str:
    """Return the version of the library."""
    return sqlite3.sqlite_version


def sqlite_move_limit(folder: Path, n: int, synchronous: str) -> float:
    """Return messages a second of moving ``n`` rows from a bare table to another, best of several batch sizes.

    The same rows, file settings and durability as the store; no ids to keep unique, no records, no expiry, no other
    destinations, nobody to wake.
    """
    return max(_sqlite_move(folder / f"limit-{batch}.db", n, batch, synchronous) for batch in _MOVE_BATCHES)


def _sqlite_move(path: Path, n: int, batch: int, synchronous: str) -> float:
    connection = connect(path, synchronous=synchronous)
    try:
        _bare_tables(connection, n)
        started = time.perf_counter()
        while _move_one_batch(connection, batch):
            pass
        return n / (time.perf_counter() - started)
    finally:
        connection.close()
        for file in path.parent.glob(path.name + "*"):
            file.unlink()


def _bare_tables(connection: sqlite3.Connection, n: int) -> None:
    columns = "message_id TEXT, destination TEXT, headers TEXT, body BLOB"
    connection.execute(f"CREATE TABLE pending (seq INTEGER PRIMARY KEY, due INTEGER, {columns})")
    connection.execute("CREATE INDEX pending_due ON pending (due)")
    connection.execute(f"CREATE TABLE moved (seq INTEGER PRIMARY KEY, {columns})")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO pending (due, message_id, destination, headers, body) VALUES (?, ?, 'bench', ?, ?)",
        (_row(number) for number in range(n)),
    )
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(truncate)")


def _row(number: int) -> tuple[int, str, str, bytes]:
    message_id = id_of(number, _RUN)
    return number, message_id, encoded_headers_of(message_id), BODY


def _move_one_batch(connection: sqlite3.Connection, batch: int) -> int:
    connection.execute("BEGIN IMMEDIATE")
    last = connection.execute("SELECT due FROM pending ORDER BY due LIMIT 1 OFFSET ?", (batch - 1,)).fetchone()
    until = last[0] if last else 2**62
    moved = connection.execute(
        "INSERT INTO moved (message_id, destination, headers, body) "
        "SELECT message_id, destination, headers, body FROM pending WHERE due <= ? ORDER BY due",
        (until,),
    ).rowcount
    connection.execute("DELETE FROM pending WHERE due <= ?", (until,))
    connection.execute("COMMIT")
    return moved


def sqlite_receive_limit(path: Path, queue: str, n: int, synchronous: str) -> float:
    """Return messages a second of taking ``n`` messages off a queue by bare SQL, 1,000 a commit.

    From the tables of the transport, which must hold them. Nothing is parsed, nobody holds a message meanwhile, no
    failures are counted and nothing is recorded.

    Raises:
        PostdateError: there were not so many.
    """
    connection = connect(path, synchronous=synchronous)
    try:
        queue_id = connection.execute("SELECT queue_id FROM queue WHERE name = ?", [queue]).fetchone()
        started, taken = time.perf_counter(), 0
        while batch := _receive_one_batch(connection, queue_id):
            taken += batch
        seconds = time.perf_counter() - started
    finally:
        connection.close()
    if taken != n:
        raise PostdateError(f"the limit took {taken:,} messages off the queue, not {n:,}: somebody else is in it")
    return n / seconds


def _receive_one_batch(connection: sqlite3.Connection, queue_id: tuple[int]) -> int:
    connection.execute("BEGIN IMMEDIATE")
    received = connection.execute(
        f"DELETE FROM content WHERE seq IN (SELECT content {_FIRST}) RETURNING headers, body", queue_id
    ).fetchall()
    connection.execute(f"DELETE FROM queue_message WHERE seq IN (SELECT seq {_FIRST})", queue_id)
    connection.execute("COMMIT")
    return len(received)


def sqlite_insert_limit(folder: Path, n: int, batch: int, synchronous: str) -> float:
    """Return rows a second of inserting into a bare table with an index on the due time."""
    path = folder / "limit-insert.db"
    connection = connect(path, synchronous=synchronous)
    try:
        _bare_tables(connection, 0)
        seconds = 0.0
        for first in range(0, n, batch):
            rows = [_row(number) for number in range(first, min(first + batch, n))]
            started = time.perf_counter()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO pending (due, message_id, destination, headers, body) VALUES (?, ?, 'bench', ?, ?)", rows
            )
            connection.execute("COMMIT")
            seconds += time.perf_counter() - started
        return n / seconds
    finally:
        connection.close()
        for file in path.parent.glob(path.name + "*"):
            file.unlink()
