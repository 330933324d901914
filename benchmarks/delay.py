"""Measures the delay operator, with a driver that is killed: ``python -m benchmarks.delay --json``.

The query runs in a process of its own, from files of messages into files of delivered rows. After the operator each row
gets the wall time at which an executor handed it on. What counts as delivered is what the sink committed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make schemas, fields and arrays generic in a type that only the running program knows.

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postdate.clock import SystemClock, to_microseconds
from postdate.errors import PipelineError
from postdate.pipeline.delay.operator import delay, delay_conf, reopen_last_batch
from postdate.pipeline.files import read_directory
from postdate.pipeline.rows import INSTANT
from postdate.pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FILES = 20
_BODY_BYTES = 100
_SCHEMA = "id string, due timestamp, body string"
_TIMES = ("due", "emitted")
_LATEST = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Places:
    """Directories of one run, below one directory."""

    base: Path

    @property
    def messages(self) -> Path:
        """What comes in."""
        return self.base / "messages"

    @property
    def delivered(self) -> Path:
        """What goes out."""
        return self.base / "delivered"

    @property
    def batches(self) -> Path:
        """What goes out to a sink that keeps the ids of its micro-batches: a file for each."""
        return self.base / "batches"

    @property
    def checkpoint(self) -> Path:
        """Where rows wait."""
        return self.base / "checkpoint"


def measure_delay(
    n: int = 1_000_000,
    spread_seconds: float = 60,
    kills: int = 5,
    lead_seconds: float | None = None,
    cores: int = 2,
) -> dict[str, Any]:
    """Delay ``n`` rows twice: once undisturbed but for one restart while all of them wait, once with killed drivers.

    Args:
        n: rows of about 130 bytes, each with an id of its own.
        spread_seconds: over which their due times are spread evenly.
        kills: of the second run, at random moments while rows come in and go out; 0 leaves it out.
        lead_seconds: from the start until the first row is due; enough to load and restart by default.
        cores: of Spark.

    Returns:
        Plain values for JSON. Of ``undisturbed``: rows loaded in a second, from the first micro-batch to the commit of
        the last that brought rows; lateness in seconds; state rows and bytes; seconds of the restart. Of both runs: how
        many rows were lost, doubled, and early.
    """
    lead = 40 + n / 12_000 if lead_seconds is None else lead_seconds
    with tempfile.TemporaryDirectory(prefix="postdate-delay-") as directory:
        undisturbed = _undisturbed(Places(Path(directory) / "undisturbed"), n, spread_seconds, lead, cores)
        result = {"n": n, "spread_seconds": spread_seconds, "cores": cores, "undisturbed": undisturbed}
        if kills:
            killed = Places(Path(directory) / "killed")
            run_killed(killed, n, kills, spread_seconds, cores)
            result["killed"] = {"kills": kills, **asdict(accounted(killed, n))}
    return result


def measure_recovery(
    n: int = 1_000_000, spread_seconds: float = 60, lead_seconds: float | None = None, cores: int = 2
) -> dict[str, Any]:
    """Kill the driver with SIGKILL while all of ``n`` rows wait, and once more while they come out.

    The sink is a ``foreachBatch`` that takes each batch id once. It starts again when the first rows are due.

    Returns:
        Plain values for JSON. Of each start after a kill: seconds until Spark has started, and until the first rows are
        in the sink. Of the sink: micro-batches that Spark repeated, and how many of them had other rows. What became of
        the rows; their lateness includes the time without a driver. ``settled_p99_seconds`` is the lateness of rows
        that were due at least ten seconds after the sink got rows again.
    """
    lead = 40 + n / 12_000 if lead_seconds is None else lead_seconds
    with tempfile.TemporaryDirectory(prefix="postdate-delay-") as directory:
        places = Places(Path(directory))
        places.batches.mkdir()
        (places.base / "repeated").touch()
        first_due_us = write_messages(places.messages, range(n), lead, spread_seconds, _file_rows(n))
        arrived, cpu_seconds = 0, 0.0
        loading_started = time.monotonic()
        with driver(places, n, cores, keeps_ids=True) as loading:
            for progress in loading.progress():
                arrived += progress["rows"]
                if arrived >= n:
                    break
            load_seconds = time.monotonic() - loading_started
            cpu_seconds += loading.kill()
        waiting_seconds = first_due_us / 1e6 - to_microseconds(SystemClock().now()) / 1e6
        if waiting_seconds < 0:
            raise PipelineError(f"the first rows were due before all had arrived; give more than lead_seconds={lead}")
        checkpoint_bytes = sum(file.stat().st_size for file in places.checkpoint.rglob("*") if file.is_file())
        time.sleep(waiting_seconds)
        starts: list[dict[str, float]] = []
        settled_us = 0
        for is_last in (False, True):
            files = set(places.batches.glob("*.parquet"))
            started = time.monotonic()
            with driver(places, n, cores, keeps_ids=True) as running:
                running.ready()
                session_seconds = time.monotonic() - started
                while not set(places.batches.glob("*.parquet")) - files:
                    if running.process.poll() is not None:
                        raise PipelineError("the driver ended before rows went on")
                    time.sleep(0.05)
                starts.append(
                    {
                        "session_seconds": round(session_seconds, 3),
                        "first_rows_seconds": round(time.monotonic() - started, 3),
                    }
                )
                settled_us = to_microseconds(SystemClock().now()) + 10_000_000
                if is_last:
                    running.finished()
                    cpu_seconds += running.cpu_seconds
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running.process.wait(timeout=2)
                        raise PipelineError(f"no row waits for the second kill; give more than {spread_seconds=}")
                    cpu_seconds += running.kill()
        rows = pa.concat_tables(map(pq.read_table, places.batches.glob("*.parquet")))
        repeated = [json.loads(line) for line in (places.base / "repeated").read_text().splitlines()]
        due, emitted = (rows.column(name).cast(pa.int64()).to_numpy() for name in ("due", "emitted"))
        settled = (emitted - due)[due >= settled_us] / 1e6
        return {
            "n": n,
            "cores": cores,
            "load_seconds": round(load_seconds, 1),
            "checkpoint_bytes": checkpoint_bytes,
            "starts_after_a_kill": starts,
            "repeated_micro_batches": len(repeated),
            "repeated_with_other_rows": sum(not each["same"] for each in repeated),
            **asdict(accounted(places, n, rows)),
            "settled_rows": len(settled),
            "settled_p99_seconds": round(float(np.percentile(settled, 99)), 3) if len(settled) else None,
            "cpu_seconds": round(cpu_seconds, 1),
        }


# --- messages and what became of them --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the messages of a run.

    Args:
        delivered: rows that the sink committed.
        lost: ids that are missing.
        doubled: rows beyond the first with their id.
        changed: rows that are not as they were.
        early: rows that were handed on before their due time.
        lateness_p50_seconds: from the due time to the wall time at which the row was handed on; and the two after it.
        lateness_p99_seconds: see above.
        lateness_max_seconds: see above.
    """

    delivered: int
    lost: int
    doubled: int
    changed: int
    early: int
    lateness_p50_seconds: float
    lateness_p99_seconds: float
    lateness_max_seconds: float


