"""Messages as Arrow batches, in and out by COPY: no row becomes a Python object. Needs the extra ``pipeline``.

Storing is optimistic: rows are copied straight into the store's tables, and the unique index of the *scheduled*
records refuses known ids. Source: ADR 0011.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# Arrow's stubs make arrays generic in a type that only the running program knows; the driver has none.

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final, cast

import adbc_driver_manager as adbc
import adbc_driver_postgresql.dbapi as driver
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from postdate.backends.postgres.access import Access
from postdate.backends.postgres.bulk import CONTENT, adopt_snapshot, scan_query
from postdate.backends.postgres.errors import is_conflict, translate
from postdate.backends.postgres.names import literal
from postdate.backends.postgres.rows import COLUMNS
from postdate.backends.postgres.statements import Statements
from postdate.clock import from_microseconds, to_microseconds
from postdate.ports import Scan, ScanPart, StoreReport
from postdate.runtime import forks

_INSTANT: Final = pa.timestamp("us", tz="UTC")
_READ_BYTES: Final = 4 * 1024 * 1024
"""The size of an Arrow batch that is read. It is large enough that a batch costs little besides its rows."""

_MAX_ATTEMPTS: Final = 5  # of a batch that has conflicts
_UNIQUE_VIOLATION: Final = "23505"
_SERVER_ERROR: Final = re.compile(r"(ERROR|FATAL|PANIC):\s+([^\n]*)")
_STATES: Final[Mapping[Any, str]] = {adbc.AdbcStatusCode.NOT_FOUND: "42P01"}
"""SQLSTATE codes for errors that the driver raises without one."""

_Mask = Any
"""An Arrow array of booleans, one for each row."""


class Columns(forks.ForkAware):
    """The columnar side of one store: one connection for storing, and one for each scan.

    Thread-safe; one batch is stored at a time.
    """

    def __init__(self, database: Access) -> None:
        self._database = database
        self._lock = forks.lock()
        self._connection: Any = None
        self._expect_duplicates = False
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Leave the connection to the parent."""
        forks.prevent_destruction(self._connection)
        self._connection = None

    def close(self) -> None:
        with self._lock:
            self._close_connection()

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, table: str, scan: Scan, part: ScanPart) -> Iterable[pa.RecordBatch]:
        query = scan_query(self._database.names, table, scan, part, plain=False)
        with self._translate_errors(), self._connect() as connection, connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            if scan.snapshot is not None:
                adopt_snapshot(scan.snapshot, cursor.execute)
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_READ_BYTES)})
            cursor.execute(query)
            for batch in self._batches(cursor.fetch_record_batch()):
                if batch.num_rows:
                    yield batch.select(scan.columns).replace_schema_metadata(None)

    def _batches(self, reader: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        try:
            yield from reader
        # After the first rows, errors are Arrow's, without the server's codes.
        except (pa.ArrowException, OSError) as error:
            match = _SERVER_ERROR.search(str(error))
            kind = psycopg.DatabaseError if match and match[1] == "ERROR" else psycopg.OperationalError
            raise translate(kind(match[2] if match else str(error)), self._database.where) from error

    # --- storing ------------------------------------------------------------------------------------------------

    @staticmethod
    def earliest_due(batch: pa.RecordBatch) -> datetime:
        return from_microseconds(pc.min(batch.column("due").cast(pa.int64())).as_py())

    @staticmethod
    def rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        """Return the messages of a batch as rows to insert."""
        return list(zip(*(_values(batch.column(name)) for name in COLUMNS), strict=True))

    def store(self, batch: pa.RecordBatch, sql: Statements, now: datetime, notice: str | None) -> StoreReport | None:
        """Store messages in one transaction; of several with one id, the first.

        Args:
            batch: as for :meth:`postdate.ports.ScannableStore.store_columns`, not empty.
            sql: statements of the store, whose number is known.
            now: time of the records.
            notice: payload of the notification when a message was stored.

        Returns:
            The report; ``None``: nothing was stored, because the transaction had conflicts again and again.
        """
        with self._lock, self._translate_errors():
            try:
                return self._store(batch, sql, now, notice)
            except BaseException:  # After any error, the next batch must not commit this transaction.
                self._close_connection()
                raise

    def _store(self, batch: pa.RecordBatch, sql: Statements, now: datetime, notice: str | None) -> StoreReport | None:
        first = _mask_of_first(batch.column("message_id"))
        mask = self._mask_of_new(batch, sql, first) if self._expect_duplicates else first
        for _ in range(_MAX_ATTEMPTS):
            new_rows = batch if mask is None else batch.filter(mask)
            try:
                if new_rows.num_rows:
                    self._copy(new_rows, sql, now, notice)
            except adbc.Error as error:
                if not _is_race(error):
                    raise
                self._connection.rollback()
                # It is a repeated task, or input that was stored before: most likely the remaining ids are known, too.
                self._expect_duplicates = True
                mask = self._mask_of_new(batch, sql, first)
            else:
                return StoreReport(new_rows.num_rows, () if mask is None else _ids(batch, pc.invert(mask)))
        return None

    def _mask_of_new(self, batch: pa.RecordBatch, sql: Statements, mask: _Mask | None) -> _Mask:
        """Return a mask without the rows whose ids the store has, found by its unique index."""
        ids = batch.column("message_id")
        values = pa.ListArray.from_arrays(pa.array([0, len(ids)], pa.int32()), ids)
        with self._cursor() as cursor:
            cursor.execute(
                f"SELECT message_id FROM {self._database.names.qualified_name('record')} "
                f"WHERE message_id = ANY($1) AND store_id = {sql.store_id} AND kind = 1",
                pa.record_batch({"ids": values}),
            )
            stored = cursor.fetch_arrow_table().column(0)
        self._connection.rollback()  # Later reads must not use this transaction's snapshot.
        unknown = pc.invert(pc.is_in(ids, value_set=stored))
        return unknown if mask is None else pc.and_(unknown, mask)

    def _copy(self, batch: pa.RecordBatch, sql: Statements, now: datetime, notice: str | None) -> None:
        with self._cursor() as cursor:
            for table, columns in _tables(batch, self._numbers(cursor, batch.num_rows), sql, now).items():
                rows = pa.record_batch(columns)
                cursor.adbc_ingest(table, rows, mode="append", db_schema_name=self._database.names.schema)
            if notice is not None:
                cursor.execute(f"SELECT pg_notify({literal(self._database.names.channel)}, {literal(notice)})")
                cursor.fetchall()
            self._connection.commit()

    def _numbers(self, cursor: Any, count: int) -> pa.Array[Any]:
        sequence = literal(self._database.names.qualified_name("number"))
        cursor.execute(f"SELECT nextval({sequence}::regclass) FROM generate_series(1, {count})")
        return cursor.fetch_arrow_table().column(0).combine_chunks()

    # --- connections --------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        return driver.connect(self._database.conninfo)

    @contextmanager
    def _cursor(self) -> Generator[Any]:
        if self._connection is None:
            self._connection = self._connect()
        with self._connection.cursor() as cursor:
            yield cursor

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(adbc.Error):  # It is broken, and closed nevertheless.
                connection.close()

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except adbc.Error as error:
            raise translate(_psycopg_error_of(error), self._database.where) from error


def _tables(
    batch: pa.RecordBatch, numbers: pa.Array[Any], sql: Statements, now: datetime
) -> dict[str, dict[str, pa.Array[Any]]]:
    """Return the rows of each table, without columns that have a default."""
    count, small = batch.num_rows, pa.int16()
    column = {name: batch.column(name) for name in COLUMNS}
    pending = {name: values for name, values in column.items() if name not in CONTENT}
    record = {
        "number": numbers,
        "at": pa.repeat(pa.scalar(to_microseconds(now), pa.int64()), count).cast(_INSTANT),
        "due": column["due"],
        "store_id": pa.repeat(pa.scalar(sql.store_id, small), count),
        "kind": pa.repeat(pa.scalar(1, small), count),
        "message_id": column["message_id"],
        "destination": column["destination"],
    }
    # All batches use one order: two batches with the same ids then wait for each other, and do not deadlock.
    order = pc.sort_indices(column["message_id"])
    return {
        "record": {name: values.take(order) for name, values in record.items()},
        "content": {"number": numbers, "headers": column["headers"], "body": column["body"]},
        sql.table: {"number": numbers, "attempt_at": column["due"], **pending},
    }


def _values(column: pa.Array[Any]) -> list[Any]:
    if not pa.types.is_timestamp(column.type):
        return column.to_pylist()
    return [None if at is None else from_microseconds(at) for at in column.cast(pa.int64()).to_pylist()]


def _mask_of_first(ids: pa.Array[Any]) -> _Mask | None:
    """Return a mask of the first row of each id; ``None`` if all ids differ."""
    if len(ids.unique()) == len(ids):
        return None
    numbers = pa.array(range(len(ids)), pa.int64())
    first = pa.table({"id": ids, "row": numbers}).group_by("id").aggregate([("row", "min")]).column("row_min")
    return pc.is_in(numbers, value_set=first)


def _ids(batch: pa.RecordBatch, mask: _Mask) -> tuple[str, ...]:
    return tuple(cast("list[str]", batch.column("message_id").filter(mask).to_pylist()))


def _is_race(error: adbc.Error) -> bool:
    failure = _psycopg_error_of(error)
    return failure.sqlstate == _UNIQUE_VIOLATION or is_conflict(failure)


def _psycopg_error_of(error: adbc.Error) -> psycopg.Error:
    """Return the error of psycopg with the same code, so that errors are classified in one place."""
    match = _SERVER_ERROR.search(str(error))
    text = match[2] if match else str(error).partition("\n")[0]
    if state := error.sqlstate or _STATES.get(error.status_code):
        with suppress(KeyError):
            return psycopg.errors.lookup(state)(text)
    return psycopg.OperationalError(text) if isinstance(error, adbc.OperationalError) else psycopg.DatabaseError(text)
