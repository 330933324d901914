"""One fault of each kind among a million records in PostgreSQL: does the audit name exactly those messages?

    eval "$(scripts/services env --durable)"; .venv/bin/python benchmarks/planted_faults.py [--records 1000000]

The records are those of messages that were scheduled, delivered and handled, written by SQL in bulk into a schema of
their own, which is dropped afterwards. Then one message is lost, one delivered twice, one delivered early, and one has
never been scheduled. Prints what the audit found and how long it took, Spark's start apart; exit status 1 if it found
anything else.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import psycopg
from pyspark.sql import SparkSession

from postdate.clock import SystemClock
from postdate.pipeline.audit import AuditResult, audit
from postdate.pipeline.session import spark_session
from postdate.pipeline.stores import StoreSpec, open_spec

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ENDPOINT = "planted"
TABLE = f"{ENDPOINT}.timeouts"


class Planted(NamedTuple):
    """The ids of the four, by the name of the finding."""

    lost: str
    duplicated: str
    early: str
    orphaned: str


@contextmanager
def planted_store(url: str, schema: str, records: int) -> Generator[tuple[StoreSpec, Planted]]:
    """Make a store with so many records, about three a message, and the faults; drop it afterwards."""
    store = StoreSpec(url, schema=schema, endpoint=ENDPOINT)
    quoted = '"' + schema.replace('"', '""') + '"'
    with open_spec(store, create=True) as found:
        found.setup()
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"SET search_path = {quoted}".encode())
            _fill(connection, records // 3)
            yield store, _plant(connection, records // 3)
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {quoted} CASCADE".encode())


def _fill(connection: psycopg.Connection, messages: int) -> None:
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
                    'message-' || n, 'queue-' || mod(n, 5), due, {at}
                FROM (SELECT n, {start} + mod(n, 86400) * interval '1 second' AS due
                      FROM generate_series(1, %s) AS n) AS m ORDER BY {order}""".encode(),
                (messages,),
            )


def _plant(connection: psycopg.Connection, messages: int) -> Planted:
    planted = Planted(*(f"message-{messages * part // 10 + 1}" for part in (2, 4, 6, 8)))
    connection.execute("SET enable_seqscan = on")
    connection.execute("DELETE FROM record WHERE message_id = %s AND kind > 1", (planted.lost,))
    connection.execute(
        "INSERT INTO record (at, due, store_id, kind, message_id, destination) "
        "SELECT at + interval '1 second', due, store_id, kind, message_id, destination FROM record "
        "WHERE message_id = %s AND kind = 2",
        (planted.duplicated,),
    )
    connection.execute(
        "UPDATE record SET at = due - interval '1 ms' WHERE message_id = %s AND kind = 2", (planted.early,)
    )
    connection.execute("DELETE FROM record WHERE message_id = %s AND kind = 1", (planted.orphaned,))
    return planted


def audited(spark: SparkSession, store: StoreSpec) -> AuditResult:
    """Audit two days later; what a second delivery was late by is no finding."""
    return audit(spark, store, NOW + timedelta(days=2), late_after=timedelta(seconds=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--url", default=os.environ.get("POSTDATE_POSTGRES_URL"))
    options = parser.parse_args()
    if not options.url:
        parser.error("which server? --url, or POSTDATE_POSTGRES_URL")
    schema = f"planted_faults_{os.getpid()}"
    began = time.perf_counter()
    with planted_store(options.url, schema, options.records) as (store, planted):
        filled = time.perf_counter() - began
        with spark_session("planted faults", cores=options.cores) as spark:
            spark.range(1).count()  # Spark's start is not the audit's
            results = [audited(spark, store) for _ in range(2)]
    found = {finding.name: finding.sample for finding in results[0].findings}
    expected = {name: (id_,) for name, id_ in planted._asdict().items()}
    print(
        json.dumps(
            {
                "records": options.records,
                "planted": planted._asdict(),
                "found": found,
                "exactly": found == expected,
                "counts": {key: value for key, value in results[0].to_json()["counts"].items() if value},
                "filled_seconds": round(filled, 1),
                "audit_seconds": [round(result.took_seconds, 1) for result in results],
                "at": SystemClock().now().isoformat(),
            },
            indent=2,
        )
    )
    return 0 if found == expected else 1


if __name__ == "__main__":
    sys.exit(main())
