"""The audit finds what is wrong, and nothing else; its report is complete and fetches nothing."""

import re
import sqlite3
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from pyspark.sql import SparkSession
from tests.waiting import until

from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.messages import DelayedMessage
from postdate.pipeline.audit import AuditCounts, AuditResult, Lateness, audit
from postdate.pipeline.report import render_html
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Outcome, ScanPart

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def minutes(number: float) -> datetime:
    return START + timedelta(minutes=number)


def message(
    name: str, due: datetime, destination: str = "orders", expires_at: datetime | None = None
) -> DelayedMessage:
    return DelayedMessage(message_id=name, due=due, destination=destination, expires_at=expires_at)


def path_of(spec: StoreSpec) -> str:
    return spec.address.removeprefix("sqlite:///")


def live(spec: StoreSpec, story: Callable[[SqliteStore, LocalTransport], Awaitable[None]]) -> None:
    """Tell a story on a store and the queues beside it."""

    async def run() -> None:
        store = SqliteStore(path_of(spec), synchronous="normal")
        transport = LocalTransport(path_of(spec), synchronous="normal")
        try:
            await transport.create_queues(["orders", "mails"])
            await story(store, transport)
        finally:
            await transport.close()
            await store.close()

    anyio.run(run)


async def handle(transport: LocalTransport, queue: str, number: int) -> None:
    receiver = transport.receiver(queue)
    for received in await receiver.receive(number):
        await receiver.commit(received, minutes(30))
    await receiver.close()


def tamper(spec: StoreSpec, *statements: str) -> None:
    """Do what no store does."""
    connection = sqlite3.connect(path_of(spec))
    for statement in statements:
        connection.executescript(statement)
    connection.close()


async def a_day(store: SqliteStore, transport: LocalTransport) -> None:
    await store.store_many(
        [
            *(message(f"on-time-{n}", minutes(n)) for n in range(10)),
            message("expires", minutes(1), expires_at=minutes(2)),
            message("cancelled", minutes(50)),
            message("fails", minutes(3), "nowhere"),
            message("mail", minutes(4), "mails"),
            message("waits", minutes(600)),
            message("overdue", minutes(59)),
        ],
        START,
    )
    await store.cancel("cancelled", minutes(0))
    await store.move_due(minutes(10), 100)
    (claim,) = await store.claim_due(minutes(10), 10)
    await store.retry_later(claim, minutes(11), minutes(10), "no queue")
    claims = await store.claim_due(minutes(12), 10)
    await store.finish(claims, Outcome.FAILED, minutes(12), "no queue")
    await handle(transport, "orders", 6)


def test_a_day_is_counted(spark: SparkSession, store: StoreSpec) -> None:
    live(store, a_day)
    result = audit(spark, store, minutes(60), late_after=timedelta(minutes=5))
    assert result.counts == AuditCounts(
        scheduled=16, delivered=11, handled=6, queued=5, pending=2, overdue=1, expired=1, cancelled=1, failed=1,
        retried=1, late=6,
    )  # fmt: skip
    assert result.is_clean
    assert result.lateness == Lateness(360.0, 600.0, 600.0, 600.0)
    assert {row.key: row.counts.scheduled for row in result.by_destination} == {"mails": 1, "nowhere": 1, "orders": 14}
    assert [(row.key, row.counts.scheduled) for row in result.by_hour] == [
        ("2026-03-01T12:00Z", 15),
        ("2026-03-01T22:00Z", 1),
    ]
    found = [(finding.name, finding.count) for finding in result.findings]
    assert found == [("overdue", 1), ("failed", 1), ("late", 6)]
    assert sum(point.due for point in result.curve) == 16
    assert sum(point.delivered for point in result.curve) == 11
    assert sum(each.count for each in result.lateness_bins) == 11


DELIVER_TWICE = """
    INSERT INTO record (kind, message_id, at, due, destination)
    SELECT kind, message_id, at, due, destination FROM record WHERE kind = 2 AND message_id = 'on-time-1'"""
KEEP_WHAT_WAS_DELIVERED = """
    INSERT OR IGNORE INTO content SELECT seq, '{}', x'' FROM record WHERE kind = 1;
    INSERT INTO delayed_message (seq, message_id, due, attempt_at, destination, content)
    SELECT seq, message_id, due, due, destination, seq FROM record WHERE kind = 1 AND message_id = 'on-time-2'"""


TAKE_AWAY_AND_RENAME = """
    DELETE FROM delayed_message WHERE message_id = 'waits';
    UPDATE record SET message_id = '<script>x</script>' WHERE kind = 1 AND message_id = 'waits'"""


CRIMES = {
    "lost": (
        ("<script>x</script>", TAKE_AWAY_AND_RENAME),
        ("on-time-9", "DELETE FROM queue_message WHERE message_id = 'on-time-9'"),
    ),
    "duplicated": (("on-time-1", DELIVER_TWICE), ("on-time-2", KEEP_WHAT_WAS_DELIVERED)),
    "early": (("on-time-3", "UPDATE record SET at = due - 1 WHERE kind = 2 AND message_id = 'on-time-3'"),),
}


