"""``postdate pipeline delay``: release rows of files when they are due. The rows wait in Spark's own state."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli.command import LogLevel, Use, command, duration_option, log_to_stderr, option, usage_error
from postdate.cli.pipeline.common import SparkOptions, app, log, run_on_spark, stop_on_signal

if TYPE_CHECKING:
    from postdate.pipeline.session import SparkSession


@command(app, "delay", reports=False)
def delay(
    use: Use,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder whose files are the stream.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Folder for the rows that are due.")],
    checkpoint: Annotated[str, option("--checkpoint", "Folder in which the rows wait.", metavar="DIR")],
    schema: Annotated[str, option("--schema", "Columns of the source, as in 'id string, due timestamp, text string'.")],
    due: Annotated[str, option("--due", "Due times.", metavar="COLUMN")] = "due",
    source_format: Annotated[str, option("--format", "Of the source: json, csv or parquet.")] = "json",
    encoding: Annotated[str, option("--encoding", "Of CSV and JSON, as in cp1252.", metavar="NAME")] = "UTF-8",
    target_format: Annotated[str, option("--to-format", "Of the target: json or parquet.")] = "json",
    id_column: Annotated[
        str | None, option("--id", "Column with the id, in the rows and in --cancels.", metavar="COLUMN")
    ] = None,
    cancels: Annotated[
        str | None, option("--cancels", "Folder of JSON files with ids to be cancelled.", metavar="DIR")
    ] = None,
    null_due: Annotated[str, option("--null-due", "Rows without a due time: fail, now or drop.")] = "fail",
    resolution: Annotated[
        timedelta, duration_option("--resolution", "Rows are passed on at multiples of it.")
    ] = timedelta(milliseconds=250),
    slots: Annotated[int | None, option("--slots", "Number of keys that rows are spread over.", min=1)] = None,
    keep_cancels: Annotated[
        timedelta, duration_option("--keep-cancels", "How long later rows of a cancelled id are dropped.")
    ] = timedelta(hours=1),
    trigger: Annotated[timedelta, duration_option("--trigger", "How often a micro-batch starts.")] = timedelta(
        milliseconds=500
    ),
    log_level: LogLevel = "INFO",
    *,
    cluster: SparkOptions,
) -> None:
    """Pass on the rows of files in a folder when they are due.

    Until SIGTERM or Ctrl-C; needs no store. Never early, each row once. The same folders and options go on where it
    was stopped or killed.
    """
    if cancels is not None and id_column is None:
        raise usage_error("--cancels needs --id COLUMN, which it refers to")
    from postdate.pipeline.delay import DelayOptions, DelayTarget, delay_conf, read_directory, run_delay

    options = DelayOptions(resolution, slots, null_due, keep_cancels)
    delay_target = DelayTarget(target, checkpoint, target_format, trigger)

    def run_query(spark: SparkSession) -> None:
        from postdate.pipeline.failures import wait_and_stop

        rows = read_directory(spark, source, schema, source_format, encoding=encoding)
        ids = None
        if cancels is not None:
            assert id_column is not None
            ids = read_directory(spark, cancels, rows.select(id_column).schema.simpleString()[7:-1].replace(":", " "))
        query = run_delay(rows, delay_target, due, id_column, ids, options)
        log.info("delaying rows of %s into %s; checkpoint %s", source, target, checkpoint)
        wait_and_stop(query, "the query", stop)
        log.info("stopped")

    with log_to_stderr(log_level), stop_on_signal() as stop:
        run_on_spark(run_query, cluster, delay_conf(), long=True)
