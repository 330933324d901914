"""Work of jobs on whole tables of the file: scans, the stream of records, pruning, restoring. Source: ADR 0011."""

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

from postdate.backends.sql.retention import Aging
from postdate.backends.sqlite.connection import translate
from postdate.backends.sqlite.file import OnFile, SqliteFile
from postdate.backends.sqlite.rows import Transaction, is_undecodable, record, shown
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import StoreNotSetUp
from postdate.ports import Recording, RecordKind, RecordStreamStore, Scan, ScanFilter, ScanPart
from postdate.ports.scanning import ARCHIVED, PRUNED_ID, ArchivableStore, Pruned, StoredRecord, check_scanned, shares


def read_scan(file: SqliteFile, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
    """See :meth:`postdate.ports.ScannableStore.scan`.

    A text that is no UTF-8 does not end an audit: in records and queues it is decoded as far as possible. In a pending
    message it is an error, as such a message is copied to other stores and must not be changed.

    Raises:
        StoreError: a text of a pending message is no UTF-8. After a claim or a list has marked the row, it is left out.
    """
    check_scanned(scan.what, scan.columns)
    source = _SCANNED[scan.what]
    columns = ", ".join(_ELSEWHERE.get(column, f"t.{column}") for column in scan.columns) or "1"
    conditions = {"t.seq >= ?": part.first, "t.seq < ?": part.end, **_conditions(source, scan.where)}
    sql = f"SELECT {columns} FROM {source.relation} WHERE {' AND '.join(conditions)} ORDER BY t.seq LIMIT -1 OFFSET ?"
    connection = file.access.snapshot()
    try:
        done, cursor = 0, connection.execute(sql, (*conditions.values(), 0))
        while True:
            try:
                rows = cursor.fetchmany(page)
            except sqlite3.Error as error:
                if not is_undecodable(error) or scan.what == "pending" or connection.text_factory is shown:
                    raise translate(error, file.path) from error
                connection.text_factory = shown  # only now, as it costs a call for each text
                cursor = connection.execute(sql, (*conditions.values(), done))
                continue
            if not rows:
                return
            yield rows
            done += len(rows)
    finally:
        connection.close()


def _conditions(source: _Scanned, where: ScanFilter) -> dict[str, Any]:
    """Return conditions to be joined with AND: SQL, and the value of its one parameter."""
    conditions = dict[str, Any]()
    if where.message_ids is not None:
        conditions[source.with_ids] = _json_list(where.message_ids)
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
class _Scanned:
    """A relation that can be scanned by ``t.seq``.

    Args:
        table: the table whose numbers are ``t.seq``.
        relation: the FROM clause.
        with_ids: the condition that an id is in a list, written for an index if there is one.
        destination: the column with the destination.
    """

    table: str
    relation: str
    with_ids: str = f"t.{_OF_IDS}"
    destination: str = "t.destination"


_SCANNED: Final = {
    "pending": _Scanned(
        "delayed_message",
        "delayed_message AS t JOIN content AS c ON c.seq = t.content AND t.unreadable IS NULL",
        with_ids=f"t.seq IN (SELECT seq FROM record WHERE kind = 1 AND {_OF_IDS})",
    ),
    "records": _Scanned("record", "record AS t"),
    "queued": _Scanned(
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
    """See :class:`postdate.ports.scanning.RecordStreamStore`. A missing file is not created.

    Args:
        path: of the file.
        synchronous: the value of the other adapters on the file in this process.
        recording: the same.
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
    def where(self) -> str:
        return f"SQLite {self._file.path}"

    @override
    def next_number(self) -> int:
        self._be_there()
        return self._file.read_blocking(
            lambda connection: int(connection.execute("SELECT coalesce(max(seq), 0) + 1 FROM record").fetchone()[0])
        )

    @override
    def safe_end(self) -> int:
        self._safe_end = max(self._safe_end, self.next_number())
        return self._safe_end

    @override
    def records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        self._be_there()
        return read_scan(self._file, Scan("records", tuple(columns)), ScanPart(first, end), page)

    def _be_there(self) -> None:
        if not self._file.path.exists():
            raise StoreNotSetUp(f"there is no file {self._file.path}; create it with `postdate setup`, or name another")
        self._file.access.setup()  # a file that no process has open has no log, and only a writer may create one

    @override
    def close(self) -> None:
        closed, self._closed = self._closed, True
        if not closed:
            self._file.close()


_MARK: Final = f"UPDATE record SET detail = '{ARCHIVED}' WHERE seq = ? AND kind = 1 AND detail IS NOT '{ARCHIVED}'"
# The last record stays: new records are numbered after it, and without it numbers in an archive would be used again.
_PRUNE: Final = "DELETE FROM record WHERE seq = ? AND seq < (SELECT max(seq) FROM record)"
_IS_KEYED: Final = f"r.message_id GLOB '*~{'[0-9]' * 8}'"
_LAST_OF_KEY: Final = "substr(r.message_id, 1, length(r.message_id) - 8) || '99999999'"
_OLD: Final = f"""
    r.seq >= :first AND r.seq < :end AND r.seq < (SELECT max(seq) FROM record)
    AND {Aging("record", "delayed_message", "seq", ":before", _IS_KEYED, _LAST_OF_KEY).is_old()}"""
_IS_ANY_OLD: Final = f"SELECT EXISTS (SELECT 1 FROM record AS r WHERE {_OLD})"
_PRUNE_OLD: Final = f"DELETE FROM record AS r WHERE {_OLD} RETURNING kind"
_MARKERS: Final = "SELECT seq, due, detail FROM record WHERE message_id = ? AND kind BETWEEN 8 AND 11 AND kind = 11"
_UNMARK: Final = f"UPDATE record SET detail = ? WHERE kind = 1 AND message_id = ? AND detail = '{ARCHIVED}'"
# In the order of StoredRecord.
_INSERT: Final = "INSERT INTO record (seq, kind, message_id, at, due, destination, detail) VALUES (?, ?, ?, ?, ?, ?, ?)"


class BulkOnFile(OnFile, ArchivableStore):
    @override
    def scan_parts(self, what: str, parts: int) -> Sequence[ScanPart]:
        check_scanned(what)
        bounds = f"SELECT coalesce(min(seq), 0), coalesce(max(seq), -1) + 1 FROM {_SCANNED[what].table}"
        first, end = self.file.read_blocking(lambda c: c.execute(bounds).fetchone())
        return shares(first, end, parts)

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
    def pruned_at_once(self) -> int:
        """Few, because other processes wait for each transaction."""
        return 2_000

    @override
    def mark_archived(self, part: ScanPart, numbers: Sequence[int]) -> int:
        return self.file.write_blocking(lambda tx: tx.executemany(_MARK, [(number,) for number in numbers]).rowcount)

    @override
    def prune(self, part: ScanPart, numbers: Sequence[int]) -> int:
        return self.file.write_blocking(lambda tx: tx.executemany(_PRUNE, [(number,) for number in numbers]).rowcount)

    @override
    def prune_before(self, part: ScanPart, before: datetime, now: datetime) -> int:
        share = {"first": part.first, "end": part.end, "before": to_microseconds(before)}
        if not self.file.read_blocking(lambda connection: connection.execute(_IS_ANY_OLD, share).fetchone()[0]):
            return 0  # without a write transaction, for which other processes would wait

        def prune(tx: Transaction) -> int:
            kinds = [kind for (kind,) in tx.execute(_PRUNE_OLD, share)]
            if kinds:
                markers = tx.execute(_MARKERS, (PRUNED_ID,)).fetchall()
                marker = Pruned.of((from_microseconds(due), detail) for _, due, detail in markers).and_now(
                    before, kinds
                )
                what = (PRUNED_ID, to_microseconds(marker.before or before), None)
                record(tx, RecordKind.PRUNED, what, to_microseconds(now), marker.detail)
                tx.executemany("DELETE FROM record WHERE seq = ?", [(number,) for number, *_ in markers])
            return len(kinds)

        return self.file.write_blocking(prune)

    @override
    def restore(self, records: Sequence[StoredRecord]) -> int:
        scheduled = [record for record in records if record.kind == RecordKind.SCHEDULED]
        later_records = [record for record in records if record.kind != RecordKind.SCHEDULED]

        def put_back(tx: Transaction) -> int:
            back = {record.message_id for record in scheduled if _claim(tx, record)}
            tx.executemany(_INSERT, [record for record in later_records if record.message_id in back])
            return len(back)

        return self.file.write_blocking(put_back)


def _claim(tx: Transaction, record: StoredRecord) -> bool:
    if tx.execute(_UNMARK, (record.detail, record.message_id)).rowcount:
        return True
    # ON CONFLICT ignores only an id in use. A number that another record has must raise an error.
    return tx.execute(f"{_INSERT} ON CONFLICT (message_id) WHERE kind = 1 DO NOTHING", record).rowcount == 1
