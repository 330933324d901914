"""The barest SQL on SQLite: the same rows, in files of their own with the same durability."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from typing_extensions import override

from benchmarks.targets.target import BareRow, BenchmarkTarget, Inserter, Mover, Taker
from postdate.backends.sqlite.connection import connect

_TAKEN_AT_ONCE: Final = 1_000
_WAITS_MILLISECONDS: Final = 60_000
_COLUMNS: Final = "message_id TEXT, destination TEXT, headers TEXT, body BLOB"
_INSERT: Final = "INSERT INTO pending (message_id, due, headers, body, destination) VALUES (?, ?, ?, ?, 'bench')"
_IN_QUEUE: Final = "FROM queue_message WHERE queue_id = (SELECT queue_id FROM queue WHERE name = ?)"
_FIRST: Final = f"{_IN_QUEUE} ORDER BY seq LIMIT {_TAKEN_AT_ONCE}"
_TAKE: Final = f"DELETE FROM queue_message WHERE seq IN (SELECT seq {_IN_QUEUE} ORDER BY seq LIMIT ?)"


class SqliteTarget(BenchmarkTarget):
    """A file of the run."""

    moved_at_once = (1_000, 5_000)
    _consumer: sqlite3.Connection | None = None

    @override
    def __exit__(self, *error: object) -> None:
        if self._consumer is not None:
            self._consumer.close()

    @property
    def path(self) -> Path:
        return Path(self.address.partition(":///")[2])

    def connect(self, path: Path) -> closing[sqlite3.Connection]:
        return closing(self.connection(path))

    def connection(self, path: Path) -> sqlite3.Connection:
        """Return an open connection with the durability of the run; it waits up to a minute for other writers."""
        connection = connect(path, synchronous=self.run.settings.get("synchronous", "full"))
        connection.execute(f"PRAGMA busy_timeout = {_WAITS_MILLISECONDS}")
        return connection

    @override
    def facts(self) -> Mapping[str, str]:
        return {"version": sqlite3.sqlite_version}

    @override
    def settle(self) -> None:
        with self.connect(self.path) as connection:
            connection.execute("PRAGMA wal_checkpoint(truncate)")

    @override
    def arrived(self, queue: str) -> Iterable[str]:
        with self.connect(self.path) as connection:
            return [message_id for (message_id,) in connection.execute(f"SELECT message_id {_IN_QUEUE}", [queue])]

    @override
    def is_empty(self, queue: str) -> bool:
        with self.connect(self.path) as connection:
            return connection.execute(f"SELECT 1 {_IN_QUEUE} LIMIT 1", [queue]).fetchone() is None

    @override
    def take(self, queue: str, limit: int) -> list[str]:
        """Take up to ``limit`` messages off a queue and return their ids."""
        if self._consumer is None:
            self._consumer = self.connection(self.path)
        self._consumer.execute("BEGIN IMMEDIATE")
        rows = self._consumer.execute(f"{_TAKE} RETURNING message_id, content", (queue, limit)).fetchall()
        self._consumer.executemany("DELETE FROM content WHERE seq = ?", [(content,) for _, content in rows])
        self._consumer.execute("COMMIT")
        return [message_id for message_id, _ in rows]

    @contextmanager
    def _bare(self, rows: Iterable[BareRow]) -> Generator[sqlite3.Connection]:
        path = self.path.with_name("limit.db")
        with self.connect(path) as connection:
            connection.execute(f"CREATE TABLE pending (seq INTEGER PRIMARY KEY, due INTEGER, {_COLUMNS})")
            connection.execute("CREATE INDEX pending_due ON pending (due)")
            connection.execute(f"CREATE TABLE moved (seq INTEGER PRIMARY KEY, {_COLUMNS})")
            _insert(connection, rows)
            connection.execute("PRAGMA wal_checkpoint(truncate)")
            yield connection
        for file in path.parent.glob(path.name + "*"):
            file.unlink()

    @contextmanager
    @override
    def mover(self, rows: Iterable[BareRow], at_once: int) -> Generator[Mover]:
        """Move rows from table to table: no ids to keep unique, no records, no expiry, one destination."""
        with self._bare(rows) as connection:
            yield lambda before: _move(connection, before, at_once)

    @contextmanager
    @override
    def inserter(self) -> Generator[Inserter]:
        with self._bare([]) as connection:
            yield lambda rows: partial(_insert, connection, rows)

    @contextmanager
    @override
    def taker(self, queue: str) -> Generator[Taker]:
        """Take messages off a queue of the transport: none is parsed, held or recorded."""
        with self.connect(self.path) as connection:

            def take() -> int:
                connection.execute("BEGIN IMMEDIATE")
                content = f"DELETE FROM content WHERE seq IN (SELECT content {_FIRST}) RETURNING headers, body"
                taken = connection.execute(content, [queue]).fetchall()
                connection.execute(f"DELETE FROM queue_message WHERE seq IN (SELECT seq {_FIRST})", [queue])
                connection.execute("COMMIT")
                return len(taken)

            yield take


def _insert(connection: sqlite3.Connection, rows: Iterable[BareRow]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(_INSERT, rows)
    connection.execute("COMMIT")


def _move(connection: sqlite3.Connection, before: int, at_once: int) -> int:
    connection.execute("BEGIN IMMEDIATE")
    last = connection.execute("SELECT due FROM pending ORDER BY due LIMIT 1 OFFSET ?", [at_once - 1]).fetchone()
    until = [min(before - 1, last[0]) if last else before - 1]
    moved = connection.execute(
        "INSERT INTO moved (message_id, destination, headers, body) "
        "SELECT message_id, destination, headers, body FROM pending WHERE due <= ? ORDER BY due",
        until,
    ).rowcount
    connection.execute("DELETE FROM pending WHERE due <= ?", until)
    connection.execute("COMMIT")
    return moved
