"""Sweeps that the drivers of these tests are asked for: plain values in, plain values out."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from postdate.clock import SystemClock
from postdate.pipeline.audit import audit
from postdate.pipeline.dispatching import SweepSpec
from postdate.pipeline.stores import StoreSpec
from postdate.pipeline.sweep import sweep, sweep_continuously

PENDING = 'SELECT count(*) FROM postdate."postdate.timeouts"'


def sweep_once(spark: SparkSession, store: str, transport: str, slots: int) -> dict[str, Any]:
    """Sweep what is due; return the counts."""
    return asdict(sweep(spark, _spec(store, transport), slots=slots))


def sweep_until_nothing_waits(spark: SparkSession, store: str, transport: str, checkpoint: str, ledger: str) -> int:
    """Sweep continuously until the store is empty; return how many micro-batches it took."""
    settings: dict[str, Any] = {"checkpoint": checkpoint, "ledger": ledger, "slots": 2}
    with (
        sweep_continuously(spark, _spec(store, transport), **settings, residency=timedelta(seconds=1)) as query,
        psycopg.connect(store, autocommit=True) as connection,
    ):
        while connection.execute(PENDING.encode()).fetchall()[0][0]:
            query.wait(0.1)
        return len(query.query.recentProgress)


def audit_with_ledger(spark: SparkSession, store: str, ledger: str) -> dict[str, Any]:
    """Audit the store and the ledger; return the whole result."""
    return audit(spark, StoreSpec(store), SystemClock().now(), records=[ledger]).to_json()


def _spec(store: str, transport: str) -> SweepSpec:
    return SweepSpec(StoreSpec(store), transport)
