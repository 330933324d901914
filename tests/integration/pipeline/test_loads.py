"""A load is made equal to a table: what is new, moved, changed or gone is counted and done, and nothing else."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from tests import java
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.spark_cluster import SparkCluster, spark_cluster
from tests.spark_drivers import DriverDied, SparkDriver
from tests.waiting import Eventually

from postdate.core.upkeep.wall_times import WallTime
from postdate.errors import InvalidMessage, PipelineError
from postdate.messages import DelayedMessage, Headers, format_timestamp
from postdate.pipeline import syncing
from postdate.pipeline.loads import list_loads, show_load, undo_load
from postdate.pipeline.local_time import LocalTimes
from postdate.pipeline.schedule import Rejects, ScheduleJob, ScheduleResult, schedule
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import AdministrableStore, MessageFilter, Outcome, RecordKind

DUE = datetime(2031, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
PLAN = "plan 'ä'"
COLUMNS = ("message_id", "due", "destination", "headers", "body", "expires_at")

Row = Mapping[str, Any]


_POSTGRES = pytest.param(
    "postgres",
    marks=pytest.mark.soak(
        "the same on a server takes minutes; the conformance suite has what the two stores do",
        part="spark",
        proven_by="tests/integration/pipeline/test_loads.py::test_what_waits_becomes_the_table_and_each_change_is_counted",
    ),
)


@pytest.fixture(params=["sqlite", _POSTGRES])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreSpec]:
    """A store that is not set up, in a file and on a server."""
    if request.param == "sqlite":
        yield StoreSpec(f"sqlite:///{tmp_path / 'messages.db'}", synchronous="normal")
        return
    url, schema = request.getfixturevalue("postgres_url"), fresh_schema()
    yield StoreSpec(url, schema=schema, endpoint="plans")
    drop_schema(url, schema)


@pytest.fixture
def file(tmp_path: Path) -> StoreSpec:
    return StoreSpec(f"sqlite:///{tmp_path / 'messages.db'}", synchronous="normal")


def row(name: str, due: datetime = DUE, **more: Any) -> Row:
    return {"message_id": name, "due": due, "destination": "orders", "body": f"body of {name}", **more}


def table(spark: SparkSession, *rows: Row) -> DataFrame:
    """Return a frame with the columns that the rows have; times are texts if one of them is."""

    def kind(name: str) -> str:
        is_time = name in {"due", "expires_at"} and all(isinstance(each.get(name), datetime | None) for each in rows)
        return "timestamp" if is_time else "string"

    names = [name for name in COLUMNS if not rows or any(name in each for each in rows)]
    types = {name: kind(name) for name in names}
    values = [
        tuple(
            each[name].isoformat()
            if name in each and isinstance(each[name], datetime) and types[name] == "string"
            else each.get(name)
            for name in names
        )
        for each in rows
    ]
    return spark.createDataFrame(values, ", ".join(f"{name} {types[name]}" for name in names))


def sync(spark: SparkSession, spec: StoreSpec, now: datetime, *rows: Row, **more: Any) -> ScheduleResult:
    result = schedule(table(spark, *rows), replace(ScheduleJob(spec, now, load=PLAN, sync=True), **more))
    assert result.read == len(rows)
    assert result.load == PLAN
    return result


def counts(result: ScheduleResult) -> dict[str, int]:
    """Return all counts that are not zero."""
    assert result.sync is not None
    names = ("unchanged", "rescheduled", "replaced", "delivered_meanwhile", "cancelled", "not_cancelled", "retained")
    every = {
        "new": result.accepted,
        "already_there": result.already_there,
        "conflicting": result.conflicting,
        **result.set_aside,
        **{name: getattr(result.sync, name) for name in names},
    }
    return {name: count for name, count in every.items() if count}


def in_store(spec: StoreSpec, call: Callable[[Any], Any]) -> Any:
    with open_spec(spec) as store:
        return store.call(call)


def waiting(spec: StoreSpec) -> dict[str, DelayedMessage]:
    """Return what waits, by id."""

    async def read(store: AdministrableStore) -> dict[str, DelayedMessage]:
        return {each.message_id: each for each in await store.list_pending(MessageFilter(), 100_000)}

    return in_store(spec, read)


def kinds(spec: StoreSpec, message_id: str) -> list[str]:
    async def read(store: AdministrableStore) -> list[str]:
        return [each.kind.name.lower() for each in await store.history(message_id)]

    return in_store(spec, read)


def deliver(spec: StoreSpec, now: datetime, limit: int = 1_000) -> list[str]:
    """Deliver what is due, as a service does; return the ids."""

    async def work(store: Any) -> list[str]:
        claims = await store.claim_due(now, limit)
        await store.finish(claims, Outcome.DELIVERED, now)
        return [each.message.message_id for each in claims]

    return in_store(spec, work)


# --- each outcome -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["sqlite", "postgres"], indirect=True)
def test_what_waits_becomes_the_table_and_each_change_is_counted(
    spark: SparkSession, spec: StoreSpec, now: datetime
) -> None:
    first = [row(name) for name in ("same", "moved", "body", "queue", "headers", "expiry", "gone", "gone-2")]
    assert counts(sync(spark, spec, now, *first)) == {"new": 8}
    second = [
        row("same"),
        row("moved", DUE + HOUR),
        row("body", body="other"),
        row("queue", destination="bills", due=DUE + HOUR),
        row("headers", headers='{"k": "v"}'),
        row("expiry", expires_at=DUE + HOUR),
        row("new"),
    ]
    job = partial(sync, spark, spec, now + HOUR, *second)
    changes = {"new": 1, "unchanged": 1, "rescheduled": 1, "replaced": 4, "cancelled": 2}
    before = waiting(spec)
    trial = job(dry_run=True)
    assert counts(trial) == changes
    assert waiting(spec) == before
    assert trial.sync is not None
    assert [each["message_id"] for each in trial.sample] == ["new"]
    shown = {name: sorted(each["message_id"] for each in sample) for name, sample in trial.sync.samples.items()}
    assert shown == {
        "rescheduled": ["moved"],
        "replaced": ["body", "expiry", "headers", "queue"],
        "cancelled": ["gone", "gone-2"],
    }
    assert counts(job()) == changes
    after = waiting(spec)
    own = {Headers.LOAD: PLAN}
    assert after == {
        "same": before["same"],
        "moved": replace(before["moved"], due=DUE + HOUR),
        "body": replace(before["body"], body=b"other"),
        "queue": replace(before["queue"], destination="bills", due=DUE + HOUR),
        "headers": replace(before["headers"], headers={**own, "k": "v"}),
        "expiry": replace(before["expiry"], expires_at=DUE + HOUR),
        "new": DelayedMessage("new", DUE, "orders", own, b"body of new"),
    }
    assert counts(job()) == {"unchanged": 7}
    assert counts(job(dry_run=True)) == {"unchanged": 7}
    assert kinds(spec, "same") == ["scheduled"]
    assert kinds(spec, "moved") == kinds(spec, "body") == ["scheduled", "rescheduled"]
    assert kinds(spec, "gone") == ["scheduled", "cancelled"]


def test_a_dry_run_on_a_store_that_does_not_exist_creates_nothing(
    spark: SparkSession, file: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    assert counts(sync(spark, file, now, row("a"), row("b"), row("b"), dry_run=True)) == {"new": 2, "already_there": 1}
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_is_set_aside_keeps_everything_and_all_else_is_done(
    spark: SparkSession, spec: StoreSpec, now: datetime
) -> None:
    sync(spark, spec, now, row("moved"), row("gone"), row("broken"), row("twice"))
    rows = [
        row("moved", DUE + HOUR),
        {**row("broken"), "due": "soon"},
        row("twice"),
        row("twice", body="x"),
        row("new"),
    ]
    expected = {"new": 1, "rescheduled": 1, "malformed_time": 1, "conflicting_rows": 2, "retained": 3}
    assert counts(sync(spark, spec, now, *rows, dry_run=True)) == expected
    assert counts(sync(spark, spec, now, *rows)) == expected
    assert sorted(waiting(spec)) == ["broken", "gone", "moved", "new", "twice"]


def test_messages_of_other_loads_or_of_none_are_not_touched(
    spark: SparkSession, spec: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    schedule(table(spark, row("free"), row("free-gone")), ScheduleJob(spec, now))
    schedule(table(spark, row("theirs"), row("theirs-gone")), ScheduleJob(spec, now, load="other"))
    sync(spark, spec, now, row("mine"), row("mine-gone"))
    before = waiting(spec)
    rows = [row("free"), row("theirs", body="other"), row("mine")]
    expected = {"unchanged": 1, "conflicting": 2, "cancelled": 1}
    assert counts(sync(spark, spec, now, *rows, dry_run=True)) == expected
    result = sync(spark, spec, now, *rows, rejects=Rejects(tmp_path / "rejected"))
    assert counts(result) == expected
    rejected = spark.read.json(str(tmp_path / "rejected")).collect()
    assert {each["message_id"]: each["detail"] for each in rejected} == {
        "free": "the store has this id without a load, and keeps what it has",
        "theirs": "the store has this id under the load 'other', and keeps what it has",
    }
    del before["mine-gone"]
    assert waiting(spec) == before


def test_what_has_ended_is_never_sent_again(spark: SparkSession, spec: StoreSpec, now: datetime) -> None:
    names = ("delivered", "delivered-moved", "cancelled", "waits")
    dues = [now + HOUR if name.startswith("delivered") else DUE for name in names]
    plan = [row(name, due) for name, due in zip(names, dues, strict=True)]
    sync(spark, spec, now, *plan)
    assert sorted(deliver(spec, now + 2 * HOUR)) == ["delivered", "delivered-moved"]
    sync(spark, spec, now, plan[0], plan[1], plan[3])  # cancels one
    again = [plan[0], row("delivered-moved", DUE), *plan[2:]]
    expected = {"already_there": 2, "conflicting": 1, "unchanged": 1}
    assert counts(sync(spark, spec, now, *again, dry_run=True)) == expected
    assert counts(sync(spark, spec, now, *again)) == expected
    assert sorted(waiting(spec)) == ["waits"]
    assert kinds(spec, "cancelled") == ["scheduled", "cancelled"]


def test_what_a_service_claims_or_delivers_meanwhile_is_no_error(
    spark: SparkSession, spec: StoreSpec, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service claims between the comparison and the first change."""
    plan = [row(name, now + HOUR) for name in ("moved", "changed", "gone", "same")]
    sync(spark, spec, now, *plan, row("stays", DUE))
    plan_changes = syncing.plan_changes
    delivered = list[str]()

    def deliver_first(*frames: DataFrame) -> DataFrame:
        planned = plan_changes(*frames).persist()
        planned.count()
        delivered.extend(deliver(spec, now + 2 * HOUR))
        return planned

    monkeypatch.setattr(syncing, "plan_changes", deliver_first)
    rows = [row("moved", DUE), row("changed", now + HOUR, body="x"), row("same", now + HOUR), row("stays", DUE)]
    result = sync(spark, spec, now, *rows)
    assert sorted(delivered) == ["changed", "gone", "moved", "same"]
    assert counts(result) == {"unchanged": 2, "delivered_meanwhile": 2, "not_cancelled": 1}
    assert sorted(waiting(spec)) == ["stays"]
    for name in delivered:
        assert kinds(spec, name) == ["scheduled", "delivered"]


