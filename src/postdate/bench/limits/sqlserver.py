"""What SQL Server does without a store: bare rows into a table of their own, on the same server in the same run."""

from __future__ import annotations

import json
import time
from typing import Any

from postdate.backends.sqlserver.connection import SqlServerSession
from postdate.bench.workload import BODY, encoded_headers_of, id_of

_RUN = "0" * 12


def insert_limit(session: SqlServerSession, schema: str, n: int, batch: int) -> float:
    """Return rows a second of inserting many with one statement into a table with an index on the due time."""
    table = f"[{schema}].[bare_pending]"
    session.change(
        f"CREATE TABLE {table} (id bigint NOT NULL IDENTITY PRIMARY KEY, due bigint NOT NULL, "
        f"message_id nvarchar(500) NOT NULL, destination nvarchar(400) NOT NULL, headers nvarchar(max) NOT NULL, "
        f"body varbinary(max) NOT NULL, INDEX [due] (due, id))"
    )
    insert = (
        f"INSERT INTO {table} (due, message_id, destination, headers, body) "
        f"SELECT i.due, i.id, N'bench', i.headers, CAST(i.body AS varbinary(max)) FROM OPENJSON(%(rows)s) WITH "
        f"(due bigint '$.due', id nvarchar(500) '$.id', headers nvarchar(max) '$.headers', "
        f"body nvarchar(max) '$.body') AS i"
    )
    seconds = 0.0
    for first in range(0, n, batch):
        rows = json.dumps([_row(number) for number in range(first, min(first + batch, n))])
        started = time.perf_counter()
        session.begin()
        session.change(insert, {"rows": rows})
        session.commit()
        seconds += time.perf_counter() - started
    session.change(f"DROP TABLE {table}")
    return n / seconds


def _row(number: int) -> dict[str, Any]:
    message_id = id_of(number, _RUN)
    return {"due": number, "id": message_id, "headers": encoded_headers_of(message_id), "body": BODY.decode("latin-1")}
