"""An audit reads several stores, archives and ledgers: an event counts once, whoever tells of it."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage, to_envelope
from postdate.pipeline.audit import AuditCounts, audit, endpoints_of
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Outcome

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
LEDGER = "kind string, message_id string, at timestamp, due timestamp, destination string, detail string"


def minutes(number: float) -> datetime:
    return START + timedelta(minutes=number)


def message(name: str, due: datetime = START, destination: str = "orders") -> DelayedMessage:
    return DelayedMessage(message_id=name, due=due, destination=destination)


def path_of(spec: StoreSpec) -> str:
    return spec.address.removeprefix("sqlite:///")


def live(spec: StoreSpec, story: Callable[[SqliteStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = SqliteStore(path_of(spec), synchronous="normal")
        try:
            await story(store)
        finally:
            await store.close()

    anyio.run(run)


def tamper(spec: StoreSpec, statement: str) -> None:
    with closing(sqlite3.connect(path_of(spec))) as connection:
        connection.executescript(statement)


async def dispatched(store: SqliteStore) -> None:
    """Three are sent to queues elsewhere; one of them fails, comes back, and is sent again; one waits."""
    await store.store_many([message("m-1"), message("m-2"), message("back"), message("waits", minutes(600))], START)
    claims = {claim.message.message_id: claim for claim in await store.claim_due(minutes(1), 10)}
    await store.finish([claims["m-1"], claims["m-2"]], Outcome.DELIVERED, minutes(1))
    await store.finish([claims["back"]], Outcome.FAILED, minutes(1), "no queue")
    await store.store(message("back", minutes(2)), minutes(2))
    await store.finish(await store.claim_due(minutes(3), 10), Outcome.DELIVERED, minutes(3))


def test_a_ledger_is_a_copy_and_what_it_has_alone_counts(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    live(store, dispatched)
    counts = AuditCounts(scheduled=4, delivered=3, pending=1)  # back is neither failed nor doubled
    ledger = tmp_path / "ledger"
    copies = [
        ("delivered", "m-1", minutes(1), START, "orders", None),
        ("delivered", "m-2", minutes(1), START, "orders", None),
        ("failed", "back", minutes(1), START, "orders", "no queue"),
    ]
    spark.createDataFrame(copies, LEDGER).write.parquet(str(ledger))
    with_copy = audit(spark, store, minutes(10), late_after=timedelta(hours=1), records=[ledger])
    assert (with_copy.counts, with_copy.records, with_copy.is_clean) == (counts, (str(ledger),), True)

    tamper(store, "DELETE FROM record WHERE kind = 2 AND message_id = 'm-1'")
    spark.createDataFrame(copies[1:2], LEDGER).write.mode("append").parquet(str(ledger))
    told_twice = audit(spark, store, minutes(10), late_after=timedelta(hours=1), records=[ledger])
    assert [(each.name, each.sample) for each in told_twice.findings] == [("duplicated", ("m-2",))]
    assert told_twice.counts == replace(counts, duplicated=1)  # that m-1 was delivered, the ledger alone says


def test_records_that_cannot_be_read_are_refused_before_any_work(spark: SparkSession, tmp_path: Path) -> None:
    missing_store = StoreSpec(f"sqlite:///{tmp_path / 'there is none.db'}")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "records.csv").write_text("kind,message_id\n")
    (tmp_path / "empty").mkdir()
    spark.createDataFrame([("delivered", "m-1")], "kind string, message_id string").write.parquet(
        str(tmp_path / "other")
    )
    no_zone = LEDGER.replace("at timestamp", "at timestamp_ntz")
    spark.createDataFrame([], no_zone).write.parquet(str(tmp_path / "no_zone"))
    for name, reason in {
        "nowhere": "no such folder",
        "empty": "the folder is empty",
        "text": "cannot be read as Parquet",
        "other": "no column 'at' among kind, message_id",
        "no_zone": "'at' is timestamp_ntz and not timestamp",
    }.items():
        with pytest.raises(PipelineError, match=reason):
            audit(spark, missing_store, START, records=[tmp_path / name])
    with pytest.raises(PipelineError, match="named twice"):
        audit(spark, missing_store, START, records=[tmp_path / "a", tmp_path / "a"])
    with pytest.raises(PipelineError, match="named twice"):
        audit(spark, [missing_store, missing_store], START)
    with pytest.raises(PipelineError, match="nothing to audit"):
        audit(spark, [], START)
    with pytest.raises(PipelineError, match="is there already"):
        audit(spark, missing_store, START, findings_to=tmp_path / "text")


@pytest.mark.soak(
    "one more audit of several endpoints",
    part="spark",
    proven_by="tests/integration/pipeline/test_audit_sources.py::test_all_endpoints_of_one_database",
)
def test_a_queue_in_the_file_of_another_endpoint(spark: SparkSession, tmp_path: Path) -> None:
    """What is handled there belongs to the store that the message was scheduled in, and to nobody's orphans."""
    sender = StoreSpec(f"sqlite:///{tmp_path / 'sender.db'}", synchronous="normal", endpoint="sender")
    receiver = StoreSpec(f"sqlite:///{tmp_path / 'receiver.db'}", synchronous="normal", endpoint="receiver")

    async def story() -> None:
        ours, theirs = (SqliteStore(path_of(spec), synchronous="normal") for spec in (sender, receiver))
        transport = LocalTransport(path_of(receiver), synchronous="normal")
        await transport.create_queues(["orders"])
        await ours.store_many([message("m-1"), message("m-2")], START)
        await theirs.store_many([message("own")], START)
        claims = await ours.claim_due(minutes(1), 10)
        await transport.send([to_envelope(claim.message) for claim in claims], minutes(1))
        await ours.finish(claims, Outcome.DELIVERED, minutes(1))
        await theirs.move_due(minutes(1), 10)
        hand = transport.receiver("orders")
        for received in await hand.receive(10):
            await hand.commit(received, minutes(2))
        await hand.close()
        await transport.close()
        await ours.close()
        await theirs.close()

    anyio.run(story)
    both = audit(spark, [sender, receiver], minutes(10), late_after=timedelta(hours=1))
    assert {row.key: (row.counts.scheduled, row.counts.handled) for row in both.by_endpoint} == {
        "receiver": (1, 1), "sender": (2, 2),
    }  # fmt: skip
    assert (both.is_clean, both.counts.orphaned) == (True, 0)
    alone = audit(spark, receiver, minutes(10), late_after=timedelta(hours=1))
    assert [(each.name, each.sample) for each in alone.findings] == [("orphaned", ("m-1", "m-2"))]


