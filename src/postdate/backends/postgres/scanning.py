"""Scans of whole tables, in shares that are ranges of pages on disk. Source: ADR 0007, ADR 0011."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

import psycopg

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.names import SchemaNames, literal, sql
from postdate.backends.postgres.rows import in_calendar
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import PipelineError
from postdate.ports import Scan, ScanPart
from postdate.ports.scanning import TIMES, check_scanned

_ELSEWHERE: Final[Mapping[str, str]] = {
    "headers": "c.headers",
    "body": "c.body",
    "number_of_failures": "t.failures",
    "queue": "q.name",
}
"""SQL of the columns that are not a column of that name in ``t``."""

_TABLES: Final = {"records": "record", "queued": "queue_message"}
CONTENT: Final = frozenset({"headers", "body"})

BEGIN_SCAN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


@contextmanager
def exported_snapshot(database: Access) -> Generator[str]:
    """Hold a snapshot by a connection of its own; see :meth:`postdate.ports.ScannableStore.snapshot`."""
    with database.translating():
        connection = database.connect()
        try:
            connection.execute(BEGIN_SCAN)
            row = connection.execute("SELECT pg_export_snapshot()").fetchone()
            assert row is not None
            yield row[0]
        finally:
            connection.close()


NO_SUCH_SNAPSHOT: Final = frozenset({"22023", "42704"})
"""Errors of servers for the name of a snapshot that has ended: the former up to version 16."""


def released(snapshot: str) -> PipelineError:
    """Return the error for a snapshot that the server does not know any more."""
    return PipelineError(f"the snapshot {snapshot!r} is not held any more; keep it open until all parts have been read")


def adopting(snapshot: str) -> str:
    """Return the statement by which a new transaction takes over a snapshot."""
    return f"SET TRANSACTION SNAPSHOT {literal(snapshot)}"


def scan_parts(database: Access, table: str, what: str, parts: int) -> Sequence[ScanPart]:
    check_scanned(what)
    name = database.names.of(_TABLES.get(what, table)).replace("%%", "%")
    with database.leased() as connection:
        row = connection.execute(
            "SELECT (pg_relation_size(%s::regclass) / current_setting('block_size')::integer)::bigint", (name,)
        ).fetchone()
    assert row is not None
    pages: int = row[0]
    step = max(-(-pages // max(parts, 1)), 1)
    return [ScanPart(start, min(start + step, pages)) for start in range(0, pages, step)]


def scan_query(names: SchemaNames, table: str, scan: Scan, part: ScanPart, *, plain: bool) -> str:
    """Return the statement that reads a share, without parameters: COPY takes none. Raises `PipelineError`.

    ``plain``: times are whole microseconds since 1970 UTC.
    """
    check_scanned(scan.what, scan.columns)
    wanted = [f"{_selected(name, is_time=plain and name in TIMES)} AS {name}" for name in scan.columns]
    conditions = [f"t.ctid >= '({part.first},0)'::tid", f"t.ctid < '({part.end},0)'::tid"]
    conditions += _conditions(names, table, scan)
    return f"SELECT {', '.join(wanted) or '1'} FROM {_relation(names, table, scan)} WHERE {' AND '.join(conditions)}"


def _selected(name: str, *, is_time: bool) -> str:
    column = _ELSEWHERE.get(name, f"t.{name}")
    return f"(extract(epoch FROM {in_calendar(column)}) * 1000000)::bigint" if is_time else column


def _relation(names: SchemaNames, table: str, scan: Scan) -> str:
    if scan.what == "records":
        return f"{names.plain('record')} AS t"
    if scan.what == "queued":
        return f"{names.plain('queue_message')} AS t JOIN {names.plain('queue')} AS q USING (queue_id)"
    pending = f"{names.plain(table)} AS t"
    # Every waiting message has its content: the join is only needed for its columns.
    if CONTENT.isdisjoint(scan.columns):
        return pending
    # One index look for each row: a planner's join would read all contents for each share.
    content = f"SELECT k.headers, k.body FROM {names.plain('content')} AS k WHERE k.number = t.number OFFSET 0"
    return f"{pending} CROSS JOIN LATERAL ({content}) AS c"


def _conditions(names: SchemaNames, table: str, scan: Scan) -> list[str]:
    where, conditions = scan.where, list[str]()
    store = f"(SELECT store_id FROM {names.plain('store')} WHERE name = {_text(table)})"
    if scan.what != "pending":
        conditions.append(f"(t.store_id IS NULL OR t.store_id = {store})")
    if where.message_ids is not None:
        conditions.append(_with_ids(names, scan.what, store, _array(where.message_ids)))
    if where.destinations is not None:
        destination = "q.name" if scan.what == "queued" else "t.destination"
        conditions.append(f"{destination} = ANY({_array(where.destinations)})")
    if where.due_from is not None:
        conditions.append(f"t.due >= {_instant(where.due_from)}")
    if where.due_to is not None:
        conditions.append(f"t.due < {_instant(where.due_to)}")
    return conditions


def _with_ids(names: SchemaNames, what: str, store: str, ids: str) -> str:
    if what != "pending":
        return f"t.message_id = ANY({ids})"
    # By the unique index of the scheduled records: the waiting messages have none on their ids.
    return (
        f"t.number IN (SELECT r.number FROM {names.plain('record')} AS r "
        f"WHERE r.message_id = ANY({ids}) AND r.store_id = {store} AND r.kind = 1)"
    )


def _text(text: str) -> str:
    """Return a text literal that reads the same whatever the session makes of backslashes."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _array(texts: Sequence[str]) -> str:
    """Return an array of texts as SQL, without those that no column can hold."""
    return f"ARRAY[{', '.join(_text(text) for text in texts if _can_be_stored(text))}]::text[]"


def _can_be_stored(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return "\0" not in text


def _instant(instant: datetime) -> str:
    return f"'{from_microseconds(to_microseconds(instant)).isoformat(sep=' ')}'::timestamptz"


def read_scan(database: Access, table: str, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
    query = scan_query(database.names, table, scan, part, plain=True)
    with database.translating(), database.connect() as connection:
        connection.execute(BEGIN_SCAN)
        if scan.snapshot is not None:
            _adopt(connection, scan.snapshot)
        with connection.cursor(name="postdate_scan") as cursor:
            cursor.execute(sql(query))
            while rows := cursor.fetchmany(page):
                yield rows


def _adopt(connection: Connection, snapshot: str) -> None:
    try:
        connection.execute(sql(adopting(snapshot)))
    except psycopg.Error as error:
        if error.sqlstate in NO_SUCH_SNAPSHOT:
            raise released(snapshot) from error
        raise