def write_messages(directory: Path, numbers: range, lead_seconds: float, spread_seconds: float, file_rows: int) -> int:
    """Write messages to Parquet files; they are due evenly from ``lead_seconds`` on, in random order.

    Returns:
        When the first is due, in microseconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first_us = to_microseconds(SystemClock().now()) + int(lead_seconds * 1e6)
    places = np.random.default_rng(4).permutation(len(numbers))
    due = first_us + places * int(spread_seconds * 1e6) // max(len(numbers), 1)
    ids = pc.cast(pa.array(np.arange(numbers.start, numbers.stop), pa.int64()), pa.string())
    rows = pa.table(
        {
            "id": ids,
            "due": pa.array(due, pa.int64()).cast(INSTANT),
            "body": pc.utf8_lpad(ids, _BODY_BYTES, "x"),
        }
    )
    for start in range(0, len(numbers), file_rows):
        # Renamed when it is whole: a query may be looking.
        unfinished = directory / f".{numbers[start]:09}"
        pq.write_table(rows.slice(start, file_rows), unfinished)
        unfinished.rename(directory / f"{numbers[start]:09}.parquet")
    return first_us


def _file_rows(n: int) -> int:
    return -(-n // _FILES)


class Delivered:
    """What a sink of Parquet files has committed, read from its log without Spark."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rows: dict[str, int] = {}

    def files(self) -> list[str]:
        """Return the paths of all committed files."""
        log = self._directory / "_spark_metadata"
        found = [file for file in log.iterdir() if not file.name.startswith(".")] if log.exists() else []
        batches = {int(file.name.partition(".")[0]): file for file in found}
        compacted = max((number for number, file in batches.items() if file.suffix == ".compact"), default=0)
        return [
            json.loads(entry)["path"].removeprefix("file://")
            for number in sorted(batches)
            if number >= compacted
            for entry in batches[number].read_text(encoding="utf-8").splitlines()[1:]  # the first line is the version
        ]

    def rows(self) -> int:
        """Return how many rows there are; quick when asked again."""
        for file in self.files():
            if file not in self._rows:
                self._rows[file] = pq.read_metadata(file).num_rows
        return sum(self._rows.values())

    def table(self) -> pa.Table:
        """Return the rows, times as instants: Spark writes them in a way that names no zone and counts nanoseconds."""
        files = [pq.ParquetFile(file, coerce_int96_timestamp_unit="us").read() for file in self.files()]
        rows = pa.concat_tables(files)
        instants = [pa.field(f.name, INSTANT) if pa.types.is_timestamp(f.type) else f for f in rows.schema]
        return rows.cast(pa.schema(instants))


