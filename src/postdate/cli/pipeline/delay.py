"""``postdate pipeline delay``: release rows of files when they are due. The rows wait in Spark's own state."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli import command as cli
from postdate.cli.pipeline.common import SparkOptions, app, log, run_on_spark, stop_on_signal

if TYPE_CHECKING:
    from postdate.pipeline.delay import SplitRows
    from postdate.pipeline.session import SparkSession


@cli.command(app, "delay", reports=False)
def delay(
    use: cli.Use,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder whose files are the stream.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Folder for the rows that are due.")],
    checkpoint: Annotated[str, cli.option("--checkpoint", "Folder in which the rows wait.", metavar="DIR")],
    schema: Annotated[
        str, cli.option("--schema", "Columns of the source, as in 'id string, due timestamp, text string'.")
    ],
    due: Annotated[str, cli.option("--due", "Due times.", metavar="COLUMN")] = "due",
    source_format: Annotated[str, cli.option("--format", "Of the source: json, csv or parquet.")] = "json",
    encoding: Annotated[str, cli.option("--encoding", "Of CSV and JSON, as in cp1252.", metavar="NAME")] = "UTF-8",
    target_format: Annotated[str, cli.option("--to-format", "Of the target: json or parquet.")] = "json",
    id_column: Annotated[
        str | None, cli.option("--id", "Column with the id, in the rows and in --cancels.", metavar="COLUMN")
    ] = None,
    cancels: Annotated[
        str | None, cli.option("--cancels", "Folder of JSON files with ids to be cancelled.", metavar="DIR")
    ] = None,
    null_due: Annotated[str, cli.option("--null-due", "Rows without a due time: fail, now or drop.")] = "fail",
    rejected: Annotated[
        str | None, cli.option("--rejected", "Folder for rows that cannot be delayed.", metavar="LOCATION")
    ] = None,
    resolution: Annotated[
        timedelta, cli.duration_option("--resolution", "Rows are passed on at multiples of it.")
    ] = timedelta(milliseconds=250),
    slots: Annotated[int | None, cli.option("--slots", "Number of keys that rows are spread over.", min=1)] = None,
    keep_cancels: Annotated[
        timedelta, cli.duration_option("--keep-cancels", "How long later rows of a cancelled id are dropped.")
    ] = timedelta(hours=1),
    trigger: Annotated[timedelta, cli.duration_option("--trigger", "How often a micro-batch starts.")] = timedelta(
        milliseconds=500
    ),
    log_level: cli.LogLevel = "INFO",
    *,
    cluster: SparkOptions,
) -> None:
    """Pass on the rows of files in a folder when they are due.

    Until SIGTERM or Ctrl-C; needs no store. Never early, each row once. The same folders and options go on where it
    was stopped or killed. A malformed row ends it, or is written to --rejected.
    """
    if cancels is not None and id_column is None:
        raise cli.usage_error("--cancels needs --id COLUMN, which it refers to")
    from postdate.pipeline.delay import (
        DelayOptions,
        DelayTarget,
        delay_conf,
        read_directory,
        run_delay,
        split_rejected,
        write_rejected,
    )

    options = DelayOptions(resolution, slots, null_due, keep_cancels)
    delay_target = DelayTarget(target, checkpoint, target_format, trigger)

    def run_query(spark: SparkSession) -> None:
        from postdate.pipeline.failures import wait_and_stop_all

        malformed = "fail" if rejected is None else "keep"
        rows = read_directory(spark, source, schema, source_format, encoding=encoding, malformed=malformed)
        splits: list[SplitRows] = []
        if rejected is not None:
            splits.append(split_rejected(rows, due, null_due))
            rows = splits[-1].rows
        ids = None
        if cancels is not None:
            assert id_column is not None
            id_schema = rows.select(id_column).schema.simpleString()[7:-1].replace(":", " ")
            ids = read_directory(spark, cancels, id_schema, malformed=malformed)
            if rejected is not None:
                splits.append(split_rejected(ids, due=None))
                ids = splits[-1].rows
        queries = {"the query": run_delay(rows, delay_target, due, id_column, ids, options)}
        if rejected is not None:
            rejected_rows = [split.rejected for split in splits]
            queries["the query for rejected rows"] = write_rejected(rejected_rows, rejected, checkpoint)
        log.info("delaying rows of %s into %s; checkpoint %s", source, target, checkpoint)
        wait_and_stop_all(queries, stop)
        log.info("stopped")

    with cli.log_to_stderr(log_level), stop_on_signal() as stop:
        run_on_spark(run_query, cluster, delay_conf(), long=True)
