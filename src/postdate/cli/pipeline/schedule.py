"""``postdate pipeline schedule``: store any table of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from postdate.cli.command import Use, command, name_option, option, usage_error
from postdate.cli.output import print_pairs
from postdate.cli.pipeline import common
from postdate.cli.pipeline.common import SparkOptions, app

if TYPE_CHECKING:
    from postdate.pipeline.clock_times import LocalTimes
    from postdate.pipeline.schedule import ScheduleJob, ScheduleResult, SyncResult
    from postdate.pipeline.session import SparkSession
    from postdate.pipeline.stores import StoreSpec


_LARGE_BYTES = 64 * 1024 * 1024
_column = partial(option, metavar="COLUMN")


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How the input is read: options of every command that compares a table with a store or stores it."""

    input_format: Annotated[
        Literal["csv", "json", "parquet", "orc", "avro", "delta", "iceberg"] | None,
        option("--format", "Default: by the end of the name."),
    ] = None
    id_column: Annotated[str | None, _column("--id", "Message ids; default: message_id.")] = None
    due: Annotated[str | None, _column("--due", "Due times; default: due.")] = None
    destination: Annotated[str | None, _column("--destination", "Queues; default: destination.")] = None
    destination_value: Annotated[
        str | None, option("--destination-value", "One queue for all messages.", metavar="QUEUE")
    ] = None
    body: Annotated[str | None, _column("--body", "Bodies; default: body, if there is such a column.")] = None
    headers: Annotated[str | None, _column("--headers", "Headers as JSON; default: headers, if there.")] = None
    expires_at: Annotated[str | None, _column("--expires-at", "Ends of use; default: expires_at, if there.")] = None
    zone: Annotated[str | None, option("--zone", "Time zone of times without an offset.", metavar="AREA/CITY")] = None
    ambiguous: Annotated[
        Literal["earlier", "later", "reject"], option("--ambiguous", "A clock time that occurs twice, in autumn.")
    ] = "earlier"
    nonexistent: Annotated[
        Literal["forward", "reject"], option("--nonexistent", "A clock time that does not occur, in spring.")
    ] = "reject"
    encoding: Annotated[str, option("--encoding", "Of CSV and JSON, as in cp1252.", metavar="NAME")] = "UTF-8"
    delimiter: Annotated[str, option("--delimiter", "Between cells of CSV; tab for a tab.", metavar="CHARACTER")] = ","
    unused: Annotated[
        list[str] | None,
        option(
            "--unused",
            "A column to ignore although its name is similar to that of a message; repeatable.",
            metavar="COLUMN",
        ),
    ] = None
    verify: Annotated[
        bool, option("--verify", "Count the rows with another reader first, and store nothing if it counts others.")
    ] = False

    def __post_init__(self) -> None:
        if self.destination is not None and self.destination_value is not None:
            raise usage_error("--destination and --destination-value exclude each other")

    def run(
        self,
        sources: list[str],
        store: StoreSpec,
        partitions: int | None,
        cluster: SparkOptions,
        engine: common.Engine = "spark",
        **parameters: Any,
    ) -> ScheduleResult:
        """Read the input and run a schedule job with these other parameters of it."""
        from postdate.errors import PipelineError
        from postdate.pipeline.engines import LARGEST_LOCAL_BYTES
        from postdate.pipeline.local.files import local_paths, size_in_bytes

        for source in sources:
            if not local_paths(source) and "://" not in source:
                raise PipelineError(f"there is no file or folder {source!r} to read")
        delimiter = "\t" if self.delimiter in {"tab", "\\t"} else self.delimiter
        reading = (sources, self.input_format, self.encoding, delimiter)

        def on_spark(spark: SparkSession) -> ScheduleResult:
            from postdate.pipeline.counting import count_rows
            from postdate.pipeline.files import read_input
            from postdate.pipeline.schedule import schedule

            messages = read_input(spark, *reading)
            expected_rows = count_rows(spark, *reading) if self.verify else None
            is_case_sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
            job = self._job(messages.columns, store, expected_rows, parameters, case_sensitive=is_case_sensitive)
            if partitions is not None:
                messages = messages.repartition(partitions)
            return schedule(messages, job)

        def locally() -> ScheduleResult:
            from postdate.pipeline.counting import count_rows_in_files
            from postdate.pipeline.local.reading import read_table
            from postdate.pipeline.local.schedule import schedule

            messages = read_table(*reading)
            expected_rows = (
                count_rows_in_files(messages.files, messages.input_format, *reading[2:]) if self.verify else None
            )
            return schedule(messages, self._job(messages.columns.names, store, expected_rows, parameters))

        size = size_in_bytes(sources)
        spark_option = "--sync" if parameters.get("sync") else cluster.first_spark_option(partitions)
        choice = common.EngineChoice(
            engine,
            None if spark_option is None else f"{spark_option} is for Spark",
            is_large=size is not None and size > LARGEST_LOCAL_BYTES,
        )
        return choice.run(locally, on_spark, cluster, long=size is None or size >= _LARGE_BYTES)

    def _job(
        self,
        input_columns: Sequence[str],
        store: StoreSpec,
        expected_rows: int | None,
        parameters: Mapping[str, Any],
        *,
        case_sensitive: bool = False,
    ) -> ScheduleJob:
        from postdate.clock import SystemClock
        from postdate.pipeline.schedule import ColumnMapping, Rejects, ScheduleJob

        columns = ColumnMapping.match_columns(
            input_columns, self.unused or (), case_sensitive=case_sensitive, **self._given_columns()
        )
        rejected = parameters.get("rejected")
        return ScheduleJob(
            store,
            SystemClock().now(),
            columns,
            self._local_times(),
            None if rejected is None else Rejects(rejected),
            expected_rows=expected_rows,
            **{name: value for name, value in parameters.items() if name != "rejected"},
        )

    def _local_times(self) -> LocalTimes | None:
        from postdate.pipeline.clock_times import Ambiguous, LocalTimes, Nonexistent

        if self.zone is None:
            return None
        return LocalTimes(self.zone, Ambiguous(self.ambiguous), Nonexistent(self.nonexistent))

    def _given_columns(self) -> dict[str, str]:
        columns = {
            "message_id": self.id_column,
            "due": self.due,
            "destination": self.destination if self.destination_value is None else f"={self.destination_value}",
            "body": self.body,
            "headers": self.headers,
            "expires_at": self.expires_at,
        }
        return {name: column for name, column in columns.items() if column is not None}


