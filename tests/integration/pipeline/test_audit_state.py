"""An audit that carries a state finds what a whole audit finds, reads only what is new, and survives a kill."""

import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession

from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.audit import BROKEN_PROMISES, AuditResult, audit, reading
from postdate.pipeline.audit.state import AuditState
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Outcome

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATE_AFTER = timedelta(minutes=5)


def minutes(number: float) -> datetime:
    return START + timedelta(minutes=number)


def message(name: str, due: datetime, destination: str = "orders") -> DelayedMessage:
    return DelayedMessage(message_id=name, due=due, destination=destination)


def path_of(spec: StoreSpec) -> str:
    return spec.address.removeprefix("sqlite:///")


def live(spec: StoreSpec, story: Callable[[SqliteStore, LocalTransport], Awaitable[None]]) -> None:
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


def tamper(spec: StoreSpec, *statements: str) -> None:
    with closing(sqlite3.connect(path_of(spec))) as connection:
        for statement in statements:
            connection.executescript(statement)


async def handle(transport: LocalTransport, queue: str, number: int, at: datetime) -> None:
    receiver = transport.receiver(queue)
    for received in await receiver.receive(number):
        await receiver.commit(received, at)
    await receiver.close()


async def first_day(store: SqliteStore, transport: LocalTransport) -> None:
    """Four are delivered, of which three are handled; one fails, one is cancelled, and five wait."""
    await store.store_many([message(f"a-{n}", minutes(n)) for n in range(4)], START)
    await store.store_many([message(f"w-{n}", minutes(100 + n), "mails") for n in range(5)], START)
    await store.store_many([message("fails", minutes(1)), message("gone", minutes(50))], START)
    await store.cancel("gone", minutes(1))
    (claim,) = [each for each in await store.claim_due(minutes(4), 10) if each.message.message_id == "fails"]
    await store.finish([claim], Outcome.FAILED, minutes(4), "no queue")


async def deliver_the_rest(store: SqliteStore, transport: LocalTransport) -> None:
    await store.move_due(minutes(40), 100)
    await handle(transport, "orders", 3, minutes(41))


async def second_day(store: SqliteStore, transport: LocalTransport) -> None:
    """The last of yesterday is handled, what failed comes back, what waited is delivered, and two are new."""
    await handle(transport, "orders", 5, minutes(70))
    await store.store_many(
        [message("fails", minutes(71)), message("new", minutes(90)), message("n-2", minutes(900))], minutes(70)
    )
    await store.move_due(minutes(110), 100)
    await handle(transport, "mails", 4, minutes(111))


DELIVER_TWICE = """
    INSERT INTO record (kind, message_id, at, due, destination)
    SELECT kind, message_id, at + 60000000, due, destination FROM record WHERE kind = 2 AND message_id = 'a-1'"""
LOSE = "DELETE FROM delayed_message WHERE message_id = 'n-2'"
ORPHAN = "INSERT INTO record (kind, message_id, at, due, destination) VALUES (2, 'orphan', 1, 1, 'orders')"


def content(result: AuditResult) -> dict[str, object]:
    """Return what two audits of one store must have in common."""
    return {
        "counts": result.counts, "lateness": result.lateness, "destinations": result.by_destination,
        "hours": result.by_hour, "endpoints": result.by_endpoint, "bins": result.lateness_bins,
        "due": sum(point.due for point in result.curve), "delivered": sum(point.delivered for point in result.curve),
    }  # fmt: skip


