"""A store whose records a lake has: what is stored, delivered and pruned, and how both are read without Spark."""

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from postdate.errors import PostdateError
from postdate.messages import DelayedMessage
from postdate.pipeline.history import write_history
from postdate.pipeline.history.job import read_positions
from postdate.pipeline.history.lake import COLUMNS
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec
from postdate.ports import Outcome, PrunableStore, RecordKind, Scan

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)


def add(spec: StoreSpec, *message_ids: str, due: datetime = NOW + 99 * DAY, now: datetime = NOW) -> None:
    with open_spec(spec) as store:
        store.store_many([DelayedMessage(each, due, "orders") for each in message_ids], now)


def deliver(spec: StoreSpec, now: datetime = NOW) -> None:
    """Deliver everything that is due."""

    async def claim_and_finish(store: Any) -> None:
        await store.finish(await store.claim_due(now + SECOND, 1_000), Outcome.DELIVERED, now, "a 'detail'")

    with open_spec(spec) as store:
        store.call(claim_and_finish)


def stored_records(spec: StoreSpec) -> dict[int, tuple[Any, ...]]:
    """Return the records of the store by number, with times in microseconds."""
    with open_spec(spec) as store:
        scannable = store.require_scannable()
        scan = Scan("records", COLUMNS)
        rows = [row for part in scannable.scan_parts("records", 2) for row in _read(store, scan, part)]
    return {row[0]: tuple(row) for row in rows if row[1] != 11}


def _read(store: OpenStore, scan: Scan, part: Any) -> list[tuple[Any, ...]]:
    return [row for page in store.scan_pages(scan, part) for row in page]


def lake_records(lake: Path) -> dict[int, tuple[Any, ...]]:
    """Return the records in a lake by number, as a reader that knows nothing of Spark sees them."""
    table = ds.dataset(lake, format="parquet", partitioning="hive", exclude_invalid_files=True).to_table()
    found = dict[int, tuple[Any, ...]]()
    for row in table.to_pylist():
        at, due = (None if row[name] is None else round(row[name].timestamp() * 1_000_000) for name in ("at", "due"))
        kind = int(RecordKind[row["kind"].upper()])
        assert row["number"] not in found, "a record is in the lake twice"
        assert str(row["day"]) == row["at"].date().isoformat()
        found[row["number"]] = (row["number"], kind, row["message_id"], at, due, row["destination"], row["detail"])
    return found


def prune_all(spec: StoreSpec, before: datetime) -> int:
    """Remove the records of messages that are over, as a service with this retention does."""
    with open_spec(spec) as store:
        prunable = store.require_scannable()
        assert isinstance(prunable, PrunableStore)
        return sum(prunable.prune_before(part, before, before) for part in prunable.scan_parts("records", 1))


def batches(lake: Path) -> list[str]:
    return sorted(each.name for each in lake.glob("batch=*"))


def position(spec: StoreSpec) -> int:
    (only,) = read_positions(spec)
    return only.number


def follow(
    spark: SparkSession, address: str, schema: str | None, lake: str, stop: str, rows_per_batch: int = 20
) -> int:
    """Follow the records until the file ``stop`` is there, over outages of the store. Return the number of outages.

    This runs in a driver of its own, which tests kill. The last error is in the file ``stop`` with ``.error``.
    """
    spec = StoreSpec(address, synchronous="normal", schema=schema, patience=timedelta(0))
    outages, pause = 0, threading.Event()
    while not Path(stop).exists():
        try:
            write_history(spark, spec, lake, rows_per_batch=rows_per_batch)
        except PostdateError as error:
            outages += 1
            Path(f"{stop}.error").write_text(str(error))
        pause.wait(0.1)
    return outages
