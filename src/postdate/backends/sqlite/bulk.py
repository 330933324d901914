"""Jobs on whole tables of the file: scans, the stream of records, pruning. Source: ADR 0011, 0032, 0063."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.retention import AgeCondition
from postdate.backends.sqlite.connection import translate
from postdate.backends.sqlite.file import OnFile, SqliteFile
from postdate.backends.sqlite.rows import Transaction, display_text, is_undecodable, record
from postdate.clock import from_microseconds, to_microseconds
from postdate.ports import (
    Recording,
    RecordKind,
    RecordStreamStore,
    Scan,
    ScanFilter,
    ScanPart,
    StreamableStore,
    StreamPosition,
    scanning,
)


def read_scan(file: SqliteFile, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
    """Yield the rows of a share in pages; see :meth:`postdate.ports.ScannableStore.scan`.

    A text that is no UTF-8 does not end an audit: in records and queues it is decoded as far as possible. In a pending
    message it is an error, because such a message is copied to other stores and must not be changed.

    Raises:
        StoreError: a text of a pending message is no UTF-8. After a claim or a list has marked the row, it is left out.
    """
    scanning.check_scan(scan.row_kind, scan.columns)
    source = _SCAN_RELATIONS[scan.row_kind]
    columns = ", ".join(_ELSEWHERE.get(column, f"t.{column}") for column in scan.columns) or "1"
    conditions = {"t.seq >= ?": part.first, "t.seq < ?": part.end, **_conditions(source, scan.row_filter)}
    sql = f"SELECT {columns} FROM {source.relation} WHERE {' AND '.join(conditions)} ORDER BY t.seq LIMIT -1 OFFSET ?"
    connection = file.access.snapshot()
    try:
        row_count, cursor = 0, connection.execute(sql, (*conditions.values(), 0))
        while True:
            try:
                rows = cursor.fetchmany(page)
            except sqlite3.Error as error:
                if not is_undecodable(error) or scan.row_kind == "pending" or connection.text_factory is display_text:
                    raise translate(error, file.path) from error
                connection.text_factory = display_text  # only now, as it costs a call for each text
                cursor = connection.execute(sql, (*conditions.values(), row_count))
                continue
            if not rows:
                return
            yield rows
            row_count += len(rows)
    finally:
        connection.close()


def _conditions(source: _ScanRelation, where: ScanFilter) -> dict[str, Any]:
    """Return conditions to be joined with AND: SQL, and the value of its one parameter."""
    conditions = dict[str, Any]()
    if where.message_ids is not None:
        conditions[source.ids_condition] = _json_list(where.message_ids)
    if where.destinations is not None:
        conditions[f"{source.destination} IN (SELECT value FROM json_each(?))"] = _json_list(where.destinations)
    if where.due_from is not None:
        conditions["t.due >= ?"] = to_microseconds(where.due_from)
    if where.due_to is not None:
        conditions["t.due < ?"] = to_microseconds(where.due_to)
    return conditions


def _json_list(texts: Sequence[str]) -> str:
    """Return texts as one value. Texts with NUL are left out: SQLite ends JSON at a NUL, and no stored text has one."""
    return json.dumps([text for text in texts if "\0" not in text])


_OF_IDS: Final = "message_id IN (SELECT value FROM json_each(?))"


@dataclass(frozen=True, slots=True)
class _ScanRelation:
    """A relation that can be scanned by ``t.seq``.

    Args:
        table: the table whose numbers are ``t.seq``.
        relation: the FROM clause.
        ids_condition: the condition that an id is in a list, written for an index if there is one.
        destination: the column with the destination.
    """

    table: str
    relation: str
    ids_condition: str = f"t.{_OF_IDS}"
    destination: str = "t.destination"


_SCAN_RELATIONS: Final = {
    "pending": _ScanRelation(
        "delayed_message",
        "delayed_message AS t JOIN content AS c ON c.seq = t.content AND t.unreadable IS NULL",
        ids_condition=f"t.seq IN (SELECT seq FROM record WHERE kind = 1 AND {_OF_IDS})",
    ),
    "records": _ScanRelation("record", "record AS t"),
    "queued": _ScanRelation(
        "queue_message",
        "queue_message AS t JOIN queue AS q USING (queue_id)",
        destination="q.name",
    ),
}
_ELSEWHERE: Final = {
    "headers": "c.headers",
    "body": "c.body",
    "number_of_failures": "t.failures",
    "number": "t.seq",
    "queue": "q.name",
}
"""SQL of the columns that are not a column of that name in ``t``."""


class SqliteRecordStream(RecordStreamStore):
    """A stream of records; see :class:`postdate.ports.scanning.RecordStreamStore`. A missing file is not created.

    Args:
        path: of the file.
        synchronous: the value of the other adapters on the file in this process.
        recording: the value of the other adapters on the file in this process.
    """

    def __init__(self, path: str | Path, *, synchronous: str = "full", recording: Recording = Recording.ALL) -> None:
        self._file = SqliteFile.open(path, synchronous=synchronous, recording=recording, create=False)
        self._safe_end = 0
        self._closed = False

    @property
    @override
    def identity(self) -> str:
        """The path of the file: a copy elsewhere is another store."""
        return hashlib.sha256(f"sqlite {self._file.path}".encode()).hexdigest()[:24]

    @property
    @override
    def location(self) -> str:
        return f"SQLite {self._file.path}"

    @override
    def next_number(self) -> int:
        self._check_exists()
        return self._file.read_blocking(
            lambda connection: int(connection.execute("SELECT coalesce(max(seq), 0) + 1 FROM record").fetchone()[0])
        )

    @override
    def safe_end(self) -> int:
        self._safe_end = max(self._safe_end, self.next_number())
        return self._safe_end

    @override
    def read_records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        self._check_exists()
        return read_scan(self._file, Scan("records", tuple(columns)), ScanPart(first, end), page)

    def _check_exists(self) -> None:
        self._file.access.setup()  # A file that no process has open has no log, and only a writer may create one.

    @override
    def close(self) -> None:
        was_closed, self._closed = self._closed, True
        if not was_closed:
            self._file.close()


_IS_KEYED: Final = f"r.message_id GLOB '*~{'[0-9]' * 8}'"
_LAST_OF_KEY: Final = "substr(r.message_id, 1, length(r.message_id) - 8) || '99999999'"
_AGE: Final = AgeCondition(
    *("record", "delayed_message", "seq", ":before", _IS_KEYED, _LAST_OF_KEY),
    position="SELECT min(number) FROM stream_position",
)
# The last record stays, because new records are numbered after it: numbers of a lake would be used again.
_IS_OLD: Final = f"""
    r.seq >= :first AND r.seq < :end AND r.seq < (SELECT max(seq) FROM record) AND {_AGE.condition()}"""
_IS_ANY_OLD: Final = f"SELECT EXISTS (SELECT 1 FROM record AS r WHERE {_IS_OLD})"
_PRUNE_OLD: Final = f"DELETE FROM record AS r WHERE {_IS_OLD} RETURNING kind"
_MARKERS: Final = "SELECT seq, due, detail FROM record WHERE message_id = ? AND kind BETWEEN 8 AND 11 AND kind = 11"
_POSITIONS: Final = "SELECT name, number, at FROM stream_position ORDER BY name"
_SET_POSITION: Final = "INSERT OR REPLACE INTO stream_position (name, number, at) VALUES (?, ?, ?)"


def stream_positions(connection: sqlite3.Connection) -> list[StreamPosition]:
    return [StreamPosition(name, number, from_microseconds(at)) for name, number, at in connection.execute(_POSITIONS)]


class BulkOnFile(OnFile, StreamableStore):
    @override
    def scan_parts(self, row_kind: str, parts: int) -> Sequence[ScanPart]:
        scanning.check_scan(row_kind)
        bounds = f"SELECT coalesce(min(seq), 0), coalesce(max(seq), -1) + 1 FROM {_SCAN_RELATIONS[row_kind].table}"
        first, end = self.file.read_blocking(lambda c: c.execute(bounds).fetchone())
        return scanning.split_into_shares(first, end, parts)

    @override
    def scan(self, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        return read_scan(self.file, scan, part, page)

    @property
    @override
    def records_in_commit_order(self) -> bool:
        return True

    @override
    def tables_of_stores(self) -> Sequence[str]:
        return ()

    @property
    @override
    def prune_share_width(self) -> int:
        """Return a small number, because other processes wait for each transaction."""
        return 2_000

    @override
    def prune_before(self, part: ScanPart, before: datetime, now: datetime) -> int:
        values = {"first": part.first, "end": part.end, "before": to_microseconds(before)}
        if not self.file.read_blocking(lambda connection: connection.execute(_IS_ANY_OLD, values).fetchone()[0]):
            return 0  # Return without a write transaction, for which other processes would wait.

        def prune(tx: Transaction) -> int:
            kinds = [kind for (kind,) in tx.execute(_PRUNE_OLD, values)]
            if kinds:
                markers = tx.execute(_MARKERS, (scanning.PRUNED_ID,)).fetchall()
                marker = scanning.PrunedCounts.of((from_microseconds(due), detail) for _, due, detail in markers).plus(
                    before, kinds
                )
                fields = (scanning.PRUNED_ID, to_microseconds(marker.before or before), None)
                record(tx, RecordKind.PRUNED, fields, to_microseconds(now), marker.detail)
                tx.executemany("DELETE FROM record WHERE seq = ?", [(number,) for number, *_ in markers])
            return len(kinds)

        return self.file.write_blocking(prune)

    @override
    def stream_positions(self) -> Sequence[StreamPosition]:
        return self.file.read_blocking(stream_positions)

    @override
    def set_stream_position(self, name: str, number: int, now: datetime) -> None:
        self.file.write_blocking(lambda tx: tx.execute(_SET_POSITION, (name, number, to_microseconds(now))))

    @override
    def remove_stream_position(self, name: str) -> bool:
        delete = "DELETE FROM stream_position WHERE name = ?"
        return self.file.write_blocking(lambda tx: tx.execute(delete, (name,)).rowcount == 1)