def test_what_is_being_delivered_is_left_to_its_service(spark: SparkSession, spec: StoreSpec, now: datetime) -> None:
    plan = [row(name, now + HOUR) for name in ("moved", "changed", "gone")]
    sync(spark, spec, now, *plan)
    with open_spec(spec) as service:

        async def claim(store: Any) -> Sequence[Any]:
            return await store.claim_due(now + 2 * HOUR, 10)

        claims = service.call(claim)
        assert len(claims) == 3
        result = sync(spark, spec, now, row("moved", DUE), row("changed", now + HOUR, body="x"))
        assert counts(result) == {"delivered_meanwhile": 2, "not_cancelled": 1}

        async def finish(store: Any) -> int:
            return await store.finish(claims, Outcome.DELIVERED, now)

        assert service.call(finish) == 3
    assert waiting(spec) == {}


def test_equal_rows_count_once(spark: SparkSession, spec: StoreSpec, now: datetime) -> None:
    rows = [row("a"), row("a"), row("b"), row("b"), row("b")]
    assert counts(sync(spark, spec, now, *rows)) == {"new": 2, "already_there": 3}
    assert counts(sync(spark, spec, now, *rows)) == {"unchanged": 2, "already_there": 3}


def test_headers_with_the_due_time_are_a_part_of_it(spark: SparkSession, spec: StoreSpec, now: datetime) -> None:
    def with_header(due: datetime) -> Row:
        return row("a", due, headers=f'{{"{Headers.DELIVER_AT}": "{format_timestamp(due)}"}}')

    sync(spark, spec, now, with_header(DUE))
    assert counts(sync(spark, spec, now, with_header(DUE + HOUR))) == {"rescheduled": 1}
    assert waiting(spec)["a"].headers[Headers.DELIVER_AT] == format_timestamp(DUE + HOUR)
    assert counts(sync(spark, spec, now, with_header(DUE + HOUR))) == {"unchanged": 1}
    assert counts(sync(spark, spec, now, row("a", DUE + HOUR))) == {"replaced": 1}


