"""Scans of whole tables of the file, in shares that are ranges of row numbers."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from postdate.backends.sqlite.errors import translate
from postdate.backends.sqlite.file import SqliteFile
from postdate.backends.sqlite.rows import is_undecodable, shown
from postdate.clock import to_microseconds
from postdate.ports import Scan, ScanFilter, ScanPart
from postdate.ports.scanning import check_scanned


def scan_parts(file: SqliteFile, what: str, parts: int) -> Sequence[ScanPart]:
    check_scanned(what)
    table = _SCANNED[what].table
    first, last = file.read_blocking(
        lambda c: c.execute(f"SELECT coalesce(min(seq), 0), coalesce(max(seq), -1) FROM {table}").fetchone()
    )
    step = max(-(-(last + 1 - first) // max(parts, 1)), 1)
    return [ScanPart(start, min(start + step, last + 1)) for start in range(first, last + 1, step)]


def read_scan(file: SqliteFile, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
    """See :meth:`postdate.ports.ScannableStore.scan`.

    A text that is no UTF-8 does not end an audit: in records and queues it is decoded as far as possible. A waiting
    message is copied to other stores, and must not be changed on the way.

    Raises:
        StoreError: a text of a waiting message is no UTF-8; whoever claims or lists it quarantines it.
    """
    check_scanned(scan.what, scan.columns)
    source = _SCANNED[scan.what]
    wanted = ", ".join(_ELSEWHERE.get(column, f"t.{column}") for column in scan.columns) or "1"
    conditions = {"t.seq >= ?": part.first, "t.seq < ?": part.end, **_conditions(source, scan.where)}
    sql = f"SELECT {wanted} FROM {source.relation} WHERE {' AND '.join(conditions)} ORDER BY t.seq LIMIT -1 OFFSET ?"
    connection = file.snapshot()
    try:
        done, cursor = 0, connection.execute(sql, (*conditions.values(), 0))
        while True:
            try:
                rows = cursor.fetchmany(page)
            except sqlite3.Error as error:
                if not is_undecodable(error) or scan.what == "pending" or connection.text_factory is shown:
                    raise translate(error, file.path) from error
                connection.text_factory = shown  # not from the beginning: it costs every text a call
                cursor = connection.execute(sql, (*conditions.values(), done))
                continue
            if not rows:
                return
            yield rows
            done += len(rows)
    finally:
        connection.close()


def _conditions(source: _Scanned, where: ScanFilter) -> dict[str, Any]:
    conditions = dict[str, Any]()
    if where.message_ids is not None:
        conditions[source.with_ids] = _list(where.message_ids)
    if where.destinations is not None:
        conditions[f"{source.destination} IN (SELECT value FROM json_each(?))"] = _list(where.destinations)
    if where.due_from is not None:
        conditions["t.due >= ?"] = to_microseconds(where.due_from)
    if where.due_to is not None:
        conditions["t.due < ?"] = to_microseconds(where.due_to)
    return conditions


def _list(texts: Sequence[str]) -> str:
    """Return texts as one value; SQLite ends a text of JSON at a NUL, which no text of ours has."""
    return json.dumps([text for text in texts if "\0" not in text])


_OF_IDS: Final = "message_id IN (SELECT value FROM json_each(?))"


@dataclass(frozen=True, slots=True)
class _Scanned:
    """A relation that can be scanned by ``t.seq``.

    Args:
        table: whose numbers are ``t.seq``.
        relation: the FROM clause.
        with_ids: the condition that an id is in a list, written for an index where there is one.
        destination: the column with the destination.
    """

    table: str
    relation: str
    with_ids: str = f"t.{_OF_IDS}"
    destination: str = "t.destination"


_SCANNED: Final = {
    "pending": _Scanned(
        "delayed_message",
        "delayed_message AS t JOIN content AS c ON c.seq = t.content",
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
