"""Messages move from one Postdate store into another while the services of both deliver: whole, once, or back again."""

import sqlite3
import threading
import uuid
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from anyio import to_thread
from pyspark.sql import SparkSession
from tests.integration.migration_stores import StorePlace, place_in
from tests.integration.pipeline.old_timeouts import by_id, ids, messages
from tests.waiting import Eventually

from postdate.clock import SystemClock
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.audit import audit
from postdate.pipeline.migrate import MigrateJob, abort, migrate, preview, resume, status
from postdate.pipeline.migrate.moving import BatchTask, move_batch
from postdate.pipeline.migrate.results import EndpointResult
from postdate.pipeline.migrate.target import opened_target
from postdate.pipeline.rows import to_columns
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Outcome
from postdate.ports.migrating import BatchStatus, MigrationRun, MigrationStatus

DAY = timedelta(days=1)


@dataclass
class Service:
    """Delivers what is due in a store, as long as it runs.

    Args:
        place: the store.
        ahead: how far its clock is ahead.
        delivered: ids, in the order of delivery.
    """

    place: StorePlace
    ahead: timedelta
    delivered: list[str] = field(default_factory=list[str])
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        # A store of its own each time: one that has looked is not told of what is due only by a clock that is ahead.
        while not self._ended.wait(0.02):
            self.delivered += self.place.deliver(SystemClock().now() + self.ahead)

    def end(self) -> None:
        self._ended.set()


@contextmanager
def serving(old: StorePlace, new: StorePlace) -> Generator[list[Service]]:
    """Run a service on each for the length of the block; the new one is so fast that it delivers what has just come."""
    services = [Service(old, timedelta(0)), Service(new, 2 * DAY)]
    threads = [threading.Thread(target=each.run) for each in services]
    for thread in threads:
        thread.start()
    try:
        yield services
    finally:
        for each in services:
            each.end()
        for thread in threads:
            thread.join()


PAIRS = (("sqlite", "postgres"), ("postgres", "postgres"), ("mariadb", "postgres"), ("postgres", "sqlite"))
_ALSO = pytest.mark.soak(
    "the same between other stores",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_migrate_stores.py::test_row_116_each_message_is_delivered_by_one_of_two_stores_whose_services_go_on",
        "tests/integration/pipeline/test_migrate_stores.py::test_row_115_a_run_that_was_killed_goes_on_or_is_aborted",
    ),
)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[StorePlace, StorePlace]]:
    """Return an old store and a new one, both empty."""
    old, new = request.param
    with ExitStack() as stack:
        yield stack.enter_context(place_in(old, request)), stack.enter_context(place_in(new, request, "bills"))


@pytest.fixture
def files(request: pytest.FixtureRequest) -> Iterator[tuple[StorePlace, StorePlace]]:
    """Return two stores in files."""
    with place_in("sqlite", request, "old") as old, place_in("sqlite", request, "new") as new:
        yield old, new


def moved_while_both_deliver(
    spark: SparkSession, old: StorePlace, new: StorePlace, spread: timedelta, eventually: Eventually, **settings: Any
) -> tuple[EndpointResult, Service, list[DelayedMessage]]:
    """Move messages, of which some fall due within ``spread`` from now; each is delivered once, or waits in the new."""
    now = SystemClock().now()
    soon = [replace(each, due=now + n * spread / 50) for n, each in enumerate(messages(50))]
    middle, late = messages(290, now + DAY), messages(9, now + 9 * DAY)
    expiring = replace(messages(1, now + 9 * DAY)[0], expires_at=now + 10 * DAY)
    old.add([*soon, *middle, *late, expiring])
    job = MigrateJob(old.origin, new.spec, (old.name,), batch_size=20, **settings)
    (seen,) = preview(job, now).endpoints
    assert (seen.count, seen.problems, seen.destinations) == (350, (), {"orders": 350})

    with serving(old, new) as (theirs, ours):
        (found,) = migrate(spark, job).endpoints
        assert (found.status, found.mismatched, found.refused) == ("completed", 0, 0)
        passing = {*ids(soon), *ids(middle)}
        eventually(lambda: passing <= {*theirs.delivered, *ours.delivered}, "what is due is delivered")
    assert (sorted([*theirs.delivered, *ours.delivered]), old.waiting()) == (sorted(passing), [])
    assert (found.moved + len(theirs.delivered), by_id(new.waiting())) == (350, by_id([*late, expiring]))
    assert [each.expires_at for each in new.waiting() if each.expires_at] == [expiring.expires_at]
    (run,) = status(old.origin).runs
    assert (run.run.status, run.messages[BatchStatus.COMPLETED]) == (MigrationStatus.COMPLETED, found.moved)

    moved = late[0].message_id
    assert not old.ask(lambda store: store.cancel(moved, now))
    assert new.ask(lambda store: store.reschedule(moved, now + 3 * DAY, now))
    assert new.ask(lambda store: store.cancel(moved, now))
    return found, theirs, soon