def test_two_days_with_a_state_are_a_whole_audit(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    live(store, first_day)
    live(store, deliver_the_rest)
    first = audit(spark, store, minutes(60), late_after=LATE_AFTER, state=state)
    assert content(first) == content(audit(spark, store, minutes(60), late_after=LATE_AFTER))
    assert (first.is_clean, first.since, first.state) == (True, None, str(state))

    live(store, second_day)
    # A second delivery of a message that had ended long ago, a message that is gone, and one from nowhere.
    tamper(store, DELIVER_TWICE, LOSE, ORPHAN)
    position = AuditState(spark, state).commit_read.position
    ranges = list[tuple[int, int]]()
    read_ranges = reading._stream_records
    monkeypatch.setattr(
        reading, "_stream_records", lambda session, spec, read: ranges.extend(read) or read_ranges(session, spec, read)
    )
    monkeypatch.setattr(reading, "_SCANNED_SHARE", 0)
    second = audit(spark, store, minutes(120), late_after=LATE_AFTER, state=state)
    assert min(first for first, _ in ranges) == position
    whole = audit(spark, store, minutes(120), late_after=LATE_AFTER)
    assert content(second) == content(whole)
    found = {finding.name: finding.sample for finding in second.findings}
    assert found["duplicated"] == ("a-1",)
    assert found["lost"] == ("n-2",)
    assert found["orphaned"] == ("orphan",)
    assert second.since == minutes(60)

    third = audit(spark, store, minutes(130), late_after=LATE_AFTER, state=state)
    assert third.counts == second.counts
    # Of the broken promises only the message that is still lost is found again.
    found = {finding.name: finding.sample for finding in third.findings}
    assert {name: found.get(name) for name in BROKEN_PROMISES} == {
        "lost": ("n-2",), "duplicated": None, "early": None, "orphaned": None,
    }  # fmt: skip


def test_a_run_that_ends_before_its_commit_changes_nothing(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    live(store, first_day)
    audit(spark, store, minutes(60), state=state)
    live(store, deliver_the_rest)
    before, backup = AuditState(spark, state).commit_read, tmp_path / "backup"
    shutil.copytree(state, backup)
    complete = audit(spark, store, minutes(61), state=state)
    (data,) = [each for each in (state / "data").iterdir() if each.name.startswith("2-")]
    # What a killed run leaves: some of its data, and no commit, or one that Spark has not moved into place.
    shutil.copytree(data / "open", backup / "data" / data.name / "open")
    shutil.copytree(state / "commits" / data.name, backup / "commits" / data.name / "_temporary" / "0")
    assert AuditState(spark, backup).commit_read == before
    again = audit(spark, store, minutes(61), state=backup)
    assert content(again) == content(complete)
    assert AuditState(spark, backup).commit_read.version == 2


def test_a_lost_message_stays_lost_when_retention_has_removed_its_records(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    live(store, first_day)
    tamper(store, "DELETE FROM delayed_message WHERE message_id = 'w-1'")
    first = audit(spark, store, minutes(60), state=tmp_path / "state")
    assert (first.counts.lost, first.is_clean) == (1, False)
    tamper(store, "DELETE FROM record WHERE message_id = 'w-1'")  # as retention does, weeks later
    again = audit(spark, store, minutes(70), state=tmp_path / "state")
    assert again.counts == first.counts


def test_a_page_that_cannot_be_written_leaves_the_findings_to_the_next_run(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    live(store, first_day)

    def refuse(result: AuditResult) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        audit(spark, store, minutes(60), state=tmp_path / "state", publish=refuse)
    assert AuditState(spark, tmp_path / "state").commit_read.version == 0


def test_a_state_goes_on_with_its_own_allowance_and_keeps_one_commit(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    live(store, first_day)
    for day in (60, 70):
        audit(spark, store, minutes(day), state=tmp_path / "state")
        (tmp_path / "state" / "data" / ".DS_Store").touch()
    assert len(list((tmp_path / "state" / "commits").iterdir())) == 1
    with pytest.raises(PipelineError, match=r"later than 1 s, not 10 s; give --late-after 1s, or a new folder"):
        audit(spark, store, minutes(80), late_after=timedelta(seconds=10), state=tmp_path / "state")


def test_a_state_is_on_this_machine_whatever_the_default_file_system_is(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    live(store, first_day)
    spark.conf.set("fs.defaultFS", "hdfs://127.0.0.1:1")
    try:
        for day in (60, 70):
            audit(spark, store, minutes(day), state=tmp_path / "state")
    finally:
        spark.conf.unset("fs.defaultFS")
    assert AuditState(spark, tmp_path / "state").commit_read.version == 2


def test_a_state_of_another_store_is_refused(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    other = StoreSpec(f"sqlite:///{tmp_path / 'other.db'}", synchronous="normal")
    for spec in (store, other):
        live(spec, first_day)
    audit(spark, store, minutes(60), state=tmp_path / "state")
    with pytest.raises(PipelineError, match="is of another store"):
        audit(spark, other, minutes(60), state=tmp_path / "state")
    tamper(store, "UPDATE record SET message_id = 'other' WHERE seq = (SELECT max(seq) FROM record)")
    with pytest.raises(PipelineError, match=r"number \d+ is another record now"):
        audit(spark, store, minutes(60), state=tmp_path / "state")
    tamper(store, "DELETE FROM record")
    with pytest.raises(PipelineError, match="the store has none so high"):
        audit(spark, store, minutes(60), state=tmp_path / "state")
    with pytest.raises(PipelineError, match="a state is of one store"):
        audit(spark, [store, other], minutes(60), state=tmp_path / "both")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(PipelineError, match="is not the folder of an audit's state"):
        audit(spark, store, minutes(60), state=tmp_path / "full")
    with pytest.raises(PipelineError, match=r"no folder .* for the state"):
        audit(spark, store, minutes(60), state=tmp_path / "none" / "state")