@pytest.fixture(scope="module")
def convicted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    """Five crimes in one store, on five messages."""
    store = StoreSpec(f"sqlite:///{tmp_path_factory.mktemp('crimes') / 'messages.db'}", synchronous="normal")
    live(store, a_day)
    tamper(store, *(statement for crimes in CRIMES.values() for _, statement in crimes))
    return audit(spark, store, minutes(60))


def test_each_crime_is_found_and_nothing_else(convicted: AuditResult) -> None:
    assert not convicted.is_clean
    found = {finding.name: finding.sample for finding in convicted.findings}
    assert {name: found.pop(name) for name in CRIMES} == {
        name: tuple(sorted(victim for victim, _ in crimes)) for name, crimes in CRIMES.items()
    }
    assert found.keys() <= {"overdue", "failed", "late"}
    assert {name: getattr(convicted.counts, name) for name in CRIMES} == {"lost": 2, "duplicated": 2, "early": 1}


def test_a_rescheduled_message_is_judged_by_its_last_due_time(spark: SparkSession, store: StoreSpec) -> None:
    async def story(adapter: SqliteStore, _: LocalTransport) -> None:
        await adapter.store_many([message("moved", minutes(1))], START)
        await adapter.reschedule("moved", minutes(5), minutes(0))
        await adapter.move_due(minutes(6), 10)

    live(store, story)
    result = audit(spark, store, minutes(60), late_after=timedelta(minutes=2))
    assert (result.counts.delivered, result.counts.late, result.lateness.max_seconds) == (1, 0, 60.0)


def test_what_was_removed_for_its_age_still_adds_up(spark: SparkSession, store: StoreSpec) -> None:
    """Of one message the end is gone, and of others all: none is missed, and the numbers of both are there."""

    async def story(adapter: SqliteStore, _: LocalTransport) -> None:
        await adapter.store_many([message(f"old-{n}", minutes(1)) for n in range(5)], START)
        await adapter.move_due(minutes(2), 10)
        await adapter.store_many([message("new", minutes(50))], minutes(50))
        (whole,) = adapter.scan_parts("records", 1)
        adapter.prune_before(ScanPart(2, whole.end), minutes(40), minutes(50))

    live(store, story)
    result = audit(spark, store, minutes(60))
    assert result.is_clean
    assert (result.counts.scheduled, result.counts.pending) == (2, 1)
    assert result.pruned == {"scheduled": 4, "delivered": 5}
    assert result.pruned_before == minutes(40)
    assert ("pruned: delivered", "5") in result.table()
    assert result.to_json()["pruned"] == result.pruned


def test_an_empty_store_has_nothing_to_audit(spark: SparkSession, store: StoreSpec) -> None:
    async def nothing(adapter: SqliteStore, _: LocalTransport) -> None:
        await adapter.setup()

    live(store, nothing)
    result = audit(spark, store, minutes(60))
    assert (result.counts, result.curve, result.findings) == (AuditCounts(), (), ())
    assert "nothing to audit" in render_html(result)


@pytest.mark.soak(
    "a store is worked on beside two audits",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_audit_live.py::test_a_low_number_that_is_committed_late_in_postgresql",
        "tests/integration/pipeline/test_audit_live.py::test_a_low_number_that_is_committed_late_in_mariadb",
    ),
)
def test_a_store_in_use_loses_nothing_to_the_audit(spark: SparkSession, store: StoreSpec) -> None:
    """Messages are stored, moved and handled from beginning to end of an audit, which must not take that for a loss."""
    done, number = anyio.Event(), 0

    async def work() -> None:
        adapter = SqliteStore(path_of(store), synchronous="normal")
        transport = LocalTransport(path_of(store), synchronous="normal")
        await transport.create_queues(["orders"])
        nonlocal number
        while not done.is_set():
            await adapter.store_many([message(f"m{number}-{n}", START) for n in range(20)], START)
            await adapter.move_due(minutes(1), 10)
            await handle(transport, "orders", 5)
            number += 1
            await anyio.lowlevel.checkpoint()
        await transport.close()
        await adapter.close()

    results: list[AuditResult] = []

    async def watch() -> None:
        for _ in range(2):
            begun = number
            await until(lambda: number >= begun + 2)  # noqa: B023 - asked in this round only
            results.append(await anyio.to_thread.run_sync(lambda: audit(spark, store, minutes(60))))
        done.set()

    async def both() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            group.start_soon(watch)

    live(store, a_day)
    anyio.run(both)
    assert [result.is_clean for result in results] == [True, True]
    assert 0 < results[0].counts.scheduled < results[1].counts.scheduled


def test_the_report_is_complete_and_fetches_nothing(convicted: AuditResult) -> None:
    page = render_html(convicted, "A day & a night")
    assert "A day &amp; a night" in page
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "<script" not in page
    fetched = re.findall(r'(?:src|href)="(?!#)([^"]*)"|url\((?!#)([^)]*)\)|@import', page)
    assert fetched == []
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
