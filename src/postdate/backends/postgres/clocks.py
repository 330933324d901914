"""The server's clock, and by how much processes have reported theirs to differ. Source: ADR 0019, point 2."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.listening import living
from postdate.backends.postgres.names import SchemaNames, sql


def server_now(connection: Connection) -> tuple[datetime, float]:
    """Return the server's time, and the monotonic seconds at which it was received."""
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    heard_at = time.monotonic()
    assert row is not None
    return row[0].astimezone(UTC), heard_at


def report(database: Access, ahead: timedelta) -> None:
    holder = database.listener().holder()
    note = sql(f"UPDATE {database.names.of('holder')} SET ahead = %s WHERE holder = %s")
    database.run_blocking(lambda connection: connection.execute(note, (ahead, holder)))


def reported(connection: Connection, names: SchemaNames) -> Mapping[str, timedelta]:
    query = sql(
        f"SELECT machine || ':' || pid, ahead FROM {names.of('holder')} "
        f"WHERE ahead IS NOT NULL AND holder IN ({living(names)})"
    )
    return dict(connection.execute(query, ()).fetchall())
