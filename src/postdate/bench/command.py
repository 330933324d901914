"""``postdate bench``: measures here what our own figures come from."""

from __future__ import annotations

import importlib
import inspect
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from postdate.bench.bench import Bench
from postdate.bench.plants import STORES, TRANSPORTS, VARIABLES, Options
from postdate.bench.result import Result
from postdate.bench.runs import delivering, flowing, handling, storing, timing
from postdate.errors import ConfigurationError

app = typer.Typer(
    help="Measure your own store and queues, beside the physical limit measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
)

Number = Annotated[int, typer.Option("--n", min=1, help="Messages.")]


def _common(
    store: Annotated[str, typer.Option("--store", help=f"Kind of store: {', '.join(STORES)}.")] = "sqlite",
    transport: Annotated[
        str | None,
        typer.Option(
            "--transport", help=f"Kind of transport: {', '.join(TRANSPORTS)}. Default: what goes with the store."
        ),
    ] = None,
    store_address: Annotated[
        str | None,
        typer.Option(
            "--store-address", help=f"Server of the store. Default: {', '.join(dict.fromkeys(VARIABLES.values()))}."
        ),
    ] = None,
    transport_address: Annotated[
        str | None, typer.Option("--transport-address", help="Server of the queues. Default: as for the store.")
    ] = None,
    queue_type: Annotated[
        str, typer.Option("--queue-type", help="Kind of RabbitMQ queue: quorum or classic.")
    ] = "quorum",
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where to measure files: a folder on the disk in question. Default: temporary."),
    ] = None,
    synchronous: Annotated[
        str,
        typer.Option(
            "--synchronous", help="Of files. full: survives loss of power; normal: survives the end of the process."
        ),
    ] = "full",
    recording: Annotated[
        str, typer.Option("--recording", help="How much is recorded for audits: all, outcomes, none.")
    ] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Declare the options that every benchmark has; never called."""


def _measures(benchmark: Callable[..., Result]) -> Callable[..., None]:
    """Make a command of a benchmark: its own options, and the common ones."""

    def command(**values: Any) -> None:
        common = {name: values.pop(name) for name in inspect.signature(_common).parameters}
        as_json, folder = common.pop("as_json"), common.pop("folder")
        if folder is not None and not folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder}")
        with (
            _interrupted_by_termination(),
            tempfile.TemporaryDirectory(prefix="postdate-bench-", dir=folder) as temporary,
        ):
            options = Options(folder=Path(temporary), **common)
            with _progress(quiet=as_json and not sys.stderr.isatty()) as report:
                result = benchmark(Bench(options, report), **values)
        _show(result, as_json=as_json)

    own = [p for p in inspect.signature(benchmark, eval_str=True).parameters.values() if p.name != "bench"]
    shared = list(inspect.signature(_common, eval_str=True).parameters.values())
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared)]
    command.__signature__ = inspect.Signature(keyword)
    command.__doc__ = benchmark.__doc__
    command.__name__ = benchmark.__name__
    return command


@app.command()
@_measures
def drain(
    bench: Bench,
    n: Number = 200_000,
    services: Annotated[
        int,
        typer.Option("--services", min=1, help="Service processes on one store; of_one compares with a single one."),
    ] = 1,
    beside_writer: Annotated[
        bool, typer.Option("--beside-writer", help="While another process stores in single commits, flat out.")
    ] = False,
) -> Result:
    """Deliver messages that are due; the limit does the same in the barest way."""
    return delivering.drain(bench, n, services=services, beside_writer=beside_writer)


@app.command()
@_measures
def backlog(
    bench: Bench,
    n: Number = 200_000,
    pending: Annotated[int, typer.Option("--pending", min=1, help="Messages that are not due yet.")] = 1_000_000,
) -> Result:
    """Deliver what is due above many that are not; of_empty compares with an empty store."""
    return delivering.backlog(bench, n, pending)


@app.command()
@_measures
def lateness(
    bench: Bench,
    rate: Annotated[int, typer.Option("--rate", min=1, help="Messages a second.")] = 200,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="For how long.")] = 30,
    stored_by: Annotated[
        str,
        typer.Option(
            "--stored-by", help="Who stores the messages: the 'service', an 'other' process, or all 'before'."
        ),
    ] = "service",
    receiver: Annotated[
        bool, typer.Option("--receiver", help="Another process receives each message; received_p50_ms … are its view.")
    ] = False,
) -> Result:
    """Deliver at an even rate; how late each message is in its queue, and a bare loop that does the same."""
    return timing.even(bench, rate, seconds, stored_by=stored_by, receiver=receiver)


@app.command()
@_measures
def herd(bench: Bench, n: Number = 20_000) -> Result:
    """Deliver messages that are all due at one instant; times_limit compares with the barest way to move them."""
    return timing.herd(bench, n)


@app.command()
@_measures
def churn(
    bench: Bench,
    n: Number = 2_000_000,
    pending: Annotated[int, typer.Option("--pending", min=1, help="Messages that are not due yet.")] = 200_000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Messages stored in one commit.")] = 1_000,
    idle_transaction: Annotated[
        bool, typer.Option("--idle-transaction", help="While a forgotten transaction holds an old snapshot open.")
    ] = False,
) -> Result:
    """Store, deliver and take off the queue for long; last_by_first is what is left of the first rate at the end."""
    return flowing.churn(bench, n, pending, batch, idle_transaction=idle_transaction)


@app.command()
@_measures
def handle(
    bench: Bench,
    n: Number = 20_000,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Messages handled at once.")] = 100,
) -> Result:
    """Handle messages that are in the queue of an endpoint; the limit takes them off in the barest way."""
    return handling.handle(bench, n, concurrency)


@app.command()
@_measures
def schedule(
    bench: Bench,
    n: Number = 200_000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Messages in one commit.")] = 5_000,
) -> Result:
    """Store messages in bulk; the limit is bare rows in the same batches."""
    return storing.schedule(bench, n, batch)


@app.command()
@_measures
def pipeline(
    bench: Bench,
    n: Number = 1_000_000,
    cores: Annotated[list[int] | None, typer.Option("--cores", min=1, help="Cores of Spark; again for more.")] = None,
) -> Result:
    """Schedule, read and sweep messages on Spark; the limits are COPY in, COPY out, and one statement that moves."""
    return _measuring().jobs(bench, n, cores or [1, 2])


@app.command()
@_measures
def sweep(
    bench: Bench,
    rate: Annotated[int, typer.Option("--rate", min=1, help="Messages a second.")] = 1_000,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="For how long.")] = 60,
    residency: Annotated[float, typer.Option("--residency", min=0.1, help="Seconds that a task dispatches.")] = 30.0,
) -> Result:
    """Sweep continuously on Spark at an even rate; how late each message is, and a plain service that does the same."""
    return _measuring().continuous(bench, rate, seconds, residency)


def _measuring() -> ModuleType:
    """Return what measures Spark; it is imported when it is called."""
    try:
        return importlib.import_module("postdate.pipeline.measuring")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is missing; jobs on Spark need the pipeline extra: pip install 'postdate[pipeline]'"
        ) from error


# --- output ------------------------------------------------------------------------------------------------------


@contextmanager
def _interrupted_by_termination() -> Generator[None]:
    """Take the signal to end as an interrupt from the keyboard, so that nothing is left on the servers."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(*, quiet: bool) -> Generator[Callable[[str], None]]:
    """Show what is going on: in one line that changes on a terminal, one line for each step elsewhere."""
    console = Console(stderr=True, quiet=quiet)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    yield lambda text: console.print(f"{text} …", highlight=False)


def _show(result: Result, *, as_json: bool) -> None:
    found = result.as_dict()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        table = Table(title=f"postdate bench {result.benchmark}", title_justify="left", show_header=False)
        for key, value in found.items():
            table.add_row(key, _shown(value))
        Console().print(table)
    if not result.promise_kept:
        raise typer.Exit(1)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(each)}" for key, each in cast("dict[str, object]", value).items())
    if isinstance(value, list):
        return ", ".join(map(_shown, cast("list[object]", value)))
    return f"{value:,}" if isinstance(value, int | float) else str(value)
