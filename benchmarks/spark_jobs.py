"""``python -m benchmarks pipeline`` and ``sweep``: the jobs beside the database's own limits, in the same run.

What a session of Spark costs to start, and its first query, is told apart: both are paid once. Everything else of a job
is counted: planning, tasks, Python, the look at the store before and after.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from benchmarks import runs
from benchmarks.bench import Arrivals, Bench
from benchmarks.deployment import Workload, load, number_of
from benchmarks.limits import arrived, insert_limit, move_limit
from benchmarks.places import Targets
from benchmarks.result import BenchmarkResult, Figure, LatenessInMilliseconds, lateness
from benchmarks.targets.postgres import PostgresTarget
from postdate.cli.bench.messages import BODY, STUCK_SECONDS, headers_of, id_of
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError, PostdateError
from postdate.pipeline.audit import audit
from postdate.pipeline.dispatching import SweepSpec
from postdate.pipeline.frames import scan_frame, scan_parts
from postdate.pipeline.schedule import ScheduleJob, schedule
from postdate.pipeline.session import FOR_LONG_JOBS, spark_session
from postdate.pipeline.stores import StoreSpec
from postdate.pipeline.sweep import SweepQuery, sweep, sweep_continuously

T = TypeVar("T")

_COPIED_AT_ONCE = 20_000
_WARM_UP = 200
_OTHERS_NUMBERS = 1 << 40
_TAKEN_AT_ONCE = 5_000
_LOOK_SECONDS = 0.001
_BEGINS_WITHIN_SECONDS = 120.0
_EMPTY_BATCHES = 15


# --- the jobs ---------------------------------------------------------------------------------------------------------


def jobs(bench: Bench, n: int, cores: list[int]) -> BenchmarkResult:
    """Schedule ``n`` messages, read them, sweep them: with each number of cores, and in the barest way."""
    figures: dict[str, Figure] = {}
    lost = duplicated = 0
    with bench.targets() as targets:
        _scanned(targets)
        bench.report(f"limits: {n:,} bare rows copied in, and moved")
        copy_in = insert_limit(targets, n, _COPIED_AT_ONCE)
        assert copy_in is not None, "PostgreSQL has COPY"
        move = move_limit(targets, n)
        servers = targets.facts()
    for number in cores:
        found, arrivals = _with_cores(bench, n, number)
        for name, figure in found.items():
            figures[f"{name}_on_{number}"] = figure
        lost, duplicated = lost + arrivals.lost, duplicated + arrivals.duplicated
        for job, limit in (("schedule", copy_in), ("sweep", move), ("scan", found["copy_out_per_s"])):
            figures[f"{job}_of_limit_on_{number}"] = found[f"{job}_per_s"] / limit
    figures |= {"copy_in_per_s": copy_in, "move_per_s": move}
    return BenchmarkResult("pipeline", n, lost=lost, duplicated=duplicated, extra=figures, servers=servers)


def _with_cores(bench: Bench, n: int, cores: int) -> tuple[dict[str, float], Arrivals]:
    found = dict[str, float]()
    with bench.targets() as targets:
        bench.report(f"starting Spark on {cores} cores")
        started = time.perf_counter()
        with spark_session("postdate-bench", cores=cores, conf=FOR_LONG_JOBS) as spark:
            found["session_start_s"] = time.perf_counter() - started
            found["first_query_s"], _ = _timed(lambda: _empty_job(spark, cores))
            found["empty_job_s"] = statistics.median(_timed(lambda: _empty_job(spark, cores))[0] for _ in range(5))
            store, now = _store(targets), SystemClock().now()
            due = now - timedelta(seconds=n * 1e-3 + 1)
            path = str(bench.folder / f"messages-{cores}")
            _messages(spark, load(targets.deployment, range(n), due, timedelta(milliseconds=1)), cores).write.parquet(
                path
            )
            far = load(
                targets.deployment,
                range(_OTHERS_NUMBERS, _OTHERS_NUMBERS + _WARM_UP),
                now + timedelta(days=9),
                timedelta(0),
            )
            schedule(_messages(spark, far, cores), ScheduleJob(store, now))
            targets.store.target.settle()

            bench.report(f"scheduling {n:,} messages with {cores} cores")
            seconds, scheduled = _timed(lambda: schedule(spark.read.parquet(path), ScheduleJob(store, now)))
            if scheduled.accepted != n:
                raise PostdateError(f"{scheduled.accepted:,} of {n:,} messages were stored: {scheduled}")
            found["schedule_per_s"] = n / seconds
            targets.store.target.settle()

            bench.report(f"reading {n:,} messages with {cores} cores")
            found["copy_out_per_s"] = _scanned(targets).scan_limit(targets.deployment.names.endpoint)
            seconds, _ = _timed(lambda: _read(spark, store, cores))
            found["scan_per_s"] = n / seconds

            bench.report(f"sweeping {n:,} messages with {cores} cores")
            spec = _sweep(targets)
            seconds, swept = _timed(lambda: sweep(spark, spec))
            found["sweep_per_s"] = swept.delivered / seconds
        arrivals = Arrivals(range(n))
        arrivals.add(arrived(targets, n))
    return found, arrivals


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _empty_job(spark: SparkSession, cores: int) -> None:
    def nothing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    spark.range(0, cores, 1, cores).mapInArrow(nothing, "id long").collect()


def _messages(spark: SparkSession, messages: Workload, cores: int) -> DataFrame:
    """Return a load as a data frame, made by Spark: the same ids, due times and headers that a service would store."""
    run = messages.run
    digits = F.lpad(F.lower(F.hex("id")), 12, "0")
    message_id = F.concat(digits.substr(1, 8), F.lit("-"), digits.substr(9, 4), F.lit(id_of(0, run)[13:]))
    filler = headers_of("")
    headers = F.create_map(
        *(part for name, text in filler.items() for part in (F.lit(name), F.lit(text) if text else message_id))
    )
    offset = ((F.col("id") - messages.start) * F.lit(messages.spacing)).cast("long")
    return spark.range(messages.start, messages.start + messages.count, 1, cores).select(
        message_id.alias("message_id"),
        F.timestamp_micros(F.lit(messages.first_due) + offset).alias("due"),
        F.lit(messages.queue).alias("destination"),
        headers.alias("headers"),
        F.lit(BODY).alias("body"),
    )


def _read(spark: SparkSession, store: StoreSpec, cores: int) -> None:
    columns = ("message_id", "destination", "due", "expires_at", "headers", "body")
    frame = scan_frame(spark, store, "pending", columns, scan_parts(store, "pending", cores))
    frame.write.format("noop").mode("overwrite").save()


def _store(targets: Targets) -> StoreSpec:
    return StoreSpec(
        targets.deployment.store.address,
        endpoint=targets.deployment.names.endpoint,
        **targets.deployment.store.settings,
    )


def _sweep(targets: Targets) -> SweepSpec:
    deployment = targets.deployment
    return SweepSpec(
        _store(targets), deployment.transport.address, deployment.transport.settings, error_queue=deployment.names.error
    )


def _scanned(targets: Targets) -> PostgresTarget:
    if not isinstance(targets.store.target, PostgresTarget):
        raise ConfigurationError(
            f"the limit of reading in bulk is known for postgres only, not for {targets.store.name}"
        )
    return targets.store.target


# --- how late a continuous sweep is -----------------------------------------------------------------------------------


def continuous(bench: Bench, rate: int, seconds: float, residency: float) -> BenchmarkResult:
    """Deliver ``rate`` messages a second by resident dispatchers in Spark's executors, and by a plain service."""
    plain = runs.even(bench, rate, seconds, stored_by="before", receiver=False)
    n, folder = int(rate * seconds), bench.folder
    with bench.targets() as targets:
        bench.report("starting Spark")
        with spark_session("postdate-bench", conf=FOR_LONG_JOBS) as spark:
            spec, empty = _sweep(targets), _empty_batches(spark, _sweep(targets), folder)
            ledger = folder / "ledger"
            with sweep_continuously(
                spec=spec,
                spark=spark,
                checkpoint=folder / "checkpoint",
                ledger=ledger,
                residency=timedelta(seconds=residency),
            ) as query:
                _wait_for_batches(query, 1)
                messages = load(
                    targets.deployment,
                    range(n),
                    SystemClock().now() + timedelta(seconds=10 + n / 10_000),
                    timedelta(seconds=1) / rate,
                )
                bench.fill(targets, messages)
                if SystemClock().now() > messages.due(0):
                    raise PostdateError("storing took longer than foreseen: the messages are due already")
                bench.report(f"delivering {rate:,} messages a second")
                taken = _taken(targets, messages, seconds)
                handovers = [each for each in _durations(query) if each > residency * 1_000]
            found = _ledger(spark, ledger)
            audited = audit(spark, spec.store, SystemClock().now(), records=[str(ledger)])
    if not audited.is_clean:
        raise PostdateError(f"the audit of store and ledger is not clean: {audited.findings}")
    arrivals, late = Arrivals(range(n)), [each for _, each in taken]
    arrivals.add(message_id for message_id, _ in taken)
    extra: dict[str, Figure] = {
        "empty_micro_batch_ms": empty,
        "handover_ms": statistics.median(handovers) - residency * 1_000 if handovers else 0.0,
        "ledger_lines": found["lines"],
        "recorded_p50_ms": found["p50_ms"],
        "recorded_p99_ms": found["p99_ms"],
        **_prefixed("plain", plain.lateness),
    }
    return BenchmarkResult(
        "sweep",
        n,
        lost=arrivals.lost,
        duplicated=arrivals.duplicated,
        early=arrivals.unexpected + sum(value < 0 for value in late),
        lateness=lateness(late),
        floor=plain.floor,
        extra=extra,
        servers=plain.servers,
    )


