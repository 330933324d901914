"""Databases that the work is measured on: what lies beside it, and what the planner has been told of that."""

from __future__ import annotations

import enum
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from tests.mariadb_subjects import drop_schema as drop_database
from tests.mariadb_subjects import fresh_schema as fresh_database
from tests.plans.meters import AUTO_EXPLAIN, MariaDbMeter, Meter, PostgresMeter, SqliteMeter
from tests.plans.work import BATCH, set_up, work
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import MariaDb, Postgres, Sqlite
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames

BESIDE = 5_000
"""Rows of each table that are none of the work's: reading them all is seen."""

MILLION = 1_000_000

ROWS = 20 * BATCH
"""The most that a statement may read: some times its batch, and nothing of what lies beside."""

STEPS = 10_000
"""Likewise in steps of SQLite's virtual machine, some hundred of which write a message."""


PLANS = ("force_generic_plan", "force_custom_plan")
"""PostgreSQL's ``plan_cache_mode``: one plan for all values, or one for each execution."""


class Statistics(enum.Enum):
    """What the planner knows of the tables when the work begins."""

    NONE = "never analyzed"
    EMPTY = "analyzed while empty"
    ONE_ROW = "analyzed with one row"
    MILLION = "analyzed at a million rows"
    DELETED = "a million rows were deleted since"


class Site(ABC):
    """A database with the tables of all adapters. The methods use connections of their own, which are not measured."""

    meter: Meter

    @contextmanager
    @abstractmethod
    def made(self) -> Generator[None]:
        """Make a place for the tables, and remove it."""

    @abstractmethod
    def open(self) -> Any:
        """Return the database object, measured."""

    @contextmanager
    def application(self) -> Generator[Any]:
        """Open a connection of an application, measured; ``None`` where its transactions have no messages."""
        yield None

    @abstractmethod
    def fill(self, rows: int) -> None:
        """Put rows into every table that the work uses, which are none of its own."""

    @abstractmethod
    def empty(self) -> None:
        """Delete the rows of :meth:`fill`."""

    @abstractmethod
    def analyze(self) -> None:
        """Have the server count."""

    @abstractmethod
    def pretend(self) -> None:
        """Have the planner believe that there are a million rows in each table."""

    def tell(self, statistics: Statistics) -> None:
        """Bring the tables, which are empty, into a state; :attr:`BESIDE` rows are then there, or not."""
        if statistics is Statistics.EMPTY:
            self.analyze()
        elif statistics is Statistics.ONE_ROW:
            self.fill(1)
            self.analyze()
            self.empty()
        elif statistics in {Statistics.MILLION, Statistics.DELETED}:
            self.fill(BESIDE)
            self.analyze()
            self.pretend()
            if statistics is Statistics.DELETED:
                self.empty()


