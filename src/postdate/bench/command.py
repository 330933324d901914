"""``postdate bench``: measures here what our own figures come from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from postdate.bench.result import Result
from postdate.bench.runs import Bench
from postdate.errors import ConfigurationError

app = typer.Typer(
    help="Measure this machine's own store and queues, beside the physical limit measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
)

Store = Annotated[str, typer.Option("--store", help="Kind of store: sqlite.")]
Transport = Annotated[str, typer.Option("--transport", help="Kind of transport: local.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Number = Annotated[int, typer.Option("--n", min=1, help="Messages.")]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="Where to measure: a folder on the disk in question. Default: temporary."),
]
Synchronous = Annotated[
    str, typer.Option("--synchronous", help="full: survives loss of power; normal: survives the end of the process.")
]
Recording = Annotated[str, typer.Option("--recording", help="How much is recorded for audits: all, outcomes, none.")]


@contextmanager
def _bench(
    store: str, transport: str, folder: Path | None, synchronous: str, recording: str, *, quiet: bool
) -> Generator[Bench]:
    if (store, transport) != ("sqlite", "local"):
        raise ConfigurationError(f"cannot measure store {store!r} with transport {transport!r}; use sqlite and local")
    console = Console(stderr=True, quiet=quiet)
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}")
    with tempfile.TemporaryDirectory(prefix="postdate-bench-", dir=folder) as temporary:
        yield Bench(Path(temporary), synchronous, recording, lambda text: console.print(f"[dim]{text} …[/]"))


def _show(result: Result, *, as_json: bool) -> None:
    found = result.as_dict()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        table = Table(title=f"postdate bench {result.benchmark}", title_justify="left", show_header=False)
        for key, value in found.items():
            table.add_row(key, f"{value:,}" if isinstance(value, int | float) else value)
        Console().print(table)
    if not result.promise_kept:
        raise typer.Exit(1)


@app.command()
def schedule(
    n: Number = 200_000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Messages in one commit.")] = 5_000,
    store: Store = "sqlite",
    transport: Transport = "local",
    folder: Folder = None,
    synchronous: Synchronous = "full",
    recording: Recording = "all",
    as_json: Json = False,
) -> None:
    """Store messages; the limit is bare inserts of the same rows in the same batches."""
    with _bench(store, transport, folder, synchronous, recording, quiet=as_json) as bench:
        _show(bench.schedule(n, batch), as_json=as_json)


@app.command()
def drain(
    n: Number = 200_000,
    beside_writer: Annotated[
        bool, typer.Option("--beside-writer", help="While another process stores in single commits, flat out.")
    ] = False,
    store: Store = "sqlite",
    transport: Transport = "local",
    folder: Folder = None,
    synchronous: Synchronous = "full",
    recording: Recording = "all",
    as_json: Json = False,
) -> None:
    """Deliver messages that are due; the limit moves the same rows with the barest SQL."""
    with _bench(store, transport, folder, synchronous, recording, quiet=as_json) as bench:
        _show(bench.drain(n, beside_writer=beside_writer), as_json=as_json)


@app.command()
def backlog(
    n: Number = 200_000,
    pending: Annotated[int, typer.Option("--pending", min=1, help="Messages that are not due yet.")] = 1_000_000,
    store: Store = "sqlite",
    transport: Transport = "local",
    folder: Folder = None,
    synchronous: Synchronous = "full",
    recording: Recording = "all",
    as_json: Json = False,
) -> None:
    """Deliver what is due above many that are not; of_empty compares with an empty store."""
    with _bench(store, transport, folder, synchronous, recording, quiet=as_json) as bench:
        _show(bench.backlog(n, pending), as_json=as_json)


@app.command()
def lateness(
    rate: Annotated[int, typer.Option("--rate", min=1, help="Messages a second.")] = 200,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="For how long.")] = 30,
    stored_by: Annotated[
        str, typer.Option("--stored-by", help="Who stores the messages: 'service', or an 'other' process.")
    ] = "service",
    store: Store = "sqlite",
    transport: Transport = "local",
    folder: Folder = None,
    synchronous: Synchronous = "full",
    recording: Recording = "all",
    as_json: Json = False,
) -> None:
    """Deliver at an even rate; how late each message is in its queue (p50_ms …) and in another process' hands."""
    if stored_by not in {"service", "other"}:
        raise ConfigurationError(f"--stored-by must be 'service' or 'other', not {stored_by!r}")
    with _bench(store, transport, folder, synchronous, recording, quiet=as_json) as bench:
        _show(bench.lateness(rate, seconds, by_service=stored_by == "service"), as_json=as_json)
