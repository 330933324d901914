"""Many messages at once: copied into a temporary table, and from there by one statement to where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.statements import Statements
from postdate.errors import ConfigurationError

if TYPE_CHECKING:
    from postdate.backends.postgres.columnar import Columns


def insert_bulk(
    connection: Connection, sql: Statements, rows: Sequence[tuple[Any, ...]], now: datetime, store_id: int
) -> list[str]:
    """Insert messages with different ids, in the transaction of the connection; return the ids that are new."""
    connection.execute(sql.make_incoming)
    with connection.cursor() as cursor:
        with cursor.copy(sql.copy_incoming) as copy:
            copy.set_types(["int4", "text", "timestamptz", "text", "timestamptz", "text", "bytea"])
            for position, row in enumerate(rows):
                copy.write_row((position, *row))
        cursor.execute(sql.insert_incoming, {"now": now, "store": store_id})
        fresh = [id_ for (id_,) in cursor.fetchall()]
        cursor.execute(sql.clear_incoming)
    return fresh


def open_columns(database: Access) -> Columns:
    """Return the columnar side of a store; what it needs of Arrow is imported here and not before.

    Raises:
        ConfigurationError: the extra ``pipeline`` is not installed.
    """
    try:
        from postdate.backends.postgres.columnar import Columns
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"reading and writing PostgreSQL in bulk needs {error.name}: pip install 'postdate[pipeline]'"
        ) from error
    return Columns(database)
