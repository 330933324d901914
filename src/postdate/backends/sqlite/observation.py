"""Answers to an operator's questions about a file. No message is changed. See :class:`postdate.ports.Observer`."""

from __future__ import annotations

import platform
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.questions import header_text
from postdate.backends.sqlite import rows as sqlite_rows
from postdate.backends.sqlite.bulk import stream_positions
from postdate.backends.sqlite.connection import check_schema, connect, newest_version, translate_errors
from postdate.backends.sqlite.file import SqliteFile
from postdate.backends.sqlite.processes import claimants_folder, is_gone
from postdate.backends.sqlite.unreadable import read_readable_rows
from postdate.clock import from_microseconds
from postdate.errors import QueueNotFound
from postdate.messages import MARKERS, decode_headers
from postdate.ports import DeliveredMessage, FileFacts, Observer, PendingState, Process, QueuedMessage

OLDEST_SQLITE: Final = (3, 35, 0)
"""The first version of SQLite with RETURNING, which claims need."""

_DESTINATION_SAMPLE: Final = 10_000

_STANDING: Final = f"""
    SELECT {sqlite_rows.PENDING_COLUMNS}, attempt_at, pid FROM delayed_message LEFT JOIN claimant USING (claimant)"""
_QUEUED: Final = f"""
    SELECT {sqlite_rows.QUEUED_COLUMNS}, name, pid
    FROM queue_message JOIN queue USING (queue_id) LEFT JOIN claimant USING (claimant)"""
_HAS_HEADER: Final = "instr((SELECT headers FROM content AS c WHERE c.seq = content), ?)"

_LAST_DELIVERED: Final = """
    SELECT at, due FROM record WHERE kind = 2 AND seq > (SELECT max(seq) FROM record) - 100000
    ORDER BY seq DESC LIMIT ?"""
_NEXT_DESTINATIONS: Final = """
    SELECT destination, count(*) FROM (
        SELECT destination FROM delayed_message WHERE unreadable IS NULL ORDER BY attempt_at LIMIT ?)
    GROUP BY 1 ORDER BY 1"""

_ZONES: Final = f"""
    SELECT headers FROM delayed_message AS d JOIN content AS c ON c.seq = d.content
    WHERE d.destination = '{MARKERS}' AND json_valid(headers) ORDER BY d.message_id"""


