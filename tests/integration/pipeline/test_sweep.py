"""Sweeps on Spark: once, and as a query that goes on; over a store and queues in one file."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.waiting import Eventually

from postdate import DelayedMessage, LocalTransport, SystemClock
from postdate.cli.entry import run
from postdate.cli.pipeline import sweep as command_module
from postdate.config.sources import load_settings
from postdate.errors import PipelineError, StoreNotSetUp, TransportUnavailable
from postdate.pipeline.audit import audit
from postdate.pipeline.dispatching import SweepSpec, sweep_in_thread
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.pipeline.sweep import SweepQuery, sweep, sweep_continuously
from postdate.ports import AdministrableStore

SECOND = timedelta(seconds=1)


def now() -> datetime:
    return SystemClock().now()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "messages.db"


@pytest.fixture
def spec(path: Path) -> SweepSpec:
    return made(path)


def made(path: Path, **settings: Any) -> SweepSpec:
    async def create() -> None:
        queues = LocalTransport(path)
        await queues.create_queues(["orders", "error"])
        await queues.close()

    store = StoreSpec(f"sqlite:///{path}", synchronous="normal")
    spec = SweepSpec(store, f"local:///{path}", {"synchronous": "normal"}, **settings)
    with open_spec(spec.store, create=True) as store:
        store.setup()
    anyio.run(create)
    return spec


def put(spec: SweepSpec, names: Iterable[str], due: datetime | None = None, destination: str = "orders") -> None:
    messages = [DelayedMessage(name, due or now() - SECOND, destination, {}, b"") for name in names]
    with open_spec(spec.store) as store:
        store.store_many(messages, now())


def overdue(spec: SweepSpec) -> int:
    with open_spec(spec.store) as store:
        return store.count_overdue(now())


def kinds(lines: DataFrame) -> dict[str, int]:
    return {row["kind"]: row["count"] for row in lines.groupBy("kind").count().collect()}


def test_once_delivers_what_is_due_and_counts_it(spark: SparkSession, spec: SweepSpec) -> None:
    put(spec, [f"m-{n}" for n in range(3_000)])
    put(spec, ["lost way"], destination="no-such-queue")
    put(spec, ["later"], due=now() + timedelta(hours=1))
    result = sweep(spark, spec, slots=2)
    assert (result.delivered, result.failed, result.left, result.is_complete) == (3_000, 1, 0, False)
    again = sweep(spark, spec, slots=2)
    assert (again.delivered, again.failed, again.left, again.is_complete) == (0, 0, 0, True)
    assert _delivered(spec) == 3_000


@pytest.mark.parametrize(("seconds", "kinds"), [(0.5, []), (None, ["failed"])])
def test_only_who_goes_on_waits_for_a_queue_as_a_service_does(
    path: Path, seconds: float | None, kinds: list[str]
) -> None:
    """Who ends would leave the message behind, and say that all is done."""
    spec = made(path, missing_queue_wait=timedelta(minutes=10))
    put(spec, ["early bird"], destination="not-yet")
    lines = [line for batch in sweep_in_thread(spec, seconds) for line in batch.to_pylist()]
    assert [line["kind"] for line in lines] == kinds
    with open_spec(spec.store) as opened:
        assert isinstance(opened.store, AdministrableStore)
        assert opened.portal.call(opened.store.statistics, now()).pending == (not kinds)


def test_a_sweep_has_the_settings_of_the_service(tmp_path: Path) -> None:
    (tmp_path / "postdate.toml").write_text(
        f"""
        [store]
        address = "sqlite:///{tmp_path}/messages.db"
        [delayed_delivery]
        poison_queue = "poison"
        errors_return_to = "destination"
        bytes_in_flight = 1000000
        missing_queue_wait = "3m"
        number_of_retries = 2
        use_store_clock = false
        maximum_recovery_failures_per_second = 7
        """
    )
    spec = SweepSpec.of(load_settings(tmp_path / "postdate.toml", {}))
    assert (spec.error_queue, spec.errors_return_to_destination, spec.number_of_retries) == ("poison", True, 2)
    assert (spec.bytes_in_flight, spec.missing_queue_wait) == (1_000_000, timedelta(minutes=3))
    assert (spec.use_store_clock, spec.most_failures_per_second) == (False, 7)


def test_a_ledger_is_added_to_and_the_audit_reads_it(spark: SparkSession, spec: SweepSpec, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    for name in ("a", "b"):
        put(spec, [f"{name}-{n}" for n in range(100)])
        assert sweep(spark, spec, ledger=ledger).delivered == 100
    assert kinds(spark.read.parquet(str(ledger))) == {"delivered": 200}
    audited = audit(spark, spec.store, now(), records=[str(ledger)])
    assert (audited.is_clean, audited.counts.delivered, audited.counts.duplicated) == (True, 200, 0)


def test_a_query_delivers_as_messages_fall_due_and_goes_on_from_its_checkpoint(
    spark: SparkSession, spec: SweepSpec, tmp_path: Path, eventually
) -> None:
    checkpoint, ledger = tmp_path / "checkpoint", tmp_path / "ledger"
    settings: dict[str, Any] = {"checkpoint": checkpoint, "ledger": ledger, "slots": 2, "residency": SECOND}
    for first in (0, 500):
        with sweep_continuously(spark, spec, **settings) as query:
            put(spec, [f"m-{n}" for n in range(first, first + 500)], due=now() + SECOND)
            eventually(lambda: ended(query) or _delivered(spec) >= first + 500, "what is due is delivered")  # noqa: B023
    lines = spark.read.parquet(str(ledger))
    assert kinds(lines) == {"delivered": 1_000}
    assert lines.where("at < due").count() == 0
    assert _delivered(spec) == 1_000


def ended(query: SweepQuery) -> bool:
    """Give the query a moment; raise when it has failed, for then nothing is to be waited for."""
    return query.wait(0.1)


def _delivered(spec: SweepSpec) -> int:
    async def count() -> int:
        queues = LocalTransport(spec.transport.removeprefix("local:///"))
        try:
            return (await queues.queue_lengths()).get("orders", 0)
        finally:
            await queues.close()

    return anyio.run(count)


def test_what_cannot_be_is_said_before_the_query_starts(spark: SparkSession, spec: SweepSpec, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="at least one dispatcher, not slots=0"):
        sweep_continuously(spark, spec, checkpoint=tmp_path / "checkpoint", slots=0)
    with pytest.raises(PipelineError, match="above zero, not 0:00:00"):
        sweep_continuously(spark, spec, checkpoint=tmp_path / "checkpoint", residency=timedelta(0))
    missing = SweepSpec(StoreSpec(f"sqlite:///{tmp_path / 'none.db'}"), spec.transport)
    with pytest.raises(StoreNotSetUp, match=r"none\.db"):
        sweep(spark, missing)
    unreachable = SweepSpec(spec.store, "amqp://guest:s3cret@127.0.0.1:1/")
    with pytest.raises(TransportUnavailable, match=r"127\.0\.0\.1") as error:
        sweep(spark, unreachable)
    assert "s3cret" not in str(error.value)


def test_the_checkpoint_of_another_job_is_refused(
    spark: SparkSession, spec: SweepSpec, tmp_path: Path, eventually
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with sweep_continuously(spark, spec, checkpoint=checkpoint, residency=SECOND / 10) as query:
        eventually(lambda: ended(query) or len(query.query.recentProgress) > 1, "it works")
    with pytest.raises(PipelineError, match=r"checkpoint is that of another job: store .*messages.db.*not .*other.db"):
        sweep_continuously(spark, made(tmp_path / "other.db"), checkpoint=checkpoint)
    with pytest.raises(PipelineError, match=r"is that of another job: slots"):
        sweep_continuously(spark, spec, checkpoint=checkpoint, slots=7)
    foreign = tmp_path / "foreign"
    rows = spark.readStream.format("rate").load().writeStream.format("noop")
    ticking = rows.option("checkpointLocation", str(foreign)).start()
    eventually((foreign / "metadata").exists, "the query has begun")
    ticking.stop()
    with pytest.raises(PipelineError, match="is that of another query"):
        sweep_continuously(spark, spec, checkpoint=foreign)


def test_a_store_that_dies_fails_the_query_with_its_name(
    spark: SparkSession, path: Path, tmp_path: Path, eventually
) -> None:
    spec = made(path, patience=SECOND / 10)
    query = sweep_continuously(spark, spec, checkpoint=tmp_path / "checkpoint", residency=SECOND / 10)
    eventually(lambda: ended(query) or len(query.query.recentProgress) > 1, "it works")
    path.rename(tmp_path / "moved.db")
    with pytest.raises(PipelineError, match=r"the sweep has failed.*messages\.db"):
        query.wait()
    with pytest.raises(PipelineError, match=r"the sweep has failed"):
        query.stop()


def command_line(folder: Path, *others: str) -> list[str]:
    places = [f"--{name}={folder / name}" for name in ("checkpoint", "ledger")]
    return ["pipeline", "sweep", "--continuous", *places, *others]


def settings_of(spec: SweepSpec) -> dict[str, str]:
    return {
        "POSTDATE_STORE__ADDRESS": spec.store.address,
        "POSTDATE_TRANSPORT__ADDRESS": spec.transport,
        "POSTDATE_STORE__SYNCHRONOUS": "normal",
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_goes_on_until_a_signal_comes(
    spark: SparkSession,
    spec: SweepSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
    number: signal.Signals,
) -> None:
    """In this process, on its Spark. What is stored after something was delivered is delivered still."""
    monkeypatch.setattr(command_module, "run_on_spark", lambda job, cluster, **_: job(spark))
    for variable, value in settings_of(spec).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    put(spec, ["m-1"])

    def tell() -> None:
        eventually(lambda: overdue(spec) == 0, "what is due is delivered")
        put(spec, ["m-2"])
        eventually(lambda: overdue(spec) == 0, "what has just become due is delivered")
        os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as other:
        told = other.submit(tell)
        assert run(command_line(tmp_path, "--residency=1s")) == 0
        told.result()
    assert {each.message_id for each in spark.read.parquet(str(tmp_path / "ledger")).collect()} == {"m-1", "m-2"}
    assert spark.streams.active == []


@pytest.mark.soak(
    "a command on Spark, as a process of its own",
    part="spark",
    proven_by="tests/integration/pipeline/test_sweep.py::test_the_command_goes_on_until_a_signal_comes",
)
def test_the_command_goes_on_until_it_is_told_to_stop(
    spark: SparkSession, spec: SweepSpec, tmp_path: Path, eventually
) -> None:
    put(spec, ["m-1", "m-2"])
    environment, arguments = {**os.environ, **settings_of(spec)}, command_line(tmp_path, "--cores=1")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "postdate.cli", *arguments], cwd=tmp_path, env=environment, stderr=log
        )
    try:
        eventually(lambda: overdue(spec) == 0 or process.poll() is not None, "what is due is delivered")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert Counter(row["message_id"] for row in spark.read.parquet(str(tmp_path / "ledger")).collect()) == Counter(
        ["m-1", "m-2"]
    )
