"""``postdate pipeline migrate``: move delayed messages from the tables of a timeout manager into the store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postdate.cli import command as cli
from postdate.cli.output import print_pairs, print_table, time_or_dash
from postdate.cli.pipeline.common import SparkOptions, app, run_on_spark, store_of

if TYPE_CHECKING:
    from postdate.pipeline.migrate import MigrateJob, MigrateResult, OriginSpec, PreviewResult, StatusResult

migrations = cli.create_group("migrate", "Move delayed messages here from a timeout manager.")
app.add_typer(migrations)

Endpoints = Annotated[
    list[str] | None, cli.option("--endpoint", "Whose messages, in upper or lower case; repeatable.", metavar="NAME")
]
Cutoff = Annotated[
    datetime | None,
    cli.instant_option("--cutoff", "Leave messages due earlier; ISO 8601 with offset. Default: all move."),
]
Margin = Annotated[
    timedelta | None, cli.duration_option("--margin", "Leave messages due sooner than this; default: 60s.")
]


def _refuse_store(text: str | None) -> None:
    """Refuse ``--from-store`` of earlier versions, and name the command that replaces it."""
    if text is not None:  # Typer also passes the default value through this function.
        raise typer.BadParameter(
            "messages of another store are moved by `postdate move --from ADDRESS --to ADDRESS`, once its services are "
            "stopped"
        )


@dataclass(frozen=True, slots=True)
class OriginOptions:
    """The source of the messages: options of every ``migrate`` command."""

    source: Annotated[
        str | None,
        cli.option("--from", "A timeout manager's database; env:NAME and file:PATH name it.", metavar="ADDRESS"),
    ] = None
    from_store: Annotated[Any, cli.option("--from-store", "Gone.", parser=_refuse_store, hidden=True)] = None
    schema: Annotated[str | None, cli.option("--schema", "Of its tables; default: that of what is there.")] = None
    prefixes: Annotated[
        list[str] | None,
        cli.option("--prefix", "How an endpoint's tables begin; repeatable.", metavar="ENDPOINT=PREFIX"),
    ] = None

    def spec(self) -> OriginSpec:
        """Return the storage of the timeout manager that ``--from`` names."""
        if self.source is None:
            raise cli.usage_error("give the source: --from ADDRESS, the database of a timeout manager")
        prefixes = cli.pairs_of(self.prefixes, "--prefix", "ENDPOINT=PREFIX")
        from postdate.pipeline.migrate import OriginSpec

        return OriginSpec(self.source, self.schema, prefixes or None)


@dataclass(frozen=True, slots=True)
class EndpointSelection:
    """The endpoints whose messages move: options of commands that begin a run."""

    endpoints: Endpoints = None
    all_endpoints: Annotated[bool, cli.option("--all-endpoints", "The messages of every endpoint there.")] = False

    def selected_endpoints(self) -> list[str] | None:
        if bool(self.endpoints) == self.all_endpoints:
            raise cli.usage_error("give either --endpoint NAME or --all-endpoints")
        return self.endpoints


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """How a run moves messages: options of commands that move."""

    batch_size: Annotated[
        int | None, cli.option("--batch-size", "Messages in one transaction; default: 5000.", min=1, max=1_000_000)
    ] = None
    margin: Margin = None


@cli.command(migrations, "preview")
def preview(
    use: cli.Use, origin: OriginOptions, whose: EndpointSelection, cutoff: Cutoff = None, margin: Margin = None
) -> None:
    """Show what would move and what prevents it; change nothing.

    Exit code 1 if something is in the way.
    """
    job = _create_job(use, origin, whose.selected_endpoints(), cutoff, MoveOptions(margin=margin))

    from postdate.clock import SystemClock
    from postdate.pipeline import migrate

    result = migrate.preview(job, SystemClock().now())
    use.report(result.to_json(), lambda: _print_preview(result), succeeded=result.is_possible)


@cli.command(migrations, "run")
def run(
    use: cli.Use,
    origin: OriginOptions,
    whose: EndpointSelection,
    pace: MoveOptions,
    cutoff: Cutoff = None,
    log_level: cli.LogLevel = "INFO",
    *,
    cluster: SparkOptions,
) -> None:
    """Move messages, and verify the result.

    Begun with the same options before, it goes on. What fires them there may run meanwhile, and so may services on
    the store. Exit code 1 if anything is not as it was.
    """
    _move(use, _create_job(use, origin, whose.selected_endpoints(), cutoff, pace), cluster, log_level, is_resumed=False)


@cli.command(migrations, "resume")
def resume(
    use: cli.Use,
    origin: OriginOptions,
    pace: MoveOptions,
    endpoints: Endpoints = None,
    log_level: cli.LogLevel = "INFO",
    *,
    cluster: SparkOptions,
) -> None:
    """Continue unfinished runs with their former parameters.

    Or with those of the endpoints named. Exit code 1 if anything is not as it was.
    """
    _move(use, _create_job(use, origin, endpoints, None, pace), cluster, log_level, is_resumed=True)


def _move(use: cli.Use, job: MigrateJob, cluster: SparkOptions, log_level: str, *, is_resumed: bool) -> None:
    from postdate.pipeline import migrate

    with cli.log_to_stderr(log_level):
        move = migrate.resume if is_resumed else migrate.migrate
        result = run_on_spark(lambda session: move(session, job), cluster, long=True)
    use.report(result.to_json(), lambda: _print_result(result), succeeded=result.is_complete)


@cli.command(migrations, "abort")
def abort(use: cli.Use, origin: OriginOptions, endpoints: Endpoints = None) -> None:
    """Return messages that the store does not have yet to their source.

    What it has stays there. Of the runs that have not ended, or of the endpoints named. Exit code 1 if what the store
    has is not as it was.
    """
    job = _create_job(use, origin, endpoints, None, MoveOptions())

    from postdate.pipeline import migrate

    result = migrate.abort(job)
    use.report(result.to_json(), lambda: _print_result(result), succeeded=result.is_exact)


@cli.command(migrations, "status")
def status(use: cli.Use, origin: OriginOptions, endpoints: Endpoints = None) -> None:
    """Show the progress of each run; change nothing."""
    spec = origin.spec()

    from postdate.pipeline import migrate

    result = migrate.status(spec, endpoints)
    use.report(result.to_json(), lambda: _print_status(result))


# --- arguments --------------------------------------------------------------------------------------------------------


def _create_job(
    use: cli.Use,
    origin: OriginOptions,
    endpoints: list[str] | None,
    cutoff: datetime | None,
    move_options: MoveOptions,
) -> MigrateJob:
    spec = origin.spec()

    from postdate.pipeline.migrate import BATCH_SIZE, EVERYTHING, MARGIN, MigrateJob

    endpoint_names, batch_size = tuple(endpoints) if endpoints else None, move_options.batch_size or BATCH_SIZE
    margin = MARGIN if move_options.margin is None else move_options.margin
    return MigrateJob(spec, store_of(use), endpoint_names, cutoff or EVERYTHING, batch_size, margin)


# --- reports ----------------------------------------------------------------------------------------------------------


def _print_preview(result: PreviewResult) -> None:
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
    print_pairs({"from": result.source, "to": result.target})
    for each in result.endpoints:
        print_pairs(
            {
                "endpoint": each.endpoint,
                "  run": each.run_id or "-",
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
            print(f"  problem: {problem}")
        for difference in each.differences:
            print(f"  not the same: {difference.message_id}: {difference.what}")
    print_pairs(
        {"took": f"{result.took_seconds:.1f} s, {result.moved / max(result.took_seconds, 1e-9):,.0f} messages/s"}
    )


def _print_status(result: StatusResult) -> None:
    from postdate.ports.migrating import BatchStatus

    if not result.runs:
        print(f"no migration is recorded in {result.source}")
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