def accounted(places: Places, n: int, rows: pa.Table | None = None) -> Account:
    """Compare what was delivered with what was written; ``rows`` are those that a sink has, by default its files."""
    rows = Delivered(places.delivered).table() if rows is None else rows
    ids = rows.column("id").cast(pa.int64()).to_numpy()
    times = np.bincount(ids, minlength=n)
    emitted = rows.column("emitted").cast(pa.int64()).to_numpy()
    due = rows.column("due").cast(pa.int64()).to_numpy()
    written = pq.read_table(places.messages).sort_by("id")
    sent = written.take(pc.index_in(rows.column("id"), value_set=written.column("id")))
    same = pc.and_(pc.equal(sent.column("due"), rows.column("due")), pc.equal(sent.column("body"), rows.column("body")))
    late = (emitted - due) / 1e6
    p50, p99, worst = (round(float(value), 3) for value in np.percentile(late, [50, 99, 100]))
    return Account(
        delivered=rows.num_rows,
        lost=int((times == 0).sum()),
        doubled=int((times[times > 1] - 1).sum()),
        changed=rows.num_rows - int(same.to_numpy().sum()),
        early=int((late < 0).sum()),
        lateness_p50_seconds=p50,
        lateness_p99_seconds=p99,
        lateness_max_seconds=worst,
    )


# --- runs ------------------------------------------------------------------------------------------------------------


def _undisturbed(places: Places, n: int, spread: float, lead: float, cores: int) -> dict[str, Any]:
    first_due_us = write_messages(places.messages, range(n), lead, spread, _file_rows(n))
    arrived = 0
    began = ended = 0.0
    state: Mapping[str, Any] = {}
    with driver(places, n, cores) as loading:
        for progress in loading.progress():
            if progress["rows"]:
                began = began or progress["began"]
                ended = progress["began"] + progress["seconds"]
                arrived += progress["rows"]
            if arrived >= n:
                state = progress
                break
        loading.kill()
    if to_microseconds(SystemClock().now()) > first_due_us:
        raise PipelineError(f"the first rows were due before all had arrived; give more than lead_seconds={lead}")
    size = sum(file.stat().st_size for file in (places.checkpoint / "state").rglob("*") if file.is_file())
    started = time.monotonic()
    with driver(places, n, cores) as resumed:
        resumed.ready()
        session_seconds = time.monotonic() - started
        next(resumed.progress())
        restart_seconds = time.monotonic() - started
        resumed.finished()
    return {
        "loaded_rows_per_second": round(n / (ended - began)),
        "load_seconds": round(ended - began, 3),
        "waiting_rows": n,
        "state_rows": state["state_rows"],
        "state_memory_bytes": state["state_memory_bytes"],
        "checkpoint_bytes": size,
        "restart_session_seconds": round(session_seconds, 3),
        "restart_first_micro_batch_seconds": round(restart_seconds - session_seconds, 3),
        **asdict(accounted(places, n)),
    }