def _prefixed(prefix: str, found: LatenessInMilliseconds | None) -> dict[str, Figure]:
    return {} if found is None else {f"{prefix}_p50_ms": found.p50_ms, f"{prefix}_p99_ms": found.p99_ms}


def _empty_batches(spark: SparkSession, spec: SweepSpec, folder: Path) -> float:
    """Return the milliseconds of a micro-batch whose tasks look once and find nothing."""
    with sweep_continuously(
        spark, spec, checkpoint=folder / "empty", ledger=folder / "nothing", residency=timedelta(milliseconds=1)
    ) as query:
        _wait_for_batches(query, _EMPTY_BATCHES)
        return statistics.median(_durations(query)[-_EMPTY_BATCHES // 2 :])


def _durations(query: SweepQuery) -> list[float]:
    return [float(each["durationMs"]["triggerExecution"]) for each in _progress(query)]


def _progress(query: SweepQuery) -> list[dict[str, Any]]:
    return [json.loads(each.json) for each in query.query.recentProgress]


def _wait_for_batches(query: SweepQuery, number: int) -> None:
    look_again, deadline = threading.Event(), time.monotonic() + _BEGINS_WITHIN_SECONDS
    while len(query.query.recentProgress) < number:
        query.wait(0)
        if time.monotonic() > deadline:
            raise PostdateError(f"the query has not come to {number} micro-batches in {_BEGINS_WITHIN_SECONDS:.0f} s")
        look_again.wait(0.05)


def _taken(targets: Targets, messages: Workload, seconds: float) -> list[tuple[str, float]]:
    """Take messages off their queue as they appear; return ids and seconds since each was due."""
    found, look_again = list[tuple[str, float]](), threading.Event()
    deadline = messages.due(0) + timedelta(seconds=seconds + STUCK_SECONDS)
    while len(found) < messages.count and SystemClock().now() < deadline:
        taken = targets.queues.target.take(targets.deployment.names.arrived, _TAKEN_AT_ONCE)
        now = SystemClock().now()
        found += [(each, (now - messages.due(number_of(each))) / timedelta(seconds=1)) for each in taken]
        if not taken:
            look_again.wait(_LOOK_SECONDS)
    return found


def _ledger(spark: SparkSession, ledger: Path) -> dict[str, float]:
    late = (F.unix_micros("at") - F.unix_micros("due")) / 1_000
    row = spark.read.parquet(str(ledger)).agg(F.count("*"), F.percentile(late, [0.5, 0.99])).collect()[0]
    p50, p99 = row[1] or (0.0, 0.0)
    return {"lines": row[0], "p50_ms": p50, "p99_ms": p99}