@pytest.mark.parametrize(
    "ends", [PAIRS[0], *(pytest.param(pair, marks=_ALSO) for pair in PAIRS[1:])], ids="-".join, indirect=True
)
def test_row_116_each_message_is_delivered_by_one_of_two_stores_whose_services_go_on(
    spark: SparkSession, ends: tuple[StorePlace, StorePlace], eventually: Eventually
) -> None:
    """What is due soon is far within the margin, so that the old service has it however slow the machine is."""
    found, theirs, soon = moved_while_both_deliver(spark, *ends, timedelta(milliseconds=50), eventually)
    assert (found.moved, sorted(theirs.delivered)) == (300, ids(soon))


@pytest.mark.soak(
    "messages fall due while they are hidden, around the margin: which are moved is a matter of time",
    part="spark",
    proven_by="tests/integration/pipeline/test_migrate_stores.py::test_row_116_what_falls_due_between_hiding_and_delivering_is_delivered_once",
)
@pytest.mark.parametrize("ends", PAIRS, ids="-".join, indirect=True)
def test_row_116_messages_that_fall_due_while_they_are_hidden_are_delivered_by_one(
    spark: SparkSession, ends: tuple[StorePlace, StorePlace], eventually: Eventually
) -> None:
    margin = timedelta(seconds=3)
    found, _, _ = moved_while_both_deliver(spark, *ends, 2 * margin, eventually, margin=margin)
    assert found.delivered_meanwhile > 0


@pytest.mark.parametrize("ends", [PAIRS[0], PAIRS[3]], ids="-".join, indirect=True)
def test_row_116_what_falls_due_between_hiding_and_delivering_is_delivered_once(
    spark: SparkSession, ends: tuple[StorePlace, StorePlace]
) -> None:
    """Both services say that all is due: before it is hidden, while it is nowhere, and when some of it has moved."""
    old, new = ends
    found, job = messages(40), MigrateJob(old.origin, new.spec, batch_size=10)
    old.add(found)
    theirs = list[str]()

    async def hidden_meanwhile(store: Any) -> MigrationRun:
        due = found[9].due + timedelta(microseconds=1)
        claims = await store.claim_due(due, 100)
        with job.origin.opened() as origin:
            run = await to_thread.run_sync(lambda: begun(job, origin, old.name, batches=3))
        assert await store.finish(claims, Outcome.DELIVERED, due) == 10
        theirs.extend(claim.message.message_id for claim in claims)
        return run

    run = old.ask(hidden_meanwhile)
    assert theirs == [each.message_id for each in found[:10]]
    assert (old.deliver(), new.deliver()) == ([], [])
    with job.origin.opened() as origin, opened_target(job.target) as store:
        move_batch(origin, store, run, BatchTask(run.run_id, 1, 10))
    ours = new.deliver()
    assert (ours, old.deliver()) == ([each.message_id for each in found[10:20]], [])
    (rest,) = resume(spark, job).endpoints
    assert (rest.status, rest.moved, rest.delivered_meanwhile, rest.mismatched) == ("completed", 30, 10, 0)
    assert old.deliver() == []
    assert [*theirs, *ours, *new.deliver()] == [each.message_id for each in found]


def begun(job: MigrateJob, source: Any, endpoint: str, *, batches: int) -> MigrationRun:
    """Begin a run as the job does, and hide some batches, as if it had been killed then."""
    now = SystemClock().now()
    run = MigrationRun(uuid.uuid4().hex, endpoint, MigrationStatus.PREPARING, dict(job.parameters), job.cutoff, now)
    source.begin(run)
    assert len(source.hide(run, job.batch_size, batches, job.margin)) == batches
    return run


def left_in_the_middle(old: StorePlace, new: StorePlace, job: MigrateJob) -> list[str]:
    """Leave a run as one that was killed may: a batch of each kind; return the ids of the one that was delivered."""
    with job.origin.opened() as origin, opened_target(job.target) as store:
        run = begun(job, origin, old.name, batches=5)
        for number in (2, 3, 4):
            assert origin.advance(run, number, BatchStatus.PENDING, BatchStatus.STAGED)
        for number in (3, 4):
            store.store_batch(to_columns(origin.read(run, number)), SystemClock().now())
        move_batch(origin, store, run, BatchTask(run.run_id, 5, 10))
        fourth = origin.read(run, 4)

    async def service(target: Any) -> None:
        claims = await target.claim_due(fourth[-1].due + timedelta(microseconds=1), 100)
        theirs = [claim for claim in claims if claim.message.message_id in ids(fourth)]
        assert await target.finish(theirs, Outcome.DELIVERED, fourth[-1].due + DAY) == 10

    new.ask(service)
    return ids(fourth)


