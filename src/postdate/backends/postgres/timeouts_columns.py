"""Batches of hidden timeouts out of PostgreSQL as Arrow columns: no row becomes a Python object. Runs on executors.

What is not as upstream writes it (another type, a timeout without a destination or headers) is left to the source,
which looks at each row: :meth:`postdate.migrating.tables.MigrationSource.read`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# Arrow's stubs make arrays generic in a type that only the running program knows; the driver has none.

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import adbc_driver_manager as adbc
import adbc_driver_postgresql.dbapi as driver
import pyarrow as pa
import pyarrow.compute
from typing_extensions import override

from postdate.backends.postgres.names import quoted
from postdate.errors import StoreUnavailable
from postdate.migrating.dialect import Hidden, HiddenColumns
from postdate.migrating.tables import MigrationSource
from postdate.persistence.timeouts import DESTINATION, HEADERS, ID, STATE, TIME

pc: Any = pyarrow.compute  # the stubs do not know what its functions do with plain values

_NULL_HEADER: Final = r":\s*null\s*[,}]"
"""Which .NET endpoints write for what has no text; also in a text, which is then read row by row, and rightly."""

_NORMAL_ID: Final = r"^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\z"
_TYPES: Final = {
    "message_id": pa.string(),
    "destination": pa.string(),
    "due": pa.timestamp("us", tz="UTC"),
    "headers": pa.string(),
    "body": pa.binary(),
}


class PostgresColumns(HiddenColumns):
    """Reads batches from the tables that a run hides timeouts in; it connects at first use. One thread at a time.

    Args:
        url: of the database.
        source: the tables in it; it says where a batch is.
    """

    def __init__(self, url: str, source: MigrationSource) -> None:
        self._url, self._source = str(url), source
        self._connection: Any = None

    @override
    def read(self, run_id: str, number: int) -> pa.RecordBatch | None:
        """Return the messages of a batch; ``None``: they are to be read row by row.

        Args:
            run_id: of the run.
            number: of the batch.

        Raises:
            StoreUnavailable: the database failed; in the driver's words, which may have the address in them.
        """
        query = self._query(self._source.hidden(run_id, number))
        try:
            table = self._fetch(query)
        except (adbc.Error, pa.ArrowException, OSError) as error:
            self.close()
            said = str(error).partition("\n")[0]
            raise StoreUnavailable(f"batch {number} of run {run_id} cannot be read: {said}") from error
        if not _is_plain(table):
            return None
        return pa.record_batch([_whole(table.column(name)) for name in _TYPES], names=list(_TYPES))

    @override
    def close(self) -> None:
        """Close the connection; it is opened again when it is needed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(adbc.Error):  # it is broken, and closed all the same
                connection.close()

    def _query(self, hidden: Hidden) -> str:
        columns = {
            f"{quoted(ID)}::text": "message_id",
            quoted(DESTINATION): "destination",
            f"{quoted(TIME)} AT TIME ZONE 'UTC'": "due",
            quoted(HEADERS): "headers",
            quoted(STATE): "body",
        }
        wanted = ", ".join(f"{column} AS {name}" for column, name in columns.items())
        return f"SELECT {wanted} FROM {hidden.table} WHERE {hidden.condition}".replace("%%", "%")

    def _fetch(self, query: str) -> pa.Table:
        if self._connection is None:
            self._connection = driver.connect(self._url, autocommit=True)
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetch_arrow_table()


def _is_plain(table: pa.Table) -> bool:
    """Return whether the columns mean what they say, without a look at each row."""
    if any(table.schema.field(name).type != kind for name, kind in _TYPES.items()):
        return False
    if any(table.column(name).null_count for name in ("message_id", "destination", "due", "headers")):
        return False
    blank = pc.or_(_is_blank(table.column("destination")), _is_blank(table.column("headers")))
    odd = pc.invert(pc.match_substring_regex(table.column("message_id"), _NORMAL_ID))
    nulls = pc.match_substring_regex(table.column("headers"), _NULL_HEADER)
    return not pc.any(pc.or_(pc.or_(blank, odd), nulls)).as_py()


def _is_blank(texts: pa.ChunkedArray[Any]) -> Any:
    return pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)


def _whole(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found
