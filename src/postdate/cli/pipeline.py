"""``postdate pipeline``: bulk jobs on Spark. Imported, as Spark is, only when one of them is called."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from postdate.cli.arguments import DURATION
from postdate.cli.command import Use, command, group, wrong_usage
from postdate.cli.exits import Exit
from postdate.errors import ConfigurationError, PipelineError

if TYPE_CHECKING:
    from postdate.pipeline.audit import AuditResult
    from postdate.pipeline.local_time import LocalTimes
    from postdate.pipeline.schedule import ColumnMapping, ScheduleResult
    from postdate.pipeline.session import SparkSession
    from postdate.pipeline.stores import StoreSpec

T = TypeVar("T")

app = group("pipeline", "Bulk jobs on Spark, in this process or on a cluster.")


class InputFormat(enum.Enum):
    """Formats of input."""

    CSV = "csv"
    PARQUET = "parquet"
    JSON = "json"


class AmbiguousTimes(enum.Enum):
    """What a clock time means that occurs twice; see :class:`postdate.pipeline.local_time.Ambiguous`."""

    EARLIER = "earlier"
    LATER = "later"
    REJECT = "reject"


class NonexistentTimes(enum.Enum):
    """What a clock time means that does not occur; see :class:`postdate.pipeline.local_time.Nonexistent`."""

    FORWARD = "forward"
    REJECT = "reject"


def _column(option: str, what: str) -> Any:
    return typer.Option(option, metavar="COLUMN", help=what)


Cores = Annotated[int | None, typer.Option("--cores", min=1, help="Threads of Spark; default: all cores.")]
Master = Annotated[str | None, typer.Option("--master", metavar="URL", help="A Spark cluster; default: this process.")]


@command(app, "schedule")
def schedule(
    use: Use,
    source: Annotated[str, typer.Argument(metavar="INPUT", help="File or folder of messages, one a row.")],
    input_format: Annotated[
        InputFormat | None, typer.Option("--format", help="Default: by the end of the name.")
    ] = None,
    id_column: Annotated[str | None, _column("--id", "Message ids; default: message_id.")] = None,
    due: Annotated[str | None, _column("--due", "Due times; default: due.")] = None,
    destination: Annotated[str | None, _column("--destination", "Queues; default: destination.")] = None,
    destination_value: Annotated[
        str | None, typer.Option("--destination-value", metavar="QUEUE", help="One queue for all messages.")
    ] = None,
    body: Annotated[str | None, _column("--body", "Bodies; default: body, if there is such a column.")] = None,
    headers: Annotated[str | None, _column("--headers", "Headers as JSON; default: headers, if there.")] = None,
    expires_at: Annotated[str | None, _column("--expires-at", "Ends of use; default: expires_at, if there.")] = None,
    zone: Annotated[
        str | None, typer.Option("--zone", metavar="AREA/CITY", help="Time zone of times without an offset.")
    ] = None,
    ambiguous: Annotated[
        AmbiguousTimes, typer.Option("--ambiguous", help="A clock time that occurs twice, in autumn.")
    ] = AmbiguousTimes.EARLIER,
    nonexistent: Annotated[
        NonexistentTimes, typer.Option("--nonexistent", help="A clock time that does not occur, in spring.")
    ] = NonexistentTimes.REJECT,
    rejected: Annotated[
        Path | None, typer.Option("--rejected", metavar="DIR", help="New folder for rows that are no message.")
    ] = None,
    cores: Cores = None,
    master: Master = None,
) -> None:
    """Store every row of a table as a delayed message; run it again, and nothing is stored twice.

    Rows that are no message are counted by reason, and written to --rejected. Exit code 1 if there are any.
    """
    if destination is not None and destination_value is not None:
        raise wrong_usage("--destination and --destination-value exclude each other")
    if "://" not in source and not Path(source).exists():
        raise PipelineError(f"there is no file or folder {source!r} to read")
    given = {
        "message_id": id_column,
        "due": due,
        "destination": destination if destination_value is None else f"={destination_value}",
        "body": body,
        "headers": headers,
        "expires_at": expires_at,
    }
    store = _store(use)

    def job(spark: SparkSession) -> ScheduleResult:
        from postdate.clock import SystemClock
        from postdate.pipeline.schedule import Rejects, ScheduleJob, read_input
        from postdate.pipeline.schedule import schedule as run

        messages = read_input(spark, source, None if input_format is None else input_format.value)
        columns = _columns(messages.columns, given)
        rejects = None if rejected is None else Rejects(rejected)
        times = _local_times(zone, ambiguous, nonexistent)
        return run(messages, ScheduleJob(store, SystemClock().now(), columns, times, rejects))

    result = _on_spark(job, cores, master)
    use.report(result.to_json(), lambda: _print_scheduled(result, store))
    if result.set_aside:
        raise typer.Exit(Exit.NOT_KEPT)


def _columns(found: list[str], given: dict[str, str | None]) -> ColumnMapping:
    from postdate.pipeline.schedule import ColumnMapping

    named = {name: column for name, column in given.items() if column is not None}
    return replace(ColumnMapping.found_in(found), **named)


def _local_times(zone: str | None, ambiguous: AmbiguousTimes, nonexistent: NonexistentTimes) -> LocalTimes | None:
    from postdate.pipeline.local_time import Ambiguous, LocalTimes, Nonexistent

    if zone is None:
        return None
    return LocalTimes(zone, Ambiguous(ambiguous.value), Nonexistent(nonexistent.value))


def _print_scheduled(result: ScheduleResult, store: StoreSpec) -> None:
    from postdate.cli.output import print_pairs

    set_aside = sum(result.set_aside.values())
    print_pairs(
        {
            "store": store.shown,
            "rows read": result.read,
            "stored": result.accepted,
            "already there": result.already_there,
            "set aside": set_aside,
            **{f"  {reason}": count for reason, count in result.set_aside.items()},
            "set aside in": result.rejected_to,
            "took": f"{result.seconds:.1f} s, {result.rows_per_second:,.1f} rows/s",
        }
    )
    if set_aside and result.rejected_to is None:
        print("to see the rows set aside, run it again with --rejected DIR: what is stored stays as it is")


@command(app, "audit")
def audit(
    use: Use,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report to look at.")] = None,
    late_after: Annotated[
        timedelta, typer.Option("--late-after", parser=DURATION, metavar="DURATION", help="Later than that is late.")
    ] = timedelta(seconds=1),
    cores: Cores = None,
    master: Master = None,
) -> None:
    """Compare what was scheduled with what was delivered: lost, duplicated, early, late.

    Exit code 1 if any message was lost, duplicated or early. Changes nothing; services may go on.
    """
    if html is not None and not html.absolute().parent.is_dir():
        raise wrong_usage(f"there is no folder {html.absolute().parent} for the report")
    store = _store(use)

    def job(spark: SparkSession) -> AuditResult:
        from postdate.clock import SystemClock
        from postdate.pipeline.audit import audit as run

        return run(spark, store, SystemClock().now(), late_after=late_after)

    result = _on_spark(job, cores, master)
    if html is not None:
        from postdate.pipeline.report import write_html

        write_html(result, html)
    use.report(result.to_json(), lambda: _print_audit(result, html))
    if not result.clean:
        raise typer.Exit(Exit.NOT_KEPT)


def _print_audit(result: AuditResult, html: Path | None) -> None:
    from postdate.cli.output import clean, print_pairs

    print_pairs({"store": result.store, **dict(result.table())})
    for finding in result.findings:
        ids = ", ".join(clean(each) for each in finding.sample[:5])
        print(f"{finding.name}: {finding.count:,}, such as {ids}")
    print("clean: nothing lost, duplicated or early" if result.clean else "NOT CLEAN")
    if html is not None:
        print(f"report: {html}")


def _store(use: Use) -> StoreSpec:
    with _extra_installed():
        from postdate.pipeline.stores import StoreSpec
    chosen = use.settings().store
    return StoreSpec(chosen.address, chosen.synchronous)


@contextmanager
def _extra_installed() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is missing; bulk jobs need the pipeline extra: pip install 'postdate[pipeline]'"
        ) from error


def _on_spark(job: Callable[[SparkSession], T], cores: int | None, master: str | None) -> T:
    """Start Spark, do the job, stop Spark; what Spark says is wrong is said in one line."""
    with _extra_installed():
        from postdate.pipeline.session import spark_session
    from rich.console import Console

    with Console(stderr=True).status("Spark is working …"):
        try:
            with spark_session(cores=cores, master=master) as spark:
                return job(spark)
        except Exception as error:
            # Known by its home: Spark itself is imported in the pipeline only.
            if type(error).__module__.startswith("pyspark.errors"):
                raise PipelineError(f"Spark: {str(error).strip().partition(chr(10))[0]}") from error
            raise
