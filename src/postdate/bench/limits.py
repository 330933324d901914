"""Physical limits, measured in the same run: the barest SQL for the same rows, and the barest sleep."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import anyio

from postdate.bench.result import Lateness, lateness
from postdate.bench.workload import BODY
from postdate.embedded.connection import connect
from postdate.messages import Headers, encode_headers, new_message_id

_MOVE_BATCHES = (1_000, 5_000)


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
    headers = encode_headers({Headers.MESSAGE_ID: new_message_id(), "Bench.Filler": "y" * 140})
    columns = "message_id TEXT, destination TEXT, headers TEXT, body BLOB"
    connection.execute(f"CREATE TABLE pending (seq INTEGER PRIMARY KEY, due INTEGER, {columns})")
    connection.execute("CREATE INDEX pending_due ON pending (due)")
    connection.execute(f"CREATE TABLE moved (seq INTEGER PRIMARY KEY, {columns})")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO pending (due, message_id, destination, headers, body) VALUES (?, ?, 'bench', ?, ?)",
        ((due, new_message_id(), headers, BODY) for due in range(n)),
    )
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(truncate)")


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


def sqlite_insert_limit(folder: Path, n: int, batch: int, synchronous: str) -> float:
    """Return rows a second of inserting into a bare table with an index on the due time."""
    path = folder / "limit-insert.db"
    connection = connect(path, synchronous=synchronous)
    try:
        _bare_tables(connection, 0)
        headers = encode_headers({Headers.MESSAGE_ID: new_message_id(), "Bench.Filler": "y" * 140})
        rows = [(due, new_message_id(), headers, BODY) for due in range(n)]
        started = time.perf_counter()
        for start in range(0, n, batch):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO pending (due, message_id, destination, headers, body) VALUES (?, ?, 'bench', ?, ?)",
                rows[start : start + batch],
            )
            connection.execute("COMMIT")
        return n / (time.perf_counter() - started)
    finally:
        connection.close()
        for file in path.parent.glob(path.name + "*"):
            file.unlink()


def sleep_floor(rate: int, seconds: float) -> Lateness:
    """Return how late a bare loop is that only sleeps until each due time: of a thread, the best the system can do."""
    late: list[float] = []
    for due in _due_times(rate, seconds):
        time.sleep(max(due - time.time(), 0))
        late.append(time.time() - due)
    return lateness(late)


async def event_loop_floor(rate: int, seconds: float) -> Lateness:
    """Return the same of an event loop, which is what an asynchronous service is made of."""
    late: list[float] = []
    for due in _due_times(rate, seconds):
        await anyio.sleep(max(due - time.time(), 0))
        late.append(time.time() - due)
    return lateness(late)


def _due_times(rate: int, seconds: float) -> Iterator[float]:
    first = time.time() + 0.1
    return (first + number / rate for number in range(int(rate * seconds)))
