"""Removing records from PostgreSQL by their pages, and restoring them. Source: ADR 0011.

An index by number would burden every delivery. So records are looked up in the pages where a scan has seen them, and
each page is read once, however many records were ever marked or pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.names import array, literal, sql
from postdate.clock import from_microseconds
from postdate.ports import RecordKind, ScanPart
from postdate.ports.scanning import ARCHIVED, StoredRecord

# The next run repeats what a crash of the server undoes, so no commit waits for the disk, nor holds up services.
_HURRIED: Final = "SET LOCAL synchronous_commit = off"
# Services queue behind a session that waits for this lock: better to fail, and be run again, than to stop them.
_SHORT_WAIT: Final = "SET LOCAL lock_timeout = '5s'"
_COLUMNS: Final = "number, at, due, store_id, kind, message_id, destination, detail"
_TYPES: Final = ["int8", "timestamptz", "timestamptz", "int2", "int2", "text", "text", "text"]
_MARK: Final = literal(ARCHIVED)


def tables_of_stores(database: Access) -> Sequence[str]:
    query = sql(f"SELECT name FROM {database.names.plain('store')} ORDER BY name")
    return database.run_blocking(lambda connection: [name for (name,) in connection.execute(query)])


def mark_archived(database: Access, part: ScanPart, numbers: Sequence[int]) -> int:
    return _change(
        database,
        f"UPDATE {database.names.plain('record')} SET detail = {_MARK} "
        f"WHERE {_among(part, numbers)} AND kind = 1 AND detail IS DISTINCT FROM {_MARK}",
    )


def prune(database: Access, part: ScanPart, numbers: Sequence[int]) -> int:
    return _change(database, f"DELETE FROM {database.names.plain('record')} WHERE {_among(part, numbers)}")


def _among(part: ScanPart, numbers: Sequence[int]) -> str:
    """Return the condition, with the numbers as a literal: the server hashes only lists that are constants."""
    return (
        f"ctid >= '({part.first},0)'::tid AND ctid < '({part.end},0)'::tid "
        f"AND number = ANY('{array(numbers)}'::bigint[])"
    )


def _change(database: Access, statement: str) -> int:
    def change(connection: Connection) -> int:
        connection.execute(_HURRIED)
        return connection.execute(sql(statement)).rowcount

    return database.transaction_blocking(change, patiently=True)


def restore(database: Access, store_id: int, records: Sequence[StoredRecord]) -> int:
    scheduled = {record.message_id: record for record in records if record.kind == RecordKind.SCHEDULED}
    record_table = database.names.of("record")
    unmark = sql(f"""
        UPDATE {record_table} AS r SET detail = given.detail
        FROM unnest(%(ids)s::text[], %(details)s::text[]) AS given(message_id, detail)
        WHERE r.message_id = given.message_id COLLATE "C" AND r.store_id = %(store)s AND r.kind = 1
            AND r.detail = {_MARK} RETURNING r.message_id""")
    insert = sql(f"""
        INSERT INTO {record_table} ({_COLUMNS})
        VALUES (%s, %s, %s, %s, 1, %s, %s, %s) ON CONFLICT (message_id, store_id) WHERE kind = 1 DO NOTHING""")

    def put_back(connection: Connection) -> int:
        values = {
            "ids": list(scheduled),
            "details": [record.detail for record in scheduled.values()],
            "store": store_id,
        }
        back = {id_ for (id_,) in connection.execute(unmark, values)}
        with connection.cursor() as cursor:
            for id_, record in scheduled.items():
                if id_ not in back:
                    number, at, due, _, _, *rest = _row(record, store_id)
                    if cursor.execute(insert, (number, at, due, store_id, *rest)).rowcount:
                        back.add(id_)
            others = [r for r in records if r.message_id in back and r.kind != RecordKind.SCHEDULED]
            table = database.names.plain("record")
            with cursor.copy(sql(f"COPY {table} ({_COLUMNS}) FROM STDIN (FORMAT BINARY)")) as copy:
                copy.set_types(_TYPES)
                for record in others:
                    copy.write_row(_row(record, store_id))
        return len(back)

    _lift_sequence(database, max((record.number for record in records), default=0))
    return database.transaction_blocking(put_back, patiently=True)


def _row(record: StoredRecord, store_id: int) -> tuple[Any, ...]:
    due = None if record.due is None else from_microseconds(record.due)
    return (
        record.number,
        from_microseconds(record.at),
        due,
        store_id,
        record.kind,
        record.message_id,
        record.destination,
        record.detail,
    )


def _lift_sequence(database: Access, number: int) -> None:
    """Let new numbers begin above restored ones: in a new store they begin at 1. Needs the sequence's owner there.

    ``ALTER SEQUENCE`` waits for all transactions that have drawn numbers, and blocks others until our commit: so
    the sequence is never set back, and all numbers drawn before are visible afterwards.
    """
    sequence = database.names.plain("number")
    lower = sql(f"SELECT 1 FROM {sequence} WHERE last_value < {number:d}")

    def lift(connection: Connection) -> None:
        connection.execute(_SHORT_WAIT)
        connection.execute(sql(f"ALTER SEQUENCE {sequence} NO CYCLE"))  # as it is: this is for the lock
        if connection.execute(lower).fetchone() is not None:
            connection.execute(sql(f"ALTER SEQUENCE {sequence} RESTART WITH {number + 1:d}"))

    if database.run_blocking(lambda connection: connection.execute(lower).fetchone()) is not None:
        database.transaction_blocking(lift, patiently=True)
