"""A few faults of each kind among a million records in PostgreSQL: does the audit name exactly those messages?

    eval "$(scripts/services env --durable)"; .venv/bin/python benchmarks/planted_faults.py [--records 1000000]

The records are those of messages that were scheduled, delivered and handled, written by SQL in bulk into a schema of
their own, which is dropped afterwards. Then some messages are lost, delivered twice, delivered early, or have never
been scheduled. Prints what the audit found, how long it took without the start of Spark, and the peak of the memory of
the driver, the JVM and the Python workers together. Exit status 1 if the audit found anything else.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Self

import psycopg
from pyspark.sql import SparkSession

from postdate.clock import SystemClock
from postdate.pipeline.audit import AuditResult, audit
from postdate.pipeline.report import render_html
from postdate.pipeline.session import spark_session
from postdate.pipeline.stores import StoreSpec, open_spec

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ENDPOINT = "planted"
TABLE = f"{ENDPOINT}.timeouts"


class Planted(NamedTuple):
    """The ids of the messages with a fault, in order, by the name of the finding."""

    lost: tuple[str, ...]
    duplicated: tuple[str, ...]
    early: tuple[str, ...]
    orphaned: tuple[str, ...]


@contextmanager
def planted_store(
    url: str, schema: str, records: int, faults: int = 1, destinations: int = 5
) -> Generator[tuple[StoreSpec, Planted]]:
    """Make a store with so many records, about three a message, and so many faults of each kind; drop it afterwards."""
    store = StoreSpec(url, schema=schema, endpoint=ENDPOINT)
    quoted = '"' + schema.replace('"', '""') + '"'
    with open_spec(store, create=True) as found:
        found.setup()
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"SET search_path = {quoted}".encode())
            fill(connection, 1, records // 3, destinations)
            yield store, _plant(connection, records // 3, faults)
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {quoted} CASCADE".encode())


def fill(connection: psycopg.Connection, first: int, last: int, destinations: int = 5) -> None:
    """Write what a service would have: scheduled at once, then delivered and handled in the order of due times."""
    start = f"'{NOW.isoformat()}'::timestamptz"
    kinds = {
        1: ("n", start),
        2: ("due", "due + random() * interval '40 ms'"),
        3: ("due", "due + interval '50 ms'"),
    }
    with connection.transaction():
        for kind, (order, at) in kinds.items():
            connection.execute(
                f"""
                INSERT INTO record (store_id, kind, message_id, destination, due, at)
                SELECT (SELECT store_id FROM store WHERE name = '{TABLE}'), {kind},
                    'message-' || n, 'queue-' || mod(n, {destinations:d}), due, {at}
                FROM (SELECT n, {start} + mod(n, 86400) * interval '1 second' AS due
                      FROM generate_series(%s::bigint, %s::bigint) AS n) AS m ORDER BY {order}""".encode(),
                (first, last),
            )


def _plant(connection: psycopg.Connection, messages: int, faults: int) -> Planted:
    planted = Planted(
        *(tuple(sorted(f"message-{messages * part // 10 + 1 + n}" for n in range(faults))) for part in (2, 4, 6, 8))
    )
    connection.execute("SET enable_seqscan = on")
    lost, duplicated, early, orphaned = map(list, planted)
    connection.execute("DELETE FROM record WHERE message_id = ANY(%s) AND kind > 1", (lost,))
    connection.execute(
        "INSERT INTO record (at, due, store_id, kind, message_id, destination) "
        "SELECT at + interval '1 second', due, store_id, kind, message_id, destination FROM record "
        "WHERE message_id = ANY(%s) AND kind = 2",
        (duplicated,),
    )
    connection.execute("UPDATE record SET at = due - interval '1 ms' WHERE message_id = ANY(%s) AND kind = 2", (early,))
    connection.execute("DELETE FROM record WHERE message_id = ANY(%s) AND kind = 1", (orphaned,))
    return planted


def _audit_next_day(spark: SparkSession, store: StoreSpec, options: argparse.Namespace) -> dict[str, object]:
    """Audit with a state, add records, and audit again; compare with an audit of everything."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        first = audited(spark, store, state)
        with psycopg.connect(options.url, autocommit=True) as connection:
            quoted = '"' + (store.schema or "").replace('"', '""') + '"'
            connection.execute(f"SET search_path = {quoted}".encode())
            begin = options.records // 3 + 1
            fill(connection, begin, begin + options.next_day // 3 - 1, options.destinations)
        second = audited(spark, store, state)
    whole = audited(spark, store)
    return {
        "first_seconds": round(first.took_seconds, 1),
        "next_day_seconds": round(second.took_seconds, 1),
        "whole_after_it_seconds": round(whole.took_seconds, 1),
        "next_day_findings": {finding.name: finding.sample for finding in second.findings},
        "next_day_equals_whole": (second.counts, second.by_destination, second.lateness)
        == (whole.counts, whole.by_destination, whole.lateness),
    }


def audited(spark: SparkSession, store: StoreSpec, state: Path | None = None) -> AuditResult:
    """Audit two days later; what a second delivery was late by is no finding."""
    return audit(spark, store, NOW + timedelta(days=2), late_after=timedelta(seconds=2), state=state)


class MemoryWatch:
    """The peak of the resident memory of this process and its descendants together, in MiB."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.peak_mib = max(self.peak_mib, _resident_mib(os.getpid()))


_LOOK_SECONDS = 0.1
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _resident_mib(root: int) -> float:
    """Add up the resident pages of a process and its descendants. Pages that forked workers share count once each."""
    parents, resident = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has just ended
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            resident[pid] = int((folder / "statm").read_text().split()[1]) * _PAGE_MIB
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(resident.get(pid, 0.0) for pid in family)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=5, help="of each kind")
    parser.add_argument("--destinations", type=int, default=5)
    parser.add_argument("--next-day", type=int, default=0, help="records of a second day, audited with a state")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--url", default=os.environ.get("POSTDATE_POSTGRES_URL"))
    options = parser.parse_args()
    if not options.url:
        parser.error("which server? --url, or POSTDATE_POSTGRES_URL")
    schema = f"planted_faults_{os.getpid()}"
    began = time.perf_counter()
    with planted_store(options.url, schema, options.records, options.faults, options.destinations) as (store, planted):
        filled = time.perf_counter() - began
        with spark_session("planted faults", cores=options.cores) as spark:
            spark.range(1).count()  # Spark's start is not the audit's
            with MemoryWatch() as memory:
                result = audited(spark, store)
                days = _audit_next_day(spark, store, options) if options.next_day else {}
    found = {finding.name: finding.sample for finding in result.findings}
    print(
        json.dumps(
            {
                "records": options.records,
                "planted": planted._asdict(),
                "found": found,
                "exactly": found == planted._asdict(),
                "counts": {key: value for key, value in result.to_json()["counts"].items() if value},
                "filled_seconds": round(filled, 1),
                "audit_seconds": round(result.took_seconds, 1),
                "peak_mib": round(memory.peak_mib),
                **days,
                "page_bytes": len(render_html(result).encode()),
                "at": SystemClock().now().isoformat(),
            },
            indent=2,
        )
    )
    return 0 if found == planted._asdict() else 1


if __name__ == "__main__":
    sys.exit(main())
