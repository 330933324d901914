"""What a task of a sweep does, without Spark: the same dispatching as a service's, on real stores and queues."""

import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import PATIENCE_SECONDS

from postdate import DelayedMessage, LocalTransport, SystemClock
from postdate.backends.postgres.transport import PostgresTransport
from postdate.errors import StoreNotSetUp, StoreUnavailable
from postdate.pipeline.dispatching import DispatchJournal, SweepSpec, drain_due, sweep_in_thread
from postdate.pipeline.rows import LEDGER_ARROW
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec
from postdate.ports import MovedMessages, RecordKind, Scan

SECOND = timedelta(seconds=1)
QUEUES = ["orders", "error"]


def now() -> datetime:
    return SystemClock().now()


def message(name: str, due: datetime, destination: str = "orders", expires_at: datetime | None = None):
    return DelayedMessage(name, due, destination, {"é": "🕰"}, b"body", expires_at)


@pytest.fixture(params=["file", "postgres"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SweepSpec]:
    """Store and queues of one database, with the queues ``orders`` and ``error``."""
    if request.param == "file":
        path = tmp_path / "messages.db"
        made = SweepSpec(StoreSpec(f"sqlite:///{path}"), f"local:///{path}")
        _prepare(made, lambda: LocalTransport(path))
        yield made
        return
    url, schema = request.getfixturevalue("postgres_url"), fresh_schema()
    made = SweepSpec(StoreSpec(url, schema=schema), url, {"schema": schema})
    _prepare(made, lambda: PostgresTransport(url, schema=schema))
    yield made
    drop_schema(url, schema)


def _prepare(spec: SweepSpec, transport: Callable[[], LocalTransport | PostgresTransport]) -> None:
    async def create() -> None:
        queues = transport()
        await queues.create_queues(QUEUES)
        await queues.close()

    with open_spec(spec.store, create=True) as store:
        store.setup()
    anyio.run(create)


def put(spec: SweepSpec, *messages: DelayedMessage) -> None:
    with open_spec(spec.store) as store:
        store.store_many(messages, now())


def scanned(store: OpenStore, what: str, *columns: str) -> list[tuple[Any, ...]]:
    scannable = store.require_scannable()
    return [
        tuple(row)
        for part in scannable.scan_parts(what, 1)
        for page in scannable.scan(Scan(what, columns), part, 1_000)
        for row in page
    ]


def events(spec: SweepSpec) -> list[tuple[Any, ...]]:
    """Return what the store has recorded but for the scheduling."""
    with open_spec(spec.store) as store:
        rows = scanned(store, "records", "kind", "message_id", "at", "due", "destination", "detail")
    return sorted((RecordKind(row[0]).name.lower(), *row[1:]) for row in rows if row[0] != RecordKind.SCHEDULED)


def lines(batches: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Return a ledger in the form of :func:`events`."""
    table = pa.Table.from_batches(batches, LEDGER_ARROW)
    for name in ("at", "due"):
        position = table.schema.get_field_index(name)
        table = table.set_column(position, name, table.column(position).cast(pa.int64()))
    return sorted(tuple(row.values()) for row in table.to_pylist())


def test_what_is_due_is_delivered_and_what_is_not_waits(spec: SweepSpec) -> None:
    past = now() - 10 * SECOND
    put(
        spec,
        message("due", past),
        message("expired", past, expires_at=past + SECOND),
        message("nowhere", past, "no-such-queue"),
        message("later", now() + timedelta(hours=1)),
    )
    assert drain_due(spec) == Counter(delivered=1, expired=1, failed=1)
    with open_spec(spec.store) as store:
        assert scanned(store, "pending", "message_id") == [("later",)]
        assert Counter(scanned(store, "queued", "message_id", "queue")) == Counter(
            [("due", "orders"), ("nowhere", "error")]
        )
    assert [(kind, name) for kind, name, *_ in events(spec)] == [
        ("delivered", "due"),
        ("expired", "expired"),
        ("failed", "nowhere"),
    ]


def test_a_ledger_has_the_same_lines_as_the_records(spec: SweepSpec) -> None:
    past = now() - 10 * SECOND
    put(spec, *(message(f"m-{n}", past) for n in range(2_500)), message("nowhere", past, "no-such-queue"))
    put(spec, message("expired", past, expires_at=past + SECOND))
    assert lines(list(sweep_in_thread(spec, None))) == events(spec)
    assert len(events(spec)) == 2_502


def test_a_resident_dispatcher_delivers_what_falls_due_while_it_is_there(spec: SweepSpec, tmp_path: Path) -> None:
    due = now() + SECOND
    put(spec, *(message(f"m-{n}", due + n * timedelta(milliseconds=10)) for n in range(50)))
    batches = list[pa.RecordBatch]()
    for batch in sweep_in_thread(spec, 3_600, tmp_path / "stop"):
        batches.append(batch)
        if sum(each.num_rows for each in batches) >= 50:
            (tmp_path / "stop").touch()
    found = lines(batches)
    assert found == events(spec)
    assert len(found) == 50
    assert all(at >= due for _, _, at, due, *_ in found)


def test_it_ends_early_when_it_is_told_to(spec: SweepSpec, tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    put(spec, message("m", now() - SECOND))
    batches = sweep_in_thread(spec, 3_600, tmp_path / "stop")
    assert lines(list(batches)) == events(spec)


def test_who_stops_reading_ends_it(spec: SweepSpec) -> None:
    put(spec, message("m", now() - SECOND))
    batches = sweep_in_thread(spec, 3_600)
    assert next(batches).num_rows == 1
    batches.close()
    assert not [thread for thread in threading.enumerate() if "portal" in thread.name.lower()]


def test_many_at_once_deliver_everything_once(spec: SweepSpec) -> None:
    past = now() - 10 * SECOND
    put(spec, *(message(f"m-{n}", past) for n in range(600)))
    code = """if True:
        import pickle, sys, postdate.pipeline.dispatching as dispatching
        spec = pickle.load(sys.stdin.buffer)
        print("ready", flush=True)
        sys.stdin.buffer.read()
        print(dispatching.drain_due(spec).total())"""
    pipe = subprocess.PIPE
    running = [subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) for _ in range(2)]
    for process in running:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps(spec))
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    dispatched = [int(process.communicate(timeout=PATIENCE_SECONDS)[0]) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(dispatched) + drain_due(spec).total() == 600
    assert Counter((kind, name) for kind, name, *_ in events(spec)) == Counter(
        {("delivered", f"m-{n}"): 1 for n in range(600)}
    )


def test_a_store_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    spec = SweepSpec(StoreSpec(f"sqlite:///{tmp_path / 'none.db'}"), f"local:///{tmp_path / 'none.db'}")
    with pytest.raises(StoreNotSetUp, match=r"none\.db"):
        drain_due(spec)


def test_a_server_that_does_not_answer_is_given_up_when_patience_ends(tmp_path: Path) -> None:
    url = "postgresql://nobody@127.0.0.1:1/none"
    spec = SweepSpec(StoreSpec(url), url, patience=timedelta(milliseconds=100))
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
        drain_due(spec)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
        list(sweep_in_thread(spec, 0.1))


def test_a_full_ledger_says_so_until_it_is_read() -> None:
    ledger, at = DispatchJournal(), datetime(2026, 1, 1, tzinfo=UTC)
    n = 60_000
    ledger.record_move(MovedMessages(["m"] * n, [at] * n, ["orders"] * n, [False] * n), at)
    assert ledger.is_full
    assert sum(batch.num_rows for batch in ledger.drain(0)) == n
    assert not ledger.is_full
    assert list(ledger.drain(0)) == []