_POSTGRES_ROWS = """
    INSERT INTO queue (name) SELECT 'q-' || n FROM g ON CONFLICT DO NOTHING;
    INSERT INTO destination_limit (store, destination, limits, free_at) SELECT 1, 'q-' || n, '1/s', now() FROM g
        ON CONFLICT DO NOTHING;
    INSERT INTO record (number, at, due, store_id, kind, message_id, destination)
        SELECT 1000000 + n, now() - interval '2 h', now() - interval '2 h', 1, k, 'f-' || n, 'consumer'
        FROM g, generate_series(1, 2) AS k;
    INSERT INTO content SELECT 1000000 + n, '{}', 'x' FROM g;
    INSERT INTO content SELECT 2000000 + n, '{}', 'x' FROM g;
    INSERT INTO "service.timeouts" (number, due, attempt_at, message_id, destination)
        SELECT number, due, due, id, 'consumer' FROM (
            SELECT 1000000 + n AS number, now() + n * interval '1 ms' - interval '2 h' * (n % 2) AS due, 'f-' || n AS id
            FROM g) AS f;
    INSERT INTO queue_message (queue_id, content, message_id)
        SELECT queue_id, 2000000 + n, 'f-' || n FROM g, queue WHERE name = 'consumer' ORDER BY n;
    INSERT INTO queue_message (queue_id, content, message_id, ends_at)
        SELECT queue_id, 2000000 + n, 'e-' || n, now() + interval '1 day'
        FROM g, queue WHERE name = 'done' ORDER BY n;
    INSERT INTO saga SELECT gen_random_uuid(), 'Order', 'number', 'f-' || n, 1, '{}', '{}' FROM g;
    INSERT INTO outbox SELECT 'service', 'f-' || n, now() - interval '2 h', now() - interval '2 h' FROM g;
    INSERT INTO "service_TimeoutData" ("Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion")
        SELECT gen_random_uuid(), 'consumer', gen_random_uuid(), 'x',
            now() AT TIME ZONE 'UTC' + n * interval '1 ms' - interval '2 h' * (n % 2), '{}', '1.0.0.0' FROM g;
"""
_POSTGRES_FILLED = {
    "queue": "name LIKE 'q-%'",
    "destination_limit": "destination LIKE 'q-%'",
    "record": "message_id LIKE 'f-%'",
    "content": "number >= 1000000",
    "service.timeouts": "message_id LIKE 'f-%'",
    "queue_message": "message_id LIKE 'f-%' OR message_id LIKE 'e-%'",
    "saga": "value LIKE 'f-%'",
    "outbox": "message_id LIKE 'f-%'",
    "service_TimeoutData": "convert_from(\"State\", 'UTF8') = 'x'",
}


class PostgresSite(Site):
    """A schema; ``plans`` is the server's ``plan_cache_mode``."""

    def __init__(self, url: str, plans: str) -> None:
        self.meter = PostgresMeter(ROWS)
        self._url, self._plans, self._schema = url, plans, fresh_schema()

    @contextmanager
    def made(self) -> Generator[None]:
        with self.meter.listening():
            try:
                yield
            finally:
                drop_schema(self._url, self._schema)

    def open(self) -> Postgres:
        return Postgres(f"{self._url}?options={quote(self._options)}", schema=self._schema)

    @property
    def _options(self) -> str:
        return f"{AUTO_EXPLAIN} -c plan_cache_mode={self._plans}"

    @contextmanager
    def application(self) -> Generator[Any]:
        with psycopg.connect(self._url, options=self._options, autocommit=True) as connection:
            yield connection

    def _run(self, *statements: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (self._schema,))
            for each in statements:
                connection.execute(each.encode())

    def fill(self, rows: int) -> None:
        self._run(
            *(f'ALTER TABLE "{table}" SET (autovacuum_enabled = off)' for table in _POSTGRES_FILLED),
            f"CREATE TEMP TABLE g AS SELECT n FROM generate_series(1, {rows}) AS n",
            _POSTGRES_ROWS,
        )

    def empty(self) -> None:
        self._run(*(f'DELETE FROM "{table}" WHERE {filled}' for table, filled in _POSTGRES_FILLED.items()))

    def analyze(self) -> None:
        self._run(*(f'ANALYZE "{table}"' for table in _POSTGRES_FILLED))

    def pretend(self) -> None:
        """The planner takes the size of the file, and from here how many rows are in a page."""
        schema = "(SELECT oid FROM pg_namespace WHERE nspname = current_schema())"
        self._run(
            f"UPDATE pg_class SET reltuples = {MILLION} "
            f"WHERE relnamespace = {schema} AND relkind IN ('r', 'i') AND reltuples > 100"
        )


