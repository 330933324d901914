"""Timeouts move from an upstream table into a store: previewed, whole, once; resumed or aborted at any point."""

import sqlite3
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import SparkSession
from tests.integration.migration_places import NEXT_YEAR, PostgresPlace, Row, hours
from tests.integration.pipeline.old_timeouts import OldFile, by_id, ids, messages

from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.backends.sqlite.store import SqliteStore
from postdate.clock import SystemClock
from postdate.errors import MigrationConflict, PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.migrate import MigrateJob, OriginSpec, abort, migrate, preview, resume, status
from postdate.pipeline.migrate import job as migrating
from postdate.pipeline.migrate.ends import open_target
from postdate.pipeline.migrate.moving import BatchTask, move_batch
from postdate.pipeline.migrate.verifying import verify_batch
from postdate.pipeline.rows import to_columns
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import MessageFilter, Outcome
from postdate.ports.migrating import BatchStatus, MigrationRun, MigrationStatus

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)


@pytest.fixture
def old(tmp_path: Path) -> OldFile:
    """A timeout manager's file without any table."""
    return OldFile(tmp_path / "old.db")


@pytest.fixture
def target(store: StoreSpec) -> StoreSpec:
    """A store that is set up, with a queue ``orders`` beside it."""
    with open_spec(store, create=True) as created:
        created.setup()
    return store


@pytest.fixture
def job(old: OldFile, target: StoreSpec) -> MigrateJob:
    return MigrateJob(old.origin, target, ("billing",), batch_size=10)


def waiting(spec: StoreSpec) -> list[DelayedMessage]:
    """Return what waits in a store in a file."""

    async def listed() -> list[DelayedMessage]:
        store = SqliteStore(spec.address.removeprefix("sqlite:///"), synchronous="normal")
        try:
            return list(await store.list_pending(MessageFilter(), 100_000))
        finally:
            await store.close()

    return anyio.run(listed)


def deliver(spec: StoreSpec, until: datetime) -> list[str]:
    """Deliver what is due then; return the ids."""

    async def delivered() -> list[str]:
        store = SqliteStore(spec.address.removeprefix("sqlite:///"), synchronous="normal")
        try:
            claims = await store.claim_due(until, 100_000)
            await store.finish(claims, Outcome.DELIVERED, until)
            return [claim.message.message_id for claim in claims]
        finally:
            await store.close()

    return anyio.run(delivered)


def begun(job: MigrateJob, source: MigrationSource, *, batches: int) -> MigrationRun:
    """Begin a run as the job does, and hide some batches, as if it had been killed then."""
    now = SystemClock().now()
    run = MigrationRun(uuid.uuid4().hex, "billing", MigrationStatus.PREPARING, dict(job.parameters), job.cutoff, now)
    source.start_run(run)
    assert len(source.hide(run, job.batch_size, batches, job.margin)) == batches
    return run


# --- row 115 ----------------------------------------------------------------------------------------------------------


def test_row_115_a_preview_says_what_would_move_and_changes_nothing(old: OldFile, target: StoreSpec) -> None:
    now = SystemClock().now()
    soon, far = messages(3, now + timedelta(hours=1)), messages(5, now + 10 * DAY, "invoices")
    old.add("billing", [*soon, *far])
    old.add("shipping", messages(2, now + DAY))
    old.spoil("shipping", old.seen("shipping")[0])
    before = old.dump()

    found = preview(MigrateJob(old.origin, target, None, now + 2 * timedelta(hours=1)), now)
    billing, shipping = found.endpoints
    assert (billing.endpoint, billing.count, billing.left) == ("billing", 5, 3)
    assert (billing.earliest, billing.latest) == (far[0].due, far[-1].due)
    assert (dict(billing.destinations), billing.problems, billing.warnings) == ({"invoices": 5}, (), ())
    assert "headers that are not a JSON object" in shipping.problems[0]
    assert not found.is_possible
    (everything,) = preview(MigrateJob(old.origin, target, ("BILLING",)), now).endpoints
    assert (everything.count, everything.left) == (8, 0)
    assert everything.warnings[0].startswith("the earliest is due in 60 min 0 s: what is due within 60 s")
    assert (old.dump(), waiting(target)) == (before, [])


