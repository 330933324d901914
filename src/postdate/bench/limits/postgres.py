"""What PostgreSQL does without us: the barest statements on tables of their own, on the same server in the same run.

Everything is as durable as the server is set: ``synchronous_commit`` is left alone, and every batch is a commit.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from postdate.bench.limits.sleep import due_times, moving_floor
from postdate.bench.result import Lateness
from postdate.bench.workload import BODY, encoded_headers_of, id_of
from postdate.clock import from_microseconds
from postdate.errors import PostdateError

Connection = psycopg.Connection[tuple[Any, ...]]
Error, OperationalError = psycopg.Error, psycopg.OperationalError

_MOVED_AT_ONCE = 1_000
_RUN = "0" * 12
_TABLES = (
    """CREATE TABLE {schema}.bare_pending (
        id bigint GENERATED ALWAYS AS IDENTITY, due timestamptz NOT NULL, message_id text NOT NULL,
        destination text NOT NULL, headers text NOT NULL, body bytea NOT NULL)""",
    "CREATE INDEX ON {schema}.bare_pending (due, id)",
    """CREATE TABLE {schema}.bare_queue (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id text NOT NULL, headers text NOT NULL,
        body bytea NOT NULL)""",
)
# Ids and headers of the same form and size as those of the messages.
_FILL = """
    INSERT INTO {schema}.bare_pending (due, message_id, destination, headers, body)
    SELECT to_timestamp(%(first)s::float8 + number * %(spacing)s::float8), made.id, 'bench',
           replace(%(headers)s, %(placeholder)s, made.id), %(body)s
    FROM generate_series(0, %(n)s - 1) AS number, lpad(to_hex(number), 12, '0') AS digits,
         concat(left(digits, 8), '-', right(digits, 4), right(%(placeholder)s, 23)) AS made (id)
"""
_MOVE = """
    WITH moved AS (
        DELETE FROM {schema}.bare_pending WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {schema}.bare_pending WHERE due < %(now)s
            ORDER BY due, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
        RETURNING message_id, headers, body)
    INSERT INTO {schema}.bare_queue (message_id, headers, body) SELECT message_id, headers, body FROM moved
"""
# Arrays, so that the rows are found by their keys: joins read whole tables as soon as these are small enough.
_RECEIVE = f"""
    WITH taken AS (
        DELETE FROM {{schema}}.queue_message WHERE queue_id = %(queue)s AND number = ANY (ARRAY(
            SELECT number FROM {{schema}}.queue_message WHERE queue_id = %(queue)s AND number > %(after)s
            ORDER BY number LIMIT {_MOVED_AT_ONCE} FOR UPDATE SKIP LOCKED))
        RETURNING number, content),
    emptied AS (
        DELETE FROM {{schema}}.content WHERE number = ANY (ARRAY(SELECT content FROM taken)) RETURNING headers, body)
    SELECT headers, body, (SELECT max(number) FROM taken) FROM emptied
