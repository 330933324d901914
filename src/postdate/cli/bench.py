"""``postdate bench``: the benchmarks behind our own figures."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table

from postdate.bench import runs
from postdate.bench.bench import Bench
from postdate.bench.result import BenchmarkResult
from postdate.bench.targets import BenchmarkOptions, file_named
from postdate.cli.command import add_command, group, option, options_of, signals_handled
from postdate.errors import ConfigurationError

Benchmark = TypeVar("Benchmark", bound=Callable[..., BenchmarkResult])

app = group("bench", "Measure your own store and queues, beside the physical limit measured in the same run.")

Number = Annotated[int, option("--n", "Messages.", min=1)]


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every benchmark has."""

    store: Annotated[
        str, option("--store", "A kind of store, as sqlite, postgres, mariadb, or the address of one.")
    ] = "sqlite"
    transport: Annotated[
        str | None, option("--transport", "A kind of queues, as local, rabbitmq, or an address. Default: the store's.")
    ] = None
    queue_type: Annotated[str, option("--queue-type", "Kind of RabbitMQ queue: quorum or classic.")] = "quorum"
    folder: Annotated[
        Path | None, option("--folder", "Where to measure files: a folder on the disk in question. Default: temporary.")
    ] = None
    synchronous: Annotated[
        str, option("--synchronous", "Of files. full: survives loss of power; normal: survives the end of the process.")
    ] = "full"
    recording: Annotated[str, option("--recording", "How much is recorded for audits: all, outcomes.")] = "all"
    as_json: Annotated[bool, option("--json", "Print one JSON object and nothing else.")] = False


def measures(app: typer.Typer, targets: Mapping[str, str] = MappingProxyType({})) -> Callable[[Benchmark], Benchmark]:
    """Register a benchmark as a command with its own and the common options; ``targets`` as in `BenchmarkOptions`."""

    def register(benchmark: Benchmark) -> Benchmark:
        def run(context: typer.Context, **values: Any) -> None:
            del context
            common = Common(**{each.name: values.pop(each.name) for each in fields(Common)})
            _run(lambda bench: benchmark(bench, **values), targets, common)

        add_command(app, benchmark.__name__, benchmark, run, options_of(Common))
        return benchmark

    return register


def _run(benchmark: Callable[[Bench], BenchmarkResult], targets: Mapping[str, str], common: Common) -> None:
    folder = common.folder
    if folder is None and (file := file_named(common.store)) is not None:
        folder = file.parent
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}")
    with (
        # As Ctrl-C does: cleaning up leaves nothing on the servers.
        signals_handled(signal.default_int_handler, signal.SIGTERM),
        tempfile.TemporaryDirectory(prefix="postdate-bench-", dir=folder) as temporary,
    ):
        place = Path(temporary).absolute()
        options = BenchmarkOptions(
            common.store, common.transport, place, common.synchronous, common.recording, common.queue_type, targets
        )
        with _progress(quiet=common.as_json and not sys.stderr.isatty()) as report:
            result = benchmark(Bench(options, report))
    _show(result, as_json=common.as_json)


@measures(app)
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


@measures(app)
def backlog(
    bench: Bench,
    n: Number = 200_000,
    pending: Annotated[int, option("--pending", "Messages that are not due yet.", min=1)] = 1_000_000,
) -> BenchmarkResult:
    """Deliver what is due above many that are not. of_empty compares with an empty store."""
    return runs.backlog(bench, n, pending)


@measures(app)
def lateness(
    bench: Bench,
    rate: Annotated[int, option("--rate", "Messages a second.", min=1)] = 200,
    seconds: Annotated[float, option("--seconds", "For how long.", min=1)] = 30,
    stored_by: Annotated[
        str, option("--stored-by", "Who stores the messages: the 'service', an 'other' process, or all 'before'.")
    ] = "service",
    receiver: Annotated[
        bool, option("--receiver", "Another process receives each message; received_p50_ms … are its view.")
    ] = False,
) -> BenchmarkResult:
    """Deliver at an even rate. How late each message is in its queue, and a bare loop that does the same."""
    return runs.even(bench, rate, seconds, stored_by=stored_by, receiver=receiver)


@measures(app)
def herd(bench: Bench, n: Number = 20_000) -> BenchmarkResult:
    """Deliver messages that are all due at one instant. times_limit compares with the barest way to move them."""
    return runs.herd(bench, n)


@measures(app)
def handle(
    bench: Bench,
    n: Number = 20_000,
    concurrency: Annotated[int, option("--concurrency", "Messages handled at once.", min=1)] = 100,
) -> BenchmarkResult:
    """Handle messages that are in the queue of an endpoint. The limit takes them off in the barest way."""
    return runs.handle(bench, n, concurrency)


@measures(app)
def schedule(
    bench: Bench,
    n: Number = 200_000,
    batch: Annotated[int, option("--batch", "Messages in one commit.", min=1)] = 5_000,
) -> BenchmarkResult:
    """Store messages in bulk. The limit is bare rows in the same batches."""
    return runs.schedule(bench, n, batch)


# --- output ------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(*, quiet: bool) -> Generator[Callable[[str], None]]:
    """Yield a function that shows progress: in one changing line on a terminal, elsewhere one line for each step."""
    console = Console(stderr=True, quiet=quiet)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    yield lambda text: console.print(f"{text} …", highlight=False)


def _show(result: BenchmarkResult, *, as_json: bool) -> None:
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
