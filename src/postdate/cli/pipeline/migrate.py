"""``postdate pipeline migrate``: delayed messages from a timeout manager's tables, or another store, into the store."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli.arguments import DURATION, INSTANT
from postdate.cli.command import Use, command, group, wrong_usage
from postdate.cli.exits import Exit
from postdate.cli.logs import LogLevel, logging_to_stderr
from postdate.cli.pipeline.common import Cores, Master, app, extra_installed, on_spark, store_of

if TYPE_CHECKING:
    from postdate.pipeline.migrate import MigrateJob, MigrateResult, OriginSpec, PreviewResult, StatusResult
    from postdate.pipeline.session import SparkSession

migrations = group(
    "migrate", "Move delayed messages from a timeout manager's tables, or another store, into the store."
)
app.add_typer(migrations)

From = Annotated[
    str | None,
    typer.Option("--from", metavar="ADDRESS", help="A timeout manager's database; env:NAME and file:PATH name it."),
]
FromStore = Annotated[
    str | None,
    typer.Option("--from-store", metavar="ADDRESS", help="Another Postdate store; env:NAME and file:PATH name it."),
]
Schema = Annotated[str | None, typer.Option("--schema", help="Of its tables; default: that of what is there.")]
Prefixes = Annotated[
    list[str] | None,
    typer.Option("--prefix", metavar="ENDPOINT=PREFIX", help="How an endpoint's tables begin; repeatable."),
]
Endpoints = Annotated[
    list[str] | None,
    typer.Option("--endpoint", metavar="NAME", help="Whose messages, in upper or lower case; repeatable."),
]
AllEndpoints = Annotated[bool, typer.Option("--all-endpoints", help="The messages of every endpoint there.")]
Cutoff = Annotated[
    datetime | None,
    typer.Option(
        "--cutoff",
        parser=INSTANT,
        metavar="TIME",
        help="Leave what is due earlier; ISO 8601 with offset. Default: everything moves.",
    ),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", min=1, max=1_000_000, help="Messages in one transaction; default: 5000.")
]
Margin = Annotated[
    timedelta | None,
    typer.Option(
        "--margin", parser=DURATION, metavar="DURATION", help="Leave what is due sooner than that; default: 60s."
    ),
]


@command(migrations, "preview")
def preview(
    use: Use,
    source: From = None,
    from_store: FromStore = None,
    endpoints: Endpoints = None,
    all_endpoints: AllEndpoints = False,
    cutoff: Cutoff = None,
    margin: Margin = None,
    schema: Schema = None,
    prefixes: Prefixes = None,
) -> None:
    """Say what would move and what is in the way; change nothing.

    Exit code 1 if something is in the way.
    """
    _one_of(endpoints, all_endpoints)
    job = _job(use, _origin(source, from_store, schema, prefixes), endpoints, cutoff, None, margin)

    from postdate.clock import SystemClock
    from postdate.pipeline.migrate import preview as look

    result = look(job, SystemClock().now())
    use.report(result.to_json(), lambda: _print_preview(result))
    if not result.possible:
        raise typer.Exit(Exit.NOT_KEPT)


@command(migrations, "run")
def run(
    use: Use,
    source: From = None,
    from_store: FromStore = None,
    endpoints: Endpoints = None,
    all_endpoints: AllEndpoints = False,
    cutoff: Cutoff = None,
    batch_size: BatchSize = None,
    margin: Margin = None,
    schema: Schema = None,
    prefixes: Prefixes = None,
    log_level: LogLevel = "INFO",
    cores: Cores = None,
    master: Master = None,
) -> None:
    """Move messages, and compare what the store has with what there was; go on if it was begun with the same options.

    What fires them there may run meanwhile, and so may services on the store. Exit code 1 if anything is not as it was.
    """
    _one_of(endpoints, all_endpoints)
    job = _job(use, _origin(source, from_store, schema, prefixes), endpoints, cutoff, batch_size, margin)

    def move(spark: SparkSession) -> MigrateResult:
        from postdate.pipeline.migrate import migrate

        return migrate(spark, job)

    with logging_to_stderr(log_level):
        result = on_spark(move, cores, master, long=True)
    _report(use, result)


@command(migrations, "resume")
def resume(
    use: Use,
    source: From = None,
    from_store: FromStore = None,
    endpoints: Endpoints = None,
    batch_size: BatchSize = None,
    margin: Margin = None,
    schema: Schema = None,
    prefixes: Prefixes = None,
    log_level: LogLevel = "INFO",
    cores: Cores = None,
    master: Master = None,
) -> None:
    """Go on with the runs that have not ended, each as it was begun; or with those of the endpoints named.

    Exit code 1 if anything is not as it was.
    """
    job = _job(use, _origin(source, from_store, schema, prefixes), endpoints, None, batch_size, margin)

    def go_on(spark: SparkSession) -> MigrateResult:
        from postdate.pipeline.migrate import resume

        return resume(spark, job)

    with logging_to_stderr(log_level):
        result = on_spark(go_on, cores, master, long=True)
    _report(use, result)


@command(migrations, "abort")
def abort(
    use: Use,
    source: From = None,
    from_store: FromStore = None,
    endpoints: Endpoints = None,
    schema: Schema = None,
    prefixes: Prefixes = None,
) -> None:
    """Give back to where it came from what the store does not have yet; what it has stays there.

    Of the runs that have not ended, or of the endpoints named. Exit code 1 if what the store has is not as it was.
    """
    job = _job(use, _origin(source, from_store, schema, prefixes), endpoints, None, None, None)

    from postdate.pipeline.migrate import abort as end

    result = end(job)
    use.report(result.to_json(), lambda: _print_result(result))
    if not result.exact:
        raise typer.Exit(Exit.NOT_KEPT)


@command(migrations, "status")
def status(
    use: Use, source: From = None, from_store: FromStore = None, schema: Schema = None, prefixes: Prefixes = None
) -> None:
    """Say how far each run is; change nothing."""
    origin = _origin(source, from_store, schema, prefixes)

    from postdate.pipeline.migrate import status as look

    result = look(origin)
    use.report(result.to_json(), lambda: _print_status(result))


# --- arguments --------------------------------------------------------------------------------------------------------


def _one_of(endpoints: list[str] | None, all_endpoints: bool) -> None:
    if bool(endpoints) == all_endpoints:
        raise wrong_usage("say whose messages: either --endpoint NAME or --all-endpoints")


def _origin(source: str | None, store: str | None, schema: str | None, prefixes: list[str] | None) -> OriginSpec:
    address = store if source is None else source
    if address is None or (source is not None and store is not None):
        raise wrong_usage("say from where: either --from ADDRESS, a timeout manager's, or --from-store ADDRESS")
    if store is not None and prefixes:
        raise wrong_usage("--prefix is for a timeout manager's tables; those of a store are found by their endpoints")
    named = dict[str, str]()
    for each in prefixes or []:
        endpoint, equals, prefix = each.partition("=")
        if not (endpoint and equals):
            raise wrong_usage(f"--prefix {each!r} is not ENDPOINT=PREFIX")
        named[endpoint] = prefix
    with extra_installed():
        from postdate.pipeline.migrate import OriginSpec
    return OriginSpec(address, schema, named or None, is_store=store is not None)


def _job(
    use: Use,
    origin: OriginSpec,
    endpoints: list[str] | None,
    cutoff: datetime | None,
    batch_size: int | None,
    margin: timedelta | None,
) -> MigrateJob:
    from postdate.pipeline.migrate import BATCH_SIZE, EVERYTHING, MARGIN, MigrateJob

    return MigrateJob(
        origin,
        store_of(use),
        tuple(endpoints) if endpoints else None,
        cutoff or EVERYTHING,
        batch_size or BATCH_SIZE,
        MARGIN if margin is None else margin,
    )


# --- reports ----------------------------------------------------------------------------------------------------------


def _report(use: Use, result: MigrateResult) -> None:
    use.report(result.to_json(), lambda: _print_result(result))
    if not result.complete:
        raise typer.Exit(Exit.NOT_KEPT)


def _print_preview(result: PreviewResult) -> None:
    from postdate.cli.output import print_pairs, print_table, time_or_dash

    print_pairs({"from": result.source, "to": result.target})
    print_table(
        ["endpoint", "messages", "left", "earliest", "latest"],
        [
            (each.endpoint, each.count, each.left, time_or_dash(each.earliest), time_or_dash(each.latest))
            for each in result.endpoints
        ],
    )
    for each in result.endpoints:
        for destination, count in sorted(each.destinations.items()):
            print(f"{each.endpoint}: {count:,} for {destination}")
        for warning in each.warnings:
            print(f"{each.endpoint}: warning: {warning}")
        for problem in each.problems:
            print(f"{each.endpoint}: cannot be migrated: {problem}")


def _print_result(result: MigrateResult) -> None:
    from postdate.cli.output import print_pairs

    print_pairs({"from": result.source, "to": result.target})
    for each in result.endpoints:
        print_pairs(
            {
                "endpoint": each.endpoint,
                "  run": each.run_id,
                "  status": each.status,
                "  messages": f"{each.messages:,}",
                "  moved": f"{each.moved:,}",
                "  given back": f"{each.returned:,}",
                "  refused": f"{each.refused:,}",
                "  known before": f"{each.already_there:,}",
                "  stored late": f"{each.stored_late:,}",
                "  the same": f"{each.verified:,}",
                "  ended meanwhile": f"{each.delivered_meanwhile:,}",
                "  not the same": f"{each.mismatched:,}",
            }
        )
        for problem in each.problems:
            print(f"  refused: {problem}")
        for difference in each.differences:
            print(f"  not the same: {difference.message_id}: {difference.what}")
    print_pairs(
        {"took": f"{result.took_seconds:.1f} s, {result.moved / max(result.took_seconds, 1e-9):,.0f} messages/s"}
    )


def _print_status(result: StatusResult) -> None:
    from postdate.cli.output import print_table, time_or_dash
    from postdate.ports.migrating import BatchStatus

    if not result.runs:
        print(f"no migration was ever begun in {result.source}")
        return
    print_table(
        ["run", "endpoint", "status", "begun", "ended", *(status.name.lower() for status in BatchStatus), "to"],
        [
            (
                each.run.run_id,
                each.run.endpoint,
                each.run.status.name.lower(),
                time_or_dash(each.run.started_at),
                time_or_dash(each.run.completed_at),
                *(each.messages[status] for status in BatchStatus),
                each.run.parameters.get("target", "-"),
            )
            for each in result.runs
        ],
    )