_MARIADB_ROWS = """
    INSERT INTO postdate_destination_limit (store, destination, limits, free_at)
        SELECT 1, CONCAT('q-', seq), '1/s', 0 FROM g;
    INSERT INTO postdate_record (number, at, due, store_id, kind, once, message_id, destination)
        SELECT {first} + seq, {past}, {past}, 1, 1, 1, CONCAT('f-', seq), 'consumer' FROM g;
    INSERT INTO postdate_record (number, at, due, store_id, kind, message_id, destination)
        SELECT {first} + {rows} + seq, {past}, {past}, 1, 2, CONCAT('f-', seq), 'consumer' FROM g;
    INSERT INTO `service.timeouts` (number, due, attempt_at, message_id, destination, headers, body)
        SELECT {first} + seq, {due}, {due}, CONCAT('f-', seq), 'consumer', '{{}}', 'x' FROM g;
    INSERT INTO postdate_saga SELECT UUID(), 'Order', 'number', CONCAT('f-', seq), 1, '{{}}', '{{}}' FROM g;
    INSERT INTO postdate_outbox (endpoint, message_id, handled_at, dispatched_at)
        SELECT 'service', CONCAT('f-', seq), {past}, {past} FROM g;
    INSERT INTO `service_TimeoutData` (Id, Destination, SagaId, State, Time, Headers, PersistenceVersion)
        SELECT UUID(), 'consumer', UUID(), 'x',
            UTC_TIMESTAMP(6) + INTERVAL seq * 1000 MICROSECOND - INTERVAL 2 * (seq MOD 2) HOUR, '{{}}', '1.0.0.0' FROM g
"""
_MARIADB_FILLED = {
    "postdate_destination_limit": "destination LIKE 'q-%'",
    "postdate_record": "message_id LIKE 'f-%'",
    "service.timeouts": "message_id LIKE 'f-%'",
    "postdate_saga": "value LIKE 'f-%'",
    "postdate_outbox": "message_id LIKE 'f-%'",
    "service_TimeoutData": "State = 'x'",
}


class MariaDbSite(Site):
    """A database of a server, whose statistics change only when they are told to."""

    def __init__(self, url: str) -> None:
        self.meter = MariaDbMeter(ROWS)
        self._url, self._schema, self._filled = url, fresh_database(), 0

    @contextmanager
    def made(self) -> Generator[None]:
        with self.meter.listening():
            try:
                yield
            finally:
                drop_database(self._url, self._schema)

    def open(self) -> MariaDb:
        return MariaDb(self._url, schema=self._schema)

    def _run(self, *statements: str) -> None:
        names = MariaDbNames(self._schema, "any")
        with closing(MariaDbServer(self._url).connect()) as session:
            session.rows(f"USE {names.qualified_name('x').rpartition('.')[0]}".encode())
            for each in statements:
                session.rows(each.encode())

    def fill(self, rows: int) -> None:
        self._filled += 1  # the server gives no number twice
        first = self._filled * MILLION
        now = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
        past, due = f"{now} - 7200000000", f"{now} + seq * 1000 - 7200000000 * (seq MOD 2)"
        self._run(
            *(f"ALTER TABLE `{table}` STATS_AUTO_RECALC = 0" for table in _MARIADB_FILLED),
            f"CREATE TEMPORARY TABLE g AS SELECT seq FROM seq_1_to_{rows}",
            *_MARIADB_ROWS.format(first=first, rows=rows, past=past, due=due).split(";"),
        )

    def empty(self) -> None:
        self._run(*(f"DELETE FROM `{table}` WHERE {filled}" for table, filled in _MARIADB_FILLED.items()))

    def analyze(self) -> None:
        self._run(*(f"ANALYZE TABLE `{table}`" for table in _MARIADB_FILLED))

    def pretend(self) -> None:
        self._run(
            f"UPDATE mysql.innodb_table_stats SET n_rows = {MILLION} WHERE database_name = DATABASE()",
            *(f"FLUSH TABLE `{table}`" for table in _MARIADB_FILLED),
        )