def test_wall_times_follow_their_zone(spark: SparkSession, spec: StoreSpec, now: datetime) -> None:
    """A message that a service has moved, because the rules of its zone changed, is not moved back."""
    paris = {"local_times": LocalTimes("Europe/Paris")}

    def local(hour: int) -> Row:
        return {**row("a"), "due": f"2031-05-01T{hour}:00:00"}

    sync(spark, spec, now, local(14), **paris)
    wall_time = waiting(spec)["a"].headers[Headers.WALL_TIME]
    assert wall_time == str(WallTime.parse("2031-05-01T14:00:00", "Europe/Paris"))

    async def move(store: AdministrableStore) -> bool:
        return await store.reschedule("a", DUE + HOUR, now, wall_time)

    assert in_store(spec, move)
    assert counts(sync(spark, spec, now, local(14), **paris)) == {"unchanged": 1}
    assert counts(sync(spark, spec, now, local(15), **paris)) == {"rescheduled": 1}
    assert waiting(spec)["a"].due == DUE + HOUR
    assert counts(sync(spark, spec, now, row("a", DUE + HOUR))) == {"rescheduled": 1}
    assert Headers.WALL_TIME not in waiting(spec)["a"].headers


def test_rows_that_name_their_load_keep_it_and_those_of_another_are_set_aside(
    spark: SparkSession, file: StoreSpec, now: datetime
) -> None:
    rows = [row(name, headers=f'{{"a": "b", "{Headers.LOAD}": "{PLAN}"}}') for name in ("mine",)]
    rows += [row("theirs", headers=f'{{"{Headers.LOAD}":"other"}}'), row("no-object", headers="[]")]
    assert counts(sync(spark, file, now, *rows)) == {"new": 1, "invalid_headers": 2}
    assert waiting(file)["mine"].headers == {"a": "b", Headers.LOAD: PLAN}


