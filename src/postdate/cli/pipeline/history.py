"""``postdate pipeline history``: follow the records of the store into Parquet, once or continuously."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final

import typer

from postdate.cli import command as cli
from postdate.cli.output import print_pairs, print_table
from postdate.cli.pipeline import common
from postdate.cli.pipeline.common import DEFAULT_PARTITIONS, Partitions, SparkOptions, app

if TYPE_CHECKING:
    from postdate.pipeline.history import HistoryResult
    from postdate.pipeline.session import SparkSession
    from postdate.pipeline.stores import StoreSpec
    from postdate.ports import StreamPosition

_ARCHIVE_ADVICE: Final = (
    "`pipeline archive` and `pipeline restore` were removed: `pipeline history DIR` copies every record before "
    "retention removes it, and `pipeline audit --records DIR` reads both, also an old archive"
)
_ANY_ARGUMENTS: Final = {"allow_extra_args": True, "ignore_unknown_options": True}


@cli.command(app, "history")
def history(
    use: cli.Use,
    lake: Annotated[
        str | None, typer.Argument(metavar="LAKE", help="Folder of Parquet files, new or of earlier runs.")
    ] = None,
    continuous: Annotated[bool, cli.option("--continuous", "Continue until SIGTERM or Ctrl-C.")] = False,
    checkpoint: Annotated[
        str | None, cli.option("--checkpoint", "Folder of the stream; default: in the lake.", metavar="DIR")
    ] = None,
    trigger: Annotated[
        timedelta | None, cli.duration_option("--trigger", "With --continuous: how often it reads; default: 1m.")
    ] = None,
    positions: Annotated[bool, cli.option("--positions", "List the lakes for which retention waits.")] = False,
    forget: Annotated[
        str | None, cli.option("--forget", "Let retention wait no longer for this one of --positions.", metavar="NAME")
    ] = None,
    partitions: Partitions = None,
    log_level: cli.LogLevel = "INFO",
    *,
    cluster: SparkOptions,
) -> None:
    """Copy records to Parquet by day, each exactly once.

    Without --continuous, once: up to the last record. The same lake goes on where it was stopped or killed. Retention
    removes no record that is not there.
    """
    if sum((lake is not None, positions, forget is not None)) != 1:
        raise cli.usage_error("give one of LAKE, --positions and --forget NAME")
    if trigger is not None and not continuous:
        raise cli.usage_error("--trigger is for --continuous")
    if (continuous or checkpoint is not None) and lake is None:
        raise cli.usage_error("--continuous and --checkpoint need LAKE")
    store = common.store_of(use)
    if lake is None:
        _report_positions(use, store, forget)
        return

    def job(spark: SparkSession) -> HistoryResult:
        from postdate.pipeline.history.job import TRIGGER, write_history

        if continuous:
            common.log.info("following the records of %s into %s", store.redacted_address, lake)
        return write_history(
            spark,
            store,
            lake,
            checkpoint=checkpoint,
            continuous=continuous,
            trigger=trigger or TRIGGER,
            partitions=partitions or DEFAULT_PARTITIONS,
            stop=stop,
        )

    stop = threading.Event()
    if continuous:
        with cli.log_to_stderr(log_level), common.stop_on_signal() as stop:
            result = common.run_on_spark(job, cluster, long=True)
            common.log.info("stopped")
    else:
        result = common.run_on_spark(job, cluster)
    use.report(
        result.to_json(),
        lambda: print_pairs(
            {
                "store": result.store,
                "lake": result.lake,
                "position": result.position,
                "records": f"{result.records:,}",
                "took": f"{result.took_seconds:.1f} s",
            }
        ),
    )


def _report_positions(use: cli.Use, store: StoreSpec, forget: str | None) -> None:
    """Remove a position if one is named, and show those that are left."""
    from postdate.pipeline.history.job import forget_position, read_positions

    if forget is not None:
        forget_position(store, forget)
    positions = read_positions(store)
    lines = [{"name": each.name, "next": each.number, "at": each.at.isoformat()} for each in positions]
    use.report({"positions": lines}, lambda: _print_positions(positions))


def _print_positions(positions: Sequence[StreamPosition]) -> None:
    if not positions:
        print("retention waits for no lake")
        return
    rows = [[each.name, each.number, each.at.isoformat(timespec="seconds")] for each in positions]
    print_table(["name", "next record", "reported at"], rows)


@cli.command(app, "archive", hidden=True, context_settings=_ANY_ARGUMENTS)
def archive(use: cli.Use) -> None:
    """Say which command replaces this one."""
    raise cli.usage_error(_ARCHIVE_ADVICE)


@cli.command(app, "restore", hidden=True, context_settings=_ANY_ARGUMENTS)
def restore(use: cli.Use) -> None:
    """Say which command replaces this one."""
    raise cli.usage_error(_ARCHIVE_ADVICE)
