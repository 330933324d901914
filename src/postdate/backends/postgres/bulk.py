"""Inserting many messages: COPY into a temporary table, then one statement into the store's tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.rows import COLUMNS
from postdate.backends.postgres.statements import Statements
from postdate.errors import ConfigurationError

if TYPE_CHECKING:
    from postdate.backends.postgres.columnar import Columns


def insert_bulk(
    connection: Connection, sql: Statements, rows: Sequence[tuple[Any, ...]], now: datetime, store_id: int
) -> list[str]:
    """Insert messages with different ids in the connection's transaction; return the ids that were new."""
    connection.execute(sql.make_incoming)
    with connection.cursor() as cursor:
        with cursor.copy(sql.copy_incoming) as copy:
            copy.set_types(["int4", *COLUMNS.values()])
            for position, row in enumerate(rows):
                copy.write_row((position, *row))
        cursor.execute(sql.insert_incoming, {"now": now, "store": store_id})
        fresh = [id_ for (id_,) in cursor.fetchall()]
        cursor.execute(sql.clear_incoming)
    return fresh


def open_columns(database: Access) -> Columns:
    """Return the columnar side of a store. Raises `ConfigurationError` without the extra ``pipeline`` (Arrow)."""
    try:
        from postdate.backends.postgres.columnar import Columns
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"reading and writing PostgreSQL in bulk needs {error.name}: pip install 'postdate[pipeline]'"
        ) from error
    return Columns(database)
