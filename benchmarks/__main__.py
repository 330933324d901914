"""``python -m benchmarks``: what ``postdate bench`` measures, beside lower limits, and what only we measure.

Run in the tree, with the Python that ``make install`` made. All options are those of ``postdate bench``; see
``docs/benchmarks.md``.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks import churn as churning
from postdate.bench.bench import Bench
from postdate.bench.result import BenchmarkResult
from postdate.cli.bench import Number, backlog, drain, handle, herd, lateness, measures, schedule
from postdate.cli.command import group
from postdate.cli.entry import run

TARGETS = {
    "SQLite": "benchmarks.targets.sqlite:SqliteTaken",
    "PostgreSQL": "benchmarks.targets.postgres:PostgresTaken",
    "RabbitMQ": "benchmarks.targets.rabbitmq:RawRabbitMq",
    "Azure Storage": "benchmarks.targets.azure:PlainAzure",
}

app = group("benchmarks", "Measure beside the lowest limits.")
measured = measures(app, TARGETS)
for each in (drain, backlog, lateness, herd, handle, schedule):
    measured(each)

Pending = Annotated[int, typer.Option("--pending", min=1, help="Messages that are not due yet.")]
Seconds = Annotated[float, typer.Option("--seconds", min=1, help="For how long.")]


@measured
def churn(
    bench: Bench,
    n: Number = 2_000_000,
    pending: Pending = 200_000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Messages stored in one commit.")] = 1_000,
    idle_transaction: Annotated[
        bool, typer.Option("--idle-transaction", help="While a forgotten transaction holds an old snapshot open.")
    ] = False,
) -> BenchmarkResult:
    """Store, deliver and take off the queue for long; last_by_first is what is left of the first rate at the end."""
    return churning.churn(bench, n, pending, batch, idle_transaction=idle_transaction)


@measured
def pipeline(
    bench: Bench,
    n: Number = 1_000_000,
    cores: Annotated[list[int] | None, typer.Option("--cores", min=1, help="Cores of Spark; again for more.")] = None,
) -> BenchmarkResult:
    """Schedule, read and sweep messages on Spark; the limits are COPY in, COPY out, and one statement that moves."""
    from benchmarks import spark_jobs

    return spark_jobs.jobs(bench, n, cores or [1, 2])


@measured
def sweep(
    bench: Bench,
    rate: Annotated[int, typer.Option("--rate", min=1, help="Messages a second.")] = 1_000,
    seconds: Seconds = 60,
    residency: Annotated[float, typer.Option("--residency", min=0.1, help="Seconds that a task dispatches.")] = 30.0,
) -> BenchmarkResult:
    """Sweep continuously on Spark at an even rate; how late each message is, and a plain service that does the same."""
    from benchmarks import spark_jobs

    return spark_jobs.continuous(bench, rate, seconds, residency)


def main(arguments: Sequence[str]) -> int:
    """Run a benchmark and return the exit code."""
    return run(arguments, app, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
