"""How late messages are while a service removes old records beside them.

    eval "$(scripts/services env --durable)"
    .venv/bin/python -m benchmarks.retention --store postgres [--records 2000000]

A store has records of messages that were over forty days ago. One endpoint with the defaults delivers ``--rate``
messages a second that fall due one by one, for ``--seconds``: in turns while it removes nothing, and while it removes
what is old, from the first seconds on instead of 5 minutes after its start. Prints a line a round: lateness in ms, from
the records of delivery, and how many old records are left.
"""

import argparse
import json
import os
import secrets
import sqlite3
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

import anyio
import psycopg

from postdate import DelayedDelivery, Endpoint, LocalTransport, PostgresStore, PostgresTransport, SqliteStore
from postdate.clock import to_microseconds
from postdate.core.upkeep import retention as upkeep
from postdate.messages import DelayedMessage
from postdate.ports import RecordKind, TransactionMode

KINDS = (RecordKind.SCHEDULED, RecordKind.DELIVERED, RecordKind.HANDLED)
AGE = timedelta(days=40)


class Measured:
    """A store with queues, and what it takes to look at its records."""

    def __init__(self, kind: str, where: str) -> None:
        self.is_server, self.where = kind == "postgres", where

    def adapters(self) -> tuple[Any, Any]:
        if self.is_server:
            return PostgresStore(self.where), PostgresTransport(self.where)
        return SqliteStore(self.where), LocalTransport(self.where)

    def fill(self, records: int) -> None:
        """Write what was recorded of messages that are over."""
        old, count = datetime.now(UTC) - AGE, records // len(KINDS)
        if not self.is_server:
            at = to_microseconds(old)
            with closing(sqlite3.connect(self.where)) as connection, connection:
                for kind in KINDS:
                    rows = ((int(kind), f"{n * 2654435761 % 2**32:08x}", at + n, at + n) for n in range(count))
                    insert = "INSERT INTO record (kind, message_id, at, due, destination) VALUES (?, ?, ?, ?, 'queue')"
                    connection.executemany(insert, rows)
            return
        with psycopg.connect(self.where, autocommit=True) as connection:
            for kind in KINDS:
                connection.execute(
                    f"""INSERT INTO postdate.record (store_id, kind, message_id, destination, due, at)
                    SELECT (SELECT min(store_id) FROM postdate.store), {kind:d}, md5(n::text), 'queue',
                        %s::timestamptz + n * interval '1 ms', %s::timestamptz + n * interval '1 ms'
                    FROM generate_series(1, %s) AS n""".encode(),
                    (old, old, count),
                )
            connection.execute("VACUUM ANALYZE postdate.record")

    def records(self, what: str, condition: str, at: datetime) -> Sequence[tuple[Any, ...]]:
        if self.is_server:
            with psycopg.connect(self.where) as connection:
                return connection.execute(
                    f"SELECT {what} FROM postdate.record WHERE {condition} %s".encode(), (at,)
                ).fetchall()
        with closing(sqlite3.connect(self.where)) as connection:
            return connection.execute(
                f"SELECT {what} FROM record WHERE {condition} ?", (to_microseconds(at),)
            ).fetchall()

    def late_ms(self, since: datetime) -> list[float]:
        """Return how late each delivery since then was."""
        late = "extract(epoch FROM at - due) * 1000" if self.is_server else "(at - due) / 1000.0"
        return sorted(float(row[0]) for row in self.records(late, "kind = 2 AND due >=", since))


@contextmanager
def empty(kind: str) -> Generator[Measured]:
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield Measured(kind, str(Path(folder, "messages.db")))
        return
    url, name = os.environ["POSTDATE_POSTGRES_URL"], f"postdate_retention_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield Measured(kind, urlsplit(url)._replace(path=f"/{name}").geturl())
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


async def set_up(measured: Measured) -> None:
    store, transport = measured.adapters()
    await store.initialize("bench", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    await transport.create_queues(["queue"])
    await transport.close()
    await store.close()


async def deliver(measured: Measured, rate: int, seconds: int, *, removes: bool) -> dict[str, Any]:
    store, transport = measured.adapters()
    delivery = DelayedDelivery(store, retention=timedelta(days=30 if removes else 0))
    async with Endpoint("bench", transport=transport, delayed_delivery=delivery, error_queue="error"):
        start = datetime.now(UTC) + timedelta(seconds=5)
        for second in range(seconds):
            dues = [start + timedelta(seconds=second + n / rate) for n in range(rate)]
            batch = [DelayedMessage(f"{removes}-{second}-{n}", due, "queue") for n, due in enumerate(dues)]
            await store.store_many(batch, start)
        await anyio.sleep((start - datetime.now(UTC)).total_seconds() + seconds + 2)
    await transport.close()
    await store.close()
    late, ((left,),) = measured.late_ms(start), measured.records("count(*)", "at <", datetime.now(UTC) - AGE / 2)
    cuts = quantiles(late, n=100)
    return {
        "removes": removes,
        "delivered": len(late),
        "p50_ms": round(cuts[49], 2),
        "p99_ms": round(cuts[98], 2),
        "max_ms": round(late[-1], 1),
        "old_records_left": left,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", choices=("postgres", "sqlite"), default="postgres")
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    setattr(upkeep, "_FIRST_AFTER", timedelta(seconds=2))  # noqa: B010 - a benchmark does not wait for 5 minutes
    for _ in range(options.rounds):
        with empty(options.store) as measured:
            anyio.run(set_up, measured)
            measured.fill(options.records)
            for removes in (False, True):
                told = anyio.run(partial(deliver, measured, options.rate, options.seconds, removes=removes))
                print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
