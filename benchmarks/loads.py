"""What a sync of a plan does and costs: exactly the changes, in one run, also when its driver is killed.

    eval "$(scripts/services env)"; .venv/bin/python benchmarks/loads.py [--rows 1000000] [--changes 1000] [--cores 2]
    .venv/bin/python benchmarks/loads.py --rows 100000 --kill [--sqlite]

A plan of so many rows is scheduled. In the next plan so many rows are gone, as many are new, half as many are due at
another time, and half as many have another body. A service delivers messages of another load from the same store all
the while. The sync must count exactly these changes, and a second one none. With ``--kill`` the driver of the sync is
killed with -9 when it has made some changes, and a new driver makes the rest; the counts of both together, by the
records of the store, must be the same.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.pipeline.loads import list_loads
from postdate.pipeline.schedule import ScheduleJob, ScheduleResult, schedule
from postdate.pipeline.session import FOR_LONG_JOBS, spark_session
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Outcome, RecordKind

PLAN, OTHER = "plan", "other"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
DUE = datetime(2031, 1, 1, tzinfo=UTC)
OTHER_DUE = NOW + timedelta(hours=1)
BODY_BYTES = 200
OTHER_ROWS = 20_000
SERVICE_BATCH = 100
CHANGES_BEFORE_KILL = 100
KINDS = (RecordKind.RESCHEDULED, RecordKind.CANCELLED)


def first_plan(spark: SparkSession, rows: int) -> DataFrame:
    return _plan(spark, 0, rows, 0)


def next_plan(spark: SparkSession, rows: int, changes: int) -> DataFrame:
    """Return the plan without its first ``changes`` rows, with as many new ones, and as many changed ones."""
    return _plan(spark, changes, rows + changes, changes)


def _plan(spark: SparkSession, first: int, end: int, changes: int) -> DataFrame:
    is_moved = F.col("id").between(first, first + changes // 2 - 1) & F.lit(changes > 0)
    is_other = F.col("id").between(first + changes // 2, first + changes - 1) & F.lit(changes > 0)
    seconds = F.col("id") % 1_000_000 + F.when(is_moved, 3_600).otherwise(0)
    return spark.range(first, end).select(
        F.format_string("m-%09d", "id").alias("message_id"),
        F.timestamp_seconds(F.lit(int(DUE.timestamp())) + seconds).alias("due"),
        F.concat(F.lit("queue-"), (F.col("id") % 10).cast("string")).alias("destination"),
        F.rpad(F.concat(F.col("id").cast("string"), F.when(is_other, "changed").otherwise("")), BODY_BYTES, ".").alias(
            "body"
        ),
    )


def _sync(spark: SparkSession, spec: StoreSpec, plan: DataFrame) -> ScheduleResult:
    return schedule(plan, ScheduleJob(spec, NOW, load=PLAN, sync=True))


def _counts(result: ScheduleResult) -> dict[str, int]:
    assert result.sync is not None
    sync = result.sync
    names = ("unchanged", "rescheduled", "replaced", "delivered_meanwhile", "cancelled", "not_cancelled", "retained")
    return {
        "read": result.read,
        "stored": result.accepted,
        "already_there": result.already_there,
        "conflicting": result.conflicting,
        **{name: getattr(sync, name) for name in names},
    }


def _recorded_changes(spec: StoreSpec) -> dict[str, int]:
    with open_spec(spec) as store:

        async def count(adapter: Any) -> Any:
            return await adapter.record_counts()

        counts = store.call(count)
    return {kind.name.lower(): counts.get(kind, 0) for kind in KINDS}


@contextmanager
def _serving(spec: StoreSpec) -> Generator[list[int]]:
    """Deliver the messages of the other load, little by little; yields a list with the number of those delivered."""
    stop, delivered = threading.Event(), [0]

    def serve() -> None:
        with open_spec(spec) as store:

            async def work(adapter: Any) -> int:
                claims = await adapter.claim_due(OTHER_DUE + timedelta(hours=1), SERVICE_BATCH)
                return await adapter.finish(claims, Outcome.DELIVERED, OTHER_DUE) if claims else 0

            while not stop.wait(0.05):
                delivered[0] += store.call(work)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield delivered
    finally:
        stop.set()
        thread.join()


def _start_driver(arguments: argparse.Namespace, spec: StoreSpec) -> subprocess.Popen[bytes]:
    """Start this program as a driver that only syncs the next plan."""
    place = ["--driver", spec.address, "--schema", spec.schema or ""]
    numbers = ["--rows", arguments.rows, "--changes", arguments.changes, "--cores", arguments.cores]
    command = [sys.executable, __file__, *place, *map(str, numbers)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def _run_and_kill(arguments: argparse.Namespace, spec: StoreSpec) -> dict[str, int]:
    """Kill a driver, and its Java, when it has made some changes; return how many the store has recorded."""
    driver = _start_driver(arguments, spec)
    while sum(_recorded_changes(spec).values()) < min(CHANGES_BEFORE_KILL, arguments.changes // 4):
        if driver.poll() is not None:
            raise SystemExit("the driver ended before it was killed: use more --changes")
        time.sleep(0.02)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    return _recorded_changes(spec)


def _is_exact(counts: dict[str, int], arguments: argparse.Namespace, recorded: dict[str, int]) -> bool:
    """Return whether the sync, after what a killed one has done, has made exactly the expected changes."""
    rows, changes = arguments.rows, arguments.changes
    wrong = ("already_there", "conflicting", "delivered_meanwhile", "not_cancelled", "retained")
    is_recorded = recorded == {"rescheduled": changes, "cancelled": changes}
    is_clean = counts["read"] == rows and not any(counts[name] for name in wrong)
    if arguments.kill:
        return is_recorded and is_clean
    expected = {
        "stored": changes,
        "rescheduled": changes // 2,
        "replaced": changes - changes // 2,
        "cancelled": changes,
        "unchanged": rows - 2 * changes,
    }
    return is_recorded and is_clean and all(counts[name] == count for name, count in expected.items())


def _measure(arguments: argparse.Namespace, spec: StoreSpec) -> bool:
    started = time.perf_counter()

    def tell(step: str, result: ScheduleResult | None = None, **more: Any) -> None:
        seconds = time.perf_counter() - started
        print(
            json.dumps({"step": step, "at": round(seconds, 1), **({} if result is None else _counts(result)), **more})
        )
        sys.stdout.flush()

    with spark_session(cores=arguments.cores, conf=FOR_LONG_JOBS) as spark:
        result = _sync(spark, spec, first_plan(spark, arguments.rows))
        tell("the first plan", result, seconds=round(result.seconds, 1))
        other = spark.range(OTHER_ROWS).select(
            F.format_string("o-%09d", "id").alias("message_id"),
            F.lit(OTHER_DUE).alias("due"),
            F.lit("other").alias("destination"),
        )
        schedule(other, ScheduleJob(spec, NOW, load=OTHER))
        with _serving(spec) as delivered:
            if arguments.kill:
                tell("a driver was killed", recorded=_run_and_kill(arguments, spec))
            plan = next_plan(spark, arguments.rows, arguments.changes)
            trial = schedule(plan, ScheduleJob(spec, NOW, load=PLAN, sync=True, dry_run=True))
            tell("the next plan, dry run", trial, seconds=round(trial.seconds, 1))
            result = _sync(spark, spec, plan)
            recorded = _recorded_changes(spec)
            tell("the next plan", result, seconds=round(result.seconds, 1), recorded=recorded)
            again = _sync(spark, spec, plan)
            tell("the next plan again", again, seconds=round(again.seconds, 1), delivered_by_service=delivered[0])
        loads = list_loads(spark, spec)
        waiting = {each.load: each.messages for each in loads.loads}
        tell("loads", waiting=waiting, seconds=round(loads.seconds, 1))
    is_exact = (
        _is_exact(_counts(result), arguments, recorded)
        and _counts(trial) == _counts(result)
        and _counts(again)["unchanged"] == arguments.rows
        and waiting.get(PLAN) == arguments.rows
        and waiting.get(OTHER, 0) + delivered[0] == OTHER_ROWS
    )
    print("exact" if is_exact else "NOT EXACT")
    return is_exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changes", type=int, default=1_000, help="rows that are new, as many gone, as many changed")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--sqlite", action="store_true", help="a store in a file instead of PostgreSQL")
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    parser.add_argument("--schema", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.driver is not None:
        spec = StoreSpec(arguments.driver, schema=arguments.schema or None)
        with spark_session(cores=arguments.cores, conf=FOR_LONG_JOBS) as spark:
            _sync(spark, spec, next_plan(spark, arguments.rows, arguments.changes))
        return
    if arguments.sqlite:
        with tempfile.TemporaryDirectory() as folder:
            raise SystemExit(not _measure(arguments, StoreSpec(f"sqlite:///{Path(folder) / 'messages.db'}")))
    url, schema = os.environ["POSTDATE_POSTGRES_URL"], f"loads_{uuid.uuid4().hex[:12]}"
    try:
        is_exact = _measure(arguments, StoreSpec(url, schema=schema))
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
    raise SystemExit(not is_exact)


if __name__ == "__main__":
    main()
