"""The barest statements on PostgreSQL, on tables of their own, with the durability set on the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Self

import psycopg
from typing_extensions import override

from benchmarks.targets.target import BareRow, BenchmarkRun, BenchmarkTarget, Inserter, Mover, Taker
from postdate.clock import from_microseconds
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.ports.backends import Scratch

Connection = psycopg.Connection[tuple[Any, ...]]

_TAKEN_AT_ONCE: Final = 1_000
_TABLES: Final = (
    """CREATE TABLE {schema}.bare_pending (
        id bigint GENERATED ALWAYS AS IDENTITY, due timestamptz NOT NULL, message_id text NOT NULL,
        destination text NOT NULL DEFAULT 'bench', headers text NOT NULL, body bytea NOT NULL)""",
    "CREATE INDEX ON {schema}.bare_pending (due, id)",
    """CREATE TABLE {schema}.bare_queue (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id text NOT NULL, headers text NOT NULL,
        body bytea NOT NULL)""",
)
_COPY: Final = "COPY {schema}.bare_pending (message_id, due, headers, body) FROM STDIN"
_MOVE: Final = """
    WITH moved AS (
        DELETE FROM {schema}.bare_pending WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {schema}.bare_pending WHERE due < %(before)s
            ORDER BY due, id LIMIT %(at_once)s FOR UPDATE SKIP LOCKED))
        RETURNING message_id, headers, body)
    INSERT INTO {schema}.bare_queue (message_id, headers, body) SELECT message_id, headers, body FROM moved
"""
_IN_QUEUE: Final = "FROM {schema}.queue_message WHERE queue_id = (SELECT queue_id FROM {schema}.queue WHERE name = %s)"
# Arrays, so that the rows are found by their keys: joins read whole tables as soon as these are small enough.
_TAKE: Final = f"""
    WITH taken AS (
        DELETE FROM {{schema}}.queue_message WHERE queue_id = %(queue)s AND number = ANY (ARRAY(
            SELECT number FROM {{schema}}.queue_message WHERE queue_id = %(queue)s AND number > %(after)s
            ORDER BY number LIMIT {_TAKEN_AT_ONCE} FOR UPDATE SKIP LOCKED))
        RETURNING number, content),
    emptied AS (
        DELETE FROM {{schema}}.content WHERE number = ANY (ARRAY(SELECT content FROM taken)) RETURNING headers, body)
    SELECT headers, body, (SELECT max(number) FROM taken) FROM emptied
"""
_MAY_COMMIT_LATE: Final = 2_000
_NOTHING_CAME_SECONDS: Final = 1.0
_OF_QUEUE: Final = "queue_id = (SELECT queue_id FROM {schema}.queue WHERE name = %(queue)s)"
_TAKE_IDS: Final = f"""
    WITH taken AS (
        DELETE FROM {{schema}}.queue_message WHERE {_OF_QUEUE} AND number = ANY (ARRAY(
            SELECT number FROM {{schema}}.queue_message WHERE {_OF_QUEUE} AND number > %(after)s
            ORDER BY number LIMIT %(limit)s))
        RETURNING message_id, number, content),
    emptied AS (DELETE FROM {{schema}}.content WHERE number IN (SELECT content FROM taken))
    SELECT message_id, number FROM taken
