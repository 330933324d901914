"""``python -m benchmarks``: store and queues beside the lowest limits of the same run, and what only we measure.

Run in the tree, with the Python that ``make install`` made; see ``benchmarks/README.md``.
"""

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import churn as churning
from benchmarks import runs
from benchmarks.bench import Bench
from benchmarks.result import BenchmarkResult
from postdate.cli.bench.commands import Number
from postdate.cli.bench.places import Common
from postdate.cli.command import Exit, add_command, create_group, option, options_of
from postdate.cli.entry import run

Benchmark = TypeVar("Benchmark", bound=Callable[..., BenchmarkResult])

app = create_group("benchmarks", "Measure beside the lowest limits.")

Pending = Annotated[int, option("--pending", "Messages that are not due yet.", min=1)]
Seconds = Annotated[float, option("--seconds", "For how long.", min=1)]


def measured(benchmark: Benchmark) -> Benchmark:
    """Register a benchmark as a command with its own options, which stand behind its bench, and the common ones."""

    def call(context: typer.Context, **values: Any) -> None:
        del context
        common = Common(**{each.name: values.pop(each.name) for each in fields(Common)})
        with (
            progress(quiet=common.as_json and not sys.stderr.isatty()) as report,
            common.working_folder() as folder,
        ):
            result = benchmark(Bench(common, folder, report), **values)
        show(result, as_json=common.as_json)

    add_command(app, benchmark.__name__, benchmark, call, options_of(Common))
    return benchmark


@measured
def drain(
    bench: Bench,
    n: Number = 200_000,
    services: Annotated[
        int, option("--services", "Service processes on one store; of_one compares with a single one.", min=1)
    ] = 1,
    beside_writer: Annotated[
        bool, option("--beside-writer", "While another process stores in single commits, flat out.")
    ] = False,
) -> BenchmarkResult:
    """Deliver messages that are due. The limit does the same in the barest way."""
    return runs.drain(bench, n, services=services, beside_writer=beside_writer)


@measured
def backlog(bench: Bench, n: Number = 200_000, pending: Pending = 1_000_000) -> BenchmarkResult:
    """Deliver what is due above many that are not. of_empty compares with an empty store."""
    return runs.backlog(bench, n, pending)


@measured
def lateness(
    bench: Bench,
    rate: Annotated[int, option("--rate", "Messages a second.", min=1)] = 200,
    seconds: Seconds = 30,
    stored_by: Annotated[
        str, option("--stored-by", "Who stores the messages: the 'service', an 'other' process, or all 'before'.")
    ] = "service",
    receiver: Annotated[
        bool, option("--receiver", "Another process receives each message; received_p50_ms … are its view.")
    ] = False,
) -> BenchmarkResult:
    """Deliver at an even rate. How late each message is in its queue, and a bare loop that does the same."""
    return runs.even(bench, rate, seconds, stored_by=stored_by, receiver=receiver)


@measured
def herd(bench: Bench, n: Number = 20_000) -> BenchmarkResult:
    """Deliver messages that are all due at one instant. times_limit compares with the barest way to move them."""
    return runs.herd(bench, n)


@measured
def handle(
    bench: Bench,
    n: Number = 20_000,
    concurrency: Annotated[int, option("--concurrency", "Messages handled at once.", min=1)] = 100,
) -> BenchmarkResult:
    """Handle messages that are in the queue of an endpoint. The limit takes them off in the barest way."""
    return runs.handle(bench, n, concurrency)


@measured
def schedule(
    bench: Bench,
    n: Number = 200_000,
    batch: Annotated[int, option("--batch", "Messages in one commit.", min=1)] = 5_000,
) -> BenchmarkResult:
    """Store messages in bulk. The limit is bare rows in the same batches."""
    return runs.schedule(bench, n, batch)


@measured
def churn(
    bench: Bench,
    n: Number = 2_000_000,
    pending: Pending = 200_000,
    batch: Annotated[int, option("--batch", "Messages stored in one commit.", min=1)] = 1_000,
    idle_transaction: Annotated[
        bool, option("--idle-transaction", "While a forgotten transaction holds an old snapshot open.")
    ] = False,
) -> BenchmarkResult:
    """Store, deliver and take off the queue for long; last_by_first is what is left of the first rate at the end."""
    return churning.churn(bench, n, pending, batch, idle_transaction=idle_transaction)


@measured
def pipeline(
    bench: Bench,
    n: Number = 1_000_000,
    cores: Annotated[list[int] | None, option("--cores", "Cores of Spark; again for more.", min=1)] = None,
) -> BenchmarkResult:
    """Schedule, read and sweep messages on Spark; the limits are COPY in, COPY out, and one statement that moves."""
    from benchmarks import spark_jobs

    return spark_jobs.jobs(bench, n, cores or [1, 2])


@measured
def sweep(
    bench: Bench,
    rate: Annotated[int, option("--rate", "Messages a second.", min=1)] = 1_000,
    seconds: Seconds = 60,
    residency: Annotated[float, option("--residency", "Seconds that a task dispatches.", min=0.1)] = 30.0,
) -> BenchmarkResult:
    """Sweep continuously on Spark at an even rate; how late each message is, and a plain service that does the same."""
    from benchmarks import spark_jobs

    return spark_jobs.continuous(bench, rate, seconds, residency)


# --- output ------------------------------------------------------------------------------------------------------


@contextmanager
def progress(*, quiet: bool) -> Generator[Callable[[str], None]]:
    """Yield a function that shows progress: in one changing line on a terminal, elsewhere one line for each step."""
    console = Console(stderr=True, quiet=quiet)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    yield lambda text: console.print(f"{text} …", highlight=False)


def show(result: BenchmarkResult, *, as_json: bool) -> None:
    figures = result.as_dict()
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        table = Table(title=f"{result.benchmark}", title_justify="left", show_header=False)
        for key, value in figures.items():
            table.add_row(key, _text(value))
        Console().print(table)
    if not result.promise_kept:
        raise typer.Exit(Exit.NOT_KEPT)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(each)}" for key, each in cast("dict[str, object]", value).items())
    if isinstance(value, list):
        return ", ".join(map(_text, cast("list[object]", value)))
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def main(arguments: Sequence[str]) -> int:
    """Run a benchmark and return the exit code."""
    return run(arguments, app, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
