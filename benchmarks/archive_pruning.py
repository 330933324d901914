"""How quickly records are taken out of PostgreSQL, and whether a service that moves messages meanwhile is held up.

    eval "$(scripts/services env --durable)"; .venv/bin/python benchmarks/archive_pruning.py [--records 1000000]

A third of the records are *scheduled* ones, which are marked; the others are removed. That is done through the store as
the archive does it, one share of pages a transaction, by two processes at once, without Spark. A mover delivers small
batches all the while, before it and during it; how long its transactions take is compared.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Self

import anyio
import psycopg

from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.messages import DelayedMessage
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Scan, ScanPart
from postdate.ports.scanning import ArchivableStore

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TABLE = "pruning.timeouts"
BEFORE_SECONDS = 5.0
BATCH = 20


def fill(url: str, schema: str, messages: int) -> None:
    """Write scheduled, delivered and handled records in bulk."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'SET search_path = "{schema}"'.encode())
        for kind in (1, 2, 3):
            connection.execute(
                f"""
                INSERT INTO record (store_id, kind, message_id, destination, due, at)
                SELECT (SELECT store_id FROM store WHERE name = '{TABLE}'), {kind}, md5(n::text), 'queue',
                    '{NOW.isoformat()}'::timestamptz + n * interval '1 ms', '{NOW.isoformat()}'::timestamptz
                FROM generate_series(1, %s) AS n""".encode(),
                (messages,),
            )
        connection.execute(b"VACUUM ANALYZE record")


def shares(store: ArchivableStore) -> list[tuple[ScanPart, list[int], list[int]]]:
    """Return each share with the numbers to be marked and to be removed."""
    (whole,) = store.scan_parts("records", 1)
    found = list[tuple[ScanPart, list[int], list[int]]]()
    for first in range(whole.first, whole.end, store.prune_share_width):
        part = ScanPart(first, min(first + store.prune_share_width, whole.end))
        rows = [row for page in store.scan(Scan("records", ("number", "kind")), part, 50_000) for row in page]
        found.append((part, [n for n, kind in rows if kind == 1], [n for n, kind in rows if kind > 1]))
    return found


def work(spec: StoreSpec, todo: list[tuple[str, ScanPart, list[int]]]) -> int:
    """Change shares, one transaction each; in a process of its own."""
    with open_spec(spec) as found:
        store = found.require_scannable()
        assert isinstance(store, ArchivableStore)
        act = {"mark": store.mark_archived, "prune": store.prune}
        return sum(act[what](part, numbers) for what, part, numbers in todo if numbers)


class Mover:
    """A service in miniature: stores and moves small batches, and notes how long each move takes."""

    def __init__(self, url: str, schema: str) -> None:
        self.url, self.schema = url, schema
        self.moves: list[tuple[float, float]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=anyio.run, args=(self._run,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    async def _run(self) -> None:
        store = PostgresStore(self.url, schema=self.schema, table=TABLE)
        transport = PostgresTransport(self.url, schema=self.schema)
        await transport.create_queues(["queue"])
        number = 0
        while not self._stopping.is_set():
            await store.store_many([DelayedMessage(f"mover-{number}-{n}", NOW, "queue") for n in range(BATCH)], NOW)
            began = time.perf_counter()
            await store.move_due(NOW + timedelta(seconds=1), BATCH)
            self.moves.append((began, time.perf_counter() - began))
            number += 1
        await transport.close()
        await store.close()

    def milliseconds(self, first: float, end: float) -> dict[str, float]:
        took = sorted(seconds * 1e3 for began, seconds in self.moves if first <= began < end)
        return {
            "moves": len(took),
            "p50_ms": round(statistics.median(took), 1),
            "p99_ms": round(took[int(len(took) * 0.99)], 1),
            "max_ms": round(took[-1], 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--url", default=os.environ.get("POSTDATE_POSTGRES_URL"))
    options = parser.parse_args()
    if not options.url:
        parser.error("which server? --url, or POSTDATE_POSTGRES_URL")
    schema = f"archive_pruning_{os.getpid()}"
    spec = StoreSpec(options.url, schema=schema, table=TABLE)
    with open_spec(spec, create=True) as found:
        found.setup()
    try:
        fill(options.url, schema, options.records // 3)
        with open_spec(spec) as found:
            store = found.require_scannable()
            assert isinstance(store, ArchivableStore)
            todo = shares(store)
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            pool.starmap(work, [(spec, [])] * options.processes)
            with Mover(options.url, schema) as mover:
                started = time.perf_counter()
                threading.Event().wait(BEFORE_SECONDS)
                took = dict[str, float]()
                began = first = time.perf_counter()
                changed = 0
                for what, of in (("mark", 1), ("prune", 2)):
                    tasks = [
                        (spec, [(what, each[0], each[of]) for each in todo[number :: options.processes * 4]])
                        for number in range(options.processes * 4)
                    ]
                    changed += sum(pool.starmap(work, tasks))
                    took[what], first = time.perf_counter() - first, time.perf_counter()
                end = time.perf_counter()
        print(
            json.dumps(
                {
                    "records": changed,
                    "seconds": {what: round(seconds, 2) for what, seconds in took.items()},
                    "records_per_second": round(changed / (end - began)),
                    "move_before": mover.milliseconds(started, began),
                    "move_during": mover.milliseconds(began, end),
                },
                indent=2,
            )
        )
    finally:
        with psycopg.connect(options.url, autocommit=True) as connection:
            connection.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