@pytest.mark.parametrize("ends", [PAIRS[0], PAIRS[2], PAIRS[3]], ids="-".join, indirect=True)
def test_row_115_a_run_that_was_killed_goes_on_or_is_aborted(
    spark: SparkSession, ends: tuple[StorePlace, StorePlace]
) -> None:
    old, new = ends
    found = messages(73)
    old.add(found)
    job = MigrateJob(old.origin, new.spec, batch_size=10)
    delivered = left_in_the_middle(old, new, job)
    (aborted,) = abort(job).endpoints
    assert (aborted.status, aborted.returned, aborted.moved, aborted.exact) == ("aborted", 10, 40, True)
    assert (aborted.verified, aborted.delivered_meanwhile) == (30, 10)
    assert sorted([*ids(old.waiting()), *ids(new.waiting()), *delivered]) == ids(found)
    assert by_id(old.waiting()) == by_id([*found[:10], *found[50:]])

    with job.origin.opened() as origin:
        begun(job, origin, old.name, batches=2)
    (rest,) = resume(spark, job).endpoints
    assert (rest.moved, rest.verified, rest.status, rest.already_there) == (33, 33, "completed", 0)
    assert (old.waiting(), by_id(new.waiting())) == ([], by_id([*found[:30], *found[40:]]))


@pytest.mark.parametrize("ends", [PAIRS[3]], ids="-".join, indirect=True)
def test_audits_of_both_stores_are_clean_at_any_time(spark: SparkSession, ends: tuple[StorePlace, StorePlace]) -> None:
    old, new = ends
    found = messages(50)
    old.add(found)
    job = MigrateJob(old.origin, new.spec, batch_size=10)
    left_in_the_middle(old, new, job)
    counts = audit(spark, old.spec, SystemClock().now()).counts
    assert (counts.scheduled, counts.cancelled, counts.pending, counts.lost) == (50, 50, 0, 0)

    assert abort(job).exact
    assert old.deliver(found[5].due) == [message.message_id for message in found[:5]]
    counts = audit(spark, [old.spec, new.spec], SystemClock().now() + DAY).counts
    assert (counts.lost, counts.duplicated, counts.orphaned, counts.early) == (0, 0, 0, 0)
    assert (counts.scheduled, counts.cancelled, counts.pending, counts.delivered) == (90, 50, 35, 15)


def test_row_115_what_cannot_be_between_two_stores_is_refused(
    spark: SparkSession, files: tuple[StorePlace, StorePlace], tmp_path
) -> None:
    old, new = files
    found = messages(5)
    old.add(found)
    job = MigrateJob(old.origin, new.spec)
    itself = StoreSpec(f"sqlite:///{tmp_path}/../{tmp_path.name}/old.db")
    with pytest.raises(PipelineError, match=r"old\.db: its messages wait in the target already"):
        migrate(spark, replace(job, target=itself))
    with pytest.raises(PipelineError, match=r"no endpoint 'billing' owns messages there; it has old\.db"):
        migrate(spark, replace(job, endpoints=("billing",)))
    assert status(old.origin).runs == ()

    with job.origin.opened() as origin:
        begun(job, origin, "old.db", batches=1)
    new.add(messages(1))
    back = MigrateJob(new.origin, old.spec)
    with pytest.raises(PipelineError, match=r"the target itself is being emptied by migration"):
        migrate(spark, back)
    resume(spark, job)
    with pytest.raises(PipelineError, match=r"5 were moved out of the target before, which knows their ids"):
        migrate(spark, back)
    (seen,) = preview(back, SystemClock().now()).endpoints
    assert seen.problems[0].endswith(f"{', '.join(ids(found))}; move to a table or file of another name")
    with closing(sqlite3.connect(old.spec.address.removeprefix("sqlite:///"))) as connection:
        connection.execute(f"DROP TABLE TimeoutData_migration_{status(old.origin).runs[0].run.run_id}")
    with pytest.raises(PipelineError, match=r"the table that said which, .* is gone; move to a table or file"):
        migrate(spark, back)
    with back.origin.opened() as origin:
        assert origin.history() == []