def test_retries_of_handlers_belong_to_no_load(spark: SparkSession, file: StoreSpec, now: datetime) -> None:
    sync(spark, file, now, row("a"))
    retry = DelayedMessage("retry", DUE, "plans", {Headers.LOAD: PLAN, Headers.DELAYED_RETRIES: "1"}, b"")
    with open_spec(file) as store:
        store.store_many([retry], now)
    assert counts(sync(spark, file, now, row("a"))) == {"unchanged": 1}
    assert undo_load(spark, file, PLAN, now).cancelled == 1
    assert sorted(waiting(file)) == ["retry"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_wrong_use_is_refused_before_anything_is_done(spark: SparkSession, file: StoreSpec, now: datetime) -> None:
    with pytest.raises(PipelineError, match="sync needs the name of a load"):
        ScheduleJob(file, now, sync=True)
    for name in ("", " ", "x" * 201, "a\0b", "\ud800"):
        with pytest.raises(InvalidMessage, match="the name of the load"):
            ScheduleJob(file, now, load=name)
        with pytest.raises(InvalidMessage, match="the name of the load"):
            undo_load(spark, file, name, now)
    sync(spark, file, now, row("a"))
    with pytest.raises(PipelineError, match=r"the input has no rows, so every message of the load .* loads undo"):
        sync(spark, file, now)
    assert sorted(waiting(file)) == ["a"]


def test_a_store_that_cannot_be_read_in_bulk_is_refused(spark: SparkSession, redis_url: str, now: datetime) -> None:
    spec = StoreSpec(redis_url, endpoint="loads-refused")
    with pytest.raises(PipelineError, match="RedisStore cannot be read in bulk"):
        sync(spark, spec, now, row("a"))
    for job in (lambda: list_loads(spark, spec), lambda: undo_load(spark, spec, PLAN, now)):
        with pytest.raises(PipelineError, match="RedisStore cannot be read in bulk"):
            job()


# --- list, show, undo -------------------------------------------------------------------------------------------------


def test_loads_are_listed_shown_and_undone(spark: SparkSession, spec: StoreSpec, now: datetime) -> None:
    day = timedelta(days=1)
    schedule(table(spark, row("free")), ScheduleJob(spec, now))
    assert list_loads(spark, spec).loads == ()
    plan = [row("a"), row("b", DUE + day), row("c", DUE + day, destination="bills"), row("d", now + HOUR)]
    sync(spark, spec, now, *plan)
    schedule(table(spark, row("o", DUE + HOUR)), ScheduleJob(spec, now, load="other"))
    mine, other = sorted(list_loads(spark, spec).loads, key=lambda each: each.load == "other")
    assert (mine.load, mine.messages, mine.first_due, mine.last_due) == (PLAN, 4, now + HOUR, DUE + day)
    assert mine.largest_destinations == {"orders": 3, "bills": 1}
    assert (other.load, other.messages, other.destinations) == ("other", 1, 1)
    shown = show_load(spark, spec, PLAN)
    assert shown.load == mine
    assert [(each.destination, each.day, each.messages) for each in shown.groups] == [
        ("orders", "2026-03-01", 1),
        ("orders", "2031-05-01", 1),
        ("bills", "2031-05-02", 1),
        ("orders", "2031-05-02", 1),
    ]
    assert [each["message_id"] for each in shown.sample] == ["d", "a", "b", "c"]
    assert deliver(spec, now + 2 * HOUR) == ["d"]
    trial = undo_load(spark, spec, PLAN, now, dry_run=True)
    assert (trial.waiting, trial.cancelled, trial.delivered, len(trial.sample)) == (3, 3, 0, 3)
    assert len(waiting(spec)) == 5
    done = undo_load(spark, spec, PLAN, now)
    assert (done.waiting, done.cancelled, done.delivered) == (3, 3, 0)
    assert sorted(waiting(spec)) == ["free", "o"]
    again = undo_load(spark, spec, PLAN, now)
    assert (again.waiting, again.cancelled) == (0, 0)
    with pytest.raises(PipelineError, match="no message waits under the load"):
        show_load(spark, spec, PLAN)


# --- a driver that is killed ------------------------------------------------------------------------------------------

ROWS, CHANGED_ROWS = 3_000, 300


def plan_row(number: int, *, changed: bool) -> Row:
    """Return a row of the first plan, or of the second one: a part is moved, a part has another body."""
    name = f"m-{number:05d}"
    if changed and number < CHANGED_ROWS:
        return row(name, DUE + HOUR)
    return row(name, body="changed") if changed and number < 2 * CHANGED_ROWS else row(name)


def sync_plan(spark: SparkSession, address: str, schema: str, first: int, end: int) -> dict[str, int]:
    """Sync the second plan; runs in the process of a driver."""
    rows = [plan_row(number, changed=True) for number in range(first, end)]
    spec = StoreSpec(address, schema=schema, endpoint="plans")
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    frame = table(spark, *rows).repartition(2)
    return counts(schedule(frame, ScheduleJob(spec, now, load=PLAN, sync=True, batch=20)))


SYNC_PLAN = "tests.integration.pipeline.test_loads:sync_plan"


def changes_so_far(spec: StoreSpec) -> int:
    async def count(store: AdministrableStore) -> int:
        by_kind = await store.record_counts()
        return by_kind.get(RecordKind.RESCHEDULED, 0) + by_kind.get(RecordKind.CANCELLED, 0)

    return in_store(spec, count)


def run_and_kill(cluster: SparkCluster, spec: StoreSpec, eventually: Eventually, arguments: dict[str, Any]) -> None:
    """Sync in a driver of its own, which is killed when it has made some changes."""
    driver = SparkDriver(cluster, "killed", local=True, conf=java.SMALL_DATA | java.PATIENCE)
    errors = list[BaseException]()

    def run() -> None:
        try:
            driver.run(SYNC_PLAN, **arguments)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    eventually(lambda: changes_so_far(spec) > 20 or not running.is_alive(), "the job changes messages")
    driver.kill()
    running.join()
    assert [type(each) for each in errors] == [DriverDied]


@contextmanager
def serving(spec: StoreSpec, now: datetime) -> Generator[list[str]]:
    """Deliver what is due, in a thread, as a service does; yield the ids, to which more are added."""
    stop, delivered = threading.Event(), list[str]()

    def serve() -> None:
        while not stop.is_set():
            delivered.extend(deliver(spec, now, 10))

    service = threading.Thread(target=serve)
    service.start()
    try:
        yield delivered
    finally:
        stop.set()
        service.join()


@pytest.mark.soak(
    "kills a driver of its own amid its work, beside a service",
    part="kills",
    proven_by=(
        "tests/integration/pipeline/test_loads.py::test_what_waits_becomes_the_table_and_each_change_is_counted",
        "tests/integration/pipeline/test_loads.py::test_what_a_service_claims_or_delivers_meanwhile_is_no_error",
        "tests/integration/pipeline/test_loads.py::test_a_row_that_is_set_aside_keeps_everything_and_all_else_is_done",
    ),
)
def test_a_killed_driver_leaves_a_part_and_the_next_run_does_the_rest_beside_a_service(
    spark: SparkSession, postgres_url: str, now: datetime, eventually: Eventually
) -> None:
    """The plan loses rows at its beginning and gets some at its end; the service delivers messages of another load."""
    schema, removed = fresh_schema(), CHANGED_ROWS // 2
    spec = StoreSpec(postgres_url, schema=schema, endpoint="plans")
    arguments: dict[str, Any] = {"address": postgres_url, "schema": schema, "first": removed, "end": ROWS + removed}
    try:
        sync(spark, spec, now, *(plan_row(number, changed=False) for number in range(ROWS)))
        due_soon = [row(f"s-{number:04d}", now + HOUR) for number in range(500)]
        schedule(table(spark, *due_soon), ScheduleJob(spec, now, load="service"))
        with serving(spec, now + 2 * HOUR) as delivered, spark_cluster(within_driver=True) as cluster:
            run_and_kill(cluster, spec, eventually, arguments)
            done = changes_so_far(spec)
            result = sync_plan(spark, **arguments)
        changes = 2 * CHANGED_ROWS - removed + removed  # rows of the table that differ, and messages that are not in it
        assert 20 < done < changes
        assert {*result} <= {"new", "unchanged", "rescheduled", "replaced", "cancelled"}
        assert done + result["rescheduled"] + result["replaced"] + result.get("cancelled", 0) == changes
        after = {id_: each for id_, each in waiting(spec).items() if id_.startswith("m-")}
        expected = [plan_row(number, changed=True) for number in range(removed, ROWS + removed)]
        assert {id_: (each.due, each.body) for id_, each in after.items()} == {
            each["message_id"]: (each["due"], each["body"].encode()) for each in expected
        }
        assert sync_plan(spark, **arguments) == {"unchanged": ROWS}
        assert len(delivered) == len(set(delivered)) > 0
    finally:
        drop_schema(postgres_url, schema)