def run_killed(places: Places, n: int, kills: int, spread_seconds: float, cores: int) -> None:
    """Deliver ``n`` rows with a driver that is killed so often, at random moments.

    Half of the rows come first, the others in equal shares before each start. So rows arrive, wait, and become due in
    the life of each driver and between them, however long Spark takes to start.
    """
    chance = random.Random(4)
    share = n // 2 // (kills + 1)
    written = 0
    for killed in range(kills + 1):
        end = n if killed == kills else n // 2 + (killed + 1) * share
        write_messages(places.messages, range(written, end), 0, spread_seconds, _file_rows(n))
        written = end
        with driver(places, n, cores) as running:
            if killed == kills:
                running.finished()
                return
            # Not while Spark starts, which proves nothing: some micro-batches in, and then anywhere within one.
            batches = running.progress()
            for _ in range(chance.randrange(1, 4)):
                next(batches)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(timeout=chance.uniform(0, 0.7))
            running.kill()


class Driver:
    """A process that runs the query: it writes a line for each micro-batch, and ends when all rows are delivered."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self.cpu_seconds = 0.0
        """Of the process group when it was last looked at."""

    def lines(self) -> Iterator[str]:
        """Return what it writes; blocks for each line.

        Raises:
            PipelineError: it ended with an error.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield line
        if self.process.wait():
            end = self._log.read_text(encoding="utf-8", errors="replace")[-2_000:]
            raise PipelineError(f"the driver ended with status {self.process.returncode}: {end}")

    def ready(self) -> None:
        """Wait until Spark has started."""
        next(line for line in self.lines() if json.loads(line).get("ready"))

    def progress(self) -> Iterator[dict[str, Any]]:
        """Return each micro-batch when it has been committed."""
        return (entry for entry in map(json.loads, self.lines()) if not entry.get("ready"))

    def finished(self) -> None:
        """Wait until all rows are delivered and the process has ended.

        Raises:
            PipelineError: it ended with an error, or not within ten minutes.
        """
        deadline = time.monotonic() + _LATEST.total_seconds()
        for _ in self.lines():
            self.cpu_seconds = max(self.cpu_seconds, group_cpu_seconds(self.process.pid))
            if time.monotonic() > deadline:
                raise PipelineError(f"not all rows were delivered within {_LATEST}")

    def kill(self) -> float:
        """Kill the process and its Java machine, at once and without a chance to clean up. Return its CPU seconds."""
        self.cpu_seconds = max(self.cpu_seconds, group_cpu_seconds(self.process.pid))
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return self.cpu_seconds


