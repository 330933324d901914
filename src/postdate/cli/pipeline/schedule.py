"""``postdate pipeline schedule``: store any table of messages."""

from __future__ import annotations

import glob
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from postdate.cli.command import Use, command, option, usage_error
from postdate.cli.output import print_pairs
from postdate.cli.pipeline.common import SparkOptions, app, run_on_spark, store_of
from postdate.errors import PipelineError

if TYPE_CHECKING:
    from postdate.pipeline.schedule import ScheduleResult
    from postdate.pipeline.session import SparkSession
    from postdate.pipeline.stores import StoreSpec


_LARGE_BYTES = 64 * 1024 * 1024
_column = partial(option, metavar="COLUMN")


@command(app, "schedule")
def schedule(
    use: Use,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="INPUT", help="Files or folders of messages, one a row; patterns as in 'in/*.csv'."),
    ],
    input_format: Annotated[
        Literal["csv", "json", "parquet", "orc", "avro", "delta", "iceberg"] | None,
        option("--format", "Default: by the end of the name."),
    ] = None,
    id_column: Annotated[str | None, _column("--id", "Message ids; default: message_id.")] = None,
    due: Annotated[str | None, _column("--due", "Due times; default: due.")] = None,
    destination: Annotated[str | None, _column("--destination", "Queues; default: destination.")] = None,
    destination_value: Annotated[
        str | None, option("--destination-value", "One queue for all messages.", metavar="QUEUE")
    ] = None,
    body: Annotated[str | None, _column("--body", "Bodies; default: body, if there is such a column.")] = None,
    headers: Annotated[str | None, _column("--headers", "Headers as JSON; default: headers, if there.")] = None,
    expires_at: Annotated[str | None, _column("--expires-at", "Ends of use; default: expires_at, if there.")] = None,
    zone: Annotated[str | None, option("--zone", "Time zone of times without an offset.", metavar="AREA/CITY")] = None,
    ambiguous: Annotated[
        Literal["earlier", "later", "reject"], option("--ambiguous", "A clock time that occurs twice, in autumn.")
    ] = "earlier",
    nonexistent: Annotated[
        Literal["forward", "reject"], option("--nonexistent", "A clock time that does not occur, in spring.")
    ] = "reject",
    rejected: Annotated[
        str | None, option("--rejected", "New folder for rows that cannot be stored.", metavar="DIR|URI")
    ] = None,
    report: Annotated[
        str | None, option("--report", "New folder for the counts, as a Parquet table.", metavar="DIR|URI")
    ] = None,
    encoding: Annotated[str, option("--encoding", "Of CSV and JSON, as in cp1252.", metavar="NAME")] = "UTF-8",
    delimiter: Annotated[str, option("--delimiter", "Between cells of CSV; tab for a tab.", metavar="CHARACTER")] = ",",
    unused: Annotated[
        list[str] | None,
        option(
            "--unused",
            "A column to ignore although its name is similar to that of a message; repeatable.",
            metavar="COLUMN",
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        option("--partitions", "Tasks that store at once; default: as the input is divided.", min=1, metavar="N"),
    ] = None,
    verify: Annotated[
        bool, option("--verify", "Count the rows with another reader first, and store nothing if it counts others.")
    ] = False,
    dry_run: Annotated[
        bool, option("--dry-run", "Check everything, store nothing, show what would be stored and set aside.")
    ] = False,
    *,
    cluster: SparkOptions,
) -> None:
    """Store every row of a table as a delayed message.

    Run it again, and nothing is stored twice. Rows that are no message, and rows that differ from what the store has
    under their id, are counted by reason and written to --rejected. Exit code 1 if there are any.
    """
    if destination is not None and destination_value is not None:
        raise usage_error("--destination and --destination-value exclude each other")
    if dry_run and (rejected is not None or report is not None):
        raise usage_error("--dry-run writes nothing: leave out --rejected and --report")
    for source in sources:
        if not _local_paths(source) and "://" not in source:
            raise PipelineError(f"there is no file or folder {source!r} to read")
    columns_of_options = {
        "message_id": id_column,
        "due": due,
        "destination": destination if destination_value is None else f"={destination_value}",
        "body": body,
        "headers": headers,
        "expires_at": expires_at,
    }
    store = store_of(use)

    def job(spark: SparkSession) -> ScheduleResult:
        from postdate.clock import SystemClock
        from postdate.pipeline import schedule as scheduling
        from postdate.pipeline.counting import count_rows
        from postdate.pipeline.files import read_input
        from postdate.pipeline.local_time import Ambiguous, LocalTimes, Nonexistent

        cell_delimiter = "\t" if delimiter in {"tab", "\\t"} else delimiter
        messages = read_input(spark, sources, input_format, encoding, cell_delimiter)
        expected_rows = count_rows(spark, sources, input_format, encoding, cell_delimiter) if verify else None
        given_columns = {name: column for name, column in columns_of_options.items() if column is not None}
        is_case_sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
        columns = scheduling.ColumnMapping.match_columns(
            messages.columns, unused or (), case_sensitive=is_case_sensitive, **given_columns
        )
        if partitions is not None:
            messages = messages.repartition(partitions)
        rejects = None if rejected is None else scheduling.Rejects(rejected)
        times = None if zone is None else LocalTimes(zone, Ambiguous(ambiguous), Nonexistent(nonexistent))
        job_parameters = scheduling.ScheduleJob(
            store,
            SystemClock().now(),
            columns,
            times,
            rejects,
            report=report,
            dry_run=dry_run,
            expected_rows=expected_rows,
        )
        return scheduling.schedule(messages, job_parameters)

    result = run_on_spark(job, cluster, long=sum(map(_size_in_bytes, sources)) >= _LARGE_BYTES)
    use.report(
        result.to_json(),
        lambda: _print_scheduled(result, store),
        succeeded=not result.set_aside and not result.conflicting,
    )


def _local_paths(source: str) -> list[Path]:
    """Return the files and folders of this machine that a path or a pattern names."""
    path = Path(source)
    return [path] if path.exists() else [Path(each) for each in glob.glob(source)]  # noqa: PTH207 - any path, as given


def _size_in_bytes(source: str) -> int:
    """Return the number of bytes of all files that a path or a pattern names. Input elsewhere counts as large."""
    if "://" in source:
        return _LARGE_BYTES
    files = (each for path in _local_paths(source) for each in (path, *path.rglob("*")) if each.is_file())
    return sum(each.stat().st_size for each in files)


def _print_scheduled(result: ScheduleResult, store: StoreSpec) -> None:
    set_aside = sum(result.set_aside.values())
    print_pairs(
        {
            "store": store.redacted_address,
            "rows read": result.read,
            "would be stored" if result.is_dry_run else "stored": result.accepted,
            "already there": result.already_there,
            "conflicting": result.conflicting or None,
            "set aside": set_aside,
            **{f"  {reason}": count for reason, count in result.set_aside.items()},
            "set aside in": result.rejected_to,
            "columns not used": ", ".join(result.unused) or None,
            "report": result.reported_to,
            "took": f"{result.seconds:.1f} s, {result.rows_per_second:,.1f} rows/s",
        }
    )
    for title, rows in (("would be stored", result.sample), ("would not be stored", result.rejected_sample)):
        if rows:
            print(f"\n{title}, for example:")
            for row in rows:
                print("  " + json.dumps(row, ensure_ascii=False))
    if (set_aside or result.conflicting) and result.rejected_to is None and not result.is_dry_run:
        print("to see the rows set aside, run it again with --rejected DIR: stored messages do not change")