def test_row_115_chosen_endpoints_move_whole_and_what_is_before_the_cutoff_stays(
    spark: SparkSession, old: OldFile, target: StoreSpec
) -> None:
    now = SystemClock().now()
    early, late, others = messages(5, now + DAY), messages(57, now + 2 * DAY), messages(4)
    in_hand = messages(2, now + timedelta(seconds=5))
    old.add("billing", [*early, *late, *in_hand])
    old.add("shipping", others)
    job = MigrateJob(old.origin, target, ("Billing",), late[0].due, batch_size=10)

    result = migrate(spark, job)
    (found,) = result.endpoints
    assert (found.messages, found.moved, found.verified, found.status) == (57, 57, 57, "completed")
    assert (result.is_complete, found.mismatched, found.refused, found.already_there) == (True, 0, 0, 0)
    assert by_id(waiting(target)) == by_id(late)
    assert old.seen("billing") == sorted([*ids(early), *ids(in_hand)])
    assert old.seen("shipping") == ids(others)
    (run,) = status(old.origin).runs
    assert (run.run.status, run.run.cutoff) == (MigrationStatus.COMPLETED, late[0].due)
    assert (run.batches[BatchStatus.COMPLETED], run.messages[BatchStatus.COMPLETED]) == (6, 57)

    again = migrate(spark, replace(job, endpoints=None, cutoff=now))
    assert [(each.endpoint, each.moved) for each in again.endpoints] == [("billing", 5), ("shipping", 4)]
    # What is due within the margin is in the hands of the old manager.
    assert old.seen("billing") == ids(in_hand)
    assert by_id(waiting(target)) == by_id([*early, *late, *others])
    (nothing, _) = migrate(spark, replace(job, endpoints=None, cutoff=now + 9 * DAY)).endpoints
    assert (nothing.run_id, nothing.status, nothing.moved) == (None, "nothing to move", 0)


def test_row_115_all_that_is_chosen_is_checked_before_any_of_it_moves(
    spark: SparkSession, old: OldFile, target: StoreSpec
) -> None:
    old.add("billing", messages(3))
    old.add("shipping", messages(3))
    old.spoil("shipping", old.seen("shipping")[1])
    before = old.rows("billing"), old.rows("shipping")
    with pytest.raises(PipelineError, match=r"nothing new is moved, for shipping: 1 with headers"):
        migrate(spark, MigrateJob(old.origin, target))
    with pytest.raises(PipelineError, match=r"no endpoint 'nobody' owns messages there; it has billing, shipping"):
        migrate(spark, MigrateJob(old.origin, target, ("nobody",)))
    assert (old.rows("billing"), old.rows("shipping")) == before
    assert (status(old.origin).runs, waiting(target)) == ((), [])


def left_in_the_middle(job: MigrateJob, old: OldFile, found: list[DelayedMessage]) -> None:
    """Leave a run as one that was killed may: a batch of each kind, and more that is not hidden."""
    old.add("billing", found)
    with job.origin.open() as source, open_target(job.target) as store:
        run = begun(job, source, batches=5)
        pending, staged, stored, delivered, completed = 1, 2, 3, 4, 5
        for number in (staged, stored, delivered):
            assert source.advance(run, number, BatchStatus.PENDING, BatchStatus.STAGED)
        for number in (stored, delivered):
            store.store_batch(to_columns(source.read_batch(run, number)), SystemClock().now())
        move_batch(source, store, run, BatchTask(run.run_id, completed, 10))
        assert [batch.number for batch in source.batches(run) if not batch.status] == [pending]
    fourth = sorted(found, key=lambda message: message.due)[30:40]

    async def service() -> None:
        sqlite = SqliteStore(job.target.address.removeprefix("sqlite:///"), synchronous="normal")
        claims = await sqlite.claim_due(fourth[-1].due + timedelta(microseconds=1), 100)
        theirs = [claim for claim in claims if claim.message.message_id in ids(fourth)]
        assert await sqlite.finish(theirs[1:], Outcome.DELIVERED, SystemClock().now()) == 9
        # It went to the error queue: stored again, it would come back from there.
        assert await sqlite.finish(theirs[:1], Outcome.FAILED, SystemClock().now()) == 1
        await sqlite.close()

    anyio.run(service)