def group_cpu_seconds(group: int) -> float:
    """Return the CPU seconds of all processes of a group that are alive, with those of their ended children."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended.
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def driver(places: Places, n: int, cores: int, *, keeps_ids: bool = False) -> Generator[Driver]:
    """Start a driver in a process group of its own; nothing of it is left after the block."""
    command = [sys.executable, __file__, "--driver", str(places.base)]
    command += ["--n", str(n), "--cores", str(cores), *(["--keep-ids"] if keeps_ids else [])]
    log = places.base / "driver.log"
    with log.open("a", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    running = Driver(process, log)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        assert process.stdout is not None
        process.stdout.close()


# --- the driver: in a process of its own -----------------------------------------------------------------------------


def run_driver(places: Places, n: int, cores: int, *, keeps_ids: bool = False) -> None:
    """Run the query until ``n`` rows are delivered, and write what each micro-batch did."""
    with spark_session("postdate-delay", cores=cores, conf=delay_conf()) as spark:
        _write({"ready": True})
        messages = read_directory(spark, str(places.messages), _SCHEMA, "parquet", files_at_once=2 * cores)
        rows = delay(messages).mapInArrow(_stamped, f"{_SCHEMA}, emitted timestamp")
        writer = rows.writeStream.trigger(processingTime="500 milliseconds")
        writer = writer.option("checkpointLocation", str(places.checkpoint))
        if keeps_ids:
            reopen_last_batch(spark, str(places.checkpoint))
            query, delivered = writer.foreachBatch(partial(_write_once, places)).start(), BatchFiles(places.batches)
        else:
            query, delivered = writer.format("parquet").start(str(places.delivered)), Delivered(places.delivered)
        shown = -1
        while True:
            done = delivered.rows() >= n
            if query.awaitTermination(1):
                raise PipelineError("the query stopped before all rows were delivered")
            for progress in query.recentProgress:
                if progress.batchId > shown:
                    shown = progress.batchId
                    _write(_shown(json.loads(progress.json)))
            if done and shown >= 0:
                break
        query.stop()


class BatchFiles:
    """What a sink has that takes each batch id once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rows: dict[Path, int] = {}

    def rows(self) -> int:
        """Return how many rows there are; quick when asked again."""
        for file in self._directory.glob("*.parquet"):
            if file not in self._rows:
                self._rows[file] = pq.read_metadata(file).num_rows
        return sum(self._rows.values())


def _write_once(places: Places, frame: DataFrame, batch_id: int) -> None:
    """Write a micro-batch under its id, unless it is there; then note whether it had the same rows.

    The frame is read in any case: the state changes while it is read.
    """
    rows = frame.toArrow()
    rows = rows.cast(pa.schema([pa.field(f.name, INSTANT) if f.name in _TIMES else f for f in rows.schema]))
    file, unfinished = places.batches / f"{batch_id}.parquet", places.batches / ".unfinished"
    empty = places.base / f"empty-{batch_id}"
    if file.exists() or empty.exists():
        before = pq.read_table(file) if file.exists() else rows.slice(0, 0)
        same = before.column("id").sort().equals(rows.column("id").sort())
        with (places.base / "repeated").open("a") as log:
            log.write(json.dumps({"batch": batch_id, "rows": rows.num_rows, "same": same}) + "\n")
    elif rows.num_rows:
        pq.write_table(rows, unfinished)
        unfinished.rename(file)
    else:
        empty.touch()


def _stamped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs on executors: add the wall time at which the rows come out of the operator."""
    for batch in batches:
        at = np.full(batch.num_rows, to_microseconds(SystemClock().now()), dtype=np.int64)
        yield batch.append_column("emitted", pa.array(at, pa.int64()).cast(INSTANT))


def _shown(progress: Mapping[str, Any]) -> dict[str, Any]:
    operator = progress["stateOperators"][0]
    return {
        "batch": progress["batchId"],
        "began": datetime.fromisoformat(progress["timestamp"]).timestamp(),
        "rows": progress["numInputRows"],
        "seconds": progress["durationMs"]["triggerExecution"] / 1000,
        "durations_ms": progress["durationMs"],
        "state_rows": operator["numRowsTotal"],
        "state_memory_bytes": operator["memoryUsedBytes"],
    }


def _write(entry: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(entry) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, and write the result to standard output; or, with ``--driver``, be the process that is measured."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.delay", description=__doc__)
    arguments.add_argument("--n", type=int, default=1_000_000)
    arguments.add_argument("--spread-seconds", type=float, default=60)
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--lead-seconds", type=float)
    arguments.add_argument("--cores", type=int, default=2)
    arguments.add_argument("--json", action="store_true", help="one line of JSON")
    arguments.add_argument("--recovery", action="store_true", help="only kill and restart, with a sink of batch ids")
    arguments.add_argument("--keep-ids", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--driver", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.driver:
        run_driver(Places(given.driver), given.n, given.cores, keeps_ids=given.keep_ids)
        return
    if given.recovery:
        result = measure_recovery(given.n, given.spread_seconds, given.lead_seconds, given.cores)
    else:
        result = measure_delay(given.n, given.spread_seconds, given.kills, given.lead_seconds, given.cores)
    sys.stdout.write(json.dumps(result, indent=None if given.json else 2) + "\n")


if __name__ == "__main__":
    main()
