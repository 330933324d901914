"""A year of flights scheduled, forecast, swept and audited; then its busiest day again, lived through in a minute."""

# ruff: noqa: INP001, S603, T201 - a script, and it prints; matplotlib and pandas leave some types open
# pyright: reportUnknownMemberType=false

import argparse
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from examples.flights.timetable import BUSIEST_DAY, flight_messages
from matplotlib.figure import Figure
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import SystemClock
from postdate.pipeline.audit import AuditResult, audit
from postdate.pipeline.forecast import forecast
from postdate.pipeline.forecast_report import write_forecast
from postdate.pipeline.forecast_result import ForecastResult, headlines
from postdate.pipeline.report import write_html
from postdate.pipeline.schedule import ScheduleJob, schedule
from postdate.pipeline.session import spark_session
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.pipeline.sweep import SweepSpec, sweep, sweep_continuously

QUEUES = ("check-in", "boarding", "follow-up")
BEFORE_THE_YEAR = datetime(2012, 12, 30, tzinfo=UTC)


def store_with_queues(file: Path) -> StoreSpec:
    """Make one SQLite file with the store and the queues in it."""
    setup = ["setup", "--store", f"sqlite:///{file}", *(f"--queue={queue}" for queue in QUEUES)]
    subprocess.run([sys.executable, "-m", "postdate.cli", *setup], check=True, stdout=subprocess.DEVNULL)
    return StoreSpec(f"sqlite:///{file}")


def messages_of(spark: SparkSession, day: date | None) -> DataFrame:
    """Return the messages of a day or of the year, each kind for a queue of its own."""
    messages = flight_messages(spark, day).messages
    return messages.withColumn("destination", F.substring_index("message_id", "/", -1))


def live_through_the_year(spark: SparkSession, folder: Path, day: date | None) -> None:
    """Schedule, forecast, sweep and audit messages that were due in 2013."""
    store = store_with_queues(folder / "year.db")
    scheduled = schedule(messages_of(spark, day), ScheduleJob(store, now=BEFORE_THE_YEAR))
    print(f"--- schedule\n{scheduled.accepted:,} stored in {scheduled.seconds:.0f} s", flush=True)
    plan = forecast(spark, store, now=BEFORE_THE_YEAR)
    print(
        "--- forecast", *headlines(plan), *(f"{name:17} {value}" for name, value in plan.table()), sep="\n", flush=True
    )
    write_forecast(plan, folder / "forecast.html")
    plot_load(plan, folder / "load.png")
    swept = sweep(spark, SweepSpec(store, store.address))
    print(f"--- sweep\n{swept.delivered:,} delivered, {swept.expired:,} expired, {swept.left} left", flush=True)
    found = audit(spark, store, now=SystemClock().now())
    print("--- audit", *(f"{name:13} {value}" for name, value in found.table()), f"clean: {found.is_clean}", sep="\n")


def live_through_a_day(spark: SparkSession, folder: Path, day: date, head_start: int, seconds: int) -> None:
    """Let a whole day fall due from soon on, and audit what a continuous sweep makes of it."""
    store, clock = store_with_queues(folder / "day.db"), SystemClock()
    with (
        sweep_continuously(spark, SweepSpec(store, store.address), checkpoint=folder / "checkpoint", slots=1) as query,
        open_spec(store) as looking,
    ):
        start = clock.now() + timedelta(seconds=head_start)
        scheduled = schedule(faster(messages_of(spark, day), start, seconds / 86_400), ScheduleJob(store, clock.now()))
        print(f"--- a day in {seconds} s\n{scheduled.accepted:,} stored in {scheduled.seconds:.0f} s", flush=True)
        while clock.now() < start + timedelta(seconds=seconds) or looking.count_overdue(clock.now()):
            query.wait(1)
    found = audit(spark, store, now=clock.now())
    print(*(f"{name:13} {value}" for name, value in found.table()), f"clean: {found.is_clean}", sep="\n")
    write_html(found, folder / "audit.html")
    plot_lateness(found, folder / "lateness.png")


def faster(messages: DataFrame, start: datetime, scale: float) -> DataFrame:
    """Let the first message be due at ``start``, and time pass faster."""
    first = messages.agg(F.min(F.unix_micros("due"))).collect()[0][0]
    begins = F.unix_micros(F.lit(start))
    passed = {name: ((F.unix_micros(name) - first) * scale).cast("long") for name in ("due", "expires_at")}
    return messages.withColumns({name: F.timestamp_micros(begins + after) for name, after in passed.items()})


def plot_load(plan: ForecastResult, file: Path) -> None:
    """Plot the table of the forecast: messages by interval, stacked by queue."""
    load = plan.load.toPandas().pivot_table("messages", "start", "destination", fill_value=0)
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    axes = figure.add_subplot(ylabel=f"messages in {plan.load_width_seconds / 3600:g} h")
    axes.stackplot(load.index, load.to_numpy().T, labels=list(load.columns))
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(file, dpi=100)


def plot_lateness(found: AuditResult, file: Path) -> None:
    """Plot how many deliveries were late by how much."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="late by, in milliseconds", ylabel="messages")
    starts = [each.from_seconds * 1_000 for each in found.lateness_bins]
    widths = [(each.to_seconds - each.from_seconds) * 1_000 for each in found.lateness_bins]
    axes.bar(starts, [each.count for each in found.lateness_bins], widths, align="edge")
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--day", type=date.fromisoformat, help="only what is due on this day; default: the year")
    parser.add_argument("--folder", type=Path, default=Path("year"), help="a new folder for databases and pictures")
    parser.add_argument("--head-start", type=int, default=60, help="seconds from scheduling a day to its beginning")
    parser.add_argument("--seconds", type=int, default=60, help="how long that day takes")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True)
    with spark_session("year", cores=2) as session:
        live_through_the_year(session, chosen.folder, chosen.day)
        live_through_a_day(session, chosen.folder, chosen.day or BUSIEST_DAY, chosen.head_start, chosen.seconds)