def test_all_endpoints_of_one_database(spark: SparkSession, postgres_url: str, tmp_path: Path) -> None:
    schema = fresh_schema()
    try:
        stores = [StoreSpec(postgres_url, schema=schema, endpoint=name) for name in ("sales", "billing")]
        for number, spec in enumerate(stores):
            with open_spec(spec, create=True) as store:
                store.setup()
                store.store_many([message(f"m-{n}", minutes(600)) for n in range(3 + number)], START)
        found = endpoints_of(stores[0])
        assert [(spec.endpoint, spec.table) for spec in found] == [
            ("billing", "billing.timeouts"), ("sales", "sales.timeouts"),
        ]  # fmt: skip
        folder = tmp_path / "findings.json"
        result = audit(spark, found, minutes(700), findings_to=folder)
        assert {row.key: (row.counts.pending, row.counts.overdue) for row in result.by_endpoint} == {
            "billing": (4, 4), "sales": (3, 3),
        }  # fmt: skip
        assert result.counts.scheduled == 7
        written = spark.read.json(str(folder)).select("finding", "endpoint", "message_id").collect()
        assert sorted(map(tuple, written))[3:5] == [("overdue", "billing", "m-3"), ("overdue", "sales", "m-0")]
        assert len(written) == 7
    finally:
        drop_schema(postgres_url, schema)
