"""The demo itself: schedule with Spark, deliver and handle in separate processes, prove it with Spark."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Self

import anyio
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.flights import QUEUE
from examples.flights.timetable import NEW_YORK, day_bounds, flight_messages
from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.clock import Clock, ScaledClock, SystemClock, from_microseconds, steady_seconds
from postdate.errors import PostdateError
from postdate.pipeline.audit import AuditResult, audit
from postdate.pipeline.report import write_html
from postdate.pipeline.schedule import ScheduleJob, ScheduleResult, schedule
from postdate.pipeline.session import spark_session
from postdate.pipeline.stores import StoreSpec
from postdate.ports import RecordKind, Scan

# --- the processes, observed from outside -----------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
_STOP_SECONDS = 20.0
_RECENT_RECORDS = 400


@dataclass(frozen=True, slots=True)
class Scene:
    """The state of the demo at one moment; times and seconds are on its clock.

    Args:
        pending: messages that wait in the store.
        queued: messages in the destination queue, not yet handled.
        recent_lateness: seconds, of messages delivered lately; oldest first.
    """

    now: datetime
    pending: int
    queued: int
    next_due: datetime | None
    recent_lateness: tuple[float, ...] = ()


class Stage:
    """Runs service and consumers as processes on one file; all live by ``clock``."""

    def __init__(self, file: Path, clock: Clock, consumers: int = 1) -> None:
        self._file, self._clock, self._consumers = file, clock, consumers
        self._store, self._transport = SqliteStore(file), LocalTransport(file)
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        anyio.run(self._transport.create_queues, [QUEUE])
        for _ in range(self._consumers):
            self._start("the consumer", "examples.flights.consumer", str(self._file), *self._clock_arguments())
        names = ("--clock-start", "--clock-real-start", "--clock-speed")
        clock = [f"{name}={value}" for name, value in zip(names, self._clock_arguments(), strict=False)]
        addresses = ["--store", f"sqlite:///{self._file}", "--transport", f"local:///{self._file}"]
        self._start("the service", "postdate.cli", "run", *addresses, "--log-level", "warning", *clock)
        return self

    def __exit__(self, *_error: object) -> None:
        for _, process in self._processes:
            process.terminate()
        for _, process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            process.wait()
        self._store.file.close()
        self._transport.file.close()

    def _start(self, name: str, module: str, *arguments: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}  # the examples are not installed
        self._processes.append((name, subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment)))

    def _clock_arguments(self) -> tuple[str, ...]:
        if not isinstance(self._clock, ScaledClock):
            return ()
        return (self._clock.starts_at.isoformat(), repr(self._clock.real_start), repr(self._clock.speed))

    def look(self, *, recent: bool = False) -> Scene:
        """Look at the file, with ``recent`` also at the latest deliveries; fail if one of the processes has ended."""
        for name, process in self._processes:
            if process.poll() is not None:
                raise PostdateError(f"{name} ended with exit status {process.returncode}; see its message above")
        now = self._clock.now()
        statistics = anyio.run(self._store.statistics, now)
        queued = anyio.run(self._transport.queue_lengths).get(QUEUE, 0)
        return Scene(now, statistics.pending, queued, statistics.next_due, self._recent_lateness() if recent else ())

    def _recent_lateness(self) -> tuple[float, ...]:
        parts = self._store.scan_parts("records", 1)
        if not parts:
            return ()
        last = type(parts[0])(max(parts[0].first, parts[0].end - _RECENT_RECORDS), parts[0].end)
        rows = [row for page in self._store.scan(Scan("records", ("kind", "at", "due")), last, 1_000) for row in page]
        return tuple(
            (from_microseconds(at) - from_microseconds(due)).total_seconds()
            for kind, at, due in rows
            if kind == RecordKind.DELIVERED
        )


# --- the demo ---------------------------------------------------------------------------------------------------------


_LOOK_SECONDS = 0.25
_START_UP_SECONDS = 4.0
_STUCK_SECONDS = 60.0
_LATE_REAL_SECONDS = 0.1
_NEVER_LATE = timedelta(days=36_500)
"""The year is delivered long after it was, so lateness says nothing there."""


@dataclass(frozen=True, slots=True)
class Demo:
    """What to show, and where; the console may be quiet."""

    folder: Path
    console: Console

    @property
    def _file(self) -> Path:
        return self.folder / "postdate-demo.db"

    @property
    def _spec(self) -> StoreSpec:
        return StoreSpec(f"sqlite:///{self._file}")

    @property
    def report(self) -> Path:
        return self.folder / "postdate-demo-report.html"

    def day(self, day: date, minutes: float) -> DemoResult:
        """Play one day in the given number of minutes."""
        first, end = day_bounds(day)
        with self._spark() as spark:
            scheduled = self._schedule(spark, day, first)
            speed = (end - first).total_seconds() / (minutes * 60)
            clock = ScaledClock(first, time.time() + _START_UP_SECONDS, speed)  # noqa: TID251 - the demo sets its clock
            self.console.print(
                f"A service and a consumer now live through {day:%A, %d %B %Y} in {minutes:g} minutes "
                f"({speed:,.0f} times as fast as it was)."
            )
            with Stage(self._file, clock) as stage:
                self._watch_day(stage, scheduled.accepted, end)
            late_after = timedelta(seconds=_LATE_REAL_SECONDS * speed)
            return self._audit(spark, scheduled, clock, f"Flights of {day:%d %B %Y}", late_after, speed)

    def year(self, consumers: int) -> DemoResult:
        """Deliver the messages of the whole year at full speed."""
        with self._spark() as spark:
            scheduled = self._schedule(spark, None, datetime.now(NEW_YORK))  # noqa: TID251 - a real instant
            clock = SystemClock()
            with Stage(self._file, clock, consumers) as stage:
                self._watch_drain(stage, scheduled.accepted)
            return self._audit(spark, scheduled, clock, "Flights of 2013", _NEVER_LATE)

    @contextmanager
    def _spark(self) -> Generator[SparkSession]:
        with self.console.status("Starting Spark …"):
            spark = spark_session("postdate demo")
        try:
            yield spark
        finally:
            spark.stop()

    def _schedule(self, spark: SparkSession, day: date | None, now: datetime) -> ScheduleResult:
        what = "the whole year" if day is None else f"{day:%d %B %Y}"
        with self.console.status(f"Spark schedules the messages of {what} …"):
            messages = flight_messages(spark, day).messages
            computed = str(self.folder / "postdate-demo-messages")
            if day is None:
                # Delivered years later, every boarding call would have expired; here all are to be delivered.
                messages = messages.withColumn("expires_at", F.lit(None).cast("timestamp"))
            messages.write.parquet(computed)  # scheduling reads its input twice
            scheduled = schedule(spark.read.parquet(computed), ScheduleJob(self._spec, now))
        self.console.print(
            f"Spark scheduled {scheduled.accepted:,} messages of {what} in {scheduled.seconds:.1f} s "
            f"({scheduled.rows_per_second:,.0f} a second)."
        )
        if scheduled.accepted != scheduled.read:
            raise PostdateError(
                f"only {scheduled.accepted} of {scheduled.read} messages were new: {scheduled.set_aside}"
            )
        return scheduled

    def _watch_day(self, stage: Stage, total: int, end: datetime) -> None:
        progress = _Patience(total)
        with Live(console=self.console, refresh_per_second=8, transient=True) as live:
            while True:
                scene = stage.look(recent=True)
                live.update(_view(scene, total))
                if scene.now >= end and not scene.pending + scene.queued:
                    return
                if scene.now >= end:
                    progress.check(scene)
                time.sleep(_LOOK_SECONDS)  # noqa: TID251 - a live view, nothing depends on it

    def _watch_drain(self, stage: Stage, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = _Patience(total)
        with Progress(*columns, console=self.console) as bars:
            delivered, handled = bars.add_task("delivered", total=total), bars.add_task("handled", total=total)
            while True:
                scene = stage.look()
                bars.update(delivered, completed=total - scene.pending)
                bars.update(handled, completed=total - scene.pending - scene.queued)
                if not scene.pending + scene.queued:
                    return
                progress.check(scene)
                time.sleep(_LOOK_SECONDS)  # noqa: TID251 - a live view, nothing depends on it

    def _audit(
        self,
        spark: SparkSession,
        scheduled: ScheduleResult,
        clock: Clock,
        title: str,
        late_after: timedelta,
        speed: float = 1.0,
    ) -> DemoResult:
        """Audit what happened; ``late_after``, by the demo's clock, counts as late."""
        with self.console.status("Spark audits what was scheduled against what happened …"):
            result = audit(spark, self._spec, clock.now(), late_after=late_after)
            write_html(result, self.report, title)
        return DemoResult(scheduled, result, self.report, speed)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Results of the demo; ``speed`` is demo seconds in one real second, and lateness is in demo seconds."""

    scheduled: ScheduleResult
    audit: AuditResult
    report: Path
    speed: float


class _Patience:
    def __init__(self, total: int) -> None:
        self._left, self._since = total, steady_seconds()

    def check(self, scene: Scene) -> None:
        left = scene.pending + scene.queued
        if left != self._left:
            self._left, self._since = left, steady_seconds()
        elif steady_seconds() - self._since > _STUCK_SECONDS:
            raise PostdateError(f"nothing has moved for {_STUCK_SECONDS:.0f} s; {left:,} messages are left")


def _view(scene: Scene, total: int) -> Group:
    local = scene.now.astimezone(NEW_YORK)
    table = Table(title=f"{local:%A, %d %B %Y  %H:%M:%S} in New York", title_justify="left", show_header=False)
    table.add_row("waiting", f"{scene.pending:,}")
    table.add_row("delivered", f"{total - scene.pending:,}")
    table.add_row("handled", f"{total - scene.pending - scene.queued:,}")
    table.add_row("next due", f"{scene.next_due.astimezone(NEW_YORK):%H:%M:%S}" if scene.next_due else "none")
    if scene.recent_lateness:
        middle = timedelta(seconds=statistics.median(scene.recent_lateness))
        table.add_row("late, lately", f"{middle.total_seconds():.1f} s of that day's clock (median)")
    return Group(table)