def test_row_115_a_run_that_was_killed_goes_on_with_equal_parameters_only(
    spark: SparkSession, old: OldFile, job: MigrateJob, tmp_path: Path
) -> None:
    found = messages(73)
    left_in_the_middle(job, old, found)
    with pytest.raises(
        MigrationConflict, match=r"cutoff 1970-01-01T00:00:00\+00:00.*cutoff 2026-01-01T12:00:00\.5"
    ) as refused:
        migrate(spark, replace(job, cutoff=datetime(2026, 1, 1, 12, 0, 0, 500_000, UTC)))
    assert job.target.address in str(refused.value)
    elsewhere = StoreSpec(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    for act in (lambda: resume(spark, replace(job, target=elsewhere)), lambda: abort(replace(job, target=elsewhere))):
        with pytest.raises(MigrationConflict, match=r"elsewhere\.db"):
            act()
    assert old.batches() == [0, 1, 1, 1, 2]

    (result,) = resume(spark, replace(job, endpoints=None)).endpoints
    assert (result.moved, result.verified, result.delivered_meanwhile) == (73, 63, 10)
    assert (result.mismatched, result.status, old.seen("billing")) == (0, "completed", [])
    in_order = sorted(found, key=lambda message: message.due)
    assert by_id(waiting(job.target)) == by_id([*in_order[:30], *in_order[40:]])
    with pytest.raises(PipelineError, match="no migration is on its way"):
        resume(spark, job)


def test_row_115_an_abort_gives_back_what_the_target_cannot_have_and_finishes_the_rest(
    old: OldFile, job: MigrateJob
) -> None:
    found = messages(73)
    left_in_the_middle(job, old, found)
    (result,) = abort(job).endpoints
    assert (result.status, result.returned, result.moved) == ("aborted", 10, 40)
    assert (result.verified, result.delivered_meanwhile, result.is_exact) == (30, 10, True)
    in_order = sorted(found, key=lambda message: message.due)
    assert old.seen("billing") == ids([*in_order[:10], *in_order[50:]])
    assert by_id(waiting(job.target)) == by_id([*in_order[10:30], *in_order[40:50]])
    assert status(old.origin).runs[0].run.status is MigrationStatus.ABORTED
    with pytest.raises(PipelineError, match="no migration is on its way"):
        abort(job)


def test_row_115_what_the_target_has_otherwise_is_named_and_the_run_is_not_done(
    spark: SparkSession, old: OldFile, job: MigrateJob
) -> None:
    """Whatever is wrong: another message has the id, or somebody has changed or removed one that was stored."""
    found = messages(30)
    old.add("billing", found)
    with open_spec(job.target) as store:
        store.store_many([replace(found[0], body=b"another"), replace(found[1], due=found[1].due + DAY)], found[0].due)
    result = migrate(spark, job)
    (billing,) = result.endpoints
    assert (billing.moved, billing.already_there, billing.verified, billing.mismatched) == (30, 2, 28, 2)
    said = {difference.message_id: difference.what for difference in billing.differences}
    assert said == {found[0].message_id: "body", found[1].message_id: "due"}
    assert (result.is_complete, billing.status) == (False, "prepared")
    assert not resume(spark, job).is_complete


@pytest.mark.parametrize("size", [20, 120], ids=["looked up one by one", "scanned"])
def test_row_115_a_batch_is_compared_with_what_became_of_each_message(old: OldFile, job: MigrateJob, size: int) -> None:
    found = messages(size)
    old.add("billing", found)
    delivered, cancelled, later, other, removed = (each.message_id for each in found[:5])
    with replace(job, batch_size=size).origin.open() as source, open_target(job.target) as store:
        store.store_many([replace(found[3], body=b"another")], found[0].due)
        run = begun(replace(job, batch_size=size), source, batches=1)
        task = BatchTask(run.run_id, 1, size)
        move_batch(source, store, run, task)
        assert verify_batch(source, store, run, task).verified == size - 1
        assert deliver(job.target, found[0].due + timedelta(microseconds=1)) == [delivered]
        now = SystemClock().now()
        assert store.call(lambda target: target.cancel(cancelled, now))
        assert store.call(lambda target: target.reschedule(later, found[2].due + DAY, now))
        with closing(sqlite3.connect(job.target.address.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute("DELETE FROM delayed_message WHERE message_id = ?", (removed,))
        verified = verify_batch(source, store, run, task)
        assert (verified.verified, verified.moved_on) == (size - 5, 3)
        assert {each.message_id: each.what for each in verified.differences} == {other: "body", removed: "missing"}
        with closing(sqlite3.connect(old.path)) as connection, connection:
            connection.execute(f'DELETE FROM "TimeoutData_migration_{run.run_id}" WHERE "Id" = ?', (later,))
        with pytest.raises(PipelineError, match=rf"changed since it was moved: it has {size - 1} messages, and had"):
            verify_batch(source, store, run, task)


def test_row_115_what_the_target_does_not_take_stays_hidden_until_it_is_given_back(
    spark: SparkSession, old: OldFile, job: MigrateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(job, target=replace(job.target, largest_message_bytes=200))
    found = messages(25)
    large = replace(found[12], body=bytes(201))
    old.add("billing", [*found[:12], large, *found[13:]])
    before = old.rows("billing")
    with pytest.raises(PipelineError, match=rf"{large.message_id} has 261 bytes .* the target takes 200"):
        migrate(spark, small)
    assert old.rows("billing") == before
    # As if it had been stored after the look.
    monkeypatch.setattr(migrating, "_check_preview", lambda *_: {"billing": 25})
    result = migrate(spark, small)
    (billing,) = result.endpoints
    assert (billing.moved, billing.verified, billing.refused, result.is_complete) == (15, 15, 10, False)
    assert large.message_id in billing.problems[0]
    assert old.batches() == [2, 0, 2]
    (aborted,) = abort(small).endpoints
    assert (aborted.returned, old.seen("billing")) == (10, ids([*found[10:12], large, *found[13:20]]))


@pytest.mark.parametrize("ended", [MigrationStatus.COMPLETED, MigrationStatus.ABORTED])
def test_row_115_a_run_that_another_process_ends_meanwhile_says_so(
    spark: SparkSession, old: OldFile, job: MigrateJob, monkeypatch: pytest.MonkeyPatch, ended: MigrationStatus
) -> None:
    old.add("billing", messages(3))
    hide = MigrationSource.hide

    def beaten(source: MigrationSource, run: MigrationRun, *others: Any) -> Any:
        with job.origin.open() as other:
            other.set_status(run, ended, SystemClock().now())
        return hide(source, run, *others)

    monkeypatch.setattr(MigrationSource, "hide", beaten)
    if ended is MigrationStatus.COMPLETED:
        (found,) = migrate(spark, job).endpoints
        assert (found.status, found.moved, found.is_exact) == ("completed", 0, True)
    else:
        with pytest.raises(MigrationConflict, match="was aborted meanwhile, by another process"):
            migrate(spark, job)


def test_row_115_an_abort_keeps_a_run_that_is_alive_from_hiding(
    old: OldFile, job: MigrateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = messages(25)
    old.add("billing", found)
    with job.origin.open() as alive:
        run = begun(job, alive, batches=2)
        give_back = MigrationSource.return_batch

        def meanwhile(source: MigrationSource, *arguments: Any) -> int:
            assert not alive.hide(run, job.batch_size, 2, job.margin)
            return give_back(source, *arguments)

        monkeypatch.setattr(MigrationSource, "return_batch", meanwhile)
        (result,) = abort(job).endpoints
    assert (result.status, result.messages, result.returned) == ("aborted", 20, 20)
    assert old.seen("billing") == ids(found)


def test_row_115_from_postgresql_into_a_store_beside_it(spark: SparkSession, postgres_url: str) -> None:
    """Written by others: spaces in the JSON and no body; one that goes to whom answers go, by its headers."""
    place = PostgresPlace(postgres_url)
    place.create()
    rows = hours(18, NEXT_YEAR)
    spaced = Row(NEXT_YEAR, headers='{ "a": "\\u00e9" }', body=None)
    answered = Row(NEXT_YEAR, destination=None, headers='{"NServiceBus.ReplyToAddress":"back"}')
    place.insert([*rows, spaced, answered])
    target = StoreSpec(postgres_url, schema=place.schema, endpoint="billing")
    with open_spec(target, create=True) as created:
        created.setup()
    job = MigrateJob(OriginSpec(postgres_url, place.schema), target, batch_size=10)
    (before,) = preview(job, SystemClock().now()).endpoints
    assert dict(before.destinations) == {"Sales": 19, "back": 1}
    (result,) = migrate(spark, job).endpoints
    assert (result.moved, result.verified, result.mismatched, result.status) == (20, 20, 0, "completed")
    place.drop()


# --- row 116 ----------------------------------------------------------------------------------------------------------


def test_row_116_whenever_it_ends_each_timeout_is_with_one_of_the_two(
    tmp_path: Path, old: OldFile, target: StoreSpec
) -> None:
    """Every point at which a move can end, and then either an abort or a second attempt."""
    ends = 0
    for attempt in range(2):
        for point in range(100):
            file = OldFile(tmp_path / f"old-{attempt}-{point}.db")
            found = messages(4)
            file.add("billing", found)
            job = MigrateJob(file.origin, target, ("billing",), batch_size=2)
            with job.origin.open() as source, open_target(target) as store:
                run = begun(job, source, batches=2)
                left = Ending(point)
                dying = left.wrapped(source), left.wrapped(store)
                try:
                    for number in (1, 2):
                        move_batch(*dying, run, BatchTask(run.run_id, number, 2))
                except Ended:
                    ends += 1
                if attempt:
                    for number in (1, 2):
                        move_batch(source, store, run, BatchTask(run.run_id, number, 2))
            abort(job)
            theirs = set(ids(waiting(target)))
            there, here = theirs & set(ids(found)), set(file.seen("billing"))
            assert (there | here, there & here) == (set(ids(found)), set())
            assert not (attempt and here)
            if not left.ended:
                break
    assert ends > 10


class Ended(Exception):
    """The process ended here."""


class Ending:
    """Ends a process before or after one of its calls to the source and the target: each is one point."""

    def __init__(self, point: int) -> None:
        self._left, self.ended = point, False

    def wrapped(self, inner) -> Any:
        """Return the same object, whose calls are counted."""
        outer = self

        class Wrapped:
            def __getattr__(self, name: str) -> object:
                found = getattr(inner, name)
                return outer.call(found) if callable(found) else found

        return Wrapped()

    def call(self, function: Callable) -> Callable:
        def counted(*arguments, **named):
            self._step()
            result = function(*arguments, **named)
            self._step()
            return result

        return counted

    def _step(self) -> None:
        if not self._left:
            self.ended = True
            raise Ended
        self._left -= 1