class FileObserver(Observer):
    """Answers an operator's questions about one file."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    @override
    async def pending_state_of(self, message_id: str) -> PendingState | None:
        sql = (
            f"{_STANDING} WHERE unreadable IS NULL AND seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = ?)"
        )
        standings = await read_readable_rows(self._file, sqlite_rows.PENDING, sql, (message_id,), _decode_pending_state)
        return standings[0] if standings else None

    @override
    async def retries_of(self, message_id: str) -> Sequence[PendingState]:
        sql = f"{_STANDING} WHERE unreadable IS NULL AND {_HAS_HEADER} AND message_id <> ? ORDER BY seq"
        return await read_readable_rows(
            self._file, sqlite_rows.PENDING, sql, (header_text(message_id), message_id), _decode_pending_state
        )

    @override
    async def latest_deliveries(self, limit: int) -> Sequence[DeliveredMessage]:
        rows = await self._file.read(lambda c: c.execute(_LAST_DELIVERED, (limit,)).fetchall())
        return [DeliveredMessage(from_microseconds(at), sqlite_rows.time_of(due)) for at, due in rows]

    @override
    async def next_destinations(self, messages: int) -> Mapping[str, int]:
        return await self._file.read(lambda c: dict(c.execute(_NEXT_DESTINATIONS, (messages,)).fetchall()))

    @override
    async def processes(self) -> Sequence[Process]:
        return await self._file.read(lambda c: processes(c, self._file.path, excluded_claimant=self._file.claimant))

    @override
    async def queue_lengths(self) -> Mapping[str, int]:
        return await self._file.read(queue_lengths)

    @override
    async def browse(self, queue: str, limit: int, after: int = 0) -> Sequence[QueuedMessage]:
        sql = f"{_QUEUED} WHERE queue_id = ? AND seq > ? ORDER BY seq LIMIT ?"
        return await read_readable_rows(
            self._file, sqlite_rows.QUEUED, sql, (await self._queue_id(queue), after, limit), _decode_queued
        )

    @override
    async def last_number(self, queue: str) -> int:
        values = (await self._queue_id(queue),)
        sql = "SELECT coalesce(max(seq), 0) FROM queue_message WHERE queue_id = ?"
        return int((await self._file.read(lambda connection: connection.execute(sql, values).fetchone()))[0])

    async def _queue_id(self, queue: str) -> int:
        row = await self._file.read(
            lambda c: c.execute("SELECT queue_id FROM queue WHERE name = ?", (queue,)).fetchone()
        )
        if row is None:
            raise QueueNotFound.of(queue, database=str(self._file.path))
        return int(row[0])

    @override
    async def find_in_queues(self, message_id: str) -> Sequence[QueuedMessage]:
        sql = f"{_QUEUED} WHERE message_id = ? OR {_HAS_HEADER} ORDER BY seq"
        return await read_readable_rows(
            self._file, sqlite_rows.QUEUED, sql, (message_id, header_text(message_id)), _decode_queued
        )


def _decode_pending_state(row: sqlite_rows.Row) -> PendingState:
    *message, attempt_at, pid = row
    return PendingState(sqlite_rows.message_of(message), sqlite_rows.time_of(attempt_at), pid)


def _decode_queued(row: sqlite_rows.Row) -> QueuedMessage:
    *message, queue, pid = row
    envelope, failures, unanswered = sqlite_rows.envelope_of(message, queue)
    return QueuedMessage(queue, envelope, failures + unanswered, pid, row[0])


def queue_lengths(connection: sqlite3.Connection) -> dict[str, int]:
    return dict(
        connection.execute(
            "SELECT name, (SELECT count(*) FROM queue_message AS m WHERE m.queue_id = q.queue_id) "
            "FROM queue AS q ORDER BY name"
        ).fetchall()
    )


def processes(connection: sqlite3.Connection, path: Path, *, excluded_claimant: int = 0) -> list[Process]:
    """Return the processes that use the file, without the claimant ``excluded_claimant``."""
    topics: defaultdict[int, set[str]] = defaultdict(set)
    for claimant, topic in connection.execute("SELECT claimant, topic FROM listener"):
        topics[claimant].add(topic)
    rows = connection.execute(
        "SELECT claimant, pid, started_at FROM claimant WHERE claimant <> ? ORDER BY claimant", (excluded_claimant,)
    ).fetchall()
    prefix = sqlite_rows.queue_topic("")
    return [
        Process(
            pid=pid,
            host=platform.node(),
            started_at=from_microseconds(started_at),
            alive=_is_alive(path, claimant),
            delivers=sqlite_rows.DUE in topics[claimant],
            receives=tuple(
                sorted(topic.removeprefix(prefix) for topic in topics[claimant] if topic.startswith(prefix))
            ),
        )
        for claimant, pid, started_at in rows
    ]


def _is_alive(path: Path, claimant: int) -> bool:
    try:
        return not is_gone(claimants_folder(path), claimant)
    except OSError:  # the lock file belongs to another user, whose process removes it when it ends
        return True


# --- for a diagnosis ---------------------------------------------------------------------------------------------

_PENDING: Final = "FROM delayed_message WHERE unreadable IS NULL"
_UNREADABLE: Final = """
    SELECT (SELECT count(*) FROM delayed_message WHERE unreadable IS NOT NULL)
        + (SELECT count(*) FROM queue_message WHERE unreadable IS NOT NULL)"""


def read_file_facts(path: Path, now_microseconds: int) -> FileFacts:
    connection = connect(path, read_only=True)
    try:
        check_schema(connection, path)
        with translate_errors(path):
            connection.execute("BEGIN")
            return FileFacts(
                schema_version=newest_version(),
                journal_mode=_read_value(connection, "PRAGMA journal_mode"),
                queues=queue_lengths(connection),
                processes=processes(connection, path),
                pending=_read_value(connection, f"SELECT count(*) {_PENDING}"),
                oldest=sqlite_rows.time_of(_read_value(connection, f"SELECT min(due) {_PENDING}")),
                overdue=_read_value(connection, f"SELECT count(*) {_PENDING} AND due < ?", now_microseconds),
                destinations=[name for name, _ in connection.execute(_NEXT_DESTINATIONS, (_DESTINATION_SAMPLE,))],
                positions=stream_positions(connection),
                zones=[decode_headers(text) for (text,) in connection.execute(_ZONES)],
                unreadable=_read_value(connection, _UNREADABLE),
            )
    finally:
        connection.close()


def _read_value(connection: sqlite3.Connection, sql: str, *values: object) -> Any:
    return connection.execute(sql, values).fetchone()[0]


def sqlite_version() -> tuple[int, ...]:
    return sqlite3.sqlite_version_info