_SQLITE_ROWS = """
    CREATE TEMP TABLE g AS
        WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) SELECT n FROM s;
    INSERT INTO queue (name) SELECT 'q-' || n FROM g WHERE true ON CONFLICT DO NOTHING;
    INSERT INTO destination_limit (store, destination, limits, free_at) SELECT 0, 'q-' || n, '1/s', 0 FROM g;
    INSERT INTO content SELECT 1000000 + n, '{{}}', x'00' FROM g;
    INSERT INTO content SELECT 2000000 + n, '{{}}', x'00' FROM g;
    INSERT INTO record (seq, kind, message_id, at, due, destination)
        SELECT 1000000 + n, 1, 'f-' || n, {past}, {past}, 'consumer' FROM g;
    INSERT INTO record (seq, kind, message_id, at, due, destination)
        SELECT 1000000 + {rows} + n, 2, 'f-' || n, {past}, {past}, 'consumer' FROM g;
    INSERT INTO delayed_message (seq, message_id, due, attempt_at, destination, content)
        SELECT 1000000 + n, 'f-' || n, {due}, {due}, 'consumer', 1000000 + n FROM g;
    INSERT INTO queue_message (queue_id, message_id, content)
        SELECT queue_id, 'f-' || n, 2000000 + n FROM g, queue WHERE name = 'consumer';
    INSERT INTO queue_message (queue_id, message_id, content, ends_at)
        SELECT queue_id, 'e-' || n, 2000000 + n, {now} + 86400000000 FROM g, queue WHERE name = 'done';
    INSERT INTO saga SELECT 'f-' || n, 'Order', 'number', 'f-' || n, 1, '{{}}', '{{}}' FROM g;
    INSERT INTO postdate_outbox (endpoint, message_id, handled_at, dispatched_at)
        SELECT 'service', 'f-' || n, {past}, {past} FROM g;
    DROP TABLE g;
"""
_SQLITE_FILLED = {
    "queue": "name LIKE 'q-%'",
    "destination_limit": "destination LIKE 'q-%'",
    "record": "message_id LIKE 'f-%'",
    "content": "seq >= 1000000",
    "delayed_message": "message_id LIKE 'f-%'",
    "queue_message": "message_id LIKE 'f-%' OR message_id LIKE 'e-%'",
    "saga": "value LIKE 'f-%'",
    "postdate_outbox": "message_id LIKE 'f-%'",
}


class SqliteSite(Site):
    """A file. SQLite knows nothing of its tables until somebody runs ANALYZE."""

    def __init__(self, folder: Path) -> None:
        self.meter = SqliteMeter(STEPS)
        self._path = folder / f"plans-{os.getpid()}.db"

    @contextmanager
    def made(self) -> Generator[None]:
        with self.meter.listening():
            yield

    def open(self) -> Sqlite:
        return Sqlite(self._path)

    def _run(self, script: str) -> None:
        with closing(sqlite3.connect(self._path, timeout=30)) as connection:
            connection.executescript(script)

    def fill(self, rows: int) -> None:
        with closing(sqlite3.connect(":memory:")) as connection:
            ((now,),) = connection.execute("SELECT CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)")
        past, due = now - 7_200_000_000, f"{now} + n * 1000 - 7200000000 * (n % 2)"
        self._run(f"BEGIN; {_SQLITE_ROWS.format(rows=rows, now=now, past=past, due=due)} COMMIT;")

    def empty(self) -> None:
        self._run("".join(f"DELETE FROM {table} WHERE {filled};" for table, filled in _SQLITE_FILLED.items()))

    def analyze(self) -> None:
        self._run("ANALYZE")

    def pretend(self) -> None:
        factor = MILLION // BESIDE
        with closing(sqlite3.connect(self._path, timeout=30)) as connection:
            found = connection.execute("SELECT rowid, stat FROM sqlite_stat1").fetchall()
            for row, stat in found:
                numbers = [
                    str(int(each) * factor) if each.isdigit() and int(each) > 100 else each for each in stat.split()
                ]
                connection.execute("UPDATE sqlite_stat1 SET stat = ? WHERE rowid = ?", (" ".join(numbers), row))
            connection.commit()


async def measure(site: Site, statistics: Statistics) -> Meter:
    """Work in a state of the statistics, which makes plans; then beside many rows, with those plans and new ones."""
    with site.made():
        async with site.open() as database:
            await set_up(database)
        site.tell(statistics)
        async with site.open() as database:
            await set_up(database)
            with site.application() as application:
                for turn in ("a", "b"):  # plans are made, and kept
                    await work(database, site.meter, turn, application)
                if statistics is not Statistics.MILLION:
                    site.fill(BESIDE)
                await work(database, site.meter, "d", application)
        async with site.open() as database:
            await set_up(database)
            with site.application() as application:
                await work(database, site.meter, "e", application)
    return site.meter