Sources = Annotated[
    list[str],
    typer.Argument(metavar="INPUT", help="Files or folders of messages, one a row; patterns as in 'in/*.csv'."),
]


TasksOfInput = Annotated[
    int | None,
    option("--partitions", "Tasks that store at once; default: as the input is divided.", min=1, metavar="N"),
]


@command(app, "schedule")
def schedule(
    use: Use,
    sources: Sources,
    table: InputOptions,
    rejected: Annotated[
        str | None, option("--rejected", "New folder for rows that cannot be stored.", metavar="DIR|URI")
    ] = None,
    report: Annotated[
        str | None, option("--report", "New folder for the counts, as a Parquet table.", metavar="DIR|URI")
    ] = None,
    load: Annotated[
        str | None, name_option("--load", "Store the messages under this name; see pipeline loads.", metavar="NAME")
    ] = None,
    sync: Annotated[
        bool, option("--sync", "Make what waits under the name of --load equal to the table; cancel what is not in it.")
    ] = False,
    partitions: TasksOfInput = None,
    dry_run: Annotated[
        bool, option("--dry-run", "Check everything, store nothing, show what would be stored and set aside.")
    ] = False,
    engine: common.EngineOption = "auto",
    *,
    cluster: SparkOptions,
) -> None:
    """Store every row of a table as a delayed message.

    Run it again, and nothing is stored twice. Rows that are no message, and rows that differ from what the store has
    under their id, are counted by reason and written to --rejected. Exit code 1 if there are any.
    """
    if dry_run and (rejected is not None or report is not None):
        raise usage_error("--dry-run writes nothing: leave out --rejected and --report")
    if sync and load is None:
        raise usage_error("--sync needs --load NAME: the messages under this name become those of the table")
    common.check_tables()
    store = common.store_of(use)
    names = {"rejected": rejected, "report": report, "dry_run": dry_run, "load": load, "sync": sync}
    result = table.run(sources, store, partitions, cluster, engine, **names)
    report_scheduled(use, result, store)


def report_scheduled(use: Use, result: ScheduleResult, store: StoreSpec) -> None:
    use.report(
        result.to_json(),
        lambda: _print_scheduled(result, store),
        succeeded=not result.set_aside and not result.conflicting,
    )


def _print_scheduled(result: ScheduleResult, store: StoreSpec) -> None:
    set_aside = sum(result.set_aside.values())
    would = "would be " if result.is_dry_run else ""
    print_pairs(
        {
            "store": store.redacted_address,
            "load": result.load,
            "rows read": result.read,
            f"{would}stored": result.accepted,
            **({} if result.sync is None else _sync_lines(result.sync, would)),
            "already there": result.already_there,
            "conflicting": result.conflicting or None,
            "set aside": set_aside,
            **{f"  {reason}": count for reason, count in result.set_aside.items()},
            "set aside in": result.rejected_to,
            "columns not used": ", ".join(result.unused) or None,
            "report": result.reported_to,
            "took": f"{result.seconds:.1f} s, {result.rows_per_second:,.1f} rows/s",
            "engine": result.engine,
        }
    )
    if result.sync is not None and result.sync.retained:
        print(
            f"rows were set aside, so nothing {would or 'was '}cancelled: correct them, and run it again with the "
            f"whole table"
        )
    samples = {"stored": result.sample, **({} if result.sync is None else result.sync.samples)}
    for title, rows in (
        *((f"would be {name}", sample) for name, sample in samples.items()),
        ("would not be stored", result.rejected_sample),
    ):
        if rows:
            print(f"\n{title}, for example:")
            for row in rows:
                print("  " + json.dumps(row, ensure_ascii=False))
    if (set_aside or result.conflicting) and result.rejected_to is None and not result.is_dry_run:
        print("to see the rows set aside, run it again with --rejected DIR: stored messages do not change")


def _sync_lines(sync: SyncResult, would: str) -> dict[str, int]:
    late = sync.delivered_meanwhile + sync.not_cancelled
    return {
        f"{would}rescheduled": sync.rescheduled,
        f"{would}replaced": sync.replaced,
        f"{would}cancelled": sync.cancelled,
        "unchanged": sync.unchanged,
        **({"delivered meanwhile": late} if late else {}),
        **({"not in the table, kept": sync.retained} if sync.retained else {}),
    }