"""
_COPY_OUT: Final = """
    COPY (SELECT t.message_id, t.destination, t.due, t.expires_at, c.headers, c.body, t.failures
          FROM {schema}.{table} AS t JOIN {schema}.content AS c USING (number)) TO STDOUT (FORMAT BINARY)"""


class PostgresTarget(BenchmarkTarget):
    """The schema of the run."""

    name_parameter = "application_name"
    server_process = "postgres"
    _taken_up_to, _taken_at = 0, 0.0

    def __init__(self, scratch: Scratch, run: BenchmarkRun) -> None:
        super().__init__(scratch, run)
        self.schema = scratch.settings["schema"]
        self._opened: Connection | None = None

    @property
    def connection(self) -> Connection:
        assert self._opened is not None, "entered"
        return self._opened

    def connect(self, role: str) -> Connection:
        """Return another connection, whose application name ends with ``role``."""
        return psycopg.connect(self.address, autocommit=True, application_name=f"postdate bench {role}")

    @override
    def __enter__(self) -> Self:
        self._opened = self.connect("itself")
        return self

    @override
    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def sql(self, text: str) -> bytes:
        """Return a statement with the name of the run's schema filled in."""
        return text.replace("{schema}", self.schema).encode()

    @override
    def connections(self) -> Sequence[tuple[int, str]]:
        select = "SELECT pid, coalesce(application_name, '') FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        return [(self.connection.info.backend_pid, ""), *self.connection.execute(select).fetchall()]

    @override
    def settle(self) -> None:
        tables = "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables WHERE schemaname = %s"
        for (table,) in self.connection.execute(tables.encode(), [self.schema]).fetchall():
            self.connection.execute(f"VACUUM ANALYZE {table}".encode())
        with suppress(psycopg.errors.InsufficientPrivilege):
            self.connection.execute("CHECKPOINT")

    @override
    def arrived(self, queue: str) -> Iterable[str]:
        return [each for (each,) in self.connection.execute(self.sql(f"SELECT message_id {_IN_QUEUE}"), [queue])]

    @override
    def is_empty(self, queue: str) -> bool:
        return self.connection.execute(self.sql(f"SELECT 1 {_IN_QUEUE} LIMIT 1"), [queue]).fetchone() is None

    # --- the barest way -----------------------------------------------------------------------------------------

    @contextmanager
    def _bare_tables(self) -> Generator[None]:
        for statement in _TABLES:
            self.connection.execute(self.sql(statement))
        yield
        self.connection.execute(self.sql("DROP TABLE {schema}.bare_pending, {schema}.bare_queue"))

    @contextmanager
    @override
    def mover(self, rows: Iterable[BareRow], at_once: int) -> Generator[Mover]:
        """Move rows with one statement a commit: no ids to keep unique, no records, no expiry, nobody to wake."""
        with self._bare_tables():
            with self.connection.cursor().copy(self.sql(_COPY)) as copy:
                for message_id, due, headers, body in rows:
                    copy.write_row((message_id, from_microseconds(due), headers, body))
            self.settle()
            statement = self.sql(_MOVE)

            def move(before: int) -> int:
                values = {"before": from_microseconds(before), "at_once": at_once}
                return self.connection.execute(statement, values, prepare=True).rowcount

            yield move

    @contextmanager
    @override
    def inserter(self) -> Generator[Inserter]:
        with self._bare_tables():
            statement = self.sql(_COPY)

            def prepared(rows: Sequence[BareRow]) -> Callable[[], None]:
                lines = "".join(
                    f"{message_id}\t{from_microseconds(due)}\t{headers}\t\\\\x{body.hex()}\n"
                    for message_id, due, headers, body in rows
                )

                def insert() -> None:
                    with self.connection.cursor().copy(statement) as copy:
                        copy.write(lines)

                return insert

            yield prepared

    @contextmanager
    @override
    def taker(self, queue: str) -> Generator[Taker]:
        """Take messages off a queue of the transport: none is parsed, held or recorded."""
        found = self.connection.execute(self.sql("SELECT queue_id FROM {schema}.queue WHERE name = %s"), [queue])
        row = found.fetchone()
        assert row is not None, "the queue has been filled"
        values, statement = {"queue": row[0], "after": 0}, self.sql(_TAKE)

        def take() -> int:
            if taken := self.connection.execute(statement, values, prepare=True).fetchall():
                values["after"] = taken[0][2]
            return len(taken)

        yield take

    # --- what else is done without us ---------------------------------------------------------------------------

    @override
    def take(self, queue: str, limit: int) -> list[str]:
        """Take up to ``limit`` messages off a queue and return their ids.

        Takes from a little before where it stopped: a consumer that begins with the oldest again meets all that it
        has deleted and nobody has cleaned up yet. When nothing comes for a second, it looks at everything once.
        """
        values = {"queue": queue, "after": self._taken_up_to - _MAY_COMMIT_LATE, "limit": limit}
        rows = self.connection.execute(self.sql(_TAKE_IDS), values, prepare=True).fetchall()
        now = time.monotonic()
        if rows:
            self._taken_up_to, self._taken_at = max(self._taken_up_to, *(number for _, number in rows)), now
        elif now - self._taken_at > _NOTHING_CAME_SECONDS:
            self._taken_up_to, self._taken_at = 0, now
        return [message_id for message_id, _ in rows]

    def scan_limit(self, endpoint: str) -> float:
        """Return rows a second of COPY out of the store, as the planner likes it; the bytes are thrown away."""
        quoted = '"' + timeouts_queue(endpoint).replace('"', '""') + '"'
        started = time.perf_counter()
        with self.connection.cursor() as cursor:
            with cursor.copy(self.sql(_COPY_OUT.replace("{table}", quoted))) as copy:
                for _ in copy:
                    pass
            return cursor.rowcount / (time.perf_counter() - started)

    @contextmanager
    def idle_transaction(self) -> Generator[None]:
        """Hold a snapshot open, as a forgotten transaction does."""
        with self.connect("idle") as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM pg_class")  # the first query takes the snapshot
            yield