"""
_COPY = "COPY {schema}.bare_pending (due, message_id, destination, headers, body) FROM STDIN"

_COPY_OUT = """
    COPY (SELECT t.message_id, t.destination, t.due, t.expires_at, c.headers, c.body, t.failures
          FROM {schema}.{table} AS t JOIN {schema}.content AS c USING (number)) TO STDOUT (FORMAT BINARY)"""


def connect(url: str, **settings: Any) -> Connection:
    """Return a connection on which every statement is a transaction of its own."""
    return psycopg.connect(url, autocommit=True, **settings)


def in_schema(text: str, schema: str) -> bytes:
    """Return a statement with the name of the schema in its places; the name is of our own making."""
    return text.replace("{schema}", schema).encode()


def move_limit(connection: Connection, schema: str, n: int) -> float:
    """Return messages a second of moving ``n`` due rows to another table, one statement and one commit per 1,000.

    No ids to keep unique, no records, no expiry, no other destinations, nobody to wake.
    """
    with _bare_tables(connection, schema):
        _fill(connection, schema, n, time.time() - n - 1, 1e-3)
        statement = in_schema(_MOVE, schema)
        now = from_microseconds(time.time_ns() // 1_000)
        started, moved = time.perf_counter(), 0
        while moved < n:
            batch = connection.execute(statement, {"now": now, "limit": _MOVED_AT_ONCE}, prepare=True).rowcount
            assert batch, "nobody else is in these tables"
            moved += batch
        return n / (time.perf_counter() - started)


def receive_limit(connection: Connection, schema: str, queue: str, n: int) -> float:
    """Return messages a second of taking ``n`` messages off a queue, one statement and one commit per 1,000.

    From the tables of the transport, which must hold them. Nothing is parsed, nobody holds a message meanwhile, no
    failures are counted and nothing is recorded.

    Raises:
        PostdateError: there were not so many.
    """
    select = in_schema("SELECT queue_id FROM {schema}.queue WHERE name = %s", schema)
    row = connection.execute(select, [queue]).fetchone()
    assert row is not None, "the queue has been filled"
    statement, after, taken = in_schema(_RECEIVE, schema), 0, 0
    started = time.perf_counter()
    while batch := connection.execute(statement, {"queue": row[0], "after": after}, prepare=True).fetchall():
        after, taken = batch[0][2], taken + len(batch)
    seconds = time.perf_counter() - started
    if taken != n:
        raise PostdateError(f"the limit took {taken:,} messages off the queue, not {n:,}: somebody else is in it")
    return n / seconds


def copy_limit(connection: Connection, schema: str, n: int, batch: int) -> float:
    """Return rows a second of COPY, with lines made beforehand, into a table with an index on the due time."""
    with _bare_tables(connection, schema):
        statement, seconds = in_schema(_COPY, schema), 0.0
        for first in range(0, n, batch):
            lines = _lines(range(first, min(first + batch, n)))
            started = time.perf_counter()
            with connection.cursor().copy(statement) as copy:
                copy.write(lines)
            seconds += time.perf_counter() - started
        return n / seconds


def copy_out_limit(connection: Connection, schema: str, table: str) -> float:
    """Return rows a second of COPY out of a store, as the planner likes it; the bytes are thrown away.

    Args:
        connection: to the server.
        schema: of the store.
        table: of the waiting messages, as it is called; there must be some.
    """
    quoted = '"' + table.replace('"', '""') + '"'
    started = time.perf_counter()
    with connection.cursor() as cursor:
        with cursor.copy(in_schema(_COPY_OUT, schema).replace(b"{table}", quoted.encode())) as copy:
            for _ in copy:
                pass
        return cursor.rowcount / (time.perf_counter() - started)


def floor(connection: Connection, schema: str, rate: int, seconds: float) -> Lateness:
    """Return how late a bare loop is that sleeps until each due time, and moves what is due with one statement."""
    with _bare_tables(connection, schema):
        dues = due_times(rate, seconds, ahead=1 + rate * seconds / 50_000)
        _fill(connection, schema, len(dues), dues[0], 1 / rate)
        statement = in_schema(_MOVE, schema)

        def move(now: float) -> int:
            values = {"now": from_microseconds(int(now * 1_000_000)), "limit": _MOVED_AT_ONCE}
            return connection.execute(statement, values, prepare=True).rowcount

        return moving_floor(dues, move)


def settle(connection: Connection, schema: str) -> None:
    """Do what the server would do in a quiet hour after tables were filled, so that it does not while we measure."""
    tables = "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables WHERE schemaname = %s"
    for (table,) in connection.execute(tables.encode(), [schema]).fetchall():
        connection.execute(f"VACUUM ANALYZE {table}".encode())
    with suppress(psycopg.errors.InsufficientPrivilege):
        connection.execute("CHECKPOINT")


@contextmanager
def _bare_tables(connection: Connection, schema: str) -> Generator[None]:
    for statement in _TABLES:
        connection.execute(in_schema(statement, schema))
    try:
        yield
    finally:
        for table in ("bare_pending", "bare_queue"):
            connection.execute(in_schema("DROP TABLE {schema}." + table, schema))


def _fill(connection: Connection, schema: str, n: int, first: float, spacing: float) -> None:
    placeholder = id_of(0, _RUN)
    values = {"first": first, "spacing": spacing, "n": n, "body": BODY, "placeholder": placeholder}
    connection.execute(in_schema(_FILL, schema), {**values, "headers": encoded_headers_of(placeholder)})
    settle(connection, schema)


def _lines(numbers: range) -> bytes:
    body = "\\\\x" + BODY.hex()
    lines: list[str] = []
    for number in numbers:
        due, message_id = f"2100-01-01 00:00:00.{number % 1_000_000:06}+00", id_of(number, _RUN)
        lines.append(f"{due}\t{message_id}\tbench\t{encoded_headers_of(message_id)}\t{body}\n")
    return "".join(lines).encode()
